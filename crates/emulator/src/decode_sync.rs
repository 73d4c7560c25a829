//! Opcodes of barriers, mbarriers, fences and asynchronous copies.

use crate::decode::{Decoder, Operand, Parts};
use crate::decode_memory::class;
use crate::error::Error;
use crate::ir::{Async, Class, FenceKind, Mbar, Op, Reg};

impl Decoder<'_> {
    pub(crate) fn barrier(&mut self, p: &mut Parts) -> Result<Op, Error> {
        let legacy = p.name == "bar";
        if p.take("cluster") {
            let aligned = p.take("aligned");
            if p.take("arrive") {
                let relaxed = p.take("relaxed");
                p.take("release");
                return Ok(Op::ClusterArrive {
                    release: !relaxed,
                    aligned,
                });
            }
            p.take("acquire");
            return if p.take("wait") {
                Ok(Op::ClusterWait { aligned })
            } else {
                p.unknown()
            };
        }
        if p.take("warp") {
            self.expect(p, 1)?;
            return if p.take("sync") {
                Ok(Op::WarpSync {
                    mask: self.src(p, 0, Class::B32)?,
                })
            } else {
                p.unknown()
            };
        }
        p.take("cta");
        let aligned = p.take("aligned") || legacy;
        if p.take("sync") {
            let count = if p.operands.len() > 1 {
                Some(self.src(p, 1, Class::B32)?)
            } else {
                None
            };
            return Ok(Op::BarSync {
                id: self.src(p, 0, Class::B32)?,
                count,
                aligned,
            });
        }
        if p.take("arrive") {
            self.expect(p, 2)?;
            return Ok(Op::BarArrive {
                id: self.src(p, 0, Class::B32)?,
                count: self.src(p, 1, Class::B32)?,
                aligned,
            });
        }
        p.unknown()
    }

    pub(crate) fn fence(&mut self, p: &mut Parts) -> Result<Op, Error> {
        self.expect(p, 0)?;
        let kind = if p.take("mbarrier_init") {
            if !(p.take("release") && p.take("cluster")) {
                return p.unknown();
            }
            FenceKind::MbarrierInit
        } else if p.take("proxy") {
            if p.one_of(&["async", "async.global", "async::generic"])
                .is_none()
            {
                return p.unknown();
            }
            p.one_of(&["global", "shared::cta", "shared::cluster"]);
            FenceKind::ProxyAsync
        } else {
            p.one_of(&["sc", "acq_rel", "acquire", "release"]);
            if p.one_of(&["cta", "cluster", "gpu", "sys"]).is_none() {
                return p.unknown();
            }
            FenceKind::Memory
        };
        Ok(Op::Fence { kind })
    }

    pub(crate) fn mbarrier(&mut self, p: &mut Parts) -> Result<Mbar, Error> {
        let expect = p.take("expect_tx");
        let complete = p.take("complete_tx");
        let relaxed = p.take("relaxed");
        let explicit = p.one_of(&["release", "acquire"]).is_some();
        let _ = explicit;
        let cluster_scope = p.take("cluster");
        p.take("cta");
        let parity = p.take("parity");
        let cluster = match p.one_of(&["shared::cluster", "shared::cta", "shared"]) {
            Some(0) => true,
            Some(_) | None => false,
        };
        let verb = p.one_of(&[
            "init",
            "inval",
            "arrive",
            "arrive_drop",
            "try_wait",
            "test_wait",
        ]);
        let b64 = p.take("b64");
        let no_complete = p.take("noComplete");
        if no_complete || !(b64 || expect || complete) {
            return p.unknown();
        }
        Ok(match verb {
            Some(0) => Mbar::Init {
                addr: self.address(p, 0)?,
                count: self.src(p, 1, Class::B32)?,
            },
            Some(1) => Mbar::Inval {
                addr: self.address(p, 0)?,
            },
            Some(2 | 3) => {
                let stateless = matches!(p.operands.first(), Some(Operand::Address(..)));
                let first = usize::from(!stateless);
                let state = match p.operands.first() {
                    Some(Operand::Reg(reg)) if reg.class == Class::B64 => Some(*reg),
                    Some(Operand::Sink | Operand::Address(..)) => None,
                    _ => return p.unknown(),
                };
                let extra = if p.operands.len() > first + 1 {
                    Some(self.src(p, first + 1, Class::B32)?)
                } else {
                    None
                };
                if (expect && extra.is_none()) || (cluster && state.is_some()) {
                    return p.unknown();
                }
                let (count, tx) = if expect { (None, extra) } else { (extra, None) };
                let addr = self.address(p, first)?;
                Mbar::Arrive {
                    addr,
                    cluster,
                    state,
                    count,
                    tx,
                    release: !relaxed,
                    drop: verb == Some(3),
                }
            }
            Some(verb @ (4 | 5)) => {
                let done = Reg {
                    class: Class::Pred,
                    index: self.dst(p, Class::Pred)?,
                };
                let wide = if parity { Class::B32 } else { Class::B64 };
                let state = Reg {
                    class: wide,
                    index: self.src(p, 2, wide)?,
                };
                let addr = self.address(p, 1)?;
                Mbar::Wait {
                    addr,
                    block: verb == 4,
                    done,
                    state,
                    parity,
                    acquire: !relaxed,
                    cluster: cluster_scope,
                }
            }
            None if expect => Mbar::ExpectTx {
                addr: self.address(p, 0)?,
                cluster,
                tx: self.src(p, 1, Class::B32)?,
            },
            None if complete => Mbar::CompleteTx {
                addr: self.address(p, 0)?,
                cluster,
                tx: self.src(p, 1, Class::B32)?,
            },
            _ => return p.unknown(),
        })
    }

    pub(crate) fn st_async(&mut self, p: &mut Parts) -> Result<Op, Error> {
        p.take("async");
        p.take("weak");
        if !p.take("shared::cluster") || !p.take("mbarrier::complete_tx::bytes") {
            return p.unknown();
        }
        let count = Self::vector_count(p);
        let ty = p.ty()?;
        self.expect(p, 3)?;
        let list = match p.operands[1].clone() {
            Operand::Vector(list) => list,
            single => vec![single],
        };
        if list.len() != count || ty.bits() < 32 {
            return p.unknown();
        }
        let mut regs = Vec::new();
        for operand in &list {
            regs.push(Reg {
                class: class(ty),
                index: self.source(p, operand, class(ty))?,
            });
        }
        Ok(Op::Async(Box::new(Async::Store {
            addr: self.address(p, 0)?,
            ty,
            regs,
            barrier: self.address(p, 2)?,
        })))
    }

    pub(crate) fn copy(&mut self, p: &mut Parts) -> Result<Op, Error> {
        if !p.take("async") {
            return p.unknown();
        }
        let bulk = p.take("bulk");
        let n = |p: &Parts| match p.operands.as_slice() {
            [Operand::Imm(n)] => Ok(*n as u32),
            _ => p.unknown(),
        };
        if p.take("commit_group") {
            return Ok(Op::Async(Box::new(if bulk {
                Async::BulkCommit
            } else {
                Async::Commit
            })));
        }
        if p.take("wait_group") {
            let read = p.take("read");
            let n = n(p)?;
            return Ok(Op::Async(Box::new(if bulk {
                Async::BulkWait { n, read }
            } else {
                Async::Wait { n }
            })));
        }
        if p.take("wait_all") {
            return Ok(Op::Async(Box::new(Async::Wait { n: u32::MAX })));
        }
        if p.take("mbarrier") {
            let noinc = p.take("noinc");
            p.one_of(&["shared", "shared::cta"]);
            if !p.take("arrive") || !p.take("b64") {
                return p.unknown();
            }
            return Ok(Op::Async(Box::new(Async::Arrive {
                addr: self.address(p, 0)?,
                noinc,
            })));
        }
        if bulk && p.take("prefetch") {
            p.take("L2");
            p.take("global");
            self.hints(p);
            return Ok(Op::Nop);
        }
        self.hints(p);
        if !bulk {
            if p.one_of(&["shared", "shared::cta"]).is_none() || !p.take("global") {
                return p.unknown();
            }
            let (dst, src) = (self.address(p, 0)?, self.address(p, 1)?);
            let Some(Operand::Imm(size @ (4 | 8 | 16))) = p.operands.get(2) else {
                return p.unknown();
            };
            let size = *size as u32;
            let src_size = match p.operands.get(3) {
                Some(Operand::Reg(reg)) if reg.class == Class::B32 => Some(*reg),
                Some(Operand::Imm(value)) => Some(Reg {
                    class: Class::B32,
                    index: self.constant(Class::B32, *value),
                }),
                Some(_) => return p.unknown(),
                None => None,
            };
            return Ok(Op::Async(Box::new(Async::Copy {
                dst,
                src,
                size,
                src_size,
            })));
        }
        let (dst, src, size) = (
            self.address(p, 0)?,
            self.address(p, 1)?,
            self.any(p, 2, Class::B32)?,
        );
        if p.take("mbarrier::complete_tx::bytes") {
            if p.one_of(&["shared::cluster", "shared::cta"]).is_none() || !p.take("global") {
                return p.unknown();
            }
            self.expect(p, 4)?;
            return Ok(Op::Async(Box::new(Async::BulkIn {
                dst,
                src,
                size,
                barrier: self.address(p, 3)?,
            })));
        }
        if p.take("bulk_group") && p.take("global") && p.take("shared::cta") {
            self.expect(p, 3)?;
            return Ok(Op::Async(Box::new(Async::BulkOut { dst, src, size })));
        }
        p.unknown()
    }
}
