//! Replays by one policy, with small limits of memory and time.

use portcullis::domain::Policy;

use super::*;
use crate::replay::{PolicyReport, format};
use crate::{ReadOptions, Trace};

const STRICT: Mode = Mode::Each(Policy::Strict);

/// Events on one CPU at these microseconds.
type Events = Vec<(u64, String)>;

fn event(us: u64, name: &str, iova: u64, pages: u64, rest: &str) -> (u64, String) {
    let size = pages << 12;
    (us, format!("dma_{name}: d dir=BIDIRECTIONAL dma_addr={iova:x} size={size} {rest}"))
}

fn map(us: u64, at: u64, pages: u64) -> (u64, String) {
    event(us, "map_page", at, pages, &format!("phys_addr={at:x} attrs="))
}

fn unmap(us: u64, at: u64, pages: u64) -> (u64, String) {
    event(us, "unmap_page", at, pages, "attrs=")
}

/// An engine that has replayed `events`, and the result.
fn run(
    mode: Mode,
    page_tables: &str,
    events: &Events,
    change: impl FnOnce(&mut Share),
    paint: bool,
) -> (Engine, Result<(), ReplayError>) {
    run_after(mode, page_tables, events, change, |engine| {
        if paint {
            engine.paint(Paint { every_ops: u64::MAX });
        }
    })
}

/// The same, with something done to the engine `before`.
fn run_after(
    mode: Mode,
    page_tables: &str,
    events: &Events,
    change: impl FnOnce(&mut Share),
    before: impl FnOnce(&mut Engine),
) -> (Engine, Result<(), ReplayError>) {
    let lines = events
        .iter()
        .map(|(us, event)| format!("t-1 [000] ..... {}.{:06}: {event}\n", us / 1_000_000, us % 1_000_000));
    let text: String = lines.collect();
    let mut trace = Trace::from_bytes("t", text.as_bytes(), ReadOptions::default()).unwrap();
    let mut chunk = Chunk::default();
    trace.next_chunk(&mut chunk, usize::MAX).unwrap();
    let format: Arc<dyn AnyFormat> = format::named(page_tables).unwrap().unwrap();
    let (profile, timer) = (Profile::load("none").unwrap(), Timer::calibrated());
    let mut share = Share::of(&[mode], trace.summary());
    change(&mut share);
    let mut engine = Engine::new(mode, &format, &profile, &timer, 1, &share);
    before(&mut engine);
    let result = engine.run(&chunk);
    (engine, result)
}

fn finished((engine, result): (Engine, Result<(), ReplayError>)) -> PolicyReport {
    result.unwrap();
    let report = engine.finish(0.0, 0);
    assert_eq!((report.faults, report.failures), (0, 0), "{:?}", report.first_failure);
    report
}

/// Adjacent parts share nothing, in any order.
#[test]
fn parts_overlap_where_they_share_a_byte() {
    let overlap = |list: &[(u64, u64)]| {
        let part = |&(phys, len)| PhysSegment { phys: PhysAddr::new(phys), len };
        super::map::overlap(&list.iter().map(part).collect::<Vec<_>>())
    };
    for (list, expected) in [
        (&[][..], false),
        (&[(0x1000, 8)], false),
        (&[(0x1000, 8), (0x1008, 8), (0x2000, 8)], false),
        (&[(0x2000, 8), (0x1008, 8), (0x1000, 8)], false),
        (&[(0x1000, 9), (0x1008, 8), (0x2000, 8)], true),
        (&[(0x1000, 8), (0x1008, 9), (0x1010, 8)], true),
        (&[(0x3000, 8), (0x1000, 8), (0x2000, 8), (0x1007, 1)], true),
        (&[(0x3000, 8), (0x1000, 8), (0x2000, 8), (0x1008, 1)], false),
        (&[(0x1000, 8), (0x1000, 8)], true),
    ] {
        assert_eq!(overlap(list), expected, "{list:x?}");
    }
}

#[test]
fn an_allocation_takes_the_whole_pages_it_touches() {
    for (phys, len, expected) in [
        (0x1000, 0x1000, (0x1000, 0x1000)),
        (0x1000, 0x1001, (0x1000, 0x2000)),
        (0x1fff, 1, (0x1000, 0x1000)),
        (0x1ff0, 0x11, (0x1000, 0x2000)),
        (0x1800, 0x2800, (0x1000, 0x3000)),
    ] {
        let mut part = PhysSegment { phys: PhysAddr::new(phys), len };
        to_whole_pages(&mut part, PageSize::SIZE_4K);
        assert_eq!((part.phys.get(), part.len), expected, "{phys:#x} {len:#x}");
    }
}

