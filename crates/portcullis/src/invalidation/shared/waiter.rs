//! A caller that holds a slot. It publishes its requests there, and waits for the answer; if its group has no leader, it leads.

use super::group::Group;
use super::leader::Leader;
use super::state::{FAILED, FLIP, SLOTS, State};
use crate::invalidation::{InvalidationError, Request};
use crate::sync::{AtomicBool, Ordering, pause_among};

/// Sets `flag` if it is clear, and acquires what its last holder stored. Returns whether it was clear.
fn try_lock(flag: &AtomicBool) -> bool {
    // The load comes first, as a failing exchange takes the line, too.
    !flag.load(Ordering::Relaxed)
        && flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// A caller with its slot. Dropping it waits for the answer, and leads if no other caller does.
pub(super) struct Waiter<'a> {
    group: &'a Group,
    pub number: usize,
    /// The slot's `answer` when its requests were published; `None` until then.
    before: Option<u64>,
}

impl<'a> Waiter<'a> {
    /// Takes slot `first` of `group`, or another one if a caller has that. `None` if callers have all.
    pub fn new(group: &'a Group, first: usize) -> Option<Self> {
        (0..SLOTS).map(|more| (first + more) % SLOTS).find_map(|number| {
            let held = &group.slots[number].own.held;
            let is_free = try_lock(held);
            // Not `then_some`, which would make a `Waiter` for another caller's slot, and free the slot by dropping it.
            is_free.then(|| Self { group, number, before: None })
        })
    }

    /// Publishes `requests`, and calls `f`, which waits for the answer. When this returns or unwinds, the requests are answered, and no
    /// leader reads them any more.
    pub fn publish<R>(mut self, requests: &[Request], f: impl FnOnce(&Self) -> R) -> R {
        let (used, bit) = (&self.group.hints.0.used, 1 << self.number);
        // Relaxed: if a leader does not see the bit, it misses the slot, and a later round serves it.
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::Relaxed);
        }
        let slot = &self.group.slots[self.number];
        // Relaxed: see *The slot* in `group.rs`.
        let before = slot.answer.load(Ordering::Relaxed);
        // A leader may read the requests until it answers, which `drop` waits for.
        slot.publish(requests, before & FLIP ^ FLIP);
        self.before = Some(before);
        f(&self)
    }

    /// The group's word after the round that last answered this slot.
    pub fn last(&self) -> State {
        State(self.group.slots[self.number].answer.load(Ordering::Relaxed) & !(FLIP | FAILED))
    }

    /// The result, once the requests are answered.
    pub fn answer(&self) -> Option<Result<(), InvalidationError>> {
        let Some(before) = self.before else { return Some(Ok(())) };
        let slot = &self.group.slots[self.number];
        let answer = slot.answer.load(Ordering::Acquire);
        if (answer ^ before) & FLIP == 0 {
            return None;
        }
        Some(if answer & FAILED != 0 { Err(*slot.own.error.lock()) } else { Ok(()) })
    }

    /// Makes this caller the leader, if there is none and its requests are not answered.
    pub fn try_lead(&self) -> Option<Leader<'a>> {
        let group = self.group;
        if !try_lock(&group.has_leader.0) {
            return None;
        }
        if self.answer().is_some() {
            group.has_leader.0.store(false, Ordering::Release);
            return None;
        }
        Some(Leader::new(group, self.number))
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut polls = 0;
        while self.answer().is_none() {
            // Reached only while unwinding. The leader is dropped at once, and so answers this slot.
            if self.try_lead().is_none() {
                pause_among(polls);
                polls = polls.saturating_add(1);
            }
        }
        self.group.slots[self.number].own.held.store(false, Ordering::Release);
    }
}
