//! Where the domain's addresses come from and go: to one caller each, and back once they are free. Addresses that cannot be given back are
//! counted as lost.

use super::Domain;
use crate::addr::{Iova, IovaRange};
use crate::domain::parts::NoNote;
use crate::guard::Guard;
use crate::iova::{IovaError, Own};
use crate::mapper::Mapper;
use crate::platform::{LocalCpu, Platform};

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Takes addresses for `len` bytes. Calls `guarded` on the CPU on which they are taken, and returns its result, which guards them from
    /// then on. If addresses are exhausted, flushes and takes back all deferred ranges, once.
    #[inline(always)]
    pub(super) fn alloc<T>(
        &self,
        len: u64,
        limit: Iova,
        guarded: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T + Copy,
    ) -> Result<T, IovaError> {
        match self.space.alloc_fast(&self.platform, (len, limit), guarded) {
            Some(taken) => Ok(taken),
            None => self.alloc_slowly(len, limit, guarded),
        }
    }

    #[cold]
    #[inline(never)]
    fn alloc_slowly<T>(
        &self,
        len: u64,
        limit: Iova,
        guarded: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T,
    ) -> Result<T, IovaError> {
        let alloc = || self.space.alloc_guarded(&self.platform, (len, limit), !self.is_at_once(), &guarded);
        match alloc() {
            Err(exhausted @ IovaError::Exhausted { .. }) if self.is_at_once() => {
                self.want_maintenance();
                Err(exhausted)
            }
            Err(IovaError::Exhausted { .. }) if self.is_pending() && self.flush().is_ok() => {
                self.reclaim_deferred(None);
                alloc()
            }
            Err(exhausted @ IovaError::Exhausted { .. }) => {
                self.reclaim_deferred(None);
                alloc().map_err(|_| exhausted)
            }
            result => result,
        }
    }

    /// Calls `f` with a CPU, if there is one, and with that CPU's cache of addresses in an exclusive section, if it is not revoked.
    pub(super) fn with_turn<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>, Option<Own<'_>>) -> R) -> R {
        self.platform.with_cpu(|cpu| self.space.with_own(cpu, |_, own| f(cpu, own)))
    }

    #[inline]
    pub(super) fn give_back(&self, cpu: Option<&LocalCpu<'_>>, own: Option<Own<'_>>, range: IovaRange) {
        if !own.is_some_and(|own| self.space.put(own, range)) {
            self.give_back_any(cpu, own, range);
        }
    }

    /// The slow path of [`give_back`](Self::give_back), also for a part of a mapping, which is freed with the rest.
    #[cold]
    #[inline(never)]
    fn give_back_any(&self, cpu: Option<&LocalCpu<'_>>, own: Option<Own<'_>>, range: IovaRange) {
        self.parts.forget(range);
        if self.space.free_local(own, range) {
            return;
        }
        match self.parts.gone(&self.space, range) {
            Ok(None) => {}
            Ok(Some(whole)) if self.space.free_local(own, whole) => {}
            Ok(Some(whole)) => self.books.of(cpu).add(|book| &book.lost, whole.len()),
            Err(NoNote) => self.books.of(cpu).add(|book| &book.lost, range.len()),
        }
    }

    /// Counts `bytes` of `range` as leaked. If `range` is a mapping, its earlier removed parts leak, too. If the platform panics, all of
    /// this is counted nevertheless, without a CPU.
    #[cold]
    #[inline(never)]
    pub(crate) fn lose_rest(&self, range: IovaRange, bytes: u64) {
        self.lose(bytes);
        if !self.parts.is_empty() {
            // The guard runs while the CPU is lent; if the platform panics and lends none, it runs without.
            let losing = Guard::new(|| self.lose(self.parts.forget(range)));
            self.platform.with_cpu(|_| drop(losing));
        }
    }

    /// Counts leaked addresses. It borrows no CPU, as the platform might panic and replace the caller's own error; it is slower, but rare.
    #[cold]
    #[inline(never)]
    pub(crate) fn lose(&self, bytes: u64) {
        self.books.of(None).add(|book| &book.lost, bytes);
    }
}
