//! Mapping next to what was mapped last: the lowest table is remembered, and the walk saved.
//!
//! Memory ordering. What a [`Cursor`] remembers is used only while the page table's *stamp* is the one that it
//! was filled under; both are looked at inside a section. The stamp is read before the walk that fills the
//! cursor (acquire), and changed by [`reclaim`](super::reclaim) between marking tables and the first wait for
//! the sections (release). For a table that is marked there are two kinds of sections then:
//!
//! - One that the wait sees. It may use a cursor of the old stamp; what it enters is seen when the table is
//!   looked at after the wait, and the table stays.
//! - One that begins after the wait's barrier. It sees the new stamp, and so uses no cursor that was filled
//!   before; to fill one it walks, and who sees the new stamp sees the marks that were stored before it.
//!
//! So a cursor of the new stamp names a marked table only if that was found without its mark afterwards: kept,
//! or put back, which takes it out of what is freed. The next attempt to free it begins with a new stamp.
//! Stamps are [unique](crate::sync::unique): a cursor that is handed to another page table fits none of its.

use super::format::{Attributes, Format};
use super::map::Last;
use super::table::PageTable;
use crate::addr::{IovaRange, PhysAddr};
use crate::platform::{Frames, LocalSlot, Platform};
use crate::sync::{Ordering, unique};

/// Where a caller has mapped last, for [`PageTable::map_near`]: 24 bytes, kept by whoever maps neighbours one
/// after the other. It may be handed to any page table at any time: one that is out of date is filled anew.
#[derive(Debug, Clone)]
pub struct Cursor {
    /// That of the page table when it was filled; 0, which is none, before.
    stamp: u64,
    last: Last,
}

impl Cursor {
    /// Nowhere yet.
    pub const fn new() -> Self {
        Self { stamp: 0, last: Last::NONE }
    }
}

impl Default for Cursor {
    fn default() -> Self {
        Self::new()
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Maps `range` to the memory at `phys`, if that takes no more than a walk and some stores: all in one lowest
    /// table, which is there, nothing in its place, shorter than any leaf but the smallest, a slot at hand.
    /// Whether it did; if not, nothing is changed, and [`map`](Self::map) does it or says why not.
    ///
    /// In the lowest table of the last range that was mapped with `cursor` it takes no walk either, but one step.
    /// Never allocates or waits.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline]
    pub unsafe fn map_near<P: Platform>(
        &self,
        platform: &P,
        cursor: &mut Cursor,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> bool {
        let attributes = attributes.into();
        let (iova, len) = (range.start().get(), range.len());
        if len >= self.second || !self.is_plain(range, phys) {
            return false;
        }
        let next = |slot: &LocalSlot<'_>| {
            let _turn = self.sections().begin(slot)?;
            let is_current = cursor.stamp == self.stamp.load(Ordering::Acquire);
            Some(is_current && self.map_beside(iova, phys.get(), len, attributes, &cursor.last))
        };
        self.at_hand(platform, next) == Some(Some(true))
            || self.map_walking(platform, cursor, (iova, phys.get(), len), attributes)
    }

    /// As [`map_near`](Self::map_near), with a walk that fills the cursor. The arguments were checked.
    #[cold]
    #[inline(never)]
    fn map_walking<P: Platform>(
        &self,
        platform: &P,
        cursor: &mut Cursor,
        (iova, phys, len): (u64, u64, u64),
        attributes: Attributes,
    ) -> bool {
        let walk = |slot: Option<&LocalSlot<'_>>| {
            let _section = self.sections().enter(slot);
            // Acquire, and before any step down: see above.
            let stamp = self.stamp.load(Ordering::Acquire);
            let Some(at) = self.walk_to(iova, 1, X::MARK) else {
                return false;
            };
            *cursor = Cursor { stamp, last: Last::new(self.format(), iova, at) };
            self.map_beside(iova, phys, len, attributes, &cursor.last)
        };
        self.with_slot(platform, walk)
    }

    /// Maps granules in the table that `last` remembers, if all of them lie there and nothing is in their place.
    /// Whether it did. Inside a section, of which `last` is.
    #[inline]
    fn map_beside(&self, iova: u64, phys: u64, len: u64, attributes: Attributes, last: &Last) -> bool {
        match last.position(self.format(), iova) {
            Some(at) => self.enter_granules(at, phys, len, attributes),
            None => false,
        }
    }

    /// Has every cursor forget what it remembers.
    pub(super) fn retire_cursors(&self) {
        // Release: who sees it sees the marks.
        self.stamp.store(unique(), Ordering::Release);
    }
}
