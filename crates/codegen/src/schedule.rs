//! The integer arithmetic of a mode: grid, cluster, registers. Knows no text and no library.

use crate::{EarlyReads, Error, KernelSpec, StateDtype};

/// Largest number of requests one launch serves: the grid's second dimension.
pub const MAX_REQUESTS: usize = 65_535;

/// The dimensions of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster; all ones without clusters. Compiled into the kernel.
    pub cluster: [u32; 3],
}

impl KernelSpec {
    /// The dimensions of a launch over `requests` requests.
    ///
    /// # Errors
    ///
    /// [`Error::Illegal`] when `requests` is 0 or above [`MAX_REQUESTS`].
    pub fn launch(&self, requests: usize) -> Result<Launch, Error> {
        if !(1..=MAX_REQUESTS).contains(&requests) {
            return Err(Error::Illegal {
                field: "requests",
                value: requests.to_string(),
                allowed: format!("1..={MAX_REQUESTS}"),
            });
        }
        let mode = &self.mode;
        Ok(Launch {
            grid: [mode.value_split * self.heads as u32, requests as u32, 1],
            block: [mode.threads, 1, 1],
            cluster: [mode.value_split, 1, 1],
        })
    }

    /// f32 state elements a thread keeps in registers.
    pub fn state_registers(&self) -> u32 {
        128 * 128 / self.mode.value_split / self.mode.threads
    }

    /// Resident blocks per multiprocessor that the compiler sets the register budget for.
    pub(crate) fn min_blocks(&self) -> u32 {
        // A thread needs its state and about 56 registers more; the file has 65536.
        let registers = if self.state_registers() <= 32 && self.tokens == 1 { 64 } else { 128 };
        let registers = match (self.early_reads, self.state_dtype) {
            // State, window and weights are all in flight at once.
            (EarlyReads::Caches, _) => 128,
            (EarlyReads::Weights, StateDtype::F32 | StateDtype::Bf16) => registers,
        };
        let by_registers = 65_536 / (registers * self.mode.threads);
        let by_threads = self.arch.threads_per_multiprocessor() / self.mode.threads;
        by_registers.min(by_threads).max(1)
    }
}
