//! `gen`: writes source, PTX, cubin and a manifest for a list of specialisations.

use std::collections::HashSet;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use kda_codegen::operands::{GEOMETRY, PARAMETERS, Parameter};
use kda_codegen::{
    Arch, CompiledKernel, ConvLayout, EarlyReads, GateInput, GateKind, KernelSpec, Mode, NullRule,
    Rollback, StateDtype, source,
};
use kda_runtime::{
    Config, Gate, Kernel, KernelBundle, Kernels, Policies, StepKind, Target, encode_bundle,
};
use serde_json::{Value, json};

use kda_tests::kernels::{KernelCache, load_nvrtc};

#[derive(Args)]
pub struct Options {
    /// Architectures
    #[arg(long, value_delimiter = ',', default_value = "sm_90a")]
    arch: Vec<Arch>,
    /// Heads on the device
    #[arg(long, value_delimiter = ',', default_value = "12")]
    heads: Vec<usize>,
    /// Tokens a request: 1 is a decode step, more a verify step
    #[arg(long, value_delimiter = ',', default_value = "1")]
    tokens: Vec<usize>,
    /// With one token, the verify step too: it follows a step of which more tokens were accepted
    #[arg(long)]
    verify_one: bool,
    /// Schedules, for example split8-128x8-cluster-hints; without it the default policies' modes
    #[arg(long, value_delimiter = ',')]
    mode: Vec<Mode>,
    /// The convolution has a bias
    #[arg(long)]
    conv_bias: bool,
    /// Order inside a conv cache slot
    #[arg(long, default_value = "dim-first")]
    conv_layout: ConvLayout,
    /// Decay formula
    #[arg(long, default_value = "lower-bound")]
    gate: GateKind,
    /// What the gate's input comes from: F_B F_A in the kernel, or an operand
    #[arg(long, default_value = "low-rank")]
    gate_input: GateInput,
    /// Null slot values
    #[arg(long, default_value = "non-positive")]
    null_rule: NullRule,
    /// Element type of the state pool
    #[arg(long, default_value = "f32")]
    state_dtype: StateDtype,
    /// What verify steps keep
    #[arg(long, default_value = "checkpoints")]
    rollback: Rollback,
    /// Verify steps take a number of tokens for each request
    #[arg(long)]
    ragged: bool,
    /// What may be read before the kernel ahead has finished
    #[arg(long, default_value = "weights")]
    early_reads: EarlyReads,
    /// Folder to write to, one subfolder an architecture
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Write the cubins of every kernel into this one file, for engines to ship, and nothing else
    #[arg(long, conflicts_with_all = ["source_only", "check"])]
    bundle: Option<PathBuf>,
    /// With --bundle: PTX in place of cubins, for the emulated driver
    #[arg(long, requires = "bundle")]
    ptx: bool,
    /// With --bundle: the kernel that zeroes slots, too
    #[arg(long, requires = "bundle")]
    reset: bool,
    /// Write nothing; fail if a file is missing or differs
    #[arg(long)]
    check: bool,
    /// Render only; needs no libnvrtc
    #[arg(long)]
    source_only: bool,
}

impl Options {
    /// Tokens, and whether the step verifies.
    fn steps(&self) -> Vec<(usize, bool)> {
        let mut steps = Vec::new();
        for &tokens in &self.tokens {
            steps.push((tokens, tokens != 1));
            if tokens == 1 && self.verify_one {
                steps.push((1, true));
            }
        }
        steps
    }

    fn specs(&self) -> Vec<KernelSpec> {
        let mut specs = Vec::new();
        for &arch in &self.arch {
            for &heads in &self.heads {
                for (tokens, verify) in self.steps() {
                    let mut spec = KernelSpec::new(arch, heads);
                    if verify {
                        spec = spec.with_verify(tokens);
                        (spec.ragged, spec.rollback) = (self.ragged, self.rollback);
                    }
                    spec.conv_bias = self.conv_bias;
                    spec.conv_layout = self.conv_layout;
                    spec.gate = self.gate;
                    spec.gate_input = self.gate_input;
                    spec.null_rule = self.null_rule;
                    spec.state_dtype = self.state_dtype;
                    spec.early_reads = self.early_reads;
                    let mut modes = self.mode.clone();
                    if modes.is_empty() {
                        let kind = if spec.verify {
                            StepKind::Verify(tokens)
                        } else {
                            StepKind::Decode
                        };
                        // Whichever device of the architecture will load them.
                        for target in Target::all(arch) {
                            let config = Config {
                                early_reads: self.early_reads,
                                gate: Gate::of_kind(self.gate),
                                gate_input: self.gate_input,
                                rollback: self.rollback,
                                ..Config::kimi_k3(heads)
                            };
                            let policies = Policies::for_device(target, &config, &[kind]);
                            modes.extend(policies.0.iter().map(|policy| policy.mode));
                        }
                        let mut seen = HashSet::new();
                        modes.retain(|mode| seen.insert(*mode));
                    }
                    specs.extend(modes.into_iter().map(|mode| spec.with_mode(mode)));
                }
            }
        }
        if self.reset {
            let reset = |&arch| KernelSpec::reset(arch, self.null_rule, self.state_dtype);
            specs.extend(self.arch.iter().map(reset));
        }
        specs
    }
}

