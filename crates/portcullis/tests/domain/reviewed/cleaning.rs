//! Walkers that do not see what CPUs store before it is cleaned: what is cleared, and not cleaned yet, is still reached.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr, PhysSegment};
use portcullis::dma::{QueueConfig, StrictRing, StrictRingConfig};
use portcullis_model::open::OpenRing;

use crate::queued::{direct, queue};
use crate::reviewed::machine::{Machine, PAGE};
use crate::reviewed::steps;

const BOTH: Direction = Direction::Bidirectional;

#[test]
fn a_batch_confirms_nothing_that_could_not_be_cleaned() {
    let cleanings = steps::each(|number| {
        let machine = Machine::<false>::new();
        let mut queue = queue(&machine.device, QueueConfig::batched(4));
        let mapping = queue.map(machine.memory.buffer(PAGE).unwrap(), BOTH).unwrap();
        let iova = mapping.iova();
        assert_eq!(machine.reached(iova, PAGE), 1);
        steps::before(number, || panic!("as the test wants"));
        let unmapped = catch_unwind(AssertUnwindSafe(|| queue.unmap(mapping).is_ok()));
        let came = steps::came();
        assert_eq!(unmapped.is_err(), came);
        let back = queue.commit().map(drop);
        assert!(back.is_err() || machine.reached(iova, PAGE) == 0, "committed, and reached: {number}");
        came
    });
    assert!(cleanings > 0);
}

#[test]
fn a_ring_confirms_nothing_that_could_not_be_cleaned() {
    let cleanings = steps::each(|number| {
        let machine = Machine::<false>::new();
        let mut ring = StrictRing::new(&machine.device, StrictRingConfig::new(8, PAGE, 1)).unwrap();
        let list = [PhysSegment { phys: PhysAddr::new(0x9_0000_0000), len: PAGE }];
        let mapping = ring.open(&list, BOTH).unwrap();
        let iova = mapping.iova();
        assert_eq!(machine.reached(iova, PAGE), 1);
        steps::before(number, || panic!("as the test wants"));
        let unmapped = catch_unwind(AssertUnwindSafe(|| ring.unmap(mapping).is_ok()));
        let came = steps::came();
        assert_eq!(unmapped.is_err(), came);
        let committed = ring.commit();
        assert!(committed.is_err() || machine.reached(iova, PAGE) == 0, "committed, and reached: {number}");
        came
    });
    assert!(cleanings > 0);
}

/// Nothing panics: another CPU that unmaps the same by number has cleared it, and is about to clean.
#[test]
fn a_strict_unmap_is_not_done_before_another_cpu_has_cleaned() {
    let cleanings = steps::each(|number| {
        let machine = Machine::<false>::new();
        let buffer = machine.memory.buffer(PAGE).unwrap();
        let mut queue = direct(&machine.device);
        let mapping = queue.map(buffer, BOTH).unwrap();
        let iova = mapping.iova();
        assert_eq!(machine.reached(iova, PAGE), 1);
        let owners = Arc::clone(&machine);
        let owner = Rc::new(RefCell::new(None));
        let runs = Rc::clone(&owner);
        steps::before(number, move || {
            let thread = std::thread::spawn(move || {
                let is_back = queue.unmap(mapping).is_ok();
                (is_back, owners.reached(iova, PAGE))
            });
            steps::let_run(&thread);
            *runs.borrow_mut() = Some(thread);
        });
        // By then it may be its owner's no more, which is an error.
        let _ = machine.device.unmap_single(iova, PAGE);
        let came = steps::came();
        if let Some(thread) = owner.take() {
            let (is_back, reached) = thread.join().unwrap();
            assert!(!is_back || reached == 0, "given back, and reached: {number}");
        }
        came
    });
    assert!(cleanings > 0);
}
