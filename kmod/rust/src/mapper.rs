//! Linux's own IOMMU driver as a [`Mapper`]: whatever IOMMU that drives writes the tables and makes hardware forget.

use alloc::vec::Vec;
use core::ffi::c_void;
use core::mem::MaybeUninit;

use portcullis::addr::{DomainId, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, Invalidation, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Memory, Unmapped};
use portcullis::platform::Platform;

use crate::ffi::{self, Segment};

/// Pieces of a list that need no memory to be told to Linux.
const PIECES: usize = 16;

/// The translations of one IOMMU domain of Linux's.
pub struct LinuxMapper {
    group: *mut c_void,
    geometry: Geometry,
}

// SAFETY: the group is only given to the shim, which takes it on any CPU.
unsafe impl Send for LinuxMapper {}
// SAFETY: as above.
unsafe impl Sync for LinuxMapper {}

impl LinuxMapper {
    /// Makes the mapper of the shim's `group`, which outlives it.
    pub fn new(group: *mut c_void, geometry: Geometry) -> Self {
        Self { group, geometry }
    }

    /// Maps `list`, of `len` bytes, to `at`, and returns whether it did.
    fn enter(&self, at: u64, list: &[Segment], len: u64, permissions: u32) -> bool {
        // SAFETY: the list is there; the caller of `map` has promised for the memory.
        unsafe { ffi::pcs_iommu_map_list(self.group, at, list.as_ptr(), list.len(), len, permissions) == 0 }
    }

    /// Maps a list to `at` on: in one part, where there is memory for it. By itself, as its room takes much of the stack.
    ///
    /// # Errors
    /// How many bytes were mapped before a part failed.
    #[inline(never)]
    fn map_list(
        &self,
        at: u64,
        list: impl Iterator<Item = (PhysAddr, u64)>,
        permissions: u32,
    ) -> Result<(), u64> {
        let wanted = list.size_hint().0;
        let (mut here, mut more) = ([const { MaybeUninit::uninit() }; PIECES], Vec::new());
        let room = if wanted > PIECES && more.try_reserve_exact(wanted).is_ok() {
            more.spare_capacity_mut()
        } else {
            &mut here
        };
        let (mut done, mut list) = (0, list.fuse());
        loop {
            let (mut len, mut count) = (0, 0);
            for (place, (phys, bytes)) in room.iter_mut().zip(&mut list) {
                place.write(Segment { addr: phys.get(), len: bytes });
                (len, count) = (len + bytes, count + 1);
            }
            if count == 0 {
                return Ok(());
            }
            // SAFETY: so many were written.
            let part = unsafe { room[..count].assume_init_ref() };
            if !self.enter(at + done, part, len, permissions) {
                return Err(done);
            }
            done += len;
        }
    }
}

/// What Linux is told of a mapping's attributes.
fn told(attributes: Attributes) -> u32 {
    let allows = |kind, bit| if attributes.permissions.allows(kind) { bit } else { 0 };
    let memory = match attributes.memory {
        Memory::WriteBack => 0,
        Memory::Uncached => ffi::UNCACHED << 8,
        Memory::Device => ffi::MMIO << 8,
    };
    let privileged = if attributes.privileged { ffi::PRIVILEGED << 8 } else { 0 };
    allows(Permissions::READ, ffi::READ) | allows(Permissions::WRITE, ffi::WRITE) | memory | privileged
}

// SAFETY: `iommu_map` opens just the memory named, and undoes what it entered where it fails (the shim does so for a list); what a failed
// map of several parts has entered is removed and gathered here. `iommu_unmap_fast` removes what is mapped of a range; the shim goes
// on behind holes. `iotlb_sync` and `flush_iotlb_all` return when hardware has forgotten the range, or everything, and all
// accesses by it are complete. They may be called on any CPU for disjoint ranges. Nothing has marks.
unsafe impl Mapper for LinuxMapper {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn costs(&self) -> Costs {
        // Each range of a sync is a wait of its own for Linux's drivers.
        Costs { request_ns: Costs::BARE_METAL.submission_ns, ..Costs::BARE_METAL }
    }

    #[inline(always)]
    unsafe fn map<P: Platform>(
        &self,
        _platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let permissions = told(attributes);
        let at = range.start().get();
        let mut list = list.into_iter();
        if list.size_hint() == (1, Some(1))
            && let Some((phys, len)) = list.next()
        {
            // SAFETY: the caller's promise. What the shim has entered of it, it removes where it fails.
            let mapped = unsafe { ffi::pcs_iommu_map(self.group, at, phys.get(), len, permissions) };
            return if mapped == 0 { Ok(()) } else { Err(MapError::OutOfMemory) };
        }
        match self.map_list(at, list, permissions) {
            Ok(()) => Ok(()),
            Err(done) => {
                if done > 0 {
                    // SAFETY: the range is the caller's.
                    unsafe { ffi::pcs_iommu_unmap(self.group, at, done, &mut 0) };
                    gather.add(range);
                }
                Err(MapError::OutOfMemory)
            }
        }
    }

    fn unmap<P: Platform>(&self, _platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let mut hints = 0;
        // SAFETY: the range is the caller's.
        let bytes = unsafe { ffi::pcs_iommu_unmap(self.group, range.start().get(), range.len(), &mut hints) };
        if bytes > 0 {
            gather.add_with(range, hints);
        }
        Self::unmapped(range, bytes)
    }

    #[inline]
    fn unmap_now<P: Platform>(
        &self,
        _platform: &P,
        range: IovaRange,
    ) -> (Unmapped, Result<(), InvalidationError>) {
        // SAFETY: the range is the caller's, who holds no CPU.
        let bytes = unsafe { ffi::pcs_iommu_unmap_now(self.group, range.start().get(), range.len()) };
        (Self::unmapped(range, bytes), Ok(()))
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        match gather.only() {
            // Of a range that no unmap has found, Linux's driver would have to guess what was there.
            Some(range) if gather.hints() != u64::MAX => self.sync_range_with(range, gather.hints()),
            _ => self.sync_all(gather),
        }
        Ok(())
    }
}

impl LinuxMapper {
    /// Linux does not say why it has removed less: virtio's driver, for one, has forgotten what it could not tell the host. So
    /// devices are taken to reach the rest, and its memory is not used again.
    #[inline]
    fn unmapped(range: IovaRange, bytes: u64) -> Unmapped {
        Unmapped { bytes, kept: range.len().saturating_sub(bytes), stale: range }
    }

    fn sync_range_with(&self, range: IovaRange, hints: u64) {
        // SAFETY: it waits for hardware, and the caller holds no CPU.
        unsafe { ffi::pcs_iommu_sync(self.group, range.start().get(), range.last().get(), hints) }
    }

    /// Makes hardware forget several ranges, or all. By itself, as the requests take much of the stack.
    #[cold]
    #[inline(never)]
    fn sync_all(&self, gather: &Gather) {
        for request in &gather.requests(DomainId(0), &self.costs()) {
            match request.invalidation {
                Invalidation::Range { range, .. } if gather.hints() != u64::MAX => {
                    self.sync_range_with(range, gather.hints())
                }
                // SAFETY: as above.
                _ => unsafe { ffi::pcs_iommu_flush(self.group) },
            }
        }
    }
}
