//! A ring of commands of 128 bits each, and the wait for their confirmation: VT-d's invalidation queue, AMD-Vi's command buffer, the
//! command queues of RISC-V's IOMMU and of the SMMUv3.
//!
//! A submission ends with a command that makes the unit store a number in a word that the submission has claimed; or, with an
//! SMMUv3, with one that the unit consumes when all before it is complete.
//!
//! VT-d's places may be of 256 bits. No command here uses the upper half, which stays zero.
//!
//! **Errors.** A unit that meets a command that it does not know stops; VT-d, where a device does not answer, drops the
//! waits that are under way. The CPU that sees it counts the failure, puts a command that does nothing in the place of the
//! bad one, and then lets the unit go on. Each submission that was under way then reports an error, whether it was the
//! cause or not: it reads the count before it reserves and after it is confirmed, and the count is raised before the unit
//! may go on and confirm. A submission ends with its confirmation even so, unless its wait was dropped: so all that is wrong
//! with its commands is met while it is under way, and fails no later one.

use arrayvec::ArrayVec;
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

/// Looks for the confirmation between two looks at the unit's status, which costs a microsecond on hardware.
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
    /// Where it confirms by what it [has consumed](Queue::without_answers), both are 0, and the unit consumes the command when all
    /// before it is complete.
    fn wait(number: u32, address: u64) -> Command;

    /// Why the unit does not go on, where it has stopped, or has dropped waits; or another error that must be acknowledged.
    /// `command` reads the first word of the command at an index.
    fn failure(&self, command: &dyn Fn(u32) -> u64) -> Option<Failure>;

    /// Lets it go on after `failure`.
    fn go_on(&self, failure: &Failure);
}

/// Why a unit has stopped.
pub(crate) struct Failure {
    /// What submissions that are under way report; `None` where none of them is concerned.
    pub error: Option<InvalidationError>,
    /// The index of the command that it does not know, with the wrap bit, if there is one. `None`, with an error: it has dropped
    /// waits, which are confirmed no more.
    pub bad: Option<u32>,
    /// What its status said.
    pub status: u32,
}

/// The failures that there were before a submission reserved its places.
#[derive(Debug, Clone, Copy)]
struct Before {
    failures: u64,
    drops: u64,
}

/// The ring, with the memory that the unit reads and writes.
#[derive(Debug)]
pub(crate) struct Queue {
    ring: CommandRing,
    /// [`COMMANDS`] places.
    commands: Words,
    /// Words of a place: 2 or 4.
    width: usize,
    /// Where the unit confirms; where there is none, it confirms by what it has consumed.
    answers: Option<Answers>,
    /// Failures so far; those of them that dropped waits, each counted here last; and what the last one was.
    failures: AtomicU64,
    drops: AtomicU64,
    last: Mutex<InvalidationError>,
    /// Held by the CPU that deals with one.
    mending: Mutex<()>,
}

