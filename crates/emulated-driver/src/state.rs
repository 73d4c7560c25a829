//! What the driver knows: devices, contexts, memory, modules, streams, graphs. Safe code; knows no C.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use cudarc::driver::sys::CUresult;
use kda_emulator::{Error as Fault, Launch, Memory, Module, Options, Param, Signature};

/// What `cuDriverGetVersion` says.
pub const DRIVER_VERSION: i32 = 13000;
/// Newest PTX that a driver of this version takes.
const PTX_VERSION: (u32, u32) = (9, 0);
/// Alignment of device memory, in bytes.
const ALIGNMENT: usize = 256;
/// What new memory holds: NaN, and -1.
const POISON: u8 = 0xff;
/// What surrounds an allocation.
const GUARD: u8 = 0xa7;

pub type Result<T> = std::result::Result<T, CUresult>;

/// A context, stream or other object, as an opaque number: never an address.
pub type Handle = usize;

/// One operation of a stream or a graph.
#[derive(Clone)]
pub enum Work {
    Kernel(KernelWork),
    /// Copies device memory: to, from, bytes.
    Copy(u64, u64, usize),
    /// Copies host bytes, as they were at the call, to device memory.
    Upload(u64, Arc<[u8]>),
    /// Fills device memory: to, value, bytes.
    Fill(u64, u8, usize),
}

/// One launch, its parameters by value.
#[derive(Clone)]
pub struct KernelWork {
    pub function: Handle,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub params: Vec<Param>,
}

struct Device {
    capability: (i32, i32),
    memory: Memory,
    /// By address: name in `memory`, offset there, bytes.
    allocations: BTreeMap<u64, Allocation>,
    primary: Handle,
    primary_references: usize,
}

struct Allocation {
    name: String,
    offset: u64,
    bytes: usize,
    on_host: bool,
    context: Handle,
}

struct Context {
    device: usize,
    /// The code of a launch that failed: nothing works any more.
    failed: Option<CUresult>,
}

struct LoadedModule {
    context: Handle,
    module: Arc<Module>,
}

struct Function {
    context: Handle,
    module: Arc<Module>,
    entry: String,
    signature: Signature,
}

/// Which unsafe calls a capture forbids, in the driver's numbering.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

struct Capture {
    mode: CaptureMode,
    thread: std::thread::ThreadId,
    nodes: Vec<Work>,
    invalidated: bool,
}

struct Stream {
    context: Handle,
    capture: Option<Capture>,
}

/// Everything, behind one lock.
#[derive(Default)]
pub struct Driver {
    devices: Vec<Device>,
    contexts: HashMap<Handle, Context>,
    modules: HashMap<Handle, LoadedModule>,
    functions: HashMap<Handle, Function>,
    streams: HashMap<Handle, Stream>,
    graphs: HashMap<Handle, Arc<[Work]>>,
    executables: HashMap<Handle, Arc<[Work]>>,
    events: HashMap<Handle, u64>,
    next_handle: Handle,
    next_allocation: u64,
    records: u64,
    seed: u64,
    last_error: String,
    counts: Counts,
}

/// How often something happened, since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Device and pinned host allocations.
    pub allocations: u64,
    /// Module loads.
    pub module_loads: u64,
    /// Kernels executed, replays included.
    pub kernels: u64,
    /// Calls that wait for a stream, a context or an event.
    pub synchronisations: u64,
    /// Queries of a pointer.
    pub pointer_queries: u64,
}

thread_local! {
    static CURRENT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
    /// What calls of this thread tolerate; see `cuThreadExchangeStreamCaptureMode`.
    static TOLERATED: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

/// Sets what this thread tolerates and returns what it did.
pub fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode {
    TOLERATED.replace(mode)
}

/// The driver, locked.
pub fn driver() -> MutexGuard<'static, Driver> {
    static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(Mutex::default);
    // A panic in another thread left at worst a half-done launch behind.
    DRIVER.lock().unwrap_or_else(|e| e.into_inner())
}

