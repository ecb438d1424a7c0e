//! Address spaces of any shape, with ring arenas in them, against a plain list of what is handed out.

use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{IovaError, IovaSpace, RingArena, RingConfig, SpaceConfig};

use crate::api::Clocked;
use crate::input::Input;

/// No more than so many ranges are live at a time, so that looking at all of them stays quick.
const MOST: usize = 128;

/// Plays `bytes`.
pub fn run(bytes: &[u8]) {
    space(&mut Input::new(bytes));
}

fn overlap(one: IovaRange, other: IovaRange) -> bool {
    one.start() <= other.last() && other.start() <= one.last()
}

/// What one space has handed out.
struct Plain {
    config: SpaceConfig,
    live: Vec<IovaRange>,
}

impl Plain {
    fn add(&mut self, range: IovaRange, len: u64, limit: Iova) {
        let granule = self.config.granule;
        assert!(range.start().is_aligned(granule) && Some(range.len()) == granule.round_up(len), "{range}");
        assert!(self.config.aperture.contains_range(range) && range.last() <= limit, "{range}");
        let taken = self.live.iter().chain(&self.config.reserved).find(|other| overlap(**other, range));
        assert_eq!(taken, None, "{range} is handed out twice");
        let granules = range.len() >> granule.shift();
        let align = granules.checked_next_power_of_two().unwrap_or(1 << 63).min(1 << 18);
        assert!((range.start().get() >> granule.shift()).is_multiple_of(align), "{range} is not aligned");
        self.live.push(range);
    }
}

/// An arena, and what it has handed out.
struct Ring {
    arena: RingArena,
    live: Vec<IovaRange>,
}

fn space(input: &mut Input<'_>) {
    let slots = usize::from(input.byte() % 4);
    let platform = Clocked::new(slots);
    let (start, len) = (input.number(), input.number());
    let granule = PageSize::from_shift(u32::from(input.byte() % 72)).unwrap_or(PageSize::SIZE_4K);
    let Ok(aperture) = IovaRange::new(Iova::new(start), len) else { return };
    let mut config = SpaceConfig::new(aperture, granule, slots);
    // Says nothing any more; the corpus has it.
    input.flag();
    if input.flag() {
        config.low_end = Iova::new(input.number());
        config.cache_bytes = input.number();
    }
    for _ in 0..input.below(3) {
        config.reserved.extend(IovaRange::new(Iova::new(input.number()), input.number()));
    }
    let space = match IovaSpace::new(&config) {
        Ok(space) => space,
        Err(error) => {
            assert!(matches!(error, IovaError::Empty | IovaError::OutOfMemory), "{error}");
            return;
        }
    };
    let mut plain = Plain { config, live: Vec::new() };
    let mut rings: Vec<Ring> = Vec::new();
    while !input.is_empty() {
        platform.be(usize::from(input.byte() % 5));
        match input.below(10) {
            0..=2 if plain.live.len() < MOST => alloc(input, &platform, &space, &mut plain),
            3..=4 => {
                if let Some(which) = input.which(plain.live.len()) {
                    let range = plain.live.swap_remove(which);
                    if rings.iter().all(|ring| ring.arena.range() != range) {
                        assert_eq!(space.free(&platform, range), Ok(()));
                        assert!(space.free(&platform, range).is_err(), "freed twice");
                    } else {
                        plain.live.push(range);
                    }
                }
            }
            5 => free_anything(input, &platform, &space, &plain),
            6 => space.drain_all(&platform),
            7 => space.drain_cpu(&platform, usize::from(input.byte())),
            8 if rings.len() < 4 => rings.extend(ring(input, &platform, &space, &mut plain)),
            _ => {
                if let Some(which) = input.which(rings.len())
                    && let Some(range) = play_ring(input, &platform, &space, &mut rings, which)
                {
                    plain.live.retain(|live| *live != range);
                }
            }
        }
        let usage = space.usage();
        let live: u64 = plain.live.iter().fold(0, |sum, range| sum + range.len());
        assert!(usage.taken >= live && usage.taken <= usage.total && usage.taken <= usage.peak_taken);
        assert!(usage.cached <= usage.taken - live, "{usage:?}");
    }
    for mut ring in rings {
        ring.live.into_iter().for_each(|range| ring.arena.free(range).unwrap());
        plain.live.retain(|live| *live != ring.arena.range());
        ring.arena.release(&space, &platform).unwrap();
    }
    plain.live.into_iter().for_each(|range| space.free(&platform, range).unwrap());
    space.drain_all(&platform);
    let usage = space.usage();
    assert_eq!((usage.taken, usage.cached), (0, 0), "something is lost");
}

