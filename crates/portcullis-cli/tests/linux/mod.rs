//! The commands that change this machine, on a machine made up: a tree of files in a temporary folder, and a kernel that does to
//! it what Linux and the module would do, refuses what they would refuse, and whatever a test wants refused.

mod hands;
mod keep;
mod names;
mod says;
mod sentences;
mod uses;
mod whole;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::args::{How, Settings};
use super::host::{Host, Outside};
use super::protect::{self, ProtectError};

/// How a command is asked to go about it.
const YES: How = How { yes: true, keep: false };
const KEEP: How = How { yes: true, keep: true };
const ASK: How = How { yes: false, keep: false };

/// What modprobe does.
#[derive(Clone, Copy)]
enum Modprobe {
    Loads,
    LoadsNothing,
    Says(&'static str),
    IsNotThere,
}

/// The machine.
struct Fake {
    /// Goes with it.
    _folder: TempDir,
    root: PathBuf,
    is_root: Cell<bool>,
    /// The answer to any question.
    answer: Cell<Option<bool>>,
    modprobe: Cell<Modprobe>,
    /// Of each write: `FILE TEXT`, the file below the root.
    writes: RefCell<Vec<String>>,
    /// Beginnings of such lines that are refused, with their error, or with none for the first that is not in the list.
    refused: RefCell<Vec<(String, i32)>>,
    /// The number of the write that fails, from 0.
    failing: Cell<Option<usize>>,
    /// What goes away when a file of this name is read.
    gone: RefCell<Option<(&'static str, PathBuf)>>,
    said: RefCell<Vec<String>>,
    questions: RefCell<Vec<String>>,
    begun: Cell<bool>,
}

impl Fake {
    /// A machine with an IOMMU and the module: a disk `nvme0n1` at 0000:00:04.0, the interface `eth0` of virtio at
    /// 0000:00:05.0, and 0000:00:06.0 without a driver, each in a group of its own.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let fake = Self {
            _folder: folder,
            root,
            is_root: Cell::new(true),
            answer: Cell::new(None),
            modprobe: Cell::new(Modprobe::Loads),
            writes: RefCell::default(),
            refused: RefCell::default(),
            failing: Cell::new(None),
            gone: RefCell::default(),
            said: RefCell::default(),
            questions: RefCell::default(),
            begun: Cell::new(false),
        };
        fake.pci("0000:00:04.0", "1", Some("nvme"));
        fake.child("block", "0000:00:04.0", "nvme/nvme0/nvme0n1");
        fake.pci("0000:00:05.0", "2", Some("virtio-pci"));
        fake.child("net", "0000:00:05.0", "virtio2/net/eth0");
        fake.file("sys/class/net/eth0/operstate", "up\n");
        fake.pci("0000:00:06.0", "3", None);
        fake.module();
        fake
    }

