//! The integer arithmetic of a mode: grid, cluster, registers. Knows no text and no library.

use crate::{Error, GateSchedule, KernelSpec};

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

    /// Registers of a thread's share of F_B. A kernel of a projected gate is given as many: what it
    /// spares there, others of its values need.
    fn gate_registers(&self) -> u32 {
        let gates = match self.mode.gate_schedule {
            GateSchedule::Block => 128,
            GateSchedule::Cluster => 128 / self.mode.value_split,
        };
        gates.div_ceil(self.mode.threads / 8) * 8
    }

    /// Resident blocks per multiprocessor that the compiler sets the register budget for: the
    /// largest number at which the values in flight fit, by an estimate that NVRTC's reports of
    /// all modes agree with.
    pub(crate) fn min_blocks(&self) -> u32 {
        let mode = &self.mode;
        let channels = 256 + 128 / mode.value_split;
        let conv = channels.div_ceil(mode.threads) * 8;
        let chunk = self.tokens.min(4) as u32 * 8;
        let in_flight = self.state_registers() + self.gate_registers() + conv + chunk + 24;
        let registers = match in_flight {
            0..=90 if self.tokens == 1 && mode.threads == 512 => 64,
            0..=184 => 128,
            _ => 255,
        };
        let by_registers = 65_536 / (registers * mode.threads);
        let by_threads = self.arch.threads_per_multiprocessor() / mode.threads;
        by_registers.min(by_threads).max(1)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Arch, GateSchedule, KernelSpec};

    /// The kernel's clamps of a gate's index are for modes that do not exist.
    #[test]
    fn no_mode_has_more_gate_groups_than_gates() {
        for &arch in Arch::ALL {
            let modes = KernelSpec::new(arch, 1).legal_modes();
            assert!(!modes.is_empty());
            for mode in modes {
                let gates = match mode.gate_schedule {
                    GateSchedule::Block => 128,
                    GateSchedule::Cluster => 128 / mode.value_split,
                };
                assert!(mode.threads / 8 <= gates, "{mode} on {arch}");
            }
        }
    }
}
