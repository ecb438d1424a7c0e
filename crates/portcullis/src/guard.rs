//! A scope guard: runs a closure if a call unwinds.
//!
//! The crate calls the embedder's code (platform, memory, mapper, clock), which may panic, and has to stay sound after
//! that. So before such a call it makes a guard whose drop repairs the state: for example, it leaks addresses that a
//! device may still reach, or leaves them to the next commit. If the call panics, unwinding drops the guard. If the
//! call succeeds, the code forgets the guard. So a `core::mem::forget` of a guard is no leak: it says that there is
//! nothing to repair.

/// Calls a closure when it is dropped, also by a panic, unless it was [done](Self::done). It is dropped inline, so it
/// need not be in memory and costs nothing. A guard whose type says that something holds (an exclusive section, a
/// closed area) is a type of its own.
#[must_use = "dropping it calls the closure"]
pub(crate) struct Guard<F: FnMut()>(F);

impl<F: FnMut()> Guard<F> {
    /// Calls `otherwise` on drop. `done` leaks what the closure owns: let it own only references.
    #[inline(always)]
    pub(crate) fn new(otherwise: F) -> Self {
        Self(otherwise)
    }

    #[inline(always)]
    pub(crate) fn done(self) {
        core::mem::forget(self);
    }
}

impl<F: FnMut()> Drop for Guard<F> {
    #[inline]
    fn drop(&mut self) {
        (self.0)();
    }
}
