//! Accesses that an IOMMU refused, as each vendor's driver in Linux prints them, in the words of `portcullis_hw`.
//!
//! Lines of the log are text that any driver may print, and fields of them may say anything: what does not have the form is no fault.

use std::collections::BTreeMap;

use portcullis_hw::{Access, Reason, amdvi, smmuv3, vtd};
use serde::Serialize;

use super::log::Log;

/// The most addresses that are told of a device and a reason.
const MOST_ADDRESSES: usize = 3;

/// What devices and reasons a log may name before the rest is only counted.
const MOST_KINDS: usize = 64;

/// Refused accesses of one device, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Faults {
    pub device: String,
    /// `read`, `write`; `None` where the line does not say.
    pub access: Option<String>,
    pub reason: String,
    pub count: usize,
    /// The first ones.
    pub addresses: Vec<String>,
}

/// One line's.
#[derive(Debug, PartialEq, Eq)]
struct One {
    device: String,
    access: Option<Access>,
    reason: String,
    address: Option<u64>,
}

/// All of the log, those with the most first.
pub fn of(log: &Log) -> Vec<Faults> {
    let mut found: BTreeMap<(String, Option<String>, String), Faults> = BTreeMap::new();
    // Since 6.15 a line in words follows the words of a record.
    let has_words =
        log.lines.iter().any(|line| line.starts_with("arm-smmu-v3 ") && line.contains(": event: "));
    let raw = |at: usize| log.lines.get(at..).filter(|_| !has_words).and_then(smmu_v3_record);
    let ones = log.lines.iter().enumerate().filter_map(|(at, line)| line_of(line).or_else(|| raw(at)));
    for one in ones {
        let access = one.access.map(|access| access.to_string());
        let key = (one.device.clone(), access.clone(), one.reason.clone());
        if found.len() >= MOST_KINDS && !found.contains_key(&key) {
            continue;
        }
        let empty =
            || Faults { device: one.device, access, reason: one.reason, count: 0, addresses: Vec::new() };
        let faults = found.entry(key).or_insert_with(empty);
        faults.count += 1;
        let address = one.address.map(|address| format!("{address:#x}"));
        if let Some(address) = address.filter(|address| !faults.addresses.contains(address)) {
            faults.addresses.push(address);
            faults.addresses.truncate(MOST_ADDRESSES);
        }
    }
    let mut all: Vec<Faults> = found.into_values().collect();
    all.sort_by_key(|faults| std::cmp::Reverse(faults.count));
    all
}

fn line_of(line: &str) -> Option<One> {
    if let Some(text) = line.strip_prefix("DMAR: ").or_else(|| line.strip_prefix("dmar: ")) {
        return vtd_line(text);
    }
    if let Some((before, text)) = line.split_once("AMD-Vi: Event logged [") {
        return amd_line(before, text);
    }
    if let Some((_, text)) = line.strip_prefix("arm-smmu-v3 ").and_then(|rest| rest.split_once(": ")) {
        return smmu_v3_line(text.trim_start());
    }
    if let Some((_, text)) = line.strip_prefix("arm-smmu ").and_then(|rest| rest.split_once(": ")) {
        return smmu_v2_line(text);
    }
    let (_, text) = line.strip_prefix("virtio_iommu ").and_then(|rest| rest.split_once(": "))?;
    virtio_line(text)
}

/// What stands between `before` and the next blank, comma or bracket.
fn field<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    let end = rest.find([' ', ',', ']']).unwrap_or(rest.len());
    rest.get(..end).filter(|field| !field.is_empty())
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

/// `[DMA Read NO_PASID] Request device [00:02.0] fault addr 0x7c000000 [fault reason 0x06] PTE Read access is not set`. Before 5.15 without
/// `NO_PASID`, with the address bare, and the reason decimal; 5.12 has `[0x00:0x02.0]`.
fn vtd_line(text: &str) -> Option<One> {
    let (_, device) = text.split_once("Request device [")?;
    let device = full_name(device.split(']').next()?)?;
    let (_, reason) = text.split_once("[fault reason ")?;
    let code = reason.split(']').next()?;
    let code = code
        .strip_prefix("0x")
        .map_or_else(|| code.parse().ok(), |code| u8::from_str_radix(code, 16).ok())?;
    let access = match () {
        () if text.starts_with("[DMA Read") => Some(Access::Read),
        () if text.starts_with("[DMA Write") => Some(Access::Write),
        () => None,
    };
    let reason = match vtd::reason_of(code) {
        _ if text.starts_with("[INTR-REMAP]") => {
            format!("an interrupt that nobody allowed it (code {code:#x})")
        }
        Reason::Other => format!("code {code:#x}"),
        reason => reason.to_string(),
    };
    Some(One { device, access, reason, address: field(text, "fault addr ").and_then(hex) })
}

/// `0000:02:00.0` for `02:00.0`, and the same for `0x02:0x00.0`; `None` for what is no PCI address.
fn full_name(name: &str) -> Option<String> {
    let name = name.replace("0x", "");
    let name = if name.matches(':').count() == 1 { format!("0000:{name}") } else { name };
    let is_hex = |c: char| c.is_ascii_hexdigit() || ":.".contains(c);
    ((7..=16).contains(&name.len()) && name.chars().all(is_hex)).then_some(name)
}

