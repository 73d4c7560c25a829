//! One step's operands, their checks, and the plain launch description made of them. No CUDA.

use kda_codegen::operands::{Arguments, Geometry};
use kda_codegen::{Arch, CONV_WIDTH, GATE_RANK, GateInput, HEAD_DIM, KernelSpec, Launch, Rollback};

use crate::config::KINDS;
use crate::{Config, Error, Gate, Policies, StepKind};

/// Device memory: an address and the elements from there on that belong to the operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Device address.
    pub address: u64,
    /// Elements.
    pub elements: usize,
}

impl Buffer {
    /// Describes `elements` elements at `address`.
    pub fn new(address: u64, elements: usize) -> Buffer {
        Buffer { address, elements }
    }
}

/// Rows at a distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// The memory.
    pub buffer: Buffer,
    /// Elements between rows.
    pub stride: i64,
}

/// The projection's columns. In a packed projection they lie in one buffer. Of F_A and the gate input
/// one is given, by [`Config::gate_input`]; the other has address 0, as `Rows::default()` has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Projected {
    /// bf16 `[rows, 3 dim]`.
    pub qkv: Rows,
    /// bf16 `[rows, dim]`.
    pub output_gate: Rows,
    /// bf16 `[rows, 128]`, with the low-rank gate.
    pub f_a: Rows,
    /// bf16 `[rows, dim]`, with a projected gate: F_B · F_A, before dt_bias.
    pub gate_input: Rows,
    /// bf16 `[rows, heads]`.
    pub beta: Rows,
}

/// Where the columns of a packed projection start, in elements of its rows. q, k and v are one block
/// `[3 dim]` in this order; the blocks may lie in any order, with anything between them. `None`: the
/// rows hold no such block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProjectionLayout {
    /// q, k, v, `[3 dim]`.
    pub qkv: usize,
    /// Output gate, `[dim]`.
    pub output_gate: usize,
    /// F_A, `[128]`.
    pub f_a: Option<usize>,
    /// Projected gate input, `[dim]`.
    pub gate_input: Option<usize>,
    /// Beta, `[heads]`.
    pub beta: usize,
}

impl ProjectionLayout {
    /// q, k, v · output gate · F_A · beta, back to back: vLLM's order.
    pub fn standard(heads: usize) -> ProjectionLayout {
        let dim = heads * HEAD_DIM;
        ProjectionLayout {
            qkv: 0,
            output_gate: 3 * dim,
            f_a: Some(4 * dim),
            gate_input: None,
            beta: 4 * dim + GATE_RANK,
        }
    }
}

impl Projected {
    /// Views of one packed bf16 buffer `[rows, pitch]`: q, k, v · output gate · F_A · beta.
    pub fn packed(buffer: Buffer, pitch: i64, heads: usize) -> Projected {
        Projected::with_layout(buffer, pitch, &ProjectionLayout::standard(heads))
    }

    /// Views of one packed bf16 buffer `[rows, pitch]` in another order. A part that lies in a buffer
    /// of its own replaces its view.
    ///
    /// ```
    /// use kda_runtime::{Buffer, Projected, ProjectionLayout, Rows};
    ///
    /// # let (packed, betas) = (Buffer::new(4096, 100_000), Buffer::new(1 << 20, 1000));
    /// // A model that packs the output gate first, and keeps beta elsewhere.
    /// let (heads, dim) = (12, 12 * 128);
    /// let layout = ProjectionLayout {
    ///     output_gate: 0,
    ///     qkv: dim,
    ///     f_a: Some(4 * dim),
    ///     ..ProjectionLayout::standard(heads)
    /// };
    /// let mut projected = Projected::with_layout(packed, (4 * dim + 128) as i64, &layout);
    /// projected.beta = Rows { buffer: betas, stride: heads as i64 };
    /// ```
    pub fn with_layout(buffer: Buffer, pitch: i64, layout: &ProjectionLayout) -> Projected {
        let from = |column: usize| Rows {
            buffer: Buffer {
                address: if buffer.address == 0 {
                    0
                } else {
                    buffer.address + 2 * column as u64
                },
                elements: buffer.elements.saturating_sub(column),
            },
            stride: pitch,
        };
        Projected {
            qkv: from(layout.qkv),
            output_gate: from(layout.output_gate),
            f_a: layout.f_a.map(from).unwrap_or_default(),
            gate_input: layout.gate_input.map(from).unwrap_or_default(),
            beta: from(layout.beta),
        }
    }

