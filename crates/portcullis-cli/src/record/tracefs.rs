//! Where tracefs is, and what keeps this program from it.

use std::io;
use std::path::{Path, PathBuf};

use crate::header::some_of;
use crate::linux::host::is_root;

/// Where tracefs is mounted, most often and on old kernels.
const PLACES: [&str; 2] = ["sys/kernel/tracing", "sys/kernel/debug/tracing"];

/// Why nothing can be recorded.
#[derive(Debug, thiserror::Error)]
pub enum TracingError {
    #[error(
        "only root may switch the kernel's events on. Type:\n  sudo {}",
        portcullis_trace::Printable(command)
    )]
    NotRoot { command: String },
    #[error("this kernel has no tracefs (CONFIG_TRACING): nothing can be recorded on it")]
    NoTracefs,
    #[error(
        "tracefs is not mounted, and this program cannot mount it ({0}). Type:\n  mount -t tracefs nodev /sys/kernel/tracing"
    )]
    NotMounted(io::Error),
    #[error("the kernel is locked down: even root may not read its events ({0})")]
    LockedDown(io::Error),
    #[error("another `portcullis record` or `portcullis watch` runs on this machine: wait for its end")]
    Busy,
    #[error(
        "{0} is a tracing instance that a run before has left, and it is in use: close what reads the files in it, and try again"
    )]
    LeftInUse(String),
    #[error(
        "this kernel has no events of DMA: neither `dma:*` (Linux 6.12 and later) nor `iommu:*` (with an IOMMU's driver)"
    )]
    NoEvents,
    #[error(
        "this machine has no device {}, and none whose name ends so behind a colon. {}",
        portcullis_trace::Printable(name),
        there_are(devices, means.as_deref())
    )]
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// The device that `protect` and `status` know by that name, if there is one.
        means: Option<String>,
        /// Those on PCI that are no bridges.
        devices: Vec<String>,
    },
    #[error("{}: {source}", portcullis_trace::Printable(path.display()))]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Format(#[from] portcullis_trace::ring::FormatError),
}

impl TracingError {
    /// What `path` answered.
    pub fn of(path: &Path, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM) if is_root() => Self::LockedDown(source),
            Some(libc::EPERM | libc::EACCES) if !is_root() => Self::NotRoot { command: again() },
            _ => Self::File { path: path.to_owned(), source },
        }
    }
}

/// Which device could be named.
fn there_are(devices: &[String], means: Option<&str>) -> String {
    let of_pci = match devices {
        [] => "It has none on PCI".to_owned(),
        all => format!("On PCI it has {}: `portcullis status` says what they are", some_of(all)),
    };
    let means = means.map_or(String::new(), |device| {
        format!("For what is made of {0}, type --device {0}. ", portcullis_trace::Printable(device))
    });
    format!("{means}{of_pci}; `ls /sys/bus/*/devices` lists all devices")
}

/// What was typed, with this program's path, since root may not find it by its name.
fn again() -> String {
    let program = std::env::current_exe().map_or("portcullis".into(), |path| path.display().to_string());
    let words = std::env::args().skip(1);
    std::iter::once(program).chain(words).collect::<Vec<_>>().join(" ")
}

/// Tracefs, and what keeps it mounted.
#[derive(Debug)]
pub struct Tracefs {
    pub root: PathBuf,
    /// A mount that no other program sees, if there was none.
    _mount: Option<std::os::fd::OwnedFd>,
}

impl Tracefs {
    /// Finds tracefs on the machine whose files are below `root`; where it is mounted nowhere, and this is the machine that runs,
    /// mounts it for this program alone.
    pub fn find(root: &Path) -> Result<Self, TracingError> {
        for place in PLACES {
            let place = root.join(place);
            match place.join("events").metadata() {
                Ok(_) => return Ok(Self { root: place, _mount: None }),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(TracingError::of(&place, error));
                }
                Err(_) => {}
            }
        }
        if root != Path::new("/") {
            return Err(TracingError::NoTracefs);
        }
        if !is_root() {
            return Err(TracingError::NotRoot { command: again() });
        }
        let mount = mount().map_err(|error| match error.raw_os_error() {
            Some(libc::ENODEV) => TracingError::NoTracefs,
            // Before Linux 5.2, and in a container.
            _ => TracingError::NotMounted(error),
        })?;
        let root = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&mount)));
        Ok(Self { root, _mount: Some(mount) })
    }
}

/// Mounts tracefs where no name leads to it, so that it is gone with this program.
fn mount() -> io::Result<std::os::fd::OwnedFd> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracefs_is_found_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let found = || Tracefs::find(folder.path()).map(|tracefs| tracefs.root);
        assert!(matches!(found(), Err(TracingError::NoTracefs)));
        for place in PLACES.into_iter().rev() {
            std::fs::create_dir_all(folder.path().join(place).join("events")).unwrap();
            assert_eq!(found().unwrap(), folder.path().join(place));
        }
    }
}
