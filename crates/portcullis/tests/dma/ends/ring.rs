//! Rings: descriptors in order and not, laps, what is full, and what fails half-way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, DomainId, PageSize, PhysAddr, PhysSegment};
use portcullis::dma::{
    DmaDevice, DmaMapError, DmaUnmapError, Ended, RawMapping, StrictRing, StrictRingConfig,
};
use portcullis::domain::{Domain, MapListError, Policy};
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{MapError, PageTable};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenRing;
use portcullis_model::{Iommu, IommuConfig, Memory};

use crate::common::vtd;
use crate::ends::bench::{Bench, LAZY_FOREVER, Mapper, PAGE, page};
use crate::rig::{Moment, Observed};

type Ring = StrictRing<Mapper, StdPlatform>;

const BROKEN: InvalidationError = InvalidationError::Rejected { code: 9 };

fn ring(bench: &Bench, descriptors: u32, batch: usize) -> Ring {
    StrictRing::new(&bench.device, StrictRingConfig::new(descriptors, PAGE, batch)).unwrap()
}

/// Maps `pages` and has the device use each.
fn map(bench: &Bench, ring: &mut Ring, pages: u64) -> RawMapping {
    let list: Vec<_> = (0..pages).map(|number| page(2 * number)).collect();
    let mapping = ring.open(&list, Direction::Bidirectional).unwrap();
    (0..pages).for_each(|number| assert!(reached(bench, &mapping, number)));
    mapping
}

fn reached(bench: &Bench, mapping: &RawMapping, number: u64) -> bool {
    bench.reaches(mapping.iova().checked_add(number * PAGE).unwrap())
}

/// Descriptors beside each other leave the tables in one step, or in two where they lie at both ends of the ring.
#[test]
fn neighbours_are_removed_together() {
    for is_backwards in [false, true] {
        let steps = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&steps);
        let memory = Memory::new(8 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::new(memory, vtd(4)).unwrap();
        let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let mapper = Observed::new(inner, move |moment| {
            counted.fetch_add(u64::from(moment == Moment::Unmap), Ordering::Relaxed);
        });
        let domain = Domain::new(StdPlatform::new(), mapper, Policy::Strict).unwrap();
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        let mut ring = StrictRing::new(&device, StrictRingConfig::new(96, PAGE, 64)).unwrap();
        let open = |number| ring.open(&[page(number)], Direction::Bidirectional).unwrap();
        let mut live: Vec<_> = (0..32).map(open).collect();
        if is_backwards {
            live.reverse();
        }
        live.into_iter().for_each(|mapping| assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending));
        assert_eq!((ring.commit(), steps.load(Ordering::Relaxed)), (Ok(32), 1), "{is_backwards}");
    }
}

#[test]
fn a_batch_in_order_is_one_invalidation_over_many_laps() {
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let bench = Bench::new(policy);
        let mut ring = ring(&bench, 96, 64);
        let mut unmapped = 0;
        for _ in 0..40 {
            let live: Vec<_> = (0..32).map(|_| map(&bench, &mut ring, 1)).collect();
            let iovas: Vec<_> = live.iter().map(RawMapping::iova).collect();
            for mapping in live {
                unmapped += 1;
                let expected = if unmapped % 64 == 0 { Ended::Flushed(()) } else { Ended::Pending };
                assert_eq!(ring.unmap(mapping).unwrap(), expected);
            }
            assert_eq!(unmapped % 64 != 0, bench.reaches(iovas[31]), "the batch is the unit");
        }
        let stats = bench.iommu.stats();
        assert_eq!(stats.submissions, 20);
        // One for a batch, two where the range lies on both sides of a large block's middle or of the ring's end.
        assert!(stats.range_invalidations <= 2 * 20 && stats.domain_invalidations == 0, "{stats:?}");
        assert_eq!(bench.domain.stats().maps, 1280);
        assert_eq!(bench.domain.stats().unmaps, 1280);
        ring.commit().unwrap();
        assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
        drop(ring);
        assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
        assert_eq!(bench.domain.stats().taken_iova_bytes, bench.domain.stats().cached_iova_bytes);
    }
}

