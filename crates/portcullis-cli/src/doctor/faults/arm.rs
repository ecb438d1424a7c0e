//! Faults of SMMUv3, and of SMMUs of versions 1 and 2.

use portcullis_hw::{Access, Reason, smmuv3};

use super::{MOST_BETWEEN, One, field, hex};

/// The text of a line of a driver's.
fn text<'a>(line: &'a str, driver: &str) -> Option<&'a str> {
    Some(line.strip_prefix(driver)?.split_once(": ")?.1.trim())
}

const VERSION_3: &str = "arm-smmu-v3 ";
const VERSION_2: &str = "arm-smmu ";

/// Since 6.15 lines in words follow each record.
pub fn has_words(lines: &[String]) -> bool {
    lines.iter().any(|line| text(line, VERSION_3).is_some_and(|text| text.starts_with("event: ")))
}

/// An event of SMMUv3's, by its words if the kernel prints any, or else by its record.
pub fn version_3(before: &[String], lines: &[String], has_words: bool) -> Option<One> {
    let line = text(lines.first()?, VERSION_3)?;
    if has_words { words(before, line, lines) } else { record(lines) }
}

/// `event: F_TRANSLATION client: 0000:01:00.0 sid: 0x100 ssid: 0x0 iova: 0xfff0 ipa: 0x0`, and then `unpriv data write s1 "Input address
/// caused fault" stag: 0x0`. Linux has no name for some codes, which are in the record before.
fn words(before: &[String], line: &str, lines: &[String]) -> Option<One> {
    let rest = line.strip_prefix("event: ").filter(|rest| rest.contains(" sid: "))?;
    let name = rest.split(' ').next()?;
    let client = field(rest, "client: ").filter(|client| !client.starts_with('('));
    let device = client.map(str::to_owned).or_else(|| Some(format!("stream {}", field(rest, "sid: ")?)))?;
    let of_record = || before.iter().rev().take(MOST_BETWEEN).find_map(|line| code_of_record(line));
    let of_name = EVENTS.iter().find(|(own, _)| *own == name).map(|(_, code)| *code);
    let reason = of_name.or_else(of_record).map_or_else(|| name.to_owned(), reason);
    let address = field(rest, "iova: ").and_then(hex);
    // An event without an address has no line about the access.
    let mut behind = lines.iter().skip(1).take(MOST_BETWEEN).filter_map(|line| text(line, VERSION_3));
    let access = address.and_then(|_| access(behind.next()?));
    Some(One { device, access, reason, address })
}

fn access(text: &str) -> Option<Access> {
    let mut words = text.split(' ');
    words.next().filter(|word| ["priv", "unpriv"].contains(word))?;
    match (words.next()?, words.next()?) {
        ("inst", "read") => Some(Access::Execute),
        ("data", "read") => Some(Access::Read),
        ("data" | "inst", "write") => Some(Access::Write),
        _ => None,
    }
}

fn code_of_record(line: &str) -> Option<u8> {
    let code = text(line, VERSION_3)?.strip_prefix("event 0x")?.strip_suffix(" received:")?;
    u8::from_str_radix(code, 16).ok()
}

/// `event 0x10 received:`, and the record's words in the four lines behind.
fn record(lines: &[String]) -> Option<One> {
    let word = |at: usize| hex(text(lines.get(at)?, VERSION_3)?);
    let code = code_of_record(lines.first()?)?;
    let (first, second, address) = (word(1)?, word(2)?, word(3)?);
    // Others have no such fields.
    let of_access = matches!(code, 0x01 | 0x07 | 0x0b | 0x10..=0x13 | 0x20);
    let access = match (second >> 35 & 1 != 0, second >> 34 & 1 != 0) {
        (true, true) => Access::Execute,
        (true, false) => Access::Read,
        (false, _) => Access::Write,
    };
    Some(One {
        device: format!("stream {:#x}", first >> 32),
        access: of_access.then_some(access),
        reason: reason(code),
        address: of_access.then_some(address),
    })
}

