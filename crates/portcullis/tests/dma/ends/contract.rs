//! What a ring promises besides protection: access, reach, addresses and accounts, by its fast path as by the others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{Direction, DmaSegment, Iova, PageSize, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{BatchError, DmaDevice, RawBatch, RawMapping, StrictRing, StrictRingConfig};
use portcullis::domain::{Policy, PolicyError, UnmapError};
use portcullis::invalidation::InvalidationError;
use portcullis_model::Queue;
use portcullis_model::open::{OpenDevice, OpenRing};

use crate::ends::bench::{Bench, DEVICE, PAGE, page};
use crate::rig::{Clocked, Rig};

const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };

/// So many bytes from byte `offset` of a page on.
fn part(offset: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + offset), len }
}

#[test]
fn a_descriptor_is_open_for_its_direction_and_no_other() {
    for direction in Direction::ALL {
        let bench = Bench::new(Policy::Strict);
        let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(16, PAGE, 4)).unwrap();
        // By a walk, beside the last one, as a list.
        let walked = ring.open(&[page(0)], direction).unwrap().iova();
        let near = ring.open(&[page(1)], direction).unwrap().iova();
        let listed = ring.open(&[page(3), page(5)], direction).unwrap().iova();
        let mut view = [DmaSegment::default()];
        let viewed = ring.open_sg(&[page(7)], direction, &mut view).unwrap().0.iova();
        for iova in [walked, near, listed, viewed] {
            for access in [Permissions::READ, Permissions::WRITE] {
                let allowed = bench.iommu.access(DEVICE, iova, 1, access).is_ok();
                assert_eq!(
                    allowed,
                    direction.permissions().allows(access),
                    "{direction:?} {access:?} {iova}"
                );
            }
        }
    }
}

#[test]
fn no_address_is_beyond_what_the_device_puts_on_the_bus() {
    let bench = Bench::new(Policy::Strict);
    for mask in [u64::from(u32::MAX), (1 << 36) - 1] {
        let narrow = DmaDevice::new(bench.domain.clone(), mask).unwrap();
        let mut ring = StrictRing::new(&narrow, StrictRingConfig::new(8, PAGE, 1)).unwrap();
        assert!(ring.arena().unwrap().range().last().get() <= mask);
        let mapping = ring.open(&[page(0)], Direction::ToDevice).unwrap();
        assert!(mapping.iova().get() <= mask);
        ring.unmap(mapping).map(drop).unwrap();
        // With a policy of its own it is the same device.
        narrow.set_policy(Some(Policy::Strict)).unwrap();
        assert!(narrow.open_single(page(0).phys, PAGE, Direction::ToDevice).unwrap().get() <= mask);
    }
    let refused = bench.device.set_policy(Some(Policy::Passthrough));
    assert!(matches!(refused, Err(PolicyError::Translation { .. })), "{refused:?}");
}

#[test]
fn a_part_of_a_page_keeps_its_offset_and_gets_all_the_pages_that_it_touches() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(64, PAGE, 4)).unwrap();
    let mut live: Vec<RawMapping> = vec![ring.open(&[page(0)], Direction::Bidirectional).unwrap()];
    for (offset, len) in [(0x10, 0x20), (0xf00, 0x101), (0xfff, 2), (0, PAGE), (1, PAGE), (0x800, 2 * PAGE)] {
        let phys = part(offset, len).phys;
        let mapping = ring.open(&[part(offset, len)], Direction::Bidirectional).unwrap();
        let (first, last) = (mapping.iova(), mapping.iova().checked_add(len - 1).unwrap());
        assert_eq!(bench.iommu.probe(DEVICE, first, Permissions::WRITE), Some(phys));
        assert_eq!(bench.iommu.probe(DEVICE, last, Permissions::WRITE), phys.checked_add(len - 1));
        let range = mapping.range(PageSize::SIZE_4K).unwrap();
        assert!(range.start() <= first && range.last() >= last && range.len() - len < 2 * PAGE);
        assert!(live.iter().all(|other| !other.range(PageSize::SIZE_4K).unwrap().contains_range(range)));
        live.push(mapping);
    }
    let starts: Vec<Iova> = live.iter().map(RawMapping::iova).collect();
    live.into_iter().for_each(|mapping| ring.unmap(mapping).map(drop).unwrap());
    ring.commit().unwrap();
    assert!(starts.iter().all(|iova| !bench.reaches(*iova)));
    ring.commit().unwrap();
    assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
    drop(ring);
}

