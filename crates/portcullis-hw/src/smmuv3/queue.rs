//! The command queue: what a domain asks for, as commands, and the wait until they are carried out.
//!
//! A submission ends with CMD_SYNC, which the unit consumes when all before it is complete. A CPU
//! waits until the unit's index has passed its own.
//!
//! **Errors.** A unit that meets a command that it does not take stops there and says so in GERROR.
//! The CPU that sees it puts another CMD_SYNC in the place of the bad command, counts the failure,
//! and then acknowledges, which lets the unit go on. Each submission that was under way then
//! reports an error, whether it was the cause or not: it reads the count before it reserves and
//! after it is confirmed, and the count is raised before the unit may go on and confirm.

use arrayvec::ArrayVec;
use portcullis::addr::{DomainId, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, Request};
use portcullis::platform::Frames;

use super::Stage;
use super::layout::{BASE_ADDRESS, INDEX, command, command_error, gerror, reg};
use crate::command_ring::{CommandRing, Doorbell};
use crate::frames::Words;
use crate::host::{Host, Registers, UnitError};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// The most commands in the queue, as a power of two: one frame of them.
const MOST_BITS: u32 = 8;

/// Commands that go in one submission, besides CMD_SYNC.
const MOST: usize = 127;

/// Pages that are named one by one; of more, a unit that takes no ranges forgets the whole domain.
const PAGES: u64 = 32;

/// Looks at the unit's index before the first look at its errors.
const LOOKS: u32 = 64;

/// What was asked for, as the unit takes it.
pub(super) type Commands = ArrayVec<[u64; 2], MOST>;

/// The command queue.
#[derive(Debug)]
pub(super) struct Queue {
    ring: CommandRing,
    commands: Words,
    bits: u32,
    /// Errors so far, and the last of them. One CPU at a time deals with one.
    failures: AtomicU64,
    last: Mutex<InvalidationError>,
}

/// The unit's side of the ring.
struct Bell<'a, R>(&'a R);

impl<R: Registers> Doorbell for Bell<'_, R> {
    fn ring(&self, tail: u32) {
        self.0.write32(reg::CMDQ_PROD, tail);
    }

    fn head(&self) -> u32 {
        let cons = self.0.read32(reg::CMDQ_CONS);
        // All ones where nothing answers.
        if cons == u32::MAX { u32::MAX } else { cons & INDEX }
    }
}

