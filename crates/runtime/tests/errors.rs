//! Every operand that does not fit gives its error and text before anything is launched.

mod support;

use kda_codegen::{Arch, GateInput, KernelSpec, Mode};
use kda_runtime::{
    Buffer, Config, Error, Gate, Plan, Policies, Policy, ProjectionLayout, RecordPool, Rollback,
    Rows, StatePool, Step, StepKind,
};
use support::*;

const VERIFY: StepKind = StepKind::Verify(2);

fn plan() -> Plan {
    plan_of(&Config::kimi_k3(HEADS))
}

fn plan_of(config: &Config) -> Plan {
    let kinds = [StepKind::Decode, VERIFY];
    let mut policies = Policies::single(&kinds, Mode::default());
    policies
        .0
        .iter_mut()
        .for_each(|policy| policy.max_requests = 16);
    Plan::new(Arch::Sm90a, config, &policies).unwrap()
}

/// The text of the error that a change to a valid step causes.
fn text(kind: StepKind, change: impl FnOnce(&mut Step)) -> String {
    let mut step = step(kind);
    change(&mut step);
    plan()
        .step(&step, 64)
        .expect_err("the step is refused")
        .to_string()
}

fn decode(change: impl FnOnce(&mut Step)) -> String {
    text(StepKind::Decode, change)
}

#[test]
fn valid_steps_are_planned() {
    for kind in [StepKind::Decode, VERIFY] {
        let planned = plan().step(&step(kind), 64).unwrap().unwrap();
        assert_eq!(planned.launch.grid, [HEADS as u32, 3, 1]);
        assert_eq!(planned.arguments.geometry.requests, 3);
    }
}

#[test]
fn no_requests_launch_nothing() {
    let mut empty = step(StepKind::Decode);
    empty.requests = 0;
    empty.out.buffer.address = 0;
    assert!(plan().step(&empty, 64).unwrap().is_none());
}

#[test]
fn policies_are_listed() {
    let policy = |max_requests, threads| Policy {
        kind: StepKind::Decode,
        max_requests,
        mode: Mode {
            threads,
            ..Mode::default()
        },
    };
    let policies = Policies(vec![policy(64, 256), policy(4, 512), policy(16, 256)]);
    let plan = Plan::new(Arch::Sm90a, &Config::kimi_k3(HEADS), &policies).unwrap();
    let listed: Vec<_> = plan.policies().collect();
    let decode = StepKind::Decode;
    assert_eq!(listed, [(decode, 4, 1), (decode, 16, 0), (decode, 64, 0)]);
    assert_eq!(plan.kernels().len(), 2);
}

#[test]
fn missing_operands() {
    type Change = fn(&mut Step);
    let cases: [(&str, Change); 14] = [
        ("qkv", |s| s.projected.qkv.buffer.address = 0),
        ("output_gate", |s| {
            s.projected.output_gate.buffer.address = 0
        }),
        ("f_a", |s| s.projected.f_a.buffer.address = 0),
        ("beta", |s| s.projected.beta.buffer.address = 0),
        ("out", |s| s.out.buffer.address = 0),
        ("conv_weight", |s| s.weights.conv.address = 0),
        ("f_b", |s| s.weights.f_b.address = 0),
        ("a_log", |s| s.weights.a_log.address = 0),
        ("dt_bias", |s| s.weights.dt_bias.address = 0),
        ("norm", |s| s.weights.norm.address = 0),
        ("slots", |s| s.slots.buffer.address = 0),
        ("conv_cache", |s| s.conv_cache.buffer.address = 0),
        ("state_pool", |s| s.state.buffer.address = 0),
        ("state_source", |s| {
            s.state_source = Some(StatePool {
                buffer: Buffer::new(0, 1 << 30),
                ..s.state
            })
        }),
    ];
    for (name, change) in cases {
        assert_eq!(decode(change), format!("{name} has address 0"));
    }
    assert_eq!(
        text(VERIFY, |s| s.accepted = None),
        "accepted has address 0"
    );
}

