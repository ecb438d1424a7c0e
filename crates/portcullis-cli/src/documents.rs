//! What the documents say can be asked for can be asked for.

use std::path::Path;

use clap::error::ErrorKind::{DisplayHelpOnMissingArgumentOrSubcommand, MissingRequiredArgument};
use clap::{CommandFactory, Parser};
use portcullis::bounce::PoolConfig;
use portcullis::dma::QueueConfig;
use portcullis::domain::Policy;
use portcullis::invalidation::{GATHER_RANGES, QUEUE_ENTRIES, SHARED_ENTRIES};
use portcullis_trace::replay::COMMIT_WITHIN_NS;

use self::codes::documents;
use crate::args::Arguments;

#[path = "../../../xtask/src/codes.rs"]
mod codes;

/// Why `words`, an example or a summary of what may be asked for, is wrong.
fn wrong_with(words: &[&str]) -> Option<String> {
    let wrong = |why: String| Some(format!("{}: {why}", words.join(" ")));
    if words.iter().all(|word| !word.contains('[')) {
        let error = Arguments::try_parse_from(words).err()?;
        // A command may be named by itself, though it takes others below it, or arguments.
        let is_a_name = match error.kind() {
            DisplayHelpOnMissingArgumentOrSubcommand => true,
            MissingRequiredArgument => words.len() == 2,
            _ => false,
        };
        return if is_a_name { None } else { wrong(error.to_string()) };
    }
    // A summary: in brackets is what may be left out.
    let mut command = Arguments::command();
    for word in words[1..].iter().take_while(|word| !word.contains('[')) {
        match command.find_subcommand(word) {
            Some(found) => command = found.clone(),
            None => return wrong(format!("no command {word}")),
        }
    }
    let options = words.iter().map(|word| word.trim_matches(['[', ']', ',']));
    // Behind `--` alone is another program's.
    let mut options =
        options.filter_map(|word| word.strip_prefix("--")).take_while(|option| !option.is_empty());
    let is_one = |option: &&str| command.get_arguments().any(|known| known.get_long() == Some(option));
    options.find(|option| !is_one(option)).and_then(|option| wrong(format!("no option --{option}")))
}

#[test]
fn every_command_line_in_the_documents_is_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut count, mut all_wrong) = (0, Vec::new());
    for document in documents(&root) {
        let by_cargo = document
            .commands("cargo")
            .filter(|words| !words.contains(&"-p") && !words.contains(&"--example"));
        let by_cargo = by_cargo.filter_map(|words| {
            let here = words.iter().position(|word| *word == "--")?;
            words.starts_with(&["cargo", "run"]).then(|| [&["portcullis"], &words[here + 1..]].concat())
        });
        for words in document.commands("portcullis").chain(by_cargo) {
            count += 1;
            all_wrong.extend(wrong_with(&words).map(|why| format!("{}: {why}", document.name)));
        }
    }
    assert!(count > 20, "{count} command lines are found");
    assert!(all_wrong.is_empty(), "{}", all_wrong.join("\n"));
}

#[test]
fn what_cannot_be_asked_for_is_found() {
    let wrong = |command: &str| wrong_with(&command.split(' ').collect::<Vec<_>>()).is_some();
    assert!(!wrong("portcullis bench bounce --workload pool-4k --profile virtio-iommu --depth 64"));
    assert!(wrong("portcullis bench bounce --workload pool-5k") && wrong("portcullis bench bounces"));
    assert!(wrong("portcullis replay --depth 64") && wrong("portcullis replay --policy adaptiv"));
    assert!(!wrong("portcullis replay [TRACE] [--policy NAME,..] [--json | --legend]"));
    assert!(wrong("portcullis replay [TRACE] [--json | --legends]") && wrong("portcullis play [TRACE]"));
}