#[test]
fn after_a_commit_the_device_gets_nothing_whatever_the_order() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = ring(&bench, 256, 16);
    let mut live: Vec<_> = (0..64).map(|n| map(&bench, &mut ring, 1 + n % 3)).collect();
    for round in 0..4 {
        let chosen: Vec<_> = (0..16).map(|n| live.remove((n * 7 + round) % live.len())).collect();
        let iovas: Vec<_> = chosen.iter().map(RawMapping::iova).collect();
        for (mapping, left) in chosen.into_iter().zip((0..16).rev()) {
            let expected = if left == 0 { Ended::Flushed(()) } else { Ended::Pending };
            assert_eq!(ring.unmap(mapping).unwrap(), expected);
        }
        assert!(iovas.iter().all(|iova| !bench.reaches(*iova)));
        assert!(live.iter().all(|mapping| reached(&bench, mapping, 0)), "and the others all it had");
    }
    assert_eq!(bench.submissions(), 4);
}

#[test]
fn a_batch_of_one_is_strict_for_each_descriptor() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = ring(&bench, 8, 1);
    for _ in 0..20 {
        let mapping = map(&bench, &mut ring, 3);
        let iova = mapping.iova();
        assert_eq!(ring.unmap(mapping).unwrap(), Ended::Flushed(()));
        assert!((0..3).all(|number| !bench.writes(iova, number)));
    }
    assert_eq!(bench.submissions(), 20, "one for a descriptor, whatever its pages");
}

#[test]
fn a_full_ring_says_so_until_a_commit() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = ring(&bench, 4, 64);
    let live: Vec<_> = (0..4).map(|_| map(&bench, &mut ring, 1)).collect();
    let full = ring.open(&[page(0)], Direction::ToDevice).unwrap_err();
    assert!(full.is_full(), "{full}");
    for mapping in live {
        assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
    }
    assert!(ring.open(&[page(0)], Direction::ToDevice).unwrap_err().is_full(), "they still wait");
    assert_eq!((ring.waiting(), ring.commit(), ring.waiting()), (4, Ok(4), 0));
    assert_eq!(ring.commit(), Ok(0), "nothing waits, nothing is asked");
    assert_eq!(bench.submissions(), 1);
    let list: Vec<_> = (0..5).map(page).collect();
    let error = ring.open(&list, Direction::ToDevice).unwrap_err();
    assert!(matches!(error, DmaMapError::TooLong { .. }), "{error}");
    let mapping = map(&bench, &mut ring, 4);
    assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
}

#[test]
fn the_device_s_view_is_that_of_a_list() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = ring(&bench, 16, 4);
    let part = |phys, len| PhysSegment { phys: PhysAddr::new(phys), len };
    let list = [part(0x9_0000_0f00, 0x100), part(0x9_0000_5000, 0x1000), part(0x9_0000_8010, 0x20)];
    let mut out = [DmaSegment::default(); 3];
    let (mapping, used) = ring.open_sg(&list, Direction::ToDevice, &mut out).unwrap();
    let at = |offset| mapping.iova().checked_add(offset).unwrap();
    let expected =
        [DmaSegment { iova: mapping.iova(), len: 0x1100 }, DmaSegment { iova: at(0x1110), len: 0x20 }];
    assert_eq!(&out[..used], expected);
    let short = ring.open_sg(&list, Direction::ToDevice, &mut out[..2]).unwrap_err();
    assert_eq!(short, MapListError::NoRoom { needed: 3, room: 2 }.into());
    assert_eq!(ring.open(&[], Direction::ToDevice).unwrap_err(), MapListError::EmptyList.into());
    let empty = MapListError::EmptySegment { index: 0, phys: PhysAddr::new(7) };
    assert_eq!(ring.open(&[part(7, 0)], Direction::ToDevice).unwrap_err(), empty.into());
    assert_eq!(ring.arena().unwrap().reservations(), 1, "what is refused reserves nothing");
    assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
}

