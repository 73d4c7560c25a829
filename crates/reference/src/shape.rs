//! Owns sizes, strides, settings and the rule which requests are live; must not know arithmetic.

use half::bf16;

use crate::Error;
use crate::records::RECORD_SIZE;

/// Keys and values of one head.
pub const HEAD_DIM: usize = 128;
/// Taps of the causal convolution: three of history and the token itself.
pub const CONV_WIDTH: usize = 4;

/// How the decay follows from the gate's input g.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// `decay = exp(lower_bound · sigmoid(exp(A_log) · (g + dt_bias)))`.
    LowerBound {
        /// Smallest logarithm of a decay, negative.
        lower_bound: f32,
    },
    /// `decay = exp(−exp(A_log) · softplus(g + dt_bias))`.
    Softplus,
}

/// Physical order inside one slot of the convolution cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvLayout {
    /// `[3d, conv_len]`, positions contiguous.
    DimFirst,
    /// `[conv_len, 3d]`, channels contiguous.
    TokenFirst,
}

/// Which slot values are null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NullRule {
    /// 0 is the reserved null block, negative values are padding.
    NonPositive,
    /// Negative values only: slot 0 is a live slot.
    Negative,
}

impl NullRule {
    /// Whether `slot` names no slot under this rule.
    pub fn is_null(self, slot: i32) -> bool {
        match self {
            NullRule::NonPositive => slot <= 0,
            NullRule::Negative => slot < 0,
        }
    }
}

/// What a stored state element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateType {
    /// f32, never rounded.
    F32,
    /// bf16, rounded once after every token; the next token starts from the rounded value. Pools
    /// hold the widened values as f32.
    Bf16,
}

/// The record pool `[slots, count, heads, 3, 128]` of steps that keep one state and records: see
/// [`crate::records`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// Records of a slot; `accepted` lies in `1..=count + 1`.
    pub count: usize,
    /// Elements between slots.
    pub slot_stride: usize,
}

/// Everything about a launch that is not data. Lengths and strides are elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Heads on this device.
    pub heads: usize,
    /// Requests of the batch; 0 computes nothing.
    pub requests: usize,
    /// Tokens of each request.
    pub tokens: usize,
    /// Columns of `slots` that a launch may read; `accepted` lies in `1..=columns`. With records the
    /// first column alone is read.
    pub columns: usize,
    /// Positions of one convolution line.
    pub conv_len: usize,
    /// Between rows of `projected`.
    pub pitch: usize,
    /// Between rows of the projected gate input, where there is one.
    pub gate_stride: usize,
    /// Between rows of `out`.
    pub out_stride: usize,
    /// Between rows of `slots`.
    pub slots_stride: usize,
    /// Between slots of the convolution cache.
    pub conv_slot_stride: usize,
    /// Between slots of the state pool.
    pub state_slot_stride: usize,
    /// Slots of either pool.
    pub pool_slots: usize,
    /// Order inside a convolution slot.
    pub conv_layout: ConvLayout,
    /// Which slot values are null.
    pub null_rule: NullRule,
    /// Decay formula.
    pub gate: Gate,
    /// Stored state element.
    pub state_type: StateType,
    /// A state after the first token and a record of each later one; absent: a state after each.
    pub records: Option<RecordShape>,
    /// Added to the mean square of the output norm.
    pub eps: f32,
    /// Factor of the normalised query.
    pub scale: f32,
}

impl Shape {
    /// The tight shape: smallest pitch and strides, dim-first cache, `NonPositive` nulls, one
    /// column a token and `requests · tokens + 1` slots.
    pub fn dense(heads: usize, requests: usize, tokens: usize, gate: Gate) -> Shape {
        let dim = heads * HEAD_DIM;
        let conv_len = CONV_WIDTH - 1 + tokens.saturating_sub(1);
        Shape {
            heads,
            requests,
            tokens,
            columns: tokens,
            conv_len,
            pitch: 4 * dim + HEAD_DIM + heads,
            gate_stride: dim,
            out_stride: dim,
            slots_stride: tokens,
            conv_slot_stride: 3 * dim * conv_len,
            state_slot_stride: dim * HEAD_DIM,
            pool_slots: requests * tokens + 1,
            conv_layout: ConvLayout::DimFirst,
            null_rule: NullRule::NonPositive,
            gate,
            state_type: StateType::F32,
            records: None,
            eps: 1e-5,
            scale: (HEAD_DIM as f32).powf(-0.5),
        }
    }

    /// heads · 128.
    pub fn dim(&self) -> usize {
        self.heads * HEAD_DIM
    }

    /// requests · tokens.
    pub fn rows(&self) -> usize {
        self.requests * self.tokens
    }

