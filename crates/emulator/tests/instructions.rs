//! Each instruction against a table of values worked out by hand from the ISA's definition.

mod support;

use kda_emulator::{Error, Launch, Memory, Module, Options, Param};
use support::{OUT, Shape, kernel, launch, memory, word};

/// Runs `statement` on operands `a`, `b`, `c`, `e` and returns `d`. `shape` has a letter for each
/// operand, then `>` and one for the result: `h` 16 bits, `w` 32 bits, `d` 64 bits, `p` predicate.
fn eval(statement: &str, shape: &str, inputs: &[u64]) -> Result<u64, Error> {
    let (operands, result) = shape.split_once('>').expect("a shape");
    let mut body = String::new();
    let class = |c: char| match c {
        'h' => ".b16",
        'w' => ".b32",
        'd' => ".b64",
        _ => ".pred",
    };
    for (name, letter) in ["a", "b", "c", "e"].iter().zip(operands.chars()) {
        body += &format!(".reg {} {name};\n", class(letter));
    }
    let result = result.chars().next().expect("a result");
    body += &format!(".reg {} d;\n", class(result));
    for (i, (name, letter)) in ["a", "b", "c", "e"]
        .iter()
        .zip(operands.chars())
        .enumerate()
    {
        body += &match letter {
            'p' => format!("ld.param.u32 %r{i}, [p{i}];\nsetp.ne.u32 {name}, %r{i}, 0;\n"),
            'h' => format!("ld.param.u16 {name}, [p{i}];\n"),
            'w' => format!("ld.param.u32 {name}, [p{i}];\n"),
            _ => format!("ld.param.u64 {name}, [p{i}];\n"),
        };
    }
    let last = inputs.len();
    body += &format!("ld.param.u64 %d9, [p{last}];\n{statement}\n");
    body += match result {
        'p' => "selp.u32 %r9, 1, 0, d;\nst.global.u32 [%d9], %r9;\n",
        'h' => "st.global.u16 [%d9], d;\n",
        'w' => "st.global.u32 [%d9], d;\n",
        _ => "st.global.u64 [%d9], d;\n",
    };
    let text = kernel(inputs.len() + 1, "", &body);
    let mut memory = Memory::new();
    memory.add("out", OUT, vec![0; 8]);
    let mut params = inputs.to_vec();
    params.push(OUT);
    launch(
        &text,
        Shape::block(1),
        &mut memory,
        &params,
        &Options::default(),
    )?;
    let bytes = memory.read("out").try_into().expect("eight bytes");
    Ok(u64::from_le_bytes(bytes))
}

fn check(table: &[(&str, &str, &[u64], u64)]) {
    for (statement, shape, inputs, expected) in table {
        let found = eval(statement, shape, inputs).unwrap_or_else(|e| panic!("{statement}: {e}"));
        assert_eq!(
            found, *expected,
            "{statement} of {inputs:x?}: {found:#x}, expected {expected:#x}"
        );
    }
}

const fn f(x: f32) -> u64 {
    x.to_bits() as u64
}

const fn d(x: f64) -> u64 {
    x.to_bits()
}

const M1: u64 = 0xffff_ffff;
const NAN: u64 = 0x7fff_ffff;

