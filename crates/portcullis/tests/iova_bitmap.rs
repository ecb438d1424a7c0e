//! The hierarchical bitmap against a plain model of the same space, and against the tree of holes.

use portcullis::iova::{Bitmap, HoleTree, MAX_ORDER, Placement, TreeError};
use proptest::prelude::*;

/// A list of free ranges, in which everything is done the obvious way.
#[derive(Default)]
struct List(Vec<(u64, u64)>);

impl List {
    fn holes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|&(start, end)| (start, end - start))
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

    /// Takes what is free there; returns how many pages that was.
    fn take(&mut self, first: u64, end: u64) -> u64 {
        let before: u64 = self.holes().map(|hole| hole.1).sum();
        let parts =
            self.0.iter().flat_map(|&(start, stop)| [(start, stop.min(first)), (start.max(end), stop)]);
        self.0 = parts.filter(|part| part.0 < part.1).collect();
        before - self.holes().map(|hole| hole.1).sum::<u64>()
    }

    fn place(&self, pages: u64, order: u32, max_page: u64, placement: Placement) -> Option<u64> {
        let mut places = self.0.iter().filter_map(|&(start, end)| {
            let end = end.min(max_page.saturating_add(1));
            let first = match placement {
                Placement::TopDown => (end.checked_sub(pages)? >> order) << order,
                Placement::BottomUp => start.checked_next_multiple_of(1 << order)?,
            };
            (first >= start && first.checked_add(pages)? <= end).then_some(first)
        });
        match placement {
            Placement::TopDown => places.max(),
            Placement::BottomUp => places.next(),
        }
    }

    /// The lowest hole that a range overlaps.
    fn overlapped(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        self.holes().find(|&(start, pages)| start < end && first < start + pages)
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
    AllocRun {
        count: usize,
        pages: u64,
        order: u32,
        max_page: u64,
    },
    /// Gives a live allocation back, whole.
    Free(prop::sample::Index),
    /// Gives the end of a live allocation back; the rest stays live.
    FreeEnd(prop::sample::Index, u64),
    /// Gives the middle of a live allocation back; both ends stay live.
    FreeMiddle(prop::sample::Index, u64),
    /// Gives back many live allocations.
    FreeMany(prop::sample::Index),
    /// Gives an allocation back a second time.
    FreeAgain(prop::sample::Index),
    /// Gives a range back that may be anything.
    FreeAny(u64, u64),
}

/// The page behind the last that a bitmap can hold.
const END: u64 = 1 << 54;

/// What a range is refused for in any space, or the page behind it.
fn end_of(first: u64, pages: u64) -> Result<u64, TreeError> {
    if pages == 0 {
        return Err(TreeError::Empty);
    }
    first.checked_add(pages).filter(|end| *end <= END).ok_or(TreeError::Wraps { first, pages })
}

/// Does the same to a bitmap, a tree and a model and compares everything that can be seen.
struct Trio {
    bitmap: Bitmap,
    tree: HoleTree,
    model: List,
    live: Vec<(u64, u64)>,
    gone: Vec<(u64, u64)>,
    steps: usize,
}

impl Trio {
    fn new(placement: Placement) -> Self {
        let (bitmap, tree) = (Bitmap::new(placement), HoleTree::with_placement(placement));
        Self { bitmap, tree, model: List::default(), live: Vec::new(), gone: Vec::new(), steps: 0 }
    }

