// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Groups: the devices that the IOMMU cannot tell apart share one domain.
 *
 * A single device gets a new domain of the module's own. In a group of several, Linux lets the second driver bind only while the group is in its
 * default domain: there the module maps in that one, whatever its type, if it translates at all. Linux allocates no addresses in it meanwhile,
 * because the module takes all devices of the group together.
 */
#include <linux/slab.h>

#include "shim.h"

/*
 * The groups with a core. The list changes under pcs_lock and groups_lock, and is read under either. CPU hotplug, which holds its own lock when
 * a CPU is dead, takes only groups_lock: under pcs_lock Linux may wait for CPU hotplug. A core that is being made is not in the list: its
 * per-CPU caches of a CPU that dies meanwhile wait until that CPU is back.
 */
static LIST_HEAD(groups);
static DEFINE_MUTEX(groups_lock);

/* Address ranges that a device must not use. */
struct reserved {
	struct pc_range *ranges;
	size_t count;
	size_t room;
};

static int reserve(struct reserved *list, u64 first, u64 last)
{
	if (last < first)
		return 0;
	if (list->count == list->room) {
		size_t room = list->room ? 2 * list->room : 16;
		struct pc_range *ranges = krealloc_array(list->ranges, room, sizeof(*ranges), GFP_KERNEL);

		if (!ranges)
			return -ENOMEM;
		list->ranges = ranges;
		list->room = room;
	}
	list->ranges[list->count++] = (struct pc_range){ first & PAGE_MASK, last | ~PAGE_MASK };
	return 0;
}

/*
 * Memory that firmware uses (RMRR, for one) stays identity-mapped, as in Linux's own domains; addresses of interrupts and other hardware are
 * never allocated. With a list, adds the regions to it; without one, maps firmware's.
 */
static int reserve_regions(struct pcs_group *group, struct device *dev, struct reserved *list)
{
	struct iommu_resv_region *region, *next;
	LIST_HEAD(regions);
	int ret = iommu_get_group_resv_regions(group->iommu_group, &regions);

	list_for_each_entry_safe(region, next, &regions, list) {
		u64 last = region->start + region->length - 1;

		if (!ret && list && region->type == IOMMU_RESV_SW_MSI) {
			dev_err(dev, "portcullis: interrupts as writes that the IOMMU translates are not supported\n");
			ret = -EOPNOTSUPP;
		}
		if (!ret && list && region->length)
			ret = reserve(list, region->start, last);
		if (!ret && !list && region->length &&
		    (region->type == IOMMU_RESV_DIRECT || region->type == IOMMU_RESV_DIRECT_RELAXABLE)) {
			u64 begin = region->start & PAGE_MASK;

			dev_info(dev, "portcullis: firmware's region %pa, %zu bytes, stays open\n", &region->start, region->length);
			ret = pcs_map_one(group->domain, begin, begin, PAGE_ALIGN(last + 1) - begin, region->prot, GFP_KERNEL);
		}
		list_del(&region->list);
		kfree(region);
	}
	return ret;
}

/* A PCI bridge claims addresses in its windows, which never reach the IOMMU; and some bridges forward only certain ones upstream. */
static int reserve_windows(struct pcs_group *group, struct device *dev, struct reserved *list)
{
	struct pci_host_bridge *bridge;
	struct resource_entry *window;
	u64 begin = 0;
	int ret = 0;

	if (!dev_is_pci(dev))
		return 0;
	bridge = pci_find_host_bridge(to_pci_dev(dev)->bus);
	resource_list_for_each_entry(window, &bridge->windows) {
		if (!ret && resource_type(window->res) == IORESOURCE_MEM)
			ret = reserve(list, window->res->start - window->offset, window->res->end - window->offset);
	}
	/* Sorted by the host bridge's driver: gaps between them cannot be reached. */
	resource_list_for_each_entry(window, &bridge->dma_ranges) {
		u64 start = window->res->start - window->offset;

		if (!ret && start > begin)
			ret = reserve(list, begin, start - 1);
		begin = window->res->end - window->offset + 1;
	}
	if (!ret && begin && !list_empty(&bridge->dma_ranges))
		ret = reserve(list, begin, U64_MAX);
	return ret;
}

struct look {
	struct device *first;
	struct device *other;
	unsigned int devices;
	bool foreign;
};

