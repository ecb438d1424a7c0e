//! A machine that one thread plays: whichever CPU the test says, at whatever time.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

type AfterTurn = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
pub struct Clocked {
    number: PlatformNumber,
    cpus: usize,
    cpu: AtomicUsize,
    now_ns: AtomicU64,
    deadline: Mutex<Option<u64>>,
    /// Timers come so much too late; at the end of time, never.
    late_ns: AtomicU64,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
    after: Mutex<Option<AfterTurn>>,
    is_broken: AtomicBool,
}

thread_local! {
    static WATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Dropped, the next turn is watched again, also where what is called after one panics.
struct Watching;

impl Drop for Watching {
    fn drop(&mut self) {
        WATCHING.set(false);
    }
}

impl Clocked {
    pub fn new(cpus: usize) -> Arc<Self> {
        Arc::new(Self { cpus, ..Self::default() })
    }

    /// The CPU past the last is lent to no caller.
    pub fn be(&self, cpu: usize) {
        self.cpu.store(cpu, Ordering::Relaxed);
    }

    /// `after` is called when a CPU that was lent comes back, but for those that `after` itself takes.
    pub fn after_each_turn(&self, after: impl Fn() + Send + Sync + 'static) {
        *self.after.lock().unwrap() = Some(Arc::new(after));
    }

    /// No timer that is asked for from now on comes.
    pub fn lose_timers(&self) {
        self.delay_timers(u64::MAX);
    }

    /// Each that is asked for from now on comes `ns` too late.
    pub fn delay_timers(&self, ns: u64) {
        self.late_ns.store(ns, Ordering::Relaxed);
    }

    /// Whoever reads the clock panics, or not any more.
    pub fn break_clock(&self, is_broken: bool) {
        self.is_broken.store(is_broken, Ordering::Relaxed);
    }

    /// It takes `ns` until the next step; no timer runs meanwhile.
    pub fn take(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Goes to `time_ns`. Timers that end before are run first, each at its own time.
    pub fn go_to(&self, time_ns: u64) {
        while let Some(due) = self.due_by(time_ns) {
            self.now_ns.fetch_max(due, Ordering::Relaxed);
            let listeners: Vec<_> = self.listeners.lock().unwrap().iter().filter_map(Weak::upgrade).collect();
            listeners.iter().for_each(|listener| listener.timer());
        }
        self.now_ns.fetch_max(time_ns, Ordering::Relaxed);
    }

    /// Compiled once, and not for each work that a CPU is lent for.
    #[inline(never)]
    fn end_turn(&self) {
        let after = self.after.lock().unwrap().clone();
        if let Some(after) = after.filter(|_| !WATCHING.replace(true)) {
            let _watching = Watching;
            after();
        }
    }

    fn due_by(&self, time_ns: u64) -> Option<u64> {
        self.deadline.lock().unwrap().take_if(|due| *due <= time_ns)
    }
}

// SAFETY: one thread plays all CPUs, so no two callers have a CPU at once; it sees its own stores without a fence.
unsafe impl Platform for Clocked {
    fn cpus(&self) -> usize {
        self.cpus
    }

    fn number(&self) -> PlatformNumber {
        self.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let cpu = self.cpu.load(Ordering::Relaxed);
        // SAFETY: one thread plays all CPUs.
        let result = f((cpu < self.cpus).then(|| unsafe { LocalCpu::new(cpu) }).as_ref());
        self.end_turn();
        result
    }

    fn now_ns(&self) -> u64 {
        assert!(!self.is_broken.load(Ordering::Relaxed), "a clock that panics, as the test wants");
        self.now_ns.load(Ordering::Relaxed)
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.listeners.lock().unwrap().push(events);
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        let deadline_ns = deadline_ns.saturating_add(self.late_ns.load(Ordering::Relaxed));
        let mut deadline = self.deadline.lock().unwrap();
        *deadline = Some(deadline.map_or(deadline_ns, |earlier| earlier.min(deadline_ns)));
    }
}
