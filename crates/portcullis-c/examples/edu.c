// A driver of QEMU's device edu, which copies up to 4 KiB between memory and a buffer of its own (docs/specs/edu.rst of QEMU): the device
// reads a buffer of this process, and writes it to another.
//
//   cc edu.c $(pkg-config --cflags --libs portcullis) -o edu && ./edu 0000:00:0a.0
//
// Licence: Apache-2.0 OR MIT.
#include <portcullis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 2000, SOURCE = 0x80, TARGET = 0x88, COUNT = 0x90, COMMAND = 0x98, START = 1, TO_MEMORY = 2, OWN = 0x40000 };

static void need(int code, const char *what) {
    if (code != PORTCULLIS_OK) {
        fprintf(stderr, "%s: %s\n", what, portcullis_error_text());
        exit(1);
    }
}

static void copy(volatile uint8_t *registers, uint64_t source, uint64_t target, uint64_t command) {
    *(volatile uint64_t *)(registers + SOURCE) = source;
    *(volatile uint64_t *)(registers + TARGET) = target;
    *(volatile uint64_t *)(registers + COUNT) = BYTES;
    *(volatile uint64_t *)(registers + COMMAND) = START | command;
    while (*(volatile uint64_t *)(registers + COMMAND) & START) {
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s 0000:00:0a.0\n", argv[0]);
        return 2;
    }
    portcullis_device *edu;
    need(portcullis_device_open(argv[1], PORTCULLIS_BOUNCE, 28, &edu), argv[1]);
    uint8_t *registers;
    size_t size;
    need(portcullis_bar(edu, 0, &registers, &size), "registers");
    need(portcullis_device_set_bus_master(edu, 1), "bus master");

    char *out = malloc(BYTES), *in = malloc(BYTES);
    if (!out || !in) return 1;
    memset(out, 0x5a, BYTES);
    uint64_t from, to;
    need(portcullis_map(edu, out, BYTES, PORTCULLIS_TO_DEVICE, &from), "map");
    need(portcullis_map(edu, in, BYTES, PORTCULLIS_FROM_DEVICE, &to), "map");
    copy(registers, from, OWN, 0);
    copy(registers, OWN, to, TO_MEMORY);
    need(portcullis_unmap(edu, from, BYTES), "unmap");
    need(portcullis_unmap(edu, to, BYTES), "unmap");

    int same = memcmp(in, out, BYTES) == 0;
    printf("%d bytes went through the device%s\n", BYTES, same ? "" : ", and are not the same");
    need(portcullis_device_close(edu), "close");
    free(in);
    free(out);
    return same ? 0 : 1;
}
