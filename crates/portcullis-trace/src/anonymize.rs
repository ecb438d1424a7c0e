//! Recordings without private data, which replay to the same figures.
//!
//! Every event is rewritten from the fields that a replay needs. Kept: the kind of each event that maps, unmaps or syncs, its CPU,
//! direction and sizes, the time between events, and the number of lost events. Removed: task names, process numbers and flags. Devices
//! become `device1`, `device2` in order of appearance; the first event is within a millisecond of time 0; other events keep only their time
//! and place; lines that are not events are left out.
//!
//! Physical and device addresses are replaced by one rule. Memory is cut into stretches without a gap, of whole blocks of 64 KiB. A stretch
//! moves down as a whole, next to the one below it, with a block between. This keeps which buffers share a page of any size up to 64 KiB,
//! their offsets in it, what is contiguous, which large pages fit (a stretch keeps its place within the largest power of two that it holds,
//! up to 1 GiB), and the order of memory. The sizes of gaps, and the places in the machine's memory, are lost.
//!
//! # Cost
//! Two passes over the recording, and memory for each stretch of its addresses.

use std::collections::BTreeMap;
use std::io::{self, Write};

use rustc_hash::FxHashMap;

use crate::error::TraceError;
use crate::event::{Direction, Event, EventKind, Region, SyncFor};
use crate::input::Input;
use crate::reader::EventReader;
use crate::stretches::Stretches;

/// A block is 2^this bytes: the largest base page of any format.
const BLOCK_BITS: u32 = 16;

/// The largest pages of tables are 2^this blocks: 1 GiB.
const LARGEST_BITS: u32 = 14;

/// Times move by a multiple of this: the domains in a replay read a clock in steps of a power of two.
const TICK_NS: u64 = 1 << 20;

/// Physical addresses end here.
const MAX_PHYS: u64 = 1 << 52;

/// Why a recording could not be rewritten.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnonymizeError {
    /// It could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The result could not be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// Counts of what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anonymized {
    /// Events, as many as were read.
    pub events: u64,
    /// Devices.
    pub devices: u64,
    /// Lines left out, because they are not events.
    pub left_out: u64,
}

/// Writes the recording that `open` opens, twice, to `out`, without private data.
///
/// # Errors
/// [`AnonymizeError`] if the recording cannot be read to its end, or the result cannot be written.
pub fn anonymize<'a>(
    mut open: impl FnMut() -> Result<Input<'a>, TraceError>,
    out: &mut dyn Write,
) -> Result<Anonymized, AnonymizeError> {
    // Stretches of blocks.
    let mut stretches = Stretches::default();
    let mut first_ns = None;
    let mut reader = EventReader::new(open()?, false);
    while reader.read_event(|event, _| {
        first_ns = Some(first_ns.unwrap_or(event.time_ns).min(event.time_ns));
        addresses(&event.kind, |first, last| stretches.add(first >> BLOCK_BITS, last >> BLOCK_BITS));
    })? {}
    let (promised, measured) = (reader.summary().promised_entries, reader.summary().measured);
    let mut writer = Writer {
        moved: moved(&stretches),
        first_ns: first_ns.unwrap_or(0) / TICK_NS * TICK_NS,
        devices: FxHashMap::default(),
        lost: 0,
    };
    writeln!(out, "# tracer: nop\n#\n# Written by portcullis anonymize")?;
    if let Some(measured) = measured {
        writeln!(out, "{measured}")?;
    }
    if let Some(promised) = promised {
        writeln!(out, "# entries-in-buffer/entries-written: {promised}/{promised}")?;
    }
    let mut reader = EventReader::new(open()?, false);
    let mut written = Ok(());
    while reader.read_event(|event, summary| {
        if written.is_ok() {
            written = writer.catch_up(summary.lost_events, out);
        }
        if written.is_ok() {
            written = writer.event(event, out);
        }
    })? {
        std::mem::replace(&mut written, Ok(()))?;
    }
    let summary = reader.summary();
    writer.catch_up(summary.lost_events, out)?;
    out.flush()?;
    Ok(Anonymized {
        events: summary.events,
        devices: writer.devices.len() as u64,
        left_out: summary.unrecognised_lines,
    })
}

