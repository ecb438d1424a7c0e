// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Takes devices before the probe of their driver, and releases them after its remove.
 *
 * A device is taken while no driver uses it: then it has no mapping, and no operation is in progress. The module cannot be removed while a
 * driver is bound to a taken device.
 */
#include <linux/slab.h>

#include "shim.h"

DEFINE_MUTEX(pcs_lock);
LIST_HEAD(pcs_devices);

struct pcs_device *pcs_find(struct device *dev)
{
	struct pcs_device *pd;

	list_for_each_entry(pd, &pcs_devices, node) {
		if (pd->dev == dev)
			return pd;
	}
	return NULL;
}

/* Drivers that own the whole device, as vfio-pci, and those of bridges, do not use these operations. dev is locked. */
static bool manages_dma(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_driver(dev->driver)->driver_managed_dma;
}

static LIST_HEAD(arrivals);
static DEFINE_SPINLOCK(arrivals_lock);

void pcs_arrives(struct pcs_arrival *arrival, struct device *dev)
{
	arrival->dev = dev;
	spin_lock(&arrivals_lock);
	list_add(&arrival->node, &arrivals);
	spin_unlock(&arrivals_lock);
}

void pcs_arrived(struct pcs_arrival *arrival)
{
	spin_lock(&arrivals_lock);
	list_del(&arrival->node);
	spin_unlock(&arrivals_lock);
}

bool pcs_is_arriving(struct device *dev)
{
	struct pcs_arrival *arrival;
	bool arriving = false;

	spin_lock(&arrivals_lock);
	list_for_each_entry(arrival, &arrivals, node)
		arriving |= arrival->dev == dev;
	spin_unlock(&arrivals_lock);
	return arriving;
}

struct making {
	struct pcs_device *pd;
	struct pc_device_config config;
};

static int make_core(void *argument)
{
	struct making *making = argument;

	return pc_device_new(making->pd->group->core, &making->config, &making->pd->core);
}

static int free_core(void *argument)
{
	pc_device_free(argument);
	return 0;
}

static void let_go(struct pcs_device *pd)
{
	if (pd->group)
		pcs_group_put(pd->group);
	pd->group = NULL;
	/* The last reference, unless a check is queued. */
	kobject_put(&pd->kobj);
}

/* Called by kobject_put. */
void pcs_free_device(struct pcs_device *pd)
{
	free_percpu(pd->counts);
	put_device(pd->dev);
	kfree(pd);
}

/* How often a device without a driver that is still in use is checked. */
#define LOOK_AGAIN	HZ

static void check_later(struct pcs_device *pd, unsigned long delay)
{
	kobject_get(&pd->kobj);
	if (!queue_delayed_work(pcs_timer_queue, &pd->check, delay))
		kobject_put(&pd->kobj);
}

/*
 * A probe has failed: the driver core frees managed resources after the notification, when the device's lock is free. Or a driver has gone, and
 * left mappings.
 */
static void check(struct work_struct *work)
{
	struct pcs_device *pd = container_of(to_delayed_work(work), struct pcs_device, check);

	device_lock(pd->dev);
	mutex_lock(&pcs_lock);
	if (pd->group && !pd->dev->driver)
		pcs_unbound(pd->dev, false);
	mutex_unlock(&pcs_lock);
	device_unlock(pd->dev);
	kobject_put(&pd->kobj);
}

/* From 6.12 on the IOMMU's operations are no table: an existing one is foreign. (Ours refuse devices that could not be taken.) */
static bool foreign_ops(struct device *dev)
{
	return KERNEL_AT_LEAST(6, 12) && get_dma_ops(dev);
}

