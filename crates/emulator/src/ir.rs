//! The decoded instruction: register indices and small enums, no text. Immediates, special
//! registers and symbol addresses are registers filled when a warp starts.

pub(crate) use crate::op::Op;

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
    Nsmid,
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
    /// Addresses of the module-scope variables it names.
    pub(crate) variables: Vec<u64>,
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
