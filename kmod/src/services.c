// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The kernel's services for the core: heap, frames, CPUs, clock, timers. */
#include <linux/llist.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/vmalloc.h>

#include "shim.h"

/* Testing: one in this number of the core's allocations fails. Debug kernels have failslab; this works in any. */
static uint fail_heap;
module_param(fail_heap, uint, 0644);
MODULE_PARM_DESC(fail_heap, "testing: every n-th allocation of a map or an unmap fails; 0: none fails");
static uint fail_frames;
module_param(fail_frames, uint, 0644);
MODULE_PARM_DESC(fail_frames, "testing: the same for pages");
static atomic_t heap_calls, frame_calls;

/*
 * The task that runs the slow queue, which takes one item at a time. The core's allocations there may wait for memory; elsewhere a caller may be
 * in an interrupt or hold a spinlock. Interrupts of the task are recognised.
 */
struct task_struct *pcs_slow_task;

static bool fails(uint every, atomic_t *calls)
{
	return unlikely(every) && !pcs_is_slow() && atomic_inc_return(calls) % every == 0;
}

void *pcs_alloc(size_t bytes)
{
	gfp_t gfp = pcs_gfp();

	if (fails(READ_ONCE(fail_heap), &heap_calls))
		return NULL;
	/* In pages, if it is large and may sleep: the core allocates address lists once, and does not give them to devices. */
	if (bytes > KMALLOC_MAX_CACHE_SIZE && gfpflags_allow_blocking(gfp)) {
		/* Before 6.12 kvmalloc rejects GFP_NOIO: the scope has the same effect. */
		unsigned int scope = memalloc_noio_save();
		void *block = kvmalloc(bytes, GFP_KERNEL | __GFP_NOWARN);

		memalloc_noio_restore(scope);
		return block;
	}
	return kmalloc(bytes, gfp);
}

/* vmalloc's memory may only be freed where one may sleep. */
static LLIST_HEAD(freed_later);

static void free_later(struct work_struct *work)
{
	struct llist_node *block, *next;

	llist_for_each_safe(block, next, llist_del_all(&freed_later))
		vfree(block);
}
static DECLARE_WORK(free_work, free_later);

void pcs_free(void *block)
{
	if (is_vmalloc_addr(block)) {
		if (llist_add(block, &freed_later))
			queue_work(pcs_timer_queue, &free_work);
	} else {
		kfree(block);
	}
}

u64 pcs_frames_alloc(u32 order)
{
	struct page *page;

	if (fails(READ_ONCE(fail_frames), &frame_calls))
		return 0;
	page = alloc_pages(pcs_gfp() | __GFP_ZERO | (order ? __GFP_NORETRY : 0), order);
	return page ? page_to_phys(page) : 0;
}

void pcs_frames_free(u64 phys, u32 order)
{
	__free_pages(pfn_to_page(PHYS_PFN(phys)), order);
}

struct pc_entered pcs_enter(void)
{
	struct pc_entered entered;

	local_irq_save(entered.flags);
	entered.cpu = smp_processor_id();
	return entered;
}

void pcs_leave(unsigned long flags)
{
	local_irq_restore(flags);
}

u32 pcs_cpus(void)
{
	return nr_cpu_ids;
}

/* May be called while the clock is being set or suspended. It may then step back by some ns: windows are much longer. */
u64 pcs_now(void)
{
	return ktime_get_mono_fast_ns();
}

void pcs_say(const char *text, size_t len)
{
	pr_emerg("%.*s\n", (int)len, text);
}

/* Timers: one for each group, by the clock of pcs_now, because a tick may be as long as a window. */
static enum hrtimer_restart timer_rings(struct hrtimer *timer)
{
	struct pcs_group *group = container_of(timer, struct pcs_group, timer);

	queue_work(pcs_timer_queue, &group->timer_work);
	return HRTIMER_NORESTART;
}

static void timer_works(struct work_struct *work)
{
	struct pcs_group *group = container_of(work, struct pcs_group, timer_work);
	unsigned long flags;

	/* Before the core looks: later requests arm it anew. */
	raw_spin_lock_irqsave(&group->timer_lock, flags);
	group->timer_ns = U64_MAX;
	raw_spin_unlock_irqrestore(&group->timer_lock, flags);
	/* It is still being made: retry a moment later. */
	if (READ_ONCE(group->core))
		pc_domain_timer(group->core);
	else
		pcs_arm(group, pcs_now() + NSEC_PER_MSEC);
}

void pcs_arm(void *of, u64 deadline_ns)
{
	struct pcs_group *group = of;
	unsigned long flags;

	raw_spin_lock_irqsave(&group->timer_lock, flags);
	if (!group->timer_stopped && deadline_ns < group->timer_ns) {
		group->timer_ns = deadline_ns;
		hrtimer_start(&group->timer, ns_to_ktime(min_t(u64, deadline_ns, KTIME_MAX)), HRTIMER_MODE_ABS);
	}
	raw_spin_unlock_irqrestore(&group->timer_lock, flags);
}

void pcs_group_timer_init(struct pcs_group *group)
{
	raw_spin_lock_init(&group->timer_lock);
	group->timer_ns = U64_MAX;
	INIT_WORK(&group->timer_work, timer_works);
	pcs_timer_setup(&group->timer, timer_rings);
}

void pcs_group_timer_stop(struct pcs_group *group)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&group->timer_lock, flags);
	group->timer_stopped = true;
	raw_spin_unlock_irqrestore(&group->timer_lock, flags);
	/* Nothing arms it any more; its queued work ends here. */
	hrtimer_cancel(&group->timer);
	cancel_work_sync(&group->timer_work);
}

struct slow_call {
	struct work_struct work;
	int (*function)(void *argument);
	void *argument;
	int result;
};

static void slow_work(struct work_struct *work)
{
	struct slow_call *call = container_of(work, struct slow_call, work);

	WRITE_ONCE(pcs_slow_task, current);
	call->result = call->function(call->argument);
	WRITE_ONCE(pcs_slow_task, NULL);
}

int pcs_call_slow(int (*function)(void *), void *argument)
{
	struct slow_call call = { .function = function, .argument = argument };

	INIT_WORK_ONSTACK(&call.work, slow_work);
	queue_work(pcs_slow_queue, &call.work);
	flush_work(&call.work);
	destroy_work_on_stack(&call.work);
	return call.result;
}

void pcs_services_exit(void)
{
	flush_work(&free_work);
	free_later(NULL);
}
