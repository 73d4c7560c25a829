//! Owns the golden vectors: their files, and the comparison with what they say. Must not know who
//! computes a step.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use kda_reference::{CONV_WIDTH, Gate, Plan, Shape, decode_conv_weight};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::buffers::Buffers;
use crate::case::{Case, Skew};
use crate::data::{Data, MATRIX, Regime};
use crate::errors::{Errors, OUT_SLACK, OUT_ULPS, STATE_STEP, bf16_ulp};
use crate::executor::Executor;
use crate::mismatch::{Mismatch, Requirement};

/// The files of `tests/fixtures`, so that a binary stands alone.
const EMBEDDED: [(&str, &[u8]); 5] = [
    (
        "decode_h1_b2_softplus",
        include_bytes!("../fixtures/decode_h1_b2_softplus.safetensors"),
    ),
    (
        "decode_h2_b2_bias",
        include_bytes!("../fixtures/decode_h2_b2_bias.safetensors"),
    ),
    (
        "decode_h3_b2_null",
        include_bytes!("../fixtures/decode_h3_b2_null.safetensors"),
    ),
    (
        "verify_h1_b2_t4",
        include_bytes!("../fixtures/verify_h1_b2_t4.safetensors"),
    ),
    (
        "verify_h1_b3_t2_null",
        include_bytes!("../fixtures/verify_h1_b3_t2_null.safetensors"),
    ),
];

/// Why a file is no golden vector.
#[derive(Debug)]
#[non_exhaustive]
pub enum FixtureError {
    /// The folder or the file cannot be read.
    Unreadable {
        /// Path.
        path: PathBuf,
        /// Reason.
        source: std::io::Error,
    },
    /// The file is no safetensors file.
    Malformed {
        /// Fixture name.
        name: String,
        /// Reason.
        source: safetensors::SafeTensorError,
    },
    /// A tensor or a metadata entry is absent, or has another type or length than its name says.
    Entry {
        /// Fixture name.
        name: String,
        /// Entry name.
        entry: &'static str,
    },
    /// The folder holds no safetensors file.
    Empty {
        /// Path.
        path: PathBuf,
    },
}

impl fmt::Display for FixtureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FixtureError::Unreadable { path, source } => {
                write!(f, "cannot read {}: {source}", path.display())
            }
            FixtureError::Malformed { name, source } => {
                write!(f, "fixture {name} is no safetensors file: {source}")
            }
            FixtureError::Entry { name, entry } => {
                write!(f, "fixture {name} has no usable entry {entry}")
            }
            FixtureError::Empty { path } => {
                write!(f, "no safetensors file in {}", path.display())
            }
        }
    }
}

impl std::error::Error for FixtureError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            FixtureError::Unreadable { source, .. } => Some(source),
            FixtureError::Malformed { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// One golden vector.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// File name without its ending.
    pub name: String,
    /// The launch: dense strides, as in the file.
    pub case: Case,
    /// Operands before the launch, with every slot's content from the file.
    pub before: Buffers,
    /// Wanted output `[rows, d]` in f32, before its rounding.
    pub out: Vec<f32>,
    /// Wanted convolution cache, dim first `[slots, 3d, length]`.
    pub conv_out: Vec<bf16>,
    /// Wanted state pool `[slots, heads, 128, 128]`.
    pub state_out: Vec<f32>,
}

/// The golden vectors that this crate carries.
///
/// # Panics
///
/// When a file in the source tree is damaged.
pub fn embedded() -> Vec<Fixture> {
    EMBEDDED
        .iter()
        .map(|(name, bytes)| Fixture::parse(name, bytes).unwrap_or_else(|e| panic!("{e}")))
        .collect()
}

