//! The IOMMU of a virtual machine, for devices that a VMM emulates: the crate `vm-memory` translates their accesses by a [`GuestIommu`],
//! and a [`Domain`](portcullis::domain::Domain) with its queues maps there. With the feature `vm-memory`.
//!
//! ```
//! use portcullis::addr::{IovaRange, Iova, PageSize, PageSizes, Permissions, PhysAddr, PhysSegment};
//! use portcullis::domain::{Domain, Policy};
//! use portcullis::mapper::Geometry;
//! use portcullis::std_platform::StdPlatform;
//! use portcullis_linux::vmm::GuestIommu;
//! use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, IommuMemory};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory: GuestMemoryMmap<()> = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! let page = PageSize::from_shift(12).ok_or("no page size")?;
//! let aperture = IovaRange::from_bounds(Iova::new(0), Iova::new((1 << 39) - 1))?;
//! let iommu = GuestIommu::new(Geometry { aperture, page_sizes: PageSizes::default().with(page), reserved: vec![] });
//! // SAFETY: 1: the devices keep no slice of memory between accesses. 2: all addresses are the guest's.
//! let domain = Domain::new(StdPlatform::new(), unsafe { iommu.mapper() }, Policy::Strict)?;
//! // Emulated devices access memory through this.
//! let seen = IommuMemory::new(memory, iommu, true, ());
//!
//! let list = [PhysSegment { phys: PhysAddr::new(0x3000), len: 4096 }];
//! // SAFETY: the guest's page is the device's for as long as it is mapped.
//! let range = unsafe { domain.map(&list, Permissions::READ_WRITE, Iova::new(u64::MAX)) }?;
//! let at = GuestAddress(range.start().get() + 8);
//! seen.write_obj(7_u64, at)?;
//! domain.unmap(range)?;
//! assert!(seen.write_obj(8_u64, at).is_err());
//! # Ok(())
//! # }
//! ```

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;
use vm_memory::iommu::{Error, Iommu, IotlbFails, IotlbIterator};
use vm_memory::{GuestAddress, Iotlb, Permissions as Access};

use crate::pieces::{self, Piece};

/// Translates accesses of a virtual machine's devices. Clones share it.
#[derive(Debug, Clone)]
pub struct GuestIommu {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    geometry: Geometry,
    /// All translations, not a cache of them.
    tlb: RwLock<Iotlb>,
}

impl GuestIommu {
    /// Makes an empty one. Leaves out the last page of all 64 bits, whose end needs 65 bits.
    pub fn new(mut geometry: Geometry) -> Self {
        let granule = geometry.page_sizes.smallest().map_or(1, |size| size.bytes());
        let last = Iova::new(geometry.aperture.last().get().min(u64::MAX - granule));
        if let Ok(aperture) = IovaRange::from_bounds(geometry.aperture.start(), last) {
            geometry.aperture = aperture;
        }
        Self { inner: Arc::new(Inner { geometry, tlb: RwLock::default() }) }
    }

    /// A mapper for a [`Domain`](portcullis::domain::Domain), whose memory addresses are the guest's. Use it in one domain.
    ///
    /// # Safety
    /// 1. Devices whose accesses go through this use each piece of memory that [`translate`](Iommu::translate) returns only while they hold
    ///    its iterator, as the accesses of [`Bytes`](vm_memory::Bytes) do: an unmap waits for these, and for no slice that a device has
    ///    kept.
    /// 2. All memory of the domain has the guest's addresses.
    pub unsafe fn mapper(&self) -> GuestMapper {
        GuestMapper { inner: Arc::clone(&self.inner) }
    }
}

