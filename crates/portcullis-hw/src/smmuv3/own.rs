//! Command queues of CPUs: the Enhanced Command queues (ECMDQ) that an SMMUv3.3 may have besides the main one.
//!
//! If the host says which CPU calls, a CPU submits its invalidations to a queue of its own, or to one that it shares with its neighbours;
//! then they share waits, too. Changes of stream table entries use the main queue.
//!
//! **Order.** The unit consumes its queues in any order, and a CMD_SYNC covers only its own queue (section 3.5.6.1). Nothing here needs
//! more:
//!
//! - An invalidation has the same effect in any queue, and the CMD_SYNC that confirms it follows in that queue. The fence at the beginning
//!   of each call puts the calls in one order for memory.
//! - `attach`, `detach` and `enable` use only the main queue. Each waits for one step, such as the invalidation of an entry, before the
//!   next.
//! - Invalidations in CPUs' queues meanwhile, or left there when a CPU's patience ended, only invalidate more. Each call that begins after
//!   the unit may walk a stage covers that stage, too, by the fence of `attach` and its own.
//! - An error stops one queue, and fails its outstanding submissions: each queue counts its own failures and has its own acknowledgement.
//! - `shut_down` turns each queue off, and frees its memory when the unit has acknowledged that.

use alloc::vec::Vec;

use super::layout::{ecmdq, idr1, reg};
use super::queue::{Queue, turn};
use crate::heap::reserve;
use crate::host::{Host, Registers, UnitError};
use crate::waits::Waits;

/// Register offsets of the unit's ECMDQs, as far as it answers there. None if their layout is not that of SMMUv3.3.
fn places(registers: &impl Registers, idr1: u32) -> impl Iterator<Item = usize> {
    let has = idr1 & idr1::ECMDQ != 0;
    let idr6 = if has { registers.read32(reg::IDR6) } else { 0 };
    let (pages, each) = (ecmdq::pages(idr6), ecmdq::of_a_page(idr6));
    let pages = if has && pages.max(each) <= ecmdq::MOST { 1 << pages } else { 0 };
    let page_at = move |page: usize| {
        let base = registers.read64(reg::CONTROL_PAGE + ecmdq::TOLD * page);
        let at = usize::try_from(base & ecmdq::ADDRESS).ok()?;
        // All ones: nothing answers.
        (base != u64::MAX && base & ecmdq::PRESET != 0 && at >= ecmdq::FIRST_PAGE).then_some(at)
    };
    let queues = move |page: usize| (0..1 << each).map(move |queue| page + queue * (ecmdq::PAGE >> each));
    let answers = move |at: &usize| registers.read32(at + ecmdq::CONS) != u32::MAX;
    let first = if pages > 0 { page_at(0) } else { None };
    // Offsets ascend: so no queue occurs twice, whose index would confirm commands of two rings.
    let follows = move |page: usize| {
        let at = first?.checked_add(page * ecmdq::PAGE)?;
        (page_at(page) == Some(at)).then_some(at)
    };
    (0..pages).map_while(follows).flat_map(queues).take_while(answers)
}

/// Turns off the queues that firmware, or the previous kernel, left on: until then the unit does not take new queue attributes (CR1).
pub(super) fn turn_off_all<H: Host>(host: &H, idr1: u32) -> Result<(), UnitError> {
    let registers = host.registers();
    places(registers, idr1).try_for_each(|at| {
        let on = (registers.read32(at + ecmdq::PROD) | registers.read32(at + ecmdq::CONS)) & ecmdq::EN;
        if on == 0 { Ok(()) } else { turn(host, at, false) }
    })
}

/// A queue, and the shared waits of its CPUs.
#[derive(Debug)]
pub(super) struct Own {
    pub queue: Queue,
    pub waits: Waits,
}

/// The unit's ECMDQs in use.
#[derive(Debug)]
pub(super) struct OwnQueues {
    /// All of them are on.
    queues: Vec<Own>,
    /// CPUs with numbers below this have one.
    cpus: usize,
    /// CPUs of one queue, with consecutive numbers.
    each: usize,
}

impl OwnQueues {
    pub const fn none() -> Self {
        Self { queues: Vec::new(), cpus: 0, each: 1 }
    }

    pub fn len(&self) -> usize {
        self.queues.len()
    }

    /// Turns on queues for the CPUs of `host`, as many as the unit has, or as memory allows. None if that is only one. All are off before.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`]: the unit does not turn one on. That one's memory stays allocated; the ones in `self` are on.
    pub fn turn_on<H: Host>(&mut self, host: &H, idr1: u32) -> Result<(), UnitError> {
        let (frames, cpus) = (host.frames(), host.cpus());
        // A queue for each CPU, or for each two, and so on.
        let even = |queues: usize| cpus.div_ceil(cpus.div_ceil(queues.max(1)).max(1));
        let places = || places(host.registers(), idr1);
        let count = if cpus < 2 { 0 } else { even(places().take(cpus).count()) };
        let mut made = Vec::new();
        if count < 2 || reserve(&mut made, count).is_err() || reserve(&mut self.queues, count).is_err() {
            return Ok(());
        }
        let new = |at| Queue::own(frames, idr1::commands(idr1), at).ok();
        made.extend(places().take(count).map_while(new));
        let count = if made.len() < 2 { 0 } else { even(made.len()) };
        for queue in made.drain(count..) {
            // SAFETY: 1: `Queue::own` allocated it from `frames`. 2: the unit was not told of it.
            unsafe { queue.free(frames) };
        }
        (self.cpus, self.each) = (cpus, cpus.div_ceil(count.max(1)));
        let mut failed = Ok(());
        for queue in made {
            if failed.is_err() {
                // SAFETY: 1: `Queue::own` allocated it from `frames`. 2: the unit was told of the queues up to the failed one, and not of
                // this one.
                unsafe { queue.free(frames) };
                continue;
            }
            queue.tell(host.registers());
            failed = queue.turn(host, true);
            if failed.is_ok() {
                let waits = if self.each == 1 { Waits::alone() } else { Waits::of(self.each) };
                self.queues.push(Own { queue, waits });
            }
        }
        failed
    }

    /// The queue of the calling CPU, or of its previous one if the caller migrates. `None`: the main queue.
    pub fn of_caller<H: Host>(&self, host: &H) -> Option<&Own> {
        if self.queues.is_empty() {
            return None;
        }
        let cpu = host.undisturbed(|| host.cpu())?;
        if cpu < self.cpus { self.queues.get(cpu / self.each) } else { None }
    }

    pub fn turn_off<H: Host>(&self, host: &H) -> Result<(), UnitError> {
        self.queues.iter().try_for_each(|own| own.queue.turn(host, false))
    }

    /// Frees their memory.
    ///
    /// # Safety
    /// 1. The host's frames allocated it.
    /// 2. [`turn_off`](Self::turn_off) has returned `Ok`.
    pub unsafe fn free<H: Host>(self, host: &H) {
        for own in self.queues {
            // SAFETY: clauses 1 and 2.
            unsafe { own.queue.free(host.frames()) };
        }
    }
}
