//! Which device a name means, and what sysfs tells of it.
//!
//! A name is a PCI address, `BUS/NAME`, a node in `/dev`, or the name of anything in a class of sysfs: `eth0`, `nvme0n1`.
//! What does DMA is the nearest device above it that has an IOMMU group: the PCI function of a network interface, the USB
//! controller of a memory stick. What is made of other devices (a mapped volume, a bond) leads to all of them.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use portcullis_trace::Printable;

use super::host::Host;
use crate::on_linux::is_pci;

/// How often devices that are made of others are followed.
const DEEPEST: usize = 16;

/// A device on a bus.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    /// Its folder in `/sys/devices`.
    pub path: PathBuf,
    /// The last part of that, which is its name on its bus, and plain (see [`is_plain`]).
    pub name: String,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Printable(&self.name).fmt(f)
    }
}

/// Why a name means no device.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error(
        "there is no device {}: name it by its PCI address (lspci lists them), a network interface (ip link), or a disk \
         (lsblk)",
        Printable(name)
    )]
    Unknown { name: String },
    #[error(
        "{} is not made of hardware that does DMA: sysfs shows no device on a bus behind it",
        Printable(name)
    )]
    NoHardware { name: String },
    #[error("{} means several devices: {}; name one of these", Printable(name), Printable(list(found)))]
    Several { name: String, found: Vec<Device> },
    #[error(
        "the name {} cannot be told to the module: it has other characters than letters, digits and :._@+-",
        Printable(name)
    )]
    Odd { name: String },
}

/// `a, b and c`.
pub fn list<T: fmt::Display>(things: &[T]) -> String {
    let all: Vec<String> = things.iter().map(ToString::to_string).collect();
    match all.as_slice() {
        [most @ .., last] if !most.is_empty() => format!("{} and {last}", most.join(", ")),
        all => all.join(", "),
    }
}

/// Whether a name can stand in a line for the module, and in a file of modprobe's, and mean itself.
pub fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b":._@+-".contains(&byte);
    !name.is_empty() && !name.starts_with('.') && name.bytes().all(plain)
}

/// Linux's word for the mode of an IOMMU group, in those of the command line.
pub fn mode_of(kind: &str) -> String {
    match kind {
        "DMA" => "strict".into(),
        "DMA-FQ" => "lazy".into(),
        "identity" => "passthrough".into(),
        _ => kind.into(),
    }
}

