//! The policy files that the library carries: what is in them is what was measured, and what they
//! choose is what the tests compile and run. `KDA_BLESS=1` renews them, and `docs/policies.md`, from the
//! measurements.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use kda_codegen::schedule::MAX_REQUESTS;
use kda_codegen::{Arch, EarlyReads, GateInput, KernelSpec, Mode};
use kda_runtime::{
    Config, Error, Measurement, Plan, Policies, Policy, PolicyDefect, PolicyEntry, PolicyFile,
    Rollback, StepKind, Target,
};
use kda_tests::{pages, placed, property_config, scratch};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::Value;

const H200: &str = "NVIDIA H200";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Measurements as `cargo xtask bench --out` writes them, one a line.
fn measurements(file: &str) -> Vec<Measurement> {
    let path = root().join("docs/measurements").join(file);
    let text = fs::read_to_string(path).unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let mut all = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        // Older lines have no setting, and another name for the time. The rest are ceilings,
        // neighbours, and times beside a GEMM.
        let layers = line
            .get("setting")
            .is_none_or(|setting| setting == "layers");
        let time = line.get("us").or(line.get("median_us"));
        let (Some(mode), Some(time), true) = (line["mode"].as_str(), time, layers) else {
            continue;
        };
        let (mode, early_reads) = placed::parse_mode(mode).unwrap();
        all.push(Measurement {
            heads: number(&line["heads"]),
            kind: match number(&line["tokens"]) {
                1 => StepKind::Decode,
                tokens => StepKind::Verify(tokens),
            },
            early_reads,
            rollback: match line.get("records") {
                Some(Value::Bool(true)) => Rollback::Records,
                _ => Rollback::Checkpoints,
            },
            requests: number(&line["requests"]),
            pitch: None,
            mode,
            // A nanosecond is less than the clock tells.
            microseconds: (time.as_f64().unwrap() * 1e3).round() / 1e3,
        });
    }
    all
}

/// The mode that the rule gives what was measured.
fn ruled(m: &Measurement) -> Mode {
    let config = settings(m.heads, m.early_reads, m.rollback);
    let rule = Policies::for_device(Arch::Sm90a, &config, &[m.kind]);
    rule.serving(m.kind, m.requests).expect("any size").mode
}

/// What was measured on the H200 of kernels that have not changed since, or have become a few percent faster
/// (a cluster's decode step), the two of a comparison in one run: of each size what the last run says that has a time of the rule's mode. Sizes without one are
/// left out: nothing is known to be better.
fn all_measured() -> Vec<Measurement> {
    // Since the older runs, verify steps and one block a head of many heads have changed.
    let kept =
        |m: &Measurement| m.kind == StepKind::Decode && (m.heads <= 12 || m.mode.value_split > 1);
    let older = [
        "2026-12-02-h200/bench.jsonl",
        "2026-12-02-h200/bench-unchanged.jsonl",
        "2026-12-02-h200/bench-heads.jsonl",
        "2026-12-03-h200/bench-decode.jsonl",
    ];
    let current = [
        "2026-12-03-h200-merged/bench.jsonl",
        "2026-12-03-h200-merged/pinned-merged.jsonl",
        "2026-12-03-h200-hints/tune.jsonl",
        "2026-12-03-h200-hints/bench.jsonl",
    ];
    let older = older.map(|file| measurements(file).into_iter().filter(kept).collect());
    let runs = older.into_iter().chain(current.map(measurements));
    let size = |m: &Measurement| (m.heads, m.kind, m.early_reads, m.rollback, m.requests);
    let mut all: Vec<Measurement> = Vec::new();
    for mut run in runs {
        let ranked: HashSet<_> = run
            .iter()
            .filter(|m| ruled(m) == m.mode)
            .map(size)
            .collect();
        run.retain(|m| ranked.contains(&size(m)));
        all.retain(|m| !ranked.contains(&size(m)));
        all.append(&mut run);
    }
    all
}

