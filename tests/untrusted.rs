//! What comes from outside, at random: bundles, policy files, cache entries and the C interface's
//! arguments. Never
//! a panic, never memory beyond a multiple of what was given, always a clear error or the whole
//! thing. Needs no GPU and no libnvrtc.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::path::PathBuf;
use std::ptr;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kda_capi::{
    KdaBuffer, KdaConfig, KdaLaunch, KdaPlan, KdaPolicy, KdaRows, KdaSources, KdaStatus, KdaStep,
    kda_config_kimi_k3, kda_last_error, kda_plan_create, kda_plan_destroy, kda_plan_step,
};
use kda_codegen::{Arch, GateInput, KernelSpec, Resources, Rollback};
use kda_runtime::{
    Config, DiskCache, Error, Kernel, KernelBundle, KernelSources, Kernels, Origin, Plan, Policies,
    PolicyFile, encode_bundle,
};
use kda_tests::{property_config, scratch};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

// ---- support

/// Counts what each thread has allocated and not yet freed, and the most there ever was.
struct Counting;

thread_local! {
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(live.get())));
    });
}

// SAFETY: everything is passed on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `work` and the most bytes that it held at once.
fn measured<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = LIVE.get();
    MOST.set(before);
    let result = work();
    (result, (MOST.get() - before) as u64)
}

/// Most bytes that reading `bytes` bytes may hold: a manifest's text as values in memory, the
/// kernel's copy, and what an error text needs.
fn memory_for(bytes: usize) -> u64 {
    64 * bytes as u64 + (16 << 10)
}

fn specs() -> [KernelSpec; 2] {
    let decode = KernelSpec::new(Arch::Sm90a, 2);
    [decode, decode.with_verify(3)]
}

fn kernels() -> Vec<Kernel> {
    let kernel = |(i, spec): (usize, &KernelSpec)| {
        let cubin = (0..60 + i).map(|at| (at * 7 + i) as u8).collect();
        Kernel::new(spec, cubin, (13, 0), Some(Resources::default())).unwrap()
    };
    specs().iter().enumerate().map(kernel).collect()
}

/// Same specialisation, key, version and code: what a launch depends on.
fn same_code(a: &Kernel, b: &Kernel) -> bool {
    (a.spec, &a.entry, a.key, &a.cubin, a.nvrtc_version)
        == (b.spec, &b.entry, b.key, &b.cubin, b.nvrtc_version)
}

const HEADER_BYTES: usize = 48;

/// A file with this manifest under a right length and checksum.
fn with_manifest(manifest: &[u8], cubins: &[u8]) -> Vec<u8> {
    let mut bytes = b"KDAKERN1".to_vec();
    bytes.extend((manifest.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(manifest));
    bytes.extend(manifest);
    bytes.extend(cubins);
    bytes
}

/// Manifest and cubins of a bundle.
fn parts(bytes: &[u8]) -> (Value, &[u8]) {
    let length = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
    let (manifest, cubins) = bytes[HEADER_BYTES..].split_at(length);
    (serde_json::from_slice(manifest).unwrap(), cubins)
}

/// One change of a file.
#[derive(Clone, Debug)]
enum Edit {
    Flip(Index, u8),
    Set(Index, u8),
    Truncate(Index),
    Remove(Index, usize),
    Insert(Index, Vec<u8>),
    /// Copies a piece over another place.
    Splice(Index, Index, usize),
    /// A number over eight bytes.
    Word(Index, u64),
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = any::<Index>;
    prop_oneof![
        (at(), 0..8u8).prop_map(|(at, bit)| Edit::Flip(at, bit)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        at().prop_map(Edit::Truncate),
        (at(), 1..64usize).prop_map(|(at, count)| Edit::Remove(at, count)),
        (at(), vec(any::<u8>(), 1..64)).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        (at(), at(), 1..64usize).prop_map(|(from, to, count)| Edit::Splice(from, to, count)),
        (at(), number()).prop_map(|(at, word)| Edit::Word(at, word)),
    ]
}

/// Numbers near the places where arithmetic goes wrong.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..64u32, -2..=2i64).prop_map(|(bit, off)| (1u64 << bit).wrapping_add_signed(off)),
        0..200u64,
        (0..200u64).prop_map(|off| u64::MAX - off),
    ]
}

fn apply(bytes: &mut Vec<u8>, edits: &[Edit]) {
    for edit in edits {
        if bytes.is_empty() {
            return;
        }
        let length = bytes.len();
        match edit {
            Edit::Flip(at, bit) => bytes[at.index(length)] ^= 1 << bit,
            Edit::Set(at, byte) => bytes[at.index(length)] = *byte,
            Edit::Truncate(at) => bytes.truncate(at.index(length)),
            Edit::Remove(at, count) => {
                let at = at.index(length);
                bytes.drain(at..length.min(at + count));
            }
            Edit::Insert(at, more) => {
                let at = at.index(length);
                bytes.splice(at..at, more.iter().copied());
            }
            Edit::Splice(from, to, count) => {
                let (from, to) = (from.index(length), to.index(length));
                let count = (*count).min(length - from).min(length - to);
                bytes.copy_within(from..from + count, to);
            }
            Edit::Word(at, word) => {
                let at = at.index(length);
                let count = (length - at).min(8);
                bytes[at..at + count].copy_from_slice(&word.to_le_bytes()[..count]);
            }
        }
    }
}

/// Every kernel that `bytes` give, or the error of reading them; within memory in proportion.
fn read(bytes: &[u8]) -> Result<Vec<Result<Kernel, Error>>, Error> {
    let given = bytes.to_vec();
    let (result, most) = measured(|| {
        let bundle = KernelBundle::from_bytes(given)?;
        let sources = KernelSources::new().bundle(bundle);
        Ok(specs().iter().map(|spec| sources.kernel(spec)).collect())
    });
    // The text of a kernel is rendered for its key, whatever the bundle.
    let rendering = 2 << 20;
    assert!(
        most <= memory_for(bytes.len()) + rendering,
        "{most} bytes held for {}",
        bytes.len()
    );
    result
}

