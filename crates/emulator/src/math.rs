//! Scalar arithmetic as the ISA defines it, on bits. Knows no registers.

use crate::ir::{Cmp, Count, Float, HalfKind, Int, Rounding, TestKind, Ty};

pub(crate) const NAN32: u32 = 0x7fff_ffff;

/// The bits of a result: every NaN is the same one.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> u32 {
    if x.is_nan() { NAN32 } else { x.to_bits() }
}

const NAN64: u64 = 0x7fff_ffff_ffff_ffff;

#[inline(always)]
pub(crate) fn int32(f: Int, a: u32, b: u32) -> u32 {
    let (sa, sb) = (a as i32, b as i32);
    match f {
        Int::Add => a.wrapping_add(b),
        Int::Sub => a.wrapping_sub(b),
        Int::Mul => a.wrapping_mul(b),
        Int::MulHiS => ((i64::from(sa) * i64::from(sb)) >> 32) as u32,
        Int::MulHiU => ((u64::from(a) * u64::from(b)) >> 32) as u32,
        Int::DivS => sa.wrapping_div(if b == 0 { 1 } else { sb }) as u32,
        Int::DivU => a / b.max(1),
        Int::RemS => sa.wrapping_rem(if b == 0 { 1 } else { sb }) as u32,
        Int::RemU => a % b.max(1),
        Int::MinS => sa.min(sb) as u32,
        Int::MinU => a.min(b),
        Int::MaxS => sa.max(sb) as u32,
        Int::MaxU => a.max(b),
        Int::And => a & b,
        Int::Or => a | b,
        Int::Xor => a ^ b,
        Int::Shl => {
            if b > 31 {
                0
            } else {
                a << b
            }
        }
        Int::ShrU => {
            if b > 31 {
                0
            } else {
                a >> b
            }
        }
        Int::ShrS => (sa >> b.min(31)) as u32,
        Int::Neg => a.wrapping_neg(),
        Int::Abs => sa.wrapping_abs() as u32,
        Int::Not => !a,
        Int::Cnot => u32::from(a == 0),
        Int::Brev => a.reverse_bits(),
    }
}

#[inline(always)]
pub(crate) fn int64(f: Int, a: u64, b: u64) -> u64 {
    let (sa, sb) = (a as i64, b as i64);
    match f {
        Int::Add => a.wrapping_add(b),
        Int::Sub => a.wrapping_sub(b),
        Int::Mul => a.wrapping_mul(b),
        Int::MulHiS => ((i128::from(sa) * i128::from(sb)) >> 64) as u64,
        Int::MulHiU => ((u128::from(a) * u128::from(b)) >> 64) as u64,
        Int::DivS => sa.wrapping_div(if b == 0 { 1 } else { sb }) as u64,
        Int::DivU => a / b.max(1),
        Int::RemS => sa.wrapping_rem(if b == 0 { 1 } else { sb }) as u64,
        Int::RemU => a % b.max(1),
        Int::MinS => sa.min(sb) as u64,
        Int::MinU => a.min(b),
        Int::MaxS => sa.max(sb) as u64,
        Int::MaxU => a.max(b),
        Int::And => a & b,
        Int::Or => a | b,
        Int::Xor => a ^ b,
        Int::Shl => {
            if b > 63 {
                0
            } else {
                a << b
            }
        }
        Int::ShrU => {
            if b > 63 {
                0
            } else {
                a >> b
            }
        }
        Int::ShrS => (sa >> b.min(63)) as u64,
        Int::Neg => a.wrapping_neg(),
        Int::Abs => sa.wrapping_abs() as u64,
        Int::Not => !a,
        Int::Cnot => u64::from(a == 0),
        Int::Brev => a.reverse_bits(),
    }
}

/// 16-bit integers live zero-extended in 32-bit registers.
#[inline(always)]
pub(crate) fn int16(f: Int, a: u32, b: u32) -> u32 {
    let (ua, ub) = (a as u16, b as u16);
    let (sa, sb) = (i32::from(ua as i16) as u32, i32::from(ub as i16) as u32);
    let wide = match f {
        Int::MulHiS => ((sa as i32).wrapping_mul(sb as i32) >> 16) as u32,
        Int::MulHiU => (u32::from(ua) * u32::from(ub)) >> 16,
        Int::DivS | Int::RemS | Int::MinS | Int::MaxS | Int::Abs => int32(f, sa, sb),
        Int::Shl => int32(f, u32::from(ua), b),
        Int::ShrU => int32(f, u32::from(ua), b),
        Int::ShrS => int32(f, sa, b),
        Int::Brev => u32::from(ua.reverse_bits()),
        _ => int32(f, u32::from(ua), u32::from(ub)),
    };
    wide & 0xffff
}

