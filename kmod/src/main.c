// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Portcullis in Linux: DMA protection for existing drivers. The module takes a device before its driver's probe, and gives it DMA operations and
 * a domain of its own; the core (rust/) decides about addresses, copies and waits.
 */
#include <linux/cc_platform.h>
#include <linux/cpuhotplug.h>

#include "shim.h"

struct workqueue_struct *pcs_slow_queue;
struct workqueue_struct *pcs_timer_queue;
static int cpu_state;

static int on_bus(struct notifier_block *nb, unsigned long action, void *data)
{
	struct device *dev = data;
	struct pcs_arrival arrival;

	if (action == BUS_NOTIFY_BIND_DRIVER)
		pcs_arrives(&arrival, dev);
	mutex_lock(&pcs_lock);
	switch (action) {
	case BUS_NOTIFY_BIND_DRIVER:
		pcs_binds(dev);
		pcs_arrived(&arrival);
		break;
	case BUS_NOTIFY_UNBOUND_DRIVER:
		pcs_unbound(dev, false);
		break;
	case BUS_NOTIFY_DRIVER_NOT_BOUND:
		pcs_unbound(dev, true);
		break;
	case BUS_NOTIFY_DEL_DEVICE:
		pcs_goes(dev, false);
		break;
	case BUS_NOTIFY_REMOVED_DEVICE:
		pcs_goes(dev, true);
		break;
	}
	mutex_unlock(&pcs_lock);
	return 0;
}

/* Before Linux's own, which takes a removed device out of its group. */
static struct notifier_block bus_notifier = { .notifier_call = on_bus, .priority = 10 };

static int __init portcullis_init(void)
{
	int ret;

	if (IS_ENABLED(CONFIG_PREEMPT_RT)) {
		pr_err("kernels with PREEMPT_RT are not supported: there a map in an interrupt or below a raw spinlock could not take memory\n");
		return -EOPNOTSUPP;
	}
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT)) {
		pr_err("confidential guests are not supported: their devices reach shared memory alone\n");
		return -EOPNOTSUPP;
	}
	pc_init(PAGE_OFFSET);
	ret = pcs_rules_init();
	if (ret)
		return ret;
	ret = -ENOMEM;
	/* One item at a time: see slow_task. Both may run in memory reclaim. */
	pcs_slow_queue = alloc_ordered_workqueue("portcullis_slow", WQ_MEM_RECLAIM);
	pcs_timer_queue = alloc_workqueue("portcullis", WQ_UNBOUND | WQ_HIGHPRI | WQ_MEM_RECLAIM, 0);
	if (!pcs_slow_queue || !pcs_timer_queue)
		goto fail_queues;
	ret = pcs_sysfs_init();
	if (ret)
		goto fail_queues;
	cpu_state = cpuhp_setup_state_nocalls(CPUHP_BP_PREPARE_DYN, "portcullis:dead", NULL, pcs_groups_cpu_dead);
	if (cpu_state < 0) {
		ret = cpu_state;
		goto fail_sysfs;
	}
	ret = bus_register_notifier(&pci_bus_type, &bus_notifier);
	if (ret)
		goto fail_cpus;
	/* Last: from now on protection by hand is tracked. (A driver may be bound to a device of ours already, so this may not fail.) */
	if (pcs_sysfs_open())
		pr_err("no memory for the files below /sys/kernel/portcullis\n");
	return 0;
fail_cpus:
	cpuhp_remove_state_nocalls(cpu_state);
fail_sysfs:
	pcs_sysfs_exit();
fail_queues:
	if (pcs_timer_queue)
		destroy_workqueue(pcs_timer_queue);
	if (pcs_slow_queue)
		destroy_workqueue(pcs_slow_queue);
	pcs_rules_exit();
	return ret;
}

static void __exit portcullis_exit(void)
{
	pcs_sysfs_close();
	/* While the notifier is registered: a driver that binds meanwhile gets its device as Linux's. */
	pcs_give_all_back();
	bus_unregister_notifier(&pci_bus_type, &bus_notifier);
	cpuhp_remove_state_nocalls(cpu_state);
	/* Checks of failed probes, and deferred frees. (While a device lingers, the module has a reference.) */
	drain_workqueue(pcs_timer_queue);
	pcs_services_exit();
	destroy_workqueue(pcs_timer_queue);
	destroy_workqueue(pcs_slow_queue);
	pcs_sysfs_exit();
	pcs_rules_exit();
}

module_init(portcullis_init);
module_exit(portcullis_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(PORTCULLIS_VERSION);
MODULE_DESCRIPTION("DMA protection for unmodified drivers, by Portcullis");
