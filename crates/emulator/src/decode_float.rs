//! Opcodes of float arithmetic, comparisons and conversions.

use crate::decode::{Decoder, Operand, Parts};
use crate::decode_arith::{class, compare};
use crate::error::Error;
use crate::ir::{Class, Float, HalfKind, Logic, Op, R, Rounding, Ty};

impl Decoder<'_> {
    /// The float function a name means; consumes `.rn`, `.approx`, `.full` and `.NaN`.
    fn float(&mut self, p: &mut Parts) -> Result<Float, Error> {
        let (nearest, approx, nan) = (p.take("rn"), p.take("approx"), p.take("NaN"));
        let full = p.take("full");
        let f = match p.name {
            "add" => Float::Add,
            "sub" => Float::Sub,
            "mul" => Float::Mul,
            "fma" | "mad" => Float::Fma,
            "div" => Float::Div,
            "neg" => Float::Neg,
            "abs" => Float::Abs,
            "sqrt" => Float::Sqrt,
            "rcp" => Float::Rcp,
            "rsqrt" => Float::Rsqrt,
            "ex2" => Float::Ex2,
            "lg2" => Float::Lg2,
            "sin" => Float::Sin,
            "cos" => Float::Cos,
            "tanh" => Float::Tanh,
            "copysign" => Float::Copysign,
            "min" if nan => Float::MinNan,
            "min" => Float::Min,
            "max" if nan => Float::MaxNan,
            "max" => Float::Max,
            _ => return p.unknown(),
        };
        let exact = matches!(f, Float::Fma | Float::Div | Float::Sqrt | Float::Rcp);
        let approximate = matches!(
            f,
            Float::Rsqrt | Float::Ex2 | Float::Lg2 | Float::Sin | Float::Cos | Float::Tanh
        );
        let either = approx || (full && f == Float::Div);
        if (exact && nearest == either)
            || (approximate && !approx)
            || (nan && !matches!(f, Float::MinNan | Float::MaxNan))
        {
            return p.unknown();
        }
        Ok(f)
    }

    pub(crate) fn f32_op(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let (ftz, sat) = (p.take("ftz"), p.take("sat"));
        let f = self.float(p)?;
        match f {
            Float::Fma => {
                let [d, a, b, c] = self.four(p, Class::B32)?;
                Ok(Op::Fma32 {
                    ftz,
                    sat,
                    d,
                    a,
                    b,
                    c,
                })
            }
            Float::Add
            | Float::Sub
            | Float::Mul
            | Float::Div
            | Float::Min
            | Float::Max
            | Float::MinNan
            | Float::MaxNan
            | Float::Copysign => {
                self.expect(p, 3)?;
                let (a, b) = (self.src(p, 1, Class::B32)?, self.src(p, 2, Class::B32)?);
                // copysign a, b: the sign of a on the magnitude of b.
                Ok(Op::F32x2 {
                    f,
                    ftz,
                    sat,
                    d: self.dst(p, Class::B32)?,
                    a,
                    b,
                })
            }
            _ => {
                self.expect(p, 2)?;
                Ok(Op::F32x1 {
                    f,
                    ftz,
                    sat,
                    d: self.dst(p, Class::B32)?,
                    a: self.src(p, 1, Class::B32)?,
                })
            }
        }
    }

    fn operands_of(&mut self, p: &Parts, f: Float, class: Class) -> Result<[R; 4], Error> {
        let d = self.dst(p, class)?;
        let a = self.src(p, 1, class)?;
        let count = p.operands.len();
        let b = if count > 2 { self.src(p, 2, class)? } else { a };
        let c = if count > 3 { self.src(p, 3, class)? } else { a };
        let expected = match f {
            Float::Fma => 4,
            Float::Add
            | Float::Sub
            | Float::Mul
            | Float::Div
            | Float::Min
            | Float::Max
            | Float::MinNan
            | Float::MaxNan
            | Float::Copysign => 3,
            _ => 2,
        };
        self.expect(p, expected)?;
        Ok([d, a, b, c])
    }

    pub(crate) fn f64_op(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let f = self.float(p)?;
        if matches!(
            f,
            Float::Ex2 | Float::Lg2 | Float::Sin | Float::Cos | Float::Tanh
        ) {
            return p.unknown();
        }
        let [d, a, b, c] = self.operands_of(p, f, Class::B64)?;
        Ok(Op::F64 { f, d, a, b, c })
    }

    pub(crate) fn packed(&mut self, p: &mut Parts, ty: &str) -> Result<Op, Error> {
        let (ftz, relu) = (p.take("ftz"), p.take("relu"));
        if ty != "f32x2" && p.take("sat") {
            return p.unknown();
        }
        let f = self.float(p)?;
        if ty == "f32x2" {
            if relu || !matches!(f, Float::Add | Float::Sub | Float::Mul | Float::Fma) {
                return p.unknown();
            }
            let [d, a, b, c] = self.operands_of(p, f, Class::B64)?;
            return Ok(Op::Packed { f, ftz, d, a, b, c });
        }
        if matches!(
            f,
            Float::Div
                | Float::Sqrt
                | Float::Rcp
                | Float::Rsqrt
                | Float::Lg2
                | Float::Sin
                | Float::Cos
                | Float::Copysign
        ) || (relu && f != Float::Fma)
        {
            return p.unknown();
        }
        let kind = if ty.starts_with("bf16") {
            HalfKind::Bf16
        } else {
            HalfKind::F16
        };
        let [d, a, b, c] = self.operands_of(p, f, Class::B32)?;
        Ok(Op::Half {
            f,
            kind,
            pair: ty.ends_with("x2"),
            ftz,
            relu,
            d,
            a,
            b,
            c,
        })
    }

    pub(crate) fn setp(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let Some(name) = p.first() else {
            return p.unknown();
        };
        let ftz = p.take("ftz");
        let logic = p
            .one_of(&["and", "or", "xor"])
            .map(|i| [Logic::And, Logic::Or, Logic::Xor][i]);
        let ty = p.ty()?;
        let Some(cmp) = compare(name) else {
            return p.unknown();
        };
        if matches!(ty, Ty::F16 | Ty::Bf16 | Ty::U8 | Ty::S8) {
            return p.unknown();
        }
        self.expect(p, if logic.is_some() { 4 } else { 3 })?;
        let (d, q) = match p.operands[0].clone() {
            Operand::Pair(d, q) => (
                self.dest(p, Some(&d), Class::Pred)?,
                Some(self.dest(p, Some(&q), Class::Pred)?),
            ),
            d => (self.dest(p, Some(&d), Class::Pred)?, None),
        };
        let (a, b) = (self.any(p, 1, class(ty))?, self.any(p, 2, class(ty))?);
        let combine = match logic {
            Some(logic) => {
                let (r, negate) = self.pred(p, 3)?;
                Some((logic, r, negate))
            }
            None => None,
        };
        Ok(Op::Setp {
            cmp,
            ty,
            ftz,
            d,
            q,
            a,
            b,
            combine,
        })
    }

    pub(crate) fn cvt(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let (sat, ftz, relu) = (p.take("sat"), p.take("ftz"), p.take("relu"));
        let round = match p.one_of(&["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"]) {
            Some(0) => Rounding::Nearest,
            Some(1) => Rounding::Zero,
            Some(2) => Rounding::Down,
            Some(3) => Rounding::Up,
            Some(4) => Rounding::IntNearest,
            Some(5) => Rounding::IntZero,
            Some(6) => Rounding::IntDown,
            Some(_) => Rounding::IntUp,
            None => Rounding::None,
        };
        if p.has("bf16x2") || p.has("f16x2") {
            let kind = if p.take("bf16x2") {
                HalfKind::Bf16
            } else {
                HalfKind::F16
            };
            p.take("f16x2");
            self.expect(p, 3)?;
            if p.ty()? != Ty::F32
                || sat
                || ftz
                || !matches!(round, Rounding::Nearest | Rounding::Zero)
            {
                return p.unknown();
            }
            let (d, a, b) = (
                self.dst(p, Class::B32)?,
                self.src(p, 1, Class::B32)?,
                self.src(p, 2, Class::B32)?,
            );
            return Ok(Op::CvtPair {
                kind,
                zero: round == Rounding::Zero,
                relu,
                d,
                a,
                b,
            });
        }
        let (from, to) = (p.ty()?, p.ty()?);
        self.expect(p, 2)?;
        let a = self.any(p, 1, class(from))?;
        let d = match p.operands[0] {
            Operand::Reg(reg) if reg.class != Class::Pred => reg,
            _ => return p.unknown(),
        };
        if !from.float() && !to.float() && !sat {
            let (from_bits, to_bits) = (from.bits() as u8, to.bits() as u8);
            let from_bits = from_bits.min(to_bits);
            // A register wider than a signed destination holds its sign-extension.
            let keep = if to.signed() && to_bits < 32 {
                32
            } else {
                to_bits
            };
            let signed = if from_bits == to_bits {
                to.signed()
            } else {
                from.signed()
            };
            return Ok(match (a.class, d.class) {
                (Class::B32, Class::B32) => Op::Extend32 {
                    signed,
                    from: from_bits,
                    to: keep,
                    d: d.index,
                    a: a.index,
                },
                (Class::B32, Class::B64) => Op::Extend64 {
                    signed,
                    from: from_bits,
                    d: d.index,
                    a: a.index,
                },
                (Class::B64, Class::B32) => Op::Narrow {
                    signed,
                    from: from_bits,
                    to: keep,
                    d: d.index,
                    a: a.index,
                },
                _ => Op::Cvt {
                    to,
                    from,
                    round,
                    sat,
                    ftz,
                    relu,
                    d,
                    a,
                },
            });
        }
        let to_int = from.float() && !to.float();
        let integral = matches!(
            round,
            Rounding::IntNearest | Rounding::IntZero | Rounding::IntDown | Rounding::IntUp
        );
        let narrowing = to.float()
            && (!from.float() || to.bits() < from.bits() || (to != from && to.bits() == 16));
        let directed = matches!(round, Rounding::Zero | Rounding::Down | Rounding::Up);
        let good = match (to_int, narrowing) {
            (true, _) => integral,
            (_, true) => {
                round == Rounding::Nearest
                    || (directed && from == Ty::F32 && to.bits() == 16 && round == Rounding::Zero)
            }
            _ => round == Rounding::None || (integral && to == from),
        };
        if !good || (relu && to.bits() != 16) {
            return p.unknown();
        }
        if (from, to, round, sat, ftz) == (Ty::F32, Ty::S32, Rounding::IntZero, false, false) {
            return Ok(Op::CvtF32I32 {
                d: d.index,
                a: a.index,
            });
        }
        if from == Ty::F32 && to == Ty::F32 && integral && !sat && !ftz {
            return Ok(Op::Round32 {
                d: d.index,
                a: a.index,
                round,
            });
        }
        Ok(Op::Cvt {
            to,
            from,
            round,
            sat,
            ftz,
            relu,
            d,
            a,
        })
    }
}
