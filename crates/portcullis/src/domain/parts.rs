//! Mappings that are unmapped in parts: how much of each is gone, so that its addresses come back with the last of them.
//!
//! A part that a mapper could not remove by itself (a part of a large page without memory to split it, or of a mapping that a kernel
//! removes as a whole) is *kept*. Where all of a mapping is gone or kept, its owner wants none of it: it is *unwanted*, and what is
//! kept can go as a whole. One call ends it so, at a time.
//!
//! Bytes that are gone are only counted: each is mapped once, and so removed once, while the range is handed out.

use alloc::vec::Vec;

use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering};

/// The parts of all mappings of a domain. Each call takes one lock, and looks for the mapping in O(log n) of those that are
/// partly unmapped. The first part of a mapping makes a note of it, in O(n); a part that is kept, one among those that are kept.
///
/// A range that has a note is [divided](IovaSpace::divide), so that no short way takes it back: the note goes with it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// In the order of their addresses.
    notes: Mutex<Vec<Note>>,
    /// How many there are. Relaxed: the call that ends a mapping comes after the calls that have ended parts of it.
    count: AtomicUsize,
    /// How many of them have kept parts. Relaxed: see [`Domain::end`](crate::domain::Domain).
    keeping: AtomicUsize,
    /// Whether there is perhaps an unwanted one that no call ends yet. Relaxed: who looks for it takes the lock.
    unwanted: AtomicBool,
}

/// A mapping of which a part is gone or kept.
#[derive(Debug)]
struct Note {
    whole: IovaRange,
    /// Bytes that no device reaches any more, confirmed. None of them is in `kept`.
    gone: u64,
    /// What was to be unmapped and could not be by itself: in order, disjoint, none beside another.
    kept: Vec<IovaRange>,
    /// Whether a call is removing all of it.
    is_ending: bool,
}

impl Note {
    /// Whether all of it is gone, and no call will give it back.
    fn is_over(&self) -> bool {
        self.gone >= self.whole.len() && !self.is_ending
    }

    /// Whether its owner wants none of it, what is kept is to go, and no call is at that.
    fn is_unwanted(&self) -> bool {
        let kept = self.kept.iter().fold(self.gone, |sum, part| sum.saturating_add(part.len()));
        kept >= self.whole.len() && !self.kept.is_empty() && !self.is_ending
    }

