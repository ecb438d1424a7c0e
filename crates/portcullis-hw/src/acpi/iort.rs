//! Arm's table.
//!
//! Source: I/O Remapping Table, Platform Design Document, DEN 0049, issue E.f, chapter 3 "I/O topology description".

use alloc::string::String;
use alloc::vec::Vec;

use portcullis::addr::{Iova, IovaRange, Permissions};

use super::bytes::{Bytes, HEADER, can_be_registers, name, push, region, twins};
use super::{AcpiError, Flaw, Reserved};

/// Node types: ITS groups, named components, root complexes, SMMUs of versions 1 and 2, SMMUv3, performance counters, reserved memory.
const INTERRUPTS: u8 = 0;
const COMPONENT: u8 = 1;
const ROOT_COMPLEX: u8 = 2;
const SMMU: u8 = 3;
const SMMU_V3: u8 = 4;
const RESERVED: u8 = 6;

/// Bytes of a node before its type-specific part.
const NODE: usize = 16;
/// Bytes of an ID mapping and of a reserved region, and the single-mapping flag.
const MAPPING: usize = 20;
const SINGLE: u32 = 1;

/// Size of an SMMUv3's registers (two pages of 64 KiB), and the granularity of reserved regions.
const REGISTERS: u64 = 128 << 10;
const GRANULE: u64 = 64 << 10;

/// The model with one page of registers.
const CN99XX: u32 = 2;

/// The parsed table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Iort {
    /// The SMMUv3 units. [`stream`](Self::stream) finds a device's.
    pub units: Vec<IortUnit>,
    /// Register addresses of units that cannot be used, each with its reason among the [flaws](Self::flaws). No unit translates for their
    /// devices.
    pub refused: Vec<u64>,
    /// How many SMMUs of versions 1 and 2 the table names, which this crate does not drive.
    pub smmus: usize,
    /// PCI root complexes.
    pub roots: Vec<IortRoot>,
    /// Named components: devices of the ACPI namespace.
    pub components: Vec<IortComponent>,
    /// Memory that firmware reserves for streams.
    pub reserved: Vec<IortReserved>,
    /// What is wrong with the table, one sentence each for the log.
    pub flaws: Vec<Flaw>,
}

/// An SMMUv3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IortUnit {
    /// Physical address of its registers.
    pub registers: u64,
    /// Its memory accesses are coherent, whatever its registers say.
    pub coherent: bool,
    /// Its maker's model, whose mistakes a driver may have to avoid: 0 for none in particular, 1 for HiSilicon's Hi161x. Of 2, Cavium's CN99xx,
    /// no unit is made ([`Flaw::OnePage`]).
    pub model: u32,
}

/// A root complex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IortRoot {
    /// The PCI segment of its devices.
    pub segment: u32,
    /// Address width of its devices: they can use no IOVA beyond it. `None` if firmware does not say.
    pub address_bits: Option<u32>,
    /// ID ranges of its devices.
    runs: Vec<Run>,
}

/// A device of the ACPI namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IortComponent {
    /// Its name there.
    pub name: String,
    /// Its address width, as for a [root complex](IortRoot::address_bits).
    pub address_bits: Option<u32>,
    /// Units, each with the device's first and last stream ID there.
    pub streams: Vec<(IortUnit, (u32, u32))>,
}

/// Regions that are reserved for some streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IortReserved {
    /// Units, each with the first and the last stream ID.
    pub streams: Vec<(IortUnit, (u32, u32))>,
    /// The regions.
    pub regions: Vec<Reserved>,
}

/// An ID mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    /// The first and the last input ID, and the output ID of the first.
    first: u32,
    last: u32,
    output: u32,
    /// Every input ID has the same output ID.
    is_single: bool,
    /// `None` if it leads to no unit, or to one that cannot be used.
    unit: Option<IortUnit>,
    offset: usize,
}

/// Units, each with the first and the last stream ID there.
type Streams = Vec<(IortUnit, (u32, u32))>;

/// The nodes of a table, in order.
struct Nodes<'a> {
    nodes: Vec<Bytes<'a>>,
    /// Usable SMMUv3s, by the offset of their nodes.
    units: Vec<(usize, IortUnit)>,
}

