// Included before every C++ source of a CPU backend; where the compiler has no AMX it is nothing.
//
// GCC's _tile_loadconfig (amxtileintrin.h, still in GCC 15) tells the optimiser that it reads 8 bytes, and the
// configuration has 64. ggml makes one on the stack (ggml-cpu/amx/mmq.cpp), so that what follows the first 8 is never
// stored: depending on what lay there the first product of a prompt ends the process with SIGSEGV (the configuration is
// refused) or SIGILL (a tile that it does not name). This one says what it reads.
// https://github.com/ggml-org/llama.cpp/pull/26954
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline __attribute__((always_inline)) void gantry_tile_loadconfig(const void *config) {
    __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])config));
}
#define _tile_loadconfig gantry_tile_loadconfig
#endif
