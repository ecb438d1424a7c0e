//! `iommu:` events that no `dma_*` event has claimed yet: decides when none will.
//!
//! An `iommu:unmap` precedes its `dma_unmap_page` on the same CPU, with only interrupts between. So one that ends a run which no event has
//! claimed is the end of a mapping without a `dma_*` event, as soon as its CPU does anything else, or after [`GRACE_NS`]. If it ends no
//! such run, it waits on: its mapping may be older than the recording.
//!
//! A call that fails unmaps what it has mapped, and then an event reports the failure: both are dropped.

use super::op::Out;
use super::runs::{Fate, Run, Unmapped};
use super::{At, Attached, Chunk, Pairer};
use crate::event::{Event, EventKind, Region};
use crate::figures::number_of;
use crate::summary::Summary;

/// After this time an `iommu:unmap` no longer waits for its `dma_*` event, if it ends an unclaimed run; and an `iommu:map` that is its
/// CPU's latest event may be direct.
const GRACE_NS: u64 = 100_000;

/// The most unmaps in the grace period.
const WAITING: usize = 4096;

/// The most runs that are examined for one unmap: those of a request of 64 MiB. If more wait, as in a virtual machine, each CPU's newest
/// have an equal share.
const LOOKED_AT: usize = 16_384;

impl Pairer {
    pub(super) fn iommu_map(
        &mut self,
        iova: u64,
        phys: u64,
        size: u64,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        if size == 0 {
            // Of a call that failed, or of a kernel that prints the remaining size.
            summary.empty_maps += 1;
            summary.ignored += 1;
            return;
        }
        if iova.checked_add(size - 1).is_none() {
            return summary.skip(out.at.line, || wraps(iova, size));
        }
        summary.iommu_maps += 1;
        let run = Run { iova, phys, size, at: out.at };
        let Some(cpu) = self.cpus.get_mut(out.at.cpu as usize) else { return };
        if !std::mem::replace(&mut cpu.listed, true) {
            self.with_maps.push(out.at.cpu);
        }
        if let Some(old) = cpu.waiting.push_map(run) {
            self.direct.keep(old, summary);
            self.direct.make_room(&mut self.live, summary, out);
        }
    }

    /// An unmap of `size` mapped bytes, of those requested; `named` if its device is known.
    pub(super) fn iommu_unmap(
        &mut self,
        iova: u64,
        size: u64,
        named: bool,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        let Some(more) = size.checked_sub(1) else {
            summary.ignored += 1;
            return;
        };
        let Some(last) = iova.checked_add(more) else {
            return summary.skip(out.at.line, || wraps(iova, size));
        };
        summary.iommu_unmaps += 1;
        let unmap = Unmapped { first: iova, last, at: out.at, tried: false };
        let cpu = self.cpus.get_mut(out.at.cpu as usize);
        let before = cpu.and_then(|cpu| cpu.last_unmap.replace((iova, last)));
        // In a recording without `dma_*` events (yet), waiting for one would only lose the time of the unmap.
        if !self.dma_seen && self.ends_unclaimed(&unmap) {
            return self.unclaimed_unmap(unmap, summary, out);
        }
        // VT-d's own events report the unmap of a list twice, as `unmap_single` and as `unmap_sg`.
        if named && !self.dma_seen && before == Some((iova, last)) {
            summary.ignored += 1;
            return;
        }
        match self.waiting(out).map(|waiting| waiting.push_unmap(unmap)) {
            Some(Fate::Claimed) => {
                summary.iommu_claimed += 1;
                return;
            }
            Some(Fate::Displaces(old)) => self.unclaimed_unmap(old, summary, out),
            Some(Fate::Waits) | None => {}
        }
        self.waiting.push_back((out.at.cpu, out.at.seq, out.at.time_ns));
    }

