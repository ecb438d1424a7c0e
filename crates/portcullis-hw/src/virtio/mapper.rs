//! The mapper of a domain, by requests.

use alloc::sync::Arc;
use alloc::vec::Vec;

use arrayvec::ArrayVec;
use portcullis::addr::{DeviceId, DomainId, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, GATHER_RANGES, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;

use super::layout::{answer, request};
use super::pci::NarrowRegisters;
use super::requests::{BATCH, Failure};
use super::space::{Asked, Entered, Leaving, Piece, Runs, Space};
use super::unit::Unit;
use crate::domain::UnitMapper;
use crate::host::{Host, UnitError};

/// Costs of requests, from `portcullis-trace`'s profile `virtio-iommu`: 4.9 us for an unmap (measured in a guest whose host was emulated),
/// and the middle of the costs of pages in large VFIO calls. A flush removes only stale translations, so no device refetches anything.
const COSTS: Costs = Costs { submission_ns: 4_900, request_ns: 57, refill_ns: 0 };

/// Costs that make a gather list each of its ranges.
const EACH_RANGE: Costs = Costs { refill_ns: u32::MAX, ..COSTS };

/// Retries of a map while concurrent unmaps leave stale pieces at its addresses.
const TRIES: usize = 4;

/// The mapper of one domain of a [`Unit`]: see [`Unit::mapper`].
///
/// A map sends one request for each physically contiguous piece, up to 64 with one doorbell, and waits for the answers. An unmap sends
/// nothing and waits for nothing: the next [`sync`](Mapper::sync) of its gather sends one request for each run of adjacent pieces, and
/// waits once for up to 64. So with lazy protection a flush pays for all unmaps of its window together. While no endpoint is attached, the
/// device has no such domain: then the mapper records mappings, and sends them when the first endpoint is attached.
///
/// The device unmaps only whole pieces. An unmap of a part of a piece removes nothing of it: the piece is reported as
/// [kept](Unmapped::kept). (To unmap all of it and remap the rest would refuse accesses beside the part.)
///
/// An ordered map in the global allocator's memory, behind a lock, has all mappings: O(log n) for each piece. A flush of everything visits
/// all pieces, up to 1,024 with the lock held.
///
/// Context: not for interrupt handlers, which would deadlock on a lock of the CPU that they interrupted.
#[derive(Debug)]
pub struct RequestMapper<H: Host> {
    unit: Arc<Unit<H>>,
    space: Arc<Space>,
    number: DomainId,
    geometry: Geometry,
}

impl<H: Host> RequestMapper<H>
where
    H::Registers: NarrowRegisters,
{
    pub(super) fn new(unit: Arc<Unit<H>>, space: Arc<Space>, number: DomainId, geometry: Geometry) -> Self {
        Self { unit, space, number, geometry }
    }

    /// The domain's number.
    pub fn number(&self) -> DomainId {
        self.number
    }

    /// Attaches `device` to this domain. First reads which addresses the device reserves, if the unit can tell. The first device waits
    /// until the unit has mapped all that is recorded. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::Attached`], [`UnitError::NoSuchDevice`]; [`UnitError::Reserved`] if the domain may map an address that the device
    /// reserves; [`UnitError::Refused`]: nothing has changed. [`UnitError::TimedOut`], [`UnitError::Incomplete`]: the device counts as
    /// attached, and may be refused.
    pub fn attach(&self, device: DeviceId) -> Result<(), UnitError> {
        self.unit.attach(device, &self.space, (&self.geometry, &[]))
    }

    /// Enters pieces, and requests their mapping. `entered` is then the address up to which the device may have mapped anything.
    fn enter<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        batch: &[Piece],
        entered: &mut Option<u64>,
    ) -> Result<(), MapError> {
        let (Some(first), Some(last)) = (batch.first(), batch.last()) else { return Ok(()) };
        for _ in 0..TRIES {
            match platform.with_cpu(|_| self.space.enter(batch)) {
                Entered::Recorded => {
                    *entered = Some(last.last);
                    return Ok(());
                }
                Entered::Entering => {
                    *entered = Some(last.last);
                    return self.have_mapped(platform, range, batch);
                }
                Entered::Occupied(at) => return Err(MapError::AlreadyMapped { at }),
                Entered::Stale => {
                    self.remove(&[(first.first, last.last)]).map_err(|_| MapError::Unconfirmed)?;
                }
            }
        }
        Err(MapError::Unconfirmed)
    }

    fn have_mapped<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        batch: &[Piece],
    ) -> Result<(), MapError> {
        let map =
            |piece: &Piece| request::map(self.space.number, piece.first, piece.last, piece.phys, piece.flags);
        let asked = Asked(&self.space, batch);
        let mapped = self.unit.requests.carry_out(&self.unit.host, batch.iter().map(map), &[answer::OK]);
        platform.with_cpu(|_| drop(asked));
        mapped.map_err(|failure| match failure {
            Failure::Refused { status: answer::NOMEM, .. } => MapError::OutOfMemory,
            Failure::Refused { status: answer::RANGE, .. } => {
                MapError::BeyondAperture { range, last: self.geometry.aperture.last() }
            }
            Failure::Refused { status: answer::INVAL, index } => {
                let first = batch.get(index).map_or(range.start().get(), |piece| piece.first);
                MapError::AlreadyMapped { at: portcullis::addr::Iova::new(first) }
            }
            Failure::Refused { .. } | Failure::TimedOut { .. } => MapError::Unconfirmed,
        })
    }

    /// Enters a list, batch by batch. `entered` is then the address up to which the device may have mapped anything.
    fn enter_list<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        flags: u32,
        entered: &mut Option<u64>,
    ) -> Result<(), MapError> {
        let granule = self.geometry.page_sizes.smallest().map_or(1, |size| size.bytes());
        let mut batch = ArrayVec::<Piece, BATCH>::new();
        // Bytes of the range without memory yet.
        let mut left = range.len();
        for (phys, len) in list {
            let misaligned = range.start().get() | range.len() | phys.get() | len;
            if misaligned & (granule - 1) != 0 {
                return Err(MapError::Misaligned { range, phys, granule });
            }
            let Some(last) = len.checked_sub(1) else { continue };
            if len > left {
                let list = (range.len() - left).saturating_add(len);
                return Err(MapError::Length { range, list });
            }
            if phys.checked_add(last).is_none() {
                return Err(MapError::BeyondPhysical { phys, len, last: PhysAddr::new(u64::MAX) });
            }
            // Inside the range, as is all that follows.
            let first = range.start().get() + (range.len() - left);
            left -= len;
            let (phys, last) = (phys.get(), first + last);
            match batch.last_mut() {
                Some(piece) if piece.phys.checked_add(first - piece.first) == Some(phys) => {
                    piece.last = last;
                }
                _ => {
                    if batch.is_full() {
                        self.enter(platform, range, &batch, entered)?;
                        batch.clear();
                    }
                    batch.push(Piece { first, last, phys, flags });
                }
            }
        }
        if left > 0 {
            return Err(MapError::Length { range, list: range.len() - left });
        }
        self.enter(platform, range, &batch, entered)
    }

    /// Marks mappings in `range`, up to the address `last`, as unmapped. Returns what was removed and what was kept.
    fn unlink<P: Platform>(&self, platform: &P, range: IovaRange, last: u64) -> Unmapped {
        let mut unmapped = Unmapped::of(range, 0);
        let mut from = Some(range.start().get());
        while from.is_some() {
            let some = platform.with_cpu(|_| self.space.unlink(&mut from, last));
            // Each byte of one range counts once, so no overflow.
            unmapped.bytes += some.bytes;
            unmapped.kept += some.kept;
        }
        unmapped
    }

    /// Unmaps stale pieces in `ranges` (first to last address of each), and waits for the device's answers, including those to other CPUs
    /// about them.
    fn remove(&self, ranges: &[(u64, u64)]) -> Result<(), InvalidationError> {
        let host = &self.unit.host;
        let began = host.now_ns();
        loop {
            let (mut search, mut more) = (Space::search(ranges), true);
            while more {
                let mut runs = Runs::new();
                while more && !runs.is_full() {
                    more = self.space.take_stale(ranges, &mut search, &mut runs);
                }
                let unmap = |(first, last): &(u64, u64)| request::unmap(self.space.number, *first, *last);
                // Without the domain nothing is mapped there.
                let leaving = Leaving(&self.space, &runs);
                let unmapped =
                    self.unit.requests.carry_out(host, runs.iter().map(unmap), &[answer::OK, answer::NOENT]);
                core::mem::forget(leaving);
                self.space.removed(&runs, unmapped.is_ok());
                unmapped.map_err(|failure| match failure {
                    Failure::TimedOut { waited_ns } => InvalidationError::TimedOut { waited_ns },
                    Failure::Refused { status, .. } => InvalidationError::Rejected { code: status.into() },
                })?;
            }
            if !search.others {
                return Ok(());
            }
            let waited_ns = host.now_ns().saturating_sub(began);
            // Another CPU's batch may take twice the patience, and so may this one's.
            if waited_ns > host.patience_ns().saturating_mul(4) {
                return Err(InvalidationError::TimedOut { waited_ns });
            }
            host.relax();
        }
    }
}

