//! What a device may reach, page by page, as the documentation of each call says.

use std::collections::{BTreeMap, BTreeSet};

use portcullis::addr::{Iova, Permissions};
use portcullis_model::{DeviceId, Iommu};

pub const PAGE: u64 = 4096;
pub const DEVICE: DeviceId = DeviceId(7);

/// The most bytes of a range that the model follows. A longer one is unmapped as soon as it is mapped, unlooked at.
pub const FOLLOWED: u64 = 16 << 20;

/// Pages that the device tries after each step, at the most.
const TRIED: usize = 96;

/// What is promised of a page at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The device reaches it.
    Live,
    /// It does if an entry of the registrations is still there.
    Registered,
    /// It may, for good: an unmap failed.
    Kept,
    /// It may, until a flush is confirmed, or this batch is.
    Until(End),
    /// It does not, but the address is not given to anybody before this batch is confirmed.
    Reserved(End),
}

/// What ends a page that is unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A flush of the domain.
    Flush,
    /// The same; and it may have come.
    Unsure,
    /// The commit of the batch by number.
    Raw,
    /// The commit of the batch by type.
    Typed,
    /// The ring's commit.
    Ring,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    phys: u64,
    permissions: Permissions,
    state: State,
}

/// All pages that are open, or may be.
#[derive(Debug, Default)]
pub struct Model {
    /// The tables have no pages that may be written and not read.
    pub write_reads: bool,
    pages: BTreeMap<u64, Page>,
    /// Addresses that the device knows.
    seen: BTreeSet<u64>,
    turn: usize,
}

impl Model {
    pub fn new(write_reads: bool) -> Self {
        Self { write_reads, ..Self::default() }
    }

    /// Pages from `iova` on were mapped to those of `phys`.
    pub fn map(&mut self, iova: u64, phys: impl IntoIterator<Item = u64>, permissions: Permissions) {
        self.open(iova, phys, permissions, State::Live);
    }

    /// The same for a registration, which may have been there before.
    pub fn register(&mut self, iova: u64, phys: impl IntoIterator<Item = u64>, permissions: Permissions) {
        self.open(iova, phys, permissions, State::Registered);
    }

    fn open(
        &mut self,
        iova: u64,
        phys: impl IntoIterator<Item = u64>,
        permissions: Permissions,
        state: State,
    ) {
        let first = iova & !(PAGE - 1);
        let reads = self.write_reads && permissions.allows(Permissions::WRITE);
        let permissions = if reads { Permissions::READ_WRITE } else { permissions };
        for (at, phys) in (first..).step_by(PAGE as usize).zip(phys) {
            let old = self.pages.insert(at, Page { phys, permissions, state });
            // Idle registrations go where their room is needed.
            let free =
                old.is_none_or(|old| matches!(old.state, State::Registered | State::Until(End::Unsure)));
            assert!(free, "{at:#x} is given to {phys:#x} while it is {old:?}");
            self.seen.insert(at);
        }
    }

    /// Whether all pages of a range are live.
    pub fn is_live(&self, iova: u64, len: u64) -> bool {
        pages(iova, len).all(|at| self.pages.get(&at).is_some_and(|page| page.state == State::Live))
    }

    /// The pages of a range are unmapped: what is open there now is as `state` says, or closed.
    pub fn unmap(&mut self, iova: u64, len: u64, state: Option<State>) {
        let (first, last) = (iova & !(PAGE - 1), iova.saturating_add(len.saturating_sub(1)));
        let there: Vec<u64> = self.pages.range(first..=last.max(first)).map(|(at, _)| *at).collect();
        for at in there {
            let Some(page) = self.pages.get_mut(&at) else { continue };
            // What waits has no translation any more, and its own end to wait for; or it may have one, in a ring.
            if matches!(page.state, State::Until(_) | State::Reserved(_)) {
                continue;
            }
            match state {
                // An idle registration may go where its room is needed, and confirms what somebody has unmapped of it.
                Some(State::Until(End::Flush)) if page.state == State::Registered => {
                    page.state = State::Until(End::Unsure);
                }
                Some(state) => page.state = state,
                None => drop(self.pages.remove(&at)),
            }
        }
    }

    /// A flush was confirmed that began after everything that is unmapped now.
    pub fn flushed(&mut self) {
        self.pages.retain(|_, page| match page.state {
            State::Until(End::Flush | End::Unsure) => false,
            State::Until(end @ (End::Raw | End::Typed)) => {
                page.state = State::Reserved(end);
                true
            }
            _ => true,
        });
    }

    /// A flush was confirmed, and it is not known what came before it.
    pub fn flushed_meanwhile(&mut self) {
        for page in self.pages.values_mut().filter(|page| page.state == State::Until(End::Flush)) {
            page.state = State::Until(End::Unsure);
        }
    }

