//! The same replay several times: what each policy costs in the middle, and how far the runs lie apart.

use portcullis_trace::replay::{PolicyReport, Report};
use serde::Serialize;

use crate::calibration::Calibration;
use crate::look::count;

/// What a policy costs for each operation, in nanoseconds: its calls and its waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cost {
    pub policy: &'static str,
    pub median_ns: f64,
    pub least_ns: f64,
    pub most_ns: f64,
    /// The recording tells what it costs. If not, the other figures are of what is left without the copies.
    pub known: bool,
    /// There were [enough](TIMED_FROM) mappings to time. If not, the other figures are of first calls.
    pub timed: bool,
}

/// The fewest mappings that are timed. First calls fill caches: with 100 mappings the library's own code took 5 to 8 times what it did with
/// 40,000, with 250 up to 5 times, and with 1,000 up to 1.9 times, of three recordings on 2 virtual CPUs. That is within
/// the factor of two by which prices of the kernel's code may be wrong anyway.
pub const TIMED_FROM: u64 = 1_000;

impl Cost {
    /// What was measured tells it.
    pub fn is_told(&self) -> bool {
        self.known && self.timed
    }

    /// A run of each cost as much as one of the other, so the runs do not rank them.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.least_ns <= other.most_ns && other.least_ns <= self.most_ns
    }
}

/// Some runs, as one report.
#[derive(Debug)]
pub struct Runs {
    /// Of each policy the run with the median cost.
    pub report: Report,
    /// What each policy costs, in the report's order; empty where nothing was mapped.
    pub costs: Vec<Cost>,
    pub number: usize,
    /// There is one run only because it took too long for more.
    pub too_long: bool,
    /// At which prices the copies are.
    pub calibration: Calibration,
}

impl Runs {
    /// Joins the reports of one trace under the same options; `None` where there are none.
    pub fn of(reports: Vec<Report>) -> Option<Self> {
        let number = reports.len();
        let mut report = reports.first()?.clone();
        let mut costs = Vec::new();
        for (at, policy) in report.policies.iter_mut().enumerate() {
            let mut runs: Vec<_> = reports.iter().filter_map(|report| report.policies.get(at)).collect();
            runs.sort_by(|a, b| cost_ns(a, report.work_ns).total_cmp(&cost_ns(b, report.work_ns)));
            let (least, median, most) = (runs.first()?, runs[(runs.len() - 1) / 2], runs.last()?);
            let ns = |run: &PolicyReport| cost_ns(run, report.work_ns);
            if median.operations > 0 {
                let (median_ns, least_ns, most_ns) = (ns(median), ns(least), ns(most));
                let known = report.trace.tells_cost_of(median.mode);
                let timed = median.operations >= TIMED_FROM;
                costs.push(Cost { policy: median.policy, median_ns, least_ns, most_ns, known, timed });
            }
            *policy = median.clone();
            // What is wrong in any run is wrong.
            let worst =
                |count: fn(&PolicyReport) -> u64| runs.iter().map(|run| count(run)).max().unwrap_or(0);
            (policy.violations, policy.faults) = (worst(|run| run.violations), worst(|run| run.faults));
        }
        Some(Self { report, costs, number, too_long: false, calibration: Calibration::default() })
    }
}

/// Why there are no times, if so.
pub fn too_few(costs: &[Cost], operations: u64) -> Option<String> {
    costs.iter().any(|cost| !cost.timed).then(|| {
        format!(
            "Too few mappings to time: {}; {} are needed, as first calls take several times what later ones do. So costs in this verdict are counted, and not measured.",
            count(operations),
            count(TIMED_FROM)
        )
    })
}

/// The share of the CPU's time that a policy adds to passthrough's.
pub fn cpu_time(policy: &PolicyReport) -> f64 {
    (1.0 - policy.relative_to_passthrough.unwrap_or(1.0)).clamp(0.0, 1.0)
}

fn cost_ns(policy: &PolicyReport, work_ns: f64) -> f64 {
    if policy.ops_per_s > 0.0 { (1e9 / policy.ops_per_s - work_ns).max(0.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(least_ns: f64, median_ns: f64, most_ns: f64) -> Cost {
        Cost { policy: "strict", median_ns, least_ns, most_ns, known: true, timed: true }
    }

    #[test]
    fn costs_overlap_where_runs_of_each_cost_the_same() {
        let one = cost(10.0, 12.0, 20.0);
        for (other, overlaps) in [
            (cost(20.0, 21.0, 30.0), true),
            (cost(20.1, 21.0, 30.0), false),
            (cost(1.0, 9.0, 10.0), true),
            (cost(1.0, 9.0, 9.9), false),
        ] {
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (overlaps, overlaps), "{other:?}");
        }
    }
}
