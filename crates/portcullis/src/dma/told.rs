//! Whom a commit tells. Each mapping that waits for a commit is counted for one caller: the one whose
//! call is told that it is over.

/// What commits have ended, and no caller knows yet.
///
/// A commit that is made inside an unmap, to make room, has no way to say so; nor has one that is followed by
/// a step that fails. What it ended goes on waiting for the driver, until the next commit that can say so.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// What the last commit told its caller.
    last: usize,
    untold: usize,
}

impl Told {
    /// A commit has ended `count` mappings. Returns how many its caller is told of: these, and those before of which none was.
    pub(super) fn commit(&mut self, count: usize) -> usize {
        self.last = count + core::mem::take(&mut self.untold);
        self.last
    }

    /// The caller of the last commit cannot say so: those wait for the next that can.
    pub(super) fn take_back(&mut self) {
        self.untold += core::mem::take(&mut self.last);
    }

    /// How many mappings are over, and no caller knows.
    #[inline]
    pub(super) fn untold(&self) -> usize {
        self.untold
    }
}
