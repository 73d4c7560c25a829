//! Holds the kernels' elementary functions to the bounds that the oracle grants them, one f32 argument
//! after another: in the emulator, or on a GPU, whose approximate instructions only it knows.

use std::error::Error;
use std::ffi::CStr;

use kda_codegen::{Arch, CompiledKernel, KernelSpec, Nvrtc, Source, source};
use kda_emulator::{Launch, Memory, Module, Options, Param};
use kda_reference::Gate;
use kda_reference::loss::{self, Bounded};

use crate::cuda::{self, DeviceMemory, OwnModule};

/// As both the kernel's text and the bound have it.
const LOWER_BOUND: f32 = -5.0;
const ENTRY: &CStr = c"elementary";
const THREADS: u32 = 256;
/// Arguments of a launch.
const LAUNCH: u32 = 1 << 24;

/// Appended to a step's text: every parameter has 64 bits, argument `i` has bits `first + i * stride`.
const KERNEL: &str = r#"
extern "C" __global__ void __launch_bounds__(256)
    elementary(unsigned long long function, unsigned long long first, unsigned long long stride,
               unsigned long long count, float* results) {
    unsigned long long i = blockIdx.x * 256ull + threadIdx.x;
    if (i >= count) return;
    float x = __uint_as_float((unsigned)(first + i * stride));
    float y;
    switch ((int)function) {
        case 0: y = sigmoid_fast(x); break;
        case 1: y = rsqrt_accurate(x); break;
        case 2: { GateWeights w = {}; w.a_log = x; y = rate_of(w); break; }
        case 3: y = decay_lower_bound(x, 1.0f, 0.0f, LOWER_BOUND); break;
        default: y = decay_softplus(x, 0.0f, 1.0f, 0.0f);
    }
    results[i] = y;
}
"#;

/// One function of the templates and what it may lose.
pub struct Function {
    /// Its name in a report.
    pub name: &'static str,
    /// Least and largest argument.
    pub domain: (f32, f32),
    /// What it should give.
    pub bound: fn(f64) -> Bounded,
}

/// Exact: nothing came before.
const ONE: Bounded = (1.0, 0.0);

/// In the order of the kernel's cases.
pub const FUNCTIONS: [Function; 5] = [
    Function {
        name: "sigmoid",
        domain: (f32::MIN, f32::MAX),
        bound: loss::sigmoid,
    },
    Function {
        name: "inverse root",
        domain: (1e-6, f32::MAX),
        bound: loss::inverse_root,
    },
    Function {
        name: "rate",
        domain: (f32::MIN, f32::MAX),
        bound: loss::rate,
    },
    Function {
        name: "decay, lower bound",
        domain: (f32::MIN, f32::MAX),
        bound: |x| {
            let gate = Gate::LowerBound {
                lower_bound: LOWER_BOUND,
            };
            loss::decay(gate, ONE, (x, 0.0))
        },
    },
    Function {
        name: "decay, softplus",
        domain: (f32::MIN, f32::MAX),
        bound: |x| loss::decay(Gate::Softplus, ONE, (x, 0.0)),
    },
];

/// The argument at which a function came closest to its bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Worst {
    /// Error by bound; above 1 the bound does not hold.
    pub share: f64,
    /// Argument.
    pub x: f32,
    /// What the function gave.
    pub found: f32,
    /// What it should have given.
    pub exact: f64,
    /// Arguments tried.
    pub tried: u64,
}

impl Worst {
    fn add(&mut self, function: &Function, x: f32, found: f32) {
        if x.is_nan() {
            // NaN in, NaN out.
            self.keep(
                if found.is_nan() { 0.0 } else { f64::INFINITY },
                x,
                found,
                f64::NAN,
            );
            return;
        }
        if !(function.domain.0..=function.domain.1).contains(&x) {
            return;
        }
        let (exact, error) = (function.bound)(x.into());
        let share = (f64::from(found) - exact).abs() / error;
        let share = if share.is_nan() { f64::INFINITY } else { share };
        self.keep(share, x, found, exact);
    }

    fn keep(&mut self, share: f64, x: f32, found: f32, exact: f64) {
        self.tried += 1;
        if share > self.share {
            (self.share, self.x, self.found, self.exact) = (share, x, found, exact);
        }
    }

    fn merge(self, other: Worst) -> Worst {
        let tried = self.tried + other.tried;
        let worse = if other.share > self.share {
            other
        } else {
            self
        };
        Worst { tried, ..worse }
    }
}

/// Where the functions run.
enum Place {
    Emulator(Module),
    Device(OwnModule, DeviceMemory),
}