/// What is wrong with a bundle, as opposed to with the wish.
fn refused(error: &Error) -> bool {
    let typed = matches!(
        error,
        Error::BundleDamaged { .. } | Error::BundleMismatch { .. } | Error::KernelMissing { .. }
    );
    let text = error.to_string();
    typed && !text.is_empty() && text.len() < 2000 && !text.contains(char::is_control)
}

// ---- bundles

proptest! {
    #![proptest_config(property_config(512))]

    #[test]
    fn random_bytes_are_no_bundle(bytes in vec(any::<u8>(), 0..600), start in 0..=48usize) {
        let whole = encode_bundle(&kernels()).unwrap();
        // With as much of a right header as the draw says.
        let mut bytes = bytes;
        let start = start.min(bytes.len());
        bytes[..start].copy_from_slice(&whole[..start]);
        let (result, most) = measured(|| KernelBundle::from_bytes(bytes.clone()).map(|_| ()));
        let error = result.expect_err("no bundle");
        prop_assert!(matches!(error, Error::BundleDamaged { .. }), "{}", error);
        prop_assert!(most <= memory_for(bytes.len()), "{} bytes held", most);
    }

    #[test]
    fn random_manifests_are_refused(manifest in vec(any::<u8>(), 0..300), json in json_value()) {
        for manifest in [manifest, serde_json::to_vec(&json).unwrap()] {
            let bytes = with_manifest(&manifest, b"cubin");
            let (result, most) = measured(|| KernelBundle::from_bytes(bytes.clone()).map(|_| ()));
            let error = result.expect_err("no bundle");
            prop_assert!(refused(&error), "{}", error);
            prop_assert!(most <= memory_for(bytes.len()), "{} bytes held", most);
        }
    }

    #[test]
    fn a_changed_bundle_is_refused_or_equal(edits in vec(edit(), 1..4)) {
        let whole = encode_bundle(&kernels()).unwrap();
        let mut changed = whole.clone();
        apply(&mut changed, &edits);
        match read(&changed) {
            Err(error) => {
                prop_assert!(refused(&error), "{}", error);
                prop_assert_ne!(changed, whole);
            }
            Ok(found) => {
                for (found, kernel) in found.into_iter().zip(kernels()) {
                    match found {
                        Ok(found) => prop_assert!(same_code(&found, &kernel)),
                        Err(error) => {
                            prop_assert!(refused(&error), "{}", error);
                            prop_assert_ne!(&changed, &whole);
                        }
                    }
                }
            }
        }
    }

    /// Under a right checksum: what the manifest says is checked too.
    #[test]
    fn a_changed_manifest_is_refused_or_gives_the_same_code(
        changes in vec((any::<Index>(), change()), 1..4),
    ) {
        let whole = encode_bundle(&kernels()).unwrap();
        let (mut manifest, cubins) = parts(&whole);
        for (at, change) in &changes {
            let mut places = Vec::new();
            pointers(&manifest, String::new(), &mut places);
            let place = &places[at.index(places.len())];
            change.apply(&mut manifest, place);
        }
        let bytes = with_manifest(&serde_json::to_vec(&manifest).unwrap(), cubins);
        match read(&bytes) {
            Err(error) => prop_assert!(refused(&error), "{}", error),
            Ok(found) => {
                for (found, kernel) in found.into_iter().zip(kernels()) {
                    match found {
                        Ok(found) => prop_assert!(same_code(&found, &kernel)),
                        Err(error) => prop_assert!(refused(&error), "{}", error),
                    }
                }
            }
        }
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        number().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        let name = prop_oneof![
            select(vec!["kernels", "crate_version", "fields", "cubin_offset"])
                .prop_map(String::from),
            ".{0,6}",
        ];
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Value::from),
            vec((name, inner), 0..6).prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// One change of a place in a manifest.
#[derive(Clone, Debug)]
enum Change {
    Replace(Value),
    Number(u64),
    Remove,
    /// Appends to a list, or to a text.
    More(Value),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        json_value().prop_map(Change::Replace),
        number().prop_map(Change::Number),
        Just(Change::Remove),
        json_value().prop_map(Change::More),
    ]
}

impl Change {
    fn apply(&self, manifest: &mut Value, place: &str) {
        if let Change::Remove = self {
            let Some((parent, name)) = place.rsplit_once('/') else {
                return;
            };
            match manifest.pointer_mut(parent) {
                Some(Value::Object(map)) => drop(map.remove(name)),
                Some(Value::Array(list)) => drop(list.pop()),
                _ => {}
            }
            return;
        }
        let Some(value) = manifest.pointer_mut(place) else {
            return;
        };
        match (self, &mut *value) {
            (Change::More(more), Value::Array(list)) => {
                list.push(list.last().cloned().unwrap_or_else(|| more.clone()));
            }
            (Change::More(more), Value::String(text)) => text.push_str(&more.to_string()),
            (Change::More(new) | Change::Replace(new), _) => *value = new.clone(),
            (Change::Number(number), _) => *value = json!(number),
            (Change::Remove, _) => {}
        }
    }
}

/// The JSON pointers of a value and of everything in it.
fn pointers(value: &Value, place: String, all: &mut Vec<String>) {
    match value {
        Value::Array(list) => {
            for (i, value) in list.iter().enumerate() {
                pointers(value, format!("{place}/{i}"), all);
            }
        }
        Value::Object(map) => {
            for (name, value) in map {
                let name = name.replace('~', "~0").replace('/', "~1");
                pointers(value, format!("{place}/{name}"), all);
            }
        }
        _ => {}
    }
    all.push(place);
}