/// The best of them.
fn measured() -> PolicyFile {
    PolicyFile::from_measurements(H200, Arch::Sm90a, "2026-12-03", &all_measured()).unwrap()
}

/// A line for every entry of the shipped file, with the time of the rule's mode from the same
/// measurements.
#[test]
fn the_shipped_file_is_no_slower_than_the_rule() {
    let mut text = String::from(
        "| heads | step | early reads | requests | file | µs | rule | µs | gain |\n\
         | --: | --- | --- | --: | --- | --: | --- | --: | --: |\n",
    );
    let all = all_measured();
    for entry in measured().entries() {
        let same = |m: &&Measurement| {
            (m.heads, m.kind, m.early_reads, m.rollback, m.requests)
                == (
                    entry.heads,
                    entry.kind,
                    entry.early_reads,
                    entry.rollback,
                    entry.max_requests,
                )
        };
        // The later time of a mode counts.
        let rule = all.iter().rev().filter(same).find(|m| m.mode == ruled(m));
        let rule = rule.expect("timed at every entry");
        let gain = rule.microseconds / entry.microseconds - 1.0;
        assert!(gain >= 0.0, "{entry:?}");
        let records = match entry.rollback {
            Rollback::Checkpoints => "",
            Rollback::Records => ", records",
        };
        let gain = match entry.mode == rule.mode {
            true => String::new(),
            false => format!("{:.1}%", 100.0 * gain),
        };
        text += &format!(
            "| {} | {}{records} | {} | {} | {} | {:.2} | {} | {:.2} | {gain} |\n",
            entry.heads,
            entry.kind,
            entry.early_reads,
            entry.max_requests,
            entry.mode,
            entry.microseconds,
            rule.mode,
            rule.microseconds,
        );
    }
    pages::holds("policies.md", &text);
}

#[test]
fn the_shipped_file_is_what_was_measured() {
    let path = root().join("crates/runtime/policies/h200.toml");
    let expected = measured();
    if std::env::var_os("KDA_BLESS").is_some() {
        fs::write(&path, expected.to_string()).unwrap();
        return;
    }
    let found = fs::read_to_string(&path).unwrap();
    assert!(
        found == expected.to_string(),
        "policies/h200.toml differs, KDA_BLESS=1 renews it"
    );
    assert_eq!(PolicyFile::from_path(&path).unwrap(), expected);
    assert_eq!(PolicyFile::shipped(), [expected]);
}

fn settings(heads: usize, early_reads: EarlyReads, rollback: Rollback) -> Config {
    Config {
        early_reads,
        rollback,
        ..Config::kimi_k3(heads)
    }
}

fn config(heads: usize, early_reads: EarlyReads) -> Config {
    settings(heads, early_reads, Rollback::Checkpoints)
}

/// Settings that an entry holds for.
fn config_of(entry: &PolicyEntry) -> Config {
    settings(entry.heads, entry.early_reads, entry.rollback)
}

/// The mode that serves `requests` of the one kind there is.
fn serving(policies: &Policies, requests: usize) -> Mode {
    let kind = policies.0[0].kind;
    policies.serving(kind, requests).expect("any size").mode
}

/// Whoever asks which policy serves hears what the plan launches.
#[test]
fn the_policy_that_serves_is_the_plans() {
    for early_reads in [EarlyReads::Weights, EarlyReads::Caches] {
        let config = config(12, early_reads);
        let kinds = [StepKind::Verify(4), StepKind::Decode];
        let policies = Policies::for_device(Arch::Sm90a, &config, &kinds);
        let plan = Plan::new(Arch::Sm90a, &config, &policies).unwrap();
        for kind in kinds {
            for requests in [1, 2, 4, 5, 8, 9, 24, 25, 200, MAX_REQUESTS] {
                let mut rules = plan.policies().filter(|rule| rule.0 == kind);
                let (_, _, kernel) = rules.find(|(_, most, _)| *most >= requests).unwrap();
                let served = policies.serving(kind, requests).unwrap();
                assert_eq!(
                    served.mode,
                    plan.kernels()[kernel].mode,
                    "{kind}, {requests}"
                );
            }
        }
        let least = Policies(policies.0.iter().rev().copied().collect());
        let (first, any) = (policies.serving(kinds[1], 1), least.serving(kinds[1], 1));
        assert_eq!(first, any, "the order does not matter");
        assert_eq!(policies.serving(StepKind::Verify(3), 1), None);
        assert_eq!(policies.serving(kinds[1], MAX_REQUESTS + 1), None);
    }
}

