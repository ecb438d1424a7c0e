/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Differences between kernels, each with its reason. The rest of the module is written for the newest. */
#ifndef PORTCULLIS_COMPAT_H
#define PORTCULLIS_COMPAT_H

#include <linux/version.h>
#include <linux/device.h>
#include <linux/dma-map-ops.h>
#include <linux/iommu.h>
#include <linux/hrtimer.h>
#include <linux/pci.h>

#define KERNEL_AT_LEAST(major, minor) (LINUX_VERSION_CODE >= KERNEL_VERSION(major, minor, 0))

#if !KERNEL_AT_LEAST(6, 1)
#error "Portcullis needs Linux 6.1 or later: before, a group of devices had no owner that keeps other drivers out"
#endif

/* 6.12 calls it ARCH_HAS_DMA_OPS, because only some architectures allow per-device operations. */
#if !IS_ENABLED(CONFIG_ARCH_HAS_DMA_OPS) && !IS_ENABLED(CONFIG_DMA_OPS)
#error "Portcullis needs a kernel with CONFIG_ARCH_HAS_DMA_OPS (before 6.12: CONFIG_DMA_OPS): without it no module can stand between a driver and its device. On x86, any driver that selects it (CONFIG_AMD_GART=y, Xen) turns it on; Debian's kernels have it."
#endif
#if !IS_ENABLED(CONFIG_IOMMU_API)
#error "Portcullis needs a kernel with CONFIG_IOMMU_API"
#endif
#ifndef CONFIG_64BIT
#error "Portcullis needs a 64-bit kernel, whose direct map holds all memory"
#endif

/*
 * 6.12 calls the IOMMU's operations directly for a device with this flag, and uses dma_ops only without it. 7.1 moved the flag to a bitmap with
 * accessors. Before, iommu_dma_ops was a table like ours.
 */
#if KERNEL_AT_LEAST(7, 1)
static inline bool pcs_get_dma_iommu(struct device *dev) { return dev_dma_iommu(dev); }
static inline void pcs_put_dma_iommu(struct device *dev, bool on) { dev_assign_dma_iommu(dev, on); }
#elif KERNEL_AT_LEAST(6, 12) && IS_ENABLED(CONFIG_IOMMU_DMA)
static inline bool pcs_get_dma_iommu(struct device *dev) { return dev->dma_iommu; }
static inline void pcs_put_dma_iommu(struct device *dev, bool on) { dev->dma_iommu = on; }
#else
static inline bool pcs_get_dma_iommu(struct device *dev) { return false; }
static inline void pcs_put_dma_iommu(struct device *dev, bool on) { }
#endif

/*
 * 6.10 skips syncs while this flag is set. dma_set_mask recomputes it from the operations; but a driver that sets no mask keeps the old value.
 */
#if KERNEL_AT_LEAST(7, 1)
static inline bool pcs_get_skip_sync(struct device *dev) { return dev_dma_skip_sync(dev); }
static inline void pcs_put_skip_sync(struct device *dev, bool on) { dev_assign_dma_skip_sync(dev, on); }
#elif KERNEL_AT_LEAST(6, 10) && IS_ENABLED(CONFIG_DMA_NEED_SYNC)
static inline bool pcs_get_skip_sync(struct device *dev) { return dev->dma_skip_sync; }
static inline void pcs_put_skip_sync(struct device *dev, bool on) { dev->dma_skip_sync = on; }
#else
static inline bool pcs_get_skip_sync(struct device *dev) { return false; }
static inline void pcs_put_skip_sync(struct device *dev, bool on) { }
#endif

/* 6.19 maps physical addresses instead of pages and resources: one operation, with DMA_ATTR_MMIO for the latter. */
#if KERNEL_AT_LEAST(6, 19)
#define PCS_MAPS_PHYS 1
#else
#define PCS_MAPS_PHYS 0
#endif
#ifndef DMA_ATTR_MMIO
#define DMA_ATTR_MMIO 0
#endif
/* 7.1 marks memory that driver and device use at the same time for long, for which a copy would be wrong. Before, nothing distinguishes it. */
#ifndef DMA_ATTR_REQUIRE_COHERENT
#define DMA_ATTR_REQUIRE_COHERENT 0
#endif