    /// The same views with the gate's input, bf16 `[rows, dim]` in a buffer of its own, in place of
    /// F_A: for engines whose own GEMM multiplies by F_B.
    pub fn with_gate_input(mut self, gate_input: Rows) -> Projected {
        self.f_a = Rows::default();
        self.gate_input = gate_input;
        self
    }
}

/// A layer's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    /// f32 `[3, 4, dim]`: the checkpoint's `[3 dim, 1, 4]` in decode layout.
    pub conv: Buffer,
    /// f32 `[3 dim]`, with a conv bias.
    pub conv_bias: Option<Buffer>,
    /// bf16 `[dim, 128]`, 16-byte aligned; address 0 with a projected gate.
    pub f_b: Buffer,
    /// f32 `[heads]`.
    pub a_log: Buffer,
    /// f32 `[dim]`.
    pub dt_bias: Buffer,
    /// f32 `[128]`.
    pub norm: Buffer,
}

/// A state pool: `[slots, heads, 128 values, 128 keys]`, a slot contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatePool {
    /// The memory, 16-byte aligned.
    pub buffer: Buffer,
    /// Elements between slots, a multiple of 16 bytes.
    pub slot_stride: i64,
}

impl StatePool {
    /// Whether `slots` slots lie in it, each at a multiple of 16 bytes.
    pub(crate) fn check(
        &self,
        operand: &'static str,
        config: &Config,
        slots: usize,
    ) -> Result<(), Error> {
        let width = config.heads * HEAD_DIM * HEAD_DIM;
        strided(operand, self.buffer, self.slot_stride, slots, width, 16)?;
        let element = config.state_dtype.bytes() as i64;
        if self.slot_stride % (16 / element) != 0 {
            return Err(Error::Misaligned {
                operand,
                value: self.slot_stride.saturating_mul(element) as u64,
                alignment_bytes: 16,
            });
        }
        Ok(())
    }

    pub(crate) fn extent(&self, config: &Config, slots: usize) -> Extent {
        let width = config.heads * HEAD_DIM * HEAD_DIM;
        let bytes = config.state_dtype.bytes() as u64;
        Extent::new(self.buffer.address, self.slot_stride, width, slots, bytes)
    }
}

/// f32 elements of one record: decay, k and u of a head.
pub(crate) const RECORD_SIZE: usize = 3 * HEAD_DIM;

/// The record pool of [`Rollback::Records`]: f32 `[slots, count, heads, 3, 128]`, a slot contiguous.
/// The slots are those of the state pool.
///
/// Record `i` of a slot says what the delta rule did in token `i + 1` of the slot's last verify step:
/// the decay and the normalised k of every key, and u of every value. It belongs to the state in that
/// slot, which is the one after the step's first token: whoever copies or swaps a state takes its
/// records along, until a step with 1 accepted token follows. What a record holds before the first
/// verify step of a request is never read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordPool {
    /// The memory, f32, 16-byte aligned.
    pub buffer: Buffer,
    /// Elements between slots, a multiple of 16 bytes.
    pub slot_stride: i64,
    /// Records of a slot: at least the step's tokens − 1, and those of the step before.
    pub count: usize,
}

impl RecordPool {
    fn width(&self, heads: usize) -> usize {
        (self.count * heads).saturating_mul(RECORD_SIZE)
    }

