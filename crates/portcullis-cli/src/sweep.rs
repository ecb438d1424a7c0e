//! `replay --sweep`: what each policy costs at other rates of mappings.

use std::fmt::Write;

use crate::choice::{Candidate, SMALL, choose};
use crate::look::{BOLD, parts, room, short_time, wrap};
use crate::on_linux::Offer;
use crate::runs::Runs;
use crate::verdict;

/// A line for each rate, with the share of the CPU's time that each policy takes there, and the policy to choose.
pub fn render(runs: &Runs, offer: Offer, unicode: bool) -> String {
    let all = verdict::rows(runs, offer);
    // What costs nothing has no column.
    let rows: Vec<_> = all.iter().filter(|row| row.work_ns(SMALL) >= 1.0).collect();
    let strict = verdict::strict(&all, offer);
    let mut text = format!(
        "\n{}",
        wrap(
            "CPU time by the other CPU work that comes with each mapping; a * marks the policy to choose",
            ""
        )
    );
    let width = |name: &str| name.len().max(7) + 1;
    let wide = |some: &[&verdict::Row<'_>]| 7 + some.iter().map(|row| width(row.row())).sum::<usize>();
    for some in parts(&rows, room(), wide) {
        let mut head = format!("{:<7}", "work");
        some.iter().map(|row| row.row()).for_each(|name| head += &format!("{name:>0$}", width(name)));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{BOLD}{head}{BOLD:#}");
        let _ = writeln!(text, "{}", if unicode { "─" } else { "-" }.repeat(head.len()));
        for ns in verdict::STEPS {
            let choice = choose(strict.iter().map(|row| row.at(ns))).map(|row| row.mode());
            let _ = write!(text, "{:<7}", short_time(ns));
            for row in some {
                let name = row.row();
                let mark = if choice == Some(row.mode()) { "*" } else { "" };
                let share = format!("{mark}{:.1} %", row.at(ns).lost() * 100.0);
                let _ = write!(text, "{share:>0$}", width(name));
            }
            let _ = writeln!(text);
        }
        text.push('\n');
    }
    text
}
