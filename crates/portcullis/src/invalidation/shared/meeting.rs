//! The meeting place of a [`SharedQueue`](super::SharedQueue)'s callers: the CPUs of a group, or one level up the leaders of groups. At most one of
//! them *leads* at any time: it collects the others' requests, and answers each of them once. No caller returns before it was answered.
//!
//! Each caller has a [`Slot`], a cache line of its own, in which it publishes its requests. The leader looks at the slots. No load of these
//! depends on another, so their lines come at the same time ([`prefetch`]). The leader answers all callers by one store of one
//! [word](State), which all of them poll. So a round passes each caller's line to the leader, and the word's line to each caller; only its
//! caller ever writes a slot's line.
//!
//! A slot is *asked* (it has a pending request) while the lowest bit of its `head` differs from the slot's bit in the word, one of the lowest
//! ([`ALL`]). Its caller flips the bit in `head` to ask, and the leader flips the word's bit to answer. A caller that finds neither its answer nor a
//! leader takes the lead. The word names a preferred leader, as several that try at once take the line from each other; others leave it the lead
//! for a few looks.
//!
//! Memory ordering.
//! - *Requests*: `head` is stored with `Release` after the slot's other words, and loaded with `Acquire` before them.
//! - *The answer*: the word is stored with `Release`, after errors, and loaded with `Acquire`. So an answered caller sees what came before
//!   the answer: the submission, and what all callers in it had stored before they asked.
//! - *The lead*: `led` is set by an exchange that acquires, where it was clear, and cleared by a store that releases. So leaders are in one
//!   order, each after the last one's loads and stores. Only the leader changes the word: so it knows the value, and stores. A caller that
//!   has got the lead looks once more whether the leader before has answered it.
//! - *The slot*: `held` is set by an exchange that acquires, and cleared by a store that releases. Its bit of the word changes only as an
//!   answer, which the previous holder has seen: so a relaxed load of the word finds it.
//! - *No caller starves*: a caller without an answer looks until nobody leads, and then takes the lead. It serves its own slot before any other.

use alloc::boxed::Box;
use core::cell::UnsafeCell;
use core::slice;

use super::batch::Batch;
use crate::addr::{DomainId, Iova, IovaRange};
use crate::heap::{self, OutOfMemory};
use crate::invalidation::{Invalidation, InvalidationError, Request};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering, pause_among, prefetch};

/// Callers of one meeting that can wait at a time.
pub(super) const SLOTS: usize = if cfg!(loom) { 2 } else { 16 };

