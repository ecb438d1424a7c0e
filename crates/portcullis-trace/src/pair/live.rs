//! The table of live mappings, and of addresses that were unmapped before.
//!
//! A mapping is found by its device address (for syncs also from the middle) or by its list of physical addresses. Several mappings may
//! share either: without an IOMMU a buffer mapped twice has one address, and the kernel reuses an address before it has recorded the unmap
//! that freed it.
//!
//! Cost: O(log n) for n live mappings per address of a mapping.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use portcullis::addr::Direction;
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use smallvec::SmallVec;

use super::op::{DeviceId, MapId};
use crate::stretches::Stretches;

/// The most list entries that the kernel prints; only these can be compared.
const PRINTED: usize = 128;

/// Mappings below an address that are examined, nearest first, for one that contains it.
const NEIGHBOURS: usize = 64;

/// Live mappings of one address or list that are compared, oldest first, for an exact match. No driver maps the same memory as often, and a
/// file that seems to would keep a reader busy.
const ALIKE: usize = 1024;

/// Spans that are examined for the one of a sync: those of the neighbours' lists, as the kernel prints them.
const SPANS: usize = 32_768;

/// The calls that can end a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Class {
    Single,
    List,
    Coherent,
}

/// A range of a device's address space.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) addr: u64,
    pub(super) len: u64,
}

/// A live mapping.
#[derive(Debug)]
struct Slot {
    /// Its map event.
    seq: u64,
    dir: Direction,
    size: u64,
    spans: SmallVec<[Span; 1]>,
}

type Ids = SmallVec<[MapId; 2]>;
type Address = (DeviceId, Class, u64);

/// Identifies a list of physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ListKey {
    device: DeviceId,
    first: u64,
    entries: usize,
    hash: u64,
}

impl ListKey {
    pub(super) fn new(device: DeviceId, phys_addrs: &[u64]) -> Self {
        let printed = phys_addrs.get(..PRINTED).unwrap_or(phys_addrs);
        let mut hasher = FxHasher::default();
        printed.hash(&mut hasher);
        let first = printed.first().copied().unwrap_or(0);
        Self { device, first, entries: printed.len(), hash: hasher.finish() }
    }
}

/// The mapping of a sync.
pub(super) enum Hit {
    Inside { id: MapId, offset: u64 },
    PastEnd { left: u64 },
    Nothing,
}

/// All live mappings.
#[derive(Debug, Default)]
pub(super) struct Live {
    slots: Vec<Option<Slot>>,
    free: Vec<MapId>,
    by_address: BTreeMap<Address, Ids>,
    by_list: FxHashMap<ListKey, Ids>,
    /// Addresses and lists that were unmapped at least once, and all addresses inside them.
    gone: FxHashSet<Address>,
    gone_lists: FxHashSet<ListKey>,
    gone_spans: FxHashMap<DeviceId, Stretches>,
}

impl Live {
    /// A number that no live mapping has.
    pub(super) fn take_id(&mut self) -> MapId {
        match self.free.pop() {
            Some(id) => id,
            None => {
                self.slots.push(None);
                // 2^32 live mappings would need hundreds of gigabytes of trace first.
                MapId::try_from(self.slots.len() - 1).unwrap_or(MapId::MAX)
            }
        }
    }

    pub(super) fn free_id(&mut self, id: MapId) {
        self.free.push(id);
    }

    /// Adds a mapping, made at event `seq`, with the device addresses `spans`.
    pub(super) fn insert(
        &mut self,
        device: DeviceId,
        class: Class,
        seq: u64,
        dir: Direction,
        spans: SmallVec<[Span; 1]>,
        list: Option<ListKey>,
    ) -> MapId {
        let id = self.take_id();
        for span in &spans {
            self.by_address.entry((device, class, span.addr)).or_default().push(id);
        }
        if let Some(key) = list {
            self.by_list.entry(key).or_default().push(id);
        }
        let size = spans.iter().fold(0, |sum: u64, span| sum.saturating_add(span.len));
        if let Some(slot) = self.slots.get_mut(id as usize) {
            *slot = Some(Slot { seq, dir, size, spans });
        }
        id
    }

    /// Ends the mapping at `addr` that matches `size` and `dir` best among those made before event `before`. The direction of coherent
    /// memory is ignored: kernels have printed a wrong one.
    pub(super) fn remove_at(
        &mut self,
        key: Address,
        size: u64,
        dir: Direction,
        before: u64,
    ) -> Option<MapId> {
        let id = {
            let ids = self.by_address.get(&key)?;
            let old = || {
                ids.iter().filter_map(|&id| Some((id, self.slot(id)?))).filter(|(_, slot)| slot.seq < before)
            };
            // The oldest match: if an address is reused before its unmap is recorded, the unmap is for the older one.
            let any = key.1 == Class::Coherent;
            let exact = old().take(ALIKE).find(|(_, slot)| slot.size == size && (any || slot.dir == dir));
            exact.or_else(|| old().next_back())?.0
        };
        self.remove(key.0, key.1, id, None);
        Some(id)
    }

