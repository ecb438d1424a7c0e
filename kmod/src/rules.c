// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The module's parameters: which devices, and how they are protected. */
#include <linux/slab.h>

#include "shim.h"

static char *devices = "";
module_param(devices, charp, 0444);
MODULE_PARM_DESC(devices, "devices to protect when a driver is bound, separated by commas: 0000:00:04.0, class:0108 (or class:010802), driver:nvme, untrusted, all");
static char *policy = "bounce";
module_param(policy, charp, 0444);
MODULE_PARM_DESC(policy, "strict, lazy, bounce (default) or auto");
static ulong window_us = 10000;
module_param(window_us, ulong, 0444);
MODULE_PARM_DESC(window_us, "lazy: how long what is unmapped may stay open, in us (default 10000)");
static ulong threshold = 128 << 10;
module_param(threshold, ulong, 0444);
MODULE_PARM_DESC(threshold, "bounce and auto: bytes up to which a mapping may be copied (default 131072)");

bool pcs_fail_open;
module_param_named(fail_open, pcs_fail_open, bool, 0444);
MODULE_PARM_DESC(fail_open, "a device that devices= names and that cannot be protected is left to Linux; else nothing is mapped for it");
bool pcs_allow_ats;
module_param_named(allow_ats, pcs_allow_ats, bool, 0444);
MODULE_PARM_DESC(allow_ats, "protect devices that cache translations (ATS), too: they are trusted not to go round the IOMMU");

struct pc_policy pcs_default_policy;

enum rule_kind { RULE_NAME, RULE_CLASS, RULE_DRIVER, RULE_UNTRUSTED, RULE_ALL };

struct rule {
	enum rule_kind kind;
	const char *word;
	u32 class;
	u32 class_mask;
};

/* The parameter's words, split. */
static char *words;
static struct rule *rules;
static unsigned int rule_count;

static const char *const policy_names[] = { [PC_STRICT] = "strict", [PC_LAZY] = "lazy", [PC_BOUNCE] = "bounce", [PC_AUTO] = "auto" };

const char *pcs_policy_name(u32 kind)
{
	return kind < ARRAY_SIZE(policy_names) ? policy_names[kind] : "?";
}

/* More than an hour is a mistake. A copy is at least a page, and no larger than the core's limit (LARGEST_SLOT in rust/src/device.rs). */
#define MOST_US		(3600ul * 1000000)
#define MOST_THRESHOLD	(2ul << 20)

int pcs_set_word(const char *name, const char *value, struct pc_policy *to)
{
	unsigned long number;
	int kind;

	if (!strcmp(name, "policy")) {
		kind = match_string(policy_names, ARRAY_SIZE(policy_names), value);
		if (kind < 0)
			return -EINVAL;
		to->kind = kind;
		return 0;
	}
	if (kstrtoul(value, 0, &number))
		return -EINVAL;
	if (!strcmp(name, "window_us") && number && number <= MOST_US)
		to->window_ns = number * NSEC_PER_USEC;
	else if (!strcmp(name, "threshold") && number >= PAGE_SIZE && number <= MOST_THRESHOLD)
		to->threshold = number;
	else
		return -EINVAL;
	return 0;
}

int pcs_parse_policy(char *rest, struct pc_policy *to)
{
	char *word;

	while ((word = strsep(&rest, " \t\n"))) {
		char *value = strchr(word, '=');

		if (!*word)
			continue;
		if (!value)
			return -EINVAL;
		*value++ = '\0';
		if (pcs_set_word(word, value, to))
			return -EINVAL;
	}
	return 0;
}

static int parse_rule(char *word, struct rule *rule)
{
	if (!strncmp(word, "class:", 6)) {
		size_t digits = strlen(word + 6);

		/* The last of the six digits of a class are optional. */
		if (digits < 2 || digits > 6 || digits % 2 || kstrtou32(word + 6, 16, &rule->class))
			return -EINVAL;
		rule->kind = RULE_CLASS;
		rule->class <<= 4 * (6 - digits);
		rule->class_mask = 0xffffff & (0xffffff << (4 * (6 - digits)));
	} else if (!strncmp(word, "driver:", 7) && word[7]) {
		rule->kind = RULE_DRIVER;
		rule->word = word + 7;
	} else if (!strcmp(word, "untrusted")) {
		rule->kind = RULE_UNTRUSTED;
	} else if (!strcmp(word, "all")) {
		rule->kind = RULE_ALL;
	} else if (strchr(word, ':')) {
		rule->kind = RULE_NAME;
		rule->word = !strncmp(word, "pci/", 4) ? word + 4 : word;
	} else {
		return -EINVAL;
	}
	return 0;
}