impl Queue {
    /// The memory of a queue, for a unit that has 2^`most` commands at most, and two at least. The
    /// unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F, most: u32) -> Result<Self, UnitError> {
        let bits = most.clamp(1, MOST_BITS);
        Ok(Self {
            ring: CommandRing::with_wrap_bit(1 << bits),
            commands: Words::new(frames, 1)?,
            bits,
            failures: AtomicU64::new(0),
            last: Mutex::new(InvalidationError::Abandoned),
        })
    }

    /// Tells a unit whose command queue is off of this one.
    pub fn tell(&self, registers: &impl Registers) {
        registers.write64(reg::CMDQ_BASE, self.commands.phys().get() & BASE_ADDRESS | u64::from(self.bits));
        registers.write32(reg::CMDQ_PROD, 0);
        registers.write32(reg::CMDQ_CONS, 0);
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is of `frames`, and the unit's command queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: the caller's promise.
        unsafe { self.commands.free(frames) };
    }

    /// Submits the commands, all of them before one CMD_SYNC where the queue is as long, and waits
    /// until the unit has carried them out. O(their number), and the hardware's time; for each such
    /// piece at most twice the host's patience.
    pub fn submit<H: Host>(&self, host: &H, commands: &[[u64; 2]]) -> Result<(), InvalidationError> {
        let most = usize::try_from(self.ring.room() - 1).unwrap_or(usize::MAX).max(1);
        if commands.len() <= most {
            return self.submit_piece(host, commands);
        }
        commands.chunks(most).try_for_each(|piece| self.submit_piece(host, piece))
    }

    fn submit_piece<H: Host>(&self, host: &H, commands: &[[u64; 2]]) -> Result<(), InvalidationError> {
        let (frames, bell) = (host.frames(), Bell(host.registers()));
        let before = self.failures.load(Ordering::Acquire);
        let began = host.now_ns();
        let waited = || host.now_ns().saturating_sub(began);
        let count = commands.len() as u64 + 1;
        let reserved = self.ring.reserve(count, &bell, || {
            self.look_for_errors(host);
            host.relax();
            waited() <= host.patience_ns()
        });
        let first = reserved.ok_or_else(|| InvalidationError::TimedOut { waited_ns: waited() })?;
        let last = first + count - 1;
        for (place, command) in (first..).zip(commands.iter().copied().chain([command::SYNC])) {
            let index = self.ring.index(place) * 2;
            self.commands.store(frames, index, command[0]);
            self.commands.store(frames, index + 1, command[1]);
        }
        self.ring.publish(first, count, &bell);
        let began = host.now_ns();
        let mut looks = 0_u32;
        loop {
            if self.ring.has_consumed(last, &bell) {
                return self.checked(before);
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                self.look_for_errors(host);
                self.checked(before)?;
                let waited_ns = host.now_ns().saturating_sub(began);
                // One more look: the caller may have been interrupted.
                if waited_ns > host.patience_ns() && !self.ring.has_consumed(last, &bell) {
                    return Err(InvalidationError::TimedOut { waited_ns });
                }
            }
            host.relax();
        }
    }

    /// An error if there was one since there were `before`.
    fn checked(&self, before: u64) -> Result<(), InvalidationError> {
        if self.failures.load(Ordering::Acquire) == before { Ok(()) } else { Err(*self.last.lock()) }
    }

    /// Asks the unit whether it has stopped, and lets it go on. Acknowledges what else went wrong,
    /// where that is all that can be done.
    #[cold]
    pub fn look_for_errors<H: Host>(&self, host: &H) {
        let (registers, frames) = (host.registers(), host.frames());
        let active = || match (registers.read32(reg::GERROR), registers.read32(reg::GERRORN)) {
            // All ones where nothing answers.
            (u32::MAX, _) | (_, u32::MAX) => (0, 0),
            (errors, known) => ((errors ^ known) & (gerror::CMDQ | gerror::WRITES), known),
        };
        if active().0 == 0 {
            return;
        }
        let mut last = self.last.lock();
        // Again, under the lock: another CPU may have dealt with it.
        let (errors, known) = active();
        if errors & gerror::CMDQ != 0 {
            let cons = registers.read32(reg::CMDQ_CONS);
            let bad = self.ring.index(u64::from(cons & INDEX)) * 2;
            self.commands.store(frames, bad, command::SYNC[0]);
            self.commands.store(frames, bad + 1, command::SYNC[1]);
            *last = InvalidationError::Rejected { code: command_error(cons) };
            self.failures.fetch_add(1, Ordering::AcqRel);
        }
        if errors != 0 {
            registers.write32(reg::GERRORN, known ^ errors);
        }
    }
}

/// How a unit takes invalidations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    /// The binary logarithm of a page.
    pub granule: u32,
    /// One command may name a range.
    pub ranges: bool,
}

/// Adds what `request` asks for in tables of `stage` to `out`. Nothing, and `false`, where there is
/// no room.
pub(super) fn describe(out: &mut Commands, ways: Ways, stage: Stage, request: &Request) -> bool {
    let DomainId(domain) = request.domain;
    let whole = match stage {
        Stage::One => command::tlbi_asid(domain),
        Stage::Two => command::tlbi_vmid(domain),
    };
    let at = |address, leaf_only| match stage {
        Stage::One => command::tlbi_asid_address(domain, address, leaf_only),
        Stage::Two => command::tlbi_vmid_address(domain, address, leaf_only),
    };
    match request.invalidation {
        Invalidation::Domain => out.try_push(whole).is_ok(),
        Invalidation::Range { range, leaf_only } => {
            let (first, pages) = pages_of(range, ways.granule);
            let address = |page| (first + page) << ways.granule;
            if pages > 1
                && ways.ranges
                && let Some((number, scale)) = pieces(pages)
            {
                let range = command::range(at(address(0), leaf_only), ways.granule, number, scale);
                return out.try_push(range).is_ok();
            }
            if pages > PAGES {
                return out.try_push(whole).is_ok();
            }
            if out.remaining_capacity() < pages as usize {
                return false;
            }
            out.extend((0..pages).map(|page| at(address(page), leaf_only)));
            true
        }
        // The unit refuses what devices have translated themselves (STE.EATS is 0), and that they
        // ask for it: they hold nothing.
        Invalidation::DeviceTlb { .. } => true,
    }
}

