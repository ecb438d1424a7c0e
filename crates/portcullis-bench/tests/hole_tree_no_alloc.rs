//! Giving pages back needs no memory, and running out of it changes nothing. In a binary of its own, because
//! it replaces the global allocator.

#[path = "../../portcullis/tests/iova_model/mod.rs"]
mod iova_model;
#[path = "../../portcullis/tests/limited/mod.rs"]
mod limited;

use iova_model::Rng;
use limited::in_pieces_of as limited;
use portcullis::iova::BitmapError;
use portcullis_bench::iova::HoleTree;

#[test]
fn frees_in_any_order_need_no_memory() {
    let mut rng = Rng(0x2545_f491_4f6c_dd1d);
    let mut tree = HoleTree::new();
    tree.add(1, 1 << 22).unwrap();
    tree.reserve(0xfee0, 0x10).unwrap();
    let mut live: Vec<(u64, u64)> = Vec::new();
    for round in 0..200 {
        for _ in 0..rng.below(200) {
            let pages = 1 + rng.below(64);
            let order = rng.below(8) as u32;
            let max_page = if rng.below(4) == 0 { 1 << 18 } else { u64::MAX };
            if let Ok(first) = tree.alloc(pages, order, max_page) {
                live.push((first, pages));
            }
        }
        rng.shuffle(&mut live);
        let keep = if round == 199 { 0 } else { rng.below(live.len() as u64 + 1) as usize };
        let (failed, calls) = limited(0, || {
            live.drain(keep..).filter(|&(first, pages)| tree.free(first, pages).is_err()).count()
        });
        assert_eq!((failed, calls), (0, 0));
    }
    assert_eq!((tree.holes(), tree.check()), (2, Ok(())));
}

/// Every second page: the most holes that an allocation each can leave behind. The slab is only ever granted
/// as much as was asked for at the least, so nothing that doubling happens to leave over can hide a debt.
#[test]
fn exactly_what_is_owed_is_prepaid() {
    let mut tree = HoleTree::new();
    let mut live = Vec::with_capacity(4096);
    tree.add(0, 1 << 20).unwrap();
    for count in 1..4096_usize {
        // One run and as many holes as allocations; a growing slab gets what that takes and no more.
        let exact = (count + 1) * 64;
        let (first, _) = limited(exact.max(4 * 64), || tree.alloc(1, 0, u64::MAX));
        live.push(first.unwrap());
        // What was paid for the one that goes pays for the one that comes.
        if count % 100 == 7 {
            tree.free(live.remove(count / 2), 1).unwrap();
            live.push(limited(0, || tree.alloc(1, 0, u64::MAX)).0.unwrap());
        }
    }
    assert_eq!(tree.memory_bytes(), 4096 * 64);
    let (failed, calls) = limited(0, || {
        let odd = live.iter().skip(1).step_by(2).filter(|&&page| tree.free(page, 1).is_err()).count();
        let even = live.iter().step_by(2).filter(|&&page| tree.free(page, 1).is_err()).count();
        odd + even
    });
    assert_eq!((failed, calls), (0, 0));
    assert_eq!((tree.holes(), tree.free_pages(), tree.check()), (1, 1 << 20, Ok(())));
}

/// What comes and goes beside what stays leaves no debt behind that later calls would pay for.
#[test]
fn what_was_given_back_is_owed_no_more() {
    let mut tree = HoleTree::new();
    tree.add(0, 1 << 20).unwrap();
    let kept = tree.alloc(1 << 18, 0, u64::MAX).unwrap();
    for _ in 0..1000 {
        let first = tree.alloc(1, 0, u64::MAX).unwrap();
        tree.free(first, 1).unwrap();
    }
    assert!(tree.memory_bytes() <= 4 * 64, "{} bytes", tree.memory_bytes());
    tree.free(kept, 1 << 18).unwrap();
}

#[test]
fn without_memory_nothing_changes() {
    let mut tree = HoleTree::new();
    let (refused, _) = limited(0, || tree.add(0, 100));
    assert!(matches!(refused, Err(BitmapError::OutOfMemory)), "{refused:?}");
    assert_eq!((tree.holes(), tree.free_pages(), tree.check()), (0, 0, Ok(())));

    tree.add(0, 100_000).unwrap();
    let mut live = Vec::with_capacity(4096);
    let (refused, _) = limited(0, || {
        loop {
            match tree.alloc(1, 1, u64::MAX) {
                Ok(first) => live.push(first),
                Err(error) => break error,
            }
        }
    });
    assert!(matches!(refused, BitmapError::OutOfMemory), "{refused:?}");
    let (holes, free) = (tree.holes(), tree.free_pages());
    let before: Vec<_> = tree.iter().collect();
    let (results, _) = limited(0, || (tree.alloc(1, 0, 50), tree.reserve(10, 1)));
    assert!(matches!(results.0, Err(BitmapError::OutOfMemory)), "{results:?}");
    assert!(matches!(results.1, Err(BitmapError::OutOfMemory)), "{results:?}");
    assert_eq!((tree.holes(), tree.free_pages(), tree.check()), (holes, free, Ok(())));
    assert!(tree.iter().eq(before));
    let (failed, calls) = limited(0, || live.iter().filter(|&&first| tree.free(first, 1).is_err()).count());
    assert_eq!((failed, calls), (0, 0));
    assert_eq!((tree.holes(), tree.free_pages(), tree.check()), (1, 100_000, Ok(())));
}

/// One allocation given back in many pieces: what was paid for does not last, and the tree says so.
#[test]
fn freeing_in_pieces_may_need_memory_but_stays_consistent() {
    let mut tree = HoleTree::new();
    tree.add(0, 1000).unwrap();
    assert_eq!(tree.alloc(1000, 0, u64::MAX), Ok(0));
    let (refused, _) = limited(0, || (0..1000).step_by(2).find_map(|page| tree.free(page, 1).err()));
    assert!(matches!(refused, Some(BitmapError::OutOfMemory)), "{refused:?}");
    assert_eq!(tree.check(), Ok(()));
    let done = tree.holes() as u64;
    for page in (2 * done..1000).step_by(2).chain((1..1000).step_by(2)) {
        tree.free(page, 1).unwrap();
    }
    assert_eq!((tree.holes(), tree.free_pages(), tree.check()), (1, 1000, Ok(())));
}
