//! Where callers of a [`SharedQueue`](super::SharedQueue) meet. One of them *leads* at any time, if any waits: it takes what
//! the others ask for, and answers each of them exactly once. No caller goes before it was answered.
//!
//! A caller stages itself by one exchange of one word, whatever the others do, and then looks at its own cache line only. A leader
//! fetches that line to see what is asked for, and once more to answer.
//!
//! The word is the newest of the callers that are staged, each of which knows the one before it (Treiber, 1986, but for the exchange, which cannot
//! fail, as callers of Mellor-Crummey's and Scott's lock have it, 1991). Its lowest bit says whether a caller leads. So who
//! stages itself where nobody leads is the leader. Who has led hands the lead to a caller that is staged, which stays
//! staged, or clears the bit.
//!
//! A caller is not linked for the moment between its exchange and its store of the one before it. The leader waits for that.
//!
//! Memory ordering.
//! - *What a caller asks for*: it stages itself with `Release`, and the leader takes with `Acquire`. Only exchanges change the word,
//!   so each continues the release sequences of those before it: the leader sees all callers that it takes, not only the newest. `next` needs
//!   no order of its own: it leads to a caller that was staged earlier, and the leader overwrites only the one that it has seen to be null.
//! - *The answer*: it is stored with `Release`, after an error, and loaded with `Acquire`. So a caller that was answered sees
//!   what came before the answer, the submission and what all in it had stored before they staged themselves.
//! - *The lead*: it is handed over by a caller's state, `Release` to `Acquire`, or by the word: the exchange that clears the
//!   bit releases, and those that set it acquire. So leaders are in one order, each after the last one's stores.
//! - *No caller is forgotten*: a caller that stages itself finds the bit set or becomes the leader. Where it finds it set, its exchange is before the one by
//!   which the leader would clear the bit, if there is one. That fails then, as the word has changed, and the leader hands the lead over.

use core::ptr;
use core::slice;

use crate::invalidation::{InvalidationError, Request};
use crate::sync::{AtomicPtr, AtomicUsize, Mutex, Ordering, pause, spin};

/// The callers that are staged, and whether a caller leads.
#[derive(Debug)]
pub(super) struct Staged(AtomicPtr<Caller<'static>>);

/// In the word of a [`Staged`]: a caller leads. In `next` of a caller: it is not linked yet.
const FLAG: usize = 1;

/// A caller, on its own stack. The first cache line has all but errors, so a leader mostly fetches no more than that.
#[derive(Debug)]
#[repr(C, align(128))]
struct Caller<'a> {
    /// The caller that was staged before it, and is still, or null.
    next: AtomicPtr<Caller<'static>>,
    state: AtomicUsize,
    asked: Asked<'a>,
    /// Why it [`FAILED`]. A lock without contention: nobody looks before the state says so.
    error: Mutex<InvalidationError>,
}

const WAITS: usize = 0;
/// It waits, and the lead was handed to it.
const LEADS: usize = 1;
const DONE: usize = 2;
const FAILED: usize = 3;

/// One request, as it mostly is, or several, on lines of their own.
#[derive(Debug)]
enum Asked<'a> {
    One(Request),
    Many(&'a [Request]),
}

