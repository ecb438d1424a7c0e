//! Where callers of a [`SharedQueue`](super::SharedQueue) meet: the CPUs of a group, and one level up the leaders of groups. One of
//! them *leads* at any time, if any does: it takes what the others ask for, and answers each of them once. No caller goes before it
//! was answered.
//!
//! Each caller has a [`Slot`], a cache line of its own, and says there what it asks for. A leader looks at the slots. No load of these needs
//! another one first, so their lines come at the same time ([`prefetch`]). It answers all that it took by one store of one [word](State), which
//! all of them look at. So a round passes each caller's line to the leader, and the word's line to each caller; a slot's line is never
//! written by anybody but its caller.
//!
//! A slot is *asked* while the lowest bit of its `head` is not the slot's bit of the word, one of the lowest ([`ALL`]). Its caller changes that bit to
//! ask, and the leader changes the word's bit to answer. Nobody is told to lead: a caller that looks for its answer and finds that nobody leads, does.
//! The word names who should, as several that try at once take the line from each other; others wait a few looks for that one.
//!
//! Memory ordering.
//! - *What a caller asks for*: `head` is stored with `Release` after the slot's other words, and loaded with `Acquire` before them.
//! - *The answer*: the word is stored with `Release`, after errors, and loaded with `Acquire`. So a caller that was answered sees what came
//!   before the answer: the submission, and what all in it had stored before they asked.
//! - *The lead*: `led` is set by an exchange that acquires, where it was clear, and cleared by a store that releases. So leaders are in
//!   one order, each after the last one's loads and stores. Only the leader changes the word: so it knows it, and stores. A caller that has
//!   got the lead looks once more whether it was answered, by the leader before it.
//! - *The slot*: `held` is set by an exchange that acquires, and cleared by a store that releases. Its bit of the word changes only as an answer,
//!   which the holder before has seen: so a relaxed load of the word finds it.
//! - *No caller is forgotten*: a caller that was not answered looks until nobody leads, and then takes the lead. It takes its own slot before any other.

use alloc::boxed::Box;
use core::cell::UnsafeCell;
use core::slice;

use super::batch::Batch;
use crate::addr::{DomainId, Iova, IovaRange};
use crate::heap::{self, OutOfMemory};
use crate::invalidation::{Invalidation, InvalidationError, Request};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering, pause_among, prefetch};

/// Callers that can wait at a time in one place.
pub(super) const SLOTS: usize = if cfg!(loom) { 2 } else { 16 };

/// Where all together ask for more, a caller's several ranges of one domain become the whole domain, as those of one that
/// [gathers](crate::invalidation::Gather) more do.
const RANGES: usize = if cfg!(loom) { 1 } else { 32 };

/// The word of a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(u64);

/// Bits of all slots, from bit 0 on.
const ALL: u64 = (1 << SLOTS) - 1;
/// Where the bits are that say of the slots answered last whether that was an error.
const FAILED: u32 = 16;
/// The leader submits: who asks now is in the next round.
const BUSY: u64 = 1 << 33;
/// The last two rounds were of one and the same caller, none was left out, and no other group submitted beside them.
const QUIET: u64 = 1 << 34;
/// Where the number is of the slot that should lead next.
const NEXT: u32 = 40;
/// The one that comes first.
const ANYBODY: usize = 0xff;
/// Where the number of leads that were given up is, modulo 2^16: all bits above it.
const ROUND: u32 = 48;

impl State {
    pub fn is_busy(self) -> bool {
        self.0 & BUSY != 0
    }

    pub fn is_quiet(self) -> bool {
        self.0 & QUIET != 0
    }

    /// Whether slot `number`, whose first word is `head`, asks.
    fn is_asked(self, number: usize, head: u64) -> bool {
        (self.0 >> number ^ head) & 1 != 0
    }

    /// Whether no lead was given up between this and `other`, or 2^16 of them.
    pub fn is_same_round(self, other: Self) -> bool {
        self.0 >> ROUND == other.0 >> ROUND
    }