static int take_one(struct device *dev, const struct pc_policy *policy, bool pinned)
{
	struct pcs_device *pd;
	struct pcs_group *group;
	struct making making;
	int ret;

	if (foreign_ops(dev))
		return -EOPNOTSUPP;
	pd = kzalloc(sizeof(*pd), GFP_KERNEL);
	if (!pd)
		return -ENOMEM;
	pcs_sysfs_init_device(pd);
	pd->dev = get_device(dev);
	raw_spin_lock_init(&pd->limits_lock);
	mutex_init(&pd->policy_lock);
	INIT_DELAYED_WORK(&pd->check, check);
	pd->pinned = pinned;
	pd->policy = *policy;
	ret = -ENOMEM;
	pd->counts = alloc_percpu(struct pcs_counts);
	if (!pd->counts)
		goto fail;
	group = pcs_group_get(dev, pinned);
	if (IS_ERR(group)) {
		ret = PTR_ERR(group);
		goto fail;
	}
	pd->group = group;
	if (pcs_has_ats(dev) && !pcs_allow_ats) {
		dev_err(dev, "portcullis: it caches translations (ATS), and may then reach any memory: load with allow_ats=1, or boot with pci=noats\n");
		ret = -EOPNOTSUPP;
		goto fail;
	}
	pd->mask = pcs_reach(dev);
	pd->offset_mask = dma_get_min_align_mask(dev);
	making = (struct making){
		.pd = pd,
		.config = {
			.mask = pd->mask,
			.offset_mask = pd->offset_mask,
			.policy = *policy,
			.number = ++group->numbers,
			.untrusted = 1,
		},
	};
	ret = pcs_call_slow(make_core, &making);
	if (ret)
		goto fail;
	ret = pcs_sysfs_add(pd);
	if (ret) {
		pcs_call_slow(free_core, pd->core);
		goto fail;
	}
	list_add_tail(&pd->node, &pcs_devices);
	pcs_fill_ops(&pd->ops);
	pd->old_ops = dev->dma_ops;
	pd->old_dma_iommu = pcs_get_dma_iommu(dev);
	pd->old_skip_sync = pcs_get_skip_sync(dev);
	set_dma_ops(dev, &pd->ops);
	pcs_put_skip_sync(dev, false);
	pcs_put_dma_iommu(dev, false);
	dev_info(dev, "portcullis: protected: %s%s; Linux's mode was %s%s\n", pcs_policy_name(policy->kind),
		 policy->ends ? ", and ends copied" : "", group->linux_mode, group->shared ? ", in a group with others" : "");
	return 0;
fail:
	let_go(pd);
	return ret;
}

struct members {
	struct device **list;
	unsigned int count;
	unsigned int room;
};

static int collect(struct device *dev, void *data)
{
	struct members *members = data;

	if (dev_is_pci(dev) && pci_is_bridge(to_pci_dev(dev)))
		return 0;
	if (members->count < members->room)
		members->list[members->count] = get_device(dev);
	members->count++;
	return 0;
}

/* Releases one device, which no driver uses. Linux's changes meanwhile stay. */
static void give_back(struct pcs_device *pd)
{
	struct device *dev = pd->dev;
	u64 left;

	if (dev->dma_ops == &pd->ops)
		set_dma_ops(dev, pd->old_ops);
	pcs_put_skip_sync(dev, pd->old_skip_sync);
	if (!pd->group->lost)
		pcs_put_dma_iommu(dev, pd->old_dma_iommu);
	else if (KERNEL_AT_LEAST(6, 12))
		pcs_put_dma_iommu(dev, iommu_get_domain_for_dev(dev)->type & __IOMMU_DOMAIN_DMA_API);
	list_del(&pd->node);
	if (cancel_delayed_work(&pd->check))
		kobject_put(&pd->kobj);
	pcs_sysfs_remove(pd);
	left = pc_unmap_all(pd->core);
	if (left == U64_MAX)
		dev_err(dev, "portcullis: its driver left some memory mapped, and the device may go on reaching it\n");
	else if (left)
		dev_warn(dev, "portcullis: its driver left %llu bytes mapped: they are unmapped\n", left);
	dev_info(dev, "portcullis: given back to Linux: %s\n", pd->group->lost ? "as it is now" : pd->group->linux_mode);
	pcs_call_slow(free_core, pd->core);
	if (pd->lingers)
		module_put(THIS_MODULE);
	let_go(pd);
}

static bool is_used(struct iommu_group *group)
{
	struct pcs_device *pd;

	list_for_each_entry(pd, &pcs_devices, node) {
		if (pd->group->iommu_group == group && (pd->bound || pd->pinned || pd->lingers))
			return true;
	}
	return false;
}

/* Releases all devices of an unused group. */
static void give_group_back(struct iommu_group *group)
{
	struct pcs_device *pd, *next;

	list_for_each_entry_safe(pd, next, &pcs_devices, node) {
		if (pd->group->iommu_group == group)
			give_back(pd);
	}
}

