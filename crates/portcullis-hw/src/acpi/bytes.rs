//! The bytes of a table, or of a part of it. Reads outside them return `None`, and each step of a walk moves on, so a walk ends.

use alloc::string::String;
use alloc::vec::Vec;

use portcullis::addr::{AddrError, Iova, IovaRange, Permissions};

use super::{AcpiError, Flaw, Reserved};

/// The header that all tables share, in bytes (ACPI Specification, Release 6.5, section 5.2.6).
pub(super) const HEADER: usize = 36;

/// The smallest page of all IOMMUs. Registers begin at a multiple of it.
pub(super) const PAGE: u64 = 4096;

#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes<'a> {
    bytes: &'a [u8],
    /// Their offset in the table.
    pub at: usize,
}

impl<'a> Bytes<'a> {
    /// Checks a table of at least `least` bytes. Returns its bytes, and a flaw if the checksum is wrong.
    pub fn table(bytes: &'a [u8], wanted: [u8; 4], least: usize) -> Result<(Self, Vec<Flaw>), AcpiError> {
        let all = Self { bytes, at: 0 };
        let cut = |wanted: usize| AcpiError::Cut { bytes: bytes.len(), wanted };
        let found = all.take(0, 4).and_then(|name| name.try_into().ok()).ok_or(cut(HEADER))?;
        if found != wanted {
            return Err(AcpiError::Signature { found, wanted });
        }
        let len = all.u32(4).ok_or(cut(HEADER))? as usize;
        let table = all.part(0, len).ok_or(cut(len))?;
        if len < least {
            return Err(AcpiError::Cut { bytes: len, wanted: least });
        }
        let mut flaws = Vec::new();
        let sum = table.bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        if sum != 0 {
            push(&mut flaws, Flaw::Checksum { sum })?;
        }
        Ok((table, flaws))
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn take(&self, offset: usize, len: usize) -> Option<&'a [u8]> {
        self.bytes.get(offset..offset.checked_add(len)?)
    }

    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        Some(Self { bytes: self.take(offset, len)?, at: self.at.saturating_add(offset) })
    }

    pub fn rest(&self, offset: usize) -> Option<Self> {
        self.part(offset, self.bytes.len().checked_sub(offset)?)
    }

    fn number<const N: usize>(&self, offset: usize) -> Option<u64> {
        let bytes = self.take(offset, N)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    pub fn u8(&self, offset: usize) -> Option<u8> {
        Some(self.number::<1>(offset)? as u8)
    }

    pub fn u16(&self, offset: usize) -> Option<u16> {
        Some(self.number::<2>(offset)? as u16)
    }

    pub fn u32(&self, offset: usize) -> Option<u32> {
        Some(self.number::<4>(offset)? as u32)
    }

    pub fn u64(&self, offset: usize) -> Option<u64> {
        self.number::<8>(offset)
    }

    pub fn short(&self) -> Flaw {
        Flaw::Short { offset: self.at, len: self.len() }
    }

    /// Splits into consecutive structures, each as long as `len` says, and of at least `least` bytes. The first one with an impossible
    /// length is a flaw and ends the walk.
    pub fn split(
        self,
        least: usize,
        len: impl Fn(&Self) -> Option<usize>,
    ) -> impl Iterator<Item = Result<Self, Flaw>> {
        let mut left = Some(self).filter(|all| all.len() > 0);
        core::iter::from_fn(move || {
            let all = left.take()?;
            // A structure that is too short for its own length field takes all that is left, and is refused as too short.
            let len = len(&all).unwrap_or(all.len().min(least.saturating_sub(1)));
            let flaw = Flaw::Length { offset: all.at, len, least, left: all.len() };
            let part = all.part(0, len).filter(|_| len >= least.max(1)).ok_or(flaw);
            if part.is_ok() {
                left = all.rest(len).filter(|rest| rest.len() > 0);
            }
            Some(part)
        })
    }
}

/// Checks a reserved region from `first` to `last`, which may be no byte at all. The manual wants both ends at multiples of `granule`. Adds
/// to `flaws` what is wrong.
pub(super) fn region(
    offset: usize,
    range: Result<IovaRange, AddrError>,
    permissions: Permissions,
    granule: u64,
    flaws: &mut Vec<Flaw>,
) -> Result<Option<Reserved>, AcpiError> {
    let range = match range {
        Ok(range) => range,
        Err(error) => {
            push(flaws, Flaw::Region { offset, error })?;
            return Ok(None);
        }
    };
    if range.last() < Iova::new(PAGE) {
        push(flaws, Flaw::PageZero { offset })?;
        return Ok(None);
    }
    let within = granule - 1;
    if range.start().get() & within != 0 || range.last().get() & within != within {
        push(flaws, Flaw::Unaligned { offset, range })?;
    }
    Ok(Some(Reserved { range, permissions }))
}