#[test]
fn integers_of_32_bits() {
    check(&[
        ("add.s32 d, a, b;", "ww>w", &[M1, 2], 1),
        ("add.u32 d, a, -3;", "w>w", &[1], 0xffff_fffe),
        ("sub.s32 d, a, b;", "ww>w", &[1, 2], M1),
        (
            "mul.lo.s32 d, a, b;",
            "ww>w",
            &[0x1_0001, 0x1_0001],
            0x2_0001,
        ),
        ("mul.hi.s32 d, a, b;", "ww>w", &[M1, 2], M1),
        ("mul.hi.u32 d, a, b;", "ww>w", &[M1, 2], 1),
        (
            "mul.wide.s32 d, a, b;",
            "ww>d",
            &[M1, 5],
            0xffff_ffff_ffff_fffb,
        ),
        ("mul.wide.u32 d, a, b;", "ww>d", &[M1, 5], 0x4_ffff_fffb),
        ("mad.lo.s32 d, a, b, c;", "www>w", &[7, M1, 10], 3),
        ("mad.hi.u32 d, a, b, c;", "www>w", &[M1, 4, 10], 13),
        (
            "mad.wide.s32 d, a, b, c;",
            "wwd>d",
            &[M1, 3, 1],
            0xffff_ffff_ffff_fffe,
        ),
        (
            "mad.wide.u32 d, a, b, c;",
            "wwd>d",
            &[M1, 2, 2],
            0x2_0000_0000,
        ),
        ("div.s32 d, a, b;", "ww>w", &[0xffff_fff9, 2], 0xffff_fffd),
        ("div.u32 d, a, b;", "ww>w", &[0xffff_fff9, 2], 0x7fff_fffc),
        ("rem.s32 d, a, b;", "ww>w", &[0xffff_fff9, 4], 0xffff_fffd),
        ("rem.u32 d, a, b;", "ww>w", &[10, 4], 2),
        ("abs.s32 d, a;", "w>w", &[0xffff_fff9], 7),
        ("neg.s32 d, a;", "w>w", &[7], 0xffff_fff9),
        ("min.s32 d, a, b;", "ww>w", &[M1, 1], M1),
        ("min.u32 d, a, b;", "ww>w", &[M1, 1], 1),
        ("max.s32 d, a, b;", "ww>w", &[M1, 1], 1),
        ("max.u32 d, a, b;", "ww>w", &[M1, 1], M1),
        ("and.b32 d, a, b;", "ww>w", &[0b1100, 0b1010], 0b1000),
        ("or.b32 d, a, b;", "ww>w", &[0b1100, 0b1010], 0b1110),
        ("xor.b32 d, a, b;", "ww>w", &[0b1100, 0b1010], 0b0110),
        ("not.b32 d, a;", "w>w", &[0], M1),
        ("cnot.b32 d, a;", "w>w", &[0], 1),
        ("shl.b32 d, a, b;", "ww>w", &[3, 31], 0x8000_0000),
        ("shl.b32 d, a, b;", "ww>w", &[3, 32], 0),
        ("shr.u32 d, a, b;", "ww>w", &[M1, 28], 15),
        ("shr.u32 d, a, b;", "ww>w", &[M1, 40], 0),
        ("shr.s32 d, a, b;", "ww>w", &[0x8000_0000, 40], M1),
        ("brev.b32 d, a;", "w>w", &[1], 0x8000_0000),
        ("popc.b32 d, a;", "w>w", &[0xf0f0], 8),
        ("clz.b32 d, a;", "w>w", &[1], 31),
        ("clz.b32 d, a;", "w>w", &[0], 32),
        ("bfind.u32 d, a;", "w>w", &[0x100], 8),
        ("bfind.u32 d, a;", "w>w", &[0], M1),
        ("bfind.s32 d, a;", "w>w", &[0xffff_feff], 8),
        ("bfind.shiftamt.u32 d, a;", "w>w", &[0x100], 23),
        (
            "shf.l.wrap.b32 d, a, b, c;",
            "www>w",
            &[0x8000_0001, 1, 33],
            3,
        ),
        (
            "shf.l.clamp.b32 d, a, b, c;",
            "www>w",
            &[0x8000_0001, 1, 33],
            0x8000_0001,
        ),
        (
            "shf.r.wrap.b32 d, a, b, c;",
            "www>w",
            &[2, 1, 1],
            0x8000_0001,
        ),
        ("shf.r.clamp.b32 d, a, b, c;", "www>w", &[2, 1, 40], 1),
        ("bfe.u32 d, a, b, c;", "www>w", &[0xabcd, 4, 8], 0xbc),
        ("bfe.s32 d, a, b, c;", "www>w", &[0xabcd, 4, 8], 0xffff_ffbc),
        (
            "bfe.s32 d, a, b, c;",
            "www>w",
            &[0x8000_0000, 28, 16],
            0xffff_fff8,
        ),
        ("bfe.u32 d, a, b, c;", "www>w", &[M1, 0, 0], 0),
        ("bfi.b32 d, a, b, c, e;", "wwww>w", &[0xf, 0, 4, 2], 0x30),
        (
            "bfi.b32 d, a, b, c, e;",
            "wwww>w",
            &[0xf, 0xab, 32, 2],
            0xab,
        ),
        (
            "lop3.b32 d, a, b, c, 0x96;",
            "www>w",
            &[0b1100, 0b1010, 0b1111],
            0b1001,
        ),
        (
            "lop3.b32 d, a, b, c, 0xe8;",
            "www>w",
            &[0b1100, 0b1010, 0b0001],
            0b1000,
        ),
        (
            "prmt.b32 d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0x7766_5544, 0x7160],
            0x7711_6600,
        ),
        (
            "prmt.b32 d, a, b, c;",
            "www>w",
            &[0x0000_8000, 0, 0x9999],
            M1,
        ),
        (
            "prmt.b32.f4e d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0x7766_5544, 1],
            0x4433_2211,
        ),
        (
            "prmt.b32.b4e d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0x7766_5544, 1],
            0x6677_0011,
        ),
        (
            "prmt.b32.rc8 d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0, 2],
            0x2222_2222,
        ),
        (
            "prmt.b32.rc16 d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0, 1],
            0x3322_3322,
        ),
        (
            "prmt.b32.ecl d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0, 2],
            0x3322_2222,
        ),
        (
            "prmt.b32.ecr d, a, b, c;",
            "www>w",
            &[0x3322_1100, 0, 1],
            0x1111_1100,
        ),
        (
            "dp2a.lo.u32.u32 d, a, b, c;",
            "www>w",
            &[0x0002_0003, 0x0605_0405, 1],
            0x2 * 4 + 3 * 5 + 1,
        ),
        (
            "dp2a.hi.s32.s32 d, a, b, c;",
            "www>w",
            &[0xffff_0003, 0x0605_0000, 1],
            10,
        ),
        (
            "dp4a.u32.u32 d, a, b, c;",
            "www>w",
            &[0x0102_0304, 0x0101_0101, 5],
            15,
        ),
        (
            "dp4a.s32.s32 d, a, b, c;",
            "www>w",
            &[0xff00_0000, 0x0200_0000, 5],
            3,
        ),
        ("sad.u32 d, a, b, c;", "www>w", &[3, 10, 100], 107),
        ("sad.s32 d, a, b, c;", "www>w", &[M1, 1, 100], 102),
    ]);
}

