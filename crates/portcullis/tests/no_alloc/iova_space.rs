//! Failure 4: a free that needs memory can fail. Here none needs any, whoever frees, in whatever order; and
//! an allocation without memory is an error that changes nothing.

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use crate::iova_model::Rng;
use crate::limited::granting;
use portcullis::addr::{Iova, IovaRange};
use portcullis::iova::{IovaError, IovaSpace, SpaceConfig};

const CPUS: usize = 4;

fn space() -> IovaSpace {
    let window = IovaRange::new(Iova::new(0xfee0_0000), 0x10_0000).unwrap();
    let config = SpaceConfig { reserved: vec![window], ..config(1, (1 << 27) - 1, CPUS) };
    IovaSpace::new(&config).unwrap()
}

/// Mostly small, some of more than 2 MiB, a few of more than 1 GiB.
fn pages(rng: &mut Rng) -> u64 {
    match rng.below(100) {
        0 => (1 << 18) + rng.below(3),
        1..=5 => 513 + rng.below(20_000),
        6..=20 => 1 + rng.below(512),
        21..=30 => 1 << rng.below(13),
        _ => 1 + rng.below(8),
    }
}

fn limit(rng: &mut Rng) -> Iova {
    match rng.below(8) {
        0 | 1 => Iova::new(u32::MAX.into()),
        2 => Iova::new((rng.below(1 << 27) + 1) * PAGE),
        _ => ANYWHERE,
    }
}

fn live_bytes(live: &[IovaRange]) -> u64 {
    live.iter().map(|range| range.len()).sum()
}

/// Whether nothing of `live` is lost or counted twice: what is taken and not kept is what is handed out, with
/// sizes rounded up to a power of two.
fn assert_account(space: &IovaSpace, live: &[IovaRange]) {
    let usage = space.usage();
    let handed_out = usage.taken - usage.cached;
    assert!(handed_out >= live_bytes(live) && handed_out <= 2 * live_bytes(live), "{usage:?}");
}

fn free_all_in_random_order(space: &IovaSpace, platform: &Chosen, live: &mut Vec<IovaRange>, rng: &mut Rng) {
    rng.shuffle(live);
    let (refused, calls) = granting(0, || {
        let mut refused = 0;
        for (step, range) in live.drain(..).enumerate() {
            // From any CPU, and from one without a CPU.
            platform.be(rng.below(CPUS as u64 + 1) as usize);
            refused += usize::from(free(space, platform, range).is_err());
            if step % 1000 == 500 {
                space.drain_all(platform);
            } else if step % 100 == 50 {
                space.drain_cpu(platform, rng.below(CPUS as u64) as usize);
            }
        }
        space.drain_all(platform);
        refused
    });
    assert_eq!((refused, calls), (0, 0));
    assert_eq!((space.usage().taken, space.usage().cached), (0, 0));
}

#[test]
fn frees_from_any_cpu_in_any_order_need_no_memory() {
    let mut rng = Rng(0x2545_f491_4f6c_dd1d);
    let platform = Chosen::new(CPUS);
    let space = space();
    let mut live = Vec::new();
    for _ in 0..2 {
        while live.len() < 4_000 {
            platform.be(rng.below(CPUS as u64 + 1) as usize);
            match alloc(&space, &platform, pages(&mut rng), limit(&mut rng)) {
                Ok(range) => live.push(range),
                Err(error) => assert!(matches!(error, IovaError::Exhausted { .. }), "{error}"),
            }
            // Some return at once, so that the lists have something.
            if rng.below(3) == 0 {
                let which = rng.below(live.len() as u64) as usize;
                free(&space, platform.be(which % 5), live.swap_remove(which)).unwrap();
            }
        }
        assert!(live.iter().any(|range| range.len() > 1 << 30));
        assert_account(&space, &live);
        free_all_in_random_order(&space, &platform, &mut live, &mut rng);
    }
    // The whole space is one hole again, but for the window.
    let total = space.usage().total;
    let wanted = total - (1 << 32);
    assert_eq!(space.alloc(&platform, wanted, ANYWHERE).map(IovaRange::len), Ok(wanted));
}