/// Above this many requests of all callers together, several ranges of one domain in one call become the whole domain, as in a
/// [gather](crate::invalidation::Gather) with more.
const RANGES: usize = if cfg!(loom) { 1 } else { 32 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(u64);

/// The answer bits of all slots, from bit 0 on.
const ALL: u64 = (1 << SLOTS) - 1;
/// The first error bit: whether the last answer of each slot was an error.
const FAILED: u32 = 16;
/// The leader has submitted: later requests are in the next round.
const BUSY: u64 = 1 << 33;
/// The last two rounds had one and the same caller, none was left out, and no other group submitted beside them.
const QUIET: u64 = 1 << 34;
/// Where the number of the preferred next leader is.
const NEXT: u32 = 40;
const ANYBODY: usize = 0xff;
/// Where the number of ended leads is, modulo 2^16: all bits above it.
const ROUND: u32 = 48;

impl State {
    pub fn is_busy(self) -> bool {
        self.0 & BUSY != 0
    }

    pub fn is_quiet(self) -> bool {
        self.0 & QUIET != 0
    }

    /// Whether slot `number`, whose first word is `head`, has a pending request.
    fn is_asked(self, number: usize, head: u64) -> bool {
        (self.0 >> number ^ head) & 1 != 0
    }

    /// Whether no lead has ended between this and `other`, or 2^16 of them.
    pub fn is_same_round(self, other: Self) -> bool {
        self.0 >> ROUND == other.0 >> ROUND
    }

    /// Whether slot `number` may lead at once: nobody else is preferred.
    pub fn is_turn_of(self, number: usize) -> bool {
        self.next().is_none_or(|next| next == number)
    }

    fn next(self) -> Option<usize> {
        Some((self.0 >> NEXT) as usize & ANYBODY).filter(|next| *next != ANYBODY)
    }

    fn with_next(self, next: usize) -> Self {
        Self(self.0 & !((ANYBODY as u64) << NEXT) | (next as u64) << NEXT)
    }
}

/// Sets `flag` where it is clear, and acquires what its last holder stored. Returns whether it was clear.
fn take(flag: &AtomicBool) -> bool {
    // Looks first: a failing exchange takes the line, too.
    !flag.load(Ordering::Relaxed)
        && flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

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

#[derive(Debug)]
#[repr(C, align(128))]
struct Slot {
    head: AtomicU64,
    /// The range's start, and its bytes.
    start: AtomicU64,
    bytes: AtomicU64,
    many: AtomicPtr<Request>,
    /// On another line, as only its callers access it.
    own: Own,
}

#[derive(Debug)]
#[repr(align(64))]
struct Own {
    held: AtomicBool,
    /// The error of its request. The lock has no contention: nobody looks before the word says so.
    error: Mutex<InvalidationError>,
}

/// A slot's first word: the bit that flips, the kind of request, the number of requests, their domain.
#[derive(Debug, Clone, Copy)]
struct Head(u64);

const MANY: u64 = 0;
/// The same, all of one domain.
const MANY_OF_ONE: u64 = 1;
const DOMAIN: u64 = 2;
const RANGE: u64 = 3;
const LEAVES: u64 = 4;

impl Head {
    fn new(kind: u64, count: usize, domain: DomainId) -> Self {
        Self(kind << 1 | u64::from(domain.0) << 16 | (count as u64) << 32)
    }

    fn kind(self) -> u64 {
        self.0 >> 1 & 7
    }

    fn count(self) -> usize {
        (self.0 >> 32) as usize
    }

    fn domain(self) -> DomainId {
        DomainId((self.0 >> 16) as u16)
    }
}

impl Slot {
    fn new() -> Self {
        let own = Own { held: AtomicBool::new(false), error: Mutex::new(InvalidationError::Abandoned) };
        let word = || AtomicU64::new(0);
        let many = AtomicPtr::new(core::ptr::null_mut());
        Self { head: word(), start: word(), bytes: word(), many, own }
    }

    /// Its several requests, where `head` says so.
    ///
    /// # Safety
    /// 1. The slot is asked with this head, and is not answered while the reference lives: until then the requests stay ([`Held::ask`]).
    unsafe fn many<'a>(&self, head: Head) -> Option<&'a [Request]> {
        if head.kind() > MANY_OF_ONE {
            return None;
        }
        // Relaxed: it was stored before the head, and the head was loaded with `Acquire`.
        let many = self.many.load(Ordering::Relaxed);
        // SAFETY: the head says that this many are there; by clause 1, which is the caller's, they stay.
        Some(unsafe { slice::from_raw_parts(many, head.count()) })
    }

    /// Publishes `requests`, with this lowest bit.
    fn ask(&self, requests: &[Request], bit: u64) {
        let head = match requests {
            [Request { domain, invalidation: Invalidation::Domain }] => Head::new(DOMAIN, 1, *domain),
            [Request { domain, invalidation: Invalidation::Range { range, leaf_only } }] => {
                self.start.store(range.start().get(), Ordering::Relaxed);
                self.bytes.store(range.len(), Ordering::Relaxed);
                Head::new(if *leaf_only { LEAVES } else { RANGE }, 1, *domain)
            }
            _ => {
                let first = requests.first().map_or(DomainId(0), |first| first.domain);
                let is_one = requests.iter().all(|request| request.domain == first);
                self.many.store(requests.as_ptr().cast_mut(), Ordering::Relaxed);
                Head::new(if is_one { MANY_OF_ONE } else { MANY }, requests.len(), first)
            }
        };
        self.head.store(head.0 | bit, Ordering::Release);
    }
}

/// What leaders pass on to each other.
#[derive(Debug)]
struct Leads {
    /// Slots of the last round, and of the one before.
    last: LocalU64,
    before: LocalU64,
    rounds: LocalU64,
    /// The number of looks for which it has lately paid to linger.
    linger: LocalU64,
    batch: UnsafeCell<Box<Batch>>,
}

/// The lead. Not in the word, as callers that try to lead take its line from all; nor in [`Leads`], as waiting callers look at it.
#[derive(Debug)]
struct Led {
    led: AtomicBool,
    /// Somebody waits for an answer: nobody leads without a slot before a round of callers with slots. Otherwise one caller that leads
    /// alone again and again might leave it no moment.
    wanted: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Meeting {
    word: CachePadded<AtomicU64>,
    /// Slots that were ever used: a leader looks at no others.
    members: CachePadded<AtomicU64>,
    led: CachePadded<Led>,
    leads: CachePadded<Leads>,
    slots: Box<[Slot]>,
}

// SAFETY: all but the batch is `Sync`. Only the leader (`Lead`) uses the batch, there is one leader at a time, and each comes after the one before
// (the module's documentation). A batch is `Send`.
unsafe impl Sync for Meeting {}

impl Meeting {
    /// An empty meeting without a leader.
    pub fn new() -> Result<Self, OutOfMemory> {
        let batch = heap::boxed_in(|place| Ok::<_, OutOfMemory>(place.write(Batch::default())))?;
        let word = || LocalU64::new(0);
        let leads = Leads {
            last: word(),
            before: word(),
            rounds: word(),
            linger: LocalU64::new(u64::MAX),
            batch: UnsafeCell::new(batch),
        };
        Ok(Self {
            word: CachePadded(AtomicU64::new(QUIET | (ANYBODY as u64) << NEXT)),
            led: CachePadded(Led { led: AtomicBool::new(false), wanted: AtomicBool::new(false) }),
            members: CachePadded(AtomicU64::new(0)),
            leads: CachePadded(leads),
            slots: heap::slice(SLOTS, |_| Ok(Slot::new()))?,
        })
    }

    pub fn state(&self) -> State {
        State(self.word.0.load(Ordering::Acquire))
    }

    pub fn rounds(&self) -> u64 {
        self.leads.0.rounds.get()
    }

    pub fn last(&self) -> u32 {
        self.leads.0.last.get().count_ones()
    }

    #[cfg(all(test, not(loom)))]
    pub fn asking(&self) -> u32 {
        let state = self.state();
        let asks =
            |(number, slot): &(usize, &Slot)| state.is_asked(*number, slot.head.load(Ordering::Acquire));
        self.slots.iter().enumerate().filter(asks).count() as u32
    }

    #[cfg(all(test, not(loom)))]
    pub fn expect(&self, slots: u64) {
        self.leads.0.last.set(slots);
        self.leads.0.before.set(slots);
        self.word.0.fetch_and(!QUIET, Ordering::Relaxed);
    }

    #[cfg(all(test, not(loom)))]
    pub fn linger(&self) -> u64 {
        self.leads.0.linger.get()
    }

    #[cfg(all(test, not(loom)))]
    pub fn is_led(&self) -> bool {
        self.led.0.led.load(Ordering::Relaxed)
    }

    /// A slot for a caller: number `first`, or another one where that is held. `None` where all are held.
    pub fn hold(&self, first: usize) -> Option<Held<'_>> {
        (0..SLOTS).map(|more| (first + more) % SLOTS).find_map(|number| {
            let held = &self.slots[number].own.held;
            let is_free = take(held);
            // Not `then_some`: it would make a `Held` and drop it, and free somebody else's slot.
            is_free.then(|| Held { meeting: self, number, answered: None })
        })
    }

    /// Takes the lead, where nobody has it, and returns the word then; gives it up at once if `may` returns `false`.
    fn take_lead(&self, may: impl Fn(State) -> bool) -> Option<State> {
        if !take(&self.led.0.led) {
            return None;
        }
        // Relaxed: the exchange has acquired what the last leader stored, and nobody else stores.
        let state = State(self.word.0.load(Ordering::Relaxed));
        if !may(state) {
            self.led.0.led.store(false, Ordering::Release);
            return None;
        }
        Some(state)
    }

    /// Nobody leads without a slot before the next round of callers with slots.
    pub fn want(&self) {
        let wanted = &self.led.0.wanted;
        if !wanted.load(Ordering::Relaxed) {
            wanted.store(true, Ordering::Relaxed);
        }
    }

    /// Takes the lead without a slot, where the last rounds had one caller, and nobody [wants](Self::want) it. The leader answers nobody,
    /// and counts as the caller of slot `number`.
    pub fn lead_alone(&self, number: usize) -> Option<Lead<'_>> {
        let may = |state: State| state.is_quiet() && !self.led.0.wanted.load(Ordering::Relaxed);
        if !may(self.state()) {
            return None;
        }
        // Others may have led meanwhile, and named a preferred leader.
        let state = self.take_lead(may)?;
        let mut lead = Lead::new(self, state, number, 0);
        lead.submits();
        Some(lead)
    }
}

/// A caller's slot. Dropping it waits for the answer, and takes the lead where nobody has it.
pub(super) struct Held<'a> {
    meeting: &'a Meeting,
    pub number: usize,
    /// The answered value of its bit, once it has asked.
    answered: Option<u64>,
}