/// The number of the first page of `range`, and how many there are.
fn pages_of(range: IovaRange, granule: u32) -> (u64, u64) {
    let (first, last) = (range.start().get() >> granule, range.last().get() >> granule);
    (first, last - first + 1)
}

/// The least NUM and SCALE of a range that holds `pages` pages, at least 2: a sixteenth more of
/// them at the most. `None` where a command cannot say so many.
fn pieces(pages: u64) -> Option<(u32, u32)> {
    let scale = (u64::BITS - (pages - 1).leading_zeros()).saturating_sub(5);
    let number = pages.div_ceil(1_u64.checked_shl(scale)?) - 1;
    (scale < 32).then_some((number as u32, scale))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::Iova;

    use super::*;

    fn described(ways: Ways, stage: Stage, start: u64, len: u64) -> Commands {
        let range = IovaRange::new(Iova::new(start), len).unwrap();
        let invalidation = Invalidation::Range { range, leaf_only: true };
        let mut out = Commands::new();
        assert!(describe(&mut out, ways, stage, &Request { domain: DomainId(7), invalidation }));
        out
    }

    #[test]
    fn a_range_holds_its_pages_and_few_others() {
        for pages in (2..3000).chain((0..100).map(|n| (1_u64 << 36) - n)) {
            let (number, scale) = pieces(pages).unwrap();
            assert!(number < 32 && scale < 32 && (number, scale) != (0, 0), "{pages}");
            let held = u64::from(number + 1) << scale;
            assert!((pages..=pages + pages / 16).contains(&held), "{pages}: {held}");
        }
        assert_eq!(pieces(1 << 37), None);
        assert_eq!(pieces((1 << 36) + 1), None);
        assert_eq!(pieces(u64::MAX), None);
    }

    #[test]
    fn ranges_pages_and_whole_domains() {
        let with = Ways { granule: 12, ranges: true };
        let without = Ways { granule: 12, ranges: false };
        let page = command::tlbi_asid_address(7, 0x5000, true);
        for ways in [with, without] {
            assert_eq!(described(ways, Stage::One, 0x5000, 0x1000)[..], [page]);
            assert_eq!(described(ways, Stage::One, 0x5800, 0x10)[..], [page], "a part of it");
        }
        // Range: TG is 1 for 4 KiB; NUM 2 stands for 3.
        let three = [page[0] | 2 << 12, page[1] | 1 << 10];
        assert_eq!(described(with, Stage::One, 0x5000, 0x3000)[..], [three]);
        let each = [5_u64, 6, 7].map(|page| command::tlbi_vmid_address(7, page << 12, true));
        assert_eq!(described(without, Stage::Two, 0x5000, 0x3000)[..], each);
        let whole = [command::tlbi_vmid(7)];
        assert_eq!(described(without, Stage::Two, 0, 33 << 12)[..], whole);
        assert_eq!(described(with, Stage::Two, 0, 1 << 60)[..], whole);
        assert_eq!(described(Ways { granule: 16, ranges: true }, Stage::Two, 0, 1 << 16).len(), 1);
        let wide = described(Ways { granule: 16, ranges: true }, Stage::One, 0x10_0000, 1 << 21);
        assert_eq!(wide[..], [[0x12 | 7 << 48 | 31 << 12, 0x10_0001 | 3 << 10]]);
    }

    #[test]
    fn what_does_not_fit_is_left_for_the_next_submission() {
        let mut out = Commands::new();
        let range = IovaRange::new(Iova::new(0), 32 << 12).unwrap();
        let request =
            Request { domain: DomainId(1), invalidation: Invalidation::Range { range, leaf_only: false } };
        let ways = Ways { granule: 12, ranges: false };
        let taken = (0..5).take_while(|_| describe(&mut out, ways, Stage::One, &request)).count();
        assert_eq!((taken, out.len()), (3, 96));
    }
}
