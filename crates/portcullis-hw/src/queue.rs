//! A ring of commands of 128 bits each, and the wait for their confirmation: VT-d's invalidation queue, AMD-Vi's command buffer.
//!
//! A submission ends with a command that makes the unit store a number in a word that the submission has claimed.
//!
//! VT-d's places may be of 256 bits. No command here uses the upper half, which stays zero.
//!
//! **Errors.** A unit that meets a command that it does not know stops; VT-d, where a device does not answer, drops the
//! waits that are under way. The CPU that sees it puts a command that does nothing in the place of the bad one, counts
//! the failure, and then lets the unit go on. Each submission that was under way then reports an error, whether it was the
//! cause or not: it reads the count before it reserves and after it is confirmed, and the count is raised before the unit
//! may go on and confirm.

use arrayvec::ArrayVec;
use portcullis::addr::IovaRange;
use portcullis::invalidation::{InvalidationError, Request};
use portcullis::platform::Frames;

use crate::answers::{Answer, Answers};
use crate::command_ring::{CommandRing, Doorbell};
use crate::frames::Words;
use crate::host::{Host, UnitError};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Commands in the ring: one frame of them.
pub(crate) const COMMANDS: u32 = 256;

/// Commands that go in one submission, besides the wait.
pub(crate) const MOST: usize = 127;

/// Looks at memory before the first look at the unit's status, which costs a microsecond on hardware.
const LOOKS: u32 = 64;

/// What is said of a request that no unit of this kind can carry out: of a device, or a domain, that it has no number for.
pub(crate) const REFUSED: InvalidationError = InvalidationError::Rejected { code: u32::MAX };

/// A command's two words.
pub(crate) type Command = [u64; 2];

/// What was asked for, as the unit takes it.
pub(crate) type Commands = ArrayVec<Command, MOST>;

/// How one kind of unit reads its commands, and says that it has stopped.
pub(crate) trait Port: Doorbell {
    /// The command that does nothing.
    const NOTHING: Command;

    /// The command that stores `number` at `address`, a multiple of 8, when all before it is complete.
    fn wait(number: u32, address: u64) -> Command;

    /// Why the unit does not go on, where it has stopped, or has dropped waits. `command` reads the first word of the command at
    /// an index.
    fn failure(&self, command: &dyn Fn(u32) -> u64) -> Option<Failure>;

    /// Lets it go on after `failure`.
    fn go_on(&self, failure: &Failure);
}

/// Why a unit has stopped.
pub(crate) struct Failure {
    /// What submissions that are under way report.
    pub error: InvalidationError,
    /// The index of the command that it does not know.
    pub bad: Option<u32>,
    /// What its status said.
    pub status: u32,
}

/// The ring, with the memory that the unit reads and writes.
#[derive(Debug)]
pub(crate) struct Queue {
    ring: CommandRing,
    /// [`COMMANDS`] places.
    commands: Words,
    /// Words of a place: 2 or 4.
    width: usize,
    answers: Answers,
    /// Errors so far, and the last of them.
    failures: AtomicU64,
    last: Mutex<InvalidationError>,
    /// Held by the CPU that deals with one.
    mending: Mutex<()>,
}

