//! `iommu:` events without a `dma_*` event: those of VFIO, and all if `dma:*` was not recorded.
//!
//! Such an `iommu:map` cannot be distinguished from one whose `dma_*` event is still to come, and does not name the other maps of its call.
//! An unmap ends one call's maps: so the runs that it covers become one mapping when it comes, with a piece for each. If it covers only a
//! part of a run, each run that it touches is a mapping, and is cut at the unmap's ends. A run that has waited too long becomes a mapping
//! of its own, and so does each that is left when a recording ends without any `dma_*` event.
//!
//! A mapping has the time of its first run. Once there are `dma_*` events, it has the time of its unmap: see `held`.

use std::collections::BTreeMap;

use super::MAX_PHYS;
use super::held::{Held, Made, Pieces};
use super::live::Live;
use super::op::{At, DeviceId, Origin, Out, Segment};
use super::runs::{Run, Unmapped};
use crate::summary::Summary;

/// The most runs that wait for an unmap.
const WAITING: usize = 1 << 20;

/// A live mapping of a run, or of its remainder.
#[derive(Debug, Clone, Copy)]
struct Part {
    last: u64,
    phys: u64,
    /// The run's event.
    seq: u64,
}

/// Runs and mappings without a `dma_*` event.
#[derive(Debug, Default)]
pub(super) struct Direct {
    runs: BTreeMap<u64, Run>,
    live: BTreeMap<u64, (Part, Made)>,
    held: Held,
    /// Their device, for good; `None` before the first of them, and inside if it is not selected.
    pub(super) device: Option<Option<DeviceId>>,
}

impl Direct {
    /// Keeps a run that no `dma_*` event has claimed.
    pub(super) fn keep(&mut self, run: Run, summary: &mut Summary) {
        if self.runs.len() >= WAITING {
            summary.iommu_unclaimed += 1;
            return;
        }
        self.held.open(run.at.seq, run.iova);
        if let Some(old) = self.runs.insert(run.iova, run) {
            // Another domain's run at the same address: the newer is more likely to be still mapped.
            self.held.close(old.at.seq);
            summary.iommu_unclaimed += 1;
        }
    }

    /// Whether `unmap` can end anything before it.
    pub(super) fn touches(&self, unmap: &Unmapped) -> bool {
        self.overlapping_run(unmap).is_some() || self.parts(unmap).next().is_some()
    }

    /// Handles `unmap`, and counts all events that it settles.
    pub(super) fn unmap(&mut self, unmap: &Unmapped, now: At, summary: &mut Summary) {
        let (first, last) = (unmap.first, unmap.last);
        let end = At { seq: now.seq, time_ns: now.time_ns, ..unmap.at };
        let runs = self.take_runs(unmap, summary);
        let mut found = !runs.is_empty();
        let inside = |from: u64, to: u64| first <= from && to <= last;
        let covered = runs.iter().all(|run| inside(run.iova, run.last()))
            && self.parts(unmap).all(|(from, (part, _))| inside(from, part.last));
        if let (true, Some(oldest)) = (covered, runs.iter().min_by_key(|run| run.at.seq)) {
            let pieces = runs.iter().map(|run| Segment { phys: run.phys, len: run.size }).collect();
            let made = self.make(oldest.at, now, pieces, Origin::Direct, summary);
            self.end(made, end, summary);
        } else {
            for run in &runs {
                // The run's parts: before the unmap, inside it, and behind it.
                let (low, high) = (first.max(run.iova), last.min(run.last()));
                let part =
                    |from: u64, last| Part { last, phys: run.phys + (from - run.iova), seq: run.at.seq };
                if run.iova < low {
                    self.map(run.iova, part(run.iova, low - 1), run.at, now, summary);
                }
                self.map(low, part(low, high), run.at, now, summary);
                if high < run.last() {
                    self.map(high + 1, part(high + 1, run.last()), run.at, now, summary);
                }
            }
        }
        loop {
            let Some((start, (part, made))) = self.parts(unmap).next() else { break };
            found = true;
            self.live.remove(&start);
            self.end(made, end, summary);
            // The remainder is mapped anew.
            if start < first {
                self.map(start, Part { last: first - 1, ..part }, end, now, summary);
            }
            if part.last > last {
                let phys = part.phys + (last + 1 - start);
                self.map(last + 1, Part { phys, ..part }, end, now, summary);
            }
        }
        if found {
            summary.iommu_direct += 1;
        } else {
            summary.iommu_unclaimed += 1;
        }
    }

