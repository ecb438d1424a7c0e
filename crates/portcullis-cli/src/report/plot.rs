//! A plot with axes, lines and points that the keyboard reaches, each with its figures in words.

use std::cell::RefCell;
use std::fmt::Write;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::{ChartBuilder, Color, IntoDrawingArea, IntoFont, LineSeries};
use plotters::style::IntoTextStyle;

use super::canvas::{Canvas, GRID, INK, TEXT};
use super::html::escape;

/// A point of the plot's plane.
pub type Point = (f64, f64);

pub struct Axis {
    pub range: (f64, f64),
    pub ticks: Vec<(f64, String)>,
    pub title: String,
}

/// An axis as plotters has it: with lines where its ticks are.
struct Scale {
    range: (f64, f64),
    ticks: Vec<f64>,
}

impl Scale {
    fn of(axis: &Axis) -> Self {
        Self { range: axis.range, ticks: axis.ticks.iter().map(|(at, _)| *at).collect() }
    }
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value - self.range.0) / (self.range.1 - self.range.0);
        limit.0 + (share.clamp(0.0, 1.0) * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.0..self.range.1
    }
}

/// What is focused as one: a line, points, or both.
#[derive(Default)]
pub struct Mark {
    /// Its colour and its dashes, in the page's style.
    pub class: String,
    pub name: String,
    /// Its figures, in one line or two.
    pub readout: Vec<String>,
    pub line: Vec<Point>,
    pub dots: Vec<(Point, Shape)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Dot,
    Ring,
    Square,
    Triangle,
    Diamond,
    Cross,
}

/// Where names stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// At the ends of lines, on the right.
    Ends,
    /// Beside each mark's last point.
    Beside,
    /// Nowhere: a legend has them.
    Legend,
}

pub struct Plot {
    pub title: String,
    /// What stands below it.
    pub caption: String,
    pub x: Axis,
    pub y: Axis,
    pub marks: Vec<Mark>,
    pub names: Names,
    /// Of the plot in a wide window, in pixels.
    pub height: u32,
}

/// A phone gets a drawing of its own, where letters are as large as elsewhere.
struct Size {
    class: &'static str,
    width: u32,
    font: f64,
}

const WIDE: Size = Size { class: "wide", width: 760, font: 13.0 };
const NARROW: Size = Size { class: "narrow", width: 358, font: 12.0 };
const SMALL: Size = Size { class: "small", width: 358, font: 12.0 };

/// The height above the plot for the axis's title and two lines of figures.
const HEAD: u32 = 60;
const FOOT: u32 = 46;

impl Plot {
    /// The plot as a figure.
    pub fn figure(&self) -> String {
        self.in_sizes(&[WIDE, NARROW])
    }

    /// The plot as one of several that stand side by side.
    pub fn small(&self) -> String {
        self.in_sizes(&[SMALL])
    }

    fn in_sizes(&self, sizes: &[Size]) -> String {
        let drawings: String = sizes.iter().map(|size| self.draw(size)).collect();
        let (title, caption) = (escape(&self.title), &self.caption);
        format!(
            "<figure>\n<h3>{title}</h3>\n{drawings}<figcaption>{caption}</figcaption>\n{}</figure>\n",
            self.legend()
        )
    }

    fn legend(&self) -> String {
        if self.names != Names::Legend {
            return String::new();
        }
        let mut html = "<ul class=\"legend\">".to_owned();
        for mark in &self.marks {
            let shape = mark.dots.first().map_or(Shape::Dot, |(_, shape)| *shape);
            let _ = write!(
                html,
                "<li><svg class=\"{}\" width=\"14\" height=\"14\" aria-hidden=\"true\">{}</svg> {}</li>",
                escape(&mark.class),
                shape.at(7, 7),
                escape(&mark.name)
            );
        }
        html + "</ul>\n"
    }

    fn draw(&self, size: &Size) -> String {
        let out = RefCell::new(String::new());
        let height = if size.class == "small" { self.height.min(270) } else { self.height };
        // Only writing could fail, and writing to a string cannot.
        let _ = self.draw_on(&out, size, height);
        let Size { class, width, font } = size;
        format!(
            "<svg class=\"plot {class}\" viewBox=\"0 0 {width} {height}\" font-size=\"{font}\" role=\"group\" aria-label=\"{}\">\
             {}</svg>\n",
            escape(&self.title),
            out.into_inner()
        )
    }

