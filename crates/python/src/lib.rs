//! Python interface of [`kda_runtime`]: the native half of the package `prepared_kda`.
//!
//! Tensors are read by their own methods and interfaces, so nothing here depends on torch or NumPy.
//! Lengths and strides are in elements. Errors are Python exceptions with the library's text, no
//! panic crosses, and the interpreter is free while kernels compile, launch and are waited for.
//! `python/prepared_kda/_native.pyi` documents what Python sees.

mod error;
mod operands;
mod settings;
mod tensor;

use std::path::PathBuf;

use kda_codegen::{Arch, KernelSpec, Nvrtc, Resources};
use kda_runtime::{
    Config, Device, FaultKind, Kernels, Origin, PreparedKda, PreparedReset, StepKind, Stream,
    encode_bundle,
};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use error::{Outcome, guarded};
use operands::{Home, LayerWeights, OPERANDS, Weight};
use settings::{
    ConfigFields, PolicyFields, SourceFields, nvrtc_folders, policies_of, policy_file_of,
};
use tensor::Dtype;

/// A layer's weights, read at every launch from where they are then.
#[pyclass(frozen, module = "prepared_kda")]
struct Weights(LayerWeights);

#[pymethods]
impl Weights {
    #[new]
    #[pyo3(signature = (*, conv, f_b=None, a_log, dt_bias, norm, conv_bias=None))]
    fn new(
        conv: &Bound<'_, PyAny>,
        f_b: Option<&Bound<'_, PyAny>>,
        a_log: &Bound<'_, PyAny>,
        dt_bias: &Bound<'_, PyAny>,
        norm: &Bound<'_, PyAny>,
        conv_bias: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Weights> {
        guarded(|| {
            Ok(Weights(LayerWeights {
                conv: operands::conv_weight(conv)?,
                conv_bias: conv_bias
                    .map(|bias| Weight::new(bias, "conv_bias", Dtype::F32))
                    .transpose()?,
                f_b: f_b
                    .map(|f_b| Weight::new(f_b, "f_b", Dtype::Bf16))
                    .transpose()?,
                a_log: Weight::new(a_log, "a_log", Dtype::F32)?,
                dt_bias: Weight::new(dt_bias, "dt_bias", Dtype::F32)?,
                norm: Weight::new(norm, "norm", Dtype::F32)?,
            }))
        })
    }
}

/// What is known of one kernel.
#[pyclass(frozen, get_all, module = "prepared_kda")]
struct Kernel {
    entry: String,
    arch: String,
    verify_tokens: usize,
    mode: String,
    key: String,
    origin: String,
    registers: Option<u32>,
    spill_bytes: Option<u32>,
    shared_bytes: Option<u32>,
    blocks_per_request: u32,
    threads: u32,
    cluster: u32,
}

#[pymethods]
impl Kernel {
    fn __repr__(&self) -> String {
        format!("<Kernel {} for {}, {}>", self.entry, self.arch, self.origin)
    }
}

fn kernel_of(
    entry: &str,
    spec: &kda_codegen::KernelSpec,
    key: kda_runtime::KernelKey,
    origin: Origin,
    resources: Option<Resources>,
) -> Outcome<Kernel> {
    let launch = spec.launch(1)?;
    Ok(Kernel {
        entry: entry.into(),
        arch: spec.arch.to_string(),
        verify_tokens: if spec.verify { spec.tokens } else { 0 },
        mode: spec.mode.to_string(),
        key: key.to_string(),
        origin: origin.to_string(),
        registers: resources.map(|r| r.registers),
        spill_bytes: resources.map(|r| r.spill_store_bytes + r.spill_load_bytes),
        shared_bytes: resources.map(|r| r.shared_bytes),
        blocks_per_request: launch.grid[0],
        threads: launch.block[0],
        cluster: launch.cluster[0],
    })
}

/// What the device refused since the last look.
#[pyclass(frozen, get_all, module = "prepared_kda")]
struct Faults {
    count: u32,
    request: u32,
    kind: &'static str,
}

#[pymethods]
impl Faults {
    fn __repr__(&self) -> String {
        let Faults {
            count,
            request,
            kind,
        } = self;
        format!("Faults(count={count}, request={request}, kind='{kind}')")
    }
}

fn faults_of(faults: kda_runtime::Faults) -> Faults {
    Faults {
        count: faults.count,
        request: faults.request,
        kind: match faults.kind {
            FaultKind::AcceptedOutOfRange => "accepted-out-of-range",
            FaultKind::NullSource => "null-source",
            FaultKind::TokensOutOfRange => "tokens-out-of-range",
            _ => "slot-out-of-range",
        },
    }
}

/// The dimensions of a launch.
#[pyclass(frozen, get_all, module = "prepared_kda")]
struct Launch {
    kernel: usize,
    grid: (u32, u32, u32),
    block: (u32, u32, u32),
    cluster: (u32, u32, u32),
}

#[pymethods]
impl Launch {
    fn __repr__(&self) -> String {
        format!(
            "Launch(kernel={}, grid={:?}, block={:?}, cluster={:?})",
            self.kernel, self.grid, self.block, self.cluster
        )
    }
}

/// A CUstream as an integer: an int, a torch stream, or what has `__cuda_stream__`.
fn stream_of(stream: &Bound<'_, PyAny>) -> Outcome<usize> {
    let py = stream.py();
    if let Ok(handle) = stream.extract() {
        return Ok(handle);
    }
    if let Some(handle) = stream.getattr_opt(intern!(py, "cuda_stream"))? {
        return Ok(handle.extract()?);
    }
    if let Some(protocol) = stream.getattr_opt(intern!(py, "__cuda_stream__"))? {
        let (_version, handle): (u32, usize) = protocol.call0()?.extract()?;
        return Ok(handle);
    }
    let kind = stream.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "stream is a {kind}, expected a handle, a torch stream or an object with __cuda_stream__"
    ))
    .into())
}

