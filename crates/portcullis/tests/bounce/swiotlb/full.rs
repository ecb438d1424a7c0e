//! A pool that is full says so, and says when to try again; what other CPUs keep is used first.

use portcullis::addr::{Direction, Iova, PhysAddr};
use portcullis::bounce::swiotlb::{Bounced, Constraints, SwiotlbConfig};
use portcullis::dma::{DmaMapError, DmaUnmapError};

use super::support::*;

const LEN: u64 = 2048;

fn one(pool: &Pool, len: u64) -> Result<Bounced, DmaMapError> {
    // From anywhere: nothing is looked at.
    map(pool, PhysAddr::new(0x1_0000_0000), len, Direction::ToDevice, &Constraints::new())
}

fn fill(pool: &Pool) -> (Vec<Bounced>, DmaMapError) {
    let mut live = Vec::new();
    loop {
        match one(pool, LEN) {
            Ok(bounced) => live.push(bounced),
            Err(full @ DmaMapError::Pressure { .. }) => return (live, full),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn the_error_names_the_limit_and_the_wait_ends() {
    let (platform, _, pool) = machine(&config());
    let (live, full) = fill(&pool);
    assert_eq!(live.len() as u64, 4 * AREA / LEN, "every slot was found");
    let (capacity, limit) = (4 * AREA, 4 * AREA);
    assert_eq!(full, DmaMapError::Pressure { needed: LEN, free: 0, capacity, limit });
    let Err(DmaMapError::Pressure { needed, .. }) = one(&pool, 3 * LEN) else { panic!("not full") };
    assert_eq!(needed, 4 * LEN, "the run that it takes");
    assert_eq!(pool.usage().most, 4 * AREA);
    // Whoever frees: the CPU whose lists were used, another one, one without a CPU.
    for (cpu, mapped) in [0, 1, NONE].into_iter().zip(&live) {
        let Err(DmaMapError::Pressure { .. }) = one(&pool, LEN) else { panic!("not full") };
        platform.run_on(cpu);
        unmap(&pool, mapped.phys, LEN).unwrap();
        platform.run_on(2);
        assert_eq!(one(&pool, LEN), Ok(*mapped));
    }
    live.iter().for_each(|mapped| unmap(&pool, mapped.phys, LEN).unwrap());
    assert_eq!(pool.usage().mapped, 0);
}

/// The waiter needs a long run, and tries after each free. Frees come from a CPU whose lists are in use again by the time.
#[test]
fn a_wait_for_a_long_run_ends_too() {
    let (platform, _, pool) = machine(&config());
    let (mut live, _) = fill(&pool);
    let mut tries = 0;
    loop {
        platform.run_on(1);
        let mapped = live.pop().expect("all of the pool is free");
        unmap(&pool, mapped.phys, LEN).unwrap();
        platform.run_on(0);
        tries += 1;
        match one(&pool, AREA) {
            Ok(mapped) => break unmap(&pool, mapped.phys, AREA).unwrap(),
            Err(DmaMapError::Pressure { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(tries > 1);
}

#[test]
fn what_other_cpus_keep_is_found() {
    let (platform, _, pool) = machine(&config());
    let mut live = Vec::new();
    // All CPUs keep something of several sizes.
    for cpu in 0..4 {
        platform.run_on(cpu);
        for len in [2048, 4096, 8192, 16384] {
            live.extend((0..4).map(|_| (one(&pool, len).unwrap(), len)));
        }
        live.drain(..).for_each(|(mapped, len)| unmap(&pool, mapped.phys, len).unwrap());
    }
    assert!(pool.usage().kept > 0);
    for cpu in [0, NONE] {
        platform.run_on(cpu);
        let (live, _) = fill(&pool);
        assert_eq!(live.len() as u64, 4 * AREA / LEN);
        live.iter().for_each(|mapped| unmap(&pool, mapped.phys, LEN).unwrap());
    }
}

#[test]
fn the_one_that_was_freed_last_comes_first() {
    let (_, _, pool) = machine(&config());
    let lens = [100, 2048, 4096, 10_000, 65_536];
    for len in lens {
        let live: Vec<Bounced> = (0..3).map(|_| one(&pool, len).unwrap()).collect();
        live.iter().for_each(|mapped| unmap(&pool, mapped.phys, len).unwrap());
        assert_eq!(one(&pool, len), Ok(*live.last().unwrap()));
        let again = one(&pool, len).unwrap();
        assert_ne!(Some(&again), live.last());
    }
    assert_eq!(unmap(&pool, PhysAddr::new(1), 1), Err(DmaUnmapError::NotMapped { iova: Iova::new(1) }));
}

/// As under Linux, where drivers count on it: also a buffer that takes slots of several words, with the first free slot amid a
/// page.
#[test]
fn buffers_of_a_page_or_more_begin_at_a_page() {
    const LARGE: u64 = 100 * LEN;
    let (_, _, pool) = machine(&SwiotlbConfig { max_bytes: AREA, ..config() });
    let (mut live, _) = fill(&pool);
    live.sort_unstable_by_key(|mapped| mapped.phys);
    let first = live.iter().position(|mapped| !mapped.phys.get().is_multiple_of(4096)).unwrap();
    // From one that begins amid a page on, as many slots as it takes, and one more.
    let free: Vec<_> = live.drain(first..first + 101).collect();
    free.iter().for_each(|mapped| unmap(&pool, mapped.phys, LEN).unwrap());
    let large = one(&pool, LARGE).unwrap();
    assert_eq!(large.phys, free[1].phys);
    unmap(&pool, large.phys, LARGE).unwrap();
    live.iter().for_each(|mapped| unmap(&pool, mapped.phys, LEN).unwrap());
    assert_eq!(pool.usage().mapped, 0);
}
