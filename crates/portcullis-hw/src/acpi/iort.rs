//! Arm's table.
//!
//! Source: I/O Remapping Table, Platform Design Document, DEN 0049, issue E.f, chapter 3 "I/O topology description".

use alloc::vec::Vec;

use portcullis::addr::Permissions;

use super::{AcpiError, Bytes, HEADER, Reserved, push, reserved};

/// Kinds of nodes.
const ROOT_COMPLEX: u8 = 2;
const SMMU_V3: u8 = 4;
const RESERVED: u8 = 6;

/// Bytes of a node before what is particular to its kind.
const NODE: usize = 16;
/// Bytes of an ID mapping, and its flag for a single number.
const MAPPING: usize = 20;
const SINGLE: u32 = 1;

/// What the table says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Iort {
    /// The SMMUv3 units.
    pub units: Vec<IortUnit>,
    /// Runs of devices of PCI segments, with the unit that each goes through.
    streams: Vec<Streams>,
    /// Memory that firmware reserves for streams of a unit, each with the first and the last of them.
    pub reserved: Vec<(IortUnit, (u32, u32), Reserved)>,
}

/// An SMMUv3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IortUnit {
    /// Where its registers begin in memory.
    pub registers: u64,
    /// Its accesses to memory are coherent, whatever its registers say.
    pub coherent: bool,
    /// Where its node is in the table.
    node: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Streams {
    segment: u32,
    run: Run,
    node: usize,
}

/// Numbers from `first` on, `last - first + 1` of them, which are numbers from `output` on to the node they lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    first: u32,
    last: u32,
    output: u32,
}

impl Iort {
    /// Reads the table. Nodes that only concern interrupts, or that it does not know, are left out. O(the table's length, times the
    /// logarithm of its units); allocates.
    ///
    /// # Errors
    /// [`AcpiError`].
    pub fn parse(table: &[u8]) -> Result<Self, AcpiError> {
        let table = Bytes::table(table, *b"IORT")?;
        let (count, first) = (table.u32(HEADER)?, table.u32(HEADER + 4)? as usize);
        let mut iort = Self { units: Vec::new(), streams: Vec::new(), reserved: Vec::new() };
        let mut nodes = Vec::new();
        let mut at = first;
        for _ in 0..count {
            let len = usize::from(table.u16(at.saturating_add(1))?);
            if len < NODE {
                return Err(AcpiError::Length { offset: at, len });
            }
            push(&mut nodes, table.part(at, len)?)?;
            at = at.saturating_add(len);
        }
        for node in &nodes {
            if node.u8(0)? == SMMU_V3 {
                let registers = node.u64(NODE)?;
                let coherent = node.u32(NODE + 8)? & 1 != 0;
                push(&mut iort.units, IortUnit { registers, coherent, node: node.at })?;
            }
        }
        for node in &nodes {
            match node.u8(0)? {
                ROOT_COMPLEX => {
                    let segment = node.u32(NODE + 12)?;
                    each_mapping(node, |run, node| push(&mut iort.streams, Streams { segment, run, node }))?;
                }
                RESERVED => iort.reserve(node, table.bytes.len())?,
                _ => {}
            }
        }
        Ok(iort)
    }

    /// Regions and runs may be the same bytes of the node, so that without the limit, `most`, a table of 64 KiB could name ten millions.
    fn reserve(&mut self, node: &Bytes<'_>, most: usize) -> Result<(), AcpiError> {
        let (count, at) = (node.u32(NODE + 4)?, node.u32(NODE + 8)? as usize);
        for index in 0..count as usize {
            let at = index.checked_mul(20).and_then(|bytes| at.checked_add(bytes)).unwrap_or(usize::MAX);
            let region =
                reserved(node.at, node.u64(at)?, node.u64(at.saturating_add(8))?, Permissions::READ_WRITE)?;
            let Self { units, reserved: all, .. } = self;
            each_mapping(node, |run, target| {
                let Some(unit) = unit_at(units, target) else { return Ok(()) };
                let streams = (run.output, run.output.saturating_add(run.last - run.first));
                if all.len() >= most {
                    return Err(AcpiError::TooMany { len: most });
                }
                push(all, (*unit, streams, region))
            })?;
        }
        Ok(())
    }

    /// The unit that the device `device` of a PCI segment (bus, device and function as 16 bits) goes through, and the number of its
    /// stream there.
    pub fn stream(&self, segment: u32, device: u16) -> Option<(IortUnit, u32)> {
        let device = u32::from(device);
        let of = |streams: &&Streams| {
            streams.segment == segment && (streams.run.first..=streams.run.last).contains(&device)
        };
        let streams = self.streams.iter().filter(of);
        let mut led = streams.filter_map(|streams| {
            let unit = unit_at(&self.units, streams.node)?;
            Some((*unit, streams.run.output.checked_add(device - streams.run.first)?))
        });
        led.next()
    }

    /// What firmware reserves for a stream of a unit: what [`Reserved::map`] takes. O(the table's length).
    pub fn reserved_for(&self, unit: &IortUnit, stream: u32) -> impl Iterator<Item = Reserved> {
        let unit = *unit;
        let covers = move |(of, (first, last), _): &&(IortUnit, (u32, u32), Reserved)| {
            *of == unit && (*first..=*last).contains(&stream)
        };
        self.reserved.iter().filter(covers).map(|(.., region)| *region)
    }
}

