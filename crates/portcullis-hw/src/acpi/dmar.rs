//! VT-d's table.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, Rev. 4.1 (March 2023), chapter 8
//! "BIOS Considerations".

use alloc::vec::Vec;

use portcullis::addr::Permissions;

use super::{AcpiError, Bytes, Reserved, push, reserved};

/// Remapping structures (section 8.2).
const UNIT: u16 = 0;
const RESERVED: u16 = 1;

/// Kinds of scopes (section 8.3.1).
const ENDPOINT: u8 = 1;
const BRIDGE: u8 = 2;

/// What the table says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dmar {
    /// Bits of physical addresses that devices can be led to.
    pub address_bits: u32,
    /// The units.
    pub units: Vec<DmarUnit>,
    /// Memory that firmware reserves for devices, each with the segment and the device.
    pub reserved: Vec<(u16, DmarScope, Reserved)>,
}

/// A unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmarUnit {
    /// Where its registers begin in memory.
    pub registers: u64,
    /// The PCI segment of its devices.
    pub segment: u16,
    /// It is in front of all devices of its segment that no other unit names.
    pub others: bool,
    /// The devices that it is in front of.
    pub scopes: Vec<DmarScope>,
}

/// A device, or all that is behind a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmarScope {
    /// Whether the last step is a bridge.
    pub is_bridge: bool,
    /// The bus that the path begins on.
    pub bus: u8,
    /// Device and function of each bridge on the way, and of the device at its end. (A bridge leads to its secondary bus.)
    pub path: Vec<(u8, u8)>,
}

impl DmarScope {
    /// The number of the device at the path's end, by which the unit knows it: bus, device and function as 16 bits. `buses` says of a
    /// bridge, by its number, which buses are behind it (its registers Secondary and Subordinate Bus Number), or `None` where that is no
    /// bridge, or leads nowhere yet. `None` where `buses` has none for a bridge of the path.
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

    /// Whether `device` is the device at the path's end, or is behind that where it is a bridge. `buses` is as for
    /// [`device`](Self::device). A virtual function counts as its physical function does (VT-d, section 8.3.3): ask for that.
    pub fn covers(&self, device: u16, mut buses: impl FnMut(u16) -> Option<(u8, u8)>) -> bool {
        let Some(own) = self.device(&mut buses) else { return false };
        // A bridge that leads to no bus behind its own is not set up.
        let behind = |(first, last): (u8, u8)| {
            first > (own >> 8) as u8 && (first..=last).contains(&((device >> 8) as u8))
        };
        own == device || self.is_bridge && buses(own).is_some_and(behind)
    }
}

impl Dmar {
    /// Reads the table. Kinds of structures and scopes that only concern interrupts, or that it does not know, are left out.
    /// O(the table's length); allocates.
    ///
    /// # Errors
    /// [`AcpiError`].
    pub fn parse(table: &[u8]) -> Result<Self, AcpiError> {
        let table = Bytes::table(table, *b"DMAR")?;
        let mut dmar =
            Self { address_bits: u32::from(table.u8(36)?) + 1, units: Vec::new(), reserved: Vec::new() };
        table.rest(48)?.each(
            4,
            |at| Ok(usize::from(at.u16(2)?)),
            |structure| {
                match structure.u16(0)? {
                    UNIT => {
                        let scopes = scopes(structure.rest(16)?)?;
                        let others = structure.u8(4)? & 1 != 0;
                        let (segment, registers) = (structure.u16(6)?, structure.u64(8)?);
                        push(&mut dmar.units, DmarUnit { registers, segment, others, scopes })
                    }
                    RESERVED => {
                        let (segment, first, last) =
                            (structure.u16(6)?, structure.u64(8)?, structure.u64(16)?);
                        // A last byte before the first, and a region of everything, have no length.
                        let len = last.wrapping_sub(first).wrapping_add(1);
                        let len = if last < first { 0 } else { len };
                        let region = reserved(structure.at, first, len, Permissions::READ_WRITE)?;
                        for scope in scopes(structure.rest(24)?)? {
                            push(&mut dmar.reserved, (segment, scope, region))?;
                        }
                        Ok(())
                    }
                    _ => Ok(()),
                }
            },
        )?;
        Ok(dmar)
    }

    /// What firmware reserves for `device` (bus, device and function as 16 bits) of a PCI segment: what
    /// [`Reserved::map`] takes. `buses` says which buses are behind a bridge, as for [`DmarScope::device`]. O(the table's length).
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
}

