//! Numerics and state hygiene.

use half::bf16;
use kda_codegen::Arch;
use kda_reference::{Gate, HEAD_DIM, StateType};
use kda_runtime::{Config, Error, Plan, Policies, StepKind};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, MATRIX, ReferenceExecutor, Regime, identity};

use crate::support::*;

/// A step whose gate input is `dt_bias` alone, that writes nothing (β = 0), over a state of ones:
/// the state it leaves is the decay.
fn decays(gate: Gate, a_log: &[f32], dt_bias: impl Fn(usize) -> f32) -> Case {
    let mut case = decode(a_log.len(), 1);
    case.shape.gate = gate;
    // Gate arguments far out: what f32 may lose there is the oracle's to say.
    case.regime = Regime::SaturatedGates;
    let used = case.shape.used_columns();
    edit(&mut case, |data| {
        data.a_log.copy_from_slice(a_log);
        data.f_b.fill(bf16::ZERO);
        for (channel, bias) in data.dt_bias.iter_mut().enumerate() {
            *bias = dt_bias(channel % HEAD_DIM);
        }
        data.states.fill(1.0);
        data.projected[used - a_log.len()..].fill(bf16::NEG_INFINITY);
    });
    case
}

/// ln(1 + eˣ) in f64, in both tails.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[test]
fn c26_softplus_decays_in_both_tails() {
    let xs = [
        -104.0, -60.0, -18.0, -16.6, 0.0, 20.0, 20.001, 88.0, 89.0, 100.0, 1e4,
    ];
    let a_logs = [-10.0, 0.0, 18.0];
    let case = decays(Gate::Softplus, &a_logs, |key| xs[key % xs.len()]);
    for mode in [SINGLE, CLUSTER] {
        let (_, after, _) = run(&mut executor(80), &case, mode);
        let states = after.states(&case.shape, case.slots[0] as usize);
        for (head, a_log) in a_logs.into_iter().enumerate() {
            for (key, x) in xs.into_iter().enumerate() {
                let found = f64::from(states[head * MATRIX + key]);
                let rate = f64::from(a_log).exp() * softplus(f64::from(x));
                assert!((0.0..=1.0).contains(&found), "{x} {a_log}: {found}");
                if rate > 87.0 {
                    // e⁻⁸⁷ stands for everything below: 0 beside any state.
                    assert!(found < 1.7e-38, "{x} {a_log}: {found}");
                    continue;
                }
                // Rate: eᴬ 2 ulp, softplus 4, product ½; exponential 2 ulp; each 2⁻²³.
                let bound = (rate * 6.5 + 2.5) * 2f64.powi(-23);
                let error = (found.ln() + rate).abs();
                assert!(error <= bound, "{x} {a_log}: log decay off by {error:e}");
            }
        }
        let at = |a_log: usize, x: f32| {
            let key = xs.iter().position(|&known| known == x).expect("an input");
            states[a_log * MATRIX + key]
        };
        assert!((at(2, -18.0) - 0.367_879_44).abs() < 1e-6);
        assert!(at(1, 100.0) < 1.7e-38);
    }
}

#[test]
fn c28_the_two_gates_differ() {
    let mut found = Vec::new();
    for gate in [LOWER_BOUND, Gate::Softplus] {
        let case = decays(gate, &[0.7], |_| 0.3);
        let (_, after, _) = run(&mut executor(81), &case, CLUSTER);
        let decay = f64::from(after.states(&case.shape, case.slots[0] as usize)[0]);
        let rate = 0.7f32 as f64;
        let (a, x) = (rate.exp(), f64::from(0.3f32));
        let wanted = match gate {
            Gate::Softplus => (-a * softplus(x)).exp(),
            Gate::LowerBound { .. } => (-5.0 / (1.0 + (-a * x).exp())).exp(),
        };
        assert!((decay - wanted).abs() < 2e-6 * wanted, "{decay} {wanted}");
        found.push(decay);
    }
    assert!((found[0] - found[1]).abs() > 0.1 * found[0].max(found[1]));
}

