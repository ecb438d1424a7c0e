//! Registers and structures of Arm's SMMUv3: where bits lie, and nothing else.
//!
//! Source: Arm System Memory Management Unit Architecture Specification, SMMU architecture version 3, IHI 0070 (issue F.b): section 3.5
//! "Command and Event queues", chapter 4 "Commands", chapter 5 "Data structure formats", chapter 6 "Memory map and registers", section 7.3
//! "Event records".
#![allow(missing_docs, reason = "names of the manual")]

/// Offsets of registers, in bytes. The event queue's index registers are in page 1.
pub mod reg {
    pub const IDR0: usize = 0x00;
    pub const IDR1: usize = 0x04;
    pub const IDR3: usize = 0x0c;
    pub const IDR5: usize = 0x14;
    pub const CR0: usize = 0x20;
    pub const CR0ACK: usize = 0x24;
    pub const CR1: usize = 0x28;
    pub const CR2: usize = 0x2c;
    pub const GBPA: usize = 0x44;
    pub const IRQ_CTRL: usize = 0x50;
    pub const IRQ_CTRLACK: usize = 0x54;
    pub const GERROR: usize = 0x60;
    pub const GERRORN: usize = 0x64;
    pub const STRTAB_BASE: usize = 0x80;
    pub const STRTAB_BASE_CFG: usize = 0x88;
    pub const CMDQ_BASE: usize = 0x90;
    pub const CMDQ_PROD: usize = 0x98;
    pub const CMDQ_CONS: usize = 0x9c;
    pub const EVENTQ_BASE: usize = 0xa0;
    pub const EVENTQ_PROD: usize = 0x1_00a8;
    pub const EVENTQ_CONS: usize = 0x1_00ac;
    pub const IDR6: usize = 0x190;
    /// For each page of ECMDQs: its address, 64 bits; CFG and STATUS, which say that it is on.
    pub const CONTROL_PAGE: usize = 0x4000;
}

/// Fields of IDR0.
pub mod idr0 {
    /// The second stage, the first stage.
    pub const S2P: u32 = 1 << 0;
    pub const S1P: u32 = 1 << 1;
    /// Two bits of TTF: AArch32 long descriptors, AArch64 tables.
    pub const TTF_AARCH32: u32 = 1 << 2;
    pub const TTF_AARCH64: u32 = 1 << 3;
    /// The unit's own accesses are coherent.
    pub const COHACC: u32 = 1 << 4;
    pub const HYP: u32 = 1 << 9;
    pub const ATS: u32 = 1 << 10;
    pub const ASID16: u32 = 1 << 12;
    pub const VMID16: u32 = 1 << 18;
    /// Tables are big-endian only.
    pub const fn only_big_endian(idr0: u32) -> bool {
        idr0 >> 21 & 3 == 3
    }
    /// Refused accesses always stall.
    pub const fn always_stalls(idr0: u32) -> bool {
        idr0 >> 24 & 3 == 2
    }
    /// Two-level stream tables are supported.
    pub const fn two_levels(idr0: u32) -> bool {
        idr0 >> 27 & 3 == 1
    }
}

/// Fields of IDR1.
pub mod idr1 {
    /// Width of stream IDs.
    pub const fn stream_bits(idr1: u32) -> u32 {
        idr1 & 0x3f
    }
    /// The most entries of the event queue and of the command queue, as powers of two.
    pub const fn events(idr1: u32) -> u32 {
        idr1 >> 16 & 0x1f
    }
    pub const fn commands(idr1: u32) -> u32 {
        idr1 >> 21 & 0x1f
    }
    /// A stream table entry may override memory types and shareability.
    pub const ATTR_TYPES_OVR: u32 = 1 << 27;
    /// Hardware fixes the addresses of the queues, of the tables.
    pub const QUEUES_PRESET: u32 = 1 << 29;
    pub const TABLES_PRESET: u32 = 1 << 30;
    /// The unit has ECMDQs: see [`ecmdq`](super::ecmdq).
    pub const ECMDQ: u32 = 1 << 31;
}

/// IDR3: TLB invalidation by range.
pub const IDR3_RIL: u32 = 1 << 10;

