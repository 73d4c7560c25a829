//! Named barriers, mbarriers and asynchronous operations in the patterns kernels use them, each
//! sound and with one ordering taken away.

mod support;

use kda_emulator::Error;
use support::Shape;
use support::line_of;
use support::planted::{Case, at, race_between};

/// Warp 0 writes, warp 1 reads; `%p1` is set in warp 0.
fn hand_over(producer: &str, consumer: &str) -> Case {
    Case::new(
        Shape::block(64),
        &format!(
            ".shared .align 8 .b8 tile[136];
        mov.u32 %r1, tile;
        and.b32 %r2, %r0, 31;
        shl.b32 %r3, %r2, 2;
        add.s32 %r4, %r1, %r3;
        setp.lt.u32 %p1, %r0, 32;
        setp.eq.u32 %p2, %r0, 0;
        @%p2 mbarrier.init.shared::cta.b64 [%r1+128], 32;
        bar.sync 0;
        @!%p1 bra READ;
        st.shared.u32 [%r4], %r0;
        {producer}
        bra END;
        READ:
        {consumer}
        xor.b32 %r5, %r4, 4;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%d3], %r6;
        END:"
        ),
    )
}

fn written_after_read(e: &Error, t: &str) -> bool {
    match e {
        Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
        _ => race_between(e, t, "st.shared.u32", "ld.shared.u32"),
    }
}

#[test]
fn a_producer_arrives_and_a_consumer_waits() {
    let case = hand_over("bar.arrive 1, 64;", "bar.sync 1, 64;");
    case.plant(
        "bar.arrive 1, 64;\n        bra END;",
        "bra END;",
        &|e, t| {
            let Error::Hang { waiting } = e else {
                return false;
            };
            waiting.len() == 1
                && waiting[0].warp == 1
                && waiting[0].line == line_of(t, "bar.sync 1")
        },
    );
    // The roles exchanged: the consumer only arrives.
    let both = "bar.sync 1, 64; // consumer";
    let case = hand_over("bar.arrive 1, 64;", both);
    case.plant(both, "bar.arrive 1, 64; // consumer", &written_after_read);
    case.plant("bar.arrive 1, 64;", "bar.arrive 1, 96;", &|e, t| {
        matches!(e, Error::BarrierMisuse { .. })
            && (at(e, t, "bar.arrive 1, 96") || at(e, t, "bar.sync 1, 64"))
    });
}

const WAIT: &str =
    "WAIT: mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r1+128], 0; // wait\n@!%p3 bra WAIT;";

#[test]
fn arrivals_release_and_waits_acquire() {
    let case = hand_over("mbarrier.arrive.shared::cta.b64 %d9, [%r1+128];", WAIT);
    case.plant(
        "mbarrier.arrive.shared::cta",
        "mbarrier.arrive.relaxed.cta.shared::cta",
        &written_after_read,
    );
    case.plant(
        "test_wait.parity.shared",
        "test_wait.parity.relaxed.cta.shared",
        &written_after_read,
    );
    case.plant("[%r1+128], 32;", "[%r1+128], 33;", &|e, t| {
        let Error::Hang { waiting } = e else {
            return false;
        };
        waiting.iter().any(|w| {
            w.warp == 1 && (line_of(t, "// wait")..=line_of(t, "bra WAIT")).contains(&w.line)
        })
    });
    // Two phases complete, and the wait for the first one's parity never ends.
    case.plant("[%r1+128], 32;", "[%r1+128], 16;", &|e, _| {
        matches!(e, Error::Hang { .. })
    });
    case.plant("bar.sync 0;", "", &|e, t| {
        matches!(
            e,
            Error::MbarrierNotVisible { .. } | Error::MbarrierMisuse { .. }
        ) && (at(e, t, "// wait") || at(e, t, "mbarrier.arrive") || at(e, t, "mbarrier.init"))
    });
    case.plant(
        "st.shared.u32 [%r4], %r0;",
        "st.shared.u32 [%r4], %r0;\nst.shared.u64 [%r1+128], %d0; // over",
        &|e, t| matches!(e, Error::MbarrierMisuse { .. }) && at(e, t, "// over"),
    );
}

#[test]
fn copies_arrive_on_an_mbarrier() {
    let arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+128];";
    let copy = format!("cp.async.ca.shared::cta.global [%r4+0], [%d4], 4;\n{arrive}");
    let mut case = hand_over(&copy, WAIT);
    case.body = case.body.replace("st.shared.u32 [%r4], %r0;", "");
    case.plant(
        arrive,
        "mbarrier.arrive.shared::cta.b64 _, [%r1+128];\ncp.async.commit_group;",
        &|e, t| match e {
            Error::Uninitialised { .. } => at(e, t, "ld.shared.u32"),
            Error::UnawaitedAsync { line, .. } => *line == line_of(t, "cp.async.ca"),
            _ => race_between(e, t, "cp.async.ca", "ld.shared.u32"),
        },
    );
    // Without .noinc the arrival adds itself to what the phase expects.
    let waiting = case.text("arrive.noinc", "arrive");
    assert!(matches!(
        case.run(&waiting, 0, &|_| {}).0,
        Err(Error::Hang { .. })
    ));
}

