//! Queued invalidation: what a domain asks for, as descriptors, and the wait for their confirmation.
//!
//! A submission ends with a wait descriptor, which makes the unit store a number in a word that the submission has claimed.
//!
//! **Errors.** A unit that meets a descriptor that it does not know stops, and one whose device does not answer drops the
//! waits that are under way. The CPU that sees it puts a descriptor that does nothing in the place of the bad one, counts
//! the failure, and then lets the unit go on. Each submission that was under way then reports an error, whether it was the
//! cause or not: it reads the count before it reserves and after it is confirmed, and the count is raised before the unit
//! may go on and confirm.

use arrayvec::ArrayVec;
use portcullis::addr::{DomainId, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, Request};
use portcullis::platform::Frames;

use super::layout::{QUEUE_DESCRIPTORS, cap, descriptor, fsts, queue_index, queue_tail, reg};
use crate::answers::{Answer, Answers};
use crate::command_ring::{CommandRing, Doorbell};
use crate::frames::Words;
use crate::host::{Host, Registers, UnitError};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Descriptors that go in one submission, besides the wait.
pub(super) const MOST: usize = 127;

/// Looks at memory before the first look at the unit's fault status, which costs a microsecond on hardware.
const LOOKS: u32 = 64;

/// What was asked for, as the unit takes it.
pub(super) type Descriptors = ArrayVec<[u64; 2], MOST>;

/// The invalidation queue.
#[derive(Debug)]
pub(super) struct Queue {
    ring: CommandRing,
    /// One frame of descriptors.
    descriptors: Words,
    answers: Answers,
    /// Errors so far, and the last of them. One CPU at a time deals with one.
    failures: AtomicU64,
    last: Mutex<InvalidationError>,
}

/// The unit's side of the ring.
struct Bell<'a, R>(&'a R);

impl<R: Registers> Doorbell for Bell<'_, R> {
    fn ring(&self, tail: u32) {
        self.0.write64(reg::IQT, queue_tail(tail));
    }

    fn head(&self) -> u32 {
        let head = self.0.read64(reg::IQH);
        // All ones where nothing answers.
        if head == u64::MAX { u32::MAX } else { queue_index(head) as u32 }
    }
}