fn flagged(caller: *mut Caller<'static>) -> *mut Caller<'static> {
    caller.map_addr(|address| address | FLAG)
}

fn plain(caller: *mut Caller<'static>) -> *mut Caller<'static> {
    caller.map_addr(|address| address & !FLAG)
}

fn has_flag(caller: *mut Caller<'static>) -> bool {
    caller.addr() & FLAG != 0
}

impl<'a> Caller<'a> {
    fn new(requests: &'a [Request]) -> Self {
        let asked = match requests {
            [one] => Asked::One(*one),
            _ => Asked::Many(requests),
        };
        Self {
            next: AtomicPtr::new(flagged(ptr::null_mut())),
            state: AtomicUsize::new(WAITS),
            asked,
            error: Mutex::new(InvalidationError::Abandoned),
        }
    }

    fn requests(&self) -> &[Request] {
        match &self.asked {
            Asked::One(one) => slice::from_ref(one),
            Asked::Many(many) => many,
        }
    }

    /// The caller that was staged before it. Waits until it is linked.
    fn next(&self) -> *mut Caller<'static> {
        let mut looks = 0_u32;
        loop {
            let next = self.next.load(Ordering::Relaxed);
            if !has_flag(next) {
                return next;
            }
            // It stores in a moment, unless the scheduler has just taken its core.
            if looks < 64 {
                spin()
            } else {
                pause()
            }
            looks = looks.saturating_add(1);
        }
    }

    fn answer(&self) -> Option<Result<(), InvalidationError>> {
        match self.state.load(Ordering::Acquire) {
            DONE => Some(Ok(())),
            FAILED => Some(Err(*self.error.lock())),
            _ => None,
        }
    }
}

impl Staged {
    /// Nobody waits, and nobody leads.
    pub fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Stages a caller that asks for `requests`, and calls `f` with it and with the lead, where nobody has that. Comes back, or
    /// unwinds, when the caller was answered: waits for that where `f` did not.
    pub fn with<R>(
        &self,
        requests: &[Request],
        f: impl for<'a> FnOnce(Waiting<'a>, Option<Lead<'a>>) -> R,
    ) -> R {
        let caller = Caller::new(requests);
        let _stays = Stays(&caller);
        // A leader may use it as if it stayed for ever: it stays until it was answered, by `Stays`.
        let this = ptr::from_ref(&caller).cast_mut().cast();
        let before = self.0.swap(flagged(this), Ordering::AcqRel);
        caller.next.store(plain(before), Ordering::Relaxed);
        let lead = if has_flag(before) { None } else { Some(self.lead()) };
        f(Waiting { staged: self, caller: &caller }, lead)
    }

    /// The newest caller that is staged, or null.
    #[cfg(all(test, not(loom)))]
    pub fn newest(&self) -> *const () {
        plain(self.0.load(Ordering::Relaxed)).cast_const().cast()
    }

    /// The lead. The caller of this has just got it: there is no other, and dropping it gives it up.
    fn lead(&self) -> Lead<'_> {
        Lead { staged: self, stays_open: false }
    }
}

/// Keeps a caller where it is until it was answered.
struct Stays<'a, 'b>(&'a Caller<'b>);

impl Drop for Stays<'_, '_> {
    fn drop(&mut self) {
        while self.0.answer().is_none() {
            pause();
        }
    }
}

/// A caller that is staged, or taken, or answered.
pub(super) struct Waiting<'a> {
    staged: &'a Staged,
    caller: &'a Caller<'a>,
}

/// What became of a caller.
pub(super) enum Told<'a> {
    Nothing,
    /// It leads, and is still staged.
    Leads(Lead<'a>),
    Answer(Result<(), InvalidationError>),
}

impl<'a> Waiting<'a> {
    /// What it was told. One load of its own cache line.
    pub fn look(&self) -> Told<'a> {
        match self.caller.state.load(Ordering::Acquire) {
            WAITS => Told::Nothing,
            LEADS => {
                // Nobody else stores there before the caller was taken.
                self.caller.state.store(WAITS, Ordering::Relaxed);
                Told::Leads(self.staged.lead())
            }
            _ => self.caller.answer().map_or(Told::Nothing, Told::Answer),
        }
    }

    /// The lead, where nobody has it and this caller is staged. One that was taken waits for its answer, and must not
    /// lead others meanwhile: should their submission panic, it would unwind in place of hearing what became of its own.
    pub fn claim(&self) -> Option<Lead<'a>> {
        let staged = &self.staged.0;
        let now = staged.load(Ordering::Relaxed);
        if now.is_null() || has_flag(now) {
            return None;
        }
        // Where that caller was answered meanwhile and another is staged at the same place, that is as good.
        staged.compare_exchange(now, flagged(now), Ordering::Acquire, Ordering::Relaxed).ok()?;
        let mut lead = self.staged.lead();
        let mut caller = now.cast_const();
        // SAFETY: null, or staged, and only who leads takes callers. So it was not answered, and stays.
        while let Some(other) = unsafe { caller.as_ref() } {
            if ptr::addr_eq(other, self.caller) {
                return Some(lead);
            }
            caller = other.next();
        }
        // Somebody else claims it.
        lead.stays_open = true;
        None
    }
}

