//! Designs that change tables: lazy with one queue for all CPUs, and strict with a lock around each wait.

use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Gather, InvalidationQueue};
use portcullis::mapper::Mapper;
use portcullis::platform::{FRAME_SIZE, Platform};

use super::lock::Ticket;
use super::ranges::Ranges;
use crate::invalidation::parts::{FramesInUse, Tables, settled, tables};
use crate::iova::allocator::Pages;
use crate::iova::portcullis::Structure;
use crate::lane::{Lane, put};
use crate::path::machine::{phys, refused};
use crate::path::subject::Subject;
use crate::path::workload::Case;
use crate::runner::Failure;

/// Entries of the flush queue: Linux's `HIGH_WATER_MARK` from 2008 to 2016.
const HIGH_WATER: usize = 250;

/// Pages of addresses: what 32 bits reach, where Linux looks first.
const SPACE: u64 = 1 << 20;

/// Addresses under one lock, a page table, and the hardware behind it.
struct Base<S, Q: InvalidationQueue, P: Platform> {
    space: Ticket<S>,
    mapper: Tables<Q>,
    frames: FramesInUse,
    platform: P,
}

impl<S: Structure, Q: InvalidationQueue, P: Platform + Clone> Base<S, Q, P> {
    fn new(platform: &P, queue: Q) -> Result<Self, Failure> {
        let (mapper, frames) = tables(platform, queue)?;
        let space = Ticket::new(S::with_pages(SPACE).map_err(refused)?);
        Ok(Self { space, mapper, frames, platform: platform.clone() })
    }

    fn alloc(&self, pages: u64) -> Option<IovaRange> {
        let order = pages.next_power_of_two().trailing_zeros();
        let first = self.space.lock().alloc(pages, order, SPACE - 1)?;
        IovaRange::new(Iova::new(first * FRAME_SIZE), pages * FRAME_SIZE).ok()
    }

    fn free(&self, range: IovaRange) -> bool {
        let first = range.start().get() / FRAME_SIZE;
        self.space.lock().free(Pages { first, pages: range.len() / FRAME_SIZE })
    }

    fn link(&self, range: IovaRange, at: u64) -> bool {
        let list = [(PhysAddr::new(at), range.len())];
        let (permissions, mut gather) = (Permissions::READ_WRITE, Gather::new());
        // SAFETY: no device is behind these tables.
        unsafe { self.mapper.map(&self.platform, range, list, permissions.into(), &mut gather) }.is_ok()
    }

    fn unlink(&self, range: IovaRange, gather: &mut Gather) -> bool {
        self.mapper.unmap(&self.platform, range, gather).bytes == range.len()
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.mapper.table().iova_to_phys(&self.platform, Iova::new(address)).map(PhysAddr::get)
    }

    fn settle(&self) -> Result<(), Failure> {
        let taken = SPACE - self.space.lock().free_pages();
        settled(&self.mapper, &self.frames, &self.platform, taken * FRAME_SIZE)
    }
}

/// What a design does for one mapping.
trait Calls: Send + Sync + 'static {
    fn map(&self, pages: u64, at: u64) -> Option<IovaRange>;
    fn unmap(&self, range: IovaRange) -> bool;
}

/// Unmaps wait in one queue.
pub(super) struct Deferred<S, Q: InvalidationQueue, P: Platform> {
    base: Base<S, Q, P>,
    queue: Ticket<Vec<IovaRange>>,
}

impl<S: Structure, Q: InvalidationQueue, P: Platform + Clone> Deferred<S, Q, P> {
    pub(super) fn new(platform: &P, queue: Q) -> Result<Self, Failure> {
        let waiting = Ticket::new(Vec::with_capacity(HIGH_WATER));
        Ok(Self { base: Base::new(platform, queue)?, queue: waiting })
    }

    /// Empties the queue, whose lock the caller has.
    fn flush(&self, waiting: &mut Vec<IovaRange>) -> bool {
        self.base.mapper.sync(&Gather::everything()).is_ok()
            && waiting.drain(..).all(|range| self.base.free(range))
    }
}

impl<S, Q, P> Calls for Deferred<S, Q, P>
where
    S: Structure,
    Q: InvalidationQueue + 'static,
    P: Platform + Clone + 'static,
{
    fn map(&self, pages: u64, at: u64) -> Option<IovaRange> {
        self.base.alloc(pages).filter(|range| self.base.link(*range, at))
    }

    fn unmap(&self, range: IovaRange) -> bool {
        // What this leaves in the hardware's caches the flush of everything takes.
        let unlinked = self.base.unlink(range, &mut Gather::new());
        let mut waiting = self.queue.lock();
        let flushed = waiting.len() < HIGH_WATER || self.flush(&mut waiting);
        waiting.push(range);
        unlinked && flushed
    }
}