#[test]
fn c28_gates_without_their_parameter_are_refused() {
    for bound in [0.0, 1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut config = Config::kimi_k3(1);
        config.gate = kda_runtime::Gate::LowerBound(bound);
        let policies = Policies::single(&[StepKind::Decode], SINGLE.parse().unwrap());
        let error = Plan::new(Arch::Sm90a, &config, &policies).unwrap_err();
        assert!(
            matches!(
                error,
                Error::IllegalSetting {
                    setting: "lower bound",
                    ..
                }
            ),
            "{error}"
        );
    }
    // A bound cannot be given to softplus: its variant has no place for one. A_log is never absent.
    for gate in [LOWER_BOUND, Gate::Softplus] {
        let mut case = decode(1, 1);
        case.shape.gate = gate;
        let (plan, mut step) = planned(&case);
        step.weights.a_log.address = 0;
        let error = plan.step(&step, 8).unwrap_err();
        assert_eq!(error.to_string(), "a_log has address 0");
    }
}

#[test]
fn c29_beta_is_not_narrowed() {
    // From an empty state one token leaves β v kᵀ: linear in β, for each head its own.
    let mut case = decode(2, 1);
    let used = case.shape.used_columns();
    let dim = case.shape.dim();
    edit(&mut case, |data| {
        data.states.fill(0.0);
        // Head 1 sees what head 0 sees, with β = 1.
        for part in 0..3 {
            let start = part * dim;
            data.projected
                .copy_within(start..start + HEAD_DIM, start + HEAD_DIM);
            let (from, to) = (start * 3, (start + HEAD_DIM) * 3);
            data.windows.copy_within(from..from + HEAD_DIM * 3, to);
            for tap in 0..4 {
                let row = (part * 4 + tap) * dim;
                data.conv_weight
                    .copy_within(row..row + HEAD_DIM, row + HEAD_DIM);
            }
        }
        data.projected[used - 2] = bf16::from_f32(0.5);
        data.projected[used - 1] = bf16::INFINITY;
    });
    for mode in [SINGLE, CLUSTER] {
        let before = Buffers::new(&case);
        let mut after = before.clone();
        executor(82).run(&case, mode, &mut after).unwrap();
        let states = after.states(&case.shape, case.slots[0] as usize);
        let (mut dot, mut square) = (0.0, 0.0);
        for i in 0..MATRIX {
            let (half, whole) = (f64::from(states[i]), f64::from(states[MATRIX + i]));
            dot += half * whole;
            square += whole * whole;
        }
        let beta = dot / square;
        // bf16 would make it 0.62109375.
        assert!((beta - 0.622_459_331).abs() < 3e-7, "{beta}");
    }
}

/// dt_bias whose decay under a lower bound of −5 is about 0.99992.
fn weak_decay() -> (f32, f64) {
    let bias = (1.6e-5f32 / (1.0 - 1.6e-5)).ln();
    (bias, (-5.0 / (1.0 + (-f64::from(bias)).exp())).exp())
}

#[test]
fn c29_a_weak_decay_keeps_its_digits() {
    let (bias, decay) = weak_decay();
    // 4,096 steps of one token, by the reference.
    let case = decays(LOWER_BOUND, &[0.0], |_| bias);
    let mut buffers = Buffers::new(&case);
    let mut once = 0.0;
    for step in 0..4096 {
        ReferenceExecutor
            .run(&case, "scalar", &mut buffers)
            .unwrap();
        if step == 0 {
            once = f64::from(buffers.states(&case.shape, case.slots[0] as usize)[0]);
        }
    }
    let slot = case.slots[0] as usize;
    let found = f64::from(buffers.states(&case.shape, slot)[MATRIX / 2]);
    // The decay itself is one f32 number, within an ulp; its powers keep their digits.
    assert!((once - decay).abs() < 6e-8, "{once} {decay}");
    assert!(once > 0.9999 && once < 1.0, "bf16 would make it 1");
    let wanted = once.powi(4096);
    assert!((found - wanted).abs() < 1e-5 * wanted, "{found} {wanted}");

    // A part of them in the emulator: eight verify steps of 16 tokens, all accepted.
    let mut long = verify(1, 1, 16, 16);
    long.regime = Regime::SaturatedGates;
    let used = long.shape.used_columns();
    edit(&mut long, |data| {
        data.a_log.fill(0.0);
        data.f_b.fill(bf16::ZERO);
        data.dt_bias.fill(bias);
        data.states.fill(1.0);
        for row in 0..16 {
            data.projected[(row + 1) * used - 1] = bf16::NEG_INFINITY;
        }
    });
    let mut buffers = Buffers::new(&long);
    for _ in 0..8 {
        (buffers, _) = run_on(&mut executor(83), &long, CLUSTER, &buffers);
        long.accepted = Some(vec![16]);
        buffers.put_slots(&long);
    }
    let last = long.slots[15] as usize;
    let found = f64::from(buffers.states(&long.shape, last)[MATRIX / 2]);
    let wanted = once.powi(128);
    assert!((found - wanted).abs() < 1e-5 * wanted, "{found} {wanted}");
}

