//! What a device reaches, and what the kernel refuses.

use std::os::fd::FromRawFd;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysSegment};
use portcullis::dma::QueueConfig;
use portcullis::domain::{MapListError, UnmapError};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;
use portcullis_linux::buffer::{AnyBuffer, FileBuffer};
use portcullis_linux::heap::HeapBuffer;
use portcullis_linux::vfio::{Device, scope};

use crate::edu::Edu;
use crate::{Result, Way, attached, check, pages};

const LOW: Iova = Iova::new(u32::MAX as u64);

fn filled(byte: u8) -> Result<HeapBuffer> {
    let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
    buffer.write(0, &[byte; 4096]).ok_or("too long")?;
    Ok(buffer)
}

fn has(buffer: &HeapBuffer, byte: u8) -> bool {
    let mut bytes = [0; 4096];
    buffer.read(0, &mut bytes).is_some() && bytes == [byte; 4096]
}

/// The device gets what it may, and nothing else, by each kind of queue.
pub fn transfers(way: Way, name: &str, other: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    println!("{:?}, {:?}", device.space().kind(), device.space().geometry());
    let edu = Edu::new(&device)?;
    let attached = attached(&device, &space)?;
    for (config, what) in [
        (QueueConfig::direct(), "direct"),
        (QueueConfig::batched(2), "batched"),
        (QueueConfig::ring(8, 4096).batch(2), "ring"),
        (QueueConfig::bounce(), "bounce"),
    ] {
        let mut queue = attached.queue(config)?;
        let source = queue.map(filled(0xa5)?, Direction::ToDevice)?;
        edu.read(source.iova(), 4096)?;
        // What the device may only read it does not write.
        let (stays, page) = (filled(0x11)?, source.iova());
        edu.write(page, 4096)?;
        let read_only = source.buffer();
        check(&format!("{what}: memory that may be read is not written"), has(read_only, 0xa5), "it was");
        let target = queue.map(filled(0)?, Direction::FromDevice)?;
        let iova = target.iova();
        edu.write(iova, 4096)?;
        let mut back = Vec::new();
        queue.unmap(source)?.for_each(|buffer| back.push(buffer));
        queue.unmap(target)?.for_each(|buffer| back.push(buffer));
        queue.commit()?.for_each(|buffer| back.push(buffer));
        let copied = back.len() == 2 && back.iter().all(|buffer| has(buffer, 0xa5));
        check(&format!("{what}: bytes come from memory and go there"), copied, back.len());
        // After its unmap, the device writes once more where the buffer was.
        back.iter().try_for_each(|buffer| buffer.write(0, &[0x33; 4096])).ok_or("too long")?;
        edu.write(iova, 4096)?;
        let untouched = back.iter().all(|buffer| has(buffer, 0x33)) && has(&stays, 0x11);
        check(&format!("{what}: nothing arrives after the unmap"), untouched, "it did");
    }
    // Another device joins, and reaches the same addresses.
    let usage = device.space().usage();
    let joined = Device::open_in(other, device.space());
    let registers = joined.as_ref().map(|other| other.bar(0));
    let version = registers.ok().and_then(|registers| registers.ok()?.read32(8));
    // An NVMe controller says which version it is of.
    check("a second device joins", version.is_some_and(|version| version >> 16 == 1), (&joined, version));
    check("and changes no mapping", device.space().usage() == usage, device.space().usage());
    Ok(())
}

