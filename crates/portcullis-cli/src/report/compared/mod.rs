//! Two results of one command beside each other: what became faster, what slower, and what else than that differs.

mod benches;
mod replays;
mod scales;

use super::axes::{around_zero, share};
use super::benched::{Entry, in_rows};
use super::html::element;
use super::plot::Plot;
use super::read::{Machine, Outcome};
use super::{CommandError, warning};
use crate::look::{count, number_of};

/// What changed, as a part of the page. `names` are those of the two results.
pub fn section(names: [&str; 2], before: &Outcome, after: &Outcome) -> Result<String, CommandError> {
    let compared = match (before, after) {
        (Outcome::Replay(before), Outcome::Replay(after)) => replays::section(before, after),
        (Outcome::Bench(before), Outcome::Bench(after)) if before.bench == after.bench => {
            benches::section(before, after)
        }
        (Outcome::Scale(before), Outcome::Scale(after)) => scales::section(before, after),
        _ => {
            let [before, after] = [(names[0], before), (names[1], after)]
                .map(|(name, outcome)| format!("{name} is of `{}`", outcome.tool()));
            return Err(CommandError::Different { before, after });
        }
    };
    let (before, after) = (names[0].to_owned(), names[1].to_owned());
    Ok(element("h2", "Before and after") + &compared.ok_or(CommandError::NothingCommon { before, after })?)
}

/// What became of a figure that is a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Faster,
    Slower,
    /// The repetitions before and after overlap.
    Noise,
    /// One run has no spread, and says nothing of noise.
    NotTold,
    Same,
}

impl Change {
    fn word(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Noise => "within the noise",
            Self::NotTold => "cannot tell: one run",
            Self::Same => "the same",
        }
    }
}

/// The share by which `after` is more than `before`.
fn change_of(before: f64, after: f64) -> f64 {
    if after == before { 0.0 } else { (after / before.max(1e-9) - 1.0).clamp(-1.0, 1e6) }
}

/// A share of change: `-12 %`.
fn signed(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 9.95 { format!("{percent:+.1} %") } else { format!("{percent:+.0} %") }
}

/// The label of a change, on an axis.
fn change(at: f64, step: f64) -> String {
    if at > 0.0 { format!("+{}", share(at, step)) } else { share(at, step) }
}

/// How far each has moved, in rows.
fn moves(title: String, entries: &[Entry<'_>], subjects: &[&String]) -> Plot {
    // One slow repetition may be many times as long as the others, and must not decide what is seen of them.
    let room = entries.iter().map(|entry| entry.place.abs()).fold(0.0, f64::max) * 2.0 + 0.02;
    let (least, most) = entries.iter().map(|entry| entry.ends).fold((-0.02, 0.02), |(least, most), ends| {
        (ends.0.max(-room).min(least), ends.1.min(room).max(most))
    });
    in_rows(
        title,
        "Left of 0 is faster than before. A line covers what the repetitions leave possible: where it crosses 0, the change is \
         within the noise. It may go on beyond the edge.",
        around_zero("change of the time", least, most, change),
        entries,
        subjects,
    )
}

/// The most that are named of those which became faster, and of those which became slower.
const NAMED: usize = 8;

/// The verdict: names with what changed about them, the greatest change first. `things` are what they are, one and several.
fn verdict(changes: &[(String, f64, Change)], things: [&str; 2]) -> String {
    let all = count(changes.len() as u64);
    let is = |kind: Change| changes.iter().filter(move |(_, _, change)| *change == kind);
    let mut html = "<div class=\"verdict\">\n".to_owned();
    let not_told = is(Change::NotTold).count();
    // Where nothing can be told, there is nothing to say of what became faster.
    let kinds = if not_told < changes.len() { &[Change::Faster, Change::Slower][..] } else { &[] };
    for kind in kinds.iter().copied() {
        let mut those: Vec<_> = is(kind).collect();
        those.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        let names = those.iter().take(NAMED).map(|(name, share, _)| format!("{name} ({})", signed(*share)));
        let names = names.collect::<Vec<_>>().join(", ");
        let more = those.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(", and {} more", count(more as u64)) } else { String::new() };
        html += &element(
            "p",
            &match those.len() {
                0 => format!("No {} became {}.", things[0], kind.word()),
                n => format!(
                    "{} of {all} {} became {}: {names}{more}.",
                    count(n as u64),
                    things[1],
                    kind.word()
                ),
            },
        );
    }
    if not_told > 0 {
        html += &element(
            "p",
            &format!(
                "It cannot be told whether {} became faster or slower: a side has one run. `--repeat 3` makes three.",
                number_of_things(not_told as u64, things)
            ),
        );
    }
    let (noise, same) = (is(Change::Noise).count() as u64, is(Change::Same).count() as u64);
    if noise > 0 {
        html += &element(
            "p",
            &format!("{} changed by no more than the repetitions differ.", number_of_things(noise, things)),
        );
    }
    if same > 0 {
        html += &element("p", &format!("{} did not change.", number_of_things(same, things)));
    }
    html + "</div>\n"
}

fn number_of_things(n: u64, [one, several]: [&str; 2]) -> String {
    format!("{} {}", count(n), if n == 1 { one } else { several })
}

/// What else than the program may explain a change: each pair has a name, and what it is before and after.
fn differences(pairs: &[(&str, String, String)]) -> String {
    let differ = |(_, was, is): &&(&str, String, String)| was != is && !was.is_empty() && !is.is_empty();
    let said = |(what, was, is): &(&str, String, String)| {
        warning(&format!("Something else is different, too: {what}, {was} before, {is} after."))
    };
    pairs.iter().filter(differ).map(said).collect()
}

/// The machines of both, where the results name them.
fn machines(before: &Machine, after: &Machine) -> [(&'static str, String, String); 2] {
    let cpu = |machine: &Machine| machine.cpu.clone().unwrap_or_default();
    let cpus = |machine: &Machine| match machine.cpus {
        0 => String::new(),
        cpus => number_of(cpus, "CPU"),
    };
    [("the machine", cpu(before), cpu(after)), ("its CPUs", cpus(before), cpus(after))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_said_with_its_sign_and_stays_a_number() {
        assert_eq!([change_of(100.0, 88.0), change_of(50.0, 52.5)].map(signed), ["-12 %", "+5.0 %"]);
        // Three digits are as many as there are to say.
        assert_eq!([0.0994, 0.0995, -0.0995, -0.0994].map(signed), ["+9.9 %", "+10 %", "-10 %", "-9.9 %"]);
        assert!(change_of(0.0, 1e300).is_finite() && change_of(0.0, 0.0) == 0.0);
    }

    #[test]
    fn a_verdict_names_the_greatest_changes_and_counts_the_rest() {
        let mut changes: Vec<_> =
            (1..=10).map(|n| (format!("w{n}"), -0.01 * f64::from(n), Change::Faster)).collect();
        changes.push(("x".into(), 0.02, Change::Noise));
        let said = verdict(&changes, ["policy", "policies"]).replace('\u{a0}', " ");
        assert!(said.contains("10 of 11 policies became faster: w10 (-10 %), w9 (-9.0 %)"), "{said}");
        assert!(said.contains(", and 2 more.") && !said.contains("w1 ("), "{said}");
        let not_told = [("x".to_owned(), 0.02, Change::NotTold)];
        assert_eq!(
            verdict(&not_told, ["policy", "policies"]).matches("<p").count(),
            1,
            "nothing is said of what became faster or slower"
        );
        assert!(
            said.contains("No policy became slower.") && said.contains("1 policy changed by no more"),
            "{said}"
        );
    }
}
