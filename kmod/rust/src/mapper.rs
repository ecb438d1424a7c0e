//! Linux's own IOMMU driver as a [`Mapper`]: whatever IOMMU that drives writes the tables and makes hardware forget.

use alloc::vec::Vec;
use core::ffi::c_void;

use portcullis::addr::{DomainId, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, Invalidation, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Memory, Unmapped};
use portcullis::platform::Platform;

use crate::ffi::{self, Segment};

/// Pieces of a list that need no memory to be told to Linux.
const PIECES: usize = 16;
const NOTHING: Segment = Segment { addr: 0, len: 0 };

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

    /// Maps `list` to `at` on, moves that on, and returns whether it did.
    fn enter(&self, at: &mut u64, list: &[Segment], permissions: u32) -> bool {
        // SAFETY: the list is there; the caller of `map` has promised for the memory.
        let done =
            unsafe { ffi::pcs_iommu_map(self.group, *at, list.as_ptr(), list.len(), permissions) == 0 };
        if done {
            *at += list.iter().map(|piece| piece.len).sum::<u64>();
        }
        done
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

    unsafe fn map<P: Platform>(
        &self,
        _platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let permissions = told(attributes);
        let begin = range.start().get();
        let mut at = begin;
        // The list, in one part where there is memory for it.
        let mut list = list.into_iter();
        if list.size_hint() == (1, Some(1)) {
            let piece = list.next().map(|(phys, len)| Segment { addr: phys.get(), len });
            // What the shim has entered of it, it removes where it fails.
            let done = piece.is_some_and(|piece| self.enter(&mut at, &[piece], permissions));
            return if done { Ok(()) } else { Err(MapError::OutOfMemory) };
        }
        let (mut here, mut more) = ([NOTHING; PIECES], Vec::new());
        let wanted = list.size_hint().0;
        let room = if wanted > PIECES && more.try_reserve_exact(wanted).is_ok() {
            more.resize(wanted, NOTHING);
            &mut more[..]
        } else {
            &mut here[..]
        };
        let mut count = 0;
        let mut done = true;
        for (phys, len) in list {
            let piece = Segment { addr: phys.get(), len };
            match room[..count].last_mut() {
                Some(last) if last.addr.checked_add(last.len) == Some(piece.addr) => last.len += len,
                _ => {
                    if count == room.len() {
                        done = self.enter(&mut at, room, permissions);
                        count = 0;
                    }
                    room[count] = piece;
                    count += 1;
                }
            }
            if !done {
                break;
            }
        }
        if done && self.enter(&mut at, &room[..count], permissions) {
            return Ok(());
        }
        if at > begin {
            // SAFETY: the range is the caller's.
            unsafe { ffi::pcs_iommu_unmap(self.group, begin, at - begin, &mut 0) };
            gather.add(range);
        }
        Err(MapError::OutOfMemory)
    }

    fn unmap<P: Platform>(&self, _platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let mut hints = 0;
        // SAFETY: the range is the caller's.
        let bytes = unsafe { ffi::pcs_iommu_unmap(self.group, range.start().get(), range.len(), &mut hints) };
        if bytes > 0 {
            gather.add_with(range, hints);
        }
        // Linux does not say why it has removed less: virtio's driver, for one, has forgotten what it could not tell the host. So
        // devices are taken to reach the rest, and its memory is not used again.
        Unmapped { bytes, kept: range.len().saturating_sub(bytes), stale: range }
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        let hints = gather.hints();
        for request in gather.requests(DomainId(0), &self.costs()) {
            match request.invalidation {
                // Of a range that no unmap has found, Linux's driver would have to guess what was there.
                Invalidation::Range { range, .. } if hints != u64::MAX => {
                    // SAFETY: it waits for hardware, and the caller holds no CPU.
                    unsafe { ffi::pcs_iommu_sync(self.group, range.start().get(), range.last().get(), hints) }
                }
                // SAFETY: as above.
                _ => unsafe { ffi::pcs_iommu_flush(self.group) },
            }
        }
        Ok(())
    }
}
