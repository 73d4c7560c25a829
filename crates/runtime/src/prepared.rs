//! `PreparedKda`: gets and loads kernels in `prepare_caches`, launches in `run`.

use kda_codegen::operands::PARAMETERS;
use kda_codegen::{KernelSpec, Resources};

use crate::device::{self, FaultMemory, Function};
use crate::{
    Config, Device, Error, Kernel, KernelKey, Kernels, Origin, Plan, Policies, Step, StepKind,
    Stream,
};

/// Why the kernel refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// A slot is not below the pools' slot count.
    SlotOutOfRange,
    /// An accepted count is outside 1..=columns, or outside 1..=records + 1.
    AcceptedOutOfRange,
    /// The source slot of a live request is null.
    NullSource,
    /// A token count is outside 0..=tokens.
    TokensOutOfRange,
}

/// What went wrong on the device since the last look. A refused request wrote +0 to its rows and
/// touched nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Refused requests, over all launches.
    pub count: u32,
    /// Lowest index in its batch among them.
    pub request: u32,
    /// Why that one was refused.
    pub kind: FaultKind,
}

impl Faults {
    /// Decodes a fault record; `None` when nothing was refused.
    pub fn from_record(record: kda_codegen::operands::FaultRecord) -> Option<Faults> {
        if record.count == 0 {
            return None;
        }
        let kind = match record.first as u32 {
            2 => FaultKind::AcceptedOutOfRange,
            3 => FaultKind::NullSource,
            4 => FaultKind::TokensOutOfRange,
            _ => FaultKind::SlotOutOfRange,
        };
        Some(Faults {
            count: record.count,
            request: (record.first >> 32) as u32,
            kind,
        })
    }
}

/// What is known of one prepared kernel.
#[derive(Clone, Debug)]
pub struct KernelInfo {
    /// Entry point, as profilers show it.
    pub entry: String,
    /// Its specialisation.
    pub spec: KernelSpec,
    /// Digest of everything its code depends on.
    pub key: KernelKey,
    /// Where it came from.
    pub origin: Origin,
    /// What ptxas reported when it was compiled, if it did.
    pub resources: Option<Resources>,
}

/// The kernels of one model on one device, ready to launch. `Send` and `Sync`: any thread, any
/// stream of the context.
pub struct PreparedKda {
    plan: Plan,
    functions: Vec<Function>,
    info: Vec<KernelInfo>,
    faults: FaultMemory,
}

impl PreparedKda {
    /// Gets every kernel that `policies` names from `kernels`, on all cores, and loads them. The
    /// only slow call: about 0.1 s for a kernel that must be compiled. `stream` is any stream of
    /// the device; it is only asked whether it is being captured.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] inside a capture; what `kernels` returns, for
    /// [`KernelSources`](crate::KernelSources) [`Error::KernelMissing`], [`Error::BundleDamaged`],
    /// [`Error::BundleMismatch`], [`Error::NvrtcVersion`], or [`Error::Codegen`] when libnvrtc is
    /// missing or a kernel does not compile; [`Error::DriverTooOld`]; [`Error::IllegalSetting`];
    /// [`Error::Cuda`].
    pub fn prepare_caches(
        device: &Device,
        stream: Stream,
        config: &Config,
        policies: &Policies,
        kernels: &dyn Kernels,
    ) -> Result<PreparedKda, Error> {
        let plan = Plan::new(device.arch(), config, policies)?;
        device.refuse_capture(stream)?;
        let mut functions = Vec::new();
        let mut info = Vec::new();
        for kernel in kernels.kernels(plan.kernels())? {
            let function = load(device, &kernel)?;
            let Kernel {
                spec,
                entry,
                key,
                cubin: _,
                nvrtc_version: _,
                resources,
                origin,
            } = kernel;
            let report = resources.map_or("no report".into(), |resources| resources.to_string());
            log::info!("prepared {entry}: {origin}, {report}");
            functions.push(function);
            info.push(KernelInfo {
                entry,
                spec,
                key,
                origin,
                resources,
            });
        }
        let faults = device.uncaptured(|| FaultMemory::new(device))?;
        Ok(PreparedKda {
            plan,
            functions,
            info,
            faults,
        })
    }

