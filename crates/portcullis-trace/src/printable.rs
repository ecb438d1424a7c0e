//! Untrusted text made safe to display: file names, and the contents of files.
//!
//! A terminal interprets control characters: their sequences move the cursor, clear the screen, set its title or answer as if somebody had
//! typed. Characters that change the writing direction, or have no width, disguise a name. [`is_plain`] excludes both, and [`Printable`]
//! escapes such characters as `\u{1b}`. All code that prints such text prints it through here.

use std::fmt::{self, Display, Write};

/// Whether `c` shows as itself. Excluded: control characters (C0, DEL and C1), line and paragraph separators, and Unicode's format
/// characters, which change the writing direction, have no width, or are tags.
pub fn is_plain(c: char) -> bool {
    let is_format = matches!(c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e007f}');
    !c.is_control() && !is_format
}

/// Displays its value with characters escaped that [are not plain](is_plain), as in `\u{1b}`.
///
/// ```
/// use portcullis_trace::Printable;
///
/// assert_eq!(Printable("nvme\u{1b}[2J").to_string(), r"nvme\u{1b}[2J");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Printable<T>(pub T);

/// The most characters of a line in a message: a file may have a megabyte without a blank.
const MOST_SHOWN: usize = 2_000;

/// The same for a message of several lines. Truncates each to 2,000 characters.
#[derive(Debug, Clone, Copy)]
pub struct PrintableLines<T>(pub T);

impl<T: Display> Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaped { out: f, lines: false, left: usize::MAX }, "{}", self.0)
    }
}

impl<T: Display> Display for PrintableLines<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaped { out: f, lines: true, left: MOST_SHOWN }, "{}", self.0)
    }
}

/// Escapes text.
struct Escaped<'a, W> {
    out: &'a mut W,
    lines: bool,
    /// Characters left of this line.
    left: usize,
}

impl<W: Write> Write for Escaped<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.lines && c == '\n' {
                self.left = MOST_SHOWN;
                self.out.write_char('\n')?;
                continue;
            }
            match self.left {
                0 => continue,
                1 => self.out.write_str("...")?,
                _ if is_plain(c) => self.out.write_char(c)?,
                _ => write!(self.out, "{}", c.escape_unicode())?,
            }
            self.left = self.left.saturating_sub(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_shown_and_all_else_stays() {
        let plain = "0000:00:03.0 é 漢 µ± \\ ' \" <&>";
        assert_eq!(Printable(plain).to_string(), plain);
        for c in ('\0'..=' ').chain('\u{7f}'..='\u{a0}').chain('\u{200b}'..='\u{200f}') {
            let shown = Printable(format!("a{c}b")).to_string();
            let expected = if matches!(c, ' ' | '\u{a0}') {
                format!("a{c}b")
            } else {
                format!("a{}b", c.escape_unicode())
            };
            assert_eq!(shown, expected);
        }
        for c in "\u{61c}\u{202a}\u{202e}\u{2028}\u{2066}\u{2069}\u{feff}\u{ad}\u{e0041}".chars() {
            assert!(!is_plain(c), "{}", c.escape_unicode());
        }
        assert_eq!(PrintableLines("a\nb\r\t").to_string(), "a\nb\\u{d}\\u{9}");
        let long = PrintableLines(format!("{}\nb", "a".repeat(1 << 20))).to_string();
        assert_eq!(long, format!("{}...\nb", "a".repeat(MOST_SHOWN - 1)));
    }
}