    fn draw_on(
        &self,
        out: &RefCell<String>,
        size: &Size,
        height: u32,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let letter = size.font * 0.58;
        let wide_of = |text: &str| text.chars().count() as f64 * letter;
        let longest = |texts: &mut dyn Iterator<Item = &str>| texts.map(&wide_of).fold(0.0, f64::max);
        let most = f64::from(size.width) * 0.4;
        let left = longest(&mut self.y.ticks.iter().map(|(_, label)| label.as_str())).min(most) as u32 + 12;
        let right = match self.names {
            Names::Ends => {
                longest(&mut self.marks.iter().map(|mark| mark.name.as_str())).min(most) as u32 + 14
            }
            _ => 16,
        };
        let area = Canvas { out, size: (size.width, height) }.into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(HEAD)
            .margin_right(right)
            .x_label_area_size(FOOT)
            .y_label_area_size(left)
            .build_cartesian_2d(Scale::of(&self.x), Scale::of(&self.y))?;
        let write = |text: &str| out.borrow_mut().push_str(text);
        write("<g aria-hidden=\"true\">");
        chart
            .configure_mesh()
            .axis_style(GRID)
            .bold_line_style(GRID)
            .light_line_style(GRID.mix(0.0))
            .label_style(("sans-serif", size.font).into_font().color(&TEXT).into_text_style(&area))
            .x_label_formatter(&|at| label_of(&self.x, *at, usize::MAX))
            .y_label_formatter(&|at| label_of(&self.y, *at, (most / letter) as usize))
            .draw()?;
        let (width, line) = (size.width, 17);
        write(&format!(
            "<text class=\"title\" x=\"0\" y=\"14\">{}</text><text class=\"title\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            escape(&self.y.title),
            width - right,
            height - 5,
            escape(&self.x.title)
        ));
        write("<text class=\"hint\" x=\"0\" y=\"33\">Point, tap, or press Tab for figures.</text></g>");
        let at = |point: &Point| chart.backend_coord(point);
        let places = match self.names {
            Names::Ends => {
                ends(&self.marks.iter().map(|m| m.line.last().map_or((0, 0), at)).collect::<Vec<_>>(), height)
            }
            Names::Beside => {
                let dots: Vec<_> =
                    self.marks.iter().map(|m| m.dots.last().map_or((0, 0), |(p, _)| at(p))).collect();
                let widths: Vec<_> = self.marks.iter().map(|m| wide_of(&m.name)).collect();
                beside(&dots, &widths, (left as i32, width as i32), (HEAD as i32, (height - FOOT) as i32))
            }
            Names::Legend => Vec::new(),
        };
        for (number, mark) in self.marks.iter().enumerate() {
            let said = format!("{}: {}", mark.name, mark.readout.join(", "));
            write(&format!(
                "<g class=\"mark {}\" tabindex=\"0\" role=\"img\" aria-label=\"{}\">",
                escape(&mark.class),
                escape(&said)
            ));
            if !mark.line.is_empty() {
                write("<g class=\"line\">");
                chart.draw_series(LineSeries::new(mark.line.iter().copied(), INK))?;
                write("</g><g class=\"touch\">");
                chart.draw_series(LineSeries::new(mark.line.iter().copied(), INK))?;
                write("</g>");
            }
            for (point, shape) in &mark.dots {
                let (x, y) = chart.backend_coord(point);
                write(&shape.at(x, y));
            }
            if let Some(place) = places.get(number) {
                place.write(&mut out.borrow_mut(), &mark.name);
            }
            write("<g class=\"readout\">");
            write(&format!("<text x=\"0\" y=\"33\"><tspan class=\"name\">{}</tspan> ", escape(&mark.name)));
            for (row, text) in mark.readout.iter().enumerate() {
                let text = escape(text);
                if row == 0 {
                    write(&text);
                } else {
                    write(&format!("<tspan x=\"0\" dy=\"{line}\">{text}</tspan>"));
                }
            }
            write("</text></g></g>\n");
        }
        Ok(())
    }
}

