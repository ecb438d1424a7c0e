//! A queue that copies each buffer or maps it in a ring. Protection is strict, and to the byte for an untrusted device.

mod book;
mod commits;
mod ends;
mod maps;
mod measure;
mod short;
mod unmaps;

use alloc::boxed::Box;
use core::mem::MaybeUninit;

use self::book::FIRST_TIMED;
use self::commits::Commits;
use self::ends::Ends;
use self::measure::cost_of;
use super::mapping::Kind;
use super::told::Told;
use super::{DmaDevice, RawMapping, StrictRing, StrictRingConfig};
use crate::addr::Direction;
use crate::bounce::error::DmaUnmapError;
use crate::bounce::pool::{BounceDevice, Toward};
use crate::heap::{OutOfMemory, Shared, slice, write_fields};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::setup::SetupError;

#[cfg(feature = "parts")]
pub use book::Explained;
pub(crate) use book::{Cell, Half, class_of, classes, pause_after};

/// Copies each buffer through the domain's pool, or maps it in a [`StrictRing`], whichever is cheaper.
///
/// An untrusted device never gets a granule that holds other data, so protection is to the byte. If a buffer shares its first or last granule, its
/// bytes there are copied, through slots of the pool that replace them in the ring, and the granules between them are mapped; or all of it is copied.
/// (If the pool's [`split`](crate::bounce::PoolConfig::split) is off, all of it is always copied.) A buffer in the ring ends with its batch, a copied
/// one at its unmap.
///
/// If the ring has no room for a buffer, [`map`](Self::map) fails while others wait for a commit, which makes room. If none waits, the buffer is
/// mapped outside of the ring, and ends strictly, with a wait of its own; or it is copied: if that measured cheaper or was not measured, if there are
/// no addresses or tables for a mapping, or if the device may have only its middle. All this holds under every policy of the domain.
///
/// A copy costs time by the byte, a mapping a share of the wait for hardware. Where the two cross depends on caches, on the IOMMU and on the load, so
/// it is measured. [`new`](Self::new) times both ways for each size (powers of two from 512 bytes to the pool's threshold), with shared ends and
/// without, on scratch memory. Afterwards one mapping in 61 of each size is timed (more of the first 244: about 15), and at most one in 64 of these
/// is a probe, which goes the other way so that its cost stays known; one in 4 while it is unknown. Probes cost at most 1/128 of the time of the
/// size's mappings on top, besides one probe. The choice changes if the other way was cheaper by an eighth four times in a row.
/// [`explain`](Self::explain) returns measurements and choices. The time of a commit is divided among the descriptors that end between two commits: a
/// full batch, or fewer for a queue that often falls idle and [commits](Self::commit) then.
///
/// One CPU at a time calls it. `K` is a monotonic clock in nanoseconds; its zero does not matter.
#[derive(Debug)]
pub struct AdaptiveRing<M: Mapper, P: Platform, C: CopyMemory, K> {
    ring: StrictRing<M, P>,
    pool: BounceDevice<M, P, C>,
    ends: Ends<M, P, C>,
    direction: Direction,
    /// Whether each direction was measured or used.
    met: [bool; Direction::ALL.len()],
    batch: usize,
    clock: K,
    clock_ns: u64,
    classes: usize,
    /// By direction, then without and with shared ends, then by class: see `place`.
    sizes: Box<[Size]>,
    commits: Commits,
}

/// Mappings of one size, direction and shape.
// What every mapping touches comes first, in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
struct Size {
    counts: [u64; 2],
    /// Mappings until the next timed one.
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
    /// Makes a queue of `device` for data of one direction, with a ring by `config`. `pool` is the same device in its domain's pool. Measures both
    /// ways, on scratch memory of the pool: twelve mappings of each size, and as many with shared ends if the device is untrusted. Without memory for
    /// that, or after a failed step, unmeasured sizes are copied at first, and the ring is tried soon. (Unconfirmed memory is leaked.)
    ///
    /// Context: half of the measured mappings may wait for hardware. Allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// As [`StrictRing::new`]; [`SetupError::NotTranslated`] for a device without translation; [`SetupError::OtherDomain`].
    #[cfg(feature = "parts")]
    pub fn new(
        device: &DmaDevice<M, P>,
        pool: BounceDevice<M, P, C>,
        direction: Direction,
        config: StrictRingConfig,
        clock: K,
    ) -> Result<Self, SetupError> {
        let mut queue: Self =
            crate::heap::made(|place| Self::unmeasured_in(place, device, pool, config, clock))?;
        queue.measure_toward(direction)?;
        Ok(queue)
    }

