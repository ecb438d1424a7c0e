//! The tables of `docs/scaling.md` are what the command prints.
//!
//! A comment above each of them has its command: `<!-- shares: portcullis scale .. -->`, or `rates:` for thousands of requests in a
//! second. With `PORTCULLIS_WRITE_TABLES=1` the test writes them.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Parser;

use super::report::{Row, Table};
use super::tables;
use crate::args::{Arguments, Command};
use crate::golden::files::difference;
use crate::look::count;

/// The table that `comment` asks for; `None` where it asks for none.
fn table(comment: &str) -> Option<String> {
    let comment = comment.strip_prefix("<!-- ")?.strip_suffix(" -->")?;
    let (figure, command) = comment.split_once(": ")?;
    let figure: fn(&Row) -> String = match figure {
        "shares" => |row| format!("{:.1}", 100.0 * row.share),
        "rates" => |row| count((row.outcome.per_s / 1000.0).round() as u64),
        _ => return None,
    };
    // Tests run in the folder of their crate.
    let command = command.replace(" crates/", " ../");
    let parsed =
        Arguments::try_parse_from(command.split(' ')).unwrap_or_else(|error| panic!("{command}: {error}"));
    let Some(Command::Scale(scale)) = parsed.command else { panic!("{command}: another command") };
    let (tables, ..) = tables(&scale).unwrap_or_else(|error| panic!("{command}: {error}"));
    Some(render(&scale.workload, &tables, figure))
}

fn render(workload: &str, tables: &[Table], figure: fn(&Row) -> String) -> String {
    let plural = |n: u32| if n == 1 { "" } else { "s" };
    let mut text = format!("| {workload} |");
    for Table { machine, .. } in tables {
        let _ = write!(text, " {} CPU{} |", machine.cpus, plural(machine.cpus));
    }
    text += &format!("\n|{}\n", "---|".repeat(tables.len() + 1));
    for at in 0..tables.first().map_or(0, |table| table.rows.len()) {
        let _ = write!(text, "| `{}` |", tables[0].rows[at].policy.name);
        for table in tables {
            let _ = write!(text, " {} |", figure(&table.rows[at]));
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_tables_of_the_document_are_what_the_command_prints() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/scaling.md");
    let old = std::fs::read_to_string(&path).unwrap();
    let (mut new, mut lines, mut found) = (String::new(), old.lines().peekable(), 0);
    while let Some(line) = lines.next() {
        new.push_str(line);
        new.push('\n');
        let Some(table) = table(line) else { continue };
        found += 1;
        new = new + "\n" + &table;
        while lines.next_if(|line| line.is_empty() || line.starts_with('|')).is_some() {}
        new.push('\n');
    }
    assert!(found >= 4, "{found} tables have a command");
    if std::env::var_os("PORTCULLIS_WRITE_TABLES").is_some() {
        std::fs::write(&path, &new).unwrap();
        return;
    }
    assert!(old == new, "{}", difference(&path, &old, &new));
}
