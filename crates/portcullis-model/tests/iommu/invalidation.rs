//! What invalidations remove and keep, and what stays open without them.

use std::sync::Arc;

use crate::common::{BOTH, DEVICE, DOMAIN, Mapper, PAGE, READ, iova, phys, rig, rig_with};
use portcullis::addr::{DomainId, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis_model::queue::{CODE_MASK_TOO_LARGE, RING_ENTRIES};
use portcullis_model::{Descriptor, DeviceId, FaultReason, Iommu};

fn range(start: u64, len: u64, leaf_only: bool) -> Invalidation {
    Invalidation::Range { range: IovaRange::new(iova(start), len).unwrap(), leaf_only }
}

fn reached(iommu: &Iommu, at: u64) -> Option<u64> {
    iommu.probe(DEVICE, iova(at), READ).map(|to| to.get())
}

fn touch(iommu: &Iommu, at: u64) {
    iommu.access(DEVICE, iova(at), 1, READ).unwrap();
}

/// Table reads of one more access: 1 if the last-level table is still cached.
fn reads(iommu: &Iommu, at: u64) -> u64 {
    let before = iommu.stats().table_reads;
    touch(iommu, at);
    iommu.stats().table_reads - before
}

#[test]
fn without_an_invalidation_the_old_page_is_reached() {
    let (iommu, mapper) = rig();
    mapper.map(0x1000, 0x9000);
    touch(&iommu, 0x1000);
    mapper.unmap(0x1000);
    assert_eq!(reached(&iommu, 0x1000), Some(0x9000));
    iommu.queue().invalidate(DOMAIN, range(0x1000, PAGE, true)).unwrap();
    assert_eq!(reached(&iommu, 0x1000), None);
    assert_eq!(
        iommu.access(DEVICE, iova(0x1000), 1, READ).unwrap_err().reason,
        FaultReason::NotPresent { level: 1 }
    );
}

#[test]
fn a_range_becomes_the_smallest_block_or_the_domain() {
    let (iommu, mapper) = rig();
    for page in 0..16 {
        mapper.map(page * PAGE, 0x10_0000 + page * PAGE);
        touch(&iommu, page * PAGE);
    }
    for page in 0..16 {
        mapper.unmap(page * PAGE);
    }
    let queue = iommu.queue();
    let open = || (0..16).filter(|page| reached(&iommu, page * PAGE).is_some()).collect::<Vec<_>>();
    // Pages 5 and 6 differ in two bits: the block is 4 to 7.
    queue.invalidate(DOMAIN, range(5 * PAGE + 100, PAGE, true)).unwrap();
    assert_eq!(open(), [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]);
    queue.invalidate(DOMAIN, range(9 * PAGE, 1, true)).unwrap();
    assert_eq!(open(), [0, 1, 2, 3, 8, 10, 11, 12, 13, 14, 15]);
    queue.invalidate(DomainId(4), Invalidation::Domain).unwrap();
    assert_eq!(open().len(), 11, "another domain's");
    let stats = iommu.stats();
    assert_eq!((stats.range_invalidations, stats.domain_invalidations, stats.waits), (2, 1, 3));
    // Two pages on both sides of 2 MiB would need a block of 4 MiB: two of one page each do.
    queue.invalidate(DOMAIN, range((2 << 20) - 1, 2, true)).unwrap();
    assert_eq!(open().len(), 11);
    let stats = iommu.stats();
    assert_eq!((stats.range_invalidations, stats.domain_invalidations, stats.submissions), (4, 1, 4));
    // Two blocks of 4 MiB are more than the mask can encode.
    queue.invalidate(DOMAIN, range(PAGE, 6 << 20, true)).unwrap();
    assert_eq!(open(), [0_u64; 0]);
    let stats = iommu.stats();
    assert_eq!((stats.range_invalidations, stats.domain_invalidations, stats.submissions), (4, 2, 5));
    queue.invalidate(DOMAIN, range(0, u64::MAX, true)).unwrap();
    assert_eq!(iommu.stats().domain_invalidations, 3);
}

#[test]
fn leaf_only_keeps_the_tables_where_it_is_honoured() {
    for (honours, leaf_only, in_range, beside) in
        [(true, true, 1, 1), (true, false, 4, 1), (false, true, 4, 4), (false, false, 4, 4)]
    {
        let (iommu, mapper) = rig_with(|config| config.honours_leaf_only = honours);
        // One page in the range, and one that shares no table below the root with it.
        let other = 1 << 39;
        mapper.map(0x1000, 0x9000);
        mapper.map(0x2000, 0x9000);
        mapper.map(other, 0x9000);
        mapper.map(other + PAGE, 0x9000);
        touch(&iommu, 0x1000);
        touch(&iommu, other);
        iommu.queue().invalidate(DOMAIN, range(0x1000, PAGE, leaf_only)).unwrap();
        assert_eq!(reads(&iommu, 0x2000), in_range, "honours {honours}, leaf only {leaf_only}");
        assert_eq!(reads(&iommu, other + PAGE), beside, "honours {honours}, leaf only {leaf_only}");
    }
}

#[test]
fn a_table_freed_under_the_walk_cache_is_noticed() {
    let (iommu, mapper) = rig();
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0xa000);
    touch(&iommu, 0x1000);
    let table = mapper.table(0x1000, 1);
    mapper.entry(0x1000, 2).store(0, portcullis::sync::Ordering::Release);
    let queue = iommu.queue();
    queue.invalidate(DOMAIN, range(0, 2 << 20, true)).unwrap();
    iommu.memory().release(table, 1);
    // The hint was wrong: the freed table is still walked, and its entries are still there.
    assert_eq!(reached(&iommu, 0x2000), Some(0xa000));
    assert_eq!(iommu.stats().walks_into_freed_frames, 0, "a probe counts nothing");
    touch(&iommu, 0x2000);
    assert_eq!(iommu.stats().walks_into_freed_frames, 1);
    queue.invalidate(DOMAIN, range(0, 2 << 20, false)).unwrap();
    assert_eq!(reached(&iommu, 0x2000), None);
}

