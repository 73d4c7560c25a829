//! Compiles, loads and launches the benchmark's own kernels, `bare.cu`. Knows no step and no clock.

use std::error::Error;
use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys;
use kda_codegen::{Arch, CompiledKernel, KernelSpec, Nvrtc, Source};
use kda_runtime::{Step, Stream};
use kda_tests::cuda::{DeviceMemory, OwnModule, check};

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
        let compiled = compile(nvrtc, arch)?;
        let module = OwnModule::load(&compiled)?;
        let find = |entry: &CStr| module.function(entry);
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

fn compile(nvrtc: &Nvrtc, arch: Arch) -> Result<CompiledKernel, kda_codegen::Error> {
    let source = Source {
        entry: "bare".into(),
        text: include_str!("bare.cu").into(),
    };
    // Of a specialisation NVRTC's options take nothing but the architecture.
    nvrtc.compile_source(&KernelSpec::new(arch, 1), source)
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
    use kda_codegen::Arch;
    use kda_emulator::{Launch, Memory, Module, Options, Param};
    use kda_tests::kernels::load_nvrtc;

    use super::super::record::Size;

    /// The bare pass moves the bytes of a step: all of the slot read, into the slots written.
    #[test]
    fn the_bare_pass_moves_whole_slots() {
        let ptx = super::compile(&load_nvrtc().unwrap(), Arch::Sm90a)
            .unwrap()
            .ptx;
        let module = Module::parse(&ptx).unwrap();
        for (entry, bf16_state) in [("in_place", false), ("in_place_bf16", true)] {
            let size = Size {
                heads: 2,
                tokens: 2,
                requests: 1,
                bf16_state,
                ..Size::default()
            };
            let slot = size.heads * size.tile_bytes();
            // Reads slot 3, the second column; writes slots 1 and 3.
            let before: Vec<u8> = (0..4 * slot).map(|i| (i / 7) as u8).collect();
            let mut memory = Memory::new();
            memory.add("pool", 1 << 32, before.clone());
            let ints = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
            memory.add("slots", 2 << 32, ints(&[1, 3]));
            memory.add("accepted", 3 << 32, ints(&[2]));
            let launch = Launch {
                entry,
                grid: [size.heads as u32, 1, 1],
                block: [256, 1, 1],
                cluster: [1; 3],
                dynamic_shared_bytes: 0,
                params: &[1 << 32, slot as u64, 2 << 32, 2, 3 << 32, 2].map(Param::U64),
            };
            module
                .launch(&mut memory, &launch, &Options::default())
                .unwrap();
            let after = memory.read("pool");
            let source = &before[3 * slot..];
            let flipped = |times: u8| -> Vec<u8> {
                let bit = |i: usize| u8::from(i.is_multiple_of(16)) & times;
                source
                    .iter()
                    .enumerate()
                    .map(|(i, byte)| byte ^ bit(i))
                    .collect()
            };
            // Each token's tile differs from the one before in one bit of every 16 bytes.
            assert!(after[slot..2 * slot] == flipped(1), "{entry}");
            assert!(after[3 * slot..] == flipped(0), "{entry}");
            assert!(after[..slot] == before[..slot], "{entry}");
            assert!(
                after[2 * slot..3 * slot] == before[2 * slot..3 * slot],
                "{entry}"
            );
        }
    }

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
