//! The mappings of a domain, and how far the device knows of them.
//!
//! The device unmaps only whole mappings, and does not report what it has unmapped; it drops all mappings of a domain with its last
//! endpoint, and knows none before the first. So the driver records them. A *piece* is the mapping of one request:
//!
//! ```text
//!   Recorded <----------> Live          the first endpoint is attached; the last one is detached
//!   Entering -----------> Live --unmap--> Stale --sync--> Removing --answered--> gone
//!      `--unmap--> Doomed --answered--------^  ^---refused----'
//! ```
//! `Recorded`: the device has no such domain. `Entering`: a map request is outstanding. `Doomed`: the same, and it was unmapped meanwhile.
//! `Stale`: unmapped, but devices still reach it. `Removing`: an unmap request is outstanding.
//!
//! All methods take one lock and visit at most [`BATCH`] pieces at a time, unless documented otherwise; none waits for the device, and only
//! `enter` allocates.

use alloc::collections::BTreeMap;

use arrayvec::ArrayVec;
use portcullis::addr::Iova;

use super::requests::BATCH;
use crate::sync::Mutex;

/// Pieces that a search for stale ones visits with the lock held.
const LOOKS: usize = 1024;

/// State of a piece: see the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Recorded,
    Entering,
    Doomed,
    Live,
    Stale,
    Removing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Gone,
    /// It may: the first endpoint is about to be attached, or the last one to be detached. Pieces are only recorded.
    Between,
    Present,
}

/// The mapping of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub first: u64,
    pub last: u64,
    pub phys: u64,
    pub flags: u32,
}

#[derive(Debug)]
struct Entry {
    last: u64,
    phys: u64,
    flags: u32,
    state: State,
}

/// The result of entering pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entered {
    /// Nothing needs to be sent.
    Recorded,
    /// The caller must send map requests, and then call [`Space::answered`].
    Entering,
    /// Not entered: something is mapped there.
    Occupied(Iova),
    /// Not entered: devices may still reach an earlier mapping there.
    Stale,
}

/// Bytes that an unmap has removed, and bytes that it kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unlinked {
    pub bytes: u64,
    pub kept: u64,
}

/// Address runs, as first and last.
pub(super) type Runs = ArrayVec<(u64, u64), BATCH>;

/// Position and findings of a search for stale pieces.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// `None` at the end.
    next: Option<(usize, u64)>,
    /// Some pieces have outstanding unmap requests: of another CPU, or of this one, if two ranges meet in one piece.
    pub others: bool,
}

/// Pieces with outstanding map requests. Drop, even if the host panics: the device has answered, or may have mapped them.
pub(super) struct Asked<'a>(pub &'a Space, pub &'a [Piece]);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.answered(self.1);
    }
}

/// Runs with outstanding unmap requests. Dropped if the host panics: then they are stale, because they may still be mapped.
pub(super) struct Leaving<'a>(pub &'a Space, pub &'a Runs);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.removed(self.1, false);
    }
}

#[derive(Debug)]
pub(super) struct Space {
    /// The domain's number in requests.
    pub number: u32,
    pieces: Mutex<Pieces>,
}

#[derive(Debug)]
struct Pieces {
    entries: BTreeMap<u64, Entry>,
    presence: Presence,
    /// Endpoints that are attached, or may be.
    endpoints: usize,
    /// Pieces that are `Entering` or `Doomed`.
    entering: usize,
    /// Pieces that are `Stale`, `Doomed` or `Removing`.
    unsettled: usize,
}

impl Pieces {
    /// The start of the first piece with an address in `from..=to`.
    fn first_in(&self, from: u64, to: u64) -> Option<u64> {
        let before = self.entries.range(..from).next_back().filter(|(_, entry)| entry.last >= from);
        before.or_else(|| self.entries.range(from..=to).next()).map(|(first, _)| *first)
    }
}

impl Space {
    pub fn new(number: u32) -> Self {
        let pieces = Pieces {
            entries: BTreeMap::new(),
            presence: Presence::Gone,
            endpoints: 0,
            entering: 0,
            unsettled: 0,
        };
        Self { number, pieces: Mutex::new(pieces) }
    }

