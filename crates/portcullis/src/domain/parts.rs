//! Mappings that are unmapped in parts: how much of each is gone, so that its addresses come back with the last of them.
//!
//! A part that a mapper could not remove by itself (a part of a large page without memory to split it, or of a mapping that a kernel
//! removes as a whole) is *kept*. Where all of a mapping is gone or kept, its owner wants none of it, and what is kept can go as
//! a whole.
//!
//! Bytes that are gone are only counted: each is mapped once, and so removed once, while the range is handed out.

use alloc::vec::Vec;

use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// The parts of all mappings of a domain. Each call takes one lock, and looks for the mapping in O(log n) of those that are
/// partly unmapped. The first part of a mapping makes a note of it, in O(n); a part that is kept, one among those that are kept.
///
/// A range that has a note is [divided](IovaSpace::divide), so that no short way takes it back: the note goes with it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// In the order of their addresses.
    notes: Mutex<Vec<Note>>,
    /// How many there are. Relaxed: whoever ends a mapping knows of the calls that have ended parts of it.
    count: AtomicUsize,
}

/// A mapping of which a part is gone or kept.
#[derive(Debug)]
struct Note {
    whole: IovaRange,
    /// Bytes that no device reaches any more, confirmed.
    gone: u64,
    /// What was to be unmapped and could not be by itself: in order, disjoint, none beside another.
    kept: Vec<IovaRange>,
}

impl Note {
    /// Whether a device may use no part of it but what is kept.
    fn is_unwanted(&self) -> bool {
        let kept = self.kept.iter().fold(self.gone, |sum, part| sum.saturating_add(part.len()));
        kept >= self.whole.len()
    }

    /// The number of the first of the kept parts that ends at `address` or behind it.
    fn place(&self, address: Iova) -> usize {
        self.kept.partition_point(|part| part.last() < address)
    }

    /// Adds `part` to those that are kept. Returns whether there was memory for it.
    fn keep(&mut self, part: IovaRange) -> bool {
        if self.kept.try_reserve(2).is_err() {
            return false;
        }
        let before = Iova::new(part.start().get().saturating_sub(1));
        let first = self.place(before);
        let touching = self.kept[first..]
            .iter()
            .take_while(|kept| kept.start().get() <= part.last().get().saturating_add(1));
        let count = touching.clone().count();
        let joined = touching.fold(part, |joined, kept| joined.hull(*kept).unwrap_or(joined));
        self.kept.splice(first..first + count, [joined]);
        true
    }

    /// Takes `part` off those that are kept, if all of it is. Returns whether it was.
    fn release(&mut self, part: IovaRange) -> bool {
        let place = self.place(part.start());
        let Some(kept) = self.kept.get(place).copied().filter(|kept| kept.contains_range(part)) else {
            return false;
        };
        let between = |first: u64, end: u64| IovaRange::new(Iova::new(first), end.saturating_sub(first)).ok();
        let before = between(kept.start().get(), part.start().get());
        let behind = part
            .last()
            .get()
            .checked_add(1)
            .and_then(|first| IovaRange::from_bounds(Iova::new(first), kept.last()).ok());
        // `keep` has made room for one more.
        self.kept.splice(place..=place, before.into_iter().chain(behind));
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
                notes.insert(behind, Note { whole, gone: 0, kept: Vec::new() });
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

    /// The mapping of `space` that has all of `part`, for a note that there is room for.
    fn whole_of(space: &IovaSpace, part: IovaRange, notes: &mut Vec<Note>) -> Option<IovaRange> {
        notes.try_reserve(1).ok()?;
        let whole = space.whole_of(part)?;
        space.divide(whole);
        Some(whole)
    }

    /// Notes that no device reaches `part` of a mapping any more. Returns all of the mapping where that was the last of it, and
    /// forgets it. `Err` without memory for a note, and where the addresses are those of no mapping.
    pub fn gone(&self, space: &IovaSpace, part: IovaRange) -> Result<Option<IovaRange>, NoNote> {
        let make = |notes: &mut Vec<Note>| Self::whole_of(space, part, notes);
        let gone = self.with_made(part, make, |note| {
            note.gone = note.gone.saturating_add(part.len());
            note.release(part);
            let is_over = note.gone >= note.whole.len();
            (is_over.then_some(note.whole), is_over)
        });
        gone.ok_or(NoNote)
    }

    /// Notes that `part` of a mapping is to go, and could not by itself. Returns all of the mapping where the rest is gone, or kept,
    /// too. `Err` as [`gone`](Self::gone).
    pub fn kept(&self, space: &IovaSpace, part: IovaRange) -> Result<Option<IovaRange>, NoNote> {
        let make = |notes: &mut Vec<Note>| Self::whole_of(space, part, notes);
        let kept = self.with_made(part, make, |note| {
            let is_noted = note.keep(part);
            let unwanted = (is_noted && note.is_unwanted()).then_some(note.whole);
            (is_noted.then_some(unwanted), note.gone == 0 && note.kept.is_empty())
        });
        kept.flatten().ok_or(NoNote)
    }

    /// Notes that no device reaches `part` any more, of which `bytes` were removed just now, and none is left: if that is all of a
    /// mapping whose other bytes were gone before, or if it was kept. Returns all of the mapping as [`gone`](Self::gone) does.
    pub fn rest(&self, part: IovaRange, bytes: u64) -> Result<Option<IovaRange>, NoNote> {
        let rest = self.with(part, |note| {
            let was_kept = note.release(part);
            let is_rest = part == note.whole && note.gone.saturating_add(bytes) == part.len();
            if !was_kept && !is_rest {
                return (None, false);
            }
            note.gone = note.gone.saturating_add(if was_kept { part.len() } else { bytes });
            let is_over = note.gone >= note.whole.len();
            (Some(is_over.then_some(note.whole)), is_over)
        });
        rest.flatten().ok_or(NoNote)
    }

    /// Forgets what was noted of `whole`, which is given back or lost. Returns how many bytes of it were gone. One load where nothing
    /// is noted.
    pub fn forget(&self, whole: IovaRange) -> u64 {
        if self.count.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let gone = self.with(whole, |note| if note.whole == whole { (note.gone, true) } else { (0, false) });
        gone.unwrap_or(0)
    }
}

/// There is no note of a part, nor memory for one.
#[derive(Debug)]
pub(crate) struct NoNote;
