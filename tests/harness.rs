//! The harness can fail: launches that are wrong in one way are caught, with the operand named.

use std::error::Error;

use half::bf16;
use kda_reference::{FaultKind, Gate, Plan, StateType};
use kda_tests::{
    Buffers, Case, Executor, Faults, Limits, MATRIX, Mismatch, ReferenceExecutor, Regime,
    Requirement, Scripted, Share, identity, judge, run_share,
};

/// Judges the reference with operands changed before it sees them, and results afterwards.
fn broken(
    case: &Case,
    before: impl Fn(&Case, &mut Buffers),
    after: impl Fn(&Case, &mut Buffers, &mut Option<Faults>),
) -> Mismatch {
    let mut executor = Scripted::new(|case, buffers| {
        let mut other = buffers.clone();
        before(case, &mut other);
        let mut faults = ReferenceExecutor.run(case, "scalar", &mut other)?;
        buffers.conv_cache = other.conv_cache;
        buffers.state = other.state;
        buffers.out = other.out;
        after(case, buffers, &mut faults);
        Ok(faults)
    });
    judge(&mut executor, case, "scalar").unwrap_err()
}

/// Judges a launch whose operands were changed before the reference saw them.
fn read(case: &Case, before: impl Fn(&Case, &mut Buffers)) -> Mismatch {
    broken(case, before, |_, _, _| {})
}

/// Judges a launch whose results were changed.
fn wrote(case: &Case, after: impl Fn(&Case, &mut Buffers, &mut Option<Faults>)) -> Mismatch {
    broken(case, |_, _| {}, after)
}

fn limits(tokens: usize) -> Limits {
    Limits {
        max_heads: 2,
        max_requests: 4,
        tokens: vec![tokens],
        gates: vec![Gate::LowerBound { lower_bound: -5.0 }],
        state_types: vec![StateType::F32],
        biases: vec![true],
        projected_gates: vec![false],
        records: vec![false],
        ragged: vec![false],
        regimes: vec![Regime::Plain],
        ..Limits::default()
    }
}

/// The first case that `wanted` likes.
fn find(limits: &Limits, wanted: impl Fn(&Case) -> bool) -> Case {
    let mut cases = (0..10_000).map(|seed| Case::random(seed, limits));
    cases.find(|case| wanted(case)).expect("a case like that")
}

/// Two heads; a live request, a null one and one at fault; room between everything.
fn mixed(tokens: usize) -> Case {
    find(&limits(tokens), |case| {
        let s = &case.shape;
        let plans: Vec<Plan> = (0..s.requests).map(|r| case.plan(r)).collect();
        s.heads == 2
            && plans.contains(&Plan::Null)
            && plans.iter().any(|p| matches!(p, Plan::Fault(_)))
            && live(case).is_some()
            && s.pitch > s.used_columns()
            && s.out_stride > s.dim()
            && s.slots_stride > s.columns
            && s.state_slot_stride > s.heads * MATRIX
            && s.conv_slot_stride > 3 * s.dim() * s.conv_len
    })
}

/// A live request that keeps every checkpoint: its index, first slot and checkpoints.
fn live(case: &Case) -> Option<(usize, usize, Vec<usize>)> {
    (0..case.shape.requests).find_map(|request| match case.plan(request) {
        Plan::Live {
            first, checkpoints, ..
        } => {
            let slots: Option<Vec<usize>> = checkpoints.into_iter().collect();
            slots.map(|slots| (request, first, slots))
        }
        _ => None,
    })
}

fn is(mismatch: &Mismatch, operand: &str, requirement: Requirement) {
    assert_eq!(mismatch.operand, operand, "{mismatch}");
    assert_eq!(mismatch.requirement, requirement, "{mismatch}");
    assert!(mismatch.context.contains("seed 0x"), "{mismatch}");
}

fn swap_columns(case: &Case, buffers: &mut Buffers, a: usize, b: usize, count: usize) {
    for row in 0..case.shape.rows() {
        let start = row * case.shape.pitch;
        for i in 0..count {
            let (i, j) = (start + a + i, start + b + i);
            let (x, y) = (buffers.projected.bf16(i), buffers.projected.bf16(j));
            buffers.projected.set_bf16(i, y);
            buffers.projected.set_bf16(j, x);
        }
    }
}

#[test]
fn the_unbroken_launch_passes() {
    for tokens in [1, 2] {
        judge(&mut ReferenceExecutor, &mixed(tokens), "scalar").unwrap();
    }
}

