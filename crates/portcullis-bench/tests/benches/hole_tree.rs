//! The tree of holes: its bounds, and cases that others are known to get wrong.

use crate::iova_model::Rng;
use portcullis::iova::{BitmapError, MAX_ORDER};
use portcullis_bench::iova::HoleTree;

/// A search for `pages + alignment - 1` pages would overlook each of these.
#[test]
fn a_hole_that_fits_exactly_is_found() {
    for order in 0..=MAX_ORDER {
        let align = 1_u64 << order;
        for pages in [1, align, align + 1, 3 * align] {
            let mut tree = HoleTree::new();
            // Long enough, but never from an aligned page on.
            for unit in [40, 50] {
                if align > 1 {
                    let first = unit * align + 1;
                    tree.add(first, (align - 1).min(pages + align - 2)).unwrap();
                }
            }
            tree.add(8 * align, pages).unwrap();
            assert_eq!(tree.alloc(pages, order, u64::MAX), Ok(8 * align), "{pages} pages, order {order}");
            assert!(tree.iter().all(|(start, _)| start > 40 * align));
            assert_eq!(tree.check(), Ok(()));
        }
    }
}

#[test]
fn the_limit_cuts_the_hole_that_it_lies_in() {
    let mut tree = HoleTree::new();
    tree.add(0x10, 0x100).unwrap();
    tree.add(0x1000, 0x1000).unwrap();
    // 0x17f0..=0x17ff ends on the limit; one page less and the hole still serves it, further down.
    assert_eq!(tree.alloc(0x10, 4, 0x17ff), Ok(0x17f0));
    assert_eq!(tree.alloc(0x10, 4, 0x17fe), Ok(0x17e0));
    // Within the limit the upper hole has too little: the lower one is next.
    assert_eq!(tree.alloc(0x10, 4, 0x100e), Ok(0x100));
    assert_eq!(tree.alloc(1, 0, 0x1000), Ok(0x1000));
    assert_eq!(tree.alloc(1, 0, 0x10), Ok(0x10));
    assert_eq!(tree.alloc(1, 0, 0x10), Err(BitmapError::NoFit));
    assert_eq!(tree.check(), Ok(()));
}

#[test]
fn a_second_free_is_refused_and_changes_nothing() {
    let mut tree = HoleTree::new();
    tree.add(0, 100).unwrap();
    let first = tree.alloc(10, 0, 49).unwrap();
    assert_eq!(first, 40);
    tree.free(first, 10).unwrap();
    assert_eq!(tree.free(first, 10), Err(BitmapError::Invalid));
    assert_eq!(tree.iter().collect::<Vec<_>>(), [(0, 100)]);
    assert_eq!(tree.check(), Ok(()));
}

#[test]
fn the_largest_space_and_the_largest_numbers() {
    let mut tree = HoleTree::new();
    assert_eq!(tree.add(0, 0), Err(BitmapError::Invalid));
    assert_eq!(tree.add(1, u64::MAX), Err(BitmapError::Invalid));
    assert_eq!(tree.free(u64::MAX, 1), Err(BitmapError::Invalid));
    assert_eq!(tree.reserve(u64::MAX, u64::MAX), Err(BitmapError::Invalid));
    assert_eq!(tree.reserve(0, u64::MAX), Ok(0));
    tree.add(0, u64::MAX).unwrap();
    assert_eq!((tree.free_pages(), tree.largest_hole()), (u64::MAX, u64::MAX));
    assert_eq!(tree.alloc(u64::MAX, MAX_ORDER, u64::MAX), Ok(0));
    assert_eq!(tree.alloc(1, 0, u64::MAX), Err(BitmapError::NoFit));
    assert_eq!((tree.free_pages(), tree.largest_hole()), (0, 0));
    tree.free(0, u64::MAX).unwrap();
    assert_eq!(tree.alloc(1, MAX_ORDER, u64::MAX), Ok(u64::MAX << MAX_ORDER));
    assert_eq!(tree.alloc(1, 0, 0), Ok(0));
    assert_eq!(tree.alloc(1, u32::MAX, 0), Err(BitmapError::Invalid));
    assert_eq!(tree.reserve(0, u64::MAX), Ok(u64::MAX - 2));
    assert_eq!((tree.free_pages(), tree.holes()), (0, 0));
    assert_eq!(tree.check(), Ok(()));
    tree.free(u64::MAX << MAX_ORDER, 1).unwrap();
    tree.free(0, 1).unwrap();
    assert_eq!(tree.check(), Ok(()));
}

