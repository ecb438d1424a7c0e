//! An unmap that was told a mapping's address clears its entry after the mapping has ended, and another has come there: what
//! is left of the other's page of several entries is unmapped as any.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::channel;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{AmdV1, Arm, Format, MapError, PageTable};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenTable;
use portcullis_model::{ArmTables, Buffer, Granule, Memory, TableFormat};

use crate::queued::{direct, end};
use crate::reviewed::machine::{Machine, PAGE, Watched};
use crate::reviewed::steps;

const BOTH: Direction = Direction::Bidirectional;

/// Steps that no unmap here has.
const FOR_EVER: u64 = 10_000;

fn amd() -> (Watched<AmdV1>, TableFormat) {
    (Watched(AmdV1::new(4, 3, 48).unwrap()), TableFormat::AmdV1 { levels: 4 })
}

fn arm() -> (Watched<Arm<12>>, TableFormat) {
    let tables = TableFormat::Arm(ArmTables::stage2(Granule::Size4K, 48, 4));
    (Watched(Arm::stage_2(48, 48).unwrap()), tables)
}

/// A buffer that may be one page.
fn aligned(memory: &Arc<Memory>, len: u64) -> Buffer {
    let mut others = Vec::new();
    loop {
        let buffer = memory.buffer(len).unwrap();
        if buffer.phys().get().is_multiple_of(len) {
            return buffer;
        }
        // They stay where they are meanwhile.
        others.push((buffer, memory.buffer(PAGE)));
    }
}

/// Unmaps, which must come to its end.
fn ends<T>(unmap: impl FnOnce() -> T) -> T {
    steps::before(FOR_EVER, || panic!("it never ends"));
    let result = unmap();
    assert!(!steps::came());
    result
}

/// Calls `f` where both CPUs are taken. So its addresses are out of no CPU's list: they go back to where all come from, and
/// whoever takes them next waits for no CPU's turn.
fn without_a_cpu<T: Send, X: Format>(machine: &Machine<true, X>, f: impl FnOnce() -> T + Send) -> T {
    let take_cpu = || machine.device.domain().stats();
    take_cpu();
    let [(tell, told), (end, ended)] = [(); 2].map(|()| channel::<()>());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            take_cpu();
            tell.send(()).unwrap();
            let _ = ended.recv();
        });
        told.recv().unwrap();
        let result = scope.spawn(f).join().unwrap();
        drop(end);
        result
    })
}

/// At each step of the unmap of a granule another CPU ends its mapping by number, which is a safe call, and a page of `run`
/// bytes comes there: its owner unmaps it then, a part before where `is_split`.
fn a_page_comes<X: Format>(made: impl Fn() -> (Watched<X>, TableFormat), run: u64, is_split: bool) {
    // A small space, so that the same addresses come back.
    let start = Iova::new(1 << 30);
    let around = |aperture: IovaRange| {
        let below = IovaRange::from_bounds(aperture.start(), Iova::new(start.get() - 1));
        let above = IovaRange::from_bounds(Iova::new(start.get() + run), aperture.last());
        vec![below.unwrap(), above.unwrap()]
    };
    let ragged = Cell::new(0);
    steps::each(|number| {
        let machine = Machine::<true, Watched<X>>::without(made(), around);
        let mut queue = direct(&machine.device);
        let mut granules = without_a_cpu(&machine, || {
            let mut map = |buffer| queue.map(buffer, BOTH).unwrap();
            (0..run / PAGE).map(|_| map(machine.memory.buffer(PAGE).unwrap())).collect::<Vec<_>>()
        });
        granules.sort_by_key(|mapping| mapping.iova());
        let first = granules.remove(0);
        assert_eq!(first.iova(), start);
        granules.into_iter().for_each(|mapping| drop(end(&mut queue, mapping)));
        let (other, comes) = (Arc::clone(&machine), Rc::new(RefCell::new(None)));
        let runs = Rc::clone(&comes);
        steps::before(number, move || {
            let thread = std::thread::spawn(move || {
                other.device.unmap_single(start, PAGE).ok()?;
                let buffer = aligned(&other.memory, run);
                let mut queue = direct(&other.device);
                let page = queue.map(buffer, BOTH).ok()?;
                Some((queue, page))
            });
            steps::let_run(&thread);
            *runs.borrow_mut() = Some(thread);
        });
        let _ = queue.unmap(first).map(std::mem::forget);
        let came = steps::came();
        let Some((mut pages, page)) = comes.take().and_then(|thread| thread.join().unwrap()) else {
            return came;
        };
        assert_eq!(page.iova(), start);
        let (table, elsewhere) = (machine.device.domain().mapper().table(), StdPlatform::with_cpus(1));
        let is_there = |offset| {
            let iova = Iova::new(start.get() + offset);
            table.iova_to_phys(&elsewhere, iova).is_some()
        };
        let last = run - PAGE;
        let is_ragged = !is_there(0) && is_there(last);
        ragged.set(ragged.get() + u64::from(is_ragged));
        if is_split {
            let part = ends(|| machine.device.unmap_single(Iova::new(start.get() + last), PAGE));
            assert!(part.is_ok() || !is_ragged, "step {number}: {part:?}");
            let reached = machine.reached(Iova::new(start.get() + last), PAGE);
            assert!(part.is_err() || reached == 0, "step {number}");
            assert!(!is_ragged || !is_there(0), "what is gone is back: step {number}");
            // All between is there still.
            let between = (PAGE..last).step_by(PAGE as usize);
            assert!(!is_ragged || between.clone().all(is_there), "step {number}");
            let stays = between.map(|offset| machine.reached(Iova::new(start.get() + offset), PAGE));
            assert!(!is_ragged || stays.sum::<usize>() as u64 == run / PAGE - 2, "step {number}");
        }
        let back = ends(|| pages.unmap(page).map(std::mem::forget));
        assert!(back.is_err() || machine.reached(start, run) == 0, "given back, and reached: step {number}");
        assert!(!(0..run).step_by(PAGE as usize).any(is_there), "step {number}");
        came
    });
    assert!(ragged.get() > 0, "no step was between the load and the store");
}

