// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * /sys/kernel/portcullis. A device's file is removed before its data is freed, and the removal waits for its readers: so no such file takes
 * pcs_lock, under which that happens.
 */
#include <linux/slab.h>

#include "shim.h"

static struct kobject *root;
static struct kset *devices;

/* Linux's own check before a group's type changes: the writer may let devices reach all memory. */
static bool may_change(void)
{
	return capable(CAP_SYS_ADMIN) && capable(CAP_SYS_RAWIO);
}

struct switching {
	struct pcs_device *pd;
	const struct pc_policy *policy;
};

static int set_policy(void *argument)
{
	struct switching *switching = argument;

	return pc_set_policy(switching->pd->core, switching->policy);
}

/* The caller holds policy_lock. */
static int switch_locked(struct pcs_device *pd, const struct pc_policy *policy)
{
	struct switching switching = { pd, policy };
	int ret = pcs_call_slow(set_policy, &switching);

	if (ret) {
		dev_err(pd->dev, "portcullis: the policy stays %s: %d\n", pcs_policy_name(pd->policy.kind), ret);
		return ret;
	}
	pd->policy = *policy;
	return 0;
}

int pcs_switch_policy(struct pcs_device *pd, const struct pc_policy *policy)
{
	int ret;

	mutex_lock(&pd->policy_lock);
	ret = switch_locked(pd, policy);
	mutex_unlock(&pd->policy_lock);
	return ret;
}

/* Files of a device. */
enum file_kind {
	FILE_POLICY, FILE_WINDOW, FILE_THRESHOLD,
	FILE_DRIVER, FILE_GROUP, FILE_MODE, FILE_MASK,
	FILE_COUNTS,		/* of struct pcs_counts, at an offset */
	FILE_IOMMU,		/* of struct pcs_iommu_counts */
	FILE_USAGE,		/* of struct pc_usage */
};

struct device_file {
	struct attribute attr;
	enum file_kind kind;
	unsigned int offset;
};

#define FILE_OF(name, mode, kind, offset) static struct device_file file_##name = { { #name, mode }, kind, offset }
#define COUNT(name, field) FILE_OF(name, 0444, FILE_COUNTS, offsetof(struct pcs_counts, field))
#define IOMMU(name, field) FILE_OF(name, 0444, FILE_IOMMU, offsetof(struct pcs_iommu_counts, field))
#define USAGE(name) FILE_OF(name, 0444, FILE_USAGE, offsetof(struct pc_usage, name))

FILE_OF(policy, 0644, FILE_POLICY, 0);
FILE_OF(window_us, 0644, FILE_WINDOW, 0);
FILE_OF(threshold, 0644, FILE_THRESHOLD, 0);
FILE_OF(driver, 0444, FILE_DRIVER, 0);
FILE_OF(group, 0444, FILE_GROUP, 0);
FILE_OF(linux_mode, 0444, FILE_MODE, 0);
FILE_OF(mask, 0444, FILE_MASK, 0);
COUNT(maps, maps);
COUNT(unmaps, unmaps);
COUNT(syncs, syncs);
COUNT(errors, errors);
COUNT(map_ns, map_ns);
COUNT(unmap_ns, unmap_ns);
IOMMU(iommu_maps, maps);
IOMMU(iommu_unmaps, unmaps);
IOMMU(waits, waits);
IOMMU(flushes, flushes);
USAGE(copied_bytes);
USAGE(copies);
USAGE(mapped);
USAGE(open_bytes);
USAGE(open_mappings);
USAGE(exposed_bytes);
USAGE(pool_bytes);
USAGE(book_bytes);
USAGE(lost_bytes);

static struct attribute *device_attrs[] = {
	&file_policy.attr, &file_window_us.attr, &file_threshold.attr, &file_driver.attr, &file_group.attr, &file_linux_mode.attr,
	&file_mask.attr, &file_maps.attr, &file_unmaps.attr, &file_syncs.attr, &file_errors.attr, &file_map_ns.attr,
	&file_unmap_ns.attr, &file_iommu_maps.attr, &file_iommu_unmaps.attr, &file_waits.attr, &file_flushes.attr,
	&file_copied_bytes.attr, &file_copies.attr, &file_mapped.attr, &file_open_bytes.attr, &file_open_mappings.attr,
	&file_exposed_bytes.attr, &file_pool_bytes.attr, &file_book_bytes.attr, &file_lost_bytes.attr, NULL,
};
ATTRIBUTE_GROUPS(device);

