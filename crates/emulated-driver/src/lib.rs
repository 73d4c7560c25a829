//! A CUDA driver library for machines without a GPU: `libkda_emulated_cuda.so` has the functions of
//! `libcuda.so` that engines need around a KDA step, and runs kernels in the PTX emulator with every
//! check it has. An engine's tests, in any language, exercise their real launch path with it.
//!
//! # Use
//! Put the library into a folder of its own as `libcuda.so.1` and `libcuda.so`, and start the
//! program with that folder in `LD_LIBRARY_PATH` (`cargo xtask driver --out FOLDER` does the first
//! half). Kernels must be PTX, since nothing here can execute a cubin: `cargo xtask gen --bundle FILE
//! --ptx` writes a bundle of them.
//!
//! # What it is
//! - Device memory is host memory at its own address, so a test may fill and read it directly. It is
//!   filled with `0xff` when allocated: a NaN in every float type, -1 in every integer.
//! - Every call completes before it returns; events keep their order and no time. That is one legal
//!   behaviour of a stream: work of several streams never overlaps, and a missing wait between two
//!   streams is not found.
//! - Captures, graphs and their replays work as the driver's, for kernels, copies and fills. What a
//!   capture forbids fails with the driver's code and invalidates it.
//! - A kernel that the emulator finds at fault fails its launch with
//!   `CUDA_ERROR_ILLEGAL_ADDRESS` or `CUDA_ERROR_LAUNCH_FAILED`, and so does every later call in that
//!   context that a real driver would fail. [`kda_emulated_last_error`] tells what it was, with the
//!   PTX line; it is printed to stderr as well.
//! - Contexts are checked as by the driver: a stream, function or buffer of another context is an
//!   error. There may be several devices.
//!
//! # Environment, read by `cuInit`
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `KDA_EMULATED_DEVICES` | number of devices | 1 |
//! | `KDA_EMULATED_CAPABILITY` | compute capability of each, `9.0,8.0`; the last one serves the rest | 9.0 |
//! | `KDA_EMULATED_SEED` | order in which warps run | 0 |
//!
//! It tells nothing about speed.

mod exports;
mod state;

pub use exports::*;
pub use state::{Counts, DRIVER_VERSION};
