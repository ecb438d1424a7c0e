//! Unmap, free and sync events.

use super::live::{Class, Hit, ListKey, Span};
use super::op::{OpKind, Out};
use super::{Pairer, Unpaired};
use crate::error::excerpt;
use crate::event::{Direction, Region, SyncFor};
use crate::figures::{number_of, number_of_these};
use crate::summary::Summary;

impl Pairer {
    pub(super) fn unmap(
        &mut self,
        region: &Region<'_>,
        class: Class,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        let span = Span { addr: region.dma_addr, len: region.size };
        let before = self.claim_unmap(span, summary, out);
        let (device, wanted) = self.devices.intern(region.device, &mut summary.devices);
        if !wanted {
            summary.filtered += 1;
            return;
        }
        let key = (device, class, span.addr);
        match self.live.remove_at(key, span.len, region.dir, before) {
            Some(id) => {
                summary.unmaps += 1;
                out.push(device, OpKind::Unmap { id });
            }
            None => {
                let again = self.live.note_gone(key, span.len);
                if unpaired(again, summary.lost_events, &mut summary.unpaired) {
                    summary.warn(out.at.line, || {
                        let name = excerpt(region.device);
                        let found = format!("a second unmap of {:#x} on {name} with no map since", span.addr);
                        ("an unmap of something mapped".into(), found)
                    });
                }
            }
        }
    }

    /// Claims an earlier `iommu:unmap` of `span`, or expects a later one. Returns the event before which the mapping must have been made:
    /// after its `iommu:unmap` another CPU may get the same address, and its map may be recorded before this unmap.
    fn claim_unmap(&mut self, span: Span, summary: &mut Summary, out: &Out<'_>) -> u64 {
        let seq = self.seq;
        let Some(waiting) = self.waiting(out) else { return seq };
        match waiting.claim_unmap(span.addr, span.len) {
            Some(seq) => {
                summary.iommu_claimed += 1;
                seq
            }
            None => {
                waiting.expect_unmap(&[span]);
                seq
            }
        }
    }

    pub(super) fn unmap_sg(
        &mut self,
        device: &[u8],
        dir: Direction,
        phys_addrs: &[u64],
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        let name = device;
        let (device, wanted) = self.devices.intern(device, &mut summary.devices);
        let key = ListKey::new(device, phys_addrs);
        let found = if wanted { self.live.remove_list(key, dir) } else { None };
        let spans = found.as_ref().map_or(&[][..], |(_, spans)| spans);
        if let Some(waiting) = self.waiting(out) {
            waiting.expect_unmap(spans);
        }
        if !wanted {
            summary.filtered += 1;
        } else if let Some((id, _)) = found {
            summary.unmaps += 1;
            out.push(device, OpKind::Unmap { id });
        } else {
            let again = self.live.note_list_gone(key);
            if unpaired(again, summary.lost_events, &mut summary.unpaired) {
                summary.warn(out.at.line, || {
                    let (n, first) = (phys_addrs.len(), phys_addrs.first().copied().unwrap_or(0));
                    let name = excerpt(name);
                    let entries = number_of_these(n as u64, "entry", "entries");
                    let found =
                        format!("a second unmap of {entries} from {first:#x} on {name}, no map since");
                    ("an unmap of something mapped".into(), found)
                });
            }
        }
    }

    pub(super) fn sync(
        &mut self,
        device: &[u8],
        parts: impl Iterator<Item = Span>,
        target: SyncFor,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        let (device, wanted) = self.devices.intern(device, &mut summary.devices);
        if !wanted {
            summary.filtered += 1;
            return;
        }
        let mut missing = None;
        let mut too_long = None;
        for Span { addr, len } in parts {
            match self.live.find(device, addr, len) {
                Hit::Inside { id, offset } => out.push(
                    device,
                    match target {
                        SyncFor::Cpu => OpKind::SyncForCpu { id, offset, len },
                        SyncFor::Device => OpKind::SyncForDevice { id, offset, len },
                    },
                ),
                Hit::PastEnd { left } => too_long = Some((addr, len, left)),
                Hit::Nothing => missing = Some(addr),
            }
        }
        // An event counts once, by the worst of its parts.
        if let Some((addr, len, left)) = too_long {
            summary.skip(out.at.line, || {
                (
                    format!("a sync of at most {} at {addr:#x}", number_of(left, "byte")),
                    number_of(len, "byte"),
                )
            });
        } else if let Some(addr) = missing {
            let again = self.live.is_gone(device, addr);
            unpaired(again, summary.lost_events, &mut summary.syncs_unpaired);
        } else {
            summary.syncs += 1;
        }
    }
}

/// Counts an end without a beginning; `true` if it deserves a warning.
fn unpaired(again: bool, lost_events: u64, counts: &mut Unpaired) -> bool {
    // After a loss the missing map proves nothing.
    if lost_events > 0 {
        counts.after_loss += 1;
        return false;
    }
    if again {
        counts.already_unmapped += 1;
    } else {
        counts.before_recording += 1;
    }
    again
}
