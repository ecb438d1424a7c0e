//! Says what was measured and chosen: for tests, and for programs that measure.

use super::{Cell, Cost, Mean, most_bytes};
use crate::addr::Direction;
use crate::dma::adaptive::AdaptiveRing;
use crate::dma::mapping::Choice;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// The choice for mappings of one size, direction and shape, with its reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explained {
    /// The largest mapping of the size, in bytes. The size begins above half of that, the smallest at one byte.
    pub most_bytes: u64,
    /// Their direction.
    pub direction: Direction,
    /// Whether these mappings share a granule with other data: then mapping means to map the middle and copy the ends.
    pub shared: bool,
    /// Whether mappings are copied now, if the device may have either. The other way may be a little cheaper: the choice changes only for a clear
    /// difference.
    pub copies: bool,
    /// The cost of copying in nanoseconds, of map and unmap, with all waits for hardware, as running means; `None` while unknown.
    pub copy_ns: Option<(u64, u64)>,
    /// The cost of mapping, likewise.
    pub map_ns: Option<(u64, u64)>,
    /// The number of mappings copied so far. It includes mappings whose copy protects other data from an untrusted device.
    pub copied: u64,
    /// Mappings mapped so far.
    pub mapped: u64,
    /// How often the choice has changed.
    pub switches: u64,
}

impl Mean {
    pub(super) fn ns(&self) -> u64 {
        self.sixteenths / 16
    }
}

impl Cost {
    pub(super) fn seen(&self) -> Option<(u64, u64)> {
        let enough = self.total().is_some();
        enough.then_some((self.map.ns(), self.unmap.ns()))
    }
}

impl Cell {
    fn explain(&self, class: usize, (direction, shared): (Direction, bool), counts: [u64; 2]) -> Explained {
        Explained {
            most_bytes: most_bytes(class),
            direction,
            shared,
            copies: self.choice == Choice::Copy,
            copy_ns: self.copy.seen(),
            map_ns: self.map.seen(),
            copied: counts[Choice::Copy as usize],
            mapped: counts[Choice::Map as usize],
            switches: self.switches,
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// The choices, with their reasons, for each size of each used direction, smallest first.
    pub fn explain(&self) -> impl Iterator<Item = Explained> {
        let met = Direction::ALL.into_iter().filter(|direction| self.met[direction.index()]);
        let (untrusted, granule) = (self.pool.is_untrusted(), self.pool.pool().domain().granule().bytes());
        met.flat_map(move |direction| {
            let shapes = (0..self.classes).flat_map(|class| [(class, false), (class, true)]);
            // A trusted device has no shared ends; an untrusted one has them in every mapping below a granule.
            let occurs = move |class, shared| {
                if shared { untrusted } else { !untrusted || most_bytes(class) >= granule }
            };
            shapes.filter(move |(class, shared)| occurs(*class, *shared)).map(move |(class, shared)| {
                let size = &self.sizes[self.place(direction, class, shared)];
                size.cell.explain(class, (direction, shared), size.counts)
            })
        })
    }
}
