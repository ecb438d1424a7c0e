//! How text looks on a terminal: its colours, its lines, its width.

use anstyle::{AnsiColor, Style};
use comfy_table::{Table, presets};
use indicatif::HumanCount;

/// What bars of progress are made of, on terminals of any kind: done, the end of that, and to do.
pub const BAR: &str = "=> ";

/// No line is longer, but those of the full table.
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

/// A number with its thousands set apart.
pub fn count(n: u64) -> String {
    HumanCount(n).to_string()
}

/// `1 map`, `2 maps`.
pub fn number_of(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(n), if n == 1 { "" } else { "s" })
}

/// `text` in lines of [`COLUMNS`] at the most, where its words allow it; those after the first begin with `indent`.
pub fn wrap(text: &str, indent: &str) -> String {
    wrap_at(text, indent, COLUMNS)
}

/// The same, in lines of `columns`.
pub fn wrap_at(text: &str, indent: &str, columns: usize) -> String {
    let mut wrapped = String::new();
    let mut column = 0;
    for word in text.split(' ') {
        let width = word.chars().count();
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

/// Bytes as a person says them: `77 kB`.
pub fn bytes(bytes: f64) -> String {
    match bytes {
        _ if bytes < 1.0 => "< 1 byte".into(),
        _ if bytes < 999.5 => format!("{bytes:.0} bytes"),
        _ if bytes < 999.5e3 => format!("{:.0} kB", bytes / 1e3),
        _ if bytes < 999.5e6 => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} GB", bytes / 1e9),
    }
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

/// Tells a person what goes beside the output. Nobody may listen any more, as behind `2>&1 | head`; that is no error.
pub fn tell(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}

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
    fn figures_are_said_as_people_say_them() {
        assert_eq!(
            [0.4, 512.0, 76_934.0, 999_499.0, 1_250_000.0].map(bytes),
            ["< 1 byte", "512 bytes", "77 kB", "999 kB", "1.2 MB"]
        );
        assert_eq!(
            [0.0001, 0.001, 0.043, 0.57].map(percent),
            ["less than 0.1 %", "0.1 %", "4.3 %", "57.0 %"]
        );
    }
}
