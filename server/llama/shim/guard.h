// Bounds what one call takes of C++ code that has no bounds of its own: time, memory and stack, of the calling thread.
//
// Such code allocates at nearly every turn. While a guard is there, each `operator new` of its thread looks at what has been
// taken so far, and throws where that is too much: the code unwinds as it does from any error of its own, and says where it
// was. Not bounded: what allocates nothing (a recursion of empty frames, a search in one long string), and what must not
// throw. Whoever needs that bounded as well runs the call in a process that may be killed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace gantry {

enum class limit { none, time, memory, stack };

// Its name; empty for none.
const char * name(limit which) noexcept;

// What an allocation throws that a guard refuses.
struct limit_exceeded : std::bad_alloc {
    limit which;
    explicit limit_exceeded(limit which) : which(which) {}
    const char * what() const noexcept override;
};

// Bounds its thread from its construction to its destruction; they nest, the innermost counts.
class guard {
  public:
    guard(uint64_t cpu_ms, uint64_t memory_bytes) noexcept;
    ~guard();
    guard(const guard &)             = delete;
    guard & operator=(const guard &) = delete;

    // The first limit that was passed: the code may have caught what said so.
    limit broken() const noexcept { return broken_; }

    // Ends it early.
    void lift() noexcept;

    // What the calling thread may still take of memory.
    static int64_t memory_left() noexcept;

    // What an allocation is told to do before and after, and where it is refused.
    void before(size_t size);
    [[noreturn]] void refuse(limit which);
    void took(size_t bytes) noexcept { live_ += static_cast<int64_t>(bytes); }
    void gave(size_t bytes) noexcept { live_ -= static_cast<int64_t>(bytes); }

  private:
    guard *   outer_;
    int64_t   cpu_limit_ns_;
    int64_t   memory_limit_;
    int64_t   live_         = 0;
    int64_t   grace_bytes_  = 0;
    uint32_t  grace_calls_  = 0;
    uint32_t  until_look_   = 0;
    uintptr_t stack_limit_  = 0;
    limit     broken_       = limit::none;
};

} // namespace gantry