/*
 * A bridge has no memory accesses of its own to map. A driver that is only about to be bound has mapped nothing. (The other device is not
 * locked, so its driver must not be inspected.)
 */
static int look_at(struct device *dev, void *data)
{
	struct look *look = data;

	if (!dev_is_pci(dev)) {
		look->foreign = true;
		return 0;
	}
	if (pci_is_bridge(to_pci_dev(dev)))
		return 0;
	look->devices++;
	if (dev != look->first && READ_ONCE(dev->driver) && !pcs_find(dev) && !pcs_is_arriving(dev))
		look->other = dev;
	return 0;
}

static const char *mode_of(const struct iommu_domain *domain)
{
	switch (domain->type) {
	case IOMMU_DOMAIN_IDENTITY:
		return "passthrough";
	case IOMMU_DOMAIN_DMA_FQ:
		return "lazy";
	case IOMMU_DOMAIN_DMA:
		return "strict";
	default:
		return "other";
	}
}

/*
 * Makes a domain of the module's own, and attaches the group. Coherent: the device's accesses snoop even if it asks for no-snoop; otherwise it
 * could read a page's contents from before it was zeroed. That must be set before anything is mapped, and an IOMMU that cannot do it lets no
 * device enter.
 */
static int enter_own(struct pcs_group *group, struct device *dev, bool coherent)
{
	struct iommu_domain *domain = pcs_paging_domain(dev);
	int ret;

	if (IS_ERR(domain))
		return PTR_ERR(domain);
	group->domain = domain;
	group->own = true;
	ret = -EINVAL;
	if (coherent && !(domain->ops->enforce_cache_coherency && domain->ops->enforce_cache_coherency(domain)))
		goto fail;
	ret = reserve_regions(group, dev, NULL);
	if (!ret)
		ret = iommu_attach_group(domain, group->iommu_group);
	if (ret)
		goto fail;
	group->entered = true;
	return 0;
fail:
	iommu_domain_free(domain);
	group->domain = NULL;
	group->own = false;
	return ret;
}

static int enter_domain(struct pcs_group *group, struct device *dev, bool by_name)
{
	struct iommu_domain *linux_domain = iommu_get_domain_for_dev(dev);
	struct look look = { .first = dev };
	bool translates;
	int ret;

	if (!linux_domain)
		return -EOPNOTSUPP;
	iommu_group_for_each_dev(group->iommu_group, &look, look_at);
	if (look.other) {
		dev_err(dev, "portcullis: %s, which the IOMMU cannot tell from it, has a driver already\n", dev_name(look.other));
		return -EBUSY;
	}
	/* Another owner's domain, such as a virtual machine's, is neither used nor replaced. */
	translates = linux_domain->type == IOMMU_DOMAIN_DMA || linux_domain->type == IOMMU_DOMAIN_DMA_FQ;
	if (look.foreign || (!translates && linux_domain->type != IOMMU_DOMAIN_IDENTITY)) {
		dev_err(dev, "portcullis: its group has a domain or a device that is not Linux's own DMA API's\n");
		return -EBUSY;
	}
	group->shared = look.devices > 1;
	group->linux_mode = mode_of(linux_domain);
	if (group->shared && translates) {
		/* Linux uses it already: flush its deferred unmaps. */
		group->domain = linux_domain;
		iommu_flush_iotlb_all(linux_domain);
		return 0;
	}
	if (group->shared) {
		dev_warn(dev, "portcullis: of the %u devices of its group one can be used, as Linux passes their addresses through. To use all, write DMA to /sys/kernel/iommu_groups/%d/type before a device of it is protected, while no driver is bound\n",
			 look.devices, iommu_group_id(group->iommu_group));
		/* A rule for many must not block the other devices' drivers. */
		if (!by_name)
			return -EBUSY;
	}
	ret = enter_own(group, dev, true);
	if (!ret)
		return 0;
	ret = enter_own(group, dev, false);
	if (!ret && group->domain->ops->enforce_cache_coherency)
		dev_info(dev, "portcullis: the IOMMU does not force its accesses through the caches: it may read what was in memory before a page was cleared\n");
	return ret;
}

static void leave_domain(struct pcs_group *group)
{
	if (group->entered && !group->lost)
		iommu_detach_group(group->domain, group->iommu_group);
	group->entered = false;
}

