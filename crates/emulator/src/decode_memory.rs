//! Opcodes that touch memory, barriers, other lanes or the flow of control.

use crate::decode::{Decoder, Operand, Parts};
use crate::error::Error;
use crate::ir::{
    Access, Addr, Atomic, AtomicOp, Class, FenceKind, Int, Op, Order, R, Reg, ShflMode, Space, Ty,
    VoteMode,
};

pub(crate) fn class(ty: Ty) -> Class {
    if ty.bits() == 64 {
        Class::B64
    } else {
        Class::B32
    }
}

pub(crate) fn take_space(p: &mut Parts) -> Space {
    match p.one_of(&[
        "global",
        "shared",
        "shared::cta",
        "shared::cluster",
        "local",
        "param",
        "const",
        "param::entry",
    ]) {
        Some(0 | 6) => Space::Global,
        Some(1 | 2) => Space::SharedCta,
        Some(3) => Space::SharedCluster,
        Some(4) => Space::Local,
        Some(_) => Space::Param,
        None => Space::Generic,
    }
}

/// Consumes the ordering and its scope.
fn take_order(p: &mut Parts) -> Order {
    let order = match p.one_of(&[
        "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio",
    ]) {
        None | Some(0) => Order::WEAK,
        Some(1 | 2) => Order {
            strong: true,
            acquire: false,
            release: false,
        },
        Some(3) => Order {
            strong: true,
            acquire: true,
            release: false,
        },
        Some(4) => Order {
            strong: true,
            acquire: false,
            release: true,
        },
        Some(5) => Order {
            strong: true,
            acquire: true,
            release: true,
        },
        Some(_) => Order {
            strong: true,
            acquire: false,
            release: false,
        },
    };
    p.one_of(&["cta", "cluster", "gpu", "sys"]);
    order
}

