//! Registers and structures of the RISC-V IOMMU: where bits lie, and nothing else.
//!
//! Source: RISC-V IOMMU Architecture Specification, version 1.0 (ratified in 2023): chapter 2 "Data
//! Structures" (device directory table, device context), chapter 3 "In-memory queue interface"
//! (commands, fault records), chapter 5 "Memory-mapped register interface" (also for which bits are
//! capabilities). Ranges in commands: version 20260222, section 9.3 "Address Range Invalidation Extension, Version 1.0". Page
//! tables: those of [`portcullis::pgtable::Riscv`].
#![allow(missing_docs, reason = "names of the manual")]

use crate::blocks::sized_address;

/// Offsets of registers, in bytes. A 64-bit register may be written in two halves, the high one first.
pub mod reg {
    pub const CAPABILITIES: usize = 0x00;
    pub const FCTL: usize = 0x08;
    pub const DDTP: usize = 0x10;
    pub const CQB: usize = 0x18;
    pub const CQH: usize = 0x20;
    pub const CQT: usize = 0x24;
    pub const FQB: usize = 0x28;
    pub const FQH: usize = 0x30;
    pub const FQT: usize = 0x34;
    pub const CQCSR: usize = 0x48;
    pub const FQCSR: usize = 0x4c;
    pub const PQCSR: usize = 0x50;
}

/// Fields of `capabilities`.
pub mod cap {
    /// The major version: 1.
    pub const fn major(capabilities: u64) -> u64 {
        capabilities >> 4 & 0xf
    }
    /// First stage.
    pub const SV39: u64 = 1 << 9;
    pub const SV48: u64 = 1 << 10;
    pub const SV57: u64 = 1 << 11;
    /// Second stage.
    pub const SV39X4: u64 = 1 << 17;
    pub const SV48X4: u64 = 1 << 18;
    /// Any second-stage mode: the two above, Sv32x4 and Sv57x4.
    pub const SECOND_STAGE: u64 = 0xf << 16;
    /// Device contexts have the extended format.
    pub const MSI_FLAT: u64 = 1 << 22;
    pub const ATS: u64 = 1 << 25;
    /// Commands by address may name a range.
    pub const S: u64 = 1 << 43;
    /// Width of physical addresses.
    pub const fn physical_bits(capabilities: u64) -> u32 {
        (capabilities >> 32 & 0x3f) as u32
    }
}

/// Features (`fctl`): big-endian structures, second-stage tables of 32 bits.
pub const FCTL_BE: u32 = 1 << 0;
pub const FCTL_GXL: u32 = 1 << 2;

/// The page number in `ddtp`, in base registers of queues and in directory entries.
pub const NUMBER: u64 = 0x003f_ffff_ffff_fc00;
pub const fn number(address: u64) -> u64 {
    address >> 2 & NUMBER
}

/// The device directory's pointer (`ddtp`).
pub mod ddtp {
    pub const MODE: u64 = 0xf;
    pub const OFF: u64 = 0;
    pub const BARE: u64 = 1;
    /// A directory of `levels` levels, 1 to 3.
    pub const fn directory(levels: u32) -> u64 {
        levels as u64 + 1
    }
    pub const BUSY: u32 = 1 << 4;
}

/// Control and status of a queue (`cqcsr`, `fqcsr`, `pqcsr`).
pub mod csr {
    pub const ENABLE: u32 = 1 << 0;
    /// A memory access of the queue or of a command failed; write 1 to clear.
    pub const MEMORY_FAULT: u32 = 1 << 8;
    /// Commands: a fence timed out waiting for a device; write 1 to clear.
    pub const COMMAND_TIMED_OUT: u32 = 1 << 9;
    /// Commands: illegal command; write 1 to clear.
    pub const COMMAND_ILLEGAL: u32 = 1 << 10;
    pub const COMMAND_ERRORS: u32 = MEMORY_FAULT | COMMAND_TIMED_OUT | COMMAND_ILLEGAL;
    /// Faults: the queue has overflowed; write 1 to clear.
    pub const FAULT_OVERFLOW: u32 = 1 << 9;
    pub const FAULT_ERRORS: u32 = MEMORY_FAULT | FAULT_OVERFLOW;
    pub const ON: u32 = 1 << 16;
    pub const BUSY: u32 = 1 << 17;
    /// Bits that the manual does not define: written as read. (Bit 1 enables interrupts, bit 11 is one.)
    pub const KEPT: u32 = !(ENABLE | 1 << 1 | 0xf << 8 | ON | BUSY);
}

/// Base register of a queue of 2^`order` entries at `address`.
pub const fn queue_base(address: u64, order: u32) -> u64 {
    number(address) | (order as u64 - 1)
}
/// One frame: 256 commands of 16 bytes, or 128 fault records of 32.
pub const COMMAND_ORDER: u32 = 8;
pub const FAULT_ORDER: u32 = 7;
pub const FAULTS: u32 = 1 << FAULT_ORDER;

/// Commands, of 128 bits (section "Command-Queue").
pub mod command {
    const ADDRESS_VALID: u64 = 1 << 10;
    const PSCID_VALID: u64 = 1 << 32;
    const GSCID_VALID: u64 = 1 << 33;
    const DEVICE_VALID: u64 = 1 << 33;
    const VMA: u64 = 1;
    const GVMA: u64 = 1 | 1 << 7;
    const FENCE: u64 = 2;
    const DIRECTORY: u64 = 3;
    const ATS_INVALIDATE: u64 = 4;
    /// The opcode and the function.
    const KIND: u64 = 0x3ff;

