//! A port to a kernel in one file: the kernel's part, and the bring-up of a VT-d unit. The unit is software (feature `model`); a real port
//! has registers at an address, and page frames.
//!
//! `cargo run -p portcullis-hw --features model --example port`

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, PlatformEvents, PlatformNumber};
use portcullis::prelude::*;
use portcullis_hw::model::{Manners, SoftwareVtd};
use portcullis_hw::vtd::Unit;
use portcullis_hw::{Access, Host, Iommu as _};
use portcullis_model::Memory;

/// The kernel as a platform: one CPU, a clock, and a timer.
struct Kernel {
    number: PlatformNumber,
    /// Whether the CPU is lent.
    lent: AtomicBool,
    now_ns: AtomicU64,
    wake_at: AtomicU64,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

impl Kernel {
    fn new() -> Self {
        let (now_ns, wake_at) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        let (number, lent) = (PlatformNumber::new(), AtomicBool::new(false));
        Self { number, lent, now_ns, wake_at, listeners: Mutex::new(Vec::new()) }
    }

    /// Advances the clock, and fires the timer.
    fn tick(&self, ns: u64) {
        let now_ns = self.now_ns.fetch_add(ns, Ordering::Relaxed) + ns;
        if now_ns < self.wake_at.load(Ordering::Relaxed) {
            return;
        }
        // First, because listeners may request it again.
        self.wake_at.store(u64::MAX, Ordering::Relaxed);
        let listeners: Vec<_> = {
            let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
            listeners.iter().filter_map(Weak::upgrade).collect()
        };
        listeners.iter().for_each(|listener| listener.timer());
    }
}

// SAFETY: the flag lends the CPU to one caller at a time, with acquire and release. The caller stays on its thread. `cpus` and `number`
// never change, `fence_all` is a fence, and `LocalCpu::new` makes the proofs. No CPU goes offline.
unsafe impl Platform for Kernel {
    fn cpus(&self) -> usize {
        1
    }

    fn number(&self) -> PlatformNumber {
        self.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // A kernel turns preemption off here (and interrupts, if their handlers map), and lends the number of its processor.
        if self.lent.swap(true, Ordering::Acquire) {
            return f(None);
        }
        // SAFETY: the flag was clear, so no other caller has CPU 0 until it is cleared below.
        let result = f(Some(&unsafe { LocalCpu::new(0) }));
        self.lent.store(false, Ordering::Release);
        result
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(events);
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.wake_at.fetch_min(deadline_ns, Ordering::Relaxed);
    }
}

/// The environment of the unit's driver: registers, memory, and a clock.
struct UnitHost {
    registers: Arc<SoftwareVtd>,
    frames: Arc<Memory>,
    kernel: Arc<Kernel>,
}

impl Host for UnitHost {
    type Registers = SoftwareVtd;
    type Frames = Arc<Memory>;

    fn registers(&self) -> &SoftwareVtd {
        &self.registers
    }

    fn frames(&self) -> &Arc<Memory> {
        &self.frames
    }

    fn now_ns(&self) -> u64 {
        self.kernel.now_ns()
    }

    fn relax(&self) {
        // Advances the clock while the driver waits.
        self.kernel.now_ns.fetch_add(1000, Ordering::Relaxed);
    }
}

/// # Errors
/// The first failed step.
pub fn main() -> Result<(), Box<dyn Error>> {
    let (memory, kernel) = (Memory::new(64 << 20), Arc::new(Kernel::new()));
    let machine = SoftwareVtd::new(Arc::clone(&memory), Manners::default());
    let (disk, source) = (DeviceId(7 << 3), 7 << 3);
    let buffer = memory.buffer(4096).ok_or("out of memory")?;
    let physical = Iova::new(buffer.phys().get());
    assert!(machine.write(source, physical, b"anywhere"), "the unit is off: devices reach everything");

    let registers = Arc::clone(&machine);
    let host = UnitHost { registers, frames: Arc::clone(&memory), kernel: Arc::clone(&kernel) };
    let unit = Arc::new(Unit::start(host)?);
    let domain = unit.domain(DomainId(1))?.build(Arc::clone(&kernel))?;
    let device = domain.attach(disk, DmaMask::BITS_64)?;
    unit.enable()?;
    println!("The unit is on, in {:?} mode.", unit.mode());
    assert!(!machine.write(source, physical, b"anywhere"), "what is not mapped is refused");
    let fault = unit.next_fault().ok_or("the unit reports no fault")?;
    println!("It reports: {fault}");

    let mut queue = device.queue(QueueConfig::direct())?;
    let mapping = queue.map(buffer, Direction::FromDevice)?;
    let iova = mapping.iova();
    assert!(machine.write(source, iova, b"a block!"));
    let mut packet = [0; 8];
    queue.unmap_all([mapping], |ended| _ = ended.map(|buffer| buffer.read(0, &mut packet)))?;
    assert_eq!(&packet, b"a block!");
    assert!(!machine.write(source, iova, b"too late"), "an unmap has ended it");
    let fault = unit.next_fault().ok_or("the unit reports no fault")?;
    assert_eq!((fault.address, fault.access), (Some(iova), Some(Access::Write)));
    println!("Mapped, the disk wrote a block; after the unmap the unit reports: {fault}");

    // With lazy protection, the device reaches the buffer until the timer fires.
    device.set_policy(Some(Policy::LAZY))?;
    let mapping = queue.map(memory.buffer(4096).ok_or("out of memory")?, Direction::FromDevice)?;
    let iova = mapping.iova();
    assert!(machine.write(source, iova, b"a block!"));
    // After that, its memory is reused.
    let mut back = None;
    queue.unmap_all([mapping], |ended| back = ended.ok())?;
    let before = machine.write(source, iova, b"too late");
    kernel.tick(10_000_000);
    let after = machine.write(source, iova, b"too late");
    println!("Lazily, a late write came before the timer: {before}; after it: {after}.");
    assert!(before && !after);
    drop(back);

    drop((queue, device));
    domain.detach(disk)?;
    Ok(())
}