#[test]
fn exchanged_operands_are_caught() {
    for tokens in [1, 2] {
        let case = mixed(tokens);
        let dim = case.shape.dim();
        let (exact, near) = (Requirement::Exact, Requirement::Accurate);
        let view = case.views();
        let columns = |a, b, n| read(&case, move |c, buffers| swap_columns(c, buffers, a, b, n));
        is(&columns(0, dim, dim), "conv_cache", exact);
        is(&columns(view.output_gate, 0, dim), "conv_cache", exact);
        is(
            &columns(view.output_gate, view.f_a, 128),
            "state_pool",
            near,
        );
        is(&columns(view.beta, view.beta + 1, 1), "state_pool", near);
        is(&columns(view.beta, view.f_a, 1), "state_pool", near);
        let swap = |edit: fn(&mut Buffers)| read(&case, move |_, buffers| edit(buffers));
        let floats = |a: &mut kda_tests::Region, b: &mut kda_tests::Region| {
            for i in 0..128 {
                let (x, y) = (a.f32(i), b.f32(i));
                a.set_f32(i, y);
                b.set_f32(i, x);
            }
        };
        let mismatch = read(&case, |_, b| floats(&mut b.dt_bias, &mut b.norm));
        is(&mismatch, "state_pool", near);
        let mismatch = read(&case, |_, b| floats(&mut b.dt_bias, &mut b.conv_weight));
        is(&mismatch, "state_pool", near);
        let heads = swap(|b| {
            let (x, y) = (b.a_log.f32(0), b.a_log.f32(1));
            b.a_log.set_f32(0, y);
            b.a_log.set_f32(1, x);
        });
        is(&heads, "state_pool", near);
        let norm = swap(|b| {
            for i in 0..128 {
                b.norm.set_f32(i, 1.0);
            }
        });
        is(&norm, "out", near);
        let bias = swap(|b| {
            let bias = b.conv_bias.as_mut().unwrap();
            (0..bias.len / 4).for_each(|i| bias.set_f32(i, 0.0));
        });
        is(&bias, "state_pool", near);
        let f_b = swap(|b| {
            for (row, column) in (0..128).flat_map(|r| (0..r).map(move |c| (r, c))) {
                let (i, j) = (row * 128 + column, column * 128 + row);
                let f_b = b.f_b.as_mut().unwrap();
                let (x, y) = (f_b.bf16(i), f_b.bf16(j));
                f_b.set_bf16(i, y);
                f_b.set_bf16(j, x);
            }
        });
        is(&f_b, "state_pool", near);
    }
}

#[test]
fn a_projected_gate_is_held_to_its_own_rows_and_columns() {
    for tokens in [1, 2] {
        let mut limits = limits(tokens);
        limits.projected_gates = vec![true];
        let case = find(&limits, |case| {
            case.shape.heads == 2
                && case.shape.gate_stride > case.shape.dim()
                && case.shape.requests > 1
                && live(case).is_some()
        });
        judge(&mut ReferenceExecutor, &case, "scalar").unwrap();
        let (rows, stride) = (case.shape.rows(), case.shape.gate_stride);
        let dim = case.shape.dim();
        let moved = |from: fn(usize, usize) -> (usize, usize)| {
            read(&case, move |_, buffers| {
                let region = buffers.gate_input.as_mut().unwrap();
                let old = region.clone();
                for row in 0..rows {
                    for column in 0..dim {
                        let (other, taken) = from(row, column);
                        let other = other.min(rows - 1) * stride + taken;
                        region.set_bf16(row * stride + column, old.bf16(other));
                    }
                }
            })
        };
        // Another head's, its neighbour's, the next row's.
        let near = Requirement::Accurate;
        is(
            &moved(|row, column| (row, column ^ 128)),
            "state_pool",
            near,
        );
        is(&moved(|row, column| (row, column ^ 1)), "state_pool", near);
        let next = moved(|row, column| (row + 1, column));
        assert_eq!(next.operand, "state_pool", "{next}");
        // The last column taken from the padding, which is NaN.
        let past = moved(|row, column| (row, column + usize::from(column == 255)));
        assert_eq!(past.operand, "state_pool", "{past}");
        assert_eq!(past.requirement, Requirement::NotNan, "{past}");
        let written = wrote(&case, |_, buffers, _| {
            buffers.gate_input.as_mut().unwrap().set_bf16(0, bf16::ONE)
        });
        is(&written, "gate_input", Requirement::Untouched);
    }
}

