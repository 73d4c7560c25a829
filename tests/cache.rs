//! Bundles and the disk cache: what is whole is found, what is not is refused and rebuilt, under
//! damage, full disks, many processes and killed ones. Needs no GPU; two tests need libnvrtc.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use kda_codegen::{Arch, GateInput, KernelSpec, Nvrtc, Resources, Rollback};
use kda_runtime::{
    Defect, DiskCache, Error, Kernel, KernelBundle, KernelSources, Kernels, Origin, encode_bundle,
};
use kda_tests::scratch;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const VERSION: (i32, i32) = (13, 0);
const HEADER_BYTES: usize = 48;

// ---- support

/// Warnings since the last look, over the whole process: tests that look take the lock.
struct Warnings;

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl log::Log for Warnings {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        if record.level() == log::Level::Warn {
            lock(&WARNINGS).push(record.args().to_string());
        }
    }
    fn flush(&self) {}
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One test at a time: warnings and times belong to it.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static LOGGER: Once = Once::new();
    let guard = lock(&ALONE);
    LOGGER.call_once(|| {
        log::set_logger(&Warnings).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    lock(&WARNINGS).clear();
    guard
}

fn warnings() -> Vec<String> {
    std::mem::take(&mut lock(&WARNINGS))
}

fn specs(count: usize) -> Vec<KernelSpec> {
    (1..=count)
        .map(|heads| KernelSpec::new(Arch::Sm90a, heads))
        .collect()
}

/// A kernel whose device code is bytes drawn from its head count.
fn kernel_of(spec: &KernelSpec, bytes: usize) -> Kernel {
    let mut state = spec.heads as u64 + 1;
    let cubin = (0..bytes).map(|_| random(&mut state) as u8).collect();
    let resources = Resources {
        registers: 64,
        ..Resources::default()
    };
    Kernel::new(spec, cubin, VERSION, Some(resources)).unwrap()
}

fn random(state: &mut u64) -> u64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

fn same(a: &Kernel, b: &Kernel) -> bool {
    (
        a.spec,
        &a.entry,
        a.key,
        &a.cubin,
        a.nvrtc_version,
        a.resources,
    ) == (
        b.spec,
        &b.entry,
        b.key,
        &b.cubin,
        b.nvrtc_version,
        b.resources,
    )
}

/// A bundle with an edited manifest under a right checksum.
fn edited(bytes: &[u8], edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
    let (manifest, cubins) = bytes[HEADER_BYTES..].split_at(length);
    let mut manifest: Value = serde_json::from_slice(manifest).unwrap();
    edit(&mut manifest);
    with_manifest(&serde_json::to_vec(&manifest).unwrap(), cubins)
}

fn with_manifest(manifest: &[u8], cubins: &[u8]) -> Vec<u8> {
    let mut bytes = b"KDAKERN1".to_vec();
    bytes.extend((manifest.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(manifest));
    bytes.extend(manifest);
    bytes.extend(cubins);
    bytes
}

fn sources_of(bytes: Vec<u8>) -> Result<KernelSources, Error> {
    Ok(KernelSources::new().bundle(KernelBundle::from_bytes(bytes)?))
}

/// The one file of a cache that holds one kernel.
fn only_file(cache: &DiskCache) -> PathBuf {
    let folder = fs::read_dir(cache.folder())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    fs::read_dir(folder)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .unwrap()
        .flat_map(|kernel| fs::read_dir(kernel.unwrap().path()).unwrap())
        .map(|file| file.unwrap().path())
        .collect()
}

/// Where the project's commands put a fetched libnvrtc.
fn fetched_nvrtc() -> PathBuf {
    PathBuf::from("../target/nvrtc")
}

fn nvrtc_or_skip(test: &str) -> bool {
    let found = Nvrtc::load(&[fetched_nvrtc()]);
    if let Err(error) = &found {
        assert!(
            std::env::var_os("KDA_REQUIRE_NVRTC").is_none(),
            "{test}: {error}"
        );
        eprintln!("SKIPPED {test}: {error}");
    }
    found.is_ok()
}

// ---- bundles

#[test]
fn a_bundle_round_trips() {
    let specs = specs(5);
    let kernels: Vec<Kernel> = specs
        .iter()
        .map(|spec| kernel_of(spec, 1000 + spec.heads))
        .collect();
    let bytes = encode_bundle(&kernels).unwrap();
    let folder = scratch();
    let path = folder.path().join("kda.bundle");
    fs::write(&path, &bytes).unwrap();
    let bundles = [
        KernelBundle::from_path(&path).unwrap(),
        KernelBundle::from_bytes(bytes.clone()).unwrap(),
        KernelBundle::from_bytes(&*bytes.leak()).unwrap(),
    ];
    for bundle in bundles {
        assert_eq!(bundle.entries().count(), 5);
        let found = KernelSources::new().bundle(bundle).kernels(&specs).unwrap();
        for (found, kernel) in found.iter().zip(&kernels) {
            assert!(same(found, kernel), "{}", kernel.entry);
            assert_eq!(found.origin, Origin::Bundle);
        }
    }
}

#[test]
fn a_kernel_is_written_once() {
    let kernel = kernel_of(&specs(1)[0], 100);
    let once = encode_bundle(std::slice::from_ref(&kernel)).unwrap();
    assert_eq!(once, encode_bundle(&[kernel.clone(), kernel]).unwrap());
}

#[test]
fn the_second_bundle_is_asked_too() {
    let specs = specs(2);
    let bundle =
        |spec| KernelBundle::from_bytes(encode_bundle(&[kernel_of(spec, 10)]).unwrap()).unwrap();
    let sources = KernelSources::new()
        .bundle(bundle(&specs[0]))
        .bundle(bundle(&specs[1]));
    assert_eq!(sources.kernels(&specs).unwrap().len(), 2);
}

#[test]
fn each_field_is_named_when_it_differs() {
    let spec = specs(1)[0];
    let bytes = encode_bundle(&[kernel_of(&spec, 100)]).unwrap();
    let manifest: Value = {
        let length = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
        serde_json::from_slice(&bytes[HEADER_BYTES..HEADER_BYTES + length]).unwrap()
    };
    let fields = manifest["kernels"][0]["fields"].as_object().unwrap();
    assert_eq!(fields.len(), 18);
    for name in fields.keys() {
        let bytes = edited(&bytes, |m| {
            m["kernels"][0]["fields"][name] = json!("other\n")
        });
        let error = sources_of(bytes).unwrap().kernel(&spec).unwrap_err();
        let difference = match &error {
            Error::BundleMismatch {
                difference,
                entry: Some(_),
                ..
            } => difference,
            Error::KernelMissing {
                nearest: Some(difference),
                ..
            } => difference,
            other => panic!("{name}: {other}"),
        };
        assert_eq!(difference.field, *name);
        assert_eq!(difference.found, "other?");
        assert!(
            error
                .to_string()
                .contains(&format!("{name} is other? there")),
            "{error}"
        );
    }
    type Edit = fn(&mut Value);
    let others: [(&str, Edit); 3] = [
        ("nvrtc", |m| m["kernels"][0]["nvrtc"] = json!([12, 8])),
        ("key", |m| m["kernels"][0]["key"] = json!("00")),
        ("key", |m| m["kernels"][0]["nvrtc"] = json!([13, 1])),
    ];
    for (field, edit) in others {
        match sources_of(edited(&bytes, edit))
            .unwrap()
            .kernel(&spec)
            .unwrap_err()
        {
            Error::BundleMismatch { difference, .. } => assert_eq!(difference.field, field),
            other => panic!("{field}: {other}"),
        }
    }
    match sources_of(bytes.clone())
        .unwrap()
        .require_nvrtc(13, 1)
        .kernel(&spec)
        .unwrap_err()
    {
        Error::BundleMismatch { difference, .. } => {
            assert_eq!(difference.to_string(), "nvrtc is 13.0 there, 13.1 wanted");
        }
        other => panic!("{other}"),
    }
    match sources_of(edited(&bytes, |m| m["crate_version"] = json!("0.0.1"))).unwrap_err() {
        Error::BundleMismatch {
            difference,
            entry: None,
            ..
        } => {
            assert_eq!(difference.field, "crate_version");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_missing_kernel_names_the_nearest() {
    let held: Vec<Kernel> = [(Arch::Sm100a, 3), (Arch::Sm90a, 6)]
        .map(|(a, h)| kernel_of(&KernelSpec::new(a, h), 10))
        .into();
    let sources = sources_of(encode_bundle(&held).unwrap()).unwrap();
    let error = sources
        .kernel(&KernelSpec::new(Arch::Sm90a, 12))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "no source has kda_decode_h12_dim_first_lower_bound_non_positive_split1_256x8_block for \
         sm_90a, and nvrtc is not among them; nearest kernel of the bundle: heads is 6 there, 12 \
         wanted"
    );
    // Where an option of `gen` is easily forgotten, it is named.
    let step = KernelSpec::new(Arch::Sm90a, 6);
    let held = [step, step.with_verify(2)].map(|spec| kernel_of(&spec, 10));
    let sources = sources_of(encode_bundle(&held).unwrap()).unwrap();
    let verify = step.with_verify(2);
    let (mut ragged, mut records, mut projected) = (verify, verify, step);
    ragged.ragged = true;
    records.rollback = Rollback::Records;
    projected.gate_input = GateInput::Projected;
    let reset = KernelSpec::reset(Arch::Sm90a, step.null_rule, step.state_dtype);
    for (wanted, option) in [
        (step.with_verify(1), "--verify-one"),
        (reset, "--reset"),
        (ragged, "--ragged"),
        (records, "--rollback records"),
        (projected, "--gate-input projected"),
    ] {
        let said = sources.kernel(&wanted).unwrap_err().to_string();
        let option = format!(" wanted (cargo xtask gen {option})");
        assert!(said.ends_with(&option), "{said}, {option}");
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = encode_bundle(
        &specs(2)
            .iter()
            .map(|s| kernel_of(s, 50))
            .collect::<Vec<_>>(),
    )
    .unwrap();
    for length in 0..bytes.len() {
        match KernelBundle::from_bytes(bytes[..length].to_vec()) {
            Err(Error::BundleDamaged {
                defect:
                    Defect::TooShort {
                        found_bytes,
                        needed_bytes,
                    },
                ..
            }) => {
                assert_eq!(found_bytes, length as u64);
                assert!(needed_bytes > found_bytes && needed_bytes <= bytes.len() as u64);
            }
            other => panic!("{length}: {other:?}"),
        }
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(matches!(
        KernelBundle::from_bytes(longer),
        Err(Error::BundleDamaged {
            defect: Defect::Trailing { extra_bytes: 1 },
            ..
        })
    ));
}

#[test]
fn every_flipped_byte_is_noticed() {
    let spec = specs(1)[0];
    let bytes = encode_bundle(&[kernel_of(&spec, 50)]).unwrap();
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let result = sources_of(flipped).and_then(|sources| sources.kernel(&spec));
        assert!(
            matches!(result, Err(Error::BundleDamaged { .. })),
            "byte {at}: {result:?}"
        );
    }
}

#[test]
fn hostile_manifests_are_refused() {
    let spec = specs(1)[0];
    let bytes = encode_bundle(&[kernel_of(&spec, 50)]).unwrap();
    let set =
        |name: &'static str, value: Value| edited(&bytes, move |m| m["kernels"][0][name] = value);
    let twice = edited(&bytes, |m| {
        let kernel = m["kernels"][0].clone();
        m["kernels"].as_array_mut().unwrap().push(kernel);
    });
    let mut huge_length = bytes.clone();
    huge_length[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let deep = "[".repeat(100_000);
    let cases = [
        ("offset past the end", set("cubin_offset", json!(1))),
        ("huge offset", set("cubin_offset", json!(u64::MAX))),
        ("huge length", set("cubin_bytes", json!(u64::MAX))),
        (
            "length and offset near the end of u64",
            set("cubin_bytes", json!(u64::MAX - 60)),
        ),
        ("negative offset", set("cubin_offset", json!(-1))),
        ("no bytes", set("cubin_bytes", json!(0))),
        (
            "no such kernel list",
            edited(&bytes, |m| m["kernels"] = json!(7)),
        ),
        ("no fields", set("fields", json!(null))),
        (
            "fields of another type",
            set("fields", json!({ "arch": 7 })),
        ),
        (
            "no resources of that kind",
            set("resources", json!({ "registers": -1 })),
        ),
        ("twice the same", twice),
        ("deep nesting", with_manifest(deep.as_bytes(), b"")),
        ("no UTF-8", with_manifest(b"\"\xff\xfe\"", b"")),
        ("empty manifest", with_manifest(b"", b"")),
        ("manifest of 16 EiB", huge_length),
        ("another file", b"\x7fELF".repeat(100)),
    ];
    for (name, bytes) in cases {
        let result = KernelBundle::from_bytes(bytes);
        assert!(
            matches!(result, Err(Error::BundleDamaged { .. })),
            "{name}: {result:?}"
        );
    }
    // Fields that are missing altogether make another specialisation.
    let result = sources_of(set("fields", json!({}))).unwrap().kernel(&spec);
    assert!(
        matches!(
            result,
            Err(Error::KernelMissing {
                nearest: Some(_),
                ..
            })
        ),
        "{result:?}"
    );
}

#[test]
fn an_unreadable_bundle_names_its_path() {
    let folder = scratch();
    for path in [folder.path().join("absent"), folder.path().to_owned()] {
        let error = KernelBundle::from_path(&path).unwrap_err();
        assert!(matches!(error, Error::BundleUnreadable { .. }));
        assert!(
            error.to_string().starts_with(&path.display().to_string()),
            "{error}"
        );
    }
}

// ---- the disk cache

#[test]
fn the_cache_round_trips() {
    let _alone = alone();
    let folder = scratch();
    let cache = DiskCache::at(folder.path().join("a/b"));
    let spec = specs(1)[0];
    assert!(cache.load(&spec, None).unwrap().is_none());
    let kernel = kernel_of(&spec, 1000);
    cache.store(&kernel).unwrap();
    let found = cache.load(&spec, None).unwrap().unwrap();
    assert!(same(&found, &kernel));
    assert_eq!(found.origin, Origin::Cache);
    // Another kernel, and another version of NVRTC, are not in it.
    assert!(cache.load(&specs(2)[1], None).unwrap().is_none());
    assert!(cache.load(&spec, Some((13, 1))).unwrap().is_none());
    // The newest version is taken unless one is required.
    let newer = Kernel::new(&spec, vec![7; 10], (13, 2), None).unwrap();
    cache.store(&newer).unwrap();
    assert!(same(&cache.load(&spec, None).unwrap().unwrap(), &newer));
    assert!(same(
        &cache.load(&spec, Some(VERSION)).unwrap().unwrap(),
        &kernel
    ));
    assert_eq!(warnings(), Vec::<String>::new());
}

#[test]
fn damage_in_the_cache_is_reported_and_removed() {
    let _alone = alone();
    let folder = scratch();
    let cache = DiskCache::at(folder.path());
    let spec = specs(1)[0];
    let kernel = kernel_of(&spec, 40);
    cache.store(&kernel).unwrap();
    let file = only_file(&cache);
    let whole = fs::read(&file).unwrap();
    let mut damaged: Vec<Vec<u8>> = (0..whole.len())
        .map(|length| whole[..length].to_vec())
        .collect();
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x40;
        damaged.push(flipped);
    }
    damaged.push([&whole[..], b"x"].concat());
    damaged.push(edited(&whole, |m| m["crate_version"] = json!("9.9.9")));
    damaged.push(edited(&whole, |m| {
        m["kernels"][0]["nvrtc"] = json!([13, 3])
    }));
    damaged.push(edited(&whole, |m| {
        m["kernels"][0]["fields"]["heads"] = json!("2")
    }));
    // Whole, but of another kernel.
    damaged.push(encode_bundle(&[kernel_of(&specs(2)[1], 40)]).unwrap());
    for (i, bytes) in damaged.iter().enumerate() {
        fs::write(&file, bytes).unwrap();
        assert!(cache.load(&spec, None).unwrap().is_none(), "{i}");
        let said = warnings();
        assert_eq!(said.len(), 1, "{i}: {said:?}");
        assert!(
            said[0].contains(&file.display().to_string()) || said[0].contains("no source"),
            "{said:?}"
        );
        assert!(!file.exists(), "{i}");
    }
    // Something that is no file at all is no reason to fail either.
    fs::create_dir(&file).unwrap();
    assert!(cache.load(&spec, None).unwrap().is_none());
    assert_eq!(warnings().len(), 1);
    fs::remove_dir(&file).unwrap();
    cache.store(&kernel).unwrap();
    assert!(cache.load(&spec, None).unwrap().is_some());
}

#[test]
fn foreign_names_in_the_cache_are_ignored() {
    let _alone = alone();
    let folder = scratch();
    let cache = DiskCache::at(folder.path());
    let spec = specs(1)[0];
    cache.store(&kernel_of(&spec, 40)).unwrap();
    let of_kernel = only_file(&cache).parent().unwrap().to_owned();
    for name in [
        "notes.txt",
        "99999999999.0.kernel",
        "13.kernel",
        ".7-7-7.partial",
        "11.0.kernel",
    ] {
        fs::write(of_kernel.join(name), "x").unwrap();
    }
    assert!(cache.load(&spec, None).unwrap().is_some());
    assert_eq!(warnings(), Vec::<String>::new());
}

#[test]
fn abandoned_files_are_removed() {
    let folder = scratch();
    let cache = DiskCache::at(folder.path());
    let kernel = kernel_of(&specs(1)[0], 40);
    cache.store(&kernel).unwrap();
    let of_kernel = only_file(&cache).parent().unwrap().to_owned();
    let (old, young) = (
        of_kernel.join(".1-1-1.partial"),
        of_kernel.join(".2-2-2.partial"),
    );
    fs::write(&young, "x").unwrap();
    let file = fs::File::create(&old).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(7200))
        .unwrap();
    cache.store(&kernel).unwrap();
    assert!(!old.exists() && young.exists());
}

#[test]
fn c38_a_cache_that_cannot_be_written_is_a_warning() {
    let _alone = alone();
    if !nvrtc_or_skip("c38_a_cache_that_cannot_be_written_is_a_warning") {
        return;
    }
    let folder = scratch();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    // A file where the folder should be; a folder that the system makes read-only for everyone.
    for place in [file, "/proc/kda".into()] {
        let sources = KernelSources::new()
            .disk_cache(DiskCache::at(place))
            .nvrtc(&[]);
        let kernel = sources.kernel(&specs(1)[0]).unwrap();
        assert_eq!(kernel.origin, Origin::Compiled);
        let said = warnings();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("is not cached in"), "{said:?}");
    }
}

#[cfg(unix)]
#[test]
fn c38_a_folder_of_others_is_not_used() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let _alone = alone();
    let folder = scratch();
    let cache = DiskCache::at(folder.path());
    let kernel = kernel_of(&specs(1)[0], 1000);
    cache.store(&kernel).unwrap();
    let inner = only_file(&cache).parent().unwrap().to_owned();
    let found = || cache.load(&kernel.spec, None).unwrap().is_some();
    assert!(found());
    for place in [folder.path(), &inner] {
        let mode = fs::metadata(place).unwrap().permissions();
        fs::set_permissions(place, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!found(), "{}", place.display());
        let error = cache.store(&kernel).unwrap_err().to_string();
        assert!(error.ends_with("may be written by every user"), "{error}");
        fs::set_permissions(place, mode).unwrap();
        assert!(found());
    }
    // Only root can give a folder away.
    let own = fs::metadata(folder.path()).unwrap().uid();
    for place in [folder.path(), &inner] {
        if own != 0 {
            assert!(chown(place, Some(own + 1), None).is_err());
            continue;
        }
        chown(place, Some(12_345), None).unwrap();
        assert!(!found(), "{}", place.display());
        let error = cache.store(&kernel).unwrap_err().to_string();
        assert!(error.ends_with("belongs to another user"), "{error}");
        chown(place, Some(own), None).unwrap();
        assert!(found());
    }
}

#[test]
fn c38_without_a_home_there_is_no_cache() {
    let folder = scratch();
    all_succeed(vec![
        child("homeless", folder.path())
            .env_remove("HOME")
            .env_remove("XDG_CACHE_HOME")
            .env_remove("LOCALAPPDATA")
            .env_remove("KDA_CACHE")
            .spawn()
            .unwrap(),
    ]);
}

#[test]
fn c38_shipped_kernels_write_no_file() {
    let folder = scratch();
    let place = folder.path().join("cache");
    let spec = specs(1)[0];
    let sources = sources_of(encode_bundle(&[kernel_of(&spec, 10)]).unwrap())
        .unwrap()
        .disk_cache(DiskCache::at(&place))
        .nvrtc(&[]);
    assert_eq!(sources.kernel(&spec).unwrap().origin, Origin::Bundle);
    assert!(!place.exists());
}

#[test]
fn a_warm_cache_serves_sixteen_kernels_in_time() {
    let _alone = alone();
    let folder = scratch();
    let cache = DiskCache::at(folder.path());
    let specs = specs(16);
    for spec in &specs {
        cache.store(&kernel_of(spec, 60_000)).unwrap();
    }
    let sources = KernelSources::new().disk_cache(cache);
    let times: Vec<Duration> = (0..50)
        .map(|_| {
            let started = Instant::now();
            let kernels = sources.kernels(&specs).unwrap();
            assert!(kernels.iter().all(|kernel| kernel.origin == Origin::Cache));
            started.elapsed()
        })
        .collect();
    // The least of fifty: other work on the machine is not the cache's.
    let least = times.iter().min().unwrap();
    println!(
        "16 kernels from a warm cache: {least:?}, first {:?}",
        times[0]
    );
    assert!(*least <= Duration::from_millis(20), "{times:?}");
}

#[test]
fn cold_then_warm_then_bundled() {
    let _alone = alone();
    if !nvrtc_or_skip("cold_then_warm_then_bundled") {
        return;
    }
    let folder = scratch();
    let specs = specs(2);
    let cache = DiskCache::at(folder.path());
    let sources = KernelSources::new().disk_cache(cache.clone()).nvrtc(&[]);
    let cold = sources.kernels(&specs).unwrap();
    let warm = sources.kernels(&specs).unwrap();
    // Without NVRTC among the sources, the cache alone serves.
    let cached = KernelSources::new()
        .disk_cache(cache)
        .kernels(&specs)
        .unwrap();
    let bundled = sources_of(encode_bundle(&cold).unwrap())
        .unwrap()
        .kernels(&specs)
        .unwrap();
    for i in 0..specs.len() {
        assert_eq!(cold[i].origin, Origin::Compiled);
        assert_eq!(
            (warm[i].origin, cached[i].origin),
            (Origin::Cache, Origin::Cache)
        );
        assert_eq!(bundled[i].origin, Origin::Bundle);
        for other in [&warm[i], &cached[i], &bundled[i]] {
            assert!(same(&cold[i], other));
        }
        assert!(cold[i].cubin.starts_with(b"\x7fELF"));
    }
    // A damaged entry is rebuilt, to the same bytes.
    for file in files(folder.path()) {
        fs::write(file, b"KDAKERN1").unwrap();
    }
    let rebuilt = sources.kernels(&specs).unwrap();
    assert_eq!(warnings().len(), specs.len());
    for (cold, rebuilt) in cold.iter().zip(&rebuilt) {
        assert!(same(cold, rebuilt) && rebuilt.origin == Origin::Compiled);
    }
    assert!(
        sources
            .kernels(&specs)
            .unwrap()
            .iter()
            .all(|kernel| kernel.origin == Origin::Cache)
    );
    let required = KernelSources::new()
        .nvrtc(&[])
        .require_nvrtc(99, 0)
        .kernel(&specs[0]);
    assert!(
        matches!(
            required,
            Err(Error::NvrtcVersion {
                required: (99, 0),
                ..
            })
        ),
        "{required:?}"
    );
}

#[test]
fn nvrtc_is_not_loaded_without_need() {
    let folder = scratch();
    let out = child("lazy", folder.path())
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
}

// ---- many processes

const CHILD: &str = "KDA_CACHE_TEST_CHILD";
const CHILD_FOLDER: &str = "KDA_CACHE_TEST_FOLDER";

/// This test binary again, doing what `work` says in `folder`.
fn child(work: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "child_process",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(CHILD, work)
        .env(CHILD_FOLDER, folder)
        .stdout(Stdio::null());
    command
}

/// The work of a child; a test only so that the binary can be started with it.
#[test]
fn child_process() {
    let Some(work) = std::env::var_os(CHILD) else {
        return;
    };
    let folder = PathBuf::from(std::env::var_os(CHILD_FOLDER).unwrap());
    let cache = DiskCache::at(&folder);
    let _alone = alone();
    match work.to_str().unwrap() {
        // Writes for ever; the parent kills it.
        "fill" => {
            let kernels: Vec<Kernel> = specs(3)
                .iter()
                .map(|spec| kernel_of(spec, 1_000_000))
                .collect();
            println!("ready");
            loop {
                for kernel in &kernels {
                    cache.store(kernel).unwrap();
                }
            }
        }
        "share" => {
            let kernels: Vec<Kernel> = specs(3)
                .iter()
                .map(|spec| kernel_of(spec, 100_000))
                .collect();
            for _ in 0..20 {
                for kernel in &kernels {
                    if let Some(found) = cache.load(&kernel.spec, None).unwrap() {
                        assert!(same(&found, kernel));
                    }
                    cache.store(kernel).unwrap();
                }
            }
            assert_eq!(warnings(), Vec::<String>::new());
        }
        "prepare" => {
            let sources = KernelSources::new()
                .disk_cache(cache)
                .nvrtc(&[fetched_nvrtc()]);
            assert_eq!(sources.kernels(&specs(2)).unwrap().len(), 2);
            assert_eq!(warnings(), Vec::<String>::new());
        }
        // Every file may hold 4 KiB only.
        "full" => {
            let kernel = kernel_of(&specs(1)[0], 100_000);
            let error = cache.store(&kernel).unwrap_err();
            assert!(cache.load(&kernel.spec, None).unwrap().is_none());
            assert_eq!(warnings(), Vec::<String>::new());
            println!("{error}");
        }
        "homeless" => assert_eq!(DiskCache::from_environment(), None),
        "lazy" => {
            let spec = specs(1)[0];
            let bundle =
                KernelBundle::from_bytes(encode_bundle(&[kernel_of(&spec, 10)]).unwrap()).unwrap();
            cache.store(&kernel_of(&specs(2)[1], 10)).unwrap();
            let sources = KernelSources::new()
                .bundle(bundle)
                .disk_cache(cache)
                .nvrtc(&[]);
            assert_eq!(sources.kernel(&spec).unwrap().origin, Origin::Bundle);
            assert_eq!(sources.kernel(&specs(2)[1]).unwrap().origin, Origin::Cache);
            if cfg!(target_os = "linux") {
                let maps = fs::read_to_string("/proc/self/maps").unwrap();
                assert!(!maps.contains("libnvrtc"), "{maps}");
                if Nvrtc::load(&[]).is_ok() {
                    assert!(
                        fs::read_to_string("/proc/self/maps")
                            .unwrap()
                            .contains("libnvrtc")
                    );
                }
            }
        }
        other => panic!("{other}"),
    }
}

fn all_succeed(children: Vec<Child>) {
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{out:?}");
    }
}

#[test]
fn ten_processes_share_a_cache() {
    let folder = scratch();
    let spawn = |work| {
        (0..10)
            .map(|_| child(work, folder.path()).spawn().unwrap())
            .collect()
    };
    all_succeed(spawn("share"));
    assert_eq!(files(folder.path()).len(), 3, "no unfinished file stays");
    fs::remove_dir_all(folder.path()).unwrap();
    if nvrtc_or_skip("ten_processes_share_a_cache") {
        all_succeed(spawn("prepare"));
        assert_eq!(files(folder.path()).len(), 2);
    }
}

/// A child whose files may not grow beyond `limit` blocks (512 or 1024 bytes, by the shell). The
/// write that would exceed it fails after `trap '' XFSZ`; else it kills the child.
#[cfg(unix)]
fn limited(work: &str, folder: &Path, limit: u64, before: &str) -> Command {
    let child = child(work, folder);
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!("{before} ulimit -c 0; ulimit -f {limit}; exec \"$0\" \"$@\""),
        ])
        .arg(child.get_program())
        .args(child.get_args())
        .envs(child.get_envs().filter_map(|(k, v)| Some((k, v?))))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

