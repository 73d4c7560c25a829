//! Runs harness cases on the GPU, and what tests and benchmarks need of the driver. The emulated
//! driver serves as well: kernels are PTX then.

use std::error::Error;
use std::ffi::{CStr, c_void};
use std::path::Path;

use cudarc::driver::sys;
use kda_codegen::{Arch, CompiledKernel};
use kda_runtime::{Device, Policies, PreparedKda, Stream};

use crate::kernels::KernelCache;
use crate::{Buffers, Case, Executor, Faults, placed};

/// Fails with the call's name.
///
/// # Errors
///
/// Whatever is no success.
pub fn check(call: &'static str, result: sys::CUresult) -> Result<(), Box<dyn Error>> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(format!("{call}: {code:?}").into()),
    }
}

/// Device memory, freed when dropped.
pub struct DeviceMemory {
    /// Address, 256-byte aligned.
    pub address: u64,
    /// Length.
    pub bytes: usize,
}

impl DeviceMemory {
    /// Allocates; the primary context must be current.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(bytes: usize) -> Result<DeviceMemory, Box<dyn Error>> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut address, bytes.max(1))
        })?;
        Ok(DeviceMemory { address, bytes })
    }

    /// Copies `data` to `offset`, synchronously.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn upload(&self, offset: usize, data: &[u8]) -> Result<(), Box<dyn Error>> {
        assert!(offset + data.len() <= self.bytes);
        // SAFETY: source and destination hold the bytes.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(
                self.address + offset as u64,
                data.as_ptr().cast(),
                data.len(),
            )
        })?;
        // From pageable memory the copy may still be under way on the default stream, for which
        // streams of `new_stream` do not wait.
        // SAFETY: the default stream is live.
        unsafe { synchronize(std::ptr::null_mut()) }
    }

    /// Copies from `offset` into `data`, synchronously.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn download(&self, offset: usize, data: &mut [u8]) -> Result<(), Box<dyn Error>> {
        assert!(offset + data.len() <= self.bytes);
        // SAFETY: source and destination hold the bytes.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(
                data.as_mut_ptr().cast::<c_void>(),
                self.address + offset as u64,
                data.len(),
            )
        })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated once. An error here has no remedy.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Operands on the device, an allocation each.
pub struct DeviceBuffers(Vec<(&'static str, DeviceMemory)>);

impl DeviceBuffers {
    /// Allocates for `buffers`; the context must be current.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(buffers: &Buffers) -> Result<DeviceBuffers, Box<dyn Error>> {
        let regions = buffers.regions().into_iter();
        let memory = regions.map(|(name, r)| Ok((name, DeviceMemory::new(r.bytes.len())?)));
        Ok(DeviceBuffers(
            memory.collect::<Result<_, Box<dyn Error>>>()?,
        ))
    }

    /// Where an operand's region lies.
    ///
    /// # Panics
    ///
    /// If there is no such operand.
    pub fn address(&self, operand: &str) -> u64 {
        self.memory(operand).address
    }

    fn memory(&self, operand: &str) -> &DeviceMemory {
        let found = self.0.iter().find(|(name, _)| *name == operand);
        &found.expect("an operand").1
    }

    /// Copies every operand there.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn upload(&self, buffers: &Buffers) -> Result<(), Box<dyn Error>> {
        let mut regions = buffers.regions().into_iter();
        regions.try_for_each(|(name, region)| self.memory(name).upload(0, &region.bytes))
    }

    /// Copies every operand back.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn download(&self, buffers: &mut Buffers) -> Result<(), Box<dyn Error>> {
        let mut regions = buffers.regions_mut().into_iter();
        regions.try_for_each(|(name, region)| self.memory(name).download(0, &mut region.bytes))
    }
}

