//! What a list is granted, what it fetches and gives up, and what goes to other CPUs, to the range.

use alloc::vec::Vec;

use super::super::inbox::{LETTER, LETTER_PAGES};
use super::*;
use crate::dice::Dice;

const PAGES: u64 = 1 << 15;
/// Orders that the tests use.
const ORDERS: u32 = 5;

fn notes() -> Notes {
    let notes = Notes::new(PAGES);
    (0..PAGES).for_each(|page| notes.make(page, 0, Link::END.bits()).unwrap());
    (0..PAGES).step_by(8).for_each(|page| notes.make(page, 3, Link::END.bits()).unwrap());
    notes
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
    let (cpu, notes) = (Cpu::new(0), notes());
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
                let spilled = cpu.spill(&notes, 0, order, &mut out[..most]) as u64;
                assert_eq!(spilled, count.min(most as u64));
                assert_eq!((cpu.count(order), cpu.granted(order)), (count - spilled, count - spilled));
                assert_eq!(cpu.list(0, order).batch.get(), batch / 2, "what is spilled was too much");
            }
            _ => {
                let room = cpu.granted(order) > cpu.count(order);
                let page = &mut next[order as usize];
                assert_eq!(cpu.push(0, notes.word(*page, order).unwrap(), *page, order), room);
                if room {
                    // Around its pages: the budget has fewer, so that none is on a list twice.
                    *page = (*page + (1 << order)) % 512 + u64::from(order) * 512;
                }
            }
        }
    }
    let mut drained = 0;
    cpu.drain(&notes, &Inbox::new(), |_, order| drained += 1 << order);
    assert!(drained <= BUDGET);
    assert_eq!((cpu.cached(), cpu.sum()), (0, 0), "the room is anybody's again");
}

#[test]
fn a_list_that_runs_dry_fetches_twice_as_many() {
    let cpu = Cpu::new(0);
    let batches: Vec<u64> = (0..4).map(|_| cpu.next_batch(0, 0)).collect();
    assert_eq!(batches, [16, 32, 64, 64]);
    cpu.spill(&notes(), 0, 0, &mut []);
    assert_eq!(cpu.next_batch(0, 0), 64, "as many as the last time");
    assert_eq!(cpu.next_batch(0, 1), 16, "each list by itself");
}

/// All but a part of a letter is sent at once, up to what the owner may have on its way, to the last range; and the owner
/// sorts in 64 at a time.
#[test]
fn what_is_sent_is_bounded_and_sorted_in_by_slices() {
    let notes = notes();
    for (order, most) in [(0, 64), (0, 800), (3, 64), (3, 60), (3, 768), (3, 800), (5, 16384)] {
        let (sender, owner) = (Cpu::new(0), Cpu::new(0));
        let inboxes = [CachePadded(Inbox::new()), CachePadded(Inbox::new())];
        let size = 1 << order;
        // What makes a letter is not sent one by one, nor kept when the letter is full.
        let letter = (most / 8).min(LETTER << order).min(LETTER_PAGES).next_multiple_of(size);
        let mut posted = 0;
        let range = |posted| (notes.word(posted << order, order).unwrap(), posted << order, order);
        while sender.post(&notes, &inboxes, 1, range(posted), most) {
            posted += 1;
            assert_eq!(inboxes[1].pages(), posted * size / letter * letter, "letters of {letter} pages");
        }
        // A letter is filled once it is begun.
        assert_eq!(posted * size, (most + 1 - size).next_multiple_of(letter), "{order} {most}");
        assert_eq!(inboxes[0].pages(), 0);
        let sent = inboxes[1].pages() / size;
        let mut sorted = 0;
        loop {
            let mut slice = 0;
            let count = |_: &_, page, got| {
                assert!(got == order && page < posted << order);
                slice += 1;
            };
            // SAFETY: there are no other notes.
            let any = unsafe { owner.receive(&notes, &inboxes[1], count) };
            sorted += slice;
            assert_eq!(any, slice > 0);
            assert_eq!(inboxes[1].pages(), (sent - sorted) * size);
            if !any {
                break;
            }
            assert_eq!(slice, (sent - (sorted - slice)).min(SLICE as u64), "{sorted} of {sent}");
        }
        let on_their_way = sender.on_their_way().wrapping_add(owner.on_their_way());
        assert_eq!((sorted, on_their_way), (sent, (posted - sent) * size));
    }
}

/// Owners whose ranges are collected in one place get their own, and no others.
#[test]
fn a_letter_has_one_owner_s_ranges() {
    let (cpu, notes) = (Cpu::new(0), notes());
    let inboxes = [(); 2 * OUTBOXES].map(|()| CachePadded(Inbox::new()));
    let owner = |page: u64| 1 + OUTBOXES as u64 * (page / 3 % 2);
    let range = |page| (notes.word(page, 0).unwrap(), page, 0);
    (0..60).for_each(|page| assert!(cpu.post(&notes, &inboxes, owner(page), range(page), 800)));
    let mut got = 0;
    for (number, inbox) in (0..).zip(&inboxes) {
        let mut count = |_: &_, page, _| {
            assert_eq!(owner(page), number);
            got += 1;
        };
        // SAFETY: there are no other notes.
        while unsafe { Cpu::new(0).receive(&notes, inbox, &mut count) } {}
    }
    assert_eq!(got, 60 - 3, "all but those of the last owner");
}

/// Somebody freed a range twice at once, and has it, or another CPU has: what its list leads to is not believed.
#[test]
fn a_list_with_a_range_that_is_in_use_ends_there() {
    let (cpu, notes, class) = (Cpu::new(0), notes(), Class::of(0));
    cpu.grant(0, 0, 4, 4);
    (1..4).for_each(|page| assert!(cpu.push(0, notes.word(page, 0).unwrap(), page, 0)));
    notes.write(2, 0, handed_out(7, 1));
    // SAFETY: there are no other notes.
    assert!(unsafe { cpu.find(&notes, 3, class) }.is_some());
    // SAFETY: as above.
    let take = || unsafe { cpu.take(&notes, 0, class, 1) };
    assert_eq!((take(), take()), (Some(3), None));
    let mut drained = Vec::new();
    assert_eq!(cpu.spill(&notes, 0, 0, &mut [0; 4]), 0);
    cpu.drain(&notes, &Inbox::new(), |page, _| drained.push(page));
    assert_eq!(drained, []);
}

/// A page inside a range that is handed out finds no note, though one word is for several pages.
#[test]
fn what_begins_inside_a_range_is_not_taken_back() {
    let (cpu, notes) = (Cpu::new(0), notes());
    for (order, inside) in [(1, 1), (3, 1), (3, 7), (5, 8), (6, 1), (6, 63)] {
        notes.make(64, order, handed_out(0, 1 << order)).unwrap();
        let (class, pages) = (Class::of(order), 1 << order);
        // SAFETY: there are no other notes.
        assert!(unsafe { cpu.find(&notes, 64, class) }.is_some());
        cpu.grant(0, order, 1, PAGES);
        // SAFETY: as above.
        let put = |page| unsafe { cpu.put(&notes, 0, class, (page, pages)) };
        assert_eq!((put(64 + inside), put(64)), (false, true), "{order} {inside}");
    }
}
