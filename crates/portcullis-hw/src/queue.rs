//! A ring of 128-bit commands, and the wait for their confirmation: VT-d's invalidation queue, AMD-Vi's command buffer, the command queues
//! of the RISC-V IOMMU and of the SMMUv3.
//!
//! A submission ends with a command that makes the unit store a number in a status word that the submission has claimed; on an SMMUv3, with
//! one that the unit consumes after all earlier commands are complete.
//!
//! VT-d's commands may have 256 bits. No command here uses the upper half, which stays zero.
//!
//! **Errors** fail every outstanding submission: see [`Failures`]. A failed submission still waits for its confirmation, unless its wait
//! was dropped: so the unit meets all its bad commands meanwhile, and they fail no later submission.
//!
//! **Panics** of the host end a submission at any point. Drop guards release what it has claimed, and publish what it has reserved, as
//! no-ops: otherwise no doorbell would ever cover a later command.

use arrayvec::ArrayVec;
use portcullis::invalidation::InvalidationError;
use portcullis::platform::Frames;

use crate::answers::{Answer, Answers};
use crate::command_ring::CommandRing;
use crate::failures::{Before, Failures};
use crate::frames::Words;
use crate::host::{Host, UnitError};

pub(crate) use crate::failures::{Command, Failure, Port};

/// Commands in the ring: one frame of them.
pub(crate) const COMMANDS: u32 = 256;

/// The most commands of one submission, besides the wait.
pub(crate) const MOST: usize = 127;

/// Polls of the status word between two reads of the status register, which take a microsecond on hardware.
const LOOKS: u32 = 64;

/// The error of a request that no unit of this kind can carry out: its device or domain number is out of range.
pub(crate) const REFUSED: InvalidationError = InvalidationError::Rejected { code: u32::MAX };

/// Commands of a request.
pub(crate) type Commands = ArrayVec<Command, MOST>;

/// The ring, and the memory that the unit reads and writes.
#[derive(Debug)]
pub(crate) struct Queue {
    ring: CommandRing,
    /// [`COMMANDS`] places.
    commands: Words,
    /// Words of a place: 2 or 4.
    width: usize,
    /// Status words; `None` if the unit confirms by consuming.
    answers: Option<Answers>,
    failures: Failures,
}

/// Places that a submission has reserved, and not yet published. Dropped if the host panics: then they are published as no-ops. (If the
/// host panics again meanwhile, Rust aborts.)
struct Reserved<'a, F: Frames, P: Port> {
    queue: &'a Queue,
    frames: &'a F,
    port: &'a P,
    first: u64,
    count: u64,
}

impl<F: Frames, P: Port> Reserved<'_, F, P> {
    fn publish(self, commands: impl Iterator<Item = Command>) {
        self.fill(commands);
        let Self { queue, port, first, count, .. } = *core::mem::ManuallyDrop::new(self);
        queue.ring.publish(first, count, port);
    }

    fn fill(&self, commands: impl Iterator<Item = Command>) {
        for (place, command) in (self.first..self.first + self.count).zip(commands) {
            self.queue.store(self.frames, self.queue.ring.index(place), command);
        }
    }
}

impl<F: Frames, P: Port> Drop for Reserved<'_, F, P> {
    fn drop(&mut self) {
        self.fill(core::iter::repeat(P::NOTHING));
        self.queue.ring.publish(self.first, self.count, self.port);
    }
}

