// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Long-lived memory that a driver and its device share: contiguous if possible, otherwise in few pieces, with consecutive addresses for the
 * device and for the kernel. It is never copied, and ends strictly. If an unmap is refused, or a failed map could not be undone, the memory is
 * not freed: the device may still reach it.
 */
#include <linux/log2.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "ops.h"

/* Up to this order one piece is tried first, because the page allocator easily finds it. */
#define EASY_ORDER 3
/* Pieces of larger memory: 2 MiB, one page-table entry on x86-64. */
#define LARGEST_ORDER 9

static gfp_t memory_of(gfp_t gfp)
{
	/* Addresses are translated: any memory will do. */
	return (gfp & ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP)) | __GFP_ZERO;
}

static int unmap_lasting(struct device *dev, dma_addr_t handle, size_t size)
{
	struct pcs_device *pd = pcs_of(dev);
	int ret = pc_unmap(pd->core, handle, PAGE_ALIGN(size), PC_LASTING);

	this_cpu_inc(pd->counts->unmaps);
	if (ret)
		pcs_refused(pd, "free", handle, size, ret);
	return ret;
}

static struct page *alloc_one(struct device *dev, size_t size, dma_addr_t *handle, enum dma_data_direction dir, gfp_t gfp,
			      u32 attributes)
{
	struct pcs_device *pd = pcs_mapping(dev);
	struct page *page = pd ? alloc_pages_node(dev_to_node(dev), memory_of(gfp), get_order(size)) : NULL;

	if (!page)
		return NULL;
	this_cpu_inc(pd->counts->maps);
	*handle = pc_map(pd->core, page_to_phys(page), PAGE_ALIGN(size), dir, attributes | PC_LASTING);
	if (*handle >= PC_MAPPING_STAYS) {
		this_cpu_inc(pd->counts->errors);
		if (*handle == PC_MAPPING_STAYS)
			pcs_stays(pd, page_to_phys(page), size, 1);
		else
			__free_pages(page, get_order(size));
		return NULL;
	}
	return page;
}

struct page *pcs_alloc_pages(struct device *dev, size_t size, dma_addr_t *handle, enum dma_data_direction dir, gfp_t gfp)
{
	return alloc_one(dev, size, handle, dir, gfp, 0);
}

void pcs_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t handle, enum dma_data_direction dir)
{
	if (!unmap_lasting(dev, handle, size))
		__free_pages(page, get_order(size));
}

static void put_pages(struct page **pages, size_t count)
{
	while (count--)
		__free_page(pages[count]);
	kvfree(pages);
}

/*
 * Allocates pages for the next of `count`: a piece as large as possible, up to the order of the last piece, and at least one page. Returns the
 * order, or a negative value.
 */
static int alloc_piece(struct device *dev, size_t count, int last_order, gfp_t gfp, struct page **first)
{
	int order;

	for (order = min_t(int, ilog2(count), last_order); order >= 0; order--) {
		/* Retry hard only for a single page. */
		*first = alloc_pages_node(dev_to_node(dev), order ? gfp | __GFP_NORETRY | __GFP_NOWARN : gfp, order);
		if (*first) {
			split_page(*first, order);
			break;
		}
	}
	return order;
}

/* Allocates pages in few pieces, and maps them to consecutive addresses. May sleep. */
static struct page **alloc_apart(struct device *dev, size_t size, dma_addr_t *handle, enum dma_data_direction dir, gfp_t gfp,
				 u32 attributes)
{
	struct pcs_device *pd = pcs_mapping(dev);
	size_t count = PAGE_ALIGN(size) >> PAGE_SHIFT, pieces = 0, i = 0;
	struct page **pages = kvcalloc(count, sizeof(*pages), GFP_KERNEL);
	struct pc_segment *list = kvmalloc_array(count, 2 * sizeof(*list), GFP_KERNEL);
	int order = LARGEST_ORDER, page;
	long mapped;

	while (pd && pages && list && i < count) {
		struct page *first;

		order = alloc_piece(dev, count - i, order, memory_of(gfp), &first);
		if (order < 0)
			break;
		for (page = 0; page < 1 << order; page++)
			pages[i++] = first + page;
		list[pieces++] = (struct pc_segment){ page_to_phys(first), PAGE_SIZE << order };
	}
	if (!pages || !list || i < count)
		goto fail;
	this_cpu_inc(pd->counts->maps);
	mapped = pc_map_sg(pd->core, list, pieces, dir, attributes | PC_LASTING, list + count);
	if (mapped != 1) {
		this_cpu_inc(pd->counts->errors);
		/* Pages that the device may reach are not freed; their list is. */
		if (mapped == -EIO || mapped > 0) {
			pcs_stays(pd, list->addr, size, 1);
			kvfree(pages);
			pages = NULL;
		}
		goto fail;
	}
	*handle = list[count].addr;
	kvfree(list);
	return pages;
fail:
	kvfree(list);
	if (pages)
		put_pages(pages, i);
	return NULL;
}

