//! How wide text is, and where names stand so that none lies over another, over a point or over a line.

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

/// From a corner to the one opposite.
#[derive(Debug, Clone, Copy)]
struct Area {
    least: At,
    most: At,
}

impl Area {
    fn meets(&self, other: &Self) -> bool {
        self.least.0 < other.most.0
            && other.least.0 < self.most.0
            && self.least.1 < other.most.1
            && other.least.1 < self.most.1
    }

    /// Whether a part of the way from `a` to `b` lies in it, by Liang and Barsky's way to clip a line.
    fn is_crossed(&self, a: At, b: At) -> bool {
        let (x, y) = (f64::from(a.0), f64::from(a.1));
        let (dx, dy) = (f64::from(b.0) - x, f64::from(b.1) - y);
        let (mut enters, mut leaves) = (0.0_f64, 1.0_f64);
        for (step, room) in [
            (-dx, x - f64::from(self.least.0)),
            (dx, f64::from(self.most.0) - x),
            (-dy, y - f64::from(self.least.1)),
            (dy, f64::from(self.most.1) - y),
        ] {
            if step == 0.0 && room < 0.0 {
                return false;
            } else if step < 0.0 {
                enters = enters.max(room / step);
            } else if step > 0.0 {
                leaves = leaves.min(room / step);
            }
        }
        enters <= leaves
    }
}

/// Where a name stands, and of what point it is the name.
#[derive(Debug, Clone)]
pub struct Place {
    of: At,
    at: At,
    anchor: &'static str,
    /// Whether a thin line leads there.
    leads: bool,
}

impl Place {
    fn lead(&self) -> Option<(At, At)> {
        let (x, y) = self.at;
        let (side, up) = match self.anchor {
            "start" => (-2, 0),
            "end" => (2, 0),
            _ => (0, if y < self.of.1 { 7 } else { -7 }),
        };
        self.leads.then_some((self.of, (x + side, y + up)))
    }

    /// How little one wants it: a name far from its point, at the end of a lead, or, of two that are alike, left of its point.
    fn cost(&self) -> i32 {
        let distance = (self.at.0 - self.of.0).abs() + (self.at.1 - self.of.1).abs();
        distance + if self.leads { 30 } else { 0 } + i32::from(self.anchor == "end")
    }

    fn area(&self, width: i32) -> Area {
        let (x, y) = self.at;
        let (left, right) = match self.anchor {
            "start" => (x, x + width),
            "end" => (x - width, x),
            _ => (x - width / 2, x + width / 2),
        };
        Area { least: (left - 2, y - LINE / 2), most: (right + 2, y + LINE / 2) }
    }

    pub fn write(&self, out: &mut String, name: &str) {
        let ((x, y), anchor) = (self.at, self.anchor);
        // Writing to a string cannot fail.
        if let Some((from, to)) = self.lead() {
            let _ = write!(out, "<path class=\"lead\" d=\"M{} {}L{} {}\"/>", from.0, from.1, to.0, to.1);
        }
        let _ = write!(
            out,
            "<text class=\"name\" x=\"{x}\" y=\"{y}\" dy=\".35em\" text-anchor=\"{anchor}\">{}</text>",
            escape(name)
        );
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
        Place { of: *of, at: (x, ys[at]), anchor: "start", leads }
    };
    points.iter().enumerate().map(place).collect()
}

/// Names right of points, where nothing else is.
pub fn at_the_right(points: &[At]) -> Vec<Place> {
    let place = |of: &At| Place { of: *of, at: (of.0 + 10, of.1), anchor: "start", leads: false };
    points.iter().map(place).collect()
}

/// What names must not lie over.
pub struct Taken {
    /// Points, of these names and of others.
    pub points: Vec<At>,
    /// Lines, each from one place to the other.
    pub ways: Vec<(At, At)>,
    /// The corners between which names stand.
    pub bounds: (At, At),
}

/// How often names are placed anew, in other orders.
const ROUNDS: u32 = 300;

/// In a plot with more points none has its name beside it: there is no room, and to find that out takes long.
const MOST_NAMES: usize = 256;

