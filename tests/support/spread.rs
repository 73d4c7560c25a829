//! Owns where a case's slots and rows lie when they lie far apart; must not know kernels.
//!
//! A case stays small: its slots and rows are the only memory that exists, each at a distance that
//! no test machine could back with real memory. Anything between them is out of bounds.

use kda_reference::records::RECORD_SIZE;
use kda_runtime::{Projected, Step};

use crate::{Case, MATRIX, Region};

/// Distances in elements, and the slots that a case's own slots become.
#[derive(Clone, Debug)]
pub struct Spread {
    /// Between rows of the projection.
    pub pitch: i64,
    /// Between rows of a projected gate input.
    pub gate_stride: i64,
    /// Between rows of the output.
    pub out_stride: i64,
    /// Between rows of the slot table.
    pub slots_stride: i64,
    /// Between slots of the conv cache.
    pub conv_slot_stride: i64,
    /// Between slots of the state pool.
    pub state_slot_stride: i64,
    /// Between slots of the record pool.
    pub record_slot_stride: i64,
    /// Slots of the pools.
    pub pool_slots: i32,
    /// For each of the case's slots, the one that it becomes.
    pub slots: Vec<i32>,
}

/// A piece of an operand: its byte in the case's own memory, its byte when spread, its length.
type Piece = (usize, u64, usize);

impl Spread {
    /// Where the case's own strides and slots would be.
    pub fn none(case: &Case) -> Spread {
        let shape = &case.shape;
        Spread {
            pitch: shape.pitch as i64,
            gate_stride: shape.gate_stride as i64,
            out_stride: shape.out_stride as i64,
            slots_stride: shape.slots_stride as i64,
            conv_slot_stride: shape.conv_slot_stride as i64,
            state_slot_stride: shape.state_slot_stride as i64,
            record_slot_stride: shape
                .records
                .map_or(0, |records| records.slot_stride as i64),
            pool_slots: shape.pool_slots as i32,
            slots: (0..shape.pool_slots as i32).collect(),
        }
    }

    /// Gives `step`, placed without gaps, the distances.
    pub(crate) fn step(&self, case: &Case, step: &mut Step) {
        let shape = &case.shape;
        let long = |elements: &mut usize, count: usize, stride: i64, width: usize| {
            *elements = count.saturating_sub(1) * stride as usize + width;
        };
        let (rows, dim) = (shape.rows(), shape.dim());
        let mut packed = step.projected.qkv.buffer;
        long(&mut packed.elements, rows, self.pitch, shape.used_columns());
        let mut gate = step.projected.gate_input;
        step.projected = Projected::packed(packed, self.pitch, shape.heads);
        if case.projected_gate() {
            gate.stride = self.gate_stride;
            long(&mut gate.buffer.elements, rows, self.gate_stride, dim);
            step.projected = step.projected.with_gate_input(gate);
        }
        step.out.stride = self.out_stride;
        long(&mut step.out.buffer.elements, rows, self.out_stride, dim);
        step.slots.stride = self.slots_stride;
        long(
            &mut step.slots.buffer.elements,
            shape.requests,
            self.slots_stride,
            shape.columns,
        );
        let pool = self.pool_slots as usize;
        step.pool_slots = pool;
        step.conv_cache.slot_stride = self.conv_slot_stride;
        let line = 3 * dim * shape.conv_len;
        long(
            &mut step.conv_cache.buffer.elements,
            pool,
            self.conv_slot_stride,
            line,
        );
        step.state.slot_stride = self.state_slot_stride;
        long(
            &mut step.state.buffer.elements,
            pool,
            self.state_slot_stride,
            shape.heads * MATRIX,
        );
        if let Some(records) = &mut step.records {
            records.slot_stride = self.record_slot_stride;
            let width = records.count * shape.heads * RECORD_SIZE;
            long(
                &mut records.buffer.elements,
                pool,
                self.record_slot_stride,
                width,
            );
        }
    }

    fn pieces(&self, case: &Case, name: &str, region: &Region) -> Vec<Piece> {
        let shape = &case.shape;
        let rows = |count: usize, from: usize, to: i64, width: usize, bytes: usize| {
            (0..count)
                .map(|row| {
                    let to = row as u64 * to as u64 * bytes as u64;
                    (row * from * bytes, to, width * bytes)
                })
                .collect()
        };
        let slots = |from: usize, to: i64, width: usize, bytes: usize| {
            let mut pieces: Vec<Piece> = self
                .slots
                .iter()
                .enumerate()
                .map(|(own, &slot)| {
                    let to = slot as u64 * to as u64 * bytes as u64;
                    (own * from * bytes, to, width * bytes)
                })
                .collect();
            pieces.sort_by_key(|piece| piece.1);
            pieces
        };
        let dim = shape.dim();
        match name {
            "projected" => rows(
                shape.rows(),
                shape.pitch,
                self.pitch,
                shape.used_columns(),
                2,
            ),
            "gate_input" => rows(shape.rows(), shape.gate_stride, self.gate_stride, dim, 2),
            "out" => rows(shape.rows(), shape.out_stride, self.out_stride, dim, 2),
            "slots" => rows(
                shape.requests,
                shape.slots_stride,
                self.slots_stride,
                shape.columns,
                4,
            ),
            "conv_cache" => {
                let line = 3 * dim * shape.conv_len;
                slots(shape.conv_slot_stride, self.conv_slot_stride, line, 2)
            }
            "state_pool" => slots(
                shape.state_slot_stride,
                self.state_slot_stride,
                shape.heads * MATRIX,
                case.state_bytes(),
            ),
            "records" => {
                let records = shape.records.expect("a shape with records");
                let width = records.count * shape.heads * RECORD_SIZE;
                slots(records.slot_stride, self.record_slot_stride, width, 4)
            }
            _ => vec![(0, 0, region.len)],
        }
    }

    /// What exists of an operand: offsets from its region's address, and bytes.
    pub(crate) fn ranges(&self, case: &Case, name: &str, region: &Region) -> Vec<(u64, Vec<u8>)> {
        let moved = |bytes: &[u8]| -> Vec<u8> {
            let own = i32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            let slot = usize::try_from(own)
                .ok()
                .and_then(|own| self.slots.get(own));
            // What named no slot of the case names none of the pool either.
            let beyond = |own: i32| {
                if case.shape.null_rule.is_null(own) {
                    own
                } else {
                    own.max(self.pool_slots)
                }
            };
            slot.copied().unwrap_or(beyond(own)).to_le_bytes().to_vec()
        };
        self.pieces(case, name, region)
            .into_iter()
            .map(|(from, to, len)| {
                let bytes = &region.data()[from..from + len];
                let bytes = match name {
                    "slots" => bytes.chunks_exact(4).flat_map(moved).collect(),
                    _ => bytes.to_vec(),
                };
                (region.offset as u64 + to, bytes)
            })
            .collect()
    }

    /// Takes an operand's bytes back; the slot table keeps the case's slots.
    pub(crate) fn gather(
        &self,
        case: &Case,
        name: &str,
        ranges: &[(u64, &[u8])],
        region: &mut Region,
    ) {
        if name == "slots" {
            return;
        }
        for ((from, to, len), (offset, bytes)) in
            self.pieces(case, name, region).into_iter().zip(ranges)
        {
            assert_eq!((*offset, bytes.len()), (region.offset as u64 + to, len));
            region.data_mut()[from..from + len].copy_from_slice(bytes);
        }
    }
}