pub(crate) fn count(f: Count, wide: bool, a: u64) -> u32 {
    let bits = if wide { 64 } else { 32 };
    let leading = |x: u64| {
        if wide {
            x.leading_zeros()
        } else {
            (x as u32).leading_zeros()
        }
    };
    match f {
        Count::Popc => a.count_ones(),
        Count::Clz => leading(a),
        Count::Bfind => {
            if a == 0 {
                u32::MAX
            } else {
                bits - 1 - leading(a)
            }
        }
        Count::BfindShift => {
            if a == 0 {
                u32::MAX
            } else {
                leading(a)
            }
        }
        Count::BfindSigned => {
            let negative = a >> (bits - 1) & 1 != 0;
            let x = if negative { !a } else { a } & if wide { u64::MAX } else { 0xffff_ffff };
            if x == 0 {
                u32::MAX
            } else {
                bits - 1 - leading(x)
            }
        }
    }
}

pub(crate) fn prmt(a: u32, b: u32, c: u32, mode: u8) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let byte = |i: u32| (bytes >> (8 * (i & 7))) as u32 & 0xff;
    let s = c & 3;
    let picks = match mode {
        0 => {
            return (0..4).fold(0, |word, i| {
                let pick = c >> (4 * i);
                let value = byte(pick & 7);
                let value = if pick & 8 == 0 {
                    value
                } else if value & 0x80 == 0 {
                    0
                } else {
                    0xff
                };
                word | value << (8 * i)
            });
        }
        1 => [s, s + 1, s + 2, s + 3],
        2 => [s, s + 7, s + 6, s + 5],
        3 => [s; 4],
        4 => [s, s.max(1), s.max(2), 3],
        5 => [0, s.min(1), s.min(2), s],
        _ => {
            let half = 2 * (c & 1);
            [half, half + 1, half, half + 1]
        }
    };
    picks
        .iter()
        .enumerate()
        .fold(0, |word, (i, &pick)| word | byte(pick) << (8 * i))
}

pub(crate) fn bfe(wide: bool, signed: bool, a: u64, b: u32, c: u32) -> u64 {
    let msb = if wide { 63 } else { 31 };
    let (pos, len) = (b & 0xff, c & 0xff);
    let sign = if !signed || len == 0 {
        0
    } else {
        a >> (pos + len - 1).min(msb) & 1
    };
    let value = (0..=msb).fold(0, |out, i| {
        let bit = if i < len && pos + i <= msb {
            a >> (pos + i) & 1
        } else {
            sign
        };
        out | bit << i
    });
    if wide { value } else { u64::from(value as u32) }
}

pub(crate) fn bfi(wide: bool, a: u64, b: u64, c: u32, d: u32) -> u64 {
    let size = if wide { 64 } else { 32 };
    let (pos, len) = (c & 0xff, d & 0xff);
    if pos >= size || len == 0 {
        return b;
    }
    let len = len.min(size - pos);
    let mask = if len == 64 { u64::MAX } else { (1 << len) - 1 } << pos;
    (b & !mask) | (a << pos & mask)
}

pub(crate) fn lop3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    (0..8).filter(|i| table >> i & 1 != 0).fold(0, |out, i| {
        let pick = |x: u32, bit: u32| if i & bit != 0 { x } else { !x };
        out | (pick(a, 4) & pick(b, 2) & pick(c, 1))
    })
}

#[inline(always)]
fn flush(ftz: bool, x: f32) -> f32 {
    if ftz && x.is_subnormal() {
        0f32.copysign(x)
    } else {
        x
    }
}

#[inline(always)]
fn finish(ftz: bool, sat: bool, x: f32) -> u32 {
    if x.is_nan() {
        return if sat { 0 } else { NAN32 };
    }
    let x = flush(ftz, x);
    if sat { x.clamp(0.0, 1.0) + 0.0 } else { x }.to_bits()
}

