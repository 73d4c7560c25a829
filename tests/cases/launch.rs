//! Launch, compilation, caches, architectures: what needs no driver.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kda_codegen::{
    Arch, ConvLayout, EarlyReads, GateInput, GateKind, KernelSpec, Mode, NullRule, Rollback,
    StateDtype, nvrtc,
};
use kda_runtime::{
    Config, DiskCache, Error, Kernel, KernelSources, Kernels, Origin, Plan, Policies, Policy,
    StepKind,
};

use kda_tests::cuda::on_device;

use crate::support::*;

/// Counts what is asked of NVRTC.
struct Counted(AtomicUsize);

impl Kernels for Counted {
    fn kernel(&self, spec: &KernelSpec) -> Result<Kernel, Error> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Kernels::kernel(&kernels(), spec)
    }
}

#[test]
fn c35_the_batch_size_is_no_part_of_a_kernel() {
    let (single, cluster): (Mode, Mode) = (SINGLE.parse().unwrap(), CLUSTER.parse().unwrap());
    let policy = |max_requests, mode| Policy {
        kind: StepKind::Decode,
        max_requests,
        mode,
    };
    // Twelve batch sizes, two modes: two kernels.
    let policies = Policies(
        (1..=12)
            .map(|n| policy(n * 8, [single, cluster][n % 2]))
            .collect(),
    );
    let plan = Plan::new(Arch::Sm90a, &Config::kimi_k3(1), &policies).unwrap();
    let counted = Counted(AtomicUsize::new(0));
    assert_eq!(counted.kernels(plan.kernels()).unwrap().len(), 2);
    assert_eq!(counted.0.into_inner(), 2);
}

#[test]
fn c35_a_step_is_planned_in_microseconds() {
    let mut case = verify(1, 64, 4, 4);
    case.shape.pool_slots = 300;
    let (plan, step) = planned(&case);
    let mut times: Vec<Duration> = (0..20_000)
        .map(|_| {
            let started = Instant::now();
            plan.step(std::hint::black_box(&step), 8).unwrap();
            started.elapsed()
        })
        .collect();
    times.sort();
    // Everything of `run` but the driver's own call.
    let slow = times[times.len() * 999 / 1000];
    assert!(slow < Duration::from_micros(10), "{slow:?}");
}