fn alloc(input: &mut Input<'_>, platform: &Arc<Clocked>, space: &IovaSpace, plain: &mut Plain) {
    let granule = plain.config.granule;
    let len = match input.flag() {
        true => (1 + input.below(600)).saturating_mul(granule.bytes()),
        false => input.number(),
    };
    let limit = Iova::new(if input.flag() { u64::MAX } else { input.number() });
    match space.alloc(platform, len, limit) {
        Ok(range) => plain.add(range, len, limit),
        Err(IovaError::Empty) => assert_eq!(len, 0),
        Err(IovaError::Exhausted { largest, .. }) => {
            // A hole of more than twice the size has an aligned place, but perhaps above the limit.
            let fits =
                len.checked_next_power_of_two().and_then(|len| len.max(granule.bytes()).checked_mul(2));
            let fits = fits.is_some_and(|fits| fits <= largest) && len >> granule.shift() < 1 << 49;
            assert!(!fits || limit < plain.config.aperture.last(), "{largest:#x} bytes for {len:#x}");
        }
        Err(error) => panic!("{error}"),
    }
}

/// Frees anything but what is live.
fn free_anything(input: &mut Input<'_>, platform: &Arc<Clocked>, space: &IovaSpace, plain: &Plain) {
    let (start, len) = match input.which(plain.live.len()) {
        Some(which) if input.flag() => {
            let range = plain.live[which];
            let some = |input: &mut Input<'_>| {
                let by = i64::from(input.byte() as i8);
                if input.flag() { by } else { by << (plain.config.granule.shift() % 56) }
            };
            (
                range.start().get().wrapping_add_signed(some(input)),
                range.len().wrapping_add_signed(some(input)),
            )
        }
        _ => (input.number(), input.number()),
    };
    if let Ok(range) = IovaRange::new(Iova::new(start), len)
        && !plain.live.contains(&range)
    {
        assert_eq!(space.free(platform, range), Err(IovaError::NotAllocated { range }));
    }
}

fn ring(
    input: &mut Input<'_>,
    platform: &Arc<Clocked>,
    space: &IovaSpace,
    plain: &mut Plain,
) -> Option<Ring> {
    let granule = plain.config.granule;
    let config = RingConfig {
        colour: input.flag().then(|| input.number() as u32),
        limit: Iova::new(if input.flag() { u64::MAX } else { input.number() }),
        ..RingConfig::new(1 + input.below(70) as u32, input.number(), granule)
    };
    let bytes = u128::from(config.descriptors) * u128::from(config.descriptor_bytes);
    // Two bits for each granule: kept small here.
    if bytes >> granule.shift() > 1 << 16 {
        return None;
    }
    let arena = RingArena::new(space, platform, &config).ok()?;
    plain.add(arena.range(), arena.range().len(), config.limit);
    Some(Ring { arena, live: Vec::new() })
}

/// A step of a ring; its range, if that was its last.
fn play_ring(
    input: &mut Input<'_>,
    platform: &Arc<Clocked>,
    space: &IovaSpace,
    rings: &mut Vec<Ring>,
    which: usize,
) -> Option<IovaRange> {
    let ring = &mut rings[which];
    match input.below(8) {
        0..=3 => {
            let len =
                if input.flag() { ring.arena.capacity() / (1 + input.below(8)) } else { input.number() };
            match ring.arena.reserve(len) {
                Ok(range) => {
                    assert!(range.len() >= len && ring.arena.range().contains_range(range));
                    assert!(
                        ring.live.iter().all(|other| !overlap(*other, range)),
                        "{range} is reserved twice"
                    );
                    ring.live.push(range);
                }
                Err(error) => {
                    assert!(!ring.live.is_empty() || len == 0 || len > ring.arena.capacity(), "{error}")
                }
            }
        }
        4..=5 => {
            if let Some(which) = input.which(ring.live.len()) {
                let range = ring.live.remove(which);
                assert_eq!(ring.arena.free(range), Ok(()));
                assert!(ring.arena.free(range).is_err());
            }
        }
        6 => {
            if let Ok(range) = IovaRange::new(Iova::new(input.number()), input.number()) {
                let inside = ring.live.iter().filter(|live| range.contains_range(**live));
                if inside.map(|live| live.len()).sum::<u64>() != range.len() {
                    assert!(ring.arena.free(range).is_err());
                }
            }
        }
        _ => {
            let ring = rings.swap_remove(which);
            let (range, is_free) = (ring.arena.range(), ring.live.is_empty());
            match ring.arena.release(space, platform) {
                Ok(()) => assert!(is_free),
                Err(failed) => {
                    assert!(!is_free, "{}", failed.error);
                    rings.push(Ring { arena: failed.arena, live: ring.live });
                    return None;
                }
            }
            return Some(range);
        }
    }
    let ring = &rings[which];
    assert_eq!(ring.arena.reservations(), ring.live.len());
    assert_eq!(ring.arena.in_use(), ring.live.iter().map(|range| range.len()).sum::<u64>());
    None
}
