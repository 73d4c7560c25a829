//! Measured modes of one device in a text: which mode serves which step, and how long it took. Owns
//! the format and the choice among measurements; knows no device and no compiler.
//!
//! ```toml
//! device = "NVIDIA H200"
//! arch = "sm_90a"
//! date = "2026-12-02"
//! entries = [
//!     { heads = 12, kind = "decode", tokens = 1, early_reads = "weights", max_requests = 1, mode = "split8-128x8-cluster-hints", microseconds = 2.287 },
//!     { heads = 12, kind = "verify", tokens = 4, early_reads = "weights", rollback = "records", max_requests = 1, mode = "split8-128x8-cluster-hints", microseconds = 5.487 },
//! ]
//! ```
//!
//! The text comes from outside: it is read up to a size, nested up to a depth, and each value is
//! checked before it counts.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::LazyLock;

use kda_codegen::schedule::MAX_REQUESTS;
use kda_codegen::{Arch, EarlyReads, HEAD_DIM, MAX_HEADS, MAX_TOKENS, Mode};
use toml::{Table, Value};

use crate::bundle::{printable, read_bounded};
use crate::config::{StepKind, rule};
use crate::{Config, Error, Policies, Rollback};

/// Largest file that is read, in bytes: some 1,700 entries.
const MOST_BYTES: u64 = 256 << 10;
/// Longest time, in microseconds.
const MOST_MICROSECONDS: f64 = 1e9;
/// A mode of the rule stays unless another is faster by more than this share: medians of one mode
/// differ by as much from run to run.
const NOISE: f64 = 0.02;

const HEADER: [&str; 4] = ["device", "arch", "date", "entries"];
const FIELDS: [&str; 10] = [
    "heads",
    "kind",
    "tokens",
    "early_reads",
    "rollback",
    "min_requests",
    "max_requests",
    "pitch",
    "mode",
    "microseconds",
];

/// What keeps a text from being a policy file. Entries count from 1, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyDefect {
    /// It is larger than any policy file.
    TooLarge {
        /// Bytes found.
        found_bytes: u64,
        /// Most bytes allowed.
        most_bytes: u64,
    },
    /// It is no UTF-8.
    Encoding {
        /// Bytes before the first that are not.
        valid_bytes: usize,
    },
    /// It is no TOML, has a key twice, or nests deeper than any policy file.
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column in that line, from 1.
        column: usize,
        /// What is wrong there.
        reason: String,
    },
    /// A field that no policy file has.
    Unknown {
        /// The entry; `None` for the file's own fields.
        entry: Option<usize>,
        /// The field's name.
        field: String,
        /// The names there are.
        allowed: String,
    },
    /// A field is missing.
    Missing {
        /// The entry; `None` for the file's own fields.
        entry: Option<usize>,
        /// The field's name.
        field: &'static str,
    },
    /// A field's value is none that it may have.
    Value {
        /// The entry; `None` for the file's own fields.
        entry: Option<usize>,
        /// The field's name.
        field: &'static str,
        /// The value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// Two entries serve the same number of requests of the same step.
    Overlap {
        /// The later entry.
        entry: usize,
        /// The earlier one.
        other: usize,
        /// A number of requests that both serve.
        requests: usize,
    },
}

/// `entry 3: ` or nothing.
struct At(Option<usize>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(entry) => write!(f, "entry {entry}: "),
            None => Ok(()),
        }
    }
}

impl fmt::Display for PolicyDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyDefect::TooLarge {
                found_bytes,
                most_bytes,
            } => write!(
                f,
                "it has {found_bytes} bytes, at most {most_bytes} allowed"
            ),
            PolicyDefect::Encoding { valid_bytes } => {
                write!(f, "it is no UTF-8 after {valid_bytes} bytes")
            }
            PolicyDefect::Syntax {
                line,
                column,
                reason,
            } => write!(f, "line {line}, column {column}: {reason}"),
            PolicyDefect::Unknown {
                entry,
                field,
                allowed,
            } => write!(f, "{}{field} is unknown, allowed: {allowed}", At(*entry)),
            PolicyDefect::Missing { entry, field } => {
                write!(f, "{}{field} is missing", At(*entry))
            }
            PolicyDefect::Value {
                entry,
                field,
                value,
                allowed,
            } => write!(f, "{}{field} is {value}, allowed: {allowed}", At(*entry)),
            PolicyDefect::Overlap {
                entry,
                other,
                requests,
            } => write!(
                f,
                "entry {entry} serves {requests} requests, which entry {other} serves too"
            ),
        }
    }
}

