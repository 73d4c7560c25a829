//! `mutate`: every barrier, wait, fence and bounds check of the templates is deleted or weakened,
//! one at a time, and the emulated validation must notice. Owns the list of mutations and the scan
//! that keeps it complete; holds no judgement of its own.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use clap::Args;
use kda_codegen::{
    Arch, CompiledKernel, EarlyReads, GateInput, GateSchedule, KernelSpec, Nvrtc, Rollback, Source,
    StateDtype, source,
};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Executor, Faults, Limits, judge};

use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, Kernels, load_nvrtc};
use kda_tests::placed;

use crate::test;

#[derive(Args)]
pub struct Options {
    /// Only check that every text occurs once, and that every barrier, wait, fence and bounds check
    /// is in the list
    #[arg(long)]
    check: bool,
    /// Only the mutations whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Cases after which a mutation has survived; one that is to survive is tried in a quarter
    #[arg(long, default_value_t = test::CASES)]
    cases: u64,
    /// Seed of the cases; `validate` with the same seed runs the same ones
    #[arg(long, default_value_t = test::SEED)]
    seed: u64,
    /// Numbers of tokens to draw from
    #[arg(long, value_delimiter = ',', default_values_t = test::TOKENS)]
    tokens: Vec<usize>,
    /// Different specialisations the cases share; 0: no limit
    #[arg(long, default_value_t = test::SPECIALISATIONS)]
    specialisations: u64,
    /// Mutations run side by side
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

/// The architecture whose kernels have all of it: clusters, dependent launch, early reads.
const ARCH: Arch = Arch::Sm90a;

/// One change of one place.
struct Mutation {
    name: &'static str,
    /// Template file, as the rendered text names it.
    file: &'static str,
    /// Occurs once in the file.
    find: &'static str,
    with: &'static str,
    /// Kernels that may hold the place; others are not tried.
    kernels: fn(&KernelSpec) -> bool,
    /// Why nothing can notice, where nothing can. See `docs/emulator.md`.
    survives: Option<&'static str>,
}

const fn change(
    name: &'static str,
    file: &'static str,
    kernels: fn(&KernelSpec) -> bool,
    find: &'static str,
    with: &'static str,
) -> Mutation {
    Mutation {
        name,
        file,
        find,
        with,
        kernels,
        survives: None,
    }
}

impl Mutation {
    const fn survives(mut self, reason: &'static str) -> Mutation {
        self.survives = Some(reason);
        self
    }
}

const STEP: &str = "kda_step.cu";
const RECORDS: &str = "stages/records.cuh";
const CLUSTER: &str = "primitives/cluster.cuh";
const MEMORY: &str = "primitives/memory.cuh";
const SLOTS: &str = "stages/slots.cuh";
const CONV: &str = "stages/conv.cuh";
const GATE: &str = "stages/gate.cuh";
const DELTA: &str = "stages/delta.cuh";
const NORM: &str = "stages/norm.cuh";

fn all(_: &KernelSpec) -> bool {
    true
}
fn single(spec: &KernelSpec) -> bool {
    spec.mode.value_split == 1
}
fn grouped(spec: &KernelSpec) -> bool {
    single(spec) && spec.heads > 12
}
fn cluster(spec: &KernelSpec) -> bool {
    spec.mode.value_split > 1
}
fn shared_gate(spec: &KernelSpec) -> bool {
    spec.mode.gate_schedule == GateSchedule::Cluster
}
fn shared_decode(spec: &KernelSpec) -> bool {
    shared_gate(spec) && spec.tokens == 1
}
fn shared_verify(spec: &KernelSpec) -> bool {
    shared_gate(spec) && spec.tokens > 1
}
fn pinned_rows(spec: &KernelSpec) -> bool {
    shared_decode(spec) && late(spec) && spec.mode.row_lanes == 32
}
fn projected_gate(spec: &KernelSpec) -> bool {
    spec.gate_input == GateInput::Projected
}
fn hints(spec: &KernelSpec) -> bool {
    spec.mode.slot_hints
}
fn hinted_records(spec: &KernelSpec) -> bool {
    hints(spec) && spec.rollback == Rollback::Records && spec.mode.value_split == 8
}
fn early(spec: &KernelSpec) -> bool {
    spec.early_reads == EarlyReads::Caches
}
fn late(spec: &KernelSpec) -> bool {
    !early(spec)
}
fn decode(spec: &KernelSpec) -> bool {
    !spec.verify
}
fn verify(spec: &KernelSpec) -> bool {
    spec.verify
}
fn ragged(spec: &KernelSpec) -> bool {
    spec.ragged
}
fn ragged_single(spec: &KernelSpec) -> bool {
    ragged(spec) && single(spec)
}
fn ragged_cluster(spec: &KernelSpec) -> bool {
    ragged(spec) && cluster(spec)
}
fn records(spec: &KernelSpec) -> bool {
    spec.rollback == Rollback::Records
}
fn record_cluster(spec: &KernelSpec) -> bool {
    records(spec) && cluster(spec)
}
fn ragged_records(spec: &KernelSpec) -> bool {
    ragged(spec) && records(spec)
}
fn bf16_records(spec: &KernelSpec) -> bool {
    records(spec) && spec.state_dtype == StateDtype::Bf16
}
fn several(spec: &KernelSpec) -> bool {
    spec.tokens > 1
}
fn chunks(spec: &KernelSpec) -> bool {
    spec.tokens > 4
}

/// Text of which every occurrence in a statement of a template must be part of a mutation that
/// removes it. Loop heads, compile-time lines, comments and declarations are no statements.
const GUARDED: &[&str] = &[
    // Barriers, waits and fences.
    "__syncthreads(",
    "__syncwarp(",
    "cluster_arrive(",
    "cluster_wait(",
    "barrier_init_fence(",
    "barrier_expect(",
    "barrier_wait(",
    "wait_copies(",
    "dependency_wait(",
    "griddepcontrol.",
    "barrier.cluster.",
    "fence.",
    "mbarrier.init",
    "mbarrier.arrive",
    "mbarrier.try_wait",
    ".acquire.",
    "bra again",
    // Bounds.
    "min(",
    "is_null(",
    "pool_slots",
    "geometry.columns",
    "count >= 1",
    "counted ?",
    "!counted",
    "outside)",
    "own.live",
    "own.tokens",
    "r.tokens > 0",
    "!fits",
    ">= TOKENS",
    "< TOKENS",
    ">= CHANNELS",
    "% CHANNELS",
    ">= GATE_ROWS",
    "row < 0",
    "row >= ROWS",
    "n >= 1",
    "first == 0",
    "< CHANNELS",
    "window_start < 32",
    "(enabled)",
    // One writer of several threads that could write.
    "threadIdx.x == 0",
    "reports(",
    "head == 0",
    "blockIdx.x == 0",
    "own.fault != FAULT_NONE",
    "% ROW_COPIES == 0",
    "% GATE_COPIES == 0",
    "group_copy()",
];

/// Runs or checks the list.
///
/// # Errors
///
/// A text that does not occur once, a place that no mutation covers, a mutation that survives
/// without a reason or is caught in spite of one.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    check()?;
    if options.check {
        println!("{} mutations, every guarded place covered", MUTATIONS.len());
        return Ok(());
    }
    let nvrtc = load_nvrtc()?;
    let sound = KernelCache::new(nvrtc.clone());
    let wanted = |m: &&Mutation| {
        options
            .only
            .as_ref()
            .is_none_or(|o| m.name.contains(o.as_str()))
    };
    let chosen: Vec<&Mutation> = MUTATIONS.iter().filter(wanted).collect();
    let started = Instant::now();
    let next = Mutex::new(chosen.iter().enumerate());
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let item = next.lock().expect("no worker panics").next();
                    let Some((index, &mutation)) = item else {
                        break;
                    };
                    let outcome = attempt(options, mutation, &nvrtc, &sound);
                    eprintln!(
                        "{}: {}",
                        mutation.name,
                        outcome
                            .as_ref()
                            .map_or_else(ToString::to_string, Outcome::cell)
                    );
                    let outcome = outcome.map_err(|e| e.to_string());
                    outcomes
                        .lock()
                        .expect("no worker panics")
                        .push((index, mutation, outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().expect("no worker panics");
    outcomes.sort_by_key(|&(index, ..)| index);
    report(options, &outcomes, started.elapsed().as_secs_f64())
}

fn report(
    options: &Options,
    outcomes: &[(usize, &Mutation, Result<Outcome, String>)],
    seconds: f64,
) -> Result<(), Box<dyn Error>> {
    let (mut wrong, mut last) = (Vec::new(), 0);
    println!("| File | Mutation | Caught by | Case |\n|---|---|---|---|");
    for (_, mutation, outcome) in outcomes {
        let outcome = outcome
            .as_ref()
            .map_err(|e| format!("{}: {e}", mutation.name))?;
        println!(
            "| {} | {} | {} |",
            mutation.file,
            mutation.name,
            outcome.cell()
        );
        match (outcome, mutation.survives) {
            (Outcome::Caught { case, .. }, None) => last = last.max(case + 1),
            (Outcome::Caught { .. }, Some(reason)) => {
                wrong.push(format!(
                    "{} is caught, but was to survive: {reason}",
                    mutation.name
                ));
            }
            (Outcome::Survived { .. }, None) => wrong.push(format!("{} survives", mutation.name)),
            (Outcome::Survived { .. }, Some(_)) => {}
        }
    }
    let survivors = outcomes
        .iter()
        .filter(|o| matches!(o.2, Ok(Outcome::Survived { .. })))
        .count();
    println!(
        "\n{} mutations, {survivors} survive, all others are caught by the first {last} of {} cases, {seconds:.0} s",
        outcomes.len(),
        options.cases
    );
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(wrong.join("\n").into())
    }
}

/// What became of a mutation.
enum Outcome {
    Caught {
        kind: String,
        detail: String,
        case: u64,
    },
    Survived {
        launches: u64,
    },
}

impl Outcome {
    fn cell(&self) -> String {
        match self {
            Outcome::Caught { kind, detail, case } => format!("{kind}: {detail} | {case}"),
            Outcome::Survived { launches: 0 } => "nothing: no kernel's code changes | ".into(),
            Outcome::Survived { launches } => format!("nothing, in {launches} launches | "),
        }
    }
}

/// Runs the cases of `validate` until one fails; those whose kernel the mutation does not change
/// are left out.
fn attempt(
    options: &Options,
    mutation: &'static Mutation,
    nvrtc: &Nvrtc,
    sound: &KernelCache,
) -> Result<Outcome, Box<dyn Error>> {
    let mut limits = Limits::small();
    limits.tokens = options.tokens.clone();
    limits.specialisations = options.specialisations;
    let mutated = Mutated(Arc::new(Changed {
        nvrtc: nvrtc.clone(),
        mutation,
        compiled: Mutex::default(),
    }));
    let mut launches = 0;
    let cases = if mutation.survives.is_some() {
        options.cases / 4
    } else {
        options.cases
    };
    for i in 0..cases {
        let case = Case::random(Rng::stream(options.seed, i).word(), &limits);
        let modes = placed::mode_texts(ARCH, placed::gate_input(&case));
        let mode = &modes[i as usize % modes.len()];
        let spec = placed::spec(&case, ARCH, mode)?;
        if !(mutation.kernels)(&spec) || mutated.kernel(&spec)?.ptx == sound.kernel(&spec)?.ptx {
            continue;
        }
        launches += 1;
        let mut changed = Recorder {
            inner: EmulatorExecutor::new(ARCH, mutated.clone()),
            error: None,
        };
        let Err(mut mismatch) = judge(&mut changed, &case, mode) else {
            continue;
        };
        judge(&mut EmulatorExecutor::new(ARCH, sound.clone()), &case, mode)
            .map_err(|error| format!("fails without the mutation: {error}"))?;
        mismatch.context.clear();
        let (kind, detail) = match changed.error {
            Some(found) => found,
            None => (
                mismatch.requirement.to_string(),
                mismatch.operand.to_owned(),
            ),
        };
        return Ok(Outcome::Caught {
            kind,
            detail,
            case: i,
        });
    }
    Ok(Outcome::Survived { launches })
}

/// Compiles the changed text of each kernel once.
#[derive(Clone)]
struct Mutated(Arc<Changed>);

struct Changed {
    nvrtc: Nvrtc,
    mutation: &'static Mutation,
    compiled: Mutex<HashMap<KernelSpec, Arc<CompiledKernel>>>,
}

impl Kernels for Mutated {
    fn kernel(&self, spec: &KernelSpec) -> Result<Arc<CompiledKernel>, kda_codegen::Error> {
        let compiled = || self.0.compiled.lock().expect("no holder panics");
        if let Some(kernel) = compiled().get(spec) {
            return Ok(kernel.clone());
        }
        let mut source = source::render(spec)?;
        // `check` found it once, and no file depends on the specialisation.
        let at = locate(&source, self.0.mutation).expect("the text occurs");
        source.text.replace_range(at, self.0.mutation.with);
        let kernel = Arc::new(self.0.nvrtc.compile_source(spec, source)?);
        compiled().insert(*spec, kernel.clone());
        Ok(kernel)
    }
}

/// Keeps the kind and the place of the emulator's error.
struct Recorder<E> {
    inner: E,
    error: Option<(String, String)>,
}

impl<E: Executor> Executor for Recorder<E> {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn modes(&self, case: &Case) -> Vec<String> {
        self.inner.modes(case)
    }

