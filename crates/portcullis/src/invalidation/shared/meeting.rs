//! The meeting place of a [`SharedQueue`](super::SharedQueue)'s callers: the CPUs of a group, or one level up the leaders of groups. At most one of
//! them *leads* at any time: it collects the others' requests, and answers each of them once. No caller returns before it was answered.
//!
//! Each caller has a [`Slot`], a cache line of its own, in which it publishes its requests. The leader looks at the slots. No load of these
//! depends on another, so their lines come at the same time ([`prefetch`]). The leader answers each caller on the caller's own line, which the
//! caller polls. So a round passes each caller's line to the leader and back, and no two callers wait for one line: with one line for all answers,
//! callers would get their copies of it one after the other.
//!
//! A slot is *asked* (it has a pending request) while the lowest bits of its `head` and its `answer` differ. Its caller flips the bit in `head`
//! to ask, and the leader flips the bit in `answer` to answer. A caller that finds neither its answer nor a leader takes the lead. The meeting's
//! [word](State) names a preferred leader, as several that try at once take the line from each other; others leave it the lead for a few looks,
//! in which they do not look at the word. Each answer has a copy of the word.
//!
//! Memory ordering.
//! - *Requests*: `head` is stored with `Release` after the slot's other words, and loaded with `Acquire` before them.
//! - *The answer*: `answer` is stored with `Release`, after the error, and loaded with `Acquire`. So an answered caller sees what came before
//!   the answer: the submission, and what all callers in it had stored before they asked.
//! - *The lead*: `led` is set by an exchange that acquires, where it was clear, and cleared by a store that releases. So leaders are in one
//!   order, each after the last one's loads and stores. Only the leader changes the word, answers and whether it is quiet: so it knows the
//!   values, and stores. A caller that has got the lead looks once more whether the leader before has answered it.
//! - *The slot*: `held` is set by an exchange that acquires, and cleared by a store that releases. Its `answer` changes only as an answer,
//!   which the previous holder has seen: so a relaxed load finds it.
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

/// Of an answer, which is a copy of the word besides: the bit that flips, and whether it is an error. 0 in the word.
const FLIP: u64 = 1;
const FAILED: u64 = 2;
/// The last round had several callers.
const COMPANY: u64 = 1 << 34;
/// Where the number of the preferred next leader is.
const NEXT: u32 = 40;
const ANYBODY: usize = 0xff;
/// Where the number of ended leads is, modulo 2^16: all bits above it.
const ROUND: u32 = 48;

impl State {
    pub fn had_company(self) -> bool {
        self.0 & COMPANY != 0
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
    /// The last answer. Only leaders store it.
    answer: AtomicU64,
    /// On another line, as only its callers access it.
    own: Own,
}

#[derive(Debug)]
#[repr(align(64))]
struct Own {
    held: AtomicBool,
    /// The error of its request. The lock has no contention: nobody looks before the answer says so.
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
        let answer = AtomicU64::new((ANYBODY as u64) << NEXT);
        Self { head: word(), start: word(), bytes: word(), many, answer, own }
    }

    /// Its pending request, for the leader.
    fn asked(&self) -> Option<Head> {
        let head = self.head.load(Ordering::Acquire);
        // Relaxed: leaders alone store it, and each comes after the one before.
        let is_asked = (head ^ self.answer.load(Ordering::Relaxed)) & FLIP != 0;
        is_asked.then_some(Head(head))
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

/// What callers look at before they ask. It seldom changes, so that each CPU has a copy.
#[derive(Debug)]
struct Known {
    /// Slots that were ever used: a leader looks at no others.
    members: AtomicU64,
    /// The last two rounds had one and the same caller, none was left out, and no other group submitted beside them. Only leaders store it.
    is_quiet: AtomicBool,
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

#[derive(Debug)]
pub(super) struct Meeting {
    word: CachePadded<AtomicU64>,
    known: CachePadded<Known>,
    /// Not in the word, as callers that try to lead take its line from all; nor in [`Leads`], as waiting callers look at it.
    led: CachePadded<AtomicBool>,
    /// Odd while a submission is under way, as far as its callers know of each other: see [`submits`](Self::submits).
    submissions: CachePadded<AtomicU64>,
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
            word: CachePadded(AtomicU64::new((ANYBODY as u64) << NEXT)),
            known: CachePadded(Known { members: AtomicU64::new(0), is_quiet: AtomicBool::new(true) }),
            led: CachePadded(AtomicBool::new(false)),
            submissions: CachePadded(AtomicU64::new(0)),
            leads: CachePadded(leads),
            slots: heap::slice(SLOTS, |_| Ok(Slot::new()))?,
        })
    }

    pub fn state(&self) -> State {
        State(self.word.0.load(Ordering::Acquire))
    }

    /// Whether the last two rounds had one and the same caller.
    pub fn is_quiet(&self) -> bool {
        self.known.0.is_quiet.load(Ordering::Relaxed)
    }

    /// Ended submissions. Two at the same time may count as one.
    pub fn submissions(&self) -> u64 {
        self.submissions.0.load(Ordering::Relaxed) / 2
    }

    /// Fetches in the background what [`under_way`](Self::under_way) looks at.
    pub fn fetch_under_way(&self) {
        prefetch(&raw const self.submissions.0);
    }

    /// The submission that is under way, a number that no later one has.
    pub fn under_way(&self) -> Option<u64> {
        Some(self.submissions.0.load(Ordering::Relaxed)).filter(|number| number & 1 != 0)
    }

