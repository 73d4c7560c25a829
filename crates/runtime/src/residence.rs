//! Whether a step's operands are this device's memory. Asks the driver about an address once, since
//! asking costs more than launching. Knows no operand.

use std::sync::atomic::{AtomicU64, Ordering};

use kda_codegen::operands::Parameter;

use crate::Error;
use crate::device::owner_of;

/// Addresses remembered, a power of two: some 70 layers of some 10 operands. 8 KiB.
const PLACES: usize = 1024;

/// Addresses found to be no other device's memory. An entry may be displaced, and is asked again.
/// Memory that is freed and whose address another device then gets is not noticed.
pub(crate) struct Residence {
    ordinal: i32,
    known: Box<[AtomicU64]>,
}

impl Residence {
    pub(crate) fn new(ordinal: i32) -> Residence {
        Residence {
            ordinal,
            known: (0..PLACES).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Checks every pointer of a launch.
    ///
    /// # Errors
    ///
    /// [`Error::OtherDevice`] for the first that is another device's memory.
    #[inline]
    pub(crate) fn check(
        &self,
        pointers: &[u64],
        parameters: &'static [Parameter],
    ) -> Result<(), Error> {
        for (i, &address) in pointers.iter().enumerate() {
            let place = place(address);
            // Each entry stands alone, so no ordering is needed.
            if address != self.known[place].load(Ordering::Relaxed) {
                self.ask(parameters[i].name(), address, place)?;
            }
        }
        Ok(())
    }

    #[cold]
    fn ask(&self, operand: &'static str, address: u64, place: usize) -> Result<(), Error> {
        if let Some(found) = owner_of(address).filter(|&found| found != self.ordinal) {
            return Err(Error::OtherDevice {
                operand,
                address,
                found,
                expected: self.ordinal,
            });
        }
        self.known[place].store(address, Ordering::Relaxed);
        Ok(())
    }
}

/// Where an address is remembered: 0, which is no operand, at place 0, where it is from the start.
#[inline]
fn place(address: u64) -> usize {
    // Fibonacci hashing; operands start at multiples of 2 bytes and differ in any bit above.
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.trailing_zeros())) as usize
}
