//! A fair lock: it serves its callers in the order in which they came. It is for a lock that is held for long, as while
//! hardware works: under an unfair lock, a caller that comes back at once starves the others.
//!
//! A caller *draws* a ticket with the next number, and has the lock once that number is served. Numbers wrap, and are
//! only compared for equality: fewer than 2^32 callers wait at a time. A caller that has drawn a ticket must go on
//! running, as later ones wait for it. So it is a thread, or a task of a kernel, but no interrupt handler, which may
//! have interrupted an earlier caller. An interrupt handler calls [`try_lock`](TicketLock::try_lock), which never
//! waits.
//!
//! Memory ordering. The addition that draws a number may be relaxed: all additions to one word are in one order, so
//! each number is drawn once, and in the order of service. Only the caller whose number is served writes `serving`,
//! once, when it is done. So callers are served one after the other. That store is a release, and the load by which a
//! caller finds its number is an acquire: what a caller did under the lock happens before what the next does, and so
//! before what all later ones do. No wake-up is lost: each caller polls `serving` until it finds its number there, and
//! only that caller replaces it. `try_lock` loads `serving` (acquire), and draws a ticket only if that number is the
//! next to be drawn: so it is the number that is served, which no other caller changes from then on.

use super::{AtomicUsize, Ordering, pause_among};

/// A lock that serves its callers in the order in which they came.
#[derive(Debug, Default)]
pub struct TicketLock {
    next: AtomicUsize,
    serving: AtomicUsize,
}

/// A place in the queue of a [`TicketLock`]. A drop waits, and passes the lock on.
#[derive(Debug)]
#[must_use = "the callers behind it wait until it is dropped"]
pub struct Ticket<'a> {
    lock: &'a TicketLock,
    number: usize,
}

/// A held [`TicketLock`], until it is dropped.
#[derive(Debug)]
#[must_use = "the lock is passed on when it is dropped"]
pub struct Served<'a>(#[allow(dead_code, reason = "dropped")] Ticket<'a>);

impl TicketLock {
    /// Takes the lock, after all earlier callers. Uncontended, two loads, a store and an atomic addition. Context: may
    /// wait; no interrupt handler.
    pub fn lock(&self) -> Served<'_> {
        self.draw().wait()
    }

    /// Takes the lock, if it is free. Context: any; never waits.
    pub fn try_lock(&self) -> Option<Served<'_>> {
        let number = self.serving.load(Ordering::Acquire);
        let next = number.wrapping_add(1);
        let drawn = self.next.compare_exchange(number, next, Ordering::Relaxed, Ordering::Relaxed);
        drawn.ok().map(|number| Served(Ticket { lock: self, number }))
    }

    /// Takes a place after all earlier callers. Context: no interrupt handler.
    pub fn draw(&self) -> Ticket<'_> {
        Ticket { lock: self, number: self.next.fetch_add(1, Ordering::Relaxed) }
    }
}

impl<'a> Ticket<'a> {
    /// Waits for all earlier callers.
    pub fn wait(self) -> Served<'a> {
        self.wait_for_number();
        Served(self)
    }

    fn wait_for_number(&self) {
        let mut looks = 0_u32;
        while self.lock.serving.load(Ordering::Acquire) != self.number {
            looks = looks.saturating_add(1);
            pause_among(looks);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.wait_for_number();
        self.lock.serving.store(self.number.wrapping_add(1), Ordering::Release);
    }
}