#[test]
fn c29_a_bf16_state_is_rounded_once_a_step() {
    // Each step rounds by at most half an ulp, 2⁻⁹ of the value; the drift is no more than their sum.
    let mut case = decays(LOWER_BOUND, &[0.0], |key| -9.0 + key as f32 * 0.03);
    case.shape.state_type = StateType::Bf16;
    let steps = 24;
    let mut buffers = Buffers::new(&case);
    let mut exact = vec![1.0f64; HEAD_DIM];
    for _ in 0..steps {
        (buffers, _) = run_on(&mut executor(84), &case, SINGLE, &buffers);
        for (key, exact) in exact.iter_mut().enumerate() {
            let bias = f64::from(-9.0 + key as f32 * 0.03);
            *exact *= (-5.0 / (1.0 + (-bias).exp())).exp();
        }
    }
    let states = buffers.states(&case.shape, case.slots[0] as usize);
    let mut worst = 0.0f64;
    for (key, exact) in exact.into_iter().enumerate() {
        worst = worst.max((f64::from(states[key]) - exact).abs() / exact);
    }
    let bound = (1.0 + 2f64.powi(-9)).powi(steps) - 1.0;
    assert!(worst <= bound, "{worst} {bound}");
    assert!(
        worst > 1e-4,
        "a bf16 state drifts, this one does not: {worst}"
    );
}

#[test]
fn c31_a_poisoned_slot_stays_confined() {
    // The slot of request 1 holds NaN, then a stranger's state; its neighbours do not notice.
    let case = decode(1, 3);
    let mut stranger = case.clone();
    let mut poisoned = case.clone();
    edit(&mut poisoned, |data| {
        data.states[MATRIX..2 * MATRIX].fill(f32::NAN);
        data.windows[3 * 128 * 3..2 * 3 * 128 * 3].fill(bf16::NAN);
    });
    edit(&mut stranger, |data| {
        data.states[MATRIX..2 * MATRIX].fill(77.0)
    });
    for mode in [SINGLE, CLUSTER] {
        let (_, wanted, _) = run(&mut executor(85), &case, mode);
        for other in [&poisoned, &stranger] {
            let mut after = Buffers::new(other);
            executor(86).run(other, mode, &mut after).unwrap();
            for request in [0, 2] {
                for column in 0..128 {
                    let element = request * 128 + column;
                    assert_eq!(wanted.out.bf16(element), after.out.bf16(element));
                }
                let slot = case.slots[request] as usize;
                assert_eq!(
                    wanted.states(&case.shape, slot),
                    after.states(&case.shape, slot)
                );
                let line = |b: &Buffers| b.line(&case.shape, slot, 0, 3);
                assert_eq!(line(&wanted), line(&after));
            }
            // The request itself starts from whatever the slot held: nobody clears it unasked.
            assert_ne!(wanted.out.bf16(128), after.out.bf16(128));
        }
    }
}

