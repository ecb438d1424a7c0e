//! Registers and structures of Intel VT-d: where bits lie, and nothing else.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, Rev. 4.1 (March 2023): section 6.5 "Invalidation
//! of Translation Caches", chapter 7 "Address Translation Faults", chapter 9 "Translation Structure Formats", section 11.4 "Register
//! Descriptions"; "Handling Requests to Interrupt Address Range" in chapter 3.
#![allow(missing_docs, reason = "names of the manual")]

use portcullis::addr::IovaRange;

use crate::blocks::sized_address;
use crate::iommu::addresses;

/// Writes there are interrupts; other accesses are refused.
pub const INTERRUPTS: [IovaRange; 1] = [addresses(0xfee0_0000, 0xfeef_ffff)];

/// Offsets of registers, in bytes.
pub mod reg {
    pub const VER: usize = 0x00;
    pub const CAP: usize = 0x08;
    pub const ECAP: usize = 0x10;
    pub const GCMD: usize = 0x18;
    pub const GSTS: usize = 0x1c;
    pub const RTADDR: usize = 0x20;
    pub const FSTS: usize = 0x34;
    pub const FECTL: usize = 0x38;
    pub const PMEN: usize = 0x64;
    pub const IQH: usize = 0x80;
    pub const IQT: usize = 0x88;
    pub const IQA: usize = 0x90;
    pub const IQERCD: usize = 0xb0;
}

/// Global command and status (GCMD, GSTS).
pub mod global {
    /// Translation is on.
    pub const TE: u32 = 1 << 31;
    /// The root table pointer is taken.
    pub const SRTP: u32 = 1 << 30;
    /// Faults are logged in memory.
    pub const EAFL: u32 = 1 << 28;
    /// The write buffer is flushed. Its status is 1 until that is done.
    pub const WBF: u32 = 1 << 27;
    /// Queued invalidation is on.
    pub const QIE: u32 = 1 << 26;
    /// The state bits of GSTS: a command that changes one repeats the others. The other bits (SRTP, SFL, WBF, SIRTP) would act again.
    pub const STATES: u32 = 0x96ff_ffff;
}

/// Fault status (FSTS).
pub mod fsts {
    /// Primary fault overflow; write 1 to clear.
    pub const PFO: u32 = 1 << 0;
    /// A fault is recorded.
    pub const PPF: u32 = 1 << 1;
    /// Invalidation queue error: the unit has stopped at an invalid descriptor; write 1 to clear.
    pub const IQE: u32 = 1 << 4;
    /// A device sent an unexpected invalidation completion; write 1 to clear.
    pub const ICE: u32 = 1 << 5;
    /// A device TLB invalidation timed out; write 1 to clear.
    pub const ITE: u32 = 1 << 6;
}

/// Mode of the root table (RTADDR, section 11.4.5): legacy mode, scalable mode. 3 refuses all.
pub const RTADDR_MODE: u64 = 3 << 10;
pub const RTADDR_LEGACY: u64 = 0 << 10;
pub const RTADDR_SCALABLE: u64 = 1 << 10;

/// Fault events (FECTL): interrupt mask.
pub const FECTL_IM: u32 = 1 << 31;

/// Protected memory (PMEN): enable, and its status.
pub const PMEN_EPM: u32 = 1 << 31;
pub const PMEN_PRS: u32 = 1 << 0;

/// Fields of the Capability Register.
pub mod cap {
    /// Width of domain numbers.
    pub const fn domain_bits(cap: u64) -> u32 {
        4 + 2 * (cap & 7) as u32
    }
    pub const RWBF: u64 = 1 << 4;
    pub const PLMR: u64 = 1 << 5;
    pub const PHMR: u64 = 1 << 6;
    pub const CM: u64 = 1 << 7;
    /// Bit *n*: the unit walks tables of *n* + 2 levels.
    pub const fn sagaw(cap: u64) -> u32 {
        (cap >> 8 & 0x1f) as u32
    }
    /// Width of the addresses that a device may use.
    pub const fn mgaw(cap: u64) -> u32 {
        (cap >> 16 & 0x3f) as u32 + 1
    }
    /// Offset of the fault records, in bytes.
    pub const fn fault_offset(cap: u64) -> usize {
        (cap >> 24 & 0x3ff) as usize * 16
    }
    /// Second stage: pages of 2 MiB, of 1 GiB.
    pub const PAGES_2M: u64 = 1 << 34;
    pub const PAGES_1G: u64 = 1 << 35;
    /// Page-selective invalidation.
    pub const PSI: u64 = 1 << 39;
    pub const fn fault_records(cap: u64) -> usize {
        (cap >> 40 & 0xff) as usize + 1
    }
    /// The largest mask of a page-selective invalidation.
    pub const fn mamv(cap: u64) -> u32 {
        (cap >> 48 & 0x3f) as u32
    }
    /// Invalidations can drain writes, drain reads.
    pub const DWD: u64 = 1 << 54;
    pub const DRD: u64 = 1 << 55;
    /// First stage: 1 GiB pages (2 MiB are always there), 5 levels (4 always are).
    pub const FS1GP: u64 = 1 << 56;
    pub const FS5LP: u64 = 1 << 60;
    /// A root table can be set while translation is on, whatever its mode.
    pub const ESRTPS: u64 = 1 << 63;
}