/// One line of a policy file: steps of one kind, on one share of heads, of `min_requests` to
/// `max_requests` requests run in `mode`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyEntry {
    /// Heads on the device.
    pub heads: usize,
    /// Kind of the step, with its tokens.
    pub kind: StepKind,
    /// What the step may read early.
    pub early_reads: EarlyReads,
    /// What the step keeps; checkpoints in decode steps. A file leaves checkpoints out.
    pub rollback: Rollback,
    /// Fewest requests. A file may leave it out for one more than the entry before serves.
    pub min_requests: usize,
    /// Most requests: the number that was measured.
    pub max_requests: usize,
    /// Elements between projected rows when it was measured; `None`: as tight as they fit. Kernels
    /// take any: it is for an engine that lays its projection out by it.
    pub pitch: Option<usize>,
    /// Schedule.
    pub mode: Mode,
    /// Time of a step at `max_requests`.
    pub microseconds: f64,
}

/// One mode's time on one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    /// Heads on the device.
    pub heads: usize,
    /// Kind of the step, with its tokens.
    pub kind: StepKind,
    /// What the step may read early.
    pub early_reads: EarlyReads,
    /// What the step keeps; checkpoints in decode steps. A file leaves checkpoints out.
    pub rollback: Rollback,
    /// Requests.
    pub requests: usize,
    /// Elements between projected rows; `None`: as tight as they fit.
    pub pitch: Option<usize>,
    /// Schedule.
    pub mode: Mode,
    /// Time of the step.
    pub microseconds: f64,
}

/// The measured modes of one device; every value is legal, the entries are sorted.
///
/// ```
/// use kda_runtime::{
///     Arch, Config, EarlyReads, Measurement, Policies, PolicyFile, Rollback, StepKind,
/// };
///
/// let time = |requests, mode: &str, microseconds| {
///     Ok::<_, kda_runtime::Error>(Measurement {
///         heads: 12,
///         kind: StepKind::Decode,
///         early_reads: EarlyReads::Weights,
///         rollback: Rollback::Checkpoints,
///         requests,
///         pitch: None,
///         mode: mode.parse()?,
///         microseconds,
///     })
/// };
/// let times = [
///     time(1, "split8-128x8-cluster-hints", 2.29)?,
///     time(1, "split2-256x8-cluster-hints", 2.83)?,
///     time(2, "split4-128x8-cluster-hints", 2.67)?,
/// ];
/// let file = PolicyFile::from_measurements("NVIDIA H200", Arch::Sm90a, "2026-12-02", &times)?;
/// // Deterministic; reads back as the same file.
/// let text = file.to_string();
/// assert_eq!(text.parse::<PolicyFile>()?, file);
///
/// let config = Config::kimi_k3(12);
/// let policies = Policies::from_file(&file, Arch::Sm90a, &config, &[StepKind::Decode])?;
/// assert_eq!(policies.0[0].mode, times[0].mode);
/// # Ok::<(), kda_runtime::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyFile {
    device: String,
    arch: Arch,
    date: String,
    entries: Vec<PolicyEntry>,
}

impl PolicyFile {
    /// A file of these entries, in any order.
    ///
    /// # Errors
    ///
    /// [`Error::PolicyFileIllegal`] for a value that no policy file has, and for two entries that
    /// serve the same step.
    pub fn new(
        device: &str,
        arch: Arch,
        date: &str,
        entries: &[PolicyEntry],
    ) -> Result<PolicyFile, Error> {
        let lines = entries.iter().map(|entry| Line {
            entry: *entry,
            given: true,
        });
        build(device, arch, date, lines.collect()).map_err(in_memory)
    }