/// Each entry that is read there counts, not each walk.
#[test]
fn entries_of_freed_tables_are_counted_one_by_one() {
    let (iommu, mapper) = rig();
    let others = [0x1000, 0x20_1000, 0x40_1000];
    others.iter().for_each(|at| mapper.map(*at, 0x9000));
    touch(&iommu, 0x1000);
    let freed = [mapper.table(0x1000, 2), mapper.table(0x20_1000, 1)];
    freed.into_iter().for_each(|table| iommu.memory().release(table, 1));
    // The table of level 2 is cached, and leads to another of level 1.
    touch(&iommu, 0x20_1000);
    assert_eq!(iommu.stats().walks_into_freed_frames, 2);
    touch(&iommu, 0x40_1000);
    assert_eq!(iommu.stats().walks_into_freed_frames, 3, "the table of level 1 is there");
    assert_eq!(iommu.stats().table_reads, 4 + 2 + 2);
}

#[test]
fn a_driver_that_loses_invalidations_is_seen() {
    let (iommu, mapper) = rig();
    let queue = iommu.queue();
    let error = InvalidationError::TimedOut { waited_ns: 5 };
    queue.drop_next(1);
    queue.fail_next(2, error);
    mapper.map(0x1000, 0x9000);
    touch(&iommu, 0x1000);
    mapper.unmap(0x1000);
    let answers: Vec<_> = (0..3).map(|_| queue.invalidate(DOMAIN, Invalidation::Domain)).collect();
    assert_eq!(answers, [Err(error), Err(error), Ok(())]);
    assert_eq!(reached(&iommu, 0x1000), Some(0x9000));
    assert_eq!((iommu.stats().submissions, iommu.stats().domain_invalidations), (0, 0));
    queue.invalidate(DOMAIN, Invalidation::Domain).unwrap();
    assert_eq!(reached(&iommu, 0x1000), None);
}

#[test]
fn in_caching_mode_what_was_absent_stays_so_until_it_is_invalidated() {
    let (iommu, mapper) = rig_with(|config| config.caches_absent = true);
    let queue = iommu.queue();
    assert!(queue.caches_absent() && !rig().0.queue().caches_absent());
    let faults = |at: u64| iommu.access(DEVICE, iova(at), 1, READ).err().map(|fault| fault.reason);
    let absent = |level| Some(FaultReason::NotPresent { level });
    // No table yet: the whole range of the entry is cached as non-present.
    assert_eq!(faults(0x1000), absent(4));
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0xa000);
    for leaf_only in [true; 2] {
        assert_eq!([faults(0x1000), faults(0x2000)], [absent(4); 2]);
        queue.invalidate(DOMAIN, range(0, 2 << 20, leaf_only)).unwrap();
    }
    assert_eq!(reached(&iommu, 0x1000), Some(0x9000), "hardware need not cache it");
    queue.invalidate(DOMAIN, range(0x1000, PAGE, false)).unwrap();
    assert_eq!([faults(0x1000), faults(0x2000), faults(0x3000)], [None, None, absent(1)]);
    // In an existing table, a single page.
    mapper.map(0x3000, 0xb000);
    mapper.map(0x4000, 0xc000);
    queue.invalidate(DOMAIN, range(0x4000, PAGE, true)).unwrap();
    assert_eq!([faults(0x3000), faults(0x4000)], [absent(1), None]);
    queue.invalidate(DomainId(4), Invalidation::Domain).unwrap();
    assert_eq!(faults(0x3000), absent(1), "another domain's");
    queue.invalidate(DOMAIN, range(0x3000, PAGE, true)).unwrap();
    assert_eq!(faults(0x3000), None);
    assert_eq!(faults(1 << 30), absent(3));
    mapper.map(1 << 30, 0xd000);
    assert_eq!(faults(0x5000), absent(1));
    mapper.map(0x5000, 0xe000);
    queue.invalidate(DOMAIN, Invalidation::Domain).unwrap();
    assert_eq!([faults(1 << 30), faults(0x5000)], [None; 2]);
}

