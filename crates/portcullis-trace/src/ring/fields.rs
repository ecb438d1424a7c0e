//! Formats an event's bytes as the kernel's line, except what a replay does not need: allocation flags, and kernel addresses, which are
//! only null or not.

use std::io::Write;

use super::format::{Event, Field, Formats, Kind};
use super::page::{Entry, number};

/// The most list entries that the kernel records.
const MOST_ENTRIES: u64 = 128;

/// The names of `attrs`, by bit (Linux's `include/linux/dma-mapping.h`).
const ATTRIBUTES: [(u32, &str); 10] = [
    (1, "WEAK_ORDERING"),
    (2, "WRITE_COMBINE"),
    (4, "NO_KERNEL_MAPPING"),
    (5, "SKIP_CPU_SYNC"),
    (6, "FORCE_CONTIGUOUS"),
    (7, "ALLOC_SINGLE_PAGES"),
    (8, "NO_WARN"),
    (9, "PRIVILEGED"),
    (10, "MMIO"),
    (11, "CACHE_CLEAN"),
];

impl Formats {
    /// Writes the line of `entry`, of CPU `cpu`, with its newline. Returns `false`, and writes nothing, for an unknown event.
    pub fn write_line(&self, cpu: u32, entry: Entry<'_>, out: &mut Vec<u8>) -> bool {
        let id = number(entry.data, 0, 2).and_then(|id| u16::try_from(id).ok());
        let Some(event) = id.and_then(|id| self.events.get(&id)) else { return false };
        let read = Read { event, data: entry.data };
        // A process number is signed, and printed so.
        let pid = read.number("common_pid").unwrap_or(0) as u32 as i32;
        let (s, ns) = (entry.time_ns / 1_000_000_000, entry.time_ns % 1_000_000_000);
        // Writing to a vector cannot fail.
        let _ = write!(out, "<...>-{pid} [{cpu:03}] {s}.{ns:09}: {}:", event.name);
        match event.system.as_str() {
            "dma" => read.dma(out),
            "iommu" => read.iommu(out),
            "intel_iommu" => read.vtd(out),
            _ => {}
        }
        out.push(b'\n');
        true
    }
}

/// An event being read.
struct Read<'a> {
    event: &'a Event,
    data: &'a [u8],
}

impl<'a> Read<'a> {
    fn number(&self, name: &str) -> Option<u64> {
        let field = self.event.field(name).filter(|field| field.kind == Kind::Number)?;
        number(self.data, field.offset, field.size)
    }