#[test]
fn a_measured_size_runs_in_its_mode_and_every_size_in_one() {
    for file in PolicyFile::shipped() {
        let target = Target::named(file.arch(), file.device());
        for entry in file.entries() {
            let kinds = [entry.kind];
            let config = config_of(entry);
            let of = |target: Target<'_>| Policies::for_device(target, &config, &kinds);
            let policies = of(target);
            for requests in [entry.min_requests, entry.max_requests] {
                assert_eq!(serving(&policies, requests), entry.mode, "{entry:?}");
                let found = file.entry(&config, entry.kind, requests);
                assert_eq!(found, Some(entry));
            }
            // Ascending, and up to the largest batch.
            let most: Vec<usize> = policies
                .0
                .iter()
                .map(|policy| policy.max_requests)
                .collect();
            assert!(most.is_sorted_by(|a, b| a < b), "{most:?}");
            assert_eq!(most.last(), Some(&MAX_REQUESTS));
            // Where nobody measured, the rule.
            let rule = of(Target::from(file.arch()));
            for requests in (1..300).chain([5000, MAX_REQUESTS]) {
                let own = file.entry(&config, entry.kind, requests);
                let expected = own.map_or(serving(&rule, requests), |entry| entry.mode);
                assert_eq!(serving(&policies, requests), expected, "{requests}");
            }
        }
    }
}

#[test]
fn another_device_or_share_of_heads_follows_the_rule() {
    let kinds = [StepKind::Decode, StepKind::Verify(4), StepKind::Verify(3)];
    let weights = EarlyReads::Weights;
    let of =
        |target: Target<'_>, heads| Policies::for_device(target, &config(heads, weights), &kinds);
    let h200 = Target::named(Arch::Sm90a, H200);
    for other in [
        Target::named(Arch::Sm90a, "NVIDIA H200 NVL"),
        Target::named(Arch::Sm90a, "nvidia h200"),
        Target::named(Arch::Sm90a, ""),
    ] {
        for heads in 1..=128 {
            assert_eq!(of(other, heads), of(Target::from(Arch::Sm90a), heads));
        }
    }
    assert_eq!(of(h200, 7), of(Target::from(Arch::Sm90a), 7));
    assert_ne!(of(h200, 3), of(Target::from(Arch::Sm90a), 3));
    // A device is its architecture, too.
    let other = Arch::Sm100a;
    assert_eq!(
        of(Target::named(other, H200), 3),
        of(Target::from(other), 3)
    );
}

/// As `docs/models.md` says.
#[test]
fn steps_with_records_have_a_rule_of_their_own() {
    let h200 = Target::named(Arch::Sm90a, H200);
    for tokens in [2, 4, 8] {
        let verify = StepKind::Verify(tokens);
        let checkpoints = config(12, EarlyReads::Weights);
        let records = Config {
            rollback: Rollback::Records,
            ..checkpoints
        };
        let policies = Policies::for_device(h200, &records, &[verify]);
        let (many, most) = match tokens {
            2 => ("split1-256x32-block-hints", "split1-256x32-block"),
            4 => ("split1-256x32-block-hints", "split1-256x32-block-hints"),
            _ => ("split1-256x8-block-hints", "split1-256x8-block-hints"),
        };
        for (requests, mode) in [
            (1, "split8-128x32-cluster-hints"),
            (2, "split2-256x32-cluster-hints"),
            (6, "split2-256x32-cluster-hints"),
            (9, many),
            (256, most),
        ] {
            let serving = policies.serving(verify, requests).unwrap();
            assert_eq!(
                serving.mode.to_string(),
                mode,
                "{tokens} tokens, {requests}"
            );
        }
        // Decode steps know no records.
        let decode = |config| Policies::for_device(h200, config, &[StepKind::Decode]);
        assert_eq!(decode(&records), decode(&checkpoints));
    }
}

