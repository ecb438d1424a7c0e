//! What the CPUs do: the benchmark's own loops, or what crosses CPUs by its nature.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use portcullis::invalidation::QUEUE_ENTRIES;
use portcullis_bench::path::old::Design;
use portcullis_bench::path::{Kind, Lane, Lanes, Workload, designs, workloads};

use crate::platform::Simulated;
use crate::simulator::{Figures, Simulator};

/// How CPUs share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Each maps and unmaps.
    Alone,
    /// What a CPU maps, the next one unmaps, 64 at a time: one in so many of them, and the CPU itself the others.
    Cross(usize),
    /// As alone, but a mapping ends in no order, as reads of a disk do.
    AnyOrder,
    /// As alone, but for the first CPU: it flushes the domain every [`FLUSH_NS`].
    Flush,
    /// As alone, but for the last CPU: it goes every [`STAY`] operations, and comes back.
    Hotplug,
}

/// What carries invalidations out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    /// Hardware as the profile has it.
    Profile,
    /// The driver of a VT-d unit, which takes as long as the profile says.
    Driver,
    /// The same, where CPUs share their waits.
    SharedDriver,
    /// The driver of an SMMUv3: where each CPU has a queue of its own, or else shares its waits.
    Smmu { has_own: bool },
}

/// Nanoseconds from one flush to the next.
const FLUSH_NS: u64 = 10_000;

/// Operations between coming and going.
const STAY: u64 = 64;

/// Nanoseconds that a CPU is away.
const AWAY_NS: u64 = 5_000;

/// Rounds after which CPUs that hand their mappings on are in step.
const IN_STEP: u64 = 32;

/// Nanoseconds until a CPU looks again for what another one has for it.
const LOOK_NS: u64 = 50;

/// A workload, and how CPUs share it.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    pub workload: Workload,
    pub below: Below,
    /// A design of the past in the library's place.
    pub old: Option<Design>,
    how: How,
}

type Slots = Vec<Mutex<Option<Box<dyn Lane>>>>;

