//! A lock that serves its callers in the order in which they came: each caller waits for the callers before it, and for no later
//! one.
//!
//! It is for a lock that is held for long, as while hardware works: under a lock that serves the
//! quickest, a caller that comes back at once starves the others.
//!
//! A caller *draws* a ticket with the next number, and has the lock once that number is served.
//! Numbers wrap, and are compared for equality alone: fewer than 2^32 callers wait at a time. A
//! caller that has drawn a ticket goes on running, as those behind it wait for it: a thread, or a
//! task of a kernel, but no interrupt handler, which may have interrupted one that is before it.
//!
//! An interrupt handler calls [`try_lock`](TicketLock::try_lock), which takes a lock that is free, and never waits.
//!
//! Memory ordering. The addition that draws a number may be relaxed: all additions to one word are
//! in one order, so each number is drawn once, and in the order of service. Only the caller whose
//! number is served writes `serving`, once: when it is done, it stores the next number. So no two
//! callers are served at once, and each is served after the one before. That store is a release, and
//! the load by which a caller finds its number is an acquire: what one caller did under the lock
//! happens before what the next does, and so before what all later ones do. No wake-up is lost, as
//! callers do not sleep: each loads `serving` until it finds its number there, and only that caller replaces it.
//! `try_lock` first loads the number that is served, as an acquire, and then draws a ticket only if that number is the next to be drawn: so
//! the caller has what is served, which nobody else changes from then on.

use super::{AtomicUsize, Ordering, pause_among};

/// A lock for callers that take turns in the order in which they came.
#[derive(Debug, Default)]
pub struct TicketLock {
    /// The number of the next ticket.
    next: AtomicUsize,
    /// The number that is served.
    serving: AtomicUsize,
}

/// A place among those that wait for a [`TicketLock`]. Dropped, it waits and passes the lock on.
#[derive(Debug)]
#[must_use = "the callers behind it wait until it is dropped"]
pub struct Ticket<'a> {
    lock: &'a TicketLock,
    number: usize,
}

/// The right to what a [`TicketLock`] protects, until it is dropped.
#[derive(Debug)]
#[must_use = "the lock is passed on when it is dropped"]
pub struct Served<'a>(#[allow(dead_code, reason = "dropped")] Ticket<'a>);

impl TicketLock {
    /// Takes the lock, when all that came before have had it. Two loads, a store and an atomic
    /// addition in all where nobody else is there.
    pub fn lock(&self) -> Served<'_> {
        self.draw().wait()
    }

    /// Takes the lock, if nobody has it and nobody waits for it. It never waits.
    pub fn try_lock(&self) -> Option<Served<'_>> {
        let number = self.serving.load(Ordering::Acquire);
        let next = number.wrapping_add(1);
        let drawn = self.next.compare_exchange(number, next, Ordering::Relaxed, Ordering::Relaxed);
        drawn.ok().map(|number| Served(Ticket { lock: self, number }))
    }

    /// Takes a place behind all that came before.
    pub fn draw(&self) -> Ticket<'_> {
        Ticket { lock: self, number: self.next.fetch_add(1, Ordering::Relaxed) }
    }
}

impl<'a> Ticket<'a> {
    /// Waits until all that came before have had the lock.
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
