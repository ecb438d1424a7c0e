//! Where firmware's tables are, and where the devices of PCI bus 0.

use crate::boot::{inl, outl};

/// The bytes of memory from `at` on.
///
/// # Safety
/// Memory that firmware has written, and that nothing changes.
unsafe fn bytes(at: u64, len: usize) -> &'static [u8] {
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(at as *const u8, len) }
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The table of this signature, by the root pointer at `rsdp`.
pub fn table(rsdp: u64, signature: [u8; 4]) -> Option<&'static [u8]> {
    // SAFETY: the loader has named it.
    let root = unsafe { bytes(rsdp, 36) };
    // Revision 2 has addresses of 64 bits.
    let (at, width) = if root[15] >= 2 { (number(root, 24, 8), 8) } else { (number(root, 16, 4), 4) };
    let whole = |at: u64| {
        // SAFETY: firmware's own pointers to its tables, which begin with their length.
        unsafe { bytes(at, number(bytes(at, 8), 4, 4) as usize) }
    };
    let list = whole(at).get(36..)?;
    list.chunks_exact(width)
        .map(|entry| number(entry, 0, width))
        .map(whole)
        .find(|table| table[..4] == signature)
}

/// A device of bus 0, by its number: device and function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pci(pub u8);

impl Pci {
    /// The first device whose word at `register` has `value` where `mask` is set.
    pub fn find(register: u8, mask: u32, value: u32) -> Option<Self> {
        (0..=u8::MAX)
            .map(Self)
            .find(|device| device.read(0) != u32::MAX && device.read(register) & mask == value)
    }

    /// 32 bits of its configuration space.
    pub fn read(self, register: u8) -> u32 {
        outl(0xcf8, 0x8000_0000 | u32::from(self.0) << 8 | u32::from(register));
        inl(0xcfc)
    }

    /// Writes 32 bits there.
    pub fn write(self, register: u8, value: u32) {
        outl(0xcf8, 0x8000_0000 | u32::from(self.0) << 8 | u32::from(register));
        outl(0xcfc, value);
    }

    /// Where its first registers are, as firmware has placed them, switched on.
    pub fn registers(self) -> u64 {
        self.write(4, self.read(4) | 6);
        let low = self.read(0x10);
        // Memory type 2: 64 bits.
        let high = if low >> 1 & 3 == 2 { self.read(0x14) } else { 0 };
        u64::from(high) << 32 | u64::from(low & !0xf)
    }
}
