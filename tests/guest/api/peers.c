// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What other devices have: their registers, their memory, and their mappings. */
#include <linux/pci-p2pdma.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "api.h"

/* QEMU's ivshmem: its third BAR is memory. The first half is looked at as registers, the other has pages where the kernel makes some. */
#define PEER_BAR	2

static struct pci_dev *get_peer(void)
{
	struct pci_dev *peer = pci_get_device(0x1af4, 0x1110, NULL);

	if (peer && pci_enable_device(peer)) {
		pci_dev_put(peer);
		return NULL;
	}
	return peer;
}

static void put_peer(struct pci_dev *peer)
{
	pci_disable_device(peer);
	pci_dev_put(peer);
}

static dma_addr_t map_registers(struct device *dev, phys_addr_t phys, size_t size, enum dma_data_direction dir, bool by_phys)
{
#ifdef DMA_ATTR_MMIO
	if (by_phys)
		return dma_map_phys(dev, phys, size, dir, DMA_ATTR_MMIO);
#endif
	return dma_map_resource(dev, phys, size, dir, 0);
}

static void unmap_registers(struct device *dev, dma_addr_t at, size_t size, enum dma_data_direction dir, bool by_phys)
{
#ifdef DMA_ATTR_MMIO
	if (by_phys) {
		dma_unmap_phys(dev, at, size, dir, DMA_ATTR_MMIO);
		return;
	}
#endif
	dma_unmap_resource(dev, at, size, dir, 0);
}

static bool registers_hold(void __iomem *registers, u8 value)
{
	u8 got[LENGTH];

	memcpy_fromio(got, registers, LENGTH);
	return api_all(got, value, LENGTH);
}

static int reach_registers(struct api *api, phys_addr_t phys, void __iomem *registers, bool by_phys)
{
	const char *name = by_phys ? "registers by dma_map_phys" : "registers by dma_map_resource";
	struct device *dev = api->dev;
	dma_addr_t at;

	at = map_registers(dev, phys + PAGE_SIZE, PAGE_SIZE, DMA_BIDIRECTIONAL, by_phys);
	if (dma_mapping_error(dev, at))
		return -EIO;
	memset_io(registers + PAGE_SIZE, KEPT, PAGE_SIZE);
	api_check(api_all(api_read(api, at, LENGTH), KEPT, LENGTH), "%s: the device reads them as they are", name);
	api_write(api, at + PAGE_SIZE - LENGTH, MINE, LENGTH);
	api_check(registers_hold(registers + 2 * PAGE_SIZE - LENGTH, MINE), "%s: the device writes to them at once", name);
	unmap_registers(dev, at, PAGE_SIZE, DMA_BIDIRECTIONAL, by_phys);
	if (!api_is_ours(api) || api_way_is(api, "lazy"))
		return 0;
	api_write(api, at, SECRET, LENGTH);
	api_check(registers_hold(registers + PAGE_SIZE, KEPT), "%s: the device does not reach them after the unmap", name);

	at = map_registers(dev, phys + 512, LENGTH, DMA_TO_DEVICE, by_phys);
	if (dma_mapping_error(dev, at))
		return -EIO;
	memset_io(registers + 512, KEPT, LENGTH);
	api_check(api_all(api_read(api, at, LENGTH), KEPT, LENGTH), "%s: the device reads a part of a page", name);
	api_write(api, at, MINE, LENGTH);
	api_check(registers_hold(registers + 512, KEPT), "%s: the device does not write what it may only read", name);
	unmap_registers(dev, at, LENGTH, DMA_TO_DEVICE, by_phys);
	return 0;
}

int api_resource(struct api *api)
{
	struct pci_dev *peer = get_peer();
	void __iomem *registers;
	phys_addr_t phys;
	int ret;

	if (!peer)
		return -ENODEV;
	phys = pci_resource_start(peer, PEER_BAR);
	registers = ioremap(phys, 2 * PAGE_SIZE);
	ret = registers ? reach_registers(api, phys, registers, false) : -ENOMEM;
#ifdef DMA_ATTR_MMIO
	if (!ret)
		ret = reach_registers(api, phys, registers, true);
#endif
	if (registers)
		iounmap(registers);
	put_peer(peer);
	return ret;
}