impl Queue {
    /// The memory of a queue. The unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        let descriptors = Words::new(frames, 1)?;
        let answers = match Answers::new(frames) {
            Ok(answers) => answers,
            Err(error) => {
                // SAFETY: of the line above; the unit was told nothing.
                unsafe { descriptors.free(frames) };
                return Err(error);
            }
        };
        Ok(Self {
            ring: CommandRing::new(QUEUE_DESCRIPTORS),
            descriptors,
            answers,
            failures: AtomicU64::new(0),
            last: Mutex::new(InvalidationError::Abandoned),
        })
    }

    /// What the unit's address register takes.
    pub fn address(&self) -> u64 {
        self.descriptors.phys().get()
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is of `frames`, and the unit's queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: the caller's promise.
        unsafe {
            self.descriptors.free(frames);
            self.answers.free(frames);
        }
    }

    /// Submits the descriptors and waits until the unit confirms them. O(their number), and the hardware's time; at most twice the
    /// host's patience.
    pub fn submit<H: Host>(&self, host: &H, commands: &[[u64; 2]]) -> Result<(), InvalidationError> {
        let before = self.failures.load(Ordering::Acquire);
        // None is left where 512 submissions wait already.
        let answer = self.answers.claim(before).ok_or(InvalidationError::TimedOut { waited_ns: 0 })?;
        let result = self.submit_with(host, commands, &answer, before);
        self.answers.give_back(answer);
        result
    }

    fn submit_with<H: Host>(
        &self,
        host: &H,
        commands: &[[u64; 2]],
        answer: &Answer,
        before: u64,
    ) -> Result<(), InvalidationError> {
        let (frames, bell) = (host.frames(), Bell(host.registers()));
        let began = host.now_ns();
        let waited = || host.now_ns().saturating_sub(began);
        let count = commands.len() as u64 + 1;
        let reserved = self.ring.reserve(count, &bell, || {
            self.look_for_errors(host);
            host.relax();
            waited() <= host.patience_ns()
        });
        let first = reserved.ok_or_else(|| InvalidationError::TimedOut { waited_ns: waited() })?;
        let wait = descriptor::wait(answer.number(), self.answers.address(answer).get());
        for (place, command) in (first..).zip(commands.iter().copied().chain([wait])) {
            let index = self.ring.index(place) * 2;
            self.descriptors.store(frames, index, command[0]);
            self.descriptors.store(frames, index + 1, command[1]);
        }
        self.ring.publish(first, count, &bell);
        let began = host.now_ns();
        let mut looks = 0_u32;
        while !self.answers.is_there(frames, answer) {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                self.look_for_errors(host);
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

    /// An error if there was one since there were `before`.
    fn checked(&self, before: u64) -> Result<(), InvalidationError> {
        if self.failures.load(Ordering::Acquire) == before { Ok(()) } else { Err(*self.last.lock()) }
    }

    /// Asks the unit whether it has stopped, and lets it go on.
    #[cold]
    fn look_for_errors<H: Host>(&self, host: &H) {
        let (registers, frames) = (host.registers(), host.frames());
        let stopped = |status: u32| status != u32::MAX && status & (fsts::IQE | fsts::ITE) != 0;
        if !stopped(registers.read32(reg::FSTS)) {
            return;
        }
        let mut last = self.last.lock();
        // Again, under the lock: another CPU may have dealt with it.
        let status = registers.read32(reg::FSTS);
        if !stopped(status) {
            return;
        }
        let details = registers.read64(reg::IQERCD);
        let waited_ns = host.patience_ns();
        *last = if status & fsts::IQE != 0 {
            let bad = queue_index(registers.read64(reg::IQH)) as usize * 2;
            self.descriptors.store(frames, bad, descriptor::NOTHING[0]);
            self.descriptors.store(frames, bad + 1, descriptor::NOTHING[1]);
            InvalidationError::Rejected { code: details as u32 & 0xf }
        } else {
            InvalidationError::DeviceTimedOut { device: (details >> 32) as u32 & 0xffff, waited_ns }
        };
        self.failures.fetch_add(1, Ordering::AcqRel);
        registers.write32(reg::FSTS, status & (fsts::IQE | fsts::ITE | fsts::ICE));
    }
}

/// Adds what `request` asks for to `out`, for a unit of these capabilities. Nothing, and `false`, where there is no room.
pub(super) fn describe(out: &mut Descriptors, caps: u64, drain: u64, request: &Request) -> bool {
    let DomainId(domain) = request.domain;
    let descriptor = match request.invalidation {
        Invalidation::Domain => descriptor::iotlb_domain(drain, domain),
        Invalidation::Range { range, leaf_only } => match block_around(range) {
            Some((address, order)) if caps & cap::PSI != 0 && order <= cap::mamv(caps) => {
                descriptor::iotlb_pages(drain, domain, address, order, leaf_only)
            }
            _ => descriptor::iotlb_domain(drain, domain),
        },
        Invalidation::DeviceTlb { device, range } => {
            // All addresses: the largest block that the descriptor can say.
            let (address, order) = range.and_then(block_around).unwrap_or((0, 52));
            descriptor::device_tlb(device.0 as u16, address, order)
        }
    };
    out.try_push(descriptor).is_ok()
}

/// The smallest block of a power of two of 4 KiB pages, at a multiple of its size, that holds `range`: where it begins, and the
/// power. `None` where that is everything.
fn block_around(range: IovaRange) -> Option<(u64, u32)> {
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

    #[test]
    fn a_unit_without_page_selective_invalidation_forgets_the_domain() {
        let request = |range| Request {
            domain: DomainId(7),
            invalidation: Invalidation::Range { range, leaf_only: true },
        };
        let described = |caps, range| {
            let mut out = Descriptors::new();
            assert!(describe(&mut out, caps, 0, &request(range)));
            out[0]
        };
        let page = range(0x5000, 0x1000);
        assert_eq!(described(0, page), descriptor::iotlb_domain(0, 7));
        assert_eq!(described(cap::PSI, page), descriptor::iotlb_pages(0, 7, 0x5000, 0, true));
        // A mask of at most 2 pages.
        let caps = cap::PSI | 1 << 48;
        assert_eq!(described(caps, range(0x4000, 0x2000)), descriptor::iotlb_pages(0, 7, 0x4000, 1, true));
        assert_eq!(described(caps, range(0x5000, 0x2000)), descriptor::iotlb_domain(0, 7));
    }
}
