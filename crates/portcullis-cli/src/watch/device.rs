//! What each device has mapped.

use std::path::{Path, PathBuf};

use portcullis_trace::{MapId, Op};

use super::flush::Flush;
use crate::linux::device::mode_of;

/// How Linux protects memory from a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// An unmap waits until the device cannot reach the buffer.
    Strict,
    /// It does not.
    Lazy,
    /// The device reaches all memory, as its IOMMU lets it through.
    Passthrough,
    /// The device reaches all memory, as it is behind no IOMMU.
    NoIommu,
    /// By this project's module: `portcullis status` tells more.
    Module,
    /// Nothing is known.
    Unknown,
}

impl Mode {
    /// The mode of `device` on the machine below `root`.
    fn of(root: &Path, device: &str) -> Self {
        // A name of a recording is no path.
        if device.contains(['/', '\0']) || device == ".." {
            return Self::Unknown;
        }
        if root.join("sys/kernel/portcullis/devices").join(device).exists() {
            return Self::Module;
        }
        let group = root.join("sys/bus/pci/devices").join(device).join("iommu_group/type");
        match std::fs::read_to_string(group).map(|kind| mode_of(kind.trim())).as_deref() {
            Ok("strict") => Self::Strict,
            Ok("lazy") => Self::Lazy,
            Ok("passthrough") => Self::Passthrough,
            Ok(_) => Self::Unknown,
            // Devices of other buses may have one.
            Err(_) if root.join("sys/bus/pci/devices").join(device).exists() => Self::NoIommu,
            Err(_) => Self::Unknown,
        }
    }
}

/// A device.
#[derive(Debug)]
struct Device {
    name: String,
    mode: Mode,
    maps: u64,
    bytes: u64,
    open: u64,
    open_bytes: u64,
    flush: Flush,
}

/// What is to be shown of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Shown<'a> {
    pub name: &'a str,
    pub mode: Mode,
    /// In each second.
    pub maps: f64,
    pub bytes: f64,
    /// Mappings that began in the recording and have not ended.
    pub open: u64,
    pub open_bytes: u64,
    /// After their unmap, on average at any time, and the longest.
    pub after_bytes: f64,
    pub after_ns: u64,
}

/// All devices.
#[derive(Debug)]
pub struct Devices {
    root: PathBuf,
    all: Vec<Device>,
    /// The bytes of each live mapping, by its number.
    live: Vec<u64>,
    last_ns: Option<u64>,
}