    fn check(&self, heads: usize, tokens: usize, slots: usize) -> Result<(), Error> {
        let operand = "records";
        if self.count + 1 < tokens {
            return Err(Error::RecordsTooFew {
                found: self.count,
                needed: tokens - 1,
            });
        }
        if self.count == 0 {
            return Ok(());
        }
        let width = self.width(heads);
        strided(operand, self.buffer, self.slot_stride, slots, width, 16)?;
        if self.slot_stride % 4 != 0 {
            return Err(Error::Misaligned {
                operand,
                value: self.slot_stride.saturating_mul(4) as u64,
                alignment_bytes: 16,
            });
        }
        Ok(())
    }

    fn extent(&self, heads: usize, slots: usize) -> Extent {
        let slots = if self.count == 0 { 0 } else { slots };
        let width = self.width(heads);
        Extent::new(self.buffer.address, self.slot_stride, width, slots, 4)
    }
}

/// The conv cache: `[slots, 3 dim, length]` or `[slots, length, 3 dim]`, a slot contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConvCache {
    /// The memory, bf16.
    pub buffer: Buffer,
    /// Elements between slots.
    pub slot_stride: i64,
    /// Positions of a line, at least 3 + columns − 1, or 3 + records.
    pub length: usize,
}

impl ConvCache {
    pub(crate) fn extent(&self, config: &Config, slots: usize) -> Extent {
        let width = 3 * config.heads * HEAD_DIM * self.length;
        Extent::new(self.buffer.address, self.slot_stride, width, slots, 2)
    }
}

/// The slot table: i32 `[requests, columns]`, rows at a distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// The memory.
    pub buffer: Buffer,
    /// Elements between rows.
    pub stride: i64,
    /// Columns, at least the step's tokens; with records only the first is read.
    pub columns: usize,
}

/// Everything one launch reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Decode or verify.
    pub kind: StepKind,
    /// Requests; 0 launches nothing.
    pub requests: usize,
    /// Projection of the step's rows.
    pub projected: Projected,
    /// The layer's weights.
    pub weights: Weights,
    /// Updated in place.
    pub conv_cache: ConvCache,
    /// Written; read too unless `state_source` is given.
    pub state: StatePool,
    /// Read instead of `state`: a second pool of as many slots.
    pub state_source: Option<StatePool>,
    /// Slots of the pools; a slot value at or above it is a fault.
    pub pool_slots: usize,
    /// Slots of the requests.
    pub slots: Slots,
    /// i32 `[requests]`, for verify steps.
    pub accepted: Option<Buffer>,
    /// i32 `[requests]`, for ragged verify steps: how many of its rows a request brings, 0 to the
    /// step's tokens. It is served as a step of so many tokens would serve it; its other rows of
    /// `out` keep their bytes, and with 0 nothing of the request is touched: its state stays in
    /// `state_source`, where that is given.
    pub token_counts: Option<Buffer>,
    /// For verify steps with [`Rollback::Records`], updated in place.
    pub records: Option<RecordPool>,
    /// bf16 `[rows, dim]`, written.
    pub out: Rows,
}

impl Step {
    /// Columns of the slot table that a launch reads.
    fn columns_read(&self) -> usize {
        match (self.kind, self.records) {
            (StepKind::Verify(_), None) => self.slots.columns,
            _ => 1,
        }
    }

    /// Largest accepted count.
    fn accepted_limit(&self) -> usize {
        self.records
            .map_or(self.slots.columns, |records| records.count + 1)
    }
}

/// One launch as plain data: what the CUDA driver or an emulator needs.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// Index into [`Plan::kernels`].
    pub kernel: usize,
    /// Dimensions.
    pub launch: Launch,
    /// Values of the parameters.
    pub arguments: Arguments,
}