fn min_max(max: bool, nan: bool, a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if nan || (a.is_nan() && b.is_nan()) {
            f32::NAN
        } else if a.is_nan() {
            b
        } else {
            a
        };
    }
    let a_first = a < b || (a == b && a.is_sign_negative());
    if a_first != max { a } else { b }
}

#[inline(always)]
pub(crate) fn f32_one(f: Float, ftz: bool, sat: bool, a: u32) -> u32 {
    let x = flush(ftz, f32::from_bits(a));
    let wide = f64::from(x);
    let y = match f {
        Float::Neg => return if x.is_nan() { NAN32 } else { (-x).to_bits() },
        Float::Abs => return if x.is_nan() { NAN32 } else { x.abs().to_bits() },
        Float::Sqrt => x.sqrt(),
        Float::Rcp => 1.0 / x,
        Float::Rsqrt => (1.0 / wide.sqrt()) as f32,
        Float::Ex2 => wide.exp2() as f32,
        Float::Lg2 => wide.log2() as f32,
        Float::Sin => wide.sin() as f32,
        Float::Cos => wide.cos() as f32,
        _ => wide.tanh() as f32,
    };
    finish(ftz, sat, y)
}

#[inline(always)]
pub(crate) fn f32_two(f: Float, ftz: bool, sat: bool, a: u32, b: u32) -> u32 {
    let (x, y) = (flush(ftz, f32::from_bits(a)), flush(ftz, f32::from_bits(b)));
    let z = match f {
        Float::Add => x + y,
        Float::Sub => x - y,
        Float::Mul => x * y,
        Float::Div => x / y,
        Float::Min => min_max(false, false, x, y),
        Float::Max => min_max(true, false, x, y),
        Float::MinNan => min_max(false, true, x, y),
        Float::MaxNan => min_max(true, true, x, y),
        _ => return (a & 0x8000_0000) | (b & 0x7fff_ffff),
    };
    finish(ftz, sat, z)
}

#[inline(always)]
pub(crate) fn fma32(ftz: bool, sat: bool, a: u32, b: u32, c: u32) -> u32 {
    let part = |x: u32| flush(ftz, f32::from_bits(x));
    finish(ftz, sat, part(a).mul_add(part(b), part(c)))
}

pub(crate) fn f64_op(f: Float, a: u64, b: u64, c: u64) -> u64 {
    let (x, y, z) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
    let min_max = |max: bool| {
        if x.is_nan() {
            y
        } else if y.is_nan() || ((x < y || (x == y && x.is_sign_negative())) != max) {
            x
        } else {
            y
        }
    };
    let r = match f {
        Float::Add => x + y,
        Float::Sub => x - y,
        Float::Mul => x * y,
        Float::Div => x / y,
        Float::Fma => x.mul_add(y, z),
        Float::Neg => return a ^ 1 << 63,
        Float::Abs => return a & !(1 << 63),
        Float::Sqrt => x.sqrt(),
        Float::Rcp => 1.0 / x,
        Float::Rsqrt => 1.0 / x.sqrt(),
        Float::Min | Float::MinNan => min_max(false),
        Float::Max | Float::MaxNan => min_max(true),
        _ => return (a & 1 << 63) | (b & !(1 << 63)),
    };
    if r.is_nan() { NAN64 } else { r.to_bits() }
}

pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let (exponent, fraction) = (bits >> 10 & 31, bits & 0x3ff);
    let magnitude = match exponent {
        0 => f32::from(fraction) * f32::from_bits(0x3380_0000),
        31 if fraction == 0 => f32::INFINITY,
        31 => f32::NAN,
        _ => f32::from_bits((u32::from(exponent) + 112) << 23 | u32::from(fraction) << 13),
    };
    if bits >> 15 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

