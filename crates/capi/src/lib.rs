//! C interface of [`kda_runtime`]: opaque handles, plain structs, status codes.
//!
//! Every function returns a [`KdaStatus`]; [`kda_last_error`] has the text of the calling thread's
//! last failure. No panic crosses the boundary, null pointers are refused, and a handle that is
//! NULL may be destroyed. Lengths and strides are in elements, device addresses are integers, and
//! an enumeration is passed as `uint32_t`, since C would let any value through. The header,
//! `include/prepared_kda.h`, is generated.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use kda_codegen::{Arch, ConvLayout, EarlyReads, GateInput, Mode, NullRule, Rollback, StateDtype};
use kda_runtime::{
    Buffer, Config, ConvCache, Device, DiskCache, Error, FaultKind, Gate, Kernel, KernelBundle,
    KernelSources, Kernels, Origin, Plan, Policies, Policy, PolicyFile, PreparedKda, PreparedReset,
    Projected, RecordPool, Reset, Rows, Slots, StatePool, Step, StepKind, Target, Weights,
};

/// Result of a call.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KdaStatus {
    /// Done.
    Ok = 0,
    /// A required pointer is NULL.
    NullPointer = 1,
    /// A setting, a mode or an enumeration has no legal value.
    IllegalSetting = 2,
    /// An operand is missing, too short, too narrow, misaligned, too large or overlaps another.
    BadOperand = 3,
    /// No kernel was prepared for the step.
    NotPrepared = 4,
    /// A bundle is damaged, unreadable or does not match.
    BadBundle = 5,
    /// No source has a kernel, NVRTC is missing or unusable, or a kernel does not compile.
    NoKernel = 6,
    /// The CUDA driver is missing.
    NoDriver = 7,
    /// No kernel exists for the device.
    DeviceUnsupported = 8,
    /// A CUDA call failed.
    Cuda = 9,
    /// The stream is being captured.
    Capturing = 10,
    /// An index is past the end.
    OutOfRange = 11,
    /// A text is no UTF-8.
    BadText = 12,
    /// A bug in this library; the process may go on.
    Panic = 13,
}

/// Order inside a conv cache slot.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaConvLayout {
    /// `[3 dim, length]`.
    DimFirst = 0,
    /// `[length, 3 dim]`.
    TokenFirst = 1,
}

/// Decay formula.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaGate {
    /// exp(bound * sigmoid(exp(A_log) * (g + dt_bias))).
    LowerBound = 0,
    /// exp(-exp(A_log) * softplus(g + dt_bias)).
    Softplus = 1,
}

/// What the gate's input comes from.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaGateInput {
    /// F_B * F_A, computed by the launch in float.
    LowRank = 0,
    /// An operand: the caller's own F_B * F_A, rounded to bf16.
    Projected = 1,
}

/// Null slot values.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaNullRule {
    /// 0 and below.
    NonPositive = 0,
    /// Below 0.
    Negative = 1,
}

/// Element type of the state pool.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaStateDtype {
    /// float.
    F32 = 0,
    /// bfloat16.
    Bf16 = 1,
}

/// What a verify step keeps, for every number of its tokens that may be accepted.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaRollback {
    /// A state after every token, each in a slot of its own.
    Checkpoints = 0,
    /// The state after the first token, and a record of each later one.
    Records = 1,
}

/// What may be read before the kernel ahead in the stream has finished.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaEarlyReads {
    /// Weights only.
    Weights = 0,
    /// Also conv cache, state, records, slots, accepted and token counts, which the kernel ahead must
    /// not write.
    Caches = 1,
}

/// Where a kernel came from.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaOrigin {
    /// The bundle.
    Bundle = 0,
    /// The disk cache.
    Cache = 1,
    /// NVRTC.
    Compiled = 2,
}

/// Why a request was refused.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum KdaFaultKind {
    /// None was.
    None = 0,
    /// A slot is not below the pools' slot count.
    SlotOutOfRange = 1,
    /// An accepted count is outside 1..=columns, or outside 1..=records + 1.
    AcceptedOutOfRange = 2,
    /// The source slot of a live request is null.
    NullSource = 3,
    /// A token count is outside 0..=tokens.
    TokensOutOfRange = 4,
}

/// A model's KDA layers on one device. Every field matters; `kda_config_kimi_k3` fills all.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaConfig {
    /// Heads on this device, 1..=128.
    pub heads: usize,
    /// Whether the convolution has a bias: 0 or 1.
    pub conv_bias: u32,
    /// A KdaConvLayout.
    pub conv_layout: u32,
    /// A KdaGate.
    pub gate: u32,
    /// Lower bound of the log decay, below 0; unread with the softplus gate.
    pub lower_bound: f32,
    /// A KdaGateInput.
    pub gate_input: u32,
    /// A KdaNullRule.
    pub null_rule: u32,
    /// A KdaStateDtype.
    pub state_dtype: u32,
    /// A KdaRollback.
    pub rollback: u32,
    /// Whether verify steps take a number of tokens for each request: 0 or 1.
    pub ragged: u32,
    /// A KdaEarlyReads.
    pub early_reads: u32,
    /// Factor of the normalised query.
    pub scale: f32,
    /// Added to the mean square of the output norm.
    pub eps: f32,
}

