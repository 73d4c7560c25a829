//! Shadow memory: the last accesses of every byte, and whether a new one is ordered after them.
//! Knows clocks, but neither addresses nor what made the accesses.

use crate::clock::{Clock, Part};
use crate::error::AccessKind;

/// Marks a record of an asynchronous agent; the rest is its clock entry.
pub(crate) const AGENT: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    None,
    Read,
    Nc,
    StrongRead,
    Strong,
    Write,
    AsyncWrite,
    /// By the asynchronous proxy: what it touches must have passed a proxy fence.
    BulkRead,
    BulkWrite,
}

impl Kind {
    fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::AsyncWrite | Kind::BulkWrite)
    }

    fn bulk(self) -> bool {
        matches!(self, Kind::BulkRead | Kind::BulkWrite)
    }

    /// Whether this entry of the reader list conflicts with a new access.
    fn conflicts(self, new: Kind) -> bool {
        match new {
            Kind::Strong => !matches!(self, Kind::Strong | Kind::StrongRead | Kind::None),
            Kind::StrongRead => false,
            _ if new.writes() => self != Kind::None,
            _ => self == Kind::Strong,
        }
    }

    pub(crate) fn public(self) -> AccessKind {
        match self {
            Kind::None | Kind::Read => AccessKind::Read,
            Kind::Nc => AccessKind::NonCoherentRead,
            Kind::StrongRead | Kind::Strong => AccessKind::Strong,
            Kind::Write => AccessKind::Write,
            Kind::BulkRead => AccessKind::AsyncRead,
            Kind::AsyncWrite | Kind::BulkWrite => AccessKind::AsyncWrite,
        }
    }
}

/// An access, by lanes of one warp or by an agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) cluster: u32,
    pub(crate) epoch: u32,
    pub(crate) lanes: u32,
    pub(crate) pc: u32,
    pub(crate) owner: u32,
    pub(crate) kind: Kind,
}

impl Record {
    const NONE: Record = Record {
        cluster: 0,
        epoch: 0,
        lanes: 0,
        pc: 0,
        owner: 0,
        kind: Kind::None,
    };
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    write: Record,
    read: Record,
    /// Further readers: index plus one into the page's lists.
    more: u32,
}

const PAGE: usize = 256;

#[derive(Clone, Debug)]
struct Page {
    /// Bytes of a cell: 4, 2 or 1, by the finest access so far.
    granule: usize,
    cells: Vec<Cell>,
    lists: Vec<Vec<Record>>,
}

/// What two accesses did that they must not.
pub(crate) enum Conflict {
    Race {
        earlier: Record,
        at: usize,
        len: usize,
    },
    Proxy {
        earlier: Record,
        at: usize,
        len: usize,
    },
}

/// A new access and what its thread is ordered after.
pub(crate) struct Accessor<'a> {
    pub(crate) record: Record,
    pub(crate) clock: &'a Clock,
    /// The thread whose own past is known, up to an epoch.
    pub(crate) warp: u32,
    pub(crate) lane: u32,
    pub(crate) own_epoch: u32,
}

impl Accessor<'_> {
    #[inline(always)]
    fn after(&self, earlier: &Record, part: Part) -> bool {
        if earlier.cluster != self.record.cluster {
            return false;
        }
        if earlier.owner & AGENT != 0 {
            return self.clock.get((earlier.owner & !AGENT) as usize, part) >= earlier.epoch;
        }
        let mut lanes = earlier.lanes;
        if earlier.owner == self.warp && earlier.epoch <= self.own_epoch && part != Part::Proxy {
            lanes &= !(1 << self.lane);
        }
        while lanes != 0 {
            let index = earlier.owner as usize * 32 + lanes.trailing_zeros() as usize;
            if self.clock.get(index, part) < earlier.epoch {
                return false;
            }
            lanes &= lanes - 1;
        }
        true
    }

    #[inline(always)]
    fn against_write(&self, write: &Record) -> Option<bool> {
        if write.kind == Kind::None {
            return None;
        }
        if self.record.kind == Kind::Nc || !self.after(write, Part::Writes) {
            return Some(false);
        }
        let fenced =
            !self.record.kind.bulk() || write.kind != Kind::Write || self.after(write, Part::Proxy);
        (!fenced).then_some(true)
    }

    fn against_reader(&self, reader: &Record) -> bool {
        let part = if reader.kind == Kind::Strong {
            Part::Writes
        } else {
            Part::Reads
        };
        reader.kind.conflicts(self.record.kind)
            && (reader.kind == Kind::Nc || !self.after(reader, part))
    }
}

/// The shadow of one contiguous region.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shadow {
    pages: Vec<Option<Box<Page>>>,
}

