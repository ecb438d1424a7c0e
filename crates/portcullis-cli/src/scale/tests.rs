//! Machines, recordings and choices of `scale`.

use clap::Parser;

use super::*;
use crate::args::{Arguments, Command};

fn of(words: &[&str]) -> Result<Vec<Table>, CommandError> {
    let parsed = Arguments::try_parse_from([&["portcullis", "scale"], words].concat()).unwrap();
    let Some(Command::Scale(scale)) = parsed.command else { panic!("{words:?}: another command") };
    tables(&scale).map(|(tables, ..)| tables)
}

fn names(table: &Table) -> Vec<&str> {
    table.rows.iter().map(|row| row.policy.name).collect()
}

/// A file of events, which goes with what it returns.
fn file(lines: &[String]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, lines.concat()).unwrap();
    file
}

/// A map and, perhaps, its unmap: the `n`th, of `len` bytes at `phys`.
fn mapped(n: u64, phys: u64, len: u64, ends: bool) -> String {
    let event = |us, what: &str, memory: &str| {
        let time = n * 10 + us;
        let (second, us) = (1 + time / 1_000_000, time % 1_000_000);
        let dma = 0x1_0000_0000 + n * 0x100_0000 + phys % 4096;
        format!(
            "t-1 [000] ..... {second}.{us:06}: dma_{what}_page: d dir=TO_DEVICE dma_addr={dma:x} size={len} {memory}attrs=\n"
        )
    };
    let unmap = if ends { event(5, "unmap", "") } else { String::new() };
    event(0, "map", &format!("phys_addr={phys:x} ")) + &unmap
}

#[test]
fn a_machine_has_the_profile_s_waits_and_the_calibration_s_lines() {
    let mut profile = Profile::load("vtd").unwrap();
    let waits = &mut profile.waits;
    (waits.doorbell.ns, waits.completion.ns, waits.descriptor.ns) = (1.0, 20.0, 300.0);
    (waits.map_request.ns, waits.map_page.ns, waits.unmap_page.ns) = (4.0, 5.0, 6.0);
    let mut calibration = Calibration::default();
    (calibration.near_ns.value, calibration.far_ns.value) = (7.0, 8.0);
    (calibration.copy_hot_ns.value, calibration.copy_cold_ns.value) = (9.0, 10.0);
    (calibration.copy_remote_ns.value, calibration.socket_copy_gb_per_s.value) = (11.0, 12.0);
    calibration.walk_read_ns.value = 13.0;
    let expected = Machine {
        cpus: 65,
        sockets: 2,
        iommus: 1,
        near_ns: 7.0,
        far_ns: 8.0,
        submission_ns: 21.0,
        request_ns: 300.0,
        in_flight: 1,
        map_request_ns: 4.0,
        map_page_ns: 5.0,
        unmap_page_ns: 6.0,
        walk_read_ns: 13.0,
        copies: Copies { hot_ns: 9.0, cold_ns: 10.0, remote_ns: 11.0, socket_gb_per_s: 12.0 },
        of_module: false,
    };
    assert_eq!(machine(&profile, &calibration, 65, None), expected);
    for (cpus, asked, sockets) in
        [(1, None, 1), (64, None, 1), (256, None, 4), (2, Some(4), 2), (8, Some(4), 4)]
    {
        assert_eq!(machine(&profile, &calibration, cpus, asked).sockets, sockets, "{cpus} {asked:?}");
    }
}

#[test]
fn a_recording_becomes_requests_of_its_mappings_that_end() {
    let (whole, page) = (0x10_0000, 4096);
    let lines = [
        mapped(0, whole, page, true),
        mapped(1, whole, page + 1, true),
        mapped(2, whole + 4095, 2, true),
        mapped(3, whole + 512, 512, false),
        mapped(4, whole + 1024, 2 * page, true),
        mapped(5, whole, 3 * page, true),
    ];
    let file = file(&lines);
    let (Workload { name, about, requests, depth, device }, told) =
        recording(file.path(), Some(700)).unwrap();
    let mappings: Vec<_> = requests.iter().map(|request| (request.work_ns, &request.mappings[..])).collect();
    let mapping = |pages, bytes, shared| [Mapping { pages, pieces: 1, bytes, shared, received: false }];
    let expected = [
        mapping(1, page, false),
        mapping(2, page + 1, true),
        mapping(2, 2, true),
        mapping(3, 2 * page, true),
        mapping(3, 3 * page, false),
    ];
    assert_eq!(mappings, expected.each_ref().map(|mappings| (700.0, &mappings[..])));
    assert_eq!((name, depth), (file.path().display().to_string(), 32));
    assert!(
        about.starts_with(
            "5 mappings of the recording in turn on each CPU, 700 ns of CPU time besides for each (--work)"
        ),
        "{about}"
    );
    assert!(device.gb_per_s >= 1e3 && device.requests_per_s >= 1e12, "it keeps up: {device:?}");
    assert_eq!((told.copies(), told.nothing), (true, None));
    assert_eq!(told.besides, Some(Besides { ns: 700.0, work: Work::Asked, cpus: 1 }));
    let nothing = self::file(&[mapped(0, whole, page, false)]);
    assert!(matches!(recording(nothing.path(), None), Err(CommandError::Empty(_))));
}