/// One rule: steps of this kind with up to `max_requests` requests run in `mode`. Of several that cover a
/// step the one with the fewest requests serves it; their order does not matter.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KdaPolicy {
    /// Tokens a request brings: 0 is a decode step, 1..=16 a verify step of so many.
    pub verify_tokens: usize,
    /// Largest number of requests, from 1.
    pub max_requests: usize,
    /// A schedule, for example `split8-128x8-cluster`; NULL: the measured choice, of the policy file
    /// in KdaSources or for the device, with `max_requests` unread.
    pub mode: *const c_char,
}

/// Where kernels come from, in this order, and measured modes. All zeros: the user's disk cache, then
/// NVRTC; the modes measured on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KdaSources {
    /// A bundle's file, or NULL.
    pub bundle_path: *const c_char,
    /// A bundle in memory, or NULL; copied.
    pub bundle_data: *const c_void,
    /// Its length in bytes.
    pub bundle_bytes: usize,
    /// The disk cache's folder; NULL: the user's; `off`: none.
    pub cache_folder: *const c_char,
    /// A folder to look for libnvrtc in first, or NULL.
    pub nvrtc_folder: *const c_char,
    /// 1: nothing is compiled.
    pub no_nvrtc: u32,
    /// A policy file of the device's architecture, or NULL: its modes serve the policies that name
    /// none. A reset reads neither this nor the text.
    pub policy_path: *const c_char,
    /// The text of a policy file in place of its path, or NULL.
    pub policy_text: *const c_char,
}

/// Device memory: an address and the elements from there on that belong to the operand.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaBuffer {
    /// Device address; 0: absent.
    pub address: u64,
    /// Elements.
    pub elements: usize,
}

/// Rows at a distance.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaRows {
    /// The memory.
    pub buffer: KdaBuffer,
    /// Elements between rows.
    pub stride: i64,
}

/// Everything one launch reads and writes. Shapes and dtypes are those of `kda_runtime::Step`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaStep {
    /// 0 is a decode step, 1..=16 a verify step of so many tokens. After a verify step of which more
    /// than one token was accepted comes a verify step, never a decode step.
    pub verify_tokens: usize,
    /// Requests; 0 launches nothing.
    pub requests: usize,
    /// bf16 `[rows, 3 dim]`.
    pub qkv: KdaRows,
    /// bf16 `[rows, dim]`.
    pub output_gate: KdaRows,
    /// bf16 `[rows, 128]`, with the low-rank gate.
    pub f_a: KdaRows,
    /// bf16 `[rows, dim]`, with a projected gate: F_B * F_A, before dt_bias.
    pub gate_input: KdaRows,
    /// bf16 `[rows, heads]`.
    pub beta: KdaRows,
    /// f32 `[3, 4, dim]`.
    pub conv_weight: KdaBuffer,
    /// f32 `[3 dim]`, with a conv bias.
    pub conv_bias: KdaBuffer,
    /// bf16 `[dim, 128]`, 16-byte aligned, with the low-rank gate.
    pub f_b: KdaBuffer,
    /// f32 `[heads]`.
    pub a_log: KdaBuffer,
    /// f32 `[dim]`.
    pub dt_bias: KdaBuffer,
    /// f32 `[128]`.
    pub norm: KdaBuffer,
    /// bf16, updated in place; the stride is between slots.
    pub conv_cache: KdaRows,
    /// Positions of a conv line.
    pub conv_length: usize,
    /// `[slots, heads, 128 values, 128 keys]`, written; the stride is between slots.
    pub state: KdaRows,
    /// Read instead of `state`; address 0: `state` is updated in place.
    pub state_source: KdaRows,
    /// Slots of the pools.
    pub pool_slots: usize,
    /// i32 `[requests, columns]`; the stride is between rows.
    pub slots: KdaRows,
    /// Columns of the slot table; with records only the first is read.
    pub slot_columns: usize,
    /// i32 `[requests]`, for verify steps.
    pub accepted: KdaBuffer,
    /// i32 `[requests]`, for ragged verify steps: rows that each request brings, 0 to the step's
    /// tokens. With 0 nothing of the request is touched: its state stays in `state_source`.
    pub token_counts: KdaBuffer,
    /// f32 `[slots, record_count, heads, 3, 128]`, 16-byte aligned, updated in place, for verify steps
    /// that keep records; the stride is between slots, a multiple of 4.
    pub records: KdaRows,
    /// Records of a slot; 0 without.
    pub record_count: usize,
    /// bf16 `[rows, dim]`, written.
    pub out: KdaRows,
}

