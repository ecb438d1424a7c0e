//! Limits of the kernel, and what is said of them.

use portcullis::addr::{Iova, Permissions, PhysSegment};
use portcullis::domain::MapListError;
use portcullis::pgtable::MapError;
use portcullis_linux::heap::HeapBuffer;

use crate::{Result, Way, check};

const ANYWHERE: Iova = Iova::new(u64::MAX);

/// A container takes `most` mappings, and no more.
pub fn entries(name: &str, most: u64) -> Result<()> {
    let (device, space) = Way::Type1.domain(name)?;
    check(
        "the limit of mappings is known",
        device.space().usage().most_mappings == Some(most),
        device.space().usage(),
    );
    let memory = HeapBuffer::new(4096).ok_or("no memory")?;
    let list = [PhysSegment { phys: memory.phys(), len: 4096 }];
    let mut mapped = Vec::new();
    let error = loop {
        // SAFETY: the memory is mapped for this device alone, and used by words.
        match unsafe { space.map(&list, Permissions::READ_WRITE, ANYWHERE) } {
            Ok(range) => mapped.push(range),
            Err(error) => break error,
        }
    };
    let is_named = matches!(error, MapListError::Map(MapError::Limit { used, wanted: 1, most: limit, .. }) if used == most && limit == most);
    check(
        "the limit of mappings is an error that says so",
        is_named && mapped.len() as u64 == most,
        (&error, mapped.len()),
    );
    println!("{error}");
    mapped.into_iter().try_for_each(|range| space.unmap(range))?;
    check("and leaves room when they are gone", device.space().usage().mappings == 0, device.space().usage());
    Ok(())
}

/// A user without privileges locks no more memory than allowed.
pub fn locked(way: Way, name: &str) -> Result<()> {
    const LIMIT: u64 = 1 << 20;
    let (device, space) = way.domain(name)?;
    let memory = HeapBuffer::new(2 << 20).ok_or("no memory")?;
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: these read the structure, and change this process alone.
    let limited = unsafe {
        libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) == 0 && libc::setresuid(1000, 1000, 1000) == 0
    };
    let map = |len| {
        let list = [PhysSegment { phys: memory.phys(), len }];
        // SAFETY: the memory is mapped for this device alone, and used by words.
        unsafe { space.map(&list, Permissions::READ_WRITE, ANYWHERE) }
    };
    let error = map(2 * LIMIT).err();
    let is_named = matches!(error, Some(MapListError::Map(MapError::Limit { used: 0, wanted, most: LIMIT, .. })) if wanted == 2 * LIMIT);
    check("the limit of locked memory is an error that says so", limited && is_named, (limited, &error));
    if let Some(error) = error {
        println!("{error}");
    }
    let less = map(LIMIT / 2)?;
    check("less than that is mapped", device.space().usage().bytes == LIMIT / 2, device.space().usage());
    let error = map(LIMIT).err();
    let is_named =
        matches!(error, Some(MapListError::Map(MapError::Limit { used, .. })) if used == LIMIT / 2);
    check("and counts", is_named, error);
    space.unmap(less)?;
    Ok(())
}

/// Maps 128 MiB in buffers of 4 KiB, one by one, and by one call for all: prints how long each takes, and how many mappings the kernel
/// has then.
pub fn pages(way: Way, name: &str) -> Result<()> {
    const LEN: u64 = 128 << 20;
    let (device, space) = way.domain(name)?;
    let memory = HeapBuffer::new(LEN as usize).ok_or("no memory")?;
    // The kernel gives a page when it is touched first, which is not measured.
    (0..LEN as usize).step_by(4096).try_for_each(|at| memory.write(at, &[1])).ok_or("too long")?;
    let by = if way == Way::Iommufd { "iommufd" } else { "type1" };
    for (what, len) in [("by one call", LEN), ("one by one", 4096)] {
        let began = std::time::Instant::now();
        let mut mapped = Vec::with_capacity((LEN / len) as usize);
        for at in (0..LEN).step_by(len as usize) {
            let phys = memory.phys().checked_add(at).ok_or("too long")?;
            // SAFETY: the memory is mapped for this device alone, and used by words.
            mapped
                .push(unsafe { space.map(&[PhysSegment { phys, len }], Permissions::READ_WRITE, ANYWHERE) }?);
        }
        let (took, usage) = (began.elapsed(), device.space().usage());
        println!("figure ms to map 128 MiB of small pages, {by} | {what} | map: {}", took.as_millis());
        println!("figure ms to map 128 MiB of small pages, {by} | {what} | mappings: {}", usage.mappings);
        let began = std::time::Instant::now();
        mapped.into_iter().try_for_each(|range| space.unmap(range))?;
        println!(
            "figure ms to map 128 MiB of small pages, {by} | {what} | unmap: {}",
            began.elapsed().as_millis()
        );
        check(
            &format!("{by}, {what}: all of it was mapped, and is gone"),
            usage.bytes == LEN && device.space().usage().bytes == 0,
            usage,
        );
    }
    Ok(())
}
