//! Addressing, strides, layouts.

use std::collections::HashSet;

use half::bf16;
use kda_codegen::{Arch, KernelSpec, source};
use kda_reference::{HEAD_DIM, NullRule};
use kda_runtime::Error;
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, MATRIX, Spread};

use crate::support::*;

/// Elements between slots where 69 layers of 12 heads share a page of f32 state.
const PAGE: i64 = 69 * 12 * (MATRIX as i64);

/// Runs a case as it is and spread out: both must pass and leave the same bytes.
fn spread_out(case: &Case, spread: Spread, mode: &str) {
    let mut executor = emulator(1);
    let (_, near, _) = run(&mut executor, case, mode);
    executor.spread(spread);
    let (_, far, _) = run(&mut executor, case, mode);
    assert!(same_results(&near, &far), "{case}, mode {mode}");
}

#[test]
fn c01_slot_offsets_are_64_bit() {
    // Slot 159 lies beyond 2³¹ elements; nothing else exists, below the pool least of all.
    const { assert!(158 * PAGE < 1 << 31 && 159 * PAGE > 1 << 31) };
    let mut case = decode(12, 4);
    case.shape.null_rule = NullRule::Negative;
    case.shape.pool_slots = 4;
    case.slots = vec![2, 0, 3, 1];
    let spread = Spread {
        state_slot_stride: PAGE,
        // The same pages, in elements of two bytes.
        conv_slot_stride: 2 * PAGE,
        pool_slots: 161,
        slots: vec![0, 158, 159, 160],
        ..Spread::none(&case)
    };
    spread_out(&case, spread, SINGLE);

    let mut case = verify(1, 2, 2, 2);
    case.shape.null_rule = NullRule::Negative;
    case.shape.pool_slots = 4;
    case.slots = vec![3, 0, 1, 2];
    let spread = Spread {
        state_slot_stride: PAGE,
        conv_slot_stride: 2 * PAGE,
        pool_slots: 161,
        slots: vec![0, 158, 159, 160],
        ..Spread::none(&case)
    };
    for mode in [SINGLE, CLUSTER] {
        spread_out(&case, spread.clone(), mode);
    }
}

#[test]
fn c01_row_offsets_are_64_bit() {
    for case in [decode(1, 3), verify(1, 2, 3, 4)] {
        let spread = Spread {
            pitch: (1 << 31) + 771,
            out_stride: (1 << 32) - 127,
            slots_stride: (1 << 31) + 5,
            ..Spread::none(&case)
        };
        for mode in [SINGLE, CLUSTER] {
            spread_out(&case, spread.clone(), mode);
        }
    }
}

/// 32-bit products of values that came from the slot table or the block's request, in PTX. Their
/// 64-bit products are what addresses are made of. A request times its tokens is a row, 2²⁰ at most,
/// and may be narrow, as may a request times the heads, 2²³ at most, which numbers the pairs.
fn narrow_products(ptx: &str, heads: u32) -> Vec<String> {
    let (mut slots, mut rows) = (HashSet::new(), HashSet::new());
    let mut found = Vec::new();
    for line in ptx.lines().map(str::trim) {
        let Some((op, operands)) = line.split_once([' ', '\t']) else {
            continue;
        };
        let mut operands = operands
            .split([',', ';', ' ', '\t', '[', ']', '{', '}', '|'])
            .filter(|text| !text.is_empty());
        let Some(target) = operands.next() else {
            continue;
        };
        let sources: Vec<&str> = operands.collect();
        if op.starts_with("ld.volatile.global.b32") {
            slots.insert(target);
        }
        if sources.contains(&"%ctaid.y") {
            rows.insert(target);
        }
        let from = |set: &HashSet<&str>| sources.iter().any(|source| set.contains(source));
        let (slot, row) = (from(&slots), from(&rows));
        let narrow = ["mul.lo.s32", "mul.lo.u32", "mad.lo.s32", "shl.b32"];
        let is_narrow = narrow.iter().any(|product| op.starts_with(product));
        let small = sources.iter().any(|s| {
            s.parse()
                .is_ok_and(|factor: u32| factor <= 16 || factor == heads)
        });
        if is_narrow && (slot || row && !small) {
            found.push(line.to_string());
        }
        let passes = [
            "mov", "selp", "shfl", "redux", "max", "min", "add", "or", "cvt", "bfi",
        ];
        if is_narrow || passes.iter().any(|pass| op.starts_with(pass)) {
            if slot {
                slots.insert(target);
            }
            if row {
                rows.insert(target);
            }
        }
    }
    found
}

