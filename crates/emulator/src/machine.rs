//! A launch in progress: blocks, warps, and the loop that runs one cluster after another.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use crate::alu::Registers;
use crate::asynchronous::{LaneGroups, Pending};
use crate::clock::{Clock, Clocks};
use crate::decode::dynamic_base;
use crate::error::{AddressSpace, Error, Place, Site, Waiting};
use crate::ir::{Entry, Op, SHARED_BASE, Special, Variable};
use crate::launch::{Launch, Options, Report};
use crate::mbarrier::Mbarrier;
use crate::memory::{Bits, Memory};
use crate::parse::Module;
use crate::race::Shadow;
use crate::sync::Barrier;
use crate::warp::Warp;

/// Largest shared memory of a block on the architectures served, in bytes.
const SHARED_LIMIT: u64 = 227 * 1024;
/// Most blocks of a cluster, the non-portable size included.
const CLUSTER_LIMIT: u32 = 16;

pub(crate) struct Block {
    pub(crate) index: [u32; 3],
    pub(crate) shared: Vec<u8>,
    pub(crate) written: Bits,
    pub(crate) shadow: Shadow,
    pub(crate) barriers: Vec<Barrier>,
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    /// Asynchronous operations on their way that touch this block's shared memory.
    pub(crate) in_flight: u32,
    pub(crate) live_warps: u32,
}

#[derive(Default)]
pub(crate) struct ClusterBarrier {
    pub(crate) phase: u32,
    pub(crate) collecting: Rc<Clock>,
    pub(crate) released: Rc<Clock>,
}

pub(crate) struct Machine<'a> {
    pub(crate) entry: &'a Entry,
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) options: &'a Options,
    pub(crate) memory: &'a mut Memory,
    pub(crate) params: Vec<u8>,
    pub(crate) cluster: u32,
    pub(crate) threads: u32,
    pub(crate) warps_per_block: usize,
    pub(crate) blocks: Vec<Block>,
    pub(crate) warps: Vec<Warp>,
    /// Lanes of each warp that have not exited.
    pub(crate) live: Vec<u32>,
    /// Lanes of each warp that arrived at the cluster barrier in this phase.
    pub(crate) arrived: Vec<u32>,
    pub(crate) cluster_barrier: ClusterBarrier,
    pub(crate) clocks: Clocks,
    /// Released clocks of global and shared locations used to synchronise.
    pub(crate) locations: HashMap<(usize, u64), Rc<Clock>>,
    pub(crate) shadows: Vec<Shadow>,
    pub(crate) poison: Vec<Option<Vec<u8>>>,
    pub(crate) queue: Vec<Pending>,
    pub(crate) copies: Vec<LaneGroups>,
    pub(crate) bulks: Vec<LaneGroups>,
    pub(crate) step: u64,
    pub(crate) report: Report,
    pub(crate) hint: usize,
    dependent: bool,
    rng: u64,
}

fn check(what: &'static str, found: [u32; 3], expected: [u32; 3], good: bool) -> Result<(), Error> {
    if good {
        Ok(())
    } else {
        Err(Error::Dimensions {
            what,
            found,
            expected,
        })
    }
}

fn volume(dims: [u32; 3]) -> u64 {
    dims.iter().map(|&d| u64::from(d)).product()
}

fn unflatten(index: u32, dims: [u32; 3]) -> [u32; 3] {
    [
        index % dims[0],
        index / dims[0] % dims[1],
        index / dims[0] / dims[1],
    ]
}

