//! The reset kernel in the emulator: slots named are zero, everything else keeps its bytes.

use std::error::Error;

use kda_codegen::operands::reset::PARAMETERS;
use kda_codegen::{Arch, ConvLayout, KernelSpec, NullRule, Source, StateDtype, source};
use kda_emulator::{Memory, Module, Options};
use kda_reference::Plan;
use kda_runtime::{Buffer, Config, ConvCache, PlannedReset, Reset, Slots, StatePool, plan_reset};
use kda_tests::emulate::{self, EmulatorExecutor};
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Limits, placed};

/// Addresses of the three operands; each is a region of its own.
const SLOTS: u64 = 1 << 40;
const STATE: u64 = 2 << 40;
const CONV: u64 = 3 << 40;

/// A reset over small pools.
#[derive(Clone)]
struct Problem {
    config: Config,
    /// Rows of slots, `columns` each; whatever lies between them is `gap`.
    rows: Vec<Vec<i32>>,
    stride: usize,
    gap: i32,
    pool_slots: usize,
    conv_length: usize,
    conv_stride: usize,
    state_stride: usize,
    /// Elements that the conv pool starts past an aligned address.
    skew: usize,
}

impl Problem {
    fn random(seed: u64) -> Problem {
        let rng = &mut Rng::stream(seed, 50);
        let heads = rng.between(1, 3);
        let mut config = Config::kimi_k3(heads);
        config.null_rule = rng.pick(NullRule::ALL);
        config.state_dtype = rng.pick(StateDtype::ALL);
        config.conv_layout = rng.pick(ConvLayout::ALL);
        let (requests, columns) = (rng.between(1, 3), rng.between(1, 3));
        let pool_slots = requests * columns + 3;
        let mut live: Vec<i32> = (1..pool_slots as i32).collect();
        rng.shuffle(&mut live);
        let pool = pool_slots as i32;
        let rows = (0..requests)
            .map(|_| {
                (0..columns)
                    .map(|_| match rng.below(4) {
                        0 => rng.pick(&[-1, i32::MIN, pool, pool + 7, i32::MAX]),
                        1 if config.null_rule == NullRule::NonPositive => 0,
                        _ => live.pop().expect("enough slots"),
                    })
                    .collect()
            })
            .collect();
        let conv_length = rng.between(3, 7);
        let dim = heads * 128;
        Problem {
            config,
            rows,
            stride: columns + rng.below(3),
            // A live slot of nobody: zeroing it would show.
            gap: live.pop().expect("one more slot"),
            pool_slots,
            conv_length,
            conv_stride: 3 * dim * conv_length + rng.pick(&[0, 0, 1, 77]),
            state_stride: dim * 128 + 8 * rng.pick(&[0, 0, 1, 50]),
            skew: rng.below(8),
        }
    }

    fn state_bytes(&self) -> usize {
        self.config.state_dtype.bytes()
    }

    fn reset(&self) -> Reset {
        let dim = self.config.heads * 128;
        let (columns, last) = (self.rows[0].len(), self.pool_slots - 1);
        let (line, matrices) = (3 * dim * self.conv_length, dim * 128);
        Reset {
            requests: self.rows.len(),
            slots: Slots {
                buffer: Buffer::new(SLOTS, (self.rows.len() - 1) * self.stride + columns),
                stride: self.stride as i64,
                columns,
            },
            conv_cache: ConvCache {
                buffer: Buffer::new(CONV + 2 * self.skew as u64, last * self.conv_stride + line),
                slot_stride: self.conv_stride as i64,
                length: self.conv_length,
            },
            state: StatePool {
                buffer: Buffer::new(STATE, last * self.state_stride + matrices),
                slot_stride: self.state_stride as i64,
            },
            pool_slots: self.pool_slots,
        }
    }

    /// Slots that become zero.
    fn named(&self) -> Vec<usize> {
        let null = |slot: i32| match self.config.null_rule {
            NullRule::NonPositive => slot <= 0,
            NullRule::Negative => slot < 0,
        };
        let all = self.rows.iter().flatten().copied();
        all.filter(|&slot| !null(slot) && (slot as usize) < self.pool_slots)
            .map(|slot| slot as usize)
            .collect()
    }

