//! The swiotlb pool: slots of memory that devices reach, for machines without an IOMMU, for devices that do not reach all memory, and for guests
//! whose memory is encrypted. No two mappings share a slot, and a slot with bytes of one has no bytes of an earlier one.
//!
//! A map takes slots of the pool and copies the buffer there; syncs and the unmap copy it back.
//!
//! # What it guarantees
//! - The address in the pool keeps the buffer's low bits where the device needs them, is within the device's reach, and is aligned to a page (4 KiB)
//!   for a page or more (where no low bits are kept): `Constraints`. A mapping is at most as long as an area, less the kept offset.
//! - A mapping shares no slot with another mapping, and the rest of the slots that its bytes touch is zero. (Slots that round its size up hold old
//!   bytes, as free ones do.) The device finds the driver's buffer in the mapping's bytes, even for [`FromDevice`](Direction::FromDevice): the map
//!   copies the buffer there, so bytes that the device does not write are unchanged after the unmap, as without a bounce, and not the remains of an
//!   earlier mapping.
//! - An unmap or a sync that does not name a mapping is an error that changes nothing, and so is a second unmap.
//! - The pool grows before it is full, by the platform's timer, and frees idle memory. A full pool returns [`DmaMapError::Pressure`], which says how much was
//!   needed; the I/O has not failed, and may be tried again.
//! - A map or a sync copies before all later stores of the driver, such as its doorbell; an unmap or a sync copies after all earlier loads of the
//!   driver.
//! - Unmaps never allocate and never fail for want of memory.
//! - If the platform or the memory panics, a map leaves nothing behind; an unmap that has not freed the slots leaves the mapping, and may be called
//!   again.
//!
//! # What it costs
//! A run of 1, 2, 4 .. 128 slots comes from the CPU's own magazine, the most recently freed one first, whose lines are still in the cache: a few
//! stores on lines of the CPU's own, no lock, no atomic read-modify-write. The CPU that frees a run keeps it, as it has just copied from it.
//! Magazines are refilled from the areas, up to 32 runs at a time under one lock; other numbers of slots always come from there, in O(areas x slots
//! of an area) at worst. Only a pool at its limit without a fitting run in its areas drains other CPUs' magazines (one barrier of all CPUs); then
//! magazines stay empty until a quarter is free again.
//!
//! The fast path is inlined into its caller (some 450 bytes for a map, and as much for an unmap): a call, with results that go through memory, would
//! be a third of its cost. A program with many callers wraps it in a function.
//!
//! A mapping of up to 128 slots gets a power of two of them. Longer ones, and those above 64 slots without an aligned free run, get exactly the slots
//! that they need, from any slot that the constraints allow. Each slot has 32 bytes of metadata apart from the pool, where devices do not reach
//! them; the metadata of removed areas stays.

mod areas;
mod bits;
mod config;
mod cpu;
mod directory;
#[cfg(feature = "parts")]
mod parts;
mod resize;
mod slot_meta;
mod slots;
mod usage;

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
use slot_meta::{Mapping, ODD, Says, SlotMeta};
use slots::{Found, Want};

use crate::addr::{Direction, Iova, PhysAddr, PhysSegment};
use crate::bounce::deadline::Deadline;
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::bounce::pool::Toward;
use crate::domain::MapListError;
use crate::heap::Shared;
use crate::percpu::BiasedLock;
use crate::platform::{CopyMemory, FRAME_SIZE, Platform, events_of};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Ordering, fence};

/// Mappings of a page or more are aligned to it.
const PAGE: u64 = FRAME_SIZE;

/// A pool of bounce slots.
///
/// Context: any number of CPUs may call its methods at once, and interrupt handlers, too, where the platform's CPUs allow it; except
/// [`trim`](Self::trim), and `map` when the pool is full.
pub struct Swiotlb<P: Platform, C: CopyMemory> {
    platform: P,
    /// Not dropped where a device may still reach some of it.
    memory: ManuallyDrop<C>,
    areas: Areas,
    cpus: BiasedLock<Cpu>,
    /// CPUs whose magazines were granted room.
    joined: AtomicU64,
    /// Whether magazines are granted room: a state of `slots`.
    supply: AtomicU64,
    /// When the timer grows the pool, and when it looks for idle areas.
    growth: Deadline,
    trim: Deadline,
    idle_ns: u64,
}

