//! Whole texts against files. With `PORTCULLIS_WRITE_TABLES=1` the tests write them: read each line that differs.

// For crates without it.
extern crate std;

use std::borrow::ToOwned;
use std::format;
use std::path::Path;
use std::string::String;

/// Compares `text` with the file.
#[track_caller]
pub fn is_golden(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    if std::env::var_os("PORTCULLIS_WRITE_TABLES").is_some() {
        return std::fs::write(path, text).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap_or_default();
    assert!(golden == text, "{}", difference(path, &golden, text));
}

/// What is said of a file that differs.
pub fn difference(path: &Path, golden: &str, text: &str) -> String {
    let lines = golden.lines().chain([""]).zip(text.lines().chain([""])).enumerate();
    let differs = lines.map(|(at, (was, is))| (at + 1, was, is)).find(|(_, was, is)| was != is);
    let first = differs.map_or("blank lines at the end".to_owned(), |(at, was, is)| {
        format!("line {at}\nwas: {was}\nis:  {is}")
    });
    format!(
        "{} differs, first in {first}\n`PORTCULLIS_WRITE_TABLES=1` before the same command writes the file.",
        path.display()
    )
}
