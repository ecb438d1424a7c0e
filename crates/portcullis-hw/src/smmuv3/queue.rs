//! The command queue: how a unit says that it has stopped, and what a domain asks for, as commands.
//!
//! A submission ends with CMD_SYNC, which the unit consumes when all before it is complete: a CPU waits until the unit's index has
//! passed its own. A unit that meets a command that it does not take stops there, says so in GERROR, and goes on when
//! that is acknowledged.

use portcullis::addr::{DomainId, PageSize};
use portcullis::invalidation::{Block, Granularity, Invalidation, InvalidationError, Request};
use portcullis::platform::Frames;

use super::Stage;
use super::layout::{BASE_ADDRESS, INDEX, command, command_error, gerror, reg};
use crate::blocks;
use crate::command_ring::Doorbell;
use crate::host::{Host, Registers, UnitError};
use crate::queue::{self, Command, Commands, Failure, Port};

/// The most commands in the queue, as a power of two: one frame of them.
const MOST_BITS: u32 = queue::COMMANDS.ilog2();

/// The unit's side of the queue.
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

impl<R: Registers> Port for Bell<'_, R> {
    const NOTHING: Command = command::SYNC;

    fn wait(_: u32, _: u64) -> Command {
        command::SYNC
    }

    /// An error is active until `go_on` acknowledges it, and with that of the queue the unit consumes nothing meanwhile (section
    /// 7.1): CONS is at the command that it does not take.
    ///
    /// Also a write of the event queue that was aborted: it concerns no submission, but until it is acknowledged the unit
    /// delivers no events.
    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        let (errors, known) = (self.0.read32(reg::GERROR), self.0.read32(reg::GERRORN));
        if errors == u32::MAX || known == u32::MAX {
            // Nothing answers.
            return None;
        }
        let status = (errors ^ known) & (gerror::CMDQ | gerror::WRITES);
        if status & gerror::CMDQ == 0 {
            return (status != 0).then_some(Failure { error: None, bad: None, drops_waits: false, status });
        }
        let cons = self.0.read32(reg::CMDQ_CONS);
        let error = InvalidationError::Rejected { code: command_error(cons) };
        Some(Failure { error: Some(error), bad: Some(cons & INDEX), drops_waits: false, status })
    }

    fn go_on(&self, failure: &Failure) {
        self.0.write32(reg::GERRORN, self.0.read32(reg::GERRORN) ^ failure.status);
    }
}

/// The command queue.
#[derive(Debug)]
pub(super) struct Queue {
    queue: queue::Queue,
    bits: u32,
}

impl Queue {
    /// The memory of a queue, for a unit that has 2^`most` commands at most, and two at least. The
    /// unit does not know of it yet.
    pub fn new<F: Frames>(frames: &F, most: u32) -> Result<Self, UnitError> {
        let bits = most.clamp(1, MOST_BITS);
        Ok(Self { queue: queue::Queue::without_answers(frames, 1 << bits)?, bits })
    }

    /// Tells a unit whose command queue is off of this one.
    pub fn tell(&self, registers: &impl Registers) {
        registers.write64(reg::CMDQ_BASE, self.queue.address() & BASE_ADDRESS | u64::from(self.bits));
        registers.write32(reg::CMDQ_PROD, 0);
        registers.write32(reg::CMDQ_CONS, 0);
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is of `frames`, and the unit's command queue is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: the caller's promise.
        unsafe { self.queue.free(frames) };
    }

    /// [`queue::Queue::submit`].
    pub fn submit<H: Host>(&self, host: &H, commands: &[Command]) -> Result<(), InvalidationError> {
        self.queue.submit(host, &Bell(host.registers()), commands)
    }

    /// [`queue::Queue::carry_out`]; each request comes with the stage whose tables it is about.
    pub fn carry_out<'a, H: Host>(
        &self,
        host: &H,
        ways: Ways,
        requests: impl IntoIterator<Item = (&'a Request, Stage)>,
    ) -> Result<(), InvalidationError> {
        let describe = |out: &mut Commands, (request, stage)| Ok(describe(out, ways, stage, request));
        self.queue.carry_out(host, &Bell(host.registers()), requests, describe)
    }

    /// [`queue::Queue::look_for_errors`].
    pub fn look_for_errors<H: Host>(&self, host: &H) {
        self.queue.look_for_errors(host.frames(), &Bell(host.registers()));
    }
}

/// How a unit takes invalidations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    pub granule: PageSize,
    /// What one command names.
    pub granularity: Granularity,
}

/// Adds what `request` asks for in tables of `stage` to `out`. Nothing, and `false`, where there is
/// no room.
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
        // The unit refuses devices' requests to translate, and accesses that they have translated
        // themselves (STE.EATS is 0). So no device has a TLB.
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
