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
  // Each buffer is mapped, and its unmap takes that back: two system calls.
  PORTCULLIS_STRICT = 0,
  // Buffers of up to 128 KiB are copied, through memory that stays mapped: no system call, and the device never reaches the
  // buffer. Larger ones are mapped.
  PORTCULLIS_BOUNCE = 1,
  // For each size the cheaper of the two, as measured while it runs.
  PORTCULLIS_AUTO = 2,
} portcullis_policy;

// How a queue lets its device reach buffers.
typedef enum portcullis_strategy {
  // Each buffer is mapped and unmapped by itself.
  PORTCULLIS_DIRECT = 0,
  // Each buffer is mapped by itself, and a batch of them is unmapped together.
  PORTCULLIS_BATCHED = 1,
  // As batched, with addresses in order, so that a batch whose buffers came and go in order is one system call.
  PORTCULLIS_RING = 2,
  // Buffers are copied, through memory that stays mapped: no system call.
  PORTCULLIS_COPIED = 3,
  // The cheaper of ring and copied for each size, as measured when the queue is made and while it runs.
  PORTCULLIS_CHEAPER = 4,
} portcullis_strategy;

// What a device does to a buffer.
typedef enum portcullis_direction {
  // It reads it.
  PORTCULLIS_TO_DEVICE = 0,
  // It writes it.
  PORTCULLIS_FROM_DEVICE = 1,
  // Both.
  PORTCULLIS_BIDIRECTIONAL = 2,
} portcullis_direction;

// What a function returns.
typedef enum portcullis_error {
  // It is done.
  PORTCULLIS_OK = 0,
  // An argument is null, or out of its range. Nothing has happened.
  PORTCULLIS_ARGUMENT = 1,
  // The device was not opened: the text says what to do.
  PORTCULLIS_OPEN = 2,
  // There is no memory. Nothing has happened.
  PORTCULLIS_MEMORY = 3,
  // The queue or the pool is full now. Nothing has happened: unmap or commit something, and call again.
  PORTCULLIS_FULL = 4,
  // The kernel maps no more for this process: its limit of locked memory or of mappings is reached. Nothing has happened.
  PORTCULLIS_LIMIT = 5,
  // The buffer was refused: it has no bytes, is too long, or is to be mapped and is not memory of this process; or there are no addresses left for it.
  // Nothing has happened.
  PORTCULLIS_REFUSED = 6,
  // There is no such mapping, or it is of another length. Nothing has happened.
  PORTCULLIS_NOT_MAPPED = 7,
  // **The device may still reach the memory.** The caller neither uses it for anything else nor frees it.
  PORTCULLIS_REACHABLE = 8,
  // A system call failed.
  PORTCULLIS_SYSTEM = 9,
  // The mapping is over for the driver, but **the device may still reach the memory** until the queue's next commit that succeeds.
  PORTCULLIS_WAITS = 10,
  // The mapping has not ended, and can be unmapped again.
  PORTCULLIS_NOT_ENDED = 11,
  // The device was let go of, by portcullis_device_release.
  PORTCULLIS_RELEASED = 12,
} portcullis_error;

// How a device raises interrupts.
typedef enum portcullis_interrupt_kind {
  // The first of the others of which the device has as many as are asked for.
  PORTCULLIS_ANY_INTERRUPT = 0,
  // By writes to memory, as its table of up to 2,048 says.
  PORTCULLIS_MSI_X = 1,
  // By writes to memory, up to 32.
  PORTCULLIS_MSI = 2,
  // By a wire, one.
  PORTCULLIS_INTX = 3,
} portcullis_interrupt_kind;

// A PCI device in the hands of this process, and the mappings for it.
typedef struct portcullis_device portcullis_device;

// A queue of a device: one thread at a time uses it.
typedef struct portcullis_queue portcullis_queue;

