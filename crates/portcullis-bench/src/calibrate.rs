//! What cache lines, atomics and copies cost on the machine at hand.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;

use crate::limits::Limits;
use crate::runner::Failure;
use crate::stats;
use crate::team::{Team, TeamError};

/// Times in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibrated {
    /// A cache line that another CPU has changed; `None` where there is one CPU.
    pub line_ns: Option<f64>,
    /// An atomic read-modify-write of an own line.
    pub atomic_ns: f64,
    /// A turn of a loop that waits: the processor's pause.
    pub pause_ns: f64,
    /// To copy a KiB from cache to cache.
    pub copy_hot_ns: f64,
    /// To copy a KiB from memory to memory, a page at a time.
    pub copy_cold_ns: f64,
    /// To copy a KiB that another CPU has just written to an own, hot page; `None` where there is one CPU.
    pub copy_remote_ns: Option<f64>,
    /// GB that all CPUs together copy in a second.
    pub copy_gb_per_s: f64,
    /// The number of CPUs that copied together.
    pub cpus: usize,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// There are no threads to measure with.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// A measurement failed.
    #[error("cannot calibrate: {0}")]
    Failed(Failure),
}

impl From<Failure> for CalibrateError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

const PAGE: usize = 4096;
const KIB_PER_PAGE: f64 = 4.0;

/// Runs of each measurement; the median counts.
const RUNS: usize = 7;

/// More than any cache holds.
const COLD_BYTES: usize = 256 << 20;

/// Measures: some seconds, on all cores, with 512 MiB of memory at the most for each.
///
/// # Errors
/// [`CalibrateError`] where threads cannot be bound to cores.
pub fn calibrate() -> Result<Calibrated, CalibrateError> {
    let team = Team::new(usize::MAX)?;
    let two = team.size() > 1;
    let limits = Limits::measure(&team)?;
    let alone = team.each(1, |_, _| {
        let pause_ns = median(|| per(10_000, |_| std::hint::spin_loop()));
        Ok((pause_ns, hot(), cold()))
    })?;
    let (pause_ns, copy_hot_ns, copy_cold_ns) = alone[0];
    Ok(Calibrated {
        line_ns: two.then(|| line(&team)).transpose()?,
        atomic_ns: limits.atomic_ns,
        pause_ns,
        copy_hot_ns,
        copy_cold_ns,
        copy_remote_ns: two.then(|| remote(&team)).transpose()?,
        copy_gb_per_s: bandwidth(&team)?,
        cpus: team.size(),
    })
}

fn median(mut run: impl FnMut() -> f64) -> f64 {
    let mut runs: Vec<f64> = (0..RUNS).map(|_| run()).collect();
    stats::median(&mut runs).unwrap_or_default()
}

/// Nanoseconds of each of `count` steps.
fn per(count: usize, mut step: impl FnMut(usize)) -> f64 {
    let start = Instant::now();
    (0..count).for_each(&mut step);
    start.elapsed().as_secs_f64() * 1e9 / count as f64
}

/// Half of the way there and back of a line, as each end waits for the other.
fn line(team: &Team) -> Result<f64, Failure> {
    const TURNS: u64 = 20_000;
    #[repr(align(128))]
    struct Line(AtomicU64);
    let lines: Arc<Vec<Line>> = Arc::new((0..RUNS).map(|_| Line(AtomicU64::new(0))).collect());
    let times = team.each(2, move |thread, _| {
        let mut times = Vec::new();
        for line in lines.iter() {
            let start = Instant::now();
            for turn in 0..TURNS {
                // One stores even numbers, the other odd ones. A load in place of the exchange would take a copy first, and the
                // store would then wait for that to go: one and a half transfers for each turn.
                let mine = 2 * turn + thread as u64;
                while line.0.compare_exchange(mine, mine + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                    std::hint::spin_loop();
                }
            }
            times.push(start.elapsed().as_secs_f64() * 1e9 / (2 * TURNS) as f64);
        }
        Ok(times)
    })?;
    Ok(stats::median(&mut times[0].clone()).unwrap_or_default())
}

fn copy(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(black_box(from));
    black_box(to);
}

fn hot() -> f64 {
    let (mut to, from) = (vec![1_u8; PAGE], vec![2_u8; PAGE]);
    median(|| per(10_000, |_| copy(&mut to, &from))) / KIB_PER_PAGE
}

/// Which of `pages` pages, a power of two, comes after page `at`: in an order that no prefetcher guesses, and which meets each.
fn next_cold(at: usize, pages: usize) -> usize {
    (at + 40_503) % pages
}

fn cold() -> f64 {
    let (mut to, from) = (vec![1_u8; COLD_BYTES], vec![2_u8; COLD_BYTES]);
    let mut at = 1;
    median(|| {
        per(2_000, |_| {
            at = next_cold(at, COLD_BYTES / PAGE);
            let page = at * PAGE..(at + 1) * PAGE;
            copy(&mut to[page.clone()], &from[page]);
        })
    }) / KIB_PER_PAGE
}

