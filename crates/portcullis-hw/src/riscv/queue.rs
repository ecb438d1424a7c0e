//! The command queue: invalidation requests as commands, and the detection of a unit that has stopped.
//!
//! The unit stops at an illegal command, at a memory fault, and at a fence that timed out waiting for a device. The head is then the index
//! of that command. A fence may be executed again.

use portcullis::addr::{DomainId, PageSize};
use portcullis::invalidation::{Block, Invalidation, InvalidationError, Request};

use super::capabilities::{Capabilities, Stage};
use super::layout::{command, csr, reg};
use crate::blocks;
use crate::command_ring::Doorbell;
use crate::host::{Host, Registers};
use crate::queue::{COMMANDS, Command, Commands, Failure, Port, REFUSED};

/// The unit's side of the ring.
pub(super) struct Bell<'a, H>(pub &'a H);

impl<H: Host> Doorbell for Bell<'_, H> {
    fn ring(&self, tail: u32) {
        self.0.registers().write32(reg::CQT, tail);
    }

    fn head(&self) -> u32 {
        self.0.registers().read32(reg::CQH)
    }
}

impl<H: Host> Port for Bell<'_, H> {
    const NOTHING: Command = command::NOTHING;

    fn wait(number: u32, address: u64) -> Command {
        command::fence(number, address)
    }

    /// Each bit stays set until `go_on` clears it, and the unit fetches nothing meanwhile (`cqcsr`). A fence that timed out is then
    /// executed again, and confirms; but its submission need not wait for that.
    fn failure(&self, first_word: &dyn Fn(u32) -> u64) -> Option<Failure> {
        let status = self.0.registers().read32(reg::CQCSR);
        // While busy it takes no write.
        if status == u32::MAX || status & csr::BUSY != 0 || status & csr::COMMAND_ERRORS == 0 {
            return None;
        }
        let head = self.head();
        if status & csr::COMMAND_ERRORS == csr::COMMAND_TIMED_OUT {
            let waited_ns = self.0.patience_ns();
            let error = match only_device(head, first_word) {
                Some(device) => InvalidationError::DeviceTimedOut { device, waited_ns },
                None => InvalidationError::TimedOut { waited_ns },
            };
            return Some(Failure { error: Some(error), bad: None, drops_waits: true, status });
        }
        let error = InvalidationError::Rejected { code: status & csr::COMMAND_ERRORS };
        let drops_waits = status & csr::COMMAND_TIMED_OUT != 0;
        Some(Failure { error: Some(error), bad: Some(head), drops_waits, status })
    }

    fn go_on(&self, failure: &Failure) {
        let errors = failure.status & csr::COMMAND_ERRORS;
        self.0.registers().write32(reg::CQCSR, failure.status & csr::KEPT | csr::ENABLE | errors);
        // Read back, so that the next CPU that reads the register finds the bits clear.
        let _ = self.0.registers().read32(reg::CQCSR);
    }
}

/// The device that the fence at `fence` waited for, if it is the only one: of several, the unit does not say which timed out.
fn only_device(fence: u32, first_word: &dyn Fn(u32) -> u64) -> Option<u32> {
    let before = (1..COMMANDS).map(|back| first_word(fence.wrapping_sub(back) % COMMANDS));
    let mut devices = before.take_while(|first| !command::is_fence(*first)).filter_map(command::device_of);
    let device = devices.next()?;
    devices.all(|other| other == device).then_some(device)
}

/// Invalidates all of a domain's translations.
pub(super) const fn all_of(stage: Stage, DomainId(number): DomainId) -> Command {
    match stage {
        Stage::First => command::vma(number as u32),
        Stage::Second => command::gvma(number),
    }
}

/// Invalidates the leaves that translate `block`.
const fn pages_of(stage: Stage, DomainId(number): DomainId, block: Block) -> Command {
    let (address, order) = (block.address.get(), block.order);
    match stage {
        Stage::First => command::vma_pages(number as u32, address, order),
        Stage::Second => command::gvma_pages(number, address, order),
    }
}

