//! Failures that other allocators are known for, tried on whole spaces: searches that are linear (2), and
//! that miss what fits (5). 1, 3 and 6 are in `iova/space.rs`, 4 in `no_alloc/iova_space.rs`, the lazy half
//! of 6 in `domain/failures/f06_timer_drains.rs`.

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use crate::iova_model::Rng;
use portcullis::addr::{Iova, IovaRange};
use portcullis::iova::{Bitmap, IovaError, IovaSpace, MAX_ORDER, SpaceConfig};

/// The most levels that a bitmap has, whatever the holes.
const LEVELS: usize = 15;

/// Failure 2: ranges freed in random order make the next searches linear.
///
/// Every call goes past the lists to the bitmap. Its steps cannot be counted from outside. What is asserted:
/// how many holes a walk from the top looks at on the way to the same answers, so that the work is hard; that
/// a bitmap of its own gives the same answers, so that these are its holes; and that no call had to empty a
/// CPU's lists. The bitmap's height is that of the space, whatever the holes.
#[test]
fn holes_left_by_frees_in_random_order_are_not_walked() {
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let platform = Chosen::new(1);
    let pages = (1 << 24) - 1;
    let space = IovaSpace::new(&config(1, pages, 1)).unwrap();
    let mut bitmap = Bitmap::new();
    bitmap.add(1, pages).unwrap();
    platform.be(1);
    let order = |pages: u64| pages.next_power_of_two().ilog2();
    let both = |bitmap: &mut Bitmap, pages: u64| {
        let range = alloc(&space, &platform, pages, ANYWHERE).unwrap();
        assert_eq!(bitmap.alloc(1 << order(pages), order(pages), u64::MAX), Ok(range.start().get() / PAGE));
        range
    };
    let both_freed = |bitmap: &mut Bitmap, range: IovaRange| {
        free(&space, &platform, range).unwrap();
        bitmap.free(range.start().get() / PAGE, (range.len() / PAGE).next_power_of_two()).unwrap();
    };
    let mut live: Vec<IovaRange> = (0..100_000).map(|_| both(&mut bitmap, 1 + rng.below(64))).collect();
    // Replaced one by one: each is freed before the next is allocated.
    let (mut walked, mut samples, mut most) = (0, 0, 0);
    for step in 0..50_000 {
        let which = rng.below(live.len() as u64) as usize;
        both_freed(&mut bitmap, live[which]);
        let sample = step % 250 == 0;
        let before: Vec<(u64, u64)> = if sample { bitmap.iter().collect() } else { Vec::new() };
        live[which] = both(&mut bitmap, 1 + rng.below(64));
        if sample {
            let page = live[which].start().get() / PAGE;
            walked += before.iter().filter(|hole| hole.0 + hole.1 > page).count();
            samples += 1;
            most = most.max(before.len());
        }
    }
    let walk = walked / samples;
    println!("up to {most} holes, a walk looks at {walk}");
    assert!(walk > 20 * LEVELS, "{walk} holes on the way: too easy");
    rng.shuffle(&mut live);
    live.into_iter().for_each(|range| both_freed(&mut bitmap, range));
    assert_eq!(platform.fences(), 0, "nobody's lists were emptied");
    assert_eq!((space.usage().taken, bitmap.iter().count(), bitmap.check()), (0, 1, Ok(())));
}

/// Failure 2 again, where no luck helps: 20,000 holes that are long enough, and none of them aligned, above
/// the only one that serves. Walking over them would take 4 x 10^8 steps.
#[test]
fn holes_that_do_not_serve_are_not_walked() {
    const HOLES: u64 = 20_000;
    let (platform, stranger) = (Chosen::new(1), Chosen::silent(1));
    // Units of 32 pages: free in each are 14, from the second on. The lowest unit begins with 16 free.
    let taken = (0..=HOLES).map(|unit| {
        let (first, pages) = if unit == 0 { (16, 17) } else { (unit * 32 + 15, 18) };
        IovaRange::new(Iova::new(first * PAGE), pages * PAGE).unwrap()
    });
    let reserved = taken.collect();
    let config = SpaceConfig { reserved, ..config(0, (HOLES + 1) * 32, 1) };
    let space = IovaSpace::new(&config).unwrap();
    for round in 0..HOLES {
        // Just below, in and above the holes that are in the way. Past the lists, which would find it.
        platform.be(1);
        let limit = Iova::new((40 + 32 * round) * PAGE);
        let range = alloc(&space, &platform, 16, limit).unwrap();
        assert_eq!(range.start().get(), 0);
        // Nor does anything else, and nobody's lists are emptied for one whose barrier does not count. (To say how much is free,
        // the error walks over all holes; so this is not looked at each time.)
        assert!(!round.is_multiple_of(64) || alloc(&space, &stranger, 16, limit).is_err());
        free(&space, &platform, range).unwrap();
    }
    assert_eq!((platform.fences(), space.usage().taken), (0, 0));
}

