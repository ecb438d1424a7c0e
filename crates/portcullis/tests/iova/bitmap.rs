//! The hierarchical bitmap: its bounds, and cases that others are known to get wrong.

use portcullis::iova::{Bitmap, BitmapError, MAX_ORDER, Survey};

use crate::iova_model::largest_hole;

/// The page behind the last that a bitmap can hold.
const END: u64 = 1 << 54;

/// A search for `pages + alignment - 1` pages would overlook each of these.
#[test]
fn a_hole_that_fits_exactly_is_found() {
    for order in 0..=MAX_ORDER {
        let align = 1_u64 << order;
        // Below order 9 with natural alignment alone.
        let sizes = [1, align, align + 1, 3 * align];
        for pages in sizes.into_iter().filter(|pages| *pages <= align || order >= 9) {
            let mut space = Bitmap::new();
            // Long enough, but never from an aligned page on.
            for unit in [2, 40] {
                if align > 1 {
                    space.add(unit * align + 1, (align - 1).min(pages + align - 2)).unwrap();
                }
            }
            space.add(8 * align, pages).unwrap();
            assert_eq!(space.alloc(pages, order, u64::MAX), Ok(8 * align), "{pages}, order {order}");
            assert_eq!(space.alloc(pages, order, u64::MAX), Err(BitmapError::NoFit));
            assert_eq!(space.check(), Ok(()));
        }
    }
}

#[test]
fn the_limit_cuts_the_hole_that_it_lies_in() {
    let mut space = Bitmap::new();
    space.add(0x10, 0x100).unwrap();
    space.add(0x1000, 0x1000).unwrap();
    // 0x17f0..0x1800 ends on the limit; one page less and the hole still serves it, further down.
    assert_eq!(space.alloc(0x10, 4, 0x1800), Ok(0x17f0));
    assert_eq!(space.alloc(0x10, 4, 0x17ff), Ok(0x17e0));
    // Within the limit the upper hole has too little: the lower one is next.
    assert_eq!(space.alloc(0x10, 4, 0x100f), Ok(0x100));
    assert_eq!(space.alloc(1, 0, 0x1001), Ok(0x1000));
    assert_eq!(space.alloc(1, 0, 0x11), Ok(0x10));
    assert_eq!(space.alloc(1, 0, 0x11), Err(BitmapError::NoFit));
    assert_eq!(space.check(), Ok(()));
}

/// Every other page is free in 610 leaves, all are in 390 between them, and behind them is a hole without bits. Each part of a
/// survey looks at a bounded number of leaves, and a hole that lies across parts counts as one.
#[test]
fn a_survey_is_made_in_bounded_parts() {
    let mut space = Bitmap::new();
    let leaves = 1000;
    space.add(0, leaves * 512).unwrap();
    (0..leaves * 256).for_each(|pair| assert_eq!(space.reserve(2 * pair + 1, 1), Ok(1)));
    space.add(leaves * 512, 1 << 30).unwrap();
    (10 * 512..400 * 512).filter(|page| page % 2 == 1).for_each(|page| space.free(page, 1).unwrap());
    let mut survey = Survey::new(leaves * 512 + 5);
    let (mut parts, mut before) = (1, 0);
    while !space.survey(&mut survey) {
        parts += 1;
        // A node with eight leaves that are free counts once.
        assert!(before < survey.free && survey.free <= before + 32 * 8 * 512, "{survey:?}");
        before = survey.free;
    }
    assert!(parts > 610 / 32, "{parts} parts");
    assert_eq!(survey.largest, 390 * 512 + 1);
    assert_eq!(survey.free, leaves * 256 + 390 * 256 + 5);
}

#[test]
fn a_second_free_is_refused_and_changes_nothing() {
    let mut space = Bitmap::new();
    space.add(0, 5000).unwrap();
    let first = space.alloc(10, 4, 3000).unwrap();
    assert_eq!(first, 2976);
    space.free(first, 10).unwrap();
    assert_eq!(space.free(first, 10), Err(BitmapError::Invalid));
    assert_eq!(space.iter().collect::<Vec<_>>(), [(0, 5000)]);
    assert_eq!(space.check(), Ok(()));
}

/// The only hole, as long as what is asked for, ends at the limit, inside a node of each height.
#[test]
fn a_hole_that_fits_exactly_is_found_below_a_limit_that_cuts_its_node() {
    for shift in 14..50 {
        for pages in [513, 1024, 3 * 512, 1 << 13] {
            let mut space = Bitmap::new();
            let first = (5 << shift) + 1024;
            space.add(first, pages).unwrap();
            let end = first + pages;
            assert_eq!(space.alloc(pages, 9, end - 1), Err(BitmapError::NoFit), "{first:#x}");
            assert_eq!(space.alloc(pages, 9, end), Ok(first), "{pages} at {first:#x}");
        }
    }
}

