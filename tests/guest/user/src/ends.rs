//! Processes that divide, and that end.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use portcullis::addr::{Direction, Iova};
use portcullis::dma::QueueConfig;
use portcullis_linux::heap::HeapBuffer;

use crate::edu::Edu;
use crate::{Result, Way, attached, check};

/// After a fork the device goes on with the parent's memory, whoever writes first.
pub fn fork(way: Way, name: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let edu = Edu::new(&device)?;
    let mut queue = attached(&device, &space)?.queue(QueueConfig::direct())?;
    let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
    buffer.write(0, &[1; 4096]).ok_or("too long")?;
    let mapping = queue.map(buffer, Direction::Bidirectional)?;
    // SAFETY: the child calls nothing but what may be called then: it writes memory, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = mapping.buffer().write(0, &[2; 4096]);
        // SAFETY: it ends this process.
        unsafe { libc::_exit(if done.is_some() { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: it writes the number.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    check("a child writes its own copy", waited == child && status == 0, (waited, status));
    mapping.buffer().write(0, &[3; 4096]).ok_or("too long")?;
    edu.read(mapping.iova(), 4096)?;
    mapping.buffer().write(0, &[4; 4096]).ok_or("too long")?;
    edu.write(mapping.iova(), 4096)?;
    let mut bytes = [0; 4096];
    mapping.buffer().read(0, &mut bytes).ok_or("too long")?;
    check("the device goes on with the parent's memory after a fork", bytes == [3; 4096], bytes[0]);
    queue.unmap(mapping)?.for_each(drop);
    Ok(())
}

/// Maps memory, says where, and waits to be killed.
pub fn hold(way: Way, name: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let edu = Edu::new(&device)?;
    let mut queue = attached(&device, &space)?.queue(QueueConfig::direct())?;
    let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
    buffer.write(0, &[0x77; 4096]).ok_or("too long")?;
    let mapping = queue.map(buffer, Direction::Bidirectional)?;
    edu.read(mapping.iova(), 4096)?;
    println!("{}", mapping.iova().get());
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

/// A process that was killed leaves nothing mapped, and its device to others.
pub fn killed(way: Way, name: &str) -> Result<()> {
    let held = ["held", way.name(), name];
    let mut other = Command::new(std::env::current_exe()?).args(held).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(other.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let iova = Iova::new(line.trim().parse().map_err(|_| line.clone())?);
    let taken = way.domain(name);
    let taken = taken.map(drop).map_err(|error| error.to_string());
    check(
        "a device that is in use is refused",
        taken.as_ref().is_err_and(|error| error.contains("is in use")),
        &taken,
    );
    other.kill()?;
    other.wait()?;
    let (device, space) = way.domain(name)?;
    let edu = Edu::new(&device)?;
    let mut queue = attached(&device, &space)?.queue(QueueConfig::direct())?;
    let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
    let mapping = queue.map(buffer, Direction::Bidirectional)?;
    // The device reads something else, then tries what the other had.
    edu.read(mapping.iova(), 4096)?;
    if mapping.iova() != iova {
        edu.read(iova, 4096)?;
    }
    edu.write(mapping.iova(), 4096)?;
    let mut bytes = [1; 4096];
    mapping.buffer().read(0, &mut bytes).ok_or("too long")?;
    check("a process that was killed leaves nothing mapped", !bytes.contains(&0x77), bytes[0]);
    queue.unmap(mapping)?.for_each(drop);
    Ok(())
}