/// What a policy may choose is compiled and emulated by `cargo xtask test`.
#[test]
fn every_mode_of_a_shipped_file_is_under_test() {
    for file in PolicyFile::shipped() {
        for &gate_input in GateInput::ALL {
            let tested = placed::mode_texts(file.arch(), gate_input);
            for entry in file.entries() {
                let early = match entry.early_reads {
                    EarlyReads::Weights => "",
                    EarlyReads::Caches => "+early",
                };
                let text = format!("{}{early}", entry.mode.with_gate_input(gate_input));
                assert!(tested.contains(&text), "{text} of {entry:?}");
            }
        }
    }
}

/// Whoever takes the policies of a device gets kernels that exist, and the modes of the low-rank gate
/// but for who computes it.
#[test]
fn a_projected_gate_is_served_by_every_device() {
    let kinds: Vec<StepKind> = std::iter::once(StepKind::Decode)
        .chain((1..=16).map(StepKind::Verify))
        .collect();
    for &arch in Arch::ALL {
        for target in Target::all(arch) {
            for heads in [1, 2, 3, 6, 12, 24, 48, 96, 128] {
                for &early_reads in EarlyReads::ALL {
                    if early_reads == EarlyReads::Caches && !arch.has_clusters() {
                        continue;
                    }
                    let low_rank = config(heads, early_reads);
                    let projected = Config {
                        gate_input: GateInput::Projected,
                        ..low_rank
                    };
                    let policies = Policies::for_device(target, &projected, &kinds);
                    Plan::new(arch, &projected, &policies).unwrap();
                    let other = Policies::for_device(target, &low_rank, &kinds);
                    assert_eq!(policies.0.len(), other.0.len());
                    for (a, b) in policies.0.iter().zip(other.0) {
                        let mode = b.mode.with_gate_input(GateInput::Projected);
                        assert_eq!(*a, Policy { mode, ..b });
                    }
                }
            }
        }
    }
}

/// As what a legal mode of the low-rank gate becomes is legal with a projected one.
#[test]
fn every_mode_has_one_for_a_projected_gate() {
    for &arch in Arch::ALL {
        for tokens in [1, 4, 16] {
            let spec = KernelSpec::new(arch, 12).with_verify(tokens);
            for mode in spec.legal_modes() {
                let mut other = spec.with_mode(mode.with_gate_input(GateInput::Projected));
                other.gate_input = GateInput::Projected;
                other.validate().unwrap();
            }
        }
    }
}

fn kind() -> impl Strategy<Value = StepKind> {
    prop_oneof![
        Just(StepKind::Decode),
        (1..=16usize).prop_map(StepKind::Verify)
    ]
}

/// Any legal entry of an architecture.
fn entry(arch: Arch) -> impl Strategy<Value = PolicyEntry> {
    let step = (
        1..=128usize,
        kind(),
        select(EarlyReads::ALL),
        select(Rollback::ALL),
    );
    let requests = prop_oneof![3 => 1..40usize, 1 => 1..=MAX_REQUESTS];
    let time = prop_oneof![1e-3..1e3f64, 1e-300..1e9f64];
    let slack = proptest::option::of(0..100usize);
    (step, requests, any::<prop::sample::Index>(), slack, time).prop_map(
        move |((heads, kind, early_reads, rollback), max_requests, mode, slack, microseconds)| {
            let early_reads = match arch.has_clusters() {
                true => early_reads,
                false => EarlyReads::Weights,
            };
            let mut spec = KernelSpec::new(arch, heads);
            spec.early_reads = early_reads;
            let modes = spec.legal_modes();
            PolicyEntry {
                heads,
                kind,
                early_reads,
                rollback: match kind {
                    StepKind::Decode => Rollback::Checkpoints,
                    StepKind::Verify(_) => rollback,
                },
                min_requests: max_requests.saturating_sub(slack.unwrap_or(0)).max(1),
                max_requests,
                pitch: slack.map(|slack| heads * 513 + 128 + slack),
                mode: modes[mode.index(modes.len())],
                microseconds,
            }
        },
    )
}

