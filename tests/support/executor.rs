//! Owns what the harness asks of whoever computes a step; must not know how results are judged.

use std::error::Error;

use half::bf16;
use kda_reference::{FaultKind, Inputs, Pools, Report, StateType, step};

use crate::buffers::Buffers;
use crate::case::Case;

/// What a launch says about requests it refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Requests at fault.
    pub count: u32,
    /// Reason of the first.
    pub kind: FaultKind,
    /// The first, in batch order.
    pub request: u32,
}

impl Faults {
    /// Reads a kernel's record: `first` is `request << 32 | kind`, all ones when none faulted.
    pub fn from_record(first: u64, count: u32) -> Option<Faults> {
        let kind = FaultKind::from_code(first as u32)?;
        Some(Faults {
            count,
            kind,
            request: (first >> 32) as u32,
        })
    }

    /// What a launch of `case` must say.
    pub fn expected(case: &Case) -> Option<Faults> {
        let faults = case.faults();
        faults.first().map(|&(request, kind)| Faults {
            count: faults.len() as u32,
            kind,
            request: request as u32,
        })
    }
}

/// Computes steps: a GPU, an emulator, or the scalar reference.
pub trait Executor {
    /// Name, for messages.
    fn name(&self) -> String;

    /// The modes (schedules) that random cases and most checks draw from, at least one. All must give
    /// the same bits.
    fn modes(&self, case: &Case) -> Vec<String>;

    /// Every mode that can run `case`: those of [`Executor::modes`] and all others.
    fn legal_modes(&self, case: &Case) -> Vec<String> {
        self.modes(case)
    }

    /// Runs one launch in place: `buffers` hold every byte the launch can reach, and come back as
    /// the launch left them, read-only operands and guards included.
    ///
    /// # Errors
    ///
    /// Whatever kept the launch from running. Requests at fault are no error: they come back as
    /// `Some`.
    fn run(
        &mut self,
        case: &Case,
        mode: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>>;
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn modes(&self, case: &Case) -> Vec<String> {
        (**self).modes(case)
    }

    fn legal_modes(&self, case: &Case) -> Vec<String> {
        (**self).legal_modes(case)
    }

    fn run(
        &mut self,
        case: &Case,
        mode: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        (**self).run(case, mode, buffers)
    }
}

/// The scalar f32 reference as an executor of one mode.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceExecutor;

/// Owned operands in the reference's types, decoded from buffers.
struct Operands {
    projected: Vec<bf16>,
    conv_weight: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    f_b: Vec<bf16>,
    gate_input: Option<Vec<bf16>>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    slots: Vec<i32>,
    accepted: Option<Vec<i32>>,
    token_counts: Option<Vec<i32>>,
    records: Option<Vec<f32>>,
    conv_cache: Vec<bf16>,
    state: Vec<f32>,
}

impl Operands {
    fn decode(case: &Case, buffers: &Buffers) -> Operands {
        Operands {
            projected: buffers.projected.to_bf16(),
            conv_weight: buffers.conv_weight.to_f32(),
            conv_bias: buffers.conv_bias.as_ref().map(|r| r.to_f32()),
            f_b: buffers.f_b.as_ref().map_or(Vec::new(), |r| r.to_bf16()),
            gate_input: buffers.gate_input.as_ref().map(|r| r.to_bf16()),
            a_log: buffers.a_log.to_f32(),
            dt_bias: buffers.dt_bias.to_f32(),
            norm: buffers.norm.to_f32(),
            slots: buffers.slots.to_i32(),
            accepted: buffers.accepted.as_ref().map(|r| r.to_i32()),
            token_counts: buffers.token_counts.as_ref().map(|r| r.to_i32()),
            records: buffers.records.as_ref().map(|r| r.to_f32()),
            conv_cache: buffers.conv_cache.to_bf16(),
            state: match case.shape.state_type {
                StateType::F32 => buffers.state.to_f32(),
                StateType::Bf16 => buffers.state.to_bf16().iter().map(|s| s.to_f32()).collect(),
            },
        }
    }
}

impl ReferenceExecutor {
    /// As [`Executor::run`], with `out` in f32 before its rounding as a second result,
    /// `[rows, out_stride]`; `buffers.out` is not written.
    ///
    /// # Errors
    ///
    /// What the reference finds wrong with the shape.
    pub fn run_unrounded(
        case: &Case,
        buffers: &mut Buffers,
    ) -> Result<(Report, Vec<f32>), kda_reference::Error> {
        let mut operands = Operands::decode(case, buffers);
        let inputs = Inputs {
            projected: &operands.projected,
            conv_weight: &operands.conv_weight,
            conv_bias: operands.conv_bias.as_deref(),
            f_b: &operands.f_b,
            gate_input: operands.gate_input.as_deref(),
            a_log: &operands.a_log,
            dt_bias: &operands.dt_bias,
            norm: &operands.norm,
            slots: &operands.slots,
            accepted: operands.accepted.as_deref(),
            token_counts: operands.token_counts.as_deref(),
        };
        let pools = Pools {
            conv_cache: &mut operands.conv_cache,
            state: &mut operands.state,
            records: operands.records.as_deref_mut(),
        };
        let mut out = vec![f32::NAN; case.shape.rows() * case.shape.out_stride];
        let report = step::run_unrounded(&case.shape, &inputs, pools, &mut out)?;
        for (i, &value) in operands.conv_cache.iter().enumerate() {
            buffers.conv_cache.set_bf16(i, value);
        }
        for (i, &value) in operands.state.iter().enumerate() {
            buffers.state.set_state(case.shape.state_type, i, value);
        }
        if let (Some(region), Some(records)) = (&mut buffers.records, &operands.records) {
            for (i, &value) in records.iter().enumerate() {
                region.set_f32(i, value);
            }
        }
        Ok((report, out))
    }
}

impl Executor for ReferenceExecutor {
    fn name(&self) -> String {
        "scalar reference".into()
    }

    fn modes(&self, _: &Case) -> Vec<String> {
        vec!["scalar".into()]
    }

    fn run(
        &mut self,
        case: &Case,
        _: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        let (report, out) = ReferenceExecutor::run_unrounded(case, buffers)?;
        let shape = &case.shape;
        let owned = |row: &usize| row % shape.tokens < case.tokens_of(row / shape.tokens);
        for row in (0..shape.rows()).filter(owned) {
            for column in 0..shape.dim() {
                let index = row * shape.out_stride + column;
                buffers.out.set_bf16(index, bf16::from_f32(out[index]));
            }
        }
        Ok(report.faults.first().map(|fault| Faults {
            count: report.faults.len() as u32,
            kind: fault.kind,
            request: fault.request as u32,
        }))
    }
}

/// An executor that a test writes as a closure, mostly the reference with one thing wrong. One mode.
pub struct Scripted<F>(F);

impl<F> Scripted<F>
where
    F: FnMut(&Case, &mut Buffers) -> Result<Option<Faults>, Box<dyn Error>>,
{
    /// Runs launches by `run`.
    pub fn new(run: F) -> Scripted<F> {
        Scripted(run)
    }
}

impl<F> Executor for Scripted<F>
where
    F: FnMut(&Case, &mut Buffers) -> Result<Option<Faults>, Box<dyn Error>>,
{
    fn name(&self) -> String {
        "scripted".into()
    }

    fn modes(&self, _: &Case) -> Vec<String> {
        vec!["scalar".into()]
    }

    fn run(
        &mut self,
        case: &Case,
        _: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        (self.0)(case, buffers)
    }
}