int pcs_rules_init(void)
{
	char value[24], *rest, *word;

	pcs_default_policy = (struct pc_policy){};
	if (pcs_set_word("policy", policy, &pcs_default_policy)) {
		pr_err("policy=%s is none of strict, lazy, bounce, auto\n", policy);
		return -EINVAL;
	}
	snprintf(value, sizeof(value), "%lu", window_us);
	if (pcs_set_word("window_us", value, &pcs_default_policy)) {
		pr_err("window_us=%lu is not between 1 and %lu\n", window_us, MOST_US);
		return -EINVAL;
	}
	snprintf(value, sizeof(value), "%lu", threshold);
	if (pcs_set_word("threshold", value, &pcs_default_policy)) {
		pr_err("threshold=%lu is not between %lu and %lu\n", threshold, PAGE_SIZE, MOST_THRESHOLD);
		return -EINVAL;
	}
	words = kstrdup(devices, GFP_KERNEL);
	rules = kcalloc(strlen(devices) / 2 + 1, sizeof(*rules), GFP_KERNEL);
	if (!words || !rules) {
		pcs_rules_exit();
		return -ENOMEM;
	}
	rest = words;
	while ((word = strsep(&rest, ","))) {
		if (!*word)
			continue;
		if (parse_rule(word, &rules[rule_count])) {
			pr_err("devices=: \"%s\" is no address of a device (0000:00:04.0), class:, driver:, untrusted or all\n", word);
			pcs_rules_exit();
			return -EINVAL;
		}
		rule_count++;
	}
	return 0;
}

void pcs_rules_exit(void)
{
	kfree(rules);
	kfree(words);
	rules = NULL;
	words = NULL;
	rule_count = 0;
}

static bool matches(const struct rule *rule, struct pci_dev *pci)
{
	switch (rule->kind) {
	case RULE_NAME:
		return !strcmp(rule->word, dev_name(&pci->dev));
	case RULE_CLASS:
		return (pci->class & rule->class_mask) == rule->class;
	case RULE_DRIVER:
		return pci->dev.driver && !strcmp(rule->word, pci->dev.driver->name);
	case RULE_UNTRUSTED:
		return pci->untrusted;
	case RULE_ALL:
		return true;
	}
	return false;
}

/*
 * Drivers of graphics and RDMA (classes 03, 0207, 0c06) map memory that a program and the device use at the same time, and never sync it. No
 * rule copies it, except one that names the device.
 */
static void spare_graphics(struct device *dev, const struct rule *rule, struct pc_policy *policy)
{
	u32 class = to_pci_dev(dev)->class;

	if (rule->kind == RULE_NAME || (policy->kind != PC_BOUNCE && policy->kind != PC_AUTO))
		return;
	if (class >> 16 != 0x03 && class >> 8 != 0x0207 && class >> 8 != 0x0c06)
		return;
	dev_info(dev, "portcullis: strict, as memory that it and programs use at once must not be copied\n");
	policy->kind = PC_STRICT;
}

bool pcs_rule_matches(struct device *dev, struct pc_policy *policy)
{
	unsigned int i;

	if (!dev_is_pci(dev) || pci_is_bridge(to_pci_dev(dev)))
		return false;
	for (i = 0; i < rule_count; i++) {
		if (matches(&rules[i], to_pci_dev(dev))) {
			spare_graphics(dev, &rules[i], policy);
			return true;
		}
	}
	return false;
}

/*
 * The policy of this device. For a device that firmware marks as external Linux itself copies the ends of partial pages, and defers no unmap: so
 * do we.
 */
int pcs_policy_for(struct device *dev, struct pc_policy *policy, bool by_name)
{
	policy->ends = dev_is_pci(dev) && to_pci_dev(dev)->untrusted;
	if (policy->kind != PC_LAZY || !policy->ends)
		return 0;
	if (by_name) {
		dev_err(dev, "portcullis: lazy is refused for a device that firmware marks as external\n");
		return -EINVAL;
	}
	dev_warn(dev, "portcullis: strict, and not lazy, as firmware marks it as external\n");
	policy->kind = PC_STRICT;
	return 0;
}

ssize_t pcs_rules_show(char *buf)
{
	const struct pc_policy *p = &pcs_default_policy;
	ssize_t len = 0;
	unsigned int i;

	for (i = 0; i < rule_count; i++) {
		const struct rule *rule = &rules[i];
		char class[16];
		const char *word = rule->kind == RULE_UNTRUSTED ? "untrusted" : rule->kind == RULE_ALL ? "all" : rule->word;

		if (rule->kind == RULE_CLASS) {
			snprintf(class, sizeof(class), "%06x", rule->class);
			class[hweight32(rule->class_mask) / 4] = '\0';
			word = class;
		}
		len += sysfs_emit_at(buf, len, "%s%s policy=%s window_us=%llu threshold=%llu\n",
				     rule->kind == RULE_CLASS ? "class:" : rule->kind == RULE_DRIVER ? "driver:" : "", word,
				     pcs_policy_name(p->kind), p->window_ns / NSEC_PER_USEC, p->threshold);
	}
	return len;
}
