//! Runs harness cases in the PTX emulator, with every check it has.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use kda_codegen::operands::{FaultRecord, PARAMETERS, Parameter};
use kda_codegen::{Arch, EarlyReads, KernelSpec};
use kda_emulator::{Launch, Memory, Module, Options, Param, Report};
use kda_runtime::{Plan, Policies};

use crate::kernels::{KernelCache, Kernels};
use crate::placed;
use crate::rng::Rng;
use crate::spread::Spread;
use crate::{Buffers, Case, Executor, Faults};

/// Address distance between regions: far more than any of them holds, spread out or not.
const REGION_STRIDE: u64 = 1 << 51;

/// Runs cases in the emulator, as the kernels of one architecture.
pub struct EmulatorExecutor<K = KernelCache> {
    arch: Arch,
    kernels: K,
    modules: HashMap<KernelSpec, Arc<Module>>,
    /// Seed of the case that ran last, and how often each mode has run it.
    last: Option<u64>,
    runs: HashMap<String, u64>,
    seed: u64,
    spread: Option<Spread>,
}

impl<K: Kernels> EmulatorExecutor<K> {
    /// Kernels of `arch`.
    pub fn new(arch: Arch, kernels: K) -> EmulatorExecutor<K> {
        EmulatorExecutor {
            arch,
            kernels,
            modules: HashMap::new(),
            last: None,
            runs: HashMap::new(),
            seed: 0,
            spread: None,
        }
    }

    /// Other schedules than those of seed 0.
    pub fn seed(mut self, seed: u64) -> EmulatorExecutor<K> {
        self.seed = seed;
        self
    }

    /// Seed of the order in which warps run and of what early reads see: another one each time a
    /// case runs again, and the same one for a case and a mode whatever ran before, so that a
    /// replay repeats it.
    fn schedule(&mut self, case: &Case, mode: &str) -> u64 {
        if self.last != Some(case.seed) {
            self.last = Some(case.seed);
            self.runs.clear();
        }
        let run = self.runs.entry(mode.to_owned()).or_default();
        *run += 1;
        let text = mode.bytes().fold(self.seed, |hash, byte| {
            hash.wrapping_mul(31).wrapping_add(byte.into())
        });
        Rng::stream(case.seed ^ text, 30 + *run).word()
    }

    /// Lays the slots and rows of every case far apart from now on.
    pub fn spread(&mut self, spread: impl Into<Option<Spread>>) {
        self.spread = spread.into();
    }

    fn module(&mut self, spec: &KernelSpec) -> Result<(String, Arc<Module>), Box<dyn Error>> {
        let kernel = self.kernels.kernel(spec)?;
        let module = match self.modules.get(spec) {
            Some(module) => module.clone(),
            None => {
                let module = Arc::new(Module::parse(&kernel.ptx)?);
                self.modules.insert(*spec, module.clone());
                module
            }
        };
        Ok((kernel.source.entry.clone(), module))
    }
}

/// Launches what the runtime planned: `values` are those of the kernel's `parameters`.
///
/// # Errors
///
/// The emulator's.
pub fn launch(
    module: &Module,
    entry: &str,
    planned: &kda_codegen::Launch,
    (parameters, values): (&[Parameter], Vec<Vec<u8>>),
    memory: &mut Memory,
    options: &Options,
) -> Result<Report, kda_emulator::Error> {
    let params: Vec<Param> = parameters
        .iter()
        .zip(values)
        .map(
            |(parameter, bytes)| match (parameter, <[u8; 8]>::try_from(&bytes[..])) {
                (Parameter::Pointer(_), Ok(address)) => Param::U64(u64::from_ne_bytes(address)),
                _ => Param::Bytes(bytes),
            },
        )
        .collect();
    let launch = Launch {
        entry,
        grid: planned.grid,
        block: planned.block,
        cluster: planned.cluster,
        dynamic_shared_bytes: 0,
        params: &params,
    };
    module.launch(memory, &launch, options)
}

impl<K: Kernels> Executor for EmulatorExecutor<K> {
    fn name(&self) -> String {
        format!("emulator {}", self.arch)
    }

