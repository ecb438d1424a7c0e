//! What is printed of simulations, run and made up.

use clap::Parser;

use portcullis_trace::replay::Profile;

use portcullis_model::scale::{Outcome, Policy, Spent};

use super::{Row, Table, explain};
use crate::args::{Arguments, Command};
use crate::calibration::Calibration;
use crate::counted::INSTRUCTION_NS;
use crate::golden;
use crate::look::COLUMNS;
use crate::on_linux::{Offer, OwnStrict};
use crate::scale::tables;

fn told(arguments: &[&str], json: bool) -> String {
    let parsed = Arguments::try_parse_from([&["portcullis", "scale"], arguments].concat()).unwrap();
    let Some(Command::Scale(scale)) = parsed.command else { panic!("another command") };
    let (tables, profile, calibration) = tables(&scale).unwrap();
    match json {
        true => super::json(&tables, &profile, &calibration, &scale).unwrap(),
        false => super::render(&tables, &profile, &calibration, false),
    }
}

#[test]
fn the_report_begins_with_the_verdict_and_fits_the_terminal() {
    let policies = "strict,strict-ring,bounce,lazy,lazy-2015,vtd-2024";
    for arguments in [
        &["--cpus", "16", "--sockets", "2", "--policy", policies][..],
        &["--workload", "nvme", "--cpus", "1,64,256", "--profile", "virtio-iommu"],
        &["--workload", "traces/mixed-nvme-e1000e.trace.zst", "--cpus", "1,8"],
    ] {
        let text = told(arguments, false);
        let plain = anstream::adapter::strip_str(&text).to_string();
        assert!(plain.lines().all(|line| line.chars().count() <= COLUMNS), "{plain}");
        let begins = if arguments.contains(&"--workload") && arguments[1].ends_with(".zst") {
            "\n\nAt most 94us of other CPU work came with each mapping, if the recording's"
        } else {
            "\n\nProtection from devices costs this workload "
        };
        assert!(plain.contains(begins), "{plain}");
        assert!(
            plain.contains("Choose ") && plain.contains("What takes the most of a request: with "),
            "{plain}"
        );
        assert!(plain.contains("\nMeasured: "), "{plain}");
    }
    let text = told(&["--cpus", "16", "--sockets", "2", "--policy", policies], false);
    assert!(text.replace('\n', " ").contains("with lazy-2015, waits for lines and locks"), "{text}");
    // What it is about, in figures: how many links there are, and who keeps up.
    let text = told(&["--workload", "nic", "--cpus", "64", "--policy", "strict-ring"], false);
    assert!(text.contains("devices: 13, each up to 100 Gb/s\n"), "{text}");
    let text =
        told(&["--workload", "traces/mixed-nvme-e1000e.trace.zst", "--cpus", "1", "--work", "2us"], false);
    let text = text.replace('\n', " ");
    assert!(
        text.contains("devices: 1, as fast as the CPUs need them ")
            && text.contains("(linux-strict) of the throughput on 1 CPU"),
        "{text}"
    );
    assert!(text.contains("If 2us of other CPU work comes with each mapping (--work), protection"), "{text}");
}

