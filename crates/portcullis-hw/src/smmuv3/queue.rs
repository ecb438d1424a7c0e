//! A command queue: invalidation requests as commands, and the detection of a queue that has stopped. A unit has one, and may have more for
//! CPUs ([`own`](super::own)).
//!
//! A submission ends with CMD_SYNC, which the unit consumes after all earlier commands are complete: a CPU waits until the unit's index has
//! passed its own. A unit that meets a bad command stops there, reports it in GERROR, and resumes when that is acknowledged.
//!
//! A CPU's queue reports and acknowledges errors in its own registers. One register, PROD, has two fields: the acknowledgement (ERRACK), and
//! the index of the next command, whose write is the doorbell. Several CPUs may write this register. So the CPU that handles an error stores the acknowledgement in memory, and requests
//! one more doorbell ([`CommandRing::ring_again`](crate::command_ring::CommandRing::ring_again)). Only one CPU rings at a time, and each
//! doorbell writes the acknowledgement that is in memory. A doorbell with the old value may come first: then the unit stays stopped until
//! the next one. Meanwhile other CPUs find the error acknowledged, and do not report it again.

use portcullis::addr::{DomainId, PageSize};
use portcullis::invalidation::{Block, Granularity, Invalidation, InvalidationError, Request};
use portcullis::platform::Frames;

use super::Stage;
use super::layout::{BASE_ADDRESS, INDEX, command, command_error, ecmdq, gerror, reg};
use crate::blocks;
use crate::command_ring::Doorbell;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::queue::{self, Command, Commands, Failure, Port};
use crate::sync::{AtomicU64, Ordering};

/// The most commands in the queue, as a power of two: one frame of them.
const MOST_BITS: u32 = queue::COMMANDS.ilog2();

/// Which of the unit's queues this is.
#[derive(Debug)]
enum Place {
    /// The queue that each unit has.
    Main,
    /// An ECMDQ.
    Own {
        /// Offset of its registers.
        at: usize,
        /// The value of the unit's ERR bit that the driver acknowledged last. Only the CPU that handles a failure writes it.
        acknowledged: AtomicU64,
    },
}

/// The unit's side of a queue.
struct Bell<'a, R> {
    registers: &'a R,
    place: &'a Place,
}

impl<R: Registers> Bell<'_, R> {
    fn cons(&self) -> u32 {
        self.registers.read32(match self.place {
            Place::Main => reg::CMDQ_CONS,
            Place::Own { at, .. } => at + ecmdq::CONS,
        })
    }
}

impl<R: Registers> Doorbell for Bell<'_, R> {
    fn ring(&self, tail: u32) {
        match self.place {
            Place::Main => self.registers.write32(reg::CMDQ_PROD, tail),
            Place::Own { at, acknowledged } => {
                // Acquire: the acknowledged failure was handled before.
                let acknowledged = acknowledged.load(Ordering::Acquire) as u32;
                self.registers.write32(at + ecmdq::PROD, ecmdq::EN | acknowledged | tail);
            }
        }
    }

    fn head(&self) -> u32 {
        let cons = self.cons();
        // All ones: nothing answers.
        if cons == u32::MAX { u32::MAX } else { cons & INDEX }
    }
}

impl<R: Registers> Port for Bell<'_, R> {
    const NOTHING: Command = command::SYNC;

    fn wait(_: u32, _: u64) -> Command {
        command::SYNC
    }

    /// An error is active until `go_on` acknowledges it, and the unit consumes nothing from the queue meanwhile (section 7.1): CONS is at
    /// the bad command.
    ///
    /// Also reports an aborted write of the event queue: it concerns no submission, but until it is acknowledged the unit delivers no
    /// events.
    ///
    /// A CPU's queue consumes nothing while ERR is not acknowledged (section 3.5.6.3). GERROR's summary bit of all such queues has no
    /// effect on them.
    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        if let Place::Own { acknowledged, .. } = self.place {
            let cons = self.cons();
            let status = cons & ecmdq::ERR;
            if cons == u32::MAX || u64::from(status) == acknowledged.load(Ordering::Acquire) {
                return None;
            }
            let error = InvalidationError::Rejected { code: ecmdq::error(cons) };
            return Some(Failure { error: Some(error), bad: Some(cons & INDEX), drops_waits: false, status });
        }
        let (errors, known) = (self.registers.read32(reg::GERROR), self.registers.read32(reg::GERRORN));
        if errors == u32::MAX || known == u32::MAX {
            return None;
        }
        let status = (errors ^ known) & (gerror::CMDQ | gerror::WRITES);
        if status & gerror::CMDQ == 0 {
            return (status != 0).then_some(Failure { error: None, bad: None, drops_waits: false, status });
        }
        let cons = self.cons();
        let error = InvalidationError::Rejected { code: command_error(cons) };
        Some(Failure { error: Some(error), bad: Some(cons & INDEX), drops_waits: false, status })
    }

    /// A CPU's queue resumes with its next doorbell, which is rung after each failure that concerns submissions, as all of its failures do.
    fn go_on(&self, failure: &Failure) {
        match self.place {
            Place::Main => {
                let known = self.registers.read32(reg::GERRORN);
                self.registers.write32(reg::GERRORN, known ^ failure.status);
            }
            // Release: the bad command was replaced before.
            Place::Own { acknowledged, .. } => acknowledged.store(failure.status.into(), Ordering::Release),
        }
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    queue: queue::Queue,
    bits: u32,
    place: Place,
}

