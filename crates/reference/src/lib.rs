//! What one KDA launch computes, written as plain loops: it owns the meaning of every operand and
//! must not know how a kernel is built, launched or scheduled.
//!
//! Two programs compute the same step from the same operands:
//!
//! * [`step`] in f32, with the kernel's rounding points, in place;
//! * [`oracle`] in f64, without rounding, on copies, together with a bound on what f32 arithmetic
//!   may lose on the very same inputs.
//!
//! Both share [`Shape`] (sizes, strides, settings and the rule which requests are live) and
//! nothing else: the arithmetic is written twice.
//!
//! # Example
//!
//! One decode step of one head from an empty state:
//!
//! ```
//! use half::bf16;
//! use kda_reference::{Gate, Inputs, Pools, Shape, decode_conv_weight, step};
//!
//! let shape = Shape::dense(1, 1, 1, Gate::LowerBound { lower_bound: -5.0 });
//! let (d, pool) = (shape.dim(), shape.pool_slots);
//! let projected = vec![bf16::from_f32(0.5); shape.pitch];
//! let conv_weight = decode_conv_weight(&vec![0.25; 3 * d * 4]).unwrap();
//! let inputs = Inputs {
//!     projected: &projected,
//!     conv_weight: &conv_weight,
//!     conv_bias: None,
//!     f_b: &vec![bf16::from_f32(0.1); d * 128],
//!     gate_input: None,
//!     a_log: &[0.0],
//!     dt_bias: &vec![0.0; d],
//!     norm: &[1.0; 128],
//!     slots: &[1],
//!     accepted: None,
//!     token_counts: None,
//! };
//! let mut conv_cache = vec![bf16::ZERO; pool * 3 * d * shape.conv_len];
//! let mut state = vec![0.0; pool * d * 128];
//! let mut out = vec![bf16::ZERO; d];
//! let pools = Pools { conv_cache: &mut conv_cache, state: &mut state, records: None };
//! let report = step::run(&shape, &inputs, pools, &mut out).unwrap();
//! assert!(report.faults.is_empty());
//! assert!(out.iter().all(|x| x.to_f32() > 0.0));
//! ```

pub mod error;
pub mod loss;
pub mod oracle;
pub mod records;
pub mod shape;
pub mod step;

pub use error::Error;
pub use shape::{
    CONV_WIDTH, ConvLayout, Fault, FaultKind, Gate, HEAD_DIM, Inputs, Metadata, NullRule, Plan,
    Pools, RecordShape, Report, Shape, StateType, decode_conv_weight,
};