/// Parts of a mapping go with the last of them, and their addresses come back.
pub fn parts(way: Way, name: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let edu = Edu::new(&device)?;
    let memory = HeapBuffer::new(4 * 4096).ok_or("no memory")?;
    let list = [PhysSegment { phys: memory.phys(), len: 4 * 4096 }];
    let mut kept = true;
    for round in 0..50 {
        // SAFETY: the memory is mapped for this device alone, and used by words.
        let range = unsafe { space.map(&list, Permissions::READ_WRITE, LOW) }?;
        for page in [1, 3, 0] {
            let part = pages(range, page, 1)?;
            kept &=
                space.unmap(part) == Err(UnmapError::StillMapped { range: part, unmapped: 0, kept: 4096 });
        }
        if round == 0 {
            memory.write(0, &[0x55; 4096]).ok_or("too long")?;
            edu.read(range.start(), 4096)?;
            edu.write(pages(range, 1, 1)?.start(), 4096)?;
            let mut byte = [0];
            memory.read(4096, &mut byte).ok_or("too long")?;
            check("a part that is kept is still reached", byte == [0x55], byte);
        }
        space.unmap(pages(range, 2, 1)?)?;
        if round == 0 {
            memory.write(0, &[0; 4 * 4096]).ok_or("too long")?;
            for page in 0..4 {
                edu.write(pages(range, page, 1)?.start(), 4096)?;
            }
            let mut bytes = [1; 4 * 4096];
            memory.read(0, &mut bytes).ok_or("too long")?;
            check("with the last part all of it is gone", bytes == [0; 4 * 4096], "it was written");
        }
    }
    check("the kernel splits no mapping", kept, kept);
    let (stats, usage) = (space.stats(), device.space().usage());
    let is_back = stats.lost_iova_bytes == 0 && stats.taken_iova_bytes == stats.cached_iova_bytes;
    check("addresses of parts come back", is_back && (usage.mappings, usage.bytes) == (0, 0), (stats, usage));
    Ok(())
}

/// What the kernel refuses is an error that says what it is.
pub fn refused(way: Way, name: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let memory = HeapBuffer::new(8192).ok_or("no memory")?;
    let platform = space.platform();
    // SAFETY: the memory is mapped for this device alone, and used by words.
    let mappers = unsafe { [device.space().mapper(), device.space().mapper()] };
    let map = |mapper: usize, iova: u64, len: u64| {
        let range = IovaRange::new(Iova::new(iova), len)?;
        let list = [(memory.phys(), len)];
        // SAFETY: as above.
        let mapped = unsafe {
            mappers[mapper].map(platform, range, list, Permissions::READ_WRITE.into(), &mut Gather::new())
        };
        Ok::<_, Box<dyn std::error::Error>>(mapped)
    };
    let geometry = device.space().geometry();
    check(
        "addresses in use are refused",
        {
            map(0, 0x4000_0000, 8192)?.is_ok()
                && map(1, 0x4000_1000, 4096)? == Err(MapError::AlreadyMapped { at: Iova::new(0x4000_1000) })
        },
        "not",
    );
    let removed = |iova, len| {
        Ok::<_, Box<dyn std::error::Error>>(mappers[0].unmap(
            platform,
            IovaRange::new(Iova::new(iova), len)?,
            &mut Gather::new(),
        ))
    };
    let part = removed(0x4000_1000, 4096)?;
    check("a part is kept", (part.bytes, part.kept) == (0, 4096), part);
    let whole = removed(0x4000_0000, 8192)?;
    check("an unmap says how much it was", (whole.bytes, whole.kept) == (8192, 0), whole);
    let beyond = map(0, geometry.aperture.last().get() & !0xfff, 8192)?;
    check("addresses beyond the last are refused", beyond.is_err(), beyond);
    // A PC's interrupts, or whatever else the kernel keeps.
    for hole in &geometry.reserved {
        let at = hole.start().get() & !0xfff;
        let kept = map(0, at, 4096)?;
        check(
            "addresses that the kernel keeps are refused",
            matches!(kept, Err(MapError::Refused { .. })),
            (hole, kept),
        );
    }
    let list = [PhysSegment { phys: portcullis::addr::PhysAddr::new(0x1000), len: 4096 }];
    // SAFETY: nothing of the process is there.
    let nowhere = unsafe { space.map(&list, Permissions::READ, LOW) };
    check(
        "memory that is not there is refused",
        matches!(nowhere, Err(MapListError::Map(MapError::Refused { .. }))),
        nowhere,
    );
    // Nor is what may not be written opened for it.
    let constant: &'static [u8; 8192] = &[7; 8192];
    let list = [PhysSegment {
        phys: portcullis::addr::PhysAddr::new((constant.as_ptr() as u64).next_multiple_of(4096)),
        len: 4096,
    }];
    // SAFETY: devices may read it; the kernel lets none write it.
    let read_only = unsafe { space.map(&list, Permissions::READ_WRITE, LOW) };
    check("memory that the process may not write is refused", read_only.is_err(), read_only);
    Ok(())
}

