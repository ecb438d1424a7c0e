//! The request queue: many CPUs send requests and wait for their answers at the same time.
//!
//! A CPU takes the lock to write a batch of requests and make it available, rings the doorbell without it, and then waits only for the last
//! answer of its batch. No lock is held while the device works: other CPUs' batches are outstanding at the same time, and a CPU that finds
//! answers in the used ring notes all of them, also other CPUs'.
//!
//! A request has a *slot*: two descriptors, and 128 bytes that the device reads and writes. The device may answer in any order, and
//! guarantees no order: of two requests that need one, the second is sent after the first is answered.
//!
//! **Time-outs.** A request that was not answered in time is *overdue*: the device may still carry it out. So nothing more is sent until it
//! is answered: its late effect always comes before later requests. A batch whose sender unwound by the host's panic is overdue, too:
//! no caller waits for its answers.

use alloc::boxed::Box;
use alloc::vec::Vec;

use arrayvec::ArrayVec;
use portcullis::platform::Frames;

use super::layout::request::{self, Request};
use super::layout::{answer, ring};
use super::pci::NarrowRegisters;
use super::ring::Ring;
use crate::frames::Words;
use crate::host::{Host, UnitError};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Requests of one doorbell.
pub(super) const BATCH: usize = 64;

/// Words of a slot, and the index of the word with the answer.
const SLOT_WORDS: usize = 16;
const ANSWER: usize = 15;

/// Polls of memory before the first read of the clock.
const LOOKS: u32 = 64;

/// States of a slot. An answer is `ANSWERED` plus the status.
const FREE: u64 = 0;
const SENT: u64 = 1;
const OVERDUE: u64 = 2;
const ANSWERED: u64 = 0x100;

/// Why some requests were not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The device did not answer in time. The requests may still take effect.
    TimedOut { waited_ns: u64 },
    /// The request with this index in the batch is the first that was refused.
    Refused { index: usize, status: u8 },
}

#[derive(Debug)]
pub(super) struct Requests {
    ring: Ring,
    slots: Words,
    states: Box<[AtomicU64]>,
    state: Mutex<State>,
    /// A copy of the one in `State`, readable without the lock.
    seen: AtomicU64,
}

#[derive(Debug)]
struct State {
    /// Entries made available so far, and used entries seen, in the rings' counts.
    available: u16,
    seen: u16,
    free: Vec<u16>,
    overdue: usize,
    /// The device may not have been told of all available entries, because the host panicked.
    is_unrung: bool,
}

/// A batch that was sent. Dropped if the host panics: then what is not answered is overdue.
struct Sent<'a, F: Frames> {
    requests: &'a Requests,
    frames: &'a F,
    slots: ArrayVec<u16, BATCH>,
}

impl<F: Frames> Drop for Sent<'_, F> {
    fn drop(&mut self) {
        if self.slots.is_empty() {
            // Nothing was sent.
            return;
        }
        // No caller gets the answers.
        let _ = self.requests.finish(self.frames, &self.slots, Ok(()), &[]);
        self.requests.state.lock().is_unrung = true;
    }
}

