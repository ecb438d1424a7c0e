//! Tests under Miri and under the sanitizers, which nightly Rust alone has: named one by one, as all three are slow.
//!
//! Miri runs what walks through unsafe code; the sanitizers run what threads do beside each other.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Something that looks at tests while they run.
pub struct Tool {
    pub what: &'static str,
    /// What rustup adds to nightly Rust for it; nightly Rust itself brings what it needs where there is none.
    component: Option<Component>,
    /// The command of Cargo.
    command: &'static [&'static str],
    /// Whether it is a part of the code that is compiled, so that build scripts, which run here, need code without it.
    sanitizes: bool,
    /// With a target folder of its own, as the flags would otherwise rebuild everything back and forth.
    environment: &'static [(&'static str, &'static str)],
    tests: &'static [Tests],
}

/// The crates whose tests they are. No two have a folder of tests of the same name here.
pub const CRATES: [&str; 3] = ["portcullis", "portcullis-linux", "portcullis-unoptimised"];

/// Tests of one folder below the `tests` of one of [`CRATES`].
pub type Tests = (&'static str, &'static [&'static str]);

/// A part of nightly Rust that not every machine has.
#[derive(PartialEq, Eq)]
pub enum Component {
    Miri,
    Sources,
}

/// Without optimisation, as these tests compile for longer than they run; but a report names source lines.
const LINES: (&str, &str) = ("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");

/// The flag that leaves out of the programs of tests, and of what these depend on, what none of the tools runs.
macro_rules! watched {
    () => {
        "--cfg watched"
    };
}

pub const TOOLS: [Tool; 4] = [
    Tool {
        what: "Miri",
        component: Some(Component::Miri),
        command: &["miri", "test"],
        sanitizes: false,
        environment: &[
            // Memory that a device may still reach is leaked on purpose.
            ("MIRIFLAGS", "-Zmiri-strict-provenance -Zmiri-ignore-leaks"),
            ("RUSTFLAGS", watched!()),
            ("CARGO_TARGET_DIR", "target/miri"),
        ],
        tests: &UNSAFE,
    },
    Tool {
        what: "Miri, over memory that is known by its address",
        component: Some(Component::Miri),
        command: &["miri", "test"],
        sanitizes: false,
        environment: &[
            // A "physical" address is a number. So whose memory it leads to is not strict here.
            ("MIRIFLAGS", "-Zmiri-permissive-provenance -Zmiri-ignore-leaks"),
            ("RUSTFLAGS", watched!()),
            ("CARGO_TARGET_DIR", "target/miri"),
        ],
        tests: &BY_ADDRESS,
    },
    Tool {
        what: "ThreadSanitizer",
        // It must see the standard library's atomics and locks, too.
        component: Some(Component::Sources),
        command: &["test", "-Zbuild-std"],
        sanitizes: true,
        environment: &[
            ("RUSTFLAGS", concat!("-Zsanitizer=thread ", watched!())),
            LINES,
            ("CARGO_TARGET_DIR", "target/tsan"),
        ],
        tests: &SHARED,
    },
    Tool {
        what: "AddressSanitizer",
        component: None,
        command: &["test"],
        sanitizes: true,
        environment: &[
            ("RUSTFLAGS", concat!("-Zsanitizer=address ", watched!())),
            LINES,
            // Memory that a device may still reach is leaked on purpose.
            ("ASAN_OPTIONS", "detect_leaks=0"),
            ("CARGO_TARGET_DIR", "target/asan"),
        ],
        tests: &SHARED,
    },
];

/// What Miri can do in two minutes: it interprets, so a test of a domain with a software IOMMU below takes five seconds and
/// more. Buffers that are given back, kept or leaked; the words beside the lists of addresses; and the fence of a
/// platform that has no barrier of all CPUs, which only Miri shows to be missing.
const UNSAFE: [Tests; 4] = [
    (
        "dma",
        &[
            "ends::batch::dropping_a_batch_commits_it",
            "ends::batch::what_is_not_confirmed_keeps_the_buffers_until_it_is",
            "ends::ring::a_ring_in_use_loses_its_addresses_when_dropped",
            "ends::ring::what_is_not_confirmed_goes_on_waiting",
            "ends::strangers::a_batch_that_ends_unconfirmed_gives_its_addresses_back_after_a_flush",
            "ends::strangers::what_somebody_has_unmapped_is_out_of_reach_after_a_commit",
            "mishaps::a_buffer_whose_list_cannot_be_had_again_is_unmapped_all_the_same",
            "mishaps::a_map_that_could_not_be_undone_for_sure_keeps_the_buffer",
            "mishaps::a_mapping_ended_by_number_under_its_owner_costs_later_ones_theirs_and_opens_nothing",
            "mishaps::a_mapping_unmapped_in_pieces_hands_nothing_out_twice",
            "mishaps::a_raw_unmap_that_was_not_confirmed_does_not_free_a_typed_buffer",
            "mishaps::coherent_memory_keeps_its_owner_only_while_it_may_be_reached",
            "mishaps::nor_does_one_that_went_past_the_domain",
            "queue::failures::a_commit_that_fails_keeps_all_buffers",
            "queue::failures::a_mapping_that_somebody_ended_costs_its_owner_a_flush",
            "queue::typed::a_full_ring_says_so_and_has_room_after_a_commit",
            "queue::typed::a_queue_that_ends_gives_its_buffers_up_only_where_that_is_confirmed",
        ],
    ),
    (
        "iova",
        &["space::a_range_freed_elsewhere_returns_to_its_owner", "space::only_whole_ranges_are_taken_back"],
    ),
    ("pgtable", &["engine::near::no_table_is_remembered_once_it_was_reclaimed"]),
    (
        "std_platform",
        &[
            "cpus::an_owner_and_one_who_revokes_are_never_both_at_a_value",
            "shared_queue::a_failure_reaches_those_it_concerns",
            "shared_queue::a_queue_that_panics_stops_nobody",
        ],
    ),
];

/// Bytes that several threads reach by safe calls, in the process's own memory: accesses of different sizes that meet are undefined
/// behaviour, which only Miri shows.
const BY_ADDRESS: [Tests; 1] = [(
    "registration",
    &[
        "shared::a_buffer_is_read_and_written_by_parts_on_many_threads",
        "shared::a_mapping_is_synced_by_parts_while_its_buffer_is_used",
        "shared::coherent_memory_is_read_and_written_by_parts_on_many_threads",
        "shared::copies_for_several_threads_keep_to_their_bytes",
    ],
)];

/// What threads do beside each other, in seconds. ThreadSanitizer knows no fence that stands alone, and no barrier of all
/// CPUs (`membarrier`): it sees what atomics and locks order. What fences order is for the model checker.
///
/// It reports what is not atomic, so of an order that is missing it sees the memory that is handed over by it. With the
/// levels of `iova/links.rs` installed and followed `Relaxed` it reported a race in `iova/space.rs` (4 runs of 11);
/// AddressSanitizer reported a use after free in `iova/space.rs` with a level freed as soon as it was installed, and in
/// `bounce/pool.rs` with a parked list that two could take.
///
/// Nothing is left out for a false report; `swiotlb::threads::nobody_waits_in_vain_and_nothing_is_lost` is, as it takes
/// a minute.
const SHARED: [Tests; 4] = [
    (
        "bounce",
        &[
            "pool::threads::data_is_right_while_others_free_and_trim",
            "pool::threads::what_a_thread_kept_is_anybody_s_when_it_ends",
            "swiotlb::threads::one_maps_and_another_unmaps",
        ],
    ),
    ("iova", &["space::nothing_is_handed_out_twice_on_several_cpus"]),
    (
        "registration",
        &[
            "threads::what_is_held_is_reached_and_what_is_forgotten_is_not",
            "threads::whoever_finds_no_room_is_told_so_and_the_limit_holds",
        ],
    ),
    (
        "std_platform",
        &[
            "cpus::a_cpu_is_drained_before_the_next_thread_has_it",
            "cpus::the_end_of_a_thread_gives_back_its_cpus_on_all_platforms_that_are_left",
            "protection::concurrent_mappings_never_reach_each_other_s_memory",
            "protection::threads_that_come_and_go_leave_nothing_behind",
            "shared_queue::a_failure_reaches_those_it_concerns",
            "shared_queue::a_queue_that_panics_stops_nobody",
            "shared_queue::everybody_is_served_and_waits_are_shared",
            "timers::panics_end_nothing_but_their_call",
            "timers::workers_end_with_the_platform",
            "windows::hardware_that_is_silent_keeps_no_other_domain_s_window_open",
        ],
    ),
];

impl Component {
    const fn name(&self) -> &'static str {
        match self {
            Self::Miri => "miri",
            Self::Sources => "rust-src",
        }
    }

    fn is_there(&self) -> bool {
        match self {
            Self::Miri => output(&mut nightly(&["cargo", "miri", "--version"])).is_some(),
            Self::Sources => output(&mut nightly(&["rustc", "--print", "sysroot"]))
                .is_some_and(|root| Path::new(root.trim()).join("lib/rustlib/src/rust/library/std").is_dir()),
        }
    }

    /// Whether it is there, or rustup has brought it.
    fn is_had(&self) -> bool {
        let add = || {
            eprintln!("== rustup adds {} to nightly Rust", self.name());
            output(Command::new("rustup").args(["component", "add", "--toolchain", "nightly", self.name()]))
        };
        self.is_there() || (add().is_some() && self.is_there())
    }
}

/// A command of nightly Rust.
pub fn nightly(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(arguments);
    // Cargo sets these for what it runs, and xtask is one of those.
    for name in ["CARGO", "RUSTC", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        command.env_remove(name);
    }
    command
}

/// What a command prints, if it succeeds.
pub fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The target that nightly Rust runs on.
pub fn host() -> Result<String, String> {
    let version = output(&mut nightly(&["rustc", "-vV"])).unwrap_or_default();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ").map(str::to_owned));
    host.ok_or_else(|| "rustc does not say what its host is".to_owned())
}

/// Why nightly Rust, or a part of it, is not here and cannot be had, if so; or why sanitizers are not run here.
pub fn missing(component: Option<&Component>, sanitizes: bool) -> Option<String> {
    if sanitizes && !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        return Some("it is run on 64-bit Linux only".to_owned());
    }
    if output(&mut nightly(&["cargo", "--version"])).is_none() {
        return Some("rustup has no nightly Rust".to_owned());
    }
    let component = component.filter(|component| !component.is_had())?;
    Some(format!("nightly Rust has no {}, and rustup cannot add it", component.name()))
}

