//! Two replays beside each other: what changed.

use super::axes::class_of;
use super::html::{details, element, table};
use super::read::Replayed;
use super::replayed::{cost_and_exposure_of, distribution, mark, unmaps};
use super::warning;
use crate::look::{bytes, count};

pub fn section(before: &Replayed, after: &Replayed) -> String {
    let (old, new) = (&before.runs, &after.runs);
    let mut html = element("h2", "Before and after");
    let mut rows = Vec::new();
    let (mut slower, mut faster) = (Vec::new(), Vec::new());
    for (policy, cost) in new.report.policies.iter().zip(&new.costs) {
        let earlier =
            old.report.policies.iter().zip(&old.costs).find(|(other, _)| other.policy == policy.policy);
        let Some((was, cost_was)) = earlier else { continue };
        let change = cost.median_ns - cost_was.median_ns;
        let share = change / cost_was.median_ns.max(1.0) * 100.0;
        // One run has no spread, and says nothing of noise.
        let tells = old.number > 1 && new.number > 1;
        let verdict = match () {
            () if tells && cost.overlaps(cost_was) => "within the noise",
            () if change.abs() < 1.0 => "the same",
            () if change > 0.0 => "slower",
            () => "faster",
        };
        let said = format!("{} ({share:+.0} %)", policy.policy);
        match verdict {
            "slower" => slower.push(said),
            "faster" => faster.push(said),
            _ => {}
        }
        let ns = |ns: f64| count(ns.round() as u64);
        let open = |open: f64| if open > 0.0 { bytes(open) } else { "none".into() };
        rows.push(vec![
            policy.policy.to_owned(),
            ns(cost_was.median_ns),
            ns(cost.median_ns),
            format!("{change:+.0} ns, {share:+.0} %"),
            verdict.into(),
            open(was.exposure.stale_byte_s),
            open(policy.exposure.stale_byte_s),
            open(was.exposure.neighbour_byte_s),
            open(policy.exposure.neighbour_byte_s),
        ]);
    }
    let list = |names: &[String], what: &str| {
        if names.is_empty() {
            format!("Nothing became {what}.")
        } else {
            format!("It became {what}: {}.", names.join(", "))
        }
    };
    html += "<div class=\"verdict\">\n";
    html += &element("p", &list(&faster, "faster"));
    html += &element("p", &list(&slower, "slower"));
    html += "</div>\n";
    for (what, was, is) in differences(before, after) {
        html += &warning(&format!("The two differ in their {what}, too: {was} before, {is} after."));
    }
    html += &cost_and_exposure_of(new, Some(old)).figure();
    let head = [
        "policy",
        "cost before, ns",
        "after",
        "change",
        "which is",
        "freed memory before",
        "after",
        "other data before",
        "after",
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
    html + &details(
        "How long unmaps took, before and after",
        &format!("<div class=\"grid-of-plots\">{plots}</div>\n"),
    )
}

/// What else than time may explain a change.
fn differences(before: &Replayed, after: &Replayed) -> Vec<(&'static str, String, String)> {
    let of = |one: &Replayed| {
        let (report, machine) = (&one.runs.report, &one.origin.machine);
        [
            ("recordings", report.trace.name.clone()),
            ("number of events", count(report.trace.events)),
            ("profiles", report.profile.clone()),
            ("page tables", one.format.clone()),
            ("work, ns", count(report.work_ns as u64)),
            ("machines", machine.cpu.clone().unwrap_or_default()),
            ("number of CPUs", machine.cpus.to_string()),
        ]
    };
    let pairs = of(before).into_iter().zip(of(after));
    pairs.filter(|(was, is)| was.1 != is.1).map(|((what, was), (_, is))| (what, was, is)).collect()
}
