//! `test`: everything that needs no GPU, as CI runs it.

use std::collections::HashSet;
use std::error::Error;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use clap::Args;
use kda_codegen::{Arch, GateInput, KernelSpec, StateDtype};
use kda_runtime::{Config, Gate, Plan, Policies, PolicyFile, Rollback, StepKind};

use crate::{engine, mutate, soak, validate};
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::placed;

/// Random cases in the emulator, enough to cover every dimension; `mutate` runs the same ones.
pub const CASES: u64 = 240;
/// Seed of those cases.
pub const SEED: u64 = 0x6b6461;
/// Numbers of tokens they draw from: decode steps, which engines run most, take a quarter, and 5 does
/// not fill its second chunk.
pub const TOKENS: [usize; 10] = [1, 1, 1, 1, 2, 3, 4, 5, 5, 8];
/// Specialisations they share, 0: each draws its own, as most would be compiled once anyway.
pub const SPECIALISATIONS: u64 = 0;

#[derive(Args)]
pub struct Options {
    /// Random cases in the emulator
    #[arg(long, default_value_t = CASES)]
    emulated_cases: u64,
    /// Random cases for each identity check in the emulator
    #[arg(long, default_value_t = 3)]
    emulated_identity: u64,
    /// Steps of each of two soaked worlds: a minute on two cores
    #[arg(long, default_value_t = 300)]
    soak_steps: u64,
}

/// Runs each part and stops at the first that fails.
///
/// # Errors
///
/// The part that failed.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let part = |title: &str| {
        println!("== {title}");
        Instant::now()
    };
    part("every guard of the templates is in the list of mutations");
    mutate::check()?;

    part("dependencies: licences, bans, sources");
    deny(&cargo)?;

    let started = part("format and lints");
    lint(&cargo)?;
    println!("   {:.0} s", started.elapsed().as_secs_f64());

    let started = part("unit, integration and documentation tests");
    // Tests that compile kernels must not skip for want of the library.
    load_nvrtc()?;
    let status = Command::new(&cargo)
        .args(["test", "--workspace", "--quiet"])
        .env("KDA_REQUIRE_NVRTC", "1")
        .status()?;
    if !status.success() {
        return Err("cargo test failed".into());
    }
    println!("   {:.0} s", started.elapsed().as_secs_f64());

    let started = part("every architecture and mode compiles, without spills where it matters");
    let compiled = compile()?;
    println!(
        "   {compiled} kernels, {:.0} s",
        started.elapsed().as_secs_f64()
    );

    let started = part("the kernels in the emulator");
    let mut emulated = validate::Options {
        cases: options.emulated_cases,
        identity: options.emulated_identity,
        fixtures: true,
        emulate: true,
        arch: Some(Arch::Sm90a),
        seed: SEED,
        replay: None,
        max_heads: None,
        tokens: Some(TOKENS.to_vec()),
        specialisations: SPECIALISATIONS,
        jobs: 0,
    };
    validate::run(&emulated)?;
    for &arch in Arch::ALL.iter().filter(|&&arch| arch != Arch::Sm90a) {
        emulated.arch = Some(arch);
        (emulated.cases, emulated.identity, emulated.fixtures) = (12, 1, false);
        validate::run(&emulated)?;
    }
    println!("   {:.0} s", started.elapsed().as_secs_f64());

    let started = part("a soak in the emulator");
    soak::run(&soak::Options {
        minutes: 0.0,
        steps: Some(options.soak_steps),
        emulate: true,
        arch: Arch::Sm90a,
        heads: 1,
        worlds: 2,
        lifetime: options.soak_steps.div_ceil(2),
        seed: SEED,
    })?;
    println!("   {:.0} s", started.elapsed().as_secs_f64());

    let started = part("an engine in miniature, over the emulated driver");
    engine::run()?;
    println!("   {:.0} s", started.elapsed().as_secs_f64());

    let started = part("commands for a GPU, over the emulated driver");
    device_commands()?;
    println!("   {:.0} s", started.elapsed().as_secs_f64());

    let started = part("an engine on candle: its types");
    candle(&cargo)?;
    println!("   {:.0} s", started.elapsed().as_secs_f64());
    println!("all passed");
    Ok(())
}

/// Runs the commands that otherwise only ever run on a GPU, where the engine has put the driver. `bench`
/// checks the outputs of what it launches.
fn device_commands() -> Result<(), Box<dyn Error>> {
    // Ahead of what is there: it may be where libnvrtc is found.
    let mut folders = vec![Path::new(engine::DRIVER).canonicalize()?];
    if let Some(path) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.extend(std::env::split_paths(&path));
    }
    let folders = std::env::join_paths(folders)?;
    let bench = "bench --once --batch 2 --tokens 1,3";
    for arguments in [
        format!("{bench} --heads 1 --rollback records"),
        format!("{bench} --heads 1 --gate softplus --state bf16"),
        format!("{bench} --heads 14 --mode split1-256x32-block"),
        "elementary --stride 400009".to_owned(),
    ] {
        let ended = Command::new(std::env::current_exe()?)
            .args(arguments.split(' '))
            .env("LD_LIBRARY_PATH", &folders)
            .output()?;
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.stderr);
            return Err(format!("xtask {arguments}: {said}").into());
        }
        println!("   {arguments}");
    }
    Ok(())
}

/// Runs cargo-deny where it is installed. Advisories need a network and are left to others.
fn deny(cargo: &OsStr) -> Result<(), Box<dyn Error>> {
    let version = Command::new(cargo).args(["deny", "--version"]).output()?;
    if !version.status.success() {
        println!(
            "   not checked here: cargo-deny is not installed; a test holds licences and sources"
        );
        return Ok(());
    }
    let checks = ["deny", "--offline", "check", "licenses", "bans", "sources"];
    let status = Command::new(cargo).args(checks).status()?;
    if !status.success() {
        return Err("cargo deny failed".into());
    }
    Ok(())
}

