//! Random KDA launches, whoever runs them, and the judgement of their results.
//!
//! ```text
//! Limits ─ Case::random(seed) ─▶ Case ─ Buffers::new ─▶ Buffers ─ Executor::run ─▶ Buffers
//!                                 │                        └────────┬────────────────┘
//!                                 └───────────────────────▶ Case::check ─▶ Errors or Mismatch
//! ```
//!
//! [`run_property`] does this for many seeds and says what they covered; [`identity`] compares
//! launches with each other, bit for bit; [`fixtures`] compares with values computed by public
//! code. A failure names the seed, and the same seed and limits replay it. None of these knows a
//! kernel: an executor brings it. [`emulate`] is the one that needs no GPU, [`placed`] says a case in
//! the runtime's words, [`kernels`] compiles.
//!
//! ```
//! use kda_tests::{Buffers, Case, Executor, ReferenceExecutor};
//!
//! let case = Case::from_seed(7);
//! let before = Buffers::new(&case);
//! let mut after = before.clone();
//! let faults = ReferenceExecutor.run(&case, "scalar", &mut after).unwrap();
//! let errors = case.check(&before, &after, faults.as_ref()).unwrap();
//! assert!(errors.out_ulps <= 1.0);
//! ```

mod buffers;
mod case;
pub mod cases;
mod check;
mod coverage;
pub mod cuda;
mod data;
pub mod elementary;
pub mod emulate;
mod errors;
mod executor;
pub mod fixtures;
pub mod identity;
pub mod kernels;
mod limits;
mod locate;
mod mismatch;
pub mod pages;
pub mod placed;
mod property;
pub mod replay;
pub mod rng;
mod scratch;
mod slots;
pub mod soak;
mod spread;
mod strategy;

pub use buffers::{Buffers, GUARD, POISON_BF16, POISON_F32, Region};
pub use case::{Case, Skew, Views, gate_name, layout_name, null_name, state_bytes, state_name};
pub use coverage::Coverage;
pub use data::{Data, MATRIX, Regime};
pub use errors::{Errors, OUT_SLACK, OUT_TERMS_SLACK, OUT_ULPS, STATE_FLUSH, STATE_STEP, bf16_ulp};
pub use executor::{Executor, Faults, ReferenceExecutor, Scripted};
pub use limits::Limits;
pub use mismatch::{Mismatch, Requirement};
pub use property::{COVERING_CASES, Share, Summary, judge, replay, run_property, run_share};
pub use scratch::scratch;
pub use spread::Spread;
pub use strategy::{case_strategy, property_config};
