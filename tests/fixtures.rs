//! Golden vectors against the reference step and the oracle; must not know a kernel.

use std::path::Path;

use kda_tests::fixtures::{self, Fixture, FixtureError};
use kda_tests::{MATRIX, ReferenceExecutor};

/// Two computations of `out` differ by at most this much of the row's largest element, before
/// rounding: 2⁻²⁰ for the f32 sums of 128 terms of each side (16 units of 2⁻²⁴), four such sums one
/// after the other. Measured: 7e-7.
const OUT_UNROUNDED: f64 = 8.0 / (1u64 << 20) as f64;

#[test]
fn the_reference_executor_reproduces_every_fixture() {
    let errors = fixtures::check(&mut ReferenceExecutor, &fixtures::embedded()).unwrap();
    assert!(errors.rows > 0 && errors.matrices > 0);
}

#[test]
fn the_step_reproduces_every_fixture_before_rounding() {
    for fixture in fixtures::embedded() {
        let mut after = fixture.before.clone();
        let (report, out) = ReferenceExecutor::run_unrounded(&fixture.case, &mut after).unwrap();
        assert!(report.faults.is_empty());
        let worst = worst_row(&fixture, |i| f64::from(out[i]));
        assert!(worst <= OUT_UNROUNDED, "{}: {worst:e}", fixture.name);
    }
}

#[test]
fn the_oracle_reproduces_every_fixture() {
    for fixture in fixtures::embedded() {
        let (case, shape) = (&fixture.case, &fixture.case.shape);
        let mut out = vec![0.0; fixture.out.len()];
        for (request, exact) in case.exact(&fixture.before).unwrap() {
            let start = request * shape.tokens * shape.dim();
            out[start..start + exact.out.len()].copy_from_slice(&exact.out);
            for token in 0..shape.tokens {
                let slot = case.slots[request * shape.columns + token];
                if slot <= 0 {
                    continue;
                }
                for head in 0..shape.heads {
                    let wanted = &fixture.state_out[shape.state_index(slot as usize, head)..];
                    let found = exact.state(shape, token, head);
                    let (mut difference, mut size) = (0.0, 0.0);
                    for (&wanted, &found) in wanted[..MATRIX].iter().zip(found) {
                        difference += (f64::from(wanted) - found).powi(2);
                        size += found * found;
                    }
                    let relative = f64::sqrt(difference / size);
                    let bound = kda_tests::STATE_STEP * (token + 1) as f64;
                    assert!(relative <= bound, "{}: {relative:e}", fixture.name);
                }
            }
        }
        let worst = worst_row(&fixture, |i| out[i]);
        assert!(worst <= OUT_UNROUNDED, "{}: {worst:e}", fixture.name);
    }
}

/// Worst difference from the file's `out`, relative to the largest element of the row; NaN wins.
fn worst_row(fixture: &Fixture, found: impl Fn(usize) -> f64) -> f64 {
    let dim = fixture.case.shape.dim();
    let mut worst = 0.0f64;
    for (row, wanted) in fixture.out.chunks_exact(dim).enumerate() {
        let largest = wanted.iter().fold(0.0f32, |m, x| m.max(x.abs())).into();
        for (column, &wanted) in wanted.iter().enumerate() {
            let difference = (found(row * dim + column) - f64::from(wanted)).abs();
            if difference.is_nan() {
                return f64::NAN;
            }
            if difference > 0.0 {
                worst = worst.max(difference / f64::max(largest, f64::MIN_POSITIVE));
            }
        }
    }
    worst
}

#[test]
fn a_folder_holds_what_the_crate_carries() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let names = |fixtures: Vec<Fixture>| fixtures.into_iter().map(|f| f.name).collect::<Vec<_>>();
    assert_eq!(
        names(fixtures::load_all(&folder).unwrap()),
        names(fixtures::embedded())
    );
}

#[test]
fn fixtures_cover_both_steps_gates_biases_and_null_rows() {
    let all = fixtures::embedded();
    let any = |holds: &dyn Fn(&Fixture) -> bool| all.iter().any(holds);
    for verify in [false, true] {
        assert!(any(&|f| f.case.verify == verify));
        assert!(any(&|f| f.case.bias() == verify));
        let softplus = |f: &Fixture| f.case.shape.gate == kda_reference::Gate::Softplus;
        assert!(any(&|f| softplus(f) == verify));
    }
    assert!(any(&|f| f.case.slots.iter().any(|&slot| slot <= 0)));
}

#[test]
fn what_is_no_fixture_is_refused() {
    let missing = fixtures::load_all(Path::new("/nonexistent/fixtures")).unwrap_err();
    assert!(matches!(missing, FixtureError::Unreadable { .. }));
    let text = missing.to_string();
    assert!(text.starts_with("cannot read /nonexistent/fixtures: "));
    let malformed = Fixture::parse("short", &[1, 2, 3]).unwrap_err();
    assert!(malformed.to_string().starts_with("fixture short is no "));
    let empty = b"\x02\0\0\0\0\0\0\0{}";
    let entry = Fixture::parse("empty", empty).unwrap_err();
    assert_eq!(entry.to_string(), "fixture empty has no usable entry gate");
}