    /// Handles unmaps of unclaimed runs that `event` shows to be direct.
    pub(super) fn settle_unmaps(&mut self, event: &Event<'_>, summary: &mut Summary, chunk: &mut Chunk) {
        if self.waiting.is_empty() {
            return;
        }
        let at = At { seq: self.seq, time_ns: self.time_ns, ..At::default() };
        let out = &mut Out { chunk, at };
        match &event.kind {
            // It takes its own runs first: see below.
            _ if self.undo(event, summary) || is_map(&event.kind) => {}
            EventKind::Unmap { region } | EventKind::Free { region } => {
                self.settle_all_of(event.cpu, |unmap| !holds(unmap, region), summary, out);
            }
            _ => self.settle_all_of(event.cpu, |_| true, summary, out),
        }
        while let Some(&(cpu, seq, time_ns)) = self.waiting.front()
            && (time_ns.saturating_add(GRACE_NS) < event.time_ns || self.waiting.len() > WAITING)
        {
            self.waiting.pop_front();
            let cpu = self.cpus.get_mut(cpu as usize);
            if let Some(unmap) = cpu.and_then(|cpu| cpu.waiting.try_unmap(|unmap| unmap.at.seq == seq)) {
                self.settle(unmap, summary, out);
            }
        }
    }

    /// The same for the CPU's own unmaps, after an event that may have claimed runs.
    pub(super) fn settle_behind(&mut self, kind: &EventKind<'_>, summary: &mut Summary, out: &mut Out<'_>) {
        if !self.waiting.is_empty() && is_map(kind) {
            self.settle_all_of(out.at.cpu, |_| true, summary, out);
        }
    }

    fn settle_all_of(
        &mut self,
        cpu: u32,
        wanted: impl Fn(&Unmapped) -> bool,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        while let Some(unmap) = self.cpus.get_mut(cpu as usize).and_then(|cpu| cpu.waiting.try_unmap(&wanted))
        {
            self.settle(unmap, summary, out);
        }
    }

    /// Handles the waiting `unmap`, if it ends an unclaimed run.
    fn settle(&mut self, unmap: Unmapped, summary: &mut Summary, out: &mut Out<'_>) {
        if self.ends_unclaimed(&unmap) {
            if let Some(cpu) = self.cpus.get_mut(unmap.at.cpu as usize) {
                cpu.waiting.take_unmap(unmap.at.seq);
            }
            self.unclaimed_unmap(unmap, summary, out);
        }
    }

    /// Drops the maps of the call that `event` reports as failed: it was unmapped just before. `false` for other events.
    fn undo(&mut self, event: &Event<'_>, summary: &mut Summary) -> bool {
        let failed = match &event.kind {
            EventKind::Failed => true,
            EventKind::Map { region, phys, .. } => region.is_error(*phys),
            _ => false,
        };
        if failed
            && let Some(cpu) = self.cpus.get_mut(event.cpu as usize)
            && let Some(unmap) = cpu.waiting.take_unmap(cpu.last_seq)
        {
            summary.iommu_claimed += 1;
            cpu.waiting.take_maps(LOOKED_AT, |run| is_ended(run, &unmap), |_| summary.iommu_claimed += 1);
        }
        failed
    }

    fn ends_unclaimed(&self, unmap: &Unmapped) -> bool {
        let most = self.looked_at();
        let mut cpus = self.with_maps.iter().filter_map(|&number| self.cpus.get(number as usize));
        self.direct.touches(unmap)
            || cpus.any(|cpu| {
                let latest = cpu.last_seq;
                let claimed_yet = |run: &Run| self.dma_seen && is_new(run, latest, unmap);
                cpu.waiting.has_map(most, |run| is_ended(run, unmap) && !claimed_yet(run))
            })
    }

    /// Runs of each CPU that are examined for an unmap, the newest.
    fn looked_at(&self) -> usize {
        let cpus = self.with_maps.iter().filter_map(|&number| self.cpus.get(number as usize));
        let waiting: usize = cpus.map(|cpu| cpu.waiting.maps()).sum();
        if waiting > LOOKED_AT { LOOKED_AT / self.with_maps.len() } else { LOOKED_AT }
    }

