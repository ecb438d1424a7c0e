//! What mapping and unmapping a descriptor are made of.
//!
//! ```text
//!   reserve --> link ... link --> unlink --> commit --> release
//! ```
//! A reservation may be linked in parts, and unlinked in others. (`unmap` is `unlink` and `release` with a commit
//! in between, put off until the batch is complete.)

use super::{RingError, StrictRing};
use crate::addr::{Direction, IovaRange};
use crate::domain::{Fate, LinkFailed, PhysSegment, Tally};
use crate::iova::RingArena;
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;

/// A descriptor that is unmapped while a whole batch waits. Dropped where the commit panics.
struct Last<'a, M: Mapper, P: Platform> {
    ring: &'a mut StrictRing<M, P>,
    range: IovaRange,
}

impl<M: Mapper, P: Platform> Drop for Last<'_, M, P> {
    fn drop(&mut self) {
        self.ring.waiting.push(self.range);
        self.ring.unmapped += 1;
    }
}

impl<M: Mapper, P: Platform> StrictRing<M, P> {
    /// Takes the next addresses of the ring: `len` bytes, rounded up to whole granules. Nothing is mapped there.
    ///
    /// O(1); never allocates or waits.
    ///
    /// # Errors
    /// [`RingError::Arena`], as [`RingArena::reserve`] says; [`RingError::Untranslated`].
    pub fn reserve(&mut self, len: u64) -> Result<IovaRange, RingError> {
        Ok(self.arena.as_mut().ok_or(RingError::Untranslated)?.reserve(len)?)
    }

    /// Opens the pages of `list` to the device at `range`, all or a part of what was reserved, one segment after
    /// the other. One walk for each lowest table; may allocate page tables. Counts no neighbours in the domain's
    /// [`exposure`](crate::domain::Domain::exposure), as what is linked may be unlinked in other parts.
    ///
    /// # Errors
    /// [`RingError::Length`] where the pages are not as many as the range has, [`RingError::Foreign`],
    /// [`RingError::Untranslated`], [`RingError::Map`]: nothing of the list is mapped, and the range is still
    /// reserved. After [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed) devices may reach
    /// the list until a [`commit`](Self::commit) succeeds.
    ///
    /// # Safety
    /// As for [`Domain::map`](crate::domain::Domain::map), until a commit has returned `Ok` after the
    /// [`unlink`](Self::unlink) of all of it. After [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed) until a
    /// commit has.
    pub unsafe fn link(
        &mut self,
        range: IovaRange,
        list: &[PhysSegment],
        direction: Direction,
    ) -> Result<(), RingError> {
        self.contains(range)?;
        let domain = self.device.domain();
        let len = domain.pages_of(list)?;
        if len != range.len() {
            return Err(RingError::Length { range, list: len });
        }
        self.by_steps = true;
        // SAFETY: the caller's promise.
        let linked = unsafe { domain.link(range, list, direction.permissions(), &mut self.unlinked) };
        linked.map_err(|failed| failed.error)?;
        self.tally.maps += 1;
        Ok(())
    }

    /// Clears the translations of `range`, which may be several neighbours that were linked one by one. A device
    /// may still reach the memory, until the next [`commit`](Self::commit) has returned `Ok`.
    ///
    /// One walk for each lowest table, one store for each page. Waits for nothing and allocates nothing where the range
    /// covers the pages that `link` made as a whole. Where it covers a part of a large page (a list that has 2 MiB in one
    /// piece, say) that page is split: that allocates, and may wait for hardware, as
    /// [`PageTable::unmap`](crate::pgtable::PageTable::unmap) says.
    ///
    /// # Errors
    /// [`RingError::StillMapped`], which a split alone can lead to: unlink the range again, and do not release it before.
    /// [`RingError::NotMapped`]: the commit covers all of the range all the same. [`RingError::Foreign`],
    /// [`RingError::Untranslated`]: nothing is changed.
    pub fn unlink(&mut self, range: IovaRange) -> Result<(), RingError> {
        self.contains(range)?;
        let Unmapped { bytes: unmapped, kept, .. } = self.clear(range);
        if kept > 0 {
            return Err(RingError::StillMapped { range, kept });
        }
        if unmapped == range.len() { Ok(()) } else { Err(RingError::NotMapped { range, unmapped }) }
    }