/// Whether two entries serve the same step.
fn clash(a: &PolicyEntry, b: &PolicyEntry) -> bool {
    let step = |entry: &PolicyEntry| (entry.heads, entry.kind, entry.early_reads, entry.rollback);
    step(a) == step(b) && a.min_requests <= b.max_requests && b.min_requests <= a.max_requests
}

proptest! {
    #![proptest_config(property_config(256))]

    #[test]
    fn a_written_file_reads_back_the_same(
        (arch, entries) in select(Arch::ALL)
            .prop_flat_map(|arch| (Just(arch), vec(entry(arch), 0..12))),
        device in "[ !#-\\[\\]-~]{1,100}",
        (year, month, day) in (0..10_000u32, 1..=12u32, 1..=31u32),
        same_step in any::<bool>(),
    ) {
        let mut entries = entries;
        if same_step && let Some(&first) = entries.first() {
            for entry in &mut entries {
                (entry.heads, entry.kind) = (first.heads, first.kind);
                (entry.early_reads, entry.mode) = (first.early_reads, first.mode);
                entry.rollback = first.rollback;
                entry.pitch = None;
            }
        }
        let date = format!("{year:04}-{month:02}-{day:02}");
        let made = PolicyFile::new(&device, arch, &date, &entries);
        let clashes = (0..entries.len()).any(|a| (0..a).any(|b| clash(&entries[a], &entries[b])));
        if clashes {
            let error = made.expect_err("two serve the same");
            let overlap = matches!(
                error,
                Error::PolicyFileIllegal { defect: PolicyDefect::Overlap { .. }, .. }
            );
            prop_assert!(overlap, "{}", error);
            return Ok(());
        }
        let file = made.unwrap();
        let text = file.to_string();
        let read: PolicyFile = text.parse().unwrap();
        prop_assert_eq!(&read, &file);
        prop_assert_eq!(read.to_string(), text);
        // The order given does not matter, and nothing is lost.
        entries.reverse();
        let reversed = PolicyFile::new(&device, arch, &date, &entries).unwrap();
        prop_assert_eq!(&reversed, &file);
        prop_assert_eq!(file.entries().len(), entries.len());
        prop_assert!(entries.iter().all(|entry| file.entries().contains(entry)));
        prop_assert_eq!((file.device(), file.arch(), file.date()), (&*device, arch, &*date));
        // Whatever it holds, a plan takes its policies.
        for entry in file.entries() {
            for &gate_input in GateInput::ALL {
                let config = Config { gate_input, ..config_of(entry) };
                let kinds = [entry.kind];
                let policies = Policies::from_file(&file, arch, &config, &kinds).unwrap();
                prop_assert!(Plan::new(arch, &config, &policies).is_ok());
                let serves = serving(&policies, entry.max_requests);
                prop_assert_eq!(serves, entry.mode.with_gate_input(gate_input));
            }
        }
    }
}

/// A file of one entry, with `from` replaced.
fn text(from: &str, to: &str) -> String {
    let whole = "device = \"GPU\"\narch = \"sm_90a\"\ndate = \"2026-12-02\"\nentries = [\n    \
                 { heads = 12, kind = \"decode\", tokens = 1, early_reads = \"weights\", \
                 max_requests = 8, mode = \"split2-256x8-cluster\", microseconds = 5.5 },\n]\n";
    assert!(whole.contains(from), "{from}");
    whole.replacen(from, to, 1)
}