/// Appends the commands of `request` to `out`, for a unit of these capabilities whose domains use `stage`. Returns `false`, and appends
/// nothing, if there is no room.
///
/// # Errors
/// [`REFUSED`]: the unit cannot address the device.
pub(super) fn describe(
    out: &mut Commands,
    stage: Stage,
    capabilities: &Capabilities,
    request: &Request,
) -> Result<bool, InvalidationError> {
    let Request { domain, invalidation } = *request;
    let whole = all_of(stage, domain);
    Ok(match invalidation {
        // A command with an address invalidates only leaves. (The extension for non-leaf entries, NL, is not used.)
        Invalidation::Range { range, leaf_only: true } => {
            let pages = |block| pages_of(stage, domain, block);
            blocks::add(out, range, PageSize::SIZE_4K, capabilities.granularity(), pages, whole)
        }
        Invalidation::Range { .. } | Invalidation::Domain => out.try_push(whole).is_ok(),
        // Without ATS there is no device TLB. The fence orders the call among all others.
        Invalidation::DeviceTlb { .. } if !capabilities.has_device_tlbs() => {
            out.try_push(command::NOTHING).is_ok()
        }
        Invalidation::DeviceTlb { device, range } => {
            // Segment, bus, device and function.
            if device.0 >> 24 != 0 {
                return Err(REFUSED);
            }
            // The unit may reorder commands, and must invalidate its IOTLB before a device TLB: a fence separates them.
            let is_after_unit = out.last().is_some_and(|last| command::device_of(last[0]).is_none());
            let fence = is_after_unit.then_some(command::NOTHING);
            let pages = |address, order| command::device_tlb(device.0, address, order);
            blocks::add_for_device(out, range, fence, pages)
        }
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::{DeviceId, Iova, IovaRange};

    use super::super::layout::cap;
    use super::*;

    const ATS: Capabilities = Capabilities(cap::ATS);

    fn described(stage: Stage, invalidation: Invalidation) -> Commands {
        let mut out = Commands::new();
        let request = Request { domain: DomainId(7), invalidation };
        assert_eq!(describe(&mut out, stage, &ATS, &request), Ok(true));
        out
    }

    fn range(start: u64, len: u64, leaf_only: bool) -> Invalidation {
        Invalidation::Range { range: IovaRange::new(Iova::new(start), len).unwrap(), leaf_only }
    }

    #[test]
    fn each_page_of_a_short_range_is_named_and_a_long_one_is_the_domain() {
        let out = described(Stage::First, range(0x4ff8, 0x1010, true));
        assert_eq!(out[..], [0x4000, 0x5000, 0x6000].map(|page| command::vma_pages(7, page, 0)));
        let out = described(Stage::Second, range(0x5000, 0x1000, true));
        assert_eq!(out[..], [command::gvma_pages(7, 0x5000, 0)]);
        assert_eq!(described(Stage::First, range(0x5000, 64 << 12, true)).len(), 64);
        assert_eq!(described(Stage::First, range(0x5000, 65 << 12, true))[..], [command::vma(7)]);
        assert_eq!(described(Stage::Second, range(0, u64::MAX, true))[..], [command::gvma(7)]);
    }

    #[test]
    fn a_table_that_is_gone_is_the_domain_as_an_address_names_leaves_alone() {
        assert_eq!(described(Stage::First, range(0x5000, 0x1000, false))[..], [command::vma(7)]);
        assert_eq!(described(Stage::Second, range(0x5000, 0x1000, false))[..], [command::gvma(7)]);
    }

    #[test]
    fn a_request_goes_in_whole_or_not_at_all() {
        let mut out = Commands::new();
        let request = Request { domain: DomainId(7), invalidation: range(0, 64 << 12, true) };
        assert_eq!(describe(&mut out, Stage::First, &ATS, &request), Ok(true));
        assert_eq!(describe(&mut out, Stage::First, &ATS, &request), Ok(false), "63 places are left");
        assert_eq!(out.len(), 64);
        let request = Request { domain: DomainId(7), invalidation: range(0, 63 << 12, true) };
        assert_eq!(describe(&mut out, Stage::First, &ATS, &request), Ok(true));
        assert_eq!(out.len(), 127);
    }

    #[test]
    fn a_device_tlb_is_asked_where_there_can_be_one() {
        let invalidation = Invalidation::DeviceTlb { device: DeviceId(0x28), range: None };
        let request = Request { domain: DomainId(7), invalidation };
        assert_eq!(described(Stage::First, invalidation)[..], [command::device_tlb(0x28, 0, 52)]);
        let beyond = Invalidation::DeviceTlb { device: DeviceId(1 << 24), range: None };
        let request_beyond = Request { domain: DomainId(7), invalidation: beyond };
        assert_eq!(
            describe(&mut Commands::new(), Stage::First, &ATS, &request_beyond),
            Err(REFUSED),
            "not 0"
        );
        let mut out = Commands::new();
        assert_eq!(describe(&mut out, Stage::First, &Capabilities(0), &request), Ok(true));
        assert_eq!(out[..], [command::NOTHING]);
    }

    #[test]
    fn the_unit_has_forgotten_before_a_device_is_asked_to() {
        let device = |device| Invalidation::DeviceTlb { device: DeviceId(device), range: None };
        let asked = [range(0x5000, 0x1000, true), device(0x28), device(0x30)];
        let mut out = Commands::new();
        for invalidation in asked {
            let request = Request { domain: DomainId(7), invalidation };
            assert_eq!(describe(&mut out, Stage::First, &ATS, &request), Ok(true));
        }
        let tlb = |device| command::device_tlb(device, 0, 52);
        assert_eq!(out[..], [command::vma_pages(7, 0x5000, 0), command::NOTHING, tlb(0x28), tlb(0x30)]);
    }

    #[test]
    fn the_device_that_did_not_answer_is_named_where_it_is_one() {
        let ring = |commands: &[Command]| -> alloc::vec::Vec<u64> {
            let mut words = alloc::vec![command::NOTHING[0]; COMMANDS as usize];
            for (index, command) in commands.iter().enumerate() {
                // Across the end of the ring.
                words[(254 + index) % 256] = command[0];
            }
            words
        };
        let tlb = |device| command::device_tlb(device, 0, 0);
        let (fence, page) = (command::fence(1, 0), command::vma_pages(1, 0, 0));
        for (commands, device) in [
            (&[fence, page, tlb(0x28), tlb(0x28), fence][..], Some(0x28)),
            (&[tlb(0x30), fence, tlb(0x01_0028), page, fence], Some(0x01_0028)),
            (&[fence, tlb(0x30), tlb(0x28), page, fence], None),
            (&[tlb(0x28), fence, page, page, fence], None),
        ] {
            let words = ring(commands);
            assert_eq!(only_device((254 + 4) % 256, &|index| words[index as usize]), device);
        }
    }
}