#[test]
fn a_state_token_names_its_phase() {
    let case = Case::new(
        Shape::block(64),
        ".shared .align 8 .b8 tile[264];
        mov.u32 %r1, tile;
        setp.eq.u32 %p2, %r0, 0;
        @%p2 mbarrier.init.shared::cta.b64 [%r1+256], 64;
        bar.sync 0;
        shl.b32 %r3, %r0, 2;
        add.s32 %r4, %r1, %r3;
        xor.b32 %r5, %r3, 128;
        add.s32 %r5, %r1, %r5;
        mov.u32 %r9, 0;
        ROUND:
        st.shared.u32 [%r4], %r9;
        mbarrier.arrive.shared::cta.b64 %d9, [%r1+256];
        FIRST: mbarrier.try_wait.shared::cta.b64 %p3, [%r1+256], %d9;
        @!%p3 bra FIRST;
        ld.shared.u32 %r6, [%r5];
        mbarrier.arrive.shared::cta.b64 %d9, [%r1+256]; // second
        SECOND: mbarrier.try_wait.shared::cta.b64 %p3, [%r1+256], %d9;
        @!%p3 bra SECOND;
        add.s32 %r9, %r9, 1;
        setp.lt.u32 %p4, %r9, 5;
        @%p4 bra ROUND;
        st.global.u32 [%d3], %r6;",
    );
    let second = "mbarrier.arrive.shared::cta.b64 %d9, [%r1+256]; // second\n        SECOND: mbarrier.try_wait.shared::cta.b64 %p3, [%r1+256], %d9;\n        @!%p3 bra SECOND;";
    case.plant(second, "", &|e, t| {
        race_between(e, t, "st.shared.u32", "ld.shared.u32")
    });
}

#[test]
fn a_block_writes_into_another_and_arrives_there() {
    let case = Case::new(
        Shape::cluster(2, 32),
        ".shared .align 8 .b8 tile[136];
        mov.u32 %r1, tile;
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r1+128], 32;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        xor.b32 %r3, %r2, 1;
        shl.b32 %r4, %r0, 2;
        add.s32 %r5, %r1, %r4;
        mapa.shared::cluster.u32 %r6, %r5, %r3;
        mapa.shared::cluster.u32 %r7, %r1, %r3;
        st.shared::cluster.u32 [%r6], %r0;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7+128];
        WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1+128], 0;
        @!%p3 bra WAIT;
        xor.b32 %r8, %r5, 8;
        ld.shared.u32 %r9, [%r8];
        setp.eq.u32 %p2, %r2, 0;
        @%p2 st.global.u32 [%d3], %r9;
        barrier.cluster.arrive.release.aligned; // last
        barrier.cluster.wait.acquire.aligned;",
    );
    let race = |e: &Error, t: &str| race_between(e, t, "st.shared::cluster", "ld.shared.u32");
    case.plant(
        "mbarrier.arrive.release.cluster",
        "mbarrier.arrive.relaxed.cluster",
        &race,
    );
    case.plant(
        "try_wait.parity.acquire.cluster",
        "try_wait.parity.acquire.cta",
        &race,
    );
    case.plant(
        "arrive.release.aligned;\n        barrier",
        "arrive.relaxed.aligned;\n        barrier",
        &|e, t| matches!(e, Error::MbarrierNotVisible { .. }) && at(e, t, "mbarrier.arrive"),
    );
}

#[test]
fn wide_asynchronous_stores_count_their_bytes() {
    let case = Case::new(
        Shape::cluster(2, 32),
        ".shared .align 16 .b8 tile[528];
        mov.u32 %r1, tile;
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r0, 0;
        @!%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r1+512], 1;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1+512], 512;
        mbarrier.arrive.shared::cta.b64 _, [%r1+512];
        fence.mbarrier_init.release.cluster;
        READY:
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.acquire.aligned;
        xor.b32 %r3, %r2, 1;
        shl.b32 %r4, %r0, 4;
        add.s32 %r5, %r1, %r4;
        mapa.shared::cluster.u32 %r6, %r5, %r3;
        mapa.shared::cluster.u32 %r7, %r1, %r3;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r6], {%r0, %r2, %r0, %r2}, [%r7+512];
        WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1+512], 0; // wait
        @!%p3 bra WAIT;
        xor.b32 %r8, %r5, 16;
        ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r8];
        add.s32 %r9, %r9, %r12;
        setp.eq.u32 %p2, %r2, 0;
        @%p2 st.global.u32 [%d3], %r9;",
    );
    case.plant(".v4.b32 [%r6], {%r0, %r2, %r0, %r2}", ".v2.b32 [%r6], {%r0, %r2}", &|e, t| {
        matches!(e, Error::Hang { waiting } if waiting.iter().any(|w| w.line == line_of(t, "// wait")))
    });
    case.plant("[%r1+512], 512;", "[%r1+512], 496;", &|e, t| match e {
        Error::Uninitialised { .. } => at(e, t, "ld.shared.v4"),
        Error::Race { .. } => race_between(e, t, "st.async", "ld.shared.v4"),
        Error::UnawaitedAsync { line, .. } => *line == line_of(t, "st.async"),
        Error::EndedBlock { .. } => at(e, t, "st.async"),
        _ => false,
    });
    case.plant("[%r7+512];", "[%r1+512];", &|e, t| {
        matches!(e, Error::MbarrierMisuse { .. }) && at(e, t, "st.async")
    });
}