#[test]
fn unexpected_operands() {
    assert_eq!(
        decode(|s| s.accepted = Some(Buffer::new(at(10), 3))),
        "accepted was given, but the step is a decode step"
    );
    assert_eq!(
        decode(|s| s.weights.conv_bias = Some(Buffer::new(at(12), 3 * DIM))),
        "conv_bias was given, but the configuration has no conv bias"
    );
}

#[test]
fn short_operands() {
    type Change = fn(&mut Step);
    let cases: [(&str, usize, Change); 13] = [
        ("qkv", 2 * PITCH + 3 * DIM, |s| {
            s.projected.qkv.buffer.elements = 2 * PITCH + 3 * DIM - 1
        }),
        ("output_gate", 2 * PITCH + DIM, |s| {
            s.projected.output_gate.buffer.elements = 2 * PITCH + DIM - 1
        }),
        ("f_a", 2 * PITCH + 128, |s| {
            s.projected.f_a.buffer.elements = 2 * PITCH + 127
        }),
        ("beta", 2 * PITCH + HEADS, |s| {
            s.projected.beta.buffer.elements = 2 * PITCH + HEADS - 1
        }),
        ("out", 3 * DIM, |s| s.out.buffer.elements -= 1),
        ("conv_weight", 12 * DIM, |s| s.weights.conv.elements -= 1),
        ("f_b", 128 * DIM, |s| s.weights.f_b.elements -= 1),
        ("a_log", HEADS, |s| s.weights.a_log.elements -= 1),
        ("dt_bias", DIM, |s| s.weights.dt_bias.elements -= 1),
        ("norm", 128, |s| s.weights.norm.elements -= 1),
        ("slots", 3, |s| s.slots.buffer.elements -= 1),
        ("conv_cache", SLOTS * 9 * DIM, |s| {
            s.conv_cache.buffer.elements -= 1
        }),
        ("state_pool", SLOTS * 128 * DIM, |s| {
            s.state.buffer.elements -= 1
        }),
    ];
    for (name, needed, change) in cases {
        let found = needed - 1;
        assert_eq!(
            decode(change),
            format!("{name} holds {found} elements, {needed} needed")
        );
    }
    let short = |s: &mut Step| s.accepted.as_mut().unwrap().elements = 2;
    assert_eq!(text(VERIFY, short), "accepted holds 2 elements, 3 needed");
    assert_eq!(
        text(VERIFY, |s| s.slots.buffer.elements = 5),
        "slots holds 5 elements, 6 needed"
    );
}

#[test]
fn narrow_strides() {
    type Change = fn(&mut Step);
    let cases: [(&str, usize, Change); 8] = [
        ("qkv", 3 * DIM, |s| {
            s.projected.qkv.stride = 3 * DIM as i64 - 1
        }),
        ("output_gate", DIM, |s| {
            s.projected.output_gate.stride = DIM as i64 - 1
        }),
        ("f_a", 128, |s| s.projected.f_a.stride = 127),
        ("beta", HEADS, |s| {
            s.projected.beta.stride = HEADS as i64 - 1
        }),
        ("out", DIM, |s| s.out.stride -= 1),
        ("slots", 1, |s| s.slots.stride = 0),
        ("conv_cache", 9 * DIM, |s| s.conv_cache.slot_stride -= 1),
        ("state_pool", 128 * DIM, |s| s.state.slot_stride -= 1),
    ];
    for (name, needed, change) in cases {
        let found = needed - 1;
        assert_eq!(
            decode(change),
            format!("{name} has a stride of {found} elements, {needed} needed")
        );
    }
    assert_eq!(
        decode(|s| s.out.stride = -512),
        "out has a stride of -512 elements, 256 needed"
    );
    assert_eq!(
        decode(|s| s.out.stride = i64::MAX),
        format!("out holds 768 elements, {} needed", usize::MAX)
    );
}