    /// The bytes that a location field names: its upper half is the length.
    fn located(&self, field: &Field) -> Option<&'a [u8]> {
        let word = number(self.data, field.offset, 4)?;
        let base = if field.relative { field.offset + 4 } else { 0 };
        let (at, len) = (base + (word & 0xffff) as usize, (word >> 16) as usize);
        self.data.get(at..at + len)
    }

    fn text(&self, name: &str) -> Option<&'a [u8]> {
        let field = self.event.field(name).filter(|field| field.kind == Kind::Text)?;
        self.located(field)?.split(|&byte| byte == 0).next()
    }

    /// ` KEY=VALUE`, in hexadecimal digits.
    fn hex(&self, name: &str, key: &str, out: &mut Vec<u8>) {
        if let Some(value) = self.number(name) {
            let _ = write!(out, " {key}={value:x}");
        }
    }

    fn decimal(&self, name: &str, key: &str, out: &mut Vec<u8>) {
        if let Some(value) = self.number(name) {
            let _ = write!(out, " {key}={value}");
        }
    }

    /// ` KEY={0x1,0x2}`.
    fn list(&self, name: &str, key: &str, out: &mut Vec<u8>) {
        let Some(field) = self.event.field(name) else { return };
        let Kind::List(width) = field.kind else { return };
        let Some(bytes) = self.located(field) else { return };
        let _ = write!(out, " {key}={{");
        for (at, entry) in bytes.chunks_exact(width).enumerate() {
            let value = number(entry, 0, width).unwrap_or(0);
            let _ = write!(out, "{}{value:#x}", if at == 0 { "" } else { "," });
        }
        out.push(b'}');
    }

    /// An event of the DMA API: `0000:00:03.0 dir=TO_DEVICE dma_addr=f000 size=512 phys_addr=1000 attrs=`.
    fn dma(&self, out: &mut Vec<u8>) {
        self.name("device", out);
        self.direction(out);
        self.counts("full_nents", "nents", out);
        self.counts("full_ents", "ents", out);
        if self.number("truncated").is_some_and(|truncated| truncated != 0) {
            out.extend_from_slice(b" [TRUNCATED]");
        }
        self.hex("dma_addr", "dma_addr", out);
        self.hex("addr", "dma_addr", out);
        self.decimal("size", "size", out);
        self.list("dma_addrs", "dma_addrs", out);
        self.list("lengths", "sizes", out);
        self.hex("phys_addr", "phys_addr", out);
        self.list("phys_addrs", "phys_addrs", out);
        self.list("addrs", "phys_addrs", out);
        if self.number("virt_addr") == Some(0) {
            out.extend_from_slice(b" virt_addr=0");
        }
        if let Some(attrs) = self.number("attrs") {
            out.extend_from_slice(b" attrs=");
            attributes(attrs, out);
        }
    }

    /// An event of the IOMMU: `IOMMU: iova=0x1000 - 0x2000 paddr=0x5000 size=4096`.
    fn iommu(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b" IOMMU:");
        if let Some(iova) = self.number("iova") {
            let end = iova.wrapping_add(self.number("size").unwrap_or(0));
            let _ = write!(out, " iova={iova:#018x} - {end:#018x}");
        }
        if let Some(paddr) = self.number("paddr") {
            let _ = write!(out, " paddr={paddr:#018x}");
        }
        self.decimal("size", "size", out);
        self.decimal("unmapped_size", "unmapped_size", out);
        if let Some(device) = self.text("device") {
            out.extend_from_slice(b" device=");
            printed(device, out);
        }
    }

    /// An event of VT-d's driver, of Linux 5.4 to 5.10: `dev=0000:00:03.0 dev_addr=0xf000 phys_addr=0x1000 size=4096`.
    fn vtd(&self, out: &mut Vec<u8>) {
        if let Some(device) = self.text("dev_name") {
            out.extend_from_slice(b" dev=");
            printed(device, out);
        }
        self.hex("dev_addr", "dev_addr", out);
        self.hex("phys_addr", "phys_addr", out);
        self.decimal("size", "size", out);
    }

    fn name(&self, field: &str, out: &mut Vec<u8>) {
        if let Some(name) = self.text(field) {
            out.push(b' ');
            printed(name, out);
        }
    }

    fn direction(&self, out: &mut Vec<u8>) {
        let Some(dir) = self.number("dir") else { return };
        let name = ["BIDIRECTIONAL", "TO_DEVICE", "FROM_DEVICE", "NONE"].get(dir as usize);
        let _ = match name {
            Some(name) => write!(out, " dir={name}"),
            None => write!(out, " dir={dir:#x}"),
        };
    }

    /// ` nents=2/2`: entries recorded, and all entries.
    fn counts(&self, name: &str, key: &str, out: &mut Vec<u8>) {
        if let Some(full) = self.number(name) {
            let _ = write!(out, " {key}={}/{full}", full.min(MOST_ENTRIES));
        }
    }
}

/// A device's name, on one line.
fn printed(name: &[u8], out: &mut Vec<u8>) {
    out.extend(name.iter().map(|&byte| if byte == b'\n' || byte == b'\r' { b'?' } else { byte }));
}

fn attributes(attrs: u64, out: &mut Vec<u8>) {
    let mut rest = attrs;
    let mut first = true;
    let mut add = |text: &[u8], out: &mut Vec<u8>| {
        out.extend_from_slice(if std::mem::replace(&mut first, false) { b"" } else { b"|" });
        out.extend_from_slice(text);
    };
    for (bit, name) in ATTRIBUTES {
        if rest & (1 << bit) != 0 {
            rest &= !(1 << bit);
            add(name.as_bytes(), out);
        }
    }
    if rest != 0 {
        add(format!("{rest:#x}").as_bytes(), out);
    }
}