impl Inner {
    // Code under the lock panics half-way only without memory, which aborts.
    fn read(&self) -> RwLockReadGuard<'_, Iotlb> {
        self.tlb.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Iotlb> {
        self.tlb.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The untranslated parts of `range`.
fn misses(tlb: &Iotlb, range: IovaRange) -> Vec<vm_memory::iommu::IovaRange> {
    let (start, len) = (GuestAddress(range.start().get()), range.len() as usize);
    match Iotlb::lookup(tlb, start, len, Access::No) {
        Ok(_) => Vec::new(),
        Err(IotlbFails { misses, .. }) => misses,
    }
}

impl Iommu for GuestIommu {
    type IotlbGuard<'a> = RwLockReadGuard<'a, Iotlb>;

    /// O(log mappings). Blocks every map and unmap until the iterator is dropped: a thread that holds one neither maps nor unmaps, nor
    /// takes another, because that would deadlock with an unmap that waits for it.
    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Access,
    ) -> Result<IotlbIterator<RwLockReadGuard<'_, Iotlb>>, Error> {
        let refused = |reason: String| Error::CannotResolve {
            iova_range: vm_memory::iommu::IovaRange { base: iova, length },
            reason,
        };
        if iova.0.checked_add(length as u64).is_none() {
            return Err(refused("it runs past the end of the address space".to_owned()));
        }
        Iotlb::lookup(self.inner.read(), iova, length, access).map_err(
            |IotlbFails { misses, access_fails }| {
                let at = |ranges: &[vm_memory::iommu::IovaRange]| ranges.first().map(|range| range.base.0);
                refused(match (at(&misses), at(&access_fails)) {
                    (Some(at), _) => format!("nothing is mapped at {at:#x}"),
                    (None, at) => format!("the device may not do that at {:#x}", at.unwrap_or(iova.0)),
                })
            },
        )
    }
}

/// The mapper of a [`GuestIommu`].
///
/// An unmap waits for accesses in progress: a sync does not wait, and lazy protection is as strict here. Takes a lock. A crate that aborts
/// without memory allocates translations.
#[derive(Debug)]
pub struct GuestMapper {
    inner: Arc<Inner>,
}

// SAFETY:
// - 1 and 2: devices use translations under the IOTLB's lock, and each piece only while they hold it, by clause 1 of `GuestIommu::mapper`.
//   A map enters the list, and an unmap removes the range, with the lock held exclusively: so no device uses what was removed, and a sync
//   does not wait.
// - 3: a map checks all of its list before it enters anything.
// - 4: an unmap removes all of the range, which may be parts of mappings.
// - 5 to 9: there are no section flags and no fast calls; `unmap_now` is the default; the geometry is a constant.
unsafe impl Mapper for GuestMapper {
    fn geometry(&self) -> &Geometry {
        &self.inner.geometry
    }

    /// None: an unmap has waited.
    fn costs(&self) -> Costs {
        Costs { submission_ns: 0, request_ns: 0, refill_ns: 0 }
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        _: &mut Gather,
    ) -> Result<(), MapError> {
        let geometry = &self.inner.geometry;
        let pieces = pieces::checked(geometry, range, list, attributes.permissions)?;
        // Guest memory does not wrap around the last address.
        let wraps = |piece: &&Piece| piece.address.checked_add(piece.range.len() - 1).is_none();
        if let Some(piece) = pieces.iter().find(wraps) {
            let granule = geometry.page_sizes.smallest().map_or(1, |size| size.bytes());
            return Err(MapError::Misaligned { range, phys: PhysAddr::new(piece.address), granule });
        }
        let access = match (
            attributes.permissions.allows(Permissions::READ),
            attributes.permissions.allows(Permissions::WRITE),
        ) {
            (true, true) => Access::ReadWrite,
            (true, false) => Access::Read,
            (false, true) => Access::Write,
            (false, false) => Access::No,
        };
        let mut tlb = self.inner.write();
        let mut free = range.start().get();
        for hole in misses(&tlb, range) {
            if hole.base.0 != free {
                break;
            }
            free += hole.length as u64;
        }
        if free != range.start().get() + range.len() {
            return Err(MapError::AlreadyMapped { at: Iova::new(free) });
        }
        for Piece { range, address, .. } in pieces {
            let (at, to) = (GuestAddress(range.start().get()), GuestAddress(address));
            // It never fails today. A failure would leave no translation, and devices would get an error.
            let _ = tlb.set_mapping(at, to, range.len() as usize, access);
        }
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let mut tlb = self.inner.write();
        let missing = misses(&tlb, range).iter().fold(0, |sum, hole| sum + hole.length as u64);
        tlb.invalidate_mapping(GuestAddress(range.start().get()), range.len() as usize);
        gather.add(range);
        Unmapped::of(range, range.len().saturating_sub(missing))
    }

    #[inline]
    fn sync(&self, _: &Gather) -> Result<(), InvalidationError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use portcullis::addr::{DeviceId, Direction, PageSize, PageSizes, PhysSegment};
    use portcullis::dma::{DmaDomain, DmaMask, Ended, QueueConfig};
    use portcullis::domain::{Domain, Policy, UnmapError};
    use portcullis::heap::Shared;
    use portcullis::std_platform::StdPlatform;
    use vm_memory::{Bytes, GuestMemoryMmap, IommuMemory};

