//! Instructions that touch registers only, on the 32 lanes of a warp at once.

use crate::ir::{Class, Float, Int, Logic, Op, R, Reg, SHARED_WINDOW, Space, Ty};
use crate::math;

pub(crate) const FULL: u32 = u32::MAX;

/// The register files of one warp; a predicate is a bit for each lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    pub(crate) p: Vec<u32>,
    pub(crate) r32: Vec<[u32; 32]>,
    pub(crate) r64: Vec<[u64; 32]>,
    carry: u32,
}

/// An integer division by zero, in the lowest such lane.
pub(crate) struct ZeroDivisor(pub(crate) u32);

macro_rules! lanes {
    ($out:expr, $mask:expr, $i:ident => $value:expr) => {{
        let out = $out;
        if $mask == FULL {
            for $i in 0..32 {
                out[$i] = $value;
            }
        } else {
            for $i in 0..32 {
                if $mask >> $i & 1 != 0 {
                    out[$i] = $value;
                }
            }
        }
    }};
}

/// Evaluates `$body` with the enum value as a constant, so that each function gets a loop of its own.
macro_rules! constant {
    ($ty:ident, $f:expr, [$($v:ident),*], $name:ident => $body:expr) => {
        match $f {
            $($ty::$v => { const $name: $ty = $ty::$v; $body })*
            #[allow(unreachable_patterns, non_snake_case)]
            $name => $body,
        }
    };
}

#[inline(always)]
fn bits(mask: u32, f: impl Fn(usize) -> bool) -> u32 {
    let mut out = 0;
    for i in 0..32 {
        out |= u32::from(f(i)) << i;
    }
    out & mask
}

impl Registers {
    pub(crate) fn new(counts: [u16; 3], fill: u32) -> Self {
        let wide = u64::from(fill) << 32 | u64::from(fill);
        Registers {
            p: vec![0; counts[Class::Pred as usize] as usize],
            r32: vec![[fill; 32]; counts[Class::B32 as usize] as usize],
            r64: vec![[wide; 32]; counts[Class::B64 as usize] as usize],
            carry: 0,
        }
    }

    #[inline(always)]
    pub(crate) fn get(&self, reg: Reg, lane: usize) -> u64 {
        match reg.class {
            Class::Pred => u64::from(self.p[reg.index as usize] >> lane & 1),
            Class::B32 => u64::from(self.r32[reg.index as usize][lane]),
            Class::B64 => self.r64[reg.index as usize][lane],
        }
    }

    #[inline(always)]
    pub(crate) fn put(&mut self, reg: Reg, lane: usize, value: u64) {
        match reg.class {
            Class::Pred => self.put_pred(reg.index, 1 << lane, if value != 0 { FULL } else { 0 }),
            Class::B32 => self.r32[reg.index as usize][lane] = value as u32,
            Class::B64 => self.r64[reg.index as usize][lane] = value,
        }
    }

    #[inline(always)]
    pub(crate) fn put_pred(&mut self, reg: R, mask: u32, value: u32) {
        let p = &mut self.p[reg as usize];
        *p = (*p & !mask) | (value & mask);
    }

    #[inline(always)]
    fn map1(&mut self, d: R, a: R, mask: u32, f: impl Fn(u32) -> u32) {
        let x = self.r32[a as usize];
        lanes!(&mut self.r32[d as usize], mask, i => f(x[i]));
    }

    #[inline(always)]
    fn map2(&mut self, d: R, a: R, b: R, mask: u32, f: impl Fn(u32, u32) -> u32) {
        let (x, y) = (self.r32[a as usize], self.r32[b as usize]);
        lanes!(&mut self.r32[d as usize], mask, i => f(x[i], y[i]));
    }

    #[inline(always)]
    fn map3(&mut self, d: R, a: R, b: R, c: R, mask: u32, f: impl Fn(u32, u32, u32) -> u32) {
        let (x, y, z) = (
            self.r32[a as usize],
            self.r32[b as usize],
            self.r32[c as usize],
        );
        lanes!(&mut self.r32[d as usize], mask, i => f(x[i], y[i], z[i]));
    }

