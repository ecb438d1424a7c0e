//! The state of a cache, under one lock: entries, their index, the idle list, and the usage. Memory that devices may reach never exceeds
//! the limits.
//!
//! No function here waits or changes translations: a step returns what its caller must do without the lock, and another step records the
//! result.

mod room;

pub(super) use room::{Claim, Step};

use arrayvec::ArrayVec;
use portcullis::addr::{Iova, IovaRange, PageSize};

use self::room::Waiting;
use super::config::{Forgotten, Keep, RegistrationLimits, RegistrationUsage, Released};
use super::index::{Index, Key, Span};
use super::recent::Recent;
use super::slot::{List, Phase, Slot, Slots};

/// The most entries that share one invalidation, and that a call visits in one critical section.
pub(super) const BATCH: usize = 64;

/// An entry in a batch of unmaps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evicted {
    pub slot: u32,
    pub range: IovaRange,
    /// Its addresses are leaked and counted; or they are in a token, which counts them if the call unwinds.
    pub lost: bool,
    /// An earlier attempt has unlinked it already.
    pub again: bool,
}

pub(super) type Batch = ArrayVec<Evicted, BATCH>;

/// The fields of an entry for a registration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub slot: u32,
    pub generation: u64,
    pub iova: Iova,
    pub whole: bool,
}

#[derive(Debug)]
pub(super) struct State {
    pub slots: Slots,
    index: Index,
    recent: Recent,
    limits: RegistrationLimits,
    granule: PageSize,
    /// Live entries without a holder, in LRU order.
    pub idle: List,
    pub unconfirmed: List,
    /// Entries that callers are unmapping, and their bytes.
    ending: (usize, u64),
    gone: usize,
    /// The bytes of all entries except `Gone` ones.
    bytes: u64,
    claimed: Claim,
    /// CPUs that are making room.
    waiting: Vec<Waiting>,
    generation: u64,
    counts: RegistrationUsage,
    /// The change of open bytes to report to the domain.
    pub opened: i64,
}

impl State {
    /// Returns `None` without memory for the initial allocations.
    pub(super) fn new(limits: RegistrationLimits, granule: PageSize) -> Option<Self> {
        Some(Self {
            slots: Slots::new(limits.entries)?,
            recent: Recent::new(limits.entries)?,
            index: Index::new(),
            limits,
            granule,
            idle: List::new(),
            unconfirmed: List::new(),
            ending: (0, 0),
            gone: 0,
            bytes: 0,
            claimed: Claim::default(),
            waiting: Vec::new(),
            generation: 0,
            counts: RegistrationUsage::default(),
            opened: 0,
        })
    }

    pub(super) fn usage(&self) -> RegistrationUsage {
        RegistrationUsage {
            entries: self.slots.used(),
            bytes: self.bytes,
            idle_entries: self.idle.len(),
            idle_bytes: self.idle.bytes,
            unconfirmed_entries: self.unconfirmed.len(),
            unconfirmed_bytes: self.unconfirmed.bytes,
            forgotten_entries: self.gone,
            ..self.counts
        }
    }

    /// Begins a forget of `span`: a caller that is making room for a part of it must no longer map it. Returns the next generation:
    /// existing entries have smaller ones.
    pub(super) fn begin_forget(&mut self, span: &Span) -> u64 {
        self.waiting.iter_mut().for_each(|waiting| waiting.forgotten |= waiting.span.touches(span));
        self.generation + 1
    }

    /// Acquires a mapped entry, if there is one: of exactly this range, or a larger persistent one. Never a larger one that is not
    /// persistent: its own holders' last release must end it.
    #[inline(always)]
    pub(super) fn hit(&mut self, span: &Span, keep: Keep) -> Option<Held> {
        let recent = self.recent.get(span);
        let same = |entry: &Slot| entry.phase == Phase::Live && entry.span.as_ref() == Some(span);
        if self.slots.get(recent).is_some_and(same) {
            return self.hold(recent, true, span, keep);
        }
        self.hit_in_index(span, keep)
    }

    #[inline(never)]
    fn hit_in_index(&mut self, span: &Span, keep: Keep) -> Option<Held> {
        let (slot, whole) = self.find(span)?;
        self.hold(slot, whole, span, keep)
    }

    /// Acquires a live entry, of which `span` is a part, or all if `whole`.
    #[inline(always)]
    fn hold(&mut self, slot: u32, whole: bool, span: &Span, keep: Keep) -> Option<Held> {
        let entry = self.slots.at_mut(slot);
        let (range, held) = (entry.range?, entry.span?);
        // From the first granule on, where the entry's range begins.
        let distance = span.memory().phys.get() - held.memory().phys.align_down(self.granule).get();
        let iova = range.start().checked_add(distance)?;
        entry.refs += 1;
        entry.whole += u64::from(whole);
        // An entry of which a part is acquired is persistent already.
        entry.keep |= keep == Keep::UntilForgotten;
        let (generation, first) = (entry.generation, entry.refs == 1);
        Self::count(entry, entry.open_if_reached(), &mut self.opened);
        if first {
            self.slots.unlink(&mut self.idle, slot);
        }
        self.counts.hits += 1;
        Some(Held { slot, generation, iova, whole })
    }

