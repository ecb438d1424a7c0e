//! What a replay comes to, for a reader who has never heard of an IOTLB: what protection costs, which policy to choose, at what rate
//! that changes, and what it leaves open.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, PolicyReport, Report, Work};

use crate::choice::{
    BUSY, Besides, Candidate, Chosen, OTHER_KERNEL, OTHER_WAITS, SMALL, advice, by_copies, by_other, capital,
    choose, no_copies, range, tied, too_little, without_module,
};
use crate::look::{bytes, count, number_of, percent, short_time};
use crate::on_linux::{self, Offer, Place};
use crate::price::{Code, Price, Prices};
use crate::runs::{Runs, cpu_time, too_few};

/// A policy at a rate of mappings.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    policy: &'a PolicyReport,
    pub price: Price<'a>,
    /// The recording tells what it leaves open in the pages of buffers.
    known: bool,
    /// What passthrough costs.
    base_ns: f64,
    /// The CPU time that comes with each mapping besides; `None` for the report's own, whose share the report has.
    work_ns: Option<f64>,
    own_ns: f64,
}

impl<'a> Row<'a> {
    pub fn at(self, work_ns: f64) -> Self {
        Self { work_ns: Some(work_ns), ..self }
    }

    /// Where it costs something else, at the same rate.
    fn with(self, price: impl FnOnce(Price<'a>) -> Price<'a>) -> Self {
        Self { price: price(self.price), ..self.at(self.work_ns.unwrap_or(self.own_ns)) }
    }

    /// The other CPU work for each mapping, in nanoseconds, from which on it takes less than `share` of the CPU's time.
    pub fn work_ns(&self, share: f64) -> f64 {
        ((self.price.ns - self.base_ns) / share - self.price.ns).max(0.0)
    }

    /// How many mappings a CPU makes in a second that does `work_ns` of other work for each, in two digits.
    fn rate(&self, work_ns: f64) -> String {
        let per_s = 1e9 / (work_ns + self.price.ns).max(1.0);
        let unit = 10_f64.powf(per_s.log10().floor() - 1.0).max(1.0);
        format!("up to {} mappings/s on a CPU", count(((per_s / unit).round() * unit) as u64))
    }

    /// The share of the CPU's time that a cost of `ns` is.
    fn share(&self, ns: f64) -> f64 {
        let all = self.work_ns.unwrap_or(self.own_ns) + ns;
        if all > 0.0 { ((ns - self.base_ns) / all).max(0.0) } else { 0.0 }
    }
}

impl Candidate for Row<'_> {
    fn mode(&self) -> Mode {
        self.policy.mode
    }

    fn row(&self) -> &'static str {
        self.price.row
    }

    fn lost(&self) -> f64 {
        match self.work_ns {
            None if self.price.code == Code::Library && self.price.cost.timed => cpu_time(self.policy),
            _ => self.share(self.price.ns),
        }
    }

    fn deciding(&self) -> f64 {
        self.share(self.price.counted.ns())
    }

    fn open(&self) -> f64 {
        self.policy.exposure.neighbour_byte_s
    }

    fn open_in_words(&self) -> Option<String> {
        let more = if self.open_is_known() { "" } else { "more than " };
        Some(format!(" (in sum, {more}{} for one second)", bytes(self.open())))
    }

    fn open_is_known(&self) -> bool {
        self.known
    }

    fn hardly_busy(self) -> Self {
        self.at(self.own_ns * BUSY)
    }

    fn may_cost_as_much(&self, other: &Self) -> bool {
        self.price.may_be_as_much_as(&other.price)
    }
}