    /// As [`new`](Self::new), in `place`, without measurements. After an error `place` is uninitialised.
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
        // Last, as nothing in the place may need a drop.
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

    /// Measures one more direction, as [`new`](Self::new) does. After [`OutOfMemory`] do not use the ring.
    pub(super) fn measure_toward(&mut self, direction: Direction) -> Result<(), OutOfMemory> {
        self.direction = direction;
        self.met[direction.index()] = true;
        self.measure()
    }

    /// Marks the direction as used, and chooses for each of its sizes the cheaper way, or copying if costs are unknown.
    #[cold]
    fn begin(&mut self) {
        self.met[self.direction.index()] = true;
        let first = self.size_of(0, false);
        self.sizes[first..first + 2 * self.classes].iter_mut().for_each(|size| _ = size.cell.begin());
    }

    /// The index in `sizes`, for the direction of the mapping that is being made.
    #[inline]
    fn size_of(&self, class: usize, shared: bool) -> usize {
        self.place(self.direction, class, shared)
    }

    #[inline]
    fn place(&self, direction: Direction, class: usize, shared: bool) -> usize {
        (2 * direction.index() + usize::from(shared)) * self.classes + class
    }

    #[inline]
    pub(super) fn number(&self) -> u64 {
        self.ring.number()
    }

    /// Ends all waiting mappings, with one wait for hardware. Returns their number. Call it when the queue falls idle, even if nothing waits: the
    /// ring measures how many descriptors share a commit.
    ///
    /// Context: waits for hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// As [`StrictRing::commit`].
    pub fn commit(&mut self) -> Result<usize, DmaUnmapError> {
        self.commits.idle();
        let start = (self.clock)();
        let committed = match self.commit_ring() {
            // Only ranges left by a measurement failed; no caller has them, and a later commit retries them.
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

    /// For a caller that commits but cannot report the result: [`Told::take_back`] leaves it to the next commit.
    pub(super) fn told(&mut self) -> &mut Told {
        self.ring.told()
    }

    /// Unmapped descriptors that no commit has reported: see [`StrictRing::waiting`].
    #[inline]
    pub fn waiting(&self) -> usize {
        self.ring.waiting()
    }

    /// Makes the device's writes to `len` bytes of an open mapping, from `offset` on, visible to the CPU. O(len) if there is a copy; otherwise a
    /// fence.
    ///
    /// # Errors
    /// As [`BouncePool::sync_for_cpu`](crate::bounce::pool::BouncePool::sync_for_cpu); [`DmaUnmapError::OtherQueue`].
    #[cfg(feature = "parts")]
    pub fn sync_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Toward::Original, (offset, len))
    }

    /// As [`sync_for_cpu`](Self::sync_for_cpu), but makes the CPU's writes visible to the device.
    #[cfg(feature = "parts")]
    pub fn sync_for_device(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Toward::Buffer, (offset, len))
    }

    pub(in crate::dma) fn sync(
        &self,
        mapping: &RawMapping,
        into: Toward,
        part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number() {
            return Err(DmaUnmapError::OtherQueue);
        }
        let (device, pool) = (self.ring.device(), self.pool.pool());
        let kind = mapping.kind();
        // The pool has fences of its own. Otherwise: read after the device's writes, and copy before the CPU tells the device.
        if into == Toward::Original && !matches!(kind, Kind::Pool(_)) {
            device.sync_for_cpu();
        }
        let synced = match kind {
            // SAFETY: the pool's clause 1: the token is borrowed, so the mapping does not end meanwhile, and `map`'s clause 4 keeps syncs of the same
            // bytes apart. Clause 2 is `map`'s clauses 1 and 3.
            Kind::Pool(_) => return unsafe { pool.sync_toward(mapping.iova, part, into) },
            // SAFETY: as above.
            Kind::Cut => unsafe { self.ends.sync(mapping.list(), mapping.iova, into, part) },
            _ => Ok(()),
        };
        if into == Toward::Buffer {
            device.sync_for_device();
        }
        synced
    }

    fn since(&self, start: u64) -> u64 {
        (self.clock)().saturating_sub(start).saturating_sub(self.clock_ns)
    }
}

/// Commits. Open mappings stay mapped, and their slots leak.
impl<M: Mapper, P: Platform, C: CopyMemory, K> Drop for AdaptiveRing<M, P, C, K> {
    fn drop(&mut self) {
        if !self.ends.is_empty() && self.ring.commit().is_ok() {
            self.ends.committed();
        }
    }
}
