//! The threads that call listeners when a deadline comes: a timer thread, and workers. No deadline is lost, and no
//! listener delays another.
//!
//! A listener may block for as long as hardware is silent, in its call, or in its drop if the call holds the last
//! handle. It delays no other listener, because:
//!
//! 1. The timer thread calls no listener.
//! 2. While a listener is due, a worker that is in no call is awake, or was just woken or started. The thread that
//!    makes a listener due ensures this, and so does a worker that begins a call: it wakes a worker, or starts one.
//! 3. A listener is in one call at a time. A deadline that comes meanwhile makes it due again when that call returns.
//!
//! So there is at most one worker more than the most listeners that were ever in a call at the same time; the workers
//! stay until the platform ends. A deadline is removed and its listeners become `due` under one lock. If the system has
//! no thread to give, the timer thread tries again soon.

use std::collections::VecDeque;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use std::vec::Vec;

use crate::heap::{OutOfMemory, Weak};
use crate::platform::PlatformEvents;

const RETRY: Duration = Duration::from_millis(10);

/// The listeners of a platform, and the next deadline. The platform's threads end with this value, each after the call
/// that it is in.
#[derive(Debug)]
pub(super) struct Timer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    start: Instant,
    state: Mutex<State>,
    /// Wakes the timer thread: there is another deadline.
    changed: Condvar,
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    deadline: Option<Duration>,
    /// Listeners in the order of registration, which is that of their numbers.
    listeners: Vec<Listener>,
    registered: u64,
    /// Listeners to call. A listener that is in a call is not in it.
    due: VecDeque<u64>,
    /// Workers that are in no call and do not sleep, including those just woken or started.
    awake: usize,
    asleep: usize,
    /// Workers that were woken and have not noticed yet.
    woken: usize,
    stop: bool,
}

struct Listener {
    id: u64,
    events: Weak<dyn PlatformEvents>,
    is_due: bool,
    in_call: bool,
}

impl core::fmt::Debug for Listener {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Listener").field("is_due", &self.is_due).field("in_call", &self.in_call).finish()
    }
}

/// Calls `call` for the listener of `events`, if that still lives. A panic ends here, also one of the drop of a
/// listener whose last handle this is. The panic hook has reported it.
pub(super) fn tell(events: &Weak<dyn PlatformEvents>, call: impl FnOnce(&dyn PlatformEvents)) {
    let Some(listener) = events.upgrade() else { return };
    survive(|| call(&*listener));
    // Separately: a second panic while the first unwinds would end the process.
    survive(|| drop(listener));
}

fn survive(f: impl FnOnce()) {
    // A panic's payload is the embedder's too, and may panic when it is dropped.
    if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(f))
        && let Err(again) = panic::catch_unwind(AssertUnwindSafe(|| drop(payload)))
    {
        core::mem::forget(again);
    }
}

impl Timer {
    /// Starts the timer thread. Deadlines count from `start`.
    ///
    /// # Errors
    /// The system's, if it has no thread to give: then nothing would end lazy protection's window.
    pub(super) fn start(start: Instant) -> io::Result<Self> {
        let state = Mutex::default();
        let shared = Arc::new(Shared { start, state, changed: Condvar::new(), work: Condvar::new() });
        let keeper = Arc::clone(&shared);
        spawn("portcullis-timer", move || keeper.keep_time())?;
        Ok(Self { shared })
    }

