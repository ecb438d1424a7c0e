//! How much CPUs may share.

use super::program::Outcome;

/// CPUs that the bounds are for.
pub const CPUS: u32 = 16;

/// The most transfers of a cache line between CPUs that one operation may take, for each workload. Counts, not times: they are
/// the same on every machine.
///
/// Bounds may only go down. They are what was measured last and half of that, as where CPUs meet, the order in which they come
/// moves a figure from one build to the next; the least is 0.02, which is the aim for all that does not cross CPUs by its nature.
/// A commit that takes a transfer out lowers the bounds that it can.
pub const BOUNDS: [(&str, f64); 47] = [
    ("raw-1", 0.02),
    ("raw-4", 0.02),
    ("typed-1", 0.02),
    ("typed-4", 0.02),
    ("lazy-1", 0.02),
    ("lazy-4", 0.02),
    ("sg-1", 0.02),
    ("sg-4", 0.02),
    ("batch-1", 0.02),
    ("batch-4", 0.02),
    ("ring-1", 0.02),
    ("ring-4", 0.02),
    ("pool-1", 0.02),
    ("pool-4", 0.02),
    ("swiotlb-1", 0.02),
    ("swiotlb-4", 0.02),
    ("swiotlb-64", 0.02),
    ("adaptive-1", 0.02),
    ("adaptive-4", 0.02),
    ("raw-64", 0.02),
    ("typed-64", 0.02),
    ("ring-64", 0.02),
    ("pool-64", 0.02),
    ("raw-1-live64", 0.02),
    ("typed-1-live64", 0.02),
    ("lazy-1-live64", 0.02),
    ("sg-1-live64", 0.02),
    ("batch-1-live64", 0.02),
    ("ring-1-live64", 0.02),
    ("pool-1-live64", 0.02),
    ("swiotlb-1-live64", 0.02),
    ("adaptive-1-live64", 0.02),
    ("cross-raw-1", 2.0),
    ("cross-typed-1", 6.1),
    ("cross-lazy-1", 2.0),
    ("cross-batch-1", 2.0),
    ("cross-quarter-raw-1", 2.4),
    ("cross-quarter-lazy-1", 3.0),
    ("flush-raw-1", 0.02),
    ("flush-ring-1", 0.02),
    ("flush-lazy-1", 0.04),
    ("hotplug-raw-1", 0.02),
    ("hotplug-lazy-1", 0.05),
    ("hotplug-pool-1", 0.02),
    // A hardware queue is a shared line by its nature: this says what it costs.
    ("vtd-raw-1", 46.8),
    ("vtd-shared-raw-1", 9.1),
    // Where each CPU has a queue, nothing is shared.
    ("smmu-own-raw-1", 0.02),
];

/// What exceeds its bound, as people read it. `outcomes` are in the order of `bounds`.
pub fn exceeded(outcomes: &[Outcome], bounds: &[(&str, f64)]) -> Vec<String> {
    let over = |(outcome, (workload, bound)): (&Outcome, &(&str, f64))| {
        let told = match &outcome.figures {
            Ok(figures) if figures.transfers <= *bound => return None,
            Ok(figures) => format!("{:.4} transfers for each operation", figures.transfers),
            Err(why) => why.clone(),
        };
        Some(format!("{workload}: {told}, at most {bound} are allowed"))
    };
    outcomes.iter().zip(bounds).filter_map(over).collect()
}

#[cfg(test)]
mod tests {
    use super::super::program::{Case, Figures};
    use super::*;

    #[test]
    fn what_exceeds_its_bound_or_has_no_figure_is_told() {
        let figures = |transfers| Ok(Figures { ns: 1.0, transfers, atomics: 0.0, far: 0.0 });
        let outcome = |figures| Outcome { case: Case::new("raw-1", CPUS), figures, sites: Vec::new() };
        let outcomes = [outcome(figures(0.5)), outcome(figures(0.51)), outcome(Err("no memory".to_owned()))];
        let over = exceeded(&outcomes, &[("a", 0.5), ("b", 0.5), ("c", 0.5)]);
        assert!(
            over.len() == 2 && over[0].starts_with("b: 0.51") && over[1].starts_with("c: no memory"),
            "{over:?}"
        );
    }

    #[test]
    fn each_workload_has_one_bound() {
        for (index, (workload, bound)) in BOUNDS.iter().enumerate() {
            assert!(
                *bound >= 0.02 && BOUNDS[..index].iter().all(|(other, _)| other != workload),
                "{workload}"
            );
        }
    }
}
