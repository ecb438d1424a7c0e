//! `cargo xtask test --changed`: what a change of some files needs, and `--quick`: the tests that take no longer than a look at mail.
//!
//! CI runs everything. These two are for the minutes before: the table says which tests see a mistake in which files first. How long a step
//! took is kept below `target`, and said before it runs again; with `--list` nothing runs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use super::{limited, quietly, root};

/// Files by how their paths begin, and the test programs that see mistakes in them first. A file takes the first row that it fits.
const ROWS: [(&str, &[Tests]); 35] = [
    (
        "crates/portcullis/src/dma/queue/config.rs",
        &[
            UNITS,
            STACK,
            Tests::Package("portcullis-trace"),
            Tests::Package("portcullis-model"),
            unoptimised(&["dma", "not_coherent", "no_alloc"]),
            TEXTS,
        ],
    ),
    (
        "crates/portcullis/src/bounce/pool/config.rs",
        &[UNITS, Tests::Programs("portcullis", &["bounce"]), unoptimised(&["dma"]), TEXTS],
    ),
    (
        "crates/portcullis/src/domain/policy.rs",
        &[UNITS, unoptimised(&["domain", "dma", "registration"]), TEXTS],
    ),
    (
        "crates/portcullis/src/invalidation/flush_queue/mod.rs",
        &[UNITS, UNITS_OF_HW, STACK, unoptimised(&["domain", "dma"]), TEXTS],
    ),
    (
        "crates/portcullis/src/invalidation/gather.rs",
        &[UNITS, UNITS_OF_HW, STACK, unoptimised(&["domain", "dma"]), TEXTS],
    ),
    ("crates/portcullis-trace/src/replay/mode.rs", &[Tests::Package("portcullis-trace"), TEXTS]),
    ("crates/portcullis/src/dma/", &[UNITS, STACK, unoptimised(&["dma", "not_coherent", "no_alloc"])]),
    ("crates/portcullis/tests/dma/", &[unoptimised(&["dma"])]),
    ("crates/portcullis/examples/", &[unoptimised(&["dma"])]),
    (
        "crates/portcullis/src/bounce/",
        &[UNITS, Tests::Programs("portcullis", &["bounce"]), unoptimised(&["dma"])],
    ),
    ("crates/portcullis/src/iova/", &[UNITS, unoptimised(&["iova", "dma", "no_alloc"])]),
    ("crates/portcullis/src/pgtable/", &[UNITS, WALKER, unoptimised(&["pgtable", "dma"])]),
    ("crates/portcullis/tests/walker/", &[WALKER]),
    ("crates/portcullis/src/invalidation/", &[UNITS, UNITS_OF_HW, STACK, unoptimised(&["domain", "dma"])]),
    ("crates/portcullis/src/domain/", &[UNITS, unoptimised(&["domain", "dma", "registration"])]),
    ("crates/portcullis/src/std_platform/", &[UNITS, unoptimised(&["std_platform"])]),
    ("crates/portcullis/", &[UNITS, unoptimised(&["dma", "domain", "iova", "pgtable", "no_alloc"])]),
    (
        "crates/portcullis-hw/",
        &[
            UNITS_OF_HW,
            Tests::Package("portcullis-hw"),
            unoptimised(&["conformance", "memory", "transcripts"]),
        ],
    ),
    ("crates/portcullis-linux/", &[Tests::Package("portcullis-linux"), unoptimised(&["registration"])]),
    ("crates/portcullis-model/", &[Tests::Package("portcullis-model"), unoptimised(&["dma"])]),
    ("crates/portcullis-trace/", &[Tests::Package("portcullis-trace")]),
    ("crates/portcullis-bench/", &[UNITS_OF_BENCH, Tests::Package("portcullis-bench")]),
    ("crates/portcullis-fuzz/", &[Tests::Package("portcullis-fuzz")]),
    ("crates/portcullis-cli/", &[Tests::Package("portcullis-cli")]),
    ("crates/portcullis-c/", &[Tests::Package("portcullis-c")]),
    ("xtask/", &[Tests::Package("xtask")]),
    ("tests/stack/", &[STACK]),
    ("tests/units/", &[Tests::Package("portcullis-units")]),
    ("tests/unoptimised/", &[unoptimised(&QUICK)]),
    ("kmod/src/rules.c", &[TEXTS]),
    ("docs/", DOCUMENTS),
    ("CHANGELOG.md", DOCUMENTS),
    ("CONTRIBUTING.md", DOCUMENTS),
    ("README.md", DOCUMENTS),
    ("SECURITY.md", DOCUMENTS),
];

