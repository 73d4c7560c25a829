//! The Python package: its own tests, run by `python3` on the extension built with this test, without
//! a driver and on the emulated one. Nothing is installed.

#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use kda_tests::cuda::put_emulated_driver;
use kda_tests::kernels::load_nvrtc;
use kda_tests::scratch;
use tempfile::TempDir;

// The extension and the emulated driver are dependencies that no test names, so that they are built
// and not linked: the extension needs Python's symbols.

/// A folder laid out as the wheel, and one with the emulated driver.
struct Site {
    folder: TempDir,
}

impl Site {
    fn new() -> Site {
        let folder = scratch();
        let executable = std::env::current_exe().unwrap();
        let package = folder.path().join("site/prepared_kda");
        fs::create_dir_all(&package).unwrap();
        for file in fs::read_dir(crate_folder().join("python/prepared_kda")).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                fs::copy(file.path(), package.join(file.file_name())).unwrap();
            }
        }
        symlink(
            executable.with_file_name("libprepared_kda.so"),
            package.join("_native.abi3.so"),
        )
        .unwrap();
        put_emulated_driver(&executable, &folder.path().join("driver")).unwrap();
        Site { folder }
    }

    fn python(&self) -> Command {
        let mut python = Command::new("python3");
        python
            .current_dir(crate_folder().join("tests"))
            .env("PYTHONPATH", self.folder.path().join("site"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("KDA_CACHE", self.folder.path().join("cache"))
            .env_remove("LD_LIBRARY_PATH");
        // Where `load_nvrtc` put it, unless it is installed.
        let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/nvrtc");
        if std::env::var_os("KDA_NVRTC").is_none() && fetched.is_dir() {
            python.env("KDA_NVRTC", fetched);
        }
        python
    }
}

fn crate_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/python")
}

/// Runs the tests of `modules` and returns what they said.
fn unittest(python: &mut Command, modules: &[&str]) -> String {
    let ran = python
        .args(["-m", "unittest"])
        .args(modules)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{}: {said}", ran.status);
    let count = said.lines().find(|line| line.starts_with("Ran "));
    assert!(
        count.is_some_and(|line| !line.starts_with("Ran 0 ")),
        "{said}"
    );
    said
}

#[test]
fn settings_checks_kernels_and_stubs_need_no_driver() {
    load_nvrtc().unwrap();
    let site = Site::new();
    unittest(
        &mut site.python(),
        &["test_plan", "test_dropin", "test_stub"],
    );
}

#[test]
fn steps_on_the_emulated_driver_equal_the_golden_vectors() {
    load_nvrtc().unwrap();
    let site = Site::new();
    let mut python = site.python();
    python
        .env("LD_LIBRARY_PATH", site.folder.path().join("driver"))
        .env("KDA_REQUIRE_DRIVER", "1");
    let said = unittest(&mut python, &["test_driver", "test_torch"]);
    eprintln!("{}", said.lines().last().unwrap_or_default());
}
