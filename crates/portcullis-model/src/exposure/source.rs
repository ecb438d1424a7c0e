//! Open translations by name, and what they depend on.
//!
//! An entry of the IOTLB or of a device's TLB carries one number, its *mark*: the head of a list of the open translations that end when it
//! goes. Several can hang on one entry: a large page covers many pages, and devices may share a domain. What the
//! tables lead to is in a list for each domain. All operations are O(1).

use std::num::NonZeroU32;

use portcullis::addr::DomainId;
use rustc_hash::FxHashMap;

use super::page::Links;
use crate::iommu::Context;
use crate::unit::Route;

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

/// What is open, by what keeps it open.
#[derive(Debug, Default)]
pub(super) struct Dependents {
    /// What is open because of which cached entry.
    marks: Marks,
    /// What is open because the tables still lead there.
    by_tables: FxHashMap<DomainId, Vec<SourceId>>,
}

impl Dependents {
    /// Notes what an open translation depends on, unless that is noted already in its `links`.
    pub(super) fn note(
        &mut self,
        id: SourceId,
        links: &mut Links,
        context: Option<Context>,
        route: Route<'_>,
    ) {
        match (route, context.and_then(|context| context.domain())) {
            (Route::Cached(mark), _) if !std::mem::replace(&mut links.marked, true) => {
                *mark = Some(self.marks.push(id, *mark));
            }
            (Route::Tables, Some(domain)) if !std::mem::replace(&mut links.listed, true) => {
                self.by_tables.entry(domain).or_default().push(id);
            }
            // It is noted, or (passed through) nothing will be heard of what ends it but a change of context.
            _ => {}
        }
    }

    /// Takes the first of those that hang on a cached entry off its list; with it comes the rest of the list.
    pub(super) fn take(&mut self, mark: NonZeroU32) -> (SourceId, Option<NonZeroU32>) {
        self.marks.take(mark)
    }

    /// Takes all that the tables of `domain` led to.
    pub(super) fn take_list(&mut self, domain: DomainId) -> Vec<SourceId> {
        self.by_tables.remove(&domain).unwrap_or_default()
    }
}

#[derive(Debug)]
struct Node {
    source: SourceId,
    next: Option<NonZeroU32>,
}

/// The lists of all entries, in one slab.
#[derive(Debug, Default)]
struct Marks {
    nodes: Vec<Node>,
    /// The first of the nodes that are free.
    free: Option<NonZeroU32>,
}

impl Marks {
    /// Puts `source` before the list `head` and returns the new head.
    fn push(&mut self, source: SourceId, head: Option<NonZeroU32>) -> NonZeroU32 {
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

    fn take(&mut self, mark: NonZeroU32) -> (SourceId, Option<NonZeroU32>) {
        let node = &mut self.nodes[index(mark)];
        let next = std::mem::replace(&mut node.next, self.free);
        self.free = Some(mark);
        (node.source, next)
    }
}

fn index(mark: NonZeroU32) -> usize {
    mark.get() as usize - 1
}
