// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A driver of QEMU's device `edu` that calls what the DMA API has, and looks by the device whether it does what it promises. Written to
 * /dev/portcullis_api: "DEVICE GROUP WAY", a group of checks, and how the device is protected. Each check is a line of the log: "api: held:" or
 * "api: failed:" and what was checked; and the last one of a group is "api: end: " and 0, or the error that ended it.
 */
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "api.h"

static LIST_HEAD(devices);
/* Of the list, and of a group while it runs. */
static DEFINE_MUTEX(lock);

bool api_check(bool held, const char *words, ...)
{
	struct va_format format = { .fmt = words };
	va_list arguments;

	va_start(arguments, words);
	format.va = &arguments;
	pr_info("api: %s: %pV\n", held ? "held" : "failed", &format);
	va_end(arguments);
	return held;
}

void api_write(struct api *api, dma_addr_t to, u8 value, size_t len)
{
	/* A transfer takes a tenth of a second: the device may hold the value since the last one. */
	if (api->held != value) {
		memset(api->witness, value, PAGE_SIZE);
		edu_read(api->registers, api->witness_at, PAGE_SIZE);
		api->held = value;
	}
	edu_write(api->registers, to, len);
}

const u8 *api_read(struct api *api, dma_addr_t from, size_t len)
{
	api->held = 0;
	edu_read(api->registers, from, len);
	memset(api->witness, 0, len);
	edu_write(api->registers, api->witness_at, len);
	return api->witness;
}

struct api *api_other(struct api *api)
{
	return list_is_last(&api->node, &devices) ? list_first_entry(&devices, struct api, node) : list_next_entry(api, node);
}

static const struct {
	const char *name;
	int (*run)(struct api *api);
} groups[] = {
	{ "memory", api_memory }, { "streams", api_streams }, { "lists", api_lists }, { "waits", api_waits }, { "masks", api_masks },
	{ "sizes", api_sizes }, { "resource", api_resource }, { "peers", api_peers }, { "misuse", api_misuse },
};

static int run(const char *device, const char *group, const char *way)
{
	struct api *api;
	size_t at;

	list_for_each_entry(api, &devices, node) {
		if (strcmp(dev_name(api->dev), device))
			continue;
		for (at = 0; at < ARRAY_SIZE(groups); at++) {
			if (strcmp(groups[at].name, group))
				continue;
			api->way = way;
			return groups[at].run(api);
		}
		return -EINVAL;
	}
	return -ENODEV;
}

static ssize_t begin(struct file *file, const char __user *from, size_t count, loff_t *at)
{
	char words[96], *rest = words, *device, *group, *way;
	int ret;

	if (count >= sizeof(words) || copy_from_user(words, from, count))
		return -EINVAL;
	words[count] = '\0';
	rest = strim(words);
	device = strsep(&rest, " ");
	group = strsep(&rest, " ");
	way = strsep(&rest, " ");
	if (!way)
		return -EINVAL;
	mutex_lock(&lock);
	ret = run(device, group, way);
	mutex_unlock(&lock);
	pr_info("api: end: %d\n", ret);
	return ret ? ret : count;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .write = begin };
static struct miscdevice file = { .minor = MISC_DYNAMIC_MINOR, .name = "portcullis_api", .fops = &operations };

static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct api *api = devm_kzalloc(&pdev->dev, sizeof(*api), GFP_KERNEL);
	int ret = api ? edu_enable(pdev, &api->registers) : -ENOMEM;

	if (ret)
		return ret;
	/* The device takes an entry of any length. */
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	api->dev = &pdev->dev;
	api->witness = dmam_alloc_coherent(&pdev->dev, PAGE_SIZE, &api->witness_at, GFP_KERNEL);
	if (!api->witness)
		return -ENOMEM;
	pci_set_drvdata(pdev, api);
	mutex_lock(&lock);
	list_add_tail(&api->node, &devices);
	mutex_unlock(&lock);
	return 0;
}

static void away(struct pci_dev *pdev)
{
	struct api *api = pci_get_drvdata(pdev);

	mutex_lock(&lock);
	list_del(&api->node);
	mutex_unlock(&lock);
}

static const struct pci_device_id ids[] = { { EDU_ID }, { } };

static struct pci_driver driver = { .name = "portcullis_api", .id_table = ids, .probe = probe, .remove = away };

static int __init load(void)
{
	int ret = misc_register(&file);

	if (ret)
		return ret;
	ret = pci_register_driver(&driver);
	if (ret)
		misc_deregister(&file);
	return ret;
}
module_init(load);

static void __exit unload(void)
{
	pci_unregister_driver(&driver);
	misc_deregister(&file);
}
module_exit(unload);

MODULE_DESCRIPTION("Portcullis' tests: what the DMA API promises");
MODULE_LICENSE("Dual MIT/GPL");