/// The operands of one reset: `kda_runtime::Reset`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaReset {
    /// Rows of the slot table; 0 launches nothing.
    pub requests: usize,
    /// i32 `[requests, columns]`: the slots to zero; the stride is between rows. Null values and those
    /// not below `pool_slots` are skipped, others are distinct.
    pub slots: KdaRows,
    /// Columns of the slot table.
    pub slot_columns: usize,
    /// bf16, written; the stride is between slots.
    pub conv_cache: KdaRows,
    /// Positions of a conv line, at least 3.
    pub conv_length: usize,
    /// `[slots, heads, 128 values, 128 keys]`, written; the stride is between slots.
    pub state: KdaRows,
    /// Slots of the pools.
    pub pool_slots: usize,
}

/// What the device refused since the last look.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaFaults {
    /// Refused requests; 0: none, and the rest is 0 too.
    pub count: u32,
    /// Lowest index in its batch among them.
    pub request: u32,
    /// A KdaFaultKind.
    pub kind: u32,
}

/// What is known of one kernel. Texts belong to the handle and live as long as it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KdaKernelInfo {
    /// Entry point.
    pub entry: *const c_char,
    /// Digest of everything its code depends on, 64 hexadecimal digits.
    pub key: *const c_char,
    /// A KdaOrigin.
    pub origin: u32,
    /// Registers of a thread; 0: unknown.
    pub registers: u32,
    /// Static shared memory of a block in bytes; 0: unknown.
    pub shared_bytes: u32,
    /// Blocks for one request; the grid is this by the number of requests.
    pub blocks_per_request: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
}

/// The dimensions of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KdaLaunch {
    /// Index of its kernel.
    pub kernel: usize,
    /// Blocks; all 0 for a step without requests.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster.
    pub cluster: [u32; 3],
}

/// A CUDA context to prepare and launch in.
pub struct KdaDevice(Device);

/// Kernels of one model on one device.
pub struct KdaPrepared {
    prepared: PreparedKda,
    texts: Vec<Texts>,
}

/// The kernel that zeroes slots of one model on one device.
pub struct KdaPreparedReset(PreparedReset);

/// Kernels and checks without a device.
pub struct KdaPlan {
    plan: Plan,
    kernels: Vec<Kernel>,
    texts: Vec<Texts>,
}

/// A kernel's entry point and key as C strings.
struct Texts(CString, CString);

struct Failure(KdaStatus, String);

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match &error {
            Error::Codegen(
                kda_codegen::Error::Illegal { .. } | kda_codegen::Error::Unknown { .. },
            )
            | Error::IllegalSetting { .. }
            | Error::PolicyFileUnreadable { .. }
            | Error::PolicyFileIllegal { .. }
            | Error::PolicyFileArch { .. } => KdaStatus::IllegalSetting,
            Error::Codegen(_) | Error::KernelMissing { .. } | Error::NvrtcVersion { .. } => {
                KdaStatus::NoKernel
            }
            Error::BundleUnreadable { .. }
            | Error::BundleDamaged { .. }
            | Error::BundleMismatch { .. } => KdaStatus::BadBundle,
            Error::PolicyMissing { .. } => KdaStatus::NotPrepared,
            Error::DriverMissing => KdaStatus::NoDriver,
            Error::DeviceUnsupported { .. } | Error::ArchUnsupported { .. } => {
                KdaStatus::DeviceUnsupported
            }
            Error::Cuda { .. } | Error::DriverTooOld { .. } => KdaStatus::Cuda,
            Error::Capturing => KdaStatus::Capturing,
            _ => KdaStatus::BadOperand,
        };
        Failure(status, error.to_string())
    }
}

impl From<kda_codegen::Error> for Failure {
    fn from(error: kda_codegen::Error) -> Failure {
        Error::from(error).into()
    }
}

type Outcome = Result<(), Failure>;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `body`, keeps its text, and lets no panic through.
fn guarded(body: impl FnOnce() -> Outcome) -> KdaStatus {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| text.to_string())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        // A panic may carry a value whose own drop panics.
        std::mem::forget(panic);
        Err(Failure(KdaStatus::Panic, text))
    });
    let Err(Failure(status, text)) = outcome else {
        return KdaStatus::Ok;
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending has no text left to keep.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    status
}

fn null(what: &str) -> Failure {
    Failure(KdaStatus::NullPointer, format!("{what} is NULL"))
}

/// # Safety
///
/// `pointer` is NULL or points to a `T` that lives as long as the call.
unsafe fn given<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// # Safety
///
/// `pointer` is NULL or points to room for a `T`.
unsafe fn put<T>(pointer: *mut T, value: T, what: &str) -> Outcome {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { pointer.write(value) };
    Ok(())
}

