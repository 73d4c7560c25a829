//! One launch for a Kimi Delta Attention decode or verify step.
//!
//! ```no_run
//! use kda_runtime::{Config, Device, KernelSources, Policies, PreparedKda, StepKind};
//! # fn decode(stream: kda_runtime::Stream, step: &kda_runtime::Step) -> Result<(), kda_runtime::Error> {
//! let device = Device::primary(0)?;
//! let config = Config::kimi_k3(12);
//! let kinds = [StepKind::Decode, StepKind::Verify(4)];
//! let policies = Policies::for_device(&device, &config, &kinds);
//! // Compiles and loads; everything slow happens here.
//! let kda = PreparedKda::prepare_caches(&device, stream, &config, &policies, &KernelSources::standard())?;
//! // One kernel launch; fine inside a graph capture.
//! // SAFETY: the step's buffers are live device memory of the stated sizes.
//! unsafe { kda.run(stream, step) }?;
//! if let Some(faults) = kda.take_faults(stream)? {
//!     eprintln!("request {} was refused: {:?}", faults.request, faults.kind);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Config`] holds a model's settings, [`Policies`] which schedule serves which batch, measured or
//! read from a [`PolicyFile`], [`Step`] the operands. [`Plan`] turns a step into plain launch data without touching a device;
//! [`PreparedKda`] hands that data to the CUDA driver. [`KernelSources`] says where kernels come
//! from: a [`KernelBundle`] that the engine ships, a [`DiskCache`], NVRTC.

mod bundle;
mod cache;
mod config;
mod device;
mod error;
mod kernels;
mod key;
mod policy_file;
mod prepared;
mod reset;
mod residence;
mod step;
mod weights;

pub use bundle::{Defect, Difference, KernelBundle, encode_bundle};
pub use cache::{CACHE_VARIABLE, DiskCache};
pub use config::{Config, Gate, Policies, Policy, StepKind, Target};
pub use device::{Device, Stream};
pub use error::Error;
pub use kda_codegen::{
    Arch, ConvLayout, EarlyReads, GateInput, Mode, NullRule, Rollback, StateDtype,
};
pub use kernels::{Kernel, KernelSources, Kernels, Origin};
pub use key::KernelKey;
pub use policy_file::{Measurement, PolicyDefect, PolicyEntry, PolicyFile};
pub use prepared::{FaultKind, Faults, KernelInfo, PreparedKda};
pub use reset::{PlannedReset, PreparedReset, Reset, plan_reset};
pub use step::{
    Buffer, ConvCache, Plan, Planned, Projected, ProjectionLayout, RecordPool, Rows, Slots,
    StatePool, Step, Weights,
};
pub use weights::{ConvWeight, decode_conv_weight};