#[test]
fn integers_of_16_and_64_bits() {
    check(&[
        ("add.s16 d, a, b;", "hh>h", &[0xffff, 2], 1),
        ("sub.s16 d, a, b;", "hh>h", &[1, 2], 0xffff),
        ("mul.lo.s16 d, a, b;", "hh>h", &[0x101, 0x101], 0x0201),
        ("mul.hi.u16 d, a, b;", "hh>h", &[0xffff, 2], 1),
        ("mul.wide.u16 d, a, b;", "hh>w", &[0xffff, 2], 0x1_fffe),
        ("mul.wide.s16 d, a, b;", "hh>w", &[0xffff, 2], 0xffff_fffe),
        ("mad.lo.s16 d, a, b, c;", "hhh>h", &[0x100, 0x100, 5], 5),
        ("div.s16 d, a, b;", "hh>h", &[0xfff9, 2], 0xfffd),
        ("min.s16 d, a, b;", "hh>h", &[0xffff, 2], 0xffff),
        ("max.u16 d, a, b;", "hh>h", &[0xffff, 2], 0xffff),
        ("shr.s16 d, a, b;", "hw>h", &[0x8000, 15], 0xffff),
        ("shr.u16 d, a, b;", "hw>h", &[0x8000, 15], 1),
        ("shl.b16 d, a, b;", "hw>h", &[1, 16], 0),
        ("not.b16 d, a;", "h>h", &[0xff], 0xff00),
        ("add.s64 d, a, b;", "dd>d", &[u64::MAX, 2], 1),
        ("sub.s64 d, a, b;", "dd>d", &[1, 2], u64::MAX),
        ("mul.lo.s64 d, a, b;", "dd>d", &[1 << 40, 1 << 23], 1 << 63),
        ("mul.hi.u64 d, a, b;", "dd>d", &[1 << 40, 1 << 40], 1 << 16),
        ("mul.hi.s64 d, a, b;", "dd>d", &[u64::MAX, 2], u64::MAX),
        ("mad.lo.s64 d, a, b, c;", "ddd>d", &[3, 4, 5], 17),
        (
            "div.s64 d, a, b;",
            "dd>d",
            &[(-7i64) as u64, 2],
            (-3i64) as u64,
        ),
        (
            "rem.u64 d, a, b;",
            "dd>d",
            &[1 << 40, 1000],
            (1 << 40) % 1000,
        ),
        ("min.s64 d, a, b;", "dd>d", &[u64::MAX, 2], u64::MAX),
        ("max.u64 d, a, b;", "dd>d", &[u64::MAX, 2], u64::MAX),
        ("shl.b64 d, a, b;", "dw>d", &[1, 63], 1 << 63),
        ("shl.b64 d, a, b;", "dw>d", &[1, 64], 0),
        ("shr.s64 d, a, b;", "dw>d", &[1 << 63, 70], u64::MAX),
        ("shr.u64 d, a, b;", "dw>d", &[1 << 63, 63], 1),
        ("popc.b64 d, a;", "d>w", &[u64::MAX], 64),
        ("clz.b64 d, a;", "d>w", &[1], 63),
        ("bfind.u64 d, a;", "d>w", &[1 << 40], 40),
        ("brev.b64 d, a;", "d>d", &[1], 1 << 63),
        ("bfe.u64 d, a, b, c;", "dww>d", &[0xab << 40, 40, 8], 0xab),
        (
            "bfi.b64 d, a, b, c, e;",
            "ddww>d",
            &[0xab, 0, 32, 32],
            0xab << 32,
        ),
        (
            "{ .reg .b32 x; add.cc.u32 x, a, b; addc.u32 d, 0, 0; }",
            "ww>w",
            &[M1, 1],
            1,
        ),
        (
            "{ .reg .b32 x; sub.cc.u32 x, a, b; subc.u32 d, 5, 0; }",
            "ww>w",
            &[0, 1],
            4,
        ),
    ]);
}

#[test]
fn floats_of_32_bits() {
    let tiny = f(f32::from_bits(1));
    check(&[
        ("add.f32 d, a, b;", "ww>w", &[f(1.5), f(2.25)], f(3.75)),
        (
            "add.rn.f32 d, a, b;",
            "ww>w",
            &[f(f32::INFINITY), f(f32::NEG_INFINITY)],
            NAN,
        ),
        ("add.ftz.f32 d, a, b;", "ww>w", &[tiny, tiny], 0),
        ("add.f32 d, a, b;", "ww>w", &[tiny, tiny], 2),
        ("add.sat.f32 d, a, b;", "ww>w", &[f(0.75), f(0.75)], f(1.0)),
        ("sub.f32 d, a, b;", "ww>w", &[f(1.5), f(2.25)], f(-0.75)),
        ("mul.f32 d, a, b;", "ww>w", &[f(1.5), f(-2.0)], f(-3.0)),
        ("mul.rn.f32 d, a, 0f40000000;", "w>w", &[f(1.5)], f(3.0)),
        (
            "fma.rn.f32 d, a, b, c;",
            "www>w",
            &[f(1.0 + f32::EPSILON), f(1.0 + f32::EPSILON), f(-1.0)],
            f(2.0 * f32::EPSILON + f32::EPSILON * f32::EPSILON),
        ),
        (
            "fma.rn.ftz.f32 d, a, b, c;",
            "www>w",
            &[tiny, f(1.0), f(0.0)],
            0,
        ),
        (
            "fma.rn.sat.f32 d, a, b, c;",
            "www>w",
            &[f(2.0), f(2.0), f(0.0)],
            f(1.0),
        ),
        (
            "div.rn.f32 d, a, b;",
            "ww>w",
            &[f(1.0), f(3.0)],
            f(1.0 / 3.0),
        ),
        ("div.full.f32 d, a, b;", "ww>w", &[f(1.0), f(4.0)], f(0.25)),
        ("neg.f32 d, a;", "w>w", &[f(0.0)], f(-0.0)),
        ("abs.f32 d, a;", "w>w", &[f(-3.0)], f(3.0)),
        ("min.f32 d, a, b;", "ww>w", &[NAN, f(1.0)], f(1.0)),
        ("min.NaN.f32 d, a, b;", "ww>w", &[NAN, f(1.0)], NAN),
        ("max.f32 d, a, b;", "ww>w", &[f(-0.0), f(0.0)], f(0.0)),
        ("min.f32 d, a, b;", "ww>w", &[f(0.0), f(-0.0)], f(-0.0)),
        ("max.NaN.f32 d, a, b;", "ww>w", &[f(2.0), f(1.0)], f(2.0)),
        ("max.f32 d, a, b;", "ww>w", &[NAN, NAN], NAN),
        ("copysign.f32 d, a, b;", "ww>w", &[f(-1.0), f(3.0)], f(-3.0)),
        (
            "sqrt.rn.f32 d, a;",
            "w>w",
            &[f(2.0)],
            f(std::f32::consts::SQRT_2),
        ),
        ("sqrt.approx.f32 d, a;", "w>w", &[f(4.0)], f(2.0)),
        ("rcp.rn.f32 d, a;", "w>w", &[f(4.0)], f(0.25)),
        ("rcp.approx.ftz.f32 d, a;", "w>w", &[f(f32::INFINITY)], 0),
        ("rcp.approx.ftz.f32 d, a;", "w>w", &[tiny], f(f32::INFINITY)),
        ("rsqrt.approx.ftz.f32 d, a;", "w>w", &[f(0.25)], f(2.0)),
        ("rsqrt.approx.f32 d, a;", "w>w", &[f(-1.0)], NAN),
        ("ex2.approx.ftz.f32 d, a;", "w>w", &[f(-3.0)], f(0.125)),
        ("ex2.approx.ftz.f32 d, a;", "w>w", &[f(-130.0)], 0),
        ("ex2.approx.f32 d, a;", "w>w", &[f(f32::NEG_INFINITY)], 0),
        ("lg2.approx.f32 d, a;", "w>w", &[f(8.0)], f(3.0)),
        ("sin.approx.f32 d, a;", "w>w", &[f(0.0)], 0),
        ("cos.approx.f32 d, a;", "w>w", &[f(0.0)], f(1.0)),
        ("tanh.approx.f32 d, a;", "w>w", &[f(0.0)], 0),
        ("testp.infinite.f32 d, a;", "w>p", &[f(f32::INFINITY)], 1),
        ("testp.subnormal.f32 d, a;", "w>p", &[tiny], 1),
        ("testp.finite.f32 d, a;", "w>p", &[NAN], 0),
    ]);
}

