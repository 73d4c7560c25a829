//! A decode step on candle's tensors: prepared once, captured in a graph, replayed with other slots.
//! Needs a GPU and the CUDA toolkit, as candle does.

use std::error::Error;

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::{DType, Device, Storage, Tensor};
use half::bf16;
use kda_runtime::{
    Buffer, Config, ConvCache, KernelSources, Policies, PreparedKda, Projected, Rows, Slots,
    StatePool, Step, StepKind, Weights,
};

const HEADS: usize = 12;
const DIM: usize = HEADS * 128;
const PITCH: usize = 4 * DIM + 128 + HEADS;
const POOL_SLOTS: usize = 64;
const BATCH: usize = 8;

/// The memory behind a tensor, from its first element to the end of its storage.
fn buffer<T: CudaDType>(tensor: &Tensor) -> candle_core::Result<Buffer> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("the tensor is not on a CUDA device");
    };
    let slice = storage.as_cuda_slice::<T>()?;
    let stream = storage.device.cuda_stream();
    let (base, _ordered) = slice.device_ptr(&stream);
    let first = layout.start_offset();
    let address = base + (first * size_of::<T>()) as u64;
    Ok(Buffer::new(address, slice.len() - first))
}

/// Elements between the rows, or the slots, of a tensor: its first dimension. What lies inside one
/// must be dense, for only this stride is passed on.
fn stride(tensor: &Tensor) -> candle_core::Result<i64> {
    let (strides, dims) = (tensor.stride(), tensor.dims());
    let mut dense = 1;
    for (&stride, &dim) in strides.iter().zip(dims).skip(1).rev() {
        if dim > 1 && stride != dense {
            candle_core::bail!("a row of {dims:?} is not dense: {strides:?}");
        }
        dense *= dim;
    }
    Ok(strides[0] as i64)
}

fn rows<T: CudaDType>(tensor: &Tensor) -> candle_core::Result<Rows> {
    Ok(Rows {
        buffer: buffer::<T>(tensor)?,
        stride: stride(tensor)?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    // A stream of its own: `new_cuda` takes the thread's, another one on every thread.
    let device = Device::new_cuda_with_stream(0)?;
    let cuda = device.as_cuda_device()?;
    // SAFETY: everything below runs on this one stream, so no event has to order it.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    let raw: kda_runtime::Stream = stream.cu_stream().cast();

    // One layer. The checkpoint's [3 dim, 1, 4] becomes [3, 4, dim], once.
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let checkpoint = zeros(&[3 * DIM, 1, 4], DType::BF16)?;
    let conv = checkpoint.reshape((3, DIM, 4))?.transpose(1, 2)?;
    let conv = conv.to_dtype(DType::F32)?.contiguous()?;
    let f_b = zeros(&[DIM, 128], DType::BF16)?;
    let a_log = zeros(&[HEADS], DType::F32)?;
    let dt_bias = zeros(&[DIM], DType::F32)?;
    let norm = zeros(&[128], DType::F32)?;
    // Pools, and buffers that keep their addresses from step to step.
    let lines = zeros(&[POOL_SLOTS, 3 * DIM, 3], DType::BF16)?;
    let states = zeros(&[POOL_SLOTS, HEADS, 128, 128], DType::F32)?;
    let projected = zeros(&[BATCH, PITCH], DType::BF16)?;
    let out = zeros(&[BATCH, DIM], DType::BF16)?;
    let slots = Tensor::new(&[1i32, 2, 3, 4, 5, -1, -1, -1], &device)?;

    let context = stream.context();
    // SAFETY: the context is live and is kept alive by its clone.
    let kda_device =
        unsafe { kda_runtime::Device::borrow(context.cu_ctx().cast(), context.clone()) }?;
    let config = Config::kimi_k3(HEADS);
    let kinds = [StepKind::Decode];
    let policies = Policies::for_device(&kda_device, &config, &kinds);
    let sources = KernelSources::standard();
    let kda = PreparedKda::prepare_caches(&kda_device, raw, &config, &policies, &sources)?;

    let step = Step {
        kind: StepKind::Decode,
        requests: BATCH,
        projected: Projected::packed(buffer::<bf16>(&projected)?, stride(&projected)?, HEADS),
        weights: Weights {
            conv: buffer::<f32>(&conv)?,
            conv_bias: None,
            f_b: buffer::<bf16>(&f_b)?,
            a_log: buffer::<f32>(&a_log)?,
            dt_bias: buffer::<f32>(&dt_bias)?,
            norm: buffer::<f32>(&norm)?,
        },
        conv_cache: ConvCache {
            buffer: buffer::<bf16>(&lines)?,
            slot_stride: stride(&lines)?,
            length: 3,
        },
        state: StatePool {
            buffer: buffer::<f32>(&states)?,
            slot_stride: stride(&states)?,
        },
        state_source: None,
        pool_slots: POOL_SLOTS,
        slots: Slots {
            buffer: buffer::<i32>(&slots)?,
            stride: stride(&slots)?,
            columns: 1,
        },
        accepted: None,
        token_counts: None,
        records: None,
        out: rows::<bf16>(&out)?,
    };

    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    // SAFETY: the tensors live, unmoved, until the graph is gone, and are used on this stream only.
    let launched = unsafe { kda.run(raw, &step) };
    // The capture is ended whatever the step said.
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.ok_or("nothing was captured")?;
    launched?;

    graph.launch()?;
    // Other requests, the same graph: written into the tensor, not a new tensor.
    let next = Tensor::new(&[7i32, 9, 8, -1, -1, -1, -1, -1], &device)?;
    slots.slice_set(&next, 0, 0)?;
    graph.launch()?;
    match kda.take_faults(raw)? {
        None => println!("two steps done, none refused"),
        Some(faults) => println!("{} requests refused, first {faults:?}", faults.count),
    }
    Ok(())
}
