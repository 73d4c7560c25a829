//! The runtime's launch path over the emulated CUDA driver: prepare, run, capture, replay, contexts.
//! Each test runs in a process of its own that finds that driver where libcuda would be.

#![cfg(target_os = "linux")]

use std::ffi::c_char;
use std::process::Command;
use std::ptr;
use std::sync::mpsc;

use cudarc::driver::sys;
use kda_codegen::{Arch, EarlyReads};
use kda_runtime::{
    Buffer, Config, Device, Error, Policies, PreparedKda, PreparedReset, Projected,
    ProjectionLayout, Reset, Rows, Step, StepKind, Stream,
};
use kda_tests::cuda::{self, CudaExecutor, DeviceBuffers, DeviceMemory, check};
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::replay::ReplayExecutor;
use kda_tests::soak::{World, serve};
use kda_tests::{Buffers, Case, Executor, Limits, judge, placed, scratch};

// Builds the library beside this test, too.
use kda_emulated_cuda::Counts;

/// Set in the process that a test starts for itself.
const INSIDE: &str = "KDA_TEST_INSIDE";

/// Runs `body` in a process of its own, `environment` and the emulated driver around it.
fn over_emulated_driver(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        // Initialises the driver.
        cuda::current_device().unwrap();
        assert!(cuda::is_emulated().unwrap());
        return body();
    }
    // Compiled or fetched before there is any time limit on anything.
    load_nvrtc().unwrap();
    let folder = scratch();
    let executable = std::env::current_exe().unwrap();
    cuda::put_emulated_driver(&executable, folder.path()).unwrap();
    let output = Command::new(executable)
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .env("LD_LIBRARY_PATH", folder.path())
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(said.contains("1 passed"), "the test did not run: {said}");
}

/// What the emulated driver counted in this process.
fn counts() -> Counts {
    let mut counts = Counts::default();
    // SAFETY: the driver library is loaded and stays loaded; the function has this signature.
    unsafe {
        let count = sys::culib()
            .get::<unsafe extern "C" fn(*mut Counts)>(b"kda_emulated_counts")
            .unwrap();
        count(&mut counts);
    }
    counts
}

/// What it had to say of the last failure.
fn last_error() -> String {
    type LastError = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    let mut text = [0u8; 256];
    // SAFETY: as in `counts`; the buffer holds the stated bytes.
    let length = unsafe {
        let last_error = sys::culib()
            .get::<LastError>(b"kda_emulated_last_error")
            .unwrap();
        last_error(text.as_mut_ptr().cast(), text.len())
    };
    String::from_utf8_lossy(&text[..length.min(text.len() - 1)]).into_owned()
}

fn compiled() -> KernelCache {
    let kernels = KernelCache::new(load_nvrtc().unwrap());
    kernels.give_ptx();
    kernels
}

/// A case on a device.
struct Placed {
    case: Case,
    buffers: Buffers,
    memory: DeviceBuffers,
}

impl Placed {
    /// Uploads into the current context.
    fn new(case: Case) -> Placed {
        let buffers = Buffers::new(&case);
        let placed = Placed {
            case,
            memory: DeviceBuffers::new(&buffers).unwrap(),
            buffers,
        };
        placed.upload(&placed.buffers);
        placed
    }

    fn upload(&self, buffers: &Buffers) {
        self.memory.upload(buffers).unwrap();
    }

    fn step(&self) -> Step {
        placed::step(&self.case, &self.buffers, |name| self.memory.address(name))
    }

    /// What the device holds now.
    fn after(&self) -> Buffers {
        let mut after = self.buffers.clone();
        self.memory.download(&mut after).unwrap();
        after
    }

    /// Judges what the device holds now against what it held at first.
    fn judge(&self) {
        self.case.check(&self.buffers, &self.after(), None).unwrap();
    }

    fn config(&self) -> Config {
        placed::config(&self.case, EarlyReads::Weights)
    }

    fn prepare(&self, device: &Device, stream: Stream, kernels: &KernelCache) -> PreparedKda {
        let kinds = [placed::kind(&self.case)];
        let config = self.config();
        let policies = Policies::for_device(device.arch(), &config, &kinds);
        PreparedKda::prepare_caches(device, stream, &config, &policies, kernels).unwrap()
    }
}

