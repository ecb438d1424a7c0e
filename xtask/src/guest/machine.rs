//! QEMU with an IOMMU, and disks, network cards and other devices behind it, by software emulation alone.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::firmware;
use super::report::{Line, Report};

pub const QEMU: &str = "qemu-system-x86_64";

/// An IOMMU of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iommu {
    Vtd,
    Virtio,
    Amdvi,
}

impl Iommu {
    pub const ALL: [Self; 3] = [Self::Vtd, Self::Virtio, Self::Amdvi];

    pub fn name(self) -> &'static str {
        match self {
            Self::Vtd => "vtd",
            Self::Virtio => "virtio",
            Self::Amdvi => "amdvi",
        }
    }

    /// With `caching-mode=on`, Linux is strict with VT-d whatever it is told. The AMD IOMMU translates only with `pt=off`.
    fn device(self) -> &'static str {
        match self {
            Self::Vtd => "intel-iommu,intremap=on,aw-bits=48",
            Self::Virtio => "virtio-iommu-pci,addr=10.0",
            Self::Amdvi => "amd-iommu,pt=off,intremap=off",
        }
    }
}

/// A run of the guest.
pub struct Run<'a> {
    pub image: &'a Path,
    /// The archives of the first file system.
    pub archives: &'a [&'a [u8]],
    pub iommu: Iommu,
    pub cpus: usize,
    /// Whether the guest's clock counts instructions, a nanosecond each.
    pub counted: bool,
    /// What the kernel's command line has besides.
    pub words: &'a str,
    /// The longest that the kernel may take to its first program.
    pub boot: Duration,
    /// The longest that all may take.
    pub time: Duration,
    /// Whether no code but Linux's own is in the kernel, so that a program's fault cannot lock it up.
    pub is_linux_alone: bool,
    /// Whether a device does what it should not.
    pub hostile: bool,
    /// Whether there are more devices than most jobs use.
    pub many: bool,
    /// Whether the kernel is told of devices that come and go by PCI Express itself, and not by the firmware, for which some kernels have no
    /// driver.
    pub native_hotplug: bool,
    /// Whether all that the job says is printed as it comes.
    pub aloud: bool,
    /// A folder for the disks and the log.
    pub folder: &'a Path,
}

/// The disks: an image of each.
const DISKS: [&str; 5] = ["nvme", "virtio", "ahci", "usb", "hot"];
const DISK_SIZE: u64 = 64 << 20;

/// The slot of a port that firmware marks as external.
const OUTSIDE: u8 = 0x0e;

const MEMORY: &str = "1G";

/// How often a kernel is booted that does not come to its first program, while nothing of the project was loaded: on a busy machine Linux 6.12 has
/// waited for a timer for ever, and QEMU 10.0 has ended while Linux looked for devices ("iotlb_to_section: Assertion"). So is one that locks up later with
/// Linux's own code alone in it: a CPU of 6.12 behind VT-d has waited 518 s for the other one to answer, while a program ended.
const BOOTS: usize = 3;

/// How long a CPU does nothing else before its kernel is taken to be locked up, and not slow: Linux warns from 20 s on, as on a busy machine.
const LOCKED: Duration = Duration::from_secs(120);

/// How a boot went.
enum Went {
    /// It came to its end, or to that of its time.
    Ended(Report),
    /// It did not come to its first program.
    NotUp,
    /// A CPU did nothing else for longer than [`LOCKED`].
    Locked,
}

