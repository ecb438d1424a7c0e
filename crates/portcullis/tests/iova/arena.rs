//! Ring arenas: against a plain model, and case by case.

use std::collections::VecDeque;

use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{ArenaError, IovaError, IovaSpace, ReleaseError, RingArena, RingConfig, SpaceConfig};
use portcullis::std_platform::StdPlatform;
use proptest::prelude::*;

const PAGE: u64 = 4096;
const LARGE: u64 = 2 << 20;
const GRANULE: PageSize = PageSize::SIZE_4K;

fn space(pages: u64) -> IovaSpace {
    let aperture = IovaRange::new(Iova::new(PAGE), pages * PAGE).unwrap();
    IovaSpace::new(&SpaceConfig::new(aperture, GRANULE, 1)).unwrap()
}

fn rig() -> (IovaSpace, StdPlatform) {
    (space(1 << 24), StdPlatform::with_cpus(1))
}

fn pages(start: Iova, pages: u64) -> IovaRange {
    IovaRange::new(start, pages * PAGE).unwrap()
}

fn overlap(one: IovaRange, other: IovaRange) -> bool {
    one.start() <= other.last() && other.start() <= one.last()
}

/// A ring that remembers every reservation, and every page of its arc.
struct Plain {
    /// First page and pages of each in the order they were made, and whether it is freed.
    order: VecDeque<(u64, u64, bool)>,
    pages: u64,
    head: u64,
}

impl Plain {
    fn on_the_arc(&self) -> Vec<bool> {
        let mut arc = vec![false; self.pages as usize];
        if let Some((tail, ..)) = self.order.front() {
            let distance = (self.head + self.pages - tail) % self.pages;
            // A head that has caught up with the tail has gone all the way round.
            let distance = if distance == 0 { self.pages } else { distance };
            (0..distance).for_each(|step| arc[((tail + step) % self.pages) as usize] = true);
        }
        arc
    }

    fn reserve(&mut self, len: u64) -> Option<u64> {
        let arc = self.on_the_arc();
        let fits = self.head + len <= self.pages;
        let start = if fits { self.head } else { 0 };
        let skipped = if fits { 0..0 } else { self.head..self.pages };
        if len > self.pages || skipped.chain(start..start + len).any(|page| arc[page as usize]) {
            // An empty ring has no arc, so it takes anything up to its size.
            return None;
        }
        self.order.push_back((start, len, false));
        self.head = (start + len) % self.pages;
        Some(start)
    }

    fn free(&mut self, which: usize) {
        self.order[which].2 = true;
        while self.order.front().is_some_and(|(.., freed)| *freed) {
            self.order.pop_front();
        }
    }

    /// Frees the reservations that are all of these pages, if there are such. Returns whether it did.
    fn free_run(&mut self, start: u64, len: u64) -> bool {
        let inside = |(_, first, pages): &(usize, u64, u64)| start <= *first && first + pages <= start + len;
        let run: Vec<_> = self.live().filter(inside).collect();
        let is_whole = run.iter().map(|(.., pages)| pages).sum::<u64>() == len;
        if is_whole {
            // The newest first: freeing the oldest moves the others.
            run.iter().rev().for_each(|(which, ..)| self.free(*which));
        }
        is_whole
    }

    fn live(&self) -> impl Iterator<Item = (usize, u64, u64)> {
        let all = self.order.iter().enumerate();
        all.filter(|(_, (.., freed))| !freed).map(|(which, (start, len, _))| (which, *start, *len))
    }
}

#[derive(Debug, Clone)]
enum Action {
    Reserve(u64),
    FreeOldest,
    Free(usize),
    /// So many that were reserved one after the other.
    FreeRun {
        which: usize,
        count: usize,
    },
    FreeAgain(usize),
    FreeWrong {
        which: usize,
        front: i64,
        back: i64,
    },
    Release,
}

