//! The configuration of the device, and properties of its endpoints.

use alloc::vec::Vec;

use portcullis::addr::{Iova, IovaRange, PageSize, PageSizes};
use portcullis::mapper::Geometry;

use super::layout::{common, config, feature, property};
use super::pci::{NarrowRegisters, Structures};
use crate::host::UnitError;

/// Attempts to read the configuration without a change meanwhile.
const TRIES: usize = 16;

/// The most property bytes that are read; no real endpoint has more.
const MOST_PROPERTIES: u32 = 64 << 10;

/// Addresses that an endpoint reserves: a domain that it is attached to must not map them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The addresses.
    pub range: IovaRange,
    /// Whether writes there are MSIs; otherwise the endpoint may not use them.
    pub is_msi: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub granules: PageSizes,
    pub aperture: IovaRange,
    /// The first and the last domain number.
    pub numbers: (u16, u16),
    /// 0 if there are no probes.
    pub probe_bytes: u32,
}

impl Settings {
    pub fn read<R: NarrowRegisters>(
        registers: &R,
        structures: &Structures,
        features: u64,
    ) -> Result<Self, UnitError> {
        let word = |offset: usize| registers.read32(structures.device + offset);
        let wide = |offset| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
        let generation = || registers.read8(structures.common + common::CONFIG_GENERATION);
        for _ in 0..TRIES {
            let before = generation();
            let pages = wide(config::PAGE_SIZE_MASK);
            let input = (wide(config::INPUT_START), wide(config::INPUT_END));
            let domains = (word(config::DOMAIN_START), word(config::DOMAIN_END));
            let probe_bytes = word(config::PROBE_SIZE);
            if generation() != before {
                continue;
            }
            let has = |wanted| features & wanted != 0;
            return Self::check(
                pages,
                if has(feature::INPUT_RANGE) { input } else { (0, u64::MAX) },
                if has(feature::DOMAIN_RANGE) { domains } else { (0, u32::MAX) },
                if has(feature::PROBE) { probe_bytes.min(MOST_PROPERTIES) } else { 0 },
            );
        }
        Err(UnitError::TimedOut { what: "leave its configuration as it is", waited_ns: 0 })
    }

    fn check(
        pages: u64,
        input: (u64, u64),
        domains: (u32, u32),
        probe_bytes: u32,
    ) -> Result<Self, UnitError> {
        let lacks = |what, register, value| UnitError::Lacks { what, register, value };
        let sizes = (0..u64::BITS).filter(|shift| pages >> shift & 1 != 0).filter_map(PageSize::from_shift);
        let granules = sizes.fold(PageSizes::EMPTY, PageSizes::with);
        let granule = granules.smallest().ok_or(lacks("pages", "page_size_mask", pages))?;
        let no_addresses = lacks("addresses to translate", "input_range.end", input.1);
        // Whole granules, and never all 2^64 bytes, which have no length.
        let first = granule.round_up(input.0).ok_or(no_addresses)?;
        let end = input.1.saturating_add(1) & !granule.offset_mask();
        let len = end.checked_sub(first).ok_or(no_addresses)?;
        let aperture = IovaRange::new(Iova::new(first), len).map_err(|_| no_addresses)?;
        let last = domains.1.min(u32::from(u16::MAX));
        if last.checked_sub(domains.0).is_none_or(|distance| distance < 2) {
            return Err(lacks("three numbers for domains", "domain_range.end", u64::from(domains.1)));
        }
        // No truncation: both are below 2^16.
        Ok(Self { granules, aperture, numbers: (domains.0 as u16, last as u16), probe_bytes })
    }
}

