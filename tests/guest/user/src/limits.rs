//! Limits of the kernel, and what is said of them.

use std::time::Instant;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysSegment};
use portcullis::dma::QueueConfig;
use portcullis::domain::{MapListError, Refused};
use portcullis::invalidation::Gather;
use portcullis::pgtable::MapError;
use portcullis_linux::heap::HeapBuffer;
use portcullis_linux::registration::{Keep, RegistrationCache, RegistrationLimits};
use portcullis_linux::vfio::Device;

use crate::{Result, Way, attached, check};

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

/// Where a pool's slots lie: on pages that are set aside (`set`), on transparent ones (`transparent`), or on small ones. A device reads and writes them.
pub fn huge(way: Way, name: &str, kind: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let mut queue = attached(&device, &space)?.queue(QueueConfig::bounce())?;
    let before = [in_pages("Private_Hugetlb")?, in_pages("AnonHugePages")?];
    let mut held = Vec::new();
    for _ in 0..64 {
        let buffer = HeapBuffer::new(128 << 10).ok_or("no memory")?;
        let mapping = queue.map(buffer, Direction::Bidirectional);
        held.push(mapping.map_err(|refused| refused.error)?);
    }
    let [set, transparent] =
        [in_pages("Private_Hugetlb")? - before[0], in_pages("AnonHugePages")? - before[1]];
    // Each takes 8 MiB for buffers, and as much for slots.
    const ALL: i64 = 16 << 10;
    let holds = match kind {
        "set" => set >= ALL,
        "transparent" => set == 0 && transparent >= ALL,
        _ => set == 0 && transparent == 0,
    };
    check(&format!("slots of a pool lie on pages of this kind: {kind}"), holds, (set, transparent));
    for mapping in held {
        queue.unmap(mapping).map_err(|failed| failed.error)?.for_each(drop);
    }
    Ok(())
}

/// KiB of this process in pages of a kind.
fn in_pages(kind: &str) -> Result<i64> {
    let all = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = all.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(':'));
    Ok(line.ok_or("no such kind of pages")?.trim().trim_end_matches(" kB").parse()?)
}

/// Bytes that are mapped in different ways, and of a buffer.
const LEN: u64 = 128 << 20;
const PAGE: u64 = 4096;

/// Maps 128 MiB by one call for all, and in buffers of 4 KiB: each by itself; noted one by one, and linked together; and lent one by one
/// out of an area that is registered. Prints how long each takes, and how many mappings the kernel has then.
pub fn pages(way: Way, name: &str) -> Result<()> {
    let (device, space) = way.domain(name)?;
    let memory = HeapBuffer::new(LEN as usize).ok_or("no memory")?;
    // The kernel gives a page when it is touched first, which is not measured.
    (0..LEN as usize).step_by(PAGE as usize).try_for_each(|at| memory.write(at, &[1])).ok_or("too long")?;
    let part =
        |at: u64, len| memory.phys().checked_add(at).map(|phys| PhysSegment { phys, len }).ok_or("too long");
    let map = |len: u64| -> Result<Vec<IovaRange>> {
        // SAFETY: the memory is mapped for this device alone, and used by words.
        let map = |at| Ok(unsafe { space.map(&[part(at, len)?], Permissions::READ_WRITE, ANYWHERE) }?);
        (0..LEN).step_by(len as usize).map(map).collect()
    };
    let measured = Measured { device: &device, by: way.name() };
    let unmap = |mapped: Vec<IovaRange>| Ok(mapped.into_iter().try_for_each(|range| space.unmap(range))?);
    // The kernel makes tables for the first map, which stay.
    unmap(map(LEN)?)?;
    measured.by("by one call", 1, || map(LEN), unmap)?;
    measured.by("one by one", LEN / PAGE, || map(PAGE), unmap)?;
    let linked = || {
        let reserved = space.reserve(LEN, ANYWHERE)?;
        let mut pieces = reserved.pieces();
        for at in (0..LEN).step_by(PAGE as usize) {
            pieces.add(at, part(at, PAGE)?)?;
        }
        let (list, mut unconfirmed) = (pieces.list()?, Gather::new());
        // SAFETY: as above.
        let linked = unsafe { reserved.link(&list, Permissions::READ_WRITE, &mut unconfirmed) };
        Ok(vec![linked.map_err(Refused::end)?.into_range()])
    };
    measured.by("noted one by one and linked", 1, linked, unmap)?;
    let limits = RegistrationLimits { entries: 1, bytes: LEN };
    let cache = RegistrationCache::new(attached(&device, &space)?.dma().clone(), limits)?;
    let acquire = |at, len| {
        // SAFETY: as above; it is forgotten before it is freed.
        Result::Ok(unsafe { cache.acquire(part(at, len)?, Direction::Bidirectional, Keep::UntilForgotten) }?)
    };
    let lent = || {
        let area = acquire(0, LEN)?;
        let mut lent =
            (0..LEN).step_by(PAGE as usize).map(|at| acquire(at, PAGE)).collect::<Result<Vec<_>>>()?;
        lent.push(area);
        Ok(lent)
    };
    measured.by("lent one by one from a registered area", 1, lent, |lent| {
        lent.into_iter().try_for_each(|lent| cache.release(lent).map(drop))?;
        Ok(cache.forget(part(0, LEN)?).map(drop)?)
    })
}

/// What prints how long a way to map takes.
struct Measured<'a> {
    device: &'a Device,
    by: &'static str,
}

impl Measured<'_> {
    /// Maps, and unmaps what that returns: the kernel has `wanted` mappings in between, and none afterwards.
    fn by<T>(
        &self,
        what: &str,
        wanted: u64,
        map: impl FnOnce() -> Result<T>,
        unmap: impl FnOnce(T) -> Result<()>,
    ) -> Result<()> {
        let Self { device, by } = self;
        let begins = Instant::now();
        let mapped = map()?;
        let (took, usage) = (begins.elapsed(), device.space().usage());
        let begins = Instant::now();
        unmap(mapped)?;
        let ended = begins.elapsed();
        for (which, figure) in
            [("map", took.as_millis()), ("unmap", ended.as_millis()), ("mappings", usage.mappings.into())]
        {
            println!("figure ms to map 128 MiB of small pages, {by} | {what} | {which}: {figure}");
        }
        check(
            &format!("{by}, {what}: all of it was mapped, by {wanted} mappings of the kernel's, and is gone"),
            usage.bytes == LEN && usage.mappings == wanted && device.space().usage().bytes == 0,
            usage,
        );
        Ok(())
    }
}
