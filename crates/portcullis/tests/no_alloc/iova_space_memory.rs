//! What a space costs in memory, counted by the global allocator: empty, and for each live page; and that
//! several spaces of one program do not disturb each other.

use std::collections::BTreeMap;

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use crate::iova_model::Rng;
use crate::limited::held;
use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{IovaError, IovaSpace, SpaceConfig};

const LIVE: usize = 1 << 16;

/// Bytes that `work` got from the allocator and its result still has.
fn kept<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let before = held();
    let result = work();
    (result, (held() - before) as f64)
}

/// A space of 39 bits of addresses and what it takes while it is empty.
fn empty(cpus: usize) -> (IovaSpace, f64) {
    let config = config(1, (1 << 27) - 1, cpus);
    kept(|| IovaSpace::new(&config).unwrap())
}

/// The memory that `space` says it uses, against what the allocator gave it: the blocks of the bitmap
/// are all counted, so only the space's own fields are missing.
fn assert_honest(space: &IovaSpace, counted: f64) {
    let said = space.usage().memory as f64;
    assert!((said - counted).abs() <= 1024.0, "{said} bytes said, {counted} counted");
}

#[test]
fn an_empty_space_costs_little_for_each_cpu() {
    let (one, one_bytes) = empty(1);
    let (many, many_bytes) = empty(65);
    let cpu = (many_bytes - one_bytes) / 64.0;
    println!("empty {} bytes and {cpu} for each CPU", one_bytes - cpu);
    assert!(cpu < 16.0 * 1024.0, "{cpu} bytes for each CPU");
    assert!(one_bytes - cpu < 8.0 * 1024.0, "{one_bytes} bytes with one CPU");
    assert_honest(&one, one_bytes);
    assert_honest(&many, many_bytes);
}

/// 65,536 live single pages: one after another on one CPU, or in turn on four; and what is left of twice as
/// many when every second one, chosen at random, is freed.
///
/// Each page has a word of range metadata, and the bitmap needs hardly more.
#[test]
fn a_live_page_costs_a_bounded_number_of_bytes() {
    for cpus in [1, 4] {
        let (space, empty_bytes) = empty(cpus);
        let platform = Chosen::new(cpus);
        let mut live = Vec::with_capacity(2 * LIVE);
        let one = |step: usize| alloc(&space, platform.be(step % cpus), 1, ANYWHERE).unwrap();
        let (_, bytes) = kept(|| live.extend((0..LIVE).map(one)));
        let each = bytes / LIVE as f64;
        println!("{cpus} CPUs: {each:.2} bytes for each live page");
        assert!(each <= 16.0, "{each} bytes");
        assert_honest(&space, empty_bytes + bytes);
        let (_, more) = kept(|| live.extend((0..LIVE).map(one)));
        Rng(0x9e37_79b9_7f4a_7c15).shuffle(&mut live);
        let (_, freed) = kept(|| {
            for (step, range) in live.drain(LIVE..).enumerate() {
                free(&space, platform.be(step % cpus), range).unwrap();
            }
            space.drain_all(&platform);
        });
        let each = (bytes + more + freed) / LIVE as f64;
        println!("{cpus} CPUs: {each:.2} with as many free between");
        assert!(each <= 20.0, "{each} bytes");
        assert_honest(&space, empty_bytes + bytes + more + freed);
    }
}

/// Memory of a space that is gone is all returned.
#[test]
fn a_space_leaves_no_memory_behind() {
    let (_, left) = kept(|| {
        let (space, _) = empty(2);
        let platform = Chosen::new(2);
        for step in 0..10_000 {
            alloc(&space, platform.be(step % 3), 1 + step as u64 % 700, ANYWHERE).unwrap();
        }
    });
    assert_eq!(left as i64, 0);
}

/// A space with what a plain model knows of it.
struct Known {
    config: SpaceConfig,
    space: IovaSpace,
    /// Where the device's reach ends.
    limit: Iova,
    live: BTreeMap<Iova, IovaRange>,
}

impl Known {
    fn new(first: u64, last: u64, granule: PageSize, limit: u64) -> Self {
        let aperture = IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap();
        let config = SpaceConfig::new(aperture, granule, 3);
        let space = IovaSpace::new(&config).unwrap();
        Self { config, space, limit: Iova::new(limit), live: BTreeMap::new() }
    }