    /// A file of the best mode for each step and number of requests that was measured: the
    /// fastest, but the one that [`Policies::for_device`](crate::Policies::for_device) chooses by
    /// the number of (request, head) pairs where the fastest is no more than 2 % ahead. A mode that
    /// was measured twice counts with the later time.
    ///
    /// An entry serves batches down to one more than the next smaller measured, or than half its
    /// own, whichever is more: nobody measured what lies between.
    ///
    /// # Errors
    ///
    /// As [`PolicyFile::new`]; entries count as measurements do.
    pub fn from_measurements(
        device: &str,
        arch: Arch,
        date: &str,
        measurements: &[Measurement],
    ) -> Result<PolicyFile, Error> {
        let mut cells: BTreeMap<(Step, usize), BTreeMap<Mode, Measurement>> = BTreeMap::new();
        for (index, measured) in measurements.iter().enumerate() {
            check(arch, index + 1, &measured.entry()).map_err(in_memory)?;
            let key = measured.entry().key();
            cells
                .entry(key)
                .or_default()
                .insert(measured.mode, *measured);
        }
        let mut entries: Vec<PolicyEntry> = Vec::new();
        for modes in cells.values() {
            let Some(fastest) = modes
                .values()
                .min_by(|a, b| a.microseconds.total_cmp(&b.microseconds))
            else {
                continue;
            };
            let kind = fastest.kind;
            let kept = Policies(rule(arch, &fastest.entry().config(), kind))
                .serving(kind, fastest.requests)
                .and_then(|policy| modes.get(&policy.mode))
                .filter(|kept| kept.microseconds <= fastest.microseconds * (1.0 + NOISE));
            let mut entry = kept.unwrap_or(fastest).entry();
            let least = least_requests(entries.last(), &entry);
            entry.min_requests = least.max(entry.max_requests / 2 + 1);
            entries.push(entry);
        }
        PolicyFile::new(device, arch, date, &entries)
    }

    /// Reads a policy file of at most 256 KiB.
    ///
    /// # Errors
    ///
    /// [`Error::PolicyFileUnreadable`] when the file cannot be read or is larger,
    /// [`Error::PolicyFileIllegal`] for a text that is none: no TOML, or a field that is unknown,
    /// missing or has a value that is not allowed.
    pub fn from_path(path: &Path) -> Result<PolicyFile, Error> {
        let bytes =
            read_bounded(path, MOST_BYTES).map_err(|source| Error::PolicyFileUnreadable {
                path: path.into(),
                source,
            })?;
        let illegal = |defect| Error::PolicyFileIllegal {
            path: path.into(),
            defect,
        };
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            illegal(PolicyDefect::Encoding {
                valid_bytes: error.valid_up_to(),
            })
        })?;
        parse(text).map_err(illegal)
    }

    /// The files that this crate carries, one a measured device.
    pub fn shipped() -> &'static [PolicyFile] {
        static SHIPPED: LazyLock<Vec<PolicyFile>> = LazyLock::new(|| {
            let texts = [include_str!("../policies/h200.toml")];
            // A test reads each; none is better than a panic in an engine.
            texts.iter().filter_map(|text| parse(text).ok()).collect()
        });
        &SHIPPED
    }

    /// Name of the device, as the driver says it.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The device's architecture.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Fails for a file of another architecture than `required`, that of the kernels.
    ///
    /// # Errors
    ///
    /// [`Error::PolicyFileArch`].
    pub fn require_arch(&self, required: Arch) -> Result<(), Error> {
        if self.arch == required {
            return Ok(());
        }
        Err(Error::PolicyFileArch {
            device: self.device.clone(),
            found: self.arch,
            required,
        })
    }

    /// Day of the measurement, `YYYY-MM-DD`.
    pub fn date(&self) -> &str {
        &self.date
    }

    /// The entries: by heads, kind, tokens, early reads, rollback and requests.
    pub fn entries(&self) -> &[PolicyEntry] {
        &self.entries
    }

    /// The entry that serves a step of `kind` with these settings, if one was measured.
    pub fn entry(&self, config: &Config, kind: StepKind, requests: usize) -> Option<&PolicyEntry> {
        self.of(config, kind)
            .find(|entry| (entry.min_requests..=entry.max_requests).contains(&requests))
    }

    /// The entries of one kind with these settings, fewest requests first.
    pub(crate) fn of(&self, config: &Config, kind: StepKind) -> impl Iterator<Item = &PolicyEntry> {
        let rollback = config.rollback_of(kind);
        let step = (config.heads, kind, config.early_reads, rollback);
        self.entries
            .iter()
            .filter(move |entry| entry.step() == step)
    }
}

/// What an entry is for, but for the number of requests; the order in a file.
type Step = (usize, StepKind, EarlyReads, Rollback);

impl Measurement {
    fn entry(&self) -> PolicyEntry {
        let Measurement {
            heads,
            kind,
            early_reads,
            rollback,
            requests,
            pitch,
            mode,
            microseconds,
        } = *self;
        PolicyEntry {
            heads,
            kind,
            early_reads,
            rollback,
            min_requests: 1,
            max_requests: requests,
            pitch,
            mode,
            microseconds,
        }
    }
}

impl PolicyEntry {
    fn step(&self) -> Step {
        (self.heads, self.kind, self.early_reads, self.rollback)
    }

