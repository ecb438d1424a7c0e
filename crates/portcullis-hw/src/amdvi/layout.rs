//! Registers and structures of AMD-Vi: where bits lie, and nothing else.
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, Rev. 3.10: section 2.2.2 "Device Table", section 2.4
//! "Commands", section 2.5 "Event Logging", section 3.2 "PCI Resources", section 3.4 "IOMMU MMIO Registers".
#![allow(missing_docs, reason = "names of the manual")]

use portcullis::addr::IovaRange;

use crate::blocks::sized_address;
use crate::iommu::addresses;

/// Offsets of registers, in bytes. All have 64 bits.
pub mod reg {
    pub const DEVICE_TABLE_BASE: usize = 0x00;
    pub const COMMAND_BASE: usize = 0x08;
    pub const EVENT_BASE: usize = 0x10;
    pub const CONTROL: usize = 0x18;
    pub const EXCLUSION_BASE: usize = 0x20;
    pub const EXTENDED_FEATURE: usize = 0x30;
    pub const COMMAND_HEAD: usize = 0x2000;
    pub const COMMAND_TAIL: usize = 0x2008;
    pub const EVENT_HEAD: usize = 0x2010;
    pub const EVENT_TAIL: usize = 0x2018;
    pub const STATUS: usize = 0x2020;
}

/// The Control register.
pub mod control {
    /// The unit translates. While clear, it neither fetches commands nor logs events.
    pub const IOMMU_EN: u64 = 1 << 0;
    pub const EVENT_LOG_EN: u64 = 1 << 2;
    /// Device table reads are snooped.
    pub const COHERENT: u64 = 1 << 10;
    pub const CMD_BUF_EN: u64 = 1 << 12;
    /// Link settings, which only firmware knows: HtTunEn, PassPW, ResPassPW, Isoc; and the SMI filter: SmiFEn, SmiFLogEn.
    pub const FIRMWARES: u64 = 1 << 1 | 1 << 8 | 1 << 9 | 1 << 11 | 1 << 22 | 1 << 24;
}

/// The Status register.
pub mod status {
    /// The event log has overflowed and stopped; write 1 to clear.
    pub const EVENT_OVERFLOW: u64 = 1 << 0;
    /// Interrupts of the event log and of COMPLETION_WAIT; write 1 to clear.
    pub const EVENT_LOG_INT: u64 = 1 << 1;
    pub const COM_WAIT_INT: u64 = 1 << 2;
    pub const EVENT_LOG_RUN: u64 = 1 << 3;
    pub const CMD_BUF_RUN: u64 = 1 << 4;
}

/// The Extended Feature register.
pub mod feature {
    /// INVALIDATE_IOMMU_ALL.
    pub const IA_SUP: u64 = 1 << 6;
    /// The most levels of a host page table; `None` for the reserved value.
    pub const fn host_levels(features: u64) -> Option<u32> {
        match features >> 10 & 3 {
            3 => None,
            hats => Some(4 + hats as u32),
        }
    }
}

/// The first 32 bits of the capability block in PCI configuration space (section 3.2.1).
pub mod capability {
    /// Capability ID, and the type of an IOMMU.
    pub const ID_AND_TYPE: u32 = 0x0007_00ff;
    pub const OF_AN_IOMMU: u32 = 3 << 16 | 0x0f;
    /// Caching mode: non-present entries may be cached.
    pub const NP_CACHE: u32 = 1 << 26;
    /// There is an Extended Feature register.
    pub const EFR_SUP: u32 = 1 << 27;
}

/// The exclusion range: enabled, for all devices.
pub const EXCLUSION_ON: u64 = 3;

/// Addresses that are never memory, as first and last: interrupts, and HyperTransport's reserved range (table "Special Address Controls").
pub const RESERVED: [IovaRange; 2] =
    [addresses(0xfee0_0000, 0xfeef_ffff), addresses(0xfd_0000_0000, 0xff_ffff_ffff)];

/// Device table base register, for a table of `frames` frames.
pub const fn device_table(table: u64, frames: usize) -> u64 {
    table | (frames as u64 - 1)
}

/// Base registers of the command buffer and the event log, for one frame: 256 entries of 16 bytes.
pub const fn ring_base(frame: u64) -> u64 {
    frame | 8 << 56
}

/// The index in a head or tail register, and back. QEMU 10's command head reads 256 instead of 0, once each lap.
pub const fn ring_index(register: u64) -> u32 {
    (register >> 4) as u32 & 0xff
}
pub const fn ring_place(index: u32) -> u64 {
    (index as u64) << 4
}