#[test]
fn misaligned_operands() {
    type Change = fn(&mut Step);
    let cases: [(&str, u64, usize, Change); 9] = [
        ("out", at(11) + 1, 2, |s| s.out.buffer.address += 1),
        ("qkv", at(1) + 1, 2, |s| s.projected.qkv.buffer.address += 1),
        ("conv_weight", at(2) + 2, 4, |s| s.weights.conv.address += 2),
        ("f_b", at(3) + 8, 16, |s| s.weights.f_b.address += 8),
        ("a_log", at(4) + 2, 4, |s| s.weights.a_log.address += 2),
        ("slots", at(9) + 2, 4, |s| s.slots.buffer.address += 2),
        ("conv_cache", at(7) + 1, 2, |s| {
            s.conv_cache.buffer.address += 1
        }),
        ("state_pool", at(8) + 4, 16, |s| s.state.buffer.address += 4),
        ("state_pool", 4 * (128 * DIM as u64 + 2), 16, |s| {
            s.state.slot_stride += 2;
            s.state.buffer.elements *= 2;
        }),
    ];
    for (name, value, alignment, change) in cases {
        assert_eq!(
            decode(change),
            format!("{name} is at {value:#x}, which is not a multiple of {alignment} bytes")
        );
    }
}

/// A plan of kernels that read a projected gate input.
fn projected_plan() -> Plan {
    plan_of(&Config {
        gate_input: GateInput::Projected,
        ..Config::kimi_k3(HEADS)
    })
}

/// A valid step of such a plan; the gate's rows lie five elements apart.
fn projected_step(kind: StepKind) -> Step {
    let mut step = step(kind);
    let rows = step.requests * kind.tokens();
    step.weights.f_b = Buffer::default();
    step.projected = step.projected.with_gate_input(Rows {
        buffer: Buffer::new(at(13), (rows - 1) * (DIM + 5) + DIM),
        stride: DIM as i64 + 5,
    });
    step
}

#[test]
fn a_projected_gate_takes_the_place_of_f_a_and_f_b() {
    for kind in [StepKind::Decode, VERIFY] {
        let planned = projected_plan().step(&projected_step(kind), 64);
        let arguments = planned.unwrap().unwrap().arguments;
        assert_eq!((arguments.f_a, arguments.f_b), (0, 0));
        assert_eq!(arguments.gate_input, at(13));
        assert_eq!(arguments.geometry.gate_input_pitch, DIM as i64 + 5);
    }
    let low_rank = plan().step(&step(StepKind::Decode), 64).unwrap().unwrap();
    assert_eq!(low_rank.arguments.gate_input, 0);

    // A packed projection whose rows hold the gate where others hold F_A.
    let layout = ProjectionLayout {
        f_a: None,
        gate_input: Some(4 * DIM),
        beta: 5 * DIM,
        ..ProjectionLayout::standard(HEADS)
    };
    let pitch = 5 * DIM + HEADS;
    let mut packed = projected_step(StepKind::Decode);
    let buffer = Buffer::new(at(1), 3 * pitch);
    packed.projected = kda_runtime::Projected::with_layout(buffer, pitch as i64, &layout);
    let arguments = projected_plan()
        .step(&packed, 64)
        .unwrap()
        .unwrap()
        .arguments;
    assert_eq!(arguments.gate_input, at(1) + 2 * 4 * DIM as u64);
    assert_eq!(arguments.geometry.gate_input_pitch, pitch as i64);
    assert_eq!(arguments.f_a, 0);
}

