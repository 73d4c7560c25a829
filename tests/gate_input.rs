//! A projected gate input in place of F_B and F_A: where the product is a bf16 value, both forms
//! leave the same bits. Random cases and golden vectors of the form are the harness's own.

use std::sync::Arc;

use half::bf16;
use kda_codegen::{Arch, EarlyReads};
use kda_reference::{Gate, HEAD_DIM};
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::{Buffers, Case, Executor, Limits, ReferenceExecutor, Regime, fixtures, placed};

/// A live case of the low-rank gate whose F_B picks an element of F_A for each gate, times −½ or 1:
/// every product, and every sum in whatever order, is a bf16 value.
fn exact_products(seed: u64, gate: Gate, heads: usize, tokens: usize) -> Case {
    let limits = Limits {
        max_heads: 2,
        max_requests: 2,
        tokens: vec![tokens],
        gates: vec![gate],
        regimes: vec![Regime::Plain],
        projected_gates: vec![false],
        ..Limits::small().live()
    };
    let mut case = Case::sized(seed, &limits, heads, heads);
    let data = Arc::make_mut(&mut case.data);
    for (i, row) in data.f_b.chunks_exact_mut(HEAD_DIM).enumerate() {
        row.fill(bf16::ZERO);
        row[(7 * i + 3) % HEAD_DIM] = bf16::from_f32(if i % 3 == 0 { -0.5 } else { 1.0 });
    }
    case
}

fn left(executor: &mut dyn Executor, case: &Case, mode: &str) -> Buffers {
    let before = Buffers::new(case);
    let mut after = before.clone();
    let faults = executor
        .run(case, mode, &mut after)
        .unwrap_or_else(|error| panic!("{error}; {case}, mode {mode}"));
    case.check(&before, &after, faults.as_ref())
        .unwrap_or_else(|mismatch| panic!("{mismatch}, mode {mode}"));
    after
}

fn agree(executor: &mut dyn Executor, case: &Case) {
    let projected = case.with_projected_gate();
    let first = executor.modes(case).swap_remove(0);
    let wanted = left(executor, case, &first);
    for mode in executor.modes(&projected) {
        let found = left(executor, &projected, &mode);
        for (name, a, b) in [
            ("out", &wanted.out, &found.out),
            ("state_pool", &wanted.state, &found.state),
            ("conv_cache", &wanted.conv_cache, &found.conv_cache),
        ] {
            assert!(a == b, "{name} differs: {case}, {first} against {mode}");
        }
    }
}

#[test]
fn the_two_forms_agree_bit_for_bit_where_the_product_is_exact() {
    let kernels = KernelCache::new(load_nvrtc().unwrap());
    let lower_bound = Gate::LowerBound { lower_bound: -5.0 };
    for (arch, gate, heads, tokens) in [
        (Arch::Sm90a, lower_bound, 2, 1),
        (Arch::Sm90a, Gate::Softplus, 1, 6),
        (Arch::Sm80, Gate::Softplus, 2, 1),
    ] {
        let case = exact_products(tokens as u64, gate, heads, tokens);
        agree(&mut ReferenceExecutor, &case);
        agree(&mut EmulatorExecutor::new(arch, kernels.clone()), &case);
    }
}

/// The golden vectors' own check holds both forms to the oracle; here, that the rounding of the gate
/// is seen at all, and moves results no further than it can.
#[test]
fn a_rounded_gate_moves_the_golden_vectors_a_little() {
    for fixture in fixtures::embedded() {
        let (case, before) = fixture.projected();
        let exact = fixture.case.exact(&fixture.before).unwrap();
        let rounded = case.exact(&before).unwrap();
        assert!(!exact.is_empty() && exact.len() == rounded.len());
        for ((_, exact), (_, rounded)) in exact.iter().zip(&rounded) {
            let norm =
                |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let moved = norm(&mut exact.states.iter().zip(&rounded.states).map(|(a, b)| a - b));
            let size = norm(&mut exact.states.iter().copied());
            // 2⁻⁹ of g, which is 4 at most, times the slope of the decay's exponent, 5/4 · exp(A_log)
            // at most: 0.01 a step where A_log is around 0. Measured: 2.3e-3.
            assert!(
                0.0 < moved && moved < 0.01 * size,
                "{}: {moved:e} of {size:e}",
                fixture.name
            );
        }
    }
}

/// The kernel has no use for either, and is given neither.
#[test]
fn a_projected_gate_has_a_kernel_of_its_own() {
    let case = exact_products(1, Gate::Softplus, 1, 1);
    let projected = case.with_projected_gate();
    let mode = "split1-256x32-block";
    let [low_rank, projected] = [&case, &projected].map(|case| {
        let spec = placed::spec(case, Arch::Sm90a, mode).unwrap();
        assert_eq!(
            placed::config(case, EarlyReads::Weights).gate_input,
            spec.gate_input
        );
        spec.entry()
    });
    assert_eq!(
        projected,
        low_rank.replace("softplus", "softplus_projected")
    );
}
