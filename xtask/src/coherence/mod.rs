//! What CPUs share, counted: workloads of `portcullis bench path` on simulated CPUs (`tests/coherence`, `docs/scaling.md`).

mod bounds;
mod kept;
mod program;
mod sites;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use bounds::BOUNDS;
use program::{Case, Figures, Outcome, Program};

use crate::nightly;

pub const WHAT: &str = "bounds on what CPUs share";

const USAGE: &str = "\
cargo xtask coherence [WORKLOAD..] [OPTIONS]

WORKLOAD is one of `portcullis bench path`, such as raw-1 or pool-4-live64 (all of them with 1 and 64 mappings live, and
those below, where none is named); or one of these with how CPUs share it before it:
  cross-raw-1      what a CPU maps, the next one unmaps
  flush-raw-1      the first CPU flushes the domain every 10 us while the others map and unmap
  hotplug-raw-1    the last CPU goes every 64 operations, and comes back
or one of a design of the past, as `portcullis bench path` has them, in place of its kind:
  lazy-2015-1-live512, bitmap-2008-1, smmu-2017-1-any32 (mappings end in any order), swiotlb-2021-1, swiotlb-lifo-1,
  swiotlb-2022-1
or with what carries invalidations out before it, which is the driver of a unit that takes no time but the profile's:
  vtd-raw-1        each CPU waits for its own submission
  vtd-shared-raw-1 CPUs share waits, as the driver does where its host says which CPU calls
  smmu-shared-raw-1, smmu-own-raw-1: the same of an SMMUv3; where it has a queue for each CPU (ECMDQ)

  --cpus 1,2,16    numbers of CPUs, up to 256 (1,2,16,64,256)
  --per-socket N   CPUs of a socket (64)
  --near NS        a line of another CPU of the same socket (60)
  --far NS         a line of another socket (120)
  --answer NS      between two copies of a line, where many CPUs want one (60; 0: all have theirs at once)
  --access NS      an access that hits, with the instructions around it (0.2)
  --atomic NS      an atomic read-modify-write, besides (6)
  --pause NS       a turn of a loop that waits (40); `portcullis calibrate` measures these on a machine, but for an access
  --profile NAME   hardware whose waits to make, one after the other (none: it answers at once)
  --own-domains    each CPU maps in a domain of its own, over hardware of its own
  --sites N        the N source lines that caused the most transfers of each
  --json           for machines
  --keep           measure what `portcullis scale` needs (or the WORKLOADs of that), and keep it in the repository; takes half an hour
  --bounds         nothing but what the tests do: fails where more is transferred than xtask/src/coherence/bounds.rs allows
";

/// Why nothing can be simulated here, if so.
pub fn missing() -> Option<String> {
    nightly::missing(Some(&nightly::Component::Sources), true)
}

/// Fails where more is transferred than a bound allows.
pub fn test(root: &Path) -> Result<(), String> {
    let program = Program::build(root)?;
    let cases: Vec<Case> = BOUNDS.iter().map(|(workload, _)| Case::new(workload, bounds::CPUS)).collect();
    let outcomes = run(&program, &cases, |_| ())?;
    let over = bounds::exceeded(&outcomes, &BOUNDS);
    for line in &over {
        eprintln!("{line}");
    }
    println!("{} bounds hold of {}", BOUNDS.len() - over.len(), BOUNDS.len());
    if over.is_empty() { Ok(()) } else { Err("CPUs share more than they may".to_owned()) }
}

/// What is asked for.
struct Request {
    workloads: Vec<String>,
    cpus: Vec<u32>,
    /// What the program is told besides.
    options: Vec<String>,
    sites: usize,
    json: bool,
}

