//! How Linux records mappings, by version: a recording for each row of the table in `docs/replay.md`, which names its file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use portcullis_trace::anonymize::anonymize;
use portcullis_trace::event::Direction;
use portcullis_trace::replay::{Mode, Options, Profile};
use portcullis_trace::{Era, Input, OpKind, Origin, ReadOptions, Summary};

use crate::common::{Played, policy, read, read_in, run};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/eras")
}

fn text(name: &str) -> String {
    std::fs::read_to_string(folder().join(format!("{name}.trace"))).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn recording(name: &str) -> (Vec<Played>, Summary) {
    read(&text(name))
}

/// The properties of a recording.
struct Row {
    name: &'static str,
    /// How mappings are recorded, and the oddities.
    eras: &'static [Era],
    /// Mappings made, ended, and the bytes in them.
    mapped: (u64, u64, u64),
    devices: &'static [&'static str],
    /// Whether it tells the costs of copying policies, and of the others.
    known: (bool, bool),
}

const fn row(
    name: &'static str,
    eras: &'static [Era],
    mapped: (u64, u64, u64),
    devices: &'static [&'static str],
    known: (bool, bool),
) -> Row {
    Row { name, eras, mapped, devices, known }
}

const ALL: (bool, bool) = (true, true);
const NO_COPIES: (bool, bool) = (false, true);

const ROWS: &[Row] = &[
    row("3.12-sizes-hexadecimal", &[Era::IommuAlone], (2, 2, 0x3000), &["iommu"], NO_COPIES),
    row("3.12-maps-without-size", &[Era::Nothing, Era::MapsWithoutSize], (0, 0, 0), &[], ALL),
    row(
        "4.18-vtd-vfio-alone",
        &[Era::IommuAlone],
        (4, 4, 0x2000 + 0xc1000 + 0x200000),
        &["0000:5e:00.0"],
        NO_COPIES,
    ),
    row("5.4-vtd", &[Era::IommuAlone], (2, 2, 0x4000), &["0000:3b:00.0"], NO_COPIES),
    row("6.1-iommu-alone", &[Era::IommuAlone], (2, 2, 0x4000), &["iommu"], NO_COPIES),
    row("6.12-dma-and-iommu", &[Era::DmaAndIommu], (1, 1, 512), &["0000:00:04.0"], ALL),
    row(
        "6.12-allocations-without-direction",
        &[Era::DmaAndIommu, Era::AllocationsWithoutDirection],
        (2, 2, 262_144 + 1500),
        &["0000:09:00.0"],
        ALL,
    ),
    row("6.12-registers", &[Era::DmaAndIommu], (1, 1, 4096), &["0000:0a:00.0"], ALL),
    row("6.12-lists-that-failed", &[Era::DmaAndIommu], (2, 2, 1024), &["0000:00:04.0"], ALL),
    row("6.12-passthrough", &[Era::Untranslated], (1, 1, 512), &["0000:00:04.0"], ALL),
    row("6.12-swiotlb", &[Era::DmaAlone], (1, 1, 512), &["0000:00:04.0"], ALL),
    row(
        "6.12-vfio-beside",
        &[Era::Mixed],
        (2, 2, 65_600),
        &["0000:00:05.0", "0000:00:03.0", "0000:00:1f.0"],
        NO_COPIES,
    ),
    row(
        "6.13-allocations-unreadable",
        &[Era::DmaAndIommu, Era::AllocationsUnreadable],
        (2, 2, 8192 + 4096),
        &["0000:07:00.0"],
        ALL,
    ),
    row("6.13-allocations-that-failed", &[Era::DmaAndIommu], (1, 1, 4096), &["0000:05:00.0"], ALL),
    row(
        "6.17-nvme-linked",
        &[Era::Mixed],
        (16, 16, 8 * (0x20000 + 0x1000)),
        &["0000:04:00.0", "iommu"],
        NO_COPIES,
    ),
    row("6.17-nvme-linked-dma-events-alone", &[Era::DmaAlone], (8, 8, 8 * 0x1000), &["0000:04:00.0"], ALL),
    row(
        "6.17-nvme-passthrough",
        &[Era::Untranslated],
        (40, 40, 8 * (0x20000 + 0x1000)),
        &["0000:04:00.0"],
        ALL,
    ),
    row("6.18-registers", &[Era::DmaAndIommu], (1, 1, 4096), &["0000:0a:00.0"], ALL),
    row("7.0-unmaps-alone", &[Era::UnmapsAlone], (8, 8, 8 * 0x1000), &["0000:04:00.0"], (true, false)),
    row("7.0-network-card", &[Era::UnmapsAlone], (4, 4, 6000), &["0000:05:00.0"], ALL),
    row("7.1-maps-that-failed", &[Era::DmaAndIommu], (1, 1, 512), &["0000:00:04.0"], ALL),
];

