//! Devices that are unplugged while a process has them, and devices that are plugged in.

use std::path::Path;
use std::time::{Duration, Instant};

use portcullis::addr::Direction;
use portcullis::dma::{Mapping, Queue, QueueConfig};
use portcullis_linux::heap::HeapBuffer;
use portcullis_linux::vfio::{Device, Machine};

use crate::edu::Edu;
use crate::{Result, Way, attached, check};

/// Linux waits some seconds before it goes on with what a button asks for.
const SOON: Duration = Duration::from_secs(120);

/// Tells the host's monitor.
fn host(command: &str) {
    println!("host: {command}");
}

fn within(what: &str, mut is_done: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + SOON;
    while !is_done() {
        if Instant::now() > end {
            return Err(format!("{what} takes too long").into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn is_there(name: &str) -> bool {
    Path::new("/sys/bus/pci/devices").join(name).exists()
}

/// Whether the slot of a device is empty: not before that is the device gone for the host.
fn is_empty(name: &str) -> bool {
    let read = |slot: &Path, file: &str| std::fs::read_to_string(slot.join(file)).unwrap_or_default();
    let slots = Path::new("/sys/bus/pci/slots").read_dir().into_iter().flatten().flatten();
    let mut slots = slots.map(|slot| slot.path());
    let slot = slots.find(|slot| name.strip_suffix(".0") == Some(read(slot, "address").trim()));
    slot.is_some_and(|slot| read(&slot, "adapter").trim() == "0")
}

/// Gives a device to VFIO, as the error of `Device::open` says. For a moment after it has come Linux gives it to no driver.
fn bind(name: &str) -> Result<()> {
    let device = Path::new("/sys/bus/pci/devices").join(name);
    std::fs::write(device.join("driver_override"), "vfio-pci")?;
    within("binding", || {
        // The link is there before the driver has begun: where it was there, this waits until the driver is ready.
        let is_bound = device.join("driver").exists();
        let _ = std::fs::write("/sys/bus/pci/drivers_probe", name);
        is_bound
    })
}

/// The device copies what it finds in one buffer to another.
fn copies(edu: &Edu, [from, to]: [&Mapping<HeapBuffer>; 2], byte: u8) -> Result<bool> {
    from.buffer().write(0, &[byte; 4096]).ok_or("too long")?;
    to.buffer().write(0, &[0; 4096]).ok_or("too long")?;
    edu.read(from.iova(), 4096)?;
    edu.write(to.iova(), 4096)?;
    let mut bytes = [0; 4096];
    to.buffer().read(0, &mut bytes).ok_or("too long")?;
    Ok(bytes == [byte; 4096])
}

fn mapped(queue: &mut Queue<Machine, HeapBuffer>) -> Result<Mapping<HeapBuffer>> {
    let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
    Ok(queue.map(buffer, Direction::Bidirectional)?)
}

/// Buffers that come back, of so many mappings.
fn back(queue: &mut Queue<Machine, HeapBuffer>, all: Vec<Mapping<HeapBuffer>>) -> Result<usize> {
    let mut count = 0;
    for mapping in all {
        queue.unmap(mapping)?.for_each(|_| count += 1);
    }
    queue.commit()?.for_each(|_| count += 1);
    Ok(count)
}

/// `hot`, which QEMU calls `id`, is unplugged while it shares an address space with `name`. An edu, `next`, is plugged in in its place, and
/// joins. Then each of the two leaves, until the space has none, and one returns.
pub fn plugs(way: Way, name: &str, hot: &str, [id, next]: [&str; 2]) -> Result<()> {
    let by = way.name();
    let told = |what: &str, held, why: &dyn std::fmt::Debug| check(&format!("{by}: {what}"), held, why);
    let (device, domain) = way.domain(hot)?;
    let space = device.space().clone();
    let stays = Device::open_in(name, &space)?;
    let edu = Edu::new(&stays)?;
    let mut shared = attached(&stays, &domain)?.queue(QueueConfig::direct())?;
    let (from, to) = (mapped(&mut shared)?, mapped(&mut shared)?);
    let dma = attached(&device, &domain)?;
    let configs = [QueueConfig::direct(), QueueConfig::batched(4), QueueConfig::ring(8, 4096).batch(4)];
    let mut queues = Vec::new();
    for config in configs {
        let mut queue = dma.queue(config)?;
        let all = (0..6).map(|_| mapped(&mut queue)).collect::<Result<Vec<_>>>()?;
        queues.push((queue, all));
    }
    let (registers, request) = (device.bar(0)?, device.unplug_request()?);
    let interrupt = device.interrupts(None, 1)?.pop().ok_or("there is one")?;
    let waits = std::thread::spawn(move || interrupt.wait().map_err(|error| error.to_string()));

    told("before it, none is asked for", request.count()? == 0, &"it was");
    host(&format!("device_del {id}"));
    let count = request.wait_timeout(SOON)?;
    let answers = registers.read32(0).ok_or("no register")?;
    told("the kernel asks for a device, which answers", count > 0 && answers != u32::MAX, &(count, answers));
    told("the unplug waits", is_there(hot), &"it is gone");
    device.release()?;
    let (answers, waited) = (registers.read32(0), waits.join().map_err(|_| "a thread")?);
    told("registers of a released device have all bits", answers == Some(u32::MAX), &answers);
    let says = format!("{hot} was released");
    told("who waits for its interrupt is told", waited.as_ref() == Err(&says), &waited);
    let mut count = 0;
    for (queue, all) in &mut queues {
        count += back(queue, std::mem::take(all))?;
    }
    told("all buffers come back", count == 18, &count);
    drop((queues, dma));
    within("the unplug", || !is_there(hot) && is_empty(hot))?;
    // All else is still held here.
    told("the unplug ends", true, &"");
    drop((registers, request, device));
    told("what is shared outlives the device", copies(&edu, [&from, &to], 0x21)?, &"other bytes");

    host(&format!("device_add edu,bus=port0,id={next},dma_mask=0xffffffff"));
    within("the plug", || is_there(hot))?;
    bind(hot)?;
    let joined = Device::open_in(hot, &space)?;
    let other = Edu::new(&joined)?;
    told(
        "a device that joins reaches what was mapped before",
        copies(&other, [&from, &to], 0x22)?,
        &"other bytes",
    );
    stays.release()?;
    told("and goes on without the first", copies(&other, [&from, &to], 0x23)?, &"other bytes");
    joined.release()?;
    drop((stays, edu, joined, other));

    // Nobody is there: mappings are noted until somebody is.
    let last = mapped(&mut shared)?;
    let returned = Device::open_in(name, &space)?;
    let edu = Edu::new(&returned)?;
    told("one that returns reaches all", copies(&edu, [&from, &last], 0x24)?, &"other bytes");
    told("and what it had", copies(&edu, [&last, &to], 0x25)?, &"other bytes");
    // edu has the last bytes still, and writes where the buffer was.
    let (iova, mut back_again) = (to.iova(), Vec::new());
    shared.unmap(to)?.for_each(|buffer| back_again.push(buffer));
    let buffer = back_again.pop().ok_or("it did not come back")?;
    buffer.write(0, &[0; 4096]).ok_or("too long")?;
    edu.write(iova, 4096)?;
    let mut bytes = [1; 4096];
    buffer.read(0, &mut bytes).ok_or("too long")?;
    told("an unmap ends it for the one that returned", bytes == [0; 4096], &bytes[0]);
    returned.release()?;
    let count = back(&mut shared, vec![from, last])?;
    let usage = space.usage();
    told("all of it ends", count == 2 && (usage.mappings, usage.bytes) == (0, 0), &(count, usage));
    Ok(())
}
