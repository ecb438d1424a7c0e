//! The module, as `/sys/kernel/portcullis` shows it.

use std::io;
use std::path::PathBuf;

use super::args::Settings;
use super::device::Device;
use super::host::Host;

impl Host<'_> {
    /// A file of the module's.
    pub fn of_module(&self, name: &str) -> PathBuf {
        self.at("sys/kernel/portcullis").join(name)
    }

    pub fn has_module(&self) -> bool {
        self.of_module("protect").exists()
    }

    /// The folder of a device that is protected.
    pub fn folder(&self, device: &Device) -> PathBuf {
        self.of_module("devices").join(&device.name)
    }

    pub fn is_protected(&self, device: &Device) -> bool {
        self.folder(device).exists()
    }

    /// What the module's parameters say about this device: it is taken by that at each bind.
    pub fn rule_for(&self, device: &Device) -> Option<String> {
        let rules = self.text(&self.of_module("rules"))?;
        let mut words = rules.lines().filter_map(|line| line.split(' ').next());
        words.find(|rule| self.is_meant(rule, device)).map(str::to_owned)
    }

    /// How a protected device is protected, in words that `protect` takes.
    pub fn settings(&self, device: &Device) -> Option<Settings> {
        let folder = self.folder(device);
        let policy = self.text(&folder.join("policy"))?;
        let figure = |name: &str| self.text(&folder.join(name))?.parse().ok();
        let of = |policies: &[&str], name: &str| {
            policies.contains(&policy.as_str()).then(|| figure(name)).flatten()
        };
        let (window_us, threshold) = (of(&["lazy"], "window_us"), of(&["bounce", "auto"], "threshold"));
        Some(Settings { policy, window_us, threshold })
    }

    pub fn set(&self, device: &Device, settings: &Settings) -> io::Result<()> {
        self.outside.write(&self.of_module("protect"), &format!("{} {settings}", device.name))
    }

    pub fn give_back(&self, device: &Device) -> io::Result<()> {
        self.outside.write(&self.of_module("unprotect"), &device.name)
    }
}
