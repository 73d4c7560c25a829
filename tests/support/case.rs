//! Owns a random problem: sizes, strides, settings, slots and accepted counts. Must not know how
//! operands lie in memory or who computes the step.

use std::fmt;
use std::sync::Arc;

use half::bf16;
use kda_reference::records::{RECORD_SIZE, repeat};
use kda_reference::{
    CONV_WIDTH, ConvLayout, FaultKind, Gate, HEAD_DIM, Metadata, NullRule, Plan, RecordShape,
    Shape, StateType,
};

use crate::data::{Data, MATRIX, Regime};
use crate::limits::Limits;
use crate::rng::Rng;

/// Slot columns that a warp reads with one load; a kernel reads those of a wider table otherwise.
pub(crate) const WARP_COLUMNS: usize = 32;

/// How far each operand starts past an aligned address, in elements. The state pool and `f_b` start
/// at multiples of 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skew {
    /// `projected`, 0 to 7.
    pub projected: usize,
    /// The convolution cache, 0 to 7.
    pub conv_cache: usize,
    /// A projected gate input, 0 to 7.
    pub gate_input: usize,
    /// `out`, 0 to 7.
    pub out: usize,
    /// Every f32 operand, 0 to 3.
    pub floats: usize,
    /// `slots`, `accepted` and `token_counts`, 0 to 3.
    pub integers: usize,
}

/// Where the four views of a packed `projected` row start, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Views {
    /// q, k and v, `[3d]`.
    pub qkv: usize,
    /// Output gate, `[d]`.
    pub output_gate: usize,
    /// F_A, `[128]`.
    pub f_a: usize,
    /// Beta, `[heads]`.
    pub beta: usize,
}

/// One launch: everything but the bytes, which [`Buffers::new`](crate::Buffers::new) lays out.
#[derive(Clone)]
pub struct Case {
    /// What [`Case::random`] drew it from; a derived case keeps its parent's.
    pub seed: u64,
    /// Sizes, strides and settings.
    pub shape: Shape,
    /// Whether `accepted` is read; a verify launch may have one token.
    pub verify: bool,
    /// `[requests, columns]`, without the stride.
    pub slots: Vec<i32>,
    /// `[requests]` of a verify launch.
    pub accepted: Option<Vec<i32>>,
    /// `[requests]` of a ragged launch.
    pub token_counts: Option<Vec<i32>>,
    /// What the values are like.
    pub regime: Regime,
    /// Where operands start.
    pub skew: Skew,
    /// The values.
    pub data: Arc<Data>,
}

impl Case {
    /// The case of `seed` within the default limits.
    pub fn from_seed(seed: u64) -> Case {
        Case::random(seed, &Limits::default())
    }

    /// The case of `seed` within `limits`: the same two give the same case everywhere.
    pub fn random(seed: u64, limits: &Limits) -> Case {
        let mut rng = Rng::stream(seed, 1);
        let heads = limits.heads(seed);
        let requests = rng.between(1, limits.max_requests);
        Case::sized(seed, limits, heads, requests)
    }

    /// As [`Case::random`], with the heads and the requests given; requests are dropped where the
    /// pools would pass `limits.max_pool_bytes`.
    pub fn sized(seed: u64, limits: &Limits, heads: usize, requests: usize) -> Case {
        Case::complete(seed, limits, Case::settings(seed, limits, heads), requests)
    }

    /// What a kernel is specialised for.
    fn settings(seed: u64, limits: &Limits, heads: usize) -> Settings {
        let mut rng = limits.specialisation_rng(seed);
        rng.word();
        let tokens = rng.pick(&limits.tokens);
        let gate = rng.pick(&limits.gates);
        let mut shape = Shape::dense(heads, 0, tokens, gate);
        shape.conv_layout = rng.pick(&limits.layouts);
        shape.null_rule = rng.pick(&limits.null_rules);
        shape.state_type = rng.pick(&limits.state_types);
        let bias = rng.pick(&limits.biases);
        let verify = tokens > 1 || rng.chance(40);
        let projected_gate = rng.pick(&limits.projected_gates);
        if rng.pick(&limits.records) && verify {
            shape.records = Some(RecordShape {
                count: tokens - 1,
                slot_stride: 0,
            });
        }
        Settings {
            shape,
            verify,
            ragged: rng.pick(&limits.ragged) && verify,
            bias,
            projected_gate,
        }
    }

