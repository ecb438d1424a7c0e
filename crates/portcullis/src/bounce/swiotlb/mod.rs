//! The swiotlb pool: memory that devices reach, in slots, for machines without an IOMMU, for
//! devices that do not reach all memory, and for guests whose memory is encrypted. The invariant: no
//! two mappings share a slot, and no slot that holds bytes of one holds bytes of an earlier one.
//!
//! A mapping takes slots of the pool and copies the buffer there; syncs and the unmap copy it back.
//!
//! # What it guarantees
//! - The address in the pool keeps the buffer's low bits where the device needs them, is within
//!   the device's reach, and is aligned to a page (4 KiB) for a page or more (where no low bits are
//!   kept): `Constraints`. A mapping is at most as long as an area, less the offset that is kept.
//! - A mapping shares no slot with another mapping, and the rest of the slots that its bytes touch is
//!   zero. (Slots that round its size up keep what they held, as free ones do.) The device finds
//!   the driver's buffer in the mapping's bytes, for [`FromDevice`](Direction::FromDevice) too: the
//!   map copies the buffer there, so that bytes which the device does not write are after the unmap
//!   what they were before, as without a bounce, and not the remains of an earlier mapping.
//! - An unmap or a sync that does not name a mapping is an error that changes nothing, and so is
//!   the second unmap.
//! - The pool grows before it is full, by the platform's timer, and gives back idle memory. A full
//!   pool returns [`Pressure`], which says how much was needed and when to try again; the I/O has
//!   not failed.
//! - A map or a sync copies before all that the driver stores after it, its doorbell for one; an
//!   unmap or a sync reads what it copies after all that the driver loaded before it.
//! - Unmapping never allocates and never fails for want of memory.
//! - If the platform or the memory panics, a map leaves nothing behind; an unmap that has not freed
//!   the slots leaves the mapping, so it may be called again.
//!
//! # What it costs
//! A run of 1, 2, 4 .. 128 slots is taken from the CPU's own magazine, the most recently freed one
//! first, as its lines are still in the cache: that is a few stores on lines of the CPU's own, no
//! lock, no atomic read-modify-write. The CPU that frees a run keeps it, as it has just copied from
//! it. Runs that magazines do not have come from the areas, up to 32 at a time under one lock;
//! other numbers of slots always do, in O(areas x slots of an area) at worst. Only a pool at its
//! limit with no fitting run left in its areas takes back the runs that other CPUs keep (one
//! barrier of all CPUs); then magazines stay empty until a quarter is free again.
//!
//! The fast path is inlined into its caller (some 450 bytes for a map, and as much for an unmap): a
//! call, with results that go through memory, would be a third of its cost. A program with many
//! callers wraps it in a function.
//!
//! A mapping of up to 128 slots gets a power of two of them. Longer ones, and those of more than 64
//! slots for which no aligned run is free, get as many slots as they need, beginning at any slot that the constraints allow. Each slot has 32 bytes of metadata
//! apart from the pool, where devices do not reach them; the metadata of areas that were given back
//! stays.

mod areas;
mod bits;
mod config;
mod cpu;
mod directory;
mod hands;
#[cfg(feature = "parts")]
mod parts;
mod resize;
mod slot_meta;
mod slots;
mod usage;

pub use crate::bounce::pressure::Pressure;
pub use config::SwiotlbConfig;
#[cfg(not(feature = "parts"))]
pub(crate) use config::{Bounced, Constraints};
#[cfg(feature = "parts")]
pub use config::{Bounced, Constraints};
pub use usage::SwiotlbUsage;

use core::fmt;
use core::mem::ManuallyDrop;

use areas::Areas;
use cpu::Cpu;
use hands::Found;
use slot_meta::{Mapping, ODD, Says, SlotMeta};
use slots::Want;

