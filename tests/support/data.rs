//! Owns the values of a random problem, by meaning and not by address; must not know strides.

use half::bf16;
use kda_reference::records::RECORD_SIZE;
use kda_reference::{CONV_WIDTH, HEAD_DIM, Shape, StateType};

use crate::rng::Rng;

/// Elements of one head's state.
pub const MATRIX: usize = HEAD_DIM * HEAD_DIM;

/// What the values of a problem are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Regime {
    /// Around 1, as a trained model has them.
    Plain,
    /// Projections, weights and state large, gates far out.
    Large,
    /// Projections and state small, so that the norms' epsilons count.
    Tiny,
    /// `A_log` in −20..20 and a large `dt_bias`.
    SaturatedGates,
    /// Some of q, k, v, gate, F_A and beta exactly 0.
    ZeroProjections,
    /// State 0, and often the window: a fresh request.
    ZeroState,
    /// bf16 of every size from subnormal to 2⁵⁰, with zeros of both signs.
    Extremes,
}

impl Regime {
    /// Every regime.
    pub const ALL: [Regime; 7] = [
        Regime::Plain,
        Regime::Large,
        Regime::Tiny,
        Regime::SaturatedGates,
        Regime::ZeroProjections,
        Regime::ZeroState,
        Regime::Extremes,
    ];

    /// Whether the inputs may be ill-conditioned: a gate's argument multiplied by exp(20), a state
    /// that cancels to nothing. No f32 computation can then keep the contract's bound, and what
    /// the oracle finds that f32 may lose on these very inputs is allowed on top of it.
    pub fn ill_conditioned(self) -> bool {
        matches!(self, Regime::SaturatedGates | Regime::Extremes)
    }
}

/// The values of a problem.
#[derive(Clone, Debug)]
pub struct Data {
    /// Used columns of every row, `[rows, 4d + 128 + heads]`.
    pub projected: Vec<bf16>,
    /// Decode layout, `[3, 4, d]`.
    pub conv_weight: Vec<f32>,
    /// `[3d]`.
    pub conv_bias: Option<Vec<f32>>,
    /// `[d, 128]`; unread beside a projected gate input.
    pub f_b: Vec<bf16>,
    /// Projected gate input `[rows, d]`.
    pub gate_input: Option<Vec<bf16>>,
    /// `[heads]`.
    pub a_log: Vec<f32>,
    /// `[d]`.
    pub dt_bias: Vec<f32>,
    /// `[128]`.
    pub norm: Vec<f32>,
    /// The three taps each request starts from, `[requests, 3d, 3]`.
    pub windows: Vec<bf16>,
    /// The state each request starts from, `[requests, heads, 128, 128]`; bf16 values where the
    /// shape's state is bf16.
    pub states: Vec<f32>,
    /// Records of each request, `[requests, count, heads, 3, 128]`; empty in a shape without.
    pub records: Vec<f32>,
}

impl Data {
    /// Random values of `regime` for `shape`. Every operand has its own size and offset, so that
    /// no two can be exchanged unnoticed.
    pub fn random(
        shape: &Shape,
        bias: bool,
        projected_gate: bool,
        regime: Regime,
        rng: &mut Rng,
    ) -> Data {
        let (dim, heads) = (shape.dim(), shape.heads);
        let size = Sizes::of(regime);
        let extreme = regime == Regime::Extremes;
        let mut projected = Vec::with_capacity(shape.rows() * shape.used_columns());
        // q, k, v, gate, F_A, beta: width, size, offset.
        let groups = [
            (dim, size.qkv, 0.1),
            (dim, 0.7 * size.qkv, -0.05),
            (dim, 1.3 * size.qkv, 0.2),
            (dim, size.gate, 0.3),
            (HEAD_DIM, 0.8 * size.f_a, 0.0),
            (heads, 1.5 * size.gate, 0.25),
        ];
        let zero: Vec<bool> = (0..groups.len())
            .map(|_| rng.chance(50) && regime == Regime::ZeroProjections)
            .collect();
        for _ in 0..shape.rows() {
            for (&(width, size, offset), &zero) in groups.iter().zip(&zero) {
                for _ in 0..width {
                    projected.push(if zero {
                        bf16::ZERO
                    } else if extreme {
                        any_size(rng, -140, 50)
                    } else {
                        bf16::from_f32(size * (rng.normal() + offset))
                    });
                }
            }
        }
        let empty_window = matches!(regime, Regime::ZeroState | Regime::ZeroProjections);
        let mut windows = Vec::with_capacity(shape.requests * 3 * dim * 3);
        for _ in 0..shape.requests {
            let empty = empty_window && rng.chance(50);
            for _ in 0..3 * dim * (CONV_WIDTH - 1) {
                windows.push(if empty {
                    bf16::ZERO
                } else if extreme {
                    any_size(rng, -140, 50)
                } else {
                    bf16::from_f32(0.9 * size.qkv * rng.normal())
                });
            }
        }
        let states = (0..shape.requests * heads * MATRIX)
            .map(|_| {
                let value = match regime {
                    Regime::ZeroState => 0.0,
                    Regime::Extremes => any_size(rng, -140, 40).to_f32() * rng.uniform(1.0, 2.0),
                    _ => size.state * rng.normal(),
                };
                match shape.state_type {
                    StateType::F32 => value,
                    StateType::Bf16 => bf16::from_f32(value).to_f32(),
                }
            })
            .collect();
        let mut floats = |count: usize, scale: f32, offset: f32| -> Vec<f32> {
            (0..count).map(|_| scale * rng.normal() + offset).collect()
        };
        let conv_weight = floats(3 * CONV_WIDTH * dim, 0.45 * size.weight, 0.15 * size.weight);
        let conv_bias = bias.then(|| floats(3 * dim, 0.35 * size.weight, -0.1));
        let f_b = floats(dim * HEAD_DIM, 0.11 * size.weight, 0.004);
        let mut a_log = floats(heads, 0.6, 0.1);
        let dt_bias = floats(dim, 0.8 * size.dt_bias, -0.2);
        let norm = floats(HEAD_DIM, 0.25 * size.weight, size.weight);
        if regime == Regime::SaturatedGates {
            a_log.iter_mut().for_each(|a| *a = rng.uniform(-20.0, 20.0));
        }
        let count = shape.records.map_or(0, |records| records.count);
        let mut records = Vec::with_capacity(shape.requests * count * heads * RECORD_SIZE);
        for _ in 0..shape.requests * count * heads {
            let most = if rng.chance(10) { 0.0 } else { 1.0 };
            records.extend((0..HEAD_DIM).map(|_| most * rng.uniform(0.7, 1.0)));
            // k is a unit vector.
            let k: Vec<f32> = (0..HEAD_DIM).map(|_| rng.normal()).collect();
            let norm = k.iter().map(|k| k * k).sum::<f32>().sqrt();
            records.extend(k.iter().map(|k| k / norm));
            let u = size.state.max(1e-3);
            records.extend((0..HEAD_DIM).map(|_| u * rng.normal()));
        }
        // As large as the product of F_B and F_A is.
        let g_size = size.f_a * size.weight;
        let g = |rng: &mut Rng| match (zero[4], extreme) {
            (true, _) => bf16::ZERO,
            (_, true) => any_size(rng, -140, 50),
            _ => bf16::from_f32(g_size * (rng.normal() - 0.05)),
        };
        let gate_input = projected_gate.then(|| (0..shape.rows() * dim).map(|_| g(rng)).collect());
        Data {
            projected,
            conv_weight,
            conv_bias,
            f_b: f_b.into_iter().map(bf16::from_f32).collect(),
            gate_input,
            a_log,
            dt_bias,
            norm,
            windows,
            states,
            records,
        }
    }