fn reason(code: u8) -> String {
    match smmuv3::reason_of(code) {
        Reason::Other => {
            let name = EVENTS.iter().find(|(_, own)| *own == code);
            let name = name.map_or(String::new(), |(name, _)| format!(" ({name})"));
            format!("code {code:#x}{name}")
        }
        reason => reason.to_string(),
    }
}

/// Source: Arm IHI 0070, section 7.3.
const EVENTS: [(&str, u8); 19] = [
    ("F_UUT", 0x01),
    ("C_BAD_STREAMID", 0x02),
    ("F_STE_FETCH", 0x03),
    ("C_BAD_STE", 0x04),
    ("F_BAD_ATS_TREQ", 0x05),
    ("F_STREAM_DISABLED", 0x06),
    ("F_TRANSL_FORBIDDEN", 0x07),
    ("C_BAD_SUBSTREAMID", 0x08),
    ("F_CD_FETCH", 0x09),
    ("C_BAD_CD", 0x0a),
    ("F_WALK_EABT", 0x0b),
    ("F_TRANSLATION", 0x10),
    ("F_ADDR_SIZE", 0x11),
    ("F_ACCESS", 0x12),
    ("F_PERMISSION", 0x13),
    ("F_TLB_CONFLICT", 0x20),
    ("F_CFG_CONFLICT", 0x21),
    ("E_PAGE_REQUEST", 0x24),
    ("F_VMS_FETCH", 0x25),
];

/// A fault of an SMMU of version 1 or 2, as far as its stream is told.
pub fn version_2(lines: &[String]) -> Option<One> {
    let line = text(lines.first()?, VERSION_2)?;
    if let Some(rest) = line.strip_prefix("Unhandled context fault: ") {
        return context_fault(rest);
    }
    if let Some(stream) = line.strip_prefix("Blocked unknown Stream ID ") {
        let stream = hex(stream.split([';', ' ']).next()?)?;
        return Some(global_fault(stream, Reason::NotAttached.to_string()));
    }
    if line != "Unexpected global fault, this could be serious" {
        return None;
    }
    let mut behind = lines.iter().skip(1).take(MOST_BETWEEN).filter_map(|line| text(line, VERSION_2));
    let registers = behind.find(|text| text.starts_with("GFSR "))?;
    let status = field(registers, "GFSR ").and_then(hex)?;
    let stream = field(registers, "GFSYNR1 ").and_then(hex)? & 0xffff;
    // A stream whose context is not valid, or that is none of the SMMU's (IHI 0062, SMMU_sGFSR).
    let is_unknown = status & 3 != 0;
    let reason =
        if is_unknown { Reason::NotAttached.to_string() } else { format!("global fault, GFSR {status:#x}") };
    Some(global_fault(stream, reason))
}

fn global_fault(stream: u64, reason: String) -> One {
    One { device: format!("stream {stream:#x}"), access: None, reason, address: None }
}

/// `fsr=0x402, iova=0xfc401000, fsynr=0x60003, cbfrsynra=0x121, cb=38`. Bit 4 of FSYNR is a write, and bits 1 and 3 of FSR say what failed
/// (IHI 0062, section 16.5).
fn context_fault(text: &str) -> Option<One> {
    let (fsr, fsynr) = (field(text, "fsr=").and_then(hex)?, field(text, "fsynr=").and_then(hex)?);
    let reason = match () {
        () if fsr & 2 != 0 => Reason::NotMapped.to_string(),
        () if fsr & 12 != 0 => Reason::Permission.to_string(),
        () => format!("context fault, FSR {fsr:#x}"),
    };
    let stream = field(text, "cbfrsynra=").and_then(hex).map(|all| format!("stream {:#x}", all & 0xffff));
    let access = if fsynr & 16 != 0 { Access::Write } else { Access::Read };
    Some(One {
        device: stream.unwrap_or_else(|| "a device of the SMMU".into()),
        access: Some(access),
        reason,
        address: field(text, "iova=").and_then(hex),
    })
}
