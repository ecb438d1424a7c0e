//! Which of several strict policies to choose, and what to say of it: for a replay, and for a simulation.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, Work};

use crate::look::{count, number_of, percent, short_time};
use crate::on_linux::Offer;

/// A strict policy, as a verdict may choose it.
pub trait Candidate: Copy {
    /// The policy.
    fn mode(&self) -> Mode;

    /// Its row in the table, which may be another design of the same policy.
    fn row(&self) -> &'static str {
        self.mode().name()
    }

    /// The share of the CPU's time, or of the throughput, that it costs.
    fn lost(&self) -> f64;

    /// Other data that it leaves open, in any unit.
    fn open(&self) -> f64;

    /// [`lost`](Self::lost) as the choice takes it: where that was measured, by counts, which are the same each time.
    fn deciding(&self) -> f64 {
        self.lost()
    }

    /// How much that is, for people.
    fn open_in_words(&self) -> Option<String> {
        None
    }

    /// What it leaves open is known.
    fn open_is_known(&self) -> bool {
        true
    }

    /// The same where a recording's CPUs were busy for only [`BUSY`] of the time.
    fn hardly_busy(self) -> Self;

    /// What was measured does not tell which of both costs more.
    fn may_cost_as_much(&self, _other: &Self) -> bool {
        false
    }
}

/// Why policies are not in a verdict.
pub fn no_copies(directions_known: bool, syncs_known: bool) -> String {
    let lacks = match (directions_known, syncs_known) {
        (false, false) => "mappings without a direction, and syncs of buffers whose map is not in it",
        (true, false) => "syncs of buffers whose map is not in it",
        _ => "mappings without a direction",
    };
    format!(
        "Policies that copy are left out: this recording does not tell what they would copy, as it has {lacks}."
    )
}

/// If policies differ by less than this share of the CPU time, the verdict names the one that leaves less open.
pub const SMALL: f64 = 0.01;

/// A policy that saves less than this share is not named for it: a simulation does not resolve it, either.
const NOTHING: f64 = 0.001;

/// Which of several policies is named where they cost the same and leave the same open: what keeps no buffer back, before what
/// does; and adaptive before bounce, as it takes the cheaper way for each buffer. So a verdict does not change from run to run.
pub const PREFERRED: [Mode; 5] =
    [Mode::Each(Policy::Strict), Mode::StrictBatch, Mode::StrictRing, Mode::Adaptive, Mode::Bounce];

/// The policies that cost no more than the cheapest of `rows`: it, and what costs hardly more.
pub fn tied<C: Candidate>(rows: impl Iterator<Item = C> + Clone) -> impl Iterator<Item = C> {
    let cheapest = rows.clone().map(|row| row.deciding()).min_by(f64::total_cmp).unwrap_or(f64::NAN);
    rows.filter(move |row| row.deciding() - cheapest < SMALL)
}

/// Of the [tied](tied) policies the one that leaves the least open.
pub fn choose<C: Candidate>(rows: impl Iterator<Item = C> + Clone) -> Option<C> {
    let place = |row: &C| PREFERRED.iter().position(|mode| *mode == row.mode());
    tied(rows).min_by(|a, b| a.open().total_cmp(&b.open()).then(place(a).cmp(&place(b))))
}

/// A choice is to be right even if a recording's CPUs were busy for only this share of the time. CPUs that idle for longer have time for any policy.
pub const BUSY: f64 = 0.1;

/// The policy to choose.
#[derive(Clone, Copy)]
pub struct Chosen<C> {
    /// With the figures that were given.
    pub row: C,
    /// What would be chosen if as much other work as the recording allows came with each mapping, where that is another policy.
    pub at_most: Option<C>,
}

impl<C: Candidate> Chosen<C> {
    /// Of `strict`, where it is known as `work` says how much other work comes with each mapping. Where only the most that it can be is known,
    /// the choice has to be right for less, too: down to [`BUSY`] of it.
    pub fn of(strict: &[C], work: Work) -> Option<Self> {
        let row = choose(strict.iter().copied())?;
        if work != Work::Most {
            return Some(Self { row, at_most: None });
        }
        let least = choose(strict.iter().map(|row| row.hardly_busy()))?.mode();
        let chosen = strict.iter().find(|row| row.mode() == least)?;
        Some(Self { row: *chosen, at_most: (row.mode() != least).then_some(row) })
    }
}

/// The CPU time that comes with each mapping of a recording, besides protection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Besides {
    pub ns: f64,
    /// How that is known.
    pub work: Work,
    /// The recording's CPUs.
    pub cpus: u64,
}

