//! A group of callers of a [`SharedQueue`](super::SharedQueue): CPUs or, one level up, the leaders of groups. At most one of them is the
//! *leader* at any time, which answers each caller that it has collected once. No caller returns before its requests are answered.
//!
//! The leader reads all slots in use, whose lines arrive at the same time ([`prefetch`](crate::sync::prefetch)), as no load depends on
//! another. So a round moves each caller's line to the leader and back. (Callers that polled one line for all answers would get their copies
//! of it one after the other.)
//!
//! A slot is *pending* while the lowest bits of its `head` and its `answer` differ. Its caller flips the bit in `head` to publish requests,
//! and the leader flips the bit in `answer` to answer. A caller that finds neither its answer nor a leader becomes the leader. As callers
//! that try this at once take the line from each other, the group's [word](State) names a preferred next leader; the others leave it the
//! lead for a few polls, in which they do not read the word. Each answer has a copy of the word.
//!
//! Memory ordering.
//! - *Requests*: `head` is stored with `Release` after the slot's other words, and loaded with `Acquire` before them.
//! - *The answer*: `answer` is stored with `Release`, after the error, and loaded with `Acquire`. So an answered caller sees what came
//!   before the answer: the submission, and what all callers in it had stored before they published.
//! - *The leader*: `has_leader` is a lock, taken by an exchange that acquires, and freed by a store that releases. So leaders are in one
//!   order, each after the last one's loads and stores. Only leaders store the word and answers, so a leader knows their values, and needs
//!   no read-modify-write. A new leader checks once more whether the last one has answered it.
//! - *The slot*: `held` is a lock of the same kind. The slot's `answer` changes only as an answer, which the previous holder has seen: so a
//!   relaxed load finds it.
//! - *The word and the hints* order nothing, so they are loaded relaxed.
//! - *No caller starves*: a caller without an answer polls until the group has no leader, and then leads. It collects its own slot first.

use alloc::boxed::Box;
use core::cell::UnsafeCell;

use super::batch::Batch;
use super::slot::Slot;
use super::state::{ANYBODY, NEXT, SLOTS, State};
use crate::heap::{self, OutOfMemory};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// What callers read before they publish. It seldom changes, so each CPU keeps a copy of the line.
#[derive(Debug)]
pub(super) struct Hints {
    /// Slots that were ever used: leaders read no others.
    pub used: AtomicU64,
    /// The last two rounds had one caller, the same, none was left out, and no submission overlapped with the last one. Leaders store it; a
    /// caller without a slot clears it if another submission overlapped with its own.
    pub is_uncontended: AtomicBool,
}

/// What only the leader uses.
#[derive(Debug)]
pub(super) struct LeaderState {
    /// Slots of the last round, and of the one before.
    pub last_round: LocalU64,
    pub round_before: LocalU64,
    pub rounds: LocalU64,
    /// The polls for which lingering has lately paid.
    pub linger: LocalU64,
    pub batch: UnsafeCell<Box<Batch>>,
}

#[derive(Debug)]
pub(super) struct Group {
    pub word: CachePadded<AtomicU64>,
    pub hints: CachePadded<Hints>,
    /// The leader's lock. Not in the word, as a failing exchange takes the line from its readers; nor in [`LeaderState`], as waiting
    /// callers poll it.
    pub has_leader: CachePadded<AtomicBool>,
    pub leader_state: CachePadded<LeaderState>,
    pub slots: Box<[Slot]>,
}

// SAFETY: all but the batch is `Sync`. Only the leader (`Leader`) uses the batch, there is one leader at a time, and each comes after the
// one before (the module's documentation). A batch is `Send`.
unsafe impl Sync for Group {}

impl Group {
    pub fn new() -> Result<Self, OutOfMemory> {
        let batch = heap::boxed_in(|place| Ok::<_, OutOfMemory>(place.write(Batch::default())))?;
        let word = || LocalU64::new(0);
        let leader_state = LeaderState {
            last_round: word(),
            round_before: word(),
            rounds: word(),
            linger: LocalU64::new(u64::MAX),
            batch: UnsafeCell::new(batch),
        };
        // Contended under loom: its few callers would never share a round if the first one submitted without a slot.
        Ok(Self {
            word: CachePadded(AtomicU64::new((ANYBODY as u64) << NEXT)),
            hints: CachePadded(Hints {
                used: AtomicU64::new(0),
                is_uncontended: AtomicBool::new(!cfg!(loom)),
            }),
            has_leader: CachePadded(AtomicBool::new(false)),
            leader_state: CachePadded(leader_state),
            slots: heap::slice(SLOTS, |_| Ok(Slot::new()))?,
        })
    }

    /// Another submission overlapped: callers take slots until the group is uncontended again.
    pub fn mark_contended(&self) {
        self.hints.0.is_uncontended.store(false, Ordering::Relaxed);
    }

    pub fn state(&self) -> State {
        State(self.word.0.load(Ordering::Relaxed))
    }

    pub fn is_uncontended(&self) -> bool {
        self.hints.0.is_uncontended.load(Ordering::Relaxed)
    }

    pub fn has_leader(&self) -> bool {
        self.has_leader.0.load(Ordering::Relaxed)
    }

    #[cfg(all(test, not(loom)))]
    pub fn rounds(&self) -> u64 {
        self.leader_state.0.rounds.get()
    }

    #[cfg(all(test, not(loom)))]
    pub fn pending(&self) -> u32 {
        self.slots.iter().filter(|slot| slot.pending().is_some()).count() as u32
    }

    #[cfg(all(test, not(loom)))]
    pub fn expect(&self, slots: u64) {
        self.leader_state.0.last_round.set(slots);
        self.leader_state.0.round_before.set(slots);
        self.mark_contended();
    }

    #[cfg(all(test, not(loom)))]
    pub fn linger(&self) -> u64 {
        self.leader_state.0.linger.get()
    }
}
