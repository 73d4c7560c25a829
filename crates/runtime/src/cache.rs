//! Compiled kernels on disk, one file each. Owns places and writing; the format is a bundle of one
//! kernel. Nothing in a cache is ever fatal: what cannot be read is compiled again, what cannot be
//! written is not cached, and both are said through `log::warn`.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use kda_codegen::{KernelSpec, nvrtc};

use crate::Error;
use crate::bundle::{Found, KernelBundle, encode_bundle, read_bounded};
use crate::kernels::{Kernel, Origin};
use crate::key::Identity;

/// Environment variable that names the cache's folder, or is `off`. Read by
/// [`DiskCache::from_environment`] only.
pub const CACHE_VARIABLE: &str = "KDA_CACHE";

/// Largest file that is read, in bytes.
const MOST_BYTES: u64 = 64 << 20;

/// Unfinished files older than this belong to processes that are gone.
const ABANDONED: Duration = Duration::from_secs(3600);

const EXTENSION: &str = "kernel";
const PARTIAL: &str = "partial";

/// A folder of compiled kernels, `<digest of the kernel>/<NVRTC version>.kernel`. Any number of
/// processes may use it at once: files appear whole, by renaming, and carry checksums.
///
/// Everything in it can be deleted at any time. A folder that every user may write, or that belongs
/// to another user than this one and root, is neither read nor written (Unix): its kernels would be
/// loaded as code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCache {
    folder: PathBuf,
}

impl DiskCache {
    /// The cache in `folder`, which is created when the first kernel is written.
    pub fn at(folder: impl Into<PathBuf>) -> DiskCache {
        DiskCache {
            folder: folder.into(),
        }
    }

    /// The user's cache: the folder in `KDA_CACHE`, or `prepared-kda` in the user's cache folder
    /// (`XDG_CACHE_HOME` or `~/.cache`; `~/Library/Caches` on macOS; `LOCALAPPDATA` on Windows).
    /// `None` when `KDA_CACHE` is `off` or no such folder is known.
    pub fn from_environment() -> Option<DiskCache> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(named) = variable(CACHE_VARIABLE) {
            return (named != "off").then(|| DiskCache::at(named));
        }
        let home = |below: &str| variable("HOME").map(|home| Path::new(&home).join(below));
        // XDG says that a relative path is to be ignored.
        let xdg = || {
            variable("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let user = if cfg!(windows) {
            variable("LOCALAPPDATA").map(PathBuf::from)
        } else if cfg!(target_os = "macos") {
            home("Library/Caches")
        } else {
            xdg().or_else(|| home(".cache"))
        };
        user.map(|user| DiskCache::at(user.join("prepared-kda")))
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn kernel_folder(&self, identity: &Identity) -> PathBuf {
        self.folder.join(identity.base().hex())
    }

    /// The kernel of `spec` made by NVRTC `version`, or by the newest supported one that has left
    /// a kernel. What is damaged is reported through `log::warn`, removed, and never returned.
    ///
    /// # Errors
    ///
    /// [`Error::Codegen`] for an illegal specialisation; nothing on disk is an error.
    pub fn load(
        &self,
        spec: &KernelSpec,
        version: Option<(i32, i32)>,
    ) -> Result<Option<Kernel>, Error> {
        Ok(self.find(&Identity::new(spec)?, version))
    }

    pub(crate) fn find(&self, identity: &Identity, version: Option<(i32, i32)>) -> Option<Kernel> {
        let folder = self.kernel_folder(identity);
        // Why not is said when the kernel that was compiled instead is not cached.
        if trusted(&self.folder)
            .and_then(|()| trusted(&folder))
            .is_err()
        {
            return None;
        }
        let mut versions: Vec<(i32, i32)> = match version {
            Some(version) => vec![version],
            None => names(&folder)
                .iter()
                .filter_map(|name| parse_name(name))
                .collect(),
        };
        versions.retain(|version| *version >= nvrtc::OLDEST);
        versions.sort_unstable_by(|a, b| b.cmp(a));
        for version in versions {
            let path = folder.join(file_name(version));
            match read(&path, identity, version) {
                Ok(kernel) => return Some(kernel),
                Err(Error::BundleUnreadable { source, .. })
                    if source.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    log::warn!("kernel cache: {error}; the kernel is compiled again");
                    // Its replacement may have another version and so another name.
                    let _ = fs::remove_file(&path);
                }
            }
        }
        None
    }

