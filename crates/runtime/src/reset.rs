//! Zeroes the state and conv line of slots, so that a request in a reused slot starts from nothing.
//! One kernel, prepared apart from a model's steps.

use kda_codegen::operands::reset::{Arguments, Geometry, PARAMETERS};
use kda_codegen::schedule::MAX_REQUESTS;
use kda_codegen::{CONV_WIDTH, HEAD_DIM, KernelSpec, Launch};

use crate::device::Function;
use crate::prepared::load;
use crate::step::{Extent, strided};
use crate::{Config, ConvCache, Device, Error, Kernels, Slots, StatePool, Stream};

/// Threads of a block: `THREADS` in `templates/reset_constants.cuh.tera`.
const THREADS: u32 = 256;

/// The operands of one reset.
#[derive(Clone, Copy, Debug)]
pub struct Reset {
    /// Rows of the slot table; 0 launches nothing.
    pub requests: usize,
    /// i32 `[requests, columns]`: the slots to zero, every column of every row. Values that are null
    /// under the configuration's rule, or not below `pool_slots`, are skipped; others are distinct.
    pub slots: Slots,
    /// Written: a slot's whole line.
    pub conv_cache: ConvCache,
    /// Written: a slot's matrices.
    pub state: StatePool,
    /// Slots of the pools.
    pub pool_slots: usize,
}

/// A reset as plain data: what the CUDA driver or an emulator needs.
#[derive(Clone, Copy, Debug)]
pub struct PlannedReset {
    /// Dimensions.
    pub launch: Launch,
    /// Values of the parameters.
    pub arguments: Arguments,
}

/// Checks a reset for a model of `config` and describes its launch; `None` without requests.
///
/// # Errors
///
/// The first operand that is missing, misaligned, too short or too narrow; [`Error::TooLarge`];
/// [`Error::Overlap`] when a pool shares memory with the other or with the slot table.
pub fn plan_reset(config: &Config, reset: &Reset) -> Result<Option<PlannedReset>, Error> {
    let columns = reset.slots.columns;
    if reset.requests == 0 {
        return Ok(None);
    }
    if columns == 0 {
        return Err(Error::ColumnsTooFew {
            found: 0,
            needed: 1,
        });
    }
    // Shorter lines serve no step; a part of one would keep what a request left behind.
    if reset.conv_cache.length < CONV_WIDTH - 1 {
        return Err(Error::ConvLineTooShort {
            found: reset.conv_cache.length,
            needed: CONV_WIDTH - 1,
        });
    }
    for (what, found, most) in [
        ("requests", reset.requests, MAX_REQUESTS),
        ("slots columns", columns, MAX_REQUESTS),
        ("pool_slots", reset.pool_slots, i32::MAX as usize),
        (
            "conv_cache length",
            reset.conv_cache.length,
            i32::MAX as usize,
        ),
    ] {
        if found > most {
            return Err(Error::TooLarge { what, found, most });
        }
    }
    let dim = config.heads * HEAD_DIM;
    let line = 3 * dim * reset.conv_cache.length;
    let (slots, conv, state) = (&reset.slots, &reset.conv_cache, &reset.state);
    strided(
        "slots",
        slots.buffer,
        slots.stride,
        reset.requests,
        columns,
        4,
    )?;
    strided(
        "conv_cache",
        conv.buffer,
        conv.slot_stride,
        reset.pool_slots,
        line,
        2,
    )?;
    state.check("state_pool", config, reset.pool_slots)?;
    let state_extent = state.extent(config, reset.pool_slots);
    let conv_extent = conv.extent(config, reset.pool_slots);
    let table = Extent::new(
        slots.buffer.address,
        slots.stride,
        columns,
        reset.requests,
        4,
    );
    for (written, a, other, b) in [
        ("state_pool", state_extent, "conv_cache", conv_extent),
        ("state_pool", state_extent, "slots", table),
        ("conv_cache", conv_extent, "slots", table),
    ] {
        if a.overlaps(&b) {
            return Err(Error::Overlap { written, other });
        }
    }
    Ok(Some(PlannedReset {
        launch: Launch {
            grid: [config.heads as u32, reset.requests as u32, columns as u32],
            block: [THREADS, 1, 1],
            cluster: [1; 3],
        },
        arguments: Arguments {
            slots: slots.buffer.address,
            state_pool: state.buffer.address,
            conv_cache: conv.buffer.address,
            geometry: Geometry {
                slots_stride: slots.stride,
                conv_slot_stride: conv.slot_stride,
                state_slot_stride: state.slot_stride,
                conv_length: conv.length as i32,
                pool_slots: reset.pool_slots as i32,
            },
        },
    }))
}

/// The reset kernel of one model on one device, ready to launch. `Send` and `Sync`.
pub struct PreparedReset {
    config: Config,
    function: Function,
}

impl PreparedReset {
    /// Gets the kernel and loads it, as [`PreparedKda::prepare_caches`](crate::PreparedKda) does a
    /// step's.
    ///
    /// # Errors
    ///
    /// As [`PreparedKda::prepare_caches`](crate::PreparedKda::prepare_caches).
    pub fn prepare(
        device: &Device,
        stream: Stream,
        config: &Config,
        kernels: &dyn Kernels,
    ) -> Result<PreparedReset, Error> {
        config.validate()?;
        // Heads are no part of the kernel; a step of as many must exist.
        KernelSpec::new(device.arch(), config.heads).validate()?;
        device.refuse_capture(stream)?;
        let spec = KernelSpec::reset(device.arch(), config.null_rule, config.state_dtype);
        let kernel = kernels.kernel(&spec)?;
        let function = load(device, &kernel)?;
        log::info!("prepared {}: {}", kernel.entry, kernel.origin);
        Ok(PreparedReset {
            config: *config,
            function,
        })
    }

    /// Launches one reset on `stream`: one kernel, no allocation, no synchronisation. Inside a
    /// capture it becomes one kernel node; a replay reads the slot table as it is then.
    ///
    /// # Errors
    ///
    /// As [`plan_reset`]; [`Error::OtherDevice`] for memory of another device; [`Error::Cuda`].
    ///
    /// # Safety
    ///
    /// Every buffer of `reset` is device memory of this context with the stated elements, alive
    /// until the launch has finished; no other work touches the slots meanwhile. Slots that are
    /// neither null nor out of range are distinct.
    pub unsafe fn run(&self, stream: Stream, reset: &Reset) -> Result<(), Error> {
        let Some(mut planned) = plan_reset(&self.config, reset)? else {
            return Ok(());
        };
        let pointers = planned.arguments.pointers();
        let mut addresses = planned.arguments.addresses();
        // SAFETY: the arguments are the kernel's, and the plan checked every extent against what the
        // caller vouches for.
        unsafe {
            self.function.launch(
                stream,
                &planned.launch,
                PARAMETERS,
                &pointers,
                &mut addresses,
            )
        }
    }
}
