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

/// Block types: units, in three generations; memory of all devices, of one, of a range.
const UNITS: [u8; 3] = [0x10, 0x11, 0x40];
const MEMORY_OF_ALL: u8 = 0x20;
const MEMORY_OF_ONE: u8 = 0x21;
const MEMORY_OF_RANGE: u8 = 0x22;

/// Flags of memory: identity-mapped, with read and write permission by the next two; excluded, with both.
const UNITY: u8 = 1 << 0;
const READ: u8 = 1 << 1;
const WRITE: u8 = 1 << 2;
const EXCLUDED: u8 = 1 << 3;

/// Size of a unit's registers without performance counters, in bytes. (With them it is 512 KiB, by the feature register.)
const REGISTERS: u64 = 16 << 10;

/// The parsed table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ivrs {
    /// The units, each once, by the newest generation of block that can be read. [`unit_of`](Self::unit_of) finds a device's.
    pub units: Vec<IvrsUnit>,
    /// Units that cannot be used, each with its reason among the [flaws](Self::flaws). **No other unit translates for their devices.**
    pub refused: Vec<IvrsUnit>,
    /// Memory that firmware reserves for devices, with the PCI segment, and the first and the last device.
    pub reserved: Vec<(u16, (u16, u16), Reserved)>,
    /// What is wrong with the table, one sentence each for the log.
    pub flaws: Vec<Flaw>,
}

/// A unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IvrsUnit {
    /// Physical address of its registers.
    pub registers: u64,
    /// The PCI segment of its devices.
    pub segment: u16,
    /// Its own bus, device and function.
    pub device: u16,
    /// Offset of its capability block in its configuration space.
    pub capability: u16,
    /// Its devices, as ranges of first and last.
    pub devices: Vec<(u16, u16)>,
    /// Devices whose DMA carries another device's ID: ranges, and the ID that the unit sees.
    pub aliases: Vec<((u16, u16), u16)>,
    /// Its devices of the ACPI namespace.
    pub named: Vec<IvrsNamed>,
    /// Generation and offset of the block, and whether all of it could be read.
    kind: u8,
    offset: usize,
    whole: bool,
}

/// A device of the ACPI namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IvrsNamed {
    /// The ID that the unit sees in its DMA, which other devices may share.
    pub device: u16,
    /// Its hardware ID (`_HID`).
    pub hardware_id: String,
    /// Its unique ID (`_UID`), if it has one; an integer becomes decimal digits.
    pub unique_id: Option<String>,
}

impl IvrsUnit {
    fn names(&self, segment: u16, device: u16) -> bool {
        self.segment == segment && self.devices.iter().any(|(first, last)| (*first..=*last).contains(&device))
    }
}

impl Ivrs {
    /// Parses the table, except entries that concern only interrupts. Reports what is wrong as [flaws](Self::flaws), and uses the rest.
    /// Time O(n log n) and memory O(n) in the length of the table; allocates.
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

    /// The unit that translates for `device` (bus, device and function as 16 bits) of a PCI segment. `None` if there is none that can be
    /// used: **the device's DMA is then not translated.** O(the table's length).
    pub fn unit_of(&self, segment: u16, device: u16) -> Option<&IvrsUnit> {
        let is_refused = self.refused.iter().any(|unit| unit.names(segment, device));
        // The last one, as in Linux.
        self.units.iter().rev().find(|unit| !is_refused && unit.names(segment, device))
    }

    /// The ID that the unit sees in the DMA of `device` (bus, device and function as 16 bits) of a PCI segment.
    pub fn alias(&self, segment: u16, device: u16) -> u16 {
        let aliases = self.units.iter().filter(|unit| unit.segment == segment).flat_map(|unit| &unit.aliases);
        // The last one, as in Linux.
        let mut of_device = aliases.rev().filter(|((first, last), _)| (*first..=*last).contains(&device));
        of_device.next().map_or(device, |(_, alias)| *alias)
    }

    /// What firmware reserves for `device` of a PCI segment and for its aliases, which share its domain, for [`Reserved::map`]. O(the
    /// table's length, squared).
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

    /// Returns `None` if the block is too short.
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
                // The unread rest may name more devices, or aliases of the ones named.
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
        // Firmware older than segments has zeros here.
        let read = || {
            Some((block.u8(1)?, block.u16(4)?, block.u16(6)?, block.u16(8)?, block.u64(16)?, block.u64(24)?))
        };
        let Some((flags, device, other, segment, start, len)) = read() else { return Ok(None) };
        // A unit's driver can only treat exclusion as an identity mapping. Firmware uses both for the same.
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

    /// Keeps the newest readable block of each unit, and refuses units that cannot be used.
    fn choose(&mut self) -> Result<(), AcpiError> {
        let mut gone = Vec::new();
        self.units.iter().try_for_each(|_| push(&mut gone, false))?;
        // One unit has one register address and one ID, even if blocks of several generations disagree.
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
                // Two units that claim one PCI device are two units.
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
    /// Adds the contents of another block of the same generation.
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

    /// Reads an entry. `start` is the open range: its first device, and that device's alias.
    fn entry(
        &mut self,
        entry: &Bytes<'_>,
        start: &mut Option<(usize, u16, Option<u16>)>,
        flaws: &mut Vec<Flaw>,
    ) -> Result<(), AcpiError> {
        let (offset, kind, device) = (entry.at, entry.u8(0).unwrap_or(0), entry.u16(1).unwrap_or(0));
        let alias = entry.u16(5).unwrap_or(device);
        match kind {
            // Padding, and sources of interrupts.
            0 | 0x40 | 0x48 => Ok(()),
            // All devices; one device; one with an alias; one with extended settings.
            1 => push(&mut self.devices, (0, u16::MAX)),
            2 | 0x46 => push(&mut self.devices, (device, device)),
            0x42 => self.run((device, device), Some(alias)),
            // The start of a range, whose end follows; and of a range with an alias.
            3 | 0x43 | 0x47 => {
                let begun = start.replace((offset, device, (kind == 0x43).then_some(alias)));
                self.one_end(begun, flaws)
            }
            4 => match start.take() {
                Some((_, first, alias)) if first <= device => self.run((first, device), alias),
                Some((_, first, _)) => push(flaws, Flaw::Backwards { offset, first, last: device }),
                None => self.one_end(Some((offset, device, None)), flaws),
            },
            // A device of the ACPI namespace, only in blocks of the last generation.
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

    /// Adds devices of this unit, and their alias, which belongs to the unit, too.
    fn run(&mut self, devices: (u16, u16), alias: Option<u16>) -> Result<(), AcpiError> {
        push(&mut self.devices, devices)?;
        let Some(alias) = alias else { return Ok(()) };
        push(&mut self.devices, (alias, alias))?;
        push(&mut self.aliases, (devices, alias))
    }

    /// Takes a range with only one end for one device.
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

/// The hardware ID: eight bytes, padded with zeros.
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
            // The most digits of a `u64`.
            digits.try_reserve_exact(20).map_err(|_| AcpiError::OutOfMemory)?;
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

/// Length of an entry, by its two highest bits; entries of the last types have variable lengths. The manual defines one of those, ACPI
/// devices; for any other the result is `Some(0)`, which ends the walk.
fn entry_len(entry: &Bytes<'_>) -> Option<usize> {
    match entry.u8(0)? {
        0xf0 => Some(22 + usize::from(entry.u8(21)?)),
        kind if kind < 0xf0 => Some(4 << (kind >> 6)),
        _ => Some(0),
    }
}
