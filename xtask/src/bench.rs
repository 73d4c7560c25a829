//! `bench`: times steps as a model runs them. One graph holds one launch for each of 69 layers,
//! each with its own pools and weights; a read of 1 GiB evicts L2 before every timed replay; the
//! time is the median over the replays, divided by the layers. Outputs are checked first.

use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::ptr;

use clap::Args;
use cudarc::driver::sys;
use kda_codegen::EarlyReads;
use kda_reference::{Gate, Shape, StateType};
use kda_runtime::{Config, Device, Policies, PreparedKda, Step, Stream};
use kda_tests::rng::Rng;
use kda_tests::{Buffers, Case, Limits, Regime};

use kda_tests::cuda::{self, DeviceMemory, check};
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::placed;

#[derive(Args)]
pub struct Options {
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
    /// Schedules, with `+early` for caches read early; `default` stands for the default policy
    #[arg(long, value_delimiter = ',', default_value = "default")]
    mode: Vec<String>,
    /// Layers of the graph
    #[arg(long, default_value_t = 69)]
    layers: usize,
    /// Timed replays
    #[arg(long, default_value_t = 100)]
    replays: usize,
    /// File to append one JSON line a measurement to
    #[arg(long)]
    out: Option<PathBuf>,
    /// Launch one step of each and exit: for profilers
    #[arg(long)]
    once: bool,
}

/// Times everything the options name.
///
/// # Errors
///
/// No GPU, a kernel that does not compile, or an output outside its bound.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let device = cuda::current_device()?;
    let bench = Bench::new(device, kernels)?;
    println!(
        "{}, {} layers, microseconds a layer",
        cuda::device_name()?,
        options.layers
    );
    println!("heads tokens batch   median      min      p90   GB/s  mode");
    for &heads in &options.heads {
        for &tokens in &options.tokens {
            for &requests in &options.batch {
                bench.size(options, heads, tokens, requests)?;
            }
        }
    }
    Ok(())
}

struct Bench {
    device: Device,
    kernels: KernelCache,
    stream: Stream,
    evict: sys::CUfunction,
    evicted: DeviceMemory,
}

/// One measurement.
struct Times {
    median: f64,
    min: f64,
    p90: f64,
}