    #[inline(always)]
    fn wide2(&mut self, d: R, a: R, b: R, mask: u32, f: impl Fn(u64, u64) -> u64) {
        let (x, y) = (self.r64[a as usize], self.r64[b as usize]);
        lanes!(&mut self.r64[d as usize], mask, i => f(x[i], y[i]));
    }

    #[inline(always)]
    fn wide3(&mut self, d: R, a: R, b: R, c: R, mask: u32, f: impl Fn(u64, u64, u64) -> u64) {
        let (x, y, z) = (
            self.r64[a as usize],
            self.r64[b as usize],
            self.r64[c as usize],
        );
        lanes!(&mut self.r64[d as usize], mask, i => f(x[i], y[i], z[i]));
    }

    fn each(&mut self, mask: u32, d: Reg, f: impl Fn(&Self, usize) -> u64) {
        for lane in 0..32 {
            if mask >> lane & 1 != 0 {
                let value = f(self, lane);
                self.put(d, lane, value);
            }
        }
    }

    fn divisor(&self, f: Int, b: Reg, mask: u32) -> Result<(), ZeroDivisor> {
        if matches!(f, Int::DivS | Int::DivU | Int::RemS | Int::RemU) {
            for lane in 0..32 {
                if mask >> lane & 1 != 0 && self.get(b, lane) == 0 {
                    return Err(ZeroDivisor(lane as u32));
                }
            }
        }
        Ok(())
    }

