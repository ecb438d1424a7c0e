//! What the program asks the system for. The linker is told to have it call these instead (`--wrap`).
//!
//! A lock that is taken sleeps as it does in the standard library, in `futex`, and costs what that costs.

use std::cell::Cell;
use std::ffi::{c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::cpus::{Cpus, NEVER};
use crate::heap;
use crate::lines::MOST_CPUS;
use crate::turns::{self, me, run, step};

/// When the machine was started, for its clocks: not 0, as programs subtract.
const START_PS: u64 = 1_000_000_000_000_000;

const PS_PER_SECOND: u64 = 1_000_000_000_000;

fn set_errno(value: c_int) {
    // SAFETY: it is this thread's own.
    unsafe { *libc::__errno_location() = value };
}

/// Has the process run on the core that is number `index` of those that it may use.
pub fn stay_on(index: u32) {
    // SAFETY: a set of CPUs is plain bits; both calls are given its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        if index == u32::MAX || libc::sched_getaffinity(0, size, &mut set) != 0 {
            return;
        }
        let cores = (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &set));
        if let Some(core) = cores.clone().nth(index as usize % cores.count().max(1)) {
            libc::CPU_ZERO(&mut set);
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size, &set);
        }
    }
}

/// A deadline as `futex` has it, on the machine's clock.
///
/// # Safety
/// `time` is null or valid.
unsafe fn deadline(time: *const libc::timespec, absolute: bool) -> u64 {
    // SAFETY: by the caller's promise.
    let Some(time) = (unsafe { time.as_ref() }) else { return NEVER };
    let ps = (time.tv_sec as u64).saturating_mul(PS_PER_SECOND).saturating_add(time.tv_nsec as u64 * 1000);
    let now = run(|cpus, me| cpus.clock(me)).unwrap_or_default();
    // What is over is over now.
    if absolute { ps.saturating_sub(START_PS).max(now) } else { now.saturating_add(ps) }
}

/// # Safety
/// As of `syscall`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    // SAFETY: the caller's promise is passed on unchanged.
    let real = || unsafe { libc::syscall(number, a, b, c, d, e, f) };
    let (address, operation) = (a as usize, b as c_int & 127);
    if number != libc::SYS_futex || me().is_none() {
        return real();
    }
    match operation {
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => {
            // SAFETY: the word that a futex is, by the caller's promise.
            let word = unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(address)) };
            if word.load(Ordering::SeqCst) != c as u32 {
                set_errno(libc::EAGAIN);
                return -1;
            }
            let time = ptr::with_exposed_provenance(d as usize);
            // SAFETY: a time or null, by the caller's promise.
            let until = unsafe { deadline(time, operation == libc::FUTEX_WAIT_BITSET) };
            let next = run(|cpus, me| cpus.sleep(me, address, until)).flatten();
            match next {
                Some(next) if Some(next) != me() => turns::give_up(next),
                Some(_) => {}
                None => turns::stuck(),
            }
            if run(|cpus, me| cpus.clock(me)).unwrap_or_default() == until {
                set_errno(libc::ETIMEDOUT);
                return -1;
            }
            0
        }
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
            let woken = run(|cpus, me| cpus.wake(me, address, c as usize)).unwrap_or_default();
            // A thread that is no CPU may sleep there.
            if woken == 0 { real() } else { woken as c_long }
        }
        _ => real(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_sched_yield() -> c_int {
    if me().is_none() {
        // SAFETY: it takes nothing.
        return unsafe { libc::sched_yield() };
    }
    step(Cpus::reschedule);
    0
}

/// # Safety
/// As of `clock_gettime`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    let now = run(|cpus, me| {
        let turn = cpus.pass(me, cpus.machine.clock);
        (turn, cpus.clock(me) + START_PS)
    });
    let Some((turn, now)) = now else {
        // SAFETY: the caller's promise is passed on unchanged.
        return unsafe { libc::clock_gettime(clock, time) };
    };
    if let Some(next) = turn {
        turns::give_up(next);
    }
    let (tv_sec, tv_nsec) = ((now / PS_PER_SECOND) as i64, (now % PS_PER_SECOND / 1000) as i64);
    // SAFETY: room for a time, by the caller's promise.
    unsafe { time.write(libc::timespec { tv_sec, tv_nsec }) };
    0
}

/// The program sees as many CPUs as there are simulated.
///
/// # Safety
/// As of `sched_getaffinity`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_sched_getaffinity(
    process: libc::pid_t,
    size: usize,
    set: *mut libc::cpu_set_t,
) -> c_int {
    match turns::CPUS.load(Ordering::Acquire) {
        // SAFETY: the caller's promise is passed on unchanged.
        0 => unsafe { libc::sched_getaffinity(process, size, set) },
        cpus => {
            let bytes = set.cast::<u8>();
            for index in 0..size {
                let bits = (cpus.saturating_sub(8 * index)).min(8);
                // SAFETY: `size` bytes, by the caller's promise.
                unsafe { bytes.add(index).write(((1_u32 << bits) - 1) as u8) };
            }
            0
        }
    }
}

thread_local! {
    /// Whose memory a thread takes that is no CPU: its own, so that it does not matter what others do at the same time.
    static OWNER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Owners that are no CPUs.
static OWNERS: AtomicUsize = AtomicUsize::new(MOST_CPUS);

/// Whose memory it is.
fn owner() -> usize {
    let cpu = run(|cpus, me| {
        cpus.spend(me, cpus.machine.heap);
        me
    });
    cpu.unwrap_or_else(|| {
        // Relaxed: only the number counts.
        let owner = OWNER.get().unwrap_or_else(|| OWNERS.fetch_add(1, Ordering::Relaxed));
        OWNER.set(Some(owner));
        owner
    })
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_malloc(size: usize) -> *mut c_void {
    heap::allocate(owner(), size, 1, false).cast()
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_calloc(count: usize, size: usize) -> *mut c_void {
    let bytes = count.checked_mul(size);
    bytes.map_or(ptr::null_mut(), |bytes| heap::allocate(owner(), bytes, 1, true)).cast()
}

/// # Safety
/// As of `posix_memalign`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    let block = heap::allocate(owner(), size, align, false);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: room for a pointer, by the caller's promise.
    unsafe { out.write(block.cast()) };
    0
}

/// # Safety
/// As of `realloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_realloc(old: *mut c_void, size: usize) -> *mut c_void {
    let Some(had) = heap::with(|heap| heap.size_of(old.addr())).flatten() else {
        if old.is_null() {
            return __wrap_malloc(size);
        }
        // SAFETY: the caller's promise is passed on unchanged: the system's own heap gave it out.
        return unsafe { libc::realloc(old, size) };
    };
    if size <= had {
        return old;
    }
    let new = __wrap_malloc(size);
    if !new.is_null() {
        // SAFETY: both have as many bytes, and they are not the same.
        unsafe { ptr::copy_nonoverlapping(old.cast::<u8>(), new.cast::<u8>(), had) };
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { __wrap_free(old) };
    }
    new
}

/// # Safety
/// As of `free`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_free(block: *mut c_void) {
    let ours = heap::with(|heap| heap.free(owner(), block.addr())).unwrap_or_default();
    if !ours && !block.is_null() {
        // SAFETY: the caller's promise is passed on unchanged: the system's own heap gave it out.
        unsafe { libc::free(block) };
    }
}
