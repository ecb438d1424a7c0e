/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What the groups of checks share. */
#ifndef PORTCULLIS_TESTS_API_H
#define PORTCULLIS_TESTS_API_H

#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/string.h>

#include "../edu/edu.h"

/* What one transfer of a check has, and three values that differ. */
#define LENGTH		256
#define MINE		0xa5
#define SECRET		0x3c
#define KEPT		0x5a

/* A device, with memory by which its driver sees the bytes that the device read, and gives it bytes to write. */
struct api {
	struct list_head node;
	struct device *dev;
	void __iomem *registers;
	u8 *witness;
	dma_addr_t witness_at;
	/* What the device's own buffer holds, if that is one value. */
	u8 held;
	/* How the device is protected: a policy of the module's, or a mode of Linux's. */
	const char *way;
};

/* The next device of the driver's. */
struct api *api_other(struct api *api);

static inline bool api_way_is(const struct api *api, const char *way)
{
	return !strcmp(api->way, way);
}

static inline bool api_is_ours(const struct api *api)
{
	return strncmp(api->way, "linux", 5);
}

/* A line of the log: whether what the words say held. Returns that. */
__printf(2, 3) bool api_check(bool held, const char *words, ...);

/* The device writes a value to each of len bytes at an address. */
void api_write(struct api *api, dma_addr_t to, u8 value, size_t len);
/* What the device reads at an address: there until the next transfer. */
const u8 *api_read(struct api *api, dma_addr_t from, size_t len);

static inline bool api_all(const void *bytes, u8 value, size_t len)
{
	return !memchr_inv(bytes, value, len);
}

/* The groups. Each returns 0, or an error where it could not go on. */
int api_memory(struct api *api);
int api_streams(struct api *api);
int api_lists(struct api *api);
int api_waits(struct api *api);
int api_masks(struct api *api);
int api_sizes(struct api *api);
int api_resource(struct api *api);
int api_peers(struct api *api);
int api_misuse(struct api *api);

#endif
