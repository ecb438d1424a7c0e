//! VT-d's table.
//!
//! Not read: the structures of interrupt controllers, and structures that restrict no unit: root ports with ATS (ATSR), devices that want ATS
//! (SATC, SIDP), and a unit's memory node (RHSA).
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, Rev. 4.1 (March 2023), chapter 8
//! "BIOS Considerations".

use alloc::string::String;
use alloc::vec::Vec;

use portcullis::addr::{Iova, IovaRange, Permissions};

use super::bytes::{Bytes, PAGE, can_be_registers, name, push, region, remove, twins};
use super::{AcpiError, Flaw, Reserved};

/// Remapping structures (section 8.2).
const UNIT: u16 = 0;
const RESERVED: u16 = 1;
/// A device of the ACPI namespace (section 8.7).
const NAMED: u16 = 4;
/// The last type in the manual.
const LAST: u16 = 6;

/// Kinds of scopes (section 8.3.1).
const ENDPOINT: u8 = 1;
const BRIDGE: u8 = 2;
const INTERRUPTS: core::ops::RangeInclusive<u8> = 3..=4;
const NAMESPACE: u8 = 5;

/// The parsed table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dmar {
    /// Width of physical addresses that a device can be given.
    pub address_bits: u32,
    /// The units. [`unit_of`](Self::unit_of) finds a device's.
    pub units: Vec<DmarUnit>,
    /// Units that cannot be used, each with its reason among the [flaws](Self::flaws). **No other unit translates for their devices.**
    pub refused: Vec<DmarUnit>,
    /// Memory that firmware reserves for devices, with its segment and device.
    pub reserved: Vec<(u16, DmarScope, Reserved)>,
    /// Names of ACPI namespace devices, by their [number](DmarScopeKind::Namespace).
    pub names: Vec<(u8, String)>,
    /// What is wrong with the table, one sentence each for the log.
    pub flaws: Vec<Flaw>,
}

/// A unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmarUnit {
    /// Physical address of its registers.
    pub registers: u64,
    /// Size of its registers, in bytes.
    pub registers_len: u64,
    /// The PCI segment of its devices.
    pub segment: u16,
    /// It takes all devices of its segment that no other unit names, refused units included.
    pub others: bool,
    /// Its devices.
    pub scopes: Vec<DmarScope>,
    /// Offset of its structure, and whether all its scopes could be read.
    offset: usize,
    whole: bool,
}

/// Kind of scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmarScopeKind {
    /// A PCI device.
    Endpoint,
    /// A PCI bridge, and all devices behind it.
    Bridge,
    /// A device of the ACPI namespace, by its number ([`Dmar::names`]). Its path gives its source-id.
    Namespace(u8),
}

/// A device, or all that is behind a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmarScope {
    /// Its kind.
    pub kind: DmarScopeKind,
    /// The bus that the path starts at.
    pub bus: u8,
    /// Device and function of each bridge on the path, and of the device at its end. (A bridge leads to its secondary bus.)
    pub path: Vec<(u8, u8)>,
}

impl DmarScope {
    /// Returns the source-id (bus, device and function as 16 bits) of the device at the end of the path. `buses` returns a bridge's
    /// Secondary and Subordinate Bus Number registers, by its source-id, and `None` for a device that is no bridge, or one that is not set
    /// up. Returns `None` if `buses` does so for a bridge of the path.
    pub fn device(&self, mut buses: impl FnMut(u16) -> Option<(u8, u8)>) -> Option<u16> {
        let mut bus = self.bus;
        let (last, bridges) = self.path.split_last()?;
        let number = |bus: u8, (device, function): (u8, u8)| {
            u16::from(bus) << 8 | u16::from(device & 0x1f) << 3 | u16::from(function & 7)
        };
        for bridge in bridges {
            (bus, _) = buses(number(bus, *bridge))?;
        }
        Some(number(bus, *last))
    }

