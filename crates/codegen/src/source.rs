//! Renders the constants and joins the plain CUDA files to them. The only user of tera and of the
//! template files.

use serde::Serialize;

use crate::{
    ConvLayout, EarlyReads, Error, GateInput, GateKind, GateSchedule, KernelSpec, NullRule, Role,
    Rollback, StateDtype, operands,
};

const CONSTANTS: &str = include_str!("../templates/constants.cuh.tera");
const RESET_CONSTANTS: &str = include_str!("../templates/reset_constants.cuh.tera");

/// The plain files, in the order they build on each other.
const BODY: &[(&str, &str)] = &[
    (
        "primitives/types.cuh",
        include_str!("../templates/primitives/types.cuh"),
    ),
    (
        "primitives/math.cuh",
        include_str!("../templates/primitives/math.cuh"),
    ),
    (
        "primitives/memory.cuh",
        include_str!("../templates/primitives/memory.cuh"),
    ),
    (
        "primitives/cluster.cuh",
        include_str!("../templates/primitives/cluster.cuh"),
    ),
    (
        "primitives/reduce.cuh",
        include_str!("../templates/primitives/reduce.cuh"),
    ),
    (
        "stages/budget.cuh",
        include_str!("../templates/stages/budget.cuh"),
    ),
    (
        "stages/shared.cuh",
        include_str!("../templates/stages/shared.cuh"),
    ),
    (
        "stages/slots.cuh",
        include_str!("../templates/stages/slots.cuh"),
    ),
    (
        "stages/conv.cuh",
        include_str!("../templates/stages/conv.cuh"),
    ),
    (
        "stages/gate.cuh",
        include_str!("../templates/stages/gate.cuh"),
    ),
    (
        "stages/delta.cuh",
        include_str!("../templates/stages/delta.cuh"),
    ),
    (
        "stages/records.cuh",
        include_str!("../templates/stages/records.cuh"),
    ),
    (
        "stages/norm.cuh",
        include_str!("../templates/stages/norm.cuh"),
    ),
    (
        "stages/pinned.cuh",
        include_str!("../templates/stages/pinned.cuh"),
    ),
    ("kda_step.cu", include_str!("../templates/kda_step.cu")),
];

/// The plain files of a reset.
const RESET_BODY: &[(&str, &str)] = &[
    (
        "primitives/cluster.cuh",
        include_str!("../templates/primitives/cluster.cuh"),
    ),
    ("kda_reset.cu", include_str!("../templates/kda_reset.cu")),
];

/// One kernel as CUDA text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name of the entry point.
    pub entry: String,
    /// The complete translation unit; it includes nothing.
    pub text: String,
}

/// What `constants.cuh.tera` may name; every field is used there.
#[derive(Serialize)]
struct Constants<'a> {
    entry: &'a str,
    heads: usize,
    tokens: usize,
    verify: bool,
    ragged: bool,
    records: bool,
    value_split: u32,
    threads: u32,
    row_lanes: u32,
    min_blocks: u32,
    shared_gate: bool,
    slot_hints: bool,
    early_caches: bool,
    conv_bias: bool,
    conv_token_first: bool,
    lower_bound_gate: bool,
    projected_gate: bool,
    null_non_positive: bool,
    dependent_launch: bool,
    state_type: &'static str,
    geometry_fields: String,
    parameters: String,
}

/// What `reset_constants.cuh.tera` may name; every field is used there.
#[derive(Serialize)]
struct ResetConstants<'a> {
    entry: &'a str,
    null_non_positive: bool,
    dependent_launch: bool,
    state_type: &'static str,
    geometry_fields: String,
    parameters: String,
}

/// Renders `spec`: the same specialisation gives the same bytes.
///
/// # Errors
///
/// [`Error::Illegal`] for a specialisation that no kernel exists for, [`Error::Render`] for a
/// template that names an unknown variable.
pub fn render(spec: &KernelSpec) -> Result<Source, Error> {
    spec.validate()?;
    let entry = spec.entry();
    // Destructured in full: a new field demands a decision here.
    let &KernelSpec {
        role,
        arch,
        heads,
        tokens,
        verify,
        ragged,
        rollback,
        conv_bias,
        conv_layout,
        gate,
        gate_input,
        null_rule,
        state_dtype,
        early_reads,
        mode,
    } = spec;
    let state_type = match state_dtype {
        StateDtype::F32 => "float",
        StateDtype::Bf16 => "bf16_bits",
    };
    if role == Role::Reset {
        let constants = ResetConstants {
            entry: &entry,
            null_non_positive: null_rule == NullRule::NonPositive,
            dependent_launch: arch.has_clusters(),
            state_type,
            geometry_fields: operands::c_geometry(operands::reset::GEOMETRY),
            parameters: operands::c_parameters(operands::reset::PARAMETERS),
        };
        let text = render_text(RESET_CONSTANTS, &constants, &entry)?;
        return Ok(joined(entry, text, RESET_BODY));
    }
    let constants = Constants {
        entry: &entry,
        heads,
        tokens,
        verify,
        ragged,
        records: rollback == Rollback::Records,
        value_split: mode.value_split,
        threads: mode.threads,
        row_lanes: mode.row_lanes,
        min_blocks: spec.min_blocks(),
        shared_gate: mode.gate_schedule == GateSchedule::Cluster,
        slot_hints: mode.slot_hints,
        early_caches: early_reads == EarlyReads::Caches,
        conv_bias,
        conv_token_first: conv_layout == ConvLayout::TokenFirst,
        lower_bound_gate: gate == GateKind::LowerBound,
        projected_gate: gate_input == GateInput::Projected,
        null_non_positive: null_rule == NullRule::NonPositive,
        dependent_launch: arch.has_clusters(),
        state_type,
        geometry_fields: operands::c_geometry(operands::GEOMETRY),
        parameters: operands::c_parameters(operands::PARAMETERS),
    };
    let text = render_text(CONSTANTS, &constants, &entry)?;
    Ok(joined(entry, text, BODY))
}

fn joined(entry: String, mut text: String, body: &[(&str, &str)]) -> Source {
    for (name, body) in body {
        text.push_str("\n// ---- ");
        text.push_str(name);
        text.push('\n');
        text.push_str(body);
    }
    Source { entry, text }
}

fn render_text(template: &str, constants: &impl Serialize, entry: &str) -> Result<String, Error> {
    let failed = |source| Error::Render {
        entry: entry.into(),
        source,
    };
    let context = tera::Context::from_serialize(constants).map_err(failed)?;
    tera::Tera::one_off(template, &context, false).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_hold_no_condition() {
        // tera takes a misspelt name in a condition for false.
        assert!(!CONSTANTS.contains("{%"));
        assert!(!RESET_CONSTANTS.contains("{%"));
    }

    #[test]
    fn plain_files_hold_no_tag() {
        for (name, body) in BODY.iter().chain(RESET_BODY) {
            assert!(!body.contains("{{") || !body.contains("}}"), "{name}");
        }
    }
}
