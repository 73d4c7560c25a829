//! A planned step touches no heap: neither one that is launched nor one that is refused.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kda_codegen::Arch;
use kda_runtime::{Config, Plan, Policies, StepKind};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(body: impl FnOnce()) -> usize {
    let before = COUNT.with(Cell::get);
    body();
    COUNT.with(Cell::get) - before
}

#[test]
fn planning_a_step_allocates_nothing() {
    let kinds = [StepKind::Decode, StepKind::Verify(4)];
    let config = Config::kimi_k3(support::HEADS);
    let policies = Policies::for_device(Arch::Sm90a, &config, &kinds);
    let plan = Plan::new(Arch::Sm90a, &config, &policies).unwrap();
    for kind in kinds {
        let step = support::step(kind);
        let mut refused = step;
        refused.out.buffer.elements = 1;
        let counted = allocations(|| {
            let mut planned = plan.step(&step, 64).unwrap().unwrap();
            std::hint::black_box(planned.arguments.addresses());
            assert!(plan.step(&refused, 64).is_err());
        });
        assert_eq!(counted, 0, "{kind}");
    }
    // The count counts.
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(7)))), 1);
}
