//! Queued invalidation: requests as descriptors, and the detection of a unit that has stopped.

use portcullis::addr::{DomainId, PageSize};
use portcullis::invalidation::{Block, Granularity, Invalidation, InvalidationError, Request};

use super::capabilities::Capabilities;
use super::layout::{NARROW_SHIFT, WIDE_SHIFT, cap, descriptor, fsts, queue_index, queue_tail, reg};
use crate::blocks;
use crate::command_ring::Doorbell;
use crate::host::{Host, Registers};
use crate::queue::{Command, Commands, Failure, Port, REFUSED};

/// The unit's side of the ring.
pub(super) struct Bell<'a, H> {
    host: &'a H,
    /// Shift of an index in the registers.
    shift: u32,
}

impl<'a, H> Bell<'a, H> {
    /// For a ring of 256-bit descriptors, or of 128-bit ones.
    pub fn new(host: &'a H, wide: bool) -> Self {
        Self { host, shift: if wide { WIDE_SHIFT } else { NARROW_SHIFT } }
    }
}

impl<H: Host> Doorbell for Bell<'_, H> {
    fn ring(&self, tail: u32) {
        self.host.registers().write64(reg::IQT, queue_tail(tail, self.shift));
    }

    fn head(&self) -> u32 {
        let head = self.host.registers().read64(reg::IQH);
        // All ones: nothing answers.
        if head == u64::MAX { u32::MAX } else { queue_index(head, self.shift) as u32 }
    }
}

/// The stage of a domain's tables, which decides the descriptors of an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The first: translations of requests without PASID.
    First,
    /// The second. `drain` makes invalidations wait for outstanding accesses.
    Second { drain: u64 },
}

impl Stage {
    fn domain(self, domain: u16) -> Command {
        match self {
            Self::First => descriptor::first_stage_all(domain),
            Self::Second { drain } => descriptor::iotlb_domain(drain, domain),
        }
    }

    fn pages(self, domain: u16, block: Block, leaf_only: bool) -> Command {
        let (address, order) = (block.address.get(), block.order);
        match self {
            Self::First => descriptor::first_stage_pages(domain, address, order, leaf_only),
            Self::Second { drain } => descriptor::iotlb_pages(drain, domain, address, order, leaf_only),
        }
    }
}

impl<H: Host> Port for Bell<'_, H> {
    const NOTHING: Command = descriptor::NOTHING;

    fn wait(number: u32, address: u64) -> Command {
        descriptor::wait(number, address)
    }

    /// Either bit stays set until `go_on` clears it, and the unit fetches no descriptor meanwhile (FSTS_REG). With IQE the head is at the
    /// invalid descriptor; with ITE all fetched waits are aborted.
    fn failure(&self, _: &dyn Fn(u32) -> u64) -> Option<Failure> {
        let registers = self.host.registers();
        let status = registers.read32(reg::FSTS);
        if status == u32::MAX || status & (fsts::IQE | fsts::ITE) == 0 {
            return None;
        }
        let details = registers.read64(reg::IQERCD);
        let (device, waited_ns) = ((details >> 32) as u32 & 0xffff, self.host.patience_ns());
        let (error, bad) = if status & fsts::IQE != 0 {
            (InvalidationError::Rejected { code: details as u32 & 0xf }, Some(self.head()))
        } else {
            (InvalidationError::DeviceTimedOut { device, waited_ns }, None)
        };
        Some(Failure { error: Some(error), bad, drops_waits: status & fsts::ITE != 0, status })
    }

    fn go_on(&self, failure: &Failure) {
        let clear = failure.status & (fsts::IQE | fsts::ITE | fsts::ICE);
        self.host.registers().write32(reg::FSTS, clear);
        // Read back, so that the next CPU that reads the register finds the bits clear.
        let _ = self.host.registers().read32(reg::FSTS);
    }
}

