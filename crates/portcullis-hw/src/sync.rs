//! The only module of this crate that names atomics and locks, so that the model checker can replace them.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// A spin lock. Held for some register accesses; and during waits for the unit by rare, inherently serial operations: a global command, an
/// attachment, a failure. Submissions wait for none of these.
pub type Mutex<T> = spin::Mutex<T>;
