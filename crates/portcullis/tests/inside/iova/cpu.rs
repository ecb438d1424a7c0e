//! What a list is granted, what it fetches and gives up, and what goes to other CPUs, to the range.

use alloc::vec::Vec;

use super::super::remote::{REMOTE_BATCH, REMOTE_BATCH_PAGES, Returned};
use super::*;
use crate::dice::Dice;
use crate::percpu::CachePadded;

const PAGES: u64 = 1 << 15;
/// Orders that the tests use.
const ORDERS: u32 = 5;

fn meta() -> Shared<RangeMeta> {
    let meta = Shared::new(RangeMeta::new(PAGES)).unwrap();
    (0..PAGES).for_each(|page| meta.make(page, 0, Link::END.bits()).unwrap());
    (0..PAGES).step_by(8).for_each(|page| meta.make(page, 3, Link::END.bits()).unwrap());
    meta
}

fn returned(meta: &RangeMeta, page: u64, order: u32) -> Returned<'_> {
    Returned { word: meta.word(page, order).unwrap(), page, order, zone: 0 }
}

impl Cpu {
    fn granted(&self, order: u32) -> u64 {
        self.list(0, order).granted.get()
    }

    fn count(&self, order: u32) -> u64 {
        self.list(0, order).count()
    }

    /// Pages that all lists were granted.
    fn sum(&self) -> u64 {
        (0..ORDERS).map(|order| self.granted(order) << order).sum()
    }
}

/// A list gets the room that it wants, or all that others do not use, and keeps what it has.
#[test]
fn a_grant_takes_what_is_not_used_and_no_more() {
    const BUDGET: u64 = 300;
    let meta = meta();
    let cpu = Cpu::new(0, meta.clone());
    let mut dice = Dice(1);
    // Each order has pages of its own, so that no two ranges overlap.
    let mut next = [0, 1, 2, 3, 4].map(|part| part * 512);
    for _ in 0..5000 {
        let order = dice.below(ORDERS.into()) as u32;
        match dice.below(4) {
            0 => {
                let wanted = dice.below(40);
                let (own, before) = (cpu.granted(order), cpu.sum());
                let room = cpu.grant(0, order, wanted, BUDGET);
                assert_eq!(room, cpu.granted(order) - cpu.count(order));
                let more = cpu.granted(order) - own;
                assert!(more <= wanted && cpu.sum() <= BUDGET);
                if more < wanted {
                    let others = (0..ORDERS).filter(|other| *other != order);
                    assert!(others.into_iter().all(|other| cpu.granted(other) == cpu.count(other)));
                    assert!(cpu.sum() + (1 << order) > BUDGET, "there is more");
                } else {
                    assert!(cpu.sum() <= before + (more << order));
                }
            }
            1 => {
                let (count, batch) = (cpu.count(order), cpu.next_batch(0, order));
                let mut out = [0; 8];
                let most = dice.below(8) as usize;
                let spilled = cpu.spill(0, order, &mut out[..most]) as u64;
                assert_eq!(spilled, count.min(most as u64));
                assert_eq!((cpu.count(order), cpu.granted(order)), (count - spilled, count - spilled));
                assert_eq!(cpu.list(0, order).last_refill.get(), batch / 2, "what is spilled was too much");
            }
            _ => {
                let room = cpu.granted(order) > cpu.count(order);
                let page = &mut next[order as usize];
                assert_eq!(cpu.push(0, meta.word(*page, order).unwrap(), *page, order), room);
                if room {
                    // Around its pages: the budget has fewer, so that none is on a list twice.
                    *page = (*page + (1 << order)) % 512 + u64::from(order) * 512;
                }
            }
        }
    }
    let mut drained = 0;
    cpu.drain(&RemoteQueue::new(), |_, order| drained += 1 << order);
    assert!(drained <= BUDGET);
    assert_eq!((cpu.cached(), cpu.sum()), (0, 0), "the room is anybody's again");
}

#[test]
fn a_list_that_runs_dry_fetches_twice_as_many() {
    let cpu = Cpu::new(0, meta());
    let batches: Vec<u64> = (0..4).map(|_| cpu.next_batch(0, 0)).collect();
    assert_eq!(batches, [16, 32, 64, 64]);
    cpu.spill(0, 0, &mut []);
    assert_eq!(cpu.next_batch(0, 0), 64, "as many as the last time");
    assert_eq!(cpu.next_batch(0, 1), 16, "each list by itself");
}