// SAFETY: 1 and 3: `Unit::attach` and `Unit::detach` attach an endpoint to this mapper's domain, and detach it. 2: the unit reads no memory
// of the mapper: requests carry all mappings, and it records them itself.
unsafe impl<H: Host> UnitMapper for RequestMapper<H>
where
    H::Registers: NarrowRegisters,
{
    unsafe fn attach_device(&self, device: DeviceId, kept: &[IovaRange]) -> Result<(), UnitError> {
        self.unit.attach(device, &self.space, (&self.geometry, kept))
    }

    fn detach_device(&self, device: DeviceId) -> Result<(), UnitError> {
        self.unit.detach(device)
    }

    fn kept_by(&self, device: DeviceId) -> Result<Vec<IovaRange>, UnitError> {
        Ok(self.unit.regions(device)?.iter().map(|region| region.range).collect())
    }
}

// SAFETY: 1, 2 and 4: the device maps what requests name, and `Ok` of an unmap request is its word that no access uses the mapping any more
// (VIRTIO 1.3, section 5.13.6). A piece is sent when nothing else is recorded at its addresses: `enter` has stale pieces there removed
// first. It leaves the record when the device has unmapped it, or has lost the domain; until then a sync of its addresses unmaps it. That
// includes one whose map request failed, and nothing is sent while an answer is overdue: so an unmap is never carried out before its map.
// Pieces that stay mapped are reported. 3: a failed map unlinks its entries.
unsafe impl<H: Host> Mapper for RequestMapper<H>
where
    H::Registers: NarrowRegisters,
{
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn costs(&self) -> Costs {
        COSTS
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let aperture = self.geometry.aperture;
        if !aperture.contains_range(range) {
            return Err(MapError::BeyondAperture { range, last: aperture.last() });
        }
        let flag = |what, flag| if attributes.permissions.allows(what) { flag } else { 0 };
        let flags = flag(Permissions::READ, request::READ) | flag(Permissions::WRITE, request::WRITE);
        let mut entered = None;
        self.enter_list(platform, range, list, flags, &mut entered).inspect_err(|_| {
            if let Some(last) = entered {
                // Only what this call has entered: behind it may be another caller's mapping.
                let _ = self.unlink(platform, range, last);
                gather.add(range);
            }
        })
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unmapped = self.unlink(platform, range, range.last().get());
        if unmapped.bytes > 0 {
            gather.add(range);
        }
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        let mut ranges = ArrayVec::<_, GATHER_RANGES>::new();
        if !gather.each_range(&EACH_RANGE, |range| ranges.push((range.start().get(), range.last().get()))) {
            ranges.push((0, u64::MAX));
        }
        self.remove(&ranges)
    }
}