/// A page behind all that there are bits for is none of theirs: not page 0 either, on which its number falls in the lowest nodes.
#[test]
fn what_lies_just_behind_the_space_is_given_back_there() {
    for shift in 9..54 {
        let (first, end) = (1, 1 << shift);
        let mut space = Bitmap::new();
        space.add(0, end).unwrap();
        assert_eq!(space.reserve(0, first), Ok(1));
        space.free(end, 1).unwrap();
        assert_eq!(space.iter().collect::<Vec<_>>(), [(first, end)], "up to {end:#x}");
        assert_eq!(space.check(), Ok(()));
    }
}

#[test]
fn the_largest_space_and_the_largest_numbers() {
    let mut space = Bitmap::new();
    assert_eq!(space.alloc(1, 0, u64::MAX), Err(BitmapError::NoFit));
    assert_eq!((space.free_pages(), largest_hole(&space)), (0, 0));
    assert_eq!(space.add(0, 0), Err(BitmapError::Invalid));
    assert_eq!(space.add(1, END), Err(BitmapError::Invalid));
    assert_eq!(space.add(END, 1), Err(BitmapError::Invalid));
    assert_eq!(space.free(u64::MAX, 1), Err(BitmapError::Invalid));
    assert_eq!(space.reserve(u64::MAX, u64::MAX), Err(BitmapError::Invalid));
    assert_eq!(space.free(u64::MAX, 0), Err(BitmapError::Invalid));
    assert_eq!(space.reserve(0, u64::MAX), Ok(0));
    space.add(0, END).unwrap();
    assert_eq!((space.free_pages(), largest_hole(&space)), (END, END));
    assert_eq!(space.alloc(END, MAX_ORDER, u64::MAX), Ok(0));
    assert_eq!(space.alloc(u64::MAX, MAX_ORDER, u64::MAX), Err(BitmapError::NoFit));
    assert_eq!(space.alloc(3, 1, u64::MAX), Err(BitmapError::Invalid));
    assert_eq!((space.free_pages(), largest_hole(&space)), (0, 0));
    space.free(0, END).unwrap();
    assert_eq!(space.alloc(1, MAX_ORDER, u64::MAX), Ok(END - (1 << MAX_ORDER)));
    assert_eq!(space.alloc(1, 0, 0), Err(BitmapError::NoFit));
    assert_eq!(space.alloc(1, 0, 1), Ok(0));
    assert_eq!(space.alloc(1, u32::MAX, 0), Err(BitmapError::Invalid));
    assert_eq!(space.alloc(0, u32::MAX, 0), Err(BitmapError::Invalid));
    assert_eq!(space.alloc_run(u32::MAX, (0, END), 2, |_| ()), Err(BitmapError::Invalid));
    assert_eq!(space.reserve(0, u64::MAX), Ok(END - 2));
    assert_eq!((space.free_pages(), space.iter().count()), (0, 0));
    assert_eq!(space.check(), Ok(()));
}

#[test]
fn little_memory_for_little_use() {
    let mut space = Bitmap::new();
    assert_eq!(space.memory_bytes(), 0);
    space.add(1, (1 << 36) - 1).unwrap();
    space.reserve(0xfee00, 0x100).unwrap();
    assert!(space.memory_bytes() < 4096, "{} bytes", space.memory_bytes());
    for _ in 0..1 << 16 {
        space.alloc(1, 0, u64::MAX).unwrap();
    }
    assert!(space.memory_bytes() < 1 << 16, "{} bytes", space.memory_bytes());
    assert_eq!(space.check(), Ok(()));
}

/// 20 000 holes, all long enough and none aligned, above the only one that serves: walking over them would
/// take 4 x 10^8 steps here.
#[test]
fn holes_that_do_not_serve_are_not_walked() {
    const HOLES: u64 = 20_000;
    let mut space = Bitmap::new();
    space.add(0, 8).unwrap();
    for unit in 1..=HOLES {
        space.add(unit * 32 + 1, 14).unwrap();
    }
    for round in 0..HOLES {
        // Just below, in and above the holes that are in the way.
        let end = 41 + 32 * round;
        assert_eq!(space.alloc(8, 4, end), Ok(0));
        assert_eq!(space.alloc(8, 4, end), Err(BitmapError::NoFit));
        space.free(0, 8).unwrap();
    }
    assert_eq!(space.check(), Ok(()));
}