impl Iort {
    /// Parses the table, except nodes that concern only interrupts. Reports what is wrong as [flaws](Self::flaws), and uses the rest. Time
    /// O(n log n) and memory O(n) in the length of the table; allocates.
    ///
    /// # Errors
    /// [`AcpiError`].
    pub fn parse(table: &[u8]) -> Result<Self, AcpiError> {
        let (table, flaws) = Bytes::table(table, *b"IORT", HEADER + 12)?;
        let mut iort = Self {
            units: Vec::new(),
            refused: Vec::new(),
            smmus: 0,
            roots: Vec::new(),
            components: Vec::new(),
            reserved: Vec::new(),
            flaws,
        };
        let nodes = iort.nodes(&table)?;
        for node in &nodes.nodes {
            let done = match node.u8(0).unwrap_or(0) {
                ROOT_COMPLEX => iort.root(node, &nodes)?,
                COMPONENT => iort.component(node, &nodes)?,
                RESERVED => iort.memory(node, &nodes)?,
                kind if kind > RESERVED => {
                    Some(push(&mut iort.flaws, Flaw::Kind { offset: node.at, kind: kind.into() })?)
                }
                _ => Some(()),
            };
            if done.is_none() {
                push(&mut iort.flaws, node.short())?;
            }
        }
        iort.overlaps()?;
        Ok(iort)
    }

    /// The unit that translates for `device` (bus, device and function as 16 bits) of a PCI segment, and its stream ID there. `None` if
    /// there is none that can be used: **the device's DMA is then not translated.** O(the table's length).
    ///
    /// If ID ranges overlap, firmware wrote the count instead of the count minus one: a range that begins with the device wins over one
    /// that ends with it. Otherwise the first in the table wins. (Linux decides so.)
    pub fn stream(&self, segment: u32, device: u16) -> Option<(IortUnit, u32)> {
        let device = u32::from(device);
        let runs = self.roots.iter().filter(|root| root.segment == segment).flat_map(|root| &root.runs);
        let mut ends = None;
        for run in runs {
            let is_in = run.is_single || (run.first..=run.last).contains(&device);
            let is_end = !run.is_single && run.first < run.last && device == run.last;
            match ends {
                _ if !is_in => {}
                None if is_end => ends = Some(run),
                Some(_) if !run.is_single && device != run.first => {}
                _ => return run.led(device),
            }
        }
        ends?.led(device)
    }

    /// What firmware reserves for a stream of a unit, for [`Reserved::map`]. O(the table's length).
    pub fn reserved_for(&self, unit: &IortUnit, stream: u32) -> impl Iterator<Item = Reserved> {
        let unit = *unit;
        let covers = move |reserved: &&IortReserved| {
            reserved
                .streams
                .iter()
                .any(|(of, (first, last))| *of == unit && (*first..=*last).contains(&stream))
        };
        self.reserved.iter().filter(covers).flat_map(|reserved| &reserved.regions).copied()
    }

