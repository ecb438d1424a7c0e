//! Mappings that a commit has ended but not yet reported. Each is reported exactly once.

/// A commit inside an unmap, to make room, cannot report what it ended; nor can a commit before a step that fails. The next commit that can report
/// does.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Mappings in the last report.
    last: usize,
    /// Ended mappings that no report has had.
    untold: usize,
}

impl Told {
    /// Adds `count` mappings that a commit has ended. Returns the number to report: these, and earlier unreported ones.
    pub(super) fn commit(&mut self, count: usize) -> usize {
        self.last = count + core::mem::take(&mut self.untold);
        self.last
    }

    /// The last commit's report was not delivered: the next one repeats it.
    pub(super) fn take_back(&mut self) {
        self.untold += core::mem::take(&mut self.last);
    }

    #[inline]
    pub(super) fn untold(&self) -> usize {
        self.untold
    }
}
