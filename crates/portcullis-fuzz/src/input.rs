//! Decisions out of bytes.

use portcullis::addr::{Direction, Permissions};

/// Bytes that are not decided by yet. Where none are left, every decision is the first of its choices.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        let bytes = if end <= 1 << 8 { 1 } else { 2 };
        (0..bytes).fold(0, |number, _| number << 8 | u64::from(self.byte())) % end
    }

    /// Which of `count` things, if there are any.
    pub fn which(&mut self, count: usize) -> Option<usize> {
        (count > 0).then(|| self.below(count as u64) as usize)
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Any number: small ones, those at powers of two, and anything else.
    pub fn number(&mut self) -> u64 {
        let kind = self.byte();
        match kind % 4 {
            0 => self.byte().into(),
            1 => (1_u64 << (kind >> 2)).wrapping_add_signed(i64::from(self.byte() as i8)),
            2 => u64::MAX - u64::from(self.byte()),
            _ => (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte())),
        }
    }

    pub fn direction(&mut self) -> Direction {
        Direction::ALL[self.below(3) as usize]
    }

    pub fn permissions(&mut self) -> Permissions {
        self.direction().permissions()
    }
}