impl Queue {
    /// The memory of a queue: one frame of commands. The unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Self::with_width(frames, 2)
    }

    /// The same with places of four words each: two frames of commands.
    pub fn wide<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Self::with_width(frames, 4)
    }

    fn with_width<F: Frames>(frames: &F, width: usize) -> Result<Self, UnitError> {
        let commands = Words::new(frames, width / 2)?;
        let answers = match Answers::new(frames) {
            Ok(answers) => answers,
            Err(error) => {
                // SAFETY: of the line above; the unit was told nothing.
                unsafe { commands.free(frames) };
                return Err(error);
            }
        };
        Ok(Self {
            ring: CommandRing::new(COMMANDS),
            commands,
            width,
            answers,
            failures: AtomicU64::new(0),
            last: Mutex::new(InvalidationError::Abandoned),
            mending: Mutex::new(()),
        })
    }

    /// What the unit's address register takes.
    pub fn address(&self) -> u64 {
        self.commands.phys().get()
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is of `frames`, and the unit's queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: the caller's promise.
        unsafe {
            self.commands.free(frames);
            self.answers.free(frames);
        }
    }

    /// Carries out `requests` in their order, in as few submissions as they fit into. `describe` adds what one asks for to the
    /// commands; where there is no room it adds nothing, and says `false`. A request that it refuses ends the call, with some of
    /// those before it carried out. Without a request the unit is asked for its confirmation all the same, as calls are in one order.
    pub fn carry_out<H: Host>(
        &self,
        host: &H,
        port: &impl Port,
        requests: &[Request],
        describe: impl Fn(&mut Commands, &Request) -> Result<bool, InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let mut commands = Commands::new();
        for request in requests {
            if !describe(&mut commands, request)? {
                self.submit(host, port, &commands)?;
                commands.clear();
                if !describe(&mut commands, request)? {
                    // More than a whole submission.
                    return Err(REFUSED);
                }
            }
        }
        self.submit(host, port, &commands)
    }

    /// Submits `commands`, at most [`MOST`], and waits until the unit confirms them. O(their number), and the hardware's time; at
    /// most four times the host's patience.
    pub fn submit<H: Host, P: Port>(
        &self,
        host: &H,
        port: &P,
        commands: &[Command],
    ) -> Result<(), InvalidationError> {
        let before = self.failures.load(Ordering::Acquire);
        let began = host.now_ns();
        let answer = loop {
            if let Some(answer) = self.answers.claim(began) {
                break answer;
            }
            // All 512 submissions that there can be are waiting.
            let waited_ns = host.now_ns().saturating_sub(began);
            if waited_ns > host.patience_ns() {
                return Err(InvalidationError::TimedOut { waited_ns });
            }
            host.relax();
        };
        let result = self.submit_with(host, port, commands, &answer, before);
        self.answers.give_back(answer);
        result
    }

    fn submit_with<H: Host, P: Port>(
        &self,
        host: &H,
        port: &P,
        commands: &[Command],
        answer: &Answer,
        before: u64,
    ) -> Result<(), InvalidationError> {
        let frames = host.frames();
        let began = host.now_ns();
        let waited = || host.now_ns().saturating_sub(began);
        let count = commands.len() as u64 + 1;
        let reserved = self.ring.reserve(count, port, || {
            self.look_for_errors(frames, port);
            host.relax();
            waited() <= host.patience_ns()
        });
        let first = reserved.ok_or_else(|| InvalidationError::TimedOut { waited_ns: waited() })?;
        let wait = P::wait(answer.number(), self.answers.address(answer).get());
        for (place, command) in (first..).zip(commands.iter().copied().chain([wait])) {
            self.store(frames, self.ring.index(place), command);
        }
        self.ring.publish(first, count, port);
        let began = host.now_ns();
        let mut looks = 0_u32;
        while !self.answers.is_there(frames, answer) {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                self.look_for_errors(frames, port);
                self.checked(before)?;
                let waited_ns = host.now_ns().saturating_sub(began);
                // One more look: the caller may have been interrupted.
                if waited_ns > host.patience_ns() && !self.answers.is_there(frames, answer) {
                    return Err(InvalidationError::TimedOut { waited_ns });
                }
            }
            host.relax();
        }
        self.checked(before)
    }

    /// Stores `command` in the place at `index`.
    fn store<F: Frames>(&self, frames: &F, index: usize, command: Command) {
        self.commands.store(frames, index * self.width, command[0]);
        self.commands.store(frames, index * self.width + 1, command[1]);
    }

    /// An error if there was one since there were `before`.
    fn checked(&self, before: u64) -> Result<(), InvalidationError> {
        if self.failures.load(Ordering::Acquire) == before { Ok(()) } else { Err(*self.last.lock()) }
    }

    /// Asks the unit whether it has stopped, and lets it go on.
    #[cold]
    fn look_for_errors<F: Frames, P: Port>(&self, frames: &F, port: &P) {
        let command = |index: u32| self.commands.load(frames, index as usize * self.width);
        if port.failure(&command).is_none() {
            return;
        }
        // A CPU that finds another at it goes on waiting, and finds the count raised.
        let Some(_one_at_a_time) = self.mending.try_lock() else { return };
        // Again, under the lock: another CPU may have dealt with it.
        let Some(failure) = port.failure(&command) else { return };
        // First the count: of a submission whose command is taken out below, the failure must be counted when it is confirmed,
        // whatever this CPU has read of the unit.
        *self.last.lock() = failure.error;
        self.failures.fetch_add(1, Ordering::AcqRel);
        if let Some(bad) = failure.bad.filter(|bad| *bad < COMMANDS) {
            self.store(frames, bad as usize, P::NOTHING);
        }
        port.go_on(&failure);
        // What was rung while it had stopped it may not have taken.
        self.ring.ring_again(port);
    }
}

/// The smallest block of a power of two of 4 KiB pages, at a multiple of its size, that holds `range`: where it begins, and the
/// power. `None` where that is everything.
pub(crate) fn block_around(range: IovaRange) -> Option<(u64, u32)> {
    let (first, last) = (range.start().get() >> 12, range.last().get() >> 12);
    let order = u64::BITS - (first ^ last).leading_zeros();
    (order < 52).then(|| (first >> order << order << 12, order))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::Iova;

    use super::*;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), len).unwrap()
    }

    #[test]
    fn a_block_holds_its_range_and_no_half_of_it_does() {
        for (start, len) in [
            (0x1000, 0x1000),
            (0x1000, 0x2000),
            (0x3000, 0x5000),
            (0x20_0000, 0x20_0000),
            (0xfff0_0000, 1 << 40),
        ] {
            let asked = range(start, len);
            let (address, order) = block_around(asked).unwrap();
            let block = range(address, 4096 << order);
            assert_eq!(address % (4096 << order), 0);
            assert!(block.contains_range(asked), "{asked:?} in {block:?}");
            if order > 0 {
                let half = (4096 << order) / 2;
                assert!(!range(address, half).contains_range(asked));
                assert!(!range(address + half, half).contains_range(asked));
            }
        }
        let all = IovaRange::from_bounds(Iova::new(0), Iova::new(u64::MAX - 1)).unwrap();
        assert_eq!(block_around(all), None);
    }
}