#[test]
fn a_projected_gate_that_does_not_fit_is_named() {
    type Change = fn(&mut Step);
    let plan = projected_plan();
    let cases: [(&str, Change); 7] = [
        (
            "f_b was given, but the configuration has a projected gate",
            |s| s.weights.f_b = Buffer::new(at(3), DIM * 128),
        ),
        (
            "f_a was given, but the configuration has a projected gate",
            |s| s.projected.f_a = s.projected.beta,
        ),
        ("gate_input has address 0", |s| {
            s.projected.gate_input.buffer.address = 0
        }),
        ("gate_input has a stride of 255 elements, 256 needed", |s| {
            s.projected.gate_input.stride = DIM as i64 - 1
        }),
        ("gate_input holds 777 elements, 778 needed", |s| {
            s.projected.gate_input.buffer.elements -= 1
        }),
        (
            "gate_input is at 0xd00000001, which is not a multiple of 2 bytes",
            |s| s.projected.gate_input.buffer.address += 1,
        ),
        ("out is written and shares memory with gate_input", |s| {
            s.projected.gate_input.buffer.address = at(11) + 2 * 3 * DIM as u64 - 2
        }),
    ];
    for (text, change) in cases {
        let mut step = projected_step(StepKind::Decode);
        change(&mut step);
        let error = plan.step(&step, 64).expect_err(text);
        assert_eq!(error.to_string(), text);
    }
    assert_eq!(
        decode(|s| s.projected.gate_input = s.projected.output_gate),
        "gate_input was given, but the configuration has a low-rank gate"
    );
}

#[test]
fn a_projected_gate_is_not_shared_by_a_cluster() {
    let mut spec = KernelSpec::new(Arch::Sm90a, HEADS);
    spec.gate_input = GateInput::Projected;
    spec.mode = "split4-128x8-cluster-hints".parse().unwrap();
    assert_eq!(
        spec.validate().unwrap_err().to_string(),
        "gate_schedule is cluster, allowed: block with a projected gate"
    );
    spec.mode = spec.mode.with_gate_input(GateInput::Projected);
    assert_eq!(spec.mode.to_string(), "split4-128x8-block-hints");
    spec.validate().unwrap();
}

#[test]
fn counts() {
    assert_eq!(
        decode(|s| s.pool_slots = 1 << 31),
        "pool_slots is 2147483648, at most 2147483647 allowed"
    );
    assert_eq!(
        text(VERIFY, |s| s.slots.columns = 1),
        "slots has 1 columns, 2 needed"
    );
    assert_eq!(
        decode(|s| s.conv_cache.length = 2),
        "conv_cache has 2 positions a line, 3 needed"
    );
    assert_eq!(
        text(VERIFY, |s| s.conv_cache.length = 3),
        "conv_cache has 3 positions a line, 4 needed"
    );
}

#[test]
fn steps_that_were_not_prepared() {
    assert_eq!(
        text(StepKind::Verify(3), |_| {}),
        "no verify 3 kernel is prepared, 3 requests asked for one"
    );
    assert_eq!(
        decode(|s| s.requests = 17),
        "decode kernels are prepared up to 16 requests, 17 asked for one"
    );
    assert!(matches!(
        plan().step(&step(StepKind::Verify(99)), 64),
        Err(Error::PolicyMissing {
            kind: StepKind::Verify(99),
            requests: 3,
            prepared: 0
        })
    ));
}

#[test]
fn overlapping_operands() {
    type Change = fn(&mut Step);
    let cases: [(&str, &str, Change); 10] = [
        ("out", "qkv", |s| s.out.buffer.address = at(1) + 2),
        ("out", "output_gate", |s| {
            s.out.buffer.address = s.projected.output_gate.buffer.address - 2
        }),
        ("out", "f_a", |s| s.projected.f_a.buffer.address = at(11)),
        ("out", "beta", |s| {
            s.projected.beta.buffer.address = at(11) + 512
        }),
        ("out", "conv_cache", |s| {
            s.out.buffer.address = at(7) + 2 * (SLOTS * 9 * DIM) as u64 - 2
        }),
        ("out", "state_pool", |s| s.out.buffer.address = at(8) - 2),
        ("state_pool", "conv_cache", |s| {
            s.conv_cache.buffer.address = at(8) + 1024
        }),
        ("out", "state_source", |s| {
            s.state_source = Some(StatePool {
                buffer: Buffer::new(at(11), 1 << 30),
                ..s.state
            });
        }),
        ("conv_cache", "state_source", |s| {
            s.state_source = Some(StatePool {
                buffer: Buffer::new(at(7), 1 << 30),
                ..s.state
            });
        }),
        ("state_pool", "state_source", |s| {
            s.state_source = Some(StatePool {
                buffer: Buffer::new(at(8) + 16, 1 << 30),
                ..s.state
            });
        }),
    ];
    for (written, other, change) in cases {
        // `out` in the packed projection may meet its neighbour first.
        let text = decode(change);
        let wanted = format!("{written} is written and shares memory with {other}");
        let neighbour = format!("{written} is written and shares memory with qkv");
        assert!(
            text == wanted || other == "output_gate" && text == neighbour,
            "{text}, {wanted}"
        );
    }
}

