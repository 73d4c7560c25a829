//! Compiles, loads and launches the benchmark's own kernels, `bare.cu`. Knows no step and no clock.

use std::error::Error;
use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys;
use kda_codegen::{Arch, KernelSpec, Nvrtc, Source};
use kda_runtime::{Step, Stream};
use kda_tests::cuda::{self, DeviceMemory, check};

use super::record::Size;

/// Rows of a weight: the hidden size of Kimi K3.
pub const DEPTH: usize = 7168;
/// Columns that a block of the multiplication computes.
const BLOCK_COLUMNS: usize = 4;

/// How a kernel is launched behind the one ahead of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// When that one has finished.
    Plain,
    /// Under programmatic dependent launch.
    Programmatic,
}

/// The operands of one multiplication.
pub struct GemvOperands<'a> {
    /// bf16, of every layer.
    pub weights: &'a DeviceMemory,
    /// Byte where this layer's `[columns, DEPTH]` starts.
    pub offset: usize,
    /// A multiple of 4.
    pub columns: usize,
    /// bf16 `[DEPTH]`.
    pub input: &'a DeviceMemory,
    /// f32 `[columns]`, written.
    pub output: &'a DeviceMemory,
}

/// The kernels, loaded for the rest of the process.
pub struct BareKernels {
    arch: Arch,
    empty: sys::CUfunction,
    in_place: sys::CUfunction,
    in_place_bf16: sys::CUfunction,
    read: sys::CUfunction,
    fill: sys::CUfunction,
    gemv: sys::CUfunction,
    gemv_programmatic: sys::CUfunction,
}

