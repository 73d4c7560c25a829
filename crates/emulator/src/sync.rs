//! Barriers of a block, of a cluster and of a warp, mbarriers, fences, and what ends a block.

use std::rc::Rc;

use crate::clock::Release;
use crate::error::Error;
use crate::ir::{FenceKind, Op, RANK_SHIFT, SHARED_WINDOW};
use crate::machine::Machine;
use crate::warp::{Step, Wait, Warp};

/// One of a block's sixteen barriers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Barrier {
    /// Warp, lanes, and whether they wait.
    arrivals: Vec<(usize, u32, bool)>,
    count: Option<u32>,
    pub(crate) generation: u32,
}

impl Machine<'_> {
    pub(crate) fn synchronise(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        op: &Op,
    ) -> Result<Step, Error> {
        let first = mask.trailing_zeros();
        let live = self.live[index];
        match op {
            Op::Atomic(atomic) => {
                self.atomic(index, warp, pc, mask, atomic)?;
                Ok(Step::Yield)
            }
            Op::BarSync { aligned: true, .. } | Op::BarArrive { aligned: true, .. }
                if mask != live =>
            {
                Ok(Step::Retry(Wait::Converge))
            }
            Op::BarSync { id, count, .. } => self.bar(index, warp, pc, mask, (*id, *count), true),
            Op::BarArrive { id, count, .. } => {
                self.bar(index, warp, pc, mask, (*id, Some(*count)), false)
            }
            Op::WarpSync { mask: members } => {
                let members = warp.registers.r32[*members as usize][first as usize];
                if mask & !members != 0 {
                    return Err(self.misuse(
                        index,
                        mask & !members,
                        pc,
                        "a thread outside the barrier's mask executes it",
                    ));
                }
                if members & live & !mask == 0 {
                    self.clocks.barrier(&[(index, mask, true)]);
                    return Ok(Step::Next);
                }
                // Other fragments may already wait for this one.
                let wait = Wait::WarpSync { mask: members };
                let here = warp
                    .fragments
                    .iter()
                    .filter(|f| f.wait == wait)
                    .fold(mask, |m, f| m | f.mask);
                if members & live & !here == 0 {
                    self.clocks.barrier(&[(index, here, true)]);
                    for fragment in warp.fragments.iter_mut().filter(|f| f.wait == wait) {
                        fragment.wait = Wait::None;
                    }
                    return Ok(Step::Next);
                }
                Ok(Step::Then(wait))
            }
            Op::ClusterArrive { aligned: true, .. } | Op::ClusterWait { aligned: true }
                if mask != live =>
            {
                Ok(Step::Retry(Wait::Converge))
            }
            Op::ClusterArrive { release, .. } => {
                if warp.cluster_open & mask != 0 {
                    return Err(self.misuse(
                        index,
                        warp.cluster_open & mask,
                        pc,
                        "second cluster arrival without a wait",
                    ));
                }
                let what = if *release {
                    Release::Everything
                } else {
                    Release::Inits
                };
                self.clocks
                    .release(index, mask, &mut self.cluster_barrier.collecting, what);
                self.clocks.bump(index);
                warp.cluster_open |= mask;
                for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
                    warp.cluster_phase[lane] = self.cluster_barrier.phase + 1;
                }
                self.arrived[index] |= mask;
                self.cluster_advance();
                Ok(Step::Yield)
            }
            Op::ClusterWait { .. } => {
                if mask & !warp.cluster_open != 0 {
                    return Err(self.misuse(
                        index,
                        mask & !warp.cluster_open,
                        pc,
                        "cluster wait without an arrival",
                    ));
                }
                let phase = warp.cluster_phase[first as usize];
                if self.cluster_barrier.phase < phase {
                    return Ok(Step::Retry(Wait::ClusterBarrier { phase }));
                }
                warp.cluster_open &= !mask;
                let released = self.cluster_barrier.released.clone();
                self.clocks.acquire(index, mask, &released);
                Ok(Step::Yield)
            }
            Op::Fence { kind } => {
                match kind {
                    FenceKind::ProxyAsync => self.clocks.fence_proxy(index, mask),
                    FenceKind::MbarrierInit => self.clocks.fence_inits(index, mask),
                    FenceKind::Memory => self.fence(index, warp, mask),
                }
                Ok(Step::Yield)
            }
            Op::Mapa { d, a, rank } => {
                for lane in (0..32usize).filter(|l| mask >> l & 1 != 0) {
                    let rank = warp.registers.r32[*rank as usize][lane];
                    if rank as usize >= self.blocks.len() {
                        return Err(self.misuse(
                            index,
                            1 << lane,
                            pc,
                            "mapa of a rank outside the cluster",
                        ));
                    }
                    let inside = warp.registers.get(*a, lane) & ((1 << RANK_SHIFT) - 1);
                    let generic = warp.registers.get(*a, lane) & 0xff00_0000_0000_0000;
                    warp.registers.put(
                        *d,
                        lane,
                        generic | u64::from(rank + 1) << RANK_SHIFT | inside,
                    );
                }
                Ok(Step::Next)
            }
            Op::Getctarank { d, a } => {
                for lane in (0..32usize).filter(|l| mask >> l & 1 != 0) {
                    let rank = (warp.registers.get(*a, lane) & !SHARED_WINDOW) >> RANK_SHIFT;
                    let rank = if rank == 0 {
                        warp.block as u64
                    } else {
                        rank - 1
                    };
                    warp.registers.r32[*d as usize][lane] = rank as u32;
                }
                Ok(Step::Next)
            }
            Op::Mbarrier(op) => self.mbarrier(index, warp, pc, mask, op),
            Op::Async(op) => self.asynchronous(index, warp, pc, mask, op),
            _ => unreachable!("{op:?} is executed elsewhere"),
        }
    }

    pub(crate) fn misuse(&self, index: usize, lanes: u32, pc: u32, what: &'static str) -> Error {
        Error::BarrierMisuse {
            site: self.site(index, lanes.trailing_zeros() & 31, pc),
            what,
        }
    }

    fn fence(&mut self, index: usize, warp: &mut Warp, mask: u32) {
        if !self.clocks.enabled {
            return;
        }
        for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
            if let Some(seen) = warp.seen[lane].take() {
                self.clocks.acquire(index, 1 << lane, &seen);
            }
            let mut past = Rc::default();
            self.clocks
                .release(index, 1 << lane, &mut past, Release::Everything);
            warp.fenced[lane] = Some(past);
        }
        self.clocks.bump(index);
    }

    fn bar(
        &mut self,
        index: usize,
        warp: &Warp,
        pc: u32,
        mask: u32,
        (id, count): (u16, Option<u16>),
        waits: bool,
    ) -> Result<Step, Error> {
        let lane = mask.trailing_zeros() as usize;
        let id = warp.registers.r32[id as usize][lane];
        let count = count.map(|c| warp.registers.r32[c as usize][lane]);
        if id >= 16 {
            return Err(self.misuse(index, mask, pc, "a barrier number above 15"));
        }
        if count.is_some_and(|c| c == 0 || c % 32 != 0) {
            return Err(self.misuse(
                index,
                mask,
                pc,
                "a barrier count that is not a multiple of 32",
            ));
        }
        let barrier = &self.blocks[warp.block].barriers[id as usize];
        if !barrier.arrivals.is_empty() && barrier.count != count {
            return Err(self.misuse(index, mask, pc, "a barrier with two different counts"));
        }
        if barrier
            .arrivals
            .iter()
            .any(|(w, m, _)| *w == index && m & mask != 0)
        {
            return Err(self.misuse(
                index,
                mask,
                pc,
                "a second arrival before the barrier is complete",
            ));
        }
        let barrier = &mut self.blocks[warp.block].barriers[id as usize];
        let generation = barrier.generation;
        barrier.count = count;
        barrier.arrivals.push((index, mask, waits));
        if let Err(what) = self.bar_advance(warp.block, id as usize) {
            return Err(self.misuse(index, mask, pc, what));
        }
        Ok(if waits {
            Step::Then(Wait::Barrier {
                id: id as u8,
                generation,
            })
        } else {
            Step::Yield
        })
    }

    /// Completes a barrier if everybody it waits for has arrived.
    fn bar_advance(&mut self, block: usize, id: usize) -> Result<(), &'static str> {
        let barrier = &self.blocks[block].barriers[id];
        if barrier.arrivals.is_empty() {
            return Ok(());
        }
        let warps = block * self.warps_per_block..(block + 1) * self.warps_per_block;
        let lanes = |w: usize| {
            barrier
                .arrivals
                .iter()
                .filter(|a| a.0 == w)
                .fold(0, |m, a| m | a.1)
        };
        let complete = match barrier.count {
            None => warps.clone().all(|w| self.live[w] & !lanes(w) == 0),
            Some(count) => {
                let whole = |w: usize| {
                    if lanes(w) != 0 && self.live[w] & !lanes(w) == 0 {
                        32
                    } else {
                        lanes(w).count_ones()
                    }
                };
                let arrived: u32 = warps.clone().map(whole).sum();
                if arrived > count {
                    return Err("more threads than the barrier's count");
                }
                arrived == count
            }
        };
        if complete {
            let barrier = &mut self.blocks[block].barriers[id];
            barrier.generation += 1;
            let arrivals = std::mem::take(&mut barrier.arrivals);
            self.clocks.barrier(&arrivals);
        }
        Ok(())
    }

    fn cluster_advance(&mut self) {
        if self
            .live
            .iter()
            .zip(&self.arrived)
            .all(|(live, arrived)| live & !arrived == 0)
        {
            let barrier = &mut self.cluster_barrier;
            barrier.phase += 1;
            barrier.released = barrier.collecting.clone();
            self.arrived.fill(0);
        }
    }

    pub(crate) fn exit(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
    ) -> Result<Step, Error> {
        if warp.cluster_open & mask != 0 {
            let lanes = warp.cluster_open & mask;
            let what = "a thread ends between its cluster arrival and its wait";
            return Err(self.misuse(index, lanes, pc, what));
        }
        self.live[index] &= !mask;
        let block = warp.block;
        if let Some(pc) = self.unawaited(index, mask) {
            return Err(Error::UnawaitedAsync {
                block: self.blocks[block].index,
                line: self.entry.code[pc as usize].line,
                what: "a thread did not wait for its copies",
            });
        }
        for id in 0..16 {
            // Fewer threads cannot be too many for a count.
            let _ = self.bar_advance(block, id);
        }
        if self.arrived.iter().any(|a| *a != 0) {
            self.cluster_advance();
        }
        if self.live[index] == 0 {
            self.blocks[block].live_warps -= 1;
            if self.blocks[block].live_warps == 0 {
                self.end_block(block)?;
            }
        }
        Ok(Step::Exited)
    }

    fn end_block(&mut self, block: usize) -> Result<(), Error> {
        let index = self.blocks[block].index;
        let line = |pc: u32| self.entry.code[pc as usize].line;
        if self.blocks[block].in_flight > 0 {
            let pc = self
                .queue
                .iter()
                .find(|p| p.touches(block))
                .map_or(0, |p| p.pc());
            let what = "an asynchronous operation on its shared memory is still on its way";
            return Err(Error::UnawaitedAsync {
                block: index,
                line: line(pc),
                what,
            });
        }
        for mbarrier in self.blocks[block].mbarriers.values() {
            if let Some((phase, pc)) = mbarrier
                .landed
                .filter(|(phase, _)| *phase >= mbarrier.observed)
            {
                let what = if phase < mbarrier.phase {
                    "no thread waited for the bytes that arrived on its mbarrier"
                } else {
                    "more bytes arrived on its mbarrier than it waited for"
                };
                return Err(Error::UnawaitedAsync {
                    block: index,
                    line: line(pc),
                    what,
                });
            }
            if mbarrier.tx < 0 {
                let what = "more bytes arrived on its mbarrier than it expected";
                return Err(Error::UnawaitedAsync {
                    block: index,
                    line: line(mbarrier.init.4),
                    what,
                });
            }
        }
        Ok(())
    }
}
