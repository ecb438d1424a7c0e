//! Workloads that are a stream of operations in each thread: pairs, rings, replacements.

use std::hint::black_box;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::allocator::{Allocator, Make, Pages, cause};
use super::check::check_live;
use super::workload::{Plan, Space};
use crate::runner::{Cell, Failure, Timing};
use crate::team::{Span, Team};
use crate::timer::OpTimer;

/// One thread's operations, one after the other without end.
pub(crate) trait Stream<A: Allocator>: Send + 'static {
    /// One operation: one free and one allocation, in either order. `None` where one of them failed; the
    /// stream is not used after that.
    fn step(&mut self, allocator: &A) -> Option<()>;

    /// The ranges that are live between operations.
    fn live(&self) -> &[A::Range];
}

/// Allocates and frees.
pub(crate) struct Pair {
    pub pages: u64,
}

impl<A: Allocator> Stream<A> for Pair {
    #[inline(always)]
    fn step(&mut self, allocator: &A) -> Option<()> {
        // The size is unknown to the compiler each time, as it is to a driver's map call.
        let range = allocator.alloc(black_box(self.pages))?;
        allocator.free(black_box(range)).then_some(())
    }

    fn live(&self) -> &[A::Range] {
        &[]
    }
}

/// Frees the oldest and allocates a new one.
pub(crate) struct Ring<A: Allocator> {
    live: Vec<A::Range>,
    oldest: usize,
    pages: u64,
}

impl<A: Allocator> Ring<A> {
    pub(crate) fn fill(allocator: &A, ranges: usize, pages: u64, budget: Duration) -> Result<Self, Failure> {
        let live = fill(allocator, std::iter::repeat_n(pages, ranges), budget)?;
        Ok(Self { live, oldest: 0, pages })
    }
}

impl<A: Allocator> Stream<A> for Ring<A> {
    #[inline(always)]
    fn step(&mut self, allocator: &A) -> Option<()> {
        let place = self.live.get_mut(self.oldest)?;
        if !allocator.free(*place) {
            return None;
        }
        *place = allocator.alloc(black_box(self.pages))?;
        self.oldest = if self.oldest + 1 == self.live.len() { 0 } else { self.oldest + 1 };
        Some(())
    }

    fn live(&self) -> &[A::Range] {
        &self.live
    }
}

/// Frees the one that the plan names and allocates as many pages as it says.
pub(crate) struct Replace<A: Allocator> {
    live: Vec<A::Range>,
    plan: Arc<Plan>,
    next: usize,
}

impl<A: Allocator> Replace<A> {
    /// Allocates within `budget` and ages for up to `part`.
    pub(crate) fn fill(
        allocator: &A,
        plan: &Arc<Plan>,
        budget: Duration,
        part: Duration,
    ) -> Result<Self, Failure> {
        let mut live = fill(allocator, plan.fill.iter().map(|pages| u64::from(*pages)), budget)?;
        let deadline = Deadline::new(budget, plan.holes.len(), "making holes");
        for (done, place) in plan.holes.iter().enumerate() {
            deadline.check(done)?;
            if !allocator.free(live.swap_remove(*place)) {
                return Err(cause(allocator));
            }
        }
        let mut stream = Self { live, plan: Arc::clone(plan), next: 0 };
        stream.age(allocator, part)?;
        Ok(stream)
    }

    /// Replaces each live range about twice, as far as `limit` allows: ranges that were allocated one after
    /// the other lie as they never will again. Who is too slow for it is measured in the better state.
    fn age(&mut self, allocator: &A, limit: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        for done in 0..2 * self.live.len() {
            if done.is_multiple_of(64) && start.elapsed() > limit {
                break;
            }
            self.step(allocator).ok_or_else(|| cause(allocator))?;
        }
        Ok(())
    }
}

impl<A: Allocator> Stream<A> for Replace<A> {
    #[inline(always)]
    fn step(&mut self, allocator: &A) -> Option<()> {
        let step = *self.plan.steps.get(self.next)?;
        self.next = if self.next + 1 == self.plan.steps.len() { 0 } else { self.next + 1 };
        let place = self.live.get_mut(step.index as usize)?;
        if !allocator.free(*place) {
            return None;
        }
        *place = allocator.alloc(u64::from(step.pages))?;
        Some(())
    }

    fn live(&self) -> &[A::Range] {
        &self.live
    }
}

/// Allocates ranges of `sizes` pages, within `budget`.
fn fill<A: Allocator>(
    allocator: &A,
    sizes: impl ExactSizeIterator<Item = u64>,
    budget: Duration,
) -> Result<Vec<A::Range>, Failure> {
    let deadline = Deadline::new(budget, sizes.len(), "allocating as many ranges as are to be live");
    let mut live = Vec::with_capacity(sizes.len());
    for (done, pages) in sizes.enumerate() {
        deadline.check(done)?;
        live.push(allocator.alloc(pages).ok_or_else(|| cause(allocator))?);
    }
    Ok(live)
}

/// Ends what takes too long, as soon as that is clear.
struct Deadline {
    start: Instant,
    budget: Duration,
    total: usize,
    what: &'static str,
}

impl Deadline {
    fn new(budget: Duration, total: usize, what: &'static str) -> Self {
        Self { start: Instant::now(), budget, total, what }
    }