/// Fields of the Extended Capability Register.
pub mod ecap {
    /// The walker is coherent.
    pub const C: u64 = 1 << 0;
    pub const QI: u64 = 1 << 1;
    pub const DT: u64 = 1 << 2;
    pub const PT: u64 = 1 << 6;
    pub const SC: u64 = 1 << 7;
    /// Scalable mode; in it, the second stage, the first stage.
    pub const SMTS: u64 = 1 << 43;
    pub const SSTS: u64 = 1 << 46;
    pub const FSTS: u64 = 1 << 47;
    /// In scalable mode, walks of PASID tables and page tables can be coherent.
    pub const SMPWC: u64 = 1 << 48;
}

/// IQA for 256 descriptors: one frame of 16 bytes each, or (with DW) two frames of 32 bytes each.
pub const IQA_NARROW: u64 = 0;
pub const IQA_WIDE: u64 = 1 << 11 | 1;

/// Shift of the index in IQH and IQT, which count bytes.
pub const NARROW_SHIFT: u32 = 4;
pub const WIDE_SHIFT: u32 = 5;

/// The index in IQH, or the value of IQT for one.
pub const fn queue_index(register: u64, shift: u32) -> u64 {
    (register & 0x7_fff0) >> shift
}
pub const fn queue_tail(index: u32, shift: u32) -> u64 {
    (index as u64) << shift
}

/// Descriptors of the invalidation queue (section 6.5.2): the lower 128 bits. The upper 128 bits of a wide one are zero.
pub mod descriptor {
    /// The context cache: all of it.
    pub const CONTEXT_ALL: [u64; 2] = [1 | 1 << 4, 0];
    /// The context cache, of one device (no function mask), whose domain was `domain`.
    pub const fn context_of(domain: u16, source: u16) -> [u64; 2] {
        [1 | 3 << 4 | (domain as u64) << 16 | (source as u64) << 32, 0]
    }
    /// The IOTLB: all of it. `drain` is one of the two bits below, both, or none.
    pub const fn iotlb_all(drain: u64) -> [u64; 2] {
        [2 | 1 << 4 | drain, 0]
    }
    pub const fn iotlb_domain(drain: u64, domain: u16) -> [u64; 2] {
        [2 | 2 << 4 | drain | (domain as u64) << 16, 0]
    }
    /// 2^`order` pages of 4 KiB at `address`, aligned to their size. `leaf_only` keeps the paging-structure caches.
    pub const fn iotlb_pages(drain: u64, domain: u16, address: u64, order: u32, leaf_only: bool) -> [u64; 2] {
        [2 | 3 << 4 | drain | (domain as u64) << 16, address | (leaf_only as u64) << 6 | order as u64]
    }
    /// First-stage translations of requests without PASID: all, and of pages. They always drain.
    pub const fn first_stage_all(domain: u16) -> [u64; 2] {
        [6 | 2 << 4 | (domain as u64) << 16 | (super::RID_PASID as u64) << 32, 0]
    }
    pub const fn first_stage_pages(domain: u16, address: u64, order: u32, leaf_only: bool) -> [u64; 2] {
        let low = 6 | 3 << 4 | (domain as u64) << 16 | (super::RID_PASID as u64) << 32;
        [low, address | (leaf_only as u64) << 6 | order as u64]
    }
    /// The PASID cache: all of it; and that of a domain's requests without PASID.
    pub const PASIDS_ALL: [u64; 2] = [7 | 3 << 4, 0];
    pub const fn pasids_of(domain: u16) -> [u64; 2] {
        [7 | 1 << 4 | (domain as u64) << 16 | (super::RID_PASID as u64) << 32, 0]
    }
    pub const DRAIN_WRITES: u64 = 1 << 6;
    pub const DRAIN_READS: u64 = 1 << 7;
    /// A device TLB: 2^`order` pages at `address`; S is bit 0.
    pub const fn device_tlb(source: u16, address: u64, order: u32) -> [u64; 2] {
        [3 | (source as u64) << 32, super::sized_address(address, order, 1)]
    }
    /// Stores `value` at `address`, a multiple of 4, after all earlier descriptors are complete.
    pub const fn wait(value: u32, address: u64) -> [u64; 2] {
        [5 | 1 << 5 | (value as u64) << 32, address]
    }
    /// A no-op: the IOTLB of domain 0, which no domain has. (QEMU would stop again at a wait that stores nothing.)
    pub const NOTHING: [u64; 2] = iotlb_domain(0, 0);
}

