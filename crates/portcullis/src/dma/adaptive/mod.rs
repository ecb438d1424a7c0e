//! A queue that copies each buffer or maps it in a ring, whichever is cheaper. Whatever the choice and the domain's policy, protection is strict, and
//! for an untrusted device to the byte: a granule with other data is copied.

mod book;
mod commits;
mod ends;
mod measure;
mod short;

use alloc::boxed::Box;
use core::mem::MaybeUninit;

use self::book::{FIRST_TIMED, most_bytes};
use self::commits::Commits;
use self::ends::Ends;
use self::measure::cost_of;
use super::mapping::{Choice, Kind};
use super::told::Told;
use super::{DmaDevice, Ended, NotUnmapped, RawMapping, StrictRing, StrictRingConfig};
use crate::addr::{Direction, DmaSegment, Iova, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::bounce::pool::{Attributes, BounceDevice, PoolMapping, Rule, Way};
use crate::domain::MapListError;
use crate::heap::{OutOfMemory, Shared, made, slice, write_fields};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::setup::SetupError;

pub use book::Explained;
pub(crate) use book::{Cell, Half, class_of, classes, pause_after};

/// A queue whose buffers are copied through the pool of its domain, or mapped in a [`StrictRing`], whichever is cheaper.
///
/// An untrusted device never gets a granule that holds other data, so protection is to the byte. If a buffer shares its first or last granule, its
/// bytes there are copied, through slots of the pool that replace them in the ring, and the granules between them are mapped; or all of it is
/// copied. (If the pool's [`split`](crate::bounce::PoolConfig::split) is off, it always is.) A buffer in the ring ends with its batch; a copied one
/// ends at once.
///
/// If the ring has no room for a buffer, [`map`](Self::map) fails as long as others wait for a commit, which makes room, as in the ring itself. If
/// none does, the buffer is mapped directly, which ends at once, with a wait; or copied, if that was measured to be cheaper, if there are no
/// addresses or tables for a mapping, or if only its middle may be mapped. A buffer that is neither for the ring nor for a copy (above the pool's
/// threshold, or persistent) is mapped directly. All this holds whatever the domain's policy.
///
/// A copy costs time by the byte, a mapping costs a share of the wait for the hardware. Where the two cross depends on caches, on the IOMMU and on
/// the load, so it is measured. [`new`](Self::new) times both ways for each size (powers of two from 512 bytes to the pool's threshold), with shared
/// ends and without, on scratch memory. Afterwards one mapping in 61 of each size is timed (of the first 244 more: about 15), and at most one in 64
/// of these is a probe, which goes the other way, so that its cost stays known. Probes cost at most 1/128 of the time of the size's mappings on top,
/// besides one probe. The choice changes if the other way was cheaper by an eighth four times in a row: noise does not make it swing.
/// [`explain`](Self::explain) returns measurements and choices. The time of a commit is divided among the descriptors that end between two
/// commits: a full batch, or fewer for a queue that often falls idle and [commits](Self::commit) then.
///
/// The queue belongs to one CPU at a time, so nothing here is shared, and the choice costs some plain instructions. `K` is the clock: it returns
/// nanoseconds since any beginning.
#[derive(Debug)]
pub struct AdaptiveRing<M: Mapper, P: Platform, C: CopyMemory, K> {
    ring: StrictRing<M, P>,
    pool: BounceDevice<M, P, C>,
    ends: Ends<M, P, C>,
    direction: Direction,
    /// Directions that were measured, or used.
    met: [bool; Direction::ALL.len()],
    batch: usize,
    clock: K,
    clock_ns: u64,
    classes: usize,
    /// The sizes of each direction, one direction after the other; of each, those without shared ends first.
    sizes: Box<[Size]>,
    commits: Commits,
}

/// Mappings of one size, direction and shape.
// Fields that every mapping touches come first, in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
struct Size {
    /// Mappings that went each way, by the number of the [`Choice`].
    counts: [u64; 2],
    /// Mappings until one is timed.
    until: u64,
    cell: Cell,
}

impl Default for Size {
    fn default() -> Self {
        Self { counts: [0; 2], until: FIRST_TIMED - 1, cell: Cell::default() }
    }
}

impl Size {
    fn made(&self) -> u64 {
        self.counts[0].saturating_add(self.counts[1])
    }
}

#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// Makes a queue of `device` for data of one direction, with a ring by `config`. `pool` is the same device in its domain's pool.
    /// Measures both ways, on scratch memory of the pool: twelve mappings of each size, and as many with shared ends if the device is
    /// untrusted. If there is no memory for that, or a step fails, unmeasured sizes are copied at first, and the ring is tried soon.
    /// (Unconfirmed memory is leaked.)
    ///
    /// Context: half of the measured mappings may wait for the hardware. Allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// As [`StrictRing::new`]; [`SetupError::NotTranslated`] for a device without translation; [`SetupError::OtherDomain`].
    pub fn new(
        device: &DmaDevice<M, P>,
        pool: BounceDevice<M, P, C>,
        direction: Direction,
        config: StrictRingConfig,
        clock: K,
    ) -> Result<Self, SetupError> {
        let mut queue: Self = made(|place| Self::unmeasured_in(place, device, pool, config, clock))?;
        queue.measure_toward(direction)?;
        Ok(queue)
    }

    /// Makes a queue in `place`, for data of no direction yet.
    ///
    /// # Errors
    /// As [`new`](Self::new); `place` stays uninitialised.
    #[inline(never)]
    pub(super) fn unmeasured_in<'a>(
        place: &'a mut MaybeUninit<Self>,
        device: &DmaDevice<M, P>,
        pool: BounceDevice<M, P, C>,
        config: StrictRingConfig,
        clock: K,
    ) -> Result<&'a mut Self, SetupError> {
        if !device.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        if !Shared::ptr_eq(device.domain(), pool.pool().domain()) {
            return Err(SetupError::OtherDomain);
        }
        let (classes, clock_ns) = (classes(pool.pool().threshold()), cost_of(&clock));
        let sizes = slice(2 * Direction::ALL.len() * classes, |_| Ok(Size::default()))?;
        // The last step that may fail, so that nothing needs a drop in the place.
        let ring = StrictRing::new(device, config)?;
        let at = place.as_mut_ptr();
        // SAFETY: each write is to a field in the place; after them all fields are initialised.
        Ok(unsafe {
            write_fields!(
                at,
                made [],
                ring: ring,
                direction: Direction::ALL[0],
                met: [false; Direction::ALL.len()],
                batch: config.batch,
                clock_ns: clock_ns,
                clock: clock,
                classes: classes,
                sizes: sizes,
                ends: Ends::new(&pool),
                commits: Commits::new(config.batch),
                pool: pool,
            );
            place.assume_init_mut()
        })
    }

    /// Measures both ways for data of one more direction, as [`new`](Self::new) does.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the ring must not be used.
    pub(super) fn measure_toward(&mut self, direction: Direction) -> Result<(), OutOfMemory> {
        self.direction = direction;
        self.met[direction.index()] = true;
        self.measure()
    }

    /// As [`map`](Self::map), for data of any direction. A direction that was not measured is copied at first.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    pub(super) unsafe fn map_toward(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        self.direction = direction;
        if !self.met[direction.index()] {
            self.begin();
        }
        // SAFETY: clauses 1 to 5 are the caller's.
        unsafe { self.map(list, attributes, out) }
    }

    /// Notes that the direction is used, and chooses for each of its sizes the cheaper way, or copying where costs are unknown.
    #[cold]
    fn begin(&mut self) {
        self.met[self.direction.index()] = true;
        let first = self.size_of(0, false);
        self.sizes[first..first + 2 * self.classes].iter_mut().for_each(|size| _ = size.cell.begin());
    }

    /// The index in `sizes` of `class`, in the direction of the mapping that is being made, of lists with or without `shared` ends.
    #[inline]
    fn size_of(&self, class: usize, shared: bool) -> usize {
        self.place(self.direction, class, shared)
    }

    #[inline]
    fn place(&self, direction: Direction, class: usize, shared: bool) -> usize {
        (2 * direction.index() + usize::from(shared)) * self.classes + class
    }

    /// Lets the device reach the bytes of `list`, or a copy of them, and writes the device's segments to `out`. Returns their number, at most
    /// `list.len()`.
    ///
    /// Cost and context as for [`BounceDevice::map`] or [`StrictRing::map_sg`], or both if the ring has no room.
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all. [`DmaMapError::Full`] while others wait for a commit: commit, and map again.
    /// After [`MapListError::Unconfirmed`] devices may reach entries of it.
    ///
    /// # Safety
    /// The mapping lasts until its unmap has returned, and for one in the ring until the commit of its batch.
    ///
    /// As [`BounceDevice::map`], clauses 1 to 3; and while the mapping lasts:
    ///
    /// 4. Two syncs of the same bytes of the mapping do not run at the same time. This caller ensures it: it gets the [`RawMapping`], and so the
    ///    syncs and the unmap themselves are safe.
    /// 5. Nothing else calls the pool for the mapping's address, as
    ///    [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap)'s clauses 1 and 3 demand.
    #[inline]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        // The pool and the ring check the sum.
        let (len, whole) = self.pool.look_at(list);
        let shared = !whole;
        let class = class_of(len, self.classes).map(|class| self.size_of(class, shared));
        let choice = class.map_or(Choice::Map, |class| self.sizes[class].cell.choice());
        if let Some(class) = class
            && self.sizes[class].until == 0
        {
            // SAFETY: clauses 1 to 5 are the caller's.
            return unsafe { self.map_timed((class, shared), list, attributes, out) };
        }
        // SAFETY: clauses 1 to 5 are the caller's.
        let (mapping, used, _) = unsafe { self.map_by(choice, (class, shared), list, attributes, out) }?;
        if let Some(class) = class {
            let size = &mut self.sizes[class];
            size.until -= 1;
            size.counts[mapping.kind().choice() as usize] += 1;
        }
        Ok((mapping, used))
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    unsafe fn map_timed(
        &mut self,
        (class, shared): (usize, bool),
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        let size = &mut self.sizes[class];
        let pause = pause_after(size.made());
        size.until = pause - 1;
        let choice = size.cell.turn(pause);
        let start = (self.clock)();
        // SAFETY: clauses 1 to 5 are the caller's.
        let mapped = unsafe { self.map_by(choice, (Some(class), shared), list, attributes, out) };
        let (mapping, used, failed) = mapped?;
        let ns = self.since(start);
        let (size, kind) = (&mut self.sizes[class], mapping.kind());
        size.counts[kind.choice() as usize] += 1;
        // A direct mapping of the pool says nothing of the ring. If the ring fails, mapping costs both: the attempt, and the copy after it.
        let timed = (kind != Kind::Pool(Way::Direct)).then(|| {
            let way = if failed { Choice::Map } else { kind.choice() };
            size.cell.note(way, Half::Map, ns);
            // No truncation: there are at most 252.
            (class as u8, way)
        });
        Ok((mapping.with_timed(timed), used))
    }

    /// Maps a list by `choice`, as far as possible; its class (`None` above all of them), and whether its ends are `shared`, are given.
    /// Returns how it was mapped, the number of segments in `out`, and whether the ring was tried and failed.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    // Inlined: otherwise the result is written to memory in parts, and read in larger ones before they have left the store buffer, which costs as
    // much as the rest of the call.
    #[inline(always)]
    unsafe fn map_by(
        &mut self,
        choice: Choice,
        (class, shared): (Option<usize>, bool),
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize, bool), DmaMapError> {
        let mut failed = false;
        if choice == Choice::Map && !attributes.persistent_streaming {
            let refused = if shared {
                // SAFETY: clauses 1 to 5 are the caller's.
                match unsafe { self.map_cut(list, attributes, out) } {
                    Ok(Some(mapping)) => return Ok((mapping, 1, false)),
                    Ok(None) => None,
                    Err(error) => Some(error),
                }
            } else {
                // SAFETY: the ring's clauses are the caller's clause 2.
                match unsafe { self.ring.map_sg(list, self.direction, out) } {
                    Ok((mapping, used)) => return Ok((mapping, used, false)),
                    Err(error) => Some(error),
                }
            };
            if let Some(error) = refused {
                failed = true;
                if self.falls_back_to_mapping(error, class)?
                    && !shared
                    // SAFETY: clauses 1 to 5 are the caller's.
                    && let Some((mapping, used)) = unsafe { self.map_alone(list, attributes, out) }?
                {
                    return Ok((mapping, used, true));
                }
            }
        }
        let (needed, room) = (list.len(), out.len());
        if room < needed {
            return Err(MapListError::NoRoom { needed, room }.into());
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        let mapping = unsafe { self.pool.map(list, self.direction, attributes) }?;
        let (mapping, used) = self.of_pool(&mapping, out);
        Ok((mapping, used, failed))
    }

    /// Maps directly a list that the ring has refused, for which `out` has room. `None` without addresses or tables for that: slots have
    /// theirs already.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    #[inline(never)]
    unsafe fn map_alone(
        &self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<Option<(RawMapping, usize)>, DmaMapError> {
        // Persistent mappings are direct.
        let attributes = Attributes { persistent_streaming: true, ..attributes };
        // SAFETY: clauses 1 to 3 are the caller's.
        match unsafe { self.pool.map(list, self.direction, attributes) } {
            Ok(mapping) => Ok(Some(self.of_pool(&mapping, out))),
            Err(error) if error.may_be_reached() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Maps the middle of a list with shared ends in the ring, with slots in place of the ends. `None` where that is impossible.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn map_cut(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<Option<RawMapping>, DmaMapError> {
        let ([first, ..], true) = (list, list.len() <= out.len()) else { return Ok(None) };
        // SAFETY: clauses 1 to 3 are the caller's.
        let Some(taken) = (unsafe { self.ends.take(list, self.direction, attributes) }) else {
            return Ok(None);
        };
        // SAFETY: the ring's clauses: between the ends the caller's clause 2; the ends are slots' memory, which only the pool's copies use before it
        // is given back, after a commit.
        match unsafe { self.ring.map(self.ends.linked(), self.direction) } {
            Ok(mapping) => {
                let offset = first.phys.page_offset(self.ring.device().domain().granule());
                // The mapping begins with a granule.
                let mapping = RawMapping { iova: Iova::new(mapping.iova.get() | offset), ..mapping };
                out[0] = DmaSegment { iova: mapping.iova, len: taken.len() };
                Ok(Some(mapping.cut(self.ends.keep(taken))))
            }
            Err(error) => {
                self.ends.refuse(taken, error.may_be_reached());
                Err(error)
            }
        }
    }

    /// Decides how a list of `class` goes on that the ring has refused: `true` for a direct mapping rather than a copy; or the caller gets the error.
    #[cold]
    fn falls_back_to_mapping(&self, error: DmaMapError, class: Option<usize>) -> Result<bool, DmaMapError> {
        match error {
            DmaMapError::Full if self.ring.waiting() > 0 => Err(error),
            DmaMapError::Full
            | DmaMapError::TooLong { .. }
            | DmaMapError::List(MapListError::TooLarge { .. }) => {
                let cell = class.map(|class| &self.sizes[class].cell);
                Ok(!cell.is_some_and(|cell| cell.copies_rather_than_wait(self.commits.ns())))
            }
            // The tables have no room, or cannot point to the buffer.
            DmaMapError::List(MapListError::Map(_)) => Ok(false),
            // Also if devices may still reach entries: the caller must be told.
            error => Err(error),
        }
    }

    /// Makes a mapping of the pool's, and writes the device's segments. Returns their number.
    #[inline]
    fn of_pool(&self, mapping: &PoolMapping<'_>, out: &mut [DmaSegment]) -> (RawMapping, usize) {
        (RawMapping::of_pool(mapping, self.number()), mapping.write_segments(out))
    }

    /// Tells its mappings from another queue's.
    #[inline]
    pub(super) fn number(&self) -> u64 {
        self.ring.number()
    }

    /// Ends a mapping: at once if it was copied; with its batch if it was mapped.
    ///
    /// Cost and context as for [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap), by a strict policy, or for [`StrictRing::unmap`].
    ///
    /// # Errors
    /// [`NotUnmapped`]; a mapping of another ring comes back with it, unchanged. No commit of this ring ends what the pool has mapped and the
    /// hardware has not confirmed: a flush of the domain does.
    #[inline]
    pub fn unmap(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        if mapping.queue() != self.number() {
            return Err(NotUnmapped::foreign(mapping));
        }
        self.commits.count();
        let commits = mapping.kind().is_in_ring() && self.ring.waiting() + 1 >= self.batch;
        if commits || mapping.timed().is_some() {
            return self.unmap_timed(mapping);
        }
        self.end(mapping)
    }

    /// Ends a mapping of this ring that [is not timed](RawMapping::with_timed).
    #[inline]
    fn end(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let ended = match mapping.kind() {
            Kind::Ring => self.ring.unmap(mapping),
            Kind::Cut => self.end_cut(mapping),
            Kind::Pool(_) => {
                // SAFETY: `unmap`'s clauses 1 and 3: this had the only token of the mapping, so no other unmap and, as they borrow it, no sync runs
                // now or later. Clause 2: `map`'s clauses 1 and 3 hold until the unmap has returned.
                return match unsafe { self.pool.pool().unmap_by(Rule::Strictly, mapping.iova, mapping.word) }
                {
                    Ok(()) => Ok(Ended::Done(())),
                    // No commit of the ring ends it.
                    Err(error) => Err(NotUnmapped { mapping: None, waits: false, error }),
                };
            }
            // None that this makes.
            Kind::Alone | Kind::Swiotlb { .. } | Kind::NotCoherent => Err(NotUnmapped::foreign(mapping)),
        };
        if matches!(ended, Ok(Ended::Flushed(()))) {
            self.ends.committed();
        }
        ended
    }

    fn end_cut(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let number = mapping.list();
        self.ends.wait(number);
        let mut ended = self.ring.unmap(mapping.uncut());
        if let Err(NotUnmapped { mapping: back @ Some(_), .. }) = &mut ended {
            *back = back.take().map(|mapping| mapping.cut(number));
            self.ends.stay(number);
        } else {
            // SAFETY: clauses 1 and 2 as for the pool. Clause 3: the driver unmaps after the device is done; its commit is not reported yet.
            unsafe { self.ends.end(number) };
        }
        ended
    }

    /// Ends a mapping and takes the time: its own, or that of the commit to which it may lead.
    #[cold]
    fn unmap_timed(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let (timed, in_ring) = (mapping.timed(), mapping.kind().is_in_ring());
        let start = (self.clock)();
        let result = self.end(mapping.with_timed(None));
        let mut ns = self.since(start);
        if matches!(result, Ok(Ended::Flushed(()))) {
            self.commits.note(ns);
            // Its own time is a part of the commit's: only its share of that counts for it.
            ns = 0;
        }
        if let (Some((class, way)), Ok(_)) = (timed, &result) {
            let share = if in_ring { self.commits.share() } else { 0 };
            self.sizes[usize::from(class)].cell.note(way, Half::Unmap, ns.saturating_add(share));
        }
        result
    }

    /// Ends all waiting mappings, with one wait for the hardware: for a queue that falls idle. Returns the number of descriptors that have
    /// ended. Such a queue calls this even if nothing waits, as the ring counts descriptors between these calls.
    ///
    /// Context: waits for hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// As [`StrictRing::commit`].
    pub fn commit(&mut self) -> Result<usize, DmaUnmapError> {
        self.commits.idle();
        let start = (self.clock)();
        let committed = match self.commit_ring() {
            // Ranges that a measurement has left are no caller's; a later commit retries them.
            Err(_) if !self.ring.has_unconfirmed() => self.ring.told().commit(0),
            result => result?,
        };
        let ns = self.since(start);
        if committed > 0 {
            self.commits.note(ns);
        }
        Ok(committed)
    }

    fn commit_ring(&mut self) -> Result<usize, DmaUnmapError> {
        let committed = self.ring.commit()?;
        self.ends.committed();
        Ok(committed)
    }

    /// The account of commits' mappings, for a caller that cannot report them.
    pub(super) fn told(&mut self) -> &mut Told {
        self.ring.told()
    }

    /// The descriptors that are unmapped and wait for a commit.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.ring.waiting()
    }

    /// Makes the device's writes of `len` bytes, from `offset` on, of an open mapping visible to the CPU: copies them, if there is a copy, in O(len);
    /// otherwise costs a fence.
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_cpu`](crate::bounce::pool::BouncePool::sync_for_cpu); [`DmaUnmapError::OtherQueue`].
    pub fn sync_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number() {
            return Err(DmaUnmapError::OtherQueue);
        }
        match mapping.kind() {
            // SAFETY: the pool's clause 1: its token is borrowed, so it does not end meanwhile, and its maker's clause 4 keeps syncs of the
            // same bytes apart. Clause 2 is the maker's clauses 1 and 3.
            Kind::Pool(_) => unsafe { self.pool.pool().sync_for_cpu(mapping.iova, offset, len) },
            Kind::Cut => {
                self.ring.device().sync_for_cpu();
                // SAFETY: as above.
                unsafe { self.ends.sync(mapping.list(), mapping.iova, (offset, len), true) }
            }
            _ => {
                self.ring.device().sync_for_cpu();
                Ok(())
            }
        }
    }

    /// Makes the CPU's writes of `len` bytes, from `offset` on, of an open mapping visible to the device: copies them, if there is a copy, in O(len);
    /// otherwise costs a fence.
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_device`](crate::bounce::pool::BouncePool::sync_for_device); [`DmaUnmapError::OtherQueue`].
    pub fn sync_for_device(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number() {
            return Err(DmaUnmapError::OtherQueue);
        }
        match mapping.kind() {
            // SAFETY: as for `sync_for_cpu`.
            Kind::Pool(_) => unsafe { self.pool.pool().sync_for_device(mapping.iova, offset, len) },
            Kind::Cut => {
                // SAFETY: as for `sync_for_cpu`.
                let synced = unsafe { self.ends.sync(mapping.list(), mapping.iova, (offset, len), false) };
                self.ring.device().sync_for_device();
                synced
            }
            _ => {
                self.ring.device().sync_for_device();
                Ok(())
            }
        }
    }

    /// The choices for each size of each used direction, smallest first, and their reasons.
    pub fn explain(&self) -> impl Iterator<Item = Explained> {
        let met = Direction::ALL.into_iter().filter(|direction| self.met[direction.index()]);
        let (untrusted, granule) = (self.pool.is_untrusted(), self.pool.pool().domain().granule().bytes());
        met.flat_map(move |direction| {
            let shapes = (0..self.classes).flat_map(|class| [(class, false), (class, true)]);
            // A trusted device has no shared ends; an untrusted one has them in every mapping below a granule.
            let occurs = move |class, shared| {
                if shared { untrusted } else { !untrusted || most_bytes(class) >= granule }
            };
            shapes.filter(move |(class, shared)| occurs(*class, *shared)).map(move |(class, shared)| {
                let size = &self.sizes[self.place(direction, class, shared)];
                size.cell.explain(class, (direction, shared), size.counts)
            })
        })
    }

    /// Nanoseconds since `start`, without the cost of the clock itself.
    fn since(&self, start: u64) -> u64 {
        (self.clock)().saturating_sub(start).saturating_sub(self.clock_ns)
    }
}

/// Commits. Open mappings stay mapped; slots that are a part of them then leak.
impl<M: Mapper, P: Platform, C: CopyMemory, K> Drop for AdaptiveRing<M, P, C, K> {
    fn drop(&mut self) {
        if !self.ends.is_empty() && self.ring.commit().is_ok() {
            self.ends.committed();
        }
    }
}
