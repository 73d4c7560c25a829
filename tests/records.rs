//! A chain of steps with records and one with checkpoints, as an engine runs them: each step starts
//! from what the one before it left, decode steps lie between, and requests move to other slots.

use std::collections::HashSet;

use half::bf16;
use kda_codegen::Arch;
use kda_reference::records::RECORD_SIZE;
use kda_reference::{CONV_WIDTH, ConvLayout, Gate, NullRule, RecordShape, Shape, StateType};
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, Regime, Region};

const HEADS: usize = 2;
const REQUESTS: usize = 3;
/// Most tokens of a step.
const MOST: usize = 4;

/// A ragged verify step of `tokens` tokens with checkpoints: values of `seed`, strides and slots that
/// are the same for every step.
fn step(seed: u64, tokens: usize, state_type: StateType) -> Case {
    let gate = Gate::LowerBound { lower_bound: -5.0 };
    let limits = Limits {
        tokens: vec![tokens],
        gates: vec![gate],
        layouts: vec![ConvLayout::TokenFirst],
        null_rules: vec![NullRule::NonPositive],
        state_types: vec![state_type],
        biases: vec![false],
        projected_gates: vec![false],
        records: vec![false],
        ragged: vec![true],
        regimes: vec![Regime::Plain],
        ..Limits::default()
    }
    .live();
    let mut case = Case::sized(seed, &limits, HEADS, REQUESTS);
    let dense = Shape::dense(HEADS, REQUESTS, tokens, gate);
    let conv_len = CONV_WIDTH - 1 + MOST - 1;
    case.shape = Shape {
        columns: MOST,
        slots_stride: MOST,
        conv_len,
        conv_slot_stride: 3 * dense.dim() * conv_len,
        pool_slots: REQUESTS * MOST + 2,
        conv_layout: ConvLayout::TokenFirst,
        state_type,
        ..dense
    };
    case.verify = true;
    case.slots = (1..=(REQUESTS * MOST) as i32).collect();
    case
}

/// The same step with records and a slot a request, the first column of its table.
fn with_records(case: &Case, slots: &[i32]) -> Case {
    let mut case = case.clone();
    for (request, &slot) in slots.iter().enumerate() {
        case.slots[request * MOST] = slot;
    }
    case.shape.records = Some(RecordShape {
        count: MOST - 1,
        slot_stride: (MOST - 1) * HEADS * RECORD_SIZE,
    });
    let data = std::sync::Arc::make_mut(&mut case.data);
    data.records = vec![f32::NAN; REQUESTS * (MOST - 1) * HEADS * RECORD_SIZE];
    case
}

/// What one of the two chains carries from step to step.
#[derive(Default)]
struct Pools(Option<(Region, Region, Option<Region>)>);

impl Pools {
    fn run(&mut self, executor: &mut dyn Executor, case: &Case, mode: &str) -> Buffers {
        let mut buffers = Buffers::new(case);
        if let Some((conv_cache, state, records)) = self.0.take() {
            (buffers.conv_cache, buffers.state) = (conv_cache, state);
            buffers.records = records;
        }
        let before = buffers.clone();
        let faults = executor.run(case, mode, &mut buffers).unwrap();
        case.check(&before, &buffers, faults.as_ref()).unwrap();
        self.0 = Some((
            buffers.conv_cache.clone(),
            buffers.state.clone(),
            buffers.records.clone(),
        ));
        buffers
    }
}

impl Pools {
    /// Moves what a request has in slot `from` to slot `to`, as an engine does, and leaves NaN.
    fn relocate(&mut self, shape: &Shape, from: i32, to: i32) {
        let (conv_cache, state, records) = self.0.as_mut().expect("a step ran");
        let element_bytes = match shape.state_type {
            StateType::F32 => 4,
            StateType::Bf16 => 2,
        };
        for (region, slot_bytes) in [
            (conv_cache, shape.conv_slot_stride * 2),
            (state, shape.state_slot_stride * element_bytes),
            (
                records.as_mut().expect("records"),
                shape.records.expect("records").slot_stride * 4,
            ),
        ] {
            let [from, to] = [from, to].map(|slot| slot as usize * slot_bytes);
            let data = region.data_mut();
            data.copy_within(from..from + slot_bytes, to);
            data[from..from + slot_bytes].fill(0xff);
        }
    }
}

#[test]
fn chains_of_steps_agree_bit_for_bit() {
    let kernels = KernelCache::new(load_nvrtc().expect("libnvrtc"));
    let mut executor = EmulatorExecutor::new(Arch::Sm90a, kernels);
    let modes = [
        "split4-128x8-cluster-hints",
        "split1-256x32-block",
        "split8-128x8-block",
    ];
    let mut seen = HashSet::new();
    for state_type in [StateType::F32, StateType::Bf16] {
        let mut rng = Rng::stream(1, 70);
        let (mut checkpoints, mut records) = (Pools::default(), Pools::default());
        let mut accepted = vec![1; REQUESTS];
        // The first columns of the table, and a slot that is free.
        let mut slots: Vec<i32> = (0..REQUESTS).map(|r| (1 + r * MOST) as i32).collect();
        let mut free = (REQUESTS * MOST + 1) as i32;
        for number in 0..10 {
            let tokens = [3, 4, 1, 2, 1][number % 5];
            let mut case = step(100 + number as u64, tokens, state_type);
            // A decode step, and ahead of it one of which a token is accepted.
            let (decode, one) = (number % 5 == 4, number % 5 == 3);
            // Every chain begins with all of them.
            let fewest = usize::from(number == 0 || decode || one);
            let counts: Vec<i32> = (0..REQUESTS)
                .map(|_| rng.between(fewest, tokens) as i32)
                .collect();
            if decode {
                assert_eq!(accepted, [1; REQUESTS]);
                (case.verify, case.accepted, case.token_counts) = (false, None, None);
            } else {
                (case.accepted, case.token_counts) = (Some(accepted.clone()), Some(counts.clone()));
            }
            let mode = modes[number % modes.len()];
            let a = checkpoints.run(&mut executor, &case, mode);
            let mut kept = with_records(&case, &slots);
            let shape = kept.shape;
            if decode {
                kept.shape.records = None;
            }
            let b = records.run(&mut executor, &kept, modes[(number + 1) % 3]);
            assert!(a.out == b.out, "step {number}");
            for request in 0..REQUESTS {
                let first = case.slots[request * MOST] as usize;
                // Positions that no step has written yet are NaN.
                let line = |buffers: &Buffers, slot: usize| -> Vec<u16> {
                    let line = buffers.line(&case.shape, slot, 0, tokens + 2);
                    line.into_iter().map(bf16::to_bits).collect()
                };
                let same = line(&a, first) == line(&b, slots[request] as usize);
                assert!(same, "step {number} request {request}");
                if counts[request] == 0 {
                    continue;
                }
                seen.insert((accepted[request], counts[request]));
                let most = if one { 1 } else { counts[request] as usize };
                accepted[request] = rng.between(1, most) as i32;
            }
            let moving = number % REQUESTS;
            records.relocate(&shape, slots[moving], free);
            std::mem::swap(&mut slots[moving], &mut free);
        }
    }
    // What is accepted and what follows both vary, among them more accepted than the next step has.
    assert!(
        seen.len() > 6 && seen.iter().any(|(a, b)| a > b),
        "{seen:?}"
    );
}
