//! What a benchmark found, as every `portcullis bench` prints it with `--json` behind a head of its own.

use portcullis_trace::replay::Profile;
use serde::Serialize;

use crate::limits::Limits;
use crate::machine::Machine;
use crate::timer::TimerFigures;

/// Everything that one run of a benchmark found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The benchmark: `iova`, `pgtable`, `invalidation`, `bounce`, `path`.
    pub bench: &'static str,
    /// The machine that it ran on. The head of the JSON has this field and the next one.
    #[serde(skip)]
    pub machine: Machine,
    /// The hardware that was assumed.
    #[serde(skip)]
    pub profiles: Vec<Profile>,
    /// What that machine can do at best.
    pub limits: Limits,
    /// How well single operations were timed.
    pub timer: TimerFigures,
    /// What was measured.
    pub results: Vec<Measurement>,
    /// What was not, and why.
    pub skipped: Vec<Skipped>,
}

impl Report {
    /// What was measured of `subject` in `workload` with `threads` threads, in a benchmark without formats.
    pub fn find(&self, workload: &str, threads: usize, subject: &str) -> Option<&Measurement> {
        self.find_format(None, workload, threads, subject)
    }

    /// The same for one format.
    pub fn find_format(
        &self,
        format: Option<&str>,
        workload: &str,
        threads: usize,
        subject: &str,
    ) -> Option<&Measurement> {
        self.results.iter().find(|result| {
            (result.format, result.workload, result.threads, result.subject)
                == (format, workload, threads, subject)
        })
    }
}

/// One subject's figures for one workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measurement {
    /// In which format, where the benchmark has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    /// Which way the data went, where any did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direction: Option<&'static str>,
    /// What was done.
    pub workload: &'static str,
    /// By how many threads at once.
    pub threads: usize,
    /// With what.
    pub subject: &'static str,
    /// Wall-clock nanoseconds per operation of one thread: the median of the repetitions. Where threads do
    /// not hinder each other it is the same for any number of them.
    pub ns_per_op: f64,
    /// The least of the repetitions.
    pub min: f64,
    /// The greatest of the repetitions.
    pub max: f64,
    /// 99.99 % of single operations took no longer; `None` where they were not timed one by one.
    pub p99_99: Option<f64>,
    /// The hardware whose waits were assumed, where the benchmark assumes any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// What the time went into, where the benchmark tells.
    #[serde(flatten)]
    pub split: Option<Split>,
    /// How the time was divided, where operations have two halves that were timed apart.
    #[serde(flatten)]
    pub halves: Option<Halves>,
}

/// What the two halves of an operation took, of one thread in the repetition that took the median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Halves {
    /// How many mappings of each thread were in use at a time.
    pub depth: usize,
    /// Nanoseconds of a map.
    pub map_ns: f64,
    /// Nanoseconds of an unmap.
    pub unmap_ns: f64,
}

/// What the time of one repetition went into, for each operation: that of the slowest thread, as `ns_per_op` is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Split {
    /// Nanoseconds in calls of the invalidation queue: the hardware's wait, and that for another's batch.
    pub wait_ns: f64,
    /// Nanoseconds in which somebody else had a lock of the subject that was wanted. Locks of the library itself
    /// are not told apart: those of its shared queue are in `wait_ns`, those of its flush queues in `work_ns`.
    pub lock_ns: f64,
    /// All the rest.
    pub work_ns: f64,
    /// Submissions to the hardware, of all threads together, for each of their operations.
    pub submissions_per_op: f64,
    /// Requests in these submissions.
    pub requests_per_op: f64,
    /// Nanoseconds that the hardware worked, of all threads together, for each of their operations.
    pub hardware_wait_ns_per_op: f64,
    /// Nanoseconds of an operation in the median of those blocks of 64 in which the thread did not flush, where
    /// operations flush now and then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_flush: Option<f64>,
}

impl Measurement {
    /// Half of what lies between the least and the greatest repetition, as a share of the median.
    pub fn spread(&self) -> f64 {
        (self.max - self.min) / 2.0 / self.ns_per_op
    }
}

/// A subject that did not do a workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// In which format, where the benchmark has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    /// Which way the data was to go, where any was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direction: Option<&'static str>,
    /// What was to be done.
    pub workload: &'static str,
    /// By how many threads at once.
    pub threads: usize,
    /// With what.
    pub subject: &'static str,
    /// The hardware whose waits were to be assumed, where subjects of one benchmark differ in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Why not.
    pub reason: String,
}
