//! Events whose format the library of `perf script` and `trace-cmd report` cannot parse: bare field values after `[FAILED TO PARSE]`, and
//! lists as bytes in memory order. libtraceevent 1.7 prints Linux 6.12's events with lists this way.

use super::{Dir, Fields, ParseError, bad, decimal, is_nowhere, number, size};
use crate::event::Direction;
use crate::parse::Lists;

/// The prefix of the fields.
pub(super) const MARK: &[u8] = b"[FAILED TO PARSE] ";

/// The attribute of other devices' registers, since Linux 6.18.
const MMIO: u64 = 1 << 10;

/// The most list entries that the kernel records.
const MOST_ENTRIES: u64 = 128;

/// The device and the fields of `text`, which follows [`MARK`].
pub(super) fn read<'a>(text: &'a [u8], lists: &mut Lists) -> Result<(&'a [u8], Fields<'a>), ParseError<'a>> {
    lists.clear();
    let mut fields = Fields::default();
    let mut device = None;
    let mut rest = text;
    while let Some(equals) = memchr::memchr(b'=', rest) {
        let (key, after) = rest.split_at(equals);
        let (value, after) = value_of(after.get(1..).unwrap_or(&[]));
        let field = rest.get(..equals + 1 + value.len()).unwrap_or(rest);
        rest = after;
        match key.trim_ascii_start() {
            b"device" => device = Some(value),
            b"dir" => fields.dir = Dir::of(direction(value), field),
            b"virt_addr" => fields.nowhere = is_nowhere(value),
            b"dma_addr" | b"addr" => fields.dma_addr = Some(decimal(value, field)?),
            b"phys_addr" => fields.phys_addr = Some(decimal(value, field)?),
            b"size" => fields.size = Some(decimal(value, field)?),
            // Libtraceevent prints a `long` in hexadecimal.
            b"attrs" if size(value, field)? & MMIO != 0 => fields.attrs = b"MMIO",
            b"full_nents" => fields.nents = Some(counts(value, field)?),
            b"full_ents" => fields.ents = Some(counts(value, field)?),
            b"truncated" => fields.truncated = value != b"0",
            b"phys_addrs" | b"addrs" => {
                fields.has_phys_addrs = list(value, field, 8, &mut lists.phys_addrs)?;
            }
            b"dma_addrs" => fields.has_dma_addrs = list(value, field, 8, &mut lists.dma_addrs)?,
            b"lengths" => fields.has_sizes = list(value, field, 4, &mut lists.sizes)?,
            _ => {}
        }
    }
    Ok((device.ok_or_else(|| bad("a field device=", text))?, fields))
}

/// A field's value, and the rest. A device name may contain blanks: a value ends before a word with `=`.
fn value_of(text: &[u8]) -> (&[u8], &[u8]) {
    let end = if text.starts_with(b"ARRAY[") {
        memchr::memchr(b']', text).map_or(text.len(), |at| at + 1)
    } else {
        let next = memchr::memchr(b'=', text).unwrap_or(text.len());
        let before = text.get(..next).unwrap_or(text);
        if next == text.len() { next } else { memchr::memrchr(b' ', before).unwrap_or(next) }
    };
    text.split_at(end)
}

fn direction(value: &[u8]) -> Option<Direction> {
    match value {
        b"0" => Some(Direction::Bidirectional),
        b"1" => Some(Direction::ToDevice),
        b"2" => Some(Direction::FromDevice),
        _ => None,
    }
}

/// Recorded entries, and all entries.
fn counts<'a>(value: &[u8], field: &'a [u8]) -> Result<(u64, u64), ParseError<'a>> {
    let full = decimal(value, field)?;
    Ok((full.min(MOST_ENTRIES), full))
}

/// `ARRAY[00, 30, 06, 13]`: entries of `width` bytes, the lowest byte first.
fn list<'a>(
    value: &[u8],
    field: &'a [u8],
    width: usize,
    into: &mut Vec<u64>,
) -> Result<bool, ParseError<'a>> {
    let wrong = || bad("a list of bytes in brackets, a whole number of entries", field);
    let inner = value.strip_prefix(b"ARRAY[").and_then(|rest| rest.strip_suffix(b"]")).ok_or_else(wrong)?;
    into.clear();
    let (mut entry, mut bytes) = (0, 0);
    for byte in inner.split(|&b| b == b',').filter(|_| !inner.is_empty()) {
        let byte = number::hex(byte.trim_ascii()).filter(|&byte| byte <= 0xff).ok_or_else(wrong)?;
        entry |= byte << (8 * bytes);
        bytes += 1;
        if bytes == width {
            into.push(entry);
            (entry, bytes) = (0, 0);
        }
    }
    if bytes == 0 { Ok(true) } else { Err(wrong()) }
}
