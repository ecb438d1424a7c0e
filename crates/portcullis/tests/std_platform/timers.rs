//! Deadlines, and those who are called when they come.

use std::cell::RefCell;
use std::collections::HashSet;
use std::panic::panic_any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use portcullis::heap::Shared;
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;

use super::{HOURS, Listener, PATIENCE, PanicsWhenDropped, cpu_of, is_gone, next, on_timer, wake_now};

/// A listener that tells of each call and stays in it until it is let go on.
struct Blocking {
    handle: Shared<Listener>,
    entered: Receiver<()>,
    go_on: Sender<()>,
}

impl Blocking {
    fn new(platform: &StdPlatform) -> Self {
        let ((enter, entered), (go_on, may_go_on)) = (channel(), channel());
        let (enter, may_go_on) = (Mutex::new(enter), Mutex::new(may_go_on));
        let handle = on_timer(platform, move || {
            enter.lock().unwrap().send(()).unwrap();
            // Also when the test is over.
            let _ = may_go_on.lock().unwrap().recv_timeout(PATIENCE);
        });
        Self { handle, entered, go_on }
    }
}

/// A listener that tells of each call when it was.
fn telling(platform: &StdPlatform) -> (Shared<Listener>, Receiver<u64>) {
    let (called, calls) = channel();
    let (called, clock) = (Mutex::new(called), platform.clone());
    let tell = move || called.lock().unwrap().send(clock.now_ns()).unwrap();
    (on_timer(platform, tell), calls)
}

#[test]
fn a_later_deadline_does_not_take_the_place_of_an_earlier_one() {
    let platform = StdPlatform::new();
    let (_listener, calls) = telling(&platform);
    let deadline = platform.now_ns() + 20_000_000;
    platform.wake_at(deadline);
    platform.wake_at(deadline + HOURS);
    assert!(next(&calls) >= deadline, "too early");
    assert!(calls.try_recv().is_err(), "called once more");
}

#[test]
fn an_earlier_one_takes_the_place_of_a_later_one() {
    let platform = StdPlatform::new();
    let (_listener, calls) = telling(&platform);
    platform.wake_at(platform.now_ns() + HOURS);
    wake_now(&platform);
    next(&calls);
    // The keeper of time has begun to wait for a later one, and may be asked again.
    platform.wake_at(platform.now_ns() + HOURS);
    wake_now(&platform);
    next(&calls);
}

#[test]
fn everybody_is_called_and_those_who_are_gone_are_not() {
    let platform = StdPlatform::new();
    let listeners: Vec<_> = (0..5).map(|_| telling(&platform)).collect();
    let (gone, gone_calls) = telling(&platform);
    drop(gone);
    wake_now(&platform);
    listeners.iter().for_each(|(_, calls)| assert!(next(calls) > 0));
    assert!(gone_calls.try_recv().is_err());
}

#[test]
fn whoever_blocks_delays_nobody_else() {
    let platform = StdPlatform::new();
    let first: Vec<_> = (0..4).map(|_| Blocking::new(&platform)).collect();
    let (_between, between) = telling(&platform);
    let more: Vec<_> = (0..4).map(|_| Blocking::new(&platform)).collect();
    let (_last, last) = telling(&platform);
    for _ in 0..3 {
        wake_now(&platform);
        next(&between);
        next(&last);
    }
    // All of them are in a call, each in one.
    let blocking = || first.iter().chain(&more);
    blocking().for_each(|blocking| next(&blocking.entered));
    wake_now(&platform);
    next(&between);
    next(&last);
    assert!(blocking().all(|blocking| blocking.entered.try_recv().is_err()), "two calls at once");
    // What has come meanwhile is not forgotten, and is one call.
    for blocking in blocking() {
        blocking.go_on.send(()).unwrap();
        next(&blocking.entered);
        blocking.go_on.send(()).unwrap();
    }
    wake_now(&platform);
    blocking().for_each(|blocking| next(&blocking.entered));
    blocking().for_each(|blocking| blocking.go_on.send(()).unwrap());
}

#[test]
fn nor_when_workers_have_slept_and_been_woken_before() {
    let platform = StdPlatform::new();
    let (_first, first) = telling(&platform);
    let mut blocking = Vec::new();
    for _ in 0..4 {
        // Workers go to sleep in between, as far as one can tell; those that block are as many more.
        for _ in 0..5 {
            wake_now(&platform);
            next(&first);
            thread::sleep(Duration::from_millis(1));
        }
        blocking.push(Blocking::new(&platform));
        blocking.push(Blocking::new(&platform));
        let (last, calls) = telling(&platform);
        wake_now(&platform);
        next(&calls);
        drop(last);
        next(&first);
    }
    for Blocking { entered, go_on, .. } in &blocking {
        next(entered);
        go_on.send(()).unwrap();
    }
}

