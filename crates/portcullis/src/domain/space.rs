//! The [`Domain`]: it maps lists of segments, and unmaps ranges by its policy. A list is mapped as a whole or not at all. No other caller
//! gets a mapped range before an unmap has freed it.

mod addresses;
mod at_once;
mod deferred;
mod endings;
mod failed;
mod flushes;
mod guards;
mod lifecycle;
mod live;
mod open;
mod steps;

pub(crate) use endings::Ending;
pub(crate) use guards::Changing;
pub(crate) use lifecycle::{Fate, LinkFailed};
pub use lifecycle::{Linked, Refused, Reserved, Unlinked};
pub(crate) use steps::Tally;

use alloc::vec::Vec;
use core::fmt;

use self::at_once::AtOnce;
use super::account::Books;
use super::parts::Parts;
use super::policy::AtomicPolicy;
use super::{MapListError, Policy};
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr, PhysSegment};
use crate::broken::broken;
use crate::heap::{Shared, SharedPlace, place_of, write_fields};
use crate::invalidation::{FlushQueue, InvalidationError};
use crate::iova::{IovaError, IovaSpace, SpaceConfig};
use crate::mapper::Mapper;
use crate::percpu::{Marks, Turn};
use crate::pgtable::Attributes;
use crate::platform::{LocalCpu, Platform, events_of};
use crate::setup::SetupError;
use crate::sync::AtomicU64;

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
    /// Whether interrupt handlers may call maps, and the work that these have left.
    at_once: AtOnce,
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
                at_once: AtOnce::default(),
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

    /// Maps the pages that `list` touches, one segment after another, into one range of addresses at or below `limit`. Costs one allocation
    /// of addresses, one walk for each leaf table, and one store for each entry.
    ///
    /// Context: may allocate page tables. Waits for hardware if addresses or memory for tables are exhausted, if a failed call is undone,
    /// and if the mapper waits for each map (as for hardware in [caching mode](crate::invalidation::InvalidationQueue::caches_absent)). The
    /// caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`MapListError`]: nothing is mapped. No addresses leak, except if another caller's translation was in the way.
    ///
    /// # Safety
    /// The mapping *lasts* until an [`unmap`](Self::unmap) of it has returned `Ok` and, under a lazy policy, the flush that covers it is
    /// confirmed.
    /// 1. **The memory is the caller's to open** to every device of the domain for as long as the mapping lasts: all granules that `list`
    ///    touches. Devices may access them at any time, as the permissions say.
    /// 2. Until then it is not given to others, and nothing relies on its contents: the only references to it are to atomics (or, where
    ///    devices only read, shared ones to what is not written).
    /// 3. After [`MapListError::Unconfirmed`], clauses 1 and 2 hold until a [`flush`](Self::flush) has returned `Ok`. After any other error
    ///    they end with the call.
    pub unsafe fn map(
        &self,
        list: &[PhysSegment],
        attributes: impl Into<Attributes>,
        limit: Iova,
    ) -> Result<IovaRange, MapListError> {
        let (len, attributes) = (self.pages_of(list)?, attributes.into());
        if let [PhysSegment { phys, .. }] = list {
            // Whole pages, so that no bytes count as neighbours.
            let pages = PhysSegment { phys: phys.align_down(self.granule), len };
            // SAFETY: clauses 1 and 2 are the caller's; `pages` are the granules that the segment touches.
            if let Some(range) = unsafe { self.map_fast(pages, attributes, limit, |_| ()) } {
                return Ok(range);
            }
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.open::<false>(list, (len, len), attributes, limit, |_, _| ()) }
    }

    /// The fast path of [`map`](Self::map) for one segment: takes addresses from the CPU's cache and enters them, in one exclusive section.
    /// If that is not possible, returns `None` with nothing changed; `map` then does it or says why not. The segment's neighbours
    /// [count](Self::count_neighbours). Calls `counted` with the CPU on success.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2.
    #[inline]
    pub(crate) unsafe fn map_fast(
        &self,
        segment: PhysSegment,
        attributes: Attributes,
        limit: Iova,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<IovaRange> {
        if !M::IS_QUICK {
            return None;
        }
        let PhysSegment { phys, len: used } = segment;
        let pages = IovaRange::of_pages(Iova::new(phys.get()), used, self.granule)?;
        let (phys, len) = (PhysAddr::new(pages.start().get()), pages.len());
        let enter = |turn: &Turn<'_>, range| {
            // SAFETY: the mapper asks for clauses 1 and 2, which are the caller's; the range is of the granules that the memory touches.
            unsafe { self.mapper.map_fast(turn, range, phys, attributes) }
        };
        self.take_and(enter, (len, len - used), limit, counted)
    }

    /// Takes `len` bytes of addresses from the CPU's cache, and calls `enter` to map them in the same exclusive section. If either fails,
    /// nothing is changed. `neighbours` of the bytes are neighbours. Calls `counted` with the CPU on success.
    #[inline(always)]
    fn take_and(
        &self,
        enter: impl FnOnce(&Turn<'_>, IovaRange) -> bool,
        (len, neighbours): (u64, u64),
        limit: Iova,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<IovaRange> {
        let fast = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |turn, own| {
                let own = own?;
                let changing = self.changing(self.space.take(own, len, limit)?);
                let range = changing.range();
                if !enter(turn, range) {
                    self.give_back(Some(cpu), Some(own), changing.done());
                    return None;
                }
                self.books.with(cpu, |page| {
                    page.add(|book| &book.maps, 1);
                    self.change_in(page, neighbours);
                });
                counted(cpu);
                Some(changing)
            })?
        };
        Some(self.platform.with_cpu_fast(fast)??.done())
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
            let PhysSegment { phys, len } = *segment;
            if len == 0 {
                return Err(MapListError::EmptySegment { index, phys });
            }
            total = self
                .rounded(segment)
                .and_then(|bytes| total.checked_add(bytes))
                .ok_or(MapListError::Wraps { index, phys, len })?;
        }
        if total == 0 { Err(MapListError::EmptyList) } else { Ok(total) }
    }

    fn rounded(&self, segment: &PhysSegment) -> Option<u64> {
        segment.phys.checked_add(segment.len - 1)?;
        self.granule.round_up(segment.phys.page_offset(self.granule).checked_add(segment.len)?)
    }
}

pub(crate) fn last_byte(list: &[PhysSegment]) -> Result<PhysAddr, MapListError> {
    let mut highest = None;
    for (index, segment) in list.iter().enumerate() {
        highest = highest.max(Some(MapListError::check(*segment, index)?));
    }
    highest.ok_or(MapListError::EmptyList)
}
