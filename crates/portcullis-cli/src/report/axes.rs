//! Axes.

use super::html::time;
use super::plot::Axis;

/// Times from `least` to `most` nanoseconds; their logarithms are the places.
pub fn times(title: &str, least: f64, most: f64) -> Axis {
    let label = |ns: f64| if ns < 1000.0 { format!("{ns:.0} ns") } else { time(ns).replace(".0 ", " ") };
    logarithmic(title, (at_time(least), at_time(most)), label)
}

/// Where a time is on such an axis.
pub fn at_time(ns: f64) -> f64 {
    ns.max(1.0).log10()
}

/// Shares from `least` to `most` as tenths of a percent; their logarithms are the places.
pub fn shares(title: &str, least: f64, most: f64) -> Axis {
    let label = |tenths: f64| format!("{} %", (tenths / 10.0 * 1e6).round() / 1e6);
    logarithmic(title, (at_share(least), at_share(most)), label)
}

/// Where a share is on such an axis.
pub fn at_share(share: f64) -> f64 {
    (share * 1000.0).max(1.0).log10()
}

/// Between places that are logarithms, from 0 on. `label` says what stands at a figure.
fn logarithmic(title: &str, (least, most): (f64, f64), label: impl Fn(f64) -> String) -> Axis {
    let most = most.max(least + 0.5);
    // Within two powers of ten there is room for what lies between them.
    let steps: &[f64] = if most - least < 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let room = 0.04 * (most - least);
    let range = ((least - room).max(0.0), most + room);
    let powers = range.0.floor() as i32..=range.1.ceil() as i32;
    let all = powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
    let ticks = all.filter(|at| (range.0..=range.1).contains(&at.log10())).map(|at| (at.log10(), label(at)));
    Axis { range, ticks: ticks.collect(), title: title.into() }
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