/// Fields of IDR5.
pub mod idr5 {
    /// Width of physical addresses. Codes above 6 are of later issues, and at least as wide.
    pub const fn address_bits(idr5: u32) -> u32 {
        match idr5 & 7 {
            0 => 32,
            1 => 36,
            2 => 40,
            3 => 42,
            4 => 44,
            5 => 48,
            _ => 52,
        }
    }
    /// The unit walks tables with pages of 2^`shift` bytes.
    pub const fn has_granule(idr5: u32, shift: u32) -> bool {
        let bit = match shift {
            12 => 4,
            14 => 5,
            _ => 6,
        };
        idr5 >> bit & 1 != 0
    }
    /// With 64 KiB pages, the first stage may translate 52 bits.
    pub const fn is_wide(idr5: u32) -> bool {
        idr5 >> 10 & 3 != 0
    }
}

/// CR0, and CR0ACK.
pub mod cr0 {
    pub const SMMUEN: u32 = 1 << 0;
    pub const PRIQEN: u32 = 1 << 1;
    pub const EVENTQEN: u32 = 1 << 2;
    pub const CMDQEN: u32 = 1 << 3;
    /// Accesses that claim to be translated are checked, too.
    pub const ATSCHK: u32 = 1 << 4;
}

/// CR1: memory attributes of tables and queues: cacheable and inner shareable, or non-cacheable and outer shareable.
pub mod cr1 {
    pub const TABLES: u32 = 0x3f << 6;
    pub const TABLES_CACHED: u32 = 3 << 10 | 1 << 8 | 1 << 6;
    pub const TABLES_UNCACHED: u32 = 2 << 10;
    pub const QUEUES_CACHED: u32 = 3 << 4 | 1 << 2 | 1;
    pub const QUEUES_UNCACHED: u32 = 2 << 4;
}

/// CR2.
pub mod cr2 {
    /// Events of stream IDs beyond the table are recorded.
    pub const RECINVSID: u32 = 1 << 1;
    /// The unit ignores CPUs' broadcast TLB invalidations.
    pub const PTM: u32 = 1 << 2;
}

/// GBPA: the handling of accesses while SMMUEN is 0.
pub mod gbpa {
    pub const ABORT: u32 = 1 << 20;
    /// Set with the other fields; reads 1 until the unit has taken them.
    pub const UPDATE: u32 = 1 << 31;
}

/// GERROR: a bit that differs from GERRORN is an active error.
pub mod gerror {
    pub const CMDQ: u32 = 1 << 0;
    /// Errors that an acknowledgement always ends: aborted writes of events, page requests and MSIs.
    pub const WRITES: u32 = 0xfc;
}

/// Enhanced Command queues of SMMUv3.3: pages of 64 KiB, each with the registers of up to 256 equally spaced queues.
///
/// Sources: IHI 0070, issue G.b, sections 3.5.6 "Enhanced Command queue interfaces", 6.2.5 "Registers in a Command queue control page", and
/// of 6.3 SMMU_IDR6, SMMU_CMDQ_CONTROL_PAGE_* and SMMU_ECMDQ_*; the patches "iommu/arm-smmu-v3: Add support for ECMDQ register mode" (Zhen
/// Lei, 2021; Tanmay Jagdale, 2024) to Linux. They differ only in the address bits of a page (55 to 16 in the manual, used here, and 51 to
/// 12 in the patches). In the manual a page with registers 0x100 bytes apart has 256 queues.
pub mod ecmdq {
    /// IDR6: number of pages, and of queues in each, as powers of two. Neither exceeds 8.
    pub const fn pages(idr6: u32) -> u32 {
        idr6 >> 24 & 0xf
    }
    pub const fn of_a_page(idr6: u32) -> u32 {
        idr6 >> 16 & 0xf
    }
    pub const MOST: u32 = 8;
    /// Bytes of a page.
    pub const PAGE: usize = 0x1_0000;
    /// The lowest offset of a page: pages 0 and 1 have the unit's other registers.
    pub const FIRST_PAGE: usize = 2 * PAGE;
    /// Stride of the registers that describe a page ([`CONTROL_PAGE`](super::reg::CONTROL_PAGE)).
    pub const TOLD: usize = 32;
    /// CONTROL_PAGE_BASE: the page has registers, at this offset from the unit's first register.
    pub const PRESET: u64 = 1;
    pub const ADDRESS: u64 = 0x00ff_ffff_ffff_0000;
    /// Registers of a queue.
    pub const BASE: usize = 0x00;
    pub const PROD: usize = 0x08;
    pub const CONS: usize = 0x0c;
    /// PROD: turns the queue on (EN). CONS: it is on (ENACK).
    pub const EN: u32 = 1 << 31;
    /// CONS: toggles with each error (ERR). PROD: an equal value acknowledges it (ERRACK).
    pub const ERR: u32 = 1 << 23;
    /// CONS: why the queue has stopped.
    pub const fn error(cons: u32) -> u32 {
        cons >> 24 & 7
    }
}