/// All but a part of a remote batch is sent at once, up to what the owner may have on its way, to the last range; and the owner
/// sorts in 64 at a time.
#[test]
fn what_is_sent_is_bounded_and_sorted_in_by_slices() {
    let meta = meta();
    for (order, most) in [(0, 64), (0, 800), (3, 64), (3, 60), (3, 768), (3, 800), (5, 16384)] {
        let (sender, owner) = (Cpu::new(0, meta.clone()), Cpu::new(0, meta.clone()));
        let remote_queues = [CachePadded(RemoteQueue::new()), CachePadded(RemoteQueue::new())];
        let size = 1 << order;
        // What makes a remote batch is not sent one by one, nor kept when the remote batch is full.
        let batch = (most / 8).min(REMOTE_BATCH << order).min(REMOTE_BATCH_PAGES).next_multiple_of(size);
        let mut posted = 0;
        let range = |posted| returned(&meta, posted << order, order);
        while sender.post(&remote_queues, 1, range(posted), most) {
            posted += 1;
            assert_eq!(remote_queues[1].pages(), posted * size / batch * batch, "batches of {batch} pages");
        }
        // A remote batch is filled once it is begun.
        assert_eq!(posted * size, (most + 1 - size).next_multiple_of(batch), "{order} {most}");
        assert_eq!(remote_queues[0].pages(), 0);
        let sent = remote_queues[1].pages() / size;
        let mut sorted = 0;
        loop {
            let mut slice = 0;
            let count = |_: &_, page, got| {
                assert!(got == order && page < posted << order);
                slice += 1;
            };
            let any = owner.receive(&remote_queues[1], count);
            sorted += slice;
            assert_eq!(any, slice > 0);
            assert_eq!(remote_queues[1].pages(), (sent - sorted) * size);
            if !any {
                break;
            }
            assert_eq!(slice, (sent - (sorted - slice)).min(SLICE as u64), "{sorted} of {sent}");
        }
        let on_their_way = sender.on_their_way().wrapping_add(owner.on_their_way());
        assert_eq!((sorted, on_their_way), (sent, (posted - sent) * size));
    }
}

/// Ranges fill a remote batch alike by the fast path and by the slow one, whatever their orders, and each counts as on its way from
/// the first on. A remote batch that is taken back is not begun any more.
#[test]
fn a_batch_is_as_full_by_the_fast_path() {
    for (most, orders) in [(64, 5), (800, 5), (16384, 10)] {
        let mut dice = Dice(most);
        let (meta, remote_queues) = (
            Shared::new(RangeMeta::new(2 * PAGES)).unwrap(),
            [(); 2].map(|()| [CachePadded(RemoteQueue::new()), CachePadded(RemoteQueue::new())]),
        );
        let (fast, slow) = (Cpu::new(0, meta.clone()), Cpu::new(0, meta.clone()));
        let (mut page, mut posted, mut quickly) = (0, 0, 0);
        while posted < most / 2 {
            let order = if dice.below(4) == 0 { dice.below(orders) as u32 } else { 0 };
            let (class, asked) = (Class::of(order), (1 << order) - dice.below(1 << order) / 2);
            page = (page + (1 << order) - 1) >> order << order;
            let word = handed_out(1, asked);
            meta.make(page, order, word).unwrap();
            assert!(fast.find(page, class).is_some());
            // Another number of pages than was asked for, and another owner's, are left to the slow path, which refuses.
            assert!(!fast.post_fast(0, class, (page, asked + 1)));
            if fast.post_fast(0, class, (page, asked)) {
                quickly += 1;
                assert!(!fast.post_fast(0, class, (page, asked)), "freed twice");
            } else {
                assert!(fast.post(&remote_queues[0], 1, returned(&meta, page, order), most));
            }
            let other = PAGES + page;
            meta.make(other, order, Link::END.bits()).unwrap();
            assert!(slow.post(&remote_queues[1], 1, returned(&meta, other, order), most));
            page += 1 << order;
            posted += 1 << order;
            let pages = remote_queues.each_ref().map(|remote_queues| remote_queues[1].pages());
            assert_eq!((pages[0], fast.on_their_way()), (pages[1], posted));
        }
        assert!(quickly > 0);
        let (sent, mut drained) = (remote_queues[0][1].pages(), 0);
        fast.drain(&remote_queues[0][0], |_, order| {
            drained += 1 << order;
            assert_eq!(fast.on_their_way(), posted - drained);
        });
        assert_eq!((drained, fast.on_their_way()), (posted - sent, sent));
        meta.make(page, 0, handed_out(1, 1)).unwrap();
        let post_fast = || {
            assert!(fast.find(page, Class::of(0)).is_some());
            fast.post_fast(0, Class::of(0), (page, 1))
        };
        assert!(!post_fast());
        assert!(fast.post(&remote_queues[0], 1, returned(&meta, page, 0), most));
        assert_eq!((fast.remote_batch(1).peek(), fast.on_their_way()), (1, sent + 1));
    }
}

