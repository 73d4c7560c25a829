//! Where kernels come from: a bundle, the disk cache, NVRTC, in this order. Knows no device.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;

use kda_codegen::{Arch, CompiledKernel, KernelSpec, Nvrtc, Resources};

use crate::Error;
use crate::bundle::{Found, KernelBundle};
use crate::cache::DiskCache;
use crate::key::{Identity, KernelKey};

/// Where a kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// A [`KernelBundle`].
    Bundle,
    /// A [`DiskCache`].
    Cache,
    /// NVRTC, just now.
    Compiled,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Bundle => "bundle",
            Origin::Cache => "cache",
            Origin::Compiled => "compiled",
        })
    }
}

/// A kernel ready to load.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its specialisation.
    pub spec: KernelSpec,
    /// Entry point.
    pub entry: String,
    /// Digest of everything its code depends on.
    pub key: KernelKey,
    /// Device code of exactly `spec.arch`; PTX and a zero byte where [`Kernel::ptx`] made it.
    pub cubin: Vec<u8>,
    /// Version of the NVRTC that compiled it, major and minor.
    pub nvrtc_version: (i32, i32),
    /// What ptxas reported, if it did.
    pub resources: Option<Resources>,
    /// Where it came from.
    pub origin: Origin,
}

impl Kernel {
    /// The kernel of `spec` whose device code was compiled by NVRTC `nvrtc_version`.
    ///
    /// # Errors
    ///
    /// [`Error::Codegen`] when its text, a part of its key, cannot be rendered.
    pub fn new(
        spec: &KernelSpec,
        cubin: Vec<u8>,
        nvrtc_version: (i32, i32),
        resources: Option<Resources>,
    ) -> Result<Kernel, Error> {
        let identity = Identity::new(spec)?;
        Ok(Kernel {
            spec: *spec,
            key: identity.key(nvrtc_version),
            entry: identity.entry,
            cubin,
            nvrtc_version,
            resources,
            origin: Origin::Compiled,
        })
    }

    /// A kernel that NVRTC just compiled.
    ///
    /// # Errors
    ///
    /// As [`Kernel::new`].
    pub fn compiled(kernel: &CompiledKernel) -> Result<Kernel, Error> {
        Kernel::new(
            &kernel.spec,
            kernel.cubin.clone(),
            kernel.nvrtc_version,
            kernel.resources,
        )
    }

    /// A kernel that NVRTC just compiled, as PTX: slower to load, since the driver compiles it again,
    /// and refused by a driver older than the compiler. For the emulated driver, which runs nothing
    /// else.
    ///
    /// # Errors
    ///
    /// As [`Kernel::new`].
    pub fn ptx(kernel: &CompiledKernel) -> Result<Kernel, Error> {
        // The driver takes a text up to its zero byte.
        let text = [kernel.ptx.as_bytes(), b"\0"].concat();
        Kernel::new(&kernel.spec, text, kernel.nvrtc_version, kernel.resources)
    }
}

/// Where compiled kernels come from.
pub trait Kernels: Sync {
    /// The kernel of `spec`.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being found or compiled.
    fn kernel(&self, spec: &KernelSpec) -> Result<Kernel, Error>;

    /// The kernels of `specs`, in their order, found or compiled on all cores.
    ///
    /// # Errors
    ///
    /// That of the first kernel that has one.
    fn kernels(&self, specs: &[KernelSpec]) -> Result<Vec<Kernel>, Error> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let workers = cores.min(specs.len());
        if workers < 2 {
            return specs.iter().map(|spec| self.kernel(spec)).collect();
        }
        let next = Mutex::new(specs.iter().enumerate());
        let work = || {
            let mut done = Vec::new();
            loop {
                // A panic in another worker leaves the iterator intact.
                let taken = next
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner())
                    .next();
                let Some((i, spec)) = taken else { break done };
                done.push((i, self.kernel(spec)));
            }
        };
        let mut kernels: Vec<(usize, Result<Kernel, Error>)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
            let mut kernels = work();
            for thread in threads {
                kernels.extend(
                    thread
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                );
            }
            kernels
        });
        kernels.sort_by_key(|(i, _)| *i);
        kernels.into_iter().map(|(_, kernel)| kernel).collect()
    }
}