#[test]
fn a_file_says_what_is_wrong_with_it() {
    let entry = "{ heads = 12, kind = \"decode\", tokens = 1, early_reads = \"weights\", \
                 max_requests = 9, mode = \"split1-256x8-block\", microseconds = 9 }";
    let twice = format!("]\nentries = [{entry}]");
    let more = |min: &str| format!("{}, {entry}]", min);
    let cases: [(&str, &str, &str); 36] = [
        ("device = \"GPU\"\n", "", "device is missing"),
        ("\"GPU\"", "7", "device is 7, allowed: a text"),
        (
            "GPU",
            "",
            "device is \"\", allowed: 1..=100 printable ASCII characters without \" and \\",
        ),
        (
            "GPU",
            "\\u0007",
            "device is \"?\", allowed: 1..=100 printable ASCII characters without \" and \\",
        ),
        (
            "sm_90a",
            "sm_90",
            "arch is \"sm_90\", allowed: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a, sm_121a",
        ),
        (
            "2026-12-02",
            "2026-13-02",
            "date is \"2026-13-02\", allowed: a day as YYYY-MM-DD",
        ),
        (
            "\"2026-12-02\"",
            "2026-12-02",
            "date is a date of TOML, allowed: a text",
        ),
        (
            "entries = [",
            "other = [",
            "\"other\" is unknown, allowed: device, arch, date, entries",
        ),
        (
            "[\n",
            "[3,\n",
            "entry 1: entries is 3, allowed: a list of tables",
        ),
        (
            "heads = 12",
            "heads = 0",
            "entry 1: heads is 0, allowed: 1..=128",
        ),
        (
            "heads = 12",
            "heads = 129",
            "entry 1: heads is 129, allowed: 1..=128",
        ),
        (
            "heads = 12",
            "heads = -1",
            "entry 1: heads is -1, allowed: a whole number, 0 and up",
        ),
        (
            "heads = 12",
            "heads = 12.0",
            "entry 1: heads is 12.0, allowed: a whole number, 0 and up",
        ),
        ("heads = 12, ", "", "entry 1: heads is missing"),
        (
            "decode",
            "encode",
            "entry 1: kind is \"encode\", allowed: decode, verify",
        ),
        (
            "tokens = 1",
            "tokens = 2",
            "entry 1: tokens is 2, allowed: 1 for decode",
        ),
        (
            "\"decode\", tokens = 1",
            "\"verify\", tokens = 17",
            "entry 1: tokens is 17, allowed: 1..=16",
        ),
        (
            "\"weights\"",
            "\"all\"",
            "entry 1: early_reads is \"all\", allowed: weights, caches",
        ),
        (
            "max_req",
            "rollback = \"replay\", max_req",
            "entry 1: rollback is \"replay\", allowed: checkpoints, records",
        ),
        (
            "max_req",
            "rollback = 1, max_req",
            "entry 1: rollback is 1, allowed: checkpoints, records",
        ),
        (
            "max_req",
            "rollback = \"records\", max_req",
            "entry 1: rollback is \"records\", allowed: checkpoints in decode steps",
        ),
        (
            "max_requests = 8",
            "max_requests = 0",
            "entry 1: max_requests is 0, allowed: 1..=65535",
        ),
        (
            "max_requests = 8",
            "max_requests = 65536",
            "entry 1: max_requests is 65536, allowed: 1..=65535",
        ),
        (
            "max_req",
            "min_requests = 9, max_req",
            "entry 1: min_requests is 9, allowed: 1..=8",
        ),
        (
            "max_req",
            "min_requests = 0, max_req",
            "entry 1: min_requests is 0, allowed: 1..=8",
        ),
        (
            "max_req",
            "pitch = 6283, max_req",
            "entry 1: pitch is 6283, allowed: 6284..=2147483647 with 12 heads",
        ),
        (
            "split2-256x8-cluster",
            "mode 3",
            "entry 1: mode is \"mode 3\", allowed: split<1|2|4|8>-<threads>x<8|32>-<block|cluster>[-hints]",
        ),
        (
            "split2-256x8-cluster",
            "split02-256x8-cluster",
            "entry 1: mode is \"split02-256x8-cluster\", allowed: \"split2-256x8-cluster\"",
        ),
        (
            "split2-256x8-cluster",
            "split2-256x8-grid",
            "entry 1: mode is \"split2-256x8-grid\", allowed: block, cluster",
        ),
        (
            "split2-256x8-cluster",
            "split3-256x8-block",
            "entry 1: mode is \"split3-256x8-block\", allowed: value_split 1, 2, 4, 8 (it is 3)",
        ),
        (
            "5.5",
            "0.0",
            "entry 1: microseconds is 0, allowed: above 0, at most 1e9",
        ),
        (
            "5.5",
            "nan",
            "entry 1: microseconds is NaN, allowed: above 0, at most 1e9",
        ),
        (
            "5.5",
            "\"fast\"",
            "entry 1: microseconds is \"fast\", allowed: a number",
        ),
        (
            "microseconds",
            "time",
            "entry 1: \"time\" is unknown, allowed: heads, kind, tokens, early_reads, rollback, \
             min_requests, max_requests, pitch, mode, microseconds",
        ),
        ("]\n", &twice, "line 7, column 1: duplicate key"),
        (
            "\"weights\"",
            "\"weights",
            "line 5, column 98: missing comma between key-value pairs, expected `,`",
        ),
    ];
    let refused = |text: String| text.parse::<PolicyFile>().expect_err("refused").to_string();
    for (from, to, expected) in cases {
        let said = refused(text(from, to));
        assert_eq!(
            said,
            format!("text in memory is no policy file: {expected}"),
            "{to}"
        );
    }
    // Two entries of one step, and of one number of requests.
    let overlap =
        "text in memory is no policy file: entry 2 serves 8 requests, which entry 1 serves too";
    let second = more("").replace("max_requests = 9", "min_requests = 8, max_requests = 9");
    assert_eq!(refused(text(",\n]", &second)), overlap);
    let second = more("").replace("max_requests = 9", "max_requests = 8");
    assert_eq!(refused(text(",\n]", &second)), overlap);
    // In order or not, without a gap.
    let file: PolicyFile = text(",\n]", &more("")).parse().unwrap();
    assert_eq!(file.entries()[1].min_requests, 9);
    let (a, b) = (text("", ""), text("[\n", &format!("[\n{entry},")));
    assert_eq!(b.parse::<PolicyFile>().unwrap(), file);
    assert_eq!(
        a.parse::<PolicyFile>().unwrap().entries(),
        &file.entries()[..1]
    );
    // No reads ahead of a dependency where there is none.
    let early = text("weights", "caches").replace("sm_90a", "sm_80");
    let early = early.replace("split2-256x8-cluster", "split1-256x8-block");
    assert_eq!(
        refused(early),
        "text in memory is no policy file: entry 1: early_reads is \"caches\", allowed: weights on \
         sm_80, which has no dependent launch"
    );
}