fn check_launch(entry: &Entry, launch: &Launch) -> Result<Vec<u8>, Error> {
    let Launch {
        grid,
        block,
        cluster,
        ..
    } = *launch;
    check("grid dimensions are zero", grid, [1; 3], volume(grid) > 0)?;
    check(
        "block dimensions are zero or above 1024 threads",
        block,
        [1024, 1, 1],
        (1..=1024).contains(&volume(block)),
    )?;
    let divides = (0..3).all(|i| cluster[i] > 0 && grid[i] % cluster[i] == 0);
    check(
        "the cluster does not divide the grid",
        cluster,
        grid,
        divides,
    )?;
    let size = volume(cluster);
    check(
        "the cluster is too large",
        cluster,
        [CLUSTER_LIMIT, 1, 1],
        size <= u64::from(CLUSTER_LIMIT),
    )?;
    if let Some(required) = entry.required_cluster {
        check(
            "the cluster differs from the kernel's .reqnctapercluster",
            cluster,
            required,
            cluster == required,
        )?;
    }
    if let Some(required) = entry.required_block {
        check(
            "the block differs from the kernel's .reqntid",
            block,
            required,
            block == required,
        )?;
    }
    if let Some(largest) = entry.largest_block {
        check(
            "the block exceeds the kernel's .maxntid",
            block,
            largest,
            volume(block) <= volume(largest),
        )?;
    }
    let bytes = u64::from(entry.shared_bytes) + u64::from(launch.dynamic_shared_bytes);
    if bytes > SHARED_LIMIT {
        return Err(Error::SharedTooLarge {
            found_bytes: bytes,
            limit_bytes: SHARED_LIMIT,
        });
    }
    if launch.params.len() != entry.params.len() {
        return Err(Error::ParamCount {
            found: launch.params.len(),
            expected: entry.params.len(),
        });
    }
    let mut params = vec![0; entry.param_bytes as usize];
    for (index, (param, declared)) in launch.params.iter().zip(&entry.params).enumerate() {
        let bytes = param.bytes();
        let (found_bytes, expected_bytes) = (bytes.len(), declared.size as usize);
        if found_bytes != expected_bytes {
            return Err(Error::ParamSize {
                index,
                found_bytes,
                expected_bytes,
            });
        }
        let start = declared.offset as usize;
        params[start..start + found_bytes].copy_from_slice(&bytes);
    }
    Ok(params)
}

impl Module {
    /// Runs one launch on `memory` and checks every access, barrier and ordering.
    ///
    /// # Errors
    /// The launch does not fit the entry, or the first fault of the run; what the launch wrote
    /// until then stays in `memory`.
    pub fn launch(
        &self,
        memory: &mut Memory,
        launch: &Launch,
        options: &Options,
    ) -> Result<Report, Error> {
        let Some(entry) = self.entries.iter().find(|e| e.name == launch.entry) else {
            return Err(Error::NoEntry {
                entry: launch.entry.to_string(),
            });
        };
        let params = check_launch(entry, launch)?;
        let used = |v: &&Variable| entry.variables.contains(&v.address);
        for variable in self.variables.iter().filter(used) {
            let name = format!("variable {}", variable.name);
            memory.add(&name, variable.address, variable.bytes.clone());
            if variable.read_only {
                memory.set_read_only(&name);
            }
        }
        let result = run(self, entry, memory, launch, options, params);
        for variable in self.variables.iter().filter(used) {
            memory.remove(&format!("variable {}", variable.name));
        }
        result
    }
}

fn run(
    module: &Module,
    entry: &Entry,
    memory: &mut Memory,
    launch: &Launch,
    options: &Options,
    params: Vec<u8>,
) -> Result<Report, Error> {
    memory.check_placement()?;
    let mut poison = vec![None; memory.buffers.len()];
    for (name, bytes) in &options.early_poison {
        poison[memory.find_buffer(name)?] = Some(bytes.clone());
    }
    let shadows = memory
        .extents
        .iter()
        .map(|e| Shadow::new(e.data.len()))
        .collect();
    let threads = volume(launch.block) as u32;
    let mut machine = Machine {
        entry,
        launch,
        options,
        memory,
        params,
        cluster: 0,
        threads,
        warps_per_block: threads.div_ceil(32) as usize,
        blocks: Vec::new(),
        warps: Vec::new(),
        live: Vec::new(),
        arrived: Vec::new(),
        cluster_barrier: ClusterBarrier::default(),
        clocks: Clocks::default(),
        locations: HashMap::new(),
        shadows,
        poison,
        queue: Vec::new(),
        copies: Vec::new(),
        bulks: Vec::new(),
        step: 0,
        report: Report::default(),
        hint: 0,
        dependent: module.dependent,
        rng: options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d,
    };
    let grid = std::array::from_fn(|i| launch.grid[i] / launch.cluster[i]);
    let mut order: Vec<u32> = (0..volume(grid) as u32).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, machine.random(i as u64 + 1) as usize);
    }
    for cluster in order {
        machine.start(unflatten(cluster, grid));
        machine.run_cluster()?;
        machine.report.clusters += 1;
    }
    Ok(machine.report)
}

