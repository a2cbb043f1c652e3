// Texts for callers in C, as shim.h has them.
#pragma once

#include "shim.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

namespace gantry {

// A copy of these bytes; without memory for one, an error without a text.
inline gantry_text to_text(const void * bytes, size_t len, bool error) noexcept {
    auto * data = static_cast<char *>(std::malloc(len == 0 ? 1 : len));
    if (data == nullptr) {
        return {nullptr, 0, true};
    }
    if (len > 0) {
        std::memcpy(data, bytes, len);
    }
    return {data, len, error};
}

inline gantry_text to_text(const std::string & text, bool error) noexcept { return to_text(text.data(), text.size(), error); }

inline gantry_text to_error(const char * reason) noexcept { return to_text(reason, std::strlen(reason), true); }

// Runs `f`; whatever it throws becomes an error text.
template <typename F> gantry_text guarded(F f) noexcept {
    try {
        return f();
    } catch (const std::exception & e) {
        return to_error(e.what());
    } catch (...) {
        return {nullptr, 0, true};
    }
}

} // namespace gantry