fn words(arguments: &[&str]) -> String {
    anstream::adapter::strip_str(&told(arguments, false))
        .to_string()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn a_choice_that_leaves_too_little_is_said_to_and_why() {
    let text = words(&["--workload", "nic", "--cpus", "64"]);
    for said in [
        // First of all.
        "devices: 13, each up to 100 Gb/s Under Linux, no policy that protects leaves 75 % of the throughput on this server: the best, linux-bounce, leaves 20.8 %. Protection ",
        " With linux-bounce, memory sets the pace: the copies take 98.1 % of the 68 GB/s that 1 socket can copy (--calibration). Where it copies 136 GB/s, \
         linux-bounce leaves 40.0 %. ",
        " Strict-ring leaves 99.8 %: a driver that uses the library's queues has it (--on library).",
        " Without the module, Linux's strict leaves 4.9 % of the throughput: too little where the CPUs are busy; lazy leaves ",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
    // Of the library's policies there is a better one, and where nothing is copied memory does not set the pace.
    let text = words(&["--workload", "nic", "--cpus", "64", "--on", "library"]);
    assert!(!text.contains("that protects leaves"), "{text}");
    assert!(text.contains(" With bounce, memory sets the pace: "), "{text}");
    let text = words(&["--workload", "nic", "--cpus", "64", "--policy", "vtd-2024"]);
    assert!(
        text.contains("the best, linux-strict, leaves 4.9 %. ") && !text.contains("memory sets"),
        "{text}"
    );
    assert!(!text.contains("(--on library)"), "no other row was asked for: {text}");
    assert!(!words(&["--cpus", "64"]).contains("that protects leaves"));
}

#[test]
fn the_format_tells_whose_strict_linux_s_is() {
    let arm = words(&["--workload", "nic", "--cpus", "2", "--format", "arm-s1-4k"]);
    assert!(arm.contains("CMD_SYNC of its own"), "{arm}");
    assert!(arm.contains("the only one here that protects"), "{arm}");
    // Where drivers keep their pages mapped, and with which policies page walks set the pace.
    assert!(arm.contains("page_pool"), "{arm}");
    assert!(!words(&["--workload", "nvme", "--cpus", "2"]).contains("page_pool"));
    let busy = words(&["--workload", "nic", "--cpus", "16"]);
    assert!(
        busy.contains(
            "they set the pace. Their page walks are in that: up to 2.1 reads of memory for each page ("
        ),
        "{busy}"
    );
}

/// The library's strict shares waits, which Linux's drivers do not.
#[test]
fn under_linux_the_library_s_strict_is_never_the_choice() {
    let list = ["--workload", "memcached", "--cpus", "64", "--policy", "strict,lazy,swiotlb,passthrough"];
    let text = words(&list);
    // Who names strict has Linux's own, too, and a choice.
    assert!(
        text.contains("Strict is Linux's own (83.8 %), the row linux-strict (the design vtd-2024)"),
        "{text}"
    );
    assert!(text.contains("Choose strict (83.8 %), the only one here that protects"), "{text}");
    assert!(
        words(&[&list[..], &["--on", "library"]].concat())
            .contains("), the only one here that protects: no device ")
    );
}

#[test]
fn what_grows_with_the_cpus_stands_below_the_curves() {
    let text = words(&["--cpus", "32,33,72", "--policy", "strict-ring"]);
    assert!(text.contains(" devices 1 2 3 IOMMUs 1 2 3 sockets 1 1 2 Throughput steps where "), "{text}");
    let text = words(&["--cpus", "1,32", "--policy", "strict-ring"]);
    assert!(
        !text.contains(" devices 1 ") && !text.contains("IOMMUs 1") && !text.contains("Throughput steps"),
        "{text}"
    );
}

#[test]
fn more_iommus_than_devices_are_said_to_be_fewer() {
    let header = |units: &str| {
        let text = words(&["--workload", "nic", "--cpus", "64", "--policy", "strict-ring", "--units", units]);
        text.split_once(", simulated").unwrap().0.to_owned()
    };
    assert_eq!(
        header("200"),
        "nic on 64 CPUs of 1 socket, 13 IOMMUs (--units 200, but no more than there are devices)"
    );
    assert_eq!(header("13"), "nic on 64 CPUs of 1 socket, 13 IOMMUs (--units)");
}

/// A recording has a device for each CPU, and Linux a lock for each device.
#[test]
fn what_linux_s_strict_costs_without_a_shared_lock_is_said_where_devices_share_an_iommu() {
    let text =
        words(&["--workload", "traces/mixed-nvme-e1000e.trace.zst", "--cpus", "64", "--work", "94301ns"]);
    let said = "Linux has a lock for each device: with one for each CPU it would cost 1.3 %. The row strict";
    assert!(text.contains(said), "{text}");
    // A device for each IOMMU.
    assert!(!words(&["--cpus", "64"]).contains("with one for each CPU"));
}

/// What is printed of made tables.
fn printed(change: impl FnOnce(&mut Vec<Table>)) -> String {
    let mut tables = golden::tables();
    change(&mut tables);
    super::render(&tables, &Profile::load("vtd").unwrap(), &Calibration::default(), false)
}

fn plain(change: impl FnOnce(&mut Vec<Table>)) -> String {
    anstream::adapter::strip_str(&printed(change))
        .to_string()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn numbers_of_cpus_are_compared_as_far_as_there_is_room() {
    let of = |count: u32| {
        plain(|tables| {
            *tables = (1..=count)
                .map(|cpus| {
                    let mut table = golden::tables().remove(0);
                    table.machine.cpus = 100 + cpus;
                    table
                })
                .collect();
        })
    };
    assert!(of(9).contains("throughput, % 101 102 103 104 105 106 107 108 CPUs"), "{}", of(9));
    assert!(of(2).contains("throughput, % 101 102 CPUs"));
    assert!(!of(1).contains("throughput, %"));
}

#[test]
fn what_is_extrapolated_is_told_once_and_in_order() {
    let text = plain(|tables| {
        let rows = &mut tables.last_mut().unwrap().rows;
        rows.iter_mut().for_each(|row| row.outcome.inferred.clear());
        rows[1].outcome.inferred = vec!["b".into(), "a".into()];
        rows[2].outcome.inferred = vec!["a".into()];
    });
    assert_eq!(text.matches("Extrapolated").count(), 2, "{text}");
    assert!(text.contains("Extrapolated: a. Extrapolated: b."), "{text}");
}

#[test]
fn what_a_device_does_at_the_most_is_told_unless_it_keeps_up() {
    let pace = |gb_per_s, requests_per_s| {
        plain(|tables| {
            let device = &mut tables.last_mut().unwrap().workload.device;
            (device.gb_per_s, device.requests_per_s) = (gb_per_s, requests_per_s);
        })
    };
    assert!(pace(999.0, 1e12).contains("devices: 97, each up to 7,992 Gb/s"));
    assert!(pace(1e3, 9.0).contains("devices: 97, each up to 9 requests in a second"));
    assert!(pace(1e3, 1e12).contains("devices: 97, as fast as the CPUs need them"));
}

#[test]
fn what_gains_by_protection_loses_nothing() {
    let text = plain(|tables| {
        let table = tables.last_mut().unwrap();
        let mappings = table.workload.requests.iter_mut().flat_map(|request| &mut request.mappings);
        mappings.for_each(|mapping| mapping.shared = false);
        for (name, share) in [("strict", 1.0), ("strict-ring", 1.3)] {
            table.rows.iter_mut().find(|row| row.policy.name == name).unwrap().share = share;
        }
    });
    assert!(text.contains("Choose strict (less than 0.1 %)"), "{text}");
}

#[test]
fn the_slowest_is_named_unless_it_protects_nothing() {
    let text = plain(|tables| tables.last_mut().unwrap().rows[0].outcome.per_s = 1.0);
    assert!(text.contains("; with lazy-2015, waits for lines"), "{text}");
}

#[test]
fn the_policy_to_choose_stands_out_where_there_is_one() {
    let bold = |text: &str| {
        let (_, rows) = text.split_once("policy").unwrap();
        let at = rows.lines().find(|line| line.starts_with(&format!("{}strict", crate::look::BOLD)));
        at.map(|line| anstream::adapter::strip_str(line).to_string().split(' ').next().unwrap().to_owned())
    };
    assert_eq!(bold(&printed(|_| ())).as_deref(), Some("strict-ring"));
    let nothing = printed(|tables| tables.last_mut().unwrap().told.nothing = Some("Nothing is told.".into()));
    assert_eq!(bold(&nothing), None);
    let unknown = plain(|tables| {
        let table = tables.last_mut().unwrap();
        let mappings = table.workload.requests.iter_mut().flat_map(|request| &mut request.mappings);
        mappings.for_each(|mapping| mapping.shared = false);
        table.told.directions = false;
    });
    assert!(unknown.contains("; what else lies in a buffer's pages is not known"), "{unknown}");
}

#[test]
fn machines_are_told_the_same() {
    let text = told(&["--cpus", "4,96", "--policy", "lazy,smmu-2017", "--sockets", "2"], true);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let results = value["results"].as_array().unwrap();
    assert_eq!((results.len(), &value["workload"]), (4, &"memcached".into()));
    let old = &results[3];
    assert_eq!((&old["policy"], &old["cpus"], &old["sockets"]), (&"smmu-2017".into(), &96.into(), &2.into()));
    assert_eq!(old["hottest"], "waits for lines and locks that CPUs share");
    assert!(!old["extrapolated"].as_array().unwrap().is_empty(), "{old}");
}

#[test]
fn what_cpus_share_has_a_name_and_no_line_of_a_source() {
    let said = [
        "alloc/src/vec/mod.rs:1864 < invalidation/mod.rs:178 < invalidation/device_tlb.rs:199 < mapper.rs:348",
        "iova/cpu.rs:7",
        "bounce/swiotlb/slots.rs:1 < bounce/pool/cpu.rs:2",
        "bounce/pool/depot.rs:1",
        "core.rs:1 < domain/space/unmaps.rs:2",
        "a.rs:1 < b.rs:2",
        "",
    ]
    .map(super::verdict::structure);
    assert_eq!(
        said,
        [
            "the queue of invalidations",
            "the allocator of addresses",
            "the swiotlb",
            "the bounce pool",
            "the domain's account",
            "one structure",
            "one structure"
        ]
    );
}

/// A figure of more digits than its column has room for makes the column wider.
#[test]
fn columns_never_touch() {
    let mut tables = crate::golden::tables();
    for row in &mut tables[1].rows {
        row.outcome.spent.shared_ns = 1_106_889_123.0;
        row.outcome.per_s = 2_731_106_889.0;
    }
    let text = super::render(&tables, &Profile::load("vtd").unwrap(), &Calibration::default(), false);
    let text = anstream::adapter::strip_str(&text).to_string();
    let row = text.lines().find(|line| line.starts_with("strict-ring")).unwrap();
    assert_eq!(row.split_whitespace().count(), 9, "{row}");
    assert!(row.contains(" 2,731,106,889 ") && row.contains(" 1,106,889,123 "), "{row}");
    // Nor what stands above them.
    tables[1].rows.iter_mut().for_each(|row| row.outcome.spent.shared_ns = 1.0);
    let text = super::render(&tables, &Profile::load("vtd").unwrap(), &Calibration::default(), false);
    assert!(text.contains(" share of      ns of a request, in or for:\n"), "{text}");
}

/// Of the golden table, Linux's own strict mode with this lock and that.
fn of_linux(locked: f64, unlocked: f64, by_waits: [f64; 2]) -> Table {
    let mut table = crate::golden::tables().pop().unwrap();
    (table.offer, table.own) = (Offer::Module, OwnStrict::of("vtd-ss"));
    let own = table.own.unwrap();
    let like = |share, name| {
        let all = &table.rows[0].outcome;
        let outcome = Outcome { per_s: all.per_s * share, ..all.clone() };
        Row::new(Policy::named(name).unwrap(), outcome, all)
    };
    let rows = |locked, unlocked| {
        vec![like(0.7, "bounce"), like(locked, own.name), like(unlocked, own.unlocked.unwrap())]
    };
    let by_waits = by_waits.map(|unlocked| rows(locked, unlocked));
    let (locked, unlocked) = (like(locked, own.name), like(unlocked, own.unlocked.unwrap()));
    table.rows.push(locked);
    (table.unlocked, table.by_waits) = (Some(unlocked), by_waits);
    table
}

/// What is said of other waits is of Linux's strict with either lock.
#[test]
fn other_waits_are_looked_at_with_each_lock() {
    let said = |table: &Table| {
        let mut all = super::verdict::verdict(table).into_iter();
        all.find(|said| said.starts_with("The choice is the same")).unwrap()
    };
    let same = said(&of_linux(0.1, 0.5, [0.6, 0.4]));
    assert!(same.ends_with(" as assumed. That holds with a lock for each CPU, too."), "{same}");
    let other = said(&of_linux(0.1, 0.9, [0.95, 0.2]));
    let expected = " With a lock for each CPU in Linux's strict, choose strict (10.0 %); where waits are a quarter as long, strict (5.0 %); where four times as long, \
                    bounce (30.0 %).";
    assert!(other.ends_with(expected), "{other}");
}

/// The kernel's code has the same instructions as for a replay, in place of the library's, and CPUs with nothing to do have time for it.
#[test]
fn the_kernel_s_code_takes_its_instructions() {
    let mut table = of_linux(0.1, 0.5, [0.5; 2]);
    let mappings = table.workload.requests.iter_mut().flat_map(|request| &mut request.mappings);
    mappings.for_each(|mapping| mapping.pages = mapping.pages.min(1));
    let cpus = f64::from(table.machine.cpus);
    let mut of = |idle_ns| {
        let row = table.rows.iter_mut().find(|row| row.policy.name == "bounce").unwrap();
        // A request has two mappings of 1,206 instructions, 385.92 ns, where the library took 185.92, besides 100 of a hypervisor.
        (row.share, row.outcome.per_s, row.outcome.spent.idle_ns) = (0.8, cpus * 1e9 / 1_000.0, idle_ns);
        (row.outcome.spent.own_ns, row.outcome.asked_ns) = (285.92, 100.0);
        *row = row.priced(&table.machine, &table.workload, INSTRUCTION_NS);
        let Row { name, outcome, share, .. } = row.run();
        let Spent { own_ns, idle_ns, .. } = outcome.spent;
        let figures = [*share, outcome.per_s / row.outcome.per_s, own_ns, idle_ns];
        (*name, figures.map(|figure| (figure * 1e6).round() / 1e6))
    };
    assert_eq!(of(0.0), ("linux-bounce", [0.666_667, 0.833_333, 485.92, 0.0]));
    assert_eq!(of(500.0), ("linux-bounce", [0.8, 1.0, 485.92, 300.0]));
    let said = super::kernel(&table).unwrap();
    assert!(
        said.contains(": linux-bounce 1,206. Each takes 0.16 ns, as one of a program did on one machine"),
        "{said}"
    );
    assert_eq!(super::kernel(&of_linux(0.1, 0.5, [0.5; 2])), None);
}

/// The headline, the choice and the table have the code that would run. That takes three times as long for `bounce`, and `lazy` costs more.
#[test]
fn under_linux_the_verdict_has_the_code_that_would_run() {
    let text = words(&["--cpus", "64"]);
    for said in [
        "costs this workload 4.0 % (linux-bounce) to 83.8 % (linux-strict) of its throughput on 64 CPUs. Choose bounce (4.0 %), by our module, which has run in QEMU alone so far (docs/linux.md): ",
        "Strict is Linux's own (83.8 %), the row linux-strict (the design vtd-2024): ",
        "With lazy (6.0 %), devices reach",
        "with 1 the library's strict ",
        "What takes the most of a request: with linux-bounce, its own instructions (",
        " The library's own code: passthrough ",
        "The first rows estimate the code of Linux 6.12",
        ": linux-strict 2,604, linux-bounce 1,206, linux-lazy 2,105. Each takes",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let rows = ["linux-strict ", "linux-bounce ", "linux-lazy ", " own code: ", " bounce ", " lazy "];
    let (_, table) = text.split_once(" copies devices ").unwrap();
    let places = rows.map(|row| table.find(row).unwrap());
    assert!(places.is_sorted() && !table.contains(" vtd-2024 "), "{table}");
    // A driver of the library's runs the library's code, and so does all that was not counted.
    for arguments in [&["--on", "library"][..], &["--profile", "smmuv3"]] {
        let text = words(&[&["--cpus", "64"], arguments].concat());
        assert!(!text.contains("linux-bounce") && !text.contains("library's own code:"), "{text}");
    }
    // Curves are of the same rows.
    let text = words(&["--cpus", "1,64"]);
    let (_, curves) = text.split_once(" 1 64 CPUs ").unwrap();
    assert!(curves.contains(" 96.0 linux-lazy ") && curves.contains(" own code: passthrough"), "{curves}");
}

/// The module maps what it does not copy as Linux's strict does, by its own code and with the lock held; and larger mappings take more instructions, as in
/// a replay.
#[test]
fn large_mappings_have_the_code_and_the_lock_that_they_would_have() {
    let table = |arguments: &[&str]| {
        let parsed = Arguments::try_parse_from(["portcullis", "scale"].iter().chain(arguments)).unwrap();
        let Some(Command::Scale(scale)) = parsed.command else { panic!("another command") };
        tables(&scale).unwrap().0.pop().unwrap()
    };
    // 64 pages each.
    let nested = table(&["--workload", "nested", "--cpus", "64"]);
    let row = |table: &Table, name: &str| {
        let row = table.rows.iter().map(Row::run).find(|row| row.name == name).unwrap();
        (row.share, row.outcome.spent)
    };
    let [(strict, in_strict), (bounce, in_bounce)] =
        ["linux-strict", "linux-bounce"].map(|name| row(&nested, name));
    assert!(bounce < strict && strict - bounce < 0.01, "{bounce} {strict}");
    assert!(in_strict.shared_ns > 1_000.0 && (in_bounce.shared_ns / in_strict.shared_ns - 1.0).abs() < 0.05);
    // 2,604 and 63 times 40.4; 2,829 and 63 times 41.6.
    for (spent, instructions) in [(in_strict, 5_149.2), (in_bounce, 5_449.8)] {
        assert!((spent.own_ns - instructions * INSTRUCTION_NS).abs() < 0.1, "{spent:?}");
    }
    assert_eq!(super::verdict::choice(&nested).unwrap().row.name, "linux-strict");
    let text = words(&["--workload", "nested", "--cpus", "64"]);
    assert!(
        text.contains("here they come to: linux-strict 5,149, linux-bounce 5,450, linux-lazy 4,638."),
        "{text}"
    );
    // Of the library none waits with a lock held.
    let (library, spent) =
        row(&table(&["--workload", "nested", "--cpus", "64", "--on", "library"]), "bounce");
    assert!(library > bounce && spent.shared_ns < 0.1, "{library} {spent:?}");
}

/// What is looked at besides has the same code: other waits, one IOMMU, and a lock for each CPU.
#[test]
fn all_that_is_compared_under_linux_has_its_code() {
    let scale = |on| {
        let arguments = ["portcullis", "scale", "--workload", "nic", "--cpus", "64", "--on", on];
        let parsed = Arguments::try_parse_from(arguments).unwrap();
        let Some(Command::Scale(scale)) = parsed.command else { panic!("another command") };
        tables(&scale).unwrap().0.pop().unwrap()
    };
    let table = scale("linux");
    let unlocked = table.unlocked.as_ref().unwrap();
    let [short, long] = &table.by_waits;
    let behind_one = &table.by_units[0].1;
    let compared = [behind_one, short, long].into_iter().flatten().chain([unlocked]);
    let priced: Vec<_> = compared.filter(|row| row.run().share < row.share).map(|row| row.name).collect();
    let expected = [
        "bounce",
        "vtd-2024",
        "bounce",
        "vtd-2024",
        "smmu-2026",
        "bounce",
        "vtd-2024",
        "smmu-2026",
        "smmu-2026",
    ];
    assert_eq!(priced, expected);
    assert!(scale("library").rows.iter().all(|row| row.of_kernel.is_none()));
}

/// What is assumed of a machine, and at what the choice is another.
#[test]
fn the_choice_has_a_border_in_each_thing_that_is_assumed() {
    let nic = |more: &[&str]| words(&[&["--workload", "nic", "--cpus", "64"], more].concat());
    let text = nic(&[]);
    for said in [
        " 2 IOMMUs (one for each 32 CPUs; --units), simulated ",
        " A copied KiB is assumed to take 75 ns (68 GB/s a socket; --calibration): from 270 ns (19 GB/s a socket) on, choose strict (95.1 %). ",
        " The choice is the same if instructions of the kernel take half as long (78.9 %) or twice as long (79.7 %) as assumed. ",
        " The choice depends on the number of IOMMUs (2 here; --units): with 13, one for each device, choose strict (70.0 %). `portcullis doctor` says how many a machine has, ",
        " Behind another number of IOMMUs (--units): with 1 the library's strict costs 39.3 %, linux-strict costs 97.5 %; with 8 the library's strict costs \
         40.1 %, linux-strict costs 81.0 %; with 13, one for each device, the library's strict costs 39.3 %, linux-strict costs 70.0 %. ",
        " Without protection its devices move 160 GB/s, of about 204 that the memory of 1 socket moves: ",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let text = nic(&["--units", "13"]);
    for said in [
        " 13 IOMMUs (--units), simulated ",
        " Choose strict (70.0 %)",
        " linux-bounce leaves 39.9 %: then choose bounce. ",
        "; with 8 the library's strict costs 40.1 %, linux-strict costs 81.0 %. ",
        " The choice depends on the number of IOMMUs (13 here; --units): with 1 choose bounce (79.2 %); with 8 choose bounce (79.2 %). ",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
    // What copies take is what a file has.
    let slow = tempfile::NamedTempFile::new().unwrap();
    let mut calibration = Calibration::default();
    calibration.copy_cold_ns.value *= 4.0;
    calibration.socket_copy_gb_per_s.value /= 4.0;
    std::fs::write(&slow, serde_json::to_string(&calibration).unwrap()).unwrap();
    let text = nic(&["--calibration", slow.path().to_str().unwrap()]);
    assert!(text.contains(" Choose strict (95.1 %)"), "{text}");
    let text = words(&["--workload", "memcached", "--cpus", "64"]);
    assert!(!text.contains("depends on the number") && !text.contains("its devices move"), "{text}");
    assert!(text.contains(": the choice is the same at 1 ns and at 1,000 ns."), "{text}");
}

#[test]
fn explained_are_the_counts_and_where_each_price_comes_from() {
    let parsed = Arguments::try_parse_from(["portcullis", "scale", "--workload", "nic"]).unwrap();
    let Some(Command::Scale(scale)) = parsed.command else { panic!("another command") };
    let (tables, profile, calibration) = tables(&scale).unwrap();
    let text = explain(tables.last().unwrap(), &profile, &calibration);
    let words = |start: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(start)).unwrap_or_default();
        line.split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(words("linux-bounce"), ["linux-bounce", "1,206", "0.0", "%", "20.5", "%", "98.1", "%"]);
    assert_eq!(words("strict "), ["strict", "-", "100.0", "%", "86.8", "%", "0.0", "%"]);
    for said in [
        "An instruction of the kernel takes 0.16 ns",
        "\nThe waits of profile vtd",
        "\n  copy_cold_ns: 142 - ",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
}
