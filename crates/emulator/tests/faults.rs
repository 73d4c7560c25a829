//! Planted faults: each kernel in a sound version, which must pass, and a faulty one, which must be
//! reported with its kind and its line, whatever the schedule.

mod support;

use kda_emulator::{Error, Memory, Options};
use support::planted::{Case, PROLOGUE, SEEDS, at, race_between};
use support::{IN, OUT, Shape, kernel, launch, line_of, memory};

/// Every thread writes its own word and reads its neighbour's in another warp.
fn exchange() -> Case {
    Case::new(
        Shape::block(64),
        ".shared .align 4 .b8 tile[256];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        bar.sync 0;
        xor.b32 %r4, %r2, 128;
        add.s32 %r5, %r1, %r4;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%d3], %r6;",
    )
}

#[test]
fn dropped_block_barrier() {
    exchange().plant("bar.sync 0;", "", &|e, t| match e {
        Error::Race { .. } => race_between(e, t, "st.shared.u32", "ld.shared.u32"),
        // The reader came first.
        Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
        _ => false,
    });
}

#[test]
fn dropped_barrier_before_the_next_write() {
    let case = Case::new(
        Shape::block(64),
        ".shared .align 4 .b8 tile[256];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        bar.sync 0;
        xor.b32 %r4, %r2, 128;
        add.s32 %r5, %r1, %r4;
        ld.shared.u32 %r6, [%r5];
        barrier.sync 1;
        st.shared.s32 [%r3], %r6;
        st.global.u32 [%d3], %r6;",
    );
    case.plant("barrier.sync 1;", "", &|e, t| {
        race_between(e, t, "ld.shared.u32", "st.shared.s32")
    });
}

#[test]
fn dropped_warp_barrier() {
    let case = Case::new(
        Shape::block(32),
        ".shared .align 4 .b8 tile[128];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        bar.warp.sync -1;
        xor.b32 %r4, %r2, 4;
        add.s32 %r5, %r1, %r4;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%d3], %r6;",
    );
    case.plant("bar.warp.sync -1;", "", &|e, t| {
        race_between(e, t, "st.shared.u32", "ld.shared.u32")
    });
}

#[test]
fn a_shuffle_orders_no_memory() {
    let case = Case::new(
        Shape::block(32),
        ".shared .align 4 .b8 tile[128];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        bar.warp.sync -1;
        xor.b32 %r4, %r2, 4;
        add.s32 %r5, %r1, %r4;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%d3], %r6;",
    );
    case.plant(
        "bar.warp.sync -1;",
        "shfl.sync.bfly.b32 %r9|%p1, %r0, 1, 31, -1;",
        &|e, t| race_between(e, t, "st.shared.u32", "ld.shared.u32"),
    );
}

#[test]
fn neighbouring_halves_do_not_race() {
    let case = Case::new(
        Shape::block(64),
        ".shared .align 4 .b8 tile[256];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 1;
        add.s32 %r3, %r1, %r2;
        cvt.u16.u32 %h1, %r0;
        st.shared.u16 [%r3], %h1;
        st.global.u32 [%d3], %r0;",
    );
    case.plant(
        "st.shared.u16 [%r3]",
        "st.shared.u32 [%r1], %r0;\nst.shared.u16 [%r3]",
        &|e, t| {
            matches!(e, Error::Race { .. })
                && (at(e, t, "st.shared.u32") || at(e, t, "st.shared.u16"))
        },
    );
}

#[test]
fn the_same_value_from_two_threads_is_a_race() {
    let case = Case::new(
        Shape::block(64),
        "setp.eq.u32 %p1, %r0, 0;\n@%p1 st.global.u32 [%d0], 7;",
    );
    case.plant("@%p1", "", &|e, t| {
        race_between(e, t, "st.global.u32", "st.global.u32")
    });
}

#[test]
fn two_blocks_write_one_word() {
    let mut case = Case::new(
        Shape::block(32),
        "mov.u32 %r9, %ctaid.x;\nmul.wide.u32 %d9, %r9, 128;\nadd.s64 %d8, %d3, %d9;\nst.global.u32 [%d8], %r0;",
    );
    case.shape.blocks = 4;
    case.plant("add.s64 %d8, %d3, %d9;", "mov.u64 %d8, %d3;", &|e, t| {
        race_between(e, t, "st.global.u32", "st.global.u32")
    });
}

