//! One hardware wait for all callers that wait at the same time. A [`SharedQueue`] returns `Ok` to
//! a caller only when the hardware has confirmed a submission that covers all of the caller's
//! requests and began after these were made.
//!
//! This is group commit, as databases do it for their logs, by flat combining (Hendler and others, SPAA 2010), in two levels. CPUs 0 to 15 are
//! a group, then 16 to 31, and so on. A CPU that needs an invalidation says so on a cache line of its own, and waits. One of the CPUs of a
//! group that wait is its *leader*: it takes what all of them ask for. Leaders of groups meet in the same way (`shared/meeting.rs`), and one of them
//! submits for all, with one wait. A leader answers its callers by one store, to a word that all of them poll. If only one group is active, its
//! leader submits at once. A CPU that finds no other caller submits without taking a slot.
//!
//! **Linger.** A leader that submits at once leaves out the CPUs that were just answered and have the
//! next request ready a moment later: they would all wait twice as long. So a leader that has company looks again until all are there that were there
//! in the last two rounds, or none came for some looks, up to [`LINGER`]. Where that was in vain lately, it looks less.
//!
//! **Bound.** As a rule, a request is in the submission after the one under way, so it waits for two. A group's leader may close its list just before a
//! submission begins, and miss that. The leader after it may miss another one. So a request waits for five submissions at the most, however many CPUs there are. What does
//! not fit into one submission ([`BATCH`]) goes in several, one after the other, and all have their turn: where callers ask for more than 64 requests of different
//! domains, each waits for two times as many submissions as these requests need. Where all together ask for more than 32, a caller's several ranges of one domain become
//! the whole domain.
//!
//! **Failure.** Every CPU is told what the hardware reports for the submission with its requests, and for no other.
//!
//! **Devices' own TLBs.** A submission that asks a device to forget ([`Invalidation::DeviceTlb`])
//! is in no batch: it goes as a whole to the hardware's queue at once, beside a batch that may be
//! under way. A device may take long to answer, or never do so; this way it delays, and fails, its
//! own domain and not every CPU in its batch. So does what is longer than a batch.
//!
//! **More threads than cores.** A leader without a core costs everybody a time slice. So if more callers wait than there are cores
//! or slots, the first caller that runs takes the lead, and waiting callers yield their cores. A caller that finds no free slot in its group submits alone.

mod batch;
mod meeting;

use alloc::boxed::Box;

use super::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::DomainId;
use crate::heap::{self, OutOfMemory};
use crate::percpu::CachePadded;
use crate::sync::{AtomicBool, AtomicU64, Ordering, cores, pause, spin, spin_among, thread_number};
use batch::BATCH;
use meeting::{Held, Lead, Meeting, SLOTS};

/// How often a leader looks in vain whether more come, after each that came: the callers of a group, and the groups, which take longer.
const LINGER: u64 = if cfg!(loom) { 1 } else { 16 };
const TOP_LINGER: u64 = if cfg!(loom) { 1 } else { 64 };

/// In every eighth round the leader lingers as long as it may, to find out whether that pays again.
const PROBE: u64 = 8;

/// How often a CPU looks for its answer before it tells the scheduler: for some
/// microseconds, longer than hardware mostly takes.
const SPINS: u32 = 256;

/// For how many looks others leave the lead to the caller that should have it.
const PATIENCE: u32 = if cfg!(loom) { 1 } else { 4 };
const TOP_PATIENCE: u32 = if cfg!(loom) { 1 } else { 16 };

/// A submission that costs less than this, in nanoseconds, costs less than to share it.
const SHARED_FROM_NS: u32 = 100;

/// A queue that shares its waits among all callers that use it at the same time.
///
/// Every domain of an IOMMU uses one of these, in an `Arc`.
#[derive(Debug)]
pub struct SharedQueue<Q> {
    queue: Q,
    machine: CachePadded<Machine>,
    /// In the last round of a group there were more callers than cores, or than slots.
    crowded: CachePadded<AtomicBool>,
    /// Submissions of one caller's requests alone, beside those of the leaders.
    alone: CachePadded<AtomicU64>,
}

/// What does not change.
#[derive(Debug)]
struct Machine {
    /// Where callers meet, if a wait is worth sharing.
    meetings: Option<Meetings>,
    /// The number of the CPU that calls; none in an interrupt handler.
    cpu: fn() -> Option<usize>,
    /// Threads that run at once.
    cores: u64,
}

#[derive(Debug)]
struct Meetings {
    /// Where leaders of groups meet.
    top: Meeting,
    groups: Box<[Meeting]>,
}