/// A row for each policy whose cost the recording tells. Each row has the price of the code that runs where these policies are on `offer`, and the
/// other CPU time that the report assumes for a mapping.
pub fn rows<'a>(runs: &'a Runs, offer: Offer) -> Vec<Row<'a>> {
    let known = runs.report.trace.tells_copies();
    let work_ns = runs.report.work_ns;
    // Passthrough is the yardstick where it was not asked for, too.
    let base = runs.report.policies.iter().zip(&runs.costs).find_map(|(policy, cost)| {
        Some(policy.relative_to_passthrough? * (work_ns + cost.median_ns) - work_ns)
    });
    let timed = runs.costs.iter().all(|cost| cost.timed);
    let base_ns = base.filter(|_| timed).unwrap_or(0.0).max(0.0);
    let row = |price: Price<'a>| Row {
        policy: price.policy,
        price,
        known,
        // The kernel's code has the price of what was counted, from which no time is taken.
        base_ns: if price.code == Code::Library { base_ns } else { 0.0 },
        work_ns: None,
        own_ns: work_ns,
    };
    Prices::of(runs, offer).all.into_iter().filter(|price| price.cost.known).map(row).collect()
}

/// The other CPU work for each mapping, in nanoseconds, from which on `policy` is [`SMALL`]; `None` where it always is.
pub fn small_from(rows: &[Row<'_>], policy: &PolicyReport) -> Option<f64> {
    let row = rows.iter().find(|row| row.mode() == policy.mode && row.mode() != Mode::PASSTHROUGH)?;
    Some(row.work_ns(SMALL)).filter(|ns| *ns >= 1.0 && row.price.cost.timed)
}

/// The strict ones of `rows` that are on `offer`.
pub fn strict<'a>(rows: &[Row<'a>], offer: Offer) -> Vec<Row<'a>> {
    let is_strict = |row: &&Row<'_>| row.policy.mode.is_strict() && row.policy.exposure.stale_byte_s == 0.0;
    rows.iter().filter(is_strict).filter(|row| offer.has(row.policy.mode)).copied().collect()
}

/// What is said, and which policy is the one to choose.
pub struct Verdict<'a> {
    pub sentences: Vec<String>,
    pub choice: Option<&'a str>,
}

impl<'a> Verdict<'a> {
    /// With what to type, where Linux is asked for. Empty where nothing is mapped.
    pub fn told(runs: &'a Runs, offer: Offer, place: &Place) -> Self {
        if runs.costs.is_empty() {
            return Self { sentences: Vec::new(), choice: None };
        }
        let mut verdict = Self::of(runs, offer);
        verdict.sentences.extend(on_linux::of_choice(verdict.choice, offer, place));
        verdict
    }

    pub fn of(runs: &'a Runs, offer: Offer) -> Self {
        let trace = &runs.report.trace;
        if !trace.costs_known {
            return Self { sentences: vec![nothing_told(trace.hidden, trace.maps)], choice: None };
        }
        if let Some(why) = too_much_missing(trace.missing, trace.events) {
            return Self { sentences: vec![why], choice: None };
        }
        let rows = rows(runs, offer);
        let strict = strict(&rows, offer);
        let chosen = Chosen::of(&strict, runs.report.work);
        let choice = chosen.map(|chosen| chosen.row);
        let mut sentences = Vec::new();
        let besides = Besides { ns: runs.report.work_ns, work: runs.report.work, cpus: trace.cpus };
        sentences.extend(too_little(&strict, "the CPU time", offer, Some(besides.work)));
        sentences.extend(costs(&strict, besides));
        let operations = runs.report.policies.first().map_or(0, |policy| policy.operations);
        sentences.extend(too_few(&runs.costs, operations));
        sentences.extend(missing(runs, &strict));
        sentences.push(scope(&rows, offer));
        sentences.extend(choice.map(|choice| advice(choice, &strict, offer)));
        sentences.extend(chosen.and_then(|chosen| chosen.at_the_most(&strict)));
        sentences.extend(chosen.and_then(|chosen| chosen.ties(&strict)));
        sentences.extend(chosen.and_then(|chosen| chosen.as_measured(&strict, runs.report.work)));
        sentences.extend(choice.and_then(|choice| without_module(choice, &strict, offer)));
        sentences.extend(of_kernel(&rows));
        sentences.extend(choice.and_then(|choice| lazy(choice, &rows, &runs.report)));
        sentences.extend(rates(&strict));
        sentences.extend(choice.and_then(|choice| waits(choice, &strict, runs.report.work)));
        sentences.extend(copies(&strict, runs));
        sentences.extend(choice.and_then(|choice| kernel(choice, &strict, runs.report.work)));
        sentences.extend(rest(&rows));
        sentences.extend(
            (rows.len() < runs.costs.len())
                .then(|| no_copies(trace.directions_known && !trace.iommu_only, trace.syncs_known)),
        );
        Self { sentences, choice: choice.map(|row| row.policy.policy) }
    }
}

