//! What `status` says.

use super::{Fake, YES};
use crate::linux::args::Status;
use crate::linux::{status, table};

const FOLDER: &str = "sys/kernel/portcullis/devices/0000:00:04.0";

/// The disk protected, with all that the module says of it.
fn protected() -> Fake {
    let fake = Fake::new();
    fake.protect("nvme0n1", "policy=bounce threshold=65536", YES).unwrap();
    for (name, text) in [
        ("driver", "nvme"),
        ("group", "1"),
        ("linux_mode", "passthrough"),
        ("mask", "0xffffffffffffffff"),
        ("maps", "1234567"),
        ("unmaps", "1234500"),
        ("syncs", "0"),
        ("copied_bytes", "5056786432"),
        ("copies", "1234567"),
        ("mapped", "0"),
        ("waits", "3"),
        ("iommu_maps", "4"),
        ("iommu_unmaps", "5"),
        ("flushes", "6"),
        ("open_bytes", "274432"),
        ("open_mappings", "67"),
        ("exposed_bytes", "0"),
        ("pool_bytes", "16777216"),
        ("book_bytes", "1258291"),
        ("lost_bytes", "0"),
        ("errors", "0"),
        ("map_ns", "123456700"),
        ("unmap_ns", "61725000"),
    ] {
        fake.file(&format!("{FOLDER}/{name}"), &format!("{text}\n"));
    }
    fake
}

fn asked(device: Option<&str>) -> Status {
    Status { device: device.map(str::to_owned), json: false }
}

fn text(fake: &Fake, device: Option<&str>) -> String {
    let text = table::text(&fake.host().status(&asked(device)).unwrap(), true, 80);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
    text
}

fn json(fake: &Fake) -> serde_json::Value {
    let found = fake.host().status(&asked(None)).unwrap();
    serde_json::from_str(&status::json(&found, &asked(None)).unwrap()).unwrap()
}

/// The cell beside `name`.
fn row(text: &str, name: &str) -> String {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("│ {name} ")))
        .unwrap_or_else(|| panic!("{name}: {text}"));
    line.split('┆').nth(1).unwrap().trim_end_matches('│').trim().to_owned()
}

#[test]
fn a_protected_device_is_told_with_what_it_did() {
    let fake = protected();
    fake.file("sys/bus/pci/devices/0000:00:05.0/removable", "removable\n");
    // A partition is a part of its disk.
    fake.file(
        &format!("{}/partition", fake.child("block", "0000:00:04.0", "nvme/nvme0/nvme0n1/nvme0n1p1")),
        "1\n",
    );
    let text = text(&fake, None);
    assert!(text.starts_with("0000:00:04.0 (nvme0n1)\n"), "{text}");
    for (name, expected) in [
        ("policy", "bounce, copies up to 64 KiB"),
        ("driver", "nvme"),
        ("Linux had", "passthrough"),
        ("mappings", "1,234,567"),
        ("copied", "5.1 GB, in 1,234,567 copies"),
        ("open now", "274 kB in 67 mappings"),
        ("exposed beside", "none"),
        ("hardware waits", "3"),
        ("cost", "map 100 ns, unmap 50 ns"),
        ("memory", "16.8 MB for copies, 1.3 MB for books"),
        ("errors", "none"),
    ] {
        assert_eq!(row(&text, name), expected, "{text}");
    }
    assert!(!text.contains("addresses lost"), "{text}");
    let others: Vec<&str> = text.lines().skip_while(|line| !line.contains("not protected")).collect();
    assert!(
        others.iter().any(|line| line.contains("0000:00:05.0")
            && line.contains("eth0")
            && line.contains("virtio-pci")
            && line.contains("lazy")
            && line.contains("external")),
        "{text}"
    );
    assert!(
        others.iter().any(|line| line.contains("0000:00:06.0"))
            && others.iter().all(|line| !line.contains("0000:00:04.0")),
        "{text}"
    );
    fake.file(&format!("{FOLDER}/lost_bytes"), "4096\n");
    fake.file(&format!("{FOLDER}/errors"), "2\n");
    let text = self::text(&fake, Some("nvme0n1"));
    assert_eq!(
        (row(&text, "addresses lost"), row(&text, "errors")),
        ("4 kB".into(), "2: dmesg tells them".into())
    );
    assert!(!text.contains("not protected") && !text.contains("0000:00:05.0"), "{text}");
    assert!(self::text(&fake, Some("eth0")).contains("protects none of these"));
    // A version of many words takes more than a line, each from the margin on.
    fake.file(&format!("{FOLDER}/version"), &"of the first day ".repeat(8));
    let text = self::text(&fake, Some("eth0"));
    let said: Vec<_> = text.lines().take_while(|line| !line.is_empty()).collect();
    assert!(said.len() > 1 && said.iter().all(|line| !line.starts_with(' ')), "{text}");
    assert!(fake.host().status(&asked(Some("eth9"))).is_err());
}