/// The modules' own tests of the crates whose libraries are compiled without them (`test = false`).
const UNITS: Tests = Tests::Programs("portcullis-units", &["portcullis"]);
const UNITS_OF_HW: Tests = Tests::Programs("portcullis-units", &["portcullis_hw"]);
const UNITS_OF_BENCH: Tests = Tests::Programs("portcullis-units", &["portcullis_bench"]);

/// What walks page tables as the manuals say. It names each attribute of a leaf.
const WALKER: Tests = Tests::Programs("portcullis", &["walker"]);

/// Programs of the package that compiles them without optimising.
const fn unoptimised(programs: &'static [&'static str]) -> Tests {
    Tests::Programs("portcullis-unoptimised", programs)
}

/// What looks at the stack that calls take: a kernel's is small.
const STACK: Tests = Tests::Package("portcullis-stack");

/// What looks for numbers and commands in documents.
const TEXTS: Tests = Tests::Binary("portcullis-cli", "documents");

/// What looks at the text of documents.
const DOCUMENTS: &[Tests] = &[Tests::Package("xtask"), TEXTS];

/// The commands of each row, for its files.
#[cfg(test)]
pub fn rows() -> impl Iterator<Item = (&'static str, Vec<Vec<&'static str>>)> {
    ROWS.into_iter().map(|(begin, tests)| (begin, tests.iter().map(|test| test.arguments()).collect()))
}

/// What runs for files that no row has: each of them says by itself what it is for.
const OTHERS: [(&str, &str); 6] = [
    ("kmod/", "`cargo xtask guest --kernel 6.12 --iommu vtd --job all-edu`, and `make check` in `kmod`"),
    ("tests/guest/", "`cargo xtask guest --job NAME` of the job that you changed"),
    ("tests/kernel/", "`cargo xtask conformance`"),
    ("tests/coherence/", "`cargo xtask coherence raw-1 --cpus 1,16`, or another workload"),
    ("tests/no-std/", "`cargo xtask test`"),
    ("fuzz/", "`cargo xtask test`"),
];

/// Some tests of one package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tests {
    /// All.
    Package(&'static str),
    /// Those of its binary whose names begin so.
    Binary(&'static str, &'static str),
    /// Programs.
    Programs(&'static str, &'static [&'static str]),
}

impl Tests {
    /// Cargo's arguments.
    fn arguments(self) -> Vec<&'static str> {
        let (package, programs): (_, &[&str]) = match self {
            Self::Package(package) | Self::Binary(package, _) => (package, &[]),
            Self::Programs(package, programs) => (package, programs),
        };
        let mut arguments = vec!["test", "--locked", "-p", package];
        match package {
            "portcullis-cli" => arguments.extend(["--features", "bench"]),
            "portcullis-linux" => arguments.extend(["--features", "virtio-drivers,vm-memory"]),
            _ => {}
        }
        programs.iter().for_each(|program| arguments.extend(["--test", program]));
        if let Self::Binary(_, names) = self {
            arguments.extend(["--bins", names]);
        }
        arguments
    }
}

/// The tests that `files` need, each once; what is to be run by hand for others; and the files that have neither.
fn needed<'a>(files: impl Iterator<Item = &'a str>) -> (Vec<Tests>, Vec<&'static str>, Vec<&'a str>) {
    let (mut packages, mut by_hand, mut without) = (Vec::new(), Vec::new(), Vec::new());
    let mut programs: Vec<(&str, Vec<&str>)> = Vec::new();
    for file in files {
        let row = ROWS.iter().find(|(begin, _)| file.starts_with(begin));
        for test in row.map_or(&[][..], |(_, tests)| tests) {
            match test {
                // One build, and one command, for all programs of a package.
                Tests::Programs(package, names) => {
                    let at = programs.iter().position(|(one, _)| one == package).unwrap_or_else(|| {
                        programs.push((package, Vec::new()));
                        programs.len() - 1
                    });
                    let known = &mut programs[at].1;
                    let new: Vec<_> = names.iter().filter(|name| !known.contains(*name)).copied().collect();
                    known.extend(new);
                }
                test if !packages.contains(test) => packages.push(*test),
                _ => {}
            }
        }
        let other = OTHERS.iter().find(|(begin, _)| file.starts_with(begin)).map(|(_, what)| *what);
        by_hand.extend(other.filter(|what| !by_hand.contains(what)));
        without.extend((row.is_none() && other.is_none()).then_some(file));
    }
    let programs = programs.into_iter().map(|(package, names)| Tests::Programs(package, names.leak()));
    (programs.chain(packages).collect(), by_hand, without)
}

