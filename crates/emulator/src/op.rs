//! One decoded instruction.

use crate::ir::{
    Access, Addr, Async, Atomic, Cmp, Count, FenceKind, Float, HalfKind, Int, Logic, Mbar, R, Reg,
    Rounding, ShflMode, Space, TestKind, Ty, VoteMode,
};

/// One decoded instruction. The register files are implied by the operation.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Mov32 {
        d: R,
        a: R,
    },
    Mov64 {
        d: R,
        a: R,
    },
    MovPred {
        d: R,
        a: R,
    },
    Int32 {
        f: Int,
        d: R,
        a: R,
        b: R,
    },
    Int64 {
        f: Int,
        d: R,
        a: R,
        b: R,
    },
    Int16 {
        f: Int,
        d: R,
        a: R,
        b: R,
    },
    /// A 64-bit shift: the amount is 32 bits wide.
    Shift64 {
        f: Int,
        d: R,
        a: R,
        b: R,
    },
    /// Add or subtract with the carry flag: `carry` reads it, `set` writes it.
    Carry {
        sub: bool,
        wide: bool,
        carry: bool,
        set: bool,
        d: R,
        a: R,
        b: R,
    },
    /// popc, clz, bfind: 32-bit result of a 32- or 64-bit operand.
    Count {
        f: Count,
        wide: bool,
        d: R,
        a: R,
    },
    MulWide32 {
        signed: bool,
        d: R,
        a: R,
        b: R,
    },
    MulWide16 {
        signed: bool,
        d: R,
        a: R,
        b: R,
    },
    MadWide32 {
        signed: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    MadWide16 {
        signed: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    /// mad: the product by `f` (Mul, MulHiS or MulHiU), then the sum.
    Mad32 {
        f: Int,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Mad64 {
        f: Int,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Mad16 {
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Shf {
        left: bool,
        clamp: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Prmt {
        d: R,
        a: R,
        b: R,
        c: R,
        mode: u8,
    },
    Bfe {
        wide: bool,
        signed: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Bfi {
        wide: bool,
        d: R,
        a: R,
        b: R,
        c: R,
        e: R,
    },
    Lop3 {
        d: R,
        a: R,
        b: R,
        c: R,
        table: u8,
    },
    Dp2a {
        high: bool,
        signed_a: bool,
        signed_b: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Dp4a {
        signed_a: bool,
        signed_b: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Sad {
        signed: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    /// Sign- or zero-extends the low `from` bits; 32-bit result.
    Extend32 {
        signed: bool,
        from: u8,
        to: u8,
        d: R,
        a: R,
    },
    /// The same from a 32-bit register into a 64-bit one.
    Extend64 {
        signed: bool,
        from: u8,
        d: R,
        a: R,
    },
    /// The low bits of a 64-bit register, extended from `from` bits.
    Narrow {
        signed: bool,
        from: u8,
        to: u8,
        d: R,
        a: R,
    },
    F32x1 {
        f: Float,
        ftz: bool,
        sat: bool,
        d: R,
        a: R,
    },
    F32x2 {
        f: Float,
        ftz: bool,
        sat: bool,
        d: R,
        a: R,
        b: R,
    },
    Fma32 {
        ftz: bool,
        sat: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    F64 {
        f: Float,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    /// Two f32 in a 64-bit register.
    Packed {
        f: Float,
        ftz: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    /// One or two 16-bit floats in a 32-bit register.
    Half {
        f: Float,
        kind: HalfKind,
        pair: bool,
        ftz: bool,
        relu: bool,
        d: R,
        a: R,
        b: R,
        c: R,
    },
    Setp {
        cmp: Cmp,
        ty: Ty,
        ftz: bool,
        d: R,
        q: Option<R>,
        a: Reg,
        b: Reg,
        combine: Option<(Logic, R, bool)>,
    },
    /// A comparison into a register: all ones or 1.0.
    Set {
        cmp: Cmp,
        ty: Ty,
        ftz: bool,
        float: bool,
        d: R,
        a: Reg,
        b: Reg,
    },
    Selp32 {
        d: R,
        a: R,
        b: R,
        p: R,
    },
    Selp64 {
        d: R,
        a: R,
        b: R,
        p: R,
    },
    Slct {
        d: Reg,
        a: Reg,
        b: Reg,
        c: R,
        float: bool,
    },
    PredLogic {
        f: Logic,
        d: R,
        a: R,
        b: R,
    },
    PredNot {
        d: R,
        a: R,
    },
    Cvt {
        to: Ty,
        from: Ty,
        round: Rounding,
        sat: bool,
        ftz: bool,
        relu: bool,
        d: Reg,
        a: Reg,
    },
    CvtPair {
        kind: HalfKind,
        zero: bool,
        relu: bool,
        d: R,
        a: R,
        b: R,
    },
    CvtF32I32 {
        d: R,
        a: R,
    },
    Round32 {
        d: R,
        a: R,
        round: Rounding,
    },
    Testp {
        what: TestKind,
        d: R,
        a: Reg,
    },
    /// Two 16-bit registers into one 32-bit register, low first.
    Join32 {
        d: R,
        parts: [R; 2],
    },
    /// Two 32-bit registers into one 64-bit register, low first.
    Join64 {
        d: R,
        parts: [R; 2],
    },
    /// Four 16-bit registers into one 64-bit register.
    Join16x4 {
        d: R,
        parts: [R; 4],
    },
    Split32 {
        d: [R; 2],
        a: R,
    },
    Split64 {
        d: [R; 2],
        a: R,
    },
    Split16x4 {
        d: [R; 4],
        a: R,
    },
    /// Adds the base of a window to make a generic address, or takes it away.
    ToGeneric {
        base: u64,
        d: Reg,
        a: Reg,
    },
    FromGeneric {
        d: Reg,
        a: Reg,
    },
    Isspacep {
        space: Space,
        d: R,
        a: R,
    },
    Mapa {
        d: Reg,
        a: Reg,
        rank: R,
    },
    Getctarank {
        d: R,
        a: Reg,
    },
    Nop,
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    /// A prefetch of the line that holds an address: nothing is read.
    Prefetch {
        space: Space,
        addr: Addr,
    },
    Bra {
        target: u32,
    },
    Exit,
    Trap,
    BarSync {
        id: R,
        count: Option<R>,
        aligned: bool,
    },
    BarArrive {
        id: R,
        count: R,
        aligned: bool,
    },
    WarpSync {
        mask: R,
    },
    ClusterArrive {
        release: bool,
        aligned: bool,
    },
    ClusterWait {
        aligned: bool,
    },
    Fence {
        kind: FenceKind,
    },
    Mbarrier(Box<Mbar>),
    Async(Box<Async>),
    Shfl {
        mode: ShflMode,
        d: R,
        p: Option<R>,
        a: R,
        b: R,
        c: R,
        mask: R,
    },
    Vote {
        mode: VoteMode,
        d: Reg,
        p: R,
        negate: bool,
        mask: R,
    },
    Match {
        all: bool,
        wide: bool,
        d: R,
        p: Option<R>,
        a: R,
        mask: R,
    },
    Redux {
        f: Int,
        d: R,
        a: R,
        mask: R,
    },
    Elect {
        d: R,
        p: R,
        mask: R,
    },
    ActiveMask {
        d: R,
    },
    DependencyWait,
    Mma {
        tf32: bool,
        half: bool,
        d: [R; 4],
        a: [R; 4],
        b: [R; 2],
        c: [R; 4],
        k: u8,
    },
    LoadMatrix {
        count: u8,
        transpose: bool,
        d: [R; 4],
        addr: Addr,
        space: Space,
    },
}
