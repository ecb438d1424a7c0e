//! The token of a mapping, and the results of its unmap.

use alloc::vec::Drain;
use core::convert::Infallible;
use core::mem::ManuallyDrop;
use core::num::NonZeroU64;

use super::DmaBuffer;
use crate::addr::{Iova, IovaRange, PageSize, PhysSegment};
use crate::bounce::error::DmaUnmapError;
use crate::bounce::pool::{PoolMapping, Way};
use crate::broken::broken;
use crate::domain::MapListError;
use crate::sync::unique;

/// How a device gets a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Through a bounce buffer that stays mapped.
    Copy,
    /// Through the IOMMU, not copied.
    Map,
}

impl Choice {
    #[inline]
    pub(super) fn of(way: Way) -> Self {
        match way {
            Way::Slot | Way::SingleUse => Self::Copy,
            Way::Split | Way::Direct => Self::Map,
        }
    }

    pub(super) const fn other(self) -> Self {
        match self {
            Self::Copy => Self::Map,
            Self::Map => Self::Copy,
        }
    }
}

/// A mapping by address. Its [`Queue`](super::Queue::unmap_raw) unmaps it, or, with the feature `parts`, its `StrictRing` or `AdaptiveRing`.
///
/// It cannot be copied, so each is unmapped once. **If it is dropped, the device keeps its access**, as with a [`Mapping`].
// Store forwarding: a load that combines several stores, such as an enum's tag and its bytes, stalls for about 15 cycles. So all mappings have the
// same words, which a map stores and an unmap loads one by one. If an unmap passed the mapping's address to a function, the compiler would first copy
// the mapping, two words in a load.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a mapping that is dropped stays open to the device: give it to `unmap_raw` of its queue"]
pub struct RawMapping {
    pub(super) iova: Iova,
    /// Its meaning depends on the [kind](Kind): [pages](Self::in_pages), a length, or an index.
    pub(super) word: u64,
    /// The number of the queue, with the [kind](Kind) in its lowest bits.
    pub(super) tag: u64,
}

/// The bits of a tag below the number of a queue.
const KIND_BITS: u32 = 16;

/// A number that no other queue has, with its [lowest bits](KIND_BITS) 0. (No program makes 2^48 queues.)
pub(super) fn number() -> u64 {
    unique() << KIND_BITS
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// In a ring. The word has the pages.
    Ring,
    /// Without a ring or a pool. The word has the pages.
    Alone,
    /// In a ring, with slots in place of its ends. The word has the pages, and the number of the list in place of the neighbour bytes.
    Cut,
    /// By the domain's pool. The word is the length.
    Pool(Way),
    /// By the pool of a machine without an IOMMU. The word is the length of one piece, or the index of a list in the queue.
    Swiotlb { is_list: bool },
    /// By a queue of a non-coherent device, which keeps a record of each mapping. The word is the record's index.
    NotCoherent,
}

impl Kind {
    // Fast paths compare a tag with `number | RING` or `number | ALONE` in one step, so an untimed mapping of these kinds has no other bits.
    pub(super) const RING: u64 = 0;
    pub(super) const ALONE: u64 = 1;
    const CUT: u64 = 2;
    const POOL: u64 = 3;
    const SWIOTLB: u64 = 4;
    const NOT_COHERENT: u64 = 5;
    // Bits of a tag: 0-2 kind; 3-5 way; 6-7 timed; 8-15 class; 16-63 number of the queue.
    const WAY: u32 = 3;
    const TIMED: u32 = 6;
    const CLASS: u32 = 8;

    #[inline]
    pub(super) fn bits(self) -> u64 {
        match self {
            Self::Ring => Self::RING,
            Self::Alone => Self::ALONE,
            Self::Cut => Self::CUT,
            Self::Pool(way) => Self::POOL | (way as u64) << Self::WAY,
            Self::Swiotlb { is_list } => Self::SWIOTLB | u64::from(is_list) << Self::WAY,
            Self::NotCoherent => Self::NOT_COHERENT,
        }
    }

