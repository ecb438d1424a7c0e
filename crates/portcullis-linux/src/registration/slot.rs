//! The entries of a cache, and lists threaded through them. A number leads to an entry for the life
//! of the cache, and an entry is in one list at most.

use portcullis::addr::IovaRange;

use super::index::Span;

/// No entry.
const NONE: u32 = u32::MAX;

/// The state of an entry. Only `Live` ones are handed out.
///
/// ```text
///   Free -> Mapping -> Live -> Ending -> Free
///               \        \      |  ^ \-> Gone -> Free     (forgotten while held)
///                \--------\     v  |
///                 \-----------> Unconfirmed
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Free,
    /// The caller that acquired it is entering its translations.
    Mapping,
    /// Devices reach it.
    Live,
    /// A caller is removing its translations, and waits for the hardware.
    Ending,
    /// The hardware did not confirm: devices may still reach it. No call works on it.
    Unconfirmed,
    /// Unmapped and confirmed, but its holders still know its addresses.
    Gone,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub span: Option<Span>,
    /// Its addresses, once it has some.
    pub range: Option<IovaRange>,
    /// The time at which it was made, on a counter of the cache: it tells one use of the slot from
    /// another.
    pub generation: u64,
    /// Bytes of its granules.
    pub bytes: u64,
    /// The number of registrations of any part of it.
    pub refs: u64,
    /// The number of those registrations that cover all of it.
    pub whole: u64,
    /// The bytes that the domain counts as open for it beside what is in use.
    pub open: u64,
    pub phase: Phase,
    pub keep: bool,
    /// The owner has had it forgotten.
    pub forgotten: bool,
    /// Its addresses are never used again, and the domain has counted them: another caller's
    /// translation was found there, or a call that had them has not come back.
    pub lost: bool,
    /// The call that mapped or unmapped it has not come back, or could not remove all of it, so its
    /// translations may be there.
    pub interrupted: bool,
    before: u32,
    after: u32,
}

impl Slot {
    fn new() -> Self {
        Self {
            span: None,
            range: None,
            generation: 0,
            bytes: 0,
            refs: 0,
            whole: 0,
            open: 0,
            phase: Phase::Free,
            keep: false,
            forgotten: false,
            lost: false,
            interrupted: false,
            before: NONE,
            after: NONE,
        }
    }

    /// Returns the bytes that are open in its granules beside what is held: all, if no holder has
    /// all of the range.
    pub(super) fn open_now(&self) -> u64 {
        match self.phase {
            Phase::Free | Phase::Mapping | Phase::Gone => 0,
            // The call that ends it recounts when that is over.
            Phase::Ending => self.open,
            Phase::Live | Phase::Unconfirmed => self.open_if_reached(),
        }
    }

    /// The same of an entry that devices reach.
    #[inline]
    pub(super) fn open_if_reached(&self) -> u64 {
        if self.whole == 0 {
            return self.bytes;
        }
        self.bytes.saturating_sub(self.span.map_or(0, |span| span.memory().len))
    }
}

/// Entries in a row, by number, and their bytes.
#[derive(Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
    /// Not as wide as the bytes: two words side by side would be changed by vector instructions, which take longer here, most of all where a CPU is
    /// emulated.
    len: u32,
    pub bytes: u64,
}

impl List {
    pub(super) fn new() -> Self {
        Self { first: NONE, last: NONE, len: 0, bytes: 0 }
    }

    /// Returns how many entries there are.
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns the number of the first entry, the one that was pushed first.
    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }
}

/// All entries that there may be, named by the numbers that `take` returns.
#[derive(Debug)]
pub(super) struct Slots {
    /// Never longer than the capacity that was reserved.
    slots: Vec<Slot>,
    most: usize,
    free: List,
    used: usize,
}

impl Slots {
    /// The most entries that can have numbers.
    pub(super) const MOST: usize = NONE as usize;

    /// Makes room for `most` entries; returns `None` without memory for them.
    pub(super) fn new(most: usize) -> Option<Self> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(most).ok()?;
        Some(Self { slots, most, free: List::new(), used: 0 })
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Takes an entry that is not in use, whose phase the caller is to change; returns `None` if
    /// there is none. Allocates nothing.
    pub(super) fn take(&mut self) -> Option<u32> {
        let number = match self.free.first() {
            Some(number) => {
                let mut free = std::mem::replace(&mut self.free, List::new());
                self.unlink(&mut free, number);
                self.free = free;
                number
            }
            None if self.slots.len() < self.most => {
                self.slots.push(Slot::new());
                (self.slots.len() - 1) as u32
            }
            None => return None,
        };
        self.used += 1;
        Some(number)
    }

    /// Takes back an entry that is in no list.
    pub(super) fn give_back(&mut self, number: u32) {
        *self.at_mut(number) = Slot::new();
        let mut free = std::mem::replace(&mut self.free, List::new());
        self.push(&mut free, number);
        self.free = free;
        self.used -= 1;
    }

    /// Returns entry `number`, which [`take`](Self::take) returned.
    pub(super) fn at(&self, number: u32) -> &Slot {
        &self.slots[number as usize]
    }

    pub(super) fn at_mut(&mut self, number: u32) -> &mut Slot {
        &mut self.slots[number as usize]
    }

    /// Returns entry `number`, whatever its phase.
    pub(super) fn get(&self, number: u32) -> Option<&Slot> {
        self.slots.get(number as usize)
    }

    /// Makes an entry that is in no list the last of `list`.
    pub(super) fn push(&mut self, list: &mut List, number: u32) {
        let last = list.last;
        let slot = self.at_mut(number);
        (slot.before, slot.after) = (last, NONE);
        list.bytes += slot.bytes;
        list.len += 1;
        match last {
            NONE => list.first = number,
            last => self.at_mut(last).after = number,
        }
        list.last = number;
    }

    /// Takes an entry out of `list`, in which it is.
    pub(super) fn unlink(&mut self, list: &mut List, number: u32) {
        let slot = self.at_mut(number);
        let (before, after) = (slot.before, slot.after);
        (slot.before, slot.after) = (NONE, NONE);
        list.bytes -= slot.bytes;
        list.len -= 1;
        match before {
            NONE => list.first = after,
            before => self.at_mut(before).after = after,
        }
        match after {
            NONE => list.last = before,
            after => self.at_mut(after).before = before,
        }
    }

    /// Yields all entries in use.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut().filter(|slot| slot.phase != Phase::Free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_in_one_list_at_a_time_in_the_order_of_their_pushes() {
        let mut slots = Slots::new(4).unwrap();
        let numbers: Vec<u32> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!((numbers.len(), slots.used()), (4, 4));
        let mut list = List::new();
        for number in &numbers {
            slots.at_mut(*number).bytes = 1 << number;
            slots.push(&mut list, *number);
        }
        slots.unlink(&mut list, numbers[1]);
        assert_eq!((list.first(), list.len(), list.bytes), (Some(numbers[0]), 3, 0b1101));
        slots.push(&mut list, numbers[1]);
        let order = [0, 2, 3, 1].map(|n| numbers[n]);
        for number in order {
            assert_eq!(list.first(), Some(number));
            slots.unlink(&mut list, number);
            slots.give_back(number);
        }
        assert_eq!((list.first(), list.len(), list.bytes, slots.used()), (None, 0, 0, 0));
        assert_eq!(slots.take(), Some(order[0]), "the entry that was given back first");
    }
}