    /// As [`hit`](Self::hit), by the index, without acquiring the entry. Also returns whether the range is exactly the entry's.
    fn find(&mut self, span: &Span) -> Option<(u32, bool)> {
        let live = |slot: u32| self.slots.at(slot).phase == Phase::Live;
        if let Some(slot) = self.index.exact(span, live) {
            self.recent.put(span, slot);
            return Some((slot, true));
        }
        let kept = |slot| live(slot) && self.slots.at(slot).keep;
        self.index.covering(span, kept).map(|slot| (slot, false))
    }

    fn reserve(&mut self, span: &Span, bytes: u64, keep: Keep) -> Option<u32> {
        let slot = self.slots.take()?;
        self.generation += 1;
        let entry = self.slots.at_mut(slot);
        (entry.span, entry.bytes, entry.generation) = (Some(*span), bytes, self.generation);
        (entry.refs, entry.whole, entry.keep) = (1, 1, keep == Keep::UntilForgotten);
        entry.phase = Phase::Mapping;
        self.index.insert(span, slot);
        self.bytes += bytes;
        self.counts.misses += 1;
        self.counts.peak_entries = self.counts.peak_entries.max(self.slots.used());
        self.counts.peak_bytes = self.counts.peak_bytes.max(self.bytes);
        Some(slot)
    }

    /// Adds a live or an unconfirmed entry to `batch`, which has room, to be unmapped.
    pub(super) fn evict_one(&mut self, slot: u32, batch: &mut Batch) {
        let entry = self.slots.at_mut(slot);
        let unconfirmed = entry.phase == Phase::Unconfirmed;
        let again = unconfirmed && !entry.interrupted;
        let (range, bytes, lost, idle) =
            (entry.range, entry.bytes, entry.lost, entry.refs == 0 && entry.keep);
        (entry.phase, entry.interrupted) = (Phase::Ending, false);
        if unconfirmed {
            self.slots.unlink(&mut self.unconfirmed, slot);
        } else if idle {
            self.slots.unlink(&mut self.idle, slot);
        }
        self.ending.0 += 1;
        self.ending.1 += bytes;
        if let Some(range) = range {
            batch.push(Evicted { slot, range, lost, again });
        }
    }

    /// Makes a mapped entry live; returns `None` if it was forgotten and must end at once, in `batch`.
    pub(super) fn mapped(&mut self, slot: u32, batch: &mut Batch) -> Option<Held> {
        let entry = self.slots.at_mut(slot);
        let (range, span, generation) = (entry.range?, entry.span?, entry.generation);
        entry.phase = Phase::Live;
        if entry.forgotten {
            // The registration was never returned.
            (entry.refs, entry.whole, entry.keep) = (0, 0, false);
            self.evict_one(slot, batch);
            return None;
        }
        self.recent.put(&span, slot);
        self.recount(slot);
        let distance = span.memory().phys.page_offset(self.granule);
        Some(Held { slot, generation, iova: Iova::new(range.start().get() | distance), whole: true })
    }

    /// Ends an entry that could not be mapped. If `unconfirmed`, devices may still reach what was entered for a moment.
    pub(super) fn not_mapped(&mut self, slot: u32, unconfirmed: bool) {
        let entry = self.slots.at_mut(slot);
        (entry.refs, entry.whole, entry.keep) = (0, 0, false);
        if unconfirmed {
            self.put_unconfirmed(slot);
        } else {
            self.drop_entry(slot);
        }
    }

    /// Records the end of an entry's unmap. Returns whether its addresses are free now.
    pub(super) fn ended(&mut self, slot: u32, confirmed: bool) -> bool {
        let bytes = self.slots.at(slot).bytes;
        self.ending.0 -= 1;
        self.ending.1 -= bytes;
        if !confirmed {
            self.put_unconfirmed(slot);
            return false;
        }
        self.drop_entry(slot)
    }

    /// Records that the call that was mapping or unmapping an entry has unwound, or could not remove all of it. If `interrupted`,
    /// translations may be there: then a later call unmaps the rest. No caller gets its addresses meanwhile, nor ever if they are `lost`.
    pub(super) fn abandon(&mut self, slot: u32, lost: bool, interrupted: bool) {
        let entry = self.slots.at_mut(slot);
        (entry.lost, entry.interrupted) = (lost, interrupted);
        match entry.phase {
            Phase::Mapping => self.not_mapped(slot, interrupted),
            Phase::Ending => _ = self.ended(slot, false),
            _ => {}
        }
    }

    fn put_unconfirmed(&mut self, slot: u32) {
        self.slots.at_mut(slot).phase = Phase::Unconfirmed;
        self.slots.push(&mut self.unconfirmed, slot);
        self.recount(slot);
    }

