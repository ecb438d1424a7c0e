// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Taking devices, before the probe of their driver, and giving them back, behind its remove.
 *
 * A device is taken while no driver uses it: then it has nothing mapped, and no call of an operation is under way. The module cannot be
 * removed while a driver is bound to one that is taken.
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

/* Drivers that have the whole device to themselves, as vfio-pci, and those of bridges, do not use these operations. */
static bool manages_dma(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_driver(dev->driver)->driver_managed_dma;
}

bool pcs_has_driver(struct device *dev)
{
	return dev->driver && !manages_dma(dev);
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
	/* The last reference, but where a check waits for its turn. */
	kobject_put(&pd->kobj);
}

/* Called by kobject_put. */
void pcs_free_device(struct pcs_device *pd)
{
	free_percpu(pd->counts);
	put_device(pd->dev);
	kfree(pd);
}

/* A probe has failed. What the driver asked to be freed by the driver core is freed after that is told: the device's lock is free then. */
static void check(struct work_struct *work)
{
	struct pcs_device *pd = container_of(work, struct pcs_device, check);

	device_lock(pd->dev);
	mutex_lock(&pcs_lock);
	if (pd->group && !pd->dev->driver)
		pcs_unbound(pd->dev, false);
	mutex_unlock(&pcs_lock);
	device_unlock(pd->dev);
	kobject_put(&pd->kobj);
}

