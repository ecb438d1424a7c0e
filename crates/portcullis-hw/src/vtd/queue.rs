//! Queued invalidation: what a domain asks for, as descriptors, and how the unit says that it has stopped.

use portcullis::addr::DomainId;
use portcullis::invalidation::{Invalidation, InvalidationError, Request};

use super::layout::{cap, descriptor, ecap, fsts, queue_index, queue_tail, reg};
use crate::command_ring::Doorbell;
use crate::host::{Host, Registers};
use crate::queue::{Command, Commands, Failure, Port, REFUSED, block_around};

/// The unit's side of the ring.
pub(super) struct Bell<'a, H>(pub &'a H);

impl<H: Host> Doorbell for Bell<'_, H> {
    fn ring(&self, tail: u32) {
        self.0.registers().write64(reg::IQT, queue_tail(tail));
    }

    fn head(&self) -> u32 {
        let head = self.0.registers().read64(reg::IQH);
        // All ones where nothing answers.
        if head == u64::MAX { u32::MAX } else { queue_index(head) as u32 }
    }
}

impl<H: Host> Port for Bell<'_, H> {
    const NOTHING: Command = descriptor::NOTHING;

    fn wait(number: u32, address: u64) -> Command {
        descriptor::wait(number, address)
    }

    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        let registers = self.0.registers();
        let status = registers.read32(reg::FSTS);
        if status == u32::MAX || status & (fsts::IQE | fsts::ITE) == 0 {
            return None;
        }
        let details = registers.read64(reg::IQERCD);
        if status & fsts::IQE != 0 {
            let error = InvalidationError::Rejected { code: details as u32 & 0xf };
            return Some(Failure { error: Some(error), bad: Some(self.head()), status });
        }
        let (device, waited_ns) = ((details >> 32) as u32 & 0xffff, self.0.patience_ns());
        let error = Some(InvalidationError::DeviceTimedOut { device, waited_ns });
        Some(Failure { error, bad: None, status })
    }

    fn go_on(&self, failure: &Failure) {
        let clear = failure.status & (fsts::IQE | fsts::ITE | fsts::ICE);
        self.0.registers().write32(reg::FSTS, clear);
        // Read back, so that the next CPU that looks does not find what is cleared.
        let _ = self.0.registers().read32(reg::FSTS);
    }
}

/// Adds what `request` asks for to `out`, for a unit of these capabilities. Nothing, and `false`, where there is no room.
///
/// # Errors
/// [`REFUSED`]: the unit has no such domain or device. (It would stop, and fail what others ask for.)
pub(super) fn describe(
    out: &mut Commands,
    (caps, extended): (u64, u64),
    drain: u64,
    request: &Request,
) -> Result<bool, InvalidationError> {
    let DomainId(domain) = request.domain;
    if u32::from(domain) >> cap::domain_bits(caps).min(16) != 0 {
        return Err(REFUSED);
    }
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
            let source = u16::try_from(device.0).map_err(|_| REFUSED)?;
            match extended & ecap::DT {
                // Behind this unit no device caches anything. The wait puts the call in order with all others.
                0 => descriptor::NOTHING,
                _ => descriptor::device_tlb(source, address, order),
            }
        }
    };
    Ok(out.try_push(descriptor).is_ok())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::{DeviceId, Iova, IovaRange};

    use super::*;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), len).unwrap()
    }

    #[test]
    fn a_unit_without_page_selective_invalidation_forgets_the_domain() {
        let request = |range| Request {
            domain: DomainId(7),
            invalidation: Invalidation::Range { range, leaf_only: true },
        };
        let described = |caps, range| {
            let mut out = Commands::new();
            assert_eq!(describe(&mut out, (caps | 6, 0), 0, &request(range)), Ok(true));
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

    #[test]
    fn what_the_unit_has_no_number_for_is_refused() {
        let asked = |domain, extended, invalidation| {
            let request = Request { domain: DomainId(domain), invalidation };
            describe(&mut Commands::new(), (0, extended), 0, &request)
        };
        // Four bits of domains.
        assert_eq!(asked(15, 0, Invalidation::Domain), Ok(true));
        assert_eq!(asked(16, 0, Invalidation::Domain), Err(REFUSED));
        let device = |number| Invalidation::DeviceTlb { device: DeviceId(number), range: None };
        assert_eq!(asked(1, ecap::DT, device(0x28)), Ok(true));
        assert_eq!(asked(1, ecap::DT, device(0x1_0028)), Err(REFUSED), "not device 0x28");
        assert_eq!(asked(1, 0, device(0x28)), Ok(true), "it has no TLB");
    }
}