fn action(most: u64) -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => (1..=most).prop_map(Action::Reserve),
        1 => (1..=3 * most + 2).prop_map(Action::Reserve),
        3 => Just(Action::FreeOldest),
        4 => any::<usize>().prop_map(Action::Free),
        2 => (any::<usize>(), 2..6usize).prop_map(|(which, count)| Action::FreeRun { which, count }),
        1 => any::<usize>().prop_map(Action::FreeAgain),
        1 => (any::<usize>(), -2..3i64, -2..3i64)
            .prop_map(|(which, front, back)| Action::FreeWrong { which, front, back }),
        1 => Just(Action::Release),
    ]
}

/// The ring's shape, what is done to it, and its colour.
fn case() -> impl Strategy<Value = (u32, u64, Option<u32>, Vec<Action>)> {
    prop_oneof![(1..12u32, 1..12u64), (1..300u32, 1..3u64), (1..5u32, 60..140u64)].prop_flat_map(
        |(descriptors, unit)| {
            let actions = proptest::collection::vec(action(unit + unit / 2), 1..400);
            (
                Just(descriptors),
                Just(unit),
                prop_oneof![Just(None), (0..70u32).prop_map(Some), any::<u32>().prop_map(Some)],
                actions,
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// The same answers as the model; never an overlap; everything comes back.
    #[test]
    fn agrees_with_a_plain_model((descriptors, unit, colour, actions) in case()) {
        let (space, platform) = rig();
        let config = RingConfig { colour, ..RingConfig::new(descriptors, unit * PAGE - 7, GRANULE) };
        let mut arena = RingArena::new(&space, &platform, &config).unwrap();
        let ring = u64::from(descriptors) * unit;
        prop_assert_eq!(arena.capacity(), ring * PAGE);
        let whole = arena.range();
        prop_assert_eq!(whole.start().get() % LARGE, 0);
        prop_assert_eq!(whole.len() % LARGE, 0);
        let least = if colour.is_some() { 16 * LARGE } else { 0 };
        prop_assert!(whole.len() < ((ring + unit) * PAGE + LARGE).max(least + 1));

        // The whole ring at once begins at its first page; the very first page is where the colour puts it.
        let first = arena.reserve(1).unwrap();
        arena.free(first).unwrap();
        let all = arena.reserve(arena.capacity()).unwrap();
        arena.free(all).unwrap();
        let (base, head) = (all.start(), (first.start().get() - all.start().get()) / PAGE);
        if head > 0 {
            let to_the_head = arena.reserve(head * PAGE).unwrap();
            arena.free(to_the_head).unwrap();
        }
        let mut plain = Plain { order: VecDeque::new(), pages: ring, head };
        let range = |start: u64, len: u64| pages(Iova::new(base.get() + start * PAGE), len);
        let mut gone: Vec<IovaRange> = Vec::new();

        for action in actions {
            match action {
                Action::Reserve(len) => {
                    let before: Vec<_> = plain.live().collect();
                    match (arena.reserve(len * PAGE - 1), plain.reserve(len)) {
                        (Ok(reserved), Some(start)) => {
                            prop_assert_eq!(reserved, range(start, len));
                            prop_assert!(whole.contains_range(reserved));
                            let clash = before.iter().find(|(_, start, len)| overlap(range(*start, *len), reserved));
                            prop_assert_eq!(clash, None);
                        }
                        (Err(ArenaError::Oversize { capacity, .. }), None) => {
                            prop_assert!(len > ring && capacity == ring * PAGE);
                        }
                        (Err(ArenaError::Full { in_use, reservations, oldest, .. }), None) => {
                            prop_assert!(len <= ring);
                            let bytes: u64 = before.iter().map(|(.., len)| len * PAGE).sum();
                            prop_assert_eq!((in_use, reservations as usize), (bytes, before.len()));
                            prop_assert_eq!(oldest, range(before[0].1, 1).start());
                        }
                        (arena, plain) => prop_assert!(false, "{arena:?} where the model says {plain:?}"),
                    }
                }
                Action::FreeOldest | Action::Free(_) => {
                    let which = if let Action::Free(which) = action { which } else { 0 };
                    let live: Vec<_> = plain.live().collect();
                    if let Some((which, start, len)) = live.get(which % live.len().max(1)).copied() {
                        prop_assert_eq!(arena.free(range(start, len)), Ok(()));
                        plain.free(which);
                        gone.push(range(start, len));
                    }
                }
                Action::FreeRun { which, count } => {
                    let live: Vec<_> = plain.live().collect();
                    let from = which % live.len().max(1);
                    let run = &live[from..(from + count).min(live.len())];
                    if let Some((_, start, _)) = run.first().copied() {
                        let pages: u64 = run.iter().map(|(.., len)| len).sum();
                        if start + pages <= ring {
                            let run = range(start, pages);
                            let expected = plain.free_run(start, pages);
                            let refused = Err(ArenaError::NotReserved { range: run });
                            prop_assert_eq!(arena.free(run), if expected { Ok(()) } else { refused });
                        }
                    }
                }
                Action::FreeAgain(which) => {
                    if let Some(again) = gone.get(which % gone.len().max(1)).copied() {
                        let start = (again.start().get() - base.get()) / PAGE;
                        // Others may be there by now, and may be all of it.
                        let freed = plain.free_run(start, again.len() / PAGE);
                        let refused = Err(ArenaError::NotReserved { range: again });
                        prop_assert_eq!(arena.free(again), if freed { Ok(()) } else { refused });
                    }
                }
                Action::FreeWrong { which, front, back } => {
                    let live: Vec<_> = plain.live().collect();
                    let Some((_, start, len)) = live.get(which % live.len().max(1)).copied() else { continue };
                    let begin = range(start, len).start().get().wrapping_add_signed(front * PAGE as i64 / 2);
                    let Some(len) = (len * PAGE).checked_add_signed(back * PAGE as i64 / 2) else { continue };
                    // What is just others is not wrong.
                    let right = |wrong: IovaRange| {
                        let inside = |(_, start, len): &(usize, u64, u64)| wrong.contains_range(range(*start, *len));
                        live.iter().filter(|live| inside(live)).map(|(.., len)| len * PAGE).sum::<u64>() == wrong.len()
                    };
                    if let Ok(wrong) = IovaRange::new(Iova::new(begin), len) && !right(wrong) {
                        prop_assert_eq!(arena.free(wrong), Err(ArenaError::NotReserved { range: wrong }));
                    }
                }
                Action::Release => {
                    if plain.live().next().is_some() {
                        let Err(ReleaseError { arena: kept, error }) = arena.release(&space, &platform) else {
                            return Err(TestCaseError::fail("released while in use"));
                        };
                        prop_assert!(matches!(error, ArenaError::InUse { .. }), "{}", error);
                        arena = kept;
                    }
                }
            }
            prop_assert_eq!(arena.reservations(), plain.live().count());
            prop_assert_eq!(arena.in_use(), plain.live().map(|(.., len)| len * PAGE).sum::<u64>());
        }
        for (_, start, len) in plain.live() {
            prop_assert_eq!(arena.free(range(start, len)), Ok(()));
        }
        prop_assert!(arena.release(&space, &platform).is_ok());
        space.drain_all(&platform);
        prop_assert_eq!(space.usage().taken, 0);
    }
}

/// Equal descriptors lie side by side, lap after lap, whatever the colour.
#[test]
fn a_ring_of_equal_descriptors_has_no_gaps() {
    let (space, platform) = rig();
    for (descriptors, unit) in [(512, 1), (512, 64), (256, 3)] {
        for colour in [None, Some(0), Some(1), Some(13), Some(39)] {
            let config = RingConfig { colour, ..RingConfig::new(descriptors, unit * PAGE, GRANULE) };
            let mut arena = RingArena::new(&space, &platform, &config).unwrap();
            let mut ring: VecDeque<_> =
                (0..descriptors).map(|_| arena.reserve(unit * PAGE).unwrap()).collect();
            assert_eq!(arena.in_use(), arena.capacity());
            let mut breaks = 0;
            for _ in 0..3 * descriptors {
                assert!(matches!(arena.reserve(1), Err(ArenaError::Full { .. })));
                let (oldest, newest) = (ring.pop_front().unwrap(), *ring.back().unwrap());
                arena.free(oldest).unwrap();
                let next = arena.reserve(unit * PAGE).unwrap();
                assert_eq!(next, oldest, "a full ring goes round");
                breaks += u32::from(Iova::new(newest.last().get() + 1) != next.start());
                ring.push_back(next);
            }
            assert_eq!(breaks, 3, "one for each lap");
            ring.into_iter().for_each(|range| arena.free(range).unwrap());
            arena.release(&space, &platform).unwrap();
        }
    }
}

/// The newest reservations may lie just before the oldest: freed together, the oldest of the rest is what is behind.
#[test]
fn a_run_of_the_newest_and_the_oldest_moves_the_tail() {
    let (space, platform) = rig();
    let mut arena = RingArena::new(&space, &platform, &RingConfig::new(16, PAGE, GRANULE)).unwrap();
    let base = arena.reserve(PAGE).unwrap().start();
    let run = |first: u64, count| pages(Iova::new(base.get() + first * PAGE), count);
    (1..16).for_each(|n| assert_eq!(arena.reserve(PAGE), Ok(run(n, 1))));
    assert_eq!(arena.free(run(0, 4)), Ok(()));
    (0..4).for_each(|n| assert_eq!(arena.reserve(PAGE), Ok(run(n, 1))));
    // Two that were reserved last, and the two oldest.
    assert_eq!(arena.free(run(2, 4)), Ok(()));
    assert_eq!(arena.reservations(), 12);
    let full = arena.reserve(3 * PAGE);
    assert!(matches!(full, Err(ArenaError::Full { oldest, .. }) if oldest == run(6, 1).start()), "{full:?}");
    assert_eq!(arena.reserve(2 * PAGE), Ok(run(4, 2)));
    assert!(arena.reserve(PAGE).is_err());
    // One that is freed before is in the way, and so is a part of one.
    assert_eq!(arena.free(run(8, 1)), Ok(()));
    for range in [run(7, 3), run(3, 2), run(0, 16)] {
        assert_eq!(arena.free(range), Err(ArenaError::NotReserved { range }));
    }
    assert_eq!((arena.reservations(), arena.in_use()), (12, 13 * PAGE));
    for range in [run(0, 2), run(4, 4), run(9, 7)] {
        assert_eq!(arena.free(range), Ok(()));
    }
    assert_eq!((arena.reservations(), arena.in_use()), (0, 0));
    arena.release(&space, &platform).unwrap();
}

/// A descriptor that is completed last of all holds up the ring, and says so; freeing it frees everything.
#[test]
fn one_that_is_late_is_named() {
    let (space, platform) = rig();
    let mut arena = RingArena::new(&space, &platform, &RingConfig::new(8, PAGE, GRANULE)).unwrap();
    let ranges: Vec<_> = (0..8).map(|_| arena.reserve(PAGE).unwrap()).collect();
    ranges[1..].iter().rev().for_each(|range| arena.free(*range).unwrap());
    let error = arena.reserve(3 * PAGE).unwrap_err();
    let (capacity, oldest) = (8 * PAGE, ranges[0].start());
    assert_eq!(error, ArenaError::Full { len: 3 * PAGE, in_use: PAGE, capacity, reservations: 1, oldest });
    let text = error.to_string();
    for part in ["12288 bytes", "1 reservations hold 4096 of 32768", &oldest.to_string()] {
        assert!(text.contains(part), "{text}");
    }
    arena.free(ranges[0]).unwrap();
    let whole = arena.reserve(capacity).unwrap();
    assert_eq!(whole.len(), capacity);
    assert_eq!(arena.reserve(capacity + 1), Err(ArenaError::Oversize { len: capacity + 1, capacity }));
    arena.free(whole).unwrap();
    arena.release(&space, &platform).unwrap();
}

/// Rings of consecutive colours start in different sets, at both levels; of one colour, in the same.
#[test]
fn colours_spread_over_the_sets() {
    for (descriptors, unit) in [(512, 1), (512, 64), (1024, 1)] {
        let sets = |colours: bool| {
            let (space, platform) = rig();
            let arenas: Vec<_> = (0..16)
                .map(|ring| {
                    let colour = colours.then_some(ring);
                    let config = RingConfig { colour, ..RingConfig::new(descriptors, unit * PAGE, GRANULE) };
                    RingArena::new(&space, &platform, &config).unwrap()
                })
                .collect();
            let mut used = [0_u16; 2];
            for mut arena in arenas {
                let first = arena.reserve(unit * PAGE).unwrap();
                let page = first.start().get() / PAGE;
                used[0] |= 1 << (page % 16);
                used[1] |= 1 << (page / 512 % 16);
                arena.free(first).unwrap();
                arena.release(&space, &platform).unwrap();
            }
            used.map(u16::count_ones)
        };
        assert_eq!(sets(false)[0], 1, "every ring starts in one set");
        assert_eq!(sets(true)[0], 16, "{descriptors} of {unit}");
        assert_eq!(sets(true)[1], 16, "{descriptors} of {unit}");
    }
}

#[test]
fn what_cannot_be_made_is_refused_and_takes_nothing() {
    let (space, platform) = (space(1024), StdPlatform::with_cpus(1));
    let make = |config: RingConfig| RingArena::new(&space, &platform, &config).map(|_| ()).unwrap_err();
    let new = RingConfig::new;
    assert_eq!(make(new(0, PAGE, GRANULE)), ArenaError::Empty);
    assert_eq!(make(new(1, 0, GRANULE)), ArenaError::Empty);
    for (descriptors, descriptor_bytes) in [(1, u64::MAX), (u32::MAX, PAGE), (u32::MAX, u64::MAX)] {
        let expected = ArenaError::TooLarge { descriptors, descriptor_bytes };
        assert_eq!(make(new(descriptors, descriptor_bytes, GRANULE)), expected);
    }
    for shift in [0, 11, 13, 34, 63] {
        let granule = PageSize::from_shift(shift).unwrap();
        assert_eq!(make(new(1, 1, granule)), ArenaError::Granule { granule, of_space: GRANULE });
    }
    assert!(matches!(make(new(2048, PAGE, GRANULE)), ArenaError::Space(IovaError::Exhausted { .. })));
    let low = RingConfig { limit: Iova::new(LARGE - 1), ..new(1, PAGE, GRANULE) };
    assert!(matches!(make(low), ArenaError::Space(IovaError::Exhausted { .. })));
    space.drain_all(&platform);
    assert_eq!(space.usage().taken, 0);
}

/// In a space too small to spread its rings over the sets, coloured rings fit where uncoloured ones do.
#[test]
fn a_colour_never_costs_the_last_range() {
    let (space, platform) = (space(1024 + 511), StdPlatform::with_cpus(1));
    let config = |colour| RingConfig { colour: Some(colour), ..RingConfig::new(512, PAGE, GRANULE) };
    let arenas = [7, 8].map(|colour| RingArena::new(&space, &platform, &config(colour)).unwrap());
    for mut arena in arenas {
        assert_eq!(arena.range().len(), LARGE);
        let all: Vec<_> = (0..512).map(|_| arena.reserve(PAGE).unwrap()).collect();
        all.into_iter().for_each(|range| arena.free(range).unwrap());
        arena.release(&space, &platform).unwrap();
    }
}

/// An arena given to a space that it is not from comes back whole.
#[test]
fn a_release_to_a_stranger_loses_nothing() {
    let (mine, platform) = rig();
    let other = space(1 << 24);
    let mut arena = RingArena::new(&mine, &platform, &RingConfig::new(3, 700 * PAGE, GRANULE)).unwrap();
    let kept = arena.reserve(PAGE).unwrap();
    let failed = arena.release(&mine, &platform).unwrap_err();
    let in_use = ArenaError::InUse { reservations: 1, bytes: PAGE, oldest: kept.start() };
    assert_eq!(failed.error, in_use);
    assert!(failed.to_string().contains("1 reservations of 4096 bytes"), "{failed}");
    arena = failed.arena;
    arena.free(kept).unwrap();
    let failed = arena.release(&other, &platform).unwrap_err();
    assert!(matches!(failed.error, ArenaError::Space(IovaError::NotAllocated { .. })), "{failed}");
    // Nor where that has handed out the same addresses: they are somebody else's.
    let others = RingArena::new(&other, &platform, &RingConfig::new(3, 700 * PAGE, GRANULE)).unwrap();
    assert_eq!(others.range(), failed.arena.range());
    let failed = failed.arena.release(&other, &platform).unwrap_err();
    assert!(matches!(failed.error, ArenaError::Space(IovaError::NotAllocated { .. })), "{failed}");
    // Whichever of the two spaces is the older one.
    let refused = others.release(&mine, &platform).unwrap_err();
    assert!(matches!(refused.error, ArenaError::Space(IovaError::NotAllocated { .. })), "{refused}");
    let others = refused.arena;
    others.release(&other, &platform).unwrap();
    failed.arena.release(&mine, &platform).unwrap();
    mine.drain_all(&platform);
    assert_eq!(mine.usage().taken, 0);
}

/// Whatever the granule of the space, a ring lies where it says, or is refused with an error.
#[test]
fn granules_of_any_size() {
    let platform = StdPlatform::with_cpus(1);
    for shift in 0..64 {
        let granule = PageSize::from_shift(shift).unwrap();
        let aperture = IovaRange::new(Iova::new(1), u64::MAX).unwrap();
        let Ok(space) = IovaSpace::new(&SpaceConfig::new(aperture, granule, 1)) else {
            panic!("granules of 2^{shift}");
        };
        let large = granule.bytes() << shift.saturating_sub(3).min(18);
        for colour in [None, Some(0), Some(3), Some(u32::MAX)] {
            let config = RingConfig { colour, ..RingConfig::new(3, granule.bytes(), granule) };
            let arena = RingArena::new(&space, &platform, &config);
            if shift > 45 {
                // A large page of 2^18 granules has more bytes than addresses have.
                assert!(
                    matches!(arena, Err(ArenaError::TooLarge { .. } | ArenaError::Space(_))),
                    "{arena:?}"
                );
                continue;
            }
            let mut arena = arena.unwrap();
            assert_eq!(
                (arena.range().start().get() % large, arena.range().len() % large),
                (0, 0),
                "2^{shift}"
            );
            let ranges = [0; 3].map(|_| arena.reserve(1).unwrap());
            for (at, range) in ranges.iter().enumerate() {
                assert!(range.start().is_aligned(granule) && arena.range().contains_range(*range));
                assert!(ranges[..at].iter().all(|other| !overlap(*other, *range)));
            }
            ranges.iter().for_each(|range| arena.free(*range).unwrap());
            arena.release(&space, &platform).unwrap();
        }
        space.drain_all(&platform);
        assert_eq!(space.usage().taken, 0);
    }
}

/// With larger granules a large page is larger too: what a table of one granule covers.
#[test]
fn granules_of_64_kib() {
    let granule = PageSize::from_shift(16).unwrap();
    let aperture = IovaRange::new(Iova::new(1 << 29), 1 << 40).unwrap();
    let space = IovaSpace::new(&SpaceConfig::new(aperture, granule, 1)).unwrap();
    let platform = StdPlatform::with_cpus(1);
    let mut arena = RingArena::new(&space, &platform, &RingConfig::new(64, 1500, granule)).unwrap();
    assert_eq!((arena.range().len(), arena.range().start().get() % (512 << 20)), (512 << 20, 0));
    let one = arena.reserve(1500).unwrap();
    assert_eq!(one.len(), 1 << 16);
    arena.free(one).unwrap();
    arena.release(&space, &platform).unwrap();
}
