//! The CUDA driver: contexts, modules, the fault record, the launch. The only user of the driver
//! and, with `prepared.rs`, of `unsafe`.

use std::any::Any;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use kda_codegen::operands::{FaultRecord, Parameter};
use kda_codegen::{Arch, Launch};

use crate::residence::Residence;
use crate::{Error, Target};

/// A raw CUDA stream handle, as every engine has one.
pub type Stream = sys::CUstream;

/// Turns a driver result into an error that names the call.
fn check(call: &'static str, result: sys::CUresult) -> Result<(), Error> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(failed(call, code)),
    }
}

fn failed(call: &'static str, code: sys::CUresult) -> Error {
    Error::Cuda {
        call,
        code: code as u32,
        name: format!("{code:?}"),
    }
}

/// Whether the driver opens by a name that cudarc tries too. cudarc's own question exists only where
/// cudarc loads libraries itself; an application may have it link them.
fn driver_present() -> Result<(), Error> {
    let present = ["libcuda.so", "libcuda.so.1", "nvcuda.dll"]
        .iter()
        // SAFETY: opens the driver library by name.
        .any(|name| unsafe { libloading::Library::new(name) }.is_ok());
    if present {
        Ok(())
    } else {
        Err(Error::DriverMissing)
    }
}

/// A CUDA context to prepare and launch in. Clones share it.
#[derive(Clone)]
pub struct Device(Arc<Inner>, Arch);

struct Inner {
    context: sys::CUcontext,
    ordinal: sys::CUdevice,
    /// The device, when this object retains its primary context.
    retained: Option<sys::CUdevice>,
    name: String,
    /// What is known of the addresses of operands.
    residence: Residence,
    /// Keeps a borrowed context alive.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: a CUcontext may be used from any thread; the driver synchronises.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

impl Device {
    /// Retains the primary context of a device, the one the CUDA runtime and most engines use.
    ///
    /// # Errors
    ///
    /// [`Error::DriverMissing`], [`Error::Cuda`], or [`Error::DeviceUnsupported`].
    pub fn primary(ordinal: i32) -> Result<Device, Error> {
        driver_present()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the driver is present; every pointer is to a local.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal))?;
            let (arch, name) = (arch_of(device)?, name_of(device)?);
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&mut context, device),
            )?;
            let inner = Inner {
                context,
                ordinal: device,
                retained: Some(device),
                name,
                residence: Residence::new(device),
                _owner: None,
            };
            Ok(Device(Arc::new(inner), arch))
        }
    }

    /// Borrows an engine's context; `owner` keeps it alive for as long as this object lives.
    ///
    /// # Safety
    ///
    /// `context` is a live context and stays one until `owner` is dropped.
    ///
    /// # Errors
    ///
    /// As [`Device::primary`].
    pub unsafe fn borrow(
        context: sys::CUcontext,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Device, Error> {
        driver_present()?;
        let mut device = 0;
        // SAFETY: the caller promises a live context; the pushed one is popped before returning.
        let queried = unsafe {
            check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(context))?;
            let queried = check("cuCtxGetDevice", sys::cuCtxGetDevice(&mut device));
            let mut popped = ptr::null_mut();
            check("cuCtxPopCurrent", sys::cuCtxPopCurrent_v2(&mut popped))?;
            queried
        };
        queried?;
        let (arch, name) = (arch_of(device)?, name_of(device)?);
        let inner = Inner {
            context,
            ordinal: device,
            retained: None,
            name,
            residence: Residence::new(device),
            _owner: Some(owner),
        };
        Ok(Device(Arc::new(inner), arch))
    }

    /// The same device, for kernels of `arch` in place of its own: those of an older architecture
    /// without an `a`, as PTX ([`Kernel::ptx`](crate::Kernel::ptx)), which the driver compiles for the
    /// device. For tests of an architecture on the hardware at hand; the device's own is faster.
    ///
    /// # Errors
    ///
    /// [`Error::ArchUnsupported`] when the device cannot run it, or [`Error::Cuda`].
    pub fn with_arch(&self, arch: Arch) -> Result<Device, Error> {
        let (major, minor) = capability_of(self.0.ordinal)?;
        if arch.ptx_runs_on(major, minor) {
            Ok(Device(self.0.clone(), arch))
        } else {
            Err(Error::ArchUnsupported { arch, major, minor })
        }
    }

    /// The architecture its kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.1
    }

    /// Its name, as the driver says it, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its ordinal among the process's devices.
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// Runs `body` with this context current and restores the caller's.
    pub(crate) fn with_context<T>(
        &self,
        body: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut current = ptr::null_mut();
        // SAFETY: the driver is present, the context alive, and every push is popped.
        unsafe {
            check("cuCtxGetCurrent", sys::cuCtxGetCurrent(&mut current))?;
            if current == self.0.context {
                return body();
            }
            check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(self.0.context))?;
        }
        // Pops on a panic too.
        let pushed = Pushed;
        let result = body();
        std::mem::forget(pushed);
        pop()?;
        result
    }

    /// As [`with_context`](Self::with_context), and what `body` loads, unloads or allocates ends no
    /// capture that other streams or threads are in the middle of: it touches none of their work.
    pub(crate) fn uncaptured<T>(
        &self,
        body: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.with_context(|| {
            let _relaxed = Relaxed::new()?;
            body()
        })
    }

    /// Fails while `stream` is being captured.
    pub(crate) fn refuse_capture(&self, stream: Stream) -> Result<(), Error> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        self.with_context(|| {
            // SAFETY: the caller's stream is live; the pointer is to a local.
            check("cuStreamIsCapturing", unsafe {
                sys::cuStreamIsCapturing(stream, &mut status)
            })
        })?;
        match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(Error::Capturing),
        }
    }
}