// What a device has mapped and done.
typedef struct portcullis_usage {
  // Mappings made by portcullis_map and portcullis_map_list.
  uint64_t maps;
  // Of these, made through copies.
  uint64_t copies;
  // Of these, ended.
  uint64_t unmaps;
  // Calls that were refused, or failed.
  uint64_t errors;
  // Bytes of buffers that the device reaches now.
  uint64_t open_bytes;
  // Bytes beside these, in the same pages, that the device reaches now.
  uint64_t exposed_bytes;
  // Mappings of the kernel's in the address space now, of all of its devices.
  uint64_t kernel_mappings;
  // Bytes of these, all of which are locked in memory.
  uint64_t kernel_bytes;
  // System calls that mapped or unmapped, since the address space was made.
  uint64_t kernel_calls;
} portcullis_usage;

// A piece of a list, in memory.
typedef struct portcullis_piece {
  // Its first byte.
  void *memory;
  // Its bytes.
  size_t len;
} portcullis_piece;

// A piece of a list, as the device is told of it.
typedef struct portcullis_segment {
  // Its first address.
  uint64_t iova;
  // Its bytes.
  uint64_t len;
} portcullis_segment;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// What this thread's last error was, in a sentence; empty where there was none. The text is good until the thread's next error, and is cut after 1,023
// bytes.
const char *portcullis_error_text(void);

// Opens the PCI device `name`, like "0000:01:00.0", in an address space of its own: by iommufd where the kernel has it, else by VFIO's
// type 1. VFIO must have the device; the error's text says how to give it. `policy` is a portcullis_policy, and `address_bits` says how many bits
// of an address the device can put on the bus, 12 to 64.
//
// Writes the device to `out`: portcullis_device_close ends it. The kernel resets the device. A dozen system calls; for PORTCULLIS_AUTO
// no measurement: it measures while it runs.
//
// The caller promises: `name` is a text that ends with a zero, and `out` may be written.
int portcullis_device_open(const char *name,
                           uint32_t policy,
                           uint32_t address_bits,
                           struct portcullis_device **out);

// As portcullis_device_open, in the address space of `sibling`: both devices reach what is mapped for either. Where this one has fewer bits of
// addresses, it does not reach the pool's buffers, and each of its copies takes two system calls: open it first.
//
// The caller promises: as portcullis_device_open, and `sibling` is a device that is open.
int portcullis_device_open_in(const char *name,
                              const struct portcullis_device *sibling,
                              uint32_t policy,
                              uint32_t address_bits,
                              struct portcullis_device **out);

// Closes a device, or nothing where `device` is null: the device loses the bus, all of its mappings end, and the kernel resets it. Its
// memory, its registers and its queues are gone: the queues are freed before.
//
// Returns PORTCULLIS_REACHABLE where the kernel did not take all mappings back: it does when the process ends.
//
// The caller promises: `device` is null or a device that is open, nothing else is called with it at the same time or later, and it has no queue.
int portcullis_device_close(struct portcullis_device *device);

// Writes where the registers behind base address register `number` (0 to 5) are in this process, and how many bytes there are. They are
// there until the device is closed. Six system calls the first time.
//
// Accesses are volatile, of 4 or 8 bytes, and little-endian. After portcullis_device_release all reads are 0, and writes change nothing. A device that was
// pulled out without a warning reads as all bits set; while it does not answer at all, as in a low power state, an access ends the process by SIGBUS. On x86-64 a device
// that acts on a write sees what the CPU has stored before it; on other machines that takes a barrier of the driver's own, for each write that starts a transfer.
//
// The caller promises: `device` is open, and `registers` and `size` may be written.
int portcullis_bar(const struct portcullis_device *device,
                   uint32_t number,
                   uint8_t **registers,
                   size_t *size);

// Reads `len` bytes of PCI's configuration space from `offset` on. Two system calls.
//
// The caller promises: `device` is open, and `len` bytes at `out` may be written.
int portcullis_read_config(const struct portcullis_device *device, uint64_t offset, uint8_t *out, size_t len);

