//! Asynchronous stores and copies: issued now, landing after a delay drawn from the seed.

use std::rc::Rc;

use crate::access::{Target, Who};
use crate::clock::{Clock, Clocks, Part};
use crate::error::Error;
use crate::ir::{Addr, Async, Space};
use crate::machine::Machine;
use crate::race::{AGENT, Kind, Record};
use crate::warp::{Step, Wait, Warp};

/// The groups of asynchronous copies of one thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct LaneGroups {
    /// The group that is still open.
    open: u32,
    /// Groups with copies on their way, and how many.
    outstanding: Vec<(u32, u32)>,
    agent: Option<u32>,
    /// Groups the thread has not waited for, and the instruction of each.
    unawaited: Vec<(u32, u32)>,
}

impl LaneGroups {
    fn begin(&mut self, pc: u32) -> u32 {
        self.unawaited.push((self.open, pc));
        match self.outstanding.iter_mut().find(|(g, _)| *g == self.open) {
            Some((_, n)) => *n += 1,
            None => self.outstanding.push((self.open, 1)),
        }
        self.open
    }

    fn end(&mut self, group: u32) {
        for (g, n) in &mut self.outstanding {
            *n -= u32::from(*g == group);
        }
        self.outstanding.retain(|(_, n)| *n > 0);
    }

    fn done(&self, n: u32) -> bool {
        if n == u32::MAX {
            return self.outstanding.is_empty();
        }
        self.outstanding
            .iter()
            .all(|(g, _)| g.saturating_add(n) >= self.open)
    }
}

enum Action {
    /// Bytes into shared memory, counted on an mbarrier of the same block.
    Store {
        target: Target,
        bytes: [u8; 16],
        len: usize,
        block: usize,
        key: u32,
    },
    Copy {
        target: Target,
        source: Target,
        size: usize,
        from_memory: usize,
        group: u32,
    },
    Arrive {
        block: usize,
        key: u32,
    },
    BulkIn {
        target: Target,
        source: Target,
        size: usize,
        block: usize,
        key: u32,
    },
    BulkOut {
        target: Target,
        source: Target,
        size: usize,
        group: u32,
    },
}

/// An operation on its way, and what its issuer was ordered after.
pub(crate) struct Pending {
    due: u64,
    who: Who,
    past: Rc<Clock>,
    epoch: u32,
    action: Action,
}

impl Pending {
    pub(crate) fn touches(&self, block: usize) -> bool {
        let of = |t: &Target| matches!(t, Target::Shared { block: b, .. } if *b == block);
        match &self.action {
            Action::Store { target, .. } => of(target),
            Action::Arrive { block: b, .. } => *b == block,
            Action::Copy { target, source, .. }
            | Action::BulkIn { target, source, .. }
            | Action::BulkOut { target, source, .. } => of(target) || of(source),
        }
    }

    pub(crate) fn pc(&self) -> u32 {
        self.who.pc
    }
}

/// Longest delay, in scheduler steps.
const LONGEST: u64 = 400;

