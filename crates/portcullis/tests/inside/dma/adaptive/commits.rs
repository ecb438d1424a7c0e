use super::*;

#[test]
fn a_commit_is_shared_out_among_as_many_as_there_would_be() {
    let mut commits = Commits::new(32);
    assert_eq!(commits.share(), 0);
    commits.idle();
    commits.note(3200);
    assert_eq!(commits.share(), 100, "as in a full batch");
    for n in 0..400 {
        commits.count();
        if n % 4 == 3 {
            commits.idle();
        }
    }
    assert!((700..=800).contains(&commits.share()), "{}", commits.share());
    (0..100).for_each(|_| commits.idle());
    assert!((700..=800).contains(&commits.share()), "without descriptors it says nothing");
    (0..32 * 100).for_each(|_| commits.count());
    assert!((100..=105).contains(&commits.share()), "{}", commits.share());
}

#[test]
fn a_commit_that_was_interrupted_counts_for_eight_usual_ones_at_most() {
    let mut commits = Commits::new(1);
    commits.note(100);
    commits.note(1_000_000);
    assert_eq!(commits.ns(), 100 / 2 + 8 * 100 / 2);
    commits.note(0);
    assert_eq!(commits.ns(), 225, "and is forgotten soon");
}

#[test]
fn a_clock_that_leaps_overflows_nothing() {
    let mut commits = Commits::new(0);
    (0..3).for_each(|_| commits.note(u64::MAX));
    commits.count();
    assert!(commits.share() > 0);
}