/* The sum over the CPUs, which count on meanwhile. */
static u64 sum(const void __percpu *counts, unsigned int offset)
{
	u64 total = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		total += READ_ONCE(*(const u64 *)((const char *)per_cpu_ptr(counts, cpu) + offset));
	return total;
}

static ssize_t device_show(struct kobject *kobj, struct attribute *attr, char *buf)
{
	struct pcs_device *pd = container_of(kobj, struct pcs_device, kobj);
	struct device_file *file = container_of(attr, struct device_file, attr);
	struct pc_usage usage;
	ssize_t ret;

	switch (file->kind) {
	case FILE_COUNTS:
		return sysfs_emit(buf, "%llu\n", sum(pd->counts, file->offset));
	case FILE_IOMMU:
		return sysfs_emit(buf, "%llu\n", sum(pd->group->counts, file->offset));
	case FILE_USAGE:
		pc_usage(pd->core, &usage);
		return sysfs_emit(buf, "%llu\n", *(const u64 *)((const char *)&usage + file->offset));
	case FILE_GROUP:
		return sysfs_emit(buf, "%d\n", iommu_group_id(pd->group->iommu_group));
	case FILE_MODE:
		return sysfs_emit(buf, "%s\n", pd->group->linux_mode);
	case FILE_MASK:
		return sysfs_emit(buf, "0x%llx\n", READ_ONCE(pd->mask));
	default:
		break;
	}
	mutex_lock(&pd->policy_lock);
	switch (file->kind) {
	case FILE_POLICY:
		ret = sysfs_emit(buf, "%s\n", pcs_policy_name(pd->policy.kind));
		break;
	case FILE_WINDOW:
		ret = sysfs_emit(buf, "%llu\n", pd->policy.window_ns / NSEC_PER_USEC);
		break;
	case FILE_THRESHOLD:
		ret = sysfs_emit(buf, "%llu\n", pd->policy.threshold);
		break;
	case FILE_DRIVER:
		ret = sysfs_emit(buf, "%s\n", pd->driver);
		break;
	default:
		ret = -EIO;
		break;
	}
	mutex_unlock(&pd->policy_lock);
	return ret;
}

static ssize_t device_store(struct kobject *kobj, struct attribute *attr, const char *buf, size_t count)
{
	struct pcs_device *pd = container_of(kobj, struct pcs_device, kobj);
	struct pc_policy policy;
	char value[24];
	int ret;

	if (count >= sizeof(value))
		return -EINVAL;
	if (!may_change())
		return -EPERM;
	memcpy(value, buf, count);
	value[count] = '\0';
	mutex_lock(&pd->policy_lock);
	policy = pd->policy;
	ret = pcs_set_word(attr->name, strim(value), &policy);
	if (!ret)
		ret = pcs_policy_for(pd->dev, &policy, true);
	if (!ret)
		ret = switch_locked(pd, &policy);
	mutex_unlock(&pd->policy_lock);
	return ret ? ret : count;
}

static const struct sysfs_ops device_sysfs_ops = { .show = device_show, .store = device_store };

static void device_free(struct kobject *kobj)
{
	pcs_free_device(container_of(kobj, struct pcs_device, kobj));
}

/* Not const: 6.1 takes a non-const pointer. */
static struct kobj_type device_type = {
	.release = device_free,
	.sysfs_ops = &device_sysfs_ops,
	.default_groups = device_groups,
};

void pcs_sysfs_init_device(struct pcs_device *pd)
{
	kobject_init(&pd->kobj, &device_type);
}

int pcs_sysfs_add(struct pcs_device *pd)
{
	int ret;

	pd->kobj.kset = devices;
	ret = kobject_add(&pd->kobj, NULL, "%s", dev_name(pd->dev));
	if (ret)
		return ret;
	ret = sysfs_create_link(&pd->kobj, &pd->dev->kobj, "device");
	if (ret)
		kobject_del(&pd->kobj);
	return ret;
}

void pcs_sysfs_remove(struct pcs_device *pd)
{
	sysfs_remove_link(&pd->kobj, "device");
	kobject_del(&pd->kobj);
}

/* Finds "pci/0000:00:04.0" or a bare address; the caller puts it. */
static struct device *find(const char *name)
{
	if (!strncmp(name, "pci/", 4))
		name += 4;
	return bus_find_device_by_name(&pci_bus_type, NULL, name);
}