impl Queue {
    /// A queue for a unit that supports at most 2^`most` commands, and at least two. The unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F, most: u32) -> Result<Self, UnitError> {
        Self::at(frames, most, Place::Main)
    }

    /// The same for the queue with registers at `at`.
    pub fn own<F: Frames>(frames: &F, most: u32, at: usize) -> Result<Self, UnitError> {
        Self::at(frames, most, Place::Own { at, acknowledged: AtomicU64::new(0) })
    }

    fn at<F: Frames>(frames: &F, most: u32, place: Place) -> Result<Self, UnitError> {
        let bits = most.clamp(1, MOST_BITS);
        Ok(Self { queue: queue::Queue::without_answers(frames, 1 << bits)?, bits, place })
    }

    fn bell<'a, R: Registers>(&'a self, registers: &'a R) -> Bell<'a, R> {
        Bell { registers, place: &self.place }
    }

    /// Gives the queue to a unit whose queue is off.
    pub fn tell(&self, registers: &impl Registers) {
        let (base, prod, cons) = match self.place {
            Place::Main => (reg::CMDQ_BASE, reg::CMDQ_PROD, reg::CMDQ_CONS),
            Place::Own { at, .. } => (at + ecmdq::BASE, at + ecmdq::PROD, at + ecmdq::CONS),
        };
        registers.write64(base, self.queue.address() & BASE_ADDRESS | u64::from(self.bits));
        registers.write32(prod, 0);
        registers.write32(cons, 0);
    }

    /// Turns a CPU's queue on or off; the unit was [told](Self::tell) of it, and knows it unchanged. (The main one is turned on and off
    /// with the unit.)
    pub fn turn<H: Host>(&self, host: &H, on: bool) -> Result<(), UnitError> {
        match self.place {
            Place::Main => Ok(()),
            Place::Own { at, .. } => turn(host, at, on),
        }
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The unit does not know of it, or has this queue off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe { self.queue.free(frames) };
    }

    /// [`queue::Queue::submit`].
    pub fn submit<H: Host>(&self, host: &H, commands: &[Command]) -> Result<(), InvalidationError> {
        self.queue.submit(host, &self.bell(host.registers()), commands)
    }

    /// [`queue::Queue::carry_out`]; each request comes with the stage of its tables.
    pub fn carry_out<'a, H: Host>(
        &self,
        host: &H,
        ways: Ways,
        requests: impl IntoIterator<Item = (&'a Request, Stage)>,
    ) -> Result<(), InvalidationError> {
        let describe = |out: &mut Commands, (request, stage)| Ok(describe(out, ways, stage, request));
        self.queue.carry_out(host, &self.bell(host.registers()), requests, describe)
    }

    /// [`queue::Queue::look_for_errors`].
    pub fn look_for_errors<H: Host>(&self, host: &H) {
        self.queue.look_for_errors(host.frames(), &self.bell(host.registers()));
    }
}

/// Turns the CPU's queue with registers at `at` on or off, and waits until the unit acknowledges it. The unit fetches no command from a
/// queue that is off (sections 3.5.6.2, and 6.3 of CR0.CMDQEN).
pub(super) fn turn<H: Host>(host: &H, at: usize, on: bool) -> Result<(), UnitError> {
    let registers = host.registers();
    let is = |on: bool| {
        let cons = registers.read32(at + ecmdq::CONS);
        cons != u32::MAX && (cons & ecmdq::EN != 0) == on
    };
    // Between two states it takes no write.
    let was = registers.read32(at + ecmdq::PROD);
    wait_until(host, "be ready to turn a CPU's queue on or off", || is(was & ecmdq::EN != 0))?;
    let rest = was & !ecmdq::EN;
    registers.write32(at + ecmdq::PROD, if on { rest | ecmdq::EN } else { rest });
    wait_until(host, if on { "turn a CPU's queue on" } else { "turn a CPU's queue off" }, || is(on))
}

/// The unit's forms of invalidation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    pub granule: PageSize,
    /// The addresses that one command covers.
    pub granularity: Granularity,
}

