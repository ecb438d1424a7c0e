//! A QEMU machine whose IOMMU and devices are driven from here, without an operating system in it.
//!
//! Its only program halts; register accesses use the qtest socket, and memory is shared (QEMU's `docs/devel/testing/qtest.rst`). So the
//! drivers run as in a kernel, against an independent IOMMU.
#![allow(dead_code, reason = "each of the programs that use it uses a part")]

mod edu;
mod ram;
mod wire;

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use portcullis_hw::model::SoftwareVtd;
use portcullis_hw::{Host, Registers};

pub use edu::Edu;
pub use portcullis_hw::model::Manners;
pub use ram::Ram;
pub use wire::{Window, Wire};

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Bytes of memory. Devices' registers lie far above.
const RAM_BYTES: usize = 256 << 20;

/// The slots of two `edu` devices on bus 0.
pub const EDU: [u32; 2] = [5, 6];

struct Board {
    program: &'static str,
    /// Its program, which halts, and the QEMU option for it.
    halt: fn() -> Vec<u8>,
    firmware: &'static str,
    /// QEMU's `-machine`, and other arguments.
    machine: &'static str,
    further: &'static [&'static str],
    ram: u64,
    /// Address of the configuration space; PCs use I/O ports.
    configuration: Option<u64>,
    /// Where to place devices' registers, 16 MiB of them.
    registers: u32,
}

const PC: Board = Board {
    program: "qemu-system-x86_64",
    halt: || {
        // At the reset vector: cli; hlt; jmp back.
        let mut firmware = vec![0_u8; 64 << 10];
        firmware[0xfff0..0xfff4].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfc]);
        firmware
    },
    firmware: "-bios",
    // Its clock advances from timer to timer. Periodic timers would come before `edu`'s, whose copies take 100 ms.
    machine: "q35,kernel-irqchip=off,hpet=off,pit=off",
    further: &[],
    ram: 0,
    configuration: None,
    registers: 0xfe00_0000,
};

const ARM: Board = Board {
    program: "qemu-system-aarch64",
    // wfi; b .-4
    halt: || [0xd503_207f_u32, 0x17ff_ffff].iter().flat_map(|word| word.to_le_bytes()).collect(),
    firmware: "-kernel",
    machine: "virt,gic-version=3,highmem-ecam=off",
    further: &["-cpu", "max"],
    ram: 0x4000_0000,
    configuration: Some(0x3f00_0000),
    registers: 0x1000_0000,
};

const RISCV: Board = Board {
    program: "qemu-system-riscv64",
    // wfi; j .-4
    halt: || [0x1050_0073_u32, 0xffdf_f06f].iter().flat_map(|word| word.to_le_bytes()).collect(),
    firmware: "-bios",
    machine: "virt",
    further: &[],
    ram: 0x8000_0000,
    configuration: Some(0x3000_0000),
    registers: 0x4010_0000,
};

/// The QEMU whose models the cases were written against.
const QEMU: &str = "QEMU 10 or later, whose packages are qemu-system-x86, qemu-system-arm and qemu-system-riscv \
                    on Debian; as root, `cargo xtask conformance` installs them";

/// QEMU's start-up time limit.
const START: Duration = Duration::from_secs(30);

/// A machine, which ends with this value.
pub struct Machine {
    ram: Ram,
    kind: Kind,
}

enum Kind {
    Qemu { qemu: Child, wire: Arc<Wire>, board: &'static Board, _folder: tempfile::TempDir },
    Software(Arc<SoftwareVtd>),
}

impl Machine {
    /// A PC (`q35`) with these devices, each as QEMU's `-device` takes it, or another option, whose value follows a blank.
    pub fn pc(devices: &[&str]) -> Result<Self> {
        Self::start(&PC, "", devices)
    }

    /// Arm's `virt`, with more options of its `-machine` (`,iommu=smmuv3`), and these devices.
    pub fn arm(options: &str, devices: &[&str]) -> Result<Self> {
        Self::start(&ARM, options, devices)
    }

    /// RISC-V's `virt`, in the same way.
    pub fn riscv(options: &str, devices: &[&str]) -> Result<Self> {
        Self::start(&RISCV, options, devices)
    }

