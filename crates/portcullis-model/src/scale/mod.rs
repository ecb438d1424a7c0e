//! The cost of a policy on a server with many CPUs: virtual CPUs run a workload on a machine around the library.
//!
//! The library's part is measured: its own code, and designs of the past, on simulated CPUs with cache lines (`cargo xtask coherence
//! --keep`, `docs/scaling.md`). This module models the machine around it in a deterministic event simulation: the work between mappings,
//! the invalidation queue with a profile's waits, devices that walk page tables, links, and memory bandwidth of copies.
//!
//! # Limits
//! A device that walks handles one request after the other, each page at a fixed number of memory reads; one without limits does not walk; CPU caches are hot or cold by
//! policy, not by size; interrupts arrive at once and cost only the workload's own time.
//!
//! # Cost
//! Some microseconds for each request of all CPUs together; memory for each outstanding request.

mod engine;
mod machine;
mod operations;
mod policy;
mod random;
mod stations;
mod workload;

pub use machine::{Copies, Machine};
pub use operations::{Curve, Line, Operations, Size};
pub use policy::{Copied, LINUX_STRICT, LINUX_STRICT_SMMU, POLICIES, Policy, Waits};
pub use random::Random;
pub use workload::{Device, Mapping, NAMES, Request, Workload};

use engine::{Engine, Iommu, Load, Setup};
use operations::{ALONE, QUEUES, SHARED};
use stations::{BATCH, Commit, Serial, Sharing};

/// The time of CPUs, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Spent {
    /// The workload's own.
    pub work_ns: f64,
    /// The library's, as on one CPU.
    pub own_ns: f64,
    /// Waiting for shared lines and locks.
    pub shared_ns: f64,
    /// Waiting for the invalidation queue.
    pub wait_ns: f64,
    /// Copying.
    pub copy_ns: f64,
    /// Idle, while all requests are with a device.
    pub idle_ns: f64,
}

impl Spent {
    fn add(&mut self, other: &Self) {
        self.work_ns += other.work_ns;
        self.own_ns += other.own_ns;
        self.shared_ns += other.shared_ns;
        self.wait_ns += other.wait_ns;
        self.copy_ns += other.copy_ns;
        self.idle_ns += other.idle_ns;
    }

    fn over(&self, requests: f64) -> Self {
        let each = |ns: f64| ns / requests.max(1.0);
        Self {
            work_ns: each(self.work_ns),
            own_ns: each(self.own_ns),
            shared_ns: each(self.shared_ns),
            wait_ns: each(self.wait_ns),
            copy_ns: each(self.copy_ns),
            idle_ns: each(self.idle_ns),
        }
    }
}

/// The result of a policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Requests in a second, of all CPUs together.
    pub per_s: f64,
    /// For each request.
    pub spent: Spent,
    /// The part of the library's own time in which a hypervisor maps and unmaps, where that is asked to.
    pub asked_ns: f64,
    /// The share of the time in which the invalidation queue worked.
    pub queue_busy: f64,
    /// The share of the time in which each device worked, on average.
    pub device_busy: f64,
    /// The copied share of the sockets' memory bandwidth.
    pub copy_busy: f64,
    /// Source lines of shared state, the most transfers first.
    pub lines: Vec<Line>,
    /// Results that are inferred from measurements.
    pub inferred: Vec<String>,
}

/// The fewest requests that a run simulates on each CPU. A workload of more requests has a longer run, which counts each of them about once.
const REQUESTS: u64 = 400;

