//! The exposure of registered memory, which is mapped at its first use, and never unmapped. Operations cost nothing, and a device always
//! reaches all memory that was ever registered for it.

use portcullis::addr::{PageSize, PhysAddr, PhysSegment};
use rangemap::RangeSet;
use rustc_hash::FxHashMap;

use super::live::to_whole_pages;
use super::mode::Mode;
use super::report::{Exposure, PolicyReport};
use super::timing::Figures;
use crate::{Chunk, MapId, Op, OpKind, Origin};

/// The registered memory of a device.
#[derive(Debug, Default)]
struct Memory {
    /// Its buffers, and their pages.
    buffers: RangeSet<u64>,
    pages: RangeSet<u64>,
}

/// The exposure over a whole recording.
#[derive(Debug)]
pub(super) struct Registered {
    granule: PageSize,
    devices: FxHashMap<u32, Memory>,
    /// Bytes of each live mapping.
    live: FxHashMap<MapId, u64>,
    in_use: u64,
    /// The same times their lifetimes.
    used_byte_ns: u128,
    last_ns: u64,
    operations: u64,
}

impl Registered {
    pub(super) fn new(granule: PageSize) -> Self {
        Self {
            granule,
            devices: FxHashMap::default(),
            live: FxHashMap::default(),
            in_use: 0,
            used_byte_ns: 0,
            last_ns: 0,
            operations: 0,
        }
    }

    pub(super) fn run(&mut self, chunk: &Chunk) {
        for op in &chunk.ops {
            self.go_to(op.time_ns);
            match &op.kind {
                OpKind::Map { id, segments, origin, .. } => {
                    let list = &chunk.segments[segments.start as usize..segments.end as usize];
                    let parts =
                        list.iter().map(|part| PhysSegment { phys: PhysAddr::new(part.phys), len: part.len });
                    self.map(op, *id, *origin, parts);
                }
                OpKind::Unmap { id } => self.in_use -= self.live.remove(id).unwrap_or(0),
                OpKind::SyncForCpu { .. } | OpKind::SyncForDevice { .. } => {}
            }
        }
    }

    fn go_to(&mut self, time_ns: u64) {
        let passed_ns = time_ns.saturating_sub(self.last_ns);
        self.used_byte_ns += u128::from(self.in_use) * u128::from(passed_ns);
        self.last_ns = self.last_ns.max(time_ns);
    }

    fn map(&mut self, op: &Op, id: MapId, origin: Origin, parts: impl Iterator<Item = PhysSegment>) {
        let memory = self.devices.entry(op.device.0).or_default();
        let mut bytes = 0_u64;
        for mut part in parts {
            let mut pages = part;
            to_whole_pages(&mut pages, self.granule);
            if origin == Origin::Coherent {
                part = pages;
            }
            let range = |part: PhysSegment| part.phys.get()..part.phys.get().saturating_add(part.len);
            for (set, range) in [(&mut memory.buffers, range(part)), (&mut memory.pages, range(pages))] {
                // A set takes no empty range.
                if !range.is_empty() {
                    set.insert(range);
                }
            }
            bytes = bytes.saturating_add(part.len);
        }
        self.operations += 1;
        let before = self.live.insert(id, bytes).unwrap_or(0);
        self.in_use = self.in_use.saturating_sub(before).saturating_add(bytes);
    }

    /// Computes the exposure of a recording from `start_ns` to `end_ns`.
    pub(super) fn finish(mut self, work_ns: f64, (start_ns, end_ns): (u64, u64)) -> PolicyReport {
        self.go_to(end_ns);
        let all_ns = u128::from(self.last_ns.saturating_sub(start_ns));
        let len =
            |set: &RangeSet<u64>| set.iter().map(|range| u128::from(range.end - range.start)).sum::<u128>();
        let (mut buffers, mut pages) = (0, 0);
        for memory in self.devices.values() {
            buffers += len(&memory.buffers);
            pages += len(&memory.pages);
        }
        let byte_s = |byte_ns: u128| byte_ns as f64 / 1e9;
        let exposure = Exposure {
            // Bytes of two concurrent mappings are in use twice.
            stale_byte_s: byte_s((buffers * all_ns).saturating_sub(self.used_byte_ns)),
            neighbour_byte_s: byte_s((pages - buffers.min(pages)) * all_ns),
        };
        let nothing = Figures { mean: 0.0, p50: 0.0, p99: 0.0, p99_99: 0.0 };
        PolicyReport {
            policy: Mode::Registered.name(),
            mode: Mode::Registered,
            operations: self.operations,
            map_ns: nothing,
            unmap_ns: nothing,
            map_latency: Vec::new(),
            unmap_latency: Vec::new(),
            wait_ns_per_op: 0.0,
            ops_per_s: if work_ns > 0.0 { 1e9 / work_ns } else { 0.0 },
            relative_to_passthrough: None,
            invalidations: 0,
            iotlb_misses_per_access: 0.0,
            walk_cache_misses_per_access: 0.0,
            peak_iova_bytes: u64::try_from(pages).unwrap_or(u64::MAX),
            peak_table_bytes: 0,
            peak_bounce_bytes: 0,
            copied_bytes: Some(0),
            exposure,
            exposure_counted: Some(exposure),
            faults: 0,
            violations: 0,
            timer_ns: 0.0,
            interrupted_calls: 0,
            choices: Vec::new(),
            longest_stale_ns: 0,
            in_force: None,
            painted: None,
            failures: 0,
            first_failure: None,
        }
    }
}