    fn complete(seed: u64, limits: &Limits, settings: Settings, requests: usize) -> Case {
        let Settings {
            mut shape,
            verify,
            ragged,
            bias,
            projected_gate,
        } = settings;
        let mut rng = Rng::stream(seed, 2);
        shape.columns = shape.tokens + if verify { slack(&mut rng, 4) } else { 0 };
        // A stream of its own: what the others draw does not depend on it.
        let mut rare = Rng::stream(seed, 6);
        if verify && rare.below(8) == 0 {
            shape.columns = WARP_COLUMNS.max(shape.tokens) + rare.between(1, 38);
        }
        if let Some(records) = &mut shape.records {
            records.count += match rare.below(4) {
                0 if rare.below(3) == 0 => rare.between(WARP_COLUMNS, WARP_COLUMNS + 4),
                0 => rare.between(8, 12),
                _ => shape.columns.min(WARP_COLUMNS) - shape.tokens,
            };
            shape.columns = rare.between(1, 3);
        }
        let empty = limits.odd_percent > 0 && rare.below(if verify { 16 } else { 6 }) == 0;
        let request_slots = crate::slots::distinct(&shape);
        strides(&mut shape, &mut rng);
        shape.eps = rng.pick(&[1e-5, 1e-6, 1e-3]);
        shape.scale = (HEAD_DIM as f32).powf(-0.5) * rng.pick(&[1.0, 1.0, 0.75]);
        let most = (limits.max_pool_bytes / slot_bytes(&shape)).saturating_sub(4) / request_slots;
        shape.requests = requests.min(most.max(1));
        shape.pool_slots = shape.requests * request_slots + 1 + rng.between(1, 3);
        if empty {
            shape.pool_slots = 0;
        }
        let mut skew = skew(&mut rng);
        gate_room(&mut shape, &mut skew, &mut rare);
        let regime = rng.pick(&limits.regimes);
        let (slots, accepted) = crate::slots::draw(&shape, verify, limits.odd_percent, &mut rng);
        let token_counts =
            ragged.then(|| crate::slots::token_counts(&shape, limits.odd_percent, &mut rare));
        let data = Data::random(
            &shape,
            bias,
            projected_gate,
            regime,
            &mut Rng::stream(seed, 3),
        );
        Case {
            seed,
            shape,
            verify,
            slots,
            accepted,
            token_counts,
            regime,
            skew,
            data: Arc::new(data),
        }
    }

    /// The same problem with every stride, length and start drawn anew; pools that would pass
    /// `max_pool_bytes` become dense.
    pub fn restride(&self, max_pool_bytes: usize, rng: &mut Rng) -> Case {
        let mut case = self.clone();
        strides(&mut case.shape, rng);
        case.skew = skew(rng);
        gate_room(&mut case.shape, &mut case.skew, rng);
        if slot_bytes(&case.shape) * case.shape.pool_slots > max_pool_bytes {
            let shape = &mut case.shape;
            shape.conv_slot_stride = 3 * shape.dim() * shape.conv_len;
            shape.state_slot_stride = shape.dim() * HEAD_DIM;
            tight_records(shape);
        }
        case
    }

    /// The same problem with its slots exchanged for others of the pool.
    pub fn reslot(&self, rng: &mut Rng) -> Case {
        let mut case = self.clone();
        let lowest = match self.shape.null_rule {
            NullRule::NonPositive => 1,
            NullRule::Negative => 0,
        };
        let pool = lowest..self.shape.pool_slots as i32;
        let mut other: Vec<i32> = pool.clone().collect();
        rng.shuffle(&mut other);
        for slot in case.slots.iter_mut().filter(|slot| pool.contains(slot)) {
            *slot = other[(*slot - lowest) as usize];
        }
        case
    }

    /// What `request` must do.
    pub fn plan(&self, request: usize) -> Plan {
        let mut dense = self.shape;
        dense.slots_stride = dense.columns;
        dense.plan(&self.metadata(), request)
    }

