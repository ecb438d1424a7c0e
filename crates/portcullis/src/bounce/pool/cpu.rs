//! What one CPU keeps of the pool: for each class and kind of permission two stacks of free slots.
//!
//! The slot that was freed last is used first, as its buffer is still in the CPU's cache. Slots come from and go to
//! the [depot](super::depot) a chain at a time: the older stack, which is full when it goes. So each operation is a
//! few words, whatever there is.

use super::layout::CLASS_ROOM;
use super::slot::{Chain, Slot, index_of, link_to};
use crate::percpu::LocalU64;

/// One CPU's stacks. All its words are changed by the CPU that has it alone.
#[derive(Debug, Default)]
pub(super) struct Cpu {
    stacks: [[Pair; 4]; CLASS_ROOM],
    /// Mappings for which a buffer was waiting here.
    pub reused: LocalU64,
}

#[derive(Debug, Default)]
#[repr(align(32))]
struct Pair {
    /// The link to the newest.
    first: LocalU64,
    slots: LocalU64,
    /// The older stack.
    older: LocalU64,
    older_slots: LocalU64,
}

impl Cpu {
    /// The newest free slot of `class` for `kind`, if it is on the newer stack and `fits`.
    #[inline]
    pub(super) fn pop_if<'a>(
        &self,
        slots: &'a [Slot],
        class: usize,
        kind: usize,
        fits: impl FnOnce(&Slot) -> bool,
    ) -> Option<(usize, &'a Slot)> {
        let pair = self.pair(class, kind);
        let left = pair.slots.get().checked_sub(1)?;
        let index = index_of(pair.first.get())?;
        let slot = slots.get(index)?;
        if !fits(slot) {
            return None;
        }
        pair.first.set(slot.next());
        pair.slots.set(left);
        self.reused.set(self.reused.get() + 1);
        Some((index, slot))
    }

    /// The newest free slot of `class` for `kind`.
    pub(super) fn pop(&self, slots: &[Slot], class: usize, kind: usize) -> Option<usize> {
        let pair = self.pair(class, kind);
        if pair.slots.get() == 0 {
            // The older one's turn, if there is one.
            pair.first.set(pair.older.get());
            pair.slots.set(pair.older_slots.get());
            pair.older_slots.set(0);
        }
        self.pop_if(slots, class, kind, |_| true).map(|(index, _)| index)
    }

    /// Puts a free slot onto its stack, which has room for `most`. A chain that must go to the depot for it.
    #[inline]
    pub(super) fn push(
        &self,
        slots: &[Slot],
        (class, kind): (usize, usize),
        index: usize,
        most: u64,
    ) -> Option<Chain> {
        let pair = self.pair(class, kind);
        let mut full = None;
        let slot = slots.get(index)?;
        let mut newer = pair.slots.get();
        if newer >= most {
            full = chain(pair.older.get(), pair.older_slots.get());
            pair.older.set(pair.first.get());
            pair.older_slots.set(newer);
            newer = 0;
        }
        slot.set_next(if newer == 0 { 0 } else { pair.first.get() });
        pair.first.set(link_to(index));
        pair.slots.set(newer + 1);
        full
    }

    /// Takes in a chain from the depot, for a stack that has run dry.
    pub(super) fn refill(&self, class: usize, kind: usize, chain: Chain) {
        let pair = self.pair(class, kind);
        pair.first.set(chain.first);
        pair.slots.set(chain.slots);
    }

    /// Gives up everything: each chain goes to `out` with its class and kind. Where that panics, the others stay.
    pub(super) fn drain(&self, mut out: impl FnMut(usize, usize, Chain)) {
        for (class, pairs) in self.stacks.iter().enumerate() {
            for (kind, pair) in pairs.iter().enumerate() {
                for (first, slots) in [(&pair.older, &pair.older_slots), (&pair.first, &pair.slots)] {
                    let chain = chain(first.get(), slots.get());
                    slots.set(0);
                    chain.into_iter().for_each(|chain| out(class, kind, chain));
                }
            }
        }
    }

    /// How many free slots of `class` there are, of all kinds. A hint, for others.
    pub(super) fn free(&self, class: usize) -> u64 {
        let pairs = self.stacks[class].iter();
        pairs.map(|pair| pair.slots.get() + pair.older_slots.get()).sum()
    }

    #[inline]
    fn pair(&self, class: usize, kind: usize) -> &Pair {
        &self.stacks[class][kind]
    }
}

fn chain(first: u64, slots: u64) -> Option<Chain> {
    (slots > 0).then_some(Chain { first, slots })
}