#[test]
fn c35_a_warm_cache_never_enters_nvrtc() {
    let folder = std::env::temp_dir().join(format!("kda-c35-{}", std::process::id()));
    let cache = DiskCache::at(&folder);
    let specs = [
        KernelSpec::new(Arch::Sm90a, 1),
        KernelSpec::new(Arch::Sm90a, 1).with_verify(2),
    ];
    let compiler = KernelSources::new().disk_cache(cache.clone()).nvrtc(&[]);
    for kernel in compiler.kernels(&specs).unwrap() {
        assert_eq!(kernel.origin, Origin::Compiled);
    }
    // Without NVRTC as a source, every kernel is there all the same.
    let warm = KernelSources::new().disk_cache(cache);
    for kernel in warm.kernels(&specs).unwrap() {
        assert_eq!(kernel.origin, Origin::Cache);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn c37_every_field_changes_the_key() {
    let spec = KernelSpec::new(Arch::Sm90a, 12).with_verify(2);
    let key = |spec: &KernelSpec, version| Kernel::new(spec, vec![], version, None).unwrap().key;
    let base = key(&spec, (13, 0));
    assert_eq!(base, key(&spec, (13, 0)));
    // Destructured in full: a new field demands a line below.
    let KernelSpec {
        role: _,
        arch: _,
        heads: _,
        tokens: _,
        verify: _,
        ragged: _,
        rollback: _,
        conv_bias: _,
        conv_layout: _,
        gate: _,
        gate_input: _,
        null_rule: _,
        state_dtype: _,
        early_reads: _,
        mode:
            Mode {
                value_split: _,
                threads: _,
                row_lanes: _,
                gate_schedule: _,
                slot_hints: _,
            },
    } = spec;
    type Change = fn(&mut KernelSpec);
    let changes: [(&str, Change); 17] = [
        ("arch", |s| s.arch = Arch::Sm100a),
        ("heads", |s| s.heads = 11),
        ("tokens", |s| s.tokens = 3),
        ("verify", |s| (s.tokens, s.verify) = (1, true)),
        ("ragged", |s| s.ragged = true),
        ("rollback", |s| s.rollback = Rollback::Records),
        ("conv_bias", |s| s.conv_bias = true),
        ("conv_layout", |s| s.conv_layout = ConvLayout::TokenFirst),
        ("gate", |s| s.gate = GateKind::Softplus),
        ("gate_input", |s| s.gate_input = GateInput::Projected),
        ("null_rule", |s| s.null_rule = NullRule::Negative),
        ("state_dtype", |s| s.state_dtype = StateDtype::Bf16),
        ("early_reads", |s| s.early_reads = EarlyReads::Caches),
        ("threads and lanes", |s| {
            s.mode = "split1-512x32-block".parse().unwrap()
        }),
        ("value_split", |s| {
            s.mode = "split2-256x8-block".parse().unwrap()
        }),
        ("gate_schedule", |s| {
            s.mode = "split2-256x8-cluster".parse().unwrap()
        }),
        ("slot_hints", |s| {
            s.mode = "split1-256x8-block-hints".parse().unwrap()
        }),
    ];
    let mut keys = vec![base, key(&spec, (13, 1)), key(&spec, (12, 9))];
    for (field, change) in changes {
        let mut other = spec;
        change(&mut other);
        assert_ne!(other, spec, "{field}");
        keys.push(key(&other, (13, 0)));
    }
    keys.push(key(
        &KernelSpec::reset(Arch::Sm90a, NullRule::NonPositive, StateDtype::F32),
        (13, 0),
    ));
    let mut decode = spec;
    (decode.tokens, decode.verify) = (1, false);
    keys.push(key(&decode, (13, 0)));
    let different: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(different.len(), keys.len());
}

#[test]
fn c40_device_code_is_of_the_exact_architecture() {
    for &arch in Arch::ALL {
        let spec = KernelSpec::new(arch, 1);
        // A real architecture, not a virtual one: no PTX that a driver would have to compile.
        let options = nvrtc::options(&spec).join(" ");
        assert!(
            options.contains(&format!("--gpu-architecture={arch}")),
            "{options}"
        );
        assert!(!options.contains("compute_"));
        let cubin = &kernels().kernel(&spec).unwrap().cubin;
        assert_eq!(&cubin[..4], b"\x7fELF");
        // EM_CUDA.
        assert_eq!(u16::from_le_bytes([cubin[18], cubin[19]]), 190);
        let flags = u32::from_le_bytes(cubin[48..52].try_into().unwrap());
        let number: u32 = arch
            .to_string()
            .chars()
            .filter(char::is_ascii_digit)
            .collect::<String>()
            .parse()
            .unwrap();
        let bytes = flags.to_le_bytes().map(u32::from);
        assert!(bytes.contains(&number), "{arch}: flags {flags:#x}");
    }
}

/// As the driver does: text of an architecture without an `a` for every later device, of one with an
/// `a` for its own.
#[test]
fn c41_older_ptx_runs_on_newer_devices() {
    for (arch, capability, runs) in [
        (Arch::Sm80, (8, 0), true),
        (Arch::Sm80, (9, 0), true),
        (Arch::Sm89, (12, 0), true),
        (Arch::Sm86, (8, 0), false),
        (Arch::Sm89, (8, 7), false),
        (Arch::Sm90a, (9, 0), true),
        (Arch::Sm90a, (10, 0), false),
        (Arch::Sm100a, (9, 0), false),
    ] {
        let found = arch.ptx_runs_on(capability.0, capability.1);
        assert_eq!(found, runs, "{arch} on {capability:?}");
    }
}

#[test]
fn c41_capabilities_are_an_exact_set() {
    for (capability, expected) in [
        ((9, 0), Some("sm_90a")),
        ((10, 0), Some("sm_100a")),
        ((10, 3), Some("sm_103a")),
        ((12, 0), Some("sm_120a")),
        ((12, 1), Some("sm_121a")),
        ((12, 2), None),
        ((99, 0), None),
        ((9, 1), None),
        ((7, 5), None),
        ((8, 0), Some("sm_80")),
        ((8, 6), Some("sm_86")),
        ((8, 9), Some("sm_89")),
        ((11, 0), None),
        ((-1, 0), None),
    ] {
        let found = Arch::for_capability(capability.0, capability.1);
        assert_eq!(found.map(|arch| arch.to_string()).as_deref(), expected);
        // An architecture-specific target runs on its own capability alone.
        for arch in Arch::ALL
            .iter()
            .filter(|arch| arch.to_string().ends_with('a'))
        {
            assert_eq!(
                arch.runs_on(capability.0, capability.1),
                found == Some(*arch)
            );
        }
    }
    let error = Error::DeviceUnsupported {
        major: 99,
        minor: 0,
    };
    assert_eq!(
        error.to_string(),
        "no kernel exists for compute capability 99.0"
    );
}

#[test]
fn c41_shared_memory_stays_within_every_device() {
    // 48 KiB need no opt-in, on any device. The largest kernels: most tokens; a size is no matter of
    // the architecture.
    for mode in [
        "split1-512x8-block",
        "split1-256x32-block",
        "split2-256x8-cluster",
    ] {
        let spec = KernelSpec::new(Arch::Sm90a, 1).with_verify(kda_codegen::MAX_TOKENS);
        let kernel = kernels()
            .kernel(&spec.with_mode(mode.parse().unwrap()))
            .unwrap();
        let Some(resources) = kernel.resources else {
            // NVRTC took it from a cache of its own; where tests run by default it has none.
            assert!(on_device(), "no resource report");
            continue;
        };
        let bytes = resources.shared_bytes;
        assert!(bytes > 0 && bytes <= 48 << 10, "{mode}: {bytes} bytes");
    }
}
