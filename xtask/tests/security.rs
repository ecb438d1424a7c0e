//! Every promise of `docs/security.md` names tests that exist.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn page() -> String {
    std::fs::read_to_string(root().join("docs/security.md")).unwrap()
}

/// The tests that `text` names: code of the form `a::b::c`, all in small letters.
fn named(text: &str) -> Vec<&str> {
    let small = |part: &str| {
        let letters = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        !part.is_empty() && part.bytes().all(letters)
    };
    let is_test = |code: &&str| code.contains("::") && code.split("::").all(small);
    // Between two backticks is every other piece. The one that explains the form is no test.
    text.split('`').skip(1).step_by(2).filter(is_test).filter(|code| *code != "a::b::c").collect()
}

/// Whether a function that is a test has this name in its file.
fn exists(test: &str) -> bool {
    let Some((place, name)) = test.rsplit_once("::") else { return false };
    let crates = [("linux::", "portcullis-linux"), ("hw::", "portcullis-hw")];
    let other = crates.iter().find_map(|(prefix, of)| Some((*of, place.strip_prefix(prefix)?)));
    let (of, place) = other.unwrap_or(("portcullis", place));
    let place = root().join("crates").join(of).join("tests").join(place.replace("::", "/"));
    let files = [place.with_extension("rs"), place.join("main.rs")];
    let text: String = files.iter().filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    let function = format!("fn {name}(");
    // Between the attribute and the function stand other attributes and comments only.
    let follows = |after: &str| {
        let lines = after.lines().skip(1).map(str::trim);
        let mut code = lines.skip_while(|line| line.starts_with("//") || line.starts_with("#["));
        code.next().is_some_and(|line| line.starts_with(&function))
    };
    text.split("#[test]").skip(1).any(follows)
}

#[test]
fn every_test_that_is_named_exists() {
    let page = page();
    let tests = named(&page);
    assert!(tests.len() > 50, "{} tests are named", tests.len());
    let missing: Vec<_> = tests.into_iter().filter(|test| !exists(test)).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that there are not: {missing:#?}");
}

#[test]
fn every_promise_names_a_test_and_they_are_numbered() {
    let page = page();
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    let rows: Vec<Vec<String>> = page.lines().filter(|line| line.starts_with('|')).map(cells).collect();
    let promises = rows.iter().filter_map(|row| Some((row.first()?.parse::<usize>().ok()?, row)));
    let mut count = 0;
    for (expected, (number, row)) in (1..).zip(promises) {
        assert_eq!(number, expected, "{row:?}");
        assert!(row.len() == 4 && row.iter().all(|cell| !cell.is_empty()), "{row:?}");
        assert!(!named(&row[3]).is_empty(), "no test holds promise {number}");
        count = number;
    }
    assert!(count >= 26, "{count} promises");
}

#[test]
fn what_is_not_a_test_is_not_taken_for_one() {
    assert_eq!(named("`kept::that` and `Domain::flush`, `a::b::c`"), ["kept::that"]);
    assert!(exists("std_platform::protection::strict_unmapped_means_unreachable"));
    assert!(
        exists("linux::below::registration::registrations") && !exists("below::registration::registrations")
    );
    // A helper, nothing at all, and no file.
    assert!(
        !exists("dma::mishaps::watched") && !exists("dma::mishaps::nothing") && !exists("nowhere::nothing")
    );
}
