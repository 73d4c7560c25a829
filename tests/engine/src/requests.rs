//! A request's slots, and what a plain loop of reference steps says its layers must give.

use std::error::Error;
use std::fmt;

use half::bf16;
use kda_reference::{Gate, Inputs, Pools, Shape, step};

use crate::COLUMNS;
use crate::model::{HEAD_DIM, Layer, Model, Random};

/// The committed state of one layer.
struct LayerState {
    /// `[dim, 128]`.
    state: Vec<f32>,
    /// The last three raw inputs, `[3 dim, 3]`.
    window: Vec<bf16>,
}

/// A request being served.
pub struct Request {
    /// Its slots; column 0 is the conv line.
    pub slots: [i32; COLUMNS],
    /// Tokens of its last step that were accepted.
    pub accepted: usize,
    layers: Vec<LayerState>,
}

impl Request {
    /// A request as prefill leaves it: empty after a short prompt, or anything.
    pub fn prefilled(model: &Model, slots: [i32; COLUMNS], random: &mut Random) -> Request {
        let dim = model.dim;
        let scale = if random.chance(0.3) { 0.0 } else { 0.4 };
        let layers = model
            .layers
            .iter()
            .map(|_| LayerState {
                state: (0..dim * HEAD_DIM)
                    .map(|_| scale * random.normal())
                    .collect(),
                window: (0..9 * dim)
                    .map(|_| bf16::from_f32(scale * random.normal()))
                    .collect(),
            })
            .collect();
        Request {
            slots,
            accepted: 1,
            layers,
        }
    }

    /// A slot's page: states `[layers, dim, 128]`, and lines `[layers, 3 dim, line]` whose first
    /// three positions are the window and whose others hold NaN.
    pub fn page(&self, line: usize) -> (Vec<f32>, Vec<bf16>) {
        let states = self
            .layers
            .iter()
            .flat_map(|layer| layer.state.clone())
            .collect();
        let taps = self
            .layers
            .iter()
            .flat_map(|layer| layer.window.chunks_exact(3));
        let lines = taps
            .flat_map(|taps| {
                let mut padded = vec![bf16::NAN; line];
                padded[..3].copy_from_slice(taps);
                padded
            })
            .collect();
        (states, lines)
    }

    /// `out` of one layer for every token of `rows` `[tokens, pitch]`, one decode step after the
    /// other; afterwards the layer stands where `accepted` tokens leave it.
    pub fn layer_step(
        &mut self,
        layer: usize,
        weights: &Layer,
        rows: &[bf16],
        pitch: usize,
        accepted: usize,
    ) -> Vec<bf16> {
        let LayerState { state, window } = &mut self.layers[layer];
        let dim = weights.dt_bias.len();
        let mut shape = Shape::dense(dim / HEAD_DIM, 1, 1, Gate::LowerBound { lower_bound: -5.0 });
        shape.pitch = pitch;
        // One slot, 1: slot 0 is null.
        shape.pool_slots = 2;
        let mut pool = vec![0.0; 2 * state.len()];
        let mut line = vec![bf16::ZERO; 2 * window.len()];
        pool[state.len()..].copy_from_slice(state);
        line[window.len()..].copy_from_slice(window);
        let mut all = Vec::new();
        for (token, projected) in rows.chunks_exact(pitch).enumerate() {
            let inputs = Inputs {
                projected,
                conv_weight: &weights.conv,
                conv_bias: None,
                f_b: &weights.f_b,
                gate_input: None,
                a_log: &weights.a_log,
                dt_bias: &weights.dt_bias,
                norm: &weights.norm,
                slots: &[1],
                accepted: None,
                token_counts: None,
            };
            let pools = Pools {
                conv_cache: &mut line,
                state: &mut pool,
                records: None,
            };
            let mut out = vec![bf16::ZERO; dim];
            step::run(&shape, &inputs, pools, &mut out).expect("a legal step");
            all.extend(out);
            if token + 1 == accepted {
                let (matrices, taps) = (state.len(), window.len());
                state.copy_from_slice(&pool[matrices..]);
                window.copy_from_slice(&line[taps..]);
            }
        }
        all
    }
}

/// How far kernels and reference were apart.
#[derive(Default)]
pub struct Judgement {
    rows: usize,
    /// As a part of what is allowed.
    worst: f64,
    equal: usize,
    values: usize,
}

impl Judgement {
    /// Compares the rows of one request and layer.
    ///
    /// Each side lies within one bf16 ulp and 2⁻¹⁶ of its row's largest value of what is exact for
    /// its own state, and the two states drift apart by 5e-7 of their size each step and side: over
    /// the some dozens of steps of a request, again less than 2⁻¹⁵ of the row.
    pub fn compare(&mut self, expected: &[bf16], found: &[bf16]) -> Result<(), Box<dyn Error>> {
        let largest = expected.iter().fold(0f64, |m, x| m.max(x.to_f64().abs()));
        for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
            self.values += 1;
            self.equal += usize::from(expected == found);
            let (expected, found) = (expected.to_f64(), found.to_f64());
            let ulp = 2f64.powi(expected.abs().max(f64::MIN_POSITIVE).log2().floor() as i32 - 7);
            let allowed = 2.0 * ulp + (2.0 / 65536.0 + 1.0 / 32768.0) * largest;
            let part = (found - expected).abs() / allowed;
            // NaN must not pass.
            if part.is_nan() || part > 1.0 {
                return Err(format!("element {i}: {found} is not {expected}").into());
            }
            self.worst = self.worst.max(part);
        }
        self.rows += 1;
        Ok(())
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} answers equal the plain loop's: {:.1} % bit for bit, the others within {:.2} of what \
             rounding allows",
            self.rows,
            100.0 * self.equal as f64 / self.values as f64,
            self.worst
        )
    }
}
