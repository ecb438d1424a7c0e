// What a driver in C finds in a guest, by portcullis.h: QEMU's edu reads and writes memory of this process. tests/guest/jobs/user.sh calls it.
#define _GNU_SOURCE
#include <portcullis.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SOURCE = 0x80, TARGET = 0x88, COUNT = 0x90, COMMAND = 0x98, START = 1, TO_MEMORY = 2, OWN = 0x40000, PAGE = 4096 };

static volatile uint8_t *registers;

#define CHECK(held, ...) \
    do { \
        int held_ = (held); \
        printf(held_ ? "ok " : "not ok "); \
        printf(__VA_ARGS__); \
        if (!held_) printf(": line %d, %s", __LINE__, portcullis_error_text()); \
        putchar('\n'); \
    } while (0)

static void need(int code, int line) {
    if (code == PORTCULLIS_OK) return;
    printf("not ok the library for C: line %d: %d, %s\n", line, code, portcullis_error_text());
    exit(1);
}
#define NEED(call) need(call, __LINE__)

static void copy(uint64_t source, uint64_t target, uint64_t bytes, uint64_t command) {
    *(volatile uint64_t *)(registers + SOURCE) = source;
    *(volatile uint64_t *)(registers + TARGET) = target;
    *(volatile uint64_t *)(registers + COUNT) = bytes;
    *(volatile uint64_t *)(registers + COMMAND) = START | command;
    struct timespec pause = {0, 1000000};
    while (*(volatile uint64_t *)(registers + COMMAND) & START) nanosleep(&pause, NULL);
}
static void reads(uint64_t iova, uint64_t bytes) { copy(iova, OWN, bytes, 0); }
static void writes(uint64_t iova, uint64_t bytes) { copy(OWN, iova, bytes, TO_MEMORY); }

static int all(const uint8_t *bytes, size_t count, uint8_t byte) {
    for (size_t at = 0; at < count; at++)
        if (bytes[at] != byte) return 0;
    return 1;
}

static uint8_t *pages(size_t count) {
    uint8_t *memory = aligned_alloc(PAGE, count * PAGE);
    if (!memory) exit(1);
    memset(memory, 0, count * PAGE);
    return memory;
}

static portcullis_device *opened(const char *name, uint32_t policy) {
    portcullis_device *device;
    uint8_t *found;
    size_t size;
    NEED(portcullis_device_open(name, policy, 28, &device));
    NEED(portcullis_bar(device, 0, &found, &size));
    registers = found;
    NEED(portcullis_device_set_bus_master(device, 1));
    return device;
}

