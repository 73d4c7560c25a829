//! Compiled kernels in one file: a manifest and cubins. Owns the format; knows no compiler and no
//! policy.
//!
//! ```text
//! 0   8 bytes   "KDAKERN1"
//! 8   u64       length of the manifest, little endian
//! 16  32 bytes  SHA-256 of the manifest
//! 48  manifest  JSON
//!     cubins    back to back, to the end of the file
//! ```
//!
//! The manifest gives every cubin's offset, length and SHA-256. Checksums find damage; they do not
//! authenticate: a bundle is code, to be trusted like the library itself.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kda_codegen::Resources;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::kernels::{Kernel, Origin};
use crate::key::{CRATE_VERSION, DIGEST_BYTES, Hash, Identity, SPEC_FIELDS};

const MAGIC: &[u8; 8] = b"KDAKERN1";
const HEADER_BYTES: usize = MAGIC.len() + size_of::<u64>() + DIGEST_BYTES;

/// Largest file that is read into memory, in bytes.
const MOST_BYTES: u64 = 1 << 30;
/// Largest manifest that is parsed, in bytes.
const MOST_MANIFEST_BYTES: u64 = 64 << 20;

/// What keeps a file from being a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Defect {
    /// The file ends early.
    TooShort {
        /// Bytes found.
        found_bytes: u64,
        /// Bytes needed.
        needed_bytes: u64,
    },
    /// The file, or its manifest, is larger than any bundle.
    TooLarge {
        /// Bytes found.
        found_bytes: u64,
        /// Most bytes allowed.
        most_bytes: u64,
    },
    /// The first bytes are not a bundle's.
    Magic,
    /// Bytes follow the last cubin.
    Trailing {
        /// How many.
        extra_bytes: u64,
    },
    /// A checksum does not match.
    Checksum {
        /// What it covers: `manifest`, or an entry point.
        what: String,
    },
    /// The manifest is no JSON of the expected form.
    Manifest {
        /// Line in the manifest.
        line: usize,
        /// Column in that line.
        column: usize,
    },
    /// A cubin lies outside the file.
    Range {
        /// Its entry point.
        entry: String,
    },
    /// Two kernels have the same specialisation.
    Duplicate {
        /// Their entry point.
        entry: String,
    },
    /// A value in the manifest is none that this crate writes.
    Value {
        /// The kernel's entry point.
        entry: String,
        /// The value's name.
        field: &'static str,
    },
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Defect::TooShort {
                found_bytes,
                needed_bytes,
            } => {
                write!(f, "it has {found_bytes} bytes, {needed_bytes} needed")
            }
            Defect::TooLarge {
                found_bytes,
                most_bytes,
            } => {
                write!(
                    f,
                    "it has {found_bytes} bytes, at most {most_bytes} allowed"
                )
            }
            Defect::Magic => f.write_str("it does not start like a bundle"),
            Defect::Trailing { extra_bytes } => {
                write!(f, "{extra_bytes} bytes follow its last cubin")
            }
            Defect::Checksum { what } => write!(f, "the checksum of {what} does not match"),
            Defect::Manifest { line, column } => {
                write!(
                    f,
                    "its manifest is not understood at line {line}, column {column}"
                )
            }
            Defect::Range { entry } => write!(f, "the cubin of {entry} lies outside it"),
            Defect::Duplicate { entry } => write!(f, "{entry} occurs twice"),
            Defect::Value { entry, field } => write!(f, "{field} of {entry} has no known form"),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    crate_version: String,
    kernels: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    entry: String,
    /// Digest of the fields and the NVRTC version.
    key: String,
    /// [`Identity::fields`].
    fields: BTreeMap<String, String>,
    nvrtc: (i32, i32),
    resources: Option<EntryResources>,
    /// From the end of the manifest, in bytes.
    cubin_offset: u64,
    cubin_bytes: u64,
    cubin_sha256: String,
}

#[derive(Serialize, Deserialize)]
struct EntryResources {
    registers: u32,
    spill_store_bytes: u32,
    spill_load_bytes: u32,
    stack_bytes: u32,
    shared_bytes: u32,
}

impl From<Resources> for EntryResources {
    fn from(resources: Resources) -> EntryResources {
        let Resources {
            registers,
            spill_store_bytes,
            spill_load_bytes,
            stack_bytes,
            shared_bytes,
        } = resources;
        EntryResources {
            registers,
            spill_store_bytes,
            spill_load_bytes,
            stack_bytes,
            shared_bytes,
        }
    }
}

