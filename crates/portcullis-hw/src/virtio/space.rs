//! What is mapped in a domain, and how far the device knows of it.
//!
//! The device is asked to unmap whole mappings only, and says nothing of what it has unmapped; it forgets all mappings of a domain with its last
//! endpoint, and knows none before the first. So the driver keeps account. A *piece* is what one request maps:
//!
//! ```text
//!   Recorded <----------> Live          the first endpoint is attached; the last one is detached
//!   Entering -----------> Live --unmap--> Stale --sync--> Removing --answered--> gone
//!      `--unmap--> Doomed --answered--------^  ^---refused----'
//! ```
//! `Recorded`: the device has no such domain. `Entering`: a request to map it is under way. `Doomed`: the same, and it was unmapped
//! meanwhile. `Stale`: unmapped, while devices still reach it. `Removing`: a request to unmap it is under way.
//!
//! All methods are under one lock and visit at most [`BATCH`] pieces in a row, unless they say otherwise; none waits for the device,
//! and only `enter` allocates.

use alloc::collections::BTreeMap;

use arrayvec::ArrayVec;
use portcullis::addr::Iova;

use super::requests::BATCH;
use crate::sync::Mutex;

/// Pieces that a search for stale ones looks at with the lock held.
const LOOKS: usize = 1024;

/// How far a piece is. See the module's comment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Recorded,
    Entering,
    Doomed,
    Live,
    Stale,
    Removing,
}

/// Whether the device has the domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// It does not.
    Gone,
    /// It may: its first endpoint is about to be attached, or its last one to be detached. Pieces are recorded only.
    Between,
    /// It does.
    Present,
}

/// What one request maps.
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

/// What became of pieces that were to be entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entered {
    /// There is nothing to be sent.
    Recorded,
    /// The device must be asked to map them, and [`Space::answered`] be told what it says.
    Entering,
    /// They are not: something is mapped there.
    Occupied(Iova),
    /// They are not: devices may still reach what was mapped there before.
    Stale,
}

/// What an unmap has removed, and what it could not, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unlinked {
    pub bytes: u64,
    pub kept: u64,
}

/// Runs of addresses, from the first to the last of each.
pub(super) type Runs = ArrayVec<(u64, u64), BATCH>;

/// Where a search for stale pieces goes on, and what it has found on the way.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// `None` where it is over.
    next: Option<(usize, u64)>,
    /// There are pieces that another CPU is asking the device about.
    pub others: bool,
}

/// The mappings of a domain.
#[derive(Debug)]
pub(super) struct Space {
    /// Its number, for the device.
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
    /// The first piece that has an address in `from..=to`: where it begins.
    fn first_in(&self, from: u64, to: u64) -> Option<u64> {
        let before = self.entries.range(..from).next_back().filter(|(_, entry)| entry.last >= from);
        before.or_else(|| self.entries.range(from..=to).next()).map(|(first, _)| *first)
    }

