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
                // One stores even numbers, the other odd ones.
                while line.0.load(Ordering::Acquire) != 2 * turn + thread as u64 {
                    std::hint::spin_loop();
                }
                line.0.store(2 * turn + thread as u64 + 1, Ordering::Release);
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

/// Pages in an order that no prefetcher guesses.
fn cold() -> f64 {
    let (mut to, from) = (vec![1_u8; COLD_BYTES], vec![2_u8; COLD_BYTES]);
    let pages = COLD_BYTES / PAGE;
    let mut at = 1;
    median(|| {
        per(2_000, |_| {
            // Odd steps around a power of two meet every page.
            at = (at + 40_503) % pages;
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