#[test]
fn what_the_module_does_not_tell_is_a_dash_and_null() {
    let fake = protected();
    for name in [
        "driver",
        "copied_bytes",
        "open_bytes",
        "map_ns",
        "unmaps",
        "waits",
        "threshold",
        "device",
        "linux_mode",
    ] {
        std::fs::remove_file(fake.root.join(FOLDER).join(name)).unwrap();
    }
    fake.file(&format!("{FOLDER}/errors"), "many\n");
    fake.file(&format!("{FOLDER}/maps"), "-1\n");
    let text = text(&fake, None);
    for (name, expected) in [
        ("driver", "-"),
        ("policy", "bounce, -"),
        ("Linux had", "-"),
        ("mappings", "-"),
        ("hardware waits", "-"),
        ("errors", "-"),
        ("copied", "-, in 1,234,567 copies"),
        ("open now", "- in 67 mappings"),
        ("cost", "map -, unmap -"),
    ] {
        assert_eq!(row(&text, name), expected, "{text}");
    }
    let json = json(&fake);
    let device = &json["protected"][0];
    assert_eq!(
        (&device["counters"]["errors"], &device["counters"]["waits"]),
        (&serde_json::Value::Null, &serde_json::Value::Null)
    );
    assert_eq!((&device["counters"]["copies"], &device["uses"]), (&1_234_567.into(), &serde_json::json!([])));
}

#[test]
fn a_device_that_goes_away_while_it_is_read_is_left_out() {
    let fake = protected();
    *fake.gone.borrow_mut() = Some(("maps", fake.root.join(FOLDER)));
    let found = fake.host().status(&asked(None)).unwrap();
    assert!(found.protected.is_empty(), "{found:?}");
    assert!(text(&fake, None).contains("not protected"));
}

#[test]
fn hostile_names_are_shown_and_not_obeyed() {
    let fake = protected();
    let evil = "e\u{1b}[2J\u{202e}\u{9b}1m";
    fake.file(&format!("{FOLDER}/driver"), &format!("{evil}\nsecond line\n"));
    fake.file(&format!("{FOLDER}/policy"), &format!("{evil}\n"));
    fake.file(&format!("{FOLDER}/linux_mode"), evil);
    fake.file("sys/kernel/portcullis/rules", &format!("{evil}\n\u{1b}]0;t\u{7}\n"));
    fake.child("net", "0000:00:04.0", &format!("net/{evil}"));
    fake.child("net", "0000:00:06.0", &format!("net/{evil}2"));
    fake.pci(&format!("0000:00:08.0{evil}"), "8", Some(evil));
    std::fs::create_dir_all(fake.root.join("sys/kernel/portcullis/devices").join(evil)).unwrap();
    let text = text(&fake, None);
    assert!(!text.contains(['\u{202e}', '\u{1b}', '\u{9b}']), "{text}");
    // Of the driver's name, the policy's and Linux's mode, of the interface and of the rule.
    assert!(text.matches(r"e\u{1b}[2J\u{202e}\u{9b}1m").count() >= 5, "{text}");
    let found = fake.host().status(&asked(None)).unwrap();
    let json = status::json(&found, &asked(None)).unwrap();
    assert!(!json.contains(['\u{202e}', '\u{1b}', '\u{9b}']), "{json}");
    let read: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(read["protected"][0]["policy"], evil, "what is read is what stood there");
}

#[test]
fn without_the_module_it_says_how_to_get_it() {
    let fake = Fake::new();
    assert!(text(&fake, None).contains("The module portcullis (0.1.0) is loaded, and protects none"));
    std::fs::remove_dir_all(fake.root.join("sys/kernel/portcullis")).unwrap();
    let text = text(&fake, None);
    assert!(text.contains("The module portcullis is not loaded") && text.contains("docs/linux.md"), "{text}");
    assert!(text.contains("0000:00:04.0") && text.contains("0000:00:06.0"), "{text}");
    assert_eq!(
        (json(&fake)["module"]["loaded"].as_bool(), &json(&fake)["protected"]),
        (Some(false), &serde_json::json!([]))
    );
    // A machine without an IOMMU.
    let fake = Fake::new();
    std::fs::remove_dir_all(fake.root.join("sys/kernel/iommu_groups")).unwrap();
    for device in ["04", "05", "06"] {
        std::fs::remove_file(
            fake.root.join(format!("sys/devices/pci0000:00/0000:00:{device}.0/iommu_group")),
        )
        .unwrap();
    }
    assert_eq!(self::text(&fake, None).matches("no IOMMU").count(), 3);
}

