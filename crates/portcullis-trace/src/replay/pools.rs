//! The bounce buffers of a device, of either kind.
#![allow(unsafe_code, reason = "the pools' calls trust their caller with memory, which here is the trace's")]

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, PhysAddr};
use portcullis::bounce::pool::{Attributes, BounceDevice, BounceMapError, PoolMapping};
use portcullis::bounce::swiotlb::{Constraints, Swiotlb};
use portcullis::dma::DmaSegment;
use portcullis::domain::PhysSegment;
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

use super::live::{Live, Way};
use super::memory::TraceMemory;
use super::port::{EndError, MapFailed};

/// Through which buffers a device's mappings go.
pub(super) enum Pool<M: Mapper, P: Platform> {
    /// Those of its domain.
    Dynamic(BounceDevice<M, P, Arc<TraceMemory>>),
    /// The machine's, which has no IOMMU.
    Swiotlb(Arc<Swiotlb<P, Arc<TraceMemory>>>),
}

/// For whom a part of a mapping is synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Cpu,
    Device,
}

impl<M: Mapper, P: Platform> Pool<M, P> {
    /// Maps a list whose pages have bytes. How, and how many segments of `view` that is.
    #[inline]
    pub(super) fn map(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        view: &mut [DmaSegment],
    ) -> Result<(Way, usize), MapFailed> {
        match self {
            Self::Dynamic(device) => {
                // SAFETY: the memory is simulated, and all accesses to it are this thread's.
                let mapping = unsafe { device.map(list, direction, Attributes::default()) };
                place(mapping, view)
            }
            Self::Swiotlb(pool) => {
                for (index, &part) in list.iter().enumerate() {
                    // SAFETY: as above.
                    let mapped = unsafe { pool.map(part, direction, &Constraints::new()) };
                    match mapped {
                        Ok(mapped) => {
                            view[index] = DmaSegment { iova: Iova::new(mapped.phys.get()), len: mapped.len };
                        }
                        Err(error) => {
                            // What was just mapped: a list is mapped as a whole or not at all.
                            let _ = unmap_each(pool, &view[..index]);
                            return Err(MapFailed::Swiotlb(error));
                        }
                    }
                }
                Ok((Way::Swiotlb, list.len()))
            }
        }
    }

    /// Ends a mapping that [`map`](Self::map) made.
    #[inline]
    pub(super) fn unmap(&self, way: &Way, view: &[DmaSegment]) -> Result<(), EndError> {
        match (self, way) {
            (Self::Dynamic(device), &Way::Pool { iova, len, .. }) => {
                // SAFETY: this thread syncs and unmaps all mappings, one at a time; all accesses to the memory are its.
                Ok(unsafe { device.pool().unmap(iova, len) }?)
            }
            (Self::Swiotlb(pool), Way::Swiotlb) => unmap_each(pool, view),
            _ => Ok(()),
        }
    }

    /// Syncs `len` bytes from `offset` on of a mapping.
    #[inline]
    pub(super) fn sync(&self, live: &Live, side: Side, (offset, len): (u64, u64)) -> Result<(), EndError> {
        match (self, &live.way) {
            (Self::Dynamic(device), &Way::Pool { iova, .. }) => {
                // SAFETY: as for `unmap`.
                unsafe {
                    match side {
                        Side::Cpu => device.pool().sync_for_cpu(iova, offset, len)?,
                        Side::Device => device.pool().sync_for_device(iova, offset, len)?,
                    }
                }
            }
            (Self::Swiotlb(pool), Way::Swiotlb) => {
                let end = offset.saturating_add(len);
                let mut begins = 0;
                for segment in &live.view {
                    let (first, last) = (offset.max(begins), end.min(begins + segment.len));
                    if first < last {
                        let phys = PhysAddr::new(segment.iova.get().wrapping_add(first - begins));
                        // SAFETY: this thread syncs and unmaps all mappings, one at a time.
                        unsafe {
                            match side {
                                Side::Cpu => pool.sync_for_cpu(phys, last - first)?,
                                Side::Device => pool.sync_for_device(phys, last - first)?,
                            }
                        }
                    }
                    begins += segment.len;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The device as one of the pool of its domain.
    pub(super) fn bounce_device(&self) -> Option<&BounceDevice<M, P, Arc<TraceMemory>>> {
        match self {
            Self::Dynamic(device) => Some(device),
            Self::Swiotlb(_) => None,
        }
    }
}

/// Writes what the device was given to `view`.
fn place(
    mapping: Result<PoolMapping<'_>, BounceMapError>,
    view: &mut [DmaSegment],
) -> Result<(Way, usize), MapFailed> {
    let mapping = mapping.map_err(MapFailed::Bounce)?;
    let used = mapping.write_segments(view);
    Ok((Way::Pool { iova: mapping.iova(), len: mapping.len(), copied: mapping.way() }, used))
}

/// Ends the mappings of all segments, the first error kept.
fn unmap_each<P: Platform>(pool: &Swiotlb<P, Arc<TraceMemory>>, view: &[DmaSegment]) -> Result<(), EndError> {
    let mut result = Ok(());
    for segment in view {
        // SAFETY: no other call for it is under way, and the device is done with it.
        let unmapped = unsafe { pool.unmap(PhysAddr::new(segment.iova.get()), segment.len) };
        result = result.and(unmapped.map_err(EndError::Swiotlb));
    }
    result
}
