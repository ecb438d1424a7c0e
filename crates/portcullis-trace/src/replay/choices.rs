//! The choices between copying and mapping, for the report.

use portcullis::addr::Direction;
use portcullis::dma::Explained;
use serde::{Deserialize, Deserializer, Serialize};

use super::report::{Name, one_of};

/// The choices for a device's mappings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choices {
    /// The device, as an index into the trace's.
    pub device: usize,
    /// The sizes and directions that occurred, smallest first.
    pub rows: Vec<Choice>,
}

/// The final choice for one size and direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The largest mapping of its size class, in bytes; the smallest is above half of that.
    pub most_bytes: u64,
    /// `to-device`, `from-device` or `both`.
    #[serde(deserialize_with = "direction")]
    pub direction: Name,
    /// Whether it is for mappings that share a page with other data. For these, to map is to map the middle and copy the ends.
    #[serde(default)]
    pub shared: bool,
    /// The current choice for mappings that allow both: `copy` or `map`.
    #[serde(deserialize_with = "way")]
    pub choice: Name,
    /// The cheaper way by the two costs below: `copy` or `map`; `None` if one of them is not known. It may differ from the choice, which
    /// changes only for a clear difference.
    #[serde(deserialize_with = "perhaps_way")]
    pub cheaper: Option<Name>,
    /// Nanoseconds to map and to unmap by copying, with the profile's waits.
    pub copy_ns: Option<(u64, u64)>,
    /// Nanoseconds to map and to unmap by mapping.
    pub map_ns: Option<(u64, u64)>,
    /// Copied mappings.
    pub copied: u64,
    /// Mapped ones.
    pub mapped: u64,
    /// Changes of the choice.
    pub switches: u64,
}

impl Choices {
    pub(super) fn new(device: usize, rows: &[Explained]) -> Self {
        let row = |row: &Explained| Choice {
            most_bytes: row.most_bytes,
            direction: match row.direction {
                Direction::ToDevice => "to-device",
                Direction::FromDevice => "from-device",
                Direction::Bidirectional => "both",
            },
            shared: row.shared,
            choice: if row.copies { "copy" } else { "map" },
            cheaper: row.copy_ns.zip(row.map_ns).map(|((copy, copied), (map, mapped))| {
                if copy + copied <= map + mapped { "copy" } else { "map" }
            }),
            copy_ns: row.copy_ns,
            map_ns: row.map_ns,
            copied: row.copied,
            mapped: row.mapped,
            switches: row.switches,
        };
        Self { device, rows: rows.iter().map(row).collect() }
    }
}

fn direction<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    one_of(&["to-device", "from-device", "both"], from)
}

fn way<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    one_of(&["copy", "map"], from)
}

fn perhaps_way<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Name>, D::Error> {
    #[derive(Deserialize)]
    struct Way(#[serde(deserialize_with = "way")] Name);
    Ok(Option::<Way>::deserialize(from)?.map(|Way(way)| way))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_named_and_compared_by_both_halves_of_its_costs() {
        let of = |direction, costs: Option<[(u64, u64); 2]>| {
            let (copy_ns, map_ns) = (costs.map(|[copy, _]| copy), costs.map(|[_, map]| map));
            let row = Explained {
                most_bytes: 4096,
                direction,
                shared: false,
                copies: costs.is_none(),
                copy_ns,
                map_ns,
                copied: 1,
                mapped: 2,
                switches: 3,
            };
            let row = &Choices::new(0, &[row]).rows[0];
            (row.direction, row.choice, row.cheaper)
        };
        assert_eq!(of(Direction::ToDevice, None), ("to-device", "copy", None));
        assert_eq!(of(Direction::FromDevice, Some([(5, 10), (11, 4)])), ("from-device", "map", Some("copy")));
        assert_eq!(of(Direction::Bidirectional, Some([(5, 10), (4, 10)])), ("both", "map", Some("map")));
        assert_eq!(of(Direction::Bidirectional, Some([(5, 10), (5, 11)])), ("both", "map", Some("copy")));
    }
}