/// # Safety
///
/// `pointer` is NULL or a C string that lives as long as the call.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some)
        .map_err(|_| Failure(KdaStatus::BadText, format!("{what} is no UTF-8")))
}

fn choice<T: Copy>(what: &str, value: u32, choices: &[T]) -> Result<T, Failure> {
    choices.get(value as usize).copied().ok_or_else(|| {
        let most = choices.len() - 1;
        Failure(
            KdaStatus::IllegalSetting,
            format!("{what} is {value}, allowed: 0..={most}"),
        )
    })
}

fn config_of(config: &KdaConfig) -> Result<Config, Failure> {
    let softplus = choice("gate", config.gate, &[false, true])?;
    Ok(Config {
        heads: config.heads,
        conv_bias: choice("conv_bias", config.conv_bias, &[false, true])?,
        conv_layout: choice(
            "conv_layout",
            config.conv_layout,
            &[ConvLayout::DimFirst, ConvLayout::TokenFirst],
        )?,
        gate: if softplus {
            Gate::Softplus
        } else {
            Gate::LowerBound(config.lower_bound)
        },
        gate_input: choice(
            "gate_input",
            config.gate_input,
            &[GateInput::LowRank, GateInput::Projected],
        )?,
        null_rule: choice(
            "null_rule",
            config.null_rule,
            &[NullRule::NonPositive, NullRule::Negative],
        )?,
        state_dtype: choice(
            "state_dtype",
            config.state_dtype,
            &[StateDtype::F32, StateDtype::Bf16],
        )?,
        rollback: choice(
            "rollback",
            config.rollback,
            &[Rollback::Checkpoints, Rollback::Records],
        )?,
        ragged: choice("ragged", config.ragged, &[false, true])?,
        early_reads: choice(
            "early_reads",
            config.early_reads,
            &[EarlyReads::Weights, EarlyReads::Caches],
        )?,
        scale: config.scale,
        eps: config.eps,
    })
}

fn kind_of(verify_tokens: usize) -> StepKind {
    if verify_tokens == 0 {
        StepKind::Decode
    } else {
        StepKind::Verify(verify_tokens)
    }
}

/// The policy file that `sources` name, for kernels of `arch`.
///
/// # Safety
///
/// `sources` is NULL or points to sources with valid texts.
unsafe fn policy_file_of(
    sources: *const KdaSources,
    arch: Arch,
) -> Result<Option<PolicyFile>, Failure> {
    // SAFETY: the caller's promise, here and below.
    let Some(sources) = (unsafe { sources.as_ref() }) else {
        return Ok(None);
    };
    // SAFETY: as above.
    let path = unsafe { text(sources.policy_path, "policy_path") }?;
    // SAFETY: as above.
    let given = unsafe { text(sources.policy_text, "policy_text") }?;
    let illegal = |text: String| Err(Failure(KdaStatus::IllegalSetting, text));
    let file: PolicyFile = match (path, given) {
        (None, None) => return Ok(None),
        (Some(path), None) => PolicyFile::from_path(path.as_ref())?,
        (None, Some(text)) => text.parse()?,
        (Some(_), Some(_)) => return illegal("policy_text was given beside policy_path".into()),
    };
    // Also where every policy names its mode and the file serves none.
    file.require_arch(arch)?;
    Ok(Some(file))
}

/// # Safety
///
/// `policies` is NULL or points to `count` policies with valid texts; `sources` is NULL or points to
/// sources with valid texts.
unsafe fn policies_of(
    target: Target<'_>,
    config: &Config,
    policies: *const KdaPolicy,
    count: usize,
    sources: *const KdaSources,
) -> Result<Policies, Failure> {
    // SAFETY: the caller's promise.
    let file = unsafe { policy_file_of(sources, target.arch()) }?;
    let measured = |kind| match &file {
        Some(file) => Policies::from_file(file, target, config, &[kind]),
        None => Ok(Policies::for_device(target, config, &[kind])),
    };
    if policies.is_null() {
        return if count == 0 {
            Ok(measured(StepKind::Decode)?)
        } else {
            Err(null("policies"))
        };
    }
    let mut all = Policies::default();
    // SAFETY: the caller's promise.
    for policy in unsafe { std::slice::from_raw_parts(policies, count) } {
        let kind = kind_of(policy.verify_tokens);
        // SAFETY: the caller's promise.
        match unsafe { text(policy.mode, "mode") }? {
            Some(mode) => {
                let mode: Mode = mode.parse()?;
                all.0.push(Policy {
                    kind,
                    max_requests: policy.max_requests,
                    mode,
                });
            }
            None => all.0.extend(measured(kind)?.0),
        }
    }
    Ok(all)
}

