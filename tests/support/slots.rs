//! Owns the slots and accepted counts of a random case: permuted live slots, nulls of every kind,
//! and every fault. Must not know values or addresses.

use kda_reference::{NullRule, Shape};

use crate::case::WARP_COLUMNS;
use crate::rng::Rng;

/// What a drawn request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Live,
    /// Live, with null checkpoints.
    Gaps,
    Null,
    /// A token's slot beyond the pool.
    TokenBeyond,
    /// A source slot beyond the pool, in a column past the tokens where there is one.
    SourceBeyond,
    AcceptedOutside,
    NullSource,
}

/// Slots of the pool that one request has for itself: one a column; where the table is wider
/// than a warp, one a token and one to start from; with records one.
pub(crate) fn distinct(shape: &Shape) -> usize {
    if shape.records.is_some() {
        1
    } else if shape.columns > WARP_COLUMNS {
        shape.tokens + 1
    } else {
        shape.columns
    }
}

/// `slots [requests, columns]` and `accepted [requests]` of a verify launch.
///
/// Live slots are distinct over the batch. Columns that a launch must not look at hold anything.
pub(crate) fn draw(
    shape: &Shape,
    verify: bool,
    odd_percent: usize,
    rng: &mut Rng,
) -> (Vec<i32>, Option<Vec<i32>>) {
    let (requests, columns, tokens) = (shape.requests, shape.columns, shape.tokens);
    let lowest = match shape.null_rule {
        NullRule::NonPositive => 1,
        NullRule::Negative => 0,
    };
    if shape.pool_slots == 0 {
        return without_pool(shape, verify, rng);
    }
    if shape.records.is_some() {
        return draw_with_records(shape, odd_percent, rng);
    }
    let mut free: Vec<i32> = (lowest..shape.pool_slots as i32).collect();
    rng.shuffle(&mut free);
    let (wide, width) = (columns > WARP_COLUMNS, distinct(shape));
    // One slot stays out of the table, for what lies between its rows.
    let (last, used) = free.split_last().expect("a spare slot");
    let mut slots = vec![*last; requests * columns];
    let mut accepted = vec![1; requests];
    for request in 0..requests {
        let row = &mut slots[request * columns..][..columns];
        let own = &free[request * width..][..width];
        let mut count = if verify { rng.between(1, columns) } else { 1 };
        if wide {
            if rng.chance(50) {
                count = rng.between(WARP_COLUMNS + 1, columns);
            }
            row.fill_with(|| match odd_percent > 0 && rng.chance(20) {
                true => null(shape.null_rule, rng),
                false => rng.pick(used),
            });
            row[..tokens].copy_from_slice(&own[..tokens]);
            if count > tokens {
                row[count - 1] = own[tokens];
            }
        } else {
            row.copy_from_slice(own);
        }
        accepted[request] = count as i32;
        let kind = if rng.chance(odd_percent) {
            odd_kind(shape, verify, rng)
        } else {
            Kind::Live
        };
        match kind {
            Kind::Live => {}
            Kind::Gaps => {
                for (column, slot) in row.iter_mut().enumerate().take(tokens).skip(1) {
                    if column + 1 != count && rng.chance(60) {
                        *slot = null(shape.null_rule, rng);
                    }
                }
            }
            Kind::Null => {
                row[0] = null(shape.null_rule, rng);
                for slot in row[1..].iter_mut() {
                    if rng.chance(40) {
                        *slot = beyond(shape, rng);
                    }
                }
                if verify && rng.chance(50) {
                    accepted[request] = outside(columns, rng);
                }
                continue;
            }
            Kind::TokenBeyond => row[rng.below(tokens)] = beyond(shape, rng),
            Kind::SourceBeyond => {
                let column = if columns > tokens {
                    rng.between(tokens, columns - 1)
                } else {
                    rng.below(columns)
                };
                accepted[request] = column as i32 + 1;
                row[column] = beyond(shape, rng);
                continue;
            }
            Kind::AcceptedOutside => accepted[request] = outside(columns, rng),
            Kind::NullSource => {
                let column = rng.between(1, columns - 1);
                accepted[request] = column as i32 + 1;
                row[column] = null(shape.null_rule, rng);
                continue;
            }
        }
        // Columns past the tokens that are not the source are never looked at.
        for (column, slot) in row.iter_mut().enumerate().skip(tokens) {
            if column as i32 + 1 != accepted[request] && odd_percent > 0 && rng.chance(40) {
                *slot = beyond(shape, rng);
            }
        }
    }
    (slots, verify.then_some(accepted))
}