/// The whole kind: a NaN or an infinity anywhere in one request's inputs, window or state, or in
/// all of them, reaches no byte of another's.
#[test]
fn nan_and_inf_stay_in_their_request() {
    let limits = Limits {
        specialisations: 8,
        max_requests: 3,
        ..Limits::small()
    };
    let mut executor = executor(87);
    let mut compared = 0;
    for seed in 0..30 {
        let case = Case::random(seed, &limits);
        let shape = case.shape;
        let rng = &mut Rng::stream(seed, 88);
        let victim = rng.below(shape.requests);
        let poison = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let mut poisoned = case.clone();
        edit(&mut poisoned, |data| {
            let width = shape.tokens * shape.used_columns();
            let rows = &mut data.projected[victim * width..][..width];
            let parts = rng.between(1, 7);
            // One view of every token, or all of them, whole.
            let (dim, used) = (shape.dim(), shape.used_columns());
            let views = [
                0..used,
                0..3 * dim,
                3 * dim..4 * dim,
                4 * dim..4 * dim + HEAD_DIM,
                4 * dim + HEAD_DIM..used,
            ];
            if parts & 1 != 0 {
                for row in rows.chunks_exact_mut(used) {
                    row[views[seed as usize % views.len()].clone()].fill(bf16::from_f32(poison));
                }
            }
            if parts & 2 != 0 {
                let width = 9 * shape.dim();
                data.windows[victim * width..][..width].fill(bf16::from_f32(poison));
            }
            if parts & 4 != 0 {
                let width = shape.heads * MATRIX;
                data.states[victim * width..][..width].fill(poison);
            }
        });
        let modes = executor.modes(&case);
        let mode = &modes[seed as usize % modes.len()];
        let (mut wanted, mut found) = (Buffers::new(&case), Buffers::new(&poisoned));
        executor.run(&case, mode, &mut wanted).unwrap();
        executor.run(&poisoned, mode, &mut found).unwrap();
        // Every byte but the victim's rows, slots and line.
        for buffers in [&mut wanted, &mut found] {
            for row in victim * shape.tokens..(victim + 1) * shape.tokens {
                for column in 0..shape.dim() {
                    buffers
                        .out
                        .set_bf16(row * shape.out_stride + column, bf16::ZERO);
                }
            }
            let own = &case.slots[victim * shape.columns..][..shape.columns];
            for &slot in own
                .iter()
                .filter(|&&s| (0..shape.pool_slots as i32).contains(&s))
            {
                buffers.put_states(&shape, slot as usize, &vec![0.0; shape.heads * MATRIX]);
                for channel in 0..3 * shape.dim() {
                    for position in 0..shape.conv_len {
                        let index = shape.conv_index(slot as usize, channel, position);
                        buffers.conv_cache.set_bf16(index, bf16::ZERO);
                    }
                }
            }
        }
        assert!(same_results(&wanted, &found), "{case}, mode {mode}");
        compared += shape.requests - 1;
    }
    assert!(compared > 10, "{compared}");
}

#[test]
fn c32_a_row_is_the_same_in_any_batch() {
    let whole = decode(1, 128);
    let mut executor = executor(89);
    let row = |case: &Case, mode: &str, executor: &mut dyn Executor, request: usize| {
        let (_, after, _) = run(executor, case, mode);
        let out: Vec<u16> = (0..128)
            .map(|i| after.out.bf16(request * 128 + i).to_bits())
            .collect();
        let states = after.states(&case.shape, case.slots[request] as usize);
        let bits: Vec<u32> = states.into_iter().map(f32::to_bits).collect();
        (out, bits)
    };
    let mut wanted = None;
    for (requests, positions, mode) in [
        (1, vec![0], SINGLE),
        (2, vec![0, 1], CLUSTER),
        (16, vec![0, 7, 15], SINGLE),
        (64, vec![63], "split2-128x8-block-hints"),
        (128, vec![31], SINGLE),
    ] {
        for position in positions {
            // Request 5 of the whole batch, among others each time.
            let mut order: Vec<usize> = (0..128).rev().collect();
            order.swap(position, 122);
            assert_eq!(order[position], 5);
            order.truncate(requests);
            let case = whole.select(&order);
            let found = row(&case, mode, &mut executor, position);
            let wanted = wanted.get_or_insert_with(|| found.clone());
            assert!(*wanted == found, "{requests} requests, position {position}");
        }
    }
    // Any order, any slots, any mode, for random problems.
    for seed in 0..3 {
        let limits = Limits {
            specialisations: 3,
            ..Limits::small()
        };
        let case = Case::random(seed, &limits);
        identity::batch(&mut executor, &case).unwrap();
        let modes = executor.modes(&case);
        identity::agree(&mut executor, &case, &modes).unwrap();
    }
}