#[test]
fn reading_past_the_used_columns_meets_nan() {
    let case = mixed(1);
    let used = case.shape.used_columns();
    // The last head's beta taken one column too far.
    let mismatch = read(&case, |c, b| swap_columns(c, b, used - 1, used, 1));
    is(&mismatch, "state_pool", Requirement::NotNan);
    // The window taken one tap too late.
    let verify = mixed(2);
    let mismatch = read(&verify, |c, b| {
        let mut later = c.clone();
        let counts = later.accepted.as_mut().unwrap();
        counts.iter_mut().for_each(|a| *a = a.wrapping_add(1));
        b.put_slots(&later);
    });
    assert_ne!(mismatch.requirement, Requirement::Runs, "{mismatch}");
}

#[test]
fn a_single_byte_written_anywhere_is_caught() {
    let case = mixed(2);
    let names: Vec<&str> = Buffers::new(&case).regions().iter().map(|r| r.0).collect();
    assert_eq!(names.len(), 12);
    for name in names {
        for end in [false, true] {
            let mismatch = wrote(&case, |_, buffers, _| {
                let mut regions = buffers.regions_mut();
                let (_, region) = regions.iter_mut().find(|r| r.0 == name).unwrap();
                let at = match end {
                    false => region.offset - 1,
                    true => region.offset + region.len,
                };
                region.bytes[at] ^= 1;
            });
            is(&mismatch, name, Requirement::Untouched);
            assert!(mismatch.place.starts_with("guard"), "{mismatch}");
        }
    }
}

#[test]
fn writes_between_rows_slots_and_lines_are_caught() {
    let case = mixed(2);
    let s = case.shape;
    let (_, first, slots) = live(&case).unwrap();
    let kept = Requirement::Untouched;
    let flip = |region: &mut kda_tests::Region, byte: usize| region.data_mut()[byte] ^= 1;
    let out = wrote(&case, |_, b, _| flip(&mut b.out, 2 * s.dim()));
    is(&out, "out", kept);
    assert!(out.place.contains("(padding)"), "{out}");
    let gap = slots[0] * s.state_slot_stride + s.heads * MATRIX;
    let state = wrote(&case, |_, b, _| flip(&mut b.state, 4 * gap));
    is(&state, "state_pool", kept);
    assert!(state.place.contains("between slots"), "{state}");
    let gap = first * s.conv_slot_stride + 3 * s.dim() * s.conv_len;
    let cache = wrote(&case, |_, b, _| flip(&mut b.conv_cache, 2 * gap));
    is(&cache, "conv_cache", kept);
    let input = wrote(&case, |_, b, _| flip(&mut b.projected, 5));
    is(&input, "projected", kept);
    // The slots of a request at fault, and a slot that nobody names.
    let (request, _) = case.faults()[0];
    let pool = s.pool_slots as i32;
    let named = &case.slots[request * s.columns..][..s.columns];
    let faulted = named.iter().copied().find(|slot| (1..pool).contains(slot));
    let unnamed = (0..pool).find(|slot| !case.slots.contains(slot));
    for slot in [faulted, unnamed].into_iter().flatten() {
        let state = s.state_index(slot as usize, 1) + 77;
        let mismatch = wrote(&case, |_, b, _| b.state.set_f32(state, 0.5));
        is(&mismatch, "state_pool", kept);
        assert!(mismatch.place.contains(&format!("slot {slot} head 1")));
        let tap = s.conv_index(slot as usize, 3, 0);
        let mismatch = wrote(&case, |_, b, _| b.conv_cache.set_bf16(tap, bf16::ONE));
        is(&mismatch, "conv_cache", kept);
    }
}

