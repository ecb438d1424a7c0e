//! The fields of relevant events, by name.

mod raw;
mod vtd;

use super::{Lists, ParseError, number};
use crate::event::{Direction, EventKind, Region, SgMap, SyncFor, Told};

/// An event's text after its name, and storage for its lists.
pub(super) struct Text<'a> {
    text: &'a [u8],
    lists: &'a mut Lists,
}

/// The parsed `KEY=VALUE` pairs of a line.
#[derive(Default)]
struct Fields<'a> {
    dir: Dir<'a>,
    dma_addr: Option<u64>,
    size: Option<u64>,
    phys_addr: Option<u64>,
    iova: Option<u64>,
    dev_addr: Option<u64>,
    unmapped: Option<u64>,
    nents: Option<(u64, u64)>,
    ents: Option<(u64, u64)>,
    truncated: bool,
    has_dma_addrs: bool,
    has_sizes: bool,
    has_phys_addrs: bool,
    attrs: &'a [u8],
    /// The field `dev=`; empty without one.
    device: &'a [u8],
    /// There is an empty field `virt_addr=`.
    nowhere: bool,
}

/// The field `dir=`.
#[derive(Default)]
enum Dir<'a> {
    #[default]
    Missing,
    Is(Direction),
    /// Not a direction, but this text.
    Not(&'a [u8]),
}

impl<'a> Dir<'a> {
    fn of(direction: Option<Direction>, word: &'a [u8]) -> Self {
        direction.map_or(Self::Not(word), Self::Is)
    }

    /// The direction, if the event must have one.
    fn need(&self, text: &'a [u8]) -> Result<Direction, ParseError<'a>> {
        match *self {
            Self::Is(dir) => Ok(dir),
            Self::Not(word) => Err(bad("a direction", word)),
            Self::Missing => Err(bad("a field dir=", text)),
        }
    }
}

impl<'a> Text<'a> {
    pub(super) fn new(text: &'a [u8], lists: &'a mut Lists) -> Self {
        Self { text, lists }
    }

    pub(super) fn event(self, name: &[u8]) -> Result<EventKind<'a>, ParseError<'a>> {
        match name {
            b"map" => self.iommu_map(),
            b"unmap" => self.iommu_unmap(),
            b"map_single" | b"map_sg" | b"bounce_map_single" => self.vtd_map(name == b"map_single"),
            b"unmap_single" | b"unmap_sg" | b"bounce_unmap_single" => self.vtd_unmap(),
            b"dma_map_page" | b"dma_map_phys" => self.map(false),
            b"dma_unmap_page" | b"dma_unmap_phys" | b"dma_unmap_resource" => {
                Ok(EventKind::Unmap { region: self.region()?.0 })
            }
            b"dma_map_sg" => self.map_sg(),
            b"dma_unmap_sg" => self.unmap_sg(),
            b"dma_sync_single_for_cpu" => {
                Ok(EventKind::Sync { region: self.region()?.0, target: SyncFor::Cpu })
            }
            b"dma_sync_single_for_device" => {
                Ok(EventKind::Sync { region: self.region()?.0, target: SyncFor::Device })
            }
            b"dma_sync_sg_for_cpu" => self.sync_sg(SyncFor::Cpu),
            b"dma_sync_sg_for_device" => self.sync_sg(SyncFor::Device),
            b"dma_map_resource" => self.map(true),
            b"dma_alloc" | b"dma_alloc_pages" | b"dma_alloc_sgt" => self.alloc(name == b"dma_alloc"),
            b"dma_free" | b"dma_free_pages" | b"dma_free_sgt" => self.free(name == b"dma_free"),
            b"attach_device_to_domain" => match self.text.strip_prefix(b"IOMMU: device=") {
                Some(device) if !device.is_empty() => Ok(EventKind::Attach { device }),
                _ => Err(bad("\"IOMMU: device=...\"", self.text)),
            },
            // Each entry of a `bounce_map_sg` has a `bounce_map_single`, too.
            b"qi_submit"
            | b"prq_report"
            | b"bounce_map_sg"
            | b"io_page_fault"
            | b"swiotlb_bounced"
            | b"detach_device_from_domain"
            | b"add_device_to_group"
            | b"remove_device_from_group" => Ok(EventKind::NotMapping),
            _ if name.starts_with(b"cache_tag_") => Ok(EventKind::NotMapping),
            _ if name.starts_with(b"dma_") && name.ends_with(b"_err") => Ok(EventKind::Failed),
            _ => Ok(EventKind::Other),
        }
    }

