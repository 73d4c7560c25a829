//! Which Python exception an error becomes. The text stays the library's own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kda_runtime::Error;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::{CastError, CastIntoError, PyErr};

/// An error on its way to Python.
pub(crate) enum Failure {
    /// The library's.
    Kda(Error),
    /// Python's, or one of this crate's own checks.
    Python(PyErr),
}

/// What everything between Python and the library returns.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Kda(error)
    }
}

impl From<kda_codegen::Error> for Failure {
    fn from(error: kda_codegen::Error) -> Failure {
        Failure::Kda(error.into())
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Failure {
        Failure::Python(error)
    }
}

impl From<CastError<'_, '_>> for Failure {
    fn from(error: CastError<'_, '_>) -> Failure {
        Failure::Python(error.into())
    }
}

impl From<CastIntoError<'_>> for Failure {
    fn from(error: CastIntoError<'_>) -> Failure {
        Failure::Python(error.into())
    }
}

/// A refused value.
pub(crate) fn value(text: String) -> Failure {
    Failure::Python(PyValueError::new_err(text))
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        let error = match failure {
            Failure::Python(error) => return error,
            Failure::Kda(error) => error,
        };
        let text = error.to_string();
        match error {
            Error::BundleUnreadable { .. } | Error::PolicyFileUnreadable { .. } => {
                PyOSError::new_err(text)
            }
            // What the machine or the moment lacks; everything else is a value that was given.
            Error::Codegen(
                kda_codegen::Error::Illegal { .. } | kda_codegen::Error::Unknown { .. },
            ) => PyValueError::new_err(text),
            Error::Codegen(_)
            | Error::KernelMissing { .. }
            | Error::NvrtcVersion { .. }
            | Error::DriverMissing
            | Error::DeviceUnsupported { .. }
            | Error::ArchUnsupported { .. }
            | Error::Cuda { .. }
            | Error::Capturing => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
    }
}

/// Runs `body`; a panic, a bug in this library, becomes a RuntimeError: pyo3's own exception for
/// it passes through `except Exception`.
pub(crate) fn guarded<T>(body: impl FnOnce() -> Outcome<T>) -> Result<T, PyErr> {
    catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| text.to_string())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            // A panic may carry a value whose own drop panics.
            std::mem::forget(panic);
            Err(PyRuntimeError::new_err(format!("a bug in prepared_kda: {text}")).into())
        })
        .map_err(PyErr::from)
}
