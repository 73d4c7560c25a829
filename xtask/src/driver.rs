//! `driver`: the emulated CUDA driver in a folder, for a program to find in place of libcuda.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use kda_tests::cuda::put_emulated_driver;

#[derive(Args)]
pub struct Options {
    /// Folder to write libcuda.so and libcuda.so.1 to
    #[arg(long, default_value = "target/emulated-driver")]
    out: PathBuf,
}

/// Builds the driver and puts it there.
///
/// # Errors
///
/// It does not build, or the folder cannot be written.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    put(&options.out)?;
    println!(
        "LD_LIBRARY_PATH={} makes a program find it; kernels must be PTX: cargo xtask gen --bundle FILE \
         --ptx",
        options.out.canonicalize()?.display()
    );
    Ok(())
}

/// Builds the driver with the profile of this program and puts it into `folder`.
///
/// # Errors
///
/// As [`run`].
pub fn put(folder: &Path) -> Result<(), Box<dyn Error>> {
    let executable = std::env::current_exe()?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--package", "kda-emulated-driver"]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    if !build.status()?.success() {
        return Err("the emulated driver does not build".into());
    }
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    put_emulated_driver(&executable, folder)?;
    Ok(())
}
