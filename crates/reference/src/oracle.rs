//! Owns the f64 step and the bound on what f32 may lose; must not know the f32 step.
//!
//! Inputs are the same bf16 and f32 values. Nothing is rounded: `out` is the value before its
//! rounding, a state is the f64 state. The one exception is [`StateType::Bf16`], whose rounding is
//! part of the model: the oracle rounds the state after every token too. An f32 computation that
//! lands on the other side of a tie then differs by one whole bf16 step in that element, and only
//! there: the error below becomes that step where it reaches over a tie, and 0 elsewhere.
//!
//! Next to each value runs an error: what f32 arithmetic may lose to first order on these inputs,
//! with every elementary operation off by a few units of 2⁻²⁴ and every sum of 128 terms off by
//! 16 units of its terms' absolute sum (a chain of 128 loses √128 ≈ 11 units at random, less in any
//! blocked order). It is small on ordinary data and grows where the inputs are ill-conditioned: a
//! decay whose argument is multiplied by exp(18), a state that cancels.

use half::bf16;

use crate::loss::{self, Bounded, TINY, UNIT};
use crate::{CONV_WIDTH, Error, HEAD_DIM, Inputs, Plan, Shape, StateType};

type Vector = [f64; HEAD_DIM];

/// Units lost by a sum of 128 terms, relative to the sum of absolute values.
const SUM: f64 = 16.0 * UNIT;

/// What one live request must give. `tokens` is the number that it brings.
#[derive(Clone, Debug)]
pub struct Exact {
    /// Output `[tokens, d]`, before rounding.
    pub out: Vec<f64>,
    /// What f32 may lose in `out`, `[tokens, d]`.
    pub out_error: Vec<f64>,
    /// `out` if no two terms of Σ state · query cancelled, `[tokens, d]`: at least |out|, and far more
    /// where the query is almost orthogonal to a row of the state.
    pub out_terms: Vec<f64>,
    /// State after each token `[tokens, heads, 128 values, 128 keys]`.
    pub states: Vec<f64>,
    /// What f32 may lose in each `[128, 128]` matrix, Frobenius, `[tokens, heads]`.
    pub state_error: Vec<f64>,
    /// Convolution line after the step, positions `0..tokens + 2` of each channel:
    /// `[3d, tokens + 2]`.
    pub line: Vec<bf16>,
    /// Smallest and largest decay of all tokens, heads and keys.
    pub decay: (f64, f64),
}

impl Exact {
    /// The `[128 values, 128 keys]` state of `head` after `token`.
    pub fn state(&self, shape: &Shape, token: usize, head: usize) -> &[f64] {
        let size = HEAD_DIM * HEAD_DIM;
        &self.states[(token * shape.heads + head) * size..][..size]
    }
}

/// The oracle of one launch: operands with the weights widened once.
#[derive(Debug)]
pub struct Oracle<'a> {
    shape: &'a Shape,
    inputs: &'a Inputs<'a>,
    conv_cache: &'a [bf16],
    state: &'a [f32],
    /// Empty beside a projected gate input.
    f_b: Vec<f64>,
}

impl<'a> Oracle<'a> {
    /// Takes the operands as they are before the step.
    ///
    /// # Errors
    ///
    /// Whatever [`Shape::validate`] finds; a shape with records among it, whose steps start from a
    /// state that the caller makes with [`records::repeat`](crate::records::repeat).
    pub fn new(
        shape: &'a Shape,
        inputs: &'a Inputs<'a>,
        conv_cache: &'a [bf16],
        state: &'a [f32],
    ) -> Result<Self, Error> {
        shape.validate(inputs, conv_cache, state, None)?;
        let f_b = match inputs.gate_input {
            None => inputs.f_b.iter().map(|x| x.to_f64()).collect(),
            Some(_) => Vec::new(),
        };
        Ok(Oracle {
            shape,
            inputs,
            conv_cache,
            state,
            f_b,
        })
    }

    /// What `request` must give; nothing for null requests and requests at fault.
    pub fn request(&self, request: usize) -> Option<Exact> {
        let Plan::Live { source, .. } = self.plan(request) else {
            return None;
        };
        let start = self.shape.state_index(source, 0);
        let state = &self.state[start..start + self.shape.dim() * HEAD_DIM];
        let state: Vec<f64> = state.iter().map(|&s| s.into()).collect();
        self.request_from(request, &state)
    }

    fn plan(&self, request: usize) -> Plan {
        self.shape.plan(&self.inputs.metadata(), request)
    }