#[test]
fn a_deadline_that_comes_during_a_call_is_followed_by_another_call() {
    let platform = StdPlatform::new();
    let blocking = Blocking::new(&platform);
    let (_other, calls) = telling(&platform);
    wake_now(&platform);
    next(&blocking.entered);
    next(&calls);
    wake_now(&platform);
    // Whoever is told of it has been told after the deadline became due for all.
    next(&calls);
    blocking.go_on.send(()).unwrap();
    next(&blocking.entered);
    blocking.go_on.send(()).unwrap();
    assert!(blocking.entered.recv_timeout(Duration::from_millis(50)).is_err(), "and only one");
}

#[test]
fn panics_end_nothing_but_their_call() {
    let platform = StdPlatform::new();
    let panicking = on_timer(&platform, || panic!("as the test wants"));
    // What it panics with panics again.
    let worse = on_timer(&platform, || panic_any(PanicsWhenDropped));
    // And what that panics with, too.
    let (called, worst_calls) = channel();
    let called = Mutex::new(called);
    let worst = on_timer(&platform, move || {
        called.lock().unwrap_or_else(PoisonError::into_inner).send(()).unwrap();
        panic_any(PanicsTwice);
    });
    let (_last, calls) = telling(&platform);
    for _ in 0..3 {
        wake_now(&platform);
        next(&calls);
        next(&worst_calls);
    }
    drop((panicking, worse, worst));
}

#[test]
fn nor_do_those_of_the_drop_of_the_last_handle() {
    let platform = StdPlatform::new();
    for panics_in_call in [false, true] {
        let ((enter, entered), (go_on, may_go_on)) = (channel(), channel::<()>());
        let (enter, may_go_on, dropped) = (Mutex::new(enter), Mutex::new(may_go_on), PanicsWhenDropped);
        let handle = on_timer(&platform, move || {
            let _hold = &dropped;
            enter.lock().unwrap().send(()).unwrap();
            let _ = may_go_on.lock().unwrap().recv_timeout(PATIENCE);
            assert!(!panics_in_call, "as the test wants");
        });
        let weak = Shared::downgrade(&handle);
        wake_now(&platform);
        next(&entered);
        drop(handle);
        assert!(!is_gone(&weak), "the call holds it");
        go_on.send(()).unwrap();
        let (_last, calls) = telling(&platform);
        for _ in 0..3 {
            wake_now(&platform);
            next(&calls);
        }
        while !is_gone(&weak) {
            thread::yield_now();
        }
    }
}

/// Panics when it is dropped, with something that panics when it is dropped.
struct PanicsTwice;

impl Drop for PanicsTwice {
    fn drop(&mut self) {
        panic_any(PanicsWhenDropped);
    }
}

/// Threads that have called so far.
#[derive(Default)]
struct Callers(Mutex<HashSet<thread::ThreadId>>);

