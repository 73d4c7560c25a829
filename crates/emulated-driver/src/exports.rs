//! The driver's C functions: pointers in, pointers out, nothing else. Their documentation is the
//! driver's own.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUgraph,
    CUgraphExec, CUgraphNode, CUlaunchConfig, CUmodule, CUpointer_attribute, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};
use kda_emulator::Param;

use crate::state::{
    self, CaptureMode, Counts, DRIVER_VERSION, Handle, KernelWork, Result, Work, driver,
};

/// As a C result.
fn code(result: Result<()>) -> CUresult {
    match result {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(code) => code,
    }
}

/// Writes through an out-pointer of the caller.
///
/// # Safety
///
/// `to` is null or valid for writes.
unsafe fn put<T>(to: *mut T, value: Result<T>) -> CUresult {
    code(value.and_then(|value| {
        if to.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so valid by the caller's promise.
        unsafe { to.write(value) };
        Ok(())
    }))
}

/// A handle as the opaque pointer that callers see.
fn opaque<T>(handle: Handle) -> *mut T {
    std::ptr::without_provenance_mut(handle)
}

/// Functions of the driver, with their C names. Their safety is one rule: every pointer is null or
/// valid for what the driver's documentation says of it.
macro_rules! driver_functions {
    ($( $(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block )*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// Every pointer is null or valid for what the driver's documentation says of it.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> CUresult $body
    )* };
}

