//! The C interface: its header is the generated one, and a C program uses every function.
//! `KDA_BLESS=1` renews the header.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kda_capi::{
    KdaBuffer, KdaConfig, KdaConvLayout, KdaEarlyReads, KdaGate, KdaGateInput, KdaNullRule,
    KdaRollback, KdaRows, KdaStateDtype, KdaStep,
};
use kda_codegen::{
    Arch, ConvLayout, EarlyReads, GateInput, KernelSpec, NullRule, Rollback, StateDtype,
};
use kda_runtime::{Buffer, Config, Gate, Kernel, Plan, Policies, Step, encode_bundle};
use kda_tests::cuda::{on_device, put_emulated_driver};
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::{Buffers, Case, Limits, placed, scratch};

fn crate_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/capi")
}

/// Any thread may use a handle, as docs/embedding.md says: it compiles only if that is so.
#[test]
fn handles_may_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<kda_capi::KdaDevice>();
    shared::<kda_capi::KdaPrepared>();
    shared::<kda_capi::KdaPreparedReset>();
    shared::<kda_capi::KdaPlan>();
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
    // A field that is "A KdaX." can be written by name.
    let named = found.split("* A Kda").skip(1);
    let named: Vec<_> = named.filter_map(|rest| rest.split_once('.')).collect();
    assert!(named.len() >= 9, "{}", named.len());
    for (name, _) in named {
        let name = name.split([';', ',', ' ', '\n']).next().unwrap();
        assert!(found.contains(&format!("enum Kda{name}")), "Kda{name}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_c_program_uses_every_function() {
    let scratch = scratch();
    let folder = scratch.path();
    let decode = KernelSpec::new(Arch::Sm90a, 2);
    let mut projected = decode;
    projected.gate_input = GateInput::Projected;
    let kernels: Vec<Kernel> = [decode, decode.with_verify(2), projected]
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
    for kind in ["static", "shared"] {
        let program = build(&source, folder, kind);
        let ran = Command::new(&program)
            .arg(&bundle)
            .arg(folder.join("cache"))
            .arg(folder.join("policies.toml"))
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
}

/// Compiles a program of `tests/capi` against one of the two libraries.
#[cfg(target_os = "linux")]
fn build(source: &Path, folder: &Path, kind: &str) -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name(match kind {
        "static" => "libkda_capi.a",
        _ => "libkda_capi.so",
    });
    let program = folder.join(kind);
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(crate_folder().join("include"))
        .arg(source)
        .arg(library)
        .args(["-lpthread", "-ldl", "-lm", "-lgcc_s", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    program
}

/// A plain struct's bytes, as C has it.
fn raw<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: the value is a C struct of integers and floats; padding, if any, is only copied.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }.to_vec()
}

/// The settings as C has them.
fn c_config(config: &Config) -> KdaConfig {
    let (gate, lower_bound) = match config.gate {
        Gate::LowerBound(bound) => (KdaGate::LowerBound, bound),
        Gate::Softplus => (KdaGate::Softplus, 0.0),
    };
    KdaConfig {
        heads: config.heads,
        conv_bias: config.conv_bias.into(),
        conv_layout: match config.conv_layout {
            ConvLayout::DimFirst => KdaConvLayout::DimFirst,
            ConvLayout::TokenFirst => KdaConvLayout::TokenFirst,
        } as u32,
        gate: gate as u32,
        lower_bound,
        gate_input: match config.gate_input {
            GateInput::LowRank => KdaGateInput::LowRank,
            GateInput::Projected => KdaGateInput::Projected,
        } as u32,
        null_rule: match config.null_rule {
            NullRule::NonPositive => KdaNullRule::NonPositive,
            NullRule::Negative => KdaNullRule::Negative,
        } as u32,
        state_dtype: match config.state_dtype {
            StateDtype::F32 => KdaStateDtype::F32,
            StateDtype::Bf16 => KdaStateDtype::Bf16,
        } as u32,
        rollback: match config.rollback {
            Rollback::Checkpoints => KdaRollback::Checkpoints,
            Rollback::Records => KdaRollback::Records,
        } as u32,
        ragged: config.ragged.into(),
        early_reads: match config.early_reads {
            EarlyReads::Weights => KdaEarlyReads::Weights,
            EarlyReads::Caches => KdaEarlyReads::Caches,
        } as u32,
        scale: config.scale,
        eps: config.eps,
    }
}

/// The step as C has it.
fn c_step(step: &Step) -> KdaStep {
    let buffer = |b: Buffer| KdaBuffer {
        address: b.address,
        elements: b.elements,
    };
    let rows = |b: Buffer, stride: i64| KdaRows {
        buffer: buffer(b),
        stride,
    };
    let (p, w) = (&step.projected, &step.weights);
    KdaStep {
        verify_tokens: match step.kind.is_verify() {
            true => step.kind.tokens(),
            false => 0,
        },
        requests: step.requests,
        qkv: rows(p.qkv.buffer, p.qkv.stride),
        output_gate: rows(p.output_gate.buffer, p.output_gate.stride),
        f_a: rows(p.f_a.buffer, p.f_a.stride),
        gate_input: rows(p.gate_input.buffer, p.gate_input.stride),
        beta: rows(p.beta.buffer, p.beta.stride),
        conv_weight: buffer(w.conv),
        conv_bias: buffer(w.conv_bias.unwrap_or_default()),
        f_b: buffer(w.f_b),
        a_log: buffer(w.a_log),
        dt_bias: buffer(w.dt_bias),
        norm: buffer(w.norm),
        conv_cache: rows(step.conv_cache.buffer, step.conv_cache.slot_stride),
        conv_length: step.conv_cache.length,
        state: rows(step.state.buffer, step.state.slot_stride),
        state_source: KdaRows::default(),
        pool_slots: step.pool_slots,
        slots: rows(step.slots.buffer, step.slots.stride),
        slot_columns: step.slots.columns,
        accepted: buffer(step.accepted.unwrap_or_default()),
        token_counts: buffer(step.token_counts.unwrap_or_default()),
        records: step
            .records
            .map_or(KdaRows::default(), |r| rows(r.buffer, r.slot_stride)),
        record_count: step.records.map_or(0, |r| r.count),
        out: rows(step.out.buffer, step.out.stride),
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_c_program_decodes_and_verifies() {
    let scratch = scratch();
    let folder = scratch.path();
    let mut searched = Vec::new();
    if !on_device() {
        searched.push(folder.join("driver"));
        put_emulated_driver(&std::env::current_exe().unwrap(), &searched[0]).unwrap();
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("capi/run.c");
    let program = build(&source, folder, "shared");
    let libraries = std::env::current_exe().unwrap();
    searched.push(libraries.parent().unwrap().to_owned());
    let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    searched.extend(std::env::split_paths(&inherited));
    let kernels = KernelCache::new(load_nvrtc().unwrap());

    for (seed, tokens, projected_gate, records) in [
        (1, 1, false, false),
        (2, 3, false, false),
        (3, 1, true, false),
        (4, 3, true, false),
        (5, 3, false, true),
    ] {
        let limits = Limits {
            tokens: vec![tokens],
            projected_gates: vec![projected_gate],
            records: vec![records],
            ragged: vec![records],
            ..Limits::small().live()
        };
        // Decode steps have no accepted counts; half of the one-token cases have.
        let case = (seed..)
            .map(|seed| Case::sized(seed, &limits, 1, 2))
            .find(|case| case.verify == (tokens > 1))
            .unwrap();
        let before = Buffers::new(&case);
        let config = placed::config(&case, EarlyReads::Weights);
        let kinds = [placed::kind(&case)];
        let policies = Policies::for_device(Arch::Sm90a, &config, &kinds);
        let plan = Plan::new(Arch::Sm90a, &config, &policies).unwrap();
        let reset = KernelSpec::reset(Arch::Sm90a, config.null_rule, config.state_dtype);
        let ptx: Vec<Kernel> = plan
            .kernels()
            .iter()
            .chain([&reset])
            .map(|spec| Kernel::ptx(&kernels.kernel(spec).unwrap()).unwrap())
            .collect();
        let bundle = folder.join("kda.bundle");
        fs::write(&bundle, encode_bundle(&ptx).unwrap()).unwrap();

        // One arena; its first page stands for address 0, which is no operand.
        const PAGE: u64 = 4096;
        let mut arena = Vec::new();
        let mut starts = Vec::new();
        for (name, region) in before.regions() {
            starts.push((name, arena.len()));
            arena.extend_from_slice(&region.bytes);
            arena.resize(arena.len().next_multiple_of(256), 0);
        }
        let step = placed::step(&case, &before, |name| {
            let found = starts.iter().find(|(known, _)| *known == name).unwrap();
            found.1 as u64 + PAGE
        });
        let files = ["config", "step", "arena"].map(|name| folder.join(name));
        let c_config = c_config(&config);
        for (file, bytes) in files
            .iter()
            .zip([raw(&c_config), raw(&c_step(&step)), arena.clone()])
        {
            fs::write(file, bytes).unwrap();
        }
        let ran = Command::new(&program)
            .arg(&bundle)
            .args(&files)
            .env("LD_LIBRARY_PATH", std::env::join_paths(&searched).unwrap())
            .output()
            .unwrap();
        assert!(
            ran.status.success(),
            "{}",
            String::from_utf8_lossy(&ran.stderr)
        );
        let results = fs::read(&files[2]).unwrap();
        assert_eq!(results.len(), 2 * arena.len());
        for result in results.chunks_exact(arena.len()) {
            let mut after = before.clone();
            for ((_, region), (_, start)) in after.regions_mut().into_iter().zip(&starts) {
                let len = region.bytes.len();
                region.bytes.copy_from_slice(&result[*start..start + len]);
            }
            case.check(&before, &after, None).unwrap();
        }
    }
}
