// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The drivers' DMA operations: streaming mappings, lists, syncs, limits. They are called in any context, on every CPU at once, under drivers'
 * spinlocks.
 */
#include <linux/memremap.h>
#include <linux/scatterlist.h>
#include <linux/sched/clock.h>
#include <linux/slab.h>

#include "ops.h"

noinline bool pcs_tell_limits(struct pcs_device *pd, u64 mask, u64 offset_mask)
{
	unsigned long flags;
	int ret = 0;

	raw_spin_lock_irqsave(&pd->limits_lock, flags);
	if (pd->mask != mask || pd->offset_mask != offset_mask) {
		ret = pc_set_limits(pd->core, mask, offset_mask);
		/* A copy cannot keep all of these bits: keep those within a page, as swiotlb does. */
		if (ret)
			ret = pc_set_limits(pd->core, mask, offset_mask & ~PAGE_MASK);
		/* Refused: no device has a mask of 0, so each map comes here again, and fails. */
		WRITE_ONCE(pd->offset_mask, offset_mask);
		WRITE_ONCE(pd->mask, ret ? 0 : mask);
	}
	raw_spin_unlock_irqrestore(&pd->limits_lock, flags);
	if (ret)
		dev_err_ratelimited(pd->dev, "portcullis: nothing is mapped: no addresses below %llx: %d\n", mask, ret);
	return !ret;
}

void pcs_refused(struct pcs_device *pd, const char *what, u64 addr, u64 len, int error)
{
	this_cpu_inc(pd->counts->errors);
	/* The line names the device and its driver. */
	if (error == -EIO)
		dev_err_ratelimited(pd->dev, "portcullis: %s of %llu bytes at %llx failed: the device may go on reaching their memory\n", what, len,
				    addr);
	else
		dev_err_ratelimited(pd->dev, "portcullis: %s of %llu bytes at %llx refused: %d\n", what, len, addr, error);
}

void pcs_stays(struct pcs_device *pd, u64 phys, u64 len, size_t pieces)
{
	dev_err_ratelimited(pd->dev, "portcullis: a map of %llu bytes in %zu pieces, the first at physical address %llx, failed half-way and could not be undone: the device may go on reaching them\n",
			    len, pieces, phys);
}

/* One call of this number is timed, for all of them: a clock costs more than the operation. */
#define TIMED 16

static __always_inline bool counts_and_times(u64 __percpu *count)
{
	return unlikely(this_cpu_inc_return(*count) % TIMED == 0);
}

static u64 begin_timing(u64 __percpu *count)
{
	return counts_and_times(count) ? local_clock() : 0;
}

static void end_timing(u64 __percpu *ns, u64 begin)
{
	if (unlikely(begin)) {
		s64 took = local_clock() - begin;

		/* The clocks of two CPUs may differ a little. */
		if (took > 0)
			this_cpu_add(*ns, took * TIMED);
	}
}

/* Out of line, so that untimed calls save and restore fewer registers. */
static noinline u64 map_timed(struct pcs_device *pd, phys_addr_t phys, size_t size, enum dma_data_direction dir, u32 attributes)
{
	u64 begin = local_clock(), addr = pc_map(pd->core, phys, size, dir, attributes);

	end_timing(&pd->counts->map_ns, begin);
	return addr;
}

static noinline int unmap_timed(struct pcs_device *pd, dma_addr_t addr, size_t size, u32 attributes)
{
	u64 begin = local_clock();
	int ret = pc_unmap(pd->core, addr, size, attributes);

	end_timing(&pd->counts->unmap_ns, begin);
	return ret;
}

static u32 attributes_of(unsigned long attrs)
{
	/* Network drivers pass DMA_ATTR_SKIP_CPU_SYNC here, most others nothing. */
	if (!attrs)
		return 0;
	return (attrs & DMA_ATTR_MMIO ? PC_MMIO : 0) | (attrs & DMA_ATTR_PRIVILEGED ? PC_PRIVILEGED : 0) |
	       (attrs & DMA_ATTR_SKIP_CPU_SYNC ? PC_SKIP_COPY : 0) | (attrs & DMA_ATTR_REQUIRE_COHERENT ? PC_LASTING : 0);
}

