// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A driver of QEMU's device `edu`, which copies between its own buffer and any address of DMA. The driver does what drivers do, with the
 * DMA API alone; the device does what it should not. What it reached goes to the log, one line each: "edu: ATTEMPT: OUTCOME".
 */
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "edu.h"

#define LENGTH		256
#define NEIGHBOUR	2048
#define MINE		0xa5
#define SECRET		0x3c
#define KEPT		0x5a

static bool misuse;
module_param(misuse, bool, 0);
MODULE_PARM_DESC(misuse, "end mappings as a faulty driver does: twice, with another length, with another's address");

static bool window;
module_param(window, bool, 0);
MODULE_PARM_DESC(window, "find how long after its unmap a buffer is still reached");

struct edu {
	struct device *dev;
	void __iomem *registers;
	u8 *page;
};

static bool all(const u8 *bytes, u8 value)
{
	return !memchr_inv(bytes, value, LENGTH);
}

static void tell(const char *attempt, bool reached)
{
	pr_info("edu: %s: %s\n", attempt, reached ? "REACHED" : "nothing");
}

static dma_addr_t map(struct edu *edu, enum dma_data_direction direction)
{
	dma_addr_t address = dma_map_single(edu->dev, edu->page, LENGTH, direction);

	return dma_mapping_error(edu->dev, address) ? 0 : address;
}

/* Puts a value into the device's buffer, as a driver does. */
static int load(struct edu *edu, u8 value)
{
	dma_addr_t address;

	memset(edu->page, value, LENGTH);
	address = map(edu, DMA_TO_DEVICE);
	if (!address)
		return -EIO;
	edu_read(edu->registers, address, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_TO_DEVICE);
	return 0;
}

