//! Measures thread-instructions a second, races checked, on a kernel like the step: rows of state in
//! registers, vectors in shared memory, sums by shuffles.

use std::fmt::Write;
use std::time::Instant;

use kda_emulator::{Launch, Memory, Module, Options, Param};

const BLOCKS: u32 = 64;
const THREADS: u32 = 128;

fn kernel() -> String {
    let mut body = String::new();
    for j in 0..4 {
        let (a, b, c, d) = (4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3);
        let _ = writeln!(
            body,
            "ld.shared.v4.f32 {{%f{a}, %f{b}, %f{c}, %f{d}}}, [%r5+{}];",
            128 * j
        );
    }
    for row in 0..4 {
        let sum = 40 + row;
        let _ = writeln!(body, "mov.f32 %f{sum}, 0f00000000;");
        for i in 0..16 {
            let state = 48 + row * 16 + i;
            let _ = writeln!(body, "mul.rn.f32 %f{state}, %f{state}, 0f3F7FBE77;");
            let _ = writeln!(body, "fma.rn.f32 %f{sum}, %f{state}, %f{i}, %f{sum};");
        }
        for offset in [4, 2, 1] {
            let _ = writeln!(body, "mov.b32 %r9, %f{sum};");
            let _ = writeln!(body, "shfl.sync.bfly.b32 %r10|%p1, %r9, {offset}, 31, -1;");
            let _ = writeln!(
                body,
                "mov.b32 %f120, %r10;\nadd.rn.f32 %f{sum}, %f{sum}, %f120;"
            );
        }
        for i in 0..16 {
            let state = 48 + row * 16 + i;
            let _ = writeln!(body, "fma.rn.f32 %f{state}, %f{sum}, %f{i}, %f{state};");
        }
    }
    format!(
        ".visible .entry step(.param .u64 out)
        .maxntid {THREADS}
        {{
        .reg .pred %p<4>; .reg .b32 %r<16>; .reg .f32 %f<128>; .reg .b64 %d<8>;
        .shared .align 16 .b8 tile[512];
        ld.param.u64 %d0, [out];
        mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, tile;
        {start}
        and.b32 %r3, %r0, 7; shl.b32 %r4, %r3, 4; add.s32 %r5, %r2, %r4;
        shl.b32 %r6, %r0, 2; add.s32 %r7, %r2, %r6;
        mov.u32 %r8, 0;
        AGAIN:
        cvt.rn.f32.u32 %f121, %r8; mul.rn.f32 %f121, %f121, 0f3C23D70A;
        st.shared.f32 [%r7], %f121;
        bar.sync 0;
        {body}
        bar.sync 0;
        add.s32 %r8, %r8, 1; setp.lt.u32 %p2, %r8, 100; @%p2 bra AGAIN;
        mad.lo.s32 %r11, %r1, {THREADS}, %r0; mul.wide.u32 %d1, %r11, 4; add.s64 %d2, %d0, %d1;
        st.global.f32 [%d2], %f40;
        ret;
        }}",
        start = (48..112)
            .map(|i| format!("mov.f32 %f{i}, 0f3F800000;"))
            .collect::<String>()
    )
}

fn main() {
    let module = Module::parse(&kernel()).expect("the kernel parses");
    let mut memory = Memory::new();
    memory.add_uninitialised("out", 0x1000, u64::from(BLOCKS * THREADS * 4));
    let launch = Launch {
        entry: "step",
        grid: [BLOCKS, 1, 1],
        block: [THREADS, 1, 1],
        cluster: [1, 1, 1],
        dynamic_shared_bytes: 0,
        params: &[Param::U64(0x1000)],
    };
    for check in [true, false] {
        let options = Options::default().check_races(check);
        let start = Instant::now();
        let report = module
            .launch(&mut memory, &launch, &options)
            .expect("the kernel is sound");
        let millions = report.thread_instructions as f64 / start.elapsed().as_secs_f64() / 1e6;
        let how = if check { "checked" } else { "unchecked" };
        println!(
            "{how}: {} thread-instructions, {millions:.0} million a second on one core",
            report.thread_instructions
        );
    }
}