    /// Waits until no device reaches anything that was unmapped or unlinked before, and releases the descriptors
    /// that were unmapped. Returns how many those are.
    ///
    /// Clears what waits, a walk for each run of neighbours and lowest table; then one submission to the hardware
    /// (see [`StrictRing`]), none where nothing waits. Allocates nothing. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`RingError::Unconfirmed`], [`RingError::StillMapped`]: all that waits goes on waiting, and can be committed
    /// again.
    pub fn commit(&mut self) -> Result<usize, RingError> {
        self.clear_waiting()?;
        let domain = self.device.domain();
        if let Err(error) = domain.confirm(&self.unlinked) {
            return Err(RingError::Unconfirmed { descriptors: self.waiting(), error });
        }
        self.unlinked.clear();
        let unmaps = core::mem::take(&mut self.unmapped);
        if let Some(arena) = &mut self.arena {
            // Without what was released by the step already.
            self.waiting.drain(..).chain(self.unconfirmed.drain(..)).for_each(|run| arena.free_run(run));
            let tally = core::mem::take(&mut self.tally);
            let closed = core::mem::take(&mut self.closing);
            domain.settle(Tally { unmaps: unmaps as u64, closed, ..tally });
        }
        Ok(unmaps)
    }

    /// Gives a reservation back to the ring, once what was linked there is unlinked, and that committed.
    ///
    /// O(1), as [`RingArena::free`]; never allocates or waits. What is still linked stays so, as nobody looks: lists that get
    /// the same addresses are refused, until the ring's end, which unmaps it.
    ///
    /// # Errors
    /// [`RingError::NotCommitted`] while anything that was unlinked waits for a commit, or the reservation does; [`RingError::Arena`] for
    /// what is not reserved, or only a part of it; [`RingError::Untranslated`].
    pub fn release(&mut self, range: IovaRange) -> Result<(), RingError> {
        let arena = self.arena.as_mut().ok_or(RingError::Untranslated)?;
        if !self.unlinked.is_empty() || self.waiting.iter().any(|run| run.contains_range(range)) {
            return Err(RingError::NotCommitted { range });
        }
        self.by_steps = true;
        Ok(arena.free(range)?)
    }

    /// Commits for the last time. Where nothing is reserved after that, nothing is mapped in the ring's addresses.
    pub(super) fn end(&mut self) -> Result<(), RingError> {
        self.commit()?;
        let is_idle = |arena: &&RingArena| arena.reservations() == 0;
        let Some(range) = self.arena.as_ref().filter(is_idle).map(RingArena::range) else { return Ok(()) };
        if !self.by_steps {
            return Ok(());
        }
        let kept = self.clear(range).kept;
        if kept > 0 {
            return Err(RingError::StillMapped { range, kept });
        }
        self.commit()?;
        Ok(())
    }

    /// Commits a whole batch that waits, before `range` can wait, too. Where that panics, `range` waits like the others,
    /// for nobody else knows of it any more.
    #[cold]
    pub(super) fn commit_before(&mut self, range: IovaRange) -> Result<(), RingError> {
        let last = Last { ring: self, range };
        let result = last.ring.commit();
        core::mem::forget(last);
        result.map(|_| ())
    }

    /// What to do with `range`, reserved for a list that was not mapped.
    #[cold]
    pub(super) fn refused(&mut self, range: IovaRange, failed: LinkFailed) -> RingError {
        let LinkFailed { error, remains } = failed;
        match remains.addresses() {
            // They stay reserved.
            Fate::Lost => {}
            Fate::Held => self.unconfirmed.push(range),
            Fate::Free => {
                if let Some(arena) = &mut self.arena {
                    // It was reserved a moment ago.
                    let freed = arena.free(range);
                    debug_assert!(freed.is_ok());
                }
            }
        }
        error.into()
    }

    /// Clears the descriptors that wait, neighbours together.
    fn clear_waiting(&mut self) -> Result<(), RingError> {
        if !self.waiting.is_sorted_by_key(|range| range.start()) {
            self.waiting.sort_unstable_by_key(|range| range.start());
        }
        self.waiting.dedup_by(|next, run| run.joined(*next).map(|joined| *run = joined).is_some());
        for index in 0..self.waiting.len() {
            let range = self.waiting[index];
            let kept = self.clear(range).kept;
            if kept > 0 {
                return Err(RingError::StillMapped { range, kept });
            }
        }
        Ok(())
    }

    fn clear(&mut self, range: IovaRange) -> Unmapped {
        self.device.domain().unlink(range, &mut self.unlinked)
    }

    fn contains(&self, range: IovaRange) -> Result<(), RingError> {
        let arena: &RingArena = self.arena.as_ref().ok_or(RingError::Untranslated)?;
        if arena.range().contains_range(range) { Ok(()) } else { Err(RingError::Foreign { range }) }
    }
}