impl Machine<'_> {
    /// The instruction of a copy that none of these lanes has waited for.
    pub(crate) fn unawaited(&self, index: usize, mask: u32) -> Option<u32> {
        let mut lanes = (0..32).filter(|l| mask >> l & 1 != 0);
        lanes.find_map(|lane| {
            let thread = index * 32 + lane;
            let first = self.copies[thread].unawaited.first();
            first
                .or(self.bulks[thread].unawaited.first())
                .map(|(_, pc)| *pc)
        })
    }

    pub(crate) fn copies_done(
        &self,
        index: usize,
        mask: u32,
        n: u32,
        bulk: bool,
        _read: bool,
    ) -> bool {
        let groups = if bulk { &self.bulks } else { &self.copies };
        (0..32)
            .filter(|l| mask >> l & 1 != 0)
            .all(|lane| groups[index * 32 + lane].done(n))
    }

    fn count_in_flight(&mut self, action: &Action, change: i32) {
        let block = match action {
            Action::Store { block, .. }
            | Action::Arrive { block, .. }
            | Action::BulkIn { block, .. } => *block,
            Action::Copy {
                target: Target::Shared { block, .. },
                ..
            }
            | Action::BulkOut {
                source: Target::Shared { block, .. },
                ..
            } => *block,
            Action::Copy { .. } | Action::BulkOut { .. } => return,
        };
        let count = &mut self.blocks[block].in_flight;
        *count = count.wrapping_add_signed(change);
    }

    fn issue(&mut self, who: Who, action: Action) {
        self.count_in_flight(&action, 1);
        let spread = [4, 40, LONGEST][self.random(3) as usize];
        let due = self.step + 1 + self.random(spread);
        let past = self.clocks.lane(who.index, who.lane as usize).clone();
        let epoch = self.clocks.epoch(who.index);
        self.queue.push(Pending {
            due,
            who,
            past,
            epoch,
            action,
        });
    }

    /// Lands what is due, in any order.
    pub(crate) fn land_due(&mut self) -> Result<(), Error> {
        let mut i = 0;
        while i < self.queue.len() {
            if self.queue[i].due <= self.step {
                let pending = self.queue.swap_remove(i);
                self.land(pending)?;
            } else {
                i += 1;
            }
        }
        Ok(())
    }

    /// Lands the next operation, whenever it is due; false when there is none.
    pub(crate) fn land_next(&mut self) -> Result<bool, Error> {
        let Some(next) = (0..self.queue.len()).min_by_key(|&i| self.queue[i].due) else {
            return Ok(false);
        };
        let pending = self.queue.swap_remove(next);
        self.step = self.step.max(pending.due);
        self.land(pending)?;
        Ok(true)
    }

    fn missing(&self, who: Who, block: usize, key: u32) -> Error {
        let place = self.shared_place(block, u64::from(key), u64::from(key), 8);
        let what = "the mbarrier of an asynchronous operation is gone";
        Error::MbarrierMisuse {
            site: self.site(who.index, who.lane, who.pc),
            place,
            what,
        }
    }

    /// Copies between memories in pieces, so that each stays within the written-byte check.
    fn transfer(
        &mut self,
        who: Who,
        target: Target,
        source: Target,
        size: usize,
    ) -> Result<(), Error> {
        let shift = |t: Target, by: usize| match t {
            Target::Global { extent, at } => Target::Global {
                extent,
                at: at + by,
            },
            Target::Shared { block, at } => Target::Shared { block, at: at + by },
            other => other,
        };
        let mut piece = [0u8; 16];
        for start in (0..size).step_by(16) {
            let len = (size - start).min(16);
            let from = shift(source, start);
            if !self.fetch(None, who.lane as usize, from, &mut piece[..len]) {
                return Err(self.uninitialised(who, from, 0, len));
            }
            self.put(None, shift(target, start), &piece[..len]);
        }
        Ok(())
    }

    fn record(&self, who: Who, agent: u32, epoch: u32, kind: Kind) -> Record {
        Record {
            cluster: self.cluster,
            epoch,
            lanes: 1,
            pc: who.pc,
            owner: AGENT | agent,
            kind,
        }
    }

    fn land(&mut self, pending: Pending) -> Result<(), Error> {
        let Pending {
            who,
            past,
            epoch,
            action,
            ..
        } = pending;
        let thread = who.index * 32 + who.lane as usize;
        let own_block = who.index / self.warps_per_block;
        self.count_in_flight(&action, -1);
        match action {
            Action::Store {
                target,
                bytes,
                len,
                block,
                key,
            } => {
                let remote = block != own_block;
                let Some(mbarrier) = self.blocks[block].mbarriers.get(&key) else {
                    return Err(self.missing(who, block, key));
                };
                let (agent, phase) = (mbarrier.agents[usize::from(remote)], mbarrier.phase);
                let record = self.record(who, agent, phase + 1, Kind::AsyncWrite);
                self.order_async(who, target, len, record, &past, epoch)?;
                self.put(None, target, &bytes[..len]);
                let releases = self.options.async_store_releases_issuer && self.clocks.enabled;
                if let Some(mbarrier) = self.blocks[block].mbarriers.get_mut(&key) {
                    if releases {
                        Clocks::release_reads(&mut mbarrier.collecting, &past, thread, epoch);
                    }
                    mbarrier.complete_tx(len as u32, Some(who.pc));
                }
            }
            Action::Copy {
                target,
                source,
                size,
                from_memory,
                group,
            } => {
                let agent = self.lane_agent(thread, false);
                let record = self.record(who, agent, group + 1, Kind::AsyncWrite);
                self.order_async(who, target, size, record, &past, epoch)?;
                self.put(None, target, &[0; 16][..size]);
                if from_memory > 0 {
                    self.transfer(who, target, source, from_memory)?;
                }
                self.copies[thread].end(group);
            }
            Action::Arrive { block, key } => {
                if !self.copies[thread].outstanding.is_empty() {
                    // Not before the copies it follows.
                    self.count_in_flight(&Action::Arrive { block, key }, 1);
                    let due = self.step + 1 + self.random(20);
                    self.queue.push(Pending {
                        due,
                        who,
                        past,
                        epoch,
                        action: Action::Arrive { block, key },
                    });
                    return Ok(());
                }
                let agent = self.lane_agent(thread, false);
                let open = self.copies[thread].open;
                let gone = self.missing(who, block, key);
                let Some(mbarrier) = self.blocks[block].mbarriers.get_mut(&key) else {
                    return Err(gone);
                };
                let clock = Rc::make_mut(&mut mbarrier.collecting);
                clock.raise(agent as usize, &[Part::Writes, Part::Reads], open + 1);
                mbarrier.arrive(1).or(Err(gone))?;
            }
            Action::BulkIn {
                target,
                source,
                size,
                block,
                key,
            } => {
                let Some(mbarrier) = self.blocks[block].mbarriers.get(&key) else {
                    return Err(self.missing(who, block, key));
                };
                let (agent, phase) = (mbarrier.agents[0], mbarrier.phase);
                let read = self.record(who, agent, phase + 1, Kind::BulkRead);
                let write = self.record(who, agent, phase + 1, Kind::BulkWrite);
                self.order_async(who, source, size, read, &past, epoch)?;
                self.order_async(who, target, size, write, &past, epoch)?;
                self.transfer(who, target, source, size)?;
                if let Some(mbarrier) = self.blocks[block].mbarriers.get_mut(&key) {
                    mbarrier.complete_tx(size as u32, Some(who.pc));
                }
            }
            Action::BulkOut {
                target,
                source,
                size,
                group,
            } => {
                let agent = self.lane_agent(thread, true);
                let read = self.record(who, agent, group + 1, Kind::BulkRead);
                let write = self.record(who, agent, group + 1, Kind::BulkWrite);
                self.order_async(who, source, size, read, &past, epoch)?;
                self.order_async(who, target, size, write, &past, epoch)?;
                self.transfer(who, target, source, size)?;
                self.bulks[thread].end(group);
            }
        }
        Ok(())
    }

    fn lane_agent(&mut self, thread: usize, bulk: bool) -> u32 {
        let groups = if bulk {
            &mut self.bulks
        } else {
            &mut self.copies
        };
        let clocks = &mut self.clocks;
        *groups[thread].agent.get_or_insert_with(|| clocks.agent())
    }

    /// Resolves an address operand that is generic, or in the state space given.
    fn operand(
        &mut self,
        who: Who,
        warp: &Warp,
        addr: Addr,
        space: Space,
        len: usize,
        align: usize,
    ) -> Result<(Target, u64), Error> {
        let address = Self::address(warp, addr.reg, addr.offset, who.lane as usize);
        let window = address & 0xff00_0000_0000_0000;
        let space = if window == crate::ir::SHARED_WINDOW {
            Space::Generic
        } else {
            space
        };
        Ok((self.resolve(who, space, address, len, align)?, address))
    }

    pub(crate) fn asynchronous(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        op: &Async,
    ) -> Result<Step, Error> {
        if let Async::Wait { n } | Async::BulkWait { n, .. } = *op {
            let bulk = matches!(op, Async::BulkWait { .. });
            let read = matches!(op, Async::BulkWait { read: true, .. });
            if !self.copies_done(index, mask, n, bulk, read) {
                return Ok(Step::Retry(Wait::Copies { n, bulk, read }));
            }
            for lane in (0..32usize).filter(|l| mask >> l & 1 != 0) {
                let all = if bulk {
                    &mut self.bulks
                } else {
                    &mut self.copies
                };
                let groups = &mut all[index * 32 + lane];
                let open = groups.open;
                groups
                    .unawaited
                    .retain(|(g, _)| n != u32::MAX && g.saturating_add(n) >= open);
                let groups = groups.clone();
                let epoch = if n == u32::MAX {
                    groups.open + 1
                } else {
                    groups.open.saturating_sub(n)
                };
                let parts: &[Part] = if read {
                    &[Part::Reads]
                } else {
                    &[Part::Writes, Part::Reads, Part::Proxy]
                };
                if let Some(agent) = groups.agent {
                    self.clocks.raise(index, lane, agent, parts, epoch);
                }
            }
            return Ok(Step::Yield);
        }
        for lane in (0..32u32).filter(|l| mask >> l & 1 != 0) {
            let who = Who { index, lane, pc };
            let thread = index * 32 + lane as usize;
            match op {
                Async::Commit => self.copies[thread].open += 1,
                Async::BulkCommit => self.bulks[thread].open += 1,
                Async::Store {
                    addr,
                    ty,
                    regs,
                    barrier,
                } => {
                    let width = ty.bits() as usize / 8;
                    let len = width * regs.len();
                    let (target, address) =
                        self.operand(who, warp, *addr, Space::SharedCluster, len, len)?;
                    let (block, key) = self.find_mbarrier(who, warp, *barrier, true)?;
                    if !matches!(target, Target::Shared { block: b, .. } if b == block) {
                        let (site, place) = (
                            self.site(index, lane, pc),
                            self.place(target, address, len as u32),
                        );
                        return Err(Error::MbarrierMisuse {
                            site,
                            place,
                            what: "the bytes and their mbarrier are in different blocks",
                        });
                    }
                    let mut bytes = [0u8; 16];
                    for (reg, part) in regs.iter().zip(bytes[..len].chunks_exact_mut(width)) {
                        part.copy_from_slice(
                            &warp.registers.get(*reg, lane as usize).to_le_bytes()[..width],
                        );
                    }
                    self.issue(
                        who,
                        Action::Store {
                            target,
                            bytes,
                            len,
                            block,
                            key,
                        },
                    );
                }
                Async::Copy {
                    dst,
                    src,
                    size,
                    src_size,
                } => {
                    let size = *size as usize;
                    let from_memory = match src_size {
                        Some(reg) => (warp.registers.get(*reg, lane as usize) as usize).min(size),
                        None => size,
                    };
                    let (target, _) =
                        self.operand(who, warp, *dst, Space::SharedCta, size, size)?;
                    let source = if from_memory > 0 {
                        let (source, address) =
                            self.operand(who, warp, *src, Space::Global, from_memory, size)?;
                        self.permitted(
                            who,
                            warp.waited >> lane & 1 != 0,
                            source,
                            address,
                            from_memory,
                            false,
                        )?;
                        self.order(who, source, address, from_memory, Kind::Read)?;
                        source
                    } else {
                        target
                    };
                    let group = self.copies[thread].begin(pc);
                    self.issue(
                        who,
                        Action::Copy {
                            target,
                            source,
                            size,
                            from_memory,
                            group,
                        },
                    );
                }
                Async::Arrive { addr, noinc } => {
                    let (block, key) = self.find_mbarrier(who, warp, *addr, false)?;
                    if let Some(mbarrier) = self.blocks[block]
                        .mbarriers
                        .get_mut(&key)
                        .filter(|_| !noinc)
                    {
                        mbarrier.add_pending();
                    }
                    self.copies[thread].unawaited.clear();
                    self.issue(who, Action::Arrive { block, key });
                }
                Async::BulkIn {
                    dst,
                    src,
                    size,
                    barrier,
                } => {
                    let size = self.bulk_size(who, warp, *size)?;
                    let (target, _) =
                        self.operand(who, warp, *dst, Space::SharedCluster, size, 16)?;
                    let (source, address) =
                        self.operand(who, warp, *src, Space::Global, size, 16)?;
                    self.permitted(
                        who,
                        warp.waited >> lane & 1 != 0,
                        source,
                        address,
                        size,
                        false,
                    )?;
                    let (block, key) = self.find_mbarrier(who, warp, *barrier, true)?;
                    self.issue(
                        who,
                        Action::BulkIn {
                            target,
                            source,
                            size,
                            block,
                            key,
                        },
                    );
                }
                Async::BulkOut { dst, src, size } => {
                    let size = self.bulk_size(who, warp, *size)?;
                    let (target, address) =
                        self.operand(who, warp, *dst, Space::Global, size, 16)?;
                    let (source, _) = self.operand(who, warp, *src, Space::SharedCta, size, 16)?;
                    self.permitted(
                        who,
                        warp.waited >> lane & 1 != 0,
                        target,
                        address,
                        size,
                        true,
                    )?;
                    let group = self.bulks[thread].begin(pc);
                    self.issue(
                        who,
                        Action::BulkOut {
                            target,
                            source,
                            size,
                            group,
                        },
                    );
                }
                Async::Wait { .. } | Async::BulkWait { .. } => {}
            }
        }
        // Later accesses of the issuer are not ordered before what it issued.
        self.clocks.bump(index);
        Ok(Step::Yield)
    }

    fn bulk_size(&self, who: Who, warp: &Warp, size: crate::ir::Reg) -> Result<usize, Error> {
        let size = warp.registers.get(size, who.lane as usize) as u32;
        if size == 0 || !size.is_multiple_of(16) {
            return Err(self.misuse(
                who.index,
                1 << who.lane,
                who.pc,
                "a bulk copy whose size is not a positive multiple of 16",
            ));
        }
        Ok(size as usize)
    }
}
