//! What the repository promises of itself: where unsafe code may stand, that each piece of it says
//! why it is sound, and that every dependency comes from crates.io under an allowed licence.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use serde_json::Value;
use spdx::{Expression, ParseMode};
use toml::Table;

/// Every file that may hold unsafe code, and what it is for.
const UNSAFE: &[(&str, &str)] = &[
    ("crates/capi/src/lib.rs", "pointers from C"),
    ("crates/codegen/src/nvrtc.rs", "calls of libnvrtc"),
    (
        "crates/emulated-driver/src/exports.rs",
        "a driver's C functions",
    ),
    (
        "crates/python/src/lib.rs",
        "the launch that Python asks for",
    ),
    (
        "crates/runtime/examples/embed.rs",
        "an engine's own CUDA calls",
    ),
    ("crates/runtime/src/device.rs", "calls of the CUDA driver"),
    ("crates/runtime/src/prepared.rs", "the launch"),
    ("crates/runtime/src/reset.rs", "the reset's launch"),
    ("crates/runtime/tests/allocation.rs", "a counting allocator"),
    ("tests/candle/src/main.rs", "an engine's own CUDA calls"),
    ("tests/capi.rs", "calls of the C interface"),
    ("tests/driver.rs", "launches over the emulated driver"),
    ("tests/engine/src/main.rs", "an engine's own CUDA calls"),
    ("tests/support/cuda.rs", "calls of the CUDA driver"),
    ("tests/support/replay.rs", "launches of the soak"),
    (
        "tests/untrusted.rs",
        "calls of the C interface, a counting allocator",
    ),
    ("xtask/src/bench/bare.rs", "launches of the bare kernels"),
    ("xtask/src/bench/layers.rs", "launches that are timed"),
    ("xtask/src/bench/timing.rs", "graphs and events"),
    ("xtask/src/launch_cost.rs", "launches that are timed"),
];

/// Lines above a piece of unsafe code among which its reason stands.
const REASON_LINES: usize = 9;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The workspace's Rust files, from its root. Hidden and build folders are none of its own.
fn rust_files() -> Vec<String> {
    fn visit(folder: &Path, root: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" && !path.is_symlink() {
                    visit(&path, root, found);
                }
            } else if name.ends_with(".rs") {
                let path = path.strip_prefix(root).unwrap();
                found.push(path.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    let mut found = Vec::new();
    visit(&root(), &root(), &mut found);
    found.sort();
    found
}

/// One use of the word, outside comments and texts.
#[derive(Debug, PartialEq, Eq)]
struct Unsafe {
    line: usize,
    /// A block or an `impl`, whose author owes a reason; else the duty is the caller's.
    owes_a_reason: bool,
}

fn unsafe_code(text: &str) -> Vec<Unsafe> {
    fn walk(tokens: TokenStream, found: &mut Vec<Unsafe>) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Group(group) => walk(group.stream(), found),
                TokenTree::Ident(word) if word == "unsafe" => found.push(Unsafe {
                    line: word.span().start().line,
                    owes_a_reason: match tokens.peek() {
                        Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Brace,
                        Some(TokenTree::Ident(next)) => *next == "impl",
                        _ => false,
                    },
                }),
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    walk(text.parse().expect("Rust"), &mut found);
    found
}

/// Whether a reason stands in the lines above, or on the line itself.
fn has_a_reason(text: &str, line: usize) -> bool {
    let lines: Vec<&str> = text.lines().take(line).collect();
    let near = &lines[line.saturating_sub(1 + REASON_LINES)..];
    near.iter().any(|line| line.contains("// SAFETY: "))
}

#[test]
fn unsafe_code_is_confined_and_gives_its_reasons() {
    let mut allowed: BTreeMap<&str, bool> = UNSAFE.iter().map(|(file, _)| (*file, false)).collect();
    assert_eq!(allowed.len(), UNSAFE.len(), "a file occurs twice");
    let files = rust_files();
    let mut strange = Vec::new();
    assert!(files.len() > 50, "{files:?}");
    for file in files {
        let text = fs::read_to_string(root().join(&file)).unwrap();
        let found = unsafe_code(&text);
        if found.is_empty() {
            continue;
        }
        let Some(used) = allowed.get_mut(file.as_str()) else {
            strange.push(format!("{file}:{}", found[0].line));
            continue;
        };
        *used = true;
        for place in found.iter().filter(|place| place.owes_a_reason) {
            let line = place.line;
            assert!(
                has_a_reason(&text, line),
                "{file}:{line} is unsafe and gives no reason"
            );
        }
    }
    assert!(
        strange.is_empty(),
        "unsafe code outside the files that may hold it: {strange:?}"
    );
    let unused: Vec<&str> = allowed
        .iter()
        .filter(|(_, used)| !**used)
        .map(|(f, _)| *f)
        .collect();
    assert!(unused.is_empty(), "no unsafe code in {unused:?}");
}

#[test]
fn unsafe_code_is_found() {
    let text = "// unsafe { }\nconst A: &str = \"unsafe { }\";\n#[unsafe(no_mangle)]\n\
                // SAFETY: a reason.\nfn b() { if c { unsafe { d() } } }\nunsafe impl E for F {}\n\
                unsafe fn g() {}\n";
    let found: Vec<_> = unsafe_code(text)
        .iter()
        .map(|u| (u.line, u.owes_a_reason))
        .collect();
    assert_eq!(found, [(3, false), (5, true), (6, true), (7, false)]);
    assert!(has_a_reason(text, 5) && !has_a_reason(text, 3));
}

/// Rust in the documentation is a piece of a file that is compiled, unless it says `ignore`.
#[test]
fn examples_in_the_documentation_are_compiled_ones() {
    let compiled: Vec<String> = [
        "crates/runtime/examples/embed.rs",
        "tests/candle/src/main.rs",
    ]
    .iter()
    .map(|file| fs::read_to_string(root().join(file)).unwrap())
    .collect();
    let mut examples = 0;
    for page in fs::read_dir(root().join("docs")).unwrap() {
        let page = page.unwrap().path();
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = fs::read_to_string(&page).unwrap();
        for block in text.split("```rust\n").skip(1) {
            let (code, _) = block.split_once("```").expect("an end");
            assert!(
                compiled.iter().any(|file| file.contains(code)),
                "{}: in no compiled file:\n{code}",
                page.display()
            );
            examples += 1;
        }
    }
    assert!(examples >= 3, "{examples}");
}

#[test]
fn every_crate_has_the_workspaces_lints() {
    let workspace: Table = fs::read_to_string(root().join("Cargo.toml"))
        .unwrap()
        .parse()
        .unwrap();
    let lints = &workspace["workspace"]["lints"];
    for (tool, lint) in [
        ("clippy", "undocumented_unsafe_blocks"),
        ("rust", "unsafe_op_in_unsafe_fn"),
    ] {
        assert_eq!(lints[tool][lint].as_str(), Some("deny"), "{lint}");
    }
    let mut members = 0;
    for package in metadata()["packages"].as_array().unwrap() {
        if package["source"].is_null() {
            let path = package["manifest_path"].as_str().unwrap();
            let manifest: Table = fs::read_to_string(path).unwrap().parse().unwrap();
            let inherits = manifest
                .get("lints")
                .and_then(|lints| lints.get("workspace"));
            assert_eq!(inherits.and_then(|is| is.as_bool()), Some(true), "{path}");
            members += 1;
        }
    }
    assert!(members >= 8, "{members}");
}

/// Every package that a build on this machine may use, development included.
fn metadata() -> Value {
    let rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .arg("-vV")
        .output()
        .unwrap();
    let rustc = String::from_utf8(rustc.stdout).unwrap();
    let host = rustc
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .unwrap();
    // The packages of other platforms may not be on this machine.
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--filter-platform",
            host,
        ])
        .current_dir(root())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The licences that `deny.toml` allows, for every crate and for some.
