//! Executes the PTX of the KDA kernels on a CPU and checks every access, barrier and ordering.
//!
//! [`Module::parse`] decodes PTX text once; [`Module::launch`] runs one launch of an entry on the
//! named buffers of a [`Memory`] and returns a [`Report`], or the first fault as an [`Error`] with
//! the PTX line, the instruction, the block, the thread and the bytes concerned.
//!
//! ```
//! use kda_emulator::{Error, Launch, Memory, Module, Options, Param};
//!
//! let ptx = ".visible .entry twice(.param .u64 data)
//! {
//!     .reg .b32 %r<3>; .reg .b64 %d<3>;
//!     ld.param.u64 %d0, [data];
//!     mov.u32 %r0, %tid.x;
//!     mul.wide.u32 %d1, %r0, 4;
//!     add.s64 %d2, %d0, %d1;
//!     ld.global.u32 %r1, [%d2];
//!     add.u32 %r2, %r1, %r1;
//!     st.global.u32 [%d2], %r2;
//!     ret;
//! }";
//! let module = Module::parse(ptx)?;
//! let mut memory = Memory::new();
//! memory.add("data", 0x1000, [1u32, 2, 3].into_iter().flat_map(u32::to_le_bytes).collect());
//! let params = [Param::U64(0x1000)];
//! let mut launch = Launch {
//!     entry: "twice",
//!     grid: [1; 3],
//!     block: [3, 1, 1],
//!     cluster: [1; 3],
//!     dynamic_shared_bytes: 0,
//!     params: &params,
//! };
//! module.launch(&mut memory, &launch, &Options::default())?;
//! assert_eq!(memory.read("data")[8], 6);
//!
//! launch.block = [4, 1, 1];
//! let error = module.launch(&mut memory, &launch, &Options::default()).unwrap_err();
//! assert!(matches!(error, Error::OutOfBounds { .. }));
//! # Ok::<(), Error>(())
//! ```
//!
//! # From text to instructions
//! `lexer` splits the text, `parse` resolves scopes, variables and labels, and the `decode` modules
//! turn each statement into one operation with register indices. Immediates, special registers
//! and symbol addresses become registers that are filled when a warp starts. An instruction, a
//! modifier or a type that is not executed is an error of the parse, with its line. The parser is
//! this crate's own: of the published ones, `singe-ptx` rejects NVRTC 13 output for every
//! architecture served (a module-scope line stops it), and `ptoxide` knows a subset of PTX without
//! clusters, mbarriers or `.NaN` arithmetic.
//!
//! # Execution
//! A warp executes an instruction for its 32 lanes at once. Lanes with one program counter form a
//! fragment; a branch that lanes take differently splits it, the fragment furthest behind runs
//! first, and fragments that meet are one again. A collective (`shfl.sync`, `vote.sync`,
//! `redux.sync`, `mma.sync`, `bar.warp.sync`, an `.aligned` barrier) waits until every live lane of
//! its mask is there. All blocks of a cluster run together; a warp gives way at every access to
//! memory and every synchronisation, and which one goes next is drawn from
//! [`Options::seed`]. Clusters run one after another, in an order drawn from the seed too.
//! Asynchronous stores and copies land after a drawn delay. `mbarrier.try_wait` blocks, and now and
//! then gives up and returns false, as it may.
//!
//! Approximate instructions are computed in f64 and rounded once, within the ISA's error; the
//! results of all others are those the ISA defines, every NaN being `0x7fffffff`. `mma` sums in f64
//! and rounds once.
//!
//! # What is a race
//! Two accesses to a byte, by different threads, one of them a write, that no chain of orderings
//! connects. The same value written twice is a race; two neighbouring bytes are not. Two atomic,
//! volatile or relaxed accesses do not race with each other. Detection follows the happens-before
//! relation with vector clocks, not the order in which the seed ran things; a missing ordering is
//! found on any schedule that performs both accesses. A read through the non-coherent path races
//! with every write of the launch to these bytes.
//!
//! # What orders
//! - Program order of one thread.
//! - `bar.sync`, `barrier.sync` and `bar.arrive` among all who arrive; `bar.warp.sync` among its
//!   mask. No other instruction across lanes orders memory: a shuffle and a vote do not.
//! - `barrier.cluster.arrive` to `barrier.cluster.wait`. A `.relaxed` arrival publishes nothing but
//!   mbarrier initialisations that the thread made before a `fence.mbarrier_init`.
//! - An arrival on an mbarrier to a wait that sees its phase complete. A `.relaxed` arrival or wait
//!   orders nothing; a wait of block scope orders nothing that another block did.
//! - An asynchronous store or bulk copy to a wait that sees the phase in which its bytes were
//!   counted. The store also orders its issuer's earlier *reads* (its own, and those it was itself
//!   ordered after) before that wait, unless [`Options::async_store_releases_issuer`] is off: the
//!   value stored is computed after those reads, and nobody can observe them afterwards. It orders
//!   no earlier *write* of the issuer.
//! - `cp.async` and bulk stores to the issuing thread's `wait_group` that covers them, and
//!   `cp.async.mbarrier.arrive` to a wait.
//! - A release (or a fence followed by a strong write) to an acquire (or a strong read followed by
//!   a fence) that reads the location, inside one cluster.
//! - A bulk copy also needs a `fence.proxy.async` after each generic write to what it touches.
//! - Nothing orders threads of different clusters.
//!
//! # What else is checked
//! Every access lies inside a buffer, shared memory or a local frame, is aligned, and reads bytes
//! that someone wrote. Read-only buffers are not written; a predecessor's buffers are not touched
//! before the thread's own `griddepcontrol.wait` (on a target that has it), prefetches excepted (they
//! must lie inside a buffer all the same: the ISA leaves open what a prefetch elsewhere does),
//! and [`Options::early_poison`] gives early reads stale bytes. An mbarrier is used only by threads
//! that its initialisation is visible to, is not overwritten while it lives, and gets no more
//! arrivals than it expects. A thread waits at the cluster barrier between two arrivals and before it
//! ends. Lanes read in a shuffle take part in it. A block ends only after its
//! threads waited for their copies, and some thread for all bytes that arrive on its mbarriers;
//! nobody reaches into the shared memory of a block that has ended. When nothing can run, or a
//! thread exceeds its budget, [`Error::Hang`] lists every warp with its line.
//!
//! # What is not modelled
//! Whether a warp's lanes are back together before an `.aligned` instruction that all of them reach:
//! they are taken to be, so a `__syncwarp()` whose only use that is cannot be missed. Caches, timing, and the values a race could produce: the first race ends the launch. Ordering
//! through memory between clusters. `wgmma`, `tcgen05`, tensor maps, multicast copies,
//! textures, calls, indirect branches, rounding modes other than to nearest in arithmetic, and
//! `bar.red`. Bounds between two variables of one block's shared memory. Scopes narrower than the
//! threads concerned, except for waits on mbarriers. Reads of registers nobody wrote, which give an
//! arbitrary value.

#![forbid(unsafe_code)]

mod access;
mod alu;
mod asynchronous;
mod clock;
mod collective;
mod decode;
mod decode_arith;
mod decode_float;
mod decode_memory;
mod decode_sync;
mod error;
mod ir;
mod launch;
mod lexer;
mod machine;
mod math;
mod mbarrier;
mod memory;
mod op;
mod parse;
mod race;
mod sync;
mod warp;

pub use error::{AccessKind, AddressSpace, Error, Place, Site, Waiting};
pub use launch::{Launch, Options, Param, Report};
pub use memory::Memory;
pub use parse::{Module, Signature};
