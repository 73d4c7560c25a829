//! Times work on a stream as a serving process would find it: graphs, cold caches, several streams in
//! use. Knows nothing of what it times.

use std::error::Error;
use std::ptr;

use cudarc::driver::sys;
use kda_codegen::{Arch, Nvrtc};
use kda_runtime::Stream;
use kda_tests::cuda::{self, DeviceMemory, check};

use super::bare::BareKernels;

/// Replays ahead of the timed ones.
const WARM_UPS: usize = 3;

/// The times of one thing, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Middle one.
    pub median: f64,
    /// Shortest.
    pub min: f64,
    /// Nine in ten are no longer.
    pub p90: f64,
}

impl Times {
    /// Of samples, at least one.
    fn of(mut samples: Vec<f64>) -> Times {
        samples.sort_by(f64::total_cmp);
        Times {
            median: samples[samples.len() / 2],
            min: samples[0],
            p90: samples[samples.len() * 9 / 10],
        }
    }

    /// Those of one of `parts` equal parts.
    fn of_each(self, parts: usize) -> Times {
        let each = |time: f64| time / parts as f64;
        Times {
            median: each(self.median),
            min: each(self.min),
            p90: each(self.p90),
        }
    }
}

/// A stream, the kernels around the step, and what evicts L2 before each replay.
pub struct Timer {
    /// Where everything runs.
    pub stream: Stream,
    /// The benchmark's own kernels.
    pub bare: BareKernels,
    evicted: DeviceMemory,
    replays: usize,
}

impl Timer {
    /// Compiles the benchmark's kernels and brings the process into the state that is measured; the
    /// context must be current.
    ///
    /// # Errors
    ///
    /// NVRTC's or the driver's.
    pub fn new(nvrtc: &Nvrtc, arch: Arch, replays: usize) -> Result<Timer, Box<dyn Error>> {
        let evicted = if cuda::is_emulated()? {
            1 << 16
        } else {
            1 << 30
        };
        let timer = Timer {
            stream: cuda::new_stream()?,
            bare: BareKernels::load(nvrtc, arch)?,
            evicted: DeviceMemory::new(evicted)?,
            replays: replays.max(1),
        };
        timer.bare.fill(timer.stream, &timer.evicted)?;
        timer.wait()?;
        // A process that has used few streams replays graphs faster than a serving process does.
        for _ in 0..5 {
            let stream = cuda::new_stream()?;
            timer.bare.read(stream, &timer.evicted, 1 << 16)?;
            // SAFETY: streams live as long as the process.
            unsafe { cuda::synchronize(stream) }?;
        }
        Ok(timer)
    }

    /// Multiprocessors of the device.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn multiprocessors(&self) -> Result<usize, Box<dyn Error>> {
        let (mut count, mut device) = (0, 0);
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the context is current; pointers are to locals.
        unsafe {
            check("cuCtxGetDevice", sys::cuCtxGetDevice(&mut device))?;
            check(
                "cuDeviceGetAttribute",
                sys::cuDeviceGetAttribute(&mut count, attribute, device),
            )?;
        }
        Ok(count as usize)
    }

    /// Waits for everything enqueued.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn wait(&self) -> Result<(), Box<dyn Error>> {
        // SAFETY: the stream lives as long as the process.
        unsafe { cuda::synchronize(self.stream) }
    }

    /// Times what `enqueue` puts on the stream as one graph, divided by `layers`.
    ///
    /// # Errors
    ///
    /// `enqueue`'s or the driver's.
    pub fn graph(
        &self,
        layers: usize,
        enqueue: impl FnMut() -> Result<(), Box<dyn Error>>,
    ) -> Result<Times, Box<dyn Error>> {
        let graph = Graph::capture(self.stream, enqueue)?;
        Ok(self.stream(|| graph.launch(self.stream))?.of_each(layers))
    }

    /// Times what `enqueue` puts on the stream, each time behind an eviction of L2.
    ///
    /// # Errors
    ///
    /// `enqueue`'s or the driver's.
    pub fn stream(
        &self,
        mut enqueue: impl FnMut() -> Result<(), Box<dyn Error>>,
    ) -> Result<Times, Box<dyn Error>> {
        let (start, stop) = (Event::new()?, Event::new()?);
        let mut samples = Vec::new();
        for replay in 0..WARM_UPS + self.replays {
            self.bare
                .read(self.stream, &self.evicted, self.evicted.bytes)?;
            start.record(self.stream)?;
            enqueue()?;
            stop.record(self.stream)?;
            self.wait()?;
            if replay >= WARM_UPS {
                samples.push(stop.microseconds_since(&start)?);
            }
        }
        Ok(Times::of(samples))
    }

    /// Times a read of what evicts L2; also its bytes.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn read(&self) -> Result<(Times, usize), Box<dyn Error>> {
        let memory = &self.evicted;
        let times = self.stream(|| self.bare.read(self.stream, memory, memory.bytes))?;
        Ok((times, memory.bytes))
    }

    /// Times the driver's copy of device memory; also its bytes, read and written counted.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn copy(&self) -> Result<(Times, usize), Box<dyn Error>> {
        let bytes = 4 * self.evicted.bytes;
        let (from, to) = (DeviceMemory::new(bytes)?, DeviceMemory::new(bytes)?);
        self.bare.fill(self.stream, &from)?;
        let times = self.stream(|| {
            // SAFETY: both hold the bytes, and live until the stream has been waited for.
            check("cuMemcpyDtoDAsync", unsafe {
                sys::cuMemcpyDtoDAsync_v2(to.address, from.address, bytes, self.stream)
            })
        })?;
        Ok((times, 2 * bytes))
    }
}

/// A graph ready to launch.
struct Graph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl Graph {
    fn capture(
        stream: Stream,
        mut enqueue: impl FnMut() -> Result<(), Box<dyn Error>>,
    ) -> Result<Graph, Box<dyn Error>> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let mut made = Graph {
            graph: ptr::null_mut(),
            executable: ptr::null_mut(),
        };
        // SAFETY: the stream is live and idle.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream, mode)
        })?;
        let enqueued = enqueue();
        // SAFETY: the capture above is ended whatever happened in it; the handle is a local's.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut made.graph) };
        enqueued?;
        check("cuStreamEndCapture", ended)?;
        // SAFETY: the graph is complete; the handle is a local's.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut made.executable, made.graph, 0)
        })?;
        Ok(made)
    }

    fn launch(&self, stream: Stream) -> Result<(), Box<dyn Error>> {
        // SAFETY: both are live.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.executable, stream)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once; a null handle is only refused. An error here has no remedy.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.executable);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

struct Event(sys::CUevent);

impl Event {
    fn new() -> Result<Event, Box<dyn Error>> {
        let mut event = ptr::null_mut();
        // SAFETY: the handle is a local.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, 0)
        })?;
        Ok(Event(event))
    }

    fn record(&self, stream: Stream) -> Result<(), Box<dyn Error>> {
        // SAFETY: both are live.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.0, stream)
        })
    }

    fn microseconds_since(&self, start: &Event) -> Result<f64, Box<dyn Error>> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are live and recorded; the pointer is to a local.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&mut milliseconds, start.0, self.0)
        })?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once. An error here has no remedy.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::Times;

    #[test]
    fn times_are_ordered() {
        let samples = (0..100).rev().map(|i| f64::from(i) + 0.5).collect();
        let (median, min, p90) = (50.5, 0.5, 90.5);
        assert_eq!(Times::of(samples), Times { median, min, p90 });
        let one = Times::of(vec![7.0]);
        assert_eq!((one.min, one.median, one.p90), (7.0, 7.0, 7.0));
    }
}