impl Kernels for Nvrtc {
    fn kernel(&self, spec: &KernelSpec) -> Result<Kernel, Error> {
        Kernel::compiled(&self.compile(spec)?)
    }
}

/// Bundles first, then a disk cache, then NVRTC; each only if it was given.
///
/// ```
/// use kda_runtime::{DiskCache, KernelSources};
///
/// // Compiles what the user's cache does not hold yet.
/// let sources = KernelSources::standard();
/// // The same, with the parts named.
/// let sources = KernelSources::new().disk_cache(DiskCache::from_environment()).nvrtc(&[]);
/// ```
///
/// libnvrtc is looked for and loaded when the first kernel must be compiled, not before.
#[derive(Clone, Debug, Default)]
pub struct KernelSources {
    bundles: Vec<KernelBundle>,
    cache: Option<DiskCache>,
    /// Folders to look for libnvrtc in, if kernels may be compiled.
    nvrtc: Option<Vec<PathBuf>>,
    version: Option<(i32, i32)>,
}

impl KernelSources {
    /// No source at all.
    pub fn new() -> KernelSources {
        KernelSources::default()
    }

    /// The user's disk cache, then NVRTC.
    pub fn standard() -> KernelSources {
        KernelSources::new()
            .disk_cache(DiskCache::from_environment())
            .nvrtc(&[])
    }

    /// Adds a bundle; several are asked in the order in which they were added.
    pub fn bundle(mut self, bundle: KernelBundle) -> KernelSources {
        self.bundles.push(bundle);
        self
    }

    /// Sets the disk cache, or none.
    pub fn disk_cache(mut self, cache: impl Into<Option<DiskCache>>) -> KernelSources {
        self.cache = cache.into();
        self
    }

    /// Allows kernels to be compiled. `folders` are searched for libnvrtc before the places that
    /// [`Nvrtc::load`] knows.
    pub fn nvrtc(mut self, folders: &[PathBuf]) -> KernelSources {
        self.nvrtc = Some(folders.into());
        self
    }

    /// Accepts only kernels made by this version of NVRTC, wherever they come from. Without it a
    /// bundle or a cache may hold kernels of any supported version, newest first: to know which
    /// version is installed, it would have to be loaded.
    pub fn require_nvrtc(mut self, major: i32, minor: i32) -> KernelSources {
        self.version = Some((major, minor));
        self
    }
}

impl Kernels for KernelSources {
    fn kernel(&self, spec: &KernelSpec) -> Result<Kernel, Error> {
        let identity = Identity::new(spec)?;
        let mut nearest = None;
        for bundle in &self.bundles {
            match bundle.find(&identity, self.version, Origin::Bundle)? {
                Found::Kernel(kernel) => return Ok(*kernel),
                Found::Missing(difference) => nearest = nearest.or(difference),
            }
        }
        if let Some(kernel) = self
            .cache
            .as_ref()
            .and_then(|cache| cache.find(&identity, self.version))
        {
            return Ok(kernel);
        }
        let Some(folders) = &self.nvrtc else {
            let arch: Arch = spec.arch;
            return Err(Error::KernelMissing {
                entry: identity.entry,
                arch,
                nearest,
            });
        };
        let nvrtc = Nvrtc::load(folders)?;
        if let Some(required) = self.version.filter(|version| *version != nvrtc.version()) {
            return Err(Error::NvrtcVersion {
                found: nvrtc.version(),
                required,
            });
        }
        let kernel = nvrtc.kernel(spec)?;
        if let Some(cache) = &self.cache
            && let Err(error) = cache.store(&kernel)
        {
            let folder = cache.folder().display();
            log::warn!(
                "kernel cache: {} is not cached in {folder}: {error}",
                kernel.entry
            );
        }
        Ok(kernel)
    }
}
