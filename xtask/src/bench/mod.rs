//! `bench`: times steps as a model runs them, beside what the machine allows in the same run. One
//! graph holds one launch for each layer, each layer with its own pools and weights; a read of 1 GiB
//! evicts L2 before every timed replay; times are medians over the replays, divided by the layers.
//! Outputs are checked first.
//!
//! ```text
//! timing ─ bare ─┬─ layers ─┬─ ceilings, gemm, neighbour ─▶ record ─▶ report, plot
//!  clock  kernels│  steps   │  settings                      JSON     with published
//! ```

mod bare;
mod ceilings;
mod gemm;
mod layers;
mod neighbour;
mod plot;
mod published;
pub mod record;
mod report;
mod timing;

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kda_codegen::{Arch, EarlyReads, GateKind, Mode};
use kda_runtime::{Config, Device, GateInput, Plan, Policies, PreparedKda, Rollback, StateDtype};
use kda_tests::cuda;
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::{Case, placed};

use bare::Edge;
use gemm::Gemm;
use layers::Layers;
use published::Published;
use record::{Cell, Neighbour, Record, Setting, Size};
use timing::Timer;
pub use timing::Times;

/// The sizes to time: every combination.
#[derive(Args)]
pub struct Sizes {
    /// Heads on the device
    #[arg(long, value_delimiter = ',', default_value = "12")]
    heads: Vec<usize>,
    /// Requests
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64,128,256"
    )]
    batch: Vec<usize>,
    /// Tokens a request: 1 is a decode step, more a verify step
    #[arg(long, value_delimiter = ',', default_value = "1")]
    tokens: Vec<usize>,
    /// What verify steps keep: checkpoints, records
    #[arg(long, default_value = "checkpoints")]
    rollback: Rollback,
    /// Decay formula: lower-bound, softplus
    #[arg(long, default_value = "lower-bound")]
    gate: GateKind,
    /// Where the gate comes from: low-rank, projected
    #[arg(long, default_value = "low-rank")]
    gate_input: GateInput,
    /// Elements of the state: f32, bf16
    #[arg(long, default_value = "f32")]
    state: StateDtype,
}

impl Sizes {
    /// By heads, tokens and requests, each in the order given.
    pub fn all(&self) -> Vec<Size> {
        let mut all = Vec::new();
        for &heads in &self.heads {
            for &tokens in &self.tokens {
                all.extend(self.batch.iter().map(|&requests| Size {
                    heads,
                    tokens,
                    requests,
                    records: self.rollback == Rollback::Records && tokens > 1,
                    projected_gate: self.gate_input == GateInput::Projected,
                    bf16_state: self.state == StateDtype::Bf16,
                    softplus: self.gate == GateKind::Softplus,
                }));
            }
        }
        all
    }
}

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    sizes: Sizes,
    /// Schedules, with `+early` for caches read early; `default` stands for the default policy
    #[arg(long, value_delimiter = ',', default_value = "default")]
    mode: Vec<String>,
    /// Also with a GEMM ahead of each layer: the time of the pair less that of the GEMM alone
    #[arg(long, value_delimiter = ',', num_args = 0..=1, default_missing_value = "plain", require_equals = true)]
    between_gemm: Vec<GemmLaunch>,
    /// Also the time of a kernel that reads the same 20 MB behind each step, with live and null slots
    #[arg(long)]
    neighbour: bool,
    /// Layers of the graph
    #[arg(long, default_value_t = 69)]
    layers: usize,
    /// Timed replays
    #[arg(long, default_value_t = 100)]
    replays: usize,
    /// File to append measurements to, one JSON line each
    #[arg(long)]
    out: Option<PathBuf>,
    /// Other measurements to compare with, as --out writes them
    #[arg(long)]
    against: Option<PathBuf>,
    /// SVG file to draw time against bytes of state to
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Show measurements that --out wrote instead of measuring
    #[arg(long, conflicts_with_all = ["out", "once"])]
    from: Option<PathBuf>,
    /// Launch one step of each and exit: for profilers
    #[arg(long)]
    once: bool,
}

/// How the GEMM between layers is launched.
#[derive(Clone, Copy, ValueEnum)]
enum GemmLaunch {
    Plain,
    Programmatic,
}

