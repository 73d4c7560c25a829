//! What may vary between kernels, and which combinations are legal. Owns no CUDA text and no
//! library.

use std::fmt;
use std::str::FromStr;

use crate::{Error, MAX_HEADS, MAX_TOKENS};

/// Declares a field's alternatives once: the type, its text form and its parser.
macro_rules! choice {
    ($(#[$doc:meta])* $type:ident ($what:literal, $allowed:literal) { $( $(#[$variant_doc:meta])* $variant:ident = $text:literal, )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $type { $( $(#[$variant_doc])* $variant, )* }

        impl $type {
            /// Every alternative.
            pub const ALL: &[$type] = &[ $( $type::$variant, )* ];
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( $type::$variant => $text, )* })
            }
        }

        impl FromStr for $type {
            type Err = Error;
            fn from_str(text: &str) -> Result<$type, Error> {
                match text {
                    $( $text => Ok($type::$variant), )*
                    _ => Err(Error::Unknown { what: $what, text: text.into(), allowed: $allowed.into() }),
                }
            }
        }
    };
}

choice! {
    /// GPU architecture a cubin is compiled for. Architecture-specific (`a`) targets run on their
    /// exact compute capability only.
    Arch ("architecture", "sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a, sm_121a") {
        /// A100.
        Sm80 = "sm_80",
        /// A10, RTX 30.
        Sm86 = "sm_86",
        /// L4, L40, RTX 40.
        Sm89 = "sm_89",
        /// H100, H200.
        Sm90a = "sm_90a",
        /// B200.
        Sm100a = "sm_100a",
        /// B300.
        Sm103a = "sm_103a",
        /// RTX 50, RTX PRO 6000.
        Sm120a = "sm_120a",
        /// DGX Spark.
        Sm121a = "sm_121a",
    }
}

choice! {
    /// Physical order inside one slot of the conv cache.
    ConvLayout ("conv layout", "dim-first, token-first") {
        /// `[3 dim, length]`: the positions of a channel are neighbours.
        DimFirst = "dim-first",
        /// `[length, 3 dim]`: the channels of a position are neighbours.
        TokenFirst = "token-first",
    }
}

choice! {
    /// How the decay follows from the gate projection g and dt_bias.
    GateKind ("gate", "lower-bound, softplus") {
        /// exp(lower_bound · sigmoid(exp(A_log) · (g + dt_bias))): Kimi K3.
        LowerBound = "lower-bound",
        /// exp(−exp(A_log) · softplus(g + dt_bias)): models without a lower bound.
        Softplus = "softplus",
    }
}

choice! {
    /// What the gate's input g comes from. g is rounded to bf16 in one form and not in the other, so
    /// results differ between them.
    GateInput ("gate input", "low-rank, projected") {
        /// g = F_B · F_A, computed in the kernel in f32.
        LowRank = "low-rank",
        /// g is an operand: the product of an engine's own F_B GEMM, rounded to bf16.
        Projected = "projected",
    }
}

choice! {
    /// Which slot values are null.
    NullRule ("null rule", "non-positive, negative") {
        /// 0 is the reserved null block, −1 is padding.
        NonPositive = "non-positive",
        /// Slot 0 is a live slot.
        Negative = "negative",
    }
}

choice! {
    /// Element type of the state pool. Arithmetic is f32 either way.
    StateDtype ("state dtype", "f32, bf16") {
        /// Stored as computed.
        F32 = "f32",
        /// Rounded once after every token.
        Bf16 = "bf16",
    }
}

impl StateDtype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            StateDtype::F32 => 4,
            StateDtype::Bf16 => 2,
        }
    }
}

choice! {
    /// How a verify step leaves a state behind for every number of tokens that may be accepted.
    Rollback ("rollback", "checkpoints, records") {
        /// A whole state after every token, each in a slot of its own.
        Checkpoints = "checkpoints",
        /// The state after the first token, and a record of 1.5 KiB a head for each later one. The
        /// next step repeats the accepted ones on the state it reads.
        Records = "records",
    }
}

choice! {
    /// What a kernel may read before the kernel ahead of it in the stream has finished, under
    /// programmatic dependent launch.
    EarlyReads ("early reads", "weights, caches") {
        /// Weights only: always right.
        Weights = "weights",
        /// Also conv cache, state, records, slots, accepted and token counts: the caller promises that
        /// the kernel directly ahead writes none of them.
        Caches = "caches",
    }
}

choice! {
    /// What a kernel does.
    Role ("role", "step, reset") {
        /// A decode or verify step.
        Step = "step",
        /// Zeroes the state and conv line of slots: see [`KernelSpec::reset`].
        Reset = "reset",
    }
}

