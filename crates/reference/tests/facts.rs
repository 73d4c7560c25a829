//! Facts of the step that can be checked by hand; must not repeat the step's own formulas.

use half::bf16;
use kda_reference::{
    ConvLayout, Error, Fault, FaultKind, Gate, HEAD_DIM, Inputs, NullRule, Plan, Pools, Report,
    Shape, StateType, decode_conv_weight, oracle, step,
};

const GATE: Gate = Gate::LowerBound { lower_bound: -5.0 };

/// Owned operands of a dense shape; every value zero except a norm of ones.
#[derive(Clone)]
struct Launch {
    shape: Shape,
    projected: Vec<bf16>,
    conv_weight: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    f_b: Vec<bf16>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    slots: Vec<i32>,
    accepted: Option<Vec<i32>>,
    conv_cache: Vec<bf16>,
    state: Vec<f32>,
}

impl Launch {
    fn zero(shape: Shape) -> Launch {
        let dim = shape.dim();
        Launch {
            projected: vec![bf16::ZERO; shape.rows() * shape.pitch],
            conv_weight: vec![0.0; 12 * dim],
            conv_bias: None,
            f_b: vec![bf16::ZERO; dim * HEAD_DIM],
            a_log: vec![0.0; shape.heads],
            dt_bias: vec![0.0; dim],
            norm: vec![1.0; HEAD_DIM],
            slots: (1..=(shape.requests * shape.slots_stride) as i32).collect(),
            accepted: (shape.tokens > 1).then(|| vec![1; shape.requests]),
            conv_cache: vec![bf16::ZERO; shape.pool_slots * shape.conv_slot_stride],
            state: vec![0.0; shape.pool_slots * shape.state_slot_stride],
            shape,
        }
    }

