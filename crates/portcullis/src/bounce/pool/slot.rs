//! What the pool notes about each slot, in 64 bytes of plain words. A slot is always in one pair of
//! hands: those of the list that it is in, or of the mapping that it is lent to.
//!
//! So its words are written without atomic read-modify-writes. They are atomics for the sake of
//! callers that break the rules, who get wrong answers and no undefined behaviour. A slot changes
//! hands by a list's lock, by a CPU's turn ([`BiasedLock`](crate::percpu::BiasedLock)), or with the
//! address that the driver carries from map to unmap: each of these orders what was written before.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

use crate::addr::{Direction, PhysAddr, PhysSegment};
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, Ordering};

/// The group of a slot whose bytes may be handed to no device: no device has it.
pub(super) const NO_GROUP: u64 = u64::MAX;

/// Beside the group of a slot: some bytes in its buffer are a CPU's, which no driver may find there. A mapping that is filled
/// as a whole when it is made shows none of them.
pub(super) const CPU_BYTES: u64 = 1 << 32;

/// No memory is there.
const NO_BUFFER: u64 = u64::MAX;

/// Where a slot is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Phase {
    /// Without a buffer.
    Empty = 0,
    /// With a buffer that is mapped, waiting for its next use; or on its way from one list to another.
    Free = 1,
    /// Lent to a mapping.
    Live = 2,
    /// With a buffer that is unmapped, but may still be reached.
    Retired = 3,
    /// The same, and another's mapping was met in its addresses, which must not be used again.
    Lost = 4,
    /// With a buffer of which it is not known whether it is mapped, as the mapper panicked.
    Torn = 5,
}

/// Which way data goes between a buffer and the original.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Toward {
    Buffer,
    Original,
}

/// What a mapping through a bounce buffer was made for: one word of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub direction: Direction,
    /// What the device leaves unwritten is to stay as it was.
    pub copy_in: bool,
    /// The buffer is zeroed when the mapping ends.
    pub wipe: bool,
    /// The original is a list.
    pub listed: bool,
    /// Bytes before the data in the buffer.
    pub offset: u64,
}

const PHASE: u64 = 7;
const DIRECTION_SHIFT: u32 = 3;
const COPY_IN: u64 = 1 << 5;
const WIPE: u64 = 1 << 6;
const LISTED: u64 = 1 << 7;
const OFFSET_SHIFT: u32 = 8;

impl Terms {
    /// Returns whether a map gives the device the original's bytes.
    #[inline]
    pub(super) fn copies_in(&self) -> bool {
        self.copy_in || self.copies(Toward::Buffer)
    }

    /// Returns whether the original gets what the device wrote.
    #[inline]
    pub(super) fn copies_out(&self) -> bool {
        !matches!(self.direction, Direction::ToDevice)
    }

    /// Returns whether a sync copies in the direction `into`. It copies nothing into a buffer that the device only writes, even where the map
    /// did: that would undo the device's later writes. (Linux's swiotlb copies nothing there, either.)
    #[inline]
    pub(super) fn copies(&self, into: Toward) -> bool {
        match into {
            Toward::Buffer => !matches!(self.direction, Direction::FromDevice),
            Toward::Original => self.copies_out(),
        }
    }

    #[inline]
    fn encode(self) -> u64 {
        let flag = |set, bit| if set { bit } else { 0 };
        (self.direction.index() as u64) << DIRECTION_SHIFT
            | flag(self.copy_in, COPY_IN)
            | flag(self.wipe, WIPE)
            | flag(self.listed, LISTED)
            | self.offset << OFFSET_SHIFT
    }

    #[inline]
    fn decode(word: u64) -> Self {
        Self {
            direction: Direction::from_bits(word >> DIRECTION_SHIFT),
            copy_in: word & COPY_IN != 0,
            wipe: word & WIPE != 0,
            listed: word & LISTED != 0,
            offset: word >> OFFSET_SHIFT,
        }
    }
}

