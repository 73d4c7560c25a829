//! The list of cases and the tests that bear their ids. Knows no case.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Every id of `tests/cases/README.md` in order, with its essence and the tests whose names begin
/// with it, each as `file: name`.
///
/// # Errors
///
/// A file that cannot be read.
pub fn list() -> io::Result<Vec<(String, String, Vec<String>)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![];
    for folder in [
        "",
        "cases",
        "../crates/runtime/tests",
        "../crates/python/tests",
    ] {
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut tests: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(&file)?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        for test in tests_of(&text) {
            if let Some((id, _)) = test.trim_start_matches("test_").split_once('_') {
                let entry = tests.entry(id.to_uppercase()).or_default();
                entry.push(format!("{name}: {test}"));
            }
        }
    }
    let readme = fs::read_to_string(root.join("cases/README.md"))?;
    let rows = readme.lines().filter_map(|line| {
        let (id, essence) = line.strip_prefix("| C")?.split_once(" | ")?;
        let id = format!("C{id}");
        let named = tests.get(&id).cloned().unwrap_or_default();
        Some((id, essence.trim_end_matches(" |").to_owned(), named))
    });
    Ok(rows.collect())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let wanted = path.extension().is_some_and(|e| e == "rs" || e == "py");
        if wanted {
            files.push(path);
        }
    }
    Ok(())
}

/// Names of the tests in Rust or Python text, ignored ones excepted.
fn tests_of(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut marked = false;
    for line in text.lines().map(str::trim) {
        let name = |after: &'static str| {
            let rest = line.strip_prefix(after)?;
            rest.split(|c: char| !c.is_alphanumeric() && c != '_')
                .next()
        };
        if line == "#[test]" {
            marked = true;
        } else if line.starts_with("#[ignore") {
            // It holds nothing.
            marked = false;
        } else if let Some(name) = name("fn ") {
            if std::mem::take(&mut marked) {
                found.push(name);
            }
        } else if let Some(name) = name("def ").filter(|name| name.starts_with("test_")) {
            found.push(name);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::tests_of;

    #[test]
    fn only_tests_are_found() {
        let text = "fn c01_helper() {}\n#[test]\nfn c02_a() {\n#[cfg(unix)]\n#[test]\nfn c03_b() {\n\
                    #[test]\n#[ignore]\nfn c04_c() {\n    def test_c05_d(self):\ndef c06_e():";
        assert_eq!(tests_of(text), ["c02_a", "c03_b", "test_c05_d"]);
    }
}