/// Appends the commands of `request` in tables of `stage` to `out`. Returns `false`, and appends nothing, if there is no room.
fn describe(out: &mut Commands, ways: Ways, stage: Stage, request: &Request) -> bool {
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
            let pages = |Block { address, order, count }: Block| match at(address.get(), leaf_only) {
                page if count == 1 && order == 0 => page,
                page => command::range(page, ways.granule.shift(), count - 1, order),
            };
            blocks::add(out, range, ways.granule, ways.granularity, pages, whole)
        }
        // The unit refuses translation requests and translated accesses (STE.EATS is 0). So no device has a TLB.
        Invalidation::DeviceTlb { .. } => true,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::{Iova, IovaRange};

    use super::*;

    fn ways(shift: u32, granularity: Granularity) -> Ways {
        Ways { granule: PageSize::from_shift(shift).unwrap(), granularity }
    }

    fn described(ways: Ways, stage: Stage, start: u64, len: u64) -> Commands {
        let range = IovaRange::new(Iova::new(start), len).unwrap();
        let invalidation = Invalidation::Range { range, leaf_only: true };
        let mut out = Commands::new();
        assert!(describe(&mut out, ways, stage, &Request { domain: DomainId(7), invalidation }));
        out
    }

    #[test]
    fn ranges_pages_and_whole_domains() {
        let (with, without) = (ways(12, Granularity::Run), ways(12, Granularity::Page));
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
        assert_eq!(described(without, Stage::Two, 0, 65 << 12)[..], whole);
        assert_eq!(described(with, Stage::Two, 0, 1 << 60)[..], whole);
        assert_eq!(described(ways(16, Granularity::Run), Stage::Two, 0, 1 << 16).len(), 1);
        let wide = described(ways(16, Granularity::Run), Stage::One, 0x10_0000, 1 << 21);
        assert_eq!(wide[..], [[0x12 | 7 << 48 | 31 << 12, 0x10_0001 | 3 << 10]]);
    }

    #[test]
    fn what_does_not_fit_is_left_for_the_next_submission() {
        let mut out = Commands::new();
        let range = IovaRange::new(Iova::new(0), 32 << 12).unwrap();
        let request =
            Request { domain: DomainId(1), invalidation: Invalidation::Range { range, leaf_only: false } };
        let ways = ways(12, Granularity::Page);
        let taken = (0..5).take_while(|_| describe(&mut out, ways, Stage::One, &request)).count();
        assert_eq!((taken, out.len()), (3, 96));
    }
}

/// A CPU that handles a stopped ECMDQ, beside one that submits to it.
#[cfg(all(test, loom))]
mod model {
    use alloc::sync::Arc;
    use loom::sync::atomic::AtomicU64 as Word;
    use loom::thread;

    use super::*;
    use crate::command_ring::CommandRing;
    use crate::failures::Failures;

    const AT: usize = 0x100;

    /// PROD and CONS. The unit reads PROD when it is written.
    struct Unit {
        prod: Word,
        cons: Word,
        /// The index up to which it has executed commands.
        head: Word,
    }

    // SAFETY: 1 to 6: each access completes before it returns. 7: there is no other offset. 8: only this test uses it.
    unsafe impl Registers for Unit {
        fn read32(&self, offset: usize) -> u32 {
            assert_eq!(offset, AT + ecmdq::CONS);
            self.cons.load(Ordering::Acquire) as u32
        }

        fn write32(&self, offset: usize, value: u32) {
            assert_eq!(offset, AT + ecmdq::PROD);
            self.prod.store(value.into(), Ordering::Release);
            assert_ne!(value & ecmdq::EN, 0, "it is not turned off");
            let cons = self.cons.load(Ordering::Acquire) as u32;
            if (cons ^ value) & ecmdq::ERR == 0 {
                self.cons.store((cons & !INDEX | value & INDEX).into(), Ordering::Release);
                self.head.store((value & INDEX).into(), Ordering::Relaxed);
            }
        }

        fn read64(&self, _: usize) -> u64 {
            u64::MAX
        }

        fn write64(&self, _: usize, _: u64) {}
    }

    /// In each order of the doorbells: the error is acknowledged once, and the last doorbell has all commands.
    #[test]
    fn an_acknowledgement_goes_with_a_doorbell_whichever_cpu_rings() {
        loom::model(|| {
            let cons = ecmdq::EN | ecmdq::ERR | 1 << 24;
            let unit = Unit { prod: Word::new(0), cons: Word::new(cons.into()), head: Word::new(0) };
            let ring = CommandRing::with_wrap_bit(4).unwrap();
            let place = Place::Own { at: AT, acknowledged: AtomicU64::new(0) };
            let shared = Arc::new((unit, ring, place, Failures::new()));
            let submit = |(unit, ring, place, _): &(Unit, CommandRing, Place, Failures)| {
                let bell = Bell { registers: unit, place };
                let first = ring.reserve(1, &bell, || true).unwrap();
                ring.publish(first, 1, &bell);
            };
            // The command at which it has stopped.
            submit(&shared);
            let before = shared.3.so_far();
            let other = Arc::clone(&shared);
            let thread = thread::spawn(move || submit(&other));
            let look = |(unit, ring, place, failures): &(Unit, CommandRing, Place, Failures)| {
                failures.look(ring, &Bell { registers: unit, place }, &|_| 0, |_| {});
            };
            look(&shared);
            thread.join().unwrap();
            let (unit, _, _, failures) = &*shared;
            assert_eq!(unit.prod.load(Ordering::Relaxed) as u32, ecmdq::EN | ecmdq::ERR | 2);
            assert_eq!(unit.head.load(Ordering::Relaxed), 2, "both were carried out");
            assert!(failures.since(before).is_err());
            let before = failures.so_far();
            look(&shared);
            assert!(failures.since(before).is_ok(), "it was one failure");
        });
    }
}