/// A small case, every request live.
fn case(seed: u64, tokens: usize) -> Case {
    let limits = Limits {
        tokens: vec![tokens],
        projected_gates: vec![false],
        ..Limits::small().live()
    };
    Case::sized(seed, &limits, 1, 2)
}

fn run(prepared: &PreparedKda, stream: Stream, step: &Step) -> Result<(), Error> {
    // SAFETY: the operands are `Placed` allocations, which outlive the launch.
    unsafe { prepared.run(stream, step) }
}

fn begin(stream: Stream, mode: sys::CUstreamCaptureMode) {
    // SAFETY: the stream is live.
    check("cuStreamBeginCapture", unsafe {
        sys::cuStreamBeginCapture_v2(stream, mode)
    })
    .unwrap();
}

/// Ends a capture: the number of nodes, and the executable graph.
fn end(stream: Stream) -> (usize, sys::CUgraphExec) {
    let (mut graph, mut executable, mut nodes) = (ptr::null_mut(), ptr::null_mut(), 0);
    // SAFETY: the stream is live, every pointer is to a local.
    unsafe {
        check(
            "cuStreamEndCapture",
            sys::cuStreamEndCapture(stream, &mut graph),
        )
        .unwrap();
        let counted = sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut nodes);
        check("cuGraphGetNodes", counted).unwrap();
        let made = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0);
        check("cuGraphInstantiate", made).unwrap();
    }
    (nodes, executable)
}

fn replay(executable: sys::CUgraphExec, stream: Stream) {
    // SAFETY: both are live.
    check("cuGraphLaunch", unsafe {
        sys::cuGraphLaunch(executable, stream)
    })
    .unwrap();
}

const GLOBAL: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;

/// Read from one pool, written to another: a step in place would find nothing but NaN.
#[test]
fn a_second_pool_is_read_and_the_first_one_written() {
    over_emulated_driver(
        "a_second_pool_is_read_and_the_first_one_written",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            for (seed, tokens, records) in [(11, 1, false), (12, 3, false), (13, 3, true)] {
                for ragged in [false, tokens > 1] {
                    let limits = Limits {
                        tokens: vec![tokens],
                        records: vec![records],
                        ragged: vec![ragged],
                        projected_gates: vec![false],
                        ..Limits::small().live()
                    };
                    let placed = Placed::new(Case::sized(seed, &limits, 1, 3));
                    let prepared = placed.prepare(&device, stream, &kernels);
                    run(&prepared, stream, &placed.step()).unwrap();
                    let wanted = placed.after();

                    let mut empty = placed.buffers.clone();
                    empty.state.data_mut().fill(0xff);
                    placed.upload(&empty);
                    let state = &placed.buffers.state;
                    let source = DeviceMemory::new(state.bytes.len()).unwrap();
                    source.upload(0, &state.bytes).unwrap();
                    let mut step = placed.step();
                    let offset = step.state.buffer.address - placed.memory.address("state_pool");
                    let mut pool = step.state;
                    pool.buffer.address = source.address + offset;
                    step.state_source = Some(pool);
                    run(&prepared, stream, &step).unwrap();
                    let found = placed.after();

                    let text = format!("{tokens} tokens, records {records}, ragged {ragged}");
                    for ((name, a), (_, b)) in wanted.regions().iter().zip(found.regions()) {
                        assert!(
                            *name == "state_pool" || a.bytes == b.bytes,
                            "{text}: {name}"
                        );
                    }
                    let words = |bytes: &[u8]| -> Vec<[u8; 4]> {
                        bytes
                            .chunks_exact(4)
                            .map(|w| w.try_into().unwrap())
                            .collect()
                    };
                    let before = words(state.data());
                    let (wanted, found) = (words(wanted.state.data()), words(found.state.data()));
                    let mut written = 0;
                    for i in 0..before.len() {
                        // What the step in place wrote, or what was there.
                        let kept = wanted[i] == before[i] && found[i] == [0xff; 4];
                        assert!(kept || found[i] == wanted[i], "{text}: word {i}");
                        written += usize::from(!kept);
                    }
                    assert!(written > 0, "{text}");
                }
            }
        },
    );
}

