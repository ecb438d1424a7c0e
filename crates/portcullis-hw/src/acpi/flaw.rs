//! What is wrong with a firmware table, and how it was handled.

use portcullis::addr::{AddrError, IovaRange};

/// Why a table is refused as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcpiError {
    /// It has another signature.
    #[error("the table's signature is {}, not {}", found.escape_ascii(), wanted.escape_ascii())]
    Signature {
        /// The signature found.
        found: [u8; 4],
        /// The signature expected.
        wanted: [u8; 4],
    },
    /// It is shorter than its header, or than its length field says.
    #[error("the table has {bytes} bytes, and needs {wanted}")]
    Cut {
        /// Its length.
        bytes: usize,
        /// The length expected.
        wanted: usize,
    },
    /// There is no memory for its contents.
    #[error("no memory for the table's contents")]
    OutOfMemory,
}

/// Something in a table that is wrong or unknown; the rest of the table is used. Offsets are from the beginning of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// Its bytes do not sum up to 0. Linux refuses an IVRS table for this, but no other table.
    #[error("the bytes of the table sum up to {sum:#04x} and not to 0, so any of them may be wrong")]
    Checksum {
        /// Their sum.
        sum: u8,
    },
    /// A structure shorter than any of its kind, or one that crosses the end of its parent: the walk cannot go on.
    #[error(
        "the structure at offset {offset:#x} says that it has {len} bytes, which is not in {least}..={left}: neither it nor what \
         follows it is used"
    )]
    Length {
        /// Its offset.
        offset: usize,
        /// Its length field.
        len: usize,
        /// The shortest length allowed.
        least: usize,
        /// Bytes up to the end of its parent.
        left: usize,
    },
    /// A structure shorter than its kind.
    #[error("the structure at offset {offset:#x} has {len} bytes, too few for its kind: it is not used")]
    Short {
        /// Its offset.
        offset: usize,
        /// Its length.
        len: usize,
    },
    /// A structure of an unknown kind.
    #[error("the structure at offset {offset:#x} is of the unknown kind {kind:#x}: it is not used")]
    Kind {
        /// Its offset.
        offset: usize,
        /// Its kind.
        kind: u16,
    },
    /// An address width narrower than a page.
    #[error("the table says that physical addresses have {bits} bits")]
    AddressBits {
        /// The width.
        bits: u32,
    },
    /// A unit with an impossible register address: 0, unaligned, or beyond the last address.
    #[error(
        "the unit at offset {offset:#x} has its registers at {registers:#x}, where none can be: it is refused, and no other unit is \
         in front of its devices"
    )]
    Registers {
        /// Offset of its structure.
        offset: usize,
        /// The register address.
        registers: u64,
    },
    /// An SMMUv3 of Cavium's CN99xx. This is no mistake of firmware's, but the unit has only page 0 of its registers, and our driver's event
    /// queue has its index registers in page 1.
    #[error(
        "the unit at offset {offset:#x} with registers at {registers:#x} is that of Cavium's CN99xx, which lacks page 1 of the registers: \
         it is refused"
    )]
    OnePage {
        /// Offset of its structure.
        offset: usize,
        /// The register address.
        registers: u64,
    },
    /// A unit whose device list cannot be read to its end, so that any device may be in it.
    #[error("the devices of the unit at offset {offset:#x} are not all known: it is refused")]
    Devices {
        /// Offset of its structure.
        offset: usize,
    },
    /// A unit that takes all other devices of a segment, while the devices of a refused unit are not known.
    #[error(
        "the unit at offset {offset:#x} is in front of all other devices of PCI segment {segment}, which are not known: it gets only \
         the devices that it names"
    )]
    Others {
        /// Offset of its structure.
        offset: usize,
        /// The segment.
        segment: u16,
    },
    /// Two structures for one unit, or two units that take all other devices.
    #[error(
        "the structure at offset {offset:#x} contradicts or repeats the one at {first:#x}, which came first"
    )]
    Twice {
        /// Offset of the second one.
        offset: usize,
        /// Offset of the first one.
        first: usize,
    },
    /// A path, or a device and function, that no device can have.
    #[error("the device scope at offset {offset:#x} leads to no possible device: it is not used")]
    Path {
        /// Its offset.
        offset: usize,
    },
    /// A name that is not zero-terminated ASCII.
    #[error("the name at offset {offset:#x} cannot be read: its device has none")]
    Name {
        /// Offset of its structure.
        offset: usize,
    },
    /// A device of the ACPI namespace whose number has no name.
    #[error("a device scope names device {number} of the ACPI namespace, which the table gives no name")]
    Nameless {
        /// The number.
        number: u8,
    },
    /// A device range that ends before it begins.
    #[error("the run of devices at offset {offset:#x} goes from {first:#06x} to {last:#06x}: it is not used")]
    Backwards {
        /// Its offset.
        offset: usize,
        /// The first device.
        first: u16,
        /// The last device.
        last: u16,
    },
    /// A device range with only one end.
    #[error(
        "the run of devices at offset {offset:#x} has one end: it is taken for device {device:#06x} alone"
    )]
    OneEnd {
        /// Its offset.
        offset: usize,
        /// The device.
        device: u16,
    },
    /// A reserved region of impossible addresses.
    #[error("the reserved region at offset {offset:#x} is not used: {error}")]
    Region {
        /// Offset of its structure.
        offset: usize,
        /// Its fault.
        error: AddrError,
    },
    /// A reserved region that ends before it begins.
    #[error("the reserved region at offset {offset:#x} goes from {first:#x} to {last:#x}: it is not used")]
    RegionBackwards {
        /// Offset of its structure.
        offset: usize,
        /// Its first byte.
        first: u64,
        /// Its last byte.
        last: u64,
    },
    /// A reserved region inside page 0, which firmware writes for "none". Linux maps the page.
    #[error("the reserved region at offset {offset:#x} lies in page 0, which means none: it is not used")]
    PageZero {
        /// Offset of its structure.
        offset: usize,
    },
    /// A reserved region that is not aligned to the page size that the manual demands.
    #[error(
        "the reserved region {range} at offset {offset:#x} is not of whole pages: all pages that it touches are used"
    )]
    Unaligned {
        /// Offset of its structure.
        offset: usize,
        /// The region.
        range: IovaRange,
    },
    /// A reserved region without a device.
    #[error("the reserved region at offset {offset:#x} is for no device: it is not used")]
    ForNobody {
        /// Offset of its structure.
        offset: usize,
    },
    /// A region that is neither to be identity-mapped nor excluded, or that may be neither read nor written.
    #[error("the memory at offset {offset:#x} has flags {flags:#04x}, which reserve nothing: it is not used")]
    ReservesNothing {
        /// Offset of its structure.
        offset: usize,
        /// The flags.
        flags: u8,
    },
    /// Nodes that cannot be read.
    #[error("the table names {count} nodes, of which {held} can be read")]
    Nodes {
        /// How many the table names.
        count: usize,
        /// How many can be read.
        held: usize,
    },
    /// Mappings or regions outside their node.
    #[error("the node at offset {offset:#x} names {count} mappings or regions, and holds {held} of them")]
    Mappings {
        /// Offset of the node.
        offset: usize,
        /// How many the node names.
        count: usize,
        /// How many are inside it.
        held: usize,
    },
    /// A mapping whose target is no node that it may name.
    #[error(
        "the mapping at offset {offset:#x} leads to offset {to:#x}, where no such node is: its IDs are behind no unit"
    )]
    Reference {
        /// Offset of the mapping.
        offset: usize,
        /// Offset of its target.
        to: usize,
    },
    /// Two ID ranges that overlap. Firmware often writes the count where the count minus one belongs: then the range that begins at the
    /// shared ID has it. Otherwise the first in the table has it.
    #[error("the mappings at offsets {first:#x} and {second:#x} both have identifier {id:#x}")]
    Overlap {
        /// Offset of the one with the lower IDs.
        first: usize,
        /// Offset of the other.
        second: usize,
        /// The first shared ID.
        id: u32,
    },
}