/// Leaves `lane` there. Nobody else does until it is taken.
fn give(slots: &Slots, index: usize, lane: Box<dyn Lane>) {
    *slots[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(lane);
}

fn take(slots: &Slots, index: usize) -> Option<Box<dyn Lane>> {
    slots[index].lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Where that did not work, there are no figures: nobody else goes on.
fn check(worked: bool) {
    if !worked {
        println!("left out: the library refused to map a buffer, or to unmap it");
        std::process::exit(0);
    }
}

/// The `turn`th of the numbers below `count` that look random and are the same in each run (Steele, Lea and Flood, "Fast Splittable
/// Pseudorandom Number Generators", 2014).
fn any(cpu: usize, turn: u64, count: usize) -> usize {
    let mut mixed = (turn + ((cpu as u64) << 32) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) % count as u64) as usize
}

impl Work {
    /// A workload of `portcullis bench path`, or one with how it is shared before it, `cross-raw-1`, or with what is below it,
    /// `vtd-raw-1`, or with a design of the past in place of its kind, and any number of live mappings, which end in the order in
    /// which they were made, `lazy-2015-1-live512`, or in any, `smmu-2017-1-any32`.
    pub fn named(name: &str) -> Result<Self, String> {
        let drivers = [
            ("vtd-shared-", Below::SharedDriver),
            ("vtd-", Below::Driver),
            ("smmu-shared-", Below::Smmu { has_own: false }),
            ("smmu-own-", Below::Smmu { has_own: true }),
        ];
        let found = drivers.iter().find_map(|(prefix, below)| Some((name.strip_prefix(prefix)?, *below)));
        let (name, below) = found.unwrap_or((name, Below::Profile));
        let prefixes = [
            ("cross-quarter-", How::Cross(4)),
            ("cross-", How::Cross(1)),
            ("flush-", How::Flush),
            ("hotplug-", How::Hotplug),
        ];
        let found = prefixes.iter().find_map(|(prefix, how)| Some((name.strip_prefix(prefix)?, *how)));
        let (rest, how) = found.unwrap_or((name, How::Alone));
        let old = designs().find_map(|(subject, design)| {
            let size = rest.strip_prefix(subject.name)?.strip_prefix('-')?;
            let any = size.split_once("-any").map(|(size, live)| (size, live, How::AnyOrder));
            let (size, live, how) = any.unwrap_or_else(|| {
                let (size, live) = size.split_once("-live").unwrap_or((size, "1"));
                (size, live, how)
            });
            Some((Some(design), format!("{}-{size}", design.kind().name()), live.parse().ok(), how))
        });
        let (old, rest, live, how) = old.unwrap_or((None, rest.to_owned(), None, how));
        let found = workloads().iter().find(|workload| workload.name == rest);
        let mut workload = *found.ok_or_else(|| format!("{name}: there is no such workload"))?;
        workload.live = live.unwrap_or(workload.live).clamp(1, 4096);
        if matches!(how, How::Cross(_)) {
            workload.live = 64;
        }
        Ok(Self { workload, below, old, how })
    }

    /// Operations of each CPU that do not count: where unmaps are queued, until each queue has been full often enough for the
    /// CPU to have all addresses that it needs; where they cross, until no CPU waits any more because another came late out of
    /// the first fetches of addresses.
    fn uncounted(&self, cpus: usize) -> u64 {
        // The queue of an old design is everybody's.
        let queued = match (self.workload.kind, self.old) {
            (Kind::Lazy, None) => 4 * QUEUE_ENTRIES as u64,
            _ => 0,
        };
        let in_step = if matches!(self.how, How::Cross(_)) { IN_STEP * self.workload.live as u64 } else { 0 };
        self.counted(cpus).max(queued).max(in_step)
    }

    /// Operations of each of `cpus` CPUs that count: the more CPUs, the fewer, as all take their time on one.
    pub fn counted(&self, cpus: usize) -> u64 {
        if self.old.is_some() {
            // Who waits for a lock looks at it often, and each look is simulated.
            return (4096 / cpus as u64).clamp(32, 512);
        }
        let copies = matches!(self.workload.kind, Kind::Pool | Kind::Swiotlb | Kind::Adaptive);
        // Each copies two lines for each that is mapped.
        let fewer = if copies && self.workload.pages > 4 { 2 } else { 1 } * if cpus > 16 { 2 } else { 1 };
        (512 / fewer).max(2 * self.workload.live as u64)
    }

    /// CPUs of `cpus` that do operations.
    pub fn workers(&self, cpus: usize) -> usize {
        if self.how == How::Flush && cpus > 1 { cpus - 1 } else { cpus }
    }

    /// What each CPU did of what counts.
    pub fn run(
        &self,
        simulator: &'static Simulator,
        platform: &Simulated,
        lanes: &Lanes,
        cpus: usize,
    ) -> Vec<Figures> {
        let slots = || -> Slots { (0..cpus).map(|_| Mutex::new(None)).collect() };
        let (mapped, unmapped) = (slots(), slots());
        let begun = AtomicBool::new(false);
        simulator.on_each(cpus, |cpu| {
            platform.come(cpu);
            let lane = || lanes.lane(cpu).unwrap_or_else(|failure| panic!("{failure}"));
            let loops = Loops { simulator, platform, work: *self, cpus, cpu, begun: &begun };
            match self.how {
                How::Cross(share) => loops.cross(lane(), share, (&mapped, &unmapped)),
                How::Flush if cpu == 0 && cpus > 1 => loops.flush(|| check(lanes.flush(cpu).is_ok())),
                How::Hotplug if cpu + 1 == cpus => loops.alone(lane(), STAY),
                How::Alone | How::AnyOrder | How::Flush | How::Hotplug => loops.alone(lane(), u64::MAX),
            }
        })
    }
}

/// What one CPU does.
struct Loops<'a> {
    simulator: &'static Simulator,
    platform: &'a Simulated,
    work: Work,
    cpus: usize,
    cpu: usize,
    /// Some CPU counts.
    begun: &'a AtomicBool,
}