impl<S, Q, P> Subject for Deferred<S, Q, P>
where
    S: Structure,
    Q: InvalidationQueue + 'static,
    P: Platform + Clone + 'static,
{
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        Ok(Box::new(One { design: self, case: *case, thread, ranges: vec![None; case.live] }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.base.reach(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        let flushed = self.flush(&mut self.queue.lock());
        flushed.then_some(()).ok_or_else(|| Failure::Broken("what waited could not be freed".into()))?;
        self.base.settle()
    }
}

/// Each unmap waits, with locks held.
pub(super) struct Waiting<Q: InvalidationQueue, P: Platform> {
    base: Base<Ranges, Q, P>,
    /// Around each change of the table, and each wait that follows from one.
    table: Ticket<()>,
    /// Around each command, and each wait.
    commands: Ticket<()>,
}

impl<Q: InvalidationQueue, P: Platform + Clone> Waiting<Q, P> {
    pub(super) fn new(platform: &P, queue: Q) -> Result<Self, Failure> {
        Ok(Self { base: Base::new(platform, queue)?, table: Ticket::new(()), commands: Ticket::new(()) })
    }
}

/// Its pages.
fn each_page(range: IovaRange) -> impl Iterator<Item = IovaRange> {
    let pages = (0..range.len()).step_by(FRAME_SIZE as usize);
    pages.filter_map(move |at| IovaRange::new(Iova::new(range.start().get() + at), FRAME_SIZE).ok())
}

impl<Q: InvalidationQueue + 'static, P: Platform + Clone + 'static> Calls for Waiting<Q, P> {
    fn map(&self, pages: u64, at: u64) -> Option<IovaRange> {
        let range = self.base.alloc(pages)?;
        let link = |page: IovaRange| {
            let _held = self.table.lock();
            self.base.link(page, at + (page.start().get() - range.start().get()))
        };
        each_page(range).all(link).then_some(range)
    }

    fn unmap(&self, range: IovaRange) -> bool {
        let unlink = |page: IovaRange| {
            let _held = self.table.lock();
            let mut gather = Gather::new();
            let unlinked = self.base.unlink(page, &mut gather);
            let _commands = self.commands.lock();
            unlinked && self.base.mapper.sync(&gather).is_ok()
        };
        // The address says how long the range is: Linux asked its tree, and then took the lock once more to free it.
        let pages = self.base.space.lock().find(range.start().get() / FRAME_SIZE);
        pages == Some(range.len() / FRAME_SIZE) && each_page(range).all(unlink) && self.base.free(range)
    }
}

impl<Q: InvalidationQueue + 'static, P: Platform + Clone + 'static> Subject for Waiting<Q, P> {
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        Ok(Box::new(One { design: self, case: *case, thread, ranges: vec![None; case.live] }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.base.reach(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        self.base.settle()
    }
}

/// A thread's mappings.
struct One<C> {
    design: Arc<C>,
    case: Case,
    thread: usize,
    ranges: Vec<Option<IovaRange>>,
}

impl<C: Calls> Lane for One<C> {
    fn map(&mut self, index: usize) -> bool {
        let at = phys(&self.case, self.thread, index);
        let range = self.design.map(self.case.workload.pages, at);
        put(&mut self.ranges, index, range.map(Some))
    }

    fn unmap(&mut self, index: usize) -> bool {
        self.ranges[index].is_some_and(|range| self.design.unmap(range))
    }

    fn address(&self, index: usize) -> u64 {
        self.ranges[index].map_or(0, |range| range.start().get())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use portcullis::iova::Bitmap;
    use portcullis::std_platform::StdPlatform;

    use super::*;
    use crate::path::AtOnce;
    use crate::path::tests::Told;

    /// The tree of addresses is locked for the map, and twice for the unmap; the table for each page of both; and the commands for each
    /// page of the unmap.
    #[test]
    fn each_page_takes_its_locks_and_its_wait() {
        for pages in [1, 4, 16] {
            let told = Told::default();
            let design = Waiting::new(&StdPlatform::new(), told.clone()).unwrap();
            let taken = || [design.base.space.taken(), design.table.taken(), design.commands.taken()];
            let range = design.map(u64::from(pages), 1 << 30).unwrap();
            assert_eq!((taken(), range.len()), ([1, pages, 0], u64::from(pages) * FRAME_SIZE));
            assert!(design.unmap(range));
            assert_eq!((taken(), told.counts()), ([3, 2 * pages, pages], [u64::from(pages); 2]));
            // No tree has a hole that was never handed out.
            let other = IovaRange::new(Iova::new(1 << 30), FRAME_SIZE).unwrap();
            assert!(!design.unmap(other) && !design.unmap(range));
        }
    }

    fn waits_in_one_queue<S: Structure>() {
        let told = Told::default();
        let design = Deferred::<S, _, _>::new(&StdPlatform::new(), told.clone()).unwrap();
        for unmapped in 1..=501 {
            let range = design.map(2, 1 << 30).unwrap();
            assert!(design.unmap(range));
            // The hardware is told by the one that finds 250 there.
            assert_eq!(told.counts(), [(unmapped - 1) / 250; 2], "{unmapped}");
            let free = SPACE - 2 * ((unmapped - 1) % 250 + 1);
            assert_eq!(design.base.space.lock().free_pages(), free);
        }
    }

    #[test]
    fn two_hundred_and_fifty_unmaps_wait_in_one_queue() {
        waits_in_one_queue::<Ranges>();
        waits_in_one_queue::<Bitmap>();
    }

    /// Addresses are free only if they were mapped, and the queue has confirmed their end.
    #[test]
    fn a_wait_that_fails_is_told() {
        let told = Told::default();
        let design = Waiting::new(&StdPlatform::new(), told.clone()).unwrap();
        let range = design.map(4, 1 << 30).unwrap();
        told.fails.store(true, Ordering::Relaxed);
        assert!(!design.unmap(range));
        let deferred = Deferred::<Ranges, _, _>::new(&StdPlatform::new(), told).unwrap();
        for _ in 0..250 {
            let range = deferred.map(1, 1 << 30).unwrap();
            assert!(deferred.unmap(range));
        }
        let range = deferred.map(1, 1 << 30).unwrap();
        assert!(!deferred.unmap(range));
        let twice = Deferred::<Ranges, _, _>::new(&StdPlatform::new(), AtOnce).unwrap();
        let range = twice.map(1, 1 << 30).unwrap();
        assert!(twice.unmap(range) && !twice.unmap(range));
    }
}
