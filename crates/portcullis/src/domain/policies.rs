//! [`Policies`]: a default policy for all devices, with exceptions. Each governed domain has the strictest policy of its devices,
//! unless a call has returned an error.

use alloc::vec::Vec;

use super::governed::Governed;
use super::{Domain, Policy, PolicyError};
use crate::addr::DeviceId;
use crate::heap::{Shared, Weak, room_for};
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::Mutex;

/// The policy for each device's domain: a default, and exceptions, passthrough among them. Both may change while I/O runs.
///
/// An embedder asks for the policy when it makes a domain, and registers the domain by [`govern`](Self::govern) to have it follow
/// changes.
///
/// Context: control paths. Calls allocate, and changes wait for the hardware, one domain after the other. The caller holds no lock and no
/// CPU, and is no interrupt handler.
///
/// ```
/// use portcullis::domain::{Policies, Policy};
/// use portcullis::addr::DeviceId;
///
/// let policies = Policies::new(Policy::Strict);
/// // A trusted device whose latency counts.
/// let capture = DeviceId(0x0300);
/// policies.except(capture, Some(Policy::Passthrough))?;
/// assert_eq!(policies.policy_for(capture), Policy::Passthrough);
/// assert_eq!(policies.policy_for(DeviceId(0x0400)), Policy::Strict);
/// # Ok::<(), portcullis::domain::PolicyError>(())
/// ```
pub struct Policies {
    state: Mutex<State>,
}

struct State {
    default: Policy,
    exceptions: Vec<(DeviceId, Policy)>,
    governed: Vec<(DeviceId, Weak<dyn Governed>)>,
}

impl core::fmt::Debug for Policies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let state = self.state.lock();
        let mut all = f.debug_struct("Policies");
        all.field("default", &state.default).field("exceptions", &state.exceptions).finish()
    }
}

impl Policies {
    /// Makes a set of policies that gives every device `default`.
    pub fn new(default: Policy) -> Self {
        let state = State { default, exceptions: Vec::new(), governed: Vec::new() };
        Self { state: Mutex::new(state) }
    }

    /// The policy for a new domain of `device`. O(log exceptions).
    pub fn policy_for(&self, device: DeviceId) -> Policy {
        self.state.lock().policy_for(device)
    }

    /// Makes the domain of `device` follow this policy set until the domain is dropped, and gives it the device's current policy. A domain
    /// with several devices follows the strictest of their policies.
    ///
    /// O(governed devices), and a flush unless the domain's policy becomes weaker.
    ///
    /// # Errors
    /// As [`Domain::set_policy`]; the domain follows nevertheless. After [`PolicyError::OutOfMemory`] nothing has changed.
    pub fn govern<M: Mapper, P: Platform>(
        &self,
        device: DeviceId,
        domain: &Shared<Domain<M, P>>,
    ) -> Result<(), PolicyError> {
        let stored = {
            let mut state = self.state.lock();
            state.governed.retain(|(_, domain)| domain.owners() > 0);
            let weak = governed(domain);
            let is_there = |(other, its): &(DeviceId, _)| *other == device && Weak::ptr_eq(its, &weak);
            if !state.governed.iter().any(is_there) {
                state.governed.try_reserve(1).map_err(|_| PolicyError::OutOfMemory)?;
                state.governed.push((device, weak.clone()));
            }
            state.tell(device, &weak, &**domain)
        };
        if stored? { domain.flush_stale() } else { Ok(()) }
    }

    /// Changes the default, for all devices without an exception. O(governed devices, squared), and a flush for each domain whose policy does
    /// not become weaker.
    ///
    /// # Errors
    /// The first error that [`Domain::set_policy`] reports; every other domain is changed nevertheless. A change to or from passthrough
    /// holds for domains that are made later, and returns [`PolicyError::Translation`], as existing ones stay as they were. After
    /// [`PolicyError::OutOfMemory`] nothing has changed.
    pub fn set_default(&self, policy: Policy) -> Result<(), PolicyError> {
        self.change(|state| {
            state.default = policy;
            Ok(None)
        })
    }

