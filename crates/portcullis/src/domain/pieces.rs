//! [`Pieces`]: a list of memory that comes piece by piece, for addresses that are known from the beginning.

use alloc::vec::Vec;

use super::MapListError;
use crate::addr::{Iova, IovaRange, PageSize, PhysSegment};
use crate::pgtable::MapError;

/// Memory for addresses that are [reserved](super::Reserved::pieces), noted piece by piece, in any order: then all of it is mapped by one
/// call ([`Reserved::link`](super::Reserved::link)).
///
/// A driver that maps many buffers before its device uses the first of them pays for each where it maps them one by one: a system call
/// for each, and one of the kernel's mappings, below a process. Noted here, each has its address at once, and the mapper gets them
/// together: of neighbours in memory at neighbouring addresses it makes one mapping (or large pages). **No device reaches a piece before
/// the link.** It opens just what was noted. The pieces end together, too, as one mapping: see
/// [`Mapper::REMOVES_WHOLES`](crate::mapper::Mapper::REMOVES_WHOLES) for parts of it. (Linux links pieces into one range since 6.16:
/// `dma_iova_link`, `include/linux/dma-mapping.h`.)
///
/// ```
/// # use portcullis::addr::{Iova, Permissions, PhysAddr, PhysSegment};
/// # use portcullis::domain::{Domain, MapListError, Refused};
/// # use portcullis::invalidation::Gather;
/// # use portcullis::mapper::Mapper;
/// # use portcullis::platform::Platform;
/// /// Maps two buffers of a page each, the second behind the first for the device. `Domain::unmap` ends that, for both pages.
/// ///
/// /// # Safety
/// /// As for [`Domain::map`].
/// unsafe fn map<M: Mapper, P: Platform>(domain: &Domain<M, P>, buffers: [PhysAddr; 2]) -> Result<Iova, MapListError> {
///     let reserved = domain.reserve(2 * 4096, Iova::new(u64::MAX))?;
///     let mut pieces = reserved.pieces();
///     let mut note = |index: u64, phys| pieces.add(index * 4096, PhysSegment { phys, len: 4096 });
///     let noted = note(1, buffers[1]).and_then(|_| note(0, buffers[0]));
///     match noted.and_then(|_| pieces.list()) {
///         // SAFETY: the caller's promise.
///         Ok(list) => unsafe { reserved.link(&list, Permissions::READ, &mut Gather::new()) }
///             .map(|linked| linked.into_range().start())
///             .map_err(Refused::end),
///         Err(error) => {
///             // Dropped, it would lose them.
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
    /// In the order of the calls. A piece that continues the last one, in memory and in addresses, is joined to it.
    pieces: Vec<Piece>,
}

/// A piece of memory, and the number of bytes before it.
#[derive(Debug, Clone, Copy)]
struct Piece {
    offset: u64,
    memory: PhysSegment,
}

impl Piece {
    /// Adds `next` to it, if that lies behind it both in memory and in addresses. Returns whether it did.
    fn join(&mut self, next: Self) -> bool {
        let Self { offset, memory } = *self;
        let follows = offset.checked_add(memory.len) == Some(next.offset)
            && memory.phys.checked_add(memory.len) == Some(next.memory.phys);
        // Both lie inside of the range.
        self.memory.len += if follows { next.memory.len } else { 0 };
        follows
    }
}

impl Pieces {
    pub(super) fn new(range: IovaRange, granule: PageSize) -> Self {
        Self { range, granule, pieces: Vec::new() }
    }

    /// Notes `memory` for the addresses from byte `offset` of the range on, and returns the first of these. Offset, address and length are
    /// multiples of the granule. Changes nothing for devices. O(1); may allocate, 24 bytes for each piece that does not follow the
    /// last one.
    ///
    /// # Errors
    /// [`MapListError`]: an empty piece, or one that is misaligned or runs past the end of the range, or no memory for the note. Nothing is
    /// noted. Pieces that meet are found by [`list`](Self::list).
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

    /// All that was noted, in the order of its addresses, neighbours joined: a list for [`Reserved::link`](super::Reserved::link), which
    /// fills the range. O(n log n) for n pieces where they came in another order, else O(n); allocates the list.
    ///
    /// # Errors
    /// [`MapListError::NotOnce`] where an address has no piece or two, and where there is no memory for the list. What was noted stays.
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
            // It lies inside of the range.
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