#[test]
fn floats_of_64_and_16_bits_and_pairs() {
    let two = |a: f32, b: f32| f(a) | f(b) << 32;
    check(&[
        ("add.f64 d, a, b;", "dd>d", &[d(0.1), d(0.2)], d(0.1 + 0.2)),
        ("mul.rn.f64 d, a, b;", "dd>d", &[d(3.0), d(0.5)], d(1.5)),
        (
            "fma.rn.f64 d, a, b, c;",
            "ddd>d",
            &[d(3.0), d(0.5), d(1.0)],
            d(2.5),
        ),
        (
            "div.rn.f64 d, a, b;",
            "dd>d",
            &[d(1.0), d(3.0)],
            d(1.0 / 3.0),
        ),
        ("sqrt.rn.f64 d, a;", "d>d", &[d(9.0)], d(3.0)),
        ("neg.f64 d, a;", "d>d", &[d(9.0)], d(-9.0)),
        ("max.f64 d, a, b;", "dd>d", &[d(9.0), d(-1.0)], d(9.0)),
        (
            "add.rn.f32x2 d, a, b;",
            "dd>d",
            &[two(1.0, 2.0), two(10.0, 20.0)],
            two(11.0, 22.0),
        ),
        (
            "mul.rn.f32x2 d, a, b;",
            "dd>d",
            &[two(3.0, 2.0), two(10.0, 20.0)],
            two(30.0, 40.0),
        ),
        (
            "fma.rn.f32x2 d, a, b, c;",
            "ddd>d",
            &[two(3.0, 2.0), two(10.0, 20.0), two(1.0, -1.0)],
            two(31.0, 39.0),
        ),
        // bf16: 1.0 = 3f80, 2.0 = 4000, 1.0078125 = 3f81.
        ("add.rn.bf16 d, a, b;", "hh>h", &[0x3f80, 0x3f80], 0x4000),
        (
            "fma.rn.bf16 d, a, b, c;",
            "hhh>h",
            &[0x3f81, 0x3f81, 0xbf80],
            0x3c80,
        ),
        (
            "mul.rn.bf16x2 d, a, b;",
            "ww>w",
            &[0x4000_3f80, 0x4000_4000],
            0x4080_4000,
        ),
        (
            "max.bf16x2 d, a, b;",
            "ww>w",
            &[0x4000_3f80, 0x3f80_4000],
            0x4000_4000,
        ),
        (
            "fma.rn.relu.bf16 d, a, b, c;",
            "hhh>h",
            &[0x3f80, 0xbf80, 0],
            0,
        ),
        ("neg.bf16 d, a;", "h>h", &[0x3f80], 0xbf80),
        // f16: 1.0 = 3c00, 2.0 = 4000, 65504 = 7bff, smallest subnormal = 1.
        ("add.f16 d, a, b;", "hh>h", &[0x3c00, 0x3c00], 0x4000),
        ("add.f16 d, a, b;", "hh>h", &[0x7bff, 0x7bff], 0x7c00),
        ("mul.f16 d, a, b;", "hh>h", &[0x0001, 0x3c00], 1),
        (
            "fma.rn.f16x2 d, a, b, c;",
            "www>w",
            &[0x3c00_3c00, 0x4000_3c00, 0x3c00_0000],
            0x4200_3c00,
        ),
        ("ex2.approx.f16 d, a;", "h>h", &[0x3c00], 0x4000),
    ]);
}