static bool foreign_ops(struct device *dev)
{
	/* From 6.12 on the IOMMU's operations are no table: one that is there is somebody else's. */
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
	INIT_WORK(&pd->check, check);
	pd->pinned = pinned;
	pd->policy = *policy;
	ret = -ENOMEM;
	pd->counts = alloc_percpu(struct pcs_counts);
	if (!pd->counts)
		goto fail;
	group = pcs_group_get(dev);
	if (IS_ERR(group)) {
		ret = PTR_ERR(group);
		goto fail;
	}
	pd->group = group;
	pd->mask = pcs_reach(dev);
	pd->offset_mask = dma_get_min_align_mask(dev);
	making = (struct making){
		.pd = pd,
		.config = {
			.mask = pd->mask,
			.offset_mask = pd->offset_mask,
			.policy = *policy,
			.number = group->devices,
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
	dev_info(dev, "portcullis: protected: %s; Linux's mode was %s%s\n", pcs_policy_name(policy->kind), group->linux_mode,
		 group->shared ? ", in a group with others" : "");
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

/* Gives back one device, which no driver uses. */
static void give_back(struct pcs_device *pd)
{
	struct device *dev = pd->dev;
	u64 left;

	set_dma_ops(dev, pd->old_ops);
	pcs_put_skip_sync(dev, pd->old_skip_sync);
	pcs_put_dma_iommu(dev, pd->old_dma_iommu);
	list_del(&pd->node);
	pcs_sysfs_remove(pd);
	left = pc_unmap_all(pd->core);
	if (left)
		dev_warn(dev, "portcullis: its driver left %llu bytes mapped: they are unmapped\n", left);
	dev_info(dev, "portcullis: given back to Linux: %s\n", pd->group->linux_mode);
	pcs_call_slow(free_core, pd->core);
	let_go(pd);
}

static bool is_used(struct iommu_group *group)
{
	struct pcs_device *pd;

	list_for_each_entry(pd, &pcs_devices, node) {
		if (pd->group->iommu_group == group && (pd->bound || pd->pinned))
			return true;
	}
	return false;
}

/* Gives back all devices of a group that is not used. */
static void give_group_back(struct iommu_group *group)
{
	struct pcs_device *pd, *next;

	list_for_each_entry_safe(pd, next, &pcs_devices, node) {
		if (pd->group->iommu_group == group)
			give_back(pd);
	}
}

int pcs_take(struct device *dev, const struct pc_policy *policy, bool pinned)
{
	struct iommu_group *group = iommu_group_get(dev);
	struct members members = {};
	unsigned int i;
	int ret = -EOPNOTSUPP;

	if (!group) {
		dev_err(dev, "portcullis: not protected: no IOMMU is in front of it\n");
		return ret;
	}
	ret = take_one(dev, policy, pinned);
	if (ret)
		goto out;
	/* The others of its group, before a driver of theirs asks Linux for addresses of the same domain. */
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

int pcs_give_back(struct pcs_device *pd)
{
	struct iommu_group *group = pd->group->iommu_group;
	bool pinned = pd->pinned;

	if (pd->bound)
		return -EBUSY;
	pd->pinned = false;
	if (is_used(group)) {
		pd->pinned = pinned;
		return -EBUSY;
	}
	give_group_back(group);
	return 0;
}

/* What the devices had that map nothing now: the same for all, as only those have it that Linux translates for. */
static const struct dma_map_ops *refused_ops;
static bool refused_dma_iommu;

static void refuse(struct device *dev)
{
	dev_err(dev, "portcullis: it shares its addresses with a device that is protected: nothing is mapped for it\n");
	refused_ops = dev->dma_ops;
	refused_dma_iommu = pcs_get_dma_iommu(dev);
	pcs_put_dma_iommu(dev, false);
	set_dma_ops(dev, &pcs_refusing_ops);
}

static void accept(struct device *dev)
{
	set_dma_ops(dev, refused_ops);
	pcs_put_dma_iommu(dev, refused_dma_iommu);
}

/* A driver is about to be bound: its probe comes next. */
void pcs_binds(struct device *dev)
{
	struct pcs_device *pd = pcs_find(dev);

	if (manages_dma(dev) || (!pd && !pcs_rule_matches(dev) && !pcs_group_is_known(dev)))
		return;
	/* The module is being removed: the device is Linux's from now on. */
	if (!try_module_get(THIS_MODULE)) {
		if (pd)
			pcs_give_back(pd);
		return;
	}
	if (!pd)
		pcs_take(dev, &pcs_default_policy, false);
	pd = pcs_find(dev);
	if (!pd || pd->bound) {
		/* The module stays, as operations of its are in place. */
		if (!pd && pcs_group_is_known(dev))
			refuse(dev);
		else
			module_put(THIS_MODULE);
		return;
	}
	pd->bound = true;
	mutex_lock(&pd->policy_lock);
	strscpy(pd->driver, dev->driver->name, sizeof(pd->driver));
	mutex_unlock(&pd->policy_lock);
}

/* The driver is gone, or its probe has failed: then the driver core still frees what it had. */
void pcs_unbound(struct device *dev, bool failed)
{
	struct pcs_device *pd = pcs_find(dev);

	if (!pd && dev->dma_ops == &pcs_refusing_ops) {
		accept(dev);
		module_put(THIS_MODULE);
	}
	if (!pd)
		return;
	if (failed) {
		kobject_get(&pd->kobj);
		if (!queue_work(pcs_timer_queue, &pd->check))
			kobject_put(&pd->kobj);
		return;
	}
	if (pd->bound) {
		pd->bound = false;
		mutex_lock(&pd->policy_lock);
		pd->driver[0] = '\0';
		mutex_unlock(&pd->policy_lock);
		module_put(THIS_MODULE);
	}
	if (pd->going)
		pd->pinned = false;
	if (!pd->pinned)
		pcs_give_back(pd);
}

/* The device is being removed from its bus: with its driver, if that is still bound; at the latest before its IOMMU's group lets it go. */
void pcs_goes(struct device *dev, bool gone)
{
	struct pcs_device *pd = pcs_find(dev);

	if (!pd)
		return;
	pd->going = true;
	if (!gone && pd->bound)
		return;
	if (gone && WARN_ON(pd->bound))
		return;
	pd->pinned = false;
	if (pcs_give_back(pd))
		give_back(pd);
}

/* The module goes: no driver is bound, and none that binds is taken any more. */
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
		if (pd) {
			struct pcs_device *other;

			list_for_each_entry(other, &pcs_devices, node)
				other->pinned = false;
			WARN_ON(pcs_give_back(pd));
		}
		mutex_unlock(&pcs_lock);
		device_unlock(dev);
		put_device(dev);
	}
}