    /// As [`request`](Self::request), from a state `[heads, 128 values, 128 keys]` of the caller's in
    /// place of the pool's: what the oracle gave for an earlier step is not rounded in between.
    ///
    /// # Panics
    ///
    /// If `state` has another length.
    pub fn request_from(&self, request: usize, state: &[f64]) -> Option<Exact> {
        let Plan::Live {
            first,
            offset,
            checkpoints,
            ..
        } = self.plan(request)
        else {
            return None;
        };
        assert_eq!(state.len(), self.shape.dim() * HEAD_DIM);
        let (heads, tokens) = (self.shape.heads, checkpoints.len());
        let (dim, size) = (self.shape.dim(), HEAD_DIM * HEAD_DIM);
        let history = self.history(request, first, offset);
        let mut exact = Exact {
            out: vec![0.0; tokens * dim],
            out_error: vec![0.0; tokens * dim],
            out_terms: vec![0.0; tokens * dim],
            states: vec![0.0; tokens * heads * size],
            state_error: vec![0.0; tokens * heads],
            line: Vec::with_capacity(3 * dim * (tokens + 2)),
            decay: (f64::INFINITY, f64::NEG_INFINITY),
        };
        for channel in history.chunks_exact(3 + self.shape.tokens) {
            exact.line.extend_from_slice(&channel[1..3 + tokens]);
        }
        for head in 0..heads {
            let mut state = state[head * size..(head + 1) * size].to_vec();
            let mut error = vec![0.0; size];
            for token in 0..tokens {
                let row = request * self.shape.tokens + token;
                let result = self.head_step(&history, row, token, head, &mut state, &mut error);
                exact.decay.0 = exact.decay.0.min(result.decay.0);
                exact.decay.1 = exact.decay.1.max(result.decay.1);
                let columns = token * dim + head * HEAD_DIM;
                exact.out[columns..columns + HEAD_DIM].copy_from_slice(&result.out);
                exact.out_error[columns..columns + HEAD_DIM].copy_from_slice(&result.out_error);
                exact.out_terms[columns..columns + HEAD_DIM].copy_from_slice(&result.out_terms);
                if self.shape.state_type == StateType::Bf16 {
                    for (s, e) in state.iter_mut().zip(&mut error) {
                        let rounded = round(*s);
                        let reach = |x: f64| (round(x) - rounded).abs();
                        *e = reach(*s + *e).max(reach(*s - *e));
                        *s = rounded;
                    }
                }
                let index = token * heads + head;
                exact.states[index * size..(index + 1) * size].copy_from_slice(&state);
                exact.state_error[index] = error
                    .iter()
                    .filter(|e| !e.is_nan())
                    .map(|e| e * e)
                    .sum::<f64>()
                    .sqrt();
            }
        }
        Some(exact)
    }

    /// Raw inputs `[3d, 3 + tokens]`: the window's three taps, then the tokens.
    fn history(&self, request: usize, first: usize, offset: usize) -> Vec<bf16> {
        let shape = self.shape;
        let length = 3 + shape.tokens;
        let mut history = vec![bf16::ZERO; 3 * shape.dim() * length];
        for (channel, line) in history.chunks_exact_mut(length).enumerate() {
            for (position, raw) in line.iter_mut().enumerate() {
                *raw = match position.checked_sub(3) {
                    None => self.conv_cache[shape.conv_index(first, channel, offset + position)],
                    Some(token) => {
                        let row = request * shape.tokens + token;
                        self.inputs.projected[row * shape.pitch + channel]
                    }
                };
            }
        }
        history
    }