    /// Ends an entry that no device reaches any more. Returns whether it has no holder either: then it is freed.
    fn drop_entry(&mut self, slot: u32) -> bool {
        let entry = self.slots.at_mut(slot);
        let (span, bytes) = (entry.span, entry.bytes);
        entry.phase = Phase::Gone;
        self.recount(slot);
        if let Some(span) = span {
            self.index.remove(&span, slot);
        }
        self.bytes -= bytes;
        let unheld = self.slots.at(slot).refs == 0;
        if unheld {
            self.slots.give_back(slot);
        } else {
            self.gone += 1;
        }
        unheld
    }

    /// Releases one registration of an entry that stays open; if it does not, returns `false` and changes nothing.
    #[inline(always)]
    pub(super) fn release(&mut self, slot: u32, generation: u64, whole: bool) -> bool {
        let stays = |entry: &Slot| {
            entry.generation == generation && entry.phase == Phase::Live && (entry.refs > 1 || entry.keep)
        };
        if !self.slots.get(slot).is_some_and(stays) {
            return false;
        }
        let entry = self.slots.at_mut(slot);
        entry.refs -= 1;
        entry.whole -= u64::from(whole);
        let last = entry.refs == 0;
        Self::count(entry, entry.open_if_reached(), &mut self.opened);
        if last {
            self.slots.push(&mut self.idle, slot);
        }
        true
    }

    /// As [`release`](Self::release), for any entry. Entries that must be unmapped for that are in `batch`; if a range is returned, its
    /// addresses are free now. The last registration of a range that is not persistent must report that no device reaches it: so a caller
    /// that `waits` learns that another one is still unmapping the range, and must retry; nothing has changed then.
    pub(super) fn end_held(&mut self, slot: u32, whole: bool, waits: bool, batch: &mut Batch) -> Ended {
        let entry = self.slots.at_mut(slot);
        if waits && entry.phase == Phase::Ending && entry.refs == 1 && !entry.keep {
            return Ended::Wait;
        }
        entry.refs -= 1;
        entry.whole -= u64::from(whole);
        let (last, keep) = (entry.refs == 0, entry.keep);
        self.recount(slot);
        let entry = self.slots.at(slot);
        match entry.phase {
            Phase::Live if last && keep => {
                self.slots.push(&mut self.idle, slot);
                Ended::Open
            }
            Phase::Live if last => {
                self.evict_one(slot, batch);
                Ended::Last(Released::Unmapped)
            }
            Phase::Live => Ended::Open,
            Phase::Gone if last => {
                let range = entry.range.map(|range| (range, entry.lost));
                self.gone -= 1;
                self.slots.give_back(slot);
                Ended::Forgotten(range)
            }
            // The forget was not confirmed. The last holder tries again.
            Phase::Unconfirmed if last && !keep => {
                self.evict_one(slot, batch);
                Ended::Last(Released::Forgotten)
            }
            _ => Ended::Forgotten(None),
        }
    }

    /// Adds an entry of the index to `batch`, which has room, because its owner takes the memory back. Returns whether it did: if not,
    /// other callers are mapping or unmapping the entry.
    pub(super) fn forget(&mut self, slot: u32, batch: &mut Batch, forgotten: &mut Forgotten) -> bool {
        let entry = self.slots.at_mut(slot);
        entry.forgotten = true;
        if !matches!(entry.phase, Phase::Live | Phase::Unconfirmed) {
            return false;
        }
        forgotten.entries += 1;
        forgotten.bytes += entry.bytes;
        forgotten.held += usize::from(entry.refs > 0);
        self.evict_one(slot, batch);
        true
    }

    /// Returns the next entry after `after` that overlaps `span` and has a generation below `stamp`.
    pub(super) fn next_overlapping(&self, span: &Span, after: Option<Key>, stamp: u64) -> Option<Key> {
        let mut after = after;
        loop {
            let key = self.index.overlapping(span, after)?;
            if self.slots.at(key.slot()).generation < stamp {
                return Some(key);
            }
            after = Some(key);
        }
    }

    /// Recomputes the open bytes of an entry.
    fn recount(&mut self, slot: u32) {
        let entry = self.slots.at_mut(slot);
        Self::count(entry, entry.open_now(), &mut self.opened);
    }

    /// Sets an entry's open bytes to `open`.
    #[inline]
    fn count(entry: &mut Slot, open: u64, opened: &mut i64) {
        // Wraps, as the domain's sum does.
        *opened = opened.wrapping_add(open.wrapping_sub(entry.open).cast_signed());
        entry.open = open;
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Ended {
    Open,
    /// The entry is in the batch. The result after its unmap.
    Last(Released),
    /// It was forgotten. The addresses that are free now, and whether they are leaked.
    Forgotten(Option<(IovaRange, bool)>),
    /// It is being forgotten, and is still held.
    Wait,
}