/// Calls `see` with the first and the last address of each range of `kind`; `false` if a range is impossible, so that a reader skips the
/// event.
fn addresses(kind: &EventKind<'_>, mut see: impl FnMut(u64, u64)) -> bool {
    let mut all = true;
    let mut within = |start: u64, len: u64, most: u64| match start.checked_add(len.max(1) - 1) {
        Some(last) if last <= most => see(start, last),
        _ => all = false,
    };
    let (any, phys_most) = (u64::MAX, MAX_PHYS - 1);
    match kind {
        EventKind::Map { region, phys, .. } => {
            within(region.dma_addr, region.size, any);
            within(*phys, region.size, phys_most);
        }
        EventKind::Unmap { region } | EventKind::Free { region } | EventKind::Sync { region, .. } => {
            within(region.dma_addr, region.size, any);
        }
        EventKind::MapSg(sg) => {
            spans(sg.dma_addrs, sg.sizes, &mut within);
            entries(sg.phys_addrs, sg.sizes, &mut within);
        }
        EventKind::UnmapSg { phys_addrs, .. } => {
            phys_addrs.iter().for_each(|&phys| within(phys, 1, phys_most));
        }
        EventKind::Alloc { region, phys_addrs, .. } => {
            within(region.dma_addr, region.size, any);
            entries(phys_addrs, &[region.size], &mut within);
        }
        EventKind::SyncSg { dma_addrs, sizes, .. } => spans(dma_addrs, sizes, &mut within),
        EventKind::IommuMap { iova, phys, size, .. } => {
            within(*iova, *size, any);
            within(*phys, *size, phys_most);
        }
        EventKind::IommuUnmap { iova, size, unmapped, .. } => within(*iova, *size.max(unmapped), any),
        EventKind::Failed
        | EventKind::Attach { .. }
        | EventKind::NotMapping
        | EventKind::Other
        | EventKind::Unreadable => {}
    }
    all
}

fn spans(addrs: &[u64], sizes: &[u64], within: &mut impl FnMut(u64, u64, u64)) {
    addrs.iter().zip(sizes).for_each(|(&addr, &size)| within(addr, size, u64::MAX));
}

/// The entries of a list: with the given sizes, or else of unknown lengths. Then they end with their page, except the last, which may have
/// all the rest.
fn entries(phys_addrs: &[u64], sizes: &[u64], within: &mut impl FnMut(u64, u64, u64)) {
    const PAGE: u64 = 4096;
    let told = phys_addrs.len() == sizes.len();
    let total = sizes.iter().fold(0u64, |sum, &size| sum.saturating_add(size));
    for (at, &phys) in phys_addrs.iter().enumerate() {
        let len = match sizes.get(at) {
            Some(&size) if told => size,
            _ if at + 1 == phys_addrs.len() => total.min(MAX_PHYS.saturating_sub(phys)),
            _ => PAGE - phys % PAGE,
        };
        within(phys, len, MAX_PHYS - 1);
    }
}

/// The new place of each stretch of blocks, by its first: never higher, so no address exceeds its limit.
fn moved(stretches: &Stretches) -> BTreeMap<u64, u64> {
    const PHYS_BLOCKS: u64 = MAX_PHYS >> BLOCK_BITS;
    let mut free = 0;
    let place = |(first, last): (u64, u64)| {
        if first >= PHYS_BLOCKS {
            // Only device addresses lie above, and physical ones stay below.
            free = free.max(PHYS_BLOCKS);
        }
        let to = if first < PHYS_BLOCKS && last >= PHYS_BLOCKS {
            first
        } else {
            let align = 1 << (last - first + 1).ilog2().min(LARGEST_BITS);
            free + (first.wrapping_sub(free)) % align
        };
        free = to + (last - first) + 2;
        (first, to)
    };
    stretches.iter().map(place).collect()
}

/// Writes each event from the fields that a replay needs.
struct Writer {
    /// The first block of each stretch, and its new place.
    moved: BTreeMap<u64, u64>,
    first_ns: u64,
    devices: FxHashMap<Box<[u8]>, usize>,
    lost: u64,
}

