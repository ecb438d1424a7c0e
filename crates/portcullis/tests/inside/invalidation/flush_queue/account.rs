use super::*;

const fn bytes(used: u64) -> Bytes {
    Bytes { used, neighbour: 0 }
}

const fn flush(number: u64) -> Flush {
    Flush { number, generation: 0 }
}

#[test]
fn what_flushes_do_not_cover_waits_for_the_next() {
    let mut account = Account::default();
    account.sample(0, bytes(0), bytes(1));
    account.close(1, 0, 1, bytes(1));
    account.sample(5, bytes(1), bytes(1));
    account.close(2, 0, 2, bytes(2));
    // This flush had begun before the first segment was closed.
    assert_eq!(account.confirm(flush(1), 8, bytes(2)), None);
    assert_eq!(account.confirm(flush(2), 10, bytes(2)), Some(1));
    assert_eq!(account.total(20, bytes(2)).1, 15, "the second waits");
    assert_eq!(account.confirm(flush(3), 25, bytes(2)), Some(2));
    assert_eq!(account.total(100, bytes(2)).1, 20);
}

#[test]
fn more_segments_than_can_be_told_apart_are_covered_with_the_last() {
    let mut account = Account::default();
    for count in 1..=SEGMENTS as u64 + 2 {
        account.sample(count, bytes(count - 1), bytes(1));
        account.close(count, 0, count, bytes(count));
    }
    let (all, last) = (bytes(SEGMENTS as u64 + 2), SEGMENTS as u64 + 2);
    assert_eq!(account.confirm(flush(last), 50, all), Some(SEGMENTS as u64 - 1));
    assert_eq!(account.confirm(flush(last + 1), 60, all), Some(last));
    assert_eq!(account.total(100, all).1, 60 - SEGMENTS as u64);
}

/// Flush-alls are compared by generation, whatever the numbers of other flushes.
#[test]
fn a_flush_of_all_queues_covers_what_was_queued_before_it_asked() {
    let mut account = Account::default();
    account.sample(0, bytes(0), bytes(1));
    account.close(7, 1, 1, bytes(1));
    account.sample(5, bytes(1), bytes(1));
    account.close(7, 2, 2, bytes(2));
    let all = |generation| Flush { number: 3, generation };
    assert_eq!(account.confirm(all(1), 8, bytes(2)), None);
    assert_eq!(account.confirm(all(2), 10, bytes(2)), Some(1));
    assert_eq!(account.confirm(all(3), 25, bytes(2)), Some(2));
    assert_eq!(account.total(100, bytes(2)).1, 20);
}
