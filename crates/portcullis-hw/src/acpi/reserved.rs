//! Memory that firmware, or a device on its behalf, goes on using. A kernel identity-maps it before it [enables](crate::Iommu::enable) a
//! unit.
//!
//! Firmware names regions twice, regions that overlap, and regions that end inside a page. All regions of a domain's devices are merged
//! first: into whole pages, each once.

use alloc::vec::Vec;

use portcullis::addr::{Iova, IovaRange, PageSize, Permissions, PhysAddr};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;
use portcullis::platform::Platform;

use super::AcpiError;
use super::bytes::push;

/// A region that firmware reserves for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved {
    /// The memory; the device uses its physical addresses.
    pub range: IovaRange,
    /// The device's accesses there.
    pub permissions: Permissions,
}

/// Where a region begins or ends, in pages (wider than 64 bits, for pages of one byte), and whether a device reads and writes it.
struct Edge {
    page: u128,
    begins: bool,
    permissions: Permissions,
}

impl Reserved {
    /// Merges `regions` into whole pages of `granule`: sorted, no page twice, and as few pieces as possible. A page that several regions
    /// touch gets the permissions of all of them. O(n log n); allocates.
    ///
    /// # Errors
    /// [`AcpiError::OutOfMemory`].
    pub fn merged(
        regions: impl IntoIterator<Item = Self>,
        granule: PageSize,
    ) -> Result<Vec<Self>, AcpiError> {
        let mut edges = Vec::new();
        for Self { range, permissions } in regions {
            let page = |at: Iova| u128::from(at.get() >> granule.shift());
            push(&mut edges, Edge { page: page(range.start()), begins: true, permissions })?;
            push(&mut edges, Edge { page: page(range.last()) + 1, begins: false, permissions })?;
        }
        edges.sort_unstable_by_key(|edge| edge.page);
        let mut merged: Vec<Self> = Vec::new();
        // How many of the regions that cover this address are readable, and how many writable.
        let (mut readers, mut writers, mut from) = (0_usize, 0_usize, 0);
        for edge in edges {
            if let Some(permissions) = Permissions::of(readers > 0, writers > 0).filter(|_| edge.page > from)
            {
                let (first, last) = (from << granule.shift(), (edge.page << granule.shift()) - 1);
                add(&mut merged, first as u64, last as u64, permissions)?;
            }
            from = edge.page;
            for (count, wanted) in [(&mut readers, Permissions::READ), (&mut writers, Permissions::WRITE)] {
                match (edge.permissions.allows(wanted), edge.begins) {
                    (true, true) => *count += 1,
                    // No region ends before it begins: at one page, only a beginning may follow the end of another region.
                    (true, false) => *count = count.saturating_sub(1),
                    (false, _) => {}
                }
            }
        }
        Ok(merged)
    }

