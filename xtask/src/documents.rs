//! What the documents name is there: files, places in other documents, crates, examples, tests, commands. What they say
//! of the command `portcullis` is tested where its options are parsed, in `portcullis-cli`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::codes::{Document, documents};
use crate::{borrowed, changed, coherence, guest, nightly, root};

/// What `wrong` finds in any document, each with the document's name.
fn all_wrong(wrong: impl Fn(&Document) -> Vec<String>) -> Vec<String> {
    let told = |document: &Document| {
        wrong(document).into_iter().map(|what| format!("{}: {what}", document.name)).collect::<Vec<_>>()
    };
    documents(&root()).iter().flat_map(told).collect()
}

/// Folders that paths may begin in. In sentences about the core they begin in its source.
fn folders() -> Vec<PathBuf> {
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|folder| folder.unwrap().path());
    let others = ["", "crates/portcullis/src"].map(|folder| root().join(folder));
    crates.chain(others).collect()
}

/// Whether a piece of code is the path of a file or a folder of the repository.
fn is_path(code: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
    let ends = [".rs", ".toml", ".md"].iter().any(|end| code.ends_with(end));
    code.bytes().all(plain) && !code.starts_with('/') && (ends || code.contains('/'))
}

fn is_there(path: &str) -> bool {
    folders().iter().any(|folder| folder.join(path).exists() || folder.join(format!("{path}.rs")).is_file())
}

/// Paths that lead nowhere.
fn paths(document: &Document) -> Vec<String> {
    // The form of a test's name, in security.md, which is explained by it.
    let pieces = document.pieces.iter().filter(|code| is_path(code) && *code != "a/b.rs");
    pieces.filter(|path| !is_there(path)).cloned().collect()
}

/// Names in rows of a table that are in code between bars, before the file that must have a definition of them; and which file has none.
fn undefined(text: &str) -> Vec<String> {
    let rows = text.lines().skip_while(|line| *line != "| what | name | file |").skip(2);
    let mut undefined = Vec::new();
    for row in rows.take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, names, file] = cells[..] else { panic!("{row}") };
        let file = file.trim_matches('`');
        let source = std::fs::read_to_string(root().join(file)).unwrap_or_default();
        let is_defined = |name: &str| {
            let kinds = ["const ", "struct ", "enum ", "fn ", "pub "];
            let ends = |rest: &str| rest.starts_with([':', '(', '<', ' ']);
            kinds.iter().any(|kind| source.split(&format!("{kind}{name}")).skip(1).any(ends))
        };
        let lacking = names.split(", ").map(|name| name.trim_matches('`')).filter(|name| !is_defined(name));
        undefined.extend(lacking.map(|name| format!("{name} in {file}")));
    }
    undefined
}

/// How a page calls the place of a heading.
fn anchor(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
    heading.trim_matches(['#', ' ']).to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

/// Links to files and headings that there are not.
fn links(document: &Document) -> Vec<String> {
    let here = root().join(&document.name);
    let text = std::fs::read_to_string(&here).unwrap();
    let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let leads_nowhere = |link: &&str| {
        let (file, place) = link.split_once('#').unwrap_or((link, ""));
        let file = if file.is_empty() { here.clone() } else { here.parent().unwrap().join(file) };
        let is_place = |text: String| text.lines().any(|line| line.starts_with('#') && anchor(line) == place);
        !(file.exists() && (place.is_empty() || std::fs::read_to_string(file).is_ok_and(is_place)))
    };
    links.filter(|link| !link.starts_with("https://")).filter(leads_nowhere).map(str::to_owned).collect()
}

/// The word behind `option`.
fn after<'a>(words: &[&'a str], option: &str) -> Option<&'a str> {
    words.iter().skip_while(|word| **word != option).nth(1).copied()
}

