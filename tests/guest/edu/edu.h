/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* QEMU's device `edu`, which copies between its own buffer and any address of DMA. */
#ifndef PORTCULLIS_TESTS_EDU_H
#define PORTCULLIS_TESTS_EDU_H

#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/pci.h>

/* Registers, and the device's own buffer of 4 KiB (QEMU, docs/specs/edu.rst). */
#define EDU_SOURCE	0x80
#define EDU_TARGET	0x88
#define EDU_COUNT	0x90
#define EDU_COMMAND	0x98
#define EDU_RUN		1
#define EDU_TO_MEMORY	2
#define EDU_BUFFER	0x40000
/* The copy happens so long after the command. */
#define EDU_DELAY_MS	100

/* Enables a device for DMA below 4 GiB, and finds its registers. */
static inline int edu_enable(struct pci_dev *pdev, void __iomem **registers)
{
	int ret = pcim_enable_device(pdev);

	if (ret)
		return ret;
	pci_set_master(pdev);
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(32));
	if (ret)
		return ret;
	*registers = pcim_iomap(pdev, 0, 0);
	return *registers ? 0 : -ENOMEM;
}

static inline void edu_start(void __iomem *registers, u64 source, u64 target, u64 len, u64 command)
{
	writeq(source, registers + EDU_SOURCE);
	writeq(target, registers + EDU_TARGET);
	writeq(len, registers + EDU_COUNT);
	writeq(command | EDU_RUN, registers + EDU_COMMAND);
}

static inline void edu_wait(void __iomem *registers)
{
	int tries;

	for (tries = 0; tries < 1000 && (readq(registers + EDU_COMMAND) & EDU_RUN); tries++)
		usleep_range(1000, 2000);
}

/* The device writes what its buffer holds to an address of DMA. */
static inline void edu_write(void __iomem *registers, dma_addr_t to, u64 len)
{
	edu_start(registers, EDU_BUFFER, to, len, EDU_TO_MEMORY);
	edu_wait(registers);
}

/* The device reads an address of DMA into its buffer. */
static inline void edu_read(void __iomem *registers, dma_addr_t from, u64 len)
{
	edu_start(registers, from, EDU_BUFFER, len, 0);
	edu_wait(registers);
}

#define EDU_ID	PCI_DEVICE(0x1234, 0x11e8)

#endif
