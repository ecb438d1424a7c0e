// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Lists: joined as the device's segment size and boundary allow, synced and ended whole, each with one wait for the hardware. */
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "api.h"

#define PAGES		16

/* Pages, each by itself, and a list of them that begins with the last: no two lie side by side in memory. */
struct pages {
	struct page *page[PAGES];
	struct sg_table table;
};

static u8 *page_of(struct pages *pages, int at)
{
	return page_address(pages->page[PAGES - 1 - at]);
}

static int make(struct pages *pages)
{
	struct scatterlist *sg;
	int at, ret;

	ret = sg_alloc_table(&pages->table, PAGES, GFP_KERNEL);
	if (ret)
		return ret;
	for (at = 0; at < PAGES; at++) {
		pages->page[at] = alloc_page(GFP_KERNEL | __GFP_ZERO);
		if (!pages->page[at])
			return -ENOMEM;
	}
	for_each_sg(pages->table.sgl, sg, PAGES, at)
		sg_set_page(sg, virt_to_page(page_of(pages, at)), PAGE_SIZE, 0);
	return 0;
}

static void drop(struct pages *pages)
{
	int at;

	sg_free_table(&pages->table);
	for (at = 0; at < PAGES; at++)
		if (pages->page[at])
			__free_page(pages->page[at]);
}

/* The address that a byte of the list has, or DMA_MAPPING_ERROR. */
static dma_addr_t address_of(struct sg_table *table, u64 byte)
{
	struct scatterlist *sg;
	int at;

	for_each_sgtable_dma_sg(table, sg, at) {
		if (byte < sg_dma_len(sg))
			return sg_dma_address(sg) + byte;
		byte -= sg_dma_len(sg);
	}
	return DMA_MAPPING_ERROR;
}

/* What a device of this segment size and boundary gets: all of the list, and no entry that is too long or crosses. */
static bool fits(struct device *dev, struct sg_table *table, u64 wanted)
{
	u64 most = dma_get_max_seg_size(dev), boundary = dma_get_seg_boundary(dev), len = 0;
	struct scatterlist *sg;
	bool fits = true;
	int at;

	for_each_sgtable_dma_sg(table, sg, at) {
		dma_addr_t end = sg_dma_address(sg) + sg_dma_len(sg) - 1;

		fits &= sg_dma_len(sg) && sg_dma_len(sg) <= most && (sg_dma_address(sg) & ~boundary) == (end & ~boundary);
		len += sg_dma_len(sg);
	}
	return fits && len == wanted;
}

static void limit(struct device *dev, unsigned int size, unsigned long boundary)
{
	dma_set_max_seg_size(dev, size);
	dma_set_seg_boundary(dev, boundary);
}

static int whole(struct api *api, struct pages *pages)
{
	struct sg_table *table = &pages->table;
	struct device *dev = api->dev;
	const u8 *read;
	int at, ret;

	limit(dev, UINT_MAX, ULONG_MAX);
	for (at = 0; at < PAGES; at++)
		memset(page_of(pages, at), at, PAGE_SIZE);
	ret = dma_map_sgtable(dev, table, DMA_BIDIRECTIONAL, 0);
	if (ret)
		return ret;
	api_check(table->nents == 1 && fits(dev, table, PAGES * PAGE_SIZE), "a list of %d pages: one entry (%u)", PAGES, table->nents);
	read = api_read(api, address_of(table, 11 * PAGE_SIZE - LENGTH / 2), LENGTH);
	api_check(api_all(read, 10, LENGTH / 2) && api_all(read + LENGTH / 2, 11, LENGTH / 2), "a list: the device reads over the end of a page");
	api_write(api, address_of(table, 5 * PAGE_SIZE - LENGTH / 2), MINE, LENGTH);
	dma_sync_sgtable_for_cpu(dev, table, DMA_BIDIRECTIONAL);
	api_check(api_all(page_of(pages, 4) + PAGE_SIZE - LENGTH / 2, MINE, LENGTH / 2) && api_all(page_of(pages, 5), MINE, LENGTH / 2),
		  "a list: after a sync the driver has what the device wrote");
	memset(page_of(pages, 15) + 64, KEPT, LENGTH);
	dma_sync_sgtable_for_device(dev, table, DMA_BIDIRECTIONAL);
	api_check(api_all(api_read(api, address_of(table, 15 * PAGE_SIZE + 64), LENGTH), KEPT, LENGTH),
		  "a list: after a sync the device reads what the driver wrote");
	api_write(api, address_of(table, PAGES * PAGE_SIZE - LENGTH), MINE, LENGTH);
	dma_unmap_sgtable(dev, table, DMA_BIDIRECTIONAL, 0);
	api_check(api_all(page_of(pages, 15) + PAGE_SIZE - LENGTH, MINE, LENGTH) && api_all(page_of(pages, 15) + 64, KEPT, LENGTH) &&
			  api_all(page_of(pages, 8), 8, PAGE_SIZE),
		  "a list: afterwards the driver has what the device wrote to its end");
	return 0;
}

