//! Steps of the thread that runs a test, between which something else happens.

use std::cell::RefCell;
use std::thread::JoinHandle;

type Hook = Box<dyn FnOnce()>;

thread_local! {
    /// Of each thread, and so of each test, its own.
    static NEXT: RefCell<Option<(u64, Hook)>> = const { RefCell::new(None) };
}

/// Before this thread's step `number`, counted from here on, `hook` is called. Each step of it is no step.
pub fn before(number: u64, hook: impl FnOnce() + 'static) {
    assert!(number > 0);
    NEXT.set(Some((number, Box::new(hook))));
}

/// Whether there was such a step. There is none any more.
pub fn came() -> bool {
    NEXT.take().is_none()
}

/// A step.
pub fn step() {
    match NEXT.take() {
        Some((1, hook)) => hook(),
        Some((number, hook)) => NEXT.set(Some((number - 1, hook))),
        None => {}
    }
}

/// Tries `case` with each step of what it does, from the first on, until it says that there was no such step. Returns how
/// many there were.
pub fn each(case: impl Fn(u64) -> bool) -> u64 {
    (1..1000).find(|number| !case(*number)).expect("it has an end") - 1
}

/// Waits until the thread is done, or for a while, where it waits for this one.
pub fn let_run<T>(thread: &JoinHandle<T>) {
    for _ in 0..20_000 {
        if thread.is_finished() {
            return;
        }
        std::thread::yield_now();
    }
}