impl Devices {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), all: Vec::new(), live: Vec::new(), last_ns: None }
    }

    pub fn map(&mut self, op: &Op, id: MapId, bytes: u64, names: &[String]) {
        let id = id as usize;
        if id >= self.live.len() {
            self.live.resize(id + 1, 0);
        }
        if let Some(live) = self.live.get_mut(id) {
            *live = bytes;
        }
        while self.all.len() <= op.device.0 as usize {
            let name = names.get(self.all.len()).cloned().unwrap_or_default();
            let mode = Mode::of(&self.root, &name);
            let flush = Flush::default();
            self.all.push(Device { name, mode, maps: 0, bytes: 0, open: 0, open_bytes: 0, flush });
        }
        if let Some(device) = self.all.get_mut(op.device.0 as usize) {
            device.maps += 1;
            device.bytes = device.bytes.saturating_add(bytes);
            device.open += 1;
            device.open_bytes = device.open_bytes.saturating_add(bytes);
        }
    }

    pub fn unmap(&mut self, op: &Op, id: MapId) {
        let bytes = self.live.get(id as usize).copied().unwrap_or(0);
        let Some(device) = self.all.get_mut(op.device.0 as usize) else { return };
        device.open = device.open.saturating_sub(1);
        device.open_bytes = device.open_bytes.saturating_sub(bytes);
        if device.mode == Mode::Lazy {
            device.flush.unmap(op.time_ns, op.cpu, bytes);
        }
    }

    /// What happened since the last view, which is at `now_ns` of the recording. Few events may lie beside each other in it: rates
    /// are of no less time than the `least_ns` that went by.
    pub fn views(&mut self, now_ns: u64, least_ns: u64) -> Vec<Shown<'_>> {
        let recorded_ns = now_ns.saturating_sub(self.last_ns.unwrap_or(now_ns));
        let since_ns = recorded_ns.max(least_ns).max(1) as f64;
        self.last_ns = Some(now_ns);
        let root = &self.root;
        let shown = |device: &'_ mut Device| {
            device.mode = Mode::of(root, &device.name);
            device.flush.until(now_ns);
            let (byte_ns, after_ns) = device.flush.take();
            let (maps, bytes) = (std::mem::take(&mut device.maps), std::mem::take(&mut device.bytes));
            (maps as f64 * 1e9 / since_ns, bytes as f64 * 1e9 / since_ns, byte_ns as f64 / since_ns, after_ns)
        };
        let mut views = Vec::new();
        for device in &mut self.all {
            let (maps, bytes, after_bytes, after_ns) = shown(device);
            let Device { name, mode, open, open_bytes, .. } = device;
            let (mode, open, open_bytes) = (*mode, *open, *open_bytes);
            views.push(Shown { name, mode, maps, bytes, open, open_bytes, after_bytes, after_ns });
        }
        views
    }

    /// The first view counts from `now_ns`.
    pub fn begin(&mut self, now_ns: u64) {
        self.last_ns.get_or_insert(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use portcullis_trace::{DeviceId, OpKind};

    use super::*;

    /// A machine with two devices, of which one has a group.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/pci/devices");
        std::fs::create_dir_all(devices.join("a/iommu_group")).unwrap();
        std::fs::create_dir_all(devices.join("b")).unwrap();
        root
    }

    fn op(time_ns: u64, device: u32) -> Op {
        Op { time_ns, line: 1, cpu: 0, device: DeviceId(device), kind: OpKind::Unmap { id: 0 } }
    }

    #[test]
    fn the_mode_is_the_group_s() {
        let root = machine();
        let mode = |device| Mode::of(root.path(), device);
        for (kind, expected) in [
            ("DMA\n", Mode::Strict),
            ("DMA-FQ\n", Mode::Lazy),
            ("identity\n", Mode::Passthrough),
            ("blocked\n", Mode::Unknown),
        ] {
            std::fs::write(root.path().join("sys/bus/pci/devices/a/iommu_group/type"), kind).unwrap();
            assert_eq!(mode("a"), expected, "{kind}");
        }
        assert_eq!(
            [mode("b"), mode("c"), mode("../devices/a")],
            [Mode::NoIommu, Mode::Unknown, Mode::Unknown]
        );
        std::fs::create_dir_all(root.path().join("sys/kernel/portcullis/devices/a")).unwrap();
        assert_eq!(mode("a"), Mode::Module);
    }

    #[test]
    fn rates_are_of_the_time_between_two_views() {
        let root = machine();
        std::fs::write(root.path().join("sys/bus/pci/devices/a/iommu_group/type"), "DMA-FQ\n").unwrap();
        let names = ["b".to_owned(), "a".to_owned()];
        let mut devices = Devices::new(root.path());
        devices.begin(1_000_000_000);
        for (id, bytes) in [(0, 4096), (7, 1024)] {
            devices.map(&op(1_100_000_000, 1), id, bytes, &names);
        }
        devices.unmap(&op(1_500_000_000, 1), 7);
        let views = devices.views(3_000_000_000, 1_900_000_000);
        assert_eq!((views.len(), views[0].name, views[0].maps), (2, "b", 0.0));
        let expected = Shown {
            name: "a",
            mode: Mode::Lazy,
            maps: 1.0,
            bytes: 2_560.0,
            open: 1,
            open_bytes: 4_096,
            // 1,024 bytes for 10 ms of 2 s.
            after_bytes: 5.12,
            after_ns: 10_000_000,
        };
        assert_eq!(views[1], expected);
        let views = devices.views(4_000_000_000, 0);
        assert_eq!((views[1].maps, views[1].open, views[1].after_bytes, views[1].after_ns), (0.0, 1, 0.0, 0));
        // The one event of two seconds is not a thousand million of them.
        devices.map(&op(4_000_000_000, 1), 8, 1024, &names);
        let views = devices.views(4_000_000_000, 2_000_000_000);
        assert_eq!((views[1].maps, views[1].bytes), (0.5, 512.0));
    }
}