    fn spec(&self, arch: Arch) -> KernelSpec {
        KernelSpec::reset(arch, self.config.null_rule, self.config.state_dtype)
    }

    /// Runs PTX and compares every byte; what is wrong, in words.
    fn run(&self, arch: Arch, entry: &str, ptx: &str, seed: u64) -> Result<(), Box<dyn Error>> {
        let reset = self.reset();
        let planned = plan_reset(&self.config, &reset)?.ok_or("nothing to do")?;
        let table: Vec<u8> = (0..reset.slots.buffer.elements)
            .flat_map(|i| {
                let (row, column) = (i / self.stride, i % self.stride);
                let slot = self.rows[row].get(column).copied().unwrap_or(self.gap);
                slot.to_le_bytes()
            })
            .collect();
        // Nothing is 0 beforehand.
        let filled = |elements: usize, bytes: usize| vec![0xd5u8; elements * bytes];
        let state = filled(reset.state.buffer.elements, self.state_bytes());
        let conv = filled(reset.conv_cache.buffer.elements, 2);
        let mut memory = Memory::new();
        memory.add("slots", SLOTS, table);
        memory.set_read_only("slots");
        memory.add("state_pool", STATE, state.clone());
        memory.add("conv_cache", reset.conv_cache.buffer.address, conv.clone());
        if arch.has_clusters() {
            for name in ["slots", "state_pool", "conv_cache"] {
                memory.set_predecessor_writes(name);
            }
        }
        launch(ptx, entry, &planned, &mut memory, seed)?;
        let (mut state, mut conv) = (state, conv);
        let dim = self.config.heads * 128;
        for slot in self.named() {
            let start = slot * self.state_stride * self.state_bytes();
            state[start..start + dim * 128 * self.state_bytes()].fill(0);
            let start = slot * self.conv_stride * 2;
            conv[start..start + 3 * dim * self.conv_length * 2].fill(0);
        }
        for (name, wanted) in [("state_pool", state), ("conv_cache", conv)] {
            if memory.read(name) != wanted {
                return Err(format!("{name} differs").into());
            }
        }
        Ok(())
    }
}

/// Runs the reset's PTX in a schedule of its own.
fn launch(
    ptx: &str,
    entry: &str,
    planned: &PlannedReset,
    memory: &mut Memory,
    seed: u64,
) -> Result<(), Box<dyn Error>> {
    let parameters = (PARAMETERS, planned.arguments.to_bytes());
    let options = Options::default().seed(seed);
    let module = Module::parse(ptx)?;
    emulate::launch(
        &module,
        entry,
        &planned.launch,
        parameters,
        memory,
        &options,
    )?;
    Ok(())
}

#[test]
fn named_slots_are_zero_and_nothing_else_changes() {
    let kernels = KernelCache::new(load_nvrtc().unwrap());
    let (mut named, mut skipped) = (0, 0);
    for seed in 0..40 {
        let problem = Problem::random(seed);
        let arch = [Arch::Sm90a, Arch::Sm80, Arch::Sm100a][seed as usize % 3];
        let kernel = kernels.kernel(&problem.spec(arch)).unwrap();
        let ran = problem.run(arch, &kernel.source.entry, &kernel.ptx, seed);
        ran.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        named += problem.named().len();
        skipped += problem.rows.iter().flatten().count() - problem.named().len();
    }
    assert!(
        named > 60 && skipped > 30,
        "{named} named, {skipped} skipped"
    );
}