pub(super) fn can_be_registers(registers: u64, len: u64) -> bool {
    registers != 0 && registers.is_multiple_of(PAGE) && registers.checked_add(len - 1).is_some()
}

/// The zero-terminated name at the beginning of `bytes`, in printable ASCII, so that it is safe in a log. `None` if it is not.
pub(super) fn name(bytes: &[u8]) -> Result<Option<String>, AcpiError> {
    let end = bytes.iter().position(|byte| *byte == 0);
    text(end.and_then(|end| bytes.get(..end)).unwrap_or_default())
}

/// As [`name`], but all of `bytes`.
pub(super) fn text(bytes: &[u8]) -> Result<Option<String>, AcpiError> {
    let text = core::str::from_utf8(bytes).unwrap_or_default();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(None);
    }
    let mut owned = String::new();
    owned.try_reserve_exact(text.len()).map_err(|_| AcpiError::OutOfMemory)?;
    owned.push_str(text);
    Ok(Some(owned))
}

pub(super) fn push<T>(list: &mut Vec<T>, value: T) -> Result<(), AcpiError> {
    list.try_reserve(1).map_err(|_| AcpiError::OutOfMemory)?;
    list.push(value);
    Ok(())
}

/// Pairs each value whose key an earlier value has with the first such value, by index, in order. O(n log n).
pub(super) fn twins<T, K: Ord>(list: &[T], key: impl Fn(&T) -> K) -> Result<Vec<(usize, usize)>, AcpiError> {
    let (mut places, mut twins) = (Vec::new(), Vec::new());
    for place in 0..list.len() {
        push(&mut places, place)?;
    }
    places.sort_unstable_by_key(|place| (list.get(*place).map(&key), *place));
    let mut first: Option<usize> = None;
    for place in places {
        let key = |place: usize| list.get(place).map(&key);
        match first {
            Some(earlier) if key(earlier) == key(place) => push(&mut twins, (earlier, place))?,
            _ => first = Some(place),
        }
    }
    twins.sort_unstable_by_key(|(_, place)| *place);
    Ok(twins)
}

