//! `bench`: times steps on the GPU.

use std::error::Error;

use clap::Args;

#[derive(Args)]
pub struct Options {}

/// Times.
///
/// # Errors
///
/// No GPU.
pub fn run(_: &Options) -> Result<(), Box<dyn Error>> {
    Err("not written".into())
}