    fn nodes<'a>(&mut self, table: &Bytes<'a>) -> Result<Nodes<'a>, AcpiError> {
        let count = table.u32(HEADER).unwrap_or(0) as usize;
        let first = table.u32(HEADER + 4).unwrap_or(0) as usize;
        let mut all = Nodes { nodes: Vec::new(), units: Vec::new() };
        // Nodes do not begin inside the header.
        let nodes = table.rest(first).filter(|_| first >= HEADER + 12);
        let walk = nodes.into_iter().flat_map(|nodes| nodes.split(NODE, |at| at.u16(1).map(usize::from)));
        for node in walk.take(count) {
            match node {
                Ok(node) => push(&mut all.nodes, node)?,
                Err(flaw) => push(&mut self.flaws, flaw)?,
            }
        }
        if all.nodes.len() < count {
            let held = all.nodes.len();
            push(&mut self.flaws, Flaw::Nodes { count, held })?;
        }
        self.smmus = all.nodes.iter().filter(|node| node.u8(0) == Some(SMMU)).count();
        for node in &all.nodes {
            if node.u8(0) != Some(SMMU_V3) {
                continue;
            }
            let (Some(registers), Some(flags)) = (node.u64(NODE), node.u32(NODE + 8)) else {
                push(&mut self.flaws, node.short())?;
                continue;
            };
            if !can_be_registers(registers, REGISTERS) {
                push(&mut self.flaws, Flaw::Registers { offset: node.at, registers })?;
                push(&mut self.refused, registers)?;
                continue;
            }
            // Nodes too short for it are of no model.
            let model = node.u32(NODE + 24).unwrap_or(0);
            if model == CN99XX {
                push(&mut self.flaws, Flaw::OnePage { offset: node.at, registers })?;
                push(&mut self.refused, registers)?;
                continue;
            }
            push(&mut all.units, (node.at, IortUnit { registers, coherent: flags & 1 != 0, model }))?;
        }
        // Two nodes for one unit become one, which is coherent if both say so.
        let twins = twins(&all.units, |(_, unit)| unit.registers)?;
        for (first, second) in &twins {
            let Ok([first, second]) = all.units.get_disjoint_mut([*first, *second]) else { continue };
            push(&mut self.flaws, Flaw::Twice { offset: second.0, first: first.0 })?;
            first.1.coherent &= second.1.coherent;
        }
        for (first, second) in &twins {
            let Ok([first, second]) = all.units.get_disjoint_mut([*first, *second]) else { continue };
            second.1 = first.1;
        }
        let mut twins = twins.iter().map(|(_, second)| *second).peekable();
        for (place, (_, unit)) in all.units.iter().enumerate() {
            if twins.next_if_eq(&place).is_none() {
                push(&mut self.units, *unit)?;
            }
        }
        Ok(all)
    }

    fn root(&mut self, node: &Bytes<'_>, nodes: &Nodes<'_>) -> Result<Option<()>, AcpiError> {
        let Some(segment) = node.u32(NODE + 12) else { return Ok(None) };
        // Revision 0 does not have this byte, or reserves it.
        let address_bits = node.u8(NODE + 16).filter(|_| node.u8(3) > Some(0)).and_then(stated);
        let runs = mappings(node, nodes, &mut self.flaws)?;
        push(&mut self.roots, IortRoot { segment, address_bits, runs })?;
        Ok(Some(()))
    }

    fn component(&mut self, node: &Bytes<'_>, nodes: &Nodes<'_>) -> Result<Option<()>, AcpiError> {
        let (Some(limit), Some(rest)) = (node.u8(NODE + 12), node.rest(NODE + 13)) else { return Ok(None) };
        let Some(name) = name(rest.take(0, rest.len()).unwrap_or_default())? else {
            return Ok(Some(push(&mut self.flaws, Flaw::Name { offset: node.at })?));
        };
        let streams = streams(node, nodes, &mut self.flaws)?;
        push(&mut self.components, IortComponent { name, address_bits: stated(limit), streams })?;
        Ok(Some(()))
    }

    fn memory(&mut self, node: &Bytes<'_>, nodes: &Nodes<'_>) -> Result<Option<()>, AcpiError> {
        let (Some(count), Some(at)) = (node.u32(NODE + 4), node.u32(NODE + 8)) else { return Ok(None) };
        let mut reserved =
            IortReserved { streams: streams(node, nodes, &mut self.flaws)?, regions: Vec::new() };
        for described in held(node, count, at, &mut self.flaws)? {
            let (start, len) = (described.u64(0).unwrap_or(0), described.u64(8).unwrap_or(0));
            let range = IovaRange::new(Iova::new(start), len);
            let region = region(described.at, range, Permissions::READ_WRITE, GRANULE, &mut self.flaws)?;
            region.into_iter().try_for_each(|region| push(&mut reserved.regions, region))?;
        }
        if reserved.streams.is_empty() {
            push(&mut self.flaws, Flaw::ForNobody { offset: node.at })?;
        } else if !reserved.regions.is_empty() {
            push(&mut self.reserved, reserved)?;
        }
        Ok(Some(()))
    }
}

