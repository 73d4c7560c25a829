//! Owns what a run of random cases reached; must not know whether they passed.

use std::collections::BTreeMap;
use std::fmt;

use kda_reference::{FaultKind, Plan};

use crate::case::{
    Case, WARP_COLUMNS, gate_input_name, gate_name, layout_name, null_name, state_name,
};
use crate::limits::Limits;

/// Fewer specialisations than this may not hold every value of every dimension.
const COVERING_SPECIALISATIONS: u64 = 48;

/// Up to so many heads, blocks take a request's heads all in turn: `head_group` of the templates. That
/// more are in groups is shown by a mutation which only they notice.
const GROUPED_HEADS: usize = 12;

/// Records that a kernel reads at once.
const RECORD_PIECE: usize = 8;

/// How often each value of each dimension occurred.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    counts: BTreeMap<(&'static str, String), u64>,
}

impl Coverage {
    /// Every value that cases within `limits` can take, at 0; nothing where so few specialisations
    /// are drawn that they may not hold every value.
    pub fn new(limits: &Limits) -> Coverage {
        let mut coverage = Coverage::default();
        if (1..COVERING_SPECIALISATIONS).contains(&limits.specialisations) {
            return coverage;
        }
        let mut expect = |dimension, value: &str| {
            coverage.counts.insert((dimension, value.into()), 0);
        };
        let several = limits.tokens.iter().any(|&t| t > 1);
        for tokens in &limits.tokens {
            expect("tokens", &tokens.to_string());
        }
        if limits.tokens.contains(&1) {
            expect("step", "decode");
            expect("step", "verify of one");
        }
        if several {
            expect("step", "verify");
        }
        limits
            .gates
            .iter()
            .for_each(|&g| expect("gate", gate_name(g)));
        limits
            .layouts
            .iter()
            .for_each(|&l| expect("conv layout", layout_name(l)));
        limits
            .null_rules
            .iter()
            .for_each(|&n| expect("null rule", null_name(n)));
        limits
            .state_types
            .iter()
            .for_each(|&s| expect("state", state_name(s)));
        limits
            .biases
            .iter()
            .for_each(|&b| expect("bias", if b { "yes" } else { "no" }));
        limits
            .projected_gates
            .iter()
            .for_each(|&p| expect("gate input", gate_input_name(p)));
        if limits.projected_gates.contains(&true) {
            for value in ["16 bytes", "2 bytes"] {
                expect("gate start", value);
            }
            for value in ["tight", "slack"] {
                expect("gate stride", value);
            }
        }
        limits
            .regimes
            .iter()
            .for_each(|r| expect("values", &format!("{r:?}")));
        let ragged = limits.ragged.contains(&true);
        if several && limits.records.contains(&true) {
            expect("rollback", "records");
            for repeated in ["none", "some", "past a piece"] {
                expect("records read", repeated);
            }
        }
        if several && limits.records.contains(&false) {
            expect("rollback", "checkpoints");
        }
        if several && ragged {
            expect("token count", "all");
            expect("token count", "some");
            if limits.odd_percent > 0 {
                expect("token count", "none");
                expect("request", "token count outside");
            }
        }
        expect("batch", "one");
        if limits.max_requests > 1 {
            expect("batch", "several");
        }
        if limits.many_heads > GROUPED_HEADS {
            expect("heads in groups", "several groups");
            expect("heads in groups", "one group");
        }
        for value in ["tight, odd", "tight, even", "slack, odd", "slack, even"] {
            // Used columns are 641 heads: odd pitches need an odd count or slack.
            if value != "tight, even" || limits.max_heads > 1 {
                expect("pitch", value);
            }
        }
        for dimension in ["state stride", "conv stride", "conv line", "out stride"] {
            expect(dimension, "tight");
            expect(dimension, "slack");
        }
        expect("slot columns", "as tokens");
        expect("slot columns", "more");
        expect("slot columns", "past a warp");
        expect("source column", "within a warp");
        expect("source column", "past a warp");
        expect("projected start", "16 bytes");
        expect("projected start", "2 bytes");
        expect("request", "live");
        if limits.odd_percent > 0 {
            expect("request", "null");
            expect("pools", "slots");
            expect("pools", "empty");
            expect("request", "slot beyond the pool");
            expect("request", "accepted outside");
            expect("request", "null source");
            expect("fault", "none");
            expect("fault", "one");
            if limits.max_requests > 1 {
                expect("fault", "several");
            }
            if several {
                expect("request", "null checkpoint");
            }
        }
        for accepted in ["first", "last"] {
            expect("accepted", accepted);
        }
        coverage
    }

    fn count(&mut self, dimension: &'static str, value: impl Into<String>) {
        *self.counts.entry((dimension, value.into())).or_default() += 1;
    }

