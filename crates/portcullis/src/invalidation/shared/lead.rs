//! The leader's role in a meeting: its holder collects the callers' requests, and answers them.

use super::batch::Batch;
use super::meeting::{Leads, Meeting};
use super::slot::{DOMAIN, Head, LEAVES, MANY_OF_ONE};
use super::state::{ANYBODY, COMPANY, FAILED, FLIP, ROUND, SLOTS, State};
use crate::addr::{Iova, IovaRange};
use crate::invalidation::{GATHER_RANGES, Invalidation, InvalidationError, Request};
use crate::sync::{Ordering, prefetch};

/// Above this many requests of all callers together, several ranges of one domain in one call become the whole domain, as in a
/// [gather](crate::invalidation::Gather) with more.
const RANGES: usize = if cfg!(loom) { 1 } else { GATHER_RANGES };

/// The slots of `bits`, from number `from` on and then from 0.
fn in_turn(bits: u64, from: usize) -> impl Iterator<Item = usize> {
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

/// The lead of a meeting. Dropping it answers all collected callers, and gives it up.
pub(super) struct Lead<'a> {
    meeting: &'a Meeting,
    state: State,
    own: usize,
    /// Slots whose requests are in the batch, the leader's own among them.
    taken: u64,
    left: u64,
    /// The slot that is collected after the leader's own: the preferred one, else the next. So all are served in turn where not all fit,
    /// unless preferred callers have no core.
    from: usize,
    result: Result<(), InvalidationError>,
}

impl<'a> Lead<'a> {
    /// The caller of slot `own` has set `led`.
    pub fn new(meeting: &'a Meeting, own: usize) -> Self {
        // Relaxed: the exchange of `led` has acquired what the last leader stored, and nobody else stores.
        let state = State(meeting.word.0.load(Ordering::Relaxed));
        let from = state.next().unwrap_or(own + 1) % SLOTS;
        let result = Err(InvalidationError::Abandoned);
        Self { meeting, state, own, taken: 1 << own, left: 0, from, result }
    }

    pub fn batch(&self) -> &Batch {
        // SAFETY: only the leader uses it, which this is; and it changes it by `&mut self` only (`begin`, `add`).
        unsafe { &*self.meeting.leads.0.batch.get() }
    }

    pub fn begin(&mut self) {
        // SAFETY: only the leader uses it, which this is. No other reference to it lives: `batch` lends it from `self`.
        unsafe { &mut *self.meeting.leads.0.batch.get() }.clear();
        self.take(1 << self.own);
    }

    /// Collects further pending requests while there is room. Returns whether it found any.
    pub fn take_more(&mut self) -> bool {
        let unseen = self.meeting.known.0.members.load(Ordering::Relaxed) & !self.taken & !self.left;
        unseen != 0 && self.take(unseen)
    }

    fn take(&mut self, slots: u64) -> bool {
        let meeting = self.meeting;
        let from = self.from;
        let numbers = |bits: u64| in_turn(bits, from);
        if slots & slots.wrapping_sub(1) != 0 {
            numbers(slots).for_each(|number| prefetch(&raw const meeting.slots[number].head));
        }
        let mut heads = [Head(0); SLOTS];
        let (mut asking, mut manys, mut count) = (0_u64, 0_u64, self.batch().requests().len());
        for number in numbers(slots) {
            if let Some(head) = meeting.slots[number].asked() {
                asking |= 1 << number;
                manys |= u64::from(head.kind() <= MANY_OF_ONE) << number;
                heads[number] = head;
                count += head.count();
            }
        }
        let is_full = count > RANGES;
        for number in numbers(manys).filter(|_| !is_full) {
            let (many, count) = (meeting.slots[number].many.load(Ordering::Relaxed), heads[number].count());
            let bytes = count * size_of::<Request>();
            (0..bytes).step_by(64).for_each(|at| prefetch(many.cast::<u8>().wrapping_add(at)));
        }
        for number in numbers(asking) {
            let fits = self.add(number, heads[number], is_full);
            if fits { self.taken |= 1 << number } else { self.left |= 1 << number }
        }
        asking & self.taken != 0
    }

