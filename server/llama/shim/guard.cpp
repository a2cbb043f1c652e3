#include "guard.h"
#include "shim.h"

#include <malloc.h>
#include <pthread.h>
#include <time.h>

#include <cstdlib>
#include <exception>

#include <unistd.h>

namespace {

// Allocations between two looks at the clock, which is a system call.
constexpr uint32_t CALLS_PER_LOOK = 256;
// An allocation from here on is worth a look of its own.
constexpr size_t LARGE_BYTES = 64 * 1024;
// What the code may still take to say what went wrong and where.
constexpr uint32_t GRACE_CALLS = 4096;
constexpr int64_t  GRACE_BYTES = 1024 * 1024;
// What is left of a stack when its limit is reached, for the same; of a small stack a quarter.
constexpr size_t STACK_RESERVE_BYTES = 1024 * 1024;

thread_local gantry::guard * current = nullptr;

int64_t cpu_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// The lowest address that the calling thread's stack may reach, 0 where that is unknown.
uintptr_t lowest_of_stack() noexcept {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) {
        return 0;
    }
    void * lowest = nullptr;
    size_t size   = 0;
    const bool known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
    pthread_attr_destroy(&attributes);
    if (!known) {
        return 0;
    }
    const size_t reserve = size / 4 < STACK_RESERVE_BYTES ? size / 4 : STACK_RESERVE_BYTES;
    return reinterpret_cast<uintptr_t>(lowest) + reserve;
}

// Where the code may not throw, what was refused ends the process, which then says of what.
[[noreturn]] void exit_with_limit() noexcept {
    const auto broken = current != nullptr ? current->broken() : gantry::limit::none;
    _exit(GANTRY_EXIT_LIMIT + static_cast<int>(broken));
}

} // namespace

void gantry_exit_on_terminate(void) { std::set_terminate(exit_with_limit); }

namespace gantry {

const char * name(limit which) noexcept {
    switch (which) {
        case limit::time:
            return "time";
        case limit::memory:
            return "memory";
        case limit::stack:
            return "stack";
        default:
            return "";
    }
}

const char * limit_exceeded::what() const noexcept {
    switch (which) {
        case limit::time:
            return "it takes too long";
        case limit::memory:
            return "it takes too much memory";
        default:
            return "it calls itself, or nests, without end";
    }
}

guard::guard(uint64_t cpu_ms, uint64_t memory_bytes) noexcept
    : outer_(current), cpu_limit_ns_(cpu_ns() + static_cast<int64_t>(cpu_ms) * 1'000'000),
      memory_limit_(static_cast<int64_t>(memory_bytes)), stack_limit_(lowest_of_stack()) {
    current = this;
}

guard::~guard() { lift(); }

void guard::lift() noexcept {
    if (current == this) {
        current = outer_;
    }
}

int64_t guard::memory_left() noexcept {
    return current != nullptr ? current->memory_limit_ - current->live_ : INT64_MAX;
}

void guard::refuse(limit which) {
    if (broken_ == limit::none) {
        broken_ = which;
    }
    grace_calls_ = GRACE_CALLS;
    grace_bytes_ = GRACE_BYTES;
    throw limit_exceeded(broken_);
}

void guard::before(size_t size) {
    if (broken_ != limit::none) {
        // What is taken apart on the way out may allocate for it, and must not throw.
        if (std::uncaught_exceptions() > 0) {
            return;
        }
        if (grace_calls_ == 0 || static_cast<int64_t>(size) > grace_bytes_) {
            refuse(broken_);
        }
        grace_calls_ -= 1;
        grace_bytes_ -= static_cast<int64_t>(size);
        return;
    }
    const char here = 0;
    if (reinterpret_cast<uintptr_t>(&here) < stack_limit_) {
        refuse(limit::stack);
    }
    if (size > static_cast<size_t>(memory_limit_) || live_ + static_cast<int64_t>(size) > memory_limit_) {
        refuse(limit::memory);
    }
    if (until_look_ == 0 || size >= LARGE_BYTES) {
        until_look_ = CALLS_PER_LOOK;
        if (cpu_ns() > cpu_limit_ns_) {
            refuse(limit::time);
        }
    }
    until_look_ -= 1;
}

} // namespace gantry

// The program's allocator: malloc's, looked after where a guard is there. Arrays and sized deletes come here by themselves;
// aligned ones do not, and nothing that is guarded makes any.
void * operator new(size_t size) {
    if (current != nullptr) {
        current->before(size);
    }
    void * made = std::malloc(size == 0 ? 1 : size);
    if (made == nullptr) {
        // The system's limit is one as the guard's own, and told as that.
        if (current != nullptr) {
            current->refuse(gantry::limit::memory);
        }
        throw std::bad_alloc();
    }
    if (current != nullptr) {
        current->took(malloc_usable_size(made));
    }
    return made;
}

void operator delete(void * made) noexcept {
    if (current != nullptr && made != nullptr) {
        current->gave(malloc_usable_size(made));
    }
    std::free(made);
}

void operator delete(void * made, size_t) noexcept { operator delete(made); }
