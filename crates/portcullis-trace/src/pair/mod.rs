//! Events to operations: finds the map of every unmap, free and sync.
//!
//! The parts explain their rules: [`Op`] is the output; `live` decides which mapping an unmap ends, `runs` which `iommu:` events belong to
//! which call, `segments` how long the pieces of a list are, and `direct` handles `iommu:` events without a `dma_*` event.
//!
//! Guarantees: every event is counted in one category of [`Summary`]; operations' times never decrease; every `Unmap` and sync names a live
//! mapping; every segment has at least one byte and ends at or below 2^52.

mod devices;
mod direct;
mod ends;
mod held;
mod live;
mod maps;
mod op;
mod runs;
mod segments;
mod unclaimed;

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::event::{Direction, Event, EventKind, Told};
use crate::summary::{Summary, Unpaired};
use devices::Devices;
pub use devices::is_named;
use direct::Direct;
use live::{Class, ListKey, Live, Span};
use op::{At, Out};
pub use op::{Chunk, DeviceId, MapId, Op, OpKind, Origin, Segment};
use runs::{Run, Waiting};
use segments::Source;

/// The device name of mappings without a `dma_*` call, unless one device was attached to a domain.
pub const DIRECT_DEVICE: &str = "iommu";

/// The end of physical addresses: no machine this library knows has more than 52 bits of them.
const MAX_PHYS: u64 = 1 << 52;

/// The state of a CPU.
#[derive(Debug, Default)]
struct Cpu {
    last_ns: Option<u64>,
    /// Its latest event.
    last_seq: u64,
    went_back: bool,
    waiting: Waiting,
    /// It is in the list of CPUs with waiting maps.
    listed: bool,
    /// The first and the last address of its latest `iommu:unmap`.
    last_unmap: Option<(u64, u64)>,
}

/// Pairs the events of one trace.
#[derive(Debug)]
pub(crate) struct Pairer {
    cpus: Vec<Cpu>,
    /// CPUs that may have waiting maps: only some of thousands.
    with_maps: Vec<u32>,
    devices: Devices,
    live: Live,
    direct: Direct,
    /// Events so far.
    seq: u64,
    time_ns: u64,
    /// Whether there was a `dma_*` event.
    dma_seen: bool,
    attached: Attached,
    runs: Vec<Run>,
    pieces: Vec<Segment>,
    /// Waiting unmaps: their CPUs, events and times.
    waiting: VecDeque<(u32, u64, u64)>,
}

/// The devices attached to domains so far.
#[derive(Debug)]
enum Attached {
    None,
    One(Box<[u8]>),
    Several,
}

/// A prepared map event.
struct NewMap {
    class: Class,
    dir: Direction,
    origin: Origin,
    spans: SmallVec<[Span; 1]>,
    list: Option<ListKey>,
    source: Source,
}