impl Requests {
    /// A queue of `size` descriptors. The device does not know of it yet.
    pub fn new<F: Frames>(frames: &F, size: u16, doorbell: usize) -> Result<Self, UnitError> {
        // A probe needs one more descriptor: the last.
        let count = usize::from((size - 1) / 2);
        let ring = Ring::new(frames, size, super::layout::REQUESTS, doorbell)?;
        let bytes = count * SLOT_WORDS * 8;
        let slots = match Words::new(frames, bytes.div_ceil(4096)) {
            Ok(slots) => slots,
            Err(error) => {
                // SAFETY: 1: allocated above from `frames`. 2: the device was not told of it.
                unsafe { ring.free(frames) };
                return Err(error);
            }
        };
        let state = State {
            available: 0,
            seen: 0,
            free: (0..count as u16).rev().collect(),
            overdue: 0,
            is_unrung: false,
        };
        Ok(Self {
            ring,
            slots,
            states: (0..count).map(|_| AtomicU64::new(FREE)).collect(),
            state: Mutex::new(state),
            seen: AtomicU64::new(0),
        })
    }

    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The device's queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe {
            self.ring.free(frames);
            self.slots.free(frames);
        }
    }

    /// Sends `requests`, at most [`BATCH`] with one doorbell, and waits for the answers. If one is refused, the others of its doorbell may
    /// have been carried out, and later ones are not sent. Statuses in `fine` count as success. Takes at most twice the host's patience for
    /// each doorbell.
    pub fn carry_out<H: Host>(
        &self,
        host: &H,
        requests: impl IntoIterator<Item = Request>,
        fine: &[u8],
    ) -> Result<(), Failure>
    where
        H::Registers: NarrowRegisters,
    {
        let mut requests = requests.into_iter().peekable();
        let mut before = 0;
        while requests.peek().is_some() {
            let batch = self.send(host, None, &mut requests)?;
            let len = batch.slots.len();
            self.wait(host, batch, fine).map_err(|failure| match failure {
                Failure::Refused { index, status } => Failure::Refused { index: before + index, status },
                timed_out @ Failure::TimedOut { .. } => timed_out,
            })?;
            before += len;
        }
        Ok(())
    }

    /// The same for a probe, with `len` bytes at `address` for the endpoint's properties. One at a time.
    pub fn probe<H: Host>(&self, host: &H, probe: Request, properties: (u64, u32)) -> Result<(), Failure>
    where
        H::Registers: NarrowRegisters,
    {
        let batch = self.send(host, Some(properties), &mut [probe].into_iter().peekable())?;
        self.wait(host, batch, &[answer::OK])
    }

    /// Sends a batch: as many of `requests` as there are slots for, at least one. Waits for a slot, and until nothing is overdue.
    fn send<'a, H: Host>(
        &'a self,
        host: &'a H,
        properties: Option<(u64, u32)>,
        requests: &mut core::iter::Peekable<impl Iterator<Item = Request>>,
    ) -> Result<Sent<'a, H::Frames>, Failure>
    where
        H::Registers: NarrowRegisters,
    {
        let (frames, began) = (host.frames(), host.now_ns());
        let mut batch = Sent { requests: self, frames, slots: ArrayVec::new() };
        loop {
            let is_unrung = {
                let mut state = self.state.lock();
                self.note_answers(frames, &mut state);
                if state.overdue == 0 && !state.free.is_empty() {
                    while !batch.slots.is_full()
                        && requests.peek().is_some()
                        && let Some(slot) = state.free.pop()
                    {
                        let Some(request) = requests.next() else { break };
                        self.write(frames, slot, &request, properties);
                        self.ring.offer(frames, state.available, slot * 2);
                        state.available = state.available.wrapping_add(1);
                        batch.slots.push(slot);
                    }
                    self.ring.publish(frames, state.available);
                    break;
                }
                if state.is_unrung {
                    self.ring.publish(frames, state.available);
                }
                core::mem::take(&mut state.is_unrung)
            };
            if is_unrung {
                self.ring.notify(host.registers());
            }
            let waited_ns = host.now_ns().saturating_sub(began);
            if waited_ns > host.patience_ns() {
                return Err(Failure::TimedOut { waited_ns });
            }
            host.relax();
        }
        self.ring.notify(host.registers());
        Ok(batch)
    }

    fn write<F: Frames>(&self, frames: &F, slot: u16, request: &Request, properties: Option<(u64, u32)>) {
        let first = usize::from(slot) * SLOT_WORDS;
        // Later words are always 0.
        for (index, word) in request.words.iter().enumerate() {
            self.slots.store(frames, first + index, *word);
        }
        // A stale answer cannot be taken for a new one: no status is so high.
        self.slots.store(frames, first + ANSWER, u64::MAX);
        self.states[usize::from(slot)].store(SENT, Ordering::Relaxed);
        let at = |word: usize| self.slots.phys().get() + (first + word) as u64 * 8;
        let (head, tail, spare) = (slot * 2, slot * 2 + 1, self.ring.size() - 1);
        let second = if properties.is_some() { spare } else { tail };
        self.ring.describe(frames, head, (at(0), request.bytes), (ring::NEXT, second));
        if let Some(properties) = properties {
            self.ring.describe(frames, spare, properties, (ring::NEXT | ring::DEVICE_WRITES, tail));
        }
        self.ring.describe(frames, tail, (at(ANSWER), request::TAIL_BYTES), (ring::DEVICE_WRITES, 0));
    }

    /// Notes all new answers, also to other CPUs' requests.
    fn note_answers<F: Frames>(&self, frames: &F, state: &mut State) {
        let used = self.ring.used(frames);
        if used.wrapping_sub(state.seen) > self.ring.size() {
            // More than are possible: invalid.
            return;
        }
        while state.seen != used {
            let id = self.ring.used_entry(frames, state.seen);
            state.seen = state.seen.wrapping_add(1);
            let slot = (id / 2) as usize;
            let Some(kept) = self.states.get(slot).filter(|_| id.is_multiple_of(2)) else { continue };
            match kept.load(Ordering::Relaxed) {
                SENT => {
                    let tail = self.slots.load_from_unit(frames, slot * SLOT_WORDS + ANSWER);
                    // Release: what the device has done happens before what the CPU that loads this does next.
                    kept.store(ANSWERED | u64::from(request::status(tail)), Ordering::Release);
                }
                OVERDUE => {
                    kept.store(FREE, Ordering::Relaxed);
                    state.overdue -= 1;
                    state.free.push(slot as u16);
                }
                // The device repeats itself.
                _ => {}
            }
        }
        self.seen.store(u64::from(state.seen), Ordering::Relaxed);
    }

    fn wait<H: Host>(&self, host: &H, batch: Sent<'_, H::Frames>, fine: &[u8]) -> Result<(), Failure> {
        let (frames, began) = (host.frames(), host.now_ns());
        let is_answered =
            |slot: &u16| self.states[usize::from(*slot)].load(Ordering::Acquire) & ANSWERED != 0;
        let mut looks = 0_u32;
        let mut waiting = batch.slots.iter().rev().copied().collect::<ArrayVec<u16, BATCH>>();
        let result = loop {
            while waiting.last().is_some_and(is_answered) {
                waiting.pop();
            }
            if waiting.is_empty() {
                break Ok(());
            }
            if u64::from(self.ring.used(frames)) != self.seen.load(Ordering::Relaxed) {
                self.note_answers(frames, &mut self.state.lock());
                // An impossible answer is not noted: the clock goes on.
                if waiting.last().is_some_and(is_answered) {
                    continue;
                }
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                let waited_ns = host.now_ns().saturating_sub(began);
                if waited_ns > host.patience_ns() {
                    break Err(waited_ns);
                }
            }
            host.relax();
        };
        let batch = core::mem::ManuallyDrop::new(batch);
        self.finish(frames, &batch.slots, result, fine)
    }

    /// Frees the slots of a batch, except unanswered ones, which are overdue.
    fn finish<F: Frames>(
        &self,
        frames: &F,
        batch: &[u16],
        waited: Result<(), u64>,
        fine: &[u8],
    ) -> Result<(), Failure> {
        let mut state = self.state.lock();
        // Once more: the caller may have been interrupted.
        self.note_answers(frames, &mut state);
        let mut result = Ok(());
        for (index, slot) in batch.iter().enumerate() {
            let kept = &self.states[usize::from(*slot)];
            let status = kept.load(Ordering::Acquire);
            if status & ANSWERED == 0 {
                kept.store(OVERDUE, Ordering::Relaxed);
                state.overdue += 1;
                result = Err(Failure::TimedOut { waited_ns: waited.err().unwrap_or(0) });
                continue;
            }
            kept.store(FREE, Ordering::Relaxed);
            state.free.push(*slot);
            let status = status as u8;
            if !fine.contains(&status) && result.is_ok() {
                result = Err(Failure::Refused { index, status });
            }
        }
        result
    }
}
