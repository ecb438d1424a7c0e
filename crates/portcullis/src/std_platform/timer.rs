//! The thread that keeps a platform's timers.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A thread that sleeps until a deadline and then calls. It is started once and ends with this value, so that
/// setting a deadline neither allocates nor starts anything.
#[derive(Debug)]
pub(super) struct Timer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    start: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    deadline: Option<Duration>,
    stop: bool,
}

impl Timer {
    /// Starts the thread. Deadlines count from `start`; `run` is called for each, and must not panic.
    ///
    /// Without a thread there would be no window for lazy protection to end.
    ///
    /// # Panics
    /// Where the system has no thread to give.
    pub(super) fn start(start: Instant, run: impl Fn() + Send + 'static) -> Self {
        let shared = Arc::new(Shared { start, state: Mutex::default(), changed: Condvar::new() });
        let keeper = Arc::clone(&shared);
        let keep_time = move || {
            while keeper.wait_for_deadline() {
                run();
            }
        };
        thread::Builder::new()
            .name("portcullis-timer".into())
            .spawn(keep_time)
            .expect("the system starts a thread for the timers");
        Self { shared }
    }

    /// Has the thread call at `deadline`, unless it is to call earlier anyway: then it finds everybody who
    /// waits by that time, and who waits longer asks again.
    pub(super) fn wake_at(&self, deadline: Duration) {
        let mut state = self.shared.lock();
        if state.deadline.is_none_or(|earlier| deadline < earlier) {
            state.deadline = Some(deadline);
            self.shared.changed.notify_one();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next deadline; `false` when the thread is to end.
    fn wait_for_deadline(&self) -> bool {
        let mut state = self.lock();
        loop {
            if state.stop {
                return false;
            }
            let Some(deadline) = state.deadline else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_sub(self.start.elapsed());
            if left.is_zero() {
                state.deadline = None;
                return true;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
    }
}