#[test]
fn a_list_that_fails_in_the_middle_leaves_nothing() {
    let bench = Bench::new(Policy::Strict);
    // More than two lowest tables' worth.
    let config = StrictRingConfig::new(2, 1200 * PAGE, 2);
    let mut ring = StrictRing::new(&bench.device, config).unwrap();
    let list: Vec<_> = (0..1200).map(|number| page(2 * number)).collect();
    // Memory for no table, for one, and so on: up to as many as are wanted.
    let mut taken: Vec<_> = std::iter::from_fn(|| bench.memory.buffer(PAGE)).collect();
    let mut failures = 0;
    for _ in 0..8 {
        match ring.open(&list, Direction::Bidirectional) {
            Err(error) => {
                failures += 1;
                assert_eq!(error, MapListError::Map(MapError::OutOfMemory).into());
            }
            Ok(mapping) => {
                assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
                assert_eq!(ring.commit(), Ok(1));
            }
        }
        assert_eq!(ring.arena().unwrap().reservations(), 0);
        drop(taken.pop());
    }
    assert!((3..8).contains(&failures), "{failures}");
    drop(taken);
    // A segment beyond what entries hold: the fault is in the middle of the list.
    let mut beyond = list.clone();
    beyond[700].phys = PhysAddr::new(1 << 50);
    let error = ring.open(&beyond, Direction::Bidirectional).unwrap_err();
    assert!(
        matches!(error, DmaMapError::List(MapListError::Map(MapError::BeyondPhysical { .. }))),
        "{error}"
    );
    let range = ring.arena().unwrap().range();
    for offset in (0..range.len()).step_by(PAGE as usize) {
        assert!(!bench.reaches(range.start().checked_add(offset).unwrap()));
    }
}

#[test]
fn a_list_whose_undoing_is_not_confirmed_keeps_its_addresses_until_it_is() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = ring(&bench, 4, 2);
    let beyond = PhysSegment { phys: PhysAddr::new(1 << 50), len: PAGE };
    bench.iommu.queue().fail_next(1, BROKEN);
    let error = ring.open(&[page(0), beyond], Direction::ToDevice).unwrap_err();
    assert_eq!(error, MapListError::Unconfirmed { error: BROKEN }.into());
    assert_eq!(ring.arena().unwrap().reservations(), 1);
    assert_eq!(ring.commit(), Ok(0));
    assert_eq!((ring.arena().unwrap().reservations(), bench.submissions()), (0, 1));
    ring.commit().unwrap();
    assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
    drop(ring);
}

#[test]
fn what_is_not_confirmed_goes_on_waiting() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = ring(&bench, 8, 2);
    let (first, second, third) =
        (map(&bench, &mut ring, 1), map(&bench, &mut ring, 1), map(&bench, &mut ring, 1));
    let iovas = [first.iova(), second.iova(), third.iova()];
    assert_eq!(ring.unmap(first).unwrap(), Ended::Pending);
    bench.iommu.queue().fail_next(2, BROKEN);
    let failed = ring.unmap(second).unwrap_err();
    assert_eq!(failed.error, DmaUnmapError::Unconfirmed { error: BROKEN });
    assert!(failed.mapping.is_none() && bench.reaches(iovas[0]));
    // The batch has no room, and failed again: the third is not touched.
    let failed = ring.unmap(third).unwrap_err();
    let third = failed.mapping.unwrap();
    assert!(reached(&bench, &third, 0));
    // The hardware answers again.
    assert_eq!(ring.unmap(third).unwrap(), Ended::Pending);
    assert!(!bench.reaches(iovas[0]) && !bench.reaches(iovas[1]));
    // The unmap could not say that the first two are over, so the commit does.
    assert_eq!((ring.waiting(), ring.commit(), ring.waiting()), (3, Ok(3), 0));
    assert!(!bench.reaches(iovas[2]));
    ring.commit().unwrap();
    assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
    drop(ring);
}

