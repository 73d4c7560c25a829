//! The harness itself.

use kda_tests::{Buffers, Case, Errors, Executor, ReferenceExecutor};

#[test]
fn tmp_scan() {
    let mut worst = Errors::default();
    let t = std::time::Instant::now();
    let mut bad = 0;
    let (mut tg, mut tr, mut tc) = (0.0, 0.0, 0.0);
    for seed in 0..400 {
        let t0 = std::time::Instant::now();
        let case = Case::from_seed(seed);
        let before = Buffers::new(&case);
        tg += t0.elapsed().as_secs_f64();
        let mut after = before.clone();
        let t0 = std::time::Instant::now();
        let faults = ReferenceExecutor.run(&case, "scalar", &mut after).unwrap();
        tr += t0.elapsed().as_secs_f64();
        let t0 = std::time::Instant::now();
        match case.check(&before, &after, faults.as_ref()) {
            Ok(e) => worst.merge(&e),
            Err(e) => {
                bad += 1;
                println!("{e}")
            }
        }
        tc += t0.elapsed().as_secs_f64();
    }
    println!("{worst}\n{bad} {tg} {tr} {tc} {:?}", t.elapsed());
    panic!();
}