    fn start(board: &'static Board, options: &str, devices: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let at = |name| folder.path().join(name);
        File::create(at("halt.bin"))?.write_all(&(board.halt)())?;
        let memory = File::options().create_new(true).read(true).write(true).open(at("ram"))?;
        memory.set_len(RAM_BYTES as u64)?;
        let listener = UnixListener::bind(at("socket"))?;
        let mut command = Command::new(board.program);
        command
            .args(["-display", "none", "-nodefaults", "-accel", "tcg", "-icount", "shift=0,sleep=off"])
            .arg("-machine")
            .arg(format!("{}{options},memory-backend=m", board.machine))
            .args(["-m", "256", "-qtest-log", "none"])
            .args(board.further)
            .arg(board.firmware)
            .arg(at("halt.bin"))
            .arg("-qtest")
            .arg(format!("unix:{}", at("socket").display()))
            .arg("-object")
            .arg(format!("memory-backend-file,id=m,size=256M,mem-path={},share=on", at("ram").display()))
            .args(
                devices
                    .iter()
                    .flat_map(|device| device.split_once(' ').map_or(["-device", device], <[&str; 2]>::from)),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(at("errors"))?);
        let mut qemu = command
            .spawn()
            .map_err(|error| format!("{} does not start ({error}). This needs {QEMU}.", board.program))?;
        listener.set_nonblocking(true)?;
        let began = Instant::now();
        let socket = loop {
            match listener.accept() {
                Ok((socket, _)) => break socket,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if qemu.try_wait()?.is_some() || began.elapsed() > START {
                let _ = qemu.kill();
                let _ = qemu.wait();
                let said = std::fs::read_to_string(at("errors")).unwrap_or_default();
                let version = Command::new(board.program).arg("--version").output()?.stdout;
                let version = String::from_utf8_lossy(&version);
                let version = version.lines().next().unwrap_or(board.program);
                let said = if said.is_empty() { format!("nothing within {START:?}") } else { said };
                return Err(format!("{version} did not start: {}\nThis needs {QEMU}.", said.trim()).into());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        socket.set_nonblocking(false)?;
        let ram = Ram::new(memory, board.ram, RAM_BYTES)?;
        let wire = Arc::new(Wire::new(socket)?);
        Ok(Self { ram, kind: Kind::Qemu { qemu, wire, board, _folder: folder } })
    }

    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// The software IOMMU, with the registers of a VT-d unit.
    pub fn software(manners: Manners) -> Result<Self> {
        let (ram, memory) = Ram::software(RAM_BYTES)?;
        Ok(Self { ram, kind: Kind::Software(SoftwareVtd::new(memory, manners)) })
    }

    /// Registers from `base` on; the software IOMMU has only its own.
    pub fn window(&self, base: u64) -> Window {
        match &self.kind {
            Kind::Qemu { wire, .. } => Window::Qemu { wire: Arc::clone(wire), base },
            Kind::Software(unit) => Window::Software(Arc::clone(unit)),
        }
    }

    /// A host for the driver of a unit with registers at `base`.
    pub fn host(&self, base: u64) -> QemuHost {
        QemuHost { registers: self.window(base), ram: self.ram.clone(), began: Instant::now() }
    }

    /// Selects 32 bits of the configuration space of the device in `slot` of bus 0: they are then in memory, or behind the returned I/O
    /// port.
    fn select(&self, slot: u32, register: u32) -> (&Arc<Wire>, Option<Window>) {
        let Kind::Qemu { wire, board, .. } = &self.kind else { panic!("the software IOMMU has no PCI bus") };
        match board.configuration {
            Some(base) => (wire, Some(self.window(base + u64::from(slot << 15 | register)))),
            None => {
                wire.write_port(0xcf8, 0x8000_0000 | slot << 11 | register);
                (wire, None)
            }
        }
    }

    pub fn configure(&self, slot: u32, register: u32, value: u32) {
        match self.select(slot, register) {
            (_, Some(window)) => window.write32(0, value),
            (wire, None) => wire.write_port(0xcfc, value),
        }
    }

    pub fn configuration(&self, slot: u32, register: u32) -> u32 {
        match self.select(slot, register) {
            (_, Some(window)) => window.read32(0),
            (wire, None) => wire.read_port(0xcfc),
        }
    }

    /// Places the device's registers, of at most 1 MiB, by the base address register at `register` (64-bit ones have a second register),
    /// turns the device on, and returns the address.
    pub fn place(&self, slot: u32, register: u32) -> u64 {
        let Kind::Qemu { board, .. } = &self.kind else { panic!("the software IOMMU has no PCI bus") };
        let at = board.registers + (slot << 20);
        self.configure(slot, register, at);
        // Memory type 2: 64 bits.
        if self.configuration(slot, register) >> 1 & 3 == 2 {
            self.configure(slot, register + 4, 0);
        }
        // Memory space and bus master.
        self.configure(slot, 0x04, 6);
        u64::from(at)
    }

    /// The `edu` device in `slot`, or a similar one.
    pub fn edu(&self, slot: u32) -> Edu {
        match &self.kind {
            Kind::Qemu { .. } => Edu::Qemu(self.window(self.place(slot, 0x10))),
            Kind::Software(unit) => Edu::software(Arc::clone(unit), (slot << 3) as u16),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Kind::Qemu { qemu, .. } = &mut self.kind {
            // It does not end when the socket closes.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

/// A driver's access to the machine.
#[derive(Debug, Clone)]
pub struct QemuHost {
    registers: Window,
    ram: Ram,
    began: Instant,
}

impl Host for QemuHost {
    type Registers = Window;
    type Frames = Ram;

    fn registers(&self) -> &Window {
        &self.registers
    }

    fn frames(&self) -> &Ram {
        &self.ram
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn relax(&self) {
        std::thread::yield_now();
    }

    fn patience_ns(&self) -> u64 {
        // A loaded test machine may pause for long.
        5_000_000_000
    }
}

/// The same for the software IOMMU: a different type, so that the cases distinguish the two.
#[derive(Debug, Clone)]
pub struct SoftwareHost(pub QemuHost);

impl Host for SoftwareHost {
    type Registers = Window;
    type Frames = Ram;

    fn registers(&self) -> &Window {
        self.0.registers()
    }

    fn frames(&self) -> &Ram {
        self.0.frames()
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }

    fn relax(&self) {
        self.0.relax();
    }

    fn patience_ns(&self) -> u64 {
        self.0.patience_ns()
    }
}