/// Runs `workload` under `policy` on `machine`.
///
/// # Errors
/// A workload without requests or devices, and a policy without a measured operation.
pub fn run(
    machine: &Machine,
    workload: &Workload,
    policy: &Policy,
    operations: &Operations,
) -> Result<Outcome, String> {
    if workload.requests.is_empty() || workload.device.count == 0 || machine.cpus == 0 {
        return Err("nothing to do: no request, no device or no CPU".into());
    }
    // What CPUs share is the state of mappings that are not copied, where the module maps these as Linux's strict does.
    let mapped = of_module(machine, workload, policy);
    let shared = mapped.unwrap_or(policy);
    let mut curve = shared.operation.map(|name| operations.curve(name, machine)).transpose()?;
    let mut ns = curve.as_ref().map_or_else(|| vec![0.0], |curve| curve.ns.clone());
    // For each unmap: waits for the queue, and a lock holder's wait, in a part of which the hardware is busy.
    let (every, locked, busy) = match shared.waits {
        Waits::Never => (0.0, 0.0, 0.0),
        Waits::Shared(unmaps) | Waits::Own(unmaps) | Waits::Queues(unmaps) => {
            (1.0 / f64::from(unmaps.max(1)), 0.0, 0.0)
        }
        Waits::Locked(unmaps) => {
            let wait = machine.submission_ns + machine.request_ns;
            let seen =
                if shared.looks_ns > 0.0 { (wait / shared.looks_ns).ceil() * shared.looks_ns } else { wait };
            let unmaps = f64::from(unmaps.max(1));
            (0.0, seen / unmaps, wait / unmaps)
        }
    };
    // A submitter fills a ring: the shared one, or its own.
    let way = match shared.waits {
        Waits::Shared(_) => Some(SHARED),
        Waits::Queues(_) => Some(QUEUES),
        Waits::Never | Waits::Locked(_) | Waits::Own(_) => None,
    };
    if let (Some(curve), Some(way)) = (&mut curve, way) {
        let ring = operations.ring(way, machine)?;
        ns.iter_mut().zip(&ring.ns).for_each(|(ns, ring)| *ns += every * ring);
        if every * ring.transfers > curve.transfers {
            curve.lines = ring.lines;
        }
        curve.inferred.extend(ring.inferred);
    }
    // A wait with a lock held makes the others wait, too; a contended lock is passed on.
    let (submits, handed_on) = if shared.handed_on > 0 {
        let far = if machine.sockets > 1 { 1.0 - 1.0 / f64::from(machine.sockets) } else { 0.0 };
        let line = machine.near_ns * (1.0 - far) + machine.far_ns * far;
        let ring = operations.ring(ALONE, machine)?;
        (ring.ns.get(1).copied().unwrap_or(0.0), f64::from(shared.handed_on) * line)
    } else {
        (0.0, 0.0)
    };
    for (cpus, ns) in ns.iter_mut().enumerate() {
        let handed_on = if cpus > 1 { handed_on } else { 0.0 };
        *ns += (locked + submits + handed_on) * cpus.max(1) as f64;
    }
    let ways = Ways::new(machine, policy, mapped, operations, every)?;
    let loads = workload.requests.iter().map(|request| load(machine, workload, &ways, request));
    let sockets = machine.sockets.clamp(1, machine.cpus) as usize;
    let per_kib = per_kib(machine, policy);
    let memory = |cpus: u32| per_kib.max(f64::from(cpus) * 1024.0 / machine.copies.socket_gb_per_s);
    let curve_of_copies: Vec<f64> = (0..=machine.cpus).map(memory).collect();
    let stations = if policy.of_machine { 1 } else { machine.iommus.clamp(1, workload.device.count) };
    let most = if way == Some(SHARED) { BATCH } else { 1 };
    let in_flight = if way == Some(QUEUES) { machine.cpus } else { machine.in_flight };
    let setup = Setup {
        cpus: machine.cpus as usize,
        sockets,
        depth: workload.depth.max(1),
        loads: loads.collect(),
        latency_ns: workload.device.latency_ns,
        unit_ns: ns.get(1).copied().unwrap_or(0.0),
        unit_wait_ns: locked,
        iommus: (0..stations)
            .map(|_| Iommu {
                shared: Sharing::new(ns.clone()),
                queue: Commit::new(machine.submission_ns, machine.request_ns, in_flight, most),
            })
            .collect(),
        copies: (0..sockets).map(|_| Sharing::new(curve_of_copies.clone())).collect(),
        devices: vec![Serial::default(); workload.device.count as usize],
    };
    let mean = |of: fn(&Load) -> f64| setup.loads.iter().map(of).sum::<f64>() / setup.loads.len() as f64;
    let (units, copy_kib, asked_ns) =
        (mean(|load| load.units), mean(|load| load.copy_kib), mean(|load| load.asked_ns));
    let each_once = Engine::all_for(setup.loads.len() as u64).div_ceil(u64::from(machine.cpus));
    let ran = Engine::new(setup).run(REQUESTS.max(each_once));
    let requests = ran.requests as f64;
    let locked_busy = requests / ran.ns * units * busy / f64::from(stations);
    let copied_gb_per_s = requests / ran.ns * copy_kib * 1024.0;
    let (lines, inferred) = curve.map(|curve| (curve.lines, curve.inferred)).unwrap_or_default();
    Ok(Outcome {
        per_s: requests / ran.ns * 1e9,
        spent: ran.spent.over(requests),
        asked_ns,
        queue_busy: (ran.queue_busy + locked_busy).min(1.0),
        device_busy: ran.device_busy,
        copy_busy: copied_gb_per_s / (machine.copies.socket_gb_per_s * sockets as f64),
        lines,
        inferred,
    })
}

