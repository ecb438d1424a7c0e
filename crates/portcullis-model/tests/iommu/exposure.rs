//! The exposure ledger, on examples small enough to compute by hand.

use crate::common::{DEVICE, DOMAIN, Mapper, PAGE, READ, iova, phys, rig, rig_with, segment};
use portcullis::addr::{DomainId, PageSize};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::platform::Frames;
use portcullis::sync::Ordering;
use portcullis_model::{AccessOutcome, Context, Descriptor, DeviceId, Exposed, Iommu};

fn flush(iommu: &std::sync::Arc<Iommu>, time: u64) {
    iommu.set_time(time);
    iommu.queue().invalidate(DOMAIN, Invalidation::Domain).unwrap();
}

fn touch(iommu: &Iommu, at: u64) {
    iommu.access(DEVICE, iova(at), 1, READ).unwrap();
}

fn exposed(stale: u128, neighbour: u128, longest: u64) -> Exposed {
    Exposed { stale_byte_ns: stale, neighbour_byte_ns: neighbour, longest_stale_ns: longest }
}

#[test]
fn one_buffer_lazily_unmapped() {
    let (iommu, mapper) = rig();
    let buffer = [segment(0x1064, 0x9064, 1500)];
    mapper.map(0x1000, 0x9000);
    iommu.observe_map(DEVICE, 10_000, buffer);
    touch(&iommu, 0x1064);
    mapper.unmap(0x1000);
    iommu.set_time(11_000);
    assert_eq!(iommu.exposure(DEVICE), exposed(0, 2596 * 1000, 0), "a report needs no settling");
    assert_eq!(iommu.observe_unmap(DEVICE, 11_000, buffer), 1);
    flush(&iommu, 11_500);
    iommu.set_time(20_000);
    assert_eq!(iommu.exposure(DEVICE), exposed(1500 * 500, 2596 * 1500, 500));
    assert_eq!(iommu.total_exposure(), iommu.exposure(DEVICE));
    assert_eq!(iommu.exposure(DeviceId(1)), Exposed::default());
}

#[test]
fn one_buffer_strictly_unmapped() {
    let (iommu, mapper) = rig();
    let buffer = [segment(0x1064, 0x9064, 1500)];
    mapper.map(0x1000, 0x9000);
    iommu.observe_map(DEVICE, 0, buffer);
    touch(&iommu, 0x1064);
    mapper.unmap(0x1000);
    flush(&iommu, 900);
    assert_eq!(iommu.observe_unmap(DEVICE, 1000, buffer), 0);
    assert_eq!(iommu.pages_observed(), 0, "what is closed is forgotten");
    iommu.set_time(5000);
    assert_eq!(iommu.exposure(DEVICE), exposed(0, 2596 * 1000, 0));
}

#[test]
fn a_buffer_that_was_never_accessed_is_not_stale() {
    let (iommu, mapper) = rig();
    let buffer = [segment(0x1000, 0x9000, PAGE)];
    mapper.map(0x1000, 0x9000);
    iommu.observe_map(DEVICE, 0, buffer);
    mapper.unmap(0x1000);
    assert_eq!(iommu.observe_unmap(DEVICE, 100, buffer), 0);
    iommu.set_time(1000);
    assert_eq!(iommu.exposure(DEVICE), Exposed::default());
}

#[test]
fn two_halves_of_a_page_are_no_neighbours_while_both_are_live() {
    let (iommu, mapper) = rig();
    let (low, high) = ([segment(0x1000, 0x9000, 2048)], [segment(0x2800, 0x9800, 2048)]);
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0x9000);
    iommu.observe_map(DEVICE, 0, low);
    iommu.observe_map(DEVICE, 100, high);
    touch(&iommu, 0x1000);
    mapper.unmap(0x1000);
    // Stale for 50, then the neighbour of the other half, then all is closed.
    assert_eq!(iommu.observe_unmap(DEVICE, 300, low), 1);
    flush(&iommu, 350);
    mapper.unmap(0x2000);
    assert_eq!(iommu.observe_unmap(DEVICE, 420, high), 0);
    iommu.set_time(1000);
    assert_eq!(iommu.exposure(DEVICE), exposed(2048 * 50, 2048 * (100 + 70), 50));
}

