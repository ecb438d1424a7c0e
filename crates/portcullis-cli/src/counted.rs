//! What a policy costs by counts: the waits and the copied bytes of a replay, each at a price, and what the library's code takes.
//!
//! Measured times change with whatever else a machine does, and a choice that rests on them changes, too. Counts do not: equal recordings
//! give equal costs, on each machine. Prices are those of `portcullis scale`.

use std::sync::LazyLock;

use portcullis_model::scale::{Operations, POLICIES};
use portcullis_trace::replay::{Mode, PolicyReport};

use crate::runs::Cost;

/// Nanoseconds of a mapping and its unmap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parts {
    pub code_ns: f64,
    pub wait_ns: f64,
    pub copy_ns: f64,
}

impl Parts {
    pub fn ns(&self) -> f64 {
        self.code_ns + self.wait_ns + self.copy_ns
    }
}

/// What the library's code, its waits and its copies, at `kib_ns` each KiB, take for a mapping. A mapping of a ring waits for
/// `ring_wait_ns`, where that is known. Results of earlier versions have no count of copied bytes: of these
/// it is the run that others disturbed least.
pub fn parts(policy: &PolicyReport, measured: &Cost, kib_ns: f64, ring_wait_ns: Option<f64>) -> Parts {
    let wait_ns = policy.wait_ns_per_op;
    let all = |ns| Parts { code_ns: ns - wait_ns, wait_ns, copy_ns: 0.0 };
    match copies_ns(policy, kib_ns) {
        None => all(measured.least_ns),
        Some(_) if policy.mode == Mode::Adaptive && !policy.choices.is_empty() => {
            all(cheaper_ns(policy, kib_ns, ring_wait_ns))
        }
        Some(copy_ns) => Parts { code_ns: own_ns(policy.mode), wait_ns, copy_ns },
    }
}

/// What the bytes take that were copied for a mapping, at `kib_ns` each KiB; `None` where they were not counted.
pub fn copies_ns(policy: &PolicyReport, kib_ns: f64) -> Option<f64> {
    Some(policy.copied_bytes? as f64 / policy.operations.max(1) as f64 / 1024.0 * kib_ns)
}

/// Nanoseconds that an instruction of the kernel takes: what one of the library took in the row strict of the recording that ships, but for waits, on 2 virtual CPUs of
/// an AMD EPYC (family 26), 30 November 2026.
pub const INSTRUCTION_NS: f64 = 0.16;

/// Where that price comes from.
pub fn instruction() -> String {
    format!(
        "An instruction of the kernel takes {INSTRUCTION_NS} ns: what one of the library took in the row strict of the recording that ships, \
         in a program on one machine (2 virtual CPUs of an AMD EPYC, family 26, 30 November 2026). The kernel's may take half or twice that: the verdict \
         says what the choice would be then."
    )
}

/// What `adaptive` costs where each of its choices is made by counts: its own are made by times. What it maps waits as in
/// a ring (`ring_wait_ns`), if that was replayed, too: its own wait depends on how much it has mapped.
fn cheaper_ns(policy: &PolicyReport, kib_ns: f64, ring_wait_ns: Option<f64>) -> f64 {
    let copy_ns = |bytes: f64| bytes / 1024.0 * kib_ns;
    let rows = || policy.choices.iter().flat_map(|choices| &choices.rows);
    let mapped: u64 = rows().map(|row| row.mapped).sum();
    let own_wait_ns = policy.wait_ns_per_op * policy.operations as f64 / mapped.max(1) as f64;
    let wait_ns = ring_wait_ns.unwrap_or(own_wait_ns);
    let (mut all, mut ns) = (0.0, 0.0);
    for row in rows() {
        let number = (row.copied + row.mapped) as f64;
        let bytes = row.most_bytes as f64;
        let copied = own_ns(Mode::Bounce) + copy_ns(bytes);
        // Ends that share a page are copied, and what has nothing between its ends is copied whole.
        let ends = if row.shared { 2.0 * own_ns(Mode::Bounce) + copy_ns(PAGE) } else { 0.0 };
        let other = own_ns(Mode::Adaptive) + wait_ns + ends;
        let must_copy = row.shared && bytes < 3.0 * PAGE;
        ns += number * if must_copy { copied } else { copied.min(other) };
        all += number;
    }
    if all > 0.0 { ns / all } else { 0.0 }
}