    /// Looks at the clock at every 64th of the calls: each of those is longer than reading it.
    fn check(&self, done: usize) -> Result<(), Failure> {
        if done == 0 || !done.is_multiple_of(64) {
            return Ok(());
        }
        let elapsed = self.start.elapsed();
        // No subject gets faster as ranges become more, so this is the least that all of it will take. Some more
        // than the budget, because a disturbance now need not go on.
        let expected = elapsed.mul_f64(self.total as f64 / done as f64);
        let hopeless = elapsed > self.budget / 16 && expected > self.budget * 3 / 2;
        if hopeless || elapsed > self.budget {
            return Err(Failure::OverBudget { what: self.what.into(), limit: self.budget });
        }
        Ok(())
    }
}

/// A subject with a stream for each thread.
pub(crate) struct StreamCell<A: Allocator, S> {
    shared: Arc<Shared<A, S>>,
    threads: usize,
    space: Space,
}

struct Shared<A, S> {
    allocator: A,
    /// A stream is away while its thread works on it, and stays away when that failed.
    streams: Vec<Mutex<Option<S>>>,
}

impl<A: Allocator, S: Stream<A>> Shared<A, S> {
    /// Has `work` use the stream of `thread`. By value: what is local to the loop can stay in registers.
    fn with<T>(
        &self,
        thread: usize,
        work: impl FnOnce(&A, S) -> Result<(S, T), Failure>,
    ) -> Result<T, Failure> {
        let slot = || self.streams[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let stream = slot().take().ok_or(Failure::Abandoned)?;
        let (stream, result) = work(&self.allocator, stream)?;
        *slot() = Some(stream);
        Ok(result)
    }
}

fn run<A: Allocator, S: Stream<A>>(allocator: &A, mut stream: S, ops: u64) -> Option<S> {
    for _ in 0..ops {
        stream.step(allocator)?;
    }
    Some(stream)
}

impl<A: Allocator, S: Stream<A>> StreamCell<A, S> {
    /// Makes an allocator, and a stream for each thread with `open`, on that thread.
    pub(crate) fn open(
        team: &Team,
        make: &Make<A>,
        space: Space,
        threads: usize,
        open: impl Fn(&A, usize) -> Result<S, Failure> + Send + Sync + 'static,
    ) -> Result<Self, Failure> {
        let make = Arc::clone(make);
        let allocator = team.each(1, move |_, _| make(&space))?.into_iter().next();
        let allocator = allocator.ok_or(Failure::Abandoned)?;
        let streams = (0..threads).map(|_| Mutex::new(None)).collect();
        let shared = Arc::new(Shared { allocator, streams });
        let opening = Arc::clone(&shared);
        team.each(threads, move |thread, _| {
            let stream = open(&opening.allocator, thread)?;
            *opening.streams[thread].lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
            Ok(())
        })?;
        Ok(Self { shared, threads, space })
    }
}

impl<A: Allocator, S: Stream<A>> Cell for StreamCell<A, S> {
    fn repetition(&mut self, team: &Team, ops: u64) -> Result<Timing, Failure> {
        let shared = Arc::clone(&self.shared);
        let wall = team.race(self.threads, move |thread, line| {
            shared.with(thread, |allocator, stream| {
                // What the subjects before have pushed out of the caches comes back first.
                let stream = run(allocator, stream, ops / 16).ok_or_else(|| cause(allocator))?;
                line.wait()?;
                let (span, stream) = Span::of(|| run(allocator, stream, ops));
                Ok((stream.ok_or_else(|| cause(allocator))?, span))
            })
        })?;
        Ok(Timing { wall, ops })
    }

    fn samples(
        &mut self,
        team: &Team,
        timer: &OpTimer,
        count: usize,
        limit: Duration,
    ) -> Result<Option<Vec<u64>>, Failure> {
        let (shared, timer) = (Arc::clone(&self.shared), timer.clone());
        let ticks = team.each(self.threads, move |thread, line| {
            shared.with(thread, |allocator, mut stream| {
                let mut ticks = Vec::with_capacity(count);
                line.wait()?;
                let start = Instant::now();
                while ticks.len() < count && (!ticks.len().is_multiple_of(64) || start.elapsed() < limit) {
                    let (taken, done) = timer.ticks(|| stream.step(allocator));
                    done.ok_or_else(|| cause(allocator))?;
                    ticks.push(taken);
                }
                Ok((stream, ticks))
            })
        })?;
        Ok(Some(ticks.concat()))
    }

    fn check(&mut self, _: &Team) -> Result<(), Failure> {
        let mut live: Vec<Pages> = Vec::new();
        for stream in &self.shared.streams {
            let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
            let ranges = stream.as_ref().map_or(&[][..], S::live);
            live.extend(ranges.iter().map(|range| self.shared.allocator.pages(*range)));
        }
        check_live(live, self.shared.allocator.aligned(), &self.space)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of what began ten seconds ago, as seen at every 64th of its steps.
    #[test]
    fn what_takes_too_long_is_ended_as_soon_as_that_is_clear() {
        let start = Instant::now() - Duration::from_secs(10);
        let of = |budget, total, done| {
            let limit = Duration::from_secs(budget);
            let checked = Deadline { start, budget: limit, total, what: "it" }.check(done);
            checked == Err(Failure::OverBudget { what: "it".into(), limit })
        };
        for (budget, total, done, is_over) in [
            (9, 64, 64, true),
            (9, 64, 0, false),
            (9, 64, 63, false),
            (9, 128, 65, false),
            // All of it would take 100 s, and 200.
            (100, 640, 64, false),
            (100, 1280, 64, true),
            (100, 1280, 640, false),
            // Too early to tell.
            (320, 1 << 20, 64, false),
            (100, 1 << 20, 64, true),
        ] {
            assert_eq!(of(budget, total, done), is_over, "{budget} s, {done} of {total}");
        }
    }
}
