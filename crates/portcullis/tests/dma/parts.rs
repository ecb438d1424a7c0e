//! Mappings that are unmapped in parts: their addresses come back with the last of them, and not before; also where a part cannot go by
//! itself.

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
    let bench = Bench::new(Policy::Strict);
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

/// A mapper that removes what was mapped at once as a whole, as a kernel does. Parts of it are kept; and all that is missing, if it does not
/// know.
struct Wholes<const KNOWS: bool = true> {
    inner: Tables,
    mapped: Mutex<Vec<IovaRange>>,
    /// The next sync but so many is not confirmed.
    fails_after: Mutex<Option<usize>>,
}

// SAFETY: it maps in the model's tables.
unsafe impl<const KNOWS: bool> Simulated for Wholes<KNOWS> {}

// SAFETY: all is the inner mapper's; what it is not asked for is said to be kept.
unsafe impl<const KNOWS: bool> Mapper for Wholes<KNOWS> {
    const KNOWS_WHAT_IT_KEEPS: bool = KNOWS;

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
        if !KNOWS {
            unmapped.kept = range.len() - unmapped.bytes;
        }
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        let mut fails_after = self.fails_after.lock().unwrap();
        let fails = *fails_after == Some(0);
        *fails_after = fails_after.and_then(|after| after.checked_sub(1));
        if fails { Err(TIMEOUT) } else { self.inner.sync(gather) }
    }
}

struct WholesBench<const KNOWS: bool = true> {
    iommu: Arc<Iommu>,
    domain: Shared<Domain<Wholes<KNOWS>, Played>>,
    device: DmaDevice<Wholes<KNOWS>, Played>,
}

impl<const KNOWS: bool> WholesBench<KNOWS> {
    fn new(policy: Policy) -> Self {
        let memory = Memory::new(8 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::for_cpus(memory, vtd(4), PLATFORM.cpus()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let mapper = Wholes { inner, mapped: Mutex::default(), fails_after: Mutex::default() };
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
        let bench = <WholesBench>::new(policy);
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
            assert!((0..8).all(|page| !bench.writes(range, page)));
            assert_eq!(gone(&bench.domain), (0, 0));
        }
    }
}

#[test]
fn parts_that_go_and_parts_that_do_not_make_up_a_whole() {
    // Three pieces, which the mapper keeps apart: of 2, 4 and 2 pages.
    let pieces =
        [0, 100, 200].map(|page| PhysAddr::new(0x9_0000_0000 + page * PAGE)).into_iter().zip([2, 4, 2]);
    let list: Vec<_> = pieces.map(|(phys, pages)| PhysSegment { phys, len: pages * PAGE }).collect();
    let bench = <WholesBench>::new(Policy::Strict);
    let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
    bench.domain.unmap(part(range, 0, 2)).unwrap();
    // The first half of the second goes when all of it is to.
    let kept = |range, unmapped, kept| Err(UnmapError::StillMapped { range, unmapped, kept });
    let half = part(range, 2, 2);
    assert_eq!(bench.domain.unmap(half), kept(half, 0, 2 * PAGE));
    let rest = part(range, 4, 4);
    assert_eq!(bench.domain.unmap(rest), Ok(()), "with what was kept before");
    assert!((0..8).all(|page| !bench.writes(range, page)));
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn a_kept_part_that_goes_with_a_larger_one_counts_once() {
    let bench = <WholesBench>::new(Policy::Strict);
    let halves =
        [0, 100].map(|page| PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + page * PAGE), len: 4 * PAGE });
    let range = bench.domain.open(&halves, BOTH, ANYWHERE).unwrap();
    assert!(bench.domain.unmap(part(range, 1, 1)).is_err());
    bench.domain.unmap(part(range, 0, 4)).unwrap();
    let still_mapped = |part, kept| Err(UnmapError::StillMapped { range: part, unmapped: 0, kept });
    let three = part(range, 4, 3);
    assert_eq!(bench.domain.unmap(three), still_mapped(three, 3 * PAGE));
    assert!((0..8).all(|page| bench.writes(range, page) == (page >= 4)), "the last page is in use");
    assert_eq!(gone(&bench.domain), (8 * PAGE, 0));
    bench.domain.unmap(part(range, 7, 1)).unwrap();
    assert!((0..8).all(|page| !bench.writes(range, page)));
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn parts_of_several_pieces_end_as_a_set_of_pages_says() {
    let mut dice = Dice::new(11);
    let bench = <WholesBench>::new(Policy::Strict);
    for round in 0..300 {
        // Pieces of one to four pages, and the piece of each page.
        let lens: Vec<u64> = (0..4).map(|_| 1 + dice.below(4)).collect();
        let list: Vec<_> = (0..)
            .zip(&lens)
            .map(|(piece, len)| PhysSegment {
                phys: PhysAddr::new(0x9_0000_0000 + piece * 100 * PAGE),
                len: len * PAGE,
            })
            .collect();
        let pieces: Vec<usize> = (0..4).flat_map(|piece| (0..lens[piece]).map(move |_| piece)).collect();
        let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
        let pages = pieces.len();
        let (mut mapped, mut wanted) = (vec![true; pages], vec![true; pages]);
        while mapped.contains(&true) {
            // A part that is mapped, some of which is perhaps not wanted any more.
            let first = dice.below(pages as u64) as usize;
            let most = mapped[first..].iter().take_while(|mapped| **mapped).count();
            if most == 0 {
                continue;
            }
            let len = 1 + dice.below(most as u64) as usize;
            let result = bench.domain.unmap(part(range, first as u64, len as u64));
            wanted[first..first + len].fill(false);
            let ends =
                |piece| (0..pages).all(|page| pieces[page] != piece || (first..first + len).contains(&page));
            let is_over = !wanted.contains(&true);
            let all_go = (first..first + len).all(|page| ends(pieces[page]));
            assert_eq!(result.is_ok(), all_go || is_over, "{round}: {result:?}");
            for page in 0..pages {
                let is_ended = (first..first + len).contains(&page) && ends(pieces[page]);
                mapped[page] &= !(is_over || is_ended);
                assert_eq!(
                    bench.writes(range, page as u64),
                    mapped[page],
                    "{round}: page {page} of {pieces:?}"
                );
            }
        }
        assert_eq!(gone(&bench.domain), (0, 0), "{round}");
    }
}

/// Whichever part is the last, and whether a part that goes by itself waits for a flush.
#[test]
fn the_last_part_takes_along_what_was_kept() {
    let list =
        [0, 100].map(|page| PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + page * PAGE), len: 2 * PAGE });
    for policy in [Policy::Strict, Policy::Lazy { window_ns: u64::MAX }] {
        for order in [[0, 1, 2], [0, 2, 1], [2, 0, 1]] {
            let bench = <WholesBench>::new(policy);
            let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
            // Two halves of the first piece, and the second.
            let parts = [part(range, 0, 1), part(range, 1, 1), part(range, 2, 2)];
            let results = order.map(|number| bench.domain.unmap(parts[number]).is_ok());
            assert_eq!(results, order.map(|number| number == 2 || number == order[2]), "{order:?}");
            assert!((0..4).all(|page| !bench.writes(range, page)), "{policy:?}, {order:?}");
            assert_eq!(gone(&bench.domain), (0, 0));
        }
    }
}