    use super::*;

    const PAGE: u64 = 4096;
    const ANYWHERE: Iova = Iova::new(u64::MAX);

    type Memory = GuestMemoryMmap<()>;
    type Space = Shared<Domain<GuestMapper, StdPlatform>>;

    fn machine() -> (Space, Memory, IommuMemory<Memory, GuestIommu>) {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let aperture = IovaRange::from_bounds(Iova::new(0), Iova::new((1 << 32) - 1)).unwrap();
        let page_sizes = PageSizes::default().with(PageSize::from_shift(12).unwrap());
        let iommu = GuestIommu::new(Geometry { aperture, page_sizes, reserved: vec![] });
        // SAFETY: 1: devices of the tests access memory only by `Bytes`. 2: all memory is the guest's.
        let domain = Domain::new(StdPlatform::new(), unsafe { iommu.mapper() }, Policy::Strict).unwrap();
        (domain, memory.clone(), IommuMemory::new(memory, iommu, true, ()))
    }

    fn list(pages: &[u64]) -> Vec<PhysSegment> {
        pages.iter().map(|page| PhysSegment { phys: PhysAddr::new(page * PAGE), len: PAGE }).collect()
    }

    #[test]
    fn a_device_reaches_what_is_mapped_as_it_may_and_until_the_unmap() {
        let (domain, memory, seen) = machine();
        // SAFETY: the guest's pages are the test's.
        let map = |pages: &[u64], may| unsafe { domain.map(&list(pages), may, ANYWHERE) }.unwrap();
        let both = map(&[7, 3, 4], Permissions::READ_WRITE);
        let (read, write) = (map(&[9], Permissions::READ), map(&[10], Permissions::WRITE));
        let at = |range: IovaRange, offset: u64| GuestAddress(range.start().get() + offset);
        // Across a page boundary; the next page is elsewhere in memory.
        seen.write_slice(&[5; 16], at(both, PAGE - 8)).unwrap();
        let bytes = |at| memory.read_obj::<[u8; 8]>(GuestAddress(at)).unwrap();
        assert_eq!((bytes(7 * PAGE + PAGE - 8), bytes(3 * PAGE), bytes(8 * PAGE)), ([5; 8], [5; 8], [0; 8]));
        assert!(seen.read_obj::<u8>(at(read, 0)).is_ok() && seen.write_obj(1_u8, at(write, 0)).is_ok());
        let refused = [
            seen.write_obj(1_u8, at(read, 5)).unwrap_err().to_string(),
            seen.read_obj::<u8>(at(write, 0)).unwrap_err().to_string(),
            seen.read_obj::<u8>(GuestAddress(64)).unwrap_err().to_string(),
            seen.read_obj::<u64>(GuestAddress(u64::MAX - 3)).unwrap_err().to_string(),
        ];
        let says = [
            format!("the device may not do that at {:#x}", at(read, 5).0),
            format!("the device may not do that at {:#x}", at(write, 0).0),
            "nothing is mapped at 0x40".to_owned(),
            "it runs past the end of the address space".to_owned(),
        ];
        for (refused, says) in refused.iter().zip(says) {
            assert!(refused.contains(&says), "{refused} and not {says}");
        }
        // A part can be unmapped.
        let part = IovaRange::new(Iova::new(both.start().get() + PAGE), PAGE).unwrap();
        domain.unmap(part).unwrap();
        assert!(seen.read_obj::<u8>(at(part, 0)).is_err());
        assert!(seen.read_obj::<u8>(at(both, 0)).is_ok() && seen.read_obj::<u8>(at(both, 2 * PAGE)).is_ok());
        let gone = domain.unmap(part);
        assert!(matches!(gone, Err(UnmapError::NotMapped { unmapped: 0, .. })), "{gone:?}");
    }

