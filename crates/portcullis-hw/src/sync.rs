//! The one place of this crate that names atomics and locks, so that the model checker can take their place.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A lock. Taken for registers and for structures that change rarely, never while hardware is waited for, but for
/// commands of a unit that are one at a time by their nature.
pub type Mutex<T> = spin::Mutex<T>;
