//! Owns an engine in miniature that serves random requests step after step: joins, leaves, decode and
//! verify steps of every length, padded rows, block tables, refused requests. Each step is judged
//! against the oracle. Must not know who computes a step.
//!
//! What a world does follows from its seed alone, never from results or time: the same seed replays
//! it, as far as it got.

use std::fmt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use half::bf16;
use kda_reference::{CONV_WIDTH, NullRule};

use crate::rng::Rng;
use crate::{Buffers, Case, Errors, Executor, Faults, Limits, Mismatch, Regime, Requirement};

/// Batches that steps are padded to.
pub const BUCKETS: [usize; 4] = [1, 2, 4, 8];
/// Tokens of a verify step.
pub const LENGTHS: [usize; 4] = [1, 2, 3, 4];
/// Columns of the block table: a token and three drafts.
const COLUMNS: usize = LENGTHS[LENGTHS.len() - 1];
/// Requests served at once.
const MOST_LIVE: usize = BUCKETS[BUCKETS.len() - 1];
/// Steps judged behind the one that runs.
const BEHIND: usize = 4;

/// What a soak did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Launches.
    pub steps: u64,
    /// Decode launches among them.
    pub decodes: u64,
    /// Tokens computed.
    pub tokens: u64,
    /// Tokens accepted.
    pub accepted: u64,
    /// Requests that joined.
    pub joined: u64,
    /// Requests that left.
    pub left: u64,
    /// Rows of padding.
    pub padded: u64,
    /// Requests refused, each of which had to be.
    pub refused: u64,
    /// Worst errors.
    pub errors: Errors,
}

impl Tally {
    /// Adds another world's.
    pub fn merge(&mut self, other: &Tally) {
        for (own, other) in [
            (&mut self.steps, other.steps),
            (&mut self.decodes, other.decodes),
            (&mut self.tokens, other.tokens),
            (&mut self.accepted, other.accepted),
            (&mut self.joined, other.joined),
            (&mut self.left, other.left),
            (&mut self.padded, other.padded),
            (&mut self.refused, other.refused),
        ] {
            *own += other;
        }
        self.errors.merge(&other.errors);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            steps,
            decodes,
            tokens,
            accepted,
            joined,
            left,
            padded,
            refused,
            errors,
        } = self;
        writeln!(
            f,
            "{steps} steps ({decodes} decode, {} verify), {tokens} tokens, {accepted} of them \
             accepted",
            steps - decodes
        )?;
        writeln!(
            f,
            "{joined} requests joined, {left} left; {padded} padded requests, {refused} faults, \
             each expected"
        )?;
        write!(f, "{errors}")
    }
}

/// A request that is served.
struct Request {
    /// Its slots, a column each.
    slots: [i32; COLUMNS],
    /// Tokens of its last step that were accepted.
    accepted: usize,
}

/// One model layer, its pools and its requests.
pub struct World {
    seed: u64,
    rng: Rng,
    /// Weights, settings and strides; requests, tokens and slots are each step's own.
    base: Case,
    buffers: Buffers,
    requests: Vec<Request>,
    free: Vec<i32>,
    tally: Tally,
}

impl World {
    /// A world of `heads` heads; its settings, strides and everything that happens follow from
    /// `seed`.
    pub fn new(seed: u64, heads: usize) -> World {
        let mut rng = Rng::stream(seed, 40);
        let limits = Limits {
            regimes: vec![Regime::Plain],
            ..Limits::default()
        }
        .live();
        let mut base = Case::sized(seed, &limits, heads, 1);
        let shape = &mut base.shape;
        let conv_slot = shape.conv_slot_stride - 3 * shape.dim() * shape.conv_len;
        shape.columns = COLUMNS;
        if let Some(records) = &mut shape.records {
            records.count = COLUMNS - 1;
        }
        shape.conv_len = CONV_WIDTH - 1 + COLUMNS - 1 + rng.below(3);
        shape.conv_slot_stride = 3 * shape.dim() * shape.conv_len + conv_slot;
        shape.slots_stride = COLUMNS + rng.below(5);
        crate::case::tight_records(shape);
        // Slot 0, slots of every request, and one that nobody ever gets.
        shape.pool_slots = 2 + MOST_LIVE * COLUMNS;
        base.slots = vec![-1; COLUMNS];
        let free = (1..=(MOST_LIVE * COLUMNS) as i32).collect();
        let mut world = World {
            seed,
            rng,
            buffers: Buffers::poisoned(&World::largest(&base)),
            base,
            requests: Vec::new(),
            free,
            tally: Tally::default(),
        };
        world.rng.shuffle(&mut world.free);
        world
    }

    /// The largest step of any: every operand of a step fits into its.
    pub fn largest(base: &Case) -> Case {
        let mut case = base.clone();
        case.shape.requests = MOST_LIVE;
        case.shape.tokens = COLUMNS;
        case.verify = true;
        case.slots = vec![-1; MOST_LIVE * COLUMNS];
        case.accepted = Some(vec![1; MOST_LIVE]);
        case.token_counts = base.token_counts.as_ref().map(|_| vec![0; MOST_LIVE]);
        case
    }