impl<'a> From<&'a Device> for Target<'a> {
    fn from(device: &'a Device) -> Target<'a> {
        Target::named(device.arch(), device.name())
    }
}

/// While it lives, calls of this thread end no capture.
struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    fn new() -> Result<Relaxed, Error> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        exchange_capture_mode(&mut mode)?;
        Ok(Relaxed(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // An error has no remedy.
        let _ = exchange_capture_mode(&mut self.0);
    }
}

fn exchange_capture_mode(mode: &mut sys::CUstreamCaptureMode) -> Result<(), Error> {
    // SAFETY: the driver is present; the pointer is to a local.
    check("cuThreadExchangeStreamCaptureMode", unsafe {
        sys::cuThreadExchangeStreamCaptureMode(mode)
    })
}

/// A context this crate made current.
struct Pushed;

impl Drop for Pushed {
    fn drop(&mut self) {
        // Only on a panic; an error has no remedy.
        let _ = pop();
    }
}

fn pop() -> Result<(), Error> {
    let mut popped = ptr::null_mut();
    // SAFETY: the driver is present; the pointer is to a local.
    check("cuCtxPopCurrent", unsafe {
        sys::cuCtxPopCurrent_v2(&mut popped)
    })
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // SAFETY: retained once by `Device::primary`. Its error has no remedy.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
        }
    }
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32, Error> {
    let mut value = 0;
    // SAFETY: the driver is initialised; the pointer is to a local.
    check("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&mut value, attribute, device)
    })?;
    Ok(value)
}

fn name_of(device: sys::CUdevice) -> Result<String, Error> {
    let mut name = [0u8; 256];
    // SAFETY: the driver is initialised; it writes a text that ends in 0 into the buffer's 256 bytes.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device)
    })?;
    let end = name.iter().position(|&byte| byte == 0);
    let text = &name[..end.unwrap_or(name.len())];
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn arch_of(device: sys::CUdevice) -> Result<Arch, Error> {
    let (major, minor) = capability_of(device)?;
    Arch::for_capability(major, minor).ok_or(Error::DeviceUnsupported { major, minor })
}

/// Major and minor.
fn capability_of(device: sys::CUdevice) -> Result<(i32, i32), Error> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    Ok((attribute(device, MAJOR)?, attribute(device, MINOR)?))
}

/// Whether a module was refused because its compiler is newer than the driver.
pub(crate) fn is_too_new(code: u32) -> bool {
    code == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32
}

/// CUDA version of the driver, major and minor.
pub(crate) fn driver_version() -> (i32, i32) {
    let mut version = 0;
    // SAFETY: the driver is present; the pointer is to a local. It cannot fail then.
    let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
    (version / 1000, version % 1000 / 10)
}

/// The device whose memory an address is; `None` for host memory, and for memory that the driver
/// does not know.
pub(crate) fn owner_of(address: u64) -> Option<i32> {
    use sys::CUpointer_attribute::{
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as TYPE,
    };
    // The caller may be in the middle of a capture, which a question must not end. Where that cannot
    // be had, nothing is known.
    let _relaxed = Relaxed::new().ok()?;
    let ask = |attribute| {
        let mut value = 0u32;
        // SAFETY: the driver is present; both attributes are 32 bits wide, as the local is.
        let result =
            unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
        (result == sys::CUresult::CUDA_SUCCESS).then_some(value)
    };
    let on_device = ask(TYPE)? == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
    if on_device {
        Some(ask(ORDINAL)? as i32)
    } else {
        None
    }
}

/// A loaded cubin and its one function.
pub(crate) struct Function {
    device: Device,
    module: sys::CUmodule,
    function: sys::CUfunction,
    /// Whether it waits for the kernel ahead itself.
    dependent_launch: bool,
}

// SAFETY: module and function handles may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as for `Send`.
unsafe impl Sync for Function {}

