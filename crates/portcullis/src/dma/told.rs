//! The account of mappings that commits have ended and no caller was told of. Each mapping that waits for a commit is reported to one caller.

/// Mappings that commits have ended, and that are not reported yet.
///
/// A commit inside an unmap, to make room, cannot report them; nor can a commit before a step that fails. They go on waiting for the
/// driver, until the next commit that can report them.
#[derive(Debug, Default)]
pub(super) struct Told {
    last: usize,
    untold: usize,
}

impl Told {
    /// A commit has ended `count` mappings. Returns the number to report: these, and earlier unreported ones.
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
