//! The decoded instruction: register indices and small enums, no text. Immediates, special
//! registers and symbol addresses are registers filled when a warp starts.

/// Index into one of the three register files of a warp.
pub(crate) type R = u16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Pred,
    B32,
    B64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reg {
    pub(crate) class: Class,
    pub(crate) index: R,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Clusterid(u8),
    Nclusterid(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterCtarank,
    ClusterNctarank,
    Laneid,
    Warpid,
    Nwarpid,
    LanemaskEq,
    LanemaskLe,
    LanemaskLt,
    LanemaskGe,
    LanemaskGt,
    DynamicSmemSize,
    TotalSmemSize,
    Zero,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F16,
    Bf16,
    F32,
    F64,
}

impl Ty {
    pub(crate) fn bits(self) -> u32 {
        match self {
            Ty::U8 | Ty::S8 => 8,
            Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 16,
            Ty::U32 | Ty::S32 | Ty::F32 => 32,
            Ty::U64 | Ty::S64 | Ty::F64 => 64,
        }
    }

    pub(crate) fn signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    pub(crate) fn float(self) -> bool {
        matches!(self, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64)
    }
}

/// Integer functions of one or two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Int {
    Add,
    Sub,
    Mul,
    MulHiS,
    MulHiU,
    DivS,
    DivU,
    RemS,
    RemU,
    MinS,
    MinU,
    MaxS,
    MaxU,
    And,
    Or,
    Xor,
    Shl,
    ShrU,
    ShrS,
    Neg,
    Abs,
    Not,
    Cnot,
    Brev,
}

/// Float functions of one, two or three operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    Neg,
    Abs,
    Sqrt,
    Rcp,
    Rsqrt,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Tanh,
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    MinNan,
    MaxNan,
    Copysign,
    Fma,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
    IntNearest,
    IntZero,
    IntDown,
    IntUp,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    GlobalNc,
    SharedCta,
    SharedCluster,
    Local,
    Param,
    Generic,
}

/// What an access means to other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) strong: bool,
    pub(crate) acquire: bool,
    pub(crate) release: bool,
}

impl Order {
    pub(crate) const WEAK: Order = Order {
        strong: false,
        acquire: false,
        release: false,
    };
}

/// A load or a store: `count` elements of `ty` between memory and `regs`.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) ty: Ty,
    pub(crate) regs: Vec<Reg>,
    pub(crate) address: Reg,
    pub(crate) offset: i64,
    pub(crate) order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

#[derive(Clone, Debug)]
pub(crate) struct Atomic {
    pub(crate) space: Space,
    pub(crate) op: AtomicOp,
    pub(crate) ty: Ty,
    pub(crate) dst: Option<Reg>,
    pub(crate) address: Reg,
    pub(crate) offset: i64,
    pub(crate) b: Reg,
    pub(crate) c: Option<Reg>,
    pub(crate) order: Order,
}

/// An address operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addr {
    pub(crate) reg: Reg,
    pub(crate) offset: i64,
}

#[derive(Clone, Debug)]
pub(crate) enum Mbar {
    Init {
        addr: Addr,
        count: R,
    },
    Inval {
        addr: Addr,
    },
    Arrive {
        addr: Addr,
        cluster: bool,
        state: Option<Reg>,
        count: Option<R>,
        tx: Option<R>,
        release: bool,
        drop: bool,
    },
    ExpectTx {
        addr: Addr,
        cluster: bool,
        tx: R,
    },
    CompleteTx {
        addr: Addr,
        cluster: bool,
        tx: R,
    },
    /// `parity` and `state` are exclusive; `block`: try_wait rather than test_wait.
    Wait {
        addr: Addr,
        block: bool,
        done: Reg,
        state: Reg,
        parity: bool,
        acquire: bool,
        cluster: bool,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum Async {
    Store {
        addr: Addr,
        ty: Ty,
        regs: Vec<Reg>,
        barrier: Addr,
    },
    /// cp.async: `size` bytes of which `src_size` come from memory and the rest are zero.
    Copy {
        dst: Addr,
        src: Addr,
        size: u32,
        src_size: Option<Reg>,
    },
    Commit,
    /// Waits until at most `n` groups of the thread are pending.
    Wait {
        n: u32,
    },
    /// Counts on an mbarrier once the thread's earlier cp.async are complete.
    Arrive {
        addr: Addr,
        noinc: bool,
    },
    BulkIn {
        dst: Addr,
        src: Addr,
        size: Reg,
        barrier: Addr,
    },
    BulkOut {
        dst: Addr,
        src: Addr,
        size: Reg,
    },
    BulkCommit,
    BulkWait {
        n: u32,
        read: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShflMode {
    Up,
    Down,
    Bfly,
    Idx,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uni,
    Ballot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FenceKind {
    /// Orders memory within the generic proxy.
    Memory,
    /// Orders generic accesses before asynchronous ones and the reverse.
    ProxyAsync,
    /// Makes mbarrier initialisations visible to the cluster.
    MbarrierInit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfKind {
    F16,
    Bf16,
}

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
    /// A prefetch: the address is not checked and nothing is read.
    Prefetch,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Popc,
    Clz,
    Bfind,
    BfindSigned,
    BfindShift,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TestKind {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

#[derive(Clone, Debug)]
pub(crate) struct Instr {
    /// Predicate register and whether it is negated.
    pub(crate) guard: Option<(R, bool)>,
    pub(crate) op: Op,
    pub(crate) line: u32,
}

/// A declared kernel parameter.
#[derive(Clone, Debug)]
pub(crate) struct ParamDecl {
    pub(crate) offset: u32,
    pub(crate) size: u32,
}

/// One kernel, decoded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) code: Vec<Instr>,
    /// The statement behind each instruction.
    pub(crate) text: Vec<String>,
    pub(crate) params: Vec<ParamDecl>,
    pub(crate) param_bytes: u32,
    /// Registers in the files Pred, B32 and B64.
    pub(crate) registers: [u16; 3],
    pub(crate) constants32: Vec<(R, u32)>,
    pub(crate) constants64: Vec<(R, u64)>,
    pub(crate) true_preds: Vec<R>,
    pub(crate) specials: Vec<(Reg, Special)>,
    pub(crate) shared_bytes: u32,
    pub(crate) local_bytes: u32,
    /// Required block size, largest block size, required cluster size.
    pub(crate) required_block: Option<[u32; 3]>,
    pub(crate) largest_block: Option<[u32; 3]>,
    pub(crate) required_cluster: Option<[u32; 3]>,
    pub(crate) explicit_cluster: bool,
}

/// A module-scope variable.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) address: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) read_only: bool,
}

/// First address of module-scope variables.
pub(crate) const MODULE_BASE: u64 = 1 << 55;
/// Generic address of the shared window.
pub(crate) const SHARED_WINDOW: u64 = 0x7f00_0000_0000_0000;
/// Generic address of the local window.
pub(crate) const LOCAL_WINDOW: u64 = 0x7e00_0000_0000_0000;
/// Generic address of the parameter window.
pub(crate) const PARAM_WINDOW: u64 = 0x7d00_0000_0000_0000;
/// Offset of the first shared variable: the hardware reserves 1 KiB below.
pub(crate) const SHARED_BASE: u32 = 1024;
/// A shared::cluster address holds the block's rank plus one above these bits; 0 is the own block.
pub(crate) const RANK_SHIFT: u32 = 24;