    /// Others see a submission under way until the guard is dropped. This is a hint, and orders nothing: submissions may always go beside each
    /// other. So plain stores do, although of two that come at the same time one hides the other.
    pub fn submits(&self) -> Submits<'_> {
        let number = self.submissions.0.load(Ordering::Relaxed) | 1;
        self.submissions.0.store(number, Ordering::Relaxed);
        Submits { meeting: self, number }
    }

    /// The same for a caller without a slot, where the last rounds had one caller, and no submission is under way.
    pub fn submits_alone(&self) -> Option<Submits<'_>> {
        (self.is_quiet() && self.under_way().is_none()).then(|| self.submits())
    }

    /// Whether somebody leads.
    pub fn is_led(&self) -> bool {
        self.led.0.load(Ordering::Relaxed)
    }

    #[cfg(all(test, not(loom)))]
    pub fn asking(&self) -> u32 {
        self.slots.iter().filter(|slot| slot.asked().is_some()).count() as u32
    }

    #[cfg(all(test, not(loom)))]
    pub fn expect(&self, slots: u64) {
        self.leads.0.last.set(slots);
        self.leads.0.before.set(slots);
        self.known.0.is_quiet.store(false, Ordering::Relaxed);
    }

    #[cfg(all(test, not(loom)))]
    pub fn linger(&self) -> u64 {
        self.leads.0.linger.get()
    }

    /// A slot for a caller: number `first`, or another one where that is held. `None` where all are held.
    pub fn hold(&self, first: usize) -> Option<Held<'_>> {
        (0..SLOTS).map(|more| (first + more) % SLOTS).find_map(|number| {
            let held = &self.slots[number].own.held;
            let is_free = take(held);
            // Not `then_some`: it would make a `Held` and drop it, and free somebody else's slot.
            is_free.then(|| Held { meeting: self, number, asked: None })
        })
    }
}

/// A submission under way.
pub(super) struct Submits<'a> {
    meeting: &'a Meeting,
    number: u64,
}

impl Drop for Submits<'_> {
    fn drop(&mut self) {
        let submissions = &self.meeting.submissions.0;
        // Another one may have begun or ended meanwhile: then its number stays. The word's last store is an end: a caller that was the last to
        // store a beginning finds it here.
        if submissions.load(Ordering::Relaxed) == self.number {
            submissions.store(self.number + 1, Ordering::Relaxed);
        }
    }
}

/// A caller's slot. Dropping it waits for the answer, and takes the lead where nobody has it.
pub(super) struct Held<'a> {
    meeting: &'a Meeting,
    pub number: usize,
    /// The answer before, once it has asked.
    asked: Option<u64>,
}

impl<'a> Held<'a> {
    /// Publishes `requests`, and calls `f`, which waits for the answer. When this returns, or unwinds, the requests were answered.
    pub fn ask<R>(mut self, requests: &[Request], f: impl FnOnce(&Self) -> R) -> R {
        let (members, bit) = (&self.meeting.known.0.members, 1 << self.number);
        // Relaxed: a leader that does not see it misses the slot, and its caller leads later.
        if members.load(Ordering::Relaxed) & bit == 0 {
            members.fetch_or(bit, Ordering::Relaxed);
        }
        let slot = &self.meeting.slots[self.number];
        // Relaxed: see the module's documentation.
        let before = slot.answer.load(Ordering::Relaxed);
        // A leader may use them until it has answered, which `drop` waits for.
        slot.ask(requests, before & FLIP ^ FLIP);
        self.asked = Some(before);
        f(&self)
    }

    /// The meeting's word at the end of the round that last answered this slot.
    pub fn last(&self) -> State {
        State(self.meeting.slots[self.number].answer.load(Ordering::Relaxed) & !(FLIP | FAILED))
    }

    /// The answer, if there is one.
    pub fn answer(&self) -> Option<Result<(), InvalidationError>> {
        let Some(before) = self.asked else { return Some(Ok(())) };
        let slot = &self.meeting.slots[self.number];
        let answer = slot.answer.load(Ordering::Acquire);
        if (answer ^ before) & FLIP == 0 {
            return None;
        }
        Some(if answer & FAILED != 0 { Err(*slot.own.error.lock()) } else { Ok(()) })
    }

    /// Takes the lead, where nobody has it and this slot was not answered.
    pub fn lead(&self) -> Option<Lead<'a>> {
        let meeting = self.meeting;
        if !take(&meeting.led.0) {
            return None;
        }
        if self.answer().is_some() {
            meeting.led.0.store(false, Ordering::Release);
            return None;
        }
        // Relaxed: the exchange has acquired what the last leader stored, and nobody else stores.
        let state = State(meeting.word.0.load(Ordering::Relaxed));
        let from = state.next().unwrap_or(self.number + 1) % SLOTS;
        let (own, result) = (self.number, Err(InvalidationError::Abandoned));
        Some(Lead { meeting, state, own, taken: 1 << own, left: 0, from, result })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut looks = 0;
        while self.answer().is_none() {
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
    /// Slots whose requests are in the batch, the leader's own among them.
    taken: u64,
    left: u64,
    /// The slot that is collected after the leader's own: the preferred one, else the next. So all are served in turn where not all fit, unless
    /// preferred callers have no core.
    from: usize,
    result: Result<(), InvalidationError>,
}

impl Lead<'_> {
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
        self.meeting.slots.get(number).is_some_and(|slot| slot.asked().is_some())
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

    /// Answers all collected callers, and gives the lead up. `has_company` says that others submit at the same time. Returns the number of callers.
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
        meeting.word.0.store(state, Ordering::Release);
        meeting.led.0.store(false, Ordering::Release);
    }
}

/// A leader fetches one line of each slot; only the slot's callers access its other line.
#[cfg(not(loom))]
const _: () = assert!(core::mem::offset_of!(Slot, own) == 64 && size_of::<Slot>() == 128 && SLOTS <= 16);
