//! Recording on made-up machines: a folder in place of tracefs, whose instances are copies of its `template`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use portcullis_trace::Input;
use portcullis_trace::anonymize::anonymize;

use super::events::{Events, Kernel};
use super::instance::{Hands, Instance, KERNEL};
use super::pages::Pages;
use super::progress::So;
use super::session::Session;
use super::spool::Spool;
use super::streams::Streams;
use super::tracefs::{Tracefs, TracingError};
use super::{CommandError, Recorded, code, said};
use crate::golden::files::is_golden;
use crate::sentences::{assert_said, odd, pair};

/// A kernel in a folder fills an instance that is made, and empties it when it is removed, unless one of its files is read.
const MADE_UP: Hands = Hands {
    make: |path| copy(&path.join("../../template"), path),
    remove: |path| {
        if path.join("busy").exists() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        fs::remove_dir_all(path)
    },
};

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// What a guest's kernel has said of its events, and what it recorded.
const GUEST: &str = "../portcullis-trace/tests/ring/6.12";

/// A machine with these events of a guest's, and that guest's buffers.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn with(systems: &[&str]) -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap() };
        let template = machine.tracefs("template");
        fs::create_dir_all(machine.tracefs("instances")).unwrap();
        fs::create_dir_all(machine.tracefs("events")).unwrap();
        for folder in ["events", "per_cpu/cpu0", "per_cpu/cpu1"] {
            fs::create_dir_all(template.join(folder)).unwrap();
        }
        for file in ["tracing_on", "trace_clock", "buffer_size_kb"] {
            fs::write(template.join(file), "").unwrap();
        }
        let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join(GUEST);
        fs::copy(guest.join("header_page"), template.join("events/header_page")).unwrap();
        for cpu in ["cpu0", "cpu1"] {
            fs::copy(guest.join(cpu), template.join("per_cpu").join(cpu).join("trace_pipe_raw")).unwrap();
        }
        for part in fs::read_to_string(guest.join("formats")).unwrap().split("== ").skip(1) {
            let (system, format) = part.split_once('\n').unwrap();
            if systems.contains(&system) {
                let name = format.lines().next().unwrap().strip_prefix("name: ").unwrap();
                machine.event(system, name, format);
            }
        }
        machine
    }

    fn event(&self, system: &str, name: &str, format: &str) {
        let folder = self.tracefs("template/events").join(system).join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("format"), format).unwrap();
        fs::write(folder.join("enable"), "").unwrap();
        fs::write(folder.join("filter"), "").unwrap();
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    fn tracefs(&self, name: &str) -> PathBuf {
        self.root().join("sys/kernel/tracing").join(name)
    }

    fn instance(&self) -> PathBuf {
        self.tracefs("instances/portcullis")
    }

    fn put(&self, name: &str, text: &str) {
        let path = self.root().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn prepare(&self, device: Option<&str>) -> Result<(Session, Vec<String>), TracingError> {
        Session::prepare(self.root(), MADE_UP, device)
    }

    /// Why nothing can be recorded, without the folder's name; the instance is gone by then.
    fn refused(&self) -> String {
        let why = self.prepare(None).map(drop).unwrap_err().to_string();
        assert!(!self.instance().exists(), "{why}");
        why.replace(&self.root().display().to_string(), "")
    }
}

#[test]
fn what_is_recorded_is_what_the_kernel_prints_and_nothing_is_left() {
    let machine = Machine::with(&["dma", "iommu"]);
    let (mut session, notes) = machine.prepare(None).unwrap();
    assert_eq!(notes, Vec::<String>::new());
    let read = |name: &str| fs::read_to_string(machine.instance().join(name)).unwrap();
    assert_eq!((read("tracing_on"), read("trace_clock")), ("0".into(), "mono".into()));
    assert_eq!(read("events/dma/dma_map_sg/enable"), "1");
    assert_eq!(read("events/dma/dma_map_sg/filter"), "");
    session.switch(true).unwrap();
    assert_eq!(read("tracing_on"), "1");
    let mut spool = Spool::new(machine.root()).unwrap();
    let round = session.round(|pages| spool.add(pages)).unwrap();
    assert!(round.events > 100 && round.lost == 0, "{round:?}");
    let formats = session.end().unwrap().formats;
    assert!(!machine.instance().exists());
    let mut text = Vec::new();
    assert_eq!(spool.write(formats, &mut text).unwrap(), (round.events, 0));
    let lines = String::from_utf8(text).unwrap();
    let kernels =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(GUEST).join("trace.txt")).unwrap();
    let maps = |text: &str| text.matches(": dma_map_").count();
    assert_eq!((maps(&lines), lines.lines().count() as u64), (maps(&kernels), round.events));
}

