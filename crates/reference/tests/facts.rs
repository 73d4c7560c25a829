//! Facts of the arithmetic that can be checked by hand; must not repeat the step's own formulas.

mod common;

use common::{GATE, Launch};
use half::bf16;
use kda_reference::{Gate, HEAD_DIM, Pools, Shape, StateType, step};

fn close(got: f64, expected: f64, relative: f64) -> bool {
    (got - expected).abs() <= relative * expected.abs()
}

#[test]
fn an_empty_step_gives_zeros() {
    let mut launch = Launch::zero(Shape::dense(1, 1, 1, GATE));
    let (report, out) = launch.run();
    assert!(report.faults.is_empty());
    assert!(out.iter().all(|&x| x == 0.0));
}

#[test]
fn values_are_rows_of_the_state_and_a_closed_gate_keeps_it() {
    // β = sigmoid(−∞-like) = 0 and decay = exp(−e⁰·softplus(−∞-like)) = 1.
    let mut launch = Launch::zero(Shape::dense(1, 1, 1, Gate::Softplus));
    let (v3, k5) = (3, 5);
    launch.dt_bias.fill(-200.0);
    launch.projected[4 * 128 + 128] = bf16::from_f32(-1000.0);
    for value in 0..128 {
        for key in 0..128 {
            launch.state[128 * 128 + value * 128 + key] = (value + 1000 * key) as f32;
        }
    }
    // Only q's channel 5 is on: the normalised query is the unit vector of key 5, times 128^−½.
    launch.conv_weight[3 * 128 + k5] = 1.0;
    launch.projected[k5] = bf16::from_f32(10_000.0);
    let before = launch.state.clone();
    let exact = launch.oracle()[0].clone().unwrap();
    let (_, out) = launch.run();
    assert_eq!(launch.state, before);
    // o[v] = (v + 5000)/√128, so out[v] = ½·o[v]/rms(o).
    let rms = ((0..128).map(|v| (v as f64 + 5000.0).powi(2)).sum::<f64>() / 128.0).sqrt();
    let expected = 0.5 * (v3 as f64 + 5000.0) / rms;
    assert!(
        close(out[v3].into(), expected, 1e-6),
        "{} {expected}",
        out[v3]
    );
    assert!(
        close(exact.out[v3], expected, 1e-9),
        "{} {expected}",
        exact.out[v3]
    );
    assert!(
        exact
            .states
            .iter()
            .zip(&before[128 * 128..])
            .all(|(a, &b)| *a == b.into())
    );
}

#[test]
fn beta_is_not_narrowed() {
    // State 0, v = SiLU(1), k the unit vector of key 0: S[v][0] = β·v.
    let mut launch = Launch::zero(Shape::dense(1, 1, 1, GATE));
    launch.projected[4 * 128 + 128] = bf16::from_f32(0.5);
    launch.conv_weight[(4 + 3) * 128] = 1.0;
    launch.conv_weight[(8 + 3) * 128 + 7] = 1.0;
    launch.projected[128] = bf16::from_f32(10_000.0);
    launch.projected[2 * 128 + 7] = bf16::from_f32(1.0);
    let exact = launch.oracle()[0].clone().unwrap();
    launch.run();
    let expected = 0.622_459_331_2 * 0.731_058_578_6;
    assert!(close(launch.state(1, 0)[7 * 128].into(), expected, 1e-6));
    assert!(close(exact.states[7 * 128], expected, 1e-9));
}

#[test]
fn both_gates_by_hand() {
    // x = 0.3, A_log = 0.7: sigmoid(e^0.7·0.3) = 0.646600, softplus(0.3) = 0.854355.
    for (gate, log_decay) in [
        (GATE, -5.0 * 0.646_599_66),
        (Gate::Softplus, -2.013_752_7 * 0.854_355_24),
    ] {
        let mut launch = Launch::zero(Shape::dense(1, 1, 1, gate));
        launch.a_log[0] = 0.7;
        launch.dt_bias.fill(0.3);
        launch.state[128 * 128 + 9] = 1.0;
        let exact = launch.oracle()[0].clone().unwrap();
        launch.run();
        let expected = f64::exp(log_decay);
        assert!(
            close(launch.state(1, 0)[9].into(), expected, 2e-6),
            "{gate:?}"
        );
        assert!(close(exact.states[9], expected, 2e-6), "{gate:?}");
    }
}

