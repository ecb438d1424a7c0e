// Portcullis: DMA remapping for drivers in C and C++ on Linux. Licence: Apache-2.0 OR MIT.
//
// A device is opened by its PCI address, with how it is protected. portcullis_map lets it reach a buffer, and portcullis_unmap ends that.
//
// Every function that can fail returns PORTCULLIS_OK or an error's code, and portcullis_error_text says what this thread's last error was,
// in a sentence, with what to do. What a function is to write to a pointer of the caller's it writes when it succeeds, and leaves alone
// when it fails. Pointers are null only where that is said.
//
// The library has a thread of its own for its timers. A child of fork calls no function but those that open devices.
//
// Functions of a device may be called from any number of threads at once, those of a queue from one at a time; none from a handler of signals.


#ifndef PORTCULLIS_H
#define PORTCULLIS_H

#include <stddef.h>
#include <stdint.h>

// How a device is kept from memory that is not mapped for it.
typedef enum portcullis_policy {
  // Each buffer is mapped, and unmapped again: two system calls.
  PORTCULLIS_STRICT = 0,
  // Buffers of up to 128 KiB are copied, through memory that stays mapped: no system call, and the device never reaches the buffer.
  // Larger ones are mapped.
  PORTCULLIS_BOUNCE = 1,
  // For each size the cheaper of the two, as measured at run time.
  PORTCULLIS_AUTO = 2,
} portcullis_policy;

// How a queue lets its device reach buffers.
typedef enum portcullis_strategy {
  // Each buffer is mapped and unmapped individually.
  PORTCULLIS_DIRECT = 0,
  // Each buffer is mapped individually, and buffers are unmapped in batches.
  PORTCULLIS_BATCHED = 1,
  // As batched, with consecutive addresses, so that a batch of buffers in order is one system call.
  PORTCULLIS_RING = 2,
  // Buffers are copied, through memory that stays mapped: no system call.
  PORTCULLIS_COPIED = 3,
  // The cheaper of ring and copied for each size, as measured when the queue is made and at run time.
  PORTCULLIS_CHEAPER = 4,
} portcullis_strategy;

// How a device accesses a buffer.
typedef enum portcullis_direction {
  // The device reads it.
  PORTCULLIS_TO_DEVICE = 0,
  // The device writes it.
  PORTCULLIS_FROM_DEVICE = 1,
  // Both.
  PORTCULLIS_BIDIRECTIONAL = 2,
} portcullis_direction;

// The result of a function.
typedef enum portcullis_error {
  // Success.
  PORTCULLIS_OK = 0,
  // An argument is null, or out of its range. Nothing has happened.
  PORTCULLIS_ARGUMENT = 1,
  // The device was not opened: the text says what to do.
  PORTCULLIS_OPEN = 2,
  // Out of memory. Nothing has happened.
  PORTCULLIS_MEMORY = 3,
  // The queue or the pool is full. Nothing has happened: unmap or commit something, and call again.
  PORTCULLIS_FULL = 4,
  // The kernel's limit of locked memory or of mappings is reached. Nothing has happened.
  PORTCULLIS_LIMIT = 5,
  // The buffer was refused: it has no bytes, is too long, or is to be mapped and is not memory of this process; or no addresses are left
  // for it. Nothing has happened.
  PORTCULLIS_REFUSED = 6,
  // There is no such mapping, or it is of another length. Nothing has happened.
  PORTCULLIS_NOT_MAPPED = 7,
  // **The device may still reach the memory.** The caller must neither reuse nor free it.
  PORTCULLIS_REACHABLE = 8,
  // A system call failed.
  PORTCULLIS_SYSTEM = 9,
  // The mapping is over for the driver, but **the device may still reach the memory** until the queue's next successful commit.
  PORTCULLIS_WAITS = 10,
  // The mapping has not ended, and can be unmapped again.
  PORTCULLIS_NOT_ENDED = 11,
  // The device was released by portcullis_device_release.
  PORTCULLIS_RELEASED = 12,
} portcullis_error;