/// Sizes that a header claims are not believed: 16 EiB of manifest, 2⁶⁴ bytes of cubin.
#[test]
fn claimed_sizes_cost_nothing() {
    let whole = encode_bundle(&kernels()).unwrap();
    assert!(whole.len() < 1 << 12);
    for claimed in (12..64).map(|bit| 1u64 << bit).chain([u64::MAX]) {
        let mut header = whole.clone();
        header[8..16].copy_from_slice(&claimed.to_le_bytes());
        let (manifest, cubins) = parts(&whole);
        let cubin = |name: &str| {
            let mut manifest = manifest.clone();
            manifest["kernels"][0][name] = json!(claimed);
            with_manifest(&serde_json::to_vec(&manifest).unwrap(), cubins)
        };
        for bytes in [header, cubin("cubin_offset"), cubin("cubin_bytes")] {
            let (result, most) = measured(|| KernelBundle::from_bytes(bytes.clone()).map(|_| ()));
            assert!(
                matches!(result, Err(Error::BundleDamaged { .. })),
                "{claimed}"
            );
            assert!(most <= memory_for(bytes.len()), "{claimed}: {most} bytes");
        }
    }
}

// ---- policy files

/// Most bytes that reading a policy file of `bytes` bytes may hold. TOML can say a table in two bytes,
/// which weigh hundreds in memory; what is read is bounded for that reason.
fn policy_memory_for(bytes: usize) -> u64 {
    800 * bytes as u64 + (64 << 10)
}

/// Reads a policy file from memory and from disk, which must agree, within memory in proportion.
fn read_policies(bytes: &[u8]) -> Result<PolicyFile, Error> {
    let folder = scratch();
    let path = folder.path().join("policies.toml");
    fs::write(&path, bytes).unwrap();
    let (from_disk, most) = measured(|| PolicyFile::from_path(&path));
    assert!(
        most <= policy_memory_for(bytes.len()),
        "{most} bytes held for {}",
        bytes.len()
    );
    if let Ok(text) = std::str::from_utf8(bytes) {
        match (text.parse::<PolicyFile>(), &from_disk) {
            (Ok(a), Ok(b)) => assert_eq!(a, *b),
            (Err(a), Err(b)) => {
                let tail = |error: &Error| error.to_string().split_once(" is no ").unwrap().1.len();
                assert_eq!(tail(&a), tail(b), "{a}, {b}");
            }
            (a, b) => panic!("{a:?}, {b:?}"),
        }
    }
    from_disk
}

/// What is wrong with a policy file, in a text fit for a log.
fn no_policies(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::PolicyFileIllegal { .. })
        && text.contains("is no policy file: ")
        && text.len() < 1000
        && !text.contains(char::is_control)
}

/// A file that was read holds what kernels exist for: every policy in it makes a plan.
fn usable(file: &PolicyFile) {
    for entry in file.entries() {
        let config = Config {
            early_reads: entry.early_reads,
            rollback: entry.rollback,
            ..Config::kimi_k3(entry.heads)
        };
        let kinds = [entry.kind];
        let policies = Policies::from_file(file, file.arch(), &config, &kinds).unwrap();
        let plan = Plan::new(file.arch(), &config, &policies).unwrap();
        assert!(plan.policies().count() >= 1);
        assert!(entry.microseconds.is_finite() && entry.microseconds > 0.0);
    }
}

fn shipped_text() -> String {
    PolicyFile::shipped()[0].to_string()
}

/// A value as TOML writes it, of any kind and size, legal or not.
fn toml_value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        number().prop_map(|n| n.to_string()),
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| format!("{n:?}")),
        select(vec![
            "nan",
            "-inf",
            "1e999",
            "0x10",
            "1_0",
            "true",
            "2026-12-02",
            "''",
            "\"\"",
            "[]",
            "{}",
            "\"\"\"\n\"\"\"",
            "99999999999999999999999",
            "-0",
            "+1",
            "\"split1-256x8-block\"",
            "\"verify\"",
            "\"caches\"",
            "\"sm_100a\"",
        ])
        .prop_map(String::from),
        "\"[^\"\\\\]{0,20}\"",
        ".{0,12}",
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        let list = vec(inner.clone(), 0..6).prop_map(|all| format!("[{}]", all.join(", ")));
        let pair = ("[a-z_.]{1,12}", inner).prop_map(|(name, value)| format!("{name} = {value}"));
        let table = vec(pair, 0..6).prop_map(|all| format!("{{{}}}", all.join(", ")));
        prop_oneof![list, table]
    })
}

proptest! {
    #![proptest_config(property_config(512))]

    #[test]
    fn random_texts_are_no_policy_files(bytes in vec(any::<u8>(), 0..600), text in "\\PC{0,200}") {
        for bytes in [&bytes[..], text.as_bytes()] {
            let error = read_policies(bytes).expect_err("no policy file");
            prop_assert!(no_policies(&error), "{}", error);
        }
    }

    #[test]
    fn a_changed_policy_file_is_refused_or_usable(edits in vec(edit(), 1..4)) {
        let mut changed = shipped_text().into_bytes();
        apply(&mut changed, &edits);
        match read_policies(&changed) {
            Err(error) => prop_assert!(no_policies(&error), "{}", error),
            Ok(file) => usable(&file),
        }
    }

    /// Well-formed texts of the right fields with other values.
    #[test]
    fn other_values_are_refused_or_usable(changes in vec((any::<Index>(), other()), 1..3)) {
        let mut text = shipped_text();
        for (at, other) in &changes {
            // What stands behind one of the signs of equality, up to the next separator.
            let places: Vec<usize> = text.match_indices(" = ").map(|(at, _)| at).collect();
            if places.is_empty() {
                break;
            }
            let name_end = places[at.index(places.len())];
            let name = text[..name_end].rsplit([' ', '\n']).next().unwrap_or_default();
            let value = other.of(name).to_owned();
            let start = name_end + 3;
            let end = start + text[start..].find([',', '\n', '}']).unwrap_or(text.len() - start);
            text.replace_range(start..end, &value);
        }
        match read_policies(text.as_bytes()) {
            Err(error) => prop_assert!(no_policies(&error), "{}", error),
            Ok(file) => usable(&file),
        }
    }
}

