//! Bytes that several CPUs and devices may reach at once, without undefined behaviour: a *word*, eight bytes at a
//! multiple of eight, is accessed as a whole, always by an [`AtomicU64`].
//!
//! Unordered atomic accesses that overlap, one of them a write, must have the same size: one of a byte beside one of
//! eight is undefined behaviour ([`core::sync::atomic`], "Memory model for atomic accesses"). So shared memory has one
//! size of access. It is eight bytes, as page tables have no other, and as a copy by bytes takes eight times the steps.
//! A read of a part of a word loads all of it. A write to a part exchanges the word for one with the other bytes
//! unchanged; it tries again if another CPU or a device has written there meanwhile.
//!
//! All accesses are `Relaxed`. Beside a concurrent write, each byte that is read is an old or a new one, and the bytes
//! of a word are of one moment. A caller that needs ordering adds a fence, a lock or a doorbell's barrier.

use crate::sync::{AtomicU64, Ordering};

/// Bytes of a word.
pub const WORD: usize = size_of::<u64>();

/// Copies bytes of a word to `out`, from `skip` up to the end of `out` or of the word.
#[inline]
pub fn load_part(word: &AtomicU64, skip: usize, out: &mut [u8]) {
    let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
    out.iter_mut().zip(bytes.iter().skip(skip)).for_each(|(out, byte)| *out = *byte);
}

/// The word `old` with `bytes` from its byte `skip` on, up to its end.
#[inline]
pub(crate) fn with_part(old: u64, skip: usize, bytes: &[u8]) -> u64 {
    let mut all = old.to_ne_bytes();
    all.iter_mut().skip(skip).zip(bytes).for_each(|(place, byte)| *place = *byte);
    u64::from_ne_bytes(all)
}

/// Stores `bytes` from byte `skip` of a word on, up to its end. The other bytes stay, also beside concurrent writes:
/// then it tries again.
#[inline]
pub fn store_part(word: &AtomicU64, skip: usize, bytes: &[u8]) {
    if let (0, Ok(whole)) = (skip, bytes.try_into()) {
        return word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
    }
    let changed = |old| Some(with_part(old, skip, bytes));
    // Never an error: `changed` always returns a word.
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
}

/// Returns the words that hold the `len` bytes at `offset`, and the offset within the first word; `None` if some of the
/// bytes do not exist.
fn around(words: &[AtomicU64], offset: usize, len: usize) -> Option<(&[AtomicU64], usize)> {
    let end = offset.checked_add(len).filter(|end| *end <= size_of_val(words))?;
    Some((&words[offset / WORD..end.div_ceil(WORD)], offset % WORD))
}

/// Copies the bytes at `offset` of `words` to `out`; `None`, with nothing copied, if some of them do not exist.
/// O(`out.len()`); never waits.
pub fn read(words: &[AtomicU64], offset: usize, out: &mut [u8]) -> Option<()> {
    let (words, skip) = around(words, offset, out.len())?;
    let (head, rest) = out.split_at_mut(((WORD - skip) % WORD).min(out.len()));
    let (first, words) = words.split_at(usize::from(!head.is_empty()));
    first.iter().for_each(|word| load_part(word, skip, head));
    let (whole, tail) = rest.as_chunks_mut::<WORD>();
    let (middle, last) = words.split_at(whole.len());
    for (bytes, word) in whole.iter_mut().zip(middle) {
        *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    last.iter().for_each(|word| load_part(word, 0, tail));
    Some(())
}

/// Copies `bytes` to `words` at `offset`, and changes no other byte; `None`, with nothing copied, if some of them do
/// not exist. O(`bytes.len()`); never waits.
pub fn write(words: &[AtomicU64], offset: usize, bytes: &[u8]) -> Option<()> {
    let (words, skip) = around(words, offset, bytes.len())?;
    let (head, rest) = bytes.split_at(((WORD - skip) % WORD).min(bytes.len()));
    let (first, words) = words.split_at(usize::from(!head.is_empty()));
    first.iter().for_each(|word| store_part(word, skip, head));
    let (whole, tail) = rest.as_chunks::<WORD>();
    let (middle, last) = words.split_at(whole.len());
    for (bytes, word) in whole.iter().zip(middle) {
        word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
    }
    last.iter().for_each(|word| store_part(word, 0, tail));
    Some(())
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/platform/words.rs"]
mod tests;