static void buffers(const char *name, uint32_t policy, const char *what) {
    portcullis_device *device = opened(name, policy);
    uint8_t *memory = pages(4), *out = memory + 100, *in = memory + 2 * PAGE + 60;
    enum { BYTES = 3000 };
    uint64_t from, to, again;
    memset(out, 0xa5, BYTES);
    NEED(portcullis_map(device, out, BYTES, PORTCULLIS_TO_DEVICE, &from));
    NEED(portcullis_map(device, in, BYTES, PORTCULLIS_FROM_DEVICE, &to));
    reads(from, BYTES);
    writes(to, BYTES);
    NEED(portcullis_sync_for_cpu(device, to, BYTES));
    CHECK(all(in, BYTES, 0xa5), "C, %s: bytes come from a buffer and go to another", what);
    memset(out, 0x3c, BYTES);
    NEED(portcullis_sync_for_device(device, from, BYTES));
    reads(from, BYTES);
    writes(to, BYTES);
    CHECK(portcullis_unmap(device, to, BYTES - 1) == PORTCULLIS_NOT_MAPPED, "C, %s: an unmap of another length is refused", what);
    NEED(portcullis_unmap(device, to, BYTES));
    CHECK(all(in, BYTES, 0x3c) && in[-1] == 0 && in[BYTES] == 0, "C, %s: synced bytes go there, and none beside them", what);
    memset(in, 1, BYTES);
    writes(to, BYTES);
    CHECK(all(in, BYTES, 1), "C, %s: nothing arrives after the unmap", what);
    CHECK(portcullis_unmap(device, to, BYTES) == PORTCULLIS_NOT_MAPPED, "C, %s: a second unmap is refused", what);
    NEED(portcullis_unmap(device, from, BYTES));
    CHECK(portcullis_map(device, out, 0, PORTCULLIS_TO_DEVICE, &again) == PORTCULLIS_REFUSED &&
              portcullis_map(device, out, BYTES, 3, &again) == PORTCULLIS_ARGUMENT,
          "C, %s: no bytes and no direction are refused", what);

    portcullis_piece list[3] = {{memory, 512}, {memory + 2 * PAGE, PAGE}, {memory + PAGE, 512}};
    portcullis_segment told[3];
    size_t used;
    memset(memory, 7, 4 * PAGE);
    NEED(portcullis_map_list(device, list, 3, PORTCULLIS_FROM_DEVICE, told, &used));
    uint64_t bytes = 0;
    for (size_t at = 0; at < used; at++) {
        bytes += told[at].len;
        for (uint64_t done = 0; done < told[at].len; done += 512) writes(told[at].iova + done, 512);
    }
    NEED(portcullis_unmap(device, told[0].iova, told[used - 1].iova + told[used - 1].len - told[0].iova));
    CHECK(bytes == PAGE + 1024 && all(memory, 512, 0x3c) && all(memory + 2 * PAGE, PAGE, 0x3c) &&
              all(memory + PAGE, 512, 0x3c) && all(memory + 512, PAGE - 512, 7) && all(memory + 3 * PAGE, PAGE, 7),
          "C, %s: a list is written as a whole, and nothing beside it", what);

    void *shared;
    uint64_t at;
    NEED(portcullis_alloc(device, 2 * PAGE, &shared, &at));
    int zero = all(shared, 2 * PAGE, 0);
    writes(at + PAGE, PAGE / 2);
    CHECK(zero && all((uint8_t *)shared + PAGE, PAGE / 2, 0x3c), "C, %s: shared memory is zero, and the device writes it", what);
    NEED(portcullis_free(device, shared));
    CHECK(portcullis_free(device, shared) == PORTCULLIS_NOT_MAPPED, "C, %s: a second free is refused", what);

    NEED(portcullis_map(device, memory, PAGE, PORTCULLIS_FROM_DEVICE, &again));
    NEED(portcullis_map(device, memory + PAGE, PAGE, PORTCULLIS_FROM_DEVICE, &at));
    uint64_t left = 0;
    NEED(portcullis_unmap_all(device, &left));
    memset(memory, 9, 4 * PAGE);
    writes(again, PAGE);
    writes(at, PAGE);
    portcullis_usage usage;
    NEED(portcullis_device_usage(device, &usage));
    CHECK(left == 2 && all(memory, 4 * PAGE, 9) && usage.open_bytes == 0 && usage.maps == usage.unmaps,
          "C, %s: what a driver leaves ends at once", what);
    NEED(portcullis_map(device, memory, PAGE, PORTCULLIS_FROM_DEVICE, &again));
    NEED(portcullis_device_close(device));
    free(memory);
}

static void queues(const char *name, uint32_t strategy, size_t batch, const char *what) {
    portcullis_device *device = opened(name, PORTCULLIS_STRICT);
    portcullis_queue *queue;
    uint8_t *memory = pages(8);
    uint64_t iova, mapping[8];
    size_t over = 0, ended;
    int right = 1;
    // Where each buffer ends by itself there is no batch to name.
    NEED(portcullis_queue_new(device, strategy, 8, PAGE, batch > 1 ? batch : 0, &queue));
    memset(memory, 0x44, PAGE);
    NEED(portcullis_queue_map(queue, memory, PAGE, PORTCULLIS_TO_DEVICE, &iova, &mapping[0]));
    reads(iova, PAGE);
    for (int at = 1; at < 8; at++) {
        NEED(portcullis_queue_map(queue, memory + at * PAGE, PAGE, PORTCULLIS_FROM_DEVICE, &iova, &mapping[at]));
        writes(iova, PAGE);
        NEED(portcullis_queue_sync_for_cpu(queue, mapping[at], 0, PAGE));
        right &= all(memory + at * PAGE, PAGE, 0x44);
    }
    CHECK(portcullis_queue_sync_for_cpu(queue, mapping[1], 1, PAGE) == PORTCULLIS_NOT_MAPPED, "C, %s queue: a part outside is refused", what);
    for (int at = 0; at < 7; at++) {
        NEED(portcullis_queue_unmap(queue, mapping[at], &ended));
        right &= ended == 0 || ended <= batch;
        over += ended;
    }
    CHECK(right, "C, %s queue: bytes arrive, and batches end together", what);
    CHECK(portcullis_queue_unmap(queue, mapping[0], &ended) == PORTCULLIS_NOT_MAPPED, "C, %s queue: a second unmap is refused", what);
    NEED(portcullis_queue_commit(queue, &ended));
    CHECK(over + ended == 7, "C, %s queue: a commit ends the rest, %zu", what, ended);
    uint64_t next;
    NEED(portcullis_queue_map(queue, memory, PAGE, PORTCULLIS_TO_DEVICE, &iova, &next));
    CHECK(next != mapping[6] && portcullis_queue_unmap(queue, mapping[6], &ended) == PORTCULLIS_NOT_MAPPED &&
              portcullis_queue_sync_for_device(queue, mapping[6], 0, 1) == PORTCULLIS_NOT_MAPPED,
          "C, %s queue: a number that is out of date is refused", what);
    // Two are left to the end of the queue.
    NEED(portcullis_queue_free(queue));
    memset(memory, 1, 8 * PAGE);
    writes(iova, PAGE);
    CHECK(all(memory, 8 * PAGE, 1), "C, %s queue: its end ends what is mapped", what);
    NEED(portcullis_device_close(device));
    free(memory);
}

