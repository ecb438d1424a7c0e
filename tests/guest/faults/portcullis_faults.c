// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Makes Linux's IOMMU functions fail for calls from one module, whose code is from the parameter `first` to `last`:
 *
 * - of so many calls of iommu_map and iommu_map_sg, `maps`, one says that it failed after it has mapped all;
 * - the next `kept` calls of iommu_unmap_fast do nothing: only those count that begin where the last such map did, and are to undo it.
 *
 * The parameter `failed` says how many maps did, `stayed` how many calls of iommu_unmap_fast did nothing.
 */
#include <linux/atomic.h>
#include <linux/errno.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/spinlock.h>

static unsigned long first, last;
module_param(first, ulong, 0644);
module_param(last, ulong, 0644);
static unsigned int maps, kept, failed, stayed;
module_param(maps, uint, 0644);
module_param(kept, uint, 0644);
module_param(failed, uint, 0644);
module_param(stayed, uint, 0644);

static atomic_t calls;

/* Where a map begins. */
struct place {
	unsigned long domain, iova;
};
/* The last map that failed, while nothing was mapped there since. */
static struct place undone;
static DEFINE_RAW_SPINLOCK(lock);

/* Whether a call is for the place where the last map failed. Then it is forgotten. */
static bool is_there(struct place at)
{
	unsigned long flags;
	bool is;

	raw_spin_lock_irqsave(&lock, flags);
	is = undone.domain == at.domain && undone.iova == at.iova;
	if (is)
		undone = (struct place){};
	raw_spin_unlock_irqrestore(&lock, flags);
	return is;
}

/* Whether the function is called from the module: at its first instruction the top of the stack is where it returns to. */
static bool is_theirs(const struct pt_regs *regs)
{
	unsigned long from = *(unsigned long *)regs->sp;

	return from >= first && from < last;
}

/* A map is called: is it one of those to look at? */
static int map_called(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct place *at = (struct place *)instance->data;

	if (!is_theirs(regs))
		return 1;
	*at = (struct place){ regs_get_kernel_argument(regs, 0), regs_get_kernel_argument(regs, 1) };
	is_there(*at);
	return 0;
}

/* It has mapped `returned` bytes, or all of one piece where that is 0. */
static int map_returns(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	unsigned int every = READ_ONCE(maps);
	unsigned long flags;

	/* Of iommu_map, an int: above it is whatever was there. */
	if ((int)regs_return_value(regs) < 0 || !every || atomic_inc_return(&calls) % every)
		return 0;
	raw_spin_lock_irqsave(&lock, flags);
	failed++;
	undone = *(struct place *)instance->data;
	raw_spin_unlock_irqrestore(&lock, flags);
	regs_set_return_value(regs, -ENOMEM);
	return 0;
}

/* What iommu_unmap_fast is replaced by. */
static size_t nothing(void)
{
	return 0;
}

static int unmap_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (!READ_ONCE(kept) || !is_theirs(regs) ||
	    !is_there((struct place){ regs_get_kernel_argument(regs, 0), regs_get_kernel_argument(regs, 1) }))
		return 0;
	kept--;
	stayed++;
	instruction_pointer_set(regs, (unsigned long)nothing);
	return 1;
}

/* That there is one keeps kprobes from an optimisation in which a function cannot be replaced. */
static void unmap_ends(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

static struct kretprobe of_map = {
	.entry_handler = map_called, .handler = map_returns, .data_size = sizeof(struct place), .maxactive = 64,
	.kp.symbol_name = "iommu_map",
};
static struct kretprobe of_map_atomic = {
	.entry_handler = map_called, .handler = map_returns, .data_size = sizeof(struct place), .maxactive = 64,
	.kp.symbol_name = "iommu_map_atomic",
};
static struct kretprobe of_map_sg = {
	.entry_handler = map_called, .handler = map_returns, .data_size = sizeof(struct place), .maxactive = 64,
	.kp.symbol_name = "iommu_map_sg",
};
static struct kprobe of_unmap = {
	.symbol_name = "iommu_unmap_fast",
	.pre_handler = unmap_called,
	.post_handler = unmap_ends,
};
static bool has_atomic;

static int __init begin(void)
{
	int ret = register_kprobe(&of_unmap);

	if (ret)
		return ret;
	ret = register_kretprobe(&of_map);
	if (ret)
		goto no_map;
	ret = register_kretprobe(&of_map_sg);
	if (ret)
		goto no_map_sg;
	/* Linux 6.1 has it beside iommu_map. */
	has_atomic = !register_kretprobe(&of_map_atomic);
	return 0;
no_map_sg:
	unregister_kretprobe(&of_map);
no_map:
	unregister_kprobe(&of_unmap);
	return ret;
}
module_init(begin);

static void __exit end(void)
{
	if (has_atomic)
		unregister_kretprobe(&of_map_atomic);
	unregister_kretprobe(&of_map_sg);
	unregister_kretprobe(&of_map);
	unregister_kprobe(&of_unmap);
}
module_exit(end);

MODULE_DESCRIPTION("Portcullis' tests: maps that fail, and cannot be undone");
MODULE_LICENSE("Dual MIT/GPL");