/// By a batch, too, whose own parts are still mapped until an unmap by the domain.
#[test]
fn the_last_part_in_a_batch_takes_along_what_was_kept() {
    let list =
        [0, 100].map(|page| PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + page * PAGE), len: 2 * PAGE });
    let bench = <WholesBench>::new(Policy::Strict);
    let mut batch = RawBatch::new(&bench.device, 4).unwrap();
    let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
    let mut end = |part: IovaRange| bench.device.unmap_single_in(&mut batch, part.start(), part.len());
    let half = part(range, 0, 1);
    let still_mapped = UnmapError::StillMapped { range: half, unmapped: 0, kept: PAGE };
    assert_eq!(end(half), Err(BatchError::Unmap(still_mapped)));
    assert_eq!(end(part(range, 2, 2)), Ok(()));
    assert_eq!([half, part(range, 1, 1)].map(|half| bench.domain.unmap(half).is_ok()), [false; 2]);
    assert!(bench.writes(range, 0), "the batch has not ended the rest");
    assert_eq!(batch.commit(), Ok(1));
    assert!((0..4).all(|page| !bench.writes(range, page)));
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn a_hole_that_a_mapper_takes_for_kept_ends_nothing_else() {
    let list =
        [0, 100].map(|page| PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + page * PAGE), len: 2 * PAGE });
    let bench = WholesBench::<false>::new(Policy::Strict);
    let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
    let first = part(range, 0, 2);
    bench.domain.unmap(first).unwrap();
    let again = UnmapError::StillMapped { range: first, unmapped: 0, kept: 2 * PAGE };
    assert_eq!(bench.domain.unmap(first), Err(again));
    assert!((2..4).all(|page| bench.writes(range, page)), "the other half is in use");
    bench.domain.unmap(part(range, 2, 2)).unwrap();
    assert_eq!(gone(&bench.domain), (0, 0));
}

#[test]
fn what_was_noted_of_a_mapping_ends_with_it() {
    let bench = <WholesBench>::new(Policy::Strict);
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
    // The sync of the last part alone, and that of the whole.
    for fails_after in 0..2 {
        let bench = <WholesBench>::new(Policy::Strict);
        let range = bench.domain.open(&memory(4 * PAGE), BOTH, ANYWHERE).unwrap();
        assert!((0..4).all(|page| bench.writes(range, page)));
        assert!(bench.domain.unmap(part(range, 0, 2)).is_err());
        *bench.domain.mapper().fails_after.lock().unwrap() = Some(fails_after);
        let last = bench.domain.unmap(part(range, 2, 2));
        if fails_after == 0 {
            // It was not even noted: it is still mapped, and goes with the next call.
            assert!(
                matches!(last, Err(UnmapError::StillMapped { kept, .. }) if kept == 2 * PAGE),
                "{last:?}"
            );
            bench.domain.unmap(part(range, 2, 2)).unwrap();
        } else {
            assert!(matches!(last, Err(UnmapError::Unconfirmed { error: TIMEOUT, .. })), "{last:?}");
            let stats = bench.domain.stats();
            assert_eq!(
                (stats.taken_iova_bytes - stats.cached_iova_bytes, stats.lost_iova_bytes),
                (4 * PAGE, 0)
            );
            // Again, in parts: nothing is left, and nothing comes back twice.
            for half in [0, 2] {
                let again = bench.domain.unmap(part(range, half, 2));
                assert!(matches!(again, Err(UnmapError::NotMapped { unmapped: 0, .. })), "{again:?}");
            }
        }
        bench.domain.flush().unwrap();
        assert!((0..4).all(|page| !bench.writes(range, page)));
        for _ in 0..600 {
            let other = bench.domain.open(&memory(PAGE), BOTH, ANYWHERE).unwrap();
            bench.domain.unmap(other).unwrap();
        }
        assert_eq!(gone(&bench.domain), (0, 0));
    }
}
