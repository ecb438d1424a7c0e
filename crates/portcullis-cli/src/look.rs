//! How text looks on a terminal: its colours, its lines, its width.

use anstream::adapter::strip_str;
use anstyle::{AnsiColor, Style};
use comfy_table::{Table, presets};
pub use portcullis_trace::figures::{bytes, count, number_of, number_of_these};
use portcullis_trace::printable::{Printable, PrintableLines};

/// What bars of progress are made of, on terminals of any kind: done, the end of that, and to do.
pub const BAR: &str = "=> ";

/// No line is longer, but those of the full table; sentences are shorter where the terminal is narrower ([`columns`]).
pub const COLUMNS: usize = 80;

pub const BOLD: Style = Style::new().bold();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const BAD: Style = AnsiColor::Red.on_default();

/// Whether the terminal's locale has other characters than ASCII's.
pub fn is_unicode() -> bool {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
    cfg!(windows) || locale.to_lowercase().replace('-', "").contains("utf8")
}

/// An empty table with lines of characters that the terminal has.
pub fn table(unicode: bool) -> Table {
    let mut table = Table::new();
    table.load_style(if unicode { presets::UTF8_FULL_CONDENSED } else { presets::ASCII_FULL_CONDENSED });
    table
}

/// How wide lines are: [`COLUMNS`], or as wide as a terminal that is narrower.
pub fn columns() -> usize {
    // Unit tests print the same on each terminal.
    if cfg!(test) {
        return COLUMNS;
    }
    told().map_or(COLUMNS, |columns| columns.clamp(20, COLUMNS))
}

/// How wide a table of many columns may be: as the terminal is. What goes elsewhere may have any width.
pub fn room() -> usize {
    if cfg!(test) { usize::MAX } else { told().map_or(usize::MAX, |columns| columns.max(20)) }
}

/// `columns` of a table in parts, each with as many as are together no wider than `room`; one at least.
pub fn parts<T>(mut columns: &[T], room: usize, wide: impl Fn(&[T]) -> usize) -> Vec<&[T]> {
    let mut parts = Vec::new();
    while !columns.is_empty() {
        let most = (2..=columns.len()).rev().find(|most| wide(&columns[..*most]) <= room);
        let (part, rest) = columns.split_at(most.unwrap_or(1));
        parts.push(part);
        columns = rest;
    }
    parts
}

/// The width that the environment or the terminal tells.
fn told() -> Option<usize> {
    let wide = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    wide.or_else(terminal)
}

/// The width of the terminal that standard output is, if it is one.
#[cfg(unix)]
fn terminal() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes a `winsize` where it succeeds.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0).then(|| size.ws_col.into())
}

#[cfg(not(unix))]
fn terminal() -> Option<usize> {
    None
}

/// `text` in lines of [`columns`] at the most, where its words allow it; those after the first begin with `indent`.
pub fn wrap(text: &str, indent: &str) -> String {
    wrap_at(text, indent, columns())
}

/// The same, in lines of `columns`.
pub fn wrap_at(text: &str, indent: &str, columns: usize) -> String {
    let mut wrapped = String::new();
    let mut column = 0;
    for word in text.split(' ') {
        let width = width(word);
        if column > 0 && column + 1 + width > columns {
            wrapped.push('\n');
            wrapped.push_str(indent);
            column = indent.len();
        } else if column > 0 {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += width;
    }
    wrapped.push('\n');
    wrapped
}

/// A message of several lines, each wrapped by itself. Excerpts of a file, with a `|` in their margin, stay as they are.
pub fn wrap_lines(text: &str, indent: &str) -> String {
    let columns = columns();
    let mut wrapped = String::new();
    for line in text.trim_end().lines() {
        let behind_margin = line.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit());
        if width(line) <= columns || behind_margin.starts_with('|') {
            wrapped.push_str(line);
            wrapped.push('\n');
            continue;
        }
        let words = line.trim_start_matches(' ');
        let (margin, _) = line.split_at(line.len() - words.len());
        wrapped.push_str(margin);
        wrapped.push_str(&wrap_at(words, &format!("{margin}{indent}"), columns.saturating_sub(margin.len())));
    }
    wrapped
}

/// How many columns `text` takes; its colours take none.
fn width(text: &str) -> usize {
    strip_str(text).map(|part| part.chars().count()).sum()
}

/// Whether no line of `text` is wider than `columns`.
pub fn fits(text: &str, columns: usize) -> bool {
    text.lines().all(|line| width(line) <= columns)
}

/// A size that is a power of two, or near one: `4 KiB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes < 1 << 10 => format!("{bytes} B"),
        _ if bytes < 1 << 20 => format!("{} KiB", bytes >> 10),
        _ if bytes < 1 << 30 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

/// A share, with the digits that tables show: `5.0 %`.
pub fn percent(share: f64) -> String {
    if share < 0.0005 { "less than 0.1 %".into() } else { format!("{:.1} %", share * 100.0) }
}

/// A time with two digits or three, as `--work` takes it: `94us`.
pub fn short_time(ns: f64) -> String {
    match ns {
        _ if ns < 999.5 => format!("{ns:.0}ns"),
        _ if ns < 9_950.0 => format!("{}us", (ns / 1e2).round() / 10.0),
        _ if ns < 999_500.0 => format!("{:.0}us", ns / 1e3),
        _ if ns < 9.95e6 => format!("{}ms", (ns / 1e5).round() / 10.0),
        // No more can be asked for.
        _ if ns < 1.0005e9 => format!("{:.0}ms", ns / 1e6),
        _ if ns < 9.95e9 => format!("{}s", (ns / 1e8).round() / 10.0),
        _ => format!("{:.0}s", ns / 1e9),
    }
}

