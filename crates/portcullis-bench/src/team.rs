//! Threads that stay on cores of their own, and the line they start from together.
//!
//! The threads live as long as the [`Team`], so that whatever a subject keeps for a thread (a CPU, a cache,
//! a list of free memory) is still there at the next repetition.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::runner::Failure;

/// Why there is no team.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TeamError {
    /// The system does not say which cores this process may use.
    #[error("the system does not tell which cores this process may use")]
    NoCores,
    /// A thread could not be bound to its core.
    #[error("a thread cannot be bound to core {core}")]
    Pin {
        /// The core.
        core: usize,
    },
    /// A thread could not be started.
    #[error("a thread cannot be started: {0}")]
    Spawn(#[from] std::io::Error),
}

type Job = Box<dyn FnOnce() + Send>;
/// What each thread of a team does, by its number.
type SharedJob<T> = Arc<dyn Fn(usize, &StartLine) -> Result<T, Failure> + Send + Sync>;

struct Member {
    core: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// Threads, each bound to a core (of its own, but for a team that shares them), that run jobs one after the other.
pub struct Team {
    members: Vec<Member>,
}

impl Team {
    /// A team of `wanted` threads, or of as many as there are cores to use if that is fewer.
    ///
    /// # Errors
    /// [`TeamError`] where threads cannot be bound to cores.
    pub fn new(wanted: usize) -> Result<Self, TeamError> {
        let members = cores()?.into_iter().take(wanted).map(Member::start);
        Ok(Self { members: members.collect::<Result<_, _>>()? })
    }

    /// A team of `wanted` threads, however few cores there are: threads beyond these share cores, in turn. Their
    /// jobs must not wait for each other without giving the core away, and so not at the [`StartLine`].
    ///
    /// # Errors
    /// [`TeamError`] where threads cannot be bound to cores.
    pub fn sharing_cores(wanted: usize) -> Result<Self, TeamError> {
        let members = cores()?.into_iter().cycle().take(wanted).map(Member::start);
        Ok(Self { members: members.collect::<Result<_, _>>()? })
    }

    /// How many threads there are.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The core of each thread.
    pub fn cores(&self) -> impl Iterator<Item = usize> {
        self.members.iter().map(|member| member.core)
    }

    /// Runs `job` on the first `threads` threads, each with its number, and waits for all of them.
    ///
    /// # Errors
    /// The failure of the first thread that failed; a panic is one too. [`Failure::Unsupported`] where there
    /// are not so many threads.
    pub fn each<T: Send + 'static>(
        &self,
        threads: usize,
        job: impl Fn(usize, &StartLine) -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<Vec<T>, Failure> {
        self.collect(threads, Arc::new(job))
    }

    /// What of [`each`](Self::each) depends on what the job returns, but not on the job.
    fn collect<T: Send + 'static>(&self, threads: usize, job: SharedJob<T>) -> Result<Vec<T>, Failure> {
        let values: Arc<[Mutex<Option<T>>]> = (0..threads).map(|_| Mutex::new(None)).collect();
        let places = Arc::clone(&values);
        self.run_on_each(
            threads,
            Arc::new(move |index, line| {
                let value = job(index, line)?;
                *places[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
                Ok(())
            }),
        )?;
        let value = |place: &Mutex<Option<T>>| place.lock().unwrap_or_else(PoisonError::into_inner).take();
        values.iter().map(|place| value(place).ok_or(Failure::Abandoned)).collect()
    }

    /// What of [`each`](Self::each) depends on neither.
    fn run_on_each(&self, threads: usize, job: SharedJob<()>) -> Result<(), Failure> {
        if threads > self.size() {
            let reason = format!("needs {threads} cores, this process may use {}", self.size());
            return Err(Failure::Unsupported(reason));
        }
        let line = Arc::new(StartLine::new(threads));
        let results: Vec<_> = (0..threads)
            .map(|index| self.members[index].post(index, Arc::clone(&job), Arc::clone(&line)))
            .collect();
        drop(job);
        // All are waited for before the first failure is told: no thread works on after this returns.
        let results: Vec<_> = results
            .into_iter()
            .map(|result| result.recv().unwrap_or_else(|_| Err(Failure::Panicked("its thread ended".into()))))
            .collect();
        // The cause is told, not that others gave up because of it.
        let failures = || results.iter().filter_map(|result| result.as_ref().err());
        let cause = failures().find(|failure| **failure != Failure::Abandoned).or_else(|| failures().next());
        cause.map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// As [`each`](Self::each), for jobs that time themselves: from the first start to the last end.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn race(
        &self,
        threads: usize,
        job: impl Fn(usize, &StartLine) -> Result<Span, Failure> + Send + Sync + 'static,
    ) -> Result<Duration, Failure> {
        self.collect(threads, Arc::new(job)).map(|spans| Span::all(&spans))
    }
}

/// The cores that this process may use: one at least.
fn cores() -> Result<Vec<core_affinity::CoreId>, TeamError> {
    core_affinity::get_core_ids().filter(|cores| !cores.is_empty()).ok_or(TeamError::NoCores)
}

impl Member {
    fn start(core: core_affinity::CoreId) -> Result<Self, TeamError> {
        let (jobs, inbox) = channel::<Job>();
        let (pinned, is_pinned) = channel();
        let work = move || {
            let _ = pinned.send(core_affinity::set_for_current(core));
            inbox.into_iter().for_each(|job| job());
        };
        let thread = std::thread::Builder::new().name(format!("bench-{}", core.id)).spawn(work)?;
        match is_pinned.recv() {
            Ok(true) => Ok(Self { core: core.id, jobs: Some(jobs), thread: Some(thread) }),
            _ => Err(TeamError::Pin { core: core.id }),
        }
    }

