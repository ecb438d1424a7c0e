//! Reading the tables: for one address, and as a whole, for reports and for debugging.

use super::format::{Attributes, Entry, Format, Layout};
use super::table::PageTable;
use super::walk::Position;
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::platform::{Frames, LocalSlot, Platform};
use crate::sync::Ordering;

/// A leaf as the tables hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses that it translates: its page.
    pub range: IovaRange,
    /// The memory behind the first of them.
    pub phys: PhysAddr,
    /// What it allows.
    pub attributes: Attributes,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Where a device's access to `iova` would go and what it may do there, by the tables alone. One dependent
    /// load for each level.
    #[inline]
    pub fn translate<P: Platform>(&self, platform: &P, iova: Iova) -> Option<(PhysAddr, Attributes)> {
        if iova > self.last_iova() {
            return None;
        }
        match platform.with_slot_at_hand(|slot| self.translate_in(Some(slot), iova.get())) {
            Some(found) => found,
            None => platform.with_slot(|slot| self.translate_in(slot, iova.get())),
        }
    }

    /// As [`translate`](Self::translate), without the attributes.
    #[inline]
    pub fn iova_to_phys<P: Platform>(&self, platform: &P, iova: Iova) -> Option<PhysAddr> {
        if iova > self.last_iova() {
            return None;
        }
        let phys = |slot: Option<&LocalSlot<'_>>| {
            let _section = self.sections().enter(slot);
            self.find(iova.get()).map(|(at, entry)| self.phys(at, entry, iova.get()))
        };
        match platform.with_slot_at_hand(|slot| phys(Some(slot))) {
            Some(found) => found,
            None => platform.with_slot(phys),
        }
    }

    #[inline]
    fn translate_in(&self, slot: Option<&LocalSlot<'_>>, iova: u64) -> Option<(PhysAddr, Attributes)> {
        let _section = self.sections().enter(slot);
        let (at, entry) = self.find(iova)?;
        Some((self.phys(at, entry, iova), self.format().attributes(entry, at.level)))
    }

    /// The leaf entry for `iova`, and where it is. Inside a section.
    #[inline]
    fn find(&self, iova: u64) -> Option<(Position, u64)> {
        let mut at = self.top(iova);
        loop {
            let entry = self.word(at).load(Ordering::Acquire);
            match self.format().decode(entry, at.level) {
                Entry::Table { table, level } => at = self.step(iova, table, level),
                Entry::Leaf { .. } => return Some((at, entry)),
                Entry::Absent => return None,
            }
        }
    }

    /// Where the leaf `entry` at `at` leads `iova`.
    #[inline]
    fn phys(&self, at: Position, entry: u64, iova: u64) -> PhysAddr {
        let run = match self.format().decode(entry, at.level) {
            Entry::Leaf { run } => run,
            _ => 0,
        };
        let offset = iova & !(u64::MAX << (self.format().shift(at.level) + run));
        PhysAddr::new(self.format().page(entry, at.level).get() | offset)
    }

    /// Calls `visit` for each leaf, in the order of addresses. Leaves that come and go meanwhile may or may
    /// not be among them.
    ///
    /// One step for each entry of each table; changes nothing, allocates nothing. The caller's slot is lent all
    /// the while, and no table is freed: for reports, not for a path that is in a hurry.
    pub fn visit<P: Platform>(&self, platform: &P, mut visit: impl FnMut(Mapping)) {
        platform.with_slot(|slot| {
            let _section = self.sections().enter(slot);
            self.visit_table(self.root(), self.format().levels(), 0, &mut visit);
        });
    }

    fn visit_table(&self, table: PhysAddr, level: u32, first: u64, visit: &mut impl FnMut(Mapping)) {
        let format = self.format();
        let mut index = 0;
        while index < self.entries_of(level) {
            let entry = self.word(Position { table, level, index }).load(Ordering::Acquire);
            let iova = first + ((index as u64) << format.shift(level));
            let mut entries = 1;
            match format.decode(entry, level) {
                Entry::Table { table, level } => self.visit_table(table, level, iova, visit),
                Entry::Leaf { run } => {
                    let len = 1 << (format.shift(level) + run);
                    entries = 1 << run;
                    let (phys, attributes) = (format.page(entry, level), format.attributes(entry, level));
                    if let Ok(range) = IovaRange::new(Iova::new(iova), len) {
                        visit(Mapping { range, phys, attributes });
                    }
                }
                Entry::Absent => {}
            }
            index += entries;
        }
    }
}