static noinline dma_addr_t map_failed(struct pcs_device *pd, phys_addr_t phys, size_t size, u64 addr)
{
	this_cpu_inc(pd->counts->errors);
	if (addr == PC_MAPPING_STAYS)
		pcs_stays(pd, phys, size, 1);
	return DMA_MAPPING_ERROR;
}

static __always_inline dma_addr_t map(struct device *dev, phys_addr_t phys, size_t size, enum dma_data_direction dir, u32 attributes)
{
	struct pcs_device *pd = pcs_mapping(dev);
	u64 addr;

	if (unlikely(!pd))
		return DMA_MAPPING_ERROR;
	if (counts_and_times(&pd->counts->maps))
		addr = map_timed(pd, phys, size, dir, attributes);
	else
		addr = pc_map(pd->core, phys, size, dir, attributes);
	return unlikely(addr >= PC_MAPPING_STAYS) ? map_failed(pd, phys, size, addr) : addr;
}

static __always_inline void unmap(struct device *dev, dma_addr_t addr, size_t size, u32 attributes)
{
	struct pcs_device *pd = pcs_of(dev);
	int ret;

	if (counts_and_times(&pd->counts->unmaps))
		ret = unmap_timed(pd, addr, size, attributes);
	else
		ret = pc_unmap(pd->core, addr, size, attributes);
	if (unlikely(ret))
		pcs_refused(pd, "unmap", addr, size, ret);
}

static void unmap_phys(struct device *dev, dma_addr_t addr, size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	unmap(dev, addr, size, attributes_of(attrs));
}

#if PCS_MAPS_PHYS
static dma_addr_t map_phys(struct device *dev, phys_addr_t phys, size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	/* Memory of another device without a common bus: as for lists, below. */
	if (!(attrs & DMA_ATTR_MMIO) && pfn_valid(PHYS_PFN(phys)) && is_pci_p2pdma_page(pfn_to_page(PHYS_PFN(phys))))
		return DMA_MAPPING_ERROR;
	return map(dev, phys, size, dir, attributes_of(attrs));
}
#else
static dma_addr_t map_page(struct device *dev, struct page *page, unsigned long offset, size_t size, enum dma_data_direction dir,
			   unsigned long attrs)
{
	if (is_pci_p2pdma_page(page))
		return DMA_MAPPING_ERROR;
	return map(dev, page_to_phys(page) + offset, size, dir, attributes_of(attrs));
}

static dma_addr_t map_resource(struct device *dev, phys_addr_t phys, size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	return map(dev, phys, size, dir, attributes_of(attrs) | PC_MMIO);
}

static void unmap_resource(struct device *dev, dma_addr_t addr, size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	unmap(dev, addr, size, attributes_of(attrs) | PC_MMIO);
}
#endif

/* Segments of lists without an allocation. */
#define ENTRIES 32

/*
 * Writes the device's addresses into a list, entry by entry, merging adjacent pieces up to the device's segment size and boundary: `at` walks
 * along the addresses. Returns how many entries are used, or 0 if a piece crosses a boundary.
 */
