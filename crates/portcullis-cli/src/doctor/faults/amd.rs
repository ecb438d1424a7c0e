//! AMD-Vi's events.

use portcullis_hw::{Reason, amdvi};

use super::{One, field, full_name, hex};

/// Names and codes. The device of the last is one that did not confirm an invalidation.
const EVENTS: [(&str, u64); 7] = [
    ("ILLEGAL_DEV_TABLE_ENTRY", 1),
    ("IO_PAGE_FAULT", IO_PAGE_FAULT),
    ("DEV_TAB_HARDWARE_ERROR", 3),
    ("PAGE_TAB_HARDWARE_ERROR", 4),
    ("INVALID_DEVICE_REQUEST", 8),
    ("INVALID_PPR_REQUEST", 9),
    ("IOTLB_INV_TIMEOUT", IOTLB_INV_TIMEOUT),
];
const IO_PAGE_FAULT: u64 = 2;
const IOTLB_INV_TIMEOUT: u64 = 7;

/// Of an interrupt, in `flags`.
const INTERRUPT: u64 = 1 << 3;

/// An event from its name on, and what stands before `AMD-Vi: Event logged [`. Stable kernels of 4.19 leave `AMD-Vi: ` out. Up to 4.19 the
/// event may come in another line than these words.
pub fn event(line: &str) -> Option<(&str, &str)> {
    if let Some((before, text)) = line.split_once("Event logged [") {
        return Some((before.strip_suffix("AMD-Vi: ").unwrap_or(before), text));
    }
    let unit = line.strip_prefix("iommu ivhd").and_then(|rest| rest.split_once(": "));
    let text = unit.map_or(line, |(_, text)| text);
    let (name, _) = text.split_once(" device=")?;
    code(name).map(|_| ("", text))
}

fn code(name: &str) -> Option<u64> {
    EVENTS.iter().find(|(own, _)| *own == name).map(|(_, code)| *code)
}

/// `nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xfdf8000000 flags=0x0070]`, or with `device=01:00.0` in
/// the brackets where the device has no driver or is gone.
pub fn fault(line: &str) -> Option<One> {
    let (before, text) = event(line)?;
    let code = code(text.split([' ', ']']).next()?).filter(|code| *code != IOTLB_INV_TIMEOUT)?;
    let number = |name: &str| field(text, name).and_then(hex).unwrap_or_default();
    let flags = number("flags=") & 0xfff;
    // From 4.18 to 5.3 Linux prints bits of the PASID's as the domain, which are 0 for nearly all. So 0 may be any domain, and the flags
    // decide.
    let domain = Some(number("domain=") & 0xffff).filter(|domain| *domain != 0).unwrap_or(1);
    let address = field(text, "address=").and_then(hex);
    let of_driver = || before.trim_end().trim_end_matches(':').rsplit(' ').next();
    let device = field(text, "device=").or_else(of_driver).and_then(full_name)?;
    if code == IO_PAGE_FAULT && flags & INTERRUPT != 0 {
        let reason = format!("an interrupt that nobody allowed it (flags {flags:#x})");
        return Some(One { device, access: None, reason, address: None });
    }
    let fault = amdvi::decode_event(code << 60 | flags << 48 | domain << 32, address.unwrap_or_default())?;
    let reason = match fault.reason {
        Reason::Other => format!("code {:#x}", fault.code),
        reason => reason.to_string(),
    };
    Some(One { device, access: fault.access, reason, address })
}
