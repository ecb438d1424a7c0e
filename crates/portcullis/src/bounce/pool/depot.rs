//! The depot of a class, which all CPUs share under one lock: magazines that CPUs had no room for, slots without a buffer, and slots whose buffer is
//! unmapped but may still be reached. Each slot is in at most one of these lists. Each operation is O(1).

use super::slot::{Magazine, Phase, Slot};

const MOST_IN_BLOCK: usize = 1024;

/// Slots that were never used. CPUs prefetch lines in pairs, so slots 2n and 2n + 1 of two CPUs are falsely shared. Consecutive fresh slots usually
/// go to different CPUs. So a block hands out its even slots first, and then its odd ones.
#[derive(Debug, Default)]
struct Fresh {
    first: usize,
    taken: usize,
    end: usize,
    block_shift: u32,
}

impl Fresh {
    /// The slots from `first` up to `end`; their number is a power of two. Blocks are small, so that slots in use lie close together, and few page
    /// tables map them.
    fn new(first: usize, end: usize) -> Self {
        let block = ((end - first) / 16).clamp(1, MOST_IN_BLOCK);
        Self { first, taken: 0, end, block_shift: block.ilog2() }
    }

    fn take(&mut self) -> Option<usize> {
        let mask = (1 << self.block_shift) - 1;
        let inside = self.taken & mask;
        // Even numbers first, then the odd ones.
        let rotated = (inside << 1 | inside << 1 >> self.block_shift) & mask;
        let slot = self.first + (self.taken & !mask) + rotated;
        (slot < self.end).then(|| {
            self.taken += 1;
            slot
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct Depot {
    /// For each kind of permission, a stack of magazines: the link to the newest one's first slot, which links the next ([`Slot::magazine`]), and the
    /// number of slots of all.
    magazines: [Magazine; 3],
    /// For each kind, the minimum of `magazines`' slots since the timer looked last. These are outside of the working set, as Bonwick and Adams call
    /// it: no map has needed them.
    minimum: [u64; 3],
    /// Slots whose buffer was freed.
    empty: Magazine,
    fresh: Fresh,
    /// Slots whose buffer is unmapped, but may still be reached.
    pub retired: Magazine,
    /// Slots with a buffer, wherever they are, and their peak.
    pub buffers: u64,
    pub peak: u64,
    /// Leaked slots: another caller has changed the translations at their addresses.
    pub lost: u64,
    /// Mappings through slots that no [`Cpu::reused`](super::cpu::Cpu::reused) counts.
    pub not_reused: u64,
}

impl Depot {
    pub(super) fn new(first: usize, end: usize) -> Self {
        Self { fresh: Fresh::new(first, end), ..Self::default() }
    }

    /// Puts a magazine, which may be empty.
    pub(super) fn put(&mut self, slots: &[Slot], kind: usize, magazine: Magazine) {
        let all = &mut self.magazines[kind];
        if let Some(slot) = magazine.first().and_then(|index| slots.get(index)) {
            slot.set_magazine(Magazine { link: all.link, slots: magazine.slots });
            *all = Magazine { link: magazine.link, slots: all.slots + magazine.slots };
        }
    }

    pub(super) fn take(&mut self, slots: &[Slot], kind: usize) -> Option<Magazine> {
        let magazine = self.take_uncounted(slots, kind);
        self.count_demand(kind);
        magazine
    }

    /// As [`take`](Self::take), without [counting](Self::count_demand) a demand: for callers that may put slots back.
    pub(super) fn take_uncounted(&mut self, slots: &[Slot], kind: usize) -> Option<Magazine> {
        let all = &mut self.magazines[kind];
        let Magazine { link: next, slots } = slots.get(all.first()?)?.magazine();
        let magazine = Magazine { link: all.link, slots };
        *all = Magazine { link: next, slots: all.slots.saturating_sub(slots) };
        Some(magazine)
    }

    /// Lowers the minimum of `kind` to the present number of slots.
    pub(super) fn count_demand(&mut self, kind: usize) {
        let free = self.free_of(kind);
        let minimum = &mut self.minimum[kind];
        *minimum = (*minimum).min(free);
    }

    /// Puts one slot onto the newest magazine, or into a new one if that has `most` slots.
    pub(super) fn put_one(&mut self, slots: &[Slot], kind: usize, index: usize, most: u64) {
        let mut magazine = self.take_uncounted(slots, kind).unwrap_or_default();
        if magazine.slots >= most {
            self.put(slots, kind, core::mem::take(&mut magazine));
        }
        magazine.push(slots, index);
        self.put(slots, kind, magazine);
    }

    pub(super) fn take_one(&mut self, slots: &[Slot], kind: usize) -> Option<usize> {
        let mut magazine = self.take_uncounted(slots, kind)?;
        let (index, _) = magazine.pop(slots)?;
        self.put(slots, kind, magazine);
        self.count_demand(kind);
        Some(index)
    }

    pub(super) fn free_of(&self, kind: usize) -> u64 {
        self.magazines[kind].slots
    }

    pub(super) fn free(&self) -> u64 {
        self.magazines.iter().map(|magazine| magazine.slots).sum()
    }

    /// The slots of `kind` that no map has needed since the last call.
    pub(super) fn unwanted(&mut self, kind: usize) -> u64 {
        let free = self.free_of(kind);
        core::mem::replace(&mut self.minimum[kind], free)
    }

    pub(super) fn take_empty(&mut self, slots: &[Slot]) -> Option<usize> {
        self.empty.pop(slots).map(|(index, _)| index).or_else(|| self.fresh.take())
    }

    pub(super) fn put_empty(&mut self, slots: &[Slot], index: usize) {
        if let Some(slot) = slots.get(index) {
            slot.set_phase(Phase::Empty);
            self.empty.push(slots, index);
        }
    }

    pub(super) fn gained(&mut self, slots: u64) {
        self.buffers += slots;
        self.peak = self.peak.max(self.buffers);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;

    /// A slot that is put back by itself is no demand for its magazine, and one that is taken by itself is a demand for one slot.
    #[test]
    fn a_single_slot_is_not_a_whole_magazine_of_demand() {
        const FULL: u64 = 4;
        let slots: Vec<Slot> = (0..13).map(|_| Slot::new()).collect();
        let mut depot = Depot::new(0, 16);
        for index in 0..10 {
            depot.put_one(&slots, 2, index, FULL);
        }
        assert_eq!(depot.unwanted(2), 0, "all of them came since the timer looked");
        for index in 10..13 {
            depot.put_one(&slots, 2, index, FULL);
        }
        assert_eq!(depot.unwanted(2), 10);
        assert!(depot.take_one(&slots, 2).is_some());
        assert_eq!(depot.unwanted(2), 12);
        let left: BTreeSet<usize> = core::iter::from_fn(|| depot.take_one(&slots, 2)).collect();
        assert_eq!(left.len(), 12);
        assert_eq!(depot.unwanted(2), 0);
    }

    #[test]
    fn every_fresh_slot_is_handed_out_once_and_neighbours_late() {
        for slots in [1, 2, 16, 64, 1 << 12, 1 << 15] {
            let mut fresh = Fresh::new(100, 100 + slots);
            let order: Vec<usize> = core::iter::from_fn(|| fresh.take()).collect();
            assert_eq!(fresh.take(), None);
            assert_eq!(order.len(), slots);
            assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), (100..100 + slots).collect());
            let half = (slots / 16).min(MOST_IN_BLOCK) / 2;
            assert!(order.iter().take(half).all(|slot| slot % 2 == 0), "{slots}");
        }
    }
}