#[test]
fn a_mapping_of_several_pages_has_neighbours_at_its_ends() {
    let (iommu, mapper) = rig();
    // 96 bytes at the end of a page and two whole pages after it, then 10 bytes elsewhere.
    let list = [segment(0x1fa0, 0x9fa0, 96 + 2 * PAGE), segment(0x4000, 0x2_0000, 10)];
    for (at, to) in [(0x1000, 0x9000), (0x2000, 0xa000), (0x3000, 0xb000), (0x4000, 0x2_0000)] {
        mapper.map(at, to);
    }
    iommu.observe_map(DEVICE, 0, list);
    for page in 1..=4 {
        touch(&iommu, page * PAGE);
        mapper.unmap(page * PAGE);
    }
    assert_eq!(iommu.observe_unmap(DEVICE, 10, list), 4);
    iommu.queue().submit(&[]).unwrap();
    flush(&iommu, 13);
    iommu.set_time(100);
    let (bytes, rest) = (96 + 2 * 4096 + 10, 4000 + 4086);
    assert_eq!(iommu.exposure(DEVICE), exposed(bytes * 3, rest * 13, 3));
}

#[test]
fn a_bounced_buffer_exposes_nothing() {
    let (iommu, mapper) = rig();
    // The device gets a page of the pool; the buffer itself is at 0x9064.
    let buffer = [segment(0x1000, 0x9064, 1500)];
    mapper.map(0x1000, 0x5_0000);
    iommu.observe_map(DEVICE, 0, buffer);
    touch(&iommu, 0x1000);
    assert_eq!(iommu.observe_unmap(DEVICE, 100, buffer), 0);
    iommu.set_time(1000);
    assert_eq!(iommu.exposure(DEVICE), Exposed::default());
}

#[test]
fn replacement_closes_an_exposure() {
    let (iommu, mapper) = rig_with(|config| (config.iotlb_entries, config.iotlb_ways) = (2, 1));
    let buffer = [segment(0x1000, 0x9000, PAGE)];
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0xa000);
    mapper.map(0x3000, 0xb000);
    iommu.observe_map(DEVICE, 0, buffer);
    touch(&iommu, 0x1000);
    mapper.unmap(0x1000);
    assert_eq!(iommu.observe_unmap(DEVICE, 10, buffer), 1);
    iommu.set_time(20);
    touch(&iommu, 0x2000); // The other set.
    iommu.set_time(35);
    touch(&iommu, 0x3000);
    // The same by the other kind of access.
    iommu.observe_map(DEVICE, 35, [segment(0x2000, 0xa000, PAGE)]);
    mapper.unmap(0x2000);
    assert_eq!(iommu.observe_unmap(DEVICE, 40, [segment(0x2000, 0xa000, PAGE)]), 1);
    mapper.map(0x4000, 0xc000);
    assert_eq!(iommu.access_checked(DEVICE, iova(0x4000), phys(0xc000), 1, READ), AccessOutcome::default());
    iommu.set_time(100);
    assert_eq!(iommu.exposure(DEVICE), exposed(4096 * 25, 0, 25));
}

#[test]
fn what_the_tables_still_lead_to_is_tried_again_at_each_invalidation() {
    let (iommu, mapper) = rig();
    let buffer = [segment(0x1000, 0x9000, PAGE)];
    mapper.map(0x1000, 0x9000);
    iommu.observe_map(DEVICE, 0, buffer);
    touch(&iommu, 0x1000);
    // The driver has not cleared the entry at all.
    assert_eq!(iommu.observe_unmap(DEVICE, 10, buffer), 1);
    flush(&iommu, 20);
    iommu.queue().invalidate(DomainId(99), Invalidation::Domain).unwrap();
    // The IOTLB no longer has it, the tables do; then an access brings it back.
    touch(&iommu, 0x1000);
    flush(&iommu, 30);
    mapper.unmap(0x1000);
    flush(&iommu, 47);
    iommu.set_time(100);
    assert_eq!(iommu.exposure(DEVICE), exposed(4096 * 37, 0, 37));
}

#[test]
fn a_freed_table_that_is_still_walked_exposes_its_pages() {
    let (iommu, mapper) = rig();
    let buffer = [segment(0x1000, 0x9000, PAGE)];
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0xa000);
    iommu.observe_map(DEVICE, 0, buffer);
    touch(&iommu, 0x2000);
    let table = mapper.table(0x1000, 1);
    mapper.entry(0x1000, 2).store(0, Ordering::Release);
    iommu.memory().release(table, 1);
    assert_eq!(iommu.observe_unmap(DEVICE, 10, buffer), 1);
    flush(&iommu, 18);
    iommu.set_time(100);
    assert_eq!(iommu.exposure(DEVICE), exposed(4096 * 8, 0, 8));
}