/// Root and context entries of legacy mode (sections 9.1 and 9.3): 256 of two words in a frame.
pub mod entry {
    /// In the first word of all entries, in both modes.
    pub const PRESENT: u64 = 1;
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    /// Translation types.
    pub const TRANSLATED: u64 = 0 << 2;
    pub const PASS_THROUGH: u64 = 2 << 2;
    /// The second word of a context entry.
    pub const fn domain(aw: u32, domain: u16) -> u64 {
        aw as u64 | (domain as u64) << 8
    }
    pub const fn domain_of(high: u64) -> u16 {
        (high >> 8) as u16
    }
}

/// The PASID of requests without one. It is 0 on a unit without RPS (ECAP).
pub const RID_PASID: u32 = 0;

/// Context entries of scalable mode (section 9.4): 128 of four words in a frame. A root entry (section 9.2) names two frames, each in a
/// word like that of legacy mode. The last two words are reserved.
pub mod scalable {
    /// Devices of a frame, as a binary logarithm, and words of an entry.
    pub const DEVICES_SHIFT: u32 = 7;
    pub const WORDS: usize = 4;
    /// The first word: a PASID directory of 128 entries (PDTS is 0), no PASIDs of the device (PASIDE is 0), no device TLB (DTE is 0), no
    /// page requests (PRE is 0).
    pub const fn context(directory: u64) -> u64 {
        directory
    }
    /// The second word: requests without PASID are user accesses (RID_PRIV is 0).
    pub const RID: u64 = super::RID_PASID as u64;
}

/// PASID tables (sections 9.5 and 9.6): a directory of words, each naming a table of 64 entries of eight words. The first entry of the
/// first table is [`RID_PASID`]'s. The last five words are reserved without nesting.
pub mod pasid {
    /// Words of an entry that are not reserved.
    pub const WORDS: usize = 3;
    /// The first word: translation types (PGTT); address width and root of the second stage.
    pub const PGTT: u64 = 7 << 6;
    pub const FIRST_STAGE: u64 = 1 << 6;
    pub const SECOND_STAGE: u64 = 2 << 6;
    pub const PASS_THROUGH: u64 = 4 << 6;
    pub const fn width(aw: u32) -> u64 {
        (aw as u64) << 2
    }
    /// The second word: the domain, and (PWSNP) walks snoop.
    pub const fn domain(domain: u16) -> u64 {
        domain as u64
    }
    pub const fn domain_of(second: u64) -> u16 {
        second as u16
    }
    pub const WALKS_SNOOP: u64 = 1 << 23;
    /// PGSNP: first-stage accesses always snoop. On units with ECAP.SC.
    pub const PAGES_SNOOP: u64 = 1 << 24;
    /// The third word: levels and root of the first stage, and (NXE) bit 63 of its entries forbids execution. Privileged requests are
    /// refused (SRE is 0).
    pub const fn first_stage(root: u64, fspm: u32) -> u64 {
        root | (fspm as u64) << 2 | 1 << 5
    }
}

/// Fault records, two words each; FRCD.
pub mod record {
    /// In the last 32 bits: the record is valid; write 1 to clear.
    pub const F32: u32 = 1 << 31;
    pub const F: u64 = 1 << 63;
    /// The type's two bits: T1, T2.
    pub const T1: u64 = 1 << 62;
    pub const T2: u64 = 1 << 28;
    pub const EXE: u64 = 1 << 30;
    pub const PP: u64 = 1 << 31;
    pub const fn source(high: u64) -> u16 {
        high as u16
    }
    pub const fn reason(high: u64) -> u8 {
        (high >> 32) as u8
    }
    pub const fn pasid(high: u64) -> u32 {
        (high >> 40 & 0xf_ffff) as u32
    }
}
