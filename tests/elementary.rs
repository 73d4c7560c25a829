//! The templates' elementary functions against the bounds that the oracle grants them, over f32 values
//! of every size. The emulator's approximate instructions are exact but for a rounding: what a GPU's
//! lose, `cargo xtask elementary` tells there.

use kda_codegen::Arch;
use kda_reference::loss;
use kda_tests::elementary::{Elementary, FUNCTIONS};
use kda_tests::kernels::load_nvrtc;

#[test]
fn elementary_functions_keep_their_bounds() {
    let functions = Elementary::emulated(&load_nvrtc().unwrap(), Arch::Sm90a).unwrap();
    for (function, worst) in FUNCTIONS.iter().zip(functions.worst(40_009).unwrap()) {
        assert!(worst.share <= 1.0, "{}: {worst:?}", function.name);
        // No bound is so wide that it holds nothing.
        assert!(worst.share >= 0.25, "{}: {worst:?}", function.name);
        assert!(worst.tried > 30_000, "{}: {worst:?}", function.name);
    }
}

#[test]
fn bounds_are_a_few_units_of_the_value() {
    for x in [-60.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 80.0] {
        let units = |(value, error): loss::Bounded| error / value / loss::UNIT;
        assert!(
            units(loss::sigmoid(x)) <= 4.001 + 2.0 * (-x).max(0.0),
            "{x}"
        );
        assert!(units(loss::rate(x)) <= 2.001 + x.abs(), "{x}");
        assert!(units(loss::inverse_root(x.abs() + 1e-6)) <= 2.001, "{x}");
    }
}