    /// Enters at most [`BATCH`] pieces in ascending order, or none. Allocates.
    pub fn enter(&self, new: &[Piece]) -> Entered {
        let (Some(first), Some(last)) = (new.first(), new.last()) else { return Entered::Recorded };
        let mut pieces = self.pieces.lock();
        if let Some(at) = pieces.first_in(first.first, last.last) {
            return match pieces.entries.get(&at).map(|entry| entry.state) {
                Some(State::Stale | State::Removing | State::Doomed) => Entered::Stale,
                _ => Entered::Occupied(Iova::new(at.max(first.first))),
            };
        }
        let (state, entered) = match pieces.presence {
            Presence::Present => (State::Entering, Entered::Entering),
            Presence::Between | Presence::Gone => (State::Recorded, Entered::Recorded),
        };
        for Piece { first, last, phys, flags } in new.iter().copied() {
            pieces.entries.insert(first, Entry { last, phys, flags, state });
        }
        if state == State::Entering {
            pieces.entering += new.len();
        }
        entered
    }

    /// The device has answered map requests. The pieces are mapped, or may be: devices may reach them until they are unmapped.
    pub fn answered(&self, new: &[Piece]) {
        let mut pieces = self.pieces.lock();
        let Pieces { entries, entering, .. } = &mut *pieces;
        for piece in new {
            if let Some(entry) = entries.get_mut(&piece.first) {
                entry.state = match entry.state {
                    State::Entering => State::Live,
                    State::Doomed => State::Stale,
                    _ => continue,
                };
                *entering -= 1;
            }
        }
    }

    /// Marks pieces in `*from..=to` as unmapped, and advances `from` behind them; `None` at the end. Keeps pieces that are covered in part.
    pub fn unlink(&self, from: &mut Option<u64>, to: u64) -> Unlinked {
        let mut pieces = self.pieces.lock();
        let mut found = Unlinked::default();
        for _ in 0..BATCH {
            let Some(start) = *from else { break };
            let Some(first) = pieces.first_in(start, to) else {
                *from = None;
                break;
            };
            let Pieces { entries, unsettled, .. } = &mut *pieces;
            let Some(entry) = entries.get_mut(&first) else { break };
            let (last, is_whole) = (entry.last, first >= start && entry.last <= to);
            // No overflow: `IovaRange` has no range of 2^64 bytes, and both ends lie in one.
            let bytes = last.min(to) - first.max(start) + 1;
            match entry.state {
                State::Live | State::Entering | State::Recorded if !is_whole => found.kept += bytes,
                State::Live | State::Entering => {
                    entry.state = if entry.state == State::Live { State::Stale } else { State::Doomed };
                    *unsettled += 1;
                    found.bytes += bytes;
                }
                State::Recorded => {
                    entries.remove(&first);
                    found.bytes += bytes;
                }
                // A concurrent unmap was first.
                State::Stale | State::Doomed | State::Removing => {}
            }
            *from = last.checked_add(1).filter(|next| *next <= to);
        }
        found
    }

    pub fn search(ranges: &[(u64, u64)]) -> Search {
        Search { next: ranges.first().map(|(first, _)| (0, *first)), others: false }
    }

