//! AMD-Vi's table.
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, Rev. 3.08, section 5.2 "I/O Virtualization
//! Reporting Structure".

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;

use portcullis::addr::{Iova, IovaRange, Permissions};

use super::bytes::{Bytes, PAGE, can_be_registers, push, region, remove, text, twins};
use super::{AcpiError, Flaw, Reserved};

/// Blocks: units, by three generations of the same block; memory, of all devices, of one, of a range of devices.
const UNITS: [u8; 3] = [0x10, 0x11, 0x40];
const MEMORY_OF_ALL: u8 = 0x20;
const MEMORY_OF_ONE: u8 = 0x21;
const MEMORY_OF_RANGE: u8 = 0x22;

/// Flags of memory: mapped one to one, where devices read and write as the next two say; excluded, where they do both.
const UNITY: u8 = 1 << 0;
const READ: u8 = 1 << 1;
const WRITE: u8 = 1 << 2;
const EXCLUDED: u8 = 1 << 3;

/// Bytes of registers of a unit without performance counters. (With these it has 512 KiB, as its feature register says.)
const REGISTERS: u64 = 16 << 10;

/// What the table says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ivrs {
    /// The units. One that is described by several generations of blocks is there once, by the newest that can be read.
    /// [`unit_of`](Self::unit_of) says which one a device is behind.
    pub units: Vec<IvrsUnit>,
    /// Units that cannot be used, each for a reason among the [flaws](Self::flaws). **Their devices are behind no other unit.**
    pub refused: Vec<IvrsUnit>,
    /// Memory that firmware reserves for devices, each with the PCI segment, and the first and the last device.
    pub reserved: Vec<(u16, (u16, u16), Reserved)>,
    /// What is wrong with the table. Each is a sentence for the log.
    pub flaws: Vec<Flaw>,
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
    /// The devices that it is in front of, each run with its first and its last.
    pub devices: Vec<(u16, u16)>,
    /// Devices whose accesses carry another's number: runs of them, and the number that the unit sees.
    pub aliases: Vec<((u16, u16), u16)>,
    /// Devices of the ACPI namespace.
    pub named: Vec<IvrsNamed>,
    /// The generation of the block, where it begins, and whether all of it could be read.
    kind: u8,
    offset: usize,
    whole: bool,
}

/// A device of the ACPI namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IvrsNamed {
    /// The number that the unit sees in its accesses, which other devices may have as well.
    pub device: u16,
    /// Its hardware ID (`_HID`).
    pub hardware_id: String,
    /// Its unique ID (`_UID`), if it has one; an integer is in decimal digits.
    pub unique_id: Option<String>,
}

impl IvrsUnit {
    fn names(&self, segment: u16, device: u16) -> bool {
        self.segment == segment && self.devices.iter().any(|(first, last)| (*first..=*last).contains(&device))
    }
}

impl Ivrs {
    /// Reads the table. Entries that only concern interrupts are left out. What is wrong in it is one of the [flaws](Self::flaws), and
    /// what else it says is used. O(n log n) by the table's length, and memory by that; allocates.
    ///
    /// # Errors
    /// [`AcpiError`].
    pub fn parse(table: &[u8]) -> Result<Self, AcpiError> {
        let (table, flaws) = Bytes::table(table, *b"IVRS", 48)?;
        let mut ivrs = Self { units: Vec::new(), refused: Vec::new(), reserved: Vec::new(), flaws };
        for block in table.rest(48).into_iter().flat_map(|all| all.split(4, |at| at.u16(2).map(usize::from)))
        {
            let block = match block {
                Ok(block) => block,
                Err(flaw) => {
                    push(&mut ivrs.flaws, flaw)?;
                    break;
                }
            };
            let done = match block.u8(0).unwrap_or(0) {
                kind if UNITS.contains(&kind) => match ivrs.unit(kind, &block)? {
                    Some(unit) => Some(push(&mut ivrs.units, unit)?),
                    None => None,
                },
                kind @ (MEMORY_OF_ALL | MEMORY_OF_ONE | MEMORY_OF_RANGE) => ivrs.memory(kind, &block)?,
                kind => Some(push(&mut ivrs.flaws, Flaw::Kind { offset: block.at, kind: kind.into() })?),
            };
            if done.is_none() {
                push(&mut ivrs.flaws, block.short())?;
            }
        }
        ivrs.choose()?;
        Ok(ivrs)
    }

    /// The unit in front of `device` (bus, device and function as 16 bits) of a PCI segment. `None` where there is none that can be used:
    /// **then nothing translates what the device does.** O(the table's length).
    pub fn unit_of(&self, segment: u16, device: u16) -> Option<&IvrsUnit> {
        let is_refused = self.refused.iter().any(|unit| unit.names(segment, device));
        // The last one, as for Linux.
        self.units.iter().rev().find(|unit| !is_refused && unit.names(segment, device))
    }

