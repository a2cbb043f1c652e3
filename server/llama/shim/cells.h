// When the cells of a KV cache take memory. Mirrored by src/shim.rs.
#pragma once

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// From now on, on this thread: whether main memory that llama.cpp zeroes as a whole is given back to the system, which hands out
// zeroed pages as they are first used, and not written. Changes nothing in a program that is linked without link_args.rs.
void gantry_zero_lazily(bool lazily);

// Bytes of main memory that a context's cells take once all of them have been used; 0 where llama.cpp cannot tell.
uint64_t gantry_cell_bytes(const struct llama_context * ctx);

// Whether this program is linked so that gantry_zero_lazily does something.
bool gantry_can_zero_lazily(void);

#ifdef __cplusplus
}
#endif