impl Iort {
    /// Reports devices of a segment that two ranges have.
    fn overlaps(&mut self) -> Result<(), AcpiError> {
        let mut sorted = Vec::new();
        for (segment, run) in
            self.roots.iter().flat_map(|root| root.runs.iter().map(|run| (root.segment, *run)))
        {
            let all = Run { first: 0, last: u32::MAX, ..run };
            push(&mut sorted, (segment, if run.is_single { all } else { run }))?;
        }
        sorted.sort_unstable_by_key(|(segment, run)| (*segment, run.first, run.offset));
        let mut furthest: Option<(u32, Run)> = None;
        for (segment, run) in sorted {
            let before = furthest.filter(|(of, _)| *of == segment).map(|(_, run)| run);
            if let Some(before) = before.filter(|before| before.last >= run.first) {
                let overlap = Flaw::Overlap { first: before.offset, second: run.offset, id: run.first };
                push(&mut self.flaws, overlap)?;
            }
            furthest = Some((segment, before.filter(|before| before.last >= run.last).unwrap_or(run)));
        }
        Ok(())
    }
}

impl Run {
    fn led(&self, device: u32) -> Option<(IortUnit, u32)> {
        let further = if self.is_single { 0 } else { device.checked_sub(self.first)? };
        Some((self.unit?, self.output.checked_add(further)?))
    }
}

fn stated(bits: u8) -> Option<u32> {
    Some(u32::from(bits)).filter(|bits| (1..=64).contains(bits))
}

/// Translates all IDs of a node that has no ID of its own into stream IDs.
fn streams(node: &Bytes<'_>, nodes: &Nodes<'_>, flaws: &mut Vec<Flaw>) -> Result<Streams, AcpiError> {
    let mut streams = Vec::new();
    for run in mappings(node, nodes, flaws)? {
        if let Some(unit) = run.unit {
            let last = run.output.saturating_add(run.last - run.first);
            push(&mut streams, (unit, (run.output, last)))?;
        }
    }
    Ok(streams)
}

fn mappings(node: &Bytes<'_>, nodes: &Nodes<'_>, flaws: &mut Vec<Flaw>) -> Result<Vec<Run>, AcpiError> {
    let mut runs = Vec::new();
    for mapping in held(node, node.u32(8).unwrap_or(0), node.u32(12).unwrap_or(0), flaws)? {
        let word = |at: usize| mapping.u32(at).unwrap_or(0);
        let (first, more, output, to) = (word(0), word(4), word(8), word(12) as usize);
        let is_single = word(16) & SINGLE != 0;
        let found = nodes.nodes.binary_search_by_key(&to, |node| node.at);
        let kind = found.ok().and_then(|index| nodes.nodes.get(index)?.u8(0));
        if !matches!(kind, Some(INTERRUPTS | SMMU | SMMU_V3)) {
            push(flaws, Flaw::Reference { offset: mapping.at, to })?;
        }
        let unit = nodes.units.binary_search_by_key(&to, |(at, _)| *at).ok();
        let unit = unit.and_then(|index| nodes.units.get(index)).map(|(_, unit)| *unit);
        let last = if is_single { first } else { first.saturating_add(more) };
        push(&mut runs, Run { first, last, output, is_single, unit, offset: mapping.at })?;
    }
    Ok(runs)
}

/// The `count` mappings or regions of a node from `at` on, as far as they are inside it.
fn held<'a>(
    node: &Bytes<'a>,
    count: u32,
    at: u32,
    flaws: &mut Vec<Flaw>,
) -> Result<impl Iterator<Item = Bytes<'a>> + use<'a>, AcpiError> {
    let (count, at) = (count as usize, at as usize);
    let room = node.rest(at).filter(|_| at >= NODE).map_or(0, |rest| rest.len() / MAPPING);
    let held = count.min(room);
    if held < count {
        push(flaws, Flaw::Mappings { offset: node.at, count, held })?;
    }
    let all = node.part(at, held * MAPPING);
    Ok(all.into_iter().flat_map(|all| all.split(MAPPING, |_| Some(MAPPING))).flatten())
}