struct Licences {
    allowed: BTreeSet<String>,
    exceptions: BTreeMap<String, BTreeSet<String>>,
}

impl Licences {
    fn read() -> Licences {
        let deny: Table = fs::read_to_string(root().join("deny.toml"))
            .unwrap()
            .parse()
            .unwrap();
        let names = |list: &toml::Value| -> BTreeSet<String> {
            let list = list.as_array().unwrap().iter();
            list.map(|name| name.as_str().unwrap().to_owned()).collect()
        };
        let licenses = &deny["licenses"];
        let exceptions = licenses["exceptions"].as_array().unwrap().iter();
        Licences {
            allowed: names(&licenses["allow"]),
            exceptions: exceptions
                .map(|e| (e["crate"].as_str().unwrap().to_owned(), names(&e["allow"])))
                .collect(),
        }
    }

    /// Whether `name` may be used under `expression`; those that decide it go to `used`.
    fn allow(&self, name: &str, expression: &str, used: &mut BTreeSet<String>) -> bool {
        // Some packages still separate alternatives with a slash.
        let expression = Expression::parse_mode(expression, ParseMode::LAX).unwrap();
        let own = self.exceptions.get(name);
        expression.evaluate(|licence| {
            let text = licence.to_string();
            let allowed = self.allowed.contains(&text);
            let excepted = own.is_some_and(|own| own.contains(&text));
            if allowed {
                used.insert(text);
            } else if excepted {
                used.insert(format!("{name}: {text}"));
            }
            allowed || excepted
        })
    }
}

#[test]
fn every_dependency_is_from_crates_io_under_an_allowed_licence() {
    let licences = Licences::read();
    let metadata = metadata();
    let resolved: BTreeSet<&str> = metadata["resolve"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["id"].as_str().unwrap())
        .collect();
    let (mut used, mut foreign) = (BTreeSet::new(), 0);
    for package in metadata["packages"].as_array().unwrap() {
        let text = |field: &str| package[field].as_str();
        let name = text("name").unwrap();
        if !resolved.contains(text("id").unwrap()) {
            continue;
        }
        let licence = text("license").unwrap_or_else(|| panic!("{name} names no licence"));
        assert!(
            licences.allow(name, licence, &mut used),
            "{name} is under {licence}"
        );
        if let Some(source) = text("source") {
            assert_eq!(
                source, "registry+https://github.com/rust-lang/crates.io-index",
                "{name}"
            );
            foreign += 1;
        }
    }
    assert!(foreign > 50, "{foreign}");
    let unused: Vec<&String> = licences.allowed.difference(&used).collect();
    assert!(unused.is_empty(), "no dependency needs {unused:?}");
}

#[test]
fn licences_are_told_apart() {
    let licences = Licences::read();
    let allow = |name, expression| licences.allow(name, expression, &mut BTreeSet::new());
    assert!(allow("any", "MIT/Apache-2.0") && allow("any", "MIT OR GPL-3.0-only"));
    assert!(!allow("any", "MIT AND GPL-3.0-only") && !allow("any", "GPL-3.0-or-later"));
    assert!(allow("cbindgen", "MPL-2.0") && !allow("any", "MPL-2.0"));
}