/* 6.12 removed these two operations: non-contiguous allocations then use alloc_pages, in one piece. */
#if KERNEL_AT_LEAST(6, 12)
#define PCS_NONCONTIGUOUS 0
#else
#define PCS_NONCONTIGUOUS 1
#endif

/* 6.9 renamed it, because a macro took the old name. */
#if KERNEL_AT_LEAST(6, 9)
#define PCS_ALLOC_PAGES alloc_pages_op
#else
#define PCS_ALLOC_PAGES alloc_pages
#endif

/*
 * 6.3 merged the functions for the two contexts into one with a GFP argument. Before, a module may not map a list in atomic context: it is
 * mapped piece by piece.
 */
#if KERNEL_AT_LEAST(6, 3)
#define PCS_MAPS_LISTS 1
static inline int pcs_map_one(struct iommu_domain *domain, u64 iova, phys_addr_t phys, size_t len, int prot, gfp_t gfp)
{
	return iommu_map(domain, iova, phys, len, prot, gfp);
}
static inline ssize_t pcs_map_list(struct iommu_domain *domain, u64 iova, struct scatterlist *list, unsigned int count, int prot,
				   gfp_t gfp)
{
	return iommu_map_sg(domain, iova, list, count, prot, gfp);
}
#else
#define PCS_MAPS_LISTS 0
static inline int pcs_map_one(struct iommu_domain *domain, u64 iova, phys_addr_t phys, size_t len, int prot, gfp_t gfp)
{
	if (gfpflags_allow_blocking(gfp))
		return iommu_map(domain, iova, phys, len, prot);
	return iommu_map_atomic(domain, iova, phys, len, prot);
}
static inline ssize_t pcs_map_list(struct iommu_domain *domain, u64 iova, struct scatterlist *list, unsigned int count, int prot,
				   gfp_t gfp)
{
	return -EOPNOTSUPP;
}
#endif

/* Whether a device may use ATS, with translations beyond its domain; without the option none does. */
static inline bool pcs_has_ats(struct device *dev)
{
#ifdef CONFIG_PCI_ATS
	return dev_is_pci(dev) && to_pci_dev(dev)->ats_enabled;
#else
	return false;
#endif
}

/* 6.16 gave the list of page tables to free a type of its own. */
#if KERNEL_AT_LEAST(6, 16)
static inline bool pcs_frees_tables(const struct iommu_iotlb_gather *gather) { return !list_empty(&gather->freelist.pages); }
#else
static inline bool pcs_frees_tables(const struct iommu_iotlb_gather *gather) { return !list_empty(&gather->freelist); }
#endif

/* 6.11 allocates a domain for a device, not for a whole bus, whose IOMMUs may differ. */
#if KERNEL_AT_LEAST(6, 11)
static inline struct iommu_domain *pcs_paging_domain(struct device *dev) { return iommu_paging_domain_alloc(dev); }
#else
static inline struct iommu_domain *pcs_paging_domain(struct device *dev)
{
	struct iommu_domain *domain = iommu_domain_alloc(dev->bus);

	return domain ? domain : ERR_PTR(-EOPNOTSUPP);
}
#endif

/* 6.13 has this function; the two that it replaces are gone by now. */
static inline void pcs_timer_setup(struct hrtimer *timer, enum hrtimer_restart (*function)(struct hrtimer *))
{
#if KERNEL_AT_LEAST(6, 13)
	hrtimer_setup(timer, function, CLOCK_MONOTONIC, HRTIMER_MODE_ABS);
#else
	hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_ABS);
	timer->function = function;
#endif
}

#endif
