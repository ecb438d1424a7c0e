//! The addresses of slots: one range, cut into an equal piece for each size class, and each piece into slots. Each address of the range is in exactly
//! one slot. All sizes are powers of two, so shifts find an address's class and slot. Slots are numbered consecutively across all classes, the
//! smallest class first.

use crate::addr::{Iova, IovaRange, PageSize};
use crate::broken::broken;

/// The most classes: the smallest slot is a granule, and each class has slots of twice the size of the one before.
pub(super) const MOST_CLASSES: usize = 10;

/// Room for all classes, a power of two, so that indexing needs no check.
pub(super) const CLASS_ROOM: usize = MOST_CLASSES.next_power_of_two();

/// A full magazine holds slots of this many bytes together, but within the next two numbers of slots.
const MAGAZINE_BYTES: u64 = 256 << 10;
const LEAST_IN_MAGAZINE: u64 = 4;
const MOST_IN_MAGAZINE: u64 = 64;

#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    start: u64,
    bytes: u64,
    granule_shift: u32,
    /// The binary logarithm of each class's bytes of addresses.
    class_shift: u32,
    classes: u32,
    sizes: [Size; CLASS_ROOM],
}

#[derive(Debug, Clone, Copy, Default)]
struct Size {
    /// The address of slot 0 if all slots had this class's size, modulo 2^64 (it may be negative): slot `i` is at `base + i * size`.
    base: u64,
    magazine: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub class: usize,
    /// Its number among the slots of all classes.
    pub index: usize,
    /// Its first address.
    pub start: u64,
}

impl Layout {
    /// `classes` classes with `1 << class_shift` bytes of addresses each. [`begin_at`](Self::begin_at) comes before any lookup.
    pub(super) fn new(granule: PageSize, class_shift: u32, classes: usize) -> Self {
        let classes = classes.min(MOST_CLASSES) as u32;
        Self {
            start: 0,
            bytes: u64::from(classes) << class_shift,
            granule_shift: granule.shift(),
            class_shift,
            classes,
            sizes: [Size::default(); CLASS_ROOM],
        }
    }

    /// Moves it to `start`, where there are [`bytes`](Self::bytes) bytes.
    pub(super) fn begin_at(&mut self, start: u64) {
        self.start = start;
        for class in 0..self.classes() {
            let first = (self.first(class) as u64) << self.slot_shift(class);
            let start = start.wrapping_add((class as u64) << self.class_shift);
            let magazine =
                (MAGAZINE_BYTES / self.slot_bytes(class)).clamp(LEAST_IN_MAGAZINE, MOST_IN_MAGAZINE);
            self.sizes[class] = Size { base: start.wrapping_sub(first), magazine };
        }
    }

    #[inline]
    fn size(&self, class: usize) -> Size {
        self.sizes[class]
    }

    #[inline]
    pub(super) fn magazine_slots(&self, class: usize) -> u64 {
        self.size(class).magazine
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn classes(&self) -> usize {
        self.classes as usize
    }

    /// The class with the smallest slots that hold `bytes`, at least 1.
    #[inline]
    pub(super) fn class_of(&self, bytes: u64) -> Option<usize> {
        // The bit length of the last granule's number; the appended one is for zero, which has no logarithm. For 0 bytes the subtraction wraps, to a
        // class above all.
        let class = (bytes.wrapping_sub(1) >> self.granule_shift << 1 | 1).ilog2();
        (class < self.classes).then_some(class as usize)
    }

    #[inline]
    pub(super) fn slot_bytes(&self, class: usize) -> u64 {
        1 << self.slot_shift(class)
    }

    pub(super) fn slots(&self, class: usize) -> usize {
        1 << (self.class_shift - self.slot_shift(class))
    }

    /// The number of the first slot of `class`; for the class behind the last, one past the last slot.
    pub(super) fn first(&self, class: usize) -> usize {
        // Each class has half as many slots as the one before: n + n/2 + n/4 + ...
        let twice = 2_usize << (self.class_shift - self.granule_shift);
        twice - (twice >> class)
    }

    #[inline]
    pub(super) fn find(&self, iova: Iova) -> Option<Place> {
        let offset = iova.get().wrapping_sub(self.start);
        if offset >= self.bytes {
            return None;
        }
        let class = (offset >> self.class_shift) as usize;
        let shift = self.slot_shift(class);
        let index = iova.get().wrapping_sub(self.size(class).base) >> shift;
        Some(Place { class, index: index as usize, start: iova.get() & !((1 << shift) - 1) })
    }

    #[inline]
    pub(super) fn start_of(&self, class: usize, index: usize) -> u64 {
        self.size(class).base.wrapping_add((index as u64) << self.slot_shift(class))
    }

    pub(super) fn range_of(&self, class: usize, index: usize) -> IovaRange {
        IovaRange::new(Iova::new(self.start_of(class, index)), self.slot_bytes(class))
            .unwrap_or_else(|_| broken("a slot lies inside the region, which is a range"))
    }

    /// The class of slot `index`. O(classes).
    pub(super) fn class_of_slot(&self, index: usize) -> usize {
        // The last class, if no earlier one.
        (0..self.classes() - 1).find(|class| index < self.first(class + 1)).unwrap_or(self.classes() - 1)
    }

    #[inline]
    fn slot_shift(&self, class: usize) -> u32 {
        self.granule_shift + class as u32
    }
}

#[cfg(test)]
#[path = "../../../tests/inside/bounce/pool/layout.rs"]
mod tests;