/// Each ring has a colour of its own: otherwise their descriptors would evict each other from the same few cache sets.
#[test]
fn each_ring_of_each_device_has_the_next_colour() {
    let mut events: Events = Vec::new();
    for (at, (device, dir)) in [
        ("d", "BIDIRECTIONAL"),
        ("d", "TO_DEVICE"),
        ("e", "TO_DEVICE"),
        ("d", "TO_DEVICE"),
        ("e", "FROM_DEVICE"),
        ("d", "FROM_DEVICE"),
    ]
    .into_iter()
    .enumerate()
    {
        let at = at as u64;
        let (us, event) = map(at, (at + 1) << 12, 1);
        events.push((us, event.replace(": d ", &format!(": {device} ")).replace("BIDIRECTIONAL", dir)));
    }
    for (mode, colours) in [(Mode::StrictRing, 5), (Mode::StrictBatch, 0)] {
        let (engine, result) = run(mode, "vtd-ss", &events, |_| (), false);
        result.unwrap();
        assert_eq!((engine.colours, engine.ports.len()), (colours, 2), "{}", mode.name());
    }
}

/// One call in 16, of maps and of unmaps, is preceded by an empty measurement.
#[test]
fn nothing_is_measured_as_often_before_unmaps_as_before_maps() {
    let maps = (0..40).map(|n| map(n, 0x100_0000 + (n << 12), 1));
    let unmaps = (0..40).map(|n| unmap(100 + n, 0x100_0000 + (n << 12), 1));
    let (engine, result) = run(STRICT, "vtd-ss", &maps.chain(unmaps).collect(), |_| (), false);
    result.unwrap();
    assert_eq!((engine.operations, engine.ended, engine.empty.count()), (40, 40, 5));
}

/// A MiB, with a quarter for bounce buffers; a directory takes 13 pages.
#[test]
fn bytes_of_mappings_that_live_or_wait_for_their_commit_are_not_forgotten() {
    let events: Events = vec![
        map(0, 0x100_0000, 120),
        unmap(1, 0x100_0000, 120),
        // That is committed by now.
        map(20_000, 0x200_0000, 10),
        map(20_001, 0x300_0000, 10),
        unmap(20_002, 0x200_0000, 10),
        // For these only the bytes of the first must be freed.
        map(20_003, 0x400_0000, 100),
        unmap(20_004, 0x300_0000, 10),
        unmap(20_005, 0x400_0000, 100),
    ];
    for mode in [Mode::StrictBatch, Mode::StrictRing] {
        let (engine, result) = run(mode, "vtd-ss", &events, |share| share.bytes = 1 << 20, true);
        let bytes = engine.bytes.clone().unwrap();
        let report = finished((engine, result));
        assert_eq!((report.operations, report.violations), (4, 0), "{}", mode.name());
        let mut of_first = [0; 1];
        bytes.read(PhysAddr::new(0x100_0000), &mut of_first);
        assert_eq!(bytes.strays(), 1, "the first are forgotten");
    }
    // If nothing may be freed, there are too many.
    let live: Events = vec![map(0, 0x100_0000, 120), map(1, 0x400_0000, 100)];
    let (_, result) = run(Mode::StrictBatch, "vtd-ss", &live, |share| share.bytes = 1 << 20, true);
    assert_eq!(
        result.unwrap_err().to_string(),
        "t: line 2: strict-batch keeps the bytes of what is mapped, and their copies: it needs 410 kB more, and may have 1.0 MB in all \
         (its part of half of --memory, 4.3 GB at the most): make it less by --device, --limit or --policy"
    );
}

/// 16 MiB: three quarters fill with bytes of mapped and unmapped memory, and then bounce buffers need 5 MiB.
#[test]
fn bounce_buffers_have_the_room_of_bytes_that_nobody_needs() {
    let at = |n: u64| 0x100_0000 + (n << 17);
    let mut events: Events =
        (0..90).flat_map(|n| [map(2 * n, at(n), 32), unmap(2 * n + 1, at(n), 32)]).collect();
    events.extend((0..40).map(|n| map(1000 + n, at(n), 32)));
    events.extend((0..40).map(|n| unmap(2000 + n, at(n), 32)));
    let (engine, result) = run(Mode::Bounce, "vtd-ss", &events, |share| share.bytes = 16 << 20, false);
    let bytes = engine.bytes.clone().unwrap();
    let report = finished((engine, result));
    assert_eq!((report.operations, report.violations), (130, 0));
    let mut of_last = [0; 1];
    bytes.read(PhysAddr::new(at(89)), &mut of_last);
    assert_eq!(bytes.strays(), 1, "its bytes are forgotten");
}

