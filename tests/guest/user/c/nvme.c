// The rival of the example `nvme`: the same random reads of a disk by VFIO's type 1 and nothing else, in C. Its ways are the two that drivers have
// without a library: `direct` maps and unmaps each buffer by a system call, `advance` has mapped all of them before.
//
//   nvme-c DEVICE KIB DEPTH READS ROUNDS
//
// It prints for each way: name, KiB, reads a second in half of the rounds, us of a map and an unmap in half of the reads, reads a second of the fastest
// tenth of the rounds.
//
// The disk's first 64 MiB are as the example's --overwrite leaves them: the first and the last word of each read are compared.
// Source: NVM Express Base Specification, Revision 2.0, chapter 3; linux/vfio.h.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

enum { PAGE = 4096, ENTRIES = 64, MOST = 63, KNOWN = 64 << 20, READ = 2 };
// Where the disk finds the rings, and from where on the buffers.
#define RINGS 0x100000000ull
#define BUFFERS 0x200000000ull

#define NEED(held) \
    do { \
        if (!(held)) { \
            fprintf(stderr, "nvme-c: line %d: %s\n", __LINE__, #held); \
            exit(1); \
        } \
    } while (0)

static int container, device;
static volatile uint8_t *registers;
static uint64_t stride;

static uint32_t load32(unsigned at) { return *(volatile uint32_t *)(registers + at); }
static uint64_t load64(unsigned at) { return *(volatile uint64_t *)(registers + at); }
static void store32(unsigned at, uint32_t value) { *(volatile uint32_t *)(registers + at) = value; }
static void store64(unsigned at, uint64_t value) { *(volatile uint64_t *)(registers + at) = value; }

static void map(const void *memory, uint64_t iova, uint64_t bytes) {
    struct vfio_iommu_type1_dma_map map = {.argsz = sizeof map, .flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE};
    map.vaddr = (uintptr_t)memory, map.iova = iova, map.size = bytes;
    NEED(ioctl(container, VFIO_IOMMU_MAP_DMA, &map) == 0);
}

static void unmap(uint64_t iova, uint64_t bytes) {
    struct vfio_iommu_type1_dma_unmap unmap = {.argsz = sizeof unmap, .iova = iova, .size = bytes};
    NEED(ioctl(container, VFIO_IOMMU_UNMAP_DMA, &unmap) == 0 && unmap.size == bytes);
}

static void *memory(size_t bytes) {
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    NEED(found != MAP_FAILED);
    return found;
}

static void open_device(const char *name) {
    char path[128], target[256];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/iommu_group", name);
    ssize_t length = readlink(path, target, sizeof target - 1);
    NEED(length > 0);
    target[length] = 0;
    snprintf(path, sizeof path, "/dev/vfio%s", strrchr(target, '/'));
    container = open("/dev/vfio/vfio", O_RDWR);
    int group = open(path, O_RDWR);
    NEED(container >= 0 && group >= 0);
    NEED(ioctl(group, VFIO_GROUP_SET_CONTAINER, &container) == 0);
    NEED(ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) == 0);
    device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, name);
    NEED(device >= 0);
    struct vfio_region_info bar = {.argsz = sizeof bar, .index = VFIO_PCI_BAR0_REGION_INDEX};
    NEED(ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &bar) == 0 && bar.flags & VFIO_REGION_INFO_FLAG_MMAP);
    registers = mmap(NULL, bar.size, PROT_READ | PROT_WRITE, MAP_SHARED, device, (off_t)bar.offset);
    NEED(registers != MAP_FAILED);
    struct vfio_region_info config = {.argsz = sizeof config, .index = VFIO_PCI_CONFIG_REGION_INDEX};
    NEED(ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &config) == 0);
    uint16_t command;
    NEED(pread(device, &command, 2, (off_t)config.offset + 4) == 2);
    command |= 6; // Memory space, bus master.
    NEED(pwrite(device, &command, 2, (off_t)config.offset + 4) == 2);
}

// A queue pair, polled: a page of submissions, one of completions.
struct ring {
    unsigned number, tail, head, phase;
    uint64_t busy;
    uint64_t (*submissions)[8];
    volatile uint64_t (*completions)[2];
};

