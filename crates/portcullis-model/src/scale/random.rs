//! Numbers that look random, and are the same in each run.

/// Marsaglia, "Xorshift RNGs" (2003), with 64 bits.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(1)
    }
}

impl Random {
    /// The next one, which is not 0.
    pub const fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
