//! Callers that share waits for hardware: see [`SharedQueue`](super::SharedQueue).

use alloc::boxed::Box;

use super::batch::BATCH;
use super::group::Group;
use super::in_flight::{InFlight, Submission};
use super::leader::Leader;
use super::state::SLOTS;
use super::waiter::Waiter;
use crate::heap::{self, OutOfMemory};
use crate::invalidation::{Invalidation, InvalidationError, Request};
use crate::percpu::CachePadded;
use crate::sync::{AtomicBool, Ordering, pause, spin, spin_among};

/// Polls without a new caller before a leader submits, in a group and among the leaders of groups (which take longer). A new caller
/// restarts the count.
const LINGER: u64 = if cfg!(loom) { 1 } else { 16 };
const TOP_LINGER: u64 = if cfg!(loom) { 1 } else { 64 };

/// Every eighth round the leader lingers for as long as it may, to find out whether that pays again.
const PROBE: u64 = 8;

/// Polls for the answer before a caller yields to the scheduler: some microseconds, longer than hardware usually takes.
const SPINS: u32 = 256;

/// Polls of a group's leader for the end of a submission in flight, which ends long before. Under loom few: it leaves relaxed stores of two
/// threads unordered, and may return the older one for ever.
const IN_FLIGHT_POLLS: u32 = if cfg!(loom) { 2 } else { u32::MAX };

/// Polls for which other callers leave the lead to the preferred one.
const PATIENCE: u32 = if cfg!(loom) { 1 } else { 4 };
const TOP_PATIENCE: u32 = if cfg!(loom) { 1 } else { 16 };

/// Shared waits of CPUs for one hardware queue: one wait for all callers that wait at the same time. A driver keeps it beside its queue; a
/// [`SharedQueue`](super::SharedQueue) is this and a queue.
///
/// - Each caller gets the result of the submission with its own requests.
/// - As a rule a request is in the submission after the one in flight. If leaders are prompt, it waits for at most five submissions, however many
///   CPUs there are. While a leader lingers or is preempted, further submissions may end; the request waits for these, too.
/// - If callers together have more than 64 requests for different domains, a request waits for at most twice as many submissions as all requests
///   need.
/// - A wait for another caller has no timeout of its own: if a leader's CPU stops for good, the callers that it serves wait for ever.
/// - Device-TLB invalidations, and more than 64 requests at once, are not shared.
/// - Nothing is allocated after [`new`](Self::new).
#[derive(Debug)]
pub struct SharedWaits {
    fixed: CachePadded<Fixed>,
    /// A group's last round had more callers than cores, or a caller found no slot.
    oversubscribed: CachePadded<AtomicBool>,
}

#[derive(Debug)]
struct Fixed {
    levels: Option<Levels>,
    cores: u64,
}

#[derive(Debug)]
struct Levels {
    top: Group,
    in_flight: InFlight,
    groups: Box<[Group]>,
}

impl Levels {
    fn new(cpus: u64) -> Result<Self, OutOfMemory> {
        let groups = cpus.div_ceil(SLOTS as u64).clamp(1, SLOTS as u64) as usize;
        Ok(Self {
            top: Group::new()?,
            in_flight: InFlight::new(),
            groups: heap::slice(groups, |_| Group::new())?,
        })
    }

    /// Begins a submission, if none is in flight, and the leaders' group is uncontended.
    fn alone(&self) -> Option<Submission<'_>> {
        (self.top.is_uncontended() && self.in_flight.now().is_none()).then(|| self.in_flight.begin())
    }
}

#[derive(Clone, Copy)]
enum Level<'a> {
    /// A caller in the group of this number.
    Group(usize, &'a Group),
    /// A group's leader in the leaders' group. `overlaps`: it has seen another submission.
    Top { overlaps: bool },
}