    fn head_step(
        &self,
        history: &[bf16],
        row: usize,
        token: usize,
        head: usize,
        state: &mut [f64],
        error: &mut [f64],
    ) -> HeadResult {
        let (shape, inputs) = (self.shape, self.inputs);
        let dim = shape.dim();
        let projected = &inputs.projected[row * shape.pitch..][..shape.used_columns()];

        let [(q, q_error), (k, k_error), (v, v_error)] =
            [0, 1, 2].map(|part| self.convolve(history, token, head, part));
        let (q, q_error) = normalise(&q, &q_error, shape.scale.into());
        let (k, k_error) = normalise(&k, &k_error, 1.0);
        let (g, g_error) = self.gate_input(row, head);
        let (decay, decay_error) = self.decay(&g, &g_error, head);

        let logit = projected[4 * dim + HEAD_DIM + head].to_f64();
        let (beta, beta_error) = loss::sigmoid(logit);

        let k_abs = k.map(f64::abs);
        let q_abs = q.map(f64::abs);
        let (mut o, mut o_error, mut o_terms) = ([0.0; HEAD_DIM], [0.0; HEAD_DIM], [0.0; HEAD_DIM]);
        for value in 0..HEAD_DIM {
            let line: &mut Vector = row_of(state, value);
            let lost: &mut Vector = row_of(error, value);
            for key in 0..HEAD_DIM {
                let before = line[key].abs();
                line[key] *= decay[key];
                lost[key] =
                    lost[key] * decay[key] + before * decay_error[key] + UNIT * line[key].abs();
            }
            let recalled = sum(|key| line[key] * k[key]);
            let recalled_error = sum(|key| {
                let size = line[key].abs();
                lost[key] * k_abs[key] + size * (k_error[key] + SUM * k_abs[key])
            });
            let new = v[value] - recalled;
            let u = beta * new;
            let u_error = beta_error * new.abs()
                + beta * (v_error[value] + recalled_error)
                + 2.0 * UNIT * u.abs();
            for key in 0..HEAD_DIM {
                let added = u * k[key];
                line[key] += added;
                lost[key] += u_error * k_abs[key]
                    + u.abs() * k_error[key]
                    + UNIT * (line[key].abs() + added.abs());
            }
            o[value] = sum(|key| line[key] * q[key]);
            o_terms[value] = sum(|key| line[key].abs() * q_abs[key]);
            o_error[value] = sum(|key| {
                lost[key] * q_abs[key] + line[key].abs() * (q_error[key] + SUM * q_abs[key])
            });
        }

        let mean = sum(|i| o[i] * o[i]) / HEAD_DIM as f64 + f64::from(shape.eps);
        let (inverse, inverse_error) = loss::inverse_root(mean);
        // Relative to the root of the mean; where it is not small, first order says nothing, but
        // a normalised element never exceeds √128.
        let mean_error = sum(|i| o[i].abs() * o_error[i]) / HEAD_DIM as f64 / mean + SUM;
        let lost = (sum(|i| o_error[i] * o_error[i]) / HEAD_DIM as f64 / mean).sqrt();
        let lost = if lost > 0.1 {
            2.0 * (HEAD_DIM as f64).sqrt()
        } else {
            0.0
        };
        let gate: [Bounded; HEAD_DIM] = std::array::from_fn(|i| {
            loss::sigmoid(projected[3 * dim + head * HEAD_DIM + i].to_f64())
        });
        let norm: Vector = std::array::from_fn(|i| inputs.norm[i].into());
        HeadResult {
            out: std::array::from_fn(|i| o[i] * inverse * norm[i] * gate[i].0),
            out_error: std::array::from_fn(|i| {
                let unit = o[i] * inverse;
                let unit_error = lost
                    + o_error[i] * inverse
                    + unit.abs() * (mean_error + inverse_error / inverse + 2.0 * UNIT);
                norm[i].abs() * (unit_error * gate[i].0 + unit.abs() * gate[i].1)
            }),
            out_terms: std::array::from_fn(|i| o_terms[i] * inverse * norm[i].abs() * gate[i].0),
            decay: decay
                .iter()
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &d| {
                    (l.min(d), h.max(d))
                }),
        }
    }

    /// SiLU of the causal convolution for one head's q, k or v, and its error.
    fn convolve(
        &self,
        history: &[bf16],
        token: usize,
        head: usize,
        part: usize,
    ) -> (Vector, Vector) {
        let (dim, length) = (self.shape.dim(), 3 + self.shape.tokens);
        let (mut y, mut y_error) = ([0.0; HEAD_DIM], [0.0; HEAD_DIM]);
        for i in 0..HEAD_DIM {
            let column = head * HEAD_DIM + i;
            let channel = part * dim + column;
            let mut x: f64 = self
                .inputs
                .conv_bias
                .map_or(0.0, |bias| bias[channel].into());
            let mut size = x.abs();
            for tap in 0..CONV_WIDTH {
                let raw = history[channel * length + token + tap].to_f64();
                let weight = self.inputs.conv_weight[(part * CONV_WIDTH + tap) * dim + column];
                let term = f64::from(weight) * raw;
                x += term;
                size += term.abs();
            }
            let (gate, gate_error) = loss::sigmoid(x);
            y[i] = x * gate;
            // |SiLU'| ≤ 1.1 everywhere.
            y_error[i] = 1.1 * 4.0 * UNIT * size + x.abs() * gate_error + TINY;
        }
        (y, y_error)
    }

    /// Input of each key's gate, and its absolute error: none where it is an operand.
    fn gate_input(&self, row: usize, head: usize) -> (Vector, Vector) {
        let shape = self.shape;
        if let Some(rows) = self.inputs.gate_input {
            let start = row * shape.gate_stride + head * HEAD_DIM;
            let given = std::array::from_fn(|i| rows[start + i].to_f64());
            return (given, [0.0; HEAD_DIM]);
        }
        let f_a = &self.inputs.projected[row * shape.pitch + 4 * shape.dim()..][..HEAD_DIM];
        let f_a: Vector = std::array::from_fn(|j| f_a[j].to_f64());
        let (mut g, mut g_error) = ([0.0; HEAD_DIM], [0.0; HEAD_DIM]);
        for i in 0..HEAD_DIM {
            let weights: &Vector = self.f_b[(head * HEAD_DIM + i) * HEAD_DIM..][..HEAD_DIM]
                .try_into()
                .expect("a row of f_b has 128 elements");
            g[i] = sum(|j| weights[j] * f_a[j]);
            g_error[i] = SUM * sum(|j| (weights[j] * f_a[j]).abs());
        }
        (g, g_error)
    }

    /// Decay of each key, and its absolute error.
    fn decay(&self, g: &Vector, g_error: &Vector, head: usize) -> (Vector, Vector) {
        let rate = loss::rate(self.inputs.a_log[head].into());
        let (mut decay, mut decay_error) = ([0.0; HEAD_DIM], [0.0; HEAD_DIM]);
        for i in 0..HEAD_DIM {
            let x = g[i] + f64::from(self.inputs.dt_bias[head * HEAD_DIM + i]);
            let x_error = g_error[i] + UNIT * x.abs();
            (decay[i], decay_error[i]) = loss::decay(self.shape.gate, rate, (x, x_error));
        }
        (decay, decay_error)
    }
}

