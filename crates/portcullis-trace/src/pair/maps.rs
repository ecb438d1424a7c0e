//! Map and alloc events.

use smallvec::{SmallVec, smallvec};

use super::live::{Class, ListKey, Span};
use super::op::{DeviceId, Origin, Out};
use super::segments::{self, Source};
use super::{MAX_PHYS, NewMap, Pairer, Segment};
use crate::event::{Region, SgMap};
use crate::figures::{number_of, number_of_these};
use crate::summary::Summary;

impl Pairer {
    /// A map or alloc of one range, with the physical addresses `phys` as far as the event has them.
    pub(super) fn map(
        &mut self,
        region: &Region<'_>,
        phys: &[u64],
        class: Class,
        origin: Origin,
        summary: &mut Summary,
        out: &mut Out<'_>,
    ) {
        let span = Span { addr: region.dma_addr, len: region.size };
        self.claim_maps(span.addr, span.addr.saturating_add(span.len.saturating_sub(1)), summary, out);
        let (device, wanted) = self.devices.intern(region.device, &mut summary.devices);
        if !wanted {
            summary.filtered += 1;
        } else if phys.first().is_some_and(|&phys| region.is_error(phys)) {
            summary.ignored += 1;
        } else if span.len == 0 {
            summary.skip(out.at.line, || ("a size of 1 byte or more".into(), "0 bytes".into()));
        } else if let Some(source) = self.pieces_of(span, phys, class) {
            summary.translated += u64::from(phys.first().is_some_and(|&phys| phys != span.addr));
            let spans = smallvec![span];
            self.enter(
                device,
                NewMap { class, dir: region.dir, origin, spans, list: None, source },
                summary,
                out,
            );
        } else {
            let (n, size) = (phys.len(), region.size);
            summary.skip(out.at.line, || {
                let entries = number_of_these(n as u64, "entry", "entries");
                (
                    format!("entries that make up {}", number_of(size, "byte")),
                    format!("{entries} that cannot"),
                )
            });
        }
    }

    /// Determines the memory of `span`.
    fn pieces_of(&mut self, span: Span, phys: &[u64], class: Class) -> Option<Source> {
        if class == Class::Single {
            self.pieces.clear();
            self.pieces.extend(phys.iter().map(|&phys| Segment { phys, len: span.len }));
            Some(Source::Told)
        } else if segments::of_runs(span, &self.runs, &mut self.pieces).is_some() {
            Some(Source::Derived)
        } else if phys.is_empty() {
            // Without an IOMMU the device address is the physical one.
            self.pieces.clear();
            self.pieces.push(Segment { phys: span.addr, len: span.len });
            Some(Source::Guessed)
        } else {
            segments::of_list(phys, &[span], &[], false, &mut self.pieces)
        }
    }

    pub(super) fn map_sg(&mut self, sg: &SgMap<'_>, summary: &mut Summary, out: &mut Out<'_>) {
        if sg.truncated {
            summary.truncated_lists += 1;
        }
        let spans: SmallVec<[Span; 1]> =
            sg.dma_addrs.iter().zip(sg.sizes).map(|(&addr, &len)| Span { addr, len }).collect();
        let first = sg.dma_addrs.iter().min().copied().unwrap_or(0);
        let last = spans.iter().map(|s| s.addr.saturating_add(s.len.saturating_sub(1))).max().unwrap_or(0);
        // More segments follow the last printed one, in the same range of addresses.
        let last = if sg.full_ents > sg.ents { u64::MAX } else { last };
        self.claim_maps(first, last, summary, out);
        let (device, wanted) = self.devices.intern(sg.device, &mut summary.devices);
        if !wanted {
            summary.filtered += 1;
            return;
        }
        let cut =
            sg.truncated && segments::of_cut(&spans, sg.full_ents > sg.ents, &self.runs, &mut self.pieces);
        let source = if cut {
            Some(Source::Derived)
        } else {
            segments::of_list(sg.phys_addrs, &spans, &self.runs, sg.truncated, &mut self.pieces)
        };
        let (entries, parts) = (sg.phys_addrs.len(), sg.sizes.len());
        match source.filter(|_| entries > 0 && parts > 0) {
            Some(source) => {
                let list = Some(ListKey::new(device, sg.phys_addrs));
                let (class, origin) = (Class::List, Origin::ScatterGather);
                self.enter(device, NewMap { class, dir: sg.dir, origin, spans, list, source }, summary, out);
            }
            None => summary.skip(out.at.line, || {
                let total = spans.iter().fold(0u64, |sum, span| sum.saturating_add(span.len));
                let entries = number_of_these(entries as u64, "entry", "entries");
                let (total, parts) = (number_of(total, "byte"), number_of(parts as u64, "DMA segment"));
                let found = format!("{entries} for {total} in {parts}");
                ("entries whose lengths add up to the sizes".into(), found)
            }),
        }
    }

    /// Claims the current map's `iommu:map` events into `self.runs`.
    fn claim_maps(&mut self, first: u64, last: u64, summary: &mut Summary, out: &Out<'_>) {
        match self.cpus.get_mut(out.at.cpu as usize) {
            Some(cpu) => cpu.waiting.claim_maps(first, last, &mut self.runs),
            None => self.runs.clear(),
        }
        summary.iommu_claimed += self.runs.len() as u64;
        summary.runs_claimed += self.runs.len() as u64;
    }

    /// Adds a mapping with prepared pieces, if all its addresses can exist.
    fn enter(&mut self, device: DeviceId, new: NewMap, summary: &mut Summary, out: &mut Out<'_>) {
        let too_high = |piece: &&Segment| piece.phys.checked_add(piece.len).is_none_or(|end| end > MAX_PHYS);
        if let Some(&Segment { phys, len }) = self.pieces.iter().find(too_high) {
            return summary.skip(out.at.line, || {
                ("physical addresses below 2^52".into(), format!("{} at {phys:#x}", number_of(len, "byte")))
            });
        }
        let wraps = |span: &&Span| span.len > 0 && span.addr.checked_add(span.len - 1).is_none();
        if let Some(&Span { addr, len }) = new.spans.iter().find(wraps) {
            return summary.skip(out.at.line, || {
                ("DMA addresses below 2^64".into(), format!("{} at {addr:#x}", number_of(len, "byte")))
            });
        }
        match new.source {
            Source::Told => {}
            Source::Derived => summary.derived_lengths += 1,
            Source::Guessed => summary.guessed_lengths += 1,
        }
        summary.maps += 1;
        let bytes = self.pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.len));
        summary.count_shape(bytes, Segment::pieces(&self.pieces));
        let id = self.live.insert(device, new.class, self.seq, new.dir, new.spans, new.list);
        out.map(device, id, new.dir, new.origin, &self.pieces);
    }
}
