//! Failure 8: a list or a batch fails in its middle and is not unwound, so that a device keeps what was entered of
//! it, or loses what was nobody's business.
//!
//! The device uses each page as soon as it is entered. (Lists without such a device are in `dma.rs`, rings in
//! `dma/ends/ring.rs`, batches whose commit fails in `dma/ends/batch.rs`.)

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Direction, DmaSegment, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, Ended, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::PageTable;
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDevice, OpenRing};
use portcullis_model::{Context, Iommu, IommuConfig, Memory};

use crate::common::vtd;
use crate::played::Played;
use crate::rig::{DEVICE, Moment, Observed, PAGE, page};

/// Has the device use each page as soon as the next one is asked for.
type Eager = Observed<crate::common::Mapper>;

struct Bench {
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    device: DmaDevice<Eager, Played>,
    /// How often the device has used a page of a list that was not mapped yet.
    used: Arc<AtomicU64>,
}

impl Bench {
    fn new() -> Self {
        let memory = Memory::new(64 << 20);
        let config = IommuConfig { iotlb_entries: 1 << 14, ..IommuConfig::new(Arc::clone(&memory)) };
        let iommu = Iommu::new(config);
        let platform = StdPlatform::with_cpus(2);
        let table = PageTable::for_cpus(Arc::clone(&memory), vtd(4), platform.cpus()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, Arc::new(iommu.queue()) as _, DomainId(1), Vec::new());
        let (device, used) = (Arc::clone(&iommu), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&used);
        let mapper = Observed::new(inner, move |moment| {
            let Moment::Piece { range, entered } = moment else { return };
            for page in (0..entered).step_by(PAGE as usize) {
                let at = Iova::new(range.start().get() + page);
                let access = device.access(DEVICE, at, 1, Permissions::WRITE);
                count.fetch_add(access.is_ok().into(), Ordering::Relaxed);
            }
        });
        let domain = Domain::new(Played::new(platform), mapper, Policy::Strict).unwrap();
        Self { memory, iommu, device: DmaDevice::new(domain, u64::MAX).unwrap(), used }
    }

    fn reached(&self, iova: Iova) -> Option<PhysAddr> {
        self.iommu.probe(DEVICE, iova, Permissions::READ)
    }

    fn out(&self) -> u64 {
        let usage = self.device.domain().stats();
        usage.taken_iova_bytes - usage.cached_iova_bytes
    }
}

/// Pages that are not neighbours, enough for three lowest tables; and one of them, if any, that no table can hold.
fn list(bad: Option<usize>) -> Vec<PhysSegment> {
    let mut list: Vec<_> = (0..1200).map(|number| page(2 * number)).collect();
    if let Some(bad) = bad {
        list[bad].phys = PhysAddr::new(1 << 52);
    }
    list
}

#[test]
fn half_a_list_leaves_nothing_and_touches_nobody() {
    let bench = Bench::new();
    let mut out = vec![DmaSegment::default(); 1200];
    let mut view = [DmaSegment::default()];
    bench.device.open_sg(&[page(9999)], Direction::Bidirectional, &mut view).unwrap();
    let neighbour = || bench.reached(view[0].iova) == Some(page(9999).phys);
    // Where a list lies is known from one that was mapped: the addresses come back.
    bench.device.open_sg(&list(None), Direction::Bidirectional, &mut out).unwrap();
    let first = out[0].iova;
    bench.device.unmap_sg(&out[..1]).unwrap();
    let free = bench.out();
    // The first piece, in the middle, at the border of a table, the last; without memory for the nth table.
    let pieces = [0, 1, 511, 700, 1199].map(|bad| (Some(bad), 0));
    for (bad, nth) in pieces.into_iter().chain((1..=3).map(|nth| (None, nth))) {
        if nth > 0 {
            bench.device.domain().reclaim().unwrap();
        }
        bench.memory.fail_after(nth);
        let result = bench.device.open_sg(&list(bad), Direction::Bidirectional, &mut out);
        bench.memory.fail_after(0);
        match result {
            Err(_) => {
                let pages = (0..2048).map(|number| Iova::new(first.get() + number * PAGE));
                let left: Vec<_> =
                    pages.filter(|at| *at != view[0].iova && bench.reached(*at).is_some()).collect();
                assert!(left.is_empty(), "{bad:?}, {nth}: {} pages are reached, {}", left.len(), left[0]);
            }
            // Empty tables made room, so nothing failed.
            Ok(used) => bench.device.unmap_sg(&out[..used]).unwrap(),
        }
        assert!(neighbour(), "{bad:?}, {nth}: somebody else's mapping");
        assert_eq!(bench.out(), free, "{bad:?}, {nth}: addresses");
    }
    assert!(bench.device.open_sg(&list(Some(5)), Direction::Bidirectional, &mut out).is_err());
    assert_eq!(bench.device.domain().stats().lost_iova_bytes, 0);
    assert!(bench.used.load(Ordering::Relaxed) > 0, "or the test means nothing");
}

#[test]
fn half_a_ring_descriptor_leaves_nothing_and_touches_nobody() {
    let bench = Bench::new();
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(3, 1200 * PAGE, 2)).unwrap();
    let kept = ring.open(&list(None)[..3], Direction::Bidirectional).unwrap();
    let range = ring.arena().unwrap().range();
    for bad in [0, 1, 511, 700, 1199] {
        ring.open(&list(Some(bad)), Direction::Bidirectional).unwrap_err();
        let reached = (0..range.len() / PAGE).filter_map(|number| {
            let at = Iova::new(range.start().get() + number * PAGE);
            bench.reached(at).map(|phys| (at, phys))
        });
        let own = |number: u64| (kept.iova().checked_add(number * PAGE).unwrap(), page(2 * number).phys);
        assert_eq!(reached.collect::<Vec<_>>(), [own(0), own(1), own(2)], "{bad}");
        assert_eq!(ring.arena().unwrap().reservations(), 1, "{bad}");
    }
    assert_eq!(ring.unmap(kept).unwrap(), Ended::Pending);
    ring.commit().unwrap();
    assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
    drop(ring);
    assert_eq!(bench.device.domain().stats().lost_iova_bytes, 0);
    assert!(bench.used.load(Ordering::Relaxed) > 0, "or the test means nothing");
}
