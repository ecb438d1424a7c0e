//! A device that retries every address it ever saw, over whole traces, while the policies of all domains change.

use crate::common::{SHIPPED, replayed_modes, run, trace};
use portcullis::domain::Policy;
use portcullis_trace::replay::{InForce, Mode, Options, PolicyReport, Profile, Promise, Retry, replay};
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
        let report = run("shipped", SHIPPED, &options(&replayed_modes(), Some(seed), EVERY));
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
        // Both were in force for many of them, and the exposure of lazy protection was seen.
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
    let report = run("shipped", SHIPPED, &options(&replayed_modes(), None, EVERY));
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

/// A device that tries each address before each operation and at the end: one page, two more, and both after their ends.
#[test]
fn tries_of_old_addresses_are_counted_by_what_was_promised() {
    let events = |end_us: u64| {
        trace(&[
            (0, 0, "dma_map_page: d dir=FROM_DEVICE dma_addr=1000 size=4096 phys_addr=5000 attrs="),
            (0, 1, "dma_map_page: d dir=FROM_DEVICE dma_addr=8000 size=8192 phys_addr=9000 attrs="),
            (0, 2, "dma_unmap_page: d dir=FROM_DEVICE dma_addr=1000 size=4096 attrs="),
            (0, 3, "dma_unmap_page: d dir=FROM_DEVICE dma_addr=8000 size=8192 attrs="),
            (0, end_us, "sched_switch: x"),
        ])
    };
    let of = |mode: Mode, end_us: u64, change_policies: Option<u64>, every_ops: u64| {
        let report = run("tries", events(end_us).as_bytes(), &options(&[mode], change_policies, every_ops));
        assert_eq!((report.policies[0].faults, report.policies[0].violations), (0, 0));
        found(&report.policies[0])
    };
    let strict = Mode::Each(Policy::Strict);
    // Nothing, one, three, three, and three at the end.
    let (tries, ended) = (10, Promise { unmaps: 2, ..Promise::default() });
    for mode in PROTECTING.into_iter().filter(|mode| mode.is_strict()) {
        let found = of(mode, 20_000, None, 1);
        assert_eq!(
            found,
            InForce { strict: ended, tries: found.tries, ..InForce::default() },
            "{}",
            mode.name()
        );
        assert_eq!(of(mode, 20_000, None, u64::MAX).changes, 0);
    }
    assert_eq!(of(strict, 20_000, None, 1).tries, tries);
    assert_eq!(of(strict, 20_000, None, 2).tries, 1 + 3 + 3);
    // Lazily: one page before the fourth operation; all three at the end, within the window or after it.
    for (end_us, stale) in [(5_000, 1 + 3), (20_000, 1)] {
        let lazy = Promise { stale, ..ended };
        assert_eq!(
            of(Mode::Each(Policy::LAZY), end_us, None, 1),
            InForce { lazy, tries, ..InForce::default() }
        );
    }
    // With a change each address is tried twice, but not at the end.
    let mut met = std::collections::BTreeSet::new();
    for seed in 1..=12 {
        let found = of(strict, 20_000, Some(seed), 1);
        assert_eq!((found.changes, found.tries, found.violations()), (3, 2 * (1 + 3 + 3) + 3, 0));
        assert_eq!(found.strict.unmaps + found.lazy.unmaps, 2);
        met.insert((found.strict.unmaps, found.lazy.unmaps));
        // Copied buffers are closed at once, whatever the policy of mapped ones.
        let copied = of(Mode::Bounce, 20_000, Some(seed), 1);
        assert_eq!((copied.strict.unmaps, copied.lazy.unmaps, copied.changes), (2, 0, 3));
    }
    assert_eq!(met.len(), 3, "each way to end two mappings: {met:?}");
}

/// All traces in the folder of `PORTCULLIS_TRACES`; `cargo xtask test` runs this if it is set, and counts it as skipped otherwise.
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