#[test]
fn softplus_decays_in_both_tails() {
    for (x, a_log, expected) in [
        (-18.0, 18.0, 0.367_879_44),
        (100.0, 0.0, 0.0),
        (-104.0, 0.0, 1.0),
        (-60.0, 0.0, 1.0),
        (20.0, 0.0, 2.061_153_6e-9),
        (0.0, 0.0, 0.5),
        (1e4, 18.0, 0.0),
        (-1e30, 1e30, 1.0),
        (1e30, -1e30, 1.0),
        (1e30, 1e30, 0.0),
    ] {
        let mut launch = Launch::zero(Shape::dense(1, 1, 1, Gate::Softplus));
        launch.a_log[0] = a_log;
        launch.dt_bias.fill(x);
        launch.state[128 * 128] = 1.0;
        let exact = launch.oracle()[0].clone().unwrap();
        launch.run();
        let got = f64::from(launch.state(1, 0)[0]);
        assert!(
            (got - expected).abs() <= 1e-6 + 1e-5 * expected,
            "{x} {a_log}: {got}"
        );
        assert!((exact.states[0] - expected).abs() <= 1e-6, "{x} {a_log}");
    }
}

#[test]
fn lower_bound_is_a_scale_and_saturates() {
    for (x, a_log, log_decay) in [
        (1e30, 1e30, -5.0f64),
        (-1e30, 1e30, 0.0),
        (0.0, 1e30, -2.5),
        (1e30, -1e30, -2.5),
        (2.0, 0.0, -5.0 * 0.880_797_078),
    ] {
        let mut launch = Launch::zero(Shape::dense(1, 1, 1, GATE));
        launch.a_log[0] = a_log;
        launch.dt_bias.fill(x);
        launch.state[128 * 128] = 1.0;
        let exact = launch.oracle()[0].clone().unwrap();
        launch.run();
        assert!(
            close(launch.state(1, 0)[0].into(), log_decay.exp(), 1e-6),
            "{x} {a_log}"
        );
        assert!(close(exact.states[0], log_decay.exp(), 1e-6), "{x} {a_log}");
    }
}

#[test]
fn scalar_functions_in_their_tails() {
    assert_eq!(step::sigmoid(f32::MAX), 1.0);
    assert_eq!(step::sigmoid(f32::MIN), 0.0);
    assert!(close(step::sigmoid(-87.0).into(), (-87f64).exp(), 1e-5));
    assert_eq!(step::silu(f32::MIN), 0.0);
    assert_eq!(step::silu(f32::MAX), f32::MAX);
    assert!(step::silu(f32::NAN).is_nan());
    assert!(close(step::softplus(-18.0).into(), 1.522_997_962e-8, 1e-6));
    assert_eq!(step::softplus(1e4), 1e4);
    assert!(step::softplus(f32::NAN).is_nan());
    assert_eq!(step::saturating_exp(88.8), f32::MAX);
    assert_eq!(step::saturating_exp(f32::INFINITY), f32::MAX);
    assert_eq!(step::saturating_exp(0.0), 1.0);
    assert!(step::saturating_exp(f32::NAN).is_nan());
}

#[test]
fn a_long_weak_decay_keeps_its_digits() {
    // Decay 0.99992 for 4,096 steps; β = 0 keeps everything else out.
    let mut launch = Launch::zero(Shape::dense(1, 1, 1, GATE));
    launch.projected[4 * 128 + 128] = bf16::from_f32(-1000.0);
    launch.dt_bias.fill((1.6e-5f32 / (1.0 - 1.6e-5)).ln());
    launch.state[128 * 128] = 1.0;
    for _ in 0..4096 {
        launch.run();
    }
    let expected = (-5.0 * 1.6e-5 * 4096.0f64).exp();
    let got = f64::from(launch.state(1, 0)[0]);
    assert!(close(got, expected, 2e-4), "{got} {expected}");
}