/// The lead: there is one for a [`Staged`], at the most. Dropping it hands it over, or gives it up.
pub(super) struct Lead<'a> {
    staged: &'a Staged,
    /// Whether it goes to the caller that claims it first, and not to the newest.
    pub stays_open: bool,
}

impl Lead<'_> {
    /// Whether callers are staged. One load.
    pub fn has_staged(&self) -> bool {
        self.staged.0.load(Ordering::Relaxed) != flagged(ptr::null_mut())
    }

    /// Takes all callers that are staged, and adds them to `taken`. Not where callers there have not been seen yet.
    pub fn take(&mut self, taken: &mut Taken) {
        if !taken.unseen.is_null() {
            return;
        }
        let newest = plain(self.staged.0.swap(flagged(ptr::null_mut()), Ordering::Acquire));
        if taken.first.is_null() {
            taken.first = newest;
        } else {
            // SAFETY: it was taken, and not answered, as `first` is not null and all up to `last` are answered in order. So
            // it stays (`Staged::with`).
            unsafe { &*taken.last }.next.store(newest, Ordering::Relaxed);
        }
        taken.unseen = newest;
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        // As it is where all were taken.
        let mut now = flagged(ptr::null_mut());
        loop {
            let newest = plain(now);
            if !newest.is_null() && !self.stays_open {
                // SAFETY: it is staged, and only who leads takes callers, which is this one until the store. So it was not answered, and stays.
                // Acquire below: it is there as it was staged.
                unsafe { &(*newest).state }.store(LEADS, Ordering::Release);
                return;
            }
            match self.staged.0.compare_exchange(now, newest, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }
}

/// Callers that a leader has taken and not answered. Nobody else has them, and each stays where it is until it is
/// answered. Dropping this answers those that are left: their batch was abandoned.
#[derive(Debug)]
pub(super) struct Taken {
    first: *mut Caller<'static>,
    /// The first that was not seen, or null.
    unseen: *mut Caller<'static>,
    /// The last that was seen; of no meaning where none was.
    last: *mut Caller<'static>,
}

impl Taken {
    pub fn nobody() -> Self {
        Self { first: ptr::null_mut(), unseen: ptr::null_mut(), last: ptr::null_mut() }
    }

    /// What the first caller asks for that was not seen yet. `None` where all have been.
    pub fn unseen(&self) -> Option<&[Request]> {
        // SAFETY: null, or taken and not answered, so it stays at least until the next `answer`, which needs `self`.
        unsafe { self.unseen.as_ref() }.map(Caller::requests)
    }

    /// The first caller that was not seen now is.
    pub fn see(&mut self) {
        // SAFETY: as in `unseen`.
        if let Some(caller) = unsafe { self.unseen.as_ref() } {
            self.last = self.unseen;
            self.unseen = caller.next();
        }
    }

    /// Answers all that were seen.
    pub fn answer(&mut self, result: Result<(), InvalidationError>) {
        while self.first != self.unseen {
            let caller = self.first;
            // SAFETY: it was taken and not answered, so it stays.
            self.first = unsafe { &*caller }.next();
            let state = match result {
                Ok(()) => DONE,
                Err(error) => {
                    // SAFETY: as above.
                    *unsafe { &(*caller).error }.lock() = error;
                    FAILED
                }
            };
            // SAFETY: as above. The caller may be gone as soon as the word has changed; so there is a reference to this word alone, which is an
            // atomic, and none to the caller as a whole.
            unsafe { &(*caller).state }.store(state, Ordering::Release);
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.unseen = ptr::null_mut();
        self.answer(Err(InvalidationError::Abandoned));
    }
}

/// A leader fetches one line of each caller.
#[cfg(not(loom))]
const _: () = assert!(core::mem::offset_of!(Caller<'static>, error) <= 64);