    /// Ends the mapping of the list `key`, and returns its device addresses.
    pub(super) fn remove_list(
        &mut self,
        key: ListKey,
        dir: Direction,
    ) -> Option<(MapId, SmallVec<[Span; 1]>)> {
        let id = {
            let ids = self.by_list.get(&key)?;
            let same = ids.iter().take(ALIKE).find(|&&id| self.slot(id).is_some_and(|slot| slot.dir == dir));
            same.or_else(|| ids.last()).copied()?
        };
        let spans = self.remove(key.device, Class::List, id, Some(key))?;
        self.gone_lists.insert(key);
        Some((id, spans))
    }

    /// Whether the address was unmapped before; records that it is.
    pub(super) fn note_gone(&mut self, key: Address, len: u64) -> bool {
        let (device, _, addr) = key;
        if let Some(more) = len.checked_sub(1) {
            self.gone_spans.entry(device).or_default().add(addr, addr.saturating_add(more));
        }
        !self.gone.insert(key)
    }

    /// Whether the list was unmapped before; records that it is.
    pub(super) fn note_list_gone(&mut self, key: ListKey) -> bool {
        !self.gone_lists.insert(key)
    }

    /// Whether some mapping with `addr` was unmapped before.
    pub(super) fn is_gone(&self, device: DeviceId, addr: u64) -> bool {
        self.gone_spans.get(&device).is_some_and(|spans| spans.holds(addr))
    }

    /// The mapping of `device` that has the `len` bytes at `addr`.
    pub(super) fn find(&self, device: DeviceId, addr: u64, len: u64) -> Hit {
        let mut nearest = Hit::Nothing;
        let mut spans_left = SPANS;
        for class in [Class::Single, Class::List, Class::Coherent] {
            let below = self.by_address.range((device, class, 0)..=(device, class, addr));
            for (&(_, _, start), ids) in below.rev().take(NEIGHBOURS) {
                for &id in ids.iter().rev() {
                    let Some(slot) = self.slot(id) else { continue };
                    let mut offset = 0u64;
                    for span in &slot.spans {
                        if spans_left == 0 {
                            return nearest;
                        }
                        spans_left -= 1;
                        let inside = addr - start;
                        if span.addr == start && inside < span.len {
                            let left = span.len - inside;
                            if len <= left {
                                return Hit::Inside { id, offset: offset.saturating_add(inside) };
                            }
                            nearest = Hit::PastEnd { left };
                        }
                        offset = offset.saturating_add(span.len);
                    }
                }
            }
        }
        nearest
    }

    fn slot(&self, id: MapId) -> Option<&Slot> {
        self.slots.get(id as usize)?.as_ref()
    }

    fn remove(
        &mut self,
        device: DeviceId,
        class: Class,
        id: MapId,
        list: Option<ListKey>,
    ) -> Option<SmallVec<[Span; 1]>> {
        let slot = self.slots.get_mut(id as usize)?.take()?;
        for span in &slot.spans {
            let key = (device, class, span.addr);
            self.note_gone(key, span.len);
            if let Some(ids) = self.by_address.get_mut(&key) {
                forget(ids, id);
                if ids.is_empty() {
                    self.by_address.remove(&key);
                }
            }
        }
        if let Some(key) = list
            && let Some(ids) = self.by_list.get_mut(&key)
        {
            forget(ids, id);
            if ids.is_empty() {
                self.by_list.remove(&key);
            }
        }
        self.free.push(id);
        Some(slot.spans)
    }
}

/// Removes `id`, usually one of the first.
fn forget(ids: &mut Ids, id: MapId) {
    if let Some(at) = ids.iter().position(|other| *other == id) {
        ids.remove(at);
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    /// A file may have any number of mappings at one address, and a sync for each.
    #[test]
    fn a_search_ends_whatever_a_file_has() {
        const DEVICE: DeviceId = DeviceId(0);
        const ADDRESS: u64 = 0x1000;
        let mut live = Live::default();
        let add = |live: &mut Live, len| {
            let spans = smallvec![Span { addr: ADDRESS, len }];
            live.insert(DEVICE, Class::Single, 0, Direction::ToDevice, spans, None)
        };
        let oldest = add(&mut live, 64);
        for _ in 1..SPANS {
            add(&mut live, 1);
        }
        assert!(matches!(live.find(DEVICE, ADDRESS, 64), Hit::Inside { id, offset: 0 } if id == oldest));
        // With one more, that is beyond the last which is looked at.
        add(&mut live, 1);
        assert!(matches!(live.find(DEVICE, ADDRESS, 64), Hit::PastEnd { left: 1 }));
    }
}
