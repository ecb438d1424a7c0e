//! Two replays beside each other.

use super::{Change, change_of, differences, machines, moves, signed, verdict};
use crate::look::{NOT_KNOWN, count};
use crate::report::benched::Entry;
use crate::report::html::table;
use crate::report::read::Replayed;
use crate::report::replayed::{distributions, line_of, mark, said_open, unmaps};
use crate::runs::Cost;
use crate::short::if_known;

/// What changed; nothing where no policy is in both.
pub fn section(before: &Replayed, after: &Replayed) -> Option<String> {
    let (old, new) = (&before.runs, &after.runs);
    let (mut rows, mut changes, mut moved) = (Vec::new(), Vec::new(), Vec::new());
    for (policy, cost) in new.report.policies.iter().zip(&new.costs) {
        let earlier =
            old.report.policies.iter().zip(&old.costs).find(|(other, _)| other.policy == policy.policy);
        let Some((was, cost_was)) = earlier else { continue };
        let change = cost.median_ns - cost_was.median_ns;
        let share = change_of(cost_was.median_ns.max(1.0), cost.median_ns.max(1.0));
        let tells = old.number > 1 && new.number > 1;
        let kind = match () {
            () if change.abs() < 1.0 => Change::Same,
            () if !tells => Change::NotTold,
            () if cost.overlaps(cost_was) => Change::Noise,
            () if change > 0.0 => Change::Slower,
            () => Change::Faster,
        };
        let told = cost.known && cost_was.known;
        if told {
            changes.push((policy.policy.to_owned(), share, kind));
            let of = |was: f64, is: f64| change_of(was.max(1.0), is.max(1.0));
            moved.push((share, (of(cost_was.most_ns, cost.least_ns), of(cost_was.least_ns, cost.most_ns))));
        }
        let ns = |cost: &Cost| if_known(cost, || count(cost.median_ns.round() as u64));
        let (was, is) = (said_open(was, old), said_open(policy, new));
        let [freed, other] = [0, 1].map(|at| match (&was[at], &is[at]) {
            (was, is) if was == is => is.clone(),
            (was, is) => format!("{was}, then {is}"),
        });
        rows.push(vec![
            policy.policy.to_owned(),
            ns(cost_was),
            ns(cost),
            if told { format!("{change:+.0} ns, {}", signed(share)) } else { NOT_KNOWN.into() },
            if told { kind.word().into() } else { NOT_KNOWN.into() },
            freed,
            other,
        ]);
    }
    if rows.is_empty() {
        return None;
    }
    let mut html = verdict(&changes, ["policy", "policies"]);
    html += &differences(&others(before, after));
    let subject = "cost of a mapping".to_owned();
    let entries: Vec<Entry<'_>> = changes
        .iter()
        .zip(moved)
        .map(|((policy, ..), (place, ends))| Entry {
            workload: policy,
            subject: &subject,
            place,
            ends,
            said: signed(place),
        })
        .collect();
    if !entries.is_empty() {
        html += &moves("Change of each policy's cost".into(), &entries, &[&subject]).figure();
    }
    let head = [
        "policy",
        "cost before, ns",
        "after",
        "change",
        "which is",
        "freed memory open for 1 s",
        "other data open for 1 s",
    ];
    html += &table("What changed, for each policy", &head.map(String::from), &rows);
    let (mut marks, mut behind) = (Vec::new(), Vec::new());
    for policy in &new.report.policies {
        let was = old.report.policies.iter().find(|other| other.policy == policy.policy);
        let was = was.filter(|was| !unmaps(policy).is_empty() && !unmaps(was).is_empty());
        let Some(was) = was else { continue };
        marks.push(mark(policy.policy, line_of(policy, new), unmaps(policy)));
        behind.push(mark(policy.policy, String::new(), unmaps(was)).lines);
    }
    if !marks.is_empty() {
        html += &distributions("An unmap, before and after", "In grey: before.", marks, behind);
    }
    Some(html)
}

/// What else than time may explain a change.
fn others(before: &Replayed, after: &Replayed) -> Vec<(&'static str, String, String)> {
    let of = |one: &Replayed| {
        let report = &one.runs.report;
        let policies: Vec<&str> = report.policies.iter().map(|policy| policy.policy).collect();
        [
            ("the policies", policies.join(" ")),
            ("the recording", report.trace.name.clone()),
            ("its events", count(report.trace.events)),
            ("its kind", crate::header::recorded(&report.trace.recorded)),
            ("the profile", report.profile.clone()),
            ("the page tables", one.format.clone()),
            ("the other work for each mapping, ns", count(report.work_ns as u64)),
        ]
    };
    let pairs = of(before).into_iter().zip(of(after)).map(|((what, was), (_, is))| (what, was, is));
    pairs.chain(machines(&before.origin.machine, &after.origin.machine)).collect()
}