#[test]
fn lost_invalidations_are_exposure() {
    let (iommu, mapper) = rig();
    let queue = iommu.queue();
    let buffer = [segment(0x1000, 0x9000, PAGE)];
    let mut violations = 0;
    for round in 0..4 {
        mapper.map(0x1000, 0x9000);
        iommu.observe_map(DEVICE, round * 100, buffer);
        touch(&iommu, 0x1000);
        mapper.unmap(0x1000);
        queue.drop_next(u64::from(round == 2));
        iommu.set_time(round * 100 + 50);
        queue.invalidate(DOMAIN, Invalidation::Domain).unwrap();
        violations += iommu.observe_unmap(DEVICE, round * 100 + 50, buffer);
    }
    iommu.set_time(1000);
    // Open from 250 until the same buffer is mapped again at 300.
    assert_eq!(violations, 1);
    assert_eq!(iommu.exposure(DEVICE), exposed(4096 * 50, 0, 50));
}

#[test]
fn a_device_passed_through_keeps_what_it_was_given() {
    let (iommu, _) = rig();
    iommu.attach(DEVICE, Context::Passthrough);
    let (one, two) = ([segment(0x9064, 0x9064, 100)], [segment(0x90c8, 0x90c8, 50)]);
    iommu.observe_map(DEVICE, 0, one);
    assert_eq!(iommu.observe_unmap(DEVICE, 10, one), 1);
    iommu.observe_map(DEVICE, 20, two);
    assert_eq!(iommu.observe_unmap(DEVICE, 30, two), 1);
    flush(&iommu, 35);
    // The first again: live from 40 to 60.
    iommu.observe_map(DEVICE, 40, one);
    iommu.observe_unmap(DEVICE, 60, one);
    iommu.set_time(100);
    let stale = 100 * (100 - 10 - 20) + 50 * (100 - 30);
    let neighbour = 3996 * 20 + 3946 * 80;
    assert_eq!(iommu.exposure(DEVICE), exposed(stale, neighbour, 70));
    // Until it no longer passes through.
    iommu.set_time(110);
    iommu.attach(DEVICE, Context::Blocked);
    iommu.set_time(500);
    assert_eq!(iommu.exposure(DEVICE), exposed(stale + 150 * 10, neighbour + 3946 * 10, 80));
}

#[test]
fn ranges_that_were_passed_through_are_merged() {
    let (iommu, _) = rig();
    iommu.attach(DEVICE, Context::Passthrough);
    // Every byte of a page, in an order that leaves holes, many times over.
    let mut time = 0;
    for round in 0..3 {
        for n in 0..1024 {
            let at = 0x9000 + (n * 37 + round) % 1024 * 4;
            iommu.observe_map(DEVICE, time, [segment(at, at, 4)]);
            iommu.observe_unmap(DEVICE, time, [segment(at, at, 4)]);
        }
        time += 10;
    }
    iommu.set_time(time);
    let seen = iommu.exposure(DEVICE);
    assert_eq!((seen.stale_byte_ns, seen.neighbour_byte_ns), (4096 * 30, 0));
    // Each byte is mapped again every 10; with this many ranges in one page they may count as older than they are.
    assert!((10..=30).contains(&seen.longest_stale_ns));
}

/// Above 64 in one page, adjacent ones count as old as the oldest of them.
#[test]
fn joined_ranges_are_as_old_as_the_oldest() {
    let (iommu, _) = rig();
    iommu.attach(DEVICE, Context::Passthrough);
    let part = |n: u64| [segment(0x9000 + 4 * n, 0x9000 + 4 * n, 4)];
    // The last is separate.
    for n in (0..65).chain([100]) {
        iommu.observe_map(DEVICE, 10 * n, part(n));
        iommu.observe_unmap(DEVICE, 10 * n, part(n));
    }
    // All are closed in the end except the first 65, only one of which was open for that long itself.
    iommu.observe_map(DEVICE, 1_010, part(0));
    iommu.set_time(2_000);
    assert_eq!(iommu.exposure(DEVICE).longest_stale_ns, 2_000);
    let (iommu, _) = rig();
    iommu.attach(DEVICE, Context::Passthrough);
    for n in 0..64 {
        iommu.observe_map(DEVICE, 10 * n, part(n));
        iommu.observe_unmap(DEVICE, 10 * n, part(n));
    }
    iommu.observe_map(DEVICE, 1_010, part(0));
    iommu.set_time(2_000);
    assert_eq!(iommu.exposure(DEVICE).longest_stale_ns, 1_990, "64 are kept apart");
}

