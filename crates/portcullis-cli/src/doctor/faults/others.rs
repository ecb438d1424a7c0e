//! Faults of virtio-iommu and of RISC-V's IOMMU.

use portcullis_hw::{Access, Reason, riscv as unit};

use super::{One, field, hex};

/// `page fault from EP 8 at 0x1000 [W]`; `domain fault from EP 8`. An endpoint of PCI is its bus, device and function.
pub fn virtio(line: &str) -> Option<One> {
    let (_, text) = line.strip_prefix("virtio_iommu ")?.split_once(": ")?;
    let (kind, rest) = text.split_once(" fault from EP ")?;
    let reason = match kind {
        "domain" => Reason::NotAttached.to_string(),
        "page" => Reason::NotMapped.to_string(),
        "unknown" => "the IOMMU gives no reason".into(),
        _ => return None,
    };
    let endpoint: u32 = rest.split(' ').next()?.parse().ok()?;
    let does = rest.split_once('[').map_or("", |(_, rest)| rest.trim_end_matches(']'));
    let access = match (does.contains('R'), does.contains('W')) {
        (true, true) => Some(Access::Atomic),
        (true, false) => Some(Access::Read),
        (false, true) => Some(Access::Write),
        (false, false) => None,
    };
    let (bus, rest_of) = (endpoint >> 8 & 0xff, endpoint & 0xff);
    let device = format!("{:04x}:{bus:02x}:{:02x}.{}", endpoint >> 16, rest_of >> 3, rest_of & 7);
    Some(One { device, access, reason, address: field(rest, "at ").and_then(hex) })
}

/// `riscv,iommu 3010000.iommu: Fault 13 devid: 0x8 iotval: fffe0000 iotval2: 0`. Which device has the number is firmware's choice.
pub fn riscv(line: &str) -> Option<One> {
    let (_, rest) = line.split_once(": Fault ").filter(|(before, _)| before.contains("iommu"))?;
    let (cause, rest) = rest.split_once(" devid: 0x")?;
    let (cause, device) = (cause.parse().ok()?, hex(rest.split(' ').next()?)?);
    let reason = match unit::reason_of(cause) {
        Reason::Other => format!("code {cause}"),
        reason => reason.to_string(),
    };
    let address = Some(hex(field(rest, " iotval: ")?)?);
    Some(One { device: format!("device {device:#x}"), access: unit::access_of(cause), reason, address })
}
