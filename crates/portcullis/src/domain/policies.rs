//! [`Policies`]: a policy for all devices, with exceptions. Each domain that it governs has the
//! strictest of its devices' policies, unless a call has returned an error.

use alloc::vec::Vec;

use super::governed::Governed;
use super::{Domain, Policy, PolicyError};
use crate::addr::DeviceId;
use crate::heap::{Shared, Weak, room_for};
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::Mutex;

/// Which policy each device's domain gets: a default for all, and exceptions, passthrough among them. Both may be
/// changed while I/O runs.
///
/// Its user asks it when a domain is made; it tells the domains that it [governs](Self::govern) of
/// changes. Calls are for a control path: they allocate, and changes wait for the hardware, one
/// domain after the other. The caller holds no lock and no CPU, and is no interrupt handler.
///
/// ```
/// use portcullis::domain::{Policies, Policy};
/// use portcullis::addr::DeviceId;
///
/// let policies = Policies::new(Policy::Strict);
/// // A device that is trusted, and whose every microsecond counts.
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
    /// In the order of the devices.
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

    /// The policy with which the domain of `device` is to be made. O(log exceptions).
    pub fn policy_for(&self, device: DeviceId) -> Policy {
        self.state.lock().policy_for(device)
    }

    /// Has the domain of `device` follow from now on, until it is dropped, and gives it the policy that the device
    /// has by now. A domain of several devices keeps to the strictest of their policies.
    ///
    /// O(devices that are governed), and a flush unless the domain's policy becomes weaker.
    ///
    /// # Errors
    /// As [`Domain::set_policy`]; the domain follows all the same, but for [`PolicyError::OutOfMemory`], after which nothing has
    /// changed.
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

    /// Changes the default, for all that are no exceptions. O(devices that are governed, squared), and a flush for each
    /// domain whose policy does not become weaker.
    ///
    /// # Errors
    /// The first error that [`Domain::set_policy`] reports; every domain is told all the same. To
    /// or from passthrough the change holds for domains that are made from now on, and
    /// [`PolicyError::Translation`] says that others are as they were. After [`PolicyError::OutOfMemory`] nothing has changed.
    pub fn set_default(&self, policy: Policy) -> Result<(), PolicyError> {
        self.change(|state| {
            state.default = policy;
            Ok(None)
        })
    }

    /// Makes `device` an exception with a policy of its own; with `None` it follows the default
    /// again. Costs as [`set_default`](Self::set_default), for the domains of this device.
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

    /// Has `change` change the policies, and tells all governed domains of it. `change` returns the
    /// device whose policy it has changed; `None` for all devices that are no exceptions.
    fn change(
        &self,
        change: impl FnOnce(&mut State) -> Result<Option<DeviceId>, PolicyError>,
    ) -> Result<(), PolicyError> {
        // The change is stored under the lock, so that changes reach every domain in one order. It
        // is flushed without it, as a flush waits for hardware; and the handles are dropped without
        // it, as they may be the last. All of this is done also where nothing has changed: a caller
        // that asks again after a failure, or while another caller's change goes on, is to be sure
        // when the call returns.
        let mut result = Ok(());
        // A domain of several devices is told once. It is concerned where one of them is the device
        // that changes, or follows the default that does.
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

/// What leads to a domain of any kind, as long as it is there.
fn governed<M: Mapper, P: Platform>(domain: &Shared<Domain<M, P>>) -> Weak<dyn Governed> {
    // SAFETY: an unsizing coercion.
    Shared::downgrade(&unsafe { Shared::cast::<dyn Governed>(domain.clone(), |counted| counted) })
}

impl State {
    fn policy_for(&self, device: DeviceId) -> Policy {
        self.exception(device).map_or(self.default, |at| self.exceptions[at].1)
    }

    /// Where the exception for `device` stands, or is to stand.
    fn exception(&self, device: DeviceId) -> Result<usize, usize> {
        self.exceptions.binary_search_by_key(&device, |(device, _)| *device)
    }

    /// Stores the strictest of the policies of all devices of `domain`, of which `device` is one.
    /// Returns whether a flush must follow.
    fn tell(
        &self,
        device: DeviceId,
        weak: &Weak<dyn Governed>,
        domain: &dyn Governed,
    ) -> Result<bool, PolicyError> {
        let own = self.policy_for(device);
        // Otherwise passthrough would give way to another device's stricter policy, and the caller
        // would not be told that it is impossible.
        domain.may_have(own)?;
        let its = self.governed.iter().filter(|(_, other)| Weak::ptr_eq(other, weak));
        let strictest = |one: Policy, other: Policy| if one.is_weaker_than(other) { other } else { one };
        domain.store_policy(its.map(|(device, _)| self.policy_for(*device)).fold(own, strictest))
    }
}
