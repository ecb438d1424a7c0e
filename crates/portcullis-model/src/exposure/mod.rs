//! The exposure ledger: bytes that a device could reach although no mapping covered them, and for how long.
//!
//! For each device and physical page, of the size of [`IommuConfig::exposure_page`](crate::IommuConfig::exposure_page), at any instant:
//! - *live* is the union of the byte ranges of the mappings that the caller has declared and not ended;
//! - *stale* is the union of the ranges of ended mappings whose translation is still open, minus live. A translation is open from the end
//!   of its mapping for as long as the old address still leads to the old page: until the entry is replaced or invalidated, in the IOTLB
//!   and in the device TLB, or, if the tables themselves still lead there, until the first invalidation of the domain after which they do
//!   not. A device that passes through never loses access to what was once mapped for it;
//! - *neighbour* is the rest of a page with live or stale bytes, if a probe at the time of the mapping found that the bytes beside the
//!   buffer could be reached through its translation. (A bounced buffer is reached through another page, so it has no neighbours.)
//!
//! The ledger integrates both over time, in byte-nanoseconds, settling a page whenever its figures change. The caller provides the time:
//! monotonic nanoseconds.
//!
//! Cost: O(1) per page mapped or unmapped (a hash lookup, and the ranges in that page), O(1) for an IOTLB entry that was not stale. Memory:
//! the pages that are open now.

mod one;
mod page;
mod ranges;
mod source;
mod spans;

use std::collections::hash_map::Entry;

use portcullis::addr::{DomainId, Iova, PageSize, PhysAddr};
use rustc_hash::FxHashMap;

use crate::iommu::Context;
use crate::unit::Unit;
use page::{Links, Page, Rates};
use source::{Dependents, SourceId};
use spans::Span;

/// A run of bytes of a mapping: its device address and its buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The device's address.
    pub iova: Iova,
    /// The buffer's own address, also if it is bounced.
    pub phys: PhysAddr,
    /// Bytes.
    pub len: u64,
}

/// Bytes that a device could reach although no mapping covered them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exposed {
    /// Bytes of ended mappings, times nanoseconds.
    pub stale_byte_ns: u128,
    /// Bytes beside a buffer in its page, times nanoseconds.
    pub neighbour_byte_ns: u128,
    /// The longest time that the bytes of one ended mapping stayed open.
    pub longest_stale_ns: u64,
}

impl Exposed {
    fn add(&mut self, rates: Rates, page_bytes: u64, time: u64) {
        let neighbours = rates.beside.map_or(0, |reached| page_bytes.saturating_sub(reached.into()));
        self.stale_byte_ns += u128::from(rates.stale) * u128::from(time);
        self.neighbour_byte_ns += u128::from(neighbours) * u128::from(time);
    }
}

/// One device's pages.
#[derive(Debug, Default)]
struct Ledger {
    pages: FxHashMap<u64, Page>,
    settled: Exposed,
}

/// The ledgers of all devices.
#[derive(Debug)]
pub(crate) struct Exposure {
    page: PageSize,
    now: u64,
    ledgers: Vec<Ledger>,
    dependents: Dependents,
}

/// A piece of a segment inside one physical page.
#[derive(Debug, Clone, Copy)]
struct Piece {
    page: u64,
    span: Span,
    iova: Iova,
    phys: PhysAddr,
}

impl Piece {
    /// The address that leads to the start of the page, if the translation keeps offsets in the page.
    fn iova_page(self) -> u64 {
        self.iova.get().wrapping_sub(u64::from(self.span.start))
    }
}

impl Exposure {
    /// An empty ledger of pages of size `page`.
    pub(crate) fn new(page: PageSize) -> Self {
        Self { page, now: 0, ledgers: Vec::new(), dependents: Dependents::default() }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.ledgers.iter().map(|ledger| ledger.pages.len() as u64).sum()
    }

    pub(crate) fn set_time(&mut self, time: u64) {
        self.now = self.now.max(time);
    }

    /// A live mapping of `segment` begins.
    pub(crate) fn mapped(
        &mut self,
        unit: &mut Unit,
        context: Option<Context>,
        device: usize,
        segment: Segment,
    ) {
        let mut reaches = |iova: Option<Iova>, phys: Option<PhysAddr>| match (iova, phys) {
            (Some(iova), Some(phys)) => unit.route(device, context, iova, phys).is_some(),
            _ => false,
        };
        let (now, page_bytes) = (self.now, self.page.bytes());
        let ledger = ledger(&mut self.ledgers, device);
        for piece in pieces(segment, self.page) {
            let Piece { span, iova, phys, .. } = piece;
            let neighbour = span.start > 0
                && reaches(before(iova), phys.get().checked_sub(1).map(PhysAddr::new))
                || u64::from(span.end) < page_bytes
                    && reaches(iova.checked_add(span.len().into()), phys.checked_add(span.len().into()));
            let page = ledger.pages.entry(piece.page).or_insert_with(|| Page::new(now));
            page.settle(now, page_bytes, &mut ledger.settled);
            let closed = page.begin(piece.iova_page(), span, neighbour, now);
            ledger.settled.longest_stale_ns = ledger.settled.longest_stale_ns.max(closed);
        }
    }

