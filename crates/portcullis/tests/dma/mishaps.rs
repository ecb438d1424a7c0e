//! When hardware does not answer, drivers panic, or callers end by number what is a queue's: whatever
//! happens, a buffer that the device may reach is not given back, and protection recovers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Bench, DEVICE, PAGE, PLATFORM, vtd};
use crate::played::Played;
use crate::queued::{QueueOf, direct, end};
use crate::rig::{Moment, Observed};
use portcullis::addr::{
    Direction, DmaSegment, DomainId, Iova, IovaRange, PageSize, PageSizes, Permissions, PhysAddr, PhysSegment,
};
use portcullis::dma::{CoherentMemory, DmaBuffer, DmaDevice, DmaMapError, DmaUnmapError, Mapping};
use portcullis::domain::{Domain, MapListError, Policy, UnmapError};
use portcullis::heap::Shared;
use portcullis::invalidation::{Gather, Invalidation, InvalidationError, InvalidationQueue};
use portcullis::mapper::{Geometry, Mapper, TableMapper};
use portcullis::pgtable::{Attributes, MapError, PageTable, Unmapped};
use portcullis::platform::{Frames, Platform, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDevice, OpenDomain, Simulated};
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory, Queue};

const ANYWHERE: Iova = Iova::new(u64::MAX);
const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };

fn page_of_memory(n: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x1_0000_0000 + n * PAGE), len: PAGE }
}

/// Waits until `over` holds. The bound is generous and decides nothing but when to give up.
fn wait_until(what: &str, mut over: impl FnMut() -> bool) {
    let start = Instant::now();
    while !over() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A buffer that tells when it is dropped, and whose list cannot be had for the `panics_at`-th time.
struct Watched {
    _buffer: Buffer,
    list: [PhysSegment; 1],
    calls: AtomicUsize,
    panics_at: usize,
    dropped: Arc<AtomicBool>,
}

// SAFETY: the list is that of the buffer, which is atomic memory of its own.
unsafe impl DmaBuffer for Watched {
    fn segments(&self) -> &[PhysSegment] {
        assert_ne!(self.calls.fetch_add(1, Ordering::Relaxed), self.panics_at, "as the test wants");
        &self.list
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

fn watched(memory: &Arc<Memory>, panics_at: usize) -> (Watched, Arc<AtomicBool>) {
    let buffer = memory.buffer(PAGE).unwrap();
    let list = [PhysSegment { phys: buffer.phys(), len: buffer.len() }];
    let dropped = Arc::new(AtomicBool::new(false));
    let calls = AtomicUsize::new(0);
    (Watched { _buffer: buffer, list, calls, panics_at, dropped: Arc::clone(&dropped) }, dropped)
}

/// A queue that panics once when told to.
#[derive(Clone)]
struct PanickingQueue {
    inner: Queue,
    panics: Arc<AtomicBool>,
}

// SAFETY: `Ok` is the model's.
unsafe impl InvalidationQueue for PanickingQueue {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        assert!(!self.panics.swap(false, Ordering::Relaxed), "as the test wants");
        self.inner.invalidate(domain, invalidation)
    }
}

/// A device, its memory and its IOMMU behind such a queue.
struct Panicking {
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    device: DmaDevice<TableMapper<Arc<Memory>, PanickingQueue>, StdPlatform>,
    panics: Arc<AtomicBool>,
}

impl Panicking {
    fn new(policy: Policy) -> Self {
        let memory = Memory::new(8 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::for_cpus(Arc::clone(&memory), vtd(4), PLATFORM.cpus()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let panics = Arc::new(AtomicBool::new(false));
        let queue = PanickingQueue { inner: iommu.queue(), panics: Arc::clone(&panics) };
        let mapper = TableMapper::new(table, queue, DomainId(1), Vec::new());
        let domain = Domain::new(StdPlatform::new(), mapper, policy).unwrap();
        Self { memory, iommu, device: DmaDevice::new(domain, u64::MAX).unwrap(), panics }
    }
}

/// Ends a mapping whose translations somebody else has removed: its buffer comes with the next commit.
fn comes_with_a_commit<B: DmaBuffer>(
    queue: &mut QueueOf<crate::common::Mapper, Played, B>,
    mapping: Mapping<B>,
) -> B {
    let failed = queue.unmap(mapping).map(drop).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::Unmap(UnmapError::NotMapped { .. })), "{failed}");
    assert!(failed.mapping.is_none() && queue.waiting() == 1);
    let mut back: Vec<_> = queue.commit().unwrap().collect();
    assert_eq!(back.len(), 1);
    back.remove(0)
}

#[test]
fn a_raw_unmap_that_was_not_confirmed_does_not_free_a_typed_buffer() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    bench.iommu.queue().fail_next(1, TIMEOUT);
    assert!(matches!(bench.device.unmap_single(iova, PAGE), Err(UnmapError::Unconfirmed { .. })));
    comes_with_a_commit(&mut queue, mapping);
    assert!(!bench.writes(iova), "given back while reachable");
}

#[test]
fn nor_does_one_that_went_past_the_domain() {
    let bench = Bench::new(Policy::Strict);
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    let range = IovaRange::new(iova, PAGE).unwrap();
    assert_eq!(bench.domain.mapper().unmap(&*PLATFORM, range, &mut Gather::new()).bytes, PAGE);
    comes_with_a_commit(&mut queue, mapping);
    assert!(!bench.writes(iova), "given back while reachable");
}

/// Whoever ends another's mapping by its number has the owner end what came to the address since. That costs each a mapping
/// that it believes to have, and none a byte of what it has back.
#[test]
fn a_mapping_ended_by_number_under_its_owner_costs_later_ones_theirs_and_opens_nothing() {
    let bench = Bench::on(StdPlatform::with_cpus(1), Policy::Strict);
    let mut queue = direct(&bench.device);
    let buffer = || bench.memory.buffer(PAGE).unwrap();
    let first = queue.map(buffer(), Direction::FromDevice).unwrap();
    let iova = first.iova();
    assert!(bench.writes(iova));
    bench.device.unmap_single(iova, PAGE).unwrap();
    let second = queue.map(buffer(), Direction::FromDevice).unwrap();
    assert!(second.iova() == iova && bench.writes(iova), "or the test means nothing");
    let first = end(&mut queue, first);
    assert!(!bench.writes(iova), "the second is mapped, or the first is reachable");
    let third = queue.map(buffer(), Direction::FromDevice).unwrap();
    assert!(third.iova() == iova && bench.writes(iova), "or the test means nothing");
    let second = end(&mut queue, second);
    assert!(!bench.writes(iova), "the third is mapped, or the second is reachable");
    // The third's owner finds nothing to end: its buffer comes with a commit, out of reach.
    let third = comes_with_a_commit(&mut queue, third);
    assert!(!bench.writes(iova));
    // One write reached each, while it was mapped.
    for buffer in [first, second, third] {
        let mut bytes = [0; 2];
        buffer.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0xee, 0]);
    }
    let stats = bench.domain.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.lost_iova_bytes), (3, 3, 0));
}