impl Host<'_> {
    /// The device that `name` means.
    pub fn find(&self, name: &str) -> Result<Device, FindError> {
        let places = self.places(name);
        if places.is_empty() {
            return Err(FindError::Unknown { name: name.into() });
        }
        let mut found = BTreeSet::new();
        places.iter().for_each(|place| self.behind(place, DEEPEST, &mut found));
        let mut found: Vec<Device> = found.into_iter().collect();
        match (found.pop(), found.is_empty()) {
            (Some(device), true) if is_plain(&device.name) => Ok(device),
            (Some(device), true) => Err(FindError::Odd { name: device.name }),
            (Some(last), false) => {
                Err(FindError::Several { name: name.into(), found: [found, vec![last]].concat() })
            }
            (None, _) => Err(FindError::NoHardware { name: name.into() }),
        }
    }

    /// Where in `/sys/devices` there is something of that name.
    fn places(&self, name: &str) -> Vec<PathBuf> {
        let pci = self.at("sys/bus/pci/devices");
        if is_pci(name) {
            let name = name.to_ascii_lowercase();
            let full = if name.matches(':').count() == 1 { format!("0000:{name}") } else { name.clone() };
            // Without a domain, and not in the first: the only one in any other.
            let other = || self.names(&pci).into_iter().filter(|other| other.ends_with(&format!(":{name}")));
            let first: Vec<_> = self.follow(&pci.join(full)).into_iter().collect();
            return if first.is_empty() {
                other().filter_map(|one| self.follow(&pci.join(one))).collect()
            } else {
                first
            };
        }
        if name.starts_with("/dev/") {
            return self.nodes(name);
        }
        match name.split_once('/') {
            Some((bus, name)) if is_plain(bus) && is_plain(name) => {
                self.follow(&self.at("sys/bus").join(bus).join("devices").join(name)).into_iter().collect()
            }
            Some(_) => Vec::new(),
            None => self.in_classes(name),
        }
    }

    /// What a node in `/dev` is: links in it lead to nodes, whose names sysfs has, with `!` for a `/`.
    fn nodes(&self, name: &str) -> Vec<PathBuf> {
        let (node, dev) = (self.follow(&self.at(name.trim_start_matches('/'))), self.at("dev"));
        let node =
            node.and_then(|node| Some(node.strip_prefix(&dev).ok()?.to_string_lossy().replace('/', "!")));
        node.map_or(Vec::new(), |node| self.in_classes(&node))
    }

    /// A name in the classes of sysfs: interfaces and disks before all others.
    fn in_classes(&self, name: &str) -> Vec<PathBuf> {
        if name.is_empty() || name.starts_with('.') || name.contains('/') {
            return Vec::new();
        }
        let classes = self.at("sys/class");
        let of = |class: &str| self.follow(&classes.join(class).join(name));
        let first: Vec<_> = ["net", "block"].into_iter().filter_map(of).collect();
        if first.is_empty() {
            self.names(&classes).iter().filter_map(|class| of(class)).collect()
        } else {
            first
        }
    }

    /// The disk or partition that has this name in `/dev`.
    pub fn disk(&self, node: &str) -> Option<PathBuf> {
        node.starts_with("/dev/").then(|| self.nodes(node)).and_then(|places| places.into_iter().next())
    }

    /// Adds the devices that do DMA for what is at `place`.
    pub fn behind(&self, place: &Path, depth: usize, found: &mut BTreeSet<Device>) {
        let devices = self.at("sys/devices");
        let above = || place.ancestors().take_while(|path| *path != devices && path.starts_with(&devices));
        let grouped = || above().find(|path| path.join("iommu_group").exists());
        let on_pci = || above().find(|path| self.link(&path.join("subsystem")).as_deref() == Some("pci"));
        if let Some(path) = grouped().or_else(on_pci) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.insert(Device { path: path.to_owned(), name });
            return;
        }
        if depth > 0 {
            above().flat_map(|path| self.made_of(path)).for_each(|part| self.behind(&part, depth - 1, found));
        }
    }

    /// What a device is made of: the parts of a volume or an array, the interfaces below a bond or a bridge, and the controllers by
    /// which a disk of NVMe is reached.
    pub fn made_of(&self, path: &Path) -> Vec<PathBuf> {
        let in_folder =
            self.names(&path.join("slaves")).into_iter().map(|name| path.join("slaves").join(name));
        let is_nvme = self.is_nvme_subsystem(path);
        let is_part = |name: &String| {
            name.starts_with("lower_")
                || is_nvme && name.strip_prefix("nvme").is_some_and(|n| n.parse::<u32>().is_ok())
        };
        let beside = self.names(path).into_iter().filter(is_part).map(|name| path.join(name));
        in_folder.chain(beside).filter_map(|link| self.follow(&link)).collect()
    }

    fn is_nvme_subsystem(&self, path: &Path) -> bool {
        self.link(&path.join("subsystem")).is_some_and(|class| class == "nvme-subsystem")
    }

    /// All devices on PCI, but for bridges of any kind, which map nothing.
    pub fn devices(&self) -> Vec<Device> {
        let mut all = self.in_folder(&self.at("sys/bus/pci/devices"));
        all.retain(|device| !self.is_of_class(device, &["06"]));
        all
    }

    fn in_folder(&self, folder: &Path) -> Vec<Device> {
        let device = |name: String| Some(Device { path: self.follow(&folder.join(&name))?, name });
        self.names(folder).into_iter().filter_map(device).collect()
    }

    /// The devices that the IOMMU does not tell from this one, itself among them, but for bridges to other buses: of these the module
    /// leaves the drivers alone.
    pub fn sharing(&self, device: &Device) -> Vec<Device> {
        let mut all = self.in_folder(&device.path.join("iommu_group/devices"));
        all.retain(|other| other == device || !self.is_of_class(other, &["0604", "0607"]));
        if all.contains(device) { all } else { [vec![device.clone()], all].concat() }
    }

    pub fn driver(&self, device: &Device) -> Option<String> {
        self.link(&device.path.join("driver"))
    }

    pub fn bus(&self, device: &Device) -> Option<String> {
        self.link(&device.path.join("subsystem"))
    }

    pub fn group(&self, device: &Device) -> Option<String> {
        self.link(&device.path.join("iommu_group"))
    }

    /// How Linux protects memory from it, in the words of the command line.
    pub fn linux_mode(&self, device: &Device) -> Option<String> {
        Some(mode_of(&self.text(&device.path.join("iommu_group/type"))?))
    }

    /// Whether it is behind a port that firmware calls external.
    pub fn is_external(&self, device: &Device) -> bool {
        self.text(&device.path.join("removable")).is_some_and(|removable| removable == "removable")
    }

    /// Whether its PCI class begins with any of these digits.
    pub fn is_of_class(&self, device: &Device, classes: &[&str]) -> bool {
        let class = self.text(&device.path.join("class")).unwrap_or_default();
        class.strip_prefix("0x").is_some_and(|class| classes.iter().any(|digits| class.starts_with(digits)))
    }

    /// Interfaces and disks (whole ones) that are this device's.
    pub fn uses_of(&self, device: &Device) -> Vec<String> {
        let of = |class: &str| {
            let folder = self.at("sys/class").join(class);
            let is_ours = |path: &PathBuf| {
                // A path to a disk of NVMe has no node in `/dev`; the disk lies in its subsystem.
                let is_path = || self.text(&path.join("hidden")).is_some_and(|hidden| hidden == "1");
                let in_subsystem = || {
                    let above = path.parent().filter(|above| self.is_nvme_subsystem(above));
                    above.is_some_and(|above| {
                        self.made_of(above).iter().any(|one| one.starts_with(&device.path))
                    })
                };
                !path.join("partition").exists()
                    && (path.starts_with(&device.path) && !is_path() || in_subsystem())
            };
            let found = self.names(&folder).into_iter();
            found
                .filter(|name| self.follow(&folder.join(name)).is_some_and(|path| is_ours(&path)))
                .collect::<Vec<_>>()
        };
        [of("net"), of("block")].concat()
    }
}