    /// Begins to end all of it, if it is unwanted.
    fn begin_end(&mut self) -> Option<IovaRange> {
        let begins = self.is_unwanted();
        self.is_ending |= begins;
        begins.then_some(self.whole)
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

    /// Takes what `part` has in common with each kept part off these: a larger part may have removed some of them by now.
    fn release(&mut self, part: IovaRange) {
        let first = self.place(part.start());
        let count = self.kept[first..].iter().take_while(|kept| kept.start() <= part.last()).count();
        let touched = &self.kept[first..first + count];
        let (Some(front), Some(back)) = (touched.first().copied(), touched.last().copied()) else { return };
        // What the first has before the part, and the last behind it.
        let before = part.start().get().checked_sub(1);
        let before = before.and_then(|last| IovaRange::from_bounds(front.start(), Iova::new(last)).ok());
        let behind = part.last().get().checked_add(1);
        let behind = behind.and_then(|first| IovaRange::from_bounds(Iova::new(first), back.last()).ok());
        // At most one more than before: `keep` has made room for that.
        self.kept.splice(first..first + count, before.into_iter().chain(behind));
    }

    /// Whether all of `part` is kept.
    fn is_kept(&self, part: IovaRange) -> bool {
        self.kept.get(self.place(part.start())).is_some_and(|kept| kept.contains_range(part))
    }

    /// Notes that no device reaches any of `part` any more.
    fn end(&mut self, part: IovaRange) {
        self.release(part);
        self.gone = self.gone.saturating_add(part.len());
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
                notes.insert(behind, Note { whole, gone: 0, kept: Vec::new(), is_ending: false });
                behind
            }
        };
        let note = &mut notes[place];
        let (kept, (result, is_over)) = (!note.kept.is_empty(), f(note));
        let keeps = !note.kept.is_empty() && !is_over;
        if note.is_unwanted() && !is_over {
            self.unwanted.store(true, Ordering::Relaxed);
        }
        if is_over {
            notes.remove(place);
        }
        let keeping = self.keeping.load(Ordering::Relaxed) + usize::from(keeps) - usize::from(kept);
        self.keeping.store(keeping, Ordering::Relaxed);
        self.count.store(notes.len(), Ordering::Relaxed);
        Some(result)
    }

    /// The mapping of `space` that has all of `part`, for a note that there is room for.
    fn whole_of(space: &IovaSpace, part: IovaRange, notes: &mut Vec<Note>) -> Option<IovaRange> {
        notes.try_reserve(1).ok()?;
        let whole = space.whole_of(part)?;
        space.divide(whole).then_some(whole)
    }

    /// Whether nothing is noted. One load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Whether any mapping has a part that is kept. One load.
    #[inline]
    pub fn are_kept(&self) -> bool {
        self.keeping.load(Ordering::Relaxed) > 0
    }

    /// Whether there is perhaps an [unwanted](Self::unwanted) mapping. One load.
    #[inline]
    pub fn has_unwanted(&self) -> bool {
        self.unwanted.load(Ordering::Relaxed)
    }

    /// Notes that no device reaches `part` of a mapping any more. Returns all of the mapping where that was the last of it, and
    /// forgets it. `Err` without memory for a note, and where the addresses are those of no mapping (any more).
    pub fn gone(&self, space: &IovaSpace, part: IovaRange) -> Result<Option<IovaRange>, NoNote> {
        let make = |notes: &mut Vec<Note>| Self::whole_of(space, part, notes);
        let gone = self.with_made(part, make, |note| {
            note.end(part);
            let is_over = note.is_over();
            (is_over.then_some(note.whole), is_over)
        });
        gone.ok_or(NoNote)
    }

    /// Notes that `part` of a mapping is to go, and could not by itself. `Err` as [`gone`](Self::gone).
    pub fn keep(&self, space: &IovaSpace, part: IovaRange) -> Result<(), NoNote> {
        let make = |notes: &mut Vec<Note>| Self::whole_of(space, part, notes);
        let kept = self.with_made(part, make, |note| {
            let is_noted = note.keep(part);
            (is_noted.then_some(()), note.gone == 0 && note.kept.is_empty())
        });
        kept.flatten().ok_or(NoNote)
    }

    /// Returns the first unwanted mapping that begins at `from` or behind it, for the caller to [end](Self::forget) as a whole, or to
    /// [leave](Self::leave). Looks through all notes.
    pub fn unwanted(&self, from: Iova) -> Option<IovaRange> {
        self.unwanted.store(false, Ordering::Relaxed);
        let mut notes = self.notes.lock();
        let first = notes.partition_point(|note| note.whole.start() < from);
        notes[first..].iter_mut().find_map(Note::begin_end)
    }

    /// Goes on keeping `whole`, which could not be removed. Returns it where it was removed in parts meanwhile, and forgets it.
    pub fn leave(&self, whole: IovaRange) -> Option<IovaRange> {
        let left = self.with(whole, |note| {
            note.is_ending = false;
            let is_over = note.is_over();
            (is_over.then_some(note.whole), is_over)
        });
        left.flatten()
    }

    /// Notes that no device reaches `part` any more, of which `bytes` were removed just now, and none is left: if that is all of a
    /// mapping whose other bytes were gone before, or if it was kept. Returns all of the mapping as [`gone`](Self::gone) does.
    pub fn rest(&self, part: IovaRange, bytes: u64) -> Result<Option<IovaRange>, NoNote> {
        let rest = self.with(part, |note| {
            let is_rest = part == note.whole && note.gone.saturating_add(bytes) == part.len();
            if !is_rest && !note.is_kept(part) {
                return (None, false);
            }
            note.release(part);
            note.gone = if is_rest { part.len() } else { note.gone.saturating_add(part.len()) };
            let is_over = note.is_over();
            (Some(is_over.then_some(note.whole)), is_over)
        });
        rest.flatten().ok_or(NoNote)
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