/// The context that is current on this thread; 0 when there is none.
pub fn current_context() -> Handle {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

pub fn set_current_context(context: Handle) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

pub fn push_context(context: Handle) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

pub fn pop_context() -> Result<Handle> {
    CURRENT
        .with_borrow_mut(Vec::pop)
        .ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

impl Driver {
    fn handle(&mut self) -> Handle {
        self.next_handle += 1;
        // Odd, so that it is no address of anything and no special stream.
        self.next_handle * 16 + 0x1001
    }

    /// Reads the environment, once.
    pub fn initialise(&mut self) -> Result<()> {
        if !self.devices.is_empty() {
            return Ok(());
        }
        let text = |name: &str| std::env::var(name).ok();
        let count = match text("KDA_EMULATED_DEVICES") {
            None => 1,
            Some(text) => text.parse().map_err(|_| CUresult::CUDA_ERROR_NO_DEVICE)?,
        };
        if count == 0 {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        let capability = |text: &str| -> Result<(i32, i32)> {
            text.trim()
                .split_once('.')
                .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
                .ok_or(CUresult::CUDA_ERROR_NO_DEVICE)
        };
        let capabilities = text("KDA_EMULATED_CAPABILITY").unwrap_or_else(|| "9.0".into());
        let capabilities: Vec<_> = capabilities
            .split(',')
            .map(capability)
            .collect::<Result<_>>()?;
        self.seed = text("KDA_EMULATED_SEED")
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        for ordinal in 0..count {
            let primary = self.handle();
            self.devices.push(Device {
                capability: capabilities[ordinal.min(capabilities.len() - 1)],
                memory: Memory::new(),
                allocations: BTreeMap::new(),
                primary,
                primary_references: 0,
            });
        }
        Ok(())
    }

    pub fn device_count(&self) -> Result<usize> {
        match self.devices.len() {
            0 => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
            count => Ok(count),
        }
    }

    fn device(&mut self, ordinal: i32) -> Result<&mut Device> {
        self.device_count()?;
        usize::try_from(ordinal)
            .ok()
            .and_then(|ordinal| self.devices.get_mut(ordinal))
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    pub fn capability(&mut self, ordinal: i32) -> Result<(i32, i32)> {
        Ok(self.device(ordinal)?.capability)
    }

    pub fn retain_primary(&mut self, ordinal: i32) -> Result<Handle> {
        let device = self.device(ordinal)?;
        device.primary_references += 1;
        let primary = device.primary;
        self.contexts.entry(primary).or_insert(Context {
            device: ordinal as usize,
            failed: None,
        });
        Ok(primary)
    }

    pub fn release_primary(&mut self, ordinal: i32) -> Result<()> {
        let device = self.device(ordinal)?;
        if device.primary_references == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        device.primary_references -= 1;
        if device.primary_references == 0 {
            let primary = device.primary;
            self.destroy(primary);
        }
        Ok(())
    }

    pub fn create_context(&mut self, ordinal: i32) -> Result<Handle> {
        self.device(ordinal)?;
        let handle = self.handle();
        let context = Context {
            device: ordinal as usize,
            failed: None,
        };
        self.contexts.insert(handle, context);
        push_context(handle);
        Ok(handle)
    }

    pub fn destroy_context(&mut self, context: Handle) -> Result<()> {
        self.context(context)?;
        self.destroy(context);
        Ok(())
    }

    /// Drops a context and everything in it.
    fn destroy(&mut self, context: Handle) {
        let Some(Context { device, .. }) = self.contexts.remove(&context) else {
            return;
        };
        let device = &mut self.devices[device];
        device.allocations.retain(|_, allocation| {
            let kept = allocation.context != context;
            if !kept {
                device.memory.remove(&allocation.name);
            }
            kept
        });
        self.modules.retain(|_, module| module.context != context);
        self.functions.retain(|_, f| f.context != context);
        self.streams.retain(|_, stream| stream.context != context);
    }

    pub fn context(&self, context: Handle) -> Result<usize> {
        match self.contexts.get(&context) {
            None => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
            Some(context) => Ok(context.device),
        }
    }

    /// The current context and its device; an error once a launch there has failed.
    pub fn current(&self) -> Result<(Handle, usize)> {
        self.device_count()?;
        let handle = current_context();
        let context = self
            .contexts
            .get(&handle)
            .ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        match context.failed {
            Some(code) => Err(code),
            None => Ok((handle, context.device)),
        }
    }

    /// As [`Driver::current`], for a call that no capture may see; it ends those that do.
    fn current_uncaptured(&mut self) -> Result<(Handle, usize)> {
        let current = self.current()?;
        let thread = std::thread::current().id();
        let mut seen = false;
        for capture in self.streams.values_mut().filter_map(|s| s.capture.as_mut()) {
            let mine = capture.thread == thread && capture.mode != CaptureMode::Relaxed;
            let forbidden = match TOLERATED.get() {
                CaptureMode::Relaxed => false,
                CaptureMode::ThreadLocal => mine,
                CaptureMode::Global => mine || capture.mode == CaptureMode::Global,
            };
            if forbidden {
                capture.invalidated = true;
                seen = true;
            }
        }
        if seen {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(current)
    }

    pub fn allocate(&mut self, bytes: usize, on_host: bool) -> Result<u64> {
        let (context, device) = self.current_uncaptured()?;
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut data = Vec::new();
        let room = bytes
            .checked_add(2 * ALIGNMENT)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        data.try_reserve_exact(room)
            .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        // The address that kernels see is the host's own; moving a Vec moves no bytes.
        let start = data.as_ptr() as usize;
        let offset = start.next_multiple_of(ALIGNMENT) - start;
        data.resize(offset, GUARD);
        data.resize(offset + bytes, POISON);
        data.resize(offset + bytes + ALIGNMENT, GUARD);
        let address = (start + offset) as u64;
        self.next_allocation += 1;
        self.counts.allocations += 1;
        let name = format!("allocation {} ({bytes} bytes)", self.next_allocation);
        let initialised = offset as u64..(offset + bytes) as u64;
        let device = &mut self.devices[device];
        device
            .memory
            .add_partly(&name, start as u64, data, &[initialised]);
        let allocation = Allocation {
            name,
            offset: offset as u64,
            bytes,
            on_host,
            context,
        };
        device.allocations.insert(address, allocation);
        Ok(address)
    }

    pub fn free(&mut self, address: u64, on_host: bool) -> Result<()> {
        let (_, device) = self.current_uncaptured()?;
        let device = &mut self.devices[device];
        match device.allocations.get(&address) {
            Some(allocation) if allocation.on_host == on_host => {
                device.memory.remove(&allocation.name);
                device.allocations.remove(&address);
                Ok(())
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Device, first byte, bytes, and whether it is host memory, of the allocation that holds an
    /// address.
    pub fn find(&mut self, address: u64) -> Result<(usize, u64, usize, bool)> {
        self.device_count()?;
        self.counts.pointer_queries += 1;
        for (ordinal, device) in self.devices.iter().enumerate() {
            if let Some((&first, allocation)) = device.allocations.range(..=address).next_back()
                && address - first < allocation.bytes as u64
            {
                return Ok((ordinal, first, allocation.bytes, allocation.on_host));
            }
        }
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Name and offset of `bytes` bytes of a device's memory.
    fn place(&self, device: usize, address: u64, bytes: usize) -> Result<(&str, usize)> {
        let device = &self.devices[device];
        let (&first, allocation) = device
            .allocations
            .range(..=address)
            .next_back()
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let from = (address - first) as usize;
        if from > allocation.bytes || allocation.bytes - from < bytes {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        Ok((&allocation.name, allocation.offset as usize + from))
    }

    pub fn read(&mut self, address: u64, to: &mut [u8]) -> Result<()> {
        let (_, device) = self.current_uncaptured()?;
        let (name, at) = self.place(device, address, to.len())?;
        let data = self.devices[device].memory.read(name);
        to.copy_from_slice(&data[at..at + to.len()]);
        Ok(())
    }

    pub fn load(&mut self, ptx: &str) -> Result<Handle> {
        let (context, _) = self.current_uncaptured()?;
        let version = ptx
            .lines()
            .find_map(|line| line.trim().strip_prefix(".version"))
            .and_then(|text| text.trim().split_once('.'))
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        match version {
            None => return Err(CUresult::CUDA_ERROR_INVALID_PTX),
            Some(version) if version > PTX_VERSION => {
                return Err(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
            }
            Some(_) => {}
        }
        let module = Module::parse(ptx).map_err(|error| {
            self.complain(format!("PTX: {error}"));
            CUresult::CUDA_ERROR_INVALID_PTX
        })?;
        self.counts.module_loads += 1;
        let handle = self.handle();
        let module = Arc::new(module);
        self.modules
            .insert(handle, LoadedModule { context, module });
        Ok(handle)
    }

    /// Remembers what to tell beside a code.
    pub fn complain(&mut self, text: String) {
        eprintln!("emulated CUDA driver: {text}");
        self.last_error = text;
    }

    pub fn last_error(&self) -> &str {
        &self.last_error
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn unload(&mut self, module: Handle) -> Result<()> {
        self.current_uncaptured()?;
        match self.modules.remove(&module) {
            Some(_) => Ok(()),
            None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        }
    }

    pub fn function(&mut self, module: Handle, entry: &str) -> Result<Handle> {
        let (current, _) = self.current()?;
        let module = self
            .modules
            .get(&module)
            .filter(|module| module.context == current)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let function = Function {
            context: current,
            module: module.module.clone(),
            entry: entry.to_owned(),
            signature: module
                .module
                .signature(entry)
                .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?,
        };
        let handle = self.handle();
        self.functions.insert(handle, function);
        Ok(handle)
    }

    /// Sizes of a function's parameters, in bytes.
    pub fn parameter_bytes(&self, function: Handle) -> Result<&[usize]> {
        let function = self.functions.get(&function);
        function.map_or(Err(CUresult::CUDA_ERROR_INVALID_HANDLE), |f| {
            Ok(&f.signature.parameter_bytes)
        })
    }

    pub fn create_stream(&mut self) -> Result<Handle> {
        let (context, _) = self.current()?;
        let handle = self.handle();
        let capture = None;
        self.streams.insert(handle, Stream { context, capture });
        Ok(handle)
    }

    pub fn destroy_stream(&mut self, stream: Handle) -> Result<()> {
        self.current()?;
        match self.streams.remove(&stream) {
            Some(_) => Ok(()),
            None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// The stream's context; the handles 0 to 2 are the default streams of the current one.
    pub fn stream_context(&self, stream: Handle) -> Result<Handle> {
        let (current, _) = self.current()?;
        if stream <= 2 {
            return Ok(current);
        }
        let stream = self.streams.get(&stream);
        stream.map_or(Err(CUresult::CUDA_ERROR_INVALID_HANDLE), |s| Ok(s.context))
    }

    fn capture(&mut self, stream: Handle) -> Option<&mut Capture> {
        self.streams.get_mut(&stream)?.capture.as_mut()
    }

    /// Whether a stream is being captured, and whether that capture still holds.
    pub fn capturing(&mut self, stream: Handle) -> Result<Option<bool>> {
        self.stream_context(stream)?;
        Ok(self.capture(stream).map(|capture| !capture.invalidated))
    }

    pub fn begin_capture(&mut self, stream: Handle, mode: CaptureMode) -> Result<()> {
        self.current()?;
        let stream = self
            .streams
            .get_mut(&stream)
            .ok_or(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        if stream.capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        stream.capture = Some(Capture {
            mode,
            thread: std::thread::current().id(),
            nodes: Vec::new(),
            invalidated: false,
        });
        Ok(())
    }

    pub fn end_capture(&mut self, stream: Handle) -> Result<Handle> {
        self.current()?;
        let capture = self
            .streams
            .get_mut(&stream)
            .and_then(|stream| stream.capture.take())
            .ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        if capture.invalidated {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let handle = self.handle();
        self.graphs.insert(handle, capture.nodes.into());
        Ok(handle)
    }

    pub fn graph_nodes(&self, graph: Handle) -> Result<usize> {
        let graph = self.graphs.get(&graph);
        graph.map_or(Err(CUresult::CUDA_ERROR_INVALID_VALUE), |g| Ok(g.len()))
    }

    pub fn instantiate(&mut self, graph: Handle) -> Result<Handle> {
        self.current()?;
        let nodes = self
            .graphs
            .get(&graph)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
            .clone();
        let handle = self.handle();
        self.executables.insert(handle, nodes);
        Ok(handle)
    }

    pub fn destroy_graph(&mut self, graph: Handle) -> Result<()> {
        match self.graphs.remove(&graph) {
            Some(_) => Ok(()),
            None => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    pub fn destroy_executable(&mut self, executable: Handle) -> Result<()> {
        match self.executables.remove(&executable) {
            Some(_) => Ok(()),
            None => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    pub fn replay(&mut self, executable: Handle, stream: Handle) -> Result<()> {
        let nodes = self
            .executables
            .get(&executable)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
            .clone();
        for work in nodes.iter() {
            self.submit(stream, work.clone())?;
        }
        Ok(())
    }

    /// Waits for a stream; inside its capture that is an error, which ends the capture.
    pub fn synchronise(&mut self, stream: Handle) -> Result<()> {
        self.stream_context(stream)?;
        self.counts.synchronisations += 1;
        if let Some(capture) = self.capture(stream) {
            capture.invalidated = true;
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// Waits for the current context.
    pub fn synchronise_context(&mut self) -> Result<()> {
        self.counts.synchronisations += 1;
        self.current_uncaptured().map(|_| ())
    }

    pub fn create_event(&mut self) -> Result<Handle> {
        self.current()?;
        let handle = self.handle();
        self.events.insert(handle, 0);
        Ok(handle)
    }

    pub fn destroy_event(&mut self, event: Handle) -> Result<()> {
        match self.events.remove(&event) {
            Some(_) => Ok(()),
            None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        }
    }

    pub fn record_event(&mut self, event: Handle, stream: Handle) -> Result<()> {
        self.stream_context(stream)?;
        self.records += 1;
        let records = self.records;
        match self.events.get_mut(&event) {
            Some(place) => *place = records,
            None => return Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        }
        Ok(())
    }

    /// When an event was recorded, as a count of records; 0: never.
    pub fn event(&self, event: Handle) -> Result<u64> {
        let event = self.events.get(&event);
        event.map_or(Err(CUresult::CUDA_ERROR_INVALID_HANDLE), |&at| Ok(at))
    }

    /// Does a copy or a fill of the host's at once.
    pub fn immediately(&mut self, work: Work) -> Result<()> {
        self.current_uncaptured()?;
        self.submit(0, work)
    }

    /// Does the work, or adds it to the stream's capture.
    pub fn submit(&mut self, stream: Handle, work: Work) -> Result<()> {
        let context = self.stream_context(stream)?;
        let (current, device) = self.current()?;
        let function_context = match &work {
            Work::Kernel(kernel) => {
                self.functions
                    .get(&kernel.function)
                    .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?
                    .context
            }
            _ => current,
        };
        if context != current {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        if function_context != current {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        if let Some(capture) = self.capture(stream) {
            if capture.invalidated {
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            }
            capture.nodes.push(work);
            return Ok(());
        }
        match work {
            Work::Kernel(kernel) => self.execute(current, device, &kernel),
            Work::Copy(to, from, bytes) => {
                let (name, at) = self.place(device, from, bytes)?;
                let data = self.devices[device].memory.read(name)[at..at + bytes].to_vec();
                self.store(device, to, &data)
            }
            Work::Upload(to, data) => self.store(device, to, &data),
            Work::Fill(to, value, bytes) => self.store(device, to, &vec![value; bytes]),
        }
    }

    fn store(&mut self, device: usize, to: u64, data: &[u8]) -> Result<()> {
        let (name, at) = self.place(device, to, data.len())?;
        let name = name.to_owned();
        self.devices[device].memory.write(&name, at as u64, data);
        Ok(())
    }

    fn execute(&mut self, context: Handle, device: usize, kernel: &KernelWork) -> Result<()> {
        let function = &self.functions[&kernel.function];
        let launch = Launch {
            entry: &function.entry,
            grid: kernel.grid,
            block: kernel.block,
            cluster: function.signature.cluster.unwrap_or([1; 3]),
            dynamic_shared_bytes: kernel.shared_bytes,
            params: &kernel.params,
        };
        self.seed = self.seed.wrapping_add(1);
        self.counts.kernels += 1;
        let options = Options::default().seed(self.seed);
        let module = function.module.clone();
        let entry = function.entry.clone();
        let memory = &mut self.devices[device].memory;
        let ran = module.launch(memory, &launch, &options);
        let (code, text) = match ran {
            Ok(_) => match self.overrun(device) {
                None => return Ok(()),
                Some(name) => (
                    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                    format!("a write beside {name}"),
                ),
            },
            // A launch that never started leaves the context as it was.
            Err(
                error @ (Fault::ParamCount { .. }
                | Fault::ParamSize { .. }
                | Fault::Dimensions { .. }
                | Fault::SharedTooLarge { .. }),
            ) => {
                self.complain(format!("{entry}: {error}"));
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            Err(error @ (Fault::OutOfBounds { .. } | Fault::ReadOnly { .. })) => {
                (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, error.to_string())
            }
            Err(error) => (CUresult::CUDA_ERROR_LAUNCH_FAILED, error.to_string()),
        };
        self.complain(format!("{entry}: {text}"));
        if let Some(context) = self.contexts.get_mut(&context) {
            context.failed = Some(code);
        }
        Err(code)
    }

    /// The allocation whose surroundings were written, if one was.
    fn overrun(&self, device: usize) -> Option<&str> {
        let device = &self.devices[device];
        device.allocations.values().find_map(|allocation| {
            let data = device.memory.read(&allocation.name);
            let end = allocation.offset as usize + allocation.bytes;
            let guards = data[..allocation.offset as usize]
                .iter()
                .chain(&data[end..]);
            let broken = guards.copied().any(|byte| byte != GUARD);
            broken.then_some(allocation.name.as_str())
        })
    }
}