/// # Safety
///
/// `sources` is NULL or points to sources with valid texts and data.
unsafe fn sources_of(sources: *const KdaSources) -> Result<KernelSources, Failure> {
    // SAFETY: the caller's promise, here and below.
    let Some(sources) = (unsafe { sources.as_ref() }) else {
        return Ok(KernelSources::standard());
    };
    let mut all = KernelSources::new();
    // SAFETY: as above.
    if let Some(path) = unsafe { text(sources.bundle_path, "bundle_path") }? {
        all = all.bundle(KernelBundle::from_path(path.as_ref())?);
    }
    if !sources.bundle_data.is_null() {
        let data = sources.bundle_data.cast::<u8>();
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(data, sources.bundle_bytes) };
        all = all.bundle(KernelBundle::from_bytes(bytes.to_vec())?);
    }
    // SAFETY: as above.
    all = match unsafe { text(sources.cache_folder, "cache_folder") }? {
        Some("off") => all,
        Some(folder) => all.disk_cache(DiskCache::at(folder)),
        None => all.disk_cache(DiskCache::from_environment()),
    };
    if !choice("no_nvrtc", sources.no_nvrtc, &[false, true])? {
        // SAFETY: as above.
        let folder = unsafe { text(sources.nvrtc_folder, "nvrtc_folder") }?.map(PathBuf::from);
        all = all.nvrtc(folder.as_slice());
    }
    Ok(all)
}

fn step_of(step: &KdaStep) -> Step {
    let buffer = |b: KdaBuffer| Buffer::new(b.address, b.elements);
    let present = |b: KdaBuffer| (b.address != 0).then(|| buffer(b));
    let rows = |r: KdaRows| Rows {
        buffer: buffer(r.buffer),
        stride: r.stride,
    };
    let pool = |r: KdaRows| StatePool {
        buffer: buffer(r.buffer),
        slot_stride: r.stride,
    };
    Step {
        kind: kind_of(step.verify_tokens),
        requests: step.requests,
        projected: Projected {
            qkv: rows(step.qkv),
            output_gate: rows(step.output_gate),
            f_a: rows(step.f_a),
            gate_input: rows(step.gate_input),
            beta: rows(step.beta),
        },
        weights: Weights {
            conv: buffer(step.conv_weight),
            conv_bias: present(step.conv_bias),
            f_b: buffer(step.f_b),
            a_log: buffer(step.a_log),
            dt_bias: buffer(step.dt_bias),
            norm: buffer(step.norm),
        },
        conv_cache: ConvCache {
            buffer: buffer(step.conv_cache.buffer),
            slot_stride: step.conv_cache.stride,
            length: step.conv_length,
        },
        state: pool(step.state),
        state_source: (step.state_source.buffer.address != 0).then(|| pool(step.state_source)),
        pool_slots: step.pool_slots,
        slots: Slots {
            buffer: buffer(step.slots.buffer),
            stride: step.slots.stride,
            columns: step.slot_columns,
        },
        accepted: present(step.accepted),
        token_counts: present(step.token_counts),
        records: (step.records.buffer.address != 0).then(|| RecordPool {
            buffer: buffer(step.records.buffer),
            slot_stride: step.records.stride,
            count: step.record_count,
        }),
        out: rows(step.out),
    }
}

fn texts_of(entry: &str, key: impl ToString) -> Texts {
    // Neither holds a zero byte.
    Texts(
        CString::new(entry).unwrap_or_default(),
        CString::new(key.to_string()).unwrap_or_default(),
    )
}

fn info_of(
    spec: &kda_codegen::KernelSpec,
    origin: Origin,
    resources: Option<kda_codegen::Resources>,
    texts: &Texts,
) -> Result<KdaKernelInfo, Failure> {
    let launch = spec.launch(1)?;
    let resources = resources.unwrap_or_default();
    Ok(KdaKernelInfo {
        entry: texts.0.as_ptr(),
        key: texts.1.as_ptr(),
        origin: match origin {
            Origin::Bundle => KdaOrigin::Bundle,
            Origin::Cache => KdaOrigin::Cache,
            _ => KdaOrigin::Compiled,
        } as u32,
        registers: resources.registers,
        shared_bytes: resources.shared_bytes,
        blocks_per_request: launch.grid[0],
        threads: launch.block[0],
        cluster: launch.cluster[0],
    })
}

fn out_of_range(index: usize, count: usize) -> Failure {
    Failure(
        KdaStatus::OutOfRange,
        format!("kernel {index} asked for, there are {count}"),
    )
}

fn faults_of(faults: Option<kda_runtime::Faults>) -> KdaFaults {
    faults.map_or(KdaFaults::default(), |faults| KdaFaults {
        count: faults.count,
        request: faults.request,
        kind: match faults.kind {
            FaultKind::AcceptedOutOfRange => KdaFaultKind::AcceptedOutOfRange,
            FaultKind::NullSource => KdaFaultKind::NullSource,
            FaultKind::TokensOutOfRange => KdaFaultKind::TokensOutOfRange,
            _ => KdaFaultKind::SlotOutOfRange,
        } as u32,
    })
}