void *pcs_alloc_coherent(struct device *dev, size_t size, dma_addr_t *handle, gfp_t gfp, unsigned long attrs)
{
	u32 attributes = attrs & DMA_ATTR_PRIVILEGED ? PC_PRIVILEGED : 0;
	bool apart = gfpflags_allow_blocking(gfp) && !(attrs & DMA_ATTR_FORCE_CONTIGUOUS);
	struct page *page = NULL, **pages;
	void *vaddr;

	if (!apart || get_order(size) <= EASY_ORDER)
		page = alloc_one(dev, size, handle, DMA_BIDIRECTIONAL, apart ? gfp | __GFP_NOWARN : gfp, attributes);
	if (page)
		return page_address(page);
	if (!apart)
		return NULL;
	pages = alloc_apart(dev, size, handle, DMA_BIDIRECTIONAL, gfp, attributes);
	if (!pages)
		return NULL;
	/* Then the area owns the pages and their list. */
	vaddr = vmap(pages, PAGE_ALIGN(size) >> PAGE_SHIFT, VM_MAP | VM_MAP_PUT_PAGES, PAGE_KERNEL);
	if (!vaddr && !unmap_lasting(dev, *handle, size))
		put_pages(pages, PAGE_ALIGN(size) >> PAGE_SHIFT);
	else if (!vaddr)
		kvfree(pages); /* Only their list: the device may reach the pages. */
	return vaddr;
}

void pcs_free_coherent(struct device *dev, size_t size, void *vaddr, dma_addr_t handle, unsigned long attrs)
{
	bool freed = !unmap_lasting(dev, handle, size);

	if (is_vmalloc_addr(vaddr) && freed)
		vfree(vaddr);
	else if (is_vmalloc_addr(vaddr))
		vunmap(vaddr);
	else if (freed)
		__free_pages(virt_to_page(vaddr), get_order(size));
}

static struct page *page_at(void *vaddr, size_t index)
{
	void *at = vaddr + index * PAGE_SIZE;

	return is_vmalloc_addr(at) ? vmalloc_to_page(at) : virt_to_page(at);
}

int pcs_mmap(struct device *dev, struct vm_area_struct *vma, void *vaddr, dma_addr_t handle, size_t size, unsigned long attrs)
{
	unsigned long count = PAGE_ALIGN(size) >> PAGE_SHIFT, i;
	int ret = 0;

	if (vma->vm_pgoff >= count || vma_pages(vma) > count - vma->vm_pgoff)
		return -ENXIO;
	if (!is_vmalloc_addr(vaddr))
		return remap_pfn_range(vma, vma->vm_start, page_to_pfn(virt_to_page(vaddr)) + vma->vm_pgoff,
				       vma->vm_end - vma->vm_start, vma->vm_page_prot);
	for (i = 0; !ret && i < vma_pages(vma); i++)
		ret = vm_insert_page(vma, vma->vm_start + i * PAGE_SIZE, page_at(vaddr, vma->vm_pgoff + i));
	return ret;
}

int pcs_get_sgtable(struct device *dev, struct sg_table *sgt, void *vaddr, dma_addr_t handle, size_t size, unsigned long attrs)
{
	size_t count = PAGE_ALIGN(size) >> PAGE_SHIFT, i;
	struct page **pages = kvmalloc_array(count, sizeof(*pages), GFP_KERNEL);
	int ret = -ENOMEM;

	if (!pages)
		return ret;
	for (i = 0; i < count; i++)
		pages[i] = page_at(vaddr, i);
	ret = sg_alloc_table_from_pages(sgt, pages, count, 0, PAGE_ALIGN(size), GFP_KERNEL);
	kvfree(pages);
	return ret;
}

#if PCS_NONCONTIGUOUS
struct sg_table *pcs_alloc_noncontiguous(struct device *dev, size_t size, enum dma_data_direction dir, gfp_t gfp, unsigned long attrs)
{
	struct dma_sgt_handle *sh = kmalloc(sizeof(*sh), gfp);
	dma_addr_t handle;

	if (!sh)
		return NULL;
	sh->pages = alloc_apart(dev, size, &handle, dir, gfp, 0);
	if (!sh->pages)
		goto fail;
	if (sg_alloc_table_from_pages(&sh->sgt, sh->pages, PAGE_ALIGN(size) >> PAGE_SHIFT, 0, PAGE_ALIGN(size), GFP_KERNEL)) {
		if (!unmap_lasting(dev, handle, size))
			put_pages(sh->pages, PAGE_ALIGN(size) >> PAGE_SHIFT);
		goto fail;
	}
	sh->sgt.sgl->dma_address = handle;
	sg_dma_len(sh->sgt.sgl) = size;
	sh->sgt.nents = 1;
	return &sh->sgt;
fail:
	kfree(sh);
	return NULL;
}

void pcs_free_noncontiguous(struct device *dev, size_t size, struct sg_table *sgt, enum dma_data_direction dir)
{
	struct dma_sgt_handle *sh = sgt_handle(sgt);

	if (!unmap_lasting(dev, sgt->sgl->dma_address, size))
		put_pages(sh->pages, PAGE_ALIGN(size) >> PAGE_SHIFT);
	sg_free_table(&sh->sgt);
	kfree(sh);
}
#endif
