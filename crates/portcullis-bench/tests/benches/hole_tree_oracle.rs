//! The tree of holes against a plain model of the same space.

use crate::iova_model::{List, end_of, sizes};
use portcullis::iova::MAX_ORDER;
use portcullis_bench::iova::HoleTree;
use proptest::prelude::*;

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

/// Does the same to a tree and to a model and compares everything that can be seen.
#[derive(Default)]
struct Pair {
    tree: HoleTree,
    model: List,
    live: Vec<(u64, u64)>,
    gone: Vec<(u64, u64)>,
    /// Whether the tree's user has broken the rules under which freeing needs no memory.
    is_disorderly: bool,
}

impl Pair {
    fn free(&mut self, first: u64, pages: u64) -> Result<(), TestCaseError> {
        let expected = self.model.freed(first, pages, u64::MAX);
        prop_assert_eq!(self.tree.free(first, pages), expected.map(|_| ()));
        if let Ok(end) = expected {
            self.model.release(first, end);
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Add(first, pages) => {
                let expected = self.model.freed(first, pages, u64::MAX);
                prop_assert_eq!(self.tree.add(first, pages), expected.map(|_| ()));
                if let Ok(end) = expected {
                    self.is_disorderly |= self.live.iter().any(|&(at, len)| first < at + len && at < end);
                    self.model.release(first, end);
                }
            }
            Op::Reserve(first, pages) => {
                let expected = end_of(first, pages, u64::MAX).map(|end| self.model.take(first, end));
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
                        self.is_disorderly = true;
                        self.live.push((first, pages - part));
                    }
                }
            }
            Op::FreeMiddle(index) => {
                if !self.live.is_empty() {
                    let (first, pages) = self.live.swap_remove(index.index(self.live.len()));
                    self.free(first + pages / 3, pages - pages / 3 * 2)?;
                    self.is_disorderly |= pages >= 3;
                }
            }
            Op::FreeAgain(index) => {
                if !self.gone.is_empty() {
                    let (first, pages) = self.gone[index.index(self.gone.len())];
                    self.is_disorderly |= self.model.overlapped(first, first + pages).is_none();
                    self.free(first, pages)?;
                }
            }
            Op::FreeAny(first, pages) => {
                let end = end_of(first, pages, u64::MAX);
                self.is_disorderly |= end.is_ok_and(|end| self.model.overlapped(first, end).is_none());
                self.free(first, pages)?;
            }
        }
        self.compare()
    }

    fn alloc(&mut self, pages: u64, order: u32, max_page: u64) -> Result<(), TestCaseError> {
        let result = self.tree.alloc(pages, order, max_page);
        prop_assert_eq!(result, self.model.allocated(pages, order, max_page));
        if let Ok(first) = result {
            prop_assert!(first.is_multiple_of(1 << order) && first + (pages - 1) <= max_page);
            prop_assert_eq!(self.model.take(first, first + pages), pages);
            self.live.push((first, pages));
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let holes = self.model.holes();
        prop_assert_eq!(self.tree.check(), Ok(()));
        prop_assert_eq!(self.tree.free_pages(), self.model.free_pages());
        prop_assert_eq!(self.tree.largest_hole(), self.model.largest_hole());
        prop_assert_eq!(self.tree.holes(), holes.len());
        prop_assert!(self.tree.iter().eq(holes));
        if !self.is_disorderly {
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
    let range = || (large_page(), prop_oneof![40 => sizes(21), 1 => any::<u64>()]);
    let index = any::<prop::sample::Index>;
    let max_page = prop_oneof![2 => Just(u64::MAX), 3 => large_page()];
    prop_oneof![
        3 => range().prop_map(|(first, pages)| Op::Add(first, pages)),
        2 => range().prop_map(|(first, pages)| Op::Reserve(first, pages)),
        20 => (prop_oneof![30 => sizes(21), 1 => any::<u64>()], 0..=MAX_ORDER + 1, max_page)
            .prop_map(|(pages, order, max_page)| Op::Alloc { pages, order, max_page }),
        14 => index().prop_map(Op::Free),
        1 => (index(), sizes(21)).prop_map(|(index, part)| Op::FreeEnd(index, part)),
        1 => index().prop_map(Op::FreeMiddle),
        1 => index().prop_map(Op::FreeAgain),
        1 => range().prop_map(|(first, pages)| Op::FreeAny(first, pages)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn agrees_in_a_small_space(ops in prop::collection::vec(small_op(), 1..300)) {
        let mut pair = Pair::default();
        pair.apply(&Op::Add(1, SMALL - 1))?;
        for op in &ops {
            pair.apply(op)?;
        }
    }

    #[test]
    fn every_free_is_paid_for(ops in prop::collection::vec(small_orderly_op(), 1..400)) {
        let mut pair = Pair::default();
        pair.apply(&Op::Add(0, SMALL / 2))?;
        for op in &ops {
            pair.apply(op)?;
        }
        prop_assert!(!pair.is_disorderly || ops.iter().any(|op| matches!(op, Op::Add(..) | Op::FreeAgain(_))));
        while let Some((first, pages)) = pair.live.pop() {
            pair.free(first, pages)?;
            pair.compare()?;
        }
    }

    #[test]
    fn agrees_in_a_large_space(ops in prop::collection::vec(large_op(), 1..300)) {
        let mut pair = Pair::default();
        pair.apply(&Op::Add(16, LARGE - 16))?;
        for op in &ops {
            pair.apply(op)?;
        }
    }

    /// Any two ranges that do not touch, so that every order meets holes that begin and end anywhere.
    #[test]
    fn agrees_on_any_single_request(
        ranges in prop::collection::vec((any::<u64>(), sizes(21)), 1..12),
        requests in prop::collection::vec((sizes(21), 0..=MAX_ORDER, any::<u64>()), 1..12),
    ) {
        let mut pair = Pair::default();
        for (first, pages) in ranges {
            pair.apply(&Op::Add(first, pages))?;
        }
        for (pages, order, max_page) in requests {
            pair.apply(&Op::Alloc { pages, order, max_page })?;
        }
    }
}