/// The most holes there can be: every second page of a full space, then the others.
#[test]
fn the_most_holes_need_no_memory() {
    let platform = Chosen::new(2);
    let config = config(0, 1 << 14, 2);
    let space = IovaSpace::new(&config).unwrap();
    let mut live = Vec::new();
    while let Ok(range) = alloc(&space, platform.be(live.len() % 2), 1, ANYWHERE) {
        live.push(range);
    }
    assert_eq!(live.len(), 1 << 14);
    live.sort_unstable_by_key(|range| range.start());
    let (refused, calls) = granting(0, || {
        let mut refused = 0;
        for odd in [0, 1] {
            for (step, range) in live.iter().skip(odd).step_by(2).enumerate() {
                refused += usize::from(free(&space, platform.be(step % 3), *range).is_err());
            }
            space.drain_all(&platform);
            assert_eq!(space.usage().cached, 0);
        }
        refused
    });
    assert_eq!((refused, calls, space.usage().taken), (0, 0, 0));
}

/// While only some requests for memory are granted, or none, an allocation succeeds or is an error; what is
/// handed out can be freed, and nothing is lost.
#[test]
fn allocations_without_memory_lose_nothing() {
    for first_round in [true, false] {
        let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
        let platform = Chosen::new(CPUS);
        let space = space();
        let mut live = Vec::with_capacity(8192);
        let mut short = 0;
        for step in 0..2_000 {
            let grants = if first_round { 0 } else { rng.below(4) as usize };
            let (pages, limit) = (pages(&mut rng), limit(&mut rng));
            platform.be(rng.below(CPUS as u64 + 1) as usize);
            let (result, _) = granting(grants, || alloc(&space, &platform, pages, limit));
            match result {
                Ok(range) => live.push(range),
                Err(IovaError::OutOfMemory) => short += 1,
                Err(error) => {
                    assert!(matches!(error, IovaError::Exhausted { .. }), "{error}");
                    // Memory would not have helped.
                    let again = alloc(&space, &platform, pages, limit);
                    assert!(matches!(again, Err(IovaError::Exhausted { .. })), "{again:?}, {pages} pages");
                }
            }
            if rng.below(3) == 0 && !live.is_empty() {
                let which = rng.below(live.len() as u64) as usize;
                let range = live.swap_remove(which);
                let freed = granting(0, || free(&space, platform.be(which % 5), range));
                assert_eq!(freed, (Ok(()), 0));
            }
            if step % 100 == 0 {
                assert_account(&space, &live);
            }
        }
        assert!(short > 20, "only {short} times short");
        assert_eq!(live.is_empty(), first_round, "{} are live", live.len());
        free_all_in_random_order(&space, &platform, &mut live, &mut rng);
        // As good as new.
        assert!(alloc(&space, platform.be(0), 1 << 20, ANYWHERE).is_ok());
    }
}

/// A space in use runs out of memory and is used up to the last that its range metadata has room for; when there is
/// memory again it goes on.
#[test]
fn a_space_in_use_survives_a_shortage() {
    let mut rng = Rng(0x1234_5678_9abc_def1);
    let platform = Chosen::new(CPUS);
    let space = space();
    let mut live: Vec<IovaRange> = Vec::with_capacity(100_000);
    for step in 0..3_000 {
        live.push(alloc(&space, platform.be(step % 5), pages(&mut rng), ANYWHERE).unwrap());
    }
    let (short, _) = granting(0, || {
        let (mut short, mut more) = (0, 0);
        while short < 1_000 && more < 50_000 {
            platform.be(rng.below(CPUS as u64 + 1) as usize);
            match alloc(&space, &platform, pages(&mut rng), limit(&mut rng)) {
                Ok(range) => live.push(range),
                Err(IovaError::OutOfMemory) => short += 1,
                Err(IovaError::Exhausted { .. }) => {}
                Err(_) => return usize::MAX,
            }
            more += 1;
        }
        short
    });
    assert_eq!(short, 1_000);
    assert_account(&space, &live);
    let before = live.len();
    for step in 0..1_000 {
        live.push(alloc(&space, platform.be(step % 5), 1 + rng.below(64), ANYWHERE).unwrap());
    }
    assert_eq!(live.len(), before + 1_000);
    assert_account(&space, &live);
    // No two of them overlap.
    live.sort_unstable_by_key(|range| range.start());
    assert!(live.windows(2).all(|pair| pair[0].last() < pair[1].start()));
    free_all_in_random_order(&space, &platform, &mut live, &mut rng);
}
