//! What `portcullis doctor` shows to people: the machine in a few lines, then each finding, and what was not seen.
//!
//! All text that files gave is escaped here, once, before its lines are broken.

use portcullis_trace::Printable;

use super::about;
use super::facts::Facts;
use super::finding::{Finding, Severity, Step};
use crate::look::{self, BAD, BOLD};

/// Lines of at most `columns`.
pub struct Page {
    text: String,
    columns: usize,
}

/// All of it.
pub fn text(facts: &Facts, findings: &[Finding], columns: usize) -> String {
    let mut page = Page { text: String::new(), columns };
    for (name, said) in about::lines(facts) {
        page.line(0, &format!("{name}: {said}"), "  ");
    }
    page.text.push('\n');
    let told = summary(findings, facts.has_all());
    page.styled(
        &told,
        if findings.iter().any(|finding| finding.severity == Severity::Critical) { BAD } else { BOLD },
    );
    for finding in findings {
        page.finding(finding);
    }
    if !facts.unseen.is_empty() {
        page.text.push('\n');
        page.line(0, "Not seen:", "");
        for unseen in &facts.unseen {
            page.line(0, &format!("- {}: {}.", unseen.what, unseen.why), "  ");
        }
        if facts.unseen.iter().any(|unseen| unseen.why.contains("root")) {
            page.line(0, "As root it sees these, too:", "");
            page.command(2, "sudo portcullis doctor");
        }
    }
    page.text
}

/// `2 findings: 1 critical, 1 notice.`
fn summary(findings: &[Finding], sees_all: bool) -> String {
    if findings.is_empty() {
        let said = if sees_all {
            "Nothing wrong was found."
        } else {
            "Nothing wrong was found in what was collected."
        };
        return said.into();
    }
    let of = |severity: Severity| {
        let count = findings.iter().filter(|finding| finding.severity == severity).count() as u64;
        let name = severity.name();
        match (count, severity) {
            (0, _) => None,
            (_, Severity::Critical) => Some(format!("{count} critical")),
            _ => Some(look::number_of(count, name)),
        }
    };
    let all = [Severity::Critical, Severity::Warning, Severity::Notice].into_iter().filter_map(of);
    format!("{}: {}.", look::number_of(findings.len() as u64, "finding"), all.collect::<Vec<_>>().join(", "))
}

impl Page {
    /// A paragraph, all lines behind `margin` blanks, and those after the first behind `indent`.
    fn line(&mut self, margin: usize, text: &str, indent: &str) {
        let text = look::wrap_at(&Printable(text).to_string(), indent, self.columns.saturating_sub(margin));
        for line in text.lines() {
            self.text.push_str(&format!("{:margin$}{line}\n", ""));
        }
    }

    fn styled(&mut self, text: &str, style: anstyle::Style) {
        let text = look::wrap_at(&Printable(text).to_string(), "  ", self.columns);
        self.text.push_str(&format!("{style}{}{style:#}\n", text.trim_end()));
    }

    fn finding(&mut self, finding: &Finding) {
        let mut what = finding.what.clone();
        if let Some(first) = what.get(..1) {
            let upper = first.to_ascii_uppercase();
            let is_name =
                what.split([' ', ',']).next().is_some_and(|word| word.contains(['.', '_', ':', '=']));
            if !is_name {
                what.replace_range(..1, &upper);
            }
        }
        self.text.push('\n');
        let style = if finding.severity == Severity::Critical { BAD } else { BOLD };
        self.styled(&format!("{}: {what}.", finding.severity.name().to_uppercase()), style);
        self.line(2, &format!("It means: {}.", finding.means), "  ");
        self.line(2, &format!("It costs: {}.", finding.costs), "  ");
        if !finding.next.is_empty() {
            self.line(2, "Next:", "");
        }
        for Step { say, commands } in &finding.next {
            let end = if commands.is_empty() { "." } else { ":" };
            self.line(2, &format!("- {say}{end}"), "  ");
            commands.iter().for_each(|command| self.command(6, command));
        }
    }

    /// A command, which a shell takes as it stands: lines end with a backslash where they are broken.
    fn command(&mut self, margin: usize, command: &str) {
        let command = Printable(command).to_string();
        let (mut column, mut quote) = (margin, None);
        self.text.push_str(&" ".repeat(margin));
        for (at, word) in command.split(' ').enumerate() {
            let width = word.chars().count();
            // Inside of single quotes a backslash is one.
            if at > 0 && column + 1 + width + 2 > self.columns && quote.is_none() {
                self.text.push_str(&format!(" \\\n{:1$}", "", margin + 2));
                column = margin + 2;
            } else if at > 0 {
                self.text.push(' ');
                column += 1;
            }
            self.text.push_str(word);
            column += width;
            quote = word.chars().fold(quote, |quote, c| match (quote, c) {
                (None, '\'' | '"') => Some(c),
                (Some(open), c) if open == c => None,
                (quote, _) => quote,
            });
        }
        self.text.push('\n');
    }
}
