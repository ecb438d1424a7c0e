//! Two replays beside each other.

use super::{Change, change_of, differences, machines, signed, verdict};
use crate::look::{NOT_KNOWN, count};
use crate::report::axes::class_of;
use crate::report::html::{details, table};
use crate::report::read::Replayed;
use crate::report::replayed::{cost_and_exposure_of, distribution, mark, said_open, unmaps};
use crate::runs::Cost;
use crate::short::if_known;

/// What changed; nothing where no policy is in both.
pub fn section(before: &Replayed, after: &Replayed) -> Option<String> {
    let (old, new) = (&before.runs, &after.runs);
    let (mut rows, mut changes) = (Vec::new(), Vec::new());
    for (policy, cost) in new.report.policies.iter().zip(&new.costs) {
        let earlier =
            old.report.policies.iter().zip(&old.costs).find(|(other, _)| other.policy == policy.policy);
        let Some((was, cost_was)) = earlier else { continue };
        let change = cost.median_ns - cost_was.median_ns;
        let share = change_of(cost_was.median_ns.max(1.0), cost.median_ns.max(1.0));
        // One run has no spread, and says nothing of noise.
        let tells = old.number > 1 && new.number > 1;
        let kind = match () {
            () if change.abs() < 1.0 => Change::Same,
            () if tells && cost.overlaps(cost_was) => Change::Noise,
            () if change > 0.0 => Change::Slower,
            () => Change::Faster,
        };
        let told = cost.known && cost_was.known;
        if told {
            changes.push((policy.policy.to_owned(), share, kind));
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
    html += &cost_and_exposure_of(new, Some(old)).figure();
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
    let mut plots = String::new();
    for (at, policy) in new.report.policies.iter().enumerate() {
        let Some(was) = old.report.policies.iter().find(|other| other.policy == policy.policy) else {
            continue;
        };
        if unmaps(policy).is_empty() || unmaps(was).is_empty() {
            continue;
        }
        let marks = vec![
            mark("before", "was", unmaps(was)),
            mark("after", &class_of(policy.policy, at), unmaps(policy)),
        ];
        let mut plot = distribution(&format!("An unmap under {}", policy.policy), marks);
        plot.caption.clear();
        plots += &plot.small();
    }
    if !plots.is_empty() {
        let plots = format!("<div class=\"grid-of-plots\">{plots}</div>\n");
        html += &details("How long unmaps took, before and after", &plots);
    }
    Some(html)
}

/// What else than time may explain a change.
fn others(before: &Replayed, after: &Replayed) -> Vec<(&'static str, String, String)> {
    let of = |one: &Replayed| {
        let report = &one.runs.report;
        [
            ("recordings", report.trace.name.clone()),
            ("number of events", count(report.trace.events)),
            ("kind of recording", crate::header::recorded(&report.trace.recorded)),
            ("profiles", report.profile.clone()),
            ("page tables", one.format.clone()),
            ("work, ns", count(report.work_ns as u64)),
        ]
    };
    let pairs = of(before).into_iter().zip(of(after)).map(|((what, was), (_, is))| (what, was, is));
    pairs.chain(machines(&before.origin.machine, &after.origin.machine)).collect()
}
