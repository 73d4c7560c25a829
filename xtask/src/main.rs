//! The project's commands. Each verb is one file; none holds library logic.

mod accuracy;
mod agree;
mod bench;
mod cases;
mod demo;
mod driver;
mod elementary;
mod engine;
mod generate;
mod launch_cost;
mod mutate;
mod soak;
mod test;
mod tune;
mod validate;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Generate, prove and time the KDA kernels"
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a decode and a verify step and compare them with the reference: on the GPU if there is
    /// one, else in the emulator
    Demo,
    /// Render and compile kernels: source, PTX, cubin and a manifest for each
    Gen(generate::Options),
    /// Put the emulated CUDA driver into a folder: an engine's own tests find it in place of libcuda
    Driver(driver::Options),
    /// Run the engine in miniature over the emulated driver and compare its answers with a plain loop
    Engine,
    /// Compare kernels with the oracle, the golden vectors and each other
    Validate(validate::Options),
    /// One request over thousands of decode steps: what f32 and bf16 states lose with time
    Accuracy(accuracy::Options),
    /// Compare the emulator with the GPU on the same random cases
    Agree(agree::Options),
    /// The kernels' elementary functions over every f32, against the bounds that the oracle grants
    Elementary(elementary::Options),
    /// Everything that needs no GPU: unit and property tests, every kernel compiled, the emulator
    Test(test::Options),
    /// Prove every barrier, wait, fence and bounds check of the templates necessary: delete each
    /// and expect the emulated validation to fail
    Mutate(mutate::Options),
    /// Serve random requests for minutes, every step compared with the oracle
    Soak(soak::Options),
    /// List the cases that users met, and the tests that bear their ids
    Cases,
    /// Time steps on the GPU: layers in one graph, cold caches, checked outputs
    Bench(bench::Options),
    /// Time every legal mode on the GPU, against the default policy
    Tune(tune::Options),
    /// Host time of a launch on the GPU, against a bare cuLaunchKernelEx
    LaunchCost(launch_cost::Options),
}

fn main() -> ExitCode {
    let result: Result<(), Box<dyn Error>> = match Cli::parse().verb {
        Verb::Demo => demo::run(),
        Verb::Gen(options) => generate::run(&options),
        Verb::Driver(options) => driver::run(&options),
        Verb::Engine => engine::run(),
        Verb::Accuracy(options) => accuracy::run(&options),
        Verb::Agree(options) => agree::run(&options),
        Verb::Elementary(options) => elementary::run(&options),
        Verb::Validate(options) => validate::run(&options),
        Verb::Test(options) => test::run(&options),
        Verb::Mutate(options) => mutate::run(&options),
        Verb::Soak(options) => soak::run(&options),
        Verb::Cases => cases::run(),
        Verb::Bench(options) => bench::run(&options),
        Verb::Tune(options) => tune::run(&options),
        Verb::LaunchCost(options) => launch_cost::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