impl Tool {
    /// Why it is not here and cannot be had, if so.
    pub fn missing(&self) -> Option<String> {
        missing(self.component.as_ref(), self.sanitizes)
    }

    /// The tests that it runs.
    #[cfg(test)]
    pub fn tests(&self) -> &'static [Tests] {
        self.tests
    }

    /// How many tests it runs.
    pub fn count(&self) -> usize {
        self.tests.iter().map(|(_, tests)| tests.len()).sum()
    }

    /// What runs its tests on `host`, which prints a line for each.
    pub fn tests_command(&self, root: &Path, host: &str) -> Result<Command, String> {
        let mut command = nightly(&["cargo"]);
        // Miri has Cargo run it instead.
        if self.component != Some(Component::Miri) {
            crate::limit::add(&mut command)?;
        }
        command.args(self.command).arg("--locked");
        for name in CRATES {
            command.args(["-p", name]);
        }
        if self.sanitizes {
            command.args(["--target", host]);
        }
        for (target, _) in self.tests {
            command.args(["--test", target]);
        }
        command.args(["--", "--exact"]);
        for (_, tests) in self.tests {
            command.args(*tests);
        }
        command.envs(self.environment.iter().copied()).current_dir(root).stdout(Stdio::piped());
        Ok(command)
    }

    /// Runs its tests, all of them: one that does not exist is an error.
    pub fn run(&self, root: &Path) -> Result<(), String> {
        let mut command = self.tests_command(root, &host()?)?;
        let failed = |error| format!("rustup run nightly cargo: {error}");
        let mut child = command.spawn().map_err(failed)?;
        let mut passed = 0;
        for line in BufReader::new(child.stdout.take().ok_or("no output")?).lines() {
            let line = line.map_err(failed)?;
            println!("{line}");
            passed += usize::from(line.starts_with("test ") && line.ends_with("... ok"));
        }
        let status = child.wait().map_err(failed)?;
        if !status.success() {
            return Err(format!("rustup run nightly cargo {}: {status}", self.command.join(" ")));
        }
        if passed != self.count() {
            return Err(format!("{passed} tests of the {} in xtask/src/nightly.rs were run", self.count()));
        }
        Ok(())
    }
}
