//! A plot with axes, lines and points that the keyboard reaches, each with its figures in words.

use std::cell::RefCell;
use std::fmt::Write;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::{ChartBuilder, Color, IntoDrawingArea, IntoFont, LineSeries};
use plotters::style::IntoTextStyle;

use super::canvas::{Canvas, GRID, INK, TEXT};
use super::html::escape;
use super::text::{self, Place, Taken};

/// A point of the plot's plane.
pub type Point = (f64, f64);

pub struct Axis {
    pub range: (f64, f64),
    pub ticks: Vec<(f64, String)>,
    pub title: String,
}

impl Axis {
    /// The axis with those of its ticks for whose labels there is room, one beside another, on `length` pixels.
    fn with_room(&self, length: f64, extent: impl Fn(&str) -> f64) -> Scale {
        let per_unit = length / (self.range.1 - self.range.0);
        let mut ticks: Vec<(f64, String)> = Vec::new();
        let mut taken = f64::MIN;
        let mut all: Vec<&(f64, String)> = self.ticks.iter().collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (at, label) in all {
            let (middle, half) = ((at - self.range.0) * per_unit, extent(label) / 2.0);
            if middle - half >= taken {
                taken = middle + half;
                ticks.push((*at, label.clone()));
            }
        }
        Scale { range: self.range, ticks }
    }
}

/// An axis as plotters has it: with lines where its ticks are.
#[derive(Clone)]
struct Scale {
    range: (f64, f64),
    ticks: Vec<(f64, String)>,
}

impl Scale {
    fn label(&self, at: f64) -> String {
        self.ticks.iter().find(|(tick, _)| *tick == at).map_or_else(String::new, |(_, label)| label.clone())
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
        self.ticks.iter().map(|(at, _)| *at).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.0..self.range.1
    }
}

/// What is focused as one: lines, points, or both.
#[derive(Default)]
pub struct Mark {
    /// Its colour and its dashes, in the page's style.
    pub class: String,
    pub name: String,
    /// What stands at its last point, where that is not its name.
    pub label: Option<String>,
    /// Its figures, in words.
    pub readout: Vec<String>,
    pub lines: Vec<Vec<Point>>,
    pub dots: Vec<(Point, Shape)>,
}

impl Mark {
    fn label(&self) -> &str {
        self.label.as_deref().unwrap_or(&self.name)
    }

    fn last(&self) -> Option<&Point> {
        self.dots.last().map(|(point, _)| point).or_else(|| self.lines.last()?.last())
    }
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
    /// In a column, right of the ends of lines.
    Ends,
    /// Right of each mark's line: no other mark is in its row.
    Rows,
    /// Beside each mark's last point, where there is room.
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
    /// Between its highest and its lowest point, in pixels.
    pub height: u32,
}

/// The height of a plot whose rows do not say how high it is.
pub const HEIGHT: u32 = 320;

/// A phone gets a drawing of its own, where letters are as large as elsewhere.
struct Size {
    class: &'static str,
    width: u32,
    font: f64,
}

const WIDE: Size = Size { class: "wide", width: 760, font: 13.0 };
const NARROW: Size = Size { class: "narrow", width: 326, font: 12.0 };
const SMALL: Size = Size { class: "small", width: 326, font: 12.0 };

/// The height below the plot, of the labels of its axis and the axis's title.
const FOOT: u32 = 46;