#[test]
fn taps_are_oldest_first() {
    // v = SiLU(Σ weight·tap) with weights 1, 2, 3, 4 over 1, 10, 100 and the token's 1000.
    let mut launch = Launch::zero(Shape::dense(1, 1, 1, GATE));
    let (shape, channel) = (launch.shape, 2 * 128);
    for (tap, raw) in [1.0, 10.0, 100.0].into_iter().enumerate() {
        launch.conv_cache[shape.conv_index(1, channel, tap)] = bf16::from_f32(raw);
    }
    launch.projected[channel] = bf16::from_f32(1000.0);
    for tap in 0..4 {
        launch.conv_weight[(8 + tap) * 128] = tap as f32 + 1.0;
    }
    launch.conv_weight[(4 + 3) * 128] = 1.0;
    launch.projected[128] = bf16::from_f32(10_000.0);
    launch.conv_bias = Some(vec![0.5; 384]);
    launch.conv_bias.as_mut().unwrap()[128..256].fill(0.0);
    let exact = launch.oracle()[0].clone().unwrap();
    launch.run();
    let expected = 0.5 * (0.5 + 1.0 + 20.0 + 300.0 + 4000.0);
    assert!(close(launch.state(1, 0)[0].into(), expected, 1e-6));
    assert!(close(exact.states[0], expected, 1e-6));
}

#[test]
fn a_bf16_state_is_rounded_after_every_token() {
    let mut shape = Shape::dense(1, 1, 2, GATE);
    shape.state_type = StateType::Bf16;
    let mut launch = Launch::random(shape, 17);
    launch
        .state
        .iter_mut()
        .for_each(|s| *s = bf16::from_f32(*s).to_f32());
    let exact = launch.oracle()[0].clone().unwrap();
    launch.run();
    for token in 0..2 {
        let got = launch.state(token + 1, 0);
        assert!(got.iter().all(|&s| bf16::from_f32(s).to_f32() == s));
        let differ = got
            .iter()
            .zip(exact.state(&shape, token, 0))
            .filter(|&(&a, &b)| f64::from(a) != b)
            .count();
        assert!(differ < 64, "{differ} of 16384 elements");
    }
}

#[test]
fn rounding_out_is_the_last_thing() {
    let mut launch = Launch::random(Shape::dense(2, 2, 1, GATE), 19);
    let mut out = vec![bf16::ZERO; 2 * 256];
    let (mut conv_cache, mut state) = (launch.conv_cache.clone(), launch.state.clone());
    let pools = Pools {
        conv_cache: &mut conv_cache,
        state: &mut state,
        records: None,
    };
    step::run(&launch.shape, &launch.inputs(), pools, &mut out).unwrap();
    let unrounded = launch.run().1;
    assert!(
        out.iter()
            .zip(unrounded)
            .all(|(a, b)| *a == bf16::from_f32(b))
    );
    assert_eq!(state, launch.state);
}

#[test]
fn the_oracle_bounds_what_f32_loses() {
    for gate in [GATE, Gate::Softplus] {
        let mut launch = Launch::random(Shape::dense(2, 2, 3, gate), 23);
        let exact = launch.oracle();
        let (_, out) = launch.run();
        for (request, exact) in exact.into_iter().enumerate() {
            let exact = exact.unwrap();
            let rows = &out[request * 3 * 256..][..3 * 256];
            for (i, &got) in rows.iter().enumerate() {
                let error = (f64::from(got) - exact.out[i]).abs();
                assert!(
                    error <= exact.out_error[i],
                    "{error} {}",
                    exact.out_error[i]
                );
                assert!(exact.out_error[i] < 1e-2);
            }
            for token in 0..3 {
                for head in 0..2 {
                    let got = launch.state(request * 3 + token + 1, head);
                    let pairs = got.iter().zip(exact.state(&launch.shape, token, head));
                    let error = pairs
                        .map(|(&a, &b)| (f64::from(a) - b).powi(2))
                        .sum::<f64>()
                        .sqrt();
                    assert!(error <= exact.state_error[token * 2 + head]);
                }
            }
            assert!(exact.decay.0 >= 0.0 && exact.decay.1 <= 1.0);
        }
    }
}