struct making {
	struct pcs_group *group;
	struct pc_domain_config config;
};

static int make_core(void *argument)
{
	struct making *making = argument;

	return pc_domain_new(&making->config, &making->group->core);
}

static int free_core(void *argument)
{
	pc_domain_free(argument);
	return 0;
}

static void free_group(struct pcs_group *group)
{
	/* First out of the list: then nothing reaches the parts that the core frees. */
	leave_domain(group);
	pcs_group_timer_stop(group);
	if (group->core)
		pcs_call_slow(free_core, group->core);
	if (group->domain && group->own)
		iommu_domain_free(group->domain);
	iommu_group_put(group->iommu_group);
	free_percpu(group->counts);
	kfree(group);
}

static struct pcs_group *make_group(struct device *dev, struct iommu_group *iommu_group, bool by_name)
{
	struct pcs_group *group = kzalloc(sizeof(*group), GFP_KERNEL);
	struct reserved reserved = {};
	struct making making;
	int ret;

	if (!group) {
		iommu_group_put(iommu_group);
		return ERR_PTR(-ENOMEM);
	}
	group->iommu_group = iommu_group;
	pcs_group_timer_init(group);
	ret = -ENOMEM;
	group->counts = alloc_percpu(struct pcs_iommu_counts);
	if (!group->counts)
		goto fail;
	ret = reserve_regions(group, dev, &reserved);
	if (!ret)
		ret = reserve_windows(group, dev, &reserved);
	if (!ret)
		ret = enter_domain(group, dev, by_name);
	/* The core's and the kernel's page sizes are equal. */
	if (!ret && (group->domain->pgsize_bitmap & -group->domain->pgsize_bitmap) != PAGE_SIZE)
		ret = -EOPNOTSUPP;
	if (ret)
		goto fail;
	making.group = group;
	making.config = (struct pc_domain_config){
		.group = group,
		.first = group->domain->geometry.aperture_start,
		.last = group->domain->geometry.aperture_end,
		.page_sizes = group->domain->pgsize_bitmap,
		.reserved = reserved.ranges,
		.reserved_count = reserved.count,
	};
	ret = pcs_call_slow(make_core, &making);
	if (ret)
		goto fail;
	kfree(reserved.ranges);
	mutex_lock(&groups_lock);
	list_add_tail(&group->node, &groups);
	mutex_unlock(&groups_lock);
	return group;
fail:
	kfree(reserved.ranges);
	free_group(group);
	return ERR_PTR(ret);
}

struct pcs_group *pcs_group_get(struct device *dev, bool by_name)
{
	struct iommu_group *iommu_group = iommu_group_get(dev);
	struct pcs_group *group;

	if (!iommu_group)
		return ERR_PTR(-EOPNOTSUPP);
	list_for_each_entry(group, &groups, node) {
		if (group->iommu_group == iommu_group) {
			iommu_group_put(iommu_group);
			group->devices++;
			return group;
		}
	}
	group = make_group(dev, iommu_group, by_name);
	if (!IS_ERR(group))
		group->devices = 1;
	return group;
}

bool pcs_group_is_known(struct device *dev)
{
	struct iommu_group *iommu_group = iommu_group_get(dev);
	struct pcs_group *group;
	bool known = false;

	list_for_each_entry(group, &groups, node)
		known |= group->iommu_group == iommu_group;
	iommu_group_put(iommu_group);
	return known;
}

/*
 * Whether Linux has replaced the group's domain, as after a write to its "type" while no driver is bound. The caller holds a driver's claim on
 * the group: it does not change from now on.
 */
bool pcs_group_is_lost(struct pcs_group *group, struct device *dev)
{
	if (!group->lost && iommu_get_domain_for_dev(dev) != group->domain)
		WRITE_ONCE(group->lost, true);
	return group->lost;
}

void pcs_group_put(struct pcs_group *group)
{
	if (--group->devices)
		return;
	mutex_lock(&groups_lock);
	list_del(&group->node);
	mutex_unlock(&groups_lock);
	free_group(group);
}

int pcs_groups_cpu_dead(unsigned int cpu)
{
	struct pcs_group *group;

	mutex_lock(&groups_lock);
	list_for_each_entry(group, &groups, node)
		pc_domain_cpu_released(group->core, cpu);
	mutex_unlock(&groups_lock);
	return 0;
}