/// Where a text says a number that a driver or a user may leave out, in words that have it.
#[test]
fn the_texts_have_the_defaults() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (batch, ring) = (QueueConfig::BATCH, QueueConfig::RING_BATCH);
    let copied = PoolConfig::default().threshold >> 10;
    let Policy::Lazy { window_ns } = Policy::LAZY else { panic!("{:?}", Policy::LAZY) };
    let (window, within) = (window_ns / 1_000_000, COMMIT_WITHIN_NS / 1_000_000);
    let (args, library, replay) = ("crates/portcullis-cli/src/args.rs", "docs/library.md", "docs/replay.md");
    let policy = "crates/portcullis/src/domain/policy.rs";
    let gather = "crates/portcullis/src/invalidation/gather.rs";
    let shared = crate::look::count(SHARED_ENTRIES as u64);
    let (linux, header) = ("docs/linux.md", "crates/portcullis-c/include/portcullis.h");
    let texts = [
        (args, format!("/// {batch} unmaps of a device wait together, {within} ms at the most")),
        (args, format!("/// {ring} unmaps of a device wait together")),
        (library, format!("| strict-batch | the same | `QueueConfig::batched({batch})` |")),
        (library, format!("| strict-ring | the same | `QueueConfig::ring(512, 4096).batch({ring})` |")),
        (library, format!("| `QueueConfig::auto(512, 4096).batch({ring})` |")),
        (library, format!("let mut rx = nic.queue(QueueConfig::ring(512, 4096).batch({ring}))?;")),
        (library, format!("// {ring} came back after one wait")),
        (library, format!("| {ring} unmapped buffers come back together")),
        (replay, format!("a group of {batch} (batch) or {ring} (ring) unmaps")),
        (replay, format!("to the IOMMU usually ends all {ring} mappings")),
        (replay, format!("with one wait, once there are {batch} |")),
        (replay, format!("once there are {ring} in it |")),
        ("docs/scaling.md", format!("{batch} and {ring} unmaps, and hold")),
        (header, format!("or 0 for {batch}, and {ring} for the strategies with a ring")),
        (replay, format!("A replay ends a group after {within} ms.")),
        (replay, format!("A batch is committed when it is full, after {within} ms of")),
        (header, format!("Buffers of up to {copied} KiB are copied")),
        (linux, format!("copies of buffers up to {copied} KiB (`--threshold`)")),
        (replay, format!("up to {copied} KiB nothing waits")),
        (replay, format!("Mappings of up to {copied} KiB are copied")),
        ("docs/scaling.md", format!("a mapping of more than {copied} KiB under `bounce`")),
        (args, format!("{QUEUE_ENTRIES} unmaps or {window} ms more")),
        ("README.md", format!("a buffer for up to {window} ms after its unmap")),
        ("docs/design.md", format!("instead of {window} ms.")),
        ("docs/design.md", format!("of {QUEUE_ENTRIES} entries")),
        ("docs/design.md", format!("shared by {QUEUE_ENTRIES} unmaps")),
        ("docs/design.md", format!("one queue of {shared} entries")),
        ("docs/security.md", format!("which has {QUEUE_ENTRIES} entries")),
        ("crates/portcullis/src/invalidation/costs.rs", format!("a queue of {QUEUE_ENTRIES} for each CPU")),
        (policy, format!("/// deferred {QUEUE_ENTRIES} unmaps (or all CPUs together {shared},")),
        (gather, format!("at most {GATHER_RANGES} ranges, each as by")),
        (gather, format!("with at most {GATHER_RANGES} ranges that cover")),
        (
            "crates/portcullis/src/invalidation/shared.rs",
            format!("have more than {GATHER_RANGES}, several ranges"),
        ),
        ("crates/portcullis/src/dma/raw_batch.rs", format!("at most {GATHER_RANGES} range invalidations")),
        ("docs/design.md", format!("Up to {GATHER_RANGES} ranges are invalidated individually")),
        ("docs/scaling.md", format!("Up to {GATHER_RANGES} requests take a command each")),
        ("docs/glossary.md", format!("for {window} ms at most, unless the driver asks for another")),
        (linux, format!("together, up to {window} ms later (`--window-us`)")),
        (
            replay,
            format!(
                "waits once for up to {QUEUE_ENTRIES} unmaps. Devices reach the buffers for up to {window} ms more"
            ),
        ),
        (replay, format!("together after {QUEUE_ENTRIES} unmaps of a CPU or {window} ms;")),
    ];
    // The module is C here, and has the library's numbers once more.
    let (bytes, us) = (copied << 10, window_ns / 1000);
    let module = [
        format!("threshold = {copied} << 10;"),
        format!("may be copied (default {bytes})"),
        format!("window_us = {us};"),
        format!("may stay open, in us (default {us})"),
    ];
    let texts = texts.into_iter().chain(module.map(|text| ("kmod/src/rules.c", text)));
    let lacking = texts.filter(|(file, text)| {
        let all = std::fs::read_to_string(root.join(file)).expect(file);
        !all.replace('\n', " ").contains(text)
    });
    let lacking: Vec<_> = lacking.map(|(file, text)| format!("{file} does not say \"{text}\"")).collect();
    assert!(lacking.is_empty(), "{}", lacking.join("\n"));
}
