//! Loads, stores and atomics: which bytes an address means, whether the thread may touch them, and
//! in what order it does.

use std::rc::Rc;

use crate::alu::extend;
use crate::clock::{Clock, Release};
use crate::decode::dynamic_base;
use crate::error::{AddressSpace, Error, Place};
use crate::ir::{
    Access, Addr, Atomic, AtomicOp, Class, LOCAL_WINDOW, Order, PARAM_WINDOW, RANK_SHIFT,
    SHARED_BASE, SHARED_WINDOW, Space, Ty,
};
use crate::machine::Machine;
use crate::race::{Accessor, Conflict, Kind, Record};
use crate::warp::Warp;

/// Where an address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Global { extent: usize, at: usize },
    Shared { block: usize, at: usize },
    Local { at: usize },
    Param { at: usize },
}

/// Who accesses: the warp's index, the lane, and the instruction.
#[derive(Clone, Copy)]
pub(crate) struct Who {
    pub(crate) index: usize,
    pub(crate) lane: u32,
    pub(crate) pc: u32,
}

/// Largest access of one lane in bytes.
pub(crate) const WIDEST: usize = 64;

impl Machine<'_> {
    fn nowhere(&self, space: AddressSpace, address: u64, len: u32, who: Who) -> Error {
        let (buffer, offset) = match space {
            AddressSpace::Global => self.memory.nearest(address),
            _ => (String::new(), 0),
        };
        let place = Place {
            space,
            address,
            len_bytes: len,
            buffer,
            offset,
        };
        Error::OutOfBounds {
            site: self.site(who.index, who.lane, who.pc),
            place,
        }
    }

    pub(crate) fn place(&self, target: Target, address: u64, len_bytes: u32) -> Place {
        match target {
            Target::Global { extent, at } => {
                let extent = &self.memory.extents[extent];
                let buffer = &self.memory.buffers[extent.buffer];
                let offset = extent.start - buffer.address + at as u64;
                Place {
                    space: AddressSpace::Global,
                    address,
                    len_bytes,
                    buffer: buffer.name.clone(),
                    offset,
                }
            }
            Target::Shared { block, at } => self.shared_place(block, address, at as u64, len_bytes),
            Target::Local { at } => Place {
                space: AddressSpace::Local,
                address,
                len_bytes,
                buffer: String::new(),
                offset: at as u64,
            },
            Target::Param { at } => Place {
                space: AddressSpace::Param,
                address,
                len_bytes,
                buffer: String::new(),
                offset: at as u64,
            },
        }
    }

    /// Finds the bytes of an access, checks alignment and bounds.
    #[inline]
    pub(crate) fn resolve(
        &mut self,
        who: Who,
        space: Space,
        address: u64,
        len: usize,
        align: usize,
    ) -> Result<Target, Error> {
        let (space, inner) = match space {
            Space::Generic => match address & 0xff00_0000_0000_0000 {
                SHARED_WINDOW => (Space::SharedCluster, address & 0x00ff_ffff_ffff_ffff),
                LOCAL_WINDOW => (Space::Local, address & 0x00ff_ffff_ffff_ffff),
                PARAM_WINDOW => (Space::Param, address & 0x00ff_ffff_ffff_ffff),
                _ => (Space::Global, address),
            },
            space => (space, address),
        };
        let target = match space {
            Space::Global | Space::GlobalNc | Space::Generic => match self
                .memory
                .locate(address, len as u64, self.hint)
            {
                Some(extent) => {
                    self.hint = extent;
                    Target::Global {
                        extent,
                        at: (address - self.memory.extents[extent].start) as usize,
                    }
                }
                None => return Err(self.nowhere(AddressSpace::Global, address, len as u32, who)),
            },
            Space::SharedCta | Space::SharedCluster => {
                let own = who.index / self.warps_per_block;
                let rank = (inner >> RANK_SHIFT) as usize;
                let at = (inner & ((1 << RANK_SHIFT) - 1)) as usize;
                let block = if rank == 0 { own } else { rank - 1 };
                let reachable =
                    block < self.blocks.len() && (space == Space::SharedCluster || block == own);
                let (first, end) = (
                    SHARED_BASE as usize,
                    SHARED_BASE as usize + self.entry.shared_bytes as usize,
                );
                let fits = reachable && {
                    let all = self.blocks[block].shared.len();
                    let dynamic = dynamic_base(self.entry) as usize;
                    (at >= first && at + len <= end) || (at >= dynamic && at + len <= all)
                };
                if !fits {
                    return Err(self.nowhere(AddressSpace::Shared, address, len as u32, who));
                }
                if block != own && self.cluster_barrier.phase == 0 {
                    let place = self.shared_place(block, address, at as u64, len as u32);
                    let site = self.site(who.index, who.lane, who.pc);
                    return Err(Error::BlockNotStarted { site, place });
                }
                if self.blocks[block].live_warps == 0 {
                    let place = self.shared_place(block, address, at as u64, len as u32);
                    return Err(Error::EndedBlock {
                        site: self.site(who.index, who.lane, who.pc),
                        place,
                    });
                }
                Target::Shared { block, at }
            }
            Space::Local => {
                if (inner as usize).saturating_add(len) > self.entry.local_bytes as usize {
                    return Err(self.nowhere(AddressSpace::Local, address, len as u32, who));
                }
                Target::Local { at: inner as usize }
            }
            Space::Param => {
                if (inner as usize).saturating_add(len) > self.params.len() {
                    return Err(self.nowhere(AddressSpace::Param, address, len as u32, who));
                }
                Target::Param { at: inner as usize }
            }
        };
        if !inner.is_multiple_of(align as u64) {
            let place = self.place(target, address, len as u32);
            return Err(Error::Misaligned {
                site: self.site(who.index, who.lane, who.pc),
                place,
            });
        }
        Ok(target)
    }

    fn conflict(
        &self,
        who: Who,
        target: Target,
        address: u64,
        kind: Kind,
        conflict: Conflict,
    ) -> Error {
        let (earlier, at, len, proxy) = match conflict {
            Conflict::Race { earlier, at, len } => (earlier, at, len, false),
            Conflict::Proxy { earlier, at, len } => (earlier, at, len, true),
        };
        let base = match target {
            Target::Global { at, .. } | Target::Shared { at, .. } => at,
            Target::Local { .. } | Target::Param { .. } => 0,
        };
        let shift = at.wrapping_sub(base);
        let target = match target {
            Target::Global { extent, .. } => Target::Global { extent, at },
            Target::Shared { block, .. } => Target::Shared { block, at },
            other => other,
        };
        let place = self.place(target, address.wrapping_add(shift as u64), len as u32);
        let site = self.site(who.index, who.lane, who.pc);
        let mut before = site.clone();
        let instr = &self.entry.code[earlier.pc as usize];
        (before.line, before.instruction) =
            (instr.line, self.entry.text[earlier.pc as usize].clone());
        if earlier.cluster == self.cluster && earlier.owner & crate::race::AGENT == 0 {
            before = self.site(
                earlier.owner as usize,
                earlier.lanes.trailing_zeros(),
                earlier.pc,
            );
        }
        if proxy {
            Error::MissingProxyFence {
                site,
                place,
                earlier: before,
            }
        } else {
            Error::Race {
                site,
                place,
                kind: kind.public(),
                earlier: before,
                earlier_kind: earlier.kind.public(),
            }
        }
    }

    /// Checks an access of a thread against earlier ones and records it.
    #[inline]
    pub(crate) fn order(
        &mut self,
        who: Who,
        target: Target,
        address: u64,
        len: usize,
        kind: Kind,
    ) -> Result<(), Error> {
        if !self.clocks.enabled {
            return Ok(());
        }
        let record = Record {
            cluster: self.cluster,
            epoch: self.clocks.epoch(who.index),
            lanes: 1 << who.lane,
            pc: who.pc,
            owner: who.index as u32,
            kind,
        };
        let clock = &**self.clocks.lane(who.index, who.lane as usize);
        let by = Accessor {
            record,
            clock,
            warp: who.index as u32,
            lane: who.lane,
            own_epoch: u32::MAX,
        };
        let result = match target {
            Target::Global { extent, at } => {
                let buffer = self.memory.extents[extent].buffer;
                // Nobody writes a read-only buffer, so its readers need no record.
                if self.memory.buffers[buffer].read_only {
                    return Ok(());
                }
                self.shadows[extent].access(at, len, &by)
            }
            Target::Shared { block, at } => self.blocks[block].shadow.access(at, len, &by),
            Target::Local { .. } | Target::Param { .. } => Ok(()),
        };
        result.map_err(|c| self.conflict(who, target, address, kind, c))
    }

    /// The same for an asynchronous operation, which knows what its issuer knew.
    pub(crate) fn order_async(
        &mut self,
        who: Who,
        target: Target,
        len: usize,
        record: Record,
        past: &Clock,
        epoch: u32,
    ) -> Result<(), Error> {
        if !self.clocks.enabled {
            return Ok(());
        }
        let by = Accessor {
            record,
            clock: past,
            warp: who.index as u32,
            lane: who.lane,
            own_epoch: epoch,
        };
        let result = match target {
            Target::Global { extent, at } => self.shadows[extent].access(at, len, &by),
            Target::Shared { block, at } => self.blocks[block].shadow.access(at, len, &by),
            Target::Local { .. } | Target::Param { .. } => Ok(()),
        };
        let address = match target {
            Target::Global { extent, at } => self.memory.extents[extent].start + at as u64,
            Target::Shared { at, .. } => at as u64,
            Target::Local { .. } | Target::Param { .. } => 0,
        };
        result.map_err(|c| self.conflict(who, target, address, record.kind, c))
    }

    fn mbarrier_bytes(
        &self,
        who: Who,
        target: Target,
        address: u64,
        len: usize,
    ) -> Result<(), Error> {
        if let Target::Shared { block, at } = target {
            let live = &self.blocks[block].mbarriers;
            if !live.is_empty()
                && live
                    .range((at as u32).saturating_sub(7)..(at + len) as u32)
                    .next()
                    .is_some()
            {
                let place = self.place(target, address, len as u32);
                let site = self.site(who.index, who.lane, who.pc);
                return Err(Error::MbarrierMisuse {
                    site,
                    place,
                    what: "access to the bytes of a live mbarrier",
                });
            }
        }
        Ok(())
    }

    /// Whether a thread may touch a buffer now.
    pub(crate) fn permitted(
        &self,
        who: Who,
        waited: bool,
        target: Target,
        address: u64,
        len: usize,
        write: bool,
    ) -> Result<(), Error> {
        if let Target::Global { extent, .. } = target {
            let buffer = &self.memory.buffers[self.memory.extents[extent].buffer];
            if write && buffer.read_only {
                let site = self.site(who.index, who.lane, who.pc);
                return Err(Error::ReadOnly {
                    site,
                    place: self.place(target, address, len as u32),
                });
            }
            if !waited && buffer.predecessor_writes && (write || !buffer.early_reads) {
                let site = self.site(who.index, who.lane, who.pc);
                return Err(Error::BeforeDependency {
                    site,
                    place: self.place(target, address, len as u32),
                });
            }
        }
        Ok(())
    }

    /// The bytes at a target, if all of them are written.
    #[inline]
    pub(crate) fn fetch(
        &self,
        warp: Option<&Warp>,
        lane: usize,
        target: Target,
        out: &mut [u8],
    ) -> bool {
        let len = out.len();
        match target {
            Target::Global { extent, at } => {
                let extent = &self.memory.extents[extent];
                out.copy_from_slice(&extent.data[at..at + len]);
                let stale = self.poison[extent.buffer]
                    .as_ref()
                    .filter(|_| warp.is_some_and(|w| w.waited >> lane & 1 == 0));
                if let Some(stale) = stale {
                    let offset =
                        (extent.start - self.memory.buffers[extent.buffer].address) as usize + at;
                    for (i, byte) in out.iter_mut().enumerate() {
                        *byte = stale.get(offset + i).copied().unwrap_or(*byte);
                    }
                }
                extent.written.as_ref().is_none_or(|w| w.all(at, len))
            }
            Target::Shared { block, at } => {
                let block = &self.blocks[block];
                out.copy_from_slice(&block.shared[at..at + len]);
                block.written.all(at, len)
            }
            Target::Local { at } => {
                let Some(warp) = warp else { return false };
                let base = lane * self.entry.local_bytes as usize + at;
                out.copy_from_slice(&warp.local[base..base + len]);
                warp.local_written[lane].all(at, len)
            }
            Target::Param { at } => {
                out.copy_from_slice(&self.params[at..at + len]);
                true
            }
        }
    }

    #[inline]
    pub(crate) fn put(&mut self, warp: Option<(&mut Warp, usize)>, target: Target, bytes: &[u8]) {
        let len = bytes.len();
        match target {
            Target::Global { extent, at } => {
                let extent = &mut self.memory.extents[extent];
                extent.data[at..at + len].copy_from_slice(bytes);
                if let Some(written) = &mut extent.written {
                    written.set(at, len);
                }
            }
            Target::Shared { block, at } => {
                let block = &mut self.blocks[block];
                block.shared[at..at + len].copy_from_slice(bytes);
                block.written.set(at, len);
            }
            Target::Local { at } => {
                if let Some((warp, lane)) = warp {
                    let base = lane * self.entry.local_bytes as usize + at;
                    warp.local[base..base + len].copy_from_slice(bytes);
                    warp.local_written[lane].set(at, len);
                }
            }
            Target::Param { .. } => {}
        }
    }

    pub(crate) fn uninitialised(
        &self,
        who: Who,
        target: Target,
        address: u64,
        len: usize,
    ) -> Error {
        Error::Uninitialised {
            site: self.site(who.index, who.lane, who.pc),
            place: self.place(target, address, len as u32),
        }
    }

    #[inline]
    pub(crate) fn address(warp: &Warp, reg: crate::ir::Reg, offset: i64, lane: usize) -> u64 {
        let base = warp.registers.get(reg, lane);
        let sum = base.wrapping_add(offset as u64);
        if reg.class == Class::B32 {
            sum & 0xffff_ffff
        } else {
            sum
        }
    }

    /// A prefetch reads nothing and may come before the dependency wait, but its address must be
    /// one that exists: what a prefetch of any other does, the ISA leaves open.
    pub(crate) fn prefetch(
        &mut self,
        index: usize,
        warp: &Warp,
        pc: u32,
        mask: u32,
        space: Space,
        addr: Addr,
    ) -> Result<(), Error> {
        for lane in (0..32).filter(|lane| mask >> lane & 1 != 0) {
            let who = Who { index, lane, pc };
            let address = Self::address(warp, addr.reg, addr.offset, lane as usize);
            self.resolve(who, space, address, 1, 1)?;
        }
        Ok(())
    }

    pub(crate) fn load(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        access: &Access,
    ) -> Result<(), Error> {
        let width = access.ty.bits() as usize / 8;
        let len = width * access.regs.len();
        let kind = match (access.space, access.order.strong) {
            (Space::GlobalNc, _) => Kind::Nc,
            (_, true) => Kind::StrongRead,
            _ => Kind::Read,
        };
        let mut bytes = [0u8; WIDEST];
        let mut lanes = mask;
        while lanes != 0 {
            let lane = lanes.trailing_zeros();
            lanes &= lanes - 1;
            let who = Who { index, lane, pc };
            let lane = lane as usize;
            let address = Self::address(warp, access.address, access.offset, lane);
            let target = self.resolve(who, access.space, address, len, len)?;
            self.permitted(
                who,
                warp.waited >> lane & 1 != 0,
                target,
                address,
                len,
                false,
            )?;
            self.mbarrier_bytes(who, target, address, len)?;
            self.order(who, target, address, len, kind)?;
            if !self.fetch(Some(warp), lane, target, &mut bytes[..len]) {
                return Err(self.uninitialised(who, target, address, len));
            }
            if access.order.strong {
                self.observe(who, warp, target, access.order);
            }
            for (reg, part) in access.regs.iter().zip(bytes[..len].chunks_exact(width)) {
                let value = part.iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
                let value = if access.ty.signed() {
                    extend(true, access.ty.bits() as u8, value)
                } else {
                    value
                };
                warp.registers.put(*reg, lane, value);
            }
        }
        Ok(())
    }

    pub(crate) fn store(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        access: &Access,
    ) -> Result<(), Error> {
        let width = access.ty.bits() as usize / 8;
        let len = width * access.regs.len();
        let kind = if access.order.strong {
            Kind::Strong
        } else {
            Kind::Write
        };
        let mut bytes = [0u8; WIDEST];
        let mut lanes = mask;
        while lanes != 0 {
            let lane = lanes.trailing_zeros();
            lanes &= lanes - 1;
            let who = Who { index, lane, pc };
            let lane = lane as usize;
            let address = Self::address(warp, access.address, access.offset, lane);
            let target = self.resolve(who, access.space, address, len, len)?;
            self.permitted(
                who,
                warp.waited >> lane & 1 != 0,
                target,
                address,
                len,
                true,
            )?;
            self.mbarrier_bytes(who, target, address, len)?;
            self.order(who, target, address, len, kind)?;
            for (reg, part) in access.regs.iter().zip(bytes[..len].chunks_exact_mut(width)) {
                let value = warp.registers.get(*reg, lane).to_le_bytes();
                part.copy_from_slice(&value[..width]);
            }
            if access.order.strong {
                self.publish(who, warp, target, access.order);
            }
            self.put(Some((&mut *warp, lane)), target, &bytes[..len]);
        }
        Ok(())
    }

    fn location(&self, target: Target) -> (usize, u64) {
        match target {
            Target::Global { extent, at } => (usize::MAX - extent, at as u64),
            Target::Shared { block, at } => (block, at as u64),
            Target::Local { at } | Target::Param { at } => (usize::MAX, at as u64),
        }
    }

    /// A strong read: what was released at the location is acquired now or at the next fence.
    fn observe(&mut self, who: Who, warp: &mut Warp, target: Target, order: Order) {
        let Some(clock) = self.locations.get(&self.location(target)).cloned() else {
            return;
        };
        if order.acquire {
            self.clocks.acquire(who.index, 1 << who.lane, &clock);
        } else {
            warp.seen[who.lane as usize] = Some(clock);
        }
    }

    /// A strong write: the thread's past, up to now or up to its last fence, is released.
    fn publish(&mut self, who: Who, warp: &Warp, target: Target, order: Order) {
        if !self.clocks.enabled {
            return;
        }
        let key = self.location(target);
        let mut clock = self.locations.remove(&key).unwrap_or_default();
        if order.release {
            self.clocks
                .release(who.index, 1 << who.lane, &mut clock, Release::Everything);
            self.clocks.bump(who.index);
        } else if let Some(past) = &warp.fenced[who.lane as usize] {
            Rc::make_mut(&mut clock).join_all(past);
        }
        self.locations.insert(key, clock);
    }

    pub(crate) fn atomic(
        &mut self,
        index: usize,
        warp: &mut Warp,
        pc: u32,
        mask: u32,
        atomic: &Atomic,
    ) -> Result<(), Error> {
        let len = atomic.ty.bits() as usize / 8;
        for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
            let who = Who { index, lane, pc };
            let lane = lane as usize;
            let address = Self::address(warp, atomic.address, atomic.offset, lane);
            let target = self.resolve(who, atomic.space, address, len, len)?;
            self.permitted(
                who,
                warp.waited >> lane & 1 != 0,
                target,
                address,
                len,
                true,
            )?;
            self.mbarrier_bytes(who, target, address, len)?;
            self.order(who, target, address, len, Kind::Strong)?;
            let mut bytes = [0u8; 8];
            if !self.fetch(Some(warp), lane, target, &mut bytes[..len]) {
                return Err(self.uninitialised(who, target, address, len));
            }
            self.observe(who, warp, target, atomic.order);
            self.publish(who, warp, target, atomic.order);
            let old = u64::from_le_bytes(bytes);
            let b = warp.registers.get(atomic.b, lane);
            let c = atomic.c.map_or(0, |c| warp.registers.get(c, lane));
            let new = combine(atomic.op, atomic.ty, old, b, c);
            self.put(Some((&mut *warp, lane)), target, &new.to_le_bytes()[..len]);
            if let Some(dst) = atomic.dst {
                warp.registers.put(dst, lane, old);
            }
        }
        Ok(())
    }
}

fn combine(op: AtomicOp, ty: Ty, old: u64, b: u64, c: u64) -> u64 {
    let wide = |x: u64| {
        if ty.signed() {
            i128::from(extend(true, ty.bits() as u8, x) as i64)
        } else {
            i128::from(x)
        }
    };
    match (op, ty) {
        (AtomicOp::Add, Ty::F32) => {
            u64::from((f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits())
        }
        (AtomicOp::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        (AtomicOp::Add, _) => old.wrapping_add(b),
        (AtomicOp::Min, _) => {
            if wide(b) < wide(old) {
                b
            } else {
                old
            }
        }
        (AtomicOp::Max, _) => {
            if wide(b) > wide(old) {
                b
            } else {
                old
            }
        }
        (AtomicOp::And, _) => old & b,
        (AtomicOp::Or, _) => old | b,
        (AtomicOp::Xor, _) => old ^ b,
        (AtomicOp::Exch, _) => b,
        (AtomicOp::Cas, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (AtomicOp::Inc, _) => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        (AtomicOp::Dec, _) => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}
