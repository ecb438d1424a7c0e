//! Whole runs of the commands on the made machine, against `tests/whole/linux.txt`: all that each writes, says and asks, and how it ends, also
//! where any of its writes fails. With `PORTCULLIS_WRITE_TABLES=1` the test writes the file.

use std::fmt::{Display, Write};
use std::path::Path;

use super::{ASK, Fake, How, KEEP, Modprobe, YES};
use crate::golden::files::is_golden;
use crate::linux::args::{Protect, Status, Unprotect};
use crate::linux::{status, table};

/// What `command` does on a machine that `change` has changed.
fn told<T, E: Display>(
    change: impl Fn(&Fake),
    command: impl Fn(&Fake) -> Result<T, E>,
    failing: Option<usize>,
) -> (usize, String) {
    let fake = Fake::new();
    change(&fake);
    fake.writes.borrow_mut().clear();
    fake.said.borrow_mut().clear();
    fake.questions.borrow_mut().clear();
    fake.failing.set(failing);
    let ended = command(&fake);
    let mut text = String::new();
    for (mark, lines) in [('>', &fake.writes), ('=', &fake.said), ('?', &fake.questions)] {
        for line in lines.borrow().iter().flat_map(|text| text.lines()) {
            writeln!(text, "  {mark} {line}").unwrap();
        }
    }
    if let Ok(kept) = std::fs::read_to_string(fake.root.join("etc/modprobe.d/portcullis.conf")) {
        kept.lines().skip(1).for_each(|line| writeln!(text, "  : {line}").unwrap());
    }
    if let Err(error) = ended {
        writeln!(text, "  ! {error}").unwrap();
    }
    (
        fake.writes.borrow().len(),
        text.replace(&fake.root.display().to_string(), "ROOT").replace(env!("CARGO_PKG_VERSION"), "VERSION"),
    )
}

/// A second device in the disk's group, with a driver, and a file system on the disk.
fn busy(fake: &Fake) {
    fake.pci("0000:00:04.1", "1", Some("e1000e"));
    fake.file("sys/devices/pci0000:00/0000:00:04.1/class", "0x020000\n");
    fake.child("block", "0000:00:04.0", "nvme/nvme0/nvme0n1/nvme0n1p2");
    fake.link("sys/dev/block/259:2", "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p2");
    fake.mount("/srv/data", "259:2", "ext4", "/dev/root");
}

fn protected(fake: &Fake) {
    busy(fake);
    fake.protect("nvme0n1", "policy=lazy window_us=250", KEEP).unwrap();
}

