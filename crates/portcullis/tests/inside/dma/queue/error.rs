//! What queues make of the errors of rings, pools and batches, with no two numbers the same.

use alloc::format;
use alloc::string::ToString;

use super::*;
use crate::errors::{AT, REJECTED, range};
use crate::iova::IovaError;

#[test]
fn a_map_says_why_its_ring_has_refused() {
    let full = ArenaError::Full { len: 1, in_use: 2, capacity: 3, reservations: 4, oldest: AT };
    for (ring, queue) in [
        (RingError::Map(MapListError::NotCoherent), DmaMapError::List(MapListError::NotCoherent)),
        (
            RingError::Arena(ArenaError::Oversize { len: 2, capacity: 1 }),
            DmaMapError::TooLong { len: 2, most: 1 },
        ),
        (
            RingError::Arena(ArenaError::Space(IovaError::OutOfMemory)),
            DmaMapError::List(MapListError::Iova(IovaError::OutOfMemory)),
        ),
        (RingError::Arena(ArenaError::OutOfMemory), DmaMapError::OutOfMemory),
        (RingError::Arena(ArenaError::Empty), DmaMapError::List(MapListError::EmptyList)),
        (RingError::Arena(full), DmaMapError::Full),
    ] {
        assert_eq!(DmaMapError::of_ring(ring), queue);
        assert_eq!(DmaMapError::of_auto(ring.into()), queue);
        assert_eq!(DmaMapError::of_auto(queue.into()), queue);
    }
}

#[test]
fn an_end_says_what_is_still_reached() {
    let unconfirmed = DmaUnmapError::Unconfirmed { error: REJECTED };
    let kept = DmaUnmapError::StillMapped { range: range(), kept: 2 };
    let not_mapped = UnmapError::NotMapped { range: range(), unmapped: 0 };
    for (ring, queue) in [
        (RingError::Unconfirmed { descriptors: 3, error: REJECTED }, unconfirmed),
        (RingError::StillMapped { range: range(), kept: 2 }, kept),
        (RingError::Arena(ArenaError::NotReserved { range: range() }), DmaUnmapError::Unmap(not_mapped)),
        (RingError::Foreign { range: range() }, DmaUnmapError::OtherQueue),
    ] {
        assert_eq!(DmaUnmapError::of_ring(ring), queue);
    }
    for (batch, queue) in [
        (BatchError::Unconfirmed { mappings: 3, error: REJECTED }, unconfirmed),
        (BatchError::Unmap(UnmapError::StillMapped { range: range(), unmapped: 1, kept: 2 }), kept),
        (BatchError::Unmap(not_mapped), DmaUnmapError::Unmap(not_mapped)),
        (BatchError::OtherDomain, DmaUnmapError::OtherQueue),
    ] {
        assert_eq!(DmaUnmapError::of_batch(batch), queue);
    }
}

#[test]
fn an_unmap_that_failed_says_where_the_buffer_is() {
    let error = DmaUnmapError::OtherQueue;
    for (mapping, waits, left) in [
        (Some(()), false, "the mapping is as it was, and can be unmapped again"),
        (None, true, "the buffer waits for the next commit that succeeds"),
        (None, false, "the buffer is leaked, as the device may reach it for ever"),
    ] {
        let failed = NotUnmapped { mapping, waits, error };
        assert_eq!(failed.to_string(), format!("a mapping of another queue; {left}"));
        assert_eq!(format!("{failed:?}"), format!("OtherQueue: {failed}"));
    }
}
