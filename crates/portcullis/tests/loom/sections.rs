//! What a turn has found stays until the turn is over.

use ::loom::cell::UnsafeCell;
use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::percpu::Marks;
use portcullis::platform::LocalCpu;
use portcullis::sync::{AtomicU64, Ordering};

use super::frames::Cpu;

/// Something that is found through a pointer, and whose use and end at the same time loom reports.
struct Thing {
    linked: AtomicU64,
    value: UnsafeCell<u32>,
    marks: Marks,
}

// SAFETY: that the value is not read while it is written is what the test checks; loom's cell panics if it is.
unsafe impl Sync for Thing {}
// SAFETY: as above.
unsafe impl Send for Thing {}

fn cpu(index: usize) -> LocalCpu<'static> {
    // SAFETY: each reader is given a number of its own.
    unsafe { LocalCpu::new(index) }
}

impl Thing {
    fn new() -> Arc<Self> {
        let linked = AtomicU64::new(1);
        Arc::new(Self { linked, value: UnsafeCell::new(7), marks: Marks::new(2).unwrap() })
    }

    fn look(&self, cpu: Option<&LocalCpu<'_>>, inner: bool) {
        // SAFETY: CPUs are of one platform.
        let section = || unsafe { self.marks.section(cpu) };
        let _section = section();
        if inner {
            drop(section());
        }
        if self.linked.load(Ordering::Acquire) == 1 {
            // SAFETY: the pointer is used inside the closure only, and loom watches for others.
            assert_eq!(self.value.with(|value| unsafe { *value }), 7);
        }
    }

    fn end(&self) {
        self.linked.store(0, Ordering::Release);
        self.marks.synchronize(&Cpu(Some(0)));
        // SAFETY: as in `look`.
        self.value.with_mut(|value| unsafe { *value = 0 });
    }
}

fn race(readers: &'static [Option<usize>], turns: usize, inner: bool) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        let thing = Thing::new();
        let spawn = |reader: &Option<usize>| {
            let (thing, reader) = (Arc::clone(&thing), *reader);
            thread::spawn(move || {
                (0..turns).for_each(|_| thing.look(reader.map(cpu).as_ref(), inner));
            })
        };
        let readers: Vec<_> = readers.iter().map(spawn).collect();
        thing.end();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

#[test]
fn a_turn_with_a_cpu_is_waited_for() {
    race(&[Some(1)], 2, false);
}

#[test]
fn a_turn_without_one_is_waited_for() {
    race(&[None], 2, false);
}

#[test]
fn so_are_several() {
    race(&[Some(1), None], 1, false);
}

#[test]
fn a_turn_inside_another_does_not_end_it() {
    race(&[Some(1)], 1, true);
}
