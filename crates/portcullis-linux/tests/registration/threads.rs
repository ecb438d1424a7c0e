//! Several CPUs: held ranges are reached, and forgotten ones are not, whatever the others do.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_linux::registration::{AcquireError, Released};

use crate::rig::PAGE;
use crate::support::{Bench, HELD, KEPT, pages};

const THREADS: u64 = 4;
const ROUNDS: u64 = 600;

/// All threads share these pages; then come those of each thread.
const SHARED: u64 = 10;

fn work<P: Platform + Clone>(bench: &Bench<P>, n: u64, full: &AtomicU64) {
    let mut known = Vec::new();
    let mut seed = n + 1;
    for _ in 0..ROUNDS {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(n);
        let mut rest = seed >> 20;
        let mut next = |most: u64| {
            let number = rest % most;
            rest /= most;
            number
        };
        let keep = if next(3) == 0 { HELD } else { KEPT };
        let (shared, len) = (next(SHARED), 1 + next(2));
        let mine = pages(100 * (n + 1) + next(3), 1);
        // Holders acquire and release shared ranges, which no thread forgets.
        let held: Vec<_> = [pages(shared, len), mine]
            .into_iter()
            .filter_map(|memory| match bench.acquire(memory, keep) {
                Ok(held) => Some((memory, held)),
                Err(AcquireError::NoEntry { .. } | AcquireError::NoBytes { .. }) => {
                    full.fetch_add(1, Ordering::Relaxed);
                    None
                }
                Err(error) => panic!("{error}"),
            })
            .collect();
        for (memory, held) in &held {
            assert_eq!(bench.reached(held.iova()), Some(memory.phys), "held, and not reached");
            assert!(bench.rig.reaches(held.iova()));
        }
        for (memory, held) in held {
            if memory.phys == mine.phys {
                known.push(held.iova());
            }
            assert_ne!(bench.cache.release(held), Ok(Released::Forgotten));
        }
        if next(4) == 1 {
            bench.cache.forget(mine).unwrap();
            let reached = known.iter().filter_map(|iova| bench.reached(*iova));
            assert!(!reached.into_iter().any(|phys| phys == mine.phys), "reached after it was forgotten");
        }
    }
}

/// `entries` are too few for all, or enough.
fn run(entries: usize, bytes: u64, slots: usize) -> u64 {
    let bench = Bench::on(StdPlatform::with_cpus(slots), entries, bytes);
    let (full, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|n| {
                let (bench, full) = (&bench, &full);
                scope.spawn(move || work(bench, n, full))
            })
            .collect();
        let trimmer = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                bench.cache.trim(5 * PAGE).unwrap();
                let usage = bench.cache.usage();
                assert!(usage.entries <= entries && usage.bytes <= bytes * PAGE);
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        over.store(true, Ordering::Relaxed);
        trimmer.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    let usage = bench.cache.usage();
    assert!(usage.peak_entries <= entries && usage.peak_bytes <= bytes * PAGE);
    assert_eq!((usage.entries, usage.forgotten_entries), (usage.idle_entries, 0));
    bench.cache.trim(0).unwrap();
    assert_eq!(bench.cache.usage().bytes, 0);
    bench.finish();
    full.load(Ordering::Relaxed)
}

#[test]
fn what_is_held_is_reached_and_what_is_forgotten_is_not() {
    // Fewer slots than threads: some share. Enough room for all holders, so no call is refused.
    assert_eq!(run(2 * THREADS as usize, 1000, 3), 0);
    assert_eq!(run(1000, 3 * THREADS, 8), 0);
}

#[test]
fn whoever_finds_no_room_is_told_so_and_the_limit_holds() {
    // Whether a call is refused is random.
    let _ = run(5, 1000, 3);
    let _ = run(1000, 5, 3);
}