pub(crate) fn f32_to_bf16(x: f32, zero: bool) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return 0x7fff;
    }
    if zero {
        return (bits >> 16) as u16;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Rounds an exact double to f16; `zero` truncates.
pub(crate) fn f64_to_f16(x: f64, zero: bool) -> u16 {
    if x.is_nan() {
        return 0x7fff;
    }
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let m = x.abs();
    if m.is_infinite() {
        return sign | 0x7c00;
    }
    // The unit in the last place of the result, never below the smallest subnormal.
    let exponent = ((m.to_bits() >> 52) as i32 - 1023).max(-14);
    let unit = 2f64.powi(exponent - 10);
    let steps = m / unit;
    let steps = if zero {
        steps.trunc()
    } else {
        steps.round_ties_even()
    };
    let value = steps * unit;
    if value >= 65536.0 {
        return sign | if zero { 0x7bff } else { 0x7c00 };
    }
    if value < 2f64.powi(-14) {
        return sign | (value / 2f64.powi(-24)) as u16;
    }
    let exponent = (value.to_bits() >> 52) as i32 - 1023;
    let fraction = (value / 2f64.powi(exponent - 10)) as u16 - 1024;
    sign | ((exponent + 15) as u16) << 10 | fraction
}

/// Rounds a double to the nearest f32 whose last bit is sticky, so that a second rounding is exact.
fn odd_f32(x: f64) -> f32 {
    let near = x as f32;
    if !near.is_finite() || f64::from(near) == x {
        return near;
    }
    let toward = if f64::from(near).abs() > x.abs() {
        f32::from_bits(near.to_bits() - 1)
    } else {
        near
    };
    f32::from_bits(toward.to_bits() | 1)
}

pub(crate) fn half(f: Float, kind: HalfKind, ftz: bool, relu: bool, a: u16, b: u16, c: u16) -> u16 {
    let load = |bits: u16| {
        let x = match kind {
            HalfKind::F16 => f16_to_f32(bits),
            HalfKind::Bf16 => bf16_to_f32(bits),
        };
        let tiny = kind == HalfKind::F16 && x.abs() < f32::from_bits(0x3880_0000);
        if ftz && tiny { 0f32.copysign(x) } else { x }
    };
    match f {
        Float::Neg => return a ^ 0x8000,
        Float::Abs => return a & 0x7fff,
        _ => {}
    }
    let (x, y, z) = (f64::from(load(a)), f64::from(load(b)), f64::from(load(c)));
    let (fx, fy) = (x as f32, y as f32);
    let exact = match f {
        Float::Add => x + y,
        Float::Sub => x - y,
        Float::Mul => x * y,
        Float::Fma => sticky_fma(x, y, z),
        Float::Min => f64::from(min_max(false, false, fx, fy)),
        Float::Max => f64::from(min_max(true, false, fx, fy)),
        Float::MinNan => f64::from(min_max(false, true, fx, fy)),
        Float::MaxNan => f64::from(min_max(true, true, fx, fy)),
        Float::Ex2 => x.exp2(),
        _ => x.tanh(),
    };
    let exact = if relu && exact < 0.0 { 0.0 } else { exact };
    match kind {
        HalfKind::F16 => f64_to_f16(exact, false),
        HalfKind::Bf16 => f32_to_bf16(odd_f32(exact), false),
    }
}

/// x * y + z in f64 with a sticky last bit; the product of two halves is exact.
fn sticky_fma(x: f64, y: f64, z: f64) -> f64 {
    let product = x * y;
    let sum = product + z;
    if !sum.is_finite() {
        return sum;
    }
    let back = sum - product;
    let error = (product - (sum - back)) + (z - back);
    if error == 0.0 || sum.to_bits() & 1 != 0 {
        return sum;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away {
        sum.to_bits() | 1
    } else {
        (sum.to_bits() - 1) | 1
    })
}

#[inline(always)]
pub(crate) fn compare<T: PartialOrd>(cmp: Cmp, a: T, b: T) -> bool {
    let order = a.partial_cmp(&b);
    use std::cmp::Ordering::{Equal, Greater, Less};
    match cmp {
        Cmp::Eq => order == Some(Equal),
        Cmp::Ne => matches!(order, Some(Less | Greater)),
        Cmp::Lt => order == Some(Less),
        Cmp::Le => matches!(order, Some(Less | Equal)),
        Cmp::Gt => order == Some(Greater),
        Cmp::Ge => matches!(order, Some(Greater | Equal)),
        Cmp::Equ => matches!(order, None | Some(Equal)),
        Cmp::Neu => order != Some(Equal),
        Cmp::Ltu => matches!(order, None | Some(Less)),
        Cmp::Leu => order != Some(Greater),
        Cmp::Gtu => matches!(order, None | Some(Greater)),
        Cmp::Geu => order != Some(Less),
        Cmp::Num => order.is_some(),
        Cmp::Nan => order.is_none(),
    }
}

pub(crate) fn compare_bits(cmp: Cmp, ty: Ty, ftz: bool, a: u64, b: u64) -> bool {
    match ty {
        Ty::U16 | Ty::U8 => compare(cmp, a as u16, b as u16),
        Ty::S16 | Ty::S8 => compare(cmp, a as i16, b as i16),
        Ty::U32 => compare(cmp, a as u32, b as u32),
        Ty::S32 => compare(cmp, a as i32, b as i32),
        Ty::U64 => compare(cmp, a, b),
        Ty::S64 => compare(cmp, a as i64, b as i64),
        Ty::F64 => compare(cmp, f64::from_bits(a), f64::from_bits(b)),
        Ty::F32 | Ty::F16 | Ty::Bf16 => compare(
            cmp,
            flush(ftz, f32::from_bits(a as u32)),
            flush(ftz, f32::from_bits(b as u32)),
        ),
    }
}

pub(crate) fn round(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::IntNearest | Rounding::Nearest => x.round_ties_even(),
        Rounding::IntZero | Rounding::Zero => x.trunc(),
        Rounding::IntDown | Rounding::Down => x.floor(),
        Rounding::IntUp | Rounding::Up => x.ceil(),
        Rounding::None => x,
    }
}