/// Names near `points`: none over another, over a point or over a line. Names for which there is no room stand nowhere.
///
/// A name may take the room of another. So names are placed in many orders, at random but the same each time, and the best of all
/// these is taken: the most names, and those as near to their points as can be.
pub fn beside(points: &[At], widths: &[f64], taken: &Taken) -> Vec<Option<Place>> {
    if points.len() > MOST_NAMES {
        return vec![None; points.len()];
    }
    let around = |of: &At| Area { least: (of.0 - 7, of.1 - 7), most: (of.0 + 7, of.1 + 7) };
    let dots: Vec<Area> = points.iter().chain(&taken.points).map(around).collect();
    // What each name could have if it were alone.
    let rows = points.iter().zip(widths).map(|(of, width)| {
        let width = width.ceil() as i32;
        let alone = candidates(*of).into_iter().map(|place| (place.area(width), place));
        alone.filter(|(area, _)| taken.leaves(area, &dots)).collect::<Vec<_>>()
    });
    let rows: Vec<Vec<(Area, Place)>> = rows.collect();
    let mut random = Random(1);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    let mut best: Option<(i32, Vec<Option<Place>>)> = None;
    for round in 0..ROUNDS {
        let mut room = Room::default();
        let mut places = vec![None; rows.len()];
        for at in &order {
            let mut free = rows[*at].iter().filter(|(area, place)| room.is_free(area, place));
            let mut found = free.next();
            // Not always what is best for one name.
            while round > 0 && random.below(3) == 0 {
                found = free.next().or(found);
            }
            if let Some((area, place)) = found {
                room.names.push(*area);
                room.leads.extend(place.lead());
                places[*at] = Some(place.clone());
            }
        }
        let cost = places.iter().map(|place| place.as_ref().map_or(10_000, Place::cost)).sum();
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, places));
        }
        for at in (1..order.len()).rev() {
            order.swap(at, random.below(at as u32 + 1) as usize);
        }
    }
    best.map_or_else(Vec::new, |(_, places)| places)
}

/// Numbers that look random, by Marsaglia's xorshift.
struct Random(u32);

impl Random {
    fn below(&mut self, most: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 % most
    }
}

impl Taken {
    /// Whether a name may stand there, were there no other names.
    fn leaves(&self, own: &Area, dots: &[Area]) -> bool {
        let (least, most) = self.bounds;
        own.least.0 > least.0
            && own.most.0 < most.0
            && own.least.1 > least.1
            && own.most.1 < most.1
            && dots.iter().all(|dot| !own.meets(dot))
            && self.ways.iter().all(|(a, b)| !own.is_crossed(*a, *b))
    }
}

/// Where names stand while others are looked for, and what leads to them.
#[derive(Default)]
struct Room {
    names: Vec<Area>,
    leads: Vec<(At, At)>,
}

impl Room {
    fn is_free(&self, own: &Area, place: &Place) -> bool {
        self.names.iter().all(|name| !own.meets(name))
            && self.leads.iter().all(|(a, b)| !own.is_crossed(*a, *b))
            && place.lead().is_none_or(|(a, b)| self.names.iter().all(|name| !name.is_crossed(a, b)))
    }
}

/// Where the name of a point may stand, the best first.
fn candidates(of: At) -> Vec<Place> {
    let place = |dx: i32, dy: i32, anchor, leads| Place { of, at: (of.0 + dx, of.1 + dy), anchor, leads };
    let mut all = vec![place(10, 0, "start", false), place(-10, 0, "end", false)];
    for level in 1..12 {
        let step = 2 + LINE * level;
        for dy in [-step, step] {
            all.push(place(0, dy, "middle", level > 1));
            // The farther away, the flatter is the way past a name that stands above or below the point.
            let aside = [8, 40, 70, 100].into_iter();
            all.extend(aside.flat_map(|dx| [place(dx, dy, "start", true), place(-dx, dy, "end", true)]));
        }
    }
    all
}

#[cfg(test)]
mod tests;
