//! `portcullis doctor` finds faults of DMA protection on a machine. It says what each one means, and which command comes next.
//!
//! It reads files only, and changes nothing: first all [facts], each parser by itself, then findings from them ([checks]), then
//! [text] or JSON. Files may say anything. Reads are bounded, and a look takes as long as the files are many.

mod about;
pub mod args;
mod checks;
mod devices;
mod facts;
mod faults;
mod finding;
mod firmware;
mod kernel;
mod log;
mod memory;
mod modes;
mod parameters;
#[cfg(all(test, target_os = "linux"))]
#[path = "../../tests/doctor/mod.rs"]
mod tests;
mod text;
mod tree;
mod units;
mod vfio;

#[cfg(target_os = "linux")]
pub use units::{Kind, kinds};

use std::error::Error;
use std::process::ExitCode;

use self::args::{COULD_NOT, Doctor};

/// What it ends with where there is a finding that is more than a notice.
const FOUND: u8 = 1;

/// Looks, and tells.
pub fn run(asked: &Doctor) -> Result<ExitCode, Box<dyn Error>> {
    let root = asked.root.as_deref().unwrap_or(std::path::Path::new("/"));
    let tree = match tree::Tree::new(root) {
        Ok(tree) => tree,
        Err(error) => {
            let archive = if root.is_file() {
                "; --root takes a folder, into which `tar -xzf FILE -C FOLDER` puts the archive that docs/doctor.md collects"
            } else {
                ""
            };
            let text = format!("portcullis: cannot look below {}: {error}{archive}", root.display());
            crate::look::tell(&crate::look::wrap(&portcullis_trace::Printable(text).to_string(), "  "));
            return Ok(ExitCode::from(COULD_NOT));
        }
    };
    let is_here = asked.root.is_none();
    let seconds = std::time::Duration::from_secs(asked.seconds.into());
    let wait = || {
        if is_here {
            std::thread::sleep(seconds);
        }
    };
    let found = Found::look(&tree, is_here, (asked.seconds > 0).then_some(&wait));
    let text = if asked.json { found.json(asked)? } else { found.text(crate::look::columns()) };
    crate::print(&text)?;
    Ok(ExitCode::from(found.code()))
}

/// What a look found.
#[derive(serde::Serialize)]
struct Found {
    findings: Vec<finding::Finding>,
    facts: facts::Facts,
}

impl Found {
    fn look(tree: &tree::Tree, is_here: bool, wait: Option<&dyn Fn()>) -> Self {
        let facts = facts::Facts::read(tree, is_here, wait);
        Self { findings: checks::all(&facts, &tree.host()), facts }
    }

    fn text(&self, columns: usize) -> String {
        text::text(&self.facts, &self.findings, columns)
    }

    /// The JSON that docs/doctor.md describes.
    fn json(&self, asked: &Doctor) -> serde_json::Result<String> {
        crate::machine::document(crate::machine::schema::DOCTOR, asked, &[], self)
    }

    fn code(&self) -> u8 {
        let is_more = |finding: &finding::Finding| finding.severity < finding::Severity::Notice;
        if self.findings.iter().any(is_more) { FOUND } else { 0 }
    }
}
