//! `iommu:` events without a `dma_*` event: what VFIO maps for user space.
//!
//! Such an `iommu:map` cannot be told from one whose `dma_*` event is still to come, so it becomes a mapping only
//! when the first unmap touches it; the time of that unmap is then the time of both. Where the recording ends without
//! any `dma_*` event, the rest become mappings then. An unmap may cover a part of a
//! run or many runs: the run is cut at the unmap's ends.

use std::collections::BTreeMap;

use portcullis::addr::Direction;

use super::MAX_PHYS;
use super::live::Live;
use super::op::{DeviceId, MapId, OpKind, Origin, Out, Segment};
use super::runs::Run;
use crate::summary::Summary;

/// Runs that wait for an unmap at most.
const WAITING: usize = 1 << 20;

/// A live mapping.
#[derive(Debug, Clone, Copy)]
struct Part {
    last: u64,
    phys: u64,
    id: MapId,
}

/// The runs and mappings that belong to no `dma_*` event.
#[derive(Debug, Default)]
pub(super) struct Direct {
    runs: BTreeMap<u64, Run>,
    live: BTreeMap<u64, Part>,
    /// Whose they are, for good; `None` before the first of them, and in it where they are not wanted.
    pub(super) device: Option<Option<DeviceId>>,
}

impl Direct {
    /// Keeps a run that no `dma_*` event has claimed.
    pub(super) fn keep(&mut self, run: Run, summary: &mut Summary) {
        if self.runs.len() >= WAITING {
            summary.iommu_unclaimed += 1;
        } else if self.runs.insert(run.iova, run).is_some() {
            // Another domain's run at the same address: of the two the newer is the likelier to be unmapped yet.
            summary.iommu_unclaimed += 1;
        }
    }

    /// Whether anything lies between `first` and `last` that an unmap could end.
    pub(super) fn touches(&self, first: u64, last: u64) -> bool {
        self.overlapping_run(first, last).is_some() || self.overlapping_part(first, last).is_some()
    }

    /// Plays the unmap from `first` to `last`, for the pseudo-device `device`, and counts all events it settles.
    pub(super) fn unmap(
        &mut self,
        (first, last): (u64, u64),
        device: DeviceId,
        live: &mut Live,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        while let Some(run) = self.overlapping_run(first, last) {
            self.runs.remove(&run.iova);
            if !self.can_map(run, summary) {
                continue;
            }
            // What is before the unmap, what is in it, and what is behind it.
            let low = first.max(run.iova);
            let high = last.min(run.last());
            if run.iova < low {
                self.map((run.iova, low - 1), run.phys, device, live, summary, out);
            }
            self.map((low, high), run.phys + (low - run.iova), device, live, summary, out);
            if high < run.last() {
                let phys = run.phys + (high + 1 - run.iova);
                self.map((high + 1, run.last()), phys, device, live, summary, out);
            }
        }
        let mut found = false;
        while let Some((start, part)) = self.overlapping_part(first, last) {
            found = true;
            self.live.remove(&start);
            live.free_id(part.id);
            summary.direct_unmaps += 1;
            out.push(device, OpKind::Unmap { id: part.id });
            if start < first {
                self.map((start, first - 1), part.phys, device, live, summary, out);
            }
            if part.last > last {
                let phys = part.phys + (last + 1 - start);
                self.map((last + 1, part.last), phys, device, live, summary, out);
            }
        }
        if found {
            summary.iommu_direct += 1;
        } else {
            summary.iommu_unclaimed += 1;
        }
    }

    /// Whether there are runs that no unmap has touched.
    pub(super) fn has_runs(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Maps, for good, what no unmap has touched.
    pub(super) fn map_all(
        &mut self,
        device: DeviceId,
        live: &mut Live,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        for run in std::mem::take(&mut self.runs).into_values() {
            if self.can_map(run, summary) {
                self.map((run.iova, run.last()), run.phys, device, live, summary, out);
            }
        }
    }

    /// Whether `run` can become a mapping; it is counted either way.
    fn can_map(&self, run: Run, summary: &mut Summary) -> bool {
        let overlaps_live = self.overlapping_part(run.iova, run.last()).is_some();
        let fits = run.phys.checked_add(run.size).is_some_and(|end| end <= MAX_PHYS);
        if overlaps_live || !fits {
            summary.iommu_unclaimed += 1;
            return false;
        }
        summary.iommu_direct += 1;
        summary.bytes_mapped = summary.bytes_mapped.saturating_add(run.size);
        true
    }

    /// Counts what no unmap has touched.
    pub(super) fn finish(&mut self, summary: &mut Summary) {
        summary.iommu_unclaimed += self.runs.len() as u64;
        self.runs.clear();
    }

    fn overlapping_run(&self, first: u64, last: u64) -> Option<Run> {
        self.runs.range(..=last).next_back().map(|(_, &run)| run).filter(|run| run.last() >= first)
    }

    fn overlapping_part(&self, first: u64, last: u64) -> Option<(u64, Part)> {
        let (&start, &part) = self.live.range(..=last).next_back()?;
        (part.last >= first).then_some((start, part))
    }

    fn map(
        &mut self,
        (first, last): (u64, u64),
        phys: u64,
        device: DeviceId,
        live: &mut Live,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        summary.direct_maps += 1;
        let id = live.take_id();
        self.live.insert(first, Part { last, phys, id });
        // The run's size was checked to be below 2^52, so this does not wrap.
        let pieces = [Segment { phys, len: last - first + 1 }];
        out.map(device, id, Direction::Bidirectional, Origin::Direct, &pieces);
    }
}
