//! How wide text is, and where names stand so that none lies over another.

use super::html::escape;
use std::fmt::Write;

/// The height of a line of text, in pixels.
pub const LINE: i32 = 15;

/// How wide `text` is at `font` pixels, at least: as in DejaVu Sans, which is wider than what most systems have.
pub fn width(text: &str, font: f64, is_bold: bool) -> f64 {
    let letter = |c: char| match c {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '|' | '\'' | '!' | ' ' | '\u{a0}' => 0.34,
        'f' | 't' | 'r' | '-' | '(' | ')' | '/' | '·' => 0.41,
        'm' | 'w' | 'M' | 'W' | '%' | '@' | '…' => 1.0,
        c if c.is_ascii_uppercase() => 0.75,
        c if c.is_ascii() || c == 'µ' => 0.64,
        _ => 1.1,
    };
    text.chars().map(letter).sum::<f64>() * font * if is_bold { 1.13 } else { 1.0 }
}

/// `text`, or what fits of it.
pub fn cut(text: &str, font: f64, most: f64) -> String {
    if width(text, font, false) <= most {
        return text.to_owned();
    }
    let mut short: String = text.to_owned();
    while short.pop().is_some() && width(&short, font, false) + font > most {}
    short + "…"
}

/// `text` in lines that are no wider than `most`, where its words allow it.
pub fn lines(text: &str, font: f64, most: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if width(&format!("{line} {word}"), font, false) <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// A point of the drawing, in pixels.
pub type At = (i32, i32);

/// Where a name stands, right of the point that it names.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    of: At,
    at: At,
    /// Whether a thin line leads there.
    leads: bool,
}

impl Place {
    pub fn write(&self, out: &mut String, name: &str) {
        let (of, (x, y)) = (self.of, self.at);
        // Writing to a string cannot fail.
        if self.leads {
            let _ = write!(out, "<path class=\"lead\" d=\"M{} {}L{} {y}\"/>", of.0, of.1, x - 2);
        }
        let _ = write!(out, "<text class=\"name\" x=\"{x}\" y=\"{y}\" dy=\".35em\">{}</text>", escape(name));
    }
}

/// Names in a column at `x`, right of all lines, each as near to its line's end as the others let it.
pub fn in_a_column(points: &[At], x: i32, (top, bottom): (i32, i32)) -> Vec<Place> {
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by_key(|at| points[*at].1);
    let mut ys = vec![0; points.len()];
    let mut least = top;
    for at in &order {
        ys[*at] = points[*at].1.max(least);
        least = ys[*at] + LINE;
    }
    let mut most = bottom;
    for at in order.iter().rev() {
        ys[*at] = ys[*at].min(most);
        most = ys[*at] - LINE;
    }
    let place = |(at, of): (usize, &At)| {
        let leads = (ys[at] - of.1).abs() > 3 || x - of.0 > 16;
        Place { of: *of, at: (x, ys[at]), leads }
    };
    points.iter().enumerate().map(place).collect()
}

/// Names right of points, where nothing else is.
pub fn at_the_right(points: &[At]) -> Vec<Place> {
    let place = |of: &At| Place { of: *of, at: (of.0 + 10, of.1), leads: false };
    points.iter().map(place).collect()
}

#[cfg(test)]
mod tests;