/// Device table entries, of four words. The last two, for interrupts, stay 0.
pub mod entry {
    pub const WORDS: usize = 4;
    pub const PER_FRAME: usize = 128;
    pub const VALID: u64 = 1 << 0;
    /// Page table root, mode, domain and permissions are valid.
    pub const TRANSLATION_VALID: u64 = 1 << 1;
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    pub const READ: u64 = 1 << 61;
    pub const WRITE: u64 = 1 << 62;
    pub const BLOCKED: u64 = VALID | TRANSLATION_VALID;
    pub const PASS_THROUGH: u64 = BLOCKED | READ | WRITE;
    pub const fn translated(root: u64, mode: u32) -> u64 {
        PASS_THROUGH | root | (mode as u64) << 9
    }
    pub const fn domain(second: u64) -> u16 {
        second as u16
    }
}

/// Commands, of 128 bits.
pub mod command {
    /// Stores `value` at `address`, a multiple of 8, after all earlier commands are complete.
    pub const fn completion_wait(value: u32, address: u64) -> [u64; 2] {
        [1 << 60 | address | 1, value as u64]
    }
    /// A no-op: COMPLETION_WAIT without a store.
    pub const NOTHING: [u64; 2] = [1 << 60, 0];
    /// COMPLETION_WAIT with the flush-queue bit: later commands begin after all earlier ones are complete.
    pub const BARRIER: [u64; 2] = [1 << 60 | 1 << 2, 0];
    pub const fn devtab_entry(device: u16) -> [u64; 2] {
        [2 << 60 | device as u64, 0]
    }
    /// 2^`order` pages of 4 KiB at `address`, which is aligned to their size. `leaf_only` keeps the paging-structure caches.
    pub const fn pages(domain: u16, address: u64, order: u32, leaf_only: bool) -> [u64; 2] {
        let directories = if leaf_only { 0 } else { 1 << 1 };
        [3 << 60 | (domain as u64) << 32, super::sized_address(address, order, S) | directories]
    }
    /// A device TLB, limited to one outstanding command at a time.
    pub const fn device_tlb(device: u16, address: u64, order: u32) -> [u64; 2] {
        let first = 4 << 60 | (device as u64) << 32 | 1 << 24 | device as u64;
        [first, super::sized_address(address, order, S)]
    }
    pub const DEVICE_TLB: u32 = 4;
    /// The address encodes the size.
    const S: u64 = 1;
    pub const ALL: [u64; 2] = [8 << 60, 0];
    pub const fn opcode(first: u64) -> u32 {
        (first >> 60) as u32
    }
}

/// Event log entries, of two words: the event code and its details, then an address.
pub mod event {
    pub const ILLEGAL_DEV_TABLE_ENTRY: u64 = 1;
    pub const IO_PAGE_FAULT: u64 = 2;
    pub const DEV_TAB_HARDWARE_ERROR: u64 = 3;
    pub const PAGE_TAB_HARDWARE_ERROR: u64 = 4;
    pub const ILLEGAL_COMMAND_ERROR: u64 = 5;
    pub const COMMAND_HARDWARE_ERROR: u64 = 6;
    pub const INVALID_DEVICE_REQUEST: u64 = 8;
    pub const INVALID_PPR_REQUEST: u64 = 9;
    pub const EVENT_COUNTER_ZERO: u64 = 10;
    pub const GUEST_EVENT_FAULT: u64 = 11;
    pub const VIOMMU_HARDWARE_ERROR: u64 = 12;
    pub const RMP_HARDWARE_ERROR: u64 = 14;
    pub const fn number(first: u64) -> u64 {
        first >> 60
    }
    /// Event code and flags.
    pub const fn code(first: u64) -> u32 {
        (first >> 48) as u32
    }
    pub const fn device(first: u64) -> u16 {
        first as u16
    }
    /// If GN is clear.
    pub const fn domain(first: u64) -> u16 {
        (first >> 32) as u16
    }
    /// If GN is set.
    pub const fn pasid(first: u64) -> u32 {
        (first >> 32) as u32 & 0xffff | first as u32 & 0xf_0000
    }
    pub const GN: u64 = 1 << 48;
    /// An interrupt.
    pub const I: u64 = 1 << 51;
    /// Page present.
    pub const PR: u64 = 1 << 52;
    /// Write.
    pub const RW: u64 = 1 << 53;
    /// Permission denied.
    pub const PE: u64 = 1 << 54;
    /// Reserved bit set.
    pub const RZ: u64 = 1 << 55;
    /// Translation request.
    pub const TR: u64 = 1 << 56;
}