impl Request {
    fn parse(arguments: &[&str]) -> Result<Self, String> {
        let cpus = vec![1, 2, 16, 64, 256];
        let mut request = Self { workloads: Vec::new(), cpus, options: Vec::new(), sites: 0, json: false };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().copied().ok_or_else(|| format!("{argument}: no value"));
            let number =
                |text: &str| text.parse::<u32>().map_err(|error| format!("{argument} {text}: {error}"));
            match *argument {
                "--cpus" => {
                    request.cpus = value()?.split(',').map(number).collect::<Result<_, _>>()?;
                    if request.cpus.iter().any(|cpus| !(1..=256).contains(cpus)) {
                        return Err("--cpus: 1 to 256".to_owned());
                    }
                }
                "--sites" => request.sites = number(value()?)? as usize,
                "--json" => request.json = true,
                "--own-domains" => request.options.push("own-domains=1".to_owned()),
                "--per-socket" => {
                    request.options.push(format!("per-socket={}", number(value()?)?));
                }
                "--near" | "--far" | "--answer" | "--access" | "--atomic" | "--pause" => {
                    let text = value()?;
                    let ns = text.parse::<f64>().ok().filter(|ns| (0.0..=1e6).contains(ns));
                    let ns = ns.ok_or(format!("{argument} {text}: 0 to 1,000,000 ns"))?;
                    request.options.push(format!("{}={ns}", &argument[2..]));
                }
                "--profile" => request.options.push(format!("profile={}", value()?)),
                option if option.starts_with('-') => {
                    return Err(format!("{option}: no such option\n{USAGE}"));
                }
                workload => request.workloads.push(workload.to_owned()),
            }
        }
        if request.workloads.is_empty() {
            request.workloads = every_workload();
        }
        Ok(request)
    }

    fn cases(&self) -> Vec<Case> {
        let case = |workload: &String, cpus: u32| Case {
            options: self.options.clone(),
            // Neighbours in the source are many instructions.
            sites: 16 * self.sites,
            ..Case::new(workload, cpus)
        };
        let of = |workload| self.cpus.iter().map(move |cpus| case(workload, *cpus));
        self.workloads.iter().flat_map(of).collect()
    }
}

/// Whether this can be asked for.
#[cfg(test)]
pub fn is_request(arguments: &[&str]) -> bool {
    match arguments {
        ["--keep", workloads @ ..] => kept::unknown(workloads).is_none(),
        _ => Request::parse(arguments).is_ok(),
    }
}

/// Every kind of mapping in every size, and what crosses CPUs.
fn every_workload() -> Vec<String> {
    const KINDS: [&str; 9] = ["raw", "typed", "lazy", "sg", "batch", "ring", "pool", "swiotlb", "adaptive"];
    let mut all = Vec::new();
    for live in ["", "-live64"] {
        for kind in KINDS {
            all.extend([1, 4, 16, 64].map(|pages| format!("{kind}-{pages}{live}")));
        }
    }
    for part in ["cross-", "cross-quarter-"] {
        let kinds = ["raw", "typed", "lazy", "batch", "pool", "swiotlb"];
        all.extend(kinds.map(|kind| format!("{part}{kind}-1")));
    }
    let disturbed =
        ["flush-raw-1", "flush-lazy-1", "flush-ring-1", "hotplug-raw-1", "hotplug-lazy-1", "hotplug-pool-1"];
    all.extend(disturbed.map(str::to_owned));
    all.extend(["vtd-raw-1", "vtd-shared-raw-1", "smmu-shared-raw-1", "smmu-own-raw-1"].map(str::to_owned));
    all
}

/// The command.
pub fn command(root: &Path, arguments: &[&str]) -> ExitCode {
    if arguments.iter().any(|argument| matches!(*argument, "--help" | "-h")) {
        print!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    if *arguments == ["--bounds"] {
        return match missing().map_or_else(|| test(root), Err) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => failed(&reason),
        };
    }
    if let ["--keep", workloads @ ..] = arguments {
        return match missing().map_or_else(|| kept::keep(root, workloads), Err) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => failed(&reason),
        };
    }
    let report = || {
        let request = Request::parse(arguments)?;
        if let Some(why) = missing() {
            return Err(why);
        }
        let program = Program::build(root)?;
        let cases = request.cases();
        let total = cases.len();
        let progress = |done: usize| {
            if total > 4 {
                eprint!("\r{done} of {total}");
            }
        };
        let outcomes = run(&program, &cases, progress)?;
        eprintln!();
        Ok(if request.json {
            json(&outcomes)
        } else {
            table(&request, &outcomes) + &sites::report(&program, root, &outcomes, request.sites)
        })
    };
    match report() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(reason) => failed(&reason),
    }
}

fn failed(reason: &str) -> ExitCode {
    eprintln!("xtask: coherence: {reason}");
    ExitCode::FAILURE
}

