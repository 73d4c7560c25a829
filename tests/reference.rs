//! The reference step against the oracle, and against itself, over random launches.

use kda_reference::Plan;
use kda_tests::{
    Case, Limits, ReferenceExecutor, Share, case_strategy, identity, judge, property_config,
    run_property, run_share,
};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

/// Seed of the runs below; any other must pass as well.
const SEED: u64 = 0x6b64_6131;

#[test]
fn random_launches_lie_within_the_bounds_and_cover_everything() {
    let limits = Limits {
        max_heads: 4,
        ..Limits::default()
    };
    let summary = run_property(&mut ReferenceExecutor, 240, SEED, &limits, &mut |_| {}).unwrap();
    println!("{summary}");
    assert!(summary.coverage.missing().is_empty());
    // What the bounds leave to other orders of summation and other exponentials.
    assert!(summary.errors.state_relative < 4e-7);
}

#[test]
fn small_launches_cover_everything_too() {
    let summary = run_property(
        &mut ReferenceExecutor,
        300,
        SEED,
        &Limits::small(),
        &mut |_| {},
    );
    println!("{}", summary.unwrap());
}

#[test]
fn runs_merge_and_say_what_they_missed() {
    let run = |cases, limits: &Limits| {
        run_property(&mut ReferenceExecutor, cases, SEED, limits, &mut |_| {}).unwrap()
    };
    let mut all = run(3, &Limits::small());
    let missing = all.coverage.missing();
    assert!(!missing.is_empty());
    all.covered().unwrap();
    all.merge(&run(5, &Limits::small()));
    assert_eq!((all.cases, all.launches), (8, 8));
    assert!(all.coverage.missing().len() <= missing.len());
    all.cases = kda_tests::COVERING_CASES;
    let text = all.covered().unwrap_err().to_string();
    assert!(text.starts_with("cases: not covered, "), "{text}");
}

#[test]
fn few_specialisations_are_few() {
    let limits = Limits {
        specialisations: 5,
        ..Limits::small()
    };
    let mut found = Vec::new();
    for seed in 0..40 {
        let case = Case::random(seed, &limits);
        let s = case.shape;
        let specialisation = (
            (s.heads, s.tokens, case.verify, case.bias()),
            (s.conv_layout, s.null_rule, s.state_type),
            kda_tests::gate_name(s.gate),
        );
        if !found.contains(&specialisation) {
            found.push(specialisation);
        }
    }
    assert!(found.len() <= 5, "{found:?}");
}

#[test]
fn the_same_bits_whoever_asks() {
    let limits = Limits {
        max_heads: 3,
        ..Limits::default()
    };
    let mut calls = 0;
    identity::run_all(&mut ReferenceExecutor, 8, SEED, &limits, &mut |_| {
        calls += 1
    })
    .unwrap();
    assert_eq!(calls, 8 * identity::CHECKS.len());
}

/// Fresh requests whose query is almost orthogonal to their first key: all of an output row cancels
/// to a part in 10⁴ of its terms.
#[test]
fn rows_that_cancel_as_a_whole_lie_within_the_bounds() {
    for (seed, requests, tokens) in [(0xf246_0d71_86bf_3da0, 4, 2), (0xcd60_7c16_dc96_ad0b, 2, 8)] {
        let limits = Limits {
            tokens: vec![tokens],
            ..Limits::default()
        };
        let case = Case::sized(seed, &limits, 1, requests);
        judge(&mut ReferenceExecutor, &case, "scalar").unwrap();
    }
}

#[test]
fn arbitrary_launches_lie_within_the_bounds() {
    let limits = Limits {
        max_heads: 3,
        max_requests: 4,
        ..Limits::default()
    };
    TestRunner::new(property_config(64))
        .run(&case_strategy(limits), |case| {
            judge(&mut ReferenceExecutor, &case, "scalar")
                .map_err(|mismatch| TestCaseError::fail(mismatch.to_string()))?;
            Ok(())
        })
        .unwrap();
}

#[test]
fn failures_shrink() {
    let failure = TestRunner::new(property_config(64))
        .run(&case_strategy(Limits::default()), |case| {
            let shape = &case.shape;
            prop_assert!(shape.requests < 2 || shape.tokens < 2);
            Ok(())
        })
        .unwrap_err();
    let TestError::Fail(_, case) = failure else {
        panic!("{failure}");
    };
    let s = case.shape;
    assert_eq!((s.heads, s.requests, s.tokens), (1, 2, 2), "{case}");
}

#[test]
fn shares_make_the_whole() {
    let limits = Limits::small();
    let run = |share| {
        let executor = &mut ReferenceExecutor;
        let mut summary = run_share(executor, 20, share, SEED, &limits, &mut |_| {}).unwrap();
        summary.seconds = 0.0;
        summary
    };
    let whole = run(Share::WHOLE).to_string();
    for of in [2, 3, 21] {
        let mut shares = (0..of).map(|index| run(Share { index, of }));
        let mut all = shares.next().unwrap();
        shares.for_each(|share| all.merge(&share));
        assert_eq!(all.to_string(), whole, "{of} shares");
    }
    let checks = |share| {
        let mut ran = Vec::new();
        let executor = &mut ReferenceExecutor;
        identity::run_share(executor, 2, share, SEED, &limits, &mut |name| {
            ran.push(name.to_owned())
        })
        .unwrap();
        ran
    };
    let whole = checks(Share::WHOLE);
    let mut all: Vec<String> = (0..3)
        .flat_map(|index| checks(Share { index, of: 3 }))
        .collect();
    let place = |name: &String| identity::CHECKS.iter().position(|(n, _)| n == name);
    all.sort_by_key(place);
    assert_eq!(all, whole);
}

#[test]
fn live_slots_are_distinct_over_the_batch() {
    let mut wide = 0;
    for seed in 0..2000 {
        let case = Case::random(seed, &Limits::small());
        let mut taken = std::collections::BTreeSet::new();
        for request in 0..case.shape.requests {
            let Plan::Live {
                source,
                checkpoints,
                offset,
                ..
            } = case.plan(request)
            else {
                continue;
            };
            wide += u32::from(offset >= 32);
            let kept: Vec<usize> = checkpoints.into_iter().flatten().collect();
            let own = kept
                .iter()
                .chain((!kept.contains(&source)).then_some(&source));
            for &slot in own {
                assert!(slot < case.shape.pool_slots, "{case}");
                assert!(
                    taken.insert(slot),
                    "slot {slot} of request {request}: {case}"
                );
            }
        }
    }
    assert!(wide > 50, "{wide}");
}