/// Bridges do no DMA of their own.
#[test]
fn bridges_are_not_told() {
    let fake = Fake::new();
    fake.pci("0000:00:01.0", "9", Some("pcieport"));
    fake.file("sys/bus/pci/devices/0000:00:01.0/class", "0x060400\n");
    // A port, the bridge to the processor, one to an older bus, and one of no kind.
    for class in ["0x060400", "0x060000", "0x060100", "0x068000"] {
        fake.file("sys/bus/pci/devices/0000:00:01.0/class", &format!("{class}\n"));
        assert!(!text(&fake, None).contains("0000:00:01.0"), "{class}");
    }
    fake.file("sys/bus/pci/devices/0000:00:01.0/class", "0x080600\n");
    assert!(text(&fake, None).contains("0000:00:01.0"));
}

/// Of counters no two of which are the same, so that none stands for another.
#[test]
fn each_row_is_of_its_own_counters() {
    let fake = protected();
    for (name, text) in [
        ("maps", "1001"),
        ("unmaps", "77"),
        ("syncs", "19"),
        ("copied_bytes", "7000"),
        ("copies", "5"),
        ("mapped", "23"),
        ("waits", "13"),
        ("iommu_maps", "29"),
        ("iommu_unmaps", "31"),
        ("flushes", "37"),
        ("open_bytes", "9000"),
        ("open_mappings", "3"),
        ("exposed_bytes", "11000"),
        ("pool_bytes", "15000"),
        ("book_bytes", "17000"),
        ("lost_bytes", "1"),
        ("errors", "1"),
        ("map_ns", "300300"),
        ("unmap_ns", "3465"),
    ] {
        fake.file(&format!("{FOLDER}/{name}"), &format!("{text}\n"));
    }
    let said = text(&fake, Some("nvme0n1"));
    for (name, expected) in [
        ("mappings", "1,001"),
        ("copied", "7 kB, in 5 copies"),
        ("open now", "9 kB in 3 mappings"),
        ("exposed beside", "11 kB"),
        ("hardware waits", "13"),
        ("cost", "map 300 ns, unmap 45 ns"),
        ("memory", "15 kB for copies, 17 kB for books"),
        ("errors", "1: dmesg tells them"),
        ("addresses lost", "1 byte"),
    ] {
        assert_eq!(row(&said, name), expected, "{said}");
    }
    // What was never called has no mean; and what the module does not tell is a dash.
    fake.file(&format!("{FOLDER}/unmaps"), "0\n");
    std::fs::remove_file(fake.root.join(FOLDER).join("waits")).unwrap();
    let said = text(&fake, Some("nvme0n1"));
    assert_eq!(
        (row(&said, "cost"), row(&said, "hardware waits")),
        ("map 300 ns, unmap -".into(), "-".into())
    );
}

#[test]
fn a_policy_is_told_with_the_figure_that_is_its_own() {
    let fake = protected();
    fake.file("sys/bus/pci/devices/0000:00:04.0/removable", "removable\n");
    for (policy, expected) in [
        ("strict", "strict"),
        ("lazy", "lazy, up to 10,000 us open"),
        ("bounce", "bounce, copies up to 64 KiB"),
        ("auto", "auto, copies up to 64 KiB"),
        ("passthrough", "passthrough"),
    ] {
        fake.file(&format!("{FOLDER}/policy"), &format!("{policy}\n"));
        let said = text(&fake, None);
        assert_eq!(row(&said, "policy"), expected, "{said}");
        assert!(said.starts_with("0000:00:04.0 (nvme0n1), behind an external port\n"), "{said}");
    }
}

#[test]
fn linux_s_modes_have_the_words_of_the_command_line() {
    let fake = Fake::new();
    let device = fake.host().find("eth0").unwrap();
    for (kind, expected) in
        [("DMA", "strict"), ("DMA-FQ", "lazy"), ("identity", "passthrough"), ("unmanaged", "unmanaged")]
    {
        fake.file("sys/kernel/iommu_groups/2/type", &format!("{kind}\n"));
        assert_eq!(fake.host().linux_mode(&device).as_deref(), Some(expected));
        let said = text(&fake, Some("eth0"));
        assert!(said.contains(&format!("┆ {expected} ")), "{said}");
    }
}

/// One of PCI, which is among all devices, and one of another bus, which is not.
#[test]
fn a_device_that_is_asked_for_is_told_once() {
    let fake = Fake::new();
    let path = "sys/devices/platform/fe9c0000.ethernet";
    fake.on_bus("platform", "fe9c0000.ethernet", path, "12", Some("dwmac"));
    for (asked_for, name) in [("eth0", "0000:00:05.0"), ("platform/fe9c0000.ethernet", "fe9c0000.ethernet")] {
        let found = fake.host().status(&asked(Some(asked_for))).unwrap();
        let names: Vec<&str> = found.unprotected.iter().map(|seen| seen.device.as_str()).collect();
        assert_eq!((names, found.protected.len()), (vec![name], 0));
    }
}