/// Which kernels exist and which serves a step. Knows no device.
#[derive(Clone, Debug)]
pub struct Plan {
    config: Config,
    kernels: Vec<KernelSpec>,
    /// For each kind, (largest number of requests, kernel), ascending.
    table: [Vec<(usize, usize)>; KINDS],
}

impl Plan {
    /// Resolves `policies` to kernels for `arch`.
    ///
    /// # Errors
    ///
    /// [`Error::IllegalSetting`] and [`Error::Codegen`] for settings no kernel exists for.
    pub fn new(arch: Arch, config: &Config, policies: &Policies) -> Result<Plan, Error> {
        config.validate()?;
        let mut plan = Plan {
            config: *config,
            kernels: Vec::new(),
            table: std::array::from_fn(|_| Vec::new()),
        };
        for policy in &policies.0 {
            if policy.max_requests == 0 {
                return Err(Error::IllegalSetting {
                    setting: "max_requests",
                    value: 0.0,
                    allowed: "1 and up",
                });
            }
            let spec = config.spec(arch, policy.kind, policy.mode);
            spec.validate()?;
            let kernel = match plan.kernels.iter().position(|known| *known == spec) {
                Some(kernel) => kernel,
                None => {
                    plan.kernels.push(spec);
                    plan.kernels.len() - 1
                }
            };
            // A legal spec has a legal number of tokens.
            if let Some(kind) = policy.kind.index() {
                plan.table[kind].push((policy.max_requests, kernel));
            }
        }
        for row in &mut plan.table {
            row.sort_by_key(|&(max_requests, _)| max_requests);
        }
        Ok(plan)
    }

    /// The kernels, each once.
    pub fn kernels(&self) -> &[KernelSpec] {
        &self.kernels
    }

    /// The policies: kind, largest number of requests, index into [`kernels`](Self::kernels);
    /// fewest requests of a kind first.
    pub fn policies(&self) -> impl Iterator<Item = (StepKind, usize, usize)> + '_ {
        self.table.iter().enumerate().flat_map(|(index, row)| {
            let kind = if index == 0 {
                StepKind::Decode
            } else {
                StepKind::Verify(index)
            };
            row.iter().map(move |&(most, kernel)| (kind, most, kernel))
        })
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Checks a step and describes its launch; `None` when it has no requests. `faults` is the
    /// device address of a [`FaultRecord`](kda_codegen::operands::FaultRecord).
    ///
    /// # Errors
    ///
    /// [`Error::PolicyMissing`] when no kernel serves the step; otherwise the first operand that
    /// is missing, misaligned, too short or too narrow, or [`Error::Overlap`] for a written operand
    /// that shares memory with any other. Pieces of two operands may interleave, as slots do in
    /// page-major pools; where two interleaved operands have different strides, that they share
    /// nothing is the caller's promise.
    pub fn step(&self, step: &Step, faults: u64) -> Result<Option<Planned>, Error> {
        if step.requests == 0 {
            return Ok(None);
        }
        let row = step
            .kind
            .index()
            .map_or(&[][..], |kind| &self.table[kind][..]);
        let Some(&(_, kernel)) = row.iter().find(|(most, _)| step.requests <= *most) else {
            let prepared = row.last().map_or(0, |&(most, _)| most);
            return Err(Error::PolicyMissing {
                kind: step.kind,
                requests: step.requests,
                prepared,
            });
        };
        let launch = self.kernels[kernel].launch(step.requests)?;
        self.check(step)?;
        let source = step.state_source.unwrap_or(step.state);
        let weights = &step.weights;
        let projected = &step.projected;
        let arguments = Arguments {
            qkv: projected.qkv.buffer.address,
            conv_weight: weights.conv.address,
            conv_bias: weights
                .conv_bias
                .map_or(weights.dt_bias.address, |bias| bias.address),
            conv_cache: step.conv_cache.buffer.address,
            f_a: projected.f_a.buffer.address,
            beta: projected.beta.buffer.address,
            a_log: weights.a_log.address,
            dt_bias: weights.dt_bias.address,
            slots: step.slots.buffer.address,
            state_pool: step.state.buffer.address,
            out: step.out.buffer.address,
            output_gate: projected.output_gate.buffer.address,
            norm: weights.norm.address,
            lower_bound: match self.config.gate {
                Gate::LowerBound(bound) => bound,
                Gate::Softplus => 0.0,
            },
            scale: self.config.scale,
            eps: self.config.eps,
            f_b: weights.f_b.address,
            gate_input: projected.gate_input.buffer.address,
            accepted: step.accepted.map_or(0, |accepted| accepted.address),
            state_source: source.buffer.address,
            token_counts: step.token_counts.map_or(0, |counts| counts.address),
            records: step.records.map_or(0, |records| records.buffer.address),
            faults,
            geometry: Geometry {
                qkv_pitch: projected.qkv.stride,
                gate_pitch: projected.output_gate.stride,
                f_a_pitch: projected.f_a.stride,
                gate_input_pitch: projected.gate_input.stride,
                beta_pitch: projected.beta.stride,
                out_stride: step.out.stride,
                slots_stride: step.slots.stride,
                conv_slot_stride: step.conv_cache.slot_stride,
                state_slot_stride: step.state.slot_stride,
                source_slot_stride: source.slot_stride,
                record_slot_stride: step.records.map_or(0, |records| records.slot_stride),
                conv_length: step.conv_cache.length as i32,
                pool_slots: step.pool_slots as i32,
                columns: step.accepted_limit() as i32,
                requests: step.requests as i32,
            },
        };
        Ok(Some(Planned {
            kernel,
            launch,
            arguments,
        }))
    }

