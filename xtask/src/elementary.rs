//! `elementary`: the kernels' elementary functions over every f32, or every so many, against the bounds
//! that the oracle grants them.

use std::error::Error;
use std::time::Instant;

use clap::Args;
use kda_codegen::Arch;
use kda_tests::cuda;
use kda_tests::elementary::{Elementary, FUNCTIONS};
use kda_tests::kernels::{KernelCache, load_nvrtc};

#[derive(Args)]
pub struct Options {
    /// Every how many-th f32; 1 is a proof for the device at hand
    #[arg(long, default_value_t = 1)]
    stride: u32,
    /// Run in the emulator, whose approximate instructions are exact but for a rounding
    #[arg(long)]
    emulate: bool,
}

/// Prints the worst argument of each function.
///
/// # Errors
///
/// No GPU, or a function outside its bound.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let nvrtc = load_nvrtc()?;
    let started = Instant::now();
    let functions = if options.emulate {
        println!("emulator");
        Elementary::emulated(&nvrtc, Arch::Sm90a)?
    } else {
        let _device = cuda::open_device(&KernelCache::new(nvrtc.clone()))?;
        println!("{}", cuda::device_name()?);
        Elementary::on_device(&nvrtc)?
    };
    println!(
        "{:<20} {:>11}  error/bound  at x            gives           exact",
        "function", "arguments"
    );
    let mut beyond = Vec::new();
    for (function, worst) in FUNCTIONS.iter().zip(functions.worst(options.stride)?) {
        println!(
            "{:<20} {:>11}  {:11.3}  {:<14e}  {:<14e}  {:e}",
            function.name, worst.tried, worst.share, worst.x, worst.found, worst.exact
        );
        if worst.share > 1.0 {
            beyond.push(function.name);
        }
    }
    println!("{:.1} s", started.elapsed().as_secs_f64());
    if beyond.is_empty() {
        Ok(())
    } else {
        Err(format!("outside the bound: {}", beyond.join("; ")).into())
    }
}
