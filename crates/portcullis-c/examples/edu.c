// A driver of QEMU's device edu (docs/specs/edu.rst of QEMU): it copies 3,000 bytes to the device and back, waits by interrupt, and lets go of the device when
// that is to be unplugged.
//
//   cc edu.c $(pkg-config --cflags --libs portcullis) -o edu && ./edu 0000:00:0a.0
//
// Licence: Apache-2.0 OR MIT.
#include <errno.h>
#include <poll.h>
#include <portcullis.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 3000, TIMEOUT_MS = 5000 };
// Registers and commands.
enum { INTERRUPT_STATUS = 0x24, ACKNOWLEDGE = 0x64, SOURCE = 0x80, DESTINATION = 0x88, COUNT = 0x90, COMMAND = 0x98 };
enum { START = 1, TO_MEMORY = 2, RAISE = 4, DMA_DONE = 0x100 };
static const uint64_t DEVICE_BUFFER = 0x40000;

// Static, so that memory is never freed that the device may still reach.
static uint8_t there[BYTES], back[BYTES];

struct edu {
  const char *name;
  portcullis_device *device;
  uint8_t *registers;
  size_t size;
  int interrupt, unplug;
  bool released;
  int times;
};

static int failed(const char *what) {
  fprintf(stderr, "edu: %s: %s\n", what, portcullis_error_text());
  return -1;
}

static uint32_t read32(struct edu *e, size_t offset) { return *(volatile uint32_t *)(e->registers + offset); }
static void write32(struct edu *e, size_t offset, uint32_t v) { *(volatile uint32_t *)(e->registers + offset) = v; }
static void write64(struct edu *e, size_t offset, uint64_t v) { *(volatile uint64_t *)(e->registers + offset) = v; }

// Waits for the device's interrupt or the kernel's request. 0: an interrupt.
static int wait_event(struct edu *e) {
  for (;;) {
    struct pollfd fds[2] = {{.fd = e->unplug, .events = POLLIN}, {.fd = e->interrupt, .events = POLLIN}};
    int n = poll(fds, 2, TIMEOUT_MS);
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0) {
      perror("edu: poll");
      return -1;
    }
    if (n == 0) {
      fprintf(stderr, "edu: no interrupt within %d ms\n", TIMEOUT_MS);
      return -1;
    }
    if (fds[0].revents) {
      if (portcullis_device_release(e->device))
        return failed("release");
      e->released = true;
      fprintf(stderr, "edu: %s is unplugged: the copy was given up\n", e->name);
      return -1;
    }
    uint64_t times;
    ssize_t got = read(e->interrupt, &times, sizeof times);
    if (got == (ssize_t)sizeof times)
      return 0;
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
      continue;
    perror("edu: reading the interrupt's event");
    return -1;
  }
}

static int transfer(struct edu *e, uint64_t source, uint64_t destination, uint64_t direction) {
  write64(e, SOURCE, source);
  write64(e, DESTINATION, destination);
  write64(e, COUNT, BYTES);
  write64(e, COMMAND, START | direction | RAISE);
  for (;;) {
    if (wait_event(e))
      return -1;
    uint32_t status = read32(e, INTERRUPT_STATUS);
    // It was pulled out.
    if (status == UINT32_MAX) {
      fprintf(stderr, "edu: the device is gone\n");
      return -1;
    }
    write32(e, ACKNOWLEDGE, status);
    if (portcullis_interrupt_unmask(e->device, 0))
      return failed("unmask");
    if (status & DMA_DONE)
      return 0;
  }
}

static int copy(struct edu *e) {
  for (size_t i = 0; i < BYTES; i++)
    there[i] = (uint8_t)(i * 7 + 3);

  uint64_t iova;
  if (portcullis_map(e->device, there, BYTES, PORTCULLIS_TO_DEVICE, &iova))
    return failed("map");
  int result = transfer(e, iova, DEVICE_BUFFER, 0);
  if (portcullis_unmap(e->device, iova, BYTES))
    return failed("unmap");
  if (result)
    return result;

  if (portcullis_map(e->device, back, BYTES, PORTCULLIS_FROM_DEVICE, &iova))
    return failed("map");
  result = transfer(e, DEVICE_BUFFER, iova, TO_MEMORY);
  if (portcullis_unmap(e->device, iova, BYTES))
    return failed("unmap");
  if (result)
    return result;

  if (memcmp(there, back, BYTES)) {
    fprintf(stderr, "edu: what came back is not what was sent\n");
    return -1;
  }
  return 0;
}

static int drive(struct edu *e) {
  if (portcullis_unplug_request(e->device, &e->unplug))
    return failed("unplug request");
  if (portcullis_bar(e->device, 0, &e->registers, &e->size))
    return failed("BAR 0");
  if (e->size < COMMAND + 8) {
    fprintf(stderr, "edu: BAR 0 has %zu bytes\n", e->size);
    return -1;
  }
  uint32_t id = read32(e, 0);
  if (id != 0x010000ed) {
    fprintf(stderr, "edu: %s is no edu device: its id is %#x\n", e->name, id);
    return -1;
  }
  if (portcullis_interrupts(e->device, PORTCULLIS_ANY_INTERRUPT, 1, &e->interrupt))
    return failed("interrupt");
  if (portcullis_device_set_bus_master(e->device, 1))
    return failed("bus master");
  for (int i = 0; i < e->times; i++)
    if (copy(e))
      return -1;
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: edu 0000:00:03.0\n");
    return 2;
  }
  struct edu e = {.name = argv[1], .interrupt = -1, .unplug = -1, .times = argc > 2 ? atoi(argv[2]) : 1};
  if (portcullis_device_open(e.name, PORTCULLIS_BOUNCE, 28, &e.device)) {
    failed("open");
    return 1;
  }
  int result = drive(&e);
  if (portcullis_device_close(e.device))
    result = failed("close");
  if (result)
    return 1;
  printf("%d bytes went to %s and back.\n", BYTES, e.name);
  return 0;
}
