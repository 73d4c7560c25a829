//! Owns the words for a byte of an operand; must not know why it is asked for.

use kda_reference::records::RECORD_SIZE;
use kda_reference::{ConvLayout, HEAD_DIM};

use crate::buffers::Buffers;
use crate::case::Case;
use crate::data::MATRIX;

/// Says what lies at `byte` of the region of `operand` of `case`, guards included.
pub(crate) fn locate(case: &Case, operand: &'static str, byte: usize) -> String {
    let empty = Buffers::poisoned(case);
    let Some((_, region)) = empty.regions().into_iter().find(|(n, _)| *n == operand) else {
        return format!("byte {byte}");
    };
    if byte < region.offset {
        return format!("guard, {} bytes before", region.offset - byte);
    }
    let at = byte - region.offset;
    if at >= region.len {
        return format!("guard, {} bytes past the end", at - region.len);
    }
    let (shape, dim) = (&case.shape, case.shape.dim());
    let row = |stride: usize, used: usize| {
        let (row, column) = (at / 2 / stride, at / 2 % stride);
        let note = if column < used { "" } else { " (padding)" };
        format!("row {row} column {column}{note}")
    };
    match operand {
        "projected" => row(shape.pitch, shape.used_columns()),
        "gate_input" => row(shape.gate_stride, dim),
        "out" => row(shape.out_stride, dim),
        "slots" => {
            let index = at / 4;
            let (row, column) = (index / shape.slots_stride, index % shape.slots_stride);
            format!("row {row} column {column}")
        }
        "conv_cache" => {
            let (slot, inside) = (
                at / 2 / shape.conv_slot_stride,
                at / 2 % shape.conv_slot_stride,
            );
            if inside >= 3 * dim * shape.conv_len {
                return format!("slot {slot}, {inside} elements in (between slots)");
            }
            let (channel, position) = match shape.conv_layout {
                ConvLayout::DimFirst => (inside / shape.conv_len, inside % shape.conv_len),
                ConvLayout::TokenFirst => (inside % (3 * dim), inside / (3 * dim)),
            };
            format!("slot {slot} channel {channel} position {position}")
        }
        "state_pool" => {
            let index = at / case.state_bytes();
            let stride = shape.state_slot_stride;
            let (slot, inside) = (index / stride, index % stride);
            if inside >= shape.heads * MATRIX {
                return format!("slot {slot}, {inside} elements in (between slots)");
            }
            let (head, element) = (inside / MATRIX, inside % MATRIX);
            let (value, key) = (element / HEAD_DIM, element % HEAD_DIM);
            format!("slot {slot} head {head} value {value} key {key}")
        }
        "records" => match &shape.records {
            Some(records) => {
                let (slot, inside) = (at / 4 / records.slot_stride, at / 4 % records.slot_stride);
                let (index, inside) = (inside / RECORD_SIZE, inside % RECORD_SIZE);
                let (record, head) = (index / shape.heads, index % shape.heads);
                let (part, place) = (["decay", "k", "u"][inside / HEAD_DIM], inside % HEAD_DIM);
                format!("slot {slot} record {record} head {head} {part} {place}")
            }
            None => format!("byte {at}"),
        },
        _ => format!("byte {at}"),
    }
}