/// (tokens of a verify step or 0, largest number of requests, index of the kernel).
type PolicyRow = (usize, usize, usize);

fn policy_row((kind, most, kernel): (StepKind, usize, usize)) -> PolicyRow {
    let verify_tokens = match kind {
        StepKind::Decode => 0,
        StepKind::Verify(tokens) => tokens,
    };
    (verify_tokens, most, kernel)
}

/// The keyword arguments, none being none.
fn given<'py>(py: Python<'py>, operands: Option<Bound<'py, PyDict>>) -> Bound<'py, PyDict> {
    operands.unwrap_or_else(|| PyDict::new(py))
}

/// Kernels of one model on one device.
#[pyclass(frozen, weakref, module = "prepared_kda")]
struct Kda {
    prepared: PreparedKda,
    config: Config,
    arch: Arch,
    home: Home,
}

#[pymethods]
impl Kda {
    #[new]
    #[pyo3(signature = (config, policies, *, device, stream=None, policy_file=None, bundle=None,
        cache_folder=None, nvrtc_folder=None, compile=true, host_memory=false))]
    #[expect(clippy::too_many_arguments, reason = "Python sees keywords, one each")]
    fn new(
        py: Python<'_>,
        config: ConfigFields,
        policies: Vec<PolicyFields>,
        device: i32,
        stream: Option<&Bound<'_, PyAny>>,
        policy_file: Option<&Bound<'_, PyAny>>,
        bundle: Option<Bound<'_, PyAny>>,
        cache_folder: Option<PathBuf>,
        nvrtc_folder: Option<PathBuf>,
        compile: bool,
        host_memory: bool,
    ) -> PyResult<Kda> {
        guarded(|| {
            let config = config.config()?;
            let stream = stream.map_or(Ok(0), stream_of)?;
            let file = policy_file_of(policy_file)?;
            let sources = SourceFields {
                bundle,
                cache_folder,
                nvrtc_folder,
                compile,
            }
            .sources(py)?;
            py.detach(|| {
                let opened = Device::primary(device)?;
                let arch = opened.arch();
                let policies = policies_of((&opened).into(), &config, &policies, file.as_ref())?;
                let prepared = PreparedKda::prepare_caches(
                    &opened,
                    stream as Stream,
                    &config,
                    &policies,
                    &sources,
                )?;
                Ok(Kda {
                    prepared,
                    config,
                    arch,
                    home: Home {
                        device: Some(device),
                        host_memory,
                    },
                })
            })
        })
    }

    #[pyo3(signature = (weights, *, stream, **operands))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        weights: &Weights,
        stream: &Bound<'py, PyAny>,
        operands: Option<Bound<'py, PyDict>>,
    ) -> PyResult<()> {
        guarded(|| {
            let stream = stream_of(stream)?;
            let given = given(py, operands);
            let step = operands::step(&self.config, &self.home, &weights.0, &given)?;
            // A full launch queue waits, and what it waits for may need the interpreter.
            py.detach(|| {
                // SAFETY: the tensors vouch for their memory, and the caller for its lifetime, as
                // with every launch from Python.
                unsafe { self.prepared.run(stream as Stream, &step) }
            })?;
            Ok(())
        })
    }

    #[pyo3(signature = (*, conv_cache, state, records=None))]
    fn check_caches(
        &self,
        py: Python<'_>,
        conv_cache: &Bound<'_, PyAny>,
        state: &Bound<'_, PyAny>,
        records: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        guarded(|| {
            let given = PyDict::new(py);
            given.set_item("conv_cache", conv_cache)?;
            given.set_item("state", state)?;
            given.set_item("records", records)?;
            operands::check_caches(&self.config, &self.home, &given)
        })
    }

    fn take_faults(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<Option<Faults>> {
        guarded(|| {
            let stream = stream_of(stream)?;
            let faults = py.detach(|| self.prepared.take_faults(stream as Stream))?;
            Ok(faults.map(faults_of))
        })
    }

    fn peek_faults(&self) -> PyResult<Option<Faults>> {
        guarded(|| Ok(self.prepared.peek_faults().map(faults_of)))
    }

    fn reset_faults(&self) -> PyResult<()> {
        guarded(|| {
            self.prepared.reset_faults();
            Ok(())
        })
    }

    #[getter]
    fn kernels(&self) -> PyResult<Vec<Kernel>> {
        guarded(|| {
            let infos = self.prepared.kernels().iter();
            infos
                .map(|i| kernel_of(&i.entry, &i.spec, i.key, i.origin, i.resources))
                .collect()
        })
    }

    #[getter]
    fn policies(&self) -> Vec<PolicyRow> {
        self.prepared.policies().map(policy_row).collect()
    }

    #[getter]
    fn arch(&self) -> String {
        self.arch.to_string()
    }

    #[getter]
    fn device(&self) -> i32 {
        self.home.device.unwrap_or_default()
    }

    fn __repr__(&self) -> String {
        let kernels = self.prepared.kernels().len();
        let (heads, arch) = (self.config.heads, self.arch);
        format!(
            "<Kda of {heads} heads on cuda:{}, {arch}, {kernels} kernels>",
            self.device()
        )
    }
}

