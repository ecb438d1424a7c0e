//! Linux's own IOMMU driver as a [`Mapper`]: it writes the tables and invalidates.

use alloc::vec::Vec;
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Memory, Unmapped};
use portcullis::platform::Platform;

use crate::ffi::{self, Segment};

/// List pieces that are passed to Linux without an allocation.
const PIECES: usize = 16;

/// The translations of one of Linux's IOMMU domains.
pub struct LinuxMapper {
    group: *mut c_void,
    geometry: Geometry,
    /// Bytes of failed maps with a part that could not be removed again: see [`failed`](Self::failed).
    stays: AtomicU64,
}

/// Why a list was not mapped.
struct Failed {
    /// Bytes of the parts before the one that failed.
    done: u64,
    /// The shim's result for that one.
    code: i32,
}

// SAFETY: the group is only passed to the shim, which accepts it on any CPU.
unsafe impl Send for LinuxMapper {}
// SAFETY: as above.
unsafe impl Sync for LinuxMapper {}

impl LinuxMapper {
    /// Makes the mapper of the shim's `group`, which outlives it.
    pub fn new(group: *mut c_void, geometry: Geometry) -> Self {
        Self { group, geometry, stays: AtomicU64::new(0) }
    }

    /// Maps `list`, of `len` bytes, to `at`. Returns the shim's result.
    fn enter(&self, at: u64, list: &[Segment], len: u64, prot: i32) -> i32 {
        // SAFETY: the list exists; the caller of `map` has promised for the memory (its clauses 1 to 4).
        unsafe { ffi::pcs_iommu_map_list(self.group, at, list.as_ptr(), list.len(), len, prot) }
    }

    /// The error of a map of `range` with the shim's `code`: it has entered nothing, and the `done` bytes before it are removed.
    ///
    /// Linux may not remove all of them: virtio's driver, for one, has then dropped mappings that it could not report to the host. So no
    /// caller can retry, and from then on no sync confirms the range, nor everything: the domain leaks the addresses, and reports that
    /// devices may reach the memory. Unmaps with a sync of their own go on.
    #[cold]
    #[inline(never)]
    fn failed(&self, range: IovaRange, Failed { done, code }: Failed, gather: &mut Gather) -> MapError {
        let removed = match done {
            0 => 0,
            // SAFETY: the range is the caller's.
            _ => unsafe { ffi::pcs_iommu_unmap(self.group, range.start().get(), done, &mut 0) },
        };
        if code == ffi::STAYS || removed < done {
            // Relaxed: a caller that syncs this range got it from the caller of this map, which orders the two.
            self.stays.fetch_add(range.len(), Ordering::Relaxed);
            gather.add(range);
        } else if done > 0 {
            gather.add(range);
        }
        MapError::OutOfMemory
    }

    /// The result of a sync of everything, or of a failed map's range, after the invalidation.
    fn confirmed(&self) -> Result<(), InvalidationError> {
        match self.stays.load(Ordering::Relaxed) {
            0 => Ok(()),
            bytes => Err(InvalidationError::StillMapped { bytes }),
        }
    }

    /// Maps a list from `at` on: in one part, if there is memory for it. Out of line, because its array takes much of the stack.
    ///
    /// # Errors
    /// [`Failed`]: the earlier parts are mapped.
    #[inline(never)]
    fn map_list(
        &self,
        at: u64,
        list: impl Iterator<Item = (PhysAddr, u64)>,
        prot: i32,
    ) -> Result<(), Failed> {
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
            // SAFETY: the loop above has written the first `count`.
            let part = unsafe { room[..count].assume_init_ref() };
            match self.enter(at + done, part, len, prot) {
                0 => done += len,
                code => return Err(Failed { done, code }),
            }
        }
    }
}

/// Linux's protection bits of a mapping's attributes.
fn prot_of(attributes: Attributes) -> i32 {
    let allows = |kind, bit| if attributes.permissions.allows(kind) { bit } else { 0 };
    let memory = match attributes.memory {
        Memory::WriteBack => ffi::PROT_CACHE,
        Memory::Uncached => 0,
        Memory::Device => ffi::PROT_MMIO,
    };
    let privileged = if attributes.privileged { ffi::PROT_PRIV } else { 0 };
    allows(Permissions::READ, ffi::PROT_READ)
        | allows(Permissions::WRITE, ffi::PROT_WRITE)
        | memory
        | privileged
}

