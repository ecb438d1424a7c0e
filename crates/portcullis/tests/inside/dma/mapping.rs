use alloc::format;
use alloc::string::ToString;

use super::*;

const GRANULE: PageSize = PageSize::from_shift(12).unwrap();

#[test]
fn every_kind_is_told_by_its_bits_and_so_are_the_class_and_the_way_that_its_end_counts_for() {
    let ways = Way::ALL.into_iter().map(Kind::Pool);
    let swiotlb = [false, true].map(|is_list| Kind::Swiotlb { is_list });
    let kinds =
        [Kind::Ring, Kind::Alone, Kind::Cut, Kind::NotCoherent].into_iter().chain(ways).chain(swiotlb);
    let classes = (0..=u8::MAX).flat_map(|class| [(class, Choice::Copy), (class, Choice::Map)]);
    let timed: alloc::vec::Vec<_> = classes.map(Some).chain([None]).collect();
    for kind in kinds {
        assert!(kind.bits() >> KIND_BITS == 0, "{kind:?} reaches into the queue's number");
        assert_eq!(Kind::of(kind.bits()), Some(kind));
        for timed in &timed {
            let mapping =
                RawMapping { iova: Iova::new(7), word: u64::MAX, tag: 5 << KIND_BITS | kind.bits() };
            let mapping = mapping.with_timed(Some((255, Choice::Map))).with_timed(*timed);
            assert_eq!((mapping.kind(), mapping.timed(), mapping.queue()), (kind, *timed, 5 << KIND_BITS));
        }
    }
}

#[test]
fn a_mapping_knows_its_pages_and_the_bytes_beside_its_buffer() {
    let most = (1 << 32) - 1;
    for (pages, beside) in [(1, 0), (1, 4095), (3, 8000), (1 << 20, most), (most, most), (most, 0)] {
        let range = IovaRange::new(Iova::new(0x7000), pages << 12).unwrap();
        let used = range.len() - beside;
        assert_eq!(RawMapping::fits(range.len(), used), Ok(()));
        let mapping = RawMapping::in_pages(Iova::new(0x7123), range, used, 1 << KIND_BITS);
        assert_eq!((mapping.pages(GRANULE), mapping.beside()), (Some(range), beside));
        if beside > 0 {
            continue;
        }
        let cut = mapping.cut(77);
        assert_eq!((cut.kind(), cut.pages(GRANULE), cut.list()), (Kind::Cut, Some(range), 77));
        let uncut = cut.uncut();
        assert_eq!((uncut.kind(), uncut.pages(GRANULE), uncut.beside()), (Kind::Ring, Some(range), 0));
    }
    assert_eq!(RawMapping::untranslated(Iova::new(0x7123), 0).pages(GRANULE), None);
}

#[test]
fn what_a_mapping_has_no_words_for_is_refused() {
    for (bytes, used) in [(1 << 44, 1 << 44), (1 << 33, 1 << 32)] {
        let beside = bytes - used;
        let error = Err(MapListError::TooLarge { bytes, beside });
        assert_eq!(RawMapping::fits(bytes, used), error);
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

// A driver keeps hundreds of them, and moves each twice.
#[test]
fn a_mapping_has_24_bytes_besides_its_buffer() {
    assert_eq!(size_of::<RawMapping>(), 24);
}
