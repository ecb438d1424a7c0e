// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The core's mapper: Linux's IOMMU driver maps, unmaps and invalidates. These functions are called in any context: none sleeps unless the caller
 * may.
 */
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "shim.h"

/* List pieces that are passed on without an allocation. */
#define PIECES 16

static_assert(PC_PROT_READ == IOMMU_READ && PC_PROT_WRITE == IOMMU_WRITE && PC_PROT_CACHE == IOMMU_CACHE && PC_PROT_MMIO == IOMMU_MMIO &&
	      PC_PROT_PRIV == IOMMU_PRIV);

/*
 * The hints are the gather's record of unmaps: a size, or, in kernels with generic page tables, the levels of leaves, in the same word. On x86
 * only the levels are used, and these may be joined by OR.
 */
#ifndef CONFIG_X86
#error "on Arm an invalidation steps by the page size of the gather: the hints must carry it apart"
#endif
static u64 hints_of(const struct iommu_iotlb_gather *gather)
{
	return gather->pgsize;
}

/* Unmaps as far as the driver goes in one step. */
static size_t unmap_step(struct pcs_group *group, u64 iova, u64 len, u64 *hints)
{
	struct iommu_iotlb_gather gather;
	size_t step;

	iommu_iotlb_gather_init(&gather);
	step = iommu_unmap_fast(group->domain, iova, len, &gather);
	this_cpu_inc(group->counts->unmaps);
	if (unlikely(pcs_frees_tables(&gather))) {
		/* Empty tables are freed after the invalidation, and only by this gather. */
		this_cpu_inc(group->counts->waits);
		iommu_iotlb_sync(group->domain, &gather);
	} else {
		*hints |= hints_of(&gather);
	}
	return step;
}

/*
 * Removes the mappings of a range with holes, page by page, and returns their bytes. Looks each page up first: in a hole VT-d's driver steps by
 * the size of the missing table, and removes the neighbours' pages. A driver that removes only whole mappings does so with the first page. Sets
 * *stays if the driver does not remove a mapped page.
 */
static noinline u64 unmap_found(struct pcs_group *group, u64 iova, u64 len, u64 *hints, bool *stays)
{
	u64 at = 0, done = 0;

	while (at < len) {
		size_t step = 0;

		if (iommu_iova_to_phys(group->domain, iova + at)) {
			step = unmap_step(group, iova + at, PAGE_SIZE, hints);
			*stays |= !step;
		}
		done += step;
		at += step ? step : PAGE_SIZE;
	}
	return min(done, len);
}

/*
 * Removes a failed map's entries, and returns the map's result. VT-d's driver, before it had generic page tables, does not report its entries
 * when it runs out of memory for tables, so Linux's own undo misses them; and a later map there would keep the old entries. So this looks at the
 * whole range. (A remainder of Linux's own undo that the driver has dropped is not found: Linux ignores that, too.)
 */
static noinline int undo(struct pcs_group *group, u64 iova, u64 len, int error)
{
	bool stays = false;
	u64 hints = 0;

	unmap_found(group, iova, len, &hints, &stays);
	pcs_iommu_flush(group);
	if (!stays)
		return error;
	pr_err_ratelimited("group %d: a map of %llu bytes to %llx failed (%d), and a part of it could not be removed again: devices may reach its memory\n",
			   iommu_group_id(group->iommu_group), len, iova, error);
	return PC_STAYS;
}

/* One call for each piece, where a list cannot be mapped at once. */
static int map_pieces(struct pcs_group *group, u64 iova, const struct pc_segment *list, size_t count, int prot, gfp_t gfp)
{
	u64 at = iova;
	size_t i;
	int ret;

	for (i = 0; i < count; i++) {
		this_cpu_inc(group->counts->maps);
		ret = pcs_map_one(group->domain, at, list[i].addr, list[i].len, prot, gfp);
		if (ret)
			return undo(group, iova, at - iova + list[i].len, ret);
		at += list[i].len;
	}
	return 0;
}

int pcs_iommu_map(void *of, u64 iova, u64 phys, u64 len, int prot)
{
	struct pcs_group *group = of;
	int ret;

	if (unlikely(READ_ONCE(group->lost)))
		return -ENODEV;
	this_cpu_inc(group->counts->maps);
	ret = pcs_map_one(group->domain, iova, phys, len, prot, pcs_gfp());
	return unlikely(ret) ? undo(group, iova, len, ret) : 0;
}

