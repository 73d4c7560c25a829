//! `tune`: times every legal mode of each size, and says which is fastest and what the default policy
//! leaves on the table.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use kda_codegen::{EarlyReads, KernelSpec, Mode};
use kda_runtime::{Config, Gate, Measurement, Policies, PolicyFile};
use time::OffsetDateTime;

use crate::bench::record::{self, Cell, Record, Size};
use crate::bench::{Bench, Sizes, Times, mode_text};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    sizes: Sizes,
    /// What may be read before the kernel ahead has finished: weights, caches
    #[arg(long, value_delimiter = ',', default_value = "weights")]
    early_reads: Vec<EarlyReads>,
    /// Layers of the graph
    #[arg(long, default_value_t = 69)]
    layers: usize,
    /// Timed replays
    #[arg(long, default_value_t = 40)]
    replays: usize,
    /// File to append every time to, one JSON line each
    #[arg(long)]
    out: Option<PathBuf>,
    /// Policy file (TOML) of the fastest modes to write; it must not exist
    #[arg(long)]
    policies: Option<PathBuf>,
}

/// The modes of one size, fastest first.
struct Ranking {
    size: Size,
    early_reads: EarlyReads,
    /// Not empty.
    times: Vec<(Mode, Times)>,
    default: Option<Mode>,
}

impl Ranking {
    fn new(
        size: Size,
        early_reads: EarlyReads,
        mut times: Vec<(Mode, Times)>,
        default: Option<Mode>,
    ) -> Option<Ranking> {
        times.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
        (!times.is_empty()).then_some(Ranking {
            size,
            early_reads,
            times,
            default,
        })
    }

    /// By how many percent the default policy's mode is slower than the fastest.
    fn default_slower(&self) -> Option<f64> {
        let default = self.default?;
        let (_, times) = self.times.iter().find(|(mode, _)| *mode == default)?;
        Some((times.median / self.times[0].1.median - 1.0) * 100.0)
    }

    fn measurements(&self) -> impl Iterator<Item = Measurement> {
        self.times.iter().map(|&(mode, times)| Measurement {
            heads: self.size.heads,
            kind: self.size.kind(),
            early_reads: self.early_reads,
            rollback: self.size.rollback(),
            requests: self.size.requests,
            pitch: None,
            mode,
            // A nanosecond is less than the clock tells.
            microseconds: (times.median * 1e3).round() / 1e3,
        })
    }

    fn line(&self) -> String {
        let Size {
            heads,
            tokens,
            requests,
            ..
        } = self.size;
        let (best, times) = &self.times[0];
        let second = self
            .times
            .get(1)
            .map_or(String::from("-"), |(mode, second)| {
                format!(
                    "{mode} {:+.1}%",
                    (second.median / times.median - 1.0) * 100.0
                )
            });
        let default = match (self.default, self.default_slower()) {
            (Some(default), Some(slower)) => format!("{default} {slower:+.1}%"),
            _ => "-".into(),
        };
        format!(
            "{heads:5} {tokens:6} {requests:5} {:>7}  {:8.3}  {:<28}  {second:<36}  {default}{}",
            self.early_reads.to_string(),
            times.median,
            best.to_string(),
            self.size.variant(),
        )
    }
}

