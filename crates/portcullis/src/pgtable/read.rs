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

/// A leaf as a walk found it.
#[derive(Debug, Clone, Copy)]
struct Found {
    entry: u64,
    level: u32,
    run: u32,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Where a device's access to `iova` would go and what it may do there, by the tables alone. One dependent
    /// load for each level.
    #[inline]
    pub fn translate<P: Platform>(&self, platform: &P, iova: Iova) -> Option<(PhysAddr, Attributes)> {
        let found = self.find(platform, iova)?;
        Some((self.phys(found, iova), self.format().attributes(found.entry, found.level)))
    }

    /// As [`translate`](Self::translate), without the attributes.
    #[inline]
    pub fn iova_to_phys<P: Platform>(&self, platform: &P, iova: Iova) -> Option<PhysAddr> {
        self.find(platform, iova).map(|found| self.phys(found, iova))
    }

    #[inline]
    fn phys(&self, Found { entry, level, run }: Found, iova: Iova) -> PhysAddr {
        let offset = iova.get() & !(u64::MAX << (self.format().shift(level) + run));
        PhysAddr::new(self.format().page(entry, level).get() | offset)
    }

    #[inline]
    fn find<P: Platform>(&self, platform: &P, iova: Iova) -> Option<Found> {
        if iova > self.last_iova() {
            return None;
        }
        let at_hand = |slot: &LocalSlot<'_>| {
            let _turn = self.sections().begin(slot)?;
            Some(self.find_in(iova.get()))
        };
        match platform.with_slot_at_hand(at_hand) {
            Some(Some(found)) => found,
            _ => self.find_slowly(platform, iova),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_slowly<P: Platform>(&self, platform: &P, iova: Iova) -> Option<Found> {
        platform.with_slot(|slot| {
            let _section = self.sections().enter(slot);
            self.find_in(iova.get())
        })
    }

    /// Inside a section.
    #[inline]
    fn find_in(&self, iova: u64) -> Option<Found> {
        let mut at = self.top(iova);
        loop {
            let entry = self.word(at).load(Ordering::Acquire);
            match self.format().decode(entry, at.level) {
                Entry::Table { table, level } => at = self.step(iova, table, level),
                Entry::Leaf { run } => return Some(Found { entry, level: at.level, run }),
                Entry::Absent => return None,
            }
        }
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