/// Values for any field, most of the kind that the field has.
#[derive(Clone, Debug)]
struct Other {
    any: Option<String>,
    number: String,
    time: String,
    mode: String,
    word: String,
}

impl Other {
    fn of(&self, field: &str) -> &str {
        if let Some(any) = &self.any {
            return any;
        }
        match field {
            "microseconds" => &self.time,
            "mode" => &self.mode,
            "device" | "arch" | "date" | "kind" | "early_reads" => &self.word,
            _ => &self.number,
        }
    }
}

fn other() -> impl Strategy<Value = Other> {
    let time = prop_oneof![
        any::<f64>().prop_map(|x| format!("{x:?}")),
        (-10.0..1000.0f64).prop_map(|x| format!("{x:?}")),
        select(vec![
            "nan", "-nan", "inf", "-inf", "0", "-0.0", "1e999", "5"
        ])
        .prop_map(String::from),
    ];
    let two_to = |bits: u32| (0..bits).prop_map(|bit| 1u32 << bit);
    let gate = select(vec!["block", "cluster", "grid"]);
    let mode = (two_to(5), two_to(12), two_to(7), gate, any::<bool>()).prop_map(
        |(split, threads, lanes, gate, hints)| {
            let hints = if hints { "-hints" } else { "" };
            format!("\"split{split}-{threads}x{lanes}-{gate}{hints}\"")
        },
    );
    let words = vec![
        "\"sm_80\"",
        "\"sm_100a\"",
        "\"verify\"",
        "\"decode\"",
        "\"caches\"",
        "\"2026-02-31\"",
        "\"NVIDIA \\u0007\\n\"",
        "\"\\u202E\"",
    ];
    (
        prop::option::weighted(0.3, toml_value()),
        prop_oneof![number(), 0..20u64].prop_map(|n| n.to_string()),
        time,
        mode,
        select(words).prop_map(String::from),
    )
        .prop_map(|(any, number, time, mode, word)| Other {
            any,
            number,
            time,
            mode,
            word,
        })
}

/// The texts that cost a reader most: deep, wide, and long, up to the largest file and beyond.
#[test]
fn no_policy_file_exhausts_stack_or_memory() {
    const MOST: usize = 256 << 10;
    let repeated = |before: &str, part: &str, after: &str| {
        let count = (MOST - before.len() - after.len()) / part.len();
        format!("{before}{}{after}", part.repeat(count))
    };
    let numbered = |line: &dyn Fn(usize) -> String| {
        let mut text = String::new();
        for i in 0.. {
            let line = line(i);
            if text.len() + line.len() > MOST {
                break;
            }
            text += &line;
        }
        text
    };
    let levels = |count: usize| "a.".repeat(count);
    let texts = [
        ("lists", repeated("entries = ", "[", "")),
        (
            "closed lists",
            format!("entries = {}{}", "[".repeat(5000), "]".repeat(5000)),
        ),
        ("tables", repeated("entries = ", "{a=", "")),
        ("dotted keys", repeated("", "a.", "a = 1")),
        ("dotted headers", repeated("[", "a.", "a]")),
        (
            "dotted keys in a table",
            repeated("entries = {", "a.", "a = 1}"),
        ),
        ("dots", repeated("", ".", "")),
        ("keys", numbered(&|i| format!("k{i:x}=1\n"))),
        (
            "deep keys",
            numbered(&|i| format!("k{i:x}.{}a=1\n", levels(70))),
        ),
        (
            "deep headers",
            numbered(&|i| format!("[k{i:x}.{}a]\n", levels(70))),
        ),
        (
            "deep tables",
            repeated("entries = [", "{a.a.a.a.a.a.a.a.a.a.a=1},", "1]"),
        ),
        ("shallow tables", repeated("entries = [", "{a.a=1},", "1]")),
        ("lists of tables", repeated("", "[[entries]]\n", "")),
        ("numbers", repeated("entries = [", "1,", "1]")),
        ("one number", repeated("date = ", "9", "")),
        ("one text", repeated("device = \"", "\\n", "\"")),
        ("one key", repeated("", "k", " = 1")),
        ("quotes", repeated("", "\"", "")),
        ("signs", repeated("", "=\n", "")),
        ("lines", repeated("", "\n", "")),
        ("NULs", repeated("", "\0", "")),
        (
            "entries",
            numbered(&|i| match i {
                0 => "device = \"G\"\narch = \"sm_80\"\ndate = \"2026-12-02\"\n".into(),
                i => format!("[[entries]]\nheads = 1\nmax_requests = {i}\n"),
            }),
        ),
    ];
    for (name, text) in texts {
        assert!(text.len() <= MOST, "{name}");
        let error = read_policies(text.as_bytes()).expect_err(name);
        assert!(no_policies(&error), "{name}: {error}");
        // Whatever it is, one byte more than allowed is not looked into.
        let large = format!("{text}{}", " ".repeat(MOST + 1 - text.len()));
        let (result, most) = measured(|| large.parse::<PolicyFile>());
        assert!(result.is_err() && most < 4096, "{name}: {most} bytes");
    }
    // A file of a gigabyte is not read whole, a pipe not waited for.
    let folder = scratch();
    let path = folder.path().join("large.toml");
    fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    let (result, most) = measured(|| PolicyFile::from_path(&path));
    let error = result.expect_err("too large");
    assert!(
        matches!(error, Error::PolicyFileUnreadable { .. }) && most < 2 << 20,
        "{error}"
    );
}

