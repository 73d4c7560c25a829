//! Owns what f32 may lose in the elementary functions of a step: each gives the exact value and a bound
//! on the absolute error of an f32 evaluation. Whoever computes a step in f32 is held to these bounds,
//! and `cargo xtask elementary` holds the kernels' functions to them one argument after another.

use crate::Gate;

/// Unit roundoff of f32.
pub const UNIT: f64 = 1.0 / (1u64 << 24) as f64;
/// Spacing of f32 near 0.
pub const TINY: f64 = f32::MIN_POSITIVE as f64 / (1u64 << 23) as f64;
/// Exponentials stop falling at e⁻⁸⁷, which this is, and a few units.
pub const FLOOR: f64 = 1.645_812e-38;

/// An exact value, and the absolute error that f32 may make of it.
pub type Bounded = (f64, f64);

/// 1 / (1 + e⁻ˣ): four units, and in the low tail |x| units of e⁻ˡˣˡ. An approximate reciprocal flushes
/// what is not normal.
pub fn sigmoid(x: f64) -> Bounded {
    let value = exact_sigmoid(x);
    let units = 4.0 + 2.0 * (-x).clamp(0.0, 200.0);
    (value, value * UNIT * units + f64::from(f32::MIN_POSITIVE))
}

/// 1 / √x for x of at least 1e-6: two units.
pub fn inverse_root(x: f64) -> Bounded {
    let value = 1.0 / x.sqrt();
    (value, 2.0 * UNIT * value)
}

/// exp(`a_log`), at most the largest f32: an f32 exponent of that size. The last exponent that does not
/// overflow, 88.72283, gives 123.0 units less than the largest f32, and the exponential loses two more.
pub fn rate(a_log: f64) -> Bounded {
    let (value, largest) = (a_log.exp(), f64::from(f32::MAX));
    if value > largest {
        return (largest, 125.0 * UNIT * largest);
    }
    (value, value * UNIT * (a_log.abs() + 2.0) + FLOOR)
}

/// The decay that `gate` makes of exp(A_log) and g + dt_bias. The errors of both pass through; those of
/// the function itself are added.
pub fn decay(gate: Gate, rate: Bounded, x: Bounded) -> Bounded {
    let ((rate, rate_error), (x, x_error)) = (rate, x);
    let (low, exact, high) = match gate {
        Gate::LowerBound { lower_bound } => {
            let z = rate * x;
            let z_error = rate * x_error + rate_error * x.abs() + UNIT * z.abs();
            let at = |z: f64| f64::from(lower_bound) * exact_sigmoid(z);
            (at(z + z_error), at(z), at(z - z_error))
        }
        Gate::Softplus => {
            let s = softplus(x);
            // The tail e⁻ˡˣˡ carries |x| units of its own, and TINY near underflow.
            let s_error = 4.0 * UNIT * s
                + UNIT * x.abs() * (-x.abs()).exp()
                + TINY
                + (softplus(x + x_error) - s);
            let low = -(rate + rate_error) * (s + s_error);
            let high = -(rate - rate_error).max(0.0) * (s - s_error).max(0.0);
            (low, -rate * s, high)
        }
    };
    let value = exact.exp();
    // Rounding of the exponent costs its size in units, the exponential two more.
    let rounding = value * UNIT * (2.0 + 4.0 * exact.abs().min(1e6));
    let reach = (high.exp() - value).abs().max((value - low.exp()).abs());
    (value, reach + rounding + FLOOR)
}

fn exact_sigmoid(x: f64) -> f64 {
    if x < 0.0 {
        let e = x.exp();
        e / (1.0 + e)
    } else {
        1.0 / (1.0 + (-x).exp())
    }
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
