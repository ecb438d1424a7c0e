//! Pages larger than a granule that one CPU unmaps while another breaks them up for a part.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::dma::Ended;
use portcullis::pgtable::{Arm, Format, PageTable};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenTable;
use portcullis_model::{ArmTables, Granule, Memory, TableFormat};

use crate::queued::direct;
use crate::reviewed::machine::{Machine, PAGE, vtd};
use crate::reviewed::steps;

const LARGE: u64 = 2 << 20;
const BOTH: Direction = Direction::Bidirectional;

fn arm() -> (Arm<12>, TableFormat) {
    let tables = TableFormat::Arm(ArmTables::stage2(Granule::Size4K, 48, 4));
    (Arm::stage_2(48, 48).unwrap(), tables)
}

/// At each step of the typed unmap another CPU unmaps a part by number, which is a safe call.
fn beside_a_part<X: Format>(made: impl Fn() -> (X, TableFormat), len: u64) {
    let steps = steps::each(|number| {
        let machine = Machine::<true, X>::with(made());
        let mut queue = direct(&machine.device);
        let mapping = queue.map(machine.memory.buffer(len).unwrap(), BOTH).unwrap();
        let iova = mapping.iova();
        assert_eq!(machine.reached(iova, len) as u64, len / PAGE);
        let (device, other) = (machine.device.clone(), Rc::new(RefCell::new(None)));
        let runs = Rc::clone(&other);
        steps::before(number, move || {
            let part = Iova::new(iova.get() + 5 * PAGE);
            let thread = std::thread::spawn(move || device.unmap_single(part, PAGE));
            steps::let_run(&thread);
            *runs.borrow_mut() = Some(thread);
        });
        let back = queue.unmap(mapping).map(std::mem::forget);
        let came = steps::came();
        let is_fine = || back.is_err() || machine.reached(iova, len) == 0;
        assert!(is_fine(), "given back, and reached: {len:#x} bytes, step {number}");
        if let Some(thread) = other.take() {
            let _ = thread.join().unwrap();
        }
        assert!(is_fine(), "reached again: {len:#x} bytes, step {number}");
        came
    });
    assert!(steps > 2, "{steps}");
}

#[test]
fn a_typed_unmap_beside_a_part_by_number_gives_back_nothing_that_is_reached() {
    beside_a_part(vtd, LARGE);
    beside_a_part(vtd, 2 * LARGE);
    beside_a_part(arm, 16 * PAGE);
    beside_a_part(arm, 64 * PAGE);
    beside_a_part(arm, LARGE);
}

/// At each step of the split the page is unmapped by its owner, and comes back at the same place, to be read only.
fn split_beside_less<X: Format>(made: impl Fn() -> (X, TableFormat), len: u64) {
    let again_there = RefCell::new(0);
    let steps = steps::each(|number| {
        let machine = Machine::<true, X>::with(made());
        let (tell, told) = channel();
        let (go, gone) = channel::<()>();
        let (device, buffer) = (machine.device.clone(), machine.memory.buffer(len).unwrap());
        // The owner has a CPU of its own, so that it gets the same addresses again.
        let owner = std::thread::spawn(move || {
            let mut queue = direct(&device);
            let mapping = queue.map(buffer, BOTH).unwrap();
            tell.send(mapping.iova()).unwrap();
            gone.recv().ok()?;
            let Ok(Ended::Done(buffer)) = queue.unmap(mapping) else { return None };
            queue.map(buffer, Direction::ToDevice).ok()
        });
        let iova = told.recv().unwrap();
        let owner = Rc::new(owner);
        let runs = Rc::clone(&owner);
        steps::before(number, move || {
            go.send(()).unwrap();
            steps::let_run(&runs);
        });
        let _ = machine.device.unmap_single(Iova::new(iova.get() + 5 * PAGE), PAGE);
        let came = steps::came();
        if let Some(again) = Rc::into_inner(owner).unwrap().join().unwrap() {
            *again_there.borrow_mut() += u64::from(again.iova() == iova);
            assert_eq!(
                machine.reached(again.iova(), len),
                0,
                "written, and is to be read only: step {number}"
            );
        }
        came
    });
    assert!(steps > 2, "{steps}");
    assert!(*again_there.borrow() > 0, "never at the same place");
}