/// What `validate --arch` does on a GPU.
#[test]
fn kernels_of_an_older_architecture_run_on_the_device_at_hand() {
    over_emulated_driver(
        "kernels_of_an_older_architecture_run_on_the_device_at_hand",
        &[],
        || {
            let mut executor = CudaExecutor::with_arch(compiled(), Arch::Sm80).unwrap();
            assert_eq!(executor.device.arch(), Arch::Sm80);
            assert_eq!(executor.name(), "cuda sm_80");
            for (seed, tokens) in [(1, 1), (2, 3)] {
                let case = case(seed, tokens);
                let before = Buffers::new(&case);
                for mode in executor.modes(&case) {
                    let mut after = before.clone();
                    let faults = executor.run(&case, &mode, &mut after).unwrap();
                    case.check(&before, &after, faults.as_ref()).unwrap();
                }
            }
            let newer = CudaExecutor::with_arch(compiled(), Arch::Sm100a).map(|_| ());
            let error = newer.unwrap_err().to_string();
            assert_eq!(error, "compute capability 9.0 runs no kernels of sm_100a");
        },
    );
}

#[test]
fn random_launches_through_the_driver_lie_within_the_bounds() {
    over_emulated_driver(
        "random_launches_through_the_driver_lie_within_the_bounds",
        &[],
        || {
            let mut executor = CudaExecutor::new(compiled()).unwrap();
            let limits = Limits {
                specialisations: 4,
                ..Limits::small()
            };
            for seed in 0..8 {
                let case = Case::random(seed, &limits);
                let mode = executor.modes(&case)[seed as usize].clone();
                judge(&mut executor, &case, &mode).unwrap();
            }
        },
    );
}

#[test]
fn c34_a_capture_holds_one_kernel_node_and_survives_what_happens_meanwhile() {
    over_emulated_driver(
        "c34_a_capture_holds_one_kernel_node_and_survives_what_happens_meanwhile",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            let placed = Placed::new(case(3, 1));
            let prepared = placed.prepare(&device, stream, &kernels);
            let dropped = placed.prepare(&device, stream, &kernels);
            let step = placed.step();
            let before = counts();

            begin(stream, GLOBAL);
            run(&prepared, stream, &step).unwrap();
            // A step that nothing was prepared for.
            let mut unknown = step;
            unknown.kind = StepKind::Verify(7);
            let error = run(&prepared, stream, &unknown).unwrap_err();
            assert!(matches!(error, Error::PolicyMissing { .. }), "{error}");
            // A bad operand.
            let mut bad = step;
            bad.out.buffer.elements = 1;
            let error = run(&prepared, stream, &bad).unwrap_err();
            assert!(matches!(error, Error::TooShort { .. }), "{error}");
            // Preparing on the captured stream, and asking for faults.
            let config = placed.config();
            let kinds = [placed::kind(&placed.case)];
            let policies = Policies::for_device(device.arch(), &config, &kinds);
            let refused =
                PreparedKda::prepare_caches(&device, stream, &config, &policies, &kernels);
            assert!(matches!(refused.err(), Some(Error::Capturing)));
            assert!(matches!(
                prepared.take_faults(stream),
                Err(Error::Capturing)
            ));
            assert_eq!(prepared.peek_faults(), None);
            // Another object goes, and another thread prepares on a stream of its own.
            drop(dropped);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    cuda::current_device().unwrap();
                    let other = cuda::new_stream().unwrap();
                    placed.prepare(&device, other, &kernels);
                });
            });
            let (nodes, graph) = end(stream);
            assert_eq!(nodes, 1);

            let after = counts();
            assert_eq!(after.kernels, before.kernels, "a capture runs nothing");
            replay(graph, stream);
            assert_eq!(counts().kernels, before.kernels + 1);
            placed.judge();
        },
    );
}

#[test]
fn c14_a_replay_reads_the_slots_and_counts_of_its_own_time() {
    over_emulated_driver(
        "c14_a_replay_reads_the_slots_and_counts_of_its_own_time",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            // The same problem with its slots elsewhere, and other counts.
            let first = case(5, 3);
            let mut second = first.reslot(&mut kda_tests::rng::Rng::new(9));
            let counts = second.accepted.as_mut().unwrap();
            counts.iter_mut().for_each(|count| *count = 1 + *count % 3);
            assert_ne!(
                (&first.slots, &first.accepted),
                (&second.slots, &second.accepted)
            );

            let placed = Placed::new(first);
            let prepared = placed.prepare(&device, stream, &kernels);
            for _ in 0..2 {
                run(&prepared, stream, &placed.step()).unwrap();
            }
            begin(stream, GLOBAL);
            run(&prepared, stream, &placed.step()).unwrap();
            let (_, graph) = end(stream);

            // Everything in the same buffers is another batch's.
            let other = Placed {
                buffers: Buffers::new(&second),
                case: second,
                memory: placed.memory,
            };
            other.upload(&other.buffers);
            replay(graph, stream);
            other.judge();
            let replayed = other.after();
            other.upload(&other.buffers);
            run(&prepared, stream, &other.step()).unwrap();
            assert_eq!(other.after(), replayed);
        },
    );
}