#[test]
fn c01_no_slot_or_row_is_multiplied_in_32_bits() {
    for &arch in &[Arch::Sm80, Arch::Sm90a, Arch::Sm100a] {
        // Of more than 12 heads the request comes out of a division, which the search does not follow.
        for (heads, tokens) in [(12, 1), (12, 3), (12, 4), (96, 1), (96, 3), (96, 4)] {
            let mut spec = KernelSpec::new(arch, heads);
            if tokens > 1 {
                spec = spec.with_verify(tokens);
            }
            let kernel = kernels().kernel(&spec).unwrap();
            let found = narrow_products(&kernel.ptx, heads as u32);
            assert_eq!(found, Vec::<String>::new());
        }
    }
    // The search finds them where they are.
    let nvrtc = kda_tests::kernels::load_nvrtc().unwrap();
    let spec = KernelSpec::new(Arch::Sm90a, 12).with_verify(4);
    for (wide, narrow) in [
        (
            "slot * geometry.source_slot_stride",
            "slot * (int)geometry.source_slot_stride",
        ),
        (
            "checkpoint * geometry.state_slot_stride",
            "checkpoint * (int)geometry.state_slot_stride",
        ),
        (
            "(first_row + t) * geometry.out_stride, round",
            "(int)(first_row + t) * (int)geometry.out_stride, round",
        ),
    ] {
        let mut source = source::render(&spec).unwrap();
        assert!(source.text.contains(wide));
        source.text = source.text.replace(wide, narrow);
        let kernel = nvrtc.compile_source(&spec, source).unwrap();
        assert_ne!(
            narrow_products(&kernel.ptx, 12),
            Vec::<String>::new(),
            "{narrow}"
        );
    }
}

/// The whole kind: slots and rows anywhere within 2⁴⁸ bytes, more often than not beyond 2³¹ elements.
#[test]
fn slots_and_rows_may_lie_anywhere() {
    let limits = Limits {
        specialisations: 6,
        max_requests: 3,
        ..Limits::small()
    };
    let mut executor = emulator(3);
    let mut far = 0;
    for seed in 0..24 {
        let case = Case::random(seed, &limits);
        let shape = &case.shape;
        let rng = &mut Rng::stream(seed, 21);
        let pool_slots = rng.between(shape.pool_slots, 1 << 26) as i32;
        // Slot 0 stays null or live as it was; the others keep their order, which is no address's.
        let mut slots: Vec<i32> = (0..shape.pool_slots.min(1) as i32).collect();
        while slots.len() < shape.pool_slots {
            let slot = rng.between(1, pool_slots as usize - 1) as i32;
            if !slots.contains(&slot) {
                slots.push(slot);
            }
        }
        let mut stride = |least: usize, unit: usize| -> i64 {
            ((least + rng.below(1 << 20)).next_multiple_of(unit)) as i64
        };
        let state_slot_stride = stride(shape.state_slot_stride, 16 / case.state_bytes());
        let conv_slot_stride = stride(shape.conv_slot_stride, 1);
        let records = shape.records.map_or(0, |records| records.slot_stride);
        let record_slot_stride = stride(records, 4);
        let row = |rng: &mut Rng, least: usize| least as i64 + (rng.word() % (1 << 36)) as i64;
        let spread = Spread {
            pitch: row(rng, shape.pitch),
            out_stride: row(rng, shape.out_stride),
            slots_stride: row(rng, shape.slots_stride),
            gate_stride: row(rng, shape.gate_stride),
            conv_slot_stride,
            state_slot_stride,
            record_slot_stride,
            pool_slots,
            slots,
        };
        let modes = executor.modes(&case);
        let mode = &modes[seed as usize % modes.len()];
        let reach = |slot: &i32| i64::from(*slot) * state_slot_stride > 1 << 31;
        far += usize::from(spread.slots.iter().any(reach));
        executor.spread(spread);
        passes(&mut executor, &case, mode);
    }
    assert!(far > 12, "only {far} of 24 cases reached far");
}

#[test]
fn c02_a_strided_pool_is_updated_in_place() {
    // Storage [8, 2, heads, 128, 128]: the pool is the second half of axis 1.
    let mut case = decode(2, 3);
    case.shape.state_slot_stride = 2 * 2 * MATRIX;
    case.shape.pool_slots = 8;
    case.slots = vec![6, 1, 3];
    for mode in [SINGLE, CLUSTER] {
        let mut executor = executor(5);
        let (before, first, _) = run(&mut executor, &case, mode);
        // Judged from what the first step left: a copy that nobody wrote back would show.
        let (second, _) = run_on(&mut executor, &case, mode, &first);
        assert_ne!(before.state, first.state);
        assert_ne!(first.state, second.state);
        for slot in 0..8 {
            let half = (2 * slot + 1) * 2 * MATRIX..(2 * slot + 2) * 2 * MATRIX;
            for i in half.filter(|i| *i < before.state.len / 4) {
                assert_eq!(before.state.f32(i).to_bits(), second.state.f32(i).to_bits());
            }
        }
    }
}

