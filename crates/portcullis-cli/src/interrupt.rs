//! Ctrl-C: the first ends what runs with the results so far, the second ends the program.

use std::sync::atomic::{AtomicBool, Ordering};

/// What a program returns that was interrupted: 128 and the signal's number.
pub const EXIT_CODE: u8 = 130;

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Whether the user wants no more of it.
pub fn stopped() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

/// The same as Ctrl-C.
#[cfg(target_os = "linux")]
pub fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// Takes the next Ctrl-C as a wish to see the results so far. One that the program was told to ignore stays ignored.
#[cfg(unix)]
pub fn listen() {
    listen_to(libc::SIGINT);
}

/// Takes the end of the terminal, and the wish that the program ends, in the same way.
#[cfg(target_os = "linux")]
pub fn listen_to_ends() {
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].into_iter().for_each(listen_to);
}

#[cfg(unix)]
fn listen_to(signal: libc::c_int) {
    extern "C" fn heard(_: libc::c_int) {
        STOPPED.store(true, Ordering::Relaxed);
    }
    // SAFETY: zeroes are a valid `sigaction` (no flags, an empty mask, the default action); both pointers are to live values;
    // the handler does nothing but store to an atomic, which is safe in a signal handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(signal, std::ptr::null(), &mut action) != 0 || action.sa_sigaction == libc::SIG_IGN
        {
            return;
        }
        action = std::mem::zeroed();
        action.sa_sigaction = heard as *const () as libc::sighandler_t;
        // The second one does what it did before: it ends the program. A read goes on after the first.
        action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

/// From now on this program ignores Ctrl-C and the end of its terminal or session. SIGKILL still ends it.
#[cfg(unix)]
pub fn ignore() {
    for signal in [libc::SIGINT, libc::SIGHUP, libc::SIGTERM, libc::SIGQUIT, libc::SIGTSTP] {
        // SAFETY: the call takes two numbers; no handler of this program's runs any more.
        unsafe {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

/// Elsewhere the first one ends the program.
#[cfg(not(unix))]
pub fn listen() {}