    fn run(
        &mut self,
        case: &Case,
        mode: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        let result = self.inner.run(case, mode, buffers);
        if let Err(error) = &result {
            let debug = match error.downcast_ref::<kda_emulator::Error>() {
                Some(error) => format!("{error:?}"),
                None => "Other".into(),
            };
            let kind = debug
                .split(|c: char| !c.is_alphanumeric())
                .next()
                .unwrap_or_default();
            // The instruction, where the message has one.
            let text = error.to_string();
            let detail = match text.split('`').nth(1) {
                Some(instruction) => format!("`{instruction}`"),
                None => text.split(" block ").next().unwrap_or_default().to_owned(),
            };
            self.error = Some((kind.to_owned(), detail));
        }
        result
    }
}

/// The part of a rendered text that is `file`.
fn section(text: &str, file: &str) -> Option<std::ops::Range<usize>> {
    let head = format!("\n// ---- {file}\n");
    let start = text.find(&head)? + head.len();
    let end = text[start..]
        .find("\n// ---- ")
        .map_or(text.len(), |length| start + length);
    Some(start..end)
}

/// Where the mutation's text lies.
fn locate(source: &Source, mutation: &Mutation) -> Result<std::ops::Range<usize>, String> {
    let Mutation {
        name, file, find, ..
    } = mutation;
    let section = section(&source.text, file).ok_or(format!("{name}: no file {file}"))?;
    let start = section.start;
    let found: Vec<usize> = source.text[section]
        .match_indices(find)
        .map(|(at, _)| at)
        .collect();
    match found[..] {
        [at] => Ok(start + at..start + at + find.len()),
        _ => Err(format!(
            "{name}: its text occurs {} times in {file}, not once",
            found.len()
        )),
    }
}

/// Positions in `text` where `token` is part of a statement.
fn statements(text: &str, token: &str) -> Vec<usize> {
    const NONE: [&str; 8] = [
        "for (",
        "static_assert",
        "constexpr",
        "//",
        "__device__",
        "#",
        "struct",
        "template",
    ];
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        if !NONE.iter().any(|none| line.trim_start().starts_with(none)) {
            for (at, _) in code.match_indices(token) {
                let before = code[..at].chars().next_back();
                if !(token.starts_with(word) && before.is_some_and(word)) {
                    found.push(start + at);
                }
            }
        }
        start += line.len();
    }
    found
}

