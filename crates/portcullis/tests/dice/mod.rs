//! Random numbers, and how many operations a long test does.

#![allow(dead_code, reason = "each test file uses a part")]

/// xorshift64*, of Marsaglia and Vigna.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// xorshift64, of Marsaglia: files of whole texts tell of lives that were drawn by it.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % most
    }
}

/// As many as `PORTCULLIS_INTEGRITY_OPS` says, else `usual`.
pub fn operations(usual: u64) -> u64 {
    std::env::var("PORTCULLIS_INTEGRITY_OPS")
        .map_or(usual, |ops| ops.parse().expect("a number of operations"))
}