/// What was beside buffers so far, in bytes and nanoseconds, and so much later.
fn neighbours(rig: &Rig<Arc<Clocked>, Queue>, later_ns: u64) -> u128 {
    rig.platform.take(later_ns);
    rig.domain.exposure().neighbour_byte_ns
}

#[test]
fn what_is_beside_a_descriptor_is_counted_while_it_is_open() {
    let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(16, PAGE, 1)).unwrap();
    let beside = u128::from(PAGE - 100) * 1000;
    let mut sum = 0;
    // The first by a walk, the others beside it; and a list.
    let lists: [&[PhysSegment]; 4] =
        [&[part(0, 100)], &[part(0, 100)], &[part(0, 100)], &[part(0, 40), part(40, 60)]];
    for (list, pages) in lists.into_iter().zip([1, 1, 1, 2]) {
        let mapping = ring.open(list, Direction::ToDevice).unwrap();
        sum += beside + u128::from((pages - 1) * PAGE) * 1000;
        assert_eq!(neighbours(&rig, 1000), sum);
        ring.unmap(mapping).map(drop).unwrap();
        assert_eq!(neighbours(&rig, 1000), sum, "it is closed");
    }
    assert_eq!((rig.domain.stats().maps, rig.domain.stats().unmaps), (4, 4));
    // Counted with a batch, whether there is a commit or not.
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(16, PAGE, 4)).unwrap();
    let live: Vec<_> = (0..4).map(|n| ring.open(&[page(n)], Direction::ToDevice).unwrap()).collect();
    assert_eq!(rig.domain.stats().maps, 8);
    drop((ring, live));
}

/// The first descriptor of a batch counts from when it was mapped, and not from when the last was.
#[test]
fn what_is_beside_a_descriptor_counts_from_its_own_map_on() {
    const PAUSE_NS: u64 = 1_000_000_000;
    let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(16, PAGE, 16)).unwrap();
    let _first = ring.open(&[part(0, 100)], Direction::ToDevice).unwrap();
    rig.platform.take(PAUSE_NS);
    let _second = ring.open(&[part(0, 100)], Direction::ToDevice).unwrap();
    ring.commit().unwrap();
    let counted = rig.domain.exposure().neighbour_byte_ns;
    assert!(counted >= u128::from(PAGE - 100) * u128::from(PAUSE_NS), "{counted}");
}

/// What a ring leaves open counts for as long as nothing is confirmed.
#[test]
fn what_a_ring_that_is_dropped_leaves_open_is_counted() {
    let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(16, PAGE, 16)).unwrap();
    let mapping = ring.open(&[page(0), page(2)], Direction::ToDevice).unwrap();
    ring.unmap(mapping).map(drop).unwrap();
    rig.iommu.queue().fail_next(1, BROKEN);
    drop(ring);
    assert_eq!(rig.domain.stats().maps, 1, "what the ring had not told before");
    let before = rig.domain.exposure().stale_byte_ns;
    rig.platform.take(1000);
    assert_eq!(rig.domain.exposure().stale_byte_ns - before, u128::from(2 * PAGE) * 1000);
    rig.domain.flush().unwrap();
    let open = rig.domain.exposure().stale_byte_ns;
    rig.platform.take(1000);
    assert_eq!(rig.domain.exposure().stale_byte_ns, open);
}

