//! Mappings that are unmapped in parts: their addresses come back with the last of them, and not before; also where a part cannot go by
//! itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{Bench, DEVICE, PAGE, PLATFORM, vtd};
use crate::dice::Dice;
use crate::played::Played;
use crate::stuck::Tables;
use portcullis::addr::{Direction, DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{BatchError, DmaDevice, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy, UnmapError};
use portcullis::heap::Shared;
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper, TableMapper};
use portcullis::pgtable::{Attributes, MapError, PageTable, Unmapped};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDomain, OpenRing, Simulated};
use portcullis_model::{Context, Iommu, IommuConfig, Memory};

const ANYWHERE: Iova = Iova::new(u64::MAX);
const BOTH: Permissions = Permissions::READ_WRITE;
const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };

fn memory(len: u64) -> [PhysSegment; 1] {
    [PhysSegment { phys: PhysAddr::new(0x9_0000_0000), len }]
}

fn part(range: IovaRange, page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(range.start().get() + page * PAGE), pages * PAGE).unwrap()
}

/// Bytes of addresses that are nobody's and not free, and how many are counted as lost, once all deferred ones are back.
fn gone<M: Mapper + Simulated, P: Platform>(domain: &Domain<M, P>) -> (u64, u64) {
    domain.flush().unwrap();
    // Nothing fits there: but all is looked through for it.
    assert!(domain.open(&memory(PAGE), BOTH, Iova::new(PAGE - 1)).is_err());
    let stats = domain.stats();
    (stats.taken_iova_bytes - stats.cached_iova_bytes, stats.lost_iova_bytes)
}

#[test]
fn addresses_come_back_with_the_last_part() {
    const MIB: u64 = 1 << 20;
    for (len, first) in [
        (2 * MIB, MIB),
        (2 * PAGE, PAGE),
        (4 * PAGE, PAGE),
        (16 * PAGE, 15 * PAGE),
        (4 * MIB, PAGE),
        (3 << 30, MIB),
    ] {
        for policy in [Policy::Strict, Policy::LAZY, Policy::Lazy { window_ns: u64::MAX }] {
            let bench = Bench::new(policy);
            for round in 0..20 {
                let range = bench.domain.open(&memory(len), BOTH, ANYWHERE).unwrap();
                let (front, back) =
                    (part(range, 0, first / PAGE), part(range, first / PAGE, (len - first) / PAGE));
                let order = if round % 2 == 0 { [front, back] } else { [back, front] };
                order.into_iter().for_each(|part| bench.domain.unmap(part).unwrap());
            }
            assert_eq!(gone(&bench.domain), (0, 0), "{len:#x}, {first:#x}, {policy:?}");
        }
    }
}

