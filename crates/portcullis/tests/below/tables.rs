//! Page tables by themselves: large pages that are split, tables that are reclaimed.

use std::error::Error;
use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::invalidation::{Costs, Invalidation, InvalidationQueue};
use portcullis::pgtable::{AmdV1, Arm, Format, PageTable, VtdSecondStage};
use portcullis::platform::Frames;
use portcullis_model::{ArmTables, Context, Granule, Iommu, TableFormat};

use crate::doubles::{Fr, Incoherent, Pl, Qu};
use crate::hostile::{Hostile, PAGE};
use crate::run::{DEVICE, Scenario, Work, World, all};

const DOMAIN: DomainId = DomainId(2);
const LARGE: u64 = 2 << 20;
/// Where memory is that no CPU looks into, and no other buffer.
const MEMORY: u64 = 0xa_0000_0000;

/// A table that the device is behind instead of the world's domain.
struct Tables<F: Frames, X: Format> {
    table: PageTable<F, X>,
    queue: Qu,
    platform: Pl,
    hostile: Arc<Hostile>,
    unit: Arc<Iommu>,
    /// Where the next memory is that nobody had yet.
    next: u64,
}

impl<F: Frames, X: Format> Tables<F, X> {
    fn new(world: &World, frames: F, format: X, read: TableFormat) -> Self {
        let World { hostile, unit, platform, .. } = world;
        let table = PageTable::for_cpus(frames, format, 2).unwrap();
        unit.attach(DEVICE, Context::Translated { domain: DOMAIN, root: table.root(), format: read });
        let queue = Qu { queue: unit.queue(), hostile: Arc::clone(hostile), costs: Costs::BARE_METAL };
        let (platform, hostile, unit) = (platform.clone(), Arc::clone(hostile), Arc::clone(unit));
        Self { table, queue, platform, hostile, unit, next: MEMORY }
    }

    /// Maps `len` bytes at `start` to memory that is as aligned as `start` is.
    fn open(&mut self, start: u64, len: u64) -> Result<PhysAddr, Box<dyn Error>> {
        let range = IovaRange::new(Iova::new(start), len)?;
        let phys = PhysAddr::new(self.next + start);
        self.hostile.knows(range);
        // SAFETY: only a simulated device reaches the memory, which is nobody's.
        unsafe { self.table.map(&self.platform, range, phys, Permissions::READ_WRITE) }
            .map_err(|(error, _)| error)?;
        self.hostile.look();
        Ok(phys)
    }

    /// Removes what there is; when it says so, no device reaches it.
    fn close(&self, start: u64, len: u64) -> Result<u64, Box<dyn Error>> {
        let invalidate =
            |range, leaf_only| self.queue.invalidate(DOMAIN, Invalidation::Range { range, leaf_only });
        let range = IovaRange::new(Iova::new(start), len)?;
        let forget = &mut |range| invalidate(range, false).is_ok();
        // SAFETY: the queue's word.
        let unmapped = unsafe { self.table.unmap(&self.platform, range, forget) };
        self.hostile.look();
        invalidate(unmapped.stale, true)?;
        if unmapped.kept > 0 { Err("a part is still mapped".into()) } else { Ok(unmapped.bytes) }
    }

    /// The memory is somebody else's.
    fn give(&self, phys: PhysAddr, len: u64) {
        self.hostile.gave_back(PhysSegment { phys, len });
    }

    /// All empty tables go.
    fn reclaim(&self) -> Result<usize, Box<dyn Error>> {
        let forget = || self.queue.invalidate(DOMAIN, Invalidation::Domain);
        // SAFETY: the queue's word.
        Ok(unsafe { self.table.reclaim(&self.platform, forget) }?)
    }

    /// Begins anew, whatever is there of the last time.
    fn begin(&mut self) -> Result<(), Box<dyn Error>> {
        self.next += 16 * LARGE;
        self.close(0, 8 * LARGE)?;
        Ok(())
    }
}