/// The ledger's pages may be larger than those of the tables: bytes before a page are no part of it.
#[test]
fn neighbours_are_in_the_page_of_the_ledger() {
    let (iommu, mapper) = rig_with(|config| config.exposure_page = PageSize::from_shift(14).unwrap());
    mapper.map(0x3000, 0xb000);
    mapper.map(0x4000, 0xc000);
    iommu.observe_map(DEVICE, 0, [segment(0x4000, 0xc000, PAGE)]);
    iommu.set_time(10);
    assert_eq!(iommu.exposure(DEVICE), Exposed::default(), "behind it nothing is mapped");
    mapper.map(0x5000, 0xd000);
    iommu.observe_map(DEVICE, 10, [segment(0x4000, 0xc000, PAGE)]);
    iommu.set_time(15);
    assert_eq!(iommu.exposure(DEVICE), exposed(0, (16384 - 4096) * 5, 0));
}

/// Of two mappings of the same bytes only the named one ends.
#[test]
fn a_mapping_ends_by_its_own_address() {
    let (iommu, mapper) = rig();
    mapper.map(0x1000, 0x9000);
    // The second's address leads nowhere.
    for at in [0x1000, 0x2000] {
        iommu.observe_map(DEVICE, 0, [segment(at, 0x9000, 1000)]);
    }
    assert_eq!(iommu.observe_unmap(DEVICE, 10, [segment(0x2000, 0x9000, 1000)]), 0);
    iommu.set_time(30);
    assert_eq!(iommu.exposure(DEVICE), exposed(0, 3096 * 30, 0));
}

/// An invalidation of either domain probes what its tables still lead to, and after a change one of the new domain.
#[test]
fn each_domain_of_one_submission_is_looked_at_and_a_new_one_as_well() {
    let (iommu, mapper) = rig();
    let (other, device) = (Mapper::new(iommu.memory(), 4), DeviceId(8));
    iommu.attach(device, other.context(DomainId(4)));
    let selective = |domain| Descriptor::DomainSelective { domain };
    for ranges in [1, 2] {
        let start = iommu.total_exposure();
        let parts = |n: u64| [segment(0x1000 + 100 * n, 0x9000 + 100 * n, 10)];
        for (mapper, device) in [(&mapper, DEVICE), (&other, device)] {
            mapper.map(0x1000, 0x9000);
            // One range, or several, which have another representation.
            (0..ranges).for_each(|n| iommu.observe_map(device, 0, parts(n)));
            (0..ranges).for_each(|n| _ = iommu.observe_unmap(device, 0, parts(n)));
            mapper.unmap(0x1000);
        }
        assert_eq!(iommu.pages_observed(), 2);
        iommu.queue().submit(&[selective(DOMAIN), selective(DomainId(4)), Descriptor::Wait]).unwrap();
        assert_eq!((iommu.pages_observed(), iommu.total_exposure()), (0, start));
    }
    // The same tables under another number are open until that is invalidated.
    for ranges in [1, 2] {
        let parts = |n: u64| [segment(0x1000 + 100 * n, 0x9000 + 100 * n, 10)];
        mapper.map(0x1000, 0x9000);
        (0..ranges).for_each(|n| iommu.observe_map(DEVICE, 0, parts(n)));
        (0..ranges).for_each(|n| _ = iommu.observe_unmap(DEVICE, 0, parts(n)));
        assert_eq!(iommu.pages_observed(), 1);
        iommu.attach(DEVICE, mapper.context(DomainId(5)));
        assert_eq!(iommu.pages_observed(), 1);
        mapper.unmap(0x1000);
        iommu.queue().submit(&[selective(DomainId(5)), Descriptor::Wait]).unwrap();
        assert_eq!(iommu.pages_observed(), 0, "{ranges}");
        iommu.attach(DEVICE, mapper.context(DOMAIN));
    }
}

#[test]
fn bytes_are_stale_since_their_last_mapping_ended() {
    let (iommu, _) = rig();
    iommu.attach(DEVICE, Context::Passthrough);
    let (whole, part) = ([segment(0x9000, 0x9000, 100)], [segment(0x9000, 0x9000, 60)]);
    iommu.observe_map(DEVICE, 0, whole);
    iommu.observe_map(DEVICE, 0, part);
    iommu.observe_unmap(DEVICE, 10, part);
    iommu.observe_unmap(DEVICE, 50, whole);
    iommu.set_time(100);
    assert_eq!(iommu.exposure(DEVICE), exposed(100 * 50, 3996 * 100, 50));
}

