//! An inference engine in miniature: 69 KDA layers whose slots share pages, padded batches captured
//! in a graph for each bucket, requests that join and leave, drafts of which a random number is
//! accepted. Each row of each layer is compared with a plain loop of reference steps.
//!
//! `engine [BUNDLE] [--layers N] [--heads N] [--steps N] [--seed N]`; without a bundle kernels come
//! from the user's cache or NVRTC.

mod model;
mod requests;

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, DevicePtr};
use half::bf16;
use kda_runtime::{
    Buffer, Config, ConvCache, Device, KernelBundle, KernelSources, Policies, PreparedKda,
    Projected, Rows, Slots, StatePool, Step, StepKind, Weights,
};

use model::{HEAD_DIM, Model, Random};
use requests::{Judgement, Request};

/// Batches that graphs are captured for.
const BUCKETS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Columns of the block table: a token and three drafts.
const COLUMNS: usize = 4;
/// Positions of a conv line.
const LINE: usize = 3 + COLUMNS - 1;
/// Requests served at once. Larger batches are padding, as in an engine whose load is low.
const LIVE: usize = 8;
const POOL_SLOTS: usize = LIVE * COLUMNS + 1;
/// Padding of the block table; 0 and below are null.
const PADDING: i32 = -1;
const KINDS: [StepKind; 4] = [
    StepKind::Decode,
    StepKind::Verify(1),
    StepKind::Verify(2),
    StepKind::Verify(4),
];

struct Options {
    bundle: Option<String>,
    layers: usize,
    heads: usize,
    steps: usize,
    seed: u64,
}

impl Options {
    fn parse() -> Result<Options, Box<dyn Error>> {
        let mut options = Options {
            bundle: None,
            layers: 69,
            heads: 1,
            steps: 24,
            seed: 1,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--layers" => options.layers = value()?.parse()?,
                "--heads" => options.heads = value()?.parse()?,
                "--steps" => options.steps = value()?.parse()?,
                "--seed" => options.seed = value()?.parse()?,
                _ => options.bundle = Some(word),
            }
        }
        Ok(options)
    }
}

/// The address and length of a slice. Everything runs on one stream.
fn view<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> Buffer {
    let (address, _ordered) = slice.device_ptr(stream);
    Buffer::new(address, slice.len())
}

/// `elements` elements from element `start` on.
fn part(buffer: Buffer, start: usize, elements: usize, element_bytes: usize) -> Buffer {
    Buffer::new(buffer.address + (start * element_bytes) as u64, elements)
}

/// A layer's weights on the device.
struct DeviceWeights {
    conv: CudaSlice<f32>,
    f_b: CudaSlice<bf16>,
    a_log: CudaSlice<f32>,
    dt_bias: CudaSlice<f32>,
    norm: CudaSlice<f32>,
}

/// Everything on the device. Addresses never change: graphs hold them.
struct Engine {
    stream: Arc<CudaStream>,
    kda: PreparedKda,
    model: Model,
    weights: Vec<DeviceWeights>,
    /// `[slots, layers, dim, 128]`.
    state: CudaSlice<f32>,
    /// `[slots, layers, 3 dim, LINE]`.
    lines: CudaSlice<bf16>,
    /// `[layers, rows, pitch]`.
    projected: CudaSlice<bf16>,
    /// `[layers, rows, dim]`.
    out: CudaSlice<bf16>,
    /// `[rows, COLUMNS]`.
    slots: CudaSlice<i32>,
    /// `[rows]`.
    accepted: CudaSlice<i32>,
    graphs: HashMap<(StepKind, usize), CudaGraph>,
}

/// Rows of the largest batch.
const ROWS: usize = BUCKETS[BUCKETS.len() - 1] * COLUMNS;

