//! The [`Domain`]: how it is made, its policy, and its account of exposure. The policy and the account change while I/O runs: after `Ok` of a
//! change to a stricter policy, the new promise holds for earlier unmaps, too.

mod deferred;
mod lifecycle;
mod maps;
mod tokens;
mod unmaps;

pub(crate) use lifecycle::{Changing, Fate, LinkFailed};
pub use tokens::{Linked, Refused, Reserved, Unlinked};
pub(crate) use unmaps::Rule;

use alloc::vec::Vec;
use core::fmt;

use super::account::{Book, Books, CpuBook, Tally};
use super::parts::Parts;
use super::policy::AtomicPolicy;
use super::{MapListError, Policy, PolicyError};
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr, PhysSegment};
use crate::broken::broken;
use crate::exposure::Exposure;
use crate::guard::Guard;
use crate::heap::{Shared, SharedPlace, place_of, write_fields};
use crate::invalidation::{FlushQueue, InvalidationError};
use crate::iova::{IovaError, IovaSpace, SpaceConfig};
use crate::mapper::Mapper;
use crate::percpu::{Counter, Marks};
use crate::platform::{Platform, events_of};
use crate::setup::SetupError;
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Counters of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainStats {
    /// Bytes of addresses that were available when the domain was made.
    pub iova_bytes: u64,
    /// Bytes of addresses that are handed out or in per-CPU caches.
    pub taken_iova_bytes: u64,
    /// Bytes of these that are in per-CPU caches, or in transit to another CPU as remote frees.
    pub cached_iova_bytes: u64,
    /// The peak of `taken_iova_bytes`.
    pub peak_iova_bytes: u64,
    /// Bytes of memory for the allocator of addresses.
    pub iova_memory: usize,
    /// Lists (or single buffers) mapped.
    pub maps: u64,
    /// Ranges unmapped.
    pub unmaps: u64,
    /// Domain-wide flushes that were confirmed.
    pub flushes: u64,
    /// Leaked bytes of addresses, which are never used again: after a caller's mistake, a failed invalidation, or a panic of a mapper, its
    /// queue or the platform. (After a panic of the platform some of these bytes may be in use again.)
    pub lost_iova_bytes: u64,
}

/// One I/O address space, shared by the devices attached to it. Any number of CPUs may call its methods at once. Dropping the domain drops
/// its mapper; detach its devices before.
pub struct Domain<M: Mapper, P: Platform> {
    platform: P,
    mapper: M,
    policy: AtomicPolicy,
    translated: bool,
    granule: PageSize,
    space: IovaSpace,
    flush_queue: FlushQueue,
    books: Books,
    /// The earliest time at which the timer is due; `u64::MAX` without one.
    due_ns: AtomicU64,
    /// Rings made so far, from which the next one gets its colour.
    rings: AtomicU64,
    reserved: Vec<IovaRange>,
    parts: Parts,
    /// Whether interrupt handlers may call maps, and have left work to the timer.
    is_at_once: AtomicBool,
    work_left: AtomicBool,
}