#[test]
fn c02_run_allocates_loads_and_waits_for_nothing_and_copies_no_pool() {
    over_emulated_driver(
        "c02_run_allocates_loads_and_waits_for_nothing_and_copies_no_pool",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            let placed = Placed::new(case(11, 1));
            let prepared = placed.prepare(&device, stream, &kernels);
            let step = placed.step();
            run(&prepared, stream, &step).unwrap();
            placed.judge();
            let before = counts();
            for _ in 0..3 {
                run(&prepared, stream, &step).unwrap();
                assert_eq!(prepared.peek_faults(), None);
            }
            let expected = Counts {
                kernels: before.kernels + 3,
                ..before
            };
            assert_eq!(counts(), expected);
        },
    );
}

#[test]
fn columns_in_any_order_and_buffers_of_their_own_give_the_same_bits() {
    over_emulated_driver(
        "columns_in_any_order_and_buffers_of_their_own_give_the_same_bits",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            for case in [case(31, 2), case(31, 2).with_projected_gate()] {
                let projected_gate = case.projected_gate();
                let placed = Placed::new(case);
                let prepared = placed.prepare(&device, stream, &kernels);
                run(&prepared, stream, &placed.step()).unwrap();
                placed.judge();
                let expected = placed.after();

                let shape = &placed.case.shape;
                let (heads, dim, rows) = (shape.heads, shape.dim(), shape.rows());
                let standard = ProjectionLayout::standard(heads);
                // Beta and F_A, or a projected gate, before q, k, v, with gaps; the output gate in a
                // buffer of its own.
                let column = Some(5 + heads);
                let layout = ProjectionLayout {
                    beta: 3,
                    f_a: column.filter(|_| !projected_gate),
                    gate_input: column.filter(|_| projected_gate),
                    qkv: 12 + heads + dim,
                    ..standard
                };
                let (pitch, gate_pitch) = (layout.qkv + 3 * dim + 9, dim + 1);
                let mut packed = vec![kda_tests::POISON_BF16; rows * pitch];
                let mut gates = vec![kda_tests::POISON_BF16; rows * gate_pitch];
                for row in 0..rows {
                    let from = row * shape.pitch;
                    let mut copy = |to: usize, column: usize, width: usize| {
                        for i in 0..width {
                            packed[row * pitch + to + i] =
                                placed.buffers.projected.bf16(from + column + i).to_bits();
                        }
                    };
                    copy(layout.beta, standard.beta, heads);
                    if let Some(f_a) = layout.f_a {
                        copy(f_a, 4 * dim, 128);
                    }
                    copy(layout.qkv, 0, 3 * dim);
                    if let (Some(at), Some(gate)) = (layout.gate_input, &placed.buffers.gate_input)
                    {
                        for i in 0..dim {
                            let g = gate.bf16(row * shape.gate_stride + i);
                            packed[row * pitch + at + i] = g.to_bits();
                        }
                    }
                    for i in 0..dim {
                        let gate = placed
                            .buffers
                            .projected
                            .bf16(from + standard.output_gate + i);
                        gates[row * gate_pitch + i] = gate.to_bits();
                    }
                }
                let upload = |values: &[u16]| {
                    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                    let memory = DeviceMemory::new(bytes.len()).unwrap();
                    memory.upload(0, &bytes).unwrap();
                    memory
                };
                let (packed_memory, gate_memory) = (upload(&packed), upload(&gates));
                placed.upload(&placed.buffers);
                let mut step = placed.step();
                step.projected = Projected::with_layout(
                    Buffer::new(packed_memory.address, packed.len()),
                    pitch as i64,
                    &layout,
                );
                step.projected.output_gate = Rows {
                    buffer: Buffer::new(gate_memory.address, gates.len()),
                    stride: gate_pitch as i64,
                };
                run(&prepared, stream, &step).unwrap();
                assert!(placed.after() == expected, "the bits differ");
            }
        },
    );
}

