//! Reads the tables: for one address, and as a whole, for reports and debugging. A reader changes nothing.

use super::format::{Attributes, Entry, Format, Layout};
use super::place::Position;
use super::table::{PageTable, RUNS_AT_ONCE};
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::platform::{Frames, LocalCpu, Platform};
use crate::sync::{AtomicU64, Ordering};

/// A leaf of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// The addresses of its page.
    pub range: IovaRange,
    /// The memory at the first of them.
    pub phys: PhysAddr,
    /// The permissions and the memory type.
    pub attributes: Attributes,
}

type Leaves = arrayvec::ArrayVec<Leaf, RUNS_AT_ONCE>;

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

    /// Returns the leaves in `range`, in the order of addresses, for reports and debugging: one item for each leaf,
    /// also for contiguous PTEs. A leaf of which only a part lies in `range` is returned as a whole.
    ///
    /// Tables may change meanwhile, on any CPU. A leaf that is there from the first item to the last is returned once;
    /// one that is mapped or unmapped meanwhile may be missing. Each returned leaf existed at some moment.
    ///
    /// Costs one step for each entry of each table. Context: allocates nothing. Holds a CPU for at most 64 leaves or
    /// frames of tables at a time, and none while the caller has an item.
    pub fn entries<'a, P: Platform>(
        &'a self,
        platform: &'a P,
        range: IovaRange,
    ) -> impl Iterator<Item = Leaf> + use<'a, F, X, P> {
        let last = range.last().min(self.last_iova()).get();
        let mut next = Some(range.start().get()).filter(|start| *start <= last);
        let batch = move || {
            let mut at = next?;
            let mut found = Leaves::new();
            next = self.platform.with_cpu(platform, |cpu| {
                let _section = self.section(cpu);
                for _ in 0..RUNS_AT_ONCE {
                    if found.is_full() {
                        break;
                    }
                    at = self.read_run(at, last, &mut found)?;
                }
                Some(at)
            });
            Some(found)
        };
        core::iter::from_fn(batch).flatten()
    }

    /// Adds the leaves from `iova` to `last` that lie in one frame of one table, up to the entry of a table, as long as
    /// there is room. Returns the address at which to go on, or `None` if that is after `last`. Called inside a
    /// section.
    fn read_run(&self, iova: u64, last: u64, found: &mut Leaves) -> Option<u64> {
        let format = self.format();
        let mut at = self.top(iova);
        let decode = |at: Position, word: &AtomicU64| {
            let entry = word.load(Ordering::Acquire);
            (entry, format.decode(entry, at.level))
        };
        while let (_, Entry::Table { table, level }) = decode(at, self.word(at)) {
            at = self.step(iova, table, level);
        }
        let shift = format.shift(at.level);
        let mut next = iova >> shift << shift;
        let mut words = self.words(at).iter();
        while next <= last
            && let Some(word) = words.next()
        {
            let mut end = next + (1 << shift);
            match decode(at, word) {
                (_, Entry::Table { .. }) => return Some(next),
                (_, Entry::Leaf { .. }) if found.is_full() => return Some(next),
                (entry, Entry::Leaf { run }) => {
                    let len = 1 << (shift + run);
                    let start = next - next % len;
                    let (phys, attributes) =
                        (format.page(entry, at.level), format.attributes(entry, at.level));
                    if let Ok(range) = IovaRange::new(Iova::new(start), len) {
                        found.push(Leaf { range, phys, attributes });
                    }
                    end = start + len;
                    let others = ((end - next) >> shift) as usize - 1;
                    words = words.as_slice().get(others..).unwrap_or_default().iter();
                }
                (_, Entry::Absent) => {}
            }
            next = end;
        }
        (next <= last).then_some(next)
    }
}