    /// What is prepared.
    pub fn kernels(&self) -> &[KernelInfo] {
        &self.info
    }

    /// The plan behind it, for callers that launch by other means.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Launches one step on `stream`: one kernel, no allocation, no synchronisation, no
    /// environment. Inside a capture it becomes one kernel node.
    ///
    /// # Errors
    ///
    /// [`Error::PolicyMissing`] for a step that was not prepared, an operand's error,
    /// [`Error::OtherDevice`] for memory of another device, or [`Error::Cuda`]; a capture in
    /// progress stays valid in all cases but the last.
    ///
    /// # Safety
    ///
    /// Every buffer of `step` is device memory of this context with the stated elements, alive
    /// until the launch has finished; no other work writes what the step reads, or touches what
    /// it writes, meanwhile. Live slots are distinct over the batch. With
    /// [`EarlyReads::Caches`](kda_codegen::EarlyReads::Caches), the kernel directly ahead in the
    /// stream does not write conv cache, state, records, slots, accepted or token counts.
    #[inline]
    pub unsafe fn run(&self, stream: Stream, step: &Step) -> Result<(), Error> {
        let Some(mut planned) = self.plan.step(step, self.faults.address)? else {
            return Ok(());
        };
        let function = &self.functions[planned.kernel];
        let pointers = planned.arguments.pointers();
        let mut addresses = planned.arguments.addresses();
        // SAFETY: the arguments are the kernel's, and the plan checked every extent against what the
        // caller vouches for.
        unsafe {
            function.launch(
                stream,
                &planned.launch,
                PARAMETERS,
                &pointers,
                &mut addresses,
            )
        }
    }

    /// Waits for `stream`, returns what the device refused since the last call, and forgets it.
    /// Launches on other streams should have finished: a fault that one of them reports at the
    /// same moment may be lost.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while `stream` is being captured, which stays valid; [`Error::Cuda`].
    pub fn take_faults(&self, stream: Stream) -> Result<Option<Faults>, Error> {
        Ok(Faults::from_record(self.faults.take(stream)?))
    }

    /// What the device has refused since the last [`take_faults`](Self::take_faults) or
    /// [`reset_faults`](Self::reset_faults), without waiting and without touching a stream: the
    /// record lies in pinned host memory. Steps in flight may be missing. While one is reporting,
    /// `count` may be ahead of `request` and `kind`.
    pub fn peek_faults(&self) -> Option<Faults> {
        Faults::from_record(self.faults.peek())
    }

    /// Forgets what the device refused. Steps in flight should have finished, as for
    /// [`take_faults`](Self::take_faults).
    pub fn reset_faults(&self) {
        self.faults.clear();
    }

    /// The policies, largest request count and kernel of each kind, in the order in which a step
    /// looks for its kernel. The index is one into [`kernels`](Self::kernels).
    pub fn policies(&self) -> impl Iterator<Item = (StepKind, usize, usize)> + '_ {
        self.plan.policies()
    }
}

/// Loads a kernel into the device's context.
pub(crate) fn load(device: &Device, kernel: &Kernel) -> Result<Function, Error> {
    let function = device.uncaptured(|| {
        let dependent_launch = kernel.spec.arch.has_clusters();
        Function::load(device, &kernel.cubin, &kernel.entry, dependent_launch)
    });
    function.map_err(|error| match error {
        Error::Cuda { code, .. } if device::is_too_new(code) => Error::DriverTooOld {
            entry: kernel.entry.clone(),
            driver: device::driver_version(),
            nvrtc: kernel.nvrtc_version,
        },
        error => error,
    })
}

const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<PreparedKda>();
    any_thread::<crate::PreparedReset>();
    any_thread::<Device>();
    any_thread::<Plan>();
    any_thread::<Error>();
    any_thread::<crate::KernelSources>();
};