impl Besides {
    /// The beginning of a sentence that goes on with what protection takes then.
    pub fn clause(&self) -> String {
        let time = short_time(self.ns);
        let cpus = if self.cpus == 1 { "CPU".into() } else { number_of(self.cpus, "CPU") };
        match self.work {
            Work::Most => format!(
                "At most {time} of other CPU work came with each mapping, if the recording's {cpus} never idled: then"
            ),
            Work::Measured => format!(
                "The recorded machine took {time} of CPU time for each mapping, its protection included: where that comes with each,"
            ),
            Work::Asked => format!("If {time} of other CPU work comes with each mapping (--work),"),
            Work::Assumed => format!(
                "The recording does not tell how much other CPU work comes with each mapping. If it is {time} (--work),"
            ),
        }
    }

    /// A `range` of what protection takes: the least that it can be, where the work is the most.
    pub fn takes(&self, range: &str) -> String {
        let is_least = self.work == Work::Most && range.starts_with(|c: char| c.is_ascii_digit());
        if is_least { format!("at least {range}") } else { range.to_owned() }
    }
}

/// What the cheapest of `strict` costs, and the dearest, with the rows that these are. (The choice may be neither.)
pub fn range<C: Candidate>(strict: &[C]) -> Option<String> {
    let least = strict.iter().min_by(|a, b| a.lost().total_cmp(&b.lost()))?;
    let most = strict.iter().max_by(|a, b| a.lost().total_cmp(&b.lost()))?;
    let [a, b] = [least, most].map(|row| percent(row.lost()));
    Some(if a == b {
        a
    } else if a.ends_with(&b) {
        // Less than that, up to that.
        format!("at most {b}")
    } else {
        format!("{a} ({}) to {b} ({})", least.row(), most.row())
    })
}

/// A choice that leaves less than this share of the CPU's time, or of the throughput, is said to leave too little.
pub const TOO_LITTLE: f64 = 0.75;

/// That the best of `strict` leaves too little `of` something, if so, and that is known.
pub fn too_little<C: Candidate>(strict: &[C], of: &str, offer: Offer, work: Option<Work>) -> Option<String> {
    let best = strict.iter().min_by(|a, b| a.lost().total_cmp(&b.lost()))?;
    let left = 1.0 - best.lost();
    let at_most = if work == Some(Work::Most) { "at most " } else { "" };
    (left < TOO_LITTLE && work != Some(Work::Assumed)).then(|| {
        format!(
            "{} that protects leaves {:.0} % of {of}: the best, {}, leaves {at_most}{}.",
            if offer == Offer::Library { "No policy here" } else { "Under Linux, no policy" },
            TOO_LITTLE * 100.0,
            best.row(),
            percent(left)
        )
    })
}

/// What the choice is where something that is assumed takes less (`short`), and where it takes more (`long`): `what` does so, and how much less
/// and more that is.
pub fn by_other<C: Candidate>(choice: C, short: C, long: C, [what, less, more]: [&str; 3]) -> String {
    let named = |row: C| format!("{} ({})", row.mode().name(), percent(row.lost()));
    if [short, long].iter().all(|row| row.mode() == choice.mode()) {
        format!(
            "The choice is the same if {what} {less} ({}) or {more} ({}) as assumed.",
            percent(short.lost()),
            percent(long.lost())
        )
    } else {
        format!("If {what} {less} as assumed, choose {}; if {more}, {}.", named(short), named(long))
    }
}

/// The kernel's instructions, whose price is the library's in a program: [`by_other`].
pub const OTHER_KERNEL: [&str; 3] = ["instructions of the kernel take", "half as long", "twice as long"];

/// The waits, which published figures for one kind of IOMMU have about as far apart: [`by_other`].
pub const OTHER_WAITS: [&str; 3] = ["the IOMMU's waits are", "a quarter as long", "four times as long"];

/// Prices of a copied KiB, in nanoseconds, between which a border is looked for: no CPU copies faster than the first, and hardly any slower than the
/// last.
const COPIES: [f64; 2] = [1.0, 1e3];

/// The nearest prices of a copied KiB, in two digits, at which the choice is another than at the `assumed` one, and what it is there. `at` has the choice
/// and its cost at a price: the less that is, the more often it is a policy that copies. `besides` says what else changes with the price.
pub fn by_copies(
    assumed: f64,
    at: impl Fn(f64) -> Option<(Mode, f64)>,
    besides: impl Fn(f64) -> Option<String>,
) -> Option<String> {
    let (choice, _) = at(assumed)?;
    let [least, most] = COPIES;
    let digits = (0..).map(|n| f64::from(10 + n % 90) * 10_f64.powi(n / 90 - 1));
    let prices: Vec<f64> = digits.take_while(|ns| *ns <= most).filter(|ns| *ns >= least).collect();
    let is_other = |ns: &f64| at(*ns).is_some_and(|(mode, _)| mode != choice);
    let (less, more) = prices.split_at(prices.partition_point(|ns| *ns < assumed));
    // Nothing lies between two prices of the same choice.
    let more = more.last().filter(|ns| is_other(ns)).map(|_| more[more.partition_point(|ns| !is_other(ns))]);
    let less = less.first().filter(|ns| is_other(ns)).map(|_| less[less.partition_point(&is_other) - 1]);
    let ns = |ns: f64| {
        let digits =
            if ns < 9.95 { ((ns * 10.0).round() / 10.0).to_string() } else { count(ns.round() as u64) };
        format!("{digits} ns")
    };
    let side = |border: Option<f64>, from: &str, on: &str| {
        let (mode, lost) = at(border?)?;
        let more = besides(border?).map_or(String::new(), |more| format!(" ({more})"));
        Some(format!("{from} {}{more}{on}, choose {} ({})", ns(border?), mode.name(), percent(lost)))
    };
    let said: Vec<String> =
        [side(more, "from", " on"), side(less, "up to", "")].into_iter().flatten().collect();
    let said = if said.is_empty() {
        format!("the choice is the same at {} and at {}", ns(least), ns(most))
    } else {
        said.join("; ")
    };
    let more = besides(assumed).map_or(String::new(), |more| format!("{more}; "));
    Some(format!("A copied KiB is assumed to take {} ({more}--calibration): {said}.", ns(assumed)))
}

