//! A set-associative cache with true LRU replacement: the basis of all of the unit's caches.
//!
//! The set of an entry is its *number* modulo the count of sets, as hardware takes the low bits of the page number. Finding, inserting and
//! removing one entry is O(ways); nothing allocates after `new`.

use std::ops::{Range, RangeInclusive};

#[derive(Debug, Clone, Copy)]
struct Slot<E> {
    /// The time of its last use; 0 for a free slot, which is therefore the oldest.
    stamp: u64,
    entry: E,
}

#[derive(Debug)]
pub(crate) struct Sets<E> {
    slots: Box<[Slot<E>]>,
    ways: usize,
    sets: u64,
    clock: u64,
    len: usize,
}

impl<E: Copy> Sets<E> {
    /// A cache of `entries` in sets of `ways` (rounded down to whole sets, at least one of one way). `placeholder` fills free slots.
    pub(crate) fn new(entries: usize, ways: usize, placeholder: E) -> Self {
        let ways = ways.clamp(1, entries.max(1));
        let sets = (entries / ways).max(1);
        let slots = vec![Slot { stamp: 0, entry: placeholder }; sets * ways].into();
        Self { slots, ways, sets: sets as u64, clock: 0, len: 0 }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The slot in the set of `number` whose entry satisfies `is`.
    #[inline]
    pub(crate) fn find(&self, number: u64, is: impl Fn(&E) -> bool) -> Option<usize> {
        let set = self.set(number);
        let first = set.start;
        let way = self.slots[set].iter().position(|slot| slot.stamp != 0 && is(&slot.entry))?;
        Some(first + way)
    }

    /// The entry in a slot of [`find`](Self::find).
    pub(crate) fn get(&self, slot: usize) -> E {
        self.slots[slot].entry
    }

    pub(crate) fn get_mut(&mut self, slot: usize) -> &mut E {
        &mut self.slots[slot].entry
    }

    /// Makes the entry the most recently used of its set.
    pub(crate) fn touch(&mut self, slot: usize) {
        self.clock += 1;
        self.slots[slot].stamp = self.clock;
    }

    /// Inserts `entry` in place of the one that satisfies `same`, or else of the oldest, which is returned.
    #[inline]
    pub(crate) fn insert(&mut self, number: u64, entry: E, same: impl Fn(&E) -> bool) -> Option<E> {
        let set = self.set(number);
        let slots = &mut self.slots[set];
        let (mut chosen, mut oldest) = (0, u64::MAX);
        for (way, slot) in slots.iter().enumerate() {
            if slot.stamp != 0 && same(&slot.entry) {
                chosen = way;
                break;
            }
            if slot.stamp < oldest {
                (chosen, oldest) = (way, slot.stamp);
            }
        }
        self.clock += 1;
        let old = std::mem::replace(&mut slots[chosen], Slot { stamp: self.clock, entry });
        if old.stamp == 0 {
            self.len += 1;
            return None;
        }
        Some(old.entry)
    }

    /// Removes the entries that satisfy `gone` and whose number is in `numbers`. Visits only the sets of those numbers, or once every slot
    /// if that is less: O(min(numbers x ways, capacity)).
    pub(crate) fn remove_numbers(
        &mut self,
        numbers: RangeInclusive<u64>,
        gone: impl Fn(&E) -> bool,
        mut removed: impl FnMut(E),
    ) {
        if numbers.end().saturating_sub(*numbers.start()) >= self.sets - 1 {
            return self.remove(gone, removed);
        }
        for number in numbers {
            self.remove_slots(self.set(number), &gone, &mut removed);
        }
    }

    /// Removes the entries that satisfy `gone`. O(capacity).
    pub(crate) fn remove(&mut self, gone: impl Fn(&E) -> bool, mut removed: impl FnMut(E)) {
        if self.len > 0 {
            self.remove_slots(0..self.slots.len(), &gone, &mut removed);
        }
    }

    /// The entries, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = E> {
        self.slots.iter().filter(|slot| slot.stamp != 0).map(|slot| slot.entry)
    }

    fn remove_slots(&mut self, slots: Range<usize>, gone: &impl Fn(&E) -> bool, removed: &mut impl FnMut(E)) {
        for slot in &mut self.slots[slots] {
            if slot.stamp != 0 && gone(&slot.entry) {
                slot.stamp = 0;
                self.len -= 1;
                removed(slot.entry);
            }
        }
    }

    fn set(&self, number: u64) -> Range<usize> {
        // A division costs more than the rest of a lookup, and hardware has powers of two.
        let set = if self.sets.is_power_of_two() { number & (self.sets - 1) } else { number % self.sets };
        let first = set as usize * self.ways;
        first..first + self.ways
    }
}

/// The indices of the set bits of `mask`, ascending.
pub(crate) fn bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let lowest = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lowest < u64::BITS).then_some(lowest)
    })
}