impl Loops<'_> {
    /// Operations one after the other, and on while others still count theirs; goes away every `stay`.
    fn alone(&self, mut lane: Box<dyn Lane>, stay: u64) -> Figures {
        let (simulator, platform) = (self.simulator, self.platform);
        let (uncounted, counted) = (self.work.uncounted(self.cpus), self.work.counted(self.cpus));
        let (live, all) = (self.work.workload.live, uncounted + counted);
        let mut figures = Figures::default();
        if live > 1 && self.work.old.is_some() {
            // Before there is anybody to wait for.
            check(simulator.hidden(|| lane.maps(0, live)));
        } else if live > 1 {
            check(lane.maps(0, live));
        }
        let mut done = 0;
        while done <= all || simulator.ended() < self.work.workers(self.cpus) {
            if done == uncounted {
                simulator.hidden(|| self.begun.store(true, Ordering::Relaxed));
                simulator.begin();
            }
            if done == all {
                figures = simulator.end();
            }
            let index = match self.work.how {
                How::AnyOrder => any(self.cpu, done, live),
                _ => done as usize % live,
            };
            check(if live == 1 { lane.pairs(1) } else { lane.renews(index, index + 1) });
            // A window ends every 10 ms. Where operations counted, a thousand times fewer would have all that its end costs.
            if !simulator.hidden(|| self.begun.load(Ordering::Relaxed)) {
                platform.tick();
            }
            done += 1;
            if done % stay == 0 {
                platform.go();
                simulator.wait(AWAY_NS);
                platform.come(self.cpu);
            }
        }
        if self.work.old.is_some() {
            // It counts for nobody, and who waits for locks then takes long to simulate.
            check(simulator.hidden(|| (live == 1 || lane.unmaps(0, live)) && lane.finish()));
            return figures;
        }
        check((live == 1 || lane.unmaps(0, live)) && lane.finish());
        figures
    }

    /// A flush after the other. What they cost while others count their operations counts as theirs.
    fn flush(&self, flush: impl Fn()) -> Figures {
        let simulator = self.simulator;
        let mut counts = false;
        while simulator.ended() < self.work.workers(self.cpus) {
            simulator.wait(FLUSH_NS);
            if !counts && simulator.hidden(|| self.begun.load(Ordering::Relaxed)) {
                simulator.begin();
                counts = true;
            }
            flush();
        }
        // The time is nobody's: operations go on meanwhile.
        if counts { Figures { time: 0, ..simulator.end() } } else { Figures::default() }
    }

    /// Maps all of its lane and leaves it to the next CPU, which unmaps one in `share` and gives it back. Giving it costs nothing.
    fn cross(&self, lane: Box<dyn Lane>, share: usize, (mapped, unmapped): (&Slots, &Slots)) -> Figures {
        let simulator = self.simulator;
        let before = (self.cpu + self.cpus - 1) % self.cpus;
        let live = self.work.workload.live;
        let rounds = |operations: u64| operations / live as u64;
        let (uncounted, counted) = (self.work.uncounted(self.cpus), self.work.counted(self.cpus));
        let fetch = |slots: &Slots, index: usize| {
            loop {
                match simulator.hidden(|| take(slots, index)) {
                    Some(lane) => return lane,
                    None => simulator.wait(LOOK_NS),
                }
            }
        };
        let mut lane = Some(lane);
        for round in 0..rounds(uncounted) + rounds(counted) {
            if round == rounds(uncounted) {
                simulator.begin();
            }
            let mut own = lane.take().unwrap_or_else(|| fetch(unmapped, self.cpu));
            check(own.maps(0, live));
            simulator.hidden(|| give(mapped, self.cpu, own));
            let mut other = fetch(mapped, before);
            let crossing = (0..live).step_by(share);
            check(crossing.clone().all(|index| other.unmaps(index, index + 1)) && other.finish());
            simulator.hidden(|| give(unmapped, before, other));
            if share > 1 {
                let mut own = fetch(unmapped, self.cpu);
                let others = crossing.clone().all(|first| own.unmaps(first + 1, (first + share).min(live)));
                check(others && own.finish());
                lane = Some(own);
            }
            self.platform.tick();
        }
        let figures = simulator.end();
        // The end of a lane counts for nobody.
        while simulator.ended() < self.cpus {
            simulator.wait(LOOK_NS);
        }
        if lane.is_none() {
            drop(fetch(unmapped, self.cpu));
        }
        figures
    }
}
