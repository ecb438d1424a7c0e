//! Room for what is to be mapped: set aside where it is free, and made of idle entries where it is not.
//!
//! Whoever finds too little room sets aside what there is, unmaps entries, and sets aside what became free of them under
//! the lock that says so. So nobody else takes what was evicted for this one, each acquisition evicts for itself, and
//! what is mapped or may still be reached never exceeds the limits.

use super::{Batch, Held, State};
use crate::registration::config::Keep;
use crate::registration::error::AcquireError;
use crate::registration::index::Span;
use crate::registration::slot::Phase;

/// Room that somebody has set aside while it makes more.
#[derive(Debug, Default)]
pub(in crate::registration) struct Claim {
    bytes: u64,
    entries: usize,
    /// Its number among those who wait, once it does.
    ticket: Option<u64>,
}

impl Claim {
    /// Whether there is nothing to be given up.
    pub(in crate::registration) fn is_empty(&self) -> bool {
        self.bytes == 0 && self.entries == 0 && self.ticket.is_none()
    }
}

/// Somebody who is making room for a range.
#[derive(Debug)]
pub(super) struct Waiting {
    ticket: u64,
    pub(super) span: Span,
    /// The range was forgotten meanwhile: it must not be mapped any more.
    pub(super) forgotten: bool,
}

/// How an acquisition goes on.
pub(in crate::registration) enum Step {
    Hit(Held),
    /// An entry to be mapped.
    Reserved(u32),
    /// What was added to the batch must be unmapped first.
    Evict,
    /// Others are unmapping what will make room.
    Wait,
    Failed(AcquireError),
}

impl State {
    /// Finds an entry, or room for one of `bytes` bytes.
    pub(in crate::registration) fn step(
        &mut self,
        (span, bytes, keep): (&Span, u64, Keep),
        claim: &mut Claim,
        batch: &mut Batch,
    ) -> Step {
        let was_forgotten = |waiting: &Waiting| Some(waiting.ticket) == claim.ticket && waiting.forgotten;
        if self.waiting.iter().any(was_forgotten) {
            self.unclaim(claim);
            return Step::Failed(AcquireError::forgotten(span));
        }
        if let Some(held) = self.hit(span, keep) {
            self.unclaim(claim);
            return Step::Hit(held);
        }
        self.top_up(claim, bytes);
        if claim.bytes == bytes && claim.entries == 1 {
            self.unclaim(claim);
            // There is one, as it was claimed.
            if let Some(slot) = self.reserve(span, bytes, keep) {
                return Step::Reserved(slot);
            }
        }
        if let Some(error) = self.is_full(bytes, claim) {
            self.unclaim(claim);
            return Step::Failed(error);
        }
        if claim.ticket.is_none() {
            if self.waiting.try_reserve(1).is_err() {
                self.unclaim(claim);
                return Step::Failed(AcquireError::NoMemory);
            }
            self.generation += 1;
            claim.ticket = Some(self.generation);
            self.waiting.push(Waiting { ticket: self.generation, span: *span, forgotten: false });
        }
        self.evict((bytes - claim.bytes, 1 - claim.entries), batch);
        if batch.is_empty() { Step::Wait } else { Step::Evict }
    }

    /// Sets aside what is free of the room that is wanted.
    pub(in crate::registration) fn top_up(&mut self, claim: &mut Claim, bytes: u64) {
        let free = self.limits.bytes.saturating_sub(self.bytes).saturating_sub(self.claimed.bytes);
        let more = free.min(bytes.saturating_sub(claim.bytes));
        claim.bytes += more;
        self.claimed.bytes += more;
        if claim.entries == 0 && self.slots.used() + self.claimed.entries < self.limits.entries {
            claim.entries = 1;
            self.claimed.entries += 1;
        }
    }

    /// Gives up what was set aside, and waits no more.
    pub(in crate::registration) fn unclaim(&mut self, claim: &mut Claim) {
        self.claimed.bytes -= claim.bytes;
        self.claimed.entries -= claim.entries;
        if let Some(ticket) = claim.ticket {
            self.waiting.retain(|waiting| waiting.ticket != ticket);
        }
        *claim = Claim::default();
    }

    /// Whether no room can be made, whatever is evicted and whatever others are unmapping.
    fn is_full(&self, bytes: u64, claim: &Claim) -> Option<AcquireError> {
        let (limits, unconfirmed) = (&self.limits, &self.unconfirmed);
        let entries = self.idle.len + unconfirmed.len + self.ending.0;
        if claim.entries == 0 && entries == 0 {
            return Some(AcquireError::NoEntry { limit: limits.entries });
        }
        let room = self.idle.bytes + unconfirmed.bytes + self.ending.1;
        (room < bytes - claim.bytes).then(|| AcquireError::NoBytes {
            wanted: bytes,
            limit: limits.bytes,
            held: self.bytes - room,
        })
    }

    /// Evicts entries until so many bytes and entries will be free, at the least: all that was not confirmed before, then
    /// idle ones, the least recently used first. A few more where they are small beside the limits, as they share the
    /// invalidation.
    fn evict(&mut self, (bytes, entries): (u64, usize), batch: &mut Batch) {
        let spare = (self.limits.entries / 16).clamp(1, 16);
        let spare_bytes = self.limits.bytes / 16;
        let mut found = 0;
        while !batch.is_full() {
            let again = self.unconfirmed.first();
            let Some(slot) = again.or(self.idle.first()) else { break };
            let next = self.slots.at(slot).bytes;
            let enough = again.is_none() && found >= bytes && batch.len() >= entries;
            if enough && (batch.len() >= spare || found.saturating_add(next) > spare_bytes) {
                break;
            }
            found = found.saturating_add(next);
            self.counts.evictions += u64::from(self.slots.at(slot).phase == Phase::Live);
            self.evict_one(slot, batch);
        }
    }
}