driver_functions! {
    /// Reads the environment.
    fn cuInit(_flags: c_uint) {
        code(driver().initialise())
    }

    /// There is none: NVRTC asks whatever driver it finds, and goes on without.
    fn cuGetExportTable(_table: *mut *const c_void, _id: *const c_void) {
        CUresult::CUDA_ERROR_NOT_FOUND
    }

    /// CUDA 13.0.
    fn cuDriverGetVersion(version: *mut c_int) {
        // SAFETY: as for the function.
        unsafe { put(version, Ok(DRIVER_VERSION)) }
    }

    /// `KDA_EMULATED_DEVICES`.
    fn cuDeviceGetCount(count: *mut c_int) {
        let found = driver().device_count();
        // SAFETY: as for the function.
        unsafe { put(count, found.map(|count| count as c_int)) }
    }

    /// A device's handle is its ordinal.
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        let found = driver().capability(ordinal);
        // SAFETY: as for the function.
        unsafe { put(device, found.map(|_| ordinal)) }
    }

    /// `Emulated device N`.
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) {
        let found = driver().capability(device);
        code(found.and_then(|_| {
            let text = format!("Emulated device {device}\0");
            if name.is_null() || (len as usize) < text.len() {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            // SAFETY: the caller's buffer holds `len` bytes.
            unsafe { name.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
            Ok(())
        }))
    }

    /// The compute capability, and what else is asked of a device around a launch.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice) {
        use CUdevice_attribute as Of;
        let found = driver().capability(device).and_then(|(major, minor)| {
            let values = [
                (Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major),
                (Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, minor),
                (Of::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4),
                (Of::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
                (Of::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
                (Of::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
                (Of::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0),
            ];
            let found = values.into_iter().find(|&(known, _)| known as c_uint == attribute);
            found.map_or(Err(CUresult::CUDA_ERROR_INVALID_VALUE), |(_, value)| Ok(value))
        });
        // SAFETY: as for the function.
        unsafe { put(value, found) }
    }

    /// Retains a primary context.
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        let found = driver().retain_primary(device);
        // SAFETY: as for the function.
        unsafe { put(context, found.map(opaque)) }
    }

    /// The last release drops everything in the context.
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        code(driver().release_primary(device))
    }

    /// Creates a context and makes it current. Parameters and flags are ignored.
    fn cuCtxCreate_v4(
        context: *mut CUcontext,
        _parameters: *mut c_void,
        _flags: c_uint,
        device: CUdevice,
    ) {
        let found = driver().create_context(device);
        // SAFETY: as for the function.
        unsafe { put(context, found.map(opaque)) }
    }

    /// Drops a context and everything in it.
    fn cuCtxDestroy_v2(context: CUcontext) {
        code(driver().destroy_context(context.addr()))
    }

    /// The current context, or null.
    fn cuCtxGetCurrent(context: *mut CUcontext) {
        let initialised = driver().device_count();
        // SAFETY: as for the function.
        unsafe { put(context, initialised.map(|_| opaque(state::current_context()))) }
    }

    /// Makes a context current, or none.
    fn cuCtxSetCurrent(context: CUcontext) {
        let known = match context.addr() {
            0 => Ok(0),
            context => driver().context(context),
        };
        code(known.map(|_| state::set_current_context(context.addr())))
    }

    /// Makes a context current until it is popped.
    fn cuCtxPushCurrent_v2(context: CUcontext) {
        let known = driver().context(context.addr());
        code(known.map(|_| state::push_context(context.addr())))
    }

    /// Restores what was current before.
    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        let popped = state::pop_context();
        if context.is_null() {
            return code(popped.map(|_| ()));
        }
        // SAFETY: as for the function.
        unsafe { put(context, popped.map(opaque)) }
    }

    /// The device of the current context.
    fn cuCtxGetDevice(device: *mut CUdevice) {
        let found = driver().context(state::current_context());
        // SAFETY: as for the function.
        unsafe { put(device, found.map(|device| device as CUdevice)) }
    }

    /// Everything has completed already.
    fn cuCtxSynchronize() {
        code(driver().synchronise_context())
    }

    /// Allocates device memory, filled with `0xff`.
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let found = driver().allocate(bytes, false);
        // SAFETY: as for the function.
        unsafe { put(address, found) }
    }

    /// Frees device memory.
    fn cuMemFree_v2(address: CUdeviceptr) {
        code(driver().free(address, false))
    }

    /// Allocates host memory that kernels may touch.
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        let found = driver().allocate(bytes, true);
        let host = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: as for the function.
        unsafe { put(address, found.map(host)) }
    }

    /// Frees host memory.
    fn cuMemFreeHost(address: *mut c_void) {
        code(driver().free(address.addr() as u64, true))
    }

    /// The same address.
    fn cuMemHostGetDevicePointer_v2(
        device: *mut CUdeviceptr,
        host: *mut c_void,
        _flags: c_uint,
    ) {
        let address = host.addr() as u64;
        let found = driver().find(address);
        // SAFETY: as for the function.
        unsafe { put(device, found.map(|_| address)) }
    }

    /// The allocation that holds an address.
    fn cuMemGetAddressRange_v2(
        first: *mut CUdeviceptr,
        bytes: *mut usize,
        address: CUdeviceptr,
    ) {
        let found = driver().find(address);
        code(found.map(|(_, start, len, _)| {
            if !first.is_null() {
                // SAFETY: not null, so valid.
                unsafe { first.write(start) };
            }
            if !bytes.is_null() {
                // SAFETY: not null, so valid.
                unsafe { bytes.write(len) };
            }
        }))
    }

    /// Device ordinal and memory type.
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: CUdeviceptr) {
        use CUpointer_attribute as Of;
        let mut driver = driver();
        let found = driver.current().and_then(|_| driver.find(address));
        let found = found.and_then(|(device, _, _, on_host)| match attribute {
            _ if attribute == Of::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as c_uint => {
                Ok(device as u32)
            }
            _ if attribute == Of::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_uint => {
                Ok(if on_host { 1 } else { 2 })
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        });
        // SAFETY: as for the function; both attributes are 32 bits wide.
        unsafe { put(data.cast::<u32>(), found) }
    }

    /// Copies from the host.
    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) {
        // SAFETY: as for the function.
        let data = unsafe { host_bytes(from, bytes) };
        code(driver().immediately(Work::Upload(to, data)))
    }

    /// Copies from the host; the bytes are those at the time of the call.
    fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) {
        // SAFETY: as for the function.
        let data = unsafe { host_bytes(from, bytes) };
        code(driver().submit(stream.addr(), Work::Upload(to, data)))
    }

    /// Copies to the host.
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        let mut data = vec![0; bytes];
        let read = driver().read(from, &mut data);
        code(read.map(|()| {
            // SAFETY: the caller's buffer holds `bytes` bytes.
            unsafe { to.cast::<u8>().copy_from_nonoverlapping(data.as_ptr(), bytes) }
        }))
    }

    /// Copies to the host at once; inside a capture it is an error, here alone.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let mut data = vec![0; bytes];
        let mut driver = driver();
        let read = driver.synchronise(stream.addr()).and_then(|()| driver.read(from, &mut data));
        code(read.map(|()| {
            // SAFETY: the caller's buffer holds `bytes` bytes.
            unsafe { to.cast::<u8>().copy_from_nonoverlapping(data.as_ptr(), bytes) }
        }))
    }

    /// Copies on the device.
    fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        code(driver().immediately(Work::Copy(to, from, bytes)))
    }

    /// Copies on the device.
    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        code(driver().submit(stream.addr(), Work::Copy(to, from, bytes)))
    }

    /// Fills device memory.
    fn cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, bytes: usize) {
        code(driver().immediately(Work::Fill(to, value, bytes)))
    }

    /// Fills device memory.
    fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream) {
        code(driver().submit(stream.addr(), Work::Fill(to, value, bytes)))
    }

    /// Loads PTX, which ends with a zero byte.
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        let image = image.cast::<u8>();
        let mut driver = driver();
        // SAFETY: an image has at least the four bytes of an ELF file's mark, read one by one up to
        // the first that differs, or is a text that ends with a zero byte.
        let is_elf = !image.is_null()
            && (0..4).all(|i| unsafe { image.add(i).read() } == b"\x7fELF"[i]);
        let loaded = if image.is_null() {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        } else if is_elf {
            driver.complain(
                "cannot run a cubin, only PTX: `cargo xtask gen --bundle FILE --ptx` writes it".into(),
            );
            Err(CUresult::CUDA_ERROR_INVALID_IMAGE)
        } else {
            // SAFETY: what is no cubin is a text that ends with a zero byte.
            let text = unsafe { CStr::from_ptr(image.cast()) };
            match text.to_str() {
                Ok(ptx) => driver.load(ptx),
                Err(_) => Err(CUresult::CUDA_ERROR_INVALID_PTX),
            }
        };
        // SAFETY: as for the function.
        unsafe { put(module, loaded.map(opaque)) }
    }

    /// Forgets a module; its functions stay usable by graphs that hold them.
    fn cuModuleUnload(module: CUmodule) {
        code(driver().unload(module.addr()))
    }

    /// A kernel of a module.
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        if name.is_null() {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        // SAFETY: not null, so a text that ends with a zero byte.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let found = driver().function(module.addr(), &name);
        // SAFETY: as for the function.
        unsafe { put(function, found.map(opaque)) }
    }

    /// Launches with attributes, of which none changes what a kernel computes.
    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        if config.is_null() || !extra.is_null() {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        // SAFETY: not null, so a valid configuration.
        let config = unsafe { config.read() };
        let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
        let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
        // SAFETY: as for the function.
        unsafe {
            launch(function, grid, block, config.sharedMemBytes, config.hStream, parameters)
        }
    }

    /// Launches.
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        if !extra.is_null() {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: as for the function.
        unsafe { launch(function, grid, block, shared_bytes, stream, parameters) }
    }

    /// Creates a stream.
    fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) {
        let found = driver().create_stream();
        // SAFETY: as for the function.
        unsafe { put(stream, found.map(opaque)) }
    }

    /// Creates a stream.
    fn cuStreamCreateWithPriority(stream: *mut CUstream, _flags: c_uint, _priority: c_int) {
        let found = driver().create_stream();
        // SAFETY: as for the function.
        unsafe { put(stream, found.map(opaque)) }
    }

    /// Destroys a stream.
    fn cuStreamDestroy_v2(stream: CUstream) {
        code(driver().destroy_stream(stream.addr()))
    }

    /// Everything has completed already; inside a capture it is an error.
    fn cuStreamSynchronize(stream: CUstream) {
        code(driver().synchronise(stream.addr()))
    }

    /// As [`cuStreamSynchronize`].
    fn cuStreamQuery(stream: CUstream) {
        code(driver().synchronise(stream.addr()))
    }

    /// The context of a stream.
    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) {
        let found = driver().stream_context(stream.addr());
        // SAFETY: as for the function.
        unsafe { put(context, found.map(opaque)) }
    }

    /// Nothing to wait for: what was recorded has completed.
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        let driver = driver();
        let known = driver.stream_context(stream.addr());
        code(known.and_then(|_| driver.event(event.addr())).map(|_| ()))
    }

    /// Begins a capture.
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) {
        let mode = capture_mode(mode);
        code(mode.and_then(|mode| driver().begin_capture(stream.addr(), mode)))
    }

    /// Ends a capture.
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let found = driver().end_capture(stream.addr());
        // SAFETY: as for the function.
        unsafe { put(graph, found.map(opaque)) }
    }

    /// None, active or invalidated.
    fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus) {
        let found = driver().capturing(stream.addr()).map(|capturing| match capturing {
            None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
            Some(true) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
            Some(false) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        });
        // SAFETY: as for the function.
        unsafe { put(status, found) }
    }

    /// How many nodes a graph has; their handles are numbers without use.
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        let found = driver().graph_nodes(graph.addr());
        code(found.and_then(|found| {
            if count.is_null() {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            if !nodes.is_null() {
                // SAFETY: `nodes` has room for `count` handles.
                unsafe { (0..found.min(*count)).for_each(|i| nodes.add(i).write(opaque(i + 1))) };
            }
            // SAFETY: not null, so valid.
            unsafe { count.write(found) };
            Ok(())
        }))
    }

    /// Makes a graph executable.
    fn cuGraphInstantiateWithFlags(
        executable: *mut CUgraphExec,
        graph: CUgraph,
        _flags: c_ulonglong,
    ) {
        let found = driver().instantiate(graph.addr());
        // SAFETY: as for the function.
        unsafe { put(executable, found.map(opaque)) }
    }

    /// Runs the nodes in the order in which they were captured.
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) {
        code(driver().replay(executable.addr(), stream.addr()))
    }

    /// Destroys a graph; what was instantiated of it stays.
    fn cuGraphDestroy(graph: CUgraph) {
        code(driver().destroy_graph(graph.addr()))
    }

    /// Destroys an executable graph.
    fn cuGraphExecDestroy(executable: CUgraphExec) {
        code(driver().destroy_executable(executable.addr()))
    }

    /// Creates an event.
    fn cuEventCreate(event: *mut CUevent, _flags: c_uint) {
        let found = driver().create_event();
        // SAFETY: as for the function.
        unsafe { put(event, found.map(opaque)) }
    }

    /// Destroys an event.
    fn cuEventDestroy_v2(event: CUevent) {
        code(driver().destroy_event(event.addr()))
    }

    /// Records an event.
    fn cuEventRecord(event: CUevent, stream: CUstream) {
        code(driver().record_event(event.addr(), stream.addr()))
    }

    /// Everything has completed already.
    fn cuEventSynchronize(event: CUevent) {
        code(driver().event(event.addr()).map(|_| ()))
    }

    /// Everything has completed already.
    fn cuEventQuery(event: CUevent) {
        code(driver().event(event.addr()).map(|_| ()))
    }

    /// A millisecond for each record in between: time means nothing here.
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) {
        let driver = driver();
        let between = driver.event(start.addr()).and_then(|start| {
            let end = driver.event(end.addr())?;
            match start.min(end) {
                0 => Err(CUresult::CUDA_ERROR_NOT_READY),
                _ => Ok(end.wrapping_sub(start).cast_signed() as f32),
            }
        });
        // SAFETY: as for the function.
        unsafe { put(milliseconds, between) }
    }

    /// Sets the thread's capture mode and returns the one before.
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
        if mode.is_null() {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        // SAFETY: not null, so valid.
        let wanted = capture_mode(unsafe { mode.read() });
        let before = wanted.map(|wanted| state::exchange_capture_mode(wanted) as c_uint);
        // SAFETY: as above.
        unsafe { put(mode, before) }
    }

    /// `CUDA_ERROR_…` of a code that this library returns.
    fn cuGetErrorName(error: c_uint, name: *mut *const c_char) {
        // SAFETY: as for the function.
        unsafe { put(name, error_name(error).map(CStr::as_ptr)) }
    }

    /// As [`cuGetErrorName`].
    fn cuGetErrorString(error: c_uint, text: *mut *const c_char) {
        // SAFETY: as for the function.
        unsafe { put(text, error_name(error).map(CStr::as_ptr)) }
    }
}