#[test]
fn conversions() {
    check(&[
        ("cvt.u32.u16 d, a;", "h>w", &[0xffff], 0xffff),
        ("cvt.s32.s16 d, a;", "h>w", &[0xffff], M1),
        ("cvt.u16.u32 d, a;", "w>h", &[0x1_2345], 0x2345),
        ("cvt.s32.s8 d, a;", "w>w", &[0x1ff], M1),
        ("cvt.u32.u8 d, a;", "w>w", &[0x1ff], 0xff),
        ("cvt.u64.u32 d, a;", "w>d", &[M1], M1),
        ("cvt.s64.s32 d, a;", "w>d", &[M1], u64::MAX),
        ("cvt.u32.u64 d, a;", "d>w", &[0x1_0000_0002], 2),
        ("cvt.s64.s8 d, a;", "w>d", &[0x80], (-128i64) as u64),
        ("cvt.u64.u16 d, a;", "h>d", &[0xffff], 0xffff),
        ("cvt.sat.s8.s32 d, a;", "w>w", &[1000], 127),
        ("cvt.sat.u16.s32 d, a;", "w>h", &[M1], 0),
        ("cvt.rn.f32.s32 d, a;", "w>w", &[M1], f(-1.0)),
        ("cvt.rn.f32.u32 d, a;", "w>w", &[M1], f(4_294_967_296.0)),
        (
            "cvt.rn.f32.s64 d, a;",
            "d>w",
            &[(1 << 60) + (1 << 36) + 1],
            f(((1u64 << 60) + (1 << 37)) as f32),
        ),
        ("cvt.rn.f64.s32 d, a;", "w>d", &[M1], d(-1.0)),
        ("cvt.rzi.s32.f32 d, a;", "w>w", &[f(-2.75)], 0xffff_fffe),
        ("cvt.rzi.s32.f32 d, a;", "w>w", &[f(1e20)], 0x7fff_ffff),
        ("cvt.rzi.s32.f32 d, a;", "w>w", &[NAN], 0),
        ("cvt.rzi.u32.f32 d, a;", "w>w", &[f(-1.0)], 0),
        ("cvt.rni.s32.f32 d, a;", "w>w", &[f(2.5)], 2),
        ("cvt.rmi.s32.f32 d, a;", "w>w", &[f(-2.5)], 0xffff_fffd),
        ("cvt.rpi.s32.f32 d, a;", "w>w", &[f(2.1)], 3),
        ("cvt.rzi.s64.f32 d, a;", "w>d", &[f(-3.5)], (-3i64) as u64),
        ("cvt.rni.f32.f32 d, a;", "w>w", &[f(3.5)], f(4.0)),
        ("cvt.rni.f32.f32 d, a;", "w>w", &[f(-0.25)], f(-0.0)),
        ("cvt.rzi.f32.f32 d, a;", "w>w", &[f(-3.5)], f(-3.0)),
        ("cvt.rmi.f32.f32 d, a;", "w>w", &[f(-3.5)], f(-4.0)),
        ("cvt.sat.f32.f32 d, a;", "w>w", &[f(7.0)], f(1.0)),
        ("cvt.f64.f32 d, a;", "w>d", &[f(0.1)], d(0.1f32 as f64)),
        ("cvt.rn.f32.f64 d, a;", "d>w", &[d(0.1)], f(0.1)),
        ("cvt.rn.bf16.f32 d, a;", "w>h", &[0x3f80_8000], 0x3f80),
        ("cvt.rn.bf16.f32 d, a;", "w>h", &[0x3f81_8000], 0x3f82),
        ("cvt.rn.bf16.f32 d, a;", "w>h", &[0x3f80_8001], 0x3f81),
        ("cvt.rz.bf16.f32 d, a;", "w>h", &[0x3f80_ffff], 0x3f80),
        ("cvt.rn.bf16.f32 d, a;", "w>h", &[0xffc0_0000], 0x7fff),
        (
            "cvt.rn.bf16x2.f32 d, a, b;",
            "ww>w",
            &[f(2.0), f(1.0)],
            0x4000_3f80,
        ),
        (
            "cvt.rn.relu.bf16x2.f32 d, a, b;",
            "ww>w",
            &[f(-2.0), f(1.0)],
            0x0000_3f80,
        ),
        (
            "cvt.rn.f16x2.f32 d, a, b;",
            "ww>w",
            &[f(2.0), f(1.0)],
            0x4000_3c00,
        ),
        ("cvt.f32.bf16 d, a;", "h>w", &[0x3fc0], f(1.5)),
        ("cvt.rn.f16.f32 d, a;", "w>h", &[f(65520.0)], 0x7c00),
        ("cvt.rn.f16.f32 d, a;", "w>h", &[f(65519.0)], 0x7bff),
        ("cvt.rn.f16.f32 d, a;", "w>h", &[f(5.960_464_5e-8)], 1),
        ("cvt.rn.f16.f32 d, a;", "w>h", &[f(2.0f32.powi(-25))], 0),
        ("cvt.f32.f16 d, a;", "h>w", &[1], f(5.960_464_5e-8)),
        ("cvt.f32.f16 d, a;", "h>w", &[0xc000], f(-2.0)),
    ]);
}

#[test]
fn predicates_and_selection() {
    check(&[
        ("setp.lt.s32 d, a, b;", "ww>p", &[M1, 0], 1),
        ("setp.lt.u32 d, a, b;", "ww>p", &[M1, 0], 0),
        ("setp.hi.u32 d, a, b;", "ww>p", &[M1, 0], 1),
        ("setp.eq.s64 d, a, b;", "dd>p", &[u64::MAX, u64::MAX], 1),
        ("setp.ge.s16 d, a, b;", "hh>p", &[0xffff, 0], 0),
        ("setp.lt.f32 d, a, b;", "ww>p", &[NAN, f(1.0)], 0),
        ("setp.ltu.f32 d, a, b;", "ww>p", &[NAN, f(1.0)], 1),
        ("setp.neu.f32 d, a, b;", "ww>p", &[f(1.0), f(1.0)], 0),
        ("setp.ne.f32 d, a, b;", "ww>p", &[NAN, f(1.0)], 0),
        ("setp.num.f32 d, a, b;", "ww>p", &[f(1.0), f(1.0)], 1),
        ("setp.nan.f32 d, a, b;", "ww>p", &[f(1.0), NAN], 1),
        ("setp.eq.ftz.f32 d, a, b;", "ww>p", &[1, 0], 1),
        ("setp.gt.f64 d, a, b;", "dd>p", &[d(2.0), d(1.0)], 1),
        ("setp.lt.and.s32 d, a, b, c;", "wwp>p", &[1, 2, 0], 0),
        ("setp.lt.or.s32 d, a, b, !c;", "wwp>p", &[3, 2, 0], 1),
        ("setp.lt.xor.s32 d, a, b, c;", "wwp>p", &[1, 2, 1], 0),
        ("setp.lt.s32 %p1|d, a, b;", "ww>p", &[1, 2], 0),
        ("selp.b32 d, a, b, c;", "wwp>w", &[1, 2, 0], 2),
        ("selp.f32 d, 0f3F800000, a, c;", "wwp>w", &[1, 2, 1], f(1.0)),
        ("selp.b64 d, a, b, c;", "ddp>d", &[1, 2, 1], 1),
        ("slct.s32.s32 d, a, b, c;", "www>w", &[1, 2, M1], 2),
        ("slct.u32.f32 d, a, b, c;", "www>w", &[1, 2, f(0.5)], 1),
        ("set.lt.u32.s32 d, a, b;", "ww>w", &[1, 2], M1),
        ("set.lt.f32.s32 d, a, b;", "ww>w", &[1, 2], f(1.0)),
        ("and.pred d, a, b;", "pp>p", &[1, 0], 0),
        ("or.pred d, a, b;", "pp>p", &[1, 0], 1),
        ("xor.pred d, a, b;", "pp>p", &[1, 1], 0),
        ("not.pred d, a;", "p>p", &[0], 1),
        ("mov.pred d, a;", "p>p", &[1], 1),
        ("mov.b32 d, {a, b};", "hh>w", &[0x1111, 0x2222], 0x2222_1111),
        ("mov.b64 d, {a, b};", "ww>d", &[1, 2], 0x2_0000_0001),
        (
            "{ .reg .b32 x, y; mov.b64 {x, y}, a; sub.s32 d, y, x; }",
            "d>w",
            &[0x7_0000_0002],
            5,
        ),
        (
            "{ .reg .b16 x, y; mov.b32 {x, y}, a; mov.b32 d, {y, x}; }",
            "w>w",
            &[0x1111_2222],
            0x2222_1111,
        ),
        (
            "{ .reg .b32 y; mov.b64 {_, y}, a; mov.b32 d, y; }",
            "d>w",
            &[0x7_0000_0002],
            7,
        ),
        ("@a mov.u32 d, 1; @!a mov.u32 d, 2;", "p>w", &[0], 2),
    ]);
}