choice! {
    /// Who computes the gates that the blocks of a cluster need.
    GateSchedule ("gate schedule", "block, cluster") {
        /// Every block computes all of them.
        Block = "block",
        /// Every block computes its share and stores it into the others' shared memory.
        Cluster = "cluster",
    }
}

impl Arch {
    /// The architecture a cubin must have for a device, or `None` where no target exists.
    pub fn for_capability(major: i32, minor: i32) -> Option<Arch> {
        match (major, minor) {
            (8, 0) => Some(Arch::Sm80),
            (8, 6 | 7) => Some(Arch::Sm86),
            (8, 9) => Some(Arch::Sm89),
            (9, 0) => Some(Arch::Sm90a),
            (10, 0) => Some(Arch::Sm100a),
            (10, 3) => Some(Arch::Sm103a),
            (12, 0) => Some(Arch::Sm120a),
            (12, 1) => Some(Arch::Sm121a),
            _ => None,
        }
    }

    /// Whether a device of this compute capability runs this architecture's cubins.
    pub fn runs_on(self, major: i32, minor: i32) -> bool {
        match self {
            Arch::Sm80 => major == 8,
            Arch::Sm86 => major == 8 && minor >= 6,
            Arch::Sm89 => major == 8 && minor >= 9,
            _ => Arch::for_capability(major, minor) == Some(self),
        }
    }

    /// Whether the driver compiles this architecture's PTX for a device of this compute capability.
    pub fn ptx_runs_on(self, major: i32, minor: i32) -> bool {
        let least = match self {
            Arch::Sm80 => (8, 0),
            Arch::Sm86 => (8, 6),
            Arch::Sm89 => (8, 9),
            _ => return self.runs_on(major, minor),
        };
        (major, minor) >= least
    }

    /// Whether blocks can form clusters and kernels can wait for the kernel ahead (sm_90 and up).
    pub fn has_clusters(self) -> bool {
        self >= Arch::Sm90a
    }

    /// Largest number of resident threads of a multiprocessor.
    pub fn threads_per_multiprocessor(self) -> u32 {
        match self {
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120a | Arch::Sm121a => 1536,
            _ => 2048,
        }
    }
}

/// A schedule: how one (request, head) is spread over blocks and threads. Every legal mode gives
/// the same bits.
///
/// Its text form, in names and on the command line, is for example `split8-128x8-cluster-hints`:
/// value split, threads x lanes a row, gate schedule, and `hints` when it prefetches early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mode {
    /// Blocks (one cluster) that share a head's value rows: 1, 2, 4 or 8.
    pub value_split: u32,
    /// Threads of a block: 64 to 512, a power of two.
    pub threads: u32,
    /// Lanes of a warp that share one row of the state: 8 or 32.
    pub row_lanes: u32,
    /// Who computes the gates.
    pub gate_schedule: GateSchedule,
    /// Prefetch state and window into L2 through slot values read before the kernel ahead has
    /// finished. A stale value costs a useless prefetch, nothing else.
    pub slot_hints: bool,
}

impl Mode {
    /// The same schedule for kernels of this gate input: with a projected gate there is nothing to
    /// share, and every block computes all gates.
    pub fn with_gate_input(mut self, gate_input: GateInput) -> Mode {
        if gate_input == GateInput::Projected {
            self.gate_schedule = GateSchedule::Block;
        }
        self
    }
}