#[test]
fn atomics_do_not_race_with_each_other() {
    let mut case = Case::new(
        Shape::block(64),
        "red.global.add.u32 [%d1], 1;\nst.global.u32 [%d3], %r0;",
    );
    case.shape.blocks = 1;
    case.plant(
        "red.global.add.u32 [%d1], 1;",
        "red.global.add.u32 [%d1], 1;\nld.global.u32 %r7, [%d1];",
        &|e, t| race_between(e, t, "red.global", "ld.global"),
    );
}

#[test]
fn off_by_one_index() {
    let case = Case::new(
        Shape::block(64),
        "add.s64 %d5, %d3, 3840;\nst.global.u32 [%d5], %r0;",
    );
    case.plant("3840", "3844", &|e, t| {
        let Error::OutOfBounds { site, place, .. } = e else {
            return false;
        };
        at(e, t, "st.global.u32")
            && site.thread == 63
            && (place.buffer.as_str(), place.offset) == ("out", 4096)
    });
}

#[test]
fn a_prefetch_outside_every_buffer() {
    let case = Case::new(
        Shape::block(64),
        "add.s64 %d5, %d3, 3840;\nprefetch.global.L2 [%d5];\nst.global.u32 [%d3], %r0;",
    );
    case.plant("3840", "3844", &|e, t| {
        matches!(e, Error::OutOfBounds { .. }) && at(e, t, "prefetch.global.L2")
    });
}

#[test]
fn off_by_one_in_shared_memory() {
    let case = exchange();
    case.plant(
        "add.s32 %r3, %r1, %r2;",
        "add.s32 %r3, %r1, %r2;\nadd.s32 %r3, %r3, 4;",
        &|e, t| {
            matches!(e, Error::OutOfBounds { .. }) && at(e, t, "st.shared.u32")
                || matches!(e, Error::Uninitialised { .. } | Error::Race { .. })
        },
    );
}

#[test]
fn misaligned_vector() {
    let case = Case::new(Shape::block(1), "st.global.v2.u32 [%d0+8], {%r0, %r0};");
    case.plant("[%d0+8]", "[%d0+4]", &|e, t| {
        matches!(e, Error::Misaligned { .. }) && at(e, t, "st.global.v2")
    });
}

#[test]
fn uninitialised_shared_read() {
    exchange().plant("st.shared.u32 [%r3], %r0;", "", &|e, t| {
        matches!(e, Error::Uninitialised { .. }) && at(e, t, "ld.shared.u32")
    });
}

#[test]
fn uninitialised_global_read() {
    let case = Case::new(
        Shape::block(32),
        "ld.global.u32 %r1, [%d4];\nst.global.u32 [%d3], %r1;",
    );
    case.plant(
        "ld.global.u32 %r1, [%d4];",
        "ld.global.u32 %r1, [%d3];",
        &|e, t| {
            let Error::Uninitialised { place, .. } = e else {
                return false;
            };
            place.buffer == "out" && at(e, t, "ld.global.u32")
        },
    );
}

#[test]
fn write_to_a_read_only_buffer() {
    let case = Case::new(
        Shape::block(32),
        "ld.global.u32 %r1, [%d4];\nst.global.u32 [%d3], %r1;",
    );
    case.plant_with(
        "st.global.u32 [%d3]",
        "st.global.u32 [%d4]",
        &|m| m.set_read_only("in"),
        &|e, t| matches!(e, Error::ReadOnly { .. }) && at(e, t, "st.global.u32"),
    );
}

#[test]
fn read_before_the_dependency_wait() {
    let case = Case::new(
        Shape::block(64),
        "griddepcontrol.wait;
        ld.global.u32 %r1, [%d4];
        griddepcontrol.launch_dependents;
        st.global.u32 [%d3], %r1;",
    );
    // One warp alone waits.
    let guard = "setp.lt.u32 %p1, %r0, 32;\n@%p1 griddepcontrol.wait;";
    let prepare = |m: &mut Memory| m.set_predecessor_writes("in");
    case.plant_with("griddepcontrol.wait;", guard, &prepare, &|e, t| {
        let Error::BeforeDependency { site, place, .. } = e else {
            return false;
        };
        site.thread >= 32 && place.buffer == "in" && at(e, t, "ld.global.u32")
    });
}

