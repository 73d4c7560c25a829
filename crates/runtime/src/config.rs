//! The settings of one model on one device, and which kernel serves which step. Pure.

use std::fmt;

use kda_codegen::schedule::MAX_REQUESTS;
use kda_codegen::{
    Arch, ConvLayout, EarlyReads, GateInput, GateKind, GateSchedule, KernelSpec, MAX_TOKENS, Mode,
    NullRule, Role, Rollback, StateDtype,
};

use crate::{Error, PolicyFile};

/// Decay formula with its parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// exp(bound · sigmoid(exp(A_log) · (g + dt_bias))); the bound is negative, −5 in Kimi K3.
    LowerBound(f32),
    /// exp(−exp(A_log) · softplus(g + dt_bias)).
    Softplus,
}

impl Gate {
    /// The gate of this kind; the bound is Kimi K3's.
    pub fn of_kind(kind: GateKind) -> Gate {
        match kind {
            GateKind::LowerBound => Gate::LowerBound(-5.0),
            GateKind::Softplus => Gate::Softplus,
        }
    }
}

/// A model's KDA layers on one device. No field has a default: every one changes the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Heads on this device, 1..=128.
    pub heads: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Order inside a conv cache slot.
    pub conv_layout: ConvLayout,
    /// Decay formula.
    pub gate: Gate,
    /// Whether the launch computes F_B · F_A, or reads the product that the engine made and rounded.
    pub gate_input: GateInput,
    /// Null slot values.
    pub null_rule: NullRule,
    /// Element type of the state pool.
    pub state_dtype: StateDtype,
    /// What a verify step keeps. One setting for all steps: a step can only start from what the one
    /// before it left.
    pub rollback: Rollback,
    /// Whether verify steps take a number of tokens for each request.
    pub ragged: bool,
    /// What may be read before the kernel ahead has finished.
    pub early_reads: EarlyReads,
    /// Factor of the normalised query, 128^−½ in every known model.
    pub scale: f32,
    /// Added to the mean square of the output norm.
    pub eps: f32,
}

impl Config {
    /// Settings of Kimi K3: no conv bias, dim-first cache, lower bound −5, low-rank gate, null
    /// slots ≤ 0, f32 state, checkpoints, as many tokens for every request, weights read early.
    pub fn kimi_k3(heads: usize) -> Config {
        Config {
            heads,
            conv_bias: false,
            conv_layout: ConvLayout::DimFirst,
            gate: Gate::LowerBound(-5.0),
            gate_input: GateInput::LowRank,
            null_rule: NullRule::NonPositive,
            state_dtype: StateDtype::F32,
            rollback: Rollback::Checkpoints,
            ragged: false,
            early_reads: EarlyReads::Weights,
            // 128^−½, to the last bit.
            scale: std::f32::consts::SQRT_2 / 16.0,
            eps: 1e-5,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), Error> {
        let illegal = |setting, value, allowed| {
            Err(Error::IllegalSetting {
                setting,
                value,
                allowed,
            })
        };
        if let Gate::LowerBound(bound) = self.gate
            && !(bound < 0.0 && bound.is_finite())
        {
            return illegal("lower bound", bound, "finite and below 0");
        }
        if !self.scale.is_finite() || self.scale == 0.0 {
            return illegal("scale", self.scale, "finite and not 0");
        }
        if !(self.eps > 0.0 && self.eps.is_finite()) {
            return illegal("eps", self.eps, "finite and above 0");
        }
        Ok(())
    }

    /// What a step of `kind` keeps: a decode step knows no records.
    pub(crate) fn rollback_of(&self, kind: StepKind) -> Rollback {
        match kind {
            StepKind::Decode => Rollback::Checkpoints,
            StepKind::Verify(_) => self.rollback,
        }
    }

    pub(crate) fn spec(&self, arch: Arch, kind: StepKind, mode: Mode) -> KernelSpec {
        KernelSpec {
            role: Role::Step,
            arch,
            heads: self.heads,
            tokens: kind.tokens(),
            verify: kind.is_verify(),
            ragged: self.ragged && kind.is_verify(),
            rollback: self.rollback_of(kind),
            conv_bias: self.conv_bias,
            conv_layout: self.conv_layout,
            gate: match self.gate {
                Gate::LowerBound(_) => GateKind::LowerBound,
                Gate::Softplus => GateKind::Softplus,
            },
            gate_input: self.gate_input,
            null_rule: self.null_rule,
            state_dtype: self.state_dtype,
            early_reads: self.early_reads,
            mode,
        }
    }
}

/// What a step does with its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepKind {
    /// One token a request, from the state in its slot: what a decode step left, or a verify step of
    /// which one token was accepted.
    Decode,
    /// This many tokens a request, from the checkpoint or the records that `accepted` chooses.
    Verify(usize),
}