    /// Adds the request of a slot. With more than [`RANGES`] in all, several requests of one domain are not read, and become the whole
    /// domain.
    fn add(&mut self, number: usize, head: Head, is_full: bool) -> bool {
        let slot = &self.meeting.slots[number];
        let domain = head.domain();
        let one = |invalidation| [Request { domain, invalidation }];
        // SAFETY: as in `begin`.
        let batch = unsafe { &mut *self.meeting.leads.0.batch.get() };
        // SAFETY: clause 1: the head was loaded since the slot asked, and only the leader answers, which this is, in `drop`.
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

    /// Callers of the last two rounds that have not come yet.
    pub fn missing(&self) -> u64 {
        let Leads { last, before, .. } = &self.meeting.leads.0;
        (last.get() | before.get()) & !self.taken & !self.left
    }

    /// Whether the first of [these](Self::missing) asks now. Looks at its line only, as each look takes a line from its caller.
    pub fn has_come(&self) -> bool {
        let number = self.missing().trailing_zeros() as usize;
        self.meeting.slots.get(number).is_some_and(|slot| slot.asked().is_some())
    }

    pub fn is_full(&self) -> bool {
        self.left != 0
    }

    /// How many looks lingering has recently been worth, up to `most`; in every `probe`-th round `most`, to try again.
    pub fn looks(&self, most: u64, probe: u64) -> u64 {
        let Leads { rounds, linger, .. } = &self.meeting.leads.0;
        if rounds.get().is_multiple_of(probe) { most } else { linger.get().min(most) }
    }

    /// Sets how often later leaders look: up to `most` times if most of the expected callers came, else half of `looks`.
    pub fn lingered(&self, looks: u64, most: u64) {
        let Leads { linger, last, before, .. } = &self.meeting.leads.0;
        let expected = last.get() | before.get();
        let most_came = 4 * (expected & self.taken).count_ones() >= 3 * expected.count_ones();
        linger.set(if most_came { most } else { looks / 2 });
    }

    /// Answers all collected callers, and gives the lead up. `has_company` says that others submit at the same time. Returns the number of
    /// callers.
    pub fn finish(mut self, result: Result<(), InvalidationError>, has_company: bool) -> u32 {
        let (own, Leads { last, before, rounds, .. }) = (1 << self.own, &self.meeting.leads.0);
        let round = self.taken;
        let all_came = self.missing() == 0;
        let recent = round | last.get();
        let is_quiet = recent == own && self.left == 0 && !has_company;
        before.set(last.get());
        last.set(round);
        rounds.set(rounds.get() + 1);
        let company = if round & round.wrapping_sub(1) != 0 { COMPANY } else { 0 };
        self.state.0 = self.state.0 & !COMPANY | company;
        let next = match in_turn(self.left, self.from).next() {
            Some(first) => first,
            None if all_came => self.own,
            None => ANYBODY,
        };
        let known = &self.meeting.known.0.is_quiet;
        if known.load(Ordering::Relaxed) != is_quiet {
            known.store(is_quiet, Ordering::Relaxed);
        }
        self.state = self.state.with_next(if is_quiet { ANYBODY } else { next });
        self.result = result;
        round.count_ones()
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let Self { meeting, taken, result, .. } = *self;
        let state = self.state.0.wrapping_add(1 << ROUND);
        for number in in_turn(taken, self.own) {
            let slot = &meeting.slots[number];
            let failed = if let Err(error) = result {
                *slot.own.error.lock() = error;
                FAILED
            } else {
                0
            };
            // Relaxed: only the leader stores it.
            let flip = slot.answer.load(Ordering::Relaxed) & FLIP ^ FLIP;
            slot.answer.store(state | failed | flip, Ordering::Release);
        }
        meeting.word.0.store(state, Ordering::Relaxed);
        meeting.led.0.store(false, Ordering::Release);
    }
}
