//! Mappings that are unmapped in parts: their addresses come back with the last of them.
//!
//! A mapper that removes parts has each part removed when it is unmapped. Bytes that are gone are only counted: each is mapped once, and so
//! removed once, while the range is handed out. A mapper that [removes mappings as a whole](crate::mapper::Mapper::REMOVES_WHOLES) is
//! asked for nothing before all of a mapping is to go: until then its parts are noted.

use alloc::vec::Vec;

use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// The parts of all mappings of a domain. Each call takes one lock, and looks for the mapping in O(log n) of those that are
/// partly unmapped. The first part of a mapping makes a note of it, in O(n); a part that is noted takes its place among the others.
///
/// A range that has a note is [divided](IovaSpace::divide), so that no short way takes it back: the note goes with it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// In the order of their addresses.
    notes: Mutex<Vec<Note>>,
    /// How many there are. Relaxed: the call that ends a mapping comes after the calls that have ended parts of it.
    count: AtomicUsize,
}

/// A mapping of which a part is gone or is to go.
#[derive(Debug)]
struct Note {
    whole: IovaRange,
    /// Bytes that no device reaches any more, confirmed.
    gone: u64,
    /// What is to go with the rest: in order, none beside another.
    unwanted: Vec<IovaRange>,
}

impl Note {
    /// Whether all of it is gone or is to go. (A part is gone that went by itself, as there was no memory for a note of it.)
    fn is_unwanted(&self) -> bool {
        self.unwanted.iter().fold(self.gone, |sum, part| sum.saturating_add(part.len())) >= self.whole.len()
    }

    /// Adds `part` to what is to go. Returns whether there was memory for it.
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
    /// Calls `f` with the note of the mapping that has all of `part`. `f` says whether to forget it, too. `None` without a note.
    fn with<R>(&self, part: IovaRange, f: impl FnOnce(&mut Note) -> (R, bool)) -> Option<R> {
        self.with_made(part, |_| None, f)
    }

    /// As [`with`](Self::with); where there is none, a note is made of the mapping that `make` returns.
    fn with_made<R>(
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

    /// Whether nothing is noted. One load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Notes that no device reaches `part` of a mapping any more. Returns all of the mapping where that was the last of it, and
    /// forgets it. `Err` without memory for a note, and where the addresses are those of no mapping (any more).
    pub fn gone(&self, space: &IovaSpace, part: IovaRange) -> Result<Option<IovaRange>, NoNote> {
        let make = |notes: &mut Vec<Note>| Self::divided(space, part, notes);
        let gone = self.with_made(part, make, |note| {
            note.gone = note.gone.saturating_add(part.len());
            let is_over = note.gone >= note.whole.len();
            (is_over.then_some(note.whole), is_over)
        });
        gone.ok_or(NoNote)
    }

    /// Notes that `part` is to go, for a mapper that removes mappings as a whole, and returns what is to be removed now: all of the mapping,
    /// which no other call is told; or the part, if it is all of one, or of none that can have a note. `None` where the rest is wanted, or
    /// there is no memory to add the part to the note. A part may be noted more than once.
    pub fn unwant(&self, space: &IovaSpace, part: IovaRange) -> Option<IovaRange> {
        let noted = self.with_made(
            part,
            |notes| Self::divided(space, part, notes).filter(|whole| *whole != part),
            |note| {
                let is_over = note.whole == part || note.add(part) && note.is_unwanted();
                (is_over.then_some(note.whole), is_over || note.unwanted.is_empty())
            },
        );
        noted.unwrap_or(Some(part))
    }

    /// The mapping that has all of `part`, divided from now on, for a note that there is room for.
    fn divided(space: &IovaSpace, part: IovaRange, notes: &mut Vec<Note>) -> Option<IovaRange> {
        notes.try_reserve(1).ok()?;
        let whole = space.whole_of(part)?;
        space.divide(whole).then_some(whole)
    }

    /// Whether the `bytes` of `whole` that were removed just now are all of it that was not gone before. Forgets it then.
    pub fn was_rest(&self, whole: IovaRange, bytes: u64) -> bool {
        let was_rest = self.with(whole, |note| {
            let is_rest = whole == note.whole && note.gone.saturating_add(bytes) == whole.len();
            (is_rest, is_rest)
        });
        was_rest.unwrap_or(false)
    }

    /// Forgets what was noted of `whole`, which is given back or lost. Returns how many bytes of it were gone. One load where nothing
    /// is noted.
    pub fn forget(&self, whole: IovaRange) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let gone = self.with(whole, |note| if note.whole == whole { (note.gone, true) } else { (0, false) });
        gone.unwrap_or(0)
    }
}

/// There is no note of a part, nor memory for one.
#[derive(Debug)]
pub(crate) struct NoNote;

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::dice::Dice;

    /// A note keeps unwanted parts sorted, and joins those that overlap or touch, in any order of their coming.
    #[test]
    fn parts_that_touch_are_one() {
        let range = |first: usize, end: usize| {
            IovaRange::new(Iova::new(first as u64 * 0x1000), (end - first) as u64 * 0x1000).unwrap()
        };
        let mut dice = Dice(7);
        for _ in 0..300 {
            let mut note = Note { whole: range(0, 24), gone: 0, unwanted: Vec::new() };
            let mut pages = [false; 25];
            for _ in 0..dice.below(12) {
                let first = dice.below(23) as usize;
                let end = (first + 1 + dice.below(3) as usize).min(24);
                assert!(note.add(range(first, end)));
                pages[first..end].fill(true);
                let mut expected = Vec::new();
                for at in (0..24).filter(|at| pages[*at] && (*at == 0 || !pages[at - 1])) {
                    expected.push(range(at, (at..25).find(|end| !pages[*end]).unwrap()));
                }
                assert_eq!(note.unwanted, expected);
                assert_eq!(note.is_unwanted(), pages[..24].iter().all(|page| *page));
            }
        }
    }
}