#[test]
fn no_more_mappings_of_a_recording_are_repeated_than_cpus_go_through() {
    let of = |last: u64| {
        let len = |n: u64| if n < 2100 { 4096 } else { 8192 };
        let lines = (0..4200).map(|n| mapped(n, 0x10_0000, if n == 4199 { last } else { len(n) }, true));
        recording(file(&lines.collect::<Vec<_>>()).path(), None).unwrap()
    };
    let (workload, told) = of(8192);
    assert_eq!(workload.requests.len(), 4096);
    assert!(
        workload.about.starts_with("4,096 of the 4,200 mappings of the recording in turn"),
        "{}",
        workload.about
    );
    // Those at the end have the same chance, and are the same ones each time.
    let large = workload.requests.iter().filter(|request| request.mappings[0].pages == 2).count();
    assert!((2_000..=2_096).contains(&large), "{large}");
    assert_eq!(of(8192).0.requests, workload.requests);
    // Other data in any of them is open under strict, whether it is simulated or not.
    assert_eq!([4096, 64].map(|last| of(last).1.share), [false, true]);
    // The work is of all 4,200, in 41,995 us.
    assert_eq!(told.besides, Some(Besides { ns: 9_999.0, work: Work::Most, cpus: 1 }));
}

/// As a replay has it, so that the two agree.
#[test]
fn a_recording_s_own_work_comes_with_each_mapping_unless_another_is_asked_for() {
    let shipped = Path::new("traces/mixed-nvme-e1000e.trace.zst");
    let (workload, told) = recording(shipped, None).unwrap();
    let besides = told.besides.unwrap();
    assert_eq!((besides.ns, besides.work), (94_301.0, Work::Most));
    assert!(workload.requests.iter().all(|request| request.work_ns == besides.ns));
    let two = [mapped(0, 0x10_0000, 64, true), mapped(1, 0x10_0000, 64, true)].concat();
    let measured = "# portcullis: cpus=4 wall_ns=15000 busy_ns=9000 own_ns=1000\n";
    let at_once =
        two.replace("1.000005", "1.000000").replace("1.000010", "1.000000").replace("1.000015", "1.000000");
    for (text, asked, said, work) in [
        (two.clone(), None, "7,500 ns of CPU time besides for each (the most", Work::Most),
        (measured.to_owned() + &two, None, "4,000 ns of CPU time besides for each (what", Work::Measured),
        (measured.to_owned() + &two, Some(5), "5 ns of CPU time besides for each (--work)", Work::Asked),
        (at_once, None, "1,000 ns of CPU time besides for each (the recording does not", Work::Assumed),
    ] {
        let (workload, told) = recording(file(&[text]).path(), asked).unwrap();
        assert!(workload.about.contains(said), "{}", workload.about);
        assert_eq!(told.besides.map(|besides| besides.work), Some(work));
    }
}