impl SharedWaits {
    /// For the CPUs 0 to `cpus` - 1; higher numbers join the groups of lower ones. CPUs 0 to 15 are the first *group*, 16 to 31 the next,
    /// and so on up to 255: a group shares waits among its own CPUs before it shares them with other groups. Takes 5 KiB for each 16 CPUs,
    /// and 5 KiB more: 85 KiB at most. If `cpus` is 0, or there is no memory, each caller submits alone.
    pub fn new(cpus: usize) -> Self {
        let levels = if cpus == 0 { None } else { Levels::new(cpus as u64).ok() };
        let fixed = CachePadded(Fixed { levels, cores: cpus as u64 });
        Self { fixed, oversubscribed: CachePadded(AtomicBool::new(false)) }
    }

    /// Whether [`submit`](Self::submit) may share a submission of these requests with other callers. Not if waits are not shared, if they are
    /// more than a batch holds, or if one is a device-TLB invalidation, which may take long.
    #[inline]
    pub fn shares(&self, requests: &[Request]) -> bool {
        self.levels_for(requests).is_some()
    }

    #[inline]
    fn levels_for(&self, requests: &[Request]) -> Option<&Levels> {
        let levels = self.fixed.0.levels.as_ref()?;
        let is_for_device =
            |request: &Request| matches!(request.invalidation, Invalidation::DeviceTlb { .. });
        let may = requests.len() <= BATCH && !requests.iter().any(is_for_device);
        may.then_some(levels)
    }

    /// Submits the requests: alone by `hardware`, which returns when the hardware has confirmed them, or, if they [may share a
    /// submission](Self::shares), in a batch by another caller's `hardware`. So every caller's `hardware` must do the same for the same
    /// requests. After `Ok`, a call of some caller's `hardware` that began after this call, with requests that cover all of these, has
    /// returned `Ok`.
    ///
    /// `cpu` returns the calling CPU, a hint that may be out of date at once; or `None` if the caller must not wait for other callers
    /// ([`SharedQueue::with_cpus`](super::SharedQueue::with_cpus)): then it submits alone.
    ///
    /// Context: waits for hardware and, unless `cpu` returns `None`, for other callers. Allocates nothing.
    ///
    /// # Errors
    /// The result of the submission; [`InvalidationError::Abandoned`] if the caller that made it panicked.
    pub fn submit(
        &self,
        requests: &[Request],
        cpu: impl FnOnce() -> Option<usize>,
        hardware: impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let Some(levels) = self.levels_for(requests) else { return hardware(requests) };
        let Some(cpu) = cpu() else { return hardware(requests) };
        let number = cpu / SLOTS % levels.groups.len();
        let group = &levels.groups[number];
        if group.is_uncontended()
            && let Some(submission) = levels.alone()
        {
            let result = hardware(requests);
            if submission.overlapped() {
                levels.top.mark_contended();
            }
            return result;
        }
        // More callers than slots.
        let Some(waiter) = Waiter::new(group, cpu % SLOTS) else {
            self.set_oversubscribed(true);
            return hardware(requests);
        };
        waiter.publish(requests, |waiter| self.wait(levels, Level::Group(number, group), waiter, &hardware))
    }

    /// Waits for the answer, and leads if no other caller does.
    fn wait(
        &self,
        levels: &Levels,
        level: Level<'_>,
        waiter: &Waiter<'_>,
        hardware: &impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let (group, patience) = match level {
            Level::Group(_, group) => (group, PATIENCE),
            Level::Top { .. } => (&levels.top, TOP_PATIENCE),
        };
        let (mut polls, mut last) = (0_u32, waiter.last());
        // Polls left for which this caller leaves the lead to the preferred one, and reads no line that all callers poll.
        let mut patient = if last.may_lead(waiter.number) { 0 } else { patience };
        loop {
            if let Some(answer) = waiter.answer() {
                return answer;
            }
            let oversubscribed = self.oversubscribed.0.load(Ordering::Relaxed);
            if (oversubscribed || patient == 0) && !group.has_leader() {
                let state = group.state();
                // If the word is the same as at the last check, the preferred caller does not come.
                let may_lead = oversubscribed || state.may_lead(waiter.number) || state == last;
                (last, patient) = (state, patience);
                if may_lead && let Some(leader) = waiter.try_lead() {
                    match level {
                        Level::Group(number, _) => self.lead_group(levels, number, leader, hardware),
                        Level::Top { overlaps } => self.lead_top(levels, leader, overlaps, hardware),
                    }
                    continue;
                }
            }
            polls = self.relax(polls);
            patient = patient.saturating_sub(1);
        }
    }

