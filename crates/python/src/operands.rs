//! From tensors by name to a `kda_runtime::Step`: dtypes, shapes, inner strides and places are
//! checked here, lengths, alignment and overlap by the library.

use kda_codegen::{CONV_WIDTH, ConvLayout, GATE_RANK, GateInput, HEAD_DIM, Rollback, StateDtype};
use kda_runtime::{
    Buffer, Config, ConvCache, Projected, RecordPool, Reset, Rows, Slots, StatePool, Step,
    StepKind, Weights,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Outcome, value};
use crate::tensor::{Dtype, Place, View, address_of};

/// Which tensors a prepared object may be given.
#[derive(Clone, Copy)]
pub(crate) struct Home {
    /// Ordinal of its device; `None` without one.
    pub(crate) device: Option<i32>,
    /// Whether the device reads host memory at its own address.
    pub(crate) host_memory: bool,
}

impl Home {
    fn admits(&self, name: &str, place: Place) -> Outcome<()> {
        match place {
            Place::Host if !self.host_memory => Err(value(format!(
                "{name} is in host memory, expected memory of the device"
            ))),
            Place::Cuda(Some(found)) if self.device.is_some_and(|device| device != found) => {
                Err(value(format!(
                    "{name} is on cuda:{found}, expected cuda:{}",
                    self.device.unwrap_or_default()
                )))
            }
            _ => Ok(()),
        }
    }
}

/// One weight: kept alive, its address read at every launch.
pub(crate) struct Weight {
    object: Py<PyAny>,
    name: &'static str,
    dtype: Dtype,
    elements: usize,
    place: Place,
}

impl Weight {
    /// A dense tensor of any shape.
    pub(crate) fn new(
        object: &Bound<'_, PyAny>,
        name: &'static str,
        dtype: Dtype,
    ) -> Outcome<Weight> {
        let view = View::of(object, name, dtype)?;
        if !view.contiguous_from(0) {
            return Err(value(format!("{name} is not contiguous")));
        }
        Ok(Weight {
            object: object.clone().unbind(),
            name,
            dtype,
            elements: view.elements(),
            place: view.place,
        })
    }

    fn buffer(&self, py: Python<'_>, home: &Home) -> Outcome<Buffer> {
        home.admits(self.name, self.place)?;
        let address = address_of(self.object.bind(py), self.name, self.dtype)?;
        Ok(Buffer::new(address, self.elements))
    }
}

/// A layer's weights.
pub(crate) struct LayerWeights {
    pub(crate) conv: Weight,
    pub(crate) conv_bias: Option<Weight>,
    pub(crate) f_b: Option<Weight>,
    pub(crate) a_log: Weight,
    pub(crate) dt_bias: Weight,
    pub(crate) norm: Weight,
}

impl LayerWeights {
    fn read(&self, py: Python<'_>, home: &Home) -> Outcome<Weights> {
        let bias = self.conv_bias.as_ref();
        let f_b = self.f_b.as_ref();
        Ok(Weights {
            conv: self.conv.buffer(py, home)?,
            conv_bias: bias.map(|bias| bias.buffer(py, home)).transpose()?,
            f_b: f_b
                .map(|f_b| f_b.buffer(py, home))
                .transpose()?
                .unwrap_or_default(),
            a_log: self.a_log.buffer(py, home)?,
            dt_bias: self.dt_bias.buffer(py, home)?,
            norm: self.norm.buffer(py, home)?,
        })
    }
}

/// The keyword arguments of a step.
pub(crate) const OPERANDS: [&str; 15] = [
    "projected",
    "qkv",
    "output_gate",
    "f_a",
    "beta",
    "gate_input",
    "out",
    "conv_cache",
    "state",
    "state_source",
    "slots",
    "accepted",
    "token_counts",
    "records",
    "tokens",
];

/// Reads the operands of one step by name.
struct Named<'a, 'py> {
    given: &'a Bound<'py, PyDict>,
    home: &'a Home,
}

