//! When lanes are to be committed, the earliest first.
//!
//! A lane enters when something begins to wait in it. What was committed before its time stays here until then, and is told from
//! what is due by the lane itself. Cost: O(log n) for n lanes with something that waits, and for those.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A lane of a device, and when it is to be committed. In the order of time, and of devices and lanes where that is the same.
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