const LANES: &str = "ld.param.u64 %d0, [p0];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %d2, %r0, 4;\nadd.s64 %d3, %d0, %d2;\nand.b32 %r1, %r0, 31;";

/// What each of 32 lanes leaves in `%r9`.
fn lanes(body: &str) -> Vec<u32> {
    let text = kernel(
        1,
        "",
        &format!("{LANES}\n{body}\nst.global.u32 [%d3], %r9;\nret;"),
    );
    let mut memory = memory();
    launch(
        &text,
        Shape::block(32),
        &mut memory,
        &[OUT],
        &Options::default(),
    )
    .unwrap_or_else(|e| panic!("{body}: {e}"));
    (0..32).map(|i| word(&memory, "out", i)).collect()
}

#[test]
fn instructions_across_lanes() {
    type Case = (&'static str, fn(u32) -> u32);
    let table: [Case; 20] = [
        ("shfl.sync.bfly.b32 %r9|%p1, %r0, 5, 31, -1;", |i| i ^ 5),
        ("shfl.sync.idx.b32 %r9, %r0, 9, 31, -1;", |_| 9),
        ("shfl.sync.idx.b32 %r9, %r0, 1, 6175, -1;", |i| {
            i / 8 * 8 + 1
        }),
        ("shfl.sync.up.b32 %r9, %r0, 3, 0, -1;", |i| {
            if i < 3 { i } else { i - 3 }
        }),
        ("shfl.sync.down.b32 %r9, %r0, 3, 31, -1;", |i| {
            if i > 28 { i } else { i + 3 }
        }),
        (
            "shfl.sync.down.b32 %r8|%p1, %r0, 3, 31, -1;\nselp.u32 %r9, 1, 0, %p1;",
            |i| u32::from(i <= 28),
        ),
        ("shfl.sync.up.b32 %r9, %r0, 1, 6144, -1;", |i| {
            if i % 8 == 0 { i } else { i - 1 }
        }),
        (
            "setp.lt.u32 %p1, %r0, 5;\nvote.sync.ballot.b32 %r9, %p1, -1;",
            |_| 31,
        ),
        (
            "setp.lt.u32 %p1, %r0, 5;\nvote.sync.any.pred %p2, %p1, -1;\nselp.u32 %r9, 1, 0, %p2;",
            |_| 1,
        ),
        (
            "setp.lt.u32 %p1, %r0, 5;\nvote.sync.all.pred %p2, !%p1, -1;\nselp.u32 %r9, 1, 0, %p2;",
            |_| 0,
        ),
        (
            "setp.lt.u32 %p1, %r0, 50;\nvote.sync.uni.pred %p2, %p1, -1;\nselp.u32 %r9, 1, 0, %p2;",
            |_| 1,
        ),
        ("redux.sync.add.s32 %r9, %r0, -1;", |_| 496),
        ("redux.sync.max.u32 %r9, %r0, -1;", |_| 31),
        ("redux.sync.xor.b32 %r9, %r0, -1;", |_| 0),
        (
            "elect.sync %r9|%p1, -1;\n@%p1 add.s32 %r9, %r9, 100;",
            |i| if i == 0 { 100 } else { 0 },
        ),
        (
            "and.b32 %r2, %r0, 3;\nmatch.any.sync.b32 %r9, %r2, -1;",
            |i| 0x1111_1111 << (i % 4),
        ),
        ("activemask.b32 %r9;", |_| u32::MAX),
        ("mov.u32 %r9, %lanemask_lt;", |i| (1 << i) - 1),
        ("mov.u32 %r9, %laneid;", |i| i),
        // Both sides of a branch, then the lanes together again.
        (
            "setp.lt.u32 %p1, %r0, 7;\nmov.u32 %r9, 1;\n@%p1 bra L;\nmov.u32 %r9, 2;\nL:\nshfl.sync.bfly.b32 %r9, %r9, 16, 31, -1;",
            |i| {
                if (i ^ 16) < 7 { 1 } else { 2 }
            },
        ),
    ];
    for (body, expected) in table {
        let expected: Vec<u32> = (0..32).map(expected).collect();
        assert_eq!(lanes(body), expected, "{body}");
    }
}

#[test]
fn atomics_return_what_was_there() {
    let table: [(&str, u32, u32); 9] = [
        ("atom.shared.add.u32 %r9, [%r5], 7;", 100, 107),
        ("atom.shared.min.s32 %r9, [%r5], -7;", 100, 0xffff_fff9),
        ("atom.shared.max.u32 %r9, [%r5], -7;", 100, 0xffff_fff9),
        ("atom.shared.exch.b32 %r9, [%r5], 9;", 100, 9),
        ("atom.shared.cas.b32 %r9, [%r5], 100, 9;", 100, 9),
        ("atom.shared.cas.b32 %r9, [%r5], 101, 9;", 100, 100),
        ("atom.shared.inc.u32 %r9, [%r5], 100;", 100, 0),
        (
            "atom.relaxed.cta.shared::cta.or.b32 %r9, [%r5], 3;",
            100,
            103,
        ),
        ("mov.u32 %r9, 100;\nred.shared.and.b32 [%r5], 96;", 100, 96),
    ];
    for (statement, old, new) in table {
        let body = format!(
            ".shared .align 4 .b8 cell[4];\nmov.u32 %r5, cell;\nld.param.u64 %d0, [p0];\nst.shared.u32 [%r5], 100;\n{statement}\nld.shared.u32 %r8, [%r5];\nst.global.v2.u32 [%d0], {{%r9, %r8}};\nret;"
        );
        let mut memory = memory();
        launch(
            &kernel(1, "", &body),
            Shape::block(1),
            &mut memory,
            &[OUT],
            &Options::default(),
        )
        .unwrap_or_else(|e| panic!("{statement}: {e}"));
        assert_eq!(
            (word(&memory, "out", 0), word(&memory, "out", 1)),
            (old, new),
            "{statement}"
        );
    }
}

#[test]
fn widths_and_signs_of_loads() {
    let body = "ld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];
        mov.u32 %r1, -2;
        st.global.u32 [%d0], %r1;
        ld.global.u8 %h1, [%d0];
        ld.global.s8 %r2, [%d0];
        ld.global.s16 %r3, [%d0];
        ld.global.u16 %r4, [%d0];
        cvt.u32.u16 %r5, %h1;
        ld.global.nc.v4.u32 {%r6, %r7, %r8, %r9}, [%d1+16];
        st.global.v4.u32 [%d0+16], {%r2, %r3, %r4, %r5};
        st.global.v4.b32 [%d0+32], {%r6, %r7, %r8, %r9};
        ld.global.v2.u64 {%d5, %d6}, [%d1+16];
        st.global.u64 [%d0+48], %d6;
        ret;";
    let mut memory = memory();
    launch(
        &kernel(2, "", body),
        Shape::block(1),
        &mut memory,
        &[OUT, support::IN],
        &Options::default(),
    )
    .expect("sound");
    let words: Vec<u32> = (4..14).map(|i| word(&memory, "out", i)).collect();
    assert_eq!(
        words,
        [u32::MAX - 1, u32::MAX - 1, 0xfffe, 0xfe, 4, 5, 6, 7, 6, 7]
    );
}

#[test]
fn generic_addresses_reach_every_space() {
    let body = ".shared .align 4 .b8 tile[128]; .local .align 4 .b8 frame[16];
        ld.param.u64 %d0, [p0];
        mov.u64 %d1, tile; cvta.shared.u64 %d2, %d1;
        mov.u64 %d3, frame; cvta.local.u64 %d4, %d3;
        st.u32 [%d2+4], 11; st.u32 [%d4+8], 22;
        ld.shared.u32 %r1, [tile+4]; ld.local.u32 %r2, [frame+8];
        cvta.to.shared.u64 %d5, %d2; ld.shared.u32 %r3, [%d5+4];
        cvta.global.u64 %d6, %d0; cvta.to.global.u64 %d7, %d6;
        st.global.v2.u32 [%d7], {%r1, %r2};
        isspacep.shared %p1, %d2; isspacep.local %p2, %d2; isspacep.global %p3, %d0;
        selp.u32 %r4, 1, 0, %p1; @%p2 add.s32 %r4, %r4, 2; @%p3 add.s32 %r4, %r4, 4;
        st.global.v2.u32 [%d7+8], {%r3, %r4};
        ret;";
    let mut memory = memory();
    launch(
        &kernel(1, "", body),
        Shape::block(1),
        &mut memory,
        &[OUT],
        &Options::default(),
    )
    .expect("sound");
    assert_eq!(
        [0, 1, 2, 3].map(|i| word(&memory, "out", i)),
        [11, 22, 11, 5]
    );
}

#[test]
fn special_registers_of_a_cluster() {
    let text = kernel(
        1,
        ".reqnctapercluster 2, 1, 1\n.maxntid 64",
        "ld.param.u64 %d0, [p0];
        mov.u32 %r0, %tid.x; setp.ne.u32 %p1, %r0, 63; @%p1 bra END;
        mov.u32 %r1, %ctaid.x; mul.wide.u32 %d1, %r1, 32; add.s64 %d2, %d0, %d1;
        mov.u32 %r2, %clusterid.x; mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %cluster_nctaid.x;
        mov.u32 %r5, %nctaid.x; mov.u32 %r6, %ntid.x; mov.u32 %r7, %dynamic_smem_size;
        st.global.v4.u32 [%d2], {%r1, %r2, %r3, %r4};
        st.global.v4.u32 [%d2+16], {%r5, %r6, %r7, %r0};
        END: ret;",
    );
    let mut memory = memory();
    let shape = Shape {
        blocks: 4,
        threads: 64,
        cluster: 2,
        dynamic: 256,
    };
    launch(&text, shape, &mut memory, &[OUT], &Options::default()).expect("sound");
    for block in 0..4u32 {
        let row: Vec<u32> = (0..8)
            .map(|i| word(&memory, "out", block as usize * 8 + i))
            .collect();
        assert_eq!(row, [block, block / 2, block % 2, 2, 4, 64, 256, 63]);
    }
    let wrong = Shape {
        cluster: 4,
        ..shape
    };
    let error = launch(&text, wrong, &mut memory, &[OUT], &Options::default())
        .expect_err("another cluster");
    assert!(matches!(error, Error::Dimensions { .. }), "{error}");
    let wrong = Shape {
        threads: 96,
        ..shape
    };
    let error =
        launch(&text, wrong, &mut memory, &[OUT], &Options::default()).expect_err("a larger block");
    assert!(matches!(error, Error::Dimensions { .. }), "{error}");
}

/// D = A B + C for small integers, against the sums written out.
#[test]
fn matrix_multiply_of_bf16() {
    // A[i][k] = i + k, B[k][j] = k - j, C = 1; lane l holds rows l/4 and l/4 + 8.
    let bf = |x: i32| u32::from(((x as f32).to_bits() >> 16) as u16);
    let pair = |x: i32, y: i32| bf(x) | bf(y) << 16;
    let mut fragments = Vec::new();
    for lane in 0..32 {
        let (g, m) = (lane / 4, lane % 4 * 2);
        let a = |row: i32, k: i32| pair(row + k, row + k + 1);
        fragments.extend([a(g, m), a(g + 8, m), a(g, m + 8), a(g + 8, m + 8)]);
        fragments.extend([pair(m - g, m + 1 - g), pair(m + 8 - g, m + 9 - g), 0, 0]);
    }
    let body = "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
        mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 32; add.s64 %d3, %d1, %d2; mul.wide.u32 %d4, %r0, 16; add.s64 %d5, %d0, %d4;
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d3]; ld.global.v2.u32 {%r5, %r6}, [%d3+16];
        mov.f32 %f1, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f1, %f1, %f1};
        st.global.v4.f32 [%d5], {%f2, %f3, %f4, %f5};
        ret;";
    let mut memory = Memory::new();
    memory.add_uninitialised("out", OUT, 512);
    memory.add(
        "in",
        support::IN,
        fragments.into_iter().flat_map(u32::to_le_bytes).collect(),
    );
    launch(
        &kernel(2, "", body),
        Shape::block(32),
        &mut memory,
        &[OUT, support::IN],
        &Options::default(),
    )
    .expect("sound");
    for lane in 0..32 {
        for i in 0..4 {
            let (row, column) = (
                (lane / 4 + 8 * (i / 2)) as i32,
                (lane % 4 * 2 + i % 2) as i32,
            );
            let expected: i32 = 1 + (0..16).map(|k| (row + k) * (k - column)).sum::<i32>();
            assert_eq!(
                word(&memory, "out", lane * 4 + i),
                (expected as f32).to_bits(),
                "row {row} column {column}"
            );
        }
    }
}