    /// Whether the scope covers `device`: the device at the end of the path, or any behind it if that is a bridge. `buses` is as for
    /// [`device`](Self::device). For a virtual function, pass its physical function (VT-d, section 8.3.3).
    pub fn covers(&self, device: u16, mut buses: impl FnMut(u16) -> Option<(u8, u8)>) -> bool {
        let Some(own) = self.device(&mut buses) else { return false };
        // A bridge whose secondary bus is not above its own is not set up.
        let behind = |(first, last): (u8, u8)| {
            first > (own >> 8) as u8 && (first..=last).contains(&((device >> 8) as u8))
        };
        own == device || self.kind == DmarScopeKind::Bridge && buses(own).is_some_and(behind)
    }
}

impl Dmar {
    /// Parses the table. Reports what is wrong as [flaws](Self::flaws), and uses the rest. Time O(n log n) and memory O(n) in the length of
    /// the table; allocates.
    ///
    /// # Errors
    /// [`AcpiError`].
    pub fn parse(table: &[u8]) -> Result<Self, AcpiError> {
        let (table, flaws) = Bytes::table(table, *b"DMAR", 48)?;
        let address_bits = table.u8(36).map_or(0, u32::from) + 1;
        let mut dmar = Self {
            address_bits,
            units: Vec::new(),
            refused: Vec::new(),
            reserved: Vec::new(),
            names: Vec::new(),
            flaws,
        };
        if address_bits < PAGE.ilog2() {
            push(&mut dmar.flaws, Flaw::AddressBits { bits: address_bits })?;
        }
        for structure in
            table.rest(48).into_iter().flat_map(|all| all.split(4, |at| at.u16(2).map(usize::from)))
        {
            let structure = match structure {
                Ok(structure) => structure,
                // The unit that takes all other devices of a segment comes last (section 8.3). If the walk ended early, that unit is
                // missing, too.
                Err(flaw) => {
                    push(&mut dmar.flaws, flaw)?;
                    break;
                }
            };
            let done = match structure.u16(0).unwrap_or(u16::MAX) {
                UNIT => dmar.unit(&structure)?,
                RESERVED => dmar.region(&structure)?,
                NAMED => dmar.name(&structure)?,
                kind if kind > LAST => {
                    push(&mut dmar.flaws, Flaw::Kind { offset: structure.at, kind })?;
                    Some(())
                }
                _ => Some(()),
            };
            if done.is_none() {
                push(&mut dmar.flaws, structure.short())?;
            }
        }
        dmar.join()?;
        dmar.limit_others()?;
        dmar.check_names()?;
        Ok(dmar)
    }

    /// The unit that translates for `device` (bus, device and function as 16 bits) of a PCI segment; `buses` is as for
    /// [`DmarScope::device`]. `None` if there is none that can be used: **the device's DMA is then not translated.** O(the table's length).
    pub fn unit_of(
        &self,
        segment: u16,
        device: u16,
        mut buses: impl FnMut(u16) -> Option<(u8, u8)>,
    ) -> Option<&DmarUnit> {
        let mut names = |unit: &&DmarUnit| {
            unit.segment == segment && unit.scopes.iter().any(|scope| scope.covers(device, &mut buses))
        };
        if self.refused.iter().any(|unit| names(&unit)) {
            return None;
        }
        let others = |unit: &&DmarUnit| unit.segment == segment && unit.others;
        self.units.iter().find(names).or_else(|| self.units.iter().find(others))
    }

    /// What firmware reserves for `device` (bus, device and function as 16 bits) of a PCI segment, for [`Reserved::map`]. `buses` is as for
    /// [`DmarScope::device`]. O(the table's length).
    pub fn reserved_for(
        &self,
        segment: u16,
        device: u16,
        mut buses: impl FnMut(u16) -> Option<(u8, u8)>,
    ) -> impl Iterator<Item = Reserved> {
        let of_device = move |(of, scope, region): &(u16, DmarScope, Reserved)| {
            (*of == segment && scope.covers(device, &mut buses)).then_some(*region)
        };
        self.reserved.iter().filter_map(of_device)
    }