struct HeadResult {
    out: Vector,
    out_error: Vector,
    out_terms: Vector,
    decay: (f64, f64),
}

/// Computes every request of a launch; see [`Oracle::request`].
///
/// # Errors
///
/// Whatever [`Shape::validate`] finds.
pub fn run(
    shape: &Shape,
    inputs: &Inputs<'_>,
    conv_cache: &[bf16],
    state: &[f32],
) -> Result<Vec<Option<Exact>>, Error> {
    let oracle = Oracle::new(shape, inputs, conv_cache, state)?;
    Ok((0..shape.requests)
        .map(|request| oracle.request(request))
        .collect())
}

/// x / √(Σx² + 1e-6) · factor, and its error.
fn normalise(x: &Vector, x_error: &Vector, factor: f64) -> (Vector, Vector) {
    let square = sum(|i| x[i] * x[i]) + 1e-6;
    let (root, root_error) = loss::inverse_root(square);
    let inverse = factor * root;
    let relative =
        sum(|i| x[i].abs() * x_error[i]) / square + SUM / 2.0 + root_error / root + 2.0 * UNIT;
    (
        std::array::from_fn(|i| x[i] * inverse),
        std::array::from_fn(|i| (x_error[i] + x[i].abs() * relative) * inverse + TINY),
    )
}

fn row_of(matrix: &mut [f64], value: usize) -> &mut Vector {
    (&mut matrix[value * HEAD_DIM..(value + 1) * HEAD_DIM])
        .try_into()
        .expect("a row has 128 keys")
}

/// Sum of 128 terms in eight lanes.
#[inline(always)]
fn sum(term: impl Fn(usize) -> f64) -> f64 {
    let mut lanes = [0.0; 8];
    for base in (0..HEAD_DIM).step_by(8) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += term(base + lane);
        }
    }
    lanes.iter().sum()
}

/// To the nearest bf16, ties to even, for sizes below 2¹²⁸. `bf16::from_f64` looks at 20 bits after
/// the point only and takes what lies close to a tie for one.
fn round(x: f64) -> f64 {
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let spacing = 2f64.powi(exponent.max(-126) - 7);
    (x / spacing).round_ties_even() * spacing
}

#[cfg(test)]
mod tests {
    use super::round;
    use half::bf16;

    #[test]
    fn rounding_agrees_with_bf16_and_sees_every_digit() {
        for i in 0..1u32 << 16 {
            let x = f32::from_bits(i.wrapping_mul(0x9e37_79b9));
            if x.is_finite() && x.abs() < 1e38 {
                assert_eq!(round(x.into()), bf16::from_f32(x).to_f64(), "{x:e}");
            }
        }
        let tie = 1.0 + 1.0 / 256.0;
        assert_eq!(round(tie), 1.0);
        assert_eq!(round(tie + 1e-12), 1.0 + 1.0 / 128.0);
        assert_eq!(round(tie - 1e-12), 1.0);
        assert!(round(f64::NAN).is_nan());
    }
}