#[test]
fn what_is_left_of_a_page_of_several_entries_is_unmapped_as_any() {
    for is_split in [false, true] {
        a_page_comes(amd, 2 * PAGE, is_split);
        a_page_comes(amd, 4 * PAGE, is_split);
        a_page_comes(arm, 16 * PAGE, is_split);
    }
}

/// The entry that is cleared is that of a page which a map has just entered that fails in the end.
fn a_map_fails<X: Format>((format, _): (Watched<X>, TableFormat), run: u64, lost: u64) {
    let platform = StdPlatform::with_cpus(2);
    let table = PageTable::for_cpus(Memory::new(16 << 20), format, platform.cpus()).unwrap();
    let range = |first: u64, len| IovaRange::new(Iova::new((1 << 30) + first), len).unwrap();
    let forget = &mut |_| true;
    let rights = Permissions::READ_WRITE;
    table.open(&platform, range(lost, PAGE), PhysAddr::new(0x5000), rights).unwrap();
    let [(tell, told), (go, gone)] = [(); 2].map(|()| channel::<()>());
    std::thread::scope(|scope| {
        let (table, platform) = (&table, &platform);
        let late = scope.spawn(move || {
            // So that it has a CPU at hand, and goes the short way.
            platform.with_cpu(|_| ());
            steps::before(1, move || {
                tell.send(()).unwrap();
                gone.recv().unwrap();
            });
            table.close(platform, range(lost, PAGE), &mut |_| true)
        });
        told.recv().unwrap();
        assert_eq!(table.close(platform, range(lost, PAGE), forget).bytes, PAGE);
        let mut late = Some(late);
        let mut pieces = 0;
        // A whole page, then the entry is cleared, then what cannot be mapped.
        let list = std::iter::from_fn(|| {
            pieces += 1;
            if pieces == 1 {
                return Some((PhysAddr::new(1 << 24), run));
            }
            go.send(()).unwrap();
            assert_eq!(late.take()?.join().unwrap().bytes, PAGE);
            Some((PhysAddr::new(1), PAGE))
        });
        let failed = table.open_list(platform, range(0, 2 * run), list, rights).unwrap_err();
        assert!(matches!(failed.0, MapError::Misaligned { .. }), "{failed:?}");
        assert_eq!(failed.1, Some(range(0, run)));
    });
    let left = (0..run).step_by(PAGE as usize).filter(|at| {
        let iova = range(*at, PAGE).start();
        table.iova_to_phys(&platform, iova).is_some()
    });
    assert_eq!(left.count(), 0, "the map failed, and has left something");
}

#[test]
fn a_map_that_fails_leaves_nothing_of_a_page_that_has_lost_an_entry() {
    for lost in [0, PAGE] {
        a_map_fails(amd(), 2 * PAGE, lost);
        a_map_fails(arm(), 16 * PAGE, lost);
    }
}
