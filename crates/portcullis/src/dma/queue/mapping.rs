//! Mappings of a queue, and what becomes of them. A mapping cannot be copied, and only the queue
//! that made it ends it; dropped, it stays mapped, and its buffer is leaked.

use alloc::vec::Drain;
use core::convert::Infallible;
use core::mem::ManuallyDrop;

use crate::addr::{Iova, PhysSegment};
use crate::bounce::pool::Way;
use crate::broken::broken;
use crate::dma::ring::KIND_BITS;
use crate::dma::{Choice, DmaBuffer, RingMapping};

/// What a queue has opened by number, until it is [unmapped](super::Queue::unmap_raw).
///
/// It cannot be copied: what is unmapped is unmapped once. **If it is dropped, the memory stays open**
/// to the device, as that of a [`Mapping`] does.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a mapping that is dropped stays open to the device: give it to `Queue::unmap_raw`"]
pub struct RawMapping {
    /// All mappings have the same words, those of a ring's mapping. In the place of the ring's
    /// number is the queue's (which is the ring's, where there is one), with the [kind](Kind) in
    /// its lowest bits. What a pool made has no pages; in the place of the neighbours it has its
    /// length, or the index of its list.
    ///
    /// Mappings move through memory, and a CPU forwards a word from its store to the load that follows; a load that takes
    /// together what several stores wrote, as of an enum and its bytes, stalls for about 15 cycles. A map stores the words one by
    /// one. An unmap also loads them one by one. If it passed the mapping's address to a function, the compiler would copy the
    /// mapping first, two words in a load.
    pub(super) core: RingMapping,
}

/// How a mapping was made, and so how it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// By itself, without a ring or a pool.
    Alone,
    /// In the queue's ring.
    Ring,
    /// In the queue's ring, or by the pool. If it was timed, also the class and the way for which
    /// its end counts.
    Auto { way: Option<Way>, timed: Option<(u8, Choice)> },
    /// By the pool of the domain.
    Pool(Way),
    /// By the pool of a machine without an IOMMU: one piece, or a list that the queue keeps.
    Swiotlb { is_list: bool },
    /// By a queue of a device that is not coherent, which keeps the rest.
    NotCoherent,
}

impl Kind {
    /// The lowest bits of a mapping [in the queue's ring](Self::Ring), of one [by itself](Self::Alone), and of one that [was
    /// chosen](Self::Auto) to be in the ring and not timed, for calls that compare them together with the queue's number.
    pub(super) const RING: u64 = 0;
    pub(super) const ALONE: u64 = 1;
    pub(super) const AUTO: u64 = 2;
    const POOL: u64 = 3;
    const SWIOTLB: u64 = 4;
    const NOT_COHERENT: u64 = 5;
    /// Where the way begins, in three bits; whether it was timed, in two; and the class.
    const WAY: u32 = 3;
    const TIMED: u32 = 6;
    const CLASS: u32 = 8;

    /// Returns the kind as a number of [`KIND_BITS`] bits.
    pub(super) fn bits(self) -> u64 {
        match self {
            Self::Ring => Self::RING,
            Self::Alone => Self::ALONE,
            Self::Auto { way, timed } => {
                let timed = timed.map_or(0, |(class, choice)| {
                    let choice = if choice == Choice::Copy { 1 } else { 2 };
                    choice << Self::TIMED | u64::from(class) << Self::CLASS
                });
                Self::AUTO | Self::bits_of(way) | timed
            }
            Self::Pool(way) => Self::POOL | Self::bits_of(Some(way)),
            Self::Swiotlb { is_list } => Self::SWIOTLB | u64::from(is_list) << Self::WAY,
            Self::NotCoherent => Self::NOT_COHERENT,
        }
    }

    fn bits_of(way: Option<Way>) -> u64 {
        way.map_or(0, |way| way as u64 + 1) << Self::WAY
    }