/// Nothing that a step writes may lie over anything that it reads.
#[test]
fn written_operands_lie_apart_from_every_other() {
    type Place = fn(&mut Step, u64);
    let reads: [(&str, Place); 11] = [
        ("qkv", |s, a| s.projected.qkv.buffer.address = a),
        ("output_gate", |s, a| {
            s.projected.output_gate.buffer.address = a
        }),
        ("f_a", |s, a| s.projected.f_a.buffer.address = a),
        ("beta", |s, a| s.projected.beta.buffer.address = a),
        ("conv_weight", |s, a| s.weights.conv.address = a),
        ("f_b", |s, a| s.weights.f_b.address = a),
        ("a_log", |s, a| s.weights.a_log.address = a),
        ("dt_bias", |s, a| s.weights.dt_bias.address = a),
        ("norm", |s, a| s.weights.norm.address = a),
        ("slots", |s, a| s.slots.buffer.address = a),
        ("accepted", |s, a| s.accepted.as_mut().unwrap().address = a),
    ];
    let good = step(VERIFY);
    plan().step(&good, 64).unwrap();
    for (written, start) in [
        ("out", good.out.buffer.address),
        ("state_pool", good.state.buffer.address),
        ("conv_cache", good.conv_cache.buffer.address),
    ] {
        for (read, place) in reads {
            let mut bad = good;
            place(&mut bad, start);
            let error = plan().step(&bad, 64).map(|_| ()).unwrap_err();
            let wanted = format!("{written} is written and shares memory with {read}");
            assert_eq!(error.to_string(), wanted);
        }
    }
}

#[test]
fn pools_may_interleave() {
    // A page holds a state and a conv line: one stride spans both.
    let mut paged = step(StepKind::Decode);
    let (state, line) = (DIM * 128 * 4, 9 * DIM * 2);
    let page = state + line;
    paged.state.slot_stride = (page / 4) as i64;
    paged.state.buffer.elements = SLOTS * page / 4;
    paged.conv_cache.buffer = Buffer::new(at(8) + state as u64, SLOTS * page / 2);
    paged.conv_cache.slot_stride = (page / 2) as i64;
    assert!(plan().step(&paged, 64).unwrap().is_some());
    paged.conv_cache.buffer.address -= 2;
    assert!(matches!(
        plan().step(&paged, 64),
        Err(Error::Overlap { .. })
    ));
    // The same pool twice is an update in place.
    let mut twice = step(StepKind::Decode);
    twice.state_source = Some(twice.state);
    assert!(plan().step(&twice, 64).unwrap().is_some());
}