/// An entry above the lowest level may stand for a table, at any level; of two a walk meets the highest first.
#[test]
fn in_caching_mode_only_the_lowest_absent_entries_are_leaves() {
    for level in 1..=4 {
        let (iommu, mapper) = rig_with(|config| config.caches_absent = true);
        let queue = iommu.queue();
        let faults = |at: u64| iommu.access(DEVICE, iova(at), 1, READ).err().map(|fault| fault.reason);
        let absent = |level| Some(FaultReason::NotPresent { level });
        if level < 4 {
            // The table exists, with another entry.
            mapper.entry(1 << (12 + 9 * (level - 1)), level);
        }
        assert_eq!(faults(0), absent(level));
        mapper.map(0, 0x9000);
        assert_eq!(faults(0), absent(level));
        queue.invalidate(DOMAIN, range(0, PAGE, true)).unwrap();
        assert_eq!(faults(0), (level > 1).then(|| absent(level)).flatten(), "level {level}");
        queue.invalidate(DOMAIN, range(0, PAGE, false)).unwrap();
        assert_eq!(faults(0), None);
    }
    let (iommu, mapper) = rig_with(|config| config.caches_absent = true);
    let level = |at: u64| iommu.access(DEVICE, iova(at), 1, READ).unwrap_err().reason;
    mapper.entry(PAGE, 1);
    assert_eq!(level(0), FaultReason::NotPresent { level: 1 });
    mapper.entry(0, 2).store(0, portcullis::sync::Ordering::Release);
    iommu.queue().invalidate(DOMAIN, range(2 * PAGE, PAGE, false)).unwrap();
    assert_eq!(level(2 * PAGE), FaultReason::NotPresent { level: 2 });
    assert_eq!(level(0), FaultReason::NotPresent { level: 2 });
}

/// A request that becomes a domain invalidation, for its size, removes no large page that it covers in part.
#[test]
fn a_range_too_large_for_a_block_is_still_no_more_than_was_asked_for() {
    let (iommu, mapper) = rig();
    let large = 4 << 20;
    mapper.map_at(large, 64 << 20, BOTH, 2);
    [PAGE, 9 << 20].iter().for_each(|at| mapper.map(*at, 0x9000 + at));
    [PAGE, large, 9 << 20].iter().for_each(|at| touch(&iommu, *at));
    mapper.entry(large, 2).store(0, portcullis::sync::Ordering::Release);
    [PAGE, 9 << 20].iter().for_each(|at| mapper.unmap(*at));
    iommu.queue().invalidate(DOMAIN, range(PAGE, 5 << 20, true)).unwrap();
    assert_eq!(iommu.stats().domain_invalidations, 1);
    assert_eq!([PAGE, large, 9 << 20].map(|at| reached(&iommu, at)), [None, Some(64 << 20), None]);
}

/// A walk that ends in a fault has read its tables like any other.
#[test]
fn walks_that_fault_are_counted() {
    let (iommu, mapper) = rig();
    mapper.map(PAGE, 0x9000);
    assert!(iommu.access(DEVICE, iova(2 * PAGE), 1, READ).is_err());
    let stats = iommu.stats();
    assert_eq!((stats.accesses, stats.iotlb_misses, stats.walk_cache_misses), (1, 1, 1));
    assert_eq!((stats.table_reads, stats.misses_by_level), (4, [1, 1, 1, 0]));
    assert!(iommu.access(DEVICE, iova(3 * PAGE), 1, READ).is_err());
    assert_eq!((iommu.stats().walk_cache_misses, iommu.stats().table_reads), (1, 5));
    // A transfer of three pages; one leads elsewhere, and one nowhere.
    mapper.map(2 * PAGE, 0xa000);
    mapper.map(3 * PAGE, 0xf000);
    let checked = |pages: u64| iommu.access_checked(DEVICE, iova(PAGE), phys(0x9000), pages * PAGE, READ);
    assert_eq!([checked(2), checked(3)].map(|o| (o.faults, o.wrong)), [(0, 0), (0, 1)]);
    let outcome = checked(4);
    assert_eq!((outcome.faults, outcome.wrong), (1, 1));
}

