//! Addresses: where each size goes, what CPUs keep, what is left, and what comes back.

use std::collections::BTreeMap;

use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{Bitmap, IovaSpace, RingArena, RingConfig, SpaceConfig, Survey};

use super::world::PAGE;
use crate::dice::Dice;
use crate::rig::Clocked;
use crate::transcript::{Cpus, FOLDER, Transcript};

/// What is noted of a space, but for the sizes of values.
fn usage(said: &mut Transcript, space: &IovaSpace) {
    let mut usage = space.usage();
    usage.memory = 0;
    said.note("usage", usage);
}

#[test]
fn a_space() {
    let (clock, mut said) = (Clocked::new(3), Transcript::new("addresses of 33 bits", Vec::new));
    let cpus = Cpus(clock.clone());
    let reserved = |first: u64, len| IovaRange::new(Iova::new(first), len).unwrap();
    let config = SpaceConfig {
        reserved: vec![reserved(0xfee0_0000, 0x10_0000), reserved(0x7000, 0x1000), reserved(0x8800, 0x10)],
        cache_bytes: 1 << 20,
        ..SpaceConfig::new(IovaRange::new(Iova::new(PAGE), (1 << 33) - PAGE).unwrap(), PageSize::SIZE_4K, 3)
    };
    let space = IovaSpace::new(&config).unwrap();
    usage(&mut said, &space);
    let limits = [u64::MAX, (1 << 32) - 1, 0x10_0000_0000, 0xffff, 0x7fff, 0xfee0_0fff, 0];
    for limit in limits {
        said.part(format_args!("up to {limit:#x}"));
        let mut all = Vec::new();
        for pages in [1, 1, 2, 3, 5, 8, 33, 64, 512, 513, 1 << 20, 1 << 22, 0] {
            let alloc = || space.alloc(&cpus, pages * PAGE, Iova::new(limit));
            all.extend(said.call_as(format_args!("{pages:#x} pages"), alloc, IovaRange::to_string));
        }
        let more = || space.alloc(&cpus, 5, Iova::new(limit));
        all.extend(said.call_as("5 bytes", more, IovaRange::to_string));
        all.into_iter().for_each(|range| space.free(&cpus, range).unwrap());
        usage(&mut said, &space);
    }
    said.part("mistakes");
    for range in [reserved(PAGE, PAGE), reserved(0x7000, PAGE), reserved(5, 5), reserved(1 << 40, PAGE)] {
        let _ = said.call(format_args!("free {range}"), || space.free(&cpus, range));
    }
    let range = space.alloc(&cpus, 4 * PAGE, Iova::new(u64::MAX)).unwrap();
    for (offset, pages) in [(0, 2), (PAGE, 3), (0, 5), (0, 4), (0, 4)] {
        let part = reserved(range.start().get() + offset, pages * PAGE);
        let _ = said.call(format_args!("free {part} of {range}"), || space.free(&cpus, part));
    }
    said.part("by lot, from three CPUs and none");
    let (mut dice, mut live) = (Dice::new(5), BTreeMap::new());
    for round in 0..4000_u64 {
        clock.be(dice.below(4) as usize);
        if live.len() > 300 || dice.one_in(2) && !live.is_empty() {
            let at = dice.below(live.len() as u64) as usize;
            let range: IovaRange = live.remove(&live.keys().copied().nth(at).unwrap()).unwrap();
            space.free(&cpus, range).unwrap();
        } else {
            let most = if dice.one_in(9) { 900 } else { 12 };
            let bytes = (1 + dice.below(most)) * PAGE;
            let limit = if dice.one_in(7) { 1 << 26 } else { u64::MAX };
            if let Ok(range) = space.alloc(&cpus, bytes, Iova::new(limit)) {
                live.insert(range.start(), range);
            }
        }
        if round % 250 == 249 {
            let first: Vec<String> = live.values().map(IovaRange::to_string).take(4).collect();
            said.line(format_args!("after {round}: {} ranges: {}", live.len(), first.join(" ")));
            usage(&mut said, &space);
        }
    }
    space.drain_cpu(&cpus, 1);
    usage(&mut said, &space);
    live.into_values().for_each(|range| space.free(&cpus, range).unwrap());
    usage(&mut said, &space);
    space.drain_all(&cpus);
    usage(&mut said, &space);
    said.part("rings");
    for (descriptors, bytes, colour, limit) in [
        (16, PAGE, None, u64::MAX),
        (16, PAGE, Some(0), u64::MAX),
        (16, PAGE, Some(3), u64::MAX),
        (7, 5 * PAGE, Some(19), u64::MAX),
        (2, 2 << 20, Some(2), u64::MAX),
        (1 << 20, 1 << 20, None, u64::MAX),
        (16, PAGE, None, 0xffff),
        (0, PAGE, None, u64::MAX),
        (1, 100, None, 0xffff_ffff),
    ] {
        let config = RingConfig {
            colour,
            limit: Iova::new(limit),
            ..RingConfig::new(descriptors, bytes, PageSize::SIZE_4K)
        };
        let make = || RingArena::new(&space, &cpus, &config);
        let show = |arena: &RingArena| format!("{} of {:#x}", arena.range(), arena.capacity());
        let Ok(mut arena) =
            said.call_as(format_args!("{descriptors} of {bytes:#x}, {colour:?}, {limit:#x}"), make, show)
        else {
            continue;
        };
        let mut line = Vec::new();
        let mut held = Vec::new();
        for turn in 0..40 {
            match arena.reserve(if turn % 3 == 0 { bytes } else { PAGE * (turn % 4) + 1 }) {
                Ok(range) => {
                    line.push(format!("{:#x}", range.start()));
                    held.push(range);
                }
                Err(error) => line.push(error.to_string()),
            }
            if turn % 5 > 1 && !held.is_empty() {
                arena.free(held.remove((turn as usize * 7) % held.len())).unwrap();
            }
        }
        said.line(format_args!("    {}", line.join(" ")));
        said.note("in use", (arena.in_use(), arena.reservations()));
        if let Some(range) = held.first() {
            let _ = said
                .call("free what is none", || arena.free(IovaRange::new(range.start(), 1 << 40).unwrap()));
        }
        held.into_iter().for_each(|range| arena.free(range).unwrap());
        let _ = said.call_as(
            "release",
            || arena.release(&space, &cpus).map_err(|error| format!("{error:?}")),
            |()| String::new(),
        );
    }
    usage(&mut said, &space);
    said.assert_is(FOLDER, "iova-space");
}

