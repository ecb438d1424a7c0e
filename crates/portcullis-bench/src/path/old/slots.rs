//! Bounce slots behind locks.

use std::sync::Arc;

use portcullis::addr::PhysAddr;
use portcullis::platform::CopyMemory;

use super::lock::Ticket;
use crate::bounce::memory::{Block, Buffers, Ram};
use crate::bounce::rotating::Index;
use crate::lane::{Lane, put};
use crate::path::subject::Subject;
use crate::path::workload::Case;
use crate::runner::Failure;

/// All slots together: Linux's default.
const POOL: u64 = 64 << 20;

/// Which slot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The one that was not used for the longest time.
    Rotating,
    /// The one that was used last.
    Newest,
}

#[derive(Debug)]
enum Free {
    Rotating(Index),
    Newest(Vec<usize>),
}

/// Slots of a mapping's size, in areas with a lock each.
pub(super) struct Slots {
    memory: Block,
    areas: Vec<Ticket<Free>>,
    /// Of each area.
    slots: usize,
}

impl Slots {
    pub(super) fn new(case: &Case, order: Order, areas: usize) -> Result<Self, Failure> {
        let all = (POOL / case.workload.bytes()) as usize;
        let slots = all / areas.next_power_of_two();
        if slots < 2 * case.live * case.threads.div_ceil(areas) {
            return Err(Failure::Unsupported("the pool is too small".into()));
        }
        let free = || match order {
            Order::Rotating => Free::Rotating(Index::new(slots)),
            Order::Newest => Free::Newest((0..slots).rev().collect()),
        };
        let memory = Block::new((slots * areas) as u64 * case.workload.bytes())?;
        Ok(Self { memory, areas: (0..areas).map(|_| Ticket::new(free())).collect(), slots })
    }
}

impl Subject for Slots {
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        let buffers = Buffers::new(case.live.min(64), case.workload.bytes())?;
        let area = thread % self.areas.len();
        Ok(Box::new(Copied { pool: self, area, buffers, at: vec![None; case.live] }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.memory.start()).map(|_| address)
    }

    fn settle(&self) -> Result<(), Failure> {
        let all = |area: &Ticket<Free>| match &*area.lock() {
            Free::Rotating(index) => index.is_free(),
            Free::Newest(free) => free.len() == self.slots,
        };
        let left = || Failure::Broken("not everything was unmapped".into());
        self.areas.iter().all(all).then_some(()).ok_or_else(left)
    }
}

struct Copied {
    pool: Arc<Slots>,
    area: usize,
    buffers: Buffers,
    at: Vec<Option<usize>>,
}

impl Lane for Copied {
    fn map(&mut self, index: usize) -> bool {
        let slot = match &mut *self.pool.areas[self.area].lock() {
            Free::Rotating(index) => index.take(1, 1),
            Free::Newest(free) => free.pop(),
        };
        if slot.is_some() {
            put(&mut self.at, index, Some(slot));
            let (from, bytes) = (PhysAddr::new(self.buffers.at(index % 64)), self.buffers.bytes());
            // SAFETY: the buffer is this thread's, the slot was just taken and is as large.
            unsafe { Ram::<true>.copy(from, PhysAddr::new(self.address(index)), bytes) };
        }
        slot.is_some()
    }

    fn unmap(&mut self, index: usize) -> bool {
        let Some(slot) = self.at[index].take() else { return false };
        match &mut *self.pool.areas[self.area].lock() {
            Free::Rotating(index) => index.give(slot, 1),
            Free::Newest(free) => free.push(slot),
        }
        true
    }

    fn address(&self, index: usize) -> u64 {
        let slot = self.area * self.pool.slots + self.at[index].unwrap_or_default();
        self.pool.memory.start() + slot as u64 * self.buffers.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::workload::{Kind, Workload};

    /// Of 64 MiB in two areas each has 8,192 slots of a page, and half of them may be live.
    #[test]
    fn a_pool_that_the_threads_fill_by_more_than_half_is_too_small() {
        for (threads, live, is_made) in
            [(4, 2048, true), (4, 2049, false), (5, 2048, false), (2, 4096, true), (2, 4097, false)]
        {
            let workload = Workload { name: "w", kind: Kind::Swiotlb, pages: 1, live };
            let case = Case { workload, threads, live, own_domains: false, crowded: false };
            let made = Slots::new(&case, Order::Newest, 2).map(|made| {
                let start = made.memory.start();
                assert_eq!([start - 1, start].map(|address| made.reach(address)), [None, Some(start)]);
                made.slots
            });
            let too_small = Failure::Unsupported("the pool is too small".into());
            assert_eq!(made, if is_made { Ok(8192) } else { Err(too_small) }, "{threads} {live}");
        }
    }
}