    /// Used columns of a `projected` row: q, k, v, output gate, F_A, beta.
    pub fn used_columns(&self) -> usize {
        4 * self.dim() + HEAD_DIM + self.heads
    }

    /// Element of the convolution cache that holds `channel` at `position` of `slot`.
    pub fn conv_index(&self, slot: usize, channel: usize, position: usize) -> usize {
        slot * self.conv_slot_stride
            + match self.conv_layout {
                ConvLayout::DimFirst => channel * self.conv_len + position,
                ConvLayout::TokenFirst => position * 3 * self.dim() + channel,
            }
    }

    /// Element of the state pool where the `[128 values, 128 keys]` matrix of `head` starts.
    pub fn state_index(&self, slot: usize, head: usize) -> usize {
        slot * self.state_slot_stride + head * HEAD_DIM * HEAD_DIM
    }

    /// Element of the record pool where record `index` of `slot` and `head` starts.
    pub fn record_index(
        &self,
        records: &RecordShape,
        slot: usize,
        index: usize,
        head: usize,
    ) -> usize {
        slot * records.slot_stride + (index * self.heads + head) * RECORD_SIZE
    }

    /// Largest legal `accepted`.
    pub fn accepted_limit(&self) -> usize {
        self.records
            .map_or(self.columns, |records| records.count + 1)
    }

    /// Rows of `out` that `request` owns: its token count, or all where there is none or it is out of
    /// range.
    pub fn tokens_of(&self, token_counts: Option<&[i32]>, request: usize) -> usize {
        token_counts
            .and_then(|counts| usize::try_from(counts[request]).ok())
            .map_or(self.tokens, |count| count.min(self.tokens))
    }

    /// What `request` does, judged from the metadata alone.
    ///
    /// A request without tokens is null, whatever its slots. Otherwise the first slot decides whether
    /// it is, before anything else is looked at. Then every value that the step would use must be
    /// usable: the number of tokens, their slots, `accepted` and the source slot. Columns beyond those
    /// are never looked at.
    pub fn plan(&self, metadata: &Metadata<'_>, request: usize) -> Plan {
        let columns = if self.records.is_some() {
            1
        } else {
            self.columns
        };
        let row = &metadata.slots[request * self.slots_stride..][..columns];
        let tokens = self.tokens_of(metadata.token_counts, request);
        if tokens == 0 || self.null_rule.is_null(row[0]) {
            return Plan::Null;
        }
        if let Some(kind) = self.fault(row, metadata, request) {
            return Plan::Fault(kind);
        }
        let offset = metadata.accepted.map_or(1, |a| a[request]) as usize - 1;
        let live = |&slot: &i32| (!self.null_rule.is_null(slot)).then_some(slot as usize);
        let first = row[0] as usize;
        Plan::Live {
            first,
            source: match self.records {
                Some(_) => first,
                None => row[offset] as usize,
            },
            offset,
            checkpoints: match self.records {
                Some(_) => (0..tokens).map(|t| (t == 0).then_some(first)).collect(),
                None => row[..tokens].iter().map(live).collect(),
            },
        }
    }

    /// Why a request whose first slot is not null is at fault. Where several reasons hold, the one
    /// reported is the first of: a token count out of range, a token's slot beyond the pool,
    /// `accepted` out of range, a null source, a source beyond the pool.
    fn fault(&self, row: &[i32], metadata: &Metadata<'_>, request: usize) -> Option<FaultKind> {
        let beyond = |slot: i32| slot >= 0 && slot as usize >= self.pool_slots;
        let tokens = self.tokens_of(metadata.token_counts, request);
        let count = metadata.token_counts.map(|counts| counts[request]);
        if count.is_some_and(|count| usize::try_from(count) != Ok(tokens)) {
            return Some(FaultKind::TokensOutOfRange);
        }
        let own = if self.records.is_some() { 1 } else { tokens };
        if row[..own].iter().any(|&slot| beyond(slot)) {
            return Some(FaultKind::SlotOutOfRange);
        }
        let accepted = metadata.accepted.map_or(1, |a| a[request]);
        if accepted < 1 || accepted as usize > self.accepted_limit() {
            return Some(FaultKind::AcceptedOutOfRange);
        }
        if self.records.is_some() {
            return None;
        }
        let source = row[accepted as usize - 1];
        if self.null_rule.is_null(source) {
            return Some(FaultKind::NullSource);
        }
        beyond(source).then_some(FaultKind::SlotOutOfRange)
    }