impl<'a> Held<'a> {
    /// Publishes `requests`, and calls `f`, which waits for the answer. When this returns, or unwinds, the requests were answered.
    pub fn ask<R>(mut self, requests: &[Request], f: impl FnOnce(&Self) -> R) -> R {
        let (meeting, bit) = (self.meeting, 1 << self.number);
        // Relaxed: see the module's documentation.
        if meeting.members.0.load(Ordering::Relaxed) & bit == 0 {
            meeting.members.0.fetch_or(bit, Ordering::Relaxed);
        }
        let done = meeting.word.0.load(Ordering::Relaxed) >> self.number & 1;
        // A leader may use them until it has answered, which `drop` waits for.
        meeting.slots[self.number].ask(requests, done ^ 1);
        self.answered = Some(done ^ 1);
        f(&self)
    }

    /// The answer, if `state` has it.
    pub fn answer(&self, state: State) -> Option<Result<(), InvalidationError>> {
        if self.answered.is_some_and(|answered| state.0 >> self.number & 1 != answered) {
            return None;
        }
        let failed = state.0 >> FAILED >> self.number & 1 != 0;
        let error = || *self.meeting.slots[self.number].own.error.lock();
        Some(if failed { Err(error()) } else { Ok(()) })
    }

    /// Takes the lead, where nobody has it and this slot was not answered.
    pub fn lead(&self) -> Option<Lead<'a>> {
        let state = self.meeting.take_lead(|state| self.answer(state).is_none())?;
        let mut lead = Lead::new(self.meeting, state, self.number, 0);
        lead.taken = 1 << self.number;
        Some(lead)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut looks = 0;
        while self.answer(self.meeting.state()).is_none() {
            // It unwinds, and takes its own request out.
            if self.lead().is_none() {
                pause_among(looks);
                looks = looks.saturating_add(1);
            }
        }
        self.meeting.slots[self.number].own.held.store(false, Ordering::Release);
    }
}

