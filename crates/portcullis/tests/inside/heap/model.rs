//! [`Shared`] with the model checker's atomics.

use alloc::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use self::shared::{Shared, Weak};
use super::{OutOfMemory, broken, empty_box};
use crate::sync::Ordering;

mod atomics {
    pub use crate::sync::{AtomicUsize, Ordering};
}

#[allow(dead_code, reason = "what the tests call of it")]
#[path = "../../../src/heap/shared.rs"]
mod shared;

/// A value that its owners read, and that its drop changes.
struct Value {
    content: UnsafeCell<u64>,
    drops: Arc<core::sync::atomic::AtomicUsize>,
}

impl Value {
    fn look(&self) {
        // SAFETY: the model checker sees whether another thread changes it meanwhile.
        assert_eq!(self.content.with(|content| unsafe { *content }), 7);
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: the model checker sees whether another thread reads it meanwhile.
        self.content.with_mut(|content| unsafe { *content = 0 });
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

fn check(threads: impl Fn(Shared<Value>, Weak<Value>) + Sync + Send + 'static) {
    loom::model(move || {
        let drops = Arc::default();
        let value = Value { content: UnsafeCell::new(7), drops: Arc::clone(&drops) };
        let first = Shared::new(value).unwrap();
        let weak = Shared::downgrade(&first);
        threads(first, weak);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn the_last_of_two_owners_drops_what_both_have_read() {
    check(|first, weak| {
        drop(weak);
        let second = first.clone();
        let other = thread::spawn(move || second.look());
        first.look();
        drop(first);
        other.join().unwrap();
    });
}

#[test]
fn an_upgrade_has_the_value_or_none() {
    check(|first, weak| {
        let other = thread::spawn(move || {
            weak.upgrade().is_some_and(|found| {
                found.look();
                true
            })
        });
        drop(first);
        other.join().unwrap();
    });
}

#[test]
fn a_value_is_unwrapped_once_or_dropped() {
    check(|first, weak| {
        let other = thread::spawn(move || weak.upgrade().map(|found| found.look()));
        match Shared::try_unwrap(first) {
            Ok(value) => value.look(),
            Err(shared) => shared.look(),
        }
        other.join().unwrap();
    });
}