    /// Checks that the operands cover the shape.
    ///
    /// # Errors
    ///
    /// `Zero`, `ColumnsTooFew`, `ConvLineTooShort`, `StrideTooSmall` and `OperandTooShort`.
    pub fn validate(
        &self,
        inputs: &Inputs<'_>,
        conv_cache: &[bf16],
        state: &[f32],
        records: Option<&[f32]>,
    ) -> Result<(), Error> {
        for (count, value) in [("heads", self.heads), ("tokens", self.tokens)] {
            if value == 0 {
                return Err(Error::Zero { count });
            }
        }
        let columns = if self.records.is_some() {
            1
        } else {
            self.tokens
        };
        if self.columns < columns {
            return Err(Error::ColumnsTooFew {
                columns: self.columns,
                tokens: columns,
            });
        }
        if let Some(shape) = self.records
            && shape.count + 1 < self.tokens
        {
            return Err(Error::RecordsTooFew {
                records: shape.count,
                tokens: self.tokens,
            });
        }
        let needed = CONV_WIDTH - 1 + self.accepted_limit() - 1;
        if self.conv_len < needed {
            return Err(Error::ConvLineTooShort {
                conv_len: self.conv_len,
                needed,
            });
        }
        let (dim, rows) = (self.dim(), self.rows());
        let conv_slot = 3 * dim * self.conv_len;
        let state_slot = dim * HEAD_DIM;
        let record_slot = |shape: &RecordShape| shape.count * self.heads * RECORD_SIZE;
        for (operand, stride, needed) in [
            ("projected", self.pitch, self.used_columns()),
            ("gate input", self.gate_stride, dim),
            ("out", self.out_stride, dim),
            ("slots", self.slots_stride, self.columns),
            ("conv cache", self.conv_slot_stride, conv_slot),
            ("state", self.state_slot_stride, state_slot),
            (
                "records",
                self.records.map_or(0, |shape| shape.slot_stride),
                self.records.as_ref().map_or(0, record_slot),
            ),
        ] {
            if stride < needed {
                return Err(Error::StrideTooSmall {
                    operand,
                    stride,
                    needed,
                });
            }
        }
        let reach = |count: usize, stride: usize, last: usize| {
            if count == 0 {
                0
            } else {
                (count - 1) * stride + last
            }
        };
        for (operand, found, needed) in [
            (
                "projected",
                inputs.projected.len(),
                reach(rows, self.pitch, self.used_columns()),
            ),
            (
                "conv weight",
                inputs.conv_weight.len(),
                3 * CONV_WIDTH * dim,
            ),
            (
                "conv bias",
                inputs.conv_bias.map_or(3 * dim, <[f32]>::len),
                3 * dim,
            ),
            (
                "f_b",
                inputs.f_b.len(),
                match inputs.gate_input {
                    None => dim * HEAD_DIM,
                    Some(_) => 0,
                },
            ),
            (
                "gate input",
                inputs.gate_input.map_or(usize::MAX, <[bf16]>::len),
                reach(rows, self.gate_stride, dim),
            ),
            ("a_log", inputs.a_log.len(), self.heads),
            ("dt_bias", inputs.dt_bias.len(), dim),
            ("norm", inputs.norm.len(), HEAD_DIM),
            (
                "slots",
                inputs.slots.len(),
                reach(self.requests, self.slots_stride, self.columns),
            ),
            (
                "accepted",
                inputs.accepted.map_or(self.requests, <[i32]>::len),
                self.requests,
            ),
            (
                "token counts",
                inputs.token_counts.map_or(self.requests, <[i32]>::len),
                self.requests,
            ),
            (
                "records",
                records.map_or(0, <[f32]>::len),
                self.records.as_ref().map_or(0, |shape| {
                    reach(self.pool_slots, shape.slot_stride, record_slot(shape))
                }),
            ),
            (
                "conv cache",
                conv_cache.len(),
                reach(self.pool_slots, self.conv_slot_stride, conv_slot),
            ),
            (
                "state",
                state.len(),
                reach(self.pool_slots, self.state_slot_stride, state_slot),
            ),
        ] {
            if found < needed {
                return Err(Error::OperandTooShort {
                    operand,
                    found,
                    needed,
                });
            }
        }
        Ok(())
    }
}

