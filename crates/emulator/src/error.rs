//! What a parse or a launch can report. Knows nothing of how a fault is found.

use std::fmt;

/// Where in the program and the grid a fault was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Site {
    /// Line in the PTX text, from 1.
    pub line: u32,
    /// The instruction, as written.
    pub instruction: String,
    /// Block index in the grid.
    pub block: [u32; 3],
    /// Thread index in the block, x fastest.
    pub thread: u32,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(
            f,
            "line {}, block ({x}, {y}, {z}), thread {}: `{}`",
            self.line, self.thread, self.instruction
        )
    }
}

/// State space an access ends in, generic addresses resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressSpace {
    /// Global memory.
    Global,
    /// Shared memory of the own block or of a block of the cluster.
    Shared,
    /// A thread's own memory.
    Local,
    /// Kernel parameters.
    Param,
}

impl fmt::Display for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AddressSpace::Global => "global",
            AddressSpace::Shared => "shared",
            AddressSpace::Local => "local",
            AddressSpace::Param => "param",
        })
    }
}

/// The bytes an access touched.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// State space.
    pub space: AddressSpace,
    /// Address as the instruction computed it.
    pub address: u64,
    /// Bytes accessed.
    pub len_bytes: u32,
    /// Buffer name, or the block that owns the shared memory; empty when the address is nobody's.
    pub buffer: String,
    /// Offset in bytes inside `buffer`.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes of {} memory at {:#x}",
            self.len_bytes, self.space, self.address
        )?;
        if !self.buffer.is_empty() {
            write!(f, " ({} + {})", self.buffer, self.offset)?;
        }
        Ok(())
    }
}

/// One warp, or part of a warp, that a hang found not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Block index in the grid.
    pub block: [u32; 3],
    /// Warp index in the block.
    pub warp: u32,
    /// Lanes concerned.
    pub lanes: u32,
    /// Line in the PTX text, from 1.
    pub line: u32,
    /// What it waits for, or `running`.
    pub what: String,
}

/// The kind of access on one side of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AccessKind {
    /// A plain read.
    Read,
    /// A read through the non-coherent path.
    NonCoherentRead,
    /// A plain write.
    Write,
    /// An atomic, volatile or relaxed access.
    Strong,
    /// A write by an asynchronous store or copy.
    AsyncWrite,
    /// A read by an asynchronous copy.
    AsyncRead,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AccessKind::Read => "read",
            AccessKind::NonCoherentRead => "non-coherent read",
            AccessKind::Write => "write",
            AccessKind::Strong => "strong access",
            AccessKind::AsyncWrite => "asynchronous write",
            AccessKind::AsyncRead => "asynchronous read",
        })
    }
}