impl StepKind {
    /// Tokens a request brings.
    pub fn tokens(self) -> usize {
        match self {
            StepKind::Decode => 1,
            StepKind::Verify(tokens) => tokens,
        }
    }

    /// Whether the step reads accepted counts.
    pub fn is_verify(self) -> bool {
        matches!(self, StepKind::Verify(_))
    }

    /// Place in a table of [`KINDS`] entries; `None` for a kind no kernel exists for.
    pub(crate) fn index(self) -> Option<usize> {
        match self {
            StepKind::Decode => Some(0),
            StepKind::Verify(tokens) => (1..=MAX_TOKENS).contains(&tokens).then_some(tokens),
        }
    }
}

/// Kinds of steps: decode and every verify length.
pub(crate) const KINDS: usize = MAX_TOKENS + 1;

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepKind::Decode => f.write_str("decode"),
            StepKind::Verify(tokens) => write!(f, "verify {tokens}"),
        }
    }
}

/// One rule: steps of `kind` with up to `max_requests` requests run in `mode`, unless a rule with
/// fewer requests covers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Kind of the step.
    pub kind: StepKind,
    /// Largest number of requests.
    pub max_requests: usize,
    /// Schedule.
    pub mode: Mode,
}

/// Which mode serves which step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies(pub Vec<Policy>);

impl Policies {
    /// One mode for every size of the given kinds.
    pub fn single(kinds: &[StepKind], mode: Mode) -> Policies {
        Policies(
            kinds
                .iter()
                .map(|&kind| Policy {
                    kind,
                    max_requests: MAX_REQUESTS,
                    mode,
                })
                .collect(),
        )
    }

    /// The one that serves a step: of its kind, the one for the fewest requests that covers them.
    pub fn serving(&self, kind: StepKind, requests: usize) -> Option<Policy> {
        let covering = |policy: &&Policy| policy.kind == kind && requests <= policy.max_requests;
        let all = self.0.iter().filter(covering);
        all.min_by_key(|policy| policy.max_requests).copied()
    }