/// Every `*.safetensors` of a folder, by name.
///
/// # Errors
///
/// `Unreadable` and `Empty` for the folder, and what [`Fixture::parse`] finds.
pub fn load_all(dir: &Path) -> Result<Vec<Fixture>, FixtureError> {
    let unreadable = |path: &Path, source| FixtureError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| unreadable(dir, e))? {
        let path = entry.map_err(|e| unreadable(dir, e))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(FixtureError::Empty { path: dir.into() });
    }
    paths.sort();
    let load = |path: &PathBuf| {
        let bytes = fs::read(path).map_err(|e| unreadable(path, e))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Fixture::parse(&name, &bytes)
    };
    paths.iter().map(load).collect()
}

/// Compares every mode of `executor` with `fixtures`, and with the oracle where the gate's input is
/// given as [`Fixture::projected`] has it; returns the worst errors against the oracle.
///
/// # Errors
///
/// The first difference.
pub fn check(executor: &mut dyn Executor, fixtures: &[Fixture]) -> Result<Errors, Mismatch> {
    let mut errors = Errors::default();
    for fixture in fixtures {
        for mode in executor.modes(&fixture.case) {
            let context = format!("fixture {}, {}, mode {mode}", fixture.name, executor.name());
            let mut after = fixture.before.clone();
            let faults = executor
                .run(&fixture.case, &mode, &mut after)
                .map_err(|error| {
                    Mismatch::new("launch", Requirement::Runs)
                        .at(error.to_string())
                        .within(&context)
                })?;
            let judged = fixture
                .case
                .check(&fixture.before, &after, faults.as_ref())
                .and_then(|judged| fixture.compare(&after).map(|()| judged))
                .map_err(|mismatch| mismatch.within(&context))?;
            errors.merge(&judged);
        }
        let (case, before) = fixture.projected();
        for mode in executor.modes(&case) {
            let mut after = before.clone();
            let context = format!("fixture {}, {}", fixture.name, executor.name());
            let faults = executor.run(&case, &mode, &mut after).map_err(|error| {
                Mismatch::new("launch", Requirement::Runs)
                    .at(error.to_string())
                    .within(format!("{context}, mode {mode}, projected gate"))
            })?;
            let judged = case
                .check(&before, &after, faults.as_ref())
                .map_err(|mismatch| mismatch.within(format!("{context}, mode {mode}")))?;
            errors.merge(&judged);
        }
    }
    Ok(errors)
}

