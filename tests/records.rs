//! A chain of steps with records and one with checkpoints, as an engine runs them: each step starts
//! from what the one before it left.

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

/// The same step with records; its table is the other's, of which it reads the first column.
fn with_records(case: &Case) -> Case {
    let mut case = case.clone();
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
        for number in 0..8 {
            let tokens = [3, 4, 1, 2][number % 4];
            let mut case = step(100 + number as u64, tokens, state_type);
            // Every chain begins with all of them.
            let fewest = usize::from(number == 0);
            let counts: Vec<i32> = (0..REQUESTS)
                .map(|_| rng.between(fewest, tokens) as i32)
                .collect();
            (case.accepted, case.token_counts) = (Some(accepted.clone()), Some(counts.clone()));
            let mode = modes[number % modes.len()];
            let a = checkpoints.run(&mut executor, &case, mode);
            let b = records.run(&mut executor, &with_records(&case), modes[(number + 1) % 3]);
            assert!(a.out == b.out, "step {number}");
            for request in 0..REQUESTS {
                let first = case.slots[request * MOST] as usize;
                // Positions that no step has written yet are NaN.
                let line = |buffers: &Buffers| -> Vec<u16> {
                    let line = buffers.line(&case.shape, first, 0, tokens + 2);
                    line.into_iter().map(bf16::to_bits).collect()
                };
                let same = line(&a) == line(&b);
                assert!(same, "step {number} request {request}");
                if counts[request] == 0 {
                    continue;
                }
                seen.insert((accepted[request], counts[request]));
                accepted[request] = rng.between(1, counts[request] as usize) as i32;
            }
        }
    }
    // What is accepted and what follows both vary, among them more accepted than the next step has.
    assert!(
        seen.len() > 6 && seen.iter().any(|(a, b)| a > b),
        "{seen:?}"
    );
}
