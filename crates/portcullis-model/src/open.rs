//! The library's calls that open memory by number, safe for simulated memory.
//!
//! Those calls are unsafe, because a device may then change memory under the CPU. Here that does no harm, whatever the number: devices of
//! the software IOMMU reach only [`Memory`], whose bytes are all atomics, and a number outside of it is a fault. So tests need no `unsafe`
//! for each mapping: `map_single` is `open_single` here, `map` is `open`, and so on, with the same arguments and results. The same goes for
//! bounce pools' calls that copy by number: `unmap` is `close`, and the syncs are `sync_cpu` and `sync_device`. And for claims about the
//! hardware: a [`PageTable`]'s `unmap` and `reclaim` are `close` and `shrink`, and a device TLB goes by `remove_tlb` and `forget_tlb`. A
//! test that calls these too early frees its own tables, whose memory stays atomics.
#![allow(unsafe_code, reason = "this is the one place that says why it is harmless")]

use std::sync::Arc;

use portcullis::addr::{
    DeviceId, Direction, DmaSegment, Iova, IovaRange, Permissions, PhysAddr, PhysSegment,
};
use portcullis::bounce::pool::BouncePool;
use portcullis::dma::{DmaDevice, DmaMapError, DmaUnmapError, RawMapping, StrictRing};
use portcullis::domain::{Domain, Linked, MapListError, Refused, Reserved};
use portcullis::heap::Shared;
use portcullis::invalidation::{Gather, InvalidationError, InvalidationQueue};
use portcullis::mapper::{Mapper, TableMapper};
use portcullis::percpu::{Marks, Turn};
use portcullis::pgtable::{Attributes, Format, MapError, PageTable, Unmapped};
use portcullis::platform::{CopyMemory, Frames, Platform};

use crate::memory::Memory;

/// Table memory or a mapper for devices of the software IOMMU only; or simulated memory that is copied.
///
/// # Safety
/// 1. Only devices of the software IOMMU, or none, reach what is mapped through it.
/// 2. Freed frames stay atomics that may be read.
/// 3. If it is [`CopyMemory`], it copies as [`Memory`] does: by atomics, whatever the numbers, and none outside the memory.
pub unsafe trait Simulated {}

// SAFETY: 1: its frames have simulated addresses, so only the software IOMMU walks tables in them. 2 and 3: all its words are atomics.
unsafe impl Simulated for Memory {}

// SAFETY: clauses 1 to 3 are `T`'s.
unsafe impl<T: Simulated> Simulated for Arc<T> {}

// SAFETY: 1 and 2: it maps in a table of `F`. 3: it copies nothing.
unsafe impl<F: Frames + Simulated, Q: InvalidationQueue, X: Format> Simulated for TableMapper<F, Q, X> {}

/// [`PageTable`], in simulated memory.
pub trait OpenTable {
    /// [`PageTable::map`].
    ///
    /// # Errors
    /// As there.
    fn open<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)>;

    /// [`PageTable::map_list`].
    ///
    /// # Errors
    /// As there.
    fn open_list<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)>;

    /// [`PageTable::map_in`], on the caller's CPU; `false` without one.
    fn open_fast<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> bool;

    /// [`PageTable::map_list_in`], in an exclusive section of the caller's CPU; `false` without one.
    fn open_list_fast<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: impl Into<Attributes>,
    ) -> bool;

    /// [`PageTable::unmap`].
    fn close<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        invalidate: &mut dyn FnMut(IovaRange) -> bool,
    ) -> Unmapped;

    /// [`PageTable::unmap_in`], on the caller's CPU; `false` without one.
    fn close_fast<P: Platform>(&self, platform: &P, range: IovaRange) -> bool;

    /// [`PageTable::reclaim`].
    ///
    /// # Errors
    /// As there.
    fn shrink<P: Platform, E>(
        &self,
        platform: &P,
        invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E>;
}

