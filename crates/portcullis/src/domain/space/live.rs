//! A domain's policy and its account of exposure, which change while I/O runs. After `Ok` of a change to a stricter policy, the new promise
//! holds for earlier unmaps, too.

use super::Domain;
use crate::domain::account::CpuBook;
use crate::domain::{AtomicPolicy, Policy, PolicyError};
use crate::exposure::Exposure;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{LocalCpu, Platform};
use crate::sync::{Ordering, fence};

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Changes the policy while I/O runs. After `Ok`, every unmap that returns later follows the new policy; if that is the stricter one,
    /// devices reach nothing that was unmapped before. Devices and mappings with a policy of their own keep it. Costs one flush, or one
    /// store if the new policy is weaker. Context: waits for hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`PolicyError::Translation`] from or to passthrough: nothing is changed. [`PolicyError::Unconfirmed`]: the policy is changed, but
    /// devices may still reach what was unmapped before.
    pub fn set_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.change(&self.policy, Some(policy))
    }

    pub(crate) fn change(&self, place: &AtomicPolicy, policy: Option<Policy>) -> Result<(), PolicyError> {
        // `None` ends an exception, and needs no check: the domain's own policy holds again.
        policy.map_or(Ok(()), |new| self.allows(new))?;
        let old = place.swap(policy);
        // The domain's own policy may be changing at the same time. It is loaded after the store and a fence, and that change's flush has a
        // fence, too. So either this load sees a stricter own policy, or that flush begins after the store, and covers what the exception
        // queued.
        fence(Ordering::SeqCst);
        let own = self.policy();
        let (new, old) = (policy.unwrap_or(own), old.unwrap_or(own));
        // The flush waits for exclusive sections first, and a CPU that queues a range reads the policy in its section. So the flush covers
        // ranges that were queued by the old policy, and later ones see the new policy. It runs even if the policy stays the same: another
        // caller may be changing it, or this one may retry after a failure.
        if self.translated && !new.is_weaker_than(old) { Ok(self.flush()?) } else { Ok(()) }
    }

    fn allows(&self, new: Policy) -> Result<(), PolicyError> {
        if new.is_translated() == self.translated {
            return Ok(());
        }
        Err(PolicyError::Translation { from: self.policy().name(), to: new.name() })
    }

    /// The exposure that the domain has caused so far: of mappings of the [`dma`](crate::dma) layer, and of neighbours that a caller's
    /// cache reports by [`count_neighbours`](Self::count_neighbours). [`map`](Self::map) itself knows whole pages only, which have no
    /// neighbours. Without translation everything is always exposed, and nothing is counted.
    ///
    /// The clock is read about every 65 us while a CPU maps and unmaps, and at least at every 64th change. Changes between two readings at
    /// most 131 us apart are taken as spread evenly, so the error for that time is at most the difference between the most and the fewest
    /// bytes in it. If the CPU has paused for longer, all bytes that came count for the whole pause: more than happened, never less. A ring
    /// reports its mappings when a batch is complete.
    ///
    /// Deferred ranges of a CPU may count for longer than devices reached them, never for less. A CPU learns of flushes now and then while
    /// it defers, when its window ends, and in this call; it then counts up to the last confirmed flush. So after [`flush`](Self::flush)
    /// the account is exact if it is read before another flush is confirmed. `longest_stale_ns` is exact otherwise.
    ///
    /// Context: O(CPUs), and one barrier of all CPUs if any has deferred. The caller holds no lock and no CPU.
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

    pub(crate) fn now_ns(&self) -> u64 {
        self.platform.now_ns()
    }

    /// Counts `change` bytes more (negative: fewer) that devices can reach and that are in no buffer in use: neighbours in a buffer's
    /// pages, or idle mappings of a caller's cache. They count in [`exposure`](Self::exposure), as `neighbour_byte_ns`, until the caller
    /// subtracts the same number.
    ///
    /// They are counted even if the platform panics, which the caller then meets; a second panic ends the process. Costs two stores with a
    /// CPU lent, and a reading of the clock now and then; nothing for 0.
    #[inline]
    pub fn count_neighbours(&self, change: i64) {
        if change != 0 {
            let bytes = change.cast_unsigned();
            // If the platform panics before it lends a CPU, they are counted without one, at the clock's time.
            let untold = Guard::new(|| self.books.of(None).change_now(bytes, || self.platform.now_ns()));
            self.platform.with_cpu(|cpu| {
                untold.done();
                self.change_neighbours(cpu, bytes);
            });
        }
    }

    /// As [`count_neighbours`](Self::count_neighbours), with the caller's CPU. `bytes` wraps: a negative number counts fewer.
    #[inline]
    fn change_neighbours(&self, cpu: Option<&LocalCpu<'_>>, bytes: u64) {
        self.change_in(self.books.of(cpu), bytes);
    }

    #[inline]
    pub(super) fn change_in(&self, book: CpuBook<'_>, bytes: u64) {
        if bytes != 0 {
            book.change(bytes, || self.platform.now_ns());
        }
    }

    /// Counts `bytes` fewer: devices cannot reach them any more, or they now count as deferred.
    #[inline]
    pub(super) fn uncount_neighbours(&self, cpu: Option<&LocalCpu<'_>>, bytes: u64) {
        self.change_neighbours(cpu, bytes.wrapping_neg());
    }
}
