//! AMD-Vi's table.
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, Rev. 3.08, section 5.2 "I/O Virtualization
//! Reporting Structure".

use alloc::vec::Vec;

use portcullis::addr::Permissions;

use super::{AcpiError, Bytes, Reserved, push, reserved, run};

/// Blocks: units, by three generations of the same block; memory, of all devices, of one, of a range of devices.
const UNITS: [u8; 3] = [0x10, 0x11, 0x40];
const MEMORY_OF_ALL: u8 = 0x20;
const MEMORY_OF_ONE: u8 = 0x21;
const MEMORY_OF_RANGE: u8 = 0x22;

/// What the table says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ivrs {
    /// The units. One that is described by several generations of blocks is there once, by the newest.
    pub units: Vec<IvrsUnit>,
    /// Memory that firmware reserves for devices, each with the PCI segment, and the first and the last device.
    pub reserved: Vec<(u16, (u16, u16), Reserved)>,
}

/// A unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IvrsUnit {
    /// Where its registers begin in memory.
    pub registers: u64,
    /// The PCI segment of its devices.
    pub segment: u16,
    /// Its own number: bus, device and function.
    pub device: u16,
    /// Where its capability block begins in its configuration space.
    pub capability: u16,
    /// The generation of the block.
    kind: u8,
    /// The devices that it is in front of, each run with its first and its last.
    pub devices: Vec<(u16, u16)>,
    /// Devices whose accesses carry another's number: runs of them, and the number that the unit sees.
    pub aliases: Vec<((u16, u16), u16)>,
}

impl Ivrs {
    /// Reads the table. Entries that only concern interrupts, or that it does not know, are left out. O(the table's length,
    /// times its units); allocates.
    ///
    /// # Errors
    /// [`AcpiError`].
    pub fn parse(table: &[u8]) -> Result<Self, AcpiError> {
        let table = Bytes::table(table, *b"IVRS")?;
        let mut ivrs = Self { units: Vec::new(), reserved: Vec::new() };
        table.rest(48)?.each(
            4,
            |at| Ok(usize::from(at.u16(2)?)),
            |block| match block.u8(0)? {
                kind if UNITS.contains(&kind) => {
                    let unit = unit(kind, block)?;
                    let same =
                        |other: &IvrsUnit| (other.registers, other.segment) == (unit.registers, unit.segment);
                    match ivrs.units.iter_mut().find(|other| same(other)) {
                        Some(older) if older.kind < kind => *older = unit,
                        Some(_) => {}
                        None => push(&mut ivrs.units, unit)?,
                    }
                    Ok(())
                }
                kind @ (MEMORY_OF_ALL | MEMORY_OF_ONE | MEMORY_OF_RANGE) => {
                    let (flags, device, other) = (block.u8(1)?, block.u16(4)?, block.u16(6)?);
                    // Unity mapping, or exclusion, which is the same for a driver; else nothing is reserved.
                    let Some(permissions) = Permissions::of(flags & 0b1010 != 0, flags & 0b1100 != 0) else {
                        return Ok(());
                    };
                    let region = reserved(block.at, block.u64(16)?, block.u64(24)?, permissions)?;
                    let (first, last) = match kind {
                        MEMORY_OF_ALL => (0, u16::MAX),
                        MEMORY_OF_ONE => (device, device),
                        _ => (device, other),
                    };
                    let devices = run(block.at, first, last)?;
                    // Zeros, where firmware is older than segments.
                    push(&mut ivrs.reserved, (block.u16(8)?, devices, region))
                }
                _ => Ok(()),
            },
        )?;
        Ok(ivrs)
    }

    /// The number that the unit sees in the accesses of `device` (bus, device and function as 16 bits) of a PCI segment.
    pub fn alias(&self, segment: u16, device: u16) -> u16 {
        let aliases = self.units.iter().filter(|unit| unit.segment == segment).flat_map(|unit| &unit.aliases);
        let mut of_device = aliases.filter(|((first, last), _)| (*first..=*last).contains(&device));
        of_device.next().map_or(device, |(_, alias)| *alias)
    }

    /// What firmware reserves for `device` of a PCI segment, and for all that the unit cannot tell from it, as these have one domain:
    /// what [`Reserved::map`] takes. O(the table's length, squared).
    pub fn reserved_for(&self, segment: u16, device: u16) -> impl Iterator<Item = Reserved> {
        let seen = self.alias(segment, device);
        let covers = move |(of, (first, last), _): &&(u16, (u16, u16), Reserved)| {
            let units = self.units.iter().filter(|unit| unit.segment == segment);
            let mut aliases = units.flat_map(|unit| &unit.aliases);
            *of == segment
                && ([device, seen].iter().any(|device| (first..=last).contains(&device))
                    || aliases.any(|(run, alias)| *alias == seen && run.0 <= *last && *first <= run.1))
        };
        self.reserved.iter().filter(covers).map(|(.., region)| *region)
    }
}