/// Its policy and reserved addresses. The caches of all CPUs would be megabytes of text.
impl<M: Mapper, P: Platform> fmt::Debug for Domain<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("policy", &self.policy())
            .field("reserved", &self.reserved)
            .finish_non_exhaustive()
    }
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Makes an empty domain, and registers it with the platform for timers and released CPUs. Context: allocates the caches, queues and
    /// counters of all CPUs; does not wait.
    ///
    /// # Errors
    /// [`SetupError`]: the mapper's geometry leaves no addresses, or there is no memory.
    pub fn new(platform: P, mapper: M, policy: Policy) -> Result<Shared<Self>, SetupError> {
        Self::within(platform, mapper, policy, Vec::new(), Iova::new(u64::MAX))
    }

    /// As [`new`](Self::new), with addresses up to `last` only, and none of `reserved`.
    #[inline(never)]
    pub(crate) fn within(
        platform: P,
        mut mapper: M,
        policy: Policy,
        mut reserved: Vec<IovaRange>,
        last: Iova,
    ) -> Result<Shared<Self>, SetupError> {
        let cpus = platform.cpus();
        mapper.set_cpus(cpus)?;
        let geometry = mapper.geometry();
        // A mapping of a queue keeps the bytes of its pages in units of 4 KiB, and in 32 bits what is beside its buffer in them.
        let granule = geometry.page_sizes.smallest().filter(|granule| (12..32).contains(&granule.shift()));
        let granule = granule.ok_or(SetupError::NoPageSize)?;
        let last = geometry.aperture.last().min(last);
        let aperture =
            IovaRange::from_bounds(geometry.aperture.start(), last).map_err(|_| IovaError::Empty)?;
        reserved.try_reserve(geometry.reserved.len() + 1).map_err(|_| SetupError::OutOfMemory)?;
        reserved.extend_from_slice(&geometry.reserved);
        // Too many drivers and devices take address 0 for "no address".
        reserved.extend(IovaRange::new(Iova::new(0), granule.bytes()));
        let config = SpaceConfig { reserved, ..SpaceConfig::new(aperture, granule, cpus) };
        // The allocator, the mapper (if it has section flags) and the flush queue share exclusive sections.
        let marks = match mapper.marks(&platform) {
            Some(marks) => marks.clone(),
            None => Shared::new(Marks::new(cpus)?)?,
        };
        let translated = policy.is_translated();
        let mut place = SharedPlace::<Self>::new()?;
        let at = place.as_mut_ptr();
        // It is built in place, as it is larger than a kernel's stack.
        // SAFETY: every pointer is to a field of `place`, which only this function has; each field is written once, and its place handed out once.
        // If `FlushQueue` or `Books` fails, what was made before it is dropped. After them nothing fails, so `filled` finds all fields.
        let domain = unsafe {
            let (space, flush_queue) = (place_of(&raw mut (*at).space), place_of(&raw mut (*at).flush_queue));
            let books = place_of(&raw mut (*at).books);
            IovaSpace::make_in(space, &config, marks.clone())?;
            let marks = (!mapper.costs().shares_one_queue()).then_some(marks);
            if let Err(error) = FlushQueue::make_for(flush_queue, marks, cpus).map(drop).and_then(|()| {
                Books::make_in(books, cpus).map(drop).inspect_err(|_| flush_queue.assume_init_drop())
            }) {
                space.assume_init_drop();
                return Err(error.into());
            }
            write_fields!(
                at,
                made [space, flush_queue, books],
                policy: AtomicPolicy::new(Some(policy)),
                translated: translated,
                due_ns: AtomicU64::new(u64::MAX),
                rings: AtomicU64::new(0),
                reserved: config.reserved,
                is_at_once: AtomicBool::new(false),
                work_left: AtomicBool::new(false),
                parts: Parts::default(),
                platform: platform,
                mapper: mapper,
                granule: granule,
            );
            place.filled()
        };
        domain.platform.register(events_of(&domain))?;
        Ok(domain)
    }

    /// The present policy.
    #[inline]
    pub fn policy(&self) -> Policy {
        self.policy.get().unwrap_or_else(|| broken("a domain has a policy"))
    }

    /// Whether devices use translated addresses: under every policy but passthrough.
    #[inline]
    pub fn is_translated(&self) -> bool {
        self.translated
    }

    /// The mapper, to inspect it or to add device TLBs. An unmap through it does not end the domain's mapping: the owner's unmap returns
    /// [`UnmapError::NotMapped`](super::UnmapError::NotMapped), and invalidates the range; its addresses leak, and are not counted.
    pub fn mapper(&self) -> &M {
        &self.mapper
    }

    /// The platform.
    #[inline]
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// The smallest page, by which memory is opened to devices.
    pub fn granule(&self) -> PageSize {
        self.granule
    }

    /// Changes the policy while I/O runs. After `Ok`, every unmap that returns later follows the new policy; if that is the stricter one,
    /// devices reach nothing that was unmapped before. Devices and mappings with a policy of their own keep it. Costs one flush, or one
    /// store if the new policy is weaker. Context: waits for hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`PolicyError::Translation`] from or to passthrough: nothing is changed. [`PolicyError::Unconfirmed`]: the policy is changed, but
    /// devices may still reach what was unmapped before.
    pub fn set_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.change(&self.policy, Some(policy))
    }

    pub(crate) fn change(&self, place: &AtomicPolicy, policy: Option<Policy>) -> Result<(), PolicyError> {
        // `None` ends an exception, and needs no check: the domain's own policy holds again.
        if let Some(new) = policy
            && new.is_translated() != self.translated
        {
            return Err(PolicyError::Translation { from: self.policy().name(), to: new.name() });
        }
        let old = place.swap(policy);
        // The domain's own policy may be changing at the same time. It is loaded after the store and a fence, and that change's flush has a
        // fence, too. So either this load sees a stricter own policy, or that flush begins after the store, and covers what the exception
        // queued.
        fence(Ordering::SeqCst);
        let own = self.policy();
        let (new, old) = (policy.unwrap_or(own), old.unwrap_or(own));
        // The flush waits for exclusive sections first, and a CPU that queues a range reads the policy in its section. So the flush covers
        // ranges that were queued by the old policy, and later ones see the new policy. It runs even if the policy stays the same: another
        // caller may be changing it, or this one may retry after a failure.
        if self.translated && !new.is_weaker_than(old) { Ok(self.flush()?) } else { Ok(()) }
    }

    /// The exposure that the domain has caused so far: of mappings of the [`dma`](crate::dma) layer, and of neighbours that a caller's
    /// cache reports by [`count_neighbours`](Self::count_neighbours). [`map`](Self::map) itself knows whole pages only, which have no
    /// neighbours. Without translation everything is always exposed, and nothing is counted.
    ///
    /// The clock is read about every 65 us while a CPU maps and unmaps, and at least at every 64th change. Changes between two readings at
    /// most 131 us apart are taken as spread evenly, so the error for that time is at most the difference between the most and the fewest
    /// bytes in it. If the CPU has paused for longer, all bytes that came count for the whole pause: more than happened, never less. A ring
    /// reports its mappings when a batch is complete.
    ///
    /// Deferred ranges of a CPU may count for longer than devices reached them, never for less. A CPU learns of flushes now and then while
    /// it defers, when its window ends, and in this call; it then counts up to the last confirmed flush. So after [`flush`](Self::flush)
    /// the account is exact if it is read before another flush is confirmed. `longest_stale_ns` is exact otherwise.
    ///
    /// Context: O(CPUs), and one barrier of all CPUs if any has deferred. The caller holds no lock and no CPU.
    pub fn exposure(&self) -> Exposure {
        let now_ns = self.platform.now_ns();
        let (mut sum, longest_stale_ns) = self.flush_queue.exposure(&self.platform, now_ns);
        let live = self.platform.with_cpu(|_| self.books.total(now_ns));
        sum += live;
        let positive = |time: i128| u128::try_from(time).unwrap_or(0);
        Exposure {
            stale_byte_ns: positive(sum.used),
            neighbour_byte_ns: positive(sum.neighbour),
            longest_stale_ns,
        }
    }

    /// Counts `change` bytes more (negative: fewer) that devices can reach and that are in no buffer in use: neighbours in a buffer's
    /// pages, or idle mappings of a caller's cache. They count in [`exposure`](Self::exposure), as `neighbour_byte_ns`, until the caller
    /// subtracts the same number.
    ///
    /// They are counted even if the platform panics, which the caller then meets; a second panic ends the process. Costs two stores with a
    /// CPU lent, and a reading of the clock now and then; nothing for 0.
    #[inline]
    pub fn count_neighbours(&self, change: i64) {
        if change != 0 {
            let bytes = change.cast_unsigned();
            // If the platform panics before it lends a CPU, they are counted without one, at the clock's time.
            let untold = Guard::new(|| self.books.of(None).change_now(bytes, || self.platform.now_ns()));
            self.platform.with_cpu(|cpu| {
                untold.done();
                self.change_in(self.books.of(cpu), bytes);
            });
        }
    }

    #[inline]
    fn change_in(&self, book: CpuBook<'_>, bytes: u64) {
        if bytes != 0 {
            book.change(bytes, || self.platform.now_ns());
        }
    }

    #[inline]
    fn count_map(&self, book: CpuBook<'_>, neighbours: u64) {
        book.add(|book| &book.maps, 1);
        self.change_in(book, neighbours);
    }

    #[inline]
    fn count_unmap(&self, book: CpuBook<'_>, neighbours: u64) {
        self.change_in(book, neighbours.wrapping_neg());
        book.add(|book| &book.unmaps, 1);
    }

    fn count_one(&self, count: impl FnOnce(&Book) -> &Counter) {
        self.platform.with_cpu(|cpu| self.books.of(cpu).add(count, 1));
    }

    /// Adds what a ring has counted by itself.
    pub(crate) fn count_tally(&self, tally: Tally) {
        let now_ns = if tally.has_neighbours() { self.platform.now_ns() } else { 0 };
        self.platform.with_cpu(|cpu| self.books.of(cpu).add_tally(tally, now_ns));
    }

    /// Frees empty page tables, for a caller that is short of memory. Returns the freed bytes. `map` does the same before it fails for want
    /// of table memory, unless another reclaim is running.
    ///
    /// Context: looks at all tables, and waits for hardware, for a grace period, and for reclaims that were called before: see
    /// [`PageTable::reclaim`](crate::pgtable::PageTable::reclaim). The caller holds no CPU, and is no interrupt handler.
    ///
    /// # Errors
    /// [`InvalidationError`]: the tables stay until a later call.
    pub fn reclaim(&self) -> Result<usize, InvalidationError> {
        self.mapper.reclaim(&self.platform)
    }

    /// Reads the domain's counters. O(CPUs); a CPU is lent while it reads the address space.
    pub fn stats(&self) -> DomainStats {
        let space = self.platform.with_cpu(|_| self.space.usage());
        // `unmaps` and `refused` are read before `maps`, so that concurrent calls cannot make `maps` smaller than either.
        let unmaps = self.books.sum(|book| &book.unmaps);
        let refused = self.books.sum(|book| &book.refused);
        DomainStats {
            iova_bytes: space.total,
            taken_iova_bytes: space.taken,
            cached_iova_bytes: space.cached,
            peak_iova_bytes: space.peak_taken,
            iova_memory: space.memory,
            maps: self.books.sum(|book| &book.maps).wrapping_sub(refused),
            unmaps,
            flushes: self.books.sum(|book| &book.flushes),
            lost_iova_bytes: self.books.sum(|book| &book.lost),
        }
    }

    /// Bytes of the pages that `list` touches, which are the bytes of addresses that it needs. O(segments). This checks every sum that
    /// mapping the list computes.
    ///
    /// # Errors
    /// [`MapListError`]: an empty list or segment, or one that runs past the end of the address space.
    pub fn pages_of(&self, list: &[PhysSegment]) -> Result<u64, MapListError> {
        // With 48-bit numbers and fewer than 2^12 segments no sum wraps, so no segment needs a check of its own.
        let (mut bits, mut has_empty, mut total) = (self.granule.offset_mask(), false, 0_u64);
        for piece in list {
            bits |= piece.phys.get() | piece.len;
            has_empty |= piece.len == 0;
            total = total.wrapping_add(piece.bytes_of_granules(self.granule));
        }
        let is_plain = bits >> 48 == 0 && list.len() < 1 << 12 && !has_empty && total > 0;
        if is_plain { Ok(total) } else { self.pages_of_any(list) }
    }

    #[cold]
    #[inline(never)]
    fn pages_of_any(&self, list: &[PhysSegment]) -> Result<u64, MapListError> {
        let mut total: u64 = 0;
        for (index, segment) in list.iter().enumerate() {
            MapListError::check(*segment, index)?;
            let PhysSegment { phys, len } = *segment;
            let bytes = phys.page_offset(self.granule).checked_add(len);
            let bytes = bytes.and_then(|bytes| self.granule.round_up(bytes)?.checked_add(total));
            total = bytes.ok_or(MapListError::Wraps { index, phys, len })?;
        }
        if total == 0 { Err(MapListError::EmptyList) } else { Ok(total) }
    }
}

pub(crate) fn last_byte(list: &[PhysSegment]) -> Result<PhysAddr, MapListError> {
    let mut highest = None;
    for (index, segment) in list.iter().enumerate() {
        highest = highest.max(Some(MapListError::check(*segment, index)?));
    }
    highest.ok_or(MapListError::EmptyList)
}
