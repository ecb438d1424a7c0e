//! What is done where the library finds a promise of its own broken: it stops.
//!
//! To go on with a made-up value would open memory that no caller named, or give back what a device reaches. The panic
//! unwinds as one of a mapper's does: what was in hand is not confirmed, and stays out of use.

/// Panics, saying what should have held.
#[cold]
#[inline(never)]
#[track_caller]
pub(crate) fn broken(promise: &str) -> ! {
    panic!("broken inside the library: {promise}")
}
