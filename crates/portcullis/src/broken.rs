//! Stops the library, by a panic, where it finds a promise of its own broken.
//!
//! To go on with a made-up value would open memory that no caller named, or give back memory that a
//! device reaches. The panic unwinds as a panic of a mapper does: what the caller had in hand is
//! not confirmed, and stays out of use.

/// Panics, saying what should have held.
#[cold]
#[inline(never)]
#[track_caller]
pub(crate) fn broken(promise: &str) -> ! {
    panic!("broken inside the library: {promise}")
}