/// Everything that can go wrong: a text that cannot be parsed, a launch that does not fit the
/// kernel, or the first fault of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX as this crate reads it.
    Syntax {
        /// Line in the PTX text.
        line: u32,
        /// The text at fault.
        text: String,
        /// What was expected.
        expected: &'static str,
    },
    /// An instruction, or a modifier of one, that the emulator does not execute.
    UnknownInstruction {
        /// Line in the PTX text.
        line: u32,
        /// The statement, as written.
        text: String,
    },
    /// A name that the text does not declare.
    UnknownName {
        /// Line in the PTX text.
        line: u32,
        /// The name.
        name: String,
    },
    /// The module has no such entry.
    NoEntry {
        /// The name asked for.
        entry: String,
    },
    /// The launch passes another number of parameters than the entry declares.
    ParamCount {
        /// Parameters passed.
        found: usize,
        /// Parameters declared.
        expected: usize,
    },
    /// A parameter has another size than the entry declares.
    ParamSize {
        /// Index of the parameter.
        index: usize,
        /// Bytes passed.
        found_bytes: usize,
        /// Bytes declared.
        expected_bytes: usize,
    },
    /// Grid, block or cluster dimensions are zero, too large or do not divide.
    Dimensions {
        /// What is wrong.
        what: &'static str,
        /// The dimensions passed.
        found: [u32; 3],
        /// The dimensions they must fit.
        expected: [u32; 3],
    },
    /// The block asks for more shared memory than a block can have.
    SharedTooLarge {
        /// Static and dynamic bytes.
        found_bytes: u64,
        /// Largest size in bytes.
        limit_bytes: u64,
    },
    /// No buffer has this name.
    NoBuffer {
        /// The name.
        name: String,
    },
    /// Two buffers overlap, or one lies outside the addresses a buffer can have.
    BufferPlacement {
        /// The buffer.
        name: String,
        /// Its first address.
        address: u64,
    },
    /// An access outside every buffer, shared window or local frame.
    OutOfBounds {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// An access whose address is not a multiple of its size.
    Misaligned {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// A read of bytes nobody wrote.
    Uninitialised {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// A write to a read-only buffer.
    ReadOnly {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// An access to the predecessor's data before the thread's dependency wait.
    BeforeDependency {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// Two accesses to the same bytes, one of them a write, that nothing orders.
    Race {
        /// Who made the later access.
        site: Box<Site>,
        /// Where.
        place: Place,
        /// Kind of the later access.
        kind: AccessKind,
        /// Who made the earlier access.
        earlier: Box<Site>,
        /// Kind of the earlier access.
        earlier_kind: AccessKind,
    },
    /// A generic write that an asynchronous copy touches without a proxy fence in between.
    MissingProxyFence {
        /// The copy.
        site: Box<Site>,
        /// Where.
        place: Place,
        /// The generic write.
        earlier: Box<Site>,
    },
    /// Nothing can run any more, or a thread exceeded its instruction budget.
    Hang {
        /// Every part of a warp that has not finished.
        waiting: Vec<Waiting>,
    },
    /// An aligned barrier that only a part of the warp's lanes reached.
    DivergentBarrier {
        /// Who.
        site: Box<Site>,
        /// Lanes at the barrier.
        lanes: u32,
        /// Lanes that have not exited.
        live: u32,
        /// Every part of a warp that has not finished.
        waiting: Vec<Waiting>,
    },
    /// A barrier used with an invalid number, count or order of operations.
    BarrierMisuse {
        /// Who.
        site: Box<Site>,
        /// What is wrong.
        what: &'static str,
    },
    /// An mbarrier operation on memory that holds no mbarrier, or an access to a live one's bytes.
    MbarrierMisuse {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
        /// What is wrong.
        what: &'static str,
    },
    /// An mbarrier operation that nothing orders after the mbarrier's initialisation.
    MbarrierNotVisible {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
        /// The initialisation.
        earlier: Box<Site>,
    },
    /// An access to another block's shared memory before the cluster's first barrier, which alone
    /// says that the block has started.
    BlockNotStarted {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// An access to, or an asynchronous store into, the shared memory of a block that has ended.
    EndedBlock {
        /// Who.
        site: Box<Site>,
        /// Where.
        place: Place,
    },
    /// A block that ends while asynchronous operations on its shared memory are not awaited.
    UnawaitedAsync {
        /// The block.
        block: [u32; 3],
        /// Line of the operation.
        line: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// A warp instruction that reads a lane that does not take part.
    InactiveLane {
        /// Who.
        site: Box<Site>,
        /// The lane read.
        lane: u32,
    },
    /// Integer division by zero.
    DivisionByZero {
        /// Who.
        site: Box<Site>,
    },
    /// A `trap`.
    Trap {
        /// Who.
        site: Box<Site>,
    },
}

impl Error {
    /// PTX line of the fault, where it has a single one.
    pub fn line(&self) -> Option<u32> {
        match self {
            Error::Syntax { line, .. }
            | Error::UnknownInstruction { line, .. }
            | Error::UnknownName { line, .. }
            | Error::UnawaitedAsync { line, .. } => Some(*line),
            Error::OutOfBounds { site, .. }
            | Error::Misaligned { site, .. }
            | Error::Uninitialised { site, .. }
            | Error::ReadOnly { site, .. }
            | Error::BeforeDependency { site, .. }
            | Error::Race { site, .. }
            | Error::MissingProxyFence { site, .. }
            | Error::DivergentBarrier { site, .. }
            | Error::BarrierMisuse { site, .. }
            | Error::MbarrierMisuse { site, .. }
            | Error::MbarrierNotVisible { site, .. }
            | Error::BlockNotStarted { site, .. }
            | Error::EndedBlock { site, .. }
            | Error::InactiveLane { site, .. }
            | Error::DivisionByZero { site }
            | Error::Trap { site } => Some(site.line),
            _ => None,
        }
    }
}

fn list(f: &mut fmt::Formatter<'_>, waiting: &[Waiting]) -> fmt::Result {
    for (i, w) in waiting.iter().enumerate() {
        let [x, y, z] = w.block;
        let comma = if i == 0 { "" } else { ";" };
        write!(
            f,
            "{comma} block ({x}, {y}, {z}) warp {} lanes {:#010x} at line {}: {}",
            w.warp, w.lanes, w.line, w.what
        )?;
    }
    Ok(())
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Syntax {
                line,
                text,
                expected,
            } => write!(f, "line {line}: expected {expected}, found `{text}`"),
            Error::UnknownInstruction { line, text } => {
                write!(f, "line {line}: instruction not supported: `{text}`")
            }
            Error::UnknownName { line, name } => write!(f, "line {line}: unknown name `{name}`"),
            Error::NoEntry { entry } => write!(f, "the module has no entry `{entry}`"),
            Error::ParamCount { found, expected } => {
                write!(
                    f,
                    "the launch passes {found} parameters, the entry declares {expected}"
                )
            }
            Error::ParamSize {
                index,
                found_bytes,
                expected_bytes,
            } => {
                write!(
                    f,
                    "parameter {index} has {found_bytes} bytes, the entry declares {expected_bytes}"
                )
            }
            Error::Dimensions {
                what,
                found,
                expected,
            } => write!(f, "{what}: {found:?} against {expected:?}"),
            Error::SharedTooLarge {
                found_bytes,
                limit_bytes,
            } => {
                write!(
                    f,
                    "{found_bytes} bytes of shared memory, at most {limit_bytes}"
                )
            }
            Error::NoBuffer { name } => write!(f, "no buffer named `{name}`"),
            Error::BufferPlacement { name, address } => {
                write!(
                    f,
                    "buffer `{name}` at {address:#x} overlaps another or exceeds the address range"
                )
            }
            Error::OutOfBounds { site, place } => {
                write!(f, "access out of bounds: {place}; {site}")
            }
            Error::Misaligned { site, place } => write!(f, "misaligned access: {place}; {site}"),
            Error::Uninitialised { site, place } => {
                write!(f, "read of bytes nobody wrote: {place}; {site}")
            }
            Error::ReadOnly { site, place } => {
                write!(f, "write to a read-only buffer: {place}; {site}")
            }
            Error::BeforeDependency { site, place } => {
                write!(
                    f,
                    "access to the predecessor's data before griddepcontrol.wait: {place}; {site}"
                )
            }
            Error::Race {
                site,
                place,
                kind,
                earlier,
                earlier_kind,
            } => {
                write!(
                    f,
                    "race on {place}: {kind} at {site}; not ordered after the {earlier_kind} at {earlier}"
                )
            }
            Error::MissingProxyFence {
                site,
                place,
                earlier,
            } => {
                write!(
                    f,
                    "no fence.proxy.async between a generic write and an asynchronous copy of {place}: copy at {site}; write at {earlier}"
                )
            }
            Error::Hang { waiting } => {
                f.write_str("the launch cannot end:")?;
                list(f, waiting)
            }
            Error::DivergentBarrier {
                site,
                lanes,
                live,
                waiting,
            } => {
                write!(
                    f,
                    "lanes {lanes:#010x} of {live:#010x} reached an aligned barrier: {site}; waiting:"
                )?;
                list(f, waiting)
            }
            Error::BarrierMisuse { site, what } => write!(f, "{what}: {site}"),
            Error::MbarrierMisuse { site, place, what } => write!(f, "{what}: {place}; {site}"),
            Error::MbarrierNotVisible {
                site,
                place,
                earlier,
            } => {
                write!(
                    f,
                    "mbarrier used before its initialisation is visible: {place}; {site}; initialised at {earlier}"
                )
            }
            Error::BlockNotStarted { site, place } => {
                write!(
                    f,
                    "access to the shared memory of a block that may not have started: {place}; {site}"
                )
            }
            Error::EndedBlock { site, place } => {
                write!(
                    f,
                    "access to the shared memory of a block that has ended: {place}; {site}"
                )
            }
            Error::UnawaitedAsync {
                block: [x, y, z],
                line,
                what,
            } => {
                write!(
                    f,
                    "block ({x}, {y}, {z}) ended, {what}; the operation is at line {line}"
                )
            }
            Error::InactiveLane { site, lane } => {
                write!(f, "lane {lane} takes no part in the instruction: {site}")
            }
            Error::DivisionByZero { site } => write!(f, "integer division by zero: {site}"),
            Error::Trap { site } => write!(f, "trap: {site}"),
        }
    }
}

impl std::error::Error for Error {}