    /// Deterministic, unequal values everywhere.
    fn random(shape: Shape, seed: u64) -> Launch {
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

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            projected: &self.projected,
            conv_weight: &self.conv_weight,
            conv_bias: self.conv_bias.as_deref(),
            f_b: &self.f_b,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            norm: &self.norm,
            slots: &self.slots,
            accepted: self.accepted.as_deref(),
        }
    }

    fn oracle(&self) -> Vec<Option<oracle::Exact>> {
        oracle::run(&self.shape, &self.inputs(), &self.conv_cache, &self.state).unwrap()
    }

    /// Runs in place; `out` in f32 before rounding.
    fn run(&mut self) -> (Report, Vec<f32>) {
        let mut out = vec![f32::NAN; self.shape.rows() * self.shape.out_stride];
        let (mut conv_cache, mut state) = (self.conv_cache.clone(), self.state.clone());
        let pools = Pools {
            conv_cache: &mut conv_cache,
            state: &mut state,
        };
        let report = step::run_unrounded(&self.shape, &self.inputs(), pools, &mut out).unwrap();
        self.conv_cache = conv_cache;
        self.state = state;
        (report, out)
    }

    fn state(&self, slot: usize, head: usize) -> &[f32] {
        &self.state[self.shape.state_index(slot, head)..][..HEAD_DIM * HEAD_DIM]
    }

    fn line(&self, slot: usize, channel: usize) -> Vec<f32> {
        (0..self.shape.conv_len)
            .map(|p| self.conv_cache[self.shape.conv_index(slot, channel, p)].to_f32())
            .collect()
    }
}

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
fn the_window_moves_by_one_tap_a_token() {
    for layout in [ConvLayout::DimFirst, ConvLayout::TokenFirst] {
        for (tokens, accepted, expected) in [
            (1, 1, [2.0, 3.0, 10.0, 4.0, 5.0, 6.0]),
            (2, 1, [2.0, 3.0, 10.0, 11.0, 5.0, 6.0]),
            (2, 3, [4.0, 5.0, 10.0, 11.0, 5.0, 6.0]),
            (4, 4, [5.0, 6.0, 10.0, 11.0, 12.0, 13.0]),
        ] {
            let mut shape = Shape::dense(1, 1, tokens, GATE);
            shape.columns = 4;
            shape.slots_stride = 4;
            shape.conv_len = 6;
            shape.conv_slot_stride = 3 * 128 * 6;
            shape.pool_slots = 5;
            shape.conv_layout = layout;
            let mut launch = Launch::zero(shape);
            launch.accepted = Some(vec![accepted]);
            let channel = 300;
            for position in 0..6 {
                launch.conv_cache[shape.conv_index(1, channel, position)] =
                    bf16::from_f32(position as f32 + 1.0);
            }
            for token in 0..tokens {
                launch.projected[token * shape.pitch + channel] =
                    bf16::from_f32(10.0 + token as f32);
            }
            let exact = launch.oracle()[0].clone().unwrap();
            launch.run();
            assert_eq!(
                launch.line(1, channel),
                expected,
                "{layout:?} {tokens} {accepted}"
            );
            let line = &exact.line[channel * (tokens + 2)..][..tokens + 2];
            let line: Vec<f32> = line.iter().map(|x| x.to_f32()).collect();
            assert_eq!(line, expected[..tokens + 2]);
            assert!(launch.line(2, channel).iter().all(|&x| x == 0.0));
        }
    }
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
fn a_verify_step_equals_decode_steps() {
    for state_type in [StateType::F32, StateType::Bf16] {
        let mut shape = Shape::dense(2, 2, 4, GATE);
        shape.state_type = state_type;
        let mut verify = Launch::random(shape, 7);
        verify.slots = vec![5, 3, 8, 1, 2, 7, 4, 6];
        verify.accepted = Some(vec![1, 1]);
        let mut decode = verify.clone();
        decode.shape.tokens = 1;
        decode.shape.columns = 1;
        decode.accepted = None;
        let (_, out) = verify.run();
        for token in 0..4 {
            for request in 0..2 {
                let row = request * 4 + token;
                let from = verify.projected[row * shape.pitch..][..shape.pitch].to_vec();
                decode.projected[request * shape.pitch..][..shape.pitch].copy_from_slice(&from);
            }
            let (_, step_out) = decode.run();
            for request in 0..2 {
                let (row, slot) = (request * 4 + token, verify.slots[request * 4] as usize);
                let checkpoint = verify.slots[row] as usize;
                assert_eq!(step_out[request * 256..][..256], out[row * 256..][..256]);
                for head in 0..2 {
                    // The first slot is itself the first checkpoint: it holds the first token.
                    assert_eq!(decode.state(slot, head), verify.state(checkpoint, head));
                }
                for channel in 0..768 {
                    assert_eq!(
                        decode.line(slot, channel)[..3],
                        verify.line(slot, channel)[token..token + 3]
                    );
                }
            }
        }
    }
}

#[test]
fn a_verify_step_rolls_back_to_the_accepted_checkpoint() {
    let mut shape = Shape::dense(1, 1, 4, GATE);
    shape.pool_slots = 6;
    let mut rolled = Launch::random(shape, 3);
    rolled.accepted = Some(vec![3]);
    let mut plain = rolled.clone();
    plain.accepted = Some(vec![1]);
    let source = rolled.state(3, 0).to_vec();
    plain.state[shape.state_index(1, 0)..][..128 * 128].copy_from_slice(&source);
    for channel in 0..384 {
        for tap in 0..3 {
            plain.conv_cache[shape.conv_index(1, channel, tap)] =
                rolled.conv_cache[shape.conv_index(1, channel, tap + 2)];
        }
    }
    assert_eq!(rolled.run(), plain.run());
    for slot in 1..=4 {
        assert_eq!(rolled.state(slot, 0), plain.state(slot, 0));
    }
}

#[test]
fn null_requests_and_faults_touch_nothing() {
    let mut shape = Shape::dense(1, 8, 2, GATE);
    shape.columns = 3;
    shape.slots_stride = 3;
    shape.conv_len = 5;
    shape.conv_slot_stride = 3 * 128 * 5;
    shape.pool_slots = 8;
    let mut launch = Launch::random(shape, 11);
    launch.slots = vec![
        1,
        2,
        3, // live
        0,
        9,
        9, // null: the rest is not looked at
        4,
        8,
        0, // slot out of range
        5,
        6,
        0, // accepted 4 of 3
        5,
        6,
        0, // accepted 0
        5,
        6,
        0, // null source
        i32::MAX,
        6,
        7, // slot out of range, which goes before an accepted count out of range
        5,
        6,
        8, // source out of range
    ];
    launch.accepted = Some(vec![3, -7, 1, 4, 0, 3, 9, 3]);
    let before = launch.clone();
    let (report, out) = launch.run();
    let fault = |request, kind| Fault { request, kind };
    assert_eq!(
        report.faults,
        [
            fault(2, FaultKind::SlotOutOfRange),
            fault(3, FaultKind::AcceptedOutOfRange),
            fault(4, FaultKind::AcceptedOutOfRange),
            fault(5, FaultKind::NullSource),
            fault(6, FaultKind::SlotOutOfRange),
            fault(7, FaultKind::SlotOutOfRange),
        ]
    );
    assert!(out[2 * 128..].iter().all(|x| x.to_bits() == 0));
    assert!(out[..128].iter().all(|x| *x != 0.0));
    for slot in [0, 3, 4, 5, 6, 7] {
        assert_eq!(launch.state(slot, 0), before.state(slot, 0));
    }
    for slot in [0, 2, 3, 4, 5, 6, 7] {
        for channel in 0..384 {
            assert_eq!(launch.line(slot, channel), before.line(slot, channel));
        }
    }
    assert_ne!(launch.state(1, 0), before.state(1, 0));
    assert_ne!(launch.state(2, 0), before.state(2, 0));
    assert!(before.oracle().iter().skip(1).all(Option::is_none));
}

#[test]
fn the_null_rule_decides_about_slot_0() {
    let mut shape = Shape::dense(1, 1, 1, GATE);
    let plan = |shape: &Shape| shape.plan(&[0], None, 0);
    assert_eq!(plan(&shape), Plan::Null);
    shape.null_rule = NullRule::Negative;
    assert_eq!(
        plan(&shape),
        Plan::Live {
            first: 0,
            source: 0,
            offset: 0,
            checkpoints: vec![Some(0)]
        }
    );
    assert_eq!(shape.plan(&[-1], None, 0), Plan::Null);
    assert_eq!(shape.plan(&[i32::MIN], None, 0), Plan::Null);
}

#[test]
fn a_null_checkpoint_is_skipped() {
    let shape = Shape::dense(1, 1, 3, GATE);
    let mut all = Launch::random(shape, 5);
    let mut skipped = all.clone();
    skipped.slots = vec![1, -1, 3];
    let before = skipped.state(2, 0).to_vec();
    assert_eq!(all.run().1, skipped.run().1);
    assert_eq!(skipped.state(2, 0), before);
    assert_eq!(skipped.state(3, 0), all.state(3, 0));
}

#[test]
fn nan_stays_in_its_request() {
    let clean = Launch::random(Shape::dense(1, 3, 1, GATE), 13);
    let mut poisoned = clean.clone();
    poisoned.projected[clean.shape.pitch + 4 * 128 + 3] = bf16::NAN;
    let exact = poisoned.oracle();
    let (mut a, mut b) = (clean, poisoned);
    let (out, poisoned_out) = (a.run().1, b.run().1);
    assert!(poisoned_out[128..256].iter().all(|x| x.is_nan()));
    assert!(exact[1].as_ref().unwrap().out.iter().all(|x| x.is_nan()));
    assert_eq!(out[..128], poisoned_out[..128]);
    assert_eq!(out[256..], poisoned_out[256..]);
    assert_eq!(a.state(1, 0), b.state(1, 0));
    assert_eq!(a.state(3, 0), b.state(3, 0));
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

#[test]
fn the_conv_weight_is_laid_out_once() {
    let dim = 128;
    let checkpoint: Vec<f32> = (0..3 * dim * 4).map(|i| i as f32).collect();
    let decode = decode_conv_weight(&checkpoint).unwrap();
    // [part][tap][channel] ← [part·d + channel][tap].
    assert_eq!(decode[0], 0.0);
    assert_eq!(decode[1], 4.0);
    assert_eq!(decode[dim], 1.0);
    assert_eq!(decode[(4 + 3) * dim + 2], ((dim + 2) * 4 + 3) as f32);
    assert_eq!(
        decode[(8 + 1) * dim + 127],
        ((2 * dim + 127) * 4 + 1) as f32
    );
    assert_eq!(
        decode_conv_weight(&[0.0; 7]),
        Err(Error::ConvWeightLength { found: 7 })
    );
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let launch = Launch::zero(Shape::dense(1, 2, 2, GATE));
    let refused = |edit: &dyn Fn(&mut Launch)| {
        let mut launch = launch.clone();
        edit(&mut launch);
        launch
            .shape
            .validate(&launch.inputs(), &launch.conv_cache, &launch.state)
            .unwrap_err()
    };
    assert_eq!(
        refused(&|l| l.shape.heads = 0),
        Error::Zero { count: "heads" }
    );
    assert_eq!(
        refused(&|l| l.shape.columns = 1),
        Error::ColumnsTooFew {
            columns: 1,
            tokens: 2
        }
    );
    assert_eq!(
        refused(&|l| l.shape.conv_len = 3),
        Error::ConvLineTooShort {
            conv_len: 3,
            needed: 4
        }
    );
    assert_eq!(
        refused(&|l| l.shape.pitch = 640),
        Error::StrideTooSmall {
            operand: "projected",
            stride: 640,
            needed: 641
        }
    );
    assert_eq!(
        refused(&|l| {
            l.slots.pop();
        }),
        Error::OperandTooShort {
            operand: "slots",
            found: 3,
            needed: 4
        }
    );
}