// ---- the disk cache

/// A cache that holds the first kernel, and the folder of that kernel.
fn cache_of_one(folder: &TempDir) -> (DiskCache, PathBuf) {
    let cache = DiskCache::at(folder.path());
    cache.store(&kernels()[0]).unwrap();
    let entry = fs::read_dir(folder.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    (cache, entry.path())
}

/// Whatever lies in the cache, a kernel that it gives is the one asked for.
fn loads_nothing_else(cache: &DiskCache, version: Option<(i32, i32)>) -> Option<Kernel> {
    let [spec, other] = specs();
    let found = cache.load(&spec, version).unwrap();
    if let Some(found) = &found {
        assert!(same_code(found, &kernels()[0]));
        assert_eq!(found.origin, Origin::Cache);
    }
    assert!(cache.load(&other, version).unwrap().is_none());
    found
}

#[test]
fn a_changed_cache_entry_is_a_miss() {
    let folder = scratch();
    let (cache, entry) = cache_of_one(&folder);
    let file = entry.join("13.0.kernel");
    let whole = fs::read(&file).unwrap();
    let (hits, misses) = (Cell::new(0), Cell::new(0));
    proptest!(property_config(512), |(edits in vec(edit(), 1..4))| {
        let mut changed = whole.clone();
        apply(&mut changed, &edits);
        fs::write(&file, &changed).unwrap();
        let found = loads_nothing_else(&cache, None);
        prop_assert_eq!(found.is_some(), changed == whole);
        // What is no kernel does not stay.
        prop_assert_eq!(file.exists(), changed == whole);
        let counted = if changed == whole { &hits } else { &misses };
        counted.set(counted.get() + 1);
    });
    assert!(misses.get() > 400, "{hits:?} hits, {misses:?} misses");
}

#[test]
fn a_foreign_cache_entry_is_a_miss() {
    let folder = scratch();
    let (cache, entry) = cache_of_one(&folder);
    let file = entry.join("13.0.kernel");
    let whole = fs::read(&file).unwrap();
    let names = prop_oneof![
        (0..20i32, 0..20i32).prop_map(|(major, minor)| format!("{major}.{minor}.kernel")),
        "[0-9.+-]{0,12}\\.kernel",
        "[a-z0-9]{1,8}",
    ];
    let bytes = prop_oneof![
        // Whole files of another kernel, of another version, and of several.
        Just(encode_bundle(&kernels()[1..]).unwrap()),
        Just(
            encode_bundle(&[Kernel::new(&specs()[0], vec![9; 60], (14, 1), None).unwrap()])
                .unwrap()
        ),
        vec(any::<u8>(), 0..200),
        Just(Vec::new()),
    ];
    proptest!(property_config(256), |(planted in vec((names, bytes), 1..4))| {
        fs::write(&file, &whole).unwrap();
        let mut written = Vec::new();
        for (name, bytes) in &planted {
            // A whole kernel under its own version's name is no foreign one.
            if name != "14.1.kernel" {
                fs::write(entry.join(name), bytes).unwrap();
                written.push(name);
            }
        }
        let overwritten = written.iter().any(|name| *name == "13.0.kernel");
        let found = loads_nothing_else(&cache, None);
        prop_assert_eq!(found.is_some(), !overwritten);
        prop_assert_eq!(loads_nothing_else(&cache, Some((13, 0))).is_some(), !overwritten);
        for name in written {
            let _ = fs::remove_file(entry.join(name));
        }
    });
}

/// Opening a pipe without a writer waits for ever; a link may lead anywhere.
#[cfg(unix)]
#[test]
fn an_entry_that_is_no_file_is_a_miss() {
    use std::os::unix::fs::symlink;
    let folder = scratch();
    let (cache, entry) = cache_of_one(&folder);
    let file = entry.join("13.0.kernel");
    type Make<'a> = &'a dyn Fn();
    let makes: [(&str, Make<'_>); 4] = [
        ("pipe", &|| {
            let made = std::process::Command::new("mkfifo").arg(&file).status();
            assert!(made.unwrap().success());
        }),
        ("device", &|| symlink("/dev/zero", &file).unwrap()),
        ("loop", &|| symlink(&file, &file).unwrap()),
        ("dangling", &|| symlink("/nowhere/at/all", &file).unwrap()),
    ];
    for (name, make) in makes {
        let _ = fs::remove_file(&file);
        make();
        // On a thread of its own: what waits for a pipe's writer fails and does not hang.
        let (sender, receiver) = mpsc::channel();
        let cache = cache.clone();
        thread::spawn(move || {
            let (found, most) = measured(|| loads_nothing_else(&cache, None));
            let _ = sender.send((found.is_none(), most));
        });
        let (missed, most) = receiver.recv_timeout(Duration::from_secs(60)).expect(name);
        assert!(missed, "{name}");
        assert!(most < 4 << 20, "{name}: {most} bytes");
    }
    // And a file of a gigabyte, which is no kernel, is not read whole.
    let _ = fs::remove_file(&file);
    fs::File::create(&file).unwrap().set_len(1 << 30).unwrap();
    let (found, most) = measured(|| loads_nothing_else(&cache, None));
    assert!(found.is_none());
    assert!(most < 200 << 20, "{most} bytes");
}

// ---- the C interface

/// Settings and policies as C would pass them: any number in any field.
#[derive(Clone, Debug)]
struct Settings {
    arch: Option<CString>,
    config: KdaConfig,
    policies: Vec<(usize, usize, Option<CString>)>,
    bundle: Vec<u8>,
    no_nvrtc: u32,
    policy_text: Option<CString>,
    /// Which pointers are NULL.
    null: [bool; 4],
}

fn small_or_any() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0..2u32, 1 => 2..5u32, 1 => any::<u32>()]
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0..20usize, 1 => number().prop_map(|n| n as usize)]
}