/// As [`draw`], for a launch that reads the first column alone.
fn draw_with_records(
    shape: &Shape,
    odd_percent: usize,
    rng: &mut Rng,
) -> (Vec<i32>, Option<Vec<i32>>) {
    let lowest = match shape.null_rule {
        NullRule::NonPositive => 1,
        NullRule::Negative => 0,
    };
    let mut free: Vec<i32> = (lowest..shape.pool_slots as i32).collect();
    rng.shuffle(&mut free);
    let limit = shape.accepted_limit();
    let mut slots = Vec::new();
    let mut accepted = Vec::new();
    for &slot in &free[..shape.requests] {
        let mut count = if rng.chance(25) {
            limit
        } else {
            rng.between(1, limit)
        } as i32;
        let mut own = slot;
        if rng.chance(odd_percent) {
            match rng.below(4) {
                0 => own = beyond(shape, rng),
                1 => count = outside(limit, rng),
                _ => own = null(shape.null_rule, rng),
            }
        }
        slots.push(own);
        slots.extend((1..shape.columns).map(|_| beyond(shape, rng)));
        accepted.push(count);
    }
    (slots, Some(accepted))
}

/// Tokens that each request brings.
pub(crate) fn token_counts(shape: &Shape, odd_percent: usize, rng: &mut Rng) -> Vec<i32> {
    let tokens = shape.tokens as i32;
    let count = |_| match rng.below(7) {
        0 | 1 if odd_percent > 0 => 0,
        2 if odd_percent > 0 => rng.pick(&[-1, i32::MIN, tokens + 1, i32::MAX]),
        3 => tokens,
        _ => rng.between(1, shape.tokens) as i32,
    };
    (0..shape.requests).map(count).collect()
}

/// Of pools without a slot: every request is null or at fault.
fn without_pool(shape: &Shape, verify: bool, rng: &mut Rng) -> (Vec<i32>, Option<Vec<i32>>) {
    let slot = |rng: &mut Rng| match rng.chance(70) {
        true => null(shape.null_rule, rng),
        false => beyond(shape, rng),
    };
    let slots = (0..shape.requests * shape.columns).map(|_| slot(rng));
    let slots = slots.collect();
    let count = |rng: &mut Rng| match rng.chance(20) {
        true => outside(shape.accepted_limit(), rng),
        false => rng.between(1, shape.accepted_limit()) as i32,
    };
    let accepted = verify.then(|| (0..shape.requests).map(|_| count(rng)).collect());
    (slots, accepted)
}

fn odd_kind(shape: &Shape, verify: bool, rng: &mut Rng) -> Kind {
    let mut kinds = vec![Kind::Null, Kind::TokenBeyond];
    if verify {
        kinds.extend([Kind::AcceptedOutside, Kind::SourceBeyond]);
        if shape.columns > 1 {
            kinds.push(Kind::NullSource);
        }
        if shape.tokens > 1 {
            kinds.extend([Kind::Gaps, Kind::Gaps]);
        }
    } else {
        kinds.push(Kind::Null);
    }
    rng.pick(&kinds)
}

fn null(rule: NullRule, rng: &mut Rng) -> i32 {
    match rule {
        NullRule::NonPositive => rng.pick(&[0, 0, -1, -7, i32::MIN]),
        NullRule::Negative => rng.pick(&[-1, -1, -7, i32::MIN]),
    }
}

fn beyond(shape: &Shape, rng: &mut Rng) -> i32 {
    let pool = shape.pool_slots as i32;
    rng.pick(&[pool, pool + 1, pool + 1000, 1 << 30, i32::MAX])
}

fn outside(columns: usize, rng: &mut Rng) -> i32 {
    let columns = columns as i32;
    rng.pick(&[0, 0, -1, i32::MIN, columns + 1, columns + 1, i32::MAX])
}
