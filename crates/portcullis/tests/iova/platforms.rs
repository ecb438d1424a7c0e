//! A space that is used with several platforms, whose CPUs have the same numbers: the lists are those of the first, and no
//! other's CPU or barrier gets at them.

use std::collections::BTreeMap;

use crate::chosen::{ANYWHERE, Chosen, alloc, config, free};
use crate::iova_model::Rng;
use portcullis::addr::{Iova, IovaRange};
use portcullis::iova::{IovaError, IovaSpace};

/// A space of `pages` that its first platform was used with, and keeps something of; and another
/// platform, which in every other case does not say who it is.
fn each(pages: u64, test: impl Fn(&IovaSpace, &Chosen, &Chosen)) {
    for other in [Chosen::new(1), Chosen::silent(1)] {
        let space = IovaSpace::new(&config(1, pages, 1)).unwrap();
        let home = Chosen::new(1);
        let range = alloc(&space, &home, 1, ANYWHERE).unwrap();
        free(&space, &home, range).unwrap();
        assert!(space.usage().cached > 0);
        test(&space, &home, &other);
    }
}

#[test]
fn anothers_cpu_of_the_same_number_gets_nothing_of_what_the_first_keeps() {
    each(1 << 16, |space, home, other| {
        let kept = space.usage().cached;
        // By the fast way, and by the slow one, which would fetch more.
        let theirs = [1, 1, 2].map(|pages| alloc(space, other, pages, ANYWHERE).unwrap());
        assert_eq!(space.usage().cached, kept, "taken from a list");
        theirs.into_iter().for_each(|range| free(space, other, range).unwrap());
        assert_eq!(space.usage().cached, kept, "put onto a list");
        // What it frees of the first one's, by the fast way and by the slow one.
        let ours = [1, 2].map(|pages| alloc(space, home, pages, ANYWHERE).unwrap());
        let kept = space.usage().cached;
        ours.into_iter().for_each(|range| free(space, other, range).unwrap());
        assert_eq!(space.usage().cached, kept, "put onto a list");
    });
}

/// Its barrier need not reach the CPUs of the first.
#[test]
fn anothers_barrier_takes_nothing_back() {
    each(64, |space, home, other| {
        let kept = space.usage().cached;
        space.drain_all(other);
        space.drain_cpu(other, 0);
        // All that is left, and then no more.
        let mut theirs = Vec::new();
        let error = loop {
            match alloc(space, other, 1, ANYWHERE) {
                Ok(range) => theirs.push(range),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, IovaError::Exhausted { free: 0, cached, .. } if cached == kept), "{error}");
        assert_eq!((space.usage().cached, other.fences()), (kept, 0));
        theirs.into_iter().for_each(|range| free(space, other, range).unwrap());
        space.drain_all(home);
        assert_eq!((space.usage().taken, home.fences()), (0, 1));
    });
}

#[test]
fn whoever_allocates_and_frees_nothing_is_handed_out_twice() {
    each(1 << 10, |space, home, other| {
        let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
        let mut live = BTreeMap::new();
        for _ in 0..20_000 {
            let platform = if rng.below(2) == 0 { home } else { other };
            if rng.below(5) < 3
                && let Ok(range) = alloc(space, platform, 1 + rng.below(8), ANYWHERE)
            {
                let before = live.range(..=range.last()).next_back();
                assert!(before.is_none_or(|(_, last)| *last < range.start()), "{range} is handed out");
                live.insert(range.start(), range.last());
            } else if let Some((start, last)) = live.range(Iova::new(rng.below(1 << 22))..).next() {
                let range = IovaRange::from_bounds(*start, *last).unwrap();
                live.remove(&range.start());
                free(space, platform, range).unwrap();
            }
        }
        for (start, last) in live {
            free(space, other, IovaRange::from_bounds(start, last).unwrap()).unwrap();
        }
        space.drain_all(home);
        assert_eq!(space.usage().taken, 0);
    });
}
