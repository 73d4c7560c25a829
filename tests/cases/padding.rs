//! Padding rows and what graphs replay over.

use kda_reference::NullRule;
use kda_runtime::{Error, StepKind};
use kda_tests::cuda::on_device;
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, POISON_BF16};

use crate::support::*;

/// A batch whose first requests have `live` slots and whose tail is `padding`.
fn padded(mut case: Case, rule: NullRule, live: &[i32], padding: i32) -> Case {
    let (requests, columns) = (case.shape.requests, case.shape.columns);
    case.shape.null_rule = rule;
    case.slots = vec![padding; requests * columns];
    for (request, &slot) in live.iter().enumerate() {
        // Column t of a request: its own slot, then others that nobody else names.
        for column in 0..columns {
            case.slots[request * columns + column] = slot + 10 * column as i32;
        }
    }
    case.shape.pool_slots = 10 * columns;
    case
}

#[test]
fn c10_the_null_rule_says_what_slot_0_is() {
    let steps = [decode(1, 8), verify(1, 8, 3, 3)];
    for step in steps {
        for mode in [SINGLE, CLUSTER] {
            let mut executor = executor(21);
            // Slot 0 is live: it advances once, whatever the five rows of -1 do.
            let case = padded(step.clone(), NullRule::Negative, &[0, 5, 2], -1);
            let (before, after, faults) = run(&mut executor, &case, mode);
            assert_eq!(faults, None);
            assert_ne!(before.states(&case.shape, 0), after.states(&case.shape, 0));
            // Slot 0 is reserved: nobody touches it.
            let case = padded(step.clone(), NullRule::NonPositive, &[7, 5, 2], 0);
            let (before, after, faults) = run(&mut executor, &case, mode);
            assert_eq!(faults, None);
            let bits = |buffers: &Buffers| -> Vec<u32> {
                let states = buffers.states(&case.shape, 0);
                states.into_iter().map(f32::to_bits).collect()
            };
            assert_eq!(bits(&before), bits(&after));
        }
    }
}

#[test]
fn c10_each_written_slot_is_judged_by_itself() {
    // Null checkpoints of a live verify request, under both rules.
    for (rule, null) in [(NullRule::Negative, -1), (NullRule::NonPositive, 0)] {
        for missing in [
            [false, true, false],
            [false, true, true],
            [false, false, true],
        ] {
            let mut case = padded(verify(1, 2, 3, 3), rule, &[3, 6], null);
            for (column, _) in missing.iter().enumerate().filter(|(_, gone)| **gone) {
                case.slots[column] = null;
            }
            case.accepted = Some(vec![1, 3]);
            passes(&mut executor(22), &case, CLUSTER);
            // The slot that would be read is null: the request is refused.
            let column = missing.iter().position(|gone| *gone).expect("a null slot");
            case.accepted = Some(vec![column as i32 + 1, 1]);
            let (_, _, faults) = run(&mut executor(23), &case, SINGLE);
            assert_eq!(faults.map(|f| (f.count, f.request)), Some((1, 0)));
        }
    }
}

#[test]
fn c11_padding_leaves_the_reserved_slot_alone() {
    let case = padded(decode(1, 16), NullRule::NonPositive, &[4], 0);
    // Slot 0 starts as NaN, as every slot that no request names.
    let mut buffers = Buffers::new(&case);
    let reserved = buffers.state.data()[..4].to_vec();
    let mut executor = executor(24);
    for _ in 0..100 {
        let (after, faults) = run_on(&mut executor, &case, SINGLE, &buffers);
        assert_eq!(faults, None);
        for row in 0..16 {
            for column in 0..128 {
                let value = after.out.bf16(row * case.shape.out_stride + column);
                assert!(!value.is_nan());
                assert!(row == 0 || value.to_bits() == 0);
            }
        }
        buffers.state = after.state;
        buffers.conv_cache = after.conv_cache;
    }
    assert_eq!(buffers.state.data()[..4], reserved);
    assert_eq!(buffers.conv_cache.bf16(0).to_bits(), POISON_BF16);
}