    fn host(&self) -> Host<'_> {
        Host::new(&self.root, self)
    }

    fn protect(&self, device: &str, settings: &str, how: How) -> Result<(), ProtectError> {
        protect::protect(&self.host(), device, &settings_of(settings), how)
    }

    fn unprotect(&self, device: &str, how: How) -> Result<(), ProtectError> {
        protect::unprotect(&self.host(), device, how)
    }

    /// The module, loaded.
    fn module(&self) {
        for (name, text) in [("protect", ""), ("unprotect", ""), ("version", "0.1.0\n"), ("rules", "")] {
            self.file(&format!("sys/kernel/portcullis/{name}"), text);
        }
        std::fs::create_dir_all(self.root.join("sys/kernel/portcullis/devices")).unwrap();
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::create_dir_all(self.root.join(target)).unwrap();
        symlink(self.root.join(target), path).unwrap();
    }

    /// A PCI device.
    fn pci(&self, name: &str, group: &str, driver: Option<&str>) -> String {
        let path = format!("sys/devices/pci0000:00/{name}");
        self.on_bus("pci", name, &path, group, driver);
        self.file(&format!("{path}/class"), "0x010802\n");
        path
    }

    fn on_bus(&self, bus: &str, name: &str, path: &str, group: &str, driver: Option<&str>) {
        std::fs::create_dir_all(self.root.join(path)).unwrap();
        self.link(&format!("{path}/subsystem"), &format!("sys/bus/{bus}"));
        self.link(&format!("sys/bus/{bus}/devices/{name}"), path);
        let folder = format!("sys/kernel/iommu_groups/{group}");
        self.link(&format!("{path}/iommu_group"), &folder);
        self.link(&format!("{folder}/devices/{name}"), path);
        self.file(&format!("{folder}/type"), "DMA-FQ\n");
        if let Some(driver) = driver {
            let folder = format!("sys/bus/{bus}/drivers/{driver}");
            self.file(&format!("{folder}/bind"), "");
            self.file(&format!("{folder}/unbind"), "");
            if !self.root.join(&folder).join("module").exists() {
                self.link(&format!("{folder}/module"), &format!("sys/module/{}", driver.replace('-', "_")));
            }
            self.link(&format!("{path}/driver"), &folder);
        }
    }

    /// A disk or an interface below a PCI device.
    fn child(&self, class: &str, device: &str, below: &str) -> String {
        let path = format!("sys/devices/pci0000:00/{device}/{below}");
        self.in_class(class, &path);
        path
    }

    /// Something in a class, at a path of its own.
    fn in_class(&self, class: &str, path: &str) {
        let name = path.rsplit('/').next().unwrap();
        std::fs::create_dir_all(self.root.join(path)).unwrap();
        self.link(&format!("{path}/subsystem"), &format!("sys/class/{class}"));
        self.link(&format!("sys/class/{class}/{name}"), path);
        if class == "block" {
            self.file(&format!("dev/{}", name.replace('!', "/")), "");
        }
    }

    /// A file system.
    fn mount(&self, at: &str, number: &str, kind: &str, source: &str) {
        let path = self.root.join("proc/self/mountinfo");
        let before = std::fs::read_to_string(path).unwrap_or_default();
        let line = format!("{before}30 1 {number} / {at} rw,relatime shared:1 - {kind} {source} rw\n");
        self.file("proc/self/mountinfo", &line);
    }

    fn refuse(&self, beginning: &str, error: i32) {
        self.refused.borrow_mut().push((beginning.into(), error));
    }

    /// All that was said, in one line.
    fn heard(&self) -> String {
        self.said.borrow().join(" ")
    }

    fn has_driver(&self, device: &str) -> bool {
        self.root.join("sys/bus/pci/devices").join(device).join("driver").exists()
    }

    fn is_protected(&self, device: &str) -> bool {
        self.root.join("sys/kernel/portcullis/devices").join(device).exists()
    }

    /// Every file, with what stands in it or where it leads.
    fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let (mut folders, mut all) = (vec![self.root.clone()], BTreeMap::new());
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                let kind = entry.symlink_metadata().unwrap().file_type();
                let text = match kind {
                    _ if kind.is_symlink() => std::fs::read_link(&entry).unwrap().display().to_string(),
                    _ if kind.is_dir() => {
                        folders.push(entry.clone());
                        String::new()
                    }
                    _ => std::fs::read_to_string(&entry).unwrap(),
                };
                all.insert(entry, text);
            }
        }
        all
    }

    /// Linux, of a driver's `bind` and `unbind`.
    fn tell_driver(&self, folder: &Path, what: &str, device: &str) -> Result<(), i32> {
        let place = folder.ancestors().nth(2).unwrap().join("devices").join(device);
        let link = place.canonicalize().map_err(|_| libc::ENODEV)?.join("driver");
        match (what, link.canonicalize()) {
            ("unbind", Ok(driver)) if driver == folder => std::fs::remove_file(link).unwrap(),
            ("bind", Err(_)) => symlink(folder, link).unwrap(),
            _ => return Err(libc::ENODEV),
        }
        Ok(())
    }

    /// The module.
    fn tell_module(&self, what: &str, text: &str) -> Result<(), i32> {
        let mut words = text.split(' ');
        let name = words.next().unwrap();
        let place = self.root.join("sys/bus/pci/devices").join(name);
        let place = place.canonicalize().map_err(|_| libc::ENODEV)?;
        let folder = |name: &str| self.root.join("sys/kernel/portcullis/devices").join(name);
        // All of a group are taken together, and given back together, and meanwhile none has a driver.
        let names = std::fs::read_dir(place.join("iommu_group/devices")).map_err(|_| libc::EOPNOTSUPP)?;
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let is_bridge = |name: &String| {
            let class = self.root.join("sys/bus/pci/devices").join(name).join("class");
            std::fs::read_to_string(class).unwrap().starts_with("0x0604")
        };
        let group: Vec<String> = names.filter(|name| !is_bridge(name)).collect();
        let is_free = group.iter().all(|name| !self.has_driver(name));
        match (what, folder(name).exists()) {
            ("protect", false) | ("unprotect", true) if !is_free => return Err(libc::EBUSY),
            ("unprotect", true) => {
                group.iter().for_each(|name| std::fs::remove_dir_all(folder(name)).unwrap())
            }
            ("unprotect", false) => return Err(libc::ENODEV),
            (_, true) => self.settle(&folder(name), words),
            (_, false) => {
                for name in &group {
                    std::fs::create_dir_all(folder(name)).unwrap();
                    symlink(
                        self.root.join("sys/bus/pci/devices").join(name).canonicalize().unwrap(),
                        folder(name).join("device"),
                    )
                    .unwrap();
                    self.settle(&folder(name), words.clone());
                }
            }
        }
        Ok(())
    }

    /// Writes what a device's folder says of its policy.
    fn settle<'w>(&self, folder: &Path, words: impl Iterator<Item = &'w str>) {
        let given = words.map(|word| word.split_once('=').unwrap());
        for (file, text) in [("window_us", "10000"), ("threshold", "131072")].into_iter().chain(given) {
            std::fs::write(folder.join(file), format!("{text}\n")).unwrap();
        }
    }
}