    /// Writes a kernel, so that this and every other process finds it whole or not at all.
    ///
    /// # Errors
    ///
    /// That of the file system; [`KernelSources`](crate::KernelSources) makes a warning of it.
    pub fn store(&self, kernel: &Kernel) -> io::Result<()> {
        let identity = Identity::new(&kernel.spec).map_err(io::Error::other)?;
        let folder = self.kernel_folder(&identity);
        trusted(&self.folder).and_then(|()| trusted(&folder))?;
        write(&folder, kernel)
    }
}

fn file_name((major, minor): (i32, i32)) -> String {
    format!("{major}.{minor}.{EXTENSION}")
}

fn parse_name(name: &str) -> Option<(i32, i32)> {
    let (major, minor) = name
        .strip_suffix(EXTENSION)?
        .strip_suffix('.')?
        .split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder)
        .map(|dir| {
            dir.flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect()
        })
        .unwrap_or_default()
}

fn read(path: &Path, identity: &Identity, version: (i32, i32)) -> Result<Kernel, Error> {
    let bytes = read_bounded(path, MOST_BYTES).map_err(|source| Error::BundleUnreadable {
        path: path.into(),
        source,
    })?;
    let bundle = KernelBundle::parse(path.into(), bytes.into())?;
    match bundle.find(identity, Some(version), Origin::Cache)? {
        Found::Kernel(kernel) => Ok(*kernel),
        Found::Missing(nearest) => Err(Error::KernelMissing {
            entry: identity.entry.clone(),
            arch: identity.spec.arch,
            nearest,
        }),
    }
}

fn write(folder: &Path, kernel: &Kernel) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let bytes = encode_bundle(std::slice::from_ref(kernel)).map_err(io::Error::other)?;
    create_folder(folder)?;
    remove_abandoned(folder);
    let nanos = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let partial = folder.join(format!(".{}-{nanos}-{count}.{PARTIAL}", std::process::id()));
    // Whole or not at all: a reader never sees half a file. After a power failure the checksum
    // tells.
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&partial)
        .and_then(|mut file| file.write_all(&bytes))
        .and_then(|()| fs::rename(&partial, folder.join(file_name(kernel.nvrtc_version))));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Creates a folder that only its user may write, since its files are loaded as code.
fn create_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Fails for a folder that others may put files into. One that does not exist is created by this
/// user.
#[cfg(unix)]
fn trusted(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let Ok(found) = fs::metadata(folder) else {
        return Ok(());
    };
    let refused = |why: &str| {
        let text = format!("{} {why}", folder.display());
        Err(io::Error::new(ErrorKind::PermissionDenied, text))
    };
    if found.mode() & 0o002 != 0 {
        return refused("may be written by every user");
    }
    // The owner of this process's entry is its effective user; where there is none, nobody knows.
    match fs::metadata("/proc/self") {
        Ok(own) if ![own.uid(), 0].contains(&found.uid()) => refused("belongs to another user"),
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn trusted(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Removes what killed processes left behind.
fn remove_abandoned(folder: &Path) {
    for name in names(folder) {
        let path = folder.join(&name);
        let old = || {
            let modified = fs::metadata(&path)
                .and_then(|metadata| metadata.modified())
                .ok()?;
            Some(modified.elapsed().ok()? > ABANDONED)
        };
        if name.ends_with(PARTIAL) && old() == Some(true) {
            let _ = fs::remove_file(&path);
        }
    }
}