/// The kernel that zeroes slots, on one device.
#[pyclass(frozen, module = "prepared_kda")]
struct Reset {
    prepared: PreparedReset,
    config: Config,
    home: Home,
}

#[pymethods]
impl Reset {
    #[new]
    #[pyo3(signature = (config, *, device, stream=None, bundle=None, cache_folder=None,
        nvrtc_folder=None, compile=true, host_memory=false))]
    #[expect(clippy::too_many_arguments, reason = "Python sees keywords, one each")]
    fn new(
        py: Python<'_>,
        config: ConfigFields,
        device: i32,
        stream: Option<&Bound<'_, PyAny>>,
        bundle: Option<Bound<'_, PyAny>>,
        cache_folder: Option<PathBuf>,
        nvrtc_folder: Option<PathBuf>,
        compile: bool,
        host_memory: bool,
    ) -> PyResult<Reset> {
        guarded(|| {
            let config = config.config()?;
            let stream = stream.map_or(Ok(0), stream_of)?;
            let sources = SourceFields {
                bundle,
                cache_folder,
                nvrtc_folder,
                compile,
            }
            .sources(py)?;
            let prepared = py.detach(|| {
                let opened = Device::primary(device)?;
                PreparedReset::prepare(&opened, stream as Stream, &config, &sources)
            })?;
            let home = Home {
                device: Some(device),
                host_memory,
            };
            Ok(Reset {
                prepared,
                config,
                home,
            })
        })
    }

    #[pyo3(signature = (*, stream, slots, conv_cache, state))]
    fn run(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        conv_cache: &Bound<'_, PyAny>,
        state: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        guarded(|| {
            let stream = stream_of(stream)?;
            let given = PyDict::new(py);
            given.set_item("slots", slots)?;
            given.set_item("conv_cache", conv_cache)?;
            given.set_item("state", state)?;
            let reset = operands::reset(&self.config, &self.home, &given)?;
            py.detach(|| {
                // SAFETY: as for a step.
                unsafe { self.prepared.run(stream as Stream, &reset) }
            })?;
            Ok(())
        })
    }
}