    /// The used columns of `row`.
    pub fn row(&self, shape: &Shape, row: usize) -> &[bf16] {
        &self.projected[row * shape.used_columns()..][..shape.used_columns()]
    }

    /// The projected gate input of `row`; nothing with the low-rank gate.
    pub fn gate_row(&self, shape: &Shape, row: usize) -> &[bf16] {
        let rows = self.gate_input.as_deref();
        rows.map_or(&[], |rows| &rows[row * shape.dim()..][..shape.dim()])
    }

    /// The window `[3d, 3]` of `request`.
    pub fn window(&self, shape: &Shape, request: usize) -> &[bf16] {
        let size = 3 * shape.dim() * (CONV_WIDTH - 1);
        &self.windows[request * size..][..size]
    }

    /// Record `index` of `request` and `head`, `[3, 128]`.
    pub fn record(&self, shape: &Shape, request: usize, index: usize, head: usize) -> &[f32] {
        let count = shape.records.map_or(0, |records| records.count);
        let place = (request * count + index) * shape.heads + head;
        &self.records[place * RECORD_SIZE..][..RECORD_SIZE]
    }

    /// The state `[heads, 128, 128]` of `request`.
    pub fn state(&self, shape: &Shape, request: usize) -> &[f32] {
        let size = shape.heads * MATRIX;
        &self.states[request * size..][..size]
    }
}

/// Factors on the plain sizes.
struct Sizes {
    qkv: f32,
    gate: f32,
    f_a: f32,
    weight: f32,
    dt_bias: f32,
    state: f32,
}

impl Sizes {
    fn of(regime: Regime) -> Sizes {
        let plain = Sizes {
            qkv: 1.0,
            gate: 1.0,
            f_a: 1.0,
            weight: 1.0,
            dt_bias: 1.0,
            state: 0.5,
        };
        match regime {
            Regime::Large => Sizes {
                qkv: 300.0,
                gate: 10.0,
                f_a: 3.0,
                weight: 3.0,
                dt_bias: 4.0,
                state: 2000.0,
            },
            Regime::Tiny => Sizes {
                qkv: 2e-3,
                gate: 0.1,
                f_a: 0.02,
                weight: 0.3,
                dt_bias: 0.05,
                state: 1e-6,
            },
            Regime::SaturatedGates => Sizes {
                dt_bias: 20.0,
                ..plain
            },
            _ => plain,
        }
    }
}

/// Either sign, every exponent of `low..high` alike, and sometimes ±0.
fn any_size(rng: &mut Rng, low: i32, high: i32) -> bf16 {
    let sign = if rng.chance(50) { 1.0 } else { -1.0 };
    let exponent = low + rng.below((high - low) as usize) as i32;
    let size = if rng.chance(5) {
        0.0
    } else {
        f64::from(rng.uniform(1.0, 2.0)) * 2f64.powi(exponent)
    };
    bf16::from_f64(sign * size)
}
