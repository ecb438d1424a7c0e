//! The entries of a cache, and intrusive lists of them. A number names an entry for the life of the cache; an entry is in at most one list.

use portcullis::addr::IovaRange;

use super::index::Span;

const NONE: u32 = u32::MAX;

/// The state of an entry. Only `Live` ones are shared.
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
    /// The acquiring caller is entering its translations.
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
    pub range: Option<IovaRange>,
    /// The time it was made, on a counter of the cache: it distinguishes uses of the slot.
    pub generation: u64,
    /// Bytes of its granules.
    pub bytes: u64,
    /// Registrations of any part of it.
    pub refs: u64,
    /// Registrations of all of it.
    pub whole: u64,
    /// The bytes that the domain counts as open for it beside used ones.
    pub open: u64,
    pub phase: Phase,
    pub keep: bool,
    /// The owner has forgotten it.
    pub forgotten: bool,
    /// Its addresses are leaked and counted: another caller's translation was found there, or the call that had them has unwound.
    pub lost: bool,
    /// The call that mapped or unmapped it has unwound, or could not remove all of it, so its translations may be there.
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

    /// The open bytes of its granules beside held ones: all, if no holder has all of the range.
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

/// A list of entries by number, and their bytes.
#[derive(Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
    /// Narrower than the bytes: the compiler would update two adjacent words by vector instructions, which take longer here, most of all on
    /// an emulated CPU.
    len: u32,
    pub bytes: u64,
}

impl List {
    pub(super) fn new() -> Self {
        Self { first: NONE, last: NONE, len: 0, bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    /// The number of the first entry, which was pushed first.
    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }
}

/// All entries of the limit, by the numbers that `take` returns.
#[derive(Debug)]
pub(super) struct Slots {
    /// Never longer than the reserved capacity.
    slots: Vec<Slot>,
    most: usize,
    free: List,
    used: usize,
}

impl Slots {
    /// The most entries with numbers.
    pub(super) const MOST: usize = NONE as usize;

    /// Reserves `most` entries; `None` without memory.
    pub(super) fn new(most: usize) -> Option<Self> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(most).ok()?;
        Some(Self { slots, most, free: List::new(), used: 0 })
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Takes a free entry, whose phase the caller changes; `None` if there is none. Does not allocate.
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

    /// Frees an entry that is in no list.
    pub(super) fn give_back(&mut self, number: u32) {
        *self.at_mut(number) = Slot::new();
        let mut free = std::mem::replace(&mut self.free, List::new());
        self.push(&mut free, number);
        self.free = free;
        self.used -= 1;
    }

    pub(super) fn at(&self, number: u32) -> &Slot {
        &self.slots[number as usize]
    }

    pub(super) fn at_mut(&mut self, number: u32) -> &mut Slot {
        &mut self.slots[number as usize]
    }

    pub(super) fn get(&self, number: u32) -> Option<&Slot> {
        self.slots.get(number as usize)
    }

    /// Appends an entry that is in no list to `list`.
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

    /// Removes an entry from `list`, which has it.
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
