//! The `format` files of tracefs: the layout of events.

use rustc_hash::FxHashMap;

use super::page::Head;

/// Why a file of tracefs is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{file} has no {what}: this kernel describes its trace buffers in another way than any that is known"
)]
pub struct FormatError {
    /// The file.
    pub file: String,
    /// What it lacks.
    pub what: &'static str,
}

/// The type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A number of 1, 2, 4 or 8 bytes.
    Number,
    /// The location of a text.
    Text,
    /// The location of a list of numbers of this many bytes.
    List(usize),
    /// A type that no relevant event has.
    Other,
}

/// A field of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) offset: usize,
    pub(super) size: usize,
    /// Its location counts from behind the field, not from the event's beginning.
    pub(super) relative: bool,
}

/// An enabled event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) system: String,
    pub(super) name: String,
    pub(super) fields: Vec<Field>,
}

impl Event {
    pub(super) fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }
}

/// The kernel's descriptions of pages and events.
///
/// ```
/// use portcullis_trace::ring::Formats;
///
/// let page = "field: u64 timestamp; offset:0; size:8; signed:0;\n\
///             field: local_t commit; offset:8; size:8; signed:1;\n\
///             field: char data; offset:16; size:4080; signed:0;\n";
/// let mut formats = Formats::new(page)?;
/// formats.add("iommu", "name: unmap\nID: 7\nformat:\n\tfield:u64 iova;\toffset:8;\tsize:8;\tsigned:0;\n")?;
/// assert!(formats.has("iommu", "unmap"));
/// # Ok::<(), portcullis_trace::ring::FormatError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Formats {
    pub(super) head: Head,
    pub(super) events: FxHashMap<u16, Event>,
}

impl Formats {
    /// Parses `header_page`, the text of `events/header_page`.
    ///
    /// # Errors
    /// [`FormatError`] if it lacks the place of a page's time, length or events.
    pub fn new(header_page: &str) -> Result<Self, FormatError> {
        let missing = |what| FormatError { file: "events/header_page".into(), what };
        let place = |name: &'static str, what| {
            let field = header_page.lines().filter_map(field).find(|field| field.name == name);
            field.map(|field| (field.offset, field.size)).ok_or_else(|| missing(what))
        };
        let (time, time_size) = place("timestamp", "field timestamp")?;
        let (commit, commit_size) = place("commit", "field commit")?;
        let (data, _) = place("data", "field data")?;
        if time_size != 8 || !matches!(commit_size, 4 | 8) {
            return Err(missing("timestamp of 8 bytes and commit of 4 or 8"));
        }
        Ok(Self { head: Head { time, commit, commit_size, data }, events: FxHashMap::default() })
    }

    /// Adds an event of `system` with the `format` file `text`.
    ///
    /// # Errors
    /// [`FormatError`] if it has no name or number.
    pub fn add(&mut self, system: &str, text: &str) -> Result<(), FormatError> {
        let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let missing = |name: &str, what| FormatError { file: format!("events/{system}/{name}/format"), what };
        let name = line("name:").filter(|name| !name.is_empty()).ok_or_else(|| missing("*", "name"))?;
        let id = line("ID:").and_then(|id| id.parse().ok()).ok_or_else(|| missing(name, "ID"))?;
        let fields = text.lines().filter_map(field).collect();
        self.events.insert(id, Event { system: system.into(), name: name.into(), fields });
        Ok(())
    }

    /// Whether an event is known.
    pub fn has(&self, system: &str, name: &str) -> bool {
        self.events.values().any(|event| event.system == system && event.name == name)
    }
}