/// Writes or checks every file.
///
/// # Errors
///
/// An illegal specialisation, a kernel that does not compile, or a file that cannot be written or,
/// with `--check`, differs.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let specs = options.specs();
    for spec in &specs {
        spec.validate()?;
    }
    let kernels = if options.source_only {
        None
    } else {
        Some(KernelCache::new(load_nvrtc()?))
    };
    if let Some(kernels) = &kernels {
        kernels.compile_all(&specs);
    }
    if let (Some(path), Some(kernels)) = (&options.bundle, &kernels) {
        return bundle(path, kernels, &specs, options.ptx);
    }
    let mut files = 0;
    for spec in &specs {
        let folder = options.out.join(spec.arch.to_string());
        let rendered = source::render(spec)?;
        let stem = rendered.entry.clone();
        let mut put = |extension: &str, bytes: &[u8]| -> Result<(), Box<dyn Error>> {
            files += 1;
            write(
                &folder,
                &format!("{stem}.{extension}"),
                bytes,
                options.check,
            )
        };
        put("cu", rendered.text.as_bytes())?;
        if let Some(kernels) = &kernels {
            let kernel = kernels.kernel(spec)?;
            put("ptx", kernel.ptx.as_bytes())?;
            put("cubin", &kernel.cubin)?;
            put("json", format!("{:#}\n", manifest(&kernel)).as_bytes())?;
            let report = kernel
                .resources
                .map_or("no report".into(), |r| r.to_string());
            println!("{}/{stem}: {report}", spec.arch);
        } else {
            println!("{}/{stem}", spec.arch);
        }
    }
    let verb = if options.check {
        "unchanged"
    } else {
        "written"
    };
    println!("{files} files {verb} in {}", options.out.display());
    Ok(())
}

/// Writes the kernels of `specs` into one file, as cubins or as PTX.
///
/// # Errors
///
/// A kernel does not compile, or the file cannot be written.
pub fn bundle(
    path: &Path,
    kernels: &KernelCache,
    specs: &[KernelSpec],
    ptx: bool,
) -> Result<(), Box<dyn Error>> {
    let bytes = if ptx {
        let kernels = specs.iter().map(|spec| {
            let compiled = kernels.kernel(spec)?;
            Ok(Kernel::ptx(&compiled)?)
        });
        encode_bundle(&kernels.collect::<Result<Vec<_>, Box<dyn Error>>>()?)?
    } else {
        encode_bundle(&kernels.kernels(specs)?)?
    };
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(format!("{} names no file", path.display()).into());
    };
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    write(folder, &name.to_string_lossy(), &bytes, false)?;
    let kernels = KernelBundle::from_path(path)?.entries().count();
    println!(
        "{kernels} kernels, {} bytes written to {}",
        bytes.len(),
        path.display()
    );
    Ok(())
}

fn write(folder: &Path, name: &str, bytes: &[u8], check: bool) -> Result<(), Box<dyn Error>> {
    let path = folder.join(name);
    if check {
        let found = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        if found != bytes {
            return Err(format!("{} differs, run gen to renew it", path.display()).into());
        }
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    // Whole or not at all: a reader never sees half a file.
    let partial = folder.join(format!(".{name}.partial"));
    fs::write(&partial, bytes)
        .and_then(|()| fs::rename(&partial, &path))
        .map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(())
}

/// Everything a launcher in any language needs to know of a kernel.
pub fn manifest(kernel: &CompiledKernel) -> Value {
    let spec = &kernel.spec;
    let parameters: Vec<Value> = PARAMETERS
        .iter()
        .map(|parameter| match parameter {
            Parameter::Pointer(operand) => json!({
                "name": operand.name,
                "kind": "pointer",
                "dtype": operand.dtype.name(),
                "shape": operand.shape,
                "outer_stride": operand.stride,
                "access": operand.access.name(),
                "present": operand.presence.name(),
                "alignment_bytes": operand.alignment_bytes,
            }),
            Parameter::Scalar(name) => json!({ "name": name, "kind": "scalar", "dtype": "f32" }),
            Parameter::Geometry => json!({
                "name": "geometry",
                "kind": "struct",
                "fields": GEOMETRY
                    .iter()
                    .map(|field| json!({
                        "name": field.name,
                        "type": field.c_type,
                        "doc": field.doc,
                    }))
                    .collect::<Vec<_>>(),
            }),
        })
        .collect();
    json!({
        "entry": kernel.source.entry,
        "arch": spec.arch.to_string(),
        "heads": spec.heads,
        "tokens": spec.tokens,
        "verify": spec.verify,
        "ragged": spec.ragged,
        "rollback": spec.rollback.to_string(),
        "conv_bias": spec.conv_bias,
        "conv_layout": spec.conv_layout.to_string(),
        "gate": spec.gate.to_string(),
        "gate_input": spec.gate_input.to_string(),
        "null_rule": spec.null_rule.to_string(),
        "state_dtype": spec.state_dtype.to_string(),
        "state_layout": "value-major, keys contiguous",
        "early_reads": spec.early_reads.to_string(),
        "mode": spec.mode.to_string(),
        "grid": format!("[{}, requests, 1]", spec.mode.value_split as usize * spec.heads),
        "block": spec.mode.threads,
        "cluster": spec.mode.value_split,
        "dynamic_shared_bytes": 0,
        "programmatic_dependent_launch": spec.arch.has_clusters(),
        "resources": kernel.resources.map(|r| json!({
            "registers": r.registers,
            "spill_store_bytes": r.spill_store_bytes,
            "spill_load_bytes": r.spill_load_bytes,
            "stack_bytes": r.stack_bytes,
            "shared_bytes": r.shared_bytes,
        })),
        "options": kernel.options,
        "parameters": parameters,
    })
}
