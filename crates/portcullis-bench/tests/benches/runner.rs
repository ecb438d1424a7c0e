//! What the runner makes of repetitions. The subjects here say what a repetition took, so that no clock decides anything;
//! where the runner itself looks at the clock, they sleep for longer than it allows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use portcullis_bench::report::{Halves, Measurement, Skipped, Split};
use portcullis_bench::runner::{Cell, Entrant, Failure, Group, Open, Options, Progress, Runner, Timing};
use portcullis_bench::team::Team;
use portcullis_bench::timer::OpTimer;

/// What was done, one after the other: by whom, and with how many operations.
type Log = Arc<Mutex<Vec<(&'static str, u64)>>>;

/// Nanoseconds of an operation in the repetitions, one after the other and from the start again.
const NS: [f64; 6] = [100.0, 130.0, 110.0, 120.0, 150.0, 140.0];
const NO_FLUSH: [f64; 6] = [10.0, 20.0, 30.0, 90.0, 50.0, 60.0];

/// A subject that takes [`NS`], and 100 ns until it is known how many operations fill a repetition.
#[derive(Clone)]
struct Script {
    name: &'static str,
    /// Before this its repetitions do not end.
    until: Option<Instant>,
    /// The state that it is found in at the end.
    ends: Result<(), Failure>,
    repetitions: Arc<Mutex<usize>>,
    log: Log,
}

impl Script {
    fn last(&self) -> usize {
        self.repetitions.lock().unwrap().saturating_sub(1) % NS.len()
    }
}

impl Cell for Script {
    fn repetition(&mut self, _: &Team, ops: u64) -> Result<Timing, Failure> {
        while let Some(left) = self.until.map(|until| until.saturating_duration_since(Instant::now()))
            && !left.is_zero()
        {
            std::thread::sleep(left);
        }
        self.log.lock().unwrap().push((self.name, ops));
        let mut ns = NS[0];
        if ops > 256 {
            *self.repetitions.lock().unwrap() += 1;
            ns = NS[self.last()];
        }
        Ok(Timing { wall: Duration::from_nanos((ns * ops as f64) as u64), ops })
    }

    fn split(&self) -> Option<Split> {
        let ns = NS[self.last()];
        Some(Split {
            wait_ns: ns / 7.0,
            lock_ns: ns / 4.0,
            work_ns: ns / 2.0,
            submissions_per_op: 0.123_456_7,
            requests_per_op: 0.765_432_1,
            hardware_wait_ns_per_op: ns / 16.0,
            no_flush: Some(NO_FLUSH[self.last()]),
        })
    }

    fn halves(&self) -> Option<Halves> {
        let ns = NS[self.last()];
        Some(Halves { depth: 7, map_ns: ns / 7.0, unmap_ns: ns / 2.0 })
    }

    fn samples(
        &mut self,
        _: &Team,
        _: &OpTimer,
        count: usize,
        _: Duration,
    ) -> Result<Option<Vec<u64>>, Failure> {
        self.log.lock().unwrap().push(("samples", count as u64));
        Ok(Some(vec![1_000_000; count]))
    }

    fn check(&mut self, _: &Team) -> Result<(), Failure> {
        self.ends.clone()
    }
}

fn script(name: &'static str, log: &Log) -> Script {
    Script { name, until: None, ends: Ok(()), repetitions: Arc::default(), log: Arc::clone(log) }
}

fn entrant(script: Script) -> Entrant {
    let subject = script.name;
    let open: Open = Box::new(move |_| Ok(Box::new(script.clone())));
    Entrant { subject, profile: None, open }
}

fn group(workload: &'static str, subjects: Vec<Entrant>) -> Group {
    Group { format: None, direction: None, workload, threads: 1, size: None, subjects }
}

/// A repetition is to take 100 us, which are 1,000 operations of 100 ns.
fn options() -> Options {
    Options { repetition: Duration::from_micros(100), samples: 0, ..Options::tiny() }
}

fn run(
    options: Options,
    groups: &[Group],
    progress: impl FnMut(Progress),
) -> (Vec<Measurement>, Vec<Skipped>) {
    let runner = Runner { team: Team::new(1).unwrap(), timer: OpTimer::calibrated(), options };
    runner.run(groups, progress)
}

/// The reasons why something was skipped, with the workloads.
fn reasons(skipped: &[Skipped]) -> Vec<(&str, &str)> {
    skipped.iter().map(|skipped| (skipped.workload, skipped.reason.as_str())).collect()
}

#[test]
fn another_subject_begins_each_round_and_every_other_round_goes_backward() {
    let log = Log::default();
    let subjects = || ["a", "b", "c"].map(|name| entrant(script(name, &log))).into();
    let mut told = Vec::new();
    let groups = [group("first", subjects()), group("second", Vec::new())];
    let (results, skipped) = run(Options { passes: 2, rounds: 4, ..options() }, &groups, |progress| {
        told.push((progress.workload, progress.done, progress.total));
    });
    assert_eq!((results.len(), skipped.len()), (3, 0));
    assert_eq!(told, [("first", 0, 4), ("second", 1, 4), ("first", 2, 4), ("second", 3, 4)]);
    let log = log.lock().unwrap();
    // How many operations fill a repetition is found out once, with four times as many each time.
    let tried: Vec<_> = log.iter().filter(|(_, ops)| (1..=256).contains(ops)).copied().collect();
    assert_eq!(tried, ["a", "b", "c"].map(|name| [16, 64, 256].map(|ops| (name, ops))).concat());
    let measured = log.iter().filter(|(_, ops)| *ops > 256);
    assert!(measured.clone().all(|(_, ops)| (999..=1000).contains(ops)), "{log:?}");
    let order: String = measured.map(|(name, _)| *name).collect();
    assert_eq!(order, ["abc", "acb", "cab", "cba", "bca", "bac", "abc", "acb"].concat());
}

#[test]
fn the_figures_are_of_the_repetition_in_the_middle() {
    let groups = [group("w", vec![entrant(script("a", &Log::default()))])];
    let options = Options { passes: 2, rounds: 3, samples: 5_000, ..options() };
    let (results, _) = run(options, &groups, |_| ());
    let Measurement { ns_per_op, min, max, split, halves, p99_99, .. } = results[0];
    assert_eq!((min, ns_per_op, max), (100.0, 120.0, 150.0), "the lower of the two in the middle");
    // The split is of one repetition, so its parts add up. The other figures are medians of all repetitions.
    let expected = Split {
        wait_ns: 17.14,
        lock_ns: 30.0,
        work_ns: 60.0,
        submissions_per_op: 0.12346,
        requests_per_op: 0.76543,
        hardware_wait_ns_per_op: 7.5,
        no_flush: Some(30.0),
    };
    assert_eq!(split, Some(expected));
    assert_eq!(halves, Some(Halves { depth: 7, map_ns: 17.14, unmap_ns: 60.0 }));
    assert!(p99_99.is_some_and(|ns| ns > 0.0), "10,000 samples of both passes together");
}

#[test]
fn single_operations_are_timed_where_enough_of_them_fit() {
    // 10,000 of 100 ns are a millisecond of one thread; so each of two has half of them to do.
    for (threads, part, times) in [(1, 900, 0), (1, 1100, 1), (2, 600, 1), (2, 400, 0)] {
        let log = Log::default();
        let groups = [Group { threads, ..group("w", vec![entrant(script("a", &log))]) }];
        let part = Duration::from_micros(part);
        run(Options { passes: 1, rounds: 1, samples: 9, part, ..options() }, &groups, |_| ());
        let sampled = log.lock().unwrap().iter().filter(|(name, _)| *name == "samples").count();
        assert_eq!(sampled, times, "{threads} threads, {part:?}");
    }
}

#[test]
fn what_failed_is_told_and_not_measured_again() {
    let log = Log::default();
    let failing = Script { ends: Err(Failure::Broken("left".into())), ..script("a", &log) };
    let groups = [group("w", vec![entrant(failing), entrant(script("b", &log))])];
    let (results, skipped) = run(Options { passes: 2, rounds: 1, ..options() }, &groups, |_| ());
    assert_eq!(results.iter().map(|result| result.subject).collect::<Vec<_>>(), ["b"]);
    assert_eq!(reasons(&skipped), [("w", "broken: left")]);
    let measured = |of| log.lock().unwrap().iter().filter(|(name, ops)| *name == of && *ops > 256).count();
    assert_eq!((measured("a"), measured("b")), (1, 2));
    let (_, skipped) = run(Options { rounds: 0, ..options() }, &groups[..], |_| ());
    assert_eq!(reasons(&skipped)[1], ("w", "no repetition was asked for"));
}

#[test]
fn who_is_too_slow_is_so_for_everything_larger() {
    let log = Log::default();
    let budget = Duration::from_secs(1);
    let sized = |workload, size, is_slow: bool| {
        let made = script("slow", &log);
        let open: Open = Box::new(move |_| {
            let until = is_slow.then(|| Instant::now() + 2 * budget);
            Ok(Box::new(Script { until, ..made.clone() }))
        });
        let subjects =
            vec![Entrant { open, ..entrant(script("slow", &log)) }, entrant(script("quick", &log))];
        Group { size, ..group(workload, subjects) }
    };
    let groups = [
        sized("middle", Some(10), true),
        sized("large", Some(20), false),
        sized("of-no-size", None, false),
        sized("small", Some(5), true),
        sized("small-too", Some(7), false),
        sized("smallest", Some(5), false),
    ];
    let (results, skipped) = run(Options { budget, passes: 1, rounds: 1, ..options() }, &groups, |_| ());
    let too_slow = "too slow: a repetition of 16 operations takes more than 1s";
    assert_eq!(
        reasons(&skipped),
        [
            ("middle", too_slow),
            ("large", "too slow already for middle, which is smaller"),
            ("small", too_slow),
            ("small-too", "too slow already for small, which is smaller"),
        ]
    );
    let measured = |subject: &str| results.iter().filter(|result| result.subject == subject).count();
    assert_eq!((measured("slow"), measured("quick")), (2, 6));
}

#[test]
fn a_run_that_is_stopped_has_the_figures_so_far() {
    static STOPPED: AtomicBool = AtomicBool::new(false);
    let stop = || STOPPED.load(Ordering::Relaxed);
    let groups = ["first", "second"].map(|name| group(name, vec![entrant(script("a", &Log::default()))]));
    // In the second pass, before the first group; and in the first pass, before the second group.
    for (at, expected) in [(2, vec!["first", "second"]), (1, vec!["first"])] {
        STOPPED.store(false, Ordering::Relaxed);
        let (results, skipped) = run(Options { passes: 2, stop, ..options() }, &groups, |progress| {
            STOPPED.fetch_or(progress.done == at, Ordering::Relaxed);
        });
        assert_eq!(results.iter().map(|result| result.workload).collect::<Vec<_>>(), expected);
        let left_out = vec![("second", "the run was stopped before"); 2 - expected.len()];
        assert_eq!(reasons(&skipped), left_out);
    }
}

#[test]
fn a_quick_run_ends_with_the_round_in_which_its_time_is_over() {
    let log = Log::default();
    let (team, timer) = (Team::new(1).unwrap(), OpTimer::calibrated());
    let until = Some(Instant::now() + Duration::from_secs(2));
    let slow = |name| group(name, vec![entrant(Script { until, ..script("a", &log) })]);
    let options = Options { passes: 1, rounds: 50, until, ..options() };
    let runner = Runner { team, timer, options };
    let (results, skipped) = runner.run(&[slow("first"), slow("second")], |_| ());
    assert_eq!(results.len(), 1);
    assert_eq!(log.lock().unwrap().iter().filter(|(_, ops)| *ops > 256).count(), 1);
    assert_eq!(reasons(&skipped), [("second", "the time of a quick run was over before")]);
}

#[test]
fn a_run_with_time_left_does_all_rounds() {
    let log = Log::default();
    let groups = ["first", "second", "third"].map(|name| group(name, vec![entrant(script("a", &log))]));
    let until = Some(Instant::now() + Duration::from_secs(3600));
    let (results, skipped) = run(Options { passes: 2, rounds: 3, until, ..options() }, &groups, |_| ());
    assert_eq!((results.len(), skipped.len()), (3, 0));
    assert_eq!(log.lock().unwrap().iter().filter(|(_, ops)| *ops > 256).count(), 3 * 2 * 3);
}

#[test]
fn what_is_called_quick_ends_within_half_a_minute() {
    use portcullis_bench::{bounce, invalidation, path, pgtable};
    let before = Instant::now();
    for options in [Options::quick(), pgtable::quick(), invalidation::quick(), bounce::quick(), path::quick()]
    {
        let until = options.until.expect("it ends");
        assert!(until > before && until < Instant::now() + Duration::from_secs(30));
    }
    for options in [Options::full(), pgtable::full(), invalidation::full(), bounce::full(), path::full()] {
        assert_eq!(options.until, None);
        assert!(options.passes * options.rounds >= 9, "{options:?}");
    }
}
