//! CPUs that map and unmap beside each other, while tables are reclaimed and the hardware walks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::addr::{DomainId, Iova, Permissions, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis::pgtable::{AmdV1, Format, Layout, PageTable};
use portcullis_model::open::OpenTable;
use portcullis_model::{Context, Iommu, IommuConfig, Memory, TableFormat};

use super::support::*;
use crate::common::{DEVICE, PAGE, PLATFORM, vtd};

const LARGE: u64 = 2 << 20;
const WORKERS: u64 = 3;
const DOMAIN: DomainId = DomainId(1);
/// All go on until tables were reclaimed so often, and each worker has done its work so often.
const ROUNDS: u64 = 200;
const TURNS: u64 = 1000;

struct Rig<X: Format> {
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    table: PageTable<Arc<Memory>, X>,
    /// What each worker has done, and whoever walks.
    turns: [AtomicU64; WORKERS as usize],
    walked: AtomicU64,
    is_over: AtomicBool,
}

/// Has the others stop, too, where one panics.
struct Failing<'a>(&'a AtomicBool);

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl<X: Format> Rig<X> {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    fn walks(&self, at: u64, len: u64) {
        let phys = PhysAddr::new(ELSEWHERE + at);
        let outcome = self.iommu.access_checked(DEVICE, Iova::new(at), phys, len, Permissions::READ_WRITE);
        assert_eq!((outcome.faults, outcome.wrong), (0, 0), "{at:#x}");
    }

    fn forget(&self, start: u64, len: u64) {
        let request = Invalidation::Range { range: range(start, len), leaf_only: true };
        self.iommu.queue().invalidate(DOMAIN, request).unwrap();
    }

    /// Maps, looks, unmaps parts and then the rest, in pages that are this worker's own, in tables that are not.
    fn work(&self, worker: u64) {
        let _failing = Failing(&self.is_over);
        let mut dice = worker + 1;
        let mut below = |end: u64| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            (dice >> 20) % end
        };
        while self.goes_on() {
            let region = below(4) * LARGE;
            // Eighths of a region, or a whole one of its own.
            let (start, len) = if below(4) == 0 {
                ((8 + worker) * LARGE, LARGE)
            } else {
                (region + (2 * worker + 1) * LARGE / 8 + below(32) * PAGE, (1 + below(32)) * PAGE)
            };
            map(&self.table, start, len).unwrap();
            self.walks(start + below(len / PAGE) * PAGE, PAGE);
            assert!(is_mapped(&self.table, start) && is_mapped(&self.table, start + len - 1));
            let part = below(len / PAGE) * PAGE;
            let removed = unmap_telling(&self.table, range(start + part, PAGE), |range| {
                let request = Invalidation::Range { range, leaf_only: false };
                self.iommu.queue().invalidate(DOMAIN, request).is_ok()
            });
            assert_eq!(removed.bytes, PAGE);
            self.forget(start, len);
            if part > 0 {
                self.walks(start, part);
            }
            assert_eq!(unmap(&self.table, start, len), len - PAGE);
            assert!((0..len / PAGE).all(|page| !is_mapped(&self.table, start + page * PAGE)));
            // Before anybody uses the addresses again.
            self.forget(start, len);
            self.turns[worker as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn reclaim(&self) {
        let _failing = Failing(&self.is_over);
        let (mut rounds, mut freed) = (0_u64, 0);
        while self.goes_on() {
            rounds += 1;
            let result = self.table.shrink(&*PLATFORM, || {
                if rounds.is_multiple_of(5) {
                    return Err(InvalidationError::TimedOut { waited_ns: 1 });
                }
                self.iommu.queue().invalidate(DOMAIN, Invalidation::Domain)
            });
            assert!(result.is_ok() || rounds.is_multiple_of(5));
            freed += result.unwrap_or(0);
            let turns = self.turns.iter().map(|turns| turns.load(Ordering::Relaxed)).min().unwrap();
            assert!(freed > 0 || turns < 100 * TURNS, "{rounds} rounds have freed nothing");
            if rounds >= ROUNDS && turns >= TURNS && freed > 0 && self.walked.load(Ordering::Relaxed) > 0 {
                self.is_over.store(true, Ordering::Relaxed);
            }
        }
    }
}

fn stress<X: Format>(format: X, read: TableFormat) {
    let memory = Memory::new(64 << 20);
    let table = make(Arc::clone(&memory), format);
    assert_eq!(format.shift(2), 21, "the regions are tables");
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    iommu.attach(DEVICE, Context::Translated { domain: DOMAIN, root: table.root(), format: read });
    let empty = table.table_bytes();
    let (turns, walked) = (Default::default(), AtomicU64::new(0));
    let rig = Rig { memory, iommu, table, turns, walked, is_over: AtomicBool::new(false) };
    // Some regions have a page that is always there, some do not; and one has a region to itself.
    let kept = [0, LARGE + 511 * PAGE, 6 * LARGE, 700 * LARGE];
    kept.iter().for_each(|at| map(&rig.table, *at, PAGE).unwrap());
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let rig = &rig;
            scope.spawn(move || rig.work(worker));
        }
        scope.spawn(|| {
            let _failing = Failing(&rig.is_over);
            while rig.goes_on() {
                for at in kept {
                    assert!(is_mapped(&rig.table, at));
                    rig.walks(at, PAGE);
                }
                rig.walked.fetch_add(1, Ordering::Relaxed);
                // Or the others would wait for its time slices, and not for each other.
                std::thread::yield_now();
            }
        });
        scope.spawn(|| rig.reclaim());
    });
    let stats = rig.iommu.stats();
    assert_eq!((stats.walks_into_freed_frames, rig.iommu.fault_count()), (0, 0));
    assert_accounted(&rig.memory, &rig.table);
    assert_eq!(unmap(&rig.table, 0, 1 << 38), kept.len() as u64 * PAGE);
    reclaim(&rig.table);
    assert_eq!(rig.table.table_bytes(), empty);
    assert_accounted(&rig.memory, &rig.table);
}

#[test]
fn cpus_beside_each_other_and_the_hardware_meanwhile() {
    stress(vtd(3), TableFormat::VtdSecondStage { levels: 3 });
}

#[test]
fn the_same_with_pages_of_several_entries() {
    stress(AmdV1::new(4, 3, 52).unwrap(), TableFormat::AmdV1 { levels: 4 });
}
