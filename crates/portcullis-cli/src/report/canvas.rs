//! Where plotters draws: SVG whose colours are those of the page, so that they follow it into the dark and onto paper.

use std::cell::RefCell;
use std::fmt::{Error, Write};

use plotters::style::RGBColor;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind,
};

use super::html::escape;

/// Plotters knows colours only. These three stand for a class of the page's style; `INK` for that of the group drawn in.
pub const GRID: RGBColor = RGBColor(0, 0, 1);
pub const TEXT: RGBColor = RGBColor(0, 0, 2);
pub const INK: RGBColor = RGBColor(0, 0, 3);

/// Collects SVG. Plots write groups into `out`, too, around what plotters draws.
pub struct Canvas<'a> {
    pub out: &'a RefCell<String>,
    pub size: (u32, u32),
}

type Drawn = Result<(), DrawingErrorKind<Error>>;

impl Canvas<'_> {
    fn write(&self, element: std::fmt::Arguments<'_>) -> Drawn {
        self.out.borrow_mut().write_fmt(element).map_err(DrawingErrorKind::DrawingError)
    }
}

fn class(color: BackendColor) -> &'static str {
    match color.rgb {
        (0, 0, 1) => " class=\"grid\"",
        (0, 0, 2) => " class=\"tick\"",
        _ => "",
    }
}

impl DrawingBackend for Canvas<'_> {
    type ErrorType = Error;

    fn get_size(&self) -> (u32, u32) {
        self.size
    }

    fn ensure_prepared(&mut self) -> Drawn {
        Ok(())
    }

    fn present(&mut self) -> Drawn {
        Ok(())
    }

    fn draw_pixel(&mut self, (x, y): BackendCoord, color: BackendColor) -> Drawn {
        self.write(format_args!("<path{} d=\"M{x} {y}h1\"/>", class(color)))
    }

    fn draw_line<S: BackendStyle>(&mut self, from: BackendCoord, to: BackendCoord, style: &S) -> Drawn {
        self.draw_path([from, to], style)
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> Drawn {
        let mut points: Vec<BackendCoord> = Vec::new();
        for point in path {
            // Of a straight run its ends are enough.
            if let [.., a, b] = points[..]
                && ((a.0 == b.0 && b.0 == point.0) || (a.1 == b.1 && b.1 == point.1))
            {
                points.pop();
            }
            points.push(point);
        }
        if style.color().alpha == 0.0 {
            return Ok(());
        }
        let mut d = String::new();
        for (at, (x, y)) in points.iter().enumerate() {
            let _ = write!(d, "{}{x} {y}", if at == 0 { 'M' } else { 'L' });
        }
        self.write(format_args!("<path{} d=\"{d}\"/>", class(style.color())))
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, (x, y): BackendCoord) -> Drawn {
        let anchor = match style.anchor().h_pos {
            HPos::Left => "start",
            HPos::Center => "middle",
            HPos::Right => "end",
        };
        let dy = match style.anchor().v_pos {
            VPos::Top => ".8em",
            VPos::Center => ".35em",
            VPos::Bottom => "0",
        };
        let (class, text) = (class(style.color()), escape(text));
        self.write(format_args!(
            "<text{class} x=\"{x}\" y=\"{y}\" dy=\"{dy}\" text-anchor=\"{anchor}\">{text}</text>"
        ))
    }
}