    fn metadata(&self) -> Metadata<'_> {
        Metadata {
            slots: &self.slots,
            accepted: self.accepted.as_deref(),
            token_counts: self.token_counts.as_deref(),
        }
    }

    /// Rows of `out` that `request` owns.
    pub fn tokens_of(&self, request: usize) -> usize {
        self.shape.tokens_of(self.token_counts.as_deref(), request)
    }

    /// The states that live requests start from, `[requests, heads, 128, 128]`, with their accepted
    /// records repeated; as in the data for others.
    pub fn source_states(&self) -> Vec<f32> {
        let shape = &self.shape;
        let mut states = self.data.states.clone();
        for (request, states) in states.chunks_exact_mut(shape.heads * MATRIX).enumerate() {
            let Plan::Live { offset, .. } = self.plan(request) else {
                continue;
            };
            if shape.records.is_none() {
                continue;
            }
            for index in 0..offset {
                for (head, state) in states.chunks_exact_mut(MATRIX).enumerate() {
                    repeat(
                        state,
                        self.data.record(shape, request, index, head),
                        shape.state_type,
                    );
                }
            }
        }
        states
    }

    /// Requests at fault, in batch order.
    pub fn faults(&self) -> Vec<(usize, FaultKind)> {
        (0..self.shape.requests)
            .filter_map(|request| match self.plan(request) {
                Plan::Fault(kind) => Some((request, kind)),
                _ => None,
            })
            .collect()
    }

    /// Whether there is a convolution bias.
    pub fn bias(&self) -> bool {
        self.data.conv_bias.is_some()
    }

    /// Whether the gate's input is an operand.
    pub fn projected_gate(&self) -> bool {
        self.data.gate_input.is_some()
    }

    /// Bytes of one state element.
    pub fn state_bytes(&self) -> usize {
        state_bytes(self.shape.state_type)
    }

    /// The views of a `projected` row.
    pub fn views(&self) -> Views {
        let dim = self.shape.dim();
        Views {
            qkv: 0,
            output_gate: 3 * dim,
            f_a: 4 * dim,
            beta: 4 * dim + HEAD_DIM,
        }
    }

    /// The same problem with the gate's input given: F_B · F_A of every row, rounded to bf16.
    pub fn with_projected_gate(&self) -> Case {
        let (shape, data) = (&self.shape, &self.data);
        let mut gates = Vec::with_capacity(shape.rows() * shape.dim());
        for row in 0..shape.rows() {
            let f_a = &data.row(shape, row)[self.views().f_a..][..HEAD_DIM];
            gates.extend(data.f_b.chunks_exact(HEAD_DIM).map(|weights| {
                let terms = weights.iter().zip(f_a);
                // Exact products; the f64 sum is off by far less than a bf16 step.
                let g: f64 = terms.map(|(w, x)| w.to_f64() * x.to_f64()).sum();
                bf16::from_f32(g as f32)
            }));
        }
        let mut case = self.clone();
        case.data = Arc::new(Data {
            gate_input: Some(gates),
            ..(**data).clone()
        });
        case
    }

    /// The requests of `order`, in that order, with the same values and slots.
    pub fn select(&self, order: &[usize]) -> Case {
        let mut case = self.clone();
        let (shape, tokens) = (&self.shape, self.shape.tokens);
        case.shape.requests = order.len();
        let per_request = |values: &[i32], width: usize| -> Vec<i32> {
            order
                .iter()
                .flat_map(|&r| values[r * width..(r + 1) * width].to_vec())
                .collect()
        };
        case.slots = per_request(&self.slots, shape.columns);
        case.accepted = self.accepted.as_ref().map(|a| per_request(a, 1));
        case.token_counts = self
            .token_counts
            .as_ref()
            .map(|counts| per_request(counts, 1));
        let (mut projected, mut windows, mut states) = (Vec::new(), Vec::new(), Vec::new());
        let mut records = Vec::new();
        let record_count = shape.records.map_or(0, |records| records.count);
        let record_size = record_count * shape.heads * RECORD_SIZE;
        let mut gates = Vec::new();
        for &request in order {
            for row in request * tokens..(request + 1) * tokens {
                projected.extend_from_slice(self.data.row(shape, row));
                gates.extend_from_slice(self.data.gate_row(shape, row));
            }
            windows.extend_from_slice(self.data.window(shape, request));
            states.extend_from_slice(self.data.state(shape, request));
            records.extend_from_slice(&self.data.records[request * record_size..][..record_size]);
        }
        case.data = Arc::new(Data {
            projected,
            gate_input: self.projected_gate().then_some(gates),
            windows,
            states,
            records,
            ..(*self.data).clone()
        });
        case
    }

    /// The same requests, all of them live, with checkpoints: what they start from is a state alone.
    pub fn with_checkpoints(&self, rng: &mut Rng) -> Case {
        let mut case = self.clone();
        case.data = Arc::new(Data {
            states: self.source_states(),
            records: Vec::new(),
            ..(*self.data).clone()
        });
        let shape = &mut case.shape;
        shape.columns = shape.accepted_limit().max(shape.tokens);
        shape.records = None;
        shape.slots_stride = shape.columns;
        shape.pool_slots = 2 + shape.requests * shape.columns;
        let mut slots: Vec<i32> = (1..shape.pool_slots as i32 - 1).collect();
        rng.shuffle(&mut slots);
        case.slots = slots;
        case
    }

    /// The same requests, all of them live, with records, of which none was accepted.
    pub fn with_records(&self, rng: &mut Rng) -> Case {
        let mut case = self.clone();
        let shape = &mut case.shape;
        shape.records = Some(RecordShape {
            count: shape.accepted_limit() - 1,
            slot_stride: 0,
        });
        shape.columns = 1;
        shape.slots_stride = 1;
        tight_records(shape);
        shape.pool_slots = 2 + shape.requests;
        let mut slots: Vec<i32> = (1..shape.pool_slots as i32 - 1).collect();
        rng.shuffle(&mut slots);
        case.slots = slots;
        case.accepted = Some(vec![1; case.shape.requests]);
        let count = case.shape.requests * case.shape.records.map_or(0, |r| r.slot_stride);
        case.data = Arc::new(Data {
            records: vec![f32::NAN; count],
            ..(*self.data).clone()
        });
        case
    }

    /// One request with its first `tokens` tokens alone, as a step of so many.
    pub fn shortened(&self, request: usize, tokens: usize) -> Case {
        let mut case = self.select(&[request]);
        let used = self.shape.used_columns();
        case.token_counts = None;
        case.shape.tokens = tokens;
        let mut data = Data::clone(&case.data);
        data.projected.truncate(tokens * used);
        if let Some(gates) = &mut data.gate_input {
            gates.truncate(tokens * self.shape.dim());
        }
        case.data = Arc::new(data);
        case
    }

    /// The decode case of one token: as a step over the same requests with other windows
    /// `[requests, 3d, 3]` and states `[requests, heads, 128, 128]`. Slots are the first columns.
    pub fn decode_step(&self, token: usize, windows: Vec<bf16>, states: Vec<f32>) -> Case {
        let mut case = self.clone();
        let (shape, requests) = (&self.shape, self.shape.requests);
        assert_eq!(states.len(), requests * shape.heads * MATRIX);
        case.verify = false;
        case.accepted = None;
        case.token_counts = None;
        case.shape.records = None;
        case.shape.tokens = 1;
        case.shape.columns = 1;
        case.slots = (0..requests)
            .map(|r| self.slots[r * shape.columns])
            .collect();
        let projected = (0..requests)
            .flat_map(|r| self.data.row(shape, r * shape.tokens + token).to_vec())
            .collect();
        let gates = (0..requests)
            .flat_map(|r| self.data.gate_row(shape, r * shape.tokens + token).to_vec())
            .collect();
        case.data = Arc::new(Data {
            projected,
            gate_input: self.projected_gate().then_some(gates),
            windows,
            states,
            records: Vec::new(),
            ..(*self.data).clone()
        });
        case
    }
}