#[cfg(unix)]
#[test]
fn c38_a_full_disk_leaves_nothing() {
    let folder = scratch();
    // A file-size limit fails a write half way, as a full disk does.
    let out = limited("full", folder.path(), 8, "trap '' XFSZ;")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
}

/// Fills `folder` and dies in the middle of writing a file.
#[cfg(unix)]
fn die_writing(folder: &Path, moment: u64) {
    use std::os::unix::process::ExitStatusExt;
    // Every file is above 1,000,000 bytes.
    let out = limited("fill", folder, 1 + moment % 900, "")
        .output()
        .unwrap();
    assert!(out.status.signal().is_some(), "{out:?}");
    assert_eq!(unfinished(folder).len(), 1, "it died in a write: {out:?}");
}

/// Fills `folder` and is killed from outside, whatever it does at the time.
fn die_any_time(folder: &Path, moment: u64) {
    use std::io::Read;
    let mut child = child("fill", folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Until it says that it writes.
    let mut out = child.stdout.take().unwrap();
    let mut said = Vec::new();
    let mut byte = [0];
    while !said.ends_with(b"ready") && out.read(&mut byte).unwrap() == 1 {
        said.push(byte[0]);
    }
    std::thread::sleep(Duration::from_micros(moment % 5_000));
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success(), "it ended by itself");
}

