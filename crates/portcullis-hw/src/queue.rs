//! A ring of commands of 128 bits each, and the wait for their confirmation: VT-d's invalidation queue, AMD-Vi's command buffer, the
//! command queues of RISC-V's IOMMU and of the SMMUv3.
//!
//! A submission ends with a command that makes the unit store a number in a word that the submission has claimed; or, with an
//! SMMUv3, with one that the unit consumes when all before it is complete.
//!
//! **Errors.** A unit that meets a command that it does not know stops; VT-d, where a device does not answer, drops the
//! waits that are under way. The CPU that sees it puts a command that does nothing in the place of the bad one, counts
//! the failure, and then lets the unit go on. Each submission that was under way then reports an error, whether it was the
//! cause or not: it reads the count before it reserves and after it is confirmed, and the count is raised before the unit
//! may go on and confirm.

use arrayvec::ArrayVec;
use portcullis::addr::IovaRange;
use portcullis::invalidation::InvalidationError;
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

    /// The command that ends a submission: the unit stores `number` at `address`, a multiple of 8, when all before it is complete.
    /// Where it confirms by what it [has consumed](Queue::without_answers), both are 0, and the unit consumes the command then.
    fn wait(number: u32, address: u64) -> Command;

    /// Why the unit does not go on, where it has stopped, or has dropped waits; or what else is wrong that it wants to be told of.
    /// `command` reads the first word of the command at an index.
    fn failure(&self, command: &dyn Fn(u32) -> u64) -> Option<Failure>;

    /// Lets it go on after `failure`.
    fn go_on(&self, failure: &Failure);
}

/// Why a unit has stopped.
pub(crate) struct Failure {
    /// What submissions that are under way report; `None` where none of them is concerned.
    pub error: Option<InvalidationError>,
    /// The index of the command that it does not know, with the wrap bit, if there is one.
    pub bad: Option<u32>,
    /// What its status said.
    pub status: u32,
}

/// The ring, with the memory that the unit reads and writes.
#[derive(Debug)]
pub(crate) struct Queue {
    ring: CommandRing,
    /// One frame of commands.
    commands: Words,
    /// Where the unit confirms; where there is none, it confirms by what it has consumed.
    answers: Option<Answers>,
    /// Errors so far, and the last of them.
    failures: AtomicU64,
    last: Mutex<InvalidationError>,
    /// Held by the CPU that deals with one.
    mending: Mutex<()>,
}

