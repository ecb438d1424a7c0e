//! What the program calls, by name: it finds these functions when it runs, and so links without them, too.
//!
//! All of them but [`coherence_start`], [`coherence_arrive`], [`coherence_arrived`] and [`coherence_sites`] are for threads
//! that are CPUs, and do nothing in others. Times are nanoseconds.

use std::sync::atomic::Ordering;

use crate::cpus::Cpus;
use crate::interface::{Figures, Machine, Site};
use crate::lines::LINE_BITS;
use crate::turns::{self, run, step};

const PS: u64 = 1000;

/// Makes the machine. Once, before any thread arrives.
#[unsafe(no_mangle)]
extern "C" fn coherence_start(machine: &Machine) {
    crate::system::stay_on(machine.core);
    turns::start(*machine);
}

/// The calling thread is `cpu` from now on: one after the other, as [`coherence_arrived`] says. Returns when all are there
/// and it is its turn.
#[unsafe(no_mangle)]
extern "C" fn coherence_arrive(cpu: u32) {
    turns::arrive(cpu as usize);
}

/// How many threads have arrived.
#[unsafe(no_mangle)]
extern "C" fn coherence_arrived() -> u32 {
    turns::ARRIVED.load(Ordering::Acquire) as u32
}

/// The calling thread is no CPU any more. Returns when none is.
#[unsafe(no_mangle)]
extern "C" fn coherence_leave() {
    turns::leave();
}

/// What the calling CPU does from now on counts.
#[unsafe(no_mangle)]
extern "C" fn coherence_begin() {
    run(Cpus::begin);
}

/// What it did since then, and how many CPUs have come so far.
#[unsafe(no_mangle)]
extern "C" fn coherence_end(figures: &mut Figures) {
    *figures = turns::end();
}

/// How many CPUs have come so far.
#[unsafe(no_mangle)]
extern "C" fn coherence_ended() -> u32 {
    run(|cpus, _| cpus.ended as u32).unwrap_or_default()
}

/// The calling CPU's clock. For others: 0 at first, and when all CPUs have gone, the latest of theirs.
#[unsafe(no_mangle)]
extern "C" fn coherence_now() -> u64 {
    let latest = |cpus: &mut Cpus| (0..cpus.count()).map(|cpu| cpus.clock(cpu)).max().unwrap_or_default();
    run(|cpus, me| cpus.clock(me)).or_else(|| turns::finished(latest)).unwrap_or_default() / PS
}

/// Time passes.
#[unsafe(no_mangle)]
extern "C" fn coherence_wait(ns: u64) {
    step(|cpus, me| cpus.pass(me, ns * PS));
}

/// A turn of a loop that waits: the code's `spin_loop`, which the compiler's pass does not see.
#[unsafe(no_mangle)]
extern "C" fn coherence_spin() {
    run(Cpus::spin);
}

/// Waits for `server`, which works `ns` nanoseconds on this, and does one after the other.
#[unsafe(no_mangle)]
extern "C" fn coherence_serve(server: u32, ns: u64) {
    while let Some(Err(next)) = run(|cpus, me| cpus.serve(me, server, ns * PS)) {
        turns::give_up(next);
    }
}

/// Waits until another CPU writes the line of `address`, which the caller has just read: a loop that looks at nothing else, without
/// its turns.
#[unsafe(no_mangle)]
extern "C" fn coherence_watch(address: u64) {
    match run(|cpus, me| cpus.watch(me, address >> LINE_BITS)) {
        Some(Some(next)) if Some(next) != turns::me() => turns::give_up(next),
        Some(None) => turns::stuck(),
        _ => {}
    }
}

/// A barrier on all CPUs.
#[unsafe(no_mangle)]
extern "C" fn coherence_interrupt() {
    run(Cpus::interrupt);
}

/// What the calling CPU does is not seen, or is again.
#[unsafe(no_mangle)]
extern "C" fn coherence_hide(hidden: bool) {
    run(|cpus, me| cpus.hide(me, hidden));
}

/// The timer is wanted at `ns`.
#[unsafe(no_mangle)]
extern "C" fn coherence_wake_at(ns: u64) {
    run(|cpus, _| cpus.wake_at(ns.saturating_mul(PS)));
}

/// Whether the timer is due: the caller is the one to tell.
#[unsafe(no_mangle)]
extern "C" fn coherence_timer_is_due() -> bool {
    run(Cpus::timer_is_due).unwrap_or_default()
}

/// After all CPUs have gone: fills `sites` with the instructions that transferred the most lines; how many those are.
///
/// # Safety
/// `sites` has room for `count`.
#[unsafe(no_mangle)]
unsafe extern "C" fn coherence_sites(sites: *mut Site, count: usize) -> usize {
    let worst = turns::finished(|cpus| cpus.sites()).unwrap_or_default();
    for (index, site) in worst.iter().take(count).enumerate() {
        // SAFETY: there is room, by the caller's promise.
        unsafe { sites.add(index).write(*site) };
    }
    worst.len().min(count)
}
