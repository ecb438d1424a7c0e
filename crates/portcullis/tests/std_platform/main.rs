//! Threads as CPUs: who has which CPU, who is called when a deadline comes, who shares a wait, and what each policy promises
//! there, whatever others do meanwhile.
//!
//! Time-outs only bound a failure.

#[path = "../common/mod.rs"]
mod common;
mod cpus;
mod moody;
#[path = "../played/mod.rs"]
mod played;
mod protection;
#[path = "../queued/mod.rs"]
mod queued;
#[path = "../rig/mod.rs"]
mod rig;
mod shared_queue;
mod timers;
mod windows;

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use portcullis::heap::{Shared, Weak};
use portcullis::platform::{Platform, PlatformEvents, events_of};
use portcullis::std_platform::StdPlatform;

const PATIENCE: Duration = Duration::from_secs(60);
/// A deadline that no test lives to see, in nanoseconds.
const HOURS: u64 = 1 << 44;

/// What a listener hears of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Timer,
    Released(usize),
}

/// Calls the test.
struct Listener(Box<dyn Fn(Event) + Send + Sync>);

impl PlatformEvents for Listener {
    fn timer(&self) {
        (self.0)(Event::Timer);
    }

    fn cpu_released(&self, index: usize) {
        (self.0)(Event::Released(index));
    }
}

/// Has `hear` called until the handle is dropped.
fn listen(platform: &StdPlatform, hear: impl Fn(Event) + Send + Sync + 'static) -> Shared<Listener> {
    let listener = Shared::new(Listener(Box::new(hear))).unwrap();
    platform.register(events_of(&listener)).unwrap();
    listener
}

/// Has `hear` called for timers only.
fn on_timer(platform: &StdPlatform, hear: impl Fn() + Send + Sync + 'static) -> Shared<Listener> {
    listen(platform, move |event| {
        if event == Event::Timer {
            hear();
        }
    })
}

fn wake_now(platform: &StdPlatform) {
    platform.wake_at(platform.now_ns());
}

#[track_caller]
fn next<T>(receiver: &Receiver<T>) -> T {
    match receiver.recv_timeout(PATIENCE) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("nothing came"),
        Err(RecvTimeoutError::Disconnected) => panic!("nothing will come"),
    }
}

/// Panics when it is dropped.
struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("a drop that panics, as the test wants");
    }
}

fn cpu_of(platform: &StdPlatform) -> Option<usize> {
    platform.with_cpu(|cpu| cpu.map(|cpu| cpu.index()))
}

fn is_gone(events: &Weak<Listener>) -> bool {
    events.owners() == 0
}