/// A remote batch begun with ranges of a large zone does not take those of a small one up to the large one's share.
#[test]
fn a_batch_keeps_to_the_share_of_each_zone() {
    let (meta, remote_queues) = (meta(), [CachePadded(RemoteQueue::new()), CachePadded(RemoteQueue::new())]);
    let (cpu, class) = (Cpu::new(0, meta.clone()), Class::of(0));
    let post =
        |page, zone, most| cpu.post(&remote_queues, 1, Returned { zone, ..returned(&meta, page, 0) }, most);
    let post_fast = |page, zone| {
        meta.write(page, 0, handed_out(1, 1));
        assert!(cpu.find(page, class).is_some());
        cpu.post_fast(zone, class, (page, 1))
    };
    assert!(post(0, 1, 800) && post_fast(1, 1));
    assert!(!post_fast(2, 0));
    assert_eq!((remote_queues[1].pages(), cpu.on_their_way()), (0, 2));
    assert!(post(2, 0, 16));
    assert_eq!((remote_queues[1].pages(), cpu.on_their_way()), (3, 3));
    assert!(!post_fast(3, 0) && !post_fast(3, 1));
}

/// A call takes no more than 64 ranges as the list, however many have arrived.
#[test]
fn what_becomes_the_list_is_bounded() {
    let (meta, remote_queues) = (meta(), [CachePadded(RemoteQueue::new()), CachePadded(RemoteQueue::new())]);
    let (sender, owner) = (Cpu::new(0, meta.clone()), Cpu::new(1, meta.clone()));
    for page in 0..3 * REMOTE_BATCH {
        assert!(sender.post(&remote_queues, 1, returned(&meta, page, 0), 800));
    }
    owner.grant(0, 0, 100, 100);
    let adopt = || owner.adopt(&remote_queues[1], 0, Class::of(0), |_| true);
    assert!(adopt());
    assert_eq!((owner.count(0), remote_queues[1].pages()), (64, 32));
    while owner.newest(0, 0).is_some() {
        owner.find(owner.newest(0, 0).unwrap(), Class::of(0));
        assert!(owner.take(0, Class::of(0), 1).is_some());
    }
    assert!(adopt());
    assert_eq!((owner.count(0), remote_queues[1].pages()), (32, 0));
}

/// A range in a list that arrived as it is was freed already: neither its owner nor another CPU takes it back again.
#[test]
fn what_became_the_list_is_not_freed_again() {
    // A word that is a link leads to the remote batches for this owner, if it is taken for one that says "handed out".
    const OWNER: u64 = REMOTE_BATCHES as u64;
    let (meta, remote_queues) = (meta(), [(); REMOTE_BATCHES + 1].map(|()| CachePadded(RemoteQueue::new())));
    let (sender, owner, class) = (Cpu::new(1, meta.clone()), Cpu::new(OWNER, meta.clone()), Class::of(0));
    let post = |page| assert!(sender.post(&remote_queues, OWNER, returned(&meta, page, 0), 24));
    (0..3).for_each(post);
    owner.grant(0, 0, 8, 100);
    assert!(owner.adopt(&remote_queues[REMOTE_BATCHES], 0, class, |_| true));
    // Another remote batch with room is begun, and the list has room.
    post(4);
    assert!(sender.find(0, class).is_some());
    for page in 0..3 {
        assert!(!owner.put(0, class, (page, 1)));
        assert!(!sender.post_fast(0, class, (page, 1)));
    }
    let taken = [(); 4].map(|()| owner.take(0, class, 1));
    assert_eq!(taken, [Some(2), Some(1), Some(0), None]);
    // In use again, each is freed once more, and once only.
    assert!(sender.post_fast(0, class, (2, 1)) && owner.put(0, class, (1, 1)));
    assert!(!sender.post_fast(0, class, (2, 1)) && !owner.put(0, class, (1, 1)));
}

/// What arrived becomes an empty list, newest first, as far as it is of its order and zone and has room; the rest stays.
#[test]
fn what_arrives_becomes_the_list() {
    const END: u64 = 40;
    let (meta, remote_queues) = (meta(), [CachePadded(RemoteQueue::new()), CachePadded(RemoteQueue::new())]);
    let (sender, owner, class) = (Cpu::new(0, meta.clone()), Cpu::new(1, meta.clone()), Class::of(0));
    let adopt = |zone| owner.adopt(&remote_queues[1], zone, class, |page| usize::from(page >= END) == zone);
    let take = |zone| owner.take(zone, class, 1);
    assert!(!adopt(0), "nothing has arrived");
    let post = |page, order| assert!(sender.post(&remote_queues, 1, returned(&meta, page, order), 15));
    // Each is a remote batch. The newest arrives first.
    post(8, 1);
    (0..6).for_each(|page| post(page, 0));
    post(END, 0);
    post(6, 0);
    assert!(!adopt(0), "there is no room");
    owner.grant(0, 0, 4, 100);
    owner.grant(1, 0, 4, 100);
    assert!(!adopt(1), "the newest is of the other zone");
    assert!(adopt(0) && owner.count(0) == 1, "the next one is");
    assert_eq!((take(0), take(0)), (Some(6), None));
    assert!(!adopt(0) && adopt(1));
    assert_eq!((take(1), take(1)), (Some(END), None));
    // As many as there is room for, and then the rest.
    assert!(adopt(0) && owner.count(0) == 4);
    assert_eq!([(); 5].map(|()| take(0)), [Some(5), Some(4), Some(3), Some(2), None]);
    assert!(adopt(0));
    assert_eq!([(); 3].map(|()| take(0)), [Some(1), Some(0), None]);
    assert!(!adopt(0), "what is left is of another order");
    assert_eq!((remote_queues[1].pages(), sender.on_their_way().wrapping_add(owner.on_their_way())), (2, 2));
    let mut rest = Vec::new();
    owner.drain(&remote_queues[1], |page, order| rest.push((page, order)));
    assert_eq!(rest, [(8, 1)]);
}

