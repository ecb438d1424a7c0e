/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The interface between the C shim and the Rust crate. rust/src/ffi.rs is the same in Rust; the crate's test "layout" compiles both and compares
 * sizes and offsets.
 *
 * pc_*  : the core's functions, called by the shim.
 * pcs_* : the shim's functions (the kernel's services), called by the core.
 *
 * Unless documented otherwise a function may be called in any context except NMI, on every CPU at once, and does not sleep.
 */
#ifndef PORTCULLIS_H
#define PORTCULLIS_H

#ifdef __KERNEL__
#include <linux/types.h>
#endif

struct pc_domain;
struct pc_device;

/* A range of memory, or of device addresses. */
struct pc_segment {
	u64 addr;
	u64 len;
};

/* Addresses from first to last, both included. */
struct pc_range {
	u64 first;
	u64 last;
};

enum pc_policy_kind {
	PC_STRICT = 0,
	PC_LAZY = 1,
	PC_BOUNCE = 2,
	PC_AUTO = 3,
};

struct pc_policy {
	u32 kind;	/* enum pc_policy_kind */
	u32 ends;	/* PC_STRICT, too, copies parts that share a page with other data: for untrusted devices */
	u64 window_ns;	/* PC_LAZY: how long unmapped memory may stay open */
	u64 threshold;	/* PC_BOUNCE, PC_AUTO: bytes up to which a mapping may be copied */
};

struct pc_domain_config {
	void *group;	/* the argument of pcs_iommu_* and pcs_arm */
	u64 first;	/* translated addresses, both included */
	u64 last;
	u64 page_sizes;	/* a bit for each: bit 12 for 4 KiB */
	const struct pc_range *reserved;
	size_t reserved_count;
};

struct pc_device_config {
	u64 mask;
	u64 offset_mask;	/* low bits of a buffer's address that a copy keeps */
	struct pc_policy policy;
	u32 number;		/* distinguishes the devices of a domain */
	u32 untrusted;
};

struct pc_usage {
	u64 copied_bytes;
	u64 copies;
	u64 mapped;
	u64 flushes;
	u64 open_bytes;
	u64 open_mappings;
	u64 exposed_bytes;
	u64 pool_bytes;
	u64 book_bytes;
	u64 lost_bytes;
};

/* The result of pcs_enter: the argument of pcs_leave, and the CPU's number. */
struct pc_entered {
	unsigned long flags;
	unsigned long cpu;
};

/* Directions, as in enum dma_data_direction. */
#define PC_BIDIRECTIONAL	0
#define PC_TO_DEVICE		1
#define PC_FROM_DEVICE		2

/* How memory is mapped or unmapped. */
#define PC_MMIO			1	/* registers of a device, never copied */
#define PC_UNCACHED		2
#define PC_PRIVILEGED		4
#define PC_SKIP_COPY		8	/* the caller syncs: DMA_ATTR_SKIP_CPU_SYNC */
#define PC_LASTING		16	/* long-lived, never synced: mapped, not copied, and ended strictly */

/* The result of pc_map when it maps nothing: DMA_MAPPING_ERROR. */
#define PC_MAPPING_ERROR	(~(u64)0)
/* The same, but devices may reach the memory, which must not be reused: a part of it was mapped, and could not be removed again. */
#define PC_MAPPING_STAYS	(~(u64)1)

/* Once, before all others. direct_map: the virtual address of physical address 0 in the kernel's direct map. */
void pc_init(unsigned long direct_map);

/* Make and free a domain. They sleep, and have stack frames of several KiB. Return 0 or a negative error. */
int pc_domain_new(const struct pc_domain_config *config, struct pc_domain **domain);
void pc_domain_free(struct pc_domain *domain);
/* The deadline of pcs_arm has come; the CPU is offline. They wait for hardware and for other CPUs; process context. */
void pc_domain_timer(struct pc_domain *domain);
void pc_domain_cpu_released(struct pc_domain *domain, u32 cpu);

/* Make and free a device of a domain, as above. A device is freed before its domain. */
int pc_device_new(struct pc_domain *domain, const struct pc_device_config *config, struct pc_device **device);
void pc_device_free(struct pc_device *device);