#[test]
fn a_buffer_whose_list_cannot_be_had_again_is_unmapped_all_the_same() {
    let bench = Bench::new(Policy::Strict);
    let (buffer, dropped) = watched(&bench.memory, 1);
    let mut queue = direct(&bench.device);
    let mapping = queue.map(buffer, Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    drop(end(&mut queue, mapping));
    assert!(dropped.load(Ordering::Relaxed));
    assert!(!bench.writes(iova));
    // And one that cannot be had at all is never mapped; it is leaked.
    let (buffer, dropped) = watched(&bench.memory, 0);
    let result = catch_unwind(AssertUnwindSafe(|| queue.map(buffer, Direction::FromDevice).is_ok()));
    assert!(result.is_err() && !dropped.load(Ordering::Relaxed), "nobody knows how far it came");
    assert_eq!(bench.domain.stats().maps, 1);
}

#[test]
fn a_panic_in_the_timer_does_not_end_all_timers() {
    let bench = Panicking::new(Policy::Lazy { window_ns: 2_000_000 });
    bench.panics.store(true, Ordering::Relaxed);
    let mut queue = direct(&bench.device);
    let mut map = || queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let (first, second) = (map(), map());
    drop(end(&mut queue, first));
    wait_until("the timer never fired", || !bench.panics.load(Ordering::Relaxed));
    let iova = second.iova();
    bench.iommu.dma_write(DEVICE, iova, &[1]).unwrap();
    let _buffer = end(&mut queue, second);
    wait_until("no timer any more", || bench.iommu.dma_write(DEVICE, iova, &[1]).is_err());
}

#[test]
fn a_failed_unmap_in_a_lazy_domain_keeps_the_window_s_timer_alive() {
    let bench = Bench::new(Policy::Lazy { window_ns: 2_000_000 });
    let range = bench.domain.open(&[page_of_memory(0)], Permissions::READ_WRITE, ANYWHERE).unwrap();
    bench.iommu.queue().fail_next(1, TIMEOUT);
    assert!(bench.domain.unmap_strictly(range).is_err());
    let mut queue = direct(&bench.device);
    let mapping = queue.map(bench.memory.buffer(PAGE).unwrap(), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    assert!(bench.writes(iova));
    let _buffer = end(&mut queue, mapping);
    wait_until("reachable for ever", || !bench.writes(iova));
}

#[test]
fn failed_flushes_are_forgotten_by_the_next_that_succeeds() {
    let bench = Bench::new(Policy::Lazy { window_ns: u64::MAX });
    bench.iommu.queue().fail_next(500, TIMEOUT);
    for _ in 0..500 {
        assert_eq!(bench.domain.flush(), Err(TIMEOUT));
    }
    let limit = Iova::new((1 << 20) - 1);
    for round in 1..=3 {
        let live: Vec<_> = (0..255)
            .map(|n| bench.domain.open(&[page_of_memory(n)], Permissions::READ_WRITE, limit).unwrap())
            .collect();
        live.into_iter().for_each(|range| bench.domain.unmap(range).unwrap());
        bench.domain.flush().unwrap();
        assert!(bench.domain.stats().flushes <= 2 * round, "flushes in excess");
    }
}

/// A buffer and then memory that no table can point to.
struct Unmappable(Buffer, [PhysSegment; 2]);

// SAFETY: the first segment is the buffer's; no CPU reaches the second, and no table entry holds its address.
unsafe impl DmaBuffer for Unmappable {
    fn segments(&self) -> &[PhysSegment] {
        debug_assert_eq!(self.0.phys(), self.1[0].phys);
        &self.1
    }
}

#[test]
fn a_map_that_could_not_be_undone_for_sure_keeps_the_buffer() {
    let memory = Memory::new(8 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let table = PageTable::for_cpus(Arc::clone(&memory), vtd(4), PLATFORM.cpus()).unwrap();
    iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
    let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
    // The device is let in as soon as anything is mapped.
    let (device, let_in) = (Arc::clone(&iommu), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&let_in);
    let mapper = Observed::new(inner, move |moment| {
        if let Moment::Piece { range, entered: 1.. } = moment {
            count.fetch_add(device.dma_write(DEVICE, range.start(), &[1]).is_ok().into(), Ordering::Relaxed);
        }
    });
    let domain = Domain::new(StdPlatform::new(), mapper, Policy::Strict).unwrap();
    let mut queue = direct(&DmaDevice::new(domain.clone(), u64::MAX).unwrap());
    let unmappable = || {
        let buffer = memory.buffer(PAGE).unwrap();
        let list = [
            PhysSegment { phys: buffer.phys(), len: PAGE },
            PhysSegment { phys: PhysAddr::new(1 << 52), len: PAGE },
        ];
        Unmappable(buffer, list)
    };
    // The hardware answers: the buffer comes back.
    let failed = queue.map(unmappable(), Direction::FromDevice).err().unwrap();
    let is_the_list_s = matches!(failed.error, DmaMapError::List(MapListError::Map(_)));
    assert!(failed.buffer.is_some() && is_the_list_s, "{failed}");
    // It does not: the device has cached the first page, and keeps it.
    iommu.queue().fail_next(1, TIMEOUT);
    let buffer = unmappable();
    let phys = buffer.0.phys();
    let failed = queue.map(buffer, Direction::FromDevice).err().unwrap();
    assert_eq!(failed.error, DmaMapError::List(MapListError::Unconfirmed { error: TIMEOUT }));
    assert!(failed.buffer.is_none(), "given back while reachable");
    assert!(memory.is_allocated(phys), "freed while reachable");
    assert_eq!(let_in.load(Ordering::Relaxed), 2, "or the test means nothing");
    domain.flush().unwrap();
    assert_eq!(domain.stats().lost_iova_bytes, 0);
}

/// Table memory that tells when its owner is gone.
struct Owned(Arc<Memory>, Arc<AtomicBool>);

// SAFETY: everything is passed on to the memory.
unsafe impl Frames for Owned {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.table(frame) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

#[test]
fn coherent_memory_keeps_its_owner_only_while_it_may_be_reached() {
    let bench = Bench::new(Policy::Strict);
    let domains = Shared::owners(&bench.domain);
    let gone = Arc::new(AtomicBool::new(false));
    let owned = || Owned(Arc::clone(&bench.memory), Arc::clone(&gone));
    CoherentMemory::new(&bench.device, owned(), 4096).unwrap().free().unwrap();
    assert!(gone.swap(false, Ordering::Relaxed));
    drop(CoherentMemory::new(&bench.device, owned(), 4096).unwrap());
    assert!(gone.swap(false, Ordering::Relaxed));
    assert_eq!(Shared::owners(&bench.domain), domains);
    let memory = CoherentMemory::new(&bench.device, owned(), 4096).unwrap();
    let iova = memory.iova();
    assert!(bench.writes(iova));
    // The domain's timer asks again, too: it fails as long as this looks.
    bench.iommu.queue().fail_next(u64::MAX, TIMEOUT);
    drop(memory);
    assert!(bench.writes(iova), "still reachable");
    assert!(!gone.load(Ordering::Relaxed), "its owner is gone");
    bench.iommu.queue().fail_next(0, TIMEOUT);
}

/// A mapper whose addresses go up to the very last one.
struct Everywhere(Geometry);

// SAFETY: no hardware is behind it.
unsafe impl Simulated for Everywhere {}

// SAFETY: no hardware is behind it, so nothing is reached through it.
unsafe impl Mapper for Everywhere {
    fn geometry(&self) -> &Geometry {
        &self.0
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        _: IovaRange,
        _: impl IntoIterator<Item = (PhysAddr, u64)>,
        _: Attributes,
        _: &mut Gather,
    ) -> Result<(), MapError> {
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        gather.add(range);
        Unmapped::of(range, range.len())
    }

    fn sync(&self, _: &Gather) -> Result<(), InvalidationError> {
        Ok(())
    }
}

#[test]
fn an_aperture_may_reach_the_last_address() {
    let aperture = IovaRange::from_bounds(Iova::new(PAGE), ANYWHERE).unwrap();
    let geometry =
        Geometry { aperture, page_sizes: PageSizes::EMPTY.with(PageSize::SIZE_4K), reserved: Vec::new() };
    let domain = Domain::new(StdPlatform::new(), Everywhere(geometry), Policy::Strict).unwrap();
    let device = DmaDevice::new(domain, u64::MAX).unwrap();
    let mut out = [DmaSegment::default(); 1];
    assert_eq!(device.open_sg(&[page_of_memory(0)], Direction::ToDevice, &mut out), Ok(1));
    assert_eq!(out, [DmaSegment { iova: Iova::new(u64::MAX - (PAGE - 1)), len: PAGE }]);
    device.unmap_sg(&out).unwrap();
}

#[test]
fn a_mapping_unmapped_in_pieces_hands_nothing_out_twice() {
    let bench = Bench::on(StdPlatform::with_cpus(1), Policy::Strict);
    let list: Vec<_> = (0..8).map(page_of_memory).collect();
    let map = |list: &[PhysSegment]| bench.domain.open(list, Permissions::READ_WRITE, ANYWHERE);
    let whole = map(&list).unwrap().start().get();
    let piece = |page: u64, pages| IovaRange::new(Iova::new(whole + page * PAGE), pages * PAGE).unwrap();
    bench.domain.unmap(piece(0, 3)).unwrap();
    let other = map(&list[..4]).unwrap();
    assert!(!piece(0, 8).contains_range(other), "while a part is mapped");
    bench.domain.unmap(piece(3, 5)).unwrap();
    bench.domain.unmap(other).unwrap();
    // Both are gone as wholes.
    bench.domain.unmap(piece(3, 5)).unwrap_err();
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
    // Emptying every cache, as an exhausted space does.
    assert!(bench.domain.open(&list, Permissions::READ_WRITE, Iova::new(8 * PAGE - 1)).is_err());
    assert_eq!(bench.domain.stats().taken_iova_bytes, 0);
}

#[test]
fn an_unmap_of_any_size_is_bounded_by_the_tables_that_exist() {
    let bench = Bench::new(Policy::Strict);
    let kept =
        bench.domain.open(&[page_of_memory(0)], Permissions::READ, Iova::new(u32::MAX.into())).unwrap();
    // At one step for each granule this would take years.
    let range = IovaRange::new(Iova::new(1 << 40), 1 << 63).unwrap();
    assert_eq!(bench.domain.unmap(range), Err(UnmapError::NotMapped { range, unmapped: 0 }));
    assert!(bench.reads(kept.start()));
}