    fn region(self) -> Result<(Region<'a>, Fields<'a>, &'a Lists), ParseError<'a>> {
        self.region_of(|fields, text| fields.dir.need(text))
    }

    /// Memory allocated for a device. Linux 6.12 prints no direction, and some later versions print stale buffer contents. `dma_alloc`
    /// `always` allocates for both directions.
    fn coherent(self, always: bool) -> Result<(Region<'a>, Fields<'a>, &'a Lists), ParseError<'a>> {
        self.region_of(|fields, _| match fields.dir {
            Dir::Is(dir) if !always => Ok(dir),
            _ => Ok(Direction::Bidirectional),
        })
    }

    fn region_of(
        self,
        dir: impl FnOnce(&Fields<'a>, &'a [u8]) -> Result<Direction, ParseError<'a>>,
    ) -> Result<(Region<'a>, Fields<'a>, &'a Lists), ParseError<'a>> {
        let text = self.text;
        let (device, fields, lists) = self.dma()?;
        let region = Region {
            device,
            dir: dir(&fields, text)?,
            dma_addr: need(fields.dma_addr, "a field dma_addr=", text)?,
            size: need(fields.size, "a field size=", text)?,
            attrs: fields.attrs,
        };
        Ok((region, fields, lists))
    }

    fn map(self, resource: bool) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let (region, fields, _) = self.region()?;
        let resource = resource || is_mmio(region.attrs);
        Ok(EventKind::Map { region, phys: need(fields.phys_addr, "a field phys_addr=", text)?, resource })
    }

    fn alloc(self, always: bool) -> Result<EventKind<'a>, ParseError<'a>> {
        let (region, fields, lists) = self.coherent(always)?;
        if fields.nowhere {
            return Ok(EventKind::Failed);
        }
        let dir = match fields.dir {
            Dir::Missing => Told::Missing,
            Dir::Not(_) => Told::Unreadable,
            Dir::Is(dir) if dir != region.dir => Told::Unreadable,
            Dir::Is(_) => Told::Told,
        };
        Ok(EventKind::Alloc { region, phys_addrs: &lists.phys_addrs, dir })
    }

    /// Since Linux 6.13 a free of no memory is recorded, too. Its address may belong to another allocation by then.
    fn free(self, always: bool) -> Result<EventKind<'a>, ParseError<'a>> {
        let (region, fields, _) = self.coherent(always)?;
        let size = if fields.nowhere { 0 } else { region.size };
        Ok(EventKind::Free { region: Region { size, ..region } })
    }

    fn map_sg(self) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let (device, fields, lists) = self.dma()?;
        let dir = fields.dir.need(text)?;
        present(fields.has_dma_addrs, "a list dma_addrs=", text)?;
        present(fields.has_sizes, "a list sizes=", text)?;
        present(fields.has_phys_addrs, "a list phys_addrs=", text)?;
        present(lists.dma_addrs.len() == lists.sizes.len(), "as many sizes= as dma_addrs=", text)?;
        let (nents, full_nents) = fields.nents.unwrap_or((lists.phys_addrs.len() as u64, 0));
        let (ents, full_ents) = fields.ents.unwrap_or((lists.dma_addrs.len() as u64, 0));
        let (full_nents, full_ents) = (full_nents.max(nents), full_ents.max(ents));
        // Either the kernel's mark or the numbers suffice.
        let truncated = fields.truncated || full_nents > nents || full_ents > ents;
        Ok(EventKind::MapSg(SgMap {
            device,
            dir,
            nents,
            full_nents,
            ents,
            full_ents,
            truncated,
            dma_addrs: &lists.dma_addrs,
            sizes: &lists.sizes,
            phys_addrs: &lists.phys_addrs,
            attrs: fields.attrs,
        }))
    }

    fn unmap_sg(self) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let (device, fields, lists) = self.dma()?;
        let dir = fields.dir.need(text)?;
        present(fields.has_phys_addrs, "a list phys_addrs=", text)?;
        Ok(EventKind::UnmapSg { device, dir, phys_addrs: &lists.phys_addrs })
    }

    fn sync_sg(self, target: SyncFor) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let (device, fields, lists) = self.dma()?;
        let dir = fields.dir.need(text)?;
        present(fields.has_dma_addrs, "a list dma_addrs=", text)?;
        present(fields.has_sizes, "a list sizes=", text)?;
        present(lists.dma_addrs.len() == lists.sizes.len(), "as many sizes= as dma_addrs=", text)?;
        Ok(EventKind::SyncSg { device, dir, dma_addrs: &lists.dma_addrs, sizes: &lists.sizes, target })
    }

