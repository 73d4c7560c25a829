//! What a launch takes and what it gives back. Knows nothing of how it runs.

/// One kernel parameter, by value.
#[derive(Clone, Debug, PartialEq)]
pub enum Param {
    /// An unsigned 64-bit integer or a pointer.
    U64(u64),
    /// An unsigned 32-bit integer.
    U32(u32),
    /// A signed 32-bit integer.
    I32(i32),
    /// A signed 64-bit integer.
    I64(i64),
    /// An IEEE binary32.
    F32(f32),
    /// A struct, byte for byte.
    Bytes(Vec<u8>),
}

impl Param {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match self {
            Param::U64(v) => v.to_le_bytes().to_vec(),
            Param::U32(v) => v.to_le_bytes().to_vec(),
            Param::I32(v) => v.to_le_bytes().to_vec(),
            Param::I64(v) => v.to_le_bytes().to_vec(),
            Param::F32(v) => v.to_le_bytes().to_vec(),
            Param::Bytes(v) => v.clone(),
        }
    }
}

/// One launch: entry, shape and parameters.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Entry name.
    pub entry: &'a str,
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster; `[1, 1, 1]` for none.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub dynamic_shared_bytes: u32,
    /// Parameters in declaration order.
    pub params: &'a [Param],
}

/// How to run a launch.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Seed of the order in which warps, clusters and asynchronous completions run.
    pub seed: u64,
    /// Instructions one thread may execute before it counts as endless.
    pub max_instructions_per_thread: u64,
    /// Whether to look for races.
    pub check_races: bool,
    /// Whether an asynchronous store orders its issuer's earlier reads before the waiter's acquire.
    pub async_store_releases_issuer: bool,
    /// Buffers with the stale bytes that reads see before a thread's dependency wait.
    pub early_poison: Vec<(String, Vec<u8>)>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            seed: 0,
            max_instructions_per_thread: 10_000_000,
            check_races: true,
            async_store_releases_issuer: true,
            early_poison: Vec::new(),
        }
    }
}

impl Options {
    /// Sets the seed of the schedule.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the instruction budget of a thread.
    pub fn max_instructions_per_thread(mut self, limit: u64) -> Self {
        self.max_instructions_per_thread = limit;
        self
    }

    /// Turns the race detection on or off.
    pub fn check_races(mut self, check: bool) -> Self {
        self.check_races = check;
        self
    }

    /// Sets whether an asynchronous store orders its issuer's earlier reads before the waiter's
    /// acquire.
    pub fn async_store_releases_issuer(mut self, releases: bool) -> Self {
        self.async_store_releases_issuer = releases;
        self
    }

    /// Adds the stale bytes that reads of a buffer see before a thread's dependency wait.
    pub fn early_poison(mut self, name: &str, bytes: Vec<u8>) -> Self {
        self.early_poison.push((name.to_string(), bytes));
        self
    }
}

/// What a sound launch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Instructions executed, counted per thread.
    pub thread_instructions: u64,
    /// Instructions executed, counted per warp.
    pub warp_instructions: u64,
    /// Clusters run.
    pub clusters: u64,
}
