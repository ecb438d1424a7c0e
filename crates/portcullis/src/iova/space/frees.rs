//! Frees. Only a whole allocation can be freed; everything else is refused and changes nothing.

use super::IovaSpace;
use crate::addr::IovaRange;
use crate::iova::bitmap::MAX_ORDER;
use crate::iova::cached::Own;
use crate::iova::class::Class;
use crate::iova::config::IovaError;
use crate::platform::{LocalCpu, Platform};

impl IovaSpace {
    /// Frees a range, as it was handed out.
    ///
    /// O(1), onto the CPU's list, or into a remote batch for its owner. If the CPU's budget is used up, up to 64 ranges
    /// are freed to the bitmap first, at O(log n) each under the space's lock. A range of more than 512 granules goes
    /// there at once ([`Bitmap::free`](crate::iova::Bitmap::free)).
    ///
    /// Context: never allocates, never fails for such a range, and never waits for hardware.
    ///
    /// # Errors
    /// [`IovaError::NotAllocated`] for anything but a whole range that is handed out: for a part of one, even if only a
    /// part of its last granule is missing, and for one that was freed before. Nothing is changed then. (If two CPUs
    /// free one range at the same time, both calls may return `Ok`.)
    #[inline]
    pub fn free<P: Platform>(&self, platform: &P, range: IovaRange) -> Result<(), IovaError> {
        // A range of another CPU, or one whose word is not remembered, is freed in the same exclusive section.
        let free =
            |cpu: &LocalCpu<'_>| self.in_turn(cpu, |_, own| Some(self.free_local(Some(own?), range)))?;
        let freed = match self.platform.with_cpu_fast(platform, free) {
            Some(Some(freed)) => freed,
            _ => self.free_slowly(platform, range),
        };
        if freed { Ok(()) } else { Err(IovaError::NotAllocated { range }) }
    }

    /// Returns a `bool`, as the fast path would have to reserve memory for a `Result`.
    #[cold]
    #[inline(never)]
    fn free_slowly<P: Platform>(&self, platform: &P, range: IovaRange) -> bool {
        let free =
            |cpu: Option<&LocalCpu<'_>>| self.with_own(cpu, |_, own| self.free_local_slowly(own, range));
        self.platform.with_cpu(platform, free)
    }

    /// As [`free`](Self::free), for a caller that is in its exclusive section, if it has one. Returns whether the range
    /// was freed.
    #[inline]
    pub(crate) fn free_local(&self, own: Option<Own<'_>>, range: IovaRange) -> bool {
        own.is_some_and(|own| self.put(own, range)) || self.free_local_slowly(own, range)
    }

    #[inline(always)]
    pub(crate) fn put(&self, own: Own<'_>, range: IovaRange) -> bool {
        self.parts_of(range).is_some_and(|(page, pages, class)| self.cached.put(own, page, pages, class))
    }

    /// The first page, the pages and the class of a range that the lists may take.
    #[inline(always)]
    fn parts_of(&self, range: IovaRange) -> Option<(u64, u64, Class)> {
        // The rotation moves bits below the granule to the top: a length with such bits exceeds every class, and a
        // start with such bits exceeds every page.
        let pages = range.len().rotate_right(self.shift);
        let class = Class::of_pages(pages.wrapping_sub(1))?;
        Some((range.start().get().rotate_right(self.shift), pages, class))
    }

    #[cold]
    #[inline(never)]
    fn free_local_slowly(&self, own: Option<Own<'_>>, range: IovaRange) -> bool {
        own.is_some_and(|own| self.post(own, range)) || self.free_any(own, range)
    }

    /// As in `put`, into the remote batch of the range's CPU.
    #[inline]
    fn post(&self, own: Own<'_>, range: IovaRange) -> bool {
        self.parts_of(range).is_some_and(|(page, pages, class)| self.cached.post(own, page, pages, class))
    }

    #[cold]
    #[inline(never)]
    fn free_any(&self, own: Option<Own<'_>>, range: IovaRange) -> bool {
        let Ok((pages, order)) = self.class(range.len()) else { return false };
        let page = range.start().get() >> self.shift;
        let is_natural = page.trailing_zeros() >= order.min(MAX_ORDER);
        let is_whole = (range.start().get() | range.len()) & self.granule.offset_mask() == 0;
        is_natural && is_whole && self.cached.free(own, &self.bitmap, page, pages, order)
    }

    /// Returns the live range that contains `part`, whole granules, unless it is [divided](Self::divide).
    pub(crate) fn whole_of(&self, part: IovaRange) -> Option<IovaRange> {
        let is_whole = (part.start().get() | part.len()) & self.granule.offset_mask() == 0;
        let found = self.cached.whole_of(part.start().get() >> self.shift, part.len() >> self.shift);
        found.filter(|_| is_whole).map(|(page, pages)| self.range(page, pages))
    }

    /// Marks a live range as divided: unmapping its parts does not free it. Returns `false` if it is no longer handed
    /// out.
    pub(crate) fn divide(&self, range: IovaRange) -> bool {
        self.cached.divide(range.start().get() >> self.shift, range.len().div_ceil(self.granule.bytes()))
    }
}