/// Runs all cases, on as many cores as there are, and tells `progress` how many are done.
fn run(program: &Program, cases: &[Case], progress: impl Fn(usize) + Sync) -> Result<Vec<Outcome>, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let results: Vec<Mutex<Option<Result<Outcome, String>>>> =
        cases.iter().map(|_| Mutex::new(None)).collect();
    let work = |core: usize| {
        // Relaxed: each takes another number, and what is at it is behind a lock.
        while let Some((index, case)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, cases.get(at)?)))
        {
            let outcome = program.run(case, core);
            let failed = outcome.is_err();
            if let Ok(mut place) = results[index].lock() {
                *place = Some(outcome);
            }
            progress(1 + done.fetch_add(1, Ordering::Relaxed));
            if failed {
                next.store(cases.len(), Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for core in 0..cores {
            scope.spawn(move || work(core));
        }
    });
    // The first failure is the reason why others have not begun.
    let outcomes = results.into_iter().filter_map(|place| place.into_inner().ok().flatten());
    outcomes.collect()
}

fn json(outcomes: &[Outcome]) -> String {
    let mut lines = Vec::new();
    for Outcome { case, figures, .. } in outcomes {
        if let Ok(Figures { ns, transfers, atomics, .. }) = figures {
            lines.push(format!(
                "{{\"workload\": \"{}\", \"cpus\": {}, \"ns_per_op\": {ns:.2}, \"transfers_per_op\": {transfers:.4}, \
                 \"atomics_per_op\": {atomics:.4}}}",
                case.workload, case.cpus
            ));
        }
    }
    format!("{{\"results\": [\n{}\n]}}\n", lines.join(",\n"))
}

fn table(request: &Request, outcomes: &[Outcome]) -> String {
    let mut text =
        String::from("ns for each map and unmap, and how many cache lines CPUs passed each other for it\n\n");
    let _ = write!(text, "{:<20}", "workload");
    for cpus in &request.cpus {
        let _ = write!(text, "{:>18}", format!("{cpus} CPU{}", if *cpus == 1 { "" } else { "s" }));
    }
    text.push('\n');
    let mut reasons = Vec::new();
    for row in outcomes.chunks(request.cpus.len()) {
        let _ = write!(text, "{:<20}", row[0].case.workload);
        for Outcome { case, figures, .. } in row {
            let cell = match figures {
                Ok(Figures { ns, transfers, .. }) => {
                    let digits = if *ns < 1000.0 { 1 } else { 0 };
                    format!("{ns:.digits$} ({transfers:.3})")
                }
                Err(why) => {
                    reasons.push(format!("{} on {} CPUs: {why}", case.workload, case.cpus));
                    "-".to_owned()
                }
            };
            let _ = write!(text, "{cell:>18}");
        }
        text.push('\n');
    }
    for reason in reasons {
        let _ = writeln!(text, "left out: {reason}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_name_workloads_cpus_and_hardware() {
        let request =
            Request::parse(&["raw-1", "--cpus", "1,16", "--profile", "vtd", "--far", "200", "--json"])
                .unwrap();
        assert_eq!((request.workloads.len(), &request.cpus[..], request.json), (1, &[1, 16][..], true));
        assert_eq!(request.options, ["profile=vtd", "far=200"]);
        assert_eq!(request.cases().len(), 2);
        assert_eq!(Request::parse(&[]).unwrap().workloads.len(), 94);
        let request = Request::parse(&["--access", "0.15", "--answer", "30"]).unwrap();
        assert_eq!(request.options, ["access=0.15", "answer=30"]);
        for wrong in [&["--cpus", "0"][..], &["--cpus", "257"], &["--cpus"], &["--far", "-1"], &["--fast"]] {
            assert!(Request::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn figures_become_json() {
        let figures = Ok(Figures { ns: 53.125, transfers: 0.0, atomics: 2.0, far: 0.0 });
        let outcome = |cpus, figures| Outcome { case: Case::new("raw-1", cpus), figures, sites: Vec::new() };
        let text = json(&[outcome(1, figures), outcome(2, Err("no memory".to_owned()))]);
        let expected = "{\"results\": [\n{\"workload\": \"raw-1\", \"cpus\": 1, \"ns_per_op\": 53.12, \
                        \"transfers_per_op\": 0.0000, \"atomics_per_op\": 2.0000}\n]}\n";
        assert_eq!(text, expected);
    }
}
