//! The metadata of a slot: one cache line of plain words. A slot always has one owner: the list that it is on, or the mapping that uses it.
//!
//! So its words are written without atomic read-modify-writes. They are atomics for callers that break the rules, who get wrong answers but no
//! undefined behaviour. A slot changes its owner by a list's lock, in a CPU's exclusive section ([`BiasedLock`](crate::percpu::BiasedLock)), or with
//! the address that the driver carries from map to unmap: each of these orders earlier writes.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

use crate::addr::{Direction, PhysAddr, PhysSegment};
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, Ordering};

/// A group that no device is in: a slot of this group is zeroed before its next use.
pub(super) const NO_GROUP: u64 = u64::MAX;

/// Set in the group of a slot whose buffer may hold bytes that a CPU wrote, which no driver may find. Such a slot is zeroed before its next use,
/// unless that is a mapping of the same group whose copy-in overwrites all of the mapping's bytes.
pub(super) const CPU_BYTES: u64 = 1 << 32;

const NO_BUFFER: u64 = u64::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Phase {
    Empty = 0,
    /// With a mapped buffer, idle, or between two lists.
    Free = 1,
    Live = 2,
    /// With a buffer that is unmapped, but may still be reached.
    Retired = 3,
    /// The same, and its addresses have leaked: another caller has changed the translations there.
    Lost = 4,
    /// With a buffer that may or may not be mapped, as the mapper panicked.
    Torn = 5,
}

/// Which copy of the bytes a sync, a map or an unmap brings up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Toward {
    /// What the device reaches.
    Buffer,
    /// What the CPU uses.
    Original,
}

/// The properties of a mapping through a bounce buffer: one word of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub direction: Direction,
    /// Bytes that the device does not write must stay as they were.
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
    #[inline]
    pub(super) fn copies_in(&self) -> bool {
        self.copy_in || self.copies(Toward::Buffer)
    }

    #[inline]
    pub(super) fn copies_out(&self) -> bool {
        !matches!(self.direction, Direction::ToDevice)
    }

    /// Whether a sync copies in the direction `into`. It copies nothing into a buffer that the device only writes, even if the map did:
    /// that would undo later writes of the device. (Nor does Linux's swiotlb.)
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

#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Slot {
    /// A [`Phase`], and the [`Terms`] of a live mapping.
    state: LocalU64,
    /// Where the buffer is, or [`NO_BUFFER`].
    buffer: LocalU64,
    /// The [link](link_to) to the next slot in a [`Magazine`].
    pub next: LocalU64,
    /// The address of the original, if it is one piece. In the first slot of a magazine: the link to the next magazine.
    origin: LocalU64,
    /// Bytes of the mapping. In the first slot of a magazine: the magazine's slots.
    len: LocalU64,
    /// The group that used the buffer last, perhaps with [`CPU_BYTES`].
    pub group: LocalU64,
    /// Bytes from the buffer's start that may have been copied in since it was last wiped.
    pub dirty: LocalU64,
    /// The original, if it is a list; or memory for the next one.
    pub list: Parked<Pieces>,
}

#[derive(Debug, Default)]
pub(super) struct Pieces(pub Vec<PhysSegment>);

/// The link to slot `index`; 0 is no slot.
#[inline]
pub(super) fn link_to(index: usize) -> u64 {
    index as u64 + 1
}

#[inline]
fn index_of(link: u64) -> Option<usize> {
    Some(link.checked_sub(1)? as usize)
}

/// A list of slots, linked through them, newest first: the link to the first (0 in an empty list), and their number. Each operation is O(1).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Magazine {
    pub link: u64,
    pub slots: u64,
}

impl Magazine {
    pub(super) fn first(self) -> Option<usize> {
        index_of(self.link)
    }

    /// Adds a slot that is in no other list.
    #[inline]
    pub(super) fn push(&mut self, slots: &[Slot], index: usize) {
        if let Some(slot) = slots.get(index) {
            slot.next.set(self.link);
            *self = Self { link: link_to(index), slots: self.slots + 1 };
        }
    }

    #[inline]
    pub(super) fn pop<'a>(&mut self, slots: &'a [Slot]) -> Option<(usize, &'a Slot)> {
        let left = self.slots.checked_sub(1)?;
        let index = index_of(self.link)?;
        let slot = slots.get(index)?;
        *self = Self { link: slot.next.get(), slots: left };
        Some((index, slot))
    }
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

    #[inline]
    pub(super) fn set_phase(&self, phase: Phase) {
        self.state.set(phase as u64);
    }

    /// Records that a mapping of `len` bytes uses the slot, whose original begins at `origin`.
    #[inline]
    pub(super) fn set_mapping(&self, terms: Terms, origin: PhysAddr, len: u64) {
        self.origin.set(origin.get());
        self.len.set(len);
        self.state.set(Phase::Live as u64 | terms.encode());
    }

    /// The direction's number and the offset of the slot's mapping, if that is of one piece, without wipe or (except when `FILLED`) copy-in.
    #[inline]
    pub(super) fn plain_mapping<const FILLED: bool>(&self) -> Option<(usize, u64)> {
        let state = self.state.get();
        let special = WIPE | LISTED | if FILLED { 0 } else { COPY_IN };
        let plain = state & (PHASE | special) == Phase::Live as u64;
        plain.then_some(((state >> DIRECTION_SHIFT & 3) as usize, state >> OFFSET_SHIFT))
    }

    #[inline]
    pub(super) fn terms(&self) -> Option<Terms> {
        let state = self.state.get();
        (state & PHASE == Phase::Live as u64).then(|| Terms::decode(state))
    }

    /// The original of a mapping; of a list, its begin and its total length.
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

    /// For the first slot of a magazine: the link to the next magazine, and this one's slots.
    pub(super) fn magazine(&self) -> Magazine {
        Magazine { link: self.origin.get(), slots: self.len.get() }
    }

    pub(super) fn set_magazine(&self, magazine: Magazine) {
        self.origin.set(magazine.link);
        self.len.set(magazine.slots);
    }

    /// The group that used the buffer last, without [`CPU_BYTES`].
    #[inline]
    pub(super) fn whose(&self) -> u64 {
        self.group.get() & !CPU_BYTES
    }
}

/// A place for a box that one caller at a time can take.
///
/// It is a slot's only heap memory, and no caller may find it freed. So `take` is an exchange: if two callers break the rules and take at once, one
/// gets it. The contents were written before the release of `put`, which the acquire of `take` sees.
#[derive(Debug)]
pub(super) struct Parked<T>(AtomicPtr<T>);

impl<T> Default for Parked<T> {
    fn default() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }
}

impl<T> Parked<T> {
    /// Takes the box, if there is one. One exchange.
    pub(super) fn take(&self) -> Option<Box<T>> {
        let boxed = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: only `put` stores pointers, out of a box, and the exchange for null makes this caller the only one to have it.
        (!boxed.is_null()).then(|| unsafe { Box::from_raw(boxed) })
    }

    /// Puts `value` there, and drops what was there. One exchange.
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
#[path = "../../../tests/inside/bounce/pool/slot.rs"]
mod tests;
