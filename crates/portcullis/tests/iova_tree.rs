//! The tree of holes against plain models of the same space, and its bounds.

use portcullis::iova::{HoleTree, MAX_ORDER, TreeError};
use proptest::prelude::*;

/// A space in which everything is done the obvious way.
trait Model {
    fn holes(&self) -> Vec<(u64, u64)>;
    fn release(&mut self, first: u64, end: u64);
    /// Takes what is free there; returns how many pages that was.
    fn take(&mut self, first: u64, end: u64) -> u64;
    fn place(&self, pages: u64, order: u32, max_page: u64) -> Option<u64>;
}

/// One flag per page of a small space.
struct Bitmap(Vec<bool>);

impl Model for Bitmap {
    fn holes(&self) -> Vec<(u64, u64)> {
        let mut holes: Vec<(u64, u64)> = Vec::new();
        for page in (0..self.0.len()).filter(|&page| self.0[page]) {
            match holes.last_mut() {
                Some((start, pages)) if *start + *pages == page as u64 => *pages += 1,
                _ => holes.push((page as u64, 1)),
            }
        }
        holes
    }

    fn release(&mut self, first: u64, end: u64) {
        self.0[first as usize..end as usize].fill(true);
    }

    fn take(&mut self, first: u64, end: u64) -> u64 {
        let len = self.0.len();
        let flags = &mut self.0[(first as usize).min(len)..(end as usize).min(len)];
        let taken = flags.iter().filter(|free| **free).count() as u64;
        flags.fill(false);
        taken
    }

    fn place(&self, pages: u64, order: u32, max_page: u64) -> Option<u64> {
        let starts = (0..self.0.len()).rev().filter(|start| start.is_multiple_of(1 << order));
        let mut fits = starts.filter(|&start| {
            let end = (start as u64).saturating_add(pages);
            end <= self.0.len() as u64
                && end - 1 <= max_page
                && self.0[start..end as usize].iter().all(|free| *free)
        });
        fits.next().map(|start| start as u64)
    }
}

/// A list of ranges, for a space of any size.
#[derive(Default)]
struct List(Vec<(u64, u64)>);

impl Model for List {
    fn holes(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|&(start, end)| (start, end - start)).collect()
    }

    fn release(&mut self, first: u64, end: u64) {
        self.0.push((first, end));
        self.0.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for &(start, end) in &self.0 {
            match joined.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                _ => joined.push((start, end)),
            }
        }
        self.0 = joined;
    }

    fn take(&mut self, first: u64, end: u64) -> u64 {
        let before: u64 = self.0.iter().map(|hole| hole.1 - hole.0).sum();
        let parts =
            self.0.iter().flat_map(|&(start, stop)| [(start, stop.min(first)), (start.max(end), stop)]);
        self.0 = parts.filter(|part| part.0 < part.1).collect();
        let after: u64 = self.0.iter().map(|hole| hole.1 - hole.0).sum();
        before - after
    }

    fn place(&self, pages: u64, order: u32, max_page: u64) -> Option<u64> {
        let places = self.0.iter().filter_map(|&(start, end)| {
            let end = end.min(max_page.saturating_add(1));
            let first = (end.checked_sub(pages)? >> order) << order;
            (first >= start).then_some(first)
        });
        places.max()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Add(u64, u64),
    Reserve(u64, u64),
    Alloc {
        pages: u64,
        order: u32,
        max_page: u64,
    },
    /// Gives a live allocation back, whole.
    Free(prop::sample::Index),
    /// Gives the end of a live allocation back; the rest stays live.
    FreeEnd(prop::sample::Index, u64),
    /// Gives the middle of a live allocation back; the rest is never given back.
    FreeMiddle(prop::sample::Index),
    /// Gives an allocation back a second time.
    FreeAgain(prop::sample::Index),
    /// Gives a range back that may be anything.
    FreeAny(u64, u64),
}

/// The lowest hole that a range overlaps.
fn overlapped(model: &impl Model, first: u64, end: u64) -> Option<(u64, u64)> {
    model.holes().into_iter().find(|&(start, pages)| start < end && first < start + pages)
}

/// What a range is refused for in any space, or the page behind it.
fn end_of(first: u64, pages: u64) -> Result<u64, TreeError> {
    if pages == 0 {
        Err(TreeError::Empty)
    } else {
        first.checked_add(pages).ok_or(TreeError::Wraps { first, pages })
    }
}

