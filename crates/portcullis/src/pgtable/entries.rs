//! Reads the tables as a whole, for reports and debugging. A reader changes nothing.

use super::format::{Attributes, Entry, Format, Layout};
use super::place::Position;
use super::table::{PageTable, RUNS_AT_ONCE};
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::platform::{Frames, Platform};
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

impl<F: Frames, X: Format> PageTable<F, X> {
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
