//! Device TLBs: their contents, their invalidations, and devices that do not answer.

use std::sync::Arc;

use crate::common::{BOTH, DEVICE, DOMAIN, Mapper, PAGE, READ, WRITE, iova, phys, rig_with, segment};
use portcullis::addr::{DomainId, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis_model::{Descriptor, DeviceId, Exposed, Iommu};

const OTHER: DeviceId = DeviceId(9);
const TIMEOUT_NS: u64 = 77;
const SILENT: InvalidationError =
    InvalidationError::DeviceTimedOut { device: DEVICE.0, waited_ns: TIMEOUT_NS };

/// A device with a TLB of `entries`, and one without, in one domain.
fn rig(entries: usize) -> (Arc<Iommu>, Mapper) {
    let (iommu, mapper) = rig_with(|config| config.device_tlb_timeout_ns = TIMEOUT_NS);
    iommu.attach_with_tlb(DEVICE, mapper.context(DOMAIN), entries);
    iommu.attach(OTHER, mapper.context(DOMAIN));
    (iommu, mapper)
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::new(iova(start), len).unwrap()
}

fn of_iotlb() -> Invalidation {
    Invalidation::Domain
}

fn of_device(device: DeviceId, range: Option<IovaRange>) -> Invalidation {
    Invalidation::DeviceTlb { device, range }
}

fn invalidate(iommu: &Arc<Iommu>, invalidation: Invalidation) -> Result<(), InvalidationError> {
    iommu.queue().invalidate(DOMAIN, invalidation)
}

fn reaches(iommu: &Iommu, device: DeviceId, at: u64) -> bool {
    let probed = iommu.probe(device, iova(at), READ).is_some();
    let reached = iommu.access(device, iova(at), 1, READ).is_ok();
    assert_eq!(probed, reached);
    reached
}

#[test]
fn it_keeps_what_the_iotlb_forgets_until_it_is_told_itself() {
    let (iommu, mapper) = rig(64);
    for page in 1..4 {
        mapper.map(page * PAGE, 0x9000 + page * PAGE);
        assert!(reaches(&iommu, DEVICE, page * PAGE) && reaches(&iommu, OTHER, page * PAGE));
    }
    let before = iommu.stats();
    assert!(reaches(&iommu, DEVICE, PAGE));
    let after = iommu.stats();
    assert_eq!((after.device_tlb_hits, after.accesses), (before.device_tlb_hits + 1, before.accesses + 1));
    assert_eq!(after.iotlb_misses, 3);
    (1..4).for_each(|page| mapper.unmap(page * PAGE));
    invalidate(&iommu, of_iotlb()).unwrap();
    assert!((1..4).all(|page| reaches(&iommu, DEVICE, page * PAGE) && !reaches(&iommu, OTHER, page * PAGE)));
    // One page, by one byte of it.
    invalidate(&iommu, of_device(DEVICE, Some(range(2 * PAGE + 5, 1)))).unwrap();
    assert_eq!([1, 2, 3].map(|page| reaches(&iommu, DEVICE, page * PAGE)), [true, false, true]);
    // Another device's is another's.
    invalidate(&iommu, of_device(OTHER, None)).unwrap();
    invalidate(&iommu, of_device(DeviceId(1000), None)).unwrap();
    assert!(reaches(&iommu, DEVICE, PAGE));
    invalidate(&iommu, of_device(DEVICE, None)).unwrap();
    assert!((1..4).all(|page| !reaches(&iommu, DEVICE, page * PAGE)));
    let stats = iommu.stats();
    assert_eq!(
        (stats.device_invalidations, stats.domain_invalidations, stats.range_invalidations),
        (4, 1, 0)
    );
}

#[test]
fn told_before_the_iotlb_it_fetches_the_old_page_again() {
    let (iommu, mapper) = rig(64);
    mapper.map(PAGE, 0x9000);
    assert!(reaches(&iommu, DEVICE, PAGE));
    mapper.unmap(PAGE);
    invalidate(&iommu, of_device(DEVICE, None)).unwrap();
    assert!(reaches(&iommu, DEVICE, PAGE), "the IOTLB had it");
    invalidate(&iommu, of_iotlb()).unwrap();
    assert!(reaches(&iommu, DEVICE, PAGE), "now the device has it");
}

#[test]
fn it_holds_so_many_and_large_pages_as_one() {
    const LARGE: u64 = 2 << 20;
    let (iommu, mapper) = rig(8);
    mapper.map_at(LARGE, 64 * LARGE, BOTH, 2);
    for page in 1..8 {
        mapper.map(page * PAGE, 0x9000 + page * PAGE);
        assert!(reaches(&iommu, DEVICE, page * PAGE));
    }
    assert!(reaches(&iommu, DEVICE, LARGE + 17 * PAGE));
    (1..8).for_each(|page| mapper.unmap(page * PAGE));
    mapper.entry(LARGE, 2).store(0, portcullis::sync::Ordering::Release);
    invalidate(&iommu, of_iotlb()).unwrap();
    assert!((1..8).all(|page| reaches(&iommu, DEVICE, page * PAGE)) && reaches(&iommu, DEVICE, LARGE));
    // A ninth replaces the oldest: the large page, after all others were used again.
    (1..8).for_each(|page| assert!(reaches(&iommu, DEVICE, page * PAGE)));
    mapper.map(100 * PAGE, 0x9000);
    assert!(reaches(&iommu, DEVICE, 100 * PAGE));
    assert!(!reaches(&iommu, DEVICE, LARGE + 17 * PAGE));
    assert!((1..8).all(|page| reaches(&iommu, DEVICE, page * PAGE)));
}

#[test]
fn what_it_may_not_do_it_may_not_do_from_its_own_either() {
    let (iommu, mapper) = rig(8);
    mapper.map_at(PAGE, 0x9000, READ, 1);
    assert!(reaches(&iommu, DEVICE, PAGE));
    assert!(iommu.access(DEVICE, iova(PAGE), 1, WRITE).is_err());
    assert_eq!(iommu.probe(DEVICE, iova(PAGE), WRITE), None);
}

#[test]
fn attached_anew_or_detached_it_has_nothing() {
    let (iommu, mapper) = rig(8);
    let fill = || {
        mapper.map(PAGE, 0x9000);
        assert!(reaches(&iommu, DEVICE, PAGE));
        mapper.unmap(PAGE);
        invalidate(&iommu, of_iotlb()).unwrap();
        assert!(reaches(&iommu, DEVICE, PAGE));
    };
    fill();
    iommu.attach_with_tlb(DEVICE, mapper.context(DOMAIN), 8);
    assert!(!reaches(&iommu, DEVICE, PAGE));
    fill();
    iommu.detach(DEVICE);
    iommu.attach_with_tlb(DEVICE, mapper.context(DOMAIN), 8);
    assert!(!reaches(&iommu, DEVICE, PAGE));
    fill();
    iommu.attach(DEVICE, mapper.context(DOMAIN));
    mapper.map(PAGE, 0x9000);
    assert!(reaches(&iommu, DEVICE, PAGE));
    mapper.unmap(PAGE);
    invalidate(&iommu, of_iotlb()).unwrap();
    assert!(!reaches(&iommu, DEVICE, PAGE), "without a TLB of its own it keeps nothing");
}

#[test]
fn a_silent_device_keeps_what_it_has_and_fails_what_it_is_in() {
    let (iommu, mapper) = rig(8);
    mapper.map(PAGE, 0x9000);
    assert!(reaches(&iommu, DEVICE, PAGE) && reaches(&iommu, OTHER, PAGE));
    mapper.unmap(PAGE);
    iommu.set_silent(DEVICE, true);
    let request = |invalidation| Request { domain: DOMAIN, invalidation };
    let both = [of_iotlb(), of_device(DEVICE, None)].map(request);
    assert_eq!(InvalidationQueue::submit(&iommu.queue(), &both), Err(SILENT));
    assert!(reaches(&iommu, DEVICE, PAGE) && !reaches(&iommu, OTHER, PAGE), "the IOTLB was told");
    // The error is reported once, and not to unrelated requests.
    invalidate(&iommu, of_iotlb()).unwrap();
    invalidate(&iommu, of_device(OTHER, None)).unwrap();
    iommu.queue().invalidate(DomainId(5), Invalidation::Domain).unwrap();
    let descriptor = Descriptor::DeviceTlb { device: DEVICE, range: None };
    assert_eq!(iommu.queue().submit(&[descriptor, descriptor, Descriptor::Wait]), Err(SILENT));
    assert_eq!(iommu.stats().device_invalidations, 1);
    iommu.set_silent(DEVICE, false);
    InvalidationQueue::submit(&iommu.queue(), &both).unwrap();
    assert!(!reaches(&iommu, DEVICE, PAGE));
}

#[test]
fn a_descriptor_without_a_wait_is_not_carried_out_yet() {
    let (iommu, mapper) = rig(8);
    mapper.map(PAGE, 0x9000);
    assert!(reaches(&iommu, DEVICE, PAGE));
    mapper.unmap(PAGE);
    invalidate(&iommu, of_iotlb()).unwrap();
    iommu
        .queue()
        .submit(&[Descriptor::DeviceTlb { device: DEVICE, range: Some(range(PAGE, PAGE)) }])
        .unwrap();
    assert!(reaches(&iommu, DEVICE, PAGE));
    iommu.queue().submit(&[Descriptor::Wait]).unwrap();
    assert!(!reaches(&iommu, DEVICE, PAGE));
}

#[test]
fn the_ledger_counts_what_only_the_device_holds() {
    let (iommu, mapper) = rig(8);
    let pages = |at: u64| segment(at, 0x9000 + at, PAGE);
    for (page, device) in [(1, DEVICE), (2, DEVICE), (1, OTHER)] {
        mapper.map(page * PAGE, 0x9000 + page * PAGE);
        iommu.observe_map(device, 0, [pages(page * PAGE)]);
        assert!(reaches(&iommu, device, page * PAGE));
    }
    (1..3).for_each(|page| mapper.unmap(page * PAGE));
    // Both caches have the first page; only the device TLB the second.
    invalidate(&iommu, Invalidation::Range { range: range(2 * PAGE, PAGE), leaf_only: true }).unwrap();
    assert_eq!(iommu.observe_unmap(DEVICE, 10, [pages(PAGE), pages(2 * PAGE)]), 2);
    assert_eq!(iommu.observe_unmap(OTHER, 10, [pages(PAGE)]), 1);
    iommu.set_time(30);
    invalidate(&iommu, of_device(DEVICE, None)).unwrap();
    // The second page ends here; the IOTLB still has the first.
    iommu.set_time(60);
    invalidate(&iommu, of_iotlb()).unwrap();
    iommu.set_time(100);
    let page = u128::from(PAGE);
    let exposed =
        |stale_byte_ns, longest_stale_ns| Exposed { stale_byte_ns, neighbour_byte_ns: 0, longest_stale_ns };
    assert_eq!(iommu.exposure(DEVICE), exposed(page * 20 + page * 50, 50));
    assert_eq!(iommu.exposure(OTHER), exposed(page * 50, 50));
    assert_eq!(iommu.pages_observed(), 0);
    // Detaching ends its open translations.
    mapper.map(PAGE, phys(0x9000 + PAGE).get());
    iommu.observe_map(DEVICE, 100, [pages(PAGE)]);
    assert!(reaches(&iommu, DEVICE, PAGE));
    mapper.unmap(PAGE);
    invalidate(&iommu, of_iotlb()).unwrap();
    assert_eq!(iommu.observe_unmap(DEVICE, 100, [pages(PAGE)]), 1);
    iommu.set_time(107);
    iommu.detach(DEVICE);
    iommu.set_time(200);
    assert_eq!(iommu.exposure(DEVICE), exposed(page * 77, 50));
}