    /// The settings, as a case of one request.
    pub fn base(&self) -> &Case {
        &self.base
    }

    /// What happened so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Requests come and go.
    fn turnover(&mut self) {
        let shape = self.base.shape;
        let mut left = Vec::new();
        let rng = &mut self.rng;
        self.requests.retain(|request| {
            let stays = !rng.chance(6);
            if !stays {
                left.push(request.slots);
            }
            stays
        });
        for slots in left {
            self.tally.left += 1;
            // What it leaves behind stays: the next owner of a slot writes what it starts from.
            self.free.extend(slots);
            self.rng.shuffle(&mut self.free);
        }
        while self.requests.len() < MOST_LIVE && (self.requests.is_empty() || self.rng.chance(25)) {
            let slots: [i32; COLUMNS] = std::array::from_fn(|_| {
                self.free
                    .pop()
                    .expect("a request's slots come back with it")
            });
            // A fresh request, or one whose prompt another kernel served.
            let fresh = self.rng.chance(40);
            let mut value = || if fresh { 0.0 } else { 0.5 * self.rng.normal() };
            let state: Vec<f32> = (0..shape.heads * crate::MATRIX).map(|_| value()).collect();
            let line: Vec<f32> = (0..3 * shape.dim() * 3).map(|_| value()).collect();
            let first = slots[0] as usize;
            self.buffers.put_states(&shape, first, &state);
            for (i, &tap) in line.iter().enumerate() {
                let index = shape.conv_index(first, i / 3, i % 3);
                self.buffers.conv_cache.set_bf16(index, bf16::from_f32(tap));
            }
            self.requests.push(Request { slots, accepted: 1 });
            self.tally.joined += 1;
        }
        self.rng.shuffle(&mut self.requests);
    }

    /// The next step as a case: which kind, how many rows, whose.
    fn next(&mut self) -> Case {
        let live = self.requests.len();
        let fits: Vec<usize> = BUCKETS.into_iter().filter(|&b| b >= live).collect();
        let bucket = self.rng.pick(&fits[..fits.len().min(2)]);
        let mut case = self.base.clone();
        // Decode starts from column 0, so it serves requests whose last step kept one token.
        let plain = self.requests.iter().all(|request| request.accepted == 1);
        case.verify = !plain || self.rng.chance(70);
        let tokens = if case.verify {
            self.rng.pick(&LENGTHS)
        } else {
            1
        };
        let shape = &mut case.shape;
        (shape.requests, shape.tokens) = (bucket, tokens);
        let null: &[i32] = match shape.null_rule {
            NullRule::NonPositive => &[0, -1, i32::MIN],
            NullRule::Negative => &[-1, i32::MIN],
        };
        let pool = shape.pool_slots as i32;
        case.slots.clear();
        if !case.verify {
            shape.records = None;
            case.token_counts = None;
        }
        let mut counts = Vec::new();
        for request in &self.requests {
            case.slots.extend(request.slots);
            counts.push(request.accepted as i32);
        }
        for _ in live..bucket {
            // Padding, and whatever an earlier batch left in the rest of its row.
            case.slots.push(self.rng.pick(null));
            for _ in 1..COLUMNS {
                case.slots.push(self.rng.between(0, pool as usize) as i32);
            }
            counts.push(self.rng.pick(&[0, 1, 4, -7, i32::MAX]));
        }
        if self.rng.chance(8) {
            // A bug of the engine's: one request's metadata is absurd.
            let request = self.rng.below(live);
            match case.verify && self.rng.chance(50) {
                true => counts[request] = self.rng.pick(&[0, -1, 5, i32::MAX]),
                false => {
                    let slot = request * COLUMNS + self.rng.below(tokens);
                    case.slots[slot] = self.rng.pick(&[pool, pool + 1, i32::MAX]);
                }
            }
        }
        case.accepted = case.verify.then_some(counts);
        if let Some(counts) = &mut case.token_counts {
            *counts = (0..bucket)
                .map(|_| self.rng.below(tokens + 1) as i32)
                .collect();
            if self.rng.chance(5) {
                counts[self.rng.below(live)] = self.rng.pick(&[-1, tokens as i32 + 1]);
            }
        }
        case
    }