    fn free(&mut self, first: u64, pages: u64) -> Result<(), TestCaseError> {
        let expected = end_of(first, pages).and_then(|end| match self.model.overlapped(first, end) {
            Some((hole_start, hole_pages)) => {
                Err(TreeError::NotAllocated { first, pages, hole_start, hole_pages })
            }
            None => Ok(end),
        });
        prop_assert_eq!(self.bitmap.free(first, pages), expected.map(|_| ()));
        if let Ok(end) = expected {
            prop_assert_eq!(self.tree.free(first, pages), Ok(()));
            self.model.release(first, end);
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let len = self.live.len();
        match *op {
            Op::Add(first, pages) => {
                let expected = end_of(first, pages).and_then(|end| match self.model.overlapped(first, end) {
                    Some((hole_start, hole_pages)) => {
                        Err(TreeError::AlreadyFree { first, pages, hole_start, hole_pages })
                    }
                    None => Ok(end),
                });
                prop_assert_eq!(self.bitmap.add(first, pages), expected.map(|_| ()));
                if let Ok(end) = expected {
                    prop_assert_eq!(self.tree.add(first, pages), Ok(()));
                    self.model.release(first, end);
                    self.live.retain(|&(at, len)| at + len <= first || end <= at);
                }
            }
            Op::Reserve(first, pages) => {
                let result = self.bitmap.reserve(first, pages);
                prop_assert_eq!(result, self.tree.reserve(first, pages));
                if let Ok(taken) = result {
                    prop_assert_eq!(self.model.take(first, first + pages), taken);
                }
            }
            Op::Alloc { pages, order, max_page } => {
                let result = self.bitmap.alloc(pages, order, max_page);
                prop_assert_eq!(result, self.tree.alloc(pages, order, max_page));
                self.allocated(result, pages, order, max_page)?;
            }
            Op::AllocRun { count, pages, order, max_page } => {
                let mut out = vec![u64::MAX; count];
                let taken = self.bitmap.alloc_run(count, pages, order, max_page, &mut out);
                for page in &out[..taken] {
                    prop_assert_eq!(self.tree.alloc(pages, order, max_page), Ok(*page));
                    self.allocated(Ok(*page), pages, order, max_page)?;
                }
                if taken < count {
                    prop_assert!(self.tree.alloc(pages, order, max_page).is_err());
                }
            }
            Op::Free(index) if len > 0 => {
                let (first, pages) = self.live.swap_remove(index.index(len));
                self.free(first, pages)?;
                self.gone.push((first, pages));
            }
            Op::FreeEnd(index, part) if len > 0 => {
                let (first, pages) = self.live.swap_remove(index.index(len));
                let part = part.clamp(1, pages);
                self.free(first + (pages - part), part)?;
                if part < pages {
                    self.live.push((first, pages - part));
                }
            }
            Op::FreeMiddle(index, part) if len > 0 => {
                let (first, pages) = self.live.swap_remove(index.index(len));
                let before = part % pages;
                let part = (pages - before).div_ceil(2);
                self.free(first + before, part)?;
                let rest = [(first, before), (first + before + part, pages - before - part)];
                self.live.extend(rest.into_iter().filter(|rest| rest.1 > 0));
            }
            Op::FreeMany(index) if len > 0 => {
                let (_, pages) = self.live[index.index(len)];
                let firsts: Vec<u64> =
                    self.live.extract_if(.., |live| live.1 == pages).map(|live| live.0).collect();
                prop_assert_eq!(self.bitmap.free_all(&firsts, pages), Ok(()));
                for first in firsts {
                    prop_assert_eq!(self.tree.free(first, pages), Ok(()));
                    self.model.release(first, first + pages);
                }
            }
            Op::FreeAgain(index) if !self.gone.is_empty() => {
                let (first, pages) = self.gone[index.index(self.gone.len())];
                if self.model.overlapped(first, first + pages).is_some() {
                    self.free(first, pages)?;
                }
            }
            Op::FreeAny(first, pages) => {
                self.free(first, pages)?;
                let end = first.saturating_add(pages);
                self.live.retain(|&(at, len)| at + len <= first || end <= at);
            }
            _ => {}
        }
        prop_assert_eq!(self.bitmap.free_pages(), self.tree.free_pages());
        // The rest takes long; once in a while is enough to notice what does not go away by itself.
        self.steps += 1;
        if self.steps.is_multiple_of(8) { self.compare() } else { Ok(()) }
    }

    fn allocated(
        &mut self,
        result: Result<u64, TreeError>,
        pages: u64,
        order: u32,
        max_page: u64,
    ) -> Result<(), TestCaseError> {
        if pages == 0 {
            prop_assert_eq!(result, Err(TreeError::Empty));
        } else if order > MAX_ORDER {
            prop_assert_eq!(result, Err(TreeError::Alignment { align_order: order, max: MAX_ORDER }));
        } else if let Some(first) = self.model.place(pages, order, max_page, self.bitmap.placement()) {
            prop_assert_eq!(result, Ok(first));
            prop_assert_eq!(self.model.take(first, first + pages), pages);
            self.live.push((first, pages));
        } else {
            let free = self.model.holes().map(|hole| hole.1).sum();
            let largest = self.model.holes().map(|hole| hole.1).max().unwrap_or(0);
            let expected = TreeError::NoFit { pages, align_order: order, max_page, free, largest };
            prop_assert_eq!(result, Err(expected));
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.bitmap.check(), Ok(()));
        prop_assert_eq!(self.bitmap.free_pages(), self.model.holes().map(|hole| hole.1).sum::<u64>());
        let largest = self.model.holes().map(|hole| hole.1).max().unwrap_or(0);
        prop_assert_eq!(self.bitmap.largest_hole(), largest);
        prop_assert!(self.bitmap.iter().eq(self.model.holes()));
        Ok(())
    }
}

fn placement() -> impl Strategy<Value = Placement> {
    prop_oneof![Just(Placement::TopDown), Just(Placement::BottomUp)]
}

/// Sizes on either side of every power of two.
fn sizes(bits: u32) -> impl Strategy<Value = u64> {
    (0..bits, 0..3_u64, any::<u64>()).prop_map(|(bits, kind, random)| match kind {
        0 => 1 << bits,
        1 => (1 << bits) + random % 3 - 1,
        _ => 1 + random % (1 << bits),
    })
}

/// Operations on a space of `2^bits` pages, with a few that are out of bounds.
fn op(bits: u32) -> impl Strategy<Value = Op> {
    let page = move || {
        prop_oneof![
            8 => 0..1_u64 << bits,
            // On and next to boundaries of all levels.
            4 => (0..64_u64, 0..9_u64, 6..=bits).prop_map(|(unit, offset, shift)| (unit << shift >> 3) + offset),
            1 => END - 8..=END,
            1 => any::<u64>(),
        ]
    };
    let range = move || (page(), prop_oneof![40 => sizes(bits - 3), 1 => any::<u64>()]);
    let index = any::<prop::sample::Index>;
    let request = move || {
        let pages = prop_oneof![10 => sizes(7), 20 => sizes(bits - 2), 1 => any::<u64>()];
        let max_page = prop_oneof![2 => Just(u64::MAX), 2 => page()];
        // Natural alignment half of the time.
        (pages, 0..2 * MAX_ORDER + 4, max_page).prop_map(|(pages, order, max_page)| {
            let natural = pages.checked_next_power_of_two().unwrap_or(1).ilog2().min(MAX_ORDER);
            let order = if order > MAX_ORDER + 1 { natural } else { order };
            (pages, order, max_page)
        })
    };
    prop_oneof![
        2 => range().prop_map(|(first, pages)| Op::Add(first, pages)),
        1 => range().prop_map(|(first, pages)| Op::Reserve(first, pages)),
        20 => request().prop_map(|(pages, order, max_page)| Op::Alloc { pages, order, max_page }),
        2 => (0..40_usize, request())
            .prop_map(|(count, (pages, order, max_page))| Op::AllocRun { count, pages, order, max_page }),
        10 => index().prop_map(Op::Free),
        2 => (index(), sizes(bits)).prop_map(|(index, part)| Op::FreeEnd(index, part)),
        2 => (index(), any::<u64>()).prop_map(|(index, part)| Op::FreeMiddle(index, part)),
        1 => index().prop_map(Op::FreeMany),
        1 => index().prop_map(Op::FreeAgain),
        1 => range().prop_map(|(first, pages)| Op::FreeAny(first, pages)),
    ]
}

fn run(placement: Placement, pages: u64, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut trio = Trio::new(placement);
    trio.apply(&Op::Add(1, pages - 1))?;
    ops.iter().try_for_each(|op| trio.apply(op))?;
    while let Some((first, pages)) = trio.live.pop() {
        trio.free(first, pages)?;
    }
    trio.compare()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A space of four leaves.
    #[test]
    fn agrees_in_a_small_space(placement in placement(), ops in prop::collection::vec(op(11), 1..200)) {
        run(placement, 1 << 11, &ops)?;
    }

    /// Three levels of nodes.
    #[test]
    fn agrees_in_a_space_of_some_levels(placement in placement(), ops in prop::collection::vec(op(17), 1..200)) {
        run(placement, 1 << 17, &ops)?;
    }

    /// Room for the coarsest alignments.
    #[test]
    fn agrees_in_a_large_space(placement in placement(), ops in prop::collection::vec(op(24), 1..200)) {
        run(placement, 1 << 24, &ops)?;
    }

    /// The address space of a whole machine, of which little is used.
    #[test]
    fn agrees_in_a_huge_space(placement in placement(), ops in prop::collection::vec(op(45), 1..100)) {
        run(placement, 1 << 45, &ops)?;
    }
}

/// A search for `pages + alignment - 1` pages would overlook each of these.
#[test]
fn a_hole_that_fits_exactly_is_found() {
    for placement in [Placement::TopDown, Placement::BottomUp] {
        for order in 0..=MAX_ORDER {
            let align = 1_u64 << order;
            for pages in [1, align, align + 1, 3 * align] {
                let mut space = Bitmap::new(placement);
                // Long enough, but never from an aligned page on.
                for unit in [2, 40] {
                    if align > 1 {
                        space.add(unit * align + 1, (align - 1).min(pages + align - 2)).unwrap();
                    }
                }
                space.add(8 * align, pages).unwrap();
                assert_eq!(space.alloc(pages, order, u64::MAX), Ok(8 * align), "{pages}, order {order}");
                assert!(matches!(space.alloc(pages, order, u64::MAX), Err(TreeError::NoFit { .. })));
                assert_eq!(space.check(), Ok(()));
            }
        }
    }
}

#[test]
fn the_limit_cuts_the_hole_that_it_lies_in() {
    let mut space = Bitmap::new(Placement::TopDown);
    space.add(0x10, 0x100).unwrap();
    space.add(0x1000, 0x1000).unwrap();
    // 0x17f0..=0x17ff ends on the limit; one page less and the hole still serves it, further down.
    assert_eq!(space.alloc(0x10, 4, 0x17ff), Ok(0x17f0));
    assert_eq!(space.alloc(0x10, 4, 0x17fe), Ok(0x17e0));
    // Within the limit the upper hole has too little: the lower one is next.
    assert_eq!(space.alloc(0x10, 4, 0x100e), Ok(0x100));
    assert_eq!(space.alloc(1, 0, 0x1000), Ok(0x1000));
    assert_eq!(space.alloc(1, 0, 0x10), Ok(0x10));
    let refused = space.alloc(1, 0, 0x10);
    assert!(matches!(refused, Err(TreeError::NoFit { pages: 1, max_page: 0x10, .. })), "{refused:?}");
    assert_eq!(space.check(), Ok(()));
}

#[test]
fn a_second_free_names_the_hole_and_changes_nothing() {
    let mut space = Bitmap::new(Placement::TopDown);
    space.add(0, 5000).unwrap();
    let first = space.alloc(10, 0, 2999).unwrap();
    assert_eq!(first, 2990);
    space.free(first, 10).unwrap();
    let again = TreeError::NotAllocated { first, pages: 10, hole_start: 0, hole_pages: 5000 };
    assert_eq!(space.free(first, 10), Err(again));
    assert_eq!(space.iter().collect::<Vec<_>>(), [(0, 5000)]);
    // Of several, those that can be given back are.
    let mut pages = [0; 3];
    assert_eq!(space.alloc_run(3, 1, 0, 2999, &mut pages), 3);
    assert_eq!(pages, [2999, 2998, 2997]);
    let again = TreeError::NotAllocated { first: 7, pages: 1, hole_start: 0, hole_pages: 2998 };
    assert_eq!(space.free_all(&[pages[2], 7, pages[0], pages[1]], 1), Err(again));
    assert_eq!(space.iter().collect::<Vec<_>>(), [(0, 5000)]);
    assert_eq!(space.check(), Ok(()));
}

#[test]
fn the_largest_space_and_the_largest_numbers() {
    let mut space = Bitmap::new(Placement::TopDown);
    assert_eq!(
        space.alloc(1, 0, u64::MAX).unwrap_err().to_string().split(':').next_back(),
        Some(" 0 pages are free, 0 in the largest hole")
    );
    assert_eq!(space.add(0, 0), Err(TreeError::Empty));
    assert_eq!(space.add(1, END), Err(TreeError::Wraps { first: 1, pages: END }));
    assert_eq!(space.add(END, 1), Err(TreeError::Wraps { first: END, pages: 1 }));
    assert_eq!(space.free(u64::MAX, 1), Err(TreeError::Wraps { first: u64::MAX, pages: 1 }));
    assert_eq!(space.reserve(u64::MAX, u64::MAX), Err(TreeError::Wraps { first: u64::MAX, pages: u64::MAX }));
    assert_eq!(space.reserve(0, u64::MAX), Ok(0));
    space.add(0, END).unwrap();
    assert_eq!((space.free_pages(), space.largest_hole()), (END, END));
    assert_eq!(space.alloc(END, MAX_ORDER, u64::MAX), Ok(0));
    assert!(matches!(space.alloc(u64::MAX, 0, u64::MAX), Err(TreeError::NoFit { free: 0, largest: 0, .. })));
    space.free(0, END).unwrap();
    assert_eq!(space.alloc(1, MAX_ORDER, u64::MAX), Ok(END - (1 << MAX_ORDER)));
    assert_eq!(space.alloc(1, 0, 0), Ok(0));
    let refused = TreeError::Alignment { align_order: u32::MAX, max: MAX_ORDER };
    assert_eq!(space.alloc(1, u32::MAX, 0), Err(refused));
    assert_eq!(space.alloc(0, u32::MAX, 0), Err(TreeError::Empty));
    let mut out = [0; 2];
    assert_eq!(space.alloc_run(usize::MAX, 1, 0, u64::MAX, &mut out), 2);
    assert_eq!(space.alloc_run(2, 1, u32::MAX, u64::MAX, &mut out), 0);
    assert_eq!(space.free_all(&out, 1), Ok(()));
    assert_eq!(space.reserve(0, u64::MAX), Ok(END - 2));
    assert_eq!((space.free_pages(), space.iter().count()), (0, 0));
    assert_eq!(space.check(), Ok(()));
}

#[test]
fn little_memory_for_little_use() {
    let mut space = Bitmap::new(Placement::TopDown);
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
    let mut space = Bitmap::new(Placement::TopDown);
    space.add(0, 8).unwrap();
    for unit in 1..=HOLES {
        space.add(unit * 32 + 1, 14).unwrap();
    }
    for round in 0..HOLES {
        // Just below, in and above the holes that are in the way.
        let max_page = 40 + 32 * round;
        assert_eq!(space.alloc(8, 4, max_page), Ok(0));
        assert!(matches!(space.alloc(8, 4, max_page), Err(TreeError::NoFit { .. })));
        space.free(0, 8).unwrap();
    }
    assert_eq!(space.check(), Ok(()));
}
