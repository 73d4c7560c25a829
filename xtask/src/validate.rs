//! `validate`: random cases against the oracle, golden vectors, identity pairs; on the GPU or in
//! the emulator, several jobs side by side.

use std::error::Error;
use std::time::Instant;

use clap::Args;
use kda_codegen::Arch;
use kda_tests::{Case, Executor, Limits, Mismatch, Share, fixtures, identity, replay, run_share};

use kda_tests::cuda::CudaExecutor;
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::placed;

use crate::test;

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
    /// Architecture of the kernels: in the emulator any, sm_90a if not given; on the GPU its own if not
    /// given, or an older one, whose PTX the driver compiles
    #[arg(long)]
    pub arch: Option<Arch>,
    /// Seed of the random cases
    #[arg(long, default_value_t = test::SEED)]
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
    /// Different specialisations the cases share, each compiled once a mode; 0: no limit
    #[arg(long, default_value_t = 64)]
    pub specialisations: u64,
    /// Cases run side by side, which changes no result; 0: one for each core
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
            if limits.many_heads > heads {
                limits.many_heads = 0;
            }
        }
        if let Some(tokens) = &self.tokens {
            limits.tokens = tokens.clone();
        }
        limits.specialisations = self.specialisations;
        limits
    }

    fn executor(&self, kernels: &KernelCache) -> Result<Box<dyn Executor>, Box<dyn Error>> {
        if self.emulate {
            let arch = self.arch.unwrap_or(Arch::Sm90a);
            return Ok(Box::new(EmulatorExecutor::new(arch, kernels.clone())));
        }
        Ok(Box::new(match self.arch {
            Some(arch) => CudaExecutor::with_arch(kernels.clone(), arch)?,
            None => CudaExecutor::new(kernels.clone())?,
        }))
    }

    /// Runs `work` in every job, each with an executor and its share of the cases.
    ///
    /// # Errors
    ///
    /// The failure of the lowest case, which is the one that a single job would have found.
    fn in_jobs<T: Send>(
        &self,
        kernels: &KernelCache,
        work: impl Fn(&mut dyn Executor, Share) -> Result<T, Mismatch> + Sync,
    ) -> Result<Vec<T>, Box<dyn Error>> {
        let jobs = match self.jobs {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            jobs => jobs,
        } as u64;
        let job = |index: u64| -> Result<T, (u32, String)> {
            let mut executor = self
                .executor(kernels)
                .map_err(|error| (0, error.to_string()))?;
            let share = Share { index, of: jobs };
            work(&mut *executor, share).map_err(|mismatch| (mismatch.number, mismatch.to_string()))
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..jobs).map(|i| scope.spawn(move || job(i))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|result| result.expect("no job panics"))
                .collect()
        });
        let (mut done, mut failures) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                Ok(result) => done.push(result),
                Err(failure) => failures.push(failure),
            }
        }
        match failures.into_iter().min() {
            Some((_, text)) => Err(text.into()),
            None => Ok(done),
        }
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
    let mut first = options.executor(&kernels)?;
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
    let started = Instant::now();
    let (cases, seed) = (options.cases, options.seed);
    let summaries = options.in_jobs(&kernels, |executor, share| {
        run_share(executor, cases, share, seed, &limits, &mut |_| {})
    })?;
    let all = summaries.into_iter().reduce(|mut all, summary| {
        all.merge(&summary);
        all
    });
    if let Some(mut all) = all {
        all.covered()?;
        all.seconds = started.elapsed().as_secs_f64();
        print!("{all}");
    }
    options.in_jobs(&kernels, |executor, share| {
        identity::run_share(
            executor,
            options.identity,
            share,
            seed,
            &limits,
            &mut |_| {},
        )
    })?;
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
    let arch = options.arch.unwrap_or(device.arch());
    let mut specs = std::collections::BTreeSet::new();
    for seed in 0..options.specialisations * 6 {
        let case = Case::random(seed, limits);
        for mode in placed::mode_texts(arch, placed::gate_input(&case)) {
            specs.extend(placed::spec(&case, arch, &mode));
        }
    }
    kernels.compile_all(&specs.into_iter().collect::<Vec<_>>());
}
