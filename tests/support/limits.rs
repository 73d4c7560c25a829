//! Owns how far random cases may go; must not know how they are drawn.

use kda_reference::{ConvLayout, Gate, NullRule, StateType};

use crate::data::Regime;
use crate::rng::Rng;

/// What random cases are drawn from. Every list must hold at least one value; a value listed twice
/// is drawn twice as often.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Heads are 1 up to this.
    pub max_heads: usize,
    /// Heads of one specialisation in twelve: more than blocks take in turn before they go on to the
    /// next request. 0: none.
    pub many_heads: usize,
    /// Requests are 1 up to this, less where the pools would grow too large.
    pub max_requests: usize,
    /// Tokens of a request.
    pub tokens: Vec<usize>,
    /// Decay formulas.
    pub gates: Vec<Gate>,
    /// Orders of the convolution cache.
    pub layouts: Vec<ConvLayout>,
    /// Null rules.
    pub null_rules: Vec<NullRule>,
    /// State elements.
    pub state_types: Vec<StateType>,
    /// Whether verify steps keep records in place of checkpoints.
    pub records: Vec<bool>,
    /// Whether verify steps take a number of tokens for each request.
    pub ragged: Vec<bool>,
    /// With and without a convolution bias.
    pub biases: Vec<bool>,
    /// With a projected gate input and with the low-rank gate.
    pub projected_gates: Vec<bool>,
    /// What values are like.
    pub regimes: Vec<Regime>,
    /// Requests in a hundred that are null, at fault or lack a checkpoint; 0: every request is
    /// live and keeps every checkpoint.
    pub odd_percent: usize,
    /// Largest size of both pools together, in bytes.
    pub max_pool_bytes: usize,
    /// How many different kernel specialisations (heads, tokens, verify, rollback, ragged, gate and its
    /// input, bias, layout, null rule, state) all seeds together may need, for executors that compile
    /// each; 0: no limit.
    pub specialisations: u64,
}

impl Default for Limits {
    /// Up to 6 heads, 5 requests and 8 tokens; everything else in full.
    fn default() -> Limits {
        Limits {
            max_heads: 6,
            many_heads: 14,
            max_requests: 5,
            tokens: vec![1, 1, 1, 2, 3, 4, 8],
            gates: vec![Gate::LowerBound { lower_bound: -5.0 }, Gate::Softplus],
            layouts: vec![ConvLayout::DimFirst, ConvLayout::TokenFirst],
            null_rules: vec![NullRule::NonPositive, NullRule::Negative],
            state_types: vec![StateType::F32, StateType::F32, StateType::Bf16],
            records: vec![false, false, true],
            ragged: vec![false, false, true],
            biases: vec![false, true],
            projected_gates: vec![false, false, true],
            regimes: Regime::ALL.to_vec(),
            odd_percent: 45,
            max_pool_bytes: 64 << 20,
            specialisations: 0,
        }
    }
}

impl Limits {
    /// Cases that an interpreter runs in a moment: up to 2 heads, 3 requests and 3 tokens.
    pub fn small() -> Limits {
        Limits {
            max_heads: 2,
            max_requests: 3,
            tokens: vec![1, 1, 2, 3],
            max_pool_bytes: 8 << 20,
            ..Limits::default()
        }
    }

    /// The same limits with every request live and every checkpoint kept.
    pub fn live(mut self) -> Limits {
        self.odd_percent = 0;
        self
    }

    /// Heads of `seed`'s kernel.
    pub(crate) fn heads(&self, seed: u64) -> usize {
        if self.many_heads > 0 && Rng::stream(self.specialisation(seed), 7).below(12) == 0 {
            return self.many_heads;
        }
        self.specialisation_rng(seed).between(1, self.max_heads)
    }

    /// The sequence that settles what a kernel is specialised for.
    pub(crate) fn specialisation_rng(&self, seed: u64) -> Rng {
        Rng::stream(self.specialisation(seed), 5)
    }

    fn specialisation(&self, seed: u64) -> u64 {
        let mixed = Rng::stream(seed, 4).word();
        match self.specialisations {
            0 => mixed,
            count => mixed % count,
        }
    }
}
