use super::*;

#[test]
fn every_policy_is_kept_as_it_is() {
    let all = [Policy::Passthrough, Policy::Strict, Policy::LAZY, Policy::Lazy { window_ns: 0 }];
    for policy in all.map(Some).into_iter().chain([None]) {
        assert_eq!(decode(encode(policy)), policy);
    }
    let longest = decode(encode(Some(Policy::Lazy { window_ns: u64::MAX })));
    assert_eq!(longest, Some(Policy::Lazy { window_ns: u64::MAX - LAZY }));
}

#[test]
fn the_window_is_that_of_the_exception_or_of_the_domain() {
    let lazy = |window_ns| Some(Policy::Lazy { window_ns });
    let window = |exception: Option<Policy>, own: Option<Policy>| {
        AtomicPolicy::new(own).window(Some(&AtomicPolicy::new(exception)))
    };
    assert_eq!([window(None, lazy(7)), window(lazy(0), lazy(7))], [Some(7), Some(0)]);
    assert_eq!([window(Some(Policy::Strict), lazy(7)), window(None, Some(Policy::Strict))], [None; 2]);
    assert_eq!(window(None, Some(Policy::Passthrough)), None);
    assert_eq!(AtomicPolicy::new(lazy(7)).window(None), Some(7));
    assert_eq!(AtomicPolicy::new(Some(Policy::Strict)).window(None), None);
}

#[test]
fn policies_are_ordered_by_what_they_leave_open() {
    let short = Policy::Lazy { window_ns: 1 };
    let order = [Policy::Strict, short, Policy::LAZY, Policy::Passthrough];
    for (index, policy) in order.iter().enumerate() {
        assert!(order[..index].iter().all(|stricter| policy.is_weaker_than(*stricter)));
        assert!(order[index..].iter().all(|weaker| !policy.is_weaker_than(*weaker)));
    }
}

#[test]
fn the_usual_window_is_long_where_all_share_one_queue() {
    let dear = Costs { submission_ns: 1_000_000, ..Costs::BARE_METAL };
    assert!(dear.shares_one_queue() && !Costs::BARE_METAL.shares_one_queue());
    assert_eq!(Policy::lazy_for(&dear), Policy::Lazy { window_ns: 1_000_000_000 });
    assert_eq!(Policy::lazy_for(&Costs::BARE_METAL), Policy::Lazy { window_ns: 10_000_000 });
}