    /// The address field of page-table commands, with the size 2^`order` pages encoded in it (S, bit 9).
    const fn pages(address: u64, order: u32) -> u64 {
        let range = if order == 0 { 0 } else { 1 << 9 };
        super::sized_address(address, order, 0) >> 12 << 10 & !(0x3 << 62) | range
    }

    /// IOTINVAL.VMA: first-stage translations: all, of one address space, and of 2^`order` of its pages (leaves only; one page, on a unit
    /// without ranges).
    pub const VMA_ALL: [u64; 2] = [VMA, 0];
    pub const fn vma(pscid: u32) -> [u64; 2] {
        [VMA | PSCID_VALID | (pscid as u64) << 12, 0]
    }
    pub const fn vma_pages(pscid: u32, address: u64, order: u32) -> [u64; 2] {
        [vma(pscid)[0] | ADDRESS_VALID, pages(address, order)]
    }
    /// The same for all address spaces of a guest.
    pub const fn vma_of_guest(gscid: u16) -> [u64; 2] {
        [VMA | GSCID_VALID | (gscid as u64) << 44, 0]
    }
    /// IOTINVAL.GVMA: second-stage translations: all, of one guest, and of 2^`order` of its pages, likewise.
    pub const GVMA_ALL: [u64; 2] = [GVMA, 0];
    pub const fn gvma(gscid: u16) -> [u64; 2] {
        [GVMA | GSCID_VALID | (gscid as u64) << 44, 0]
    }
    pub const fn gvma_pages(gscid: u16, address: u64, order: u32) -> [u64; 2] {
        [gvma(gscid)[0] | ADDRESS_VALID, pages(address, order)]
    }
    /// IODIR.INVAL_DDT: all of the directory, and one device's context.
    pub const DIRECTORY_ALL: [u64; 2] = [DIRECTORY, 0];
    pub const fn directory(device: u32) -> [u64; 2] {
        [DIRECTORY | DEVICE_VALID | (device as u64) << 40, 0]
    }
    /// IOFENCE.C: stores `value` at `address`, a multiple of 4, after all earlier commands are complete, and accesses processed by then are
    /// visible (PR, PW).
    pub const fn fence(value: u32, address: u64) -> [u64; 2] {
        [FENCE | ADDRESS_VALID | 1 << 12 | 1 << 13 | (value as u64) << 32, address >> 2]
    }
    /// A fence that does nothing else. The unit may reorder commands, but none from after a fence to before a command in front of it.
    pub const NOTHING: [u64; 2] = [FENCE, 0];
    pub const fn is_fence(first: u64) -> bool {
        first & KIND == FENCE
    }
    /// ATS.INVAL: the TLB of the device, 2^`order` pages at `address`; S is bit 11. The device ID has the PCI segment in its upper bits,
    /// which is valid if not 0.
    pub const fn device_tlb(device: u32, address: u64, order: u32) -> [u64; 2] {
        let segment = if device >> 16 == 0 { 0 } else { 1 << 33 };
        let first = ATS_INVALIDATE | segment | (device as u64 & 0xff_ffff) << 40;
        [first, super::sized_address(address, order, 1 << 11)]
    }
    /// The device of an ATS command.
    pub const fn device_of(first: u64) -> Option<u32> {
        if first & KIND == ATS_INVALIDATE { Some((first >> 40) as u32) } else { None }
    }
}

/// The directory: entries that lead to tables, and device contexts at the end.
pub mod directory {
    pub const VALID: u64 = 1;
    /// Device ID bits that index a context: a frame has 128, or 64 of the extended format.
    pub const fn context_bits(is_extended: bool) -> u32 {
        if is_extended { 6 } else { 7 }
    }
    /// Device ID bits of each higher level; the uppermost may have fewer.
    pub const TABLE_BITS: u32 = 9;
    pub const DEVICE_BITS: u32 = 24;
    pub const fn context_words(is_extended: bool) -> usize {
        if is_extended { 8 } else { 4 }
    }
}

/// A device context. If the translation control is not valid, the unit ignores the rest, which software may use.
pub mod context {
    /// Words: translation control, second stage, attributes, first stage; and in the extended format those of MSIs.
    pub const CONTROL: usize = 0;
    pub const SECOND: usize = 1;
    pub const ATTRIBUTES: usize = 2;
    pub const FIRST: usize = 3;
    /// In the control: valid.
    pub const VALID: u64 = 1;
    /// In the attributes: the PSCID.
    pub const fn pscid(number: u32) -> u64 {
        (number as u64) << 12
    }
    pub const fn pscid_of(attributes: u64) -> u32 {
        (attributes >> 12 & 0xf_ffff) as u32
    }
    /// A stage: its mode (0 is none), its GSCID (second stage only), and the root of the table.
    pub const fn stage(mode: u32, gscid: u16, root: u64) -> u64 {
        (mode as u64) << 60 | (gscid as u64) << 44 | root >> 12
    }
    pub const fn mode_of(stage: u64) -> u64 {
        stage >> 60
    }
    pub const fn gscid_of(stage: u64) -> u16 {
        (stage >> 44) as u16
    }
    pub const ROOT: u64 = 0x00ff_ffff_ffff_f000;
}

/// Fault records, of four words: header, reserved, address, details.
pub mod record {
    pub const WORDS: usize = 4;
    pub const ADDRESS: usize = 2;
    pub const fn cause(header: u64) -> u32 {
        (header & 0xfff) as u32
    }
    pub const fn process(header: u64) -> u32 {
        (header >> 12 & 0xf_ffff) as u32
    }
    pub const PROCESS_VALID: u64 = 1 << 32;
    pub const fn transaction(header: u64) -> u32 {
        (header >> 34 & 0x3f) as u32
    }
    pub const fn device(header: u64) -> u32 {
        (header >> 40) as u32
    }
}
