//! The layers of a model at one size: their operands on the device, launches over them, the check of
//! what a launch leaves. Knows no clock.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::sys;
use kda_reference::records::RECORD_SIZE;
use kda_reference::{Gate, RecordShape, Shape, StateType};
use kda_runtime::{Buffer, PreparedKda, Step, StepKind, Stream};
use kda_tests::cuda::{DeviceMemory, check};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Data, Limits, Regime, placed};

use super::bare::{BareKernels, Edge, GemvOperands};
use super::record::Size;

/// Layers with pools and weights of their own; the projection, the slots and the accepted counts are
/// shared.
pub struct Layers {
    /// Their size.
    pub size: Size,
    /// What layer 0 starts from.
    pub case: Case,
    before: Buffers,
    /// What the first checked launch left.
    reference: Option<Buffers>,
    /// Where each region of a layer starts.
    offsets: Vec<(&'static str, usize)>,
    layer_bytes: usize,
    memory: DeviceMemory,
    steps: Vec<Step>,
    null_slots: DeviceMemory,
}

impl Layers {
    /// Allocates and fills `count` layers.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(size: Size, count: usize) -> Result<Layers, Box<dyn Error>> {
        let case = case(size);
        let before = Buffers::new(&case);
        let mut offsets = Vec::new();
        let mut layer_bytes = 0;
        for (name, region) in before.regions() {
            offsets.push((name, layer_bytes));
            layer_bytes += region.bytes.len().next_multiple_of(256);
        }
        let memory = DeviceMemory::new(layer_bytes * count)?;
        let null_slots = DeviceMemory::new(before.slots.bytes.len())?;
        null_slots.upload(0, &vec![0xff; null_slots.bytes])?;
        let mut layers = Layers {
            size,
            case,
            before,
            reference: None,
            offsets,
            layer_bytes,
            memory,
            steps: Vec::new(),
            null_slots,
        };
        layers.steps = (0..count).map(|layer| layers.place(layer)).collect();
        layers.restore()?;
        Ok(layers)
    }

    fn place(&self, layer: usize) -> Step {
        placed::step(&self.case, &self.before, |name| {
            let layer = match name {
                "projected" | "slots" | "accepted" => 0,
                _ => layer,
            };
            self.memory.address + (layer * self.layer_bytes + self.offset(name)) as u64
        })
    }

    fn offset(&self, name: &str) -> usize {
        let found = self.offsets.iter().find(|(known, _)| *known == name);
        found.expect("a region").1
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.steps.len()
    }

    /// The operands of the first.
    pub fn step(&self) -> &Step {
        &self.steps[0]
    }

    /// Gives every layer its first contents again; nothing may be running.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn restore(&self) -> Result<(), Box<dyn Error>> {
        self.restore_first()?;
        for layer in 1..self.count() {
            let to = self.memory.address + (layer * self.layer_bytes) as u64;
            // SAFETY: both ranges lie in `memory` and do not overlap.
            check("cuMemcpyDtoD", unsafe {
                sys::cuMemcpyDtoD_v2(to, self.memory.address, self.layer_bytes)
            })?;
        }
        // Such copies return early, on a stream that others do not wait for.
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    fn restore_first(&self) -> Result<(), Box<dyn Error>> {
        let mut regions = self.before.regions().into_iter();
        regions.try_for_each(|(name, region)| self.memory.upload(self.offset(name), &region.bytes))
    }

    /// Enqueues a layer's step.
    ///
    /// # Errors
    ///
    /// The library's.
    pub fn enqueue(
        &self,
        stream: Stream,
        prepared: &PreparedKda,
        layer: usize,
    ) -> Result<(), Box<dyn Error>> {
        // SAFETY: the operands lie in `memory`; whoever frees it has waited for the stream, the
        // only one that touches them. No kernel here but a step writes slots or caches.
        unsafe { prepared.run(stream, &self.steps[layer]) }?;
        Ok(())
    }

    /// Enqueues a layer's step over null slots: it writes its output and touches no cache.
    ///
    /// # Errors
    ///
    /// The library's.
    pub fn enqueue_null(
        &self,
        stream: Stream,
        prepared: &PreparedKda,
        layer: usize,
    ) -> Result<(), Box<dyn Error>> {
        let mut step = self.steps[layer];
        step.slots.buffer = Buffer::new(self.null_slots.address, step.slots.buffer.elements);
        // SAFETY: as in `enqueue`; `null_slots` holds as many slots as the region it stands for.
        unsafe { prepared.run(stream, &step) }?;
        Ok(())
    }

