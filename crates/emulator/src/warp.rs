//! One warp: its registers, the program counters of its lanes, and the loop that runs it until it
//! blocks or gives way. Lanes at one program counter form a fragment; the fragment furthest behind
//! runs first, and fragments that meet become one.

use crate::alu::{FULL, Registers, ZeroDivisor};
use crate::error::{Error, Waiting};
use crate::ir::Op;
use crate::machine::Machine;
use crate::memory::Bits;

/// Why a fragment cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    None,
    /// For other lanes of the warp to reach the same instruction.
    Converge,
    Barrier {
        id: u8,
        generation: u32,
    },
    WarpSync {
        mask: u32,
    },
    Mbarrier {
        block: usize,
        address: u32,
        phase: u32,
    },
    ClusterBarrier {
        phase: u32,
    },
    Copies {
        n: u32,
        bulk: bool,
        read: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    pub(crate) pc: u32,
    pub(crate) mask: u32,
    pub(crate) wait: Wait,
    /// The instruction it waits at has already been left behind.
    pub(crate) passed: bool,
}

impl Fragment {
    pub(crate) fn waiting_pc(&self) -> u32 {
        if self.passed && self.wait != Wait::None {
            self.pc - 1
        } else {
            self.pc
        }
    }
}

/// What executing an instruction means for the fragment.
pub(crate) enum Step {
    /// Go on with the next instruction.
    Next,
    /// The next instruction, after other warps had a chance.
    Yield,
    /// Not executed: wait, then execute it again.
    Retry(Wait),
    /// Executed: wait, then go on with the next one.
    Then(Wait),
    /// Every lane of the fragment has exited.
    Exited,
}

#[derive(Default)]
pub(crate) struct Warp {
    pub(crate) block: usize,
    pub(crate) number: u32,
    pub(crate) registers: Registers,
    pub(crate) fragments: Vec<Fragment>,
    /// Lanes past their dependency wait.
    pub(crate) waited: u32,
    pub(crate) local: Vec<u8>,
    pub(crate) local_written: Vec<Bits>,
    /// Lanes between arrival and wait at the cluster barrier, and the phase they wait for.
    pub(crate) cluster_open: u32,
    pub(crate) cluster_phase: [u32; 32],
    /// Instructions of the whole warp, and of each lane while it was diverged.
    executed: u64,
    diverged: [u64; 32],
    /// Past of the last fence, and what relaxed reads saw since.
    pub(crate) fenced: Vec<Option<std::rc::Rc<crate::clock::Clock>>>,
    pub(crate) seen: Vec<Option<std::rc::Rc<crate::clock::Clock>>>,
}

/// Instructions a warp runs before it gives way without having touched memory.
const QUANTUM: u32 = 2000;

impl Warp {
    pub(crate) fn new(
        block: usize,
        number: u32,
        registers: Registers,
        present: u32,
        local: usize,
        waited: bool,
    ) -> Self {
        Warp {
            block,
            number,
            registers,
            fragments: vec![Fragment {
                pc: 0,
                mask: present,
                wait: Wait::None,
                passed: false,
            }],
            waited: if waited { FULL } else { 0 },
            local: vec![0xa5; local * 32],
            local_written: if local > 0 {
                vec![Bits::new(local); 32]
            } else {
                Vec::new()
            },
            fenced: vec![None; 32],
            seen: vec![None; 32],
            ..Warp::default()
        }
    }

