//! The cost of a ring's commit for each descriptor: its time, divided among the descriptors that end between two commits, even while most of them are
//! copied.

/// The mean number of descriptors is one of about `WEIGHT` samples: older ones fade.
const WEIGHT: u64 = 8;

/// The recent cost of commits, and the number of descriptors that share one.
///
/// Descriptors are counted when they end, whether they were mapped or copied. So it is known how full commits would be if all were mapped, even while
/// all are copied.
#[derive(Debug)]
pub(super) struct Commits {
    batch: u64,
    ns: u64,
    /// Descriptors for each commit, in sixteenths.
    sixteenths: u64,
    /// Descriptors that have ended since the mean took its last sample.
    ended: u64,
}

impl Commits {
    /// Expects full batches of `batch` descriptors.
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

    /// Notes that the queue is idle, and that waiting descriptors are about to be committed.
    pub(super) fn idle(&mut self) {
        if self.ended > 0 {
            self.sample();
        }
    }

    fn sample(&mut self) {
        let ended = core::mem::take(&mut self.ended);
        self.sixteenths = (self.sixteenths * (WEIGHT - 1) + ended * 16) / WEIGHT;
    }

    /// Notes that a commit took `ns`. Commits are rare where little is mapped, so the latest two make three quarters of the mean.
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
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_shared_out_among_as_many_as_there_would_be() {
        let mut commits = Commits::new(32);
        assert_eq!(commits.share(), 0);
        commits.idle();
        commits.note(3200);
        assert_eq!(commits.share(), 100, "as in a full batch");
        for n in 0..400 {
            commits.count();
            if n % 4 == 3 {
                commits.idle();
            }
        }
        assert!((700..=800).contains(&commits.share()), "{}", commits.share());
        (0..100).for_each(|_| commits.idle());
        assert!((700..=800).contains(&commits.share()), "without descriptors it says nothing");
        (0..32 * 100).for_each(|_| commits.count());
        assert!((100..=105).contains(&commits.share()), "{}", commits.share());
    }

    #[test]
    fn a_commit_that_was_interrupted_counts_for_eight_usual_ones_at_most() {
        let mut commits = Commits::new(1);
        commits.note(100);
        commits.note(1_000_000);
        assert_eq!(commits.ns(), 100 / 2 + 8 * 100 / 2);
        commits.note(0);
        assert_eq!(commits.ns(), 225, "and is forgotten soon");
    }

    #[test]
    fn a_clock_that_leaps_overflows_nothing() {
        let mut commits = Commits::new(0);
        (0..3).for_each(|_| commits.note(u64::MAX));
        commits.count();
        assert!(commits.share() > 0);
    }
}