    fn alloc(&mut self, platform: &Chosen, granules: u64) {
        let granule = self.config.granule;
        let range = match self.space.alloc(platform, granules * granule.bytes(), self.limit) {
            Ok(range) => range,
            Err(IovaError::Exhausted { .. }) => {
                // Nothing but what is live here can be in the way: there was room for 64 MiB at first.
                assert!(self.live.len() > 100, "{:?} is exhausted by {}", self.config, self.live.len());
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(range.len(), granules * granule.bytes());
        assert!(range.start().is_aligned(granule));
        assert!((range.start().get() >> granule.shift()).is_multiple_of(granules.next_power_of_two()));
        assert!(self.config.aperture.contains_range(range) && range.last() <= self.limit, "{range}");
        let before = self.live.range(..=range.last()).next_back();
        assert!(before.is_none_or(|(_, other)| other.last() < range.start()), "{range} overlaps");
        self.live.insert(range.start(), range);
    }

    fn free(&mut self, platform: &Chosen, rng: &mut Rng) -> Option<IovaRange> {
        let which = rng.below(self.live.len().max(1) as u64) as usize;
        let range = *self.live.values().nth(which)?;
        self.space.free(platform, range).unwrap();
        self.live.remove(&range.start())
    }
}

/// Spaces of different size, reach and granule, used in turn by the same CPUs. Each keeps to its
/// own bounds; what one hands out, another does not take back; and what one does, no other's figures show.
#[test]
fn spaces_do_not_disturb_each_other() {
    let kilobytes_16 = PageSize::from_shift(14).unwrap();
    let kilobytes_64 = PageSize::from_shift(16).unwrap();
    let mut spaces = vec![
        Known::new(PAGE, (1 << 39) - 1, PageSize::SIZE_4K, u64::MAX),
        Known::new(PAGE, (1 << 39) - 1, PageSize::SIZE_4K, u64::MAX),
        // A device of 32 bits in a space of 48, and one of 30 bits that ends within a page.
        Known::new(PAGE, (1 << 48) - 1, PageSize::SIZE_4K, (1 << 32) - 1),
        Known::new(PAGE, (1 << 48) - 1, kilobytes_16, (1 << 30) - 100),
        // Little room, at an odd place, on each side of 4 GiB, and at the top of all addresses.
        Known::new(0x1234_5000, 0x1634_4fff, PageSize::SIZE_4K, u64::MAX),
        Known::new((1 << 32) - (32 << 20), (1 << 32) + (32 << 20) - 1, kilobytes_16, u64::MAX),
        Known::new(u64::MAX - (1 << 40) + 1, u64::MAX, kilobytes_64, u64::MAX),
        Known::new(1 << 40, (1 << 50) - 1, PageSize::SIZE_2M, u64::MAX),
        Known::new(0, (1 << 57) - 1, PageSize::SIZE_1G, u64::MAX),
    ];
    let platform = Chosen::new(3);
    let mut rng = Rng(0x2545_f491_4f6c_dd1d);
    let mut freed = Vec::new();
    for step in 0..40_000 {
        platform.be(rng.below(4) as usize);
        let which = rng.below(spaces.len() as u64) as usize;
        let others: Vec<_> = match step % 16 {
            0 => spaces.iter().map(|known| known.space.usage()).collect(),
            _ => Vec::new(),
        };
        let known = &mut spaces[which];
        match rng.below(20) {
            0 => known.space.drain_all(&platform),
            1..=10 => known.alloc(&platform, 1 + rng.below(12)),
            _ => {
                freed.extend(known.free(&platform, &mut rng).map(|range| (which, range)));
            }
        }
        for (other, before) in others.into_iter().enumerate().filter(|(other, _)| *other != which) {
            assert_eq!(spaces[other].space.usage(), before, "{other} shows what {which} did");
        }
        // Somebody else's range is refused by all that have not handed it out.
        if let Some((owner, range)) = freed.pop() {
            let taker = rng.below(spaces.len() as u64) as usize;
            let known = &spaces[taker];
            let theirs = known.live.get(&range.start()).is_some_and(|live| live.len() == range.len());
            if taker != owner && !theirs {
                let refused = known.space.free(&platform, range);
                assert_eq!(refused, Err(IovaError::NotAllocated { range }));
            }
        }
    }
    for known in &mut spaces {
        let live = std::mem::take(&mut known.live);
        live.into_values().for_each(|range| known.space.free(&platform, range).unwrap());
        known.space.drain_all(&platform);
        let usage = known.space.usage();
        assert_eq!((usage.taken, usage.cached), (0, 0));
        let granules = known.config.aperture.len() >> known.config.granule.shift();
        assert_eq!(usage.total, granules << known.config.granule.shift());
    }
}
