//! A pool that copies where nothing is translated.

use std::sync::Arc;

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::bounce::swiotlb::{Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::platform::Frames;
use portcullis_model::Memory;

use super::world::{PAGE, TURNS};
use crate::rig::Clocked;
use crate::transcript::{Copies, Cpus, FOLDER, transcript};

const SMALL: SwiotlbConfig = SwiotlbConfig {
    slot_bytes: 512,
    area_bytes: 64 << 10,
    min_bytes: 64 << 10,
    max_bytes: 256 << 10,
    reach: PhysAddr::new(u64::MAX),
    idle_ns: 1_000_000,
};

#[test]
fn a_pool_by_itself() {
    let (clock, memory) = (Clocked::new(2), Memory::new(4 << 20));
    let mut said = transcript("a swiotlb of 64 KiB to 256 KiB", &memory, &clock);
    let own = memory.alloc(128).unwrap();
    for config in [
        SwiotlbConfig { slot_bytes: 48, ..SMALL },
        SwiotlbConfig { slot_bytes: 32, ..SMALL },
        SwiotlbConfig { area_bytes: 48 << 10, ..SMALL },
        SwiotlbConfig { area_bytes: 16 << 10, ..SMALL },
        SwiotlbConfig { min_bytes: 512 << 10, ..SMALL },
        SwiotlbConfig { reach: PhysAddr::new(0xffff), ..SMALL },
    ] {
        let made = || Swiotlb::new(Cpus(Arc::clone(&clock)), Copies(Arc::clone(&memory)), &config);
        let _ = said.call_as("make another", made, |_| "made".into());
    }
    let make = || Swiotlb::new(Cpus(Arc::clone(&clock)), Copies(Arc::clone(&memory)), &SMALL);
    let pool = said.call_as("make", make, |_| "made".into()).unwrap();
    let usage = |said: &mut crate::transcript::Transcript| {
        let mut usage = pool.usage();
        // How large values are is the compiler's affair.
        usage.overhead = 0;
        said.note("usage", usage);
    };
    let piece = |offset, len| PhysSegment { phys: PhysAddr::new(own.get() + offset), len };
    let none = Constraints::new();
    let mut turn = 0;
    let mut map =
        |said: &mut crate::transcript::Transcript, piece: PhysSegment, constraints: &Constraints| {
            turn += 1;
            let direction = TURNS[turn % 3];
            // SAFETY: the memory is the test's, all of it simulated.
            let map = || unsafe { pool.map(piece, direction, constraints) };
            let show = |Bounced { phys, len }: &Bounced| format!("{phys:#x}+{len:#x}");
            said.call_as(format_args!("map {:#x}+{:#x} {direction:?}", piece.phys, piece.len), map, show).ok()
        };
    let unmap = |said: &mut crate::transcript::Transcript, Bounced { phys, len }: Bounced| {
        // SAFETY: the memory is the test's, all of it simulated.
        let _ = said.call(format_args!("unmap {phys:#x}+{len:#x}"), || unsafe { pool.unmap(phys, len) });
    };
    said.part("one after the other");
    for (offset, len) in
        [(0, 1), (0x10, 512), (0, 513), (0x7f0, 2048), (0, 5000), (0, 32 << 10), (1, 64 << 10)]
    {
        let bounced = map(&mut said, piece(offset, len), &none).unwrap();
        for (at, len) in [
            (bounced.phys, len),
            (PhysAddr::new(bounced.phys.get() + len / 2), len - len / 2),
            (bounced.phys, len + 1),
        ] {
            // SAFETY: the memory is the test's, all of it simulated.
            let _ = said.call(format_args!("sync for cpu {at:#x}+{len:#x}"), || unsafe {
                pool.sync_for_cpu(at, len)
            });
            // SAFETY: the memory is the test's, all of it simulated.
            let _ = said.call("sync for device", || unsafe { pool.sync_for_device(at, len) });
        }
        let _ = said.call("original", || pool.original(PhysAddr::new(bounced.phys.get() + len - 1)));
        unmap(&mut said, Bounced { len: len + 1, ..bounced });
        unmap(&mut said, Bounced { phys: PhysAddr::new(bounced.phys.get() + 1), ..bounced });
        unmap(&mut said, bounced);
        unmap(&mut said, bounced);
    }
    usage(&mut said);
    said.part("constraints");
    for (reach, align) in [
        (u64::MAX, 0x1ff),
        (u64::MAX, 0xfff),
        (u64::MAX, 0xff0),
        (own.get() + (512 << 10) + 0xffff, 0),
        (0xffff, 0),
    ] {
        said.note("reach and bits that stay", format!("{reach:#x} {align:#x}"));
        let constraints = Constraints::new().with_reach(PhysAddr::new(reach)).with_min_align_mask(align);
        let Ok(constraints) = said.call("constraints", || constraints) else { continue };
        for (offset, len) in [(0x123, 100), (0xe10, 700)] {
            if let Some(bounced) = map(&mut said, piece(offset, len), &constraints) {
                unmap(&mut said, bounced);
            }
        }
    }
    said.part("full");
    let mut live = Vec::new();
    for len in [60 << 10, 64 << 10, 20 << 10, 40 << 10, 30 << 10, 33 << 10, 64 << 10, 512, 64 << 10] {
        live.extend(map(&mut said, piece(0, len), &none));
        usage(&mut said);
    }
    map(&mut said, piece(0, 65 << 10), &none);
    map(&mut said, piece(0, 0), &none);
    map(&mut said, PhysSegment { len: u64::MAX, ..piece(0, 1) }, &none);
    said.part("timers and trims");
    clock.go_to(500_000);
    said.note("timers", ());
    if let Some(bounced) = map(&mut said, piece(0, 64 << 10), &none) {
        unmap(&mut said, bounced);
    }
    for bounced in live.drain(1..) {
        unmap(&mut said, bounced);
    }
    for time in [2_000_000, 5_000_000, 50_000_000] {
        clock.go_to(time);
        said.note("at", time);
        usage(&mut said);
    }
    let _ = said.call("trim", || Ok::<_, String>(pool.trim()));
    said.part("from CPUs, and none");
    for cpu in [1, 2, 0] {
        clock.be(cpu);
        let bounced = [0; 9].map(|_| map(&mut said, piece(0, 700), &none));
        bounced.into_iter().flatten().for_each(|bounced| unmap(&mut said, bounced));
        usage(&mut said);
    }
    said.part("no memory");
    memory.fail_after(1);
    let bounced = [0; 2].map(|_| map(&mut said, piece(0, 64 << 10), &none));
    memory.fail_after(0);
    bounced.into_iter().flatten().for_each(|bounced| unmap(&mut said, bounced));
    said.note("holds", (pool.holds(own), live.iter().map(|live| pool.holds(live.phys)).collect::<Vec<_>>()));
    drop(pool);
    said.note("dropped, frames", memory.frames_in_use() - 128);
    said.note("pages", PAGE);
    said.assert_is(FOLDER, "swiotlb");
}