    #[test]
    fn addresses_in_use_and_lists_that_do_not_fit_are_refused() {
        let (domain, ..) = machine();
        let (mapper, platform) = (domain.mapper(), domain.platform());
        let map = |first: u64, pages: u64, list: &[(u64, u64)]| {
            let range = IovaRange::new(Iova::new(first * PAGE), pages * PAGE).unwrap();
            let list = list.iter().map(|(phys, len)| (PhysAddr::new(*phys), *len));
            // SAFETY: there is no device.
            unsafe { mapper.map(platform, range, list, Permissions::READ.into(), &mut Gather::new()) }
        };
        map(16, 2, &[(0, 2 * PAGE)]).unwrap();
        let taken = |page: u64| Err(MapError::AlreadyMapped { at: Iova::new(page * PAGE) });
        assert_eq!(map(15, 2, &[(0, 2 * PAGE)]), taken(16));
        assert_eq!(map(17, 2, &[(0, 2 * PAGE)]), taken(17));
        assert_eq!(map(16, 1, &[(0, PAGE)]), taken(16));
        map(18, 1, &[(0, PAGE)]).unwrap();
        assert!(matches!(map(30, 2, &[(0, PAGE)]), Err(MapError::Length { list: PAGE, .. })));
        assert!(matches!(map(30, 1, &[(1, PAGE)]), Err(MapError::Misaligned { .. })));
        assert!(matches!(map(30, 1, &[(0, 0), (0, PAGE)]), Err(MapError::Misaligned { .. })));
        assert!(matches!(map(30, 2, &[(!0xfff, 2 * PAGE)]), Err(MapError::Misaligned { .. })));
        assert!(matches!(map(1 << 20, 1, &[(0, PAGE)]), Err(MapError::BeyondAperture { .. })));
        let range = |first: u64, pages: u64| IovaRange::new(Iova::new(first * PAGE), pages * PAGE).unwrap();
        assert_eq!(mapper.unmap(platform, range(10, 20), &mut Gather::new()).bytes, 3 * PAGE);
        assert_eq!(mapper.unmap(platform, range(10, 20), &mut Gather::new()).bytes, 0);
    }

    #[test]
    fn the_end_of_all_addresses_is_left_out() {
        let all = IovaRange::from_bounds(Iova::new(PAGE), Iova::new(u64::MAX)).unwrap();
        let page_sizes = PageSizes::default().with(PageSize::from_shift(12).unwrap());
        let iommu = GuestIommu::new(Geometry { aperture: all, page_sizes, reserved: vec![] });
        // SAFETY: 1 and 2: there is no device.
        let mapper = unsafe { iommu.mapper() };
        let aperture = mapper.geometry().aperture;
        assert_eq!((aperture.start(), aperture.last()), (Iova::new(PAGE), Iova::new(u64::MAX - PAGE)));
        let range = IovaRange::new(Iova::new(u64::MAX - 2 * PAGE + 1), PAGE).unwrap();
        let platform = StdPlatform::new();
        // SAFETY: as above.
        let map = || unsafe {
            mapper.map(
                &platform,
                range,
                [(PhysAddr::new(0), PAGE)],
                Permissions::READ.into(),
                &mut Gather::new(),
            )
        };
        map().unwrap();
        assert_eq!(map(), Err(MapError::AlreadyMapped { at: range.start() }));
        assert_eq!(mapper.unmap(&platform, range, &mut Gather::new()).bytes, PAGE);
        map().unwrap();
    }

    /// Each access of a device reaches the page that the driver has mapped, or is refused; none reaches one after its unmap.
    #[test]
    fn a_queue_s_unmap_waits_for_accesses() {
        let (space, memory, seen) = machine();
        let domain =
            DmaDomain::<(GuestMapper, StdPlatform, std::convert::Infallible)>::over(space, None).unwrap();
        let device = domain.attach(DeviceId(8), DmaMask::BITS_64).unwrap();
        let mut queue = device.queue::<std::convert::Infallible>(QueueConfig::direct()).unwrap();
        let iova = std::sync::atomic::AtomicU64::new(0);
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while iova.load(relaxed) != u64::MAX {
                    let _ = seen.write_obj(1_u8, GuestAddress(iova.load(relaxed)));
                }
            });
            for round in 0..200_u64 {
                let page = GuestAddress((1 + round % 200) * PAGE);
                let mut out = [portcullis::addr::DmaSegment { iova: Iova::new(0), len: 0 }];
                // SAFETY: the guest's page is the test's.
                let mapped =
                    unsafe { queue.map_raw(&list(&[page.0 / PAGE]), Direction::FromDevice, &mut out) };
                let (mapping, _) = mapped.unwrap();
                iova.store(mapping.iova().get(), relaxed);
                assert!(matches!(queue.unmap_raw(mapping), Ok(Ended::Done(()))));
                memory.write_obj(0_u8, page).unwrap();
                std::thread::yield_now();
                assert_eq!(memory.read_obj::<u8>(page).unwrap(), 0, "{round}");
            }
            iova.store(u64::MAX, relaxed);
        });
    }
}