int pcs_take(struct device *dev, const struct pc_policy *policy, bool by_name)
{
	struct iommu_group *group = iommu_group_get(dev);
	struct members members = {};
	unsigned int i;
	int ret = -EOPNOTSUPP;

	if (!group) {
		dev_err(dev, "portcullis: not protected: no IOMMU is in front of it\n");
		return ret;
	}
	ret = take_one(dev, policy, by_name);
	if (ret)
		goto out;
	/* The others of its group, before a driver of theirs makes Linux allocate addresses of the same domain. */
	iommu_group_for_each_dev(group, &members, collect);
	if (members.count > 1) {
		members.list = kcalloc(members.count, sizeof(*members.list), GFP_KERNEL);
		members.room = members.list ? members.count : 0;
		members.count = 0;
		ret = members.list ? 0 : -ENOMEM;
		iommu_group_for_each_dev(group, &members, collect);
		members.count = min(members.count, members.room);
		for (i = 0; i < members.count; i++) {
			if (!ret && !pcs_find(members.list[i]))
				ret = take_one(members.list[i], policy, false);
			put_device(members.list[i]);
		}
		kfree(members.list);
	}
	if (ret) {
		struct pcs_device *pd = pcs_find(dev);

		pd->pinned = false;
		if (!is_used(group))
			give_group_back(group);
	}
out:
	if (ret)
		dev_err(dev, "portcullis: not protected: %s (%d)\n",
			ret == -EBUSY ? "its group is in use" :
			ret == -ENOSPC ? "its mask leaves no addresses" :
			ret == -ENOMEM ? "no memory" :
			ret == -EOPNOTSUPP ? "its IOMMU, or who else answers for its mappings, does not let us" : "Linux refused",
			ret);
	iommu_group_put(group);
	return ret;
}

static bool has_driver(struct iommu_group *group)
{
	struct pcs_device *pd;

	list_for_each_entry(pd, &pcs_devices, node) {
		if (pd->group->iommu_group == group && pd->bound)
			return true;
	}
	return false;
}

/* An administrator releases the whole group, whichever of its devices was named when it was taken. */
int pcs_give_back(struct pcs_device *pd)
{
	struct iommu_group *group = pd->group->iommu_group;

	if (has_driver(group))
		return -EBUSY;
	give_group_back(group);
	return 0;
}

/* Devices that could not be taken, and map nothing: their previous state. */
struct refused {
	struct list_head node;
	struct device *dev;
	const struct dma_map_ops *ops;
	bool dma_iommu;
};
static LIST_HEAD(refused_devices);

/* Each holds a reference of the module, because its operations are in place. */
static void refuse(struct device *dev)
{
	struct refused *refused = kmalloc(sizeof(*refused), GFP_KERNEL | __GFP_NOFAIL);

	*refused = (struct refused){ .dev = dev, .ops = dev->dma_ops, .dma_iommu = pcs_get_dma_iommu(dev) };
	list_add(&refused->node, &refused_devices);
	__module_get(THIS_MODULE);
	pcs_put_dma_iommu(dev, false);
	set_dma_ops(dev, &pcs_refusing_ops);
	dev_err(dev, "portcullis: nothing is mapped for it\n");
}

static void accept(struct device *dev)
{
	struct refused *refused, *next;

	list_for_each_entry_safe(refused, next, &refused_devices, node) {
		if (refused->dev != dev)
			continue;
		if (dev->dma_ops == &pcs_refusing_ops) {
			set_dma_ops(dev, refused->ops);
			pcs_put_dma_iommu(dev, refused->dma_iommu);
		}
		list_del(&refused->node);
		kfree(refused);
		module_put(THIS_MODULE);
	}
}

/*
 * Whether the device's domain is unchanged: while it has no driver, Linux lets an administrator change the domain of its group. If it is
 * changed, releases it, with all of its group.
 */
static bool is_intact(struct pcs_device *pd)
{
	if (!pcs_group_is_lost(pd->group, pd->dev) && pd->dev->dma_ops == &pd->ops && !pcs_get_dma_iommu(pd->dev))
		return true;
	dev_err(pd->dev, "portcullis: Linux has changed its group's domain: it is taken anew\n");
	return false;
}