    /// Identity-maps `regions`, [merged](Self::merged), before a device that uses them is attached to the domain. The domain [reserves
    /// them](portcullis::dma::DomainBuilder::reserve), so that it never allocates their addresses, and never unmaps them. Pass the regions
    /// of all devices of one domain in one call. May allocate page tables; O(n log n) besides the maps.
    ///
    /// # Errors
    /// [`MapError`]: nothing is mapped. [`MapError::AlreadyMapped`] if the domain maps something else in one of their pages.
    ///
    /// Call it before a device is attached: a failed map may leave a part of a region mapped until its invalidation is confirmed.
    ///
    /// # Safety
    /// 1. The memory is the device's, as firmware says, and nothing else relies on the contents of its pages.
    pub unsafe fn map<M: Mapper, P: Platform>(
        regions: &[Self],
        mapper: &M,
        platform: &P,
    ) -> Result<(), MapError> {
        let geometry = mapper.geometry();
        // A mapper without a page size refuses every map.
        let granule = geometry.page_sizes.smallest().unwrap_or(PageSize::SIZE_4K);
        let merged = Self::merged(regions.iter().copied(), granule).map_err(|_| MapError::OutOfMemory)?;
        let mut gather = Gather::new();
        for (index, region) in merged.iter().enumerate() {
            let list = [(PhysAddr::new(region.range.start().get()), region.range.len())];
            // SAFETY: clause 1 is the caller's, for these pages.
            let mapped =
                unsafe { mapper.map(platform, region.range, list, region.permissions.into(), &mut gather) };
            if let Err(error) = mapped {
                for region in merged.iter().take(index) {
                    // A piece that was just mapped is unmapped as a whole.
                    let _ = mapper.unmap(platform, region.range, &mut gather);
                }
                // Stale translations lead only to the regions, and nothing else uses their addresses.
                let _ = mapper.sync(&gather);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Appends the bytes from `first` to `last`, to the last piece if they continue it.
fn add(merged: &mut Vec<Reserved>, first: u64, last: u64, permissions: Permissions) -> Result<(), AcpiError> {
    let range = |first: u64| IovaRange::from_bounds(Iova::new(first), Iova::new(last)).ok();
    if let Some(before) = merged.last_mut()
        && before.permissions == permissions
        && before.range.last().get().checked_add(1) == Some(first)
        && let Some(joined) = range(before.range.start().get())
    {
        before.range = joined;
        return Ok(());
    }
    // All 2^64 bytes are no range: split them in two.
    match range(first) {
        Some(range) => push(merged, Reserved { range, permissions }),
        None => {
            let middle = first.midpoint(last);
            add(merged, first, middle, permissions)?;
            add(merged, middle.saturating_add(1), last, permissions)
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::sync::Arc;
    use alloc::vec;

    use portcullis::addr::DomainId;
    use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
    use portcullis::mapper::TableMapper;
    use portcullis::pgtable::{PageTable, VtdSecondStage};
    use portcullis::std_platform::StdPlatform;

    use super::*;
    use crate::fake::Memory;
    use crate::sync::{AtomicU64, Ordering};

    const READ: Permissions = Permissions::READ;
    const WRITE: Permissions = Permissions::WRITE;
    const BOTH: Permissions = Permissions::READ_WRITE;

    fn region((first, last, permissions): (u64, u64, Permissions)) -> Reserved {
        let range = IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap();
        Reserved { range, permissions }
    }

    fn merged(regions: &[(u64, u64, Permissions)], granule: u32) -> Vec<(u64, u64, Permissions)> {
        let granule = PageSize::from_shift(granule).unwrap();
        let merged = Reserved::merged(regions.iter().copied().map(region), granule).unwrap();
        merged
            .iter()
            .map(|region| (region.range.start().get(), region.range.last().get(), region.permissions))
            .collect()
    }

    #[test]
    fn regions_become_whole_pages_each_once() {
        assert_eq!(merged(&[], 12), []);
        // A duplicate, one that extends it, one adjacent to it, and one apart.
        let regions = [
            (0xe8000, 0xe8fff, BOTH),
            (0xe8000, 0xe8fff, BOTH),
            (0xe8000, 0xe9fff, BOTH),
            (0xea000, 0xea000, BOTH),
            (0xec800, 0xed7ff, BOTH),
        ];
        assert_eq!(merged(&regions, 12), [(0xe8000, 0xeafff, BOTH), (0xec000, 0xedfff, BOTH)]);
        assert_eq!(merged(&regions, 16), [(0xe0000, 0xeffff, BOTH)]);
        let back = regions.map(|(first, last, permissions)| (first, last, permissions));
        assert_eq!(merged(&back.into_iter().rev().collect::<Vec<_>>(), 12), merged(&regions, 12));
    }

    #[test]
    fn a_page_that_several_regions_touch_is_read_and_written_as_any_of_them() {
        assert_eq!(merged(&[(0x1000, 0x17ff, READ), (0x1800, 0x1fff, WRITE)], 12), [(0x1000, 0x1fff, BOTH)]);
        let regions = [(0x1000, 0x4fff, READ), (0x3000, 0x6fff, WRITE)];
        let pieces = [(0x1000, 0x2fff, READ), (0x3000, 0x4fff, BOTH), (0x5000, 0x6fff, WRITE)];
        assert_eq!(merged(&regions, 12), pieces);
        let regions = [(0x1000, 0x8fff, READ), (0x3000, 0x3fff, READ), (0x9000, 0x9fff, WRITE)];
        assert_eq!(merged(&regions, 12), [(0x1000, 0x8fff, READ), (0x9000, 0x9fff, WRITE)]);
    }

    #[test]
    fn the_ends_of_the_address_space_are_no_exception() {
        let all = [(0, u64::MAX - 1, BOTH), (1, u64::MAX, BOTH)];
        for granule in [12, 63] {
            assert_eq!(merged(&all, granule), [(0, u64::MAX >> 1, BOTH), (1 << 63, u64::MAX, BOTH)]);
        }
        assert_eq!(merged(&all, 0), [(0, u64::MAX - 1, BOTH), (u64::MAX, u64::MAX, BOTH)]);
        assert_eq!(merged(&[(u64::MAX, u64::MAX, READ)], 0), [(u64::MAX, u64::MAX, READ)]);
        assert_eq!(merged(&[(u64::MAX, u64::MAX, READ)], 12), [(u64::MAX - 0xfff, u64::MAX, READ)]);
    }

    /// The queue of a unit that is off, which counts the requests.
    #[derive(Default)]
    struct Counted(AtomicU64);

    // SAFETY: no hardware walks the tables.
    unsafe impl InvalidationQueue for Counted {
        fn invalidate(&self, _: DomainId, _: Invalidation) -> Result<(), InvalidationError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    type Made = TableMapper<Memory, Arc<Counted>, VtdSecondStage>;

    fn mapper() -> Made {
        let table = PageTable::new(Memory::new(64), VtdSecondStage::new(3, 1, 39).unwrap()).unwrap();
        TableMapper::new(table, Arc::default(), DomainId(1), vec![])
    }

    fn reached(mapper: &Made, at: u64) -> Option<u64> {
        mapper.table().translate(&StdPlatform::new(), Iova::new(at)).map(|(phys, _)| phys.get())
    }

    #[test]
    fn overlapping_regions_of_a_device_are_mapped_by_one_call() {
        let (mapper, platform) = (mapper(), StdPlatform::new());
        let regions = [(0xe8000, 0xe8fff, BOTH), (0xe8000, 0xe9fff, BOTH), (0xf0010, 0xf001f, READ)];
        // SAFETY: nothing walks the tables.
        unsafe { Reserved::map(&regions.map(region), &mapper, &platform) }.unwrap();
        for at in [0xe8000, 0xe9fff, 0xf0000, 0xf0fff] {
            assert_eq!(reached(&mapper, at), Some(at));
        }
        for at in [0xe7fff, 0xea000, 0xeffff, 0xf1000] {
            assert_eq!(reached(&mapper, at), None);
        }
    }

    #[test]
    fn a_list_that_cannot_be_mapped_is_not_mapped_at_all() {
        let (mapper, platform) = (mapper(), StdPlatform::new());
        let beyond = [(0xe8000, 0xe8fff, BOTH), (1 << 39, (1 << 39) + 0xfff, BOTH)];
        // SAFETY: nothing walks the tables.
        let refused = unsafe { Reserved::map(&beyond.map(region), &mapper, &platform) };
        assert!(matches!(refused, Err(MapError::BeyondAperture { .. })), "{refused:?}");
        assert_eq!(mapper.queue().0.load(Ordering::Relaxed), 1, "what was mapped is forgotten");
        assert_eq!(reached(&mapper, 0xe8000), None);
        // SAFETY: nothing walks the tables.
        unsafe { Reserved::map(&[region(beyond[0])], &mapper, &platform) }.unwrap();
        let twice = [(0x10000, 0x10fff, BOTH), beyond[0]];
        // SAFETY: nothing walks the tables.
        let refused = unsafe { Reserved::map(&twice.map(region), &mapper, &platform) };
        assert_eq!(refused, Err(MapError::AlreadyMapped { at: Iova::new(0xe8000) }));
        assert_eq!((reached(&mapper, 0x10000), reached(&mapper, 0xe8000)), (None, Some(0xe8000)));
    }
}
