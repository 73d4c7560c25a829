//! Opcodes that touch registers only.

use crate::decode::{Decoder, Operand, Parts, parse_ty, window};
use crate::error::Error;
use crate::ir::{Class, Cmp, Count, Int, Logic, Op, R, Reg, Space, TestKind, Ty};

pub(crate) fn class(ty: Ty) -> Class {
    if ty.bits() == 64 {
        Class::B64
    } else {
        Class::B32
    }
}

pub(crate) fn compare(name: &str) -> Option<Cmp> {
    Some(match name {
        "eq" => Cmp::Eq,
        "ne" => Cmp::Ne,
        "lt" | "lo" => Cmp::Lt,
        "le" | "ls" => Cmp::Le,
        "gt" | "hi" => Cmp::Gt,
        "ge" | "hs" => Cmp::Ge,
        "equ" => Cmp::Equ,
        "neu" => Cmp::Neu,
        "ltu" => Cmp::Ltu,
        "leu" => Cmp::Leu,
        "gtu" => Cmp::Gtu,
        "geu" => Cmp::Geu,
        "num" => Cmp::Num,
        "nan" => Cmp::Nan,
        _ => return None,
    })
}

impl Decoder<'_> {
    /// Decodes an arithmetic statement, or leaves it alone.
    pub(crate) fn arithmetic(&mut self, p: &mut Parts) -> Result<Option<Op>, Error> {
        let name = p.name;
        Ok(Some(match name {
            "mov" => self.mov(p)?,
            "add" | "sub" | "mul" | "div" | "min" | "max" | "neg" | "abs" | "fma" | "sqrt"
            | "rcp" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "mad"
            | "rem" => self.number_op(p)?,
            "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "brev" => self.bit_op(p)?,
            "addc" | "subc" => self.carry(p, true)?,
            "popc" | "clz" | "bfind" => {
                let shift = p.take("shiftamt");
                let ty = p.ty()?;
                let f = match name {
                    "popc" => Count::Popc,
                    "clz" => Count::Clz,
                    _ if shift => Count::BfindShift,
                    _ if ty.signed() => Count::BfindSigned,
                    _ => Count::Bfind,
                };
                if shift && ty.signed() {
                    return p.unknown();
                }
                Op::Count {
                    f,
                    wide: ty.bits() == 64,
                    d: self.dst(p, Class::B32)?,
                    a: self.src(p, 1, class(ty))?,
                }
            }
            "shf" => {
                let left = p.take("l");
                let right = p.take("r");
                let clamp = p.take("clamp");
                let wrap = p.take("wrap");
                if p.ty()? != Ty::U32 || left == right || clamp == wrap {
                    return p.unknown();
                }
                let [d, a, b, c] = self.four(p, Class::B32)?;
                Op::Shf {
                    left,
                    clamp,
                    d,
                    a,
                    b,
                    c,
                }
            }
            "prmt" => {
                let mode = p
                    .one_of(&["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
                    .map_or(0, |m| m as u8 + 1);
                p.ty()?;
                let [d, a, b, c] = self.four(p, Class::B32)?;
                Op::Prmt { d, a, b, c, mode }
            }
            "bfe" => {
                let ty = p.ty()?;
                self.expect(p, 4)?;
                let (d, a) = (self.dst(p, class(ty))?, self.src(p, 1, class(ty))?);
                let (b, c) = (self.src(p, 2, Class::B32)?, self.src(p, 3, Class::B32)?);
                Op::Bfe {
                    wide: ty.bits() == 64,
                    signed: ty.signed(),
                    d,
                    a,
                    b,
                    c,
                }
            }
            "bfi" => {
                let ty = p.ty()?;
                self.expect(p, 5)?;
                let d = self.dst(p, class(ty))?;
                let (a, b) = (self.src(p, 1, class(ty))?, self.src(p, 2, class(ty))?);
                let (c, e) = (self.src(p, 3, Class::B32)?, self.src(p, 4, Class::B32)?);
                Op::Bfi {
                    wide: ty.bits() == 64,
                    d,
                    a,
                    b,
                    c,
                    e,
                }
            }
            "lop3" => {
                p.ty()?;
                self.expect(p, 5)?;
                let Some(Operand::Imm(table)) = p.operands.pop() else {
                    return p.unknown();
                };
                let [d, a, b, c] = self.four(p, Class::B32)?;
                Op::Lop3 {
                    d,
                    a,
                    b,
                    c,
                    table: table as u8,
                }
            }
            "dp2a" | "dp4a" => {
                let high = p.take("hi");
                let low = p.take("lo");
                let (b_ty, a_ty) = (p.ty()?, p.ty()?);
                let (signed_a, signed_b) = (a_ty.signed(), b_ty.signed());
                let [d, a, b, c] = self.four(p, Class::B32)?;
                match name {
                    "dp2a" if high != low => Op::Dp2a {
                        high,
                        signed_a,
                        signed_b,
                        d,
                        a,
                        b,
                        c,
                    },
                    "dp4a" if !high && !low => Op::Dp4a {
                        signed_a,
                        signed_b,
                        d,
                        a,
                        b,
                        c,
                    },
                    _ => return p.unknown(),
                }
            }
            "sad" => {
                let ty = p.ty()?;
                if ty.bits() != 32 {
                    return p.unknown();
                }
                let [d, a, b, c] = self.four(p, Class::B32)?;
                Op::Sad {
                    signed: ty.signed(),
                    d,
                    a,
                    b,
                    c,
                }
            }
            "setp" => self.setp(p)?,
            "set" => {
                let Some(cmp) = p.first() else {
                    return p.unknown();
                };
                let ftz = p.take("ftz");
                let (ty, to) = (p.ty()?, p.ty()?);
                let Some(cmp) = compare(cmp) else {
                    return p.unknown();
                };
                self.expect(p, 3)?;
                let (a, b) = (self.any(p, 1, class(ty))?, self.any(p, 2, class(ty))?);
                if to.bits() != 32 || matches!(ty, Ty::F16 | Ty::Bf16) {
                    return p.unknown();
                }
                Op::Set {
                    cmp,
                    ty,
                    ftz,
                    float: to == Ty::F32,
                    d: self.dst(p, Class::B32)?,
                    a,
                    b,
                }
            }
            "selp" => {
                let ty = p.ty()?;
                self.expect(p, 4)?;
                let class = class(ty);
                let d = self.dst(p, class)?;
                let (a, b) = (self.src(p, 1, class)?, self.src(p, 2, class)?);
                let (sel, negate) = self.pred(p, 3)?;
                let (a, b) = if negate { (b, a) } else { (a, b) };
                match class {
                    Class::B64 => Op::Selp64 { d, a, b, p: sel },
                    _ => Op::Selp32 { d, a, b, p: sel },
                }
            }
            "slct" => {
                let ftz = p.take("ftz");
                let (selector, ty) = (p.ty()?, p.ty()?);
                self.expect(p, 4)?;
                let d = Reg {
                    class: class(ty),
                    index: self.dst(p, class(ty))?,
                };
                let (a, b) = (self.any(p, 1, class(ty))?, self.any(p, 2, class(ty))?);
                if ftz || !matches!(selector, Ty::S32 | Ty::F32) {
                    return p.unknown();
                }
                Op::Slct {
                    d,
                    a,
                    b,
                    c: self.src(p, 3, Class::B32)?,
                    float: selector == Ty::F32,
                }
            }
            "testp" => {
                let kinds = [
                    "finite",
                    "infinite",
                    "number",
                    "notanumber",
                    "normal",
                    "subnormal",
                ];
                let ty = p.ty()?;
                let what = match p.one_of(&kinds) {
                    Some(0) => TestKind::Finite,
                    Some(1) => TestKind::Infinite,
                    Some(2) => TestKind::Number,
                    Some(3) => TestKind::NotANumber,
                    Some(4) => TestKind::Normal,
                    Some(_) => TestKind::Subnormal,
                    None => return p.unknown(),
                };
                Op::Testp {
                    what,
                    d: self.dst(p, Class::Pred)?,
                    a: self.any(p, 1, class(ty))?,
                }
            }
            "cvt" => self.cvt(p)?,
            "cvta" => {
                let to = p.take("to");
                p.ty()?;
                let Some(base) = p.last().and_then(window) else {
                    return p.unknown();
                };
                self.expect(p, 2)?;
                let a = self.any(p, 1, Class::B64)?;
                let d = Reg {
                    class: a.class,
                    index: self.dst(p, a.class)?,
                };
                if to {
                    Op::FromGeneric { d, a }
                } else {
                    Op::ToGeneric { base, d, a }
                }
            }
            "isspacep" => {
                let space = match p.last() {
                    Some("global") => Space::Global,
                    Some("shared" | "shared::cta") => Space::SharedCta,
                    Some("shared::cluster") => Space::SharedCluster,
                    Some("local") => Space::Local,
                    Some("param") => Space::Param,
                    _ => return p.unknown(),
                };
                Op::Isspacep {
                    space,
                    d: self.dst(p, Class::Pred)?,
                    a: self.src(p, 1, Class::B64)?,
                }
            }
            _ => return Ok(None),
        }))
    }

    pub(crate) fn four(&mut self, p: &Parts, class: Class) -> Result<[R; 4], Error> {
        self.expect(p, 4)?;
        Ok([
            self.dst(p, class)?,
            self.src(p, 1, class)?,
            self.src(p, 2, class)?,
            self.src(p, 3, class)?,
        ])
    }

    fn mov(&mut self, p: &mut Parts) -> Result<Op, Error> {
        self.expect(p, 2)?;
        if p.has("pred") {
            p.take("pred");
            let (a, negate) = self.pred(p, 1)?;
            let d = self.dst(p, Class::Pred)?;
            return Ok(if negate {
                Op::PredNot { d, a }
            } else {
                Op::MovPred { d, a }
            });
        }
        let ty = p.ty()?;
        if let [_, Operand::Vector(parts)] = p.operands.as_slice() {
            let parts = parts.clone();
            let part = |n: usize| {
                if ty.bits() as usize / n == 64 {
                    Class::B64
                } else {
                    Class::B32
                }
            };
            let regs: Vec<R> = parts
                .iter()
                .map(|o| self.source(p, o, part(parts.len())))
                .collect::<Result<_, _>>()?;
            return Ok(match (ty.bits(), regs.as_slice()) {
                (32, &[x, y]) => Op::Join32 {
                    d: self.dst(p, Class::B32)?,
                    parts: [x, y],
                },
                (64, &[x, y]) => Op::Join64 {
                    d: self.dst(p, Class::B64)?,
                    parts: [x, y],
                },
                (64, &[x, y, z, w]) => Op::Join16x4 {
                    d: self.dst(p, Class::B64)?,
                    parts: [x, y, z, w],
                },
                _ => return p.unknown(),
            });
        }
        if let [Operand::Vector(parts), _] = p.operands.as_slice() {
            let parts = parts.clone();
            let regs: Vec<R> = parts
                .iter()
                .map(|o| self.dest(p, Some(o), Class::B32))
                .collect::<Result<_, _>>()?;
            return Ok(match (ty.bits(), regs.as_slice()) {
                (32, &[x, y]) => Op::Split32 {
                    d: [x, y],
                    a: self.src(p, 1, Class::B32)?,
                },
                (64, &[x, y]) => Op::Split64 {
                    d: [x, y],
                    a: self.src(p, 1, Class::B64)?,
                },
                (64, &[x, y, z, w]) => Op::Split16x4 {
                    d: [x, y, z, w],
                    a: self.src(p, 1, Class::B64)?,
                },
                _ => return p.unknown(),
            });
        }
        Ok(match class(ty) {
            Class::B64 => {
                if let Some(Operand::Reg(a)) = p
                    .operands
                    .get(1)
                    .filter(|o| matches!(o, Operand::Reg(r) if r.class == Class::B32))
                {
                    // A 32-bit special register read as 64 bits.
                    return Ok(Op::Extend64 {
                        signed: false,
                        from: 32,
                        d: self.dst(p, Class::B64)?,
                        a: a.index,
                    });
                }
                Op::Mov64 {
                    d: self.dst(p, Class::B64)?,
                    a: self.src(p, 1, Class::B64)?,
                }
            }
            _ => Op::Mov32 {
                d: self.dst(p, Class::B32)?,
                a: self.src(p, 1, Class::B32)?,
            },
        })
    }

    fn bit_op(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let name = p.name;
        if p.has("pred") {
            p.take("pred");
            let d = self.dst(p, Class::Pred)?;
            if name == "not" {
                let (a, negate) = self.pred(p, 1)?;
                return Ok(if negate {
                    Op::MovPred { d, a }
                } else {
                    Op::PredNot { d, a }
                });
            }
            let ((a, na), (b, nb)) = (self.pred(p, 1)?, self.pred(p, 2)?);
            let f = match name {
                "and" => Logic::And,
                "or" => Logic::Or,
                "xor" => Logic::Xor,
                _ => return p.unknown(),
            };
            return if na || nb {
                p.unknown()
            } else {
                Ok(Op::PredLogic { f, d, a, b })
            };
        }
        let ty = p.ty()?;
        let f = match name {
            "and" => Int::And,
            "or" => Int::Or,
            "xor" => Int::Xor,
            "not" => Int::Not,
            "cnot" => Int::Cnot,
            "brev" => Int::Brev,
            "shl" => Int::Shl,
            _ if ty.signed() => Int::ShrS,
            _ => Int::ShrU,
        };
        let one = matches!(f, Int::Not | Int::Cnot | Int::Brev);
        self.expect(p, if one { 2 } else { 3 })?;
        let class = class(ty);
        let (d, a) = (self.dst(p, class)?, self.src(p, 1, class)?);
        if matches!(f, Int::Shl | Int::ShrS | Int::ShrU) {
            let b = self.src(p, 2, Class::B32)?;
            return Ok(match ty.bits() {
                64 => Op::Shift64 { f, d, a, b },
                32 => Op::Int32 { f, d, a, b },
                _ => Op::Int16 { f, d, a, b },
            });
        }
        let b = if one { a } else { self.src(p, 2, class)? };
        Ok(int(ty, f, d, a, b))
    }

    fn carry(&mut self, p: &mut Parts, carry: bool) -> Result<Op, Error> {
        let set = p.take("cc");
        let ty = p.ty()?;
        self.expect(p, 3)?;
        let (d, a, b) = (
            self.dst(p, class(ty))?,
            self.src(p, 1, class(ty))?,
            self.src(p, 2, class(ty))?,
        );
        Ok(Op::Carry {
            sub: p.name.starts_with("sub"),
            wide: ty.bits() == 64,
            carry,
            set,
            d,
            a,
            b,
        })
    }

    fn number_op(&mut self, p: &mut Parts) -> Result<Op, Error> {
        if p.has("cc") {
            return self.carry(p, false);
        }
        let last = p.last().unwrap_or("");
        if matches!(last, "f32x2" | "f16x2" | "bf16x2") {
            return self.packed(p, last);
        }
        match parse_ty(last) {
            Some(Ty::F32) => self.f32_op(p),
            Some(Ty::F64) => self.f64_op(p),
            Some(Ty::F16 | Ty::Bf16) => self.packed(p, last),
            Some(ty) if ty.bits() >= 16 => self.int_op(p, ty),
            _ => p.unknown(),
        }
    }

    fn int_op(&mut self, p: &mut Parts, ty: Ty) -> Result<Op, Error> {
        let signed = ty.signed();
        let class = class(ty);
        let (wide, high, low) = (p.take("wide"), p.take("hi"), p.take("lo"));
        if matches!(p.name, "mul" | "mad") {
            if u8::from(wide) + u8::from(high) + u8::from(low) != 1 {
                return p.unknown();
            }
        } else if wide || high || low {
            return p.unknown();
        }
        let mul_hi = if signed { Int::MulHiS } else { Int::MulHiU };
        if wide {
            let d_class = if ty.bits() == 32 {
                Class::B64
            } else {
                Class::B32
            };
            let (d, a, b) = (
                self.dst(p, d_class)?,
                self.src(p, 1, class)?,
                self.src(p, 2, class)?,
            );
            return Ok(match (p.name, ty.bits()) {
                ("mul", 32) => Op::MulWide32 { signed, d, a, b },
                ("mul", 16) => Op::MulWide16 { signed, d, a, b },
                ("mad", 32) => Op::MadWide32 {
                    signed,
                    d,
                    a,
                    b,
                    c: self.src(p, 3, d_class)?,
                },
                ("mad", 16) => Op::MadWide16 {
                    signed,
                    d,
                    a,
                    b,
                    c: self.src(p, 3, d_class)?,
                },
                _ => return p.unknown(),
            });
        }
        if p.name == "mad" {
            let f = if high { mul_hi } else { Int::Mul };
            let [d, a, b, c] = self.four(p, class)?;
            return Ok(match ty.bits() {
                64 => Op::Mad64 { f, d, a, b, c },
                32 => Op::Mad32 { f, d, a, b, c },
                _ if low => Op::Mad16 { d, a, b, c },
                _ => return p.unknown(),
            });
        }
        let f = match (p.name, signed) {
            ("add", _) => Int::Add,
            ("sub", _) => Int::Sub,
            ("mul", _) if high => mul_hi,
            ("mul", _) => Int::Mul,
            ("div", true) => Int::DivS,
            ("div", false) => Int::DivU,
            ("rem", true) => Int::RemS,
            ("rem", false) => Int::RemU,
            ("min", true) => Int::MinS,
            ("min", false) => Int::MinU,
            ("max", true) => Int::MaxS,
            ("max", false) => Int::MaxU,
            ("neg", true) => Int::Neg,
            ("abs", true) => Int::Abs,
            _ => return p.unknown(),
        };
        let one = matches!(f, Int::Neg | Int::Abs);
        self.expect(p, if one { 2 } else { 3 })?;
        let (d, a) = (self.dst(p, class)?, self.src(p, 1, class)?);
        let b = if one { a } else { self.src(p, 2, class)? };
        Ok(int(ty, f, d, a, b))
    }
}

fn int(ty: Ty, f: Int, d: R, a: R, b: R) -> Op {
    match ty.bits() {
        64 => Op::Int64 { f, d, a, b },
        32 => Op::Int32 { f, d, a, b },
        _ => Op::Int16 { f, d, a, b },
    }
}
