//! Commit deadlines of lanes, earliest first.
//!
//! A lane enters with its first pending unmap. After an earlier commit its entry stays until its time; the lane itself then says that it is
//! not due. Cost: O(log n) for n entries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A lane of a device, and its deadline. Sorted by time, then device and lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    pub(super) due_ns: u64,
    pub(super) lane: usize,
    pub(super) device: usize,
}

#[derive(Debug, Default)]
pub(super) struct Dues(BinaryHeap<Reverse<Due>>);

impl Dues {
    pub(super) fn push(&mut self, due: Due) {
        self.0.push(Reverse(due));
    }

    /// Takes the earliest, if it is due by `time_ns`.
    pub(super) fn next(&mut self, time_ns: u64) -> Option<Due> {
        let first = self.0.peek().filter(|first| first.0.due_ns <= time_ns)?.0;
        self.0.pop();
        Some(first)
    }
}