    fn key(&self) -> (Step, usize) {
        (self.step(), self.max_requests)
    }

    /// Settings that the entry holds for.
    fn config(&self) -> Config {
        Config {
            early_reads: self.early_reads,
            rollback: self.rollback,
            ..Config::kimi_k3(self.heads)
        }
    }
}

/// Writes the file; equal files give equal texts.
impl fmt::Display for PolicyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PolicyFile {
            device,
            arch,
            date,
            entries,
        } = self;
        // Names and dates hold nothing that TOML escapes.
        writeln!(f, "device = \"{device}\"")?;
        writeln!(f, "arch = \"{arch}\"")?;
        writeln!(f, "date = \"{date}\"")?;
        writeln!(f, "entries = [")?;
        let mut before: Option<&PolicyEntry> = None;
        for entry in entries {
            let PolicyEntry {
                heads,
                kind,
                early_reads,
                rollback,
                min_requests,
                max_requests,
                pitch,
                mode,
                microseconds,
            } = entry;
            write!(
                f,
                "    {{ heads = {heads}, kind = \"{}\", tokens = {}, early_reads = \"{early_reads}\"",
                kind_name(*kind),
                kind.tokens()
            )?;
            if *rollback != Rollback::Checkpoints {
                write!(f, ", rollback = \"{rollback}\"")?;
            }
            if *min_requests != least_requests(before, entry) {
                write!(f, ", min_requests = {min_requests}")?;
            }
            write!(f, ", max_requests = {max_requests}")?;
            if let Some(pitch) = pitch {
                write!(f, ", pitch = {pitch}")?;
            }
            // The shortest digits that read back as the same number.
            writeln!(
                f,
                ", mode = \"{mode}\", microseconds = {microseconds:?} }},"
            )?;
            before = Some(entry);
        }
        writeln!(f, "]")
    }
}

impl FromStr for PolicyFile {
    type Err = Error;

    fn from_str(text: &str) -> Result<PolicyFile, Error> {
        parse(text).map_err(in_memory)
    }
}

fn in_memory(defect: PolicyDefect) -> Error {
    Error::PolicyFileIllegal {
        path: PathBuf::from("text in memory"),
        defect,
    }
}

fn kind_name(kind: StepKind) -> &'static str {
    if kind.is_verify() { "verify" } else { "decode" }
}

/// Fewest requests of an entry that does not say.
fn least_requests(before: Option<&PolicyEntry>, entry: &PolicyEntry) -> usize {
    before
        .filter(|before| before.step() == entry.step())
        .map_or(1, |before| before.max_requests + 1)
}

/// An entry before it is sorted in.
struct Line {
    entry: PolicyEntry,
    /// Whether its `min_requests` was given.
    given: bool,
}

fn value(
    entry: Option<usize>,
    field: &'static str,
    value: &dyn fmt::Display,
    allowed: impl Into<String>,
) -> PolicyDefect {
    PolicyDefect::Value {
        entry,
        field,
        value: printable(&value.to_string()),
        allowed: allowed.into(),
    }
}

/// Checks everything, sorts, and settles what each entry serves.
fn build(
    device: &str,
    arch: Arch,
    date: &str,
    lines: Vec<Line>,
) -> Result<PolicyFile, PolicyDefect> {
    let plain = |c: char| (c.is_ascii_graphic() || c == ' ') && c != '"' && c != '\\';
    if device.is_empty() || device.len() > 100 || !device.chars().all(plain) {
        let allowed = "1..=100 printable ASCII characters without \" and \\";
        return Err(value(None, "device", &quoted(device), allowed));
    }
    if !is_date(date) {
        return Err(value(None, "date", &quoted(date), "a day as YYYY-MM-DD"));
    }
    for (index, line) in lines.iter().enumerate() {
        check(arch, index + 1, &line.entry)?;
    }
    let mut lines: Vec<(usize, Line)> = (1..).zip(lines).collect();
    lines.sort_by_key(|(_, line)| line.entry.key());
    let mut entries: Vec<PolicyEntry> = Vec::with_capacity(lines.len());
    let mut before = 0;
    for (index, mut line) in lines {
        let least = least_requests(entries.last(), &line.entry);
        if !line.given {
            line.entry.min_requests = least;
        }
        if line.entry.min_requests < least || line.entry.max_requests < least {
            return Err(PolicyDefect::Overlap {
                entry: index.max(before),
                other: index.min(before),
                requests: least - 1,
            });
        }
        entries.push(line.entry);
        before = index;
    }
    Ok(PolicyFile {
        device: device.into(),
        arch,
        date: date.into(),
        entries,
    })
}

