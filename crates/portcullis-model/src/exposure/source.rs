//! Open translations by name, and their dependencies.
//!
//! An entry of the IOTLB or of a device TLB carries one number, its *mark*: the head of a list of the open translations that end with it.
//! One entry can have several: a large page covers many pages, and devices may share a domain. Each domain has a list of the translations
//! that its tables keep open. All operations are O(1).

use std::num::NonZeroU32;

use portcullis::addr::DomainId;
use rustc_hash::FxHashMap;

use super::page::Links;
use crate::iommu::Context;
use crate::unit::Route;

/// An open translation after the end of its mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SourceId {
    /// Index of the device.
    pub(super) device: usize,
    /// Number of the physical page.
    pub(super) page: u64,
    /// The address that leads to the start of that page.
    pub(super) iova_page: u64,
}

/// Open translations, by what keeps them open.
#[derive(Debug, Default)]
pub(super) struct Dependents {
    /// Those that cached entries keep open.
    marks: Marks,
    /// Those that the tables keep open.
    by_tables: FxHashMap<DomainId, Vec<SourceId>>,
}

impl Dependents {
    /// Records the dependency of an open translation, unless its `links` have it already.
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
            // It is recorded, or (passed through) only a change of context ends it.
            _ => {}
        }
    }

    /// Removes the first translation of a cached entry's list; returns it with the rest of the list.
    pub(super) fn take(&mut self, mark: NonZeroU32) -> (SourceId, Option<NonZeroU32>) {
        self.marks.take(mark)
    }

    /// Removes all that the tables of `domain` led to.
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
    free: Option<NonZeroU32>,
}

impl Marks {
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
