//! Owns the proptest view of random cases: failures shrink to few heads, requests and tokens. Must
//! not know how cases are drawn.

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed};

use crate::case::Case;
use crate::limits::Limits;

/// Random cases within `limits`. Sizes shrink, the seed does not: [`Case::sized`] with the seed,
/// heads and requests of the message, and `limits.tokens` of one value, replays a failure.
pub fn case_strategy(limits: Limits) -> impl Strategy<Value = Case> {
    let mut tokens = limits.tokens.clone();
    tokens.sort_unstable();
    (
        1..=limits.max_heads,
        1..=limits.max_requests,
        select(tokens),
        any::<u64>().no_shrink(),
    )
        .prop_map(move |(heads, requests, tokens, seed)| {
            let limits = Limits {
                tokens: vec![tokens],
                ..limits.clone()
            };
            Case::sized(seed, &limits, heads, requests)
        })
}

/// Settings of a property test: the same cases on every run; `PROPTEST_RNG_SEED` draws others.
pub fn property_config(cases: u32) -> Config {
    let default = Config::default();
    Config {
        cases,
        failure_persistence: None,
        rng_seed: match default.rng_seed {
            RngSeed::Random => RngSeed::Fixed(0x6b64_6131),
            fixed => fixed,
        },
        ..default
    }
}
