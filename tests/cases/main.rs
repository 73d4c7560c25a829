//! Faults that users of decode kernels met, each as a test named after its id in `README.md`, and
//! for each group a property over the whole kind. One file a group.

mod addressing;
mod launch;
mod numerics;
mod padding;
mod support;
mod verify;

#[test]
fn every_case_has_a_test() {
    let cases = kda_tests::cases::list().unwrap();
    assert_eq!(cases.len(), 30);
    for (id, essence, tests) in cases {
        assert!(!tests.is_empty(), "{id} ({essence}) has no test");
    }
}
