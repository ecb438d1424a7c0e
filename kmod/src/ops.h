/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Shared by ops.c and coherent.c. */
#ifndef PORTCULLIS_OPS_H
#define PORTCULLIS_OPS_H

#include "shim.h"

/* Passes changed masks to the core. Returns whether anything can be mapped. */
bool pcs_tell_limits(struct pcs_device *pd, u64 mask, u64 offset_mask);

/*
 * The device, with its driver's current masks: a driver sets them in its probe, by functions that do not notify us, so each map compares them.
 * NULL: no mapping is possible.
 */
static inline struct pcs_device *pcs_mapping(struct device *dev)
{
	struct pcs_device *pd = pcs_of(dev);
	u64 mask = pcs_reach(dev), offset_mask = dma_get_min_align_mask(dev);

	if (unlikely(READ_ONCE(pd->mask) != mask || READ_ONCE(pd->offset_mask) != offset_mask) &&
	    !pcs_tell_limits(pd, mask, offset_mask))
		return NULL;
	return pd;
}

/* Counts and logs, rate-limited, an error of the core. */
void pcs_refused(struct pcs_device *pd, const char *what, u64 addr, u64 len, int error);
/* Logs, as above, that the device may reach memory that was not mapped, after PC_MAPPING_STAYS or -EIO of a map. */
void pcs_stays(struct pcs_device *pd, u64 phys, u64 len, size_t pieces);

void *pcs_alloc_coherent(struct device *dev, size_t size, dma_addr_t *handle, gfp_t gfp, unsigned long attrs);
void pcs_free_coherent(struct device *dev, size_t size, void *vaddr, dma_addr_t handle, unsigned long attrs);
struct page *pcs_alloc_pages(struct device *dev, size_t size, dma_addr_t *handle, enum dma_data_direction dir, gfp_t gfp);
void pcs_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t handle, enum dma_data_direction dir);
int pcs_mmap(struct device *dev, struct vm_area_struct *vma, void *vaddr, dma_addr_t handle, size_t size, unsigned long attrs);
int pcs_get_sgtable(struct device *dev, struct sg_table *sgt, void *vaddr, dma_addr_t handle, size_t size, unsigned long attrs);
#if PCS_NONCONTIGUOUS
struct sg_table *pcs_alloc_noncontiguous(struct device *dev, size_t size, enum dma_data_direction dir, gfp_t gfp,
					 unsigned long attrs);
void pcs_free_noncontiguous(struct device *dev, size_t size, struct sg_table *sgt, enum dma_data_direction dir);
#endif

#endif