#[test]
fn a_ring_in_use_loses_its_addresses_when_dropped() {
    let bench = Bench::new(Policy::Strict);
    let mut open = ring(&bench, 8, 4);
    let mapping = map(&bench, &mut open, 1);
    let bytes = open.arena().unwrap().range().len();
    drop(open);
    assert!(reached(&bench, &mapping, 0), "nobody has unmapped it");
    assert_eq!(bench.domain.stats().lost_iova_bytes, bytes, "so nobody else gets its address");
    // One that only waits is committed by the drop.
    let mut idle = ring(&bench, 8, 4);
    let mapping = map(&bench, &mut idle, 1);
    let iova = mapping.iova();
    assert_eq!(idle.unmap(mapping).unwrap(), Ended::Pending);
    drop(idle);
    assert!(!bench.reaches(iova));
    assert_eq!(bench.domain.stats().lost_iova_bytes, bytes);
}

#[test]
fn rings_of_a_domain_have_colours_of_their_own_and_refuse_each_other_s_descriptors() {
    let bench = Bench::new(Policy::Strict);
    let (mut one, mut two) = (ring(&bench, 512, 4), ring(&bench, 512, 4));
    let (first, second) = (map(&bench, &mut one, 1), map(&bench, &mut two, 1));
    let set = |mapping: &RawMapping| mapping.iova().get() / PAGE % 16;
    assert_ne!(set(&first), set(&second));
    let failed = one.unmap(second).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::OtherQueue));
    let second = failed.mapping.unwrap();
    assert!(reached(&bench, &second, 0));
    assert_eq!(two.unmap(second).unwrap(), Ended::Pending);
    assert_eq!(one.unmap(first).unwrap(), Ended::Pending);
    for batch in [0, 257] {
        let error = StrictRing::new(&bench.device, StrictRingConfig::new(8, PAGE, batch)).unwrap_err();
        assert_eq!(error, SetupError::Batch { batch, most: 256 });
    }
}

/// Two domains hand out the same addresses: a ring knows its descriptors by more than where they are.
#[test]
fn a_descriptor_of_another_domain_s_ring_at_the_same_addresses_is_refused() {
    let (bench, other) = (Bench::new(Policy::Strict), Bench::new(Policy::Strict));
    let (mut one, mut two) = (ring(&bench, 8, 1), ring(&other, 8, 1));
    let (first, second) = (map(&bench, &mut one, 1), map(&other, &mut two, 1));
    assert_eq!(first.range(PageSize::SIZE_4K), second.range(PageSize::SIZE_4K), "or the test means nothing");
    let start = first.iova();
    let failed = one.unmap(second).unwrap_err();
    assert_eq!(failed.error, DmaUnmapError::OtherQueue);
    assert!(bench.reaches(start) && other.reaches(start), "neither ring has ended anything");
    assert_eq!(one.unmap(first).unwrap(), Ended::Flushed(()));
    assert!(!bench.reaches(start) && other.reaches(start));
    assert_eq!(two.unmap(failed.mapping.unwrap()).unwrap(), Ended::Flushed(()));
    assert!(!other.reaches(start));
}

#[test]
fn without_translation_a_ring_hands_memory_s_own_addresses_through() {
    let bench = Bench::new(Policy::Passthrough);
    let narrow = DmaDevice::new(bench.domain.clone(), u32::MAX.into()).unwrap();
    let mut ring = StrictRing::new(&narrow, StrictRingConfig::new(8, PAGE, 2)).unwrap();
    let list = [PhysSegment { phys: PhysAddr::new(0x5010), len: 0x20 }];
    let (first, second) =
        (ring.open(&list, Direction::ToDevice).unwrap(), ring.open(&list, Direction::ToDevice).unwrap());
    assert_eq!((first.iova().get(), first.range(PageSize::SIZE_4K)), (0x5010, None));
    assert_eq!(ring.unmap(first).unwrap(), Ended::Pending);
    assert_eq!(ring.unmap(second).unwrap(), Ended::Flushed(()));
    let error = ring.open(&[page(0)], Direction::ToDevice).unwrap_err();
    assert!(matches!(error, DmaMapError::List(MapListError::BeyondMask { .. })), "{error}");
    ring.commit().unwrap();
    assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
    drop(ring);
    assert_eq!(bench.submissions(), 0);
}
