//! Owns the promise "same bits, whoever asks": pairs of launches that must agree bit for bit. Must
//! not know the right values.
//!
//! Each check takes any case and changes one thing. A case whose requests are all null or at fault
//! has nothing to compare and passes.

use std::sync::Arc;

use half::bf16;
use kda_reference::{CONV_WIDTH, ConvLayout, HEAD_DIM, Plan};

use crate::buffers::Buffers;
use crate::case::Case;
use crate::data::{Data, MATRIX};
use crate::executor::{Executor, Faults};
use crate::limits::Limits;
use crate::mismatch::{Mismatch, Requirement};
use crate::property::Share;
use crate::rng::Rng;

/// A check of one promise.
pub type Check = fn(&mut dyn Executor, &Case) -> Result<(), Mismatch>;

/// Every check, with its name.
pub const CHECKS: [(&str, Check); 10] = [
    ("modes", modes),
    ("batch", batch),
    ("layouts", layouts),
    ("strides", strides),
    ("verify and decode", verify_and_decode),
    ("records and checkpoints", records_and_checkpoints),
    ("ragged", ragged),
    ("faults", faults),
    ("nan containment", nan_containment),
    ("repeat", repeat),
];

/// Runs every check on `cases` random cases each; returns how many ran.
///
/// # Errors
///
/// The first pair that differs.
pub fn run_all(
    executor: &mut dyn Executor,
    cases: u64,
    seed: u64,
    limits: &Limits,
    progress: &mut dyn FnMut(&str),
) -> Result<u64, Mismatch> {
    run_share(executor, cases, Share::WHOLE, seed, limits, progress)
}

/// As [`run_all`], one share of all checks' cases; they are numbered check by check.
///
/// # Errors
///
/// The first pair of the share that differs, with its number.
pub fn run_share(
    executor: &mut dyn Executor,
    cases: u64,
    share: Share,
    seed: u64,
    limits: &Limits,
    progress: &mut dyn FnMut(&str),
) -> Result<u64, Mismatch> {
    let mut ran = 0;
    for number in share.cases(cases * CHECKS.len() as u64) {
        let (name, check) = CHECKS[(number / cases) as usize];
        let seed = Rng::stream(seed, number % cases).word();
        check(executor, &Case::random(seed, limits)).map_err(|mismatch| {
            let mismatch = mismatch.within(format!("identity \"{name}\""));
            mismatch.numbered(number)
        })?;
        progress(name);
        ran += 1;
    }
    Ok(ran)
}

/// Some of all legal modes, other ones for each case, leave the same bytes everywhere.
///
/// # Errors
///
/// The first difference.
pub fn modes(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mut modes = executor.legal_modes(case);
    // All would compile a hundred kernels for each specialisation.
    Rng::stream(case.seed, 15).shuffle(&mut modes);
    modes.truncate(12);
    agree(executor, case, &modes)
}

/// The given modes leave the same bytes everywhere.
///
/// # Errors
///
/// The first difference.
pub fn agree(executor: &mut dyn Executor, case: &Case, modes: &[String]) -> Result<(), Mismatch> {
    let (_, first, first_faults) = launch(executor, case, &modes[0])?;
    for mode in &modes[1..] {
        let (_, other, other_faults) = launch(executor, case, mode)?;
        let context = format!("{case}, mode {} against {mode}", modes[0]);
        same_bytes(case, &first, &other).map_err(|m| m.within(&context))?;
        if first_faults != other_faults {
            return Err(Mismatch::new("faults", Requirement::Identical)
                .at(format!("{first_faults:?} and {other_faults:?}"))
                .within(context));
        }
    }
    Ok(())
}

/// Twice the same launch leaves the same bytes.
///
/// # Errors
///
/// The first difference.
pub fn repeat(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mode = pick_mode(executor, case, 0);
    let (_, first, _) = launch(executor, case, &mode)?;
    let (_, second, _) = launch(executor, case, &mode)?;
    same_bytes(case, &first, &second).map_err(|m| m.within(format!("{case}, mode {mode}")))
}

/// A request alone, and in a batch of another order with other slots.
///
/// # Errors
///
/// The first difference.
pub fn batch(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mut rng = Rng::stream(case.seed, 10);
    let wanted = results_of(executor, case, 0)?;
    let mut order: Vec<usize> = (0..case.shape.requests).collect();
    rng.shuffle(&mut order);
    let other = case.select(&order).reslot(&mut rng);
    let found = results_of(executor, &other, 1)?;
    for (place, &request) in order.iter().enumerate() {
        compare(case, request, &wanted[request], &found[place], "reordered")?;
    }
    for request in [order[0], order[order.len() - 1]] {
        let alone = case.select(&[request]).reslot(&mut rng);
        let found = results_of(executor, &alone, 2)?;
        compare(case, request, &wanted[request], &found[0], "alone")?;
    }
    Ok(())
}