#[test]
fn no_dependency_wait_at_all() {
    let body = "griddepcontrol.wait;\nld.global.u32 %r1, [%d4];\nst.global.u32 [%d3], %r1;";
    let case = Case::new(Shape::block(32), body);
    let prepare = |m: &mut Memory| m.set_predecessor_writes("in");
    case.plant_with("griddepcontrol.wait;", "", &prepare, &|e, t| {
        matches!(e, Error::BeforeDependency { .. }) && at(e, t, "ld.global.u32")
    });
    // Without the instruction there is no overlap to guard against.
    let older = case
        .text("griddepcontrol.wait;", "")
        .replace("sm_90a", "sm_80");
    assert_eq!(case.run(&older, 0, &prepare).0, Ok(()));
}

#[test]
fn stale_bytes_reach_early_reads_only() {
    let body = "ld.global.u32 %r1, [%d4];\ngriddepcontrol.wait;\nld.global.u32 %r2, [%d4];\nprefetch.global.L2 [%d4];\nsub.s32 %r3, %r2, %r1;\nst.global.u32 [%d3], %r3;";
    let text = kernel(2, "", &format!("{PROLOGUE}\n{body}\nret;"));
    let mut memory = memory();
    memory.set_predecessor_writes("in");
    memory.allow_early_reads("in");
    let options = Options::default().early_poison("in", vec![0; 128]);
    launch(&text, Shape::block(32), &mut memory, &[OUT, IN], &options)
        .expect("early reads are allowed");
    for i in 0..32 {
        assert_eq!(support::word(&memory, "out", i), i as u32);
    }
}

#[test]
fn divergent_barrier() {
    let case = Case::new(
        Shape::block(64),
        "setp.lt.u32 %p1, %r0, 16;
        @%p1 bra LEFT;
        add.s32 %r1, %r0, 1;
        bra JOIN;
        LEFT:
        add.s32 %r1, %r0, 2;
        JOIN:
        bar.sync 0;
        st.global.u32 [%d3], %r1;",
    );
    case.plant("LEFT:", "LEFT:\nbar.sync 0; // planted", &|e, t| {
        let Error::DivergentBarrier { lanes, .. } = e else {
            return false;
        };
        (at(e, t, "// planted") && *lanes == 0xffff)
            || (error_line(e) > line_of(t, "JOIN:") && *lanes == 0xffff_0000)
    });
}

fn error_line(error: &Error) -> u32 {
    error.line().unwrap_or(0)
}

#[test]
fn a_barrier_one_warp_skips() {
    let case = Case::new(
        Shape::block(64),
        "setp.lt.u32 %p1, %r0, 32;
        bar.sync 1, 64;
        st.global.u32 [%d3], %r0;",
    );
    case.plant("bar.sync 1, 64;", "@%p1 bar.sync 1, 64;", &|e, t| {
        let Error::Hang { waiting } = e else {
            return false;
        };
        waiting.len() == 1 && waiting[0].warp == 0 && waiting[0].line == line_of(t, "bar.sync")
    });
}

#[test]
fn endless_loop() {
    let case = Case::new(
        Shape::block(64),
        "mov.u32 %r1, 0;
        AGAIN:
        add.s32 %r1, %r1, 1;
        setp.lt.u32 %p1, %r1, 10;
        @%p1 bra AGAIN;
        st.global.u32 [%d3], %r1;",
    );
    case.plant("add.s32 %r1, %r1, 1;", "and.b32 %r1, %r1, 1;", &|e, t| {
        let Error::Hang { waiting } = e else {
            return false;
        };
        let (from, to) = (line_of(t, "AGAIN:"), line_of(t, "bra AGAIN"));
        waiting
            .iter()
            .any(|w| w.what == "running" && (from..=to).contains(&w.line))
    });
}

#[test]
fn division_by_zero() {
    let case = Case::new(
        Shape::block(32),
        "add.s32 %r1, %r0, 1;\ndiv.u32 %r2, 100, %r1;\nst.global.u32 [%d3], %r2;",
    );
    case.plant("add.s32 %r1, %r0, 1;", "mov.u32 %r1, %r0;", &|e, t| {
        matches!(e, Error::DivisionByZero { site, .. } if site.thread == 0) && at(e, t, "div.u32")
    });
}