    /// Returns `None` where the structure is too short.
    fn unit(&mut self, structure: &Bytes<'_>) -> Result<Option<()>, AcpiError> {
        let offset = structure.at;
        let read = || Some((structure.u8(4)?, structure.u8(5)?, structure.u64(8)?, structure.rest(16)?));
        let segment = structure.u16(6);
        let Some((flags, size, registers, rest)) = read() else {
            // Too short even for the address of the registers.
            let none = DmarUnit {
                registers: 0,
                registers_len: 0,
                segment: segment.unwrap_or(0),
                others: false,
                scopes: Vec::new(),
                offset,
                whole: false,
            };
            push(&mut self.refused, none)?;
            push(&mut self.flaws, Flaw::Devices { offset })?;
            return Ok(None);
        };
        let (scopes, whole) = scopes(rest, &mut self.flaws)?;
        let (others, registers_len) = (flags & 1 != 0, PAGE << (size & 0xf));
        let segment = segment.unwrap_or(0);
        // The scopes of the unit that takes all other devices add nothing.
        let whole = whole || others;
        let unit = DmarUnit { registers, registers_len, segment, others, scopes, offset, whole };
        let can_be = can_be_registers(registers, registers_len);
        if !can_be {
            push(&mut self.flaws, Flaw::Registers { offset, registers })?;
        }
        if !whole {
            push(&mut self.flaws, Flaw::Devices { offset })?;
        }
        push(if can_be && whole { &mut self.units } else { &mut self.refused }, unit)?;
        Ok(Some(()))
    }

    fn region(&mut self, structure: &Bytes<'_>) -> Result<Option<()>, AcpiError> {
        let offset = structure.at;
        let read = || Some((structure.u16(6)?, structure.u64(8)?, structure.u64(16)?, structure.rest(24)?));
        let Some((segment, first, last, rest)) = read() else { return Ok(None) };
        if last < first {
            push(&mut self.flaws, Flaw::RegionBackwards { offset, first, last })?;
            return Ok(Some(()));
        }
        let range = IovaRange::from_bounds(Iova::new(first), Iova::new(last));
        let region = region(offset, range, Permissions::READ_WRITE, PAGE, &mut self.flaws)?;
        let Some(region) = region else { return Ok(Some(())) };
        let (scopes, _) = scopes(rest, &mut self.flaws)?;
        if scopes.is_empty() {
            push(&mut self.flaws, Flaw::ForNobody { offset })?;
        }
        for scope in scopes {
            push(&mut self.reserved, (segment, scope, region))?;
        }
        Ok(Some(()))
    }

    fn name(&mut self, structure: &Bytes<'_>) -> Result<Option<()>, AcpiError> {
        let read = || Some((structure.u8(7)?, structure.take(8, structure.len().checked_sub(8)?)?));
        let Some((number, bytes)) = read() else { return Ok(None) };
        match name(bytes)? {
            Some(name) => push(&mut self.names, (number, name))?,
            None => push(&mut self.flaws, Flaw::Name { offset: structure.at })?,
        }
        Ok(Some(()))
    }