#[test]
fn a_split_gives_no_rights_to_a_page_that_comes_again_with_less() {
    split_beside_less(vtd, LARGE);
    split_beside_less(arm, 16 * PAGE);
    split_beside_less(arm, LARGE);
}

/// How far the CPU is that unmaps a part.
const INVALIDATES: u64 = 1;
const FINISHES: u64 = 2;
const DONE: u64 = 3;

/// Spins until it is so, at most so often.
fn spin(limit: u64, is_so: impl Fn() -> bool) {
    let mut turns = 0;
    while !is_so() && turns < limit {
        turns += 1;
        std::hint::spin_loop();
        if turns % 1024 == 0 {
            std::thread::yield_now();
        }
    }
}

const FOR_EVER: u64 = u64::MAX;

/// Lets the other thread come to its end where this one fails.
struct Last<'a>(&'a AtomicU64);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        self.0.store(FOR_EVER, SeqCst);
    }
}

/// One CPU breaks a page of 16 entries for a part, while its owner unmaps it as a whole. Where both did, another page is
/// mapped there, and a part of that unmapped, too: as the first CPU goes on, it finds the marks of a page that is broken, which
/// is not its own.
#[test]
fn pages_of_several_entries_that_two_cpus_break_do_not_come_back() {
    const RUN: u64 = 16 * PAGE;
    const ROUNDS: u64 = 30_000;
    let pages =
        |first: u64, count: u64| IovaRange::new(Iova::new((1 << 30) + first * PAGE), count * PAGE).unwrap();
    let platform = StdPlatform::with_cpus(2);
    let format = Arm::<12>::stage_1(39, 48).unwrap();
    let table = PageTable::for_cpus(Memory::new(16 << 20), format, platform.cpus()).unwrap();
    // The round; four times that and how far the other CPU is; and the round in which it is not let go on, or is.
    let [round, other, hold, go] = [const { AtomicU64::new(0) }; 4];
    let (round, other, hold, go) = (&round, &other, &hold, &go);
    let (table, platform) = (&table, &platform);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for now in 1..=ROUNDS {
                spin(FOR_EVER, || round.load(SeqCst) >= now);
                let invalidate = &mut |_| {
                    other.store(now * 4 + INVALIDATES, SeqCst);
                    // Hardware takes its time: a while, or as long as it is held.
                    spin(500, || go.load(SeqCst) == now);
                    spin(1 << 20, || hold.load(SeqCst) != now || go.load(SeqCst) == now);
                    other.store(now * 4 + FINISHES, SeqCst);
                    true
                };
                let _ = table.close(platform, pages(5, 1), invalidate);
                other.store(now * 4 + DONE, SeqCst);
            }
        });
        let _last = Last(round);
        let mut seed = 1_u64;
        for now in 1..=ROUNDS {
            let first = PhysAddr::new(0x1_0000_0000 + now % 4096 * 2 * RUN);
            let second = first.checked_add(RUN).unwrap();
            table.open(platform, pages(0, 16), first, Permissions::READ_WRITE).unwrap();
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            round.store(now, SeqCst);
            spin((seed >> 33) % 32, || false);
            let whole = table.close(platform, pages(0, 16), &mut |_| true);
            if whole.bytes == RUN && other.load(SeqCst) < now * 4 + FINISHES {
                spin(1000, || other.load(SeqCst) >= now * 4 + INVALIDATES);
                hold.store(now, SeqCst);
                if other.load(SeqCst) == now * 4 + INVALIDATES {
                    let mapped = table.open(platform, pages(0, 16), second, Permissions::READ_WRITE);
                    let invalidate = &mut |_| {
                        go.store(now, SeqCst);
                        spin(1 << 20, || other.load(SeqCst) == now * 4 + DONE);
                        true
                    };
                    let _ = table.close(platform, pages(7, 1), invalidate);
                    let leads_to = table.iova_to_phys(platform, pages(0, 1).start());
                    go.store(now, SeqCst);
                    assert_ne!(
                        leads_to,
                        Some(first),
                        "round {now}: unmapped, and back: {whole:?}, {mapped:?}"
                    );
                }
            }
            go.store(now, SeqCst);
            spin(FOR_EVER, || other.load(SeqCst) == now * 4 + DONE);
            let _ = table.close(platform, pages(0, 16), &mut |_| true);
        }
    });
}