/// One slot.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Slot {
    /// A [`Phase`], and the [`Terms`] of a live mapping.
    state: LocalU64,
    /// Where the buffer is, or [`NO_BUFFER`].
    buffer: LocalU64,
    /// The [link](link_to) to the next in a list or magazine.
    next: LocalU64,
    /// Where the original is, if it is in one piece. In the first slot of a magazine: the link to the next magazine.
    origin: LocalU64,
    /// Bytes of the mapping. In the first slot of a magazine: how many slots the magazine has.
    len: LocalU64,
    /// Who used the buffer last.
    group: LocalU64,
    /// Bytes from the buffer's start of which some were copied in since it was last wiped.
    dirty: LocalU64,
    /// The original, if it is a list; also memory kept for the next one.
    pub list: Parked<Pieces>,
}

/// An original in pieces.
#[derive(Debug, Default)]
pub(super) struct Pieces(pub Vec<PhysSegment>);

/// The link to slot `index`; 0 is no slot.
#[inline]
pub(super) const fn link_to(index: usize) -> u64 {
    index as u64 + 1
}

/// The slot that a link leads to.
#[inline]
pub(super) const fn index_of(link: u64) -> Option<usize> {
    match link.checked_sub(1) {
        Some(index) => Some(index as usize),
        None => None,
    }
}

/// Slots threaded one after another: the link to the first, and their number, which is never 0 for
/// a magazine in a depot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Magazine {
    pub first: u64,
    pub slots: u64,
}

impl Slot {
    pub(super) fn new() -> Self {
        let word = || LocalU64::new(0);
        Self {
            state: word(),
            buffer: LocalU64::new(NO_BUFFER),
            next: word(),
            origin: word(),
            len: word(),
            group: word(),
            dirty: word(),
            list: Parked::default(),
        }
    }

    #[inline]
    pub(super) fn phase(&self) -> Phase {
        match self.state.get() & PHASE {
            0 => Phase::Empty,
            1 => Phase::Free,
            2 => Phase::Live,
            3 => Phase::Retired,
            5 => Phase::Torn,
            _ => Phase::Lost,
        }
    }

    /// Puts the slot into a phase that has no terms.
    #[inline]
    pub(super) fn set_phase(&self, phase: Phase) {
        self.state.set(phase as u64);
    }

    /// Lends the slot to a mapping of `len` bytes; `origin` is where the original begins.
    #[inline]
    pub(super) fn lend(&self, terms: Terms, origin: PhysAddr, len: u64) {
        self.origin.set(origin.get());
        self.len.set(len);
        self.state.set(Phase::Live as u64 | terms.encode());
    }

    /// Returns the direction's number and the offset of the mapping that the slot is lent to, if
    /// that mapping is of one piece and asks for no copy-in and no wiping.
    #[inline]
    pub(super) fn lent_plainly(&self) -> Option<(usize, u64)> {
        let state = self.state.get();
        let plain = state & (PHASE | COPY_IN | WIPE | LISTED) == Phase::Live as u64;
        plain.then_some(((state >> DIRECTION_SHIFT & 3) as usize, state >> OFFSET_SHIFT))
    }

    /// As [`lent_plainly`](Self::lent_plainly), for a mapping that may have asked for a copy-in.
    #[inline]
    pub(super) fn lent_simply(&self) -> Option<(usize, u64)> {
        let state = self.state.get();
        let simple = state & (PHASE | WIPE | LISTED) == Phase::Live as u64;
        simple.then_some(((state >> DIRECTION_SHIFT & 3) as usize, state >> OFFSET_SHIFT))
    }

    /// The terms of the mapping that the slot is lent to; `None` for a slot that is not.
    #[inline]
    pub(super) fn lent(&self) -> Option<Terms> {
        let state = self.state.get();
        (state & PHASE == Phase::Live as u64).then(|| Terms::decode(state))
    }

    /// The original of a mapping; of a list, where it begins and how long it is.
    #[inline]
    pub(super) fn origin(&self) -> PhysSegment {
        PhysSegment { phys: PhysAddr::new(self.origin.get()), len: self.len.get() }
    }

    #[inline]
    pub(super) fn buffer(&self) -> Option<PhysAddr> {
        let buffer = self.buffer.get();
        (buffer != NO_BUFFER).then_some(PhysAddr::new(buffer))
    }