/// A recording of mappings of a page, one each 120 us: what the choice is on 64 CPUs, and what is said.
fn said_of_120us(words: &[&str]) -> (Option<&'static str>, String) {
    let lines: Vec<String> = (0..40).map(|n| mapped(n * 12, 0x10_0000, 4096, true)).collect();
    let file = file(&lines);
    let path = file.path().to_str().unwrap();
    let tables = of(&[&["--workload", path, "--cpus", "64"], words].concat()).unwrap();
    let choice = tables[0].chosen(&tables[0].rows).map(|(mode, _)| mode.name());
    let said = report::render(&tables, &Profile::load("vtd").unwrap(), &Calibration::default(), false);
    (choice, said.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// `replay` and `scale` choose by one rule, and the verdict says what the choice costs where it holds.
#[test]
fn a_choice_is_right_even_if_the_recording_s_cpus_were_hardly_busy() {
    let (choice, said) = said_of_120us(&[]);
    assert_eq!(choice, Some("bounce"), "{said}");
    for part in [
        "The recording does not tell how long those CPUs idled. If they were busy for only a tenth of the time, 12us of other work came with each \
         mapping, and protection costs 4.0 % (linux-bounce) to 64.8 % (linux-strict), so choose bounce. If they never idled, choose strict (",
        // What else is assumed is looked at by the same rule.
        "The choice is the same if instructions of the kernel take half as long (",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("by itself, as in"), "{said}");
    // Where the work is known, nothing is said of less.
    let (choice, said) = said_of_120us(&["--work", "120us"]);
    assert_eq!(choice, Some("strict"), "{said}");
    assert!(!said.contains("a tenth of the time"), "{said}");
}

#[test]
fn a_choice_that_rests_on_what_cpus_share_says_so() {
    let (choice, said) = said_of_120us(&["--work", "90us", "--units", "1"]);
    assert_eq!(choice, Some("bounce"), "{said}");
    let other = "For one CPU by itself, as in `portcullis replay`, choose strict (";
    assert!(said.contains(other), "{said}");
}

#[test]
fn numbers_of_cpus_come_in_their_order_and_once() {
    let tables = of(&["--cpus", "8,2,8,1", "--policy", "strict"]).unwrap();
    assert_eq!(tables.iter().map(|table| table.machine.cpus).collect::<Vec<_>>(), [1, 2, 8]);
    // Old designs are where they are named; Linux's own of today, where that is asked for.
    let old = |words: &[&str]| -> Vec<&str> {
        let tables = of(&[&["--cpus", "1"], words].concat()).unwrap();
        tables[0]
            .rows
            .iter()
            .map(|row| row.policy)
            .filter(|policy| policy.old)
            .map(|policy| policy.name)
            .collect()
    };
    assert_eq!(old(&[]), ["vtd-2024"]);
    assert_eq!(old(&["--profile", "smmuv3"]), ["smmu-2026"]);
    assert!(old(&["--on", "library"]).is_empty());
    let named = of(&["--cpus", "1", "--policy", "vtd-2024,lazy"]).unwrap();
    assert_eq!(names(&named[0]), ["lazy", "vtd-2024"]);
}

/// A built-in workload has its own devices, and says itself what its CPUs do besides.
#[test]
fn each_cpu_has_a_device_to_play_a_recording_to() {
    let file = file(&[mapped(0, 0x10_0000, 64, true)]);
    let path = file.path().to_str().unwrap();
    let devices = |words: &[&str]| -> Vec<u32> {
        let tables = of(&[&["--cpus", "1,8,33", "--policy", "strict"], words].concat()).unwrap();
        tables.iter().map(|table| table.workload.device.count).collect()
    };
    assert_eq!(devices(&["--workload", path]), [1, 8, 33]);
    assert_eq!(devices(&["--workload", "nvme"]), [1, 1, 2]);
    let work = |words: &[&str]| {
        of(&[&["--workload", path, "--cpus", "1"], words].concat()).unwrap()[0].workload.requests[0].work_ns
    };
    assert_eq!((work(&[]), work(&["--work", "3us"])), (5_000.0, 3_000.0));
    assert!(matches!(of(&["--workload", "nvme", "--work", "5us"]), Err(CommandError::OwnWork { .. })));
    assert!(matches!(of(&["--workload", "nowhere.trace"]), Err(CommandError::NoWorkload { .. })));
}

/// Whatever is asked for, designs of the past included.
#[test]
fn what_a_recording_does_not_tell_the_copies_of_is_not_copied() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../portcullis-trace/tests/eras/6.1-iommu-alone.trace");
    let all: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
    let tables = of(&["--workload", path, "--cpus", "2", "--policy", &all.join(",")]).unwrap();
    let left = ["passthrough", "strict", "strict-ecmdq", "strict-batch", "strict-ring", "lazy"];
    let old = ["lazy-2015", "tree-2008", "bitmap-2008", "smmu-2017", "vtd-2024", "smmu-2026"];
    assert_eq!(names(&tables[0]), [&left[..], &old[..]].concat());
    assert!(!tables[0].told.copies() && tables[0].told.nothing.is_none());
}

/// As a replay counts them.
#[test]
fn entries_of_a_list_that_adjoin_are_one_piece() {
    let list = |phys: &[u64]| -> Vec<Segment> {
        phys.iter().map(|phys| Segment { phys: *phys, len: 4096 }).collect()
    };
    assert_eq!(mapping(&list(&[0x1000, 0x2000, 0x9000, 0x3000]), false).pieces, 3);
    assert_eq!(mapping(&list(&[0x1000]), false).pieces, 1);
}
