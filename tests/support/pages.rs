//! Pages of `docs/` with a part that follows from the code or from measurements.

use std::fs;
use std::path::Path;

/// Compares what stands between the marks of a page with `part`; `KDA_BLESS=1` renews it.
///
/// # Panics
///
/// When they differ, or the page has no marks.
pub fn holds(page: &str, part: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(page);
    let found = fs::read_to_string(&path).unwrap();
    let (start, end) = ("<!-- generated -->\n", "<!-- end -->\n");
    let (before, rest) = found.split_once(start).expect("a mark");
    let (_, after) = rest.split_once(end).expect("a mark");
    let expected = format!("{before}{start}{part}{end}{after}");
    if std::env::var_os("KDA_BLESS").is_some() {
        fs::write(&path, &expected).unwrap();
        return;
    }
    assert!(
        found == expected,
        "docs/{page} differs, KDA_BLESS=1 renews it"
    );
}