    /// Takes runs of adjacent stale pieces in `ranges` (first to last address of each), and advances `search`. The caller unmaps them, and
    /// then calls [`removed`](Self::removed). Visits up to 1,024 pieces, mapped ones included. Returns `false` at the end.
    pub fn take_stale(&self, ranges: &[(u64, u64)], search: &mut Search, runs: &mut Runs) -> bool {
        let mut pieces = self.pieces.lock();
        if pieces.unsettled == 0 {
            search.next = None;
        }
        for _ in 0..LOOKS {
            let Some((range, from)) = search.next else { return false };
            let Some((_, to)) = ranges.get(range) else { return false };
            let next_range = || ranges.get(range + 1).map(|(first, _)| (range + 1, *first));
            let Some(first) = pieces.first_in(from, *to) else {
                search.next = next_range();
                continue;
            };
            let Some(entry) = pieces.entries.get_mut(&first) else { return false };
            match entry.state {
                State::Stale => {
                    let run = runs.last_mut().filter(|(_, last)| last.checked_add(1) == Some(first));
                    if let Some((_, last)) = run {
                        *last = entry.last;
                    } else if runs.try_push((first, entry.last)).is_err() {
                        // Full: it begins the next runs.
                        return true;
                    }
                    entry.state = State::Removing;
                }
                State::Doomed | State::Removing => search.others = true,
                State::Recorded | State::Entering | State::Live => {}
            }
            let behind = entry.last.checked_add(1).filter(|next| next <= to);
            search.next = behind.map(|next| (range, next)).or_else(next_range);
        }
        search.next.is_some()
    }

    /// The device has answered the unmap requests of `runs`, all with success or not.
    pub fn removed(&self, runs: &Runs, is_unmapped: bool) {
        for (first, last) in runs {
            // A run may have many pieces, all of this CPU's search, and no holes.
            let mut from = Some(*first);
            while from.is_some() {
                let mut pieces = self.pieces.lock();
                for _ in 0..BATCH {
                    let Pieces { entries, unsettled, .. } = &mut *pieces;
                    let Some((first, entry)) = from.and_then(|first| Some((first, entries.get_mut(&first)?)))
                    else {
                        from = None;
                        break;
                    };
                    from = entry.last.checked_add(1).filter(|next| next <= last);
                    if is_unmapped {
                        entries.remove(&first);
                        *unsettled -= 1;
                    } else {
                        entry.state = State::Stale;
                    }
                }
            }
        }
    }

    /// An endpoint is about to be attached.
    pub fn attaching(&self) {
        let mut pieces = self.pieces.lock();
        pieces.endpoints += 1;
        if pieces.presence == Presence::Gone {
            pieces.presence = Presence::Between;
        }
    }

    /// The endpoint is attached: the device has the domain. The caller must now send [`recorded`](Self::recorded) pieces.
    pub fn attached(&self) {
        self.pieces.lock().presence = Presence::Present;
    }

    /// Recorded pieces from `from` on, which advances behind them, to `None` at the end. The caller sends map requests, and then calls
    /// [`answered`](Self::answered). Visits up to 1,024 pieces.
    pub fn recorded(&self, from: &mut Option<u64>) -> ArrayVec<Piece, BATCH> {
        let mut found = ArrayVec::new();
        let mut pieces = self.pieces.lock();
        let Pieces { entries, entering, .. } = &mut *pieces;
        let Some(start) = *from else { return found };
        *from = None;
        for (looks, (first, entry)) in entries.range_mut(start..).enumerate() {
            if found.is_full() || looks == LOOKS {
                *from = Some(*first);
                break;
            }
            if entry.state == State::Recorded {
                entry.state = State::Entering;
                *entering += 1;
                found.push(Piece { first: *first, last: entry.last, phys: entry.phys, flags: entry.flags });
            }
        }
        found
    }

    /// An endpoint is about to be detached. If it is the last, nothing more is entered. Returns whether no map request is outstanding,
    /// which the last detach demands.
    pub fn detaching(&self) -> bool {
        let mut pieces = self.pieces.lock();
        if pieces.endpoints > 1 {
            return true;
        }
        pieces.presence = Presence::Between;
        pieces.entering == 0
    }

    /// An endpoint is detached, or its attach was refused. With the last one the device drops all mappings. Then visits all of them.
    pub fn detached(&self) {
        let mut pieces = self.pieces.lock();
        pieces.endpoints = pieces.endpoints.saturating_sub(1);
        if pieces.endpoints > 0 {
            return;
        }
        let Pieces { entries, unsettled, presence, .. } = &mut *pieces;
        *presence = Presence::Gone;
        entries.retain(|_, entry| {
            match entry.state {
                State::Live => entry.state = State::Recorded,
                State::Stale => *unsettled -= 1,
                _ => {}
            }
            entry.state != State::Stale
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
