//! Whether operands are their device's memory. Asks the driver about an address once: a launch has
//! some sixteen, and makes no call to the driver but its own. Knows no operand.

use std::sync::atomic::{AtomicU64, Ordering};

use kda_codegen::operands::Parameter;

use crate::Error;
use crate::device::owner_of;

/// Addresses that share a place.
const WAYS: usize = 4;
/// Places, a power of two: some 70 layers of some 10 operands rarely fill one. 32 KiB.
const PLACES: usize = 1024;

/// Addresses found to be no other device's memory, of every object of a device. One of a full place
/// may be displaced, and is asked again. Memory that is freed and whose address another device then
/// gets is not noticed.
pub(crate) struct Residence {
    ordinal: i32,
    known: Known,
}

/// A set of addresses, which forgets some when it grows large. 0, which is no operand, is in it.
struct Known(Box<[[AtomicU64; WAYS]]>);

impl Known {
    fn new() -> Known {
        Known((0..PLACES).map(|_| Default::default()).collect())
    }

    #[inline]
    fn holds(&self, address: u64) -> bool {
        // Each entry stands alone, so no ordering is needed.
        let place = &self.0[place(address)];
        address == 0
            || place
                .iter()
                .any(|known| known.load(Ordering::Relaxed) == address)
    }

    fn insert(&self, address: u64) {
        let place = &self.0[place(address)];
        let free = place
            .iter()
            .find(|known| known.load(Ordering::Relaxed) == 0);
        // The last one makes room, so that the others keep theirs.
        free.unwrap_or(&place[WAYS - 1])
            .store(address, Ordering::Relaxed);
    }
}

impl Residence {
    pub(crate) fn new(ordinal: i32) -> Residence {
        Residence {
            ordinal,
            known: Known::new(),
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
            if !self.known.holds(address) {
                self.ask(parameters[i].name(), address)?;
            }
        }
        Ok(())
    }

    #[cold]
    fn ask(&self, operand: &'static str, address: u64) -> Result<(), Error> {
        if let Some(found) = owner_of(address).filter(|&found| found != self.ordinal) {
            return Err(Error::OtherDevice {
                operand,
                address,
                found,
                expected: self.ordinal,
            });
        }
        self.known.insert(address);
        Ok(())
    }
}

/// Where an address is remembered.
#[inline]
fn place(address: u64) -> usize {
    // Fibonacci hashing; operands start at multiples of 2 bytes and differ in any bit above.
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_addresses_are_remembered() {
        // 69 layers of 20 operands, each an allocation of its own.
        let known = Known::new();
        let addresses: Vec<u64> = (0..69 * 20u64)
            .map(|i| 0x7f00_0000_0000 + i * 0x5_1200)
            .collect();
        for &address in &addresses {
            assert!(!known.holds(address));
            known.insert(address);
            assert!(known.holds(address));
        }
        let held = addresses
            .iter()
            .filter(|&&address| known.holds(address))
            .count();
        assert!(
            held * 100 >= addresses.len() * 97,
            "{held} of {}",
            addresses.len()
        );
        assert!(known.holds(0));
    }

    #[test]
    fn a_full_place_forgets_one() {
        let known = Known::new();
        let mut same = (1..).map(|i| i * 2).filter(|&address| place(address) == 7);
        let addresses: Vec<u64> = (0..=WAYS).map(|_| same.next().expect("another")).collect();
        for &address in &addresses {
            known.insert(address);
        }
        let held: Vec<bool> = addresses
            .iter()
            .map(|&address| known.holds(address))
            .collect();
        assert_eq!(held, [true, true, true, false, true]);
    }
}