    /// Executes an instruction that touches registers only, for the lanes of `mask`.
    pub(crate) fn execute(&mut self, op: &Op, mask: u32) -> Result<(), ZeroDivisor> {
        match *op {
            Op::Mov32 { d, a } => self.map1(d, a, mask, |x| x),
            Op::Mov64 { d, a } => self.wide2(d, a, a, mask, |x, _| x),
            Op::MovPred { d, a } => self.put_pred(d, mask, self.p[a as usize]),
            Op::PredNot { d, a } => self.put_pred(d, mask, !self.p[a as usize]),
            Op::PredLogic { f, d, a, b } => {
                let (x, y) = (self.p[a as usize], self.p[b as usize]);
                self.put_pred(d, mask, logic(f, x, y));
            }
            Op::Int32 { f, d, a, b } => {
                self.divisor(
                    f,
                    Reg {
                        class: Class::B32,
                        index: b,
                    },
                    mask,
                )?;
                constant!(Int, f, [Add, Sub, Mul, And, Or, Xor, Shl, ShrU, ShrS, MinS, MinU, MaxS, MaxU],
                    F => self.map2(d, a, b, mask, |x, y| math::int32(F, x, y)));
            }
            Op::Int64 { f, d, a, b } => {
                self.divisor(
                    f,
                    Reg {
                        class: Class::B64,
                        index: b,
                    },
                    mask,
                )?;
                constant!(Int, f, [Add, Sub, Mul, And, Or], F => self.wide2(d, a, b, mask, |x, y| math::int64(F, x, y)));
            }
            Op::Int16 { f, d, a, b } => {
                self.divisor(
                    f,
                    Reg {
                        class: Class::B32,
                        index: b,
                    },
                    mask,
                )?;
                self.map2(d, a, b, mask, |x, y| math::int16(f, x, y));
            }
            Op::Shift64 { f, d, a, b } => {
                let (x, y) = (self.r64[a as usize], self.r32[b as usize]);
                constant!(Int, f, [Shl, ShrU, ShrS],
                    F => lanes!(&mut self.r64[d as usize], mask, i => math::int64(F, x[i], u64::from(y[i]))));
            }
            Op::MulWide32 { signed, d, a, b } => {
                let (x, y) = (self.r32[a as usize], self.r32[b as usize]);
                if signed {
                    lanes!(&mut self.r64[d as usize], mask, i => (i64::from(x[i] as i32) * i64::from(y[i] as i32)) as u64);
                } else {
                    lanes!(&mut self.r64[d as usize], mask, i => u64::from(x[i]) * u64::from(y[i]));
                }
            }
            Op::MulWide16 { signed, d, a, b } => {
                self.map2(d, a, b, mask, |x, y| wide16(signed, x, y))
            }
            Op::MadWide32 { signed, d, a, b, c } => {
                let (x, y, z) = (
                    self.r32[a as usize],
                    self.r32[b as usize],
                    self.r64[c as usize],
                );
                lanes!(&mut self.r64[d as usize], mask, i => {
                    let product = if signed {
                        (i64::from(x[i] as i32) * i64::from(y[i] as i32)) as u64
                    } else {
                        u64::from(x[i]) * u64::from(y[i])
                    };
                    product.wrapping_add(z[i])
                });
            }
            Op::MadWide16 { signed, d, a, b, c } => {
                self.map3(d, a, b, c, mask, |x, y, z| {
                    wide16(signed, x, y).wrapping_add(z)
                });
            }
            Op::Mad32 { f, d, a, b, c } => self.map3(d, a, b, c, mask, |x, y, z| {
                math::int32(f, x, y).wrapping_add(z)
            }),
            Op::Mad64 { f, d, a, b, c } => self.wide3(d, a, b, c, mask, |x, y, z| {
                math::int64(f, x, y).wrapping_add(z)
            }),
            Op::Mad16 { d, a, b, c } => self.map3(d, a, b, c, mask, |x, y, z| {
                x.wrapping_mul(y).wrapping_add(z) & 0xffff
            }),
            Op::Fma32 {
                ftz,
                sat,
                d,
                a,
                b,
                c,
            } => {
                if ftz || sat {
                    self.map3(d, a, b, c, mask, |x, y, z| math::fma32(ftz, sat, x, y, z));
                } else {
                    self.map3(d, a, b, c, mask, |x, y, z| {
                        math::fma32(false, false, x, y, z)
                    });
                }
            }
            Op::F32x1 { f, ftz, sat, d, a } => {
                self.map1(d, a, mask, |x| math::f32_one(f, ftz, sat, x))
            }
            Op::F32x2 {
                f,
                ftz,
                sat,
                d,
                a,
                b,
            } => {
                if ftz || sat {
                    self.map2(d, a, b, mask, |x, y| math::f32_two(f, ftz, sat, x, y));
                } else {
                    constant!(Float, f, [Add, Sub, Mul, Div],
                        F => self.map2(d, a, b, mask, |x, y| math::f32_two(F, false, false, x, y)));
                }
            }
            Op::Setp {
                cmp,
                ty,
                ftz,
                d,
                q,
                a,
                b,
                combine,
            } => {
                let result = match (ty, a.class) {
                    (Ty::U32, Class::B32) => {
                        let (x, y) = (&self.r32[a.index as usize], &self.r32[b.index as usize]);
                        bits(mask, |i| math::compare(cmp, x[i], y[i]))
                    }
                    (Ty::S32, Class::B32) => {
                        let (x, y) = (&self.r32[a.index as usize], &self.r32[b.index as usize]);
                        bits(mask, |i| math::compare(cmp, x[i] as i32, y[i] as i32))
                    }
                    _ => bits(mask, |i| {
                        math::compare_bits(cmp, ty, ftz, self.get(a, i), self.get(b, i))
                    }),
                };
                let (first, second) = match combine {
                    None => (result, !result),
                    Some((f, r, negate)) => {
                        let r = if negate {
                            !self.p[r as usize]
                        } else {
                            self.p[r as usize]
                        };
                        (logic(f, result, r), logic(f, !result, r))
                    }
                };
                self.put_pred(d, mask, first);
                if let Some(q) = q {
                    self.put_pred(q, mask, second);
                }
            }
            Op::Selp32 { d, a, b, p } => {
                let (x, y, p) = (
                    self.r32[a as usize],
                    self.r32[b as usize],
                    self.p[p as usize],
                );
                lanes!(&mut self.r32[d as usize], mask, i => if p >> i & 1 != 0 { x[i] } else { y[i] });
            }
            Op::Selp64 { d, a, b, p } => {
                let (x, y, p) = (
                    self.r64[a as usize],
                    self.r64[b as usize],
                    self.p[p as usize],
                );
                lanes!(&mut self.r64[d as usize], mask, i => if p >> i & 1 != 0 { x[i] } else { y[i] });
            }
            Op::Extend32 {
                signed,
                from,
                to,
                d,
                a,
            } => {
                let keep = if to >= 32 { u32::MAX } else { (1 << to) - 1 };
                self.map1(d, a, mask, |x| {
                    extend(signed, from, u64::from(x)) as u32 & keep
                });
            }
            Op::Extend64 { signed, from, d, a } => {
                let x = self.r32[a as usize];
                lanes!(&mut self.r64[d as usize], mask, i => extend(signed, from, u64::from(x[i])));
            }
            Op::Narrow {
                signed,
                from,
                to,
                d,
                a,
            } => {
                let x = self.r64[a as usize];
                let keep = if to >= 32 { u32::MAX } else { (1 << to) - 1 };
                lanes!(&mut self.r32[d as usize], mask, i => extend(signed, from, x[i]) as u32 & keep);
            }
            Op::Join32 {
                d,
                parts: [low, high],
            } => self.map2(d, low, high, mask, |x, y| x & 0xffff | y << 16),
            Op::Join64 {
                d,
                parts: [low, high],
            } => {
                let (x, y) = (self.r32[low as usize], self.r32[high as usize]);
                lanes!(&mut self.r64[d as usize], mask, i => u64::from(x[i]) | u64::from(y[i]) << 32);
            }
            Op::Split32 { d: [low, high], a } => {
                let x = self.r32[a as usize];
                lanes!(&mut self.r32[low as usize], mask, i => x[i] & 0xffff);
                lanes!(&mut self.r32[high as usize], mask, i => x[i] >> 16);
            }
            Op::Split64 { d: [low, high], a } => {
                let x = self.r64[a as usize];
                lanes!(&mut self.r32[low as usize], mask, i => x[i] as u32);
                lanes!(&mut self.r32[high as usize], mask, i => (x[i] >> 32) as u32);
            }
            Op::Round32 { d, a, round } => self.map1(d, a, mask, |x| {
                let y = math::round(f64::from(f32::from_bits(x)), round) as f32;
                if y.is_nan() { math::NAN32 } else { y.to_bits() }
            }),
            Op::CvtF32I32 { d, a } => self.map1(d, a, mask, |x| f32::from_bits(x) as i32 as u32),
            _ => self.rare(op, mask),
        }
        Ok(())
    }

