//! The C interface: its header is the generated one, and a C program uses every function.
//! `KDA_BLESS=1` renews the header.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kda_codegen::{Arch, KernelSpec};
use kda_runtime::{Kernel, encode_bundle};

// Builds the library beside this test.
use kda_capi as _;

fn crate_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/capi")
}

#[test]
fn the_header_is_the_generated_one() {
    let folder = crate_folder();
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut generated = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(folder.join("src/lib.rs"))
        .generate()
        .unwrap()
        .write(&mut generated);
    let generated = String::from_utf8(generated).unwrap();
    let header = folder.join("include/prepared_kda.h");
    if std::env::var_os("KDA_BLESS").is_some() {
        fs::write(&header, &generated).unwrap();
    }
    let found = fs::read_to_string(&header).unwrap_or_default();
    assert!(
        found == generated,
        "{} differs, KDA_BLESS=1 renews it",
        header.display()
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_c_program_uses_every_function() {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("capi-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let decode = KernelSpec::new(Arch::Sm90a, 2);
    let kernels: Vec<Kernel> = [decode, decode.with_verify(2)]
        .iter()
        .enumerate()
        .map(|(i, spec)| Kernel::new(spec, vec![i as u8; 100 + i], (13, 0), None).unwrap())
        .collect();
    let bundle = folder.join("kda.bundle");
    fs::write(&bundle, encode_bundle(&kernels).unwrap()).unwrap();

    let libraries = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .to_owned();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("capi/plan.c");
    let text = fs::read_to_string(&source).unwrap();
    let header = fs::read_to_string(crate_folder().join("include/prepared_kda.h")).unwrap();
    let functions: Vec<&str> = header
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("kda_") && header.contains(&format!("{word}(")))
        .collect();
    assert!(functions.len() >= 18, "{functions:?}");
    for function in functions {
        assert!(
            text.contains(&format!("{function}(")),
            "{function} is not used"
        );
    }
    for (kind, library) in [("static", "libkda_capi.a"), ("shared", "libkda_capi.so")] {
        let library = libraries.join(library);
        let program = folder.join(kind);
        let compiled = Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
            .arg(crate_folder().join("include"))
            .arg(&source)
            .arg(&library)
            .args(["-lpthread", "-ldl", "-lm", "-lgcc_s", "-o"])
            .arg(&program)
            .output()
            .unwrap();
        assert!(
            compiled.status.success(),
            "{}",
            String::from_utf8_lossy(&compiled.stderr)
        );
        let ran = Command::new(&program)
            .arg(&bundle)
            .arg(folder.join("cache"))
            .env("LD_LIBRARY_PATH", &libraries)
            .output()
            .unwrap();
        assert!(
            ran.status.success(),
            "{kind}: {}",
            String::from_utf8_lossy(&ran.stderr)
        );
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(
            said.contains("grid 2 3 1\n") && said.ends_with("done\n"),
            "{kind}: {said}"
        );
    }
    fs::remove_dir_all(&folder).unwrap();
}