/// Measures everything the options name.
///
/// # Errors
///
/// No GPU, a kernel that does not compile, or an output outside its bound.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    // Minutes of measuring lie ahead of the write.
    if let Some(path) = options.policies.as_deref().filter(|path| path.exists()) {
        return Err(format!("{} exists; tune overwrites no policy file", path.display()).into());
    }
    let other = |size: &Size| size.projected_gate || size.bf16_state || size.softplus;
    if options.policies.is_some() && options.sizes.all().iter().any(other) {
        return Err(
            "a policy file holds times of low-rank lower-bound gates and f32 states".into(),
        );
    }
    let bench = Bench::open(options.layers, options.replays)?;
    println!(
        "heads tokens batch   early        us  {:<28}  {:<36}  default",
        "fastest", "second"
    );
    let mut slowest = 0.0f64;
    let mut measured = Vec::new();
    for &early_reads in &options.early_reads {
        for size in options.sizes.all() {
            let times = bench.modes(size, &legal(&bench, size, early_reads), early_reads)?;
            let kind = size.kind();
            let config = Config {
                early_reads,
                rollback: size.rollback(),
                gate: Gate::of_kind(size.gate()),
                gate_input: size.gate_input(),
                ..Config::kimi_k3(size.heads)
            };
            let default = Policies::for_device(bench.device(), &config, &[kind])
                .serving(kind, size.requests)
                .map(|policy| policy.mode);
            let Some(ranking) = Ranking::new(size, early_reads, times, default) else {
                continue;
            };
            println!("{}", ranking.line());
            slowest = slowest.max(ranking.default_slower().unwrap_or(0.0));
            if let Some(path) = &options.out {
                write(path, &ranking)?;
            }
            measured.extend(ranking.measurements());
        }
    }
    if let Some(path) = &options.policies {
        let date = OffsetDateTime::now_utc().date().to_string();
        let name = bench.device().name();
        let file = PolicyFile::from_measurements(name, bench.arch(), &date, &measured)?;
        fs::write(path, file.to_string())?;
    }
    println!("the default policy is at most {slowest:.1}% slower than the fastest mode");
    Ok(())
}

/// Every legal mode of a size.
fn legal(bench: &Bench, size: Size, early_reads: EarlyReads) -> Vec<Mode> {
    let mut spec = KernelSpec::new(bench.arch(), size.heads);
    spec.early_reads = early_reads;
    if size.tokens > 1 {
        spec = spec.with_verify(size.tokens);
    }
    spec.rollback = size.rollback();
    spec.gate = size.gate();
    spec.gate_input = size.gate_input();
    spec.state_dtype = size.state_dtype();
    spec.legal_modes()
}

/// Appends what was measured to a file.
fn write(path: &Path, ranking: &Ranking) -> Result<(), Box<dyn Error>> {
    let record = |(mode, times): &(Mode, Times)| {
        let mode = mode_text(*mode, ranking.early_reads);
        Record::Cell(Cell::new(ranking.size, &mode, *times))
    };
    record::append(path, &ranking.times.iter().map(record).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn no_policy_file_is_overwritten() {
        let folder = kda_tests::scratch();
        let file = folder.path().join("device.toml");
        fs::write(&file, "mine").unwrap();
        let text = file.to_str().unwrap();
        let said = |arguments: &[&str]| {
            let line = Line::parse_from([&["tune", "--policies"], arguments].concat());
            run(&line.options).unwrap_err().to_string()
        };
        assert!(said(&[text]).contains("overwrites no policy file"));
        // Nor is one written of other steps than it serves.
        let new = folder.path().join("new.toml");
        for other in [
            ["--state", "bf16"],
            ["--gate-input", "projected"],
            ["--gate", "softplus"],
        ] {
            let said = said(&[new.to_str().unwrap(), other[0], other[1]]);
            assert_eq!(
                said,
                "a policy file holds times of low-rank lower-bound gates and f32 states"
            );
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    }

    fn ranking(default: &str) -> Option<Ranking> {
        let size = Size {
            heads: 12,
            tokens: 1,
            requests: 8,
            ..Size::default()
        };
        let times = [("split1-256x8-block", 6.0), ("split8-128x8-cluster", 5.0)];
        let times = times.map(|(mode, median)| {
            let (min, p90) = (median, median);
            (mode.parse().unwrap(), Times { median, min, p90 })
        });
        Ranking::new(
            size,
            EarlyReads::Weights,
            times.into(),
            default.parse().ok(),
        )
    }

    #[test]
    fn the_fastest_comes_first() {
        let ranking = ranking("split1-256x8-block").unwrap();
        assert_eq!(ranking.times[0].0.to_string(), "split8-128x8-cluster");
        assert!((ranking.default_slower().unwrap() - 20.0).abs() < 1e-9);
        let line = ranking.line();
        assert_eq!(
            line.matches("split1-256x8-block +20.0%").count(),
            2,
            "{line}"
        );
    }

    #[test]
    fn a_default_that_was_not_measured_is_left_out() {
        assert_eq!(
            ranking("split2-256x8-cluster").unwrap().default_slower(),
            None
        );
        let none = Ranking::new(
            ranking("-").unwrap().size,
            EarlyReads::Weights,
            vec![],
            None,
        );
        assert!(none.is_none());
    }
}