#[test]
fn a_shuffle_from_a_lane_that_left() {
    let case = Case::new(
        Shape::block(32),
        "setp.ge.u32 %p1, %r0, 16;
        shfl.sync.bfly.b32 %r1|%p2, %r0, 16, 31, -1;
        @%p1 bra END;
        st.global.u32 [%d3], %r1;
        END:",
    );
    case.plant("shfl.sync", "@%p1 bra END;\nshfl.sync", &|e, t| {
        matches!(e, Error::InactiveLane { lane: 16.., .. }) && at(e, t, "shfl.sync")
    });
}

/// Block 1 of a cluster of two sends 32 words into block 0, which waits for their bytes.
fn send() -> Case {
    Case::new(
        Shape::cluster(2, 32),
        ".shared .align 8 .b8 tile[136];
        mov.u32 %r1, tile;
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r0, 0;
        @!%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r1+128], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+128], 128; // expect
        fence.mbarrier_init.release.cluster;
        READY:
        bar.warp.sync -1;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.acquire.aligned;
        setp.eq.u32 %p2, %r2, 0;
        @%p2 bra RECEIVE;
        shl.b32 %r3, %r0, 2;
        add.s32 %r4, %r1, %r3;
        mapa.shared::cluster.u32 %r5, %r4, 0;
        add.s32 %r6, %r1, 128;
        mapa.shared::cluster.u32 %r7, %r6, 0;
        ld.global.u32 %r8, [%d4];
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r8, [%r7];
        bra END;
        RECEIVE:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1+128], 0; // wait
        @!%p3 bra RECEIVE;
        xor.b32 %r9, %r0, 5;
        shl.b32 %r9, %r9, 2;
        add.s32 %r9, %r1, %r9;
        ld.shared.u32 %r10, [%r9];
        st.global.u32 [%d3], %r10;
        st.global.u32 [%d4], %r10;
        END:",
    )
}

#[test]
fn missing_mbarrier_wait() {
    let wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1+128], 0; // wait\n        @!%p3 bra RECEIVE;";
    send().plant(wait, "", &|e, t| match e {
        Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
        Error::Race { .. } => {
            race_between(e, t, "ld.shared.u32", "st.async")
                || race_between(e, t, "ld.global", "st.global.u32 [%d4]")
        }
        Error::UnawaitedAsync { line, .. } => *line == line_of(t, "st.async"),
        Error::EndedBlock { .. } => at(e, t, "st.async") || at(e, t, "mapa"),
        _ => false,
    });
}

#[test]
fn one_try_wait_is_not_a_wait() {
    let looped = "@!%p3 bra RECEIVE;";
    let case = send();
    let text = case.text(looped, "");
    let failed = (0..SEEDS)
        .filter(|&seed| case.run(&text, seed, &|_| {}).0.is_err())
        .count();
    assert!(failed > 0, "a try_wait that gives up is never tried");
}

#[test]
fn too_many_expected_bytes() {
    send().plant(
        "[%r1+128], 128; // expect",
        "[%r1+128], 132; // expect",
        &|e, t| {
            let Error::Hang { waiting } = e else {
                return false;
            };
            waiting.iter().any(|w| w.line == line_of(t, "// wait"))
        },
    );
}

#[test]
fn too_few_expected_bytes() {
    send().plant(
        "[%r1+128], 128; // expect",
        "[%r1+128], 124; // expect",
        &|e, t| match e {
            Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
            Error::Race { .. } => {
                race_between(e, t, "ld.shared.u32", "st.async")
                    || race_between(e, t, "ld.global", "st.global.u32 [%d4]")
            }
            Error::UnawaitedAsync { line, .. } => *line == line_of(t, "st.async"),
            Error::EndedBlock { .. } => at(e, t, "st.async"),
            _ => false,
        },
    );
}

#[test]
fn a_wait_of_block_scope_does_not_see_another_block() {
    send().plant(
        "acquire.cluster.shared::cta",
        "acquire.cta.shared::cta",
        &|e, t| race_between(e, t, "ld.shared.u32", "st.async"),
    );
}

#[test]
fn a_relaxed_wait_orders_nothing() {
    send().plant(
        "acquire.cluster.shared::cta",
        "relaxed.cluster.shared::cta",
        &|e, t| race_between(e, t, "ld.shared.u32", "st.async"),
    );
}