impl Writer {
    /// Writes a loss of events up to a total of `lost`.
    fn catch_up(&mut self, lost: u64, out: &mut dyn Write) -> io::Result<()> {
        if lost > self.lost {
            writeln!(out, "[LOST {} EVENTS]", lost - self.lost)?;
            self.lost = lost;
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>, out: &mut dyn Write) -> io::Result<()> {
        let (cpu, ns) = (event.cpu, event.time_ns - self.first_ns);
        write!(out, "t-0 [{cpu:03}] {}.{:09}: ", ns / 1_000_000_000, ns % 1_000_000_000)?;
        if let EventKind::Map { region, phys, .. } = &event.kind
            && region.is_error(*phys)
        {
            return writeln!(out, "dma_other_err:");
        }
        if !addresses(&event.kind, |_, _| ()) {
            return writeln!(out, "other:");
        }
        match &event.kind {
            EventKind::Map { region, phys, resource } => {
                let name = if *resource { "dma_map_resource" } else { "dma_map_phys" };
                self.region(name, region, out)?;
                write!(out, " phys_addr={:x}", self.address(*phys))?;
                attributes(region.attrs, out)
            }
            EventKind::Unmap { region } => {
                self.region("dma_unmap_phys", region, out)?;
                attributes(region.attrs, out)
            }
            EventKind::Free { region } => {
                self.region("dma_free", region, out)?;
                writeln!(out)
            }
            EventKind::Sync { region, target } => {
                self.region(&format!("dma_sync_single_for_{}", whom(*target)), region, out)?;
                writeln!(out)
            }
            EventKind::MapSg(sg) => {
                self.head("dma_map_sg", sg.device, sg.dir, out)?;
                write!(out, " nents={}/{} ents={}/{}", sg.nents, sg.full_nents, sg.ents, sg.full_ents)?;
                out.write_all(if sg.truncated { b" [TRUNCATED]" } else { b"" })?;
                self.spans(sg.dma_addrs, sg.sizes, out)?;
                self.entries(sg.phys_addrs, out)?;
                writeln!(out)
            }
            EventKind::UnmapSg { device, dir, phys_addrs } => {
                self.head("dma_unmap_sg", device, *dir, out)?;
                self.entries(phys_addrs, out)?;
                writeln!(out)
            }
            EventKind::Alloc { region, phys_addrs, .. } => {
                // `dma_alloc` allocates for both directions.
                let name =
                    if region.dir == Direction::Bidirectional { "dma_alloc" } else { "dma_alloc_pages" };
                self.region(name, region, out)?;
                if !phys_addrs.is_empty() {
                    self.entries(phys_addrs, out)?;
                }
                writeln!(out)
            }
            EventKind::SyncSg { device, dir, dma_addrs, sizes, target } => {
                self.head(&format!("dma_sync_sg_for_{}", whom(*target)), device, *dir, out)?;
                self.spans(dma_addrs, sizes, out)?;
                writeln!(out)
            }
            EventKind::IommuMap { device, iova, phys, size } => {
                let (iova, phys) = (self.address(*iova), self.address(*phys));
                write!(out, "map: IOMMU: ")?;
                self.named(device, out)?;
                writeln!(out, "iova={iova:#x} paddr={phys:#x} size={size}")
            }
            EventKind::IommuUnmap { device, iova, size, unmapped } => {
                let iova = self.address(*iova);
                write!(out, "unmap: IOMMU: ")?;
                self.named(device, out)?;
                writeln!(out, "iova={iova:#x} size={size} unmapped_size={unmapped}")
            }
            EventKind::Attach { device } => {
                writeln!(out, "attach_device_to_domain: IOMMU: device=device{}", self.device(device))
            }
            EventKind::Failed => writeln!(out, "dma_other_err:"),
            // A reader counts it among events that map nothing.
            EventKind::NotMapping => writeln!(out, "swiotlb_bounced:"),
            EventKind::Other | EventKind::Unreadable => writeln!(out, "other:"),
        }
    }

    fn head(&mut self, name: &str, device: &[u8], dir: Direction, out: &mut dyn Write) -> io::Result<()> {
        let dir = match dir {
            Direction::ToDevice => "TO_DEVICE",
            Direction::FromDevice => "FROM_DEVICE",
            Direction::Bidirectional => "BIDIRECTIONAL",
        };
        write!(out, "{name}: device{} dir={dir}", self.device(device))
    }

    /// Writes the device of an IOMMU event, if it has one.
    fn named(&mut self, device: &[u8], out: &mut dyn Write) -> io::Result<()> {
        if device.is_empty() { Ok(()) } else { write!(out, "dev=device{} ", self.device(device)) }
    }

    fn region(&mut self, name: &str, region: &Region<'_>, out: &mut dyn Write) -> io::Result<()> {
        self.head(name, region.device, region.dir, out)?;
        write!(out, " dma_addr={:x} size={}", self.address(region.dma_addr), region.size)
    }

    fn spans(&self, addrs: &[u64], sizes: &[u64], out: &mut dyn Write) -> io::Result<()> {
        self.list("dma_addrs", addrs.iter().map(|&addr| self.address(addr)), out)?;
        self.list("sizes", sizes.iter().copied(), out)
    }

    fn entries(&self, phys_addrs: &[u64], out: &mut dyn Write) -> io::Result<()> {
        self.list("phys_addrs", phys_addrs.iter().map(|&phys| self.address(phys)), out)
    }

    fn list(&self, name: &str, values: impl Iterator<Item = u64>, out: &mut dyn Write) -> io::Result<()> {
        write!(out, " {name}={{")?;
        for (at, value) in values.enumerate() {
            write!(out, "{}{value:#x}", if at == 0 { "" } else { "," })?;
        }
        write!(out, "}}")
    }

    fn device(&mut self, name: &[u8]) -> usize {
        match self.devices.get(name) {
            Some(&number) => number,
            None => {
                let number = self.devices.len() + 1;
                self.devices.insert(name.into(), number);
                number
            }
        }
    }

    /// The new `address` of one that the first pass saw.
    fn address(&self, address: u64) -> u64 {
        let block = address >> BLOCK_BITS;
        let (first, to) = self.moved.range(..=block).next_back().map_or((0, 0), |(&first, &to)| (first, to));
        (to + (block - first)) << BLOCK_BITS | address & ((1 << BLOCK_BITS) - 1)
    }
}

/// Writes attributes, which are kernel names, and ends the line.
fn attributes(attrs: &[u8], out: &mut dyn Write) -> io::Result<()> {
    if !attrs.is_empty()
        && attrs.iter().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b"_|".contains(b))
    {
        out.write_all(b" attrs=")?;
        out.write_all(attrs)?;
    }
    writeln!(out)
}

fn whom(target: SyncFor) -> &'static str {
    match target {
        SyncFor::Cpu => "cpu",
        SyncFor::Device => "device",
    }
}