#[test]
fn taking_and_giving_back_in_the_same_place_does_not_accumulate_nodes() {
    let mut tree = HoleTree::new();
    tree.add(0, 1 << 20).unwrap();
    let kept = tree.alloc(1, 0, 100).unwrap();
    let held = tree.memory_bytes();
    for _ in 0..100_000 {
        // Two allocations, one free: the tree counts one allocation too many, but no more than there are
        // pages.
        let (upper, lower) = (tree.alloc(1, 0, u64::MAX).unwrap(), tree.alloc(1, 0, u64::MAX).unwrap());
        assert_eq!(lower + 1, upper);
        tree.free(lower, 2).unwrap();
        // A window in the middle that comes and goes.
        tree.reserve(5000, 10).unwrap();
        tree.add(5000, 10).unwrap();
    }
    assert!(tree.memory_bytes() <= held.max(64 * 16), "{} bytes, {held} before", tree.memory_bytes());
    tree.free(kept, 1).unwrap();
    assert_eq!(tree.holes(), 1);
}

/// AVL trees are lower than 1.4405 log2(n + 2).
fn assert_low(tree: &HoleTree) {
    let bound = 1.4405 * ((tree.holes() + 2) as f64).log2();
    assert!(f64::from(tree.height()) <= bound, "{} levels for {} holes", tree.height(), tree.holes());
}

#[test]
fn a_hundred_thousand_ranges_are_freed_in_random_order() {
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let mut tree = HoleTree::new();
    tree.add(1, (1 << 24) - 1).unwrap();
    let mut live: Vec<(u64, u64)> = (0..100_000)
        .map(|_| {
            let pages = 1 + rng.below(64);
            (tree.alloc(pages, pages.next_power_of_two().ilog2(), u64::MAX).unwrap(), pages)
        })
        .collect();
    let held = tree.memory_bytes();
    rng.shuffle(&mut live);
    for (count, (first, pages)) in live.into_iter().enumerate() {
        tree.free(first, pages).unwrap();
        if count % 4999 == 0 {
            assert_eq!(tree.check(), Ok(()));
        }
        assert_low(&tree);
    }
    assert_eq!(tree.iter().collect::<Vec<_>>(), [(1, (1 << 24) - 1)]);
    assert_eq!(tree.memory_bytes(), held, "frees neither need nor return memory");
    assert_eq!(tree.check(), Ok(()));
}

/// Orders of insertion and removal that degenerate trees which are not balanced.
#[test]
fn monotonic_orders_keep_the_tree_low() {
    let mut tree = HoleTree::new();
    for page in 0..20_000 {
        tree.add(2 * page, 1).unwrap();
        assert_low(&tree);
    }
    assert_eq!(tree.check(), Ok(()));
    for page in 0..15_000 {
        assert_eq!(tree.reserve(2 * page, 1), Ok(1));
        assert_low(&tree);
    }
    assert_eq!(tree.check(), Ok(()));
    for page in (15_000..20_000).rev() {
        assert_eq!(tree.alloc(1, 0, u64::MAX), Ok(2 * page));
        assert_low(&tree);
    }
    assert_eq!((tree.holes(), tree.free_pages(), tree.height()), (0, 0, 0));
}

/// 50 000 holes, all long enough and none aligned, above the only one that serves: walking over them would
/// take 10^9 steps here.
#[test]
fn holes_that_do_not_serve_are_not_walked() {
    const HOLES: u64 = 50_000;
    let mut tree = HoleTree::new();
    tree.add(0, 8).unwrap();
    for unit in 1..=HOLES {
        tree.add(unit * 32 + 1, 14).unwrap();
    }
    for round in 0..HOLES {
        // Just below, in and above the holes that are in the way.
        let max_page = 40 + 32 * round;
        assert_eq!(tree.alloc(8, 4, max_page), Ok(0));
        assert_eq!(tree.alloc(8, 4, max_page), Err(BitmapError::NoFit));
        tree.free(0, 8).unwrap();
    }
    assert_eq!(tree.check(), Ok(()));
}