    fn check(&self, step: &Step) -> Result<(), Error> {
        let heads = self.config.heads;
        let dim = heads * HEAD_DIM;
        let tokens = step.kind.tokens();
        let rows = step.requests * tokens;
        const MOST: usize = i32::MAX as usize;
        for (what, found, most) in [
            ("pool_slots", step.pool_slots, MOST),
            ("conv_cache length", step.conv_cache.length, MOST),
            ("slots columns", step.slots.columns, MOST),
            // One more may be accepted than there are records.
            ("records", step.records.map_or(0, |r| r.count), MOST - 1),
        ] {
            if found > most {
                return Err(Error::TooLarge { what, found, most });
            }
        }
        let verify = step.kind.is_verify();
        let with_records = self.config.rollback_of(step.kind) == Rollback::Records;
        match (step.records, with_records) {
            (Some(records), true) => records.check(heads, tokens, step.pool_slots)?,
            (None, true) => return Err(Error::OperandMissing { operand: "records" }),
            (Some(_), false) => {
                return Err(Error::OperandUnexpected {
                    operand: "records",
                    setting: if verify {
                        "verify steps keep checkpoints"
                    } else {
                        "the step is a decode step"
                    },
                });
            }
            (None, false) => {}
        }
        let needed = if with_records { 1 } else { tokens };
        if step.slots.columns < needed {
            return Err(Error::ColumnsTooFew {
                found: step.slots.columns,
                needed,
            });
        }
        // A decode step reads one window, however wide the table is.
        let offsets = if verify { step.accepted_limit() } else { 1 };
        let needed = CONV_WIDTH - 1 + offsets - 1;
        if step.conv_cache.length < needed {
            return Err(Error::ConvLineTooShort {
                found: step.conv_cache.length,
                needed,
            });
        }
        let projected = &step.projected;
        let weights = &step.weights;
        let gate = self.gate_rows(projected);
        let (setting, unexpected) = match self.config.gate_input {
            GateInput::LowRank => (
                "the configuration has a low-rank gate",
                &[("gate_input", projected.gate_input.buffer)][..],
            ),
            GateInput::Projected => (
                "the configuration has a projected gate",
                &[("f_a", projected.f_a.buffer), ("f_b", weights.f_b)][..],
            ),
        };
        for &(operand, buffer) in unexpected {
            if buffer.address != 0 {
                return Err(Error::OperandUnexpected { operand, setting });
            }
        }
        for (operand, rows_of, width) in [
            ("qkv", &projected.qkv, 3 * dim),
            ("output_gate", &projected.output_gate, dim),
            gate,
            ("beta", &projected.beta, heads),
            ("out", &step.out, dim),
        ] {
            strided(operand, rows_of.buffer, rows_of.stride, rows, width, 2)?;
        }
        if self.config.gate_input == GateInput::LowRank {
            contiguous("f_b", weights.f_b, dim * GATE_RANK, 16)?;
        }
        for (operand, buffer, needed, alignment) in [
            ("conv_weight", weights.conv, 3 * CONV_WIDTH * dim, 4),
            ("a_log", weights.a_log, heads, 4),
            ("dt_bias", weights.dt_bias, dim, 4),
            ("norm", weights.norm, HEAD_DIM, 4),
        ] {
            contiguous(operand, buffer, needed, alignment)?;
        }
        optional(
            "conv_bias",
            weights.conv_bias,
            (self.config.conv_bias, "the configuration has no conv bias"),
            3 * dim,
        )?;
        optional(
            "accepted",
            step.accepted,
            (verify, "the step is a decode step"),
            step.requests,
        )?;
        optional(
            "token_counts",
            step.token_counts,
            (
                verify && self.config.ragged,
                if verify {
                    "the configuration is not ragged"
                } else {
                    "the step is a decode step"
                },
            ),
            step.requests,
        )?;
        strided(
            "slots",
            step.slots.buffer,
            step.slots.stride,
            step.requests,
            step.columns_read(),
            4,
        )?;
        let conv = &step.conv_cache;
        strided(
            "conv_cache",
            conv.buffer,
            conv.slot_stride,
            step.pool_slots,
            3 * dim * conv.length,
            2,
        )?;
        for (operand, pool) in [
            ("state_pool", Some(step.state)),
            ("state_source", step.state_source),
        ] {
            if let Some(pool) = pool {
                pool.check(operand, &self.config, step.pool_slots)?;
            }
        }
        self.check_overlap(step, rows)
    }

