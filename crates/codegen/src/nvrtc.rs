//! Finds libnvrtc and compiles a specialisation to PTX and a cubin. The only user of the NVRTC
//! library and of `unsafe`; holds no legality rule.
//!
//! The kernels include no header and need no CUDA toolkit: libnvrtc and its builtins library are
//! enough, for example those of the Python package `nvidia-cuda-nvrtc`.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::nvrtc::{result as safe, sys};

use crate::{Error, KernelSpec, Source, source};

/// Environment variable that names libnvrtc, or the folder that holds it. Read by
/// [`Nvrtc::load`] only.
pub const LIBRARY_VARIABLE: &str = "KDA_NVRTC";

/// Oldest NVRTC, major and minor, that knows every instruction and target used here.
pub const OLDEST: (i32, i32) = (12, 9);

/// The options a specialisation is compiled with.
pub fn options(spec: &KernelSpec) -> Vec<String> {
    [
        format!("--gpu-architecture={}", spec.arch),
        "--std=c++17".into(),
        // Every fused multiply-add is written out: the compiler decides nothing about bits.
        "--fmad=false".into(),
        "--ptxas-options=-v".into(),
    ]
    .into()
}

/// What ptxas reports about a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes a thread stores to spill registers.
    pub spill_store_bytes: u32,
    /// Bytes a thread loads back.
    pub spill_load_bytes: u32,
    /// Stack of a thread, in bytes.
    pub stack_bytes: u32,
    /// Static shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl std::fmt::Display for Resources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} registers, {} bytes spilled, {} bytes of shared memory",
            self.registers,
            self.spill_store_bytes + self.spill_load_bytes,
            self.shared_bytes
        )
    }
}

/// A kernel ready to load.
#[derive(Clone, Debug)]
pub struct CompiledKernel {
    /// What it is.
    pub spec: KernelSpec,
    /// The text it was compiled from.
    pub source: Source,
    /// PTX, as the emulator takes it.
    pub ptx: String,
    /// Device code of exactly `spec.arch`.
    pub cubin: Vec<u8>,
    /// Options NVRTC was given.
    pub options: Vec<String>,
    /// Version of the NVRTC that compiled it, major and minor.
    pub nvrtc_version: (i32, i32),
    /// NVRTC's and ptxas' log.
    pub log: String,
    /// Read from the log; `None` when ptxas printed no report: NVRTC may take a kernel that it has
    /// compiled before from a cache of its own.
    pub resources: Option<Resources>,
}

/// A loaded libnvrtc.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    version: (i32, i32),
}