/// The functions, compiled for one place.
pub struct Elementary(Place);

impl Elementary {
    fn compile(nvrtc: &Nvrtc, arch: Arch) -> Result<CompiledKernel, Box<dyn Error>> {
        let spec = KernelSpec::new(arch, 1);
        let kernel = KERNEL.replace("LOWER_BOUND", &format!("{LOWER_BOUND:?}f"));
        let text = source::render(&spec)?.text + &kernel;
        let entry = ENTRY.to_str()?.into();
        Ok(nvrtc.compile_source(&spec, Source { entry, text })?)
    }

    /// In the emulator.
    ///
    /// # Errors
    ///
    /// NVRTC's, or a text that the emulator does not know.
    pub fn emulated(nvrtc: &Nvrtc, arch: Arch) -> Result<Elementary, Box<dyn Error>> {
        let compiled = Elementary::compile(nvrtc, arch)?;
        Ok(Elementary(Place::Emulator(Module::parse(&compiled.ptx)?)))
    }

    /// On the current device, whose module stays loaded.
    ///
    /// # Errors
    ///
    /// NVRTC's or the driver's.
    pub fn on_device(nvrtc: &Nvrtc) -> Result<Elementary, Box<dyn Error>> {
        let device = cuda::current_device()?;
        let compiled = Elementary::compile(nvrtc, device.arch())?;
        let module = OwnModule::load(&compiled)?;
        let memory = DeviceMemory::new(LAUNCH as usize * 4)?;
        Ok(Elementary(Place::Device(module, memory)))
    }

    /// The worst of every `stride`-th f32, from the bits 0 on.
    ///
    /// # Errors
    ///
    /// The emulator's or the driver's.
    pub fn worst(&self, stride: u32) -> Result<Vec<Worst>, Box<dyn Error>> {
        let stride = u64::from(stride.max(1));
        let total = (1u64 << 32).div_ceil(stride);
        let mut results = vec![0; total.min(LAUNCH.into()) as usize * 4];
        let jobs = std::thread::available_parallelism().map_or(1, |n| n.get());
        let mut all = vec![Worst::default(); FUNCTIONS.len()];
        for start in (0..total).step_by(LAUNCH as usize) {
            let count = (total - start).min(LAUNCH.into());
            let bytes = &mut results[..count as usize * 4];
            for (index, function) in FUNCTIONS.iter().enumerate() {
                self.launch(index, start * stride, stride, bytes)?;
                let share = (count as usize).div_ceil(jobs) * 4;
                let first = start * stride;
                let found = std::thread::scope(|scope| {
                    let parts: Vec<_> = bytes
                        .chunks(share)
                        .enumerate()
                        .map(|(part, bytes)| {
                            let first = first + (part * share / 4) as u64 * stride;
                            scope.spawn(move || judge(function, first, stride, bytes))
                        })
                        .collect();
                    let parts = parts.into_iter().map(|part| part.join().expect("no panic"));
                    parts.fold(Worst::default(), Worst::merge)
                });
                all[index] = all[index].merge(found);
            }
        }
        Ok(all)
    }

    fn launch(
        &self,
        function: usize,
        first: u64,
        stride: u64,
        results: &mut [u8],
    ) -> Result<(), Box<dyn Error>> {
        let count = results.len() as u64 / 4;
        let blocks = count.div_ceil(THREADS.into()) as u32;
        let mut values = [function as u64, first, stride, count, 0];
        match &self.0 {
            Place::Emulator(module) => {
                let mut memory = Memory::new();
                memory.add("results", 1 << 32, vec![0; results.len()]);
                values[4] = 1 << 32;
                let launch = Launch {
                    entry: ENTRY.to_str()?,
                    grid: [blocks, 1, 1],
                    block: [THREADS, 1, 1],
                    cluster: [1; 3],
                    dynamic_shared_bytes: 0,
                    params: &values.map(Param::U64),
                };
                module.launch(&mut memory, &launch, &Options::default())?;
                results.copy_from_slice(memory.read("results"));
            }
            Place::Device(module, memory) => {
                values[4] = memory.address;
                module.launch(ENTRY, blocks, THREADS, &values)?;
                // On the stream that the copy waits for.
                memory.download(0, results)?;
            }
        }
        Ok(())
    }
}

fn judge(function: &Function, first: u64, stride: u64, results: &[u8]) -> Worst {
    let mut worst = Worst::default();
    for (i, bytes) in (0..).zip(results.chunks_exact(4)) {
        let found = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let x = f32::from_bits((first + i * stride) as u32);
        worst.add(function, x, found);
    }
    worst
}
