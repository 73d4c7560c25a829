//! Speculative verify and conv windows.

use half::bf16;
use kda_codegen::Arch;
use kda_reference::Plan as RequestPlan;
use kda_runtime::{Error, StepKind};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, MATRIX, identity};

use crate::support::*;

/// Bytes of a request's checkpoints and line.
fn kept(case: &Case, buffers: &Buffers, request: usize) -> (Vec<u32>, Vec<u16>) {
    let (shape, columns) = (&case.shape, case.shape.columns);
    let slots = &case.slots[request * columns..][..columns];
    let states = slots
        .iter()
        .flat_map(|&slot| buffers.states(shape, slot as usize));
    let line = buffers.line(shape, slots[0] as usize, 0, shape.conv_len);
    (
        states.map(f32::to_bits).collect(),
        line.into_iter().map(bf16::to_bits).collect(),
    )
}

#[test]
fn c16_counts_out_of_range_read_no_other_row() {
    let mut case = verify(1, 3, 4, 4);
    // Room after each row: a valid live slot lies there, and before the first row.
    case.shape.slots_stride = 6;
    for counts in [[0, 1, 4], [5, 4, 1], [-1, 2, 4], [i32::MAX, 1, 1]] {
        case.accepted = Some(counts.to_vec());
        for mode in [SINGLE, CLUSTER] {
            let (before, after, faults) = run(&mut executor(31), &case, mode);
            assert_eq!(faults.map(|f| (f.count, f.request)), Some((1, 0)));
            assert_eq!(kept(&case, &before, 0), kept(&case, &after, 0));
            assert!(before.slots.i32(4) > 0 && before.slots.i32(5) > 0);
        }
    }
}

#[test]
fn c17_a_bad_count_makes_the_row_null() {
    let mut case = verify(1, 3, 4, 4);
    case.accepted = Some(vec![2, 1, 4]);
    let mut executor = executor(32);
    // Row 1 has a state and a window; only its count is bad.
    let mut buffers = Buffers::new(&case);
    case.accepted = Some(vec![2, 0, 4]);
    buffers.put_slots(&case);
    let first = kept(&case, &buffers, 1);
    for repeat in 0..50 {
        // The emulator for some, the reference for all: the refused row drifts in neither.
        let (after, faults) = match repeat % 10 {
            0 => run_on(&mut executor, &case, CLUSTER, &buffers),
            _ => run_on(&mut kda_tests::ReferenceExecutor, &case, "scalar", &buffers),
        };
        assert_eq!(faults.map(|f| (f.count, f.request)), Some((1, 1)));
        assert_eq!(kept(&case, &after, 1), first);
        buffers.state = after.state;
        buffers.conv_cache = after.conv_cache;
    }
    // A decode step after them gives row 1 what it gives without them.
    let step = case.decode_step(0, case.data.windows.clone(), case.data.states.clone());
    let (_, wanted, _) = run(&mut executor, &step, SINGLE);
    let mut before = Buffers::new(&step);
    before.state = buffers.state;
    before.conv_cache = buffers.conv_cache;
    let (found, _) = run_on(&mut executor, &step, SINGLE, &before);
    for column in 0..128 {
        let element = step.shape.out_stride + column;
        assert_eq!(wanted.out.bf16(element), found.out.bf16(element));
    }
    let slot = step.slots[1] as usize;
    assert_eq!(
        wanted.states(&step.shape, slot),
        found.states(&step.shape, slot)
    );
}

/// The first three taps of a request's line.
fn buffers_window(case: &Case, buffers: &Buffers, request: usize) -> Vec<bf16> {
    let slot = case.slots[request * case.shape.columns] as usize;
    buffers.line(&case.shape, slot, 0, 3)
}