#[test]
fn the_file_in_the_documentation_is_one() {
    let page = fs::read_to_string(root().join("docs/embedding.md")).unwrap();
    let (_, rest) = page.split_once("```toml\ndevice").expect("an example");
    let (text, _) = rest.split_once("```").unwrap();
    let file: PolicyFile = format!("device{text}").parse().unwrap();
    let spans = file
        .entries()
        .iter()
        .map(|entry| (entry.min_requests, entry.max_requests));
    assert_eq!(spans.collect::<Vec<_>>(), [(1, 1), (5, 8)]);
    // As the library writes it.
    assert_eq!(file.to_string(), format!("device{text}"));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = scratch();
    let missing = folder.path().join("none.toml");
    let error = PolicyFile::from_path(&missing).expect_err("missing");
    assert!(matches!(error, Error::PolicyFileUnreadable { .. }));
    assert!(
        error.to_string().starts_with(&*missing.to_string_lossy()),
        "{error}"
    );
    assert!(std::error::Error::source(&error).is_some());
    let latin = folder.path().join("latin.toml");
    fs::write(&latin, b"device = \"\xe9\"").unwrap();
    let said = PolicyFile::from_path(&latin)
        .expect_err("no UTF-8")
        .to_string();
    let expected = format!(
        "{} is no policy file: it is no UTF-8 after 10 bytes",
        latin.display()
    );
    assert_eq!(said, expected);
    // As large as allowed, and a byte more, in a file and in memory.
    let whole = text("", "");
    let padded = |bytes: usize| format!("{whole}#{}", " ".repeat(bytes - whole.len() - 1));
    let most = 256 << 10;
    let large = folder.path().join("large.toml");
    fs::write(&large, padded(most)).unwrap();
    assert!(PolicyFile::from_path(&large).is_ok() && padded(most).parse::<PolicyFile>().is_ok());
    fs::write(&large, padded(most + 1)).unwrap();
    assert!(PolicyFile::from_path(&large).is_err());
    let said = padded(most + 1)
        .parse::<PolicyFile>()
        .expect_err("too large")
        .to_string();
    assert!(
        said.ends_with("it has 262145 bytes, at most 262144 allowed"),
        "{said}"
    );
}

