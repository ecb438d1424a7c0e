//! The group's word, which a leader stores at the end of its round. Each answer has a copy of it.

/// Slots of a group: the most callers that can wait in it at a time.
pub(super) const SLOTS: usize = if cfg!(loom) { 2 } else { 16 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(pub u64);

/// Only in an answer, and 0 in the word: flips with each answer.
pub(super) const FLIP: u64 = 1;
/// Only in an answer: the result is an error, which the slot holds.
pub(super) const FAILED: u64 = 2;
/// The round had several callers.
pub(super) const SEVERAL: u64 = 1 << 34;
/// The lowest bit of the slot number of the preferred next leader.
pub(super) const NEXT: u32 = 40;
pub(super) const ANYBODY: usize = 0xff;
/// The lowest bit of the number of rounds, modulo 2^16.
pub(super) const ROUND: u32 = 48;

impl State {
    pub fn had_several(self) -> bool {
        self.0 & SEVERAL != 0
    }

    /// Whether slot `number` may lead at once: no other slot is preferred.
    pub fn may_lead(self, number: usize) -> bool {
        self.next().is_none_or(|next| next == number)
    }

    pub fn next(self) -> Option<usize> {
        Some((self.0 >> NEXT) as usize & ANYBODY).filter(|next| *next != ANYBODY)
    }

    pub fn with_next(self, next: usize) -> Self {
        Self(self.0 & !((ANYBODY as u64) << NEXT) | (next as u64) << NEXT)
    }
}