// SAFETY:
// - 1: `iommu_map` opens exactly the named memory, until `iommu_unmap_fast` and a wait.
// - 2: `iotlb_sync` returns when the range is invalidated and all accesses through it are complete, `flush_iotlb_all` when that holds for
//   everything. (They report no failure, so this does not, either.)
// - 3: a failed map removes what it has entered: the shim removes that of its call, `failed` the parts before. A remainder is never
//   confirmed: each sync of it, or of everything, is an error. (A remainder of Linux's own undo in `iommu_map`, which its driver has
//   dropped, cannot be seen.)
// - 4: `iommu_unmap_fast` removes the mappings of a range; the shim goes on behind holes. 6: see `unmap_now`.
// - 5, 7 to 9: there are no fast calls and no section flags. A panic does not return. `geometry` is a constant. All functions of the shim
//   may be called on any CPU for disjoint ranges.
unsafe impl Mapper for LinuxMapper {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn costs(&self) -> Costs {
        // Linux's drivers wait for each range of a sync.
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
        let prot = prot_of(attributes);
        let at = range.start().get();
        let mut list = list.into_iter();
        if list.size_hint() == (1, Some(1))
            && let Some((phys, len)) = list.next()
        {
            // SAFETY: clauses 1 to 4 for the memory, and the range, are the caller's.
            let code = unsafe { ffi::pcs_iommu_map(self.group, at, phys.get(), len, prot) };
            return if code == 0 {
                Ok(())
            } else {
                Err(self.failed(range, Failed { done: 0, code }, gather))
            };
        }
        self.map_list(at, list, prot).map_err(|failed| self.failed(range, failed, gather))
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
        // SAFETY: the range is the caller's. The shim only waits for hardware, and the caller holds no CPU of the platform: so any context
        // of Linux's DMA API will do, with interrupts on or off. On return, the hardware has invalidated all that the call removed, and
        // everything if that is less than the range (`pcs_iommu_unmap_now` in portcullis.h): the meaning of `Ok`.
        let bytes = unsafe { ffi::pcs_iommu_unmap_now(self.group, range.start().get(), range.len()) };
        let confirmed = if bytes < range.len() { self.confirmed() } else { Ok(()) };
        (Self::unmapped(range, bytes), confirmed)
    }

    #[inline]
    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        match gather.only() {
            // For a range without an unmap, Linux's driver would have to guess its mappings.
            Some(range) if gather.hints() != u64::MAX => self.sync_range_with(range, gather.hints()),
            _ => return self.sync_all(gather),
        }
        Ok(())
    }
}

impl LinuxMapper {
    /// Linux does not say why it has removed less: virtio's driver, for one, has dropped mappings that it could not report to the host. So
    /// devices may reach the rest, and its memory is not reused.
    #[inline]
    fn unmapped(range: IovaRange, bytes: u64) -> Unmapped {
        Unmapped { bytes, kept: range.len().saturating_sub(bytes), stale: range }
    }

    fn sync_range_with(&self, range: IovaRange, hints: u64) {
        // SAFETY: it only waits for hardware, and the caller holds no CPU.
        unsafe { ffi::pcs_iommu_sync(self.group, range.start().get(), range.last().get(), hints) }
    }

    /// Invalidates several ranges, or all. Out of line, because the list of ranges takes much of the stack.
    #[cold]
    #[inline(never)]
    fn sync_all(&self, gather: &Gather) -> Result<(), InvalidationError> {
        // Specific hints: unmaps have removed all of the gather.
        let is_removed = gather.hints() != u64::MAX || gather.is_empty();
        let by_range = |range| self.sync_range_with(range, gather.hints());
        if !is_removed || !gather.each_range(&self.costs(), by_range) {
            // SAFETY: as for `unmap_now`.
            unsafe { ffi::pcs_iommu_flush(self.group) };
        }
        if is_removed { Ok(()) } else { self.confirmed() }
    }
}
