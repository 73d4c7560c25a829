//! The engine in miniature of `tests/engine` over the emulated driver: its own Cargo project, built
//! and run as an engine's would be.

use std::error::Error;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kda_codegen::Arch;
use kda_runtime::{Config, Plan, Policies, StepKind};
use kda_tests::kernels::{KernelCache, load_nvrtc};

use crate::{driver, generate};

/// Where the emulated driver is put.
pub const DRIVER: &str = "target/engine/driver";

/// Settings of the runs, side by side: as deep as Kimi K3 for a few steps, and long enough for
/// requests to come and go.
const RUNS: [&[&str]; 2] = [
    &["--layers", "69", "--steps", "4", "--seed", "6"],
    &["--layers", "4", "--steps", "30", "--seed", "2"],
];

/// Runs it and prints what it said.
///
/// # Errors
///
/// It does not build, or an answer differs from the plain loop's.
pub fn run() -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let driver = Path::new(DRIVER);
    driver::put(driver)?;
    let bundle = driver.with_file_name("kda.bundle");
    let config = Config::kimi_k3(1);
    let mut kinds = vec![StepKind::Decode];
    kinds.extend([1, 2, 4].map(StepKind::Verify));
    let policies = Policies::for_device(Arch::Sm90a, &config, &kinds);
    let plan = Plan::new(Arch::Sm90a, &config, &policies)?;
    generate::bundle(&bundle, &kernels, plan.kernels(), true)?;

    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = "tests/engine/Cargo.toml";
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--locked", "--manifest-path", manifest])
        .args(["--target-dir", "target"])
        .status()?;
    if !built.success() {
        return Err(format!("{manifest} does not build").into());
    }
    let start = |settings: &[&str]| -> std::io::Result<Child> {
        Command::new("target/debug/engine")
            .arg(&bundle)
            .args(settings)
            .env("LD_LIBRARY_PATH", driver.canonicalize()?)
            .stdout(Stdio::piped())
            .spawn()
    };
    let running = RUNS.map(start);
    for child in running {
        let ended = child?.wait_with_output()?;
        print!("{}", String::from_utf8_lossy(&ended.stdout));
        if !ended.status.success() {
            return Err("the engine's answers are not the plain loop's".into());
        }
    }
    Ok(())
}
