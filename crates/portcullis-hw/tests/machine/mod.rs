//! A machine of QEMU's whose IOMMU and devices are driven from here, with no operating system in it.
//!
//! Its only program halts; registers go over the qtest socket, and memory is shared (QEMU's `docs/devel/testing/qtest.rst`). So
//! the drivers under test run as they would in a kernel, against an IOMMU that caches and refuses by rules of its own.
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

use portcullis_hw::Host;

pub use edu::Edu;
pub use ram::Ram;
pub use wire::{Window, Wire};

/// What fails here is told in words.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Bytes of memory. Devices' registers lie far above.
const RAM_BYTES: usize = 256 << 20;

/// The slots of two `edu` devices on bus 0, and where their registers go.
pub const EDU: [(u32, u32); 2] = [(5, 0xfe00_0000), (6, 0xfe20_0000)];

/// The longest that QEMU may take to start.
const START: Duration = Duration::from_secs(30);

/// A machine, which ends with this value.
pub struct Machine {
    qemu: Child,
    wire: Arc<Wire>,
    ram: Ram,
    _folder: tempfile::TempDir,
}

impl Machine {
    /// A PC (`q35`) with these devices, each as QEMU's `-device` takes it.
    pub fn pc(devices: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let at = |name| folder.path().join(name);
        // At the reset vector: cli; hlt; jmp back.
        let mut firmware = vec![0_u8; 64 << 10];
        firmware[0xfff0..0xfff4].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfc]);
        File::create(at("halt.bin"))?.write_all(&firmware)?;
        let memory = File::options().create_new(true).read(true).write(true).open(at("ram"))?;
        memory.set_len(RAM_BYTES as u64)?;
        let listener = UnixListener::bind(at("socket"))?;
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-display", "none", "-nodefaults", "-accel", "tcg", "-icount", "shift=0,sleep=off"])
            .args(["-machine", "q35,kernel-irqchip=off,memory-backend=m", "-m", "256", "-qtest-log", "none"])
            .arg("-bios")
            .arg(at("halt.bin"))
            .arg("-qtest")
            .arg(format!("unix:{}", at("socket").display()))
            .arg("-object")
            .arg(format!("memory-backend-file,id=m,size=256M,mem-path={},share=on", at("ram").display()))
            .args(devices.iter().flat_map(|device| ["-device", device]))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(at("errors"))?);
        let mut qemu = command.spawn().map_err(|error| format!("qemu-system-x86_64: {error}"))?;
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
                return Err(format!("QEMU did not start: {}", said.trim()).into());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        socket.set_nonblocking(false)?;
        let ram = Ram::new(&memory, RAM_BYTES)?;
        Ok(Self { qemu, wire: Arc::new(Wire::new(socket)?), ram, _folder: folder })
    }

    /// Its memory.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Registers from `base` on.
    pub fn window(&self, base: u64) -> Window {
        Window::new(Arc::clone(&self.wire), base)
    }

    /// A host for the driver of a unit whose registers begin at `base`.
    pub fn host(&self, base: u64) -> QemuHost {
        QemuHost { registers: self.window(base), ram: self.ram.clone(), began: Instant::now() }
    }

    /// Writes 32 bits of the configuration space of the device in `slot` of bus 0.
    pub fn configure(&self, slot: u32, register: u32, value: u32) {
        self.wire.out(0xcf8, 0x8000_0000 | slot << 11 | register);
        self.wire.out(0xcfc, value);
    }

    /// The `edu` device in `slot`, with its registers at `base`, switched on.
    pub fn edu(&self, slot: u32, base: u32) -> Edu {
        self.configure(slot, 0x10, base);
        // Memory space and bus master.
        self.configure(slot, 0x04, 6);
        Edu::new(self.window(u64::from(base)))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // It does not end when the socket closes.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// What a driver gets of the machine.
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
        // A machine that tests share may stand still for long.
        5_000_000_000
    }
}
