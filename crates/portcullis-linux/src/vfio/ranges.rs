//! The kernel's address ranges of a space, and a mapper's geometry.

use portcullis::addr::{Iova, IovaRange, PageSize, PageSizes};
use portcullis::mapper::Geometry;

use super::limits::page_size;

/// The kernel's limits of an address space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    pub allowed: Vec<IovaRange>,
    /// Page sizes, a bit each. The lowest is the alignment of mappings.
    pub page_sizes: u64,
    /// The most mappings, if they are limited.
    pub most_mappings: Option<u64>,
}

impl Ranges {
    /// The geometry of a mapper: from the first address to the last, with the gaps reserved. Its pages are at least the process's, of
    /// `page` bytes. `None` if the kernel allows nothing.
    pub fn geometry(&self, page: u64) -> Option<Geometry> {
        let mut allowed = self.allowed.clone();
        allowed.sort_by_key(|range| range.start());
        let (first, last) = (allowed.first()?, allowed.iter().map(|range| range.last()).max()?);
        let granule = (1_u64 << self.page_sizes.trailing_zeros().min(63)).max(page);
        let sizes = (0..u64::BITS)
            .filter(|shift| (self.page_sizes | granule) >> shift & 1 == 1 && 1 << shift >= granule);
        let page_sizes = sizes.filter_map(PageSize::from_shift).fold(PageSizes::default(), PageSizes::with);
        page_sizes.smallest()?;
        let mut reserved = Vec::new();
        let mut next = first.start();
        for range in &allowed {
            if range.start() > next {
                let before = Iova::new(range.start().get() - 1);
                reserved.extend(IovaRange::from_bounds(next, before));
            }
            next = next.max(Iova::new(range.last().get().saturating_add(1)));
        }
        let aperture = IovaRange::from_bounds(first.start(), last).ok()?;
        Some(Geometry { aperture, page_sizes, reserved })
    }

    /// Whether all of `geometry` is allowed.
    pub fn allow(&self, geometry: &Geometry) -> bool {
        let Some(own) = self.geometry(1) else { return false };
        let holes = || own.reserved.iter().filter_map(|hole| common(*hole, geometry.aperture));
        own.aperture.contains_range(geometry.aperture)
            && own.page_sizes.smallest() <= geometry.page_sizes.smallest()
            && holes().all(|hole| geometry.reserved.iter().any(|reserved| reserved.contains_range(hole)))
    }
}

/// The range from `first` to `last`, as a kernel gives it; `None` if it is empty. Leaves out the last page of all 64 bits, whose total
/// length has 65 bits. (AMD's IOMMU reports them all.)
pub fn from_kernel(first: u64, last: u64) -> Option<IovaRange> {
    let last = last.min(u64::MAX - page_size());
    IovaRange::from_bounds(Iova::new(first), Iova::new(last)).ok()
}

/// The intersection.
pub fn common(one: IovaRange, other: IovaRange) -> Option<IovaRange> {
    IovaRange::from_bounds(one.start().max(other.start()), one.last().min(other.last())).ok()
}