    /// Returns the kind of a word whose lowest [`KIND_BITS`] are its [`bits`](Self::bits); `None`
    /// for bits of no kind.
    fn of(bits: u64) -> Option<Self> {
        let number = (bits >> Self::WAY & 7) as usize;
        let way = number.checked_sub(1).and_then(|number| Way::ALL.get(number)).copied();
        match bits & 7 {
            Self::RING => Some(Self::Ring),
            Self::ALONE => Some(Self::Alone),
            Self::AUTO => {
                let choice = match bits >> Self::TIMED & 3 {
                    0 => None,
                    1 => Some(Choice::Copy),
                    _ => Some(Choice::Map),
                };
                Some(Self::Auto { way, timed: choice.map(|choice| ((bits >> Self::CLASS) as u8, choice)) })
            }
            Self::POOL => way.map(Self::Pool),
            Self::SWIOTLB => Some(Self::Swiotlb { is_list: number == 1 }),
            Self::NOT_COHERENT => Some(Self::NotCoherent),
            _ => None,
        }
    }
}

impl RawMapping {
    #[inline]
    pub(super) fn kind(&self) -> Kind {
        Kind::of(self.core.ring).unwrap_or_else(|| broken("a mapping says how it was made"))
    }

    /// The number of the queue that it is of.
    #[inline]
    pub(super) fn queue(&self) -> u64 {
        self.core.ring >> KIND_BITS << KIND_BITS
    }

    /// The address of the first byte for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.core.first
    }

    /// How the pool of bounce buffers made it, if it did.
    #[cfg(feature = "parts")]
    pub fn way(&self) -> Option<Way> {
        self.way_of_pool()
    }

    pub(super) fn way_of_pool(&self) -> Option<Way> {
        match self.kind() {
            Kind::Auto { way, .. } => way,
            Kind::Pool(way) => Some(way),
            Kind::Alone | Kind::Ring | Kind::Swiotlb { .. } | Kind::NotCoherent => None,
        }
    }
}

/// A buffer that the queue's device has, or a copy of it, until it is [unmapped](super::Queue::unmap).
///
/// **A mapping that is dropped stays open**: only [`Queue::unmap`](super::Queue::unmap) ends it, and
/// the queue's own end does not. The device reaches the buffer, or its copy, until the hardware walks
/// the domain's table for it no more. The buffer is leaked, so nobody else gets memory that the device
/// still reaches; its addresses, and its place in a ring, stay taken.
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

    /// The buffer, which the device may be changing meanwhile. Call
    /// [`sync_for_cpu`](super::Queue::sync_for_cpu) after the device has said that it is done.
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// How the pool of bounce buffers made it, if it did.
    #[cfg(feature = "parts")]
    pub fn way(&self) -> Option<Way> {
        self.raw.way_of_pool()
    }
}

/// What an unmap has led to. An unmap by number, which gives back no buffers, leads to `Ended<(), ()>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "buffers are in it, and what is pending is the driver's again after a commit only"]
pub enum Ended<B, A> {
    /// The buffer is the driver's: the device does not reach it, by the policy in force. (Those that wait go on waiting.)
    Done(B),
    /// It waits for the batch to become complete, or for a [commit](super::Queue::commit): **the device can still reach it**.
    Pending,
    /// The batch was complete, and the device reaches none of these any more: all that waited, in the order of their unmaps, this
    /// one last.
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

/// The buffers of a queue that is used by number only: there are none.
// SAFETY: there is no value.
unsafe impl DmaBuffer for Infallible {
    fn segments(&self) -> &[PhysSegment] {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_told_by_its_bits() {
        let ways = || Way::ALL.into_iter().map(Some).chain([None]);
        let classes = || (0..u64::BITS as u8).flat_map(|class| [(class, Choice::Copy), (class, Choice::Map)]);
        let timed = || classes().map(Some).chain([None]);
        let auto = ways().flat_map(|way| timed().map(move |timed| Kind::Auto { way, timed }));
        let kinds = [Kind::Alone, Kind::Ring, Kind::NotCoherent]
            .into_iter()
            .chain(auto)
            .chain(Way::ALL.into_iter().map(Kind::Pool))
            .chain([false, true].map(|is_list| Kind::Swiotlb { is_list }));
        for kind in kinds {
            assert!(kind.bits() >> KIND_BITS == 0, "{kind:?} reaches into the queue's number");
            assert_eq!(Kind::of(kind.bits()), Some(kind));
        }
    }
}
