//! The stack that the core's public calls take. A kernel's has 16 KiB, of which its own code and its interrupts take a part; what
//! is called from it has no more than it says. So no frame of the core has more than [`FRAME`](portcullis_stack::FRAME) bytes, and no public
//! call takes more than [`CALL`] from its entry, or [`MAKE`] where it makes a domain, a device or a queue.
//!
//! `object` is compiled as a kernel compiles the core, into one object. Each function's frame is read off its instructions: what it
//! pushes, and what it takes from the stack's pointer. The depth of a call is that of the deepest chain of direct calls, each with
//! all of its frame, as if every call came when that is largest.
//!
//! What is not in the figures: what the embedder's functions take (the object calls them by name), and panics, which do not come
//! back. Calls by a pointer are [listed](INDIRECT) with what they lead to, and so are [functions that call themselves](RECURSIVE), with how
//! often.
#![cfg(not(any(loom, watched)))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use portcullis_stack::code::{Code, Function};
use portcullis_stack::{BUILDS, FRAME};

/// The most of a public call, and of one that makes something.
const CALL: u64 = 4096;
const MAKE: u64 = 6144;

/// Frames that are larger, by parts of their functions' names; how large, and why.
const LARGER: &[(&str, u64, &str)] = &[
    ("unmeasured_in", 1744, "a ring, on its way to its place"),
    ("Device<X>>::assemble", 1712, "a queue, on its way to the caller"),
    ("make_domain", 1584, "a mapper, on its way to the domain"),
    ("within", 1328, "a mapper, on its way to the domain"),
    ("Mapper>::sync", 1120, "32 requests"),
];

/// Calls that go deeper, with how deep. No other does, and these go no deeper than this.
const DEEPER: &[(&str, u64)] = &[
    ("call_end_ops_t", 4496),
    ("call_end_queue_t", 4544),
    ("call_map_sg_t", 5264),
    ("call_map_t", 5264),
    ("call_queue_commit_t", 4448),
    ("call_queue_map_c", 4456),
    ("call_queue_map_t", 5664),
    ("call_queue_unmap_c", 4760),
    ("call_queue_unmap_t", 5520),
    ("call_unmap_t", 4480),
];

/// Functions that call by a pointer, by parts of their names; parts of the names of what it leads to here; and what it is.
const INDIRECT: &[(&str, &[&str], &str)] = &[
    (
        "Shared<T>::end",
        &["drop_in_place<portcullis::bounce::pool::BouncePool"],
        "the drop of a pool of any kind, or of the clock",
    ),
    ("Arc<T,A>::drop_slow", &[], "the embedder's cache maintenance"),
    ("commit_raw", &["AnyQueue>"], "the queues of a device that is not coherent, which are of other kinds"),
    ("NotCoherent", &["AnyQueue>"], "the same"),
    ("AdaptiveRing", &[], "the clock"),
    ("DmaOps<X>::new_in", &[], "the clock, and memcpy"),
    ("Device<X>>::adaptive", &[], "the clock, and memcpy"),
    ("Device<X>>::assemble", &[], "what makes the lanes of a device that is not coherent, and memcpy"),
    ("end_measured", &[], "the clock"),
    ("DmaOps<X>>::enter", &[], "the clock"),
    ("drop_in_place<portcullis::dma::ops::DmaOps", &[], "the clock"),
    ("call_end_ops", &[], "the clock"),
    ("unmap_all", &[], "memcpy, whose address is in a register"),
    ("copy_pieces", &[], "the embedder's copies"),
    ("end_parts", &[], "the embedder's copies"),
    ("make_domain", &[], "memcpy"),
    ("with_marks", &[], "memcpy"),
    ("IovaSpace::make_in", &[], "memcpy"),
    ("flush_queue::share", &[], "memcpy"),
    ("Books::make_in", &[], "memcpy"),
    ("Shared<T>::new", &[], "memcpy"),
    ("within", &[], "memcpy"),
    ("BouncePool<M,P,C>::new", &[], "memcpy"),
    ("shared_pool", &[], "memcpy"),
    ("call_pool_usage", &[], "a pool of any kind says what it holds"),
    ("call_timer", &[], "the test's own, to compile a listener of any kind"),
];

/// Functions that call themselves, by parts of their names; how often inside each other, at the most; and why no more.
const RECURSIVE: &[(&str, u64, &str)] = &[
    ("links::free", 7, "levels of 64 pointers over leaves of 512 words, for 2^48 bytes"),
    ("PageTable<F,X>>::write_leaves", 4, "levels of a table"),
    ("PageTable<F,X>>::mark_empty", 4, "levels of a table"),
    ("PageTable<F,X>::free_below", 4, "levels of a table"),
    ("clear_recurse", 1, "the map of a pool has no mapping when it is dropped"),
    ("commit_raw", 2, "the queues of a device that is not coherent are of other kinds"),
    ("drop_in_place<portcullis::bounce::pool::BouncePool", 1, "a pool has no pool"),
];