    /// Whether slot `number` may lead at once, as nobody else should.
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

/// Sets `flag` where it is clear. Acquires what the one before had stored when it cleared it. Whether it was clear.
fn take(flag: &AtomicBool) -> bool {
    // Looks first, as an exchange takes the line also where it fails.
    !flag.load(Ordering::Relaxed)
        && flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// The slots of `bits`, from number `from` on, and round to it.
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

/// What one caller asks for.
#[derive(Debug)]
#[repr(C, align(128))]
struct Slot {
    /// See [`Head`].
    head: AtomicU64,
    /// The range's start, and its bytes.
    start: AtomicU64,
    bytes: AtomicU64,
    /// Several requests.
    many: AtomicPtr<Request>,
    /// What only its callers access is on another line.
    own: Own,
}

#[derive(Debug)]
#[repr(align(64))]
struct Own {
    /// A caller has it.
    held: AtomicBool,
    /// Why it failed. A lock without contention: nobody looks before the word says so.
    error: Mutex<InvalidationError>,
}

/// A slot's first word: the bit that changes, what kind of requests, how many, their domain.
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

    /// Several requests, where `head` says so.
    ///
    /// # Safety
    /// 1. The slot asks with this head, and is not answered as long as the reference lives: until then they stay ([`Held::ask`]).
    unsafe fn many<'a>(&self, head: Head) -> Option<&'a [Request]> {
        if head.kind() > MANY_OF_ONE {
            return None;
        }
        // Relaxed: it was stored before the head, which was loaded before this.
        let many = self.many.load(Ordering::Relaxed);
        // SAFETY: the head says that as many are there, and they stay, by clause 1.
        Some(unsafe { slice::from_raw_parts(many, head.count()) })
    }

    /// Asks for `requests`, with the lowest bit as it is to be.
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

/// What a leader remembers for the next, and works with.
#[derive(Debug)]
struct Leads {
    /// Slots that were taken in the last round, and in the one before.
    last: LocalU64,
    before: LocalU64,
    rounds: LocalU64,
    /// For how many looks it paid to linger lately.
    linger: LocalU64,
    batch: UnsafeCell<Box<Batch>>,
}

/// Who leads. Not in the word, as who tries to lead takes the line from all; nor with [`Leads`], as those that wait look at it.
#[derive(Debug)]
struct Led {
    led: AtomicBool,
    /// Somebody waits for an answer: nobody leads alone before a round of callers with slots. Else one that leads alone again and again
    /// might leave it no moment.
    wanted: AtomicBool,
}

/// A place where [`SLOTS`] callers meet.
#[derive(Debug)]
pub(super) struct Meeting {
    word: CachePadded<AtomicU64>,
    /// Slots that were ever used: a leader looks at no others.
    members: CachePadded<AtomicU64>,
    led: CachePadded<Led>,
    leads: CachePadded<Leads>,
    slots: Box<[Slot]>,
}

// SAFETY: all but the batch is `Sync`, and that is the leader's alone (`Lead`), of which there is one; each comes after the one before it
// (the module's documentation). A batch is `Send`.
unsafe impl Sync for Meeting {}

impl Meeting {
    /// Nobody waits, and nobody leads.
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

    /// How it stands. One load.
    pub fn state(&self) -> State {
        State(self.word.0.load(Ordering::Acquire))
    }

    /// How many rounds there were.
    pub fn rounds(&self) -> u64 {
        self.leads.0.rounds.get()
    }

    /// How many callers were in the last one.
    pub fn last(&self) -> u32 {
        self.leads.0.last.get().count_ones()
    }

    /// How many callers ask and were not answered.
    #[cfg(all(test, not(loom)))]
    pub fn asking(&self) -> u32 {
        let state = self.state();
        let asks =
            |(number, slot): &(usize, &Slot)| state.is_asked(*number, slot.head.load(Ordering::Acquire));
        self.slots.iter().enumerate().filter(asks).count() as u32
    }

    /// As after two rounds in which these slots were taken.
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

    /// A slot for a caller: number `first`, or another one where somebody has that. `None` where all are taken.
    pub fn hold(&self, first: usize) -> Option<Held<'_>> {
        (0..SLOTS).map(|more| (first + more) % SLOTS).find_map(|number| {
            let held = &self.slots[number].own.held;
            let is_free = take(held);
            // Not `then_some`: a `Held` that is made and dropped gives somebody else's slot back.
            is_free.then(|| Held { meeting: self, number, answered: None })
        })
    }

    /// Takes the lead, where nobody has it, and returns the state then; but gives it up at once where that is not as it `may` be.
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

    /// Nobody leads alone before a round of callers with slots.
    pub fn want(&self) {
        let wanted = &self.led.0.wanted;
        if !wanted.load(Ordering::Relaxed) {
            wanted.store(true, Ordering::Relaxed);
        }
    }

    /// Takes the lead without a slot, where the last rounds were of one caller, and nobody [wants](Self::want) it. It answers nobody, and
    /// counts as the caller of slot `number`.
    pub fn lead_alone(&self, number: usize) -> Option<Lead<'_>> {
        // Relaxed: it says nothing about memory.
        let may = |state: State| state.is_quiet() && !self.led.0.wanted.load(Ordering::Relaxed);
        if !may(self.state()) {
            return None;
        }
        // Others may have led meanwhile, and may have named the next.
        let state = self.take_lead(may)?;
        let mut lead = Lead::new(self, state, number, 0);
        lead.submits();
        Some(lead)
    }
}

/// A slot that a caller has. Dropping it waits until it was answered, and answers it where nobody leads.
pub(super) struct Held<'a> {
    meeting: &'a Meeting,
    pub number: usize,
    /// What its bit will be when it was answered, once it asks.
    answered: Option<u64>,
}

impl<'a> Held<'a> {
    /// Asks for `requests`, and calls `f`, which waits for the answer. When this returns, or unwinds, it was answered.
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

