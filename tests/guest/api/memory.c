// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Memory that a driver and its device share: coherent, of pages, in pieces; as the kernel sees it, the device, and a process. */
#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mman.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#include "api.h"

struct area {
	const char *name;
	struct api *api;
	size_t size;
	dma_addr_t at;
	u8 *view;
	/* One of these, if it is not coherent memory. */
	struct page *page;
	struct sg_table *pieces;
};

static int map_to_process(struct file *file, struct vm_area_struct *vma)
{
	struct area *area = file->private_data;
	struct device *dev = area->api->dev;

	if (area->pieces)
		return dma_mmap_noncontiguous(dev, vma, area->size, area->pieces);
	if (area->page)
		return dma_mmap_pages(dev, vma, area->size, area->page);
	return dma_mmap_attrs(dev, vma, area->view, area->at, area->size, 0);
}

static const struct file_operations area_file = { .owner = THIS_MODULE, .mmap = map_to_process };

/* Maps the area from a page on into the process that has asked for the checks. */
static unsigned long to_process(struct area *area, unsigned long first, size_t len)
{
	struct file *file = anon_inode_getfile("portcullis_api", &area_file, area, O_RDWR);
	unsigned long at;

	if (IS_ERR(file))
		return PTR_ERR(file);
	at = vm_mmap(file, 0, len, PROT_READ | PROT_WRITE, MAP_SHARED, first << PAGE_SHIFT);
	fput(file);
	return at;
}

static bool process_sees(unsigned long at, u8 value)
{
	u8 got[LENGTH];

	return !copy_from_user(got, (void __user *)at, LENGTH) && api_all(got, value, LENGTH);
}

static void sync(struct area *area, bool for_cpu)
{
	struct device *dev = area->api->dev;

	if (area->pieces && for_cpu)
		dma_sync_sgtable_for_cpu(dev, area->pieces, DMA_BIDIRECTIONAL);
	else if (area->pieces)
		dma_sync_sgtable_for_device(dev, area->pieces, DMA_BIDIRECTIONAL);
	else if (area->page && for_cpu)
		dma_sync_single_for_cpu(dev, area->at, area->size, DMA_BIDIRECTIONAL);
	else if (area->page)
		dma_sync_single_for_device(dev, area->at, area->size, DMA_BIDIRECTIONAL);
}

/* The kernel, the device and a process see the same memory. */
static void shared(struct area *area)
{
	const char *name = area->name;
	struct api *api = area->api;
	size_t last = area->size - LENGTH;
	unsigned long at = to_process(area, 0, area->size);
	u8 value[LENGTH];

	/* Linux itself does not clear pieces. */
	if (!area->pieces || api_is_ours(api))
		api_check(api_all(area->view, 0, area->size), "%s: is zeroed", name);
	memset(area->view, 0, area->size);
	sync(area, false);
	api_write(api, area->at + last, MINE, LENGTH);
	sync(area, true);
	api_check(api_all(area->view + last, MINE, LENGTH), "%s: the kernel sees what the device wrote to its end", name);
	api_check(api_all(area->view, 0, last), "%s: the device wrote to nothing else", name);
	if (!api_check(!IS_ERR_VALUE(at), "%s: is mapped to a process (%ld)", name, IS_ERR_VALUE(at) ? (long)at : 0))
		return;
	api_check(process_sees(at + last, MINE), "%s: the process sees what the device wrote to its end", name);
	memset(value, KEPT, LENGTH);
	api_check(!copy_to_user((void __user *)(at + PAGE_SIZE), value, LENGTH), "%s: the process writes to its second page", name);
	sync(area, false);
	api_check(api_all(api_read(api, area->at + PAGE_SIZE, LENGTH), KEPT, LENGTH), "%s: the device reads what the process wrote", name);
	vm_munmap(at, area->size);

	memset(area->view + 2 * PAGE_SIZE, SECRET, LENGTH);
	at = to_process(area, 2, PAGE_SIZE);
	api_check(!IS_ERR_VALUE(at) && process_sees(at, SECRET), "%s: a process maps its third page alone", name);
	if (!IS_ERR_VALUE(at))
		vm_munmap(at, PAGE_SIZE);
	at = to_process(area, 1, area->size);
	if (!api_check(at == -ENXIO, "%s: a process maps nothing past its end (%ld)", name, IS_ERR_VALUE(at) ? (long)at : 0) && !IS_ERR_VALUE(at))
		vm_munmap(at, area->size);
}

/* A list of the area's pages. */
static void listed(struct area *area)
{
	struct sg_table table;
	int ret = dma_get_sgtable(area->api->dev, &table, area->view, area->at, area->size);
	u8 *copy = kvzalloc(area->size, GFP_KERNEL);
	size_t at;

	if (!api_check(!ret && copy, "%s: has a list of its pages (%d)", area->name, ret))
		goto out;
	for (at = 0; at < area->size; at++)
		area->view[at] = at / PAGE_SIZE + at;
	api_check(sg_copy_to_buffer(table.sgl, table.orig_nents, copy, area->size) == area->size && !memcmp(copy, area->view, area->size),
		  "%s: the list is of its memory", area->name);
out:
	if (!ret)
		sg_free_table(&table);
	kvfree(copy);
}

