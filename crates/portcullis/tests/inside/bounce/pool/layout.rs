use super::*;

#[test]
fn an_address_gives_its_slot_and_a_slot_its_address() {
    for granule_shift in [12, 14, 16] {
        let granule = PageSize::from_shift(granule_shift).unwrap();
        let mut layout = Layout::new(granule, granule_shift + 6, 6);
        let region = IovaRange::new(Iova::new(1 << 40), layout.bytes()).unwrap();
        layout.begin_at(region.start().get());
        let mut next = region.start().get();
        for class in 0..6 {
            let bytes = layout.slot_bytes(class);
            assert_eq!(bytes, 1 << (granule_shift as usize + class));
            assert_eq!(layout.class_of(bytes), Some(class));
            assert_eq!(layout.class_of(bytes / 2 + 1), Some(class));
            for index in layout.first(class)..layout.first(class + 1) {
                assert_eq!(layout.start_of(class, index), next);
                let place = Some(Place { class, index, start: next });
                assert_eq!(layout.find(Iova::new(next)), place);
                assert_eq!(layout.find(Iova::new(next + bytes - 1)), place);
                next += bytes;
            }
            assert_eq!(layout.slots(class), layout.first(class + 1) - layout.first(class));
        }
        assert_eq!(next, region.last().get() + 1);
        assert_eq!(layout.find(Iova::new(next)), None);
        assert_eq!(layout.find(Iova::new(region.start().get() - 1)), None);
        assert_eq!(layout.class_of(layout.slot_bytes(5) + 1), None);
        assert_eq!(layout.class_of(0), None);
        assert_eq!(layout.class_of(1), Some(0));
    }
}
