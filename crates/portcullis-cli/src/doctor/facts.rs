//! All that is read, before anything is made of it.

use serde::Serialize;

use super::devices::Devices;
use super::faults::{self, Refused};
use super::firmware::Firmware;
use super::kernel::Kernel;
use super::log::{Log, State};
use super::memory::{self, Counter, HugePages, Limits, Swiotlb};
use super::modes::Mode;
use super::parameters::{self, Parameter};
use super::tree::Tree;
use super::units::{self, Unit};
use super::vfio::{self, Counters, Vfio};
use crate::linux::status::Module;

/// Where the second look at another machine's files is.
const LATER: &str = "later/";

/// What could not be seen, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unseen {
    pub what: String,
    pub why: String,
}

/// What is there on every Linux, and who tells what. Of another machine it may not have been collected, and then its absence means
/// nothing.
const USUAL: [(&str, &str); 6] = [
    ("proc/cmdline", "the kernel's parameters"),
    ("proc/cpuinfo", "whose processor it is, and whether it is a virtual machine"),
    ("sys/class/iommu", "which IOMMUs Linux uses"),
    ("sys/kernel/iommu_groups", "which devices it translates for"),
    ("sys/bus", "which devices there are"),
    ("sys/module", "which modules are loaded"),
];

#[derive(Debug, Serialize)]
pub struct Facts {
    pub kernel: Kernel,
    pub parameters: Vec<Parameter>,
    pub firmware: Firmware,
    pub units: Vec<Unit>,
    pub mode: Mode,
    #[serde(flatten)]
    pub devices: Devices,
    pub swiotlb: Swiotlb,
    pub counts: Vec<Counter>,
    pub api_errors: Option<u64>,
    pub huge_pages: HugePages,
    pub limits: Limits,
    pub vfio: Vfio,
    pub counters: Vec<Counters>,
    pub module: Module,
    /// Errors and lost bytes of devices that the module protects.
    pub module_errors: Vec<(String, u64, u64)>,
    #[serde(flatten)]
    pub refused: Refused,
    #[serde(rename = "log")]
    pub log_state: State,
    pub unseen: Vec<Unseen>,
    #[serde(skip)]
    pub log: Log,
    /// Those of [`USUAL`] that were not collected.
    #[serde(skip)]
    lacks: Vec<&'static str>,
}

impl Facts {
    /// Looks at the files, once, and a second time at what grows when `wait` has returned.
    pub fn read(tree: &Tree, is_here: bool, wait: Option<&dyn Fn()>) -> Self {
        let host = tree.host();
        let first = memory::counts(&host, "");
        let log = Log::read(tree, is_here);
        let kernel = Kernel::read(&host, &log);
        let units = units::read(&host, &kernel, &log);
        let devices = Devices::read(&host);
        let (module, module_errors) = module(tree);
        let second = wait.map_or(Vec::new(), |wait| {
            wait();
            memory::counts(&host, if is_here { "" } else { LATER })
        });
        let mut facts = Self {
            parameters: parameters::of(&kernel, &host, &log),
            firmware: Firmware::read(tree, &log),
            mode: Mode::read(&kernel, &units, &devices, &log),
            swiotlb: Swiotlb::read(&host),
            counts: memory::grown(&first, &second),
            api_errors: memory::api_errors(&host),
            huge_pages: HugePages::read(&host),
            limits: Limits::read(&host),
            vfio: Vfio::read(&host),
            counters: vfio::counters(&host),
            refused: faults::of(&log),
            log_state: log.state,
            unseen: Vec::new(),
            kernel,
            units,
            devices,
            module,
            module_errors,
            log,
            lacks: USUAL
                .iter()
                .map(|(path, _)| *path)
                .filter(|path| !is_here && !host.exists(path))
                .collect(),
        };
        facts.unseen = facts.unseen(tree, is_here);
        facts
    }

    /// Whether Linux translates for any device.
    pub fn has_iommu(&self) -> bool {
        !self.units.is_empty() || !self.devices.groups.is_empty()
    }

    /// Whether a path of [`USUAL`] was not collected, so that nothing follows from what is not below it.
    pub fn lacks(&self, path: &str) -> bool {
        self.lacks.contains(&path)
    }

    /// Whether all of [`USUAL`] was collected.
    pub fn has_all(&self) -> bool {
        self.lacks.is_empty()
    }

    /// Whether nothing tells if Linux uses an IOMMU.
    pub fn iommu_is_unknown(&self) -> bool {
        !self.has_iommu() && (self.lacks("sys/class/iommu") || self.lacks("sys/kernel/iommu_groups"))
    }

    fn unseen(&self, tree: &Tree, is_here: bool) -> Vec<Unseen> {
        let (host, mut all) = (tree.host(), Vec::new());
        let mut add = |what: &str, why: &str| all.push(Unseen { what: what.into(), why: why.into() });
        for (path, what) in USUAL.iter().filter(|(path, _)| self.lacks(path)) {
            add(what, &format!("{path} was not collected"));
        }
        let root = "only root may read it";
        match self.log_state {
            State::Refused => add("faults and the kernel's own words, which are in its log", root),
            State::Missing if is_here => {
                add("faults and the kernel's own words, which are in its log", "the log is empty")
            }
            State::Missing => {
                add("faults and the kernel's own words, which are in its log", "there is no file dmesg")
            }
            State::Cut => {
                add("what the kernel said at boot", "newer lines have taken the place of these in its log")
            }
            State::Whole => {}
        }
        if tree.is_refused("sys/firmware/acpi/tables") {
            add("what firmware's tables say", root);
        }
        if tree.is_refused("sys/kernel/debug") {
            add("swiotlb's use, and mappings that the DMA API's debugging counts (debugfs)", root);
        } else if self.swiotlb.slots.is_none() {
            let is_mounted = host.list("sys/kernel/debug").is_empty();
            add(
                "swiotlb's size and use",
                if is_mounted {
                    "debugfs is not mounted or not collected"
                } else {
                    "this kernel does not tell it"
                },
            );
        }
        if tree.is_refused("proc/slabinfo") {
            add("addresses that are in use (/proc/slabinfo)", root);
        }
        if !self.devices.groups.is_empty() && self.devices.groups.iter().all(|group| group.mode.is_none()) {
            add(
                "the mode of each group",
                "this kernel has no file type in /sys/kernel/iommu_groups (5.11 and later have)",
            );
        }
        all
    }
}

/// What `portcullis status` reads.
fn module(tree: &Tree) -> (Module, Vec<(String, u64, u64)>) {
    let asked = crate::linux::args::Status { device: None, json: false };
    let Ok(found) = tree.host().status(&asked) else {
        return (Module { loaded: false, version: None, rules: Vec::new() }, Vec::new());
    };
    let errors = found.protected.iter().filter_map(|device| {
        let count = |name| device.counter(name).unwrap_or_default();
        let (errors, lost) = (count("errors"), count("lost_bytes"));
        (errors > 0 || lost > 0).then(|| (device.seen.device.clone(), errors, lost))
    });
    let errors = errors.collect();
    (found.module, errors)
}
