//! Builds small kernels and launches them. Holds no assertions.
#![allow(dead_code)]

pub mod planted;

use kda_emulator::{Error, Launch, Memory, Module, Options, Param, Report};

/// A module with one entry `kernel` that takes 64-bit parameters `p0`, `p1`, ... and whose body has
/// plenty of registers declared.
pub fn kernel(params: usize, directives: &str, body: &str) -> String {
    let list: Vec<String> = (0..params).map(|i| format!(".param .u64 p{i}")).collect();
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry kernel({})\n{directives}\n{{\n\
         .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %d<32>;\n{body}\n}}\n",
        list.join(", ")
    )
}

/// Line in `text` of the first line that contains `part`, from 1.
pub fn line_of(text: &str, part: &str) -> u32 {
    let found = text.lines().position(|l| l.contains(part));
    found.unwrap_or_else(|| panic!("`{part}` is not in the kernel")) as u32 + 1
}

/// Shape of a small launch.
#[derive(Clone, Copy)]
pub struct Shape {
    pub blocks: u32,
    pub threads: u32,
    pub cluster: u32,
    pub dynamic: u32,
}

impl Shape {
    pub const fn block(threads: u32) -> Self {
        Shape {
            blocks: 1,
            threads,
            cluster: 1,
            dynamic: 0,
        }
    }

    pub const fn cluster(cluster: u32, threads: u32) -> Self {
        Shape {
            blocks: cluster,
            threads,
            cluster,
            dynamic: 0,
        }
    }
}

pub fn launch(
    text: &str,
    shape: Shape,
    memory: &mut Memory,
    params: &[u64],
    options: &Options,
) -> Result<Report, Error> {
    let module = Module::parse(text)?;
    let params: Vec<Param> = params.iter().map(|&p| Param::U64(p)).collect();
    let launch = Launch {
        entry: "kernel",
        grid: [shape.blocks, 1, 1],
        block: [shape.threads, 1, 1],
        cluster: [shape.cluster, 1, 1],
        dynamic_shared_bytes: shape.dynamic,
        params: &params,
    };
    module.launch(memory, &launch, options)
}

pub const OUT: u64 = 0x10_0000;
pub const IN: u64 = 0x20_0000;

/// Memory with an unwritten buffer `out` of 4 KiB and a written buffer `in` of as much.
pub fn memory() -> Memory {
    let mut memory = Memory::new();
    memory.add_uninitialised("out", OUT, 4096);
    memory.add("in", IN, (0..1024u32).flat_map(u32::to_le_bytes).collect());
    memory
}

/// Word `i` of a buffer.
pub fn word(memory: &Memory, name: &str, i: usize) -> u32 {
    let bytes = &memory.read(name)[4 * i..4 * i + 4];
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}