/// The text of the calling thread's last failure; valid until its next failure. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kda_last_error() -> *const c_char {
    LAST_ERROR
        .try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// Fills `config` with Kimi K3's settings.
///
/// # Safety
///
/// `config` is NULL or points to a KdaConfig.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_config_kimi_k3(heads: usize, config: *mut KdaConfig) -> KdaStatus {
    guarded(|| {
        let kimi = Config::kimi_k3(heads);
        let lower_bound = match kimi.gate {
            Gate::LowerBound(bound) => bound,
            Gate::Softplus => 0.0,
        };
        let value = KdaConfig {
            heads,
            lower_bound,
            scale: kimi.scale,
            eps: kimi.eps,
            ..KdaConfig::default()
        };
        // SAFETY: the caller's promise.
        unsafe { put(config, value, "config") }
    })
}

/// Retains the primary context of a device.
///
/// # Safety
///
/// `device` is NULL or points to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_device_primary(
    ordinal: i32,
    device: *mut *mut KdaDevice,
) -> KdaStatus {
    guarded(|| {
        if device.is_null() {
            return Err(null("device"));
        }
        let made = Box::new(KdaDevice(Device::primary(ordinal)?));
        // SAFETY: the caller's promise.
        unsafe { put(device, Box::into_raw(made), "device") }
    })
}

/// Uses a context (a CUcontext) that the caller keeps.
///
/// # Safety
///
/// `context` is a live context and stays one until the device and everything prepared on it are
/// destroyed; `device` is NULL or points to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_device_borrow(
    context: *mut c_void,
    device: *mut *mut KdaDevice,
) -> KdaStatus {
    guarded(|| {
        if context.is_null() {
            return Err(null("context"));
        }
        if device.is_null() {
            return Err(null("device"));
        }
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
        // SAFETY: the caller keeps the context alive.
        let made = unsafe { Device::borrow(context.cast(), owner) }?;
        // SAFETY: the caller's promise.
        unsafe { put(device, Box::into_raw(Box::new(KdaDevice(made))), "device") }
    })
}

/// Destroys a device; what is prepared on it stays usable. NULL is ignored.
///
/// # Safety
///
/// `device` is NULL or was made by this library and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_device_destroy(device: *mut KdaDevice) {
    guarded(|| {
        // SAFETY: the caller's promise.
        unsafe { destroy(device) };
        Ok(())
    });
}

/// # Safety
///
/// `pointer` is NULL or came from `Box::into_raw`.
unsafe fn destroy<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(pointer) });
    }
}

/// Gets and loads the kernels of `count` policies; NULL and 0: decode steps, the measured choice.
/// `sources` may be NULL. `stream` (a CUstream) is only asked whether it is being captured.
///
/// # Safety
///
/// Pointers are NULL or valid, with valid texts; `stream` is a stream of the device's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_prepare(
    device: *const KdaDevice,
    stream: *mut c_void,
    config: *const KdaConfig,
    policies: *const KdaPolicy,
    count: usize,
    sources: *const KdaSources,
    prepared: *mut *mut KdaPrepared,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise, for every pointer.
        let (device, config) = unsafe { (&given(device, "device")?.0, given(config, "config")?) };
        if prepared.is_null() {
            return Err(null("prepared"));
        }
        let config = config_of(config)?;
        // SAFETY: as above.
        let policies = unsafe { policies_of(device.into(), &config, policies, count, sources) }?;
        // SAFETY: as above.
        let sources = unsafe { sources_of(sources) }?;
        let made =
            PreparedKda::prepare_caches(device, stream.cast(), &config, &policies, &sources)?;
        let texts = made
            .kernels()
            .iter()
            .map(|info| texts_of(&info.entry, info.key))
            .collect();
        let made = Box::new(KdaPrepared {
            prepared: made,
            texts,
        });
        // SAFETY: as above.
        unsafe { put(prepared, Box::into_raw(made), "prepared") }
    })
}

/// Launches one step on `stream`: one kernel, nothing allocated, capturable.
///
/// # Safety
///
/// Pointers are NULL or valid. Every buffer of the step is device memory of the prepared object's
/// context with the stated elements, alive until the launch has finished; nothing else writes what
/// it reads or touches what it writes meanwhile; live slots are distinct; `stream` belongs to the
/// context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_run(
    prepared: *const KdaPrepared,
    stream: *mut c_void,
    step: *const KdaStep,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise, for both pointers.
        let (kda, step) = unsafe { (given(prepared, "prepared")?, given(step, "step")?) };
        // SAFETY: the caller's promise about the operands.
        unsafe { kda.prepared.run(stream.cast(), &step_of(step)) }?;
        Ok(())
    })
}