    fn iommu_map(self) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let (fields, _) = self.iommu()?;
        Ok(EventKind::IommuMap {
            device: fields.device,
            iova: need(fields.iova, "a field iova=", text)?,
            phys: need(fields.phys_addr, "a field paddr=", text)?,
            size: need(fields.size, "a field size=", text)?,
        })
    }

    fn iommu_unmap(self) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let (fields, _) = self.iommu()?;
        let size = need(fields.size, "a field size=", text)?;
        Ok(EventKind::IommuUnmap {
            device: fields.device,
            iova: need(fields.iova, "a field iova=", text)?,
            size,
            unmapped: fields.unmapped.unwrap_or(size),
        })
    }

    /// The device, which is all text before the first field (`dir=` or, without that, `dma_addr=`), and the fields.
    fn dma(self) -> Result<(&'a [u8], Fields<'a>, &'a Lists), ParseError<'a>> {
        let text = self.text;
        if let Some(fields) = text.strip_prefix(raw::MARK) {
            let (device, fields) = raw::read(fields, self.lists)?;
            return Ok((device, fields, self.lists));
        }
        let mut from = 0;
        let device = loop {
            let after = text.get(from..).unwrap_or(&[]);
            match memchr::memchr(b' ', after) {
                Some(at)
                    if after
                        .get(at + 1..)
                        .is_some_and(|t| t.starts_with(b"dir=") || t.starts_with(b"dma_addr=")) =>
                {
                    break from + at;
                }
                Some(at) => from += at + 1,
                None => return Err(bad("a device and a field dir=", text)),
            }
        };
        let (device, rest) = text.split_at(device);
        let (fields, lists) = read(rest, self.lists)?;
        Ok((device.trim_ascii_end(), fields, lists))
    }

    fn iommu(self) -> Result<(Fields<'a>, &'a Lists), ParseError<'a>> {
        match self.text.strip_prefix(b"IOMMU: ") {
            Some(rest) => read(rest, self.lists),
            None => Err(bad("\"IOMMU: iova=...\"", self.text)),
        }
    }
}

/// A list with blanks between its entries.
#[derive(Clone, Copy)]
enum Open {
    DmaAddrs,
    Sizes,
    PhysAddrs,
}

/// Parses all fields of `text`. Words without `=` are ignored, except the mark of a truncated list and the entries of a list without
/// braces.
fn read<'a>(text: &'a [u8], lists: &'a mut Lists) -> Result<(Fields<'a>, &'a Lists), ParseError<'a>> {
    lists.clear();
    let mut fields = Fields::default();
    let mut open = None;
    for word in memchr::memchr_iter(b' ', text).chain([text.len()]).scan(0, |from, to| {
        let word = text.get(*from..to);
        *from = to + 1;
        word
    }) {
        let Some(equals) = word.iter().position(|&b| b == b'=') else {
            fields.truncated |= word == b"[TRUNCATED]";
            if let Some(open) = open.filter(|_| !word.is_empty() && word != b"[TRUNCATED]") {
                lists.of(open).push(entry(word)?);
            }
            continue;
        };
        open = None;
        let (key, value) = word.split_at(equals);
        let value = value.get(1..).unwrap_or(&[]);
        match key {
            b"dir" => fields.dir = Dir::of(direction(value), word),
            b"dma_addr" => fields.dma_addr = Some(hex(value, word)?),
            b"phys_addr" | b"paddr" => fields.phys_addr = Some(hex(value, word)?),
            b"iova" => fields.iova = Some(hex(value, word)?),
            b"dev" => fields.device = value,
            b"dev_addr" => fields.dev_addr = Some(hex(value, word)?),
            b"size" => fields.size = Some(size(value, word)?),
            b"unmapped_size" => fields.unmapped = Some(size(value, word)?),
            b"virt_addr" => fields.nowhere = is_nowhere(value),
            b"attrs" => fields.attrs = value,
            b"nents" => fields.nents = Some(pair(value, word)?.0),
            b"ents" => {
                let (ents, cut) = pair(value, word)?;
                fields.ents = Some(ents);
                fields.truncated |= cut;
            }
            b"dma_addrs" => {
                open = list(value, word, Open::DmaAddrs, lists)?;
                fields.has_dma_addrs = true;
            }
            b"sizes" => {
                open = list(value, word, Open::Sizes, lists)?;
                fields.has_sizes = true;
            }
            b"phys_addrs" => {
                open = list(value, word, Open::PhysAddrs, lists)?;
                fields.has_phys_addrs = true;
            }
            _ => {}
        }
    }
    Ok((fields, lists))
}