/// Somebody freed a range twice, and it is in use again on its way: what came behind it is not taken.
#[test]
fn what_arrives_ends_where_a_range_is_in_use() {
    let (meta, remote_queues) = (meta(), [CachePadded(RemoteQueue::new()), CachePadded(RemoteQueue::new())]);
    let (sender, owner, class) = (Cpu::new(0, meta.clone()), Cpu::new(1, meta.clone()), Class::of(0));
    (0..3).for_each(|page| assert!(sender.post(&remote_queues, 1, returned(&meta, page, 0), 8)));
    meta.write(1, 0, handed_out(7, 1));
    owner.grant(0, 0, 4, 100);
    let adopt = || owner.adopt(&remote_queues[1], 0, class, |_| true);
    let take = || owner.take(0, class, 1);
    assert!(adopt() && owner.count(0) == 1);
    assert_eq!((take(), take(), adopt()), (Some(2), None, false));
    assert!(!owner.receive(&remote_queues[1], |_, _, _| ()));
    assert_eq!(owner.arrived.get(), Link::END.bits());
}

/// Owners whose ranges are collected in one place get their own, and no others.
#[test]
fn a_batch_has_one_owner_s_ranges() {
    let meta = meta();
    let cpu = Cpu::new(0, meta.clone());
    let remote_queues = [(); 2 * REMOTE_BATCHES].map(|()| CachePadded(RemoteQueue::new()));
    let owner = |page: u64| 1 + REMOTE_BATCHES as u64 * (page / 3 % 2);
    let range = |page| returned(&meta, page, 0);
    (0..60).for_each(|page| assert!(cpu.post(&remote_queues, owner(page), range(page), 800)));
    let mut got = 0;
    for (number, remote_queue) in (0..).zip(&remote_queues) {
        let mut count = |_: &_, page, _| {
            assert_eq!(owner(page), number);
            got += 1;
        };
        while Cpu::new(0, meta.clone()).receive(remote_queue, &mut count) {}
    }
    assert_eq!(got, 60 - 3, "all but those of the last owner");
}

/// Somebody freed a range twice at once, and has it, or another CPU has: what its list leads to is not believed.
#[test]
fn a_list_with_a_range_that_is_in_use_ends_there() {
    let (meta, class) = (meta(), Class::of(0));
    let cpu = Cpu::new(0, meta.clone());
    cpu.grant(0, 0, 4, 4);
    (1..4).for_each(|page| assert!(cpu.push(0, meta.word(page, 0).unwrap(), page, 0)));
    meta.write(2, 0, handed_out(7, 1));
    assert!(cpu.find(3, class).is_some());
    let take = || cpu.take(0, class, 1);
    assert_eq!((take(), take()), (Some(3), None));
    let mut drained = Vec::new();
    assert_eq!(cpu.spill(0, 0, &mut [0; 4]), 0);
    cpu.drain(&RemoteQueue::new(), |page, _| drained.push(page));
    assert_eq!(drained, []);
}

/// A page inside a range that is handed out finds no metadata, though one word is for several pages.
#[test]
fn what_begins_inside_a_range_is_not_taken_back() {
    let meta = meta();
    let cpu = Cpu::new(0, meta.clone());
    for (order, inside) in [(1, 1), (3, 1), (3, 7), (5, 8), (6, 1), (6, 63)] {
        meta.make(64, order, handed_out(0, 1 << order)).unwrap();
        let (class, pages) = (Class::of(order), 1 << order);
        assert!(cpu.find(64, class).is_some());
        cpu.grant(0, order, 1, PAGES);
        let put = |page| cpu.put(0, class, (page, pages));
        assert_eq!((put(64 + inside), put(64)), (false, true), "{order} {inside}");
    }
}