/// Files that differ from where this branch left `revision`, and those that git does not know yet.
fn files(revision: &str) -> Result<Vec<String>, String> {
    let git = |arguments: &[&str]| {
        let said = quietly(Command::new("git").current_dir(root()).args(arguments), "git")?;
        Ok::<_, String>(said.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    let mut all = git(&["diff", "--name-only", "--merge-base", revision, "--"])?;
    all.extend(git(&["ls-files", "--others", "--exclude-standard"])?);
    Ok(all)
}

/// The revision of `--changed [REVISION] [--list]`, and whether the steps are only listed; `None` for other words.
pub fn request<'a>(arguments: &[&'a str]) -> Option<(&'a str, bool)> {
    let (revision, lists) = match *arguments {
        [] => ("HEAD", false),
        [LIST] => ("HEAD", true),
        [revision] => (revision, false),
        [revision, LIST] | [LIST, revision] => (revision, true),
        _ => return None,
    };
    (!revision.starts_with('-')).then_some((revision, lists))
}

/// Says what would run, in the place of running it.
pub const LIST: &str = "--list";

/// Runs what the difference from a revision needs.
pub fn command(arguments: &[&str]) -> Result<(), String> {
    let usage = "`--changed [REVISION] [--list]`: what differs from it (HEAD) is tested";
    let (revision, lists) = request(arguments).ok_or(usage)?;
    let files = files(revision)?;
    let (tests, by_hand, without) = needed(files.iter().map(String::as_str));
    println!("{} from {revision}", counted(files.len()));
    by_hand.iter().for_each(|what| println!("to be run besides: {what}"));
    if !without.is_empty() {
        println!("this command has no tests of {}; `cargo xtask test` runs everything", some_of(&without));
    }
    if tests.is_empty() {
        println!("nothing was run");
        return Ok(());
    }
    run(&tests.iter().map(|test| test.arguments()).collect::<Vec<_>>(), lists)?;
    if !lists {
        println!("passed; `cargo xtask check` has the lints, and `cargo xtask test` runs everything");
    }
    Ok(())
}

/// The first few of them, and how many more there are.
fn some_of(files: &[&str]) -> String {
    let (shown, others) = files.split_at(files.len().min(3));
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    shown.join(", ") + &more
}

/// How many files differ.
fn counted(files: usize) -> String {
    if files == 1 { "1 file differs".to_owned() } else { format!("{files} files differ") }
}

/// Programs of the package that compiles them without optimising, which take the least time of all.
const QUICK: [&str; 10] = [
    "dma",
    "domain",
    "iova",
    "memory",
    "no_alloc",
    "not_coherent",
    "pgtable",
    "registration",
    "std_platform",
    "transcripts",
];

/// Runs the tests that see the most in the least time, or lists them.
pub fn quick(lists: bool) -> Result<(), String> {
    run(&quick_commands(), lists)
}

