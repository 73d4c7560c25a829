//! `validate`: random cases against the oracle, golden vectors, identity pairs; on the GPU or in
//! the emulator, several jobs side by side.

use std::error::Error;
use std::sync::Mutex;
use std::time::Instant;

use clap::Args;
use kda_codegen::Arch;
use kda_tests::{Case, Executor, Limits, fixtures, identity, replay, run_property};

use kda_tests::cuda::CudaExecutor;
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::placed;

#[derive(Args, Clone)]
pub struct Options {
    /// Random cases against the oracle
    #[arg(long, default_value_t = 200)]
    pub cases: u64,
    /// Random cases for each identity check (modes, batch, layouts, strides, verify and decode,
    /// faults, NaN containment, repeat)
    #[arg(long, default_value_t = 0)]
    pub identity: u64,
    /// Compare with the golden vectors too
    #[arg(long)]
    pub fixtures: bool,
    /// Run in the PTX emulator instead of on the GPU
    #[arg(long)]
    pub emulate: bool,
    /// Architecture whose kernels the emulator runs
    #[arg(long, default_value = "sm_90a")]
    pub arch: Arch,
    /// Seed of the random cases
    #[arg(long, default_value_t = 0x6b6461)]
    pub seed: u64,
    /// Run the one case of this seed, as a failure printed it, in every mode
    #[arg(long)]
    pub replay: Option<u64>,
    /// Largest number of heads
    #[arg(long)]
    pub max_heads: Option<usize>,
    /// Numbers of tokens to draw from
    #[arg(long, value_delimiter = ',')]
    pub tokens: Option<Vec<usize>>,
    /// Different specialisations the cases share; each compiles once a mode
    #[arg(long, default_value_t = 64)]
    pub specialisations: u64,
    /// Cases run side by side; 0: one for each core
    #[arg(long, default_value_t = 0)]
    pub jobs: usize,
}

impl Options {
    fn limits(&self) -> Limits {
        let mut limits = if self.emulate {
            Limits::small()
        } else {
            Limits::default()
        };
        if let Some(heads) = self.max_heads {
            limits.max_heads = heads;
        }
        if let Some(tokens) = &self.tokens {
            limits.tokens = tokens.clone();
        }
        limits.specialisations = self.specialisations;
        limits
    }

    fn executor(
        &self,
        kernels: &KernelCache,
        job: u64,
    ) -> Result<Box<dyn Executor>, Box<dyn Error>> {
        if self.emulate {
            let seed = self.seed.wrapping_add(job << 32);
            return Ok(Box::new(EmulatorExecutor::new(
                self.arch,
                kernels.clone(),
                seed,
            )));
        }
        Ok(Box::new(CudaExecutor::new(kernels.clone())?))
    }
}

/// Runs what the options ask for.
///
/// # Errors
///
/// The first failure of any job.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let limits = options.limits();
    let mut first = options.executor(&kernels, 0)?;
    if let Some(seed) = options.replay {
        println!("{}", replay(&mut *first, seed, &limits)?);
        return Ok(());
    }
    println!("{}", first.name());
    precompile(options, &kernels, &limits);
    if options.fixtures {
        let errors = fixtures::check(&mut *first, &fixtures::embedded())?;
        println!("golden vectors: all modes agree\n{errors}");
    }
    let jobs = match options.jobs {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        jobs => jobs,
    } as u64;
    let started = Instant::now();
    let failure: Mutex<Option<String>> = Mutex::new(None);
    let share = |total: u64, job: u64| total / jobs + u64::from(job < total % jobs);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for job in 0..jobs {
            let (kernels, limits, failure, results) = (&kernels, &limits, &failure, &results);
            scope.spawn(move || {
                let work = || -> Result<_, Box<dyn Error>> {
                    let mut executor = options.executor(kernels, job)?;
                    let seed = options
                        .seed
                        .wrapping_add(job.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    let cases = share(options.cases, job);
                    let summary = run_property(&mut *executor, cases, seed, limits, &mut |_| {})?;
                    let pairs = share(options.identity, job);
                    identity::run_all(&mut *executor, pairs, seed, limits, &mut |_, _| {})?;
                    Ok(summary)
                };
                match work() {
                    Ok(summary) => results.lock().expect("no job panics").push(summary),
                    Err(error) => {
                        failure
                            .lock()
                            .expect("no job panics")
                            .get_or_insert(error.to_string());
                    }
                }
            });
        }
    });
    if let Some(failure) = failure.into_inner().expect("no job panics") {
        return Err(failure.into());
    }
    let mut summaries = results.into_inner().expect("no job panics").into_iter();
    if let Some(mut all) = summaries.next() {
        for summary in summaries {
            all.merge(&summary);
        }
        all.covered()?;
        all.seed = options.seed;
        all.seconds = started.elapsed().as_secs_f64();
        print!("{all}");
    }
    if options.identity > 0 {
        println!("identity: {} cases for each of:", options.identity);
        for (name, _) in identity::CHECKS {
            println!("  {name}");
        }
    }
    Ok(())
}

/// Compiles on all cores what the jobs will ask for.
fn precompile(options: &Options, kernels: &KernelCache, limits: &Limits) {
    if options.emulate || options.specialisations == 0 {
        return;
    }
    let Ok(device) = kda_runtime::Device::primary(0) else {
        return;
    };
    let mut specs = std::collections::BTreeSet::new();
    for seed in 0..options.specialisations * 6 {
        let case = Case::random(seed, limits);
        for mode in placed::mode_texts(device.arch()) {
            specs.extend(placed::spec(&case, device.arch(), &mode));
        }
    }
    kernels.compile_all(&specs.into_iter().collect::<Vec<_>>());
}