/// What is wrong with a command of Cargo.
fn wrong_with(words: &[&str]) -> Option<String> {
    let words = words.split(|word| *word == "--").next()?;
    let package = after(words, "-p").unwrap_or("portcullis-cli");
    let of_tests = package.strip_prefix("portcullis-").map(|name| root().join("tests").join(name));
    let folder = of_tests.filter(|folder| folder.is_dir());
    let folder = folder.unwrap_or_else(|| root().join("crates").join(package));
    let file = |kind: &str, name: &str| {
        let place = folder.join(kind).join(name);
        place.with_extension("rs").is_file() || place.join("main.rs").is_file()
    };
    let is_right = match words[1..] {
        ["xtask", "coherence", ref rest @ ..] => coherence::is_request(rest),
        ["xtask", "guest", ref rest @ ..] => guest::is_request(rest),
        ["xtask", "c-library", ref rest @ ..] => rest.len() <= 1,
        ["xtask", "limited", ref rest @ ..] => return wrong_with(&[&["cargo"], rest].concat()),
        ["xtask", "test", "--quick"] | ["xtask", "test", "--quick", changed::LIST] => true,
        ["xtask", "test", "--changed", ref rest @ ..] => changed::request(rest).is_some(),
        ["xtask", ref rest @ ..] => {
            matches!(rest, ["test" | "nightly" | "conformance" | "check" | "picture"])
        }
        ["fuzz" | "+nightly", ..] => {
            words.contains(&"api") && root().join("fuzz/fuzz_targets/api.rs").is_file()
        }
        _ => {
            let example = after(words, "--example").is_none_or(|name| file("examples", name));
            // A test may be named several times.
            let named = words.windows(2).filter(|pair| pair[0] == "--test");
            let source = after(words, "--file").is_none_or(|path| root().join(path).is_file());
            folder.is_dir() && example && source && { named }.all(|pair| file("tests", pair[1]))
        }
    };
    (!is_right).then(|| words.join(" "))
}

fn commands(document: &Document) -> Vec<String> {
    document.commands("cargo").filter_map(|words| wrong_with(&words)).collect()
}

/// Blocks of code that rustdoc would not compile and run, and are of no other language.
fn blocks(document: &Document) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(&document.name)).unwrap();
    let include = format!("include_str!(\"../../../{}\")", document.name);
    let includes = |folder: &PathBuf| {
        std::fs::read_to_string(folder.join("src/lib.rs")).is_ok_and(|text| text.contains(&include))
    };
    let missing =
        (!folders().iter().any(includes)).then(|| "no crate includes it for its doctests".to_owned());
    missing.into_iter().chain(not_compiled(&text)).collect()
}

/// Blocks of `text` that say no language, or one with conditions (`rust,ignore`), or that are code by their indent alone.
fn not_compiled(text: &str) -> Vec<String> {
    let mut fenced = false;
    let wrong = |line: &&str| match line.trim_start().strip_prefix("```") {
        Some(language) => {
            fenced = !fenced;
            fenced && !["rust", "sh", "text"].contains(&language)
        }
        None => !fenced && line.starts_with("    "),
    };
    text.lines().filter(wrong).map(str::to_owned).collect()
}

/// Whether the test `name` is in `target`, a folder below the tests of one of the crates.
fn is_test(target: &str, name: &str) -> bool {
    nightly::CRATES.iter().any(|of| is_test_in(&root().join("crates").join(of).join("tests"), target, name))
}

fn is_test_in(tests: &Path, target: &str, name: &str) -> bool {
    let (module, function) = name.rsplit_once("::").unwrap_or(("main", name));
    let module = module.replace("::", "/");
    let text = std::fs::read_to_string(tests.join(format!("{target}/{module}.rs")));
    text.is_ok_and(|text| text.contains(&format!("fn {function}(")))
}

/// All files of Rust in `folder` and below it.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let (mut folders, mut sources) = (vec![folder.to_path_buf()], Vec::new());
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries.map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if entry.extension().is_some_and(|end| end == "rs") {
                sources.push(entry);
            }
        }
    }
    sources
}

/// Whether a file beside `file` or above it makes a module of it, or one of `paths` names it. The root of a target needs none.
fn is_compiled(tests: &Path, file: &Path, paths: &[String]) -> bool {
    let is_main = |path: &Path| ["main", "mod"].iter().any(|name| path.file_stem().unwrap() == *name);
    let folder = file.parent().unwrap();
    let is_root = folder == tests || (file.ends_with("main.rs") && folder.parent() == Some(tests));
    // Attributes name files from where they stand: `../rig/mod.rs`.
    let named = |path: &String| file.ends_with(path.trim_start_matches("../"));
    let (module, folder) = if is_main(file) { (folder, folder.parent().unwrap()) } else { (file, folder) };
    let module = format!("mod {};", module.file_stem().unwrap().to_str().unwrap());
    let mut parents = vec![folder.join("main.rs"), folder.join("mod.rs"), folder.with_extension("rs")];
    if folder == tests {
        // Each file beside it is a root.
        parents.extend(std::fs::read_dir(tests).unwrap().map(|entry| entry.unwrap().path()));
    }
    let holds = |parent: &PathBuf| {
        let text = std::fs::read_to_string(parent).unwrap_or_default();
        text.lines().any(|line| line.trim().trim_start_matches("pub ") == module)
    };
    is_root || paths.iter().any(named) || parents.iter().any(holds)
}