impl Engine {
    fn new(options: &Options, random: &mut Random) -> Result<Engine, Box<dyn Error>> {
        let context = CudaContext::new(0)?;
        let stream = context.new_stream()?;
        // SAFETY: everything runs on one stream, so no event has to order it.
        unsafe { context.disable_event_tracking() };
        let model = Model::random(options.layers, options.heads, random);
        // SAFETY: the context is live and its clone keeps it alive.
        let device = unsafe { Device::borrow(context.cu_ctx(), context.clone()) }?;
        let config = Config::kimi_k3(options.heads);
        let policies =
            Policies::for_device(device.arch(), &config, &KINDS);
        let sources = match &options.bundle {
            Some(path) => KernelSources::new().bundle(KernelBundle::from_path(path.as_ref())?),
            None => KernelSources::standard(),
        };
        let kda =
            PreparedKda::prepare_caches(&device, stream.cu_stream(), &config, &policies, &sources)?;
        let weights = model
            .layers
            .iter()
            .map(|layer| {
                Ok(DeviceWeights {
                    conv: stream.clone_htod(&layer.conv)?,
                    f_b: stream.clone_htod(&layer.f_b)?,
                    a_log: stream.clone_htod(&layer.a_log)?,
                    dt_bias: stream.clone_htod(&layer.dt_bias)?,
                    norm: stream.clone_htod(&layer.norm)?,
                })
            })
            .collect::<Result<_, Box<dyn Error>>>()?;
        let (layers, dim, pitch) = (options.layers, model.dim, model.pitch);
        let mut engine = Engine {
            state: stream.alloc_zeros(POOL_SLOTS * layers * dim * HEAD_DIM)?,
            lines: stream.alloc_zeros(POOL_SLOTS * layers * 3 * dim * LINE)?,
            projected: stream.alloc_zeros(layers * ROWS * pitch)?,
            out: stream.alloc_zeros(layers * ROWS * dim)?,
            slots: stream.clone_htod(&[PADDING; ROWS * COLUMNS])?,
            accepted: stream.clone_htod(&[1; ROWS])?,
            graphs: HashMap::new(),
            stream,
            kda,
            model,
            weights,
        };
        for kind in KINDS {
            for bucket in BUCKETS {
                let graph = engine.capture(kind, bucket)?;
                engine.graphs.insert((kind, bucket), graph);
            }
        }
        Ok(engine)
    }

    /// One step of one layer.
    fn step(&self, kind: StepKind, requests: usize, layer: usize) -> Step {
        let Model { dim, pitch, .. } = self.model;
        let (layers, heads) = (self.model.layers.len(), dim / HEAD_DIM);
        let weights = &self.weights[layer];
        let stream = &self.stream;
        // A layer's part of each slot's page; the last slot ends where the pool ends.
        let page = |pool: Buffer, size: usize, element_bytes: usize| {
            let start = layer * size;
            part(pool, start, pool.elements - start, element_bytes)
        };
        let (matrices, line) = (dim * HEAD_DIM, 3 * dim * LINE);
        Step {
            kind,
            requests,
            projected: Projected::packed(
                part(
                    view(&self.projected, stream),
                    layer * ROWS * pitch,
                    ROWS * pitch,
                    2,
                ),
                pitch as i64,
                heads,
            ),
            weights: Weights {
                conv: view(&weights.conv, stream),
                conv_bias: None,
                f_b: view(&weights.f_b, stream),
                a_log: view(&weights.a_log, stream),
                dt_bias: view(&weights.dt_bias, stream),
                norm: view(&weights.norm, stream),
            },
            conv_cache: ConvCache {
                buffer: page(view(&self.lines, stream), line, 2),
                slot_stride: (layers * line) as i64,
                length: LINE,
            },
            state: StatePool {
                buffer: page(view(&self.state, stream), matrices, 4),
                slot_stride: (layers * matrices) as i64,
            },
            state_source: None,
            pool_slots: POOL_SLOTS,
            // Decode takes column 0 of the same table.
            slots: Slots {
                buffer: view(&self.slots, stream),
                stride: COLUMNS as i64,
                columns: if kind == StepKind::Decode { 1 } else { COLUMNS },
            },
            accepted: (kind != StepKind::Decode).then(|| view(&self.accepted, stream)),
            token_counts: None,
            records: None,
            out: Rows {
                buffer: part(view(&self.out, stream), layer * ROWS * dim, ROWS * dim, 2),
                stride: dim as i64,
            },
        }
    }

    /// All layers' steps of one batch as a graph.
    fn capture(&self, kind: StepKind, requests: usize) -> Result<CudaGraph, Box<dyn Error>> {
        self.stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
        let launched = (0..self.model.layers.len()).try_for_each(|layer| {
            let step = self.step(kind, requests, layer);
            // SAFETY: the engine's buffers are live as long as its graphs, of the stated sizes, and
            // used on this stream only; no two requests share a slot.
            unsafe { self.kda.run(self.stream.cu_stream(), &step) }
        });
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = self.stream.end_capture(flags)?;
        launched?;
        graph.ok_or_else(|| "nothing was captured".into())
    }

    /// Writes what prefill leaves behind: each layer's state and window, in the request's first slot.
    fn admit(&mut self, request: &Request) -> Result<(), Box<dyn Error>> {
        let slot = request.slots[0] as usize;
        let (states, lines) = request.page(LINE);
        let (start, end) = (slot * states.len(), (slot + 1) * states.len());
        self.stream
            .memcpy_htod(&states, &mut self.state.slice_mut(start..end))?;
        let (start, end) = (slot * lines.len(), (slot + 1) * lines.len());
        self.stream
            .memcpy_htod(&lines, &mut self.lines.slice_mut(start..end))?;
        Ok(())
    }