static unsigned submit(struct ring *ring, uint64_t opcode, uint64_t name, const uint64_t data[2], uint64_t ten, uint64_t twelve) {
    unsigned id = (unsigned)__builtin_ctzll(~ring->busy);
    NEED(id < MOST);
    uint64_t words[8] = {opcode | (uint64_t)id << 16 | name << 32, 0, 0, data[0], data[1], ten, twelve, 0};
    memcpy(ring->submissions[ring->tail], words, sizeof words);
    ring->busy |= 1ull << id;
    ring->tail = (ring->tail + 1) % ENTRIES;
    return id;
}

static void doorbell(struct ring *ring) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    store32((unsigned)(0x1000 + 2 * ring->number * stride), ring->tail);
}

// The command that is complete, or -1.
static int poll(struct ring *ring) {
    uint64_t word = ring->completions[ring->head][1];
    if ((word >> 48 & 1) != ring->phase) return -1;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    ring->head = (ring->head + 1) % ENTRIES;
    if (ring->head == 0) ring->phase ^= 1;
    store32((unsigned)(0x1000 + (2 * ring->number + 1) * stride), ring->head);
    unsigned id = word >> 32 & 0xffff;
    NEED(id < MOST && ring->busy >> id & 1 && word >> 49 == 0);
    ring->busy &= ~(1ull << id);
    return (int)id;
}

static void administrate(struct ring *admin, uint64_t opcode, uint64_t name, uint64_t data, uint64_t ten, uint64_t twelve) {
    uint64_t both[2] = {data, 0};
    submit(admin, opcode, name, both, ten, twelve);
    doorbell(admin);
    while (poll(admin) < 0) {}
}

static struct ring rings[2];
static uint64_t block_bytes;
// A page for each command: its list of pages.
static uint64_t (*lists)[PAGE / 8];

static void start(void) {
    uint64_t capabilities = load64(0);
    stride = 4ull << (capabilities >> 32 & 0xf);
    uint8_t *pages = memory((5 + ENTRIES) * PAGE);
    map(pages, RINGS, (5 + ENTRIES) * PAGE);
    for (unsigned number = 0; number < 2; number++) {
        rings[number].number = number, rings[number].phase = 1;
        rings[number].submissions = (void *)(pages + 2 * number * PAGE);
        rings[number].completions = (void *)(pages + (2 * number + 1) * PAGE);
    }
    lists = (void *)(pages + 5 * PAGE);
    store32(0x14, 0);
    while (load32(0x1c) & 1) {}
    store32(0x24, (ENTRIES - 1) << 16 | (ENTRIES - 1));
    store64(0x28, RINGS);
    store64(0x30, RINGS + PAGE);
    store32(0x14, 1 | 6 << 16 | 4 << 20);
    while (!(load32(0x1c) & 1)) {}
    uint64_t *answer = (void *)(pages + 4 * PAGE);
    administrate(&rings[0], 6, 1, RINGS + 4 * PAGE, 0, 0);
    unsigned format = answer[3] >> 16 & 0xf;
    block_bytes = 1ull << (answer[16 + format / 2] >> (format % 2 * 32) >> 16 & 0xff);
    NEED(block_bytes >= 512 && block_bytes <= PAGE);
    administrate(&rings[0], 5, 0, RINGS + 3 * PAGE, 1 | (uint64_t)(ENTRIES - 1) << 16 | 1ull << 32, 0);
    administrate(&rings[0], 1, 0, RINGS + 2 * PAGE, 1 | (uint64_t)(ENTRIES - 1) << 16 | (1ull | 1ull << 16) << 32, 0);
}

static uint64_t pattern(uint64_t word) { return (word + 1) * 0x9e3779b97f4a7c15ull; }

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

// The value that so many tenths do not reach.
static double tenths(double *values, size_t count, size_t part) {
    qsort(values, count, sizeof *values, ascending);
    return values[count * part / 10];
}

// Buffers: four times as many as the disk has at once, used in turn.
static uint8_t *buffers;
static unsigned count, free_list[4 * MOST];
static uint64_t bytes, random_state = 88172645463325252ull;

static uint64_t at_random(uint64_t below) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state % below;
}

