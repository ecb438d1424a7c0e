//! Who changes policies, and what may be relied on from when on.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use portcullis::domain::Policy;
use portcullis::heap;

use super::paint::{Paint, Painted};
use super::threads::{Dev, Dom};
use super::worker::Shared;
use crate::played::Played;
use crate::queued::Nic;
use crate::rig::Mapper;

/// Mappings that end by one policy.
pub struct Group {
    pub nic: Nic<Mapper, Played>,
    pub device: Dev,
    /// Not 0 from when a change to strict has returned until the next one that weakens it is about to be asked for.
    strict: AtomicU64,
    /// What lazy protection has let go of.
    pub stale: Mutex<Vec<Painted>>,
}

impl Group {
    pub fn new(nic: Nic<Mapper, Played>, strict: bool) -> Self {
        let device = nic.dma().clone();
        Self { nic, device, strict: AtomicU64::new(strict.into()), stale: Mutex::default() }
    }

    /// An unmap has returned just now. Whether the device reaches nothing of it for sure: either a change to strict
    /// had returned before the unmap did, or it returned afterwards and covered the unmap. And nobody had begun to
    /// weaken it again.
    pub fn is_strict_now(&self) -> bool {
        // Pairs with the one in `weaken`: who has unmapped by the weaker policy sees the 0 before it.
        fence(Ordering::SeqCst);
        self.strict.load(Ordering::Relaxed) != 0
    }

    fn weaken(&self) {
        self.strict.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// Which group is which.
pub const BY_DOMAIN: usize = 0;
pub const BY_DEVICE: usize = 1;

pub struct Changes {
    pub domain: heap::Shared<Dom>,
    own: Policy,
    exception: Option<Policy>,
    /// Changes after which something was closed, and how much that was.
    pub closing: u64,
    pub closed: u64,
}

/// Whose policy is changed.
enum Place {
    Domain,
    Device,
}

impl Changes {
    pub fn new(domain: heap::Shared<Dom>, own: Policy) -> Self {
        Self { domain, own, exception: None, closing: 0, closed: 0 }
    }

    /// Makes one change, of the place and to the policy that `random` says.
    pub fn change(&mut self, random: u64, shared: &Shared<'_>) {
        let &Shared { iommu, groups, free, findings, .. } = shared;
        let policy = match random % 5 {
            0 | 1 => Policy::Strict,
            2 => Policy::Lazy { window_ns: 300_000 },
            3 => Policy::LAZY,
            _ => Policy::Lazy { window_ns: 1 << 60 },
        };
        let place = if random / 8 % 3 < 2 { Place::Domain } else { Place::Device };
        let exception = (random / 64 % 4 > 1).then_some(policy);
        let old = match place {
            Place::Device => self.exception.unwrap_or(self.own),
            _ => self.own,
        };
        match place {
            Place::Device => self.exception = exception,
            _ => self.own = policy,
        }
        let effective = [self.own, self.exception.unwrap_or(self.own)];
        for (group, policy) in groups.iter().zip(effective) {
            if policy != Policy::Strict {
                group.weaken();
            }
        }
        let take = |group: &Group| std::mem::take(&mut *group.stale.lock().unwrap());
        let mut before: Vec<_> = groups.iter().map(take).collect();
        match place {
            Place::Domain => self.domain.set_policy(policy).unwrap(),
            Place::Device => groups[BY_DEVICE].device.set_policy(exception).unwrap(),
        }
        let new = match place {
            Place::Device => effective[BY_DEVICE],
            _ => self.own,
        };
        if new != Policy::Strict && !is_stricter(new, old) {
            // Nothing was promised.
            for (group, before) in groups.iter().zip(&mut before) {
                group.stale.lock().unwrap().append(before);
            }
            return;
        }
        // Those whose policy this is must be unreachable if they were unmapped before the call returned, others if
        // they were before it began.
        let governed = |index: usize| match place {
            Place::Device => index == BY_DEVICE,
            _ => index == BY_DOMAIN || index == BY_DEVICE && self.exception.is_none(),
        };
        for (index, group) in groups.iter().enumerate() {
            if new == Policy::Strict && governed(index) {
                before[index].append(&mut take(group));
                group.strict.store(1, Ordering::Relaxed);
            }
        }
        self.closing += 1;
        for mut painted in before.into_iter().flatten() {
            painted.paint(Paint::Closed);
            self.closed += 1;
            // At once, before anything else ends the exposure.
            findings.try_buffer(iommu, &painted);
            free.lock().unwrap().push(painted);
        }
    }
}

fn is_stricter(new: Policy, old: Policy) -> bool {
    match (new, old) {
        (Policy::Strict, Policy::Lazy { .. }) => true,
        (Policy::Lazy { window_ns }, Policy::Lazy { window_ns: old }) => window_ns < old,
        _ => false,
    }
}