/// What a step reads and never writes.
///
/// # Shapes
///
/// `projected` bf16 `[rows, pitch]`; `conv_weight` f32 `[3, 4, d]` ([`decode_conv_weight`]);
/// `conv_bias` f32 `[3d]`; `f_b` bf16 `[d, 128]`, or `gate_input` bf16 `[rows, gate_stride]`; `a_log`,
/// `dt_bias`, `norm` f32 `[heads]`, `[d]`, `[128]`; `slots` i32 `[requests, slots_stride]`;
/// `accepted`, `token_counts` i32 `[requests]`.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Packed projection.
    pub projected: &'a [bf16],
    /// Convolution weight in decode layout.
    pub conv_weight: &'a [f32],
    /// Convolution bias; absent adds nothing.
    pub conv_bias: Option<&'a [f32]>,
    /// Up-projection of the low-rank gate; not looked at beside a `gate_input`.
    pub f_b: &'a [bf16],
    /// The gate's input where it is no product of low rank: neither `f_b` nor F_A is read then.
    pub gate_input: Option<&'a [bf16]>,
    /// Logarithm of the gate's scale.
    pub a_log: &'a [f32],
    /// Bias of the gate.
    pub dt_bias: &'a [f32],
    /// Weight of the output norm.
    pub norm: &'a [f32],
    /// Slot of each request and token.
    pub slots: &'a [i32],
    /// Accepted tokens of each request's previous step; absent for decode, which reads as 1.
    pub accepted: Option<&'a [i32]>,
    /// Tokens that each request brings, `0..=tokens`; absent: all of them.
    pub token_counts: Option<&'a [i32]>,
}

impl<'a> Inputs<'a> {
    /// The part that decides what a request does.
    pub fn metadata(&self) -> Metadata<'a> {
        Metadata {
            slots: self.slots,
            accepted: self.accepted,
            token_counts: self.token_counts,
        }
    }
}

/// What decides which slots a request reads and writes; see [`Inputs`].
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    /// Slot of each request and token.
    pub slots: &'a [i32],
    /// Accepted tokens of each request's previous step.
    pub accepted: Option<&'a [i32]>,
    /// Tokens that each request brings.
    pub token_counts: Option<&'a [i32]>,
}

/// The pools that a step updates in place.
#[derive(Debug)]
pub struct Pools<'a> {
    /// Raw inputs of the convolution, bf16.
    pub conv_cache: &'a mut [bf16],
    /// Recurrent state, f32 (bf16 values are widened), value-major with keys contiguous.
    pub state: &'a mut [f32],
    /// Record pool, f32 `[slots, count, heads, 3, 128]`, where the shape has records.
    pub records: Option<&'a mut [f32]>,
}

/// Why a request is treated as null although its first slot is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// A slot is not below the pool's slot count.
    SlotOutOfRange = 1,
    /// `accepted` lies outside `1..=columns`, or outside `1..=count + 1` with records.
    AcceptedOutOfRange = 2,
    /// The source slot of a live request is null.
    NullSource = 3,
    /// A token count lies outside `0..=tokens`.
    TokensOutOfRange = 4,
}

impl FaultKind {
    /// The kind's number in a kernel's fault record.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The kind of a number, or nothing for numbers that name none.
    pub fn from_code(code: u32) -> Option<FaultKind> {
        [
            FaultKind::SlotOutOfRange,
            FaultKind::AcceptedOutOfRange,
            FaultKind::NullSource,
            FaultKind::TokensOutOfRange,
        ]
        .into_iter()
        .find(|kind| kind.code() == code)
    }
}

/// One request at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Index in the batch.
    pub request: usize,
    /// Reason.
    pub kind: FaultKind,
}

/// What a step says about its requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests at fault, in batch order.
    pub faults: Vec<Fault>,
}

/// What one request does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Output rows ([`Shape::tokens_of`]) +0, nothing touched.
    Null,
    /// As `Null`, and reported.
    Fault(FaultKind),
    /// Computed.
    Live {
        /// Slot of the convolution line.
        first: usize,
        /// Slot of the source state.
        source: usize,
        /// Position where the convolution window starts.
        offset: usize,
        /// Slot of the state after each token the request brings; nothing is kept in null slots, and
        /// with records after the first.
        checkpoints: Vec<Option<usize>>,
    },
}

/// Re-lays a convolution weight from the checkpoint's `[3d, 1, 4]` to the decode `[3, 4, d]`.
///
/// # Errors
///
/// `ConvWeightLength` when the length is no multiple of 3 · 128 · 4.
pub fn decode_conv_weight(checkpoint: &[f32]) -> Result<Vec<f32>, Error> {
    let found = checkpoint.len();
    if !found.is_multiple_of(3 * HEAD_DIM * CONV_WIDTH) {
        return Err(Error::ConvWeightLength { found });
    }
    let dim = found / (3 * CONV_WIDTH);
    let mut decode = vec![0.0; found];
    for part in 0..3 {
        for tap in 0..CONV_WIDTH {
            for channel in 0..dim {
                decode[(part * CONV_WIDTH + tap) * dim + channel] =
                    checkpoint[(part * dim + channel) * CONV_WIDTH + tap];
            }
        }
    }
    Ok(decode)
}