impl<'py> Named<'_, 'py> {
    fn optional(&self, name: &str) -> Outcome<Option<Bound<'py, PyAny>>> {
        Ok(self.given.get_item(name)?.filter(|found| !found.is_none()))
    }

    fn required(&self, name: &str) -> Outcome<Bound<'py, PyAny>> {
        self.optional(name)?
            .ok_or_else(|| PyTypeError::new_err(format!("{name} is missing")).into())
    }

    fn view(&self, object: &Bound<'py, PyAny>, name: &str, dtype: Dtype) -> Outcome<View> {
        let view = View::of(object, name, dtype)?;
        self.home.admits(name, view.place)?;
        Ok(view)
    }

    /// `[rows, at least width]` with dense rows.
    fn rows(&self, name: &str, width: usize) -> Outcome<(Rows, usize)> {
        let view = self.view(&self.required(name)?, name, Dtype::Bf16)?;
        match view.shape() {
            [count, found] if *found >= width => {
                let rows = rows(&view, name, *found)?;
                // The library checks each part of a packed row, not that rows lie apart.
                if rows.stride < width as i64 {
                    return Err(value(format!(
                        "{name} has a stride of {} elements, {width} needed",
                        rows.stride
                    )));
                }
                Ok((rows, *count))
            }
            found => Err(value(format!(
                "{name} has shape {found:?}, expected [rows, {width}]"
            ))),
        }
    }

    /// A pool `[slots, ..inner]`, a slot dense; its slots.
    fn pool(
        &self,
        object: &Bound<'py, PyAny>,
        name: &str,
        dtype: Dtype,
        fits: impl Fn(&[usize]) -> bool,
        expected: &str,
    ) -> Outcome<(Rows, View)> {
        let view = self.view(object, name, dtype)?;
        match view.shape() {
            [_, inner @ ..] if fits(inner) => {
                let width = inner.iter().product();
                Ok((rows(&view, name, width)?, view))
            }
            found => Err(value(format!(
                "{name} has shape {found:?}, expected {expected}"
            ))),
        }
    }
}

/// The memory of a tensor whose dimensions after the first are dense.
fn rows(view: &View, name: &str, width: usize) -> Outcome<Rows> {
    let elements = match view.reach(width) {
        Some(elements) if view.contiguous_from(1) => elements,
        _ => {
            return Err(value(format!(
                "{name} is not contiguous within an entry of its first dimension"
            )));
        }
    };
    Ok(Rows {
        buffer: Buffer::new(view.address, elements),
        stride: view.stride(width),
    })
}

fn writable(view: &View, name: &str) -> Outcome<()> {
    if view.read_only {
        return Err(value(format!("{name} is written, but read-only")));
    }
    Ok(())
}