static int write_list(struct device *dev, struct scatterlist *sgl, int nents, const struct pc_segment *at, long count)
{
	unsigned int most = dma_get_max_seg_size(dev);
	u64 boundary = dma_get_seg_boundary(dev), done = 0;
	struct scatterlist *sg, *to = NULL;
	int n, written = 0;

	/* One segment for all: the usual list. */
	if (count == 1 && at->len <= most && (at->addr & ~boundary) == ((at->addr + at->len - 1) & ~boundary)) {
		sg_dma_address(sgl) = at->addr;
		sg_dma_len(sgl) = at->len;
		if (nents > 1) {
			to = sg_next(sgl);
			sg_dma_address(to) = DMA_MAPPING_ERROR;
			sg_dma_len(to) = 0;
		}
		return 1;
	}
	for_each_sg(sgl, sg, nents, n) {
		u64 addr = at->addr + done, len = sg->length;

		/* No entry of its own. */
		if (!len)
			continue;
		if ((addr & ~boundary) != ((addr + len - 1) & ~boundary))
			return 0;
		done += len;
		if (done == at->len) {
			at++;
			done = 0;
		}
		if (to && sg_dma_address(to) + sg_dma_len(to) == addr && sg_dma_len(to) + len <= most &&
		    (sg_dma_address(to) & ~boundary) == ((addr + len - 1) & ~boundary)) {
			sg_dma_len(to) += len;
			continue;
		}
		to = to ? sg_next(to) : sgl;
		sg_dma_address(to) = addr;
		sg_dma_len(to) = len;
		written++;
	}
	if (written < nents) {
		to = sg_next(to);
		sg_dma_address(to) = DMA_MAPPING_ERROR;
		sg_dma_len(to) = 0;
	}
	return written;
}

/* Ends the core's mapping of a call that fails all the same. */
static void take_back(struct pcs_device *pd, u64 addr, u64 len, u32 attributes)
{
	int ret = pc_unmap(pd->core, addr, len, attributes | PC_SKIP_COPY);

	if (unlikely(ret))
		pcs_refused(pd, "undo of a failed map", addr, len, ret);
}

/* Maps each entry individually: if one range of addresses would cross a boundary of the device's. */
static int map_apart(struct pcs_device *pd, struct scatterlist *sgl, int nents, enum dma_data_direction dir, u32 attributes)
{
	u64 boundary = dma_get_seg_boundary(pd->dev);
	struct scatterlist *sg, *back;
	int n, m;

	for_each_sg(sgl, sg, nents, n) {
		u64 addr = pc_map(pd->core, sg_phys(sg), sg->length, dir, attributes);

		if (addr < PC_MAPPING_STAYS && (addr & ~boundary) != ((addr + sg->length - 1) & ~boundary)) {
			take_back(pd, addr, sg->length, attributes);
			addr = PC_MAPPING_ERROR;
		}
		if (addr >= PC_MAPPING_STAYS) {
			for_each_sg(sgl, back, n, m)
				take_back(pd, sg_dma_address(back), sg_dma_len(back), attributes);
			if (addr != PC_MAPPING_STAYS)
				return -ENOMEM;
			pcs_stays(pd, sg_phys(sg), sg->length, 1);
			return -EIO;
		}
		sg_dma_address(sg) = addr;
		sg_dma_len(sg) = sg->length;
	}
	return nents;
}

static int map_list(struct pcs_device *pd, struct scatterlist *sgl, int nents, enum dma_data_direction dir, u32 attributes)
{
	struct pc_segment here[ENTRIES], *list = here, *out;
	struct scatterlist *sg;
	long count;
	int n, written;
	size_t pieces = 0;
	u64 bytes = 0;

	/* Room for the list and for the core's result, which is never longer. */
	if (nents > ENTRIES / 2) {
		list = kmalloc_array(nents, 2 * sizeof(*list), GFP_ATOMIC | __GFP_NOWARN);
		if (!list)
			return -ENOMEM;
	}
	out = list + nents;
	for_each_sg(sgl, sg, nents, n) {
		/* Peer to peer: refused, because nothing checks whether the two devices reach each other. */
		if (unlikely(is_pci_p2pdma_page(sg_page(sg)))) {
			written = -EREMOTEIO;
			goto out;
		}
		if (sg->length)
			list[pieces++] = (struct pc_segment){ sg_phys(sg), sg->length };
		bytes += sg->length;
	}
	count = pc_map_sg(pd->core, list, pieces, dir, attributes, out);
	if (count <= 0) {
		written = count ? count : -EINVAL;
		/* Which of the pieces is not known. */
		if (written == -EIO)
			pcs_stays(pd, list->addr, bytes, pieces);
		goto out;
	}
	written = write_list(pd->dev, sgl, nents, out, count);
	if (unlikely(!written)) {
		take_back(pd, out->addr, out[count - 1].addr + out[count - 1].len - out->addr, attributes);
		written = map_apart(pd, sgl, nents, dir, attributes);
	}
out:
	if (list != here)
		kfree(list);
	return written;
}