/// Failure 2 with the lists in between: no order of frees makes a call empty another CPU's lists, and all
/// comes back.
#[test]
fn lists_filled_by_frees_in_random_order_empty_nobody_elses() {
    let mut rng = Rng(0x2545_f491_4f6c_dd1d);
    let platform = Chosen::new(3);
    let space = IovaSpace::new(&config(1, 1 << 25, 3)).unwrap();
    let take =
        |cpu: usize, rng: &mut Rng| alloc(&space, platform.be(cpu), 1 + rng.below(64), ANYWHERE).unwrap();
    let mut live: Vec<IovaRange> = (0..40_000).map(|step| take(step % 4, &mut rng)).collect();
    rng.shuffle(&mut live);
    for (step, range) in live.drain(20_000..).enumerate() {
        free(&space, platform.be(step % 4), range).unwrap();
    }
    for step in 0..20_000 {
        live.push(take(step % 4, &mut rng));
    }
    rng.shuffle(&mut live);
    for (step, range) in live.into_iter().enumerate() {
        free(&space, platform.be(step % 4), range).unwrap();
    }
    assert_eq!(platform.fences(), 0);
    space.drain_all(&platform);
    assert_eq!(space.usage().taken, 0);
}

/// Failure 5: a search for `size + alignment - 1` misses a hole that fits exactly. Beside it are longer
/// holes in which nothing of that size begins at a multiple of its alignment.
#[test]
fn a_hole_that_fits_exactly_is_found_in_a_space() {
    for pages in [2, 3, 4, 5, 32, 33, 511, 512, 513, 700, 1024, 5000, (1 << 18) - 1, 1 << 18, (1 << 18) + 5] {
        let align = 1 << u64::next_power_of_two(pages).ilog2().min(MAX_ORDER);
        // What is free: first page and length.
        let decoy = align + pages - 2;
        let holes = [(align + 1, decoy), (8 * align, pages), (16 * align + 1, decoy)];
        let ends = [0].into_iter().chain(holes.iter().map(|hole| hole.0 + hole.1));
        let starts = holes.iter().map(|hole| hole.0).chain([24 * align]);
        let between = ends.zip(starts).map(|(from, to)| {
            IovaRange::from_bounds(Iova::new(from * PAGE), Iova::new(to * PAGE - 1)).unwrap()
        });
        let config = SpaceConfig { reserved: between.collect(), ..config(0, 24 * align, 1) };
        for cpu in [0, 1] {
            let platform = Chosen::new(1);
            platform.be(cpu);
            let space = IovaSpace::new(&config).unwrap();
            assert_eq!(space.usage().total, (2 * decoy + pages) * PAGE);
            for limit in [ANYWHERE, Iova::new((8 * align + pages) * PAGE - 1)] {
                let range = alloc(&space, &platform, pages, limit).unwrap();
                assert_eq!(range.start().get(), 8 * align * PAGE, "{pages} pages");
                let more = alloc(&space, &platform, pages, limit);
                assert!(matches!(more, Err(IovaError::Exhausted { .. })), "{more:?}");
                free(&space, &platform, range).unwrap();
            }
            space.drain_all(&platform);
            assert_eq!(space.usage().taken, 0);
        }
    }
}

/// The same hole made by frees: one page after another of a full space, each on whatever CPU's lists.
#[test]
fn a_hole_that_was_freed_page_by_page_is_found() {
    for cpu in 0..=2 {
        let platform = Chosen::new(2);
        let pages = 1 << 12;
        let space = IovaSpace::new(&config(0, pages, 2)).unwrap();
        platform.be(cpu);
        let mut live: Vec<Option<IovaRange>> = vec![None; pages as usize];
        while let Ok(range) = alloc(&space, &platform, 1, ANYWHERE) {
            live[(range.start().get() / PAGE) as usize] = Some(range);
        }
        assert!(live.iter().all(Option::is_some));
        for order in [0, 1, 3, 6, 9] {
            let first = 5 << order;
            for (step, page) in (first..first + (1 << order)).enumerate() {
                free(&space, platform.be(step % 3), live[page].take().unwrap()).unwrap();
            }
            let range = alloc(&space, platform.be(cpu), 1 << order, ANYWHERE).unwrap();
            assert_eq!(range.start().get(), first as u64 * PAGE);
            assert!(alloc(&space, &platform, 1, ANYWHERE).is_err());
            free(&space, &platform, range).unwrap();
            space.drain_all(&platform);
            for _ in 0..1 << order {
                let range = alloc(&space, &platform, 1, ANYWHERE).unwrap();
                assert!(live[(range.start().get() / PAGE) as usize].replace(range).is_none());
            }
        }
        live.into_iter().flatten().for_each(|range| free(&space, &platform, range).unwrap());
        space.drain_all(&platform);
        assert_eq!(space.usage().taken, 0);
    }
}
