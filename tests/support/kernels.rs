//! Compiled kernels, each compiled once, on all cores. Finds libnvrtc, or fetches it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use kda_codegen::{CompiledKernel, Error, KernelSpec, Nvrtc};
use kda_runtime::Kernel;

/// A folder this project may fill with libnvrtc, wherever a command or a test runs.
fn fetched_folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/nvrtc"))
}

/// Loads libnvrtc. Where none is installed, fetches the Python package that holds it into
/// `target/nvrtc`.
///
/// # Errors
///
/// As [`Nvrtc::load`], when there is no pip either.
pub fn load_nvrtc() -> Result<Nvrtc, Error> {
    let folders = [fetched_folder()];
    let missing = match Nvrtc::load(&folders) {
        Err(missing @ Error::NvrtcMissing { .. }) => missing,
        other => return other,
    };
    eprintln!("libnvrtc is not installed, fetching nvidia-cuda-nvrtc into target/nvrtc");
    let fetched = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
        .arg(fetched_folder())
        .arg("nvidia-cuda-nvrtc==13.0.*")
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .status();
    match fetched {
        Ok(status) if status.success() => Nvrtc::load(&folders),
        _ => Err(missing),
    }
}

/// Kernels with their text and PTX, as the emulator takes them.
pub trait Kernels {
    /// The kernel of `spec`.
    ///
    /// # Errors
    ///
    /// As [`Nvrtc::compile`].
    fn kernel(&self, spec: &KernelSpec) -> Result<Arc<CompiledKernel>, Error>;
}

impl Kernels for KernelCache {
    fn kernel(&self, spec: &KernelSpec) -> Result<Arc<CompiledKernel>, Error> {
        KernelCache::kernel(self, spec)
    }
}

/// Compiled kernels by specialisation. Clones share it.
#[derive(Clone)]
pub struct KernelCache(Arc<Inner>);

struct Inner {
    nvrtc: Nvrtc,
    compiled: Mutex<HashMap<KernelSpec, Arc<CompiledKernel>>>,
    /// Whether devices get PTX.
    as_ptx: AtomicBool,
}

impl KernelCache {
    /// An empty cache.
    pub fn new(nvrtc: Nvrtc) -> KernelCache {
        KernelCache(Arc::new(Inner {
            nvrtc,
            compiled: Mutex::default(),
            as_ptx: AtomicBool::new(false),
        }))
    }

    /// Gives devices PTX in place of cubins, from now on: the emulated driver runs nothing else.
    pub fn give_ptx(&self) {
        self.0.as_ptx.store(true, Ordering::Relaxed);
    }

    /// Compiles what is not there yet, on all cores. A kernel that fails is left out: whoever asks
    /// for it gets its error.
    pub fn compile_all(&self, specs: &[KernelSpec]) {
        // Every kernel is tried, whichever fails.
        let _ = kda_runtime::Kernels::kernels(self, specs);
    }

    /// The kernel of `spec`, with its text and PTX.
    ///
    /// # Errors
    ///
    /// As [`Nvrtc::compile`].
    pub fn kernel(&self, spec: &KernelSpec) -> Result<Arc<CompiledKernel>, Error> {
        let compiled = || self.0.compiled.lock().expect("no holder panics");
        if let Some(kernel) = compiled().get(spec) {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(self.0.nvrtc.compile(spec)?);
        compiled().insert(*spec, kernel.clone());
        Ok(kernel)
    }
}

impl kda_runtime::Kernels for KernelCache {
    fn kernel(&self, spec: &KernelSpec) -> Result<Kernel, kda_runtime::Error> {
        let compiled = KernelCache::kernel(self, spec)?;
        if self.0.as_ptx.load(Ordering::Relaxed) {
            Kernel::ptx(&compiled)
        } else {
            Kernel::compiled(&compiled)
        }
    }
}