// Reads a second; `mapping` gets the ticks of a map and an unmap of each read.
static double round_of(int advance, unsigned depth, unsigned reads, double *mapping) {
    struct ring *ring = &rings[1];
    struct { unsigned buffer; uint64_t place; uint64_t ticks; } pending[MOST];
    unsigned first = 0, last = 0, left = reads, running = 0, done = 0;
    static unsigned spare[4 * MOST];
    memcpy(spare, free_list, sizeof spare);
    double began = seconds();
    while (left || running) {
        int more = left && running < depth;
        for (; left && running < depth; left--, running++) {
            uint64_t place = at_random(KNOWN / bytes), before = __rdtsc();
            unsigned buffer = spare[first++ % count];
            uint64_t iova = BUFFERS + buffer * bytes, data[2] = {iova, 0};
            if (!advance) map(buffers + buffer * bytes, iova, bytes);
            uint64_t ticks = __rdtsc() - before;
            unsigned next = (unsigned)__builtin_ctzll(~ring->busy);
            for (unsigned page = 1; page < bytes / PAGE; page++) lists[next][page - 1] = iova + page * PAGE;
            if (bytes == 2 * PAGE) data[1] = iova + PAGE;
            if (bytes > 2 * PAGE) data[1] = RINGS + (5 + next) * PAGE;
            unsigned id = submit(ring, READ, 1, data, place * (bytes / block_bytes), bytes / block_bytes - 1);
            pending[id].buffer = buffer, pending[id].place = place, pending[id].ticks = ticks;
        }
        if (more) doorbell(ring);
        for (int id; (id = poll(ring)) >= 0; running--, done++) {
            uint64_t before = __rdtsc();
            unsigned buffer = pending[id].buffer;
            if (!advance) unmap(BUFFERS + buffer * bytes, bytes);
            spare[last++ % count] = buffer;
            mapping[done] = (double)(pending[id].ticks + __rdtsc() - before);
            const uint64_t *words = (void *)(buffers + buffer * bytes);
            uint64_t word = pending[id].place * (bytes / 8);
            NEED(words[0] == pattern(word) && words[bytes / 8 - 1] == pattern(word + bytes / 8 - 1));
        }
        __builtin_ia32_pause();
    }
    return reads / (seconds() - began);
}

int main(int arguments, char **argument) {
    NEED(arguments == 6);
    bytes = strtoull(argument[2], NULL, 10) << 10;
    unsigned depth = (unsigned)atoi(argument[3]), reads = (unsigned)atoi(argument[4]), rounds = (unsigned)atoi(argument[5]);
    NEED(bytes >= PAGE && depth >= 1 && depth <= MOST && reads && rounds);
    open_device(argument[1]);
    start();
    count = 4 * depth;
    buffers = memory(count * bytes);
    for (unsigned buffer = 0; buffer < count; buffer++) free_list[buffer] = buffer;
    double *speeds[2], *times = calloc(reads, sizeof *times), halves[2];
    for (int way = 0; way < 2; way++) NEED(speeds[way] = calloc(rounds, sizeof **speeds));
    NEED(times);
    double ticks = (double)__rdtsc(), since = seconds();
    usleep(50000);
    double us = ((double)__rdtsc() - ticks) / (seconds() - since) / 1e6;
    // The ways take turns. The first round does not count.
    for (unsigned round = 0; round <= rounds; round++) {
        for (int turn = 0; turn < 2; turn++) {
            int advance = turn ^ (round & 1);
            for (unsigned buffer = 0; advance && buffer < count; buffer++)
                map(buffers + buffer * bytes, BUFFERS + buffer * bytes, bytes);
            double speed = round_of(advance, depth, reads, times);
            for (unsigned buffer = 0; advance && buffer < count; buffer++) unmap(BUFFERS + buffer * bytes, bytes);
            if (round) speeds[advance][round - 1] = speed;
            halves[advance] = tenths(times, reads, 5) / us;
        }
    }
    for (int way = 0; way < 2; way++)
        printf("c-%s %llu %.0f %.2f %.0f\n", way ? "advance" : "direct", (unsigned long long)(bytes >> 10), tenths(speeds[way], rounds, 5), halves[way],
               tenths(speeds[way], rounds, 9));
    store32(0x14, 0);
    while (load32(0x1c) & 1) {}
    return 0;
}
