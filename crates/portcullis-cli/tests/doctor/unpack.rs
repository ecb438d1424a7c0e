//! A machine of one readable file, unpacked into a folder.
//!
//! Lines up to the next line of a kind of these are a file's text:
//!
//! ```text
//! # anything                                a comment, before the first file
//! finds KIND..                              the findings, in their order
//! group NUMBER TYPE                         a group of devices; - for a kernel that does not say its type
//! unit NAME [device=PATH]                   an IOMMU; its device is below sys/devices
//! pci NAME class=.. [driver=..] [group=..] [removable=..] [node=..] [net=..] [block=..]
//! on BUS NAME ..                            the same on another bus
//! link PATH TARGET                          both from the root
//! folder PATH
//! == PATH                                   a file
//! == PATH hex                               a file of bytes
//! ```

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A machine.
pub struct Machine {
    _folder: TempDir,
    pub root: PathBuf,
    /// The kinds of its findings.
    pub finds: Vec<String>,
    /// Where its first IOMMU is.
    unit: Option<String>,
}

impl Machine {
    /// An empty one.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        Self { _folder: folder, root, finds: Vec::new(), unit: None }
    }

    pub fn read(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor/machines").join(format!("{name}.txt"));
        let text = std::fs::read_to_string(path).unwrap();
        let (mut machine, mut blocks) = (Self::new(), text.split("\n== "));
        for path in [
            "sys/class/iommu",
            "sys/kernel/iommu_groups",
            "sys/bus",
            "sys/module",
            "sys/firmware/acpi/tables",
        ] {
            machine.folder(path);
        }
        blocks.next().unwrap().lines().for_each(|line| machine.line(line));
        for block in blocks {
            let (head, text) = block.split_once('\n').unwrap_or((block, ""));
            match head.strip_suffix(" hex") {
                Some(path) => machine.file(path, &bytes(text)),
                None => machine.file(head, format!("{}\n", text.trim_end_matches('\n')).as_bytes()),
            }
        }
        machine
    }

    fn line(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["finds", kinds @ ..] => self.finds = kinds.iter().map(|kind| (*kind).to_owned()).collect(),
            ["group", number, kind] => self.group(number, kind),
            ["unit", name, rest @ ..] => {
                self.unit(name, rest.first().and_then(|word| word.strip_prefix("device=")))
            }
            ["pci", name, rest @ ..] => self.device("pci", name, rest),
            ["on", bus, name, rest @ ..] => self.device(bus, name, rest),
            ["link", path, target] => self.link(path, target),
            ["folder", path] => self.folder(path),
            [""] | ["#", ..] => {}
            _ => panic!("{line}"),
        }
    }

    pub fn file(&self, path: &str, bytes: &[u8]) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn folder(&self, path: &str) {
        std::fs::create_dir_all(self.root.join(path)).unwrap();
    }

    /// A link as sysfs has it, which stays right where the tree is moved.
    fn link(&self, path: &str, target: &str) {
        self.folder(target);
        self.folder(path.rsplit_once('/').unwrap().0);
        let up = "../".repeat(path.matches('/').count());
        symlink(format!("{up}{target}"), self.root.join(path)).unwrap();
    }

    fn group(&self, number: &str, kind: &str) {
        let folder = format!("sys/kernel/iommu_groups/{number}");
        self.folder(&format!("{folder}/devices"));
        if kind != "-" {
            self.file(&format!("{folder}/type"), format!("{kind}\n").as_bytes());
        }
    }

    fn unit(&mut self, name: &str, device: Option<&str>) {
        let above = device.map_or("sys/devices/virtual".into(), |path| format!("sys/devices/{path}"));
        let folder = format!("{above}/iommu/{name}");
        self.link(&format!("sys/class/iommu/{name}"), &folder);
        self.folder(&format!("{folder}/devices"));
        if device.is_some() {
            self.link(&format!("{folder}/device"), &above);
        }
        self.unit.get_or_insert(folder);
    }

    fn device(&self, bus: &str, name: &str, words: &[&str]) {
        let given: BTreeMap<&str, &str> = words.iter().map(|word| word.split_once('=').unwrap()).collect();
        let folder = if bus == "pci" {
            format!("sys/devices/pci0000:00/{name}")
        } else {
            format!("sys/devices/{bus}/{name}")
        };
        self.folder(&folder);
        self.link(&format!("sys/bus/{bus}/devices/{name}"), &folder);
        self.link(&format!("{folder}/subsystem"), &format!("sys/bus/{bus}"));
        for (key, value) in given {
            match key {
                "driver" => self.link(&format!("{folder}/driver"), &format!("sys/bus/{bus}/drivers/{value}")),
                "group" => {
                    let group = format!("sys/kernel/iommu_groups/{value}");
                    self.link(&format!("{folder}/iommu_group"), &group);
                    self.link(&format!("{group}/devices/{name}"), &folder);
                    if let Some(unit) = &self.unit {
                        self.link(&format!("{folder}/iommu"), unit);
                    }
                }
                "net" | "block" => {
                    let child = format!("{folder}/{key}/{value}");
                    self.folder(&child);
                    self.link(&format!("sys/class/{key}/{value}"), &child);
                }
                "node" => self.file(&format!("{folder}/numa_node"), format!("{value}\n").as_bytes()),
                "class" | "removable" => {
                    self.file(&format!("{folder}/{key}"), format!("{value}\n").as_bytes())
                }
                _ => panic!("{name} {key}"),
            }
        }
    }
}

/// The bytes of hexadecimal digits.
fn bytes(text: &str) -> Vec<u8> {
    text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}