fn quick_commands() -> [Vec<&'static str>; 2] {
    let packages = ["portcullis-units", "portcullis-hw", "portcullis-linux", "portcullis-model", "xtask"];
    let packages = packages.iter().flat_map(|package| ["-p", package]);
    // The core's library has no tests but as a program of `portcullis-units`.
    let units = ["test", "--locked", "--lib", "--bins", "--test", "portcullis"];
    [units.into_iter().chain(packages).collect(), unoptimised(&QUICK).arguments()]
}

fn times_file() -> PathBuf {
    root().join("target/xtask-times")
}

/// Says how long commands of Cargo took the last time, each and all, and unless it `lists` only, runs one after another.
fn run(commands: &[Vec<&str>], lists: bool) -> Result<(), String> {
    let text = std::fs::read_to_string(times_file()).unwrap_or_default();
    let mut times: BTreeMap<String, u64> = text.lines().filter_map(timed).collect();
    let name = |command: &[&str]| format!("cargo {}", command.join(" "));
    for command in commands {
        let last = times.get(&name(command));
        println!(
            "{}: {}",
            name(command),
            last.map_or("not run here yet".into(), |s| format!("{s} s the last time"))
        );
    }
    if let Some(all) = commands.iter().map(|command| times.get(&name(command))).sum::<Option<u64>>()
        && commands.len() > 1
    {
        println!("in all {all} s the last time");
    }
    if lists {
        return Ok(());
    }
    for command in commands {
        let began = Instant::now();
        limited(command)?;
        times.insert(name(command), began.elapsed().as_secs());
        let lines: String = times.iter().map(|(name, seconds)| format!("{seconds} {name}\n")).collect();
        // Where it cannot be written, the next run says nothing of times.
        let _ = std::fs::write(times_file(), lines);
    }
    Ok(())
}

