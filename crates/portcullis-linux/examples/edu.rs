//! A driver of QEMU's device `edu` (`docs/specs/edu.rst` of QEMU): it copies 3,000 bytes to the device and back, waits for its interrupt,
//! and releases the device when it is to be unplugged. `cargo run -p portcullis-linux --example edu -- 0000:00:0a.0`, with a device that is
//! bound to VFIO.
#![allow(unsafe_code, reason = "a mapper for the process's memory is made")]

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portcullis::dma::DomainBuilder;
use portcullis::prelude::*;
use portcullis_linux::heap::{Heap, HeapBuffer};
use portcullis_linux::vfio::{self, Interrupt, Registers};

const BYTES: usize = 3000;
const BUFFER: u64 = 0x40000;
const ID: u32 = 0x0100_00ed;
// Registers.
const INTERRUPT_STATUS: usize = 0x24;
const INTERRUPT_ACKNOWLEDGE: usize = 0x64;
const DMA_SOURCE: usize = 0x80;
const DMA_DESTINATION: usize = 0x88;
const DMA_COUNT: usize = 0x90;
const DMA_COMMAND: usize = 0x98;
// Commands, and the flag for an interrupt at the end.
const START: u64 = 1;
const TO_MEMORY: u64 = 2;
const RAISE: u64 = 4;
const DMA_DONE: u32 = 0x100;

type Failure = Box<dyn Error + Send + Sync>;

struct Edu<'a> {
    registers: &'a Registers,
    interrupt: &'a Interrupt,
}

impl Edu<'_> {
    fn read(&self, offset: usize) -> Result<u32, Failure> {
        Ok(self.registers.read32(offset).ok_or_else(|| format!("BAR 0 has no register at {offset:#x}"))?)
    }

    fn write32(&self, offset: usize, value: u32) -> Result<(), Failure> {
        Ok(self
            .registers
            .write32(offset, value)
            .ok_or_else(|| format!("BAR 0 has no register at {offset:#x}"))?)
    }

    fn write64(&self, offset: usize, value: u64) -> Result<(), Failure> {
        Ok(self
            .registers
            .write64(offset, value)
            .ok_or_else(|| format!("BAR 0 has no register at {offset:#x}"))?)
    }

    /// Runs one transfer, and sleeps until its interrupt.
    fn transfer(&self, source: u64, destination: u64, direction: u64) -> Result<(), Failure> {
        self.write64(DMA_SOURCE, source)?;
        self.write64(DMA_DESTINATION, destination)?;
        self.write64(DMA_COUNT, BYTES as u64)?;
        self.write64(DMA_COMMAND, START | direction | RAISE)?;
        loop {
            if self.interrupt.wait_timeout(Duration::from_secs(5))? == 0 {
                return Err("no interrupt of the transfer within 5 seconds".into());
            }
            let status = self.read(INTERRUPT_STATUS)?;
            if status == u32::MAX {
                return Err("the device is gone".into());
            }
            self.write32(INTERRUPT_ACKNOWLEDGE, status)?;
            self.interrupt.unmask()?;
            if status & DMA_DONE != 0 {
                return Ok(());
            }
        }
    }
}

/// Unmaps, and returns the buffer.
fn take<X: Machine>(
    queue: &mut Queue<X, HeapBuffer>,
    mapping: Mapping<HeapBuffer>,
) -> Result<HeapBuffer, Failure> {
    let mut buffer = None;
    queue.unmap(mapping).map_err(|e| e.to_string())?.for_each(|b| buffer = Some(b));
    if buffer.is_none() {
        queue.commit()?.for_each(|b| buffer = Some(b));
    }
    Ok(buffer.ok_or("the queue kept the buffer")?)
}

fn copy<X: Machine>(edu: &Edu, queue: &mut Queue<X, HeapBuffer>) -> Result<(), Failure> {
    let pattern: Vec<u8> = (0..BYTES).map(|i| (i * 7 + 3) as u8).collect();

    let buffer = HeapBuffer::new(BYTES).ok_or("no memory")?;
    buffer.write(0, &pattern).ok_or("the buffer is too short")?;
    let there = queue.map(buffer, Direction::ToDevice).map_err(|e| e.to_string())?;
    let result = edu.transfer(there.iova().get(), BUFFER, 0);
    drop(take(queue, there)?); // Also where the transfer failed: the mapping would stay open.
    result?;

    let buffer = HeapBuffer::new(BYTES).ok_or("no memory")?;
    let back = queue.map(buffer, Direction::FromDevice).map_err(|e| e.to_string())?;
    let result = edu.transfer(BUFFER, back.iova().get(), TO_MEMORY);
    let buffer = take(queue, back)?;
    result?;

    let mut bytes = vec![0; BYTES];
    buffer.read(0, &mut bytes).ok_or("the buffer is too short")?;
    match bytes.iter().zip(&pattern).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(i) => Err(format!("byte {i} is {:#x}, not {:#x}", bytes[i], pattern[i]).into()),
    }
}

fn run(name: &str, times: u32) -> Result<(), Failure> {
    let device = vfio::Device::open(name)?;
    // From here on an unplug waits for this process.
    let request = device.unplug_request()?;
    let registers = device.bar(0)?;
    let id = registers.read32(0).ok_or("BAR 0 is empty")?;
    if id != ID {
        return Err(format!("{name} is no edu device: its id is {id:#010x}").into());
    }

    let mask = DmaMask::bits(28);
    // SAFETY: 1: all memory is the process's: the heap's, and buffers on it. 2: the queue copies.
    let mapper = unsafe { device.space().mapper() };
    let domain = DomainBuilder::new(mapper)
        .policy(Policy::Strict)
        .bounce(Heap, PoolConfig::default().reached_by(mask.last()))
        .build(StdPlatform::new())?;
    let mut queue = domain.attach(device.id(), mask)?.queue(QueueConfig::bounce())?;
    let interrupt = device.interrupts(None, 1)?.pop().ok_or("no interrupt")?;
    device.set_bus_master(true)?;

    let (asked, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // On an error the device was released below, because the work is done.
            let waited = request.wait();
            if done.load(Ordering::Acquire) {
                return;
            }
            if waited.is_ok() {
                asked.store(true, Ordering::Release);
                // Also ends waits for the interrupt.
                if let Err(error) = device.release() {
                    eprintln!("edu: {name} could not be released: {error}");
                }
            }
        });
        let result = (0..times)
            .try_for_each(|_| copy(&Edu { registers: &registers, interrupt: &interrupt }, &mut queue));
        done.store(true, Ordering::Release);
        let released = device.release();
        if asked.load(Ordering::Acquire) && result.is_err() {
            return Err(format!("{name} was unplugged before the copy was done").into());
        }
        result?;
        Ok(released?)
    })
}

fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        eprintln!("usage: edu 0000:00:03.0");
        return ExitCode::from(2);
    };
    match run(&name, std::env::args().nth(2).map_or(1, |n| n.parse().unwrap_or(1))) {
        Ok(()) => {
            println!("{BYTES} bytes went to {name} and back.");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("edu: {error}");
            ExitCode::FAILURE
        }
    }
}
