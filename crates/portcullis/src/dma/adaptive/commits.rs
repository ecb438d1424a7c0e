//! The cost of a ring's commit for each descriptor.

/// The weight of the running mean, in samples.
const WEIGHT: u64 = 8;

/// The recent cost of commits, and the number of descriptors that share one. Copied ones count, too: as if all were mapped.
#[derive(Debug)]
pub(super) struct Commits {
    batch: u64,
    ns: u64,
    /// The mean number of descriptors for each commit, in sixteenths.
    sixteenths: u64,
    ended: u64,
}

impl Commits {
    pub(super) fn new(batch: usize) -> Self {
        let batch = batch.max(1) as u64;
        Self { batch, ns: 0, sixteenths: batch * 16, ended: 0 }
    }

    #[inline]
    pub(super) fn count(&mut self) {
        self.ended += 1;
        if self.ended >= self.batch {
            self.sample();
        }
    }

    /// The queue is about to commit.
    pub(super) fn idle(&mut self) {
        if self.ended > 0 {
            self.sample();
        }
    }

    fn sample(&mut self) {
        let ended = core::mem::take(&mut self.ended);
        self.sixteenths = (self.sixteenths * (WEIGHT - 1) + ended * 16) / WEIGHT;
    }

    /// A commit took `ns`. Commits are rare if little is mapped, so the latest two make three quarters of the mean.
    pub(super) fn note(&mut self, ns: u64) {
        let before = self.ns;
        self.ns = if before == 0 { ns } else { before / 2 + ns.min(before.saturating_mul(8)) / 2 };
    }

    pub(super) fn ns(&self) -> u64 {
        self.ns
    }

    /// One descriptor's share of a commit, in nanoseconds.
    pub(super) fn share(&self) -> u64 {
        self.ns.saturating_mul(16) / self.sixteenths.max(16)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/dma/adaptive/commits.rs"]
mod tests;