/// Times everything the options name.
///
/// # Errors
///
/// No GPU, a kernel that does not compile, or an output outside its bound.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let published = Published::load();
    let records = match &options.from {
        Some(path) => show(record::read(path)?, &published),
        None => measure_all(options, &published)?,
    };
    let mut drawn = records.clone();
    if let Some(path) = &options.against {
        let others = record::read(path)?;
        println!("\nagainst {}", path.display());
        print!("{}", report::against(&records, &others));
        let foreign = |cell: &&Cell| cell.implementation != record::OURS;
        drawn.extend(
            report::cells(&others)
                .filter(foreign)
                .cloned()
                .map(Record::Cell),
        );
    }
    if let Some(path) = &options.plot {
        fs::write(path, plot::svg(&drawn, &published)?)?;
    }
    Ok(())
}

/// Prints measurements of an earlier run.
fn show(records: Vec<Record>, published: &Published) -> Vec<Record> {
    println!("{}", report::HEADER);
    for record in &records {
        let line = match record {
            Record::Cell(cell) => {
                report::row(cell, report::bare_pass(&records, cell.size), published)
            }
            Record::Ceiling(ceiling) => report::ceiling(ceiling),
            Record::Neighbour(neighbour) => report::neighbour(neighbour),
        };
        println!("{line}");
    }
    records
}

fn measure_all(options: &Options, published: &Published) -> Result<Vec<Record>, Box<dyn Error>> {
    let layers = if options.once { 1 } else { options.layers };
    let bench = Bench::open(layers, options.replays)?;
    println!(
        "{}, {layers} layers, microseconds a layer",
        cuda::device_name()?
    );
    let mut records = Vec::new();
    // Written as they come: a later failure loses nothing.
    let mut keep = |new: Vec<Record>| {
        if let Some(path) = &options.out {
            record::append(path, &new)?;
        }
        records.extend(new);
        Ok::<_, Box<dyn Error>>(())
    };
    if !options.once {
        let ceilings = ceilings::of_device(&bench.timer, layers)?;
        for ceiling in &ceilings {
            println!("{}", report::ceiling(ceiling));
        }
        keep(ceilings.into_iter().map(Record::Ceiling).collect())?;
    }
    println!("{}", report::HEADER);
    for size in options.sizes.all() {
        keep(bench.size(options, size, published)?)?;
    }
    Ok(records)
}

/// A device, where its kernels come from, and a clock.
pub struct Bench {
    device: Device,
    kernels: KernelCache,
    timer: Timer,
    /// Layers of a graph.
    layers: usize,
}

