use super::super::layout::Layout;
use super::*;

#[test]
fn slots_are_where_a_device_reaches_them_if_there_is_room() {
    let usual = PoolConfig::default();
    let of = |last| {
        let PoolConfig { class_bytes, limit, .. } = usual.reached_by(last);
        (class_bytes, limit.get())
    };
    let below = |bits: u32| (1 << bits) - 1;
    assert_eq!(of(u64::MAX), (32 << 20, u64::MAX));
    assert_eq!(of(below(32)), (32 << 20, below(32)));
    assert_eq!(of(below(28)), (16 << 20, below(28)));
    assert_eq!(of(below(21)), (128 << 10, below(21)));
    assert_eq!(of(below(20)), (usual.class_bytes, u64::MAX));
    assert_eq!(of(0x3000_0000), (32 << 20, 0x3000_0000));
    assert_eq!(of(0x300_0000), (2 << 20, 0x300_0000));
    let low = PoolConfig { limit: Iova::new(0xffff), ..usual };
    assert_eq!(low.reached_by(below(32)).limit.get(), 0xffff);
}

/// Every accepted configuration finds its slots by address, up to the largest granule and at the end of the address space.
#[test]
fn slots_are_found_with_any_granule() {
    let mut accepted = 0;
    for granule_shift in 12..48 {
        let granule = PageSize::from_shift(granule_shift).unwrap();
        for (classes, class_shift) in
            (1..=10_u32).flat_map(|n| (granule_shift..64).map(move |shift| (n, shift)))
        {
            let threshold = granule.bytes() << (classes - 1);
            let config = PoolConfig { threshold, class_bytes: 1 << class_shift, ..PoolConfig::default() };
            let Ok(made) = config.classes(granule) else { continue };
            assert_eq!(made, (classes as usize, class_shift));
            let mut layout = Layout::new(granule, class_shift, made.0);
            accepted += 1;
            for start in [0, granule.bytes(), (u64::MAX - layout.bytes() + 1) & !granule.offset_mask()] {
                layout.begin_at(start);
                for class in 0..layout.classes() {
                    for index in [layout.first(class), layout.first(class + 1) - 1] {
                        let place = layout.find(Iova::new(layout.start_of(class, index))).unwrap();
                        assert_eq!((place.class, place.index), (class, index), "{granule_shift} {config:?}");
                    }
                }
            }
        }
    }
    assert!(accepted > 1000, "{accepted}");
}
