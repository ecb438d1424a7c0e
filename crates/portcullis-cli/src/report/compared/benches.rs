//! Two runs of one benchmark beside each other.

use super::{Change, change_of, differences, machines, moves, signed, verdict};
use crate::look::number_of;
use crate::report::benched::{Entry, each, group, name_of};
use crate::report::html::{details, table};
use crate::report::read::{Benched, Measured};

/// One measurement, before and after.
struct Pair<'a> {
    was: &'a Measured,
    is: &'a Measured,
}

impl<'a> Pair<'a> {
    fn share(&self) -> f64 {
        change_of(self.was.ns_per_op, self.is.ns_per_op)
    }

    /// The least and the most change that the repetitions leave possible.
    fn ends(&self) -> (f64, f64) {
        (change_of(self.was.max, self.is.min), change_of(self.was.min, self.is.max))
    }

    fn entry(&self) -> Entry<'a> {
        let Measured { workload, subject, .. } = self.is;
        Entry { workload, subject, place: self.share(), ends: self.ends(), said: signed(self.share()) }
    }

    fn kind(&self) -> Change {
        let overlap = self.is.min <= self.was.max && self.was.min <= self.is.max;
        match () {
            () if self.was.ns_per_op == self.is.ns_per_op => Change::Same,
            () if overlap => Change::Noise,
            () if self.is.ns_per_op > self.was.ns_per_op => Change::Slower,
            () => Change::Faster,
        }
    }
}

/// What changed; nothing where no measurement is in both.
pub fn section(before: &Benched, after: &Benched) -> Option<String> {
    let find = |is| {
        let key = |result| (group(result), &result.workload, &result.subject);
        before.results.iter().find(|was| key(was) == key(is)).map(|was| Pair { was, is })
    };
    let pairs: Vec<Pair<'_>> = after.results.iter().filter_map(find).collect();
    if pairs.is_empty() {
        return None;
    }
    // What is the same for all need not be said of each.
    let differs = each(&pairs, |pair| (&pair.is.format, &pair.is.direction, &pair.is.profile)).len() > 1;
    let with = |is: &Measured| if differs { name_of(group(is)) } else { number_of(is.threads, "thread") };
    let name = |is: &Measured| format!("{} of {} with {}", is.workload, is.subject, with(is));
    let changes: Vec<_> = pairs.iter().map(|pair| (name(pair.is), pair.share(), pair.kind())).collect();
    let mut html = verdict(&changes, ["measurement", "measurements"]);
    html += &differences(&machines(&before.origin.machine, &after.origin.machine));
    let subjects = each(&pairs, |pair| &pair.is.subject);
    for (number, of) in each(&pairs, |pair| group(pair.is)).into_iter().enumerate() {
        let own: Vec<Entry<'_>> = pairs.iter().filter(|pair| group(pair.is) == of).map(Pair::entry).collect();
        let plot = moves(format!("Change of time, {}", name_of(of)), &own, &subjects);
        html += &if number < 2 { plot.figure() } else { details(&plot.title, &plot.figure()) };
    }
    let row = |pair: &Pair<'_>| {
        let Pair { was, is } = pair;
        let ns = |r: &Measured| format!("{:.1} ({:.1} to {:.1})", r.ns_per_op, r.min, r.max);
        let (kind, change) = (pair.kind().word().to_owned(), signed(pair.share()));
        vec![is.workload.clone(), is.subject.clone(), with(is), change, kind, ns(was), ns(is)]
    };
    let head = ["workload", "subject", "with", "change", "which is", "ns before", "ns after"];
    html += &table("What changed", &head.map(String::from), &pairs.iter().map(row).collect::<Vec<_>>());
    let alone = before.results.len() + after.results.len() - 2 * pairs.len();
    if alone > 0 {
        html += &super::element("p", &format!("{} in one of the two only.", measurements(alone)));
    }
    Some(html)
}

fn measurements(n: usize) -> String {
    format!("{n} {}", if n == 1 { "measurement is" } else { "measurements are" })
}