#[test]
fn missing_cluster_wait() {
    let both =
        "barrier.cluster.arrive.relaxed.aligned;\n        barrier.cluster.wait.acquire.aligned;";
    send().plant(both, "", &|e, t| match e {
        Error::BlockNotStarted { .. } => at(e, t, "st.async"),
        Error::MbarrierNotVisible { .. } | Error::MbarrierMisuse { .. } => at(e, t, "// wait"),
        _ => false,
    });
}

#[test]
fn missing_init_fence() {
    send().plant("fence.mbarrier_init.release.cluster;", "", &|e, t| {
        matches!(e, Error::MbarrierNotVisible { .. }) && at(e, t, "st.async")
    });
}

#[test]
fn a_second_arrival_is_too_many() {
    send().plant(
        "fence.mbarrier_init",
        "mbarrier.arrive.shared::cta.b64 _, [%r1+128]; // planted\nfence.mbarrier_init",
        &|e, t| matches!(e, Error::MbarrierMisuse { .. }) && at(e, t, "// planted"),
    );
}

#[test]
fn the_issuers_reads_are_ordered_only_by_choice() {
    let case = send();
    let text = case.text("ret;", "ret;");
    for seed in 0..SEEDS {
        let options = Options::default()
            .seed(seed)
            .async_store_releases_issuer(false);
        let error = launch(&text, case.shape, &mut memory(), &[OUT, IN], &options)
            .expect_err("nothing orders the read");
        assert!(
            race_between(&error, &text, "ld.global.u32", "st.global.u32 [%d4]"),
            "{error}"
        );
    }
}

#[test]
fn a_cluster_arrival_nobody_waits_for() {
    let case = Case::new(
        Shape::cluster(2, 32),
        "barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        setp.eq.u32 %p1, %r0, 0;
        mov.u32 %r1, %cluster_ctarank;
        setp.eq.and.u32 %p1, %r1, 0, %p1;
        @%p1 st.global.u32 [%d3], %r0;",
    );
    case.plant("barrier.cluster.wait.aligned;", "", &|e, t| {
        matches!(e, Error::BarrierMisuse { .. }) && at(e, t, "ret;")
    });
    case.plant("barrier.cluster.arrive.aligned;", "", &|e, t| {
        matches!(e, Error::BarrierMisuse { .. }) && at(e, t, "barrier.cluster.wait")
    });
}

#[test]
fn store_into_a_block_that_ended() {
    let case = Case::new(
        Shape::cluster(2, 32),
        ".shared .align 8 .b8 tile[8];
        mov.u32 %r1, tile;
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 st.shared.u32 [%r1], %r0; // own
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        @%p1 bra LAST;
        mapa.shared::cluster.u32 %r3, %r1, 0;
        setp.eq.u32 %p2, %r0, 0;
        mov.u32 %r5, 0;
        DELAY:
        add.s32 %r5, %r5, 1;
        ld.global.u32 %r6, [%d4];
        setp.lt.u32 %p3, %r5, 50;
        @%p3 bra DELAY;
        @%p2 st.shared::cluster.u32 [%r3+4], %r0; // remote
        LAST:
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;",
    );
    let case = Case {
        body: case
            .body
            .replace("st.shared.u32 [%r1], %r0; // own", "mov.u32 %r4, 0;"),
        ..case
    };
    let last =
        "barrier.cluster.arrive.release.aligned;\n        barrier.cluster.wait.acquire.aligned;";
    case.plant(last, "", &|e, t| {
        matches!(e, Error::EndedBlock { .. }) && at(e, t, "// remote")
    });
}

/// One thread copies 128 bytes that all threads wrote to global memory.
fn bulk_out() -> Case {
    Case::new(
        Shape::block(32),
        ".shared .align 16 .b8 tile[128];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        fence.proxy.async;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0; // wait
        END:",
    )
}

#[test]
fn missing_proxy_fence_before_a_bulk_copy() {
    bulk_out().plant("fence.proxy.async;", "", &|e, t| {
        let Error::MissingProxyFence { earlier, .. } = e else {
            return false;
        };
        at(e, t, "cp.async.bulk.global") && earlier.line == line_of(t, "st.shared.u32")
    });
}

#[test]
fn missing_barrier_before_a_bulk_copy() {
    bulk_out().plant("bar.sync 0;", "", &|e, t| {
        matches!(e, Error::Race { .. }) && at(e, t, "cp.async.bulk.global")
    });
}