#[test]
fn each_is_known_by_what_is_met() {
    for row in ROWS {
        let (_, summary) = recording(row.name);
        let eras: Vec<_> = summary.recorded().iter().map(|recorded| recorded.era).collect();
        assert_eq!(eras, row.eras, "{}", row.name);
        let mapped = (summary.mappings(), summary.mappings_ended(), summary.bytes_mapped);
        assert_eq!(mapped, row.mapped, "{}: {summary:#?}", row.name);
        assert_eq!(summary.devices, row.devices, "{}", row.name);
        assert_eq!((summary.copies_known(), summary.costs_known()), row.known, "{}", row.name);
        assert_eq!((summary.warnings, summary.skipped), (0, 0), "{}", row.name);
    }
}

/// And the table in `docs` has nothing else.
#[test]
fn each_row_of_the_documented_table_has_its_recording() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/replay.md");
    let document = std::fs::read_to_string(document).unwrap();
    let (_, table) = document.split_once("### What Linux records").expect("the section");
    let table = table.split("\n#").next().unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| ") && !line.contains("| recorded |"));
    let mut named = BTreeSet::new();
    for line in rows {
        let names: Vec<_> = line.split('`').filter_map(|word| word.strip_suffix(".trace")).collect();
        assert!(!names.is_empty(), "no recording tests {line}");
        named.extend(names);
    }
    let files: BTreeSet<String> = folder()
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap().trim_end_matches(".trace").to_owned())
        .collect();
    let tested: BTreeSet<_> = ROWS.iter().map(|row| row.name.to_owned()).collect();
    assert_eq!(files, tested, "each recording has a test");
    assert_eq!(named, files.iter().map(String::as_str).collect(), "each recording is in the table");
}

/// A device's mappings by `dma_iova_link` are not known to be its own, so `--device` leaves them out, and no result may claim to be
/// complete then.
#[test]
fn what_may_be_of_the_device_that_is_asked_for_is_not_nothing() {
    let of = |name: &str, device: &str| {
        let options = ReadOptions { device: Some(device.into()), ..ReadOptions::default() };
        let (_, summary) = read_in(text(name).as_bytes(), options, 1000).unwrap();
        let known = (summary.copies_known(), summary.costs_known());
        (summary.recorded()[0].era, summary.mappings(), summary.hidden(), known)
    };
    assert_eq!(of("6.17-nvme-linked", "0000:04:00.0"), (Era::Mixed, 8, 8, (false, false)));
    assert_eq!(of("6.17-nvme-linked", "iommu"), (Era::IommuAlone, 8, 0, NO_COPIES));
    // The attached one is another.
    assert_eq!(of("6.12-vfio-beside", "0000:00:05.0").2, 0);
}

fn options() -> Options {
    Options::new(Profile::load("vtd").unwrap())
}

#[test]
fn a_mapping_of_user_space_beside_others_ends_when_it_ends() {
    let report = run("vfio", text("6.12-vfio-beside").as_bytes(), &options());
    // 64 KiB for 10 s, and 64 bytes for 10.5 s.
    assert_eq!(policy(&report, "passthrough").exposure.stale_byte_s.round(), 656_032.0);
}

#[test]
fn allocations_are_for_both_directions_and_registers_are_not_copied() {
    for name in ["6.12-allocations-without-direction", "6.13-allocations-unreadable"] {
        let (ops, _) = recording(name);
        let OpKind::Map { dir, origin, .. } = &ops[0].0.kind else { panic!("{name}: {:?}", ops[0]) };
        assert_eq!((*dir, *origin), (Direction::Bidirectional, Origin::Coherent), "{name}");
        assert_eq!(ops[0].0.device, ops[1].0.device, "{name}");
    }
    for name in ["6.12-registers", "6.18-registers"] {
        let report = run(name, text(name).as_bytes(), &options());
        assert_eq!(policy(&report, "bounce").peak_bounce_bytes, 0, "{name}");
        assert_eq!(
            policy(&report, "bounce").invalidations,
            policy(&report, "strict").invalidations,
            "{name}"
        );
    }
}

#[test]
fn recordings_without_private_data_are_of_the_same_era() {
    for row in ROWS {
        let mut out = Vec::new();
        anonymize(|| Input::from_bytes("private", text(row.name).into_bytes()), &mut out).unwrap();
        let written = String::from_utf8(out).unwrap();
        let (_, summary) = read(&written);
        let mapped = (summary.mappings(), summary.mappings_ended(), summary.bytes_mapped);
        assert_eq!(mapped, row.mapped, "{}: {written}", row.name);
        assert_eq!((summary.copies_known(), summary.costs_known()), row.known, "{}: {written}", row.name);
        assert_eq!(summary.recorded()[0].era, row.eras[0], "{}: {written}", row.name);
        let registers = text(row.name).contains("attrs=MMIO");
        assert_eq!(written.contains("attrs=MMIO"), registers, "{written}");
    }
}

/// Linked memory is mapped without a copy: with `iommu=pt` each of these is copied.
#[test]
fn what_has_no_direction_is_not_copied() {
    let mut options = options();
    options.policies.retain(|mode| *mode == Mode::Bounce);
    let bounced = |name: &str| {
        let report = run(name, text(name).as_bytes(), &options);
        let bounce = policy(&report, "bounce");
        (bounce.operations, bounce.invalidations)
    };
    assert_eq!(bounced("6.17-nvme-linked"), (16, 8));
    assert_eq!(bounced("6.17-nvme-passthrough"), (40, 0));
}
