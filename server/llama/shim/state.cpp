#include "state.h"

#include "ggml-backend.h"
#include "llama-io.h"
#include "llama-memory.h"

#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

// llama_context's LLAMA_STATE_SEQ_MAGIC, which stands before what its memory writes.
constexpr uint32_t STATE_MAGIC = 0xaf143cd8;

// Passes on what llama_kv_cache::state_write writes, but of the cells with a position that is not wanted. What it writes
// stands in src/layout.rs; a state that is otherwise is refused here or, by its size, there.
class range_writer : public llama_io_write_i {
  public:
    range_writer(uint8_t * dst, size_t size, llama_pos from, llama_pos to) : dst(dst), size(size), from(from), to(to) {}

    void write(const void * src, size_t n) override {
        switch (part) {
            case PART_STREAMS:
                put(src, n);
                part = PART_COUNT;
                return;
            case PART_COUNT: // of a stream's cells
                count    = number<uint32_t>(src, n);
                count_at = written;
                put(src, n);
                left = count * 3;
                part = count > 0 ? PART_CELLS : PART_COUNT;
                return;
            case PART_CELLS: // of each its position, the number of its sequences, and the one
                write_cell(number<int32_t>(src, n));
                return;
            case PART_ROWS:
                put(src, n);
                before_last = last;
                last        = n == sizeof(uint64_t) ? number<uint64_t>(src, n) : number<uint32_t>(src, n);
                // A row of so many bytes; or where they are transposed elements of so many, and how many a row has.
                unit = n == sizeof(uint64_t) ? last : before_last;
                return;
        }
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        if (part != PART_ROWS || unit == 0 || n % unit != 0 || n / unit > count - cell) {
            throw std::runtime_error("not a state of rows");
        }
        const size_t end = cell + n / unit;
        for (const auto & run : wanted) {
            const size_t first = run.first > cell ? run.first : cell;
            const size_t past  = run.second < end ? run.second : end;
            if (first < past) {
                const size_t bytes = (past - first) * unit;
                ggml_backend_tensor_get(tensor, room(bytes), offset + (first - cell) * unit, bytes);
            }
        }
        cell = end == count ? 0 : end;
    }

    size_t n_bytes() override { return written; }

  private:
    enum { PART_STREAMS, PART_COUNT, PART_CELLS, PART_ROWS } part = PART_STREAMS;

    uint8_t * dst;
    size_t    size;
    llama_pos from;
    llama_pos to;
    size_t    written = 0;

    size_t   count    = 0; // cells of the stream
    size_t   count_at = 0; // where that is written
    size_t   left     = 0; // numbers of the cells that are yet to come
    size_t   kept     = 0; // cells that are wanted
    bool     keeps    = false;
    size_t   cell     = 0; // the next of the rows
    uint64_t last = 0, before_last = 0, unit = 0;
    std::vector<std::pair<size_t, size_t>> wanted;

    template <typename T> static T number(const void * src, size_t n) {
        T value;
        if (n != sizeof(value)) {
            throw std::runtime_error("not a state of rows");
        }
        std::memcpy(&value, src, sizeof(value));
        return value;
    }

    uint8_t * room(size_t n) {
        if (n > size - written) {
            throw std::runtime_error("no room for the state");
        }
        written += n;
        return dst + written - n;
    }

    void put(const void * src, size_t n) { std::memcpy(room(n), src, n); }

    void write_cell(int32_t value) {
        const size_t index = count - (left + 2) / 3;
        if (left % 3 == 0) {
            keeps = value >= from && value < to;
            if (keeps && !wanted.empty() && wanted.back().second == index) {
                wanted.back().second++;
            } else if (keeps) {
                wanted.emplace_back(index, index + 1);
            }
            kept += keeps ? 1 : 0;
        }
        if (keeps) {
            put(&value, sizeof(value));
        }
        if (--left == 0) {
            const uint32_t cells = static_cast<uint32_t>(kept);
            std::memcpy(dst + count_at, &cells, sizeof(cells));
            part = PART_ROWS;
        }
    }
};

} // namespace

extern "C" size_t gantry_state_range(llama_context * ctx, llama_seq_id seq_id, llama_pos from, llama_pos to, uint8_t * dst,
                                     size_t size) {
    try {
        const size_t head = sizeof(STATE_MAGIC) + sizeof(seq_id);
        if (size < head) {
            return 0;
        }
        // Of a GPU: what is computed there is to have ended.
        llama_synchronize(ctx);
        std::memcpy(dst, &STATE_MAGIC, sizeof(STATE_MAGIC));
        std::memcpy(dst + sizeof(STATE_MAGIC), &seq_id, sizeof(seq_id));
        range_writer writer(dst + head, size - head, from, to);
        llama_get_memory(ctx)->state_write(writer, seq_id, 0);
        return head + writer.n_bytes();
    } catch (...) {
        return 0;
    }
}