/// One sentence names the choice and its meaning. A second one names each policy of `strict` that does something better.
pub fn advice<C: Candidate>(choice: C, strict: &[C], offer: Offer) -> String {
    let name = choice.mode().name();
    let alone = if strict.len() > 1 { "" } else { ", the only one here that protects" };
    let module = if is_of_module(choice, offer) {
        ", by our module, which has run in QEMU alone so far (docs/linux.md)"
    } else {
        ""
    };
    let chosen = format!("Choose {name} ({}){alone}{module}: {}.", percent(choice.lost()), meaning(choice));
    let others = others(choice, strict);
    if others.is_empty() { chosen } else { format!("{chosen} {}.", capital(&others.join("; "))) }
}

/// What Linux has by itself, if the choice needs our module.
pub fn without_module<C: Candidate>(choice: C, strict: &[C], offer: Offer) -> Option<String> {
    let own = strict.iter().find(|row| row.mode() == Mode::Each(Policy::Strict))?;
    is_of_module(choice, offer).then(|| {
        format!(
            "Without the module, the next best is Linux's strict ({}): {}.",
            percent(own.lost()),
            meaning(*own)
        )
    })
}

/// Linux's own modes do not copy.
fn is_of_module<C: Candidate>(choice: C, offer: Offer) -> bool {
    offer == Offer::Module && choice.mode() == Mode::Bounce
}

/// What a device reaches, and what it leaves open.
fn meaning<C: Candidate>(choice: C) -> String {
    let mode = choice.mode();
    let means = match mode {
        Mode::Adaptive => {
            "no device reaches anything but the bytes that are meant for it; buffers that it maps, and does not copy, come \
             back in groups, up to 10 ms after their unmap"
        }
        _ if mode.protects_bytes() => "no device reaches anything but the bytes that are meant for it",
        _ if mode.gives_all_back_in_batches() => {
            "buffers come back in groups, up to 10 ms after their unmap, and no device reaches them from then on"
        }
        _ => "no device reaches a buffer after it is given back",
    };
    let open = if mode.protects_bytes() {
        String::new()
    } else if choice.open() > 0.0 {
        format!(
            "; it leaves open other data in a buffer's page{}",
            choice.open_in_words().unwrap_or_default()
        )
    } else if choice.open_is_known() {
        "; it leaves nothing open".into()
    } else {
        "; what else lies in a buffer's pages is not known".into()
    };
    format!("{means}{open}")
}

/// Each policy of `strict` that does something better than the choice, and its advantage.
fn others<C: Candidate>(choice: C, strict: &[C]) -> Vec<String> {
    let mut others: Vec<(C, Vec<&str>)> = Vec::new();
    let mut add = |row: C, does: &'static str| {
        if let Some((_, all)) = others.iter_mut().find(|(known, _)| known.mode() == row.mode()) {
            all.push(does);
        } else {
            others.push((row, vec![does]));
        }
    };
    let least = strict.iter().min_by(|a, b| a.lost().total_cmp(&b.lost()));
    if let Some(least) = least.filter(|least| choice.lost() - least.lost() >= NOTHING) {
        add(*least, if least.may_cost_as_much(&choice) { "may cost less" } else { "costs less" });
    }
    if choice.open() > 0.0 {
        let closed = choose(strict.iter().copied().filter(|row| row.open() <= 0.0));
        closed.into_iter().for_each(|row| add(row, "leaves nothing open"));
    }
    if choice.mode().gives_back_in_batches()
        && let Some(row) = choose(strict.iter().copied().filter(|row| !row.mode().gives_back_in_batches()))
    {
        add(row, "gives each buffer back at once");
    }
    let told = |(row, mut does): (C, Vec<&str>)| {
        does.extend((row.open() > choice.open()).then_some("leaves more open"));
        format!("{} ({}) {}", row.mode().name(), percent(row.lost()), does.join(" and "))
    };
    others.into_iter().map(told).collect()
}

/// `text` as a sentence begins.
pub fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}", first.to_uppercase(), letters.as_str()))
}