    /// The operand that the gate's input comes from, and its width.
    fn gate_rows<'a>(&self, projected: &'a Projected) -> (&'static str, &'a Rows, usize) {
        match self.config.gate_input {
            GateInput::LowRank => ("f_a", &projected.f_a, GATE_RANK),
            GateInput::Projected => {
                let dim = self.config.heads * HEAD_DIM;
                ("gate_input", &projected.gate_input, dim)
            }
        }
    }

    fn check_overlap(&self, step: &Step, rows: usize) -> Result<(), Error> {
        let heads = self.config.heads;
        let dim = heads * HEAD_DIM;
        let config = &self.config;
        let rows_of = |operand: &Rows, width: usize| {
            Extent::new(operand.buffer.address, operand.stride, width, rows, 2)
        };
        let whole = |buffer: Buffer, elements: usize, element_bytes: u64| {
            let width = elements as i64;
            Extent::new(buffer.address, width, elements, 1, element_bytes)
        };
        let pool = |pool: &StatePool| pool.extent(config, step.pool_slots);
        let state = pool(&step.state);
        let records = step.records;
        let written = [
            Some(("out", rows_of(&step.out, dim))),
            Some(("state_pool", state)),
            records.map(|records| ("records", records.extent(heads, step.pool_slots))),
            Some((
                "conv_cache",
                step.conv_cache.extent(config, step.pool_slots),
            )),
        ];
        let (projected, weights, slots) = (&step.projected, &step.weights, &step.slots);
        let (gate, gate_rows, gate_width) = self.gate_rows(projected);
        let f_b = (config.gate_input == GateInput::LowRank).then_some(weights.f_b);
        let columns = step.columns_read();
        // The same pool twice is an update in place.
        let source = step.state_source.as_ref().map(pool).filter(|s| *s != state);
        let read = [
            Some(("qkv", rows_of(&projected.qkv, 3 * dim))),
            Some(("output_gate", rows_of(&projected.output_gate, dim))),
            Some((gate, rows_of(gate_rows, gate_width))),
            Some(("beta", rows_of(&projected.beta, heads))),
            Some(("conv_weight", whole(weights.conv, 3 * CONV_WIDTH * dim, 4))),
            weights
                .conv_bias
                .map(|bias| ("conv_bias", whole(bias, 3 * dim, 4))),
            f_b.map(|f_b| ("f_b", whole(f_b, dim * GATE_RANK, 2))),
            Some(("a_log", whole(weights.a_log, heads, 4))),
            Some(("dt_bias", whole(weights.dt_bias, dim, 4))),
            Some(("norm", whole(weights.norm, HEAD_DIM, 4))),
            Some((
                "slots",
                Extent::new(
                    slots.buffer.address,
                    slots.stride,
                    columns,
                    step.requests,
                    4,
                ),
            )),
            step.accepted
                .map(|accepted| ("accepted", whole(accepted, step.requests, 4))),
            step.token_counts
                .map(|counts| ("token_counts", whole(counts, step.requests, 4))),
            source.map(|source| ("state_source", source)),
        ];
        for (i, (name, extent)) in written.iter().flatten().enumerate() {
            let after = written.iter().flatten().skip(i + 1);
            for (other, with) in after.chain(read.iter().flatten()) {
                if extent.overlaps(with) {
                    return Err(Error::Overlap {
                        written: name,
                        other,
                    });
                }
            }
        }
        Ok(())
    }
}