    /// The answer, if it is there, where the meeting stands so.
    pub fn answer(&self, state: State) -> Option<Result<(), InvalidationError>> {
        if self.answered.is_some_and(|answered| state.0 >> self.number & 1 != answered) {
            return None;
        }
        let failed = state.0 >> FAILED >> self.number & 1 != 0;
        let error = || *self.meeting.slots[self.number].own.error.lock();
        Some(if failed { Err(error()) } else { Ok(()) })
    }

    /// The lead, where nobody has it and it was not answered.
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
            // It unwinds, and takes itself out.
            if self.lead().is_none() {
                pause_among(looks);
                looks = looks.saturating_add(1);
            }
        }
        self.meeting.slots[self.number].own.held.store(false, Ordering::Release);
    }
}

/// The lead of a meeting. Dropping it answers all that it took, and gives it up.
pub(super) struct Lead<'a> {
    meeting: &'a Meeting,
    state: State,
    own: usize,
    /// Slots whose requests are in the batch, the leader's own among them unless it leads alone: then the slot may be another's.
    taken: u64,
    /// Slots that ask, and for which there was no room.
    left: u64,
    /// Which slot comes behind its own: the one that should lead, else the next. So all have their turn where there is no room for all, unless callers that
    /// should lead have no core.
    from: usize,
    result: Result<(), InvalidationError>,
}

impl<'a> Lead<'a> {
    fn new(meeting: &'a Meeting, state: State, own: usize, taken: u64) -> Self {
        let from = state.next().unwrap_or(own + 1) % SLOTS;
        Self { meeting, state, own, taken, left: 0, from, result: Err(InvalidationError::Abandoned) }
    }

    /// The leader's batch.
    pub fn batch(&self) -> &Batch {
        // SAFETY: the leader's alone, which this is, and it changes it by `&mut self` only (`begin`, `add`).
        unsafe { &*self.meeting.leads.0.batch.get() }
    }

    /// Begins with the leader's own requests.
    pub fn begin(&mut self) {
        // SAFETY: the leader's alone, which this is. No other reference to it lives: `batch` lends it from `self`.
        unsafe { &mut *self.meeting.leads.0.batch.get() }.clear();
        self.take(1 << self.own);
    }

    /// Takes those that ask, as long as there is room. Whether anybody was taken.
    pub fn take_more(&mut self) -> bool {
        let unseen = self.meeting.members.0.load(Ordering::Relaxed) & !self.taken & !self.left;
        unseen != 0 && self.take(unseen)
    }

    /// Takes those of `slots` that ask.
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

    /// Adds what a slot asks for. Where more is asked for than [`RANGES`], several requests of one domain need not be read: it is asked for as
    /// a whole.
    fn add(&mut self, number: usize, head: Head, is_full: bool) -> bool {
        let slot = &self.meeting.slots[number];
        let domain = head.domain();
        let one = |invalidation| [Request { domain, invalidation }];
        // SAFETY: as in `begin`.
        let batch = unsafe { &mut *self.meeting.leads.0.batch.get() };
        // SAFETY: 1. The head was loaded since the slot asked, and only the leader answers, which this is, in `drop`.
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

    /// Those that were there in the last two rounds, and have not come yet.
    pub fn missing(&self) -> u64 {
        let Leads { last, before, .. } = &self.meeting.leads.0;
        (last.get() | before.get()) & !self.taken & !self.left
    }

    /// Whether the first of [these](Self::missing) asks now. Looks at its line alone, as each look takes a line from its caller.
    pub fn has_come(&self) -> bool {
        let number = self.missing().trailing_zeros() as usize;
        let slot = self.meeting.slots.get(number);
        slot.is_some_and(|slot| self.state.is_asked(number, slot.head.load(Ordering::Relaxed)))
    }

    /// Whether there is no room for all that ask.
    pub fn is_full(&self) -> bool {
        self.left != 0
    }

    /// How many looks it paid to linger lately, of `most`; every so many rounds all of them, to find out whether that pays again.
    pub fn looks(&self, most: u64, probe: u64) -> u64 {
        let Leads { rounds, linger, .. } = &self.meeting.leads.0;
        if rounds.get().is_multiple_of(probe) { most } else { linger.get().min(most) }
    }

    /// Whether it has paid to look `looks` times of `most`: else the next ones look less.
    pub fn lingered(&self, looks: u64, most: u64) {
        let Leads { linger, last, before, .. } = &self.meeting.leads.0;
        let expected = last.get() | before.get();
        let most_came = 4 * (expected & self.taken).count_ones() >= 3 * expected.count_ones();
        linger.set(if most_came { most } else { looks / 2 });
    }

    /// From now on who asks is in the next round.
    pub fn submits(&mut self) {
        self.state.0 |= BUSY;
        // Release: a caller may find its answer of the last round here.
        self.meeting.word.0.store(self.state.0, Ordering::Release);
    }

    /// Answers all that were taken and gives the lead up. `has_company` says that others submit beside these. Returns how many were taken.
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

/// A leader fetches one line of each caller, which callers use alone but for that.
#[cfg(not(loom))]
const _: () = assert!(core::mem::offset_of!(Slot, own) == 64 && size_of::<Slot>() == 128 && SLOTS <= 16);
