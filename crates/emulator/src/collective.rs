//! Instructions in which lanes of a warp read each other's registers: shuffles, votes, matrices.

use crate::access::Who;
use crate::error::Error;
use crate::ir::{Class, HalfKind, Op, R, ShflMode, VoteMode};
use crate::machine::Machine;
use crate::math;
use crate::warp::{Step, Wait, Warp};

impl Machine<'_> {
    /// The lanes that execute together, or `None` until all of them are here.
    fn members(
        &self,
        index: usize,
        warp: &Warp,
        pc: u32,
        mask: u32,
        members: R,
    ) -> Result<Option<u32>, Error> {
        let lane = mask.trailing_zeros() as usize;
        let members = warp.registers.r32[members as usize][lane];
        if mask & !members != 0 {
            return Err(self.misuse(
                index,
                mask & !members,
                pc,
                "a thread outside the member mask executes the instruction",
            ));
        }
        let live = members & self.live[index];
        Ok((live & !mask == 0).then_some(live))
    }

    pub(crate) fn collective(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        op: &Op,
    ) -> Result<Step, Error> {
        let wait = Ok(Step::Retry(Wait::Converge));
        match *op {
            Op::Shfl {
                mode,
                d,
                p,
                a,
                b,
                c,
                mask: members,
            } => {
                let Some(lanes) = self.members(index, warp, pc, mask, members)? else {
                    return wait;
                };
                self.shuffle(index, warp, pc, lanes, mode, ([d, a, b, c], p))?;
            }
            Op::Vote {
                mode,
                d,
                p,
                negate,
                mask: members,
            } => {
                let Some(lanes) = self.members(index, warp, pc, mask, members)? else {
                    return wait;
                };
                let votes =
                    (warp.registers.p[p as usize] ^ if negate { u32::MAX } else { 0 }) & lanes;
                let value = match mode {
                    VoteMode::All => u32::from(votes == lanes),
                    VoteMode::Any => u32::from(votes != 0),
                    VoteMode::Uni => u32::from(votes == lanes || votes == 0),
                    VoteMode::Ballot => votes,
                };
                for lane in (0..32).filter(|l| lanes >> l & 1 != 0) {
                    warp.registers.put(d, lane, u64::from(value));
                }
            }
            Op::Match {
                all,
                wide,
                d,
                p,
                a,
                mask: members,
            } => {
                let Some(lanes) = self.members(index, warp, pc, mask, members)? else {
                    return wait;
                };
                let a = crate::ir::Reg {
                    class: if wide { Class::B64 } else { Class::B32 },
                    index: a,
                };
                let values: Vec<u64> = (0..32).map(|l| warp.registers.get(a, l)).collect();
                for lane in (0..32usize).filter(|l| lanes >> l & 1 != 0) {
                    let alike = (0..32)
                        .filter(|&l| lanes >> l & 1 != 0 && values[l] == values[lane])
                        .fold(0, |m, l| m | 1 << l);
                    let whole = alike == lanes;
                    warp.registers.r32[d as usize][lane] = if all && !whole { 0 } else { alike };
                    if let Some(p) = p {
                        warp.registers
                            .put_pred(p, 1 << lane, if whole { u32::MAX } else { 0 });
                    }
                }
            }
            Op::Redux {
                f,
                d,
                a,
                mask: members,
            } => {
                let Some(lanes) = self.members(index, warp, pc, mask, members)? else {
                    return wait;
                };
                let values = warp.registers.r32[a as usize];
                let value = (0..32usize)
                    .filter(|l| lanes >> l & 1 != 0)
                    .map(|l| values[l])
                    .reduce(|x, y| math::int32(f, x, y));
                for lane in (0..32usize).filter(|l| lanes >> l & 1 != 0) {
                    warp.registers.r32[d as usize][lane] = value.unwrap_or(0);
                }
            }
            Op::Elect {
                d,
                p,
                mask: members,
            } => {
                let Some(lanes) = self.members(index, warp, pc, mask, members)? else {
                    return wait;
                };
                let leader = lanes.trailing_zeros();
                for lane in (0..32usize).filter(|l| lanes >> l & 1 != 0) {
                    warp.registers.r32[d as usize][lane] = leader;
                }
                warp.registers.put_pred(p, lanes, 1 << leader);
            }
            Op::ActiveMask { d } => {
                for lane in (0..32usize).filter(|l| mask >> l & 1 != 0) {
                    warp.registers.r32[d as usize][lane] = mask;
                }
            }
            _ => unreachable!("{op:?} is executed elsewhere"),
        }
        Ok(Step::Next)
    }

    fn shuffle(
        &self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        lanes: u32,
        mode: ShflMode,
        ([d, a, b, c], p): ([R; 4], Option<R>),
    ) -> Result<(), Error> {
        let values = warp.registers.r32[a as usize];
        let (bs, cs) = (
            warp.registers.r32[b as usize],
            warp.registers.r32[c as usize],
        );
        let mut valid = 0;
        for lane in (0..32u32).filter(|l| lanes >> l & 1 != 0) {
            let (b, c) = (bs[lane as usize] & 31, cs[lane as usize]);
            let (clamp, segment) = (c & 31, c >> 8 & 31);
            let most = (lane & segment) | (clamp & !segment);
            let least = lane & segment;
            let (from, inside) = match mode {
                ShflMode::Up => (lane.wrapping_sub(b), lane as i32 - b as i32 >= most as i32),
                ShflMode::Down => (lane + b, lane + b <= most),
                ShflMode::Bfly => (lane ^ b, lane ^ b <= most),
                ShflMode::Idx => (least | (b & !segment), least | (b & !segment) <= most),
            };
            let from = if inside { from } else { lane };
            if lanes >> from & 1 == 0 {
                return Err(Error::InactiveLane {
                    site: self.site(index, lane, pc),
                    lane: from,
                });
            }
            warp.registers.r32[d as usize][lane as usize] = values[from as usize];
            valid |= u32::from(inside) << lane;
        }
        if let Some(p) = p {
            warp.registers.put_pred(p, lanes, valid);
        }
        Ok(())
    }

    pub(crate) fn matrix(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        op: &Op,
    ) -> Result<Step, Error> {
        if mask != u32::MAX {
            if self.live[index] != u32::MAX {
                return Err(self.misuse(
                    index,
                    mask,
                    pc,
                    "a matrix instruction needs all 32 lanes",
                ));
            }
            return Ok(Step::Retry(Wait::Converge));
        }
        match *op {
            Op::LoadMatrix {
                count,
                transpose,
                d,
                addr,
                space,
            } => {
                for (matrix, &d) in d.iter().enumerate().take(usize::from(count)) {
                    let mut rows = [[0u8; 16]; 8];
                    for (row, bytes) in rows.iter_mut().enumerate() {
                        let lane = matrix * 8 + row;
                        let who = Who {
                            index,
                            lane: lane as u32,
                            pc,
                        };
                        let address = Self::address(warp, addr.reg, addr.offset, lane);
                        let target = self.resolve(who, space, address, 16, 16)?;
                        self.order(who, target, address, 16, crate::race::Kind::Read)?;
                        if !self.fetch(Some(warp), lane, target, bytes) {
                            return Err(self.uninitialised(who, target, address, 16));
                        }
                    }
                    let element = |row: usize, column: usize| {
                        u32::from(rows[row][2 * column]) | u32::from(rows[row][2 * column + 1]) << 8
                    };
                    for lane in 0..32 {
                        let (row, column) = (lane / 4, lane % 4 * 2);
                        let (low, high) = if transpose {
                            (element(column, row), element(column + 1, row))
                        } else {
                            (element(row, column), element(row, column + 1))
                        };
                        warp.registers.r32[d as usize][lane] = low | high << 16;
                    }
                }
                Ok(Step::Yield)
            }
            Op::Mma {
                tf32,
                half,
                d,
                a,
                b,
                c,
                k,
            } => {
                mma(warp, tf32, half, [d, a, c], b, usize::from(k));
                Ok(Step::Next)
            }
            _ => unreachable!("{op:?} is executed elsewhere"),
        }
    }
}

