//! Owns the f32 step with the kernel's rounding points; must not know the oracle.
//!
//! All arithmetic is f32. The only roundings to bf16 are the output, and the checkpoint when the
//! state is bf16; the convolution cache holds copies of raw inputs.

use half::bf16;

use crate::records::{RECORD_SIZE, repeat};
use crate::{
    CONV_WIDTH, Error, Fault, Gate, HEAD_DIM, Inputs, Plan, Pools, Report, Shape, StateType,
};

/// Computes one launch in place and rounds `out` to bf16.
///
/// **Shapes**: `out` bf16 `[rows, out_stride]`, written in place, every row that a request brings.
///
/// # Errors
///
/// Whatever [`Shape::validate`] finds, and `OperandTooShort` for `out`.
pub fn run(
    shape: &Shape,
    inputs: &Inputs<'_>,
    pools: Pools<'_>,
    out: &mut [bf16],
) -> Result<Report, Error> {
    out_covers(shape, out.len())?;
    run_into(shape, inputs, pools, |element, value| {
        out[element] = bf16::from_f32(value)
    })
}

/// As [`run`], with `out` left in f32, before its rounding.
///
/// # Errors
///
/// As [`run`].
pub fn run_unrounded(
    shape: &Shape,
    inputs: &Inputs<'_>,
    pools: Pools<'_>,
    out: &mut [f32],
) -> Result<Report, Error> {
    out_covers(shape, out.len())?;
    run_into(shape, inputs, pools, |element, value| out[element] = value)
}

fn out_covers(shape: &Shape, found: usize) -> Result<(), Error> {
    let needed = match shape.rows() {
        0 => 0,
        rows => (rows - 1) * shape.out_stride + shape.dim(),
    };
    if found < needed {
        return Err(Error::OperandTooShort {
            operand: "out",
            found,
            needed,
        });
    }
    Ok(())
}

fn run_into(
    shape: &Shape,
    inputs: &Inputs<'_>,
    pools: Pools<'_>,
    mut write: impl FnMut(usize, f32),
) -> Result<Report, Error> {
    let Pools {
        conv_cache,
        state,
        mut records,
    } = pools;
    shape.validate(inputs, conv_cache, state, records.as_deref())?;
    let mut report = Report::default();
    for request in 0..shape.requests {
        match shape.plan(&inputs.metadata(), request) {
            Plan::Live {
                first,
                source,
                offset,
                checkpoints,
            } => {
                let history = history(shape, inputs, conv_cache, request, first, offset);
                // Where record `index` of a head lies, in a shape with records.
                let place = |index, head| {
                    let start = shape
                        .records
                        .map(|records| shape.record_index(&records, first, index, head));
                    start.map(|start| start..start + RECORD_SIZE)
                };
                for head in 0..shape.heads {
                    let mut current = matrix(shape, state, source, head).to_vec();
                    for index in 0..offset {
                        if let (Some(pool), Some(place)) = (&records, place(index, head)) {
                            repeat(&mut current, &pool[place], shape.state_type);
                        }
                    }
                    for (token, checkpoint) in checkpoints.iter().enumerate() {
                        let row = request * shape.tokens + token;
                        let (values, record) =
                            head_step(shape, inputs, &history, row, token, head, &mut current);
                        if let (Some(pool), Some(index)) = (&mut records, token.checked_sub(1))
                            && let Some(place) = place(index, head)
                        {
                            pool[place].copy_from_slice(&record);
                        }
                        for (v, value) in values.into_iter().enumerate() {
                            write(row * shape.out_stride + head * HEAD_DIM + v, value);
                        }
                        if shape.state_type == StateType::Bf16 {
                            current
                                .iter_mut()
                                .for_each(|s| *s = bf16::from_f32(*s).to_f32());
                        }
                        if let Some(slot) = checkpoint {
                            let start = shape.state_index(*slot, head);
                            state[start..start + current.len()].copy_from_slice(&current);
                        }
                    }
                }
                for channel in 0..3 * shape.dim() {
                    for position in 0..checkpoints.len() + 2 {
                        conv_cache[shape.conv_index(first, channel, position)] =
                            history[channel * (3 + shape.tokens) + position + 1];
                    }
                }
            }
            plan => {
                if let Plan::Fault(kind) = plan {
                    report.faults.push(Fault { request, kind });
                }
                let first_row = request * shape.tokens;
                let rows = shape.tokens_of(inputs.token_counts, request);
                for row in first_row..first_row + rows {
                    for column in 0..shape.dim() {
                        write(row * shape.out_stride + column, 0.0);
                    }
                }
            }
        }
    }
    Ok(report)
}

fn matrix<'a>(shape: &Shape, state: &'a [f32], slot: usize, head: usize) -> &'a [f32] {
    &state[shape.state_index(slot, head)..][..HEAD_DIM * HEAD_DIM]
}