/// The bytes of a strided operand: `count` pieces of `width` bytes, `stride` bytes apart.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    start: u64,
    /// Past the last piece.
    end: u64,
    stride: u64,
    width: u64,
    count: u64,
}

impl Extent {
    /// Of elements; the stride was found to be at least the width.
    pub(crate) fn new(
        start: u64,
        stride: i64,
        width: usize,
        count: usize,
        element_bytes: u64,
    ) -> Extent {
        let of_bytes = |elements: u64| elements.saturating_mul(element_bytes);
        Extent::of_bytes(
            start,
            of_bytes(stride as u64),
            of_bytes(width as u64),
            count as u64,
        )
    }

    fn of_bytes(start: u64, stride: u64, width: u64, count: u64) -> Extent {
        let reach = match count {
            0 => 0,
            _ => (count - 1).saturating_mul(stride).saturating_add(width),
        };
        Extent {
            start,
            end: start.saturating_add(reach),
            stride,
            width,
            count,
        }
    }

    /// Whether the pieces leave no gap.
    fn dense(&self) -> bool {
        self.count <= 1 || self.stride == self.width
    }

    /// Whether any piece lies in `from..to`.
    fn reaches(&self, from: u64, to: u64) -> bool {
        // The first piece that ends after `from`.
        let first = from
            .checked_sub(self.start.saturating_add(self.width))
            .map_or(0, |past| past / self.stride.max(1) + 1);
        let reach = first.saturating_mul(self.stride);
        first < self.count && self.start.saturating_add(reach) < to
    }

    /// Whether two operands share a byte; exact but for two interleaved ones of different strides.
    #[inline]
    pub(crate) fn overlaps(&self, other: &Extent) -> bool {
        // Nearly every pair of a step ends here. An empty operand's end is its start.
        self.start < other.end && other.start < self.end && self.meets(other)
    }