/// The step that `given` describes; its batch is the projection's first dimension.
pub(crate) fn step(
    config: &Config,
    home: &Home,
    weights: &LayerWeights,
    given: &Bound<'_, PyDict>,
) -> Outcome<Step> {
    let py = given.py();
    for name in given.keys() {
        let name: String = name.extract()?;
        if !OPERANDS.contains(&&name[..]) {
            return Err(PyTypeError::new_err(format!("{name} is no operand: {OPERANDS:?}")).into());
        }
    }
    let named = Named { given, home };
    let heads = config.heads;
    let dim = heads * HEAD_DIM;

    // As many rows as another operand has.
    let part = |name, width, (count, of): (usize, &str)| -> Outcome<Rows> {
        let (rows, found) = named.rows(name, width)?;
        if found != count {
            return Err(value(format!("{name} has {found} rows, {of} has {count}")));
        }
        Ok(rows)
    };
    // The library refuses one that the settings have no use for.
    let low_rank = config.gate_input == GateInput::LowRank;
    let gate = |name, width, wanted: bool, of| match wanted || named.optional(name)?.is_some() {
        true => part(name, width, of),
        false => Ok(Rows::default()),
    };
    let (projected, row_count, source) = if named.optional("projected")?.is_some() {
        for part in &OPERANDS[1..5] {
            if named.optional(part)?.is_some() {
                return Err(value(format!("{part} was given beside projected")));
            }
        }
        let (packed, count) = named.rows("projected", 4 * dim + GATE_RANK + heads)?;
        let packed = Projected::packed(packed.buffer, packed.stride, heads);
        let gate_input = gate("gate_input", dim, !low_rank, (count, "projected"))?;
        let projected = match low_rank {
            true => Projected {
                gate_input,
                ..packed
            },
            // The F_A columns were the engine's to multiply.
            false => packed.with_gate_input(gate_input),
        };
        (projected, count, "projected")
    } else {
        let (qkv, count) = named.rows("qkv", 3 * dim)?;
        let of = (count, "qkv");
        let projected = Projected {
            qkv,
            output_gate: part("output_gate", dim, of)?,
            f_a: gate("f_a", GATE_RANK, low_rank, of)?,
            gate_input: gate("gate_input", dim, !low_rank, of)?,
            beta: part("beta", heads, of)?,
        };
        (projected, count, "qkv")
    };

    let (slots, _) = slot_table(&named)?;
    let columns = slots.columns;

    let accepted = named.optional("accepted")?;
    let tokens = named.optional("tokens")?;
    let tokens = tokens.map(|tokens| tokens.extract()).transpose()?;
    let kind = match (&accepted, tokens) {
        (None, None | Some(1)) => StepKind::Decode,
        (None, Some(tokens)) => {
            return Err(value(format!(
                "accepted is missing in a step of {tokens} tokens a request"
            )));
        }
        (Some(_), Some(tokens)) => StepKind::Verify(tokens),
        // A column a token, but with records.
        (Some(_), None) if config.rollback == Rollback::Checkpoints => StepKind::Verify(columns),
        (Some(_), None) => {
            return Err(value(
                "tokens is missing in a verify step that keeps records".into(),
            ));
        }
    };
    let per_request = kind.tokens();
    if per_request == 0 || row_count % per_request != 0 {
        return Err(value(format!(
            "{source} has {row_count} rows, no multiple of {per_request} tokens"
        )));
    }
    let counts = |object: Bound<'_, PyAny>, name: &str| -> Outcome<Buffer> {
        let view = named.view(&object, name, Dtype::I32)?;
        match view.shape() {
            [count] if view.contiguous_from(0) => Ok(Buffer::new(view.address, *count)),
            [_] => Err(value(format!("{name} is not contiguous"))),
            found => Err(value(format!(
                "{name} has shape {found:?}, expected [requests]"
            ))),
        }
    };
    let accepted = accepted.map(|object| counts(object, "accepted"));
    let accepted = accepted.transpose()?;
    let token_counts = named.optional("token_counts")?;
    let token_counts = token_counts.map(|object| counts(object, "token_counts"));
    let token_counts = token_counts.transpose()?;

    let pools = pools(config, &named)?;

    let records = named.optional("records")?;
    let records = records.map(|object| record_pool(&named, &object, heads, pools.slots));
    let records = records.transpose()?;

    let out = named.view(&named.required("out")?, "out", Dtype::Bf16)?;
    writable(&out, "out")?;
    let out = match out.shape() {
        [_, width] if *width == dim => rows(&out, "out", dim)?,
        found => {
            return Err(value(format!(
                "out has shape {found:?}, expected [rows, {dim}]"
            )));
        }
    };

    Ok(Step {
        kind,
        requests: row_count / per_request,
        projected,
        weights: weights.read(py, home)?,
        conv_cache: pools.conv_cache,
        state: pools.state,
        state_source: pools.state_source,
        pool_slots: pools.slots,
        slots,
        accepted,
        token_counts,
        records,
        out,
    })
}

/// The pools of a step.
struct Pools {
    conv_cache: ConvCache,
    state: StatePool,
    state_source: Option<StatePool>,
    slots: usize,
}

