//! Failures of a ring's unit: how it reports them, how it resumes, and which submissions fail.
//!
//! A unit stops at a command that it does not know; some drop outstanding waits if a device does not answer. The CPU that sees it raises
//! the failure count, replaces the bad command by a no-op, and lets the unit resume. Each submission that was outstanding then reports an
//! error, whether it was the cause or not: it reads the count before it reserves and after it is confirmed.
//!
//! **The submission of a replaced command reports the error**, whatever the unit says and does:
//!
//! - The command was published before the count was raised, because [`CommandRing::hold`] finds it before that; so its submission had read
//!   the count before (its load is before its store to `written`, which releases, and which `hold` acquires).
//! - It belongs to no other submission, because the place is held until the command is replaced.
//! - If the unit has executed the no-op, and confirms, it has seen it after the count was raised, which is stored first; so the submission
//!   finds the count raised, by the contract of [`Registers`](crate::Registers).
//!
//! So nothing is confirmed that was not carried out, even if the unit had not stopped after all, or resumes by itself. But then a
//! submission fails without need. So a [`Port`] reports a failure only if the unit stays stopped until the CPU that holds the lock here
//! resumes it, and reads its position after that.

use portcullis::invalidation::InvalidationError;

use crate::command_ring::{CommandRing, Doorbell};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// A command's two words.
pub(crate) type Command = [u64; 2];

/// How one kind of unit encodes commands, and reports that it has stopped.
pub(crate) trait Port: Doorbell {
    /// A no-op.
    const NOTHING: Command;

    /// The command that ends a submission: the unit stores `number` at `address`, a multiple of 8, after all earlier commands are complete.
    /// If it confirms by [consuming](CommandRing::has_consumed), both are 0, and it consumes the command after all earlier ones are
    /// complete.
    fn wait(number: u32, address: u64) -> Command;

    /// Why the unit has stopped, or dropped waits; or another error that must be acknowledged. `command` reads the first word of the
    /// command at an index.
    fn failure(&self, command: &dyn Fn(u32) -> u64) -> Option<Failure>;

    /// Resumes the unit after `failure`. Called by one CPU at a time, and nothing else resumes it.
    fn go_on(&self, failure: &Failure);
}

pub(crate) struct Failure {
    /// The error of outstanding submissions; `None` if it concerns none of them.
    pub error: Option<InvalidationError>,
    /// The index of the bad command, with the wrap bit, if there is one.
    pub bad: Option<u32>,
    /// The unit will not confirm outstanding submissions.
    pub drops_waits: bool,
    /// Its status register.
    pub status: u32,
}

/// The failure counts before a submission reserved its places.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Before {
    failures: u64,
    drops: u64,
}

/// Counts of a unit's failures.
#[derive(Debug)]
pub(crate) struct Failures {
    count: AtomicU64,
    /// The number of failures that dropped waits. A failure raises it after it has raised `count`.
    drops: AtomicU64,
    last: Mutex<InvalidationError>,
    /// Serializes their handling.
    mending: Mutex<()>,
}

impl Failures {
    pub fn new() -> Self {
        Self {
            count: AtomicU64::new(0),
            drops: AtomicU64::new(0),
            last: Mutex::new(InvalidationError::Abandoned),
            mending: Mutex::new(()),
        }
    }

    pub fn so_far(&self) -> Before {
        Before { failures: self.count.load(Ordering::Acquire), drops: self.drops.load(Ordering::Acquire) }
    }

    /// An error if there was a failure since `before`.
    pub fn since(&self, before: Before) -> Result<(), InvalidationError> {
        if self.count.load(Ordering::Acquire) == before.failures { Ok(()) } else { Err(self.last()) }
    }

    /// An error if waits were dropped since `before`.
    pub fn dropped_since(&self, before: Before) -> Result<(), InvalidationError> {
        if self.drops.load(Ordering::Acquire) == before.drops { Ok(()) } else { Err(self.last()) }
    }

    /// The last error. Does not wait: while another CPU, or the code that this call has interrupted, writes that error, returns
    /// [`InvalidationError::Abandoned`].
    fn last(&self) -> InvalidationError {
        self.last.try_lock().map_or(InvalidationError::Abandoned, |last| *last)
    }

    /// Checks whether the unit has stopped, and resumes it. `command` is for [`Port::failure`]; `replace` stores a no-op at an index. Does
    /// nothing if another CPU, or the interrupted code, is doing the same.
    #[cold]
    pub fn look<P: Port>(
        &self,
        ring: &CommandRing,
        port: &P,
        command: &dyn Fn(u32) -> u64,
        replace: impl FnOnce(usize),
    ) {
        if port.failure(command).is_none() {
            return;
        }
        // If another CPU is here, this one goes on waiting, and then finds the count raised.
        let Some(_one_at_a_time) = self.mending.try_lock() else { return };
        // Again, under the lock: another CPU may have handled it.
        let Some(failure) = port.failure(command) else { return };
        if let Some(error) = failure.error {
            // Before the count is raised: all that follows relies on that.
            let held = failure.bad.and_then(|bad| ring.hold(bad));
            // A CPU that is just reading the last error gets the previous one.
            if let Some(mut last) = self.last.try_lock() {
                *last = error;
            }
            self.count.fetch_add(1, Ordering::AcqRel);
            if failure.drops_waits {
                self.drops.fetch_add(1, Ordering::AcqRel);
            }
            if let Some(held) = held {
                replace(held.index());
            }
        }
        port.go_on(&failure);
        if failure.error.is_some() {
            // The unit may have missed doorbells while it was stopped.
            ring.ring_again(port);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod model;
