//! Tests with what is not ours to ship: parts of Linux to measure beside, recordings.

use crate::lane::Summary;
use crate::{Step, workspace};

/// Something to test with.
pub struct Borrowed {
    /// The variable that says where it is.
    pub variable: &'static str,
    /// The tests that need it.
    test: &'static str,
    /// What the variable should name.
    what: &'static str,
    step: &'static str,
    pub arguments: &'static [&'static str],
}

/// Cargo's arguments for a test that runs only when it is asked for.
macro_rules! ignored_test {
    ($target:literal, $name:literal) => {
        workspace!("test", "--test", $target, "--", "--ignored", "--exact", $name)
    };
}

pub const ALL: [Borrowed; 5] = [
    Borrowed {
        variable: "PORTCULLIS_RIVAL",
        test: "iova::every_workload_runs_on_linux",
        what: "library with Linux's allocator",
        step: "tests beside Linux's allocator",
        arguments: ignored_test!("benches", "iova::every_workload_runs_on_linux"),
    },
    Borrowed {
        variable: "PORTCULLIS_RIVAL_PT",
        test: "pgtable::every_workload_runs_on_linux",
        what: "library with Linux's page tables",
        step: "tests beside Linux's page tables",
        arguments: ignored_test!("benches", "pgtable::every_workload_runs_on_linux"),
    },
    Borrowed {
        variable: "PORTCULLIS_RIVAL",
        test: "bounce::every_workload_runs_on_linux",
        what: "library with Linux's swiotlb",
        step: "tests beside Linux's swiotlb",
        arguments: ignored_test!("benches", "bounce::every_workload_runs_on_linux"),
    },
    Borrowed {
        variable: "PORTCULLIS_TRACES",
        test: "every_trace_keeps_its_promises",
        what: "folder with traces",
        step: "tests over all traces",
        arguments: ignored_test!("traces", "hostile::every_trace_keeps_its_promises"),
    },
    Borrowed {
        variable: "PORTCULLIS_TRACES",
        test: "no_paint_shows_in_any_trace",
        what: "folder with traces",
        step: "painted memory over all traces",
        arguments: ignored_test!("traces", "painted::no_paint_shows_in_any_trace"),
    },
];

impl Borrowed {
    fn is_there(&self) -> bool {
        std::env::var_os(self.variable).is_some()
    }
}

/// Tests that the command would run on a machine that had what they need.
pub fn skipped() -> Summary {
    let mut summary = Summary::default();
    for borrowed in ALL.iter().filter(|borrowed| !borrowed.is_there()) {
        summary.skip(1, format!("{}: {} names no {}", borrowed.test, borrowed.variable, borrowed.what));
    }
    summary
}

/// The steps of those that are there.
pub fn steps() -> impl Iterator<Item = Step> {
    let there = ALL.iter().filter(|borrowed| borrowed.is_there());
    there.map(|borrowed| Step::cargo(borrowed.step, borrowed.arguments))
}
