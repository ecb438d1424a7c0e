//! Axes, and the classes of policies.

use super::html::time;
use super::plot::Axis;

/// Times from `least` to `most` nanoseconds; their logarithms are the places.
pub fn times(title: &str, least: f64, most: f64) -> Axis {
    let least = at_time(least);
    let most = at_time(most).max(least + 0.5);
    // Within two powers of ten there is room for what lies between them.
    let steps: &[f64] = if most - least < 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let room = 0.04 * (most - least);
    let range = ((least - room).max(0.0), most + room);
    let powers = range.0.floor() as i32..=range.1.ceil() as i32;
    let all = powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
    let label = |ns: f64| if ns < 1000.0 { format!("{ns:.0} ns") } else { time(ns).replace(".0 ", " ") };
    let ticks = all.filter(|ns| (range.0..=range.1).contains(&ns.log10())).map(|ns| (ns.log10(), label(ns)));
    Axis { range, ticks: ticks.collect(), title: title.into() }
}

/// Where a time is on such an axis.
pub fn at_time(ns: f64) -> f64 {
    ns.max(1.0).log10()
}

/// From 0, or from `least` where that is less, to a little more than `most`, in steps of 1, 2 or 5 times a power of ten.
/// `label` says a step's place, and is told how long a step is.
pub fn around_zero(title: &str, least: f64, most: f64, label: impl Fn(f64, f64) -> String) -> Axis {
    let (least, most) = (least.min(0.0), most.max(0.0));
    let span = (most - least).max(1e-9);
    let rough = span / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough).unwrap_or(power);
    let room = 0.04 * span;
    let range = (if least < 0.0 { least - room } else { 0.0 }, most + room);
    let steps = (range.0 / step).ceil() as i64..=(range.1 / step).floor() as i64;
    let ticks = steps.map(|n| (n as f64 * step, label(n as f64 * step, step))).collect();
    Axis { range, ticks, title: title.into() }
}

/// The label of a share, with as many digits as tell it from the next step.
pub fn share(at: f64, step: f64) -> String {
    let percent = at * 100.0;
    match step {
        _ if percent.abs() >= 1e6 => format!("{percent:.0e} %"),
        _ if step >= 0.01 => format!("{percent:.0} %"),
        _ if step >= 0.001 => format!("{percent:.1} %"),
        _ => format!("{percent:.2} %"),
    }
}

/// The class of a policy in the page's style: its colour says what kind of protection it is. A design of the past takes one of
/// four others.
pub fn class_of(policy: &str, number: usize) -> String {
    let known =
        ["strict", "strict-batch", "strict-ring", "bounce", "adaptive", "lazy", "swiotlb", "passthrough"];
    match known.contains(&policy) {
        true => format!("of-{policy}"),
        false => format!("old-{}", number % 4),
    }
}
