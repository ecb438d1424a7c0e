//! What a leader tells callers: the meeting's word, of which each answer has a copy.

/// Callers of one meeting that can wait at a time.
pub(super) const SLOTS: usize = if cfg!(loom) { 2 } else { 16 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(pub u64);

/// In an answer only, which is a copy of the word besides: the bit that flips, and whether it is an error. 0 in the word.
pub(super) const FLIP: u64 = 1;
pub(super) const FAILED: u64 = 2;
/// The last round had several callers.
pub(super) const COMPANY: u64 = 1 << 34;
/// Where the number of the preferred next leader is.
pub(super) const NEXT: u32 = 40;
pub(super) const ANYBODY: usize = 0xff;
/// Where the number of ended leads is, modulo 2^16: all bits above it.
pub(super) const ROUND: u32 = 48;

impl State {
    pub fn had_company(self) -> bool {
        self.0 & COMPANY != 0
    }

    /// Whether slot `number` may lead at once: nobody else is preferred.
    pub fn is_turn_of(self, number: usize) -> bool {
        self.next().is_none_or(|next| next == number)
    }

    pub fn next(self) -> Option<usize> {
        Some((self.0 >> NEXT) as usize & ANYBODY).filter(|next| *next != ANYBODY)
    }

    pub fn with_next(self, next: usize) -> Self {
        Self(self.0 & !((ANYBODY as u64) << NEXT) | (next as u64) << NEXT)
    }
}
