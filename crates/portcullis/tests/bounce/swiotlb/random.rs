//! Random maps, syncs, device writes and unmaps with all constraints at once, against a plain model; and whatever is
//! beside a mapping in what its device reaches is zero, although every byte of the drivers' memory is painted.

use portcullis::addr::{Direction, Iova, PhysAddr};
use portcullis::bounce::swiotlb::{Bounced, Constraints, SwiotlbConfig};
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis::platform::{Platform, PlatformEvents};
use proptest::prelude::*;

use super::support::*;

/// The drivers' memory, in which all buffers lie.
pub const DRIVERS: u64 = 1 << 20;

/// Bytes of a slot.
const SLOT: u64 = 2048;

#[derive(Debug, Clone)]
pub struct Limits {
    pub align_bits: u32,
    /// The device reaches this much of the memory.
    pub reach: Option<u64>,
}

#[derive(Debug, Clone)]
pub enum Action {
    Map {
        at: u64,
        len: u64,
        direction: Direction,
        limits: Limits,
        cpu: usize,
    },
    DeviceWrites {
        which: usize,
        from: u64,
        len: u64,
        byte: u8,
    },
    DriverWrites {
        which: usize,
        from: u64,
        len: u64,
        byte: u8,
    },
    Sync {
        which: usize,
        from: u64,
        len: u64,
        for_cpu: bool,
    },
    Unmap {
        which: usize,
        cpu: usize,
    },
    Trim,
    /// Time goes by, and the timer comes.
    Timer {
        ns: u64,
    },
    /// A CPU goes away, and may come again.
    Released {
        cpu: usize,
    },
    /// The so-many-th request for memory from now on fails.
    Fail {
        after: u64,
    },
}

struct Live {
    /// Where the buffer is in the drivers' memory.
    at: u64,
    direction: Direction,
    bounced: Bounced,
    /// What the device finds.
    contents: Vec<u8>,
}

fn len() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 1..5000u64, 2 => 1..70_000u64, 1 => 1..600_000u64, 1 => (0..20u32).prop_map(|bits| 1 << bits)]
}

fn limits() -> impl Strategy<Value = Limits> {
    let align = prop_oneof![3 => Just(0), 2 => 0..13u32, 1 => 0..21u32];
    let reach = prop_oneof![4 => Just(None), 1 => (0..3u64 << 20).prop_map(Some)];
    (align, reach).prop_map(|(align_bits, reach)| Limits { align_bits, reach })
}

fn action() -> impl Strategy<Value = Action> {
    let direction =
        prop_oneof![Just(Direction::ToDevice), Just(Direction::FromDevice), Just(Direction::Bidirectional)];
    let cpu = prop_oneof![4 => 0..4usize, 1 => Just(NONE)];
    let part = || (any::<usize>(), 0..100_000u64, 1..100_000u64);
    prop_oneof![
        6 => (0..DRIVERS, len(), direction, limits(), cpu.clone())
            .prop_map(|(at, len, direction, limits, cpu)| Action::Map { at, len, direction, limits, cpu }),
        2 => (part(), any::<u8>())
            .prop_map(|((which, from, len), byte)| Action::DeviceWrites { which, from, len, byte }),
        2 => (part(), any::<u8>())
            .prop_map(|((which, from, len), byte)| Action::DriverWrites { which, from, len, byte }),
        3 => (part(), any::<bool>())
            .prop_map(|((which, from, len), for_cpu)| Action::Sync { which, from, len, for_cpu }),
        5 => (any::<usize>(), cpu).prop_map(|(which, cpu)| Action::Unmap { which, cpu }),
        1 => Just(Action::Trim),
        1 => (0..2_000_000_000u64).prop_map(|ns| Action::Timer { ns }),
        1 => (0..4usize).prop_map(|cpu| Action::Released { cpu }),
        1 => (0..3u64).prop_map(|after| Action::Fail { after }),
    ]
}

fn constraints(limits: &Limits, base: PhysAddr) -> Constraints {
    let mask = |bits| u64::MAX.checked_shr(64 - bits).unwrap_or(0);
    let constraints = Constraints::new().with_min_align_mask(mask(limits.align_bits)).unwrap();
    limits.reach.map_or(constraints, |reach| constraints.with_reach(PhysAddr::new(base.get() + reach)))
}