/// A device-written slot first gets the driver's bytes, if requested, under policies that copy for unmodified drivers.
#[test]
fn what_a_device_is_to_write_is_copied_in() {
    for (mode, dir, copies_in, copied) in [
        (Mode::Bounce, "FROM_DEVICE", false, false),
        (Mode::Bounce, "FROM_DEVICE", true, true),
        (Mode::Bounce, "TO_DEVICE", false, true),
        (Mode::Adaptive, "FROM_DEVICE", true, false),
    ] {
        let events =
            vec![(0, format!("dma_map_page: d dir={dir} dma_addr=1000 size=300 phys_addr=5100 attrs="))];
        let (engine, result) = run_after(
            mode,
            "vtd-ss",
            &events,
            |_| (),
            |engine| {
                // Painted memory has bytes in any direction.
                engine.paint(Paint { every_ops: u64::MAX });
                engine.copies_in(copies_in);
            },
        );
        result.unwrap();
        let (live, bytes) = (engine.live[0].as_ref().unwrap(), engine.bytes.as_ref().unwrap());
        let piece = live.pieces().next().unwrap();
        let allowed = live.direction.permissions();
        let slot = engine.iommu.probe(model_device(live.device), piece.iova, allowed).unwrap();
        let of = |at| {
            let mut read = [0; 300];
            bytes.read(at, &mut read);
            read
        };
        assert_ne!(slot, piece.phys);
        assert_eq!(of(slot) == of(piece.phys), copied, "{mode:?} {dir} {copies_in}");
        assert_ne!(of(piece.phys), [0; 300]);
    }
}

/// Each page as often as it was mapped, synced or unmapped.
#[test]
fn pages_are_followed_when_they_are_mapped_synced_and_unmapped() {
    let sync = event(1, "sync_single_for_device", 0x100_0000, 3000, "");
    for second in [sync, unmap(1, 0x100_0000, 3000), map(1, 0x800_0000, 3000)] {
        let events = vec![map(0, 0x100_0000, 3000), second.clone()];
        let (engine, result) = run(STRICT, "vtd-ss", &events, |share| share.most = 3000 - 1024, false);
        let Err(ReplayError::TooManyPages { line: 2, pages: 6000, most: 4024, .. }) = result else {
            panic!("{}: {result:?}", second.1)
        };
        // A mapping beyond the limit is not made.
        assert!(!second.1.starts_with("dma_map") || (engine.operations, engine.alive) == (1, 1));
        let (_, result) = run(STRICT, "vtd-ss", &events, |share| share.most = 6000 - 2048, false);
        assert!(result.is_ok());
    }
}

/// Idle time costs something, too: eight timer checks as much as a page.
#[test]
fn looks_at_what_is_idle_are_followed() {
    let events: Events = (0..20)
        .flat_map(|n| [map(n * 100_000, 0x100_0000, 1), unmap(n * 100_000 + 1, 0x100_0000, 1)])
        .collect();
    let pages = |mode| run(mode, "vtd-ss", &events, |_| (), false).0.share.pages;
    // A window ends after each unmap except the last.
    assert_eq!((pages(STRICT), pages(Mode::Each(Policy::LAZY))), (40, 42));
}

/// A failed map is not live, and an allocator's rounding is undone with its free.
#[test]
fn the_account_of_live_pages_has_what_is_alive() {
    let live = |mode, format: &str, events: &Events| {
        let (engine, result) = run(mode, format, events, |_| (), false);
        result.unwrap();
        (engine.share.live, engine.alive)
    };
    // In memory of the bounce buffers.
    let refused = vec![map(0, 0xff00_0000_0000, 8), map(1, 0x5000, 3)];
    assert_eq!(live(Mode::Bounce, "vtd-ss", &refused), (3, 1));
    let alloc = event(1, "alloc", 0x20_0000, 1, "virt_addr=c0de flags=X attrs=");
    let free = event(2, "free", 0x20_0000, 1, "virt_addr=c0de attrs=");
    let events = vec![map(0, 0x100_0000, 100), alloc.clone(), free];
    for (format, pages) in [("arm-s1-64k", 16), ("vtd-ss", 1)] {
        assert_eq!(live(STRICT, format, &events), (100, 1), "{format}");
        assert_eq!(live(STRICT, format, &events[..2].to_vec()), (100 + pages, 2), "{format}");
    }
}
