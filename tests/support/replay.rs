//! Runs the steps of a soak as an engine does: prepared once, one captured graph for each kind and
//! batch, replayed over the same buffers. On a GPU or the emulated driver.

use std::collections::HashMap;
use std::error::Error;
use std::ptr;

use cudarc::driver::sys;
use kda_codegen::EarlyReads;
use kda_runtime::{Device, Policies, PreparedKda, StepKind, Stream};

use crate::cuda::{self, DeviceBuffers, check};
use crate::kernels::KernelCache;
use crate::soak::{LENGTHS, World};
use crate::{Buffers, Case, Executor, Faults, placed};

/// An executable graph, destroyed when dropped.
struct Graph(sys::CUgraphExec);

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once. An error here has no remedy.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// Serves one world on a stream of its own. Graphs go before what they launch.
pub struct ReplayExecutor {
    graphs: HashMap<(StepKind, usize), Graph>,
    prepared: PreparedKda,
    device: Device,
    stream: Stream,
    memory: DeviceBuffers,
    /// Graph launches.
    pub replays: u64,
}

impl ReplayExecutor {
    /// Prepares the default policies for `world` on device 0 and makes its context current on this
    /// thread.
    ///
    /// # Errors
    ///
    /// There is no driver, no device or no memory, or a kernel does not compile.
    pub fn new(kernels: &KernelCache, world: &World) -> Result<ReplayExecutor, Box<dyn Error>> {
        let device = cuda::open_device(kernels)?;
        let stream = cuda::new_stream()?;
        let config = placed::config(world.base(), EarlyReads::Weights);
        let mut kinds = vec![StepKind::Decode];
        kinds.extend(LENGTHS.map(StepKind::Verify));
        let policies = Policies::for_device(device.arch(), &config, &kinds);
        let prepared = PreparedKda::prepare_caches(&device, stream, &config, &policies, kernels)?;
        let largest = Buffers::poisoned(&World::largest(world.base()));
        Ok(ReplayExecutor {
            graphs: HashMap::new(),
            prepared,
            device,
            stream,
            memory: DeviceBuffers::new(&largest)?,
            replays: 0,
        })
    }

    /// The graph of a case's kind and batch, captured when it is first asked for.
    fn graph(
        &mut self,
        case: &Case,
        buffers: &Buffers,
    ) -> Result<sys::CUgraphExec, Box<dyn Error>> {
        let key = (placed::kind(case), case.shape.requests);
        if let Some(graph) = self.graphs.get(&key) {
            return Ok(graph.0);
        }
        let step = placed::step(case, buffers, |name| self.memory.address(name));
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is live; the step's operands lie in this object's memory, which the
        // graphs do not outlive; every pointer is to a local.
        unsafe {
            let began = sys::cuStreamBeginCapture_v2(self.stream, mode);
            check("cuStreamBeginCapture", began)?;
            let launched = self.prepared.run(self.stream, &step);
            // The capture is ended whatever the step said.
            let ended = sys::cuStreamEndCapture(self.stream, &mut graph);
            launched?;
            check("cuStreamEndCapture", ended)?;
            let made = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0);
            check("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
            check("cuGraphInstantiate", made)?;
        }
        self.graphs.insert(key, Graph(executable));
        Ok(executable)
    }
}

impl Executor for ReplayExecutor {
    fn name(&self) -> String {
        format!("graphs on {}", self.device.arch())
    }

    /// The policies choose.
    fn modes(&self, _: &Case) -> Vec<String> {
        vec!["default policies".into()]
    }

    fn run(
        &mut self,
        case: &Case,
        _: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        // The capture reads nothing, so that the buffers may hold an earlier step's values.
        let graph = self.graph(case, buffers)?;
        self.memory.upload(buffers)?;
        // SAFETY: the graph and the stream are live, and so is what it launches.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(graph, self.stream)
        })?;
        self.replays += 1;
        let faults = self.prepared.take_faults(self.stream)?;
        self.memory.download(buffers)?;
        Ok(faults.and_then(placed::faults))
    }
}