impl Callers {
    fn note(&self) {
        self.0.lock().unwrap().insert(thread::current().id());
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

#[test]
fn there_are_as_many_workers_as_listeners_were_in_a_call_at_once_and_one_more() {
    const LISTENERS: usize = 3;
    let (platform, callers) = (StdPlatform::new(), Arc::new(Callers::default()));
    let (called, calls) = channel();
    let called = Mutex::new(called);
    let tell = Arc::new(move || called.lock().unwrap().send(()).unwrap());
    let listener = |_| {
        let (callers, tell) = (Arc::clone(&callers), Arc::clone(&tell));
        on_timer(&platform, move || {
            callers.note();
            tell();
        })
    };
    let listeners: Vec<_> = (0..LISTENERS).map(listener).collect();
    for _ in 0..200 {
        wake_now(&platform);
        listeners.iter().for_each(|_| next(&calls));
    }
    assert!(callers.count() <= LISTENERS + 1, "{} threads", callers.count());
}

#[test]
fn one_listener_is_called_by_one_thread() {
    let (platform, callers) = (StdPlatform::new(), Arc::new(Callers::default()));
    let note = Arc::clone(&callers);
    let (called, calls) = channel();
    let called = Mutex::new(called);
    let _listener = on_timer(&platform, move || {
        note.note();
        called.lock().unwrap().send(()).unwrap();
    });
    for _ in 0..200 {
        wake_now(&platform);
        next(&calls);
    }
    assert_eq!(callers.count(), 1);
}

#[test]
fn timers_take_no_cpus() {
    let platform = StdPlatform::with_cpus(1);
    let (called, calls) = channel();
    let (called, clone) = (Mutex::new(called), platform.clone());
    let _listener = on_timer(&platform, move || {
        let fast = clone.with_cpu_fast(|_| ()).is_some();
        called.lock().unwrap().send((cpu_of(&clone), fast)).unwrap();
    });
    wake_now(&platform);
    assert_eq!(next(&calls), (None, false));
    assert_eq!(cpu_of(&platform), Some(0));
}

thread_local! {
    static AT_EXIT: RefCell<Option<Exit>> = const { RefCell::new(None) };
}

/// Tells when its thread ends.
struct Exit(Sender<()>);

impl Drop for Exit {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn workers_end_with_the_platform() {
    let platform = StdPlatform::new();
    let (exit, exits) = channel();
    let (called, calls) = channel();
    let (exit, called) = (Mutex::new(exit), Mutex::new(called));
    let blocking = Blocking::new(&platform);
    let _listener = on_timer(&platform, move || {
        AT_EXIT.with(|at_exit| *at_exit.borrow_mut() = Some(Exit(exit.lock().unwrap().clone())));
        called.lock().unwrap().send(()).unwrap();
    });
    wake_now(&platform);
    next(&calls);
    next(&blocking.entered);
    // It should sleep by now, and must be woken; if it does not, it ends all the same.
    thread::sleep(Duration::from_millis(20));
    assert!(exits.try_recv().is_err());
    drop(platform);
    next(&exits);
    // One that is in a call ends after it.
    blocking.go_on.send(()).unwrap();
    drop(blocking.handle);
    while blocking.entered.recv_timeout(PATIENCE).is_ok() {}
}

#[test]
fn all_workers_that_sleep_end_with_the_platform() {
    const WORKERS: usize = 4;
    let platform = StdPlatform::new();
    let (exit, exits) = channel();
    let (called, calls) = channel();
    let all = Arc::new(Barrier::new(WORKERS));
    let listener = |_| {
        let (exit, called, all) = (Mutex::new(exit.clone()), Mutex::new(called.clone()), Arc::clone(&all));
        on_timer(&platform, move || {
            AT_EXIT.with(|at_exit| *at_exit.borrow_mut() = Some(Exit(exit.lock().unwrap().clone())));
            // Each is in a call of its own at once.
            all.wait();
            called.lock().unwrap().send(()).unwrap();
        })
    };
    let _listeners: Vec<_> = (0..WORKERS).map(listener).collect();
    wake_now(&platform);
    (0..WORKERS).for_each(|_| next(&calls));
    // They should sleep by now, and must all be woken; those that do not end all the same.
    thread::sleep(Duration::from_millis(20));
    assert!(exits.try_recv().is_err());
    drop(platform);
    (0..WORKERS).for_each(|_| next(&exits));
}

#[cfg(target_os = "linux")]
#[test]
fn the_keeper_of_time_ends_with_the_platform() {
    const PLATFORMS: usize = 100;
    let keepers = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("portcullis-time")).count()
    };
    let make = |_| {
        let platform = StdPlatform::new();
        platform.wake_at(platform.now_ns() + HOURS);
        platform
    };
    let platforms: Vec<_> = (0..PLATFORMS).map(make).collect();
    // They should all wait by now, and must be woken; one that does not ends all the same.
    thread::sleep(Duration::from_millis(20));
    drop(platforms);
    let start = std::time::Instant::now();
    // Other tests have theirs.
    while keepers() > PLATFORMS / 2 {
        assert!(start.elapsed() < PATIENCE, "{} threads wait for nothing", keepers());
        thread::yield_now();
    }
}

#[test]
fn a_listener_may_ask_for_the_next_call_and_listen_for_others() {
    let platform = StdPlatform::new();
    let (called, calls) = channel();
    let (called, clone, count) = (Mutex::new(called), platform.clone(), AtomicUsize::new(0));
    let others = Mutex::new(Vec::new());
    let _listener = on_timer(&platform, move || {
        let called = called.lock().unwrap();
        if count.fetch_add(1, Ordering::Relaxed) < 3 {
            let (tell, own) = (Mutex::new(called.clone()), clone.clone());
            let other = on_timer(&own, move || tell.lock().unwrap().send("other").unwrap());
            others.lock().unwrap().push(other);
            wake_now(&clone);
        }
        called.send("own").unwrap();
    });
    wake_now(&platform);
    let mut heard = Vec::new();
    // Four calls of its own, and at each but the first those of the others that were there.
    while heard.iter().filter(|what| **what == "own").count() < 4 || !heard.contains(&"other") {
        heard.push(next(&calls));
    }
}
