//! Everything that can go wrong between a configuration and a launch. Owns the texts.

use std::fmt;
use std::path::PathBuf;

use kda_codegen::Arch;

use crate::StepKind;
use crate::bundle::{Defect, Difference};
use crate::policy_file::PolicyDefect;

/// Why a step could not be prepared or launched. Nothing was launched.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A kernel's specialisation is illegal or did not compile.
    Codegen(kda_codegen::Error),
    /// No source has a kernel, and none may compile it.
    KernelMissing {
        /// Its entry point.
        entry: String,
        /// Its architecture.
        arch: Arch,
        /// Where the nearest kernel of a bundle differs first.
        nearest: Option<Difference>,
    },
    /// A bundle cannot be read.
    BundleUnreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A bundle is not whole.
    BundleDamaged {
        /// The file, or `bytes in memory`.
        path: PathBuf,
        /// What is wrong.
        defect: Defect,
    },
    /// A bundle was made from other sources than this crate's, or with other settings.
    BundleMismatch {
        /// The file, or `bytes in memory`.
        path: PathBuf,
        /// The kernel that differs; `None` when all do.
        entry: Option<String>,
        /// The first field that differs.
        difference: Difference,
    },
    /// A policy file cannot be read.
    PolicyFileUnreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A policy file, or what was to become one, is none.
    PolicyFileIllegal {
        /// The file, or `text in memory`.
        path: PathBuf,
        /// What is wrong.
        defect: PolicyDefect,
    },
    /// A policy file's times are of another architecture than the kernels are for.
    PolicyFileArch {
        /// The device that the file names.
        device: String,
        /// The file's architecture.
        found: Arch,
        /// The kernels' architecture.
        required: Arch,
    },
    /// The NVRTC that was found is not the required one.
    NvrtcVersion {
        /// Version found, major and minor.
        found: (i32, i32),
        /// Version required, major and minor.
        required: (i32, i32),
    },
    /// No kernel was prepared for a step's kind and size.
    PolicyMissing {
        /// Kind of the step.
        kind: StepKind,
        /// Requests of the step.
        requests: usize,
        /// Largest number of requests prepared for this kind; 0 when none is.
        prepared: usize,
    },
    /// An operand's address is 0.
    OperandMissing {
        /// Parameter name.
        operand: &'static str,
    },
    /// An operand was given to a kernel that has no use for it.
    OperandUnexpected {
        /// Parameter name.
        operand: &'static str,
        /// The setting that excludes it.
        setting: &'static str,
    },
    /// An operand's address or stride is not aligned.
    Misaligned {
        /// Parameter name.
        operand: &'static str,
        /// The address, or the stride in bytes.
        value: u64,
        /// Required alignment in bytes.
        alignment_bytes: usize,
    },
    /// An operand holds fewer elements than the step reaches.
    TooShort {
        /// Parameter name.
        operand: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A pitch or stride is smaller than what it separates.
    StrideTooSmall {
        /// Parameter name.
        operand: &'static str,
        /// Elements found.
        found: i64,
        /// Elements needed.
        needed: i64,
    },
    /// A count does not fit its 32-bit launch field.
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// Value found.
        found: usize,
        /// Largest value.
        most: usize,
    },
    /// A conv line has no room for the window and the drafts.
    ConvLineTooShort {
        /// Positions found.
        found: usize,
        /// Positions needed: 3 + columns − 1.
        needed: usize,
    },
    /// The slot table has fewer columns than the step has tokens.
    ColumnsTooFew {
        /// Columns found.
        found: usize,
        /// Columns needed.
        needed: usize,
    },
    /// The record pool has fewer records a slot than the step has tokens after its first.
    RecordsTooFew {
        /// Records found.
        found: usize,
        /// Records needed.
        needed: usize,
    },
    /// A setting has a value that no step computes with.
    IllegalSetting {
        /// Setting's name.
        setting: &'static str,
        /// Value found.
        value: f32,
        /// What is allowed.
        allowed: &'static str,
    },
    /// Operands that must not share memory do.
    Overlap {
        /// The written operand.
        written: &'static str,
        /// The other one.
        other: &'static str,
    },
    /// An operand lies in another device's memory.
    OtherDevice {
        /// Parameter name.
        operand: &'static str,
        /// Its address.
        address: u64,
        /// Ordinal of the device whose memory it is.
        found: i32,
        /// Ordinal of the device that would launch.
        expected: i32,
    },
    /// The CUDA driver library is absent or too old.
    DriverMissing,
    /// The driver does not take code of this compiler.
    DriverTooOld {
        /// The kernel's entry point.
        entry: String,
        /// CUDA version of the driver, major and minor.
        driver: (i32, i32),
        /// Version of the NVRTC that compiled the kernel, major and minor.
        nvrtc: (i32, i32),
    },
    /// A driver call failed.
    Cuda {
        /// Name of the call.
        call: &'static str,
        /// CUresult value.
        code: u32,
        /// Its name.
        name: String,
    },
    /// No kernel target exists for this device.
    DeviceUnsupported {
        /// Compute capability, major.
        major: i32,
        /// Compute capability, minor.
        minor: i32,
    },
    /// The device cannot run kernels of the architecture that was asked for.
    ArchUnsupported {
        /// The architecture.
        arch: Arch,
        /// Compute capability, major.
        major: i32,
        /// Compute capability, minor.
        minor: i32,
    },
    /// The stream is being captured, so nothing can be compiled, loaded or waited for.
    Capturing,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Codegen(source) => write!(f, "{source}"),
            Error::KernelMissing {
                entry,
                arch,
                nearest: None,
            } => {
                write!(
                    f,
                    "no source has {entry} for {arch}, and nvrtc is not among them"
                )
            }
            Error::KernelMissing {
                entry,
                arch,
                nearest: Some(difference),
            } => {
                write!(
                    f,
                    "no source has {entry} for {arch}, and nvrtc is not among them; nearest kernel \
                     of the bundle: {difference}"
                )?;
                match difference.option() {
                    Some(option) => write!(f, " (cargo xtask gen {option})"),
                    None => Ok(()),
                }
            }
            Error::BundleUnreadable { path, source }
            | Error::PolicyFileUnreadable { path, source } => {
                write!(f, "{}: {source}", path.display())
            }
            Error::PolicyFileIllegal { path, defect } => {
                write!(f, "{} is no policy file: {defect}", path.display())
            }
            Error::PolicyFileArch {
                device,
                found,
                required,
            } => write!(
                f,
                "the policy file of {device} is for {found}, kernels are for {required}"
            ),
            Error::BundleDamaged { path, defect } => {
                write!(f, "{} is no whole bundle: {defect}", path.display())
            }
            Error::BundleMismatch {
                path,
                entry: Some(entry),
                difference,
            } => {
                write!(
                    f,
                    "{} does not match for {entry}: {difference}",
                    path.display()
                )
            }
            Error::BundleMismatch {
                path,
                entry: None,
                difference,
            } => {
                write!(f, "{} does not match: {difference}", path.display())
            }
            Error::NvrtcVersion { found, required } => write!(
                f,
                "nvrtc {}.{} was found, {}.{} required",
                found.0, found.1, required.0, required.1
            ),
            Error::PolicyMissing {
                kind,
                requests,
                prepared: 0,
            } => {
                write!(
                    f,
                    "no {kind} kernel is prepared, {requests} requests asked for one"
                )
            }
            Error::PolicyMissing {
                kind,
                requests,
                prepared,
            } => write!(
                f,
                "{kind} kernels are prepared up to {prepared} requests, {requests} asked for one"
            ),
            Error::OperandMissing { operand } => write!(f, "{operand} has address 0"),
            Error::OperandUnexpected { operand, setting } => {
                write!(f, "{operand} was given, but {setting}")
            }
            Error::Misaligned {
                operand,
                value,
                alignment_bytes,
            } => {
                write!(
                    f,
                    "{operand} is at {value:#x}, which is not a multiple of {alignment_bytes} bytes"
                )
            }
            Error::TooShort {
                operand,
                found,
                needed,
            } => {
                write!(f, "{operand} holds {found} elements, {needed} needed")
            }
            Error::StrideTooSmall {
                operand,
                found,
                needed,
            } => {
                write!(
                    f,
                    "{operand} has a stride of {found} elements, {needed} needed"
                )
            }
            Error::TooLarge { what, found, most } => {
                write!(f, "{what} is {found}, at most {most} allowed")
            }
            Error::ConvLineTooShort { found, needed } => {
                write!(
                    f,
                    "conv_cache has {found} positions a line, {needed} needed"
                )
            }
            Error::ColumnsTooFew { found, needed } => {
                write!(f, "slots has {found} columns, {needed} needed")
            }
            Error::RecordsTooFew { found, needed } => {
                write!(f, "records has {found} records a slot, {needed} needed")
            }
            Error::IllegalSetting {
                setting,
                value,
                allowed,
            } => {
                write!(f, "{setting} is {value}, allowed: {allowed}")
            }
            Error::Overlap { written, other } => {
                write!(f, "{written} is written and shares memory with {other}")
            }
            Error::OtherDevice {
                operand,
                address,
                found,
                expected,
            } => write!(
                f,
                "{operand} at {address:#x} is memory of device {found}, the step runs on device \
                 {expected}"
            ),
            Error::DriverMissing => f.write_str("the CUDA driver library was not found"),
            Error::DriverTooOld {
                entry,
                driver,
                nvrtc,
            } => write!(
                f,
                "{entry} was compiled by nvrtc {}.{}, which this driver (CUDA {}.{}) does not take: \
                 update the driver, or compile with an nvrtc no newer than it",
                nvrtc.0, nvrtc.1, driver.0, driver.1
            ),
            Error::Cuda { call, code, name } => {
                write!(f, "{call} failed with {name} ({code})")?;
                f.write_str(match code {
                    201 | 400 => ": is it a stream of this object's context?",
                    // Those that stay: addresses, instructions, timeouts and assertions of kernels.
                    700 | 702 | 710 | 714..=719 => {
                        ": an earlier launch may be at fault, and the context is lost"
                    }
                    _ => "",
                })
            }
            Error::ArchUnsupported { arch, major, minor } => {
                write!(
                    f,
                    "compute capability {major}.{minor} runs no kernels of {arch}"
                )
            }
            Error::DeviceUnsupported { major, minor } => {
                write!(f, "no kernel exists for compute capability {major}.{minor}")
            }
            Error::Capturing => f.write_str(
                "the stream is being captured: prepare before, and take faults outside of captures",
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Codegen(source) => Some(source),
            Error::BundleUnreadable { source, .. } | Error::PolicyFileUnreadable { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }
}

impl From<kda_codegen::Error> for Error {
    fn from(source: kda_codegen::Error) -> Error {
        Error::Codegen(source)
    }
}
