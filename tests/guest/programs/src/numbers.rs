//! Patterns and random numbers, of which the same seed gives the same.

/// Mixes a number so that each bit of it changes half of the result's (the finaliser of SplitMix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A sequence of random numbers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % bound.max(1)
    }
}

/// Fills `bytes` with the pattern of `seed`, as it is from byte `from` on. Both are multiples of 8.
pub fn fill(bytes: &mut [u8], seed: u64, from: u64) {
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&mix(seed ^ (from / 8 + at as u64)).to_le_bytes());
    }
}

/// Where `bytes`, which are the pattern's from byte `from` on, are others: how many bytes, in which words, and whose these are. The pattern has
/// `length` bytes in all: a word from elsewhere in it is found there.
pub fn differs(bytes: &[u8], seed: u64, from: u64, length: u64) -> Option<String> {
    let right = |at: usize| mix(seed ^ (from / 8 + at as u64)).to_le_bytes();
    let words = bytes.as_chunks::<8>().0;
    let wrong: Vec<usize> = (0..words.len()).filter(|&at| words[at] != right(at)).collect();
    let (&first, &last) = (wrong.first()?, wrong.last()?);
    let differ = |at: usize| words[at].iter().zip(right(at)).filter(|(is, right)| **is != *right).count();
    let count = match wrong.iter().map(|&at| differ(at)).sum() {
        1 => "1 byte".to_owned(),
        count => format!("{count} bytes"),
    };
    let found = words[first];
    let origin = match (0..length / 8).find(|at| mix(seed ^ at).to_le_bytes() == found) {
        Some(at) => format!("what belongs at {}", at * 8),
        None => "nothing of the pattern".to_owned(),
    };
    let place = |at: usize| from + at as u64 * 8;
    Some(format!(
        "{count} in {} of {} words, from {} to {}, the first is {found:02x?}, {origin}; {:02x?} is right",
        wrong.len(),
        words.len(),
        place(first),
        place(last) + 8,
        right(first),
    ))
}