/// Each guard of the kernel is needed: without it some problem fails.
#[test]
fn each_guard_is_needed() {
    let nvrtc = load_nvrtc().unwrap();
    for (guard, without) in [
        ("    dependency_wait();\n", ""),
        ("slot <= 0 :", "slot < 0 :"),
        (": slot < 0;", ": false;"),
        (" || slot >= geometry.pool_slots", ""),
        ("slot >= geometry.pool_slots", "slot > geometry.pool_slots"),
        (
            "blockIdx.y * geometry.slots_stride",
            "blockIdx.y * gridDim.z",
        ),
        ("i < VECTORS;", "i < VECTORS - 1;"),
        ("i < length;", "i < length + 1;"),
        ("blockIdx.x * length", "0"),
    ] {
        let failed = (0..30).any(|seed| {
            let problem = Problem::random(seed);
            let spec = problem.spec(Arch::Sm90a);
            let Source { entry, text } = source::render(&spec).unwrap();
            let body = text.find("kda_reset.cu").expect("the file");
            assert!(text[body..].contains(guard), "{guard}");
            let text = text[..body].to_owned() + &text[body..].replacen(guard, without, 1);
            let source = Source {
                entry: entry.clone(),
                text,
            };
            let kernel = nvrtc.compile_source(&spec, source).unwrap();
            problem.run(Arch::Sm90a, &entry, &kernel.ptx, seed).is_err()
        });
        assert!(failed, "nothing fails without `{guard}`");
    }
}

#[test]
fn pages_of_many_layers_are_reached_in_64_bits() {
    // 69 layers of 12 heads in a page: slot 160 lies beyond 2³¹ elements. Only it and its lines exist.
    let config = Config::kimi_k3(12);
    let (page, line, slot) = (69 * 12 * 16_384u64, 3 * 12 * 128 * 3, 160u64);
    let reset = Reset {
        requests: 1,
        slots: Slots {
            buffer: Buffer::new(SLOTS, 1),
            stride: 1,
            columns: 1,
        },
        conv_cache: ConvCache {
            buffer: Buffer::new(CONV, (160 * 2 * page) as usize + line),
            slot_stride: 2 * page as i64,
            length: 3,
        },
        state: StatePool {
            buffer: Buffer::new(STATE, (160 * page) as usize + 12 * 16_384),
            slot_stride: page as i64,
        },
        pool_slots: 161,
    };
    let planned = plan_reset(&config, &reset).unwrap().unwrap();
    let kernels = KernelCache::new(load_nvrtc().unwrap());
    let spec = KernelSpec::reset(Arch::Sm90a, config.null_rule, config.state_dtype);
    let kernel = kernels.kernel(&spec).unwrap();
    let mut memory = Memory::new();
    memory.add("slots", SLOTS, (slot as i32).to_le_bytes().to_vec());
    let state = vec![7u8; 12 * 16_384 * 4];
    memory.add_sparse("state_pool", STATE, 1 << 40, vec![(slot * page * 4, state)]);
    let lines = vec![7u8; line * 2];
    memory.add_sparse("conv_cache", CONV, 1 << 40, vec![(slot * page * 4, lines)]);
    launch(&kernel.ptx, &kernel.source.entry, &planned, &mut memory, 0).unwrap();
    for name in ["state_pool", "conv_cache"] {
        assert!(memory.read(name).iter().all(|&byte| byte == 0), "{name}");
    }
}