// How a device raises interrupts.
typedef enum portcullis_interrupt_kind {
  // The first of the other kinds of which the device has enough.
  PORTCULLIS_ANY_INTERRUPT = 0,
  // Messages: up to 2,048, by its MSI-X table.
  PORTCULLIS_MSI_X = 1,
  // Messages, up to 32.
  PORTCULLIS_MSI = 2,
  // One line.
  PORTCULLIS_INTX = 3,
} portcullis_interrupt_kind;

// A PCI device that this process drives, and its mappings.
typedef struct portcullis_device portcullis_device;

// A queue of a device: one thread at a time uses it.
typedef struct portcullis_queue portcullis_queue;

// The mappings of a device, and its counts.
typedef struct portcullis_usage {
  // Mappings made by portcullis_map and portcullis_map_list.
  uint64_t maps;
  // Of these, copied ones.
  uint64_t copies;
  // Of these, ended ones.
  uint64_t unmaps;
  // Refused or failed calls.
  uint64_t errors;
  // Bytes of buffers that the device reaches now.
  uint64_t open_bytes;
  // Other bytes of their pages, which the device reaches now.
  uint64_t exposed_bytes;
  // The kernel's current mappings in the address space, of all its devices.
  uint64_t kernel_mappings;
  // Their bytes, all of which are locked in memory.
  uint64_t kernel_bytes;
  // System calls of maps and unmaps, since the address space was made.
  uint64_t kernel_calls;
} portcullis_usage;

// A piece of memory in a list.
typedef struct portcullis_piece {
  // Its address.
  void *memory;
  // Its length in bytes.
  size_t len;
} portcullis_piece;

// A piece of a list for the device.
typedef struct portcullis_segment {
  // Its IOVA.
  uint64_t iova;
  // Its length in bytes.
  uint64_t len;
} portcullis_segment;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The text of this thread's last error, in a sentence; empty if there was none. Valid until the thread's next error; truncated after 1,023
// bytes.
const char *portcullis_error_text(void);

// Opens the PCI device `name`, like "0000:01:00.0", in an address space of its own: by iommufd if the kernel has it, else by type 1
// of VFIO. The device must be bound to VFIO; the error's text says how. `policy` is a portcullis_policy, and `address_bits` is the width
// of the device's addresses, 12 to 64.
//
// Writes the device to `out`: portcullis_device_close ends it. The kernel resets the device. Makes a dozen system calls. PORTCULLIS_AUTO
// measures at run time, not here.
//
// The caller promises: 1. `name` is a zero-terminated string. 2. `out` may be written.
int portcullis_device_open(const char *name,
                           uint32_t policy,
                           uint32_t address_bits,
                           struct portcullis_device **out);

// As portcullis_device_open, in the address space of `sibling`: both devices reach the mappings of either. If this one has narrower
// addresses, it does not reach the pool's buffers, and each of its copies takes two system calls: open it first.
//
// The caller promises: 1. As portcullis_device_open, 1 and 2. 2. `sibling` is an open device.
int portcullis_device_open_in(const char *name,
                              const struct portcullis_device *sibling,
                              uint32_t policy,
                              uint32_t address_bits,
                              struct portcullis_device **out);

// Closes a device, or does nothing if `device` is null: turns bus mastering off, ends all mappings, and makes the kernel reset the device.
// Its memory and its registers are gone, and its queues must have been freed.
//
// Returns PORTCULLIS_REACHABLE if the kernel did not remove all mappings: it does when the process ends.
//
// The caller promises: 1. `device` is null or an open device. 2. No other call with it runs at the same time or later. 3. It has no queue.
int portcullis_device_close(struct portcullis_device *device);

// Writes the address of the registers behind base address register `number` (0 to 5), and their size in bytes. They exist until the device
// is closed. Six system calls the first time.
//
// Accesses are volatile, of 4 or 8 bytes, and little-endian. After portcullis_device_release all reads are 0, and writes change nothing.
// After surprise removal all bits of a read are set; while the device does not answer at all, as in a low power state, an access raises
// SIGBUS. On x86-64 a device that acts on a write sees the CPU's earlier stores; on other machines the driver needs a barrier for each
// write that starts a transfer.
//
// The caller promises: 1. `device` is open. 2. `registers` and `size` may be written.
int portcullis_bar(const struct portcullis_device *device,
                   uint32_t number,
                   uint8_t **registers,
                   size_t *size);

