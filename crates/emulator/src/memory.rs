//! Global memory: named buffers at fixed addresses, and which of their bytes anyone wrote.
//! Knows nothing of threads; races over these bytes live elsewhere.

use std::collections::HashMap;
use std::ops::Range;

use crate::error::Error;

/// One bit for each byte.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    pub(crate) fn new(len: usize) -> Self {
        Bits(vec![0; len.div_ceil(64) + 1])
    }

    pub(crate) fn set(&mut self, start: usize, len: usize) {
        if len <= 64 {
            let (word, shift) = (start / 64, start % 64);
            let ones = if len == 64 {
                u64::MAX
            } else {
                (1u64 << len) - 1
            };
            self.0[word] |= ones << shift;
            if shift + len > 64 {
                self.0[word + 1] |= ones >> (64 - shift);
            }
        } else {
            let mut at = start;
            while at < start + len {
                let step = (64 - at % 64).min(start + len - at);
                self.set(at, step);
                at += step;
            }
        }
    }

    /// Whether all of up to 64 bytes are set.
    pub(crate) fn all(&self, start: usize, len: usize) -> bool {
        let (word, shift) = (start / 64, start % 64);
        let ones = if len == 64 {
            u64::MAX
        } else {
            (1u64 << len) - 1
        };
        let mut have = self.0[word] >> shift;
        if shift + len > 64 {
            have |= self.0[word + 1] << (64 - shift);
        }
        have & ones == ones
    }
}

/// A contiguous range of a buffer that exists.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) data: Vec<u8>,
    /// `None`: every byte counts as written.
    pub(crate) written: Option<Bits>,
    pub(crate) buffer: usize,
}

/// What a buffer allows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffer {
    pub(crate) name: String,
    pub(crate) address: u64,
    pub(crate) read_only: bool,
    pub(crate) predecessor_writes: bool,
    pub(crate) early_reads: bool,
    pub(crate) removed: bool,
}

/// Largest address a buffer may reach.
const ADDRESS_LIMIT: u64 = 1 << 56;

/// The buffers a launch may touch.
///
/// Addresses are the caller's: what a parameter holds is what the kernel adds offsets to.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub(crate) extents: Vec<Extent>,
    pub(crate) buffers: Vec<Buffer>,
    names: HashMap<String, usize>,
}

impl Memory {
    /// No buffers.
    pub fn new() -> Self {
        Memory::default()
    }

    fn insert(&mut self, name: &str, address: u64) -> usize {
        let buffer = Buffer {
            name: name.to_string(),
            address,
            ..Buffer::default()
        };
        let free = self.buffers.iter().position(|b| b.removed);
        if let Some(index) = self.names.get(name).copied().or(free) {
            self.drop_extents(index);
            self.buffers[index] = buffer;
            self.names.insert(name.to_string(), index);
            return index;
        }
        self.buffers.push(buffer);
        self.names.insert(name.to_string(), self.buffers.len() - 1);
        self.buffers.len() - 1
    }

    fn drop_extents(&mut self, buffer: usize) {
        self.buffers[buffer].removed = true;
        self.extents.retain(|e| e.buffer != buffer);
    }

    fn push(&mut self, extent: Extent) {
        let at = self.extents.partition_point(|e| e.start < extent.start);
        self.extents.insert(at, extent);
    }

    /// Adds a buffer whose bytes all count as written; replaces one of the same name.
    pub fn add(&mut self, name: &str, address: u64, bytes: Vec<u8>) {
        let buffer = self.insert(name, address);
        self.push(Extent {
            start: address,
            data: bytes,
            written: None,
            buffer,
        });
    }

    /// Adds a buffer nobody has written yet.
    pub fn add_uninitialised(&mut self, name: &str, address: u64, len: u64) {
        self.add_partly(name, address, vec![0xa5; len as usize], &[]);
    }

    /// Adds a buffer of which only the given ranges count as written.
    pub fn add_partly(
        &mut self,
        name: &str,
        address: u64,
        bytes: Vec<u8>,
        initialised: &[Range<u64>],
    ) {
        let buffer = self.insert(name, address);
        let mut written = Bits::new(bytes.len());
        for range in initialised {
            let end = range.end.min(bytes.len() as u64);
            if range.start < end {
                written.set(range.start as usize, (end - range.start) as usize);
            }
        }
        self.push(Extent {
            start: address,
            data: bytes,
            written: Some(written),
            buffer,
        });
    }

    /// Adds a buffer of `len` bytes of which only `ranges`, pairs of an offset and the bytes there,
    /// exist; an access to anything else is out of bounds.
    pub fn add_sparse(&mut self, name: &str, address: u64, len: u64, ranges: Vec<(u64, Vec<u8>)>) {
        let buffer = self.insert(name, address);
        for (offset, mut bytes) in ranges {
            bytes.truncate(len.saturating_sub(offset) as usize);
            self.push(Extent {
                start: address + offset,
                data: bytes,
                written: None,
                buffer,
            });
        }
    }

