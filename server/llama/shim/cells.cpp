#include "cells.h"

#include "ggml-backend.h"
#include "llama-ext.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {

thread_local bool zero_lazily = false;

// Zeroes memory that is this process's alone by giving its whole pages back. False: it cannot be, and nothing has changed.
bool give_back(void * memory, size_t size) {
    const auto page  = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const auto end   = begin + size;
    const auto first = (begin + page - 1) / page * page;
    const auto last  = end / page * page;
    // Pages that are locked into memory are not given back.
    if (first >= last || madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED) != 0) {
        return false;
    }
    memset(memory, 0, first - begin);
    memset(reinterpret_cast<void *>(last), 0, end - last);
    return true;
}

} // namespace

extern "C" {

// Linked with --wrap=ggml_backend_buffer_clear, llama.cpp calls the function below, and __real_ is ggml's own. Linked without,
// nobody calls it and __real_ is null.
void __real_ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) __attribute__((weak));
void __wrap_ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);

void __wrap_ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    // Of this type is what the C library gave; others may be a file's, or a device's.
    const bool is_own = ggml_backend_buffer_get_type(buffer) == ggml_backend_cpu_buffer_type();
    if (value == 0 && zero_lazily && is_own &&
        give_back(ggml_backend_buffer_get_base(buffer), ggml_backend_buffer_get_size(buffer))) {
        return;
    }
    if (__real_ggml_backend_buffer_clear != nullptr) {
        __real_ggml_backend_buffer_clear(buffer, value);
    }
}

void gantry_zero_lazily(bool lazily) { zero_lazily = lazily; }

bool gantry_can_zero_lazily(void) { return __real_ggml_backend_buffer_clear != nullptr; }

uint64_t gantry_cell_bytes(const llama_context * ctx) {
    try {
        uint64_t bytes = 0;
        for (const auto & [type, memory] : llama_get_memory_breakdown(ctx)) {
            bytes += ggml_backend_buft_is_host(type) ? memory.context : 0;
        }
        return bytes;
    } catch (...) {
        return 0;
    }
}

} // extern "C"