impl<P: Platform, C: CopyMemory> fmt::Debug for Swiotlb<P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Swiotlb").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Makes a pool of memory from `memory`, and registers it with the platform for timers and released CPUs.
    ///
    /// Context: allocates its metadata and its least memory.
    ///
    /// # Errors
    /// [`SetupError::Slot`], [`SetupError::Area`] and [`SetupError::Limits`] for the configuration; [`SetupError::NoArea`] without memory within
    /// reach; [`SetupError::OutOfMemory`]. Nothing is kept then.
    pub fn new(platform: P, memory: C, config: &SwiotlbConfig) -> Result<Shared<Self>, SetupError> {
        let (min, max) = config.areas()?;
        let pool = Self {
            areas: Areas::new(config, min, max)?,
            cpus: BiasedLock::new(platform.cpus(), Cpu::new)?,
            platform,
            memory: ManuallyDrop::new(memory),
            joined: AtomicU64::new(0),
            supply: AtomicU64::new(slots::PLENTY),
            growth: Deadline::default(),
            trim: Deadline::default(),
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

    /// `map`, which is public with the feature `parts`.
    ///
    /// # Safety
    /// As for `map`: 1. `original` is memory that the CPU reaches, none of it the pool's, until it is unmapped. 2. Only devices access it while this
    /// call, a sync or the unmap of this mapping runs.
    #[inline(always)]
    pub(crate) unsafe fn map_piece(
        &self,
        original: PhysSegment,
        direction: Direction,
        constraints: &Constraints,
    ) -> Result<Bounced, DmaMapError> {
        if let Ok(want) = self.want(original, constraints)
            && let Some(found) = self.take_own(&want)
        {
            // SAFETY: clauses 1 and 2 are the caller's; the run is of this order, so it has room (3).
            return Ok(unsafe { self.fill(found, original, direction) });
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.map_slow(original, direction, constraints) }
    }

    /// As `map`, for all other cases. Out of line, so that the fast path needs no stack.
    ///
    /// # Safety
    /// As [`map_piece`](Self::map_piece).
    #[cold]
    #[inline(never)]
    unsafe fn map_slow(
        &self,
        original: PhysSegment,
        direction: Direction,
        constraints: &Constraints,
    ) -> Result<Bounced, DmaMapError> {
        let found = self.take_slow(&self.want(original, constraints)?)?;
        // SAFETY: clauses 1 and 2 are the caller's; the found run has room for the request (3).
        Ok(unsafe { self.fill(found, original, direction) })
    }

    /// Records that the found run is the mapping of `original`, and copies that into it.
    ///
    /// # Safety
    /// As [`map_piece`](Self::map_piece), clauses 1 and 2; 3. the run has room for it.
    #[inline(always)]
    unsafe fn fill(&self, found: Found<'_, P, C>, original: PhysSegment, direction: Direction) -> Bounced {
        let PhysSegment { phys, len } = original;
        let Found { meta, class, offset, .. } = found;
        meta.map(&Mapping { original: phys, direction, len, offset, class });
        let start = meta.address() + offset;
        self.clear_around(start, len);
        // SAFETY: `copy`'s clauses: `original` by the caller's clauses 1 and 2; the run is the pool's and now this mapping's, with room by clause 3.
        unsafe { self.memory.copy(phys, PhysAddr::new(start), len) };
        // Before the store by which the driver tells the device.
        fence(Ordering::Release);
        // The mapping has its slots now.
        core::mem::forget(found);
        Bounced { phys: PhysAddr::new(start), len }
    }

    /// Checks the request.
    #[inline(always)]
    fn want<'a>(&self, original: PhysSegment, constraints: &'a Constraints) -> Result<Want<'a>, DmaMapError> {
        MapListError::check(original, 0)?;
        let offset = original.phys.get() & constraints.min_align;
        // The sum does not wrap: the offset is at most the address, to which `len` can be added. A run is aligned to its size, so it keeps the low
        // bits if it is larger than their mask.
        let last = (offset + (original.len - 1)).max(constraints.min_align);
        // The bit length of the last slot's number; the appended one is for zero, which has no logarithm.
        let slot = last >> self.areas.slot_shift;
        Ok(Want { order: (slot << 1 | 1).ilog2(), offset, len: original.len, constraints })
    }

    /// Zeroes the rest of the slots that the mapping's bytes touch.
    #[inline(always)]
    fn clear_around(&self, start: u64, len: u64) {
        let inside = (1 << self.areas.slot_shift) - 1;
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

    /// `unmap`, which is public with the feature `parts`.
    ///
    /// # Safety
    /// As for `unmap`: 1. No other call for the same mapping runs. 2. Clauses 1 and 2 of its [map](Self::map_piece) hold until this returns.
    #[inline(always)]
    pub(crate) unsafe fn unmap_piece(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        if let Some(meta) = self.areas.locate_fast(phys)
            && let Says::Mapped(mapping) = meta.read()
            && meta.address() + mapping.offset == phys.get()
            && mapping.len == len
        {
            // SAFETY: clauses 1 and 2 are the caller's; `meta` records this mapping (3).
            unsafe { self.end(meta, &mapping, phys) };
            return Ok(());
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.unmap_slow(phys, len) }
    }

    /// As `unmap`, for a mapping that does not begin in the first slot of its run, or whose area is not in its first place of the
    /// [directory](self::directory), and for an address without a mapping. Out of line, so that the fast path needs no stack.
    ///
    /// # Safety
    /// As [`unmap_piece`](Self::unmap_piece).
    #[inline(never)]
    unsafe fn unmap_slow(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        let (meta, mapping) = self.find(phys)?;
        let start = meta.address() + mapping.offset;
        if start != phys.get() || mapping.len != len {
            return Err(out_of_range(phys, len, (start, mapping.len)));
        }
        // SAFETY: clauses 1 and 2 are the caller's; `meta` records this mapping (3).
        unsafe { self.end(meta, &mapping, phys) };
        Ok(())
    }

    /// Copies the device's bytes back, and frees the run.
    ///
    /// # Safety
    /// As [`unmap_piece`](Self::unmap_piece), clauses 1 and 2; 3. `meta` records `mapping`, which begins at `phys`.
    #[inline(always)]
    unsafe fn end(&self, meta: &SlotMeta, mapping: &Mapping, phys: PhysAddr) {
        if mapping.direction != Direction::ToDevice {
            // After the load by which the driver learnt of it from the device.
            fence(Ordering::Acquire);
            // SAFETY: `copy`'s clauses: the original by clause 2, and nobody else uses the run by clause 1.
            unsafe { self.memory.copy(phys, mapping.original, mapping.len) };
        }
        self.give(meta, mapping.class);
    }

    /// `sync_for_cpu` and `sync_for_device`, which are public with the feature `parts`.
    ///
    /// # Safety
    /// As for these: 1. The mapping is not unmapped meanwhile, and no other sync of the same bytes runs. 2. Clauses 1 and 2 of its
    /// [map](Self::map_piece) hold until this returns.
    pub(crate) unsafe fn sync_piece(
        &self,
        phys: PhysAddr,
        len: u64,
        into: Toward,
    ) -> Result<(), DmaUnmapError> {
        let (original, direction) = self.part(phys, len)?;
        // The fences as in `end` and `fill`.
        match into {
            // SAFETY: `copy`'s clauses: the original by clause 2, and nobody else uses the run's bytes by clause 1.
            Toward::Original if direction != Direction::ToDevice => unsafe {
                fence(Ordering::Acquire);
                self.memory.copy(phys, original, len);
            },
            // SAFETY: as above.
            Toward::Buffer if direction != Direction::FromDevice => unsafe {
                self.memory.copy(original, phys, len);
                fence(Ordering::Release);
            },
            _ => {}
        }
        Ok(())
    }

    /// Bytes of a slot, which no two mappings share.
    pub(crate) fn slot_bytes(&self) -> u64 {
        1 << self.areas.slot_shift
    }

    /// Whether an address is in the pool, mapped or not. O(1); for an address in no area O(areas) at worst, after long growing and shrinking.
    pub fn holds(&self, phys: PhysAddr) -> bool {
        self.areas.locate(phys).is_some()
    }

    /// The mapping whose run contains `phys`, and its first slot's metadata.
    #[inline]
    fn find(&self, phys: PhysAddr) -> Result<(&SlotMeta, Mapping), DmaUnmapError> {
        let meta = self.areas.locate(phys).ok_or_else(|| not_mapped(phys))?;
        match meta.read() {
            Says::Mapped(mapping) => Ok((meta, mapping)),
            Says::Inside(distance) => self.find_before(phys, distance),
            Says::Free => Err(not_mapped(phys)),
        }
    }

    /// The mapping whose run begins `distance` slots before the slot that contains `phys`.
    fn find_before(&self, phys: PhysAddr, distance: u64) -> Result<(&SlotMeta, Mapping), DmaUnmapError> {
        let first = phys.get().checked_sub(distance << self.areas.slot_shift);
        if let Some(meta) = first.and_then(|first| self.areas.locate(PhysAddr::new(first)))
            && let Says::Mapped(mapping) = meta.read()
            && distance < if mapping.class == ODD { meta.odd_slots() as u64 } else { 1 << mapping.class }
        {
            return Ok((meta, mapping));
        }
        // The metadata is of a run that has ended.
        Err(not_mapped(phys))
    }

    /// The address in the buffer of the `len` bytes at `phys`.
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

/// Nothing is mapped at `phys`, which is also the device's address.
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
