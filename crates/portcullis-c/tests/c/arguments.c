// What every function says where it is given nothing, or what is out of range; no device is needed.
#define _GNU_SOURCE
#include <portcullis.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

static void says(int line, int code, int wanted, const char *text) {
    if (code == wanted && strstr(portcullis_error_text(), text)) return;
    printf("line %d: %d and not %d, \"%s\" and not \"%s\"\n", line, code, wanted, portcullis_error_text(), text);
    failures++;
}
#define ARGUMENT(call, text) says(__LINE__, call, PORTCULLIS_ARGUMENT, text)

// Of a user who may have no more threads. Only users with privileges may, and so the child is none.
static int without_threads(void) {
    struct rlimit none = {0, 0};
    portcullis_device *device = NULL;
    if (setrlimit(RLIMIT_NPROC, &none) || setresuid(65534, 65534, 65534)) return puts("no limit can be set"), 1;
    says(__LINE__, portcullis_device_open("0000:ff:1f.7", PORTCULLIS_STRICT, 64, &device), PORTCULLIS_OPEN,
         "the system has no thread to give for the timers (Resource temporarily unavailable (os error 11)): end");
    return failures || device;
}

int main(void) {
    portcullis_device *device = NULL;
    portcullis_queue *queue = NULL;
    uint64_t iova = 7, mapping = 7;
    size_t count = 7;
    void *memory = NULL;
    uint8_t *registers = NULL;
    portcullis_usage usage;
    portcullis_piece piece = {&count, sizeof count};
    portcullis_segment segment;

    if (*portcullis_error_text()) failures++, puts("there is an error before any call");
    says(__LINE__, portcullis_device_open("0000:ff:1f.7", PORTCULLIS_STRICT, 64, &device), PORTCULLIS_OPEN,
         "there is no PCI device 0000:ff:1f.7");
    ARGUMENT(portcullis_device_open(NULL, PORTCULLIS_STRICT, 64, &device), "the name is null");
    ARGUMENT(portcullis_device_open("0000:ff:1f.7", PORTCULLIS_STRICT, 64, NULL), "the pointer for the result is null");
    ARGUMENT(portcullis_device_open("\xff", PORTCULLIS_STRICT, 64, &device), "the name is no text");
    ARGUMENT(portcullis_device_open_in("0000:ff:1f.7", NULL, PORTCULLIS_STRICT, 64, &device), "the device is null");
    ARGUMENT(portcullis_bar(device, 0, &registers, &count), "the device is null");
    ARGUMENT(portcullis_read_config(device, 0, (uint8_t *)&iova, 4), "the device is null");
    ARGUMENT(portcullis_read_config(device, 0, (uint8_t *)&iova, 4097), "4096 bytes");
    ARGUMENT(portcullis_write_config(device, 0, (uint8_t *)&iova, 4), "the device is null");
    ARGUMENT(portcullis_device_set_bus_master(device, 1), "the device is null");
    ARGUMENT(portcullis_device_reset(device), "the device is null");
    int event = 7;
    ARGUMENT(portcullis_interrupts(device, PORTCULLIS_ANY_INTERRUPT, 1, &event), "the device is null");
    ARGUMENT(portcullis_interrupts_off(device), "the device is null");
    ARGUMENT(portcullis_interrupt_wait(device, 0, 0, &iova), "the device is null");
    ARGUMENT(portcullis_interrupt_unmask(device, 0), "the device is null");
    ARGUMENT(portcullis_unplug_request(device, &event), "the device is null");
    ARGUMENT(portcullis_device_release(device), "the device is null");
    ARGUMENT(portcullis_device_usage(device, &usage), "the device is null");
    ARGUMENT(portcullis_map(device, &count, sizeof count, PORTCULLIS_TO_DEVICE, &iova), "the device is null");
    ARGUMENT(portcullis_map_list(device, &piece, 1, PORTCULLIS_TO_DEVICE, &segment, &count), "the device is null");
    ARGUMENT(portcullis_unmap(device, 0, 1), "the device is null");
    ARGUMENT(portcullis_unmap_all(device, NULL), "the device is null");
    ARGUMENT(portcullis_sync_for_cpu(device, 0, 1), "the device is null");
    ARGUMENT(portcullis_sync_for_device(device, 0, 1), "the device is null");
    ARGUMENT(portcullis_alloc(device, 4096, &memory, &iova), "the device is null");
    ARGUMENT(portcullis_free(device, &count), "the device is null");
    ARGUMENT(portcullis_queue_new(device, PORTCULLIS_RING, 8, 4096, 4, &queue), "the device is null");
    ARGUMENT(portcullis_queue_map(queue, &count, 8, PORTCULLIS_TO_DEVICE, &iova, &mapping), "the queue is null");
    ARGUMENT(portcullis_queue_unmap(queue, 0, &count), "the queue is null");
    ARGUMENT(portcullis_queue_commit(queue, &count), "the queue is null");
    ARGUMENT(portcullis_queue_sync_for_cpu(queue, 0, 0, 1), "the queue is null");
    ARGUMENT(portcullis_queue_sync_for_device(queue, 0, 0, 1), "the queue is null");
    fflush(stdout);
    pid_t child = fork();
    int ended = 1;
    if (!child) {
        int failed = without_threads();
        fflush(stdout);
        _exit(failed);
    }
    if (waitpid(child, &ended, 0) != child || ended) failures++, printf("without threads: %#x\n", ended);
    if (portcullis_device_close(NULL) || portcullis_queue_free(NULL)) failures++, puts("null is not nothing");
    if (device || queue || iova != 7 || mapping != 7 || count != 7 || memory || registers || event != 7)
        failures++, puts("a call that failed has written a result");
    if (strcmp(portcullis_version(), VERSION)) failures++, printf("version %s\n", portcullis_version());
    return failures ? 1 : 0;
}
