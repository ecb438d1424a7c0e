//! What is said of recordings that do not tell all: in the report for people, for machines, and on the page.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{file, flat, portcullis, stderr, stdout};

/// A recording that is of this kind.
fn recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../portcullis-trace/tests/eras").join(format!("{name}.trace"))
}

fn replay(name: &str, options: &[&str]) -> String {
    let path = recording(name);
    let output = portcullis(&[&["replay", path.to_str().unwrap(), "--repeat", "1"], options].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

fn json(name: &str) -> Value {
    serde_json::from_str(&replay(name, &["--json"])).unwrap()
}

/// The sentences between the notes and the table.
fn verdict(text: &str) -> String {
    let (_, rest) = text.split_once("\n\n").unwrap();
    flat(rest.split_once("\n\n").unwrap().0)
}

fn page(name: &str) -> String {
    let result = file(&format!("{name}.json"), replay(name, &["--json"]).as_bytes());
    let output = portcullis(&["report", result.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

const COPYING: [&str; 3] = ["bounce", "adaptive", "swiotlb"];

fn names_no_copying(said: &str) {
    let said = said.to_lowercase();
    assert!(COPYING.iter().all(|policy| !said.contains(policy)), "{said}");
}

#[test]
fn a_policy_whose_cost_a_recording_does_not_tell_is_in_no_verdict() {
    for (name, recorded) in [
        ("6.17-nvme-linked", "recorded: dma:* events, and of 8 mappings events of the IOMMU alone"),
        ("6.1-iommu-alone", "recorded: events of the IOMMU alone"),
        ("5.4-vtd", "recorded: events of the IOMMU alone"),
    ] {
        let text = replay(name, &["--explain"]);
        assert!(text.contains(recorded), "{text}");
        let said = verdict(&text);
        names_no_copying(&said);
        assert!(
            said.contains("Choose strict (") && said.contains("Policies that copy are left out"),
            "{said}"
        );
        for policy in COPYING {
            let row = text.lines().find(|line| line.starts_with(policy)).unwrap();
            assert!(flat(row).starts_with(&format!("{policy} not known - - - ")), "{row}");
        }
        let explained = flat(&text);
        assert!(explained.contains("what `adaptive` would choose for this workload"), "{text}");
        let full = replay(name, &["--full"]);
        names_no_copying(&verdict(&full));
        for line in ["cost, ns", "mappings/s, one CPU", "CPU time"] {
            let row =
                full.lines().find(|row| row.trim_start_matches(['│', '|', ' ']).starts_with(line)).unwrap();
            assert_eq!(row.matches("not known").count(), 3, "{row}");
        }
        let csv = replay(name, &["--csv"]);
        let empty = csv.lines().filter(|line| line.contains(",,,,,,,,"));
        // Of so few mappings no policy was timed, either.
        assert_eq!(empty.count(), csv.lines().count() - 1, "{csv}");
        let json = json(name);
        assert_eq!(
            (&json["trace"]["copies_known"], &json["trace"]["costs_known"]),
            (&false.into(), &true.into())
        );
        for cost in json["costs"].as_array().unwrap() {
            assert_eq!(cost["known"], !COPYING.contains(&cost["policy"].as_str().unwrap()), "{cost}");
        }
        let hides = json["trace"]["recorded"][0]["hides"].as_str().unwrap();
        let page = page(name);
        let (verdict, rest) =
            page.split_once("<div class=\"verdict\">").unwrap().1.split_once("</div>").unwrap();
        names_no_copying(verdict);
        let first = hides.split(':').next().unwrap();
        assert!(rest.contains(first.split('`').next().unwrap()), "{hides} is not on the page");
        assert!(rest.contains("Too few mappings for a distribution of unmaps."), "{rest}");
        // And the simulation of more CPUs.
        let path = recording(name);
        let scaled = stdout(&portcullis(&["scale", "--workload", path.to_str().unwrap(), "--cpus", "2"]));
        names_no_copying(&scaled);
        assert!(
            scaled.contains("Choose strict (") && flat(&scaled).contains("Policies that copy are left out"),
            "{scaled}"
        );
    }
}

#[test]
fn where_mappings_are_known_by_their_ends_alone_there_is_no_verdict() {
    let text = replay("7.0-unmaps-alone", &[]);
    let expected = "What protection costs this workload is not known: the recording has 8 mappings, and of 8 more too little.";
    assert_eq!(verdict(&text), expected);
    assert!(text.contains("recorded: dma:* events, and of the IOMMU unmaps without any map"), "{text}");
    let page = page("7.0-unmaps-alone");
    assert!(page.contains(expected) && !page.contains("Choose "), "{page}");
    let path = recording("7.0-unmaps-alone");
    let scaled = stdout(&portcullis(&["scale", "--workload", path.to_str().unwrap(), "--cpus", "2"]));
    assert!(
        flat(&scaled).contains("is not known: the recording has 8 mappings") && !scaled.contains("Choose "),
        "{scaled}"
    );
    assert_eq!(json("7.0-unmaps-alone")["trace"]["hidden"], 8);
    // So where the device of some is not known, and one device was asked for.
    let text = replay("6.17-nvme-linked", &["--device", "0000:04:00.0"]);
    assert_eq!(verdict(&text), expected);
    assert!(
        !text.contains("nothing is hidden")
            && flat(&text).contains("may be missing. So no verdict is given."),
        "{text}"
    );
    // A card of which all is there.
    assert!(verdict(&replay("7.0-network-card", &[])).contains("Choose "));
}

#[test]
fn a_recording_that_tells_all_says_so() {
    for name in ["6.12-dma-and-iommu", "6.17-nvme-passthrough", "6.12-allocations-without-direction"] {
        let text = replay(name, &[]);
        assert!(flat(&text).contains("; nothing is hidden"), "{text}");
        assert!(!text.contains("not known"), "{text}");
        let json = json(name);
        assert!(
            json["trace"]["recorded"].as_array().unwrap().iter().all(|one| one["hides"].is_null()),
            "{json}"
        );
    }
}

/// What perf says in its own words, with `--show-lost-events`, and beside the events.
#[test]
fn what_perf_has_lost_is_told() {
    let map = "dma:dma_map_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=1000 size=64 phys_addr=1000 attrs=";
    let text = format!(
        "iob   126 [001]     6.810000:   {map}\n\
         \tffffffff8118d2a5 dma_map_page_attrs+0x35 ([kernel.kallsyms])\n\
         \tffffffffc0321234 nvme_queue_rq+0x1a4 ([nvme])\n\n\
         iob   126 [001]     6.820000: PERF_RECORD_LOST lost 12\n\
         Warning:\nProcessed 300 events and lost 2 chunks!\n\nCheck IO/CPU overload!\n\n"
    );
    let path = file("perf.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap(), "--repeat", "1"]);
    assert!(stdout(&output).contains("note: 12 events lost while recording"), "{}", stdout(&output));
    assert!(!stderr(&output).contains("expected"), "{}", stderr(&output));
}
