//! `iommu:` events that no `dma_*` event has claimed, or not yet: when it is settled that none will.
//!
//! An `iommu:unmap` that stands before its `dma_unmap_page` does so on the same CPU, and what comes between are interrupts. So one
//! that ends a run which no event has claimed is the end of a mapping without a `dma_*` event, as soon as its CPU does anything
//! else, or after [`GRACE_NS`]. Where it ends no such run, it waits on: its mapping may be older than the recording.
//!
//! What a call has mapped before it failed is unmapped again, and then an event says that it failed: neither is anybody's.

use super::op::Out;
use super::runs::{Fate, Run, Unmapped};
use super::{At, Attached, Chunk, Pairer};
use crate::event::{Event, EventKind, Region};
use crate::figures::number_of;
use crate::summary::Summary;

/// After this time an `iommu:unmap` waits for its `dma_*` event no longer, if it ends what no event has claimed; and an `iommu:map`
/// that is its CPU's latest event may be anybody's.
const GRACE_NS: u64 = 100_000;

/// Unmaps that wait for the grace period to end at most.
const WAITING: usize = 4096;

/// Runs that are looked at for one unmap at most: those of a request of 64 MiB. Where more wait, as a virtual machine's do, each CPU's
/// newest have an equal part of these.
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
            // Of a call that failed, or by a kernel that prints what is left to map.
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

    /// An unmap of the `size` bytes that were mapped, of those that should go; `named` if its device is known.
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
        // Where a recording holds no `dma_*` event (yet), waiting for one would only lose the time of the unmap.
        if !self.dma_seen && self.ends_unclaimed(&unmap) {
            return self.unclaimed_unmap(unmap, summary, out);
        }
        // VT-d's own events tell the unmap of a list twice, as `unmap_single` and as `unmap_sg`.
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

    /// Plays the unmaps that end what no event has claimed, and that `event` shows to be nobody's.
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

    /// The same of the CPU's own unmaps, behind an event that may have claimed runs.
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

    /// Plays `unmap`, which waits, if it ends what no event has claimed.
    fn settle(&mut self, unmap: Unmapped, summary: &mut Summary, out: &mut Out<'_>) {
        if self.ends_unclaimed(&unmap) {
            if let Some(cpu) = self.cpus.get_mut(unmap.at.cpu as usize) {
                cpu.waiting.take_unmap(unmap.at.seq);
            }
            self.unclaimed_unmap(unmap, summary, out);
        }
    }

    /// Forgets what the call that `event` says to have failed had mapped: it was unmapped just before. `false` where it says no
    /// such thing.
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

    /// Whether `unmap` ends what no event has claimed.
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

    /// How many runs of each CPU are looked at for an unmap, the newest.
    fn looked_at(&self) -> usize {
        let cpus = self.with_maps.iter().filter_map(|&number| self.cpus.get(number as usize));
        let waiting: usize = cpus.map(|cpu| cpu.waiting.maps()).sum();
        if waiting > LOOKED_AT { LOOKED_AT / self.with_maps.len() } else { LOOKED_AT }
    }

    /// An unmap that no `dma_*` event has claimed: perhaps the maps before it were not claimed either.
    pub(super) fn unclaimed_unmap(&mut self, unmap: Unmapped, summary: &mut Summary, out: &mut Out<'_>) {
        if self.dma_seen {
            // Others that wait may be claimed yet.
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
            // It may be of the device that is wanted.
            summary.nameless += u64::from(self.dma_seen && !matches!(self.attached, Attached::One(_)));
            return;
        }
        self.direct.unmap(&unmap, out.at, summary);
        self.direct.make_room(&mut self.live, summary, out);
    }

    /// Gives up waiting for the `dma_*` events of maps older than event `seq`.
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

/// Whether `run` was there before `unmap`, and has a byte in it.
fn is_ended(run: &Run, unmap: &Unmapped) -> bool {
    run.at.seq < unmap.at.seq && run.iova <= unmap.last && run.last() >= unmap.first
}

/// Whether the `dma_*` event of `run` is likely to come yet: it is the latest event of its CPU, and young.
fn is_new(run: &Run, latest: u64, unmap: &Unmapped) -> bool {
    run.at.seq == latest && unmap.at.time_ns < run.at.time_ns.saturating_add(GRACE_NS)
}

/// Whether `unmap` may be the one that unmaps `region`.
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

    /// Whatever the times say, a file without end takes no memory without end.
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