static int limited(struct api *api, struct pages *pages, const char *name, unsigned int size, unsigned long boundary, int least, int most)
{
	struct sg_table *table = &pages->table;
	struct device *dev = api->dev;
	int ret;

	limit(dev, size, boundary);
	ret = dma_map_sgtable(dev, table, DMA_FROM_DEVICE, 0);
	if (ret)
		return ret;
	api_check(fits(dev, table, PAGES * PAGE_SIZE), "%s: each entry is within it", name);
	/* Linux itself need not join that much. */
	if (api_is_ours(api))
		api_check(table->nents >= least && table->nents <= most, "%s: %d to %d entries (%u)", name, least, most, table->nents);
	api_write(api, address_of(table, 13 * PAGE_SIZE + 77), SECRET, LENGTH);
	dma_unmap_sgtable(dev, table, DMA_FROM_DEVICE, 0);
	api_check(api_all(page_of(pages, 13) + 77, SECRET, LENGTH), "%s: the driver has what the device wrote", name);
	memset(page_of(pages, 13), 0, PAGE_SIZE);
	return 0;
}

/* Pieces that no boundary may fall into, in one row: some would cross it, so each is mapped by itself. */
static int apart(struct api *api)
{
	enum { PIECES = 4, ORDER = 2, SIZE = 3 * PAGE_SIZE };
	struct device *dev = api->dev;
	struct sg_table table;
	struct scatterlist *sg;
	u8 *piece[PIECES] = {};
	int at, ret = sg_alloc_table(&table, PIECES, GFP_KERNEL);

	if (ret)
		return ret;
	for_each_sg(table.sgl, sg, PIECES, at) {
		piece[at] = (u8 *)__get_free_pages(GFP_KERNEL | __GFP_ZERO, ORDER);
		if (!piece[at]) {
			ret = -ENOMEM;
			goto out;
		}
		sg_set_buf(sg, piece[at], SIZE);
	}
	limit(dev, UINT_MAX, (PAGE_SIZE << ORDER) - 1);
	ret = dma_map_sgtable(dev, &table, DMA_FROM_DEVICE, 0);
	if (!api_check(!ret, "pieces that a boundary would cut: are mapped (%d)", ret)) {
		ret = 0;
		goto out;
	}
	api_check(fits(dev, &table, PIECES * SIZE), "pieces that a boundary would cut: each is within it");
	api_write(api, address_of(&table, 2 * SIZE + 2 * PAGE_SIZE + 500), MINE, LENGTH);
	dma_sync_sgtable_for_cpu(dev, &table, DMA_FROM_DEVICE);
	api_check(api_all(piece[2] + 2 * PAGE_SIZE + 500, MINE, LENGTH), "pieces that a boundary would cut: a sync gives what the device wrote");
	/* A sync for the device undoes nothing that the device has written since. */
	api_write(api, address_of(&table, 2 * SIZE), SECRET, LENGTH);
	dma_sync_sgtable_for_device(dev, &table, DMA_FROM_DEVICE);
	api_write(api, address_of(&table, 3 * SIZE), MINE, LENGTH);
	dma_unmap_sgtable(dev, &table, DMA_FROM_DEVICE, 0);
	api_check(api_all(piece[3], MINE, LENGTH) && api_all(piece[2], SECRET, LENGTH) &&
		  api_all(piece[2] + 2 * PAGE_SIZE + 500, MINE, LENGTH) && api_all(piece[2] + PAGE_SIZE, 0, PAGE_SIZE),
		  "pieces that a boundary would cut: afterwards the driver has it");
out:
	for (at = 0; at < PIECES; at++)
		free_pages((unsigned long)piece[at], ORDER);
	sg_free_table(&table);
	return ret;
}

