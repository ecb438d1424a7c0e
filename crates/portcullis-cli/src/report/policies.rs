//! The table of policies: what each is and what Linux calls it, what it costs, and what it leaves open, the least first.

use std::fmt::Write;

use clap::ValueEnum;
use portcullis_model::scale::Policy;
use portcullis_trace::replay::{Mode, PolicyReport};

use super::html::{escape, sentence};
use crate::args::PolicyName;
use crate::exposed::Exposed;
use crate::on_linux::{self, OwnStrict};

/// What devices reach under a policy, besides buffers that are mapped for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Open {
    Nothing,
    OtherData,
    FreedMemory,
    AllMemory,
}

impl Open {
    const ALL: [Self; 4] = [Self::Nothing, Self::OtherData, Self::FreedMemory, Self::AllMemory];

    /// As a replay counted it, of a recording that tells which bytes are buffers, if they are `known`.
    pub fn counted(policy: &PolicyReport, known: bool) -> Self {
        let is_none = |exposed| matches!(exposed, Exposed::Sum(open) if open <= 0.0);
        match Exposed::of(policy, known) {
            [Exposed::All, _] => Self::AllMemory,
            [freed, _] if !is_none(freed) => Self::FreedMemory,
            [_, other] if !is_none(other) => Self::OtherData,
            _ => Self::Nothing,
        }
    }

    /// As the policy of this name is made.
    pub fn made(name: &str) -> Self {
        match Mode::named(name) {
            Some(Mode::Swiotlb | Mode::PASSTHROUGH) => Self::AllMemory,
            Some(mode) if mode.protects_bytes() => Self::Nothing,
            Some(mode) if mode.is_strict() => Self::OtherData,
            None if Policy::named(name).is_some_and(|policy| policy.strict) => Self::OtherData,
            _ => Self::FreedMemory,
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Nothing => "Nothing is open",
            Self::OtherData => "Open: other data in the pages of buffers that are mapped",
            Self::FreedMemory => "Open: memory that the driver has back",
            Self::AllMemory => "Open: all memory",
        }
    }

    /// Its colour. Red is what devices reach after the driver has its buffer back.
    fn class(self) -> &'static str {
        match self {
            Self::Nothing => "closed",
            Self::OtherData => "partly",
            Self::FreedMemory | Self::AllMemory => "open",
        }
    }

    /// The class of a policy's line: the colour says what it leaves open, and dashes tell it from others of that colour.
    pub fn of_line(self, policy: &str, number: usize) -> String {
        match Mode::named(policy) {
            Some(_) => format!("{} of-{policy}", self.class()),
            None => format!("{} old-{}", self.class(), number % 4),
        }
    }
}

pub struct Cell {
    pub text: String,
    /// The length of the bar below it, from 0 to 1.
    pub bar: Option<f64>,
    /// It says what is open.
    pub is_open: bool,
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, bar: None, is_open: false }
    }
}

pub struct Row {
    pub policy: String,
    /// What it is, in one sentence, and Linux's name for it.
    pub about: String,
    pub open: Open,
    /// Among policies that leave the same open, what costs less comes first.
    pub cost: f64,
    pub cells: Vec<Cell>,
}

/// A row for each policy, with the one in bold that is to be chosen.
pub fn table(caption: &str, head: &[String], mut rows: Vec<Row>, choice: Option<&str>) -> String {
    rows.sort_by(|a, b| a.open.cmp(&b.open).then(a.cost.total_cmp(&b.cost)));
    let mut html = format!(
        "<table class=\"policies\"><caption>{}</caption>\n<thead><tr><th scope=\"col\">policy</th>",
        escape(caption)
    );
    // Writing to a string cannot fail.
    for name in head {
        let _ = write!(html, "<th scope=\"col\">{}</th>", escape(name));
    }
    html += "</tr></thead>\n";
    for open in Open::ALL {
        let mut of = rows.iter().filter(|row| row.open == open).peekable();
        if of.peek().is_none() {
            continue;
        }
        let _ = writeln!(
            html,
            "<tbody class=\"{}\"><tr class=\"group\"><th scope=\"rowgroup\" colspan=\"{}\">{}</th></tr>",
            open.class(),
            head.len() + 1,
            escape(open.title())
        );
        for row in of {
            let is_chosen = choice == Some(&*row.policy);
            html += if is_chosen { "<tr class=\"chosen\">" } else { "<tr>" };
            let _ = write!(html, "<th scope=\"row\">{}", escape(&row.policy));
            html += if is_chosen { " <i>the choice</i></th>" } else { "</th>" };
            for (name, cell) in head.iter().zip(&row.cells) {
                let bar = cell.bar.filter(|bar| bar.is_finite()).map(|bar| bar.clamp(0.0, 1.0) * 100.0);
                let style = bar.map_or(String::new(), |bar| format!(" style=\"--bar:{bar:.1}%\""));
                let class = if cell.is_open { " class=\"is-open\"" } else { "" };
                let _ = write!(
                    html,
                    "<td data-of=\"{}\"{class}{style}>{}</td>",
                    escape(name),
                    escape(&cell.text)
                );
            }
            let columns = head.len() + 1;
            let _ = writeln!(
                html,
                "</tr>\n<tr class=\"about\"><td colspan=\"{columns}\">{}</td></tr>",
                sentence(&row.about).trim_end()
            );
        }
        html += "</tbody>\n";
    }
    html + "</table>\n"
}

/// What a policy is, in one sentence, and Linux's name for it.
pub fn about(policy: &str) -> String {
    let Some(mode) = Mode::named(policy) else {
        return OwnStrict::named(policy).map_or_else(
            || "A design of the past: docs/scaling.md.".into(),
            |own| format!("Linux's own strict mode: {}. See docs/scaling.md.", own.differs),
        );
    };
    let named = PolicyName::value_variants().iter().find(|name| name.mode() == mode);
    let help = named
        .and_then(PolicyName::to_possible_value)
        .and_then(|value| value.get_help().map(ToString::to_string));
    format!("{}. Linux: {}.", help.unwrap_or_default(), on_linux::name(mode))
}