/// How many seconds have gone by since 1970.
pub fn seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// What UTC is `seconds` after 1970 began: `2026-11-28T00:30:05Z`.
pub fn date(seconds: u64) -> String {
    // The last second that has a date, of the year 9999.
    let since = std::time::Duration::from_secs(seconds.min(253_402_300_799));
    humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + since).to_string()
}

/// `text`, lines for a terminal, with its styles, and nothing else that a terminal takes for a command.
pub fn shown(text: &str) -> String {
    /// What begins a style, which ends with an `m`.
    const STYLE: &str = "\x1b[";
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(STYLE) {
        let (plain, style) = rest.split_at(at);
        shown.push_str(&PrintableLines(plain).to_string());
        let inside = style.get(STYLE.len()..).unwrap_or_default();
        let len = inside.find(|c: char| !c.is_ascii_digit() && c != ';').unwrap_or(inside.len());
        if inside.get(len..).is_some_and(|after| after.starts_with('m')) {
            let (style, after) = style.split_at(STYLE.len() + len + 1);
            shown.push_str(style);
            rest = after;
        } else {
            shown.push_str(&Printable(STYLE).to_string());
            rest = inside;
        }
    }
    shown + &PrintableLines(rest).to_string()
}

/// Prints lines of plain text on standard error, with control characters made visible. A reader that has gone, as behind
/// `2>&1 | head`, is no error.
pub fn tell(text: &str) {
    let text = PrintableLines(text).to_string();
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}

/// What stands for a figure that the recording does not tell.
pub const NOT_KNOWN: &str = "not known";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_no_longer_than_the_terminal_is_wide() {
        let text = wrap(&"word ".repeat(50), "  ");
        assert!(text.lines().all(|line| line.len() <= COLUMNS) && text.lines().count() == 4, "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("  word")), "{text}");
        assert_eq!(wrap("short", "  "), "short\n");
    }

    #[test]
    fn a_message_is_wrapped_line_by_line_and_never_inside_a_word() {
        let path = format!("/a/{}/b.toml", "folder/".repeat(15));
        let excerpt = format!("12 | {}", "excerpt ".repeat(20));
        let tip = format!("  tip: {}", "value, ".repeat(20));
        let text = format!("portcullis: {path}: {}\n{excerpt}\n   |   ^\n\n{tip}\n", "word ".repeat(30));
        let wrapped = wrap_lines(&text, "  ");
        let lines: Vec<&str> = wrapped.lines().collect();
        assert_eq!(lines[..2], ["portcullis:", &format!("  {path}:")], "{wrapped}");
        assert!(lines[2].starts_with("  word word") && lines.contains(&"   |   ^"), "{wrapped}");
        assert!(lines.contains(&excerpt.as_str()) && lines.contains(&""), "{wrapped}");
        let long: Vec<_> = lines.iter().filter(|line| line.len() > COLUMNS).collect();
        assert_eq!(long.len(), 2, "the path and the excerpt alone: {long:?}");
        assert!(
            wrapped.ends_with(" value,\n") && lines.last().unwrap().starts_with("    value"),
            "{wrapped}"
        );
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&wrapped), words(&text));
        // Colours are not seen, and take no room.
        let coloured = "\x1b[1m\x1b[31mred\x1b[0m ".repeat(20);
        assert_eq!(wrap_lines(&coloured, "  "), format!("{}\n", coloured.trim_end()));
    }

    #[test]
    fn a_terminal_gets_styles_and_no_other_commands() {
        let styled = format!("{BOLD}{GOOD}a{GOOD:#}b{BOLD:#}\nc");
        assert_eq!(shown(&styled), styled);
        assert_eq!(shown("\x1b[2Jx\x1b]0;t\x07\x1b[1"), r"\u{1b}[2Jx\u{1b}]0;t\u{7}\u{1b}[1");
        assert_eq!(shown("\u{9b}2J\u{202e}"), r"\u{9b}2J\u{202e}");
    }

    #[test]
    fn a_time_that_is_said_can_be_asked_for() {
        for ns in [1.0, 480.0, 999.4, 1_250.0, 9_949.0, 92_700.0, 999_499.0, 1.24e6, 9.949e6, 123e6, 1e9] {
            let work = crate::args::Arguments::replay(&["--work", &short_time(ns)]).work.unwrap() as f64;
            assert!((work - ns).abs() <= ns * 0.05, "{ns}: {work}");
        }
        assert_eq!([93_333.0, 2_000.0, 0.4].map(short_time), ["93us", "2us", "0ns"]);
        assert_eq!([1e9, 1.24e9, 9.96e9, 21.207e9].map(short_time), ["1000ms", "1.2s", "10s", "21s"]);
    }

    #[test]
    fn days_and_months_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_709_251_200), "2024-03-01T00:00:00Z");
        assert_eq!(date(1_798_761_600), "2027-01-01T00:00:00Z");
        assert_eq!(date(4_107_542_400), "2100-03-01T00:00:00Z");
        assert_eq!(date(u64::MAX), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn shares_are_said_as_people_say_them() {
        assert_eq!(
            [0.0001, 0.001, 0.043, 0.57].map(percent),
            ["less than 0.1 %", "0.1 %", "4.3 %", "57.0 %"]
        );
    }
}
