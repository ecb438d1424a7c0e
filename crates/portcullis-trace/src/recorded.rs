//! What kind of recording it is. Linux has changed its events, so what a recording can tell depends on the kernel that made it, on its
//! IOMMU and how that is set, and on the events that were switched on. None of this stands in a recording: an [`Era`] is known by
//! the events that are met. `docs/replay.md` has a table of them.

use serde::{Deserialize, Serialize};

use crate::figures::number_of_these;
use crate::summary::Summary;

/// A way in which Linux records mappings, as it is met in a recording. Who prints them names each: one more is a change for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Era {
    /// Each mapping has a `dma_*` event, and the IOMMU's events say which memory lies behind it.
    DmaAndIommu,
    /// Each mapping has a `dma_*` event. No event of an IOMMU is there, and devices use the memory's own addresses.
    Untranslated,
    /// Each mapping that is there has a `dma_*` event. No event of an IOMMU is there, but devices use other addresses than the
    /// memory's: of an IOMMU, or of bounce buffers.
    DmaAlone,
    /// There are events of the IOMMU alone.
    IommuAlone,
    /// Some mappings have `dma_*` events, and others events of the IOMMU alone.
    Mixed,
    /// Of the IOMMU there are unmaps alone, beside `dma_*` events.
    UnmapsAlone,
    /// Events, and nothing mapped.
    Nothing,
    /// Allocations have no direction.
    AllocationsWithoutDirection,
    /// Allocations have a direction that cannot be.
    AllocationsUnreadable,
    /// Maps of the IOMMU have no size.
    MapsWithoutSize,
}

/// An era, how much of the recording is of it, and what it hides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// Which.
    pub era: Era,
    /// Mappings that are of it, allocations for those of allocations, or events for `MapsWithoutSize`.
    pub count: u64,
    /// What it hides, and what to switch on to see it; `None` where it hides nothing. Sentences, of which the last has no full stop
    /// and the first no capital letter.
    pub hides: Option<String>,
}

impl Recorded {
    /// All eras that `summary` shows: one of how mappings are recorded, and then the oddities.
    pub(crate) fn of(summary: &Summary) -> Vec<Self> {
        let mut all = vec![Self::base(summary)];
        let mut add = |era, count: u64, hides: Option<&str>| {
            if count > 0 {
                all.push(Self { era, count, hides: hides.map(str::to_owned) });
            }
        };
        add(Era::AllocationsWithoutDirection, summary.allocs_without_dir, None);
        add(Era::AllocationsUnreadable, summary.allocs_unreadable_dir, None);
        let without_size = if summary.empty_maps > summary.iommu_maps { summary.empty_maps } else { 0 };
        add(
            Era::MapsWithoutSize,
            without_size,
            Some(
                "where these maps lie is not known. Linux 3.12 to 3.19 print the size that is left to map, which is none: record with \
                 a later version",
            ),
        );
        all
    }

    fn base(summary: &Summary) -> Self {
        let (maps, direct) = (summary.maps, summary.direct_maps);
        let of = |era, count, hides: Option<String>| Self { era, count, hides };
        if summary.nameless > 0 {
            return of(Era::Mixed, summary.nameless, Some(hidden_where_nameless(summary)));
        }
        if maps == 0 && direct == 0 {
            return of(Era::Nothing, 0, None);
        }
        if maps == 0 {
            return of(Era::IommuAlone, direct, Some(hidden_where_iommu_alone()));
        }
        if direct > 0 {
            return of(Era::Mixed, direct, Some(hidden_where_mixed(summary)));
        }
        if summary.iommu_maps == 0 && summary.iommu_unmaps == 0 {
            if summary.translated == 0 {
                return of(Era::Untranslated, maps, None);
            }
            let hides = "if an IOMMU translates these devices, what they map without a `dma:*` event is not there: since Linux 6.17, so \
                         does NVMe. Record `iommu:*`, too, or boot with `iommu=pt` for the recording";
            return of(Era::DmaAlone, maps, Some(hides.into()));
        }
        if summary.iommu_unmaps > 0 && summary.runs_claimed == 0 && summary.translated > 0 {
            return of(Era::UnmapsAlone, maps, Some(hidden_where_unmaps_alone(summary)));
        }
        of(Era::DmaAndIommu, maps, None)
    }
}