impl Run<'_> {
    /// Boots, and reads what the job says until QEMU ends.
    pub fn run(&self) -> Result<Report, String> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: std::io::Error| format!("{what}: {error}")
        };
        std::fs::create_dir_all(self.folder).map_err(failed("the guest's folder"))?;
        for disk in DISKS {
            let file = std::fs::File::create(self.at(disk)).map_err(failed(disk))?;
            file.set_len(DISK_SIZE).map_err(failed(disk))?;
        }
        let initial = self.at("initramfs");
        std::fs::write(&initial, self.archives.concat()).map_err(failed("the initramfs"))?;
        if self.many {
            let table = firmware::external(OUTSIDE);
            std::fs::write(self.at("ssdt"), table).map_err(failed("the firmware's table"))?;
        }
        for _ in 0..BOOTS {
            let _ = std::fs::remove_file(self.at("monitor"));
            let mut qemu = self.command().spawn().map_err(failed(QEMU))?;
            let went = self.read(&mut qemu);
            let _ = qemu.kill();
            let _ = qemu.wait();
            let log = self.log();
            let why = match went? {
                Went::Ended(mut report) => {
                    report.take_log(&log, self.hostile);
                    return Ok(report);
                }
                Went::NotUp => format!("the kernel did not come to its first program within {:?}", self.boot),
                Went::Locked => {
                    format!("the kernel, of Linux's own code alone, was locked up for {LOCKED:?}")
                }
            };
            let qemu = std::fs::read_to_string(self.at("qemu")).unwrap_or_default();
            let last = |said: &str| said.lines().last().unwrap_or("nothing").to_owned();
            println!("{why}; its last words: {}; QEMU's: {}", last(&log), last(&qemu));
        }
        Err(format!("none of {BOOTS} boots came to an end of its own"))
    }

    /// The kernel's log, as its console has it.
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.at("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Takes what the guest says until it ends. Its first program says a line at once.
    fn read(&self, qemu: &mut Child) -> Result<Went, String> {
        let out = qemu.stdout.take().ok_or("no output of QEMU")?;
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(out);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
        let mut report = Report::default();
        let began = Instant::now();
        let mut is_up = false;
        loop {
            let limit = if is_up { self.time } else { self.boot };
            let left = limit.saturating_sub(began.elapsed());
            let wait = left.min(Duration::from_secs(10));
            match receiver.recv_timeout(wait) {
                Ok(line) => {
                    is_up = true;
                    if let Line::Host(command) = Line::read(&line) {
                        self.command_monitor(command)?;
                    }
                    if self.aloud {
                        println!("| {}", line.trim_end());
                    }
                    report.take(&line);
                }
                Err(RecvTimeoutError::Disconnected) if is_up => return Ok(Went::Ended(report)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Went::NotUp),
                Err(RecvTimeoutError::Timeout) if self.is_linux_alone && self.is_locked() => {
                    println!("where its CPUs are:\n{}", self.where_cpus_are());
                    return Ok(Went::Locked);
                }
                Err(RecvTimeoutError::Timeout) if wait < left => {}
                Err(RecvTimeoutError::Timeout) if !is_up => return Ok(Went::NotUp),
                Err(RecvTimeoutError::Timeout) => {
                    let cpus = self.where_cpus_are();
                    report
                        .failed
                        .push(format!("the guest did not end within {:?}; its CPUs:\n{cpus}", self.time));
                    return Ok(Went::Ended(report));
                }
            }
        }
    }

    fn is_locked(&self) -> bool {
        self.log().lines().filter_map(stuck).any(|time| time >= LOCKED)
    }

    /// The instruction and the flags of each CPU, as QEMU has them. The kernel is where its `System.map` says (`nokaslr`).
    fn where_cpus_are(&self) -> String {
        let said = match self.command_monitor("info registers -a") {
            Ok(said) => said,
            Err(error) => return error,
        };
        let lines = said.lines().filter(|line| line.starts_with("CPU#") || line.contains("RIP="));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Has QEMU's monitor do something, and returns what it said.
    fn command_monitor(&self, command: &str) -> Result<String, String> {
        let failed = |error: std::io::Error| format!("QEMU's monitor, {command}: {error}");
        let mut monitor = UnixStream::connect(self.at("monitor")).map_err(failed)?;
        monitor.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
        monitor.write_all(format!("{command}\n").as_bytes()).map_err(failed)?;
        // A prompt follows what it says to the command; the first one stands before that.
        let (mut said, mut byte) = (Vec::new(), [0]);
        while said.windows(7).filter(|part| part == b"(qemu) ").count() < 2 {
            monitor.read_exact(&mut byte).map_err(failed)?;
            said.extend(byte);
        }
        let said = String::from_utf8_lossy(&said);
        match said.lines().find(|line| line.starts_with("Error: ")) {
            Some(error) => Err(format!("QEMU's monitor, {command}: {error}")),
            None => Ok(said.into_owned()),
        }
    }

    fn add_many(&self, qemu: &mut Command) {
        qemu.args(["-object", "memory-backend-ram,id=peer,size=4M,share=on"]);
        qemu.arg("-acpitable").arg(format!("sig=SSDT,rev=2,data={}", self.at("ssdt").display()));
        let pair: &[&str] = if self.iommu == Iommu::Vtd { &PAIR } else { &ONE };
        qemu.args(MANY.iter().chain(pair).flat_map(|device| ["-device", device]));
    }

    pub fn command(&self) -> Command {
        let mut qemu = Command::new("nice");
        qemu.args(["-n", "5", QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        // With these, Linux copies and clears by an instruction of which QEMU does one byte at a time.
        let cpu = "max,la57=off,erms=off,fsrm=off,fsrs=off";
        qemu.args(["-machine", "q35,kernel-irqchip=split,i8042=off", "-cpu", cpu, "-m", MEMORY]);
        qemu.args(["-smp", &self.cpus.to_string()]);
        if self.counted {
            qemu.args(["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"]);
        } else {
            qemu.args(["-accel", "tcg,thread=multi"]);
        }
        if self.native_hotplug {
            qemu.args(["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"]);
        }
        qemu.args(["-device", self.iommu.device()]);
        let shown = |path: PathBuf| path.display().to_string();
        qemu.args(["-serial", &format!("file:{}", shown(self.at("console"))), "-serial", "stdio"]);
        qemu.args(["-monitor", &format!("unix:{},server=on,wait=off", shown(self.at("monitor")))]);
        qemu.arg("-kernel").arg(self.image).arg("-initrd").arg(self.at("initramfs"));
        let words = "console=ttyS0 nokaslr loglevel=7 no_timer_check panic=-1 oops=panic intel_iommu=on nvme_core.multipath=0";
        qemu.args(["-append", &format!("{words} {}", self.words)]);
        for disk in DISKS {
            let drive = format!("file={},format=raw,if=none,id={disk},cache=unsafe", shown(self.at(disk)));
            qemu.args(["-drive", &drive]);
        }
        // Each has a place of its own, which the jobs know.
        let checked = "iommu_platform=on,disable-legacy=on";
        for device in [
            "nvme,addr=04.0,serial=n,drive=nvme",
            "e1000e,addr=05.0,netdev=net5,romfile=",
            "igb,addr=06.0,netdev=net6,romfile=",
            &format!("virtio-net-pci,addr=07.0,netdev=net7,romfile=,{checked}"),
            &format!("virtio-blk-pci,addr=08.0,drive=virtio,{checked}"),
            "qemu-xhci,addr=09.0,id=usb",
            "usb-storage,bus=usb.0,drive=usb",
            "edu,addr=0a.0,dma_mask=0xffffffff",
            "pci-testdev,addr=0b.0",
            "pcie-root-port,addr=0c.0,id=port0,chassis=1",
            "nvme,bus=port0,serial=h,drive=hot,id=hot",
            "ide-hd,bus=ide.0,drive=ahci",
        ] {
            qemu.args(["-device", device]);
        }
        if self.many {
            self.add_many(&mut qemu);
        }
        for net in [5, 6, 7] {
            qemu.args(["-netdev", &format!("user,id=net{net},net=10.0.{net}.0/24,ipv6=off")]);
        }
        qemu.stdin(Stdio::null()).stdout(Stdio::piped());
        // It tells of what it takes for a driver's mistakes.
        if let Ok(said) = std::fs::File::create(self.at("qemu")) {
            qemu.stderr(said);
        }
        qemu
    }
}

/// What else there may be: one outside, and one with memory that others reach.
const MANY: [&str; 3] = [
    "pcie-root-port,addr=0e.0,id=outside,chassis=2",
    "edu,bus=outside,dma_mask=0xffffffff",
    "ivshmem-plain,addr=0f.0,memdev=peer",
];

/// And two that the IOMMU cannot tell apart. QEMU's virtio-iommu knows no devices behind such a bridge, and Linux's driver then gives up. QEMU's AMD-Vi does not translate for them, also
/// under Linux alone. So behind these two it is one device, without a bridge.
const PAIR: [&str; 3] = [
    "pcie-pci-bridge,addr=0d.0,id=bridge",
    "edu,bus=bridge,addr=01.0,dma_mask=0xffffffff",
    "edu,bus=bridge,addr=02.0,dma_mask=0xffffffff",
];
const ONE: [&str; 1] = ["edu,addr=0d.0,dma_mask=0xffffffff"];

/// For how long a CPU has done nothing else, if the line of the kernel's log says so.
fn stuck(line: &str) -> Option<Duration> {
    let (_, time) = line.split_once("soft lockup - CPU#")?.1.split_once(" stuck for ")?;
    time.split_once("s!")?.0.parse().ok().map(Duration::from_secs)
}

/// A server that sends back all that it is sent, for the guest's network cards. Returns its port.
pub fn serve_echo() -> Result<u16, String> {
    let failed = |error: std::io::Error| format!("a server on this machine: {error}");
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(failed)?;
    let port = listener.local_addr().map_err(failed)?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().filter_map(Result::ok) {
            std::thread::spawn(move || echo(stream));
        }
    });
    Ok(port)
}

fn echo(mut stream: TcpStream) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_does_nothing_else_is_told() {
        let line = "[  581.208524] watchdog: BUG: soft lockup - CPU#0 stuck for 518s! [portcullis-user:236]";
        assert_eq!(stuck(line), Some(Duration::from_secs(518)));
        for other in ["watchdog: BUG: soft lockup - CPU#0", "BUG: workqueue lockup - pool stuck for 30s!"] {
            assert_eq!(stuck(other), None, "{other}");
        }
    }
}