    pub(super) fn set_buffer(&self, buffer: Option<PhysAddr>) {
        self.buffer.set(buffer.map_or(NO_BUFFER, PhysAddr::get));
    }

    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.next.get()
    }

    #[inline]
    pub(super) fn set_next(&self, link: u64) {
        self.next.set(link);
    }

    /// Of the first slot of a magazine: the link to the next magazine, and how many slots this one has.
    pub(super) fn magazine(&self) -> (u64, u64) {
        (self.origin.get(), self.len.get())
    }

    pub(super) fn set_magazine(&self, next_magazine: u64, slots: u64) {
        self.origin.set(next_magazine);
        self.len.set(slots);
    }

    #[inline]
    pub(super) fn group(&self) -> u64 {
        self.group.get()
    }

    /// Whose bytes the slot's buffer has, whether or not some of them are a CPU's.
    #[inline]
    pub(super) fn whose(&self) -> u64 {
        self.group.get() & !CPU_BYTES
    }

    #[inline]
    pub(super) fn set_group(&self, group: u64) {
        self.group.set(group);
    }

    #[inline]
    pub(super) fn dirty(&self) -> u64 {
        self.dirty.get()
    }

    #[inline]
    pub(super) fn set_dirty(&self, bytes: u64) {
        self.dirty.set(bytes);
    }
}

/// A box whose taker has it alone.
///
/// The one thing of a slot that lives on the heap, so no caller may find it freed: taking is an exchange, and two
/// callers that want it at once, against the rules, do not both get it. What is in the box was written before the release with
/// which it was put; the acquire with which it is taken sees that.
#[derive(Debug)]
pub(super) struct Parked<T>(AtomicPtr<T>);

impl<T> Default for Parked<T> {
    fn default() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }
}

impl<T> Parked<T> {
    /// Takes what is there, if no other caller has it. One exchange.
    pub(super) fn take(&self) -> Option<Box<T>> {
        let boxed = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: only `put` stores pointers, out of a box, and each is exchanged for null before it is used: this
        // caller alone has it.
        (!boxed.is_null()).then(|| unsafe { Box::from_raw(boxed) })
    }

    /// Puts `value` there, and drops what was. One exchange.
    pub(super) fn put(&self, value: Box<T>) {
        let old = self.0.swap(Box::into_raw(value), Ordering::AcqRel);
        if !old.is_null() {
            // SAFETY: as in `take`.
            drop(unsafe { Box::from_raw(old) });
        }
    }
}

impl<T> Drop for Parked<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory may begin at address 0.
    #[test]
    #[cfg(not(loom))]
    fn the_frame_at_0_is_a_buffer() {
        let slot = Slot::new();
        for buffer in [None, Some(PhysAddr::new(0)), Some(PhysAddr::new(1 << 51)), None] {
            slot.set_buffer(buffer);
            assert_eq!(slot.buffer(), buffer);
        }
    }

    #[test]
    #[cfg(not(loom))]
    fn terms_are_kept_as_they_are() {
        let slot = Slot::new();
        for bits in 0..8 {
            for direction in Direction::ALL {
                let (copy_in, wipe, listed) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
                let terms = Terms { direction, copy_in, wipe, listed, offset: 0xfff8 };
                slot.lend(terms, PhysAddr::new(7), 9);
                assert_eq!((slot.lent(), slot.phase()), (Some(terms), Phase::Live));
                assert_eq!(slot.origin(), PhysSegment { phys: PhysAddr::new(7), len: 9 });
            }
        }
        for phase in [Phase::Empty, Phase::Free, Phase::Retired, Phase::Lost, Phase::Torn] {
            slot.set_phase(phase);
            assert_eq!((slot.lent(), slot.phase()), (None, phase));
        }
    }

    /// Two that want a list at once, one of which puts it back: each that gets it has it alone and whole.
    #[test]
    #[cfg(loom)]
    fn a_parked_box_is_in_one_pair_of_hands() {
        use loom::sync::Arc;
        use loom::thread;
        loom::model(|| {
            let parked = Arc::new(Parked::default());
            parked.put(Box::new(alloc::vec![1]));
            let work = |parked: &Parked<Vec<u32>>| {
                let taken = parked.take();
                let got = taken.is_some();
                if let Some(mut list) = taken {
                    let last = *list.last().unwrap();
                    assert_eq!(last as usize, list.len());
                    list.push(last + 1);
                    parked.put(list);
                }
                u32::from(got)
            };
            let other = {
                let parked = Arc::clone(&parked);
                thread::spawn(move || work(&parked))
            };
            let got = work(&parked) + other.join().unwrap();
            assert_eq!(parked.take().unwrap().len() as u32, 1 + got);
            assert!(got >= 1);
        });
    }
}