    /// Calls `events` at deadlines from now on. O(listeners). Allocates here all memory that a deadline needs, except
    /// for a worker's.
    pub(super) fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        let mut state = self.shared.lock();
        state.forget_dead();
        let most = state.listeners.len() + 1;
        let more = most.saturating_sub(state.due.len());
        state.listeners.try_reserve(1).map_err(|_| OutOfMemory)?;
        state.due.try_reserve(more).map_err(|_| OutOfMemory)?;
        let id = state.registered;
        state.registered += 1;
        state.listeners.push(Listener { id, events, is_due: false, in_call: false });
        Ok(())
    }

    /// [Calls](tell) all listeners, one after the other, without a lock.
    pub(super) fn tell_all(&self, call: impl Fn(&dyn PlatformEvents)) {
        let mut next = 0;
        loop {
            let state = self.shared.lock();
            let place = state.listeners.partition_point(|listener| listener.id < next);
            let Some(Listener { id, events, .. }) = state.listeners.get(place) else { return };
            let events = events.clone();
            next = id + 1;
            drop(state);
            tell(&events, &call);
        }
    }

    /// Calls all listeners at `deadline`, unless there is an earlier deadline: that call covers each that waits by
    /// then, and one that waits longer requests another. Starts no thread and allocates nothing.
    pub(super) fn wake_at(&self, deadline: Duration) {
        self.shared.wake_at(&mut self.shared.lock(), deadline);
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
        self.shared.work.notify_all();
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    #[cfg(test)]
    if tests::NO_THREADS.get() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    thread::Builder::new().name(name.into()).spawn(run).map(|_| ())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_at(&self, state: &mut State, deadline: Duration) {
        if state.deadline.is_none_or(|earlier| deadline < earlier) {
            state.deadline = Some(deadline);
            self.changed.notify_one();
        }
    }

    fn keep_time(self: &Arc<Self>) {
        let mut state = self.lock();
        while !state.stop {
            let left = state.deadline.map(|deadline| deadline.saturating_sub(self.start.elapsed()));
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    state.deadline = None;
                    state.all_are_due();
                    self.see_to_the_due(&mut state);
                    state
                }
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Wakes or starts a worker if listeners are due and no worker is awake to call them.
    fn see_to_the_due(self: &Arc<Self>, state: &mut State) {
        if state.due.is_empty() || state.awake > 0 {
            return;
        }
        if state.asleep > 0 {
            state.asleep -= 1;
            state.woken += 1;
            self.work.notify_one();
        } else {
            let worker = Arc::clone(self);
            if spawn("portcullis-worker", move || worker.work()).is_err() {
                let soon = self.start.elapsed() + RETRY;
                return self.wake_at(state, soon);
            }
        }
        state.awake += 1;
    }

    fn work(self: &Arc<Self>) {
        super::go_without_cpus();
        let mut state = self.lock();
        while !state.stop {
            let Some((id, events)) = state.begin_call() else {
                state = self.sleep(state);
                continue;
            };
            state.awake -= 1;
            self.see_to_the_due(&mut state);
            drop(state);
            tell(&events, |listener| listener.timer());
            drop(events);
            state = self.lock();
            state.awake += 1;
            state.end_call(id);
        }
    }

    fn sleep<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.awake -= 1;
        state.asleep += 1;
        while state.woken == 0 && !state.stop {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        // The waker has counted this worker as awake.
        state.woken = state.woken.saturating_sub(1);
        state
    }
}

impl State {
    fn forget_dead(&mut self) {
        self.listeners.retain(|listener| listener.in_call || listener.events.owners() > 0);
    }

    fn all_are_due(&mut self) {
        self.forget_dead();
        for listener in &mut self.listeners {
            if !listener.is_due && !listener.in_call {
                self.due.push_back(listener.id);
            }
            listener.is_due = true;
        }
    }

    fn begin_call(&mut self) -> Option<(u64, Weak<dyn PlatformEvents>)> {
        while let Some(id) = self.due.pop_front() {
            if let Some(listener) = self.listener(id) {
                listener.is_due = false;
                listener.in_call = true;
                return Some((id, listener.events.clone()));
            }
        }
        None
    }

    fn end_call(&mut self, id: u64) {
        if let Some(listener) = self.listener(id) {
            listener.in_call = false;
            if listener.is_due {
                self.due.push_back(id);
            }
        }
    }

    fn listener(&mut self, id: u64) -> Option<&mut Listener> {
        let place = self.listeners.binary_search_by_key(&id, |listener| listener.id).ok()?;
        self.listeners.get_mut(place)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use core::cell::Cell;
    use std::thread_local;

    use super::*;
    use crate::heap;
    use crate::platform::events_of;

    thread_local! {
        /// Whether the system has no thread to give to this one.
        pub(in crate::std_platform) static NO_THREADS: Cell<bool> = const { Cell::new(false) };
    }

    struct Nothing;

    impl PlatformEvents for Nothing {
        fn timer(&self) {}

        fn cpu_released(&self, _: usize) {}
    }

    /// A timer without a keeper, and a listener of it.
    fn timer() -> (Timer, heap::Shared<Nothing>) {
        let (state, changed, work) = (Mutex::default(), Condvar::new(), Condvar::new());
        let timer = Timer { shared: Arc::new(Shared { start: Instant::now(), state, changed, work }) };
        let listener = heap::Shared::new(Nothing).unwrap();
        timer.register(events_of(&listener)).unwrap();
        (timer, listener)
    }

    #[test]
    fn a_listener_is_queued_once_however_many_deadlines_come() {
        let (timer, _listener) = timer();
        let mut state = timer.shared.lock();
        (0..3).for_each(|_| state.all_are_due());
        assert_eq!(state.due, [0]);
        let (id, _) = state.begin_call().unwrap();
        (0..3).for_each(|_| state.all_are_due());
        assert!(state.due.is_empty(), "it is in a call");
        state.end_call(id);
        assert_eq!(state.due, [0]);
        state.begin_call().unwrap();
        state.end_call(id);
        assert!(state.due.is_empty() && state.begin_call().is_none());
    }

    #[test]
    fn a_worker_that_is_awake_comes_for_what_is_due() {
        let (timer, _listener) = timer();
        let mut state = timer.shared.lock();
        state.all_are_due();
        (state.awake, state.asleep) = (1, 1);
        timer.shared.see_to_the_due(&mut state);
        assert_eq!((state.awake, state.asleep, state.woken), (1, 1, 0));
        // A worker that sleeps is woken, and no other is started.
        state.awake = 0;
        timer.shared.see_to_the_due(&mut state);
        assert_eq!((state.awake, state.asleep, state.woken), (1, 0, 1));
        timer.shared.see_to_the_due(&mut state);
        assert_eq!((state.awake, state.asleep, state.woken), (1, 0, 1));
    }

    #[test]
    fn where_the_system_has_no_thread_that_is_tried_again_soon() {
        let (timer, _listener) = timer();
        let mut state = timer.shared.lock();
        state.all_are_due();
        NO_THREADS.set(true);
        timer.shared.see_to_the_due(&mut state);
        assert_eq!((state.awake, &state.due), (0, &VecDeque::from([0])), "nobody comes");
        let again = state.deadline.take().unwrap();
        assert!(again >= RETRY && again <= timer.shared.start.elapsed() + RETRY);
        // Repeat what the keeper does at that deadline.
        NO_THREADS.set(false);
        state.all_are_due();
        assert_eq!(state.due, [0]);
        timer.shared.see_to_the_due(&mut state);
        assert_eq!((state.awake, state.deadline), (1, None));
    }
}