#[test]
fn c19_every_token_count_and_every_accepted_count() {
    let mut executor = executor(33);
    for tokens in 1..=8 {
        for requests in [1, 3] {
            let mut case = verify(1, requests, tokens, tokens);
            let uniform = 1 + (tokens - 1) * requests % tokens.max(1);
            case.accepted = Some(vec![uniform as i32; requests]);
            let mode = if tokens % 2 == 0 { CLUSTER } else { SINGLE };
            passes(&mut executor, &case, mode);
        }
        // Mixed: the counts of `verify` are 1, 2, … in turn, so this has every value.
        let requests = if tokens == 8 { 16 } else { tokens };
        passes(&mut executor, &verify(1, requests, tokens, tokens), SINGLE);
    }
}

#[test]
fn c19_a_token_count_that_was_not_prepared_is_an_error() {
    let plan = kimi(
        1,
        &[StepKind::Decode, StepKind::Verify(3), StepKind::Verify(8)],
    );
    for tokens in 1..=16 {
        let found = plan.step(&step(&verify(1, 2, tokens, tokens)), 8);
        match tokens {
            3 | 8 => assert!(found.is_ok()),
            _ => assert_eq!(
                found.unwrap_err().to_string(),
                format!("no verify {tokens} kernel is prepared, 2 requests asked for one")
            ),
        }
    }
}

#[test]
fn c20_a_line_needs_room_for_the_drafts() {
    let case = verify(1, 2, 4, 4);
    let (plan, mut short) = planned(&case);
    short.conv_cache.length = 3;
    let error = plan.step(&short, 8).unwrap_err();
    assert!(matches!(
        error,
        Error::ConvLineTooShort {
            found: 3,
            needed: 6
        }
    ));
    assert_eq!(
        error.to_string(),
        "conv_cache has 3 positions a line, 6 needed"
    );
    for length in [6, 8] {
        let mut case = case.clone();
        lengthen(&mut case, length);
        passes(&mut executor(34), &case, SINGLE);
        passes(&mut executor(35), &case, CLUSTER);
    }
}

/// Blocks of a cluster share a head: the window moves once, whatever runs when.
#[test]
fn c22_a_shared_window_moves_once() {
    for seed in 0..4 {
        let mut case = decode(1, 2);
        edit(&mut case, |data| {
            let mut rng = Rng::new(seed);
            let inputs = data.projected.iter_mut().chain(&mut data.windows);
            inputs.for_each(|x| *x = bf16::from_f32(rng.normal()));
        });
        let mut buffers = Buffers::new(&case);
        let mut executor = executor(40 + seed);
        let modes = ["split2-128x8-block-hints", CLUSTER, "split8-128x8-block"];
        for step in 0..8 {
            let mode = modes[step % modes.len()];
            let before = buffers.clone();
            (buffers, _) = run_on(&mut executor, &case, mode, &buffers);
            for request in 0..2 {
                let moved = buffers_window(&case, &buffers, request);
                let was = buffers_window(&case, &before, request);
                for (new, old) in moved.chunks_exact(3).zip(was.chunks_exact(3)) {
                    assert_eq!(new[..2], old[1..]);
                }
            }
        }
    }
}

#[test]
fn c22_any_schedule_gives_the_same_bits() {
    let case = decode(1, 2);
    let verify = verify(1, 1, 2, 3);
    for (case, mode, schedules) in [
        (&case, "split2-128x8-block-hints", 60),
        (&case, "split8-128x8-cluster-hints", 40),
        (&verify, CLUSTER, 20),
    ] {
        let before = Buffers::new(case);
        let mut wanted: Option<Buffers> = None;
        for seed in 0..schedules {
            let mut after = before.clone();
            // A seed delays warps, blocks and arrivals as no timer could; races are errors.
            let mut executor = executor(seed * 7919);
            executor.run(case, mode, &mut after).unwrap();
            let wanted = wanted.get_or_insert_with(|| after.clone());
            assert!(same_results(wanted, &after), "schedule {seed}, mode {mode}");
        }
        case.check(&before, &wanted.unwrap(), None).unwrap();
    }
}

