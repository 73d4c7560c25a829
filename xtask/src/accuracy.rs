//! `accuracy`: one request over thousands of decode steps against the f64 oracle, which carries its
//! own state and never rounds it: what a state in f32, and one in bf16, loses with time.

use std::error::Error;
use std::sync::Arc;

use clap::Args;
use half::bf16;
use kda_codegen::Arch;
use kda_reference::oracle::Oracle;
use kda_reference::{Gate, Inputs, Shape, StateType};
use kda_tests::cuda::CudaExecutor;
use kda_tests::emulate::EmulatorExecutor;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Data, Executor, Limits, ReferenceExecutor, Regime, bf16_ulp};

#[derive(Args)]
pub struct Options {
    /// Decode steps
    #[arg(long, default_value_t = 10_000)]
    steps: u64,
    /// Run the kernels in the emulator
    #[arg(long, conflicts_with = "scalar")]
    emulate: bool,
    /// Run the scalar f32 reference
    #[arg(long)]
    scalar: bool,
    /// Schedule; the first one tried in tests if not given
    #[arg(long)]
    mode: Option<String>,
    /// Element types of the state
    #[arg(long, value_delimiter = ',', default_values = ["f32", "bf16"])]
    state: Vec<String>,
    /// Decays: plain ones, as random weights give, or slow ones, about 0.9999 a step
    #[arg(long, value_delimiter = ',', default_values = ["plain", "slow"])]
    decay: Vec<String>,
    /// Seed of weights and inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs every combination and prints a row at each power of ten.
///
/// # Errors
///
/// A missing library, or a result that is no number.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut executor: Box<dyn Executor> = if options.scalar {
        Box::new(ReferenceExecutor)
    } else {
        let kernels = KernelCache::new(load_nvrtc()?);
        if options.emulate {
            Box::new(EmulatorExecutor::new(Arch::Sm90a, kernels))
        } else {
            Box::new(CudaExecutor::new(kernels)?)
        }
    };
    println!(
        "{:<6} {:<6} {:>7}  {:>20}  {:>20}  mode",
        "decay", "state", "step", "state, relative", "out, bf16 ulps"
    );
    for decay in &options.decay {
        for state in &options.state {
            measure(executor.as_mut(), options, decay, state)?;
        }
    }
    Ok(())
}

fn measure(
    executor: &mut dyn Executor,
    options: &Options,
    decay: &str,
    state: &str,
) -> Result<(), Box<dyn Error>> {
    let mut case = first_case(options.seed, decay, state)?;
    let modes = executor.modes(&case);
    let mode = options.mode.as_ref().unwrap_or(&modes[0]);
    let shape = case.shape;
    let mut exact_state: Vec<f64> = case.data.states.iter().map(|&s| s.into()).collect();
    let mut rng = Rng::new(options.seed);
    // The worst since the last row printed: output errors come and go.
    let mut out_ulps = 0.0f64;
    let mut next_row = 1;
    for step in 1..=options.steps {
        let before = Buffers::new(&case);
        let mut after = before.clone();
        executor.run(&case, mode, &mut after)?;
        let exact = exact_step(&case, &exact_state)?;

        let slot = case.slots[0] as usize;
        let states = after.states(&shape, slot);
        let (mut lost, mut size) = (0.0, 0.0);
        for (&found, &expected) in states.iter().zip(&exact.states) {
            lost += (f64::from(found) - expected).powi(2);
            size += expected * expected;
        }
        let relative = f64::sqrt(lost / size);
        if relative.is_nan() {
            return Err(format!("the state is no number after {step} steps").into());
        }
        let largest = exact.out.iter().fold(0f64, |m, x| m.max(x.abs()));
        for (column, &expected) in exact.out.iter().enumerate() {
            let found = after.out.bf16(column).to_f64();
            // Small elements of a row are judged by its largest, as attention sums them.
            let ulp = bf16_ulp(expected.abs().max(largest / 16.0));
            out_ulps = out_ulps.max((found - expected).abs() / ulp);
        }
        if step == next_row || step == options.steps {
            println!(
                "{decay:<6} {state:<6} {step:>7}  {relative:>20.3e}  {out_ulps:>20.3}  {mode}"
            );
            next_row *= 10;
            out_ulps = 0.0;
        }
        exact_state = exact.states;
        let windows = after.line(&shape, slot, 0, 3);
        let row = case.data.projected.iter();
        let projected = row.map(|_| bf16::from_f32(rng.normal())).collect();
        case.data = Arc::new(Data {
            projected,
            windows,
            states,
            ..(*case.data).clone()
        });
    }
    Ok(())
}

/// A decode step of one request and head.
fn first_case(seed: u64, decay: &str, state: &str) -> Result<Case, Box<dyn Error>> {
    let limits = Limits {
        tokens: vec![1],
        gates: vec![Gate::LowerBound { lower_bound: -5.0 }],
        biases: vec![false],
        projected_gates: vec![false],
        regimes: vec![Regime::Plain],
        state_types: vec![match state {
            "f32" => StateType::F32,
            "bf16" => StateType::Bf16,
            _ => return Err(format!("state {state} is none of f32, bf16").into()),
        }],
        ..Limits::default().live()
    };
    let mut case = (seed..)
        .map(|seed| Case::sized(seed, &limits, 1, 1))
        .find(|case| !case.verify)
        .expect("most cases decode");
    let mut data = (*case.data).clone();
    match decay {
        "plain" => {}
        // exp(−5 · sigmoid(−10.8)) is 0.9999.
        "slow" => {
            data.a_log.fill(0.0);
            data.dt_bias.iter_mut().for_each(|b| *b = -10.8 + 0.2 * *b);
            data.f_b
                .iter_mut()
                .for_each(|w| *w = bf16::from_f32(w.to_f32() * 0.3));
        }
        _ => return Err(format!("decay {decay} is none of plain, slow").into()),
    }
    case.data = Arc::new(data);
    Ok(case)
}

/// One step of the oracle from its own state, which no type rounds.
fn exact_step(case: &Case, state: &[f64]) -> Result<kda_reference::oracle::Exact, Box<dyn Error>> {
    let data = &case.data;
    let shape = Shape {
        eps: case.shape.eps,
        scale: case.shape.scale,
        ..Shape::dense(1, 1, 1, case.shape.gate)
    };
    let inputs = Inputs {
        projected: &data.projected,
        conv_weight: &data.conv_weight,
        conv_bias: None,
        f_b: &data.f_b,
        gate_input: None,
        a_log: &data.a_log,
        dt_bias: &data.dt_bias,
        norm: &data.norm,
        slots: &[1],
        accepted: None,
        token_counts: None,
    };
    let mut lines = vec![bf16::ZERO; 2 * shape.conv_slot_stride];
    lines[shape.conv_slot_stride..].copy_from_slice(&data.windows);
    // Only its length is looked at.
    let pool = vec![0.0; 2 * shape.state_slot_stride];
    let oracle = Oracle::new(&shape, &inputs, &lines, &pool)?;
    oracle
        .request_from(0, state)
        .ok_or_else(|| "the request is not live".into())
}
