//! The leader of a group, for one round: it collects the callers' requests, and answers them.

use super::batch::Batch;
use super::group::{Group, LeaderState};
use super::slot::{DOMAIN, Head, LEAVES, MANY_OF_ONE};
use super::state::{ANYBODY, FAILED, FLIP, ROUND, SEVERAL, SLOTS, State};
use crate::addr::{Iova, IovaRange};
use crate::invalidation::{GATHER_RANGES, Invalidation, InvalidationError, Request};
use crate::sync::{Ordering, prefetch};

/// If all callers together have more requests than this, several ranges of one domain in one call become the whole domain, as in a
/// [gather](crate::invalidation::Gather).
const RANGES: usize = if cfg!(loom) { 1 } else { GATHER_RANGES };

/// The numbers of the slots in `bits`: those from `from` on, then the lower ones.
fn round_robin(bits: u64, from: usize) -> impl Iterator<Item = usize> {
    let (low, high) = (bits & ((1 << from) - 1), bits & !((1 << from) - 1));
    [high, low].into_iter().flat_map(|bits| {
        let mut rest = bits;
        core::iter::from_fn(move || {
            let number = rest.trailing_zeros() as usize;
            rest &= rest.wrapping_sub(1);
            (number < SLOTS).then_some(number)
        })
    })
}

/// The right to lead a group. Dropping it answers all collected callers, and lets another caller lead.
pub(super) struct Leader<'a> {
    group: &'a Group,
    state: State,
    own: usize,
    /// Slots whose requests are in the batch, the leader's own among them.
    collected: u64,
    /// Slots whose requests did not fit.
    left: u64,
    /// The slot to collect after the leader's own: the preferred leader's, else the next one. So all slots have their turn if not all fit,
    /// unless preferred callers have no core.
    from: usize,
    result: Result<(), InvalidationError>,
}

impl<'a> Leader<'a> {
    /// The caller of slot `own` has set `has_leader`.
    pub fn new(group: &'a Group, own: usize) -> Self {
        // Relaxed: the exchange of `has_leader` has acquired the last leader's store, and only leaders store it.
        let state = State(group.word.0.load(Ordering::Relaxed));
        let from = state.next().unwrap_or(own + 1) % SLOTS;
        let result = Err(InvalidationError::Abandoned);
        Self { group, state, own, collected: 1 << own, left: 0, from, result }
    }

    pub fn batch(&self) -> &Batch {
        // SAFETY: only the leader uses the batch, which this is; and it changes the batch by `&mut self` only (`begin`, `add`).
        unsafe { &*self.group.leader_state.0.batch.get() }
    }

    /// Empties the batch, and collects the leader's own requests.
    pub fn begin(&mut self) {
        // SAFETY: only the leader uses the batch, which this is. No other reference to it lives: `batch` lends it from `self`.
        unsafe { &mut *self.group.leader_state.0.batch.get() }.clear();
        self.collect(1 << self.own);
    }

    /// Collects further pending requests, as far as there is room. Returns whether there were any.
    pub fn collect_more(&mut self) -> bool {
        let unseen = self.group.hints.0.used.load(Ordering::Relaxed) & !self.collected & !self.left;
        unseen != 0 && self.collect(unseen)
    }

    fn collect(&mut self, slots: u64) -> bool {
        let group = self.group;
        let from = self.from;
        let numbers = |bits: u64| round_robin(bits, from);
        if slots & slots.wrapping_sub(1) != 0 {
            numbers(slots).for_each(|number| prefetch(&raw const group.slots[number].head));
        }
        let mut heads = [Head(0); SLOTS];
        let (mut pending, mut manys, mut count) = (0_u64, 0_u64, self.batch().requests().len());
        for number in numbers(slots) {
            if let Some(head) = group.slots[number].pending() {
                pending |= 1 << number;
                manys |= u64::from(head.kind() <= MANY_OF_ONE) << number;
                heads[number] = head;
                count += head.count();
            }
        }
        let is_full = count > RANGES;
        for number in numbers(manys).filter(|_| !is_full) {
            let (many, count) = (group.slots[number].many.load(Ordering::Relaxed), heads[number].count());
            let bytes = count * size_of::<Request>();
            (0..bytes).step_by(64).for_each(|at| prefetch(many.cast::<u8>().wrapping_add(at)));
        }
        for number in numbers(pending) {
            let fits = self.add(number, heads[number], is_full);
            if fits { self.collected |= 1 << number } else { self.left |= 1 << number }
        }
        pending & self.collected != 0
    }