    /// The number that the unit sees in the accesses of `device` (bus, device and function as 16 bits) of a PCI segment.
    pub fn alias(&self, segment: u16, device: u16) -> u16 {
        let aliases = self.units.iter().filter(|unit| unit.segment == segment).flat_map(|unit| &unit.aliases);
        // The last one, as for Linux.
        let mut of_device = aliases.rev().filter(|((first, last), _)| (*first..=*last).contains(&device));
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

    /// A unit's block; `None` where it is too short.
    fn unit(&mut self, kind: u8, block: &Bytes<'_>) -> Result<Option<IvrsUnit>, AcpiError> {
        let header = if kind == UNITS[0] { 24 } else { 40 };
        let read =
            || Some((block.u16(4)?, block.u16(6)?, block.u64(8)?, block.u16(16)?, block.rest(header)?));
        let Some((device, capability, registers, segment, entries)) = read() else { return Ok(None) };
        let mut unit = IvrsUnit {
            registers,
            segment,
            device,
            capability,
            devices: Vec::new(),
            aliases: Vec::new(),
            named: Vec::new(),
            kind,
            offset: block.at,
            whole: true,
        };
        let mut start = None;
        for entry in entries.split(4, entry_len) {
            match entry {
                Ok(entry) => unit.entry(&entry, &mut start, &mut self.flaws)?,
                // The rest may name more devices, or say that one that was named is seen as another.
                Err(flaw) => {
                    unit.whole = false;
                    push(&mut self.flaws, flaw)?;
                    break;
                }
            }
        }
        unit.one_end(start, &mut self.flaws)?;
        Ok(Some(unit))
    }

    fn memory(&mut self, kind: u8, block: &Bytes<'_>) -> Result<Option<()>, AcpiError> {
        let offset = block.at;
        // The segment is zeros where firmware is older than segments.
        let read = || {
            Some((block.u8(1)?, block.u16(4)?, block.u16(6)?, block.u16(8)?, block.u64(16)?, block.u64(24)?))
        };
        let Some((flags, device, other, segment, start, len)) = read() else { return Ok(None) };
        // Exclusion is a mapping one to one, for all that a unit's driver can tell; firmware uses both for the same.
        let permissions = match flags & (UNITY | EXCLUDED) {
            0 => None,
            UNITY => Permissions::of(flags & READ != 0, flags & WRITE != 0),
            _ => Some(Permissions::READ_WRITE),
        };
        let Some(permissions) = permissions else {
            return Ok(Some(push(&mut self.flaws, Flaw::ReservesNothing { offset, flags })?));
        };
        let (first, last) = match kind {
            MEMORY_OF_ALL => (0, u16::MAX),
            MEMORY_OF_ONE => (device, device),
            _ => (device, other),
        };
        if last < first {
            return Ok(Some(push(&mut self.flaws, Flaw::Backwards { offset, first, last })?));
        }
        let range = IovaRange::new(Iova::new(start), len);
        if let Some(region) = region(offset, range, permissions, PAGE, &mut self.flaws)? {
            push(&mut self.reserved, (segment, (first, last), region))?;
        }
        Ok(Some(()))
    }

    /// Leaves of each unit the newest block that can be read, and refuses what cannot be used.
    fn choose(&mut self) -> Result<(), AcpiError> {
        let mut gone = Vec::new();
        self.units.iter().try_for_each(|_| push(&mut gone, false))?;
        // One unit has one place for its registers, and one number, where blocks of several generations disagree.
        let by_registers = twins(&self.units, |unit| (unit.segment, unit.registers))?;
        let by_number = twins(&self.units, |unit| (unit.segment, unit.device))?;
        for (first, second) in by_registers.into_iter().chain(by_number) {
            if [first, second].iter().any(|place| gone.get(*place).copied().unwrap_or(true)) {
                continue;
            }
            let Ok([kept, other]) = self.units.get_disjoint_mut([first, second]) else { continue };
            let agree = kept.registers == other.registers;
            if !agree || kept.kind == other.kind {
                push(&mut self.flaws, Flaw::Twice { offset: other.offset, first: kept.offset })?;
            }
            if kept.kind == other.kind {
                // Two units that say that they are one device of PCI are two.
                if !agree {
                    continue;
                }
                kept.append(other)?;
            } else if (other.whole, other.kind) > (kept.whole, kept.kind) {
                core::mem::swap(kept, other);
            }
            if let Some(gone) = gone.get_mut(second) {
                *gone = true;
            }
        }
        remove(&mut self.units, &gone);
        let mut usable = Vec::new();
        for unit in core::mem::take(&mut self.units) {
            let (offset, registers) = (unit.offset, unit.registers);
            let flaw = if !can_be_registers(registers, REGISTERS) {
                Flaw::Registers { offset, registers }
            } else if !unit.whole {
                Flaw::Devices { offset }
            } else {
                push(&mut usable, unit)?;
                continue;
            };
            push(&mut self.flaws, flaw)?;
            push(&mut self.refused, unit)?;
        }
        self.units = usable;
        Ok(())
    }
}

impl IvrsUnit {
    /// Takes over what another block of the same generation says of the unit.
    fn append(&mut self, other: &mut Self) -> Result<(), AcpiError> {
        fn append<T>(all: &mut Vec<T>, more: &mut Vec<T>) -> Result<(), AcpiError> {
            all.try_reserve(more.len()).map_err(|_| AcpiError::OutOfMemory)?;
            all.append(more);
            Ok(())
        }
        self.whole &= other.whole;
        append(&mut self.devices, &mut other.devices)?;
        append(&mut self.aliases, &mut other.aliases)?;
        append(&mut self.named, &mut other.named)
    }