use crate::addr::{Direction, Iova, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::domain::MapListError;
use crate::heap::Shared;
use crate::percpu::BiasedLock;
use crate::platform::{CopyMemory, FRAME_SIZE, Platform, events_of};
use crate::setup::SetupError;
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Mappings of a page or more are aligned to it.
const PAGE: u64 = FRAME_SIZE;

/// A pool of bounce slots.
///
/// All methods may run on any number of CPUs at once, from interrupt handlers too where the platform's CPUs allow it,
/// but for [`trim`](Self::trim), and for `map` when the pool is full.
pub struct Swiotlb<P: Platform, C: CopyMemory> {
    platform: P,
    /// Not dropped where a device may still reach some of it.
    memory: ManuallyDrop<C>,
    areas: Areas,
    cpus: BiasedLock<Cpu>,
    /// CPUs whose magazines were granted room.
    joined: AtomicU64,
    /// The pool was full, and all magazines are empty and stay so.
    scarce: AtomicBool,
    /// Incremented by each free that a caller may wait for.
    freed: AtomicU64,
    growth_asked: AtomicBool,
    /// The time at which to look for idle areas.
    trim_at_ns: AtomicU64,
    idle_ns: u64,
}

impl<P: Platform, C: CopyMemory> fmt::Debug for Swiotlb<P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Swiotlb").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Makes a pool of memory from `memory`. Allocates; takes the least memory that the pool is to
    /// have. Registers the pool with the platform for timers and released CPUs.
    ///
    /// # Errors
    /// [`SetupError::Slot`], [`SetupError::Area`] and [`SetupError::Limits`] for the configuration;
    /// [`SetupError::NoArea`] where there is no memory within reach; [`SetupError::OutOfMemory`]. Nothing is kept then.
    pub fn new(platform: P, memory: C, config: &SwiotlbConfig) -> Result<Shared<Self>, SetupError> {
        let (min, max) = config.areas()?;
        let pool = Self {
            areas: Areas::new(config, min, max)?,
            cpus: BiasedLock::new(platform.cpus(), Cpu::new)?,
            platform,
            memory: ManuallyDrop::new(memory),
            joined: AtomicU64::new(0),
            scarce: AtomicBool::new(false),
            freed: AtomicU64::new(0),
            growth_asked: AtomicBool::new(false),
            trim_at_ns: AtomicU64::new(u64::MAX),
            idle_ns: config.idle_ns,
        };
        for _ in 0..min {
            let none = SetupError::NoArea { area_bytes: config.area_bytes, reach: config.reach };
            let area = pool.areas.add(&*pool.memory, config.reach.get()).ok_or(none)?;
            pool.platform.with_cpu(|_| drop(area));
        }
        let pool = Shared::new(pool)?;
        pool.platform.register(events_of(&pool))?;
        Ok(pool)
    }

    /// What `map` does, which is public with the feature `parts`.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(crate) unsafe fn map_piece(
        &self,
        original: PhysSegment,
        direction: Direction,
        constraints: &Constraints,
    ) -> Result<Bounced, DmaMapError> {
        if let Ok((order, offset)) = self.order(original, constraints)
            && let Some(found) = self.take_own(order, offset, constraints)
        {
            // SAFETY: the caller's promise is passed on; the run is of this order, so it has room for the buffer.
            return Ok(unsafe { self.fill(found, original, direction) });
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.map_slow(original, direction, constraints) }
    }

    /// As [`map`](Self::map), for all cases that are not simple. A function of its own, so that the
    /// simple case needs no stack.
    #[cold]
    #[inline(never)]
    unsafe fn map_slow(
        &self,
        original: PhysSegment,
        direction: Direction,
        constraints: &Constraints,
    ) -> Result<Bounced, DmaMapError> {
        let (order, offset) = self.order(original, constraints)?;
        let found = self.take_slow(&Want { order, offset, len: original.len, constraints })?;
        // SAFETY: the caller's promise is passed on; what was found has room for what was wanted.
        Ok(unsafe { self.fill(found, original, direction) })
    }

    /// Records that the run that was found is the mapping of `original`, and copies that into it.
    ///
    /// # Safety
    /// As [`map`](Self::map), and the run has room for it.
    #[inline(always)]
    unsafe fn fill(&self, found: Found<'_, P, C>, original: PhysSegment, direction: Direction) -> Bounced {
        let PhysSegment { phys, len } = original;
        let Found { meta, class, offset, .. } = found;
        meta.map(&Mapping { original: phys, direction, len, offset, class });
        let start = meta.address() + offset;
        self.clear_around(start, len);
        // SAFETY: `original` by the caller's promise; the run, which has room for it, is the pool's and now this
        // mapping's.
        unsafe { self.memory.copy(phys, PhysAddr::new(start), len) };
        // Before the store by which the driver tells the device.
        fence(Ordering::Release);
        found.done();
        Bounced { phys: PhysAddr::new(start), len }
    }

    /// Checks the request. Returns the order of the smallest aligned run that would do, and the low
    /// bits of the buffer's address that are kept.
    #[inline(always)]
    fn order(&self, original: PhysSegment, constraints: &Constraints) -> Result<(u32, u64), DmaMapError> {
        MapListError::check(original, 0)?;
        let offset = original.phys.get() & constraints.min_align();
        // The sum does not wrap: the offset is of low bits of an address that `len` can be added
        // to. A run is aligned to its size, so it is at least as large as the alignment.
        let last = (offset + (original.len - 1)).max(constraints.min_align());
        // The bit length of the last slot's number: a one is appended, as zero has no logarithm.
        let slot = last >> self.areas.slot_shift();
        Ok(((slot << 1 | 1).ilog2(), offset))
    }

    /// Zeroes the rest of the slots that the mapping's bytes touch.
    #[inline(always)]
    fn clear_around(&self, start: u64, len: u64) {
        let inside = (1 << self.areas.slot_shift()) - 1;
        let (before, after) = (start & inside, (start + len).wrapping_neg() & inside);
        // SAFETY: runs are whole slots and aligned to them, and no other caller has this run.
        unsafe {
            if before != 0 {
                self.memory.zero(PhysAddr::new(start - before), before);
            }
            if after != 0 {
                self.memory.zero(PhysAddr::new(start + len), after);
            }
        }
    }

    /// What `unmap` does, which is public with the feature `parts`.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(crate) unsafe fn unmap_piece(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        if let Some(meta) = self.areas.locate_fast(phys)
            && let Says::Mapped(mapping) = meta.read()
            && meta.address() + mapping.offset == phys.get()
            && mapping.len == len
        {
            // SAFETY: the caller's promise is passed on.
            unsafe { self.end(meta, &mapping, phys) };
            return Ok(());
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.unmap_slow(phys, len) }
    }

    /// As [`unmap`](Self::unmap), for a mapping that does not begin in the first slot of its run,
    /// or whose area is not in the first place that the [directory](self::directory) has for it,
    /// and for an address without a mapping. A function of its own, so that the simple case needs
    /// no stack.
    #[inline(never)]
    unsafe fn unmap_slow(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        let (meta, mapping) = self.find(phys)?;
        let start = meta.address() + mapping.offset;
        if start != phys.get() || mapping.len != len {
            return Err(out_of_range(phys, len, (start, mapping.len)));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.end(meta, &mapping, phys) };
        Ok(())
    }

    /// Copies what the device wrote back, and takes the run.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap); it is the mapping of this metadata, and begins at `phys`.
    #[inline(always)]
    unsafe fn end(&self, meta: &SlotMeta, mapping: &Mapping, phys: PhysAddr) {
        if mapping.direction != Direction::ToDevice {
            // After the load by which the driver learnt of it from the device.
            fence(Ordering::Acquire);
            // SAFETY: the promise of the caller that mapped it.
            unsafe { self.memory.copy(phys, mapping.original, mapping.len) };
        }
        self.give(meta, mapping.class);
    }

    /// What `sync_for_cpu` does, which is public with the feature `parts`.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn piece_for_cpu(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        let (original, direction) = self.part(phys, len)?;
        if direction != Direction::ToDevice {
            // As in `unmap`.
            fence(Ordering::Acquire);
            // SAFETY: the promise of the caller that mapped it.
            unsafe { self.memory.copy(phys, original, len) };
        }
        Ok(())
    }

    /// What `sync_for_device` does, which is public with the feature `parts`.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn piece_for_device(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        let (original, direction) = self.part(phys, len)?;
        if direction != Direction::FromDevice {
            // SAFETY: the promise of the caller that mapped it.
            unsafe { self.memory.copy(original, phys, len) };
            // As in `map`.
            fence(Ordering::Release);
        }
        Ok(())
    }

    /// Bytes of a slot, of which no two mappings have the same.
    pub(crate) fn slot_bytes(&self) -> u64 {
        1 << self.areas.slot_shift()
    }

    /// Returns whether an address is in the pool, mapped or not. O(1), but see
    /// `unmap`.
    pub fn holds(&self, phys: PhysAddr) -> bool {
        self.areas.locate(phys).is_some()
    }

    /// Returns whether a request that failed with this [`Pressure`] is worth another try. Every free
    /// since, every growth and new room for one counts, so a caller that asks now and then does not
    /// wait in vain. One load.
    pub fn freed_since(&self, pressure: &Pressure) -> bool {
        self.freed.load(Ordering::Acquire) != pressure.freed
    }

    /// Returns the mapping whose run holds `phys`, with its first slot's metadata.
    #[inline]
    fn find(&self, phys: PhysAddr) -> Result<(&SlotMeta, Mapping), DmaUnmapError> {
        let meta = self.areas.locate(phys).ok_or_else(|| not_mapped(phys))?;
        match meta.read() {
            Says::Mapped(mapping) => Ok((meta, mapping)),
            Says::Inside(distance) => self.find_before(phys, distance),
            Says::Free => Err(not_mapped(phys)),
        }
    }

    /// Returns the mapping whose run begins `distance` slots before the slot that holds `phys`.
    fn find_before(&self, phys: PhysAddr, distance: u64) -> Result<(&SlotMeta, Mapping), DmaUnmapError> {
        if let Some(meta) = self.areas.before(phys, distance)
            && let Says::Mapped(mapping) = meta.read()
            && distance < if mapping.class == ODD { meta.odd_slots() as u64 } else { 1 << mapping.class }
        {
            return Ok((meta, mapping));
        }
        // The metadata is of a run that has ended.
        Err(not_mapped(phys))
    }

    /// Returns the address of the buffer's bytes for which `len` bytes at `phys` stand.
    fn part(&self, phys: PhysAddr, len: u64) -> Result<(PhysAddr, Direction), DmaUnmapError> {
        let (meta, mapping) = self.find(phys)?;
        let start = meta.address() + mapping.offset;
        let at = phys.get().checked_sub(start);
        let inside = at.filter(|at| at.checked_add(len).is_some_and(|end| end <= mapping.len));
        let original = inside.filter(|_| len > 0).and_then(|at| mapping.original.checked_add(at));
        match original {
            Some(original) => Ok((original, mapping.direction)),
            None => Err(out_of_range(phys, len, (start, mapping.len))),
        }
    }
}

/// Nothing is mapped at `phys`, where the device found it: nothing translates.
#[cold]
fn not_mapped(phys: PhysAddr) -> DmaUnmapError {
    DmaUnmapError::NotMapped { iova: Iova::new(phys.get()) }
}

/// `len` bytes at `phys` are not the mapping of `mapped` bytes at `start`, or no part of it.
#[cold]
fn out_of_range(phys: PhysAddr, len: u64, (start, mapped): (u64, u64)) -> DmaUnmapError {
    let offset = phys.get().wrapping_sub(start);
    DmaUnmapError::OutOfRange { iova: Iova::new(start), offset, len, mapped }
}