/* The first word of a write; *rest is the rest. */
static char *first_word(const char *buf, char **copy, char **rest)
{
	*copy = kstrdup(buf, GFP_KERNEL);
	if (!*copy)
		return NULL;
	*rest = strim(*copy);
	return strsep(rest, " \t\n");
}

static int protect(struct device *dev, struct pc_policy *policy)
{
	struct pcs_device *pd = pcs_find(dev);
	int ret;

	ret = pcs_policy_for(dev, policy, true);
	if (ret)
		return ret;
	if (pd) {
		ret = pcs_switch_policy(pd, policy);
		if (!ret)
			pd->pinned = true;
		return ret;
	}
	if (dev->driver) {
		dev_err(dev, "portcullis: not protected: its driver is bound: unbind it, and bind it again afterwards\n");
		return -EBUSY;
	}
	return pcs_take(dev, policy, true);
}

static ssize_t protect_store(struct kobject *kobj, struct kobj_attribute *attr, const char *buf, size_t count)
{
	struct pc_policy policy = pcs_default_policy;
	struct device *dev = NULL;
	char *copy, *rest, *name;
	int ret = -ENOMEM;

	if (!may_change())
		return -EPERM;
	name = first_word(buf, &copy, &rest);
	if (!name)
		return ret;
	ret = pcs_parse_policy(rest, &policy);
	if (ret) {
		pr_err("%s: not protected: \"policy=strict|lazy|bounce|auto window_us=N threshold=BYTES\" was expected\n", name);
		goto out;
	}
	dev = find(name);
	if (!dev) {
		pr_err("%s: not protected: there is no such device on the PCI bus\n", name);
		ret = -ENODEV;
		goto out;
	}
	device_lock(dev);
	mutex_lock(&pcs_lock);
	ret = protect(dev, &policy);
	mutex_unlock(&pcs_lock);
	device_unlock(dev);
	put_device(dev);
out:
	kfree(copy);
	return ret ? ret : count;
}

static ssize_t unprotect_store(struct kobject *kobj, struct kobj_attribute *attr, const char *buf, size_t count)
{
	struct pcs_device *pd;
	struct device *dev;
	char *copy, *rest, *name;
	int ret = -ENODEV;

	if (!may_change())
		return -EPERM;
	name = first_word(buf, &copy, &rest);
	if (!name)
		return -ENOMEM;
	dev = find(name);
	if (!dev) {
		pr_err("%s: there is no such device on the PCI bus\n", name);
		goto out;
	}
	device_lock(dev);
	mutex_lock(&pcs_lock);
	pd = pcs_find(dev);
	ret = pd ? pcs_give_back(pd) : -ENODEV;
	mutex_unlock(&pcs_lock);
	device_unlock(dev);
	if (ret == -EBUSY)
		dev_err(dev, "portcullis: stays protected: a driver is bound to it, or to a device of its group\n");
	else if (ret)
		dev_err(dev, "portcullis: it is not protected\n");
	put_device(dev);
out:
	kfree(copy);
	return ret ? ret : count;
}

static ssize_t version_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", THIS_MODULE->version);
}

static ssize_t rules_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return pcs_rules_show(buf);
}

static struct kobj_attribute protect_attr = __ATTR_WO(protect);
static struct kobj_attribute unprotect_attr = __ATTR_WO(unprotect);
static struct kobj_attribute version_attr = __ATTR_RO(version);
static struct kobj_attribute rules_attr = __ATTR_RO(rules);

static const struct attribute *root_attrs[] = { &protect_attr.attr, &unprotect_attr.attr, &version_attr.attr, &rules_attr.attr, NULL };

int pcs_sysfs_init(void)
{
	root = kobject_create_and_add("portcullis", kernel_kobj);
	if (!root)
		return -ENOMEM;
	devices = kset_create_and_add("devices", NULL, root);
	if (!devices) {
		kobject_put(root);
		return -ENOMEM;
	}
	return 0;
}

int pcs_sysfs_open(void)
{
	return sysfs_create_files(root, root_attrs);
}

void pcs_sysfs_close(void)
{
	sysfs_remove_files(root, root_attrs);
}

void pcs_sysfs_exit(void)
{
	kset_unregister(devices);
	kobject_put(root);
}