#[test]
fn c44_operands_and_contexts_of_two_devices_are_kept_apart() {
    over_emulated_driver(
        "c44_operands_and_contexts_of_two_devices_are_kept_apart",
        &[
            ("KDA_EMULATED_DEVICES", "2"),
            ("KDA_EMULATED_CAPABILITY", "9.0,8.0"),
        ],
        || {
            let kernels = compiled();
            let mut sides = Vec::new();
            for ordinal in 0..2 {
                let device = Device::primary(ordinal).unwrap();
                let mut context = ptr::null_mut();
                // SAFETY: the driver is initialised, the pointer is to a local.
                unsafe {
                    let retained = sys::cuDevicePrimaryCtxRetain(&mut context, ordinal);
                    check("cuDevicePrimaryCtxRetain", retained).unwrap();
                    check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context)).unwrap();
                }
                let stream = cuda::new_stream().unwrap();
                let placed = Placed::new(case(20 + ordinal as u64, 1));
                let prepared = placed.prepare(&device, stream, &kernels);
                sides.push((context, stream, placed, prepared));
            }
            assert_eq!(sides[0].3.kernels()[0].spec.arch.to_string(), "sm_90a");
            assert_eq!(sides[1].3.kernels()[0].spec.arch.to_string(), "sm_80");

            let current = || {
                let mut context = ptr::null_mut();
                // SAFETY: the pointer is to a local.
                check("cuCtxGetCurrent", unsafe {
                    sys::cuCtxGetCurrent(&mut context)
                })
                .unwrap();
                context
            };
            // Device 1 is current, and stays so, whichever device launches.
            for (_, stream, placed, prepared) in &sides {
                run(prepared, *stream, &placed.step()).unwrap();
                assert_eq!(current(), sides[1].0);
            }
            for (context, _, placed, _) in &sides {
                // SAFETY: the context is live.
                check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(*context) }).unwrap();
                placed.judge();
            }

            // One operand of the other device, each in turn.
            let foreign = sides[1].2.memory.address("state_pool");
            let step = sides[0].2.step();
            type Change = fn(&mut Step, u64);
            let changes: [(&str, Change); 6] = [
                ("qkv", |step, at| step.projected.qkv.buffer.address = at),
                ("f_b", |step, at| step.weights.f_b.address = at),
                ("conv_cache", |step, at| step.conv_cache.buffer.address = at),
                ("state_pool", |step, at| step.state.buffer.address = at),
                ("slots", |step, at| step.slots.buffer.address = at),
                ("out", |step, at| step.out.buffer.address = at),
            ];
            let launched = counts().kernels;
            // A stream of the other device.
            let error = run(&sides[0].3, sides[1].1, &step).unwrap_err();
            assert!(matches!(error, Error::Cuda { code: 201, .. }), "{error}");
            for (operand, change) in changes {
                let mut step = step;
                change(&mut step, foreign);
                let error = run(&sides[0].3, sides[0].1, &step).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    format!(
                        "{operand} at {foreign:#x} is memory of device 1, the step runs on device 0"
                    )
                );
            }
            assert_eq!(counts().kernels, launched, "nothing was launched");

            // A thread that never touched CUDA.
            let (sender, receiver) = mpsc::channel();
            std::thread::scope(|scope| {
                let (_, stream, placed, prepared) = &sides[0];
                // A raw stream is a pointer; the driver takes it from any thread.
                let (stream, step) = (*stream as usize, placed.step());
                scope.spawn(move || {
                    let ran = run(prepared, stream as Stream, &step).is_ok();
                    let mut other = step;
                    // An address never seen, which only the driver can place.
                    other.weights.norm.address = foreign + 512;
                    let refused = run(prepared, stream as Stream, &other);
                    let refused = matches!(refused, Err(Error::OtherDevice { .. }));
                    sender.send((ran, refused, current().is_null())).unwrap();
                });
            });
            assert_eq!(receiver.recv().unwrap(), (true, true, true));
        },
    );
}