const PAGE: f64 = 4096.0;

/// What the library's code takes for a page, without waits and copies; nothing where nothing was measured.
fn own_ns(mode: Mode) -> f64 {
    static OPERATIONS: LazyLock<Option<Operations>> = LazyLock::new(|| Operations::measured().ok());
    let policy = POLICIES.iter().find(|policy| policy.name == mode.name());
    let operation = policy.and_then(|policy| policy.operation);
    let ns = operation.and_then(|name| OPERATIONS.as_ref()?.alone_ns(name));
    ns.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use portcullis::domain::Policy;

    use super::*;
    use crate::replay::short_run;

    #[test]
    fn counts_have_a_price_each() {
        let (runs, _) = short_run();
        let at = |name| runs.report.policies.iter().position(|policy| policy.policy == name).unwrap();
        let (mut bounce, mut cost) =
            (runs.report.policies[at("bounce")].clone(), runs.costs[at("bounce")].clone());
        // 7.7 and 142 ns, and what scale has for a slot.
        let slot = own_ns(Mode::Bounce);
        let parts =
            |policy: &PolicyReport, cost: &Cost| parts(policy, cost, runs.calibration.copied_kib_ns(), None);
        assert!((10.0..100.0).contains(&slot), "{slot}");
        (bounce.operations, bounce.copied_bytes, bounce.wait_ns_per_op) = (4, Some(8 << 10), 3.0);
        assert!((parts(&bounce, &cost).ns() - (slot + 3.0 + 2.0 * 74.85)).abs() < 1e-9);
        // Whatever was measured.
        let counted = parts(&bounce, &cost).ns();
        (cost.median_ns, cost.least_ns, cost.most_ns) = (1e6, 1e5, 1e7);
        assert_eq!(parts(&bounce, &cost).ns().to_bits(), counted.to_bits());
        bounce.copied_bytes = None;
        assert_eq!(parts(&bounce, &cost).ns().to_bits(), 1e5_f64.to_bits());
    }

    #[test]
    fn each_strict_policy_has_a_cost_of_its_own() {
        for mode in Mode::ALL.into_iter().filter(|mode| mode.is_strict()) {
            assert!(own_ns(mode) > 0.0, "{}", mode.name());
        }
        assert_eq!(own_ns(Mode::Registered).to_bits(), 0.0_f64.to_bits());
        assert!(own_ns(Policy::LAZY.into()) > 0.0);
    }

    /// It chooses by times, which another load changes.
    #[test]
    fn adaptive_counts_the_same_whatever_it_has_chosen() {
        let (runs, _) = short_run();
        let mut adaptive =
            runs.report.policies.iter().find(|policy| policy.mode == Mode::Adaptive).unwrap().clone();
        let cost = runs.costs[0].clone();
        let ns = |policy: &PolicyReport| parts(policy, &cost, 50.0, Some(16.0)).ns();
        let counted = ns(&adaptive);
        let row = &mut adaptive.choices[0].rows[0];
        (row.copied, row.mapped) = (row.copied + row.mapped, 0);
        adaptive.wait_ns_per_op += 5.0;
        assert!((ns(&adaptive) - counted).abs() < 1e-9, "{counted}");
    }

    /// Two replays of one recording count the same.
    #[test]
    fn equal_recordings_have_equal_counts() {
        let counts = || {
            let (runs, _) = short_run();
            let all = runs.report.policies.iter().zip(&runs.costs);
            // Adaptive chooses by times.
            let all = all.filter(|(policy, _)| policy.mode != Mode::Adaptive);
            all.map(|(policy, cost)| {
                (policy.policy, parts(policy, cost, runs.calibration.copied_kib_ns(), None).ns().to_bits())
            })
            .collect::<Vec<_>>()
        };
        assert_eq!(counts(), counts());
    }
}