impl Function {
    /// Loads `cubin` into the device's context, which is current.
    pub(crate) fn load(
        device: &Device,
        cubin: &[u8],
        entry: &str,
        dependent_launch: bool,
    ) -> Result<Function, Error> {
        let name = CString::new(entry).map_err(|_| {
            failed(
                "cuModuleGetFunction",
                sys::CUresult::CUDA_ERROR_INVALID_VALUE,
            )
        })?;
        let mut module = ptr::null_mut();
        // SAFETY: NVRTC's cubin is complete; the handles are locals and the context is current.
        unsafe {
            check(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()),
            )?;
            // Owned from here on, so that an error below unloads it.
            let mut loaded = Function {
                device: device.clone(),
                module,
                function: ptr::null_mut(),
                dependent_launch,
            };
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut loaded.function, module, name.as_ptr()),
            )?;
            Ok(loaded)
        }
    }

    /// Launches on `stream`, unless a pointer is another device's memory. `pointers` are the values
    /// of the kernel's `parameters`, 0 for what is no pointer.
    ///
    /// # Safety
    ///
    /// `addresses` are those of the values of the kernel's parameters, in its order; every pointer
    /// among these is device memory of the extent that the plan checked, alive until the launch has
    /// finished; `stream` belongs to this function's context.
    #[inline]
    pub(crate) unsafe fn launch(
        &self,
        stream: Stream,
        launch: &Launch,
        parameters: &'static [Parameter],
        pointers: &[u64],
        addresses: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let device = &self.device.0;
        self.device.with_context(|| {
            device.residence.check(pointers, parameters)?;
            // SAFETY: the caller's promise.
            unsafe { self.enqueue(stream, launch, addresses) }
        })
    }

    /// The launch itself, in the device's context.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch).
    #[inline]
    unsafe fn enqueue(
        &self,
        stream: Stream,
        launch: &Launch,
        addresses: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: 0,
            hStream: stream,
            attrs: &mut attribute,
            numAttrs: u32::from(self.dependent_launch),
        };
        // SAFETY: the caller vouches for the parameters and for what they point to.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.function,
                addresses.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        let module = self.module;
        // An error here has no remedy.
        let _ = self.device.uncaptured(|| {
            // SAFETY: loaded once by `load`.
            check("cuModuleUnload", unsafe { sys::cuModuleUnload(module) })
        });
    }
}

/// The fault record, in pinned host memory that kernels reach by a device address: a launch touches
/// it only to report a fault, and the host reads it without the help of any stream.
pub(crate) struct FaultMemory {
    device: Device,
    pub(crate) address: u64,
    host: *mut FaultRecord,
}

// SAFETY: the host pointer is read and written by volatile accesses of whole fields, from any
// thread; a torn pair of fields is documented where it is returned.
unsafe impl Send for FaultMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for FaultMemory {}

impl FaultMemory {
    /// Allocates and clears it; the device's context is current.
    pub(crate) fn new(device: &Device) -> Result<FaultMemory, Error> {
        let mut host = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the pointer is to a local.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&mut host, size_of::<FaultRecord>(), flags)
        })?;
        let mut memory = FaultMemory {
            device: device.clone(),
            address: 0,
            host: host.cast(),
        };
        memory.clear();
        // SAFETY: the memory was just allocated for device access; the pointer is to a field.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut memory.address, host, 0)
        })?;
        Ok(memory)
    }

    /// The record as it is now.
    pub(crate) fn peek(&self) -> FaultRecord {
        // SAFETY: allocated by `new`, page-aligned, alive as long as this object; the device may
        // write it meanwhile, hence volatile.
        unsafe {
            FaultRecord {
                count: (&raw const (*self.host).count).read_volatile(),
                first: (&raw const (*self.host).first).read_volatile(),
                reserved: 0,
            }
        }
    }

    /// Clears the record.
    pub(crate) fn clear(&self) {
        // SAFETY: as in `peek`.
        unsafe {
            (&raw mut (*self.host).first).write_volatile(FaultRecord::CLEAR.first);
            (&raw mut (*self.host).count).write_volatile(FaultRecord::CLEAR.count);
        }
    }

    /// Reads the record after everything queued on `stream`, and clears it.
    pub(crate) fn take(&self, stream: Stream) -> Result<FaultRecord, Error> {
        // Waiting inside a capture would invalidate it.
        self.device.refuse_capture(stream)?;
        self.device.with_context(|| {
            // SAFETY: the caller's stream is live.
            check("cuStreamSynchronize", unsafe {
                sys::cuStreamSynchronize(stream)
            })
        })?;
        let record = self.peek();
        if record.count != 0 {
            self.clear();
        }
        Ok(record)
    }
}

impl Drop for FaultMemory {
    fn drop(&mut self) {
        let host = self.host;
        // An error here has no remedy.
        let _ = self.device.uncaptured(|| {
            // SAFETY: allocated once by `new`.
            check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(host.cast()) })
        });
    }
}