/// Checks one entry by itself.
fn check(arch: Arch, index: usize, entry: &PolicyEntry) -> Result<(), PolicyDefect> {
    let PolicyEntry {
        heads,
        kind,
        early_reads: _,
        rollback,
        min_requests,
        max_requests,
        pitch,
        mode,
        microseconds,
    } = *entry;
    let illegal = |field, found: &dyn fmt::Display, allowed: String| {
        Err(value(Some(index), field, found, allowed))
    };
    if !(1..=MAX_HEADS).contains(&heads) {
        return illegal("heads", &heads, format!("1..={MAX_HEADS}"));
    }
    if !(1..=MAX_TOKENS).contains(&kind.tokens()) {
        return illegal("tokens", &kind.tokens(), format!("1..={MAX_TOKENS}"));
    }
    if !(1..=MAX_REQUESTS).contains(&max_requests) {
        return illegal("max_requests", &max_requests, format!("1..={MAX_REQUESTS}"));
    }
    if !(1..=max_requests).contains(&min_requests) {
        return illegal("min_requests", &min_requests, format!("1..={max_requests}"));
    }
    let least = 4 * heads * HEAD_DIM + HEAD_DIM + heads;
    let most = i32::MAX as usize;
    if let Some(pitch) = pitch
        && !(least..=most).contains(&pitch)
    {
        let allowed = format!("{least}..={most} with {heads} heads");
        return illegal("pitch", &pitch, allowed);
    }
    if !(microseconds > 0.0 && microseconds <= MOST_MICROSECONDS) {
        let allowed = format!("above 0, at most {MOST_MICROSECONDS:e}");
        return illegal("microseconds", &microseconds, allowed);
    }
    let config = entry.config();
    if rollback != config.rollback_of(kind) {
        let allowed = "checkpoints in decode steps".into();
        return illegal("rollback", &quoted(&rollback.to_string()), allowed);
    }
    match config.spec(arch, kind, mode).validate() {
        Ok(()) => Ok(()),
        Err(kda_codegen::Error::Illegal {
            field: "early_reads",
            value: found,
            allowed,
        }) => illegal("early_reads", &quoted(&found), allowed),
        Err(kda_codegen::Error::Illegal {
            field,
            value: found,
            allowed,
        }) => {
            let allowed = format!("{field} {allowed} (it is {found})");
            illegal("mode", &quoted(&mode.to_string()), allowed)
        }
        Err(error) => illegal("mode", &quoted(&mode.to_string()), error.to_string()),
    }
}

fn is_date(text: &str) -> bool {
    let bytes = text.as_bytes();
    let number = |from: usize, to: usize| {
        let digits = bytes.get(from..to)?;
        let all = digits.iter().all(u8::is_ascii_digit);
        all.then(|| digits.iter().fold(0, |n, d| 10 * n + u32::from(d - b'0')))
    };
    bytes.len() == 10
        && (bytes[4], bytes[7]) == (b'-', b'-')
        && number(0, 4).is_some()
        && number(5, 7).is_some_and(|month| (1..=12).contains(&month))
        && number(8, 10).is_some_and(|day| (1..=31).contains(&day))
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", printable(text))
}

/// A value as an error says it.
fn described(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => format!("{number:?}"),
        Value::Boolean(flag) => flag.to_string(),
        Value::Datetime(_) => "a date of TOML".into(),
        Value::Array(_) => "a list".into(),
        Value::Table(_) => "a table".into(),
    }
}

fn parse(text: &str) -> Result<PolicyFile, PolicyDefect> {
    if text.len() as u64 > MOST_BYTES {
        return Err(PolicyDefect::TooLarge {
            found_bytes: text.len() as u64,
            most_bytes: MOST_BYTES,
        });
    }
    let table: Table = toml::from_str(text).map_err(|error: toml::de::Error| {
        let at = error.span().map_or(0, |span| span.start);
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        PolicyDefect::Syntax {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            reason: printable(error.message()),
        }
    })?;
    let file = Fields {
        table: &table,
        entry: None,
    };
    file.known(&HEADER)?;
    let device = file.text("device")?;
    let arch = file.choice("arch", Arch::ALL)?;
    let date = file.text("date")?;
    let found = file.get("entries")?;
    let Value::Array(list) = found else {
        return Err(file.wrong("entries", found, "a list of tables"));
    };
    let mut lines = Vec::with_capacity(list.len());
    for (index, found) in list.iter().enumerate() {
        let Value::Table(table) = found else {
            let allowed = "a list of tables";
            return Err(value(
                Some(index + 1),
                "entries",
                &described(found),
                allowed,
            ));
        };
        let entry = Fields {
            table,
            entry: Some(index + 1),
        };
        lines.push(entry.line()?);
    }
    build(device, arch, date, lines)
}