/// What a kernel is specialised for.
struct Settings {
    shape: Shape,
    verify: bool,
    ragged: bool,
    bias: bool,
    projected_gate: bool,
}

/// The records of a slot without room after them.
pub(crate) fn tight_records(shape: &mut Shape) {
    if let Some(records) = &mut shape.records {
        records.slot_stride = records.count * shape.heads * RECORD_SIZE;
    }
}

fn slack(rng: &mut Rng, most: usize) -> usize {
    if rng.chance(50) { 0 } else { rng.below(most) }
}

/// Every stride and the length of a line: tight, or with room.
fn strides(shape: &mut Shape, rng: &mut Rng) {
    let dim = shape.dim();
    shape.conv_len = CONV_WIDTH - 1 + shape.accepted_limit() - 1 + slack(rng, 3);
    shape.pitch = shape.used_columns() + slack(rng, 40);
    shape.out_stride = dim + slack(rng, 20);
    shape.slots_stride = shape.columns + slack(rng, 5);
    shape.conv_slot_stride = 3 * dim * shape.conv_len + slack(rng, 1500);
    // Multiples of 16 bytes: a bare 16, a few, or up to two further layers in the same page.
    let (unit, matrices) = (16 / state_bytes(shape.state_type), dim * HEAD_DIM);
    shape.state_slot_stride = matrices
        + match rng.below(6) {
            0..=2 => 0,
            3 => unit,
            4 => unit * rng.between(1, 200),
            _ => matrices * rng.between(1, 2),
        };
    tight_records(shape);
    if let Some(records) = &mut shape.records {
        records.slot_stride += 4 * slack(rng, 50);
    }
}

