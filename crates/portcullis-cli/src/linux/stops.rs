//! What stops working while a device has no driver: file systems on it, swap, interfaces, and the session that asks.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use portcullis_trace::Printable;

use super::device::{Device, list};
use super::host::Host;

/// How many processes above this one are looked at for a session.
const ANCESTORS: usize = 64;

/// How often interfaces that are made of others are followed.
const DEEPEST: usize = 16;

/// Kinds of file systems without a device.
const IN_MEMORY: [&str; 4] = ["rootfs", "tmpfs", "ramfs", "overlay"];

/// One thing that stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// A sentence without its end.
    pub what: String,
    /// Whether this system does not survive it.
    pub is_fatal: bool,
}

/// A file system, as `/proc/self/mountinfo` has it (proc_pid_mountinfo(5)).
struct Mount {
    at: String,
    number: String,
    kind: String,
    source: String,
}

/// Undoes what the kernel does with blanks in its tables: `\040`.
fn plain(field: &str) -> String {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = (first == b'\\').then(|| after.get(..3)).flatten();
        let code = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(first));
        rest = code.and_then(|_| after.get(3..)).unwrap_or(after);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn mount(line: &str) -> Option<Mount> {
    let (places, kinds) = line.split_once(" - ")?;
    let mut places = places.split(' ').skip(2);
    let mut kinds = kinds.split(' ');
    let number = places.next()?.to_owned();
    Some(Mount {
        number,
        at: plain(places.nth(1)?),
        kind: kinds.next()?.to_owned(),
        source: plain(kinds.next()?),
    })
}