    /// Counts `case`, run in `mode`.
    pub fn add(&mut self, case: &Case, mode: &str) {
        let shape = &case.shape;
        let tight = |is: bool| if is { "tight" } else { "slack" };
        self.count("mode", mode);
        self.count("heads", shape.heads.to_string());
        let grouped = shape.heads > GROUPED_HEADS && shape.requests > 1;
        let groups = if grouped {
            "several groups"
        } else {
            "one group"
        };
        self.count("heads in groups", groups);
        self.count("tokens", shape.tokens.to_string());
        let step = match (case.verify, shape.tokens) {
            (false, _) => "decode",
            (true, 1) => "verify of one",
            (true, _) => "verify",
        };
        self.count("step", step);
        self.count("gate", gate_name(shape.gate));
        self.count("gate input", gate_input_name(case.projected_gate()));
        if case.projected_gate() {
            let aligned = case.skew.gate_input == 0;
            self.count("gate start", if aligned { "16 bytes" } else { "2 bytes" });
            let dense = shape.gate_stride == shape.dim();
            self.count("gate stride", tight(dense));
        }
        self.count("conv layout", layout_name(shape.conv_layout));
        self.count("null rule", null_name(shape.null_rule));
        self.count("state", state_name(shape.state_type));
        self.count("bias", if case.bias() { "yes" } else { "no" });
        self.count("values", format!("{:?}", case.regime));
        self.count(
            "batch",
            if shape.requests == 1 {
                "one"
            } else {
                "several"
            },
        );
        let parity = if shape.pitch % 2 == 1 { "odd" } else { "even" };
        let pitch = tight(shape.pitch == shape.used_columns());
        self.count("pitch", format!("{pitch}, {parity}"));
        let (dim, matrices) = (shape.dim(), shape.heads * crate::MATRIX);
        self.count("state stride", tight(shape.state_slot_stride == matrices));
        let line = 3 * dim * shape.conv_len;
        self.count("conv stride", tight(shape.conv_slot_stride == line));
        self.count("conv line", tight(shape.conv_len == shape.columns + 2));
        self.count("out stride", tight(shape.out_stride == dim));
        let columns = match shape.columns {
            columns if columns > WARP_COLUMNS => "past a warp",
            columns if columns > shape.tokens => "more",
            _ => "as tokens",
        };
        self.count("slot columns", columns);
        let pools = if shape.pool_slots == 0 {
            "empty"
        } else {
            "slots"
        };
        self.count("pools", pools);
        let aligned = case.skew.projected == 0;
        self.count(
            "projected start",
            if aligned { "16 bytes" } else { "2 bytes" },
        );
        for request in 0..shape.requests {
            if let Some(counts) = &case.token_counts
                && let Ok(count @ 0..) = usize::try_from(counts[request])
                && count <= shape.tokens
            {
                let value = match count {
                    0 => "none",
                    _ if count == shape.tokens => "all",
                    _ => "some",
                };
                self.count("token count", value);
            }
            let value = match case.plan(request) {
                Plan::Null => "null",
                Plan::Fault(FaultKind::SlotOutOfRange) => "slot beyond the pool",
                Plan::Fault(FaultKind::AcceptedOutOfRange) => "accepted outside",
                Plan::Fault(FaultKind::NullSource) => "null source",
                Plan::Fault(FaultKind::TokensOutOfRange) => "token count outside",
                Plan::Live {
                    checkpoints,
                    offset,
                    ..
                } => {
                    if case.verify {
                        let rollback = shape.records.map_or("checkpoints", |_| "records");
                        self.count("rollback", rollback);
                    }
                    if shape.records.is_some() {
                        let read = match offset {
                            0 => "none",
                            1..=RECORD_PIECE => "some",
                            _ => "past a piece",
                        };
                        self.count("records read", read);
                    } else if case.verify && shape.columns > 1 {
                        let accepted = match offset {
                            0 => "first",
                            _ if offset + 1 == shape.columns => "last",
                            _ => "between",
                        };
                        self.count("accepted", accepted);
                        let source = match offset < WARP_COLUMNS {
                            true => "within a warp",
                            false => "past a warp",
                        };
                        self.count("source column", source);
                    }
                    if shape.records.is_none() && checkpoints.contains(&None) {
                        self.count("request", "null checkpoint");
                    }
                    "live"
                }
            };
            self.count("request", value);
        }
        let faults = match case.faults().len() {
            0 => "none",
            1 => "one",
            _ => "several",
        };
        self.count("fault", faults);
    }

    /// Adds the counts of another run.
    pub fn merge(&mut self, other: &Coverage) {
        for (key, count) in &other.counts {
            *self.counts.entry(key.clone()).or_default() += count;
        }
    }

    /// Values that never occurred, as "dimension: value".
    pub fn missing(&self) -> Vec<String> {
        let never = self.counts.iter().filter(|&(_, &count)| count == 0);
        never.map(|((d, v), _)| format!("{d}: {v}")).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = "";
        for ((dimension, value), count) in &self.counts {
            if *dimension == last {
                write!(f, ", {value} {count}")?;
            } else {
                if !last.is_empty() {
                    writeln!(f)?;
                }
                write!(f, "{dimension:<16}{value} {count}")?;
                last = dimension;
            }
        }
        Ok(())
    }
}
