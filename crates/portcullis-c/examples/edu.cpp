// A driver of QEMU's device edu in C++: eight buffers go through a ring of mappings, whose batches end together.
//
//   c++ edu.cpp $(pkg-config --cflags --libs portcullis) -o edu && ./edu 0000:00:0a.0
//
// Licence: Apache-2.0 OR MIT.
#include <portcullis.h>

#include <array>
#include <cstdio>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>

static void need(int code) {
    if (code != PORTCULLIS_OK) throw std::runtime_error(portcullis_error_text());
}

struct Close {
    void operator()(portcullis_device *device) const { portcullis_device_close(device); }
    void operator()(portcullis_queue *queue) const { portcullis_queue_free(queue); }
};

constexpr std::size_t page = 4096;
struct alignas(page) Buffer {
    std::array<std::uint8_t, page> bytes{};
};

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s 0000:00:0a.0\n", argv[0]);
        return 2;
    }
    // Outlive the queue and the device, whatever happens: until then the device may reach them.
    std::deque<std::unique_ptr<Buffer>> waiting;
    try {
        portcullis_device *opened = nullptr;
        need(portcullis_device_open(argv[1], PORTCULLIS_STRICT, 28, &opened));
        std::unique_ptr<portcullis_device, Close> edu(opened);
        std::uint8_t *registers = nullptr;
        std::size_t size = 0;
        need(portcullis_bar(edu.get(), 0, &registers, &size));
        need(portcullis_device_set_bus_master(edu.get(), 1));
        portcullis_queue *made = nullptr;
        need(portcullis_queue_new(edu.get(), PORTCULLIS_RING, 8, page, 4, &made));
        std::unique_ptr<portcullis_queue, Close> ring(made);

        auto set = [&](std::size_t at, std::uint64_t value) {
            *reinterpret_cast<volatile std::uint64_t *>(registers + at) = value;
        };
        std::size_t wrong = 0, back = 0;
        for (std::uint8_t round = 1; round <= 8; round++) {
            auto buffer = std::make_unique<Buffer>();
            buffer->bytes.fill(round);
            std::uint64_t iova = 0, mapping = 0;
            Buffer *bytes = buffer.get();
            waiting.push_back(std::move(buffer));
            need(portcullis_queue_map(ring.get(), bytes, page, PORTCULLIS_TO_DEVICE, &iova, &mapping));
            set(0x80, iova);
            set(0x88, 0x40000);
            set(0x90, page);
            set(0x98, 1);
            while (*reinterpret_cast<volatile std::uint64_t *>(registers + 0x98) & 1) {
            }
            std::size_t ended = 0;
            need(portcullis_queue_unmap(ring.get(), mapping, &ended));
            back += ended;
            if (ended > waiting.size()) wrong++;
            while (ended-- > 0) waiting.pop_front();
        }
        std::printf("%zu buffers went through the ring, %zu are in its last batch\n", back, waiting.size());
        return wrong == 0 && back == 8 && waiting.empty() ? 0 : 1;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
        return 1;
    }
}