    /// The live mapping of `segment` has ended. Returns how many pages of it can still be reached.
    pub(crate) fn unmapped(
        &mut self,
        unit: &mut Unit,
        context: Option<Context>,
        device: usize,
        segment: Segment,
    ) -> u64 {
        let mut reached = 0;
        let (now, page_bytes) = (self.now, self.page.bytes());
        let Ledger { pages, settled } = ledger(&mut self.ledgers, device);
        for piece in pieces(segment, self.page) {
            let route = unit.route(device, context, piece.iova, piece.phys);
            let open = route.is_some();
            reached += u64::from(open);
            let id = SourceId { device, page: piece.page, iova_page: piece.iova_page() };
            let mut entry = match pages.entry(piece.page) {
                Entry::Occupied(entry) => entry,
                Entry::Vacant(entry) => entry.insert_entry(Page::new(now)),
            };
            let page = entry.get_mut();
            page.settle(now, page_bytes, settled);
            let closed = page.end(id.iova_page, piece.span, now, open);
            settled.longest_stale_ns = settled.longest_stale_ns.max(closed);
            if let (Some(route), Some(links)) = (route, page.links(id.iova_page)) {
                self.dependents.note(id, links, context, route);
            }
            if page.is_closed() {
                entry.remove();
            }
        }
        reached
    }

    /// Closes the translations of evicted entries whose handles the unit has collected.
    pub(crate) fn entries_released(&mut self, unit: &mut Unit, contexts: &[Option<Context>]) {
        while let Some(mark) = unit.released.pop() {
            let mut next = Some(mark);
            while let Some(mark) = next {
                let (id, after) = self.dependents.take(mark);
                self.check_again(unit, contexts, id, |links| links.marked = false);
                next = after;
            }
        }
    }

    /// An invalidation of `domain` has been executed: probes what its tables still lead to.
    pub(crate) fn domain_invalidated(
        &mut self,
        unit: &mut Unit,
        contexts: &[Option<Context>],
        domain: DomainId,
    ) {
        let listed = self.dependents.take_list(domain);
        // All of them first: one that is listed twice is then listed once.
        for &id in &listed {
            if let Some(links) = links(&mut self.ledgers, id) {
                links.listed = false;
            }
        }
        for id in listed {
            self.check_again(unit, contexts, id, |_| ());
        }
    }

    /// The device has another context, or none: probes everything that was open to it.
    pub(crate) fn context_changed(&mut self, unit: &mut Unit, contexts: &[Option<Context>], device: usize) {
        let Some(ledger) = self.ledgers.get_mut(device) else { return };
        let mut open = Vec::new();
        for (&page, state) in &mut ledger.pages {
            state.unlink_all(|iova_page| open.push(SourceId { device, page, iova_page }));
        }
        for id in open {
            self.check_again(unit, contexts, id, |_| ());
        }
    }

    pub(crate) fn of(&self, device: usize) -> Exposed {
        let Some(ledger) = self.ledgers.get(device) else { return Exposed::default() };
        let mut exposed = ledger.settled;
        for page in ledger.pages.values() {
            page.account(self.now, self.page.bytes(), &mut exposed);
            exposed.longest_stale_ns = exposed.longest_stale_ns.max(page.longest_open(self.now));
        }
        exposed
    }

    pub(crate) fn total(&self) -> Exposed {
        (0..self.ledgers.len()).map(|device| self.of(device)).fold(Exposed::default(), |sum, one| Exposed {
            stale_byte_ns: sum.stale_byte_ns + one.stale_byte_ns,
            neighbour_byte_ns: sum.neighbour_byte_ns + one.neighbour_byte_ns,
            longest_stale_ns: sum.longest_stale_ns.max(one.longest_stale_ns),
        })
    }

    /// Probes an open translation again, once it is `unlinked`; closes it if it leads nowhere, or records its new dependency.
    fn check_again(
        &mut self,
        unit: &mut Unit,
        contexts: &[Option<Context>],
        id: SourceId,
        unlink: impl FnOnce(&mut Links),
    ) {
        let (now, page_bytes) = (self.now, self.page.bytes());
        let Some(Ledger { pages, settled }) = self.ledgers.get_mut(id.device) else { return };
        let Entry::Occupied(mut entry) = pages.entry(id.page) else { return };
        let page = entry.get_mut();
        let Some(links) = page.links(id.iova_page) else { return };
        unlink(links);
        let context = contexts.get(id.device).copied().flatten();
        let phys = PhysAddr::new(id.page * page_bytes);
        if let Some(route) = unit.route(id.device, context, Iova::new(id.iova_page), phys) {
            return self.dependents.note(id, links, context, route);
        }
        page.settle(now, page_bytes, settled);
        let closed = page.close(id.iova_page, now);
        settled.longest_stale_ns = settled.longest_stale_ns.max(closed);
        if page.is_closed() {
            entry.remove();
        }
    }
}

/// The links of the open translation `id`; `None` if it is not open.
fn links(ledgers: &mut [Ledger], id: SourceId) -> Option<&mut Links> {
    ledgers.get_mut(id.device)?.pages.get_mut(&id.page)?.links(id.iova_page)
}

fn ledger(ledgers: &mut Vec<Ledger>, device: usize) -> &mut Ledger {
    if ledgers.len() <= device {
        ledgers.resize_with(device + 1, Ledger::default);
    }
    &mut ledgers[device]
}

fn before(iova: Iova) -> Option<Iova> {
    iova.get().checked_sub(1).map(Iova::new)
}

/// The pieces of a segment in each physical page, as far as its addresses exist.
fn pieces(segment: Segment, page: PageSize) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= segment.len {
            return None;
        }
        let (iova, phys) = (segment.iova.checked_add(done)?, segment.phys.checked_add(done)?);
        let start = phys.page_offset(page);
        let len = (page.bytes() - start).min(segment.len - done);
        done += len;
        Some(Piece {
            page: phys.get() / page.bytes(),
            span: Span { start: start as u32, end: (start + len) as u32 },
            iova,
            phys,
        })
    })
}