/// The policy by which the module's `policy` maps what it does not copy, if `workload` has any of that.
fn of_module(machine: &Machine, workload: &Workload, policy: &Policy) -> Option<&'static Policy> {
    let is_bounce = machine.of_module && policy.strict && policy.copied == Copied::Newest;
    let mut mappings = workload.requests.iter().flat_map(|request| &request.mappings);
    Policy::named(LINUX_STRICT).filter(|_| is_bounce && mappings.any(|mapping| !policy.copies(mapping)))
}

/// A CPU's own time to copy a KiB.
fn per_kib(machine: &Machine, policy: &Policy) -> f64 {
    let Copies { hot_ns, cold_ns, remote_ns, .. } = machine.copies;
    match policy.copied {
        Copied::Nothing => 0.0,
        // The slot is hot, the driver's buffer is not.
        Copied::Newest | Copied::Cheaper => (hot_ns + cold_ns) / 2.0,
        Copied::Oldest => cold_ns,
        Copied::Anyones => {
            // The previous user is random.
            let others = 1.0 - 1.0 / f64::from(machine.cpus.max(1));
            (hot_ns * (1.0 - others) + remote_ns * others + cold_ns) / 2.0
        }
    }
}

/// The possible costs of mappings under a policy.
struct Ways<'a> {
    policy: &'a Policy,
    /// Another policy's operation for what is not copied.
    mapped: Option<&'static str>,
    operations: &'a Operations,
    machine: &'a Machine,
    /// Waits for each unmap that is not copied.
    every: f64,
    per_kib: f64,
    /// The cost of one page in the ring, and of a slot of the pool besides the copy: if the policy chooses.
    choice: (f64, f64),
}

/// A mapping's cost for a CPU.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    own_ns: f64,
    asked_ns: f64,
    units: f64,
    waits: f64,
    copy_kib: f64,
}

impl<'a> Ways<'a> {
    fn new(
        machine: &'a Machine,
        policy: &'a Policy,
        mapped: Option<&'static Policy>,
        operations: &'a Operations,
        every: f64,
    ) -> Result<Self, String> {
        let alone =
            |name| operations.curve(name, machine).map(|curve| curve.ns.get(1).copied().unwrap_or(0.0));
        let choice = match policy.copied {
            Copied::Cheaper => (alone("adaptive")?, alone("pool")?),
            _ if mapped.is_some() => (0.0, alone("pool")?),
            _ => (0.0, 0.0),
        };
        let mapped = mapped.and_then(|mapped| mapped.operation);
        Ok(Self { policy, mapped, operations, machine, every, per_kib: per_kib(machine, policy), choice })
    }

    /// By the policy's own operation; a copy waits for nothing.
    fn by_itself(&self, name: &str, mapping: &Mapping, copies: bool) -> Cost {
        let size = self.operations.size(name, mapping.pages);
        let (machine, pages) = (self.machine, mapping.pages as f64);
        let by_request = machine.map_request_ns + (machine.map_page_ns + machine.unmap_page_ns) * pages;
        let asked_ns = if copies { 0.0 } else { by_request };
        // A mapping too large to be copied is mapped, and waits individually.
        let waits = if copies || self.policy.copied == Copied::Nothing { self.every } else { 1.0 };
        Cost {
            own_ns: size.own_ns + self.policy.written_back_ns + asked_ns,
            asked_ns,
            units: size.shared,
            waits,
            copy_kib: if copies { self.times(mapping) * kib(mapping.bytes) } else { 0.0 },
        }
    }

