//! A memory barrier on every running thread of the process: once [`register`] has returned `true`, each of these
//! threads has passed a full barrier when [`all`] returns. Linux's `membarrier` interrupts each CPU that runs a thread
//! of the process. (Command numbers: `include/uapi/linux/membarrier.h`, part of the kernel's stable interface.)

/// Registers the process. Returns whether [`all`] works from now on.
pub(super) fn register() -> bool {
    imp::register()
}

/// Costs a few microseconds.
pub(super) fn all() {
    imp::all();
}

// Miri has no such call: owners pass a full fence there.
#[cfg(all(target_os = "linux", not(miri)))]
mod imp {
    const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

    fn membarrier(command: libc::c_int) -> bool {
        #[cfg(test)]
        super::COMMANDS.with_borrow_mut(|commands| commands.push(command));
        // SAFETY: the call takes three numbers and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    pub(super) fn register() -> bool {
        membarrier(REGISTER_PRIVATE_EXPEDITED)
    }

    pub(super) fn all() {
        // The call cannot fail once the process is registered; if it did, owners' stores could go unseen.
        assert!(membarrier(PRIVATE_EXPEDITED), "membarrier works for a registered process");
    }
}

#[cfg(test)]
std::thread_local! {
    pub(super) static COMMANDS: std::cell::RefCell<std::vec::Vec<i32>> = const { std::cell::RefCell::new(std::vec::Vec::new()) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod imp {
    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn all() {}
}
