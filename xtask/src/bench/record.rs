//! Measurements as JSON lines: what this benchmark writes and reads, and the scripts in `bench/peers`
//! write.

use std::error::Error;
use std::fmt;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use kda_codegen::GateKind;
use kda_runtime::{GateInput, Rollback, StateDtype, StepKind};
use serde::{Deserialize, Serialize};

use super::timing::Times;

/// What a step has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Size {
    /// Heads on the device.
    pub heads: usize,
    /// Tokens a request; above 1 it is a verify step.
    pub tokens: usize,
    /// Requests.
    pub requests: usize,
    /// Whether a verify step keeps records in place of checkpoints.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub records: bool,
    /// Whether the gate comes projected, without F_B in the step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub projected_gate: bool,
    /// Whether the state is bf16 in place of f32.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bf16_state: bool,
    /// Whether the gate is a softplus in place of the lower-bound gate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub softplus: bool,
}

impl Size {
    /// Kind of the step.
    pub fn kind(self) -> StepKind {
        match self.tokens {
            1 => StepKind::Decode,
            tokens => StepKind::Verify(tokens),
        }
    }

    /// What a verify step keeps.
    pub fn rollback(self) -> Rollback {
        match self.records {
            true => Rollback::Records,
            false => Rollback::Checkpoints,
        }
    }

    /// Where the gate comes from.
    pub fn gate_input(self) -> GateInput {
        match self.projected_gate {
            true => GateInput::Projected,
            false => GateInput::LowRank,
        }
    }

    /// Formula of the decay.
    pub fn gate(self) -> GateKind {
        match self.softplus {
            true => GateKind::Softplus,
            false => GateKind::LowerBound,
        }
    }

    /// Elements of the state.
    pub fn state_dtype(self) -> StateDtype {
        match self.bf16_state {
            true => StateDtype::Bf16,
            false => StateDtype::F32,
        }
    }

    /// Bytes of one head's state.
    pub fn tile_bytes(self) -> usize {
        (64 << 10) >> usize::from(self.bf16_state)
    }

    /// What sets it apart from a step of a low-rank gate on f32 checkpoints: `, records`, or nothing.
    pub fn variant(self) -> String {
        let named = [
            (self.records, ", records"),
            (self.projected_gate, ", projected gate"),
            (self.bf16_state, ", bf16 state"),
            (self.softplus, ", softplus"),
        ];
        named
            .iter()
            .filter(|(is, _)| *is)
            .map(|(_, name)| *name)
            .collect()
    }

    /// Bytes of state, and of records, that a step reads and writes; half of the records of the step
    /// before are accepted.
    pub fn state_bytes(self) -> f64 {
        let state = self.tile_bytes();
        let head = if self.records {
            2 * state + (self.tokens - 1) * 1536 * 3 / 2
        } else {
            (1 + self.tokens) * state
        };
        (self.requests * self.heads * head) as f64
    }
}

/// What surrounds a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// Nothing: layers follow each other.
    #[default]
    Layers,
    /// A GEMM ahead of each layer, launched plainly; its own time is taken off.
    Gemm,
    /// The same with programmatic launch.
    GemmProgrammatic,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Setting::Layers => "layers",
            Setting::Gemm => "gemm",
            Setting::GemmProgrammatic => "gemm-programmatic",
        })
    }
}

/// The name of what this workspace builds.
pub const OURS: &str = "prepared-kda";

fn ours() -> String {
    OURS.into()
}

/// One measured step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Whose step.
    #[serde(default = "ours")]
    pub implementation: String,
    /// Around it.
    #[serde(default)]
    pub setting: Setting,
    /// Its size.
    #[serde(flatten)]
    pub size: Size,
    /// Schedule; with `+early` where caches are read early.
    pub mode: String,
    /// Median microseconds a layer.
    #[serde(alias = "median_us")]
    pub us: f64,
    /// Shortest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_us: Option<f64>,
    /// Nine in ten are no longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p90_us: Option<f64>,
    /// The GEMM alone, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemm_us: Option<f64>,
}

impl Cell {
    /// A step of ours among layers.
    pub fn new(size: Size, mode: &str, times: Times) -> Cell {
        Cell {
            implementation: ours(),
            setting: Setting::Layers,
            size,
            mode: mode.into(),
            us: times.median,
            min_us: Some(times.min),
            p90_us: Some(times.p90),
            gemm_us: None,
        }
    }