#[test]
fn c13_short_metadata_is_refused_with_both_lengths() {
    for mut case in [decode(1, 112), verify(1, 112, 2, 2)] {
        case.shape.pool_slots = 300;
        let (plan, step) = planned(&case);
        plan.step(&step, 8).unwrap();
        let columns = case.shape.columns;
        let rows = case.shape.tokens;
        let pitch = case.shape.pitch;
        let dim = case.shape.dim();
        for operand in ["slots", "accepted", "out", "qkv"] {
            let mut short = step;
            let (elements, found, needed) = match operand {
                "slots" => (
                    &mut short.slots.buffer.elements,
                    100 * columns,
                    112 * columns,
                ),
                "accepted" => match &mut short.accepted {
                    Some(accepted) => (&mut accepted.elements, 100, 112),
                    None => continue,
                },
                "out" => (
                    &mut short.out.buffer.elements,
                    100 * rows * dim,
                    112 * rows * dim,
                ),
                _ => (
                    &mut short.projected.qkv.buffer.elements,
                    100 * rows * pitch,
                    (112 * rows - 1) * pitch + 3 * dim,
                ),
            };
            *elements = found;
            let error = plan.step(&short, 8).unwrap_err();
            let text = format!("{operand} holds {found} elements, {needed} needed");
            assert_eq!(error.to_string(), text);
            // Longer than needed is legal.
            let mut long = step;
            long.slots.buffer.elements += 1000;
            long.out.buffer.elements += 1000;
            if let Some(accepted) = &mut long.accepted {
                accepted.elements += 7;
            }
            plan.step(&long, 8).unwrap();
        }
    }
    // More requests than any policy has.
    let plan = kimi(1, &[StepKind::Decode]);
    let mut step = step(&decode(1, 2));
    step.kind = StepKind::Verify(1);
    assert!(matches!(
        plan.step(&step, 8),
        Err(Error::PolicyMissing {
            requests: 2,
            prepared: 0,
            ..
        })
    ));
}

#[test]
fn c13_a_bucket_may_be_larger_than_its_batch() {
    let mut case = decode(1, 112);
    for slot in &mut case.slots[100..] {
        *slot = 0;
    }
    passes(&mut executor(25), &case, SINGLE);
}

/// The whole kind: any slots and counts in padded rows, stale or absurd, in any mode.
#[test]
fn stale_and_absurd_metadata_touches_nothing() {
    let limits = Limits {
        specialisations: 6,
        max_heads: 1,
        max_requests: 4,
        odd_percent: 0,
        ..Limits::small()
    };
    let mut executor = executor(26);
    for seed in 0..24 {
        let mut case = Case::random(seed, &limits);
        let rng = &mut Rng::stream(seed, 27);
        let pool = case.shape.pool_slots as i32;
        let absurd = [
            0,
            -1,
            i32::MIN,
            pool,
            pool + 1,
            i32::MAX,
            0x7fc0_0000,
            -0x80_0000,
        ];
        // Rows of a bucket that no request uses: whatever an earlier step left there.
        let columns = case.shape.columns;
        for request in 0..case.shape.requests {
            if rng.chance(40) {
                continue;
            }
            case.slots[request * columns] = rng.pick(&[-1, i32::MIN]);
            for column in 1..columns {
                case.slots[request * columns + column] = rng.pick(&absurd);
            }
            if let Some(accepted) = &mut case.accepted {
                accepted[request] = rng.pick(&absurd);
            }
        }
        // And one live row whose first slot is absurd: refused, its neighbours untouched.
        let request = rng.below(case.shape.requests);
        case.slots[request * columns] = rng.pick(&[pool, i32::MAX, 0x7fc0_0000]);
        let modes = executor.modes(&case);
        passes(&mut executor, &case, &modes[seed as usize % modes.len()]);
    }
}

/// Two rows with one live slot break the caller's promise; the emulator says so, where a GPU would
/// give either row's result. Null slots may repeat.
#[test]
fn a_live_slot_twice_in_a_batch_is_a_race() {
    for case in [decode(1, 3), verify(1, 3, 2, 2)] {
        let columns = case.shape.columns;
        let mut twice = case.clone();
        twice.slots.copy_within(0..columns, columns);
        let mut buffers = Buffers::new(&twice);
        if !on_device() {
            let error = executor(29).run(&twice, SINGLE, &mut buffers).unwrap_err();
            assert!(error.to_string().starts_with("race on "), "{error}");
        }
        let mut nulls = case.clone();
        nulls.slots[..2 * columns].fill(0);
        passes(&mut executor(30), &nulls, SINGLE);
    }
}

/// Whatever an earlier step left in slots that are null, or about to be overwritten.
#[test]
fn nan_in_dead_slots_goes_nowhere() {
    // Every byte that no request reads starts as NaN, in every case of the harness; here infinities
    // too, in the checkpoints that a verify step is about to overwrite.
    let case = verify(1, 2, 3, 4);
    let mut before = Buffers::new(&case);
    for request in 0..2 {
        let source = case.accepted.as_ref().expect("counts")[request] as usize - 1;
        for column in (0..4).filter(|&column| column != source) {
            let slot = case.slots[request * 4 + column] as usize;
            let values = vec![f32::INFINITY; kda_tests::MATRIX];
            before.put_states(&case.shape, slot, &values);
        }
    }
    let (after, _) = run_on(&mut executor(28), &case, CLUSTER, &before);
    let rows = case.shape.rows();
    let finite = |i| after.out.bf16(i).is_finite();
    assert!((0..rows * 128).all(finite), "an output is not finite");
}