/// What a batch leaves open that is dropped without a confirmation: what it has, what others had cut, and what a mapper has
/// panicked at.
#[test]
fn what_a_batch_that_is_dropped_leaves_open_is_counted_until_a_flush() {
    for panics in [false, true] {
        let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
        let open =
            |page: PhysSegment, len| rig.device.open_single(page.phys, len, Direction::ToDevice).unwrap();
        let stale = || {
            let before = rig.domain.exposure().stale_byte_ns;
            // Longer than what the account takes for even.
            rig.platform.take(1_000_000);
            rig.domain.exposure().stale_byte_ns - before
        };
        let mut batch = RawBatch::new(&rig.device, 4).unwrap();
        let whole = open(page(0), PAGE);
        rig.device.unmap_single_in(&mut batch, whole, PAGE).unwrap();
        let cut = open(page(4), 4 * PAGE);
        rig.device.unmap_single(cut, PAGE).unwrap();
        let refused = rig.device.unmap_single_in(&mut batch, cut, 4 * PAGE);
        assert!(matches!(refused, Err(BatchError::Unmap(UnmapError::NotMapped { .. }))), "{refused:?}");
        let torn = open(page(16), 16 * PAGE);
        let armed = Arc::new(AtomicBool::new(panics));
        rig.platform.after_each_turn({
            let armed = Arc::clone(&armed);
            move || assert!(!armed.swap(false, Ordering::Relaxed), "as the test wants")
        });
        let unmapped = catch_unwind(AssertUnwindSafe(|| {
            rig.device.unmap_single_in(&mut batch, torn, 16 * PAGE).unwrap();
        }));
        rig.platform.after_each_turn(|| ());
        assert_eq!(unmapped.is_err(), panics);
        assert_eq!((batch.len(), stale()), (3, 0), "the batch has them yet");
        rig.iommu.queue().fail_next(u64::MAX, BROKEN);
        drop(batch);
        assert_eq!(stale(), u128::from((1 + 3 + 16) * PAGE) * 1_000_000, "{panics}");
        rig.iommu.queue().fail_next(0, BROKEN);
        rig.domain.flush().unwrap();
        assert_eq!(stale(), 0);
    }
}

#[test]
fn what_is_beside_a_buffer_is_counted_until_its_batch_ends() {
    let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
    let map = || rig.device.open_single(part(0, 100).phys, 100, Direction::ToDevice).unwrap();
    let mut batch = RawBatch::new(&rig.device, 4).unwrap();
    let mut sum = 0;
    for fails in [0, 1] {
        let iova = map();
        sum += u128::from(PAGE - 100) * 1000;
        assert_eq!(neighbours(&rig, 1000), sum);
        rig.device.unmap_single_in(&mut batch, iova, 100).unwrap();
        rig.iommu.queue().fail_next(fails, BROKEN);
        drop(std::mem::replace(&mut batch, RawBatch::new(&rig.device, 4).unwrap()));
        assert_eq!(
            neighbours(&rig, 1000),
            sum,
            "what is not confirmed counts as stale, not as beside a buffer"
        );
    }
    assert!(rig.domain.exposure().stale_byte_ns > 0);
}

/// However many the batch has.
#[test]
fn what_is_beside_the_buffers_of_a_large_batch_is_taken_off_once() {
    let rig = Rig::new(Clocked::new(1), Policy::Strict, |queue| queue);
    let map = |number: u64| {
        let phys = PhysAddr::new(0x9_0000_0000 + number * 2 * PAGE);
        rig.device.open_single(phys, 100, Direction::ToDevice).unwrap()
    };
    let beside = || {
        let before = rig.domain.exposure().neighbour_byte_ns;
        // Longer than what the account takes for even.
        rig.platform.take(1_000_000);
        rig.domain.exposure().neighbour_byte_ns - before
    };
    let each = u128::from(PAGE - 100) * 1_000_000;
    let others: Vec<_> = (0..1000).map(|number| map(1000 + number)).collect();
    for count in [1, 64, 65, 200, 256] {
        let mut batch = RawBatch::new(&rig.device, 256).unwrap();
        let mapped: Vec<_> = (0..count).map(map).collect();
        assert!(beside() >= (1000 + u128::from(count)) * each, "{count}");
        mapped.into_iter().for_each(|iova| rig.device.unmap_single_in(&mut batch, iova, 100).unwrap());
        assert_eq!(batch.commit(), Ok(count as usize));
        // The account may be late, and is never too low.
        assert!((1000 * each..=(1000 + u128::from(count)) * each).contains(&beside()), "{count}");
    }
    drop(others);
}
