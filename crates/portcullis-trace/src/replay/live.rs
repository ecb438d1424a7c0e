//! A live mapping of the trace.

use portcullis::addr::{Direction, DmaSegment, Iova, PageSize, PhysAddr, PhysSegment};
use portcullis::bounce::pool::Way;
use portcullis::dma::RawMapping;
use portcullis_model::Segment as Piece;
use smallvec::SmallVec;

use super::data::Pattern;
use super::memory::is_pool;

pub(super) type Segments = SmallVec<[PhysSegment; 1]>;
pub(super) type View = SmallVec<[DmaSegment; 1]>;

pub(super) fn to_whole_pages(part: &mut PhysSegment, page: PageSize) {
    let start = part.phys.align_down(page);
    let len = page.round_up(part.phys.page_offset(page).saturating_add(part.len));
    (part.phys, part.len) = (start, len.unwrap_or(part.len));
}

/// Whether the device has the buffer, or a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copied {
    /// The buffer, without a pool.
    No,
    /// By the pool of the domain.
    Pool(Way),
    /// A copy, at an untranslated address.
    Swiotlb,
}

impl Copied {
    /// Whether `reached` may be the device's address for a byte of the buffer at `original`.
    pub(super) fn allows(self, reached: PhysAddr, original: PhysAddr) -> bool {
        match self {
            Self::No | Self::Pool(Way::Direct) => reached == original,
            Self::Pool(Way::Split) => reached == original || is_pool(reached),
            Self::Pool(_) | Self::Swiotlb => is_pool(reached),
        }
    }
}

/// A mapping of the trace that is live, or waits for its commit.
#[derive(Debug)]
pub(super) struct Live {
    pub device: usize,
    pub direction: Direction,
    /// Its lane.
    pub lane: Option<usize>,
    pub memory: Segments,
    pub view: View,
    /// The library's; `None` once it is unmapped.
    pub mapping: Option<RawMapping>,
    pub copied: Copied,
    /// Whether it has a byte of memory twice: then it cannot hold the expected bytes of both places.
    pub overlaps: bool,
    /// The driver's bytes.
    pub pattern: Pattern,
}

impl Live {
    pub(super) fn bytes(&self) -> u64 {
        self.memory.iter().map(|part| part.len).sum()
    }

    /// The mapping for a hostile device. Without translation it needs no address that it was given: it reaches the buffer itself.
    pub(super) fn exposed(&self) -> impl Iterator<Item = Piece> {
        let untranslated = self.copied == Copied::Swiotlb;
        self.pieces().map(move |piece| {
            if untranslated { Piece { iova: Iova::new(piece.phys.get()), ..piece } } else { piece }
        })
    }

    /// The pieces with the bytes from `first` to `end` of the mapping.
    pub(super) fn pieces_between(&self, first: u64, end: u64) -> impl Iterator<Item = Piece> {
        let mut at = 0;
        self.pieces().filter_map(move |piece| {
            let (from, to) = (first.max(at), end.min(at + piece.len));
            let skip = from - at;
            at += piece.len;
            if from >= to {
                return None;
            }
            // Sums inside a piece, which does not wrap.
            let (iova, phys) = (piece.iova.checked_add(skip)?, piece.phys.checked_add(skip)?);
            Some(Piece { iova, phys, len: to - from })
        })
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

pub(super) fn pages(list: &[PhysSegment]) -> u64 {
    let granule = PageSize::SIZE_4K;
    let touched = |part: &PhysSegment| {
        granule.round_up(part.phys.page_offset(granule).saturating_add(part.len)).unwrap_or(u64::MAX)
    };
    list.iter().map(touched).fold(0, u64::saturating_add) / granule.bytes()
}
