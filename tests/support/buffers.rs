//! Owns the bytes of every operand, with poison wherever a launch must not look. Must not know
//! what the bytes should become.
//!
//! Each operand lies in a region: a guard, the operand, a guard. Guards, padding columns, the space
//! between strides, rows of requests that are not live, and every slot or tap that no request
//! starts from hold NaN; integers out of reach hold a valid slot and count, so that using them shows
//! up as a change somewhere. `out` starts as NaN.

use half::bf16;
use kda_reference::records::{RECORD_SIZE, repeat};
use kda_reference::{CONV_WIDTH, NullRule, Plan, Shape, StateType};

use crate::case::Case;
use crate::data::MATRIX;

/// Bytes before and after each operand, a multiple of every alignment in use.
pub const GUARD: usize = 256;
/// Quiet NaN that fills bf16 operands.
pub const POISON_BF16: u16 = 0x7fd5;
/// Quiet NaN in rows of `projected` that a ragged request does not bring: unlike the others, so that a
/// copy into the convolution cache shows.
pub const ROW_POISON_BF16: u16 = 0x7fe1;
/// Quiet NaN that fills f32 operands.
pub const POISON_F32: u32 = 0x7fd5_5aa5;

/// One operand's bytes. An executor copies all of them to an address aligned to 256 bytes and
/// passes that address plus `offset`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Guard, operand, guard.
    pub bytes: Vec<u8>,
    /// Byte where the operand starts.
    pub offset: usize,
    /// Bytes of the operand.
    pub len: usize,
}

impl Region {
    fn filled(count: usize, skew_bytes: usize, pattern: &[u8]) -> Region {
        let len = count * pattern.len();
        let offset = GUARD + skew_bytes;
        let total = (offset + len + GUARD).next_multiple_of(GUARD);
        let mut bytes = pattern.repeat(total / pattern.len());
        bytes.resize(total, 0);
        Region { bytes, offset, len }
    }

    /// The operand without its guards.
    pub fn data(&self) -> &[u8] {
        &self.bytes[self.offset..self.offset + self.len]
    }