/// Compiles the object, and returns the library that has it.
fn object() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).unwrap();
    let target = root.join("target/stack");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // As if nobody had called this from Cargo.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("CARGO") && name != "CARGO_HOME"
            || name.starts_with("RUSTFLAGS")
            || name == "RUSTC_WRAPPER"
        {
            cargo.env_remove(name);
        }
    }
    let triple = "x86_64-unknown-none";
    // Does nothing where it is installed.
    let _ = Command::new("rustup").args(["--quiet", "target", "add", triple]).current_dir(root).status();
    let status = cargo
        .args(["build", "--release", "--locked", "--quiet", "--target", triple])
        // Constants of tables of jumps are no calls, and there is nothing to unwind to.
        .env(
            "RUSTFLAGS",
            "-Crelocation-model=static -Ccode-model=kernel -Cforce-unwind-tables=no -Cjump-tables=n",
        )
        .env("CARGO_TARGET_DIR", &target)
        .current_dir(here.join("object"))
        .status()
        .unwrap();
    assert!(
        status.success(),
        "the object is not compiled: is the target {triple} installed (rustup target add {triple})?"
    );
    target.join(triple).join("release/libportcullis_stack_object.a")
}

/// The deepest chain from each function on, of those that were asked for.
struct Depths<'a> {
    code: &'a Code,
    known: BTreeMap<usize, u64>,
    /// Those whose depth is being computed.
    open: Vec<usize>,
    /// What is wrong, apart from figures.
    complaints: Vec<String>,
}

impl Depths<'_> {
    fn of(&mut self, number: usize) -> u64 {
        if let Some(known) = self.known.get(&number) {
            return *known;
        }
        let function = &self.code.functions[number];
        if let Some(place) = self.open.iter().position(|open| *open == number) {
            let is_known = |name: &str| RECURSIVE.iter().any(|(part, ..)| name.contains(part));
            let circle: Vec<_> =
                self.open[place..].iter().map(|open| self.code.functions[*open].name.clone()).collect();
            if !circle.iter().any(|name| is_known(name)) {
                self.complaints.push(format!("a circle of calls: {circle:?}"));
            }
            return 0;
        }
        self.open.push(number);
        let mut callees = self.code.callees(function);
        if function.calls_by_pointer {
            match INDIRECT.iter().find(|(part, ..)| function.name.contains(part)) {
                Some((_, to, _)) => {
                    let leads = |name: &str| to.iter().any(|part| name.contains(part));
                    callees.extend(
                        (0..self.code.functions.len()).filter(|to| leads(&self.code.functions[*to].name)),
                    );
                }
                None => self.complaints.push(format!("{} calls by a pointer", function.name)),
            }
        }
        let below = callees.into_iter().map(|callee| self.of(callee)).max().unwrap_or(0);
        let times = RECURSIVE
            .iter()
            .find(|(part, ..)| function.name.contains(part))
            .map_or(1, |(_, times, _)| *times);
        let after = function.tail_calls.iter().map(|callee| self.of(*callee)).max().unwrap_or(0);
        self.open.pop();
        let depth = (times * function.frame() + below).max(after);
        self.known.insert(number, depth);
        depth
    }

    /// The chain that takes the most from `number` on.
    fn chain(&self, mut number: usize) -> String {
        let mut chain = String::new();
        for _ in 0..40 {
            let function = &self.code.functions[number];
            chain += &format!("\n    {:>5} {}", function.frame(), function.name);
            let all = self.code.callees(function).into_iter().chain(function.tail_calls.iter().copied());
            match all.filter_map(|callee| Some((*self.known.get(&callee)?, callee))).max() {
                Some((depth, callee)) if depth > 0 && callee != number => number = callee,
                _ => break,
            }
        }
        chain
    }
}

/// Whether to fail with the chain of every call, and every frame above half of what one may have: for work on them.
fn shows_all() -> bool {
    std::env::var_os("PORTCULLIS_STACK_ALL").is_some()
}

#[test]
fn frames_and_calls_fit_a_kernels_stack() {
    let code = Code::read(&std::fs::read(object()).unwrap());
    let mut depths = Depths { code: &code, known: BTreeMap::new(), open: Vec::new(), complaints: Vec::new() };
    let entries: Vec<usize> = (0..code.functions.len())
        .filter(|number| ["make_", "call_"].iter().any(|kind| code.functions[*number].name.starts_with(kind)))
        .collect();
    assert!(entries.len() >= 60, "{} entries", entries.len());
    let mut report = Vec::new();
    for entry in entries {
        let depth = depths.of(entry);
        let name = &code.functions[entry].name;
        let known = DEEPER.iter().find(|(known, _)| known == name).map(|(_, most)| *most);
        let most = known.unwrap_or(if name.starts_with("make_") { MAKE } else { CALL });
        let most = if shows_all() { 0 } else { most };
        if depth > most + BUILDS {
            report.push((depth, format!("{name} takes {depth} bytes, of {most}:{}", depths.chain(entry))));
        }
    }
    let reached = |function: &&Function| depths.known.contains_key(&function.number);
    let allowed = |function: &&Function| {
        let known = LARGER.iter().find(|(part, ..)| function.name.contains(part)).map(|(_, most, _)| *most);
        if shows_all() { FRAME / 2 } else { known.unwrap_or(FRAME) }
    };
    for function in
        code.functions.iter().filter(reached).filter(|function| function.frame() > allowed(function) + BUILDS)
    {
        report.push((
            function.frame(),
            format!("a frame of {} bytes, of {FRAME}: {}", function.frame(), function.name),
        ));
    }
    report.sort();
    let report: Vec<_> = report.into_iter().rev().map(|(_, line)| line).chain(depths.complaints).collect();
    assert!(report.is_empty(), "\n{}", report.join("\n"));
}