#[test]
fn a_bitmap() {
    let mut said = Transcript::new("a bitmap of pages", Vec::new);
    let mut bitmap = Bitmap::new();
    let state = |said: &mut Transcript, bitmap: &mut Bitmap| {
        let holes: Vec<_> =
            bitmap.iter().take(12).map(|(first, pages)| format!("{first:#x}+{pages:#x}")).collect();
        let mut survey = Survey::new(u64::MAX);
        while !bitmap.survey(&mut survey) {}
        let figures = (bitmap.free_pages(), bitmap.least_free(), survey.largest);
        said.line(format_args!("    {figures:x?} {}", holes.join(" ")));
    };
    for (first, pages) in [(1, 0x3fff), (0x1_0000, 0x20_0000), (0x100, 1), (0, 0), (1 << 50, 1 << 30)] {
        let _ = said.call(format_args!("add {first:#x}+{pages:#x}"), || bitmap.add(first, pages));
        state(&mut said, &mut bitmap);
    }
    for (first, pages) in [(0x10, 0x10), (0x18, 1), (0x2_0000, 0x1_0000), (0, 5), (1 << 60, 1)] {
        let _ = said.call(format_args!("reserve {first:#x}+{pages:#x}"), || bitmap.reserve(first, pages));
        state(&mut said, &mut bitmap);
    }
    for end in [u64::MAX, 0x1000, 0x1_0000, 0x3_0000, 0x21, 0] {
        for (pages, order) in
            [(1, 0), (2, 1), (3, 2), (64, 6), (65, 7), (100, 0), (512, 9), (5000, 13), (1 << 28, 28)]
        {
            let alloc = || bitmap.alloc(pages, order, end);
            let _ = said.call(format_args!("{pages:#x} pages at 2^{order} below {end:#x}"), alloc);
        }
        state(&mut said, &mut bitmap);
    }
    let (mut dice, mut live) = (Dice::new(9), Vec::new());
    for round in 0..3000 {
        if live.len() > 200 || dice.one_in(2) && !live.is_empty() {
            let (first, pages): (u64, u64) = live.swap_remove(dice.below(live.len() as u64) as usize);
            bitmap.free(first, pages).unwrap();
        } else {
            let most = if dice.one_in(5) { 700 } else { 9 };
            let pages = 1 + dice.below(most);
            let order = if dice.one_in(2) {
                pages.next_power_of_two().trailing_zeros()
            } else {
                dice.below(4) as u32
            };
            let end = if dice.one_in(3) { 0x3000 } else { u64::MAX };
            live.extend(bitmap.alloc(pages, order, end).ok().map(|first| (first, pages)));
        }
        if round % 200 == 199 {
            said.line(format_args!("after {round}: {} runs", live.len()));
            state(&mut said, &mut bitmap);
        }
    }
    for (first, pages) in [(0, 1), (0x12, 1), (1 << 55, 1), (u64::MAX, 2), live[0]] {
        let _ = said.call(format_args!("free {first:#x}+{pages:#x}"), || bitmap.free(first, pages));
    }
    live.drain(1..).for_each(|(first, pages)| bitmap.free(first, pages).unwrap());
    state(&mut said, &mut bitmap);
    said.assert_is(FOLDER, "iova-bitmap");
}
