//! Owns the run of many random cases and its summary; must not know how a case is judged.

use std::fmt;
use std::time::Instant;

use crate::case::Case;
use crate::coverage::Coverage;
use crate::errors::Errors;
use crate::executor::Executor;
use crate::identity::launch;
use crate::limits::Limits;
use crate::mismatch::{Mismatch, Requirement};
use crate::rng::Rng;

/// From this many cases on, a run fails unless it reached every value of every dimension.
pub const COVERING_CASES: u64 = 200;

/// What a passing run did.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Who ran the launches.
    pub executor: String,
    /// What the cases were drawn from.
    pub seed: u64,
    /// Cases.
    pub cases: u64,
    /// Launches.
    pub launches: u64,
    /// Worst errors of all cases.
    pub errors: Errors,
    /// Wall time, in seconds.
    pub seconds: f64,
    /// What the cases reached.
    pub coverage: Coverage,
}

impl Summary {
    /// Adds what another run of the same executor and limits did; seconds add up.
    pub fn merge(&mut self, other: &Summary) {
        self.cases += other.cases;
        self.launches += other.launches;
        self.errors.merge(&other.errors);
        self.seconds += other.seconds;
        self.coverage.merge(&other.coverage);
    }

    /// Checks that [`COVERING_CASES`] or more reached every value of every dimension.
    ///
    /// # Errors
    ///
    /// The values that no case reached.
    pub fn covered(&self) -> Result<(), Mismatch> {
        let missing = self.coverage.missing();
        if self.cases < COVERING_CASES || missing.is_empty() {
            return Ok(());
        }
        Err(Mismatch::new("cases", Requirement::Covered).at(missing.join(", ")))
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary {
            executor,
            seed,
            cases,
            launches,
            errors,
            seconds,
            coverage,
        } = self;
        writeln!(
            f,
            "{executor}: {cases} cases, {launches} launches, {seconds:.1} s, seed {seed:#x}: all \
             within bounds"
        )?;
        writeln!(f, "{errors}\n\n{coverage}")
    }
}

/// The part of a run's cases that one of several jobs runs: together the jobs run what one job
/// would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// This job, below `of`.
    pub index: u64,
    /// Jobs, at least 1.
    pub of: u64,
}

impl Share {
    /// All of a run.
    pub const WHOLE: Share = Share { index: 0, of: 1 };

    /// Numbers of this share's cases, of `cases` in all.
    pub fn cases(self, cases: u64) -> impl Iterator<Item = u64> {
        (self.index..cases).step_by(self.of.max(1) as usize)
    }
}

/// Runs `cases` random cases, each in one mode, in turn, and judges them against the oracle.
/// `progress` hears the number of cases done.
///
/// # Errors
///
/// The first case that fails, with its seed, for [`replay`]; or, in a run of [`COVERING_CASES`] and
/// more, values that no case reached.
pub fn run_property(
    executor: &mut dyn Executor,
    cases: u64,
    seed: u64,
    limits: &Limits,
    progress: &mut dyn FnMut(u64),
) -> Result<Summary, Mismatch> {
    let summary = run_share(executor, cases, Share::WHOLE, seed, limits, progress)?;
    summary.covered()?;
    Ok(summary)
}

/// As [`run_property`], the cases of one share only; what they cover is not checked.
///
/// # Errors
///
/// The first case of the share that fails, with its number in the run.
pub fn run_share(
    executor: &mut dyn Executor,
    cases: u64,
    share: Share,
    seed: u64,
    limits: &Limits,
    progress: &mut dyn FnMut(u64),
) -> Result<Summary, Mismatch> {
    let started = Instant::now();
    let mut summary = Summary {
        executor: executor.name(),
        seed,
        cases: 0,
        launches: 0,
        errors: Errors::default(),
        seconds: 0.0,
        coverage: Coverage::new(limits),
    };
    for i in share.cases(cases) {
        let case = Case::random(Rng::stream(seed, i).word(), limits);
        let modes = executor.modes(&case);
        let mode = &modes[i as usize % modes.len()];
        let errors = judge(executor, &case, mode).map_err(|mismatch| mismatch.numbered(i))?;
        summary.errors.merge(&errors);
        summary.coverage.add(&case, mode);
        summary.cases += 1;
        summary.launches += 1;
        progress(summary.cases);
    }
    summary.seconds = started.elapsed().as_secs_f64();
    Ok(summary)
}

/// Runs the case of one seed in every mode.
///
/// # Errors
///
/// The first mode that fails.
pub fn replay(executor: &mut dyn Executor, seed: u64, limits: &Limits) -> Result<Errors, Mismatch> {
    let case = Case::random(seed, limits);
    let mut errors = Errors::default();
    for mode in executor.modes(&case) {
        errors.merge(&judge(executor, &case, &mode)?);
    }
    Ok(errors)
}

/// Runs one case in one mode and judges it.
///
/// # Errors
///
/// What [`Case::check`] finds, or what kept the launch from running.
pub fn judge(executor: &mut dyn Executor, case: &Case, mode: &str) -> Result<Errors, Mismatch> {
    let (before, after, faults) = launch(executor, case, mode)?;
    case.check(&before, &after, faults.as_ref())
        .map_err(|mismatch| mismatch.within(format!("{}, mode {mode}", executor.name())))
}
