//! `portcullis status` reads the counters of each protected device, and lists the devices that are not protected.

use std::collections::BTreeMap;

use serde::Serialize;

use super::args::Status;
use super::device::{Device, FindError};
use super::host::Host;
use crate::machine::{document, schema};

/// The module's counters of a device, each a file of that name.
const COUNTERS: [&str; 19] = [
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
];

/// What there is to be known.
#[derive(Debug, Serialize)]
pub struct Found {
    pub module: Module,
    pub protected: Vec<Protected>,
    pub unprotected: Vec<Seen>,
}

#[derive(Debug, Serialize)]
pub struct Module {
    pub loaded: bool,
    pub version: Option<String>,
    /// What its parameters chose.
    pub rules: Vec<String>,
}

/// A device, protected or not. What cannot be read is `None`.
#[derive(Debug, Serialize)]
pub struct Seen {
    pub device: String,
    /// Its interfaces and disks.
    pub uses: Vec<String>,
    pub driver: Option<String>,
    pub group: Option<String>,
    pub linux_mode: Option<String>,
    pub external: bool,
}

/// A device behind Portcullis. What the module does not say, or not any more, is `None`.
#[derive(Debug, Serialize)]
pub struct Protected {
    #[serde(flatten)]
    pub seen: Seen,
    pub policy: Option<String>,
    pub window_us: Option<u64>,
    pub threshold: Option<u64>,
    pub mask: Option<String>,
    pub counters: BTreeMap<&'static str, Option<u64>>,
}

impl Protected {
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counters.get(name).copied().flatten()
    }

    /// Nanoseconds for each of the calls that a counter counts.
    pub fn mean(&self, ns: &str, calls: &str) -> Option<f64> {
        let calls = self.counter(calls).filter(|calls| *calls > 0)?;
        Some(self.counter(ns)? as f64 / calls as f64)
    }
}

impl Host<'_> {
    /// Reads what there is to be said of the device that is asked for, or of all.
    pub fn status(&self, asked: &Status) -> Result<Found, FindError> {
        let only = asked.device.as_deref().map(|name| self.find(name)).transpose()?;
        let is_asked = |name: &str| only.as_ref().is_none_or(|only| only.name == name);
        let mut names = self.names(&self.of_module("devices"));
        names.retain(|name| is_asked(name));
        let protected = names.iter().filter_map(|name| self.protected(name)).collect();
        let mut others = self.devices();
        others.extend(only.iter().filter(|only| !others.contains(only)).cloned().collect::<Vec<_>>());
        others.retain(|device| is_asked(&device.name) && !names.contains(&device.name));
        let text = |name| self.text(&self.of_module(name));
        let module = Module {
            loaded: self.has_module(),
            version: text("version"),
            rules: text("rules").unwrap_or_default().lines().map(str::to_owned).collect(),
        };
        Ok(Found { module, protected, unprotected: others.iter().map(|device| self.open(device)).collect() })
    }

    /// `None` where the device has gone while it was read: half of its figures would be of no use.
    fn protected(&self, name: &str) -> Option<Protected> {
        let folder = self.of_module("devices").join(name);
        let text = |file: &str| self.text(&folder.join(file)).filter(|text| !text.is_empty());
        let figure = |file: &str| text(file)?.parse().ok();
        let device = self.follow(&folder.join("device")).map(|path| Device { path, name: name.into() });
        let found = Protected {
            seen: Seen {
                device: name.into(),
                uses: device.as_ref().map_or(Vec::new(), |device| self.uses_of(device)),
                driver: text("driver"),
                group: text("group"),
                linux_mode: text("linux_mode"),
                external: device.as_ref().is_some_and(|device| self.is_external(device)),
            },
            policy: text("policy"),
            window_us: figure("window_us"),
            threshold: figure("threshold"),
            mask: text("mask"),
            counters: COUNTERS.iter().map(|name| (*name, figure(name))).collect(),
        };
        folder.exists().then_some(found)
    }

    fn open(&self, device: &Device) -> Seen {
        Seen {
            device: device.name.clone(),
            uses: self.uses_of(device),
            driver: self.driver(device),
            group: self.group(device),
            linux_mode: self.linux_mode(device),
            external: self.is_external(device),
        }
    }
}

/// The JSON that docs/linux.md describes.
pub fn json(found: &Found, asked: &Status) -> serde_json::Result<String> {
    document(schema::STATUS, asked, &[], found)
}