fn int_range(ty: Ty) -> (i128, i128) {
    let bits = ty.bits();
    if ty.signed() {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    }
}

/// `cvt` between any two types, on bits.
pub(crate) fn convert(
    to: Ty,
    from: Ty,
    rounding: Rounding,
    sat: bool,
    ftz: bool,
    relu: bool,
    bits: u64,
) -> u64 {
    let low = |n: u32| if n == 64 { bits } else { bits & ((1 << n) - 1) };
    let (int, float) = match from {
        Ty::F16 => (0, f64::from(f16_to_f32(bits as u16))),
        Ty::Bf16 => (0, f64::from(bf16_to_f32(bits as u16))),
        Ty::F32 => (0, f64::from(flush(ftz, f32::from_bits(bits as u32)))),
        Ty::F64 => (0, f64::from_bits(bits)),
        _ => {
            let n = from.bits();
            let value = low(n);
            let signed = (value << (64 - n)) as i64 >> (64 - n);
            let value = if from.signed() {
                i128::from(signed)
            } else {
                i128::from(value)
            };
            (value, 0.0)
        }
    };
    if !to.float() {
        let (least, most) = int_range(to);
        let value = if from.float() {
            // NaN becomes 0; everything else saturates.
            let rounded = round(float, rounding);
            if rounded.is_nan() {
                0
            } else {
                (rounded as i128).clamp(least, most)
            }
        } else if sat {
            int.clamp(least, most)
        } else {
            int
        };
        let n = to.bits();
        return if n == 64 {
            value as u64
        } else {
            value as u64 & ((1 << n) - 1)
        };
    }
    if !from.float() {
        return match to {
            Ty::F32 => {
                let x = int as f32;
                u64::from(if sat { x.clamp(0.0, 1.0) } else { x }.to_bits())
            }
            Ty::F64 => (int as f64).to_bits(),
            Ty::F16 => u64::from(f64_to_f16(int as f64, false)),
            _ => u64::from(f32_to_bf16(odd_f32(int as f64), false)),
        };
    }
    let mut x = float;
    if to == from {
        x = round(x, rounding);
    }
    if relu && x < 0.0 {
        x = 0.0;
    }
    if sat {
        x = if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) };
    }
    let zero = rounding == Rounding::Zero;
    match to {
        Ty::F64 => {
            if x.is_nan() {
                NAN64
            } else {
                x.to_bits()
            }
        }
        Ty::F32 => {
            if x.is_nan() {
                u64::from(NAN32)
            } else {
                u64::from(flush(ftz, x as f32).to_bits())
            }
        }
        Ty::F16 => u64::from(f64_to_f16(x, zero)),
        _ => u64::from(f32_to_bf16(odd_f32(x), zero)),
    }
}

pub(crate) fn test(what: TestKind, wide: bool, bits: u64) -> bool {
    let class = if wide {
        f64::from_bits(bits).classify()
    } else {
        f32::from_bits(bits as u32).classify()
    };
    use std::num::FpCategory::{Infinite, Nan, Normal, Subnormal};
    match what {
        TestKind::Finite => !matches!(class, Infinite | Nan),
        TestKind::Infinite => class == Infinite,
        TestKind::Number => class != Nan,
        TestKind::NotANumber => class == Nan,
        TestKind::Normal => class == Normal,
        TestKind::Subnormal => class == Subnormal,
    }
}