/// The modes of random cases are some of the legal ones; a caller may name any. On a device,
/// `xtask tune` compares them all, and `xtask validate --identity` some of them for each case.
#[test]
fn c32_every_legal_mode_gives_the_same_bits() {
    let mut executor = executor(91);
    for case in [decode(1, 1), verify(1, 1, 2, 2)] {
        let first = executor.modes(&case).swap_remove(0);
        passes(&mut executor, &case, &first);
        let mut modes = executor.legal_modes(&case);
        assert!(modes.len() > 100);
        // Hints and early reads are the same text in verify steps of every shape of block.
        modes.retain(|mode| !case.verify || mode.ends_with("block") || mode.ends_with("cluster"));
        identity::agree(&mut executor, &case, &modes).unwrap();
    }
}

#[test]
fn c32_compiling_again_gives_the_same_kernel() {
    let nvrtc = kda_tests::kernels::load_nvrtc().unwrap();
    for mode in [SINGLE, CLUSTER] {
        let spec = kda_codegen::KernelSpec::new(Arch::Sm90a, 3).with_mode(mode.parse().unwrap());
        let (first, second) = (nvrtc.compile(&spec).unwrap(), nvrtc.compile(&spec).unwrap());
        assert!(first.cubin == second.cubin && first.ptx == second.ptx);
    }
}

#[test]
fn c26_softplus_takes_any_bias_over_plain_projections() {
    let biases = [-1e30, -3e9, -104.0, 20.0, 3e9, 1e30];
    let mut case = decode(1, 2);
    case.shape.gate = Gate::Softplus;
    case.regime = Regime::SaturatedGates;
    edit(&mut case, |data| {
        for (key, bias) in data.dt_bias.iter_mut().enumerate() {
            *bias = biases[key % biases.len()];
        }
    });
    for mode in [SINGLE, CLUSTER] {
        passes(&mut executor(92), &case, mode);
    }
}

/// The whole kind: finite inputs over wide ranges, zeros and denormals included, give finite
/// outputs and states, and decays in [0, 1].
#[test]
fn finite_inputs_give_finite_results() {
    let limits = Limits {
        specialisations: 8,
        regimes: vec![
            Regime::Extremes,
            Regime::SaturatedGates,
            Regime::ZeroProjections,
            Regime::Tiny,
        ],
        // Every row and every checkpoint is looked at.
        records: vec![false],
        ragged: vec![false],
        ..Limits::small()
    }
    .live();
    let mut executor = executor(90);
    for seed in 0..16 {
        let mut case = Case::random(seed, &limits);
        let shape = case.shape;
        edit(&mut case, |data| {
            let rng = &mut Rng::stream(seed, 91);
            // Whole heads of q or k at zero or denormal.
            let part = rng.below(2) * shape.dim();
            let value = rng.pick(&[bf16::ZERO, bf16::from_bits(1), bf16::from_bits(0x8001)]);
            data.projected[part..part + HEAD_DIM].fill(value);
            data.a_log
                .fill(rng.pick(&[-1e30, -20.0, 0.0, 20.0, 88.0, 1e30]));
            data.dt_bias[..64].fill(rng.pick(&[
                f32::MIN,
                -1e30,
                -104.0,
                -17.0,
                20.0,
                88.0,
                1e30,
                f32::MAX,
            ]));
            // As large as g stays finite: its products and sums are f32.
            let f_a = (0..shape.rows()).flat_map(|row| {
                let start = row * shape.used_columns() + 4 * shape.dim();
                &data.projected[start..start + HEAD_DIM]
            });
            let largest = f_a.map(|x| x.to_f32().abs()).fold(0.0, f32::max);
            if rng.chance(50) {
                let power = if largest < 1024.0 { 100 } else { 50 };
                data.f_b.fill(bf16::from_f32(2f32.powi(power)));
            }
        });
        case.regime = Regime::Extremes;
        let modes = executor.modes(&case);
        let mode = &modes[seed as usize % modes.len()];
        let (_, after, _) = run(&mut executor, &case, mode);
        for row in 0..shape.rows() {
            for column in 0..shape.dim() {
                assert!(after.out.bf16(row * shape.out_stride + column).is_finite());
            }
        }
        for request in 0..shape.requests {
            let own = &case.slots[request * shape.columns..][..shape.tokens];
            for &slot in own {
                let states = after.states(&shape, slot as usize);
                assert!(states.iter().all(|s| s.is_finite()), "{case}");
            }
        }
    }
}