/// Cargo passes over a file that no module names, and its tests with it.
#[test]
fn every_file_of_tests_is_compiled() {
    let crates = root().join("crates");
    let all = sources(&crates);
    let text: String = all.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    // By an attribute, or by a test that has the compiler make a library of it.
    let named = ["#[path = \"", ".join(\"tests/"].iter().flat_map(|before| text.split(before).skip(1));
    let paths = named.filter_map(|rest| rest.split('"').next()).filter(|path| path.ends_with(".rs"));
    let paths: Vec<String> = paths.map(str::to_owned).collect();
    let tests_of =
        |file: &PathBuf| file.ancestors().find(|above| above.ends_with("tests")).map(Path::to_owned);
    let of_tests: Vec<_> = all.iter().filter_map(|file| Some((tests_of(file)?, file))).collect();
    assert!(of_tests.len() > 200, "{} files", of_tests.len());
    let left_out = of_tests.into_iter().filter(|(tests, file)| !is_compiled(tests, file, &paths));
    let left_out: Vec<_> = left_out.map(|(_, file)| file).collect();
    assert!(left_out.is_empty(), "{left_out:?}");
    let tests = crates.join("portcullis/tests");
    assert!(is_compiled(&tests, &tests.join("dma/kept.rs"), &paths));
    assert!(!is_compiled(&tests, &tests.join("dma/nothing.rs"), &paths));
}

/// Whoever takes what the README's table names has its crate.
#[test]
fn crates_that_the_readme_names_by_path_can_be_added() {
    let documents = documents(&root());
    let readme = documents.iter().find(|document| document.name == "README.md").unwrap();
    let named = readme.pieces.iter().filter_map(|code| Some(code.split_once("::")?.0));
    let named: BTreeSet<String> =
        named.filter(|name| name.starts_with("portcullis_")).map(|name| name.replace('_', "-")).collect();
    let added: Vec<_> = readme
        .commands("cargo")
        .filter(|words| words.get(1) == Some(&"add"))
        .filter_map(|words| words.last()?.rsplit('/').next().map(str::to_owned))
        .collect();
    assert!(!named.is_empty());
    let missing: Vec<_> = named.iter().filter(|name| !added.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?} and {added:?}");
}

/// Where a manifest lists its tests, Cargo passes over a program that is in no list.
#[test]
fn every_program_of_tests_is_in_a_list() {
    let manifest = |folder: &Path| std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let elsewhere = manifest(&root().join("tests/unoptimised"));
    let (mut found, mut left_out) = (0, Vec::new());
    for folder in std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path()) {
        let own = manifest(&folder);
        if !own.contains("\nautotests = false\n") {
            continue;
        }
        for entry in std::fs::read_dir(folder.join("tests")).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() && !entry.join("main.rs").is_file() {
                continue;
            }
            found += 1;
            let line = format!("[[test]]\nname = {:?}\n", entry.file_stem().unwrap());
            left_out.extend((!own.contains(&line) && !elsewhere.contains(&line)).then_some(entry));
        }
    }
    assert!(found > 10, "{found} programs");
    assert!(left_out.is_empty(), "{left_out:?}");
}

#[test]
fn every_path_leads_to_something() {
    assert_eq!(all_wrong(paths), [""; 0]);
}

/// What the embedder signs, in security.md, is all that there is to sign.
#[test]
fn every_unsafe_trait_is_in_the_list_of_contracts() {
    let core = root().join("crates/portcullis/src");
    let (mut folders, mut traits) = (vec![core], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
                continue;
            }
            let text = std::fs::read_to_string(entry).unwrap();
            let named = text.split("\npub unsafe trait ").skip(1);
            traits.extend(named.filter_map(|rest| rest.split([':', ' ', '<']).next().map(str::to_owned)));
        }
    }
    assert!(traits.len() > 5, "{traits:?}");
    let page = std::fs::read_to_string(root().join("docs/security.md")).unwrap();
    traits.retain(|name| !page.contains(&format!("\n| `{name}` |")));
    assert_eq!(traits, [""; 0]);
}