// Writes `len` bytes at `bytes` to PCI's configuration space from `offset` on. The kernel keeps its own from being changed. Two system calls.
//
// The caller promises: `device` is open, and `len` bytes at `bytes` may be read.
int portcullis_write_config(const struct portcullis_device *device,
                            uint64_t offset,
                            const uint8_t *bytes,
                            size_t len);

// Lets the device make accesses of its own (`on` is not 0), or keeps it from them. An open device makes none before. Four system calls.
//
// The caller promises: `device` is open.
int portcullis_device_set_bus_master(const struct portcullis_device *device,
                                     int on);

// Resets the device, which takes up to a second. Its mappings stay.
//
// The caller promises: `device` is open.
int portcullis_device_reset(const struct portcullis_device *device);

// Lets go of a device that is to be unplugged, while it is open: it reaches no memory any more, its registers are memory of zeros, and the kernel goes on with the
// unplug. Each of its interrupts' files can be read once more, as if it was raised: a thread that waits wakes, and finds that calls of the device fail.
//
// Its buffers come back as always: by portcullis_unmap, portcullis_unmap_all and the queues' functions. A buffer is unmapped before it is freed: a device that is opened in this
// address space later reaches all that is still mapped. The device is closed afterwards. Where a child of fork has the device, too, the child's end is its end.
//
// Takes up to a second. PORTCULLIS_SYSTEM: the kernel has no memory for that, or another process has the device, too.
//
// The caller promises: `device` is open.
int portcullis_device_release(const struct portcullis_device *device);

// Writes what the device has mapped and done to `out`. Takes locks, and no system call.
//
// The caller promises: `device` is open, and `out` may be written.
int portcullis_device_usage(const struct portcullis_device *device, struct portcullis_usage *out);

// The library's version, like "0.1.0".
const char *portcullis_version(void);

// Turns on `count` interrupts of a portcullis_interrupt_kind, numbered from 0 on, and writes to `events` an eventfd for each: it can be read when its interrupt was
// raised, and a read takes how often that was, in 8 bytes. None of them blocks. They are the library's to close; portcullis_interrupts_off and the device's
// end turn them off. Two system calls and one for each.
//
// PORTCULLIS_SYSTEM: the device has not as many, or has some turned on already.
//
// The caller promises: `device` is open, and `count` numbers at `events` may be written.
int portcullis_interrupts(const struct portcullis_device *device,
                          uint32_t kind,
                          uint32_t count,
                          int *events);

// Waits until interrupt `number` is raised, for `milliseconds` at the most, or without end where they are negative. Writes to `count` how often it was since the
// last call or read of its file: 0 where the time is over. PORTCULLIS_RELEASED says that the device was let go of, before or meanwhile: each thread that
// waits is told. Two system calls.
//
// The caller promises: `device` is open, and `count` may be written.
int portcullis_interrupt_wait(const struct portcullis_device *device,
                              uint32_t number,
                              int64_t milliseconds,
                              uint64_t *count);

// Turns off what portcullis_interrupts has turned on, and closes its files. One system call for each.
//
// The caller promises: `device` is open, and no thread uses the files, or waits for them.
int portcullis_interrupts_off(const struct portcullis_device *device);

// Lets the wire of an interrupt of PORTCULLIS_INTX raise it again, after the driver has had the device take its wire back. One system call; nothing for
// other kinds.
//
// The caller promises: `device` is open.
int portcullis_interrupt_unmask(const struct portcullis_device *device,
                                uint32_t number);

// Writes to `event` an eventfd that can be read when the kernel asks for the device: it is to be unplugged, or unbound from VFIO. The unplug waits
// for portcullis_device_release or portcullis_device_close. It is the library's to close, with the device.
//
// The caller promises: `device` is open, and `event` may be written.
int portcullis_unplug_request(const struct portcullis_device *device,
                              int *event);

