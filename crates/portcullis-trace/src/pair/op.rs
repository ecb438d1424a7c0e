//! The output: operations on numbered mappings.

use std::ops::Range;

use portcullis::addr::Direction;

/// A device: an index into [`Summary::devices`](crate::Summary::devices).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// The number of a live mapping. Numbers are dense and reused after the unmap, so a consumer keeps its own mappings in a vector.
pub type MapId = u32;

/// A physically contiguous piece of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The first physical address.
    pub phys: u64,
    /// The length in bytes, never 0. The piece ends at or below 2^52.
    pub len: u64,
}

impl Segment {
    /// How many pieces of memory a list is: segments that adjoin, one behind the other, are one piece, as in Linux's `dma_map_sg`.
    pub fn pieces(list: &[Self]) -> u64 {
        let mut end = None;
        let begins_one = |segment: &&Self| {
            core::mem::replace(&mut end, segment.phys.checked_add(segment.len)) != Some(segment.phys)
        };
        list.iter().filter(begins_one).count() as u64
    }
}

/// The call that made a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// `dma_map_page` and its kin.
    Single,
    /// `dma_map_sg`.
    ScatterGather,
    /// `dma_alloc` and its kin: memory that usually lives as long as its driver. Also `iommu:map` without a `dma_*` event and without an
    /// unmap.
    Coherent,
    /// `dma_map_resource`: another device's registers.
    Resource,
    /// `iommu:map` without a `dma_*` event: of a user-space driver or a virtual machine, or of any driver if `dma:*` was not recorded.
    Direct,
}

/// An operation's kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpKind {
    /// Make a mapping.
    Map {
        /// Its number from now on.
        id: MapId,
        /// The direction of the data.
        dir: Direction,
        /// Its pieces, in [`Chunk::segments`].
        segments: Range<u32>,
        /// The call that made it.
        origin: Origin,
    },
    /// End a mapping.
    Unmap {
        /// Its number, free from now on.
        id: MapId,
    },
    /// The CPU gets a part of a mapping.
    SyncForCpu {
        /// The mapping.
        id: MapId,
        /// Offset of the part in the mapping, in bytes.
        offset: u64,
        /// Its length in bytes; it lies inside the mapping.
        len: u64,
    },
    /// The device gets a part of a mapping.
    SyncForDevice {
        /// The mapping.
        id: MapId,
        /// Offset of the part in the mapping, in bytes.
        offset: u64,
        /// Its length in bytes; it lies inside the mapping.
        len: u64,
    },
}

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// Its time in nanoseconds; monotonic.
    pub time_ns: u64,
    /// The line of its event, counted from 1.
    pub line: u64,
    /// Its CPU.
    pub cpu: u32,
    /// Its device.
    pub device: DeviceId,
    /// Its kind.
    pub kind: OpKind,
}

/// Consecutive operations; cleared and refilled, so that it allocates only while it grows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    /// The operations.
    pub ops: Vec<Op>,
    /// The pieces of its maps.
    pub segments: Vec<Segment>,
}

impl Chunk {
    /// The pieces of `range` of a map of this chunk; none for a range of another chunk.
    pub fn segments_of(&self, range: &Range<u32>) -> &[Segment] {
        self.segments.get(range.start as usize..range.end as usize).unwrap_or(&[])
    }

    pub(crate) fn clear(&mut self) {
        self.ops.clear();
        self.segments.clear();
    }
}

/// The event of operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct At {
    /// The events before it.
    pub(super) seq: u64,
    pub(super) time_ns: u64,
    pub(super) line: u64,
    pub(super) cpu: u32,
}

/// The source of operations, and their chunk.
pub(super) struct Out<'c> {
    pub(super) chunk: &'c mut Chunk,
    pub(super) at: At,
}

impl Out<'_> {
    pub(super) fn push(&mut self, device: DeviceId, kind: OpKind) {
        let At { time_ns, line, cpu, .. } = self.at;
        self.chunk.ops.push(Op { time_ns, line, cpu, device, kind });
    }

    pub(super) fn map(
        &mut self,
        device: DeviceId,
        id: MapId,
        dir: Direction,
        origin: Origin,
        pieces: &[Segment],
    ) {
        // The reader ends a chunk long before it holds 2^32 pieces.
        let index = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let first = index(self.chunk.segments.len());
        self.chunk.segments.extend_from_slice(pieces);
        let segments = first..index(self.chunk.segments.len());
        self.push(device, OpKind::Map { id, dir, segments, origin });
    }
}
