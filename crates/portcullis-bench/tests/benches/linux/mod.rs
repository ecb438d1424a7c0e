//! Linux's code in a shared library, which the user names: what the benchmarks do with one. Here it is the tests' own
//! (`library.rs`); three more tests take Linux's, where the environment names it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use portcullis_bench::path::{self, Choice};
use portcullis_bench::report::Report;
use portcullis_bench::request::Request;
use portcullis_bench::{bounce, iova, pgtable};

use crate::common::{request, with_all_cores};

/// The tests' own library.
pub fn library() -> PathBuf {
    static COMPILED: LazyLock<PathBuf> = LazyLock::new(|| compiled("rival", &[]));
    COMPILED.clone()
}

/// That which the environment's `variable` names.
pub fn named(variable: &str) -> PathBuf {
    std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} names the library")).into()
}

/// Compiles `library.rs`, with these options.
fn compiled(name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/benches/linux/library.rs");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lib{name}.so"));
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler)
        .args([
            "--edition=2024",
            "--crate-type=cdylib",
            "-Anon_upper_case_globals",
            "-Aunexpected_cfgs",
            "-Copt-level=1",
        ])
        .args(options)
        .arg(source)
        .arg("-o")
        .arg(&library)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

#[test]
fn linux_s_parts_are_measured_where_the_libraries_are_named() {
    let named = ["raw-1", "raw-16-live64", "sg-1", "sg-16", "lazy-1", "typed-1"];
    let rival = Some(library());
    let workloads = named.map(String::from).to_vec();
    let request = Request { workloads, threads: vec![1], rival, ..request() };
    for profile in ["none", "vtd"] {
        let rival_pt = Some(library());
        let choice = Choice { profile: profile.into(), rival_pt, own_domains: false };
        let report = with_all_cores(|| path::run(&request, &choice, |_| ())).unwrap();
        assert_eq!(report.skipped, []);
        for name in named {
            let subjects: Vec<_> =
                report.results.iter().filter(|r| r.workload == name).map(|r| r.subject).collect();
            let is_linux_s = name.starts_with("raw-") || name.starts_with("sg-");
            let linux: &[&str] = if is_linux_s { &["linux", "linux-vtd"] } else { &[] };
            assert_eq!(subjects, [&["portcullis"], linux, &["parts"]].concat(), "{name}");
        }
    }
}

/// What each benchmark says of a library.
fn said_of(library: &Path) -> [Result<Report, String>; 3] {
    let one = |workload: &str| {
        let (workloads, subjects) = (vec![workload.into()], vec!["linux".into()]);
        Request { workloads, subjects, threads: vec![1], rival: Some(library.into()), ..request() }
    };
    let formats = vec!["vtd-ss".into()];
    let tables = pgtable::Choice { formats, ..pgtable::Choice::default() };
    with_all_cores(|| {
        [
            iova::run(&one("pair-1"), |_| ()).map_err(|error| error.to_string()),
            bounce::run(&one("slot"), &bounce::Choice::default(), |_| ()).map_err(|error| error.to_string()),
            pgtable::run(&one("map-4k"), &tables, |_| ()).map_err(|error| error.to_string()),
        ]
    })
}

#[test]
fn a_library_that_lacks_what_is_expected_of_it_is_told_with_what_it_lacks() {
    let lacking = [
        "Linux's IOVA allocator: it has no `peer_iova_new`",
        "Linux's swiotlb: it has no `peer_swiotlb_init`",
        "Linux's page tables: it has no `rival_pt_name`",
    ];
    for (said, lacking) in said_of(&compiled("empty", &["--cfg", "empty"])).into_iter().zip(lacking) {
        let said = said.unwrap_err();
        assert!(said.contains(&format!("libempty.so does not hold {lacking}")), "{said}");
    }
}

#[test]
fn more_cores_than_a_library_knows_are_told_and_not_measured() {
    let [iova, bounce, tables] = said_of(&compiled("without_cpus", &["--cfg", "without_cpus"]));
    for (report, reason) in [(iova, "caches for 0 CPUs only"), (bounce, "knows 0 CPUs only")] {
        let report = report.unwrap();
        assert_eq!(report.results, []);
        assert!(report.skipped.iter().all(|skipped| skipped.reason.contains(reason)), "{:?}", report.skipped);
    }
    // Page tables have nothing for each CPU.
    assert_eq!(tables.unwrap().results.len(), 1);
}