impl Queue {
    /// A queue of [`COMMANDS`], whose unit stores confirmations: one frame of commands. The unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Self::with_answers(frames, 2)
    }

    /// The same with places of four words: two frames of commands.
    pub fn wide<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Self::with_answers(frames, 4)
    }

    fn with_answers<F: Frames>(frames: &F, width: usize) -> Result<Self, UnitError> {
        let mut queue = Self::of(CommandRing::new(COMMANDS)?, width, frames)?;
        match Answers::new(frames) {
            Ok(answers) => queue.answers = Some(answers),
            Err(error) => {
                // SAFETY: 1: allocated above from `frames`. 2: the unit was not told of it.
                unsafe { queue.free(frames) };
                return Err(error);
            }
        }
        Ok(queue)
    }

    /// A queue of `size` commands, a power of two of at least 2 and at most [`COMMANDS`], whose unit counts with a wrap bit and confirms a
    /// command by consuming it.
    pub fn without_answers<F: Frames>(frames: &F, size: u32) -> Result<Self, UnitError> {
        Self::of(CommandRing::with_wrap_bit(size)?, 2, frames)
    }

    fn of<F: Frames>(ring: CommandRing, width: usize, frames: &F) -> Result<Self, UnitError> {
        Ok(Self {
            ring,
            commands: Words::new(frames, width / 2)?,
            width,
            answers: None,
            failures: Failures::new(),
        })
    }

    /// The value of the unit's address register.
    pub fn address(&self) -> u64 {
        self.commands.phys().get()
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The unit's queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe {
            self.commands.free(frames);
            if let Some(answers) = self.answers {
                answers.free(frames);
            }
        }
    }

    /// Carries out `requests` in order, in as few submissions as they fit into. `describe` appends a request's commands; without room it
    /// appends nothing, and returns `false`. A request that it refuses ends the call, with some of the earlier ones carried out. Without
    /// requests the call still waits for one confirmation.
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
                    // Larger than a whole submission.
                    return Err(REFUSED);
                }
            }
        }
        self.submit(host, port, &commands)
    }

    /// Submits `commands`, all of them with one wait if they fit into the ring, and waits for the confirmation. O(their number), and the
    /// hardware's time; for each wait at most four times the host's patience.
    pub fn submit<H: Host>(
        &self,
        host: &H,
        port: &impl Port,
        commands: &[Command],
    ) -> Result<(), InvalidationError> {
        // One place is for the wait. No truncation: the ring is at most a frame.
        let most = (self.ring.room() - 1) as usize;
        host.undisturbed(|| {
            if commands.len() <= most {
                return self.submit_piece(host, port, commands);
            }
            commands.chunks(most).try_for_each(|piece| self.submit_piece(host, port, piece))
        })
    }

    fn submit_piece<H: Host>(
        &self,
        host: &H,
        port: &impl Port,
        commands: &[Command],
    ) -> Result<(), InvalidationError> {
        let before = self.failures.so_far();
        let Some(answers) = &self.answers else {
            return self.submit_with(host, port, commands, None, before);
        };
        let began = host.now_ns();
        let answer = loop {
            if let Some(answer) = answers.claim(began) {
                break answer;
            }
            // 512 submissions already wait, one for each status word.
            let waited_ns = host.now_ns().saturating_sub(began);
            if waited_ns > host.patience_ns() {
                return Err(InvalidationError::TimedOut { waited_ns });
            }
            host.relax();
        };
        self.submit_with(host, port, commands, Some((answers, &answer)), before)
    }

    fn submit_with<H: Host, P: Port>(
        &self,
        host: &H,
        port: &P,
        commands: &[Command],
        answer: Option<(&Answers, &Answer<'_>)>,
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
        let reserved = Reserved { queue: self, frames, port, first, count };
        let told = answer.map(|(answers, answer)| (answer.number(), answers.address(answer).get()));
        let (number, address) = told.unwrap_or_default();
        let wait = P::wait(number, address);
        reserved.publish(commands.iter().copied().chain([wait]));
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
                self.failures.dropped_since(before)?;
                let waited_ns = host.now_ns().saturating_sub(began);
                // Check once more: the caller may have been interrupted since the last poll.
                if waited_ns > host.patience_ns() && !is_confirmed() {
                    self.failures.since(before)?;
                    return Err(InvalidationError::TimedOut { waited_ns });
                }
            }
            host.relax();
        }
        self.failures.since(before)
    }

    /// Waits until the unit confirms that all submitted commands are complete. After `Ok` it stores no further confirmation. Waits up to
    /// eight times the host's patience.
    ///
    /// # Errors
    /// [`UnitError::Unconfirmed`]: it may still store one, even when its queue is off.
    pub fn settle<H: Host>(&self, host: &H, port: &impl Port) -> Result<(), UnitError> {
        // Earlier outstanding work may fail the first wait; that says nothing of the second.
        let settled = self.submit(host, port, &[]).or_else(|_| self.submit(host, port, &[]));
        settled.map_err(UnitError::Unconfirmed)
    }

    fn store<F: Frames>(&self, frames: &F, index: usize, command: Command) {
        self.commands.store(frames, index * self.width, command[0]);
        self.commands.store(frames, index * self.width + 1, command[1]);
    }

    /// Checks whether the unit has stopped, and resumes it. Does not wait for a CPU that does the same.
    #[cold]
    pub fn look_for_errors<F: Frames, P: Port>(&self, frames: &F, port: &P) {
        let command = |index: u32| self.commands.load(frames, self.ring.index(index.into()) * self.width);
        self.failures.look(&self.ring, port, &command, |index| self.store(frames, index, P::NOTHING));
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
