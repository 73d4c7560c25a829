//! Barriers of a block, of a cluster and of a warp, mbarriers, fences, and what ends a block.

use std::rc::Rc;

use crate::access::{Target, Who};
use crate::clock::{Clock, Part, Release};
use crate::error::Error;
use crate::ir::{Addr, FenceKind, Mbar, Op, RANK_SHIFT, SHARED_WINDOW, Space};
use crate::machine::Machine;
use crate::race::Kind;
use crate::warp::{Step, Wait, Warp};

/// One of a block's sixteen barriers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Barrier {
    /// Warp, lanes, and whether they wait.
    arrivals: Vec<(usize, u32, bool)>,
    count: Option<u32>,
    pub(crate) generation: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Mbarrier {
    expected: u32,
    pending: i64,
    tx: i64,
    /// Completed phases.
    pub(crate) phase: u32,
    pub(crate) collecting: Rc<Clock>,
    released: Rc<Clock>,
    /// Who initialised it: thread, epoch, warp, lane, instruction.
    init: (usize, u32, usize, u32, u32),
    /// Clock entries of asynchronous writes from the own block and from others.
    pub(crate) agents: [u32; 2],
    /// Phases that a waiter saw complete, and the last one in which asynchronous bytes arrived.
    observed: u32,
    landed: Option<(u32, u32)>,
}

impl Mbarrier {
    /// Counts `bytes` of an asynchronous write on the phase that is open.
    pub(crate) fn complete_tx(&mut self, bytes: u32, by: Option<u32>) {
        self.tx -= i64::from(bytes);
        if let Some(pc) = by {
            self.landed = Some((self.phase, pc));
        }
        self.advance();
    }

    fn advance(&mut self) {
        if self.pending == 0 && self.tx == 0 {
            self.phase += 1;
            self.pending = i64::from(self.expected);
            let clock = Rc::make_mut(&mut self.collecting);
            for agent in self.agents {
                clock.raise(
                    agent as usize,
                    &[Part::Writes, Part::Reads, Part::Proxy],
                    self.phase,
                );
            }
            self.released = self.collecting.clone();
        }
    }

