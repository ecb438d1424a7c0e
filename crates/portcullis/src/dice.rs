//! Numbers for tests: they look random, and are the same in each run (xorshift64*, Vigna 2016).

/// A generator. Its state is never 0.
pub(crate) struct Dice(pub u64);

impl Dice {
    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound
    }
}
