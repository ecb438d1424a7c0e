//! What holds over reboots: a file of modprobe's, with the module's parameters, and with drivers that wait for the module.
//!
//! The module takes a device before its driver's probe, so it must be there first. `softdep DRIVER pre: portcullis` has modprobe
//! and udev load it before the driver, wherever that happens; an initramfs has a copy of the file.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use portcullis_trace::Printable;

use super::args::Settings;
use super::device::{Device, is_plain, list};
use super::host::Host;

/// The file, as its readers know it.
pub const PATH: &str = "/etc/modprobe.d/portcullis.conf";

/// The first line of a file that is ours.
const HEAD: &str = "# Written by `portcullis protect --keep`, which writes it anew; docs/linux.md of Portcullis explains it.";

/// Programs that make an initramfs, where they lie, and what has one made.
const MAKERS: [(&str, &str); 3] = [
    ("usr/sbin/update-initramfs", "update-initramfs -u"),
    (
        "usr/bin/dracut",
        r#"dracut --force, with add_drivers+=" portcullis " in /etc/dracut.conf.d/portcullis.conf"#,
    ),
    ("usr/bin/mkinitcpio", "mkinitcpio -P, with portcullis in MODULES of /etc/mkinitcpio.conf"),
];

/// Why nothing is kept, or no more.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("{file} was not written by this program: put this into it by hand, or move it away:\n{wanted}")]
    Foreign { file: &'static str, wanted: String },
    #[error(
        "{file} keeps {} for {}, and the module's parameters have one policy for all: protect these with the same, \
         or take them out first (`portcullis unprotect DEVICE --keep`)",
        Printable(settings),
        Printable(list(devices))
    )]
    Other { file: &'static str, settings: String, devices: Vec<String> },
    #[error("{file} keeps nothing for {}", Printable(device))]
    Absent { file: &'static str, device: String },
    #[error("cannot write {file}: {source}")]
    Write { file: &'static str, source: io::Error },
}

/// A rule for devices to come, and not the name of one.
pub fn is_rule(name: &str) -> bool {
    let is_class =
        |class: &str| matches!(class.len(), 2 | 4 | 6) && class.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_driver = name.strip_prefix("driver:").is_some_and(is_plain);
    is_driver || name.strip_prefix("class:").is_some_and(is_class) || matches!(name, "untrusted" | "all")
}

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kept {
    /// Devices and rules.
    devices: Vec<String>,
    settings: String,
    /// Modules of drivers that wait.
    drivers: BTreeSet<String>,
}

/// What is to become of the file.
#[derive(Debug)]
pub struct Plan {
    /// `None`: it goes.
    text: Option<String>,
    said: Vec<String>,
}

impl Kept {
    fn text(&self) -> String {
        let mut text =
            format!("{HEAD}\noptions portcullis devices={} {}\n", self.devices.join(","), self.settings);
        self.drivers.iter().for_each(|driver| text.push_str(&format!("softdep {driver} pre: portcullis\n")));
        text
    }

    /// `None` where the text is not ours.
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        lines.next().filter(|line| *line == HEAD)?;
        let rest = lines.next()?.strip_prefix("options portcullis devices=")?;
        let (devices, settings) = rest.split_once(' ')?;
        let driver =
            |line: &str| Some(line.strip_prefix("softdep ")?.strip_suffix(" pre: portcullis")?.to_owned());
        let drivers = lines.map(driver).collect::<Option<BTreeSet<_>>>()?;
        let devices = devices.split(',').map(str::to_owned).collect();
        Some(Self { devices, settings: settings.into(), drivers })
    }
}

impl Host<'_> {
    fn conf(&self) -> PathBuf {
        self.at(PATH.trim_start_matches('/'))
    }

    /// What the file keeps; `Err` with its text where it is somebody else's.
    fn kept(&self) -> Result<Option<Kept>, ()> {
        match self.text(&self.conf()) {
            None => Ok(None),
            Some(text) => Kept::parse(&text).map(Some).ok_or(()),
        }
    }

    /// How `rule`, a device or a rule for some, is kept for each boot. Nothing is written yet.
    pub fn keep(&self, rule: &str, settings: &Settings) -> Result<Plan, KeepError> {
        let (file, settings) = (PATH, settings.to_string());
        let drivers = self.drivers_of(rule);
        let modules = drivers.iter().filter_map(|driver| self.module_of(driver)).collect::<BTreeSet<_>>();
        let mut kept = Kept { devices: Vec::new(), settings: settings.clone(), drivers: modules };
        match self.kept() {
            Err(()) => {
                kept.devices.push(rule.into());
                return Err(KeepError::Foreign { file, wanted: kept.text() });
            }
            Ok(Some(mut before)) => {
                before.devices.retain(|other| other != rule);
                if before.settings != settings && !before.devices.is_empty() {
                    return Err(KeepError::Other {
                        file,
                        settings: before.settings,
                        devices: before.devices,
                    });
                }
                kept.devices = before.devices;
                kept.drivers.extend(before.drivers);
            }
            Ok(None) => {}
        }
        kept.devices.push(rule.into());
        let mut said =
            vec![format!("Kept for each boot: {} ({}), in {file}.", Printable(rule), Printable(&settings))];
        let built_in: Vec<&String> =
            drivers.iter().filter(|driver| self.module_of(driver).is_none()).collect();
        if !built_in.is_empty() {
            said.push(format!(
                "But {} is built into this kernel, and has its devices before any module is there: protect them anew \
                 after each boot.",
                Printable(list(&built_in))
            ));
        }
        said.push(self.initramfs());
        Ok(Plan { text: Some(kept.text()), said })
    }

    /// Whether the file, if it is ours, has this rule.
    pub fn is_kept(&self, rule: &str) -> bool {
        self.kept().ok().flatten().is_some_and(|kept| kept.devices.iter().any(|other| other == rule))
    }

    /// How `rule` is kept no more.
    pub fn keep_no_more(&self, rule: &str) -> Result<Plan, KeepError> {
        let file = PATH;
        let absent = || KeepError::Absent { file, device: rule.into() };
        let Ok(kept) = self.kept() else {
            return Err(KeepError::Foreign { file, wanted: format!("(without {rule})") });
        };
        let mut kept =
            kept.filter(|kept| kept.devices.iter().any(|other| other == rule)).ok_or_else(absent)?;
        kept.devices.retain(|other| other != rule);
        // Which drivers still wait is found anew: none of what is kept may come before the module.
        kept.drivers = kept
            .devices
            .iter()
            .flat_map(|other| self.drivers_of(other))
            .filter_map(|driver| self.module_of(&driver))
            .collect();
        let text = (!kept.devices.is_empty()).then(|| kept.text());
        let said = vec![format!("{} is no longer kept in {file}.", Printable(rule)), self.initramfs()];
        Ok(Plan { text, said })
    }

    /// Does what was planned, and says so.
    pub fn settle(&self, plan: &Plan) -> Result<(), KeepError> {
        let done = match &plan.text {
            Some(text) => self.write_whole(text),
            None => std::fs::remove_file(self.conf()),
        };
        done.map_err(|source| KeepError::Write { file: PATH, source })?;
        plan.said.iter().for_each(|line| self.outside.say(line));
        Ok(())
    }

    /// Writes the file as a whole, or leaves it as it was.
    fn write_whole(&self, text: &str) -> io::Result<()> {
        let (path, beside) = (self.conf(), self.conf().with_extension("conf.new"));
        std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
        std::fs::write(&beside, text)?;
        std::fs::rename(&beside, &path)
    }

    /// What a copy of the file in the initramfs needs.
    fn initramfs(&self) -> String {
        let maker = MAKERS.iter().find(|(program, _)| self.at(program).exists());
        match maker {
            Some((_, command)) => {
                format!("The initramfs has a copy of this file: bring it up to date ({command}).")
            }
            None => {
                "If this system has an initramfs, that has a copy of this file: have it made anew.".into()
            }
        }
    }

    /// The drivers that must not come before the module: those of the devices that match now.
    fn drivers_of(&self, rule: &str) -> Vec<String> {
        if let Some(driver) = rule.strip_prefix("driver:") {
            return vec![driver.into()];
        }
        let devices = self.devices().into_iter().filter(|device| self.is_meant(rule, device));
        devices.filter_map(|device| self.driver(&device)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Whether a rule means this device.
    pub fn is_meant(&self, rule: &str, device: &Device) -> bool {
        match rule.split_once(':') {
            Some(("driver", driver)) => self.driver(device).is_some_and(|its| its == driver),
            Some(("class", class)) => self.is_of_class(device, &[&class.to_ascii_lowercase()]),
            _ => rule == "all" || rule == device.name || rule == "untrusted" && self.is_external(device),
        }
    }

    /// The module that a driver is in; `None` where it is built into the kernel. One that is not there yet has the driver's name.
    fn module_of(&self, driver: &str) -> Option<String> {
        let buses = self.at("sys/bus");
        let of = |bus: &String| buses.join(bus).join("drivers").join(driver);
        match self.names(&buses).iter().map(of).find(|folder| folder.exists()) {
            Some(folder) => self.link(&folder.join("module")),
            None => Some(driver.into()),
        }
        .filter(|module| is_plain(module))
    }
}