    pub(crate) fn arrive(&mut self, count: i64) -> Result<(), &'static str> {
        if self.pending < count {
            return Err("more arrivals than the mbarrier expects");
        }
        self.pending -= count;
        self.advance();
        Ok(())
    }

    pub(crate) fn add_pending(&mut self) {
        self.pending += 1;
    }
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
            Op::BarSync { id, count, .. } => self.bar(index, warp, pc, mask, *id, *count, true),
            Op::BarArrive { id, count, .. } => {
                self.bar(index, warp, pc, mask, *id, Some(*count), false)
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

    #[allow(clippy::too_many_arguments)]
    fn bar(
        &mut self,
        index: usize,
        warp: &Warp,
        pc: u32,
        mask: u32,
        id: u16,
        count: Option<u16>,
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

    pub(crate) fn exit(&mut self, index: usize, warp: &mut Warp, mask: u32) -> Result<Step, Error> {
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

    /// Finds the mbarrier an address means and checks that its initialisation is visible.
    pub(crate) fn find_mbarrier(
        &mut self,
        who: Who,
        warp: &Warp,
        addr: Addr,
        cluster: bool,
    ) -> Result<(usize, u32), Error> {
        let address = Self::address(warp, addr.reg, addr.offset, who.lane as usize);
        let generic = address & 0xff00_0000_0000_0000 == SHARED_WINDOW;
        let space = if generic {
            Space::Generic
        } else if cluster {
            Space::SharedCluster
        } else {
            Space::SharedCta
        };
        let target = self.resolve(who, space, address, 8, 8)?;
        let Target::Shared { block, at } = target else {
            let place = self.place(target, address, 8);
            return Err(Error::OutOfBounds {
                site: self.site(who.index, who.lane, who.pc),
                place,
            });
        };
        let key = at as u32;
        let Some(mbarrier) = self.blocks[block].mbarriers.get(&key) else {
            let (site, place) = (
                self.site(who.index, who.lane, who.pc),
                self.place(target, address, 8),
            );
            return Err(Error::MbarrierMisuse {
                site,
                place,
                what: "no mbarrier is initialised here",
            });
        };
        let (thread, epoch, index, lane, pc) = mbarrier.init;
        let own = thread == who.index * 32 + who.lane as usize;
        let clock = self.clocks.lane(who.index, who.lane as usize);
        let seen =
            clock.get(thread, Part::Writes) >= epoch || clock.get(thread, Part::Inits) >= epoch;
        if self.clocks.enabled && !own && !seen {
            let (site, place) = (
                self.site(who.index, who.lane, who.pc),
                self.place(target, address, 8),
            );
            return Err(Error::MbarrierNotVisible {
                site,
                place,
                earlier: self.site(index, lane, pc),
            });
        }
        Ok((block, key))
    }

    fn mbarrier_at(&mut self, block: usize, key: u32) -> Option<&mut Mbarrier> {
        self.blocks[block].mbarriers.get_mut(&key)
    }

    fn mbarrier(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        op: &Mbar,
    ) -> Result<Step, Error> {
        if let Mbar::Wait { .. } = op {
            return self.mbarrier_wait(index, warp, pc, mask, op);
        }
        let mut publishes = false;
        for lane in (0..32u32).filter(|l| mask >> l & 1 != 0) {
            let who = Who { index, lane, pc };
            let read = |warp: &Warp, reg: u16| warp.registers.r32[reg as usize][lane as usize];
            match *op {
                Mbar::Init { addr, count } => {
                    self.mbarrier_init(who, warp, addr, read(warp, count))?
                }
                Mbar::Inval { addr } => {
                    let (block, key) = self.find_mbarrier(who, warp, addr, false)?;
                    self.blocks[block].mbarriers.remove(&key);
                }
                Mbar::Arrive {
                    addr,
                    cluster,
                    state,
                    count,
                    tx,
                    release,
                    drop,
                } => {
                    let (block, key) = self.find_mbarrier(who, warp, addr, cluster)?;
                    let count = count.map_or(1, |c| read(warp, c));
                    let tx = tx.map_or(0, |t| read(warp, t));
                    let mut collecting = self
                        .mbarrier_at(block, key)
                        .map(|m| std::mem::take(&mut m.collecting))
                        .unwrap_or_default();
                    if release {
                        self.clocks
                            .release(index, 1 << lane, &mut collecting, Release::Everything);
                        publishes = true;
                    }
                    let site = self.site(index, lane, pc);
                    let place = self.place(
                        Target::Shared {
                            block,
                            at: key as usize,
                        },
                        u64::from(key),
                        8,
                    );
                    let Some(mbarrier) = self.mbarrier_at(block, key) else {
                        continue;
                    };
                    mbarrier.collecting = collecting;
                    mbarrier.tx += i64::from(tx);
                    let phase = mbarrier.phase;
                    if drop {
                        mbarrier.expected = mbarrier.expected.saturating_sub(1);
                    }
                    if let Err(what) = mbarrier.arrive(i64::from(count)) {
                        return Err(Error::MbarrierMisuse { site, place, what });
                    }
                    if let Some(state) = state {
                        warp.registers.put(state, lane as usize, u64::from(phase));
                    }
                }
                Mbar::ExpectTx { addr, cluster, tx } => {
                    let (block, key) = self.find_mbarrier(who, warp, addr, cluster)?;
                    let tx = read(warp, tx);
                    if let Some(mbarrier) = self.mbarrier_at(block, key) {
                        mbarrier.tx += i64::from(tx);
                    }
                }
                Mbar::CompleteTx { addr, cluster, tx } => {
                    let (block, key) = self.find_mbarrier(who, warp, addr, cluster)?;
                    let tx = read(warp, tx);
                    if let Some(mbarrier) = self.mbarrier_at(block, key) {
                        mbarrier.complete_tx(tx, None);
                    }
                }
                Mbar::Wait { .. } => {}
            }
        }
        if publishes {
            self.clocks.bump(index);
        }
        Ok(Step::Yield)
    }

    fn mbarrier_init(
        &mut self,
        who: Who,
        warp: &Warp,
        addr: Addr,
        count: u32,
    ) -> Result<(), Error> {
        let address = Self::address(warp, addr.reg, addr.offset, who.lane as usize);
        let generic = address & 0xff00_0000_0000_0000 == SHARED_WINDOW;
        let target = self.resolve(
            who,
            if generic {
                Space::Generic
            } else {
                Space::SharedCta
            },
            address,
            8,
            8,
        )?;
        let fault = |machine: &Self, what| {
            let (site, place) = (
                machine.site(who.index, who.lane, who.pc),
                machine.place(target, address, 8),
            );
            Error::MbarrierMisuse { site, place, what }
        };
        let Target::Shared { block, at } = target else {
            return Err(fault(self, "an mbarrier outside shared memory"));
        };
        if count == 0 || count >= 1 << 20 {
            return Err(fault(self, "an mbarrier count outside 1 to 2^20 - 1"));
        }
        if self.blocks[block].mbarriers.contains_key(&(at as u32)) {
            return Err(fault(self, "a second initialisation of a live mbarrier"));
        }
        self.order(who, target, address, 8, Kind::Write)?;
        self.blocks[block].written.set(at, 8);
        let agents = [self.clocks.agent(), self.clocks.agent()];
        let init = (
            who.index * 32 + who.lane as usize,
            self.clocks.epoch(who.index),
            who.index,
            who.lane,
            who.pc,
        );
        let mbarrier = Mbarrier {
            expected: count,
            pending: i64::from(count),
            tx: 0,
            phase: 0,
            collecting: Rc::default(),
            released: Rc::default(),
            init,
            agents,
            observed: 0,
            landed: None,
        };
        self.blocks[block].mbarriers.insert(at as u32, mbarrier);
        Ok(())
    }

    fn mbarrier_wait(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        op: &Mbar,
    ) -> Result<Step, Error> {
        let Mbar::Wait {
            addr,
            block: blocking,
            done,
            state,
            parity,
            acquire,
            cluster,
        } = *op
        else {
            return Ok(Step::Next);
        };
        // A try_wait may give up at any time; a kernel must loop.
        let gives_up = blocking && self.random(4) == 0;
        let mut complete = 0;
        let mut waiting = None;
        let mut acquired: Vec<(usize, u32, u32)> = Vec::new();
        for lane in (0..32u32).filter(|l| mask >> l & 1 != 0) {
            let who = Who { index, lane, pc };
            let (block, key) = self.find_mbarrier(who, warp, addr, false)?;
            let asked = warp.registers.get(state, lane as usize);
            let Some(mbarrier) = self.mbarrier_at(block, key) else {
                continue;
            };
            let over = if parity {
                u64::from(mbarrier.phase & 1) != asked & 1
            } else {
                u64::from(mbarrier.phase) > asked
            };
            if over {
                complete |= 1 << lane;
                mbarrier.observed = mbarrier.phase;
            } else {
                waiting = Some(Wait::Mbarrier {
                    block,
                    address: key,
                    phase: mbarrier.phase,
                });
            }
            if over {
                match acquired
                    .iter_mut()
                    .find(|(b, k, _)| (*b, *k) == (block, key))
                {
                    Some((_, _, lanes)) => *lanes |= 1 << lane,
                    None => acquired.push((block, key, 1 << lane)),
                }
            }
        }
        for (block, key, lanes) in acquired.into_iter().filter(|_| acquire) {
            let Some(mbarrier) = self.mbarrier_at(block, key) else {
                continue;
            };
            let released = mbarrier.released.clone();
            let remote = mbarrier.agents[1] as usize;
            if cluster {
                self.clocks.acquire(index, lanes, &released);
            } else {
                // Block scope: what other blocks did stays unordered.
                let block_threads = self.warps_per_block * 32;
                let threads = block * block_threads..(block + 1) * block_threads;
                let all = block_threads * self.blocks.len();
                self.clocks.acquire_if(index, lanes, &released, |i| {
                    threads.contains(&i) || (i >= all && i != remote)
                });
            }
        }
        if let Some(wait) = waiting.filter(|_| complete == 0 && blocking && !gives_up) {
            return Ok(Step::Retry(wait));
        }
        warp.registers.put_pred(done.index, mask, complete);
        Ok(Step::Yield)
    }
}