/// `--anonymize` writes what `portcullis anonymize` makes of the recording.
#[test]
fn an_anonymous_recording_is_the_recording_made_anonymous() {
    let written = |anonymous| {
        let machine = Machine::with(&["dma", "iommu"]);
        let (mut session, _) = machine.prepare(None).unwrap();
        let mut spool = Spool::new(machine.root()).unwrap();
        let round = session.round(|pages| spool.add(pages)).unwrap();
        let (formats, release) = (session.end().unwrap().formats, "6.12".to_owned());
        let mut text = Vec::new();
        let recorded = Recorded { spool, formats, measured: None, release };
        assert_eq!(recorded.write(&mut text, machine.root(), anonymous).unwrap(), (round.events, 0));
        text
    };
    let plain = written(false);
    let mut anonymous = Vec::new();
    anonymize(|| Input::from_bytes("plain", plain.as_slice()), &mut anonymous).unwrap();
    assert!(anonymous.len() > 10_000 && anonymous != plain);
    assert!(written(true) == anonymous, "the same bytes");
}

/// A page that ends later than the round began is the last of its CPU: the rest is the next round's.
#[test]
fn a_round_ends_with_what_came_before_it() {
    let machine = Machine::with(&["dma", "iommu"]);
    let tracefs = Tracefs::find(machine.root()).unwrap();
    let (instance, _) = Instance::make(&tracefs, MADE_UP).unwrap();
    let formats = Events::switch_on(&instance, None).unwrap().formats;
    let pages = |most, now_ns| {
        let mut pages = [0; 2];
        let mut streams = Streams::open(&instance).unwrap();
        let take = |read: &Pages| {
            read.each().for_each(|(cpu, _)| pages[cpu as usize] += 1);
            Ok(())
        };
        streams.round(&formats, most, now_ns, take).unwrap();
        pages
    };
    let all = pages(u64::MAX, None);
    assert!(all.iter().all(|pages| *pages > 2), "{all:?}");
    assert_eq!(pages(u64::MAX, Some(u64::MAX)), all);
    assert_eq!(pages(u64::MAX, Some(0)), [1, 1]);
    assert_eq!(pages(2 * 4096, None), [2, 2]);
}

#[test]
fn a_device_is_a_filter_of_the_events_that_name_one() {
    let machine = Machine::with(&["dma", "iommu"]);
    let single =
        "name: map_single\nID: 9\n\tfield:__data_loc char[] dev_name;\toffset:8;\tsize:4;\tsigned:0;\n";
    machine.event("intel_iommu", "map_single", single);
    machine.event("intel_iommu", "qi_submit", "name: qi_submit\nID: 10\n");
    let (session, _) = machine.prepare(Some("03.0")).unwrap();
    let read = |name: &str| fs::read_to_string(machine.instance().join("events").join(name)).unwrap();
    assert_eq!(read("dma/dma_map_sg/filter"), "device == \"03.0\" || device ~ \"*:03.0\"");
    assert_eq!(read("intel_iommu/map_single/filter"), "dev_name == \"03.0\" || dev_name ~ \"*:03.0\"");
    assert_eq!((read("iommu/map/filter"), read("iommu/map/enable")), (String::new(), String::new()));
    assert_eq!(read("intel_iommu/qi_submit/enable"), "", "it maps nothing");
    session.end().unwrap();
}