    /// The measured choice for a device.
    ///
    /// Where a file that this crate carries ([`PolicyFile::shipped`]) names the device, as
    /// [`Policies::from_file`] reads it. Elsewhere, and for an architecture alone, by a rule: the
    /// fewer (request, head) pairs there are, the more blocks share one. The times behind both, of
    /// an H200, are in `docs/performance.md`; without clusters one block serves a head. They are those
    /// of the low-rank gate; with a projected one the same modes serve, each block computing its gates.
    /// The files hold times of the lower-bound gate: with softplus the rule serves, and it names none
    /// of the modes that would spill registers there.
    ///
    /// ```no_run
    /// # use kda_runtime::{Config, Device, Policies, StepKind};
    /// let device = Device::primary(0)?;
    /// let config = Config::kimi_k3(12);
    /// let kinds = [StepKind::Decode, StepKind::Verify(4)];
    /// // By the device's name; `device.arch()` gives the rule of its architecture.
    /// let policies = Policies::for_device(&device, &config, &kinds);
    /// # Ok::<(), kda_runtime::Error>(())
    /// ```
    pub fn for_device<'a>(
        target: impl Into<Target<'a>>,
        config: &Config,
        kinds: &[StepKind],
    ) -> Policies {
        let target = target.into();
        let lower_bound = matches!(config.gate, Gate::LowerBound(_));
        if let Some(file) = target.file().filter(|_| lower_bound) {
            return Policies::measured(file, config, kinds);
        }
        let rules = kinds.iter().map(|&kind| rule(target.arch, config, kind));
        Policies(rules.collect::<Vec<_>>().concat()).with_gate_input(config.gate_input)
    }

    /// Every mode made one of this gate input.
    fn with_gate_input(mut self, gate_input: GateInput) -> Policies {
        for policy in &mut self.0 {
            policy.mode = policy.mode.with_gate_input(gate_input);
        }
        self
    }

    /// What a policy file says of steps with these settings, and the rule of
    /// [`Policies::for_device`] where it says nothing: for other heads, kinds, early reads or
    /// rollback, between two measured batch sizes that are far apart, and above the largest.
    /// [`PolicyFile::entry`] tells which of the two serves a step: a file of other heads or kinds is
    /// no error, and serves none.
    ///
    /// # Errors
    ///
    /// As [`PolicyFile::require_arch`]. That the file's device has another name than the target is no
    /// error.
    pub fn from_file<'a>(
        file: &PolicyFile,
        target: impl Into<Target<'a>>,
        config: &Config,
        kinds: &[StepKind],
    ) -> Result<Policies, Error> {
        file.require_arch(target.into().arch)?;
        Ok(Policies::measured(file, config, kinds))
    }

    /// [`Policies::from_file`] for the file's own architecture.
    fn measured(file: &PolicyFile, config: &Config, kinds: &[StepKind]) -> Policies {
        let mut policies = Vec::new();
        for &kind in kinds {
            let rule = rule(file.arch(), config, kind);
            let mut merged: Vec<Policy> = Vec::new();
            // Up to so many requests; neighbours of one mode are one policy.
            let mut push = |max_requests, mode| match merged.last_mut() {
                Some(last) if last.mode == mode => last.max_requests = max_requests,
                _ => merged.push(Policy {
                    kind,
                    max_requests,
                    mode,
                }),
            };
            let mut covered = 0;
            let end = (MAX_REQUESTS + 1, MAX_REQUESTS, None);
            let measured = file
                .of(config, kind)
                .map(|entry| (entry.min_requests, entry.max_requests, Some(entry.mode)));
            for (least, most, mode) in measured.chain([end]) {
                for policy in &rule {
                    let up_to = policy.max_requests.min(least - 1);
                    if up_to > covered {
                        covered = up_to;
                        push(up_to, policy.mode);
                    }
                }
                if let Some(mode) = mode {
                    covered = most;
                    push(most, mode);
                }
            }
            policies.extend(merged);
        }
        Policies(policies).with_gate_input(config.gate_input)
    }
}

/// What policies are for: an architecture, and which of its devices where that is known. An
/// [`Arch`] and a [`Device`](crate::Device) are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    arch: Arch,
    name: Option<&'a str>,
}

impl<'a> Target<'a> {
    /// A device by the name that the driver gives it, such as `NVIDIA H200`.
    pub fn named(arch: Arch, name: &'a str) -> Target<'a> {
        Target {
            arch,
            name: Some(name),
        }
    }

    /// The architecture.
    pub fn arch(self) -> Arch {
        self.arch
    }

    /// The device's name.
    pub fn name(self) -> Option<&'a str> {
        self.name
    }

    fn file(self) -> Option<&'static PolicyFile> {
        let name = self.name?;
        PolicyFile::shipped()
            .iter()
            .find(|file| file.arch() == self.arch && file.device() == name)
    }
}

impl Target<'static> {
    /// An architecture alone, and each of its devices that [`PolicyFile::shipped`] names: whoever
    /// compiles kernels ahead of time for [`Policies::for_device`] needs those of all.
    pub fn all(arch: Arch) -> impl Iterator<Item = Target<'static>> {
        let named = PolicyFile::shipped()
            .iter()
            .filter(move |file| file.arch() == arch)
            .map(move |file| Target::named(arch, file.device()));
        std::iter::once(Target::from(arch)).chain(named)
    }
}