#[test]
fn matrices_loaded_from_shared_memory() {
    for (modifier, expected) in [("", [0u32, 1]), (".trans", [0, 8])] {
        // 8x8 matrix of 16-bit numbers r * 8 + c; lane l gets row l/4, columns 2(l%4) and the next.
        let body = format!(
            ".shared .align 16 .b8 tile[128];
            ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, tile;
            shl.b32 %r2, %r0, 1; cvt.u16.u32 %h1, %r2; add.s16 %h2, %h1, 1; mov.b32 %r3, {{%h1, %h2}};
            shl.b32 %r4, %r0, 2; add.s32 %r5, %r1, %r4; st.shared.u32 [%r5], %r3;
            bar.sync 0;
            and.b32 %r6, %r0, 7; shl.b32 %r6, %r6, 4; add.s32 %r6, %r1, %r6;
            ldmatrix.sync.aligned.m8n8.x1{modifier}.shared.b16 {{%r7}}, [%r6];
            mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; st.global.u32 [%d3], %r7; ret;"
        );
        let mut memory = memory();
        launch(
            &kernel(1, "", &body),
            Shape::block(32),
            &mut memory,
            &[OUT],
            &Options::default(),
        )
        .expect("sound");
        assert_eq!(word(&memory, "out", 0), expected[0] | expected[1] << 16);
        let last = if modifier.is_empty() {
            [62, 63]
        } else {
            [55, 63]
        };
        assert_eq!(word(&memory, "out", 31), last[0] | last[1] << 16);
    }
}