/* Pieces that begin and end within pages. */
static int uneven(struct api *api, struct pages *pages)
{
	static const struct { unsigned int offset, len; } parts[] = {
		{ 1000, PAGE_SIZE - 1000 }, { 0, PAGE_SIZE }, { 0, 500 }, { 24, 100 }, { 7, PAGE_SIZE - 7 }, { 0, 300 },
	};
	struct scatterlist list[ARRAY_SIZE(parts)], *sg;
	struct sg_table table = { .sgl = list, .orig_nents = ARRAY_SIZE(parts) };
	struct device *dev = api->dev;
	u64 size = 0;
	int at, ret;

	limit(dev, UINT_MAX, ULONG_MAX);
	sg_init_table(list, ARRAY_SIZE(parts));
	for_each_sg(list, sg, ARRAY_SIZE(parts), at) {
		memset(page_of(pages, at), 0x10 + at, PAGE_SIZE);
		sg_set_buf(sg, page_of(pages, at) + parts[at].offset, parts[at].len);
		size += parts[at].len;
	}
	ret = dma_map_sgtable(dev, &table, DMA_BIDIRECTIONAL, 0);
	if (ret)
		return ret;
	api_check(fits(dev, &table, size), "pieces of any length: all of them, in %u entries", table.nents);
	api_check(table.nents <= 3, "pieces of any length: those that meet at a page are joined");
	api_check(api_all(api_read(api, address_of(&table, size - 300 - 150), 150), 0x14, 150), "pieces of any length: the device reads the last but one");
	api_check(api_all(api_read(api, address_of(&table, 2 * PAGE_SIZE - 1000 + 500), 100), 0x13, 100), "pieces of any length: the device reads a short one");
	api_write(api, address_of(&table, size - 300), MINE, 300);
	dma_unmap_sgtable(dev, &table, DMA_BIDIRECTIONAL, 0);
	api_check(api_all(page_of(pages, 5), MINE, 300) && api_all(page_of(pages, 5) + 300, 0x15, PAGE_SIZE - 300),
		  "pieces of any length: the device writes the last, and nothing behind it");
	return 0;
}

int api_lists(struct api *api)
{
	unsigned int size = dma_get_max_seg_size(api->dev);
	unsigned long boundary = dma_get_seg_boundary(api->dev);
	struct pages pages = {};
	int ret = make(&pages);

	if (!ret)
		ret = whole(api, &pages);
	if (!ret)
		ret = limited(api, &pages, "segments of three pages", 3 * PAGE_SIZE, ULONG_MAX, 6, 6);
	if (!ret)
		ret = limited(api, &pages, "a boundary at four pages", UINT_MAX, 4 * PAGE_SIZE - 1, 4, 5);
	if (!ret)
		ret = limited(api, &pages, "a boundary at each page", UINT_MAX, PAGE_SIZE - 1, PAGES, PAGES);
	if (!ret)
		ret = apart(api);
	if (!ret)
		ret = uneven(api, &pages);
	limit(api->dev, size, boundary);
	drop(&pages);
	return ret;
}

/* Maps and unmaps a list eight times. The job counts the waits. Four times the same pages: more than is copied. */
int api_waits(struct api *api)
{
	enum { TIMES = 8, ENTRIES = 4 * PAGES };
	struct pages pages = {};
	struct sg_table table = {};
	struct scatterlist *sg;
	int at, ret = make(&pages);

	if (!ret)
		ret = sg_alloc_table(&table, ENTRIES, GFP_KERNEL);
	if (ret)
		goto out;
	for_each_sg(table.sgl, sg, ENTRIES, at)
		sg_set_page(sg, pages.page[at % PAGES], PAGE_SIZE, 0);
	for (at = 0; !ret && at < TIMES; at++) {
		ret = dma_map_sgtable(api->dev, &table, DMA_TO_DEVICE, 0);
		if (!ret)
			dma_unmap_sgtable(api->dev, &table, DMA_TO_DEVICE, 0);
	}
	api_check(!ret, "%d lists of %d pages are mapped and unmapped", TIMES, ENTRIES);
	sg_free_table(&table);
out:
	drop(&pages);
	return ret;
}