    /// [`overlaps`](Self::overlaps) of two operands whose ranges do.
    #[cold]
    fn meets(&self, other: &Extent) -> bool {
        if self.count == 0 || other.count == 0 {
            return false;
        }
        if self.dense() {
            return other.reaches(self.start, self.end);
        }
        if other.dense() {
            return self.reaches(other.start, other.end);
        }
        if self.stride != other.stride {
            // Both starts are certain; pieces further on may alternate.
            return other.reaches(self.start, self.start.saturating_add(self.width))
                || self.reaches(other.start, other.start.saturating_add(other.width));
        }
        // Ranges overlap, so in the shared part the pieces alternate, or meet in every period.
        let (low, high) = if self.start <= other.start {
            (self, other)
        } else {
            (other, self)
        };
        let distance = high.start - low.start;
        let offset = distance % low.stride;
        // The piece of `low` at or below the start of `high`, and the one after it.
        let index = distance / low.stride;
        let meets_next = offset + high.width > low.stride && index + 1 < low.count;
        offset < low.width || meets_next
    }
}

fn contiguous(
    operand: &'static str,
    buffer: Buffer,
    needed: usize,
    alignment_bytes: usize,
) -> Result<(), Error> {
    if buffer.address == 0 {
        return Err(Error::OperandMissing { operand });
    }
    if !buffer.address.is_multiple_of(alignment_bytes as u64) {
        return Err(Error::Misaligned {
            operand,
            value: buffer.address,
            alignment_bytes,
        });
    }
    if buffer.elements < needed {
        return Err(Error::TooShort {
            operand,
            found: buffer.elements,
            needed,
        });
    }
    Ok(())
}

pub(crate) fn strided(
    operand: &'static str,
    buffer: Buffer,
    stride: i64,
    count: usize,
    width: usize,
    alignment_bytes: usize,
) -> Result<(), Error> {
    if buffer.address == 0 {
        return Err(Error::OperandMissing { operand });
    }
    if stride < width as i64 {
        return Err(Error::StrideTooSmall {
            operand,
            found: stride,
            needed: width as i64,
        });
    }
    let needed = (count.saturating_sub(1))
        .checked_mul(stride as usize)
        .and_then(|reach| reach.checked_add(if count == 0 { 0 } else { width }))
        .unwrap_or(usize::MAX);
    contiguous(operand, buffer, needed, alignment_bytes)
}

fn optional(
    operand: &'static str,
    buffer: Option<Buffer>,
    (wanted, setting): (bool, &'static str),
    needed: usize,
) -> Result<(), Error> {
    match (buffer, wanted) {
        (Some(buffer), true) => contiguous(operand, buffer, needed, 4),
        (None, false) => Ok(()),
        (None, true) => Err(Error::OperandMissing { operand }),
        (Some(_), false) => Err(Error::OperandUnexpected { operand, setting }),
    }
}

#[cfg(test)]
mod tests {
    use super::Extent;

    /// One bit for each byte.
    fn bytes(e: &Extent) -> u64 {
        (0..e.count)
            .map(|i| ((1 << e.width) - 1) << (e.start + i * e.stride))
            .sum()
    }

    #[test]
    fn overlap_is_exact() {
        let mut extents = Vec::new();
        for start in [20, 21, 23, 26, 31] {
            for width in 1..4 {
                for stride in width..7 {
                    for count in 0..4 {
                        extents.push(Extent::of_bytes(start, stride, width, count));
                    }
                }
            }
        }
        let mut seen = [0; 2];
        for a in &extents {
            for b in &extents {
                let shared = bytes(a) & bytes(b) != 0;
                let exact = a.dense() || b.dense() || a.stride == b.stride;
                assert!(
                    a.overlaps(b) == shared || !exact && shared,
                    "{:?}",
                    (a.start, b.start)
                );
                let same_start = a.start == b.start && a.count > 0 && b.count > 0;
                assert!(!same_start || a.overlaps(b));
                if exact {
                    seen[usize::from(shared)] += 1;
                }
            }
        }
        assert!(seen[0] > 1000 && seen[1] > 1000, "{seen:?}");
    }
}
