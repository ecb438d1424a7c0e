//! Room for a miss: reserve free room, and evict idle entries for the rest. Memory that devices may reach never exceeds the limits.
//!
//! A caller without enough room reserves the free part, unmaps entries, and reserves their room under the same lock under which their end
//! is recorded. So no other caller takes the room of entries that were evicted for this one, and each acquisition evicts only for itself.

use super::{Batch, Held, State};
use crate::registration::config::Keep;
use crate::registration::error::AcquireError;
use crate::registration::index::Span;
use crate::registration::slot::Phase;

/// Room that a caller has reserved while it makes more.
#[derive(Debug, Default)]
pub(in crate::registration) struct Claim {
    bytes: u64,
    entries: usize,
    /// The caller's number among waiting callers, once it waits.
    ticket: Option<u64>,
}

impl Claim {
    pub(in crate::registration) fn is_empty(&self) -> bool {
        self.bytes == 0 && self.entries == 0 && self.ticket.is_none()
    }
}

/// A caller that is making room for a range.
#[derive(Debug)]
pub(super) struct Waiting {
    ticket: u64,
    pub(super) span: Span,
    /// The range was forgotten meanwhile: the caller must no longer map it.
    pub(super) forgotten: bool,
}

/// The next step of an acquisition.
pub(in crate::registration) enum Step {
    Hit(Held),
    /// An entry to be mapped.
    Reserved(u32),
    /// The caller must first unmap the entries in the batch.
    Evict,
    /// Other callers are unmapping entries that will make room.
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
            // A free entry exists: it was reserved.
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

    /// Reserves the free part of the room that the caller needs.
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

    /// Releases the reserved room, and removes the caller from waiting ones.
    pub(in crate::registration) fn unclaim(&mut self, claim: &mut Claim) {
        self.claimed.bytes -= claim.bytes;
        self.claimed.entries -= claim.entries;
        if let Some(ticket) = claim.ticket {
            self.waiting.retain(|waiting| waiting.ticket != ticket);
        }
        *claim = Claim::default();
    }

    /// Returns the error if no room can be made by any eviction, including those of others.
    fn is_full(&self, bytes: u64, claim: &Claim) -> Option<AcquireError> {
        let (limits, unconfirmed) = (&self.limits, &self.unconfirmed);
        let entries = self.idle.len() + unconfirmed.len() + self.ending.0;
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

    /// Evicts entries until at least `bytes` bytes and `entries` entries will be free: first all unconfirmed ones, then idle ones in LRU
    /// order. Evicts a few more if they are small beside the limits, because they share the invalidation.
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
