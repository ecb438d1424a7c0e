//! The translations of a domain, by request.

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

/// What requests cost, whose source is `portcullis-trace`'s profile `virtio-iommu`: 4.9 us for an
/// unmap (a measurement of a guest whose host was emulated), and the middle of what pages cost in
/// large VFIO calls. A flush removes what is stale alone, so no device has anything to fetch again.
const COSTS: Costs = Costs { submission_ns: 4_900, request_ns: 57, refill_ns: 0 };

/// Costs by which a gather names each of its ranges.
const EACH_RANGE: Costs = Costs { refill_ns: u32::MAX, ..COSTS };

/// How often a map has the device forget what was at its addresses before, while other CPUs unmap
/// there without end.
const TRIES: usize = 4;

/// The mapper of one domain of a [`Unit`]: see [`Unit::mapper`].
///
/// A map sends one request for each piece that is contiguous in memory, up to 64 with one doorbell,
/// and waits for the answers. An unmap sends nothing and waits for nothing: the next
/// [`sync`](Mapper::sync) of what it has gathered sends one request for each run of neighbours, and
/// waits once for up to 64. So with lazy protection a flush pays for the unmaps of its window
/// together. While no endpoint is attached, the device has no such domain: then mappings are
/// recorded, and sent when the first one is attached.
///
/// The device removes pieces as a whole only. Of a piece that is to be unmapped in part, nothing
/// is: it is [kept](Unmapped::kept). (To unmap all of it and map the rest anew would refuse
/// accesses beside the part.)
///
/// What is mapped is kept in an ordered map in the global allocator's memory, behind a lock: O(log
/// n) for each piece. A flush of everything looks at all pieces, up to 1,024 with the lock held.
/// Not for interrupt handlers, which would wait for ever for a lock of the CPU that they have
/// interrupted.
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

    /// Leads `device` to this domain. Asks first which addresses the device keeps for itself, where
    /// the unit can tell. The first device waits for requests to map all that is recorded. Waits
    /// for the unit.
    ///
    /// # Errors
    /// [`UnitError::Attached`], [`UnitError::NoSuchDevice`]; [`UnitError::Reserved`] where the
    /// domain may map what the device keeps for itself; [`UnitError::Refused`]: nothing has
    /// changed. [`UnitError::TimedOut`], [`UnitError::Incomplete`]: the device counts as attached,
    /// and may be refused.
    pub fn attach(&self, device: DeviceId) -> Result<(), UnitError> {
        self.unit.attach(device, &self.space, (&self.geometry, &[]))
    }

    /// Enters pieces, and has the device map them. `entered` then says up to which address the
    /// device may have mapped anything.
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

    /// Enters a list, batch by batch. `entered` then says up to which address the device may have
    /// mapped anything.
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
        // How much of the range has no memory yet.
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
            // Inside the range, as all that follows.
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

    /// Marks what is mapped in `range`, up to the address `last`, as unmapped. What was, and what
    /// could not be.
    fn unlink<P: Platform>(&self, platform: &P, range: IovaRange, last: u64) -> Unmapped {
        let mut unmapped = Unmapped::of(range, 0);
        let mut from = Some(range.start().get());
        while from.is_some() {
            let some = platform.with_cpu(|_| self.space.unlink(&mut from, last));
            // Of one range, each byte once.
            unmapped.bytes += some.bytes;
            unmapped.kept += some.kept;
        }
        unmapped
    }

    /// Has the device unmap what is stale in `ranges` (from the first to the last address of each),
    /// and waits until it has, and has answered other CPUs of it, too.
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
            // A batch of another CPU's may take twice the patience, as this one's own.
            if waited_ns > host.patience_ns().saturating_mul(4) {
                return Err(InvalidationError::TimedOut { waited_ns });
            }
            host.relax();
        }
    }
}

// SAFETY: `Unit::attach` and `Unit::detach` lead an endpoint to this mapper's domain and away. The unit reads nothing of the mapper's:
// it has been sent all that it maps, and keeps the account of that itself.
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

// SAFETY: the device maps what it is asked to, and `Ok` of a request to unmap is its word that no
// access uses the mapping any more (VIRTIO 1.3, section 5.13.6). A piece is sent when nothing else
// is in the account at its addresses: `enter` has what was there removed first. It leaves the
// account when the device has unmapped it, or has lost the domain; until then a sync of its
// addresses asks for it. One whose request to map was not answered well is asked for, too, and
// nothing is sent while an answer is overdue: so an unmap is never carried out before the map that
// it is for. Kept pieces are reported.
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
                // What this call has entered, and no more: behind it may be another's mapping.
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
