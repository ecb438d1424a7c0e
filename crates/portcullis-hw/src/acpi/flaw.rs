//! What is wrong with a firmware's table, and what was done about it.

use portcullis::addr::{AddrError, IovaRange};

/// A table that is refused: nothing of it can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcpiError {
    /// It is not this table.
    #[error("the table is {}, and {} was looked for", found.escape_ascii(), wanted.escape_ascii())]
    Signature {
        /// The signature it has.
        found: [u8; 4],
        /// The one that was looked for.
        wanted: [u8; 4],
    },
    /// It is shorter than its header, or than it says.
    #[error("the table has {bytes} bytes, and wants {wanted}")]
    Cut {
        /// Its bytes.
        bytes: usize,
        /// How many it should have at least.
        wanted: usize,
    },
    /// There is no memory for what it says.
    #[error("no memory for what the table says")]
    OutOfMemory,
}

/// Something in a table that is wrong, or not known. What else the table says is used. Offsets count from the table's beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// Its bytes do not sum up to 0. Linux refuses an IVRS table for this, and takes the others.
    #[error("the bytes of the table sum up to {sum:#04x} and not to 0, so any of them may be wrong")]
    Checksum {
        /// Their sum.
        sum: u8,
    },
    /// A structure that is shorter than any is, or goes beyond the end of what it is in: where the next one begins is not known.
    #[error(
        "the structure at offset {offset:#x} says that it has {len} bytes, which is not in {least}..={left}: neither it nor what \
         follows it is used"
    )]
    Length {
        /// Where it begins.
        offset: usize,
        /// The length it gives.
        len: usize,
        /// The least that a structure has there.
        least: usize,
        /// The bytes up to the end of what it is in.
        left: usize,
    },
    /// A structure that is shorter than its kind is.
    #[error("the structure at offset {offset:#x} has {len} bytes, too few for its kind: it is not used")]
    Short {
        /// Where it begins.
        offset: usize,
        /// Its length.
        len: usize,
    },
    /// A structure of a kind that this library does not know.
    #[error("the structure at offset {offset:#x} is of the unknown kind {kind:#x}: it is not used")]
    Kind {
        /// Where it begins.
        offset: usize,
        /// The kind that it gives.
        kind: u16,
    },
    /// Addresses that are fewer bits wide than a page.
    #[error("physical addresses are said to have {bits} bits")]
    AddressBits {
        /// What the table says.
        bits: u32,
    },
    /// A unit whose registers cannot be where they are said to be: at 0, not at a page's begin, or beyond the last address.
    #[error(
        "the unit at offset {offset:#x} has its registers at {registers:#x}, where none can be: it is refused, and no other unit is \
         in front of its devices"
    )]
    Registers {
        /// Where its structure begins.
        offset: usize,
        /// Where the registers are said to be.
        registers: u64,
    },
    /// A unit of whose devices the list cannot be read to its end, so that any device may be one of them.
    #[error("the devices of the unit at offset {offset:#x} are not all known: it is refused")]
    Devices {
        /// Where its structure begins.
        offset: usize,
    },
    /// A unit that is in front of all devices that no other names, where a unit was refused whose devices are not known.
    #[error(
        "the unit at offset {offset:#x} is in front of all other devices of PCI segment {segment}, and which these are is not known: \
         only devices that it names are taken for its own"
    )]
    Others {
        /// Where its structure begins.
        offset: usize,
        /// The segment.
        segment: u16,
    },
    /// Two structures for one unit, or for the one of all other devices.
    #[error(
        "the structure at offset {offset:#x} contradicts or repeats the one at {first:#x}, which came first"
    )]
    Twice {
        /// Where the second one begins.
        offset: usize,
        /// Where the first one begins.
        first: usize,
    },
    /// A path, or a device and function, that no device can have.
    #[error("the device scope at offset {offset:#x} leads to no device that there can be: it is not used")]
    Path {
        /// Where it begins.
        offset: usize,
    },
    /// A name that is not the zero-terminated ASCII that it should be.
    #[error("the name at offset {offset:#x} cannot be read: its device has none")]
    Name {
        /// Where its structure begins.
        offset: usize,
    },
    /// A device of the ACPI namespace, by a number that no structure gives a name to.
    #[error("a device scope names device {number} of the ACPI namespace, which the table gives no name")]
    Nameless {
        /// The number.
        number: u8,
    },
    /// A run of devices that has none.
    #[error("the run of devices at offset {offset:#x} goes from {first:#06x} to {last:#06x}: it is not used")]
    Backwards {
        /// Where it is.
        offset: usize,
        /// The first device.
        first: u16,
        /// The last device.
        last: u16,
    },
    /// The first device of a run without the last one, or the reverse.
    #[error(
        "the run of devices at offset {offset:#x} has one end: it is taken for device {device:#06x} alone"
    )]
    OneEnd {
        /// Where it is.
        offset: usize,
        /// The device.
        device: u16,
    },
    /// A reserved region of no possible addresses.
    #[error("the reserved region at offset {offset:#x} is not used: {error}")]
    Region {
        /// Where its structure begins.
        offset: usize,
        /// What is wrong with it.
        error: AddrError,
    },
    /// A reserved region that ends before it begins.
    #[error("the reserved region at offset {offset:#x} goes from {first:#x} to {last:#x}: it is not used")]
    RegionBackwards {
        /// Where its structure begins.
        offset: usize,
        /// Its first byte.
        first: u64,
        /// Its last byte.
        last: u64,
    },
    /// A reserved region inside page 0, as firmware writes it that means none. Linux maps the page.
    #[error("the reserved region at offset {offset:#x} lies in page 0, and stands for none: it is not used")]
    PageZero {
        /// Where its structure begins.
        offset: usize,
    },
    /// A reserved region that does not begin and end with pages of the size that the manual wants.
    #[error(
        "the reserved region {range} at offset {offset:#x} is not of whole pages: all pages that it touches are used"
    )]
    Unaligned {
        /// Where its structure begins.
        offset: usize,
        /// The region.
        range: IovaRange,
    },
    /// A reserved region that no device is named for.
    #[error("the reserved region at offset {offset:#x} is for no device: it is not used")]
    ForNobody {
        /// Where its structure begins.
        offset: usize,
    },
    /// A region that is to be neither mapped one to one nor excluded, or that may be neither read nor written.
    #[error("the memory at offset {offset:#x} has flags {flags:#04x}, which reserve nothing: it is not used")]
    ReservesNothing {
        /// Where its structure begins.
        offset: usize,
        /// The flags.
        flags: u8,
    },
    /// Nodes that cannot be read.
    #[error("the table names {count} nodes, of which {held} can be read")]
    Nodes {
        /// How many it names.
        count: usize,
        /// How many can be read.
        held: usize,
    },
    /// Mappings or regions that are not inside their node.
    #[error("the node at offset {offset:#x} names {count} mappings or regions, and holds {held} of them")]
    Mappings {
        /// Where the node begins.
        offset: usize,
        /// How many it names.
        count: usize,
        /// How many are inside it.
        held: usize,
    },
    /// A mapping that leads where no node is that it may lead to.
    #[error(
        "the mapping at offset {offset:#x} leads to offset {to:#x}, where no such node is: what it maps is behind no unit"
    )]
    Reference {
        /// Where the mapping is.
        offset: usize,
        /// Where it leads.
        to: usize,
    },
    /// Two runs of identifiers that hold the same one. Firmware often writes the count where the count less one belongs: then the
    /// run that begins there has it. Else the one that comes first in the table has it.
    #[error("the mappings at offsets {first:#x} and {second:#x} both have identifier {id:#x}")]
    Overlap {
        /// Where the one is that has the lower identifiers.
        first: usize,
        /// Where the other is.
        second: usize,
        /// The first identifier that both have.
        id: u32,
    },
}