/// One thread writes pages and hands them over, the other copies them.
fn remote(team: &Team) -> Result<f64, Failure> {
    const PAGES: usize = 16;
    const ROUNDS: usize = 200;
    let (there, arriving) = channel::<Box<[u8]>>();
    let (back, returning) = channel::<Box<[u8]>>();
    let ends = Arc::new(Mutex::new((Some((there, returning)), Some((back, arriving)))));
    let gone = || Failure::Broken("the other thread is gone".into());
    let times = team.each(2, move |thread, _| {
        let mut both = ends.lock().map_err(|_| gone())?;
        let (writer, reader) =
            (if thread == 0 { both.0.take() } else { None }, if thread == 1 { both.1.take() } else { None });
        drop(both);
        let mut times = Vec::new();
        if let Some((there, returning)) = writer {
            let mut pages = vec![0_u8; PAGES * PAGE].into_boxed_slice();
            for round in 0..ROUNDS {
                black_box(&mut pages).fill(round as u8);
                there.send(pages).map_err(|_| gone())?;
                pages = returning.recv().map_err(|_| gone())?;
            }
        } else if let Some((back, arriving)) = reader {
            let mut to = vec![0_u8; PAGE];
            for _ in 0..ROUNDS {
                let pages = arriving.recv().map_err(|_| gone())?;
                copy(&mut to, &[1; PAGE]);
                times.push(per(PAGES, |page| copy(&mut to, &pages[page * PAGE..(page + 1) * PAGE])));
                back.send(pages).map_err(|_| gone())?;
            }
        }
        Ok(times)
    })?;
    Ok(stats::median(&mut times[1].clone()).unwrap_or_default() / KIB_PER_PAGE)
}

/// All threads copy at once what no cache holds.
fn bandwidth(team: &Team) -> Result<f64, Failure> {
    const BYTES: usize = 64 << 20;
    let rates = team.each(team.size(), |_, line| {
        let (mut to, from) = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
        line.wait()?;
        Ok(median(|| BYTES as f64 / per(1, |_| copy(&mut to, &from))))
    })?;
    Ok(rates.iter().sum())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_middle_of_seven_runs_counts() {
        let mut runs = [5.0, 1.0, 7.0, 2.0, 6.0, 3.0, 4.0].into_iter();
        assert_eq!(median(|| runs.next().unwrap()), 4.0);
        assert_eq!(runs.next(), None);
    }

    #[test]
    fn a_time_is_that_of_one_of_the_steps() {
        let (mut steps, start) = (Vec::new(), Instant::now());
        let each = per(5, |step| {
            std::thread::sleep(Duration::from_millis(2));
            steps.push(step);
        });
        let all = start.elapsed();
        assert_eq!(steps, [0, 1, 2, 3, 4]);
        assert!(each >= 2e6 && 5.0 * each <= all.as_nanos() as f64, "{each} ns of {all:?}");
    }

    #[test]
    fn a_copy_is_of_all_bytes() {
        let (mut to, from) = ([1; PAGE], [2; PAGE]);
        copy(&mut to, &from);
        assert_eq!(to, from);
    }

    #[test]
    fn each_page_is_copied_once_and_none_after_its_neighbour() {
        let (pages, mut at) = (COLD_BYTES / PAGE, 1);
        let mut seen = vec![false; pages];
        for _ in 0..pages {
            let next = next_cold(at, pages);
            assert!(!std::mem::replace(&mut seen[next], true) && next.abs_diff(at) > 64, "{at} {next}");
            at = next;
        }
    }

    /// How long anything takes is the machine's affair; that all of it is measured is not.
    #[test]
    fn a_machine_is_measured_whole() {
        let all = calibrate().unwrap();
        assert_eq!(all.cpus, Team::new(usize::MAX).unwrap().size());
        let others = [all.line_ns, all.copy_remote_ns];
        assert!(others.iter().all(|other| other.is_some() == (all.cpus > 1)), "{all:?}");
        let own = [all.atomic_ns, all.pause_ns, all.copy_hot_ns, all.copy_cold_ns, all.copy_gb_per_s];
        let mut measured = own.into_iter().chain(others.into_iter().flatten());
        assert!(measured.all(|value| value > 0.0 && value.is_finite()), "{all:?}");
    }

    /// The pages that one thread writes come back to it, and lines go there and back.
    #[test]
    fn what_passes_between_two_cpus_is_timed() {
        let team = Team::new(2).unwrap();
        if team.size() == 2 {
            let times = [line(&team).unwrap(), remote(&team).unwrap()];
            assert!(times.iter().all(|ns| *ns > 0.0), "{times:?}");
        }
    }
}
