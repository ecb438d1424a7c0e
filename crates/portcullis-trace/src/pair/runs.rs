//! The `iommu:` events of one CPU that wait for their `dma_*` event.
//!
//! `iommu:map` precedes its `dma_map_*` or `dma_alloc`; `iommu:unmap` precedes its `dma_unmap_page` and follows its `dma_free` or
//! `dma_unmap_sg`. An interrupt may come between with pairs of its own, so events are claimed by address, newest first, and others wait, up
//! to a bound.

use std::collections::VecDeque;

use super::live::Span;
use super::op::At;

/// The most waiting maps: the pages of an allocation of 256 MiB.
const WAITING_MAPS: usize = 65_536;

/// The most waiting unmaps, and the most expected ones: the nesting depth of interrupts, with room.
const WAITING_UNMAPS: usize = 8;

/// Other calls' maps that a search skips.
const MISSES: usize = 64;

/// An `iommu:map`: a physically contiguous run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) iova: u64,
    pub(super) phys: u64,
    /// Never 0; `iova + (size - 1)` does not wrap.
    pub(super) size: u64,
    pub(super) at: At,
}

impl Run {
    pub(super) fn last(&self) -> u64 {
        self.iova.saturating_add(self.size - 1)
    }
}

/// An `iommu:unmap`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unmapped {
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) at: At,
    /// It was checked against direct mappings: it ends none.
    pub(super) tried: bool,
}

/// The handling of an `iommu:unmap`.
pub(super) enum Fate {
    Claimed,
    Waits,
    /// It waits, and this older one has waited too long.
    Displaces(Unmapped),
}

/// The waiting events of one CPU.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    maps: VecDeque<Run>,
    unmaps: VecDeque<Unmapped>,
    /// First and last address of expected unmaps; `None` for any address.
    expected: VecDeque<Option<(u64, u64)>>,
}

impl Waiting {
    /// Adds a waiting `run`; returns one that has waited too long.
    pub(super) fn push_map(&mut self, run: Run) -> Option<Run> {
        self.maps.push_back(run);
        if self.maps.len() > WAITING_MAPS { self.maps.pop_front() } else { None }
    }

    /// Claims the runs from `first` to `last` into `runs`, sorted by address.
    pub(super) fn claim_maps(&mut self, first: u64, last: u64, runs: &mut Vec<Run>) {
        runs.clear();
        let (mut low, mut misses, mut at) = (u64::MAX, 0, self.maps.len());
        while at > 0 && misses < MISSES && low > first {
            at -= 1;
            let Some(&run) = self.maps.get(at) else { return };
            let overlaps = run.iova <= last && run.last() >= first;
            // Runs of one mapping come in ascending order: newest first they descend. Anything else is an older mapping's leftover at the
            // same addresses.
            if overlaps && (runs.is_empty() || run.last() < low) {
                low = run.iova;
                runs.push(run);
                self.maps.remove(at);
            } else {
                misses += 1;
            }
        }
        runs.reverse();
    }

    pub(super) fn maps(&self) -> usize {
        self.maps.len()
    }

    /// Whether one of the newest `most` waiting runs is `wanted`.
    pub(super) fn has_map(&self, most: usize, wanted: impl Fn(&Run) -> bool) -> bool {
        self.maps.iter().rev().take(most).any(wanted)
    }

    /// Removes the `wanted` runs of the newest `most`, and passes them to `take`, oldest first.
    pub(super) fn take_maps(
        &mut self,
        most: usize,
        wanted: impl Fn(&Run) -> bool,
        mut take: impl FnMut(Run),
    ) {
        let older = self.maps.len().saturating_sub(most);
        let mut kept = older;
        for at in older..self.maps.len() {
            match self.maps.get(at) {
                Some(run) if wanted(run) => take(*run),
                _ => {
                    self.maps.swap(kept, at);
                    kept += 1;
                }
            }
        }
        self.maps.truncate(kept);
    }

    /// Marks an untried unmap that is `wanted` as tried, if there is one.
    pub(super) fn try_unmap(&mut self, wanted: impl Fn(&Unmapped) -> bool) -> Option<Unmapped> {
        let unmap = self.unmaps.iter_mut().find(|unmap| !unmap.tried && wanted(unmap))?;
        unmap.tried = true;
        Some(*unmap)
    }

    /// Takes the unmap of event `seq`.
    pub(super) fn take_unmap(&mut self, seq: u64) -> Option<Unmapped> {
        let at = self.unmaps.iter().rposition(|unmap| unmap.at.seq == seq)?;
        self.unmaps.remove(at)
    }

    /// Handles `unmap`: an earlier free claims it, or it waits.
    pub(super) fn push_unmap(&mut self, unmap: Unmapped) -> Fate {
        let taker = self.expected.iter().rposition(|range| match *range {
            Some((first, last)) => unmap.first <= last && unmap.last >= first,
            None => true,
        });
        if let Some(at) = taker {
            self.expected.remove(at);
            return Fate::Claimed;
        }
        self.unmaps.push_back(unmap);
        if self.unmaps.len() > WAITING_UNMAPS
            && let Some(oldest) = self.unmaps.pop_front()
        {
            return Fate::Displaces(oldest);
        }
        Fate::Waits
    }

    /// Claims the unmap of the `len` bytes at `addr`, and returns its event.
    pub(super) fn claim_unmap(&mut self, addr: u64, len: u64) -> Option<u64> {
        let last = addr.saturating_add(len.saturating_sub(1));
        let at = self.unmaps.iter().rposition(|unmap| unmap.first <= addr && unmap.last >= last)?;
        self.unmaps.remove(at).map(|unmap| unmap.at.seq)
    }

    /// Expects the unmap of `spans`; of any address, if there are none.
    pub(super) fn expect_unmap(&mut self, spans: &[Span]) {
        let range = spans
            .iter()
            .map(|span| (span.addr, span.addr.saturating_add(span.len.saturating_sub(1))))
            .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        self.expected.push_back(range);
        if self.expected.len() > WAITING_UNMAPS {
            self.expected.pop_front();
        }
    }

    /// Takes the oldest waiting map, if it came before event `seq`.
    pub(super) fn pop_map_before(&mut self, seq: u64) -> Option<Run> {
        if self.maps.front()?.at.seq < seq { self.maps.pop_front() } else { None }
    }

    /// Takes the oldest waiting unmap.
    pub(super) fn pop_unmap(&mut self) -> Option<Unmapped> {
        self.unmaps.pop_front()
    }
}
