//! What is done: the workloads by name, and in which directions.

use portcullis::addr::Direction;

/// What is mapped and unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One slot, taken and given back: nothing is copied.
    Slot,
    /// A buffer of so many bytes, through the swiotlb pool or one like it. Bytes that the device does not write are
    /// after the unmap what they were, so a mapping from the device takes two copies.
    Swiotlb(u64),
    /// A buffer of so many bytes, for a device behind an IOMMU.
    Pool(u64),
}

impl Shape {
    /// Bytes of a buffer.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Slot => SLOT,
            Self::Swiotlb(bytes) | Self::Pool(bytes) => bytes,
        }
    }

    /// In which directions it is measured; a slot knows none.
    pub fn directions(self) -> &'static [Option<Way>] {
        if self == Self::Slot { &[None] } else { &[Some(Way::To), Some(Way::From), Some(Way::Both)] }
    }
}

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What is mapped.
    pub shape: Shape,
}

/// All workloads, in the order in which they are reported. An operation is a map and an unmap.
pub const WORKLOADS: [Workload; 11] = [
    Workload { name: "slot", shape: Shape::Slot },
    Workload { name: "swiotlb-1k", shape: Shape::Swiotlb(1 << 10) },
    Workload { name: "swiotlb-4k", shape: Shape::Swiotlb(4 << 10) },
    Workload { name: "swiotlb-16k", shape: Shape::Swiotlb(16 << 10) },
    Workload { name: "swiotlb-64k", shape: Shape::Swiotlb(64 << 10) },
    Workload { name: "swiotlb-128k", shape: Shape::Swiotlb(128 << 10) },
    Workload { name: "pool-1k", shape: Shape::Pool(1 << 10) },
    Workload { name: "pool-4k", shape: Shape::Pool(4 << 10) },
    Workload { name: "pool-16k", shape: Shape::Pool(16 << 10) },
    Workload { name: "pool-64k", shape: Shape::Pool(64 << 10) },
    Workload { name: "pool-128k", shape: Shape::Pool(128 << 10) },
];

/// The slot of every swiotlb here, in bytes: Linux's.
pub(crate) const SLOT: u64 = 2 << 10;

/// Which way the data of a mapping goes, by the names of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The device reads.
    To,
    /// The device writes.
    From,
    /// It does both.
    Both,
}

impl Way {
    /// Its name, as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::To => "to-device",
            Self::From => "from-device",
            Self::Both => "both",
        }
    }

    /// As the library names it.
    pub(crate) fn direction(self) -> Direction {
        match self {
            Self::To => Direction::ToDevice,
            Self::From => Direction::FromDevice,
            Self::Both => Direction::Bidirectional,
        }
    }
}

/// One workload as all threads do it at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub shape: Shape,
    /// None where nothing is copied.
    pub way: Option<Way>,
    pub threads: usize,
    /// Mappings of each thread that are in use at a time.
    pub depth: usize,
    /// There are more threads than cores.
    pub crowded: bool,
}

impl Case {
    /// The buffers of a thread: more than one in any case, so that the check sees neighbours.
    pub(crate) fn buffers(&self) -> usize {
        self.depth.max(4)
    }

    /// As the library names the way of the data; a slot is as good as one to be read.
    pub(crate) fn direction(&self) -> Direction {
        self.way.unwrap_or(Way::To).direction()
    }

    /// Whether data is copied when a buffer is mapped.
    pub(crate) fn copies_in(&self) -> bool {
        match self.way {
            Some(Way::To | Way::Both) => true,
            Some(Way::From) => matches!(self.shape, Shape::Swiotlb(_)),
            None => false,
        }
    }

    /// Whether data is copied when it is unmapped.
    pub(crate) fn copies_out(&self) -> bool {
        matches!(self.way, Some(Way::From | Way::Both))
    }

    /// Bytes of all buffers of all threads, twice over, that a pool needs at the most; at least 64 MiB, as Linux's.
    pub(crate) fn pool_bytes(&self) -> u64 {
        let bytes = self.shape.bytes().max(SLOT) * (2 * self.buffers() * self.threads) as u64;
        bytes.next_power_of_two().max(64 << 20)
    }
}

/// The numbers of threads that are measured without being named: the last is more than most machines have cores.
pub const THREADS: [usize; 3] = [1, 2, 8];

/// The most threads that can be measured: no more than the platform has slots, its own timer's included.
pub const MOST_THREADS: usize = 48;

/// The most mappings that a thread can have in use at a time.
pub const MOST_DEPTH: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot is as long as one of Linux's, 2 KiB (`IO_TLB_SIZE`).
    #[test]
    fn names_tell_sizes() {
        for Workload { name, shape } in WORKLOADS {
            let kib = shape.bytes() >> 10;
            let expected = match shape {
                Shape::Slot => "slot".into(),
                Shape::Swiotlb(_) => format!("swiotlb-{kib}k"),
                Shape::Pool(_) => format!("pool-{kib}k"),
            };
            assert_eq!(name, expected);
            assert!(shape != Shape::Slot || shape.bytes() == 2048);
        }
    }

    #[test]
    fn a_copy_is_made_where_data_must_go() {
        let case = |shape, way| Case { shape, way, threads: 1, depth: 1, crowded: false };
        let copies = |case: Case| (case.copies_in(), case.copies_out());
        assert_eq!(copies(case(Shape::Slot, None)), (false, false));
        assert_eq!(copies(case(Shape::Pool(4096), Some(Way::To))), (true, false));
        assert_eq!(copies(case(Shape::Pool(4096), Some(Way::From))), (false, true));
        assert_eq!(copies(case(Shape::Pool(4096), Some(Way::Both))), (true, true));
        assert_eq!(copies(case(Shape::Swiotlb(4096), Some(Way::From))), (true, true));
    }

    #[test]
    fn a_pool_has_room_for_all_buffers_twice_and_no_less_than_linux_s() {
        let mib = |threads, depth| {
            let (shape, way) = (Shape::Pool(64 << 10), Some(Way::To));
            Case { shape, way, threads, depth, crowded: false }.pool_bytes() >> 20
        };
        assert_eq!((mib(1, 1), mib(1, 512), mib(1, 513)), (64, 64, 128));
        assert_eq!(mib(3, 512), 256, "a power of two");
    }
}