/// The lead of a meeting. Dropping it answers all collected callers, and gives it up.
pub(super) struct Lead<'a> {
    meeting: &'a Meeting,
    state: State,
    own: usize,
    /// Slots whose requests are in the batch, the leader's own among them; unless it leads without a slot: then that slot may be another caller's.
    taken: u64,
    left: u64,
    /// The slot that is collected after the leader's own: the preferred one, else the next. So all are served in turn where not all fit, unless
    /// preferred callers have no core.
    from: usize,
    result: Result<(), InvalidationError>,
}

impl<'a> Lead<'a> {
    fn new(meeting: &'a Meeting, state: State, own: usize, taken: u64) -> Self {
        let from = state.next().unwrap_or(own + 1) % SLOTS;
        Self { meeting, state, own, taken, left: 0, from, result: Err(InvalidationError::Abandoned) }
    }

    pub fn batch(&self) -> &Batch {
        // SAFETY: only the leader uses it, which this is; and it changes it by `&mut self` only (`begin`, `add`).
        unsafe { &*self.meeting.leads.0.batch.get() }
    }

    /// Begins with the leader's own requests.
    pub fn begin(&mut self) {
        // SAFETY: only the leader uses it, which this is. No other reference to it lives: `batch` lends it from `self`.
        unsafe { &mut *self.meeting.leads.0.batch.get() }.clear();
        self.take(1 << self.own);
    }