/// `field:__data_loc char[] device; offset:8; size:4; signed:0;`
fn field(line: &str) -> Option<Field> {
    let mut parts = line.trim().strip_prefix("field:")?.split(';').map(str::trim);
    let declared = parts.next()?;
    let mut value = |key: &str| parts.next()?.strip_prefix(key)?.parse::<usize>().ok();
    let (offset, size) = (value("offset:")?, value("size:")?);
    let (kind, name) = declared.rsplit_once(' ')?;
    let located = kind.strip_prefix("__data_loc ").or_else(|| kind.strip_prefix("__rel_loc "));
    let kind_of = match located {
        Some("char[]") => Kind::Text,
        Some(list) => width(list.strip_suffix("[]")?).map_or(Kind::Other, Kind::List),
        None if name.ends_with(']') => Kind::Other,
        None if matches!(size, 1 | 2 | 4 | 8) => Kind::Number,
        None => Kind::Other,
    };
    let name = name.split('[').next()?.to_owned();
    Some(Field { name, kind: kind_of, offset, size, relative: kind.starts_with("__rel_loc ") })
}

/// Bytes of a list's element type, if it is supported.
fn width(kind: &str) -> Option<usize> {
    match kind {
        "u64" | "dma_addr_t" | "phys_addr_t" | "unsigned long" | "size_t" => Some(8),
        "u32" | "unsigned int" => Some(4),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_told_apart() {
        let of = |line: &str| field(line).map(|field| (field.name, field.kind, field.offset, field.size));
        let expected = |name: &str, kind, offset, size| Some((name.to_owned(), kind, offset, size));
        assert_eq!(
            of("\tfield:__data_loc char[] device;\toffset:8;\tsize:4;\tsigned:0;"),
            expected("device", Kind::Text, 8, 4)
        );
        assert_eq!(
            of("field:__data_loc u64[] phys_addrs;\toffset:24;\tsize:4;\tsigned:0;"),
            expected("phys_addrs", Kind::List(8), 24, 4)
        );
        assert_eq!(
            of("field:__data_loc unsigned int[] lengths; offset:32; size:4; signed:0;"),
            expected("lengths", Kind::List(4), 32, 4)
        );
        assert_eq!(
            of("field:void * virt_addr; offset:16; size:8; signed:0;"),
            expected("virt_addr", Kind::Number, 16, 8)
        );
        assert_eq!(
            of("field:char comm[16]; offset:8; size:16; signed:0;"),
            expected("comm", Kind::Other, 8, 16)
        );
        assert!(field("field:__rel_loc char[] device; offset:8; size:4; signed:0;").unwrap().relative);
        assert_eq!(of("print fmt: \"x\""), None);
    }

    #[test]
    fn a_page_that_is_described_in_another_way_is_an_error() {
        let page = |time: &str, commit: &str| {
            format!(
                "field: u64 {time}; offset:0; size:8; signed:0;\nfield: local_t commit; offset:8; size:{commit}; signed:1;\n\
                 field: char data; offset:16; size:4080; signed:0;"
            )
        };
        assert!(
            Formats::new(&page("timestamp", "8")).is_ok() && Formats::new(&page("timestamp", "4")).is_ok()
        );
        let error = Formats::new(&page("time", "8")).unwrap_err().to_string();
        assert_eq!(
            error,
            "events/header_page has no field timestamp: this kernel describes its trace buffers in another way than any that is \
             known"
        );
        assert!(Formats::new(&page("timestamp", "2")).is_err() && Formats::new("").is_err());
    }

    #[test]
    fn an_event_has_a_name_and_a_number() {
        let mut formats = Formats::new(
            "field: u64 timestamp; offset:0; size:8; signed:0;\nfield: local_t commit; offset:8; size:8; signed:1;\n\
             field: char data; offset:16; size:4080; signed:0;",
        )
        .unwrap();
        assert_eq!(formats.add("dma", "ID: 3\n").unwrap_err().what, "name");
        assert_eq!(formats.add("dma", "name: x\nID: 70000\n").unwrap_err().what, "ID");
        assert!(!formats.has("dma", "x"));
        formats.add("dma", "name: x\nID: 3\n").unwrap();
        assert!(formats.has("dma", "x") && !formats.has("iommu", "x") && !formats.has("dma", "y"));
    }
}