#[test]
fn settings() {
    let refused = |change: fn(&mut Config)| {
        let mut config = Config::kimi_k3(HEADS);
        change(&mut config);
        let policies = Policies::single(&[StepKind::Decode], Mode::default());
        Plan::new(Arch::Sm90a, &config, &policies)
            .expect_err("refused")
            .to_string()
    };
    assert_eq!(
        refused(|c| c.eps = 0.0),
        "eps is 0, allowed: finite and above 0"
    );
    assert_eq!(
        refused(|c| c.scale = f32::NAN),
        "scale is NaN, allowed: finite and not 0"
    );
    assert_eq!(
        refused(|c| c.gate = Gate::LowerBound(0.0)),
        "lower bound is 0, allowed: finite and below 0"
    );
    assert_eq!(
        refused(|c| c.scale = 0.0),
        "scale is 0, allowed: finite and not 0"
    );
    assert_eq!(refused(|c| c.heads = 129), "heads is 129, allowed: 1..=128");
    // A policy that serves no step is a forgotten number.
    let none = Policy {
        kind: StepKind::Decode,
        max_requests: 0,
        mode: Mode::default(),
    };
    let plan = Plan::new(Arch::Sm90a, &Config::kimi_k3(HEADS), &Policies(vec![none]));
    assert_eq!(
        plan.unwrap_err().to_string(),
        "max_requests is 0, allowed: 1 and up"
    );
}

#[test]
fn errors_cross_threads() {
    fn any_thread<T: std::error::Error + Send + Sync + 'static>(_: T) {}
    any_thread(Error::DriverMissing);
    assert_eq!(
        Error::DriverMissing.to_string(),
        "the CUDA driver library was not found"
    );
    assert_eq!(
        Error::Cuda {
            call: "cuInit",
            code: 3,
            name: "CUDA_ERROR_NOT_INITIALIZED".into(),
        }
        .to_string(),
        "cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3)"
    );
    // What helps is said, and only where it is true.
    let launch = |code| {
        Error::Cuda {
            call: "cuLaunchKernelEx",
            code,
            name: "NAME".into(),
        }
        .to_string()
    };
    assert!(launch(201).ends_with("NAME (201): is it a stream of this object's context?"));
    assert!(launch(719).ends_with("an earlier launch may be at fault, and the context is lost"));
    assert!(launch(701).ends_with("with NAME (701)"));
    assert_eq!(
        Error::DeviceUnsupported { major: 7, minor: 5 }.to_string(),
        "no kernel exists for compute capability 7.5"
    );
    let older = Error::ArchUnsupported {
        arch: Arch::Sm100a,
        major: 9,
        minor: 0,
    };
    assert_eq!(
        older.to_string(),
        "compute capability 9.0 runs no kernels of sm_100a"
    );
    assert_eq!(
        Error::Capturing.to_string(),
        "the stream is being captured: prepare before, and take faults outside of captures"
    );
}

/// A verify step of two tokens that keeps three records a slot, and its plan.
fn with_records() -> (Plan, Step) {
    let config = Config {
        rollback: Rollback::Records,
        ..Config::kimi_k3(HEADS)
    };
    let kinds = [StepKind::Decode, VERIFY];
    let policies = Policies::single(&kinds, Mode::default());
    let mut step = step(VERIFY);
    step.slots.columns = 1;
    step.conv_cache.length = 6;
    step.conv_cache.slot_stride = (18 * DIM) as i64;
    step.conv_cache.buffer.elements = SLOTS * 18 * DIM;
    step.records = Some(RecordPool {
        buffer: Buffer::new(at(12), SLOTS * 9 * DIM),
        slot_stride: (9 * DIM) as i64,
        count: 3,
    });
    (Plan::new(Arch::Sm90a, &config, &policies).unwrap(), step)
}

