//! Which requests are live, what they start from and what they leave alone; must not know arithmetic.

mod common;

use common::{GATE, Launch};
use half::bf16;
use kda_reference::records::RECORD_SIZE;
use kda_reference::{
    ConvLayout, Error, Fault, FaultKind, Metadata, NullRule, Plan, RecordShape, Shape, StateType,
    decode_conv_weight,
};

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
    let metadata = |slots: &'static [i32]| Metadata {
        slots,
        accepted: None,
        token_counts: None,
    };
    let plan = |shape: &Shape| shape.plan(&metadata(&[0]), 0);
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
    assert_eq!(shape.plan(&metadata(&[-1]), 0), Plan::Null);
    assert_eq!(shape.plan(&metadata(&[i32::MIN]), 0), Plan::Null);
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
            .validate(&launch.inputs(), &launch.conv_cache, &launch.state, None)
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

/// A launch of `tokens` tokens with records of `count` tokens after the first.
fn with_records(heads: usize, requests: usize, tokens: usize, count: usize) -> Shape {
    let mut shape = Shape::dense(heads, requests, tokens, GATE);
    shape.columns = 1;
    shape.slots_stride = 1;
    shape.conv_len = 3 + count;
    shape.conv_slot_stride = 3 * shape.dim() * shape.conv_len;
    shape.pool_slots = requests + 1;
    shape.records = Some(RecordShape {
        count,
        slot_stride: count * heads * RECORD_SIZE,
    });
    shape
}

#[test]
fn records_stand_for_checkpoints() {
    // Twice a step of three tokens, of which two are accepted in between.
    let mut records = Launch::random(with_records(2, 1, 3, 3), 5);
    let mut checkpoints = records.clone();
    checkpoints.records = None;
    checkpoints.slots = vec![1, 2, 3];
    let shape = &mut checkpoints.shape;
    (shape.records, shape.columns, shape.slots_stride) = (None, 3, 3);
    shape.pool_slots = 4;
    checkpoints.state.resize(4 * shape.state_slot_stride, 0.0);
    checkpoints
        .conv_cache
        .resize(4 * shape.conv_slot_stride, bf16::ZERO);
    assert_eq!(records.run().1, checkpoints.run().1);
    assert_eq!(records.state(1, 1), checkpoints.state(1, 1));
    for launch in [&mut records, &mut checkpoints] {
        launch.accepted = Some(vec![2]);
    }
    let (a, b) = (records.run().1, checkpoints.run().1);
    assert_eq!(a, b);
    assert_eq!(records.line(1, 7), checkpoints.line(1, 7));
    assert!(a.iter().any(|x| *x != 0.0));
}

#[test]
fn records_bound_what_may_be_accepted() {
    let mut launch = Launch::random(with_records(1, 4, 2, 3), 9);
    // The only slots are 0 to 4; columns past the first do not exist.
    launch.accepted = Some(vec![1, 4, 5, 0]);
    let (report, _) = launch.run();
    let fault = |request| Fault {
        request,
        kind: FaultKind::AcceptedOutOfRange,
    };
    assert_eq!(report.faults, [fault(2), fault(3)]);
    launch.shape.records = launch.shape.records.map(|r| RecordShape { count: 0, ..r });
    let refused = launch.shape.validate(
        &launch.inputs(),
        &launch.conv_cache,
        &launch.state,
        launch.records.as_deref(),
    );
    let found = Error::RecordsTooFew {
        records: 0,
        tokens: 2,
    };
    assert_eq!(refused, Err(found));
}

#[test]
fn a_ragged_request_does_as_a_step_of_its_tokens() {
    let mut launch = Launch::random(Shape::dense(1, 6, 3, GATE), 11);
    launch.token_counts = Some(vec![3, 2, 1, 0, 4, -1]);
    let before = launch.clone();
    let (report, out) = launch.run();
    let fault = |request| Fault {
        request,
        kind: FaultKind::TokensOutOfRange,
    };
    assert_eq!(report.faults, [fault(4), fault(5)]);
    for (request, tokens) in [(0, 3), (1, 2), (2, 1), (3, 0)] {
        let rows = &out[request * 3 * 128..][..3 * 128];
        assert!(
            rows[..tokens * 128]
                .iter()
                .all(|x| x.is_finite() && *x != 0.0)
        );
        // What the request does not bring keeps its bytes.
        assert!(rows[tokens * 128..].iter().all(|x| x.is_nan()));
        let slot = |token| before.slots[request * 3 + token] as usize;
        for token in 0..3 {
            let kept = launch.state(slot(token), 0) == before.state(slot(token), 0);
            assert_eq!(kept, token >= tokens, "request {request} token {token}");
        }
        let (old, new) = (before.line(slot(0), 5), launch.line(slot(0), 5));
        assert_eq!(old[tokens + 2..], new[tokens + 2..]);
        assert_eq!(old == new, tokens == 0);
        let mut alone = before.clone();
        alone.shape.tokens = tokens.max(1);
        alone.shape.requests = 1;
        alone.token_counts = None;
        alone.projected.drain(..request * 3 * alone.shape.pitch);
        alone.slots.drain(..request * 3);
        alone.accepted = Some(vec![1]);
        if tokens > 0 {
            assert_eq!(alone.run().1[..tokens * 128], rows[..tokens * 128]);
            assert_eq!(alone.state(slot(0), 0), launch.state(slot(0), 0));
        }
    }
    assert!(out[4 * 3 * 128..].iter().all(|x| x.to_bits() == 0));
}