/// What the emulated driver promises of its own accord.
#[test]
fn the_driver_fails_what_is_at_fault_and_everything_after() {
    over_emulated_driver(
        "the_driver_fails_what_is_at_fault_and_everything_after",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            let fresh = DeviceMemory::new(8).unwrap();
            let mut bytes = [0; 8];
            fresh.download(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0xff; 8]);

            // An allocation inside a capture ends it.
            begin(stream, GLOBAL);
            assert!(DeviceMemory::new(8).is_err());
            let mut graph = ptr::null_mut();
            // SAFETY: the stream is live, the pointer is to a local.
            let ended = unsafe { sys::cuStreamEndCapture(stream, &mut graph) };
            assert_eq!(ended, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

            // Memory one element shorter than the caller says.
            let placed = Placed::new(case(41, 1));
            let prepared = placed.prepare(&device, stream, &kernels);
            let mut step = placed.step();
            let short = DeviceMemory::new(2 * step.out.buffer.elements - 2).unwrap();
            step.out.buffer.address = short.address;
            let error = run(&prepared, stream, &step).unwrap_err();
            assert!(matches!(error, Error::Cuda { code: 700, .. }), "{error}");
            let said = last_error();
            assert!(said.contains("a write beside allocation"), "{said}");
            let error = run(&prepared, stream, &placed.step()).unwrap_err();
            assert!(matches!(error, Error::Cuda { code: 700, .. }), "{error}");
            assert!(DeviceMemory::new(8).is_err());
        },
    );
}

#[test]
fn c40_a_text_newer_than_the_driver_and_a_missing_entry_are_named() {
    over_emulated_driver(
        "c40_a_text_newer_than_the_driver_and_a_missing_entry_are_named",
        &[],
        || {
            struct Altered(KernelCache, fn(&mut kda_runtime::Kernel));
            impl kda_runtime::Kernels for Altered {
                fn kernel(
                    &self,
                    spec: &kda_codegen::KernelSpec,
                ) -> Result<kda_runtime::Kernel, Error> {
                    let mut kernel = kda_runtime::Kernels::kernel(&self.0, spec)?;
                    (self.1)(&mut kernel);
                    Ok(kernel)
                }
            }
            let device = cuda::current_device().unwrap();
            let stream = cuda::new_stream().unwrap();
            let config = Config::kimi_k3(1);
            let kinds = [StepKind::Decode];
            let policies = Policies::for_device(device.arch(), &config, &kinds);
            let prepare = |alter: fn(&mut kda_runtime::Kernel)| {
                let kernels = Altered(compiled(), alter);
                PreparedKda::prepare_caches(&device, stream, &config, &policies, &kernels)
                    .err()
                    .unwrap()
                    .to_string()
            };
            let newer = prepare(|kernel| {
                let text = String::from_utf8(kernel.cubin.clone()).unwrap();
                let line = text.lines().find(|l| l.starts_with(".version")).unwrap();
                kernel.cubin = text.replace(line, ".version 19.9").into_bytes();
            });
            assert!(
                newer.contains("compiled by nvrtc 13.")
                    && newer.contains("this driver (CUDA 13.0) does not take: update the driver"),
                "{newer}"
            );
            let missing = prepare(|kernel| kernel.entry = "kda_other".into());
            assert!(missing.contains("cuModuleGetFunction"), "{missing}");
            let cubin = prepare(|kernel| kernel.cubin = b"\x7fELF and so on".to_vec());
            assert!(cubin.contains("cuModuleLoadData"), "{cubin}");
        },
    );
}

#[test]
fn c43_weights_written_in_place_are_seen_by_graphs() {
    over_emulated_driver(
        "c43_weights_written_in_place_are_seen_by_graphs",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            let mut placed = Placed::new(case(31, 1));
            let prepared = placed.prepare(&device, stream, &kernels);
            begin(stream, GLOBAL);
            run(&prepared, stream, &placed.step()).unwrap();
            let (_, graph) = end(stream);
            replay(graph, stream);
            placed.judge();
            let old = placed.after();

            // A refit: the same problem with every weight another, written where the old ones were.
            let addresses = placed.step();
            let data = std::sync::Arc::make_mut(&mut placed.case.data);
            let weights = [
                &mut data.conv_weight,
                &mut data.a_log,
                &mut data.dt_bias,
                &mut data.norm,
            ];
            for weight in weights {
                weight.iter_mut().for_each(|w| *w = 0.5 * *w + 0.125);
            }
            data.f_b.reverse();
            placed.buffers = Buffers::new(&placed.case);
            let before = counts();
            placed.upload(&placed.buffers);
            replay(graph, stream);
            placed.judge();
            assert_ne!(old.out, placed.after().out);
            // Nothing is prepared from weights, so nothing was prepared again or moved.
            let after = counts();
            assert_eq!(
                (after.allocations, after.module_loads, after.kernels),
                (before.allocations, before.module_loads, before.kernels + 1)
            );
            assert_eq!(addresses.weights, placed.step().weights);
        },
    );
}

