//! `launch-cost`: host time of `run` against that of a bare `cuLaunchKernelEx` of the same kernel with
//! the same attributes, in one run, with and without a look at the fault record after each launch.

use std::error::Error;
use std::ffi::{CString, c_void};
use std::ptr;
use std::time::Instant;

use clap::Args;
use cudarc::driver::sys;
use kda_codegen::EarlyReads;
use kda_runtime::{Kernels, Policies, PreparedKda, Stream};
use kda_tests::cuda::{self, DeviceBuffers, DeviceMemory, check};
use kda_tests::kernels::{KernelCache, load_nvrtc};
use kda_tests::{Buffers, Case, Limits, placed};

#[derive(Args)]
pub struct Options {
    /// Heads
    #[arg(long, default_value_t = 12)]
    heads: usize,
    /// Launches of one round, between two waits: fewer than the driver queues
    #[arg(long, default_value_t = 256)]
    launches: usize,
    /// Rounds of each kind, interleaved
    #[arg(long, default_value_t = 101)]
    rounds: usize,
}

/// Measures and prints medians.
///
/// # Errors
///
/// No driver, or a kernel that does not compile.
pub fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let kernels = KernelCache::new(load_nvrtc()?);
    let device = cuda::open_device(&kernels)?;
    if cuda::is_emulated()? {
        println!("emulated driver: the times below are the emulator's and mean nothing");
    }
    let stream = cuda::new_stream()?;
    let limits = Limits {
        tokens: vec![1],
        ..Limits::default().live()
    };
    let case = (1..)
        .map(|seed| Case::sized(seed, &limits, options.heads, 1))
        .find(|case| !case.verify)
        .expect("most cases decode");
    let buffers = Buffers::new(&case);
    let memory = DeviceBuffers::new(&buffers)?;
    memory.upload(&buffers)?;
    let step = placed::step(&case, &buffers, |name| memory.address(name));
    let config = placed::config(&case, EarlyReads::Weights);
    let kinds = [placed::kind(&case)];
    let policies = Policies::for_device(&device, &config, &kinds);
    let prepared = PreparedKda::prepare_caches(&device, stream, &config, &policies, &kernels)?;

    let faults = DeviceMemory::new(16)?;
    let clear = [[0xff; 8], [0; 8]].concat();
    faults.upload(0, &clear)?;
    let mut planned = prepared
        .plan()
        .step(&step, faults.address)?
        .ok_or("the step has no requests")?;
    let spec = prepared.plan().kernels()[planned.kernel];
    let bare = Bare::load(&Kernels::kernel(&kernels, &spec)?, spec.arch.has_clusters())?;
    let mut parameters = planned.arguments.addresses();
    println!("{}", bare.entry.to_string_lossy());

    // What a caller may do for each layer, the cheapest first.
    let mut bare_launch = || bare.launch(stream, &planned.launch, &mut parameters);
    let mut run_launch = || {
        // SAFETY: the operands are live until the synchronisation below, on one stream.
        unsafe { prepared.run(stream, &step) }.map_err(Into::into)
    };
    let mut peeked_launch = || {
        // SAFETY: as above.
        unsafe { prepared.run(stream, &step) }?;
        match prepared.peek_faults() {
            None => Ok(()),
            Some(faults) => Err(format!("{faults:?}").into()),
        }
    };
    type Launch<'a> = &'a mut dyn FnMut() -> Result<(), Box<dyn Error>>;
    let kinds: [(&str, Launch<'_>); 3] = [
        ("cuLaunchKernelEx alone", &mut bare_launch),
        ("run", &mut run_launch),
        ("run and peek_faults", &mut peeked_launch),
    ];
    let mut kinds = kinds.map(|(name, launch)| (name, launch, Vec::new()));
    for round in 0..=options.rounds {
        for (_, launch, times) in &mut kinds {
            let started = Instant::now();
            for _ in 0..options.launches {
                launch()?;
            }
            let elapsed = started.elapsed().as_secs_f64() / options.launches as f64;
            // SAFETY: the stream lives as long as the process.
            unsafe { cuda::synchronize(stream) }?;
            // The first round warms caches.
            if round > 0 {
                times.push(elapsed * 1e6);
            }
        }
    }
    println!(
        "{:<24} {:>10} {:>10} {:>8}",
        "host microseconds", "median", "p90", "ratio"
    );
    let mut first = None;
    for (name, _, times) in &mut kinds {
        times.sort_by(f64::total_cmp);
        let (median, p90) = (times[times.len() / 2], times[times.len() * 9 / 10]);
        let base = *first.get_or_insert(median);
        println!(
            "{name:<24} {median:>10.3} {p90:>10.3} {:>8.3}",
            median / base
        );
    }
    Ok(())
}

/// A kernel without anything around it: nothing of the library's launch path may be in what that path
/// is compared with, so this is the driver's interface by hand.
struct Bare {
    function: sys::CUfunction,
    entry: CString,
    dependent_launch: bool,
}

impl Bare {
    fn load(kernel: &kda_runtime::Kernel, dependent_launch: bool) -> Result<Bare, Box<dyn Error>> {
        let entry = CString::new(kernel.entry.as_str())?;
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the image is complete, the handles are locals. The module is never unloaded.
        unsafe {
            let loaded = sys::cuModuleLoadData(&mut module, kernel.cubin.as_ptr().cast());
            check("cuModuleLoadData", loaded)?;
            let found = sys::cuModuleGetFunction(&mut function, module, entry.as_ptr());
            check("cuModuleGetFunction", found)?;
        }
        Ok(Bare {
            function,
            entry,
            dependent_launch,
        })
    }

    fn launch(
        &self,
        stream: Stream,
        launch: &kda_codegen::Launch,
        parameters: &mut [*mut c_void],
    ) -> Result<(), Box<dyn Error>> {
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
        // SAFETY: the parameters are the kernel's, their operands are live.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.function,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}