/// The regions among an endpoint's properties. Skips malformed and unknown ones.
pub(super) fn parse(bytes: &[u8]) -> Vec<Region> {
    let number = |at: usize, count: usize| {
        let bytes = bytes.get(at..at.checked_add(count)?)?;
        Some(bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    let mut regions = Vec::new();
    let mut at = 0;
    while let Some(head) = number(at, property::HEAD_BYTES) {
        let (kind, length) = (property::kind(head), usize::from(property::bytes(head)));
        let value = at + property::HEAD_BYTES;
        if kind == property::NONE {
            break;
        }
        if kind == property::RESERVED_MEMORY && length >= property::RESERVED_BYTES {
            let field = |offset, count| number(value + offset, count);
            if let (Some(subtype), Some(first), Some(last)) =
                (field(property::SUBTYPE, 1), field(property::FIRST, 8), field(property::LAST, 8))
            {
                // All 2^64 bytes have no length: leave out the last one.
                let last = if first == 0 { last.min(u64::MAX - 1) } else { last };
                let range = IovaRange::from_bounds(Iova::new(first), Iova::new(last));
                let is_msi = subtype == u64::from(property::MSI);
                regions.extend(range.ok().map(|range| Region { range, is_msi }));
            }
        }
        at = value + length;
    }
    regions
}

/// Whether a domain of this geometry, which also reserves `kept`, never maps an address of `region`.
pub(super) fn is_kept_free(region: IovaRange, geometry: &Geometry, kept: &[IovaRange]) -> bool {
    let aperture = geometry.aperture;
    let last = region.last().min(aperture.last());
    let mut next = Some(region.start().max(aperture.start()));
    while let Some(at) = next.filter(|at| *at <= last) {
        let Some(kept) = geometry.reserved.iter().chain(kept).find(|kept| kept.contains(at)) else {
            return false;
        };
        next = kept.last().checked_add(1);
    }
    true
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn region(first: u64, last: u64, is_msi: bool) -> Region {
        Region { range: IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap(), is_msi }
    }

    fn property(subtype: u8, first: u64, last: u64) -> Vec<u8> {
        [&[1, 0, 20, 0, subtype, 0, 0, 0][..], &first.to_le_bytes(), &last.to_le_bytes()].concat()
    }

    #[test]
    fn properties_are_read_up_to_the_first_that_is_none() {
        let bytes = [
            property(0, 0x1000, 0x1fff),
            // Unknown, with a longer body than the known ones.
            alloc::vec![7, 0, 3, 0, 9, 9, 9],
            property(1, 0, u64::MAX),
            // It ends before it begins.
            property(0, 5, 4),
            property(0, u64::MAX, u64::MAX),
            alloc::vec![0; 4],
            property(0, 1, 2),
        ]
        .concat();
        let all =
            [region(0x1000, 0x1fff, false), region(0, u64::MAX - 1, true), region(u64::MAX, u64::MAX, false)];
        assert_eq!(parse(&bytes), all);
        // Truncated properties are skipped.
        for end in 0..bytes.len() {
            assert!(all.starts_with(&parse(&bytes[..end])));
        }
        assert_eq!(parse(&[0xff; 100]), []);
        assert_eq!(parse(&[1, 0, 4, 0, 1, 1, 1, 1]), []);
    }

    #[test]
    fn the_aperture_is_of_whole_granules() {
        let aperture = |pages, first, last| {
            let settings = Settings::check(pages, (first, last), (0, u32::MAX), 0);
            settings.map(|settings| (settings.aperture.start().get(), settings.aperture.last().get())).ok()
        };
        assert_eq!(aperture(!0xfff, 0, 0x7f_ffff_ffff), Some((0, 0x7f_ffff_ffff)));
        assert_eq!(aperture(!0xfff, 1, 0x3ffe), Some((0x1000, 0x2fff)));
        assert_eq!(aperture(!0xffff, 0, u64::MAX), Some((0, u64::MAX - 0x1_0000)));
        assert_eq!(aperture(1 << 63, 0, u64::MAX), Some((0, (1 << 63) - 1)));
        for (pages, first, last) in
            [(!0xfff, 1, 0xfff), (!0xfff, u64::MAX, 0), (1 << 63, 1, u64::MAX), (0, 0, 0)]
        {
            assert_eq!(aperture(pages, first, last), None);
        }
    }
}