    fn index(&self, name: &str) -> usize {
        *self
            .names
            .get(name)
            .unwrap_or_else(|| panic!("no buffer named `{name}`"))
    }

    /// The bytes of a buffer; of a sparse one, of its first range.
    ///
    /// # Panics
    /// If no buffer has this name.
    pub fn read(&self, name: &str) -> &[u8] {
        let index = self.index(name);
        self.extents
            .iter()
            .find(|e| e.buffer == index)
            .map_or(&[], |e| &e.data)
    }

    /// The ranges of a buffer, each with its offset.
    ///
    /// # Panics
    /// If no buffer has this name.
    pub fn ranges(&self, name: &str) -> Vec<(u64, &[u8])> {
        let index = self.index(name);
        let base = self.buffers[index].address;
        let of = self.extents.iter().filter(|e| e.buffer == index);
        of.map(|e| (e.start - base, e.data.as_slice())).collect()
    }

    /// Overwrites bytes of a buffer from the host, at an offset in bytes.
    ///
    /// # Panics
    /// If no buffer has this name or the bytes do not fit inside it.
    pub fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) {
        let index = self.index(name);
        let start = self.buffers[index].address + offset;
        let end = start + bytes.len() as u64;
        let fits = |e: &&mut Extent| {
            e.buffer == index && e.start <= start && end <= e.start + e.data.len() as u64
        };
        let Some(extent) = self.extents.iter_mut().find(fits) else {
            panic!(
                "{} bytes at offset {offset} are outside buffer `{name}`",
                bytes.len()
            );
        };
        let at = (start - extent.start) as usize;
        extent.data[at..at + bytes.len()].copy_from_slice(bytes);
        if let Some(written) = &mut extent.written {
            written.set(at, bytes.len());
        }
    }

    /// Takes a buffer out and returns its bytes; of a sparse one, of its first range.
    ///
    /// # Panics
    /// If no buffer has this name.
    pub fn remove(&mut self, name: &str) -> Vec<u8> {
        let index = self.index(name);
        let bytes = self.read(name).to_vec();
        self.names.remove(name);
        self.drop_extents(index);
        bytes
    }

    /// Makes every write to a buffer an error.
    ///
    /// # Panics
    /// If no buffer has this name.
    pub fn set_read_only(&mut self, name: &str) {
        let index = self.index(name);
        self.buffers[index].read_only = true;
    }

    /// Declares that the launch before this one writes a buffer: a thread that touches it before
    /// its own `griddepcontrol.wait`, other than by a prefetch, is an error.
    ///
    /// # Panics
    /// If no buffer has this name.
    pub fn set_predecessor_writes(&mut self, name: &str) {
        let index = self.index(name);
        self.buffers[index].predecessor_writes = true;
    }

    /// Allows reads, though no writes, of a predecessor's buffer before the dependency wait.
    ///
    /// # Panics
    /// If no buffer has this name.
    pub fn allow_early_reads(&mut self, name: &str) {
        let index = self.index(name);
        self.buffers[index].early_reads = true;
    }

    pub(crate) fn find_buffer(&self, name: &str) -> Result<usize, Error> {
        self.names
            .get(name)
            .copied()
            .ok_or_else(|| Error::NoBuffer {
                name: name.to_string(),
            })
    }

    pub(crate) fn check_placement(&self) -> Result<(), Error> {
        let mut end = 0;
        for extent in &self.extents {
            let next = extent.start.saturating_add(extent.data.len() as u64);
            if extent.start < end || next > ADDRESS_LIMIT {
                let name = self.buffers[extent.buffer].name.clone();
                return Err(Error::BufferPlacement {
                    name,
                    address: extent.start,
                });
            }
            end = next;
        }
        Ok(())
    }

    /// The extent that holds all of `len` bytes at `address`; `hint` is tried first.
    pub(crate) fn locate(&self, address: u64, len: u64, hint: usize) -> Option<usize> {
        let holds = |e: &Extent| {
            address >= e.start
                && address - e.start <= (e.data.len() as u64).saturating_sub(len)
                && e.data.len() as u64 >= len
        };
        if self.extents.get(hint).is_some_and(holds) {
            return Some(hint);
        }
        let after = self.extents.partition_point(|e| e.start <= address);
        let index = after.checked_sub(1)?;
        holds(&self.extents[index]).then_some(index)
    }

    /// Name of the buffer nearest below an address that no extent holds, and the offset in it.
    pub(crate) fn nearest(&self, address: u64) -> (String, u64) {
        let live = self
            .buffers
            .iter()
            .filter(|b| !b.removed && b.address <= address);
        match live.max_by_key(|b| b.address) {
            Some(b) => (b.name.clone(), address - b.address),
            None => (String::new(), 0),
        }
    }
}
