//! mbarriers: counts of arrivals and bytes, and what a wait on one makes visible.

use std::rc::Rc;

use crate::access::{Target, Who};
use crate::clock::{Clock, Part, Release};
use crate::error::Error;
use crate::ir::{Addr, Mbar, SHARED_WINDOW, Space};
use crate::machine::Machine;
use crate::race::Kind;
use crate::warp::{Step, Wait, Warp};

#[derive(Clone, Debug)]
pub(crate) struct Mbarrier {
    pub(crate) expected: u32,
    pub(crate) pending: i64,
    pub(crate) tx: i64,
    /// Completed phases.
    pub(crate) phase: u32,
    pub(crate) collecting: Rc<Clock>,
    pub(crate) released: Rc<Clock>,
    /// Who initialised it: thread, epoch, warp, lane, instruction.
    pub(crate) init: (usize, u32, usize, u32, u32),
    /// Clock entries of asynchronous writes from the own block and from others.
    pub(crate) agents: [u32; 2],
    /// Phases that a waiter saw complete, and the last one in which asynchronous bytes arrived.
    pub(crate) observed: u32,
    pub(crate) landed: Option<(u32, u32)>,
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

    pub(crate) fn mbarrier(
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
