//! Mappings at addresses that the caller names, which firmware goes on using: only at reserved ones, so nobody else has them.

use super::book::Entry;
use super::maps::undone;
use super::{DmaOps, MapAttributes};
use crate::addr::{Direction, Iova, IovaRange, PhysAddr, PhysSegment};
use crate::bounce::error::DmaMapError;
use crate::dma::Machine;
use crate::domain::Tally;
use crate::pgtable::Attributes;
use crate::sync::Ordering;

impl<X: Machine> DmaOps<X> {
    /// As [`map`](Self::map), at the address `iova`, never copied: for memory that firmware goes on using by its own addresses, and for
    /// address spaces that others lay out. The addresses are reserved ([`DomainBuilder::reserve`](crate::dma::DomainBuilder::reserve),
    /// [`Geometry::reserved`](crate::mapper::Geometry)), and `iova` has the same offset in its granule as `phys`. The mapping ends strictly
    /// whatever the policy, and its addresses stay reserved.
    ///
    /// Context: any. May allocate, and wait for hardware.
    ///
    /// # Errors
    /// As [`map`](Self::map); and [`DmaMapError::Address`] for other addresses.
    ///
    /// # Safety
    /// As [`map`](Self::map), clauses 1 to 3.
    pub unsafe fn map_at(
        &self,
        iova: Iova,
        (phys, len): (PhysAddr, u64),
        direction: Direction,
        attributes: MapAttributes,
    ) -> Result<(), DmaMapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        let opened = unsafe { self.open_at(iova, PhysSegment { phys, len }, attributes.of(direction)) };
        match opened {
            Ok(entry) => {
                let bytes = (entry.used(), entry.neighbours);
                self.count(|counts, alone| counts.opened(alone, bytes));
                Ok(())
            }
            Err(error) => {
                self.count_error();
                Err(error)
            }
        }
    }

    /// # Safety
    /// As [`map`](Self::map).
    unsafe fn open_at(&self, iova: Iova, piece: PhysSegment, how: Attributes) -> Result<Entry, DmaMapError> {
        let (granule, domain) = (self.domain.granule(), &self.domain);
        let PhysSegment { phys, len } = piece;
        domain.pages_of(&[piece])?;
        let range = IovaRange::of_pages(iova, len, granule).filter(|range| {
            let fits = iova.page_offset(granule) == phys.page_offset(granule);
            fits && domain.is_reserved(*range) && range.last().get() <= self.mask.load(Ordering::Relaxed)
        });
        let range = range.ok_or(DmaMapError::Address { iova })?;
        let neighbours = range.len() - len;
        // SAFETY: `Domain::map`'s clauses are the caller's clause 2; the addresses are reserved, so the domain maps nothing else there.
        let linked = unsafe { domain.link(range, &[piece], how, None) };
        linked.map_err(|failed| {
            if failed.remains.reachable {
                domain.leave_open(range.len());
            }
            DmaMapError::List(failed.error)
        })?;
        domain.settle(Tally { maps: 1, ..Tally::default() });
        domain.count_neighbours(neighbours.cast_signed());
        let entry = Entry { iova, len, range, neighbours, lasting: true, fixed: true };
        let noted = self.book.note(entry);
        noted.map(|()| entry).map_err(|why| undone(self.close(entry, |_| ()), self.book.error(why, len)))
    }
}
