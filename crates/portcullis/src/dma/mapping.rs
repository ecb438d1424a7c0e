//! The token of a mapping, and the results of its unmap. A mapping cannot be copied, and only its queue ends it; a dropped one stays mapped, and
//! its buffer is leaked.

use alloc::vec::Drain;
use core::convert::Infallible;
use core::mem::ManuallyDrop;
use core::num::NonZeroU64;

use super::{DmaBuffer, Tagged};
use crate::addr::{Iova, IovaRange, PageSize, PhysSegment};
use crate::bounce::error::DmaUnmapError;
use crate::bounce::pool::{PoolMapping, Way};
use crate::broken::broken;
use crate::domain::MapListError;
use crate::sync::unique;

/// One of the two ways to give a device a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Through a bounce buffer that stays mapped.
    Copy,
    /// By a translation of its own.
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

/// A mapping by number, until it is unmapped: by its [`Queue`](super::Queue::unmap_raw), or, with the feature `parts`, by its `StrictRing` or
/// `AdaptiveRing`.
///
/// It cannot be copied, so each is unmapped once. **If it is dropped, the memory stays open** to the device, as that of a [`Mapping`] does.
// Store forwarding: a load that combines several stores, such as an enum's tag and its bytes, stalls for about 15 cycles. So all mappings have
// the same words; a map stores them one by one, and an unmap loads them one by one. If an unmap passed the mapping's address to a function, the
// compiler would first copy the mapping, two words in a load.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a mapping that is dropped stays open to the device: give it to `unmap_raw` of its queue"]
pub struct RawMapping {
    pub(super) iova: Iova,
    /// By [kind](Kind): its [pages](Self::in_pages), its length, or an index.
    pub(super) word: u64,
    /// The number of the queue, with the [kind](Kind) in its lowest bits.
    pub(super) tag: u64,
}

/// The bits of a [kind](Kind), below the number of a queue.
const KIND_BITS: u32 = 16;

/// A number that no other queue has, with its [lowest bits](KIND_BITS) 0.
pub(super) fn number() -> u64 {
    // Programs do not make 2^48 of them.
    unique() << KIND_BITS
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// In a ring. Its word has the pages.
    Ring,
    /// By itself, without a ring or a pool. Its word has the pages.
    Alone,
    /// In a ring, with slots in place of its ends. Its word has the pages, and the number of its list in place of the bytes beside it.
    Cut,
    /// By the pool of the domain. Its word is the length.
    Pool(Way),
    /// By the pool of a machine without an IOMMU. Its word is the length of one piece, or the index of a list in the queue.
    Swiotlb { is_list: bool },
    /// By a queue of a non-coherent device, which keeps the rest. Its word is an index.
    NotCoherent,
}

impl Kind {
    // Those of an untimed mapping in a ring and by itself are compared together with the queue's number.
    pub(super) const RING: u64 = 0;
    pub(super) const ALONE: u64 = 1;
    const CUT: u64 = 2;
    const POOL: u64 = 3;
    const SWIOTLB: u64 = 4;
    const NOT_COHERENT: u64 = 5;
    // Where these fields begin: the way, of three bits; whether the mapping was timed, of two; and the class.
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

    /// The kind of a word whose lowest [`KIND_BITS`] are its [`bits`](Self::bits); `None` for bits of no kind.
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
    /// Below this bit of a word with pages are the bytes of the granules that are not the buffer's.
    const PAGES: u32 = 32;
    /// How far up the bytes of the pages are in a word with pages: a granule has 4 KiB at least, so their lowest bits are 0, and end below the pages.
    const UP: u32 = Self::PAGES - PageSize::SIZE_4K.shift();

    /// Checks that a list whose granules have `bytes`, of which `used` are the list's, fits into a mapping.
    ///
    /// # Errors
    /// [`MapListError::TooLarge`].
    #[inline]
    pub(super) fn fits(bytes: u64, used: u64) -> Result<(), MapListError> {
        let beside = bytes.saturating_sub(used);
        if bytes >> (u64::BITS - Self::UP) == 0 && beside >> Self::PAGES == 0 {
            return Ok(());
        }
        Err(MapListError::TooLarge { bytes, beside })
    }

    /// Makes a mapping of `used` bytes in the pages of `range`, which it [fits](Self::fits), the first byte at `iova`.
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

