//! Text that others wrote, made safe to show: names of files, and whatever stands in files.
//!
//! A terminal obeys control characters: the sequences that they begin move the cursor, wipe the screen, set its title or
//! answer as if somebody had typed. Characters that turn the direction of writing, or that take no room, show a name as another
//! one. [`is_plain`] says which characters are neither, and [`Printable`] makes all others visible as `\u{1b}`. Whatever
//! prints such text prints it through here.

use std::fmt::{self, Display, Write};

/// Whether `c` shows as itself and as nothing else. Not so: control characters (C0, DEL and C1), what ends a line or a
/// paragraph, and what Unicode calls format characters: those that turn the direction of writing, take no room, or are tags.
pub fn is_plain(c: char) -> bool {
    let is_format = matches!(c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e007f}');
    !c.is_control() && !is_format
}

/// Shows what it holds with nothing in it that [is not plain](is_plain): such a character becomes its number, as in `\u{1b}`.
///
/// ```
/// use portcullis_trace::Printable;
///
/// assert_eq!(Printable("nvme\u{1b}[2J").to_string(), r"nvme\u{1b}[2J");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Printable<T>(pub T);

/// Characters of a line of a message that are shown: what stands in a file may be a megabyte without a blank.
const MOST_SHOWN: usize = 2_000;

/// The same for a message of several lines, which stay apart. Of each, what is beyond 2,000 characters is left out.
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

/// Passes text on, and escapes.
struct Escaped<'a, W> {
    out: &'a mut W,
    lines: bool,
    /// Characters that are shown yet of this line.
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