    /// An unmap that no `dma_*` event has claimed: the maps before it may be unclaimed, too.
    pub(super) fn unclaimed_unmap(&mut self, unmap: Unmapped, summary: &mut Summary, out: &mut Out<'_>) {
        if self.dma_seen {
            // Others that wait may still be claimed.
            let most = self.looked_at();
            self.with_maps.retain(|&number| {
                let Some(cpu) = self.cpus.get_mut(number as usize) else { return false };
                let latest = cpu.last_seq;
                cpu.waiting.take_maps(
                    most,
                    |run| is_ended(run, &unmap) && !is_new(run, latest, &unmap),
                    |run| self.direct.keep(run, summary),
                );
                cpu.listed = cpu.waiting.maps() > 0;
                cpu.listed
            });
        } else {
            self.release_maps(unmap.at.seq, summary);
        }
        // The pseudo-device appears only in traces that need it.
        if !self.direct.touches(&unmap) {
            summary.iommu_unclaimed += 1;
            summary.ends_without_map += 1;
            return;
        }
        if self.direct_device(summary).is_none() {
            self.direct.forget(&unmap, summary);
            summary.iommu_unclaimed += 1;
            // It may be of the selected device.
            summary.nameless += u64::from(self.dma_seen && !matches!(self.attached, Attached::One(_)));
            return;
        }
        self.direct.unmap(&unmap, out.at, summary);
        self.direct.make_room(&mut self.live, summary, out);
    }

    /// Stops waiting for the `dma_*` events of maps older than event `seq`.
    pub(super) fn release_maps(&mut self, seq: u64, summary: &mut Summary) {
        self.with_maps.retain(|&number| {
            let Some(cpu) = self.cpus.get_mut(number as usize) else { return false };
            while let Some(run) = cpu.waiting.pop_map_before(seq) {
                self.direct.keep(run, summary);
            }
            cpu.listed = cpu.waiting.maps() > 0;
            cpu.listed
        });
    }
}

/// Whether the event makes a mapping, and so has runs of its own.
fn is_map(kind: &EventKind<'_>) -> bool {
    matches!(kind, EventKind::Map { .. } | EventKind::MapSg(_) | EventKind::Alloc { .. })
}

/// Whether `run` came before `unmap`, and overlaps it.
fn is_ended(run: &Run, unmap: &Unmapped) -> bool {
    run.at.seq < unmap.at.seq && run.iova <= unmap.last && run.last() >= unmap.first
}

/// Whether the `dma_*` event of `run` is likely to come: it is the latest event of its CPU, and young.
fn is_new(run: &Run, latest: u64, unmap: &Unmapped) -> bool {
    run.at.seq == latest && unmap.at.time_ns < run.at.time_ns.saturating_add(GRACE_NS)
}

/// Whether `unmap` may be that of `region`.
fn holds(unmap: &Unmapped, region: &Region<'_>) -> bool {
    let last = region.dma_addr.saturating_add(region.size.saturating_sub(1));
    unmap.first <= region.dma_addr && last <= unmap.last
}

fn wraps(iova: u64, size: u64) -> (String, String) {
    ("a range that ends below 2^64".into(), format!("{} at iova {iova:#x}", number_of(size, "byte")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the times are, a file without end takes bounded memory.
    #[test]
    fn so_many_unmaps_wait_at_once() {
        let (mut pairer, mut summary, mut chunk) = (Pairer::new(None), Summary::default(), Chunk::default());
        for number in 0..2 * WAITING as u64 {
            let (iova, size) = (number << 12, 4096);
            let kind = EventKind::IommuUnmap { device: b"", iova, size, unmapped: size };
            pairer.event(
                &Event { line: number, cpu: number as u32 % 7, time_ns: 5, kind },
                &mut summary,
                &mut chunk,
            );
            assert_eq!(pairer.waiting.len(), (number as usize).min(WAITING) + 1);
        }
    }
}
