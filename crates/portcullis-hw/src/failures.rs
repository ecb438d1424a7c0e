//! What goes wrong with a ring's unit: how it says so, how it goes on, and who hears of it.
//!
//! A unit that meets a command that it does not know stops; some drop the waits that are under way where a device does not answer.
//! The CPU that sees it counts the failure, puts a command that does nothing in the place of the bad one, and then lets the unit go
//! on. Each submission that was under way then reports an error, whether it was the cause or not: it reads the count before it
//! reserves and after it is confirmed.
//!
//! **A command that is replaced is one whose submission reports the error**, whatever the unit says and does:
//!
//! - The command was published before the count was raised, as [`CommandRing::hold`] finds it before that; so its submission had read
//!   the count before (its load is before its store to `written`, which releases, and which `hold` acquires).
//! - It is no other submission's, as the place is held until it is replaced.
//! - If the unit has carried out the command that does nothing, and confirms, it has seen it after the count was raised, which is
//!   stored first; so the submission finds the count raised, by the contract of [`Registers`](crate::Registers).
//!
//! So nothing is confirmed that was not carried out even where the unit had not stopped after all, or goes on by itself. But a
//! submission fails then that need not have. So a [`Port`] reports a failure only where the unit stays stopped until the CPU that
//! holds the lock here has it go on, and reads where it stands after that.

use portcullis::invalidation::InvalidationError;

use crate::command_ring::{CommandRing, Doorbell};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// A command's two words.
pub(crate) type Command = [u64; 2];

/// How one kind of unit reads its commands, and says that it has stopped.
pub(crate) trait Port: Doorbell {
    /// The command that does nothing.
    const NOTHING: Command;

    /// The command that ends a submission: the unit stores `number` at `address`, a multiple of 8, when all before it is complete.
    /// Where it confirms by what it [has consumed](CommandRing::has_consumed), both are 0, and the unit consumes the command when
    /// all before it is complete.
    fn wait(number: u32, address: u64) -> Command;

    /// Why the unit does not go on, where it has stopped, or has dropped waits; or another error that must be acknowledged.
    /// `command` reads the first word of the command at an index.
    fn failure(&self, command: &dyn Fn(u32) -> u64) -> Option<Failure>;

    /// Lets it go on after `failure`. One caller at a time, and nothing else does this.
    fn go_on(&self, failure: &Failure);
}

/// Why a unit has stopped.
pub(crate) struct Failure {
    /// What submissions that are under way report; `None` where none of them is concerned.
    pub error: Option<InvalidationError>,
    /// The index of the command that it does not take, with the wrap bit, if there is one.
    pub bad: Option<u32>,
    /// It confirms no more what is under way.
    pub drops_waits: bool,
    /// What its status said.
    pub status: u32,
}

/// The failures that there were before a submission reserved its places.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Before {
    failures: u64,
    drops: u64,
}

/// The failures of a unit so far.
#[derive(Debug)]
pub(crate) struct Failures {
    count: AtomicU64,
    /// Those of them that dropped waits, each counted here last.
    drops: AtomicU64,
    /// What the last one was.
    last: Mutex<InvalidationError>,
    /// Held by the CPU that deals with one.
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

    /// Those that a submission begins after.
    pub fn so_far(&self) -> Before {
        Before { failures: self.count.load(Ordering::Acquire), drops: self.drops.load(Ordering::Acquire) }
    }

    /// An error if there was a failure since there were those of `before`.
    pub fn since(&self, before: Before) -> Result<(), InvalidationError> {
        if self.count.load(Ordering::Acquire) == before.failures { Ok(()) } else { Err(self.last()) }
    }

    /// An error if waits were dropped since then.
    pub fn dropped_since(&self, before: Before) -> Result<(), InvalidationError> {
        if self.drops.load(Ordering::Acquire) == before.drops { Ok(()) } else { Err(self.last()) }
    }

    /// Where another CPU just writes it, or the code that was interrupted, an error that says less: nobody waits.
    fn last(&self) -> InvalidationError {
        self.last.try_lock().map_or(InvalidationError::Abandoned, |last| *last)
    }

    /// Asks the unit whether it has stopped, and lets it go on. `command` is for [`Port::failure`]; `replace` stores the command
    /// that does nothing at an index. Does nothing where another CPU is at it, or the code that was interrupted.
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
        // A CPU that finds another at it goes on waiting, and finds the count raised.
        let Some(_one_at_a_time) = self.mending.try_lock() else { return };
        // Again, under the lock: another CPU may have dealt with it.
        let Some(failure) = port.failure(command) else { return };
        if let Some(error) = failure.error {
            // Before the count is raised, which all that follows relies on.
            let held = failure.bad.and_then(|bad| ring.hold(bad));
            // Where a CPU just reads the last error, it reads the one before.
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
            // The unit may have missed doorbells while it had stopped.
            ring.ring_again(port);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod model;
