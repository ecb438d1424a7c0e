//! What is left to be done where a call below does not return.

/// Calls a closure when it is dropped: on each way out, a panic's too, on which it was not said to be [done](Self::done).
///
/// It costs nothing where it is: it is dropped inline, so that it need not be in memory. A guard whose type says that something
/// holds (a turn, an area that is closed) is a type of its own.
#[must_use = "dropping it calls the closure"]
pub(crate) struct Guard<F: FnMut()>(F);

impl<F: FnMut()> Guard<F> {
    /// Calls `otherwise` where it is dropped. What the closure owns is forgotten, not dropped, where it is done.
    #[inline(always)]
    pub(crate) fn new(otherwise: F) -> Self {
        Self(otherwise)
    }

    /// All is as it should be: the closure is not called.
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