#[test]
fn what_contributing_says_is_decided_in_a_file_is_defined_there() {
    let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    assert!(text.contains("\n| what | name | file |\n"));
    assert_eq!(undefined(&text), [""; 0]);
    let made = "| what | name | file |\n| --- | --- | --- |\n| a | `ROWS`, `ROW` | `xtask/src/changed.rs` |\n| b | `x` | `no/file.rs` |\n";
    assert_eq!(undefined(made), ["ROW in xtask/src/changed.rs", "x in no/file.rs"]);
}

#[test]
fn every_link_leads_to_something() {
    assert_eq!(all_wrong(links), [""; 0]);
}

#[test]
fn every_command_of_cargo_names_what_is_there() {
    let named: usize = documents(&root()).iter().map(|document| document.commands("cargo").count()).sum();
    assert!(named > 30, "{named} commands are named");
    assert_eq!(all_wrong(commands), [""; 0]);
}

#[test]
fn every_block_of_code_is_compiled() {
    assert_eq!(all_wrong(blocks), [""; 0]);
}

/// The rows of the table "what you want", in a README or in a crate's documentation: each with what to take, links left out.
fn what_to_take(text: &str) -> Vec<[String; 2]> {
    let lines = text.lines().map(|line| line.trim_start_matches("//! "));
    let rows =
        lines.skip_while(|line| !line.starts_with("| you want |")).take_while(|line| line.starts_with('|'));
    let plain = |cell: &str| {
        let link = |part: &str| part.split_once(')').map_or(part.to_owned(), |(_, rest)| rest.to_owned());
        let mut parts = cell.split("](");
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| text + &link(part)).replace(['[', ']'], "").trim().to_owned()
    };
    rows.map(|row| {
        let mut cells = row.split('|').skip(1).map(plain);
        [(); 2].map(|()| cells.next().unwrap())
    })
    .collect()
}

#[test]
fn the_front_page_of_the_core_has_the_readme_s_table() {
    let [readme, page] = ["README.md", "crates/portcullis/src/lib.rs"]
        .map(|path| what_to_take(&std::fs::read_to_string(root().join(path)).unwrap()));
    assert!(readme.len() > 10, "{readme:?}");
    assert_eq!(readme, page);
}

/// Sizes that a sentence shows as hexadecimal numbers.
fn hexadecimal_sizes(text: &str) -> Vec<String> {
    const SIZES: [&str; 10] =
        ["bytes", "len", "size", "free", "used", "held", "kept", "wanted", "capacity", "granule"];
    let mut pieces = text.split(":#x}").peekable();
    let mut found = Vec::new();
    while let (Some(piece), Some(rest)) = (pieces.next(), pieces.peek()) {
        let name = piece.rsplit('{').next().unwrap();
        if rest.starts_with(" bytes") || SIZES.iter().any(|size| name.ends_with(size)) {
            found.push(name.to_owned());
        }
    }
    found
}

/// Addresses are hexadecimal in what a user reads, and sizes are decimal.
#[test]
fn no_size_is_said_in_hexadecimal() {
    assert_eq!(hexadecimal_sizes("{len:#x} at {at:#x}, {:#x} bytes of {a.kept:#x}"), ["len", "", "a.kept"]);
    let mut said = 0;
    for name in ["", "-hw", "-linux", "-c", "-cli", "-model", "-trace"] {
        for file in sources(&root().join(format!("crates/portcullis{name}/src"))) {
            if file.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b"tests")) {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let text = text.split("\nmod tests").next().unwrap();
            said += text.matches("#[error(").count();
            assert_eq!(hexadecimal_sizes(text), [""; 0], "{}", file.display());
        }
    }
    assert!(said > 100, "{said} sentences");
}

#[test]
fn every_test_that_runs_on_nightly_exists() {
    let missing = |tool: &nightly::Tool| {
        let of = |(target, tests): &(&str, &[&str])| {
            let missing = tests.iter().filter(|name| !is_test(target, name));
            missing.map(|name| format!("{target}: {name}")).collect::<Vec<_>>()
        };
        tool.tests().iter().flat_map(of).collect::<Vec<_>>()
    };
    assert_eq!(nightly::TOOLS.iter().flat_map(missing).collect::<Vec<_>>(), [""; 0]);
}

