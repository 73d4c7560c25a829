//! Cases of a given shape, and who runs them. Asserts nothing about kernels.

use std::sync::{Arc, OnceLock};

use kda_codegen::Arch;
use kda_reference::{CONV_WIDTH, ConvLayout, Gate, NullRule, StateType};
use kda_runtime::{Config, Plan, Policies, Step, StepKind};
use kda_tests::cuda::{CudaExecutor, on_device};
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::rng::Rng;
use kda_tests::{
    Buffers, Case, Data, Errors, Executor, Faults, Limits, Regime, Skew, judge, placed,
};

pub const LOWER_BOUND: Gate = Gate::LowerBound { lower_bound: -5.0 };
/// One block a head, and clusters that share one.
pub const SINGLE: &str = "split1-256x8-block";
pub const CLUSTER: &str = "split4-128x8-cluster-hints";

/// The kernels of every test here, each compiled once.
pub fn kernels() -> KernelCache {
    static KERNELS: OnceLock<KernelCache> = OnceLock::new();
    KERNELS
        .get_or_init(|| KernelCache::new(load_nvrtc().expect("libnvrtc")))
        .clone()
}

/// The emulator, with the schedule of `seed`.
pub fn emulator(seed: u64) -> EmulatorExecutor {
    EmulatorExecutor::new(Arch::Sm90a, kernels()).seed(seed)
}

/// The emulator, with the schedule of `seed`; or the device, if the environment asks for it.
pub fn executor(seed: u64) -> Box<dyn Executor> {
    if on_device() {
        return Box::new(CudaExecutor::new(kernels()).expect("a CUDA device"));
    }
    Box::new(emulator(seed))
}

/// A decode step: every request live, tight strides, no bias, plain values.
pub fn decode(heads: usize, requests: usize) -> Case {
    tight(heads, requests, 1, 1, false)
}

/// A verify step whose table has `columns` columns; accepted counts take every value in turn.
pub fn verify(heads: usize, requests: usize, tokens: usize, columns: usize) -> Case {
    tight(heads, requests, tokens, columns, true)
}

fn tight(heads: usize, requests: usize, tokens: usize, columns: usize, verify: bool) -> Case {
    let limits = Limits {
        tokens: vec![tokens],
        gates: vec![LOWER_BOUND],
        layouts: vec![ConvLayout::DimFirst],
        null_rules: vec![NullRule::NonPositive],
        state_types: vec![StateType::F32],
        biases: vec![false],
        projected_gates: vec![false],
        records: vec![false],
        ragged: vec![false],
        regimes: vec![Regime::Plain],
        max_pool_bytes: 1 << 30,
        ..Limits::default()
    }
    .live();
    let seed = (heads * 1_000_000 + requests * 1000 + tokens * 10) as u64 + u64::from(verify);
    let mut case = Case::sized(seed, &limits, heads, requests);
    assert_eq!(case.shape.requests, requests);
    let shape = &mut case.shape;
    let dense = kda_reference::Shape::dense(heads, requests, tokens, LOWER_BOUND);
    let conv_len = CONV_WIDTH - 1 + columns - 1;
    *shape = kda_reference::Shape {
        columns,
        slots_stride: columns,
        conv_len,
        conv_slot_stride: 3 * dense.dim() * conv_len,
        pool_slots: requests * columns + 2,
        ..dense
    };
    case.skew = Skew::default();
    case.verify = verify;
    let mut slots: Vec<i32> = (1..shape.pool_slots as i32).collect();
    Rng::new(seed).shuffle(&mut slots);
    slots.truncate(requests * columns);
    case.slots = slots;
    case.accepted = verify.then(|| (0..requests).map(|r| (r % columns + 1) as i32).collect());
    case
}

/// Changes the values.
pub fn edit(case: &mut Case, change: impl FnOnce(&mut Data)) {
    change(Arc::make_mut(&mut case.data));
}

/// Another line length, dense.
pub fn lengthen(case: &mut Case, conv_len: usize) {
    case.shape.conv_len = conv_len;
    case.shape.conv_slot_stride = 3 * case.shape.dim() * conv_len;
}

/// Runs a case and judges it against the oracle and every byte around it.
pub fn passes(executor: &mut dyn Executor, case: &Case, mode: &str) -> Errors {
    judge(executor, case, mode).unwrap_or_else(|mismatch| panic!("{mismatch}"))
}

/// Runs a case; what it found, what it left, its faults.
pub fn run(
    executor: &mut dyn Executor,
    case: &Case,
    mode: &str,
) -> (Buffers, Buffers, Option<Faults>) {
    let before = Buffers::new(case);
    let (after, faults) = run_on(executor, case, mode, &before);
    (before, after, faults)
}

/// Runs a case on given bytes, and judges what it left.
pub fn run_on(
    executor: &mut dyn Executor,
    case: &Case,
    mode: &str,
    before: &Buffers,
) -> (Buffers, Option<Faults>) {
    let mut after = before.clone();
    let faults = executor
        .run(case, mode, &mut after)
        .unwrap_or_else(|error| panic!("{error}; {case}, mode {mode}"));
    case.check(before, &after, faults.as_ref())
        .unwrap_or_else(|mismatch| panic!("{mismatch}, mode {mode}"));
    (after, faults)
}

/// Whether the written operands hold the same bytes.
pub fn same_results(a: &Buffers, b: &Buffers) -> bool {
    a.out == b.out && a.state == b.state && a.conv_cache == b.conv_cache
}

/// The plan of a case's kernel, with the harness's own operands as a step.
pub fn planned(case: &Case) -> (Plan, Step) {
    let config = placed::config(case, kda_codegen::EarlyReads::Weights);
    let policies = Policies::single(&[placed::kind(case)], SINGLE.parse().expect("a mode"));
    let plan = Plan::new(Arch::Sm90a, &config, &policies).expect("a plan");
    (plan, step(case))
}

/// The operands of a case, each in a region of its own.
pub fn step(case: &Case) -> Step {
    let buffers = Buffers::poisoned(case);
    let names: Vec<&str> = buffers.regions().iter().map(|region| region.0).collect();
    placed::step(case, &buffers, |name| {
        let index = names.iter().position(|known| *known == name);
        ((index.expect("a region") + 1) as u64) << 40
    })
}

/// A plan of Kimi K3's settings.
pub fn kimi(heads: usize, kinds: &[StepKind]) -> Plan {
    let policies = Policies::single(kinds, SINGLE.parse().expect("a mode"));
    Plan::new(Arch::Sm90a, &Config::kimi_k3(heads), &policies).expect("a plan")
}