/// A line of that file: seconds, and what took them.
fn timed(line: &str) -> Option<(String, u64)> {
    let (seconds, name) = line.split_once(' ')?;
    Some((name.to_owned(), seconds.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_tests_of_the_first_row_that_it_fits() {
        let of = |files: &[&'static str]| needed(files.iter().copied());
        assert_eq!(
            of(&["crates/portcullis/src/dma/ring/mod.rs"]),
            (vec![UNITS, unoptimised(&["dma", "not_coherent", "no_alloc"]), STACK], vec![], vec![])
        );
        let both = of(&[
            "crates/portcullis/src/iova/space.rs",
            "crates/portcullis/src/dma/ops/mod.rs",
            "crates/portcullis/src/addr.rs",
        ])
        .0;
        assert_eq!(both[0], UNITS);
        let [_, Tests::Programs("portcullis-unoptimised", programs), STACK] = both[..] else {
            panic!("{both:?}")
        };
        assert_eq!(programs, ["iova", "dma", "no_alloc", "not_coherent", "domain", "pgtable"]);
        assert_eq!(
            of(&["kmod/rust/lib.rs", "kmod/README.md", "LICENSE-MIT"]),
            (vec![], vec![OTHERS[0].1], vec!["LICENSE-MIT"])
        );
        assert_eq!(of(&["Cargo.lock", "README.md", ".ci/run"]).2, ["Cargo.lock", ".ci/run"]);
        assert_eq!(of(&["README.md", "docs/design.md"]).0.len(), 2);
    }

    /// Each row names folders and programs that are there, and each document has one.
    #[test]
    fn what_the_table_names_is_there() {
        let manifest = std::fs::read_to_string(root().join("tests/unoptimised/Cargo.toml")).unwrap();
        for (begin, tests) in ROWS {
            assert!(root().join(begin).exists(), "{begin}");
            for test in tests {
                let Tests::Programs("portcullis-unoptimised", names) = test else { continue };
                assert!(
                    names.iter().all(|name| manifest.contains(&format!("name = \"{name}\""))),
                    "{names:?}"
                );
            }
        }
        assert!(OTHERS.iter().all(|(begin, _)| root().join(begin).exists()));
        let begins = ROWS.iter().map(|(begin, _)| begin).chain(OTHERS.iter().map(|(begin, _)| begin));
        let mut without = crate::codes::documents(&root());
        without.retain(|document| !begins.clone().any(|begin| document.name.starts_with(begin)));
        let without: Vec<_> = without.iter().map(|document| &document.name).collect();
        assert!(without.is_empty(), "documents in no row: {without:?}");
        let features = |package: &str| {
            let mine = crate::FEATURES
                .split(',')
                .filter_map(|feature| feature.strip_prefix(package)?.strip_prefix('/'));
            mine.collect::<Vec<_>>().join(",")
        };
        for package in ["portcullis-cli", "portcullis-linux"] {
            assert!(Tests::Package(package).arguments().contains(&features(package).as_str()), "{package}");
        }
        assert!(QUICK.iter().all(|name| manifest.contains(&format!("name = \"{name}\""))));
    }

    /// `cargo test` of a package leaves out the tests of its library where that has `test = false`.
    #[test]
    fn no_library_s_own_tests_are_left_out() {
        let program_of = |begin: &str| {
            let name = begin.strip_prefix("crates/")?.split('/').next()?;
            let text = std::fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).unwrap();
            let library = text.split("\n[lib]\n").nth(1)?.split("\n[").next()?;
            library.lines().any(|line| line == "test = false").then(|| name.replace('-', "_"))
        };
        let is_source = |begin: &str| begin.matches('/').count() == 2 || begin.contains("/src/");
        let mut seen = 0;
        for (begin, tests) in ROWS.into_iter().filter(|(begin, _)| is_source(begin)) {
            let Some(program) = program_of(begin) else { continue };
            let own = |test: &Tests| matches!(test, Tests::Programs("portcullis-units", programs) if programs.contains(&program.as_str()));
            assert!(tests.iter().any(own), "{begin}");
            seen += 1;
        }
        assert!(seen > 9, "{seen}");
        let quick = quick_commands()[0].join(" ");
        assert!(quick.contains("--test portcullis") && quick.contains("-p portcullis-units"), "{quick}");
    }

    /// A row of the table in CONTRIBUTING, but for the times.
    fn row((begin, tests): (&str, &[Tests])) -> String {
        let name = |test: &Tests| match test {
            Tests::Package(package) => (*package).to_owned(),
            Tests::Binary(package, names) => format!("{package}: {names}"),
            Tests::Programs(package, programs) => format!("{package}: {}", programs.join(", ")),
        };
        format!("| `{begin}` | {} |", tests.iter().map(name).collect::<Vec<_>>().join("; "))
    }

    #[test]
    fn contributing_has_the_table() {
        let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
        let missing: Vec<_> = ROWS.into_iter().map(row).filter(|row| !text.contains(row)).collect();
        assert!(missing.is_empty(), "CONTRIBUTING.md lacks\n{}", missing.join("\n"));
        let rows = text.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows, ROWS.len(), "rows in CONTRIBUTING.md");
    }

    #[test]
    fn a_request_names_a_revision_or_asks_for_a_list_or_both() {
        assert_eq!(request(&[]), Some(("HEAD", false)));
        assert_eq!(request(&["--list"]), Some(("HEAD", true)));
        assert_eq!(request(&["main"]), Some(("main", false)));
        assert_eq!(request(&["main", "--list"]), Some(("main", true)));
        assert_eq!(request(&["--list", "main"]), Some(("main", true)));
        for wrong in [&["--all"][..], &["--list", "--list"], &["--list", "--all"], &["a", "b"]] {
            assert_eq!(request(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn of_many_files_the_first_are_named() {
        assert_eq!(some_of(&["a"]), "a");
        assert_eq!(some_of(&["a", "b", "c"]), "a, b, c");
        assert_eq!(some_of(&["a", "b", "c", "d", "e"]), "a, b, c and 2 more");
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        assert_eq!(timed("17 cargo test -p x"), Some(("cargo test -p x".into(), 17)));
        assert_eq!((timed("x y"), timed("7")), (None, None));
    }
}
