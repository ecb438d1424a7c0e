//! What the machine can do at best, measured in the same run as everything else.
//!
//! A figure that stands near one of these has nothing left to win without doing less of it.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;

use crate::runner::Failure;
use crate::stats;
use crate::team::Team;

/// Nanoseconds that the cheapest steps take of which anything is made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// A load and a store of one word, each waiting for the one before.
    pub load_store_ns: f64,
    /// An atomic read-modify-write of a word on a cache line that this core owns.
    pub atomic_ns: f64,
    /// Taking and releasing a lock (`std::sync::Mutex`) that no other thread wants.
    pub lock_ns: f64,
}

impl Limits {
    /// Measures on the team's first core: about 10 ms.
    ///
    /// # Errors
    /// None but those of the team itself.
    pub fn measure(team: &Team) -> Result<Self, Failure> {
        let measured = team.each(1, |_, _| {
            let word = AtomicU64::new(0);
            let lock = Mutex::new(0_u64);
            Ok(Self {
                load_store_ns: per_step(|| {
                    let word = black_box(&word);
                    word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                }),
                atomic_ns: per_step(|| {
                    black_box(&word).fetch_add(1, Ordering::Relaxed);
                }),
                lock_ns: per_step(|| {
                    if let Ok(mut guard) = black_box(&lock).lock() {
                        *guard = guard.wrapping_add(1);
                    }
                }),
            })
        })?;
        Ok(measured[0])
    }

    /// Each limit with its name, the smallest first.
    pub fn named(&self) -> [(&'static str, f64); 3] {
        let mut named =
            [("load+store", self.load_store_ns), ("atomic", self.atomic_ns), ("lock", self.lock_ns)];
        named.sort_by(|a, b| a.1.total_cmp(&b.1));
        named
    }

    /// The largest limit that `ns` does not go below (else the smallest), and how many times it `ns` is.
    pub fn nearest(&self, ns: f64) -> (&'static str, f64) {
        let named = self.named();
        let (name, limit) = named.iter().rev().find(|(_, limit)| *limit <= ns).unwrap_or(&named[0]);
        (name, ns / limit)
    }
}

fn per_step(mut step: impl FnMut()) -> f64 {
    const STEPS: u32 = 100_000;
    const RUNS: usize = 7;
    let mut runs = [0.0; RUNS];
    for ns in &mut runs {
        let start = Instant::now();
        for _ in 0..STEPS {
            step();
        }
        *ns = start.elapsed().as_secs_f64() * 1e9 / f64::from(STEPS);
    }
    stats::median(&mut runs).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_s_time_is_of_one_step() {
        let mut steps = 0;
        per_step(|| steps += 1);
        assert_eq!(steps, 700_000);
        let start = Instant::now();
        let each = per_step(|| {
            let start = Instant::now();
            while start.elapsed().as_nanos() < 500 {
                std::hint::spin_loop();
            }
        });
        // Each of the runs has 100,000 steps, so one is no longer than a hundred thousandth of all.
        assert!((500.0..start.elapsed().as_nanos() as f64 / 1e5).contains(&each), "{each}");
    }
}
