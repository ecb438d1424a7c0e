//! The one machine of the process, and whose turn it is.
//!
//! The machine belongs to the thread that has the turn. It passes the turn on by a flag of the other thread, stored with
//! `Release` after all that it did, and found with `Acquire`: so each thread sees the machine, and all memory of the program,
//! as the one before has left them.

use std::cell::{Cell, UnsafeCell};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};

use crate::cpus::{Cpus, Turn};
use crate::interface::{Figures, Machine};
use crate::lines::MOST_CPUS;

struct Shared(UnsafeCell<Option<Cpus>>);

// SAFETY: only the thread that has the turn uses it (`with`), or the one thread that there is before any CPU has arrived.
unsafe impl Sync for Shared {}

static MACHINE: Shared = Shared(UnsafeCell::new(None));

/// A CPU's thread, and whether its turn has come.
struct Place {
    turn: AtomicBool,
    thread: OnceLock<Thread>,
}

static PLACES: [Place; MOST_CPUS] =
    [const { Place { turn: AtomicBool::new(false), thread: OnceLock::new() } }; MOST_CPUS];

/// How many CPUs the program sees; 0 before there is a machine.
pub static CPUS: AtomicUsize = AtomicUsize::new(0);

/// All CPUs are gone.
static OVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Which CPU this thread is; `usize::MAX` for none.
    static ME: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The CPU that this thread is.
#[inline]
pub fn me() -> Option<usize> {
    let me = ME.get();
    (me != usize::MAX).then_some(me)
}

/// Lets `f` use the machine.
///
/// # Safety
/// The caller is a CPU whose turn it is, or no CPU has arrived, or all are gone. `f` does not come back here.
#[inline]
unsafe fn with<R>(f: impl FnOnce(&mut Cpus) -> R) -> Option<R> {
    // SAFETY: nobody else uses it, by the caller's promise.
    unsafe { (*MACHINE.0.get()).as_mut() }.map(f)
}

/// Lets `f` use the machine as the CPU that this thread is; `None` where it is none.
#[inline]
pub fn run<R>(f: impl FnOnce(&mut Cpus, usize) -> R) -> Option<R> {
    let me = me()?;
    // SAFETY: a thread that is a CPU runs only while it has the turn: `arrive` and `give_up` return then.
    unsafe { with(|cpus| f(cpus, me)) }
}

/// As [`run`], and lets the CPU go first that `f` names.
#[inline]
pub fn step(f: impl FnOnce(&mut Cpus, usize) -> Turn) {
    if let Some(Some(next)) = run(f) {
        give_up(next);
    }
}

/// Makes the machine. No CPU has arrived.
pub fn start(machine: Machine) {
    assert!(PLACES[0].thread.get().is_none(), "one process simulates one machine, once");
    // SAFETY: no CPU has arrived.
    unsafe { *MACHINE.0.get() = Some(Cpus::new(machine)) };
    CPUS.store(machine.cpus as usize, Ordering::Release);
}

/// After all CPUs have gone: what the machine says.
pub fn finished<R>(f: impl FnOnce(&mut Cpus) -> R) -> Option<R> {
    // SAFETY: all CPUs are gone.
    OVER.load(Ordering::Acquire).then(|| unsafe { with(f) }).flatten()
}

fn pass_to(next: usize) {
    PLACES[next].turn.store(true, Ordering::Release);
    if let Some(thread) = PLACES[next].thread.get() {
        thread.unpark();
    }
}

fn await_turn(me: usize) {
    while !PLACES[me].turn.swap(false, Ordering::Acquire) {
        thread::park();
    }
}

/// Lets `next` run, and returns when it is this CPU's turn again.
#[cold]
#[inline(never)]
pub fn give_up(next: usize) {
    if let Some(me) = me() {
        pass_to(next);
        await_turn(me);
    }
}

/// How many CPUs have arrived, for the thread that sends them one after the other.
pub static ARRIVED: AtomicUsize = AtomicUsize::new(0);

/// This thread is CPU `me` from now on, when all have arrived and its turn has come. The others arrived one by one.
pub fn arrive(me: usize) {
    assert!(PLACES[me].thread.set(thread::current()).is_ok(), "CPU {me} is there already");
    // SAFETY: CPUs arrive one after the other, and none has a turn before all have.
    let all = unsafe { with(|cpus| cpus.arrive(me).then(|| cpus.next())) };
    ARRIVED.fetch_add(1, Ordering::Release);
    if let Some(Some(Some(first))) = all {
        pass_to(first);
    }
    await_turn(me);
    ME.set(me);
}

/// This thread is no CPU any more. Returns when all are gone: what threads do then is no part of the simulation.
pub fn leave() {
    let gone = run(|cpus, me| (cpus.leave(me), cpus.left == cpus.count()));
    ME.set(usize::MAX);
    match gone {
        Some((Some(next), _)) => pass_to(next),
        Some((None, true)) => {
            OVER.store(true, Ordering::Release);
            PLACES.iter().filter_map(|place| place.thread.get()).for_each(Thread::unpark);
        }
        Some((None, false)) => stuck(),
        None => return,
    }
    while !OVER.load(Ordering::Acquire) {
        thread::park();
    }
}

/// All CPUs that are left sleep, and none would ever be woken.
pub fn stuck() -> ! {
    eprintln!("coherence: all CPUs sleep");
    std::process::abort();
}

/// The figures of this CPU since it began.
pub fn end() -> Figures {
    run(|cpus, me| cpus.end(me)).unwrap_or_default()
}