fn unit(kind: u8, block: Bytes<'_>) -> Result<IvrsUnit, AcpiError> {
    let header = if kind == UNITS[0] { 24 } else { 40 };
    let mut unit = IvrsUnit {
        registers: block.u64(8)?,
        segment: block.u16(16)?,
        device: block.u16(4)?,
        capability: block.u16(6)?,
        kind,
        devices: Vec::new(),
        aliases: Vec::new(),
    };
    let mut start = None;
    block.rest(header)?.each(4, entry_len, |entry| {
        let device = entry.u16(1)?;
        match entry.u8(0)? {
            // All devices; one; one that is seen as another; one with further settings.
            1 => push(&mut unit.devices, (0, u16::MAX))?,
            2 | 0x46 => push(&mut unit.devices, (device, device))?,
            0x42 => {
                push(&mut unit.devices, (device, device))?;
                push(&mut unit.aliases, ((device, device), entry.u16(5)?))?;
            }
            // The start of a range, whose end follows, and of one that is seen as one device.
            3 | 0x47 => start = Some((device, None)),
            0x43 => start = Some((device, Some(entry.u16(5)?))),
            4 => {
                let (first, alias) = start.take().ok_or(AcpiError::Length { offset: entry.at, len: 4 })?;
                let devices = run(entry.at, first, device)?;
                push(&mut unit.devices, devices)?;
                if let Some(alias) = alias {
                    push(&mut unit.aliases, (devices, alias))?;
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(unit)
}

/// How long an entry for devices is: its two highest bits say so, but for those that name a device by ACPI.
fn entry_len(entry: &Bytes<'_>) -> Result<usize, AcpiError> {
    match entry.u8(0)? {
        0xf0 => Ok(22 + usize::from(entry.u8(21)?)),
        kind => Ok(4 << (kind >> 6)),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::vec;

    use super::super::tests::{spoil, table};
    use super::*;

    /// A unit by two generations of blocks, and a reserved page.
    fn example() -> Vec<u8> {
        let mut body = vec![0; 12];
        for (kind, header) in [(0x10_u8, 24_u16), (0x11, 40)] {
            let len = header + 16;
            let mut block = vec![kind, 0, len as u8, 0, 2, 0, 0x40, 0];
            block.extend(0xfed8_0000_u64.to_le_bytes());
            block.resize(usize::from(header), 0);
            block.extend([3, 8, 0, 0, 4, 0xff, 0x0f, 0, 0x42, 0x10, 0x20, 0, 0, 0, 0x20, 0]);
            body.extend(block);
        }
        let mut memory = vec![MEMORY_OF_ONE, 0b0111, 32, 0, 0x28, 0, 0, 0];
        memory.resize(16, 0);
        memory.extend(0x10_0000_u64.to_le_bytes());
        memory.extend(0x1000_u64.to_le_bytes());
        body.extend(memory);
        table(b"IVRS", &body)
    }

    #[test]
    fn units_devices_and_reserved_memory() {
        let ivrs = Ivrs::parse(&example()).unwrap();
        let [unit] = ivrs.units.as_slice() else { panic!("one unit") };
        assert_eq!((unit.registers, unit.device, unit.capability, unit.kind), (0xfed8_0000, 2, 0x40, 0x11));
        assert_eq!(unit.devices, [(8, 0x0fff), (0x2010, 0x2010)]);
        assert_eq!(unit.aliases, [((0x2010, 0x2010), 0x2000)]);
        let [(segment, devices, region)] = ivrs.reserved.as_slice() else { panic!("one region") };
        assert_eq!((*segment, *devices, region.range.len()), (0, (0x28, 0x28), 4096));
        assert_eq!(region.permissions, Permissions::READ_WRITE);
    }

    #[test]
    fn a_run_that_ends_before_it_begins_is_an_error() {
        // The first device of the first unit's is 0x1008, the last one 0x0fff.
        let mut backwards = example();
        backwards[36 + 12 + 24 + 2] = 0x10;
        super::super::tests::seal(&mut backwards);
        assert_eq!(Ivrs::parse(&backwards), Err(AcpiError::Backwards { offset: 36 + 12 + 24 + 4 }));
        let mut memory = example();
        let at = memory.len() - 32;
        memory[at] = MEMORY_OF_RANGE;
        super::super::tests::seal(&mut memory);
        assert_eq!(Ivrs::parse(&memory), Err(AcpiError::Backwards { offset: at }), "0x28 to 0");
    }

    #[test]
    fn whatever_firmware_writes_is_read_inside_its_bytes() {
        spoil(&example(), Ivrs::parse);
    }
}