/* Returns the device address, PC_MAPPING_ERROR or PC_MAPPING_STAYS: all addresses are lower. */
u64 pc_map(const struct pc_device *device, u64 phys, u64 len, u32 direction, u32 attributes);
/*
 * Maps a list to consecutive addresses; out has room for count segments. Returns how many it wrote, or a negative error. After -EIO devices may
 * reach the memory, as after PC_MAPPING_STAYS.
 */
long pc_map_sg(const struct pc_device *device, const struct pc_segment *list, size_t count, u32 direction, u32 attributes,
	       struct pc_segment *out);
/*
 * Return 0, or a negative error with nothing changed: an existing mapping still exists. But after -EIO of an unmap the mapping is over, and
 * devices may go on reaching the memory. -ERANGE: the mapping at the address has another length.
 */
int pc_unmap(const struct pc_device *device, u64 iova, u64 len, u32 attributes);
int pc_sync_for_cpu(const struct pc_device *device, u64 iova, u64 len);
int pc_sync_for_device(const struct pc_device *device, u64 iova, u64 len);

/* The driver's masks have changed. */
int pc_set_limits(const struct pc_device *device, u64 mask, u64 offset_mask);
/* Changes the policy while the device runs. Sleeps: it may make a pool. */
int pc_set_policy(const struct pc_device *device, const struct pc_policy *policy);
/*
 * Ends all mappings of the device, while no other call for it runs; returns their bytes, or ~0 if the hardware did not confirm it. Waits for
 * hardware; process context.
 */
u64 pc_unmap_all(const struct pc_device *device);
void pc_usage(const struct pc_device *device, struct pc_usage *usage);

/* Heap: blocks are aligned to 8 bytes, powers of two to their size, and blocks larger than a page to pages. Returns NULL without memory. */
void *pcs_alloc(size_t bytes);
void pcs_free(void *block);
/* Allocates 2^order zeroed pages; returns 0 without memory. */
u64 pcs_frames_alloc(u32 order);
void pcs_frames_free(u64 phys, u32 order);
/* Turn interrupts off, and restore them. (A structure of two words is returned in registers.) */
struct pc_entered pcs_enter(void);
void pcs_leave(unsigned long flags);
u32 pcs_cpus(void);
u64 pcs_now(void);
/* Calls pc_domain_timer at that time of pcs_now, or earlier. */
void pcs_arm(void *group, u64 deadline_ns);
/* Logs the panic message of a task that a broken invariant stops. */
void pcs_say(const char *text, size_t len);

/* Protection bits: Linux's IOMMU_READ and so on. iommu.c checks that they are equal. */
#define PC_PROT_READ		1
#define PC_PROT_WRITE		2
#define PC_PROT_CACHE		4
#define PC_PROT_MMIO		16
#define PC_PROT_PRIV		32
/*
 * Map memory to consecutive addresses from iova on: len bytes at phys, or a list of pieces whose lengths add up to len. Return 0 if all is
 * mapped, or a negative error if nothing is, except a remainder that Linux's own undo in iommu_map could not remove and its driver has dropped
 * (virtio's may), which cannot be seen. PC_STAYS: the map failed, and a part of it could not be removed again. Devices may reach that part, and
 * the addresses must not be reused.
 */
#define PC_STAYS		1
int pcs_iommu_map(void *group, u64 iova, u64 phys, u64 len, int prot);
int pcs_iommu_map_list(void *group, u64 iova, const struct pc_segment *list, size_t count, u64 len, int prot);
/*
 * Removes all translations in the range, and returns their bytes; if that is less than len, devices may still reach the rest. Hardware may use
 * cached translations until a sync. Adds the removed translations' hints for that sync to hints, by OR. Frees empty tables, after a wait of
 * their own.
 */
u64 pcs_iommu_unmap(void *group, u64 iova, u64 len, u64 *hints);
/*
 * As pcs_iommu_unmap, and waits for the invalidation of the removed translations. If it removed less than len, it waits for the invalidation of
 * everything: another caller may have removed the rest without a wait.
 */
u64 pcs_iommu_unmap_now(void *group, u64 iova, u64 len);
/*
 * Wait until everything unmapped between two addresses, or anywhere, is invalidated, and accesses through it are complete. hints: those of all
 * unmaps between the two, joined by OR. The IOMMU's driver reports no failure.
 */
void pcs_iommu_sync(void *group, u64 first, u64 last, u64 hints);
void pcs_iommu_flush(void *group);

#endif