// Reads `len` bytes of PCI configuration space from `offset` on. Two system calls.
//
// The caller promises: 1. `device` is open. 2. `len` bytes at `out` may be written.
int portcullis_read_config(const struct portcullis_device *device, uint64_t offset, uint8_t *out, size_t len);

// Writes `len` bytes at `bytes` to PCI configuration space from `offset` on. The kernel protects its own fields. Two system calls.
//
// The caller promises: 1. `device` is open. 2. `len` bytes at `bytes` may be read.
int portcullis_write_config(const struct portcullis_device *device,
                            uint64_t offset,
                            const uint8_t *bytes,
                            size_t len);

// Turns bus mastering on (`on` is not 0) or off. An open device makes no accesses before. Four system calls.
//
// The caller promises: 1. `device` is open.
int portcullis_device_set_bus_master(const struct portcullis_device *device, int on);

// Resets the device, which takes up to a second. Its mappings stay.
//
// The caller promises: 1. `device` is open.
int portcullis_device_reset(const struct portcullis_device *device);

// Releases a device that is to be unplugged, while it stays open: it no longer reaches memory, its registers become zeroed memory, and the
// kernel continues the unplug. Each of its interrupts' files can be read once more: waiting threads wake, and find that calls of the
// device fail.
//
// Its buffers are returned as always: by portcullis_unmap, portcullis_unmap_all and the queues' functions. Unmap a buffer before freeing
// it: a device that is opened in this address space later reaches all remaining mappings. Close the device afterwards. If a child of fork
// has the device, too, it goes on until the child ends.
//
// Takes up to a second. PORTCULLIS_SYSTEM: the kernel has no memory for that, or another process has the device, too.
//
// The caller promises: 1. `device` is open.
int portcullis_device_release(const struct portcullis_device *device);

// Writes the device's mappings and counts to `out`. Takes locks, and makes no system call.
//
// The caller promises: 1. `device` is open. 2. `out` may be written.
int portcullis_device_usage(const struct portcullis_device *device, struct portcullis_usage *out);

// The library's version, like "0.1.0".
const char *portcullis_version(void);

// Turns on `count` interrupts of a portcullis_interrupt_kind, numbered from 0, and writes an eventfd for each to `events`: it is readable
// after its interrupt was raised, and a read returns how often, in 8 bytes. It is non-blocking. The library closes it;
// portcullis_interrupts_off and closing the device turn the interrupts off. Two system calls and one for each.
//
// PORTCULLIS_SYSTEM: the device has too few, or some are already on.
//
// The caller promises: 1. `device` is open. 2. `count` numbers at `events` may be written.
int portcullis_interrupts(const struct portcullis_device *device,
                          uint32_t kind,
                          uint32_t count,
                          int *events);

// Waits until interrupt `number` is raised, for at most `milliseconds`, or without limit if negative. Writes to `count` how often it was
// since the last call or read of its file: 0 after the time limit. PORTCULLIS_RELEASED: the device was released, before or during the
// wait; all waiting threads return. Two system calls.
//
// The caller promises: 1. `device` is open. 2. `count` may be written.
int portcullis_interrupt_wait(const struct portcullis_device *device,
                              uint32_t number,
                              int64_t milliseconds,
                              uint64_t *count);

// Turns off the interrupts of portcullis_interrupts, and closes their files. One system call for each.
//
// The caller promises: 1. `device` is open. 2. No thread uses the files, or waits for them.
int portcullis_interrupts_off(const struct portcullis_device *device);

// Unmasks an interrupt of PORTCULLIS_INTX, after the driver has made the device deassert it. One system call; nothing for other kinds.
//
// The caller promises: 1. `device` is open.
int portcullis_interrupt_unmask(const struct portcullis_device *device,
                                uint32_t number);