/// As [`current_device`]; kernels are PTX from now on if the device is an emulated one.
///
/// # Errors
///
/// The driver's, or that there is none.
pub fn open_device(kernels: &KernelCache) -> Result<Device, Box<dyn Error>> {
    let device = current_device()?;
    if is_emulated()? {
        kernels.give_ptx();
    }
    Ok(device)
}

/// Makes the primary context of device 0 current on this thread.
///
/// # Errors
///
/// The driver's, or that there is none.
pub fn current_device() -> Result<Device, Box<dyn Error>> {
    let device = Device::primary(0)?;
    let (mut handle, mut context) = (0, std::ptr::null_mut());
    // SAFETY: `device` initialised the driver; pointers are to locals. The context is retained for
    // the rest of the process.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&mut handle, 0))?;
        check(
            "cuDevicePrimaryCtxRetain",
            sys::cuDevicePrimaryCtxRetain(&mut context, handle),
        )?;
        check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
    }
    Ok(device)
}

/// The device's name.
///
/// # Errors
///
/// The driver's, or that there is none.
pub fn device_name() -> Result<String, Box<dyn Error>> {
    let mut name = [0u8; 128];
    // SAFETY: the buffer holds the stated bytes.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr().cast(), 127, 0)
    })?;
    Ok(String::from_utf8_lossy(&name)
        .trim_end_matches('\0')
        .to_owned())
}

/// Puts the emulated driver, which cargo built beside `executable`, into `folder` under the real
/// one's names: a process with that folder in `LD_LIBRARY_PATH` finds it.
///
/// # Errors
///
/// The folder cannot be written.
pub fn put_emulated_driver(executable: &Path, folder: &Path) -> std::io::Result<()> {
    let library = executable.with_file_name("libkda_emulated_cuda.so");
    std::fs::create_dir_all(folder)?;
    // Two names of one file: a process that opens both must get one driver.
    let versioned = folder.join("libcuda.so.1");
    std::fs::copy(&library, &versioned)?;
    std::fs::hard_link(&versioned, folder.join("libcuda.so"))
}

/// Whether the driver is the emulated one.
///
/// # Errors
///
/// As [`device_name`].
pub fn is_emulated() -> Result<bool, Box<dyn Error>> {
    Ok(device_name()?.starts_with("Emulated"))
}

/// A stream that does not wait for the default one.
///
/// # Errors
///
/// The driver's, or that there is none.
pub fn new_stream() -> Result<Stream, Box<dyn Error>> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the pointer is to a local.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&mut stream, 1)
    })?;
    Ok(stream)
}

/// Waits for a stream.
///
/// # Errors
///
/// The driver's, or that there is none.
///
/// # Safety
///
/// The stream is live.
pub unsafe fn synchronize(stream: Stream) -> Result<(), Box<dyn Error>> {
    // SAFETY: the caller's promise.
    check("cuStreamSynchronize", unsafe {
        sys::cuStreamSynchronize(stream)
    })
}

/// Whether tests that run in the emulator by default are to run on device 0 of the CUDA driver at
/// hand: `KDA_ON_DEVICE` is set.
pub fn on_device() -> bool {
    std::env::var_os("KDA_ON_DEVICE").is_some()
}

/// Kernels that are none of the library's, loaded for the rest of the process.
pub struct OwnModule(sys::CUmodule);

