//! Whole texts against files. With `PORTCULLIS_WRITE_TABLES=1` the tests write them: read each line that differs.

use std::path::Path;

/// Compares `text` with the file.
#[track_caller]
pub fn is_golden(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    if std::env::var_os("PORTCULLIS_WRITE_TABLES").is_some() {
        return std::fs::write(path, text).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap_or_default();
    let lines = golden.lines().chain([""]).zip(text.lines().chain([""])).enumerate();
    let differs = lines.map(|(at, lines)| (at + 1, lines)).find(|(_, (golden, text))| golden != text);
    assert!(golden == text, "{}, the first line that differs: {differs:#?}", path.display());
}
