//! The place of a coloured ring in its range, which always has room for the ring.
//! [`RingConfig::colour`](super::RingConfig::colour) has the argument for it.

const STRIDE: u64 = 5;
/// The sets of a paging-structure cache among which colours always spread rings.
const TABLE_SETS: u64 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// The size of the range: whole large pages, fewer granules than 2^32 plus those of 16 large pages.
    pub range: u64,
    pub base: u64,
    /// Where the ring begins in the smallest range that it fits in.
    pub skew: u64,
    /// The position of the first reservation in the ring.
    pub position: u64,
}

/// The layout of a ring of `granules`, a multiple of `unit`, with `per_large` in a large page. None of these is 0, and
/// all are at most 2^31.
///
/// The base separates rings in every lap, the first position only while they move in step.
pub(super) fn layout(colour: Option<u32>, unit: u64, granules: u64, per_large: u64) -> Layout {
    let Some(colour) = colour.map(u64::from) else {
        return Layout { range: granules.next_multiple_of(per_large), base: 0, skew: 0, position: 0 };
    };
    // Descriptors of whole large pages are mapped, and cached, as such: move them by whole ones.
    let (skew, fine) = if unit.is_multiple_of(per_large) {
        (colour * per_large % unit, 0)
    } else {
        (colour * STRIDE % unit, colour * STRIDE)
    };
    let large = (skew + granules).div_ceil(per_large);
    // The range is aligned to this many large pages, or to all the sets if those are more.
    let aligned = large.next_power_of_two();
    let spread = large.max(TABLE_SETS);
    let first = colour % spread;
    // The ring lies in the part of the range that has the first large page, and starts inside it.
    let part = first - first % aligned;
    let position = (first - part) * per_large + fine;
    Layout {
        range: spread * per_large,
        base: part * per_large + skew,
        skew,
        position: position / unit * unit % granules,
    }
}

#[cfg(test)]
#[path = "../../../tests/inside/iova/arena/colour.rs"]
mod tests;