fn unfinished(folder: &Path) -> Vec<PathBuf> {
    let mut files = files(folder);
    files.retain(|file| file.extension().is_some_and(|e| e == "partial"));
    files
}

#[test]
fn killed_processes_never_leave_a_bad_cache() {
    let _alone = alone();
    let folder = scratch();
    let cache = DiskCache::at(folder.path());
    let kernels: Vec<Kernel> = specs(3)
        .iter()
        .map(|spec| kernel_of(spec, 1_000_000))
        .collect();
    let mut state = 0x5eed;
    for round in 0..200 {
        let moment = random(&mut state);
        #[cfg(unix)]
        if round % 4 < 2 {
            die_writing(folder.path(), moment);
        } else {
            die_any_time(folder.path(), moment);
        }
        #[cfg(not(unix))]
        die_any_time(folder.path(), moment);
        for kernel in &kernels {
            if let Some(cached) = cache.load(&kernel.spec, None).unwrap() {
                assert!(same(&cached, kernel), "round {round}");
            }
        }
        assert_eq!(warnings(), Vec::<String>::new(), "round {round}");
        // The next round starts from nothing, every other time.
        if round % 2 == 0 {
            fs::remove_dir_all(folder.path()).unwrap();
            fs::create_dir(folder.path()).unwrap();
        } else {
            for file in unfinished(folder.path()) {
                fs::remove_file(file).unwrap();
            }
        }
    }
    for kernel in &kernels {
        cache.store(kernel).unwrap();
        assert!(same(
            &cache.load(&kernel.spec, None).unwrap().unwrap(),
            kernel
        ));
    }
}