/// Settings and policies without a device.
#[pyclass(frozen, module = "prepared_kda")]
struct Plan(kda_runtime::Plan, Arch);

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (arch, config, policies, *, policy_file=None))]
    fn new(
        arch: &str,
        config: ConfigFields,
        policies: Vec<PolicyFields>,
        policy_file: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        guarded(|| {
            let arch: Arch = arch.parse()?;
            let config = config.config()?;
            let file = policy_file_of(policy_file)?;
            let policies = policies_of(arch.into(), &config, &policies, file.as_ref())?;
            let plan = kda_runtime::Plan::new(arch, &config, &policies)?;
            Ok(Plan(plan, arch))
        })
    }

    #[pyo3(signature = (weights, **operands))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        weights: &Weights,
        operands: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Option<Launch>> {
        guarded(|| {
            let home = Home {
                device: None,
                host_memory: true,
            };
            let given = given(py, operands);
            let step = operands::step(self.0.config(), &home, &weights.0, &given)?;
            let planned = self.0.step(&step, 0)?;
            Ok(planned.map(|planned| Launch {
                kernel: planned.kernel,
                grid: planned.launch.grid.into(),
                block: planned.launch.block.into(),
                cluster: planned.launch.cluster.into(),
            }))
        })
    }

    #[pyo3(signature = (*, bundle=None, cache_folder=None, nvrtc_folder=None, compile=true))]
    fn kernels(
        &self,
        py: Python<'_>,
        bundle: Option<Bound<'_, PyAny>>,
        cache_folder: Option<PathBuf>,
        nvrtc_folder: Option<PathBuf>,
        compile: bool,
    ) -> PyResult<Vec<Kernel>> {
        let fields = SourceFields {
            bundle,
            cache_folder,
            nvrtc_folder,
            compile,
        };
        guarded(|| {
            let sources = fields.sources(py)?;
            py.detach(|| sources.kernels(self.0.kernels()))?
                .iter()
                .map(|k| kernel_of(&k.entry, &k.spec, k.key, k.origin, k.resources))
                .collect()
        })
    }

    #[pyo3(signature = (*, nvrtc_folder=None, reset=false, ptx=false))]
    fn bundle<'py>(
        &self,
        py: Python<'py>,
        nvrtc_folder: Option<PathBuf>,
        reset: bool,
        ptx: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        guarded(|| {
            let folders = nvrtc_folders(py, nvrtc_folder)?;
            let bytes = py.detach(|| -> Result<Vec<u8>, kda_runtime::Error> {
                let nvrtc = Nvrtc::load(&folders)?;
                let kernel = |spec| {
                    let compiled = nvrtc.compile(spec)?;
                    if ptx {
                        kda_runtime::Kernel::ptx(&compiled)
                    } else {
                        kda_runtime::Kernel::compiled(&compiled)
                    }
                };
                let mut specs = self.0.kernels().to_vec();
                if reset {
                    let config = self.0.config();
                    let (null_rule, state_dtype) = (config.null_rule, config.state_dtype);
                    specs.push(KernelSpec::reset(self.1, null_rule, state_dtype));
                }
                let kernels: Result<Vec<_>, _> = specs.iter().map(kernel).collect();
                encode_bundle(&kernels?)
            })?;
            Ok(PyBytes::new(py, &bytes))
        })
    }

    #[getter]
    fn policies(&self) -> Vec<PolicyRow> {
        self.0.policies().map(policy_row).collect()
    }
}

#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    // Levels are asked of Python at every record: there is none after preparing.
    let logger = pyo3_log::Logger::new(py, pyo3_log::Caching::Nothing)?;
    // Another interpreter of this process may have installed one.
    let _ = logger.filter(log::LevelFilter::Info).install();
    module.add_class::<Kda>()?;
    module.add_class::<Plan>()?;
    module.add_class::<Reset>()?;
    module.add_class::<Weights>()?;
    module.add_class::<Kernel>()?;
    module.add_class::<Faults>()?;
    module.add_class::<Launch>()?;
    module.add("OPERANDS", PyTuple::new(py, OPERANDS)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
