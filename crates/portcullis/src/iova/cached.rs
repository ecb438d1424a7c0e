//! The CPUs' lists in front of the backing structure: when to use them, fill them and empty them.

use alloc::boxed::Box;

use super::config::IovaError;
use super::cpu::{CACHED_ORDERS, Cpu, Drained, ZONES};
use super::inbox::Inbox;
use super::links::OutOfMemory;
use super::notes::Notes;
use super::space::{Backing, Request};
use super::tree::TreeError;
use super::word::{EXACT, Note, handed_out};
use crate::percpu::{CachePadded, Owned};
use crate::platform::{LocalSlot, Platform};
use crate::sync::{Mutex, Ordering};

/// The largest block that is fetched at once, in pages: 4 MiB of 4 KiB.
const BLOCK_PAGES: u64 = 1024;

/// The lists of all CPUs.
#[derive(Debug)]
pub(super) struct Cached {
    notes: Notes,
    cpus: Owned<Cpu>,
    inboxes: Box<[CachePadded<Inbox>]>,
    /// The first page that is not in the low zone.
    low_end: u64,
    /// Pages that one CPU keeps of each zone at the most.
    budget: [u64; ZONES],
}

impl Cached {
    /// For `slots` CPUs and the pages from `first` on, `pages` of them.
    pub fn new(
        slots: usize,
        first: u64,
        pages: u64,
        low_end: u64,
        cache_pages: u64,
    ) -> Result<Self, IovaError> {
        let slots = slots.min(EXACT as usize);
        let low_end = low_end.clamp(first, first + pages);
        let zone_pages = [low_end - first, first + pages - low_end];
        let share = |zone: u64| cache_pages.min(zone / 8 / slots.max(1) as u64);
        Ok(Self {
            notes: Notes::new(first, pages).map_err(|OutOfMemory| IovaError::OutOfMemory)?,
            cpus: Owned::new(slots, Cpu::default),
            inboxes: (0..slots).map(|_| CachePadded(Inbox::new())).collect(),
            // Without a high zone every request is for the low one.
            low_end: if zone_pages[1] == 0 { u64::MAX } else { low_end },
            budget: zone_pages.map(share),
        })
    }

    /// A range for `request` from the caller's own list: the fast path. `None` where it has none.
    #[inline]
    pub fn take(&self, slot: Option<&LocalSlot<'_>>, request: Request) -> Option<u64> {
        if request.order >= CACHED_ORDERS {
            return None;
        }
        let owner = slot?.index() as u64;
        let zone = self.zone(request.max_page);
        self.cpus.with(slot, |cpu| cpu.take(&self.notes, zone, request, owner))?
    }

    /// A range for `request` by way of the caller's CPU, whose list had none; `Ok(None)` where it has no say.
    pub fn alloc(
        &self,
        slot: Option<&LocalSlot<'_>>,
        backing: &Mutex<Backing>,
        request: Request,
    ) -> Result<Option<u64>, TreeError> {
        let (true, Some(own)) = (request.order < CACHED_ORDERS, slot) else {
            return Ok(None);
        };
        let zone = self.zone(request.max_page);
        let owner = own.index() as u64;
        let taken = self.cpus.with(slot, |cpu| self.alloc_slowly(cpu, owner, zone, backing, request));
        taken.unwrap_or(Ok(None))
    }

    /// The CPU's list is empty, or its newest range lies too high.
    fn alloc_slowly(
        &self,
        cpu: &Cpu,
        owner: u64,
        highest_zone: usize,
        backing: &Mutex<Backing>,
        request: Request,
    ) -> Result<Option<u64>, TreeError> {
        let Request { order, max_page, .. } = request;
        let inbox = &self.inboxes[owner as usize];
        let mut failed = Ok(None);
        for zone in (0..=highest_zone).rev() {
            let take = || cpu.take(&self.notes, zone, request, owner);
            if let Some(page) = take() {
                return Ok(Some(page));
            }
            // A slice only: what else has arrived is for the next calls.
            if cpu.receive(&self.notes, inbox, |page, order| self.keep(cpu, backing, page, order))
                && let Some(page) = take()
            {
                return Ok(Some(page));
            }
            if !cpu.is_empty(zone, order) {
                // What is there lies above the caller's limit: this one goes past the lists.
                return Ok(None);
            }
            let zone_end = if zone == 0 { self.low_end } else { u64::MAX };
            match self.refill(cpu, zone, order, max_page.min(zone_end.saturating_sub(1)), backing) {
                Ok(()) => return Ok(take()),
                Err(error @ TreeError::OutOfMemory { .. }) => return Err(error),
                Err(error) => failed = Err(error),
            }
        }
        failed
    }

    /// Fetches a block of ranges for the class; a single one where there is no room for more.
    fn refill(
        &self,
        cpu: &Cpu,
        zone: usize,
        order: u32,
        max_page: u64,
        backing: &Mutex<Backing>,
    ) -> Result<(), TreeError> {
        let room = self.budget[zone].saturating_sub(cpu.cached(zone));
        let most = BLOCK_PAGES.min(room / 2);
        let count = 1 << cpu.next_batch(zone, order, most).ilog2();
        let pages: u64 = count << order;
        let block = backing.lock().alloc(pages, pages.trailing_zeros(), max_page, count as usize);
        let no_block_here = match block {
            Ok(page) => self.zone(page) != zone,
            Err(error) => matches!(error, TreeError::NoFit { .. }),
        };
        let (page, count) = if no_block_here && count > 1 {
            // But perhaps a single range.
            let mut backing = backing.lock();
            block.iter().for_each(|page| backing.free(*page, pages, count as usize));
            (backing.alloc(1 << order, order, max_page, 1)?, 1)
        } else {
            (block?, count)
        };
        if self.notes.prepare(page, order, count).is_err() {
            backing.lock().free(page, count << order, count as usize);
            return Err(TreeError::OutOfMemory { nodes: 0, node_bytes: 0 });
        }
        cpu.set_block(zone, order, page + (count << order), count);
        Ok(())
    }

