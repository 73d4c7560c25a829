//! A valid step for tests without a device; addresses are numbers only.

use kda_runtime::{Buffer, ConvCache, Projected, Rows, Slots, StatePool, Step, StepKind, Weights};

pub const HEADS: usize = 2;
pub const DIM: usize = HEADS * 128;
pub const PITCH: usize = 4 * DIM + 128 + HEADS;
pub const SLOTS: usize = 9;
/// Address of operand `i`, far from the others.
pub fn at(i: u64) -> u64 {
    i << 32
}

/// A valid step of 3 requests, decode or verify.
pub fn step(kind: StepKind) -> Step {
    let (requests, columns) = (3, kind.tokens());
    let rows = requests * columns;
    let length = 3 + columns - 1;
    Step {
        kind,
        requests,
        projected: Projected::packed(Buffer::new(at(1), rows * PITCH), PITCH as i64, HEADS),
        weights: Weights {
            conv: Buffer::new(at(2), 12 * DIM),
            conv_bias: None,
            f_b: Buffer::new(at(3), DIM * 128),
            a_log: Buffer::new(at(4), HEADS),
            dt_bias: Buffer::new(at(5), DIM),
            norm: Buffer::new(at(6), 128),
        },
        conv_cache: ConvCache {
            buffer: Buffer::new(at(7), SLOTS * 3 * DIM * length),
            slot_stride: (3 * DIM * length) as i64,
            length,
        },
        state: StatePool {
            buffer: Buffer::new(at(8), SLOTS * DIM * 128),
            slot_stride: (DIM * 128) as i64,
        },
        state_source: None,
        pool_slots: SLOTS,
        slots: Slots {
            buffer: Buffer::new(at(9), requests * columns),
            stride: columns as i64,
            columns,
        },
        accepted: kind.is_verify().then(|| Buffer::new(at(10), requests)),
        token_counts: None,
        records: None,
        out: Rows {
            buffer: Buffer::new(at(11), rows * DIM),
            stride: DIM as i64,
        },
    }
}
