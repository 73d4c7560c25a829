//! Reads a tensor of whatever library: address, shape, strides, dtype, place. Knows no operand and
//! imports no tensor library.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{Outcome, value};

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    Bf16,
    I32,
}

impl Dtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::I32 => "int32",
        }
    }

    fn bytes(self) -> i64 {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A CUDA device; its ordinal where the tensor tells.
    Cuda(Option<i32>),
    /// Host memory.
    Host,
}

/// Most dimensions an operand has.
const RANK: usize = 5;

/// A tensor's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) address: u64,
    rank: usize,
    shape: [usize; RANK],
    /// In elements. Those of dimensions of one element mean nothing.
    strides: [i64; RANK],
    pub(crate) place: Place,
    pub(crate) read_only: bool,
}

impl View {
    /// Reads `object`, which must have elements of `dtype`.
    pub(crate) fn of(object: &Bound<'_, PyAny>, name: &str, dtype: Dtype) -> Outcome<View> {
        let py = object.py();
        if let Ok(data_ptr) = object.getattr(intern!(py, "data_ptr")) {
            let found = object.getattr(intern!(py, "dtype"))?;
            if dtype_of(&found)? != Some(dtype) {
                return Err(wrong_dtype(name, &found.str()?.to_string(), dtype));
            }
            let place = place_of(&object.getattr(intern!(py, "device"))?, name)?;
            let shape = object.getattr(intern!(py, "shape"))?;
            let strides = object.call_method0(intern!(py, "stride"))?;
            let address = data_ptr.call0()?.extract()?;
            return View::new(name, address, &shape, Some(&strides), 1, place, false);
        }
        for (interface, place) in [
            (intern!(py, "__cuda_array_interface__"), Place::Cuda(None)),
            (intern!(py, "__array_interface__"), Place::Host),
        ] {
            let Some(described) = object.getattr_opt(interface)? else {
                continue;
            };
            let described = described.cast_into::<PyDict>()?;
            let entry = |key: &str| {
                described
                    .get_item(key)?
                    .ok_or_else(|| PyTypeError::new_err(format!("{name}'s interface lacks {key}")))
            };
            let kind: String = entry("typestr")?.extract()?;
            let known = match &kind[..] {
                "<f4" => dtype == Dtype::F32,
                "<i4" => dtype == Dtype::I32,
                // The interfaces have no name for bfloat16: raw 16-bit elements stand for it.
                "<V2" | "|V2" | "<u2" => dtype == Dtype::Bf16,
                _ => false,
            };
            if !known {
                return Err(wrong_dtype(name, &kind, dtype));
            }
            let (address, read_only) = entry("data")?.extract()?;
            let strides = described.get_item("strides")?.filter(|s| !s.is_none());
            return View::new(
                name,
                address,
                &entry("shape")?,
                strides.as_ref(),
                dtype.bytes(),
                place,
                read_only,
            );
        }
        let kind = object.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{name} is a {kind}, which has neither data_ptr nor an array interface"
        ))
        .into())
    }

    /// `unit` is the strides' unit: 1 where they count elements, else the bytes of one.
    fn new(
        name: &str,
        address: u64,
        shape: &Bound<'_, PyAny>,
        strides: Option<&Bound<'_, PyAny>>,
        unit: i64,
        place: Place,
        read_only: bool,
    ) -> Outcome<View> {
        let shape = shape.cast::<PyTuple>()?;
        let rank = shape.len();
        if rank > RANK {
            return Err(value(format!(
                "{name} has {rank} dimensions, at most {RANK} expected"
            )));
        }
        let mut view = View {
            address,
            rank,
            shape: [1; RANK],
            strides: [1; RANK],
            place,
            read_only,
        };
        for (into, size) in view.shape.iter_mut().zip(shape) {
            *into = size.extract()?;
        }
        // A size of 0 counts as 1: products of any part of the shape fit too.
        let count = view
            .shape
            .iter()
            .try_fold(1usize, |n, &size| n.checked_mul(size.max(1)));
        if count.is_none_or(|count| count > i64::MAX as usize) {
            return Err(value(format!(
                "{name} has shape {:?}, too many elements",
                view.shape()
            )));
        }
        let Some(strides) = strides else {
            let mut stride = 1;
            for (into, size) in view.strides[..rank].iter_mut().zip(view.shape).rev() {
                *into = stride;
                stride *= size.max(1) as i64;
            }
            return Ok(view);
        };
        let strides = strides.cast::<PyTuple>()?;
        if strides.len() != rank {
            return Err(value(format!(
                "{name} has {rank} dimensions and {} strides",
                strides.len()
            )));
        }
        for (into, stride) in view.strides.iter_mut().zip(strides) {
            let stride: i64 = stride.extract()?;
            if stride % unit != 0 {
                return Err(value(format!(
                    "{name} has a stride of {stride} bytes, no whole number of elements"
                )));
            }
            *into = stride / unit;
        }
        Ok(view)
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Whether the dimensions from `first` on lie side by side, the last one dense.
    pub(crate) fn contiguous_from(&self, first: usize) -> bool {
        let mut wanted = 1;
        for dimension in (first.min(self.rank)..self.rank).rev() {
            let size = self.shape[dimension];
            if size != 1 && self.strides[dimension] != wanted {
                return self.shape().contains(&0);
            }
            wanted *= size as i64;
        }
        true
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Elements between the entries of the first dimension. One entry has no distance to a next
    /// one: then it is `width`, the least that passes for one.
    pub(crate) fn stride(&self, width: usize) -> i64 {
        if self.rank == 0 || self.shape[0] <= 1 {
            width as i64
        } else {
            self.strides[0]
        }
    }

    /// Elements from the first to the last one, when the dimensions after the first are dense;
    /// `None` for a stride below 0.
    pub(crate) fn reach(&self, width: usize) -> Option<usize> {
        let (count, inner) = match self.shape() {
            [] => (1, 1),
            [count, inner @ ..] => (*count, inner.iter().product()),
        };
        let stride = usize::try_from(self.stride(width)).ok()?;
        if count == 0 || inner == 0 {
            return Some(0);
        }
        (count - 1).checked_mul(stride)?.checked_add(inner)
    }
}

fn wrong_dtype(name: &str, found: &str, dtype: Dtype) -> crate::error::Failure {
    let found = found.strip_prefix("torch.").unwrap_or(found);
    value(format!(
        "{name} has dtype {found}, expected {}",
        dtype.name()
    ))
}

/// The element type behind a dtype object, by its text; remembered, for texts are slow.
fn dtype_of(found: &Bound<'_, PyAny>) -> Outcome<Option<Dtype>> {
    static KNOWN: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let py = found.py();
    let known = KNOWN.get_or_init(py, || PyDict::new(py).unbind()).bind(py);
    let code: u8 = match known.get_item(found)? {
        Some(code) => code.extract()?,
        None => {
            let text = found.str()?.to_string();
            let code = match text.strip_prefix("torch.").unwrap_or(&text) {
                "float32" => 0,
                "bfloat16" => 1,
                "int32" => 2,
                _ => 3,
            };
            known.set_item(found, code)?;
            code
        }
    };
    Ok([Dtype::F32, Dtype::Bf16, Dtype::I32]
        .get(usize::from(code))
        .copied())
}

/// A device object has a `type` and an `index`, as torch's; a text is `cuda:0` or `cpu`.
fn place_of(device: &Bound<'_, PyAny>, name: &str) -> Outcome<Place> {
    let py = device.py();
    let (kind, index): (String, Option<i32>) = if let Ok(text) = device.extract::<String>() {
        match text.split_once(':') {
            Some((kind, index)) => (kind.to_owned(), index.parse().ok()),
            None => (text, None),
        }
    } else {
        (
            device.getattr(intern!(py, "type"))?.extract()?,
            device.getattr(intern!(py, "index"))?.extract()?,
        )
    };
    match &kind[..] {
        "cuda" => Ok(Place::Cuda(index)),
        "cpu" => Ok(Place::Host),
        _ => Err(value(format!("{name} is on {kind}, expected cuda"))),
    }
}

/// The address as it is now: engines may move a weight's storage.
pub(crate) fn address_of(object: &Bound<'_, PyAny>, name: &str, dtype: Dtype) -> Outcome<u64> {
    let py = object.py();
    match object.getattr_opt(intern!(py, "data_ptr"))? {
        Some(data_ptr) => Ok(data_ptr.call0()?.extract()?),
        None => Ok(View::of(object, name, dtype)?.address),
    }
}