    /// Ends a request to map `entry`.
    fn settle(entry: &mut Entry, is_mapped: bool, (entering, unsettled): (&mut usize, &mut usize)) {
        match entry.state {
            State::Entering if is_mapped => entry.state = State::Live,
            State::Entering => {
                entry.state = State::Stale;
                *unsettled += 1;
            }
            State::Doomed => entry.state = State::Stale,
            _ => return,
        }
        *entering -= 1;
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

    /// Enters at most [`BATCH`] pieces, each behind the one before it, or none. Allocates.
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

    /// The device has mapped what was [entered](Self::enter), or it may have, in part: then devices may reach it until it is unmapped.
    pub fn answered(&self, new: &[Piece], is_mapped: bool) {
        let mut pieces = self.pieces.lock();
        let Pieces { entries, entering, unsettled, .. } = &mut *pieces;
        for piece in new {
            if let Some(entry) = entries.get_mut(&piece.first) {
                Pieces::settle(entry, is_mapped, (&mut *entering, &mut *unsettled));
            }
        }
    }

    /// Marks pieces in `*from..=to` as unmapped, and moves `from` behind them; `None` where that is all. Parts of pieces are kept.
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
                // Another unmap was first.
                State::Stale | State::Doomed | State::Removing => {}
            }
            *from = last.checked_add(1).filter(|next| *next <= to);
        }
        found
    }

    /// A search of all `ranges`.
    pub fn search(ranges: &[(u64, u64)]) -> Search {
        Search { next: ranges.first().map(|(first, _)| (0, *first)), others: false }
    }

    /// Takes stale pieces in `ranges` (from the first to the last address of each), from where `search` has come to, and moves that on:
    /// runs of neighbours, to be unmapped, of which [`removed`](Self::removed) must then be told. Looks at up to 1,024 pieces, mapped ones
    /// included. `false` where the search is over.
    pub fn take_stale(&self, ranges: &[(u64, u64)], search: &mut Search, runs: &mut Runs) -> bool {
        let mut pieces = self.pieces.lock();
        if pieces.unsettled == 0 {
            search.next = None;
        }
        for _ in 0..LOOKS {
            let Some((range, from)) = search.next else { return false };
            let Some((_, to)) = ranges.get(range) else {
                search.next = None;
                return false;
            };
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
                        // Full: it is the first of the next runs.
                        return true;
                    }
                    entry.state = State::Removing;
                }
                // Those that this call has marked are behind it: two ranges may meet in one piece.
                State::Removing if runs.iter().any(|(from, to)| (*from..=*to).contains(&first)) => {}
                State::Doomed | State::Removing => search.others = true,
                State::Recorded | State::Entering | State::Live => {}
            }
            let behind = entry.last.checked_add(1).filter(|next| next <= to);
            search.next = behind.map(|next| (range, next)).or_else(next_range);
        }
        search.next.is_some()
    }

    /// The device has answered requests to unmap `runs`, all of them well or not.
    pub fn removed(&self, runs: &Runs, is_unmapped: bool) {
        for (first, last) in runs {
            // A run may have many pieces, all of them of this CPU's search, and no holes.
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

    /// It is: the device has the domain. What is recorded must be entered now, by [`recorded`](Self::recorded).
    pub fn attached(&self) {
        self.pieces.lock().presence = Presence::Present;
    }

    /// Recorded pieces from `from` on, which is moved behind them, `None` at the end. The device must be asked to map them, and
    /// [`entered`](Self::entered) be told. Looks at up to 1,024 pieces.
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

    /// The device has mapped recorded pieces, or it may have: they are mapped as their owners know it.
    pub fn entered(&self, new: &[Piece]) {
        self.answered(new, true);
    }

    /// An endpoint is about to be detached. If it is the last, nothing more is entered. Whether no request to map is under way, as
    /// must be before the last one is detached.
    pub fn detaching(&self) -> bool {
        let mut pieces = self.pieces.lock();
        if pieces.endpoints > 1 {
            return true;
        }
        pieces.presence = Presence::Between;
        pieces.entering == 0
    }

    /// An endpoint is detached, or it was refused. With the last one the device has forgotten all mappings. Visits all of them then.
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
mod tests {
    use super::*;

    fn piece(page: u64, pages: u64) -> Piece {
        Piece { first: page << 12, last: ((page + pages) << 12) - 1, phys: page << 20, flags: 3 }
    }

    fn present() -> Space {
        let space = Space::new(1);
        space.attaching();
        space.attached();
        space
    }

    fn live(pieces: &[Piece]) -> Space {
        let space = present();
        for piece in pieces {
            assert_eq!(space.enter(&[*piece]), Entered::Entering);
            space.answered(&[*piece], true);
        }
        space
    }

    fn unlink(space: &Space, from: u64, to: u64) -> Unlinked {
        let (mut next, mut all) = (Some(from), Unlinked::default());
        while next.is_some() {
            let some = space.unlink(&mut next, to);
            all = Unlinked { bytes: all.bytes + some.bytes, kept: all.kept + some.kept };
        }
        all
    }

    const ALL: [(u64, u64); 1] = [(0, u64::MAX)];

    fn stale(space: &Space, ranges: &[(u64, u64)]) -> (Runs, bool) {
        let (mut search, mut runs) = (Space::search(ranges), Runs::new());
        while space.take_stale(ranges, &mut search, &mut runs) {}
        (runs, search.others)
    }

    #[test]
    fn what_is_mapped_between_stale_pieces_is_in_no_run() {
        let space = live(&[piece(1, 1), piece(2, 2), piece(4, 1), piece(5, 1), piece(7, 1)]);
        for page in [1, 2, 5, 7] {
            let pages = if page == 2 { 2 } else { 1 };
            assert_eq!(unlink(&space, page << 12, ((page + pages) << 12) - 1).bytes, pages << 12);
        }
        let (runs, others) = stale(&space, &ALL);
        // A hole is in none, either: it may be mapped meanwhile.
        assert_eq!(runs[..], [(0x1000, 0x3fff), (0x5000, 0x5fff), (0x7000, 0x7fff)]);
        assert!(!others);
        assert_eq!(stale(&space, &ALL), (Runs::new(), true), "another CPU asks about them");
        assert_eq!(space.enter(&[piece(3, 1)]), Entered::Stale);
        space.removed(&runs, false);
        assert_eq!(stale(&space, &ALL), (runs.clone(), false), "refused: once more");
        space.removed(&runs, true);
        assert_eq!(stale(&space, &ALL), (Runs::new(), false));
        assert_eq!(space.enter(&[piece(3, 1), piece(4, 1)]), Entered::Occupied(Iova::new(0x4000)));
        assert_eq!(space.enter(&[piece(1, 1), piece(2, 2)]), Entered::Entering);
    }

    #[test]
    fn a_part_of_a_piece_is_kept_and_all_of_it_is_not() {
        let space = live(&[piece(0, 4), piece(4, 4)]);
        assert_eq!(unlink(&space, 0x1000, 0x4fff), Unlinked { bytes: 0, kept: 0x4000 });
        assert_eq!(unlink(&space, 0x1000, 0x7fff), Unlinked { bytes: 0x4000, kept: 0x3000 });
        assert_eq!(unlink(&space, 0, 0xffff), Unlinked { bytes: 0x4000, kept: 0 });
        assert_eq!(unlink(&space, 0, u64::MAX), Unlinked::default(), "once each");
    }

    #[test]
    fn a_piece_that_is_unmapped_while_it_is_entered_waits_for_that() {
        let space = present();
        assert_eq!(space.enter(&[piece(1, 1)]), Entered::Entering);
        assert_eq!(unlink(&space, 0, u64::MAX - 1).bytes, 0x1000);
        assert_eq!(stale(&space, &ALL), (Runs::new(), true));
        space.answered(&[piece(1, 1)], true);
        let (runs, others) = stale(&space, &ALL);
        assert_eq!((&runs[..], others), (&[(0x1000, 0x1fff)][..], false));
    }

    #[test]
    fn a_domain_without_endpoints_is_recorded_and_entered_with_the_first() {
        let space = Space::new(1);
        assert_eq!(space.enter(&[piece(1, 1), piece(2, 1)]), Entered::Recorded);
        assert_eq!(unlink(&space, 0x1000, 0x1fff).bytes, 0x1000);
        assert_eq!(stale(&space, &ALL), (Runs::new(), false), "the device does not know of it");
        space.attaching();
        assert_eq!(space.enter(&[piece(3, 1)]), Entered::Recorded);
        space.attached();
        let mut from = Some(0);
        let recorded = space.recorded(&mut from);
        assert_eq!((&recorded[..], from), (&[piece(2, 1), piece(3, 1)][..], None));
        assert!(!space.detaching(), "they are under way");
        space.entered(&recorded);
        assert!(space.detaching());
        assert_eq!(unlink(&space, 0x2000, 0x2fff).bytes, 0x1000);
        space.detached();
        assert_eq!(stale(&space, &ALL), (Runs::new(), false), "forgotten with the last endpoint");
        space.attaching();
        space.attached();
        assert_eq!(space.recorded(&mut Some(0))[..], [piece(3, 1)]);
    }

    #[test]
    fn a_search_of_ranges_looks_at_these_alone_and_at_the_last_address() {
        let last = Piece { first: u64::MAX - 0xfff, last: u64::MAX, phys: 0, flags: 1 };
        let space = live(&[piece(1, 1), piece(3, 1), last]);
        assert_eq!(unlink(&space, 0, u64::MAX).bytes, 0x3000);
        let (runs, _) = stale(&space, &[(0x3000, 0x3fff), (u64::MAX - 0xfff, u64::MAX), (0x3000, 0x3fff)]);
        assert_eq!(runs[..], [(0x3000, 0x3fff), (last.first, u64::MAX)]);
        space.removed(&runs, true);
        assert_eq!(stale(&space, &ALL).0[..], [(0x1000, 0x1fff)]);
    }

    #[test]
    fn more_pieces_than_a_call_visits_are_all_found() {
        let pieces: alloc::vec::Vec<_> = (0..3000).map(|index| piece(index * 2, 1)).collect();
        let space = live(&pieces);
        assert_eq!(unlink(&space, 0, u64::MAX - 1).bytes, 3000 << 12);
        let (mut search, mut found) = (Space::search(&ALL), 0);
        loop {
            let mut runs = Runs::new();
            let more = space.take_stale(&ALL, &mut search, &mut runs);
            found += runs.len();
            space.removed(&runs, true);
            if !more {
                break;
            }
        }
        assert_eq!((found, search.others), (3000, false));
        assert_eq!(stale(&space, &ALL), (Runs::new(), false));
    }
}
