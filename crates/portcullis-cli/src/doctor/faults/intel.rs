//! VT-d's faults.

use portcullis_hw::{Access, Reason, vtd};

use super::{MOST_BETWEEN, One, field, full_name, hex};

/// `DMAR: [DMA Read NO_PASID] Request device [00:02.0] fault addr 0x7c000000 [fault reason 0x06] PTE Read access is not set`. Before 5.15
/// without `NO_PASID`, with the address bare, and the reason decimal; 5.12 has `[0x00:0x02.0]`.
///
/// Up to 4.6 `DMAR: DMAR:[DMA Read] Request device [00:02.0] fault addr 7c000000 `, or `dmar: INTR-REMAP: Request device [[f0:1f.7] fault index
/// 57`, and the reason in a line of its own.
pub fn fault(lines: &[String]) -> Option<One> {
    let (line, behind) = lines.split_first()?;
    let text = line.strip_prefix("DMAR: ").or_else(|| line.strip_prefix("dmar: "))?;
    let text = text.strip_prefix("DMAR:").unwrap_or(text);
    let (_, device) = text.split_once("Request device [")?;
    let device = full_name(device.trim_start_matches('[').split(']').next()?)?;
    let in_line = text.split_once("[fault reason ").map(|(_, reason)| reason);
    let code = in_line.or_else(|| reason_behind(behind))?.split(']').next()?;
    let code = code
        .strip_prefix("0x")
        .map_or_else(|| code.parse().ok(), |code| u8::from_str_radix(code, 16).ok())?;
    let access = match () {
        () if text.starts_with("[DMA Read") => Some(Access::Read),
        () if text.starts_with("[DMA Write") => Some(Access::Write),
        () => None,
    };
    let is_interrupt = text.starts_with("[INTR-REMAP]") || text.starts_with("INTR-REMAP:");
    let reason = match vtd::reason_of(code) {
        _ if is_interrupt => format!("an interrupt that nobody allowed it (code {code:#x})"),
        Reason::Other => format!("code {code:#x}"),
        reason => reason.to_string(),
    };
    Some(One { device, access, reason, address: field(text, "fault addr ").and_then(hex) })
}

/// Of `DMAR:[fault reason 05] PTE Write access is not set`, the second line of one message. Programs indent it, or give it a time.
fn reason_behind(lines: &[String]) -> Option<&str> {
    lines.iter().take(MOST_BETWEEN).find_map(|line| {
        let line = line.trim_start();
        let text = line.strip_prefix("DMAR:").or_else(|| line.strip_prefix("INTR-REMAP:"))?;
        text.strip_prefix("[fault reason ")
    })
}