/// Waits for `stream`, reads what was refused, and forgets it.
///
/// # Safety
///
/// Pointers are NULL or valid; `stream` belongs to the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_take_faults(
    prepared: *const KdaPrepared,
    stream: *mut c_void,
    faults: *mut KdaFaults,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let kda = unsafe { given(prepared, "prepared") }?;
        if faults.is_null() {
            return Err(null("faults"));
        }
        let found = kda.prepared.take_faults(stream.cast())?;
        // SAFETY: the caller's promise.
        unsafe { put(faults, faults_of(found), "faults") }
    })
}

/// Reads what was refused so far, without waiting.
///
/// # Safety
///
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_peek_faults(
    prepared: *const KdaPrepared,
    faults: *mut KdaFaults,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let kda = unsafe { given(prepared, "prepared") }?;
        // SAFETY: the caller's promise.
        unsafe { put(faults, faults_of(kda.prepared.peek_faults()), "faults") }
    })
}

/// Number of prepared kernels; 0 for NULL.
///
/// # Safety
///
/// `prepared` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_kernel_count(prepared: *const KdaPrepared) -> usize {
    // SAFETY: the caller's promise.
    unsafe { prepared.as_ref() }.map_or(0, |kda| kda.prepared.kernels().len())
}

/// Describes prepared kernel `index`.
///
/// # Safety
///
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_kernel_info(
    prepared: *const KdaPrepared,
    index: usize,
    info: *mut KdaKernelInfo,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let kda = unsafe { given(prepared, "prepared") }?;
        let kernels = kda.prepared.kernels();
        let kernel = kernels
            .get(index)
            .ok_or_else(|| out_of_range(index, kernels.len()))?;
        let value = info_of(
            &kernel.spec,
            kernel.origin,
            kernel.resources,
            &kda.texts[index],
        )?;
        // SAFETY: the caller's promise.
        unsafe { put(info, value, "info") }
    })
}

/// Destroys a prepared object; its launches must have finished. NULL is ignored.
///
/// # Safety
///
/// `prepared` is NULL or was made by this library and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_prepared_destroy(prepared: *mut KdaPrepared) {
    guarded(|| {
        // SAFETY: the caller's promise.
        unsafe { destroy(prepared) };
        Ok(())
    });
}

/// Gets and loads the kernel that zeroes the state and conv line of slots, for requests that reuse
/// them. `sources` may be NULL. `stream` is only asked whether it is being captured.
///
/// # Safety
///
/// Pointers are NULL or valid, with valid texts; `stream` is a stream of the device's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_reset_prepare(
    device: *const KdaDevice,
    stream: *mut c_void,
    config: *const KdaConfig,
    sources: *const KdaSources,
    reset: *mut *mut KdaPreparedReset,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise, for every pointer.
        let (device, config) = unsafe { (&given(device, "device")?.0, given(config, "config")?) };
        if reset.is_null() {
            return Err(null("reset"));
        }
        let config = config_of(config)?;
        // SAFETY: as above.
        let sources = unsafe { sources_of(sources) }?;
        let made = PreparedReset::prepare(device, stream.cast(), &config, &sources)?;
        let made = Box::new(KdaPreparedReset(made));
        // SAFETY: as above.
        unsafe { put(reset, Box::into_raw(made), "reset") }
    })
}

/// Launches one reset on `stream`: one kernel, nothing allocated, capturable.
///
/// # Safety
///
/// Pointers are NULL or valid. Every buffer is device memory of the context with the stated elements,
/// alive until the launch has finished; nothing else touches the slots meanwhile; slots that are
/// neither null nor out of range are distinct; `stream` belongs to the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_reset_run(
    reset: *const KdaPreparedReset,
    stream: *mut c_void,
    operands: *const KdaReset,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise, for both pointers.
        let (reset, given) = unsafe { (given(reset, "reset")?, given(operands, "operands")?) };
        let buffer = |b: KdaBuffer| Buffer::new(b.address, b.elements);
        let operands = Reset {
            requests: given.requests,
            slots: Slots {
                buffer: buffer(given.slots.buffer),
                stride: given.slots.stride,
                columns: given.slot_columns,
            },
            conv_cache: ConvCache {
                buffer: buffer(given.conv_cache.buffer),
                slot_stride: given.conv_cache.stride,
                length: given.conv_length,
            },
            state: StatePool {
                buffer: buffer(given.state.buffer),
                slot_stride: given.state.stride,
            },
            pool_slots: given.pool_slots,
        };
        // SAFETY: the caller's promise about the operands.
        unsafe { reset.0.run(stream.cast(), &operands) }?;
        Ok(())
    })
}