    /// Reads an entry. `start` is the run that has begun: its first device, and that device's alias.
    fn entry(
        &mut self,
        entry: &Bytes<'_>,
        start: &mut Option<(usize, u16, Option<u16>)>,
        flaws: &mut Vec<Flaw>,
    ) -> Result<(), AcpiError> {
        let (offset, kind, device) = (entry.at, entry.u8(0).unwrap_or(0), entry.u16(1).unwrap_or(0));
        let alias = entry.u16(5).unwrap_or(device);
        match kind {
            // What fills up, and what interrupts come from.
            0 | 0x40 | 0x48 => Ok(()),
            // All devices; one; one that is seen as another; one with further settings.
            1 => push(&mut self.devices, (0, u16::MAX)),
            2 | 0x46 => push(&mut self.devices, (device, device)),
            0x42 => self.run((device, device), Some(alias)),
            // The start of a range, whose end follows, and of one that is seen as one device.
            3 | 0x43 | 0x47 => {
                let begun = start.replace((offset, device, (kind == 0x43).then_some(alias)));
                self.one_end(begun, flaws)
            }
            4 => match start.take() {
                Some((_, first, alias)) if first <= device => self.run((first, device), alias),
                Some((_, first, _)) => push(flaws, Flaw::Backwards { offset, first, last: device }),
                None => self.one_end(Some((offset, device, None)), flaws),
            },
            // A device of the ACPI namespace, in blocks of the last generation alone.
            0xf0 if self.kind == UNITS[2] => {
                push(&mut self.devices, (device, device))?;
                match hardware_id(entry)? {
                    Some(hardware_id) => {
                        let unique_id = unique_id(entry)?;
                        push(&mut self.named, IvrsNamed { device, hardware_id, unique_id })
                    }
                    None => push(flaws, Flaw::Name { offset }),
                }
            }
            kind => push(flaws, Flaw::Kind { offset, kind: kind.into() }),
        }
    }

    /// Devices of this unit, and the one that they are seen as, which is behind it as well.
    fn run(&mut self, devices: (u16, u16), alias: Option<u16>) -> Result<(), AcpiError> {
        push(&mut self.devices, devices)?;
        let Some(alias) = alias else { return Ok(()) };
        push(&mut self.devices, (alias, alias))?;
        push(&mut self.aliases, (devices, alias))
    }

    /// What has only one end of a run is that device.
    fn one_end(
        &mut self,
        begun: Option<(usize, u16, Option<u16>)>,
        flaws: &mut Vec<Flaw>,
    ) -> Result<(), AcpiError> {
        let Some((offset, device, alias)) = begun else { return Ok(()) };
        push(flaws, Flaw::OneEnd { offset, device })?;
        self.run((device, device), alias)
    }
}

/// The hardware ID, of eight bytes, which zeros fill up.
fn hardware_id(entry: &Bytes<'_>) -> Result<Option<String>, AcpiError> {
    let id = entry.take(4, 8).unwrap_or_default();
    let len = id.iter().position(|byte| *byte == 0).unwrap_or(id.len());
    text(id.get(..len).unwrap_or_default())
}

/// The unique ID: none, an integer of up to eight bytes, or text.
fn unique_id(entry: &Bytes<'_>) -> Result<Option<String>, AcpiError> {
    let id = entry.rest(22).and_then(|id| id.take(0, id.len())).unwrap_or_default();
    match entry.u8(20) {
        Some(1) if id.len() <= 8 => {
            let number = id.iter().rev().fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
            let mut digits = String::new();
            // The most digits that there are.
            digits.try_reserve_exact(20).map_err(|_| AcpiError::OutOfMemory)?;
            // It has room.
            let _ = write!(digits, "{number}");
            Ok(Some(digits))
        }
        Some(2) => {
            let len = id.iter().position(|byte| *byte == 0).unwrap_or(id.len());
            text(id.get(..len).unwrap_or_default())
        }
        _ => Ok(None),
    }
}

/// How long an entry for devices is: its two highest bits say so, but for the last kinds, whose lengths vary. Of these the manual has the
/// one that names a device by ACPI; of another, `Some(0)`, the walk ends.
fn entry_len(entry: &Bytes<'_>) -> Option<usize> {
    match entry.u8(0)? {
        0xf0 => Some(22 + usize::from(entry.u8(21)?)),
        kind if kind < 0xf0 => Some(4 << (kind >> 6)),
        _ => Some(0),
    }
}