impl From<&EntryResources> for Resources {
    fn from(resources: &EntryResources) -> Resources {
        let &EntryResources {
            registers,
            spill_store_bytes,
            spill_load_bytes,
            stack_bytes,
            shared_bytes,
        } = resources;
        Resources {
            registers,
            spill_store_bytes,
            spill_load_bytes,
            stack_bytes,
            shared_bytes,
        }
    }
}

/// Compiled kernels that an engine ships, as `cargo xtask gen --bundle FILE` writes them. Clones
/// share the bytes.
///
/// ```no_run
/// use kda_runtime::{KernelBundle, KernelSources};
///
/// let bundle = KernelBundle::from_path("kda.bundle".as_ref())?;
/// // Nothing is compiled and libnvrtc is never looked for.
/// let sources = KernelSources::new().bundle(bundle);
/// # Ok::<(), kda_runtime::Error>(())
/// ```
#[derive(Clone)]
pub struct KernelBundle(Arc<Inner>);

struct Inner {
    place: PathBuf,
    bytes: Cow<'static, [u8]>,
    /// Where the cubins start in `bytes`.
    cubins: usize,
    kernels: Vec<Entry>,
}

impl fmt::Debug for KernelBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelBundle")
            .field("place", &self.0.place)
            .field("kernels", &self.0.kernels.len())
            .finish()
    }
}

/// What a bundle says about a wanted kernel.
pub(crate) enum Found {
    Kernel(Box<Kernel>),
    /// No kernel of this specialisation; the first difference of the nearest one.
    Missing(Option<Difference>),
}

/// One field in which a kernel at hand and the wanted one differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The field's name.
    pub field: String,
    /// Its value in the bundle.
    pub found: String,
    /// Its wanted value.
    pub wanted: String,
}

impl Difference {
    /// The option of `cargo xtask gen` that makes kernels of the wanted value, where a newcomer would not
    /// look for it.
    pub(crate) fn option(&self) -> Option<&'static str> {
        match (&*self.field, &*self.wanted) {
            ("verify", "true") => Some("--verify-one"),
            ("role", "reset") => Some("--reset"),
            ("ragged", "true") => Some("--ragged"),
            ("rollback", "records") => Some("--rollback records"),
            ("gate_input", "projected") => Some("--gate-input projected"),
            _ => None,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference {
            field,
            found,
            wanted,
        } = self;
        write!(f, "{field} is {found} there, {wanted} wanted")
    }
}

impl KernelBundle {
    /// Reads a bundle.
    ///
    /// # Errors
    ///
    /// [`Error::BundleUnreadable`] when the file cannot be read, else as
    /// [`KernelBundle::from_bytes`].
    pub fn from_path(path: &Path) -> Result<KernelBundle, Error> {
        let bytes = read_bounded(path, MOST_BYTES).map_err(|source| Error::BundleUnreadable {
            path: path.into(),
            source,
        })?;
        KernelBundle::parse(path.into(), Cow::Owned(bytes))
    }

    /// Takes a bundle's bytes: `include_bytes!("kda.bundle").as_slice()` or a `Vec<u8>`.
    ///
    /// # Errors
    ///
    /// [`Error::BundleDamaged`] for bytes that are no whole bundle, and
    /// [`Error::BundleMismatch`] for a bundle of another version of this crate.
    pub fn from_bytes(bytes: impl Into<Cow<'static, [u8]>>) -> Result<KernelBundle, Error> {
        KernelBundle::parse("bytes in memory".into(), bytes.into())
    }