impl Page {
    fn new(granule: usize) -> Self {
        let cell = Cell {
            write: Record::NONE,
            read: Record::NONE,
            more: 0,
        };
        Page {
            granule,
            cells: vec![cell; PAGE / granule],
            lists: Vec::new(),
        }
    }

    fn refine(&mut self, granule: usize) {
        let repeat = self.granule / granule;
        let mut cells = Vec::with_capacity(PAGE / granule);
        for cell in &self.cells {
            for _ in 0..repeat {
                let mut copy = *cell;
                if cell.more != 0 {
                    self.lists.push(self.lists[cell.more as usize - 1].clone());
                    copy.more = self.lists.len() as u32;
                }
                cells.push(copy);
            }
        }
        self.cells = cells;
        self.granule = granule;
    }

    #[inline(always)]
    fn visit(&mut self, index: usize, by: &Accessor) -> Option<(Record, bool)> {
        let cell = &mut self.cells[index];
        let new = &by.record;
        if let Some(proxy) = by.against_write(&cell.write) {
            return Some((cell.write, proxy));
        }
        let same = |r: &Record| {
            r.owner == new.owner
                && r.epoch == new.epoch
                && r.cluster == new.cluster
                && r.kind == new.kind
        };
        if !new.kind.writes() {
            if same(&cell.read) {
                cell.read.lanes |= new.lanes;
                cell.read.pc = new.pc;
                return None;
            }
            if cell.read.kind == Kind::None
                && (cell.more == 0 || self.lists[cell.more as usize - 1].is_empty())
            {
                cell.read = *new;
                return None;
            }
        }
        self.slow(index, by)
    }

    fn slow(&mut self, index: usize, by: &Accessor) -> Option<(Record, bool)> {
        let cell = &mut self.cells[index];
        let new = by.record;
        if by.against_reader(&cell.read) {
            return Some((cell.read, false));
        }
        let more = (cell.more as usize)
            .checked_sub(1)
            .map(|list| &self.lists[list]);
        if let Some(reader) = more.and_then(|list| list.iter().find(|r| by.against_reader(r))) {
            return Some((*reader, false));
        }
        if new.kind.writes() {
            cell.write = new;
            cell.read = Record::NONE;
            if cell.more != 0 {
                self.lists[cell.more as usize - 1].clear();
            }
            return None;
        }
        let absorb = |old: &mut Record| {
            if old.owner != new.owner || old.cluster != new.cluster || old.kind != new.kind {
                return false;
            }
            if old.epoch == new.epoch {
                old.lanes |= new.lanes;
                old.pc = new.pc;
                return true;
            }
            old.lanes &= !new.lanes;
            if old.lanes == 0 {
                *old = new;
                return true;
            }
            false
        };
        if absorb(&mut cell.read) {
            return None;
        }
        if cell.more == 0 {
            self.lists.push(Vec::new());
            cell.more = self.lists.len() as u32;
        }
        let list = &mut self.lists[cell.more as usize - 1];
        if list.iter_mut().any(absorb) {
            return None;
        }
        if list.len() >= 64 {
            // One reader of another cluster is enough to catch a writer; it never becomes ordered.
            let mut foreign = [false; 2];
            list.retain(|r| {
                let strong = usize::from(r.kind == Kind::Strong);
                r.cluster == new.cluster || !std::mem::replace(&mut foreign[strong], true)
            });
        }
        list.push(new);
        None
    }
}

impl Shadow {
    pub(crate) fn new(len: usize) -> Self {
        Shadow {
            pages: vec![None; len.div_ceil(PAGE)],
        }
    }

    /// Checks and records an access to `len` bytes at `start`.
    #[inline]
    pub(crate) fn access(
        &mut self,
        start: usize,
        len: usize,
        by: &Accessor,
    ) -> Result<(), Conflict> {
        let fine = start | len;
        let wanted = if fine & 3 == 0 {
            4
        } else if fine & 1 == 0 {
            2
        } else {
            1
        };
        let mut at = start;
        while at < start + len {
            let inside = at % PAGE;
            let take = (PAGE - inside).min(start + len - at);
            let page = self.pages[at / PAGE].get_or_insert_with(|| Box::new(Page::new(wanted)));
            if wanted < page.granule {
                page.refine(wanted);
            }
            let granule = page.granule;
            for index in inside / granule..(inside + take) / granule {
                if let Some((earlier, proxy)) = page.visit(index, by) {
                    let at = at - inside + index * granule;
                    return Err(if proxy {
                        Conflict::Proxy {
                            earlier,
                            at,
                            len: granule,
                        }
                    } else {
                        Conflict::Race {
                            earlier,
                            at,
                            len: granule,
                        }
                    });
                }
            }
            at += take;
        }
        Ok(())
    }
}
