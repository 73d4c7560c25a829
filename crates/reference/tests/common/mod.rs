//! Owns small launches for the tests of this crate; must not know what they check.

// Each test file uses its own part.
#![allow(dead_code)]

use half::bf16;
use kda_reference::{Gate, HEAD_DIM, Inputs, Pools, Report, Shape, oracle, step};

/// The gate of most facts.
pub const GATE: Gate = Gate::LowerBound { lower_bound: -5.0 };

/// Owned operands of a dense shape; every value zero except a norm of ones.
#[derive(Clone)]
pub struct Launch {
    pub shape: Shape,
    pub projected: Vec<bf16>,
    pub conv_weight: Vec<f32>,
    pub conv_bias: Option<Vec<f32>>,
    pub f_b: Vec<bf16>,
    pub gate_input: Option<Vec<bf16>>,
    pub a_log: Vec<f32>,
    pub dt_bias: Vec<f32>,
    pub norm: Vec<f32>,
    pub slots: Vec<i32>,
    pub accepted: Option<Vec<i32>>,
    pub token_counts: Option<Vec<i32>>,
    pub records: Option<Vec<f32>>,
    pub conv_cache: Vec<bf16>,
    pub state: Vec<f32>,
}

impl Launch {
    pub fn zero(shape: Shape) -> Launch {
        let dim = shape.dim();
        Launch {
            projected: vec![bf16::ZERO; shape.rows() * shape.pitch],
            conv_weight: vec![0.0; 12 * dim],
            conv_bias: None,
            f_b: vec![bf16::ZERO; dim * HEAD_DIM],
            gate_input: None,
            a_log: vec![0.0; shape.heads],
            dt_bias: vec![0.0; dim],
            norm: vec![1.0; HEAD_DIM],
            slots: (1..=(shape.requests * shape.slots_stride) as i32).collect(),
            accepted: (shape.tokens > 1).then(|| vec![1; shape.requests]),
            token_counts: None,
            records: shape
                .records
                .map(|records| vec![0.0; shape.pool_slots * records.slot_stride]),
            conv_cache: vec![bf16::ZERO; shape.pool_slots * shape.conv_slot_stride],
            state: vec![0.0; shape.pool_slots * shape.state_slot_stride],
            shape,
        }
    }

    /// Deterministic, unequal values everywhere.
    pub fn random(shape: Shape, seed: u64) -> Launch {
        let mut launch = Launch::zero(shape);
        let mut state = seed;
        let mut next = move || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        for x in launch.projected.iter_mut().chain(&mut launch.conv_cache) {
            *x = bf16::from_f32(2.0 * next());
        }
        launch
            .f_b
            .iter_mut()
            .for_each(|x| *x = bf16::from_f32(0.2 * next()));
        let floats = [
            (&mut launch.conv_weight, 0.5),
            (&mut launch.a_log, 1.0),
            (&mut launch.dt_bias, 1.0),
            (&mut launch.norm, 1.0),
            (&mut launch.state, 1.0),
        ];
        for (values, size) in floats {
            values.iter_mut().for_each(|x| *x = size * next());
        }
        launch
    }

    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            projected: &self.projected,
            conv_weight: &self.conv_weight,
            conv_bias: self.conv_bias.as_deref(),
            f_b: &self.f_b,
            gate_input: self.gate_input.as_deref(),
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            norm: &self.norm,
            slots: &self.slots,
            accepted: self.accepted.as_deref(),
            token_counts: self.token_counts.as_deref(),
        }
    }

    pub fn oracle(&self) -> Vec<Option<oracle::Exact>> {
        oracle::run(&self.shape, &self.inputs(), &self.conv_cache, &self.state).unwrap()
    }

    /// Runs in place; `out` in f32 before rounding.
    pub fn run(&mut self) -> (Report, Vec<f32>) {
        let mut out = vec![f32::NAN; self.shape.rows() * self.shape.out_stride];
        let (mut conv_cache, mut state) = (self.conv_cache.clone(), self.state.clone());
        let mut records = self.records.clone();
        let pools = Pools {
            conv_cache: &mut conv_cache,
            state: &mut state,
            records: records.as_deref_mut(),
        };
        let report = step::run_unrounded(&self.shape, &self.inputs(), pools, &mut out).unwrap();
        self.records = records;
        self.conv_cache = conv_cache;
        self.state = state;
        (report, out)
    }

    pub fn state(&self, slot: usize, head: usize) -> &[f32] {
        &self.state[self.shape.state_index(slot, head)..][..HEAD_DIM * HEAD_DIM]
    }

    pub fn line(&self, slot: usize, channel: usize) -> Vec<f32> {
        (0..self.shape.conv_len)
            .map(|p| self.conv_cache[self.shape.conv_index(slot, channel, p)].to_f32())
            .collect()
    }
}
