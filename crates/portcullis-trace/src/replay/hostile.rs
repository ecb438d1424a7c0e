//! A device that remembers every address it ever saw, while policies change.
//!
//! After each unmap a hostile device tries the ended mapping, and the ledger tracks stale bytes until they are closed. Neither sees an
//! *old* address that leads somewhere *again*: into memory that the device was never given, or into its old memory through a freed table.
//! Here every address of a device is retried now and then, and must lead to the memory of a live mapping, or nowhere; or, under lazy
//! protection and within the window, to the memory of its old mapping.
//!
//! Cost: a hash lookup for each page mapped and unmapped; for each retry a probe of every address seen so far.

use portcullis::addr::{Iova, PageSize, Permissions, PhysAddr};
use portcullis::bounce::pool::Way;
use portcullis::domain::{Policy, PolicyError};
use portcullis_model::{DeviceId, Iommu, Segment};
use rustc_hash::FxHashMap;

use super::data::mix;
use super::live::{Copied, Live};
use super::port::Port;

/// The page of probes, for every format.
const PAGE_SHIFT: u32 = 12;

/// The windows of lazy protection, in nanoseconds: a millisecond, and the usual 10.
const WINDOWS_NS: [u64; 2] = [1_000_000, 10_000_000];

/// Additional attempts of the hostile device: for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Operations of the trace from one retry of everything to the next; at least 1.
    pub every_ops: u64,
    /// With each retry, change the policy of every domain that translates, to strict or lazy by this seed. The requested policies hold
    /// until the first change.
    pub change_policies: Option<u64>,
}

/// The promise of one policy, and the device's findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Promise {
    /// Mappings that ended under it.
    pub unmaps: u64,
    /// Their addresses that were reached, as it allows.
    pub stale: u64,
    /// Their addresses that were reached against its promise.
    pub violations: u64,
}

/// The device's findings, by the policy at each unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InForce {
    /// Strict protection: also batches and rings, at their commit.
    pub strict: Promise,
    /// Lazy protection.
    pub lazy: Promise,
    /// Live mappings whose address led elsewhere.
    pub astray: u64,
    /// Attempts.
    pub tries: u64,
    /// Changes of a domain's policy.
    pub changes: u64,
    /// Changes that the hardware did not confirm, or the domain refused.
    pub refused: u64,
}

impl InForce {
    /// Broken promises of all kinds.
    pub fn violations(&self) -> u64 {
        self.strict.violations + self.lazy.violations + self.astray + self.refused
    }
}

/// The expected target of an address.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// The number of the physical page.
    page: u64,
    copied: Copied,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Live,
    /// Ended, by lazy protection or not; it may be reached before this time.
    Ended {
        lazily: bool,
        until_ns: u64,
    },
}

/// The device's memory, and a random generator.
#[derive(Debug)]
pub(super) struct Hostile {
    retry: Retry,
    random: u64,
    until_retry: u64,
    seen: Vec<FxHashMap<u64, Seen>>,
    pub found: InForce,
}

impl Hostile {
    pub(super) fn new(retry: Retry) -> Self {
        // Neighbouring seeds begin far apart.
        let random = mix(retry.change_policies.unwrap_or(0)) | 1;
        let until_retry = retry.every_ops.max(1);
        Self { retry, random, until_retry, seen: Vec::new(), found: InForce::default() }
    }

    /// The longest window that it sets; `None` if it sets none.
    pub(super) fn longest_window_ns(&self) -> Option<u64> {
        self.retry.change_policies.and(WINDOWS_NS.into_iter().max())
    }

    pub(super) fn is_due(&mut self) -> bool {
        self.until_retry -= 1;
        let due = self.until_retry == 0;
        if due {
            self.until_retry = self.retry.every_ops.max(1);
        }
        due
    }

    /// A device has been given a mapping.
    pub(super) fn mapped(&mut self, live: &Live) {
        for (iova, page) in pages(live.pieces()) {
            self.of(live.device).insert(iova, Seen { page, copied: live.copied, state: State::Live });
        }
    }