/// The fields of the file or of one entry.
struct Fields<'a> {
    table: &'a Table,
    entry: Option<usize>,
}

impl<'a> Fields<'a> {
    fn known(&self, names: &[&str]) -> Result<(), PolicyDefect> {
        match self.table.keys().find(|key| !names.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(PolicyDefect::Unknown {
                entry: self.entry,
                field: quoted(key),
                allowed: names.join(", "),
            }),
        }
    }

    fn wrong(&self, field: &'static str, found: &Value, allowed: &str) -> PolicyDefect {
        value(self.entry, field, &described(found), allowed)
    }

    fn get(&self, field: &'static str) -> Result<&'a Value, PolicyDefect> {
        self.table.get(field).ok_or(PolicyDefect::Missing {
            entry: self.entry,
            field,
        })
    }

    fn text(&self, field: &'static str) -> Result<&'a str, PolicyDefect> {
        let found = self.get(field)?;
        let text = found.as_str();
        text.ok_or_else(|| self.wrong(field, found, "a text"))
    }

    /// One of a type's alternatives by its text.
    fn choice<T: Copy + fmt::Display>(
        &self,
        field: &'static str,
        all: &[T],
    ) -> Result<T, PolicyDefect> {
        let found = self.get(field)?;
        let named = |text: &str| all.iter().find(|one| one.to_string() == text);
        found.as_str().and_then(named).copied().ok_or_else(|| {
            let names: Vec<String> = all.iter().map(T::to_string).collect();
            self.wrong(field, found, &names.join(", "))
        })
    }

    /// A number that is not negative; `build` holds it to its range.
    fn number(&self, field: &'static str) -> Result<usize, PolicyDefect> {
        let found = self.get(field)?;
        let number = found.as_integer().and_then(|n| usize::try_from(n).ok());
        number.ok_or_else(|| self.wrong(field, found, "a whole number, 0 and up"))
    }

    fn optional(&self, field: &'static str) -> Result<Option<usize>, PolicyDefect> {
        if self.table.contains_key(field) {
            self.number(field).map(Some)
        } else {
            Ok(None)
        }
    }

    fn line(&self) -> Result<Line, PolicyDefect> {
        self.known(&FIELDS)?;
        let tokens = self.number("tokens")?;
        let kind = match self.choice("kind", &["decode", "verify"])? {
            "verify" => StepKind::Verify(tokens),
            _ if tokens == 1 => StepKind::Decode,
            _ => {
                return Err(value(self.entry, "tokens", &tokens, "1 for decode"));
            }
        };
        let text = self.get("mode")?;
        let mode = text
            .as_str()
            .ok_or_else(|| self.wrong("mode", text, "a text"))?;
        let mode = match mode.parse::<Mode>() {
            // Another spelling of the same, such as `split01`, would not be written back.
            Ok(parsed) if parsed.to_string() == mode => parsed,
            Ok(parsed) => return Err(self.wrong("mode", text, &quoted(&parsed.to_string()))),
            Err(kda_codegen::Error::Unknown { allowed, .. }) => {
                return Err(self.wrong("mode", text, &allowed));
            }
            Err(error) => return Err(self.wrong("mode", text, &error.to_string())),
        };
        let time = self.get("microseconds")?;
        let microseconds = match time {
            Value::Float(number) => *number,
            Value::Integer(number) => *number as f64,
            _ => return Err(self.wrong("microseconds", time, "a number")),
        };
        let min_requests = self.optional("min_requests")?;
        let entry = PolicyEntry {
            heads: self.number("heads")?,
            kind,
            early_reads: self.choice("early_reads", EarlyReads::ALL)?,
            rollback: match self.table.contains_key("rollback") {
                true => self.choice("rollback", Rollback::ALL)?,
                false => Rollback::Checkpoints,
            },
            min_requests: min_requests.unwrap_or(1),
            max_requests: self.number("max_requests")?,
            pitch: self.optional("pitch")?,
            mode,
            microseconds,
        };
        Ok(Line {
            entry,
            given: min_requests.is_some(),
        })
    }
}
