//! The text of each error and each flaw, with all numbers in it different.

use portcullis::SetupError;
use portcullis::addr::{AddrError, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::InvalidationError;
use portcullis::pgtable::MapError;

use crate::acpi::{AcpiError, Flaw};
use crate::{DomainError, UnitError};

#[path = "../../portcullis/tests/inside/sentences.rs"]
mod sentences;

/// [0x5000, 0x6fff]
fn range() -> IovaRange {
    IovaRange::new(Iova::new(0x5000), 0x2000).unwrap()
}

sentences::sentences! {
    of_units: UnitError {
        NotThere { register: "VER", value: 16 } => "no IOMMU answers: its VER register reads 0x10";
        Lacks { what: "pass-through", register: "ECAP", value: 16 } => "the IOMMU lacks pass-through (ECAP is 0x10)";
        TimedOut { what: "stop", waited_ns: 16 } => "the IOMMU did not stop within 16 ns";
        OutOfMemory => "no memory for the IOMMU's structures";
        NoSuchDevice { device: 0x28, last: 0x1f } =>
            "no device 0x28 is behind this IOMMU (the highest number that one can have is 0x1f)";
        NoSuchDomain { domain: 10, first: 1, last: 9 } => "no domain 10: this IOMMU has numbers from 1 to 9";
        NoSuchTables { levels: 5 } => "the IOMMU walks no tables of 5 levels";
        BadRoot { root: PhysAddr::new(0x1800) } =>
            "a page table's root is at 0x1800, where none can be: roots are whole frames at multiples of their size";
        Attached { device: 0x28 } => "device 0x28 is attached already: detach it first";
        NotAttached { device: 0x28 } => "device 0x28 is not attached";
        DomainInUse { domain: 10 } => "domain 10 is in use";
        Reserved { device: 0x28, range: range() } =>
            "device 0x28 reserves [0x5000, 0x6fff], which its domain may map: reserve it in the domain, too";
        Refused { what: "attach a device", code: 0x1f } => "the IOMMU refused to attach a device (code 0x1f)";
        Incomplete { device: 0x28, code: 0x1f } =>
            "device 0x28 is attached, but the IOMMU refused mappings of its domain (code 0x1f)";
        Shared => "the IOMMU is still in use: only the last handle can shut it down";
        Unconfirmed(InvalidationError::Rejected { code: 0x1f }) =>
            "the IOMMU did not confirm that it has forgotten a context: the IOMMU reported an error for an invalidation (code 0x1f)";
    }

    of_domains: DomainError {
        Unit(UnitError::Shared) => "the IOMMU is still in use: only the last handle can shut it down";
        Setup(SetupError::NoPageSize) => "the mapper states no page size, or one below 4 KiB or above 2 GiB as its smallest";
        Untranslated { range: range(), last: Iova::new(0xffff) } =>
            "firmware reserves [0x5000, 0x6fff] for a device, and the IOMMU does not translate all of it: it translates addresses up \
             to 0xffff, and none of its interrupt window";
        Region(MapError::OutOfMemory) =>
            "what firmware reserves for devices cannot be mapped one to one: no memory for a page table";
        PassThrough =>
            "a unit's domain translates, whatever its policy: a device is let through to all memory by `Attachment::PassThrough`";
    }

    of_firmwares_tables: AcpiError {
        Signature { found: *b"IV\x1b\0", wanted: *b"DMAR" } =>
            r"the table's signature is IV\x1b\x00, not DMAR";
        Cut { bytes: 35, wanted: 36 } => "the table has 35 bytes, and needs 36";
        OutOfMemory => "no memory for the table's contents";
    }

    of_flaws: Flaw {
        Checksum { sum: 7 } =>
            "the bytes of the table sum up to 0x07 and not to 0, so any of them may be wrong";
        Length { offset: 0x30, len: 1, least: 4, left: 8 } =>
            "the structure at offset 0x30 says that it has 1 bytes, which is not in 4..=8: neither it nor what follows it is used";
        Short { offset: 0x30, len: 15 } =>
            "the structure at offset 0x30 has 15 bytes, too few for its kind: it is not used";
        Kind { offset: 0x30, kind: 15 } => "the structure at offset 0x30 is of the unknown kind 0xf: it is not used";
        AddressBits { bits: 80 } => "the table says that physical addresses have 80 bits";
        Registers { offset: 0x30, registers: 0x800 } =>
            "the unit at offset 0x30 has its registers at 0x800, where none can be: it is refused, and no other unit is in front of \
             its devices";
        OnePage { offset: 48, registers: 0x905_0000 } => "the unit at offset 0x30 with registers at 0x9050000 is that of Cavium's CN99xx, which lacks page 1 of the registers: \
            it is refused";
        Devices { offset: 0x30 } => "the devices of the unit at offset 0x30 are not all known: it is refused";
        Others { offset: 0x30, segment: 15 } =>
            "the unit at offset 0x30 is in front of all other devices of PCI segment 15, which are not known: it gets only the \
             devices that it names";
        Twice { offset: 0x50, first: 0x30 } =>
            "the structure at offset 0x50 contradicts or repeats the one at 0x30, which came first";
        Path { offset: 0x30 } =>
            "the device scope at offset 0x30 leads to no possible device: it is not used";
        Name { offset: 0x30 } => "the name at offset 0x30 cannot be read: its device has none";
        Nameless { number: 15 } =>
            "a device scope names device 15 of the ACPI namespace, which the table gives no name";
        Backwards { offset: 0x30, first: 0x28, last: 0x20 } =>
            "the run of devices at offset 0x30 goes from 0x0028 to 0x0020: it is not used";
        OneEnd { offset: 0x30, device: 0x28 } =>
            "the run of devices at offset 0x30 has one end: it is taken for device 0x0028 alone";
        Region { offset: 0x30, error: AddrError::EmptyRange { start: 0x800 } } =>
            "the reserved region at offset 0x30 is not used: no range at 0x800: a range holds at least one byte";
        RegionBackwards { offset: 0x30, first: 0x28, last: 0x20 } =>
            "the reserved region at offset 0x30 goes from 0x28 to 0x20: it is not used";
        PageZero { offset: 0x30 } =>
            "the reserved region at offset 0x30 lies in page 0, which means none: it is not used";
        Unaligned { offset: 0x30, range: range() } =>
            "the reserved region [0x5000, 0x6fff] at offset 0x30 is not of whole pages: all pages that it touches are used";
        ForNobody { offset: 0x30 } => "the reserved region at offset 0x30 is for no device: it is not used";
        ReservesNothing { offset: 0x30, flags: 8 } =>
            "the memory at offset 0x30 has flags 0x08, which reserve nothing: it is not used";
        Nodes { count: 9, held: 8 } => "the table names 9 nodes, of which 8 can be read";
        Mappings { offset: 0x30, count: 9, held: 8 } =>
            "the node at offset 0x30 names 9 mappings or regions, and holds 8 of them";
        Reference { offset: 0x30, to: 0x50 } =>
            "the mapping at offset 0x30 leads to offset 0x50, where no such node is: its IDs are behind no unit";
        Overlap { first: 0x30, second: 0x50, id: 15 } =>
            "the mappings at offsets 0x30 and 0x50 both have identifier 0xf";
    }
}