fn label_of(axis: &Axis, at: f64, most: usize) -> String {
    let label = axis.ticks.iter().find(|(tick, _)| (tick - at).abs() < 1e-9).map_or("", |(_, label)| label);
    if label.chars().count() <= most {
        return label.to_owned();
    }
    label.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

impl Shape {
    pub const ALL: [Self; 6] =
        [Self::Dot, Self::Ring, Self::Square, Self::Triangle, Self::Diamond, Self::Cross];

    fn at(self, x: i32, y: i32) -> String {
        match self {
            Self::Dot => format!("<circle class=\"dot\" cx=\"{x}\" cy=\"{y}\" r=\"5\"/>"),
            Self::Ring => format!("<circle class=\"ring\" cx=\"{x}\" cy=\"{y}\" r=\"5\"/>"),
            Self::Square => format!("<path class=\"dot\" d=\"M{} {}h9v9h-9z\"/>", x - 4, y - 4),
            Self::Triangle => format!("<path class=\"dot\" d=\"M{x} {}l5.5 10h-11z\"/>", y - 6),
            Self::Diamond => format!("<path class=\"ring\" d=\"M{x} {}l6 6l-6 6l-6 -6z\"/>", y - 6),
            Self::Cross => format!("<path class=\"ring\" d=\"M{} {}l9 9m0 -9l-9 9\"/>", x - 4, y - 4),
        }
    }
}

/// Where a name stands, and what of it: the point it belongs to, and its own.
struct Place {
    of: (i32, i32),
    at: (i32, i32),
    anchor: &'static str,
    /// Whether a thin line leads there.
    leads: bool,
}

impl Place {
    fn write(&self, out: &mut String, name: &str) {
        let ((x0, y0), (x, y), anchor) = (self.of, self.at, self.anchor);
        // Writing to a string cannot fail.
        if self.leads {
            let _ = write!(
                out,
                "<path class=\"lead\" d=\"M{x0} {y0}L{} {y}\"/>",
                if anchor == "start" { x - 2 } else { x }
            );
        }
        let _ = write!(
            out,
            "<text class=\"name\" x=\"{x}\" y=\"{y}\" dy=\".35em\" text-anchor=\"{anchor}\">{}</text>",
            escape(name)
        );
    }
}

/// Names at the right of lines' ends, a line's height apart.
fn ends(points: &[(i32, i32)], height: u32) -> Vec<Place> {
    const APART: i32 = 15;
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by_key(|at| points[*at].1);
    let mut ys = vec![0; points.len()];
    let mut least = HEAD as i32;
    for at in &order {
        ys[*at] = points[*at].1.max(least);
        least = ys[*at] + APART;
    }
    let mut most = (height - FOOT) as i32;
    for at in order.iter().rev() {
        ys[*at] = ys[*at].min(most);
        most = ys[*at] - APART;
    }
    let place = |(at, (x, y)): (usize, &(i32, i32))| {
        let leads = (ys[at] - y).abs() > 3;
        Place { of: (*x, *y), at: (x + 12, ys[at]), anchor: "start", leads }
    };
    points.iter().enumerate().map(place).collect()
}

/// Names beside points, none over another or over a point.
fn beside(
    points: &[(i32, i32)],
    widths: &[f64],
    (left, right): (i32, i32),
    (top, bottom): (i32, i32),
) -> Vec<Place> {
    type Box = (i32, i32, i32, i32);
    let apart = |a: &Box, b: &Box| a.2 <= b.0 || b.2 <= a.0 || a.3 <= b.1 || b.3 <= a.1;
    let mut taken: Vec<Box> = points.iter().map(|(x, y)| (x - 7, y - 7, x + 7, y + 7)).collect();
    let mut places = Vec::new();
    for ((x, y), width) in points.iter().zip(widths) {
        let width = *width as i32;
        let mut tries = vec![(x + 10, *y, "start", false), (x - 10, *y, "end", false)];
        for level in 1..12 {
            let step = 4 + 15 * level;
            for side in [y - step, y + step] {
                tries.extend([
                    (*x, side, "middle", level > 1),
                    (x + 8, side, "start", true),
                    (x - 8, side, "end", true),
                ]);
            }
        }
        let box_of = |(x, y, anchor): (i32, i32, &str)| match anchor {
            "start" => (x - 3, y - 7, x + width + 3, y + 7),
            "end" => (x - width - 3, y - 7, x + 3, y + 7),
            _ => (x - width / 2 - 3, y - 7, x + width / 2 + 3, y + 7),
        };
        let inside = |b: &Box| b.0 > left && b.2 < right && b.1 > top && b.3 < bottom - 2;
        let free = tries.iter().copied().find(|(x, y, anchor, _)| {
            let own = box_of((*x, *y, anchor));
            inside(&own) && taken.iter().all(|other| apart(&own, other))
        });
        let (at_x, at_y, anchor, leads) = free.unwrap_or(tries[0]);
        taken.push(box_of((at_x, at_y, anchor)));
        places.push(Place { of: (*x, *y), at: (at_x, at_y), anchor, leads });
    }
    places
}