impl<F: Frames + Simulated, X: Format> OpenTable for PageTable<F, X> {
    #[inline]
    fn open<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)> {
        // SAFETY: clauses 1 to 4: only simulated devices reach it, and those only access atomics.
        unsafe { self.map(platform, range, phys, attributes) }
    }

    #[inline]
    fn open_list<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)> {
        // SAFETY: as for `open`.
        unsafe { self.map_list(platform, range, list, attributes) }
    }

    #[inline]
    fn open_fast<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> bool {
        let attributes = attributes.into();
        in_turn(platform, self.marks_for(platform), |turn| {
            // SAFETY: as for `open`.
            unsafe { self.map_in(turn, range, phys, attributes) }
        })
    }

    #[inline]
    fn open_list_fast<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: impl Into<Attributes>,
    ) -> bool {
        let attributes = attributes.into();
        in_turn(platform, self.marks_for(platform), |turn| {
            // SAFETY: as for `open`.
            unsafe { self.map_list_in(turn, range, list, attributes) }
        })
    }

    #[inline]
    fn close<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        invalidate: &mut dyn FnMut(IovaRange) -> bool,
    ) -> Unmapped {
        // SAFETY: only simulated hardware walks the table, and it reads frames as atomics, also freed ones.
        unsafe { self.unmap(platform, range, invalidate) }
    }

    #[inline]
    fn close_fast<P: Platform>(&self, platform: &P, range: IovaRange) -> bool {
        in_turn(platform, self.marks_for(platform), |turn| self.unmap_in(turn, range))
    }

    #[inline]
    fn shrink<P: Platform, E>(
        &self,
        platform: &P,
        invalidate: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        // SAFETY: as for `close`.
        unsafe { self.reclaim(platform, invalidate) }
    }
}

/// The TLBs of a [`TableMapper`]'s simulated devices.
pub trait OpenTlbs {
    /// [`TableMapper::remove_device_tlb`].
    ///
    /// # Errors
    /// As there.
    fn remove_tlb(&self, device: DeviceId) -> Result<(), InvalidationError>;

    /// [`TableMapper::forget_device_tlb`].
    fn forget_tlb(&self, device: DeviceId);
}

impl<F: Frames + Simulated, Q: InvalidationQueue, X: Format> OpenTlbs for TableMapper<F, Q, X> {
    fn remove_tlb(&self, device: DeviceId) -> Result<(), InvalidationError> {
        // SAFETY: a simulated device's cached translations lead to atomics.
        unsafe { self.remove_device_tlb(device) }
    }

    fn forget_tlb(&self, device: DeviceId) {
        // SAFETY: as for `remove_tlb`.
        unsafe { self.forget_device_tlb(device) }
    }
}

/// Runs `map` in an exclusive section of the caller's CPU, with the section flags of a table or a mapper for `platform`; `false` if there
/// are none.
#[inline]
fn in_turn<P: Platform>(
    platform: &P,
    marks: Option<&Shared<Marks>>,
    map: impl FnOnce(&Turn<'_>) -> bool,
) -> bool {
    platform.with_cpu(|cpu| {
        // SAFETY: the platform has just lent the CPU, and the section flags are for this platform.
        let turn = cpu.zip(marks).and_then(|(cpu, marks)| unsafe { marks.turn(cpu) });
        turn.is_some_and(|turn| map(&turn))
    })
}

/// [`Mapper`], of simulated devices.
pub trait OpenMapper: Mapper + Simulated {
    /// [`Mapper::map`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    fn open<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        permissions: Permissions,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        // SAFETY: only simulated devices reach it, and those only access atomics.
        unsafe { self.map(platform, range, list, permissions.into(), gather) }
    }

    /// [`Mapper::map_fast`], on the caller's CPU; `false` without one.
    #[inline]
    fn open_fast<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        permissions: Permissions,
    ) -> bool {
        in_turn(platform, self.marks(platform), |turn| {
            // SAFETY: as for `open`.
            unsafe { self.map_fast(turn, range, phys, permissions.into()) }
        })
    }
}

impl<M: Mapper + Simulated> OpenMapper for M {}

/// [`Domain`], of simulated devices.
pub trait OpenDomain {
    /// [`Domain::map`].
    ///
    /// # Errors
    /// As there.
    fn open(
        &self,
        list: &[PhysSegment],
        permissions: Permissions,
        limit: Iova,
    ) -> Result<IovaRange, MapListError>;
}