/// Removes the values that `gone` flags.
pub(super) fn remove<T>(list: &mut Vec<T>, gone: &[bool]) {
    let mut gone = gone.iter();
    list.retain(|_| !gone.next().copied().unwrap_or(false));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_walk_ends_at_the_first_length_that_cannot_be() {
        let walked = |bytes: &[u8]| {
            let all = Bytes { bytes, at: 100 };
            all.split(2, |at| at.u8(1).map(usize::from))
                .map(|part| part.map(|part| part.at))
                .collect::<Vec<_>>()
        };
        let length = |offset, len, left| Err(Flaw::Length { offset, len, least: 2, left });
        assert_eq!(walked(&[]), []);
        assert_eq!(walked(&[0, 2, 0, 3, 0]), [Ok(100), Ok(102)]);
        assert_eq!(walked(&[0, 2, 0, 0, 0]), [Ok(100), length(102, 0, 3)]);
        assert_eq!(walked(&[0, 2, 0, 4, 0]), [Ok(100), length(102, 4, 3)]);
        assert_eq!(walked(&[0, 2, 0]), [Ok(100), length(102, 1, 1)]);
    }

    #[test]
    fn a_structure_has_bytes_and_a_length() {
        let all = || Bytes { bytes: &[0; 8], at: 0 };
        let length = |len, least| Some(Err(Flaw::Length { offset: 0, len, least, left: 8 }));
        let first = |mut walk: Vec<Result<Bytes<'_>, Flaw>>| walk.pop().map(|part| part.map(|part| part.at));
        assert_eq!(first(all().split(0, |_| Some(0)).take(2).collect()), length(0, 0));
        assert_eq!(first(all().split(4, |_| None).take(2).collect()), length(3, 4));
    }

    #[test]
    fn regions_are_of_whole_pages_and_none_is_page_0() {
        let told = |first: u64, last: u64, granule| {
            let range = IovaRange::from_bounds(Iova::new(first), Iova::new(last));
            let mut flaws = Vec::new();
            let found = region(8, range, Permissions::READ, granule, &mut flaws).unwrap();
            let unaligned = [Flaw::Unaligned { offset: 8, range: range.unwrap() }];
            (found.map(|found| (found.range, found.permissions)), flaws, range.unwrap(), unaligned)
        };
        for (first, last, granule, is_used, is_whole) in [
            (0, 0, PAGE, false, true),
            (0, 0xfff, PAGE, false, true),
            (0, 0x1000, PAGE, true, false),
            (0, 0x1fff, PAGE, true, true),
            (0x1000, 0x1fff, PAGE, true, true),
            (0x1800, 0x1fff, PAGE, true, false),
            (0x1000, 0x17ff, PAGE, true, false),
            (0x1_0000, 0x1_ffff, 0x1_0000, true, true),
            (0x1_1000, 0x1_ffff, 0x1_0000, true, false),
            (0x1_0000, 0x1_efff, 0x1_0000, true, false),
        ] {
            let (found, flaws, range, unaligned) = told(first, last, granule);
            assert_eq!(found, is_used.then_some((range, Permissions::READ)), "{range}");
            let wanted = if !is_used {
                &[Flaw::PageZero { offset: 8 }][..]
            } else if is_whole {
                &[][..]
            } else {
                &unaligned[..]
            };
            assert_eq!(flaws, wanted, "{range}");
        }
    }

    #[test]
    fn fields_are_those_of_their_part_and_none_is_beyond_it() {
        let bytes: Vec<u8> = (0xf1..=0xff).collect();
        let all = Bytes { bytes: &bytes, at: 100 };
        for (from, len) in [(0, 15), (0, 0), (3, 9), (15, 0), (14, 1)] {
            let part = all.part(from, len).unwrap();
            assert_eq!((part.at, part.len()), (100 + from, len));
            for offset in (0..=len + 1).chain([usize::MAX - 7, usize::MAX]) {
                let plain = |count: usize| {
                    let field = bytes[from..from + len].get(offset..offset.checked_add(count)?)?;
                    Some(
                        field
                            .iter()
                            .zip(0..)
                            .fold(0, |sum, (byte, place)| sum | u64::from(*byte) << (8 * place)),
                    )
                };
                assert_eq!(part.u8(offset).map(u64::from), plain(1), "{offset}");
                assert_eq!(part.u16(offset).map(u64::from), plain(2), "{offset}");
                assert_eq!(part.u32(offset).map(u64::from), plain(4), "{offset}");
                assert_eq!(part.u64(offset), plain(8), "{offset}");
                let rest =
                    part.rest(offset).map(|rest| (rest.at, rest.take(0, rest.len()).unwrap().to_vec()));
                let plain = bytes[from..from + len].get(offset..);
                assert_eq!(rest, plain.map(|plain| (100 + from + offset, plain.to_vec())));
            }
        }
        for (from, len) in [(0, 16), (15, 1), (16, 0), (1, usize::MAX)] {
            assert!(all.part(from, len).is_none() && all.take(from, len).is_none(), "{from} {len}");
        }
    }

    #[test]
    fn a_name_ends_with_a_zero_and_can_be_printed() {
        for (bytes, wanted, whole) in [
            (&b"A\0B"[..], Some("A"), None),
            (b"\\_SB.PCI0\0", Some("\\_SB.PCI0"), None),
            (b"AB", None, Some("AB")),
            (b"", None, None),
            (b"\0A", None, None),
            (b"A B\0", None, None),
            (b"A\x7f\0", None, None),
            (b"~!\0", Some("~!"), None),
            (b"\xc3\xa9\0", None, None),
            (b"A\xff\0", None, None),
        ] {
            assert_eq!(name(bytes).unwrap().as_deref(), wanted, "{bytes:?}");
            assert_eq!(text(bytes).unwrap().as_deref(), whole, "{bytes:?}");
        }
    }

    #[test]
    fn what_is_gone_leaves_the_rest_in_order() {
        for (gone, wanted) in [
            (&[][..], &[1, 2, 3, 4][..]),
            (&[true], &[2, 3, 4]),
            (&[false, true, true, false], &[1, 4]),
            (&[true, true, true, true], &[]),
        ] {
            let mut list = alloc::vec![1, 2, 3, 4];
            remove(&mut list, gone);
            assert_eq!(list, wanted);
        }
    }

    #[test]
    fn twins_are_found_wherever_they_are() {
        assert_eq!(twins(&[3, 1, 3, 2, 1, 3], |value| *value), Ok(alloc::vec![(0, 2), (1, 4), (0, 5)]));
        assert_eq!(twins::<u8, u8>(&[], |value| *value), Ok(alloc::vec![]));
    }

    #[test]
    fn registers_begin_with_a_page_that_is_not_the_first() {
        assert!(can_be_registers(0xfed9_0000, PAGE) && can_be_registers(u64::MAX - 0xfff, PAGE));
        for nowhere in [0, 0xfed9_0010, u64::MAX, u32::MAX.into()] {
            assert!(!can_be_registers(nowhere, PAGE), "{nowhere:#x}");
        }
        assert!(!can_be_registers(u64::MAX - 0xfff, 2 * PAGE));
    }
}