/// A part of a mapping.
fn part(live: &mut [Live], which: usize, from: u64, len: u64) -> Option<(&mut Live, u64, u64)> {
    let which = which % live.len().max(1);
    let mapping = live.get_mut(which)?;
    let from = from % mapping.bounced.len;
    let len = (len % (mapping.bounced.len - from)).max(1);
    Some((mapping, from, len))
}

fn is_free(live: &[Live], at: u64, len: u64) -> bool {
    at + len <= DRIVERS && live.iter().all(|other| at + len <= other.at || other.at + other.bounced.len <= at)
}

/// What `map` promises of the address, and what a device finds in what it reaches of it.
fn check(live: &[Live], new: &Live, limits: &Limits, original: u64, reach: u64) {
    let (start, last) = (new.bounced.phys.get(), new.bounced.phys.get() + new.bounced.len - 1);
    let low = |bits: u32| (1u64 << bits) - 1;
    assert_eq!(start & low(limits.align_bits), original & low(limits.align_bits));
    assert!(last <= reach);
    if new.bounced.len >= 4096 && original & low(limits.align_bits) == 0 {
        assert_eq!(start % 4096, 0);
    }
    // Nobody else is in the slots of either.
    for other in live {
        let (other_start, other_end) =
            (other.bounced.phys.get(), other.bounced.phys.get() + other.bounced.len);
        assert!((last + 1).next_multiple_of(SLOT) <= other_start || other_end <= start / SLOT * SLOT);
    }
}