fn scopes(bytes: Bytes<'_>) -> Result<Vec<DmarScope>, AcpiError> {
    let mut all = Vec::new();
    bytes.each(
        6,
        |at| Ok(usize::from(at.u8(1)?)),
        |scope| {
            let kind = scope.u8(0)?;
            if kind != ENDPOINT && kind != BRIDGE {
                return Ok(());
            }
            let mut path = Vec::new();
            scope.rest(6)?.each(2, |_| Ok(2), |step| push(&mut path, (step.u8(0)?, step.u8(1)?)))?;
            push(&mut all, DmarScope { is_bridge: kind == BRIDGE, bus: scope.u8(5)?, path })
        },
    )?;
    Ok(all)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::vec;

    use portcullis::addr::{Iova, IovaRange};

    use super::super::tests::{spoil, table};
    use super::*;

    /// A unit for one device behind a bridge, one for all others, and a reserved megabyte.
    fn example() -> Vec<u8> {
        let mut body = vec![38, 0];
        body.resize(12, 0);
        body.extend([0, 0, 26, 0, 0, 0, 0, 0]);
        body.extend(0xfed9_0000_u64.to_le_bytes());
        body.extend([1, 10, 0, 0, 0, 0, 0x1c, 1, 2, 0]);
        body.extend([0, 0, 16, 0, 1, 0, 0, 0]);
        body.extend(0xfed9_1000_u64.to_le_bytes());
        body.extend([1, 0, 32, 0, 0, 0, 0, 0]);
        body.extend(0x7b00_0000_u64.to_le_bytes());
        body.extend(0x7b0f_ffff_u64.to_le_bytes());
        body.extend([1, 8, 0, 0, 0, 0, 0x14, 0]);
        table(b"DMAR", &body)
    }

    #[test]
    fn units_scopes_and_reserved_memory() {
        let dmar = Dmar::parse(&example()).unwrap();
        assert_eq!((dmar.address_bits, dmar.units.len()), (39, 2));
        let [first, second] = dmar.units.as_slice() else { panic!("two units") };
        assert_eq!((first.registers, first.others, first.scopes.len()), (0xfed9_0000, false, 1));
        assert_eq!((second.registers, second.others, second.scopes.len()), (0xfed9_1000, true, 0));
        let scope = &first.scopes[0];
        // The bridge 00:1c.1 leads to bus 3.
        let buses = |bridge: u16| (bridge == 0x1c << 3 | 1).then_some((3, 4));
        assert_eq!(scope.device(buses), Some(3 << 8 | 2 << 3));
        assert_eq!(scope.device(|_| None), None);
        let (segment, scope, region) = &dmar.reserved[0];
        assert_eq!((*segment, scope.device(|_| None)), (0, Some(0x14 << 3)));
        assert_eq!(region.range, IovaRange::new(Iova::new(0x7b00_0000), 1 << 20).unwrap());
    }

    #[test]
    fn a_device_is_asked_for_by_its_number() {
        let dmar = Dmar::parse(&example()).unwrap();
        let of = |segment, device| dmar.reserved_for(segment, device, |_| None).count();
        assert_eq!((of(0, 0x14 << 3), of(0, 0x14 << 3 | 1), of(1, 0x14 << 3)), (1, 0, 0));
        // The bridge 00:1c.1 leads to the buses 3 and 4, and its scope to all that is behind it.
        let buses = |bridge: u16| (bridge == 0x1c << 3 | 1).then_some((3, 4));
        let scope = DmarScope { is_bridge: true, bus: 0, path: vec![(0x1c, 1)] };
        let covered = [0x1c << 3 | 1, 3 << 8, 4 << 8 | 0xff].map(|device| scope.covers(device, buses));
        assert_eq!(covered, [true; 3]);
        let beside = [0x1c << 3, 2 << 8, 5 << 8].map(|device| scope.covers(device, buses));
        assert_eq!(beside, [false; 3]);
        // One that is not set up says that bus 0 is behind it.
        assert!(!scope.covers(0, |_| Some((0, 0))));
        assert!(!DmarScope { is_bridge: false, ..scope }.covers(3 << 8, buses));
    }

    #[test]
    fn whatever_firmware_writes_is_read_inside_its_bytes() {
        spoil(&example(), Dmar::parse);
        let mut backwards = example();
        // The reserved region ends before it begins.
        let at = backwards.len() - 17;
        backwards[at] = 0;
        super::super::tests::seal(&mut backwards);
        let _ = Dmar::parse(&backwards);
    }
}