fn text(usual: Vec<&'static str>) -> impl Strategy<Value = Option<CString>> {
    prop_oneof![
        6 => select(usual).prop_map(|text| CString::new(text).ok()),
        1 => vec(1..=255u8, 0..40).prop_map(|bytes| CString::new(bytes).ok()),
        1 => Just(None),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    let float = || prop_oneof![3 => Just(-5.0f32), 1 => any::<f32>(), 1 => Just(f32::NAN)];
    let choices = [(); 9].map(|()| small_or_any());
    let config = (size(), choices, float(), float(), float()).prop_map(
        |(
            heads,
            [
                bias,
                layout,
                gate,
                input,
                null,
                state,
                rollback,
                ragged,
                early,
            ],
            lower_bound,
            scale,
            eps,
        )| {
            KdaConfig {
                heads,
                conv_bias: bias,
                conv_layout: layout,
                gate,
                lower_bound,
                gate_input: input,
                null_rule: null,
                state_dtype: state,
                rollback,
                ragged,
                early_reads: early,
                scale,
                eps,
            }
        },
    );
    let modes = vec![
        "split1-256x8-block",
        "split8-128x8-cluster",
        "split2-256x8-cluster-hints",
        "split2-256x8-block",
        "split3-256x8-block",
        "split1-99999999999x8-block",
        "split--block",
    ];
    (
        text(vec!["sm_90a", "sm_80", "sm_100a", "sm_91"]),
        config,
        vec((size(), size(), text(modes)), 0..4),
        prop_oneof![Just(Vec::new()), vec(any::<u8>(), 1..100)],
        prop_oneof![4 => Just(1u32), 1 => 2..9u32],
        prop_oneof![
            2 => Just(None),
            1 => Just(CString::new(shipped_text()).ok()),
            1 => vec(1..=255u8, 0..200).prop_map(|bytes| CString::new(bytes).ok()),
        ],
        [(); 4].map(|()| prop::bool::weighted(0.1)),
    )
        .prop_map(
            |(arch, config, policies, bundle, no_nvrtc, policy_text, null)| Settings {
                arch,
                config,
                policies,
                bundle,
                no_nvrtc,
                policy_text,
                null,
            },
        )
}

fn last_error() -> String {
    // SAFETY: never NULL, and this thread makes no call meanwhile.
    let text = unsafe { CStr::from_ptr(kda_last_error()) };
    text.to_str().expect("UTF-8").to_owned()
}

fn or_null<T>(value: &T, null: bool) -> *const T {
    if null { ptr::null() } else { value }
}

proptest! {
    #![proptest_config(property_config(1024))]

    #[test]
    fn random_settings_never_panic(settings in settings()) {
        let policies: Vec<KdaPolicy> = settings
            .policies
            .iter()
            .map(|(verify_tokens, max_requests, mode)| KdaPolicy {
                verify_tokens: *verify_tokens,
                max_requests: *max_requests,
                mode: mode.as_ref().map_or(ptr::null(), |mode| mode.as_ptr()),
            })
            .collect();
        let sources = KdaSources {
            bundle_path: ptr::null(),
            bundle_data: match settings.bundle.is_empty() {
                true => ptr::null(),
                false => settings.bundle.as_ptr().cast(),
            },
            bundle_bytes: settings.bundle.len(),
            cache_folder: c"off".as_ptr(),
            nvrtc_folder: ptr::null(),
            no_nvrtc: settings.no_nvrtc,
            policy_path: ptr::null(),
            policy_text: settings.policy_text.as_ref().map_or(ptr::null(), |text| text.as_ptr()),
        };
        let untouched = ptr::dangling_mut::<KdaPlan>();
        let mut plan = untouched;
        let arch: *const c_char = settings.arch.as_ref().map_or(ptr::null(), |arch| arch.as_ptr());
        let policies_or_null = if settings.null[1] { ptr::null() } else { policies.as_ptr() };
        // SAFETY: every pointer is NULL or valid for the call, with valid texts and lengths.
        let (status, most) = measured(|| unsafe {
            kda_plan_create(
                arch,
                or_null(&settings.config, settings.null[0]),
                policies_or_null,
                policies.len(),
                &sources,
                if settings.null[3] { ptr::null_mut() } else { &mut plan },
            )
        });
        prop_assert_ne!(status, KdaStatus::Panic, "{}", last_error());
        prop_assert!(most < 8 << 20, "{} bytes held", most);
        if status == KdaStatus::Ok {
            // Without a bundle and NVRTC there is no kernel, and so no plan but an empty one.
            prop_assert!(policies.is_empty() && !settings.null[1]);
            prop_assert_ne!(plan, untouched);
            // SAFETY: the plan was just made.
            unsafe { kda_plan_destroy(plan) };
        } else {
            prop_assert_eq!(plan, untouched);
            prop_assert!(!last_error().is_empty());
        }
    }
}

const HEADS: usize = 2;
const DIM: usize = 128 * HEADS;
const TOKENS: usize = 3;

/// A plan with a decode kernel and a verify kernel of [`TOKENS`] tokens; `all`: ragged, with records
/// and a projected gate.
struct OwnedPlan(*mut KdaPlan);

impl OwnedPlan {
    fn new(all: bool) -> OwnedPlan {
        let mut decode = KernelSpec::new(Arch::Sm90a, HEADS);
        if all {
            decode.gate_input = GateInput::Projected;
        }
        let mut verify = decode.with_verify(TOKENS);
        if all {
            (verify.ragged, verify.rollback) = (true, Rollback::Records);
        }
        let kernels = [decode, verify].map(|spec| {
            let cubin = vec![7; 60];
            Kernel::new(&spec, cubin, (13, 0), Some(Resources::default())).unwrap()
        });
        let bundle = encode_bundle(&kernels).unwrap();
        let mut config = KdaConfig::default();
        let policy = |verify_tokens| KdaPolicy {
            verify_tokens,
            max_requests: 1000,
            mode: c"split1-256x8-block".as_ptr(),
        };
        let sources = KdaSources {
            bundle_path: ptr::null(),
            bundle_data: bundle.as_ptr().cast(),
            bundle_bytes: bundle.len(),
            cache_folder: c"off".as_ptr(),
            nvrtc_folder: ptr::null(),
            no_nvrtc: 1,
            policy_path: ptr::null(),
            policy_text: ptr::null(),
        };
        let policies = [policy(0), policy(TOKENS)];
        let mut plan = ptr::null_mut();
        // SAFETY: every pointer is valid for the calls, with valid texts and lengths.
        let status = unsafe {
            assert_eq!(kda_config_kimi_k3(HEADS, &mut config), KdaStatus::Ok);
            config.gate_input = u32::from(all);
            config.ragged = u32::from(all);
            config.rollback = u32::from(all);
            kda_plan_create(
                c"sm_90a".as_ptr(),
                &config,
                policies.as_ptr(),
                2,
                &sources,
                &mut plan,
            )
        };
        assert_eq!(status, KdaStatus::Ok, "{}", last_error());
        OwnedPlan(plan)
    }

    fn step(&self, step: &KdaStep) -> (KdaStatus, KdaLaunch) {
        let mut launch = KdaLaunch::default();
        // SAFETY: the plan is live, the others are locals; the step's addresses are not used.
        let status = unsafe { kda_plan_step(self.0, step, &mut launch) };
        (status, launch)
    }
}

impl Drop for OwnedPlan {
    fn drop(&mut self) {
        // SAFETY: made by the library and not destroyed yet.
        unsafe { kda_plan_destroy(self.0) };
    }
}

/// A step that is right, with every operand just long enough.
fn right_step(
    all: bool,
    verify: bool,
    requests: usize,
    columns: usize,
    pool_slots: usize,
) -> KdaStep {
    let tokens = if verify { TOKENS } else { 1 };
    let rows = requests * tokens;
    // Of the slot table, or one more than the records.
    let columns = columns.max(tokens);
    let with_records = all && verify;
    let conv_length = if verify { 3 + columns - 1 } else { 3 };
    let mut next = 1u64 << 20;
    let mut buffer = |elements: usize, bytes: usize| {
        let address = next;
        next = (next + (elements * bytes) as u64).next_multiple_of(256) + 256;
        KdaBuffer { address, elements }
    };
    let mut rows_of = |count: usize, width: usize, bytes: usize| KdaRows {
        buffer: buffer(count * width, bytes),
        stride: width as i64,
    };
    KdaStep {
        verify_tokens: if verify { TOKENS } else { 0 },
        requests,
        qkv: rows_of(rows, 3 * DIM, 2),
        output_gate: rows_of(rows, DIM, 2),
        f_a: match all {
            true => KdaRows::default(),
            false => rows_of(rows, 128, 2),
        },
        gate_input: match all {
            true => rows_of(rows, DIM, 2),
            false => KdaRows::default(),
        },
        beta: rows_of(rows, HEADS, 2),
        conv_cache: rows_of(pool_slots, 3 * DIM * conv_length, 2),
        conv_length,
        state: rows_of(pool_slots, DIM * 128, 4),
        state_source: KdaRows::default(),
        pool_slots,
        slots: rows_of(requests, if with_records { 1 } else { columns }, 4),
        slot_columns: if with_records { 1 } else { columns },
        records: match with_records {
            true => rows_of(pool_slots, 3 * (columns - 1) * DIM, 4),
            false => KdaRows::default(),
        },
        record_count: if with_records { columns - 1 } else { 0 },
        out: rows_of(rows, DIM, 2),
        conv_weight: buffer(12 * DIM, 4),
        conv_bias: KdaBuffer::default(),
        f_b: match all {
            true => KdaBuffer::default(),
            false => buffer(DIM * 128, 2),
        },
        a_log: buffer(HEADS, 4),
        dt_bias: buffer(DIM, 4),
        norm: buffer(128, 4),
        accepted: if verify {
            buffer(requests, 4)
        } else {
            KdaBuffer::default()
        },
        token_counts: match with_records {
            true => buffer(requests, 4),
            false => KdaBuffer::default(),
        },
    }
}

/// Whether every operand is there, aligned and holds what the launch reads, in arithmetic that
/// cannot overflow.
fn holds(all: bool, step: &KdaStep) -> bool {
    let verify = step.verify_tokens > 0;
    let with_records = all && verify;
    let tokens = step.verify_tokens.max(1) as u128;
    let rows = step.requests as u128 * tokens;
    let (columns, length) = (step.slot_columns as u128, step.conv_length as u128);
    let (slots, dim) = (step.pool_slots as u128, DIM as u128);
    let buffer = |b: &KdaBuffer, needed: u128, alignment: u64| {
        b.address != 0 && b.address.is_multiple_of(alignment) && b.elements as u128 >= needed
    };
    let strided = |r: &KdaRows, count: u128, width: u128, alignment: u64| {
        let Ok(stride) = u128::try_from(r.stride) else {
            return false;
        };
        let needed = if count == 0 {
            0
        } else {
            (count - 1) * stride + width
        };
        stride >= width && buffer(&r.buffer, needed, alignment)
    };
    let state = |r: &KdaRows| strided(r, slots, dim * 128, 16) && r.stride % 4 == 0;
    let count = step.record_count as u128;
    let offsets = match (verify, with_records) {
        (_, true) => count + 1,
        (true, false) => columns,
        (false, false) => 1,
    };
    let table = if with_records { 1 } else { offsets };
    let gate = match all {
        true => {
            strided(&step.gate_input, rows, dim, 2)
                && step.f_a.buffer.address == 0
                && step.f_b.address == 0
        }
        false => {
            strided(&step.f_a, rows, 128, 2)
                && buffer(&step.f_b, dim * 128, 16)
                && step.gate_input.buffer.address == 0
        }
    };
    let kept = match with_records {
        true => {
            strided(&step.records, slots, 3 * count * dim, 16)
                && step.records.stride % 4 == 0
                && count + 1 >= tokens
                && count < i32::MAX as u128
                && buffer(&step.token_counts, step.requests as u128, 4)
        }
        false => step.records.buffer.address == 0 && step.token_counts.address == 0,
    };
    gate && kept
        && strided(&step.qkv, rows, 3 * dim, 2)
        && strided(&step.output_gate, rows, dim, 2)
        && strided(&step.beta, rows, HEADS as u128, 2)
        && strided(&step.out, rows, dim, 2)
        && strided(&step.conv_cache, slots, 3 * dim * length, 2)
        && state(&step.state)
        && (step.state_source.buffer.address == 0 || state(&step.state_source))
        && strided(&step.slots, step.requests as u128, table, 4)
        && buffer(&step.conv_weight, 12 * dim, 4)
        && step.conv_bias.address == 0
        && buffer(&step.a_log, HEADS as u128, 4)
        && buffer(&step.dt_bias, dim, 4)
        && buffer(&step.norm, 128, 4)
        && (step.accepted.address != 0) == verify
        && (!verify || buffer(&step.accepted, step.requests as u128, 4))
        && columns >= if with_records { 1 } else { tokens }
        && length >= 3 + offsets - 1
        && [slots, columns, length]
            .iter()
            .all(|&n| n <= i32::MAX as u128)
}

/// Every number of a step, by position.
fn fields(step: &mut KdaStep) -> Vec<Field<'_>> {
    let mut all = Vec::new();
    let KdaStep {
        verify_tokens,
        requests,
        qkv,
        output_gate,
        f_a,
        gate_input,
        beta,
        conv_weight,
        conv_bias,
        f_b,
        a_log,
        dt_bias,
        norm,
        conv_cache,
        conv_length,
        state,
        state_source,
        pool_slots,
        slots,
        slot_columns,
        accepted,
        token_counts,
        records,
        record_count,
        out,
    } = step;
    for size in [
        record_count,
        verify_tokens,
        requests,
        conv_length,
        pool_slots,
        slot_columns,
    ] {
        all.push(Field::Size(size));
    }
    for rows in [
        qkv,
        output_gate,
        f_a,
        gate_input,
        beta,
        conv_cache,
        state,
        state_source,
        slots,
        records,
        out,
    ] {
        all.push(Field::Stride(&mut rows.stride));
        all.push(Field::Address(&mut rows.buffer.address));
        all.push(Field::Size(&mut rows.buffer.elements));
    }
    for buffer in [
        conv_weight,
        conv_bias,
        f_b,
        a_log,
        dt_bias,
        norm,
        accepted,
        token_counts,
    ] {
        all.push(Field::Address(&mut buffer.address));
        all.push(Field::Size(&mut buffer.elements));
    }
    all
}

