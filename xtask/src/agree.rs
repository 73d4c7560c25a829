//! `agree`: the emulator against the GPU on the same random cases. Both must keep the oracle's
//! bounds; the worst difference between them is printed.

use std::error::Error;
use std::sync::Mutex;

use clap::Args;
use kda_codegen::Arch;
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, bf16_ulp};

use kda_tests::cuda::CudaExecutor;
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};

#[derive(Args)]
pub struct Options {
    /// Random cases
    #[arg(long, default_value_t = 500)]
    cases: u64,
    /// Seed of the random cases
    #[arg(long, default_value_t = 0x6b6461)]
    seed: u64,
}

/// Worst differences between the two.
#[derive(Default)]
struct Worst {
    out_ulps: f64,
    state_relative: f64,
    identical: u64,
}

/// Runs every case on both.
///
/// # Errors
///
/// A case outside the oracle's bounds on either, or no GPU.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let limits = Limits {
        tokens: vec![1, 1, 2, 3, 4, 8],
        specialisations: 48,
        ..Limits::small()
    };
    let arch = CudaExecutor::new(kernels.clone())?.device.arch();
    let worst = Mutex::new(Worst::default());
    let failure: Mutex<Option<String>> = Mutex::new(None);
    let jobs = std::thread::available_parallelism().map_or(1, |n| n.get()) as u64;
    std::thread::scope(|scope| {
        for job in 0..jobs {
            let (kernels, limits, worst, failure) = (&kernels, &limits, &worst, &failure);
            scope.spawn(move || {
                let cases = (job..options.cases).step_by(jobs as usize);
                if let Err(error) = share(cases, options.seed, arch, kernels, limits, worst) {
                    failure
                        .lock()
                        .expect("no job panics")
                        .get_or_insert(error.to_string());
                }
            });
        }
    });
    if let Some(failure) = failure.into_inner().expect("no job panics") {
        return Err(failure.into());
    }
    let worst = worst.into_inner().expect("no job panics");
    println!(
        "{} cases on the GPU and in the emulator, both within the oracle's bounds",
        options.cases
    );
    println!("{} left identical bytes everywhere", worst.identical);
    println!(
        "worst difference of out: {:.3} bf16 ulps of the row's largest",
        worst.out_ulps
    );
    println!(
        "worst difference of a state matrix: {:.3e} (Frobenius, relative)",
        worst.state_relative
    );
    Ok(())
}

fn share(
    cases: impl Iterator<Item = u64>,
    seed: u64,
    arch: Arch,
    kernels: &KernelCache,
    limits: &Limits,
    worst: &Mutex<Worst>,
) -> Result<(), Box<dyn Error>> {
    let mut cuda = CudaExecutor::new(kernels.clone())?;
    let mut emulator = EmulatorExecutor::new(arch, kernels.clone());
    for i in cases {
        let case = Case::random(Rng::stream(seed, i).word(), limits);
        let modes = cuda.modes(&case);
        let mode = &modes[i as usize % modes.len()];
        let before = Buffers::new(&case);
        let mut results = Vec::new();
        for executor in [&mut cuda as &mut dyn Executor, &mut emulator] {
            let mut after = before.clone();
            let faults = executor.run(&case, mode, &mut after)?;
            case.check(&before, &after, faults.as_ref())
                .map_err(|mismatch| format!("{}: {mismatch}", executor.name()))?;
            results.push(after);
        }
        compare(
            &case,
            &results[0],
            &results[1],
            &mut worst.lock().expect("no job panics"),
        );
    }
    Ok(())
}

fn compare(case: &Case, a: &Buffers, b: &Buffers, worst: &mut Worst) {
    let shape = &case.shape;
    let identical = a
        .regions()
        .into_iter()
        .zip(b.regions())
        .all(|(a, b)| a == b);
    worst.identical += u64::from(identical);
    if identical {
        return;
    }
    for row in 0..shape.rows() {
        let at = |buffers: &Buffers, column: usize| {
            buffers.out.bf16(row * shape.out_stride + column).to_f64()
        };
        let largest = (0..shape.dim()).fold(0.0f64, |m, column| m.max(at(a, column).abs()));
        for column in 0..shape.dim() {
            let ulps = (at(a, column) - at(b, column)).abs() / bf16_ulp(largest);
            worst.out_ulps = worst.out_ulps.max(ulps);
        }
    }
    for slot in 0..shape.pool_slots {
        let (left, right) = (a.states(shape, slot), b.states(shape, slot));
        for (left, right) in left
            .chunks_exact(128 * 128)
            .zip(right.chunks_exact(128 * 128))
        {
            let (mut difference, mut size) = (0.0, 0.0);
            for (&l, &r) in left.iter().zip(right) {
                difference += (f64::from(l) - f64::from(r)).powi(2);
                size += f64::from(l).powi(2);
            }
            // Poison is NaN and identical; a matrix of zeros has no relative error.
            if size > 0.0 {
                worst.state_relative = worst.state_relative.max((difference / size).sqrt());
            }
        }
    }
}