    #[inline]
    fn of(bits: u64) -> Option<Self> {
        let number = bits >> Self::WAY & 7;
        match bits & 7 {
            Self::RING => Some(Self::Ring),
            Self::ALONE => Some(Self::Alone),
            Self::CUT => Some(Self::Cut),
            Self::POOL => Way::ALL.get(number as usize).copied().map(Self::Pool),
            Self::SWIOTLB => Some(Self::Swiotlb { is_list: number == 1 }),
            Self::NOT_COHERENT => Some(Self::NotCoherent),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn choice(self) -> Choice {
        match self {
            Self::Pool(way) => Choice::of(way),
            Self::Swiotlb { .. } => Choice::Copy,
            Self::Ring | Self::Alone | Self::Cut | Self::NotCoherent => Choice::Map,
        }
    }

    #[inline]
    pub(super) fn is_in_ring(self) -> bool {
        matches!(self, Self::Ring | Self::Cut)
    }
}

impl RawMapping {
    /// A word with pages: bits 0-31 are the neighbour bytes (of the granules, not the buffer's), 32-63 the number of 4 KiB pages.
    const PAGES: u32 = 32;
    /// Shifts the length of the granules, whose low 12 bits are 0 (a granule has 4 KiB or more), to the number of pages at bit 32.
    const UP: u32 = Self::PAGES - PageSize::SIZE_4K.shift();

    /// Checks that a list of `used` bytes, whose granules have `bytes`, fits into a mapping's word.
    #[inline]
    pub(super) fn fits(bytes: u64, used: u64) -> Result<(), MapListError> {
        let beside = bytes.saturating_sub(used);
        if bytes >> (u64::BITS - Self::UP) == 0 && beside >> Self::PAGES == 0 {
            return Ok(());
        }
        Err(MapListError::TooLarge { bytes, beside })
    }

    /// Makes a mapping of `used` bytes in the pages of `range`, which it [fits](Self::fits). The first byte is at `iova`.
    #[inline]
    pub(super) fn in_pages(iova: Iova, range: IovaRange, used: u64, tag: u64) -> Self {
        let bytes = range.len();
        debug_assert!(Self::fits(bytes, used).is_ok());
        Self { iova, word: bytes << Self::UP | bytes.saturating_sub(used), tag }
    }

    #[inline]
    pub(super) fn untranslated(iova: Iova, tag: u64) -> Self {
        Self { iova, word: 0, tag }
    }

    #[inline]
    pub(super) fn of_pool(mapping: &PoolMapping<'_>, queue: u64) -> Self {
        Self { iova: mapping.iova(), word: mapping.len(), tag: queue | Kind::Pool(mapping.way()).bits() }
    }

    /// The pages, of a kind whose word has them, in a domain of this granule; `None` without translation.
    #[inline]
    pub(super) fn pages(&self, granule: PageSize) -> Option<IovaRange> {
        let bytes = NonZeroU64::new(self.word >> Self::PAGES << PageSize::SIZE_4K.shift())?;
        Some(IovaRange::inside(Iova::new(self.iova.get() & !granule.offset_mask()), bytes))
    }

    #[inline]
    pub(super) fn beside(&self) -> u64 {
        u64::from(self.list())
    }

    /// The number of the list of a [cut](Kind::Cut) mapping.
    #[inline]
    pub(super) fn list(&self) -> u32 {
        self.word as u32
    }

    /// Turns a mapping in the ring into the [cut](Kind::Cut) mapping of list `number`.
    pub(super) fn cut(self, number: u32) -> Self {
        debug_assert_eq!(self.beside(), 0);
        let word = self.word >> Self::PAGES << Self::PAGES | u64::from(number);
        Self { word, tag: self.queue() | Kind::CUT, ..self }
    }

    pub(super) fn uncut(self) -> Self {
        Self { word: self.word >> Self::PAGES << Self::PAGES, tag: self.queue() | Kind::RING, ..self }
    }

    #[inline]
    pub(super) fn kind(&self) -> Kind {
        Kind::of(self.tag).unwrap_or_else(|| broken("a mapping says how it was made"))
    }

    /// If its map was timed: the class and the choice to whose cost its unmap's time is added.
    #[inline]
    pub(super) fn timed(&self) -> Option<(u8, Choice)> {
        let choice = match self.tag >> Kind::TIMED & 3 {
            0 => return None,
            1 => Choice::Copy,
            _ => Choice::Map,
        };
        Some(((self.tag >> Kind::CLASS) as u8, choice))
    }

    pub(super) fn with_timed(self, timed: Option<(u8, Choice)>) -> Self {
        let bits = timed.map_or(0, |(class, choice)| {
            let choice = if choice == Choice::Copy { 1 } else { 2 };
            choice << Kind::TIMED | u64::from(class) << Kind::CLASS
        });
        let kind = self.tag & ((1 << Kind::TIMED) - 1);
        Self { tag: self.queue() | kind | bits, ..self }
    }

    #[inline]
    pub(super) fn queue(&self) -> u64 {
        self.tag >> KIND_BITS << KIND_BITS
    }

    /// The address of the first byte for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// The pages, in a domain of this [granule](crate::domain::Domain::granule). `None` for what a pool or a queue of a non-coherent device made, and
    /// without translation.
    #[cfg(feature = "parts")]
    pub fn range(&self, granule: PageSize) -> Option<IovaRange> {
        match self.kind() {
            Kind::Ring | Kind::Alone | Kind::Cut => self.pages(granule),
            Kind::Pool(_) | Kind::Swiotlb { .. } | Kind::NotCoherent => None,
        }
    }

    /// How the pool of bounce buffers mapped it, if it did; [`Way::Split`] also in a ring, if the ends are copied.
    #[cfg(feature = "parts")]
    pub fn way(&self) -> Option<Way> {
        self.way_of_pool()
    }

    pub(super) fn way_of_pool(&self) -> Option<Way> {
        match self.kind() {
            Kind::Pool(way) => Some(way),
            Kind::Cut => Some(Way::Split),
            Kind::Alone | Kind::Ring | Kind::Swiotlb { .. } | Kind::NotCoherent => None,
        }
    }
}

/// An open mapping, with the buffer that it gives the device.
///
/// **A dropped mapping stays open**: only [`Queue::unmap`](super::Queue::unmap) ends it, not the end of the queue. The device reaches the buffer, or
/// its copy, as long as it is attached to the domain. The buffer is leaked, so its memory gets no other owner; its addresses, and its place in a ring,
/// stay taken.
#[derive(Debug)]
#[must_use = "a mapping that is dropped stays open to the device, and its buffer is leaked: give it to `Queue::unmap`"]
pub struct Mapping<B: DmaBuffer> {
    pub(super) raw: RawMapping,
    /// Given back or dropped only after the mapping has ended by its policy.
    pub(super) buffer: ManuallyDrop<B>,
}

impl<B: DmaBuffer> Mapping<B> {
    /// The address of the buffer's first byte for the device. For a buffer of several pieces see
    /// [`Queue::segments`](super::Queue::segments).
    #[inline]
    pub fn iova(&self) -> Iova {
        self.raw.iova()
    }

    /// Bytes of the buffer.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a mapping holds at least one byte")]
    pub fn len(&self) -> u64 {
        self.buffer.segments().iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.len))
    }