/// Raw inputs `[3d, 3 + tokens]`: the window's three taps, then the tokens.
fn history(
    shape: &Shape,
    inputs: &Inputs<'_>,
    conv_cache: &[bf16],
    request: usize,
    first: usize,
    offset: usize,
) -> Vec<bf16> {
    let mut history = Vec::with_capacity(3 * shape.dim() * (3 + shape.tokens));
    for channel in 0..3 * shape.dim() {
        for tap in 0..3 {
            history.push(conv_cache[shape.conv_index(first, channel, offset + tap)]);
        }
        for token in 0..shape.tokens {
            let row = request * shape.tokens + token;
            history.push(inputs.projected[row * shape.pitch + channel]);
        }
    }
    history
}

/// One token of one head: updates the `[128 values, 128 keys]` state, returns 128 outputs
/// and the token's record.
fn head_step(
    shape: &Shape,
    inputs: &Inputs<'_>,
    history: &[bf16],
    row: usize,
    token: usize,
    head: usize,
    state: &mut [f32],
) -> ([f32; HEAD_DIM], [f32; RECORD_SIZE]) {
    let dim = shape.dim();
    let projected = &inputs.projected[row * shape.pitch..][..shape.used_columns()];

    let convolve = |part: usize| -> [f32; HEAD_DIM] {
        std::array::from_fn(|i| {
            let column = head * HEAD_DIM + i;
            let channel = part * dim + column;
            let mut sum = inputs.conv_bias.map_or(0.0, |bias| bias[channel]);
            for tap in 0..CONV_WIDTH {
                let raw = history[channel * (3 + shape.tokens) + token + tap].to_f32();
                sum += inputs.conv_weight[(part * CONV_WIDTH + tap) * dim + column] * raw;
            }
            silu(sum)
        })
    };
    let (q, k, v) = (convolve(0), convolve(1), convolve(2));
    let (q_norm, k_norm) = (inverse_norm(&q), inverse_norm(&k));
    let q = q.map(|x| x * q_norm * shape.scale);
    let k = k.map(|x| x * k_norm);

    let f_a = &projected[4 * dim..][..HEAD_DIM];
    let rate = saturating_exp(inputs.a_log[head]);
    let decay: [f32; HEAD_DIM] = std::array::from_fn(|i| {
        let column = head * HEAD_DIM + i;
        let mut g = 0.0;
        if let Some(rows) = inputs.gate_input {
            g = rows[row * shape.gate_stride + column].to_f32();
        } else {
            for (weight, x) in inputs.f_b[column * HEAD_DIM..][..HEAD_DIM].iter().zip(f_a) {
                g += weight.to_f32() * x.to_f32();
            }
        }
        let biased = g + inputs.dt_bias[column];
        match shape.gate {
            Gate::LowerBound { lower_bound } => (lower_bound * sigmoid(rate * biased)).exp(),
            Gate::Softplus => (-rate * softplus(biased)).exp(),
        }
    });
    let beta = sigmoid(projected[4 * dim + HEAD_DIM + head].to_f32());

    let mut record = [0.0; RECORD_SIZE];
    record[..HEAD_DIM].copy_from_slice(&decay);
    record[HEAD_DIM..2 * HEAD_DIM].copy_from_slice(&k);
    let mut o = [0.0; HEAD_DIM];
    for (value, line) in state.chunks_exact_mut(HEAD_DIM).enumerate() {
        let mut recalled = 0.0;
        for key in 0..HEAD_DIM {
            line[key] *= decay[key];
            recalled += line[key] * k[key];
        }
        let u = beta * (v[value] - recalled);
        record[2 * HEAD_DIM + value] = u;
        for key in 0..HEAD_DIM {
            // One rounding, as when a record is repeated.
            line[key] = u.mul_add(k[key], line[key]);
            o[value] += line[key] * q[key];
        }
    }

    let square: f32 = o.iter().map(|x| x * x).sum();
    let o_norm = 1.0 / (square / HEAD_DIM as f32 + shape.eps).sqrt();
    let gate = &projected[3 * dim + head * HEAD_DIM..][..HEAD_DIM];
    let out = std::array::from_fn(|i| o[i] * o_norm * inputs.norm[i] * sigmoid(gate[i].to_f32()));
    (out, record)
}

fn inverse_norm(x: &[f32; HEAD_DIM]) -> f32 {
    1.0 / (x.iter().map(|x| x * x).sum::<f32>() + 1e-6).sqrt()
}

/// 1 / (1 + e⁻ˣ), accurate in both tails.
pub fn sigmoid(x: f32) -> f32 {
    if x < 0.0 {
        let e = x.exp();
        e / (1.0 + e)
    } else {
        1.0 / (1.0 + (-x).exp())
    }
}

/// x · sigmoid(x): finite for every finite x.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// ln(1 + eˣ), accurate in both tails.
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// eˣ, at most the largest finite f32; NaN stays NaN.
pub fn saturating_exp(x: f32) -> f32 {
    let e = x.exp();
    if e > f32::MAX { f32::MAX } else { e }
}
