//! Open translations by name, and the lists of those that hang on an IOTLB entry.
//!
//! An IOTLB entry carries one number, its *mark*: the head of a list of the open translations that end when it
//! goes. Several can hang on one entry: a large page covers many pages, and devices may share a domain. All
//! operations are O(1).

use std::num::NonZeroU32;

/// An open translation after the end of its mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SourceId {
    /// The device's place in the order of devices.
    pub(super) device: usize,
    /// The number of the physical page.
    pub(super) page: u64,
    /// The address that leads to the start of that page.
    pub(super) iova_page: u64,
}

#[derive(Debug)]
struct Node {
    source: SourceId,
    next: Option<NonZeroU32>,
}

/// The lists of all entries, in one slab.
#[derive(Debug, Default)]
pub(super) struct Marks {
    nodes: Vec<Node>,
    /// The first of the nodes that are free.
    free: Option<NonZeroU32>,
}

impl Marks {
    /// Puts `source` before the list `head` and returns the new head.
    pub(super) fn push(&mut self, source: SourceId, head: Option<NonZeroU32>) -> NonZeroU32 {
        let node = Node { source, next: head };
        if let Some(mark) = self.free {
            let place = &mut self.nodes[index(mark)];
            self.free = place.next;
            *place = node;
            return mark;
        }
        self.nodes.push(node);
        // As many as open translations; memory ends long before 2^32 of them.
        NonZeroU32::new(self.nodes.len() as u32).unwrap_or(NonZeroU32::MAX)
    }

    /// Takes the first of a list off it; with it comes the rest of the list.
    pub(super) fn take(&mut self, mark: NonZeroU32) -> (SourceId, Option<NonZeroU32>) {
        let node = &mut self.nodes[index(mark)];
        let next = std::mem::replace(&mut node.next, self.free);
        self.free = Some(mark);
        (node.source, next)
    }
}

fn index(mark: NonZeroU32) -> usize {
    mark.get() as usize - 1
}
