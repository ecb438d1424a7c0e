//! A device that retries every address it ever saw, over whole traces, while the policies of all domains change.

use crate::common::{SHIPPED, run};
use portcullis::domain::Policy;
use portcullis_trace::replay::{InForce, Mode, Options, PolicyReport, Profile, Retry, replay};
use portcullis_trace::{ReadOptions, Trace};

/// All that protect anything.
const PROTECTING: [Mode; 6] = [
    Mode::Each(Policy::Strict),
    Mode::StrictBatch,
    Mode::StrictRing,
    Mode::Bounce,
    Mode::Adaptive,
    Mode::Each(Policy::LAZY),
];

/// Operations between two retries.
const EVERY: u64 = 500;

fn options(policies: &[Mode], change_policies: Option<u64>, every_ops: u64) -> Options {
    Options {
        policies: policies.to_vec(),
        retry: Some(Retry { every_ops, change_policies }),
        ..Options::new(Profile::load("none").unwrap())
    }
}

fn untranslated(report: &PolicyReport) -> bool {
    [Mode::PASSTHROUGH, Mode::Swiotlb].iter().any(|mode| mode.name() == report.policy)
}

fn found(report: &PolicyReport) -> InForce {
    report.in_force.unwrap()
}

#[test]
fn whatever_is_in_force_keeps_its_promise_while_policies_change() {
    for seed in [1, 2, 3] {
        let report = run("shipped", SHIPPED, &options(&Mode::ALL, Some(seed), EVERY));
        for policy in &report.policies {
            let found = found(policy);
            assert_eq!(
                (policy.violations, policy.faults, policy.failures),
                (0, 0, 0),
                "{} {found:?}",
                policy.policy
            );
            if untranslated(policy) {
                assert_eq!(found, InForce::default(), "nothing is promised, nothing is changed");
                continue;
            }
            assert!(found.changes > 100 && found.tries > 10_000, "{found:?}");
            assert_eq!(found.strict.unmaps + found.lazy.unmaps, report.trace.unmaps);
            assert_eq!(found.strict.stale, 0);
        }
        // Both were in force for many of them, and what lazy protection leaves open was seen.
        for policy in &report.policies[..] {
            if matches!(policy.policy, "strict" | "lazy") {
                let found = found(policy);
                assert!(found.strict.unmaps > 1000 && found.lazy.unmaps > 1000, "{found:?}");
                assert!(found.lazy.stale > 0, "{found:?}");
            }
        }
    }
}

#[test]
fn without_changes_the_policy_asked_for_is_the_one_in_force() {
    let report = run("shipped", SHIPPED, &options(&Mode::ALL, None, EVERY));
    for policy in &report.policies {
        let found = found(policy);
        assert_eq!((policy.violations, found.changes, found.violations()), (0, 0, 0), "{}", policy.policy);
        match policy.policy {
            "lazy" => assert_eq!((found.strict.unmaps, found.lazy.unmaps), (0, report.trace.unmaps)),
            _ if untranslated(policy) => assert_eq!(found, InForce::default()),
            _ => assert_eq!((found.strict.unmaps, found.lazy.unmaps), (report.trace.unmaps, 0)),
        }
    }
}

#[test]
fn a_driver_that_forgets_to_invalidate_is_seen_by_either_policy() {
    let policies = [Policy::Strict.into(), Policy::LAZY.into()];
    let report =
        run("shipped", SHIPPED, &Options { break_invalidation: true, ..options(&policies, Some(1), EVERY) });
    for policy in &report.policies {
        let found = found(policy);
        assert!(found.strict.violations > 0 && found.lazy.violations > 0, "{}: {found:?}", policy.policy);
        assert!(found.astray > 0, "addresses that come again lead to old memory: {found:?}");
    }
}

/// All traces in the folder that `PORTCULLIS_TRACES` names; `cargo xtask test` runs this where it names one, and
/// counts it as skipped where it does not.
#[test]
#[ignore = "needs a folder of traces in PORTCULLIS_TRACES"]
fn every_trace_keeps_its_promises() {
    let Some(paths) = crate::common::traces() else { return };
    let mut broken = Vec::new();
    for path in &paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut every = 2_000;
        for change in [None, Some(7)] {
            let mut trace = Trace::open(path, ReadOptions::default()).unwrap();
            let report = replay(&mut trace, &options(&PROTECTING, change, every), |_| ()).unwrap();
            // A hundred changes or more, however short it is.
            every = ((report.trace.maps + report.trace.unmaps) / 100).clamp(1, every);
            println!("{name}: {} unmaps, changes: {}", report.trace.unmaps, change.is_some());
            for policy in &report.policies {
                let found = found(policy);
                println!(
                    "  {:<12} violations {} faults {} failures {} longest stale {} ns, {found:?}",
                    policy.policy, policy.violations, policy.faults, policy.failures, policy.longest_stale_ns
                );
                if (policy.violations, policy.failures) != (0, 0) {
                    broken.push((name.clone(), policy.policy, change));
                }
            }
        }
    }
    println!("{} traces", paths.len());
    assert!(broken.is_empty(), "{broken:?}");
}
