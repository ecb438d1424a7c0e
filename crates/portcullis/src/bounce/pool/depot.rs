//! What a class keeps for all CPUs: chains of free slots that CPUs have left over, and slots without a buffer.
//!
//! One lock for each class, taken once for a chain. Every operation is a few words, whatever there is.

use super::cpu::Chain;
use super::slot::{Phase, Slot, index_of, link_to};

/// The part of one class that its lock protects.
#[derive(Debug, Default)]
pub(super) struct Depot {
    /// For each kind of permission the link to the first chain, and how many slots all of them have.
    chains: [(u64, u64); 3],
    /// The fewest that each kind had since the timer looked last: nobody has wanted those.
    least: [u64; 3],
    /// The link to the first slot without a buffer that once had one.
    empty: u64,
    /// The first of the class that was never used, and the one behind the last.
    fresh: usize,
    end: usize,
    /// Slots of a run; 0 where there are none. The never used slots are handed out from the first one on, runs of them
    /// from the end: what was used slot by slot never becomes a run again.
    run_slots: usize,
    /// The link to the first slot of a run that once had memory, and whose slots all have none.
    empty_runs: u64,
    /// The link to the first slot that may still be reached.
    retired: u64,
    retired_slots: u64,
    /// Slots that have a buffer, wherever they are, and the most that ever had at once.
    buffers: u64,
    peak: u64,
    /// Slots in whose addresses somebody else's mapping was met.
    pub lost: u64,
    /// Mappings made through slots that no CPU had waiting.
    pub bounced: u64,
}

impl Depot {
    /// For the slots from `first` up to `end`, in runs of `run_slots` where that is not 0.
    pub(super) fn new(first: usize, end: usize, run_slots: usize) -> Self {
        Self { fresh: first, end, run_slots, ..Self::default() }
    }

    /// Takes in a chain.
    pub(super) fn put(&mut self, slots: &[Slot], kind: usize, chain: Chain) {
        let (first, count) = &mut self.chains[kind % 3];
        if let Some(slot) = index_of(chain.first).and_then(|index| slots.get(index)) {
            slot.set_chain(*first, chain.slots);
            *first = chain.first;
            *count += chain.slots;
        }
    }

    /// Hands out the newest chain.
    pub(super) fn take(&mut self, slots: &[Slot], kind: usize) -> Option<Chain> {
        let chain = self.take_unnoticed(slots, kind);
        self.notice(kind);
        chain
    }

    /// As [`take`](Self::take), for a trim: nobody wants the chain, and some of it may come back.
    pub(super) fn take_unnoticed(&mut self, slots: &[Slot], kind: usize) -> Option<Chain> {
        let (first, count) = &mut self.chains[kind % 3];
        let chain = *first;
        let (next, slots) = slots.get(index_of(chain)?)?.chain();
        *first = next;
        *count = count.saturating_sub(slots);
        Some(Chain { first: chain, slots })
    }

    /// Sees how few slots of `kind` there are now.
    pub(super) fn notice(&mut self, kind: usize) {
        let free = self.free_of(kind);
        let least = &mut self.least[kind % 3];
        *least = (*least).min(free);
    }

    /// Takes in one free slot: onto the newest chain, unless that has `most` slots.
    pub(super) fn put_one(&mut self, slots: &[Slot], kind: usize, index: usize, most: u64) {
        let Some(slot) = slots.get(index) else { return };
        let chain = self.take(slots, kind);
        let (joined, other) = match chain {
            Some(chain) if chain.slots < most => (Some(chain), None),
            other => (None, other),
        };
        slot.set_next(joined.map_or(0, |chain| chain.first));
        other.into_iter().for_each(|other| self.put(slots, kind, other));
        let chain = Chain { first: link_to(index), slots: 1 + joined.map_or(0, |chain| chain.slots) };
        self.put(slots, kind, chain);
    }

