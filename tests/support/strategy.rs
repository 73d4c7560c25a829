//! Owns the proptest view of random cases: failures shrink to few heads, requests and tokens. Must
//! not know how cases are drawn.

use proptest::prelude::*;
use proptest::sample::select;

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
