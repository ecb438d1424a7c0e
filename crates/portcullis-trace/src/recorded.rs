//! The kind of a recording. Linux has changed its events, so a recording's contents depend on the kernel, on its IOMMU and its
//! configuration, and on the enabled events. A recording does not say any of this: the events identify an [`Era`]. `docs/replay.md` has a
//! table of them.

use serde::{Deserialize, Serialize};

use crate::figures::number_of_these;
use crate::summary::Summary;

/// A way in which Linux records mappings, identified in a recording. Printing code matches all of them: a new one changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Era {
    /// Each mapping has a `dma_*` event, and the IOMMU's events have its memory.
    DmaAndIommu,
    /// Each mapping has a `dma_*` event. There are no IOMMU events, and device addresses are physical ones.
    Untranslated,
    /// Each recorded mapping has a `dma_*` event. There are no IOMMU events, but device addresses are not physical ones: there is an IOMMU,
    /// or bounce buffers.
    DmaAlone,
    /// There are only IOMMU events.
    IommuAlone,
    /// Some mappings have `dma_*` events, and others only IOMMU events.
    Mixed,
    /// Of the IOMMU there are only unmaps, beside `dma_*` events.
    UnmapsAlone,
    /// Events, but no mapping.
    Nothing,
    /// Allocations have no direction.
    AllocationsWithoutDirection,
    /// Allocations have an invalid direction.
    AllocationsUnreadable,
    /// Maps of the IOMMU have no size.
    MapsWithoutSize,
}

/// An era, its share of the recording, and what it hides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The era.
    pub era: Era,
    /// Its mappings; allocations for eras of allocations, or events for `MapsWithoutSize`.
    pub count: u64,
    /// What it hides, and what to enable to see it; `None` if nothing. Sentences, the last without a full stop and the first without a
    /// capital letter.
    pub hides: Option<String>,
}

impl Recorded {
    /// All eras of `summary`: first the one of mappings, then the oddities.
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