    /// Runs one step of every layer for the live requests, padded to `bucket`, and returns `out`.
    fn run(
        &mut self,
        kind: StepKind,
        bucket: usize,
        live: &[Request],
        projected: &[bf16],
    ) -> Result<Vec<bf16>, Box<dyn Error>> {
        let mut slots = [PADDING; ROWS * COLUMNS];
        // A padded row's count is whatever was there.
        let mut accepted = [77; ROWS];
        for (row, request) in live.iter().enumerate() {
            slots[row * COLUMNS..][..COLUMNS].copy_from_slice(&request.slots);
            accepted[row] = request.accepted as i32;
        }
        self.stream.memcpy_htod(&slots, &mut self.slots)?;
        self.stream.memcpy_htod(&accepted, &mut self.accepted)?;
        self.stream.memcpy_htod(projected, &mut self.projected)?;
        self.graphs[&(kind, bucket)].launch()?;
        Ok(self.stream.clone_dtoh(&self.out)?)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let mut random = Random(options.seed);
    let mut engine = Engine::new(&options, &mut random)?;
    let (layers, dim, pitch) = (options.layers, engine.model.dim, engine.model.pitch);
    println!(
        "{layers} layers of {} heads, {POOL_SLOTS} slots in pages of {layers} layers, {} graphs",
        options.heads,
        engine.graphs.len()
    );

    let mut free: Vec<i32> = (1..POOL_SLOTS as i32).collect();
    let mut live: Vec<Request> = Vec::new();
    let mut judgement = Judgement::default();
    let (mut joined, mut left, mut tokens, mut committed) = (0, 0, 0, 0);
    let mut kinds: HashMap<StepKind, usize> = HashMap::new();
    for _ in 0..options.steps {
        // Whoever leaves gives its slots back as they are; whoever joins gets any free ones.
        live.retain(|request| {
            let stays = !random.chance(0.15);
            if !stays {
                left += 1;
                free.extend(request.slots);
            }
            stays
        });
        while live.is_empty() || (live.len() < LIVE && random.chance(0.4)) {
            random.shuffle(&mut free);
            let slots = std::array::from_fn(|_| free.pop().expect("a slot for each live request"));
            let request = Request::prefilled(&engine.model, slots, &mut random);
            engine.admit(&request)?;
            live.push(request);
            joined += 1;
        }
        random.shuffle(&mut live);

        // A plain decode step finds the state in column 0, so nobody may have drafts accepted.
        let plain = live.iter().all(|request| request.accepted == 1);
        let kind = KINDS[random.below(KINDS.len() - usize::from(!plain)) + usize::from(!plain)];
        let fitting: Vec<usize> = BUCKETS.into_iter().filter(|&b| b >= live.len()).collect();
        let bucket = fitting[random.below(fitting.len().min(3))];
        *kinds.entry(kind).or_default() += 1;

        // What a model's projection leaves in the batch's rows; padded rows hold anything.
        let mut projected = vec![bf16::NAN; layers * ROWS * pitch];
        for layer in 0..layers {
            let rows = live.len() * kind.tokens();
            for value in &mut projected[layer * ROWS * pitch..][..rows * pitch] {
                *value = bf16::from_f32(random.normal());
            }
        }
        let out = engine.run(kind, bucket, &live, &projected)?;
        for (row, request) in live.iter_mut().enumerate() {
            let first = row * kind.tokens();
            let accepted = 1 + random.below(kind.tokens());
            for (layer, weights) in engine.model.layers.iter().enumerate() {
                let rows = &projected[(layer * ROWS + first) * pitch..][..kind.tokens() * pitch];
                let found = &out[(layer * ROWS + first) * dim..][..kind.tokens() * dim];
                let expected = request.layer_step(layer, weights, rows, pitch, accepted);
                judgement.compare(&expected, found)?;
            }
            request.accepted = accepted;
            tokens += kind.tokens();
            committed += accepted;
        }
        for layer in 0..layers {
            let padded = &out[(layer * ROWS + live.len() * kind.tokens()) * dim..]
                [..(bucket - live.len()) * kind.tokens() * dim];
            if padded.iter().any(|value| value.to_bits() != 0) {
                return Err("a padded row is not +0".into());
            }
        }
    }
    if let Some(faults) = engine.kda.take_faults(engine.stream.cu_stream())? {
        return Err(format!("requests were refused: {faults:?}").into());
    }
    let mut kinds: Vec<(String, usize)> = kinds
        .into_iter()
        .map(|(kind, steps)| (kind.to_string(), steps))
        .collect();
    kinds.sort();
    for (kind, steps) in kinds {
        println!("{kind:<10} {steps:>4} graph replays");
    }
    println!(
        "{joined} requests joined, {left} left; {tokens} tokens a layer, {committed} of them accepted"
    );
    println!("{judgement}");
    Ok(())
}