#[test]
fn wrong_values_are_caught() {
    let case = mixed(1);
    let s = case.shape;
    let (request, first, slots) = live(&case).unwrap();
    let near = Requirement::Accurate;
    let scale = |factor: f32| {
        wrote(&case, |_, b, _| {
            let start = s.state_index(slots[0], 1);
            for i in start..start + MATRIX {
                b.state.set_f32(i, b.state.f32(i) * factor);
            }
        })
    };
    let state = scale(1.0 + 1e-6);
    is(&state, "state_pool", near);
    assert_eq!((state.request, state.head), (Some(request as u32), Some(1)));
    let element = request * s.out_stride + 130;
    for (bits, requirement) in [(2, near), (-2, near)] {
        let out = wrote(&case, |_, b, _| {
            let moved = i32::from(b.out.bf16(element).to_bits()) + bits;
            b.out.set_bf16(element, bf16::from_bits(moved as u16));
        });
        is(&out, "out", requirement);
        assert_eq!((out.request, out.head), (Some(request as u32), Some(1)));
        assert!(out.place.contains("column 130"), "{out}");
    }
    let out = wrote(&case, |_, b, _| b.out.set_bf16(element, bf16::NAN));
    is(&out, "out", Requirement::NotNan);
    let index = s.state_index(slots[0], 0) + 5;
    let state = wrote(&case, |_, b, _| b.state.set_f32(index, f32::NAN));
    is(&state, "state_pool", Requirement::NotNan);
    let tap = s.conv_index(first, 200, 1);
    let line = wrote(&case, |_, b, _| {
        let bits = b.conv_cache.bf16(tap).to_bits() ^ 1;
        b.conv_cache.set_bf16(tap, bf16::from_bits(bits));
    });
    is(&line, "conv_cache", Requirement::Exact);
    assert!(line.place.contains("channel 200 position 1"), "{line}");
}

#[test]
fn exchanged_transposed_and_missing_states_are_caught() {
    let case = mixed(2);
    let s = case.shape;
    let (_, _, slots) = live(&case).unwrap();
    let near = Requirement::Accurate;
    let exchanged = wrote(&case, |_, b, _| {
        let (first, second) = (b.states(&s, slots[0]), b.states(&s, slots[1]));
        b.put_states(&s, slots[0], &second);
        b.put_states(&s, slots[1], &first);
    });
    is(&exchanged, "state_pool", near);
    let transposed = wrote(&case, |_, b, _| {
        let from = b.states(&s, slots[1]);
        let turned: Vec<f32> = (0..from.len())
            .map(|i| from[i / MATRIX * MATRIX + i % 128 * 128 + i % MATRIX / 128])
            .collect();
        b.put_states(&s, slots[1], &turned);
    });
    is(&transposed, "state_pool", near);
    assert_eq!(transposed.token, Some(1));
    let poison = f32::from_bits(kda_tests::POISON_F32);
    let missing = wrote(&case, |_, b, _| {
        b.put_states(&s, slots[1], &vec![poison; s.heads * MATRIX]);
    });
    is(&missing, "state_pool", Requirement::NotNan);
}

#[test]
fn rows_that_are_not_null_enough_are_caught() {
    for tokens in [1, 2] {
        let case = mixed(tokens);
        let s = case.shape;
        for request in (0..s.requests).filter(|&r| !matches!(case.plan(r), Plan::Live { .. })) {
            let element = (request * s.tokens + s.tokens - 1) * s.out_stride + 255;
            let poison = bf16::from_bits(kda_tests::POISON_BF16);
            for value in [bf16::NEG_ZERO, poison, bf16::from_bits(1)] {
                let mismatch = wrote(&case, |_, b, _| b.out.set_bf16(element, value));
                is(&mismatch, "out", Requirement::NullRow);
                assert_eq!(mismatch.request, Some(request as u32));
            }
        }
    }
}

#[test]
fn wrong_fault_records_are_caught() {
    let case = mixed(2);
    let edits: [fn(&mut Option<Faults>); 4] = [
        |faults| *faults = None,
        |faults| faults.as_mut().unwrap().count += 1,
        |faults| faults.as_mut().unwrap().request += 1,
        |faults| {
            let faults = faults.as_mut().unwrap();
            faults.kind = match faults.kind {
                FaultKind::NullSource => FaultKind::SlotOutOfRange,
                _ => FaultKind::NullSource,
            };
        },
    ];
    for edit in edits {
        let mismatch = wrote(&case, |_, _, faults| edit(faults));
        is(&mismatch, "faults", Requirement::Faults);
    }
    let clean = find(&limits(1).live(), |case| case.faults().is_empty());
    let invented = wrote(&clean, |_, _, faults| {
        *faults = Faults::from_record(1, 1);
        assert!(faults.is_some());
    });
    is(&invented, "faults", Requirement::Faults);
    assert_eq!(Faults::from_record(u64::MAX, 0), None);
}

/// The reference, with the last bit of the first row flipped where `key` says so. Two modes.
struct Dependent<'a> {
    key: &'a dyn Fn(&Case, &str, u32) -> bool,
    launches: u32,
}