    /// Entry points, in the order of the manifest.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.0.kernels.iter().map(|kernel| kernel.entry.as_str())
    }

    pub(crate) fn parse(place: PathBuf, bytes: Cow<'static, [u8]>) -> Result<KernelBundle, Error> {
        let (crate_version, cubins, kernels) = match parse(&bytes) {
            Ok(parsed) => parsed,
            Err(defect) => {
                return Err(Error::BundleDamaged {
                    path: place,
                    defect,
                });
            }
        };
        if crate_version != CRATE_VERSION {
            return Err(Error::BundleMismatch {
                path: place,
                entry: None,
                difference: Difference {
                    field: "crate_version".into(),
                    found: printable(&crate_version),
                    wanted: CRATE_VERSION.into(),
                },
            });
        }
        Ok(KernelBundle(Arc::new(Inner {
            place,
            bytes,
            cubins,
            kernels,
        })))
    }

    /// The wanted kernel. One of the right specialisation that differs otherwise is an error.
    pub(crate) fn find(
        &self,
        wanted: &Identity,
        nvrtc: Option<(i32, i32)>,
        origin: Origin,
    ) -> Result<Found, Error> {
        let mut nearest: Option<(usize, Difference)> = None;
        for entry in &self.0.kernels {
            let mut differences = wanted.fields[..SPEC_FIELDS]
                .iter()
                .filter_map(|(name, value)| entry.difference(name, value));
            let Some(first) = differences.next() else {
                return self
                    .take(entry, wanted, nvrtc, origin)
                    .map(|k| Found::Kernel(Box::new(k)));
            };
            let count = 1 + differences.count();
            if nearest.as_ref().is_none_or(|(fewest, _)| count < *fewest) {
                nearest = Some((count, first));
            }
        }
        Ok(Found::Missing(nearest.map(|(_, difference)| difference)))
    }

    fn take(
        &self,
        entry: &Entry,
        wanted: &Identity,
        nvrtc: Option<(i32, i32)>,
        origin: Origin,
    ) -> Result<Kernel, Error> {
        let mismatch = |difference| Error::BundleMismatch {
            path: self.0.place.clone(),
            entry: Some(wanted.entry.clone()),
            difference,
        };
        let others = &wanted.fields[SPEC_FIELDS..];
        if let Some(difference) = others
            .iter()
            .find_map(|(name, value)| entry.difference(name, value))
        {
            return Err(mismatch(difference));
        }
        let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
        let too_old = (entry.nvrtc < kda_codegen::nvrtc::OLDEST)
            .then(|| format!("{} or newer", version(kda_codegen::nvrtc::OLDEST)));
        let other = nvrtc.filter(|wanted| *wanted != entry.nvrtc).map(version);
        if let Some(wanted) = other.or(too_old) {
            let found = version(entry.nvrtc);
            return Err(mismatch(Difference {
                field: "nvrtc".into(),
                found,
                wanted,
            }));
        }
        let key = wanted.key(entry.nvrtc);
        if entry.key != key.to_string() {
            let found = printable(&entry.key);
            return Err(mismatch(Difference {
                field: "key".into(),
                found,
                wanted: key.to_string(),
            }));
        }
        let start = self.0.cubins + entry.cubin_offset as usize;
        let cubin = &self.0.bytes[start..start + entry.cubin_bytes as usize];
        if Hash::of(cubin).hex() != entry.cubin_sha256 {
            return Err(Error::BundleDamaged {
                path: self.0.place.clone(),
                defect: Defect::Checksum {
                    what: wanted.entry.clone(),
                },
            });
        }
        Ok(Kernel {
            spec: wanted.spec,
            entry: wanted.entry.clone(),
            key,
            cubin: cubin.to_vec(),
            nvrtc_version: entry.nvrtc,
            resources: entry.resources.as_ref().map(Resources::from),
            origin,
        })
    }
}

impl Entry {
    fn difference(&self, name: &str, wanted: &str) -> Option<Difference> {
        let found = self.fields.get(name).map_or("absent", String::as_str);
        (found != wanted).then(|| Difference {
            field: name.into(),
            found: printable(found),
            wanted: wanted.into(),
        })
    }
}

