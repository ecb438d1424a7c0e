//! A visit accesses each queue in use, one after the other, while its CPU is kept out of it; and the shared queue last, so that it misses
//! no entry.

use super::FlushQueue;
use super::ring::Ring;
use crate::addr::IovaRange;
use crate::exposure::ByteTime;
use crate::platform::{LocalCpu, Platform};
use crate::sync::{Ordering, fence};

use super::SLICE;

impl FlushQueue {
    /// Closes the queue of CPU `index`, which is being unplugged: a flush that [begins](Self::begin_flush) later covers all its entries.
    /// Returns whether anything is deferred there, so that a flush is due. Context: one barrier of all CPUs and a wait for that CPU's
    /// exclusive section. The caller holds no lock and no CPU.
    pub fn close_of<P: Platform>(&self, platform: &P, index: usize) -> bool {
        let mut due = false;
        self.own.with_others(platform, Some(index), |_, ring| {
            self.close_segment(ring);
            self.catch_up(ring);
            due = ring.waits();
        });
        due
    }

    /// Visits all queues in use, and updates them with the confirmed flushes. Context: as every visit, one barrier of all CPUs and a wait
    /// for the exclusive sections of CPUs whose queues are in use, O(1) for each. The caller holds no lock and no CPU.
    pub fn tell<P: Platform>(&self, platform: &P) {
        self.visit(platform, |ring| self.catch_up(ring));
    }

    /// Whether any entry is deferred. A visit: see [`tell`](Self::tell).
    pub fn is_pending<P: Platform>(&self, platform: &P) -> bool {
        let mut pending = false;
        self.visit(platform, |ring| {
            self.catch_up(ring);
            pending |= ring.waits();
        });
        pending
    }

    /// Takes all safe entries out of the queues, or out of the queue of CPU `only`, and passes their addresses to `reclaim`, in slices of
    /// 64 entries with a CPU lent for each. Meanwhile CPUs are kept out of their own queues; the shared queue is locked for each slice. For
    /// exhausted address spaces, and for CPUs that are gone. A visit: see [`tell`](Self::tell).
    pub fn reclaim<P: Platform>(
        &self,
        platform: &P,
        only: Option<usize>,
        mut reclaim: impl FnMut(Option<&LocalCpu<'_>>, IovaRange),
    ) {
        let own = |_, ring: &Ring| {
            self.catch_up(ring);
            let mut slice = |cpu: Option<&LocalCpu<'_>>| Self::pop_slice(ring, |range| reclaim(cpu, range));
            while platform.with_cpu(&mut slice) {}
        };
        match only {
            Some(_) => return self.own.with_others(platform, only, own),
            None => self.own.with_first(platform, self.used(), own),
        }
        let mut slice = |cpu: Option<&LocalCpu<'_>>| {
            let ring = self.shared.lock();
            self.catch_up(&ring);
            Self::pop_slice(&ring, |range| reclaim(cpu, range))
        };
        while platform.with_cpu(&mut slice) {}
    }

    fn pop_slice(ring: &Ring, mut reclaim: impl FnMut(IovaRange)) -> bool {
        (0..SLICE).all(|_| ring.pop().map(|range| range.into_iter().for_each(&mut reclaim)).is_some())
    }

    /// Byte-nanoseconds of all entries up to `now_ns`, and the longest deferral. A visit: see [`tell`](Self::tell).
    pub(crate) fn exposure<P: Platform>(&self, platform: &P, now_ns: u64) -> (ByteTime, u64) {
        let mut sum = (ByteTime::default(), 0);
        self.visit(platform, |ring| {
            self.catch_up(ring);
            let (time, longest_ns) = ring.exposure(now_ns);
            sum.0 += time;
            sum.1 = longest_ns.max(sum.1);
        });
        sum
    }

    /// Calls `f` with each queue in use, which no other caller uses meanwhile.
    fn visit<P: Platform>(&self, platform: &P, mut f: impl FnMut(&Ring)) {
        // Between the caller's update and the load of which queues are announced.
        fence(Ordering::SeqCst);
        self.own.with_first(platform, self.used(), |_, ring| f(ring));
        // Last: a CPU that was kept out of its own queue has used this one.
        platform.with_cpu(|_| f(&self.shared.lock()));
    }
}