    /// How often a bounced mapping copies its bytes.
    fn times(&self, mapping: &Mapping) -> f64 {
        let of_module = self.machine.of_module && self.policy.copied == Copied::Newest;
        if (of_module || self.policy.copies_in) && mapping.received { 2.0 } else { 1.0 }
    }

    /// In the ring, or through a slot, or with slots for the ends: the cheapest that exposes no other data.
    fn cheaper(&self, mapping: &Mapping) -> Cost {
        let (ring_ns, slot_ns) = self.choice;
        let mapped = Cost { waits: self.every, ..self.by_itself("adaptive", mapping, false) };
        // Slots are per CPU.
        let slots = |count: f64, copy_kib| Cost { own_ns: count * slot_ns, copy_kib, ..Cost::default() };
        // Half of a page at each end, on average.
        let ends = slots(2.0, kib(mapping.bytes.min(4096)));
        let cut = Cost { own_ns: mapped.own_ns + ends.own_ns, copy_kib: ends.copy_kib, ..mapped };
        let copied = slots(1.0, kib(mapping.bytes));
        let ns = |cost: &Cost| {
            let wait = cost.waits * (self.machine.submission_ns + self.machine.request_ns);
            cost.own_ns + cost.units * ring_ns + wait + cost.copy_kib * self.per_kib
        };
        let other = if mapping.shared { cut } else { mapped };
        let must_copy = mapping.shared && mapping.pages < 3;
        let may_copy = self.policy.copies(mapping);
        if must_copy || (may_copy && ns(&copied) < ns(&other)) { copied } else { other }
    }

    fn cost(&self, name: &str, mapping: &Mapping) -> Cost {
        if mapping.pages == 0 {
            let copies = !matches!(self.policy.copied, Copied::Nothing | Copied::Cheaper);
            return Cost { copy_kib: if copies { kib(mapping.bytes) } else { 0.0 }, ..Cost::default() };
        }
        match self.policy.copied {
            Copied::Cheaper => self.cheaper(mapping),
            Copied::Nothing => self.by_itself(name, mapping, false),
            _ => match (self.mapped, self.policy.copies(mapping)) {
                // A slot belongs to one CPU. CPUs share the page tables and the lock of mappings that are not copied.
                (Some(_), true) => {
                    let copied = self.by_itself(name, mapping, true);
                    let (_, slot_ns) = self.choice;
                    Cost { own_ns: copied.own_ns + copied.units * slot_ns, units: 0.0, ..copied }
                }
                // The lock's holder waits, which the shared state has.
                (Some(mapped), false) => Cost { waits: 0.0, ..self.by_itself(mapped, mapping, false) },
                (None, copies) => self.by_itself(name, mapping, copies),
            },
        }
    }
}

fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}

fn load(machine: &Machine, workload: &Workload, ways: &Ways<'_>, request: &Request) -> Load {
    let (device, bytes) = (&workload.device, request.bytes());
    let walk = |reads: f64| device.page_ns + reads * machine.walk_read_ns;
    // Persistent mappings miss if the buffers are more pages than the IOTLB has, as bounce's are.
    let kept: u64 =
        request.mappings.iter().filter(|mapping| mapping.pages == 0).map(|mapping| mapping.bytes).sum();
    let reads = ways.policy.reads;
    let walks = (bytes - kept).div_ceil(4096) as f64 * walk(reads)
        + kept.div_ceil(4096) as f64 * walk(reads.min(1.0));
    // Walks overlap with the link's transfers.
    let walks = if device.keeps_up() { 0.0 } else { walks };
    let device_ns = (1e9 / device.requests_per_s).max(bytes as f64 / device.gb_per_s).max(walks);
    let mut load = Load { work_ns: request.work_ns, device_ns, ..Load::default() };
    let Some(name) = ways.policy.operation else { return load };
    for mapping in &request.mappings {
        let cost = ways.cost(name, mapping);
        load.own_ns += cost.own_ns;
        load.asked_ns += cost.asked_ns;
        load.units += cost.units;
        load.waits += cost.waits;
        load.copy_kib += cost.copy_kib;
    }
    load
}