#[test]
fn descriptors_are_carried_out_at_the_wait() {
    let (iommu, mapper) = rig();
    let queue = iommu.queue();
    mapper.map(0x1000, 0x9000);
    touch(&iommu, 0x1000);
    mapper.unmap(0x1000);
    let page = |mask| Descriptor::PageSelective {
        domain: DOMAIN,
        address: iova(0x1fff),
        address_mask: mask,
        leaf_only: true,
    };
    let rejected = Err(InvalidationError::Rejected { code: CODE_MASK_TOO_LARGE });
    assert_eq!(queue.submit(&[Descriptor::DomainSelective { domain: DOMAIN }, page(10)]), rejected);
    queue.submit(&[page(0)]).unwrap();
    assert_eq!(reached(&iommu, 0x1000), Some(0x9000), "nobody waited");
    queue.submit(&[Descriptor::Wait]).unwrap();
    assert_eq!(reached(&iommu, 0x1000), None);
    assert_eq!((iommu.stats().submissions, iommu.stats().waits), (2, 1));

    // A full ring makes the unit execute it: nothing is lost.
    queue.submit(&vec![page(0); RING_ENTRIES - 1]).unwrap();
    assert_eq!(iommu.stats().range_invalidations, 1);
    queue.submit(&[page(9)]).unwrap();
    assert_eq!(iommu.stats().range_invalidations, 1 + RING_ENTRIES as u64);
}

#[test]
fn masks_may_cover_everything() {
    let (iommu, mapper) = rig_with(|config| config.max_address_mask = u32::MAX);
    for address_mask in [27, 51, 52, 64, u32::MAX] {
        mapper.map(0x1000, 0x9000);
        touch(&iommu, 0x1000);
        mapper.unmap(0x1000);
        let all =
            Descriptor::PageSelective { domain: DOMAIN, address: iova(0), address_mask, leaf_only: true };
        iommu.queue().submit(&[all, Descriptor::Wait]).unwrap();
        assert_eq!(reached(&iommu, 0x1000), None);
    }
}

#[test]
fn domains_and_devices_keep_apart() {
    let (iommu, mapper) = rig();
    let other = Mapper::new(iommu.memory(), 3);
    let (stranger, sharer) = (DeviceId(8), DeviceId(9));
    iommu.attach(stranger, other.context(DomainId(4)));
    iommu.attach(sharer, mapper.context(DOMAIN));
    mapper.map(0x1000, 0x9000);
    other.map_at(0, 0, BOTH, 2);
    touch(&iommu, 0x1000);
    assert_eq!(iommu.probe(stranger, iova(0x1000), READ), Some(phys(0x1000)));
    iommu.access(stranger, iova(0x1000), 1, READ).unwrap();
    assert_eq!(iommu.stats().iotlb_misses, 2);
    iommu.access(sharer, iova(0x1000), 1, READ).unwrap();
    assert_eq!(iommu.stats().iotlb_misses, 2, "devices of one domain share its translations");
}

#[test]
fn accesses_and_invalidations_from_many_threads() {
    let (iommu, mapper) = rig();
    let mapper = Arc::new(mapper);
    let pages: Vec<u64> = (0..4).map(|n| 0x1000 + n * (4 << 20)).collect();
    pages.iter().for_each(|&page| _ = mapper.table(page, 1));
    std::thread::scope(|scope| {
        for &page in &pages {
            let (iommu, mapper) = (Arc::clone(&iommu), Arc::clone(&mapper));
            scope.spawn(move || {
                let queue = iommu.queue();
                for _ in 0..500 {
                    mapper.map(page, 0x9000);
                    touch(&iommu, page);
                    mapper.unmap(page);
                    queue.invalidate(DOMAIN, range(page, PAGE, true)).unwrap();
                    assert_eq!(reached(&iommu, page), None);
                }
            });
        }
    });
    assert_eq!((iommu.stats().accesses, iommu.stats().range_invalidations), (2000, 2000));
}
