//! One CPU frees what another has handed out, which takes it again, in the model checker.

use alloc::boxed::Box;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::super::remote::Returned;
use super::*;
use crate::percpu::CachePadded;

const PAGES: usize = 4;

struct Space {
    meta: Shared<RangeMeta>,
    remote_queues: [CachePadded<RemoteQueue>; 2],
    /// What the holder of each page writes: in turns, or the model checker objects.
    held: [UnsafeCell<u32>; PAGES],
}

impl Space {
    fn hold(&self, page: u64) {
        // SAFETY: that is what the model checker checks.
        self.held[page as usize].with_mut(|held| unsafe { *held += 1 });
    }
}

/// Every range arrives once, and its new holder sees what the last one did. The first two remote batches have three ranges, of which
/// one is added quickly: one becomes the list, one is sorted in. In the third case each range is a remote batch of its own.
#[test]
fn what_one_cpu_frees_another_takes_again() {
    for (most, adopts) in [(24, true), (24, false), (8, true)] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.max_branches = 100_000;
        builder.check(move || race(most, adopts));
    }
}

fn race(most: u64, adopts: bool) {
    let class = Class::of(0);
    let space = Arc::new(Space {
        meta: Shared::new(RangeMeta::new(PAGES as u64)).unwrap(),
        remote_queues: [(); 2].map(|()| CachePadded(RemoteQueue::new())),
        held: [(); PAGES].map(|()| UnsafeCell::new(0)),
    });
    let owner = boxed(0, &space);
    owner.grant(0, 0, PAGES as u64, PAGES as u64);
    for page in 0..3 {
        assert_eq!(owner.push_new(0, class, page), Ok(true));
    }
    assert_eq!([(); 4].map(|()| take(&owner, &space)), [Some(2), Some(1), Some(0), None]);
    // The owner is the other thread: for what it loads the model checker then tries each store of the first as the last before.
    let receiver = {
        let space = Arc::clone(&space);
        thread::spawn(move || {
            let mut taken = [0; PAGES];
            receive(&owner, &space, adopts, &mut taken);
            (owner, taken)
        })
    };
    free(&space, most);
    let (owner, mut taken) = receiver.join().unwrap();
    (0..3).for_each(|_| receive(&owner, &space, adopts, &mut taken));
    assert_eq!(taken, [1, 1, 1, 0]);
    assert_eq!((space.remote_queues[0].pages(), owner.received.get()), (0, 3));
}

/// The model checker's stacks are small.
#[inline(never)]
fn boxed(number: u64, space: &Space) -> Box<Cpu> {
    Cpu::new(number, space.meta.clone())
}

fn take(owner: &Cpu, space: &Space) -> Option<u64> {
    owner.find(owner.newest(0, 0)?, Class::of(0));
    let page = owner.take(0, Class::of(0), 1)?;
    space.hold(page);
    Some(page)
}

/// Frees three pages of the other CPU.
fn free(space: &Space, most: u64) {
    let (cpu, class) = (boxed(1, space), Class::of(0));
    let mut quickly = 0;
    for page in 0..3 {
        space.hold(page);
        let word = cpu.find(page, class).unwrap();
        if cpu.post_fast(0, class, (page, 1)) {
            quickly += 1;
        } else {
            let range = Returned { word, page, order: 0, zone: 0 };
            assert!(cpu.post(&space.remote_queues, 0, range, most));
        }
    }
    assert_eq!((quickly, cpu.remote_batches[0].peek()), (if most == 8 { 0 } else { 1 }, 0));
}

/// Takes what has arrived, up to a slice.
fn receive(owner: &Cpu, space: &Space, adopts: bool, taken: &mut [u32; PAGES]) {
    let remote_queue = &space.remote_queues[0];
    if !(adopts && owner.adopt(remote_queue, 0, Class::of(0), |_| true)) {
        let keep = |word: &_, page, order| assert!(owner.push(0, word, page, order));
        owner.receive(remote_queue, keep);
    }
    while let Some(page) = take(owner, space) {
        taken[page as usize] += 1;
    }
}