impl Host<'_> {
    /// What stops when these devices lose their drivers.
    pub fn stops(&self, devices: &[Device]) -> Vec<Stop> {
        let mounts: Vec<Mount> =
            self.lines("proc/self/mountinfo").iter().filter_map(|line| mount(line)).collect();
        let mut stops = self.file_systems(devices, &mounts);
        stops.extend(self.swap(devices, &mounts));
        stops.extend(self.interfaces(devices));
        stops
    }

    fn lines(&self, path: &str) -> Vec<String> {
        self.text(&self.at(path)).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    fn file_systems(&self, devices: &[Device], mounts: &[Mount]) -> Vec<Stop> {
        let has_disks = || devices.iter().any(|device| self.has(device, "block"));
        let mut stops: Vec<Stop> = Vec::new();
        for mount in mounts {
            let at = Printable(&mount.at);
            let is_root = mount.at == "/";
            let what = match self.parts_of(mount) {
                Some(parts) if self.any_on(&parts, devices) => format!("the file system at {at} is on it"),
                // Not every file system tells what it is on: this one may be on these disks.
                None if is_root && has_disks() => {
                    format!("the root file system ({}) may be on it", Printable(&mount.kind))
                }
                _ => continue,
            };
            let stop = Stop { what, is_fatal: is_root };
            if !stops.contains(&stop) {
                stops.push(stop);
            }
        }
        stops
    }

    /// The disks and partitions that a file system is on; `None` where nothing tells.
    fn parts_of(&self, mount: &Mount) -> Option<Vec<PathBuf>> {
        if IN_MEMORY.contains(&mount.kind.as_str()) {
            return Some(Vec::new());
        }
        let by_number = self.follow(&self.at("sys/dev/block").join(&mount.number));
        let by_name = || mount.source.split(':').filter_map(|node| self.disk(node)).collect::<Vec<_>>();
        let mut parts = by_number.map_or_else(by_name, |part| vec![part]);
        if mount.kind == "btrfs" {
            parts.extend(self.of_btrfs(&parts));
        }
        (!parts.is_empty()).then_some(parts)
    }

    /// All parts of the file system of btrfs that has one of these.
    fn of_btrfs(&self, parts: &[PathBuf]) -> Vec<PathBuf> {
        let all = self.at("sys/fs/btrfs");
        let of = |name: String| {
            let folder = all.join(name).join("devices");
            self.names(&folder).iter().filter_map(|part| self.follow(&folder.join(part))).collect::<Vec<_>>()
        };
        let systems = self.names(&all).into_iter().map(of);
        systems.filter(|system| system.iter().any(|part| parts.contains(part))).flatten().collect()
    }

    /// Whether any of these disks and partitions needs any of the devices.
    fn any_on(&self, parts: &[PathBuf], devices: &[Device]) -> bool {
        let mut found = BTreeSet::new();
        parts.iter().for_each(|part| self.behind(part, DEEPEST, &mut found));
        devices.iter().any(|device| found.contains(device))
    }

    fn swap(&self, devices: &[Device], mounts: &[Mount]) -> Vec<Stop> {
        let lines = self.lines("proc/swaps");
        let of = |line: &String| {
            let name = plain(line.split_whitespace().next()?);
            // A file is on the file system with the longest path before it.
            let holds = |mount: &&Mount| Path::new(&name).starts_with(&mount.at);
            let below = || mounts.iter().filter(holds).max_by_key(|mount| mount.at.len());
            let parts = match self.disk(&name) {
                Some(part) => vec![part],
                None => below().and_then(|mount| self.parts_of(mount)).unwrap_or_default(),
            };
            let what = format!("the swap space {} is on it", Printable(name));
            self.any_on(&parts, devices).then_some(Stop { what, is_fatal: true })
        };
        lines.iter().skip(1).filter_map(of).collect()
    }

    fn interfaces(&self, devices: &[Device]) -> Vec<Stop> {
        let net = self.at("sys/class/net");
        let session = self.session();
        let mut stops = Vec::new();
        for name in self.names(&net) {
            let Some(path) = self.follow(&net.join(&name)) else { continue };
            if !devices.iter().any(|device| path.starts_with(&device.path)) {
                continue;
            }
            let carries = session.as_ref().is_some_and(|session| self.is_below(&path, session, DEEPEST));
            let is_up = self.text(&path.join("operstate")).is_some_and(|state| state != "down");
            if carries {
                let what = format!("the network interface {} carries this session", Printable(name));
                stops.push(Stop { what, is_fatal: false });
            } else if is_up {
                let what = format!("the network interface {} is up", Printable(name));
                stops.push(Stop { what, is_fatal: false });
            }
        }
        stops
    }

    /// Whether the interface at `path` is the one named, or one of those that it is made of.
    fn is_below(&self, path: &Path, name: &str, depth: usize) -> bool {
        let Some(upper) = self.follow(&self.at("sys/class/net").join(name)) else { return false };
        let below = |part: PathBuf| {
            let name = part.file_name().unwrap_or_default().to_string_lossy().into_owned();
            self.is_below(path, &name, depth - 1)
        };
        upper == path || depth > 0 && self.made_of(&upper).into_iter().any(below)
    }

    fn has(&self, device: &Device, class: &str) -> bool {
        let folder = self.at("sys/class").join(class);
        let paths = self.names(&folder).into_iter().filter_map(|name| self.follow(&folder.join(name)));
        paths.into_iter().any(|path| {
            let mut found = BTreeSet::new();
            self.behind(&path, DEEPEST, &mut found);
            found.contains(device)
        })
    }

    /// The interface by which answers go to where this session comes from, if it comes by SSH. A shell of another user (sudo) has
    /// forgotten that, so the processes above are asked, too.
    fn session(&self) -> Option<String> {
        let mut process = "self".to_owned();
        for _ in 0..ANCESTORS {
            let folder = self.at("proc").join(&process);
            let variables = self.text(&folder.join("environ")).unwrap_or_default();
            let connection = variables.split('\0').find_map(|one| one.strip_prefix("SSH_CONNECTION="));
            if let Some(from) = connection.and_then(|connection| connection.split(' ').next()) {
                return self.route(from.split('%').next()?.parse().ok()?);
            }
            let status = self.text(&folder.join("status"))?;
            // The first process has parent 0, which is none.
            process = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().to_owned();
        }
        None
    }

    /// The interface by which packets go to an address: of the routes that lead there, the one that says the most of it.
    fn route(&self, to: IpAddr) -> Option<String> {
        let to = match to {
            IpAddr::V6(to) => to.to_ipv4_mapped().map_or(IpAddr::V6(to), IpAddr::V4),
            to => to,
        };
        match to {
            IpAddr::V4(to) => {
                // Interface, destination and, as the eighth, mask: as the processor has them in its registers.
                let word = |field: &str| u32::from_str_radix(field, 16).ok();
                let to = u32::from_ne_bytes(to.octets());
                let of = |line: &String| {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    let (at, mask) = (word(fields.get(1)?)?, word(fields.get(7)?)?);
                    (to & mask == at).then(|| (mask.count_ones(), (*fields[0]).to_owned()))
                };
                self.lines("proc/net/route").iter().skip(1).filter_map(of).max().map(|(_, name)| name)
            }
            IpAddr::V6(to) => {
                // Destination, its length, .., and last the interface.
                let to = u128::from_be_bytes(to.octets());
                let of = |line: &String| {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    let at = u128::from_str_radix(fields.first()?, 16).ok()?;
                    let bits = u32::from_str_radix(fields.get(1)?, 16).ok().filter(|bits| *bits <= 128)?;
                    let name = fields.last().filter(|name| **name != "lo")?;
                    let leads = (to ^ at).checked_shr(128 - bits).unwrap_or(0) == 0;
                    leads.then(|| (bits, (*name).to_owned()))
                };
                self.lines("proc/net/ipv6_route").iter().filter_map(of).max().map(|(_, name)| name)
            }
        }
    }
}

/// What stops, in one sentence without its end; `None` where nothing does.
pub fn told(stops: &[Stop]) -> Option<String> {
    let all: Vec<&str> = stops.iter().map(|stop| stop.what.as_str()).collect();
    (!all.is_empty()).then(|| list(&all))
}