static int map_sg(struct device *dev, struct scatterlist *sgl, int nents, enum dma_data_direction dir, unsigned long attrs)
{
	struct pcs_device *pd = pcs_mapping(dev);
	u64 begin;
	int ret;

	if (unlikely(!pd))
		return -ENOMEM;
	begin = begin_timing(&pd->counts->maps);
	ret = map_list(pd, sgl, nents, dir, attributes_of(attrs));
	end_timing(&pd->counts->map_ns, begin);
	if (unlikely(ret < 0)) {
		this_cpu_inc(pd->counts->errors);
		/* The errors that dma_map_sgtable passes to its callers. */
		if (ret != -EINVAL && ret != -ENOMEM && ret != -EREMOTEIO)
			ret = -EIO;
	}
	return ret;
}

/* The used entries, and the addresses from the first of them to the end of the last. */
static u64 whole(struct scatterlist *sgl, int nents, int *used)
{
	u64 begin = sg_dma_address(sgl), end = begin;
	struct scatterlist *sg;
	int n;

	*used = 0;
	for_each_sg(sgl, sg, nents, n) {
		if (!sg_dma_len(sg))
			break;
		end = sg_dma_address(sg) + sg_dma_len(sg);
		++*used;
	}
	return end - begin;
}

static void unmap_sg(struct device *dev, struct scatterlist *sgl, int nents, enum dma_data_direction dir, unsigned long attrs)
{
	struct pcs_device *pd = pcs_of(dev);
	u32 attributes = attributes_of(attrs);
	u64 begin = begin_timing(&pd->counts->unmaps);
	struct scatterlist *sg;
	int used, n, ret;
	u64 len = whole(sgl, nents, &used);

	ret = pc_unmap(pd->core, sg_dma_address(sgl), len, attributes);
	if (unlikely(ret == -ERANGE && used > 1)) {
		/* Mapped individually: the core has no mapping of the whole. */
		ret = 0;
		for_each_sg(sgl, sg, used, n) {
			int error = pc_unmap(pd->core, sg_dma_address(sg), sg_dma_len(sg), attributes);

			ret = ret ? ret : error;
		}
	}
	end_timing(&pd->counts->unmap_ns, begin);
	if (unlikely(ret))
		pcs_refused(pd, "unmap of a list", sg_dma_address(sgl), len, ret);
}

static void sync(struct device *dev, u64 addr, u64 len, bool for_cpu)
{
	struct pcs_device *pd = pcs_of(dev);
	int ret = for_cpu ? pc_sync_for_cpu(pd->core, addr, len) : pc_sync_for_device(pd->core, addr, len);

	this_cpu_inc(pd->counts->syncs);
	if (unlikely(ret))
		pcs_refused(pd, for_cpu ? "sync for the CPU" : "sync for the device", addr, len, ret);
}

static void sync_single_for_cpu(struct device *dev, dma_addr_t addr, size_t size, enum dma_data_direction dir)
{
	sync(dev, addr, size, true);
}

static void sync_single_for_device(struct device *dev, dma_addr_t addr, size_t size, enum dma_data_direction dir)
{
	sync(dev, addr, size, false);
}

static void sync_list(struct device *dev, struct scatterlist *sgl, int nents, bool for_cpu)
{
	struct scatterlist *sg;
	int n;

	/* Individually: a driver may sync only the first entries, and individually mapped ones are several mappings. */
	for_each_sg(sgl, sg, nents, n) {
		if (!sg_dma_len(sg))
			break;
		sync(dev, sg_dma_address(sg), sg_dma_len(sg), for_cpu);
	}
}