/// D = A B + C with 16 rows and 8 columns; products and sums exact to f64, rounded once.
fn mma(warp: &mut Warp, tf32: bool, half: bool, [d, a, c]: [[R; 4]; 3], b: [R; 2], k: usize) {
    let kind = if half { HalfKind::F16 } else { HalfKind::Bf16 };
    let registers = &mut warp.registers;
    let element = |word: u32, high: usize| {
        let bits = (word >> (16 * high)) as u16;
        f64::from(match kind {
            HalfKind::F16 => math::f16_to_f32(bits),
            HalfKind::Bf16 => math::bf16_to_f32(bits),
        })
    };
    // tf32 keeps the upper 19 bits.
    let tf = |word: u32| f64::from(f32::from_bits(word & 0xffff_e000));
    let mut left = [[0f64; 16]; 16];
    let mut right = [[0f64; 8]; 16];
    let mut sums = [[0u32; 32]; 4];
    for lane in 0..32 {
        let (group, member) = (lane / 4, lane % 4);
        if tf32 {
            for i in 0..k / 2 {
                left[group + 8 * (i % 2)][member + 4 * (i / 2)] =
                    tf(registers.r32[a[i] as usize][lane]);
            }
            for i in 0..k / 4 {
                right[member + 4 * i][group] = tf(registers.r32[b[i] as usize][lane]);
            }
        } else {
            for i in 0..k / 4 {
                for high in 0..2 {
                    let value = element(registers.r32[a[i] as usize][lane], high);
                    left[group + 8 * (i % 2)][member * 2 + high + 8 * (i / 2)] = value;
                }
            }
            for i in 0..k / 8 {
                for high in 0..2 {
                    right[member * 2 + high + 8 * i][group] =
                        element(registers.r32[b[i] as usize][lane], high);
                }
            }
        }
    }
    for i in 0..4 {
        let addend = registers.r32[c[i] as usize];
        for (lane, addend) in addend.into_iter().enumerate() {
            let (row, column) = (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
            let sum: f64 = (0..k).map(|n| left[row][n] * right[n][column]).sum();
            sums[i][lane] = math::canonical((sum + f64::from(f32::from_bits(addend))) as f32);
        }
    }
    for (d, sums) in d.into_iter().zip(sums) {
        registers.r32[d as usize] = sums;
    }
}