enum Field<'a> {
    Size(&'a mut usize),
    Stride(&'a mut i64),
    Address(&'a mut u64),
}

#[test]
fn random_steps_are_refused_unless_every_operand_holds() {
    let plans = [false, true].map(OwnedPlan::new);
    let (accepted, refused) = (Cell::new(0), Cell::new(0));
    let change = (
        any::<Index>(),
        prop_oneof![Just(None), number().prop_map(Some)],
        -3..=3i64,
    );
    proptest!(property_config(8192), |(
        (all, verify) in any::<(bool, bool)>(),
        (requests, columns, pool_slots) in (0..5usize, 1..6usize, 0..6usize),
        changes in vec(change, 0..4),
    )| {
        let mut step = right_step(all, verify, requests, columns, pool_slots);
        for (at, number, off) in changes {
            let mut fields = fields(&mut step);
            let at = at.index(fields.len());
            // Another number altogether, or one a little off.
            match &mut fields[at] {
                Field::Size(size) => **size = number.map_or(size.wrapping_add_signed(off as isize), |n| n as usize),
                Field::Stride(stride) => **stride = number.map_or(stride.wrapping_add(off), |n| n as i64),
                Field::Address(address) => **address = number.unwrap_or(address.wrapping_add_signed(off)),
            }
        }
        let (status, launch) = plans[usize::from(all)].step(&step);
        prop_assert_ne!(status, KdaStatus::Panic, "{}", last_error());
        if status != KdaStatus::Ok {
            refused.set(refused.get() + 1);
            prop_assert_eq!(launch.grid, [0; 3]);
            prop_assert!(!last_error().is_empty());
        } else if step.requests == 0 {
            prop_assert_eq!(launch.grid, [0; 3]);
        } else {
            accepted.set(accepted.get() + 1);
            prop_assert!(holds(all, &step), "{:?}", step);
            prop_assert!([0, TOKENS].contains(&step.verify_tokens) && step.requests <= 1000);
            prop_assert_eq!(launch.grid, [HEADS as u32, step.requests as u32, 1]);
        }
    });
    assert!(
        accepted.get() > 1000 && refused.get() > 1000,
        "{accepted:?} accepted, {refused:?} refused"
    );
}
