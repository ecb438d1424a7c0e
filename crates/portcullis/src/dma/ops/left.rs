//! Ends all mappings of a driver that unloads, or whose device is gone. Nothing is copied back, as the memory may have another owner by now.

use arrayvec::ArrayVec;

use super::DmaOps;
use super::book::Entry;
use crate::addr::IovaRange;
use crate::bounce::error::DmaUnmapError;
use crate::dma::Machine;
use crate::domain::{Linked, Unlinked};
use crate::invalidation::{Gather, InvalidationError};

const TOGETHER: usize = 16;

#[derive(Clone, Copy)]
struct Ends {
    range: IovaRange,
    neighbours: u64,
}

impl<X: Machine> DmaOps<X> {
    /// Ends every open mapping of the handle, without a copy: for a driver that has left some, or a device that is gone. Returns the number of
    /// mappings that it has ended (a list is one), and the bytes of drivers' memory in them, without the gaps of copied lists. Copies belong to the
    /// device's [group](crate::dma::Device::in_group), so those of other devices of the group end, too. A driver that ends one of these mappings
    /// later gets `NotMapped`.
    ///
    /// O(granules of addresses that ever had a mapping near + slots of the pool).
    ///
    /// Context: waits for one invalidation for each 16 mappings, and for each single-use copy. Allocates nothing; not with interrupts off, as it
    /// takes long.
    /// # Errors
    /// [`DmaUnmapError`]: all mappings have ended, but some are not confirmed: **devices may still reach these**, until a
    /// [flush](crate::domain::Domain::flush) of the domain succeeds.
    ///
    /// # Safety
    /// 1. No other map, unmap or sync of the handle, or of any other device of its group, runs at the same time.
    pub unsafe fn unmap_all(&self) -> Result<(u64, u64), DmaUnmapError> {
        self.end_all()
    }

    fn end_all(&self) -> Result<(u64, u64), DmaUnmapError> {
        let (mut mappings, mut bytes, mut result) = (0, 0, Ok(()));
        let mut some: ArrayVec<Ends, TOGETHER> = ArrayVec::new();
        let mut end = |some: &mut ArrayVec<Ends, TOGETHER>| {
            if let Err(error) = self.close_some(some) {
                result = Err(DmaUnmapError::Unconfirmed { error });
            }
            some.clear();
        };
        self.book.take_all(|entry| {
            mappings += 1;
            bytes += entry.used();
            let Entry { range, neighbours, .. } = entry;
            some.push(Ends { range, neighbours });
            if some.is_full() {
                end(&mut some);
            }
        });
        end(&mut some);
        if let Some(pool) = self.pool.as_deref()
            && let Some(client) = self.client(pool)
        {
            let ended = |copied: u64| {
                mappings += 1;
                bytes += copied;
                self.count(|counts, alone| counts.unmaps.add(alone, 1));
            };
            // SAFETY: clause 1 is `unmap_all`'s. In `drop`, no call of this handle runs, and none of another of its group, by clause 4 of their
            // `map`.
            let copies = unsafe { pool.end_all_of(&client, ended) };
            result = result.and(copies);
        }
        result.map(|()| (mappings, bytes)).inspect_err(|_| self.count_error())
    }

    #[inline(never)]
    fn close_some(&self, some: &[Ends]) -> Result<(), InvalidationError> {
        if some.is_empty() { Ok(()) } else { self.close_gathered(some, &mut Gather::new()) }
    }

    /// Out of line, as list and gather each take much of the stack.
    #[inline(never)]
    fn close_gathered(&self, some: &[Ends], gather: &mut Gather) -> Result<(), InvalidationError> {
        let mut unlinked: ArrayVec<Unlinked<'_, X::Mapper, X::Platform>, TOGETHER> = ArrayVec::new();
        let mut kept = 0_u64;
        for entry in some {
            match self.unlink_entry(entry, gather) {
                Ok(gone) => unlinked.push(gone),
                Err(bytes) => kept = kept.saturating_add(bytes),
            }
        }
        let confirmed = self.domain.confirm(gather);
        while let Some(unlinked) = unlinked.pop() {
            match confirmed {
                Ok(()) => unlinked.free(),
                Err(_) => unlinked.quarantine(),
            }
        }
        if kept > 0 { Err(InvalidationError::StillMapped { bytes: kept }) } else { confirmed }
    }

    /// # Errors
    /// The bytes that the mapper did not remove. Their addresses leak.
    #[inline(never)]
    fn unlink_entry(
        &self,
        &Ends { range, neighbours }: &Ends,
        gather: &mut Gather,
    ) -> Result<Unlinked<'_, X::Mapper, X::Platform>, u64> {
        let domain = &*self.domain;
        let unlinked = Linked::from_range(domain, range).unlink(gather).map_err(|linked| linked.kept());
        domain.count_neighbours(neighbours.wrapping_neg().cast_signed());
        let bytes = (range.len().saturating_sub(neighbours), neighbours);
        self.count(|counts, alone| counts.closed(alone, bytes));
        unlinked
    }
}

/// Ends open mappings as [`unmap_all`](DmaOps::unmap_all).
impl<X: Machine> Drop for DmaOps<X> {
    fn drop(&mut self) {
        if self.usage().open_mappings() > 0 {
            // A drop cannot report an error: the domain holds unconfirmed addresses until a flush is confirmed.
            let _ = self.end_all();
        }
    }
}