impl Fixture {
    /// Reads a golden vector from the bytes of its file.
    ///
    /// # Errors
    ///
    /// `Malformed` and `Entry`.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Fixture, FixtureError> {
        let malformed = |source| FixtureError::Malformed {
            name: name.into(),
            source,
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(malformed)?;
        let file = File {
            name,
            tensors: SafeTensors::deserialize(bytes).map_err(malformed)?,
            metadata: header.metadata().clone().unwrap_or_default(),
        };
        let gate = match file.text("gate")? {
            "softplus" => Gate::Softplus,
            "lower_bound" => Gate::LowerBound {
                lower_bound: file.number("lower_bound")?,
            },
            _ => return Err(file.entry("gate")),
        };
        let [heads, requests, tokens, pitch] = [
            file.number("heads")?,
            file.number("requests")?,
            file.number("tokens")?,
            file.number("pitch")?,
        ];
        let mut shape = Shape::dense(heads, requests, tokens, gate);
        let (dim, size) = (shape.dim(), heads * MATRIX);
        shape.pitch = pitch;
        shape.eps = file.number("eps")?;
        let state_in = file.f32("state_in", None)?;
        shape.pool_slots = state_in.len() / size;
        let conv_len = shape.conv_len;
        let conv_in = file.bf16("conv_in", shape.pool_slots * 3 * dim * conv_len)?;
        let projected = file.bf16("projected", shape.rows() * pitch)?;
        let slots = file.i32("slots", requests * tokens)?;
        let accepted = file.i32("accepted", requests)?;
        let weight = file.f32("conv_weight", Some(3 * dim * CONV_WIDTH))?;
        let conv_weight = decode_conv_weight(&weight).map_err(|_| file.entry("conv_weight"))?;
        let conv_bias = match file.text("bias")? {
            "true" => Some(file.f32("conv_bias", Some(3 * dim))?),
            _ => None,
        };
        let used = shape.used_columns();
        let mut case = Case {
            seed: 0,
            shape,
            verify: tokens > 1,
            slots,
            accepted: (tokens > 1).then_some(accepted),
            token_counts: None,
            regime: Regime::Plain,
            skew: Skew::default(),
            data: Arc::new(Data {
                projected: projected
                    .chunks_exact(pitch)
                    .flat_map(|row| row[..used].to_vec())
                    .collect(),
                conv_weight,
                conv_bias,
                f_b: file.bf16("f_b", dim * 128)?,
                gate_input: None,
                a_log: file.f32("a_log", Some(heads))?,
                dt_bias: file.f32("dt_bias", Some(dim))?,
                norm: file.f32("norm", Some(128))?,
                windows: Vec::new(),
                states: Vec::new(),
                records: Vec::new(),
            }),
        };
        // The windows and states that requests start from, for cases derived from this one.
        let (mut windows, mut states) = (Vec::new(), Vec::new());
        for request in 0..requests {
            let (first, source, offset) = match case.plan(request) {
                Plan::Live {
                    first,
                    source,
                    offset,
                    ..
                } => (first, source, offset),
                _ => (0, 0, 0),
            };
            for channel in 0..3 * dim {
                let start = shape.conv_index(first, channel, offset);
                windows.extend_from_slice(&conv_in[start..start + CONV_WIDTH - 1]);
            }
            states.extend_from_slice(&state_in[source * size..(source + 1) * size]);
        }
        let data = Arc::make_mut(&mut case.data);
        (data.windows, data.states) = (windows, states);
        let mut before = Buffers::new(&case);
        for (i, &raw) in projected.iter().enumerate() {
            before.projected.set_bf16(i, raw);
        }
        for (i, &raw) in conv_in.iter().enumerate() {
            before.conv_cache.set_bf16(i, raw);
        }
        for (slot, values) in state_in.chunks_exact(size).enumerate() {
            before.put_states(&shape, slot, values);
        }
        Ok(Fixture {
            name: name.into(),
            before,
            out: file.f32("out", Some(shape.rows() * dim))?,
            conv_out: file.bf16("conv_out", conv_in.len())?,
            state_out: file.f32("state_out", Some(state_in.len()))?,
            case,
        })
    }

    /// The same launch with the gate's input given: the file's F_B · F_A, rounded to bf16. Its results
    /// differ from the file's by what that rounding moves, so the oracle judges them.
    pub fn projected(&self) -> (Case, Buffers) {
        let case = self.case.with_projected_gate();
        let mut before = Buffers::new(&case);
        before.conv_cache = self.before.conv_cache.clone();
        before.state = self.before.state.clone();
        (case, before)
    }

