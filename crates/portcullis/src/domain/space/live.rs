//! A domain's policy and its account of exposure, which are changed and read while I/O runs. When a
//! change to a stricter policy has returned `Ok`, that holds for what was unmapped before it, too.

use super::Domain;
use crate::domain::account::CpuBook;
use crate::domain::governed::Governed;
use crate::domain::{AtomicPolicy, Policy, PolicyError};
use crate::exposure::Exposure;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{LocalCpu, Platform};
use crate::sync::{Ordering, fence};

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Changes the policy, while I/O goes on. When the call has returned `Ok`, the stricter of the
    /// two promises holds: every unmap that returns from then on is by the new policy, and, where
    /// that is the stricter one, no device reaches anything any more that was unmapped before.
    ///
    /// Waits for one flush, unless the new policy is weaker: then it is one store. Devices and
    /// mappings with a policy of their own keep it. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`PolicyError::Translation`] from or to passthrough, with nothing changed;
    /// [`PolicyError::Unconfirmed`], where the policy is changed and devices may still reach what
    /// was unmapped before.
    pub fn set_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.change(&self.policy, Some(policy))
    }

    /// Changes the policy at `place`, the domain's or an exception from it.
    pub(crate) fn change(&self, place: &AtomicPolicy, policy: Option<Policy>) -> Result<(), PolicyError> {
        if self.store(place, policy)? { Ok(self.flush()?) } else { Ok(()) }
    }

    /// Returns an error where mappings of the domain cannot have the policy `new`.
    pub(crate) fn allows(&self, new: Policy) -> Result<(), PolicyError> {
        if new.is_translated() == self.translated {
            return Ok(());
        }
        Err(PolicyError::Translation { from: self.policy().name(), to: new.name() })
    }

    /// Does the part of a change that waits for nothing. Returns whether a flush must follow for
    /// the stricter promise to hold.
    fn store(&self, place: &AtomicPolicy, policy: Option<Policy>) -> Result<bool, PolicyError> {
        // An exception may always end: then the domain's own policy holds again.
        policy.map_or(Ok(()), |new| self.allows(new))?;
        let old = place.swap(policy);
        // The domain's own policy may be changing at the same time. It is loaded after the store,
        // with the fence of that change's flush on the other side. So either this load sees it
        // where it is the stricter one, or that flush begins after the store, and covers what was
        // queued by the exception.
        fence(Ordering::SeqCst);
        let own = self.policy();
        let (new, old) = (policy.unwrap_or(own), old.unwrap_or(own));
        // The flush waits for turns first, and a CPU that queues something looks at the policy in
        // its turn: what was queued by the old policy is covered, and what comes later sees the new
        // one. Also where nothing has changed: another caller may be changing it at the same time,
        // or this one asks again after a failure.
        Ok(self.translated && !new.is_weaker_than(old))
    }

    /// What the domain has left exposed so far.
    ///
    /// The mappings that the [`dma`](crate::dma) layer makes are counted, and those that a cache of
    /// the caller's reports by [`count_neighbours`](Self::count_neighbours); [`map`](Self::map) by
    /// itself knows whole pages only, which have no neighbours. Without translation everything is
    /// exposed, always, and nothing is counted. The clock is read every 65 us or so while a CPU
    /// maps and unmaps, and for each 64th change at the latest: what came and went in between, if
    /// that is 131 us at the most, is taken to have done so evenly. So the sums are wrong, for the
    /// time between two readings, by the difference of the most and the fewest bytes in it at the
    /// most. Where the CPU has paused in between, all that came counts from the one to the other,
    /// which may be more than what happened, and is never less. A ring says what it has mapped when
    /// a batch of it is complete.
    ///
    /// What a CPU has deferred may count for longer than devices reached it, and never for less: a CPU
    /// hears of flushes now and then while it defers more, when its window ends, and when this is
    /// called, and then counts up to the flush that was confirmed last. So after [`flush`](Self::flush) the account is
    /// exact if it is read before another flush is confirmed. `longest_stale_ns` is exact but for
    /// this.
    ///
    /// O(CPUs), and one barrier of all CPUs where any has deferred. The caller holds no lock and no CPU.
    pub fn exposure(&self) -> Exposure {
        let now_ns = self.platform.now_ns();
        let (mut sum, longest_stale_ns) = self.flush_queue.exposure(&self.platform, now_ns);
        let live = self.platform.with_cpu(|_| self.books.total(now_ns));
        sum += live;
        let positive = |time: i128| u128::try_from(time).unwrap_or(0);
        Exposure {
            stale_byte_ns: positive(sum.used),
            neighbour_byte_ns: positive(sum.neighbour),
            longest_stale_ns,
        }
    }

    /// The platform's clock.
    pub(crate) fn now_ns(&self) -> u64 {
        self.platform.now_ns()
    }

    /// Counts `change` bytes more (negative: fewer) that devices can reach and that no buffer in
    /// use has: beside buffers, in their pages, or of mappings that a cache of the caller's keeps
    /// while no driver uses them. They count in [`exposure`](Self::exposure), as
    /// `neighbour_byte_ns`, until the caller takes the same number off again.
    ///
    /// They are counted also where the platform panics, which the caller then meets; a second panic
    /// ends the process. Costs two stores with a CPU lent, and one reading of the clock now and
    /// then; nothing for 0.
    #[inline]
    pub fn count_neighbours(&self, change: i64) {
        if change != 0 {
            let bytes = change.cast_unsigned();
            // Where the platform panics before it lends a CPU, they are counted without, at the time that the clock says.
            let untold = Guard::new(|| self.books.of(None).change_now(bytes, || self.platform.now_ns()));
            self.platform.with_cpu(|cpu| {
                untold.done();
                self.change_neighbours(cpu, bytes);
            });
        }
    }

    /// As [`count_neighbours`](Self::count_neighbours), with the caller's CPU. Wraps: `bytes` is
    /// the negative of a number to count fewer.
    #[inline]
    fn change_neighbours(&self, cpu: Option<&LocalCpu<'_>>, bytes: u64) {
        self.change_in(self.books.of(cpu), bytes);
    }

    /// As [`count_neighbours`](Self::count_neighbours), in the CPU's book.
    #[inline]
    pub(super) fn change_in(&self, book: CpuBook<'_>, bytes: u64) {
        if bytes != 0 {
            book.change(bytes, || self.platform.now_ns());
        }
    }

    /// Counts `bytes` fewer: devices cannot reach them any more, or they belong to what waits for a
    /// flush.
    #[inline]
    pub(super) fn uncount_neighbours(&self, cpu: Option<&LocalCpu<'_>>, bytes: u64) {
        self.change_neighbours(cpu, bytes.wrapping_neg());
    }
}

impl<M: Mapper, P: Platform> Governed for Domain<M, P> {
    fn may_have(&self, policy: Policy) -> Result<(), PolicyError> {
        self.allows(policy)
    }

    fn store_policy(&self, policy: Policy) -> Result<bool, PolicyError> {
        self.store(&self.policy, Some(policy))
    }

    fn flush_stale(&self) -> Result<(), PolicyError> {
        Ok(self.flush()?)
    }
}
