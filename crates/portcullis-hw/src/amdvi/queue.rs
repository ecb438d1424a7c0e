//! The command buffer: invalidation requests as commands, and the detection of a unit that has stopped.

use portcullis::addr::{DomainId, PageSize};
use portcullis::invalidation::{Block, Granularity, Invalidation, InvalidationError, Request};

use super::layout::{command, control, reg, ring_index, ring_place, status};
use crate::blocks::{self, EVERYTHING};
use crate::command_ring::Doorbell;
use crate::host::{Host, Registers, wait_until};
use crate::queue::{Command, Commands, Failure, Port, REFUSED};
use crate::sync::{AtomicBool, Mutex, Ordering};

/// The unit's side of the ring.
pub(super) struct Bell<'a, H> {
    pub host: &'a H,
    /// Protects the control register.
    pub control: &'a Mutex<()>,
    /// The command buffer is on, and has been seen to run, or the host's patience for that has ended.
    pub should_run: &'a AtomicBool,
}

impl<H: Host> Doorbell for Bell<'_, H> {
    fn ring(&self, tail: u32) {
        self.host.registers().write64(reg::COMMAND_TAIL, ring_place(tail));
    }

    fn head(&self) -> u32 {
        let head = self.host.registers().read64(reg::COMMAND_HEAD);
        // All ones: nothing answers.
        if head == u64::MAX { u32::MAX } else { ring_index(head) }
    }
}

impl<H: Host> Port for Bell<'_, H> {
    const NOTHING: Command = command::NOTHING;

    fn wait(number: u32, address: u64) -> Command {
        command::completion_wait(number, address)
    }

    /// The unit stops at a command that it does not know, or cannot read. The error's code is the opcode.
    ///
    /// No register reports this: a unit that does not run may be off, or just starting. So it has stopped only if it [should
    /// run](Self::should_run), which only `go_on` changes. It then stays stopped until `go_on` (section 2.4), and its head does not move.
    fn failure(&self, command: &dyn Fn(u32) -> u64) -> Option<Failure> {
        if !self.should_run.load(Ordering::Acquire) {
            return None;
        }
        let status = self.host.registers().read64(reg::STATUS);
        if status & status::CMD_BUF_RUN != 0 {
            // All ones, which is what a CPU reads if nothing answers, count as running, too.
            return None;
        }
        let bad = self.head();
        let error = InvalidationError::Rejected { code: command::opcode(command(bad)) };
        Some(Failure { error: Some(error), bad: Some(bad), drops_waits: false, status: 0 })
    }

    fn go_on(&self, _: &Failure) {
        set(self.host, self.control, control::CMD_BUF_EN, false);
        set(self.host, self.control, control::CMD_BUF_EN, true);
        // If it does not resume, the next check for failures finds that.
        let _ = wait_until(self.host, "go on with its commands", || {
            self.host.registers().read64(reg::STATUS) & status::CMD_BUF_RUN != 0
        });
    }
}

pub(super) fn set<H: Host>(host: &H, control: &Mutex<()>, bits: u64, on: bool) {
    let registers = host.registers();
    host.undisturbed(|| {
        let _one_at_a_time = control.lock();
        let value = registers.read64(reg::CONTROL);
        if value != u64::MAX {
            registers.write64(reg::CONTROL, if on { value | bits } else { value & !bits });
        }
    });
}