/// Destroys a prepared reset; its launches must have finished. NULL is ignored.
///
/// # Safety
///
/// `reset` is NULL or was made by this library and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_reset_destroy(reset: *mut KdaPreparedReset) {
    guarded(|| {
        // SAFETY: the caller's promise.
        unsafe { destroy(reset) };
        Ok(())
    });
}

/// Gets kernels for `arch`, for example `sm_90a`, without a device. `sources` may be NULL.
///
/// # Safety
///
/// Pointers are NULL or valid, with valid texts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_plan_create(
    arch: *const c_char,
    config: *const KdaConfig,
    policies: *const KdaPolicy,
    count: usize,
    sources: *const KdaSources,
    plan: *mut *mut KdaPlan,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise, for every pointer.
        let arch = unsafe { text(arch, "arch") }?
            .ok_or_else(|| null("arch"))?
            .parse()?;
        // SAFETY: as above.
        let config = config_of(unsafe { given(config, "config") }?)?;
        if plan.is_null() {
            return Err(null("plan"));
        }
        // SAFETY: as above.
        let policies =
            unsafe { policies_of(Target::from(arch), &config, policies, count, sources) }?;
        let made = Plan::new(arch, &config, &policies)?;
        // SAFETY: as above.
        let kernels = unsafe { sources_of(sources) }?.kernels(made.kernels())?;
        let texts = kernels
            .iter()
            .map(|kernel| texts_of(&kernel.entry, kernel.key))
            .collect();
        let made = Box::new(KdaPlan {
            plan: made,
            kernels,
            texts,
        });
        // SAFETY: as above.
        unsafe { put(plan, Box::into_raw(made), "plan") }
    })
}

/// Checks a step as `kda_run` does and describes its launch.
///
/// # Safety
///
/// Pointers are NULL or valid; the step's addresses are not used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_plan_step(
    plan: *const KdaPlan,
    step: *const KdaStep,
    launch: *mut KdaLaunch,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise, for both pointers.
        let (plan, step) = unsafe { (given(plan, "plan")?, given(step, "step")?) };
        let planned = plan.plan.step(&step_of(step), 0)?;
        let value = planned.map_or(KdaLaunch::default(), |planned| KdaLaunch {
            kernel: planned.kernel,
            grid: planned.launch.grid,
            block: planned.launch.block,
            cluster: planned.launch.cluster,
        });
        // SAFETY: the caller's promise.
        unsafe { put(launch, value, "launch") }
    })
}

/// Number of a plan's kernels; 0 for NULL.
///
/// # Safety
///
/// `plan` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_plan_kernel_count(plan: *const KdaPlan) -> usize {
    // SAFETY: the caller's promise.
    unsafe { plan.as_ref() }.map_or(0, |plan| plan.kernels.len())
}

/// Describes kernel `index` of a plan.
///
/// # Safety
///
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_plan_kernel_info(
    plan: *const KdaPlan,
    index: usize,
    info: *mut KdaKernelInfo,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let plan = unsafe { given(plan, "plan") }?;
        let count = plan.kernels.len();
        let kernel = plan
            .kernels
            .get(index)
            .ok_or_else(|| out_of_range(index, count))?;
        let value = info_of(
            &kernel.spec,
            kernel.origin,
            kernel.resources,
            &plan.texts[index],
        )?;
        // SAFETY: the caller's promise.
        unsafe { put(info, value, "info") }
    })
}

/// The device code of kernel `index` of a plan, owned by the plan.
///
/// # Safety
///
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_plan_cubin(
    plan: *const KdaPlan,
    index: usize,
    data: *mut *const c_void,
    bytes: *mut usize,
) -> KdaStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let plan = unsafe { given(plan, "plan") }?;
        let count = plan.kernels.len();
        let kernel = plan
            .kernels
            .get(index)
            .ok_or_else(|| out_of_range(index, count))?;
        // SAFETY: the caller's promise.
        unsafe { put(data, kernel.cubin.as_ptr().cast(), "data") }?;
        // SAFETY: the caller's promise.
        unsafe { put(bytes, kernel.cubin.len(), "bytes") }
    })
}

/// Destroys a plan. NULL is ignored.
///
/// # Safety
///
/// `plan` is NULL or was made by this library and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_plan_destroy(plan: *mut KdaPlan) {
    guarded(|| {
        // SAFETY: the caller's promise.
        unsafe { destroy(plan) };
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_crosses() {
        assert_eq!(guarded(|| panic!("planned {}", 7)), KdaStatus::Panic);
        // SAFETY: the text was just set on this thread.
        assert_eq!(unsafe { CStr::from_ptr(kda_last_error()) }, c"planned 7");
        // Another thread has its own.
        let other = std::thread::spawn(|| {
            // SAFETY: never NULL.
            unsafe { CStr::from_ptr(kda_last_error()) }.to_owned()
        });
        assert_eq!(other.join().unwrap().as_c_str(), c"");
    }
}
