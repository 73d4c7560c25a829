//! From a specialisation to a compiled kernel.
//!
//! ```text
//! KernelSpec ── source::render ──▶ Source ── nvrtc::compile ──▶ CompiledKernel
//!  (typed,        (constants by      (text,     (PTX, cubin,
//!   validated)     tera + plain       entry)     log, resources)
//!                  CUDA files)
//! ```
//!
//! One fallible function per arrow; values are immutable and nothing flows back.
//! [`spec`] and [`operands`] are the kernel's whole vocabulary: what may vary between kernels, and
//! what a launch passes. [`schedule`] holds the integer arithmetic of a mode. Nothing here needs a
//! GPU or a CUDA toolkit; only [`nvrtc`] needs a library, and it says which one it looked for.
//!
//! ```
//! use kda_codegen::{Arch, KernelSpec, Mode, source};
//!
//! let spec = KernelSpec::new(Arch::Sm90a, 12).with_mode(Mode::default());
//! let source = source::render(&spec)?;
//! assert!(source.text.contains("constexpr int HEADS = 12;"));
//! # Ok::<(), kda_codegen::Error>(())
//! ```

mod error;
pub mod nvrtc;
pub mod operands;
pub mod schedule;
pub mod source;
pub mod spec;

pub use error::Error;
pub use nvrtc::{CompiledKernel, Nvrtc, Resources};
pub use schedule::Launch;
pub use source::Source;
pub use spec::{
    Arch, ConvLayout, EarlyReads, GateInput, GateKind, GateSchedule, KernelSpec, Mode, NullRule,
    Role, StateDtype,
};

/// Width of one head's keys and values, in elements.
pub const HEAD_DIM: usize = 128;
/// Taps of the causal convolution.
pub const CONV_WIDTH: usize = 4;
/// Rank of the low-rank gate projection F_B·F_A.
pub const GATE_RANK: usize = 128;
/// Largest head count a specialisation accepts.
pub const MAX_HEADS: usize = 128;
/// Largest number of tokens a request may bring to one verify step.
pub const MAX_TOKENS: usize = 16;