static void sync_sg_for_cpu(struct device *dev, struct scatterlist *sgl, int nents, enum dma_data_direction dir)
{
	sync_list(dev, sgl, nents, true);
}

static void sync_sg_for_device(struct device *dev, struct scatterlist *sgl, int nents, enum dma_data_direction dir)
{
	sync_list(dev, sgl, nents, false);
}

/* Whether a mask leaves addresses: the first page is never mapped. */
static int dma_supported(struct device *dev, u64 mask)
{
	struct pcs_device *pd = pcs_of(dev);
	u64 first = max_t(u64, pd->group->domain->geometry.aperture_start, PAGE_SIZE);

	if (mask >= first + PAGE_SIZE - 1)
		return 1;
	dev_err(dev, "portcullis: a mask of %llx leaves no addresses\n", mask);
	return 0;
}

static size_t max_mapping_size(struct device *dev)
{
	return SIZE_MAX;
}

/* Longer mappings are not copied, for any device: this function does not know which. */
static size_t opt_mapping_size(void)
{
	const struct pc_policy *policy = &pcs_default_policy;

	/* But shorter requests would make a disk slow. */
	if ((policy->kind == PC_BOUNCE || policy->kind == PC_AUTO) && policy->threshold >= 64 << 10)
		return policy->threshold;
	return SIZE_MAX;
}

/* List pieces that end and begin at page boundaries get consecutive addresses. */
static unsigned long get_merge_boundary(struct device *dev)
{
	return PAGE_SIZE - 1;
}

/*
 * A device that shares a domain with a protected one, and could not be taken itself: Linux must not allocate addresses for it there, because
 * they may be ours. Nothing is mapped for it.
 */
#if PCS_MAPS_PHYS
static dma_addr_t refuse_phys(struct device *dev, phys_addr_t phys, size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}
#else
static dma_addr_t refuse_page(struct device *dev, struct page *page, unsigned long offset, size_t size, enum dma_data_direction dir,
			      unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}
#endif

static int refuse_sg(struct device *dev, struct scatterlist *sgl, int nents, enum dma_data_direction dir, unsigned long attrs)
{
	return -ENOMEM;
}

static void *refuse_alloc(struct device *dev, size_t size, dma_addr_t *handle, gfp_t gfp, unsigned long attrs)
{
	return NULL;
}

const struct dma_map_ops pcs_refusing_ops = {
#if PCS_MAPS_PHYS
	.map_phys = refuse_phys,
#else
	.map_page = refuse_page,
#endif
	.map_sg = refuse_sg,
	.alloc = refuse_alloc,
};

void pcs_fill_ops(struct dma_map_ops *ops)
{
	*ops = (struct dma_map_ops){
		.alloc = pcs_alloc_coherent,
		.free = pcs_free_coherent,
		.PCS_ALLOC_PAGES = pcs_alloc_pages,
		.free_pages = pcs_free_pages,
#if PCS_NONCONTIGUOUS
		.alloc_noncontiguous = pcs_alloc_noncontiguous,
		.free_noncontiguous = pcs_free_noncontiguous,
#endif
		.mmap = pcs_mmap,
		.get_sgtable = pcs_get_sgtable,
#if PCS_MAPS_PHYS
		.map_phys = map_phys,
		.unmap_phys = unmap_phys,
#else
		.map_page = map_page,
		.unmap_page = unmap_phys,
		.map_resource = map_resource,
		.unmap_resource = unmap_resource,
#endif
		.map_sg = map_sg,
		.unmap_sg = unmap_sg,
		.sync_single_for_cpu = sync_single_for_cpu,
		.sync_single_for_device = sync_single_for_device,
		.sync_sg_for_cpu = sync_sg_for_cpu,
		.sync_sg_for_device = sync_sg_for_device,
		.dma_supported = dma_supported,
		.max_mapping_size = max_mapping_size,
		.opt_mapping_size = opt_mapping_size,
		.get_merge_boundary = get_merge_boundary,
	};
}