/* A driver is about to be bound: its probe comes next. */
void pcs_binds(struct device *dev)
{
	struct pcs_device *pd = pcs_find(dev);
	struct pc_policy policy = pcs_default_policy;
	bool pinned = false, by_rule, known;
	int ret = 0;

	accept(dev);
	if (pd && manages_dma(dev)) {
		/* It needs the device as Linux made it. */
		if (pcs_give_back(pd))
			dev_err(dev, "portcullis: stays protected, so %s cannot have its group\n", dev->driver->name);
		return;
	}
	if (manages_dma(dev))
		return;
	if (pd && !pd->bound && !is_intact(pd)) {
		policy = pd->policy;
		pinned = pd->pinned;
		pcs_give_back(pd);
		pd = NULL;
	}
	by_rule = pcs_rule_matches(dev, &policy);
	known = pcs_group_is_known(dev);
	if (!pd && !pinned && !by_rule && !known)
		return;
	/* The module is being removed: the device is Linux's from now on. */
	if (!try_module_get(THIS_MODULE)) {
		if (pd)
			pcs_give_back(pd);
		return;
	}
	if (!pd) {
		ret = pcs_policy_for(dev, &policy, false);
		ret = ret ? ret : pcs_take(dev, &policy, pinned);
		pd = pcs_find(dev);
	}
	if (!pd) {
		/* If no rule protects it, or others of its group would suffer, it stays Linux's: the log says why. Otherwise it maps nothing. */
		if (known || (!pcs_fail_open && ret != -EBUSY && dev->iommu_group))
			refuse(dev);
		module_put(THIS_MODULE);
		return;
	}
	mutex_lock(&pd->policy_lock);
	strscpy(pd->driver, dev->driver->name, sizeof(pd->driver));
	mutex_unlock(&pd->policy_lock);
	/* It has the reference already if an earlier probe has just failed, or an earlier driver left mappings. */
	if (pd->bound || pd->lingers)
		module_put(THIS_MODULE);
	pd->bound = true;
	pd->lingers = false;
}

/* The driver is gone, or its probe has failed: then the driver core still frees its resources. */
void pcs_unbound(struct device *dev, bool failed)
{
	struct pcs_device *pd = pcs_find(dev);
	struct pc_usage usage;

	accept(dev);
	if (!pd)
		return;
	if (failed) {
		check_later(pd, 0);
		return;
	}
	pc_usage(pd->core, &usage);
	/*
	 * Pages of a network card may still be in sockets, and are unmapped when they return. Until then the device is ours, because Linux would
	 * unmap mappings that it does not have. An "unprotect" by hand does not wait.
	 */
	if (usage.open_mappings) {
		if (!pd->lingers)
			dev_info(dev, "portcullis: its driver is gone, but has %llu mappings, %llu bytes: it stays protected until they end\n",
				 usage.open_mappings, usage.open_bytes);
		pd->lingers |= pd->bound;
	} else if (pd->bound || pd->lingers) {
		module_put(THIS_MODULE);
		pd->lingers = false;
	}
	pd->bound = false;
	mutex_lock(&pd->policy_lock);
	pd->driver[0] = '\0';
	mutex_unlock(&pd->policy_lock);
	if (pd->lingers)
		check_later(pd, LOOK_AGAIN);
	else if (!is_used(pd->group->iommu_group))
		pcs_give_back(pd);
}

/* The device is being removed from its bus: with its driver, if that is still bound; at the latest before it leaves its IOMMU group. */
void pcs_goes(struct device *dev, bool gone)
{
	struct pcs_device *pd = pcs_find(dev);

	accept(dev);
	if (!pd)
		return;
	/* A probe that has failed, and was not checked yet. */
	if (gone && pd->bound && !dev->driver) {
		pd->bound = false;
		module_put(THIS_MODULE);
	}
	if (pd->bound) {
		/* Not before its driver is gone; then it is not kept. */
		WARN_ON(gone);
		pd->pinned = false;
		return;
	}
	pd->pinned = false;
	if (is_used(pd->group->iommu_group) || pcs_give_back(pd))
		give_back(pd);
}

/* Module removal: no driver is bound, and none that binds is taken any more. */
void pcs_give_all_back(void)
{
	for (;;) {
		struct pcs_device *pd;
		struct device *dev;

		mutex_lock(&pcs_lock);
		pd = list_first_entry_or_null(&pcs_devices, struct pcs_device, node);
		dev = pd ? get_device(pd->dev) : NULL;
		mutex_unlock(&pcs_lock);
		if (!dev)
			return;
		device_lock(dev);
		mutex_lock(&pcs_lock);
		pd = pcs_find(dev);
		if (pd)
			WARN_ON(pcs_give_back(pd));
		mutex_unlock(&pcs_lock);
		device_unlock(dev);
		put_device(dev);
	}
}