/// Checks the types of `tests/candle`, a Cargo project of its own. candle's build wants a CUDA compiler
/// for kernels that types do not depend on: a script stands in for it.
fn candle(cargo: &OsStr) -> Result<(), Box<dyn Error>> {
    if cfg!(not(unix)) {
        println!("   not checked here: the stand-in for nvcc is a shell script");
        return Ok(());
    }
    let manifest = "tests/candle/Cargo.toml";
    let cargo = |arguments: &[&str]| -> std::io::Result<ExitStatus> {
        let mut command = Command::new(cargo);
        command
            .args(arguments)
            .args(["--quiet", "--locked", "--manifest-path", manifest])
            .env("NVCC", Path::new("tests/candle/nvcc").canonicalize()?)
            .env("CUDA_COMPUTE_CAP", "90")
            .env("CUDARC_CUDA_VERSION", "13000");
        command.status()
    };
    // Some 200 packages that nothing else here needs.
    if !cargo(&["fetch"])?.success() {
        println!("   not checked here: candle cannot be fetched");
        return Ok(());
    }
    if !cargo(&["check", "--target-dir", "target/candle"])?.success() {
        return Err(format!("{manifest} does not compile").into());
    }
    Ok(())
}

/// Format and clippy's lints, each where the toolchain has it: rustup's minimal one does not.
fn lint(cargo: &OsStr) -> Result<(), Box<dyn Error>> {
    let tools: [(&str, &[&str]); 2] = [
        ("fmt", &["--all", "--check"]),
        (
            "clippy",
            &[
                "--workspace",
                "--all-targets",
                "--quiet",
                "--",
                "--deny",
                "warnings",
            ],
        ),
    ];
    for (tool, arguments) in tools {
        let present = Command::new(cargo).args([tool, "--version"]).output()?;
        if !present.status.success() {
            println!("   not checked here: the toolchain has no cargo {tool}");
            continue;
        }
        if !Command::new(cargo)
            .arg(tool)
            .args(arguments)
            .status()?
            .success()
        {
            return Err(format!("cargo {tool} complains").into());
        }
    }
    Ok(())
}

/// Compiles decode and verify kernels of every architecture and mode under test, those of the shipped
/// policy files, whose times hold what they spill, and the default policies' kernels that read weights
/// early, which must not spill: decode with the lower-bound gate on every architecture; on sm_90a with softplus, too, and verify steps of 2 to 16 tokens,
/// with both gates, with checkpoints and with records, and some of a projected gate and a bf16 state.
fn compile() -> Result<usize, Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let mut specs = Vec::new();
    for &arch in Arch::ALL {
        for &gate_input in GateInput::ALL {
            for mode in placed::modes(arch, gate_input) {
                for (heads, tokens) in [(12, 1), (3, 4), (128, 16)] {
                    let mut spec = KernelSpec::new(arch, heads).with_mode(mode);
                    spec.gate_input = gate_input;
                    if tokens > 1 {
                        spec = spec.with_verify(tokens);
                    }
                    specs.push(spec);
                }
            }
        }
    }
    for file in PolicyFile::shipped() {
        for entry in file.entries() {
            let config = Config {
                early_reads: entry.early_reads,
                ..Config::kimi_k3(entry.heads)
            };
            let policies = Policies::single(&[entry.kind], entry.mode);
            specs.extend_from_slice(Plan::new(file.arch(), &config, &policies)?.kernels());
        }
    }
    let mut shipped = Vec::new();
    let mut ship = |arch, config: &Config, kinds: &[StepKind]| -> Result<(), kda_runtime::Error> {
        let policies = Policies::for_device(arch, config, kinds);
        shipped.extend_from_slice(Plan::new(arch, config, &policies)?.kernels());
        Ok(())
    };
    let base = Config::kimi_k3(12);
    for &arch in Arch::ALL {
        for &gate_input in GateInput::ALL {
            let config = Config { gate_input, ..base };
            ship(arch, &config, &[StepKind::Decode])?;
        }
    }
    let softplus = Config {
        gate: Gate::Softplus,
        ..base
    };
    ship(Arch::Sm90a, &softplus, &[StepKind::Decode])?;
    let every: Vec<StepKind> = (2..=16).map(StepKind::Verify).collect();
    let some = [2, 4, 8, 16].map(StepKind::Verify);
    for gate in [base.gate, Gate::Softplus] {
        for rollback in [Rollback::Checkpoints, Rollback::Records] {
            for (state_dtype, gate_input, kinds) in [
                (StateDtype::F32, GateInput::LowRank, &every[..]),
                (StateDtype::F32, GateInput::Projected, &some),
                (StateDtype::Bf16, GateInput::LowRank, &some),
            ] {
                let config = Config {
                    gate,
                    rollback,
                    state_dtype,
                    gate_input,
                    ..base
                };
                ship(Arch::Sm90a, &config, kinds)?;
            }
        }
    }
    specs.extend_from_slice(&shipped);
    let mut seen = HashSet::new();
    specs.retain(|spec| seen.insert(*spec));
    kernels.compile_all(&specs);
    for spec in &specs {
        let kernel = kernels.kernel(spec)?;
        let report = kernel.resources.ok_or("ptxas printed no report")?;
        if shipped.contains(spec) && report.spill_store_bytes > 0 {
            return Err(format!("{} on {}: {report}", kernel.source.entry, spec.arch).into());
        }
    }
    Ok(specs.len())
}
