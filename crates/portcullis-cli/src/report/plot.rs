//! A plot with axes, lines and points that the keyboard reaches, each with its figures in words.

use std::cell::RefCell;
use std::fmt::Write;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::{ChartBuilder, Color, IntoDrawingArea, IntoFont, LineSeries};
use plotters::style::IntoTextStyle;

use super::canvas::{Canvas, GRID, INK, TEXT};
use super::html::escape;
use super::text::{self, Place};

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
    /// What stands at its last point, or in a small plot behind its name, where that is not its name.
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
    /// Nowhere: a legend has them.
    Legend,
    /// Above the plot, with figures that are always there.
    Above,
}

pub struct Plot {
    pub title: String,
    /// What stands below it.
    pub caption: String,
    pub x: Axis,
    pub y: Axis,
    pub marks: Vec<Mark>,
    /// Lines in grey, to compare with.
    pub behind: Vec<Vec<Point>>,
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
    /// From the top to the middle of the first line of figures.
    figures: u32,
    /// The height below the plot, of the labels of its axis and the axis's title.
    foot: u32,
}

const WIDE: Size = Size { class: "wide", width: 760, font: 13.0, figures: 33, foot: 46 };
const NARROW: Size = Size { class: "narrow", width: 326, font: 12.0, figures: 33, foot: 46 };
/// One of several that stand side by side, in a wide window and in a narrow one.
const SMALL: Size = Size { class: "small", width: 174, font: 11.0, figures: 12, foot: 24 };

/// Between two lines of figures.
const BETWEEN: u32 = 17;

/// Plots side by side. Their axes are the same, and need no titles.
pub fn side_by_side(title: &str, caption: &str, plots: &[Plot]) -> String {
    let drawings: String = plots.iter().map(|plot| plot.draw(&SMALL)).collect();
    let (title, caption) = (escape(title), escape(caption));
    format!(
        "<figure>\n<h3>{title}</h3>\n<div class=\"side-by-side\">\n{drawings}</div>\n<figcaption>{caption}</figcaption>\n</figure>\n"
    )
}

impl Plot {
    /// The plot as a figure.
    pub fn figure(&self) -> String {
        let drawings: String = [WIDE, NARROW].iter().map(|size| self.draw(size)).collect();
        let (title, caption) = (escape(&self.title), escape(&self.caption));
        format!(
            "<figure>\n<h3>{title}</h3>\n{}{drawings}<figcaption>{caption}</figcaption>\n</figure>\n",
            self.legend()
        )
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
        let Size { class, width, font, foot, .. } = *size;
        let figures: Vec<Vec<String>> = self.marks.iter().map(|mark| self.figures_of(mark, size)).collect();
        let most = figures.iter().map(Vec::len).max().unwrap_or(1) as u32;
        let head = size.figures + BETWEEN * most.saturating_sub(1) + 12;
        // A column of names may be higher than what it names.
        let column = if self.names == Names::Ends { self.marks.len() as u32 * text::LINE as u32 } else { 0 };
        let height = head + self.height.max(column) + foot;
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
        let Size { width, font, figures: top, foot, .. } = *size;
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
            Names::Legend | Names::Above => 8,
        };
        let right = right.max(last);
        let inside = (f64::from(width.saturating_sub(left + right)), f64::from(height - head - foot));
        let x = self.x.with_room(inside.0, |label| wide(label, false) + 8.0);
        let y = self.y.with_room(inside.1, |_| f64::from(text::LINE));
        let area = Canvas { out, size: (width, height) }.into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(head)
            .margin_right(right)
            .x_label_area_size(foot)
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
        if self.names != Names::Above {
            write(&format!(
                "<text class=\"title\" x=\"0\" y=\"14\">{}</text><text class=\"title\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
                 <text class=\"hint\" x=\"0\" y=\"{top}\">Point, tap, or press Tab for figures.</text>",
                escape(&self.y.title),
                width - right,
                height - 5,
                escape(&self.x.title)
            ));
        }
        if !self.behind.is_empty() {
            write("<g class=\"behind\">");
            for line in &self.behind {
                chart.draw_series(LineSeries::new(line.iter().copied(), INK))?;
            }
            write("</g>");
        }
        write("</g>");
        let at = |point: &Point| chart.backend_coord(point);
        let lasts: Vec<_> = self.marks.iter().map(|mark| mark.last().map_or((0, 0), at)).collect();
        let bounds = (head as i32, (height - foot) as i32);
        let places: Vec<Place> = match self.names {
            Names::Ends => {
                let column = (width - right + 12) as i32;
                text::in_a_column(&lasts, column, bounds)
            }
            Names::Rows => {
                let most = |mark: &Mark| mark.lines.iter().flatten().map(at).max_by_key(|(x, _)| *x);
                let ends: Vec<_> = self.marks.iter().map(|mark| most(mark).unwrap_or((0, 0))).collect();
                text::at_the_right(&ends)
            }
            Names::Legend | Names::Above => Vec::new(),
        };
        for (number, mark) in self.marks.iter().enumerate() {
            let said = format!("{}: {}", mark.name, mark.readout.join(", "));
            write(&format!(
                "<g class=\"mark {}\" tabindex=\"0\" role=\"img\" aria-label=\"{}\">",
                escape(&mark.class),
                escape(&said)
            ));
            // A finger needs a broader line, where it asks for figures.
            let classes: &[&str] = if self.names == Names::Above { &["line"] } else { &["line", "touch"] };
            for class in classes.iter().filter(|_| !mark.lines.is_empty()) {
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
            if let (Some(place), Some(label)) = (places.get(number), labels.get(number)) {
                place.write(&mut out.borrow_mut(), label);
            }
            write(&format!("<g class=\"readout\"><text x=\"0\" y=\"{top}\">"));
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

    /// What a mark says where it is pointed at: its name, and its figures, in lines that fit.
    fn figures_of(&self, mark: &Mark, size: &Size) -> Vec<String> {
        let figures =
            if self.names == Names::Above { mark.label().to_owned() } else { mark.readout.join("; ") };
        let said = format!("{}: {figures}", mark.name);
        // The name is bold, and wider.
        let [bold, plain] = [true, false].map(|is_bold| text::width(&mark.name, size.font, is_bold));
        text::lines(&said, size.font, f64::from(size.width) - (bold - plain))
    }
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