    /// Hands out one free slot.
    pub(super) fn take_one(&mut self, slots: &[Slot], kind: usize) -> Option<usize> {
        let chain = self.take(slots, kind)?;
        let index = index_of(chain.first)?;
        if chain.slots > 1 {
            self.put(slots, kind, Chain { first: slots.get(index)?.next(), slots: chain.slots - 1 });
        }
        Some(index)
    }

    /// Free slots of `kind`.
    pub(super) fn free_of(&self, kind: usize) -> u64 {
        self.chains[kind % 3].1
    }

    /// Free slots of all kinds.
    pub(super) fn free(&self) -> u64 {
        self.chains.iter().map(|(_, slots)| slots).sum()
    }

    /// How many slots of `kind` nobody has wanted since the last call.
    pub(super) fn unwanted(&mut self, kind: usize) -> u64 {
        let free = self.free_of(kind);
        core::mem::replace(&mut self.least[kind % 3], free)
    }

    /// Hands out a slot without a buffer. O(1), unless a run must be broken up: O(slots of one).
    pub(super) fn take_empty(&mut self, slots: &[Slot]) -> Option<usize> {
        if let Some(index) = index_of(self.empty) {
            self.empty = slots.get(index)?.next();
            return Some(index);
        }
        let fresh = self.fresh;
        if fresh < self.end {
            self.fresh += 1;
            return Some(fresh);
        }
        let first = self.take_run(slots)?;
        self.put_empties(slots, first);
        self.take_empty(slots)
    }

    /// Hands out a run of slots without memory: its first.
    pub(super) fn take_run(&mut self, slots: &[Slot]) -> Option<usize> {
        if let Some(first) = index_of(self.empty_runs) {
            self.empty_runs = slots.get(first)?.next();
            return Some(first);
        }
        let first = self.end.checked_sub(self.run_slots)?;
        (self.run_slots > 0 && first >= self.fresh).then(|| {
            self.end = first;
            first
        })
    }

    /// Takes in the run whose first slot is `first`, none of whose slots has memory.
    pub(super) fn put_run(&mut self, slots: &[Slot], first: usize) {
        if let Some(slot) = slots.get(first) {
            slot.set_next(self.empty_runs);
            self.empty_runs = link_to(first);
        }
    }

    /// Takes in a run to be used slot by slot. O(slots of a run).
    pub(super) fn put_empties(&mut self, slots: &[Slot], first: usize) {
        (first..first + self.run_slots).rev().for_each(|index| self.put_empty(slots, index));
    }

    /// Takes in a slot without a buffer.
    pub(super) fn put_empty(&mut self, slots: &[Slot], index: usize) {
        if let Some(slot) = slots.get(index) {
            slot.set_phase(Phase::Empty);
            slot.set_next(self.empty);
            self.empty = link_to(index);
        }
    }

    /// Takes in a slot whose buffer is unmapped, but may still be reached.
    pub(super) fn put_retired(&mut self, slots: &[Slot], index: usize) {
        if let Some(slot) = slots.get(index) {
            slot.set_next(self.retired);
            self.retired = link_to(index);
            self.retired_slots += 1;
        }
    }

    /// Hands out one of those.
    pub(super) fn take_retired(&mut self, slots: &[Slot]) -> Option<usize> {
        let index = index_of(self.retired)?;
        self.retired = slots.get(index)?.next();
        self.retired_slots -= 1;
        Some(index)
    }

    /// How many of them there are.
    pub(super) fn count_retired(&self) -> u64 {
        self.retired_slots
    }

    /// So many slots have got a buffer.
    pub(super) fn gained(&mut self, slots: u64) {
        self.buffers += slots;
        self.peak = self.peak.max(self.buffers);
    }

    /// So many slots have given their buffers up.
    pub(super) fn gave_up(&mut self, slots: u64) {
        self.buffers = self.buffers.saturating_sub(slots);
    }

    /// Slots that have a buffer, and the most that ever had at once.
    pub(super) fn buffers(&self) -> (u64, u64) {
        (self.buffers, self.peak)
    }
}