/// The other layout of the convolution cache.
///
/// # Errors
///
/// The first difference.
pub fn layouts(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mut other = case.clone();
    other.shape.conv_layout = match case.shape.conv_layout {
        ConvLayout::DimFirst => ConvLayout::TokenFirst,
        ConvLayout::TokenFirst => ConvLayout::DimFirst,
    };
    against(executor, case, &other, "other conv layout")
}

/// Other strides, lengths and starts of every operand.
///
/// # Errors
///
/// The first difference.
pub fn strides(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mut rng = Rng::stream(case.seed, 11);
    let other = case.restride(Limits::default().max_pool_bytes, &mut rng);
    against(executor, case, &other, "other strides")
}

/// A verify step of T tokens and T decode steps over the same tokens. A decode case is compared
/// with a verify step of one token.
///
/// # Errors
///
/// The first difference.
pub fn verify_and_decode(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let Some((live, verify)) = live_verify(case) else {
        return Ok(());
    };
    let wanted = results_of(executor, &verify, 0)?;
    let (shape, taps) = (verify.shape, CONV_WIDTH - 1);
    let (mut windows, mut states) = (verify.data.windows.clone(), verify.source_states());
    for token in 0..shape.tokens {
        let decode = verify.decode_step(token, windows, states);
        let mode = pick_mode(executor, &decode, token);
        let (_, after, _) = launch(executor, &decode, &mode)?;
        (windows, states) = (Vec::new(), Vec::new());
        for (request, found) in results(&decode, &after).into_iter().enumerate() {
            let slot = decode.slots[request] as usize;
            windows.extend(after.line(&decode.shape, slot, 0, taps));
            states.extend(after.states(&decode.shape, slot));
            let Some(wanted) = &wanted[request] else {
                continue;
            };
            // A ragged request may have ended.
            if token >= wanted.out.len() {
                continue;
            }
            // The line after this token, from the line after all of them.
            let line = wanted.line.chunks_exact(wanted.out.len() + 2);
            let part = RequestResult {
                out: vec![wanted.out[token].clone()],
                states: vec![wanted.states[token].clone()],
                line: line.flat_map(|l| l[token..token + taps].to_vec()).collect(),
            };
            let context = format!("decode step {token} of the verify step");
            compare(case, live[request], &Some(part), &found, &context)?;
        }
    }
    Ok(())
}

/// The live requests of a case, and a verify step of them; `None` without any.
fn live_verify(case: &Case) -> Option<(Vec<usize>, Case)> {
    let live: Vec<usize> = (0..case.shape.requests)
        .filter(|&r| matches!(case.plan(r), Plan::Live { .. }))
        .collect();
    if live.is_empty() {
        return None;
    }
    let mut verify = case.select(&live);
    verify.verify = true;
    verify.accepted.get_or_insert_with(|| vec![1; live.len()]);
    Some((live, verify))
}

/// A verify step with records, those of the step before repeated, and one with checkpoints.
///
/// # Errors
///
/// The first difference.
pub fn records_and_checkpoints(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let Some((live, verify)) = live_verify(case) else {
        return Ok(());
    };
    let mut rng = Rng::stream(case.seed, 15);
    let other = match verify.shape.records {
        Some(_) => verify.with_checkpoints(&mut rng),
        None => verify.with_records(&mut rng),
    };
    let wanted = results_of(executor, &verify, 0)?;
    let found = results_of(executor, &other, 1)?;
    for (i, &request) in live.iter().enumerate() {
        compare(
            case,
            request,
            &wanted[i],
            &found[i],
            "records and checkpoints",
        )?;
    }
    Ok(())
}