/// Stride and start of a projected gate input, drawn after everything else.
fn gate_room(shape: &mut Shape, skew: &mut Skew, rng: &mut Rng) {
    shape.gate_stride = shape.dim() + slack(rng, 30);
    skew.gate_input = rng.below(8);
}

fn skew(rng: &mut Rng) -> Skew {
    Skew {
        gate_input: 0,
        projected: rng.below(8),
        conv_cache: rng.below(8),
        out: rng.below(8),
        floats: rng.below(4),
        integers: rng.below(4),
    }
}

/// Bytes between slots of both pools together.
fn slot_bytes(shape: &Shape) -> usize {
    let records = shape.records.map_or(0, |records| records.slot_stride * 4);
    shape.state_slot_stride * state_bytes(shape.state_type) + shape.conv_slot_stride * 2 + records
}

/// Bytes of one element of a stored state.
pub fn state_bytes(state: StateType) -> usize {
    match state {
        StateType::F32 => 4,
        StateType::Bf16 => 2,
    }
}

impl fmt::Debug for Case {
    /// As `Display`: the values would fill screens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.shape;
        write!(
            f,
            "seed {:#018x}: {}{} heads {} requests {} tokens {} columns {}, {}, {} gate {}, {}, {}, {}, \
             {} state, {:?}, pitch {} conv length {}",
            self.seed,
            if self.token_counts.is_some() {
                "ragged "
            } else {
                ""
            },
            if self.verify { "verify" } else { "decode" },
            s.heads,
            s.requests,
            s.tokens,
            s.columns,
            match s.records {
                Some(records) => format!("{} records", records.count),
                None => "checkpoints".into(),
            },
            gate_input_name(self.projected_gate()),
            gate_name(s.gate),
            if self.bias() { "bias" } else { "no bias" },
            layout_name(s.conv_layout),
            null_name(s.null_rule),
            state_name(s.state_type),
            self.regime,
            s.pitch,
            s.conv_len
        )
    }
}

/// Word for a gate.
pub fn gate_name(gate: Gate) -> &'static str {
    match gate {
        Gate::LowerBound { .. } => "lower bound",
        Gate::Softplus => "softplus",
    }
}

/// Word for the gate's input.
pub fn gate_input_name(projected: bool) -> &'static str {
    match projected {
        false => "low-rank",
        true => "projected",
    }
}

/// Word for a layout.
pub fn layout_name(layout: ConvLayout) -> &'static str {
    match layout {
        ConvLayout::DimFirst => "dim first",
        ConvLayout::TokenFirst => "token first",
    }
}

/// Word for a null rule.
pub fn null_name(rule: NullRule) -> &'static str {
    match rule {
        NullRule::NonPositive => "null at most 0",
        NullRule::Negative => "null below 0",
    }
}

/// Word for a state type.
pub fn state_name(state: StateType) -> &'static str {
    match state {
        StateType::F32 => "f32",
        StateType::Bf16 => "bf16",
    }
}