    /// The buffer, which the device may be changing. After the device is done, call [`sync_for_cpu`](super::Queue::sync_for_cpu) first.
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// How the pool of bounce buffers mapped it, if it did; [`Way::Split`] also in a ring, if the ends are copied.
    #[cfg(feature = "parts")]
    pub fn way(&self) -> Option<Way> {
        self.raw.way_of_pool()
    }
}

impl<B: DmaBuffer, T: 'static> Mapping<(B, T)> {
    /// The buffer's cookie, to change it: to note a packet's length, for example.
    #[doc(alias = "set_cookie")]
    pub fn cookie_mut(&mut self) -> &mut T {
        &mut self.buffer.1
    }
}

/// The result of an unmap. `Ended<(), ()>` is that of an unmap by address, which gives back no buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "buffers are in it, and what is pending is the driver's again after a commit only"]
pub enum Ended<B, A> {
    /// The mapping has ended by the policy in force, and the buffer is the driver's. (Other buffers that wait are not affected.)
    Done(B),
    /// The mapping waits until its batch is complete, or for a [commit](super::Queue::commit): **the device can still reach the buffer**.
    Pending,
    /// The batch is committed, and the device reaches none of these: all that waited, in the order of their unmaps, this one last.
    Flushed(A),
}

impl<B> Ended<B, Drain<'_, B>> {
    /// Calls `f` with each buffer that is the driver's again.
    pub fn for_each(self, mut f: impl FnMut(B)) {
        match self {
            Self::Done(buffer) => f(buffer),
            Self::Pending => {}
            Self::Flushed(buffers) => buffers.for_each(f),
        }
    }
}

/// A [`Mapping`] or a [`RawMapping`] that has not ended, and why.
pub struct NotUnmapped<T> {
    /// The unchanged mapping, if it can be unmapped again.
    pub mapping: Option<T>,
    /// Whether the next successful [commit](super::Queue::commit) ends the mapping, and gives its buffer back. If not, and no mapping came back, the
    /// buffer is leaked, and its memory must not be used again.
    pub waits: bool,
    /// Why.
    pub error: DmaUnmapError,
}

impl NotUnmapped<RawMapping> {
    #[cold]
    pub(super) fn foreign(mapping: RawMapping) -> Self {
        Self { mapping: Some(mapping), waits: false, error: DmaUnmapError::OtherQueue }
    }

    #[cold]
    pub(super) fn of_commit(mapping: Option<RawMapping>, error: DmaUnmapError) -> Self {
        Self { waits: mapping.is_none(), mapping, error }
    }
}

error_by_its_reason!([T] NotUnmapped<T>, |this, f| {
    let left = match (&this.mapping, this.waits) {
        (Some(_), _) => "the mapping is as it was, and can be unmapped again",
        (None, true) => "the buffer waits for the next commit that succeeds",
        (None, false) => "the buffer is leaked, as the device may reach it for ever",
    };
    write!(f, "{}; {left}", this.error)
});

/// The buffers of a queue that is used by address only.
// SAFETY: there is no value.
unsafe impl DmaBuffer for Infallible {
    fn segments(&self) -> &[PhysSegment] {
        match *self {}
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/dma/mapping.rs"]
mod tests;