    /// The operand without its guards, to be written.
    pub fn data_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.offset..self.offset + self.len]
    }

    /// bf16 element `index`.
    pub fn bf16(&self, index: usize) -> bf16 {
        let at = self.offset + 2 * index;
        bf16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Sets bf16 element `index`.
    pub fn set_bf16(&mut self, index: usize, value: bf16) {
        let at = self.offset + 2 * index;
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn word(&self, index: usize) -> [u8; 4] {
        let at = self.offset + 4 * index;
        self.bytes[at..at + 4].try_into().expect("four bytes")
    }

    /// f32 element `index`.
    pub fn f32(&self, index: usize) -> f32 {
        f32::from_le_bytes(self.word(index))
    }

    /// Sets f32 element `index`.
    pub fn set_f32(&mut self, index: usize, value: f32) {
        let at = self.offset + 4 * index;
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// i32 element `index`.
    pub fn i32(&self, index: usize) -> i32 {
        i32::from_le_bytes(self.word(index))
    }

    /// Sets i32 element `index`.
    pub fn set_i32(&mut self, index: usize, value: i32) {
        let at = self.offset + 4 * index;
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// State element `index` of either type, widened.
    pub fn state(&self, kind: StateType, index: usize) -> f32 {
        match kind {
            StateType::F32 => self.f32(index),
            StateType::Bf16 => self.bf16(index).to_f32(),
        }
    }

    /// Sets state element `index`; a bf16 state rounds it.
    pub fn set_state(&mut self, kind: StateType, index: usize, value: f32) {
        match kind {
            StateType::F32 => self.set_f32(index, value),
            StateType::Bf16 => self.set_bf16(index, bf16::from_f32(value)),
        }
    }

    /// Every bf16 element of the operand.
    pub fn to_bf16(&self) -> Vec<bf16> {
        (0..self.len / 2).map(|i| self.bf16(i)).collect()
    }

    /// Every f32 element of the operand.
    pub fn to_f32(&self) -> Vec<f32> {
        (0..self.len / 4).map(|i| self.f32(i)).collect()
    }

    /// Every i32 element of the operand.
    pub fn to_i32(&self) -> Vec<i32> {
        (0..self.len / 4).map(|i| self.i32(i)).collect()
    }

    fn put_bf16(&mut self, start: usize, values: &[bf16]) {
        for (i, &value) in values.iter().enumerate() {
            self.set_bf16(start + i, value);
        }
    }

    fn put_f32(&mut self, values: &[f32]) {
        for (i, &value) in values.iter().enumerate() {
            self.set_f32(i, value);
        }
    }
}

/// Every operand of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// bf16 `[rows, pitch]`; [`Case::views`] says where q, k, v, gate, F_A and beta start.
    pub projected: Region,
    /// f32 `[3, 4, d]`.
    pub conv_weight: Region,
    /// f32 `[3d]`.
    pub conv_bias: Option<Region>,
    /// bf16 pool.
    pub conv_cache: Region,
    /// bf16 `[d, 128]`, with the low-rank gate.
    pub f_b: Option<Region>,
    /// bf16 `[rows, gate_stride]`, with a projected gate.
    pub gate_input: Option<Region>,
    /// f32 `[heads]`.
    pub a_log: Region,
    /// f32 `[d]`.
    pub dt_bias: Region,
    /// f32 `[128]`.
    pub norm: Region,
    /// i32 `[requests, slots_stride]`.
    pub slots: Region,
    /// i32 `[requests]`.
    pub accepted: Option<Region>,
    /// i32 `[requests]`.
    pub token_counts: Option<Region>,
    /// f32 pool.
    pub records: Option<Region>,
    /// f32 or bf16 pool.
    pub state: Region,
    /// bf16 `[rows, out_stride]`.
    pub out: Region,
}

impl Buffers {
    /// Every operand of `case`, all poison.
    pub fn poisoned(case: &Case) -> Buffers {
        let (shape, skew) = (&case.shape, &case.skew);
        let dim = shape.dim();
        let narrow =
            |count, skew: usize| Region::filled(count, 2 * skew, &POISON_BF16.to_le_bytes());
        let wide = |count| Region::filled(count, 4 * skew.floats, &POISON_F32.to_le_bytes());
        let whole =
            |count, value: i32| Region::filled(count, 4 * skew.integers, &value.to_le_bytes());
        let state_count = shape.pool_slots * shape.state_slot_stride;
        Buffers {
            projected: narrow(shape.rows() * shape.pitch, skew.projected),
            conv_weight: wide(3 * CONV_WIDTH * dim),
            conv_bias: case.bias().then(|| wide(3 * dim)),
            conv_cache: narrow(shape.pool_slots * shape.conv_slot_stride, skew.conv_cache),
            f_b: (!case.projected_gate()).then(|| narrow(dim * kda_reference::HEAD_DIM, 0)),
            gate_input: case
                .projected_gate()
                .then(|| narrow(shape.rows() * shape.gate_stride, skew.gate_input)),
            a_log: wide(shape.heads),
            dt_bias: wide(dim),
            norm: wide(kda_reference::HEAD_DIM),
            slots: whole(shape.requests * shape.slots_stride, spare_slot(case)),
            accepted: case.verify.then(|| whole(shape.requests, 1)),
            token_counts: case.token_counts.as_ref().map(|_| whole(shape.requests, 1)),
            records: shape.records.map(|records| {
                let count = shape.pool_slots * records.slot_stride;
                Region::filled(count, 0, &POISON_F32.to_le_bytes())
            }),
            state: match shape.state_type {
                StateType::F32 => Region::filled(state_count, 0, &POISON_F32.to_le_bytes()),
                StateType::Bf16 => Region::filled(state_count, 0, &POISON_BF16.to_le_bytes()),
            },
            out: narrow(shape.rows() * shape.out_stride, skew.out),
        }
    }

    /// Every operand of `case` as a launch finds it.
    pub fn new(case: &Case) -> Buffers {
        let (shape, data) = (&case.shape, &*case.data);
        let mut buffers = Buffers::poisoned(case);
        buffers.conv_weight.put_f32(&data.conv_weight);
        if let (Some(region), Some(bias)) = (&mut buffers.conv_bias, &data.conv_bias) {
            region.put_f32(bias);
        }
        if let Some(region) = &mut buffers.f_b {
            region.put_bf16(0, &data.f_b);
        }
        buffers.a_log.put_f32(&data.a_log);
        buffers.dt_bias.put_f32(&data.dt_bias);
        buffers.norm.put_f32(&data.norm);
        buffers.put_slots(case);
        for request in 0..shape.requests {
            let Plan::Live {
                first,
                source,
                offset,
                ..
            } = case.plan(request)
            else {
                continue;
            };
            let first_row = request * shape.tokens;
            for row in first_row..first_row + case.tokens_of(request) {
                let start = row * shape.pitch;
                buffers.projected.put_bf16(start, data.row(shape, row));
                if let Some(region) = &mut buffers.gate_input {
                    region.put_bf16(row * shape.gate_stride, data.gate_row(shape, row));
                    // Nobody may look at F_A.
                    let f_a = start + case.views().f_a;
                    let poison = [bf16::from_bits(POISON_BF16); kda_reference::HEAD_DIM];
                    buffers.projected.put_bf16(f_a, &poison);
                }
            }
            let unused = vec![bf16::from_bits(ROW_POISON_BF16); shape.used_columns()];
            for row in first_row + case.tokens_of(request)..first_row + shape.tokens {
                buffers.projected.put_bf16(row * shape.pitch, &unused);
            }
            let taps = CONV_WIDTH - 1;
            for (channel, window) in data.window(shape, request).chunks_exact(taps).enumerate() {
                for (tap, &raw) in window.iter().enumerate() {
                    let index = shape.conv_index(first, channel, offset + tap);
                    buffers.conv_cache.set_bf16(index, raw);
                }
            }
            buffers.put_states(shape, source, data.state(shape, request));
            for index in 0..shape.records.map_or(0, |_| offset) {
                for head in 0..shape.heads {
                    let record = data.record(shape, request, index, head);
                    buffers.put_record(shape, first, index, head, record);
                }
            }
        }
        buffers
    }

    /// Writes the slots, accepted and token counts of `case`.
    pub fn put_slots(&mut self, case: &Case) {
        let shape = &case.shape;
        for request in 0..shape.requests {
            for column in 0..shape.columns {
                let slot = case.slots[request * shape.columns + column];
                self.slots
                    .set_i32(request * shape.slots_stride + column, slot);
            }
            if let (Some(region), Some(accepted)) = (&mut self.accepted, &case.accepted) {
                region.set_i32(request, accepted[request]);
            }
            if let (Some(region), Some(counts)) = (&mut self.token_counts, &case.token_counts) {
                region.set_i32(request, counts[request]);
            }
        }
    }

    /// Writes the matrices `[heads, 128, 128]` of `slot`.
    pub fn put_states(&mut self, shape: &Shape, slot: usize, values: &[f32]) {
        for (head, matrix) in values.chunks_exact(MATRIX).enumerate() {
            let start = shape.state_index(slot, head);
            for (i, &value) in matrix.iter().enumerate() {
                self.state.set_state(shape.state_type, start + i, value);
            }
        }
    }

    /// Writes a record.
    fn put_record(
        &mut self,
        shape: &Shape,
        slot: usize,
        index: usize,
        head: usize,
        record: &[f32],
    ) {
        if let (Some(region), Some(records)) = (&mut self.records, &shape.records) {
            let start = shape.record_index(records, slot, index, head);
            for (i, &value) in record.iter().enumerate() {
                region.set_f32(start + i, value);
            }
        }
    }

    /// The matrices of `slot` after repeating its first `count` records on them, each step:
    /// `count + 1` times `[heads, 128, 128]`; in a shape without records the matrices alone.
    pub fn repeated(&self, shape: &Shape, slot: usize, count: usize) -> Vec<Vec<f32>> {
        let mut states = vec![self.states(shape, slot)];
        let (Some(region), Some(records)) = (&self.records, &shape.records) else {
            return states;
        };
        for index in 0..count {
            let mut next = states[index].clone();
            for (head, state) in next.chunks_exact_mut(MATRIX).enumerate() {
                let start = shape.record_index(records, slot, index, head);
                let record: Vec<f32> = (0..RECORD_SIZE).map(|i| region.f32(start + i)).collect();
                repeat(state, &record, shape.state_type);
            }
            states.push(next);
        }
        states
    }

    /// The matrices `[heads, 128, 128]` of `slot`.
    pub fn states(&self, shape: &Shape, slot: usize) -> Vec<f32> {
        let start = shape.state_index(slot, 0);
        (0..shape.heads * MATRIX)
            .map(|i| self.state.state(shape.state_type, start + i))
            .collect()
    }

    /// Positions `from..to` of every channel of a slot's line, `[3d, to − from]`.
    pub fn line(&self, shape: &Shape, slot: usize, from: usize, to: usize) -> Vec<bf16> {
        (0..3 * shape.dim())
            .flat_map(|channel| {
                (from..to).map(move |p| self.conv_cache.bf16(shape.conv_index(slot, channel, p)))
            })
            .collect()
    }

    /// Every operand present, with its name as in the kernel's parameters.
    pub fn regions(&self) -> Vec<(&'static str, &Region)> {
        let mut regions = vec![
            ("projected", &self.projected),
            ("conv_weight", &self.conv_weight),
            ("conv_cache", &self.conv_cache),
            ("a_log", &self.a_log),
            ("dt_bias", &self.dt_bias),
            ("norm", &self.norm),
            ("slots", &self.slots),
            ("state_pool", &self.state),
            ("out", &self.out),
        ];
        regions.extend(self.f_b.as_ref().map(|r| ("f_b", r)));
        regions.extend(self.gate_input.as_ref().map(|r| ("gate_input", r)));
        regions.extend(self.conv_bias.as_ref().map(|r| ("conv_bias", r)));
        regions.extend(self.accepted.as_ref().map(|r| ("accepted", r)));
        regions.extend(self.token_counts.as_ref().map(|r| ("token_counts", r)));
        regions.extend(self.records.as_ref().map(|r| ("records", r)));
        regions
    }

    /// As [`Buffers::regions`], in the same order, to be written.
    pub fn regions_mut(&mut self) -> Vec<(&'static str, &mut Region)> {
        let mut regions = vec![
            ("projected", &mut self.projected),
            ("conv_weight", &mut self.conv_weight),
            ("conv_cache", &mut self.conv_cache),
            ("a_log", &mut self.a_log),
            ("dt_bias", &mut self.dt_bias),
            ("norm", &mut self.norm),
            ("slots", &mut self.slots),
            ("state_pool", &mut self.state),
            ("out", &mut self.out),
        ];
        regions.extend(self.f_b.as_mut().map(|r| ("f_b", r)));
        regions.extend(self.gate_input.as_mut().map(|r| ("gate_input", r)));
        regions.extend(self.conv_bias.as_mut().map(|r| ("conv_bias", r)));
        regions.extend(self.accepted.as_mut().map(|r| ("accepted", r)));
        regions.extend(self.token_counts.as_mut().map(|r| ("token_counts", r)));
        regions.extend(self.records.as_mut().map(|r| ("records", r)));
        regions
    }
}

/// A live slot that no request names, for integers that nobody may use.
fn spare_slot(case: &Case) -> i32 {
    let lowest = match case.shape.null_rule {
        NullRule::NonPositive => 1,
        NullRule::Negative => 0,
    };
    (lowest..case.shape.pool_slots as i32)
        .find(|slot| !case.slots.contains(slot))
        .unwrap_or(lowest)
}
