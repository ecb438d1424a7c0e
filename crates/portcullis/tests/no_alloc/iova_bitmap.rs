//! Giving back what was taken needs no memory, in whatever order, and running out of it changes
//! nothing.

use crate::iova_model::{Rng, largest_hole};
use crate::limited::granting as limited;
use portcullis::iova::{Bitmap, BitmapError};

fn space() -> Bitmap {
    let mut space = Bitmap::new();
    space.add(1, (1 << 36) - 1).unwrap();
    space.reserve(0xfee00, 0x100).unwrap();
    space
}

/// A request: mostly small, sometimes of up to 1 GiB.
fn request(rng: &mut Rng) -> (u64, u32, u64) {
    let pages = match rng.below(20) {
        0 => 1 + rng.below(1 << 18),
        1 => 1 << rng.below(19),
        2..=4 => 1 + rng.below(5000),
        _ => 1 + rng.below(64),
    };
    let natural = pages.next_power_of_two().ilog2();
    let order = if rng.below(3) == 0 { natural.max(rng.below(19) as u32) } else { natural };
    (pages, order, if rng.below(4) == 0 { 1 << 20 } else { u64::MAX })
}

#[test]
fn frees_in_any_order_need_no_memory() {
    let mut space = space();
    let mut rng = Rng(0x2545_f491_4f6c_dd1d);
    let free = space.free_pages();
    let mut live: Vec<(u64, u64)> = Vec::new();
    for round in 0..30 {
        for _ in 0..rng.below(60) {
            let (pages, order, max_page) = request(&mut rng);
            if let Ok(first) = space.alloc(pages, order, max_page) {
                live.push((first, pages));
            }
        }
        rng.shuffle(&mut live);
        let keep = if round == 29 { 0 } else { rng.below(live.len() as u64 + 1) as usize };
        let (refused, calls) = limited(0, || {
            live.drain(keep..).filter(|&(first, pages)| space.free(first, pages).is_err()).count()
        });
        assert_eq!((refused, calls), (0, 0));
        assert_eq!(space.check(), Ok(()));
    }
    assert_eq!((space.free_pages(), space.iter().count()), (free, 2));
}

/// The largest need none either; where a part does, what it gets is an error.
#[test]
fn huge_ranges_given_back_whole_need_no_memory() {
    let mut space = space();
    let free = space.free_pages();
    let ranges = [(1_u64 << 35, 18), ((1 << 30) + 12345, 9), ((1 << 18) + 1, 18)];
    let live = ranges.map(|(pages, order)| (space.alloc(pages, order, u64::MAX).unwrap(), pages));
    let (part, calls) = limited(0, || space.free(live[0].0 + (1 << 20) + 1, 1));
    assert!(matches!(part, Err(BitmapError::OutOfMemory)), "{part:?}");
    assert!(calls > 0);
    assert_eq!(space.check(), Ok(()));
    let (refused, calls) =
        limited(0, || live.iter().filter(|&&(first, pages)| space.free(first, pages).is_err()).count());
    assert_eq!((refused, calls), (0, 0));
    assert_eq!((space.free_pages(), space.check()), (free, Ok(())));
}

/// Each operation with only so many requests for memory granted: it succeeds or changes nothing, and it is
/// the same as one that was never short once there is memory.
#[test]
fn without_memory_nothing_changes() {
    let (mut space, mut rich) = (space(), space());
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let mut live = Vec::new();
    let mut short = 0;
    for round in 0..400 {
        let (pages, order, max_page) = request(&mut rng);
        let grants = rng.below(2) as usize;
        let before = (space.free_pages(), largest_hole(&space));
        let (result, _) = limited(grants, || space.alloc(pages, order, max_page));
        if let Err(BitmapError::OutOfMemory) = result {
            short += 1;
            assert_eq!((space.free_pages(), largest_hole(&space)), before);
        } else {
            assert_eq!(result, rich.alloc(pages, order, max_page));
            live.extend(result.ok().map(|first| (first, pages)));
        }
        while live.len() as u64 > 20 + rng.below(20) {
            let (first, pages) = live.swap_remove(rng.below(live.len() as u64) as usize);
            assert_eq!(limited(0, || space.free(first, pages)), (Ok(()), 0));
            rich.free(first, pages).unwrap();
        }
        let (at, len) = (rng.below(1 << 36), 1 + rng.below(10_000));
        let (reserved, _) = limited(grants, || if round % 20 == 0 { space.reserve(at, len) } else { Ok(0) });
        if round % 20 == 0 && reserved.is_ok() {
            assert_eq!(reserved, rich.reserve(at, len));
        }
        assert_eq!(space.check(), Ok(()));
        assert!(space.iter().eq(rich.iter()));
    }
    assert!(short > 5, "only {short} times short");
}

/// A range lies in a leaf that nothing is in any more, and in another one, which is not there. The first is collected for the second, so two
/// are needed.
#[test]
fn a_leaf_that_is_collected_for_its_own_range_is_needed_again() {
    let mut space = Bitmap::new();
    space.add(0, 1 << 20).unwrap();
    let page = space.alloc(1, 0, 511).unwrap();
    space.free(page, 1).unwrap();
    let (refused, _) = limited(0, || space.reserve(511, 2));
    assert!(matches!(refused, Err(BitmapError::OutOfMemory)), "{refused:?}");
    assert_eq!((space.free_pages(), space.check()), (1 << 20, Ok(())));
    assert_eq!(space.reserve(511, 2).unwrap(), 2);
    assert_eq!((space.free_pages(), space.check()), ((1 << 20) - 2, Ok(())));
}

#[test]
fn an_empty_space_without_memory_stays_empty() {
    let mut space = Bitmap::new();
    let (refused, _) = limited(0, || space.add(0, 100));
    assert!(matches!(refused, Err(BitmapError::OutOfMemory)), "{refused:?}");
    assert_eq!((space.free_pages(), largest_hole(&space), space.memory_bytes()), (0, 0, 0));
    assert_eq!(space.check(), Ok(()));
    assert_eq!(space.iter().count(), 0);
}

/// What is free again is used again, also where the next allocations go elsewhere.
#[test]
fn memory_of_places_no_longer_in_use_is_used_again() {
    let mut space = Bitmap::new();
    space.add(0, 1 << 36).unwrap();
    let mut held = 0;
    for round in 0..40_u64 {
        let max_page = (1 << 35) + (round << 20);
        let pages: Vec<u64> = (0..5_000).map(|_| space.alloc(1, 0, max_page).unwrap()).collect();
        pages.into_iter().for_each(|page| space.free(page, 1).unwrap());
        held = held.max(if round < 4 { space.memory_bytes() } else { 0 });
    }
    assert!(space.memory_bytes() <= 2 * held, "{} bytes, {held} at first", space.memory_bytes());
    assert_eq!((space.check(), space.free_pages()), (Ok(()), 1 << 36));
}