#if IS_ENABLED(CONFIG_PCI_P2PDMA)
static int refuse_peers(struct api *api, struct pci_dev *peer, struct page *own)
{
	struct device *dev = api->dev;
	u8 *memory = pci_alloc_p2pmem(peer, PAGE_SIZE);
	struct scatterlist list[2];
	struct sg_table table = { .sgl = list };
	dma_addr_t at;
	int ret;

	if (!memory)
		return -ENOMEM;
	at = dma_map_page(dev, virt_to_page(memory), 0, PAGE_SIZE, DMA_BIDIRECTIONAL);
	if (!api_check(dma_mapping_error(dev, at), "a page of a peer: is refused"))
		dma_unmap_page(dev, at, PAGE_SIZE, DMA_BIDIRECTIONAL);
	if (api_is_ours(api)) {
		/* By what the page's address is: Linux itself asks no such driver. */
		at = dma_map_phys(dev, page_to_phys(virt_to_page(memory)), PAGE_SIZE, DMA_BIDIRECTIONAL, 0);
		if (!api_check(dma_mapping_error(dev, at), "a page of a peer: is refused by its address"))
			dma_unmap_phys(dev, at, PAGE_SIZE, DMA_BIDIRECTIONAL, 0);
	}
	for (table.orig_nents = 1; table.orig_nents <= 2; table.orig_nents++) {
		sg_init_table(list, table.orig_nents);
		sg_set_page(&list[0], own, PAGE_SIZE, 0);
		sg_set_page(&list[table.orig_nents - 1], virt_to_page(memory), PAGE_SIZE, 0);
		ret = dma_map_sgtable(dev, &table, DMA_BIDIRECTIONAL, 0);
		api_check(ret == -EREMOTEIO, "a list of %u with a page of a peer: is refused (%d)", table.orig_nents, ret);
		if (!ret)
			dma_unmap_sgtable(dev, &table, DMA_BIDIRECTIONAL, 0);
	}
	pci_free_p2pmem(peer, memory, PAGE_SIZE);
	return 0;
}

int api_peers(struct api *api)
{
	static bool has_pages;
	struct pci_dev *peer = get_peer();
	struct page *own = alloc_page(GFP_KERNEL);
	size_t half;
	int ret = 0;

	if (!peer || !own) {
		ret = -ENODEV;
		goto out;
	}
	half = pci_resource_len(peer, PEER_BAR) / 2;
	/* They are the peer's as long as it is there. */
	if (!has_pages)
		ret = pci_p2pdma_add_resource(peer, PEER_BAR, half, half);
	has_pages |= !ret;
	if (!ret)
		ret = refuse_peers(api, peer, own);
out:
	if (own)
		__free_page(own);
	if (peer)
		put_peer(peer);
	return ret;
}
#else
int api_peers(struct api *api)
{
	return -EOPNOTSUPP;
}
#endif

/* What a faulty driver does with a mapping of another device's, and of its own. Nothing of it may end or change. */
int api_misuse(struct api *api)
{
	struct api *other = api_other(api);
	struct device *dev = api->dev;
	u8 *buffer = (u8 *)__get_free_pages(GFP_KERNEL | __GFP_ZERO, 1), *coherent;
	dma_addr_t at;

	if (!buffer || other == api)
		return -ENODEV;
	at = dma_map_single(other->dev, buffer, PAGE_SIZE, DMA_FROM_DEVICE);
	if (dma_mapping_error(other->dev, at))
		return -EIO;
	pr_info("api: misuse: unmap of another's\n");
	dma_unmap_single(dev, at, PAGE_SIZE, DMA_FROM_DEVICE);
	api_write(other, at, MINE, LENGTH);
	dma_unmap_single(other->dev, at, PAGE_SIZE, DMA_FROM_DEVICE);
	api_check(api_all(buffer, MINE, LENGTH), "unmap of another's: the other device goes on");

	memset(buffer, 0, 2 * PAGE_SIZE);
	at = dma_map_single(dev, buffer, 2 * PAGE_SIZE, DMA_FROM_DEVICE);
	if (dma_mapping_error(dev, at))
		return -EIO;
	pr_info("api: misuse: unmap of a part\n");
	dma_unmap_single(dev, at + PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	pr_info("api: misuse: sync past the end\n");
	dma_sync_single_for_cpu(dev, at + PAGE_SIZE, PAGE_SIZE + 1, DMA_FROM_DEVICE);
	api_write(api, at + PAGE_SIZE, MINE, LENGTH);
	dma_unmap_single(dev, at, 2 * PAGE_SIZE, DMA_FROM_DEVICE);
	api_check(api_all(buffer + PAGE_SIZE, MINE, LENGTH), "unmap of a part, sync past the end: the mapping goes on");
	free_pages((unsigned long)buffer, 1);

	coherent = dma_alloc_coherent(dev, PAGE_SIZE, &at, GFP_KERNEL);
	if (!coherent)
		return -ENOMEM;
	pr_info("api: misuse: free with another length\n");
	dma_free_coherent(dev, 2 * PAGE_SIZE, coherent, at);
	api_write(api, at, MINE, LENGTH);
	api_check(api_all(coherent, MINE, LENGTH) && page_count(virt_to_page(coherent)) == 1, "free with another length: the memory stays");
	pr_info("api: misuse: the end\n");
	dma_free_coherent(dev, PAGE_SIZE, coherent, at);
	return 0;
}