// Lets the device reach `len` bytes at `buffer`, or a copy of them, and writes the address for the device to `iova`. The device does to them
// what `direction`, a portcullis_direction, says. A buffer that is mapped and not copied is mapped with the rest of its pages.
//
// Until portcullis_unmap has succeeded the buffer stays where it is, and is not freed. What the device has written to a copy is in the buffer after a
// portcullis_sync_for_cpu or the unmap. No thread touches the buffer while this function, a sync or the unmap runs.
//
// A copy takes the copying; a mapping one system call. May allocate.
//
// The caller promises: `device` is open, `iova` may be written, and what is said of the buffer holds.
int portcullis_map(const struct portcullis_device *device,
                   void *buffer,
                   size_t len,
                   uint32_t direction,
                   uint64_t *iova);

// Lets the device reach `count` pieces in one range of addresses. Writes at most `count` segments to `out`, which has room for as many, and how many
// to `used`: these are what the device is told, as pieces that touch are one. The list ends as a whole, by portcullis_unmap of all addresses
// from the first byte of the first segment to the last byte of the last, gaps included.
//
// One system call for each run of memory. Allocates. Else as portcullis_map.
//
// The caller promises: as portcullis_map, for each piece; and `pieces`, `out` and `used` are what is said of them.
int portcullis_map_list(const struct portcullis_device *device,
                        const struct portcullis_piece *pieces,
                        size_t count,
                        uint32_t direction,
                        struct portcullis_segment *out,
                        size_t *used);

// Ends the mapping of `len` bytes at `iova`. When it has succeeded the device does not reach the buffer, and the buffer has what the device wrote.
//
// It may be called while the device is still working, as after a transfer that failed: the device reaches the buffer no more.
//
// PORTCULLIS_NOT_MAPPED says that no such mapping of this device is there, or that it has another length: nothing is changed. After
// PORTCULLIS_REACHABLE the mapping is over, but the memory must not be used again or freed: the kernel has not taken it back.
//
// A copy takes the copying; a mapping one system call. Allocates nothing.
//
// The caller promises: `device` is open, and no other call for this mapping runs at the same time.
int portcullis_unmap(const struct portcullis_device *device,
                     uint64_t iova,
                     uint64_t len);

// Lets the CPU see what the device has written to `len` bytes at `iova`, anywhere inside of a mapping, which goes on. No system call; a copy
// takes the copying.
//
// The caller promises: as portcullis_unmap.
int portcullis_sync_for_cpu(const struct portcullis_device *device,
                            uint64_t iova,
                            uint64_t len);

// Lets the device see what the CPU has written to `len` bytes at `iova`, anywhere inside of a mapping. No system call; a copy takes the copying.
// For a device that only writes it copies nothing.
//
// The caller promises: as portcullis_unmap.
int portcullis_sync_for_device(const struct portcullis_device *device,
                               uint64_t iova,
                               uint64_t len);

// Ends all mappings of the device that portcullis_map and portcullis_map_list have made, without copying anything to the buffers: for a device that was reset
// or is gone. Writes to `count`, unless it is null, how many there were.
//
// The caller promises: `device` is open, and no other call for its mappings runs at the same time.
int portcullis_unmap_all(const struct portcullis_device *device,
                         uint64_t *count);

// Allocates `len` zeroed bytes, in whole pages, that driver and device share until portcullis_free: for descriptor rings, and for buffers that are used
// again and again. Writes where they are for the CPU to `memory`, and for the device to `iova`. The device reads and writes them at any time,
// so the driver's accesses are atomic or volatile. One system call.
//
// The caller promises: `device` is open, and `memory` and `iova` may be written.
int portcullis_alloc(const struct portcullis_device *device,
                     size_t len,
                     void **memory,
                     uint64_t *iova);

