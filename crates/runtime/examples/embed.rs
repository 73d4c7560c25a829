//! A decode step in an engine that owns its context, stream and pools through cudarc: prepared
//! once, captured in a graph, replayed with other slots. Needs a GPU to run, none to compile.
//!
//! `cargo run -p kda-runtime --example embed`

use std::error::Error;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use kda_runtime::{
    Buffer, Config, ConvCache, Device, KernelSources, Policies, PreparedKda, Projected, Rows,
    Slots, StatePool, Step, StepKind, Weights,
};

const HEADS: usize = 12;
const DIM: usize = HEADS * 128;
const PITCH: usize = 4 * DIM + 128 + HEADS;
const POOL_SLOTS: usize = 64;
const BATCH: usize = 8;

/// The address and length of a slice. The engine orders its streams itself.
fn view<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> Buffer {
    let (address, _ordered) = slice.device_ptr(stream);
    Buffer::new(address, slice.len())
}

fn main() -> Result<(), Box<dyn Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    // SAFETY: everything below runs on one stream, so no event has to order it.
    unsafe { context.disable_event_tracking() };

    // The engine's memory. Bits of bf16 are u16 here.
    let projected = stream.alloc_zeros::<u16>(BATCH * PITCH)?;
    let conv = stream.alloc_zeros::<f32>(3 * 4 * DIM)?;
    let f_b = stream.alloc_zeros::<u16>(DIM * 128)?;
    let a_log = stream.alloc_zeros::<f32>(HEADS)?;
    let dt_bias = stream.alloc_zeros::<f32>(DIM)?;
    let norm = stream.alloc_zeros::<f32>(128)?;
    let lines = stream.alloc_zeros::<u16>(POOL_SLOTS * 3 * DIM * 3)?;
    let states = stream.alloc_zeros::<f32>(POOL_SLOTS * DIM * 128)?;
    let mut slots = stream.clone_htod(&[1, 2, 3, 4, 5, -1, -1, -1])?;
    let out = stream.alloc_zeros::<u16>(BATCH * DIM)?;

    // Borrowed, not owned: the context outlives what is prepared in it.
    // SAFETY: `context` is live and is kept alive by its clone.
    let device = unsafe { Device::borrow(context.cu_ctx(), context.clone()) }?;
    let config = Config::kimi_k3(HEADS);
    let kinds = [StepKind::Decode];
    let policies = Policies::for_device(&device, &config, &kinds);
    let raw = stream.cu_stream();
    let kda =
        PreparedKda::prepare_caches(&device, raw, &config, &policies, &KernelSources::standard())?;
    for kernel in kda.kernels() {
        println!("{} from {}", kernel.entry, kernel.origin);
    }

    let step = Step {
        kind: StepKind::Decode,
        requests: BATCH,
        projected: Projected::packed(view(&projected, &stream), PITCH as i64, HEADS),
        weights: Weights {
            conv: view(&conv, &stream),
            conv_bias: None,
            f_b: view(&f_b, &stream),
            a_log: view(&a_log, &stream),
            dt_bias: view(&dt_bias, &stream),
            norm: view(&norm, &stream),
        },
        conv_cache: ConvCache {
            buffer: view(&lines, &stream),
            slot_stride: (3 * DIM * 3) as i64,
            length: 3,
        },
        state: StatePool {
            buffer: view(&states, &stream),
            slot_stride: (DIM * 128) as i64,
        },
        state_source: None,
        pool_slots: POOL_SLOTS,
        slots: Slots {
            buffer: view(&slots, &stream),
            stride: 1,
            columns: 1,
        },
        accepted: None,
        token_counts: None,
        records: None,
        out: Rows {
            buffer: view(&out, &stream),
            stride: DIM as i64,
        },
    };

    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    // SAFETY: the buffers are live, of the stated sizes, and used on this stream only.
    let launched = unsafe { kda.run(raw, &step) };
    // The capture is ended whatever the step said.
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.ok_or("nothing was captured")?;
    launched?;

    graph.launch()?;
    // Other requests, the same graph: only the values in the buffers change.
    stream.memcpy_htod(&[7, 9, 8, -1, -1, -1, -1, -1], &mut slots)?;
    graph.launch()?;
    match kda.take_faults(raw)? {
        None => println!("two steps done, none refused"),
        Some(faults) => println!("{} requests refused, first {:?}", faults.count, faults),
    }
    Ok(())
}
