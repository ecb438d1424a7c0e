//! Which call into what lies below goes wrong, and how.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A call into what lies below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    Alloc,
    AllocWithin,
    Free,
    Table,
    Clean,
    CacheClean,
    CacheInvalidate,
    Copy,
    Zero,
    Map,
    MapAtHand,
    Unmap,
    UnmapAtHand,
    Sync,
    Reclaim,
    Submit,
    WithCpu,
    NowNs,
    FenceAll,
    WakeAt,
    Register,
    Cpus,
    /// A clock that the test hands in.
    Clock,
}

/// How a call goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// It panics before it has done anything.
    Panic,
    /// It does what it is to do, and then panics.
    PanicAfter,
    /// It fails: no memory, no answer, no CPU.
    Fail,
    /// It refuses: an error of the other kind; of a map, after a half was entered and removed again.
    Refuse,
    /// It fails, and so does every later one of its kind.
    FailOn,
}

impl Call {
    /// Whether it is into `Platform`.
    pub fn is_of_platform(self) -> bool {
        matches!(
            self,
            Self::WithCpu | Self::NowNs | Self::FenceAll | Self::WakeAt | Self::Register | Self::Cpus
        )
    }

    /// How it can go wrong.
    pub fn modes(self) -> &'static [Mode] {
        use Mode::{Fail, FailOn, Panic, PanicAfter, Refuse};
        match self {
            Self::Alloc | Self::AllocWithin | Self::WithCpu => &[Panic, PanicAfter, Fail, FailOn],
            Self::Map | Self::Sync | Self::Submit => &[Panic, PanicAfter, Fail, Refuse, FailOn],
            Self::MapAtHand | Self::UnmapAtHand | Self::Reclaim => &[Panic, PanicAfter, Fail],
            // One that panics does so before or after it counts, which is the same to whoever called.
            Self::Table | Self::NowNs | Self::Clock | Self::FenceAll | Self::Register | Self::Cpus => {
                &[Panic]
            }
            Self::Free | Self::Clean | Self::CacheClean | Self::CacheInvalidate | Self::Copy | Self::Zero => {
                &[Panic, PanicAfter]
            }
            Self::Unmap | Self::WakeAt => &[Panic, PanicAfter],
        }
    }
}

/// What a call is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    GoOn,
    Fail,
    Refuse,
}

/// What a panic of the harness carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned;

/// More calls than any scenario makes that comes to an end.
const ENDLESS: u64 = 1_000_000;

/// The number of calls so far, and which goes wrong.
#[derive(Debug, Default)]
pub struct Faults {
    plan: Mutex<Plan>,
    /// Steps of all runs: whoever watches sees that something goes on.
    pub steps: AtomicU64,
}

#[derive(Debug, Default)]
struct Plan {
    is_armed: bool,
    calls: Vec<Call>,
    at: Option<(usize, Mode)>,
    has_happened: bool,
}

impl Faults {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on calls are counted, and the one with number `at` goes wrong.
    pub fn arm(&self, at: Option<(usize, Mode)>) {
        *self.plan() = Plan { is_armed: true, at, ..Plan::default() };
    }

    /// From now on everything works. The calls since it was armed, and whether one went wrong.
    pub fn disarm(&self) -> (Vec<Call>, bool) {
        let plan = std::mem::take(&mut *self.plan());
        (plan.calls, plan.has_happened)
    }

    pub fn has_happened(&self) -> bool {
        self.plan().has_happened
    }

    /// Counts a call. What it is to do, and whether it panics when that is done.
    pub fn enter(&self, call: Call) -> (Verdict, Late) {
        if self.steps.fetch_add(1, Ordering::Relaxed) >= ENDLESS && !std::thread::panicking() {
            // What is dropped next has its own.
            self.steps.store(0, Ordering::Relaxed);
            panic!("endless");
        }
        let mut plan = self.plan();
        if !plan.is_armed {
            return (Verdict::GoOn, Late(false));
        }
        let number = plan.calls.len();
        plan.calls.push(call);
        let Some((at, mode)) = plan.at else { return (Verdict::GoOn, Late(false)) };
        let goes_on = mode == Mode::FailOn && number > at && plan.calls[at] == call;
        if number != at && !goes_on {
            return (Verdict::GoOn, Late(false));
        }
        plan.has_happened = true;
        drop(plan);
        match mode {
            Mode::Panic => std::panic::resume_unwind(Box::new(Planned)),
            Mode::PanicAfter => (Verdict::GoOn, Late(true)),
            Mode::Fail | Mode::FailOn => (Verdict::Fail, Late(false)),
            Mode::Refuse => (Verdict::Refuse, Late(false)),
        }
    }
}

/// What comes when a call is done.
#[must_use]
pub struct Late(bool);

impl Late {
    pub fn come(self) {
        if self.0 {
            std::panic::resume_unwind(Box::new(Planned));
        }
    }
}