/// Does the same to a tree and to a model and compares everything that can be seen.
struct Pair<M> {
    tree: HoleTree,
    model: M,
    live: Vec<(u64, u64)>,
    gone: Vec<(u64, u64)>,
    /// Whether the tree's user has kept the rules so far, under which freeing needs no memory.
    orderly: bool,
}

impl<M: Model> Pair<M> {
    fn new(model: M) -> Self {
        Self { tree: HoleTree::new(), model, live: Vec::new(), gone: Vec::new(), orderly: true }
    }

    fn free(&mut self, first: u64, pages: u64) -> Result<(), TestCaseError> {
        let expected = end_of(first, pages).and_then(|end| match overlapped(&self.model, first, end) {
            Some((hole_start, hole_pages)) => {
                Err(TreeError::NotAllocated { first, pages, hole_start, hole_pages })
            }
            None => Ok(end),
        });
        prop_assert_eq!(self.tree.free(first, pages), expected.map(|_| ()));
        if let Ok(end) = expected {
            self.model.release(first, end);
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Add(first, pages) => {
                let expected =
                    end_of(first, pages).and_then(|end| match overlapped(&self.model, first, end) {
                        Some((hole_start, hole_pages)) => {
                            Err(TreeError::AlreadyFree { first, pages, hole_start, hole_pages })
                        }
                        None => Ok(end),
                    });
                prop_assert_eq!(self.tree.add(first, pages), expected.map(|_| ()));
                if let Ok(end) = expected {
                    self.orderly &= self.live.iter().all(|&(at, len)| at + len <= first || end <= at);
                    self.model.release(first, end);
                }
            }
            Op::Reserve(first, pages) => {
                let expected = end_of(first, pages).map(|end| self.model.take(first, end));
                prop_assert_eq!(self.tree.reserve(first, pages), expected);
            }
            Op::Alloc { pages, order, max_page } => self.alloc(pages, order, max_page)?,
            Op::Free(index) => {
                if !self.live.is_empty() {
                    let (first, pages) = self.live.swap_remove(index.index(self.live.len()));
                    self.free(first, pages)?;
                    self.gone.push((first, pages));
                }
            }
            Op::FreeEnd(index, part) => {
                if !self.live.is_empty() {
                    let (first, pages) = self.live.swap_remove(index.index(self.live.len()));
                    let part = part.clamp(1, pages);
                    self.free(first + (pages - part), part)?;
                    if part < pages {
                        self.orderly = false;
                        self.live.push((first, pages - part));
                    }
                }
            }
            Op::FreeMiddle(index) => {
                if !self.live.is_empty() {
                    let (first, pages) = self.live.swap_remove(index.index(self.live.len()));
                    self.free(first + pages / 3, pages - pages / 3 * 2)?;
                    self.orderly &= pages < 3;
                }
            }
            Op::FreeAgain(index) => {
                if !self.gone.is_empty() {
                    let (first, pages) = self.gone[index.index(self.gone.len())];
                    self.orderly &= overlapped(&self.model, first, first + pages).is_some();
                    self.free(first, pages)?;
                }
            }
            Op::FreeAny(first, pages) => {
                let end = end_of(first, pages);
                self.orderly &= end.is_err() || overlapped(&self.model, first, first + pages).is_some();
                self.free(first, pages)?;
            }
        }
        self.compare()
    }