// Writes to `event` an eventfd that is readable when the kernel requests the device: it is to be unplugged, or unbound from VFIO. The
// unplug waits for portcullis_device_release or portcullis_device_close. The library closes it with the device.
//
// The caller promises: 1. `device` is open. 2. `event` may be written.
int portcullis_unplug_request(const struct portcullis_device *device,
                              int *event);

// Lets the device reach `len` bytes at `buffer`, or a copy of them, and writes the IOVA to `iova`. The device accesses them by
// `direction`, a portcullis_direction. A buffer that is mapped instead of copied is mapped with the rest of its pages.
//
// Until portcullis_unmap has succeeded the buffer is neither moved nor freed. The device's writes to a copy are in the buffer after a
// portcullis_sync_for_cpu or the unmap. No thread accesses the buffer while this function, a sync or the unmap runs.
//
// Costs the copy, or one system call for a mapping. May allocate.
//
// The caller promises: 1. `device` is open. 2. `iova` may be written. 3. The above holds for the buffer.
int portcullis_map(const struct portcullis_device *device,
                   void *buffer,
                   size_t len,
                   uint32_t direction,
                   uint64_t *iova);

// Lets the device reach `count` pieces in one range of addresses. Writes at most `count` segments to `out`, which has room for as many,
// and their number to `used`: these are for the device; adjacent pieces are merged. The list ends as a whole, by portcullis_unmap of all
// addresses from the first byte of the first segment to the last byte of the last, including gaps.
//
// One system call for each run of memory. Allocates. Otherwise as portcullis_map.
//
// The caller promises: 1. As portcullis_map, for each piece. 2. `pieces`, `out` and `used` are as described.
int portcullis_map_list(const struct portcullis_device *device,
                        const struct portcullis_piece *pieces,
                        size_t count,
                        uint32_t direction,
                        struct portcullis_segment *out,
                        size_t *used);

// Ends the mapping of `len` bytes at `iova`. After success the device does not reach the buffer, which has the device's writes.
//
// It may be called while the device is still working, such as after a failed transfer: the device no longer reaches the buffer.
//
// PORTCULLIS_NOT_MAPPED: this device has no such mapping, or it has another length; nothing has changed. After PORTCULLIS_REACHABLE the
// mapping is over, but the memory must be neither reused nor freed: the kernel has not removed the mapping.
//
// Costs the copy, or one system call for a mapping. Does not allocate.
//
// The caller promises: 1. `device` is open. 2. No other call for this mapping runs at the same time.
int portcullis_unmap(const struct portcullis_device *device,
                     uint64_t iova,
                     uint64_t len);

// Shows the CPU the device's writes to `len` bytes at `iova`, anywhere inside a mapping, which continues. No system call; costs the copy.
//
// The caller promises: as portcullis_unmap.
int portcullis_sync_for_cpu(const struct portcullis_device *device,
                            uint64_t iova,
                            uint64_t len);

// Shows the device the CPU's writes to `len` bytes at `iova`, anywhere inside a mapping. No system call; costs the copy. Copies nothing
// for a device that only writes it.
//
// The caller promises: as portcullis_unmap.
int portcullis_sync_for_device(const struct portcullis_device *device,
                               uint64_t iova,
                               uint64_t len);

// Ends all of the device's mappings by portcullis_map and portcullis_map_list, without copying to the buffers: for a device that was reset
// or is gone. Writes their number to `count`, unless it is null.
//
// The caller promises: 1. `device` is open. 2. No other call for its mappings runs at the same time. 3. `count` is null, or may be written.
int portcullis_unmap_all(const struct portcullis_device *device,
                         uint64_t *count);

// Allocates `len` zeroed bytes, in whole pages, of coherent memory until portcullis_free: for descriptor rings, and for long-lived
// buffers. Writes its address for the CPU to `memory`, and its IOVA to `iova`. The device accesses it at any time, so the driver's
// accesses are atomic or volatile. One system call.
//
// The caller promises: 1. `device` is open. 2. `memory` and `iova` may be written.
int portcullis_alloc(const struct portcullis_device *device,
                     size_t len,
                     void **memory,
                     uint64_t *iova);