    /// The pages, if its word has them, in a domain of this granule; `None` without translation.
    #[inline]
    pub(super) fn pages(&self, granule: PageSize) -> Option<IovaRange> {
        let bytes = NonZeroU64::new(self.word >> Self::PAGES << PageSize::SIZE_4K.shift())?;
        Some(IovaRange::inside(Iova::new(self.iova.get() & !granule.offset_mask()), bytes))
    }

    #[inline]
    pub(super) fn beside(&self) -> u64 {
        u64::from(self.list())
    }

    /// The number of the list whose ends are [cut](Kind::Cut).
    #[inline]
    pub(super) fn list(&self) -> u32 {
        self.word as u32
    }

    /// The [cut](Kind::Cut) mapping of a list, of a mapping in the ring.
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

    /// The class and the way for which its unmap counts, if its map was timed.
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

    /// The pages of a mapping in a ring, or by itself, of a domain of this [granule](crate::domain::Domain::granule). `None` for what a pool or a
    /// queue of a non-coherent device made, and without translation.
    #[cfg(feature = "parts")]
    pub fn range(&self, granule: PageSize) -> Option<IovaRange> {
        match self.kind() {
            Kind::Ring | Kind::Alone | Kind::Cut => self.pages(granule),
            Kind::Pool(_) | Kind::Swiotlb { .. } | Kind::NotCoherent => None,
        }
    }

    /// The way of the pool of bounce buffers, if that made it; [`Way::Split`] also for one in a ring whose ends are copied.
    #[cfg(feature = "parts")]
    pub fn way(&self) -> Option<Way> {
        self.way_of_pool()
    }

    /// As the pool says; [`Way::Split`] also for one in a ring whose ends are copied.
    pub(super) fn way_of_pool(&self) -> Option<Way> {
        match self.kind() {
            Kind::Pool(way) => Some(way),
            Kind::Cut => Some(Way::Split),
            Kind::Alone | Kind::Ring | Kind::Swiotlb { .. } | Kind::NotCoherent => None,
        }
    }
}

/// A buffer that the queue's device has, or a copy of it, until it is [unmapped](super::Queue::unmap).
///
/// **A dropped mapping stays open**: only [`Queue::unmap`](super::Queue::unmap) ends it, not the end of the queue. The device reaches the
/// buffer, or its copy, as long as the hardware walks the domain's table for it. The buffer is leaked, so nobody else gets memory that the
/// device still reaches; its addresses, and its place in a ring, stay taken.
#[derive(Debug)]
#[must_use = "a mapping that is dropped stays open to the device, and its buffer is leaked: give it to `Queue::unmap`"]
pub struct Mapping<B: DmaBuffer> {
    pub(super) raw: RawMapping,
    /// Given back or dropped only when the queue says that no device reaches it.
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

    /// The buffer, which the device may be changing. Call [`sync_for_cpu`](super::Queue::sync_for_cpu) after the device is done.
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// The way of the pool of bounce buffers, if that made it; [`Way::Split`] also for one in a ring whose ends are copied.
    #[cfg(feature = "parts")]
    pub fn way(&self) -> Option<Way> {
        self.raw.way_of_pool()
    }
}

impl<B: DmaBuffer, T> Mapping<Tagged<B, T>> {
    /// The cookie, to be changed: for a packet's length, say, which the driver learns when the device has written.
    #[doc(alias = "set_cookie")]
    pub fn cookie_mut(&mut self) -> &mut T {
        self.buffer.cookie_mut()
    }
}

/// The result of an unmap. An unmap by number, which gives back no buffers, returns `Ended<(), ()>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "buffers are in it, and what is pending is the driver's again after a commit only"]
pub enum Ended<B, A> {
    /// The buffer is the driver's: the device does not reach it, by the policy in force. (Waiting ones go on waiting.)
    Done(B),
    /// It waits for its batch to become complete, or for a [commit](super::Queue::commit): **the device can still reach it**.
    Pending,
    /// The batch was complete, and the device reaches none of these any more: all that waited, in the order of their unmaps, this one last.
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

/// A mapping has not ended: a [`Mapping`], or a [`RawMapping`].
pub struct NotUnmapped<T> {
    /// The mapping, unchanged, if it can be unmapped again.
    pub mapping: Option<T>,
    /// Whether the next successful [commit](super::Queue::commit) ends the mapping, and gives its buffer back. If not, and no mapping came back, its
    /// memory must not be used again, and its buffer is leaked.
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

/// The buffers of a queue that is used by number only: there are none.
// SAFETY: there is no value.
unsafe impl DmaBuffer for Infallible {
    fn segments(&self) -> &[PhysSegment] {
        match *self {}
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/dma/mapping.rs"]
mod tests;
