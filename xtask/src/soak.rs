//! `soak`: several small engines serve random requests, each step judged; on the GPU as graph replays
//! on a stream each, or in the emulator.

use std::error::Error;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;
use kda_codegen::Arch;
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::replay::ReplayExecutor;
use kda_tests::rng::Rng;
use kda_tests::soak::{Tally, World, serve};
use kda_tests::{Executor, Mismatch};

#[derive(Args, Clone)]
pub struct Options {
    /// How long to go on
    #[arg(long, default_value_t = 10.0, conflicts_with = "steps")]
    pub minutes: f64,
    /// Steps of each world instead of a time; the same number and seed do the same again
    #[arg(long)]
    pub steps: Option<u64>,
    /// Run in the PTX emulator instead of on the GPU
    #[arg(long)]
    pub emulate: bool,
    /// Architecture whose kernels the emulator runs
    #[arg(long, default_value = "sm_90a")]
    pub arch: Arch,
    /// Heads of a world
    #[arg(long, default_value_t = 1)]
    pub heads: usize,
    /// Worlds served side by side, each on its own thread and stream
    #[arg(long, default_value_t = 2)]
    pub worlds: u64,
    /// Steps after which a world gives way to one with other settings
    #[arg(long, default_value_t = 500)]
    pub lifetime: u64,
    /// Seed of everything that happens
    #[arg(long, default_value_t = 0x6b6461)]
    pub seed: u64,
}

/// Serves until the time or the steps are over.
///
/// # Errors
///
/// The first wrong step, with its world and its number: the same seed replays it.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let started = Instant::now();
    let results: Mutex<Vec<Result<Tally, String>>> = Mutex::default();
    let progress = Progress::new(started);
    let failed = || {
        results
            .lock()
            .expect("no thread panics")
            .iter()
            .any(Result::is_err)
    };
    std::thread::scope(|scope| {
        for world in 0..options.worlds {
            let (kernels, results, failed, progress) = (&kernels, &results, &failed, &progress);
            scope.spawn(move || {
                let served = line(options, kernels, world, progress, failed);
                let served = served.map_err(|error| error.to_string());
                results.lock().expect("no thread panics").push(served);
            });
        }
    });
    let mut all = Tally::default();
    for served in results.into_inner().expect("no thread panics") {
        all.merge(&served.map_err(|error| format!("{error}; seed {:#x}", options.seed))?);
    }
    println!(
        "{} worlds side by side, {:.0} s, seed {:#x}: every step as it had to be",
        options.worlds,
        started.elapsed().as_secs_f64(),
        options.seed
    );
    println!("{all}");
    Ok(())
}

/// Steps of all worlds, said twice a minute.
struct Progress {
    started: Instant,
    /// How many, and when that was said last.
    steps: Mutex<(u64, Instant)>,
}

impl Progress {
    const PAUSE: Duration = Duration::from_secs(30);

    fn new(started: Instant) -> Progress {
        Progress {
            started,
            steps: Mutex::new((0, started)),
        }
    }

    /// A world is about to make a step.
    fn step(&self) {
        let (steps, said) = &mut *self.steps.lock().expect("no thread panics");
        *steps += 1;
        if said.elapsed() >= Progress::PAUSE {
            *said = Instant::now();
            let seconds = self.started.elapsed().as_secs();
            println!("{seconds} s, {steps} steps, none wrong so far");
        }
    }
}

/// Serves one world after another.
fn line(
    options: &Options,
    kernels: &KernelCache,
    world: u64,
    progress: &Progress,
    failed: &dyn Fn() -> bool,
) -> Result<Tally, Box<dyn Error>> {
    let mut seeds = Rng::stream(options.seed, world);
    let mut all = Tally::default();
    let over = |done: u64| match options.steps {
        Some(steps) => done >= steps,
        None => progress.started.elapsed() >= Duration::from_secs_f64(60.0 * options.minutes),
    };
    while !over(all.steps) && !failed() {
        let mut world = World::new(seeds.word(), options.heads);
        let mut executor: Box<dyn Executor> = if options.emulate {
            let emulator = EmulatorExecutor::new(options.arch, kernels.clone());
            Box::new(emulator.seed(seeds.word()))
        } else {
            Box::new(ReplayExecutor::new(kernels, &world)?)
        };
        let before = all.steps;
        let served: Result<Tally, Mismatch> = serve(&mut world, &mut *executor, |tally| {
            progress.step();
            tally.steps < options.lifetime && !over(before + tally.steps) && !failed()
        });
        all.merge(&served?);
    }
    Ok(all)
}
