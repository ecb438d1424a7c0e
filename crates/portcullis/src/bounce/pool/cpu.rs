//! Per-CPU magazines: two for each class and kind of permission. Only their CPU changes them, so it takes and frees a slot without a lock.
//!
//! A magazine is a linked list of free slots that moves between a CPU and the [depot](super::depot) as a whole (Bonwick and Adams, "Magazines and
//! Vmem", 2001). The CPU pops from and pushes to the *loaded* one, newest slot first, whose buffer is still in its cache. A full loaded magazine
//! becomes the *previous* one, and the former previous one goes to the depot: so a CPU that alternates between maps and unmaps at a magazine's end
//! does not visit the depot each time. Each operation is O(1).

use core::mem::MaybeUninit;

use super::layout::CLASS_ROOM;
use super::slot::{Magazine, Slot, link_to};
use crate::heap::write_fields;
use crate::percpu::LocalU64;

/// Room for kinds of permission: a power of two.
const KINDS: usize = 4;

/// One CPU's magazines. Only the holder of that CPU's lock changes its words.
#[derive(Debug)]
pub(super) struct Cpu {
    magazines: [[Magazines; KINDS]; CLASS_ROOM],
    /// Mappings whose buffer came from here.
    pub reused: LocalU64,
}

#[derive(Debug, Default)]
#[repr(align(32))]
struct Magazines {
    loaded: Words,
    previous: Words,
}

/// A [`Magazine`] in words that others may read.
#[derive(Debug, Default)]
struct Words {
    link: LocalU64,
    slots: LocalU64,
}

impl Words {
    #[inline]
    fn get(&self) -> Magazine {
        Magazine { link: self.link.get(), slots: self.slots.get() }
    }

    #[inline]
    fn set(&self, magazine: Magazine) {
        self.link.set(magazine.link);
        self.slots.set(magazine.slots);
    }

    #[inline]
    fn replace(&self, magazine: Magazine) -> Magazine {
        let old = self.get();
        self.set(magazine);
        old
    }
}

impl Cpu {
    /// Makes an empty one in `place`, as it takes several KiB.
    pub(super) fn make_in(place: &mut MaybeUninit<Self>) -> &mut Self {
        let at = place.as_mut_ptr();
        // SAFETY: each write is to a field of the caller's place, or an element of one; after them all are initialised.
        unsafe {
            for class in 0..CLASS_ROOM {
                for kind in 0..KINDS {
                    (&raw mut (*at).magazines[class][kind]).write(Magazines::default());
                }
            }
            write_fields!(at, made [magazines], reused: LocalU64::new(0));
            place.assume_init_mut()
        }
    }

    #[inline]
    pub(super) fn pop_if<'a>(
        &self,
        slots: &'a [Slot],
        class: usize,
        kind: usize,
        fits: impl FnOnce(&Slot) -> bool,
    ) -> Option<(usize, &'a Slot)> {
        // As `Magazine::pop`, whose result costs instructions here.
        let loaded = &self.magazines[class][kind].loaded;
        let left = loaded.slots.get().checked_sub(1)?;
        let index = loaded.get().first()?;
        let slot = slots.get(index)?;
        if !fits(slot) {
            return None;
        }
        loaded.link.set(slot.next.get());
        loaded.slots.set(left);
        self.reused.set(self.reused.get() + 1);
        Some((index, slot))
    }

    pub(super) fn pop(&self, slots: &[Slot], class: usize, kind: usize) -> Option<usize> {
        let Magazines { loaded, previous } = &self.magazines[class][kind];
        if loaded.slots.get() == 0 {
            loaded.set(previous.replace(Magazine::default()));
        }
        self.pop_if(slots, class, kind, |_| true).map(|(index, _)| index)
    }

    /// Pushes a slot onto the loaded magazine, of `most` slots at most. If that was full, returns the previous magazine, unless it was empty: the
    /// caller gives it to the depot.
    #[inline]
    pub(super) fn push(
        &self,
        slots: &[Slot],
        (class, kind): (usize, usize),
        index: usize,
        most: u64,
    ) -> Option<Magazine> {
        let Magazines { loaded, previous } = &self.magazines[class][kind];
        let mut full = None;
        let slot = slots.get(index)?;
        if loaded.slots.get() >= most {
            full = Some(previous.replace(loaded.replace(Magazine::default()))).filter(|full| full.slots > 0);
        }
        // As `Magazine::push`, whose result costs instructions here.
        slot.next.set(loaded.link.get());
        loaded.link.set(link_to(index));
        loaded.slots.set(loaded.slots.get() + 1);
        full
    }

    /// Loads a magazine from the depot. Both of this CPU's are empty.
    pub(super) fn load(&self, class: usize, kind: usize, magazine: Magazine) {
        self.magazines[class][kind].loaded.set(magazine);
    }

    /// Passes every magazine to `out`, with its class and kind. If `out` panics, the later ones stay.
    pub(super) fn drain(&self, mut out: impl FnMut(usize, usize, Magazine)) {
        for (class, kinds) in self.magazines.iter().enumerate() {
            for (kind, magazines) in kinds.iter().enumerate() {
                for words in [&magazines.previous, &magazines.loaded] {
                    let magazine = words.replace(Magazine::default());
                    if magazine.slots > 0 {
                        out(class, kind, magazine);
                    }
                }
            }
        }
    }

    /// The free slots of `class`, of all kinds. A hint, unless this CPU's holder asks.
    pub(super) fn free(&self, class: usize) -> u64 {
        let kinds = self.magazines[class].iter();
        kinds.map(|magazines| magazines.loaded.slots.get() + magazines.previous.slots.get()).sum()
    }
}
