// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Maps and unmaps for QEMU's `pci-testdev`, which does nothing, and says what that costs. A line written to the parameter `run` says what to do:
 *
 *	THREADS PAGES LOOPS [sg] [skip] [split] [depth=N] [to]
 *
 * Each thread has a CPU of its own, maps PAGES pages (one piece, or with `sg` a list of single ones of which none touch), and unmaps them, LOOPS times. `skip` leaves the data alone
 * (DMA_ATTR_SKIP_CPU_SYNC), so that no copy is measured. `split` reads the clock around each call, as Linux's dma_map_benchmark does; without it the
 * clock is read twice in all. `depth=N` keeps N mappings; `to` maps for reading by the device, `both` for both, else it writes. The parameter `result` then has
 * nanoseconds for one mapping, on average; with `split` the least that one map and one unmap took; and how long it all took, shared out among
 * the mappings of all threads: "map M unmap U pair P least L each E".
 *
 * The parameter `hooks` has a line for each PCI device: where its maps go, and whether Linux's own code for IOMMUs has it.
 */
#include <linux/completion.h>
#include <linux/dma-mapping.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/version.h>

#define MOST_THREADS	16
#define MOST_DEPTH	256

struct bench {
	struct device *dev;
	unsigned int pages, loops, depth;
	bool list, split;
	unsigned long attrs;
	enum dma_data_direction direction;
};

/* One of the mappings that a thread has at a time. */
struct slot {
	struct sg_table table;
	struct page *page;
	dma_addr_t address;
};

struct worker {
	const struct bench *bench;
	struct completion ready, go, done;
	struct slot *slots;
	u64 map, unmap, pair, least_map, least_unmap;
	ktime_t start, end;
	int error;
};

static DEFINE_MUTEX(lock);
static struct device *device;
static char result[128] = "none\n";

static int slot_map(const struct bench *b, struct slot *s)
{
	if (b->list)
		return dma_map_sgtable(b->dev, &s->table, b->direction, b->attrs);
	s->address = dma_map_page_attrs(b->dev, s->page, 0, b->pages * PAGE_SIZE, b->direction, b->attrs);
	return dma_mapping_error(b->dev, s->address);
}

static void slot_unmap(const struct bench *b, struct slot *s)
{
	if (b->list)
		dma_unmap_sgtable(b->dev, &s->table, b->direction, b->attrs);
	else
		dma_unmap_page_attrs(b->dev, s->address, b->pages * PAGE_SIZE, b->direction, b->attrs);
}

static void slot_free(const struct bench *b, struct slot *s)
{
	struct scatterlist *entry;
	unsigned int at;

	if (s->page)
		__free_pages(s->page, get_order(b->pages * PAGE_SIZE));
	if (s->table.sgl) {
		for_each_sgtable_sg(&s->table, entry, at)
			if (sg_page(entry))
				__free_pages(sg_page(entry), 1);
		sg_free_table(&s->table);
	}
}

static int slot_alloc(const struct bench *b, struct slot *s)
{
	struct scatterlist *entry;
	unsigned int at;

	if (!b->list) {
		s->page = alloc_pages(GFP_KERNEL | __GFP_ZERO, get_order(b->pages * PAGE_SIZE));
		return s->page ? 0 : -ENOMEM;
	}
	if (sg_alloc_table(&s->table, b->pages, GFP_KERNEL))
		return -ENOMEM;
	/* Of two pages each, and the second is not used: so no two entries touch, in any run. What touches, Linux maps in one piece. */
	for_each_sgtable_sg(&s->table, entry, at) {
		struct page *page = alloc_pages(GFP_KERNEL | __GFP_ZERO, 1);

		if (!page)
			return -ENOMEM;
		sg_set_page(entry, page, PAGE_SIZE, 0);
	}
	return 0;
}

static void loop_unmap(struct worker *w, struct slot *s)
{
	ktime_t before = w->bench->split ? ktime_get() : 0;
	u64 took;

	slot_unmap(w->bench, s);
	if (!w->bench->split)
		return;
	took = ktime_to_ns(ktime_sub(ktime_get(), before));
	w->unmap += took;
	w->least_unmap = min(w->least_unmap, took);
}

static int loop_map(struct worker *w, struct slot *s)
{
	ktime_t before = w->bench->split ? ktime_get() : 0;
	int error = slot_map(w->bench, s);
	u64 took;

	if (!w->bench->split)
		return error;
	took = ktime_to_ns(ktime_sub(ktime_get(), before));
	w->map += took;
	w->least_map = min(w->least_map, took);
	return error;
}

static int loop(struct worker *w)
{
	const struct bench *b = w->bench;
	unsigned int at, live = 0;
	int error = 0;

	w->least_map = U64_MAX;
	w->least_unmap = U64_MAX;
	w->start = ktime_get();
	for (at = 0; at < b->loops && !error; at++) {
		struct slot *s = &w->slots[at % b->depth];

		if (live == b->depth) {
			loop_unmap(w, s);
			live--;
		}
		error = loop_map(w, s);
		live += !error;
		if (!(at & 1023))
			cond_resched();
	}
	/* `at` maps were tried, and the last `live` that succeeded are left. */
	if (error)
		at--;
	for (; live; live--)
		loop_unmap(w, &w->slots[(at - live) % b->depth]);
	w->end = ktime_get();
	w->pair = ktime_to_ns(ktime_sub(w->end, w->start));
	return error;
}

