//! Callers that share waits for hardware: see [`SharedQueue`](super::SharedQueue).

use alloc::boxed::Box;

use super::batch::BATCH;
use super::held::Held;
use super::lead::Lead;
use super::meeting::Meeting;
use super::state::SLOTS;
use super::under_way::{Submission, UnderWay};
use crate::heap::{self, OutOfMemory};
use crate::invalidation::{Invalidation, InvalidationError, Request};
use crate::percpu::CachePadded;
use crate::sync::{AtomicBool, Ordering, pause, spin, spin_among};

/// How often a leader looks without a new caller before it submits, in a group and among groups (which take longer); an arrival restarts
/// the count.
const LINGER: u64 = if cfg!(loom) { 1 } else { 16 };
const TOP_LINGER: u64 = if cfg!(loom) { 1 } else { 64 };

/// In every eighth round the leader lingers for as long as it may, to find out whether that pays again.
const PROBE: u64 = 8;

/// Looks of a CPU for its answer before it yields to the scheduler: some microseconds, longer than hardware usually takes.
const SPINS: u32 = 256;

/// Looks of a group's leader for the end of a submission under way: it ends long before. The model checker leaves plain stores of two
/// threads unordered, may read either of them for ever, and so would look for ever.
const UNDER_WAY: u32 = if cfg!(loom) { 2 } else { u32::MAX };

/// How often others look before they stop leaving the lead to the preferred caller.
const PATIENCE: u32 = if cfg!(loom) { 1 } else { 4 };
const TOP_PATIENCE: u32 = if cfg!(loom) { 1 } else { 16 };

/// Shared waits of CPUs for one hardware queue: one wait for all callers that wait at the same time. A driver keeps it beside its queue; a
/// [`SharedQueue`](super::SharedQueue) is this and a queue.
///
/// - As a rule a request is in the submission after the one under way. It waits for at most five submissions if leaders are prompt,
///   whatever the number of CPUs, plus those that end while a leader lingers or is preempted; if callers have more than 64 requests for
///   different domains, for at most twice as many as all of them need. A caller waits for others as long as their submissions take, without
///   a limit of its own: one that never goes on, as its CPU has stopped, keeps the others for ever.
/// - Each caller gets the result of the submission with its own requests.
/// - Device-TLB invalidations, and more than 64 requests at once, go alone.
/// - Nothing is allocated after [`new`](Self::new).
#[derive(Debug)]
pub struct SharedWaits {
    machine: CachePadded<Machine>,
    /// In the last round of a group there were more callers than cores, or than slots.
    crowded: CachePadded<AtomicBool>,
}

#[derive(Debug)]
struct Machine {
    meetings: Option<Meetings>,
    cores: u64,
}

#[derive(Debug)]
struct Meetings {
    top: Meeting,
    under_way: UnderWay,
    groups: Box<[Meeting]>,
}

impl Meetings {
    fn new(cpus: u64) -> Result<Self, OutOfMemory> {
        let groups = cpus.div_ceil(SLOTS as u64).clamp(1, SLOTS as u64) as usize;
        Ok(Self {
            top: Meeting::new()?,
            under_way: UnderWay::new(),
            groups: heap::slice(groups, |_| Meeting::new())?,
        })
    }

    /// For a submission beside no other: the last rounds had one caller, and none is under way.
    fn alone(&self) -> Option<Submission<'_>> {
        (self.top.is_quiet() && self.under_way.now().is_none()).then(|| self.under_way.begin())
    }
}

#[derive(Clone, Copy)]
enum Level<'a> {
    /// A caller in the group of this number.
    Group(usize, &'a Meeting),
    /// A group's leader among the leaders, and whether it has met another submission.
    Top { has_company: bool },
}

impl SharedWaits {
    /// For the CPUs 0 to `cpus` - 1; higher numbers share with lower ones. CPUs 0 to 15 share waits among themselves before they share them
    /// with others, then 16 to 31, and so on up to 255. Takes 5 KiB for each 16 CPUs, and 5 KiB more: 85 KiB at most. With no CPU, and
    /// without memory, each caller submits alone.
    pub fn new(cpus: usize) -> Self {
        let meetings = if cpus == 0 { None } else { Meetings::new(cpus as u64).ok() };
        let machine = CachePadded(Machine { meetings, cores: cpus as u64 });
        Self { machine, crowded: CachePadded(AtomicBool::new(false)) }
    }

    /// These requests, if they may go with those of other callers: not if waits are not shared, nor if they are more than a batch holds,
    /// nor if one is a device-TLB invalidation, which may take long.
    #[inline]
    pub fn share<'a>(&'a self, requests: &'a [Request]) -> Option<Shareable<'a>> {
        let meetings = self.machine.0.meetings.as_ref()?;
        let is_for_device =
            |request: &Request| matches!(request.invalidation, Invalidation::DeviceTlb { .. });
        let may = requests.len() <= BATCH && !requests.iter().any(is_for_device);
        may.then_some(Shareable { waits: self, meetings, requests })
    }

