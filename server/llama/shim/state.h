// The state of a part of a sequence: llama.cpp itself gives that of a whole one alone. Mirrored by src/shim.rs.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// As llama_state_seq_get_data, of the sequence's tokens at positions `from` to before `to` alone: no others are copied.
// Answers how many bytes it wrote; 0 where there is no such state, or no room for it.
size_t gantry_state_range(struct llama_context * ctx, llama_seq_id seq_id, llama_pos from, llama_pos to, uint8_t * dst,
                          size_t size);

#ifdef __cplusplus
}
#endif
