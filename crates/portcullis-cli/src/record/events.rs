//! Which events this kernel has, which of them are switched on, and what it cannot record.

use std::path::Path;

use portcullis_trace::ring::Formats;

use super::instance::Instance;
use super::tracefs::TracingError;

/// VT-d's own events of maps and unmaps, in Linux 5.4 to 5.10.
const VTD: [&str; 6] =
    ["map_single", "map_sg", "bounce_map_single", "unmap_single", "unmap_sg", "bounce_unmap_single"];

/// Fields that have a device's name.
const DEVICE_FIELDS: [&str; 2] = ["device", "dev_name"];

/// What is recorded.
#[derive(Debug)]
pub struct Events {
    pub formats: Formats,
    /// `dma:dma_map_sg` and its kin, in order.
    pub names: Vec<String>,
}

impl Events {
    /// Switches on all events of DMA that this kernel has, in `instance`; with `device`, which names devices as `replay --device` does,
    /// theirs. The IOMMU's events name no device: others' would be taken for mappings by themselves.
    pub fn switch_on(instance: &Instance, device: Option<&str>) -> Result<Self, TracingError> {
        let mut events =
            Self { formats: Formats::new(&instance.read("events/header_page")?)?, names: Vec::new() };
        for system in ["dma", "iommu", "intel_iommu"] {
            if system == "iommu" && device.is_some() && events.has_any("dma") {
                continue;
            }
            for name in names(&instance.path(&format!("events/{system}"))) {
                if system == "intel_iommu" && !VTD.contains(&name.as_str()) {
                    continue;
                }
                let folder = format!("events/{system}/{name}");
                let format = instance.read(&format!("{folder}/format"))?;
                events.formats.add(system, &format)?;
                if let Some((device, field)) = device.zip(device_field(&format)) {
                    instance.write(
                        &format!("{folder}/filter"),
                        &format!("{field} == \"{device}\" || {field} ~ \"*:{device}\""),
                    )?;
                }
                instance.write(&format!("{folder}/enable"), "1")?;
                events.names.push(format!("{system}:{name}"));
            }
        }
        if events.names.is_empty() { Err(TracingError::NoEvents) } else { Ok(events) }
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// Whether any event of `system` is recorded.
    fn has_any(&self, system: &str) -> bool {
        self.names.iter().any(|name| name.split(':').next() == Some(system))
    }
}

/// The events in a folder, in the order of their names.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let events = entries.filter(|entry| entry.path().join("format").exists());
    let mut names: Vec<String> = events.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn device_field(format: &str) -> Option<&'static str> {
    DEVICE_FIELDS.into_iter().find(|field| format.contains(&format!("char[] {field};")))
}

/// The machine, as far as it decides what is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Its version, the first two numbers.
    pub version: (u32, u32),
    /// Whether an IOMMU translates for devices of the kernel's drivers.
    pub translates: bool,
}

impl Kernel {
    /// The kernel whose `/proc` and `/sys` are below `root`.
    pub fn of(root: &Path) -> Self {
        let release = std::fs::read_to_string(root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        let mut numbers =
            release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let groups = std::fs::read_dir(root.join("sys/kernel/iommu_groups")).into_iter().flatten().flatten();
        let kind = |group: std::fs::DirEntry| std::fs::read_to_string(group.path().join("type"));
        let translates = groups.map(kind).any(|kind| kind.is_ok_and(|kind| kind.starts_with("DMA")));
        Self { version, translates }
    }
}

/// What is not recorded, and what that hides; a sentence or two each. `one` where one device was asked for.
pub fn hidden(events: &Events, kernel: Kernel, one: bool) -> Vec<String> {
    let (major, minor) = kernel.version;
    let mut hidden = Vec::new();
    if !events.has_any("dma") {
        hidden.push(before_dma_events(events, kernel));
        if one && !events.has("intel_iommu:map_single") {
            hidden.push("Its events do not name devices: those of all are recorded.".into());
        }
    } else if one {
        let linked = if (major, minor) >= (6, 17) {
            ", and what NVMe maps without a `dma:*` event is missing"
        } else {
            ""
        };
        hidden.extend(kernel.translates.then(|| {
            format!(
                "With --device, `iommu:*` is left out, as it does not name devices: how long the entries of merged lists are is then guessed\
                 {linked}. To have all, record without --device, and give it to `replay`."
            )
        }));
    } else if kernel.translates && !events.has("iommu:map") {
        hidden.push(
            "This kernel has no `iommu:*` events: what is mapped without a `dma:*` event is not recorded."
                .into(),
        );
    } else if kernel.translates && (major, minor) == (7, 0) {
        hidden.push(
            "Linux 7.0 does not record `iommu:map` (its later stable versions do): of what NVMe maps only the end is there, and \
             `replay` may give no verdict. Boot with `iommu=pt` for the recording, or use a later version."
                .into(),
        );
    } else if kernel.translates && (major, minor) >= (6, 17) {
        hidden.push(
            "Since Linux 6.17, NVMe and some other drivers map without a `dma:*` event: of these mappings the direction and \
             the bytes in use are not recorded, so policies that copy are not judged. Boot with `iommu=pt` for the recording to have \
             them, too."
                .into(),
        );
    }
    hidden
}

/// Before Linux 6.12 there were the IOMMU's events alone.
fn before_dma_events(events: &Events, kernel: Kernel) -> String {
    let (major, minor) = kernel.version;
    let what = if (major, minor) >= (6, 12) {
        format!("This kernel ({major}.{minor}) is built without the events `dma:*`.")
    } else {
        format!("This kernel ({major}.{minor}) has no `dma:*` events, which Linux has since 6.12.")
    };
    let hides = if (major, minor) < (4, 0) {
        "What drivers map is recorded on 32-bit ARM alone, and without a size on most of these versions."
    } else if (major, minor) < (5, 4) {
        "Behind VT-d and AMD-Vi, what drivers map is not recorded at all: only what virtual machines do by VFIO is."
    } else if events.has("intel_iommu:map_single") {
        "Of each mapping the direction, and which bytes of its pages are in use, are not recorded: policies that copy are not judged."
    } else if kernel.translates {
        "Of each mapping the device, the direction, and which bytes of its pages are in use, are not recorded: policies that copy are \
         not judged. Devices that no IOMMU translates are not recorded."
    } else {
        "No IOMMU translates what the kernel's drivers map, so nothing of that is recorded. Boot with the IOMMU on (`intel_iommu=on`, \
         `amd_iommu=on`, no `iommu=pt`), or use a later kernel."
    };
    format!("{what} {hides}")
}