fn bad<'a>(expected: &'static str, found: &'a [u8]) -> ParseError<'a> {
    ParseError { is_event: true, expected, found }
}

fn need<'a, T>(value: Option<T>, expected: &'static str, text: &'a [u8]) -> Result<T, ParseError<'a>> {
    value.ok_or_else(|| bad(expected, text))
}

fn present<'a>(there: bool, expected: &'static str, text: &'a [u8]) -> Result<(), ParseError<'a>> {
    if there { Ok(()) } else { Err(bad(expected, text)) }
}

fn direction(value: &[u8]) -> Option<Direction> {
    match value {
        b"TO_DEVICE" => Some(Direction::ToDevice),
        b"FROM_DEVICE" => Some(Direction::FromDevice),
        b"BIDIRECTIONAL" => Some(Direction::Bidirectional),
        _ => None,
    }
}

fn hex<'a>(value: &[u8], word: &'a [u8]) -> Result<u64, ParseError<'a>> {
    number::hex(value).ok_or_else(|| bad("a hexadecimal number of at most 64 bits", word))
}

fn decimal<'a>(value: &[u8], word: &'a [u8]) -> Result<u64, ParseError<'a>> {
    number::decimal(value).ok_or_else(|| bad("a decimal number of at most 64 bits", word))
}

/// A size: Linux 3.12 to 3.19 print `0x1000`.
fn size<'a>(value: &[u8], word: &'a [u8]) -> Result<u64, ParseError<'a>> {
    if value.starts_with(b"0x") { hex(value, word) } else { decimal(value, word) }
}

/// Whether this is a null address: the kernel prints zeros, and libraries print `(nil)` or `(null)`.
fn is_nowhere(value: &[u8]) -> bool {
    matches!(value, b"(nil)" | b"(null)") || number::hex(value) == Some(0)
}

/// Whether the attributes say that it is another device's registers (formerly `dma_map_resource`).
fn is_mmio(attrs: &[u8]) -> bool {
    attrs.split(|&b| b == b'|').any(|attr| attr == b"MMIO")
}

/// `12/34`, and whether the truncation mark is attached to it.
fn pair<'a>(value: &[u8], word: &'a [u8]) -> Result<((u64, u64), bool), ParseError<'a>> {
    let parsed = number::leading_decimal(value).and_then(|(first, rest)| {
        let (second, rest) = number::leading_decimal(rest.strip_prefix(b"/")?)?;
        Some(((first, second), rest))
    });
    match parsed {
        Some((both, [])) => Ok((both, false)),
        Some((both, b"[TRUNCATED]")) => Ok((both, true)),
        _ => Err(bad("two numbers with a slash between", word)),
    }
}

impl Lists {
    fn clear(&mut self) {
        self.dma_addrs.clear();
        self.sizes.clear();
        self.phys_addrs.clear();
    }

    fn of(&mut self, open: Open) -> &mut Vec<u64> {
        match open {
            Open::DmaAddrs => &mut self.dma_addrs,
            Open::Sizes => &mut self.sizes,
            Open::PhysAddrs => &mut self.phys_addrs,
        }
    }
}

/// An entry of a list without braces: libtraceevent prints `4096 8192`.
fn entry(word: &[u8]) -> Result<u64, ParseError<'_>> {
    let value = if word.starts_with(b"0x") { number::hex(word) } else { number::decimal(word) };
    value.ok_or_else(|| bad("a number of at most 64 bits", word))
}

/// `{0x1,0x2}` as a whole, or the first entry of a list without braces, which is then open.
fn list<'a>(
    value: &'a [u8],
    word: &'a [u8],
    which: Open,
    lists: &mut Lists,
) -> Result<Option<Open>, ParseError<'a>> {
    let wrong = || bad("a list of hexadecimal numbers in braces", word);
    let into = lists.of(which);
    into.clear();
    let mut rest = match value {
        [] => return Ok(Some(which)),
        [b'{', b'}'] => return Ok(None),
        [b'{', rest @ ..] => rest,
        _ => {
            into.push(entry(value)?);
            return Ok(Some(which));
        }
    };
    loop {
        let (number, after) = number::leading_hex(rest).ok_or_else(wrong)?;
        into.push(number);
        match after {
            b"}" => return Ok(None),
            [b',', more @ ..] => rest = more,
            _ => return Err(wrong()),
        }
    }
}
