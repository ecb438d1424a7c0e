//! Axes, and the classes of policies.

use super::html::time;
use super::plot::Axis;

/// Powers of ten from `least` to `most` nanoseconds; their logarithms are the places.
pub fn times(title: &str, least: f64, most: f64) -> Axis {
    let (first, last) = (least.max(1.0).log10().floor(), most.max(10.0).log10().ceil());
    let ticks = (first as i32..=last as i32).map(|power| {
        let ns = 10f64.powi(power);
        (f64::from(power), if ns < 1000.0 { format!("{ns:.0} ns") } else { time(ns).replace(".0 ", " ") })
    });
    Axis { range: (first, last.max(first + 1.0)), ticks: ticks.collect(), title: title.into() }
}

/// Where a time is on such an axis.
pub fn at_time(ns: f64) -> f64 {
    ns.max(1.0).log10()
}

/// From 0 on, in steps of 1, 2 or 5 times a power of ten, to `most`.
pub fn from_zero(title: &str, most: f64, label: impl Fn(f64) -> String) -> Axis {
    let rough = (most / 4.0).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough).unwrap_or(power);
    let count = (most / step).ceil().max(1.0) as usize;
    let ticks = (0..=count).map(|n| (n as f64 * step, label(n as f64 * step))).collect();
    Axis { range: (0.0, count as f64 * step), ticks, title: title.into() }
}

/// The class of a policy in the page's style: its colour says what kind of protection it is. What has no colour of its own
/// takes the next of some.
pub fn class_of(policy: &str, number: usize) -> String {
    let known =
        ["strict", "strict-batch", "strict-ring", "bounce", "adaptive", "lazy", "swiotlb", "passthrough"];
    match known.contains(&policy) {
        true => format!("of-{policy}"),
        false => format!("nr-{}", number % 7),
    }
}