    fn modes(&self, case: &Case) -> Vec<String> {
        placed::mode_texts(self.arch, placed::gate_input(case))
    }

    fn legal_modes(&self, case: &Case) -> Vec<String> {
        placed::legal_mode_texts(self.arch, placed::gate_input(case))
    }

    fn run(
        &mut self,
        case: &Case,
        mode: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        let (parsed, early_reads) = placed::parse_mode(mode)?;
        let config = placed::config(case, early_reads);
        let policies = Policies::single(&[placed::kind(case)], parsed);
        let plan = Plan::new(self.arch, &config, &policies)?;
        let names: Vec<&str> = buffers
            .regions()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let place = |name: &str| {
            let index = match name {
                "faults" => names.len(),
                _ => names
                    .iter()
                    .position(|known| *known == name)
                    .expect("a region"),
            };
            REGION_STRIDE * (index as u64 + 1)
        };
        let faults_address = place("faults");
        let mut step = placed::step(case, buffers, place);
        if let Some(spread) = &self.spread {
            spread.step(case, &mut step);
        }
        let pool_slots = step.pool_slots as i32;
        let Some(planned) = plan.step(&step, faults_address)? else {
            return Ok(None);
        };
        let (entry, module) = self.module(&plan.kernels()[planned.kernel])?;

        let mut memory = Memory::new();
        for (name, region) in buffers.regions() {
            // The operand alone exists: its guards are out of bounds.
            let ranges = match &self.spread {
                None => vec![(region.offset as u64, region.data().to_vec())],
                Some(spread) => spread.ranges(case, name, region),
            };
            memory.add_sparse(name, place(name), REGION_STRIDE, ranges);
            match name {
                "conv_cache" | "state_pool" | "records" | "out" => {}
                _ => memory.set_read_only(name),
            }
            let weight = !matches!(
                name,
                "projected"
                    | "gate_input"
                    | "conv_cache"
                    | "state_pool"
                    | "records"
                    | "out"
                    | "slots"
                    | "accepted"
                    | "token_counts"
            );
            let promised = early_reads == EarlyReads::Caches
                && matches!(
                    name,
                    "conv_cache" | "state_pool" | "records" | "slots" | "accepted" | "token_counts"
                );
            if self.arch.has_clusters() && !weight && !promised {
                memory.set_predecessor_writes(name);
            }
        }
        let clear = FaultRecord::CLEAR;
        let mut record = clear.first.to_le_bytes().to_vec();
        record.extend(clear.count.to_le_bytes());
        record.extend([0; 4]);
        memory.add("faults", faults_address, record);
        let seed = self.schedule(case, mode);
        let mut options = Options::default().seed(seed);
        if parsed.slot_hints {
            // Hints may read slots and counts early; what they read may be anything.
            let columns = case.shape.used_columns() as i32;
            let slots = [1, -1, pool_slots, 0, i32::MAX, pool_slots - 1, i32::MIN];
            let counts = [1, columns, 0, columns + 1, i32::MAX, -1, i32::MIN];
            let accepted = buffers.accepted.as_ref().map(|r| ("accepted", r, counts));
            for (name, region, values) in [("slots", &buffers.slots, slots)]
                .into_iter()
                .chain(accepted)
            {
                memory.allow_early_reads(name);
                if self.spread.is_none() {
                    let first = seed as usize;
                    let value = |i: usize| values[i.wrapping_add(first) % values.len()];
                    let stale = (0..region.len / 4).flat_map(|i| value(i).to_le_bytes());
                    options = options.early_poison(name, stale.collect());
                }
            }
        }
        launch(
            &module,
            &entry,
            &planned.launch,
            (PARAMETERS, planned.arguments.to_bytes()),
            &mut memory,
            &options,
        )?;
        for (name, region) in buffers.regions_mut() {
            match &self.spread {
                None => {
                    let bytes = memory.read(name);
                    region.data_mut().copy_from_slice(bytes);
                }
                Some(spread) => spread.gather(case, name, &memory.ranges(name), region),
            }
        }
        let record = memory.read("faults");
        let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("4 bytes"));
        let first = u64::from(word(4)) << 32 | u64::from(word(0));
        Ok(Faults::from_record(first, word(8)))
    }
}
