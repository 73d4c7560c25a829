//! Everything that can go wrong between a specialisation and a cubin. Owns the texts; knows no
//! recovery.

use std::fmt;
use std::path::PathBuf;

/// Why a specialisation was refused or could not be compiled.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A field of a specialisation has a value no kernel exists for.
    Illegal {
        /// The field's name as in [`KernelSpec`](crate::KernelSpec) or [`Mode`](crate::Mode).
        field: &'static str,
        /// The refused value.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
    /// A text names no known value.
    Unknown {
        /// What was being parsed.
        what: &'static str,
        /// The text.
        text: String,
        /// What would be accepted.
        allowed: String,
    },
    /// The constants template could not be rendered.
    Render {
        /// Entry point of the specialisation.
        entry: String,
        /// tera's error.
        source: tera::Error,
    },
    /// libnvrtc was not found or does not load.
    NvrtcMissing {
        /// Every place that was tried, in order.
        searched: Vec<PathBuf>,
    },
    /// libnvrtc was found but is too old or lacks a symbol.
    NvrtcUnusable {
        /// What is wrong with it.
        reason: String,
    },
    /// NVRTC rejected a kernel.
    Compile {
        /// Entry point of the specialisation.
        entry: String,
        /// The options it was compiled with.
        options: Vec<String>,
        /// NVRTC's log.
        log: String,
    },
    /// NVRTC's log or output lacks what every compilation has.
    Report {
        /// Entry point of the specialisation.
        entry: String,
        /// What was missing.
        missing: &'static str,
        /// NVRTC's log.
        log: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Illegal {
                field,
                value,
                allowed,
            } => {
                write!(f, "{field} is {value}, allowed: {allowed}")
            }
            Error::Unknown {
                what,
                text,
                allowed,
            } => {
                write!(f, "`{text}` is no {what}, allowed: {allowed}")
            }
            Error::Render { entry, source } => write!(f, "rendering {entry}: {source}"),
            Error::NvrtcMissing { searched } => {
                write!(f, "libnvrtc was not found, searched:")?;
                for place in searched {
                    write!(f, " {}", place.display())?;
                }
                Ok(())
            }
            Error::NvrtcUnusable { reason } => write!(f, "libnvrtc is unusable: {reason}"),
            Error::Compile {
                entry,
                options,
                log,
            } => {
                write!(
                    f,
                    "compiling {entry} with {}: {}",
                    options.join(" "),
                    log.trim()
                )
            }
            Error::Report {
                entry,
                missing,
                log,
            } => {
                write!(
                    f,
                    "nvrtc's output for {entry} has no {missing}: {}",
                    log.trim()
                )
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Render { source, .. } => Some(source),
            _ => None,
        }
    }
}