/// A ragged verify step, and each of its requests alone in a step of as many tokens.
///
/// # Errors
///
/// The first difference, or whatever [`Case::check`] finds in the ragged step.
pub fn ragged(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let Some((live, mut step)) = live_verify(case) else {
        return Ok(());
    };
    let mut rng = Rng::stream(case.seed, 16);
    let tokens = step.shape.tokens;
    let counts: Vec<usize> = live.iter().map(|_| rng.below(tokens + 1)).collect();
    step.token_counts = Some(counts.iter().map(|&count| count as i32).collect());
    let mode = pick_mode(executor, &step, 0);
    let (before, after, faults) = launch(executor, &step, &mode)?;
    step.check(&before, &after, faults.as_ref())
        .map_err(|m| m.within(format!("mode {mode}")))?;
    let wanted = results(&step, &after);
    for (i, &request) in live.iter().enumerate().filter(|&(i, _)| counts[i] > 0) {
        let alone = step.shortened(i, counts[i]);
        let found = results_of(executor, &alone, 1)?;
        let context = format!("{} tokens alone", counts[i]);
        compare(case, request, &wanted[i], &found[0], &context)?;
    }
    Ok(())
}

/// Requests at fault do as null requests do, and their neighbours notice nothing.
///
/// # Errors
///
/// The first difference, or whatever [`Case::check`] finds.
pub fn faults(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mut rng = Rng::stream(case.seed, 12);
    let mut faulted = case.clone();
    let columns = case.shape.columns;
    if faulted.faults().is_empty() {
        let request = rng.below(case.shape.requests);
        faulted.slots[request * columns] = rng.pick(&[case.shape.pool_slots as i32, i32::MAX]);
    }
    let mut nulled = faulted.clone();
    for (request, _) in faulted.faults() {
        nulled.slots[request * columns] = -1;
    }
    let mut both = Vec::new();
    for case in [&faulted, &nulled] {
        let mode = pick_mode(executor, case, 0);
        let launched = launch(executor, case, &mode)?;
        both.push((case, mode, results(case, &launched.1), launched));
    }
    for (request, (a, b)) in both[0].2.iter().zip(&both[1].2).enumerate() {
        compare(&faulted, request, a, b, "faults against nulls")?;
    }
    for (case, mode, _, (before, after, faults)) in &both {
        case.check(before, after, faults.as_ref())
            .map_err(|m| m.within(format!("mode {mode}")))?;
    }
    Ok(())
}

/// NaN in the row and the state of one request reaches no byte of another.
///
/// # Errors
///
/// The first difference.
pub fn nan_containment(executor: &mut dyn Executor, case: &Case) -> Result<(), Mismatch> {
    let mut rng = Rng::stream(case.seed, 13);
    let victim = rng.below(case.shape.requests);
    let shape = &case.shape;
    let mut data = Data::clone(&case.data);
    let row = victim * shape.tokens * shape.used_columns();
    let column = rng.below(shape.used_columns());
    data.projected[row + column] = rng.pick(&[bf16::NAN, bf16::INFINITY]);
    if let Some(gates) = &mut data.gate_input {
        let row = victim * shape.tokens * shape.dim();
        gates[row + column % shape.dim()] = bf16::NAN;
    }
    let start = victim * shape.heads * MATRIX;
    data.states[start + rng.below(MATRIX)] = f32::NAN;
    let mut poisoned = case.clone();
    poisoned.data = Arc::new(data);
    let wanted = results_of(executor, case, 0)?;
    let found = results_of(executor, &poisoned, 0)?;
    for request in (0..shape.requests).filter(|&r| r != victim) {
        let context = format!("NaN in request {victim}");
        compare(case, request, &wanted[request], &found[request], &context)?;
    }
    Ok(())
}

/// What one live request left, without addresses.
struct RequestResult {
    /// Bits of each token's row.
    out: Vec<Vec<u16>>,
    /// Bits of each token's state, where it is kept or its record is.
    states: Vec<Option<Vec<u32>>>,
    /// Positions `0..tokens + 2` of each channel, of the tokens that the request brings.
    line: Vec<bf16>,
}

fn results(case: &Case, after: &Buffers) -> Vec<Option<RequestResult>> {
    let shape = &case.shape;
    let result = |request| {
        let Plan::Live {
            first, checkpoints, ..
        } = case.plan(request)
        else {
            return None;
        };
        let row = |token| {
            let start = (request * shape.tokens + token) * shape.out_stride;
            let bits = |i| after.out.bf16(start + i).to_bits();
            (0..shape.dim()).map(bits).collect()
        };
        let tokens = checkpoints.len();
        let mut states = vec![None; tokens];
        for (token, _, values) in case.kept_states(first, &checkpoints, after) {
            states[token] = Some(values.into_iter().map(f32::to_bits).collect());
        }
        Some(RequestResult {
            out: (0..tokens).map(row).collect(),
            states,
            line: after.line(shape, first, 0, tokens + 2),
        })
    };
    (0..shape.requests).map(result).collect()
}