/// Buffers of the program's own kinds: a vector, an array that is borrowed, and memory that another mapping of a file shows, too; and a large one.
pub fn kinds(way: Way, name: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let edu = Edu::new(&device)?;
    let attached = attached(&device, &space)?;

    let mut queue = attached.queue(QueueConfig::bounce())?;
    let source = queue.map(AnyBuffer::new(vec![0x61_u8; 3000]), Direction::ToDevice)?;
    let target = queue.map(AnyBuffer::new(vec![0_u8; 3000]), Direction::FromDevice)?;
    edu.read(source.iova(), 3000)?;
    edu.write(target.iova(), 3000)?;
    queue.unmap(source)?.for_each(drop);
    let mut back = Vec::new();
    // SAFETY: an unmap has given it back, over a mapper that takes access away at once.
    queue.unmap(target)?.for_each(|buffer| back = unsafe { buffer.into_inner() });
    check("a vector comes back with what the device wrote", back == [0x61; 3000], back.first());

    for (config, what) in [(QueueConfig::direct(), "mapped"), (QueueConfig::bounce(), "copied")] {
        let mut queue = attached.queue::<HeapBuffer>(config)?;
        let (read, mut written) = (Page([0x62; 4096]), Page([0; 4096]));
        let iova = scope(&mut queue, |scope| {
            edu.read(scope.map_for_read(&read.0)?, 4096)?;
            let iova = scope.map_for_write(&mut written.0)?;
            edu.write(iova, 4096)?;
            Ok::<_, Box<dyn std::error::Error>>(iova)
        })?;
        let arrived = written.0 == [0x62; 4096];
        written.0.fill(1);
        edu.write(iova, 4096)?;
        check(
            &format!("what is borrowed is {what} for as long as the scope runs"),
            arrived && written.0 == [1; 4096],
            arrived,
        );
    }

    // SAFETY: it makes a file.
    let memfd = unsafe { libc::memfd_create(c"buffer".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the file is this function's.
    let memfd = unsafe { std::fs::File::from_raw_fd(memfd) };
    memfd.set_len(4 * 4096)?;
    let (shown, mapped) = (FileBuffer::new(&memfd, 0, 4 * 4096)?, FileBuffer::new(&memfd, 8192, 8192)?);
    let mut queue = attached.queue(QueueConfig::direct())?;
    shown.write(3 * 4096, &[0x63; 4096]).ok_or("too long")?;
    let mapping = queue.map(mapped, Direction::Bidirectional)?;
    let second = Iova::new(mapping.iova().get() + 4096);
    edu.read(second, 4096)?;
    edu.write(mapping.iova(), 4096)?;
    let mut bytes = [0; 4096];
    shown.read(2 * 4096, &mut bytes).ok_or("too long")?;
    check("a device and another mapping share a file", bytes == [0x63; 4096], bytes[0]);
    queue.unmap(mapping)?.for_each(drop);
    edu.write(second, 4096)?;
    shown.read(3 * 4096, &mut bytes).ok_or("too long")?;
    check("and no longer after the unmap", bytes == [0x63; 4096], bytes[0]);

    let large = HeapBuffer::new(64 << 20).ok_or("no memory")?;
    let mut queue = attached.queue(QueueConfig::direct())?;
    let before = device.space().usage();
    let mapping = queue.map(large, Direction::Bidirectional)?;
    let after = device.space().usage();
    check(
        "64 MiB are one mapping of the kernel's, by one call",
        (after.mappings - before.mappings, after.calls - before.calls) == (1, 1),
        (before, after),
    );
    edu.write(Iova::new(mapping.iova().get() + (63 << 20)), 4096)?;
    mapping.buffer().read(63 << 20, &mut bytes).ok_or("too long")?;
    check("and the device reaches its last MiB", bytes == [0x63; 4096], bytes[0]);
    queue.unmap(mapping)?.for_each(drop);
    Ok(())
}

#[repr(align(4096))]
struct Page([u8; 4096]);
