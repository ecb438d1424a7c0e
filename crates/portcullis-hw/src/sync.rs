//! The one place of this crate that names atomics and locks, so that the model checker can take their place.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// A lock that spins. Held for some accesses of registers; and while the unit is waited for, by what is rare and one at a time by its
/// nature: a global command, an attachment, a failure that is mended. Submissions wait for none of these.
pub type Mutex<T> = spin::Mutex<T>;