#[test]
fn a_buffer_mapped_twice_stays_live_until_both_have_ended() {
    let (iommu, mapper) = rig();
    let (first, second) = ([segment(0x1000, 0x9000, 1000)], [segment(0x2000, 0x9000, 1000)]);
    mapper.map(0x1000, 0x9000);
    mapper.map(0x2000, 0x9000);
    iommu.observe_map(DEVICE, 0, first);
    iommu.observe_map(DEVICE, 0, second);
    touch(&iommu, 0x1000);
    touch(&iommu, 0x2000);
    mapper.unmap(0x1000);
    iommu.observe_unmap(DEVICE, 100, first);
    mapper.unmap(0x2000);
    iommu.observe_unmap(DEVICE, 150, second);
    flush(&iommu, 170);
    iommu.set_time(500);
    assert_eq!(iommu.exposure(DEVICE), exposed(1000 * 20, 3096 * 170, 70));
}

#[test]
fn one_large_entry_holds_many_pages_of_two_devices() {
    let (iommu, mapper) = rig();
    let other = DeviceId(8);
    iommu.attach(other, mapper.context(DOMAIN));
    mapper.map_at(2 << 21, 4 << 21, crate::common::BOTH, 2);
    let at = |offset: u64, len| [segment((2 << 21) + offset, (4 << 21) + offset, len)];
    iommu.observe_map(DEVICE, 0, at(0x3000, 3 * PAGE));
    iommu.observe_map(other, 0, at(0x8000, PAGE));
    touch(&iommu, 2 << 21);
    mapper.entry(2 << 21, 2).store(0, Ordering::Release);
    assert_eq!(iommu.observe_unmap(DEVICE, 10, at(0x3000, 3 * PAGE)), 3);
    assert_eq!(iommu.observe_unmap(other, 15, at(0x8000, PAGE)), 1);
    flush(&iommu, 20);
    iommu.set_time(100);
    assert_eq!(iommu.exposure(DEVICE), exposed(3 * 4096 * 10, 0, 10));
    assert_eq!(iommu.exposure(other), exposed(4096 * 5, 0, 5));
    assert_eq!(iommu.total_exposure(), exposed(3 * 4096 * 10 + 4096 * 5, 0, 10));
}

#[test]
fn a_device_taken_away_reaches_nothing_more() {
    let (iommu, mapper) = rig();
    let buffer = [segment(0x1000, 0x9000, PAGE)];
    mapper.map(0x1000, 0x9000);
    iommu.observe_map(DEVICE, 0, buffer);
    touch(&iommu, 0x1000);
    iommu.observe_unmap(DEVICE, 10, buffer);
    iommu.set_time(12);
    iommu.detach(DEVICE);
    iommu.set_time(20);
    // Attached again, it starts anew; eviction of the old marked entry does no harm.
    iommu.attach(DEVICE, mapper.context(DOMAIN));
    mapper.unmap(0x1000);
    flush(&iommu, 30);
    iommu.set_time(100);
    assert_eq!(iommu.exposure(DEVICE), exposed(4096 * 2, 0, 2));
}

#[test]
fn time_never_goes_back_and_odd_segments_do_no_harm() {
    let (iommu, mapper) = rig();
    mapper.map(0x1000, 0x9000);
    iommu.observe_map(DEVICE, 100, [segment(0x1000, 0x9000, 96)]);
    iommu.observe_map(
        DEVICE,
        50,
        [segment(u64::MAX, u64::MAX, 9), segment(0, 0, 0), segment(5, u64::MAX - 4, u64::MAX)],
    );
    assert_eq!(iommu.observe_unmap(DEVICE, 60, [segment(u64::MAX, u64::MAX, 9), segment(0, 0, 0)]), 0);
    // Reported at 70, this begins at 100, too.
    mapper.map(0x2000, 0xa000);
    iommu.observe_map(DEVICE, 70, [segment(0x2000, 0xa000, 96)]);
    iommu.set_time(110);
    iommu.set_time(90);
    iommu.set_time(120);
    assert_eq!(iommu.exposure(DEVICE), exposed(0, 2 * 4000 * 20, 0));
}

#[test]
fn devices_are_accounted_apart() {
    let (iommu, _) = rig();
    let memory = iommu.memory();
    let other = Mapper { memory: memory.clone(), root: memory.alloc(1).unwrap(), levels: 3 };
    let device = DeviceId(8);
    iommu.attach(device, other.context(DomainId(4)));
    other.map(0x1000, 0x9000);
    iommu.observe_map(device, 0, [segment(0x1000, 0x9000, 4000)]);
    iommu.observe_map(DEVICE, 0, [segment(0x1000, 0x9000, 4000)]);
    iommu.set_time(10);
    assert_eq!(iommu.exposure(device), exposed(0, 960, 0));
    assert_eq!(iommu.exposure(DEVICE), Exposed::default(), "its tables do not lead there");
    assert_eq!(iommu.probe(device, iova(0x1000), READ), Some(phys(0x9000)));
}