/// The address bits of base registers of queues and tables.
pub const BASE_ADDRESS: u64 = 0x000f_ffff_ffff_ffe0;

/// STRTAB_BASE_CFG.
pub const fn linear_table(bits: u32) -> u32 {
    bits
}
pub const fn two_level_table(bits: u32, split: u32) -> u32 {
    1 << 16 | split << 6 | bits
}

/// A first-level stream table entry, for 2^`split` entries at `address`.
pub const fn second_level(address: u64, split: u32) -> u64 {
    address | (split as u64 + 1)
}

/// The index with the wrap bit, in all index registers.
pub const INDEX: u32 = 0xf_ffff;
/// CMDQ_CONS: why the queue has stopped.
pub const fn command_error(cons: u32) -> u32 {
    cons >> 24 & 0x7f
}
/// EVENTQ_PROD: toggles on overflow; EVENTQ_CONS acknowledges.
pub const OVERFLOW: u32 = 1 << 31;

/// Commands, of 16 bytes.
pub mod command {
    pub const CFGI_ALL: [u64; 2] = [0x04, 31];
    /// A stream's entry, and the entries on the path to it.
    pub const fn stream(stream: u32) -> [u64; 2] {
        [0x03 | (stream as u64) << 32, 0]
    }
    /// A stream's context descriptor.
    pub const fn context(stream: u32) -> [u64; 2] {
        [0x05 | (stream as u64) << 32, 1]
    }
    /// All translations of both stages; those of EL2.
    pub const TLBI_ALL: [u64; 2] = [0x30, 0];
    pub const TLBI_EL2: [u64; 2] = [0x20, 0];
    /// All of an ASID in the first stage, of a VMID in both.
    pub const fn tlbi_asid(asid: u16) -> [u64; 2] {
        [0x11 | (asid as u64) << 48, 0]
    }
    pub const fn tlbi_vmid(vmid: u16) -> [u64; 2] {
        [0x28 | (vmid as u64) << 32, 0]
    }
    /// By address. `leaf_only` keeps cached non-leaf entries.
    pub const fn tlbi_asid_address(asid: u16, address: u64, leaf_only: bool) -> [u64; 2] {
        [0x12 | (asid as u64) << 48, address | leaf_only as u64]
    }
    pub const fn tlbi_vmid_address(vmid: u16, address: u64, leaf_only: bool) -> [u64; 2] {
        [0x2a | (vmid as u64) << 32, address | leaf_only as u64]
    }
    /// Extends one of the two above to (1 + `number`) times 2^`scale` pages of 2^`granule` bytes: more than one page.
    pub const fn range(command: [u64; 2], granule: u32, number: u32, scale: u32) -> [u64; 2] {
        let tg = (granule as u64 - 10) / 2;
        [command[0] | (number as u64) << 12 | (scale as u64) << 20, command[1] | tg << 10]
    }
    /// Consumed after all earlier commands are complete; without a signal.
    pub const SYNC: [u64; 2] = [0x46, 0];
}

