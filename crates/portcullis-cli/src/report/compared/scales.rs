//! Two simulations beside each other. They have no noise: the same program comes to the same figures.

use super::{Change, change, change_of, differences, signed, verdict};
use crate::look::{count, number_of};
use crate::report::axes::around_zero;
use crate::report::html::table;
use crate::report::read::{Scale, Scaled};
use crate::report::scaled::by_cpus;

/// What changed; nothing where no policy on a number of CPUs is in both.
pub fn section(before: &Scaled, after: &Scaled) -> Option<String> {
    let find = |is| {
        let key = |result: &Scale| (result.policy.clone(), result.cpus);
        before.results.iter().find(|was| key(was) == key(is)).map(|was| (was, is))
    };
    let pairs: Vec<(&Scale, &Scale)> = after.results.iter().filter_map(find).collect();
    if pairs.is_empty() {
        return None;
    }
    let share = |(was, is): &(&Scale, &Scale)| change_of(was.requests_per_s, is.requests_per_s);
    // The figures are printed to a tenth of a per cent.
    let kind = |pair: &(&Scale, &Scale)| match share(pair) {
        share if share.abs() < 0.0005 => Change::Same,
        share if share > 0.0 => Change::Faster,
        _ => Change::Slower,
    };
    let most = pairs.iter().map(|(_, is)| is.cpus).max().unwrap_or(0);
    let there = pairs.iter().filter(|(_, is)| is.cpus == most);
    let changes: Vec<_> = there.map(|pair| (pair.1.policy.clone(), share(pair), kind(pair))).collect();
    let on = number_of(most, "CPU");
    let mut html = verdict(&changes, [&format!("policy on {on}"), &format!("policies on {on}")]);
    let (was, is) = (before, after);
    html += &differences(&[
        ("the workload", was.workload.clone(), is.workload.clone()),
        ("the profile", was.profile.clone(), is.profile.clone()),
        ("the calibration", was.calibration.machine.clone(), is.calibration.machine.clone()),
    ]);
    let moved: Vec<Scale> =
        pairs.iter().map(|pair| Scale { relative_to_passthrough: share(pair), ..pair.1.clone() }).collect();
    let places = || moved.iter().map(|result| result.relative_to_passthrough);
    let (least, most) = (places().fold(-0.01, f64::min), places().fold(0.01, f64::max));
    html += &by_cpus(
        &moved,
        "Change of requests in a second".into(),
        "Above 0 there are more than before. A ring: extrapolated.",
        around_zero("change", least, most, change),
        |result| result.relative_to_passthrough,
        |result| signed(result.relative_to_passthrough),
    )
    .figure();
    let row = |pair: &(&Scale, &Scale)| {
        let (was, is) = pair;
        let requests = [was, is].map(|result| count(result.requests_per_s as u64));
        let shares = [was, is].map(|result| format!("{:.1} %", result.relative_to_passthrough * 100.0));
        let first = vec![is.policy.clone(), is.cpus.to_string()];
        [first, requests.to_vec(), vec![signed(share(pair)), kind(pair).word().into()], shares.to_vec()]
            .concat()
    };
    let head = [
        "policy",
        "CPUs",
        "requests per second before",
        "after",
        "change",
        "which is",
        "share of full throughput before",
        "after",
    ];
    html += &table("What changed", &head.map(String::from), &pairs.iter().map(row).collect::<Vec<_>>());
    Some(html)
}