#[test]
fn a_device_that_is_not_there_is_refused_before_anything_is_switched_on() {
    let machine = Machine::with(&["dma", "iommu"]);
    let prepare = |device| machine.prepare(Some(device)).and_then(|(session, _)| session.end().map(drop));
    // Sysfs shows no device at all: it may be there.
    prepare("03.0").unwrap();
    machine.put("sys/devices/pci0000:00/0000:00:00.0/class", "0x060000\n");
    machine.put("sys/devices/pci0000:00/0000:00:03.0/class", "0x020000\n");
    machine.put("sys/devices/pci0000:00/0000:00:03.0/net/eth0/mtu", "1500\n");
    machine.put("sys/devices/platform/usb.1/uevent", "");
    let link = |to: &str, from: &str| {
        let from = machine.root().join(from);
        fs::create_dir_all(from.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(machine.root().join(to), from).unwrap();
    };
    link("sys/bus/pci", "sys/devices/pci0000:00/0000:00:03.0/subsystem");
    link("sys/devices/pci0000:00/0000:00:00.0", "sys/bus/pci/devices/0000:00:00.0");
    link("sys/devices/pci0000:00/0000:00:03.0", "sys/bus/pci/devices/0000:00:03.0");
    link("sys/devices/platform/usb.1", "sys/bus/platform/devices/usb.1");
    link("sys/devices/pci0000:00/0000:00:03.0/net/eth0", "sys/class/net/eth0");
    for device in ["03.0", "0000:00:03.0", "00.0", "usb.1"] {
        prepare(device).unwrap();
    }
    let said = |device| {
        let why = prepare(device).unwrap_err().to_string();
        assert!(!machine.instance().exists(), "{why}");
        let start =
            format!("this machine has no device {device}, and none whose name ends so behind a colon. ");
        why.strip_prefix(&start).unwrap().to_owned()
    };
    let all = "On PCI it has 0000:00:03.0: `portcullis status` says what they are; `ls /sys/bus/*/devices` lists all devices";
    assert_eq!([said("1f.9"), said("3.0"), said("sb.1")], [all; 3]);
    assert_eq!(said("eth0"), format!("For what is made of 0000:00:03.0, type --device 0000:00:03.0. {all}"));
    fs::remove_dir_all(machine.root().join("sys/bus/pci")).unwrap();
    assert_eq!(said("1f.9"), "It has none on PCI; `ls /sys/bus/*/devices` lists all devices");
}

#[test]
fn two_runs_do_not_meet_and_what_a_killed_one_has_left_is_removed() {
    let machine = Machine::with(&["dma", "iommu"]);
    let (first, _) = machine.prepare(None).unwrap();
    let second = machine.prepare(None).map(drop).unwrap_err();
    assert!(matches!(second, TracingError::Busy), "{second}");
    assert!(machine.instance().exists());
    first.end().unwrap();
    // One that was killed.
    fs::create_dir(machine.instance()).unwrap();
    fs::write(machine.instance().join("busy"), "").unwrap();
    let tracefs = Tracefs::find(machine.root()).unwrap();
    let in_use = Instance::make(&tracefs, MADE_UP).map(drop).unwrap_err();
    assert!(matches!(in_use, TracingError::LeftInUse(_)), "{in_use}");
    fs::remove_file(machine.instance().join("busy")).unwrap();
    let (session, notes) = machine.prepare(None).unwrap();
    assert_eq!(notes, ["A run before this one was killed: the tracing instance that it left is removed."]);
    // Whatever happens, it is removed.
    drop(session);
    assert!(!machine.instance().exists());
}

#[test]
fn what_is_missing_is_named() {
    let nothing = Machine::with(&[]);
    assert_eq!(nothing.refused(), TracingError::NoEvents.to_string());
    let machine = Machine::with(&["dma", "iommu"]);
    let page = machine.tracefs("template/events/header_page");
    let text = fs::read_to_string(&page).unwrap();
    fs::remove_file(&page).unwrap();
    let no_file = "No such file or directory (os error 2)";
    let path = "/sys/kernel/tracing/instances/portcullis";
    assert_eq!(machine.refused(), format!("{path}/events/header_page: {no_file}"));
    fs::write(&page, text.replace("commit", "commat")).unwrap();
    assert!(machine.refused().starts_with("events/header_page has no field commit: "));
    fs::write(&page, text).unwrap();
    let stream = machine.tracefs("template/per_cpu/cpu1/trace_pipe_raw");
    fs::remove_file(stream).unwrap();
    assert_eq!(machine.refused(), format!("{path}/per_cpu/cpu1/trace_pipe_raw: {no_file}"));
    // The kernel's own folders are made without anything in them here.
    let (tracefs, root) = (Tracefs::find(machine.root()).unwrap(), machine.root().display().to_string());
    let why = Instance::make(&tracefs, KERNEL).map(drop).unwrap_err().to_string();
    assert_eq!(why.replace(&root, ""), format!("{path}/tracing_on: {no_file}"));
    assert!(!machine.instance().exists());
}

/// What each kernel cannot record, as it is said before it begins.
#[test]
fn what_a_kernel_cannot_record_is_said() {
    let mut text = String::new();
    let (new, old, vtd) =
        (Machine::with(&["dma", "iommu"]), Machine::with(&["iommu"]), Machine::with(&["iommu"]));
    vtd.event("intel_iommu", "map_single", "name: map_single\nID: 9\n");
    let alone = Machine::with(&["dma"]);
    let machines = [
        ("dma:*, iommu:*", &new, &["7.1.0", "7.0.4", "6.18.44-fc", "6.17.0", "6.16.1", "6.12.0"][..]),
        ("dma:* alone", &alone, &["6.12.0"]),
        ("iommu:* alone", &old, &["6.12.0", "6.1.0-50-amd64", "4.19.0", "3.16.0"]),
        ("iommu:*, intel_iommu:*", &vtd, &["5.10.0"]),
    ];
    for (events, machine, releases) in machines {
        for release in releases {
            for (kind, device) in [("DMA-FQ", None), ("DMA-FQ", Some("03.0")), ("identity", None)] {
                machine.put("proc/sys/kernel/osrelease", release);
                machine.put("sys/kernel/iommu_groups/7/type", &format!("{kind}\n"));
                let (session, notes) = machine.prepare(device).unwrap();
                session.end().unwrap();
                let said = if notes.is_empty() { "nothing".to_owned() } else { notes.join(" ") };
                let of = device.map_or(String::new(), |device| format!(", --device {device}"));
                text.push_str(&format!("Linux {release}, {events}, {kind}{of}: {said}\n"));
            }
        }
    }
    is_golden(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/record-hidden.txt"), &text);
}

#[test]
fn a_kernel_is_known_by_its_release() {
    let machine = Machine::with(&[]);
    assert_eq!(Kernel::of(machine.root()), Kernel { version: (0, 0), translates: false });
    machine.put("proc/sys/kernel/osrelease", "6.17.4-rc1\n");
    machine.put("sys/kernel/iommu_groups/0/type", "identity\n");
    assert_eq!(Kernel::of(machine.root()), Kernel { version: (6, 17), translates: false });
    machine.put("sys/kernel/iommu_groups/1/type", "DMA\n");
    assert!(Kernel::of(machine.root()).translates);
}

#[test]
fn what_a_recording_came_to_is_said() {
    let measured = portcullis_trace::Measured {
        cpus: 2,
        wall_ns: 2_000_000_000,
        busy_ns: 1_000_000_000,
        own_ns: 20_000_000,
    };
    let so = So { events: 200_000, lost: 0, bytes: 9 };
    assert_eq!(
        said("a.zst", so, Some(1_500_000), Some(measured)),
        "a.zst, 1.5 MB: 200,000 events in 2.0 s, 100,000/s, none lost. 2 CPUs were 25.0 % busy; to record took 1.0 % of one."
    );
    assert_eq!(
        said("standard output", So { lost: 12, ..so }, None, None),
        "standard output: 200,000 events, and 12 LOST: the buffers were too small, or this program had too little CPU time."
    );
    let nothing = said(&odd(), So::default(), None, None);
    assert_eq!(
        nothing,
        "a\\u{1b}[2J: 0 events, none lost. No driver has mapped memory meanwhile, its devices need no mappings (virtio devices without \
         an IOMMU do not), or this kernel does not record them: docs/replay.md says what each kernel records."
    );
}

#[test]
fn each_error_of_a_recording_says_what_to_do() {
    let error = || io::Error::other("no luck");
    let said = [
        pair(
            TracingError::NotRoot { command: odd() },
            "only root may switch the kernel's events on. Type:\n  sudo ODD",
        ),
        pair(
            TracingError::NoTracefs,
            "this kernel has no tracefs (CONFIG_TRACING): nothing can be recorded on it",
        ),
        pair(
            TracingError::NotMounted(error()),
            "tracefs is not mounted, and this program cannot mount it (no luck). Type:\n  mount -t tracefs nodev /sys/kernel/tracing",
        ),
        pair(
            TracingError::LockedDown(error()),
            "the kernel is locked down: even root may not read its events (no luck)",
        ),
        pair(
            TracingError::Busy,
            "another `portcullis record` or `portcullis watch` runs on this machine: wait for its end",
        ),
        pair(
            TracingError::LeftInUse("a".into()),
            "a is a tracing instance that a run before has left, and it is in use: close what reads the files in it, and try again",
        ),
        pair(
            TracingError::NoEvents,
            "this kernel has no events of DMA: neither `dma:*` (Linux 6.12 and later) nor `iommu:*` (with an IOMMU's driver)",
        ),
        pair(
            TracingError::NoSuchDevice { name: odd(), means: Some(odd()), devices: vec![odd(), "b".into()] },
            "this machine has no device ODD, and none whose name ends so behind a colon. For what is made of ODD, type --device ODD. On PCI \
             it has ODD, b: `portcullis status` says what they are; `ls /sys/bus/*/devices` lists all devices",
        ),
        pair(TracingError::File { path: odd().into(), source: error() }, "ODD: no luck"),
        pair(CommandError::Read(error()), "cannot read the kernel's buffers: no luck"),
        pair(CommandError::Write { name: odd(), source: error() }, "cannot write ODD: no luck"),
        pair(CommandError::Run { name: odd(), source: error() }, "cannot run ODD: no luck"),
        pair(
            CommandError::NoFile,
            "--replay reads the recording from a file: name one by -o, or type `portcullis record .. | portcullis replay -`",
        ),
        pair(crate::watch::CommandError::Output(error()), "standard output: no luck"),
    ];
    let sources = [include_str!("tracefs.rs"), include_str!("mod.rs"), include_str!("../watch/mod.rs")];
    assert_said(&said, &sources);
}

#[test]
fn a_command_that_was_recorded_ends_the_recording_with_its_code_as_in_a_shell() {
    for (script, expected) in [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 128 + 9)] {
        let status = std::process::Command::new("sh").args(["-c", script]).status().unwrap();
        assert_eq!(code(status), expected, "{script}");
    }
}