static void *maps(void *given) {
    portcullis_device *device = given;
    uint8_t *buffer = pages(1);
    for (int round = 0; round < 2000; round++) {
        uint64_t iova;
        if (portcullis_map(device, buffer, 100 + round % 3000, PORTCULLIS_BIDIRECTIONAL, &iova)) return "map";
        if (portcullis_unmap(device, iova, 100 + round % 3000)) return "unmap";
    }
    free(buffer);
    return NULL;
}

static void threads(const char *name) {
    portcullis_device *device = opened(name, PORTCULLIS_BOUNCE);
    portcullis_usage before, after;
    maps(device);
    NEED(portcullis_device_usage(device, &before));
    maps(device);
    NEED(portcullis_device_usage(device, &after));
    CHECK(after.copies - before.copies == 2000 && after.kernel_calls == before.kernel_calls,
          "C: %llu copies take %llu system calls", (unsigned long long)(after.copies - before.copies),
          (unsigned long long)(after.kernel_calls - before.kernel_calls));
    pthread_t all[4];
    void *failed = NULL, *one;
    for (int at = 0; at < 4; at++) need(pthread_create(&all[at], NULL, maps, device), __LINE__);
    for (int at = 0; at < 4; at++) pthread_join(all[at], &one), failed = one ? one : failed;
    NEED(portcullis_device_usage(device, &after));
    CHECK(!failed && after.maps == 12000 && after.unmaps == 12000, "C: four threads map for one device");
    NEED(portcullis_device_close(device));
}

static void others(const char *name, const char *other) {
    portcullis_device *device = opened(name, PORTCULLIS_STRICT), *joined, *none;
    CHECK(portcullis_device_open(name, PORTCULLIS_STRICT, 28, &none) == PORTCULLIS_OPEN && strstr(portcullis_error_text(), "is in use"),
          "C: a device that is in use is refused");
    CHECK(portcullis_device_open(other, 3, 28, &none) == PORTCULLIS_ARGUMENT && portcullis_device_open(other, 0, 65, &none) == PORTCULLIS_ARGUMENT,
          "C: what is no policy and no width is refused");
    NEED(portcullis_device_open_in(other, device, PORTCULLIS_AUTO, 64, &joined));
    uint8_t *memory = pages(1), id[2] = {0};
    uint64_t iova;
    portcullis_usage usage;
    NEED(portcullis_map(joined, memory, PAGE, PORTCULLIS_FROM_DEVICE, &iova));
    NEED(portcullis_device_usage(device, &usage));
    CHECK(usage.kernel_mappings > 0 && usage.maps == 0, "C: devices of one address space count their own");
    NEED(portcullis_read_config(joined, 0, id, 2));
    CHECK(id[0] == 0x36 && id[1] == 0x1b, "C: the other device's configuration space says %02x%02x", id[1], id[0]);
    NEED(portcullis_device_close(device));
    NEED(portcullis_unmap(joined, iova, PAGE));
    NEED(portcullis_device_close(joined));
    device = opened(name, PORTCULLIS_STRICT);
    CHECK(portcullis_map(device, (void *)0x1000, PAGE, PORTCULLIS_TO_DEVICE, &iova) == PORTCULLIS_REFUSED, "C: memory that is not there is refused");
    NEED(portcullis_device_close(device));
    free(memory);
}