    /// Adds the requests of a slot: all, or none if there is no room. If `is_full` (more than [`RANGES`] in all), several requests for one
    /// domain become the whole domain, and are not read.
    fn add(&mut self, number: usize, head: Head, is_full: bool) -> bool {
        let slot = &self.group.slots[number];
        let domain = head.domain();
        let one = |invalidation| [Request { domain, invalidation }];
        // SAFETY: as in `begin`.
        let batch = unsafe { &mut *self.group.leader_state.0.batch.get() };
        // SAFETY: clause 1: the slot was pending with this head, and only the leader answers it, which this is, in `drop`.
        let many = unsafe { slot.many(head) };
        match (many, head.kind()) {
            (Some([_, _, ..]), MANY_OF_ONE) if is_full => batch.add_all(&one(Invalidation::Domain)),
            (Some(many), _) => batch.add_all(many),
            (None, DOMAIN) => batch.add_all(&one(Invalidation::Domain)),
            (None, kind) => {
                let start = Iova::new(slot.start.load(Ordering::Relaxed));
                let range = IovaRange::new(start, slot.bytes.load(Ordering::Relaxed));
                let leaf_only = kind == LEAVES;
                let whole = Invalidation::Domain;
                batch.add_all(&one(range.map_or(whole, |range| Invalidation::Range { range, leaf_only })))
            }
        }
    }

    /// Slots of the last two rounds that are not in this one yet.
    pub fn missing(&self) -> u64 {
        let LeaderState { last_round, round_before, .. } = &self.group.leader_state.0;
        (last_round.get() | round_before.get()) & !self.collected & !self.left
    }

    /// Whether the first of the [missing](Self::missing) slots is pending now. Reads one slot only, as each read takes a line from its
    /// caller.
    pub fn next_is_pending(&self) -> bool {
        let number = self.missing().trailing_zeros() as usize;
        self.group.slots.get(number).is_some_and(|slot| slot.pending().is_some())
    }

    pub fn is_full(&self) -> bool {
        self.left != 0
    }

    /// For how many polls the leader lingers: as many as lately paid, up to `most`; in every `probe`-th round `most`, to try again.
    pub fn linger_polls(&self, most: u64, probe: u64) -> u64 {
        let LeaderState { rounds, linger, .. } = &self.group.leader_state.0;
        if rounds.get().is_multiple_of(probe) { most } else { linger.get().min(most) }
    }

    /// Sets for how many polls the next leaders linger: `most` if three quarters of the expected callers came, else half of `polls`.
    pub fn set_linger(&self, polls: u64, most: u64) {
        let LeaderState { linger, last_round, round_before, .. } = &self.group.leader_state.0;
        let expected = last_round.get() | round_before.get();
        let most_came = 4 * (expected & self.collected).count_ones() >= 3 * expected.count_ones();
        linger.set(if most_came { most } else { polls / 2 });
    }

    /// Answers all collected callers, and lets another caller lead. `overlaps` says that another submission was in flight meanwhile.
    /// Returns the number of callers.
    pub fn finish(mut self, result: Result<(), InvalidationError>, overlaps: bool) -> u32 {
        let (own, LeaderState { last_round, round_before, rounds, .. }) =
            (1 << self.own, &self.group.leader_state.0);
        let round = self.collected;
        let all_came = self.missing() == 0;
        let recent = round | last_round.get();
        let is_uncontended = recent == own && self.left == 0 && !overlaps;
        round_before.set(last_round.get());
        last_round.set(round);
        rounds.set(rounds.get() + 1);
        let several = if round & round.wrapping_sub(1) != 0 { SEVERAL } else { 0 };
        self.state.0 = self.state.0 & !SEVERAL | several;
        let next = match round_robin(self.left, self.from).next() {
            Some(first) => first,
            None if all_came => self.own,
            None => ANYBODY,
        };
        let hint = &self.group.hints.0.is_uncontended;
        if hint.load(Ordering::Relaxed) != is_uncontended {
            hint.store(is_uncontended, Ordering::Relaxed);
        }
        self.state = self.state.with_next(if is_uncontended { ANYBODY } else { next });
        self.result = result;
        round.count_ones()
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let Self { group, collected, result, .. } = *self;
        let state = self.state.0.wrapping_add(1 << ROUND);
        for number in round_robin(collected, self.own) {
            let slot = &group.slots[number];
            let failed = if let Err(error) = result {
                *slot.own.error.lock() = error;
                FAILED
            } else {
                0
            };
            // Relaxed: only leaders store it.
            let flip = slot.answer.load(Ordering::Relaxed) & FLIP ^ FLIP;
            slot.answer.store(state | failed | flip, Ordering::Release);
        }
        group.word.0.store(state, Ordering::Relaxed);
        group.has_leader.0.store(false, Ordering::Release);
    }
}