/// Checks that every text occurs once and that every guarded place is in a mutation.
pub fn check() -> Result<(), Box<dyn Error>> {
    let source = source::render(&KernelSpec::new(ARCH, 1))?;
    let mut problems = Vec::new();
    let mut places = Vec::new();
    for mutation in MUTATIONS {
        match locate(&source, mutation) {
            Ok(at) => places.push((at, mutation)),
            Err(problem) => problems.push(problem),
        }
    }
    let body = source.text.find("\n// ---- ").unwrap_or_default();
    for token in GUARDED {
        for at in statements(&source.text[body..], token) {
            let at = body + at;
            let removes =
                |m: &Mutation| m.with.matches(token).count() < m.find.matches(token).count();
            if !places
                .iter()
                .any(|(range, m)| range.contains(&at) && removes(m))
            {
                let line = source.text[..at].rfind('\n').map_or(0, |n| n + 1);
                let line = source.text[line..]
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .trim();
                problems.push(format!("no mutation removes `{token}` from: {line}"));
            }
        }
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems.join("\n").into())
    }
}

const REDUNDANT: &str = "redundant";
const ALIGNED: &str = "reconvergence for an aligned instruction is not modelled";

/// Every mutation, in the order of the kernel's text.
static MUTATIONS: &[Mutation] = &[
    // Start of the cluster.
    change(
        "every thread initialises the mbarriers",
        STEP,
        cluster,
        "if (threadIdx.x == 0) {\n            if constexpr (SHARED_GATE) barrier_expect",
        "{\n            if constexpr (SHARED_GATE) barrier_expect",
    ),
    change(
        "no gate mbarrier",
        STEP,
        shared_gate,
        "if constexpr (SHARED_GATE) barrier_expect(shared_address(&shared.gate_barrier), TOKENS * HEAD_DIM * 4);",
        "",
    ),
    change(
        "gate mbarrier expects 4 bytes more",
        STEP,
        shared_gate,
        "TOKENS * HEAD_DIM * 4);",
        "TOKENS * HEAD_DIM * 4 + 4);",
    ),
    change(
        "gate mbarrier expects 4 bytes less",
        STEP,
        shared_gate,
        "TOKENS * HEAD_DIM * 4);",
        "TOKENS * HEAD_DIM * 4 - 4);",
    ),
    change(
        "no norm mbarrier",
        STEP,
        cluster,
        "barrier_expect(shared_address(&shared.norm_barrier), TOKENS * NORM_PARTIALS * 4);",
        "",
    ),
    change(
        "norm mbarrier expects 4 bytes more",
        STEP,
        cluster,
        "TOKENS * NORM_PARTIALS * 4);",
        "TOKENS * NORM_PARTIALS * 4 + 4);",
    ),
    change(
        "norm mbarrier expects 4 bytes less",
        STEP,
        cluster,
        "TOKENS * NORM_PARTIALS * 4);",
        "TOKENS * NORM_PARTIALS * 4 - 4);",
    ),
    change(
        "no mbarrier init fence",
        STEP,
        cluster,
        "barrier_init_fence();",
        "",
    ),
    change(
        "no __syncwarp before the cluster arrival",
        STEP,
        cluster,
        "__syncwarp();\n        cluster_arrive();",
        "cluster_arrive();",
    )
    .survives(ALIGNED),
    change(
        "no cluster arrival",
        STEP,
        cluster,
        "        cluster_arrive();\n",
        "",
    ),
    // Hints.
    change(
        "hint through a null slot",
        SLOTS,
        hints,
        "return !is_null(slot) && slot < geometry.pool_slots;",
        "return slot < geometry.pool_slots;",
    ),
    change(
        "hint through a slot beyond the pool",
        SLOTS,
        hints,
        "return !is_null(slot) && slot < geometry.pool_slots;",
        "return !is_null(slot);",
    ),
    change(
        "hint through any checkpoint",
        STEP,
        hints,
        "if (!VERIFY || RECORDS || in_pool(hinted.source, geometry)) ",
        "",
    ),
    change(
        "hinted column not clamped",
        SLOTS,
        hints,
        "(RECORDS ? 0 : min(lane, geometry.columns - 1))",
        "(RECORDS ? 0 : lane)",
    ),
    change(
        "hint of a channel past the last",
        CONV,
        hints,
        "i < CHANNELS && first_of_line",
        "first_of_line",
    )
    .survives(REDUNDANT),
    change(
        "hint past the last record",
        SLOTS,
        hinted_records,
        "min(max(load_int(accepted), 1), min(geometry.columns, 32)) - 1",
        "max(load_int(accepted), 1) - 1",
    ),
    // Pinned addresses.
    change(
        "pinned rows of a group apart",
        DELTA,
        pinned_rows,
        "(ROW_LANES == 8 ? ROW_GROUPS : 1)",
        "ROW_GROUPS",
    ),
    // Dependency.
    change(
        "no dependency wait",
        STEP,
        late,
        "if constexpr (!EARLY_CACHES) dependency_wait();",
        "",
    ),
    change(
        "no dependency wait of a dead request, early caches",
        STEP,
        early,
        "if constexpr (EARLY_CACHES) dependency_wait();",
        "",
    ),
    change(
        "no dependency wait of a live request, early caches",
        STEP,
        early,
        "    dependency_wait();\n        load_projected();",
        "    load_projected();",
    ),
    // Inputs.
    change(
        "beta row not clamped",
        STEP,
        all,
        "min(lane, TOKENS - 1)",
        "lane",
    ),
    change(
        "output gate row not clamped",
        STEP,
        all,
        "int t = min(n * ROW_COPIES + lane % ROW_COPIES, TOKENS - 1);",
        "int t = n * ROW_COPIES + lane % ROW_COPIES;",
    ),
    // Requests that are not live.
    change(
        "dead requests run",
        STEP,
        all,
        "if (!own.live) {",
        "if (false) {",
    ),
    change(
        "null rows past the tokens",
        STEP,
        all,
        "if (t < own.tokens) store_bits(out_row + (first_row + t) * geometry.out_stride, 0);",
        "store_bits(out_row + (first_row + t) * geometry.out_stride, 0);",
    ),
    change(
        "null requests report",
        STEP,
        all,
        "if (own.fault != FAULT_NONE && reports",
        "if (reports",
    ),
    change(
        "every block reports",
        STEP,
        all,
        "FAULT_NONE && reports(head) && threadIdx.x == 0",
        "FAULT_NONE && threadIdx.x == 0",
    ),
    change(
        "every thread reports",
        STEP,
        all,
        "reports(head) && threadIdx.x == 0",
        "reports(head)",
    ),
    // Live requests.
    change(
        "no cluster wait",
        STEP,
        cluster,
        "    if constexpr (VALUE_SPLIT > 1) cluster_wait();\n",
        "",
    ),
    change(
        "no barrier between F_A and the gates",
        STEP,
        shared_gate,
        "            // F_A of the chunk is in shared memory.\n            __syncthreads();\n",
        "",
    ),
    change(
        "no barrier behind the convolution",
        STEP,
        all,
        "    __syncthreads();\n    if constexpr (TOKENS > 1) {",
        "    if constexpr (TOKENS > 1) {",
    ),
    change(
        "no barrier behind the norms of q and k",
        STEP,
        several,
        "normalise_tokens(shared, own.tokens, scale);\n        __syncthreads();",
        "normalise_tokens(shared, own.tokens, scale);",
    ),
    change(
        "norms of tokens that a request does not bring",
        STEP,
        ragged_single,
        "normalise_tokens(shared, own.tokens, scale)",
        "normalise_tokens(shared, TOKENS, scale)",
    ),
    change(
        "no wait for the gates of a decode step",
        DELTA,
        shared_decode,
        "        barrier_wait(shared_address(&shared.gate_barrier), 0);\n",
        "",
    ),
    change(
        "no wait for the gates of a verify step",
        STEP,
        shared_verify,
        "if constexpr (SHARED_GATE && TOKENS > 1) barrier_wait(shared_address(&shared.gate_barrier), 0);",
        "",
    ),
    change(
        "gate wait of a decode step on the phase before",
        DELTA,
        shared_decode,
        "barrier_wait(shared_address(&shared.gate_barrier), 0)",
        "barrier_wait(shared_address(&shared.gate_barrier), 1)",
    ),
    change(
        "gate wait of a verify step on the phase before",
        STEP,
        shared_verify,
        "barrier_wait(shared_address(&shared.gate_barrier), 0)",
        "barrier_wait(shared_address(&shared.gate_barrier), 1)",
    ),
    change(
        "null checkpoints are stored",
        STEP,
        several,
        "RECORDS ? t == 0 : !is_null(checkpoint);",
        "RECORDS ? t == 0 : true;",
    ),
    change(
        "a state after every token beside the records",
        STEP,
        records,
        "RECORDS ? t == 0 :",
        "RECORDS ? true :",
    ),
    change(
        "u of the first token recorded",
        STEP,
        records,
        "if (RECORDS && t > 0) store",
        "if (RECORDS) store",
    ),
    change(
        "tokens that a request does not bring are computed",
        STEP,
        ragged,
        "if (RAGGED && t >= own.tokens) {",
        "if (false) {",
    ),
    change(
        "no partial sum of a token that a request does not bring",
        STEP,
        ragged_cluster,
        "send_partial(shared, t, 0.0f, rank);",
        "",
    ),
    change(
        "no __syncwarp between v and the outputs",
        STEP,
        several,
        "            __syncwarp();\n            if (lane",
        "            if (lane",
    ),
    change(
        "every copy keeps the output",
        STEP,
        several,
        "if (lane % ROW_COPIES == 0) shared.v",
        "shared.v",
    ),
    change(
        "no wait for the partial sums",
        STEP,
        cluster,
        "if constexpr (VALUE_SPLIT > 1) barrier_wait(shared_address(&shared.norm_barrier), 0);",
        "",
    ),
    change(
        "norm wait on the phase before",
        STEP,
        cluster,
        "barrier_wait(shared_address(&shared.norm_barrier), 0)",
        "barrier_wait(shared_address(&shared.norm_barrier), 1)",
    ),
    change(
        "no barrier after the partial sums",
        STEP,
        single,
        "    if constexpr (VALUE_SPLIT == 1) __syncthreads();\n",
        "",
    ),
    change(
        "no __syncwarp before the outputs",
        STEP,
        all,
        "    __syncwarp();\n    const float single_factor",
        "    const float single_factor",
    ),
    change(
        "outputs past the tokens",
        STEP,
        all,
        "        if (t < own.tokens) {\n",
        "        {\n",
    ),
    change(
        "line stored before the norm exchange",
        STEP,
        cluster,
        "    if constexpr (VALUE_SPLIT > 1) barrier_wait(shared_address(&shared.norm_barrier), 0);",
        "    store_line(conv_inputs, qkv + first_row * geometry.qkv_pitch, geometry.qkv_pitch, line, own.window_start, own.tokens, head, rank, geometry);\n    if constexpr (VALUE_SPLIT > 1) barrier_wait(shared_address(&shared.norm_barrier), 0);",
    ),
    // Cluster primitives.
    change(
        "no griddepcontrol.wait",
        CLUSTER,
        all,
        "asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");",
        "",
    ),
    change(
        "no griddepcontrol.launch_dependents",
        CLUSTER,
        all,
        "asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");",
        "",
    )
    .survives("orders nothing: without it the next kernel starts later"),
    change(
        "no barrier.cluster.arrive",
        CLUSTER,
        cluster,
        "asm volatile(\"barrier.cluster.arrive.relaxed.aligned;\" ::: \"memory\");",
        "",
    ),
    change(
        "no barrier.cluster.wait",
        CLUSTER,
        cluster,
        "asm volatile(\"barrier.cluster.wait.acquire.aligned;\" ::: \"memory\");",
        "",
    ),
    change(
        "no mbarrier.init",
        CLUSTER,
        cluster,
        "asm volatile(\"mbarrier.init.shared::cta.b64 [%0], 1;\" ::\"r\"(barrier) : \"memory\");",
        "",
    ),
    change(
        "no mbarrier.arrive.expect_tx",
        CLUSTER,
        cluster,
        "asm volatile(\"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\" ::\"r\"(barrier), \"r\"(bytes)\n                 : \"memory\");",
        "",
    ),
    change(
        "no fence.mbarrier_init",
        CLUSTER,
        cluster,
        "asm volatile(\"fence.mbarrier_init.release.cluster;\" ::: \"memory\");",
        "",
    ),
    change(
        "mbarrier wait acquires over the block only",
        CLUSTER,
        cluster,
        "parity.acquire.cluster.",
        "parity.acquire.cta.",
    ),
    change(
        "mbarrier wait is relaxed",
        CLUSTER,
        cluster,
        "parity.acquire.cluster.",
        "parity.relaxed.cluster.",
    ),
    change(
        "no mbarrier wait",
        CLUSTER,
        cluster,
        "        \"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\\n\"\n        \"@!done bra again;\\n\"\n",
        "",
    ),
    change(
        "mbarrier wait does not retry",
        CLUSTER,
        cluster,
        "        \"@!done bra again;\\n\"\n",
        "",
    ),
    // Predicated stores.
    change(
        "f32 state stored in spite of its predicate",
        MEMORY,
        several,
        "if (enabled) {\n        asm volatile(\"st.global.v4.f32",
        "{\n        asm volatile(\"st.global.v4.f32",
    ),
    change(
        "bf16 state stored in spite of its predicate",
        MEMORY,
        several,
        "if (enabled) {\n        asm volatile(\"st.global.v2.b32",
        "{\n        asm volatile(\"st.global.v2.b32",
    ),
    // Slots.
    change(
        "slot column not clamped",
        SLOTS,
        verify,
        "(VERIFY && !RECORDS ? min(lane, geometry.columns - 1) : 0)",
        "(VERIFY && !RECORDS ? lane : 0)",
    ),
    change(
        "slot of a decode step beyond the pool",
        SLOTS,
        decode,
        "r.fault = !is_null(r.window) && r.window >= geometry.pool_slots ? FAULT_SLOT : FAULT_NONE;",
        "r.fault = FAULT_NONE;",
    ),
    change(
        "null slot of a decode step at fault",
        SLOTS,
        decode,
        "r.fault = !is_null(r.window) && r.window >=",
        "r.fault = r.window >=",
    ),
    change(
        "accepted below 1",
        SLOTS,
        verify,
        "count >= 1 && count <=",
        "count <=",
    ),
    change(
        "accepted above the columns",
        SLOTS,
        verify,
        "count >= 1 && count <= geometry.columns",
        "count >= 1",
    ),
    change(
        "window start of an accepted count out of range",
        SLOTS,
        verify,
        "r.window_start = counted ? count - 1 : 0;",
        "r.window_start = count - 1;",
    ),
    change(
        "source column of a full warp only",
        SLOTS,
        verify,
        "r.window_start < 32 ? __shfl_sync(FULL_WARP, values.own, r.window_start)",
        "true ? __shfl_sync(FULL_WARP, values.own, r.window_start)",
    ),
    change(
        "slots past the tokens at fault",
        SLOTS,
        verify,
        "lane < r.tokens && r.own >= geometry.pool_slots",
        "r.own >= geometry.pool_slots",
    ),
    change(
        "slot of a verify step beyond the pool",
        SLOTS,
        verify,
        "lane < r.tokens && r.own >= geometry.pool_slots",
        "lane < r.tokens && false",
    ),
    change(
        "null requests at fault",
        SLOTS,
        verify,
        "!is_null(r.window) && r.tokens > 0) {",
        "r.tokens > 0) {",
    ),
    change(
        "requests without tokens at fault",
        SLOTS,
        ragged,
        "!is_null(r.window) && r.tokens > 0) {",
        "!is_null(r.window)) {",
    ),
    change(
        "token count below 0",
        SLOTS,
        ragged,
        "tokens >= 0 && tokens <= TOKENS",
        "tokens <= TOKENS",
    ),
    change(
        "token count above the tokens",
        SLOTS,
        ragged,
        "tokens >= 0 && tokens <= TOKENS",
        "tokens >= 0",
    ),
    change(
        "rows of a token count out of range",
        SLOTS,
        ragged,
        "if (fits) r.tokens = tokens;",
        "r.tokens = tokens;",
    ),
    change(
        "no fault of a token count",
        SLOTS,
        ragged,
        "if (!fits) r.fault = FAULT_TOKENS;\n            else if (outside)",
        "if (outside)",
    ),
    change(
        "requests without tokens live",
        SLOTS,
        ragged,
        "r.fault == FAULT_NONE && r.tokens > 0;",
        "r.fault == FAULT_NONE;",
    ),
    change(
        "accepted records' state in another column",
        SLOTS,
        records,
        "if constexpr (RECORDS) r.source = r.window;\n        else r.source",
        "r.source",
    ),
    change(
        "no fault of a slot beyond the pool",
        SLOTS,
        verify,
        "else if (outside) r.fault = FAULT_SLOT;\n",
        "",
    ),
    change(
        "no fault of an accepted count",
        SLOTS,
        verify,
        "else if (!counted) r.fault = FAULT_ACCEPTED;\n",
        "",
    ),
    change(
        "no fault of a null source",
        SLOTS,
        verify,
        "else if (is_null(r.source)) r.fault = FAULT_NULL_SOURCE;\n",
        "",
    ),
    change(
        "source beyond the pool",
        SLOTS,
        verify,
        "else if (r.source >= geometry.pool_slots) r.fault = FAULT_SLOT;\n",
        "",
    ),
    change(
        "null requests live",
        SLOTS,
        all,
        "r.live = !is_null(r.window) && r.fault",
        "r.live = r.fault",
    ),
    change(
        "requests at fault live",
        SLOTS,
        all,
        "r.live = !is_null(r.window) && r.fault == FAULT_NONE",
        "r.live = !is_null(r.window)",
    ),
    change(
        "heads of the first group for every block",
        SLOTS,
        grouped,
        "head = row / gridDim.y * GROUP + number % GROUP;",
        "head = number % GROUP;",
    ),
    change(
        "request of a block as if its heads were not in groups",
        SLOTS,
        grouped,
        "request = row % gridDim.y;",
        "",
    ),
    change(
        "every head reports",
        SLOTS,
        single,
        "blockIdx.x == 0 : head == 0;",
        "blockIdx.x == 0 : true;",
    ),
    change(
        "every block of a cluster reports",
        SLOTS,
        cluster,
        "? blockIdx.x == 0 :",
        "? blockIdx.x < VALUE_SPLIT :",
    ),
    change(
        "chunks that a request does not bring",
        STEP,
        ragged,
        "if (RAGGED && !SHARED_GATE && first >= own.tokens) break;",
        "",
    )
    .survives(REDUNDANT),
    change(
        "early line of tokens that a request does not bring",
        STEP,
        ragged_single,
        "conv_weights, first, own.tokens, line",
        "conv_weights, first, TOKENS, line",
    ),
    change(
        "late line of tokens that a request does not bring",
        STEP,
        ragged_cluster,
        "own.window_start, own.tokens, head",
        "own.window_start, TOKENS, head",
    ),
    change(
        "records of tokens that a request does not bring",
        STEP,
        ragged_records,
        "own_records, own.tokens, head, rank);",
        "own_records, TOKENS, head, rank);",
    ),
    // Records.
    change(
        "no wait for the copies of records",
        STEP,
        records,
        "if constexpr (RECORDS) wait_copies();\n",
        "",
    ),
    change(
        "records not repeated",
        STEP,
        records,
        "repeat_records(state, shared, 0, own.window_start);",
        "",
    ),
    change(
        "next records copied over those in use",
        STEP,
        records,
        "            __syncthreads();\n            stage_records",
        "            stage_records",
    ),
    change(
        "no wait for the copies of the next records",
        STEP,
        records,
        "            wait_copies();\n            __syncthreads();\n",
        "            __syncthreads();\n",
    ),
    change(
        "no barrier between the next records and their use",
        STEP,
        records,
        "            wait_copies();\n            __syncthreads();\n",
        "            wait_copies();\n",
    ),
    change(
        "lanes past the last token normalise what is behind it",
        DELTA,
        several,
        "load_vectors<false>(shared, min(token, tokens - 1))",
        "load_vectors<false>(shared, token)",
    ),
    change(
        "no __syncwarp before normalised q and k are written",
        DELTA,
        several,
        "        // Lanes past the last token have read it before its own lanes write.\n        __syncwarp();\n",
        "",
    ),
    change(
        "lanes past the last token write",
        DELTA,
        several,
        "        if (token >= tokens) continue;\n",
        "",
    ),
    change(
        "u of another block's rows",
        RECORDS,
        record_cluster,
        "record + column + (column < 2 * HEAD_DIM ? 0 : rank * ROWS)",
        "record + column",
    ),
    change(
        "repeated without decay",
        RECORDS,
        records,
        "multiply4(state.s[i][j], decay[j])",
        "state.s[i][j]",
    ),
    change(
        "repeated state not rounded",
        MEMORY,
        bf16_records,
        "return make_float4(widen_low(low), widen_high(low), widen_low(high), widen_high(high));\n}\n\n// Stores",
        "return value;\n}\n\n// Stores",
    ),
    change(
        "u of the record before",
        RECORDS,
        records,
        "record_offset(token - 1, head) + 2 * HEAD_DIM",
        "record_offset(token, head) + 2 * HEAD_DIM",
    ),
    change(
        "u recorded by every lane of a row",
        RECORDS,
        records,
        "    if (threadIdx.x % ROW_COPIES == 0)\n",
        "",
    ),
    change(
        "keys recorded past the tokens",
        RECORDS,
        ragged_records,
        "(tokens - 1) * ROWS",
        "(TOKENS - 1) * ROWS",
    ),
    // Convolution.
    change(
        "channel index not clamped",
        CONV,
        all,
        "    i = min(i, CHANNELS - 1);\n",
        "",
    ),
    change(
        "part of a channel not clamped",
        CONV,
        all,
        "min(i / HEAD_DIM, 2)",
        "i / HEAD_DIM",
    )
    .survives(REDUNDANT),
    change(
        "raw row not clamped",
        CONV,
        several,
        "min(first + t, TOKENS - 1) * pitch",
        "(first + t) * pitch",
    ),
    change(
        "window opening before the first",
        CONV,
        shared_gate,
        "if (LATE_LINE && KEEP_LINE && n >= 1) in.opening[pass][n - 1]",
        "if (LATE_LINE && KEEP_LINE) in.opening[pass][n - 1]",
    ),
    change(
        "early line opened by every chunk",
        CONV,
        chunks,
        "if (i < CHANNELS && first == 0) store_bits",
        "if (i < CHANNELS) store_bits",
    ),
    change(
        "early line opened past the channels",
        CONV,
        several,
        "if (i < CHANNELS && first == 0) store_bits",
        "if (first == 0) store_bits",
    ),
    change(
        "early line of channels past the end",
        CONV,
        several,
        "if (i < CHANNELS && first + t < tokens)\n                    store_bits",
        "if (first + t < tokens)\n                    store_bits",
    ),
    change(
        "early line past the tokens",
        CONV,
        several,
        "if (i < CHANNELS && first + t < tokens)\n                    store_bits",
        "if (i < CHANNELS)\n                    store_bits",
    ),
    change(
        "early line read by a second thread",
        CONV,
        several,
        "LATE_LINE || pass * THREADS + threadIdx.x < CHANNELS;",
        "true;",
    ),
    change(
        "channels past the end",
        CONV,
        all,
        "if (i < CHANNELS && first + t < TOKENS) shared",
        "if (first + t < TOKENS) shared",
    ),
    change(
        "q, k, v past the tokens",
        CONV,
        several,
        "if (i < CHANNELS && first + t < TOKENS) shared",
        "if (i < CHANNELS) shared",
    ),
    change(
        "line of channels past the end",
        CONV,
        all,
        "if (i >= CHANNELS || row < 0 ||",
        "if (row < 0 ||",
    ),
    change(
        "line of channels before the block's",
        CONV,
        cluster,
        "|| row < 0 || row >= ROWS) continue;",
        "|| row >= ROWS) continue;",
    ),
    change(
        "line of channels after the block's",
        CONV,
        cluster,
        "|| row < 0 || row >= ROWS) continue;",
        "|| row < 0) continue;",
    ),
    // Gates.
    change(
        "row of a run not clamped",
        GATE,
        several,
        "rows + min(first + t, TOKENS - 1) * pitch;",
        "rows + (first + t) * pitch;",
    ),
    change(
        "own gate not clamped",
        GATE,
        all,
        "return base + min(pass * GATE_GROUPS + group, GATE_ROWS - 1);",
        "return base + pass * GATE_GROUPS + group;",
    )
    .survives(REDUNDANT),
    change(
        "row of F_B not clamped",
        GATE,
        all,
        "int gate = base + min(pass * GATE_GROUPS + group, GATE_ROWS - 1);",
        "int gate = base + pass * GATE_GROUPS + group;",
    )
    .survives(REDUNDANT),
    change(
        "row of F_A not clamped",
        GATE,
        shared_gate,
        "min(first + i / GATE_RANK, TOKENS - 1)",
        "first + i / GATE_RANK",
    ),
    change(
        "row of a projected gate not clamped",
        GATE,
        projected_gate,
        "min(first + i / GATE_RANK, TOKENS - 1)",
        "first + i / GATE_RANK",
    ),
    change(
        "projected gates past the tokens",
        GATE,
        projected_gate,
        "if (token >= TOKENS) continue;",
        "",
    ),
    change(
        "F_A past the tokens",
        GATE,
        all,
        "if (first + i / GATE_RANK < TOKENS) shared",
        "shared",
    ),
    change(
        "token of a gate not clamped",
        GATE,
        several,
        "shared.f_a[min(first + t, TOKENS - 1)]",
        "shared.f_a[first + t]",
    ),
    change(
        "gates of tokens past the last",
        GATE,
        chunks,
        "if (first + t >= TOKENS || (GATE_ROWS",
        "if ((GATE_ROWS",
    ),
    change(
        "gates past the block's",
        GATE,
        shared_gate,
        " || (GATE_ROWS < GATE_GROUPS && group >= GATE_ROWS)",
        "",
    )
    .survives(REDUNDANT),
    change(
        "every copy keeps the gate",
        GATE,
        all,
        "} else if (lane % GATE_COPIES == 0) {",
        "} else {",
    ),
    change(
        "every copy sends the gate to every block",
        GATE,
        shared_gate,
        "for (int block = lane % GATE_COPIES; block < VALUE_SPLIT; block += GATE_COPIES)",
        "for (int block = 0; block < VALUE_SPLIT; ++block)",
    ),
    // Norm.
    change(
        "every copy sends the partial sum to every block",
        NORM,
        cluster,
        "for (int block = group_copy(); block < VALUE_SPLIT; block += GROUP_COPIES)",
        "for (int block = 0; block < VALUE_SPLIT; ++block)",
    ),
    change(
        "every copy keeps the partial sum",
        NORM,
        single,
        "} else if (group_copy() == 0) {",
        "} else {",
    ),
];
