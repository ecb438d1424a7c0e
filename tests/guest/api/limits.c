// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What a device can reach, how its mappings lie, and how large they may be. */
#include <linux/slab.h>

#include "api.h"

#define COUNT	8

/* Eight buffers under a mask: all within it, and the device writes to the last. */
static int below(struct api *api, u8 *const *pages, unsigned int bits)
{
	struct device *dev = api->dev;
	dma_addr_t at[COUNT];
	bool within = true;
	int i, mapped, ret = dma_set_mask(dev, DMA_BIT_MASK(bits));

	if (!api_check(!ret, "a mask of %u bits: is taken (%d)", bits, ret))
		return 0;
	for (mapped = 0; mapped < COUNT; mapped++) {
		memset(pages[mapped], 0, PAGE_SIZE);
		at[mapped] = dma_map_single(dev, pages[mapped], PAGE_SIZE, DMA_FROM_DEVICE);
		if (dma_mapping_error(dev, at[mapped]))
			break;
		within &= at[mapped] + PAGE_SIZE - 1 <= DMA_BIT_MASK(bits);
	}
	api_check(mapped == COUNT && within, "a mask of %u bits: %d buffers lie below it", bits, mapped);
	if (mapped)
		api_write(api, at[mapped - 1] + 40, MINE, LENGTH);
	for (i = 0; i < mapped; i++)
		dma_unmap_single(dev, at[i], PAGE_SIZE, DMA_FROM_DEVICE);
	api_check(mapped && api_all(pages[mapped - 1] + 40, MINE, LENGTH), "a mask of %u bits: the device writes", bits);
	return 0;
}

/* One page of addresses: a buffer has it, and there is no second one. */
static void one_page(struct api *api, u8 *const *pages)
{
	struct device *dev = api->dev;
	dma_addr_t at[2];
	int i, tries, ret = dma_set_mask(dev, 2 * PAGE_SIZE - 1);

	if (!api_check(!ret, "a mask of two pages: is taken (%d)", ret))
		return;
	for (i = 0; i < 2; i++)
		at[i] = dma_map_single(dev, pages[i], PAGE_SIZE, DMA_FROM_DEVICE);
	if (!api_check(!dma_mapping_error(dev, at[0]) && at[0] == PAGE_SIZE, "a mask of two pages: a buffer has the second"))
		return;
	if (!api_check(dma_mapping_error(dev, at[1]), "a mask of two pages: there is no room for another buffer"))
		dma_unmap_single(dev, at[1], PAGE_SIZE, DMA_FROM_DEVICE);
	memset(pages[0], 0, PAGE_SIZE);
	dma_sync_single_for_device(dev, at[0], PAGE_SIZE, DMA_FROM_DEVICE);
	api_write(api, at[0], MINE, LENGTH);
	dma_unmap_single(dev, at[0], PAGE_SIZE, DMA_FROM_DEVICE);
	api_check(api_all(pages[0], MINE, LENGTH), "a mask of two pages: the device writes");
	/* Lazily unmapped addresses are free again when the window is over. */
	for (tries = 0; tries < 50; tries++) {
		at[1] = dma_map_single(dev, pages[1], PAGE_SIZE, DMA_FROM_DEVICE);
		if (!dma_mapping_error(dev, at[1]))
			break;
		msleep(100);
	}
	if (api_check(tries < 50, "a mask of two pages: once that is unmapped another has it"))
		dma_unmap_single(dev, at[1], PAGE_SIZE, DMA_FROM_DEVICE);
}

int api_masks(struct api *api)
{
	struct device *dev = api->dev;
	u8 *pages[COUNT] = {};
	dma_addr_t at;
	void *page;
	int i, ret = 0;

	for (i = 0; i < COUNT; i++) {
		pages[i] = (u8 *)get_zeroed_page(GFP_KERNEL);
		if (!pages[i])
			ret = -ENOMEM;
	}
	if (ret)
		goto out;
	ret = below(api, pages, 28);
	if (!ret)
		ret = below(api, pages, 24);
	if (!ret)
		ret = below(api, pages, 20);
	if (!ret && api_is_ours(api)) {
		one_page(api, pages);
		/* The job looks for the line in the log. */
		ret = dma_set_mask(dev, PAGE_SIZE - 1);
		api_check(ret, "a mask that leaves no addresses: is refused (%d)", ret);
		ret = 0;
	}
	dma_set_mask(dev, DMA_BIT_MASK(32));

	api_check(!dma_set_coherent_mask(dev, DMA_BIT_MASK(24)), "a coherent mask of 24 bits: is taken");
	page = dma_alloc_coherent(dev, PAGE_SIZE, &at, GFP_KERNEL);
	if (api_check(page && at + PAGE_SIZE - 1 <= DMA_BIT_MASK(24), "a coherent mask of 24 bits: memory lies below it")) {
		api_write(api, at, MINE, LENGTH);
		api_check(api_all(page, MINE, LENGTH), "a coherent mask of 24 bits: the device writes");
	}
	if (page)
		dma_free_coherent(dev, PAGE_SIZE, page, at);
	dma_set_coherent_mask(dev, DMA_BIT_MASK(32));
	/* As before all these. */
	ret = ret ? ret : below(api, pages, 32);
out:
	for (i = 0; i < COUNT; i++)
		free_page((unsigned long)pages[i]);
	return ret;
}

