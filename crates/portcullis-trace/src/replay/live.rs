//! A mapping of the trace that is alive.

use portcullis::addr::{Direction, PageSize};
use portcullis::dma::{DmaSegment, RingMapping};
use portcullis::domain::PhysSegment;
use portcullis_model::Segment as Piece;
use smallvec::SmallVec;

pub(super) type Segments = SmallVec<[PhysSegment; 1]>;
pub(super) type View = SmallVec<[DmaSegment; 1]>;

/// How a mapping was made, and so how it ends.
#[derive(Debug)]
pub(super) enum Way {
    /// By the device's own calls, at once.
    Alone,
    /// By the device's own calls, and into the batch of a lane.
    Batch,
    /// In the ring of a lane.
    Ring(RingMapping),
}

/// A mapping of the trace that is alive, or waits for its commit.
#[derive(Debug)]
pub(super) struct Live {
    pub device: usize,
    pub direction: Direction,
    /// In which of the device's lanes it waits after its unmap.
    pub lane: Option<usize>,
    pub memory: Segments,
    pub view: View,
    pub way: Way,
}

impl Live {
    pub(super) fn pages(&self) -> u64 {
        pages(&self.memory)
    }

    /// The mapping in pieces that are contiguous on both sides, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let mut memory = self.memory.iter().copied();
        let mut view = self.view.iter().copied();
        let (mut part, mut segment) = (memory.next(), view.next());
        std::iter::from_fn(move || {
            let (here, there) = (part?, segment?);
            let len = here.len.min(there.len);
            let piece = Piece { iova: there.iova, phys: here.phys, len };
            part = match here.phys.checked_add(len) {
                Some(phys) if here.len > len => Some(PhysSegment { phys, len: here.len - len }),
                _ => memory.next(),
            };
            segment = match there.iova.checked_add(len) {
                Some(iova) if there.len > len => Some(DmaSegment { iova, len: there.len - len }),
                _ => view.next(),
            };
            Some(piece)
        })
    }
}

/// Pages that `list` touches, one segment after another.
pub(super) fn pages(list: &[PhysSegment]) -> u64 {
    let granule = PageSize::SIZE_4K;
    let touched = |part: &PhysSegment| {
        granule.round_up(part.phys.page_offset(granule).saturating_add(part.len)).unwrap_or(u64::MAX)
    };
    list.iter().map(touched).fold(0, u64::saturating_add) / granule.bytes()
}