/// Tests that need what a variable names are left out of the others, and each has a step of its own.
#[test]
fn every_test_that_needs_a_variable_has_its_step() {
    let mut found = 0;
    for folder in std::fs::read_dir(root().join("crates")).unwrap() {
        let tests = folder.unwrap().path().join("tests");
        for file in sources(&tests) {
            let text = std::fs::read_to_string(&file).unwrap();
            // The first folder is the target, and what follows is the module.
            let place = file.strip_prefix(&tests).unwrap().with_extension("");
            let place = place.to_str().unwrap().replace('/', "::");
            let lines: Vec<_> = text.lines().collect();
            for pair in lines.windows(2) {
                if !(pair[0].starts_with("#[ignore =") && pair[0].contains("PORTCULLIS_")) {
                    continue;
                }
                let variable = pair[0].split([' ', '=', '"']).find(|word| word.starts_with("PORTCULLIS_"));
                let function = pair[1].trim_start_matches("fn ").split('(').next().unwrap();
                let name = format!("{place}::{function}");
                let has = |one: &borrowed::Borrowed| {
                    let (target, test) = (after(one.arguments, "--test"), after(one.arguments, "--exact"));
                    let full = target.zip(test).map(|(target, test)| format!("{target}::{test}"));
                    Some(one.variable) == variable && full.as_deref() == Some(&*name)
                };
                assert!(borrowed::ALL.iter().any(has), "{name}: {}", pair[0]);
                found += 1;
            }
        }
    }
    assert_eq!(found, borrowed::ALL.len());
}

/// CONTRIBUTING shows how the tests end where there is no nightly Rust.
#[test]
fn it_is_said_how_many_tests_are_skipped() {
    let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let of_tools = nightly::TOOLS.iter().map(|tool| (tool.what, tool.count()));
    let counts = of_tools.chain([(coherence::WHAT, coherence::BOUNDS.len())]);
    let mut all = borrowed::ALL.len();
    for (what, count) in counts {
        all += count;
        let line = format!("skipped: {what}, {count} tests: rustup has no nightly Rust\n");
        assert!(text.contains(&line), "{line}");
    }
    assert!(text.contains(&format!(" steps done, {all} tests skipped\n")), "{all}");
}

#[test]
fn what_is_wrong_is_found() {
    assert!(
        is_path("iova/links.rs") && is_path("Cargo.toml") && !is_path("/tmp/mine.trace") && !is_path("a::b")
    );
    assert!(is_there("iova/links.rs") && is_there("bounce/pool") && !is_there("iova/tree.rs"));
    assert_eq!(anchor("## How to *read* `it`, today"), "how-to-read-it-today");
    let wrong = |command: &str| wrong_with(&command.split(' ').collect::<Vec<_>>()).is_some();
    assert!(!wrong("cargo test --release -p portcullis --test bounce --test dma integrity"));
    assert!(wrong("cargo test --release -p portcullis --test bounce --test nothing integrity"));
    assert!(!wrong("cargo run --release -p portcullis-model --example placement"));
    assert!(wrong("cargo run -p portcullis-model --example nothing") && wrong("cargo run -p nothing"));
    assert!(!wrong("cargo xtask coherence raw-1 --cpus 16") && wrong("cargo xtask coherence --cpu 16"));
    assert!(!wrong("cargo xtask guest --iommu vtd --job edu") && wrong("cargo xtask guest --job nothing"));
    assert!(!wrong("cargo xtask c-library /usr/local") && wrong("cargo xtask c-library a b"));
    assert!(!wrong("cargo xtask test --changed main") && wrong("cargo xtask test --slow"));
    assert!(!wrong("cargo xtask check") && wrong("cargo xtask checks"));
    assert!(!wrong("cargo xtask limited test -p portcullis") && wrong("cargo xtask limited test -p nothing"));
    assert_eq!(not_compiled("```rust\nlet a = 1;\n```\n```text\n    a\n```\n"), [""; 0]);
    assert_eq!(
        not_compiled("```rust,ignore\n```\n```\nlet a\n```\n\n    let a\n"),
        ["```rust,ignore", "```", "    let a"]
    );
    assert!(is_test("pgtable", "engine::near::no_table_is_remembered_once_it_was_reclaimed"));
    assert!(!is_test("pgtable", "engine::near::nothing"));
}