impl Decoder<'_> {
    /// Decodes a statement that is not arithmetic, or leaves it alone.
    pub(crate) fn memory(&mut self, p: &mut Parts) -> Result<Option<Op>, Error> {
        Ok(Some(match p.name {
            "st" if p.has("async") => self.st_async(p)?,
            "ld" | "ldu" => self.load(p)?,
            "st" => self.store(p)?,
            "atom" | "red" => self.atomic(p)?,
            "prefetch" | "prefetchu" => {
                let space = take_space(p);
                if p.one_of(&["L1", "L2"]).is_none() && !p.take_prefix("L2::") {
                    return p.unknown();
                }
                Op::Prefetch {
                    space,
                    addr: self.address(p, 0)?,
                }
            }
            "createpolicy" => {
                p.take("fractional");
                while p.take_prefix("L2::") {}
                p.take("b64");
                let d = self.dst(p, Class::B64)?;
                Op::Mov64 {
                    d,
                    a: self.constant(Class::B64, 0),
                }
            }
            "bra" => {
                p.take("uni");
                match p.operands.as_slice() {
                    [Operand::Label(target)] => Op::Bra { target: *target },
                    _ => return p.unknown(),
                }
            }
            "ret" | "exit" => {
                p.take("uni");
                Op::Exit
            }
            "trap" => Op::Trap,
            "brkpt" | "pmevent" => return p.unknown(),
            "nanosleep" => {
                p.ty()?;
                Op::Nop
            }
            "setmaxnreg" => {
                p.one_of(&["inc", "dec"]);
                p.take("sync");
                p.take("aligned");
                p.take("u32");
                Op::Nop
            }
            "bar" | "barrier" => self.barrier(p)?,
            "membar" => {
                if p.one_of(&["cta", "gl", "sys"]).is_none() {
                    return p.unknown();
                }
                Op::Fence {
                    kind: FenceKind::Memory,
                }
            }
            "fence" => self.fence(p)?,
            "mbarrier" => Op::Mbarrier(Box::new(self.mbarrier(p)?)),
            "cp" => self.copy(p)?,
            "mapa" => {
                take_space(p);
                let ty = p.ty()?;
                self.expect(p, 3)?;
                let index = self.dst(p, class(ty))?;
                Op::Mapa {
                    d: Reg {
                        class: class(ty),
                        index,
                    },
                    a: self.any(p, 1, class(ty))?,
                    rank: self.src(p, 2, Class::B32)?,
                }
            }
            "getctarank" => {
                take_space(p);
                let ty = p.ty()?;
                Op::Getctarank {
                    d: self.dst(p, Class::B32)?,
                    a: self.any(p, 1, class(ty))?,
                }
            }
            "griddepcontrol" => match p.last() {
                Some("wait") => Op::DependencyWait,
                Some("launch_dependents") => Op::Nop,
                _ => return p.unknown(),
            },
            "shfl" => self.shuffle(p)?,
            "vote" => {
                p.take("sync");
                let mode = self.vote_mode(p)?;
                let class = if p.take("pred") {
                    Class::Pred
                } else {
                    Class::B32
                };
                p.take("b32");
                self.expect(p, 3)?;
                let (source, negate) = self.pred(p, 1)?;
                let d = Reg {
                    class,
                    index: self.dst(p, class)?,
                };
                if (mode == VoteMode::Ballot) != (class == Class::B32) {
                    return p.unknown();
                }
                Op::Vote {
                    mode,
                    d,
                    p: source,
                    negate,
                    mask: self.src(p, 2, Class::B32)?,
                }
            }
            "match" => {
                let all = p.take("all");
                if !all && !p.take("any") || !p.take("sync") {
                    return p.unknown();
                }
                let ty = p.ty()?;
                self.expect(p, 3)?;
                let (d, q) = self.pair(p)?;
                Op::Match {
                    all,
                    wide: ty.bits() == 64,
                    d,
                    p: q,
                    a: self.src(p, 1, class(ty))?,
                    mask: self.src(p, 2, Class::B32)?,
                }
            }
            "redux" => {
                p.take("sync");
                let op = p.one_of(&["add", "min", "max", "and", "or", "xor"]);
                let ty = p.ty()?;
                let f = match (op, ty) {
                    (Some(0), _) => Int::Add,
                    (Some(1), Ty::S32) => Int::MinS,
                    (Some(1), Ty::U32) => Int::MinU,
                    (Some(2), Ty::S32) => Int::MaxS,
                    (Some(2), Ty::U32) => Int::MaxU,
                    (Some(3), _) => Int::And,
                    (Some(4), _) => Int::Or,
                    (Some(5), _) => Int::Xor,
                    _ => return p.unknown(),
                };
                if ty.float() || ty.bits() != 32 {
                    return p.unknown();
                }
                Op::Redux {
                    f,
                    d: self.dst(p, Class::B32)?,
                    a: self.src(p, 1, Class::B32)?,
                    mask: self.src(p, 2, Class::B32)?,
                }
            }
            "elect" => {
                p.take("sync");
                self.expect(p, 2)?;
                let (d, Some(q)) = self.pair(p)? else {
                    return p.unknown();
                };
                Op::Elect {
                    d,
                    p: q,
                    mask: self.src(p, 1, Class::B32)?,
                }
            }
            "activemask" => {
                p.take("b32");
                Op::ActiveMask {
                    d: self.dst(p, Class::B32)?,
                }
            }
            "ldmatrix" => self.ldmatrix(p)?,
            "mma" => self.mma(p)?,
            _ => return Ok(None),
        }))
    }

    pub(crate) fn address(&self, p: &Parts, n: usize) -> Result<Addr, Error> {
        match p.operands.get(n) {
            Some(Operand::Address(addr, false)) => Ok(*addr),
            _ => p.unknown(),
        }
    }

    /// `d` or `d|p` at the front.
    fn pair(&mut self, p: &Parts) -> Result<(R, Option<R>), Error> {
        match p.operands.first().cloned() {
            Some(Operand::Pair(d, q)) => Ok((
                self.dest(p, Some(&d), Class::B32)?,
                Some(self.dest(p, Some(&q), Class::Pred)?),
            )),
            other => Ok((self.dest(p, other.as_ref(), Class::B32)?, None)),
        }
    }

    fn vote_mode(&self, p: &mut Parts) -> Result<VoteMode, Error> {
        Ok(match p.one_of(&["all", "any", "uni", "ballot"]) {
            Some(0) => VoteMode::All,
            Some(1) => VoteMode::Any,
            Some(2) => VoteMode::Uni,
            Some(_) => VoteMode::Ballot,
            None => return p.unknown(),
        })
    }

    /// Consumes cache hints; a `cache_hint` drops its operand.
    pub(crate) fn hints(&self, p: &mut Parts) {
        p.one_of(&["ca", "cg", "cs", "lu", "cv", "wb", "wt"]);
        if p.take("L2::cache_hint") {
            p.operands.pop();
        }
        while p.take_prefix("L1::") || p.take_prefix("L2::") {}
    }

    pub(crate) fn vector_count(p: &mut Parts) -> usize {
        p.one_of(&["v2", "v4", "v8"]).map_or(1, |i| 2 << i)
    }

    fn load(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let order = take_order(p);
        let mut space = take_space(p);
        let nc = p.take("nc");
        self.hints(p);
        let count = Self::vector_count(p);
        let ty = p.ty()?;
        self.expect(p, 2)?;
        let list = match p.operands[0].clone() {
            Operand::Vector(list) => list,
            single => vec![single],
        };
        let Operand::Address(addr, is_param) = p.operands[1] else {
            return p.unknown();
        };
        if list.len() != count
            || (is_param && space != Space::Param)
            || (nc && space != Space::Global)
            || order.release
        {
            return p.unknown();
        }
        if nc {
            space = Space::GlobalNc;
        }
        let mut regs = Vec::new();
        for operand in &list {
            regs.push(match operand {
                Operand::Reg(reg) if reg.class != Class::Pred => *reg,
                Operand::Sink => Reg {
                    class: class(ty),
                    index: self.dest(p, Some(operand), class(ty))?,
                },
                _ => return p.unknown(),
            });
        }
        Ok(Op::Load(Box::new(Access {
            space,
            ty,
            regs,
            address: addr.reg,
            offset: addr.offset,
            order,
        })))
    }

    fn store(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let order = take_order(p);
        let space = take_space(p);
        self.hints(p);
        let count = Self::vector_count(p);
        let ty = p.ty()?;
        self.expect(p, 2)?;
        let list = match p.operands[1].clone() {
            Operand::Vector(list) => list,
            single => vec![single],
        };
        let addr = self.address(p, 0)?;
        if list.len() != count || order.acquire || space == Space::Param {
            return p.unknown();
        }
        let mut regs = Vec::new();
        for operand in &list {
            regs.push(match operand {
                Operand::Reg(reg) if reg.class != Class::Pred => *reg,
                Operand::Imm(value) => Reg {
                    class: class(ty),
                    index: self.constant(class(ty), *value),
                },
                _ => return p.unknown(),
            });
        }
        Ok(Op::Store(Box::new(Access {
            space,
            ty,
            regs,
            address: addr.reg,
            offset: addr.offset,
            order,
        })))
    }

    fn atomic(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let returns = p.name == "atom";
        let mut order = take_order(p);
        order.strong = true;
        let space = take_space(p);
        self.hints(p);
        let op = match p.one_of(&[
            "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec",
        ]) {
            Some(0) => AtomicOp::Add,
            Some(1) => AtomicOp::Min,
            Some(2) => AtomicOp::Max,
            Some(3) => AtomicOp::And,
            Some(4) => AtomicOp::Or,
            Some(5) => AtomicOp::Xor,
            Some(6) => AtomicOp::Exch,
            Some(7) => AtomicOp::Cas,
            Some(8) => AtomicOp::Inc,
            Some(_) => AtomicOp::Dec,
            None => return p.unknown(),
        };
        let ty = p.ty()?;
        let float_ok = op == AtomicOp::Add && matches!(ty, Ty::F32 | Ty::F64);
        if ty.bits() < 32
            || (ty.float() && !float_ok)
            || (matches!(op, AtomicOp::Inc | AtomicOp::Dec) && ty != Ty::U32)
        {
            return p.unknown();
        }
        let class = class(ty);
        let first = usize::from(returns);
        self.expect(p, first + if op == AtomicOp::Cas { 3 } else { 2 })?;
        let dst = if returns {
            Some(Reg {
                class,
                index: self.dst(p, class)?,
            })
        } else {
            None
        };
        let addr = self.address(p, first)?;
        let b = Reg {
            class,
            index: self.src(p, first + 1, class)?,
        };
        let c = if op == AtomicOp::Cas {
            Some(Reg {
                class,
                index: self.src(p, first + 2, class)?,
            })
        } else {
            None
        };
        Ok(Op::Atomic(Box::new(Atomic {
            space,
            op,
            ty,
            dst,
            address: addr.reg,
            offset: addr.offset,
            b,
            c,
            order,
        })))
    }

    fn shuffle(&mut self, p: &mut Parts) -> Result<Op, Error> {
        if !p.take("sync") || !p.take("b32") {
            return p.unknown();
        }
        let mode = match p.one_of(&["up", "down", "bfly", "idx"]) {
            Some(0) => ShflMode::Up,
            Some(1) => ShflMode::Down,
            Some(2) => ShflMode::Bfly,
            Some(_) => ShflMode::Idx,
            None => return p.unknown(),
        };
        self.expect(p, 5)?;
        let (d, q) = self.pair(p)?;
        let mut src = |n| self.src(p, n, Class::B32);
        Ok(Op::Shfl {
            mode,
            d,
            p: q,
            a: src(1)?,
            b: src(2)?,
            c: src(3)?,
            mask: src(4)?,
        })
    }

    fn list<const N: usize>(&mut self, p: &Parts, n: usize, dest: bool) -> Result<[R; N], Error> {
        let list = match p.operands.get(n) {
            Some(Operand::Vector(list)) => list.clone(),
            Some(single) => vec![single.clone()],
            None => return p.unknown(),
        };
        if list.len() > N {
            return p.unknown();
        }
        let mut regs = [0; N];
        for (reg, operand) in regs.iter_mut().zip(&list) {
            *reg = if dest {
                self.dest(p, Some(operand), Class::B32)?
            } else {
                self.source(p, operand, Class::B32)?
            };
        }
        Ok(regs)
    }

    fn ldmatrix(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let transpose = p.take("trans");
        if !(p.take("sync") && p.take("aligned") && p.take("m8n8") && p.take("b16")) {
            return p.unknown();
        }
        let count = match p.one_of(&["x1", "x2", "x4"]) {
            Some(i) => 1u8 << i,
            None => return p.unknown(),
        };
        let space = take_space(p);
        let d = self.list(p, 0, true)?;
        Ok(Op::LoadMatrix {
            count,
            transpose,
            d,
            addr: self.address(p, 1)?,
            space,
        })
    }

    fn mma(&mut self, p: &mut Parts) -> Result<Op, Error> {
        if !(p.take("sync") && p.take("aligned") && p.take("row") && p.take("col")) {
            return p.unknown();
        }
        let Some(shape) = p.first() else {
            return p.unknown();
        };
        let types: Vec<&str> = std::iter::from_fn(|| p.first()).collect();
        let (tf32, half) = match types.as_slice() {
            ["f32", "bf16", "bf16", "f32"] => (false, false),
            ["f32", "f16", "f16", "f32"] => (false, true),
            ["f32", "tf32", "tf32", "f32"] => (true, false),
            _ => return p.unknown(),
        };
        let k = match (shape, tf32) {
            ("m16n8k16", false) => 16,
            ("m16n8k8", _) => 8,
            ("m16n8k4", true) => 4,
            _ => return p.unknown(),
        };
        Ok(Op::Mma {
            tf32,
            half,
            d: self.list(p, 0, true)?,
            a: self.list(p, 1, false)?,
            b: self.list(p, 2, false)?,
            c: self.list(p, 3, false)?,
            k,
        })
    }
}