#[test]
fn c04_pools_of_different_lengths_are_refused() {
    let mut case = decode(3, 2);
    case.shape.pool_slots = 16;
    let (plan, mut step) = planned(&case);
    step.conv_cache.buffer.elements = 8 * case.shape.conv_slot_stride;
    let error = plan.step(&step, 8).unwrap_err();
    let expected = "conv_cache holds 27648 elements, 55296 needed";
    assert_eq!(error.to_string(), expected);
    let (_, mut step) = planned(&case);
    step.state.buffer.elements = 8 * case.shape.state_slot_stride;
    let error = plan.step(&step, 8).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TooShort {
                operand: "state_pool",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn c04_slots_beyond_the_pool_act_as_null() {
    let mut case = decode(1, 5);
    case.shape.pool_slots = 8;
    case.slots = vec![1, 8, i32::MAX, -1, 3];
    let mut executor = executor(7);
    for mode in executor.modes(&case) {
        let (before, after, faults) = run(&mut executor, &case, &mode);
        assert_eq!(faults.map(|f| (f.count, f.request)), Some((2, 1)));
        let last = |b: &Buffers| (b.states(&case.shape, 7), b.line(&case.shape, 7, 0, 3));
        let bits = |(states, line): (Vec<f32>, Vec<bf16>)| {
            let line = line.into_iter().map(|x| u32::from(x.to_bits()));
            let states = states.into_iter().map(f32::to_bits);
            states.chain(line).collect::<Vec<u32>>()
        };
        assert_eq!(bits(last(&before)), bits(last(&after)), "mode {mode}");
    }
}

#[test]
fn c05_a_slice_of_a_block_table_is_read_by_its_stride() {
    // A table of 9 columns: its first for decode, its first eight for verify.
    for mut packed in [decode(1, 4), verify(1, 4, 8, 8)] {
        packed.shape.pool_slots = 4 * 9 + 2;
        let mut sliced = packed.clone();
        sliced.shape.slots_stride = 9;
        for mode in [SINGLE, CLUSTER] {
            let mut executor = executor(9);
            let (_, wanted, _) = run(&mut executor, &packed, mode);
            let (_, found, _) = run(&mut executor, &sliced, mode);
            assert!(same_results(&wanted, &found), "{packed}, mode {mode}");
        }
    }
}

#[test]
fn c07_any_pitch_and_start_gives_the_same_bits() {
    for (heads, legal) in [(3, 1672), (6, 3208), (12, 6288)] {
        for requests in [1, 2] {
            let case = decode(heads, requests);
            assert_eq!(case.shape.pitch, [1667, 3206, 6284][heads / 6]);
            let mut executor = executor(11);
            let (_, wanted, _) = run(&mut executor, &case, SINGLE);
            let bits = |after: &Buffers| -> Vec<u16> {
                (0..case.shape.rows() * case.shape.dim())
                    .map(|i| after.out.bf16(i).to_bits())
                    .collect()
            };
            // Starts of 2, 4 and 8 bytes past an aligned address.
            for (pitch, skew) in [(legal, 0), (case.shape.pitch, 1), (legal, 2), (legal, 4)] {
                let mut other = case.clone();
                other.shape.pitch = pitch;
                other.skew.projected = skew;
                other.skew.out = skew;
                other.skew.conv_cache = skew;
                other.skew.integers = skew % 4;
                other.skew.floats = skew % 4;
                let mode = if skew == 4 { CLUSTER } else { SINGLE };
                let (_, found, _) = run(&mut executor, &other, mode);
                assert!(bits(&wanted) == bits(&found), "{other}, {skew}, {mode}");
                assert_eq!(wanted.state, found.state);
            }
        }
    }
}

#[test]
fn c07_what_must_be_aligned_is_named() {
    for heads in [3, 6, 12] {
        for requests in [1, 2] {
            let case = decode(heads, requests);
            let (plan, step) = planned(&case);
            for offset in [2, 4, 8] {
                for (operand, alignment) in [
                    ("qkv", 2),
                    ("conv_cache", 2),
                    ("out", 2),
                    ("slots", 4),
                    ("a_log", 4),
                    ("f_b", 16),
                    ("state_pool", 16),
                ] {
                    let mut step = step;
                    let address = match operand {
                        "qkv" => &mut step.projected.qkv.buffer.address,
                        "conv_cache" => &mut step.conv_cache.buffer.address,
                        "out" => &mut step.out.buffer.address,
                        "slots" => &mut step.slots.buffer.address,
                        "a_log" => &mut step.weights.a_log.address,
                        "f_b" => &mut step.weights.f_b.address,
                        _ => &mut step.state.buffer.address,
                    };
                    *address += offset;
                    let moved = *address;
                    match plan.step(&step, 8) {
                        Ok(_) => assert!(offset % alignment == 0, "{operand} by {offset}"),
                        Err(error) => {
                            assert!(offset % alignment != 0, "{error}");
                            let text = format!(
                                "{operand} is at {moved:#x}, which is not a multiple of \
                                 {alignment} bytes"
                            );
                            assert_eq!(error.to_string(), text);
                        }
                    }
                }
            }
        }
    }
}

/// An asymmetric state, a closed gate and a decay of 1: the output is S·q and nothing else moves.
fn asymmetric() -> Case {
    let mut case = decode(2, 1);
    let shape = case.shape;
    edit(&mut case, |data| {
        for (i, value) in data.states.iter_mut().enumerate() {
            let (v, k) = (i % MATRIX / HEAD_DIM, i % HEAD_DIM);
            *value = v as f32 + 1000.0 * k as f32 + (i / MATRIX) as f32 * 0.5;
        }
        // sigmoid(−∞) = 0 keeps the state; a gate of −10³⁰ gives exp(−5 · 0) = 1.
        let beta = shape.used_columns() - shape.heads;
        data.projected[beta..].fill(bf16::NEG_INFINITY);
        data.dt_bias.fill(-1e30);
        data.f_b.fill(bf16::ZERO);
        // An output norm and gate that a hand can undo.
        data.norm.fill(1.0);
        data.projected[3 * shape.dim()..4 * shape.dim()].fill(bf16::ZERO);
    });
    case
}

#[test]
fn c08_the_state_is_value_major() {
    let case = asymmetric();
    let mut executor = executor(13);
    for mode in executor.modes(&case) {
        // The oracle reads the same layout, hence the products by hand below.
        let (before, after, _) = run(&mut executor, &case, &mode);
        assert_eq!(before.state, after.state, "mode {mode}");
        let q = query(&case, 0);
        let product = |transposed: bool| -> Vec<f64> {
            let o: Vec<f64> = (0..HEAD_DIM)
                .map(|v| {
                    let element = |k: usize| match transposed {
                        false => v as f64 + 1000.0 * k as f64,
                        true => k as f64 + 1000.0 * v as f64,
                    };
                    (0..HEAD_DIM).map(|k| element(k) * q[k]).sum()
                })
                .collect();
            let square: f64 = o.iter().map(|x| x * x).sum::<f64>() / 128.0;
            // The closed output gate halves.
            o.iter().map(|x| 0.5 * x / (square + 1e-5).sqrt()).collect()
        };
        let (right, wrong) = (product(false), product(true));
        let mut apart = 0.0f64;
        for v in 0..HEAD_DIM {
            let found = after.out.bf16(v).to_f64();
            assert!(
                (found - right[v]).abs() < 0.01 * right[v].abs() + 1e-3,
                "{v}"
            );
            apart = apart.max((found - wrong[v]).abs());
        }
        assert!(apart > 0.1, "the two layouts give the same output");
    }
}

/// The normalised, scaled query of a head, in f64.
fn query(case: &Case, head: usize) -> Vec<f64> {
    let (shape, data) = (&case.shape, &case.data);
    let raw: Vec<f64> = (0..HEAD_DIM)
        .map(|i| {
            let channel = head * HEAD_DIM + i;
            let taps = &data.window(shape, 0)[channel * 3..][..3];
            let inputs = taps.iter().chain([&data.row(shape, 0)[channel]]);
            let sum: f64 = inputs
                .enumerate()
                .map(|(w, x)| f64::from(data.conv_weight[w * shape.dim() + channel]) * x.to_f64())
                .sum();
            sum / (1.0 + (-sum).exp())
        })
        .collect();
    let norm = (raw.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    raw.iter()
        .map(|x| x / norm * f64::from(shape.scale))
        .collect()
}

#[test]
fn c08_the_bytes_of_a_slot_are_pinned() {
    let case = asymmetric();
    let (_, after, _) = run(&mut executor(15), &case, CLUSTER);
    let slot = after.state.offset + case.slots[0] as usize * 2 * MATRIX * 4;
    let golden = include_str!("slot.txt");
    let mut lines = 0;
    for line in golden.lines().filter(|line| !line.starts_with('#')) {
        let (offset, bytes) = line.split_once(' ').expect("offset, bytes");
        let offset: usize = offset.parse().expect("an offset");
        let found: Vec<String> = after.state.bytes[slot + offset..][..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(found.concat(), bytes, "offset {offset}");
        lines += 1;
    }
    assert_eq!(lines, 8);
}