/// Stream table entries, of eight words. Words not named are 0.
pub mod ste {
    pub const WORDS: usize = 8;
    pub const V: u64 = 1;
    pub const BYPASS: u64 = 4 << 1;
    pub const STAGE_1: u64 = 5 << 1;
    pub const STAGE_2: u64 = 6 << 1;
    /// Word 0: S1ContextPtr, one context descriptor (S1CDMax 0).
    pub const CONTEXT: u64 = 0x000f_ffff_ffff_ffc0;
    /// Word 1: memory attributes of context descriptors.
    pub const S1C_CACHED: u64 = 3 << 6 | 1 << 4 | 1 << 2;
    pub const S1C_UNCACHED: u64 = 2 << 6;
    /// Word 1: incoming shareability.
    pub const SHCFG_INCOMING: u64 = 1 << 44;
    /// Word 2.
    pub const fn s2_vmid(vmid: u16) -> u64 {
        vmid as u64
    }
    pub const fn s2_walk(t0sz: u32, sl0: u32, tg: u32, ps: u32) -> u64 {
        (t0sz as u64) << 32 | (sl0 as u64) << 38 | (tg as u64) << 46 | (ps as u64) << 48
    }
    pub const S2_CACHED: u64 = 3 << 44 | 1 << 42 | 1 << 40;
    pub const S2_UNCACHED: u64 = 2 << 44;
    pub const S2AA64: u64 = 1 << 51;
    /// Record events.
    pub const S2R: u64 = 1 << 58;
    /// Word 3.
    pub const S2TTB: u64 = 0x000f_ffff_ffff_fff0;
}

/// Context descriptors, of eight words. Words 2 and 4 to 7 are 0, and word 3 is MAIR.
pub mod cd {
    pub const WORDS: usize = 8;
    /// Word 0.
    pub const fn walk(t0sz: u32, tg0: u32, ips: u32) -> u64 {
        t0sz as u64 | (tg0 as u64) << 6 | (ips as u64) << 32
    }
    pub const CACHED: u64 = 3 << 12 | 1 << 10 | 1 << 8;
    pub const UNCACHED: u64 = 2 << 12;
    /// TTB1 walks are disabled.
    pub const EPD1: u64 = 1 << 30;
    pub const V: u64 = 1 << 31;
    pub const AA64: u64 = 1 << 41;
    /// Record and abort.
    pub const R: u64 = 1 << 45;
    pub const A: u64 = 1 << 46;
    /// The ASID is not shared with CPUs.
    pub const ASET: u64 = 1 << 47;
    pub const fn asid(asid: u16) -> u64 {
        (asid as u64) << 48
    }
    /// Word 1.
    pub const TTB0: u64 = 0x000f_ffff_ffff_fff0;
}

/// Event records, of four words.
pub mod event {
    pub const WORDS: usize = 4;
    /// Word 0.
    pub const fn code(word: u64) -> u8 {
        word as u8
    }
    pub const SSV: u64 = 1 << 11;
    pub const fn substream(word: u64) -> u32 {
        (word >> 12 & 0xf_ffff) as u32
    }
    pub const fn stream(word: u64) -> u32 {
        (word >> 32) as u32
    }
    /// Word 1.
    pub const IND: u64 = 1 << 34;
    pub const RNW: u64 = 1 << 35;

    pub const F_UUT: u8 = 0x01;
    pub const C_BAD_STREAMID: u8 = 0x02;
    pub const F_STE_FETCH: u8 = 0x03;
    pub const C_BAD_STE: u8 = 0x04;
    pub const F_BAD_ATS_TREQ: u8 = 0x05;
    pub const F_STREAM_DISABLED: u8 = 0x06;
    pub const F_TRANSL_FORBIDDEN: u8 = 0x07;
    pub const C_BAD_SUBSTREAMID: u8 = 0x08;
    pub const F_CD_FETCH: u8 = 0x09;
    pub const C_BAD_CD: u8 = 0x0a;
    pub const F_WALK_EABT: u8 = 0x0b;
    pub const F_TRANSLATION: u8 = 0x10;
    pub const F_ADDR_SIZE: u8 = 0x11;
    pub const F_ACCESS: u8 = 0x12;
    pub const F_PERMISSION: u8 = 0x13;
    pub const F_TLB_CONFLICT: u8 = 0x20;
    pub const F_CFG_CONFLICT: u8 = 0x21;
    pub const E_PAGE_REQUEST: u8 = 0x24;
    pub const F_VMS_FETCH: u8 = 0x25;
}