#[test]
fn c23_few_tokens_keep_the_old_taps() {
    for tokens in [1, 2] {
        // Histories of three distinct taps, and those that a prompt of one or two tokens leaves.
        for prompt in [3, 2, 1, 0] {
            let mut case = verify(1, 2, tokens, 2);
            case.accepted = Some(vec![1, 1]);
            edit(&mut case, |data| {
                for (i, tap) in data.windows.iter_mut().enumerate() {
                    let position = i % 3;
                    *tap = if position < 3 - prompt {
                        bf16::ZERO
                    } else {
                        bf16::from_f32(1.0 + position as f32 + (i / 3) as f32 * 0.125)
                    };
                }
            });
            for mode in [SINGLE, CLUSTER] {
                let (_, after, _) = run(&mut executor(50), &case, mode);
                for request in 0..2 {
                    let slot = case.slots[request * 2] as usize;
                    let line = after.line(&case.shape, slot, 0, tokens + 2);
                    let old = case.data.window(&case.shape, request);
                    for channel in 0..3 * 128 {
                        let new = &line[channel * (tokens + 2)..][..tokens + 2];
                        assert_eq!(new[..2], old[channel * 3 + 1..][..2]);
                        for token in 0..tokens {
                            let row = request * tokens + token;
                            assert_eq!(new[2 + token], case.data.row(&case.shape, row)[channel]);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn c25_a_verify_step_is_its_decode_steps() {
    let mut executor = executor(60);
    for case in [verify(1, 2, 4, 4), verify(1, 2, 2, 5)] {
        identity::verify_and_decode(&mut executor, &case).unwrap();
    }
}

#[test]
fn c25_rejected_drafts_and_neighbours_change_nothing() {
    // Of four tokens two are accepted next: whatever the last two held, the first two's rows,
    // checkpoints and taps are the same bits; so is the other request's everything.
    let case = verify(1, 2, 4, 4);
    let mut other = case.clone();
    let columns = case.shape.used_columns();
    edit(&mut other, |data| {
        let mut rng = Rng::new(61);
        let rejected = &mut data.projected[2 * columns..4 * columns];
        rejected
            .iter_mut()
            .for_each(|x| *x = bf16::from_f32(3.0 * rng.normal()));
    });
    for mode in [SINGLE, CLUSTER] {
        let (_, a, _) = run(&mut executor(62), &case, mode);
        let (_, b, _) = run(&mut executor(63), &other, mode);
        let bits = |buffers: &Buffers, rows: std::ops::Range<usize>| -> Vec<u16> {
            (rows.start * 128..rows.end * 128)
                .map(|i| buffers.out.bf16(i).to_bits())
                .collect()
        };
        assert_eq!(bits(&a, 0..2), bits(&b, 0..2));
        assert_ne!(bits(&a, 2..4), bits(&b, 2..4));
        assert_eq!(bits(&a, 4..8), bits(&b, 4..8));
        for token in 0..2 {
            let slot = case.slots[token] as usize;
            assert_eq!(a.states(&case.shape, slot), b.states(&case.shape, slot));
        }
        assert_eq!(kept(&case, &a, 1), kept(&case, &b, 1));
        let slot = case.slots[0] as usize;
        let taps = |buffers: &Buffers| buffers.line(&case.shape, slot, 0, 4);
        assert_eq!(taps(&a), taps(&b));
    }
}

#[test]
fn c25_slots_and_history_change_nothing() {
    let mut executor = executor(64);
    for case in [decode(1, 3), verify(1, 2, 3, 4)] {
        identity::batch(&mut executor, &case).unwrap();
        identity::repeat(&mut executor, &case).unwrap();
        // History: the same step after others of other requests, in the same pools.
        let (_, wanted, _) = run(&mut executor, &case, CLUSTER);
        let mut stranger = case.reslot(&mut Rng::new(65));
        edit(&mut stranger, |data| data.projected.reverse());
        let (_, mut used, _) = run(&mut executor, &stranger, CLUSTER);
        let fresh = Buffers::new(&case);
        for request in 0..case.shape.requests {
            let RequestPlan::Live { first, source, .. } = case.plan(request) else {
                panic!("a live request");
            };
            used.put_states(&case.shape, source, &fresh.states(&case.shape, source));
            for channel in 0..3 * 128 {
                for position in 0..case.shape.conv_len {
                    let index = case.shape.conv_index(first, channel, position);
                    used.conv_cache
                        .set_bf16(index, fresh.conv_cache.bf16(index));
                }
            }
        }
        used.projected = fresh.projected.clone();
        used.slots = fresh.slots.clone();
        used.accepted = fresh.accepted.clone();
        let (found, _) = run_on(&mut executor, &case, CLUSTER, &used);
        assert_eq!(wanted.out, found.out);
        for request in 0..case.shape.requests {
            if let RequestPlan::Live { checkpoints, .. } = case.plan(request) {
                for slot in checkpoints.into_iter().flatten() {
                    let states = |b: &Buffers| b.states(&case.shape, slot);
                    assert_eq!(states(&wanted), states(&found));
                }
            }
        }
    }
}

/// The whole kind: a request served by steps of any lengths, each accepting any count of the one
/// before, ends up as if its accepted tokens had come one by one.
#[test]
fn windows_follow_mixed_lengths_and_counts() {
    let columns = 5;
    let mut executor = executor(66);
    for seed in 0..3u64 {
        let rng = &mut Rng::stream(seed, 67);
        // One request: (window, state) after its accepted tokens, by decode steps of the reference.
        let mut case = verify(1, 1, 1, columns);
        let mut buffers = Buffers::new(&case);
        let start = (case.data.windows.clone(), case.data.states.clone());
        case.accepted = Some(vec![1]);
        // `verify` starts from count 1, so the first step's window lies at offset 0.
        let (mut windows, mut states) = start;
        for _ in 0..5 {
            let tokens = rng.between(1, columns);
            let mut step = verify(1, 1, tokens, columns);
            step.slots = case.slots.clone();
            step.shape.pool_slots = case.shape.pool_slots;
            step.accepted = case.accepted.clone();
            edit(&mut step, |data| {
                let inputs = data.projected.iter_mut();
                inputs.for_each(|x| *x = bf16::from_f32(rng.normal()));
                data.windows = windows.clone();
                data.states = states.clone();
            });
            // The step's inputs over the pools as the steps before left them.
            let mut before = Buffers::new(&step);
            before.state = buffers.state.clone();
            before.conv_cache = buffers.conv_cache.clone();
            let modes = executor.modes(&step);
            let mode = &modes[rng.below(modes.len())];
            let (after, _) = run_on(&mut executor, &step, mode, &before);
            // Some of its tokens are accepted: so many decode steps.
            let accepted = rng.between(1, tokens);
            for token in 0..accepted {
                let decode = step.decode_step(token, windows, states);
                let (_, single, _) = run(&mut executor, &decode, SINGLE);
                let slot = decode.slots[0] as usize;
                windows = single.line(&decode.shape, slot, 0, 3);
                states = single.states(&decode.shape, slot);
            }
            let slot = step.slots[accepted - 1] as usize;
            assert!(
                after.states(&step.shape, slot) == states,
                "{step}, mode {mode}"
            );
            let line = after.line(
                &step.shape,
                step.slots[0] as usize,
                accepted - 1,
                accepted + 2,
            );
            assert!(line == windows, "{step}, mode {mode}");
            case.accepted = Some(vec![accepted as i32]);
            buffers = after;
        }
        assert_eq!(states.len(), MATRIX);
    }
}

/// The whole kind: T shorter than the conv width, any history, in modes of the
/// other architectures that are emulated.
#[test]
fn short_steps_on_other_architectures() {
    let limits = Limits {
        tokens: vec![1, 2],
        specialisations: 4,
        max_heads: 1,
        max_requests: 2,
        ..Limits::small()
    };
    for (i, arch) in [Arch::Sm80, Arch::Sm100a].into_iter().enumerate() {
        let mut executor = kda_tests::emulate::EmulatorExecutor::new(arch, kernels());
        let case = Case::random(71 + i as u64, &limits);
        for mode in executor.modes(&case).iter().step_by(2) {
            passes(&mut executor, &case, mode);
        }
    }
}