impl Queue {
    /// The memory of a queue of [`COMMANDS`], whose unit stores what it confirms. The unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        let mut queue = Self::of(CommandRing::new(COMMANDS), frames)?;
        match Answers::new(frames) {
            Ok(answers) => queue.answers = Some(answers),
            Err(error) => {
                // SAFETY: of the line above; the unit was told nothing.
                unsafe { queue.free(frames) };
                return Err(error);
            }
        }
        Ok(queue)
    }

    /// The same of `size` commands, a power of two of at least 2 and at most [`COMMANDS`], whose unit counts with a wrap bit and
    /// confirms a command by consuming it.
    pub fn without_answers<F: Frames>(frames: &F, size: u32) -> Result<Self, UnitError> {
        Self::of(CommandRing::with_wrap_bit(size), frames)
    }

    fn of<F: Frames>(ring: CommandRing, frames: &F) -> Result<Self, UnitError> {
        Ok(Self {
            ring,
            commands: Words::new(frames, 1)?,
            answers: None,
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
            if let Some(answers) = self.answers {
                answers.free(frames);
            }
        }
    }

    /// Carries out `requests` in their order, in as few submissions as they fit into. `describe` adds what one asks for to the
    /// commands; where there is no room it adds nothing, and says `false`. A request that it refuses ends the call, with some of
    /// those before it carried out. Without a request the unit is asked for its confirmation all the same, as calls are in one order.
    pub fn carry_out<H: Host, R: Copy>(
        &self,
        host: &H,
        port: &impl Port,
        requests: impl IntoIterator<Item = R>,
        describe: impl Fn(&mut Commands, R) -> Result<bool, InvalidationError>,
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

    /// Submits `commands`, all of them with one wait where the ring is as long, and waits until the unit confirms them. O(their number),
    /// and the hardware's time; for each wait at most four times the host's patience.
    pub fn submit<H: Host>(
        &self,
        host: &H,
        port: &impl Port,
        commands: &[Command],
    ) -> Result<(), InvalidationError> {
        // One place is the wait's. No truncation: the ring is at most a frame.
        let most = (self.ring.room() - 1) as usize;
        if commands.len() <= most {
            return self.submit_piece(host, port, commands);
        }
        commands.chunks(most).try_for_each(|piece| self.submit_piece(host, port, piece))
    }

    fn submit_piece<H: Host>(
        &self,
        host: &H,
        port: &impl Port,
        commands: &[Command],
    ) -> Result<(), InvalidationError> {
        let before = self.failures.load(Ordering::Acquire);
        let Some(answers) = &self.answers else {
            return self.submit_with(host, port, commands, None, before);
        };
        let began = host.now_ns();
        let answer = loop {
            if let Some(answer) = answers.claim(began) {
                break answer;
            }
            // All 512 submissions that there can be are waiting.
            let waited_ns = host.now_ns().saturating_sub(began);
            if waited_ns > host.patience_ns() {
                return Err(InvalidationError::TimedOut { waited_ns });
            }
            host.relax();
        };
        let result = self.submit_with(host, port, commands, Some((answers, &answer)), before);
        answers.give_back(answer);
        result
    }

    fn submit_with<H: Host, P: Port>(
        &self,
        host: &H,
        port: &P,
        commands: &[Command],
        answer: Option<(&Answers, &Answer)>,
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
        let told = answer.map(|(answers, answer)| (answer.number(), answers.address(answer).get()));
        let (number, address) = told.unwrap_or_default();
        let wait = P::wait(number, address);
        for (place, command) in (first..).zip(commands.iter().copied().chain([wait])) {
            let index = self.ring.index(place) * 2;
            self.commands.store(frames, index, command[0]);
            self.commands.store(frames, index + 1, command[1]);
        }
        self.ring.publish(first, count, port);
        let is_confirmed = || match answer {
            Some((answers, answer)) => answers.is_there(frames, answer),
            None => self.ring.has_consumed(first + count - 1, port),
        };
        let began = host.now_ns();
        let mut looks = 0_u32;
        while !is_confirmed() {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                self.look_for_errors(frames, port);
                self.checked(before)?;
                let waited_ns = host.now_ns().saturating_sub(began);
                // One more look: the caller may have been interrupted.
                if waited_ns > host.patience_ns() && !is_confirmed() {
                    return Err(InvalidationError::TimedOut { waited_ns });
                }
            }
            host.relax();
        }
        self.checked(before)
    }

    /// An error if there was one since there were `before`.
    fn checked(&self, before: u64) -> Result<(), InvalidationError> {
        if self.failures.load(Ordering::Acquire) == before { Ok(()) } else { Err(*self.last.lock()) }
    }

    /// Asks the unit whether it has stopped, and lets it go on.
    #[cold]
    pub fn look_for_errors<F: Frames, P: Port>(&self, frames: &F, port: &P) {
        let command = |index: u32| self.commands.load(frames, index as usize * 2);
        if port.failure(&command).is_none() {
            return;
        }
        // A CPU that finds another at it goes on waiting, and finds the count raised.
        let Some(_one_at_a_time) = self.mending.try_lock() else { return };
        // Again, under the lock: another CPU may have dealt with it.
        let Some(failure) = port.failure(&command) else { return };
        if let Some(error) = failure.error {
            // First the count: of a submission whose command is taken out below, the failure must be counted when it is confirmed,
            // whatever this CPU has read of the unit.
            *self.last.lock() = error;
            self.failures.fetch_add(1, Ordering::AcqRel);
        }
        if let Some(place) = failure.bad.and_then(|bad| self.ring.place_of(bad)) {
            let index = self.ring.index(place) * 2;
            self.commands.store(frames, index, P::NOTHING[0]);
            self.commands.store(frames, index + 1, P::NOTHING[1]);
        }
        port.go_on(&failure);
        if failure.error.is_some() {
            // What was rung while it had stopped it may not have taken.
            self.ring.ring_again(port);
        }
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