/* Whether a buffer of that size gets a copy: then the driver does not see what the device writes at once. */
static int copied(struct api *api, u8 *buffer, size_t size, bool *is)
{
	dma_addr_t at = dma_map_single(api->dev, buffer, size, DMA_FROM_DEVICE);

	if (dma_mapping_error(api->dev, at))
		return -EIO;
	memset(buffer, 0, LENGTH);
	dma_sync_single_for_device(api->dev, at, size, DMA_FROM_DEVICE);
	api_write(api, at, MINE, LENGTH);
	*is = !api_all(buffer, MINE, LENGTH);
	dma_unmap_single(api->dev, at, size, DMA_FROM_DEVICE);
	api_check(api_all(buffer, MINE, LENGTH), "%zu bytes: the driver has what the device wrote", size);
	return 0;
}

static int aligned(struct api *api, u8 *buffer, unsigned int mask, unsigned int kept)
{
	static const unsigned int offsets[] = { 0x234, 0x10, 0xffe };
	struct device *dev = api->dev;
	bool keeps = true;
	int i;

	dma_set_min_align_mask(dev, mask);
	for (i = 0; i < ARRAY_SIZE(offsets); i++) {
		size_t size = i ? 2 * PAGE_SIZE : LENGTH;
		dma_addr_t at = dma_map_single(dev, buffer + offsets[i], size, DMA_FROM_DEVICE);

		if (dma_mapping_error(dev, at)) {
			dma_set_min_align_mask(dev, 0);
			return -EIO;
		}
		keeps &= (at & kept) == ((unsigned long)(buffer + offsets[i]) & kept);
		if (!i)
			api_write(api, at, SECRET, size);
		dma_unmap_single(dev, at, size, DMA_FROM_DEVICE);
	}
	dma_set_min_align_mask(dev, 0);
	api_check(keeps, "an alignment by %x: addresses keep the bits of %x", mask, kept);
	api_check(api_all(buffer + offsets[0], SECRET, LENGTH), "an alignment by %x: the driver has what the device wrote", mask);
	memset(buffer, 0, 4 * PAGE_SIZE);
	return 0;
}

int api_sizes(struct api *api)
{
	enum { ORDER = 10 };
	struct device *dev = api->dev;
	u8 *buffer = (u8 *)__get_free_pages(GFP_KERNEL | __GFP_ZERO, ORDER);
	size_t size = PAGE_SIZE << ORDER, most, best;
	bool is = false;
	dma_addr_t at;
	int ret;

	if (!buffer)
		return -ENOMEM;
	ret = aligned(api, buffer, 0xfff, 0xfff);
	/* No copy keeps bits beyond a page. Linux itself maps nothing for such a device, and warns. */
	if (!ret && api_is_ours(api))
		ret = aligned(api, buffer, 0xffff, 0xfff);
	if (ret)
		goto out;

	most = dma_max_mapping_size(dev);
	api_check(most == SIZE_MAX, "the largest mapping: of any size (%zu)", most);
	at = dma_map_single(dev, buffer, size, DMA_BIDIRECTIONAL);
	if (api_check(!dma_mapping_error(dev, at), "4 MiB: are mapped")) {
		api_write(api, at + size - LENGTH, MINE, LENGTH);
		dma_unmap_single(dev, at, size, DMA_BIDIRECTIONAL);
		api_check(api_all(buffer + size - LENGTH, MINE, LENGTH), "4 MiB: the driver has what the device wrote to their end");
	}

	best = dma_opt_mapping_size(dev);
	if (api_is_ours(api)) {
		/* The module was loaded with its defaults: `bounce`, and copies of up to 128 KiB. */
		api_check(best == 128 << 10, "the best mapping: as large as what is copied (%zu)", best);
		ret = copied(api, buffer, 128 << 10, &is);
		if (!api_way_is(api, "auto"))
			api_check(!ret && is == api_way_is(api, "bounce"), "128 KiB: %s copied", is ? "are" : "are not");
		if (!ret)
			ret = copied(api, buffer, (128 << 10) + PAGE_SIZE, &is);
		api_check(!ret && !is, "a page more: is not copied");
	}
	api_check(dma_get_merge_boundary(dev) == PAGE_SIZE - 1, "pieces are joined where they meet at a page (%lx)", dma_get_merge_boundary(dev));
out:
	free_pages((unsigned long)buffer, ORDER);
	return ret;
}