#[test]
fn a_soak_replays_graphs_on_two_streams() {
    over_emulated_driver("a_soak_replays_graphs_on_two_streams", &[], || {
        let kernels = compiled();
        std::thread::scope(|scope| {
            // The same world twice: each kernel is compiled once.
            for _ in 0..2 {
                let kernels = &kernels;
                scope.spawn(move || {
                    let mut world = World::new(3, 1);
                    let mut executor = ReplayExecutor::new(kernels, &world).unwrap();
                    let served = serve(&mut world, &mut executor, |tally| tally.steps < 12);
                    let tally = served.unwrap_or_else(|mismatch| panic!("{mismatch}"));
                    assert_eq!((tally.steps, executor.replays), (12, 12));
                });
            }
        });
    });
}

#[test]
fn c31_a_reset_is_one_node_that_reads_its_table_at_replay() {
    over_emulated_driver(
        "c31_a_reset_is_one_node_that_reads_its_table_at_replay",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            let placed = Placed::new(case(41, 1));
            let shape = placed.case.shape;
            let config = placed.config();
            let prepared = PreparedReset::prepare(&device, stream, &config, &kernels).unwrap();
            let step = placed.step();
            let reset = Reset {
                requests: 2,
                slots: step.slots,
                conv_cache: step.conv_cache,
                state: step.state,
                pool_slots: step.pool_slots,
            };
            let run = |reset: &Reset| {
                // SAFETY: the operands are `Placed` allocations, which outlive the launch.
                unsafe { prepared.run(stream, reset) }
            };
            let before = counts();
            begin(stream, GLOBAL);
            run(&reset).unwrap();
            let mut bad = reset;
            bad.pool_slots += 1;
            let error = run(&bad).unwrap_err();
            assert!(matches!(error, Error::TooShort { .. }), "{error}");
            let refused = PreparedReset::prepare(&device, stream, &config, &kernels);
            assert!(matches!(refused.err(), Some(Error::Capturing)));
            let (nodes, graph) = end(stream);
            assert_eq!((nodes, counts().kernels), (1, before.kernels));

            // The table is another one by the time of the replay: its second slot is null now.
            let mut table = placed.case.clone();
            table.slots[shape.columns] = -1;
            let mut wanted = placed.buffers.clone();
            wanted.put_slots(&table);
            placed.upload(&wanted);
            replay(graph, stream);
            let slot = table.slots[0] as usize;
            wanted.put_states(&shape, slot, &vec![0.0; shape.heads * kda_tests::MATRIX]);
            for channel in 0..3 * shape.dim() {
                for position in 0..shape.conv_len {
                    let index = shape.conv_index(slot, channel, position);
                    wanted.conv_cache.set_bf16(index, half::bf16::ZERO);
                }
            }
            let after = placed.after();
            assert_eq!(wanted.state, after.state);
            assert_eq!(wanted.conv_cache, after.conv_cache);
            assert_eq!(wanted.out, after.out);
            assert_eq!(counts().allocations, before.allocations);
        },
    );
}

#[test]
fn operands_may_move_between_preparing_and_running() {
    over_emulated_driver(
        "operands_may_move_between_preparing_and_running",
        &[],
        || {
            let device = cuda::current_device().unwrap();
            let (stream, kernels) = (cuda::new_stream().unwrap(), compiled());
            let first = Placed::new(case(51, 1));
            let prepared = first.prepare(&device, stream, &kernels);
            // Caches bound anew: other addresses, strides, line lengths; nothing of the first is kept.
            for seed in 0..4 {
                let mut rng = kda_tests::rng::Rng::new(seed);
                let moved = Placed::new(first.case.restride(8 << 20, &mut rng).reslot(&mut rng));
                run(&prepared, stream, &moved.step()).unwrap();
                moved.judge();
            }
            assert_eq!(first.after(), first.buffers);
            run(&prepared, stream, &first.step()).unwrap();
            first.judge();
        },
    );
}