#[test]
fn unknown_instructions_are_parse_errors() {
    for statement in [
        "wgmma.fence.sync.aligned;",
        "add.rz.f32 %f1, %f1, %f1;",
        "ex2.f32 %f1, %f1;",
        "ld.global.u32.bogus %r1, [%d1];",
        "setp.lt.frob.s32 %p1, %r1, %r2;",
        "mul.s32 %r1, %r1, %r1;",
        "call foo;",
        "cvt.s32.f32 %r1, %f1;",
    ] {
        let text = kernel(0, "", &format!("{statement}\nret;"));
        let error = Module::parse(&text).expect_err(statement);
        match error {
            Error::UnknownInstruction { line, .. } => {
                assert_eq!(line, support::line_of(&text, statement), "{statement}")
            }
            Error::UnknownName { .. } if statement.starts_with("call") => {}
            other => panic!("{statement}: {other}"),
        }
    }
    let error =
        Module::parse(&kernel(0, "", "mov.u32 %r1, nobody;")).expect_err("a name nobody declares");
    assert!(matches!(error, Error::UnknownName { .. }), "{error}");
}

#[test]
fn parameters_are_checked_against_the_declaration() {
    let text = ".visible .entry k(.param .u64 a, .param .align 8 .b8 s[24], .param .f32 x)\n{ .reg .b32 %r<4>; .reg .b64 %d<4>;
        ld.param.u64 %d0, [a]; ld.param.v2.u32 {%r0, %r1}, [s+16]; ld.param.f32 %r2, [x];
        st.global.v2.u32 [%d0], {%r0, %r1}; st.global.u32 [%d0+8], %r2; ret; }";
    let module = Module::parse(text).expect("parses");
    assert_eq!(module.entries(), ["k"]);
    let run = |params: &[Param]| {
        let mut memory = memory();
        let launch = Launch {
            entry: "k",
            grid: [1; 3],
            block: [1; 3],
            cluster: [1; 3],
            dynamic_shared_bytes: 0,
            params,
        };
        let report = module.launch(&mut memory, &launch, &Options::default())?;
        assert_eq!(report.clusters, 1);
        Ok([0, 1, 2].map(|i| word(&memory, "out", i)))
    };
    let bytes: Vec<u8> = (0..24).collect();
    let good = [Param::U64(OUT), Param::Bytes(bytes), Param::F32(1.0)];
    assert_eq!(run(&good), Ok([0x1312_1110, 0x1716_1514, f(1.0) as u32]));
    assert_eq!(
        run(&good[..2]),
        Err(Error::ParamCount {
            found: 2,
            expected: 3
        })
    );
    let short = [Param::U64(OUT), Param::Bytes(vec![0; 16]), Param::F32(1.0)];
    assert_eq!(
        run(&short),
        Err(Error::ParamSize {
            index: 1,
            found_bytes: 16,
            expected_bytes: 24
        })
    );
}

#[test]
fn sparse_buffers_end_with_their_ranges() {
    let text = kernel(
        1,
        "",
        "ld.param.u64 %d0, [p0]; ld.global.u32 %r1, [%d0+1048576]; st.global.u32 [%d0+1048580], %r1; ret;",
    );
    let mut memory = Memory::new();
    memory.add_sparse(
        "pool",
        OUT,
        1 << 30,
        vec![(0, vec![0; 16]), (1 << 20, vec![7; 8])],
    );
    launch(
        &text,
        Shape::block(1),
        &mut memory,
        &[OUT],
        &Options::default(),
    )
    .expect("inside a range");
    assert_eq!(memory.ranges("pool")[1], (1 << 20, [7; 8].as_slice()));
    let error = launch(
        &text,
        Shape::block(1),
        &mut memory,
        &[OUT + 4],
        &Options::default(),
    )
    .expect_err("past the range");
    assert!(
        matches!(error, Error::OutOfBounds { ref place, .. } if place.buffer == "pool" && place.offset == (1 << 20) + 8),
        "{error}"
    );
}