// Frees memory of portcullis_alloc. After success the device does not reach it. PORTCULLIS_NOT_MAPPED: it is no such memory, or was freed;
// nothing has changed. After PORTCULLIS_REACHABLE it is never freed. One system call.
//
// The caller promises: 1. `device` is open. 2. Nothing uses the memory.
int portcullis_free(const struct portcullis_device *device,
                    void *memory);

// Makes a queue of a device, by a portcullis_strategy. A ring (and PORTCULLIS_CHEAPER) is for up to `descriptors` buffers at once, each of
// which touches pages of `bytes` bytes, 4096 for one within a page; for the other strategies both are 0. `batch` buffers end together: 1
// to 256, or 0 for 32, and 64 for the strategies with a ring; PORTCULLIS_DIRECT and PORTCULLIS_COPIED have no batches, and accept only 0.
//
// Writes the queue to `out`: portcullis_queue_free frees it. PORTCULLIS_CHEAPER measures for some milliseconds.
//
// The caller promises: 1. `device` is open, and stays so until the queue is freed. 2. `out` may be written.
int portcullis_queue_new(const struct portcullis_device *device,
                         uint32_t strategy,
                         uint32_t descriptors,
                         uint64_t bytes,
                         size_t batch,
                         struct portcullis_queue **out);

// Frees a queue, or does nothing if `queue` is null. Commits pending unmaps, and ends remaining mappings.
//
// After PORTCULLIS_REACHABLE the memory of pending or mapped buffers must be neither reused nor freed.
//
// The caller promises: 1. `queue` is null, or of portcullis_queue_new. 2. It is not used at the same time or later.
int portcullis_queue_free(struct portcullis_queue *queue);

// Lets the queue's device reach `len` bytes at `buffer`, or a copy of them, as portcullis_map does. Writes the IOVA to `iova`, and the
// number of the mapping to `mapping`.
//
// Until a function has returned the buffer to the driver, it is neither moved nor freed.
//
// The caller promises: 1. As portcullis_map. 2. No other thread uses the queue during the call.
int portcullis_queue_map(struct portcullis_queue *queue,
                         void *buffer,
                         size_t len,
                         uint32_t direction,
                         uint64_t *iova,
                         uint64_t *mapping);

// Ends a mapping, or adds it to its batch. Writes to `ended` how many mappings of the queue this call has ended, whose buffers are the
// driver's again: 0 while this one is pending; 1 for it alone, with strategies without batches; or its whole batch: all pending ones, in
// the order of their unmaps.
//
// PORTCULLIS_NOT_MAPPED: the queue has no such mapping, and nothing has changed. PORTCULLIS_WAITS: it is pending until the next successful
// commit. PORTCULLIS_NOT_ENDED: it can be unmapped again. PORTCULLIS_REACHABLE: its memory must be neither reused nor freed.
//
// The caller promises: 1. No other thread uses the queue during the call. 2. `ended` may be written.
int portcullis_queue_unmap(struct portcullis_queue *queue,
                           uint64_t mapping,
                           size_t *ended);

// Ends all pending mappings, for a queue that becomes idle. Writes their number to `ended`.
//
// After PORTCULLIS_WAITS all of them stay pending, and can be committed again.
//
// The caller promises: 1. No other thread uses the queue during the call. 2. `ended` may be written.
int portcullis_queue_commit(struct portcullis_queue *queue, size_t *ended);

// Shows the CPU the device's writes to `len` bytes of a mapping, from `offset` on.
//
// A part outside the mapping is an error with every strategy, and nothing is copied.
//
// The caller promises: 1. No other thread uses the queue during the call.
int portcullis_queue_sync_for_cpu(struct portcullis_queue *queue, uint64_t mapping, uint64_t offset, uint64_t len);

// Shows the device the CPU's writes to `len` bytes of a mapping, from `offset` on.
//
// A part outside the mapping is an error with every strategy, and nothing is copied.
//
// The caller promises: 1. No other thread uses the queue during the call.
int portcullis_queue_sync_for_device(struct portcullis_queue *queue, uint64_t mapping, uint64_t offset, uint64_t len);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PORTCULLIS_H */
