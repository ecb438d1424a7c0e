/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Shared by the files of the shim. */
#ifndef PORTCULLIS_SHIM_H
#define PORTCULLIS_SHIM_H

#ifdef pr_fmt
#undef pr_fmt
#endif
#define pr_fmt(fmt) "portcullis: " fmt

#include <linux/dma-map-ops.h>
#include <linux/iommu.h>
#include <linux/kobject.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/percpu.h>
#include <linux/workqueue.h>

#include "../include/compat.h"
#include "../include/portcullis.h"

/* The drivers' calls for a device: on the CPU that they ran on. */
struct pcs_counts {
	u64 maps;
	u64 unmaps;
	u64 syncs;
	u64 errors;
	u64 map_ns;
	u64 unmap_ns;
};

/* The calls to Linux. */
struct pcs_iommu_counts {
	u64 maps;
	u64 unmaps;
	u64 waits;
	u64 flushes;
};

/*
 * The devices that the IOMMU cannot tell apart: one domain of Linux's, and one of the core's. Made with the first of them, and freed with the
 * last. Changed only under pcs_lock.
 */
struct pcs_group {
	struct list_head node;
	struct iommu_group *iommu_group;
	struct iommu_domain *domain;
	/* The domain is the module's; otherwise Linux's default domain of these devices. */
	bool own;
	bool entered;
	struct pc_domain *core;
	/* Linux has replaced the domain, and may have freed it: it is not used any more. */
	bool lost;
	/* Devices ever taken: each gets a number. */
	unsigned int numbers;
	/* Devices that use it, and devices of the IOMMU group: one more may be hot-plugged. */
	unsigned int devices;
	bool shared;
	/* Type of Linux's previous domain. */
	const char *linux_mode;
	struct pcs_iommu_counts __percpu *counts;
	/* The core's timer: see services.c. */
	struct hrtimer timer;
	struct work_struct timer_work;
	raw_spinlock_t timer_lock;
	u64 timer_ns;
	bool timer_stopped;
};

/* A device that is protected. */
struct pcs_device {
	/* dev->dma_ops points here: so an operation finds the rest without a look-up. */
	struct dma_map_ops ops;
	struct device *dev;
	struct pc_device *core;
	struct pcs_counts __percpu *counts;
	/* The driver's masks as the core knows them, and the lock of changes. */
	u64 mask;
	u64 offset_mask;
	raw_spinlock_t limits_lock;

	/* Under pcs_lock. */
	struct list_head node;
	struct pcs_group *group;
	const struct dma_map_ops *old_ops;
	bool old_dma_iommu;
	bool old_skip_sync;
	/* Protected by name: stays protected without a driver. */
	bool pinned;
	/* A driver is bound, or about to be: holds a reference of the module. */
	bool bound;
	/* Without a driver, but something is still mapped. */
	bool lingers;
	struct delayed_work check;

	/* For sysfs: the policy, and the bound driver's name, under policy_lock. */
	struct mutex policy_lock;
	struct pc_policy policy;
	char driver[32];
	struct kobject kobj;
};

/* A policy with the defaults of the module's parameters. */
extern struct pc_policy pcs_default_policy;
/* Serializes taking and releasing. Taken inside the lock of the device. */
extern struct mutex pcs_lock;
extern struct list_head pcs_devices;
/* For work that may sleep and needs several KiB of stack, one item at a time; and for the timers. */
extern struct workqueue_struct *pcs_slow_queue;
extern struct workqueue_struct *pcs_timer_queue;

/* take.c; the caller holds the device's lock and pcs_lock, except for the last two. */
int pcs_take(struct device *dev, const struct pc_policy *policy, bool by_name);
int pcs_give_back(struct pcs_device *pd);
void pcs_binds(struct device *dev);
void pcs_unbound(struct device *dev, bool failed);
void pcs_goes(struct device *dev, bool gone);
struct pcs_device *pcs_find(struct device *dev);
/* A driver is about to be bound, and its notification waits for pcs_lock: it has mapped nothing yet. */
struct pcs_arrival {
	struct list_head node;
	struct device *dev;
};
void pcs_arrives(struct pcs_arrival *arrival, struct device *dev);
void pcs_arrived(struct pcs_arrival *arrival);
bool pcs_is_arriving(struct device *dev);
void pcs_give_all_back(void);

/* group.c; the caller holds pcs_lock. by_name: the administrator named this device, not a rule for many. */
struct pcs_group *pcs_group_get(struct device *dev, bool by_name);
void pcs_group_put(struct pcs_group *group);
bool pcs_group_is_known(struct device *dev);
bool pcs_group_is_lost(struct pcs_group *group, struct device *dev);
/* Called on another CPU after this one is dead: the cores free their caches for it. Without pcs_lock. */
int pcs_groups_cpu_dead(unsigned int cpu);

/* ops.c */
void pcs_fill_ops(struct dma_map_ops *ops);
extern const struct dma_map_ops pcs_refusing_ops;

/* services.c */
void pcs_group_timer_init(struct pcs_group *group);
void pcs_group_timer_stop(struct pcs_group *group);
/* Calls a function on the slow queue, where the core may wait for memory, and waits for its end. */
int pcs_call_slow(int (*function)(void *), void *argument);
void pcs_services_exit(void);

/* rules.c */
int pcs_set_word(const char *name, const char *value, struct pc_policy *to);
int pcs_parse_policy(char *words, struct pc_policy *policy);
int pcs_rules_init(void);
void pcs_rules_exit(void);
bool pcs_rule_matches(struct device *dev, struct pc_policy *policy);
extern bool pcs_fail_open, pcs_allow_ats;
int pcs_policy_for(struct device *dev, struct pc_policy *policy, bool by_name);
ssize_t pcs_rules_show(char *buf);
const char *pcs_policy_name(u32 kind);

/* sysfs.c */
int pcs_sysfs_init(void);
int pcs_sysfs_open(void);
/* From now on nothing is protected or released by name; the devices' files stay. */
void pcs_sysfs_close(void);
void pcs_sysfs_exit(void);
void pcs_sysfs_init_device(struct pcs_device *pd);
int pcs_sysfs_add(struct pcs_device *pd);
void pcs_sysfs_remove(struct pcs_device *pd);
void pcs_free_device(struct pcs_device *pd);
int pcs_switch_policy(struct pcs_device *pd, const struct pc_policy *policy);

/* The highest address of all mappings of the device: different streaming and coherent masks would take two pools. */
static inline u64 pcs_reach(struct device *dev)
{
	u64 mask = dev->dma_mask && *dev->dma_mask ? *dev->dma_mask : DMA_BIT_MASK(32);

	return min_not_zero(min_not_zero(mask, dev->coherent_dma_mask), dev->bus_dma_limit);
}

/* Whether the caller may wait for memory: only the task of the slow queue may, and not an interrupt of it. */
extern struct task_struct *pcs_slow_task;
static inline bool pcs_is_slow(void)
{
	return READ_ONCE(pcs_slow_task) == current && in_task() && !irqs_disabled();
}

/* NOIO: a device that writes pages out may be waiting for this allocation. */
static inline gfp_t pcs_gfp(void)
{
	return pcs_is_slow() ? GFP_NOIO | __GFP_NOWARN : GFP_ATOMIC | __GFP_NOWARN;
}

static inline struct pcs_device *pcs_of(struct device *dev)
{
	/* Not by get_dma_ops: these are never the default ones. */
	return container_of(dev->dma_ops, struct pcs_device, ops);
}

#endif
