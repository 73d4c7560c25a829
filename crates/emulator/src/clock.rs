//! Vector clocks: what each thread is ordered after. Knows nothing of memory or of barriers.

use std::rc::Rc;

/// What of another thread's past an entry speaks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Everything: writes are visible.
    Writes = 0,
    /// Reads have completed; never behind `Writes`.
    Reads = 1,
    /// Writes have passed a fence into the asynchronous proxy.
    Proxy = 2,
    /// mbarrier initialisations have been published to the cluster.
    Inits = 3,
}

/// One entry for each thread of the cluster, then one for each asynchronous agent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<[u32; 4]>);

impl Clock {
    #[inline(always)]
    pub(crate) fn get(&self, index: usize, part: Part) -> u32 {
        self.0.get(index).map_or(0, |e| e[part as usize])
    }

    fn entry(&mut self, index: usize) -> &mut [u32; 4] {
        if self.0.len() <= index {
            self.0.resize(index + 1, [0; 4]);
        }
        &mut self.0[index]
    }

    pub(crate) fn raise(&mut self, index: usize, parts: &[Part], epoch: u32) {
        let entry = self.entry(index);
        for part in parts {
            entry[*part as usize] = entry[*part as usize].max(epoch);
        }
    }

    pub(crate) fn join_all(&mut self, other: &Clock) {
        self.join(other);
    }

    fn join(&mut self, other: &Clock) {
        self.join_if(other, |_| true);
    }

    fn join_if(&mut self, other: &Clock, keep: impl Fn(usize) -> bool) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), [0; 4]);
        }
        for (i, (mine, theirs)) in self.0.iter_mut().zip(&other.0).enumerate() {
            if keep(i) {
                for part in 0..4 {
                    mine[part] = mine[part].max(theirs[part]);
                }
            }
        }
    }

    fn join_part(&mut self, other: &Clock, part: Part) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), [0; 4]);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            mine[part as usize] = mine[part as usize].max(theirs[part as usize]);
        }
    }
}

/// What a release publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    Everything,
    Inits,
}

/// The clocks of a cluster. Lanes that synchronised share one clock; a lane's own entry is implied
/// by its warp's epoch, which grows after every release.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    lanes: Vec<Rc<Clock>>,
    epochs: Vec<u32>,
    agents: u32,
    pub(crate) enabled: bool,
}

impl Clocks {
    pub(crate) fn new(warps: usize, enabled: bool) -> Self {
        let none = Rc::new(Clock::default());
        Clocks {
            lanes: vec![none; warps * 32],
            epochs: vec![1; warps],
            agents: 0,
            enabled,
        }
    }

    #[inline(always)]
    pub(crate) fn lane(&self, warp: usize, lane: usize) -> &Rc<Clock> {
        &self.lanes[warp * 32 + lane]
    }

    #[inline(always)]
    pub(crate) fn epoch(&self, warp: usize) -> u32 {
        self.epochs[warp]
    }

    pub(crate) fn bump(&mut self, warp: usize) {
        self.epochs[warp] += 1;
    }

    /// A new asynchronous agent's entry.
    pub(crate) fn agent(&mut self) -> u32 {
        self.agents += 1;
        (self.lanes.len() as u32) + self.agents - 1
    }

    /// Adds what the lanes of `mask` publish to `into`. The caller bumps the epoch afterwards.
    pub(crate) fn release(&self, warp: usize, mask: u32, into: &mut Rc<Clock>, what: Release) {
        if !self.enabled {
            return;
        }
        let clock = Rc::make_mut(into);
        let mut last: Option<&Rc<Clock>> = None;
        for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
            let index = warp * 32 + lane;
            let own = &self.lanes[index];
            if !last.is_some_and(|l| Rc::ptr_eq(l, own)) {
                match what {
                    Release::Everything => clock.join(own),
                    Release::Inits => clock.join_part(own, Part::Inits),
                }
                last = Some(own);
            }
            match what {
                Release::Everything => {
                    clock.raise(index, &[Part::Writes, Part::Reads], self.epochs[warp])
                }
                Release::Inits => {}
            }
        }
    }

    /// Gives one lane's past, as it was at `epoch`, to `into`; reads only.
    pub(crate) fn release_reads(into: &mut Rc<Clock>, past: &Clock, index: usize, epoch: u32) {
        let clock = Rc::make_mut(into);
        clock.join_part(past, Part::Reads);
        clock.raise(index, &[Part::Reads], epoch);
    }

    fn update(&mut self, warp: usize, mask: u32, change: impl Fn(&mut Clock)) {
        if !self.enabled {
            return;
        }
        let mut done: Option<(Rc<Clock>, Rc<Clock>)> = None;
        for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
            let own = &mut self.lanes[warp * 32 + lane];
            match &done {
                Some((before, after)) if Rc::ptr_eq(before, own) => *own = after.clone(),
                _ => {
                    let before = own.clone();
                    let mut clock = (**own).clone();
                    change(&mut clock);
                    *own = Rc::new(clock);
                    done = Some((before, own.clone()));
                }
            }
        }
    }

    /// Orders the lanes of `mask` after everything in `clock`.
    pub(crate) fn acquire(&mut self, warp: usize, mask: u32, clock: &Clock) {
        self.update(warp, mask, |own| own.join(clock));
    }

    /// The same, for the entries that `keep` accepts.
    pub(crate) fn acquire_if(
        &mut self,
        warp: usize,
        mask: u32,
        clock: &Clock,
        keep: impl Fn(usize) -> bool,
    ) {
        self.update(warp, mask, |own| own.join_if(clock, &keep));
    }

    pub(crate) fn raise(
        &mut self,
        warp: usize,
        lane: usize,
        index: u32,
        parts: &[Part],
        epoch: u32,
    ) {
        self.update(warp, 1 << lane, |own| {
            own.raise(index as usize, parts, epoch)
        });
    }

    /// Everybody in `groups` learns what everybody who arrived did; those with `false` only arrive.
    pub(crate) fn barrier(&mut self, groups: &[(usize, u32, bool)]) {
        if !self.enabled {
            return;
        }
        let mut joined = Rc::new(Clock::default());
        for (i, (warp, mask, _)) in groups.iter().enumerate() {
            if i == 0 {
                joined = self
                    .lane(*warp, mask.trailing_zeros() as usize & 31)
                    .clone();
            }
            self.release(*warp, *mask, &mut joined, Release::Everything);
        }
        for (warp, mask, waits) in groups {
            for lane in (0..32).filter(|l| waits & (mask >> l & 1 != 0)) {
                self.lanes[warp * 32 + lane] = joined.clone();
            }
            self.bump(*warp);
        }
    }

    /// Everything the lanes of `mask` know has passed a fence into the asynchronous proxy.
    pub(crate) fn fence_proxy(&mut self, warp: usize, mask: u32) {
        let epoch = self.epochs[warp];
        self.update(warp, mask, |own| {
            for entry in &mut own.0 {
                entry[Part::Proxy as usize] =
                    entry[Part::Proxy as usize].max(entry[Part::Writes as usize]);
            }
            for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
                own.raise(warp * 32 + lane, &[Part::Proxy], epoch);
            }
        });
        self.bump(warp);
    }

    /// The lanes' own mbarrier initialisations are published.
    pub(crate) fn fence_inits(&mut self, warp: usize, mask: u32) {
        let epoch = self.epochs[warp];
        self.update(warp, mask, |own| {
            for lane in (0..32).filter(|l| mask >> l & 1 != 0) {
                own.raise(warp * 32 + lane, &[Part::Inits], epoch);
            }
        });
        self.bump(warp);
    }
}