/// No device walks tables that are gone.
impl<F: Frames, X: Format> Drop for Tables<F, X> {
    fn drop(&mut self) {
        self.unit.detach(DEVICE);
    }
}

/// Parts of a page of `size` bytes go, one after the other, and then the rest, with their tables.
fn splits<F: Frames + 'static, X: Format>(mut tables: Tables<F, X>, size: u64) -> Work {
    Box::new(move || {
        tables.begin()?;
        let phys = tables.open(LARGE, size)?;
        for (at, len) in [(3 * PAGE, PAGE), (5 * PAGE, 2 * PAGE), (0, PAGE)] {
            assert_eq!(tables.close(LARGE + at, len)?, len);
            tables.give(PhysAddr::new(phys.get() + at), len);
        }
        assert_eq!(tables.close(LARGE, size)?, size - 4 * PAGE);
        tables.give(phys, size);
        assert!(tables.reclaim()? > 0);
        Ok(())
    })
}

/// More than one table is empty, one is not, and one is used again.
fn reclaims<F: Frames + 'static, X: Format>(mut tables: Tables<F, X>) -> Work {
    Box::new(move || {
        tables.begin()?;
        let pages: Vec<_> = (0..4).map(|n| tables.open(n * LARGE, PAGE)).collect::<Result<_, _>>()?;
        for n in [0, 2, 3] {
            assert_eq!(tables.close(n * LARGE, PAGE)?, PAGE);
            tables.give(pages[n as usize], PAGE);
        }
        // And those that something has left over.
        assert!(tables.reclaim()? >= 3 * PAGE as usize);
        tables.next += 8 * LARGE;
        let again = tables.open(2 * LARGE, PAGE)?;
        assert_eq!(tables.close(0, 4 * LARGE)?, 2 * PAGE);
        tables.give(again, PAGE);
        tables.give(pages[1], PAGE);
        assert!(tables.reclaim()? > 0);
        Ok(())
    })
}

fn vtd() -> (VtdSecondStage, TableFormat) {
    (VtdSecondStage::new(3, 2, 48).unwrap(), TableFormat::VtdSecondStage { levels: 3 })
}

fn amd() -> (AmdV1, TableFormat) {
    (AmdV1::new(3, 2, 48).unwrap(), TableFormat::AmdV1 { levels: 3 })
}

fn arm() -> (Arm<12>, TableFormat) {
    let read = ArmTables::stage1(Granule::Size4K, 39);
    (Arm::<12>::stage_1(39, 48).unwrap(), TableFormat::Arm(read))
}

fn coherent<X: Format>(world: &World, (format, read): (X, TableFormat)) -> Tables<Fr, X> {
    Tables::new(world, world.frames.clone(), format, read)
}

fn incoherent<X: Format>(world: &World, (format, read): (X, TableFormat)) -> Tables<Incoherent, X> {
    Tables::new(world, Incoherent(world.frames.clone()), format, read)
}

#[test]
fn tables() {
    all(&[
        Scenario::new("split", |world| splits(coherent(world, vtd()), LARGE)).frees_all(),
        Scenario::new("split, not coherent", |world| splits(incoherent(world, vtd()), LARGE)).frees_all(),
        Scenario::new("split of a run", |world| splits(coherent(world, amd()), 16 * PAGE)).frees_all(),
        Scenario::new("split of a run, not coherent", |world| splits(incoherent(world, amd()), 16 * PAGE))
            .frees_all(),
        Scenario::new("break before make", |world| splits(coherent(world, arm()), LARGE)).frees_all(),
        Scenario::new("break before make of a run, not coherent", |world| {
            splits(incoherent(world, arm()), 16 * PAGE)
        })
        .frees_all(),
        Scenario::new("reclaim", |world| reclaims(coherent(world, vtd()))).frees_all(),
        Scenario::new("reclaim, not coherent", |world| reclaims(incoherent(world, vtd()))).frees_all(),
    ]);
}