impl Nvrtc {
    /// Loads libnvrtc, once per process, from the first of: `folders`, the file or folder in
    /// `KDA_NVRTC`, the loader's path, `CUDA_HOME` and `CUDA_PATH`, `/usr/local/cuda`, and the
    /// site-packages of the Python installations on `PATH` and in `VIRTUAL_ENV`.
    ///
    /// # Errors
    ///
    /// [`Error::NvrtcMissing`] lists every place that was tried, [`Error::NvrtcUnusable`] says
    /// why the library that was found does not serve.
    pub fn load(folders: &[PathBuf]) -> Result<Nvrtc, Error> {
        static LOADED: OnceLock<(i32, i32)> = OnceLock::new();
        static SEARCH: Mutex<()> = Mutex::new(());
        // One search at a time; a panic in another leaves nothing half done.
        let _searching = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&version) = LOADED.get() {
            return Ok(Nvrtc { version });
        }
        locate(folders)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: `locate` made sure that cudarc finds the library; both pointers are to locals.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|e| Error::NvrtcUnusable {
                reason: format!("nvrtcVersion: {e:?}"),
            })?;
        if (major, minor) < OLDEST {
            return Err(Error::NvrtcUnusable {
                reason: format!(
                    "version {major}.{minor} found, {}.{} or newer needed",
                    OLDEST.0, OLDEST.1
                ),
            });
        }
        Ok(Nvrtc {
            version: *LOADED.get_or_init(|| (major, minor)),
        })
    }

    /// The library's version, major and minor.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Renders and compiles one kernel.
    ///
    /// # Errors
    ///
    /// What [`source::render`] returns, [`Error::Compile`] with NVRTC's log, and
    /// [`Error::Report`] when NVRTC returns no code.
    pub fn compile(&self, spec: &KernelSpec) -> Result<CompiledKernel, Error> {
        self.compile_source(spec, source::render(spec)?)
    }

    /// Compiles `source` as the kernel of `spec`: `mutate` brings changed text.
    ///
    /// # Errors
    ///
    /// As [`Nvrtc::compile`], less what rendering returns.
    pub fn compile_source(
        &self,
        spec: &KernelSpec,
        source: Source,
    ) -> Result<CompiledKernel, Error> {
        let options = options(spec);
        let program = Program::new(&source.text, &source.entry)?;
        // SAFETY: the program is alive for the whole call.
        let compiled = unsafe { safe::compile_program(program.0, &options) };
        let log = program.log();
        if compiled.is_err() {
            return Err(Error::Compile {
                entry: source.entry,
                options,
                log,
            });
        }
        let missing = |missing| Error::Report {
            entry: source.entry.clone(),
            missing,
            log: log.clone(),
        };
        let ptx = program
            .output(sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .ok_or_else(|| missing("PTX"))?;
        let ptx = ptx.trim_end_matches('\0').to_owned();
        let cubin = program
            .output(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
            .ok_or_else(|| missing("cubin"))?;
        let resources = parse_resources(&log);
        let nvrtc_version = self.version;
        Ok(CompiledKernel {
            spec: *spec,
            source,
            ptx,
            cubin,
            options,
            nvrtc_version,
            log,
            resources,
        })
    }
}

/// An NVRTC program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(text: &str, entry: &str) -> Result<Program, Error> {
        let unusable = |reason: String| Error::NvrtcUnusable { reason };
        let text = CString::new(text).map_err(|e| unusable(e.to_string()))?;
        let name = CString::new(format!("{entry}.cu")).map_err(|e| unusable(e.to_string()))?;
        safe::create_program(&text, Some(&name))
            .map(Program)
            .map_err(|e| unusable(format!("nvrtcCreateProgram: {e:?}")))
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let raw = unsafe { safe::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = raw.into_iter().map(|c| c as u8).collect();
        String::from_utf8_lossy(&bytes)
            .trim_end_matches('\0')
            .trim()
            .to_owned()
    }

    fn output(
        &self,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Option<Vec<u8>> {
        let mut length = 0;
        // SAFETY: the program is alive and `length` is a local.
        unsafe { size(self.0, &mut length) }.result().ok()?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the buffer holds the `length` bytes that NVRTC said it writes.
        unsafe { get(self.0, bytes.as_mut_ptr().cast()) }
            .result()
            .ok()?;
        Some(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `Program::new`, destroyed once. Its error has no remedy.
        let _ = unsafe { safe::destroy_program(self.0) };
    }
}

/// Makes sure that cudarc's loader finds a libnvrtc: it opens by name, and a library already in
/// the process answers to its name. Its builtins must be in the process before it.
fn locate(folders: &[PathBuf]) -> Result<(), Error> {
    let mut searched = Vec::new();
    let named = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from);
    for place in folders.iter().cloned().chain(named) {
        if load_place(&place) {
            return Ok(());
        }
        searched.push(place);
    }
    if present() {
        return Ok(());
    }
    searched.push("the loader's path".into());
    for place in installed_folders() {
        if load_place(&place) {
            return Ok(());
        }
        searched.push(place);
    }
    Err(Error::NvrtcMissing { searched })
}

/// Whether a libnvrtc opens by a name that cudarc tries too. cudarc's own question exists only where
/// cudarc loads libraries itself; an application may have it link them.
fn present() -> bool {
    use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
    let version = cudarc::driver::sys::CUDA_VERSION;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let names = [
        format!("{DLL_PREFIX}nvrtc{DLL_SUFFIX}"),
        format!("{DLL_PREFIX}nvrtc{DLL_SUFFIX}.{major}"),
        format!("{DLL_PREFIX}nvrtc{DLL_SUFFIX}.12"),
        format!("{DLL_PREFIX}nvrtc64_{major}0_0{DLL_SUFFIX}"),
        format!("{DLL_PREFIX}nvrtc64_{major}{minor}_0{DLL_SUFFIX}"),
    ];
    names.iter().any(|name| {
        // SAFETY: opens a library by name; libnvrtc's initialisers have no preconditions.
        unsafe { libloading::Library::new(name) }.is_ok()
    })
}

/// Folders where CUDA toolkits and Python packages put libnvrtc.
fn installed_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable) {
            folders.push(Path::new(&home).join("lib64"));
        }
    }
    folders.push("/usr/local/cuda/lib64".into());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let prefixes = std::env::var_os("VIRTUAL_ENV")
        .map(PathBuf::from)
        .into_iter()
        .chain(
            std::env::split_paths(&path)
                .filter(|bin| bin.join("python3").exists())
                .filter_map(|bin| bin.parent().map(Path::to_owned)),
        );
    for prefix in prefixes {
        for lib in entries(&prefix.join("lib")) {
            let nvidia = lib.join("site-packages/nvidia");
            for package in ["cu13", "cuda_nvrtc"] {
                let folder = nvidia.join(package).join("lib");
                if folder.is_dir() && !folders.contains(&folder) {
                    folders.push(folder);
                }
            }
        }
    }
    folders
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .map(|dir| dir.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    paths.sort();
    paths
}