impl Bench {
    /// Opens device 0.
    ///
    /// # Errors
    ///
    /// No GPU, no libnvrtc, no memory.
    pub fn open(layers: usize, replays: usize) -> Result<Bench, Box<dyn Error>> {
        let nvrtc = load_nvrtc()?;
        let kernels = KernelCache::new(nvrtc.clone());
        let device = cuda::open_device(&kernels)?;
        if cuda::is_emulated()? {
            println!("emulated driver: the times below are the emulator's and mean nothing");
        }
        let timer = Timer::new(&nvrtc, device.arch(), replays)?;
        Ok(Bench {
            device,
            kernels,
            timer,
            layers: layers.max(1),
        })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The architecture of its device.
    pub fn arch(&self) -> Arch {
        self.device.arch()
    }

    /// Times every one of `modes` that is legal at one size, its outputs checked.
    ///
    /// # Errors
    ///
    /// A kernel that does not compile, an output outside its bound, or the driver's.
    pub fn modes(
        &self,
        size: Size,
        modes: &[Mode],
        early_reads: EarlyReads,
    ) -> Result<Vec<(Mode, Times)>, Box<dyn Error>> {
        let mut layers = Layers::new(size, self.layers)?;
        let config = placed::config(&layers.case, early_reads);
        let kind = placed::kind(&layers.case);
        let (mut legal, mut specs) = (Vec::new(), Vec::new());
        for &mode in modes {
            let policies = Policies::single(&[kind], mode);
            if let Ok(plan) = Plan::new(self.arch(), &config, &policies) {
                specs.extend_from_slice(plan.kernels());
                legal.push((mode, policies));
            }
        }
        self.kernels.compile_all(&specs);
        let mut times = Vec::new();
        for (mode, policies) in legal {
            let prepared = self.prepare(&config, &policies)?;
            layers.check(self.timer.stream, &prepared, &mode.to_string())?;
            times.push((mode, self.layers_alone(&layers, &prepared)?));
        }
        Ok(times)
    }

    fn prepare(
        &self,
        config: &Config,
        policies: &Policies,
    ) -> Result<PreparedKda, kda_runtime::Error> {
        PreparedKda::prepare_caches(
            &self.device,
            self.timer.stream,
            config,
            policies,
            &self.kernels,
        )
    }

    fn layers_alone(
        &self,
        layers: &Layers,
        prepared: &PreparedKda,
    ) -> Result<Times, Box<dyn Error>> {
        self.timer.graph(layers.count(), || {
            (0..layers.count())
                .try_for_each(|layer| layers.enqueue(self.timer.stream, prepared, layer))
        })
    }

    /// Times every mode and setting of the options at one size.
    fn size(
        &self,
        options: &Options,
        size: Size,
        published: &Published,
    ) -> Result<Vec<Record>, Box<dyn Error>> {
        let timer = &self.timer;
        let mut layers = Layers::new(size, self.layers)?;
        let mut records = Vec::new();
        let mut bare = None;
        if !options.once {
            let ceiling = ceilings::in_place(timer, &layers)?;
            println!("{}", report::ceiling(&ceiling));
            bare = Some(ceiling.us);
            records.push(Record::Ceiling(ceiling));
            layers.restore()?;
        }
        for text in &options.mode {
            let (config, policies) = choose(&self.device, &layers.case, text)?;
            if let Err(error) = Plan::new(self.arch(), &config, &policies) {
                println!("  skipped: {error}");
                continue;
            }
            let prepared = self.prepare(&config, &policies)?;
            layers.check(timer.stream, &prepared, text)?;
            if options.once {
                continue;
            }
            let mode = chosen(&prepared, &layers).unwrap_or_else(|| text.clone());
            let mut cells = vec![Cell::new(
                size,
                &mode,
                self.layers_alone(&layers, &prepared)?,
            )];
            for &launch in &options.between_gemm {
                cells.push(self.between_gemm(&layers, &prepared, &mode, launch)?);
            }
            for cell in cells {
                println!("{}", report::row(&cell, bare, published));
                records.push(Record::Cell(cell));
            }
            if options.neighbour {
                let times = neighbour::measure(timer, &layers, &prepared)?;
                let neighbour = Neighbour {
                    size,
                    mode,
                    neighbour_us: times.behind_steps,
                    behind_null_us: times.behind_null_steps,
                    alone_us: times.alone,
                };
                println!("{}", report::neighbour(&neighbour));
                records.push(Record::Neighbour(neighbour));
            }
        }
        Ok(records)
    }

    /// Times a GEMM and a step for each layer, less the GEMM.
    fn between_gemm(
        &self,
        layers: &Layers,
        prepared: &PreparedKda,
        mode: &str,
        launch: GemmLaunch,
    ) -> Result<Cell, Box<dyn Error>> {
        let (edge, setting) = match launch {
            GemmLaunch::Plain => (Edge::Plain, Setting::Gemm),
            GemmLaunch::Programmatic => (Edge::Programmatic, Setting::GemmProgrammatic),
        };
        let gemm = Gemm::new(&self.timer, layers, edge)?;
        let alone = gemm.alone(&self.timer, layers)?.median;
        let pairs = gemm.pairs(&self.timer, layers, prepared)?;
        println!("  {}: {alone:.3} us alone", gemm.describe());
        let marginal = Times {
            median: pairs.median - alone,
            min: pairs.min - alone,
            p90: pairs.p90 - alone,
        };
        let mut cell = Cell::new(layers.size, mode, marginal);
        cell.setting = setting;
        cell.gemm_us = Some(alone);
        Ok(cell)
    }
}

/// The settings and policies that an option's text names.
fn choose(device: &Device, case: &Case, text: &str) -> Result<(Config, Policies), Box<dyn Error>> {
    let kind = placed::kind(case);
    let early = match text {
        "default" => EarlyReads::Weights,
        "default+early" => EarlyReads::Caches,
        _ => {
            let (mode, early) = placed::parse_mode(text)?;
            let policies = Policies::single(&[kind], mode);
            return Ok((placed::config(case, early), policies));
        }
    };
    let config = placed::config(case, early);
    let policies = Policies::for_device(device, &config, &[kind]);
    Ok((config, policies))
}

/// The mode that serves the steps of `layers`.
fn chosen(prepared: &PreparedKda, layers: &Layers) -> Option<String> {
    let planned = prepared.plan().step(layers.step(), 8).ok()??;
    let spec = prepared.plan().kernels()[planned.kernel];
    Some(mode_text(spec.mode, spec.early_reads))
}

/// A mode as options and measurements name it.
pub fn mode_text(mode: Mode, early_reads: EarlyReads) -> String {
    match early_reads {
        EarlyReads::Weights => mode.to_string(),
        EarlyReads::Caches => format!("{mode}+early"),
    }
}
