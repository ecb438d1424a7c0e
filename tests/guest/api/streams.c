// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Mappings of a buffer in one piece: syncs of a part by any address inside it, and mappings that leave the copy to syncs. */
#include <linux/slab.h>

#include "api.h"

/* A buffer of four pages, and its mapped part. */
#define ORDER		2
#define BEGIN		100
#define SIZE		(3 * PAGE_SIZE + 40)

/* What the device wrote, from there on and so much: over the end of a page. */
#define WRITTEN		(PAGE_SIZE + 900)
#define WRITTEN_SIZE	PAGE_SIZE

static int parts(struct api *api, u8 *buffer)
{
	struct device *dev = api->dev;
	u8 *data = buffer + BEGIN;
	const u8 *read;
	dma_addr_t at;

	memset(buffer, 0, PAGE_SIZE << ORDER);
	at = dma_map_single(dev, data, SIZE, DMA_BIDIRECTIONAL);
	if (dma_mapping_error(dev, at))
		return -EIO;
	api_write(api, at + WRITTEN, MINE, WRITTEN_SIZE);
	dma_sync_single_for_cpu(dev, at + WRITTEN + 1001, 1003, DMA_BIDIRECTIONAL);
	api_check(api_all(data + WRITTEN + 1001, MINE, 1003), "sync for the CPU: of a part in the middle");
	dma_sync_single_for_cpu(dev, at + 2 * PAGE_SIZE - 1, 2, DMA_BIDIRECTIONAL);
	api_check(api_all(data + 2 * PAGE_SIZE - 1, MINE, 2), "sync for the CPU: of two bytes");
	dma_sync_single_range_for_cpu(dev, at, WRITTEN + WRITTEN_SIZE - 1, 1, DMA_BIDIRECTIONAL);
	api_check(data[WRITTEN + WRITTEN_SIZE - 1] == MINE, "sync for the CPU: of the last byte that the device wrote");

	memset(data + WRITTEN - 10, KEPT, 20);
	dma_sync_single_for_device(dev, at + WRITTEN - 10, 20, DMA_BIDIRECTIONAL);
	data[SIZE - 1] = KEPT;
	dma_sync_single_range_for_device(dev, at, SIZE - 1, 1, DMA_BIDIRECTIONAL);
	read = api_read(api, at + WRITTEN - LENGTH / 2, LENGTH);
	api_check(api_all(read, 0, LENGTH / 2 - 10), "sync for the device: what lies before stays");
	api_check(api_all(read + LENGTH / 2 - 10, KEPT, 20), "sync for the device: of a part in the middle");
	api_check(api_all(read + LENGTH / 2 + 10, MINE, LENGTH / 2 - 10), "sync for the device: what lies behind stays");
	read = api_read(api, at + SIZE - 1, 1);
	api_check(*read == KEPT, "sync for the device: of the last byte");

	dma_unmap_single(dev, at, SIZE, DMA_BIDIRECTIONAL);
	api_check(api_all(data, 0, WRITTEN - 10) && api_all(data + WRITTEN - 10, KEPT, 20) && api_all(data + WRITTEN + 10, MINE, WRITTEN_SIZE - 10) &&
			  api_all(data + WRITTEN + WRITTEN_SIZE, 0, SIZE - 1 - WRITTEN - WRITTEN_SIZE) && data[SIZE - 1] == KEPT,
		  "syncs of parts: afterwards the buffer has what was written last");
	return 0;
}

static int skipped_map(struct api *api, u8 *buffer)
{
	struct device *dev = api->dev;
	dma_addr_t at;
	bool seen;

	memset(buffer, KEPT, LENGTH);
	at = dma_map_single_attrs(dev, buffer, LENGTH, DMA_TO_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	if (dma_mapping_error(dev, at))
		return -EIO;
	seen = api_all(api_read(api, at, LENGTH), KEPT, LENGTH);
	if (api_way_is(api, "bounce"))
		api_check(!seen, "map without a sync: nothing was copied for the device");
	dma_sync_single_for_device(dev, at, LENGTH, DMA_TO_DEVICE);
	api_check(api_all(api_read(api, at, LENGTH), KEPT, LENGTH), "map without a sync: after one the device reads the buffer");
	dma_unmap_single(dev, at, LENGTH, DMA_TO_DEVICE);

	memset(buffer, KEPT, 2 * LENGTH);
	at = dma_map_single_attrs(dev, buffer, 2 * LENGTH, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	if (dma_mapping_error(dev, at))
		return -EIO;
	api_write(api, at, MINE, LENGTH);
	dma_unmap_single(dev, at, 2 * LENGTH, DMA_FROM_DEVICE);
	api_check(api_all(buffer, MINE, LENGTH), "map without a sync: the driver gets what the device wrote");
	api_check(api_all(buffer + LENGTH, KEPT, LENGTH), "map without a sync: what the device left alone is as it was");
	return 0;
}

static int skipped_unmap(struct api *api, u8 *buffer)
{
	struct device *dev = api->dev;
	dma_addr_t at;

	memset(buffer, 0, LENGTH);
	at = dma_map_single(dev, buffer, LENGTH, DMA_FROM_DEVICE);
	if (dma_mapping_error(dev, at))
		return -EIO;
	api_write(api, at, MINE, LENGTH);
	dma_sync_single_for_cpu(dev, at, LENGTH, DMA_FROM_DEVICE);
	api_check(api_all(buffer, MINE, LENGTH), "unmap without a sync: after one the driver has what the device wrote");
	memset(buffer, KEPT, LENGTH);
	dma_unmap_single_attrs(dev, at, LENGTH, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	api_check(api_all(buffer, KEPT, LENGTH), "unmap without a sync: what the driver wrote since then stays");

	memset(buffer, 0, LENGTH);
	at = dma_map_single(dev, buffer, LENGTH, DMA_FROM_DEVICE);
	if (dma_mapping_error(dev, at))
		return -EIO;
	api_write(api, at, MINE, LENGTH);
	dma_unmap_single_attrs(dev, at, LENGTH, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	if (api_way_is(api, "bounce"))
		api_check(api_all(buffer, 0, LENGTH), "unmap without a sync: nothing is copied");
	return 0;
}

int api_streams(struct api *api)
{
	u8 *buffer = (u8 *)__get_free_pages(GFP_KERNEL, ORDER);
	int ret;

	if (!buffer)
		return -ENOMEM;
	ret = parts(api, buffer);
	if (!ret)
		ret = skipped_map(api, buffer);
	if (!ret)
		ret = skipped_unmap(api, buffer);
	free_pages((unsigned long)buffer, ORDER);
	return ret;
}