/// Appends the descriptors of `request` to `out`, for a unit of these capabilities. Returns `false`, and appends nothing, if there is no
/// room.
///
/// # Errors
/// [`REFUSED`]: the unit has no such domain or device. (It would stop, and fail other requests.)
pub(super) fn describe(
    out: &mut Commands,
    capabilities: &Capabilities,
    stage: Stage,
    request: &Request,
) -> Result<bool, InvalidationError> {
    let DomainId(domain) = request.domain;
    let caps = capabilities.cap();
    if u32::from(domain) >> cap::domain_bits(caps).min(16) != 0 {
        return Err(REFUSED);
    }
    Ok(match request.invalidation {
        Invalidation::Range { range, leaf_only } if caps & cap::PSI != 0 => {
            // MAMV limits the second stage. The first stage's descriptors have no limit of their own, and use it, too.
            let granularity = Granularity::Block { max_order: cap::mamv(caps) };
            let pages = |block| stage.pages(domain, block, leaf_only);
            blocks::add(out, range, PageSize::SIZE_4K, granularity, pages, stage.domain(domain))
        }
        Invalidation::Range { .. } | Invalidation::Domain => out.try_push(stage.domain(domain)).is_ok(),
        Invalidation::DeviceTlb { device, range } => {
            let source = u16::try_from(device.0).map_err(|_| REFUSED)?;
            if capabilities.has_device_tlbs() {
                let pages = |address, order| descriptor::device_tlb(source, address, order);
                blocks::add_for_device(out, range, None, pages)
            } else {
                // The driver leaves device TLBs off. The wait that follows orders the call among all others.
                out.try_push(descriptor::NOTHING).is_ok()
            }
        }
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use portcullis::addr::{DeviceId, Iova, IovaRange};

    use super::super::layout::ecap;
    use super::*;

    const SECOND: Stage = Stage::Second { drain: 0 };

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), len).unwrap()
    }

    #[test]
    fn a_unit_without_page_selective_invalidation_forgets_the_domain() {
        let described = |caps, stage, range| {
            let mut out = Commands::new();
            let request =
                Request { domain: DomainId(7), invalidation: Invalidation::Range { range, leaf_only: true } };
            let capabilities = Capabilities { cap: caps | 6, ecap: 0 };
            assert_eq!(describe(&mut out, &capabilities, stage, &request), Ok(true));
            out
        };
        let page = range(0x5000, 0x1000);
        assert_eq!(described(0, SECOND, page)[..], [descriptor::iotlb_domain(0, 7)]);
        assert_eq!(described(0, Stage::First, page)[..], [descriptor::first_stage_all(7)]);
        assert_eq!(described(cap::PSI, SECOND, page)[..], [descriptor::iotlb_pages(0, 7, 0x5000, 0, true)]);
        // A mask of at most 2 pages.
        let caps = cap::PSI | 1 << 48;
        let [two, across, four] =
            [(0x4000, 0x2000), (0x5000, 0x2000), (0x4000, 0x4000)].map(|(at, len)| range(at, len));
        let pages = |address, order| descriptor::iotlb_pages(0, 7, address, order, true);
        assert_eq!(described(caps, SECOND, two)[..], [pages(0x4000, 1)]);
        assert_eq!(described(caps, SECOND, across)[..], [pages(0x5000, 0), pages(0x6000, 0)]);
        assert_eq!(described(caps, SECOND, four)[..], [descriptor::iotlb_domain(0, 7)]);
        // Type 6, pages of PASID 0.
        let low = 6 | 3 << 4 | 7 << 16;
        assert_eq!(described(caps, Stage::First, two)[..], [[low, 0x4000 | 1 << 6 | 1]]);
        let each = [[low, 0x5000 | 1 << 6], [low, 0x6000 | 1 << 6]];
        assert_eq!(described(caps, Stage::First, across)[..], each);
        assert_eq!(described(caps, Stage::First, four)[..], [[6 | 2 << 4 | 7 << 16, 0]]);
    }

    #[test]
    fn what_the_unit_has_no_number_for_is_refused() {
        let asked = |domain, extended, invalidation| {
            let request = Request { domain: DomainId(domain), invalidation };
            let capabilities = Capabilities { cap: 0, ecap: extended };
            describe(&mut Commands::new(), &capabilities, SECOND, &request)
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
