//! The lock of the old designs: a ticket lock, as Linux's spin locks were until 2015 (x86) and 2018 (Arm).

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::team::Wait;

/// What a CPU does that waits for a word to change, given the word's address; it may return early.
static WATCH: OnceLock<fn(usize)> = OnceLock::new();

/// Has CPUs that wait for a lock call `watch` with the address that they watch, in place of a pause. Once, before any waits.
pub fn watch_with(watch: fn(usize)) {
    // A second call would be of the same program, with the same function.
    let _ = WATCH.set(watch);
}

/// A lock that CPUs get in the order in which they came. All who wait look at one word.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Ticket<T> {
    next: AtomicU32,
    serving: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a guard only, of which there is one at a time.
unsafe impl<T: Send> Sync for Ticket<T> {}

impl<T> Ticket<T> {
    pub(super) fn new(value: T) -> Self {
        Self { next: AtomicU32::new(0), serving: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(super) fn lock(&self) -> Held<'_, T> {
        // Relaxed: the ticket orders nothing; the load of who is served does.
        let mine = self.next.fetch_add(1, Ordering::Relaxed);
        let mut wait = Wait::default();
        while self.serving.load(Ordering::Acquire) != mine {
            match WATCH.get() {
                Some(watch) => watch(self.serving.as_ptr().addr()),
                None => wait.pause(),
            }
        }
        Held(self)
    }

    /// How often it was taken.
    #[cfg(test)]
    pub(super) fn taken(&self) -> u32 {
        self.next.load(Ordering::Relaxed)
    }
}

/// The lock, while it is held.
pub(super) struct Held<'a, T>(&'a Ticket<T>);

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: whose ticket is served has the value alone, until the guard goes.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Only the holder changes it.
        let served = self.0.serving.load(Ordering::Relaxed);
        self.0.serving.store(served.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_value() {
        let lock = Ticket::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..500).for_each(|_| *lock.lock() += 1));
            }
        });
        assert_eq!(*lock.lock(), 1500);
    }
}
