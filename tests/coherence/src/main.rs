//! One workload of `portcullis bench path` on simulated CPUs: `cargo xtask coherence` builds this program for the simulator
//! and runs it, once for each workload and number of CPUs.
//!
//! It prints `figures`, and nanoseconds, transfers, atomics, accesses and transfers between sockets for each operation; and for each of the worst
//! instructions a line `site`, with the transfers for each operation and return addresses. `left out` and a reason stand
//! in place of both where the workload cannot be done.

mod driver;
mod platform;
mod simulator;
mod work;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use portcullis::invalidation::{InvalidationQueue, SharedQueue};
use portcullis_bench::path::{AtOnce, Lanes};
use portcullis_bench::runner::Failure;
use portcullis_trace::replay::Profile;

use platform::{Hardware, Simulated};
use simulator::{Figures, Machine, Simulator, simulator};
use work::{Below, Work};

/// What is asked for, as `name=value`.
struct Request {
    work: Work,
    machine: Machine,
    profile: Profile,
    own_domains: bool,
}

impl Request {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut machine = Machine::server(1, 64);
        let (mut work, mut profile, mut own_domains) = (None, "none".to_owned(), false);
        for argument in arguments {
            let (name, value) = argument.split_once('=').ok_or(format!("{argument}: no value"))?;
            let number = || value.parse::<u32>().map_err(|error| format!("{argument}: {error}"));
            let picoseconds = || {
                let ns = value.parse::<f64>().ok().filter(|ns| (0.0..=1e6).contains(ns));
                ns.map(|ns| (ns * 1000.0).round() as u64).ok_or(format!("{argument}: 0 to 1,000,000 ns"))
            };
            match name {
                "workload" => work = Some(Work::named(value)?),
                "profile" => profile = value.to_owned(),
                "own-domains" => own_domains = number()? > 0,
                "cpus" => machine.cpus = number()?.clamp(1, 256),
                "per-socket" => machine.per_socket = number()?.max(1),
                "core" => machine.core = number()?,
                "sites" => machine.sites = number()?,
                "near" => machine.near = picoseconds()?,
                "far" => machine.far = picoseconds()?,
                "answer" => machine.answer = picoseconds()?,
                "access" => machine.access = picoseconds()?,
                "atomic" => machine.atomic = picoseconds()?,
                "pause" => machine.spin = picoseconds()?,
                _ => return Err(format!("{name}: nothing has this name")),
            }
        }
        let work = work.ok_or("no workload is named")?;
        let profile = Profile::load(&profile).map_err(|error| error.to_string())?;
        Ok(Self { work, machine, profile, own_domains })
    }

    /// Runs it; the figures of all CPUs.
    fn run(&self, simulator: &'static Simulator) -> Result<Vec<Figures>, Failure> {
        // First, as a queue asks how many CPUs there are.
        simulator.start(&self.machine);
        let cpus = self.machine.cpus as usize;
        match self.work.below {
            Below::Driver => return self.run_over_one(simulator, driver::vtd(simulator, self.busy(), 0)?),
            Below::SharedDriver => {
                return self.run_over_one(simulator, driver::vtd(simulator, self.busy(), cpus)?);
            }
            Below::Smmu { has_own } => {
                return self.run_over_one(simulator, driver::smmuv3(simulator, self.busy(), cpus, has_own)?);
            }
            Below::Profile => {}
        }
        let waits = &self.profile.waits;
        let (submission, request) = (waits.doorbell.ns + waits.completion.ns, waits.descriptor.ns);
        if submission + request == 0.0 {
            return self.run_over(simulator, || AtOnce);
        }
        let numbers = AtomicU32::new(0);
        let hardware = || {
            let number = numbers.fetch_add(1, Ordering::Relaxed);
            let costs = waits.costs();
            Hardware { simulator, number, submission, request, costs }
        };
        if self.work.old.is_some() {
            return self.run_over(simulator, hardware);
        }
        self.run_over(simulator, || Arc::new(SharedQueue::new(hardware())))
    }

    /// How many nanoseconds a unit takes for a submission, as the profile says.
    fn busy(&self) -> u64 {
        let waits = &self.profile.waits;
        (waits.doorbell.ns + waits.completion.ns).round() as u64
    }

    /// Over one unit of a driver for all domains.
    fn run_over_one<Q: InvalidationQueue + 'static>(
        &self,
        simulator: &'static Simulator,
        unit: Q,
    ) -> Result<Vec<Figures>, Failure> {
        let queue = Arc::new(unit);
        self.run_over(simulator, || Arc::clone(&queue))
    }

    fn run_over<Q: InvalidationQueue + 'static>(
        &self,
        simulator: &'static Simulator,
        queue: impl Fn() -> Q,
    ) -> Result<Vec<Figures>, Failure> {
        portcullis_bench::path::old::watch_with(simulator::watch);
        let cpus = self.machine.cpus as usize;
        let platform = Simulated::new(simulator, cpus);
        let (workload, old) = (self.work.workload, self.work.old);
        let lanes = Lanes::new(workload, old, cpus, self.own_domains, &platform, queue)?;
        let figures = self.work.run(simulator, &platform, &lanes, cpus);
        lanes.settle()?;
        Ok(figures)
    }
}

fn main() -> ExitCode {
    // Where the first thread's stack begins is another place in each run.
    std::thread::spawn(simulate).join().unwrap_or(ExitCode::FAILURE)
}

fn simulate() -> ExitCode {
    let Some(simulator) = simulator() else {
        eprintln!("this program runs under a simulator: cargo xtask coherence");
        return ExitCode::from(2);
    };
    let request = match Request::parse(std::env::args().skip(1)) {
        Ok(request) => request,
        Err(error) => {
            eprintln!("coherence: {error}");
            return ExitCode::from(2);
        }
    };
    // A CPU that panics would keep its turn for ever.
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
    let figures = match request.run(simulator) {
        Ok(figures) => figures,
        Err(Failure::Unsupported(why)) => {
            println!("left out: {why}");
            return ExitCode::SUCCESS;
        }
        Err(failure) => {
            eprintln!("coherence: {failure}");
            return ExitCode::FAILURE;
        }
    };
    let ops = request.work.counted(figures.len()) as f64;
    let sum = |of: fn(&Figures) -> u64| figures.iter().map(of).sum::<u64>() as f64;
    let per_op = |of: fn(&Figures) -> u64| sum(of) / ops / request.work.workers(figures.len()) as f64;
    println!(
        "figures {} {} {} {} {}",
        per_op(|figures| figures.time) / 1000.0,
        per_op(|figures| figures.transfers),
        per_op(|figures| figures.atomics),
        per_op(|figures| figures.accesses),
        per_op(|figures| figures.far),
    );
    for site in simulator.sites(request.machine.sites as usize) {
        let frames = site.frames.iter().take_while(|frame| **frame != 0);
        let frames: Vec<String> = frames.map(|frame| format!("{frame:#x}")).collect();
        let count = site.count as f64 / ops / request.work.workers(figures.len()) as f64;
        println!("site {count} {}", frames.join(" "));
    }
    ExitCode::SUCCESS
}
