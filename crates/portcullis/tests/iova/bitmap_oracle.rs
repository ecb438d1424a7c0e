//! The hierarchical bitmap against a plain model of the same space.

use crate::iova_model::{List, end_of, sizes};
use portcullis::iova::{Bitmap, BitmapError, MAX_ORDER, Survey};
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
    AllocRun {
        count: usize,
        order: u32,
        first: u64,
        max_page: u64,
    },
    /// Gives a live allocation back, whole.
    Free(prop::sample::Index),
    /// Gives the end of a live allocation back; the rest stays live.
    FreeEnd(prop::sample::Index, u64),
    /// Gives the middle of a live allocation back; both ends stay live.
    FreeMiddle(prop::sample::Index, u64),
    /// Gives back all live allocations of a size.
    FreeMany(prop::sample::Index),
    /// Gives an allocation back a second time.
    FreeAgain(prop::sample::Index),
    /// Gives a range back that may be anything.
    FreeAny(u64, u64),
}

/// The page behind the last that a bitmap can hold.
const END: u64 = 1 << 54;

/// Does the same to a bitmap and a model and compares everything that can be seen.
struct Pair {
    bitmap: Bitmap,
    model: List,
    /// The fewest pages that were free since some were added.
    least: u64,
    live: Vec<(u64, u64)>,
    gone: Vec<(u64, u64)>,
    steps: usize,
}

impl Pair {
    fn new() -> Self {
        let (bitmap, model) = (Bitmap::new(), List::default());
        Self { bitmap, model, least: 0, live: Vec::new(), gone: Vec::new(), steps: 0 }
    }

    fn free(&mut self, first: u64, pages: u64) -> Result<(), TestCaseError> {
        let expected = self.model.freed(first, pages, END);
        prop_assert_eq!(self.bitmap.free(first, pages), expected.map(|_| ()));
        if let Ok(end) = expected {
            self.model.release(first, end);
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let len = self.live.len();
        match *op {
            Op::Add(first, pages) => {
                let expected = self.model.freed(first, pages, END);
                prop_assert_eq!(self.bitmap.add(first, pages), expected.map(|_| ()));
                if let Ok(end) = expected {
                    self.model.release(first, end);
                    self.least = self.model.free_pages();
                    self.live.retain(|&(at, len)| at + len <= first || end <= at);
                }
            }
            Op::Reserve(first, pages) => {
                let expected = end_of(first, pages, u64::MAX).map(|end| self.model.take(first, end));
                prop_assert_eq!(self.bitmap.reserve(first, pages), expected);
            }
            Op::Alloc { pages, order, max_page } => {
                let result = self.bitmap.alloc(pages, order, max_page.saturating_add(1));
                self.allocated(result, pages, order, max_page)?;
            }
            Op::AllocRun { count, order, first, max_page } => {
                let mut out = Vec::new();
                let bounds = (first, max_page.saturating_add(1));
                let taken = self.bitmap.alloc_run(order, bounds, count, |page| out.push(page));
                prop_assert_eq!(out.len(), taken.unwrap_or(0));
                for page in out {
                    prop_assert!(page >= first);
                    self.allocated(Ok(page), 1 << order, order, max_page)?;
                }
                if taken.is_ok_and(|taken| taken < count) {
                    let next = self.model.place(1 << order, order, max_page);
                    prop_assert!(next.is_none_or(|next| next < first));
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
                let many: Vec<_> = self.live.extract_if(.., |live| live.1 == pages).collect();
                many.into_iter().try_for_each(|(first, pages)| self.free(first, pages))?;
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
        self.least = self.least.min(self.model.free_pages());
        prop_assert_eq!(self.bitmap.least_free(), self.least);
        // The rest takes long; once in a while is enough to notice what does not go away by itself.
        self.steps += 1;
        if self.steps.is_multiple_of(8) { self.compare() } else { Ok(()) }
    }

    fn allocated(
        &mut self,
        result: Result<u64, BitmapError>,
        pages: u64,
        order: u32,
        max_page: u64,
    ) -> Result<(), TestCaseError> {
        let is_possible = order >= 9 || pages <= 1 << order;
        let expected = self.model.allocated(pages, order, max_page);
        let expected = if is_possible { expected } else { Err(BitmapError::Invalid) };
        prop_assert_eq!(result, expected);
        if let Ok(first) = result {
            prop_assert_eq!(self.model.take(first, first + pages), pages);
            self.live.push((first, pages));
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.bitmap.check(), Ok(()));
        prop_assert_eq!(self.bitmap.free_pages(), self.model.free_pages());
        // A page more than fits from an aligned page on.
        for order in [9, 10, 13] {
            let from = |first: u64| first.next_multiple_of(1 << order);
            let holes = self.model.holes().into_iter();
            let most = holes.map(|(first, pages)| (first + pages).saturating_sub(from(first))).max();
            let too_many = self.bitmap.alloc(most.unwrap_or(0) + 1, order, u64::MAX);
            prop_assert_eq!(too_many, Err(BitmapError::NoFit));
        }
        prop_assert!(self.bitmap.iter().eq(self.model.holes()));
        // Up to an edge of a hole, and somewhere.
        let somewhere = self.model.holes().get(self.steps % 7).map_or(7, |hole| hole.0 + hole.1 / 2);
        for end in [0, somewhere, somewhere + self.steps as u64, END, u64::MAX] {
            let mut survey = Survey::new(end);
            while !self.bitmap.survey(&mut survey) {}
            let holes = self.model.holes().into_iter().filter(|hole| hole.0 < end);
            let cut = holes.map(|hole| hole.1.min(end - hole.0));
            let expected = cut.fold((0, 0), |(free, most), pages| (free + pages, most.max(pages)));
            prop_assert_eq!((survey.free, survey.largest), expected);
        }
        Ok(())
    }
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
        2 => (0..40_usize, 0..=MAX_ORDER, prop_oneof![Just(0), page()], request())
            .prop_map(|(count, order, first, (.., max_page))| Op::AllocRun { count, order, first, max_page }),
        10 => index().prop_map(Op::Free),
        2 => (index(), sizes(bits)).prop_map(|(index, part)| Op::FreeEnd(index, part)),
        2 => (index(), any::<u64>()).prop_map(|(index, part)| Op::FreeMiddle(index, part)),
        1 => index().prop_map(Op::FreeMany),
        1 => index().prop_map(Op::FreeAgain),
        1 => range().prop_map(|(first, pages)| Op::FreeAny(first, pages)),
    ]
}

fn run(pages: u64, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut pair = Pair::new();
    pair.apply(&Op::Add(1, pages - 1))?;
    ops.iter().try_for_each(|op| pair.apply(op))?;
    while let Some((first, pages)) = pair.live.pop() {
        pair.free(first, pages)?;
    }
    pair.compare()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A space of four leaves.
    #[test]
    fn agrees_in_a_small_space(ops in prop::collection::vec(op(11), 1..200)) {
        run(1 << 11, &ops)?;
    }

    /// Three levels of nodes.
    #[test]
    fn agrees_in_a_space_of_some_levels(ops in prop::collection::vec(op(17), 1..200)) {
        run(1 << 17, &ops)?;
    }

    /// Room for the coarsest alignments.
    #[test]
    fn agrees_in_a_large_space(ops in prop::collection::vec(op(24), 1..200)) {
        run(1 << 24, &ops)?;
    }

    /// The address space of a whole machine, of which little is used.
    #[test]
    fn agrees_in_a_huge_space(ops in prop::collection::vec(op(45), 1..100)) {
        run(1 << 45, &ops)?;
    }
}