/// `policy=lazy window_us=5`.
fn settings_of(text: &str) -> Settings {
    let figure = |name: &str| {
        text.split(' ').find_map(|word| word.strip_prefix(name)).map(|figure| figure.parse().unwrap())
    };
    let policy = text.split(' ').next().unwrap().strip_prefix("policy=").unwrap().to_owned();
    Settings { policy, window_us: figure("window_us="), threshold: figure("threshold=") }
}

impl Outside for Fake {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let bytes = std::fs::read(path);
        let is_it = |(name, _): &(&str, PathBuf)| path.ends_with(name);
        if let Some((_, folder)) = self.gone.borrow().as_ref().filter(|gone| is_it(gone)) {
            let _ = std::fs::remove_dir_all(folder);
        }
        bytes
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let below = path.strip_prefix(&self.root).unwrap().display().to_string();
        let (number, line) = (self.writes.borrow().len(), format!("{below} {text}"));
        self.writes.borrow_mut().push(line.clone());
        let refused =
            self.refused.borrow().iter().find(|(of, _)| line.starts_with(of)).map(|(_, error)| *error);
        if let Some(error) = refused.or((self.failing.get() == Some(number)).then_some(libc::EIO)) {
            return Err(io::Error::from_raw_os_error(error));
        }
        if !path.is_file() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let (folder, name) = (path.parent().unwrap(), path.file_name().unwrap().to_str().unwrap());
        let done = match name {
            "bind" | "unbind" => self.tell_driver(folder, name, text),
            "protect" | "unprotect" => self.tell_module(name, text),
            _ => panic!("{line}"),
        };
        done.map_err(io::Error::from_raw_os_error)
    }

    fn load(&self) -> io::Result<Result<(), String>> {
        match self.modprobe.get() {
            Modprobe::Loads => self.module(),
            Modprobe::LoadsNothing => {}
            Modprobe::Says(said) => return Ok(Err(said.into())),
            Modprobe::IsNotThere => return Err(io::ErrorKind::NotFound.into()),
        }
        Ok(Ok(()))
    }

    fn is_root(&self) -> bool {
        self.is_root.get()
    }

    fn ask(&self, question: &str) -> Option<bool> {
        self.questions.borrow_mut().push(question.into());
        self.answer.get()
    }

    fn say(&self, text: &str) {
        self.said.borrow_mut().push(text.into());
    }

    fn begin(&self) {
        self.begun.set(true);
    }
}
