//! The soak's own engine: what it serves is varied, replays, and a wrong step is caught.

use kda_tests::soak::{Tally, World, serve};
use kda_tests::{Executor, Faults, ReferenceExecutor, Scripted};

fn steps(count: u64) -> impl FnMut(&Tally) -> bool {
    move |tally| tally.steps < count
}

#[test]
fn the_reference_serves_a_varied_world() {
    let mut all = Tally::default();
    for seed in 0..3 {
        let mut world = World::new(seed, 1);
        all.merge(&serve(&mut world, &mut ReferenceExecutor, steps(100)).unwrap());
    }
    println!("{all}");
    assert_eq!(all.steps, 300);
    assert!(all.decodes > 10 && all.decodes < 200, "{all}");
    assert!(
        all.joined > 40 && all.left > 20 && all.padded > 100,
        "{all}"
    );
    assert!(all.refused > 5 && all.accepted < all.tokens, "{all}");
}

#[test]
fn a_seed_replays() {
    let served = || {
        let mut world = World::new(7, 1);
        serve(&mut world, &mut ReferenceExecutor, steps(40)).unwrap()
    };
    assert_eq!(format!("{:?}", served()), format!("{:?}", served()));
}

#[test]
fn a_wrong_step_is_caught_and_named() {
    for wrong_state in [false, true] {
        let mut launches = 0;
        let mut wrong = Scripted::new(|case, buffers| {
            let faults = ReferenceExecutor.run(case, "scalar", buffers)?;
            launches += 1;
            if launches != 23 {
                return Ok(faults);
            }
            if !wrong_state {
                return Ok(Faults::from_record(1, 77));
            }
            // A slot that nobody is ever given.
            let slot = case.shape.pool_slots - 1;
            let index = case.shape.state_index(slot, 0);
            let value = buffers.state.state(case.shape.state_type, index);
            let other = if value == 1.0 { 2.0 } else { 1.0 };
            buffers.state.set_state(case.shape.state_type, index, other);
            Ok(faults)
        });
        let mismatch = serve(&mut World::new(5, 1), &mut wrong, steps(60)).unwrap_err();
        let text = mismatch.to_string();
        assert!(text.contains("world 0x5 step 22, mode scalar"), "{text}");
        assert!(launches < 40, "the loop went on for {launches}");
    }
}