impl Machine<'_> {
    /// A number below `bound` from the seed.
    pub(crate) fn random(&mut self, bound: u64) -> u64 {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        (self.rng >> 11) % bound.max(1)
    }

    fn start(&mut self, cluster: [u32; 3]) {
        let size = volume(self.launch.cluster) as u32;
        let dynamic = self.launch.dynamic_shared_bytes;
        let end = if dynamic > 0 {
            dynamic_base(self.entry) + dynamic
        } else {
            SHARED_BASE + self.entry.shared_bytes
        };
        self.cluster += 1;
        self.blocks.clear();
        self.warps.clear();
        self.locations.clear();
        self.cluster_barrier = ClusterBarrier::default();
        let per_block = self.warps_per_block;
        let warps = per_block * size as usize;
        self.clocks = Clocks::new(warps, self.options.check_races);
        self.arrived = vec![0; warps];
        self.live = Vec::with_capacity(warps);
        self.copies = vec![LaneGroups::default(); warps * 32];
        self.bulks = vec![LaneGroups::default(); warps * 32];
        for rank in 0..size {
            let inside = unflatten(rank, self.launch.cluster);
            let index = std::array::from_fn(|i| cluster[i] * self.launch.cluster[i] + inside[i]);
            self.blocks.push(Block {
                index,
                shared: vec![0xa5; end as usize],
                written: Bits::new(end as usize),
                shadow: Shadow::new(end as usize),
                barriers: vec![Barrier::default(); 16],
                mbarriers: BTreeMap::new(),
                in_flight: 0,
                live_warps: per_block as u32,
            });
            for number in 0..per_block as u32 {
                let count = (self.threads - number * 32).min(32);
                let present = if count == 32 {
                    u32::MAX
                } else {
                    (1 << count) - 1
                };
                let mut registers = Registers::new(self.entry.registers, 0x7fc0_dead);
                for &(reg, value) in &self.entry.constants32 {
                    registers.r32[reg as usize] = [value; 32];
                }
                for &(reg, value) in &self.entry.constants64 {
                    registers.r64[reg as usize] = [value; 32];
                }
                for &reg in &self.entry.true_preds {
                    registers.p[reg as usize] = u32::MAX;
                }
                for &(reg, special) in &self.entry.specials {
                    for lane in 0..32 {
                        let value = self.special(special, cluster, index, rank, number * 32 + lane);
                        registers.put(reg, lane as usize, u64::from(value));
                    }
                }
                self.live.push(present);
                let local = self.entry.local_bytes as usize;
                self.warps.push(Warp::new(
                    rank as usize,
                    number,
                    registers,
                    present,
                    local,
                    !self.dependent,
                ));
            }
        }
    }

    fn special(
        &self,
        special: Special,
        cluster: [u32; 3],
        block: [u32; 3],
        rank: u32,
        thread: u32,
    ) -> u32 {
        let (launch, lane) = (self.launch, thread % 32);
        match special {
            Special::Tid(i) => unflatten(thread, launch.block)[i as usize],
            Special::Ntid(i) => launch.block[i as usize],
            Special::Ctaid(i) => block[i as usize],
            Special::Nctaid(i) => launch.grid[i as usize],
            Special::Clusterid(i) => cluster[i as usize],
            Special::Nclusterid(i) => launch.grid[i as usize] / launch.cluster[i as usize],
            Special::ClusterCtaid(i) => unflatten(rank, launch.cluster)[i as usize],
            Special::ClusterNctaid(i) => launch.cluster[i as usize],
            Special::ClusterCtarank => rank,
            Special::ClusterNctarank => volume(launch.cluster) as u32,
            Special::Laneid => lane,
            Special::Warpid => thread / 32,
            Special::Nwarpid => self.warps_per_block as u32,
            // So few that small launches have blocks of the first wave and of later ones.
            Special::Nsmid => 4,
            Special::LanemaskEq => 1 << lane,
            Special::LanemaskLt => (1 << lane) - 1,
            Special::LanemaskLe => u32::MAX >> (31 - lane),
            Special::LanemaskGt => !(u32::MAX >> (31 - lane)),
            Special::LanemaskGe => !((1 << lane) - 1),
            Special::DynamicSmemSize => launch.dynamic_shared_bytes,
            Special::TotalSmemSize => launch.dynamic_shared_bytes + self.entry.shared_bytes,
            Special::Zero => 0,
        }
    }

    fn run_cluster(&mut self) -> Result<(), Error> {
        let mut unfinished: Vec<usize> = (0..self.warps.len()).collect();
        while !unfinished.is_empty() {
            self.step += 1;
            self.land_due()?;
            let first = self.random(unfinished.len() as u64) as usize;
            let order = (first..unfinished.len()).chain(0..first);
            let mut found = None;
            for at in order {
                if self.runnable(unfinished[at]) {
                    found = Some(at);
                    break;
                }
            }
            let Some(at) = found else {
                if self.land_next()? {
                    continue;
                }
                return Err(self.hang());
            };
            let index = unfinished[at];
            let mut warp = std::mem::take(&mut self.warps[index]);
            let result = self.run_warp(index, &mut warp);
            let done = warp.fragments.is_empty();
            self.warps[index] = warp;
            result?;
            if done {
                unfinished.swap_remove(at);
            }
        }
        while self.land_next()? {}
        Ok(())
    }

    /// Whether some part of the warp can run; wakes the parts that can.
    fn runnable(&mut self, index: usize) -> bool {
        let mut any = false;
        for i in 0..self.warps[index].fragments.len() {
            let fragment = self.warps[index].fragments[i];
            if self.ready(index, &fragment) {
                self.warps[index].fragments[i].wait = crate::warp::Wait::None;
                any = true;
            }
        }
        any
    }

    pub(crate) fn site(&self, index: usize, lane: u32, pc: u32) -> Box<Site> {
        let warp = index % self.warps_per_block;
        Box::new(Site {
            line: self.entry.code[pc as usize].line,
            instruction: self.entry.text[pc as usize].clone(),
            block: self.blocks[index / self.warps_per_block].index,
            thread: warp as u32 * 32 + lane,
        })
    }

    pub(crate) fn shared_place(
        &self,
        block: usize,
        address: u64,
        offset: u64,
        len_bytes: u32,
    ) -> Place {
        let [x, y, z] = self.blocks[block].index;
        let buffer = format!("shared memory of block ({x}, {y}, {z})");
        Place {
            space: AddressSpace::Shared,
            address,
            len_bytes,
            buffer,
            offset: offset.wrapping_sub(u64::from(SHARED_BASE)),
        }
    }

    pub(crate) fn waiting(&self) -> Vec<Waiting> {
        let mut list = Vec::new();
        for (index, warp) in self.warps.iter().enumerate() {
            for fragment in &warp.fragments {
                let pc = fragment.waiting_pc();
                list.push(Waiting {
                    block: self.blocks[index / self.warps_per_block].index,
                    warp: warp.number,
                    lanes: fragment.mask,
                    line: self.entry.code[pc as usize].line,
                    what: match fragment.wait {
                        crate::warp::Wait::None => "running".to_string(),
                        _ => self.entry.text[pc as usize].clone(),
                    },
                });
            }
        }
        list
    }

    fn hang(&self) -> Error {
        let waiting = self.waiting();
        for (index, warp) in self.warps.iter().enumerate() {
            for fragment in &warp.fragments {
                let pc = fragment.waiting_pc();
                let barrier = matches!(
                    self.entry.code[pc as usize].op,
                    Op::BarSync { .. }
                        | Op::BarArrive { .. }
                        | Op::ClusterArrive { .. }
                        | Op::ClusterWait { .. }
                );
                if barrier && fragment.wait == crate::warp::Wait::Converge {
                    let (lanes, live) = (fragment.mask, self.live[index]);
                    let site = self.site(index, lanes.trailing_zeros(), pc);
                    return Error::DivergentBarrier {
                        site,
                        lanes,
                        live,
                        waiting,
                    };
                }
            }
        }
        Error::Hang { waiting }
    }
}