    /// Compares what a launch left with the file: the whole convolution cache exactly, `out` within
    /// the bound of the contract, each matrix of the whole pool within twice that of the contract,
    /// since the file's own values were computed in f32 too.
    ///
    /// # Errors
    ///
    /// The first difference.
    pub fn compare(&self, after: &Buffers) -> Result<(), Mismatch> {
        let (shape, dim) = (&self.case.shape, self.case.shape.dim());
        for (row, wanted) in self.out.chunks_exact(dim).enumerate() {
            let largest = wanted.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (column, &expected) in wanted.iter().enumerate() {
                let expected = f64::from(expected);
                let found = after.out.bf16(row * shape.out_stride + column).to_f64();
                let bound = OUT_ULPS * bf16_ulp(expected) + OUT_SLACK * f64::from(largest);
                // A NaN is not within the bound either.
                let within = (found - expected).abs() <= bound;
                if !within {
                    return Err(Mismatch::new("out", Requirement::Accurate)
                        .request(row / shape.tokens)
                        .token(row % shape.tokens)
                        .head(column / 128)
                        .at(format!("row {row} column {column}"))
                        .values(expected, found, bound));
                }
            }
        }
        for (i, expected) in self.conv_out.iter().enumerate() {
            let found = after.conv_cache.bf16(i);
            if found.to_bits() != expected.to_bits() {
                let (line, position) = (i / shape.conv_len, i % shape.conv_len);
                let (slot, channel) = (line / (3 * dim), line % (3 * dim));
                return Err(Mismatch::new("conv_cache", Requirement::Exact)
                    .at(format!("slot {slot} channel {channel} position {position}"))
                    .values(expected.to_f64(), found.to_f64(), 0.0));
            }
        }
        for (i, wanted) in self.state_out.chunks_exact(MATRIX).enumerate() {
            let (slot, head) = (i / shape.heads, i % shape.heads);
            let start = shape.state_index(slot, head);
            let (mut difference, mut size) = (0.0, 0.0);
            for (k, &expected) in wanted.iter().enumerate() {
                let found = f64::from(after.state.f32(start + k));
                difference += (found - f64::from(expected)).powi(2);
                size += f64::from(expected).powi(2);
            }
            let bound = 2.0 * STATE_STEP * shape.tokens as f64 * size.sqrt();
            let within = difference.sqrt() <= bound;
            if !within {
                return Err(Mismatch::new("state_pool", Requirement::Accurate)
                    .head(head)
                    .at(format!("slot {slot}, Frobenius"))
                    .values(size.sqrt(), difference.sqrt(), bound));
            }
        }
        Ok(())
    }
}

/// A parsed file, for reading entries by name.
struct File<'a> {
    name: &'a str,
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

impl File<'_> {
    fn entry(&self, entry: &'static str) -> FixtureError {
        FixtureError::Entry {
            name: self.name.into(),
            entry,
        }
    }

    /// A metadata value; texts are stored with quotes.
    fn text(&self, entry: &'static str) -> Result<&str, FixtureError> {
        let value = self.metadata.get(entry).ok_or_else(|| self.entry(entry))?;
        Ok(value.trim_matches('"'))
    }

    fn number<T: std::str::FromStr>(&self, entry: &'static str) -> Result<T, FixtureError> {
        self.text(entry)?.parse().map_err(|_| self.entry(entry))
    }

    fn tensor(
        &self,
        entry: &'static str,
        dtype: safetensors::Dtype,
        count: Option<usize>,
    ) -> Result<TensorView<'_>, FixtureError> {
        let tensor = self.tensors.tensor(entry).map_err(|_| self.entry(entry))?;
        let found: usize = tensor.shape().iter().product();
        if tensor.dtype() != dtype || count.is_some_and(|count| count != found) {
            return Err(self.entry(entry));
        }
        Ok(tensor)
    }

    fn f32(&self, entry: &'static str, count: Option<usize>) -> Result<Vec<f32>, FixtureError> {
        let tensor = self.tensor(entry, safetensors::Dtype::F32, count)?;
        Ok(words(tensor.data()).map(f32::from_le_bytes).collect())
    }

    fn i32(&self, entry: &'static str, count: usize) -> Result<Vec<i32>, FixtureError> {
        let tensor = self.tensor(entry, safetensors::Dtype::I32, Some(count))?;
        Ok(words(tensor.data()).map(i32::from_le_bytes).collect())
    }

    fn bf16(&self, entry: &'static str, count: usize) -> Result<Vec<bf16>, FixtureError> {
        let tensor = self.tensor(entry, safetensors::Dtype::BF16, Some(count))?;
        let pairs = tensor.data().chunks_exact(2);
        Ok(pairs.map(|b| bf16::from_le_bytes([b[0], b[1]])).collect())
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]])
}