impl Default for Mode {
    /// One block of 256 threads a head: legal on every architecture.
    fn default() -> Mode {
        Mode {
            value_split: 1,
            threads: 256,
            row_lanes: 8,
            gate_schedule: GateSchedule::Block,
            slot_hints: false,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mode {
            value_split,
            threads,
            row_lanes,
            gate_schedule,
            slot_hints,
        } = self;
        write!(
            f,
            "split{value_split}-{threads}x{row_lanes}-{gate_schedule}"
        )?;
        if *slot_hints {
            f.write_str("-hints")
        } else {
            Ok(())
        }
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Mode, Error> {
        let unknown = || Error::Unknown {
            what: "mode",
            text: text.into(),
            allowed: "split<1|2|4|8>-<threads>x<8|32>-<block|cluster>[-hints]".into(),
        };
        let mut parts = text.split('-');
        let mut next = || parts.next().ok_or_else(unknown);
        let split = next()?;
        let shape = next()?;
        let gate = next()?;
        let hints = parts.next();
        let number = |text: &str| text.parse::<u32>().map_err(|_| unknown());
        let (threads, lanes) = shape.split_once('x').ok_or_else(unknown)?;
        let mode = Mode {
            value_split: number(split.strip_prefix("split").ok_or_else(unknown)?)?,
            threads: number(threads)?,
            row_lanes: number(lanes)?,
            gate_schedule: gate.parse()?,
            slot_hints: hints.is_some(),
        };
        if hints.is_some_and(|hints| hints != "hints") || parts.next().is_some() {
            return Err(unknown());
        }
        Ok(mode)
    }
}

/// One kernel: everything that is a compile-time constant. Values are checked by
/// [`validate`](KernelSpec::validate), which rendering and compiling call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelSpec {
    /// Step or reset.
    pub role: Role,
    /// Architecture.
    pub arch: Arch,
    /// Heads on this device, 1..=128.
    pub heads: usize,
    /// Tokens a request brings, 1..=16.
    pub tokens: usize,
    /// Whether the step rolls back: it reads accepted counts and writes a checkpoint a token.
    /// A step of more than one token is always a verify step.
    pub verify: bool,
    /// Whether each request brings a number of tokens of its own, up to `tokens`. Verify steps only.
    pub ragged: bool,
    /// What a verify step keeps; [`Rollback::Checkpoints`] in decode steps.
    pub rollback: Rollback,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Order inside a conv cache slot.
    pub conv_layout: ConvLayout,
    /// Decay formula.
    pub gate: GateKind,
    /// What the gate's input comes from.
    pub gate_input: GateInput,
    /// Null slot values.
    pub null_rule: NullRule,
    /// Element type of the state pool.
    pub state_dtype: StateDtype,
    /// Reads ahead of the dependency.
    pub early_reads: EarlyReads,
    /// Schedule.
    pub mode: Mode,
}

impl KernelSpec {
    /// The decode kernel of Kimi K3's settings: one token, no bias, dim-first cache, lower-bound
    /// gate of low rank, f32 state, weights read early, the default mode.
    pub fn new(arch: Arch, heads: usize) -> KernelSpec {
        KernelSpec {
            role: Role::Step,
            arch,
            heads,
            tokens: 1,
            verify: false,
            ragged: false,
            rollback: Rollback::Checkpoints,
            conv_bias: false,
            conv_layout: ConvLayout::DimFirst,
            gate: GateKind::LowerBound,
            gate_input: GateInput::LowRank,
            null_rule: NullRule::NonPositive,
            state_dtype: StateDtype::F32,
            early_reads: EarlyReads::Weights,
            mode: Mode::default(),
        }
    }

    /// The kernel that zeroes the state and conv line of slots, for any number of heads and either
    /// conv layout; what else a step varies in has its default.
    pub fn reset(arch: Arch, null_rule: NullRule, state_dtype: StateDtype) -> KernelSpec {
        KernelSpec {
            role: Role::Reset,
            null_rule,
            state_dtype,
            ..KernelSpec::new(arch, 1)
        }
    }

    /// The same kernel with another schedule.
    pub fn with_mode(mut self, mode: Mode) -> KernelSpec {
        self.mode = mode;
        self
    }

