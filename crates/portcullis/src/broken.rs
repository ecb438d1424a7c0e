//! Panics when the library finds a promise of its own broken. To go on with a made-up value would open memory that no
//! caller named, or free memory that a device reaches. The panic unwinds as a panic of a mapper does: what the caller
//! was working on is unconfirmed, and stays out of use.

/// Panics, saying what should have held.
#[cold]
#[inline(never)]
#[track_caller]
pub(crate) fn broken(promise: &str) -> ! {
    panic!("broken inside the library: {promise}")
}