    fn alloc(&mut self, pages: u64, order: u32, max_page: u64) -> Result<(), TestCaseError> {
        let result = self.tree.alloc(pages, order, max_page);
        if pages == 0 {
            prop_assert_eq!(result, Err(TreeError::Empty));
        } else if order > MAX_ORDER {
            prop_assert_eq!(result, Err(TreeError::Alignment { align_order: order, max: MAX_ORDER }));
        } else if let Some(first) = self.model.place(pages, order, max_page) {
            prop_assert_eq!(result, Ok(first));
            prop_assert!(first.is_multiple_of(1 << order) && first + (pages - 1) <= max_page);
            prop_assert_eq!(self.model.take(first, first + pages), pages);
            self.live.push((first, pages));
        } else {
            let free = self.model.holes().iter().map(|hole| hole.1).sum();
            let largest = self.model.holes().iter().map(|hole| hole.1).max().unwrap_or(0);
            let expected = TreeError::NoFit { pages, align_order: order, max_page, free, largest };
            prop_assert_eq!(result, Err(expected));
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let holes = self.model.holes();
        prop_assert_eq!(self.tree.check(), Ok(()));
        prop_assert_eq!(self.tree.free_pages(), holes.iter().map(|hole| hole.1).sum::<u64>());
        prop_assert_eq!(self.tree.largest_hole(), holes.iter().map(|hole| hole.1).max().unwrap_or(0));
        prop_assert_eq!(self.tree.holes(), holes.len());
        prop_assert!(self.tree.iter().eq(holes));
        if self.orderly {
            prop_assert_eq!(self.tree.check_prepaid(), Ok(()));
        }
        Ok(())
    }
}

const SMALL: u64 = 512;

fn small_range(pages: u64) -> impl Strategy<Value = (u64, u64)> {
    (0..SMALL, 0..=pages).prop_map(|(first, pages)| (first, pages.min(SMALL - first)))
}

fn small_alloc() -> impl Strategy<Value = Op> {
    let max_page = prop_oneof![3 => Just(u64::MAX), 3 => 0..SMALL + 8, 1 => Just(u64::MAX - 1)];
    let pages = prop_oneof![4 => 1..9_u64, 2 => 0..70_u64, 1 => 0..SMALL + 2];
    let order = prop_oneof![4 => 0..5_u32, 1 => 0..=MAX_ORDER + 1];
    (pages, order, max_page).prop_map(|(pages, order, max_page)| Op::Alloc { pages, order, max_page })
}

/// Operations that keep the rules: everything is given back whole and once.
fn small_orderly_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => small_range(64).prop_map(|(first, pages)| Op::Add(first, pages)),
        1 => small_range(16).prop_map(|(first, pages)| Op::Reserve(first, pages)),
        10 => small_alloc(),
        8 => any::<prop::sample::Index>().prop_map(Op::Free),
        1 => any::<prop::sample::Index>().prop_map(Op::FreeAgain),
    ]
}

fn small_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        16 => small_orderly_op(),
        1 => (any::<prop::sample::Index>(), 0..64_u64).prop_map(|(index, part)| Op::FreeEnd(index, part)),
        1 => any::<prop::sample::Index>().prop_map(Op::FreeMiddle),
        1 => small_range(16).prop_map(|(first, pages)| Op::FreeAny(first, pages)),
    ]
}

/// Sizes on either side of every power of two, up to a few times the coarsest alignment.
fn large_pages() -> impl Strategy<Value = u64> {
    (0..21_u32, 0..3_u64, any::<u64>()).prop_map(|(bits, kind, random)| match kind {
        0 => 1 << bits,
        1 => (1 << bits) + random % 3 - 1,
        _ => 1 + random % (1 << bits),
    })
}

const LARGE: u64 = 1 << 24;

fn large_page() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0..LARGE,
        4 => (0..64_u64, 0..9_u64).prop_map(|(unit, offset)| (unit << 18) + offset),
        1 => u64::MAX - 8..=u64::MAX,
        1 => any::<u64>(),
    ]
}