    /// The operands of a step over the pools as they are.
    fn operands(&mut self, case: &Case) -> Buffers {
        let shape = &case.shape;
        let mut buffers = Buffers::poisoned(case);
        let weights = Buffers::new(&self.base);
        buffers.conv_weight = weights.conv_weight;
        buffers.conv_bias = weights.conv_bias;
        buffers.f_b = weights.f_b;
        buffers.a_log = weights.a_log;
        buffers.dt_bias = weights.dt_bias;
        buffers.norm = weights.norm;
        buffers.put_slots(case);
        // Rows of padding stay NaN.
        for row in 0..self.requests.len() * shape.tokens {
            for column in 0..shape.used_columns() {
                let value = bf16::from_f32(self.rng.normal());
                buffers
                    .projected
                    .set_bf16(row * shape.pitch + column, value);
            }
        }
        if case.shape.records.is_some() {
            std::mem::swap(&mut buffers.records, &mut self.buffers.records);
        }
        if let Some(region) = &mut buffers.gate_input {
            for row in 0..self.requests.len() * shape.tokens {
                for column in 0..shape.dim() {
                    let value = bf16::from_f32(self.rng.normal());
                    region.set_bf16(row * shape.gate_stride + column, value);
                }
            }
        }
        std::mem::swap(&mut buffers.state, &mut self.buffers.state);
        std::mem::swap(&mut buffers.conv_cache, &mut self.buffers.conv_cache);
        buffers
    }

    /// One step: requests come and go, a batch runs, some of its tokens are accepted.
    ///
    /// # Errors
    ///
    /// What kept the launch from running.
    pub fn step(&mut self, executor: &mut dyn Executor, mode: &str) -> Result<Judged, Mismatch> {
        self.turnover();
        let case = self.next();
        let before = self.operands(&case);
        let mut after = before.clone();
        let context = format!("world {:#x} step {}", self.seed, self.tally.steps);
        let faults = executor.run(&case, mode, &mut after).map_err(|error| {
            Mismatch::new("launch", Requirement::Runs)
                .at(error.to_string())
                .within(format!(
                    "{context}, {}, mode {mode}; {case}",
                    executor.name()
                ))
        })?;
        if after.records.is_some() {
            self.buffers.records = after.records.clone();
        }
        self.buffers.state = after.state.clone();
        self.buffers.conv_cache = after.conv_cache.clone();
        let refused = case.faults();
        let tally = &mut self.tally;
        tally.steps += 1;
        tally.decodes += u64::from(!case.verify);
        tally.padded += (case.shape.requests - self.requests.len()) as u64;
        tally.refused += refused.len() as u64;
        for (i, request) in self.requests.iter_mut().enumerate() {
            // A refused request keeps its state and is served again.
            if refused.iter().any(|(refused, _)| *refused == i) {
                continue;
            }
            let tokens = case.tokens_of(i);
            // One that brought nothing stands where it stood.
            if tokens == 0 {
                continue;
            }
            request.accepted = self.rng.between(1, tokens);
            tally.tokens += tokens as u64;
            tally.accepted += request.accepted as u64;
        }
        Ok(Judged {
            case,
            before,
            after,
            faults,
            context: format!("{context}, mode {mode}"),
        })
    }
}

/// A step that ran, to be judged.
pub struct Judged {
    case: Case,
    before: Buffers,
    after: Buffers,
    faults: Option<Faults>,
    context: String,
}

impl Judged {
    /// Compares every byte and value with what the step had to leave.
    ///
    /// # Errors
    ///
    /// The first that is wrong.
    pub fn judge(&self) -> Result<Errors, Mismatch> {
        self.case
            .check(&self.before, &self.after, self.faults.as_ref())
            .map_err(|mismatch| mismatch.within(&self.context))
    }
}

/// Serves `world` until `more` says no, while another thread judges.
///
/// # Errors
///
/// The first step that did not run, or was wrong.
pub fn serve(
    world: &mut World,
    executor: &mut dyn Executor,
    mut more: impl FnMut(&Tally) -> bool,
) -> Result<Tally, Mismatch> {
    let mut modes = executor.modes(&world.base);
    // Each mode is another kernel a kind.
    Rng::stream(world.seed, 41).shuffle(&mut modes);
    modes.truncate(3);
    let (sender, receiver): (SyncSender<Judged>, Receiver<Judged>) = sync_channel(BEHIND);
    let failure: Arc<Mutex<Option<Mismatch>>> = Arc::default();
    let errors = std::thread::scope(|scope| {
        let failed = failure.clone();
        let judge = scope.spawn(move || {
            let mut errors = Errors::default();
            for step in receiver {
                match step.judge() {
                    Ok(found) => errors.merge(&found),
                    Err(mismatch) => {
                        *failed.lock().expect("no holder panics") = Some(mismatch);
                        break;
                    }
                }
            }
            errors
        });
        while more(&world.tally) {
            let mode = &modes[world.tally.steps as usize % modes.len()];
            match world.step(executor, mode) {
                Ok(step) => {
                    // The judge stops at its first mismatch.
                    if sender.send(step).is_err() {
                        break;
                    }
                }
                Err(mismatch) => {
                    let mut failure = failure.lock().expect("no holder panics");
                    failure.get_or_insert(mismatch);
                    break;
                }
            }
        }
        drop(sender);
        judge.join().expect("judging does not panic")
    });
    world.tally.errors.merge(&errors);
    match failure.lock().expect("no holder panics").take() {
        Some(mismatch) => Err(mismatch),
        None => Ok(world.tally),
    }
}