#[test]
fn records_are_checked() {
    let (plan, valid) = with_records();
    let arguments = plan.step(&valid, 64).unwrap().unwrap().arguments;
    assert_eq!(arguments.records, at(12));
    // One more than the records may have been accepted; the table has one column.
    assert_eq!(arguments.geometry.columns, 4);
    assert_eq!(arguments.geometry.record_slot_stride, 9 * DIM as i64);
    let refused = |change: &dyn Fn(&mut Step)| {
        let mut step = valid;
        change(&mut step);
        plan.step(&step, 64).unwrap_err().to_string()
    };
    let records =
        |change: &dyn Fn(&mut RecordPool)| refused(&|step| change(step.records.as_mut().unwrap()));
    assert_eq!(refused(&|s| s.records = None), "records has address 0");
    assert_eq!(records(&|r| r.buffer.address = 0), "records has address 0");
    assert_eq!(
        records(&|r| r.count = 0),
        "records has 0 records a slot, 1 needed"
    );
    assert_eq!(
        records(&|r| r.buffer.elements -= 1),
        format!(
            "records holds {} elements, {} needed",
            SLOTS * 9 * DIM - 1,
            SLOTS * 9 * DIM
        )
    );
    assert_eq!(
        records(&|r| r.slot_stride -= 4),
        format!(
            "records has a stride of {} elements, {} needed",
            9 * DIM - 4,
            9 * DIM
        )
    );
    assert_eq!(
        records(&|r| {
            r.slot_stride += 2;
            r.buffer.elements *= 2;
        }),
        format!(
            "records is at {:#x}, which is not a multiple of 16 bytes",
            4 * (9 * DIM + 2)
        )
    );
    assert_eq!(
        records(&|r| r.buffer.address += 4),
        format!(
            "records is at {:#x}, which is not a multiple of 16 bytes",
            at(12) + 4
        )
    );
    assert_eq!(
        records(&|r| r.count = i32::MAX as usize),
        "records is 2147483647, at most 2147483646 allowed"
    );
    assert_eq!(
        refused(&|s| s.conv_cache.length = 5),
        "conv_cache has 5 positions a line, 6 needed"
    );
    for (other, address) in [
        ("out is written and shares memory with records", at(11)),
        (
            "state_pool is written and shares memory with records",
            at(8),
        ),
        (
            "records is written and shares memory with conv_cache",
            at(7),
        ),
    ] {
        assert_eq!(records(&|r| r.buffer.address = address), other);
    }
    let source = |s: &mut Step| {
        s.state_source = Some(StatePool {
            buffer: Buffer::new(at(12), s.state.buffer.elements),
            ..s.state
        });
    };
    assert_eq!(
        refused(&source),
        "records is written and shares memory with state_source"
    );
}

#[test]
fn records_belong_to_verify_steps_that_keep_them() {
    let (keeping, valid) = with_records();
    let given = |s: &mut Step| s.records = valid.records;
    assert_eq!(
        text(VERIFY, given),
        "records was given, but verify steps keep checkpoints"
    );
    let mut decode = step(StepKind::Decode);
    assert!(keeping.step(&decode, 64).unwrap().is_some());
    given(&mut decode);
    assert_eq!(
        keeping.step(&decode, 64).unwrap_err().to_string(),
        "records was given, but the step is a decode step"
    );
}

#[test]
fn token_counts_belong_to_ragged_verify_steps() {
    let config = Config {
        ragged: true,
        ..Config::kimi_k3(HEADS)
    };
    let kinds = [StepKind::Decode, VERIFY];
    let plan = Plan::new(
        Arch::Sm90a,
        &config,
        &Policies::single(&kinds, Mode::default()),
    )
    .unwrap();
    let refused = |kind, counts| {
        let mut step = step(kind);
        step.token_counts = counts;
        plan.step(&step, 64).map(|_| ()).map_err(|e| e.to_string())
    };
    let counts = Some(Buffer::new(at(13), 3));
    let error = |text: &str| Err(text.to_string());
    assert_eq!(refused(VERIFY, counts), Ok(()));
    assert_eq!(refused(StepKind::Decode, None), Ok(()));
    assert_eq!(refused(VERIFY, None), error("token_counts has address 0"));
    assert_eq!(
        refused(VERIFY, Some(Buffer::new(at(13), 2))),
        error("token_counts holds 2 elements, 3 needed")
    );
    assert_eq!(
        refused(StepKind::Decode, counts),
        error("token_counts was given, but the step is a decode step")
    );
    assert_eq!(
        text(VERIFY, |s| s.token_counts = counts),
        "token_counts was given, but the configuration is not ragged"
    );
}
