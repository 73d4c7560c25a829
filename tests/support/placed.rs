//! A harness case as the runtime takes it: settings, specialisations, operands at addresses.

use crate::{Buffers, Case, Region};
use kda_codegen::{
    Arch, ConvLayout, EarlyReads, Error, GateInput, GateSchedule, KernelSpec, Mode, NullRule,
    Rollback, StateDtype,
};
use kda_reference as reference;
use kda_runtime::{
    Buffer, Config, ConvCache, Gate, Projected, RecordPool, Rows, Slots, StatePool, Step, StepKind,
    Weights,
};

/// The settings of a case.
pub fn config(case: &Case, early_reads: EarlyReads) -> Config {
    let shape = &case.shape;
    Config {
        heads: shape.heads,
        conv_bias: case.bias(),
        conv_layout: match shape.conv_layout {
            reference::ConvLayout::DimFirst => ConvLayout::DimFirst,
            reference::ConvLayout::TokenFirst => ConvLayout::TokenFirst,
        },
        gate: match shape.gate {
            reference::Gate::LowerBound { lower_bound } => Gate::LowerBound(lower_bound),
            reference::Gate::Softplus => Gate::Softplus,
        },
        gate_input: gate_input(case),
        null_rule: match shape.null_rule {
            reference::NullRule::NonPositive => NullRule::NonPositive,
            reference::NullRule::Negative => NullRule::Negative,
        },
        state_dtype: match shape.state_type {
            reference::StateType::F32 => StateDtype::F32,
            reference::StateType::Bf16 => StateDtype::Bf16,
        },
        rollback: match shape.records {
            Some(_) => Rollback::Records,
            None => Rollback::Checkpoints,
        },
        ragged: case.token_counts.is_some(),
        early_reads,
        scale: shape.scale,
        eps: shape.eps,
    }
}

/// What the gate's input comes from.
pub fn gate_input(case: &Case) -> GateInput {
    match case.projected_gate() {
        false => GateInput::LowRank,
        true => GateInput::Projected,
    }
}

/// Decode or verify.
pub fn kind(case: &Case) -> StepKind {
    if case.verify {
        StepKind::Verify(case.shape.tokens)
    } else {
        StepKind::Decode
    }
}

