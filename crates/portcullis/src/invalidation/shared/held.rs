//! A caller that holds a slot. It publishes its requests in the slot and waits for the answer. If the meeting has no leader, it becomes the
//! leader.

use super::lead::Lead;
use super::meeting::Meeting;
use super::state::{FAILED, FLIP, SLOTS, State};
use crate::invalidation::{InvalidationError, Request};
use crate::sync::{AtomicBool, Ordering, pause_among};

/// Sets `flag` if it is clear, and acquires what its last holder stored. Returns whether it was clear.
fn take(flag: &AtomicBool) -> bool {
    // Looks first: a failing exchange takes the line, too.
    !flag.load(Ordering::Relaxed)
        && flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// A caller's slot. Dropping it waits for the answer, and takes the lead if nobody has it.
pub(super) struct Held<'a> {
    meeting: &'a Meeting,
    pub number: usize,
    /// The slot's `answer` at the time of asking; `None` before.
    asked: Option<u64>,
}

impl<'a> Held<'a> {
    /// A slot for a caller of `meeting`: number `first`, or another one if that is held. `None` if all are held.
    pub fn new(meeting: &'a Meeting, first: usize) -> Option<Self> {
        (0..SLOTS).map(|more| (first + more) % SLOTS).find_map(|number| {
            let held = &meeting.slots[number].own.held;
            let is_free = take(held);
            // Not `then_some`: it would make a `Held` and drop it, and free somebody else's slot.
            is_free.then(|| Self { meeting, number, asked: None })
        })
    }

    /// Publishes `requests`, and calls `f`, which waits for the answer. When this returns, or unwinds, the requests were answered.
    pub fn ask<R>(mut self, requests: &[Request], f: impl FnOnce(&Self) -> R) -> R {
        let (members, bit) = (&self.meeting.known.0.members, 1 << self.number);
        // Relaxed: a leader that does not see it misses the slot, and its caller leads later.
        if members.load(Ordering::Relaxed) & bit == 0 {
            members.fetch_or(bit, Ordering::Relaxed);
        }
        let slot = &self.meeting.slots[self.number];
        // Relaxed: `meeting.rs` says why.
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

    pub fn answer(&self) -> Option<Result<(), InvalidationError>> {
        let Some(before) = self.asked else { return Some(Ok(())) };
        let slot = &self.meeting.slots[self.number];
        let answer = slot.answer.load(Ordering::Acquire);
        if (answer ^ before) & FLIP == 0 {
            return None;
        }
        Some(if answer & FAILED != 0 { Err(*slot.own.error.lock()) } else { Ok(()) })
    }

    /// Takes the lead, if nobody has it and this slot was not answered.
    pub fn lead(&self) -> Option<Lead<'a>> {
        let meeting = self.meeting;
        if !take(&meeting.led.0) {
            return None;
        }
        if self.answer().is_some() {
            meeting.led.0.store(false, Ordering::Release);
            return None;
        }
        Some(Lead::new(meeting, self.number))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut looks = 0;
        while self.answer().is_none() {
            // Reached only while unwinding: a dropped lead answers this slot's request.
            if self.lead().is_none() {
                pause_among(looks);
                looks = looks.saturating_add(1);
            }
        }
        self.meeting.slots[self.number].own.held.store(false, Ordering::Release);
    }
}