    /// Waits for the answer, and takes the lead if nobody has it.
    fn wait(
        &self,
        meetings: &Meetings,
        level: Level<'_>,
        held: &Held<'_>,
        hardware: &impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let (meeting, patience) = match level {
            Level::Group(_, group) => (group, PATIENCE),
            Level::Top { .. } => (&meetings.top, TOP_PATIENCE),
        };
        let (mut looks, mut last) = (0_u32, held.last());
        // Looks for which it leaves the lead to the preferred caller, and does not look at lines that all callers want.
        let mut patient = if last.is_turn_of(held.number) { 0 } else { patience };
        loop {
            if let Some(answer) = held.answer() {
                return answer;
            }
            let crowded = self.crowded.0.load(Ordering::Relaxed);
            if (crowded || patient == 0) && !meeting.is_led() {
                let state = meeting.state();
                let may_lead = crowded || state.is_turn_of(held.number) || state == last;
                (last, patient) = (state, patience);
                if may_lead && let Some(lead) = held.lead() {
                    match level {
                        Level::Group(number, _) => self.lead_group(meetings, number, lead, hardware),
                        Level::Top { has_company } => self.lead(meetings, lead, has_company, hardware),
                    }
                    continue;
                }
            }
            looks = self.rest(looks);
            patient = patient.saturating_sub(1);
        }
    }

    /// Pauses after `looks` looks: yields the core if others need it, or after many. Returns the number of looks.
    fn rest(&self, looks: u32) -> u32 {
        if looks == SPINS || self.crowded.0.load(Ordering::Relaxed) {
            pause();
            return looks;
        }
        spin_among(looks);
        looks + 1
    }

    /// Leads a group: collects its requests, and takes them to the leaders' meeting.
    fn lead_group(
        &self,
        meetings: &Meetings,
        number: usize,
        mut lead: Lead<'_>,
        hardware: &impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) {
        let top = &meetings.top;
        meetings.under_way.fetch();
        lead.begin();
        self.linger(&mut lead, LINGER);
        let before = meetings.under_way.now();
        // Callers that come while the hardware works join the next submission. The leader waits for the end of this one only.
        if before.is_some() {
            let mut looks = 0;
            for _ in 0..UNDER_WAY {
                // A caller that asked before the end is mostly found after it.
                let is_over = meetings.under_way.now() != before;
                lead.take_more();
                if is_over {
                    break;
                }
                looks = self.rest(looks);
            }
        }
        if before.is_none()
            && let Some(submission) = meetings.alone()
        {
            let result = hardware(lead.batch().requests());
            drop(submission);
            return self.end(lead, result, false);
        }
        // Another one may have begun since.
        let has_company = before.is_some() || meetings.under_way.now().is_some();
        // There is a slot, as only a group's leader takes one here.
        let Some(held) = Held::new(top, number) else {
            let result = hardware(lead.batch().requests());
            return self.end(lead, result, true);
        };
        let requests = lead.batch().requests();
        let (result, had_company) = held.ask(requests, |held| {
            let level = Level::Top { has_company };
            (self.wait(meetings, level, held, hardware), held.last().had_company())
        });
        self.end(lead, result, has_company || had_company);
    }

    fn end(&self, lead: Lead<'_>, result: Result<(), InvalidationError>, has_company: bool) {
        let callers = lead.finish(result, has_company) as usize;
        if callers as u64 > self.machine.0.cores {
            self.crowds(true);
        } else if callers < SLOTS {
            self.crowds(false);
        }
    }

    fn crowds(&self, crowded: bool) {
        let known = &self.crowded.0;
        if known.load(Ordering::Relaxed) != crowded {
            known.store(crowded, Ordering::Relaxed);
        }
    }

    fn lead(
        &self,
        meetings: &Meetings,
        mut lead: Lead<'_>,
        has_company: bool,
        hardware: &impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) {
        lead.begin();
        self.linger(&mut lead, TOP_LINGER);
        let submission = meetings.under_way.begin();
        let result = hardware(lead.batch().requests());
        drop(submission);
        lead.finish(result, has_company);
    }

    /// Gives callers that were just answered time to come again, and collects their requests.
    fn linger(&self, lead: &mut Lead<'_>, most: u64) {
        // Where not all can run, a look yields the core once.
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

/// Requests that may go with those of other callers: [`SharedWaits::share`].
#[derive(Debug)]
pub struct Shareable<'a> {
    waits: &'a SharedWaits,
    meetings: &'a Meetings,
    requests: &'a [Request],
}

impl Shareable<'_> {
    /// Submits the requests by `hardware`, which waits for their end; or by the `hardware` of another caller, in one batch with others'
    /// requests. A batch has requests, and nothing else of a caller: so every caller's `hardware` must do the same for the same requests.
    /// After `Ok`, some call of a `hardware` that began after this call, with requests that cover all of these, has returned `Ok`.
    ///
    /// `cpu` returns the calling CPU, a hint that may be out of date at once; or `None` if the caller must not wait for other callers
    /// ([`SharedQueue::with_cpus`](super::SharedQueue::with_cpus)): then it submits alone.
    ///
    /// Context: waits for hardware and, unless `cpu` returns `None`, for other callers. Allocates nothing.
    ///
    /// # Errors
    /// The result of the submission; [`InvalidationError::Abandoned`] if the caller that made it panicked.
    pub fn submit(
        self,
        cpu: impl FnOnce() -> Option<usize>,
        hardware: impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let Self { waits, meetings, requests } = self;
        let Some(cpu) = cpu() else { return hardware(requests) };
        let number = cpu / SLOTS % meetings.groups.len();
        let group = &meetings.groups[number];
        if group.is_quiet()
            && let Some(submission) = meetings.alone()
        {
            let result = hardware(requests);
            if submission.had_company() {
                meetings.top.expects_company();
            }
            return result;
        }
        // More callers than CPUs: some of them submit alone.
        let Some(held) = Held::new(group, cpu % SLOTS) else {
            waits.crowds(true);
            return hardware(requests);
        };
        held.ask(requests, |held| waits.wait(meetings, Level::Group(number, group), held, &hardware))
    }
}

#[cfg(all(test, not(loom)))]
#[path = "tests.rs"]
mod tests;
