//! Hardware that goes on taking an entry to be absent until it is told otherwise (VT-d's caching mode): what is mapped is
//! reached as soon as its map returns, though the device asked for it before; and a map that the hardware does not
//! confirm is none.

use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::dma::{StrictRing, StrictRingConfig};
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::{
    Gather, Invalidation, InvalidationError, InvalidationQueue, Request, SharedQueue,
};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{MapError, PageTable, VtdSecondStage};
use portcullis::platform::{Platform, PlatformEvents};
use portcullis_model::open::{OpenDevice, OpenDomain, OpenMapper, OpenRing};
use portcullis_model::{Context, Iommu, IommuConfig, Memory, Queue};

use crate::rig::{ANYWHERE, Clocked, DEVICE, Hooked, PAGE, Rig, page};

const BROKEN: InvalidationError = InvalidationError::Rejected { code: 9 };
const BOTH: Permissions = Permissions::READ_WRITE;
const DOMAIN: DomainId = DomainId(1);

fn rig<Q: InvalidationQueue>(wrap: impl FnOnce(Queue) -> Q) -> Rig<Arc<Clocked>, Q> {
    Rig::with_config(Clocked::new(1), Policy::Strict, |config| config.caches_absent = true, wrap)
}

type Plain = Rig<Arc<Clocked>, Queue>;

/// Has the device ask for the pages of `range`, which are not mapped: the hardware remembers that.
fn ask(rig: &Plain, range: IovaRange) {
    let pages = (range.start().get()..=range.last().get()).step_by(PAGE as usize);
    pages.for_each(|at| assert!(!rig.reaches(Iova::new(at)), "{at:#x} is not mapped"));
}

/// Where the next mapping of `pages` pages will be: addresses come back to the CPU that freed them.
fn next(rig: &Plain, pages: u64) -> IovaRange {
    let list: Vec<_> = (0..pages).map(|number| page(number * 2)).collect();
    let range = rig.domain.open(&list, BOTH, ANYWHERE).unwrap();
    rig.domain.unmap(range).unwrap();
    range
}

#[test]
fn what_is_mapped_is_reached_though_it_was_asked_for_before() {
    let rig = rig(|queue| queue);
    for pages in [1, 3, 600] {
        let expected = next(&rig, pages);
        ask(&rig, expected);
        let list: Vec<_> = (0..pages).map(|number| page(number * 2)).collect();
        let before = rig.iommu.stats().submissions;
        let range = rig.domain.open(&list, BOTH, ANYWHERE).unwrap();
        assert_eq!((range, rig.iommu.stats().submissions), (expected, before + 1), "one wait for a list");
        (0..pages).for_each(|number| assert!(rig.reaches(range.start().checked_add(number * PAGE).unwrap())));
        rig.domain.unmap(range).unwrap();
        ask(&rig, range);
        let iova = rig.device.open_single(page(0).phys, pages * PAGE, Direction::Bidirectional).unwrap();
        assert_eq!(iova, expected.start());
        (0..pages).for_each(|number| assert!(rig.reaches(iova.checked_add(number * PAGE).unwrap())));
        rig.device.unmap_single(iova, pages * PAGE).unwrap();
    }
}

/// A ring maps by the short way: here it must not.
#[test]
fn a_ring_s_descriptor_is_reached_when_it_is_mapped() {
    let rig = rig(|queue| queue);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(8, PAGE, 4)).unwrap();
    let addresses = ring.arena().unwrap().range();
    let mut view = [DmaSegment::default()];
    for lap in 0..4 {
        ask(&rig, addresses);
        let live: Vec<_> = (0..8)
            .map(|number| {
                let list = [page(lap * 8 + number)];
                let mapping = if number % 2 == 0 {
                    ring.open(&list, Direction::Bidirectional).unwrap()
                } else {
                    ring.open_sg(&list, Direction::Bidirectional, &mut view).unwrap().0
                };
                assert!(rig.reaches(mapping.iova()));
                mapping
            })
            .collect();
        live.into_iter().for_each(|mapping| _ = ring.unmap(mapping).unwrap());
    }
    ring.commit().unwrap();
    assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
    drop(ring);
}