/* What the device's buffer holds, as a driver learns it. */
static int fetch(struct edu *edu, u8 *into)
{
	dma_addr_t address = map(edu, DMA_FROM_DEVICE);

	if (!address)
		return -EIO;
	edu_write(edu->registers, address, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	memcpy(into, edu->page, LENGTH);
	return 0;
}

/* What the driver asks for works: buffers, a part of one, coherent memory. */
static int works(struct edu *edu)
{
	u8 got[LENGTH];
	dma_addr_t address;
	void *coherent;
	bool kept;

	if (load(edu, MINE) || fetch(edu, got))
		return -EIO;
	pr_info("edu: own buffer: %s\n", all(got, MINE) ? "works" : "BROKEN");

	/* The device writes nothing: the buffer is as it was, and holds nothing of what others had in its place. */
	memset(edu->page, KEPT, LENGTH);
	address = map(edu, DMA_FROM_DEVICE);
	if (!address)
		return -EIO;
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	kept = all(edu->page, KEPT);
	pr_info("edu: buffer that the device left alone: %s\n", kept ? "works" : "BROKEN");

	/* Syncs, of a part in the middle. */
	memset(edu->page, 0, LENGTH);
	address = map(edu, DMA_BIDIRECTIONAL);
	if (!address)
		return -EIO;
	edu_write(edu->registers, address, LENGTH);
	dma_sync_single_for_cpu(edu->dev, address + 64, 64, DMA_BIDIRECTIONAL);
	kept = edu->page[64] == MINE && edu->page[127] == MINE;
	memset(edu->page + 64, KEPT, 64);
	dma_sync_single_for_device(edu->dev, address + 64, 64, DMA_BIDIRECTIONAL);
	edu_read(edu->registers, address, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_BIDIRECTIONAL);
	if (fetch(edu, got))
		return -EIO;
	kept = kept && got[63] == MINE && got[64] == KEPT && got[127] == KEPT && got[128] == MINE;
	pr_info("edu: syncs of a part: %s\n", kept ? "works" : "BROKEN");

	coherent = dma_alloc_coherent(edu->dev, PAGE_SIZE, &address, GFP_KERNEL);
	if (!coherent)
		return -ENOMEM;
	memset(coherent, KEPT, LENGTH);
	edu_read(edu->registers, address, LENGTH);
	edu_write(edu->registers, address + LENGTH, LENGTH);
	pr_info("edu: coherent memory: %s\n", all((u8 *)coherent + LENGTH, KEPT) ? "works" : "BROKEN");
	dma_free_coherent(edu->dev, PAGE_SIZE, coherent, address);
	return 0;
}

/* While a mapping lives: what lies beside it, what it does not allow, and what was never mapped. */
static int during(struct edu *edu)
{
	u8 got[LENGTH];
	u8 *neighbour = edu->page + NEIGHBOUR;
	dma_addr_t address;
	u8 *stranger;

	if (load(edu, MINE))
		return -EIO;
	memset(neighbour, 0, LENGTH);
	address = map(edu, DMA_FROM_DEVICE);
	if (!address)
		return -EIO;
	edu_write(edu->registers, address + NEIGHBOUR, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	tell("write to other data in the page of a buffer", !all(neighbour, 0));

	memset(neighbour, SECRET, LENGTH);
	memset(edu->page, 0, LENGTH);
	address = map(edu, DMA_TO_DEVICE);
	if (!address)
		return -EIO;
	edu_read(edu->registers, address + NEIGHBOUR, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_TO_DEVICE);
	if (fetch(edu, got))
		return -EIO;
	tell("read of other data in the page of a buffer", memchr(got, SECRET, LENGTH) != NULL);

	if (load(edu, MINE))
		return -EIO;
	memset(edu->page, 0, LENGTH);
	address = map(edu, DMA_TO_DEVICE);
	if (!address)
		return -EIO;
	edu_write(edu->registers, address, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_TO_DEVICE);
	tell("write to a buffer that it may only read", !all(edu->page, 0));

	stranger = (u8 *)get_zeroed_page(GFP_KERNEL | GFP_DMA32);
	if (!stranger)
		return -ENOMEM;
	if (load(edu, MINE))
		return -EIO;
	edu_write(edu->registers, virt_to_phys(stranger), LENGTH);
	tell("write to memory that was never mapped", !all(stranger, 0));
	free_page((unsigned long)stranger);
	return 0;
}

/* Unmaps `early` microseconds before the device writes. Returns whether the write reached the buffer, and when it came after the unmap. */
static int land(struct edu *edu, long early, s64 *after, bool *reached)
{
	ktime_t start, end;
	dma_addr_t address;
	s64 left;

	memset(edu->page, 0, LENGTH);
	address = map(edu, DMA_FROM_DEVICE);
	if (!address)
		return -EIO;
	/* The IOTLB holds the address from here on. */
	edu_write(edu->registers, address, LENGTH);
	start = ktime_get();
	edu_start(edu->registers, EDU_BUFFER, address, LENGTH, EDU_TO_MEMORY);
	left = EDU_DELAY_MS * 1000 - early - ktime_us_delta(ktime_get(), start);
	if (left > 0)
		usleep_range(left, left + 50);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	memset(edu->page, 0, LENGTH);
	/* Behind the memset(): a write that came before it would not be seen. */
	end = ktime_get();
	*after = EDU_DELAY_MS * 1000 - ktime_us_delta(end, start);
	edu_wait(edu->registers);
	*reached = !all(edu->page, 0);
	return 0;
}

/* After the unmap: at once, and much later. */
static int after(struct edu *edu)
{
	dma_addr_t address;
	bool reached;
	s64 when = 0;
	int tries;

	if (load(edu, MINE))
		return -EIO;
	/* The write must come after the unmap, and this thread may have been late. */
	for (tries = 0; tries < 20 && when <= 0; tries++)
		if (land(edu, 2000 + 1000 * tries, &when, &reached))
			return -EIO;
	if (when <= 0)
		pr_info("edu: write a few milliseconds after the unmap: not tried\n");
	else
		tell("write a few milliseconds after the unmap", reached);

	memset(edu->page, 0, LENGTH);
	address = map(edu, DMA_FROM_DEVICE);
	if (!address)
		return -EIO;
	edu_write(edu->registers, address, LENGTH);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	memset(edu->page, 0, LENGTH);
	msleep(EDU_DELAY_MS);
	edu_write(edu->registers, address, LENGTH);
	tell("write a fifth of a second after the unmap", !all(edu->page, 0));
	return 0;
}

static int find_window(struct edu *edu)
{
	static const int early[] = { 500, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 11000, 12000, 14000, 16000, 20000, 30000 };
	s64 last = -1, when;
	bool reached;
	size_t at;

	if (load(edu, MINE))
		return -EIO;
	for (at = 0; at < ARRAY_SIZE(early); at++) {
		if (land(edu, early[at], &when, &reached))
			return -EIO;
		if (when > 0 && reached)
			last = max(last, when);
	}
	pr_info("edu: last reached, us after the unmap: %lld\n", last);
	return 0;
}

/* What faulty drivers do. The kernel must live, and the buffer stay out of reach. */
static int misuses(struct edu *edu)
{
	dma_addr_t address;

	if (load(edu, MINE))
		return -EIO;
	address = map(edu, DMA_FROM_DEVICE);
	if (!address)
		return -EIO;
	edu_write(edu->registers, address, LENGTH);
	pr_info("edu: misuse: unmap with another length\n");
	dma_unmap_single(edu->dev, address, PAGE_SIZE, DMA_FROM_DEVICE);
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	pr_info("edu: misuse: unmap twice\n");
	dma_unmap_single(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	pr_info("edu: misuse: unmap of what was never mapped\n");
	dma_unmap_single(edu->dev, address + 0x100000, LENGTH, DMA_FROM_DEVICE);
	pr_info("edu: misuse: sync of what is not mapped\n");
	dma_sync_single_for_cpu(edu->dev, address, LENGTH, DMA_FROM_DEVICE);
	memset(edu->page, 0, LENGTH);
	msleep(EDU_DELAY_MS);
	edu_write(edu->registers, address, LENGTH);
	tell("write after all these", !all(edu->page, 0));
	return works(edu);
}

static int edu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct edu edu = { .dev = &pdev->dev };
	int ret = edu_enable(pdev, &edu.registers);

	if (ret)
		return ret;
	edu.page = (u8 *)get_zeroed_page(GFP_KERNEL | GFP_DMA32);
	ret = edu.page ? 0 : -ENOMEM;
	if (!ret)
		ret = works(&edu);
	if (!ret)
		ret = during(&edu);
	if (!ret)
		ret = after(&edu);
	if (!ret && window)
		ret = find_window(&edu);
	if (!ret && misuse)
		ret = misuses(&edu);
	pr_info("edu: end: %d\n", ret);
	if (edu.page)
		free_page((unsigned long)edu.page);
	return ret;
}

static void edu_remove(struct pci_dev *pdev)
{
}

static const struct pci_device_id edu_ids[] = { { EDU_ID }, { } };

static struct pci_driver edu_driver = {
	.name = "portcullis_edu",
	.id_table = edu_ids,
	.probe = edu_probe,
	.remove = edu_remove,
};
module_pci_driver(edu_driver);
MODULE_DESCRIPTION("Has QEMU's edu reach for what it was not given");
MODULE_LICENSE("Dual MIT/GPL");
