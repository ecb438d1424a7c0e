//! Ranges on their way back to the CPU that owns them.
//!
//! A CPU that frees another's range threads it onto a chain of its own for that owner, an [`Outbox`]; when the
//! chain is long enough it is pushed onto the owner's [`Inbox`] with one compare-and-swap. The owner takes all
//! that has come with one exchange. Since nothing is ever popped singly, there is no ABA problem.
//!
//! Memory ordering. The chain's words are written before the push, which is a `Release`; the owner's exchange
//! is an `Acquire`, so it sees them. Pushes onto a chain that others pushed before keep that order: a
//! compare-and-swap continues the release sequence of the one before it.

use super::notes::Notes;
use super::word::Link;
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicU64, Ordering};

/// Ranges that one CPU sends at once.
pub(super) const LETTER: u64 = 32;

/// Pages after which a letter is sent in any case.
pub(super) const LETTER_PAGES: u64 = 512;

/// Where one CPU's ranges arrive: the link to the first, and how many pages were sent and are not sorted in.
#[derive(Debug)]
pub(super) struct Inbox {
    first: AtomicU64,
    pages: AtomicU64,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self { first: AtomicU64::new(Link::END.bits()), pages: AtomicU64::new(0) }
    }

    /// Pages that were sent and are not sorted in yet. A hint.
    pub(super) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// The owner has sorted in so many pages.
    pub(super) fn arrived(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Puts the chain from `first` to the range of order `last_order` at `last` in front of what is there.
    fn push(&self, notes: &Notes, first: Link, last: u64, last_order: u32) {
        let mut old = self.first.load(Ordering::Relaxed);
        loop {
            notes.write(last, last_order, old);
            match self.first.compare_exchange_weak(old, first.bits(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    /// Takes everything that has arrived.
    pub(super) fn take(&self) -> Link {
        // Looked at first: an exchange would take the line from those who push.
        if self.first.load(Ordering::Relaxed) == Link::END.bits() {
            return Link::END;
        }
        Link::from_bits(self.first.swap(Link::END.bits(), Ordering::Acquire))
    }
}

/// A chain for one owner, not sent yet. Used by one CPU alone.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The owner's number plus one, or 0.
    owner: LocalU64,
    first: LocalU64,
    last: LocalU64,
    last_order: LocalU64,
    count: LocalU64,
    pages: LocalU64,
}

impl Outbox {
    /// Adds the range of order `order` at `page`, whose word is `word`, and which the CPU `owner` owns. What is
    /// in the way for another owner is sent, and a full letter too, one that holds `most` pages included.
    #[inline]
    pub(super) fn add(
        &self,
        notes: &Notes,
        inboxes: &[CachePadded<Inbox>],
        owner: u64,
        (word, page, order): (&AtomicU64, u64, u32),
        most: u64,
    ) {
        if self.owner.get() != owner + 1 {
            self.send(notes, inboxes);
            self.owner.set(owner + 1);
        }
        let next = Link::from_bits(self.first.get());
        if next == Link::END {
            self.last.set(page);
            self.last_order.set(order.into());
        }
        word.store(next.bits(), Ordering::Relaxed);
        self.first.set(Link::to(page, order).bits());
        self.count.set(self.count.get() + 1);
        self.pages.set(self.pages.get() + (1 << order));
        if self.count.get() >= LETTER || self.pages.get() >= LETTER_PAGES.min(most) {
            self.send(notes, inboxes);
        }
    }

    /// Sends what is in it.
    #[cold]
    #[inline(never)]
    pub(super) fn send(&self, notes: &Notes, inboxes: &[CachePadded<Inbox>]) {
        let pages = self.pages.get();
        let first = self.take();
        if let (Some(owner), true) = (self.owner.get().checked_sub(1), first != Link::END)
            && let Some(inbox) = inboxes.get(owner as usize)
        {
            inbox.pages.fetch_add(pages, Ordering::Relaxed);
            inbox.push(notes, first, self.last.get(), self.last_order.get() as u32);
        }
    }

    /// Takes the newest range out: its page and order.
    pub(super) fn pop(&self, notes: &Notes) -> Option<(u64, u32)> {
        let Some((page, order, next)) = notes.follow(Link::from_bits(self.first.get())) else {
            self.take();
            return None;
        };
        self.first.set(next.bits());
        self.count.set(self.count.get() - 1);
        self.pages.set(self.pages.get() - (1 << order));
        Some((page, order))
    }

    /// Empties it: the link to the first of its ranges.
    fn take(&self) -> Link {
        let first = Link::from_bits(self.first.get());
        self.first.set(Link::END.bits());
        self.count.set(0);
        self.pages.set(0);
        first
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Two CPUs send to a third, which takes what has come meanwhile and again at the end: every range
    /// arrives once, with its order.
    #[test]
    fn what_is_sent_arrives_once() {
        loom::model(|| {
            let notes = Arc::new(Notes::new(4));
            (0..4).for_each(|page| notes.make(page, 0, Link::END.bits()).unwrap());
            let inboxes: Arc<[CachePadded<Inbox>; 1]> = Arc::new([CachePadded(Inbox::new())]);
            let send = |pages: [u64; 2]| {
                let (notes, inboxes) = (Arc::clone(&notes), Arc::clone(&inboxes));
                move || {
                    let outbox = Outbox::default();
                    for page in pages {
                        let word = notes.word(page, 0).unwrap();
                        outbox.add(&notes, &inboxes[..], 0, (word, page, 0), 512);
                    }
                    outbox.send(&notes, &inboxes[..]);
                }
            };
            let other = thread::spawn(send([0, 1]));
            send([2, 3])();
            let mut seen = [0; 4];
            let mut walk = |mut link| {
                while let Some((page, order, next)) = notes.follow(link) {
                    assert_eq!(order, 0);
                    seen[page as usize] += 1;
                    link = next;
                }
            };
            walk(inboxes[0].take());
            other.join().unwrap();
            walk(inboxes[0].take());
            assert_eq!(seen, [1; 4]);
        });
    }
}