/// Appends the commands of `request` to `out`. Returns `false`, and appends nothing, if there is no room.
/// # Errors
/// [`REFUSED`]: the unit cannot address the device.
pub(super) fn describe(out: &mut Commands, request: &Request) -> Result<bool, InvalidationError> {
    let DomainId(domain) = request.domain;
    let whole = command::pages(domain, 0, EVERYTHING, false);
    Ok(match request.invalidation {
        Invalidation::Domain => out.try_push(whole).is_ok(),
        Invalidation::Range { range, leaf_only } => {
            let pages = |block: Block| command::pages(domain, block.address.get(), block.order, leaf_only);
            blocks::add(out, range, PageSize::SIZE_4K, Granularity::ANY_BLOCK, pages, whole)
        }
        Invalidation::DeviceTlb { device, range } => {
            let source = u16::try_from(device.0).map_err(|_| REFUSED)?;
            // The unit may run commands in parallel. A device could then refetch a translation from the IOTLB that is about to be
            // invalidated.
            let is_after_unit =
                out.last().is_some_and(|last| command::opcode(last[0]) != command::DEVICE_TLB);
            let barrier = is_after_unit.then_some(command::BARRIER);
            blocks::add_for_device(out, range, barrier, |address, order| {
                command::device_tlb(source, address, order)
            })
        }
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::{DeviceId, Iova, IovaRange};

    use super::*;

    fn described(invalidations: &[Invalidation]) -> Commands {
        let mut out = Commands::new();
        for invalidation in invalidations {
            let request = Request { domain: DomainId(7), invalidation: *invalidation };
            assert_eq!(describe(&mut out, &request), Ok(true));
        }
        out
    }

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), len).unwrap()
    }

    /// The size that a command encodes, in the manual's terms: the lowest bit from 12 on that is 0 has the weight of half the size.
    fn said(second: u64) -> (u64, u64) {
        if second & 1 == 0 {
            return (second & !0xfff, 0x1000);
        }
        let half = 1_u128 << (12 + (!(second >> 12)).trailing_zeros());
        let size = half * 2;
        let first = u128::from(second & !0xfff) & !(size - 1);
        (first as u64, u64::try_from(size).unwrap_or(u64::MAX))
    }

    #[test]
    fn the_address_says_the_size() {
        for (start, len, blocks) in [
            (0x5000, 0x1000, &[(0x5000, 0x1000)][..]),
            (0x4000, 0x2000, &[(0x4000, 0x2000)]),
            (0x5000, 0x2000, &[(0x4000, 0x4000)]),
            (0x20_0000, 0x20_0000, &[(0x20_0000, 0x20_0000)]),
            (0xffff_f000, 0x2000, &[(0xffff_f000, 0x1000), (0x1_0000_0000, 0x1000)]),
            (0x1000, u64::MAX - 0x1fff, &[(0, u64::MAX)]),
        ] {
            let out = described(&[Invalidation::Range { range: range(start, len), leaf_only: true }]);
            assert!(out.iter().all(|command| command[0] == 3 << 60 | 7 << 32));
            assert!(out.iter().all(|command| command[1] & 2 == 0), "paging structures are kept");
            let said: alloc::vec::Vec<_> = out.iter().map(|command| said(command[1])).collect();
            assert_eq!(said, blocks, "{start:#x} {len:#x}: {out:x?}");
        }
        // All of a domain, by section 2.4.3.
        assert_eq!(described(&[Invalidation::Domain])[0][1], 0x7fff_ffff_ffff_f003);
        let tables = Invalidation::Range { range: range(0x5000, 0x1000), leaf_only: false };
        assert_eq!(described(&[tables])[0][1], 0x5002);
    }

    /// QEMU 10 reads 256 when the ring has just wrapped. If that were taken for an invalid index, the unit would seem not to answer.
    #[test]
    fn a_head_behind_the_last_command_is_at_the_first() {
        assert_eq!([0, 0x10, 0xff0, 0x1000].map(ring_index), [0, 1, 255, 0]);
        assert_eq!([0, 1, 255].map(ring_place), [0, 0x10, 0xff0]);
    }

    #[test]
    fn a_device_forgets_after_the_unit() {
        let device = |range| Invalidation::DeviceTlb { device: DeviceId(0x28), range };
        let pages = Invalidation::Range { range: range(0x5000, 0x1000), leaf_only: true };
        let out = described(&[pages, device(Some(range(0x5000, 0x1000))), device(None)]);
        let numbers: Commands = out.iter().map(|command| [command::opcode(command[0]).into(), 0]).collect();
        assert_eq!(numbers.as_slice(), [[3, 0], [1, 0], [4, 0], [4, 0]]);
        assert_eq!(out[1], command::BARRIER);
        assert_eq!(out[2], [4 << 60 | 0x28 << 32 | 1 << 24 | 0x28, 0x5000]);
        assert_eq!(said(out[3][1]), (0, u64::MAX));
        // Alone it needs no barrier, and one place is no room for both.
        assert_eq!(described(&[device(None)]).len(), 1);
        let mut full: Commands = (0..126).map(|_| command::NOTHING).collect();
        let request = Request { domain: DomainId(7), invalidation: device(None) };
        assert_eq!(describe(&mut full, &request), Ok(false));
        assert_eq!(full.len(), 126);
    }
}