    /// Takes the mappable runs that `unmap` touches, sorted by address.
    fn take_runs(&mut self, unmap: &Unmapped, summary: &mut Summary) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        while let Some(run) = self.overlapping_run(unmap) {
            self.take(run);
            if runs.last().is_some_and(|above| above.iova <= run.last()) {
                summary.iommu_unclaimed += 1;
            } else if self.can_map(run, summary) {
                runs.push(run);
            }
        }
        runs.reverse();
        runs
    }

    /// Drops the runs that `unmap` touches, which are not selected.
    pub(super) fn forget(&mut self, unmap: &Unmapped, summary: &mut Summary) {
        while let Some(run) = self.overlapping_run(unmap) {
            self.take(run);
            summary.iommu_unclaimed += 1;
        }
    }

    pub(super) fn has_runs(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Emits operations that nothing can precede. If too many are held back, their first runs become mappings.
    pub(super) fn make_room(&mut self, live: &mut Live, summary: &mut Summary, out: &mut Out<'_>) {
        let Some(Some(device)) = self.device else { return };
        self.held.release(device, live, out);
        while self.held.is_full()
            && let Some(run) = self.held.first_open().and_then(|iova| self.runs.get(&iova).copied())
        {
            self.settle(run, out.at, summary);
            self.held.release(device, live, out);
        }
    }

    /// After a first `dma_*` event nothing is held back.
    pub(super) fn hold_no_more(&mut self, live: &mut Live, out: &mut Out<'_>) {
        self.held.turn_off();
        if let Some(Some(device)) = self.device {
            self.held.release(device, live, out);
        }
    }

    /// Maps all runs without an unmap, for good.
    pub(super) fn map_all(&mut self, summary: &mut Summary) {
        while let Some((_, &run)) = self.runs.first_key_value() {
            self.settle(run, run.at, summary);
        }
    }

    /// Counts runs without an unmap, and emits held operations.
    pub(super) fn finish(&mut self, live: &mut Live, summary: &mut Summary, out: &mut Out<'_>) {
        summary.iommu_unclaimed += self.runs.len() as u64;
        self.runs.clear();
        self.hold_no_more(live, out);
    }

    /// Maps `run`, for good.
    fn settle(&mut self, run: Run, now: At, summary: &mut Summary) {
        self.take(run);
        if self.can_map(run, summary) {
            let part = Part { last: run.last(), phys: run.phys, seq: run.at.seq };
            // A mapping without an unmap lives as long as its driver.
            self.map_as(Origin::Coherent, run.iova, part, (run.at, now), summary);
        }
    }

    /// Removes `run` from the waiting ones.
    fn take(&mut self, run: Run) {
        self.runs.remove(&run.iova);
        self.held.close(run.at.seq);
    }

    /// Whether `run` can become a mapping; it is counted either way.
    fn can_map(&self, run: Run, summary: &mut Summary) -> bool {
        let overlapping = self.live.range(..=run.last()).next_back();
        let overlaps_live = overlapping.is_some_and(|(_, (part, _))| part.last >= run.iova);
        let fits = run.phys.checked_add(run.size).is_some_and(|end| end <= MAX_PHYS);
        if overlaps_live || !fits {
            summary.iommu_unclaimed += 1;
            return false;
        }
        summary.iommu_direct += 1;
        summary.count_shape(run.size, 1);
        summary.direct_bytes = summary.direct_bytes.saturating_add(run.size);
        true
    }

    /// The last run before `unmap` that overlaps it.
    fn overlapping_run(&self, unmap: &Unmapped) -> Option<Run> {
        let below = self.runs.range(..=unmap.last).rev().map(|(_, &run)| run);
        below.take_while(|run| run.last() >= unmap.first).find(|run| run.at.seq < unmap.at.seq)
    }

    /// The mappings before `unmap` that overlap it, from the last on, each with its first address.
    fn parts(&self, unmap: &Unmapped) -> impl Iterator<Item = (u64, (Part, Made))> {
        let below = self.live.range(..=unmap.last).rev().map(|(&start, &part)| (start, part));
        below
            .take_while(|(_, (part, _))| part.last >= unmap.first)
            .filter(|(_, (part, _))| part.seq < unmap.at.seq)
    }

    /// Maps `part`, which begins at `first`.
    fn map(&mut self, first: u64, part: Part, at: At, now: At, summary: &mut Summary) {
        self.map_as(Origin::Direct, first, part, (at, now), summary);
    }

    fn map_as(&mut self, origin: Origin, first: u64, part: Part, (at, now): (At, At), summary: &mut Summary) {
        // The run's size was checked to be below 2^52, so this does not wrap.
        let piece = Segment { phys: part.phys, len: part.last - first + 1 };
        let made = self.make(at, now, Pieces::from_elem(piece, 1), origin, summary);
        self.live.insert(first, (part, made));
    }

    fn make(&mut self, at: At, now: At, pieces: Pieces, origin: Origin, summary: &mut Summary) -> Made {
        summary.direct_maps += 1;
        self.held.map(at, now, pieces, origin)
    }

    fn end(&mut self, made: Made, at: At, summary: &mut Summary) {
        summary.direct_unmaps += 1;
        self.held.unmap(at, made);
    }
}