impl From<Arch> for Target<'_> {
    fn from(arch: Arch) -> Self {
        Target { arch, name: None }
    }
}

/// Modes by the number of (request, head) pairs, fewest first; the last serves every larger batch.
pub(crate) fn rule(arch: Arch, config: &Config, kind: StepKind) -> Vec<Policy> {
    let early = config.early_reads == EarlyReads::Caches;
    let mode = |value_split, threads, row_lanes, slot_hints| Mode {
        value_split,
        threads,
        row_lanes,
        gate_schedule: match value_split {
            1 => GateSchedule::Block,
            _ => GateSchedule::Cluster,
        },
        slot_hints: slot_hints && !early,
    };
    let (split8, split4) = (mode(8, 128, 8, true), mode(4, 128, 8, true));
    let (split2, split2_rows) = (mode(2, 256, 8, true), mode(2, 256, 32, true));
    let wide = mode(1, 256, 32, false);
    let (hinted, hinted_wide) = (mode(1, 512, 32, true), mode(1, 256, 32, true));
    // Largest number of (request, head) pairs, and the mode up to there.
    const ANY: usize = usize::MAX;
    let tokens = kind.tokens();
    let lower_bound = matches!(config.gate, Gate::LowerBound(_));
    let decode = [
        (16, split8),
        (56, split4),
        (120, split2),
        // 512 threads have 64 registers each, which the softplus gate overfills.
        (192, if lower_bound { hinted } else { hinted_wide }),
        (ANY, hinted_wide),
    ];
    let promised = [(144, split4), (ANY, wide)];
    let split8_rows = mode(8, 128, 32, true);
    // What spills is not named: of wide records, 32 lanes a row above 4 tokens or, with softplus, above
    // 3; of checkpoints, split4 and 32 lanes a row above 4; hints above 8.
    let records = if tokens <= 3 || (tokens == 4 && lower_bound) {
        hinted_wide
    } else if tokens <= 8 {
        mode(1, 256, 8, true)
    } else {
        wide
    };
    let verify = match (config.rollback_of(kind), tokens) {
        (Rollback::Records, ..=2) => vec![
            (16, split8_rows),
            (96, split2_rows),
            (384, records),
            (ANY, wide),
        ],
        (Rollback::Records, ..=8) => vec![(16, split8_rows), (96, split2_rows), (ANY, records)],
        (Rollback::Records, _) => vec![(16, split8), (96, split2), (ANY, records)],
        (Rollback::Checkpoints, ..=2) => vec![
            (16, split8_rows),
            (64, split4),
            (96, split2_rows),
            (192, hinted_wide),
            (ANY, wide),
        ],
        (Rollback::Checkpoints, ..=4) => vec![
            (16, split8_rows),
            (64, split4),
            (192, split2_rows),
            (ANY, wide),
        ],
        _ => vec![(16, split8), (192, split2), (ANY, wide)],
    };
    let rows = match (arch.has_clusters(), kind.is_verify(), early) {
        (false, _, _) => &promised[1..],
        (true, false, false) => &decode[..],
        (true, false, true) => &promised,
        (true, true, _) => &verify,
    };
    let mut policies: Vec<Policy> = Vec::new();
    let mut covered = 0;
    for &(pairs, mode) in rows {
        let max_requests = (pairs / config.heads.max(1)).min(MAX_REQUESTS);
        if max_requests > covered {
            covered = max_requests;
            policies.push(Policy {
                kind,
                max_requests,
                mode,
            });
        }
    }
    policies
}

#[cfg(test)]
mod tests {
    use super::Config;

    #[test]
    fn the_scale_is_the_nearest_f32() {
        assert_eq!(Config::kimi_k3(1).scale, 128f64.powf(-0.5) as f32);
    }
}
