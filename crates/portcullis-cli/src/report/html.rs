//! Pieces of HTML. Whatever comes from a result's file goes through [`escape`].

use std::fmt::Write;

use portcullis_trace::Printable;

/// `text` with nothing in it that HTML would take for its own.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    while let Some(c) = letters.next() {
        match c {
            // A figure and its unit stand in one line.
            ' ' if letters.peek() == Some(&'%') => escaped.push('\u{a0}'),
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' => escaped.push('\n'),
            // What would be a command, or show a name as another one, is made visible; all else stays.
            c => {
                // Writing to a string cannot fail.
                let _ = write!(escaped, "{}", Printable(c));
            }
        }
    }
    escaped
}

/// `text` escaped, in an element.
pub fn element(name: &str, text: &str) -> String {
    format!("<{name}>{}</{name}>\n", escape(text))
}

/// `text` escaped, in a paragraph; what stands between backticks is code.
pub fn sentence(text: &str) -> String {
    let parts = text.split('`').map(escape).enumerate();
    let parts = parts.map(|(at, part)| if at % 2 == 1 { format!("<code>{part}</code>") } else { part });
    format!("<p>{}</p>\n", parts.collect::<String>())
}

/// A table: the first column names the rows, and the others are figures.
pub fn table(caption: &str, head: &[String], rows: &[Vec<String>]) -> String {
    let mut html = format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table><caption>{0}</caption>\n<thead><tr>",
        escape(caption)
    );
    // Writing to a string cannot fail.
    for name in head {
        let _ = write!(html, "<th scope=\"col\">{}</th>", escape(name));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        html.push_str("<tr>");
        for (at, cell) in row.iter().enumerate() {
            let cell = escape(cell);
            let _ = if at == 0 {
                write!(html, "<th scope=\"row\">{cell}</th>")
            } else {
                write!(html, "<td>{cell}</td>")
            };
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody></table></div>\n");
    html
}

/// What opens when it is asked for.
pub fn details(summary: &str, inside: &str) -> String {
    format!("<details><summary>{}</summary>\n{inside}</details>\n", escape(summary))
}

/// Names and what they are, in two columns.
pub fn pairs(rows: &[(&str, String)]) -> String {
    let mut html = "<dl>\n".to_owned();
    for (name, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = writeln!(html, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
    }
    html + "</dl>\n"
}

/// A time of `ns` nanoseconds, as people say it.
pub fn time(ns: f64) -> String {
    match ns {
        _ if ns < 9.95 => format!("{ns:.1} ns"),
        _ if ns < 999.5 => format!("{ns:.0} ns"),
        _ if ns < 99_950.0 => format!("{:.1} µs", ns / 1e3),
        _ if ns < 999_500.0 => format!("{:.0} µs", ns / 1e3),
        _ if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        _ => format!("{:.1} s", ns / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_name_is_markup() {
        let hostile = "</title><script>alert('1')</script>&\"\0\u{202e}";
        let escaped = escape(hostile);
        assert!(!escaped.contains(['<', '>', '"', '\'', '\0', '\u{202e}']), "{escaped}");
        assert!(
            escaped.contains("&lt;script&gt;alert(&#39;1&#39;)") && escaped.contains("&amp;"),
            "{escaped}"
        );
    }

    #[test]
    fn what_is_typed_is_code() {
        let said = sentence("Type `echo DMA > type`, or `<b>`: `x");
        assert_eq!(
            said,
            "<p>Type <code>echo DMA &gt; type</code>, or <code>&lt;b&gt;</code>: <code>x</code></p>\n"
        );
    }

    #[test]
    fn times_have_units() {
        let said = [0.0, 9.96, 712.3, 1_234.0, 123_400.0, 2.5e6, 3e9].map(time);
        assert_eq!(said, ["0.0 ns", "10 ns", "712 ns", "1.2 µs", "123 µs", "2.5 ms", "3.0 s"]);
        let said =
            [9.94, 9.95, 999.4, 999.5, 99_949.0, 99_950.0, 999_499.0, 999_500.0, 9.99e8, 1e9].map(time);
        let expected = [
            "9.9 ns", "10 ns", "999 ns", "1.0 µs", "99.9 µs", "100 µs", "999 µs", "1.0 ms", "999.0 ms",
            "1.0 s",
        ];
        assert_eq!(said, expected);
    }
}
