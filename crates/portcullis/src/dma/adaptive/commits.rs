//! What a commit of a ring costs each of its descriptors.

/// What commits took lately.
#[derive(Debug)]
pub(super) struct Commits {
    batch: u64,
    /// What a commit takes, in nanoseconds.
    ns: u64,
}

impl Commits {
    /// Nothing is known yet.
    pub(super) fn new(batch: usize) -> Self {
        Self { batch: batch.max(1) as u64, ns: 0 }
    }

    /// A commit took `ns`. They are rare where little is mapped, so the latest two count for most.
    pub(super) fn note(&mut self, ns: u64) {
        let before = self.ns;
        self.ns = if before == 0 { ns } else { before / 2 + ns.min(before.saturating_mul(8)) / 2 };
    }

    /// One descriptor's share, in nanoseconds.
    pub(super) fn share(&self) -> u64 {
        // As in a batch that is full: a queue that commits fewer falls idle, and has the time.
        self.ns / self.batch
    }
}