impl Queue {
    /// The memory of a queue of [`COMMANDS`], whose unit stores what it confirms: one frame of commands. The unit does not know of
    /// it yet.
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Self::with_answers(frames, 2)
    }

    /// The same with places of four words each: two frames of commands.
    pub fn wide<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Self::with_answers(frames, 4)
    }

    fn with_answers<F: Frames>(frames: &F, width: usize) -> Result<Self, UnitError> {
        let mut queue = Self::of(CommandRing::new(COMMANDS)?, width, frames)?;
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
        Self::of(CommandRing::with_wrap_bit(size)?, 2, frames)
    }

    fn of<F: Frames>(ring: CommandRing, width: usize, frames: &F) -> Result<Self, UnitError> {
        Ok(Self {
            ring,
            commands: Words::new(frames, width / 2)?,
            width,
            answers: None,
            failures: AtomicU64::new(0),
            drops: AtomicU64::new(0),
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
    /// those before it carried out. Without a request the unit is asked for its confirmation all the same.
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

    /// Submits `commands`, all of them with one wait where they fit into the ring, and waits until the unit confirms them. O(their
    /// number), and the hardware's time; for each wait at most four times the host's patience.
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
        let before = Before {
            failures: self.failures.load(Ordering::Acquire),
            drops: self.drops.load(Ordering::Acquire),
        };
        let Some(answers) = &self.answers else {
            return self.submit_with(host, port, commands, None, before);
        };
        let began = host.now_ns();
        let answer = loop {
            if let Some(answer) = answers.claim(began) {
                break answer;
            }
            // 512 submissions wait already, one for each word.
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
        before: Before,
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
            self.store(frames, self.ring.index(place), command);
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
                if self.drops.load(Ordering::Acquire) != before.drops {
                    return Err(*self.last.lock());
                }
                let waited_ns = host.now_ns().saturating_sub(began);
                // One more look: the caller may have been interrupted.
                if waited_ns > host.patience_ns() && !is_confirmed() {
                    self.checked(before)?;
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

    /// An error if there was a failure since there were those of `before`.
    fn checked(&self, before: Before) -> Result<(), InvalidationError> {
        if self.failures.load(Ordering::Acquire) == before.failures { Ok(()) } else { Err(*self.last.lock()) }
    }

    /// Asks the unit whether it has stopped, and lets it go on. Waits for no CPU, so that an interrupt handler may call it.
    #[cold]
    pub fn look_for_errors<F: Frames, P: Port>(&self, frames: &F, port: &P) {
        let first_word = |index: u32| self.ring.index(index.into()) * self.width;
        let command = |index| self.commands.load(frames, first_word(index));
        if port.failure(&command).is_none() {
            return;
        }
        // A CPU that finds another at it goes on waiting, and finds the count raised.
        let Some(_one_at_a_time) = self.mending.try_lock() else { return };
        // Again, under the lock: another CPU may have dealt with it.
        let Some(failure) = port.failure(&command) else { return };
        if let Some(error) = failure.error {
            // The count comes first: a submission whose command is replaced below must find the failure counted when it is
            // confirmed, even if the unit goes on by itself. Where a CPU just reads the last error, it reads the one before.
            if let Some(mut last) = self.last.try_lock() {
                *last = error;
            }
            self.failures.fetch_add(1, Ordering::AcqRel);
            if failure.bad.is_none() {
                self.drops.fetch_add(1, Ordering::AcqRel);
            }
        }
        if let Some(place) = failure.bad.and_then(|bad| self.ring.place_of(bad)) {
            self.store(frames, self.ring.index(place), P::NOTHING);
        }
        port.go_on(&failure);
        if failure.error.is_some() {
            // The unit may have missed doorbells while it had stopped.
            self.ring.ring_again(port);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::boxed::Box;
    use alloc::vec::Vec;

    use portcullis::addr::PhysAddr;
    use portcullis::platform::Table;

    use super::*;
    use crate::fake::Memory;
    use crate::sync::AtomicBool;

    /// Memory that the unit sees word by word, as each is cleaned: what the queue had counted whenever the unit was shown a command
    /// that does nothing.
    struct Shown {
        memory: Memory,
        queue: Mutex<Option<&'static Queue>>,
        counted: Mutex<Vec<u64>>,
    }

    // SAFETY: the memory's own promises.
    unsafe impl Frames for Shown {
        const COHERENT: bool = false;

        fn alloc(&self, count: usize) -> Option<PhysAddr> {
            self.memory.alloc(count)
        }

        unsafe fn free(&self, first: PhysAddr, count: usize) {
            // SAFETY: the caller's promise.
            unsafe { self.memory.free(first, count) };
        }

        unsafe fn table(&self, frame: PhysAddr) -> &Table {
            // SAFETY: the caller's promise.
            unsafe { self.memory.table(frame) }
        }

        fn clean(&self, words: &[AtomicU64]) {
            if let ([word], Some(queue)) = (words, *self.queue.lock())
                && word.load(Ordering::Relaxed) == Stopped::NOTHING[0]
            {
                self.counted.lock().push(queue.failures.load(Ordering::Relaxed));
            }
        }
    }

    /// A unit that has stopped at the first command.
    struct Stopped(AtomicBool);

    impl Doorbell for Stopped {
        fn ring(&self, _: u32) {}

        fn head(&self) -> u32 {
            0
        }
    }

    impl Port for Stopped {
        const NOTHING: Command = [0xabcd, 1];

        fn wait(_: u32, _: u64) -> Command {
            [2; 2]
        }

        fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
            let failure = Failure { error: Some(REFUSED), bad: Some(0), status: 0 };
            self.0.load(Ordering::Relaxed).then_some(failure)
        }

        fn go_on(&self, _: &Failure) {
            self.0.store(false, Ordering::Relaxed);
        }
    }

    /// As a unit may go on by itself when it finds a command that it knows.
    #[test]
    fn a_failure_is_counted_before_the_unit_is_shown_another_command() {
        let frames =
            Shown { memory: Memory::new(4), queue: Mutex::new(None), counted: Mutex::new(Vec::new()) };
        let queue: &'static Queue = Box::leak(Box::new(Queue::new(&frames).unwrap()));
        *frames.queue.lock() = Some(queue);
        let unit = Stopped(AtomicBool::new(true));
        queue.look_for_errors(&frames, &unit);
        assert_eq!(*frames.counted.lock(), [1]);
        assert!(!unit.0.load(Ordering::Relaxed), "it goes on");
        queue.look_for_errors(&frames, &unit);
        assert_eq!(queue.failures.load(Ordering::Relaxed), 1);
    }
}
