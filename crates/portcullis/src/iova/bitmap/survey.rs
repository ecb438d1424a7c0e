//! How much is free up to a page, and how large the largest hole is: part by part, so that a caller can release the
//! bitmap's lock in between.

use super::Bitmap;
use super::fit::LEAF_PAGES;
use super::walk::Walk;

/// The most nodes and leaves of one call: more than a path from the top down has.
const PART: u32 = 32;

/// The free pages of the part that was surveyed. Each page is looked at once: if the bitmap changes between two parts,
/// their figures are of different times.
#[derive(Debug)]
pub struct Survey {
    next: u64,
    end: u64,
    /// Free pages directly before `next`.
    run: u64,
    /// The number of free pages.
    pub free: u64,
    /// Pages of the largest hole, cut off at the end.
    pub largest: u64,
}

impl Survey {
    /// A survey of the pages before `end`.
    pub const fn new(end: u64) -> Self {
        Self { next: 0, end, run: 0, free: 0, largest: 0 }
    }

    /// Counts the pages from the next one to before `to`, all of which are free or used.
    fn count(&mut self, to: u64, is_free: bool) {
        let to = to.min(self.end);
        let pages = to.saturating_sub(self.next);
        self.next = self.next.max(to);
        if is_free {
            self.run += pages;
            self.free += pages;
            self.largest = self.largest.max(self.run);
        } else if pages > 0 {
            self.run = 0;
        }
    }
}

impl Bitmap {
    /// Continues a survey, and returns whether it is complete. Looks at 32 nodes and leaves at most; does not allocate.
    pub fn survey(&self, survey: &mut Survey) -> bool {
        // Pages beyond the tree are used.
        let (end, mut left) = (survey.end.min(self.end()), PART);
        let mut walk = Walk::new(self.root, self.top, survey.next);
        while walk.page() < end {
            let (first, behind) = walk.bounds();
            match self.uniform(walk.node(), walk.level(), walk.block()) {
                Ok(is_free) => survey.count(behind, is_free),
                Err(_) if left == 0 => return false,
                Err(child) => {
                    left -= 1;
                    if walk.level() > 1 {
                        walk.enter(child);
                        continue;
                    }
                    self.survey_leaf(child, first, survey);
                }
            }
            walk.pass_block();
        }
        true
    }

    fn survey_leaf(&self, leaf: u32, base: u64, survey: &mut Survey) {
        for (start, end) in self.store.leaf(leaf).runs() {
            survey.count(base + u64::from(start), false);
            survey.count(base + u64::from(end), true);
        }
        survey.count(base + u64::from(LEAF_PAGES), false);
    }
}