/// A capture mode, as C has it.
fn capture_mode(mode: c_uint) -> Result<CaptureMode> {
    use CUstreamCaptureMode as Of;
    match mode {
        _ if mode == Of::CU_STREAM_CAPTURE_MODE_GLOBAL as c_uint => Ok(CaptureMode::Global),
        _ if mode == Of::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint => {
            Ok(CaptureMode::ThreadLocal)
        }
        _ if mode == Of::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint => Ok(CaptureMode::Relaxed),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

/// The name of a code that this library returns.
fn error_name(error: c_uint) -> Result<&'static CStr> {
    Ok(match error {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        3 => c"CUDA_ERROR_NOT_INITIALIZED",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        200 => c"CUDA_ERROR_INVALID_IMAGE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        218 => c"CUDA_ERROR_INVALID_PTX",
        222 => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        401 => c"CUDA_ERROR_ILLEGAL_STATE",
        500 => c"CUDA_ERROR_NOT_FOUND",
        600 => c"CUDA_ERROR_NOT_READY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        901 => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

/// The host's bytes, copied.
///
/// # Safety
///
/// `from` is valid for `bytes` bytes.
unsafe fn host_bytes(from: *const c_void, bytes: usize) -> std::sync::Arc<[u8]> {
    if bytes == 0 {
        return std::sync::Arc::default();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.into()
}

/// Copies the parameters and launches.
///
/// # Safety
///
/// `parameters` has the address of each of the kernel's parameters.
unsafe fn launch(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> CUresult {
    let mut driver = driver();
    let sizes = match driver.parameter_bytes(function.addr()) {
        Ok(sizes) => sizes,
        Err(error) => return error,
    };
    if parameters.is_null() && !sizes.is_empty() {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    let mut params = Vec::with_capacity(sizes.len());
    for (i, &size) in sizes.iter().enumerate() {
        // SAFETY: there is an address for each parameter, and a value of its size behind it.
        let bytes = unsafe { std::slice::from_raw_parts((*parameters.add(i)).cast::<u8>(), size) };
        params.push(Param::Bytes(bytes.to_vec()));
    }
    let kernel = KernelWork {
        function: function.addr(),
        grid,
        block,
        shared_bytes,
        params,
    };
    code(driver.submit(stream.addr(), Work::Kernel(kernel)))
}

/// What the last failing launch or module load had to say, copied to `to` with a zero byte at the
/// end, cut to `len` bytes; returns the text's whole length. For tests: no CUDA driver has it.
///
/// # Safety
///
/// `to` is valid for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_emulated_last_error(to: *mut c_char, len: usize) -> usize {
    let driver = driver();
    let text = driver.last_error();
    if !to.is_null() && len > 0 {
        let cut = text.len().min(len - 1);
        // SAFETY: the caller's buffer holds `len` bytes.
        unsafe {
            to.copy_from_nonoverlapping(text.as_ptr().cast(), cut);
            to.add(cut).write(0);
        }
    }
    text.len()
}

/// How often things happened since the process started. For tests: no CUDA driver has it.
///
/// # Safety
///
/// `to` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kda_emulated_counts(to: *mut Counts) {
    // SAFETY: the caller's promise.
    unsafe { to.write(driver().counts()) }
}