/* Whether each length fits a scatterlist entry: no buffer is longer, but firmware's regions may be. */
static bool fits(const struct pc_segment *list, size_t count)
{
	u64 lengths = 0;

	while (count--)
		lengths |= list[count].len;
	return lengths <= UINT_MAX;
}

int pcs_iommu_map_list(void *of, u64 iova, const struct pc_segment *list, size_t count, u64 len, int prot)
{
	struct pcs_group *group = of;
	struct scatterlist here[PIECES], *sgl = here;
	gfp_t gfp = pcs_gfp();
	ssize_t done;
	size_t i;

	if (unlikely(READ_ONCE(group->lost)))
		return -ENODEV;
	if (!PCS_MAPS_LISTS || prot & IOMMU_MMIO || count > INT_MAX || !fits(list, count))
		return map_pieces(group, iova, list, count, prot, gfp);
	if (count > PIECES) {
		sgl = kmalloc_array(count, sizeof(*sgl), gfp | __GFP_NOWARN);
		if (!sgl)
			return map_pieces(group, iova, list, count, prot, gfp);
	}
	sg_init_table(sgl, count);
	for (i = 0; i < count; i++)
		sg_set_page(&sgl[i], pfn_to_page(PHYS_PFN(list[i].addr)), list[i].len, offset_in_page(list[i].addr));
	this_cpu_inc(group->counts->maps);
	done = pcs_map_list(group->domain, iova, sgl, count, prot, gfp);
	if (sgl != here)
		kfree(sgl);
	if (unlikely(done < 0 || (u64)done != len))
		return undo(group, iova, len, done < 0 ? done : -ENOMEM);
	return 0;
}

/* Goes on after the driver removed only `done` bytes of a range: removes all other mappings there, too. */
static noinline u64 unmap_rest(struct pcs_group *group, u64 iova, u64 len, u64 done, u64 *hints)
{
	bool stays = false;

	if (done < len)
		done += unmap_found(group, iova + done, len - done, hints, &stays);
	return min(done, len);
}

u64 pcs_iommu_unmap(void *of, u64 iova, u64 len, u64 *hints)
{
	struct pcs_group *group = of;
	u64 done;

	if (unlikely(READ_ONCE(group->lost)))
		return len;
	done = unmap_step(group, iova, len, hints);
	return likely(done == len) ? len : unmap_rest(group, iova, len, done, hints);
}

/* Not all of the range was mapped: another caller may have removed a part without a wait, so everything is flushed. */
static noinline u64 unmap_rest_now(struct pcs_group *group, u64 iova, u64 len, u64 done)
{
	u64 hints = 0;

	done = unmap_rest(group, iova, len, done, &hints);
	pcs_iommu_flush(group);
	return done;
}

u64 pcs_iommu_unmap_now(void *of, u64 iova, u64 len)
{
	struct pcs_group *group = of;
	struct iommu_iotlb_gather gather;
	u64 done;

	if (unlikely(READ_ONCE(group->lost)))
		return len;
	iommu_iotlb_gather_init(&gather);
	done = iommu_unmap_fast(group->domain, iova, len, &gather);
	this_cpu_inc(group->counts->unmaps);
	this_cpu_inc(group->counts->waits);
	iommu_iotlb_sync(group->domain, &gather);
	return likely(done == len) ? len : unmap_rest_now(group, iova, len, done);
}

void pcs_iommu_sync(void *of, u64 first, u64 last, u64 hints)
{
	struct pcs_group *group = of;
	struct iommu_iotlb_gather gather;

	if (unlikely(READ_ONCE(group->lost)))
		return;
	this_cpu_inc(group->counts->waits);
	iommu_iotlb_gather_init(&gather);
	gather.start = first;
	gather.end = last;
	gather.pgsize = hints;
	iommu_iotlb_sync(group->domain, &gather);
}

void pcs_iommu_flush(void *of)
{
	struct pcs_group *group = of;

	if (unlikely(READ_ONCE(group->lost)))
		return;
	this_cpu_inc(group->counts->flushes);
	iommu_flush_iotlb_all(group->domain);
	/* A driver without that (virtio's, once) only waits for ranges. */
	if (!group->domain->ops->flush_iotlb_all)
		pcs_iommu_sync(group, group->domain->geometry.aperture_start, group->domain->geometry.aperture_end, 0);
}