#[test]
fn addresses_of_a_mapping_are_nobody_elses_before_its_last_part_is_gone() {
    let bench = Bench::on(StdPlatform::with_cpus(1), Policy::Strict);
    let mut dice = Dice::new(7);
    let mut live: Vec<(IovaRange, Vec<u64>)> = Vec::new();
    let mut ended = 0;
    while ended < 300 {
        if live.len() < 12 {
            let pages = 1 + dice.below(40);
            let range = bench.domain.open(&memory(pages * PAGE), BOTH, ANYWHERE).unwrap();
            assert!(
                live.iter().all(|(other, _)| range.last() < other.start() || other.last() < range.start())
            );
            live.push((range, (0..pages).collect()));
        }
        let number = dice.below(live.len() as u64) as usize;
        let (range, left) = &mut live[number];
        let page = left.swap_remove(dice.below(left.len() as u64) as usize);
        bench.domain.unmap(part(*range, page, 1)).unwrap();
        assert!(!bench.writes(part(*range, page, 1).start()));
        if left.is_empty() {
            live.swap_remove(number);
            ended += 1;
        }
    }
    for (range, left) in live {
        left.into_iter().for_each(|page| bench.domain.unmap(part(range, page, 1)).unwrap());
    }
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn what_is_left_between_parts_may_end_in_one_call() {
    let bench = Bench::on(StdPlatform::with_cpus(1), Policy::Strict);
    let range = bench.domain.open(&memory(8 * PAGE), BOTH, ANYWHERE).unwrap();
    bench.domain.unmap(part(range, 2, 1)).unwrap();
    bench.domain.unmap(part(range, 5, 2)).unwrap();
    // Of a part with a hole it is not known whose it was.
    let unmapped = UnmapError::NotMapped { range, unmapped: 5 * PAGE };
    assert_eq!(bench.domain.unmap(range), Err(unmapped));
    assert!((0..8).all(|page| !bench.writes(part(range, page, 1).start())));
    assert_eq!(gone(&bench.domain), (0, 0));
    // And nothing is left that the next mapping there would meet.
    let next = bench.domain.open(&memory(8 * PAGE), BOTH, ANYWHERE).unwrap();
    assert_eq!(next, range, "or the test means nothing");
    bench.domain.unmap(part(next, 0, 5)).unwrap();
    assert_eq!(gone(&bench.domain), (8 * PAGE, 0));
    bench.domain.unmap(part(next, 5, 3)).unwrap();
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn a_part_whose_end_is_not_confirmed_holds_the_others() {
    let bench = Bench::new(Policy::Strict);
    let range = bench.domain.open(&memory(4 * PAGE), BOTH, ANYWHERE).unwrap();
    bench.iommu.queue().fail_next(1, TIMEOUT);
    assert!(matches!(bench.domain.unmap(part(range, 0, 1)), Err(UnmapError::Unconfirmed { .. })));
    bench.domain.unmap(part(range, 1, 3)).unwrap();
    let stats = bench.domain.stats();
    assert_eq!((stats.taken_iova_bytes - stats.cached_iova_bytes, stats.lost_iova_bytes), (4 * PAGE, 0));
    bench.domain.flush().unwrap();
    for _ in 0..600 {
        let other = bench.domain.open(&memory(PAGE), BOTH, ANYWHERE).unwrap();
        bench.domain.unmap(other).unwrap();
    }
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn a_ring_keeps_its_addresses_whoever_unmaps_what_it_maps() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(
        &bench.device,
        StrictRingConfig { descriptors: 8, descriptor_bytes: PAGE, batch: 1, colour: None },
    )
    .unwrap();
    let all = bench.domain.stats().taken_iova_bytes;
    for _ in 0..all / PAGE {
        let mapping = ring.open(&memory(PAGE), Direction::Bidirectional).unwrap();
        let page = IovaRange::new(mapping.iova(), PAGE).unwrap();
        // By number, which is wrong; and as many bytes as the ring has addresses.
        bench.domain.unmap(page).unwrap();
        let _ = ring.unmap(mapping);
        let _ = ring.commit();
    }
    assert!(gone(&bench.domain).0 >= all);
}

/// A mapper that removes what was mapped at once as a whole, as a kernel does.
struct Wholes {
    inner: Tables,
    mapped: Mutex<Vec<IovaRange>>,
    /// The next sync is not confirmed.
    fails: AtomicBool,
}

// SAFETY: it maps in the model's tables.
unsafe impl Simulated for Wholes {}

// SAFETY: all is the inner mapper's; what it is asked to remove in part is said to be kept.
unsafe impl Mapper for Wholes {
    const REMOVES_WHOLES: bool = true;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn costs(&self) -> Costs {
        self.inner.costs()
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let list: Vec<_> = list.into_iter().collect();
        let mut at = range.start();
        for (_, len) in &list {
            self.mapped.lock().unwrap().push(IovaRange::new(at, *len).unwrap());
            at = at.checked_add(*len).unwrap();
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.map(platform, range, list, attributes, gather) }
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let mut unmapped = Unmapped::of(range, 0);
        self.mapped.lock().unwrap().retain(|mapped| {
            let first = mapped.start().max(range.start());
            let Ok(common) = IovaRange::from_bounds(first, mapped.last().min(range.last())) else {
                return true;
            };
            if common == *mapped {
                unmapped.bytes += self.inner.unmap(platform, *mapped, gather).bytes;
                return false;
            }
            unmapped.kept += common.len();
            true
        });
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        if self.fails.swap(false, Ordering::Relaxed) { Err(TIMEOUT) } else { self.inner.sync(gather) }
    }
}

struct WholesBench {
    iommu: Arc<Iommu>,
    domain: Shared<Domain<Wholes, Played>>,
    device: DmaDevice<Wholes, Played>,
}

impl WholesBench {
    fn new(policy: Policy) -> Self {
        let memory = Memory::new(8 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::for_cpus(memory, vtd(4), PLATFORM.cpus()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let mapper = Wholes { inner, mapped: Mutex::default(), fails: AtomicBool::new(false) };
        let domain = Domain::new(Played::new(StdPlatform::new()), mapper, policy).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        Self { iommu, domain, device }
    }

    fn writes(&self, range: IovaRange, page: u64) -> bool {
        self.iommu.access(DEVICE, part(range, page, 1).start(), 1, Permissions::WRITE).is_ok()
    }
}

#[test]
fn parts_that_cannot_go_by_themselves_go_with_the_last() {
    for policy in [Policy::Strict, Policy::Lazy { window_ns: u64::MAX }] {
        let bench = WholesBench::new(policy);
        for order in [[0, 1, 2, 3], [3, 1, 0, 2], [1, 3, 2, 0]] {
            let range = bench.domain.open(&memory(8 * PAGE), BOTH, ANYWHERE).unwrap();
            let parts = order.map(|number| part(range, 2 * number, 2));
            for kept in &parts[..3] {
                let still_mapped = UnmapError::StillMapped { range: *kept, unmapped: 0, kept: 2 * PAGE };
                // More than once is no more than once.
                assert_eq!([0; 2].map(|_| bench.domain.unmap(*kept)), [Err(still_mapped); 2]);
                assert!((0..8).all(|page| bench.writes(range, page)), "all of it is still mapped");
            }
            assert_eq!(bench.domain.unmap(parts[3]), Ok(()));
            assert_eq!(gone(&bench.domain), (0, 0));
            assert!((0..8).all(|page| !bench.writes(range, page)));
        }
    }
}

#[test]
fn random_parts_end_a_mapping_when_no_page_of_it_is_wanted() {
    let mut dice = Dice::new(11);
    let bench = WholesBench::new(Policy::Strict);
    for round in 0..300 {
        // Up to four pieces of one to four pages.
        let list: Vec<_> = (0..1 + dice.below(4))
            .map(|piece| PhysSegment {
                phys: PhysAddr::new(0x9_0000_0000 + piece * 100 * PAGE),
                len: (1 + dice.below(4)) * PAGE,
            })
            .collect();
        let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
        let pages = range.len() / PAGE;
        let mut wanted = vec![true; pages as usize];
        loop {
            // Some of it is perhaps not wanted any more.
            let first = dice.below(pages);
            let len = 1 + dice.below(pages - first);
            let result = bench.domain.unmap(part(range, first, len));
            wanted[first as usize..(first + len) as usize].fill(false);
            let is_over = !wanted.contains(&true);
            assert_eq!(result.is_ok(), is_over, "{round}: {result:?}");
            assert!((0..pages).all(|page| bench.writes(range, page) != is_over), "{round}");
            if is_over {
                break;
            }
        }
        assert_eq!(gone(&bench.domain), (0, 0), "{round}");
    }
}

#[test]
fn a_batch_takes_a_mapping_with_the_last_part_of_it() {
    let bench = WholesBench::new(Policy::Strict);
    let mut batch = RawBatch::new(&bench.device, 4).unwrap();
    // Two pieces, of 2 pages each.
    let list =
        [0, 100].map(|page| PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + page * PAGE), len: 2 * PAGE });
    let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
    let mut end = |part: IovaRange| bench.device.unmap_single_in(&mut batch, part.start(), part.len());
    bench.domain.count_neighbours(2 * PAGE as i64);
    let half = part(range, 0, 1);
    let still_mapped = UnmapError::StillMapped { range: half, unmapped: 0, kept: PAGE };
    assert_eq!(end(half), Err(BatchError::Unmap(still_mapped)));
    assert!(bench.domain.unmap(part(range, 1, 1)).is_err(), "the second piece is wanted");
    assert!((0..4).all(|page| bench.writes(range, page)));
    assert_eq!(end(part(range, 2, 2)), Ok(()));
    assert_eq!(batch.commit(), Ok(1));
    assert!((0..4).all(|page| !bench.writes(range, page)));
    assert_eq!(gone(&bench.domain), (0, 0));
    // No byte beside a part was counted, so none of these is taken off.
    let exposed = || bench.domain.exposure().neighbour_byte_ns;
    let before = exposed();
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert!(exposed() > before);
}

#[test]
fn what_was_noted_of_a_mapping_ends_with_it() {
    let bench = WholesBench::new(Policy::Strict);
    let map = || bench.domain.open(&memory(4 * PAGE), BOTH, ANYWHERE).unwrap();
    let range = map();
    assert!(bench.domain.unmap(part(range, 0, 2)).is_err());
    bench.domain.unmap(range).unwrap();
    // The same addresses again.
    let range = map();
    assert!(bench.domain.unmap(part(range, 2, 2)).is_err(), "the first half is in use");
    assert!((0..4).all(|page| bench.writes(range, page)));
    bench.domain.unmap(part(range, 0, 2)).unwrap();
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn a_whole_whose_end_is_not_confirmed_is_held() {
    let bench = WholesBench::new(Policy::Strict);
    let range = bench.domain.open(&memory(4 * PAGE), BOTH, ANYWHERE).unwrap();
    assert!((0..4).all(|page| bench.writes(range, page)));
    assert!(bench.domain.unmap(part(range, 0, 2)).is_err());
    bench.domain.mapper().fails.store(true, Ordering::Relaxed);
    let last = bench.domain.unmap(part(range, 2, 2));
    assert_eq!(last, Err(UnmapError::Unconfirmed { range, error: TIMEOUT }));
    let stats = bench.domain.stats();
    assert_eq!((stats.taken_iova_bytes - stats.cached_iova_bytes, stats.lost_iova_bytes), (4 * PAGE, 0));
    // Again, in parts, which is a mistake: nothing is left, and nothing comes back twice.
    for half in [0, 2] {
        let again = bench.domain.unmap(part(range, half, 2));
        assert!(matches!(again, Err(UnmapError::NotMapped { unmapped: 0, .. })), "{again:?}");
    }
    bench.domain.flush().unwrap();
    assert!((0..4).all(|page| !bench.writes(range, page)));
    for _ in 0..600 {
        let other = bench.domain.open(&memory(PAGE), BOTH, ANYWHERE).unwrap();
        bench.domain.unmap(other).unwrap();
    }
    assert_eq!(gone(&bench.domain), (0, 0));
}