fn large_op() -> impl Strategy<Value = Op> {
    let range = || (large_page(), prop_oneof![40 => large_pages(), 1 => any::<u64>()]);
    let index = any::<prop::sample::Index>;
    let max_page = prop_oneof![2 => Just(u64::MAX), 3 => large_page()];
    prop_oneof![
        3 => range().prop_map(|(first, pages)| Op::Add(first, pages)),
        2 => range().prop_map(|(first, pages)| Op::Reserve(first, pages)),
        20 => (prop_oneof![30 => large_pages(), 1 => any::<u64>()], 0..=MAX_ORDER + 1, max_page)
            .prop_map(|(pages, order, max_page)| Op::Alloc { pages, order, max_page }),
        14 => index().prop_map(Op::Free),
        1 => (index(), large_pages()).prop_map(|(index, part)| Op::FreeEnd(index, part)),
        1 => index().prop_map(Op::FreeMiddle),
        1 => index().prop_map(Op::FreeAgain),
        1 => range().prop_map(|(first, pages)| Op::FreeAny(first, pages)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_bitmap(ops in prop::collection::vec(small_op(), 1..300)) {
        let mut pair = Pair::new(Bitmap(vec![false; SMALL as usize]));
        pair.apply(&Op::Add(1, SMALL - 1))?;
        for op in &ops {
            pair.apply(op)?;
        }
    }

    #[test]
    fn every_free_is_paid_for(ops in prop::collection::vec(small_orderly_op(), 1..400)) {
        let mut pair = Pair::new(Bitmap(vec![false; SMALL as usize]));
        pair.apply(&Op::Add(0, SMALL / 2))?;
        for op in &ops {
            pair.apply(op)?;
        }
        prop_assert!(pair.orderly || ops.iter().any(|op| matches!(op, Op::Add(..) | Op::FreeAgain(_))));
        while let Some((first, pages)) = pair.live.pop() {
            pair.free(first, pages)?;
            pair.compare()?;
        }
    }

    #[test]
    fn agrees_with_a_list_of_ranges(ops in prop::collection::vec(large_op(), 1..300)) {
        let mut pair = Pair::new(List::default());
        pair.apply(&Op::Add(16, LARGE - 16))?;
        for op in &ops {
            pair.apply(op)?;
        }
    }

    /// Any two ranges that do not touch, so that every order meets holes that begin and end anywhere.
    #[test]
    fn agrees_on_any_single_request(
        ranges in prop::collection::vec((any::<u64>(), large_pages()), 1..12),
        requests in prop::collection::vec((large_pages(), 0..=MAX_ORDER, any::<u64>()), 1..12),
    ) {
        let mut pair = Pair::new(List::default());
        for (first, pages) in ranges {
            pair.apply(&Op::Add(first, pages))?;
        }
        for (pages, order, max_page) in requests {
            pair.apply(&Op::Alloc { pages, order, max_page })?;
        }
    }
}

/// A generator of numbers for the tests that are too large for a shrinking one.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % bound
    }
}

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
    let refused = tree.alloc(1, 0, 0x10);
    assert!(matches!(refused, Err(TreeError::NoFit { pages: 1, max_page: 0x10, .. })), "{refused:?}");
    assert_eq!(tree.check(), Ok(()));
}

#[test]
fn a_second_free_names_the_hole_and_changes_nothing() {
    let mut tree = HoleTree::new();
    tree.add(0, 100).unwrap();
    let first = tree.alloc(10, 0, 49).unwrap();
    assert_eq!(first, 40);
    tree.free(first, 10).unwrap();
    let again = TreeError::NotAllocated { first, pages: 10, hole_start: 0, hole_pages: 100 };
    assert_eq!(tree.free(first, 10), Err(again));
    assert_eq!(again.to_string(), "10 pages at page 0x28 are not allocated: 100 pages at 0x0 are free");
    assert_eq!(tree.iter().collect::<Vec<_>>(), [(0, 100)]);
    assert_eq!(tree.check(), Ok(()));
}

#[test]
fn the_largest_space_and_the_largest_numbers() {
    let mut tree = HoleTree::new();
    assert_eq!(tree.add(0, 0), Err(TreeError::Empty));
    assert_eq!(tree.add(1, u64::MAX), Err(TreeError::Wraps { first: 1, pages: u64::MAX }));
    assert_eq!(tree.free(u64::MAX, 1), Err(TreeError::Wraps { first: u64::MAX, pages: 1 }));
    assert_eq!(tree.reserve(u64::MAX, u64::MAX), Err(TreeError::Wraps { first: u64::MAX, pages: u64::MAX }));
    assert_eq!(tree.reserve(0, u64::MAX), Ok(0));
    tree.add(0, u64::MAX).unwrap();
    assert_eq!((tree.free_pages(), tree.largest_hole()), (u64::MAX, u64::MAX));
    assert_eq!(tree.alloc(u64::MAX, MAX_ORDER, u64::MAX), Ok(0));
    assert!(matches!(tree.alloc(1, 0, u64::MAX), Err(TreeError::NoFit { free: 0, largest: 0, .. })));
    tree.free(0, u64::MAX).unwrap();
    assert_eq!(tree.alloc(1, MAX_ORDER, u64::MAX), Ok(u64::MAX << MAX_ORDER));
    assert_eq!(tree.alloc(1, 0, 0), Ok(0));
    assert_eq!(
        tree.alloc(1, u32::MAX, 0),
        Err(TreeError::Alignment { align_order: u32::MAX, max: MAX_ORDER })
    );
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
    for last in (1..live.len()).rev() {
        live.swap(last, rng.below(last as u64 + 1) as usize);
    }
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
        assert!(matches!(tree.alloc(8, 4, max_page), Err(TreeError::NoFit { .. })));
        tree.free(0, 8).unwrap();
    }
    assert_eq!(tree.check(), Ok(()));
}