impl Bench {
    fn new(device: Device, kernels: KernelCache) -> Result<Bench, Box<dyn Error>> {
        let (mut module, mut evict) = (ptr::null_mut(), ptr::null_mut());
        let ptx = concat!(include_str!("evict.ptx"), "\0");
        // SAFETY: the text is complete and ends in 0; the handles are locals.
        unsafe {
            check(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()),
            )?;
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut evict, module, c"evict".as_ptr()),
            )?;
        }
        let evicted = DeviceMemory::new(1 << 30)?;
        let bench = Bench {
            device,
            kernels,
            stream: cuda::new_stream()?,
            evict,
            evicted,
        };
        // A process that has used few streams replays graphs faster than a serving process does.
        for _ in 0..5 {
            let stream = cuda::new_stream()?;
            bench.evict(stream, 1 << 20)?;
            // SAFETY: streams live as long as the process.
            unsafe { cuda::synchronize(stream) }?;
        }
        Ok(bench)
    }

    fn evict(&self, stream: Stream, bytes: u64) -> Result<(), Box<dyn Error>> {
        let (mut base, mut bytes, mut sink) = (self.evicted.address, bytes, self.evicted.address);
        let mut parameters = [
            (&raw mut base).cast(),
            (&raw mut bytes).cast(),
            (&raw mut sink).cast(),
        ];
        // SAFETY: three 64-bit parameters as the kernel declares; it reads inside `evicted`.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.evict,
                528,
                1,
                1,
                512,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    /// Times every mode at one size.
    fn size(
        &self,
        options: &Options,
        heads: usize,
        tokens: usize,
        requests: usize,
    ) -> Result<(), Box<dyn Error>> {
        let case = case(heads, tokens, requests);
        let before = Buffers::new(&case);
        // One layer: every region that differs between layers. The projection is shared.
        let mut offsets = Vec::new();
        let mut layer_bytes = 0;
        for (name, region) in before.regions() {
            offsets.push((name, layer_bytes));
            layer_bytes += region.bytes.len().next_multiple_of(256);
        }
        let offset_of = |name: &str| {
            offsets
                .iter()
                .find(|(known, _)| *known == name)
                .expect("a region")
                .1
        };
        let layers = if options.once { 1 } else { options.layers };
        let memory = DeviceMemory::new(layer_bytes * layers)?;
        let restore = |layer: usize| -> Result<(), Box<dyn Error>> {
            for (name, region) in before.regions() {
                memory.upload(layer * layer_bytes + offset_of(name), &region.bytes)?;
            }
            Ok(())
        };
        restore(0)?;
        for layer in 1..layers {
            // SAFETY: both ranges lie in `memory`.
            check("cuMemcpyDtoD", unsafe {
                sys::cuMemcpyDtoD_v2(
                    memory.address + (layer * layer_bytes) as u64,
                    memory.address,
                    layer_bytes,
                )
            })?;
        }
        let steps: Vec<Step> = (0..layers)
            .map(|layer| {
                placed::step(&case, &before, |name| {
                    let layer = match name {
                        "projected" | "slots" | "accepted" => 0,
                        _ => layer,
                    };
                    memory.address + (layer * layer_bytes + offset_of(name)) as u64
                })
            })
            .collect();

        let mut reference: Option<Buffers> = None;
        for text in &options.mode {
            let (config, policies) = self.policies(&case, text)?;
            let config = &config;
            if self.kernels_missing(config, &policies) {
                continue;
            }
            let prepared = PreparedKda::prepare_caches(
                &self.device,
                self.stream,
                config,
                &policies,
                &self.kernels,
            )?;
            restore(0)?;
            // SAFETY: the steps' operands lie in `memory`, which outlives every launch.
            unsafe { prepared.run(self.stream, &steps[0]) }?;
            if let Some(faults) = prepared.take_faults(self.stream)? {
                return Err(format!("{text}: {faults:?}").into());
            }
            let mut after = before.clone();
            for (name, region) in after.regions_mut() {
                memory.download(offset_of(name), &mut region.bytes)?;
            }
            match &reference {
                None => {
                    case.check(&before, &after, None)?;
                    reference = Some(after);
                }
                Some(reference) => {
                    for ((name, a), (_, b)) in reference.regions().into_iter().zip(after.regions())
                    {
                        if a != b {
                            return Err(
                                format!("{text}: {name} differs from the first mode").into()
                            );
                        }
                    }
                }
            }
            if options.once {
                continue;
            }
            let times = self.time(&prepared, &steps, options.replays)?;
            let mode = prepared.kernels().iter().find(|info| {
                prepared
                    .plan()
                    .step(&steps[0], 8)
                    .ok()
                    .flatten()
                    .is_some_and(|planned| prepared.plan().kernels()[planned.kernel] == info.spec)
            });
            let mode = mode.map_or(text.clone(), |info| {
                let early = info.spec.early_reads == EarlyReads::Caches;
                format!("{}{}", info.spec.mode, if early { "+early" } else { "" })
            });
            let state = (requests * heads * (1 + tokens) * 128 * 128 * 4) as f64;
            let bandwidth = state / times.median / 1e3;
            println!(
                "{heads:5} {tokens:6} {requests:5} {:8.3} {:8.3} {:8.3} {bandwidth:6.0}  {mode}{}",
                times.median,
                times.min,
                times.p90,
                if text.starts_with("default") {
                    "  (default)"
                } else {
                    ""
                }
            );
            if let Some(path) = &options.out {
                let line = serde_json::json!({
                    "heads": heads, "tokens": tokens, "requests": requests, "mode": mode,
                    "median_us": times.median, "min_us": times.min, "p90_us": times.p90,
                    "layers": layers,
                });
                let mut file = fs::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(path)?;
                writeln!(file, "{line}")?;
            }
        }
        Ok(())
    }

    fn policies(&self, case: &Case, text: &str) -> Result<(Config, Policies), Box<dyn Error>> {
        let kind = placed::kind(case);
        if let Some(rest) = text.strip_prefix("default") {
            let early = match rest {
                "+early" => EarlyReads::Caches,
                _ => EarlyReads::Weights,
            };
            let config = placed::config(case, early);
            let policies = Policies::for_device(&self.device, config.heads, early, &[kind]);
            return Ok((config, policies));
        }
        let (mode, early) = placed::parse_mode(text)?;
        Ok((placed::config(case, early), Policies::single(&[kind], mode)))
    }

    /// Whether a mode is illegal here; said once, then skipped.
    fn kernels_missing(&self, config: &Config, policies: &Policies) -> bool {
        match kda_runtime::Plan::new(self.device.arch(), config, policies) {
            Ok(_) => false,
            Err(error) => {
                println!("  skipped: {error}");
                true
            }
        }
    }

    fn time(
        &self,
        prepared: &PreparedKda,
        steps: &[Step],
        replays: usize,
    ) -> Result<Times, Box<dyn Error>> {
        let stream = self.stream;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is ours and idle; handles are locals; steps as in `size`.
        unsafe {
            check(
                "cuStreamBeginCapture",
                sys::cuStreamBeginCapture_v2(
                    stream,
                    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                ),
            )?;
            for step in steps {
                prepared.run(stream, step)?;
            }
            check(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(stream, &mut graph),
            )?;
            check(
                "cuGraphInstantiate",
                sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0),
            )?;
        }
        let (mut start, mut stop) = (ptr::null_mut(), ptr::null_mut());
        let mut samples = Vec::new();
        // SAFETY: events, graph and stream are live until destroyed below.
        unsafe {
            check("cuEventCreate", sys::cuEventCreate(&mut start, 0))?;
            check("cuEventCreate", sys::cuEventCreate(&mut stop, 0))?;
            for replay in 0..replays + 3 {
                self.evict(stream, self.evicted.bytes as u64)?;
                check("cuEventRecord", sys::cuEventRecord(start, stream))?;
                check("cuGraphLaunch", sys::cuGraphLaunch(executable, stream))?;
                check("cuEventRecord", sys::cuEventRecord(stop, stream))?;
                cuda::synchronize(stream)?;
                let mut milliseconds = 0.0f32;
                check(
                    "cuEventElapsedTime",
                    sys::cuEventElapsedTime_v2(&mut milliseconds, start, stop),
                )?;
                if replay >= 3 {
                    samples.push(f64::from(milliseconds) * 1e3 / steps.len() as f64);
                }
            }
            let _ = sys::cuEventDestroy_v2(start);
            let _ = sys::cuEventDestroy_v2(stop);
            let _ = sys::cuGraphExecDestroy(executable);
            let _ = sys::cuGraphDestroy(graph);
        }
        samples.sort_by(f64::total_cmp);
        Ok(Times {
            median: samples[samples.len() / 2],
            min: samples[0],
            p90: samples[samples.len() * 9 / 10],
        })
    }
}

/// A live batch of one size: tight strides, slots a random permutation, random accepted counts.
fn case(heads: usize, tokens: usize, requests: usize) -> Case {
    let gate = Gate::LowerBound { lower_bound: -5.0 };
    let limits = Limits {
        max_heads: heads,
        max_requests: requests,
        tokens: vec![tokens],
        gates: vec![gate],
        state_types: vec![StateType::F32],
        biases: vec![false],
        regimes: vec![Regime::Plain],
        max_pool_bytes: usize::MAX,
        ..Limits::default()
    }
    .live();
    let mut case = Case::sized(1, &limits, heads, requests);
    let mut rng = Rng::stream(1, 99);
    case.shape = Shape::dense(heads, requests, tokens, gate);
    case.skew = Default::default();
    case.verify = tokens > 1;
    case.accepted = case.verify.then(|| {
        (0..requests)
            .map(|_| 1 + rng.below(tokens) as i32)
            .collect()
    });
    let mut slots: Vec<i32> = (1..=(requests * tokens) as i32).collect();
    rng.shuffle(&mut slots);
    case.slots = slots;
    case
}
