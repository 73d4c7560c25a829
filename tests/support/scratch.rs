//! Folders of tests. Knows nothing of what lies in them.

use tempfile::TempDir;

/// An empty folder beside the test's executable, where what is built may run; removed when dropped.
///
/// # Panics
///
/// If it cannot be created.
pub fn scratch() -> TempDir {
    let executable = std::env::current_exe().expect("a path");
    let beside = executable.parent().expect("a folder");
    tempfile::Builder::new()
        .prefix("kda-test-")
        .tempdir_in(beside)
        .expect("a folder that can be written")
}