#[test]
fn commands_do_what_they_did() {
    let mut text = String::new();
    type Change = (&'static str, fn(&Fake));
    let changes: [Change; 9] = [
        ("the machine", |_| ()),
        ("a busy disk", busy),
        ("a protected disk", protected),
        ("yes", |fake| {
            busy(fake);
            fake.answer.set(Some(true));
        }),
        ("no", |fake| fake.answer.set(Some(false))),
        ("nobody's", |fake| fake.is_root.set(false)),
        ("no module", |fake| std::fs::remove_dir_all(fake.root.join("sys/kernel/portcullis")).unwrap()),
        ("behind a port", |fake| fake.file("sys/bus/pci/devices/0000:00:04.0/removable", "removable\n")),
        ("no group", |fake| {
            std::fs::remove_file(fake.root.join("sys/devices/pci0000:00/0000:00:04.0/iommu_group")).unwrap()
        }),
    ];
    type Command = (&'static str, fn(&Fake) -> Result<(), String>);
    fn said(result: Result<(), impl Display>) -> Result<(), String> {
        result.map_err(|error| error.to_string())
    }
    const RULE: How = How { yes: false, keep: true };
    let commands: [Command; 8] = [
        ("protect nvme0n1 strict", |fake| said(fake.protect("nvme0n1", "policy=strict", ASK))),
        ("protect 00:04.0 bounce 8192 --yes", |fake| {
            said(fake.protect("00:04.0", "policy=bounce threshold=8192", YES))
        }),
        ("protect nvme0n1 lazy 250 --yes --keep", |fake| {
            said(fake.protect("nvme0n1", "policy=lazy window_us=250", KEEP))
        }),
        ("protect driver:nvme auto --keep", |fake| said(fake.protect("driver:nvme", "policy=auto", RULE))),
        ("protect untrusted strict", |fake| said(fake.protect("untrusted", "policy=strict", ASK))),
        ("unprotect nvme0n1 --yes", |fake| said(fake.unprotect("nvme0n1", YES))),
        ("unprotect nvme0n1 --yes --keep", |fake| said(fake.unprotect("nvme0n1", KEEP))),
        ("unprotect eth0", |fake| said(fake.unprotect("eth0", ASK))),
    ];
    for (machine, change) in changes {
        for (typed, command) in commands {
            let (writes, all) = told(change, command, None);
            writeln!(text, "{machine}: {typed}\n{all}").unwrap();
            if !["a busy disk", "a protected disk"].contains(&machine) {
                continue;
            }
            for number in 0..writes {
                let (_, all) = told(change, command, Some(number));
                let last = all
                    .lines()
                    .filter(|line| line.contains("  ! ") || line.contains("  : ") || line.contains("  > "));
                let last: Vec<&str> = last.skip(number).collect();
                writeln!(text, "where write {number} fails\n{}\n", last.join("\n")).unwrap();
            }
        }
    }
    for (about, answer) in [
        ("loads", Modprobe::Loads),
        ("loads nothing", Modprobe::LoadsNothing),
        ("is not there", Modprobe::IsNotThere),
        (
            "finds nothing",
            Modprobe::Says("modprobe: FATAL: Module portcullis not found in directory /lib/modules"),
        ),
        (
            "has no key",
            Modprobe::Says("modprobe: ERROR: could not insert 'portcullis': Key was rejected by service"),
        ),
        (
            "needs a key",
            Modprobe::Says("modprobe: ERROR: could not insert 'portcullis': Required key not available"),
        ),
        ("fails", Modprobe::Says("modprobe: ERROR: Invalid\x1b argument")),
    ] {
        let change = |fake: &Fake| {
            fake.modprobe.set(answer);
            std::fs::remove_dir_all(fake.root.join("sys/kernel/portcullis")).unwrap();
        };
        let (_, all) = told(change, |fake| said(fake.protect("00:06.0", "policy=strict", ASK)), None);
        writeln!(text, "modprobe {about}\n{all}").unwrap();
    }
    for error in
        [libc::ENODEV, libc::EOPNOTSUPP, libc::EBUSY, libc::ENOSPC, libc::EINVAL, libc::ENOMEM, libc::EPERM]
    {
        for (machine, change) in [("busy", busy as fn(&Fake)), ("protected", protected)] {
            let refusing = |fake: &Fake| {
                change(fake);
                fake.refuse("sys/kernel/portcullis/", error);
            };
            for (typed, command) in &commands[1..7] {
                if machine == "busy" || typed.starts_with("unprotect") {
                    let (_, all) = told(refusing, command, None);
                    let error_said = all.lines().find(|line| line.starts_with("  ! ")).unwrap_or("  done");
                    writeln!(text, "errno {error}, {machine}: {typed}\n{error_said}").unwrap();
                }
            }
        }
    }
    for name in [
        "",
        "eth1",
        "04:00.0",
        "0000:00:04",
        "/dev/sda",
        "../etc",
        "pci/0000:00:09.0",
        "class:0108",
        "driver:",
        "all",
        "a\x1bb",
    ] {
        let (_, all) = told(|_| (), |fake| said(fake.protect(name, "policy=strict", ASK)), None);
        writeln!(text, "protect {name:?}\n{all}").unwrap();
    }
    is_golden(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/whole/linux.txt"), &text);
}

#[test]
fn a_status_is_told_as_before() {
    let mut text = String::new();
    for (about, change) in [
        ("nothing", (|_| ()) as fn(&Fake)),
        ("a disk", protected),
        ("both", |fake| {
            protected(fake);
            fake.protect("eth0", "policy=bounce threshold=65536", YES).unwrap();
            for (at, name) in [
                "mask",
                "maps",
                "unmaps",
                "syncs",
                "copied_bytes",
                "copies",
                "mapped",
                "waits",
                "iommu_maps",
                "iommu_unmaps",
                "flushes",
                "open_bytes",
                "open_mappings",
                "exposed_bytes",
                "pool_bytes",
                "book_bytes",
                "lost_bytes",
                "errors",
                "map_ns",
                "unmap_ns",
            ]
            .into_iter()
            .enumerate()
            {
                fake.file(
                    &format!("sys/kernel/portcullis/devices/0000:00:05.0/{name}"),
                    &format!("{}\n", 12_345_u64 << (2 * at)),
                );
            }
        }),
    ] {
        for device in [None, Some("nvme0n1"), Some("eth0"), Some("absent")] {
            let fake = Fake::new();
            change(&fake);
            let asked = Status { device: device.map(str::to_owned), json: false };
            writeln!(text, "{about}: status {}", device.unwrap_or_default()).unwrap();
            match fake.host().status(&asked) {
                Ok(found) => {
                    for (unicode, columns) in [(true, 80), (false, 80), (true, 40)] {
                        let told = table::text(&found, unicode, columns);
                        assert!(told.lines().all(|line| line.chars().count() <= columns), "{told}");
                        text += &told;
                    }
                    let json: serde_json::Value =
                        serde_json::from_str(&status::json(&found, &asked).unwrap()).unwrap();
                    for (name, value) in json.as_object().unwrap() {
                        if !["command", "date", "machine", "tool"].contains(&name.as_str()) {
                            writeln!(text, "{name}: {value}").unwrap();
                        }
                    }
                }
                Err(error) => writeln!(text, "! {error}").unwrap(),
            }
        }
    }
    let text = text.replace(env!("CARGO_PKG_VERSION"), "VERSION");
    is_golden(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/whole/status.txt"), &text);
}

/// What was typed, as the module is told it.
#[test]
fn arguments_become_what_they_did() {
    let mut text = String::new();
    for policy in ["strict", "lazy", "bounce", "auto"] {
        for more in ["", "--window-us 7", "--threshold 8192", "--yes", "--keep", "--yes --keep"] {
            let typed = format!("portcullis protect d --policy {policy} {more}");
            let arguments =
                <crate::args::Arguments as clap::Parser>::try_parse_from(typed.split_whitespace()).unwrap();
            let Some(crate::args::Command::Protect(protect)) = arguments.command else {
                panic!("another command")
            };
            let Protect { device, .. } = &protect;
            writeln!(
                text,
                "{policy} {more}: {device} {} {:?} {:?}",
                protect.settings(),
                protect.how(),
                protect.misplaced()
            )
            .unwrap();
        }
    }
    for more in ["", "--yes", "--keep"] {
        let typed = format!("portcullis unprotect d {more}");
        let arguments =
            <crate::args::Arguments as clap::Parser>::try_parse_from(typed.split_whitespace()).unwrap();
        let Some(crate::args::Command::Unprotect(unprotect)) = arguments.command else {
            panic!("another command")
        };
        let Unprotect { device, .. } = &unprotect;
        writeln!(text, "unprotect {more}: {device} {:?}", unprotect.how()).unwrap();
    }
    is_golden(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/whole/arguments.txt"), &text);
}