fn pools(config: &Config, named: &Named<'_, '_>) -> Outcome<Pools> {
    let heads = config.heads;
    let dim = heads * HEAD_DIM;
    let state_dtype = match config.state_dtype {
        StateDtype::F32 => Dtype::F32,
        StateDtype::Bf16 => Dtype::Bf16,
    };
    let state_expected = format!("[slots, {heads}, {HEAD_DIM}, {HEAD_DIM}]");
    let state_pool = |object: &Bound<'_, PyAny>, name: &str| {
        let fits = |inner: &[usize]| *inner == [heads, HEAD_DIM, HEAD_DIM];
        named.pool(object, name, state_dtype, fits, &state_expected)
    };
    let (state, state_view) = state_pool(&named.required("state")?, "state")?;
    writable(&state_view, "state")?;
    let pool_slots = state_view.shape()[0];
    let state_source = named
        .optional("state_source")?
        .map(|object| -> Outcome<StatePool> {
            let (source, view) = state_pool(&object, "state_source")?;
            same_slots("state_source", &view, pool_slots)?;
            Ok(pool_of(source))
        })
        .transpose()?;

    let token_first = config.conv_layout == ConvLayout::TokenFirst;
    let (conv, conv_view) = named.pool(
        &named.required("conv_cache")?,
        "conv_cache",
        Dtype::Bf16,
        |inner| match inner {
            [_, channels] if token_first => *channels == 3 * dim,
            [channels, _] if !token_first => *channels == 3 * dim,
            _ => false,
        },
        &if token_first {
            format!("[slots, length, {}]", 3 * dim)
        } else {
            format!("[slots, {}, length]", 3 * dim)
        },
    )?;
    writable(&conv_view, "conv_cache")?;
    same_slots("conv_cache", &conv_view, pool_slots)?;
    Ok(Pools {
        conv_cache: ConvCache {
            buffer: conv.buffer,
            slot_stride: conv.stride,
            length: conv_view.shape()[if token_first { 1 } else { 2 }],
        },
        state: pool_of(state),
        state_source,
        slots: pool_slots,
    })
}

fn same_slots(name: &str, view: &View, slots: usize) -> Outcome<()> {
    match view.shape()[0] {
        found if found == slots => Ok(()),
        found => Err(value(format!(
            "{name} has {found} slots, state has {slots}"
        ))),
    }
}

/// The record pool of a step.
fn record_pool(
    named: &Named<'_, '_>,
    object: &Bound<'_, PyAny>,
    heads: usize,
    slots: usize,
) -> Outcome<RecordPool> {
    let (pool, view) = named.pool(
        object,
        "records",
        Dtype::F32,
        |inner| matches!(inner, [_, rest @ ..] if *rest == [heads, 3, HEAD_DIM]),
        &format!("[slots, records, {heads}, 3, {HEAD_DIM}]"),
    )?;
    writable(&view, "records")?;
    same_slots("records", &view, slots)?;
    Ok(RecordPool {
        buffer: pool.buffer,
        slot_stride: pool.stride,
        count: view.shape()[1],
    })
}

/// The slot table and its rows.
fn slot_table(named: &Named<'_, '_>) -> Outcome<(Slots, usize)> {
    let slots = named.view(&named.required("slots")?, "slots", Dtype::I32)?;
    let columns = match slots.shape() {
        [_] => 1,
        [_, columns] => *columns,
        found => {
            return Err(value(format!(
                "slots has shape {found:?}, expected [requests] or [requests, columns]"
            )));
        }
    };
    let slot_rows = rows(&slots, "slots", columns)?;
    let table = Slots {
        buffer: slot_rows.buffer,
        stride: slot_rows.stride,
        columns,
    };
    Ok((table, slots.shape()[0]))
}

/// The reset that `given` describes; its requests are the slot table's rows.
pub(crate) fn reset(config: &Config, home: &Home, given: &Bound<'_, PyDict>) -> Outcome<Reset> {
    let named = Named { given, home };
    let (slots, requests) = slot_table(&named)?;
    let pools = pools(config, &named)?;
    Ok(Reset {
        requests,
        slots,
        conv_cache: pools.conv_cache,
        state: pools.state,
        pool_slots: pools.slots,
    })
}

/// Checks the pools that `given` names.
pub(crate) fn check_caches(config: &Config, home: &Home, given: &Bound<'_, PyDict>) -> Outcome<()> {
    let named = Named { given, home };
    let pools = pools(config, &named)?;
    if let Some(records) = named.optional("records")? {
        record_pool(&named, &records, config.heads, pools.slots)?;
    }
    Ok(())
}

fn pool_of(rows: Rows) -> StatePool {
    StatePool {
        buffer: rows.buffer,
        slot_stride: rows.stride,
    }
}

/// Checks the decode layout `[3, 4, dim]` of a conv weight.
pub(crate) fn conv_weight(object: &Bound<'_, PyAny>) -> Outcome<Weight> {
    let view = View::of(object, "conv", Dtype::F32)?;
    match view.shape() {
        [3, CONV_WIDTH, dim] if dim % HEAD_DIM == 0 => Weight::new(object, "conv", Dtype::F32),
        found => Err(value(format!(
            "conv has shape {found:?}, expected [3, {CONV_WIDTH}, dim], the decode layout"
        ))),
    }
}