/// A request in a slot that held NaN, then was reset, gives what a request from zeros gives.
#[test]
fn c31_after_a_reset_a_request_starts_from_nothing() {
    let kernels = KernelCache::new(load_nvrtc().unwrap());
    let mut executor = EmulatorExecutor::new(Arch::Sm90a, kernels.clone());
    for (seed, tokens) in [(1, 1), (2, 1), (3, 3)] {
        let limits = Limits {
            tokens: vec![tokens],
            ..Limits::small()
        }
        .live();
        // A table whose slots are distinct: a wide one repeats those it never reads.
        let distinct = |case: &Case| {
            let slots: std::collections::HashSet<_> = case.slots.iter().collect();
            slots.len() == case.slots.len()
        };
        let mut cases = (seed..).map(|seed| Case::sized(seed, &limits, 1, 2));
        let mut case = cases.find(distinct).expect("one of them");
        let data = std::sync::Arc::make_mut(&mut case.data);
        data.states.fill(0.0);
        data.windows.fill(half::bf16::ZERO);
        let mode = &executor.modes(&case)[2];
        let zero = Buffers::new(&case);
        let mut wanted = zero.clone();
        executor.run(&case, mode, &mut wanted).unwrap();

        // The same slots full of NaN, reset by the kernel.
        let mut found = zero.clone();
        let poisoned = Buffers::poisoned(&case);
        (found.state, found.conv_cache) = (poisoned.state, poisoned.conv_cache);
        let config = placed::config(&case, kda_codegen::EarlyReads::Weights);
        let place = |name: &str| match name {
            "slots" => SLOTS,
            "state_pool" => STATE,
            "conv_cache" => CONV,
            _ => 9 << 40,
        };
        let step = placed::step(&case, &found, place);
        let reset = Reset {
            requests: step.requests,
            slots: step.slots,
            conv_cache: step.conv_cache,
            state: step.state,
            pool_slots: step.pool_slots,
        };
        let planned = plan_reset(&config, &reset).unwrap().unwrap();
        let spec = KernelSpec::reset(Arch::Sm90a, config.null_rule, config.state_dtype);
        let kernel = kernels.kernel(&spec).unwrap();
        let mut memory = Memory::new();
        for (name, region) in found.regions() {
            if ["slots", "state_pool", "conv_cache"].contains(&name) {
                let at = place(name) + region.offset as u64;
                memory.add(name, at, region.data().to_vec());
            }
        }
        launch(&kernel.ptx, &kernel.source.entry, &planned, &mut memory, 0).unwrap();
        found
            .state
            .data_mut()
            .copy_from_slice(memory.read("state_pool"));
        found
            .conv_cache
            .data_mut()
            .copy_from_slice(memory.read("conv_cache"));
        let before = found.clone();
        let faults = executor.run(&case, mode, &mut found).unwrap();
        case.check(&before, &found, faults.as_ref()).unwrap();
        assert!(wanted.out == found.out, "{case}");
        for request in 0..case.shape.requests {
            let Plan::Live { checkpoints, .. } = case.plan(request) else {
                panic!("a live request");
            };
            for slot in checkpoints.into_iter().flatten() {
                let states = |buffers: &Buffers| buffers.states(&case.shape, slot);
                assert_eq!(states(&wanted), states(&found));
            }
        }
    }
}

#[test]
fn bad_operands_are_named() {
    let problem = Problem::random(3);
    assert_eq!(problem.config.heads, 1);
    let good = problem.reset();
    type Change = fn(&mut Reset);
    let changes: [(Change, &str); 12] = [
        (|r| r.slots.buffer.address = 0, "slots has address 0"),
        (|r| r.slots.buffer.elements = 0, "slots holds 0 elements"),
        (|r| r.slots.columns = 0, "slots has 0 columns, 1 needed"),
        (
            |r| r.conv_cache.length = 2,
            "conv_cache has 2 positions a line, 3 needed",
        ),
        (
            |r| r.slots.buffer.address = STATE,
            "state_pool is written and shares memory with slots",
        ),
        (
            |r| r.slots.buffer.address = r.conv_cache.buffer.address.next_multiple_of(4),
            "conv_cache is written and shares memory with slots",
        ),
        (
            |r| r.state.buffer.address += 8,
            "state_pool is at 0x20000000008, which is not",
        ),
        (
            |r| (r.state.slot_stride, r.state.buffer.elements) = (r.state.slot_stride + 1, 1 << 30),
            "which is not a multiple of 16 bytes",
        ),
        (
            |r| r.conv_cache.slot_stride = 5,
            "conv_cache has a stride of 5 elements",
        ),
        (
            |r| r.pool_slots = 1 << 40,
            "pool_slots is 1099511627776, at most 2147483647",
        ),
        (
            |r| r.requests = 70_000,
            "requests is 70000, at most 65535 allowed",
        ),
        (
            |r| (r.state.slot_stride, r.conv_cache.buffer.address) = (16_384, STATE),
            "state_pool is written and shares memory with conv_cache",
        ),
    ];
    for (change, text) in changes {
        let mut reset = good;
        change(&mut reset);
        let error = plan_reset(&problem.config, &reset).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let mut empty = good;
    empty.requests = 0;
    assert!(plan_reset(&problem.config, &empty).unwrap().is_none());
}
