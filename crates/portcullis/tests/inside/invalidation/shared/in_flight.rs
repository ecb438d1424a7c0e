use super::*;

#[test]
fn the_first_end_of_two_that_overlap_hides_the_other_and_no_end_hides_a_later_one() {
    let word = InFlight::new();
    assert_eq!(word.now(), None);
    let (first, second) = (word.begin(), word.begin());
    assert!(!first.overlapped(), "they cannot tell each other apart");
    drop(first);
    assert!(second.overlapped() && word.now().is_none());
    let third = word.begin();
    drop(second);
    assert!(word.now().is_some() && !third.overlapped());
    drop(third);
    assert_eq!(word.now(), None);
}

#[test]
fn when_all_have_ended_nothing_is_in_flight() {
    let word = InFlight::new();
    for _ in 0..if cfg!(miri) { 3 } else { 50 } {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..20).for_each(|_| drop(word.begin())));
            }
        });
        assert_eq!(word.now(), None);
    }
}
