//! `demo`: one decode and one verify step, compared with the oracle, in words a newcomer
//! understands.

use std::error::Error;

use kda_codegen::Arch;
use kda_reference::Gate;
use kda_tests::{Buffers, Case, Executor, Limits};

use kda_tests::cuda::{CudaExecutor, device_name};
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::placed;

/// Prepares, runs and compares.
///
/// # Errors
///
/// A missing library, or a result outside its bound.
pub fn run() -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let (mut executor, arch): (Box<dyn Executor>, Arch) = match CudaExecutor::new(kernels.clone()) {
        Ok(cuda) => {
            println!("running on {}", device_name()?);
            let arch = cuda.device.arch();
            (Box::new(cuda), arch)
        }
        Err(reason) => {
            println!("no GPU ({reason}): running the kernels' PTX in the emulator");
            let arch = Arch::Sm90a;
            let emulator = EmulatorExecutor::new(arch, kernels.clone());
            (Box::new(emulator), arch)
        }
    };
    for (title, tokens, requests) in [("decode", 1, 3), ("verify", 4, 2)] {
        let limits = Limits {
            gates: vec![Gate::LowerBound { lower_bound: -5.0 }],
            projected_gates: vec![false],
            tokens: vec![tokens],
            ..Limits::default()
        }
        .live();
        let case = Case::sized(7, &limits, 2, requests);
        let mode = executor.modes(&case)[3].clone();
        let kernel = kernels.kernel(&placed::spec(&case, arch, &mode)?)?;
        println!(
            "\n{title}: {} heads, {requests} requests, {tokens} token(s) each, mode {mode}",
            case.shape.heads
        );
        println!(
            "  compiled {} for {arch}: {}",
            kernel.source.entry,
            kernel
                .resources
                .map_or("no report".into(), |r| r.to_string())
        );
        let before = Buffers::new(&case);
        let mut after = before.clone();
        let faults = executor.run(&case, &mode, &mut after)?;
        let errors = case.check(&before, &after, faults.as_ref())?;
        println!(
            "  one launch: conv + SiLU, gate, delta rule, gated norm, caches updated in place"
        );
        println!("  against the f64 oracle, all within bounds:");
        for line in errors.to_string().lines() {
            println!("  {line}");
        }
    }
    println!("\nnext: cargo xtask gen --help, cargo xtask validate --help");
    Ok(())
}