static int work(void *data)
{
	struct worker *w = data;
	unsigned int at;

	w->slots = kcalloc(w->bench->depth, sizeof(*w->slots), GFP_KERNEL);
	w->error = w->slots ? 0 : -ENOMEM;
	for (at = 0; at < w->bench->depth && !w->error; at++)
		w->error = slot_alloc(w->bench, &w->slots[at]);
	complete(&w->ready);
	wait_for_completion(&w->go);
	if (!w->error)
		w->error = loop(w);
	for (at = 0; w->slots && at < w->bench->depth; at++)
		slot_free(w->bench, &w->slots[at]);
	kfree(w->slots);
	complete(&w->done);
	return 0;
}

static int bench_run(const struct bench *b, unsigned int threads)
{
	struct worker *workers = kcalloc(threads, sizeof(*workers), GFP_KERNEL);
	u64 map = 0, unmap = 0, pair = 0, least = U64_MAX;
	unsigned int at, started = 0;
	u64 count = (u64)b->loops * threads;
	ktime_t start = KTIME_MAX, end = 0;
	int error = 0;

	if (!workers)
		return -ENOMEM;
	for (at = 0; at < threads; at++) {
		struct task_struct *task;

		workers[at].bench = b;
		init_completion(&workers[at].ready);
		init_completion(&workers[at].go);
		init_completion(&workers[at].done);
		task = kthread_create(work, &workers[at], "bench/%u", at);
		if (IS_ERR(task)) {
			error = PTR_ERR(task);
			break;
		}
		kthread_bind(task, at % num_online_cpus());
		wake_up_process(task);
		started++;
	}
	for (at = 0; at < started; at++)
		wait_for_completion(&workers[at].ready);
	for (at = 0; at < started; at++)
		complete(&workers[at].go);
	for (at = 0; at < started; at++) {
		wait_for_completion(&workers[at].done);
		error = error ? error : workers[at].error;
		map += workers[at].map;
		unmap += workers[at].unmap;
		pair += workers[at].pair;
		least = min(least, workers[at].least_map + workers[at].least_unmap);
		start = min(start, workers[at].start);
		end = max(end, workers[at].end);
	}
	kfree(workers);
	snprintf(result, sizeof(result), "map %llu unmap %llu pair %llu least %llu each %llu\n", div64_u64(map, count),
		 div64_u64(unmap, count), div64_u64(pair, count), b->split ? least : 0,
		 div64_u64(ktime_to_ns(ktime_sub(end, start)), count));
	return error;
}

static int run_set(const char *words, const struct kernel_param *param)
{
	struct bench b = { .depth = 1, .direction = DMA_FROM_DEVICE };
	unsigned int threads;
	const char *depth = strstr(words, "depth=");
	int error;

	if (sscanf(words, "%u %u %u", &threads, &b.pages, &b.loops) != 3)
		return -EINVAL;
	if (depth && sscanf(depth, "depth=%u", &b.depth) != 1)
		return -EINVAL;
	if (!threads || threads > MOST_THREADS || !b.pages || b.pages > 256 || !b.loops || !b.depth ||
	    b.depth > MOST_DEPTH || b.depth > b.loops)
		return -EINVAL;
	b.list = strstr(words, "sg");
	b.split = strstr(words, "split");
	b.attrs = strstr(words, "skip") ? DMA_ATTR_SKIP_CPU_SYNC : 0;
	if (strstr(words, " to"))
		b.direction = DMA_TO_DEVICE;
	if (strstr(words, " both"))
		b.direction = DMA_BIDIRECTIONAL;
	mutex_lock(&lock);
	snprintf(result, sizeof(result), "none\n");
	b.dev = device;
	error = device ? bench_run(&b, threads) : -ENODEV;
	mutex_unlock(&lock);
	return error;
}

static int result_get(char *buffer, const struct kernel_param *param)
{
	int length;

	mutex_lock(&lock);
	length = scnprintf(buffer, PAGE_SIZE, "%s", result);
	mutex_unlock(&lock);
	return length;
}

static int hooks_get(char *buffer, const struct kernel_param *param)
{
	struct pci_dev *pdev = NULL;
	int length = 0;

	for_each_pci_dev(pdev) {
		struct device *dev = &pdev->dev;
		/* As the module has it in its compat.h: a flag since 6.12, one with an accessor since 7.1. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 1, 0)
		bool iommu = dev_dma_iommu(dev);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
		bool iommu = dev->dma_iommu;
#else
		bool iommu = false;
#endif

		length += scnprintf(buffer + length, PAGE_SIZE - length, "%s %px %d\n", dev_name(dev), dev->dma_ops, iommu);
	}
	return length;
}

static const struct kernel_param_ops run_ops = { .set = run_set };
module_param_cb(run, &run_ops, NULL, 0200);
static const struct kernel_param_ops result_ops = { .get = result_get };
module_param_cb(result, &result_ops, NULL, 0400);
static const struct kernel_param_ops hooks_ops = { .get = hooks_get };
module_param_cb(hooks, &hooks_ops, NULL, 0400);

static int bench_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int error = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));

	if (error)
		return error;
	mutex_lock(&lock);
	error = device ? -EBUSY : 0;
	if (!device)
		device = &pdev->dev;
	mutex_unlock(&lock);
	return error;
}

static void bench_remove(struct pci_dev *pdev)
{
	mutex_lock(&lock);
	device = NULL;
	mutex_unlock(&lock);
}

static const struct pci_device_id bench_ids[] = { { PCI_DEVICE(0x1b36, 0x0005) }, { } };

static struct pci_driver bench_driver = {
	.name = "portcullis_bench",
	.id_table = bench_ids,
	.probe = bench_probe,
	.remove = bench_remove,
};
module_pci_driver(bench_driver);
MODULE_DESCRIPTION("What maps and unmaps for DMA cost");
MODULE_LICENSE("Dual MIT/GPL");
