//! The meeting place of a [`SharedQueue`](super::SharedQueue)'s callers: the CPUs of a group, or one level up the leaders of groups. At
//! most one of them *leads* at any time: it collects the others' requests, and answers each of them once. No caller returns before it was
//! answered.
//!
//! Each caller has a [`Slot`], a cache line of its own, in which it publishes its requests. The leader looks at the slots. No load of these
//! depends on another, so their lines come at the same time ([`prefetch`](crate::sync::prefetch)). The leader answers each caller on the
//! caller's own line, which the caller polls. So a round passes each caller's line to the leader and back, and no two callers wait for one
//! line: with one line for all answers, callers would get their copies of it one after the other.
//!
//! A slot is *asked* (it has a pending request) while the lowest bits of its `head` and its `answer` differ. Its caller flips the bit in
//! `head` to ask, and the leader flips the bit in `answer` to answer. A caller that finds neither its answer nor a leader takes the lead.
//! The meeting's [word](State) names a preferred leader, as several that try at once take the line from each other; others leave it the
//! lead for a few looks, in which they do not look at the word. Each answer has a copy of the word.
//!
//! Memory ordering.
//! - *Requests*: `head` is stored with `Release` after the slot's other words, and loaded with `Acquire` before them.
//! - *The answer*: `answer` is stored with `Release`, after the error, and loaded with `Acquire`. So an answered caller sees what came
//!   before the answer: the submission, and what all callers in it had stored before they asked.
//! - *The lead*: `led` is set by an exchange that acquires, if it was clear, and cleared by a store that releases. So leaders are in one
//!   order, each after the last one's loads and stores. Only the leader changes the word and answers: so it knows the values, and stores. A
//!   caller that has got the lead looks once more whether the leader before has answered it.
//! - *The slot*: `held` is set by an exchange that acquires, and cleared by a store that releases. Its `answer` changes only as an answer,
//!   which the previous holder has seen: so a relaxed load finds it.
//! - *The word, and whether it is quiet*: hints for callers, so relaxed loads will do.
//! - *No caller starves*: a caller without an answer looks until nobody leads, and then takes the lead. It serves its own slot before any
//!   other.

use alloc::boxed::Box;
use core::cell::UnsafeCell;

use super::batch::Batch;
use super::slot::Slot;
use super::state::{ANYBODY, NEXT, SLOTS, State};
use crate::heap::{self, OutOfMemory};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// What callers look at before they ask. It seldom changes, so that each CPU has a copy.
#[derive(Debug)]
pub(super) struct Known {
    /// Slots that were ever used: a leader looks at no others.
    pub members: AtomicU64,
    /// The last two rounds had one and the same caller, none was left out, and the leader of the last one met no other submission. Leaders
    /// store it; so does a caller without a slot after it has seen another submission.
    pub is_quiet: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Leads {
    /// Slots of the last round, and of the one before.
    pub last: LocalU64,
    pub before: LocalU64,
    pub rounds: LocalU64,
    /// The looks for which it has lately paid to linger.
    pub linger: LocalU64,
    pub batch: UnsafeCell<Box<Batch>>,
}

#[derive(Debug)]
pub(super) struct Meeting {
    pub word: CachePadded<AtomicU64>,
    pub known: CachePadded<Known>,
    /// Not in the word, as callers that try to lead take its line from all; nor in [`Leads`], as waiting callers look at it.
    pub led: CachePadded<AtomicBool>,
    pub leads: CachePadded<Leads>,
    pub slots: Box<[Slot]>,
}

// SAFETY: all but the batch is `Sync`. Only the leader (`Lead`) uses the batch, there is one leader at a time, and each comes after the one
// before (the module's documentation). A batch is `Send`.
unsafe impl Sync for Meeting {}

impl Meeting {
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
        // The model checker's few callers would never meet if the first one submitted without a slot.
        Ok(Self {
            word: CachePadded(AtomicU64::new((ANYBODY as u64) << NEXT)),
            known: CachePadded(Known { members: AtomicU64::new(0), is_quiet: AtomicBool::new(!cfg!(loom)) }),
            led: CachePadded(AtomicBool::new(false)),
            leads: CachePadded(leads),
            slots: heap::slice(SLOTS, |_| Ok(Slot::new()))?,
        })
    }

    /// Somebody has met another submission: no caller submits without a slot for some rounds.
    pub fn expects_company(&self) {
        self.known.0.is_quiet.store(false, Ordering::Relaxed);
    }

    pub fn state(&self) -> State {
        State(self.word.0.load(Ordering::Relaxed))
    }

    pub fn is_quiet(&self) -> bool {
        self.known.0.is_quiet.load(Ordering::Relaxed)
    }

    pub fn is_led(&self) -> bool {
        self.led.0.load(Ordering::Relaxed)
    }

    #[cfg(all(test, not(loom)))]
    pub fn rounds(&self) -> u64 {
        self.leads.0.rounds.get()
    }

    #[cfg(all(test, not(loom)))]
    pub fn asking(&self) -> u32 {
        self.slots.iter().filter(|slot| slot.asked().is_some()).count() as u32
    }

    #[cfg(all(test, not(loom)))]
    pub fn expect(&self, slots: u64) {
        self.leads.0.last.set(slots);
        self.leads.0.before.set(slots);
        self.expects_company();
    }

    #[cfg(all(test, not(loom)))]
    pub fn linger(&self) -> u64 {
        self.leads.0.linger.get()
    }
}
