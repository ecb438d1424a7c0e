//! Each policy's share of memory and time, so that all stay within the limits.

use super::ReplayError;
use super::memory::MOST_BYTES;
use super::mode::Mode;
use crate::budget::{self, Over};
use crate::summary::Summary;

/// Pages that all policies together track individually, for any recording: 128 GiB, half a minute's work.
const PAGES: u64 = 32 << 20;

/// Pages that each event of a recording adds for each policy: 4 MiB, ten times what most recordings need.
const EVENT_PAGES: u64 = 1 << 10;

/// The least memory of a live page under each policy: its entry in a hash table that is an eighth empty.
const PAGE_BYTES: u64 = 74;

/// The share of one policy.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// The recording's name, for errors.
    name: String,
    /// The limit of bytes of the recording's memory, and bounce buffers.
    pub(super) bytes: u64,
    /// Pages tracked so far, and the limit.
    pub(super) pages: u64,
    pub(super) most: u64,
    /// Timer checks.
    looks: u64,
    policies: u64,
    /// Pages of live mappings.
    pub(super) live: u64,
}

/// The live objects, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alive {
    pub(super) line: u64,
    pub(super) devices: usize,
    pub(super) mappings: usize,
}

impl Share {
    /// An equal share for each of `modes`.
    pub(super) fn of(modes: &[Mode], summary: &Summary) -> Self {
        let copying = modes.iter().filter(|mode| mode.copies()).count().max(1) as u64;
        // The other half is for tracking pages, devices and mappings.
        let bytes = (budget::limit() / 2 / copying).min(MOST_BYTES);
        let policies = modes.iter().filter(|mode| mode.is_replayed()).count().max(1) as u64;
        let most = PAGES / policies;
        Self { name: summary.name.clone(), bytes, pages: 0, most, looks: 0, policies, live: 0 }
    }

    /// Checks the memory for an event.
    #[inline]
    pub(super) fn event(&mut self, alive: impl FnOnce() -> Alive) -> Result<(), ReplayError> {
        self.most = self.most.saturating_add(EVENT_PAGES);
        budget::check().map_err(|over| self.memory(alive(), over))
    }

    /// A mapping of `pages` pages is about to be made, by this policy and all others: checks the memory for all before the first of them
    /// spends time on it.
    #[inline]
    pub(super) fn map(&mut self, pages: u64, alive: impl FnOnce() -> Alive) -> Result<(), ReplayError> {
        self.live = self.live.saturating_add(pages);
        let wanted = self.live.saturating_mul(PAGE_BYTES * self.policies);
        if wanted <= budget::limit() {
            return Ok(());
        }
        let over = Over { used: budget::used(), wanted, limit: budget::limit() };
        Err(self.memory(alive(), over))
    }

    /// A mapping of `pages` pages is gone, or was not made.
    #[inline]
    pub(super) fn unmap(&mut self, pages: u64) {
        self.live = self.live.saturating_sub(pages);
    }

    /// There is no room for `wanted` bytes.
    pub(super) fn no_bytes(&self, line: u64, policy: &'static str, wanted: u64) -> ReplayError {
        let (most, limit) = (self.bytes, budget::limit());
        // A quarter of a share is not for the recording's memory, and another may be in use.
        let enough = |next: u64| most < MOST_BYTES && most.saturating_mul(next / limit) / 2 >= wanted;
        let memory = budget::more(limit, enough).filter(|_| wanted <= MOST_BYTES / 2);
        ReplayError::TooManyBytes { name: self.name.clone(), line, policy, wanted, most, memory }
    }

    /// Counts `pages` individually tracked pages.
    #[inline]
    pub(super) fn follow(&mut self, line: u64, pages: u64) -> Result<(), ReplayError> {
        self.pages = self.pages.saturating_add(pages);
        if self.pages <= self.most {
            return Ok(());
        }
        Err(ReplayError::TooManyPages { name: self.name.clone(), line, pages: self.pages, most: self.most })
    }

    /// Counts `number` timer checks: eight take as long as a page.
    pub(super) fn look(&mut self, line: u64, number: u64) -> Result<(), ReplayError> {
        self.looks += number;
        let pages = self.looks / 8;
        self.looks %= 8;
        self.follow(line, pages)
    }

    fn memory(&self, alive: Alive, over: Over) -> ReplayError {
        let Alive { line, devices, mappings } = alive;
        ReplayError::Memory { name: self.name.clone(), line, devices, mappings, over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis::domain::Policy;

    const STRICT: Mode = Mode::Each(Policy::Strict);
    const ALIVE: Alive = Alive { line: 7, devices: 3, mappings: 5 };

    fn share(modes: &[Mode]) -> Share {
        Share::of(modes, &Summary { name: "t".into(), ..Summary::default() })
    }

    /// 74 bytes for each live page under each policy.
    #[test]
    fn the_account_of_live_pages_is_of_all_policies_and_ends_with_them() {
        // Large enough not to affect other tests.
        let limit = 1 << 40;
        budget::set_limit(limit);
        let pages = 1 << 32;
        let mut two = share(&[STRICT, Mode::PASSTHROUGH]);
        assert!(two.map(pages, || ALIVE).is_ok());
        let Err(ReplayError::Memory { name, line, devices, mappings, over }) = two.map(pages, || ALIVE)
        else {
            panic!("more than there may be")
        };
        assert_eq!((name.as_str(), line, devices, mappings), ("t", 7, 3, 5));
        assert_eq!(over, Over { used: budget::used(), wanted: 2 * pages * 74 * 2, limit });
        two.unmap(2 * pages);
        assert!(two.map(pages, || ALIVE).is_ok());
        // More than were there leave none.
        two.unmap(u64::MAX);
        assert!(two.map(pages, || ALIVE).is_ok());
        let mut one = share(&[STRICT]);
        assert!(one.map(pages, || ALIVE).is_ok() && one.map(pages, || ALIVE).is_ok());
    }

    #[test]
    fn policies_share_pages_and_bytes_and_each_event_adds_pages() {
        let most = |modes: &[Mode]| share(modes).most;
        assert_eq!([most(&[STRICT]), most(&Mode::ALL)], [32 << 20, 4 << 20]);
        let mut share = Share { most: 2, ..share(&[STRICT]) };
        assert!(share.follow(1, 2).is_ok());
        let Err(ReplayError::TooManyPages { name, line, pages, most }) = share.follow(4, 1) else {
            panic!("more than may be followed")
        };
        assert_eq!((name.as_str(), line, pages, most), ("t", 4, 3, 2));
        share.event(|| ALIVE).unwrap();
        assert_eq!((share.pages, share.most), (3, 2 + 1024));
        // Eight checks are a page, and a remainder counts with the next.
        for (looks, pages) in [(7, 3), (1, 4), (20, 6), (3, 6), (1, 7)] {
            share.look(5, looks).unwrap();
            assert_eq!(share.pages, pages, "{looks} more");
        }
        let error = Share { bytes: 5 << 12, ..share }.no_bytes(9, "bounce", 8 << 12).to_string();
        assert!(error.starts_with("t: line 9: bounce keeps the bytes of what is mapped, "), "{error}");
        assert!(
            error.contains(": it needs 33 kB more, and may have 20 kB in all (its part of half of --memory"),
            "{error}"
        );
    }
}
