// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Groups: the devices that the IOMMU cannot tell apart share one domain.
 *
 * A single device gets a domain of the module's own, in which nothing was ever mapped. Where there are several, Linux lets the second
 * driver bind only while the group is in the domain that Linux made for it: there the module maps in that one, whatever it is called,
 * if it translates at all. Linux's own addresses of it are not used meanwhile, as all devices of the group are taken together.
 */
#include <linux/slab.h>

#include "shim.h"

/* Ranges that a device's addresses may not be in. */
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
 * What firmware uses by itself (RMRR, for one) stays mapped, one to one, as in Linux's own domains; what interrupts and other hardware take
 * is never handed out.
 */
static int reserve_regions(struct pcs_group *group, struct device *dev, struct reserved *list)
{
	struct iommu_resv_region *region, *next;
	LIST_HEAD(regions);
	int ret = iommu_get_group_resv_regions(group->iommu_group, &regions);

	list_for_each_entry_safe(region, next, &regions, list) {
		u64 last = region->start + region->length - 1;

		if (!ret && region->type == IOMMU_RESV_SW_MSI) {
			dev_err(dev, "portcullis: interrupts as writes that the IOMMU translates are not supported\n");
			ret = -EOPNOTSUPP;
		}
		if (!ret && region->length)
			ret = reserve(list, region->start, last);
		if (!ret && region->length && group->own &&
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

/* A PCI bridge takes addresses in its windows for its own, and they never reach the IOMMU; and some take only certain ones upstream. */
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
	/* Sorted by the host bridge's driver: what is between them cannot be reached. */
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
};

/* A bridge has no memory accesses of its own to map. */
static int look_at(struct device *dev, void *data)
{
	struct look *look = data;

	if (dev_is_pci(dev) && pci_is_bridge(to_pci_dev(dev)))
		return 0;
	look->devices++;
	if (dev != look->first && pcs_has_driver(dev) && !pcs_find(dev))
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

/* Chooses the domain; it is entered later. */
static int choose_domain(struct pcs_group *group, struct device *dev)
{
	struct iommu_domain *linux_domain = iommu_get_domain_for_dev(dev), *own;
	struct look look = { .first = dev };

	if (!linux_domain)
		return -EOPNOTSUPP;
	iommu_group_for_each_dev(group->iommu_group, &look, look_at);
	if (look.other) {
		dev_err(dev, "portcullis: %s, which the IOMMU cannot tell from it, is in use by %s\n", dev_name(look.other),
			dev_driver_string(look.other));
		return -EBUSY;
	}
	group->shared = look.devices > 1;
	group->linux_mode = mode_of(linux_domain);
	if (group->shared && linux_domain->type & __IOMMU_DOMAIN_PAGING) {
		group->domain = linux_domain;
		return 0;
	}
	if (group->shared)
		dev_warn(dev, "portcullis: of the %u devices of its group one can be used, as Linux passes their addresses through. To use all, write DMA to /sys/kernel/iommu_groups/%d/type while no driver is bound\n",
			 look.devices, iommu_group_id(group->iommu_group));
	own = pcs_paging_domain(dev);
	if (IS_ERR(own))
		return PTR_ERR(own);
	group->domain = own;
	group->own = true;
	return 0;
}

static int enter_domain(struct pcs_group *group)
{
	int ret;

	if (!group->own) {
		/* Linux is in it already: what it has unmapped and not flushed goes. */
		iommu_flush_iotlb_all(group->domain);
		return 0;
	}
	ret = iommu_attach_group(group->domain, group->iommu_group);
	group->entered = !ret;
	return ret;
}

static void leave_domain(struct pcs_group *group)
{
	if (group->entered)
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
	/* Out first: then nothing reaches what the core takes down. */
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

static struct pcs_group *make_group(struct device *dev, struct iommu_group *iommu_group)
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
	ret = choose_domain(group, dev);
	if (!ret)
		ret = reserve_regions(group, dev, &reserved);
	if (!ret)
		ret = reserve_windows(group, dev, &reserved);
	if (!ret)
		ret = enter_domain(group);
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
	list_add_tail(&group->node, &pcs_groups);
	return group;
fail:
	kfree(reserved.ranges);
	free_group(group);
	return ERR_PTR(ret);
}

struct pcs_group *pcs_group_get(struct device *dev)
{
	struct iommu_group *iommu_group = iommu_group_get(dev);
	struct pcs_group *group;

	if (!iommu_group)
		return ERR_PTR(-EOPNOTSUPP);
	list_for_each_entry(group, &pcs_groups, node) {
		if (group->iommu_group == iommu_group) {
			iommu_group_put(iommu_group);
			group->devices++;
			return group;
		}
	}
	group = make_group(dev, iommu_group);
	if (!IS_ERR(group))
		group->devices = 1;
	return group;
}

bool pcs_group_is_known(struct device *dev)
{
	struct iommu_group *iommu_group = iommu_group_get(dev);
	struct pcs_group *group;
	bool known = false;

	list_for_each_entry(group, &pcs_groups, node)
		known |= group->iommu_group == iommu_group;
	iommu_group_put(iommu_group);
	return known;
}

void pcs_group_put(struct pcs_group *group)
{
	if (--group->devices)
		return;
	list_del(&group->node);
	free_group(group);
}