    /// Pauses after a number of polls: yields the core if others need it, or after [`SPINS`]. Returns the new number.
    fn relax(&self, polls: u32) -> u32 {
        if polls == SPINS || self.oversubscribed.0.load(Ordering::Relaxed) {
            pause();
            return polls;
        }
        spin_among(polls);
        polls + 1
    }

    /// Leads a group: collects its requests, and submits them alone or through the leaders' group.
    fn lead_group(
        &self,
        levels: &Levels,
        number: usize,
        mut leader: Leader<'_>,
        hardware: &impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) {
        let top = &levels.top;
        levels.in_flight.fetch();
        leader.begin();
        self.linger(&mut leader, LINGER);
        let before = levels.in_flight.now();
        // While the hardware works, more callers join the next submission. The leader waits for the end of this one only.
        if before.is_some() {
            let mut polls = 0;
            for _ in 0..IN_FLIGHT_POLLS {
                // Read first, so that callers that published before the end are collected, as a rule.
                let is_over = levels.in_flight.now() != before;
                leader.collect_more();
                if is_over {
                    break;
                }
                polls = self.relax(polls);
            }
        }
        if before.is_none()
            && let Some(submission) = levels.alone()
        {
            let result = hardware(leader.batch().requests());
            drop(submission);
            return self.finish(leader, result, false);
        }
        // Another submission may have begun since.
        let overlaps = before.is_some() || levels.in_flight.now().is_some();
        // There are as many slots as groups, and only groups' leaders take them: so one is free.
        let Some(waiter) = Waiter::new(top, number) else {
            let result = hardware(leader.batch().requests());
            return self.finish(leader, result, true);
        };
        let requests = leader.batch().requests();
        let (result, had_several) = waiter.publish(requests, |waiter| {
            let level = Level::Top { overlaps };
            (self.wait(levels, level, waiter, hardware), waiter.last().had_several())
        });
        self.finish(leader, result, overlaps || had_several);
    }

    fn finish(&self, leader: Leader<'_>, result: Result<(), InvalidationError>, overlaps: bool) {
        let callers = leader.finish(result, overlaps) as usize;
        if callers as u64 > self.fixed.0.cores {
            self.set_oversubscribed(true);
        } else if callers < SLOTS {
            self.set_oversubscribed(false);
        }
    }

    fn set_oversubscribed(&self, oversubscribed: bool) {
        let hint = &self.oversubscribed.0;
        if hint.load(Ordering::Relaxed) != oversubscribed {
            hint.store(oversubscribed, Ordering::Relaxed);
        }
    }

    fn lead_top(
        &self,
        levels: &Levels,
        mut leader: Leader<'_>,
        overlaps: bool,
        hardware: &impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) {
        leader.begin();
        self.linger(&mut leader, TOP_LINGER);
        let submission = levels.in_flight.begin();
        let result = hardware(leader.batch().requests());
        drop(submission);
        leader.finish(result, overlaps);
    }

    /// Waits a moment for callers that were just answered, and collects their next requests.
    fn linger(&self, leader: &mut Leader<'_>, most: u64) {
        // If not all callers have a core, a poll yields this one once.
        let oversubscribed = self.oversubscribed.0.load(Ordering::Relaxed);
        let relax: fn() = if oversubscribed { pause } else { spin };
        let may = leader.linger_polls(most, PROBE);
        let mut polls = 0;
        while polls < may && leader.missing() != 0 && !leader.is_full() {
            relax();
            polls += 1;
            if leader.next_is_pending() && leader.collect_more() {
                polls = 0;
            }
        }
        leader.collect_more();
        leader.set_linger(may, most);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "tests.rs"]
mod tests;