    /// Merges structures that describe one unit.
    fn join(&mut self) -> Result<(), AcpiError> {
        let mut gone = Vec::new();
        self.units.iter().try_for_each(|_| push(&mut gone, false))?;
        for (first, second) in twins(&self.units, |unit| (unit.segment, unit.registers))? {
            let Some(unit) = self.units.get_mut(second) else { continue };
            let (offset, others, mut scopes) = (unit.offset, unit.others, core::mem::take(&mut unit.scopes));
            if let (Some(first), Some(gone)) = (self.units.get_mut(first), gone.get_mut(second)) {
                *gone = true;
                first.others |= others;
                first.scopes.try_reserve(scopes.len()).map_err(|_| AcpiError::OutOfMemory)?;
                first.scopes.append(&mut scopes);
                push(&mut self.flaws, Flaw::Twice { offset, first: first.offset })?;
            }
        }
        remove(&mut self.units, &gone);
        // One unit of a segment takes all other devices: the first in the table, as in Linux.
        let segment_of_others = |unit: &DmarUnit| unit.others.then_some(unit.segment);
        for (first, second) in twins(&self.units, segment_of_others)? {
            let first = self.units.get(first).map_or(0, |unit| unit.offset);
            if let Some(unit) = self.units.get_mut(second).filter(|unit| unit.others) {
                unit.others = false;
                push(&mut self.flaws, Flaw::Twice { offset: unit.offset, first })?;
            }
        }
        Ok(())
    }

    /// Refuses the unit that takes all other devices of a segment, unless the devices of each refused unit there are known.
    fn limit_others(&mut self) -> Result<(), AcpiError> {
        // A structure that is too short to have registers may not even name its segment.
        let is_any = self.refused.iter().any(|unit| unit.registers_len == 0);
        let mut unknown = Vec::new();
        for unit in self.refused.iter().filter(|unit| !unit.whole) {
            push(&mut unknown, unit.segment)?;
        }
        unknown.sort_unstable();
        for unit in self.units.iter_mut().filter(|unit| unit.others) {
            if is_any || unknown.binary_search(&unit.segment).is_ok() {
                unit.others = false;
                push(&mut self.flaws, Flaw::Others { offset: unit.offset, segment: unit.segment })?;
            }
        }
        Ok(())
    }

    fn check_names(&mut self) -> Result<(), AcpiError> {
        let mut named = [false; 256];
        self.names.iter().for_each(|(number, _)| named[usize::from(*number)] = true);
        let units = self.units.iter().chain(&self.refused).flat_map(|unit| &unit.scopes);
        for scope in units.chain(self.reserved.iter().map(|(_, scope, _)| scope)) {
            if let DmarScopeKind::Namespace(number) = scope.kind
                && !core::mem::replace(&mut named[usize::from(number)], true)
            {
                push(&mut self.flaws, Flaw::Nameless { number })?;
            }
        }
        Ok(())
    }
}

fn scopes(bytes: Bytes<'_>, flaws: &mut Vec<Flaw>) -> Result<(Vec<DmarScope>, bool), AcpiError> {
    let mut all = Vec::new();
    for scope in bytes.split(6, |at| at.u8(1).map(usize::from)) {
        let scope = match scope {
            Ok(scope) => scope,
            Err(flaw) => {
                push(flaws, flaw)?;
                return Ok((all, false));
            }
        };
        let (kind, number, bus) =
            (scope.u8(0).unwrap_or(0), scope.u8(4).unwrap_or(0), scope.u8(5).unwrap_or(0));
        let kind = match kind {
            ENDPOINT => DmarScopeKind::Endpoint,
            BRIDGE => DmarScopeKind::Bridge,
            NAMESPACE => DmarScopeKind::Namespace(number),
            kind if INTERRUPTS.contains(&kind) => continue,
            kind => {
                push(flaws, Flaw::Kind { offset: scope.at, kind: kind.into() })?;
                continue;
            }
        };
        let mut path = Vec::new();
        for step in scope.rest(6).into_iter().flat_map(|path| path.split(2, |_| Some(2))) {
            let step = step.ok().and_then(|step| Some((step.u8(0)?, step.u8(1)?)));
            // Pads an odd byte to a step that no device has.
            push(&mut path, step.unwrap_or((u8::MAX, u8::MAX)))?;
        }
        let can_be = !path.is_empty() && path.iter().all(|(device, function)| *device < 32 && *function < 8);
        if can_be {
            push(&mut all, DmarScope { kind, bus, path })?;
        } else {
            push(flaws, Flaw::Path { offset: scope.at })?;
        }
    }
    Ok((all, true))
}