    /// Merges fragments at one program counter; lanes that waited for company look again.
    fn merge(&mut self) {
        let mut i = 0;
        while i < self.fragments.len() {
            let mut j = i + 1;
            while j < self.fragments.len() {
                let (a, b) = (self.fragments[i], self.fragments[j]);
                let free = |f: &Fragment| matches!(f.wait, Wait::None | Wait::Converge);
                if a.pc == b.pc && free(&a) && free(&b) {
                    self.fragments[i].mask |= b.mask;
                    self.fragments[i].wait = Wait::None;
                    self.fragments.swap_remove(j);
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
    }
}

impl Machine<'_> {
    pub(crate) fn ready(&self, index: usize, fragment: &Fragment) -> bool {
        match fragment.wait {
            Wait::None => true,
            Wait::Converge | Wait::WarpSync { .. } => false,
            Wait::Barrier { id, generation } => {
                self.blocks[index / self.warps_per_block].barriers[id as usize].generation
                    != generation
            }
            Wait::Mbarrier {
                block,
                address,
                phase,
            } => self.blocks[block]
                .mbarriers
                .get(&address)
                .is_none_or(|m| m.phase != phase),
            Wait::ClusterBarrier { phase } => self.cluster_barrier.phase >= phase,
            Wait::Copies { n, bulk, read } => self.copies_done(index, fragment.mask, n, bulk, read),
        }
    }

    pub(crate) fn run_warp(&mut self, index: usize, warp: &mut Warp) -> Result<(), Error> {
        let entry = self.entry;
        let worst = warp.diverged.iter().max().copied().unwrap_or(0);
        if warp.executed + worst > self.options.max_instructions_per_thread {
            return Err(self.endless(warp));
        }
        let mut quantum = QUANTUM;
        let mut current = usize::MAX;
        loop {
            if quantum == 0 {
                return Ok(());
            }
            if warp.fragments.len() > 1 {
                warp.merge();
                current = usize::MAX;
            }
            if current == usize::MAX {
                // Now and then another fragment than the last goes first, so that none starves.
                let ready =
                    (0..warp.fragments.len()).filter(|&i| warp.fragments[i].wait == Wait::None);
                let chosen =
                    if quantum == QUANTUM && warp.fragments.len() > 1 && self.random_fragment() {
                        let list: Vec<usize> = ready.collect();
                        list.get(self.random(list.len() as u64) as usize).copied()
                    } else {
                        ready.min_by_key(|&i| warp.fragments[i].pc)
                    };
                match chosen {
                    Some(i) => current = i,
                    None => return Ok(()),
                }
            }
            quantum -= 1;
            let fragment = warp.fragments[current];
            let pc = fragment.pc;
            let instr = &entry.code[pc as usize];
            let mask = match instr.guard {
                None => fragment.mask,
                Some((p, negate)) => {
                    fragment.mask & (warp.registers.p[p as usize] ^ if negate { FULL } else { 0 })
                }
            };
            warp.executed += u64::from(warp.fragments.len() == 1);
            if warp.fragments.len() > 1 {
                for lane in (0..32).filter(|l| fragment.mask >> l & 1 != 0) {
                    warp.diverged[lane] += 1;
                }
            }
            self.report.warp_instructions += 1;
            self.report.thread_instructions += u64::from(fragment.mask.count_ones());
            if mask == 0 {
                warp.fragments[current].pc += 1;
                continue;
            }
            if let Op::Bra { target } = instr.op {
                if mask == fragment.mask {
                    warp.fragments[current].pc = target;
                } else {
                    warp.fragments[current].pc = target;
                    warp.fragments[current].mask = mask;
                    let rest = Fragment {
                        pc: pc + 1,
                        mask: fragment.mask & !mask,
                        wait: Wait::None,
                        passed: false,
                    };
                    warp.fragments.push(rest);
                }
                continue;
            }
            if splits(&instr.op) && mask != fragment.mask {
                let rest = Fragment {
                    pc: pc + 1,
                    mask: fragment.mask & !mask,
                    wait: Wait::None,
                    passed: false,
                };
                warp.fragments[current].mask = mask;
                warp.fragments.push(rest);
            }
            let step = match &instr.op {
                Op::Load(access) => {
                    self.load(index, warp, pc, mask, access)?;
                    Step::Yield
                }
                Op::Store(access) => {
                    self.store(index, warp, pc, mask, access)?;
                    Step::Yield
                }
                Op::Shfl { .. }
                | Op::Vote { .. }
                | Op::Match { .. }
                | Op::Redux { .. }
                | Op::Elect { .. }
                | Op::ActiveMask { .. } => self.collective(index, warp, pc, mask, &instr.op)?,
                Op::Mma { .. } | Op::LoadMatrix { .. } => {
                    self.matrix(index, warp, pc, mask, &instr.op)?
                }
                Op::Exit => self.exit(index, warp, pc, mask)?,
                Op::Nop => Step::Next,
                Op::Prefetch { space, addr } => {
                    self.prefetch(index, warp, pc, mask, *space, *addr)?;
                    Step::Next
                }
                Op::Trap => {
                    return Err(Error::Trap {
                        site: self.site(index, mask.trailing_zeros(), pc),
                    });
                }
                Op::DependencyWait => {
                    warp.waited |= mask;
                    Step::Yield
                }
                Op::Atomic(_)
                | Op::BarSync { .. }
                | Op::BarArrive { .. }
                | Op::WarpSync { .. }
                | Op::ClusterArrive { .. }
                | Op::ClusterWait { .. }
                | Op::Fence { .. }
                | Op::Mbarrier(_)
                | Op::Async(_)
                | Op::Mapa { .. }
                | Op::Getctarank { .. } => self.synchronise(index, warp, pc, mask, &instr.op)?,
                op => {
                    if let Err(ZeroDivisor(lane)) = warp.registers.execute(op, mask) {
                        return Err(Error::DivisionByZero {
                            site: self.site(index, lane, pc),
                        });
                    }
                    Step::Next
                }
            };
            let fragment = &mut warp.fragments[current];
            match step {
                Step::Next => fragment.pc += 1,
                Step::Yield => {
                    fragment.pc += 1;
                    return Ok(());
                }
                Step::Retry(wait) => {
                    (fragment.wait, fragment.passed) = (wait, false);
                    current = usize::MAX;
                }
                Step::Then(wait) => {
                    fragment.pc += 1;
                    (fragment.wait, fragment.passed) = (wait, true);
                    current = usize::MAX;
                }
                Step::Exited => {
                    warp.fragments.swap_remove(current);
                    for fragment in &mut warp.fragments {
                        if fragment.wait == Wait::Converge {
                            fragment.wait = Wait::None;
                        }
                    }
                    self.release_warp_syncs(index, warp);
                    current = usize::MAX;
                }
            }
        }
    }

    fn endless(&self, warp: &Warp) -> Error {
        let mut waiting = self.waiting();
        for fragment in &warp.fragments {
            waiting.push(Waiting {
                block: self.blocks[warp.block].index,
                warp: warp.number,
                lanes: fragment.mask,
                line: self.entry.code[fragment.waiting_pc() as usize].line,
                what: "running".to_string(),
            });
        }
        Error::Hang { waiting }
    }

    fn random_fragment(&mut self) -> bool {
        self.random(8) == 0
    }

    /// Lets go the fragments whose warp barrier every live lane of its mask has reached.
    pub(crate) fn release_warp_syncs(&mut self, index: usize, warp: &mut Warp) {
        let live = self.live[index];
        for i in 0..warp.fragments.len() {
            let Wait::WarpSync { mask } = warp.fragments[i].wait else {
                continue;
            };
            let at = |f: &Fragment| f.wait == Wait::WarpSync { mask };
            let here = warp
                .fragments
                .iter()
                .filter(|f| at(f))
                .fold(0, |m, f| m | f.mask);
            if mask & live & !here == 0 {
                self.clocks.barrier(&[(index, here, true)]);
                for fragment in &mut warp.fragments {
                    if at(fragment) {
                        fragment.wait = Wait::None;
                    }
                }
            }
        }
    }
}

/// Whether a guard splits the fragment, because the instruction may block or end lanes.
fn splits(op: &Op) -> bool {
    matches!(
        op,
        Op::Exit
            | Op::BarSync { .. }
            | Op::BarArrive { .. }
            | Op::WarpSync { .. }
            | Op::ClusterArrive { .. }
            | Op::ClusterWait { .. }
            | Op::Mbarrier(_)
            | Op::Async(_)
            | Op::Shfl { .. }
            | Op::Vote { .. }
            | Op::Match { .. }
            | Op::Redux { .. }
            | Op::Elect { .. }
            | Op::Mma { .. }
            | Op::LoadMatrix { .. }
    )
}