/// Loads libnvrtc from a file, a folder, or a folder a Python package was unpacked into.
fn load_place(place: &Path) -> bool {
    let folder = if place.is_file() {
        place.parent().unwrap_or(place)
    } else {
        place
    };
    for folder in [folder.to_owned(), folder.join("nvidia/cu13/lib")] {
        let files = entries(&folder);
        let starts = |prefix: &str| {
            files.iter().find(|path| {
                path.file_name()
                    .and_then(|name| name.to_str())
                    .is_some_and(|name| name.starts_with(prefix) && !name.contains(".alt."))
            })
        };
        let Some(library) = starts("libnvrtc.so") else {
            continue;
        };
        if let Some(builtins) = starts("libnvrtc-builtins.so") {
            keep_loaded(builtins);
        }
        if keep_loaded(library) {
            return present();
        }
    }
    false
}

/// Loads a library for the rest of the process, with its names visible to others.
#[cfg(unix)]
fn keep_loaded(path: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: NVRTC's libraries have no initialisers with preconditions, and stay loaded.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map(std::mem::forget)
        .is_ok()
}

#[cfg(not(unix))]
fn keep_loaded(path: &Path) -> bool {
    // SAFETY: as on unix.
    unsafe { libloading::Library::new(path) }
        .map(std::mem::forget)
        .is_ok()
}

/// Reads ptxas' report; one kernel, so each number appears once.
fn parse_resources(log: &str) -> Option<Resources> {
    let before = |unit: &str| -> Option<u32> {
        let end = log.find(unit)?;
        log[..end]
            .trim_end()
            .rsplit(|c: char| !c.is_ascii_digit())
            .next()?
            .parse()
            .ok()
    };
    Some(Resources {
        registers: before("registers")?,
        spill_store_bytes: before("bytes spill stores")?,
        spill_load_bytes: before("bytes spill loads")?,
        stack_bytes: before("bytes stack frame")?,
        shared_bytes: before("bytes smem").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_report() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for k\n    \
            8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers, 1872 bytes smem\n";
        let resources = parse_resources(log).unwrap();
        assert_eq!(
            resources,
            Resources {
                registers: 40,
                spill_store_bytes: 12,
                spill_load_bytes: 16,
                stack_bytes: 8,
                shared_bytes: 1872
            }
        );
        assert_eq!(parse_resources("no report"), None);
    }
}