/// Does `actions` in a pool of up to so many areas, and looks at everything after each `every` of them. How many maps failed.
pub fn run(actions: &[Action], areas: u64, every: usize) -> u64 {
    let (platform, memory, pool) = machine(&SwiotlbConfig { max_bytes: areas * AREA, ..config() });
    let buffers = memory.buffer(DRIVERS).unwrap();
    // No byte of it is zero, so that none of it is taken for padding.
    let mut drivers: Vec<u8> = (0..DRIVERS).map(|at| (at % 251 + 1) as u8).collect();
    buffers.write(0, &drivers).unwrap();
    let mut live: Vec<Live> = Vec::new();
    let reaches = |live: &Live| {
        let (start, end) = (live.bounced.phys.get(), live.bounced.phys.get() + live.bounced.len);
        let first = start / SLOT * SLOT;
        (start - first, first, end.next_multiple_of(SLOT) - first)
    };
    let see = |live: &Live| {
        let (before, first, len) = reaches(live);
        let seen = bytes(&memory, PhysAddr::new(first), len);
        let (padding, rest) = seen.split_at(before as usize);
        let (mapped, after) = rest.split_at(live.contents.len());
        assert_eq!(mapped, live.contents);
        assert!(padding.iter().chain(after).all(|byte| *byte == 0), "what is beside a mapping shows");
    };
    let unmapped = |live: Live, drivers: &mut [u8]| {
        see(&live);
        unmap(&pool, live.bounced.phys, live.bounced.len).unwrap();
        if live.direction != Direction::ToDevice {
            drivers[live.at as usize..][..live.contents.len()].copy_from_slice(&live.contents);
        }
        let again = unmap(&pool, live.bounced.phys, live.bounced.len);
        let phys = live.bounced.phys;
        assert_eq!(again, Err(DmaUnmapError::NotMapped { iova: Iova::new(phys.get()) }));
        let (from, to) = (live.at.saturating_sub(64), (live.at + live.bounced.len + 64).min(DRIVERS));
        let original = bytes(&memory, PhysAddr::new(buffers.phys().get() + from), to - from);
        assert_eq!(original, drivers[from as usize..to as usize]);
    };
    let mut failed = 0;
    for (number, action) in actions.iter().enumerate() {
        match action.clone() {
            Action::Map { at, len, direction, limits, cpu } if is_free(&live, at, len) => {
                platform.run_on(cpu);
                let phys = PhysAddr::new(buffers.phys().get() + at);
                let constraints = constraints(&limits, memory.base());
                let usage = pool.usage();
                let reach = limits.reach.map_or(u64::MAX, |reach| memory.base().get() + reach);
                match map(&pool, phys, len, direction, &constraints) {
                    Ok(bounced) => {
                        assert_eq!(bounced.len, len);
                        let contents = drivers[at as usize..][..len as usize].to_vec();
                        let new = Live { at, direction, bounced, contents };
                        check(&live, &new, &limits, phys.get(), reach);
                        see(&new);
                        live.push(new);
                    }
                    Err(DmaMapError::Pressure { needed, free, capacity, limit }) => {
                        failed += 1;
                        let now = pool.usage();
                        assert_eq!(now.mapped, usage.mapped);
                        assert_eq!((now.capacity, now.limit), (capacity, limit));
                        if limits.reach.is_none() {
                            // What CPUs kept is free now, and a single slot that may be anywhere would have been
                            // found.
                            assert_eq!((now.kept, now.capacity - now.mapped), (0, free));
                            let anywhere = needed == 2048 && limits.align_bits <= 11;
                            assert!(!anywhere || free == 0, "{free} of {capacity}");
                        }
                    }
                    Err(DmaMapError::TooLong { most, .. }) => {
                        assert_eq!(most, AREA - (phys.get() & ((1 << limits.align_bits) - 1)));
                        assert!(len > most);
                    }
                    Err(DmaMapError::BeyondReach { last }) => {
                        assert_eq!(last, reach);
                        assert!(limits.reach.is_some() || 1 << limits.align_bits > AREA);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Map { .. } => {}
            Action::DeviceWrites { which, from, len, byte } => {
                if let Some((live, from, len)) = part(&mut live, which, from, len)
                    && live.direction != Direction::ToDevice
                {
                    live.contents[from as usize..][..len as usize].fill(byte);
                    let at = PhysAddr::new(live.bounced.phys.get() + from);
                    memory.write(at, &vec![byte; len as usize]).unwrap();
                }
            }
            Action::DriverWrites { which, from, len, byte } => {
                if let Some((live, from, len)) = part(&mut live, which, from, len) {
                    let byte = byte.max(1);
                    drivers[(live.at + from) as usize..][..len as usize].fill(byte);
                    buffers.write(live.at + from, &vec![byte; len as usize]).unwrap();
                }
            }
            Action::Sync { which, from, len, for_cpu } => {
                if let Some((live, from, len)) = part(&mut live, which, from, len) {
                    let at = PhysAddr::new(live.bounced.phys.get() + from);
                    let original = buffers.phys().get() + live.at + from;
                    assert_eq!(pool.original(at), Ok(PhysAddr::new(original)));
                    let driver = &mut drivers[(live.at + from) as usize..][..len as usize];
                    let device = &mut live.contents[from as usize..][..len as usize];
                    // SAFETY: one thread does everything.
                    unsafe {
                        if for_cpu {
                            pool.sync_for_cpu(at, len).unwrap();
                        } else {
                            pool.sync_for_device(at, len).unwrap();
                        }
                    }
                    if for_cpu && live.direction != Direction::ToDevice {
                        driver.copy_from_slice(device);
                    } else if !for_cpu && live.direction != Direction::FromDevice {
                        device.copy_from_slice(driver);
                    }
                }
            }
            Action::Unmap { which, cpu } => {
                platform.run_on(cpu);
                if !live.is_empty() {
                    unmapped(live.swap_remove(which % live.len()), &mut drivers);
                }
            }
            Action::Trim => {
                pool.trim();
            }
            Action::Timer { ns } => {
                platform.set_time(platform.now_ns() + ns);
                pool.timer();
            }
            Action::Released { cpu } => pool.cpu_released(cpu),
            Action::Fail { after } => memory.fail_after(after),
        }
        if number.is_multiple_of(every) {
            live.iter().for_each(see);
            assert_eq!(bytes(&memory, buffers.phys(), DRIVERS), drivers);
        }
    }
    live.drain(..).for_each(|live| unmapped(live, &mut drivers));
    assert_eq!(bytes(&memory, buffers.phys(), DRIVERS), drivers);
    assert_eq!(pool.usage().mapped, 0);
    pool.trim();
    let usage = pool.usage();
    assert_eq!((usage.capacity, usage.kept), (AREA, 0));
    drop(pool);
    drop(buffers);
    assert_eq!((memory.frames_in_use(), memory.bad_frees(), memory.stray_tables()), (0, 0, 0));
    failed
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn as_a_plain_model(actions in prop::collection::vec(action(), 1..120)) {
        run(&actions, 4, 1);
    }
}
