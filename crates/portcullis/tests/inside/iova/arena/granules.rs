use super::*;

#[test]
fn an_arena_has_as_many_granules_as_its_positions_have_room_for() {
    assert_eq!(granules_of(1 << 31, 1), Some(1 << 31));
    assert_eq!(granules_of(1 << 16, 1 << 15), Some(1 << 31));
    assert_eq!(granules_of((1 << 31) + 1, 1), None);
    assert_eq!(granules_of(1, (1 << 31) + 1), None);
    assert_eq!(granules_of(u32::MAX, u64::MAX), None);
}