impl<M: Mapper + Simulated, P: Platform> OpenDomain for Domain<M, P> {
    #[inline]
    fn open(
        &self,
        list: &[PhysSegment],
        permissions: Permissions,
        limit: Iova,
    ) -> Result<IovaRange, MapListError> {
        // SAFETY: only simulated devices reach it, and those only access atomics.
        unsafe { self.map(list, permissions, limit) }
    }
}

/// [`DmaDevice`], simulated.
pub trait OpenDevice {
    /// [`DmaDevice::map_single`].
    ///
    /// # Errors
    /// As there.
    fn open_single(&self, phys: PhysAddr, len: u64, direction: Direction) -> Result<Iova, MapListError>;

    /// [`DmaDevice::map_sg`].
    ///
    /// # Errors
    /// As there.
    fn open_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<usize, MapListError>;
}

impl<M: Mapper + Simulated, P: Platform> OpenDevice for DmaDevice<M, P> {
    #[inline]
    fn open_single(&self, phys: PhysAddr, len: u64, direction: Direction) -> Result<Iova, MapListError> {
        // SAFETY: only simulated devices reach it, and those only access atomics.
        unsafe { self.map_single(phys, len, direction) }
    }

    #[inline]
    fn open_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<usize, MapListError> {
        // SAFETY: as for `open_single`.
        unsafe { self.map_sg(list, direction, out) }
    }
}

/// [`StrictRing`], of a simulated device.
pub trait OpenRing {
    /// [`StrictRing::map`].
    ///
    /// # Errors
    /// As there.
    fn open(&mut self, list: &[PhysSegment], direction: Direction) -> Result<RawMapping, DmaMapError>;

    /// [`StrictRing::map_sg`].
    ///
    /// # Errors
    /// As there.
    fn open_sg(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError>;
}

impl<M: Mapper + Simulated, P: Platform> OpenRing for StrictRing<M, P> {
    #[inline]
    fn open(&mut self, list: &[PhysSegment], direction: Direction) -> Result<RawMapping, DmaMapError> {
        // SAFETY: only simulated devices reach it, and those only access atomics.
        unsafe { self.map(list, direction) }
    }

    #[inline]
    fn open_sg(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        // SAFETY: as for `open`.
        unsafe { self.map_sg(list, direction, out) }
    }
}

/// [`Reserved`], addresses of simulated devices.
pub trait OpenReserved<'d, M: Mapper, P: Platform> {
    /// [`Reserved::link`].
    ///
    /// # Errors
    /// As there.
    fn open(
        self,
        list: &[PhysSegment],
        permissions: Permissions,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>>;
}

impl<'d, M: Mapper + Simulated, P: Platform> OpenReserved<'d, M, P> for Reserved<'d, M, P> {
    fn open(
        self,
        list: &[PhysSegment],
        permissions: Permissions,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>> {
        // SAFETY: only simulated devices reach it, and those only access atomics.
        unsafe { self.link(list, permissions, unconfirmed) }
    }
}

/// [`BouncePool`], of simulated memory.
pub trait OpenPool {
    /// [`BouncePool::unmap`].
    ///
    /// # Errors
    /// As there.
    fn close(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError>;

    /// [`BouncePool::sync_for_cpu`].
    ///
    /// # Errors
    /// As there.
    fn sync_cpu(&self, iova: Iova, offset: u64, len: u64) -> Result<(), DmaUnmapError>;

    /// [`BouncePool::sync_for_device`].
    ///
    /// # Errors
    /// As there.
    fn sync_device(&self, iova: Iova, offset: u64, len: u64) -> Result<(), DmaUnmapError>;
}

impl<M: Mapper, P: Platform, C: CopyMemory + Simulated> OpenPool for BouncePool<M, P, C> {
    #[inline]
    fn close(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: copies are of atomics, which any code may access at any time.
        unsafe { self.unmap(iova, len) }
    }

    #[inline]
    fn sync_cpu(&self, iova: Iova, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: as for `close`.
        unsafe { self.sync_for_cpu(iova, offset, len) }
    }

    #[inline]
    fn sync_device(&self, iova: Iova, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: as for `close`.
        unsafe { self.sync_for_device(iova, offset, len) }
    }
}
