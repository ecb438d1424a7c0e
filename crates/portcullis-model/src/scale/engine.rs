//! A deterministic event simulation of virtual CPUs.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use super::Spent;
use super::random::Random;
use super::stations::{Commit, Serial, Sharing};

/// The simulated cost of a request under a policy.
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    /// Half before the device gets it, half after.
    pub work_ns: f64,
    /// The library's own time, independent of other CPUs.
    pub own_ns: f64,
    /// The part of it that a hypervisor takes.
    pub asked_ns: f64,
    /// Operations of one page on shared state.
    pub units: f64,
    /// Waits for the invalidation queue.
    pub waits: f64,
    /// KiB that are copied.
    pub copy_kib: f64,
    /// The device's time.
    pub device_ns: f64,
}

/// An IOMMU, with the shared state of CPUs that use devices behind it.
pub(super) struct Iommu {
    pub shared: Sharing,
    pub queue: Commit,
}

pub(super) struct Setup {
    pub cpus: usize,
    pub sockets: usize,
    pub depth: u32,
    pub loads: Vec<Load>,
    pub latency_ns: f64,
    /// For each IOMMU: the shared state of its CPUs, and its queue.
    pub iommus: Vec<Iommu>,
    /// For each socket: its memory bandwidth.
    pub copies: Vec<Sharing>,
    pub devices: Vec<Serial>,
    /// The time of one operation on shared state without contention, and the part of it that waits for the hardware.
    pub unit_ns: f64,
    pub unit_wait_ns: f64,
}

/// The results.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ran {
    pub requests: u64,
    pub ns: f64,
    /// Of all CPUs together.
    pub spent: Spent,
    /// The shares of the time in which each invalidation queue, and each device, worked, on average.
    pub queue_busy: f64,
    pub device_busy: f64,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Work(f64),
    Own(f64),
    Share(f64),
    Copy(f64),
    Wait,
    /// The device has it now.
    Begun,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    /// A CPU has finished its own time.
    Done(usize),
    /// A request of this CPU is complete.
    Complete(usize),
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct At(f64, u64, Event);

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

#[derive(Default)]
struct Cpu {
    steps: VecDeque<Step>,
    running: bool,
    /// The start of its current step, and its length without contention.
    since: f64,
    alone: f64,
    under_way: u32,
    /// Completed requests, by number of load.
    complete: VecDeque<usize>,
    /// Outstanding requests, in order.
    sent: VecDeque<usize>,
    next: usize,
    current: usize,
    /// Waits that are due, as unmaps add to them.
    due: f64,
    spent: Spent,
}

/// A run leaves the first fifth of its requests out of its results: meanwhile the queues fill.
const UNCOUNTED: u64 = 5;

pub(super) struct Engine {
    setup: Setup,
    cpus: Vec<Cpu>,
    events: BinaryHeap<At>,
    number: u64,
    random: Random,
    done: u64,
}

impl Engine {
    pub(super) fn new(setup: Setup) -> Self {
        let (loads, all) = (setup.loads.len(), setup.cpus.max(1));
        let cpu = |index| Cpu { next: index * loads / all, ..Cpu::default() };
        let cpus = (0..setup.cpus).map(cpu).collect();
        Self { setup, cpus, events: BinaryHeap::new(), number: 0, random: Random::default(), done: 0 }
    }

    /// The number of requests of a run that counts `counted` of them.
    pub(super) const fn all_for(counted: u64) -> u64 {
        (counted * UNCOUNTED).div_ceil(UNCOUNTED - 1)
    }

    /// Half of `ns` to one and a half: identical CPUs would stay in step.
    fn about(&mut self, ns: f64) -> f64 {
        ns * (0.5 + (self.random.next() >> 11) as f64 / (1_u64 << 53) as f64)
    }

    fn push(&mut self, at: f64, event: Event) {
        self.number += 1;
        self.events.push(At(at, self.number, event));
    }

    /// Runs `requests` on each CPU on average; the first fifth does not count.
    pub(super) fn run(mut self, requests: u64) -> Ran {
        let (cpus, mut begin) = (self.setup.cpus as u64, 0.0);
        let (uncounted, all) = (requests * cpus / UNCOUNTED, requests * cpus);
        let (mut before, mut now) = ((0.0, 0.0), 0.0);
        let mut counts = false;
        for cpu in 0..self.setup.cpus {
            self.dispatch(cpu, 0.0);
        }
        while self.done < all {
            if !counts && self.done >= uncounted {
                (counts, begin, before) = (true, now, self.worked());
                self.cpus.iter_mut().for_each(|cpu| cpu.spent = Spent::default());
            }
            let Some(at) = self.step() else { break };
            now = at;
        }
        let (ns, worked) = ((now - begin).max(1e-9), self.worked());
        let mut spent = Spent::default();
        self.cpus.iter().for_each(|cpu| spent.add(&cpu.spent));
        Ran {
            requests: self.done.saturating_sub(uncounted),
            ns,
            spent,
            queue_busy: ((worked.0 - before.0) / ns).min(1.0),
            device_busy: ((worked.1 - before.1) / ns).min(1.0),
        }
    }

    /// The working time of each queue and device, on average.
    fn worked(&self) -> (f64, f64) {
        let devices: f64 = self.setup.devices.iter().map(|device| device.worked).sum();
        let queues: f64 = self.setup.iommus.iter().map(|iommu| iommu.queue.worked).sum();
        (queues / self.setup.iommus.len().max(1) as f64, devices / self.setup.devices.len().max(1) as f64)
    }

