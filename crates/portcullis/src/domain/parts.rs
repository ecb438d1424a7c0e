//! Mappings that are unmapped in parts. The last part gives back the addresses of the whole.
//!
//! An ordinary mapper removes each part when it is unmapped. A note then only counts removed bytes; each byte is mapped and removed once
//! while the range is handed out. For a mapper that [removes mappings as a whole](crate::mapper::Mapper::REMOVES_WHOLES) a note lists the
//! unwanted parts, and the mapper is called when all of the mapping is unwanted.

use alloc::vec::Vec;

use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// The notes of all partly unmapped mappings of a domain. Each call takes one lock, and finds a note in O(log n); adding or removing one is
/// O(n). The range of a note is [divided](IovaSpace::divide), so no fast path frees it and leaves the note behind.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// Sorted by address.
    notes: Mutex<Vec<Note>>,
    /// The number of notes. Relaxed: a caller ends a mapping after the calls that ended its parts.
    count: AtomicUsize,
}

#[derive(Debug)]
struct Note {
    whole: IovaRange,
    gone: u64,
    /// Parts to remove together with the rest: sorted, and no two touch.
    unwanted: Vec<IovaRange>,
}

impl Note {
    /// Whether all of it is removed or unwanted. (A part is removed on its own if there was no memory for a note of it.)
    fn is_unwanted(&self) -> bool {
        self.unwanted.iter().fold(self.gone, |sum, part| sum.saturating_add(part.len())) >= self.whole.len()
    }

    fn add(&mut self, part: IovaRange) -> bool {
        if self.unwanted.try_reserve(1).is_err() {
            return false;
        }
        let before = Iova::new(part.start().get().saturating_sub(1));
        let first = self.unwanted.partition_point(|other| other.last() < before);
        let touching = self.unwanted[first..]
            .iter()
            .take_while(|other| other.start().get() <= part.last().get().saturating_add(1));
        let count = touching.clone().count();
        let joined = touching.fold(part, |joined, other| joined.hull(*other).unwrap_or(joined));
        self.unwanted.splice(first..first + count, [joined]);
        true
    }
}

impl Parts {
    /// Calls `f` with the note of the mapping that contains `part`, or with one for the mapping that `make` returns. `f` also says whether to
    /// remove the note. `None` without a note.
    fn with<R>(
        &self,
        part: IovaRange,
        make: impl FnOnce(&mut Vec<Note>) -> Option<IovaRange>,
        f: impl FnOnce(&mut Note) -> (R, bool),
    ) -> Option<R> {
        let mut notes = self.notes.lock();
        let behind = notes.partition_point(|note| note.whole.start() <= part.start());
        let found = behind.checked_sub(1).filter(|place| notes[*place].whole.contains_range(part));
        let place = match found {
            Some(place) => place,
            None => {
                let whole = make(&mut notes)?;
                notes.insert(behind, Note { whole, gone: 0, unwanted: Vec::new() });
                behind
            }
        };
        let (result, is_over) = f(&mut notes[place]);
        if is_over {
            notes.remove(place);
        }
        self.count.store(notes.len(), Ordering::Relaxed);
        Some(result)
    }

    /// One load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Notes that devices do not reach `part` any more. After the last part of a mapping, returns the whole mapping, and removes its note.
    /// Returns `part` without memory for a note, and if it belongs to no mapping.
    pub fn gone(&self, space: &IovaSpace, part: IovaRange) -> Option<IovaRange> {
        let make = |notes: &mut Vec<Note>| Self::divided(space, part, notes);
        let gone = self.with(part, make, |note| {
            note.gone = note.gone.saturating_add(part.len());
            let is_over = note.gone >= note.whole.len();
            (is_over.then_some(note.whole), is_over)
        });
        gone.unwrap_or(Some(part))
    }

    /// Notes that `part` is unwanted, for a mapper that removes mappings as a whole. Returns the range to remove now: all of the mapping,
    /// to one call only; or `part` itself, if it is a whole mapping, belongs to none, or there is no memory for the mapping's first note.
    /// `None` while other parts are still in use, or without memory for the part in its note. The same part may be passed twice.
    pub fn unwant(&self, space: &IovaSpace, part: IovaRange) -> Option<IovaRange> {
        let noted = self.with(
            part,
            |notes| Self::divided(space, part, notes).filter(|whole| *whole != part),
            |note| {
                let is_over = note.whole == part || note.add(part) && note.is_unwanted();
                (is_over.then_some(note.whole), is_over || note.unwanted.is_empty())
            },
        );
        noted.unwrap_or(Some(part))
    }

    /// The mapping that contains `part`; it is divided from now on. Makes room for its note.
    fn divided(space: &IovaSpace, part: IovaRange, notes: &mut Vec<Note>) -> Option<IovaRange> {
        notes.try_reserve(1).ok()?;
        let whole = space.whole_of(part)?;
        space.divide(whole).then_some(whole)
    }

    /// Whether the `bytes` just removed from `whole` were all that was left of it. Removes the note then.
    pub fn was_rest(&self, whole: IovaRange, bytes: u64) -> bool {
        let is_rest = |note: &mut Note| whole == note.whole && note.gone.saturating_add(bytes) == whole.len();
        self.with(whole, |_| None, |note| (is_rest(note), is_rest(note))).unwrap_or(false)
    }

    /// Removes the note of `whole`, which is freed or leaked. Returns how many of its bytes were removed before. One load if there is no
    /// note.
    pub fn forget(&self, whole: IovaRange) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let gone = |note: &mut Note| if note.whole == whole { (note.gone, true) } else { (0, false) };
        self.with(whole, |_| None, gone).unwrap_or(0)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/domain/parts.rs"]
mod tests;