    /// Every window is over.
    pub fn expired(&mut self) {
        self.pages.retain(|_, page| !matches!(page.state, State::Until(End::Flush | End::Unsure)));
    }

    /// The batch, or the ring, was confirmed.
    pub fn committed(&mut self, end: End) {
        self.pages.retain(|_, page| page.state != State::Until(end) && page.state != State::Reserved(end));
    }

    /// Registrations of `memory`, or all, were unmapped.
    pub fn forget(&mut self, memory: Option<(u64, u64)>) {
        self.pages.retain(|_, page| {
            let inside = memory.is_none_or(|(phys, len)| {
                page.phys >= phys && page.phys + (PAGE - 1) <= phys.saturating_add(len.saturating_sub(1))
            });
            page.state != State::Registered || !inside
        });
    }

    /// The device knows these addresses, too.
    pub fn met(&mut self, addresses: impl IntoIterator<Item = u64>) {
        self.seen.extend(addresses);
    }

    /// An address that the device knows.
    pub fn known(&self, which: usize) -> Option<u64> {
        self.seen.iter().nth(which % self.seen.len().max(1)).copied()
    }

    /// All that was open is closed, but for what could not be unmapped.
    pub fn close(&mut self) {
        self.pages.retain(|_, page| page.state == State::Kept);
    }

    /// The device tries what it knows: all, where that is little, else a part of it. `is_user` tells memory that is
    /// open only where the model says so from the library's own.
    pub fn attack(&mut self, iommu: &Iommu, is_user: impl Fn(u64) -> bool) {
        if self.seen.len() > 8 * TRIED {
            // It forgets some of what is closed.
            let pages = &self.pages;
            self.seen.retain(|at| pages.contains_key(at));
        }
        self.turn += 1;
        let step = self.seen.len().div_ceil(TRIED).max(1);
        for at in self.seen.iter().skip(self.turn % step).step_by(step) {
            for access in [Permissions::READ, Permissions::WRITE] {
                let mut reached = None;
                let _ = iommu.translate_each(DEVICE, Iova::new(*at), 1, access, |_, phys, _| {
                    reached = Some(phys.get() & !(PAGE - 1));
                });
                let page = self.pages.get(at);
                match (reached, page) {
                    (Some(phys), Some(page)) if is_user(phys) || page.state == State::Live => {
                        let open = !matches!(page.state, State::Reserved(_));
                        let right = open && page.phys == phys && page.permissions.allows(access);
                        assert!(right, "{access:?} at {at:#x} reaches {phys:#x}, which is {page:?}");
                    }
                    (Some(phys), _) => {
                        assert!(!is_user(phys), "{access:?} at {at:#x} reaches {phys:#x}, which is closed");
                    }
                    (None, Some(page)) => {
                        let live = page.state == State::Live && page.permissions.allows(access);
                        assert!(!live, "{access:?} at {at:#x} fails, but {page:?}");
                    }
                    (None, None) => {}
                }
            }
        }
    }
}

/// The first addresses of the pages of a range.
pub fn pages(iova: u64, len: u64) -> impl Iterator<Item = u64> {
    (iova & !(PAGE - 1)..=iova.saturating_add(len.saturating_sub(1))).step_by(PAGE as usize)
}