impl Executor for Dependent<'_> {
    fn name(&self) -> String {
        "dependent".into()
    }

    fn modes(&self, _: &Case) -> Vec<String> {
        vec!["first".into(), "second".into()]
    }

    fn run(
        &mut self,
        case: &Case,
        mode: &str,
        buffers: &mut Buffers,
    ) -> Result<Option<Faults>, Box<dyn Error>> {
        let faults = ReferenceExecutor.run(case, mode, buffers)?;
        self.launches += 1;
        if (self.key)(case, mode, self.launches) {
            for request in 0..case.shape.requests {
                if matches!(case.plan(request), Plan::Live { .. }) {
                    let element = request * case.shape.tokens * case.shape.out_stride;
                    let bits = buffers.out.bf16(element).to_bits() ^ 1;
                    buffers.out.set_bf16(element, bf16::from_bits(bits));
                }
            }
        }
        Ok(faults)
    }
}

#[test]
fn every_identity_check_can_fail() {
    let case = find(&limits(2).live(), |c| c.shape.requests == 3);
    let shape = case.shape;
    let poisoned = |c: &Case| c.data.states.iter().any(|s| s.is_nan());
    type Key<'a> = &'a dyn Fn(&Case, &str, u32) -> bool;
    let keys: [(&str, Key<'_>); 10] = [
        ("modes", &|_, mode, _| mode == "second"),
        ("batch", &|c, _, _| c.shape.requests == 1),
        ("layouts", &|c, _, _| {
            c.shape.conv_layout != shape.conv_layout
        }),
        ("strides", &|c, _, _| c.shape.pitch != shape.pitch),
        ("verify and decode", &|c, _, _| c.verify),
        ("records and checkpoints", &|c, _, _| {
            c.shape.records.is_some()
        }),
        ("ragged", &|c, _, _| c.token_counts.is_some()),
        ("faults", &|c, _, _| !c.faults().is_empty()),
        ("nan containment", &|c, _, _| poisoned(c)),
        ("repeat", &|_, _, launches| launches % 2 == 0),
    ];
    for ((name, check), (key_name, key)) in identity::CHECKS.into_iter().zip(keys) {
        assert_eq!(name, key_name);
        check(&mut ReferenceExecutor, &case).unwrap();
        let mut dependent = Dependent { key, launches: 0 };
        let mismatch = check(&mut dependent, &case).unwrap_err();
        is(&mismatch, "out", Requirement::Identical);
    }
}

#[test]
fn a_launch_that_does_not_run_is_no_pass() {
    let mut refusing = Scripted::new(|_, _| Err("no device".into()));
    let mismatch = judge(&mut refusing, &Case::from_seed(1), "any").unwrap_err();
    is(&mismatch, "launch", Requirement::Runs);
    let text = mismatch.to_string();
    assert!(
        text.starts_with("launch: did not run, no device [scripted, mode any; seed 0x"),
        "{text}"
    );
}

#[test]
fn a_mismatch_reads_in_one_line() {
    let mismatch = Mismatch::new("out", Requirement::Accurate)
        .request(3)
        .token(1)
        .head(0)
        .at("row 7 column 5")
        .values(1.5, 1.25, 0.0078125)
        .within("seed 0x7");
    assert_eq!(
        mismatch.to_string(),
        "out: not within its bound, request 3, token 1, head 0, row 7 column 5: expected 1.5e0, \
         found 1.25e0, bound 7.8125e-3 [seed 0x7]"
    );
}

/// The reference, but for launches of three requests.
fn refuse_three(case: &Case, buffers: &mut Buffers) -> Result<Option<Faults>, Box<dyn Error>> {
    match case.shape.requests {
        3 => Err("three".into()),
        _ => ReferenceExecutor.run(case, "scalar", buffers),
    }
}

#[test]
fn the_lowest_failure_of_all_shares_is_the_whole_runs() {
    let limits = limits(1);
    let failure = |share| {
        let mut refusing = Scripted::new(refuse_three);
        let error = run_share(&mut refusing, 40, share, 9, &limits, &mut |_| {}).unwrap_err();
        (error.number, error.to_string())
    };
    let pair = |share| {
        let executor = &mut Scripted::new(refuse_three);
        let error = identity::run_share(executor, 20, share, 9, &limits, &mut |_| {}).unwrap_err();
        (error.number, error.to_string())
    };
    let (whole, whole_pair) = (failure(Share::WHOLE), pair(Share::WHOLE));
    assert!(whole.0 > 0 && whole.1.contains("three"), "{whole:?}");
    for of in [2, 3] {
        let shares = || (0..of).map(|index| Share { index, of });
        assert_eq!(shares().map(failure).min().unwrap(), whole);
        assert_eq!(shares().map(pair).min().unwrap(), whole_pair);
    }
}
