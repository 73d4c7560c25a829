//! Owns the tolerances and the worst errors measured against them; must not know operands.

use std::fmt;

/// `out` lies within this many bf16 ulps of the exact value: half is the rounding itself, half is
/// left to f32.
pub const OUT_ULPS: f64 = 1.0;
/// Slack of `out` relative to the largest of its row, for elements that cancel.
pub const OUT_SLACK: f64 = 1.0 / 65536.0;
/// Slack of `out` relative to the largest sum of absolute terms of its head: 16 units of 2⁻²⁴, what
/// the oracle takes a sum of 128 terms to lose. Where the query is almost orthogonal to every row of
/// the state (often, when one token made the whole state) all of an output row cancels, and
/// [`OUT_SLACK`] of what is left is less than any f32 sum can promise. It passes [`OUT_SLACK`] only
/// where the terms are 16 times the row.
pub const OUT_TERMS_SLACK: f64 = 16.0 / 16_777_216.0;
/// Relative Frobenius error of one head's f32 state, for each token since the source state.
pub const STATE_STEP: f64 = 5e-7;
/// Frobenius norm of what a whole matrix may lose to subnormal numbers flushed to 0: 2⁻¹²⁶ in each
/// of its 128² elements.
pub const STATE_FLUSH: f64 = 128.0 * f32::MIN_POSITIVE as f64;

/// Spacing of bf16 numbers around `x`.
pub fn bf16_ulp(x: f64) -> f64 {
    // 8 bits of significand; below 2⁻¹²⁶ the spacing stays that of the smallest normal number.
    let exponent = if x == 0.0 || x.abs() < f64::from(f32::MIN_POSITIVE) {
        -126
    } else {
        // The exponent bits of f64; exact, unlike a logarithm.
        ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
    };
    2f64.powi(exponent - 7)
}

/// The worst errors of any number of checks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// Output rows of live requests.
    pub rows: u64,
    /// State matrices written.
    pub matrices: u64,
    /// Bytes compared one by one.
    pub bytes: u64,
    /// Error of `out` past its slack, in bf16 ulps of the exact value; well-conditioned inputs.
    pub out_ulps: f64,
    /// Error of `out` as a part of its bound, whatever the inputs.
    pub out_of_bound: f64,
    /// Relative error of an f32 state a token; well-conditioned inputs.
    pub state_relative: f64,
    /// Relative error of a bf16 state; well-conditioned inputs.
    pub state_bf16_relative: f64,
    /// Error of a state as a part of its bound, whatever the inputs and the type.
    pub state_of_bound: f64,
}

impl Errors {
    /// Takes the worse of each.
    pub fn merge(&mut self, other: &Errors) {
        self.rows += other.rows;
        self.matrices += other.matrices;
        self.bytes += other.bytes;
        for (own, other) in [
            (&mut self.out_ulps, other.out_ulps),
            (&mut self.out_of_bound, other.out_of_bound),
            (&mut self.state_relative, other.state_relative),
            (&mut self.state_bf16_relative, other.state_bf16_relative),
            (&mut self.state_of_bound, other.state_of_bound),
        ] {
            *own = own.max(other);
        }
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Errors {
            rows,
            matrices,
            bytes,
            out_ulps,
            out_of_bound,
            state_relative,
            state_bf16_relative,
            state_of_bound,
        } = *self;
        writeln!(f, "{:<34}{:>12}  {:>10}", "worst error", "found", "bound")?;
        let rows_of = [
            ("out, bf16 ulps", out_ulps, OUT_ULPS),
            ("out, any input, of its bound", out_of_bound, 1.0),
            ("f32 state, relative a token", state_relative, STATE_STEP),
            ("any state, any input, of its bound", state_of_bound, 1.0),
        ];
        for (name, found, bound) in rows_of {
            writeln!(f, "{name:<34}{found:>12.3e}  {bound:>10.3e}")?;
        }
        writeln!(
            f,
            "{:<34}{state_bf16_relative:>12.3e}",
            "bf16 state, relative"
        )?;
        writeln!(
            f,
            "{:<34}{:>12}  {:>10}",
            "conv cache, differing bytes", 0, 0
        )?;
        write!(
            f,
            "{rows} output rows, {matrices} state matrices, {bytes} bytes compared"
        )
    }
}