impl Meetings {
    /// Meetings for `cpus` CPUs.
    fn new(cpus: u64) -> Result<Self, OutOfMemory> {
        // No truncation: no more than there are slots.
        let groups = cpus.div_ceil(SLOTS as u64).clamp(1, SLOTS as u64) as usize;
        Ok(Self { top: Meeting::new()?, groups: heap::slice(groups, |_| Meeting::new())? })
    }
}

/// Who waits where.
#[derive(Clone, Copy)]
enum Level<'a> {
    /// A caller among those of the group of this number.
    Group(usize, &'a Meeting),
    /// A leader among those of groups.
    Top,
}

impl<Q: InvalidationQueue> SharedQueue<Q> {
    /// Shares the waits of `queue`, if it states that a submission costs 100 ns or more; otherwise
    /// each caller submits alone. So it does where the heap has no memory for the sharing: 5 KiB for each 16 CPUs and as much once more;
    /// without `std`, which knows how many CPUs there are, 85 KiB.
    ///
    /// Each thread has a number of its own; without `std`, each stack. In interrupt handlers it may not be used:
    /// for that, and for CPUs that are near each other, there is [`with_cpus`](Self::with_cpus).
    pub fn new(queue: Q) -> Self {
        Self::with_cpus(queue, || Some(thread_number()))
    }

    /// As [`new`](Self::new), where `cpu` says which CPU calls: CPUs 0 to 15 share waits among themselves before they share
    /// them with others, then 16 to 31, and so on, so these should be near each other. The number is a hint: it may be out of date at once.
    ///
    /// `None` stands for a caller that must not wait for other callers: an interrupt handler or a softirq, which may have interrupted the one that
    /// it would wait for; and any other code that may have taken the place of a caller on its CPU and keeps it from running, as a thread
    /// with a spinlock held may where callers can be preempted. It submits alone, and waits for hardware only.
    pub fn with_cpus(queue: Q, cpu: fn() -> Option<usize>) -> Self {
        Self::made(queue, cpu, cores())
    }

    /// For so many CPUs.
    fn made(queue: Q, cpu: fn() -> Option<usize>, cores: u64) -> Self {
        let shares = queue.costs().submission_ns >= SHARED_FROM_NS;
        let meetings = if shares { Meetings::new(cores).ok() } else { None };
        let machine = CachePadded(Machine { meetings, cpu, cores });
        Self {
            queue,
            machine,
            crowded: CachePadded(AtomicBool::new(false)),
            alone: CachePadded(AtomicU64::new(0)),
        }
    }

    /// The queue itself.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Gives the queue back.
    pub fn into_inner(self) -> Q {
        self.queue
    }

    /// How many batches were submitted, and submissions beside them: the number of hardware waits,
    /// however many callers waited for each.
    pub fn submissions(&self) -> u64 {
        let rounds = self.machine.0.meetings.as_ref().map_or(0, |meetings| meetings.top.rounds());
        rounds + self.alone.0.load(Ordering::Relaxed)
    }

    fn alone(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.alone.0.fetch_add(1, Ordering::Relaxed);
        self.queue.submit(requests)
    }

    /// Waits for the answer, and leads where nobody does.
    fn wait(&self, meetings: &Meetings, level: Level<'_>, held: &Held<'_>) -> Result<(), InvalidationError> {
        let (meeting, patience) = match level {
            Level::Group(_, group) => (group, PATIENCE),
            Level::Top => (&meetings.top, TOP_PATIENCE),
        };
        let (mut looks, mut last, mut since) = (0_u32, meeting.state(), 0_u32);
        loop {
            let state = meeting.state();
            if let Some(answer) = held.answer(state) {
                return answer;
            }
            let crowded = self.crowded.0.load(Ordering::Relaxed);
            since = if state == last { since.saturating_add(1) } else { 0 };
            last = state;
            if state.is_quiet() && matches!(level, Level::Top) {
                meeting.want();
            }
            let may_lead =
                !state.is_busy() && (state.is_turn_of(held.number) || since >= patience || crowded);
            if may_lead && let Some(lead) = held.lead() {
                match level {
                    Level::Group(number, _) => self.lead_group(meetings, number, lead),
                    Level::Top => self.lead(lead),
                }
            } else {
                looks = self.rest(looks);
            }
        }
    }

    /// Between two looks, of which there were `looks`: gives the core away where others need it, or after many. Returns how many there were.
    fn rest(&self, looks: u32) -> u32 {
        if looks == SPINS || self.crowded.0.load(Ordering::Relaxed) {
            pause();
            return looks;
        }
        spin_among(looks);
        looks + 1
    }