    /// Enqueues a bare pass over the state of a layer.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn enqueue_in_place(
        &self,
        stream: Stream,
        bare: &BareKernels,
        layer: usize,
    ) -> Result<(), Box<dyn Error>> {
        let mut step = self.steps[layer];
        if self.size.records {
            // One state is read and one written.
            (step.kind, step.accepted) = (StepKind::Decode, None);
        }
        // SAFETY: as in `enqueue`; `case` names live slots and counts only, tiles lie side by side.
        unsafe { bare.in_place(stream, self.size, &step) }
    }

    /// Enqueues the multiplication ahead of a layer, which writes the projected rows again.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn enqueue_gemv(
        &self,
        stream: Stream,
        bare: &BareKernels,
        operands: &GemvOperands<'_>,
        edge: Edge,
    ) -> Result<(), Box<dyn Error>> {
        // SAFETY: as in `enqueue`: all use of the projected rows is on this stream, and its kernels
        // wait for each other before they touch them.
        unsafe { bare.gemv(stream, operands, &self.steps[0], edge) }
    }

    /// Runs layer 0 from its first contents and checks what it leaves: the first launch against the
    /// f64 oracle, every other against the first, bit for bit.
    ///
    /// # Errors
    ///
    /// A fault, an output outside its bound, or a difference.
    pub fn check(
        &mut self,
        stream: Stream,
        prepared: &PreparedKda,
        mode: &str,
    ) -> Result<(), Box<dyn Error>> {
        self.restore_first()?;
        self.enqueue(stream, prepared, 0)?;
        if let Some(faults) = prepared.take_faults(stream)? {
            return Err(format!("{mode}: {faults:?}").into());
        }
        let mut after = self.before.clone();
        for (name, region) in after.regions_mut() {
            self.memory.download(self.offset(name), &mut region.bytes)?;
        }
        let Some(reference) = &self.reference else {
            self.case.check(&self.before, &after, None)?;
            self.reference = Some(after);
            return Ok(());
        };
        for ((name, expected), (_, found)) in reference.regions().into_iter().zip(after.regions()) {
            if expected != found {
                return Err(format!("{mode}: {name} differs from the first mode").into());
            }
        }
        Ok(())
    }
}

/// A live batch: tight strides, slots a random permutation, random accepted counts.
fn case(size: Size) -> Case {
    let Size {
        heads,
        requests,
        tokens,
        records,
        projected_gate,
        bf16_state,
        softplus,
    } = size;
    let state_type = match bf16_state {
        true => StateType::Bf16,
        false => StateType::F32,
    };
    let gate = match softplus {
        true => Gate::Softplus,
        false => Gate::LowerBound { lower_bound: -5.0 },
    };
    let limits = Limits {
        max_heads: heads,
        max_requests: requests,
        tokens: vec![tokens],
        gates: vec![gate],
        state_types: vec![state_type],
        biases: vec![false],
        ragged: vec![false],
        records: vec![records],
        projected_gates: vec![projected_gate],
        regimes: vec![Regime::Plain],
        max_pool_bytes: usize::MAX,
        ..Limits::default()
    }
    .live();
    let mut case = Case::sized(1, &limits, heads, requests);
    let mut rng = Rng::stream(1, 99);
    case.shape = Shape::dense(heads, requests, tokens, gate);
    case.shape.state_type = state_type;
    if records {
        let shape = &mut case.shape;
        (shape.columns, shape.slots_stride) = (1, 1);
        shape.pool_slots = requests + 1;
        shape.records = Some(RecordShape {
            count: tokens - 1,
            slot_stride: (tokens - 1) * heads * RECORD_SIZE,
        });
        // As many as the shape has: the case drew others.
        let data = Data::random(
            shape,
            false,
            projected_gate,
            Regime::Plain,
            &mut Rng::stream(1, 98),
        );
        case.data = Arc::new(data);
    }
    case.skew = Default::default();
    case.verify = tokens > 1;
    case.accepted = case.verify.then(|| {
        (0..requests)
            .map(|_| 1 + rng.below(tokens) as i32)
            .collect()
    });
    let mut slots: Vec<i32> = (1..case.shape.pool_slots as i32).collect();
    rng.shuffle(&mut slots);
    case.slots = slots;
    case
}

#[cfg(test)]
mod tests {
    use kda_codegen::EarlyReads;

    use super::*;

    #[test]
    fn the_case_is_of_the_size() {
        for on in [false, true] {
            let size = Size {
                heads: 1,
                tokens: 2,
                requests: 2,
                records: on,
                projected_gate: on,
                bf16_state: on,
                softplus: on,
            };
            let config = placed::config(&case(size), EarlyReads::Weights);
            assert_eq!(config.rollback, size.rollback());
            assert_eq!(config.gate_input, size.gate_input());
            assert_eq!(config.state_dtype, size.state_dtype());
            let gate = match on {
                true => kda_runtime::Gate::Softplus,
                false => kda_runtime::Gate::LowerBound(-5.0),
            };
            assert_eq!(config.gate, gate);
        }
    }
}