    /// Collects further pending requests while there is room. Returns whether it found any.
    pub fn take_more(&mut self) -> bool {
        let unseen = self.meeting.members.0.load(Ordering::Relaxed) & !self.taken & !self.left;
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
            let head = meeting.slots[number].head.load(Ordering::Acquire);
            if self.state.is_asked(number, head) {
                asking |= 1 << number;
                manys |= u64::from(Head(head).kind() <= MANY_OF_ONE) << number;
                heads[number] = Head(head);
                count += Head(head).count();
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

    /// Adds the request of a slot. With more than [`RANGES`] in all, several requests of one domain are not read, and become the whole domain.
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
        let slot = self.meeting.slots.get(number);
        slot.is_some_and(|slot| self.state.is_asked(number, slot.head.load(Ordering::Relaxed)))
    }

    /// Whether not all pending requests fit.
    pub fn is_full(&self) -> bool {
        self.left != 0
    }

    /// For how many looks, of `most`, it has lately paid to linger; in every `probe`-th round `most`, to find out whether that pays again.
    pub fn looks(&self, most: u64, probe: u64) -> u64 {
        let Leads { rounds, linger, .. } = &self.meeting.leads.0;
        if rounds.get().is_multiple_of(probe) { most } else { linger.get().min(most) }
    }

    /// Records whether `looks` looks of `most` have paid: otherwise the next leaders look less.
    pub fn lingered(&self, looks: u64, most: u64) {
        let Leads { linger, last, before, .. } = &self.meeting.leads.0;
        let expected = last.get() | before.get();
        let most_came = 4 * (expected & self.taken).count_ones() >= 3 * expected.count_ones();
        linger.set(if most_came { most } else { looks / 2 });
    }

    /// From now on requests are in the next round.
    pub fn submits(&mut self) {
        self.state.0 |= BUSY;
        // Release: a caller may find its answer of the last round here.
        self.meeting.word.0.store(self.state.0, Ordering::Release);
    }

    /// Answers all collected callers, and gives the lead up. `has_company` says that others submit at the same time. Returns the number of callers.
    pub fn finish(mut self, result: Result<(), InvalidationError>, has_company: bool) -> u32 {
        let (own, Leads { last, before, rounds, .. }) = (1 << self.own, &self.meeting.leads.0);
        let round = self.taken | own;
        let all_came = self.missing() == 0;
        let recent = round | last.get();
        let is_quiet = recent == own && self.left == 0 && !has_company;
        before.set(last.get());
        last.set(round);
        rounds.set(rounds.get() + 1);
        let next = match in_turn(self.left, self.from).next() {
            Some(first) => first,
            None if all_came => self.own,
            None => ANYBODY,
        };
        self.state.0 = self.state.0 & !QUIET | if is_quiet { QUIET } else { 0 };
        self.state = self.state.with_next(if is_quiet { ANYBODY } else { next });
        self.result = result;
        round.count_ones()
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut failed = self.state.0 >> FAILED & ALL & !self.taken;
        if let Err(error) = self.result {
            failed |= self.taken;
            let slots = self.meeting.slots.iter().enumerate();
            slots
                .filter(|(number, _)| self.taken >> number & 1 != 0)
                .for_each(|(_, slot)| *slot.own.error.lock() = error);
        }
        let rest = self.state.0.wrapping_add(1 << ROUND) & !BUSY & !(ALL << FAILED);
        self.meeting.word.0.store((rest | failed << FAILED) ^ self.taken, Ordering::Release);
        let led = &self.meeting.led.0;
        if self.taken != 0 {
            led.wanted.store(false, Ordering::Relaxed);
        }
        led.led.store(false, Ordering::Release);
    }
}

/// A leader fetches one line of each slot; only the slot's callers access its other line.
#[cfg(not(loom))]
const _: () = assert!(core::mem::offset_of!(Slot, own) == 64 && size_of::<Slot>() == 128 && SLOTS <= 16);