/// A launch whose F_B picks columns of F_A, so that F_B·F_A is a bf16 value, and the same launch with
/// that product given.
fn picked(gate: Gate, tokens: usize) -> (Launch, Launch) {
    let mut shape = Shape::dense(2, 2, tokens, gate);
    shape.gate_stride = shape.dim() + 3;
    let mut low_rank = Launch::random(shape, 29);
    let column = |i: usize| (7 * i + 3) % HEAD_DIM;
    for i in 0..shape.dim() {
        let row = &mut low_rank.f_b[i * HEAD_DIM..][..HEAD_DIM];
        row.fill(bf16::ZERO);
        row[column(i)] = bf16::from_f32(-0.5);
    }
    let mut rows = vec![bf16::NAN; shape.rows() * shape.gate_stride];
    for row in 0..shape.rows() {
        for i in 0..shape.dim() {
            let x = low_rank.projected[row * shape.pitch + 4 * shape.dim() + column(i)];
            rows[row * shape.gate_stride + i] = bf16::from_f32(-0.5 * x.to_f32());
        }
    }
    let mut projected = low_rank.clone();
    projected.gate_input = Some(rows);
    // Neither is looked at.
    projected.f_b.clear();
    for row in 0..shape.rows() {
        let f_a = row * shape.pitch + 4 * shape.dim();
        projected.projected[f_a..f_a + HEAD_DIM].fill(bf16::NAN);
    }
    (low_rank, projected)
}

#[test]
fn a_projected_gate_stands_for_the_product() {
    for gate in [GATE, Gate::Softplus] {
        for tokens in [1, 3] {
            let (mut low_rank, mut projected) = picked(gate, tokens);
            let (exact, given) = (low_rank.oracle(), projected.oracle());
            for (exact, given) in exact.iter().zip(&given) {
                let (exact, given) = (exact.as_ref().unwrap(), given.as_ref().unwrap());
                assert_eq!((&exact.out, &exact.states), (&given.out, &given.states));
                // Nothing is lost before the gate, so less may be lost after it.
                for (a, b) in given.state_error.iter().zip(&exact.state_error) {
                    assert!(0.0 < *a && a < b, "{a:e} {b:e}");
                }
            }
            assert_eq!(low_rank.run(), projected.run());
            assert_eq!(low_rank.state, projected.state);
            assert_eq!(low_rank.conv_cache, projected.conv_cache);
        }
    }
}

#[test]
fn a_projected_gate_that_is_too_short_is_named() {
    let (_, launch) = picked(GATE, 1);
    let error = |shape: &Shape, rows: &[bf16]| {
        let inputs = kda_reference::Inputs {
            gate_input: Some(rows),
            ..launch.inputs()
        };
        let (conv_cache, state) = (&launch.conv_cache, &launch.state);
        let error = shape
            .validate(&inputs, conv_cache, state, None)
            .unwrap_err();
        error.to_string()
    };
    let (shape, rows) = (&launch.shape, launch.gate_input.as_deref().unwrap());
    let short = error(shape, &rows[..shape.gate_stride + shape.dim() - 1]);
    assert_eq!(short, "gate input holds 514 elements, needed 515");
    let narrow = Shape {
        gate_stride: 255,
        ..*shape
    };
    let narrow = error(&narrow, rows);
    assert_eq!(narrow, "stride of gate input is 255 elements, needed 256");
}