#[test]
fn a_map_that_is_not_confirmed_is_none() {
    let rig = rig(|queue| queue);
    let expected = next(&rig, 2);
    ask(&rig, expected);
    let map = || rig.domain.open(&[page(0), page(2)], BOTH, ANYWHERE);
    // What removes it again is confirmed: its addresses are as good as any.
    rig.queue.fail_next(1, BROKEN);
    assert_eq!(map(), Err(MapListError::Map(MapError::Unconfirmed)));
    ask(&rig, expected);
    assert_eq!(rig.domain.stats().taken_iova_bytes, rig.domain.stats().cached_iova_bytes);
    // It is not: they wait for a flush that is.
    rig.queue.fail_next(2, BROKEN);
    assert_eq!(map(), Err(MapListError::Unconfirmed { error: BROKEN }));
    ask(&rig, expected);
    let other = map().unwrap();
    assert_ne!(other, expected);
    rig.domain.unmap(other).unwrap();
    rig.domain.cpu_released(0);
    assert_eq!((rig.domain.stats().taken_iova_bytes, rig.domain.stats().lost_iova_bytes), (0, 0));
}

/// A device that was faster than the map's failure keeps nothing of it.
#[test]
fn what_was_reached_before_the_map_failed_is_not_reached_after_it() {
    let rig = rig(Hooked::new);
    let range = rig.domain.open(&[page(0)], BOTH, ANYWHERE).unwrap();
    rig.domain.unmap(range).unwrap();
    let (iommu, queue) = (Arc::clone(&rig.iommu), rig.iommu.queue());
    let first = std::sync::Once::new();
    rig.queue.set(move || {
        first.call_once(|| {
            iommu.access(DEVICE, range.start(), 1, BOTH).unwrap();
            queue.fail_next(1, BROKEN);
        });
    });
    assert_eq!(rig.domain.open(&[page(0)], BOTH, ANYWHERE), Err(MapListError::Map(MapError::Unconfirmed)));
    assert!(!rig.reaches(range.start()));
}

/// Says nothing of what its hardware does.
struct Silent(Queue);

// SAFETY: `Ok` is the model's. (What it does not say only makes maps fault.)
unsafe impl InvalidationQueue for Silent {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.0.invalidate(domain, invalidation)
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        InvalidationQueue::submit(&self.0, requests)
    }
}

/// The mapper alone, where no table is yet and then where there is one. `Silent` shows that the hardware is what it is said
/// to be; the others, that they pass on what their queue says.
#[test]
fn who_passes_a_queue_on_passes_on_what_it_says() {
    fn faults<Q: InvalidationQueue>(wrap: impl FnOnce(Queue) -> Q) -> u64 {
        let memory = Memory::new(16 << 20);
        let iommu = Iommu::new(IommuConfig { caches_absent: true, ..IommuConfig::new(Arc::clone(&memory)) });
        let platform = Clocked::new(1);
        let format = VtdSecondStage::new(4, 3, 48).unwrap();
        let table = PageTable::for_cpus(Arc::clone(&memory), format, platform.cpus()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DOMAIN, root: table.root(), levels: 4 });
        let mapper = TableMapper::new(table, wrap(iommu.queue()), DOMAIN, Vec::new());
        let mut faults = 0;
        for number in 512..520 {
            let range = IovaRange::new(Iova::new(number * PAGE), PAGE).unwrap();
            assert!(iommu.access(DEVICE, range.start(), 1, BOTH).is_err());
            let phys = PhysAddr::new(number * PAGE);
            if !mapper.open_fast(&platform, range, phys, BOTH) {
                let mut gather = Gather::new();
                mapper.open(&platform, range, [(phys, PAGE)], BOTH, &mut gather).unwrap();
                assert!(gather.is_empty());
            }
            faults += u64::from(iommu.access(DEVICE, range.start(), 1, BOTH).is_err());
        }
        faults
    }
    assert_eq!(faults(Silent), 8);
    assert_eq!(faults(|queue| queue), 0);
    assert_eq!(faults(Arc::new), 0);
    assert_eq!(faults(SharedQueue::new), 0);
    assert_eq!(faults(Hooked::new), 0);
    assert_eq!(faults(|queue| Arc::new(SharedQueue::new(Arc::new(queue)))), 0);
}