fn hidden_where_iommu_alone() -> String {
    "which driver mapped, in which direction, and which bytes of its pages, is not known. So bounce, adaptive and swiotlb copy nothing \
     of it, and no verdict names them. Since Linux 6.12, `dma:*` has that: record it, too"
        .into()
}

fn hidden_where_mixed(summary: &Summary) -> String {
    let what = "their direction, and which bytes of their pages they are, is not known, so bounce, adaptive and swiotlb copy nothing of \
                them";
    if summary.copies_known() {
        format!("{what}; they are too few to matter")
    } else {
        format!(
            "{what}, and no verdict names these policies. NVMe behind an IOMMU maps so since Linux 6.17, and VFIO always. Boot with \
             `iommu=pt` for the recording: then `dma:*` has all that drivers of the kernel map"
        )
    }
}

fn hidden_where_nameless(summary: &Summary) -> String {
    format!(
        "which device they are of is not known, so those of the one that was asked for may be missing. {}Boot with `iommu=pt` for the \
         recording: then `dma:*` has all that drivers of the kernel map",
        no_verdict(summary)
    )
}

fn no_verdict(summary: &Summary) -> &'static str {
    if summary.costs_known() { "" } else { "So no verdict is given. " }
}

fn hidden_where_unmaps_alone(summary: &Summary) -> String {
    let what = "as Linux 7.0 has, and later stable versions have not. Which memory lies behind an allocation, and how long the entries \
                of merged lists are, is guessed";
    let are = |hidden| number_of_these(hidden, "unmap is", "unmaps are");
    match summary.hidden() {
        0 => what.into(),
        hidden => format!(
            "{what}. {} of mappings that are not there at all, such as NVMe's. {}Boot with `iommu=pt` for the recording: \
             then `dma:*` has all that drivers of the kernel map",
            are(hidden),
            no_verdict(summary)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmaps_without_maps_are_those_of_devices_that_are_translated() {
        let of = |translated, ends_without_map, maps| {
            let mut summary = Summary { maps, translated, ends_without_map, ..Summary::default() };
            (summary.iommu_unmaps, summary.runs_claimed) = (9, 0);
            let base = Recorded::base(&summary);
            (base.era, base.hides.unwrap_or_default())
        };
        let guessed = "as Linux 7.0 has, and later stable versions have not. Which memory lies behind an allocation, and how long the \
                       entries of merged lists are, is guessed";
        assert_eq!(of(0, 2, 198), (Era::DmaAndIommu, String::new()));
        assert_eq!(of(1, 0, 198), (Era::UnmapsAlone, guessed.into()));
        // One in a hundred changes no verdict.
        for (hidden, verdict) in [(2, ""), (3, "So no verdict is given. ")] {
            let expected = format!(
                "{guessed}. {hidden} unmaps are of mappings that are not there at all, such as NVMe's. {verdict}Boot with `iommu=pt` \
                 for the recording: then `dma:*` has all that drivers of the kernel map"
            );
            assert_eq!(of(1, hidden, 198), (Era::UnmapsAlone, expected));
        }
    }

    #[test]
    fn what_a_mixed_recording_hides_is_said_with_what_that_means() {
        let of = |direct_maps| hidden_where_mixed(&Summary { maps: 1000, direct_maps, ..Summary::default() });
        let what = "their direction, and which bytes of their pages they are, is not known, so bounce, adaptive and swiotlb copy \
                    nothing of them";
        assert_eq!(of(1), format!("{what}; they are too few to matter"));
        let many = "no verdict names these policies. NVMe behind an IOMMU maps so since Linux 6.17, and VFIO always. Boot with `iommu=pt` \
                    for the recording: then `dma:*` has all that drivers of the kernel map";
        assert_eq!(of(500), format!("{what}, and {many}"));
    }
}