/// `nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xfdf8000000 flags=0x0070]`, or with `device=01:00.0` in
/// the brackets where the device has no driver or is gone.
fn amd_line(before: &str, text: &str) -> Option<One> {
    let name = text.split([' ', ']']).next()?;
    let code = match name {
        "ILLEGAL_DEV_TABLE_ENTRY" => 1,
        "IO_PAGE_FAULT" => 2,
        "DEV_TAB_HARDWARE_ERROR" => 3,
        "PAGE_TAB_HARDWARE_ERROR" => 4,
        "INVALID_DEVICE_REQUEST" => 8,
        "INVALID_PPR_REQUEST" => 9,
        _ => return None,
    };
    let number = |name: &str| field(text, name).and_then(hex).unwrap_or_default();
    let address = field(text, "address=").and_then(hex);
    let (flags, domain) = (number("flags=") & 0xfff, number("domain=") & 0xffff);
    let fault = amdvi::decode_event(code << 60 | flags << 48 | domain << 32, address.unwrap_or_default())?;
    let of_driver = || before.trim_end().trim_end_matches(':').rsplit(' ').next();
    let device = field(text, "device=").or_else(of_driver).and_then(full_name)?;
    Some(One { device, access: fault.access, reason: fault.reason.to_string(), address })
}

/// Since 6.15 `event: F_TRANSLATION client: 0000:01:00.0 sid: 0x100 ssid: 0x0 iova: 0xfff0 ipa: 0x0`.
fn smmu_v3_line(text: &str) -> Option<One> {
    let rest = text.strip_prefix("event: ").filter(|rest| rest.contains(" sid: "))?;
    let name = rest.split(' ').next()?;
    let client = field(rest, "client: ").filter(|client| !client.starts_with('('));
    let device = client.map(str::to_owned).or_else(|| Some(format!("stream {}", field(rest, "sid: ")?)))?;
    let reason = event_code(name).map_or_else(|| name.to_owned(), |code| smmuv3::reason_of(code).to_string());
    Some(One { device, access: None, reason, address: field(rest, "iova: ").and_then(hex) })
}

/// `event 0x10 received:`, and the record's words in the four lines behind.
fn smmu_v3_record(lines: &[String]) -> Option<One> {
    let text = |at: usize| Some(lines.get(at)?.strip_prefix("arm-smmu-v3 ")?.split_once(": ")?.1.trim());
    let code = text(0)?.strip_prefix("event 0x")?.strip_suffix(" received:")?;
    let code = u8::from_str_radix(code, 16).ok()?;
    let (first, second, address) = (hex(text(1)?)?, hex(text(2)?)?, hex(text(3)?)?);
    let of_access = (0x10..=0x13).contains(&code);
    let access = if second >> 35 & 1 != 0 { Access::Read } else { Access::Write };
    Some(One {
        device: format!("stream {:#x}", first >> 32),
        access: of_access.then_some(access),
        reason: smmuv3::reason_of(code).to_string(),
        address: of_access.then_some(address),
    })
}

/// Source: Arm IHI 0070, section 7.3.
fn event_code(name: &str) -> Option<u8> {
    const NAMES: [(&str, u8); 12] = [
        ("C_BAD_STREAMID", 0x02),
        ("F_STE_FETCH", 0x03),
        ("C_BAD_STE", 0x04),
        ("F_STREAM_DISABLED", 0x06),
        ("C_BAD_SUBSTREAMID", 0x08),
        ("F_CD_FETCH", 0x09),
        ("C_BAD_CD", 0x0a),
        ("F_TRANSLATION", 0x10),
        ("F_ADDR_SIZE", 0x11),
        ("F_ACCESS", 0x12),
        ("F_PERMISSION", 0x13),
        ("F_VMS_FETCH", 0x25),
    ];
    NAMES.iter().find(|(own, _)| *own == name).map(|(_, code)| *code)
}

/// `Unhandled context fault: fsr=0x402, iova=0xfc401000, fsynr=0x60003, cbfrsynra=0x121, cb=38`. Bit 4 of FSYNR is a write, and bits 1 and 3
/// of FSR say what failed (IHI 0062, section 16.5).
fn smmu_v2_line(text: &str) -> Option<One> {
    let rest = text.strip_prefix("Unhandled context fault: ")?;
    let (fsr, fsynr) = (field(rest, "fsr=").and_then(hex)?, field(rest, "fsynr=").and_then(hex)?);
    let reason = match () {
        () if fsr & 2 != 0 => Reason::NotMapped,
        () if fsr & 12 != 0 => Reason::Permission,
        () => Reason::Other,
    };
    let stream = field(rest, "cbfrsynra=").and_then(hex).map(|all| format!("stream {:#x}", all & 0xffff));
    let access = if fsynr & 16 != 0 { Access::Write } else { Access::Read };
    Some(One {
        device: stream.unwrap_or_else(|| "a device of the SMMU".into()),
        access: Some(access),
        reason: reason.to_string(),
        address: field(rest, "iova=").and_then(hex),
    })
}

/// `page fault from EP 8 at 0x1000 [W]`; `domain fault from EP 8`. An endpoint of PCI is its bus, device and function.
fn virtio_line(text: &str) -> Option<One> {
    let (kind, rest) = text.split_once(" fault from EP ")?;
    let reason = match kind {
        "domain" => Reason::NotAttached,
        "page" => Reason::NotMapped,
        "unknown" => Reason::Other,
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
    Some(One { device, access, reason: reason.to_string(), address: field(rest, "at ").and_then(hex) })
}

#[cfg(test)]
#[path = "../../tests/doctor/faults.rs"]
mod tests;
