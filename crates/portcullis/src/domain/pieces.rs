//! [`Pieces`]: a list of memory that a driver notes piece by piece, at addresses that it has already.

use alloc::vec::Vec;

use super::MapListError;
use crate::addr::{Iova, IovaRange, PageSize, PhysSegment};
use crate::pgtable::MapError;

/// Memory for [reserved](super::Reserved::pieces) addresses, noted piece by piece in any order. One call then maps all of it
/// ([`Reserved::link`](super::Reserved::link)).
///
/// A driver that maps many buffers one by one pays for each map: in user space, one system call and one VFIO or iommufd mapping each. A
/// noted piece has its address at once, and the mapper gets all pieces together: it makes one mapping (or large pages) of pieces that are
/// neighbours both in memory and in addresses. **No device reaches a piece before the link.** The link opens exactly the noted memory. The
/// pieces also end together, as one mapping: see [`Mapper::REMOVES_WHOLES`](crate::mapper::Mapper::REMOVES_WHOLES) for parts of it. (Linux
/// links pieces into one range since 6.16: `dma_iova_link`, `include/linux/dma-mapping.h`.)
///
/// ```
/// # use portcullis::addr::{Iova, Permissions, PhysAddr, PhysSegment};
/// # use portcullis::domain::{Domain, MapListError, Refused};
/// # use portcullis::invalidation::Gather;
/// # use portcullis::mapper::Mapper;
/// # use portcullis::platform::Platform;
/// /// Maps two buffers of a page each, the second after the first in IOVA space. `Domain::unmap` ends that, for both pages.
/// ///
/// /// # Safety
/// /// As for [`Domain::map`], clauses 1 to 3.
/// unsafe fn map<M: Mapper, P: Platform>(domain: &Domain<M, P>, buffers: [PhysAddr; 2]) -> Result<Iova, MapListError> {
///     let reserved = domain.reserve(2 * 4096, Iova::new(u64::MAX))?;
///     let mut pieces = reserved.pieces();
///     let mut note = |index: u64, phys| pieces.add(index * 4096, PhysSegment { phys, len: 4096 });
///     let noted = note(1, buffers[1]).and_then(|_| note(0, buffers[0]));
///     match noted.and_then(|_| pieces.list()) {
///         // SAFETY: clauses 1 to 3 are the caller's, for both buffers.
///         Ok(list) => unsafe { reserved.link(&list, Permissions::READ, &mut Gather::new()) }
///             .map(|linked| linked.into_range().start())
///             .map_err(Refused::end),
///         Err(error) => {
///             // A dropped token would leak its addresses.
///             reserved.free();
///             Err(error)
///         }
///     }
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Pieces {
    range: IovaRange,
    granule: PageSize,
    /// In the order of the calls. A piece that continues the last one, in memory and in addresses, is merged into it.
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    offset: u64,
    memory: PhysSegment,
}

impl Piece {
    /// Merges `next`, if it follows both in memory and in addresses. Returns whether it did.
    fn join(&mut self, next: Self) -> bool {
        let Self { offset, memory } = *self;
        let follows = offset.checked_add(memory.len) == Some(next.offset)
            && memory.phys.checked_add(memory.len) == Some(next.memory.phys);
        // No overflow: both lie inside the range.
        self.memory.len += if follows { next.memory.len } else { 0 };
        follows
    }
}

impl Pieces {
    pub(super) fn new(range: IovaRange, granule: PageSize) -> Self {
        Self { range, granule, pieces: Vec::new() }
    }

    /// Notes `memory` for the addresses from byte `offset` of the range on, and returns the first of these. Offset, address and length are
    /// multiples of the granule. Devices see no change. O(1); may allocate, 24 bytes for each piece that does not follow the last one.
    ///
    /// # Errors
    /// [`MapListError`]: the piece is empty, misaligned or runs past the end of the range, or there is no memory for the note. Nothing is
    /// noted. [`list`](Self::list) finds overlaps.
    pub fn add(&mut self, offset: u64, memory: PhysSegment) -> Result<Iova, MapListError> {
        let (range, granule, index) = (self.range, self.granule.bytes(), self.pieces.len());
        MapListError::check(memory, index)?;
        if !(offset | memory.phys.get() | memory.len).is_multiple_of(granule) {
            return Err(MapError::Misaligned { range, phys: memory.phys, granule }.into());
        }
        let end = offset.checked_add(memory.len);
        let at = range.start().checked_add(offset).filter(|_| end.is_some_and(|end| end <= range.len()));
        let at = at.ok_or(MapError::Length { range, list: end.unwrap_or(u64::MAX) })?;
        let piece = Piece { offset, memory };
        if !self.pieces.last_mut().is_some_and(|last| last.join(piece)) {
            self.pieces.try_reserve(1).map_err(|_| MapError::OutOfMemory)?;
            self.pieces.push(piece);
        }
        Ok(at)
    }

    /// All noted pieces, sorted by address, neighbours merged: a list for [`Reserved::link`](super::Reserved::link) that fills the range.
    /// For n pieces O(n log n), or O(n) if they came in order. Allocates the list.
    ///
    /// # Errors
    /// [`MapListError::NotOnce`] if an address has no piece or two; or no memory for the list. The notes stay.
    pub fn list(&mut self) -> Result<Vec<PhysSegment>, MapListError> {
        let start = self.range.start();
        self.pieces.sort_unstable_by_key(|piece| piece.offset);
        self.pieces.dedup_by(|next, before| before.join(*next));
        let mut list = Vec::new();
        list.try_reserve_exact(self.pieces.len()).map_err(|_| MapError::OutOfMemory)?;
        let mut end = 0;
        for Piece { offset, memory } in &self.pieces {
            if *offset != end {
                return Err(MapListError::NotOnce { at: Iova::new(start.get() + end.min(*offset)) });
            }
            // No overflow: it lies inside the range.
            end += memory.len;
            list.push(*memory);
        }
        if end == self.range.len() {
            Ok(list)
        } else {
            Err(MapListError::NotOnce { at: Iova::new(start.get() + end) })
        }
    }
}