impl Pairer {
    /// With `only`, events of other devices are counted and dropped.
    pub(crate) fn new(only: Option<String>) -> Self {
        Self {
            cpus: Vec::new(),
            with_maps: Vec::new(),
            devices: Devices::new(only),
            live: Live::default(),
            direct: Direct::default(),
            seq: 0,
            time_ns: 0,
            dma_seen: false,
            attached: Attached::None,
            runs: Vec::new(),
            pieces: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Handles one event; appends its operations to `chunk`.
    pub(crate) fn event(&mut self, event: &Event<'_>, summary: &mut Summary, chunk: &mut Chunk) {
        self.settle_unmaps(event, summary, chunk);
        self.seq += 1;
        self.clock(event, summary);
        let at = At { seq: self.seq, time_ns: self.time_ns, line: event.line, cpu: event.cpu };
        let out = &mut Out { chunk, at };
        match &event.kind {
            EventKind::IommuMap { device, iova, phys, size } => {
                if !device.is_empty() {
                    self.attach(device);
                }
                self.iommu_map(*iova, *phys, *size, summary, out);
            }
            EventKind::IommuUnmap { device, iova, unmapped, .. } => {
                self.iommu_unmap(*iova, *unmapped, !device.is_empty(), summary, out);
            }
            EventKind::Attach { device } => {
                summary.not_mapping_events += 1;
                self.attach(device);
            }
            EventKind::NotMapping => summary.not_mapping_events += 1,
            EventKind::Other => summary.other_events += 1,
            // The reader has counted it.
            EventKind::Unreadable => {}
            kind => {
                if !self.dma_seen {
                    self.dma_seen = true;
                    self.direct.hold_no_more(&mut self.live, out);
                }
                self.dma(kind, summary, out);
                self.settle_behind(kind, summary, out);
            }
        }
    }

    /// Settles events that wait for ones that will not come.
    pub(crate) fn finish(&mut self, summary: &mut Summary, chunk: &mut Chunk) {
        let at = At { seq: u64::MAX, time_ns: self.time_ns, ..At::default() };
        let out = &mut Out { chunk, at };
        for cpu in 0..self.cpus.len() {
            while let Some(unmap) = self.cpus.get_mut(cpu).and_then(|cpu| cpu.waiting.pop_unmap()) {
                self.unclaimed_unmap(unmap, summary, out);
            }
        }
        self.release_maps(u64::MAX, summary);
        if !self.dma_seen && self.direct.has_runs() && self.direct_device(summary).is_some() {
            // They belong to no call, and were mapped when the recording ended.
            self.direct.map_all(summary);
        }
        self.direct.finish(&mut self.live, summary, out);
    }

    /// Records that `device` has another domain.
    fn attach(&mut self, device: &[u8]) {
        self.attached = match std::mem::replace(&mut self.attached, Attached::None) {
            Attached::None => Attached::One(device.into()),
            Attached::One(known) if *known == *device => Attached::One(known),
            _ => Attached::Several,
        };
    }

    /// The device of mappings without a `dma_*` event: the one that was attached to a domain, if there was one, or else a pseudo-device.
    /// `None` if it is not selected.
    fn direct_device(&mut self, summary: &mut Summary) -> Option<DeviceId> {
        if let Some(device) = self.direct.device {
            return device;
        }
        let name = match &self.attached {
            Attached::One(device) => device,
            Attached::None | Attached::Several => DIRECT_DEVICE.as_bytes(),
        };
        let (device, wanted) = self.devices.intern(name, &mut summary.devices);
        *self.direct.device.insert(wanted.then_some(device))
    }

    fn waiting(&mut self, out: &Out<'_>) -> Option<&mut Waiting> {
        self.cpus.get_mut(out.at.cpu as usize).map(|cpu| &mut cpu.waiting)
    }

    /// Keeps each CPU's time monotonic. The reader keeps it monotonic across CPUs.
    fn clock(&mut self, event: &Event<'_>, summary: &mut Summary) {
        let at = event.cpu as usize;
        if at >= self.cpus.len() {
            self.cpus.resize_with(at + 1, Cpu::default);
        }
        if let Some(cpu) = self.cpus.get_mut(at) {
            match cpu.last_ns {
                None => summary.cpus += 1,
                Some(last) if event.time_ns < last && !cpu.went_back => {
                    cpu.went_back = true;
                    summary.warn(event.line, || {
                        let (id, now) = (event.cpu, event.time_ns);
                        (format!("a time of at least {last} ns on CPU {id}"), format!("{now} ns"))
                    });
                }
                Some(_) => {}
            }
            cpu.last_ns = cpu.last_ns.max(Some(event.time_ns));
            cpu.last_seq = self.seq;
        }
        self.time_ns = self.time_ns.max(event.time_ns);
    }

    fn dma(&mut self, kind: &EventKind<'_>, summary: &mut Summary, out: &mut Out<'_>) {
        match kind {
            EventKind::Map { region, phys, resource } => {
                let origin = if *resource { Origin::Resource } else { Origin::Single };
                self.map(region, &[*phys], Class::Single, origin, summary, out);
            }
            EventKind::Alloc { region, phys_addrs, dir } => {
                match dir {
                    Told::Told => {}
                    Told::Missing => summary.allocs_without_dir += 1,
                    Told::Unreadable => summary.allocs_unreadable_dir += 1,
                }
                self.map(region, phys_addrs, Class::Coherent, Origin::Coherent, summary, out);
            }
            EventKind::MapSg(sg) => self.map_sg(sg, summary, out),
            EventKind::Unmap { region } => self.unmap(region, Class::Single, summary, out),
            EventKind::Failed => summary.ignored += 1,
            EventKind::Free { region } if region.size == 0 => summary.ignored += 1,
            EventKind::Free { region } => self.unmap(region, Class::Coherent, summary, out),
            EventKind::UnmapSg { device, dir, phys_addrs } => {
                self.unmap_sg(device, *dir, phys_addrs, summary, out);
            }
            EventKind::Sync { region, target } => {
                let parts = [Span { addr: region.dma_addr, len: region.size }];
                self.sync(region.device, parts.into_iter(), *target, summary, out);
            }
            EventKind::SyncSg { device, dma_addrs, sizes, target, .. } => {
                let parts = dma_addrs.iter().zip(*sizes).map(|(&addr, &len)| Span { addr, len });
                self.sync(device, parts, *target, summary, out);
            }
            EventKind::IommuMap { .. } | EventKind::IommuUnmap { .. } => {}
            EventKind::Attach { .. } | EventKind::NotMapping | EventKind::Other | EventKind::Unreadable => {}
        }
    }
}