    /// A mapping has ended under `policy`.
    pub(super) fn ended(&mut self, live: &Live, policy: Policy, now_ns: u64) {
        let (lazily, until_ns) = match policy {
            Policy::Lazy { window_ns } => (true, now_ns.saturating_add(window_ns)),
            _ => (false, 0),
        };
        if lazily {
            self.found.lazy.unmaps += 1
        } else {
            self.found.strict.unmaps += 1
        }
        if live.copied == Copied::Pool(Way::Slot) {
            // The buffer keeps its address, and the promise stays.
            return;
        }
        for (iova, page) in pages(live.pieces()) {
            let state = State::Ended { lazily, until_ns };
            self.of(live.device).insert(iova, Seen { page, copied: live.copied, state });
        }
    }

    /// Changes the policy of the domain of `port`, the device's number `device`, if requested. Returns whether it did.
    pub(super) fn change(&mut self, device: usize, port: &Port) -> bool {
        if self.retry.change_policies.is_none() {
            return false;
        }
        let policy = match self.dice() % 4 {
            0 | 1 => Policy::Strict,
            2 => Policy::Lazy { window_ns: WINDOWS_NS[0] },
            _ => Policy::Lazy { window_ns: WINDOWS_NS[1] },
        };
        let old = port.driver.domain_policy();
        let result: Result<(), PolicyError> = port.driver.set_domain_policy(policy);
        self.found.changes += 1;
        self.found.refused += u64::from(result.is_err());
        let stricter = match (policy, old) {
            (Policy::Strict, _) => true,
            (Policy::Lazy { window_ns }, Policy::Lazy { window_ns: old }) => window_ns < old,
            _ => false,
        };
        if stricter {
            // The change has returned: the stricter promise holds for earlier ends, too.
            for seen in self.of(device).values_mut() {
                if let State::Ended { until_ns, .. } = &mut seen.state {
                    *until_ns = 0;
                }
            }
        }
        true
    }

    /// The device `device` tries every address it ever saw. All timers due by `now_ns` have run.
    pub(super) fn try_all(&mut self, iommu: &Iommu, device: usize, now_ns: u64) {
        let Some(seen) = self.seen.get(device) else { return };
        for (&iova, seen) in seen {
            self.found.tries += 1;
            let at = Iova::new(iova << PAGE_SHIFT);
            let id = DeviceId(device as u32);
            let reached = [Permissions::READ, Permissions::WRITE]
                .into_iter()
                .find_map(|access| iommu.probe(id, at, access))
                .map(|phys| phys.align_down(PageSize::SIZE_4K));
            let own = PhysAddr::new(seen.page << PAGE_SHIFT);
            let same = reached.is_some_and(|reached| seen.copied.allows(reached, own));
            match seen.state {
                // The tables no longer have mappings that wait for a commit; the well-behaved device checks live ones.
                _ if reached.is_none() => {}
                State::Live => self.found.astray += u64::from(!same),
                State::Ended { lazily, until_ns } => {
                    let promise = if lazily { &mut self.found.lazy } else { &mut self.found.strict };
                    let kept = lazily && same && now_ns < until_ns;
                    *(if kept { &mut promise.stale } else { &mut promise.violations }) += 1;
                }
            }
        }
    }

    fn of(&mut self, device: usize) -> &mut FxHashMap<u64, Seen> {
        if self.seen.len() <= device {
            self.seen.resize_with(device + 1, FxHashMap::default);
        }
        &mut self.seen[device]
    }

    fn dice(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }
}

/// The numbers of the pages of addresses and of memory that `pieces` touch.
fn pages(pieces: impl Iterator<Item = Segment>) -> impl Iterator<Item = (u64, u64)> {
    pieces.flat_map(|Segment { iova, phys, len }| {
        let (first, last) = (iova.get() >> PAGE_SHIFT, iova.get().saturating_add(len - 1) >> PAGE_SHIFT);
        let page = phys.get() >> PAGE_SHIFT;
        (first..=last).map(move |iova| (iova, page + (iova - first)))
    })
}
