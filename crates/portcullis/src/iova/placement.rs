//! Which of several fits an allocation gets.

/// The end of the space that is filled first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Placement {
    /// The fit with the highest first page.
    #[default]
    TopDown,
    /// The fit with the lowest first page.
    BottomUp,
}

impl Placement {
    /// The preferred multiple of `2^order` in `[start, end)` with `pages` pages from there to `end`. The
    /// order is less than 64.
    #[inline]
    pub(super) fn within(self, start: u64, end: u64, pages: u64, order: u32) -> Option<u64> {
        let mask = (1_u64 << order) - 1;
        let highest = end.checked_sub(pages)? & !mask;
        match self {
            Self::TopDown => (highest >= start).then_some(highest),
            Self::BottomUp => {
                let lowest = start.checked_add(mask)? & !mask;
                (lowest <= highest).then_some(lowest)
            }
        }
    }
}