/// The pages of memory of a list, in order.
pub fn pages_of(list: &[portcullis::addr::PhysSegment]) -> Vec<u64> {
    list.iter().flat_map(|segment| pages(segment.phys.get(), segment.len)).collect()
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use portcullis_model::{Context, IommuConfig, Memory};

    use super::*;

    const AT: u64 = 0x7000;

    /// An address is given out again only where nobody waits for its end: an oracle that lets more pass finds nothing.
    #[test]
    fn an_address_that_is_given_out_too_early_is_noticed() {
        let all = [End::Flush, End::Unsure, End::Raw, End::Typed, End::Ring];
        let waits = all.into_iter().flat_map(|end| [State::Until(end), State::Reserved(end)]);
        for state in waits.chain([State::Live, State::Registered, State::Kept]) {
            let mut model = Model::new(false);
            model.open(AT, [0x1000], Permissions::READ, state);
            let again = || model.map(AT, [0x2000], Permissions::READ);
            let is_free = matches!(state, State::Registered | State::Until(End::Unsure));
            assert_eq!(catch_unwind(AssertUnwindSafe(again)).is_ok(), is_free, "{state:?}");
        }
    }

    /// What becomes of a page in each state, in this order: live, registered, kept; until and reserved for each end.
    #[test]
    fn each_call_does_to_a_page_what_it_promises() {
        let ends = [End::Flush, End::Unsure, End::Raw, End::Typed, End::Ring];
        let mut states = vec![State::Live, State::Registered, State::Kept];
        states.extend(ends.map(State::Until));
        states.extend(ends.map(State::Reserved));
        let call = |call: &dyn Fn(&mut Model)| {
            let after = states.iter().map(|state| {
                let mut model = Model::new(false);
                model.open(AT, [0x1000], Permissions::READ, *state);
                call(&mut model);
                model.pages.get(&AT).map_or("-".into(), |page| match page.state {
                    State::Until(end) => format!("until {end:?}"),
                    State::Reserved(end) => format!("reserved {end:?}"),
                    state => format!("{state:?}"),
                })
            });
            after.collect::<Vec<_>>().join(", ")
        };
        let [closed, waits, committed] = [None, Some(State::Until(End::Flush)), Some(State::Until(End::Raw))]
            .map(|state| call(&|model: &mut Model| model.unmap(AT + 5, 1, state)));
        let elsewhere = call(&|model: &mut Model| model.unmap(AT + PAGE, PAGE, None));
        let rest = "until Flush, until Unsure, until Raw, until Typed, until Ring, reserved Flush, reserved Unsure, reserved Raw, \
                    reserved Typed, reserved Ring";
        assert_eq!(closed, format!("-, -, -, {rest}"));
        assert_eq!(waits, format!("until Flush, until Unsure, until Flush, {rest}"));
        assert_eq!(committed, format!("until Raw, until Raw, until Raw, {rest}"));
        assert_eq!(elsewhere, format!("Live, Registered, Kept, {rest}"));
        let reserved = "reserved Flush, reserved Unsure, reserved Raw, reserved Typed, reserved Ring";
        assert_eq!(
            call(&Model::flushed),
            format!("Live, Registered, Kept, -, -, reserved Raw, reserved Typed, until Ring, {reserved}")
        );
        let unsure = rest.replacen("until Flush", "until Unsure", 1);
        assert_eq!(call(&Model::flushed_meanwhile), format!("Live, Registered, Kept, {unsure}"));
        let expired = rest.replace("until Flush, until Unsure", "-, -");
        assert_eq!(call(&Model::expired), format!("Live, Registered, Kept, {expired}"));
        let raw = rest.replace("until Raw", "-").replace("reserved Raw", "-");
        assert_eq!(
            call(&|model: &mut Model| model.committed(End::Raw)),
            format!("Live, Registered, Kept, {raw}")
        );
        let forget = |memory| call(&|model: &mut Model| model.forget(memory));
        for (memory, is_gone) in [
            (None, true),
            (Some((0x1000, PAGE)), true),
            (Some((0x1000, PAGE - 1)), false),
            (Some((0x1001, PAGE)), false),
            (Some((0, 1 << 20)), true),
        ] {
            let registered = if is_gone { "-" } else { "Registered" };
            assert_eq!(forget(memory), format!("Live, {registered}, Kept, {rest}"), "{memory:x?}");
        }
        assert_eq!(call(&Model::close), "-, -, Kept".to_owned() + &", -".repeat(10));
    }

    /// A device that reaches every address finds what the model does not say of it.
    #[test]
    fn what_a_device_reaches_is_held_against_the_model() {
        let iommu = Iommu::new(IommuConfig::new(Memory::new(1 << 20)));
        iommu.attach(DEVICE, Context::Passthrough);
        let both = Permissions::READ_WRITE;
        for (page, is_right) in [
            (Some((AT, both, State::Live)), true),
            (Some((AT, both, State::Until(End::Flush))), true),
            (Some((AT, both, State::Kept)), true),
            (Some((AT, both, State::Reserved(End::Raw))), false),
            (Some((AT, Permissions::READ, State::Live)), false),
            (Some((AT, Permissions::WRITE, State::Until(End::Ring))), false),
            (Some((AT + PAGE, both, State::Live)), false),
            (None, false),
        ] {
            for is_user in [true, false] {
                let mut model = Model::new(false);
                model.met([AT]);
                if let Some((phys, permissions, state)) = page {
                    model.open(AT, [phys], permissions, state);
                }
                let attack = || model.attack(&iommu, |_| is_user);
                // What is the library's own is open whatever the model says, but for what is live.
                let is_live = page.is_some_and(|(.., state)| state == State::Live);
                let passes = is_right || !is_user && !is_live;
                assert_eq!(catch_unwind(AssertUnwindSafe(attack)).is_ok(), passes, "{page:x?} {is_user}");
            }
        }
        iommu.detach(DEVICE);
        for (state, passes) in
            [(State::Live, false), (State::Registered, true), (State::Until(End::Flush), true)]
        {
            let mut model = Model::new(false);
            model.open(AT, [AT], both, state);
            let attack = || model.attack(&iommu, |_| true);
            assert_eq!(catch_unwind(AssertUnwindSafe(attack)).is_ok(), passes, "{state:?}");
        }
    }
}
