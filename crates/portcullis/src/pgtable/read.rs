//! Reads the tables for one address. A reader changes nothing.

use super::format::{Attributes, Entry, Format, Layout};
use super::table::PageTable;
use crate::addr::{Iova, PhysAddr};
use crate::platform::{Frames, LocalCpu, Platform};
use crate::sync::Ordering;

#[derive(Debug, Clone, Copy)]
struct Found {
    entry: u64,
    level: u32,
    run: u32,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Returns where a device's access to `iova` would go and what it may do there, by the tables alone; `None` if
    /// nothing is mapped there. Costs one dependent load for each level. Context: allocates nothing; a caller without a
    /// CPU that the table is for takes a lock, and may wait.
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
        let fast = |cpu: &LocalCpu<'_>| {
            let _turn = self.turn(cpu)?;
            Some(self.find_in(iova.get()))
        };
        match self.platform.with_cpu_fast(platform, fast) {
            Some(Some(found)) => found,
            _ => self.find_slow(platform, iova),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_slow<P: Platform>(&self, platform: &P, iova: Iova) -> Option<Found> {
        self.platform.with_cpu(platform, |cpu| {
            let _section = self.section(cpu);
            self.find_in(iova.get())
        })
    }

    /// Returns the leaf that translates `iova`. Called inside a section.
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
}