    /// The same kernel as a verify step of `tokens` tokens.
    pub fn with_verify(mut self, tokens: usize) -> KernelSpec {
        self.tokens = tokens;
        self.verify = true;
        self
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`Error::Illegal`] names the first field with a value no kernel exists for.
    pub fn validate(&self) -> Result<(), Error> {
        let illegal = |field, value: &dyn fmt::Display, allowed: &str| {
            Err(Error::Illegal {
                field,
                value: value.to_string(),
                allowed: allowed.into(),
            })
        };
        let reset = KernelSpec::reset(self.arch, self.null_rule, self.state_dtype);
        if self.role == Role::Reset && *self != reset {
            return illegal("role", &self.role, "step where a reset has no such field");
        }
        if !(1..=MAX_HEADS).contains(&self.heads) {
            return illegal("heads", &self.heads, "1..=128");
        }
        if !(1..=MAX_TOKENS).contains(&self.tokens) {
            return illegal("tokens", &self.tokens, "1..=16");
        }
        if self.tokens > 1 && !self.verify {
            return illegal("verify", &false, "true with more than one token");
        }
        if self.ragged && !self.verify {
            return illegal("ragged", &true, "false in a decode step");
        }
        if self.rollback == Rollback::Records && !self.verify {
            return illegal("rollback", &self.rollback, "checkpoints in a decode step");
        }
        let mode = &self.mode;
        if ![1, 2, 4, 8].contains(&mode.value_split) {
            return illegal("value_split", &mode.value_split, "1, 2, 4, 8");
        }
        if mode.value_split > 1 && !self.arch.has_clusters() {
            let allowed = format!("1 on {}, which has no clusters", self.arch);
            return illegal("value_split", &mode.value_split, &allowed);
        }
        if !mode.threads.is_power_of_two() || !(64..=512).contains(&mode.threads) {
            return illegal("threads", &mode.threads, "64, 128, 256, 512");
        }
        if ![8, 32].contains(&mode.row_lanes) {
            return illegal("row_lanes", &mode.row_lanes, "8, 32");
        }
        let (rows, groups) = (128 / mode.value_split, mode.threads / mode.row_lanes);
        let least = if mode.row_lanes == 8 { 1 } else { 4 };
        let most = (rows / least * mode.row_lanes).min(512);
        let fewest = (rows / mode.row_lanes * mode.row_lanes).max(64);
        if groups > rows / least || rows / groups > mode.row_lanes {
            let allowed = format!(
                "{fewest}..={most} with split {} and {} lanes a row",
                mode.value_split, mode.row_lanes
            );
            return illegal("threads", &mode.threads, &allowed);
        }
        if mode.gate_schedule == GateSchedule::Cluster && self.gate_input == GateInput::Projected {
            return illegal(
                "gate_schedule",
                &mode.gate_schedule,
                "block with a projected gate",
            );
        }
        let gates = match mode.gate_schedule {
            GateSchedule::Block => 128,
            GateSchedule::Cluster => rows,
        };
        let low_rank = self.gate_input == GateInput::LowRank;
        if low_rank && gates / (mode.threads / 8).min(gates) > 8 {
            return illegal(
                "threads",
                &mode.threads,
                "128 and up with the block gate schedule",
            );
        }
        if mode.gate_schedule == GateSchedule::Cluster && mode.value_split == 1 {
            return illegal(
                "gate_schedule",
                &mode.gate_schedule,
                "block with value_split 1",
            );
        }
        if mode.slot_hints && self.early_reads == EarlyReads::Caches {
            return illegal(
                "slot_hints",
                &true,
                "false when caches are read early anyway",
            );
        }
        if mode.slot_hints && !self.arch.has_clusters() {
            let allowed = format!("false on {}, which has no dependent launch", self.arch);
            return illegal("slot_hints", &true, &allowed);
        }
        if self.early_reads == EarlyReads::Caches && !self.arch.has_clusters() {
            let allowed = format!("weights on {}, which has no dependent launch", self.arch);
            return illegal("early_reads", &self.early_reads, &allowed);
        }
        Ok(())
    }

    /// Every legal mode of this kernel.
    pub fn legal_modes(&self) -> Vec<Mode> {
        let mut modes = Vec::new();
        for value_split in [1, 2, 4, 8] {
            for threads in [64, 128, 256, 512] {
                for row_lanes in [8, 32] {
                    for &gate_schedule in GateSchedule::ALL {
                        for slot_hints in [false, true] {
                            let mode = Mode {
                                value_split,
                                threads,
                                row_lanes,
                                gate_schedule,
                                slot_hints,
                            };
                            if self.with_mode(mode).validate().is_ok() {
                                modes.push(mode);
                            }
                        }
                    }
                }
            }
        }
        modes
    }

    /// The entry point's name, one readable stem that also names files and profiles. Two kernels
    /// of one architecture differ in it.
    pub fn entry(&self) -> String {
        let KernelSpec {
            role,
            arch: _,
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
        } = self;
        let step = if *verify {
            format!("verify{tokens}")
        } else {
            "decode".into()
        };
        let ragged = if *ragged { "_ragged" } else { "" };
        let rollback = match rollback {
            Rollback::Checkpoints => "",
            Rollback::Records => "_records",
        };
        let bias = if *conv_bias { "_bias" } else { "" };
        let input = match gate_input {
            GateInput::LowRank => "",
            GateInput::Projected => "_projected",
        };
        let state = if *state_dtype == StateDtype::Bf16 {
            "_statebf16"
        } else {
            ""
        };
        let early = if *early_reads == EarlyReads::Caches {
            "_early"
        } else {
            ""
        };
        if *role == Role::Reset {
            return format!("kda_reset_{null_rule}{state}").replace('-', "_");
        }
        format!("kda_{step}{ragged}{rollback}_h{heads}{bias}_{conv_layout}_{gate}{input}_{null_rule}{state}{early}_{mode}")
            .replace('-', "_")
    }
}