fn compare(
    case: &Case,
    request: usize,
    wanted: &Option<RequestResult>,
    found: &Option<RequestResult>,
    context: &str,
) -> Result<(), Mismatch> {
    let (Some(wanted), Some(found)) = (wanted, found) else {
        return Ok(());
    };
    let differs = |operand, token: usize, head, place: String, a: f64, b: f64| {
        Err(Mismatch::new(operand, Requirement::Identical)
            .request(request)
            .token(token)
            .head(head)
            .at(place)
            .values(a, b, 0.0)
            .within(format!("{context}; {case}")))
    };
    for (token, (a, b)) in wanted.out.iter().zip(&found.out).enumerate() {
        if let Some(i) = a.iter().zip(b).position(|(a, b)| a != b) {
            let values = [a[i], b[i]].map(|bits| bf16::from_bits(bits).to_f64());
            let place = format!("column {i}");
            return differs("out", token, i / HEAD_DIM, place, values[0], values[1]);
        }
    }
    for (token, (a, b)) in wanted.states.iter().zip(&found.states).enumerate() {
        let (Some(a), Some(b)) = (a, b) else {
            continue;
        };
        if let Some(i) = a.iter().zip(b).position(|(a, b)| a != b) {
            let values = [a[i], b[i]].map(|bits| f32::from_bits(bits).into());
            let (value, key) = (i % MATRIX / HEAD_DIM, i % HEAD_DIM);
            let place = format!("value {value} key {key}");
            return differs("state_pool", token, i / MATRIX, place, values[0], values[1]);
        }
    }
    let unequal = |(a, b): (&bf16, &bf16)| a.to_bits() != b.to_bits();
    if let Some(i) = wanted.line.iter().zip(&found.line).position(unequal) {
        let width = wanted.line.len() / (3 * case.shape.dim());
        let (channel, position) = (i / width, i % width);
        let head = channel % case.shape.dim() / HEAD_DIM;
        let place = format!("channel {channel} position {position}");
        let values = [wanted.line[i], found.line[i]].map(bf16::to_f64);
        return differs("conv_cache", 0, head, place, values[0], values[1]);
    }
    Ok(())
}

fn against(
    executor: &mut dyn Executor,
    case: &Case,
    other: &Case,
    context: &str,
) -> Result<(), Mismatch> {
    let wanted = results_of(executor, case, 0)?;
    let found = results_of(executor, other, 1)?;
    for (request, (a, b)) in wanted.iter().zip(&found).enumerate() {
        compare(case, request, a, b, context)?;
    }
    Ok(())
}

fn same_bytes(case: &Case, a: &Buffers, b: &Buffers) -> Result<(), Mismatch> {
    let pairs = [
        ("out", &a.out, &b.out),
        ("state_pool", &a.state, &b.state),
        ("conv_cache", &a.conv_cache, &b.conv_cache),
    ];
    for (name, a, b) in pairs {
        case.same(name, Requirement::Identical, &a.bytes, &b.bytes)?;
    }
    if let (Some(a), Some(b)) = (&a.records, &b.records) {
        case.same("records", Requirement::Identical, &a.bytes, &b.bytes)?;
    }
    Ok(())
}

/// Results in a mode chosen by the seed and `turn`, so that pairs also cross modes.
fn results_of(
    executor: &mut dyn Executor,
    case: &Case,
    turn: usize,
) -> Result<Vec<Option<RequestResult>>, Mismatch> {
    let mode = pick_mode(executor, case, turn);
    let (_, after, _) = launch(executor, case, &mode)?;
    Ok(results(case, &after))
}

fn pick_mode(executor: &dyn Executor, case: &Case, turn: usize) -> String {
    let mut modes = executor.modes(case);
    let index = Rng::stream(case.seed, 14 + turn as u64).below(modes.len());
    modes.swap_remove(index)
}

/// Buffers before and after one launch, and its faults.
pub(crate) fn launch(
    executor: &mut dyn Executor,
    case: &Case,
    mode: &str,
) -> Result<(Buffers, Buffers, Option<Faults>), Mismatch> {
    let before = Buffers::new(case);
    let mut after = before.clone();
    let faults = executor.run(case, mode, &mut after).map_err(|error| {
        Mismatch::new("launch", Requirement::Runs)
            .at(error.to_string())
            .within(format!("{}, mode {mode}; {case}", executor.name()))
    })?;
    Ok((before, after, faults))
}