    /// Gives `device` an exception with a policy of its own; `None` ends the exception. Costs as [`set_default`](Self::set_default), for the
    /// domains of this device.
    ///
    /// # Errors
    /// As [`set_default`](Self::set_default).
    pub fn except(&self, device: DeviceId, policy: Option<Policy>) -> Result<(), PolicyError> {
        self.change(|state| {
            match (policy, state.exception(device)) {
                (Some(policy), Ok(at)) => state.exceptions[at].1 = policy,
                (Some(policy), Err(at)) => {
                    state.exceptions.try_reserve(1).map_err(|_| PolicyError::OutOfMemory)?;
                    state.exceptions.insert(at, (device, policy));
                }
                (None, Ok(at)) => _ = state.exceptions.remove(at),
                (None, Err(_)) => {}
            }
            Ok(Some(device))
        })
    }

    /// Changes the policies by `change`, and applies that to all governed domains. `change` returns the device whose policy changed, or `None`
    /// for all devices without an exception.
    fn change(
        &self,
        change: impl FnOnce(&mut State) -> Result<Option<DeviceId>, PolicyError>,
    ) -> Result<(), PolicyError> {
        // The policy is stored under the lock, so that changes reach every domain in one order. The flush waits for hardware, so it runs
        // without the lock, and so does the drop of the handles, which may be the last. All of it happens even if the policy stays the same:
        // a caller may retry after a failure, or run beside another caller's change, and relies on the flush when the call returns.
        let mut result = Ok(());
        // A domain of several devices is changed once, if one of them changes or follows the changed default.
        let mut told: Vec<(Shared<dyn Governed>, bool)>;
        {
            let mut state = self.state.lock();
            told = room_for(state.governed.len()).map_err(|_| PolicyError::OutOfMemory)?;
            let only = change(&mut state)?;
            let concerned = state.governed.iter().filter(|(device, _)| match only {
                Some(only) => *device == only,
                None => state.exception(*device).is_err(),
            });
            for (device, weak) in concerned {
                let Some(domain) = weak.upgrade() else { continue };
                let stored = match told.iter().any(|(other, _)| Shared::ptr_eq(other, &domain)) {
                    true => Ok(false),
                    false => state.tell(*device, weak, &*domain),
                };
                told.push((domain, stored == Ok(true)));
                result = result.and(stored.map(|_| ()));
            }
        }
        let flushes = told.iter().filter(|(_, flush)| *flush);
        flushes.fold(result, |result, (domain, _)| result.and(domain.flush_stale()))
    }
}

fn governed<M: Mapper, P: Platform>(domain: &Shared<Domain<M, P>>) -> Weak<dyn Governed> {
    // SAFETY: the closure is an unsizing coercion: the same value, by the same pointer.
    Shared::downgrade(&unsafe { Shared::cast::<dyn Governed>(domain.clone(), |counted| counted) })
}

impl State {
    fn policy_for(&self, device: DeviceId) -> Policy {
        self.exception(device).map_or(self.default, |at| self.exceptions[at].1)
    }

    fn exception(&self, device: DeviceId) -> Result<usize, usize> {
        self.exceptions.binary_search_by_key(&device, |(device, _)| *device)
    }

    /// Stores the strictest policy of all devices of `domain`, one of which is `device`. Returns whether a flush must follow.
    fn tell(
        &self,
        device: DeviceId,
        weak: &Weak<dyn Governed>,
        domain: &dyn Governed,
    ) -> Result<bool, PolicyError> {
        let own = self.policy_for(device);
        // Otherwise another device's stricter policy would win over passthrough, and the caller would not learn that passthrough is impossible.
        domain.may_have(own)?;
        let its = self.governed.iter().filter(|(_, other)| Weak::ptr_eq(other, weak));
        let strictest = |one: Policy, other: Policy| if one.is_weaker_than(other) { other } else { one };
        domain.store_policy(its.map(|(device, _)| self.policy_for(*device)).fold(own, strictest))
    }
}
