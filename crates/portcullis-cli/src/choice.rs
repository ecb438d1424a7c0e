//! Which of several strict policies to choose, and what to say of it: for a replay, and for a simulation.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, Work};

use crate::look::{number_of, percent, short_time};

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

/// The waits, which published figures for one kind of IOMMU have about as far apart: [`by_other`].
pub const OTHER_WAITS: [&str; 3] = ["the IOMMU's waits are", "a quarter as long", "four times as long"];

/// One sentence names the choice and its meaning. A second one names each policy of `strict` that does something better.
pub fn advice<C: Candidate>(choice: C, strict: &[C]) -> String {
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
    let name = mode.name();
    let alone = if strict.len() > 1 { "" } else { ", the only one here that protects" };
    let chosen = format!("Choose {name} ({}){alone}: {means}{open}.", percent(choice.lost()));
    let others = others(choice, strict);
    if others.is_empty() { chosen } else { format!("{chosen} {}.", capital(&others.join("; "))) }
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