    fn post(&self, index: usize, job: SharedJob<()>, line: Arc<StartLine>) -> Receiver<Result<(), Failure>> {
        let (sender, receiver) = channel();
        let run = move || {
            // A subject that panicked is not used again, so no broken state of it is seen.
            let result = catch_unwind(AssertUnwindSafe(|| job(index, &line)))
                .unwrap_or_else(|panic| Err(Failure::Panicked(message(&*panic))));
            if result.is_err() {
                line.abandon();
            }
            // The job may own the last handle of what it worked on: that is to be gone when the result comes.
            drop(job);
            let _ = sender.send(result);
        };
        if let Some(jobs) = &self.jobs {
            // Where the thread has ended, the receiver finds out.
            let _ = jobs.send(Box::new(run));
        }
        receiver
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its jobs' panics were caught and told.
            let _ = thread.join();
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}

/// When one thread's part of a repetition began and ended.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    start: Instant,
    end: Instant,
}

impl Span {
    /// Times `work`.
    pub fn of<T>(work: impl FnOnce() -> T) -> (Self, T) {
        let start = Instant::now();
        let result = work();
        (Self { start, end: Instant::now() }, result)
    }

    /// From the first start to the last end.
    fn all(spans: &[Self]) -> Duration {
        let start = spans.iter().map(|span| span.start).min();
        let end = spans.iter().map(|span| span.end).max();
        start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start)
    }
}

/// Where the threads of one repetition wait for each other.
#[derive(Debug)]
pub struct StartLine {
    missing: AtomicUsize,
    abandoned: AtomicBool,
}

/// A wait for another thread. It spins, as what is measured waits for less than a microsecond as a rule; but a thread that waits
/// for longer gives its core away, as the other one may have none.
#[derive(Debug, Default)]
pub(crate) struct Wait(u32);

impl Wait {
    /// How often it looks before it gives the core away: for some tens of microseconds.
    const LOOKS: u32 = 4096;

    /// Lets a moment pass.
    #[inline]
    pub(crate) fn pause(&mut self) {
        if self.0 < Self::LOOKS {
            self.0 += 1;
            std::hint::spin_loop();
        } else {
            // Not `yield_now`: it leaves the thread among those that run, behind another's whole slice.
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl StartLine {
    fn new(threads: usize) -> Self {
        Self { missing: AtomicUsize::new(threads), abandoned: AtomicBool::new(false) }
    }

    /// Spins until every thread is here. Called once by each thread of a job that calls it at all.
    ///
    /// # Errors
    /// [`Failure::Abandoned`] where another thread failed and will not come.
    pub fn wait(&self) -> Result<(), Failure> {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        let mut wait = Wait::default();
        while self.missing.load(Ordering::Acquire) > 0 {
            if self.is_abandoned() {
                return Err(Failure::Abandoned);
            }
            wait.pause();
        }
        Ok(())
    }

    /// Whether another thread of the job failed.
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }
}

/// Where the threads of a job wait for each other, as often as they like. Where there are more threads than cores,
/// a thread that waits lets others run.
#[derive(Debug, Default)]
pub(crate) struct Meeting(AtomicUsize);

impl Meeting {
    /// Waits until all `threads` are here for the `turn`th time, counting from 0.
    pub(crate) fn wait(
        &self,
        threads: usize,
        turn: u64,
        crowded: bool,
        line: &StartLine,
    ) -> Result<(), Failure> {
        self.0.fetch_add(1, Ordering::AcqRel);
        let all = threads * (turn as usize + 1);
        let mut wait = Wait::default();
        while self.0.load(Ordering::Acquire) < all {
            if line.is_abandoned() {
                return Err(Failure::Abandoned);
            }
            if crowded {
                std::thread::yield_now();
            } else {
                wait.pause();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a second thread, and so without a hang: who waits for a thread that failed gives up, and says so.
    #[test]
    fn a_thread_waits_at_each_meeting_until_the_last_one_is_there() {
        let line = StartLine::new(2);
        line.abandon();
        for crowded in [false, true] {
            let meeting = Meeting::default();
            for turn in 0..3 {
                let waits = meeting.wait(2, turn, crowded, &line);
                assert_eq!(
                    waits,
                    Err(Failure::Abandoned),
                    "turn {turn}: the first did not wait for the second"
                );
                assert_eq!(meeting.wait(2, turn, crowded, &line), Ok(()), "turn {turn}: both are there");
            }
        }
        assert_eq!(line.wait(), Err(Failure::Abandoned), "the first at the start");
        assert_eq!(line.wait(), Ok(()), "both are there");
    }
}
