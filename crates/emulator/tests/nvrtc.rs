//! What NVRTC emits for one kernel on every architecture: it parses, runs soundly on many
//! schedules, and computes what the same arithmetic in Rust does.

mod support;

use kda_emulator::{Error, Launch, Memory, Module, Options, Param, Report};
use support::{IN, OUT};

const SOURCES: [(&str, &str, u32); 5] = [
    ("sm_80", include_str!("ptx/sm_80.ptx"), 1),
    ("sm_90a", include_str!("ptx/sm_90a.ptx"), 2),
    ("sm_100a", include_str!("ptx/sm_100a.ptx"), 2),
    ("sm_103a", include_str!("ptx/sm_103a.ptx"), 2),
    ("sm_120a", include_str!("ptx/sm_120a.ptx"), 2),
];
const BLOCKS: usize = 4;
const COUNTER: u64 = 0x30_0000;
const ROUNDS: usize = 11;

fn input() -> Vec<f32> {
    (0..BLOCKS * 64)
        .map(|i| (i * 37 % 101) as f32 / 8.0 - 5.0)
        .collect()
}

fn expected(cluster: usize) -> Vec<f32> {
    let (input, table) = (input(), [3, 1, 4, 1, 5, 9, 2, 6]);
    let scratch: Vec<f32> = (0..BLOCKS * 64)
        .map(|index| {
            let (block, thread) = (index / 64, index % 64);
            let local: Vec<f32> = (0..8)
                .map(|i| input[block * 64 + ((thread + i) & 63)])
                .collect();
            let mut sum = 0f32;
            for i in 0..ROUNDS {
                sum += local[table[i & 7] & 7] * (i + 1) as f32;
            }
            sum = match thread & 3 {
                0 => sum + 1.0,
                1 => sum * 2.0,
                2 => sum / 3.0,
                _ => sum.abs().sqrt(),
            };
            let precise = f64::from(sum) * 1.5 + (index % 7) as f64;
            let wide = index as i64 * 0x1_0000_0001 / 10 % 1000;
            precise as f32 + wide as f32 + -3.0
        })
        .collect();
    let totals: Vec<f32> = scratch
        .chunks(64)
        .map(|block| {
            let mut warp = block[32..].to_vec();
            for offset in [16, 8, 4, 2, 1] {
                warp = (0..32).map(|i| warp[i] + warp[i ^ offset]).collect();
            }
            warp[0]
        })
        .collect();
    (0..BLOCKS * 64)
        .map(|index| {
            let block = index / 64;
            let both = if cluster == 2 {
                totals[block / 2 * 2] + totals[block / 2 * 2 + 1]
            } else {
                totals[block]
            };
            scratch[index] + both * 0.0625
        })
        .collect()
}

fn run(text: &str, cluster: u32, seed: u64) -> Result<(Report, Memory), Error> {
    let module = Module::parse(text)?;
    let mut memory = Memory::new();
    memory.add(
        "in",
        IN,
        input().into_iter().flat_map(f32::to_le_bytes).collect(),
    );
    memory.set_read_only("in");
    memory.add_uninitialised("out", OUT, BLOCKS as u64 * 256);
    memory.add("counter", COUNTER, vec![0; 4]);
    let mut arguments = Vec::new();
    [IN, OUT, COUNTER]
        .iter()
        .for_each(|a| arguments.extend(a.to_le_bytes()));
    arguments.extend(9i32.to_le_bytes());
    arguments.extend((-3i16).to_le_bytes());
    arguments.extend([0; 2]);
    let launch = Launch {
        entry: "sample",
        grid: [BLOCKS as u32, 1, 1],
        block: [64, 1, 1],
        cluster: [cluster, 1, 1],
        dynamic_shared_bytes: 256,
        params: &[Param::Bytes(arguments), Param::I32(ROUNDS as i32)],
    };
    let options = Options::default()
        .seed(seed)
        .max_instructions_per_thread(200_000);
    let report = module.launch(&mut memory, &launch, &options)?;
    Ok((report, memory))
}

#[test]
fn every_architecture_computes_the_same_arithmetic() {
    for (arch, text, cluster) in SOURCES {
        let expected: Vec<u32> = expected(cluster as usize)
            .into_iter()
            .map(f32::to_bits)
            .collect();
        for seed in 0..16 {
            let (report, memory) =
                run(text, cluster, seed).unwrap_or_else(|e| panic!("{arch}, seed {seed}: {e}"));
            assert_eq!(
                report.clusters,
                u64::from(BLOCKS as u32 / cluster),
                "{arch}"
            );
            let found: Vec<u32> = (0..BLOCKS * 64)
                .map(|i| support::word(&memory, "out", i))
                .collect();
            assert_eq!(found, expected, "{arch}, seed {seed}");
            assert_eq!(
                support::word(&memory, "counter", 0),
                BLOCKS as u32 * 32,
                "{arch}"
            );
        }
    }
}

/// Every statement that orders something, dropped in turn.
#[test]
fn dropping_any_barrier_or_wait_is_reported() {
    let ordering = [
        "bar.sync",
        "cp.async.wait_group",
        "barrier.cluster.",
        "fence.mbarrier_init",
        "mbarrier.",
    ];
    for (arch, text, cluster) in SOURCES {
        let mut dropped = 0;
        for (number, line) in text.lines().enumerate() {
            if !ordering.iter().any(|o| line.trim_start().starts_with(o)) {
                continue;
            }
            dropped += 1;
            let without = |(i, l)| if i == number { "" } else { l };
            let mutant: Vec<&str> = text.lines().enumerate().map(without).collect();
            let caught = (0..16).any(|seed| run(&mutant.join("\n"), cluster, seed).is_err());
            assert!(
                caught,
                "{arch}: nothing is reported without line {}: {line}",
                number + 1
            );
        }
        assert!(
            dropped >= if cluster == 2 { 8 } else { 3 },
            "{arch}: only {dropped} statements"
        );
    }
}