impl BareKernels {
    /// Compiles and loads; the context must be current.
    ///
    /// # Errors
    ///
    /// NVRTC's or the driver's.
    pub fn load(nvrtc: &Nvrtc, arch: Arch) -> Result<BareKernels, Box<dyn Error>> {
        let source = Source {
            entry: "bare".into(),
            text: include_str!("bare.cu").into(),
        };
        // Of a specialisation NVRTC's options take nothing but the architecture.
        let compiled = nvrtc.compile_source(&KernelSpec::new(arch, 1), source)?;
        let image = if cuda::is_emulated()? {
            [compiled.ptx.as_bytes(), b"\0"].concat()
        } else {
            compiled.cubin
        };
        let mut module = ptr::null_mut();
        // SAFETY: the image is complete; the handle is a local. The module is never unloaded.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
        })?;
        let find = |name: &CStr| {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded, the name ends in 0, the handle is a local.
            check("cuModuleGetFunction", unsafe {
                sys::cuModuleGetFunction(&mut function, module, name.as_ptr())
            })?;
            Ok::<_, Box<dyn Error>>(function)
        };
        Ok(BareKernels {
            arch,
            empty: find(c"empty")?,
            in_place: find(c"in_place")?,
            in_place_bf16: find(c"in_place_bf16")?,
            read: find(c"read")?,
            fill: find(c"fill")?,
            gemv: find(c"gemv")?,
            gemv_programmatic: find(c"gemv_programmatic")?,
        })
    }

    /// A kernel that does nothing.
    ///
    /// # Errors
    ///
    /// The driver's, as for all below.
    pub fn empty(
        &self,
        stream: Stream,
        blocks: u32,
        threads: u32,
        edge: Edge,
    ) -> Result<(), Box<dyn Error>> {
        // SAFETY: it has no parameters and touches no memory.
        unsafe { self.launch(self.empty, stream, [blocks, 1], threads, edge, &[]) }
    }

    /// Reads the first `bytes` of `memory`.
    pub fn read(
        &self,
        stream: Stream,
        memory: &DeviceMemory,
        bytes: usize,
    ) -> Result<(), Box<dyn Error>> {
        assert!(bytes <= memory.bytes);
        let values = [memory.address, bytes as u64, memory.address];
        // SAFETY: it reads and, at one sum in four billion, writes inside `memory`.
        unsafe { self.launch(self.read, stream, [528, 1], 512, Edge::Plain, &values) }
    }

    /// Fills `memory` with bf16 values, those of [`filled`].
    pub fn fill(&self, stream: Stream, memory: &DeviceMemory) -> Result<(), Box<dyn Error>> {
        let values = [memory.address, memory.bytes as u64 / 4];
        // SAFETY: it writes inside `memory`.
        unsafe { self.launch(self.fill, stream, [528, 1], 512, Edge::Plain, &values) }
    }

    /// Moves the state that `step` moves, launched as a step is.
    ///
    /// # Safety
    ///
    /// The operands of `step`, which is one of `size`, are live, its slots and accepted counts in
    /// range, no slot null, its tiles side by side in the pool.
    pub unsafe fn in_place(
        &self,
        stream: Stream,
        size: Size,
        step: &Step,
    ) -> Result<(), Box<dyn Error>> {
        let (function, element_bytes) = match size.bf16_state {
            true => (self.in_place_bf16, 2),
            false => (self.in_place, 4),
        };
        let values = [
            step.state.buffer.address,
            step.state.slot_stride as u64 * element_bytes,
            step.slots.buffer.address,
            step.slots.stride as u64,
            step.accepted.map_or(0, |accepted| accepted.address),
            step.kind.tokens() as u64,
        ];
        let grid = [size.heads as u32, step.requests as u32];
        // SAFETY: the caller's promise.
        unsafe { self.launch(function, stream, grid, 256, Edge::Programmatic, &values) }
    }

    /// Multiplies a row by a weight, and writes the rows that `step` reads again.
    ///
    /// # Safety
    ///
    /// The projected rows of `step` are live and no kernel but its neighbours in the stream uses them.
    pub unsafe fn gemv(
        &self,
        stream: Stream,
        operands: &GemvOperands<'_>,
        step: &Step,
        edge: Edge,
    ) -> Result<(), Box<dyn Error>> {
        let &GemvOperands {
            weights,
            offset,
            columns,
            input,
            output,
        } = operands;
        assert!(offset + columns * DEPTH * 2 <= weights.bytes);
        assert!(DEPTH * 2 <= input.bytes && columns * 4 <= output.bytes);
        assert!(columns.is_multiple_of(BLOCK_COLUMNS));
        let projected = step.projected.qkv.buffer;
        let values = [
            weights.address + offset as u64,
            input.address,
            output.address,
            projected.address,
            projected.elements as u64 / 2,
        ];
        let function = match edge {
            Edge::Plain => self.gemv,
            Edge::Programmatic => self.gemv_programmatic,
        };
        let grid = [(columns / BLOCK_COLUMNS) as u32, 1];
        // SAFETY: the lengths are checked above, the step's rows are the caller's promise.
        unsafe { self.launch(function, stream, grid, 128, edge, &values) }
    }

    /// Launches one kernel.
    ///
    /// # Safety
    ///
    /// `values` are the kernel's parameters, its accesses stay inside live memory.
    unsafe fn launch(
        &self,
        function: sys::CUfunction,
        stream: Stream,
        grid: [u32; 2],
        threads: u32,
        edge: Edge,
        values: &[u64],
    ) -> Result<(), Box<dyn Error>> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let programmatic = edge == Edge::Programmatic && self.arch.has_clusters();
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream,
            attrs: &mut attribute,
            numAttrs: u32::from(programmatic),
        };
        let mut values = values.to_vec();
        let mut parameters: Vec<_> = values.iter_mut().map(|v| (&raw mut *v).cast()).collect();
        // SAFETY: every parameter has 64 bits; the rest is the caller's promise.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), ptr::null_mut())
        })
    }
}

/// Word `index` of what [`BareKernels::fill`] writes: two bf16 values.
pub fn filled(index: usize) -> [f64; 2] {
    let mut hash = (index as u32).wrapping_mul(0x9e37_79b1);
    hash ^= hash >> 15;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    let word = (hash & 0x807f_807f) | 0x3c00_3c00;
    [word << 16, word & 0xffff_0000].map(|bits| f64::from(f32::from_bits(bits)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn filled_values_are_small_and_of_both_signs() {
        let values: Vec<f64> = (0..1000).flat_map(super::filled).collect();
        assert!(
            values
                .iter()
                .all(|v| (1.0 / 128.0..1.0 / 64.0).contains(&v.abs()))
        );
        let negative = values.iter().filter(|v| **v < 0.0).count();
        assert!((800..1200).contains(&negative), "{negative}");
    }
}
