//! A CPU is lent for bounded time: counted in looks at frames of tables, whatever the range.

use std::cell::Cell;
use std::sync::Arc;

use portcullis::addr::{Permissions, PhysAddr};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::pgtable::{MapError, VtdSecondStage};
use portcullis::platform::{Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table};
use portcullis_model::Memory;
use portcullis_model::open::{OpenTable, Simulated};

use super::support::*;
use crate::common::{PAGE, PLATFORM};

thread_local! {
    /// Looks of this thread since it has its CPU, and the most that it had with one.
    static LOOKS: Cell<u64> = const { Cell::new(0) };
    static MOST: Cell<u64> = const { Cell::new(0) };
}

/// The platform of all tests, with an account of what is done with each CPU.
struct Counting;

// SAFETY: CPUs are lent as `StdPlatform` lends them.
unsafe impl Platform for Counting {
    fn cpus(&self) -> usize {
        PLATFORM.cpus()
    }

    fn number(&self) -> PlatformNumber {
        PLATFORM.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        LOOKS.set(0);
        let result = PLATFORM.with_cpu(f);
        MOST.set(MOST.get().max(LOOKS.get()));
        result
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn fence_all(&self) {
        PLATFORM.fence_all();
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

struct Counted(Arc<Memory>);

// SAFETY: it is the software IOMMU's memory.
unsafe impl Simulated for Counted {}

// SAFETY: everything is passed on to the memory.
unsafe impl Frames for Counted {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        LOOKS.set(LOOKS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.table(frame) }
    }
}

/// The most looks with one CPU since the last call.
fn most() -> u64 {
    MOST.replace(0)
}

#[test]
fn a_cpu_is_not_kept_in_proportion_to_a_range() {
    const LEN: u64 = 1 << 30;
    // 64 runs, each of them a walk of four levels and two looks at where it ends; or 4,096 pages by lists.
    const RUNS: u64 = 64 * 8;
    const PAGES: u64 = 4096 + 8 * 8;
    let table = make(Counted(Memory::new(64 << 20)), VtdSecondStage::new(4, 1, 52).unwrap());
    let rights = Permissions::READ_WRITE;
    let whole = range(0, LEN);
    let phys = |at| PhysAddr::new(ELSEWHERE + at);
    table.open(&Counting, whole, phys(0), rights).unwrap();
    assert!((8..=RUNS).contains(&most()));
    let mut seen = 0;
    table.entries(&Counting, table.aperture()).for_each(|leaf| seen += leaf.range.len());
    assert_eq!(seen, LEN);
    assert!((4..=RUNS).contains(&most()));
    assert_eq!(table.close(&Counting, whole, &mut |_| false).bytes, LEN);
    assert!((8..=RUNS).contains(&most()));
    // Pages one by one, none in its neighbour's table; empty pieces, at the end too; holes.
    let list = || (0..LEN / PAGE).map(|page| (phys(page * PAGE), PAGE));
    table.open_list(&Counting, whole, list(), rights).unwrap();
    assert!((8..=PAGES).contains(&most()));
    let empty = || std::iter::repeat_n((phys(0), 0), 100_000);
    assert_eq!(table.close(&Counting, range(PAGE, LEN - PAGE), &mut |_| false).bytes, LEN - PAGE);
    let one = [(phys(PAGE), PAGE)];
    let padded = empty().chain(one).chain(empty());
    table.open_list(&Counting, range(PAGE, PAGE), padded, rights).unwrap();
    most();
    assert_eq!(table.close(&Counting, whole, &mut |_| false).bytes, 2 * PAGE);
    assert!((8..=RUNS).contains(&most()));
    // What is undone.
    map(&table, LEN - PAGE, PAGE).unwrap();
    let refused = table.open_list(&Counting, whole, list(), rights);
    assert!(matches!(refused.unwrap_err().0, MapError::AlreadyMapped { .. }));
    assert!((8..=PAGES).contains(&most()));
}