    /// Whether the caller promised that caches may be read early.
    pub fn is_early(&self) -> bool {
        self.mode.ends_with("+early")
    }
}

/// What the machine allows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceiling {
    /// Its name.
    pub ceiling: String,
    /// Of the steps of one size, where it belongs to one.
    #[serde(flatten)]
    pub size: Option<Size>,
    /// Median microseconds.
    pub us: f64,
    /// Bytes read and written, by the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tb_per_s: Option<f64>,
}

impl Ceiling {
    /// One that belongs to no size.
    pub fn new(name: &str, us: f64, bytes: Option<f64>) -> Ceiling {
        Ceiling {
            ceiling: name.into(),
            size: None,
            us,
            tb_per_s: bytes.map(|bytes| bytes / us / 1e6),
        }
    }
}

/// Time of a kernel that reads the same 20 MB behind each step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Size of the step.
    #[serde(flatten)]
    pub size: Size,
    /// Its schedule.
    pub mode: String,
    /// Behind steps that touch caches.
    pub neighbour_us: f64,
    /// Behind the same steps over null slots.
    pub behind_null_us: f64,
    /// Alone.
    pub alone_us: f64,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Record {
    /// A step.
    Cell(Cell),
    /// A bound.
    Ceiling(Ceiling),
    /// A step's cost to others.
    Neighbour(Neighbour),
}

/// Reads a file of lines.
///
/// # Errors
///
/// It cannot be read, or a line is none of the above.
pub fn read(path: &Path) -> Result<Vec<Record>, Box<dyn Error>> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, l)| !l.trim().is_empty());
    lines
        .map(|(i, line)| {
            serde_json::from_str(line)
                .map_err(|e| format!("{}:{}: {e}", path.display(), i + 1).into())
        })
        .collect()
}

/// Appends lines to a file.
///
/// # Errors
///
/// It cannot be written.
pub fn append(path: &Path, records: &[Record]) -> Result<(), Box<dyn Error>> {
    let mut text = String::new();
    for record in records {
        text += &serde_json::to_string(record)?;
        text.push('\n');
    }
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive() {
        let size = Size {
            heads: 12,
            tokens: 4,
            requests: 16,
            bf16_state: true,
            softplus: true,
            ..Size::default()
        };
        let (median, min, p90) = (2.5, 2.0, 3.0);
        let mut cell = Cell::new(
            size,
            "split1-256x32-block+early",
            Times { median, min, p90 },
        );
        cell.setting = Setting::GemmProgrammatic;
        cell.gemm_us = Some(9.0);
        assert!(cell.is_early());
        let mut ceiling = Ceiling::new("in-place", 2.0, Some(8e6));
        assert_eq!(ceiling.tb_per_s, Some(4.0));
        ceiling.size = Some(size);
        let neighbour = Neighbour {
            size,
            mode: "split1-256x32-block".into(),
            neighbour_us: 8.0,
            behind_null_us: 5.0,
            alone_us: 4.0,
        };
        let records = [
            Record::Cell(cell),
            Record::Ceiling(ceiling),
            Record::Ceiling(Ceiling::new("empty plain 1x32", 0.9, None)),
            Record::Neighbour(neighbour),
        ];
        let folder = kda_tests::scratch();
        let path = folder.path().join("lines");
        append(&path, &records[..2]).unwrap();
        append(&path, &records[2..]).unwrap();
        assert_eq!(read(&path).unwrap(), records);
        fs::write(&path, "{\"heads\": 3}\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("lines:1: "), "{error}");
    }

    /// What a script need not say, and lines of `docs/measurements` that have other names.
    #[test]
    fn short_lines_are_ours_among_layers() {
        let line = r#"{"heads":1,"layers":69,"median_us":2.5,"mode":"m","requests":2,"tokens":3}"#;
        let Record::Cell(cell) = serde_json::from_str(line).unwrap() else {
            panic!("no cell");
        };
        assert_eq!((cell.implementation.as_str(), cell.us), (OURS, 2.5));
        assert_eq!((cell.setting, cell.size.tokens), (Setting::Layers, 3));
        assert!(!cell.is_early());
    }
}