/// A file's value for an error text: short, without control characters.
pub(crate) fn printable(value: &str) -> String {
    value
        .chars()
        .take(80)
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Reads a regular file of at most `most_bytes`.
pub(crate) fn read_bounded(path: &Path, most_bytes: u64) -> std::io::Result<Vec<u8>> {
    use std::io::{Error, ErrorKind};
    // Looked at before it is opened: opening a pipe blocks.
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(most_bytes + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most_bytes {
        return Err(Error::new(
            ErrorKind::FileTooLarge,
            format!("more than {most_bytes} bytes"),
        ));
    }
    Ok(bytes)
}

/// Checks everything but the cubins' checksums: crate version, start of the cubins, kernels.
fn parse(bytes: &[u8]) -> Result<(String, usize, Vec<Entry>), Defect> {
    let found_bytes = bytes.len() as u64;
    let at_least = |needed_bytes: u64| {
        if found_bytes < needed_bytes {
            Err(Defect::TooShort {
                found_bytes,
                needed_bytes,
            })
        } else {
            Ok(())
        }
    };
    at_least(HEADER_BYTES as u64)?;
    let (magic, rest) = bytes.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(Defect::Magic);
    }
    let (length, rest) = rest.split_at(size_of::<u64>());
    // The split gives exactly 8 bytes.
    let length = u64::from_le_bytes(length.try_into().unwrap_or_default());
    if length > MOST_MANIFEST_BYTES {
        return Err(Defect::TooLarge {
            found_bytes: length,
            most_bytes: MOST_MANIFEST_BYTES,
        });
    }
    at_least(HEADER_BYTES as u64 + length)?;
    let (checksum, rest) = rest.split_at(DIGEST_BYTES);
    let (manifest, cubins) = rest.split_at(length as usize);
    if Hash::of(manifest).0 != checksum {
        return Err(Defect::Checksum {
            what: "manifest".into(),
        });
    }
    let manifest: Manifest = serde_json::from_slice(manifest).map_err(|e| Defect::Manifest {
        line: e.line(),
        column: e.column(),
    })?;
    let mut specialisations = HashSet::new();
    let mut end = 0;
    for kernel in &manifest.kernels {
        let entry = || printable(&kernel.entry);
        let kernel_end = kernel.cubin_offset.checked_add(kernel.cubin_bytes);
        let Some(kernel_end) = kernel_end else {
            return Err(Defect::Range { entry: entry() });
        };
        if kernel_end > cubins.len() as u64 {
            // A cut file and a wrong manifest look alike here; the manifest's checksum held.
            let cubins_start = (HEADER_BYTES as u64).saturating_add(length);
            let needed_bytes = cubins_start.saturating_add(kernel_end);
            return Err(Defect::TooShort {
                found_bytes,
                needed_bytes,
            });
        }
        end = kernel_end.max(end);
        if kernel.cubin_bytes == 0 {
            return Err(Defect::Value {
                entry: entry(),
                field: "cubin_bytes",
            });
        }
        let spec: Vec<_> = kernel
            .fields
            .iter()
            .filter(|(name, _)| is_spec_field(name))
            .collect();
        if !specialisations.insert(spec) {
            return Err(Defect::Duplicate { entry: entry() });
        }
    }
    if end < cubins.len() as u64 {
        return Err(Defect::Trailing {
            extra_bytes: cubins.len() as u64 - end,
        });
    }
    Ok((
        manifest.crate_version,
        HEADER_BYTES + length as usize,
        manifest.kernels,
    ))
}

fn is_spec_field(name: &str) -> bool {
    !matches!(name, "crate_version" | "options" | "text_sha256")
}

/// Writes kernels as a bundle's bytes; a specialisation that occurs twice is written once.
///
/// # Errors
///
/// [`Error::Codegen`] when a kernel's text cannot be rendered.
pub fn encode_bundle(kernels: &[Kernel]) -> Result<Vec<u8>, Error> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut cubins = Vec::new();
    let mut written = HashSet::new();
    for kernel in kernels {
        if !written.insert(kernel.spec) {
            continue;
        }
        let identity = Identity::new(&kernel.spec)?;
        entries.push(Entry {
            key: identity.key(kernel.nvrtc_version).to_string(),
            fields: identity
                .fields
                .iter()
                .map(|(n, v)| (n.to_string(), v.clone()))
                .collect(),
            entry: identity.entry,
            nvrtc: kernel.nvrtc_version,
            resources: kernel.resources.map(EntryResources::from),
            cubin_offset: cubins.len() as u64,
            cubin_bytes: kernel.cubin.len() as u64,
            cubin_sha256: Hash::of(&kernel.cubin).hex(),
        });
        cubins.extend_from_slice(&kernel.cubin);
    }
    let manifest = Manifest {
        crate_version: CRATE_VERSION.into(),
        kernels: entries,
    };
    // Strings, numbers and maps with string keys always serialise.
    let manifest = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
    let mut bytes = Vec::with_capacity(HEADER_BYTES + manifest.len() + cubins.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(manifest.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&Hash::of(&manifest).0);
    bytes.extend_from_slice(&manifest);
    bytes.extend_from_slice(&cubins);
    Ok(bytes)
}
