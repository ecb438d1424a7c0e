//! A page table that is used with several platforms, whose CPUs have the same numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{Permissions, PhysAddr};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis_model::open::OpenTable;

use super::support::*;
use crate::common::{PAGE, vtd};

/// A machine of one CPU, which is this thread.
struct One(PlatformNumber);

// SAFETY: each value is used by one thread.
unsafe impl Platform for One {
    fn cpus(&self) -> usize {
        1
    }

    fn number(&self) -> PlatformNumber {
        self.0
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: one thread is the CPU.
        f(Some(&unsafe { LocalCpu::new(0) }))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

type Table = PageTable<Arc<Hooked<true>>, VtdSecondStage>;

/// Maps what needs a new table. Whether the turn in which that is done is by the lock, and not by a CPU.
fn takes_the_lock(frames: &Hooked<true>, table: &Arc<Table>, platform: &One, start: u64) -> bool {
    let seen = Arc::new(AtomicBool::new(false));
    let (hook, within) = (Arc::clone(&seen), Arc::clone(table));
    frames.once(move || hook.store(format!("{within:#?}").contains("<locked>"), Ordering::Relaxed));
    let (range, phys) = (range(start, PAGE), PhysAddr::new(ELSEWHERE + start));
    table.open(platform, range, phys, Permissions::READ_WRITE).unwrap();
    assert!(frames.hook.lock().unwrap().is_none(), "there was a table already");
    seen.load(Ordering::Relaxed)
}

#[test]
fn anothers_cpu_of_the_same_number_is_not_taken_for_ones_own() {
    let (home, other) = (One(PlatformNumber::new()), One(PlatformNumber::new()));
    let silent = One(PlatformNumber::NONE);
    let frames = Hooked::new();
    let table: Arc<Table> = Arc::new(PageTable::for_cpus(Arc::clone(&frames), vtd(4), 1).unwrap());
    assert!(!takes_the_lock(&frames, &table, &home, 0));
    assert!(takes_the_lock(&frames, &table, &other, 1 << 30));
    assert!(takes_the_lock(&frames, &table, &silent, 2 << 30));
    assert!(!takes_the_lock(&frames, &table, &home, 3 << 30));
}

/// Its barrier need not reach the CPUs of the one whose CPUs are in use.
#[test]
fn another_platform_reclaims_nothing() {
    let (home, other) = (One(PlatformNumber::new()), One(PlatformNumber::new()));
    let silent = One(PlatformNumber::NONE);
    let table = make(Hooked::<true>::new(), vtd(4));
    table.open(&home, range(0, PAGE), PhysAddr::new(0), Permissions::READ).unwrap();
    assert_eq!(table.close(&other, range(0, PAGE), &mut |_| true).bytes, PAGE);
    let reclaim = |platform| table.shrink(platform, || Ok::<_, ()>(())).unwrap();
    assert_eq!((reclaim(&other), reclaim(&silent)), (0, 0));
    assert_eq!(reclaim(&home), 3 * PAGE as usize);
}

#[test]
fn one_without_a_number_reclaims_what_none_with_a_number_has_used() {
    let (silent, late) = (One(PlatformNumber::NONE), One(PlatformNumber::new()));
    let frames = Hooked::new();
    let table: Arc<Table> = Arc::new(PageTable::for_cpus(Arc::clone(&frames), vtd(4), 1).unwrap());
    assert!(takes_the_lock(&frames, &table, &silent, 0));
    assert_eq!(table.close(&silent, range(0, PAGE), &mut |_| true).bytes, PAGE);
    assert_eq!(table.shrink(&silent, || Ok::<_, ()>(())), Ok(3 * PAGE as usize));
    // From now on its barrier is the only one that there is.
    assert!(takes_the_lock(&frames, &table, &late, 0));
}