// Frees memory of portcullis_alloc. When it has succeeded the device does not reach it. PORTCULLIS_NOT_MAPPED says that this is no such
// memory, or was freed: nothing is changed. After PORTCULLIS_REACHABLE it is never freed. One system call.
//
// The caller promises: `device` is open, and nothing uses the memory.
int portcullis_free(const struct portcullis_device *device,
                    void *memory);

// Makes a queue of a device, by a portcullis_strategy. A ring (and PORTCULLIS_CHEAPER) is for up to `descriptors` buffers at once, each of which touches
// pages of `bytes` bytes, 4096 for one within a page; for the other strategies both are 0. `batch` buffers end together: 1 to 256, or 0 for 32, and 64 for the strategies with a ring;
// PORTCULLIS_DIRECT and PORTCULLIS_COPIED have no batches, and take 0 alone.
//
// Writes the queue to `out`: portcullis_queue_free ends it. PORTCULLIS_CHEAPER measures for some milliseconds.
//
// The caller promises: `device` is open, and stays so until the queue is freed; `out` may be written.
int portcullis_queue_new(const struct portcullis_device *device,
                         uint32_t strategy,
                         uint32_t descriptors,
                         uint64_t bytes,
                         size_t batch,
                         struct portcullis_queue **out);

// Frees a queue, or nothing where `queue` is null. What waits is committed. What is still mapped ends now.
//
// After PORTCULLIS_REACHABLE the memory of what waited or was mapped must not be used again or freed.
//
// The caller promises: `queue` is null, or is not used at the same time or later.
int portcullis_queue_free(struct portcullis_queue *queue);

// Lets the queue's device reach `len` bytes at `buffer`, or a copy of them, as portcullis_map does. Writes the address for the device to `iova`, and the
// number of the mapping to `mapping`.
//
// Until a function has said that it is the driver's again the buffer stays where it is, and is not freed.
//
// The caller promises: as portcullis_map; and no other thread uses the queue during the call.
int portcullis_queue_map(struct portcullis_queue *queue,
                         void *buffer,
                         size_t len,
                         uint32_t direction,
                         uint64_t *iova,
                         uint64_t *mapping);

// Ends a mapping, or has it wait for its batch. Writes to `ended` how many mappings of the queue are over by this call, so that their
// buffers are the driver's again: 0 while this one waits; 1 for it alone, by strategies that do not wait; or its whole batch: all that waited, in the order of
// their unmaps.
//
// PORTCULLIS_NOT_MAPPED: the queue has no such mapping, and nothing is changed. PORTCULLIS_WAITS: it waits for the next commit that succeeds.
// PORTCULLIS_NOT_ENDED: it can be unmapped again. PORTCULLIS_REACHABLE: its memory must not be used again or freed.
//
// The caller promises: No other thread uses the queue during the call.
int portcullis_queue_unmap(struct portcullis_queue *queue,
                           uint64_t mapping,
                           size_t *ended);

// Ends all that waits, for a queue that falls idle. Writes to `ended` how many mappings that were.
//
// After PORTCULLIS_WAITS all of it goes on waiting, and can be committed again.
//
// The caller promises: No other thread uses the queue during the call.
int portcullis_queue_commit(struct portcullis_queue *queue, size_t *ended);

// Lets the CPU see what the device has written to `len` bytes of a mapping, from `offset` on.
//
// A part that is not of the mapping is an error by every strategy, and nothing is copied.
//
// The caller promises: No other thread uses the queue during the call.
int portcullis_queue_sync_for_cpu(struct portcullis_queue *queue, uint64_t mapping, uint64_t offset, uint64_t len);

// Lets the device see what the CPU has written to `len` bytes of a mapping, from `offset` on.
//
// A part that is not of the mapping is an error by every strategy, and nothing is copied.
//
// The caller promises: No other thread uses the queue during the call.
int portcullis_queue_sync_for_device(struct portcullis_queue *queue, uint64_t mapping, uint64_t offset, uint64_t len);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PORTCULLIS_H */