#[test]
fn the_fastest_counts_unless_the_rule_is_as_fast() {
    let time = |requests, mode: &str, microseconds| Measurement {
        heads: 12,
        kind: StepKind::Decode,
        early_reads: EarlyReads::Weights,
        rollback: Rollback::Checkpoints,
        requests,
        pitch: None,
        mode: mode.parse().unwrap(),
        microseconds,
    };
    // By the rule: split8 up to 1 request, split4 up to 4, split2 up to 24.
    let (split4, split2) = ("split4-128x8-cluster-hints", "split2-256x8-cluster-hints");
    let file = |times: &[Measurement]| {
        PolicyFile::from_measurements("GPU", Arch::Sm90a, "2026-12-02", times)
    };
    let best = |times: &[Measurement]| {
        let file = file(times).unwrap();
        let entries = file.entries().iter();
        entries
            .map(|e| {
                (
                    e.min_requests,
                    e.max_requests,
                    e.mode.to_string(),
                    e.microseconds,
                )
            })
            .collect::<Vec<_>>()
    };
    let one =
        |entry: (usize, usize, &str, f64)| vec![(entry.0, entry.1, entry.2.to_string(), entry.3)];
    // 2 % ahead is noise, more is not.
    assert_eq!(
        best(&[time(2, split2, 1.0), time(2, split4, 1.02)]),
        one((2, 2, split4, 1.02))
    );
    assert_eq!(
        best(&[time(2, split2, 1.0), time(2, split4, 1.03)]),
        one((2, 2, split2, 1.0))
    );
    assert_eq!(
        best(&[time(2, split4, 1.0), time(2, split2, 1.3)]),
        one((2, 2, split4, 1.0))
    );
    // The later time of a mode counts.
    assert_eq!(
        best(&[
            time(2, split2, 0.5),
            time(2, split4, 1.0),
            time(2, split2, 1.5)
        ]),
        one((2, 2, split4, 1.0))
    );
    // Down to the next smaller batch, or to half.
    let spans: Vec<_> = best(&[64, 1, 2, 4, 7].map(|n| time(n, split2, n as f64)))
        .iter()
        .map(|&(least, most, ..)| (least, most))
        .collect();
    assert_eq!(spans, [(1, 1), (2, 2), (3, 4), (5, 7), (33, 64)]);
    assert!(best(&[]).is_empty());
    // The measurement at fault is named.
    let wrong = [time(1, split2, 1.0), time(2, "split1-256x8-cluster", 1.0)];
    assert_eq!(
        file(&wrong).expect_err("illegal").to_string(),
        "text in memory is no policy file: entry 2: mode is \"split1-256x8-cluster\", allowed: \
         gate_schedule block with value_split 1 (it is cluster)"
    );
}
