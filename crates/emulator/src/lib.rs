//! Executes the PTX of the KDA kernels on a CPU and checks every access, barrier and ordering.
#![forbid(unsafe_code)]
mod access;
mod alu;
mod asynchronous;
mod clock;
mod collective;
mod decode;
mod decode_arith;
mod decode_memory;
mod error;
mod ir;
mod launch;
mod lexer;
mod machine;
mod math;
mod memory;
mod parse;
mod race;
mod sync;
mod warp;

pub use error::{AccessKind, AddressSpace, Error, Place, Site, Waiting};
pub use launch::{Launch, Options, Param, Report};
pub use memory::Memory;
pub use parse::Module;
