//! Devices and the groups in which the IOMMU sees them.

use serde::Serialize;

use crate::linux::device::{Device as Place, mode_of};
use crate::linux::host::Host;

/// A device, with what `portcullis status` tells of it and where it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    pub name: String,
    /// Its interfaces and disks.
    pub uses: Vec<String>,
    pub driver: Option<String>,
    /// Its class on PCI, as `0x010802`.
    pub class: Option<String>,
    pub group: Option<String>,
    /// Behind a port that firmware calls external, or not trusted by Linux for another reason.
    pub external: bool,
    /// A bridge of any kind, which maps nothing itself.
    pub bridge: bool,
    /// An IOMMU that is a device on PCI itself.
    pub iommu: bool,
    pub node: Option<u64>,
    /// The policy of Portcullis's module, if it protects the device.
    pub policy: Option<String>,
}

/// What an IOMMU does not tell apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    pub number: String,
    /// `strict`, `lazy` or `passthrough`, or Linux's own word; `None` where this kernel does not say.
    pub mode: Option<String>,
    pub devices: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Devices {
    pub groups: Vec<Group>,
    pub devices: Vec<Device>,
    /// Thunderbolt domains whose firmware leaves memory open to what is plugged in.
    pub open_thunderbolt: Vec<String>,
}

impl Devices {
    pub fn read(host: &Host<'_>) -> Self {
        let mut groups: Vec<Group> =
            host.list("sys/kernel/iommu_groups").into_iter().map(|number| group(host, number)).collect();
        groups.sort_by_key(|group| (group.number.parse().unwrap_or(u64::MAX), group.number.clone()));
        let mut devices: Vec<Device> =
            places(host, &groups).iter().map(|place| device(host, place)).collect();
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        devices.dedup_by(|a, b| a.name == b.name);
        Self { groups, devices, open_thunderbolt: open_thunderbolt(host) }
    }

    /// Devices that do DMA.
    pub fn endpoints(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(|device| !device.bridge && !device.iommu)
    }

    pub fn group_of(&self, device: &Device) -> Option<&Group> {
        self.groups.iter().find(|group| Some(&group.number) == device.group.as_ref())
    }

    /// How Linux protects memory from a device.
    pub fn mode_of(&self, device: &Device) -> Option<&str> {
        self.group_of(device)?.mode.as_deref()
    }

    /// The devices of a group that do DMA.
    pub fn within<'a>(&'a self, group: &'a Group) -> impl Iterator<Item = &'a Device> {
        self.endpoints().filter(|device| device.group.as_ref() == Some(&group.number))
    }

    /// How many groups have each mode, the most first.
    pub fn modes(&self) -> Vec<(String, usize)> {
        let mut counts: Vec<(String, usize)> = Vec::new();
        for mode in self.groups.iter().filter_map(|group| group.mode.clone()) {
            match counts.iter_mut().find(|(name, _)| *name == mode) {
                Some((_, count)) => *count += 1,
                None => counts.push((mode, 1)),
            }
        }
        counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        counts
    }
}

impl Device {
    /// Its place on a bus, without the function: several functions are one chip.
    pub fn slot(&self) -> &str {
        self.name.rsplit_once('.').map_or(&self.name, |(slot, _)| slot)
    }

    pub fn is_vfio(&self) -> bool {
        self.driver.as_ref().is_some_and(|driver| driver.starts_with("vfio"))
    }

    /// `0000:01:00.0 (nvme0n1)`.
    pub fn title(&self) -> String {
        match (self.uses.as_slice(), &self.driver) {
            ([], None) => self.name.clone(),
            ([], Some(driver)) => format!("{} ({driver})", self.name),
            (uses, _) => format!("{} ({})", self.name, uses.join(", ")),
        }
    }
}

fn group(host: &Host<'_>, number: String) -> Group {
    let folder = format!("sys/kernel/iommu_groups/{number}");
    let mode = host.file(&format!("{folder}/type")).map(|kind| mode_of(&kind));
    Group { mode, devices: host.list(&format!("{folder}/devices")), number }
}

/// All devices of PCI, and all that have a group.
fn places(host: &Host<'_>, groups: &[Group]) -> Vec<Place> {
    let at = |path: String, name: String| Some(Place { path: host.follow(&host.at(&path))?, name });
    let pci = host.list("sys/bus/pci/devices").into_iter();
    let mut found: Vec<Place> =
        pci.filter_map(|name| at(format!("sys/bus/pci/devices/{name}"), name)).collect();
    for group in groups {
        let folder = format!("sys/kernel/iommu_groups/{}/devices", group.number);
        found.extend(group.devices.iter().filter_map(|name| at(format!("{folder}/{name}"), name.clone())));
    }
    found
}

fn device(host: &Host<'_>, place: &Place) -> Device {
    let text = |file: &str| host.text(&place.path.join(file)).filter(|text| !text.is_empty());
    Device {
        name: place.name.clone(),
        uses: host.uses_of(place),
        driver: host.driver(place),
        class: text("class"),
        group: host.group(place),
        external: host.is_external(place) || text("untrusted").as_deref() == Some("1"),
        bridge: host.is_of_class(place, &["06"]),
        iommu: is_iommu(host, place),
        node: text("numa_node").and_then(|node| node.parse().ok()),
        policy: host.text(&host.folder(place).join("policy")),
    }
}

/// By its class, or as it has one of Linux's below it: QEMU's virtio-iommu has a class of no kind.
fn is_iommu(host: &Host<'_>, place: &Place) -> bool {
    let parts = host.names(&place.path).into_iter().filter(|name| name.starts_with("virtio"));
    // What is behind a unit has a link of that name to it.
    let has_unit = |folder: std::path::PathBuf| {
        let unit = folder.join("iommu");
        host.link(&unit).is_none() && host.follow(&unit).is_some()
    };
    host.is_of_class(place, &["0806"])
        || has_unit(place.path.clone())
        || parts.map(|name| place.path.join(name)).any(has_unit)
}

/// `iommu_dma_protection` of a domain is 0 where firmware does not promise that the IOMMU stands before its ports.
fn open_thunderbolt(host: &Host<'_>) -> Vec<String> {
    let folder = "sys/bus/thunderbolt/devices";
    let is_open = |name: &String| host.number(&format!("{folder}/{name}/iommu_dma_protection")) == Some(0);
    host.list(folder).into_iter().filter(is_open).collect()
}