static void interrupts(const char *name) {
    portcullis_device *device = opened(name, PORTCULLIS_STRICT);
    int event, request;
    uint64_t times = 0;
    CHECK(portcullis_interrupts(device, PORTCULLIS_MSI_X, 1, &event) == PORTCULLIS_SYSTEM, "C: interrupts that edu has not are refused");
    NEED(portcullis_interrupts(device, PORTCULLIS_ANY_INTERRUPT, 1, &event));
    CHECK(portcullis_interrupts(device, PORTCULLIS_ANY_INTERRUPT, 1, &request) == PORTCULLIS_SYSTEM, "C: interrupts that are on are not turned on again");
    struct pollfd wait = {event, POLLIN, 0};
    int before = poll(&wait, 1, 0);
    *(volatile uint32_t *)(registers + 0x60) = 5;
    int after = poll(&wait, 1, 10000);
    int took = read(event, &times, 8) == 8;
    CHECK(before == 0 && after == 1 && took && times == 1, "C: an interrupt of the device's arrives");
    *(volatile uint32_t *)(registers + 0x64) = 5;
    NEED(portcullis_interrupt_unmask(device, 0));
    NEED(portcullis_interrupt_wait(device, 0, 0, &times));
    int none = times == 0;
    *(volatile uint32_t *)(registers + 0x60) = 5;
    NEED(portcullis_interrupt_wait(device, 0, 10000, &times));
    CHECK(none && times == 1, "C: the library waits for an interrupt");
    *(volatile uint32_t *)(registers + 0x64) = 5;
    CHECK(portcullis_interrupt_unmask(device, 1) == PORTCULLIS_ARGUMENT, "C: no other interrupt is on");
    NEED(portcullis_interrupts_off(device));
    NEED(portcullis_interrupts(device, PORTCULLIS_ANY_INTERRUPT, 1, &event));
    NEED(portcullis_unplug_request(device, &request));
    wait.fd = request;
    CHECK(poll(&wait, 1, 0) == 0, "C: nobody asks for the device");
    uint8_t *memory = pages(1);
    uint64_t iova;
    NEED(portcullis_map(device, memory, PAGE, PORTCULLIS_FROM_DEVICE, &iova));
    NEED(portcullis_device_release(device));
    CHECK(portcullis_interrupt_wait(device, 0, -1, &times) == PORTCULLIS_RELEASED &&
              portcullis_interrupt_wait(device, 0, -1, &times) == PORTCULLIS_RELEASED,
          "C: who waits is told that the device was let go of");
    CHECK(*(volatile uint32_t *)registers == 0, "C: a device that was let go of answers no more");
    NEED(portcullis_unmap(device, iova, PAGE));
    NEED(portcullis_device_close(device));
    free(memory);
}

// Nanoseconds of a map and an unmap: the best of ten rounds.
static void pairs(const char *name, size_t bytes, unsigned count) {
    portcullis_device *device = opened(name, PORTCULLIS_BOUNCE);
    uint8_t *buffer = pages(32);
    double best = 1e9;
    for (int round = 0; round < 10; round++) {
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (unsigned pair = 0; pair < count; pair++) {
            uint64_t iova;
            NEED(portcullis_map(device, buffer, bytes, PORTCULLIS_TO_DEVICE, &iova));
            NEED(portcullis_unmap(device, iova, bytes));
        }
        clock_gettime(CLOCK_MONOTONIC, &to);
        double took = ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / count;
        if (took < best) best = took;
    }
    printf("%.1f\n", best);
    NEED(portcullis_device_close(device));
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 5 && !strcmp(argv[1], "pairs")) {
        pairs(argv[2], strtoul(argv[3], NULL, 10), strtoul(argv[4], NULL, 10));
        return 0;
    }
    if (argc != 3) {
        fprintf(stderr, "usage: %s EDU DISK, or pairs EDU BYTES COUNT\n", argv[0]);
        return 2;
    }
    buffers(argv[1], PORTCULLIS_STRICT, "strict");
    buffers(argv[1], PORTCULLIS_BOUNCE, "bounce");
    buffers(argv[1], PORTCULLIS_AUTO, "auto");
    queues(argv[1], PORTCULLIS_DIRECT, 1, "direct");
    queues(argv[1], PORTCULLIS_BATCHED, 3, "batched");
    queues(argv[1], PORTCULLIS_RING, 3, "ring");
    queues(argv[1], PORTCULLIS_COPIED, 1, "copied");
    queues(argv[1], PORTCULLIS_CHEAPER, 3, "cheaper");
    threads(argv[1]);
    interrupts(argv[1]);
    others(argv[1], argv[2]);
    return 0;
}