/* The first page is kept when the area is freed: the device must not reach it from then on, under any policy. */
static void freed(struct area *area, struct page *first, void (*give_back)(struct area *area))
{
	void __iomem *registers = area->api->registers;
	u8 *page = page_address(first);

	/* The IOTLB holds the address from here on, and the write comes when the area was freed. */
	api_write(area->api, area->at, MINE, LENGTH);
	get_page(first);
	memset(page, KEPT, LENGTH);
	edu_start(registers, EDU_BUFFER, area->at, LENGTH, EDU_TO_MEMORY);
	give_back(area);
	edu_wait(registers);
	if (api_is_ours(area->api))
		api_check(api_all(page, KEPT, LENGTH), "%s: the device does not reach it once it is freed", area->name);
	put_page(first);
}

static void free_coherent(struct area *area)
{
	dma_free_attrs(area->api->dev, area->size, area->view, area->at, 0);
}

static void free_pages_of(struct area *area)
{
	dma_free_pages(area->api->dev, area->size, area->page, area->at, DMA_BIDIRECTIONAL);
}

static void free_pieces(struct area *area)
{
	dma_vunmap_noncontiguous(area->api->dev, area->view);
	dma_free_noncontiguous(area->api->dev, area->size, area->pieces, DMA_BIDIRECTIONAL);
}

static int coherent(struct api *api, const char *name, size_t size)
{
	struct area area = { .name = name, .api = api, .size = size };

	area.view = dma_alloc_attrs(api->dev, size, &area.at, GFP_KERNEL, 0);
	if (!area.view)
		return -ENOMEM;
	shared(&area);
	listed(&area);
	freed(&area, is_vmalloc_addr(area.view) ? vmalloc_to_page(area.view) : virt_to_page(area.view), free_coherent);
	return 0;
}

static int of_pages(struct api *api)
{
	struct area area = { .name = "pages", .api = api, .size = 4 * PAGE_SIZE };
	struct page *page;
	dma_addr_t at;

	area.page = dma_alloc_pages(api->dev, area.size, &area.at, DMA_BIDIRECTIONAL, GFP_KERNEL);
	if (!area.page)
		return -ENOMEM;
	area.view = page_address(area.page);
	shared(&area);
	freed(&area, area.page, free_pages_of);

	page = dma_alloc_pages(api->dev, PAGE_SIZE, &at, DMA_TO_DEVICE, GFP_KERNEL);
	if (!page)
		return -ENOMEM;
	memset(page_address(page), KEPT, PAGE_SIZE);
	dma_sync_single_for_device(api->dev, at, PAGE_SIZE, DMA_TO_DEVICE);
	api_check(api_all(api_read(api, at, LENGTH), KEPT, LENGTH), "pages to the device: it reads them");
	api_write(api, at, MINE, LENGTH);
	if (!api_way_is(api, "linux-passthrough"))
		api_check(api_all(page_address(page), KEPT, LENGTH), "pages to the device: it does not write them");
	dma_free_pages(api->dev, PAGE_SIZE, page, at, DMA_TO_DEVICE);
	return 0;
}

static int in_pieces(struct api *api)
{
	struct area area = { .name = "pieces", .api = api, .size = 75 * PAGE_SIZE };

	area.pieces = dma_alloc_noncontiguous(api->dev, area.size, DMA_BIDIRECTIONAL, GFP_KERNEL, 0);
	if (!area.pieces)
		return -ENOMEM;
	api_check(area.pieces->nents == 1 && sg_dma_len(area.pieces->sgl) == area.size, "pieces: the device has them in a row");
	area.at = sg_dma_address(area.pieces->sgl);
	area.view = dma_vmap_noncontiguous(api->dev, area.size, area.pieces);
	if (!area.view) {
		dma_free_noncontiguous(api->dev, area.size, area.pieces, DMA_BIDIRECTIONAL);
		return -ENOMEM;
	}
	shared(&area);
	freed(&area, sg_page(area.pieces->sgl), free_pieces);
	return 0;
}

int api_memory(struct api *api)
{
	unsigned long flags;
	dma_addr_t at;
	void *page;
	int ret;

	ret = coherent(api, "coherent memory", 5 * PAGE_SIZE);
	if (!ret)
		ret = coherent(api, "much coherent memory", 75 * PAGE_SIZE);
	if (!ret)
		ret = of_pages(api);
	if (!ret)
		ret = in_pieces(api);
	if (ret)
		return ret;

	local_irq_save(flags);
	page = dma_alloc_coherent(api->dev, PAGE_SIZE, &at, GFP_ATOMIC);
	local_irq_restore(flags);
	if (!api_check(page, "coherent memory: is there with interrupts off"))
		return 0;
	api_write(api, at, MINE, LENGTH);
	api_check(api_all(page, MINE, LENGTH), "coherent memory that was taken with interrupts off: the device writes it");
	dma_free_coherent(api->dev, PAGE_SIZE, page, at);
	return 0;
}