/// The modes a case is tried in: every one that a default policy names, and others that take
/// other paths through the templates.
pub fn modes(arch: Arch, gate_input: GateInput) -> Vec<Mode> {
    let mode = |value_split, threads, row_lanes, gate_schedule, slot_hints| Mode {
        value_split,
        threads,
        row_lanes,
        gate_schedule,
        slot_hints,
    };
    use GateSchedule::{Block, Cluster};
    let all = [
        mode(1, 256, 8, Block, false),
        mode(1, 256, 8, Block, true),
        mode(1, 512, 32, Block, false),
        mode(1, 512, 32, Block, true),
        mode(1, 256, 32, Block, false),
        mode(1, 256, 32, Block, true),
        mode(2, 256, 8, Cluster, true),
        mode(2, 256, 32, Cluster, true),
        mode(2, 128, 8, Block, true),
        mode(4, 128, 8, Cluster, true),
        mode(4, 256, 32, Cluster, false),
        mode(8, 128, 8, Cluster, true),
        mode(8, 128, 32, Cluster, true),
        mode(8, 128, 8, Block, false),
    ];
    let mut spec = KernelSpec::new(arch, 1);
    spec.gate_input = gate_input;
    let mut modes: Vec<Mode> = Vec::new();
    for mode in all.map(|mode| mode.with_gate_input(gate_input)) {
        if spec.with_mode(mode).validate().is_ok() && !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    if gate_input == GateInput::Projected && arch.has_clusters() {
        // Threads that keep several gates of a head; only here may so few serve.
        modes.push(mode(8, 64, 8, Block, false));
    }
    modes
}

/// A mode's text with `+early` where caches are read early.
pub fn parse_mode(text: &str) -> Result<(Mode, EarlyReads), Error> {
    match text.strip_suffix("+early") {
        Some(mode) => Ok((mode.parse()?, EarlyReads::Caches)),
        None => Ok((text.parse()?, EarlyReads::Weights)),
    }
}

/// The texts of every mode a case is tried in.
pub fn mode_texts(arch: Arch, gate_input: GateInput) -> Vec<String> {
    let modes = modes(arch, gate_input);
    let mut texts: Vec<String> = modes.iter().map(Mode::to_string).collect();
    if arch.has_clusters() {
        let split4 = match gate_input {
            GateInput::LowRank => "split4-128x8-cluster+early",
            GateInput::Projected => "split4-128x8-block+early",
        };
        texts.push(split4.into());
        texts.push("split1-256x32-block+early".into());
    }
    texts
}

/// The texts of every mode that a kernel of `arch` can have, early reads of caches included.
pub fn legal_mode_texts(arch: Arch, gate_input: GateInput) -> Vec<String> {
    let mut texts = Vec::new();
    for (early_reads, suffix) in [(EarlyReads::Weights, ""), (EarlyReads::Caches, "+early")] {
        let mut spec = KernelSpec::new(arch, 1);
        spec.gate_input = gate_input;
        spec.early_reads = early_reads;
        let modes = spec.legal_modes();
        texts.extend(modes.iter().map(|mode| format!("{mode}{suffix}")));
    }
    texts
}

/// The operands at addresses that `place` gives to each region, by name.
pub fn step(case: &Case, buffers: &Buffers, place: impl Fn(&str) -> u64) -> Step {
    let shape = &case.shape;
    let buffer = |name: &str, region: &Region, element_bytes: usize| {
        Buffer::new(
            place(name) + region.offset as u64,
            region.len / element_bytes,
        )
    };
    let state_bytes = case.state_bytes();
    let mut projected = Projected::packed(
        buffer("projected", &buffers.projected, 2),
        shape.pitch as i64,
        shape.heads,
    );
    if let Some(gate) = &buffers.gate_input {
        projected = projected.with_gate_input(Rows {
            buffer: buffer("gate_input", gate, 2),
            stride: shape.gate_stride as i64,
        });
    }
    let f_b = buffers.f_b.as_ref();
    Step {
        kind: kind(case),
        requests: shape.requests,
        projected,
        weights: Weights {
            conv: buffer("conv_weight", &buffers.conv_weight, 4),
            conv_bias: buffers
                .conv_bias
                .as_ref()
                .map(|bias| buffer("conv_bias", bias, 4)),
            f_b: f_b.map_or(Buffer::default(), |f_b| buffer("f_b", f_b, 2)),
            a_log: buffer("a_log", &buffers.a_log, 4),
            dt_bias: buffer("dt_bias", &buffers.dt_bias, 4),
            norm: buffer("norm", &buffers.norm, 4),
        },
        conv_cache: ConvCache {
            buffer: buffer("conv_cache", &buffers.conv_cache, 2),
            slot_stride: shape.conv_slot_stride as i64,
            length: shape.conv_len,
        },
        state: StatePool {
            buffer: buffer("state_pool", &buffers.state, state_bytes),
            slot_stride: shape.state_slot_stride as i64,
        },
        state_source: None,
        pool_slots: shape.pool_slots,
        slots: Slots {
            buffer: buffer("slots", &buffers.slots, 4),
            stride: shape.slots_stride as i64,
            columns: shape.columns,
        },
        accepted: buffers
            .accepted
            .as_ref()
            .map(|accepted| buffer("accepted", accepted, 4)),
        token_counts: buffers
            .token_counts
            .as_ref()
            .map(|counts| buffer("token_counts", counts, 4)),
        records: buffers
            .records
            .as_ref()
            .zip(shape.records)
            .map(|(region, records)| RecordPool {
                buffer: buffer("records", region, 4),
                slot_stride: records.slot_stride as i64,
                count: records.count,
            }),
        out: Rows {
            buffer: buffer("out", &buffers.out, 2),
            stride: shape.out_stride as i64,
        },
    }
}

/// The specialisation of a case in one mode.
pub fn spec(case: &Case, arch: Arch, mode: &str) -> Result<KernelSpec, kda_runtime::Error> {
    let (mode, early_reads) = parse_mode(mode)?;
    let policies = kda_runtime::Policies::single(&[kind(case)], mode);
    let plan = kda_runtime::Plan::new(arch, &config(case, early_reads), &policies)?;
    Ok(plan.kernels()[0])
}

/// The runtime's faults as the harness compares them.
pub fn faults(faults: kda_runtime::Faults) -> Option<crate::Faults> {
    let kind = match faults.kind {
        kda_runtime::FaultKind::SlotOutOfRange => reference::FaultKind::SlotOutOfRange,
        kda_runtime::FaultKind::AcceptedOutOfRange => reference::FaultKind::AcceptedOutOfRange,
        kda_runtime::FaultKind::NullSource => reference::FaultKind::NullSource,
        kda_runtime::FaultKind::TokensOutOfRange => reference::FaultKind::TokensOutOfRange,
        _ => return None,
    };
    Some(crate::Faults {
        count: faults.count,
        kind,
        request: faults.request,
    })
}