/// What the figures are of.
fn scope(rows: &[Row<'_>], offer: Offer) -> String {
    let code = if rows.iter().any(|row| row.price.code != Code::Library) {
        "in the code of Linux and of our module, estimated from counted instructions (docs/linux.md)"
    } else if offer == Offer::Library {
        "in Portcullis's own code"
    } else {
        "in Portcullis's own code, as Linux's was not counted for this (it takes more)"
    };
    format!(
        "That is the time of one CPU {code}, and waits that are assumed, not measured. Not in it: latency, throughput that devices lose while the IOMMU \
         walks page tables, and CPUs that wait for one IOMMU, or for a lock, together."
    )
}

/// Said in place of a verdict on a recording that has some mappings, and of `hidden` others not enough.
pub fn nothing_told(hidden: u64, maps: u64) -> String {
    format!(
        "What protection costs this workload is not known: the recording has {}, and of {} more too little.",
        number_of(maps, "mapping"),
        count(hidden)
    )
}

/// The share of a recording's events that are missing.
fn missing_share(missing: u64, events: u64) -> f64 {
    missing as f64 / missing.saturating_add(events).max(1) as f64
}

/// Said in place of a verdict where more than half of a recording is missing.
pub fn too_much_missing(missing: u64, events: u64) -> Option<String> {
    let share = missing_share(missing, events);
    (share > 0.5).then(|| {
        format!(
            "No verdict: {} of the recording's events are missing ({} of {}), and what is left may be any part of the work. Record again: `portcullis record` \
             takes buffers that fit the rate, and says what it loses.",
            percent(share),
            count(missing),
            count(missing.saturating_add(events))
        )
    })
}

/// What missing events make uncertain, where they are more than one in a hundred.
fn missing(runs: &Runs, strict: &[Row<'_>]) -> Option<String> {
    let Report { trace, work, work_ns, .. } = &runs.report;
    let share = missing_share(trace.missing, trace.events);
    if share <= 0.01 {
        return None;
    }
    let less_ns = work_ns * (1.0 - share);
    let at: Vec<Row<'_>> = strict.iter().map(|row| row.at(less_ns)).collect();
    let work = match (work, range(&at)) {
        (Work::Most | Work::Measured, Some(range)) => format!(
            " If mappings are missing in the same part, {} of other work came with each, and protection takes {range}.",
            short_time(less_ns)
        ),
        _ => String::new(),
    };
    Some(format!(
        "Of the recording's events {} are missing ({} of {}): what the device did meanwhile, and what was open then, is not in these figures.{work}",
        percent(share),
        count(trace.missing),
        count(trace.missing.saturating_add(trace.events))
    ))
}

fn costs(strict: &[Row<'_>], besides: Besides) -> Option<String> {
    let range = range(strict)?;
    let (clause, range) = (besides.clause(), besides.takes(&range));
    Some(format!("{clause} protection from devices takes {range} of the CPU time."))
}

/// Which policy costs less than which does not depend on the other work, so a choice that is right for less of it costs no more than the choice
/// elsewhere; it may leave more open.
impl<'a> Chosen<Row<'a>> {
    /// From which rate on another policy would be the choice, which the recording's bound does not tell.
    fn at_the_most(&self, strict: &[Row<'_>]) -> Option<String> {
        let other = self.at_most?;
        let from = parts(strict)?.into_iter().find(|(_, row)| row.mode() == other.mode())?.0;
        let (chosen, name) = (self.row.mode().name(), other.mode().name());
        let busy = if from < other.own_ns {
            format!("Where at least {} of other work comes with each mapping", short_time(from))
        } else {
            "If they never idled".into()
        };
        Some(format!(
            "The recording does not tell how long those CPUs idled: {chosen} is right even if they were busy for only a tenth of the time. {busy}, choose {name} \
             ({}): by counts it is then within one percentage point of the cheapest, and leaves the least open. `portcullis record` measures \
             that work, and --work names it.",
            percent(other.at(from).lost())
        ))
    }

    /// Which policies cost the same.
    fn ties(&self, strict: &[Row<'_>]) -> Option<String> {
        if self.at_most.is_some() {
            return None;
        }
        let others: Vec<&str> = tied(strict.iter().copied())
            .map(|row| row.policy.mode)
            .filter(|mode| *mode != self.row.mode())
            .map(Mode::name)
            .collect();
        let (last, before) = others.split_last()?;
        let names =
            if before.is_empty() { (*last).to_owned() } else { format!("{} and {last}", before.join(", ")) };
        Some(format!("By counts it costs the same as {names}, within one percentage point of the CPU time."))
    }

    /// What the choice would be by what was measured, if that is another.
    fn as_measured(&self, strict: &[Row<'a>], work: Work) -> Option<String> {
        if !self.row.price.cost.timed {
            return None;
        }
        let measured: Vec<Row<'_>> =
            strict.iter().map(|row| Row { price: row.price.as_measured(), ..*row }).collect();
        let other = Self::of(&measured, work)?.row;
        let [a, b] = [self.row, other].map(|row| (row.mode().name(), row.price.ns, row.price.counted.ns()));
        // What counts were replaced by in `other`.
        let counted = strict.iter().find(|row| row.mode() == other.mode())?.price.counted.ns();
        let ns = |ns: f64| count(ns.round() as u64);
        (a.0 != b.0).then(|| {
            format!(
                "By the times that were measured here it would be {} ({} ns, where {} took {}). The choice rests on counts instead ({} and {} ns), \
                 which no other load changes.",
                b.0,
                ns(b.1),
                a.0,
                ns(a.1),
                ns(counted),
                ns(a.2)
            )
        })
    }
}

fn share(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// The rates at which a choice is looked for, in nanoseconds of other CPU work for each mapping: 1, 2 and 5 of each power of ten, from
/// about what a mapping itself takes to what hides any cost. Borders are no finer, so that they stay where they are from run to run.
pub const STEPS: [f64; 14] = [500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7];

/// Which policy is the choice at which rate: each with the least other work at which it is, the most work first.
fn parts<'a>(strict: &[Row<'a>]) -> Option<Vec<(f64, Row<'a>)>> {
    let mut parts: Vec<(f64, Row<'_>)> = Vec::new();
    // The recording's own rate is one of them, so that no border contradicts its choice.
    let mut all: Vec<f64> = STEPS.into_iter().chain(strict.first().map(|row| row.own_ns)).collect();
    all.sort_by(|a, b| b.total_cmp(a));
    for ns in all {
        let choice = choose(strict.iter().map(|row| row.at(ns)))?;
        match parts.last_mut() {
            Some((from, last)) if last.mode() == choice.mode() => *from = ns,
            last => {
                if let Some((from, above)) = last {
                    *from = border(strict, above.mode(), [ns, *from]);
                }
                parts.push((ns, choice));
            }
        }
    }
    Some(parts)
}

/// The least other work, in two digits, at which the choice is still `above`, as it is at `most` and not at `least`.
fn border(strict: &[Row<'_>], above: Mode, [mut least, mut most]: [f64; 2]) -> f64 {
    let is_above =
        |ns: f64| choose(strict.iter().map(|row| row.at(ns))).is_some_and(|row| row.mode() == above);
    least = least.max(1.0);
    for _ in 0..24 {
        let middle = (least * most).sqrt();
        *if is_above(middle) { &mut most } else { &mut least } = middle;
    }
    let digit = 10_f64.powf(most.log10().floor() - 1.0);
    (most / digit).ceil() * digit
}

/// The same in words.
fn rates(strict: &[Row<'_>]) -> Option<String> {
    let parts = parts(strict)?;
    let costs = |row: &Row<'_>, ns: f64| format!("{} at {}", percent(row.at(ns).lost()), short_time(ns));
    let said: Vec<String> = parts
        .iter()
        .enumerate()
        .map(|(at, (from, row))| {
            let name = row.mode().name();
            let border = format!("{}, {}", costs(row, *from), row.rate(*from));
            let above = at.checked_sub(1).and_then(|at| parts.get(at)).map(|(above, _)| *above);
            match above {
                _ if parts.len() == 1 => format!("{name} at any rate ({})", costs(row, 1e3)),
                None => format!("{name} from {} on ({border})", short_time(*from)),
                Some(above) if at + 1 == parts.len() => {
                    format!("below {} {name} ({})", short_time(above), costs(row, 1e3_f64.min(above / 2.0)))
                }
                Some(_) => format!("{name} down to {} ({border})", short_time(*from)),
            }
        })
        .collect();
    let alone = strict.iter().find(|row| row.mode() == Mode::Each(Policy::Strict));
    let alone = alone.map_or(String::new(), |row| {
        let ns = row.work_ns(SMALL);
        format!(" Strict costs less than {} from {} on ({}).", share(SMALL), short_time(ns), row.rate(ns))
    });
    Some(format!(
        "Of the strict policies, by the other CPU work for each mapping: {}.{alone}",
        said.join("; ")
    ))
}

/// What the choice is where waits are shorter, and longer.
fn waits(choice: Row<'_>, strict: &[Row<'_>], work: Work) -> Option<String> {
    let waits = |row: &Row<'_>| row.price.counted.wait_ns > 0.0;
    if strict.len() < 2 || !strict.iter().any(waits) {
        return None;
    }
    let [short, long] = [0.25, 4.0].map(|times| chosen(strict, work, |price| price.with_waits(times)));
    Some(by_other(choice, short?, long?, OTHER_WAITS))
}

/// What the choice is where the kernel's instructions take less, and more.
fn kernel(choice: Row<'_>, strict: &[Row<'_>], work: Work) -> Option<String> {
    if strict.len() < 2 || strict.iter().all(|row| row.price.code == Code::Library) {
        return None;
    }
    let [short, long] = [false, true].map(|slower| chosen(strict, work, |price| price.with_kernel(slower)));
    Some(by_other(choice, short?, long?, OTHER_KERNEL))
}

/// What the choice is where copies take less, and more.
fn copies(strict: &[Row<'_>], runs: &Runs) -> Option<String> {
    let copied = |row: &Row<'_>| row.mode().copies() && row.policy.copied_bytes.is_some();
    if strict.len() < 2 || !strict.iter().any(copied) {
        return None;
    }
    let at = |kib_ns| {
        let row = chosen(strict, runs.report.work, |price| price.with_copies(kib_ns))?;
        Some((row.mode(), row.lost()))
    };
    by_copies(runs.calibration.copied_kib_ns(), at, |_| None)
}

/// The choice among `strict` at other prices.
fn chosen<'a>(strict: &[Row<'a>], work: Work, price: impl Fn(Price<'a>) -> Price<'a>) -> Option<Row<'a>> {
    let others: Vec<Row<'_>> = strict.iter().map(|row| row.with(&price)).collect();
    Some(Chosen::of(&others, work)?.row)
}

/// What the kernel's code takes.
fn of_kernel(rows: &[Row<'_>]) -> Option<String> {
    let said: Vec<String> = rows
        .iter()
        .filter(|row| row.price.code != Code::Library)
        .map(|row| {
            let [least, most] = row.price.range_ns.map(|ns| count(ns.round() as u64));
            let whose = if row.price.code == Code::Module { "the module's " } else { "" };
            format!("{whose}{} {} ({least} to {most} ns)", row.mode().name(), percent(row.lost()))
        })
        .collect();
    let said = (!said.is_empty()).then(|| said.join(", "))?;
    Some(format!("Under Linux a mapping takes about: {said}, if no CPU waits for a lock."))
}

/// Lazy's saving, and the bytes that it leaves open. Linux's lazy is compared with Linux's strict, which needs no module, and the library's with the
/// choice.
fn lazy(choice: Row<'_>, rows: &[Row<'_>], report: &Report) -> Option<String> {
    let duration_ns = report.trace.duration_ns;
    let find = |mode: Mode| rows.iter().find(|row| row.mode() == mode).copied();
    let lazy = find(Policy::LAZY.into())?;
    let stale = lazy.policy.exposure.stale_byte_s;
    let open = if stale <= 0.0 {
        "here nothing was".to_owned()
    } else if duration_ns == 0 {
        format!("here, in sum, {} for one second", bytes(stale))
    } else {
        format!("here {} at any time, on average", bytes(stale * 1e9 / duration_ns as f64))
    };
    let of_linux = find(Mode::Each(Policy::Strict)).filter(|_| lazy.price.code == Code::Linux);
    let name = if of_linux.is_some() { "Linux's lazy" } else { "Lazy" };
    let other = of_linux.unwrap_or(choice);
    let saved = |other: Row<'_>, lazy: Row<'_>| saved(other.mode().name(), other.lost(), lazy.lost());
    let elsewhere = if choice.own_ns == 1e3 {
        String::new()
    } else {
        let saved = saved(other.at(1e3), lazy.at(1e3));
        format!("; where 1us of other work comes with each mapping, {saved}")
    };
    Some(format!(
        "{name} would save {}{elsewhere}. What was unmapped then stays open to its device for up to 10 ms, to read and to write: {open}. \
         Take it if you need that time and trust these devices, their makers and their firmware; never for what can be plugged in.",
        saved(other, lazy),
    ))
}

/// How much less `lazy` takes than a mode of this name.
fn saved(name: &str, other: f64, lazy: f64) -> String {
    let points = (other - lazy) * 100.0;
    if points < 0.1 {
        return format!("nothing to speak of ({}, as {name})", percent(lazy));
    }
    format!("{points:.1} points of the CPU time ({} instead of {name}'s {})", percent(lazy), percent(other))
}

/// What the policies leave open that protect less.
fn rest(rows: &[Row<'_>]) -> Option<String> {
    let find = |mode: Mode| rows.iter().find(|row| row.policy.mode == mode).copied();
    let none = find(Mode::PASSTHROUGH).or_else(|| find(Mode::Swiotlb)).map(|row| {
        format!(
            "without protection ({}), a device reads and writes all memory at any time",
            row.policy.policy
        )
    });
    let registered = find(Mode::Registered).map(|row| {
        format!(
            "with memory that is registered once and stays mapped ({}), as SPDK has it, a device could have reached {}",
            percent(row.lost()),
            bytes(row.policy.exposure.stale_byte_s)
        )
    });
    let parts: Vec<String> = registered.into_iter().chain(none).collect();
    if parts.is_empty() {
        return None;
    }
    Some(format!("{}.", capital(&parts.join("; "))))
}

#[cfg(test)]
mod tests;