    /// Takes what the callers of a group ask for, and asks for that among the leaders of groups.
    fn lead_group(&self, meetings: &Meetings, number: usize, mut lead: Lead<'_>) {
        lead.begin();
        self.linger(&mut lead, LINGER);
        let (before, mut looks) = (meetings.top.state(), 0_u32);
        let mut has_company = before.is_busy();
        // Those that come while hardware works are in the next submission: of that one, not of a later one, of which this might miss each beginning.
        let mut now = before;
        while now.is_busy() && now.is_same_round(before) {
            looks = self.rest(looks);
            lead.take_more();
            now = meetings.top.state();
        }
        // No other group submits.
        if let Some(top) = meetings.top.lead_alone(number) {
            let result = self.queue.submit(lead.batch().requests());
            top.finish(result, false);
            return self.end(lead, result, has_company);
        }
        // There is one, as nobody but its leader asks for a group.
        let Some(held) = meetings.top.hold(number) else {
            let result = self.alone(lead.batch().requests());
            return self.end(lead, result, true);
        };
        let requests = lead.batch().requests();
        let result = held.ask(requests, |held| self.wait(meetings, Level::Top, held));
        has_company |= meetings.top.last() > 1;
        self.end(lead, result, has_company);
    }

    /// Answers a group.
    fn end(&self, lead: Lead<'_>, result: Result<(), InvalidationError>, has_company: bool) {
        let callers = lead.finish(result, has_company) as usize;
        if callers as u64 > self.machine.0.cores {
            self.crowds(true);
        } else if callers < SLOTS {
            self.crowds(false);
        }
    }

    /// Whether there are more callers than cores, as far as a caller knows.
    fn crowds(&self, crowded: bool) {
        let known = &self.crowded.0;
        if known.load(Ordering::Relaxed) != crowded {
            known.store(crowded, Ordering::Relaxed);
        }
    }

    /// Takes what groups ask for, and submits it.
    fn lead(&self, mut lead: Lead<'_>) {
        lead.begin();
        self.linger(&mut lead, TOP_LINGER);
        lead.submits();
        let result = self.queue.submit(lead.batch().requests());
        lead.finish(result, false);
    }

    /// Gives the callers that were just answered time to come with their next request, and takes those that come.
    fn linger(&self, lead: &mut Lead<'_>, most: u64) {
        // Where not all of them can be running, a look is one turn for others on this core.
        let crowded = self.crowded.0.load(Ordering::Relaxed);
        let rest: fn() = if crowded { pause } else { spin };
        let may = lead.looks(most, PROBE);
        let mut looks = 0;
        while looks < may && lead.missing() != 0 && !lead.is_full() {
            rest();
            looks += 1;
            if lead.has_come() && lead.take_more() {
                looks = 0;
            }
        }
        lead.take_more();
        lead.lingered(may, most);
    }
}

// SAFETY: `Ok` is returned to a caller whose own submission `Q` has confirmed, or who was answered after `Q` has confirmed a batch
// that covers all its requests (`Batch`), and was submitted after it had asked (`Meeting`). Of two calls that return `Ok`, the batches, or
// submissions, are calls of `Q`, which are in one order; what callers stored before they asked is before the call of `Q` by
// the leader, and they are answered after it. Two callers of one batch see what both had stored.
unsafe impl<Q: InvalidationQueue> InvalidationQueue for SharedQueue<Q> {
    fn costs(&self) -> Costs {
        self.queue.costs()
    }

    fn caches_absent(&self) -> bool {
        self.queue.caches_absent()
    }

    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    /// Asks among the others, and waits for the batch that the requests are in; those for devices' own TLBs, and those that are
    /// more than a batch holds, are in none.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let is_for_device =
            |request: &Request| matches!(request.invalidation, Invalidation::DeviceTlb { .. });
        let Some(meetings) = &self.machine.0.meetings else { return self.alone(requests) };
        if requests.len() > BATCH || requests.iter().any(is_for_device) {
            return self.alone(requests);
        }
        let Some(cpu) = (self.machine.0.cpu)() else { return self.alone(requests) };
        let number = cpu / SLOTS % meetings.groups.len();
        let group = &meetings.groups[number];
        // Nobody else seems to be there.
        if group.state().is_quiet()
            && let Some(lead) = meetings.top.lead_alone(number)
        {
            let result = self.queue.submit(requests);
            lead.finish(result, false);
            return result;
        }
        // More callers than CPUs: some of them wait for nobody.
        let Some(held) = group.hold(cpu % SLOTS) else {
            self.crowds(true);
            return self.alone(requests);
        };
        held.ask(requests, |held| self.wait(meetings, Level::Group(number, group), held))
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
