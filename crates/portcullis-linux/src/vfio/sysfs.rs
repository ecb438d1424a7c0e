//! A PCI device below `/sys`: its group, its driver, and its VFIO file.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use portcullis::addr::DeviceId;

use super::error::OpenError;

const DEVICES: &str = "/sys/bus/pci/devices";
pub const IOMMUS: &str = "/sys/class/iommu";

#[derive(Debug)]
pub struct Place {
    name: String,
    folder: PathBuf,
    /// Domain, bus, device and function.
    numbers: [u32; 4],
}

/// Parses a name such as `0000:01:00.0`.
pub fn numbers(name: &str) -> Option<[u32; 4]> {
    let (rest, function) = name.split_once('.')?;
    let mut parts = rest.split(':');
    let mut part = |digits: usize, most| {
        let text = parts.next()?;
        let is_hex =
            text.len() >= digits && text.len() <= most && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u32::from_str_radix(text, 16).ok().filter(|_| is_hex)
    };
    let found = [part(4, 8)?, part(2, 2)?, part(2, 2)?];
    let is_function = function.len() == 1 && parts.next().is_none();
    let function = function.parse().ok().filter(|function| is_function && *function < 8 && found[2] < 32)?;
    Some([found[0], found[1], found[2], function])
}

impl Place {
    pub fn find(name: &str) -> Result<Self, OpenError> {
        Self::find_in(&path(DEVICES), name)
    }

    pub fn find_in(devices: &Path, name: &str) -> Result<Self, OpenError> {
        let folder = devices.join(name);
        match numbers(name) {
            Some(numbers) if folder.exists() => Ok(Self { name: name.to_owned(), folder, numbers }),
            _ => Err(OpenError::NoDevice { name: name.to_owned() }),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its bus, device and function.
    pub fn id(&self) -> DeviceId {
        let [_, bus, device, function] = self.numbers;
        DeviceId(bus << 8 | device << 3 | function)
    }

    /// The number of its group.
    pub fn group(&self) -> Result<u32, OpenError> {
        let link = last_of_link(&self.folder.join("iommu_group"));
        link.and_then(|number| number.parse().ok()).ok_or(OpenError::NoGroup { name: self.name.clone() })
    }

    fn driver(&self) -> Option<String> {
        last_of_link(&self.folder.join("driver"))
    }

    /// Checks that the device is bound to any VFIO driver. `iommus` is where the kernel lists its IOMMUs: without any, no VFIO driver takes
    /// the device. (Behind some IOMMUs a device has no group before it has a driver.)
    pub fn check_bound(&self, iommus: &Path) -> Result<(), OpenError> {
        let has_iommu = || iommus.read_dir().is_ok_and(|mut entries| entries.next().is_some());
        match self.driver() {
            Some(driver) if driver.contains("vfio") => self.group().map(drop),
            _ if self.group().is_err() && !has_iommu() => Err(OpenError::NoGroup { name: self.name.clone() }),
            driver => Err(OpenError::NotBound { name: self.name.clone(), driver }),
        }
    }

    /// The device's own file, if the kernel has one.
    pub fn cdev(&self) -> Result<Option<String>, OpenError> {
        let folder = self.folder.join("vfio-dev");
        let failed = |error| OpenError::call(format!("reading {}", folder.display()), error);
        let mut entries = match folder.read_dir() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            entries => entries.map_err(failed)?,
        };
        let entry = entries.next().transpose().map_err(failed)?;
        Ok(entry.map(|entry| format!("/dev/vfio/devices/{}", entry.file_name().to_string_lossy())))
    }

    /// The error of a group with a kernel driver.
    pub fn not_viable(&self) -> OpenError {
        let others = self.folder.join("iommu_group/devices").read_dir().into_iter().flatten().flatten();
        let driven = others.filter_map(|other| {
            let driver = last_of_link(&other.path().join("driver"))?;
            let other = other.file_name().to_string_lossy().into_owned();
            // The kernel drives bridges.
            let is_ours = driver.contains("vfio") || driver == "pci-stub" || driver == "pcieport";
            (!is_ours).then_some((other, driver))
        });
        let (other, driver) =
            driven.last().unwrap_or_else(|| ("another device".to_owned(), "of the kernel".to_owned()));
        OpenError::NotViable { name: self.name.clone(), other, driver }
    }
}

/// The last component of a link's target.
fn last_of_link(link: &Path) -> Option<String> {
    let to = std::fs::read_link(link).ok()?;
    Some(to.file_name()?.to_string_lossy().into_owned())
}

/// The path of a kernel file.
pub fn path(name: &str) -> PathBuf {
    #[cfg(test)]
    if let Some(root) = super::tests::kernel::root() {
        return root.join(name.trim_start_matches('/'));
    }
    name.into()
}

/// Opens a kernel file.
pub fn open(name: &str) -> Result<File, OpenError> {
    OpenOptions::new().read(true).write(true).open(path(name)).map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => OpenError::Permission { path: name.to_owned() },
        ErrorKind::ResourceBusy => OpenError::Busy { path: name.to_owned() },
        _ => OpenError::call(format!("opening {name}"), error),
    })
}