/// From the top to the middle of the first line of figures, and between two such lines.
const FIGURES: u32 = 33;
const BETWEEN: u32 = 17;

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
        let (title, caption) = (escape(&self.title), escape(&self.caption));
        let caption =
            if caption.is_empty() { String::new() } else { format!("<figcaption>{caption}</figcaption>\n") };
        format!("<figure>\n<h3>{title}</h3>\n{}{drawings}{caption}</figure>\n", self.legend())
    }

    fn legend(&self) -> String {
        if self.names != Names::Legend {
            return String::new();
        }
        let mut html = "<ul class=\"legend\">".to_owned();
        for mark in &self.marks {
            let shape = mark.dots.first().map_or(Shape::Square, |(_, shape)| *shape);
            // Writing to a string cannot fail.
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
        let Size { class, width, font } = *size;
        let figures: Vec<Vec<String>> = self.marks.iter().map(|mark| figures_of(mark, size)).collect();
        let most = figures.iter().map(Vec::len).max().unwrap_or(1) as u32;
        let head = FIGURES + BETWEEN * most.saturating_sub(1) + 12;
        let inner = if class == "small" { self.height / 2 } else { self.height };
        // A column of names may be higher than what it names.
        let column = if self.names == Names::Ends { self.marks.len() as u32 * text::LINE as u32 } else { 0 };
        let height = head + inner.max(column) + FOOT;
        let out = RefCell::new(String::new());
        // Only writing could fail, and writing to a string cannot.
        let _ = self.draw_on(&out, size, &figures, (head, height));
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
        figures: &[Vec<String>],
        (head, height): (u32, u32),
    ) -> Result<(), Box<dyn std::error::Error>> {
        let (width, font) = (size.width, size.font);
        let most = f64::from(width) * 0.4;
        let short = |label: &str| text::cut(label, font, most);
        let labels: Vec<String> = self.marks.iter().map(|mark| text::cut(mark.label(), font, most)).collect();
        let wide = |label: &str, is_bold: bool| text::width(label, font, is_bold);
        let left =
            self.y.ticks.iter().map(|(_, label)| wide(&short(label), false)).fold(0.0, f64::max) as u32 + 14;
        let last = self.x.ticks.last().map_or(0.0, |(_, label)| wide(label, false)) as u32 / 2;
        let right = match self.names {
            Names::Ends | Names::Rows => {
                labels.iter().map(|label| wide(label, true)).fold(0.0, f64::max) as u32 + 16
            }
            _ => 16,
        };
        let right = right.max(last);
        let inside = (f64::from(width.saturating_sub(left + right)), f64::from(height - head - FOOT));
        let x = self.x.with_room(inside.0, |label| wide(label, false) + 8.0);
        let y = self.y.with_room(inside.1, |_| f64::from(text::LINE));
        let area = Canvas { out, size: (width, height) }.into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(head)
            .margin_right(right)
            .x_label_area_size(FOOT)
            .y_label_area_size(left)
            .build_cartesian_2d(x.clone(), y.clone())?;
        let write = |text: &str| out.borrow_mut().push_str(text);
        write("<g aria-hidden=\"true\">");
        chart
            .configure_mesh()
            .axis_style(GRID)
            .bold_line_style(GRID)
            .light_line_style(GRID.mix(0.0))
            .label_style(("sans-serif", font).into_font().color(&TEXT).into_text_style(&area))
            .x_label_formatter(&|at| x.label(*at))
            .y_label_formatter(&|at| short(&y.label(*at)))
            .draw()?;
        write(&format!(
            "<text class=\"title\" x=\"0\" y=\"14\">{}</text><text class=\"title\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            escape(&self.y.title),
            width - right,
            height - 5,
            escape(&self.x.title)
        ));
        write(&format!(
            "<text class=\"hint\" x=\"0\" y=\"{FIGURES}\">Point, tap, or press Tab for figures.</text></g>"
        ));
        let at = |point: &Point| chart.backend_coord(point);
        let lasts: Vec<_> = self.marks.iter().map(|mark| mark.last().map_or((0, 0), at)).collect();
        let bounds = (head as i32, (height - FOOT) as i32);
        let places: Vec<Option<Place>> = match self.names {
            Names::Ends => {
                let column = (width - right + 12) as i32;
                text::in_a_column(&lasts, column, bounds).into_iter().map(Some).collect()
            }
            Names::Rows => {
                let most = |mark: &Mark| mark.lines.iter().flatten().map(at).max_by_key(|(x, _)| *x);
                let ends: Vec<_> = self.marks.iter().map(|mark| most(mark).unwrap_or((0, 0))).collect();
                text::at_the_right(&ends).into_iter().map(Some).collect()
            }
            Names::Beside => {
                let dots = self.marks.iter().flat_map(|mark| &mark.dots).map(|(point, _)| at(point));
                let lines = self.marks.iter().flat_map(|mark| &mark.lines);
                let ways = lines
                    .flat_map(|line| line.windows(2))
                    .filter_map(|two| Some((at(two.first()?), at(two.last()?))));
                let bounds = ((left as i32, bounds.0), (width as i32, bounds.1 - 2));
                let taken = Taken { points: dots.collect(), ways: ways.collect(), bounds };
                let widths: Vec<_> = labels.iter().map(|label| wide(label, true)).collect();
                text::beside(&lasts, &widths, &taken)
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
            for class in ["line", "touch"].into_iter().filter(|_| !mark.lines.is_empty()) {
                write(&format!("<g class=\"{class}\">"));
                for line in &mark.lines {
                    chart.draw_series(LineSeries::new(line.iter().copied(), INK))?;
                }
                write("</g>");
            }
            for (point, shape) in &mark.dots {
                let (x, y) = chart.backend_coord(point);
                write(&shape.at(x, y));
            }
            if let (Some(Some(place)), Some(label)) = (places.get(number), labels.get(number)) {
                place.write(&mut out.borrow_mut(), label);
            }
            write(&format!("<g class=\"readout\"><text x=\"0\" y=\"{FIGURES}\">"));
            for (row, line) in figures.get(number).into_iter().flatten().enumerate() {
                let name = line.strip_prefix(&mark.name).filter(|_| row == 0);
                let (bold, line) = name.map_or(("", line.as_str()), |rest| (&mark.name, rest));
                let (bold, line) = (escape(bold), escape(line));
                if row == 0 {
                    write(&format!("<tspan class=\"name\">{bold}</tspan>{line}"));
                } else {
                    write(&format!("<tspan x=\"0\" dy=\"{BETWEEN}\">{line}</tspan>"));
                }
            }
            write("</text></g></g>\n");
        }
        Ok(())
    }
}

/// What a mark says where it is pointed at: its name, and its figures, in lines that fit.
fn figures_of(mark: &Mark, size: &Size) -> Vec<String> {
    let said = format!("{}: {}", mark.name, mark.readout.join("; "));
    // The name is bold, and wider.
    let [bold, plain] = [true, false].map(|is_bold| text::width(&mark.name, size.font, is_bold));
    text::lines(&said, size.font, f64::from(size.width) - (bold - plain))
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
