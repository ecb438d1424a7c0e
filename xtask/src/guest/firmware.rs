//! What the guest's firmware says of a port besides what QEMU's tables say: that what is plugged into it comes from outside.
//!
//! ACPI's language in bytes (ACPI 6.5, section 20.2): a package has its length first, which counts itself.

/// The property of a port that is external, for people to plug devices in, as Linux knows it (`ExternalFacingPort`).
const EXTERNAL: [u8; 16] =
    [0xcc, 0x06, 0xcc, 0xef, 0xac, 0x73, 0xc3, 0x4b, 0xbf, 0xf0, 0x76, 0x14, 0x38, 0x07, 0xc3, 0x89];

/// The content of a table (SSDT) that marks the root port in a slot of the first bus as external: QEMU calls its object by its number.
pub fn external(slot: u8) -> Vec<u8> {
    // Scope (\_SB.PCI0.Sxx) { Name (_DSD, Package () { UUID, Package () { Package () { "ExternalFacingPort", 1 } } }) }
    let property = package(2, &[b"\x0dExternalFacingPort\0\x01"]);
    let properties = package(1, &[&property]);
    let uuid = long(0x11, &[&[0x0a, 16], &EXTERNAL]);
    let data = package(2, &[&uuid, &properties]);
    let port = format!("\\\x2f\x03_SB_PCI0S{:02X}_", slot << 3);
    long(0x10, &[port.as_bytes(), b"\x08_DSD", &data])
}

fn package(elements: u8, parts: &[&[u8]]) -> Vec<u8> {
    long(0x12, &[&[elements], &parts.concat()])
}

/// What has a length of its own: in one byte up to 63, else in two.
fn long(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let mut bytes = vec![kind];
    match content.len() + 1 {
        len @ ..64 => bytes.push(len as u8),
        len => bytes.extend([0x40 | ((len + 1) & 0xf) as u8, ((len + 1) >> 4) as u8]),
    }
    bytes.extend(content);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As ACPICA's `iasl` compiles it.
    #[test]
    fn the_table_is_what_a_compiler_makes() {
        let wanted = b"\x10\x48\x04\\\x2f\x03_SB_PCI0S70_\x08_DSD\x12\x31\x02\x11\x13\x0a\x10\xcc\x06\xcc\xef\xacs\xc3K\xbf\xf0v\x148\x07\xc3\x89\x12\x1a\x01\x12\x17\x02";
        let table = external(0x0e);
        assert_eq!(table[..], [&wanted[..], b"\x0dExternalFacingPort\0\x01"].concat());
    }
}