    fn device_of(&self, cpu: usize) -> usize {
        cpu % self.setup.devices.len()
    }

    /// Its device's IOMMU: devices are assigned to them round robin.
    fn iommu_of(&mut self, cpu: usize) -> &mut Iommu {
        let at = self.device_of(cpu) % self.setup.iommus.len();
        &mut self.setup.iommus[at]
    }

    /// The IOMMU with the next completion, and its time.
    fn first(&self, next: impl Fn(&Iommu) -> f64) -> (usize, f64) {
        let all = self.setup.iommus.iter().map(next).enumerate();
        all.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, f64::INFINITY))
    }

    /// Handles the next event, and returns its time.
    fn step(&mut self) -> Option<f64> {
        let timer = self.events.peek().map_or(f64::INFINITY, |event| event.0);
        let (of_shared, shared) = self.first(|iommu| iommu.shared.next());
        let (of_queue, queue) = self.first(|iommu| iommu.queue.next());
        let copies = self.setup.copies.iter().map(Sharing::next).enumerate();
        let (socket, copy) = copies.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, f64::INFINITY));
        let now = timer.min(shared).min(queue).min(copy);
        if now.is_infinite() {
            return None;
        }
        if timer == now {
            match self.events.pop()?.2 {
                Event::Done(cpu) => self.advance(cpu, now),
                Event::Complete(cpu) => {
                    let this = &mut self.cpus[cpu];
                    let load = this.sent.pop_front()?;
                    this.complete.push_back(load);
                    if !this.running {
                        this.spent.idle_ns += now - this.since;
                        self.dispatch(cpu, now);
                    }
                }
            }
        } else if shared == now {
            let cpu = self.setup.iommus[of_shared].shared.leave(now)?;
            let this = &mut self.cpus[cpu];
            this.spent.shared_ns += (now - this.since - this.alone).max(0.0);
            self.advance(cpu, now);
        } else if queue == now {
            for cpu in self.setup.iommus[of_queue].queue.leave(now) {
                self.cpus[cpu].spent.wait_ns += now - self.cpus[cpu].since;
                self.advance(cpu, now);
            }
        } else {
            let cpu = self.setup.copies[socket].leave(now)?;
            self.cpus[cpu].spent.copy_ns += now - self.cpus[cpu].since;
            self.advance(cpu, now);
        }
        Some(now)
    }

    /// An idle CPU processes completions, or begins a request.
    fn dispatch(&mut self, cpu: usize, now: f64) {
        let count = self.setup.loads.len();
        let this = &mut self.cpus[cpu];
        let ends = this.complete.pop_front();
        let load = match ends {
            Some(load) => load,
            None if this.under_way < self.setup.depth => {
                this.under_way += 1;
                this.next += 1;
                this.next % count
            }
            None => {
                (this.running, this.since) = (false, now);
                return;
            }
        };
        let Load { work_ns, own_ns, units, waits, copy_kib, .. } = self.setup.loads[load];
        let this = &mut self.cpus[cpu];
        (this.running, this.current) = (true, load);
        this.steps.extend([Step::Work(work_ns / 2.0), Step::Own(own_ns / 2.0), Step::Share(units / 2.0)]);
        if ends.is_none() {
            this.steps.push_back(Step::Copy(copy_kib));
            this.steps.push_back(Step::Begun);
        } else {
            this.due += waits;
            while this.due >= 1.0 {
                this.due -= 1.0;
                this.steps.push_back(Step::Wait);
            }
            this.steps.push_back(Step::Ended);
        }
        self.advance(cpu, now);
    }

    /// A CPU does its next step.
    fn advance(&mut self, cpu: usize, now: f64) {
        while let Some(step) = self.cpus[cpu].steps.pop_front() {
            match step {
                Step::Work(ns) | Step::Own(ns) | Step::Share(ns) | Step::Copy(ns) if ns <= 0.0 => {}
                Step::Work(ns) => {
                    let ns = self.about(ns);
                    self.cpus[cpu].spent.work_ns += ns;
                    return self.push(now + ns, Event::Done(cpu));
                }
                Step::Own(ns) => {
                    self.cpus[cpu].spent.own_ns += ns;
                    return self.push(now + ns, Event::Done(cpu));
                }
                Step::Share(units) => {
                    let (alone, waits) = (units * self.setup.unit_ns, units * self.setup.unit_wait_ns);
                    let this = &mut self.cpus[cpu];
                    (this.since, this.alone) = (now, alone);
                    this.spent.own_ns += alone - waits;
                    this.spent.wait_ns += waits;
                    return self.iommu_of(cpu).shared.enter(now, cpu, units);
                }
                Step::Copy(kib) => {
                    self.cpus[cpu].since = now;
                    let socket = cpu * self.setup.sockets / self.setup.cpus;
                    return self.setup.copies[socket].enter(now, cpu, kib);
                }
                Step::Wait => {
                    self.cpus[cpu].since = now;
                    return self.iommu_of(cpu).queue.enter(now, cpu);
                }
                Step::Begun => {
                    let (load, device) = (self.cpus[cpu].current, self.device_of(cpu));
                    self.cpus[cpu].sent.push_back(load);
                    let ns = self.setup.loads[load].device_ns;
                    let done = self.setup.devices[device].serve(now, ns) + self.setup.latency_ns;
                    self.push(done, Event::Complete(cpu));
                }
                Step::Ended => {
                    self.cpus[cpu].under_way -= 1;
                    self.done += 1;
                }
            }
        }
        self.dispatch(cpu, now);
    }
}