#[test]
fn missing_wait_for_a_bulk_copy() {
    bulk_out().plant("cp.async.bulk.wait_group 0; // wait", "", &|e, t| {
        matches!(e, Error::UnawaitedAsync { .. }) && at(e, t, "cp.async.bulk.global")
    });
}

/// A bulk copy into shared memory, awaited on an mbarrier.
fn bulk_in() -> Case {
    Case::new(
        Shape::block(64),
        ".shared .align 16 .b8 tile[272];
        mov.u32 %r1, tile;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r1+256], 1;
        READY:
        bar.sync 0;
        @%p1 bra WAIT;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+256], 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 256, [%r1+256];
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+256], 0; // wait
        @!%p3 bra WAIT;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        ld.shared.u32 %r4, [%r3];
        st.global.u32 [%d3], %r4;",
    )
}

#[test]
fn missing_wait_for_a_bulk_load() {
    let wait = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+256], 0; // wait\n        @!%p3 bra WAIT;";
    bulk_in().plant(wait, "", &|e, t| match e {
        Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
        Error::Race { .. } => race_between(e, t, "ld.shared.u32", "cp.async.bulk.shared"),
        _ => false,
    });
}

#[test]
fn missing_barrier_after_an_init() {
    bulk_in().plant("bar.sync 0;", "", &|e, t| {
        matches!(
            e,
            Error::MbarrierNotVisible { .. } | Error::MbarrierMisuse { .. }
        ) && at(e, t, "// wait")
    });
}

/// Each thread copies a word with cp.async, waits for its own, and reads another's.
fn copy() -> Case {
    Case::new(
        Shape::block(64),
        ".shared .align 16 .b8 tile[256];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        cp.async.ca.shared.global [%r3], [%d4], 4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        xor.b32 %r4, %r2, 128;
        add.s32 %r5, %r1, %r4;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%d3], %r6;",
    )
}

#[test]
fn missing_wait_for_a_copy() {
    copy().plant("cp.async.wait_group 0;", "", &|e, t| match e {
        Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
        Error::Race { .. } => race_between(e, t, "ld.shared.u32", "cp.async.ca"),
        _ => false,
    });
}

#[test]
fn waiting_for_the_wrong_group() {
    copy().plant(
        "cp.async.wait_group 0;",
        "cp.async.wait_group 1;",
        &|e, t| match e {
            Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
            Error::Race { .. } => race_between(e, t, "ld.shared.u32", "cp.async.ca"),
            _ => false,
        },
    );
}

#[test]
fn a_non_coherent_read_of_what_the_kernel_wrote() {
    let case = Case::new(
        Shape::block(32),
        "st.global.u32 [%d3], %r0;\nld.global.u32 %r1, [%d3];\nst.global.u32 [%d4], %r1;",
    );
    case.plant("ld.global.u32", "ld.global.nc.u32", &|e, t| {
        race_between(e, t, "st.global.u32 [%d3]", "ld.global.nc")
    });
}

#[test]
fn a_flag_orders_what_was_written_before_it() {
    let case = Case::new(
        Shape::block(64),
        ".shared .align 4 .b8 tile[8];
        mov.u32 %r1, tile;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra REST;
        atom.shared.exch.b32 %r9, [%r1+4], 0;
        REST:
        bar.sync 0;
        @%p1 bra OTHER;
        st.shared.u32 [%r1], 42;
        membar.cta;
        st.volatile.shared.u32 [%r1+4], 1;
        OTHER:
        setp.ne.u32 %p2, %r0, 32;
        @%p2 bra END;
        SPIN:
        ld.volatile.shared.u32 %r2, [%r1+4];
        setp.eq.u32 %p3, %r2, 0;
        @%p3 bra SPIN;
        fence.acq_rel.cta;
        ld.shared.u32 %r3, [%r1];
        st.global.u32 [%d3], %r3;
        END:",
    );
    let case = Case {
        body: case.body.replace(
            "atom.shared.exch.b32 %r9, [%r1+4], 0;",
            "st.shared.u32 [%r1+4], 0;",
        ),
        ..case
    };
    case.plant("membar.cta;", "", &|e, t| {
        race_between(e, t, "st.shared.u32 [%r1], 42", "ld.shared.u32")
    });
    case.plant("fence.acq_rel.cta;", "", &|e, t| {
        race_between(e, t, "st.shared.u32 [%r1], 42", "ld.shared.u32")
    });
}