    /// Takes back a range that the caller's own CPU handed out, onto its list: the fast path. Whether it did.
    #[inline]
    pub fn put(&self, slot: Option<&LocalSlot<'_>>, page: u64, asked: u64, order: u32) -> bool {
        let (true, Some(own)) = (order < CACHED_ORDERS, slot) else {
            return false;
        };
        let pages = 1 << order;
        let Some(word) = self.notes.word(page, order) else {
            return false;
        };
        if word.load(Ordering::Relaxed) != handed_out(own.index() as u64, asked) {
            return false;
        }
        let zone = self.zone(page);
        let put = self.cpus.with(slot, |cpu| {
            let room = cpu.cached(zone) + pages <= self.budget[zone];
            if room {
                cpu.put(word, zone, order, page);
            }
            room
        });
        put == Some(true)
    }

    /// Takes back the range of `pages` pages at `page`, whoever handed it out.
    pub fn free(
        &self,
        slot: Option<&LocalSlot<'_>>,
        backing: &Mutex<Backing>,
        page: u64,
        pages: u64,
        order: u32,
    ) -> Result<(), ()> {
        let word = self.notes.word(page, order).ok_or(())?;
        let owner = match Note::decode(word.load(Ordering::Relaxed)) {
            Note::HandedOut { owner, pages: asked } if asked == pages => owner,
            _ => return Err(()),
        };
        if owner < EXACT {
            let own = slot.map(|slot| slot.index() as u64);
            let kept = self.cpus.with(slot, |cpu| {
                if own == Some(owner) {
                    self.keep(cpu, backing, page, order);
                } else if !cpu.post(
                    &self.notes,
                    &self.inboxes,
                    owner,
                    order,
                    page,
                    self.budget[self.zone(page)],
                ) {
                    self.give_back(backing, page, 1 << order, order);
                }
            });
            if kept.is_some() {
                return Ok(());
            }
        }
        let size = if owner == EXACT || order >= CACHED_ORDERS { pages } else { 1 << order };
        self.give_back(backing, page, size, order);
        Ok(())
    }

    /// Puts a range onto the CPU's list. Where the CPU keeps its share already, halves of lists go to the
    /// backing structure before, those of the largest ranges first, or else the range itself.
    #[cold]
    fn keep(&self, cpu: &Cpu, backing: &Mutex<Backing>, page: u64, order: u32) {
        let zone = self.zone(page);
        let pages = 1 << order;
        let over = |cpu: &Cpu| cpu.cached(zone) + pages > self.budget[zone];
        // The largest first: they have been of no use for the longest, and free the most.
        for order in (0..CACHED_ORDERS).rev().take_while(|_| over(cpu)) {
            cpu.spill(&self.notes, zone, order, |page| self.give_back(backing, page, 1 << order, order));
        }
        match self.notes.word(page, order) {
            Some(word) if !over(cpu) => cpu.put(word, zone, order, page),
            _ => self.give_back(backing, page, pages, order),
        }
    }

    /// Notes that a range is handed out past the lists.
    pub fn hand_out(&self, page: u64, asked: u64, order: u32, owner: u64) -> Result<(), OutOfMemory> {
        self.notes.hand_out(page, order, owner, asked)
    }

    /// Empties the lists of every CPU, or of one.
    pub fn drain<P: Platform>(&self, platform: &P, only: Option<usize>, backing: &Mutex<Backing>) {
        self.cpus.with_others(platform, only, |index, cpu| {
            cpu.drain(&self.notes, &self.inboxes[index], |drained| {
                // A slot for each, so that none is held for long.
                platform.with_slot(|_| match drained {
                    Drained::Range { page, order } => self.give_back(backing, page, 1 << order, order),
                    // Its ranges were never handed out, so nothing is noted of them.
                    Drained::Block { page, pages, count } => backing.lock().free(page, pages, count),
                });
            });
        });
    }

    /// Pages that CPUs keep, or have on their way to each other.
    pub fn pages(&self) -> u64 {
        self.cpus.peek().fold(0, |sum: u64, cpu| {
            let kept = (0..ZONES).fold(0, |sum: u64, zone| sum.wrapping_add(cpu.cached(zone)));
            sum.wrapping_add(kept).wrapping_add(cpu.on_their_way())
        })
    }

    /// Bytes of memory that all this takes.
    pub fn bytes(&self) -> usize {
        let slot = size_of::<CachePadded<Cpu>>() + size_of::<CachePadded<Inbox>>();
        self.notes.bytes() + self.cpus.slots() * slot
    }

    fn give_back(&self, backing: &Mutex<Backing>, page: u64, pages: u64, order: u32) {
        // Before anybody else can get the range and note it as theirs.
        self.notes.write(page, order, Note::None);
        backing.lock().free(page, pages, 1);
    }

    #[inline]
    fn zone(&self, page: u64) -> usize {
        usize::from(page >= self.low_end)
    }
}