impl OwnModule {
    /// Loads compiled text into the current context: its cubin, or for an emulated device its PTX.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn load(compiled: &CompiledKernel) -> Result<OwnModule, Box<dyn Error>> {
        let ptx;
        let image = if is_emulated()? {
            ptx = [compiled.ptx.as_bytes(), b"\0"].concat();
            &ptx
        } else {
            &compiled.cubin
        };
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is complete; the handle is a local.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
        })?;
        Ok(OwnModule(module))
    }

    /// One of its entry points.
    ///
    /// # Errors
    ///
    /// The driver's, when there is none of that name.
    pub fn function(&self, entry: &CStr) -> Result<sys::CUfunction, Box<dyn Error>> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends in 0, the handle is a local.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut function, self.0, entry.as_ptr())
        })?;
        Ok(function)
    }

    /// Launches one on the default stream. Every parameter has 64 bits, and what the kernel touches is
    /// live device memory: both are the test's to see to.
    pub(crate) fn launch(
        &self,
        entry: &CStr,
        blocks: u32,
        threads: u32,
        values: &[u64],
    ) -> Result<(), Box<dyn Error>> {
        let (function, stream) = (self.function(entry)?, std::ptr::null_mut());
        let mut values = values.to_vec();
        let mut parameters: Vec<_> = values.iter_mut().map(|v| (&raw mut *v).cast()).collect();
        // SAFETY: the function is loaded; the rest is said above.
        check("cuLaunchKernel", unsafe {
            let (values, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, stream, values, extra,
            )
        })
    }
}

/// Runs cases on device 0.
pub struct CudaExecutor {
    /// The device.
    pub device: Device,
    kernels: KernelCache,
    stream: Stream,
    arena: DeviceMemory,
}

impl CudaExecutor {
    /// Opens device 0.
    ///
    /// # Errors
    ///
    /// There is no driver, no device or no memory.
    pub fn new(kernels: KernelCache) -> Result<CudaExecutor, Box<dyn Error>> {
        Ok(CudaExecutor {
            device: open_device(&kernels)?,
            kernels,
            stream: new_stream()?,
            arena: DeviceMemory::new(1)?,
        })
    }

    /// As [`CudaExecutor::new`], for kernels of `arch`: PTX where that is not the device's own.
    ///
    /// # Errors
    ///
    /// Also when the device cannot run them.
    pub fn with_arch(kernels: KernelCache, arch: Arch) -> Result<CudaExecutor, Box<dyn Error>> {
        let mut executor = CudaExecutor::new(kernels)?;
        if executor.device.arch() != arch {
            executor.device = executor.device.with_arch(arch)?;
            executor.kernels.give_ptx();
        }
        Ok(executor)
    }
}

impl Executor for CudaExecutor {
    fn name(&self) -> String {
        format!("cuda {}", self.device.arch())
    }

    fn modes(&self, case: &Case) -> Vec<String> {
        placed::mode_texts(self.device.arch(), placed::gate_input(case))
    }

    fn legal_modes(&self, case: &Case) -> Vec<String> {
        placed::legal_mode_texts(self.device.arch(), placed::gate_input(case))
    }

    fn run(
        &mut self,
        case: &Case,
        mode: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        let (parsed, early_reads) = placed::parse_mode(mode)?;
        let prepared = PreparedKda::prepare_caches(
            &self.device,
            self.stream,
            &placed::config(case, early_reads),
            &Policies::single(&[placed::kind(case)], parsed),
            &self.kernels,
        )?;
        let mut offsets = Vec::new();
        let mut total = 0;
        for (name, region) in buffers.regions() {
            offsets.push((name, total));
            total += region.bytes.len().next_multiple_of(256);
        }
        if self.arena.bytes < total {
            self.arena = DeviceMemory::new(total.next_power_of_two())?;
        }
        let offset_of = |name: &str| {
            offsets
                .iter()
                .find(|(known, _)| *known == name)
                .expect("a region")
                .1
        };
        for (name, region) in buffers.regions() {
            self.arena.upload(offset_of(name), &region.bytes)?;
        }
        let step = placed::step(case, buffers, |name| {
            self.arena.address + offset_of(name) as u64
        });
        // SAFETY: the step's operands lie in the arena, which outlives the synchronised launch.
        unsafe { prepared.run(self.stream, &step) }?;
        let faults = prepared.take_faults(self.stream)?;
        for (name, region) in buffers.regions_mut() {
            self.arena.download(offset_of(name), &mut region.bytes)?;
        }
        Ok(faults.and_then(placed::faults))
    }
}
