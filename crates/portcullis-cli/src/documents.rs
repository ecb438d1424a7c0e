//! What the documents say can be asked for can be asked for.

use std::path::Path;

use clap::error::ErrorKind::{DisplayHelpOnMissingArgumentOrSubcommand, MissingRequiredArgument};
use clap::{CommandFactory, Parser};
use portcullis::dma::QueueConfig;

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

/// Where a text says how many unmaps end together, in words that have these numbers.
#[test]
fn the_texts_have_the_default_batches() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (batch, ring) = (QueueConfig::BATCH, QueueConfig::RING_BATCH);
    let texts = [
        ("crates/portcullis-cli/src/args.rs", format!("/// {batch} unmaps of a device wait together")),
        ("crates/portcullis-cli/src/args.rs", format!("/// {ring} unmaps of a device wait together")),
        ("docs/library.md", format!("| strict-batch | the same | `QueueConfig::batched({batch})` |")),
        (
            "docs/library.md",
            format!("| strict-ring | the same | `QueueConfig::ring(512, 4096).batch({ring})` |"),
        ),
        ("docs/replay.md", format!("a group of {batch} (batch) or {ring} (ring) unmaps")),
        ("docs/replay.md", format!("with one wait, once there are {batch} |")),
        ("docs/replay.md", format!("once there are {ring} in it |")),
        ("docs/scaling.md", format!("  {batch} and {ring} unmaps, and hold")),
        (
            "crates/portcullis-c/include/portcullis.h",
            format!("or 0 for {batch}, and {ring} for the strategies with a ring"),
        ),
    ];
    for (file, text) in texts {
        let all = std::fs::read_to_string(root.join(file)).expect(file);
        assert!(all.contains(&text), "{file} does not say \"{text}\"");
    }
}