    #[inline(never)]
    fn rare(&mut self, op: &Op, mask: u32) {
        let b32 = |index| Reg {
            class: Class::B32,
            index,
        };
        match *op {
            Op::Carry {
                sub,
                wide,
                carry,
                set,
                d,
                a,
                b,
            } => {
                let class = if wide { Class::B64 } else { Class::B32 };
                let reg = |index| Reg { class, index };
                for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
                    let limit = if wide {
                        u128::from(u64::MAX)
                    } else {
                        u128::from(u32::MAX)
                    };
                    let (x, y) = (
                        u128::from(self.get(reg(a), lane)),
                        u128::from(self.get(reg(b), lane)),
                    );
                    let c = u128::from(carry && self.carry >> lane & 1 != 0);
                    // The carry of a subtraction is its borrow.
                    let (value, out) = if sub {
                        (x.wrapping_sub(y).wrapping_sub(c), x < y + c)
                    } else {
                        (x + y + c, x + y + c > limit)
                    };
                    self.put(reg(d), lane, (value & limit) as u64);
                    if set {
                        self.carry = (self.carry & !(1 << lane)) | u32::from(out) << lane;
                    }
                }
            }
            Op::Count { f, wide, d, a } => {
                let a = Reg {
                    class: if wide { Class::B64 } else { Class::B32 },
                    index: a,
                };
                self.each(mask, b32(d), |r, i| {
                    u64::from(math::count(f, wide, r.get(a, i)))
                });
            }
            Op::Shf {
                left,
                clamp,
                d,
                a,
                b,
                c,
            } => self.map3(d, a, b, c, mask, |low, high, c| {
                let n = if clamp { c.min(32) } else { c & 31 };
                let both = u64::from(high) << 32 | u64::from(low);
                if left {
                    (both << n >> 32) as u32
                } else {
                    (both >> n) as u32
                }
            }),
            Op::Prmt { d, a, b, c, mode } => {
                self.map3(d, a, b, c, mask, |x, y, z| math::prmt(x, y, z, mode))
            }
            Op::Bfe {
                wide,
                signed,
                d,
                a,
                b,
                c,
            } => {
                let class = if wide { Class::B64 } else { Class::B32 };
                let (d, a) = (Reg { class, index: d }, Reg { class, index: a });
                self.each(mask, d, |r, i| {
                    math::bfe(
                        wide,
                        signed,
                        r.get(a, i),
                        r.r32[b as usize][i],
                        r.r32[c as usize][i],
                    )
                });
            }
            Op::Bfi {
                wide,
                d,
                a,
                b,
                c,
                e,
            } => {
                let class = if wide { Class::B64 } else { Class::B32 };
                let reg = |index| Reg { class, index };
                self.each(mask, reg(d), |r, i| {
                    math::bfi(
                        wide,
                        r.get(reg(a), i),
                        r.get(reg(b), i),
                        r.r32[c as usize][i],
                        r.r32[e as usize][i],
                    )
                });
            }
            Op::Lop3 { d, a, b, c, table } => {
                self.map3(d, a, b, c, mask, |x, y, z| math::lop3(x, y, z, table))
            }
            Op::Dp2a {
                high,
                signed_a,
                signed_b,
                d,
                a,
                b,
                c,
            } => self.map3(d, a, b, c, mask, |x, y, z| {
                (0..2).fold(z, |sum, i| {
                    let u = extend(signed_a, 16, u64::from(x >> (16 * i))) as u32;
                    let v =
                        extend(signed_b, 8, u64::from(y >> (8 * (i + 2 * u32::from(high))))) as u32;
                    sum.wrapping_add(u.wrapping_mul(v))
                })
            }),
            Op::Dp4a {
                signed_a,
                signed_b,
                d,
                a,
                b,
                c,
            } => self.map3(d, a, b, c, mask, |x, y, z| {
                (0..4).fold(z, |sum, i| {
                    let u = extend(signed_a, 8, u64::from(x >> (8 * i))) as u32;
                    let v = extend(signed_b, 8, u64::from(y >> (8 * i))) as u32;
                    sum.wrapping_add(u.wrapping_mul(v))
                })
            }),
            Op::Sad { signed, d, a, b, c } => self.map3(d, a, b, c, mask, |x, y, z| {
                z.wrapping_add(if signed {
                    (x as i32).abs_diff(y as i32)
                } else {
                    x.abs_diff(y)
                })
            }),
            Op::F64 { f, d, a, b, c } => {
                self.wide3(d, a, b, c, mask, |x, y, z| math::f64_op(f, x, y, z))
            }
            Op::Packed { f, ftz, d, a, b, c } => self.wide3(d, a, b, c, mask, |x, y, z| {
                let one = |s: u32| {
                    let (x, y, z) = ((x >> s) as u32, (y >> s) as u32, (z >> s) as u32);
                    let r = if f == Float::Fma {
                        math::fma32(ftz, false, x, y, z)
                    } else {
                        math::f32_two(f, ftz, false, x, y)
                    };
                    u64::from(r) << s
                };
                one(0) | one(32)
            }),
            Op::Half {
                f,
                kind,
                pair,
                ftz,
                relu,
                d,
                a,
                b,
                c,
            } => self.map3(d, a, b, c, mask, |x, y, z| {
                let one = |s: u32| {
                    u32::from(math::half(
                        f,
                        kind,
                        ftz,
                        relu,
                        (x >> s) as u16,
                        (y >> s) as u16,
                        (z >> s) as u16,
                    )) << s
                };
                if pair { one(0) | one(16) } else { one(0) }
            }),
            Op::Set {
                cmp,
                ty,
                ftz,
                float,
                d,
                a,
                b,
            } => {
                let yes = if float { 0x3f80_0000 } else { 0xffff_ffff };
                self.each(mask, b32(d), |r, i| {
                    if math::compare_bits(cmp, ty, ftz, r.get(a, i), r.get(b, i)) {
                        yes
                    } else {
                        0
                    }
                });
            }
            Op::Slct { d, a, b, c, float } => self.each(mask, d, |r, i| {
                let c = r.r32[c as usize][i];
                let first = if float {
                    f32::from_bits(c) >= 0.0
                } else {
                    c as i32 >= 0
                };
                r.get(if first { a } else { b }, i)
            }),
            Op::Cvt {
                to,
                from,
                round,
                sat,
                ftz,
                relu,
                d,
                a,
            } => {
                self.each(mask, d, |r, i| {
                    let value = math::convert(to, from, round, sat, ftz, relu, r.get(a, i));
                    // A narrow signed result in a wider register is sign-extended.
                    if to.signed() && d.class == Class::B64 {
                        extend(true, to.bits() as u8, value)
                    } else {
                        value
                    }
                });
            }
            Op::CvtPair {
                kind,
                zero,
                relu,
                d,
                a,
                b,
            } => self.map2(d, a, b, mask, |high, low| {
                let one = |x: u32| {
                    let x = f32::from_bits(x);
                    let x = if relu && x < 0.0 { 0.0 } else { x };
                    u32::from(match kind {
                        crate::ir::HalfKind::F16 => math::f64_to_f16(f64::from(x), zero),
                        crate::ir::HalfKind::Bf16 => math::f32_to_bf16(x, zero),
                    })
                };
                one(high) << 16 | one(low)
            }),
            Op::Testp { what, d, a } => {
                let result = bits(mask, |i| {
                    math::test(what, a.class == Class::B64, self.get(a, i))
                });
                self.put_pred(d, mask, result);
            }
            Op::Join16x4 { d, parts } => {
                self.each(
                    mask,
                    Reg {
                        class: Class::B64,
                        index: d,
                    },
                    |r, i| {
                        parts.iter().rev().fold(0, |word, &part| {
                            word << 16 | u64::from(r.r32[part as usize][i] & 0xffff)
                        })
                    },
                );
            }
            Op::Split16x4 { d, a } => {
                let x = self.r64[a as usize];
                for (n, d) in d.into_iter().enumerate() {
                    lanes!(&mut self.r32[d as usize], mask, i => (x[i] >> (16 * n)) as u32 & 0xffff);
                }
            }
            Op::ToGeneric { base, d, a } => self.each(mask, d, |r, i| r.get(a, i) | base),
            // Windows lie above every address inside them.
            Op::FromGeneric { d, a } => {
                self.each(mask, d, |r, i| r.get(a, i) & 0x00ff_ffff_ffff_ffff)
            }
            Op::Isspacep { space, d, a } => {
                let x = self.r64[a as usize];
                let result = bits(mask, |i| {
                    let window = x[i] & 0xff00_0000_0000_0000;
                    match space {
                        Space::SharedCluster => window == SHARED_WINDOW,
                        Space::SharedCta => {
                            window == SHARED_WINDOW && x[i] as u32 >> crate::ir::RANK_SHIFT == 0
                        }
                        Space::Local => window == crate::ir::LOCAL_WINDOW,
                        Space::Param => window == crate::ir::PARAM_WINDOW,
                        _ => window == 0,
                    }
                });
                self.put_pred(d, mask, result);
            }
            _ => unreachable!("{op:?} is executed elsewhere"),
        }
    }
}

#[inline(always)]
fn logic(f: Logic, a: u32, b: u32) -> u32 {
    match f {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

#[inline(always)]
fn wide16(signed: bool, a: u32, b: u32) -> u32 {
    if signed {
        (i32::from(a as i16) * i32::from(b as i16)) as u32
    } else {
        (a & 0xffff) * (b & 0xffff)
    }
}

#[inline(always)]
pub(crate) fn extend(signed: bool, from: u8, x: u64) -> u64 {
    let shift = 64 - u32::from(from);
    if signed {
        ((x << shift) as i64 >> shift) as u64
    } else {
        x << shift >> shift
    }
}