/// The unit whose node is there: they are in the order of the table.
fn unit_at(units: &[IortUnit], node: usize) -> Option<&IortUnit> {
    units.binary_search_by_key(&node, |unit| unit.node).ok().and_then(|index| units.get(index))
}

/// The ID mappings of a node: each run, and where the node is that it leads to.
fn each_mapping(
    node: &Bytes<'_>,
    mut f: impl FnMut(Run, usize) -> Result<(), AcpiError>,
) -> Result<(), AcpiError> {
    let (count, first) = (node.u32(8)? as usize, node.u32(12)? as usize);
    let bytes = count.saturating_mul(MAPPING);
    let mappings = if count == 0 { return Ok(()) } else { node.part(first, bytes)? };
    mappings.each(
        MAPPING,
        |_| Ok(MAPPING),
        |mapping| {
            let (first, more, output) = (mapping.u32(0)?, mapping.u32(4)?, mapping.u32(8)?);
            let more = if mapping.u32(16)? & SINGLE != 0 { 0 } else { more };
            f(Run { first, last: first.saturating_add(more), output }, mapping.u32(12)? as usize)
        },
    )
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::vec;

    use super::super::tests::{spoil, table};
    use super::*;

    /// An SMMU, a root complex whose devices 0x100 to 0x1ff go through it as streams from 0x1100 on, and a reserved page of stream 3.
    fn example() -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(3_u32.to_le_bytes());
        body.extend(48_u32.to_le_bytes());
        body.extend([0; 4]);
        let node = |kind: u8, len: u16, mappings: u32, data: &[u8]| {
            let mut node = vec![kind];
            node.extend(len.to_le_bytes());
            node.extend([0; 5]);
            node.extend(mappings.to_le_bytes());
            node.extend((16 + data.len() as u32).to_le_bytes());
            node.extend(data);
            node
        };
        let mapping = |first: u32, more: u32, output: u32, flags: u32| {
            [first, more, output, 48, flags].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()
        };
        let mut smmu = Vec::new();
        smmu.extend(0x0905_0000_u64.to_le_bytes());
        smmu.extend(1_u32.to_le_bytes());
        smmu.resize(52, 0);
        body.extend(node(SMMU_V3, 68, 0, &smmu));
        let mut root = vec![0; 16];
        root[12] = 2;
        body.extend(node(ROOT_COMPLEX, 52, 1, &root));
        body.extend(mapping(0x100, 0xff, 0x1100, 0));
        let mut memory = Vec::new();
        memory.extend(0_u32.to_le_bytes());
        memory.extend(1_u32.to_le_bytes());
        memory.extend(28_u32.to_le_bytes());
        memory.extend(0x8000_0000_u64.to_le_bytes());
        memory.extend(0x1000_u64.to_le_bytes());
        memory.extend([0; 4]);
        body.extend(node(RESERVED, 68, 1, &memory));
        body.extend(mapping(0, 7, 3, SINGLE));
        table(b"IORT", &body)
    }

    #[test]
    fn units_streams_and_reserved_memory() {
        let iort = Iort::parse(&example()).unwrap();
        let [unit] = iort.units.as_slice() else { panic!("one unit") };
        assert_eq!((unit.registers, unit.coherent), (0x0905_0000, true));
        assert_eq!(iort.stream(2, 0x128), Some((*unit, 0x1128)));
        assert_eq!((iort.stream(0, 0x128), iort.stream(2, 0x228)), (None, None));
        let [(of, streams, region)] = iort.reserved.as_slice() else { panic!("one region") };
        assert_eq!((of, *streams, region.range.start().get()), (unit, (3, 3), 0x8000_0000));
    }

    #[test]
    fn a_table_that_names_more_regions_than_it_has_bytes_is_refused() {
        for (count, most) in [(25_u32, true), (50, false)] {
            let mut body: Vec<u8> = [2_u32, 48, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
            body.extend([SMMU_V3, 68, 0, 0, 0, 0, 0, 0]);
            body.resize(12 + 68, 0);
            // The same bytes are regions and runs: one of 4 KiB and more each.
            let len = 28 + count as u16 * 20;
            body.push(RESERVED);
            body.extend(len.to_le_bytes());
            body.extend([0; 5]);
            body.extend([count, 28, 0, count, 28].iter().flat_map(|word| word.to_le_bytes()));
            for _ in 0..count {
                body.extend([0x1000_u32, 0, 0x1000, 48, 0].iter().flat_map(|word| word.to_le_bytes()));
            }
            let made = table(b"IORT", &body);
            let parsed = Iort::parse(&made).map(|iort| iort.reserved.len());
            let refused = AcpiError::TooMany { len: made.len() };
            assert_eq!(parsed, if most { Ok((count * count) as usize) } else { Err(refused) });
        }
    }

    #[test]
    fn whatever_firmware_writes_is_read_inside_its_bytes() {
        spoil(&example(), Iort::parse);
    }
}
